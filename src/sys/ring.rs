//! An io_uring that owns the buffers of its transfers in flight.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{IoUring, opcode, types};

use super::map::Window;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file into the window.
    Read,
    /// From the window into the file.
    Write,
}

/// One transfer: `window.len()` bytes between `window` and `file`, from `offset` on. `token` comes back with it.
#[derive(Debug)]
pub struct Transfer {
    /// Whatever the caller tells its transfers apart by.
    pub token: u64,
    /// Which way.
    pub direction: Direction,
    /// What is read or written. Kept open until the transfer has ended.
    pub file: Arc<File>,
    /// Where in the file.
    pub offset: u64,
    /// The memory. Its length is the length of the transfer, at most 2 GiB - 4 KiB.
    pub window: Window,
}

/// The end of one transfer. The window comes back whatever happened.
#[derive(Debug)]
pub struct Completion {
    /// The transfer's token.
    pub token: u64,
    /// The buffer; of a read, filled as far as `result` says.
    pub window: Window,
    /// Bytes moved: fewer than asked for is normal. 0 of a read is the end of the file.
    pub result: io::Result<usize>,
}

/// A ring for one thread. Dropping it waits for the transfers in flight.
pub struct Ring {
    // Dropped first, after `drop` has reaped every transfer: the kernel then holds no pointer into a slot.
    ring: IoUring,
    /// The transfers whose memory the kernel may still be using, by `user_data`.
    slots: Vec<Option<Transfer>>,
    free: Vec<usize>,
}

impl Ring {
    /// A ring for `depth` transfers in flight, to be used by this thread alone. An error where the kernel or
    /// its security policy does not permit io_uring.
    pub fn new(depth: usize) -> io::Result<Ring> {
        let entries = u32::try_from(depth).ok().filter(|entries| (1..=4096).contains(entries));
        let entries = entries.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        // One issuer, and completions run when we ask for them (Linux 6.1): no interrupts of our thread.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_clamp()
            .build(entries)
            .or_else(|_| IoUring::new(entries))?;
        Ok(Ring { ring, slots: (0..depth).map(|_| None).collect(), free: (0..depth).rev().collect() })
    }

    /// Transfers in flight at the most.
    pub fn depth(&self) -> usize {
        self.slots.len()
    }

    /// Transfers in flight.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Queues a transfer; the kernel sees it at the next [`Ring::reap`]. Gives it back where the ring is full.
    // The large error is the point: the buffer comes back.
    #[allow(clippy::result_large_err)]
    pub fn push(&mut self, transfer: Transfer) -> Result<(), Transfer> {
        let Some(slot) = self.free.pop() else { return Err(transfer) };
        let length = u32::try_from(transfer.window.len()).expect("a transfer is shorter than 4 GiB");
        let descriptor = types::Fd(transfer.file.as_raw_fd());
        let address = transfer.window.address();
        let entry = match transfer.direction {
            Direction::Read => opcode::Read::new(descriptor, address, length).offset(transfer.offset).build(),
            Direction::Write => {
                opcode::Write::new(descriptor, address, length).offset(transfer.offset).build()
            }
        };
        let entry = entry.user_data(slot as u64);
        self.slots[slot] = Some(transfer);
        // SAFETY: the entry's buffer is the memory of a Window that now stays in `slots` until its
        // completion is reaped (or for ever, see `drop`), so that it is mapped and nobody else touches
        // it; its file stays open for the same reason.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the queue has as many entries as there are slots");
        Ok(())
    }

    /// Submits what was queued in one call, without waiting.
    pub fn start(&mut self) -> io::Result<()> {
        match self.ring.submit() {
            Ok(_) => Ok(()),
            // Not all was taken now: the next `reap` goes on.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Submits what was queued in one call, waits for at least one completion where any transfer is in
    /// flight, and appends all that have ended to `completions`.
    pub fn reap(&mut self, completions: &mut Vec<Completion>) -> io::Result<()> {
        let wanted = usize::from(self.in_flight() > 0);
        loop {
            match self.ring.submit_and_wait(wanted) {
                // An interrupted wait of a call that submitted something is no error, and may end with nothing.
                Ok(_) if wanted == 0 || !self.ring.completion().is_empty() => break,
                Ok(_) => {}
                // Interrupted, or the kernel is short of memory for a moment: what it took stays taken.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR)) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    if !self.ring.completion().is_empty() {
                        break;
                    }
                    std::thread::yield_now();
                }
                Err(error) => return Err(error),
            }
        }
        for entry in self.ring.completion() {
            let slot = entry.user_data() as usize;
            let transfer = self.slots[slot].take().expect("a completion belongs to a transfer in flight");
            self.free.push(slot);
            let result = match entry.result() {
                bytes if bytes >= 0 => Ok(bytes as usize),
                errno => Err(io::Error::from_raw_os_error(-errno)),
            };
            completions.push(Completion { token: transfer.token, window: transfer.window, result });
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let mut completions = Vec::new();
        while self.in_flight() > 0 {
            if self.reap(&mut completions).is_err() {
                // The kernel may still use these buffers: they are given up rather than reused.
                self.slots.drain(..).for_each(std::mem::forget);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::map::Mapping;
    use std::io::Write;

    #[test]
    fn reads_come_back_with_their_windows() {
        let mut ring = match Ring::new(4) {
            Ok(ring) => ring,
            Err(error) => return crate::skipped(format!("no io_uring here: {error}")),
        };
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 10_000]).unwrap();
        let file = Arc::new(file);
        let mut memory = Mapping::anonymous(64 << 10).unwrap();
        for token in 0..4 {
            let window = memory.split_to(4096);
            ring.push(Transfer {
                token,
                direction: Direction::Read,
                file: Arc::clone(&file),
                offset: token * 4096,
                window,
            })
            .unwrap();
        }
        let window = memory.split_to(1);
        let back = ring
            .push(Transfer {
                token: 9,
                direction: Direction::Read,
                file: Arc::clone(&file),
                offset: 0,
                window,
            })
            .unwrap_err();
        assert_eq!((back.token, back.window.len()), (9, 1));
        let mut done = Vec::new();
        while ring.in_flight() > 0 {
            ring.reap(&mut done).unwrap();
        }
        done.sort_by_key(|completion| completion.token);
        let lengths: Vec<usize> = done.iter().map(|c| *c.result.as_ref().unwrap()).collect();
        assert_eq!(lengths, [4096, 4096, 10_000 - 8192, 0]);
        assert!(done[0].window.as_slice().iter().all(|byte| *byte == 7));
    }

    #[test]
    fn dropping_a_ring_waits_for_its_reads() {
        let Ok(mut ring) = Ring::new(2) else { return crate::skipped("no io_uring here") };
        let (reader, mut writer) = std::io::pipe().unwrap();
        let file = Arc::new(File::from(std::os::fd::OwnedFd::from(reader)));
        let window = Mapping::anonymous(4096).unwrap();
        ring.push(Transfer { token: 1, direction: Direction::Read, file, offset: u64::MAX, window }).unwrap();
        let writer = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            writer.write_all(b"late").unwrap();
        });
        drop(ring);
        writer.join().unwrap();
    }
}
