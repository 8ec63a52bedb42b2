//! An engine that misbehaves on purpose: short reads, errors at the n-th operation, another order.
//!
//! It wraps a real engine and keeps its contract, so that everything above can be shown to survive what
//! storage does on a bad day. Tests use it; the program never does.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Completion, Engine, Read};
use crate::error::Result;

/// Which faults, over all engines that share it.
#[derive(Debug, Default)]
pub struct Faults {
    /// Every read ends after at most so many bytes; a multiple of 512 keeps O_DIRECT possible. 0: never.
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
    /// What a short read left out of its window, by token order of submission.
    cut: Vec<(u64, crate::sys::map::Window)>,
    tokens: Vec<u64>,
}

impl Faulty {
    /// Wraps `engine`.
    pub fn new(engine: Box<dyn Engine>, faults: Arc<Faults>) -> Faulty {
        Faulty { engine, faults, failed: Vec::new(), cut: Vec::new(), tokens: Vec::new() }
    }
}

impl Engine for Faulty {
    fn depth(&self) -> usize {
        self.engine.depth()
    }

    fn submit(&mut self, mut read: Read) -> std::result::Result<(), Read> {
        if self.tokens.len() + self.failed.len() == self.depth() {
            return Err(read);
        }
        let number = self.faults.operations.fetch_add(1, Ordering::Relaxed) + 1;
        let fails = match self.faults.fail_at {
            0 => false,
            n => number == n || (self.faults.fail_on && number > n),
        };
        if fails {
            let result = Err(io::Error::from_raw_os_error(self.faults.errno));
            self.failed.push(Completion { token: read.token, window: read.window, result });
            return Ok(());
        }
        let token = read.token;
        if self.faults.short_bytes > 0 && read.window.len() > self.faults.short_bytes {
            let head = read.window.split_to(self.faults.short_bytes);
            self.cut.push((token, std::mem::replace(&mut read.window, head)));
        }
        self.tokens.push(token);
        self.engine.submit(read)
    }

    fn reap(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        let mut ended = std::mem::take(&mut self.failed);
        if ended.is_empty() {
            self.engine.reap(&mut ended)?;
            for completion in &mut ended {
                self.tokens.retain(|token| *token != completion.token);
                if let Some(index) = self.cut.iter().position(|(token, _)| *token == completion.token) {
                    completion.window.join(self.cut.swap_remove(index).1);
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
