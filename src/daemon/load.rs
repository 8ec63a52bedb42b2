//! The load as the daemon sees it: a thread that reports how far it is and ends with what was loaded.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use crate::control::message::{Progress, ReadCounts};
use crate::daemon::config::Config;
use crate::daemon::ledger::Share;
use crate::daemon::looks::Find;
use crate::error::{Error, Kind, Result};
use crate::manifest::Manifest;
use crate::source::DirectoryLink;

/// What a load ends with: everything that a view is made of, and what keeps it alive.
pub struct Loaded {
    /// What the cache holds.
    pub manifest: Manifest,
    /// The files in memory, each with the descriptor that the view leads to.
    pub links: Vec<PublishedFile>,
    /// The files that stay links to the source.
    pub passthrough: Vec<PassedThrough>,
    /// Links to directories inside the selection.
    pub directory_links: Vec<DirectoryLink>,
    /// How it was loaded.
    pub report: LoadReport,
    /// What keeps the segments alive: their memory is given back when this is dropped.
    pub keep: Box<dyn Any + Send>,
    /// The cache's share of the quota. Dropped after what it stands for.
    pub share: Option<Share>,
}

impl fmt::Debug for Loaded {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Loaded").field("files", &self.links.len()).finish_non_exhaustive()
    }
}

/// One file in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedFile {
    /// Relative to the source, `/` between the parts.
    pub path: String,
    /// The number of this process's descriptor, open as long as [`Loaded::keep`] lives.
    pub descriptor: RawFd,
    /// Device of the segment.
    pub device: u64,
    /// Inode of the segment.
    pub inode: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// One file that stays a link to the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedThrough {
    /// Relative to the source, `/` between the parts.
    pub path: String,
    /// The source file, absolute.
    pub target: PathBuf,
}

/// How a load went, in the words and numbers of [`crate::control::message::Status`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// `io-uring` or `threads`.
    pub engine: String,
    /// Why this engine.
    pub engine_reason: String,
    /// `memfd` or `tmpfs`.
    pub backing: String,
    /// Why this backing.
    pub backing_reason: String,
    /// Bytes on huge pages when the load ended.
    pub huge_page_bytes: u64,
    /// Bytes allocated for segments, in whole pages.
    pub allocated_bytes: u64,
    /// Bytes of them that cannot be swapped out.
    pub locked_bytes: u64,
    /// How the bytes were read.
    pub read: ReadCounts,
    /// Files whose bytes in memory were compared with a digest that was known before.
    pub verified_files: u64,
    /// Things the user should know.
    pub warnings: Vec<String>,
}

/// Loads, on a thread of its own.
pub type Loader = Box<dyn FnOnce(&LoadControl) -> Result<Loaded> + Send>;

/// Publishes what was loaded, in one step.
pub type Publisher = Box<dyn FnOnce(&Config, &Loaded) -> Result<Published>>;

/// Takes a view away again; `true` removes its directory too. Gives what the user should know.
pub type Withdraw = Box<dyn FnOnce(bool) -> Result<Vec<String>>>;

/// A view that stands.
pub struct Published {
    /// Takes it away again.
    pub withdraw: Withdraw,
    /// What the user should know although it stands.
    pub notes: Vec<String>,
}

/// What the daemon has done by the layers below it.
pub struct Work {
    /// The load.
    pub load: Loader,
    /// What follows it.
    pub publish: Publisher,
    /// How it finds who reads.
    pub find: Find,
}

impl fmt::Debug for Work {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Work").finish_non_exhaustive()
    }
}

/// The loading thread's line to the daemon.
#[derive(Debug)]
pub struct LoadControl {
    wake: OwnedFd,
    cancelled: AtomicBool,
    /// Progress was reported that the daemon has not looked at. While it is set, further reports wake nobody.
    unseen: AtomicBool,
    progress: Mutex<Progress>,
    /// Why the load ends by itself before its end.
    given_up: Mutex<Option<Error>>,
    outcome: Mutex<Option<Outcome>>,
}

/// What a thread of the daemon came to.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The load ended.
    Loaded(Result<Box<Loaded>>),
    /// The memory was given back.
    Released,
}

impl LoadControl {
    /// Reports how far the load is. Cheap: the daemon is woken at most once per look that it takes.
    pub fn progress(&self, progress: Progress) {
        *locked(&self.progress) = progress;
        if !self.unseen.swap(true, Ordering::AcqRel) {
            self.wake();
        }
    }

    /// Whether the load should give up, with [`Kind::Cancelled`], as soon as it can.
    pub fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Ends the load for `reason`, which is then its error unless it was done before it saw that.
    pub(super) fn give_up(&self, reason: Error) {
        locked(&self.given_up).get_or_insert(reason);
        self.cancelled.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// The error of a load that gave up is the reason for that.
    fn reason_of(&self, error: Error) -> Error {
        match locked(&self.given_up).as_ref() {
            Some(reason) if error.kind() == Kind::Cancelled => reason.clone(),
            _ => error,
        }
    }

    fn end(&self, outcome: Outcome) {
        *locked(&self.outcome) = Some(outcome);
        self.wake();
    }

    fn wake(&self) {
        // The counter can't overflow: it is drained at every wake-up, and adds one each time.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The value behind `mutex`. A panic in another thread can't leave a plain value half written.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The daemon's end of the loading thread.
#[derive(Debug)]
pub(super) struct Load {
    control: Arc<LoadControl>,
    began: Instant,
}

impl Load {
    /// Starts `loader` on a thread. It gets a [`Outcome::Loaded`] in the end, also where it panics. An error is
    /// reported after the memory of the load is given back, as [`Outcome::Released`] is: the loader has
    /// dropped all that it held when it returns or unwinds.
    pub(super) fn start(
        loader: impl FnOnce(&LoadControl) -> Result<Loaded> + Send + 'static,
    ) -> Result<Load> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::os("make an event descriptor", &errno.into()))?;
        let control = Arc::new(LoadControl {
            wake,
            cancelled: AtomicBool::new(false),
            unseen: AtomicBool::new(false),
            progress: Mutex::new(Progress::default()),
            given_up: Mutex::new(None),
            outcome: Mutex::new(None),
        });
        let thread_control = Arc::clone(&control);
        let run = move || {
            let result = catch_unwind(AssertUnwindSafe(|| loader(&thread_control).map(Box::new)));
            let result = result.unwrap_or_else(|_| {
                Err(Error::new(Kind::Failed, "the load stopped at an error of the program itself")
                    .hint("the log says where; please report it"))
            });
            let result = result.map_err(|error| thread_control.reason_of(error));
            thread_control.end(Outcome::Loaded(result));
        };
        std::thread::Builder::new()
            .name("load".to_owned())
            .spawn(run)
            .map_err(|error| Error::spawning("start the loading thread", &error))?;
        Ok(Load { control, began: Instant::now() })
    }

    /// How far it is, and for how long it has been under way: what is reported may be old where it is slow.
    pub(super) fn progress(&self) -> Progress {
        self.control.unseen.store(false, Ordering::Release);
        let reported = *locked(&self.control.progress);
        Progress { seconds: self.began.elapsed().as_secs_f64().max(reported.seconds), ..reported }
    }

    /// Why it ends by itself, from when it knows that on.
    pub(super) fn given_up(&self) -> Option<Error> {
        locked(&self.control.given_up).clone()
    }

    /// Ends it for `reason`, which is then its error unless it was done before it saw that.
    pub(super) fn give_up(&self, reason: Error) {
        self.control.give_up(reason);
    }

    /// Asks it to end.
    pub(super) fn cancel(&self) {
        self.control.cancelled.store(true, Ordering::Relaxed);
    }

    /// Gives the memory of `loaded` back on a thread, because freeing small pages takes a second for
    /// ten gigabytes and the daemon must answer meanwhile. Ends with [`Outcome::Released`].
    pub(super) fn release(&self, loaded: Box<Loaded>) {
        let control = Arc::clone(&self.control);
        // Shared, so that the memory is given back here where no thread can be had.
        let shared = Arc::new(Mutex::new(Some(loaded)));
        let owned = Arc::clone(&shared);
        let run = move || {
            drop(locked(&owned).take());
            control.end(Outcome::Released);
        };
        if std::thread::Builder::new().name("release".to_owned()).spawn(run).is_err() {
            drop(locked(&shared).take());
            self.control.end(Outcome::Released);
        }
    }

    /// Acknowledges a wake-up, and takes what a thread came to since the last one.
    pub(super) fn take_outcome(&self) -> Option<Outcome> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.control.wake, &mut count);
        locked(&self.control.outcome).take()
    }
}

impl AsFd for Load {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.wake.as_fd()
    }
}
