//! How much of a cache is swapped out.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::Stat;

use crate::budget::swap;
use crate::sys::cache;
use crate::units::PAGE_BYTES;

/// Adds up what of the files of a view is swapped out, each segment once.
#[derive(Debug)]
pub(super) struct Swapped {
    is_swap_on: bool,
    counted: HashSet<u64>,
    /// `None` once a file could not be looked at: a part would be taken for the whole.
    bytes: Option<u64>,
}

impl Swapped {
    /// Nothing was counted yet. Where no swap is on, nothing is asked of the kernel either.
    pub(super) fn new() -> Swapped {
        Swapped { is_swap_on: swap::is_on(), counted: HashSet::new(), bytes: Some(0) }
    }

    /// Counts one file of the view.
    pub(super) fn count(&mut self, file: OwnedFd, stat: &Stat) {
        // All segments of a cache are on one device.
        if !self.is_swap_on || !self.counted.insert(stat.st_ino) {
            return;
        }
        let pages = cache::swapped_pages(&File::from(file), stat.st_size.cast_unsigned()).ok();
        self.bytes = self.bytes.zip(pages).map(|(bytes, pages)| bytes + pages * PAGE_BYTES);
    }

    /// The sum in bytes; `None` where the kernel did not tell of every file.
    pub(super) fn bytes(&self) -> Option<u64> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_was_just_written_is_not_swapped_out() {
        let mut file = File::from(
            rustix::fs::memfd_create("iloader:test", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd"),
        );
        file.write_all(&[1; 5000]).expect("written");
        let stat = rustix::fs::fstat(&file).expect("a stat");
        let mut swapped = Swapped { is_swap_on: true, counted: HashSet::new(), bytes: Some(0) };
        swapped.count(file.try_clone().expect("a copy").into(), &stat);
        swapped.count(file.into(), &stat);
        assert_eq!((swapped.bytes(), swapped.counted.len()), (Some(0), 1));
        // What cannot be looked at is not passed over.
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
        let unreadable = rustix::fs::open("/", flags, rustix::fs::Mode::empty()).expect("opened");
        let mut stat = stat;
        stat.st_ino += 1;
        swapped.count(unreadable, &stat);
        assert_eq!(swapped.bytes(), None);
    }
}
