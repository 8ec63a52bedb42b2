//! May it: what a build takes of the disk and of memory, compared with what there is, before it takes any.

use std::path::Path;

use super::writer::FILES_OPEN_MAX;
use crate::budget::{limits, meminfo};
use crate::error::{Error, Kind, Result, shown};
use crate::load;
use crate::load::buffers::{Pool, pool_bytes};
use crate::registry::Name;
use crate::units::{ByteSize, HUGE_PAGE_BYTES, round_down, round_up};

/// What a generation takes beside its files: directories, manifest, journal.
const OWN_DISK_BYTES: u64 = 1 << 20;
const OWN_INODES: u64 = 16;

/// Memory that is left to others.
const RESERVE_BYTES: u64 = 64 << 20;

/// Refuses `bytes` and `files` more under `root` where its file system has less.
///
/// # Errors
///
/// [`Kind::NoRoom`] with what is needed and what there is.
pub(super) fn check_disk(root: &Path, name: &Name, bytes: u64, files: u64) -> Result<()> {
    let about = rustix::fs::statvfs(root)
        .map_err(|errno| Error::io("ask for the free space of", root, &errno.into()))?;
    let available = about.f_bavail.saturating_mul(about.f_frsize);
    let needed = if bytes > 0 { bytes.saturating_add(OWN_DISK_BYTES) } else { 0 };
    if needed > available {
        let message = format!(
            "cannot copy '{name}': needs {needed} bytes ({}) of disk space in {}, but {available} bytes ({}) are \
             available",
            ByteSize(needed),
            shown(root),
            ByteSize(available)
        );
        return Err(Error::new(Kind::NoRoom, message).hint(
            "free some space (iloader cache-list, iloader gc), select fewer files (--pattern), or choose another \
             disk (--cache-root)",
        ));
    }
    // Some file systems make inodes as they are needed, and say that there are none.
    let inodes = files.saturating_add(OWN_INODES);
    if about.f_files > 0 && inodes > about.f_favail {
        let message = format!(
            "cannot copy '{name}': needs {inodes} inodes in {}, but {} are available",
            shown(root),
            about.f_favail
        );
        return Err(Error::new(Kind::NoRoom, message)
            .hint("remove some files there, or choose another disk (--cache-root)"));
    }
    Ok(())
}

/// Raises the limit of open files to what a copy of `files` files may have open at one time.
///
/// # Errors
///
/// [`Kind::NoRoom`] where the hard limit is lower.
pub(super) fn check_descriptors(workers: usize, depth: usize, files: usize) -> Result<()> {
    let under_way = files.min(workers * load::files_under_way(depth));
    // Of each file that is read the source, perhaps twice; the copies; engines and what the process has open. Workers
    // look for a place before they take it, so each may be one too many.
    let needed = 2 * under_way + files.min(FILES_OPEN_MAX) + 2 * workers + 64;
    limits::raise_descriptors(needed as u64)
}

/// The buffers of a copy, how many workers they are for, and the length of a chunk: less than asked for where memory
/// is short.
///
/// # Errors
///
/// [`Kind::NoRoom`] where the smallest ones do not fit.
pub(super) fn buffers(workers: usize, chunk_bytes: u64, longest: u64) -> Result<(Pool, usize, u64)> {
    let available = meminfo::available()?.unpromised_bytes().saturating_sub(RESERVE_BYTES);
    let wanted = round_up(chunk_bytes.clamp(1, longest.max(1)), HUGE_PAGE_BYTES);
    match fitting(workers, wanted, available) {
        Some((workers, chunk_bytes)) => {
            limits::check_memory(pool_bytes(workers, chunk_bytes), 0)?;
            Ok((Pool::new(workers, chunk_bytes), workers, chunk_bytes))
        }
        None => {
            let least = pool_bytes(1, HUGE_PAGE_BYTES);
            let message = format!(
                "needs {} of memory for buffers at the least, but {} is available after {} that is left to others",
                ByteSize(least),
                ByteSize(available),
                ByteSize(RESERVE_BYTES)
            );
            Err(Error::new(Kind::NoRoom, message)
                .hint("stop a cache (iloader list), or raise the memory limit"))
        }
    }
}

/// As many workers, up to `workers`, and chunks as long, up to `chunk_bytes`, as fit into `available`.
fn fitting(workers: usize, chunk_bytes: u64, available: u64) -> Option<(usize, u64)> {
    let of_one = pool_bytes(1, chunk_bytes);
    let fits = usize::try_from(available / of_one).unwrap_or(usize::MAX).min(workers.max(1));
    if fits > 0 {
        return Some((fits, chunk_bytes));
    }
    let buffers = pool_bytes(1, HUGE_PAGE_BYTES) / HUGE_PAGE_BYTES;
    let chunk_bytes = round_down(available / buffers, HUGE_PAGE_BYTES);
    (chunk_bytes > 0).then_some((1, chunk_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_shrink_to_what_is_available() {
        let chunk = 64 << 20;
        assert_eq!(fitting(4, chunk, 1 << 30), Some((4, chunk)));
        assert_eq!(fitting(4, chunk, 3 * (128 << 20) + 1), Some((3, chunk)));
        assert_eq!(fitting(4, chunk, 100 << 20), Some((1, 50 << 20)));
        assert_eq!(fitting(4, chunk, 4 << 20), Some((1, 2 << 20)));
        assert_eq!(fitting(4, chunk, (4 << 20) - 1), None);
    }

    #[test]
    fn a_disk_that_is_too_small_is_told_with_both_figures() {
        let root = tempfile::tempdir().unwrap();
        let name = "m".parse().unwrap();
        check_disk(root.path(), &name, 1, 1).unwrap();
        let error = check_disk(root.path(), &name, u64::MAX, 1).unwrap_err();
        assert_eq!(error.kind(), Kind::NoRoom);
        assert!(error.message().contains("18446744073709551615 bytes (16384 PiB)"), "{error}");
        assert!(error.message().contains("are available"), "{error}");
        assert!(error.hint_text().is_some_and(|hint| hint.contains("--cache-root")));
    }
}
