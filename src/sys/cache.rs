//! How much of a file is in the page cache, and how much of a file in memory is swapped out.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// What `cachestat(2)` fills in; the layout of `struct cachestat` in the kernel's `mman.h`.
#[repr(C)]
#[derive(Default)]
struct Counts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// `struct cachestat_range` of the same header.
#[repr(C)]
struct Range {
    offset: u64,
    bytes: u64,
}

/// The number is the same on every architecture: it was added after the tables were unified.
const SYS_CACHESTAT: libc::c_long = 451;

/// Pages of 4 KiB of `file` in `[offset, offset + bytes)` that are in the page cache. `bytes` 0 means to
/// the end of the file. Needs Linux 6.5 (else ENOSYS), and on new kernels a file that the caller owns or
/// may write (else EPERM).
pub fn cached_pages(file: &File, offset: u64, bytes: u64) -> io::Result<u64> {
    counts(file, offset, bytes).map(|counts| counts.cached)
}

/// Pages of `file` that were changed in the page cache and are not on the device yet. As
/// [`cached_pages`] otherwise.
pub fn unwritten_pages(file: &File) -> io::Result<u64> {
    counts(file, 0, 0).map(|counts| counts.dirty + counts.writeback)
}

/// Pages of 4 KiB of a file in memory (memfd, tmpfs) of `bytes` that are swapped out, where every page of it
/// was written to. The file must be the caller's own.
///
/// For such a file `cachestat` counts as evicted what has an entry of the swap instead of a page. Kernels
/// without it (before Linux 6.5) tell by `mincore` which pages are there.
pub fn swapped_pages(file: &File, bytes: u64) -> io::Result<u64> {
    if bytes == 0 {
        return Ok(0);
    }
    match counts(file, 0, bytes) {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
            let length = usize::try_from(bytes).map_err(io::Error::other)?;
            Ok(bytes.div_ceil(4096).saturating_sub(resident_pages(file, 0, length)?))
        }
        counts => counts.map(|counts| counts.evicted),
    }
}

fn counts(file: &File, offset: u64, bytes: u64) -> io::Result<Counts> {
    let mut counts = Counts::default();
    let range = Range { offset, bytes };
    // SAFETY: the kernel reads `range` and writes `counts`, both of the layout it expects and alive for
    // the whole call.
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut counts, 0u32) };
    if result == 0 { Ok(counts) } else { Err(io::Error::last_os_error()) }
}

/// The same by `mincore(2)`, for older kernels, of a range that starts on a page. To a caller who neither
/// owns nor may write the file the kernel shows every page as present: ask only about one's own.
pub fn resident_pages(file: &File, offset: u64, bytes: usize) -> io::Result<u64> {
    assert!(offset.is_multiple_of(4096) && bytes > 0);
    // SAFETY: a new mapping at an address of the kernel's choice; it is never read, and unmapped below.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            offset.cast_signed(),
        )
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let mut present = vec![0u8; bytes.div_ceil(4096)];
    // SAFETY: the vector has one byte for each page of the range, which is the mapping made above.
    let result = unsafe { libc::mincore(address, bytes, present.as_mut_ptr()) };
    let failure = io::Error::last_os_error();
    // SAFETY: exactly the mapping made above, to which nothing refers.
    unsafe { libc::munmap(address, bytes) };
    if result != 0 {
        return Err(failure);
    }
    Ok(present.iter().filter(|byte| **byte & 1 == 1).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_was_just_written_is_in_the_page_cache() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 3 * 4096 + 1]).unwrap();
        assert_eq!(resident_pages(&file, 0, 3 * 4096 + 1).unwrap(), 4);
        match cached_pages(&file, 0, 0) {
            Ok(pages) => {
                assert_eq!(pages, 4);
                assert_eq!(cached_pages(&file, 4096, 8192).unwrap(), 2);
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                crate::skipped("this kernel has no cachestat (Linux 6.5)");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
