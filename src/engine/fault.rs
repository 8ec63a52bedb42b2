//! An engine that misbehaves on purpose: short reads, errors at the n-th operation, another order.
//!
//! It wraps a real engine and keeps its contract, so that everything above can be shown to survive what
//! storage does on a bad day. Tests use it; the program never does.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Completion, Direction, Engine, Transfer};
use crate::error::Result;
use crate::sys::map::Window;
use crate::units::PAGE_BYTES;

/// Which faults, over all engines that share it.
#[derive(Debug, Default)]
pub struct Faults {
    /// Every transfer reports at most so many bytes. A read has brought all of them nevertheless; a write moves no more
    /// than these, rounded up to whole pages, so that what a writer does not resume is missing. 0: all of them.
    pub short_bytes: usize,
    /// The operation, counted from 1, that fails. 0: none.
    pub fail_at: u64,
    /// All operations from `fail_at` on fail, instead of that one alone.
    pub fail_on: bool,
    /// The errno it fails with.
    pub errno: i32,
    /// Completions come back in the opposite order of each batch.
    pub reorder: bool,
    /// Operations so far.
    pub operations: AtomicU64,
}

/// A real engine behind [`Faults`].
pub struct Faulty {
    engine: Box<dyn Engine>,
    faults: Arc<Faults>,
    /// Ended by us instead of by the engine, to be reaped next.
    failed: Vec<Completion>,
    /// What is kept back of the windows of short writes, by token.
    kept_back: HashMap<u64, Window>,
    in_flight: usize,
}

impl Faulty {
    /// Wraps `engine`.
    pub fn new(engine: Box<dyn Engine>, faults: Arc<Faults>) -> Faulty {
        Faulty { engine, faults, failed: Vec::new(), kept_back: HashMap::new(), in_flight: 0 }
    }

    /// Keeps back what a short write is not to move.
    fn shorten(&mut self, transfer: &mut Transfer) {
        let whole_pages = self.faults.short_bytes.next_multiple_of(PAGE_BYTES as usize);
        let is_short = whole_pages > 0 && transfer.window.len() > whole_pages;
        if transfer.direction == Direction::Write && is_short {
            let head = transfer.window.split_to(whole_pages);
            let rest = std::mem::replace(&mut transfer.window, head);
            self.kept_back.insert(transfer.token, rest);
        }
    }

    /// Puts a window together again.
    fn complete(&mut self, token: u64, window: &mut Window) {
        if let Some(rest) = self.kept_back.remove(&token) {
            window.join(rest);
        }
    }
}

impl Engine for Faulty {
    fn depth(&self) -> usize {
        self.engine.depth()
    }

    fn submit(&mut self, mut transfer: Transfer) -> std::result::Result<(), Transfer> {
        if self.in_flight + self.failed.len() == self.depth() {
            return Err(transfer);
        }
        let number = self.faults.operations.fetch_add(1, Ordering::Relaxed) + 1;
        let fails = match self.faults.fail_at {
            0 => false,
            n => number == n || (self.faults.fail_on && number > n),
        };
        if fails {
            let result = Err(io::Error::from_raw_os_error(self.faults.errno));
            self.failed.push(Completion { token: transfer.token, window: transfer.window, result });
            return Ok(());
        }
        self.shorten(&mut transfer);
        if let Err(mut transfer) = self.engine.submit(transfer) {
            self.complete(transfer.token, &mut transfer.window);
            return Err(transfer);
        }
        self.in_flight += 1;
        Ok(())
    }

    fn start(&mut self) -> Result<()> {
        self.engine.start()
    }

    fn reap(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        let mut ended = std::mem::take(&mut self.failed);
        if ended.is_empty() {
            self.engine.reap(&mut ended)?;
            self.in_flight -= ended.len();
            for completion in &mut ended {
                self.complete(completion.token, &mut completion.window);
            }
            if self.faults.short_bytes > 0 {
                for bytes in ended.iter_mut().filter_map(|completion| completion.result.as_mut().ok()) {
                    *bytes = self.faults.short_bytes.min(*bytes);
                }
            }
        }
        if self.faults.reorder {
            ended.reverse();
        }
        completions.append(&mut ended);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Choice, Selected};
    use crate::sys::map::Mapping;
    use std::os::unix::fs::FileExt;

    fn engine() -> Box<dyn Engine> {
        Selected::probe(Choice::Threads, Some(4)).unwrap().start().unwrap()
    }

    fn write(file: &Arc<std::fs::File>, token: u64) -> Transfer {
        let mut window = Mapping::anonymous(3 * 4096).unwrap();
        window.as_mut_slice().fill(9);
        Transfer { token, direction: Direction::Write, file: Arc::clone(file), offset: 0, window }
    }

    fn only_completion(engine: &mut dyn Engine) -> Completion {
        let mut completions = Vec::new();
        engine.reap(&mut completions).unwrap();
        assert_eq!(completions.len(), 1);
        completions.pop().unwrap()
    }

    #[test]
    fn what_a_short_write_does_not_report_is_missing() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let mut faulty = Faulty::new(engine(), Arc::new(Faults { short_bytes: 5000, ..Faults::default() }));
        faulty.submit(write(&file, 7)).unwrap();
        let completion = only_completion(&mut faulty);
        assert_eq!((completion.token, completion.window.len()), (7, 3 * 4096));
        assert_eq!(completion.result.unwrap(), 5000);
        assert_eq!(file.metadata().unwrap().len(), 2 * 4096);
    }

    #[test]
    fn a_failing_write_writes_nothing_and_gives_its_window_back() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let faults = Faults { fail_at: 2, errno: libc::ENOSPC, ..Faults::default() };
        let mut faulty = Faulty::new(engine(), Arc::new(faults));
        faulty.submit(write(&file, 1)).unwrap();
        assert_eq!(only_completion(&mut faulty).result.unwrap(), 3 * 4096);
        file.write_all_at(&[1; 3 * 4096], 0).unwrap();
        faulty.submit(write(&file, 2)).unwrap();
        let failed = only_completion(&mut faulty);
        assert_eq!((failed.token, failed.window.len()), (2, 3 * 4096));
        assert_eq!(failed.result.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(byte, [1]);
    }
}
