//! Mapped memory that is owned, and exclusive slices of it.
//!
//! A [`Window`] is an owned, exclusive slice of a mapping. It can be split and joined but not cloned, so
//! that of every byte of a mapping there is at most one owner: a buffer that the kernel writes to is
//! moved into the engine with the read and comes back with the completion. No two owners can alias, and
//! the mapping lives until its last window is gone.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

pub(super) const HUGE_PAGE: usize = 2 << 20;
pub(super) const PAGE: usize = 4096;

/// A private reservation of addresses with a readable and writable mapping inside it, at an address that
/// is a multiple of a huge page. Unmapped on drop.
#[derive(Debug)]
struct Region {
    reserved: NonNull<u8>,
    reserved_bytes: usize,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a Region is an address range that this value alone unmaps; nothing in it is tied to a thread.
// Its bytes are reached through Windows only, which are disjoint.
unsafe impl Send for Region {}
// SAFETY: a shared Region hands out nothing but its addresses; see above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `bytes` of `file` shared, or of anonymous memory without a file.
    fn map(file: Option<&File>, bytes: usize) -> io::Result<Region> {
        assert!(bytes > 0);
        let rounded =
            bytes.checked_add(PAGE - 1).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let rounded = rounded & !(PAGE - 1);
        let reserved_bytes =
            rounded.checked_add(HUGE_PAGE).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let no_access = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let reserved =
            unsafe { libc::mmap(std::ptr::null_mut(), reserved_bytes, libc::PROT_NONE, no_access, -1, 0) };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let reserved = NonNull::new(reserved.cast::<u8>()).expect("mmap does not return null");
        let skip = reserved.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: skip < HUGE_PAGE, and the reservation is a huge page longer than the mapping.
        let start = unsafe { reserved.add(skip) };
        let region = Region { reserved, reserved_bytes, start, bytes: rounded };
        let (flags, descriptor) = match file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        // SAFETY: [start, start + rounded) lies inside the reservation made above, which holds nothing
        // yet and which `region` owns, so that MAP_FIXED replaces no mapping of anybody else.
        let mapped = unsafe {
            libc::mmap(
                start.as_ptr().cast(),
                rounded,
                libc::PROT_READ | libc::PROT_WRITE,
                flags | libc::MAP_FIXED,
                descriptor,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(region)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range is the reservation that this value made and alone owns; every Window holds an
        // Arc of it, so none is left.
        let result = unsafe { libc::munmap(self.reserved.as_ptr().cast(), self.reserved_bytes) };
        assert_eq!(result, 0, "unmapping one's own reservation cannot fail");
    }
}

/// A mapping of which windows are out. It is unmapped by [`Mapping::unmap`] once all are back.
#[derive(Debug)]
pub struct Mapping {
    region: Arc<Region>,
}

impl Mapping {
    /// Maps `bytes` of `file` shared and writable, from its start, at an address aligned to a huge page.
    /// The last page is mapped whole. The window covers all of it.
    ///
    /// The file must be at least `bytes` long and not be truncated while mapped: touching a page behind
    /// its end is SIGBUS.
    pub fn shared(file: &File, bytes: usize) -> io::Result<(Mapping, Window)> {
        Ok(Mapping::with_window(Region::map(Some(file), bytes)?))
    }

    /// Maps `bytes` of zeroed private memory, aligned to a huge page and advised to use huge pages. It
    /// is unmapped when its last window is dropped.
    pub fn anonymous(bytes: usize) -> io::Result<Window> {
        let (_, window) = Mapping::with_window(Region::map(None, bytes)?);
        window.advise_huge();
        Ok(window)
    }

    fn with_window(region: Region) -> (Mapping, Window) {
        let region = Arc::new(region);
        let window = Window { start: 0, bytes: region.bytes, region: Arc::clone(&region) };
        (Mapping { region }, window)
    }

    /// Unmaps, if every window is back (dropped). Gives the mapping back where one is still out.
    pub fn unmap(self) -> Result<(), Mapping> {
        match Arc::try_unwrap(self.region) {
            Ok(region) => {
                drop(region);
                Ok(())
            }
            Err(region) => Err(Mapping { region }),
        }
    }
}

/// An exclusive, owned slice of a mapping.
#[derive(Debug)]
pub struct Window {
    region: Arc<Region>,
    start: usize,
    bytes: usize,
}

impl Window {
    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Where it begins in its mapping.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Cuts off and returns the first `bytes`; `self` keeps the rest.
    #[must_use]
    pub fn split_to(&mut self, bytes: usize) -> Window {
        assert!(bytes <= self.bytes, "a window of {} bytes has no first {bytes}", self.bytes);
        let head = Window { region: Arc::clone(&self.region), start: self.start, bytes };
        self.start += bytes;
        self.bytes -= bytes;
        head
    }

    /// Puts back together what `split_to` cut: `next` must begin where `self` ends.
    pub fn join(&mut self, next: Window) {
        assert!(
            Arc::ptr_eq(&self.region, &next.region) && self.start + self.bytes == next.start,
            "only neighbours can be joined"
        );
        self.bytes += next.bytes;
    }

    /// The address of its first byte. Valid as long as the window is owned.
    pub(super) fn address(&self) -> *mut u8 {
        // SAFETY: start is inside the region: windows are made by splitting one that covers it.
        unsafe { self.region.start.add(self.start) }.as_ptr()
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is mapped readable as long as the Arc is held, and no other window overlaps
        // it. The kernel writes to it only while the window is owned by an engine, not by us.
        unsafe { std::slice::from_raw_parts(self.address(), self.bytes) }
    }

    /// Its bytes, to change.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as for `as_slice`, mapped writable, and the exclusive borrow is of the only owner.
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.bytes) }
    }

    /// Asks for a huge page under each whole 2 MiB extent at `offset`, whatever the system's setting for
    /// shared memory: writes a zero into it (an extent without any page cannot be collapsed), then
    /// collapses it with `MADV_COLLAPSE` (Linux 6.1). The extent must not hold data yet.
    pub fn collapse_extent(&mut self, offset: usize) -> io::Result<()> {
        assert!((self.start + offset).is_multiple_of(HUGE_PAGE) && offset + HUGE_PAGE <= self.bytes);
        self.as_mut_slice()[offset] = 0;
        // SAFETY: the extent lies inside this window, which is exclusively borrowed; collapsing replaces
        // its pages but not its content.
        let result =
            unsafe { libc::madvise(self.address().add(offset).cast(), HUGE_PAGE, libc::MADV_COLLAPSE) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Asks for huge pages at the first touch, where the system's settings allow them. Only advice.
    pub fn advise_huge(&self) {
        // SAFETY: advice on a range that this window owns; MADV_HUGEPAGE changes no content. A kernel
        // without huge pages answers EINVAL, which changes nothing for us.
        let _ = unsafe { libc::madvise(self.address().cast(), self.bytes, libc::MADV_HUGEPAGE) };
    }
}

/// A file as a stock loader maps it: private, read-only, at an address of the kernel's choice. For
/// measuring and checking what readers see.
#[derive(Debug)]
pub struct ReaderMap {
    start: NonNull<u8>,
    bytes: usize,
}

impl ReaderMap {
    /// Maps the first `bytes` of `file`, whose last page may end behind the end of the file.
    pub fn new(file: &File, bytes: usize) -> io::Result<ReaderMap> {
        let flags = libc::MAP_PRIVATE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(ReaderMap { start: NonNull::new(start.cast()).expect("mmap does not return null"), bytes })
    }

    /// Copies from `offset` on to the whole of `to`. Never a reference into the map: a file that is not
    /// sealed may change meanwhile (and one that is truncated ends this process with SIGBUS).
    pub fn copy(&self, offset: usize, to: &mut [u8]) {
        assert!(offset.checked_add(to.len()).is_some_and(|end| end <= self.bytes));
        // SAFETY: the source range lies in the mapping that this value owns, `to` is exclusively borrowed,
        // and the two do not overlap: nothing of ours lives in the mapping.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr().add(offset), to.as_mut_ptr(), to.len()) }
    }

    /// Where the kernel put it.
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }
}

impl Drop for ReaderMap {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that this value made, into which no reference is handed out.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_split_and_join_without_overlap() {
        let mut rest = Mapping::anonymous(3 * HUGE_PAGE).unwrap();
        assert!(rest.start.is_multiple_of(HUGE_PAGE));
        let mut first = rest.split_to(10);
        let mut second = rest.split_to(PAGE);
        first.as_mut_slice().fill(1);
        second.as_mut_slice().fill(2);
        first.join(second);
        assert_eq!(first.len(), 10 + PAGE);
        assert_eq!(first.as_slice()[9..11], [1, 2]);
        assert_eq!(rest.len(), 3 * HUGE_PAGE - 10 - PAGE);
        assert_eq!(rest.as_slice()[0], 0);
    }

    #[test]
    #[should_panic(expected = "only neighbours")]
    fn strangers_do_not_join() {
        let mut one = Mapping::anonymous(PAGE).unwrap();
        one.join(Mapping::anonymous(PAGE).unwrap());
    }

    #[test]
    fn a_mapping_is_unmapped_only_when_all_windows_are_back() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * PAGE as u64).unwrap();
        let (mapping, mut window) = Mapping::shared(&file, 2 * PAGE).unwrap();
        window.as_mut_slice()[PAGE] = 7;
        let half = window.split_to(PAGE);
        drop(window);
        let mapping = mapping.unmap().unwrap_err();
        drop(half);
        mapping.unmap().unwrap();
        let mut byte = [0];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, PAGE as u64).unwrap();
        assert_eq!(byte, [7]);
    }
}
