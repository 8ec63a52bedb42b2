//! Looks for readers, each on a thread of its own: with thousands of processes one takes tenths of a second, and
//! a process that hangs in the kernel can hold one up for good. The daemon answers meanwhile.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, Result};
use crate::readers::{Detail, Seen, Segments};

/// Looks for readers of segments: [`crate::readers::find`], or what a test has in its place.
pub type Find = Arc<dyn Fn(&Segments, Detail) -> Result<Seen> + Send + Sync>;

/// What a look came to.
#[derive(Debug)]
pub(super) struct Look {
    /// When it began: it says nothing about later moments.
    pub(super) began: Instant,
    /// What was seen.
    pub(super) seen: Result<Seen>,
}

/// Takes looks, one at a time.
pub(super) struct Looker {
    find: Find,
    detail: Detail,
    /// When the one that is being taken began.
    began: Option<Instant>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    wake: OwnedFd,
    seen: Mutex<Option<Result<Seen>>>,
}

impl Shared {
    fn end(&self, seen: Result<Seen>) {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(seen);
        // The counter can't overflow: it is drained for each look.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Looker {
    /// One that looks so closely.
    pub(super) fn new(find: &Find, detail: Detail) -> Result<Looker> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::os("make an event descriptor", &errno.into()))?;
        let find = Arc::clone(find);
        Ok(Looker { find, detail, began: None, shared: Arc::new(Shared { wake, seen: Mutex::new(None) }) })
    }

    /// Whether a look is being taken.
    pub(super) fn is_busy(&self) -> bool {
        self.began.is_some()
    }

    /// Begins a look, unless one is being taken.
    pub(super) fn begin(&mut self, segments: &Arc<Segments>) {
        if self.is_busy() {
            return;
        }
        self.began = Some(Instant::now());
        let (find, detail) = (Arc::clone(&self.find), self.detail);
        let (shared, owned) = (Arc::clone(&self.shared), Arc::clone(segments));
        let look = move || shared.end(find(&owned, detail));
        if std::thread::Builder::new().name("readers".to_owned()).spawn(look).is_err() {
            // Where no thread can be had, it is still better to look than not to.
            self.shared.end((self.find)(segments, detail));
        }
    }

    /// Acknowledges a wake-up, and takes what was seen since the last one.
    pub(super) fn take(&mut self) -> Option<Look> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.shared.wake, &mut count);
        let seen = self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some(Look { began: self.began.take()?, seen })
    }
}

/// Readable when a look has ended.
impl AsFd for Looker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }
}
