//! Keeping the pages of a file in memory from being swapped out.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::{self, NonNull};

use super::map::{HUGE_PAGE, PAGE};

/// A private read-only map of a whole file whose pages are locked: they stay in memory as long as it lives.
///
/// Private, because kernels before Linux 6.7 refuse a shared map of a sealed memfd even for reading. What is
/// only read is not copied, so the locked pages are the file's own.
#[derive(Debug)]
pub struct LockedMap {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address range that this value alone unmaps and that nobody reads or writes through it; nothing in
// it is tied to a thread.
unsafe impl Send for LockedMap {}
// SAFETY: a shared LockedMap gives nothing but a number.
unsafe impl Sync for LockedMap {}

impl LockedMap {
    /// Maps and locks the first `bytes` of `file`, not 0, which must not become shorter meanwhile. Every page is
    /// there when this returns.
    ///
    /// The address is aligned to a huge page where the file has one, so that a huge page is one entry of the
    /// page table. It is one mapping of the process, and counts as `bytes`, rounded up to pages, of locked
    /// memory.
    ///
    /// An error of EPERM, ENOMEM or EAGAIN is the limit (RLIMIT_MEMLOCK), or means that memory has run out.
    pub fn new(file: impl AsFd, bytes: usize) -> io::Result<LockedMap> {
        assert!(bytes > 0);
        let bytes = bytes
            .checked_next_multiple_of(PAGE)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let spare = if bytes >= HUGE_PAGE { HUGE_PAGE } else { 0 };
        let reserved_bytes =
            bytes.checked_add(spare).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let reserved = reserve(reserved_bytes)?;
        let before = if spare > 0 { reserved.as_ptr().align_offset(HUGE_PAGE) } else { 0 };
        // SAFETY: `before` is less than a huge page, by which the reservation is longer where it is not 0.
        let start = unsafe { reserved.add(before) };
        // SAFETY: both ranges lie inside the reservation made above, which holds nothing: what is left of it is
        // [start, start + bytes), which the value below owns.
        unsafe {
            unmap(reserved, before);
            unmap(start.add(bytes), spare - before);
        }
        let map = LockedMap { start, bytes };
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
        // SAFETY: the range is what `map` owns of the reservation, so that MAP_FIXED replaces no mapping of
        // anybody else. It is never read through this map, so that a file that changes does no harm.
        let mapped = unsafe {
            libc::mmap(start.as_ptr().cast(), bytes, libc::PROT_READ, flags, file.as_fd().as_raw_fd(), 0)
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: locking changes neither content nor protection of the mapping made above.
        match unsafe { libc::mlock(start.as_ptr().cast(), bytes) } {
            0 => Ok(map),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Bytes locked, in whole pages.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for LockedMap {
    fn drop(&mut self) {
        // SAFETY: exactly the range that this value owns, into which nobody has a reference.
        unsafe { unmap(self.start, self.bytes) };
    }
}

/// Whether this process may lock `bytes` more. The kernel is asked rather than limits and capabilities read,
/// which a user namespace makes mean something else. Nothing is locked afterwards.
pub fn may_lock(bytes: usize) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let start = reserve(bytes)?;
    // SAFETY: the range is the reservation made above. Locked on fault it takes no page: nothing can touch it.
    let result = unsafe { libc::mlock2(start.as_ptr().cast(), bytes, libc::MLOCK_ONFAULT) };
    let refused = io::Error::last_os_error();
    // SAFETY: exactly the reservation made above, to which nothing refers.
    unsafe { unmap(start, bytes) };
    if result == 0 { Ok(()) } else { Err(refused) }
}

/// Addresses of the kernel's choice that nobody can touch and that take no memory.
fn reserve(bytes: usize) -> io::Result<NonNull<u8>> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(NonNull::new(start.cast()).expect("mmap does not return null"))
}

/// Unmaps a range, which may be empty.
///
/// # Safety
///
/// The caller owns the mapping of the whole range, and nothing refers to it.
unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
    if bytes > 0 {
        // SAFETY: as the caller promises.
        let result = unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
        assert_eq!(result, 0, "unmapping one's own mapping cannot fail");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// `VmLck` of this process in bytes.
    fn locked() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    #[test]
    fn a_locked_file_counts_as_long_as_it_is_locked() {
        let mut file = super::super::memfd::create("iloader:test").unwrap();
        let bytes = HUGE_PAGE + 5;
        file.write_all(&vec![3; bytes]).unwrap();
        if let Err(refused) = may_lock(bytes) {
            return crate::skipped(format!("nothing can be locked here: {refused}"));
        }
        let before = locked();
        let map = LockedMap::new(&file, bytes).unwrap();
        assert_eq!(map.bytes(), HUGE_PAGE + PAGE);
        assert!((map.start.as_ptr() as usize).is_multiple_of(HUGE_PAGE));
        assert_eq!(locked() - before, map.bytes());
        let small = LockedMap::new(&file, 7).unwrap();
        assert_eq!(locked() - before, map.bytes() + PAGE);
        drop(map);
        drop(small);
        assert_eq!(locked(), before);
    }

    #[test]
    fn asking_locks_nothing() {
        let before = locked();
        may_lock(0).unwrap();
        let _ = may_lock(PAGE);
        assert_eq!(locked(), before);
    }
}
