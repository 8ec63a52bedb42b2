//! The equal fallback: `pread` and `pwrite` on threads, where io_uring is forbidden.

use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::{Completion, Direction, Engine, Transfer};
use crate::error::{Error, Kind, Result};

/// Such a thread needs little: its buffers are the windows.
const STACK_BYTES: usize = 128 << 10;

/// As many threads as transfers in flight.
pub(super) struct Threads {
    /// Dropped first: the threads end when the queue does.
    queue: Option<Sender<Transfer>>,
    ended: Receiver<Completion>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
}

impl Threads {
    pub(super) fn new(depth: usize) -> Result<Threads> {
        let (queue, transfers) = channel::<Transfer>();
        let (done, ended) = channel();
        let transfers = Arc::new(Mutex::new(transfers));
        let mut engine =
            Threads { queue: Some(queue), ended, threads: Vec::with_capacity(depth), in_flight: 0 };
        for index in 0..depth {
            let (transfers, done) = (Arc::clone(&transfers), done.clone());
            let thread = std::thread::Builder::new()
                .name(format!("engine-{index}"))
                .stack_size(STACK_BYTES)
                .spawn(move || serve(&transfers, &done));
            match thread {
                Ok(thread) => engine.threads.push(thread),
                // Fewer threads than asked for are slower, not wrong.
                Err(_) if !engine.threads.is_empty() => break,
                Err(cause) => return Err(Error::spawning("start an engine's thread", &cause)),
            }
        }
        Ok(engine)
    }
}

/// One thread's life: transfers until the queue ends.
fn serve(transfers: &Mutex<Receiver<Transfer>>, done: &Sender<Completion>) {
    loop {
        let next = match transfers.lock() {
            Ok(queue) => queue.recv(),
            Err(_) => return,
        };
        let Ok(Transfer { token, direction, file, offset, mut window }) = next else { return };
        let result = match direction {
            Direction::Read => file.read_at(window.as_mut_slice(), offset),
            Direction::Write => file.write_at(window.as_slice(), offset),
        };
        if done.send(Completion { token, window, result }).is_err() {
            return;
        }
    }
}

impl Engine for Threads {
    fn depth(&self) -> usize {
        self.threads.len()
    }

    fn submit(&mut self, transfer: Transfer) -> std::result::Result<(), Transfer> {
        if self.in_flight == self.threads.len() {
            return Err(transfer);
        }
        let queue = self.queue.as_ref().expect("the queue lives as long as the engine");
        queue.send(transfer).map_err(|unsent| unsent.0)?;
        self.in_flight += 1;
        Ok(())
    }

    fn start(&mut self) -> Result<()> {
        // The threads took them from the queue as they came.
        Ok(())
    }

    fn reap(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        if self.in_flight == 0 {
            return Ok(());
        }
        let broken = |_| Error::new(Kind::Failed, "the engine's threads ended unexpectedly");
        let first = self.ended.recv().map_err(broken)?;
        let before = completions.len();
        completions.push(first);
        completions.extend(self.ended.try_iter());
        self.in_flight -= completions.len() - before;
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue = None;
        for thread in self.threads.drain(..) {
            // A thread that panicked has dropped its window; there is nothing left to wait for.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::map::Mapping;
    use std::io::Write;

    #[test]
    fn every_read_comes_back_once() {
        let mut engine = Threads::new(3).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[5; 9000]).unwrap();
        let file = Arc::new(file);
        let mut memory = Mapping::anonymous(64 << 10).unwrap();
        let mut read = |token| Transfer {
            token,
            direction: Direction::Read,
            file: Arc::clone(&file),
            offset: token * 4096,
            window: memory.split_to(4096),
        };
        for token in 0..3 {
            engine.submit(read(token)).unwrap();
        }
        assert_eq!(engine.submit(read(3)).unwrap_err().token, 3);
        let mut done = Vec::new();
        while done.len() < 3 {
            engine.reap(&mut done).unwrap();
        }
        engine.reap(&mut done).unwrap();
        done.sort_by_key(|completion| completion.token);
        let lengths: Vec<usize> = done.iter().map(|c| *c.result.as_ref().unwrap()).collect();
        assert_eq!(lengths, [4096, 4096, 808]);
    }
}
