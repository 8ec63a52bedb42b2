//! Work on disk in front of a person: how far a copy or a check is, and Ctrl-C.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::output;
use super::progress::Bar;
use crate::control::message::Progress;
use crate::disk::{build, verify};
use crate::error::{Error, Result};
use crate::sys::signals::{self, SignalDescriptor};

/// How often the progress is drawn, and Ctrl-C looked for.
const TICK: Duration = Duration::from_millis(100);

/// Counts what is done. The threads that do it only add to numbers here: another one draws them.
#[derive(Debug)]
pub(super) struct Watcher {
    name: String,
    quiet: bool,
    copies: bool,
    read: AtomicU64,
    read_total: AtomicU64,
    written: AtomicU64,
    files: AtomicU64,
    files_total: AtomicU64,
    is_planned: AtomicBool,
    is_waiting: AtomicBool,
    is_cancelled: AtomicBool,
}

/// What is watched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work<'a> {
    /// What is done, such as `caching`.
    pub(super) doing: &'a str,
    /// To what.
    pub(super) name: &'a str,
    /// Show no progress.
    pub(super) quiet: bool,
}

/// Does a copy, with its progress on stderr and Ctrl-C as a reason to give up. A second Ctrl-C ends the process.
pub(super) fn copying<T>(what: &Work<'_>, work: impl FnOnce(&Watcher) -> Result<T>) -> Result<T> {
    watched(what, Watcher::new(what, true), work)
}

/// The same for a check, which reads `bytes` in `files`.
pub(super) fn checking<T>(
    what: &Work<'_>,
    (bytes, files): (u64, u64),
    work: impl FnOnce(&Watcher) -> Result<T>,
) -> Result<T> {
    let watcher = Watcher::new(what, false);
    watcher.plan(bytes, files);
    watched(what, watcher, work)
}

fn watched<T>(what: &Work<'_>, watcher: Watcher, work: impl FnOnce(&Watcher) -> Result<T>) -> Result<T> {
    // Before any thread is made, so that none of them takes the signal.
    let signals = interrupts()?;
    let watcher = &watcher;
    let (end, ended) = mpsc::channel();
    thread::scope(|scope| {
        let drawer = thread::Builder::new()
            .name("progress".to_owned())
            .spawn_scoped(scope, move || draw(what, watcher, signals, &ended))
            .map_err(|cause| Error::spawning("start a thread", &cause))?;
        let outcome = work(watcher);
        // Nobody listens any more where the thread has panicked, which the scope reports.
        let _ = end.send(outcome.is_ok());
        // What comes back blocks Ctrl-C as long as it lives, here and not there.
        drop(drawer.join());
        outcome
    })
}

/// Ctrl-C as something to look for, unless the caller ignores it (`nohup`, `&` in a script).
fn interrupts() -> Result<Option<SignalDescriptor>> {
    if signals::is_ignored(libc::SIGINT) {
        return Ok(None);
    }
    SignalDescriptor::new(&[libc::SIGINT]).map(Some).map_err(|cause| Error::os("watch for Ctrl-C", &cause))
}

/// Draws until the work has ended.
fn draw(
    what: &Work<'_>,
    watcher: &Watcher,
    mut signals: Option<SignalDescriptor>,
    ended: &Receiver<bool>,
) -> Option<SignalDescriptor> {
    let mut bar: Option<(Bar, Instant)> = None;
    loop {
        let end = ended.recv_timeout(TICK);
        if signals.as_mut().is_some_and(|signals| matches!(signals.read(), Ok(Some(_)))) {
            watcher.is_cancelled.store(true, Ordering::Relaxed);
            // Dropped in this thread alone: the next Ctrl-C finds it, and ends the process as it always does.
            signals = None;
        }
        if bar.is_none() && watcher.is_planned.load(Ordering::Acquire) {
            bar = Some((Bar::new(&format!("{} {}", what.doing, what.name), what.quiet), Instant::now()));
        }
        if let Some((bar, begun)) = &mut bar {
            watcher.show(bar, begun.elapsed());
        }
        match end {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(true) => {
                if let Some((bar, _)) = bar {
                    bar.finish();
                }
                return signals;
            }
            Ok(false) | Err(RecvTimeoutError::Disconnected) => return signals,
        }
    }
}

impl Watcher {
    fn new(what: &Work<'_>, copies: bool) -> Watcher {
        Watcher {
            name: what.name.to_owned(),
            quiet: what.quiet,
            copies,
            read: AtomicU64::new(0),
            read_total: AtomicU64::new(0),
            written: AtomicU64::new(0),
            files: AtomicU64::new(0),
            files_total: AtomicU64::new(0),
            is_planned: AtomicBool::new(false),
            is_waiting: AtomicBool::new(false),
            is_cancelled: AtomicBool::new(false),
        }
    }

    fn plan(&self, bytes: u64, files: u64) {
        self.read_total.store(bytes, Ordering::Relaxed);
        self.files_total.store(files, Ordering::Relaxed);
        self.is_planned.store(true, Ordering::Release);
    }

    /// Files that are whole so far.
    pub(super) fn finished_files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    fn show(&self, bar: &mut Bar, since: Duration) {
        let read_total = self.read_total.load(Ordering::Relaxed);
        let progress = Progress {
            // What is read twice, because it was found damaged, is no more than all.
            bytes_done: self.read.load(Ordering::Relaxed).min(read_total),
            bytes_total: read_total,
            files_done: self.files.load(Ordering::Relaxed),
            files_total: self.files_total.load(Ordering::Relaxed),
            seconds: since.as_secs_f64(),
        };
        if self.copies {
            bar.update_copy(&progress, self.written.load(Ordering::Relaxed));
        } else {
            bar.update(&progress);
        }
    }
}

impl build::Watch for Watcher {
    fn planned(&self, read_bytes: u64, _written_bytes: u64, files: u64) {
        self.plan(read_bytes, files);
    }

    fn read(&self, bytes: u64) {
        self.read.fetch_add(bytes, Ordering::Relaxed);
    }

    fn wrote(&self, bytes: u64) {
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }

    fn finished_file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    fn waiting(&self) {
        if !self.is_waiting.swap(true, Ordering::Relaxed) && !self.quiet {
            output::note(&format!("waiting for another command that works on '{}'", self.name));
        }
    }

    fn cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }
}

impl verify::Watch for Watcher {
    fn read(&self, bytes: u64) {
        self.read.fetch_add(bytes, Ordering::Relaxed);
    }

    fn finished_file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }
}
