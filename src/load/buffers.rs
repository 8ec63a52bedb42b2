//! The memory of what only passes through: windows that are filled, used and filled again.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::{Sink, Vessel};
use crate::error::{Error, Result};
use crate::manifest::Digest;
use crate::plan::{Chunk, SMALL_BYTES_MAX};
use crate::sys::map::{Mapping, Window};
use crate::sys::memfd;
use crate::units::{HUGE_PAGE_BYTES, PAGE_BYTES, round_up};

/// Buffers of one chunk for each worker: one that it fills, and one that is hashed or written meanwhile.
const BUFFERS_OF_WORKER: usize = 2;

/// How long [`Pool::wait`] waits at the most: whoever waits looks between whether there is still something to wait for.
const WAIT_MAX: Duration = Duration::from_millis(50);

/// The memory that a [`Pool`] of this size takes at the most, in bytes.
pub fn pool_bytes(workers: usize, chunk_bytes: u64) -> u64 {
    let buffer = round_up(chunk_bytes.max(1), HUGE_PAGE_BYTES);
    buffer.saturating_mul((workers.max(1) * BUFFERS_OF_WORKER) as u64)
}

/// Two chunks of memory for each worker, lent in windows. Used by several threads at once.
///
/// It is one memory file, so long as [`pool_bytes`] says, whose pages are taken when they are lent for the first time,
/// and given back with the pool and the last of its windows. Windows of large files are cut from its start, each at a
/// huge page; those of small files from its end, closely packed. What is given back joins its neighbours, and what
/// begins lowest is lent first (highest of small ones), so that few pages are touched where few are needed.
#[derive(Debug)]
pub struct Pool {
    bytes: usize,
    area: Mutex<Area>,
    came_back: Condvar,
}

#[derive(Debug, Default)]
struct Area {
    /// The windows that are not lent, by where they begin. No two of them are neighbours.
    free: BTreeMap<usize, Window>,
    /// The memory file is there.
    is_made: bool,
    /// The extents that a huge page was asked for.
    is_prepared: Vec<bool>,
    /// Something came back since `take` had nothing.
    has_come_back: bool,
}

impl Pool {
    /// A pool for so many workers, which take files in chunks of this length (rounded up as [`crate::plan::lay_out`]
    /// does). Nothing is allocated yet.
    pub fn new(workers: usize, chunk_bytes: u64) -> Pool {
        let bytes = usize::try_from(pool_bytes(workers, chunk_bytes)).unwrap_or(usize::MAX);
        Pool { bytes, area: Mutex::default(), came_back: Condvar::new() }
    }

    /// A window of `bytes`, rounded up to whole pages: not longer than a chunk. What it holds is anything. `None`:
    /// not now.
    ///
    /// # Errors
    ///
    /// The memory file cannot be made: of kind [`crate::error::Kind::NoRoom`], or what the kernel refuses.
    pub fn take(&self, bytes: usize) -> Result<Option<Window>> {
        let bytes = round_up(bytes as u64, PAGE_BYTES) as usize;
        assert!(0 < bytes && bytes <= self.bytes, "a pool of {} bytes has no {bytes}", self.bytes);
        let (window, unprepared) = {
            let mut area = self.area();
            if !area.is_made {
                let whole = make(self.bytes)?;
                area.is_prepared = vec![false; self.bytes / HUGE_PAGE_BYTES as usize];
                area.free.insert(0, whole);
                area.is_made = true;
            }
            let is_small = bytes as u64 <= SMALL_BYTES_MAX;
            let window = if is_small { area.cut_from_end(bytes) } else { area.cut_from_start(bytes) };
            let Some(window) = window else {
                area.has_come_back = false;
                return Ok(None);
            };
            let unprepared = area.unprepared_extents(&window);
            (window, unprepared)
        };
        Ok(Some(prepared(window, unprepared)))
    }

    /// Takes back what [`Pool::take`] gave.
    pub fn give(&self, window: Window) {
        if window.is_empty() {
            return;
        }
        let mut area = self.area();
        area.put(window);
        area.has_come_back = true;
        self.came_back.notify_all();
    }

    /// Waits until something has come back since [`Pool::take`] last had nothing, or for a moment.
    pub fn wait(&self) {
        let area = self.area();
        let has_not = |area: &mut Area| !area.has_come_back;
        drop(self.came_back.wait_timeout_while(area, WAIT_MAX, has_not));
    }

    fn area(&self) -> MutexGuard<'_, Area> {
        self.area.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The memory of a pool. Where the length of a file is limited (RLIMIT_FSIZE) it is no file.
fn make(bytes: usize) -> Result<Window> {
    let file = || {
        let file = memfd::create("iloader:buffers")?;
        file.set_len(bytes as u64)?;
        Mapping::shared(&file, bytes).map(|(_, window)| window)
    };
    let window = match file() {
        Err(cause) if cause.raw_os_error() == Some(libc::EFBIG) => Mapping::anonymous(bytes),
        other => other,
    };
    window.map_err(|cause| Error::os(&format!("map {bytes} bytes of buffers"), &cause))
}

/// Gives huge pages to extents of `window`, by where they begin in it, as far as the kernel has any.
fn prepared(mut window: Window, extents: Vec<usize>) -> Window {
    for extent in extents {
        // A failure costs a search through the memory. With small pages it is as right.
        if window.collapse_extent(extent).is_err() {
            break;
        }
    }
    window
}

impl Area {
    /// The lowest place for `bytes` that begins at a huge page.
    fn cut_from_start(&mut self, bytes: usize) -> Option<Window> {
        let before =
            |window: &Window| window.start().next_multiple_of(HUGE_PAGE_BYTES as usize) - window.start();
        let (&start, _) = self.free.iter().find(|(_, window)| before(window) + bytes <= window.len())?;
        let mut rest = self.free.remove(&start)?;
        let head = rest.split_to(before(&rest));
        let found = rest.split_to(bytes);
        self.keep(head);
        self.keep(rest);
        Some(found)
    }

    /// The highest place for `bytes`.
    fn cut_from_end(&mut self, bytes: usize) -> Option<Window> {
        let (&start, _) = self.free.iter().rev().find(|(_, window)| bytes <= window.len())?;
        let mut found = self.free.remove(&start)?;
        let head = found.split_to(found.len() - bytes);
        self.keep(head);
        Some(found)
    }

    /// Keeps a window that has no free neighbour.
    fn keep(&mut self, window: Window) {
        if !window.is_empty() {
            self.free.insert(window.start(), window);
        }
    }

    /// Keeps a window, joined with its free neighbours.
    fn put(&mut self, mut window: Window) {
        if let Some(next) = self.free.remove(&(window.start() + window.len())) {
            window.join(next);
        }
        let before = self.free.range(..window.start()).next_back();
        if let Some((&start, _)) = before.filter(|(start, before)| **start + before.len() == window.start())
            && let Some(mut before) = self.free.remove(&start)
        {
            before.join(window);
            window = before;
        }
        self.keep(window);
    }

    /// The whole extents of a window that is lent, by where they begin in it, that no huge page was asked for yet.
    fn unprepared_extents(&mut self, window: &Window) -> Vec<usize> {
        let huge = HUGE_PAGE_BYTES as usize;
        let (first, end) = (window.start().div_ceil(huge), (window.start() + window.len()) / huge);
        let fresh = (first..end).filter(|&extent| !std::mem::replace(&mut self.is_prepared[extent], true));
        fresh.map(|extent| extent * huge - window.start()).collect()
    }
}

/// A sink of bytes that only pass through, to be hashed: what is full goes back to the pool at once.
pub struct Passing<'a> {
    /// Where the windows are from.
    pub pool: &'a Pool,
    /// Told of each digest: see [`Sink::digested`].
    pub digested: &'a (dyn Fn(usize, Digest) -> Result<()> + Sync),
}

impl Sink for Passing<'_> {
    fn open(&self, chunk: &Chunk) -> Result<Option<Vessel>> {
        let window = self.pool.take(chunk.bytes as usize)?;
        Ok(window.map(|window| Vessel { window, collapse: false }))
    }

    fn wait_for_room(&self) {
        self.pool.wait();
    }

    fn filled(&self, _chunk: &Chunk, window: Window, _huge_bytes: u64) -> Result<()> {
        self.pool.give(window);
        Ok(())
    }

    fn digested(&self, target: usize, digest: Digest) -> Result<()> {
        (self.digested)(target, digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Instant;

    const HUGE: usize = HUGE_PAGE_BYTES as usize;

    #[test]
    fn a_pool_lends_two_chunks_for_each_worker() {
        let pool = Pool::new(2, HUGE_PAGE_BYTES + 1);
        assert_eq!(pool_bytes(2, HUGE_PAGE_BYTES + 1), 4 * 2 * HUGE_PAGE_BYTES);
        let lent: Vec<Window> = (0..4).map(|_| pool.take(2 * HUGE).unwrap().unwrap()).collect();
        assert!(lent.iter().map(Window::start).eq((0..4).map(|index| index * 2 * HUGE)));
        assert!(pool.take(1).unwrap().is_none());
        let started = Instant::now();
        pool.wait();
        assert!(started.elapsed() >= WAIT_MAX, "nothing came back");
        lent.into_iter().for_each(|window| pool.give(window));
        let started = Instant::now();
        pool.wait();
        assert!(started.elapsed() < WAIT_MAX, "something had come back");
        assert_eq!(pool.take(8 * HUGE).unwrap().unwrap().len(), 8 * HUGE, "what came back is joined");
    }

    #[test]
    fn whoever_waits_is_woken() {
        let pool = Pool::new(1, 1);
        let all = pool.take(2 * HUGE).unwrap().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let window = loop {
                    match pool.take(HUGE).unwrap() {
                        Some(window) => break window,
                        None => pool.wait(),
                    }
                };
                assert_eq!(window.len(), HUGE);
            });
            pool.give(all);
            waiting.join().unwrap();
        });
    }

    #[test]
    fn small_files_leave_large_ones_their_place() {
        let pool = Pool::new(1, 4 * HUGE_PAGE_BYTES);
        // A file that ends with a part of a page, and small ones between.
        let large = pool.take(3 * HUGE + 5).unwrap().unwrap();
        assert_eq!(large.len(), 3 * HUGE + 4096);
        let small: Vec<Window> = (0..100).map(|_| pool.take(5000).unwrap().unwrap()).collect();
        assert!(small.iter().all(|window| window.len() == 8192 && window.start() >= 7 * HUGE));
        let second = pool.take(3 * HUGE).unwrap().unwrap();
        assert_eq!(second.start(), 4 * HUGE);
        assert!(pool.take(2 * HUGE).unwrap().is_none());
        pool.give(large);
        assert_eq!(pool.take(4 * HUGE).unwrap().unwrap().start(), 0);
    }

    #[test]
    fn each_extent_is_given_a_huge_page_once_when_it_is_lent() {
        let pool = Pool::new(4, 64 << 20);
        let window = pool.take(4 * HUGE).unwrap().unwrap();
        assert_eq!(pool.area().is_prepared.iter().position(|is_prepared| !is_prepared), Some(4));
        assert!(pool.area().unprepared_extents(&window).is_empty());
        let file = memfd::create("iloader:test").unwrap();
        file.set_len(HUGE_PAGE_BYTES).unwrap();
        let (_, mut other) = Mapping::shared(&file, HUGE).unwrap();
        if let Err(cause) = other.collapse_extent(0) {
            return crate::skipped(format!("the kernel has no huge page now: {cause}"));
        }
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", window.as_slice().as_ptr() as usize);
        let ours = smaps.lines().skip_while(|line| !line.starts_with(&start));
        let huge = ours.skip(1).find_map(|line| line.strip_prefix("ShmemPmdMapped:")).unwrap();
        assert_eq!(huge.trim(), "8192 kB", "as much as is lent, and no more");
    }

    #[test]
    #[should_panic(expected = "a pool of 4194304 bytes has no 4198400")]
    fn nothing_longer_than_the_pool_is_lent() {
        let _ = Pool::new(1, 1).take(2 * HUGE + 1);
    }

    proptest! {
        /// Whatever is lent and comes back in whatever order and pieces: no byte is lent twice, what is lent large
        /// begins at a huge page, and at the end the pool is whole again.
        #[test]
        fn no_byte_is_lent_twice(steps in prop::collection::vec((0usize..(3 * HUGE), any::<u16>()), 1..200)) {
            let pool = Pool { bytes: 8 * HUGE, area: Mutex::default(), came_back: Condvar::new() };
            let mut lent: Vec<Window> = Vec::new();
            for (bytes, choice) in steps {
                if choice % 3 == 0 && !lent.is_empty() {
                    let mut window = lent.swap_remove(choice as usize % lent.len());
                    let head = window.split_to(round_up(window.len() as u64 / 2, PAGE_BYTES) as usize);
                    pool.give(window);
                    pool.give(head);
                    continue;
                }
                // Mostly small ones; the addresses are what counts, so that nothing is written to.
                let bytes = if choice % 3 == 1 { bytes / 64 + 1 } else { bytes + 1 };
                if let Some(window) = take_unprepared(&pool, bytes) {
                    prop_assert_eq!(window.len(), bytes.next_multiple_of(4096));
                    let (from, to) = (window.start(), window.start() + window.len());
                    prop_assert!(bytes as u64 <= SMALL_BYTES_MAX || from % HUGE == 0);
                    prop_assert!(lent.iter().all(|other| other.start() + other.len() <= from || to <= other.start()));
                    lent.push(window);
                }
            }
            lent.into_iter().for_each(|window| pool.give(window));
            prop_assert_eq!(take_unprepared(&pool, 8 * HUGE).map(|window| window.len()), Some(8 * HUGE));
        }
    }

    /// As [`Pool::take`], without touching the memory.
    fn take_unprepared(pool: &Pool, bytes: usize) -> Option<Window> {
        let is_made = std::mem::replace(&mut pool.area().is_made, true);
        if !is_made {
            pool.area().free.insert(0, make(pool.bytes).unwrap());
        }
        pool.area().is_prepared = vec![true; pool.bytes / HUGE];
        pool.take(bytes).unwrap()
    }
}
