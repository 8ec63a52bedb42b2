//! An engine that misbehaves on purpose: short reads, errors at the n-th operation, another order.
//!
//! It wraps a real engine and keeps its contract, so that everything above can be shown to survive what
//! storage does on a bad day. Tests use it; the program never does.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Completion, Engine, Transfer};
use crate::error::Result;

/// Which faults, over all engines that share it.
#[derive(Debug, Default)]
pub struct Faults {
    /// Every read reports at most so many bytes, whatever it has read. 0: all of them.
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
    in_flight: usize,
}

impl Faulty {
    /// Wraps `engine`.
    pub fn new(engine: Box<dyn Engine>, faults: Arc<Faults>) -> Faulty {
        Faulty { engine, faults, failed: Vec::new(), in_flight: 0 }
    }
}

impl Engine for Faulty {
    fn depth(&self) -> usize {
        self.engine.depth()
    }

    fn submit(&mut self, transfer: Transfer) -> std::result::Result<(), Transfer> {
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
        self.engine.submit(transfer)?;
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
