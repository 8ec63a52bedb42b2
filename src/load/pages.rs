//! The huge-page policy: a huge page for every extent that lies wholly inside the file, just ahead of the
//! reads, and 4 KiB pages for a while where the kernel has none.

use super::placement::{Placement, Turns};
use crate::sys::map::Window;

/// Failures in a row after which the kernel is taken to have no huge pages for now: each costs a search.
const FAILURES_MAX: u32 = 4;

/// Extents that then go without trying; doubled each time it happens again, up to the second figure.
const SKIP_FIRST: u32 = 32;
const SKIP_MAX: u32 = 1024;

/// One worker's memory of how it went.
#[derive(Debug)]
pub(super) struct Pages {
    failures: u32,
    skip: u32,
    skip_next: u32,
    turns: Turns,
}

impl Pages {
    pub(super) fn new(placement: &Placement) -> Pages {
        Pages { failures: 0, skip: 0, skip_next: SKIP_FIRST, turns: Turns::of(placement) }
    }

    /// Asks for a huge page under the extent at `offset` of `window`, which holds no data yet. Returns
    /// whether it has one now.
    pub(super) fn prepare(&mut self, window: &mut Window, offset: u64) -> bool {
        self.turns.go_on();
        self.try_extent(|| window.collapse_extent(offset as usize).is_ok())
    }

    fn try_extent(&mut self, collapse: impl FnOnce() -> bool) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        if collapse() {
            (self.failures, self.skip_next) = (0, SKIP_FIRST);
            return true;
        }
        self.failures += 1;
        if self.failures >= FAILURES_MAX {
            self.failures = 0;
            self.skip = self.skip_next;
            self.skip_next = (self.skip_next * 2).min(SKIP_MAX);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_gives_up_for_a_while_and_tries_again() {
        let mut pages = Pages::new(&Placement::Anywhere);
        let mut tried_at = Vec::new();
        for extent in 0..200 {
            pages.try_extent(|| {
                tried_at.push(extent);
                false
            });
        }
        assert_eq!(tried_at[..8], [0, 1, 2, 3, 36, 37, 38, 39]);
        assert_eq!(tried_at[8], 40 + 64);
        while !pages.try_extent(|| true) {}
        assert!(pages.try_extent(|| true), "a success ends the caution");
    }
}
