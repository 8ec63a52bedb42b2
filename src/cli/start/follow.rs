//! Waiting for a load: its progress, its end, and Ctrl-C.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::super::progress::Bar;
use super::wanted::Wanted;
use crate::control::client::Client;
use crate::control::frame::timespec;
use crate::control::message::{Operation, Progress, Reply};
use crate::daemon::spawn::{self, End, Spawned};
use crate::error::{Error, Kind, Result};
use crate::registry::{Lock, Record};
use crate::sys::crash;
use crate::sys::signals::{self, SignalDescriptor};
use crate::units::ByteSize;
use crate::view;

/// How long a load that was cancelled or failed may take to end, before it is left to itself.
const END_MAX: Duration = Duration::from_secs(30);

/// Ctrl-C as something to look for, unless the caller ignores it (`nohup`, `&` in a script).
pub(super) struct Interrupt {
    signals: Option<SignalDescriptor>,
}

impl Interrupt {
    pub(super) fn watch() -> Result<Interrupt> {
        let signals = if signals::is_ignored(libc::SIGINT) {
            None
        } else {
            let failed = |error: std::io::Error| Error::os("watch for Ctrl-C", &error);
            Some(SignalDescriptor::new(&[libc::SIGINT]).map_err(failed)?)
        };
        Ok(Interrupt { signals })
    }

    fn has_come(&mut self) -> bool {
        self.signals.as_mut().is_some_and(|signals| matches!(signals.read(), Ok(Some(_))))
    }

    /// An error of kind [`Kind::Cancelled`] once Ctrl-C was pressed.
    pub(super) fn check(&mut self) -> Result<()> {
        if self.has_come() { Err(Error::new(Kind::Cancelled, "cancelled")) } else { Ok(()) }
    }

    /// A daemon that is just starting gets Ctrl-C, too: its end is then no error of its own.
    pub(super) fn explain(&mut self, error: Error) -> Error {
        self.check().err().unwrap_or(error)
    }

    /// Waits until the daemon says something, Ctrl-C comes, or it is `deadline`.
    fn wait(&self, client: &Client, deadline: Option<Instant>) -> Result<()> {
        let timeout = deadline.map(|deadline| timespec(deadline.saturating_duration_since(Instant::now())));
        let client = client.as_fd();
        let mut watched = vec![PollFd::new(&client, PollFlags::IN)];
        watched.extend(self.signals.as_ref().map(|signals| PollFd::new(signals, PollFlags::IN)));
        match poll(&mut watched, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::os("wait for the daemon", &errno.into())),
        }
    }
}

/// A load that this command waits for.
pub(super) struct Follow {
    client: Client,
    /// The daemon, where this command started it.
    spawned: Option<Spawned>,
    /// Whether the daemon took the question: what ends it from then on is told to whoever waits.
    is_waiting: bool,
    last: Progress,
}

impl Follow {
    pub(super) fn joined(client: Client) -> Follow {
        Follow { client, spawned: None, is_waiting: false, last: Progress::default() }
    }

    /// Connects to a daemon that this command started, which is registered. `None` where it was ready, and has
    /// ended in order since.
    pub(super) fn spawned(wanted: &Wanted, mut spawned: Spawned) -> Result<Option<Follow>> {
        match wanted.connect(Path::new(&wanted.config.socket)) {
            Ok(client) => Ok(Some(Follow { spawned: Some(spawned), ..Follow::joined(client) })),
            Err(error) => why_ended(wanted, Some(&mut spawned), false, error).map_or(Ok(None), Err),
        }
    }

    /// Waits until the view is published, and gives its path. `None` where the daemon was on its way out before it
    /// took the question: what it was asked for can be loaded anew.
    pub(super) fn until_ready(
        mut self,
        wanted: &Wanted,
        deadline: Option<Instant>,
        quiet: bool,
        interrupt: &mut Interrupt,
    ) -> Result<Option<PathBuf>> {
        // Made late, so that a cache that is ready already shows none.
        let mut bar: Option<Bar> = None;
        if let Err(error) = self.client.send(Operation::Wait { progress: true }) {
            return self.ended(wanted, error);
        }
        crash::point("waiting");
        loop {
            // What was received already is looked at first: a short time to wait is enough for a cache
            // that is ready.
            match self.client.next(Some(Instant::now())) {
                Ok(Reply::Ready { view }) => {
                    if let Some(bar) = bar {
                        bar.finish();
                    }
                    return Ok(Some(PathBuf::from(view)));
                }
                Ok(Reply::Progress(progress)) => {
                    self.is_waiting = true;
                    self.last = progress;
                    let doing = || Bar::new(&format!("loading {}", wanted.config.name), quiet);
                    bar.get_or_insert_with(doing).update(&progress);
                }
                Ok(Reply::Error(error)) => {
                    // It is on its way out: whoever looks when this command has ended finds nothing left.
                    let _ = self.client.wait_for_end(Some(Instant::now() + END_MAX));
                    return Err(error.into());
                }
                Ok(Reply::Stopping { .. }) => {
                    let end_due = Instant::now() + END_MAX;
                    let until = deadline.filter(|_| !self.is_waiting).map_or(end_due, |at| at.min(end_due));
                    let _ = self.client.wait_for_end(Some(until));
                    if !self.is_waiting {
                        return Ok(None);
                    }
                    let message = format!("'{}' was stopped while it loaded", wanted.config.name);
                    return Err(Error::new(Kind::NotFound, message).hint("start it again"));
                }
                Ok(_) => return Err(Error::new(Kind::Failed, "the daemon answered out of turn")),
                Err(error) if error.kind() == Kind::TimedOut => {
                    if interrupt.has_come() {
                        drop(bar);
                        return Err(self.cancel(wanted));
                    }
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return Err(match self.client.is_stopped() {
                            true => error.context(format_args!("'{}' is not ready", wanted.config.name)),
                            false => self.out_of_time(wanted),
                        });
                    }
                    interrupt.wait(&self.client, deadline)?;
                }
                Err(error) => return self.ended(wanted, error),
            }
        }
    }

    /// The connection ended with `error`.
    fn ended(&mut self, wanted: &Wanted, error: Error) -> Result<Option<PathBuf>> {
        why_ended(wanted, self.spawned.as_mut(), self.is_waiting, error).map_or(Ok(None), Err)
    }

    fn out_of_time(&self, wanted: &Wanted) -> Error {
        let name = &wanted.config.name;
        let so_far = match self.last.bytes_total {
            0 => String::new(),
            total => format!(" ({} of {} so far)", ByteSize(self.last.bytes_done), ByteSize(total)),
        };
        Error::new(Kind::TimedOut, format!("'{name}' is not ready yet{so_far}; the load goes on"))
            .hint(format!("follow it with 'iloader wait {name}', or end it with 'iloader stop {name}'"))
    }

    /// Ctrl-C: ends the load, unless others wait for it.
    fn cancel(&mut self, wanted: &Wanted) -> Error {
        let name = &wanted.config.name;
        let deadline = Instant::now() + END_MAX;
        let cancelled = |what: String| Error::new(Kind::Cancelled, what);
        let goes_on = || {
            cancelled(format!("stopped waiting for '{name}'; the load goes on, because others want it"))
                .hint(format!("end it with 'iloader stop {name}'"))
        };
        // Progress that was sent before the cancelling came looks like the answer that others wait. The
        // answer to the question behind it tells: it comes after the one to the cancelling.
        let asked = self.client.send(Operation::Cancel {});
        if asked.and_then(|()| self.client.send(Operation::Status {})).is_err() {
            return cancelled(format!("cancelled; '{name}' has ended"));
        }
        loop {
            match self.client.next(Some(deadline)) {
                Ok(Reply::Stopping { .. }) => break,
                Ok(Reply::Ready { .. }) => {
                    return cancelled(format!("cancelled, but '{name}' was ready just before and stays"))
                        .hint(format!("end it with 'iloader stop {name}'"));
                }
                Ok(Reply::Status(_)) => return goes_on(),
                Ok(_) => {}
                Err(error) if error.kind() == Kind::TimedOut => {
                    return cancelled(format!("cancelled, but the daemon of '{name}' does not answer"))
                        .hint(format!("look at it with 'iloader status {name}'"));
                }
                Err(_) => return cancelled(format!("cancelled; '{name}' has ended")),
            }
        }
        match self.client.wait_for_end(Some(deadline)) {
            Ok(()) => cancelled(format!("cancelled; nothing of '{name}' is left in memory")),
            Err(_) => cancelled(format!("cancelled; '{name}' is still ending")),
        }
    }
}

/// The daemon is gone, as `error` says. Why, it said to who started it, or stands in the registration or in how its
/// process ended. `None` where it may have ended in order, because nobody was waiting for it yet.
fn why_ended(
    wanted: &Wanted,
    spawned: Option<&mut Spawned>,
    was_waiting: bool,
    error: Error,
) -> Option<Error> {
    if error.kind() != Kind::NotFound {
        return Some(error);
    }
    let mut spawned = spawned;
    let how = spawned.as_mut().map_or(End::Unknown, |spawned| spawned.ended());
    // Said to this command alone: the registration may have been cleaned up by the next one already.
    let mut failure = spawned.and_then(Spawned::failure);
    let failure_of = |record: &Option<Record>| record.as_ref().and_then(Record::failure);
    failure = failure.or_else(|| failure_of(&Record::read(&wanted.paths.record).ok().flatten()));
    // A failure that the daemon could tell nobody is told now, and so need not be kept for who asks later.
    if let Ok(Some(lock)) = Lock::try_exclusive(&wanted.paths.lock) {
        let record = Record::read(&wanted.paths.record).ok().flatten();
        failure = failure.or_else(|| failure_of(&record));
        view::clean_up_crashed(&wanted.paths, record.as_ref(), &lock, true);
        // Its file is all that can stay.
        let _ = lock.remove_and_release();
    }
    match (failure, how) {
        (Some(failure), _) => Some(failure),
        (None, End::InOrder | End::Unknown) if !was_waiting => None,
        (None, how) => Some(spawn::ended_early(&wanted.config, &format!("{how} before it was ready"))),
    }
}
