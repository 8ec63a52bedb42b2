//! The engine: batched io_uring submission.

use std::io;

use super::{Completion, Direction, Engine, Transfer};
use crate::error::{Error, Kind, Result};
use crate::sys::ring::Ring;

/// One ring, used by the thread that made it.
pub(super) struct Uring {
    ring: Ring,
}

impl Uring {
    pub(super) fn new(depth: usize) -> Result<Uring> {
        Ring::new(depth).map(|ring| Uring { ring }).map_err(|cause| cannot_set_up(&cause))
    }
}

/// The kernel counts a ring as locked memory, and has only "no memory" to say so.
fn cannot_set_up(cause: &io::Error) -> Error {
    if cause.raw_os_error() != Some(libc::ENOMEM) {
        return Error::os("set up io_uring", cause);
    }
    let limit =
        "there is no memory, or too little of it may be locked (ENOMEM; RLIMIT_MEMLOCK, see ulimit -l)";
    Error::new(Kind::NoRoom, format!("cannot set up io_uring: {limit}"))
}

impl Engine for Uring {
    fn depth(&self) -> usize {
        self.ring.depth()
    }

    fn submit(&mut self, transfer: Transfer) -> std::result::Result<(), Transfer> {
        self.ring.push(transfer)
    }

    fn start(&mut self) -> Result<()> {
        self.ring.start().map_err(|cause| Error::os("submit to io_uring", &cause))
    }

    fn reap(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        self.ring.reap(completions).map_err(|cause| Error::os("submit to io_uring", &cause))
    }
}

/// Whether a ring of this depth can be made and a read goes through it: security policies refuse one or
/// the other.
pub(super) fn probe(depth: usize) -> Result<()> {
    let mut engine = Uring::new(depth)?;
    let doing = "read through io_uring";
    let file = std::fs::File::open("/proc/self/stat").map_err(|cause| Error::os(doing, &cause))?;
    let window = crate::sys::map::Mapping::anonymous(64).map_err(|cause| Error::os(doing, &cause))?;
    let read = Transfer { token: 0, direction: Direction::Read, file: file.into(), offset: 0, window };
    assert!(engine.submit(read).is_ok(), "an empty ring has room");
    let mut completions = Vec::new();
    engine.reap(&mut completions)?;
    match completions.pop().expect("one read was submitted").result {
        Ok(_) => Ok(()),
        Err(cause) => Err(Error::os(doing, &cause)),
    }
}
