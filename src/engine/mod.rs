//! HOW bytes move: reads and writes in flight, and nothing about what they are for.

use std::fmt;

use crate::error::{Error, Kind, Result};

pub mod fault;
pub(crate) mod keeping;
mod threads;
mod uring;

pub use crate::sys::ring::{Completion, Direction, Transfer};

/// Moves bytes for one thread, several reads and writes at a time.
///
/// The contract, which every engine and every fake keeps:
///
/// * A [`Transfer`] owns its window. It comes back exactly once, in a [`Completion`], whatever happened.
/// * At most [`Engine::depth`] transfers are in flight; a further one is given back by `submit`.
/// * `submit` only queues. Transfers start at the next `start` or `reap`, or before, and end in any order.
/// * `reap` blocks until at least one transfer has ended, unless none is in flight.
/// * A completion can be short without being wrong. 0 of a read means that the file ended.
/// * An error of `reap` means that the engine is broken: it is dropped, and dropping waits for the transfers.
pub trait Engine {
    /// Transfers in flight at the most.
    fn depth(&self) -> usize;

    /// Queues a transfer, or gives it back where `depth` of them are in flight.
    // The large error is the point: the buffer comes back.
    #[allow(clippy::result_large_err)]
    fn submit(&mut self, transfer: Transfer) -> std::result::Result<(), Transfer>;

    /// Starts what is queued, without waiting.
    fn start(&mut self) -> Result<()>;

    /// Starts what is queued, waits for at least one completion and appends all there are.
    fn reap(&mut self, completions: &mut Vec<Completion>) -> Result<()>;
}

/// What the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// io_uring where the kernel permits it, else threads.
    #[default]
    Auto,
    /// Batched io_uring submission.
    IoUring,
    /// `pread` and `pwrite` on threads.
    Threads,
}

impl Choice {
    /// The names on the command line.
    pub const NAMES: [&'static str; 3] = ["auto", "io-uring", "threads"];

    /// The choice of a name.
    pub fn from_name(name: &str) -> Result<Choice> {
        match name {
            "auto" => Ok(Choice::Auto),
            "io-uring" => Ok(Choice::IoUring),
            "threads" => Ok(Choice::Threads),
            _ => Err(Error::new(Kind::Usage, format!("there is no engine '{}'", name.escape_debug()))
                .hint("choose auto, io-uring or threads")),
        }
    }
}

/// Which engine reads, after probing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// See [`Choice::IoUring`].
    IoUring,
    /// See [`Choice::Threads`].
    Threads,
}

impl fmt::Display for Model {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Model::IoUring => "io-uring",
            Model::Threads => "threads",
        })
    }
}

/// Reads in flight per worker where nothing else is asked for. The device's rate is reached from 4 on
/// (see `docs/decisions/0001`); more hides the latency of a network.
const DEPTH_URING: usize = 16;

/// Threads cost a stack each, and buffered copies on more threads than cores only get in each other's way.
const DEPTH_THREADS: usize = 8;

/// The largest depth that may be asked for.
pub const DEPTH_MAX: usize = 1024;

/// An engine that is known to work here: what a worker starts its own instance from.
#[derive(Clone, Debug)]
pub struct Selected {
    /// Which.
    pub model: Model,
    /// Why, for `status` and logs.
    pub reason: String,
    depth: usize,
}

impl Selected {
    /// Probes what is permitted here. An error where the engine asked for by name is not.
    pub fn probe(choice: Choice, depth: Option<u32>) -> Result<Selected> {
        let depth = depth.map(|depth| depth as usize);
        if let Some(depth) = depth.filter(|depth| !(1..=DEPTH_MAX).contains(depth)) {
            return Err(Error::new(Kind::Usage, format!("a queue depth of {depth} is out of range"))
                .hint(format!("choose 1 to {DEPTH_MAX}")));
        }
        let threads = |reason: String| Selected {
            model: Model::Threads,
            reason,
            depth: depth.unwrap_or(DEPTH_THREADS),
        };
        if choice == Choice::Threads {
            return Ok(threads("asked for".to_owned()));
        }
        let depth_uring = depth.unwrap_or(DEPTH_URING);
        match uring::probe(depth_uring) {
            Ok(()) => {
                let reason = if choice == Choice::Auto { "the kernel permits it" } else { "asked for" };
                Ok(Selected { model: Model::IoUring, reason: reason.to_owned(), depth: depth_uring })
            }
            Err(error) if choice == Choice::IoUring => {
                Err(error.hint("choose --engine threads, or permit io_uring (container seccomp profile, kernel.io_uring_disabled, ulimit -l)"))
            }
            Err(error) => Ok(threads(error.message().to_owned())),
        }
    }

    /// A new instance, for the calling thread.
    pub fn start(&self) -> Result<Box<dyn Engine>> {
        Ok(match self.model {
            Model::IoUring => Box::new(uring::Uring::new(self.depth)?),
            Model::Threads => Box::new(threads::Threads::new(self.depth)?),
        })
    }

    /// Reads in flight per instance.
    pub fn depth(&self) -> usize {
        self.depth
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::map::Mapping;
    use std::io::Read;
    use std::sync::Arc;

    /// Writes what it then reads back, more than the engine takes at once.
    fn writes_arrive(engine: &mut dyn Engine) {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let blocks = engine.depth() as u64 * 3;
        let mut memory = Mapping::anonymous(blocks as usize * 4096).unwrap();
        let mut done = Vec::new();
        for token in 0..blocks {
            let mut window = memory.split_to(4096);
            window.as_mut_slice().fill(token as u8 + 1);
            let (file, direction) = (Arc::clone(&file), Direction::Write);
            let mut next = Transfer { token, direction, file, offset: token * 4096, window };
            while let Err(back) = engine.submit(next) {
                assert_eq!(back.token, token, "what does not fit comes back");
                engine.reap(&mut done).unwrap();
                next = back;
            }
        }
        while done.len() < blocks as usize {
            engine.reap(&mut done).unwrap();
        }
        let mut tokens: Vec<u64> = done.iter().map(|completion| completion.token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..blocks).collect::<Vec<_>>(), "each comes back once");
        for completion in done {
            assert_eq!(completion.result.unwrap(), 4096);
            assert!(completion.window.as_slice().iter().all(|byte| *byte == completion.token as u8 + 1));
        }
        let mut bytes = Vec::new();
        (&*file).read_to_end(&mut bytes).unwrap();
        let expected = (0..blocks).flat_map(|token| [token as u8 + 1; 4096]);
        assert!(bytes.into_iter().eq(expected));
    }

    /// A write to a file that is open for reading only fails, and its window comes back.
    fn a_refused_write_comes_back(engine: &mut dyn Engine) {
        let file = Arc::new(std::fs::File::open("/proc/self/exe").unwrap());
        let window = Mapping::anonymous(4096).unwrap();
        engine.submit(Transfer { token: 3, direction: Direction::Write, file, offset: 0, window }).unwrap();
        let mut done = Vec::new();
        engine.reap(&mut done).unwrap();
        let completion = done.pop().unwrap();
        assert_eq!((completion.token, completion.window.len()), (3, 4096));
        assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn every_engine_writes() {
        for choice in [Choice::Threads, Choice::IoUring] {
            match Selected::probe(choice, Some(4)) {
                Ok(selected) => {
                    writes_arrive(selected.start().unwrap().as_mut());
                    a_refused_write_comes_back(selected.start().unwrap().as_mut());
                }
                Err(error) => crate::skipped(error),
            }
        }
    }

    #[test]
    fn threads_can_always_be_had() {
        let selected = Selected::probe(Choice::Threads, None).unwrap();
        assert_eq!(selected.model, Model::Threads);
        assert_eq!(selected.start().unwrap().depth(), DEPTH_THREADS);
        assert_eq!(Selected::probe(Choice::Auto, Some(0)).unwrap_err().kind(), Kind::Usage);
        for name in Choice::NAMES {
            Choice::from_name(name).unwrap();
        }
        assert_eq!(Choice::from_name("magic").unwrap_err().kind(), Kind::Usage);
    }
}
