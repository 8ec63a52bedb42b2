//! One thread owns the state of a cache: a loop over [`Event`]s until the cache ends.
//!
//! ```text
//! Loading ──▶ Ready ──▶ Stopping ──▶ (ended)
//!    │                     ▲
//!    ├──── stop, cancel ───┘
//!    └──── the load failed ──▶ (ended)
//! ```
//!
//! The end has an order: the view is withdrawn before the descriptors behind it close, the memory is given
//! back, the files are removed, the lock is let go of, and only then do the connections close. So whoever
//! waits for the connection's end finds nothing left.

mod loading;
mod removal;
mod status;
mod uses;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sd_notify::NotifyState;

use crate::budget;
use crate::control::message::{Leased, Link, Operation, Progress, Reply};
use crate::daemon::config::{Boot, Config};
use crate::daemon::leases::{ConnectionId, LEASES_MAX, Leases};
use crate::daemon::listener::{Event, Listener};
use crate::daemon::load::{Load, Loaded, PublishedFile, Publisher, Withdraw, Work};
use crate::daemon::log::Log;
use crate::daemon::registered::Registered;
use crate::daemon::starter::Starter;
use crate::error::{Error, Kind, Result, shown};
use crate::failure::Failure;
use crate::readers::{Seen, Segments};
use crate::sys::crash;

use uses::Uses;

/// How long a load that is to give up may go on. A read from a dead network file system may never end; the
/// end of the process then ends it.
const LOAD_END_MAX: Duration = Duration::from_secs(10);

/// How long the last answers may take to be read.
const FINISH_MAX: Duration = Duration::from_secs(2);

/// A daemon that listens and is registered, and has not begun.
#[derive(Debug)]
pub struct Start {
    /// What was asked for.
    pub config: Config,
    /// Its ear.
    pub listener: Listener,
    /// Its files.
    pub registered: Registered,
    /// Its log.
    pub log: Log,
    /// The load, and the publishing.
    pub work: Work,
    /// The command that waits for the load, where there is one.
    pub starter: Option<Starter>,
}

/// How a cache ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was ready, and was stopped.
    Ready,
    /// It was stopped while it was loaded.
    Loading {
        /// The signal that stopped it, where it was one.
        signal: Option<i32>,
    },
}

/// Loads, serves, and ends. Returns when the cache is stopped and nothing of it is left; an error where the
/// load failed.
pub fn serve(start: Start) -> Result<Ended> {
    let Start { config, mut listener, registered, log, work, starter } = start;
    let Work { load, publish, find } = work;
    let begun = Uses::new(&listener, &find)
        .and_then(|uses| Ok((Load::start(load)?, uses)))
        .and_then(|(load, uses)| listener.watch_load(&load).map(|()| (load, uses)));
    let (load, uses) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            tell_failure(starter.as_ref(), &error);
            registered.keep_failure(&error, &mut listener, &log);
            return Err(error);
        }
    };
    log.line(format_args!(
        "iloader {} loads '{}' from {} as process {}",
        env!("CARGO_PKG_VERSION"),
        config.name,
        loaded_from(&config),
        std::process::id()
    ));
    let charged_cgroup = budget::Limits::find().charged_cgroup().map(str::to_owned);
    if let Some(Err(error)) = registered.removal().map(|removal| listener.watch_removal(removal)) {
        log.line(error.message());
    }
    let reports_to_manager = std::env::var_os("NOTIFY_SOCKET").is_some();
    let mut server = Server {
        config,
        registered,
        listener,
        log,
        load,
        publish: Some(publish),
        starter,
        phase: Phase::Loading,
        leases: Leases::default(),
        waiters: BTreeMap::new(),
        uses,
        progress_sent: None,
        progress_waits: false,
        idle_since: Instant::now(),
        notify_due: reports_to_manager.then(Instant::now),
        give_up_due: None,
        charged_cgroup,
        removed: None,
        ended: Ended::Ready,
    };
    let ending = server.run();
    server.end(ending)
}

struct Server {
    config: Config,
    registered: Registered,
    listener: Listener,
    log: Log,
    load: Load,
    /// Taken when the load is done.
    publish: Option<Publisher>,
    /// Who is told where the load fails; let go of when it is done.
    starter: Option<Starter>,
    phase: Phase,
    leases: Leases,
    /// Who waits for readiness, and whether they want to hear how far it is.
    waiters: BTreeMap<ConnectionId, bool>,
    /// Who reads without a lease, and who waits for the end of that.
    uses: Uses,
    progress_sent: Option<Instant>,
    /// Progress was reported and not sent yet, because the last one went out a moment ago.
    progress_waits: bool,
    /// When the last lease ended, or the view was published, or somebody was last seen to read without a lease.
    idle_since: Instant,
    /// When the service manager is to be told that the load goes on, where there is one.
    notify_due: Option<Instant>,
    /// When a load that ends by itself, because memory runs out, must have ended.
    give_up_due: Option<Instant>,
    /// The control group that the segments are charged to. Memory stays charged to the group that its process
    /// was in when it took it, so this is not looked up again.
    charged_cgroup: Option<String>,
    /// When it was noticed that BASE was removed.
    removed: Option<Instant>,
    /// What it will have been.
    ended: Ended,
}

enum Phase {
    Loading,
    Ready(Resident),
    /// The view is withdrawn; a thread ends the load or gives the memory back, at the latest then.
    Stopping {
        until: Option<Instant>,
    },
    Ended(Ending),
}

/// What a ready cache holds.
struct Resident {
    loaded: Box<Loaded>,
    withdraw: Withdraw,
    progress: Progress,
    /// What readers are known by.
    segments: Arc<Segments>,
}

enum Ending {
    Stopped,
    Failed {
        error: Error,
        /// Somebody was told why, so that nothing needs to be kept for who asks later.
        was_told: bool,
    },
}

impl Server {
    fn run(&mut self) -> Ending {
        loop {
            match self.listener.next(self.deadline()) {
                Ok(Event::Request { from, operation }) => self.handle_request(from, operation),
                Ok(Event::Closed { from }) => self.handle_closed(from),
                Ok(Event::ProcessEnded { lease }) => {
                    let ended = self.leases.process_ended(lease);
                    self.handle_lease_end(ended);
                }
                Ok(Event::ReaderEnded) => self.reader_ended(),
                Ok(Event::Look) => self.handle_look(),
                Ok(Event::Signal(signal)) => self.handle_signal(signal),
                Ok(Event::Load) => self.handle_load(),
                Ok(Event::Removal) => self.notice_removal(),
                Ok(Event::Deadline) => self.handle_deadline(Instant::now()),
                Err(error) => self.fail(error),
            }
            if matches!(self.phase, Phase::Ended(_))
                && let Phase::Ended(ending) =
                    std::mem::replace(&mut self.phase, Phase::Stopping { until: None })
            {
                return ending;
            }
        }
    }

    /// When something is to be done although nothing happens; `None` for a cache that rests.
    fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Loading => self.load_deadline(),
            Phase::Ready(_) => self.use_deadline(),
            Phase::Stopping { until } => *until,
            Phase::Ended(_) => None,
        }
    }

    fn handle_deadline(&mut self, now: Instant) {
        match &self.phase {
            Phase::Loading => self.handle_load_deadline(now),
            Phase::Ready(_) => self.handle_use_deadline(now),
            Phase::Stopping { until } => {
                if until.is_some_and(|until| now >= until) {
                    self.log.line("the load did not end in time; the end of the process ends it");
                    self.phase = Phase::Ended(Ending::Stopped);
                }
            }
            Phase::Ended(_) => {}
        }
    }

    // Signals and ends.

    fn handle_signal(&mut self, signal: i32) {
        if matches!(self.phase, Phase::Stopping { .. }) {
            return;
        }
        let leases = self.leases.count();
        self.log.line(format_args!("signal {signal}: it is stopped, with {leases} live leases"));
        self.begin_stop(false, None);
        if let Ended::Loading { signal: by } = &mut self.ended {
            *by = Some(signal);
        }
    }

    fn handle_closed(&mut self, connection: ConnectionId) {
        self.waiters.remove(&connection);
        self.uses.forget(connection);
        let ended = self.leases.connection_closed(connection);
        self.handle_lease_end(ended);
    }

    fn handle_lease_end(&mut self, ended: Option<i32>) {
        let Some(pid) = ended else { return };
        self.log.line(format_args!("the lease of process {pid} ended"));
        if self.leases.count() > 0 {
            return;
        }
        let now = Instant::now();
        self.idle_since = now;
        self.leases_ended(now);
    }

    // Requests.

    fn handle_request(&mut self, from: ConnectionId, operation: Operation) {
        // The watch tells earlier, where there is one.
        self.notice_removal();
        let is_waiting = self.waiters.contains_key(&from) || self.uses.is_waiting(from);
        match operation {
            Operation::Cancel {} => self.cancel(from),
            _ if is_waiting => {
                // Answered at once, it would be taken for the answer that the connection waits for.
                self.waiters.remove(&from);
                self.uses.forget(from);
                self.refuse(
                    from,
                    &Error::new(Kind::Usage, "this connection waits already: it can only cancel"),
                );
            }
            Operation::Status {} => {
                let status = self.status();
                self.listener.reply(from, &Reply::Status(Box::new(status)));
            }
            Operation::Manifest {} => self.answer_when_ready(from, |resident| {
                Reply::Manifest(Box::new(resident.loaded.manifest.clone()))
            }),
            Operation::Wait { progress } => self.wait(from, progress),
            Operation::Lease {} => self.lease(from),
            Operation::Readers {} => self.tell_readers(from),
            Operation::Stop { force, remove_view, wait_milliseconds } => {
                self.stop(from, force, remove_view, wait_milliseconds.map(Duration::from_millis));
            }
        }
    }

    fn refuse(&mut self, from: ConnectionId, error: &Error) {
        self.listener.reply(from, &Reply::Error(Failure::from(error)));
    }

    fn answer_when_ready(&mut self, from: ConnectionId, answer: impl FnOnce(&Resident) -> Reply) {
        match &self.phase {
            Phase::Ready(resident) => self.listener.reply(from, &answer(resident)),
            _ => {
                let error = self.not_ready();
                self.refuse(from, &error);
            }
        }
    }

    fn not_ready(&self) -> Error {
        let name = &self.config.name;
        match self.phase {
            Phase::Loading => Error::new(Kind::TimedOut, format!("'{name}' is still loading"))
                .hint(format!("'iloader wait {name}' waits until it is ready")),
            _ => Error::new(Kind::NotFound, format!("'{name}' is being stopped"))
                .hint("start it again when that is done"),
        }
    }

    fn lease(&mut self, from: ConnectionId) {
        if matches!(self.phase, Phase::Ready(_))
            && !self.leases.contains(from)
            && let Err(error) = self.take_lease(from)
        {
            return self.refuse(from, &error);
        }
        let view = self.config.model_dir();
        self.answer_when_ready(from, |resident| {
            let link = |file: &PublishedFile| Link {
                path: file.path.clone(),
                bytes: file.bytes,
                device: file.device,
                inode: file.inode,
            };
            Reply::Leased(Box::new(Leased {
                view,
                backing: resident.loaded.report.backing.clone(),
                links: resident.loaded.links.iter().map(link).collect(),
            }))
        });
    }

    fn take_lease(&mut self, from: ConnectionId) -> Result<()> {
        if self.leases.count() >= LEASES_MAX {
            let name = &self.config.name;
            let error =
                Error::new(Kind::NoRoom, format!("'{name}' has {LEASES_MAX} leases, which is the most"));
            return Err(error.hint("read through the view without a lease, or end some readers"));
        }
        // Gone while its request waited: there is nobody to give a lease to.
        let Some(process) = self.listener.process(from) else { return Ok(()) };
        self.listener.watch_process(from, &process)?;
        self.listener.set_leasing(from);
        self.leases.take(from, process);
        self.log.line(format_args!("process {} took a lease", self.listener.pid(from)));
        crash::point("leased");
        Ok(())
    }

    // The end.

    fn fail(&mut self, error: Error) {
        self.log.line(format_args!("failed: {}", error.message()));
        tell_failure(self.starter.as_ref(), &error);
        let was_told = !self.waiters.is_empty();
        self.tell_waiters(&error);
        if let Phase::Ready(resident) = std::mem::replace(&mut self.phase, Phase::Loading) {
            self.withdraw(resident.withdraw, false);
        }
        self.phase = Phase::Ended(Ending::Failed { error, was_told });
    }

    fn tell_waiters(&mut self, error: &Error) {
        for (waiter, _) in std::mem::take(&mut self.waiters) {
            self.refuse(waiter, error);
        }
    }

    /// Withdraws the view and has the load ended or the memory given back, after which the loop ends.
    /// Tells everybody who waited. `seen` is who reads at that moment, where it was looked for. Gives what whoever
    /// asked for it is to be told: what there is to know of the view, and who still holds the memory.
    fn begin_stop(&mut self, remove_view: bool, seen: Option<&Seen>) -> Reply {
        crash::point("stop-received");
        notify(&[NotifyState::Stopping]);
        let remove_view = remove_view || self.is_view_unwanted();
        let mut notes = Vec::new();
        let until = match std::mem::replace(&mut self.phase, Phase::Stopping { until: None }) {
            Phase::Loading => {
                self.load.cancel();
                self.ended = Ended::Loading { signal: None };
                Some(Instant::now() + LOAD_END_MAX)
            }
            Phase::Ready(resident) => {
                let Resident { loaded, withdraw, .. } = resident;
                notes = self.withdraw(withdraw, remove_view);
                crash::point("view-withdrawn");
                self.load.release(loaded);
                None
            }
            ended => {
                self.phase = ended;
                return Reply::Stopping { notes, holders: None };
            }
        };
        self.phase = Phase::Stopping { until };
        for (waiter, _) in std::mem::take(&mut self.waiters) {
            self.listener.reply(waiter, &Reply::Stopping { notes: Vec::new(), holders: None });
        }
        let reply = Reply::Stopping { notes, holders: seen.map(|seen| Box::new(self.in_words(seen))) };
        for stop in self.uses.take_stops() {
            self.listener.reply(stop, &reply);
        }
        let error = self.not_ready();
        for question in self.uses.take_questions() {
            self.refuse(question, &error);
        }
        reply
    }

    fn withdraw(&self, withdraw: Withdraw, remove_view: bool) -> Vec<String> {
        let notes = withdraw(remove_view)
            .unwrap_or_else(|error| vec![format!("the view stays: {}", error.message())]);
        notes.iter().for_each(|note| self.log.line(note));
        notes
    }

    fn end(self, ending: Ending) -> Result<Ended> {
        let Server { registered, mut listener, log, ended, .. } = self;
        let outcome = match ending {
            Ending::Stopped => {
                registered.remove(&mut listener, &log);
                Ok(ended)
            }
            Ending::Failed { error, was_told: true } => {
                registered.remove(&mut listener, &log);
                Err(error)
            }
            Ending::Failed { error, was_told: false } => {
                registered.keep_failure(&error, &mut listener, &log);
                Err(error)
            }
        };
        log.line("ended");
        listener.finish(Instant::now() + FINISH_MAX);
        outcome
    }
}

/// What is loaded, for the log: the source, or the generation that stands for it.
fn loaded_from(config: &Config) -> String {
    let source = shown(&config.source);
    match &config.generation {
        Some(generation) => format!("{}, a copy of {source},", shown(generation)),
        None => source,
    }
}

/// Tells the command that started the daemon. Where it has gone, nobody is to be told.
fn tell_failure(starter: Option<&Starter>, error: &Error) {
    if let Some(starter) = starter {
        let _ = starter.tell(&Boot::Failed(error.into()));
    }
}

/// Tells the service manager, where there is one. It is a courtesy: a failure changes nothing.
fn notify(states: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(states);
}

#[cfg(test)]
mod tests;
