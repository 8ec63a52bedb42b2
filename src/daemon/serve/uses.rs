//! Who uses the cache, and what hangs on it: stops, eviction, and the question itself.
//!
//! Leases are known at every moment. Readers without one are looked for in `/proc`, when a decision hangs on it
//! and at no other time: for a `stop`, once when `--idle-ttl` is over, and when a client asks. Only while
//! somebody waits with a `stop` are looks repeated, at growing intervals and when a reader ends, since nothing
//! tells that a process has closed a file.
//!
//! Between a look and the end of the cache somebody may still open a file. He keeps what he has mapped or open,
//! like every reader of a cache that is stopped by force.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{Phase, Server};
use crate::control::message::{LOOK_MAX, LeaseInfo, ReaderInfo, Readers, Reply};
use crate::daemon::leases::ConnectionId;
use crate::daemon::listener::Listener;
use crate::daemon::looks::{Find, Look, Looker};
use crate::error::{Error, Kind, Result};
use crate::readers::{Detail, Reader, Seen, Segments, named};

/// How long a stop by force waits for a look that only tells who holds the memory.
const FORCED_LOOK_MAX: Duration = Duration::from_secs(3);

/// The pause between two looks while a stop waits; it doubles each time, up to the longest.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// After a look that found a reader the next one for the same eviction comes no sooner, however short the TTL.
const EVICTION_PAUSE_MIN: Duration = Duration::from_secs(10);

/// Readers whose end is watched for; the end of others is found by the next look.
const WATCHED_MAX: usize = 32;

/// What the daemon knows of uses beside the leases, and who waits for their end.
pub(super) struct Uses {
    /// Looks that decisions hang on.
    decisive: Looker,
    /// Looks that somebody asked for: closer ones, which may take longer.
    curious: Looker,
    /// Clients that want to stop the cache.
    stops: Vec<PendingStop>,
    /// Clients that want to know who reads, and since when.
    questions: Vec<(ConnectionId, Instant)>,
    /// When the next look is due because a stop waits.
    look_again: Option<Instant>,
    pause: Duration,
    /// A look is being taken, or wanted, because the cache seems idle.
    is_evicting: bool,
    /// No look for the sake of eviction before that.
    eviction_after: Option<Instant>,
    /// Who read when it was looked last.
    readers: Vec<Reader>,
    /// Their processes, as far as they are watched.
    watched: Vec<OwnedFd>,
}

struct PendingStop {
    from: ConnectionId,
    /// A look that began later decides.
    asked: Instant,
    /// There was one, or leases made it needless.
    is_judged: bool,
    /// How long it waits for uses to end; `None`: it does not.
    until: Option<Instant>,
    force: bool,
    remove_view: bool,
}

impl PendingStop {
    /// When it is given up.
    fn deadline(&self) -> Instant {
        let look = self.asked + if self.force { FORCED_LOOK_MAX } else { LOOK_MAX };
        match self.until {
            Some(until) if self.is_judged => until,
            Some(until) => until.max(look),
            None => look,
        }
    }
}

impl Uses {
    pub(super) fn new(listener: &Listener, find: &Find) -> Result<Uses> {
        let (decisive, curious) = (Looker::new(find, Detail::Who)?, Looker::new(find, Detail::Memory)?);
        listener.watch_look(&decisive)?;
        listener.watch_look(&curious)?;
        Ok(Uses {
            decisive,
            curious,
            stops: Vec::new(),
            questions: Vec::new(),
            look_again: None,
            pause: PAUSE_MIN,
            is_evicting: false,
            eviction_after: None,
            readers: Vec::new(),
            watched: Vec::new(),
        })
    }

    /// Whether a connection waits for an answer from here.
    pub(super) fn is_waiting(&self, connection: ConnectionId) -> bool {
        self.stops.iter().any(|stop| stop.from == connection)
            || self.questions.iter().any(|question| question.0 == connection)
    }

    /// The connection wants no answer any more.
    pub(super) fn forget(&mut self, connection: ConnectionId) {
        let before = self.stops.len();
        self.stops.retain(|stop| stop.from != connection);
        self.questions.retain(|question| question.0 != connection);
        if self.stops.len() < before {
            self.rest();
        }
    }

    /// Where no stop waits any more, nobody is watched for its sake.
    fn rest(&mut self) {
        if self.stops.is_empty() {
            self.look_again = None;
            self.watched.clear();
        }
    }

    /// Everybody who waits to stop the cache, which is being stopped.
    pub(super) fn take_stops(&mut self) -> Vec<ConnectionId> {
        self.watched.clear();
        self.look_again = None;
        std::mem::take(&mut self.stops).into_iter().map(|stop| stop.from).collect()
    }

    /// Everybody who asked who reads a cache that is being stopped.
    pub(super) fn take_questions(&mut self) -> Vec<ConnectionId> {
        std::mem::take(&mut self.questions).into_iter().map(|question| question.0).collect()
    }
}

impl Server {
    // Time.

    /// When something is to be done for a ready cache although nothing happens.
    pub(super) fn use_deadline(&self) -> Option<Instant> {
        let stops = self.uses.stops.iter().map(PendingStop::deadline);
        stops.chain(self.uses.look_again).chain(self.eviction_due()).min()
    }

    pub(super) fn handle_use_deadline(&mut self, now: Instant) {
        self.give_up_stops(now);
        if self.uses.look_again.is_some_and(|due| now >= due) {
            self.look();
        }
        if self.eviction_due().is_some_and(|due| now >= due) {
            self.uses.is_evicting = true;
            self.look();
        }
    }

    /// When it is to be looked whether an idle cache may go.
    fn eviction_due(&self) -> Option<Instant> {
        if self.leases.count() > 0 || self.uses.is_evicting || !matches!(self.phase, Phase::Ready(_)) {
            return None;
        }
        let ttl = self.config.idle_ttl_seconds.and_then(|ttl| Duration::try_from_secs_f64(ttl).ok());
        let idle = ttl.and_then(|ttl| self.idle_since.checked_add(ttl));
        let due = idle.into_iter().chain(self.removal_due()).min()?;
        Some(self.uses.eviction_after.map_or(due, |after| after.max(due)))
    }

    fn give_up_stops(&mut self, now: Instant) {
        let (late, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.uses.stops).into_iter().partition(|stop| now >= stop.deadline());
        self.uses.stops = waiting;
        if late.iter().any(|stop| stop.force) {
            self.log.line("the look for readers takes too long: it is stopped without");
            let remove_view = late.iter().any(|stop| stop.remove_view);
            let reply = self.begin_stop(remove_view, None);
            return late.iter().for_each(|stop| self.listener.reply(stop.from, &reply));
        }
        for stop in late {
            let error = match stop.is_judged || self.leases.count() > 0 {
                true if stop.until.is_some() => self.in_use().hint(
                    "they did not end in that time: wait longer (--wait alone has no limit), or stop it under them \
                     with --force",
                ),
                true => self.in_use(),
                false => self.blind(),
            };
            self.refuse(stop.from, &error);
            self.uses.rest();
        }
    }

    // Requests.

    pub(super) fn stop(
        &mut self,
        from: ConnectionId,
        force: bool,
        remove_view: bool,
        wait: Option<Duration>,
    ) {
        match self.phase {
            Phase::Stopping { .. } | Phase::Ended(_) => {
                return self.listener.reply(from, &Reply::Stopping { notes: Vec::new(), holders: None });
            }
            // Nothing is published yet that anybody could read.
            Phase::Loading => {
                self.log.line(format_args!("process {} stops it", self.listener.pid(from)));
                let reply = self.begin_stop(remove_view, None);
                return self.listener.reply(from, &reply);
            }
            Phase::Ready(_) => {}
        }
        // Where the processes of all leases have ended, a look can tell who goes on in their place.
        let is_judged = !force && self.leases.count() > 0 && !self.leases.are_left_over();
        if is_judged && wait.is_none() {
            let error = self.in_use();
            return self.refuse(from, &error);
        }
        // A wait beyond the clock's end is one for ever, and a century is as good.
        const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 86400);
        let now = Instant::now();
        let until = wait.filter(|_| !force).map(|wait| now + wait.min(FOR_EVER));
        self.listener.set_waiting(from);
        self.uses.stops.push(PendingStop { from, asked: now, is_judged, until, force, remove_view });
        self.uses.pause = PAUSE_MIN;
        if !is_judged {
            self.look();
        }
    }

    /// Answers who reads, when that was looked for.
    pub(super) fn tell_readers(&mut self, from: ConnectionId) {
        let Some(segments) = self.segments() else {
            let error = self.not_ready();
            return self.refuse(from, &error);
        };
        self.listener.set_waiting(from);
        self.uses.questions.push((from, Instant::now()));
        self.uses.curious.begin(&segments);
    }

    // Events.

    /// The last lease ended: whoever waited for that may go on, unless there are readers without one.
    pub(super) fn leases_ended(&mut self, now: Instant) {
        for stop in &mut self.uses.stops {
            (stop.asked, stop.is_judged) = (now, false);
        }
        if !self.uses.stops.is_empty() {
            self.uses.pause = PAUSE_MIN;
            self.look();
        }
    }

    /// A process ended that was a reader at the last look.
    pub(super) fn reader_ended(&mut self) {
        // Closed, because they would wake the daemon on and on. The next look has the others watched again.
        self.uses.watched.clear();
        if self.uses.stops.is_empty() {
            // It was idle from now on at the earliest.
            self.idle_since = Instant::now();
            self.uses.eviction_after = None;
        } else if self.leases.count() == 0 {
            self.uses.pause = PAUSE_MIN;
            self.look();
        }
    }

    pub(super) fn handle_look(&mut self) {
        if let Some(look) = self.uses.curious.take() {
            self.answer_questions(look);
        }
        if let Some(look) = self.uses.decisive.take() {
            self.uses.look_again = None;
            if matches!(self.phase, Phase::Ready(_)) {
                self.decide(look);
            }
        }
    }

    fn answer_questions(&mut self, look: Look) {
        let (answered, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.uses.questions).into_iter().partition(|(_, asked)| *asked <= look.began);
        let reply = match look.seen {
            Ok(seen) => Reply::Readers(Box::new(self.in_words(&seen))),
            Err(error) => Reply::Error((&error).into()),
        };
        answered.iter().for_each(|(from, _)| self.listener.reply(*from, &reply));
        if let Some(segments) = self.segments().filter(|_| !later.is_empty()) {
            self.uses.curious.begin(&segments);
        }
        self.uses.questions = later;
    }

    /// Stops, evicts, refuses or lets wait on, by what was seen.
    fn decide(&mut self, look: Look) {
        let is_due = |stop: &PendingStop| stop.asked <= look.began;
        let is_evicting = std::mem::take(&mut self.uses.is_evicting) && self.leases.count() == 0;
        let seen = match look.seen {
            Ok(seen) => seen,
            Err(error) => return self.decide_blindly(look.began, &error),
        };
        let due: Vec<&PendingStop> = self.uses.stops.iter().filter(|stop| is_due(stop)).collect();
        let is_free = self.leases.count() == 0 && seen.readers.is_empty();
        let is_forced = due.iter().any(|stop| stop.force);
        if is_forced || (is_free && (is_evicting || !due.is_empty())) {
            let remove_view = due.iter().any(|stop| stop.remove_view);
            if due.is_empty() {
                self.log.line(self.why_evicted());
            } else {
                let asking = self.listener.pid(due[0].from);
                let (leases, readers) = (self.leases.count(), seen.readers.len());
                self.log.line(format_args!(
                    "process {asking} stops it, with {leases} live leases and {readers} readers"
                ));
            }
            self.begin_stop(remove_view, Some(&seen));
            return;
        }
        let is_news = seen.readers.iter().map(|reader| reader.process.pid).collect::<Vec<_>>()
            != self.uses.readers.iter().map(|reader| reader.process.pid).collect::<Vec<_>>();
        self.uses.readers = seen.readers;
        if is_evicting {
            self.postpone_eviction(is_news);
        }
        self.refuse_or_wait(look.began);
    }

    /// Of the stops that a look decides: who does not wait is refused, the others are judged again later.
    fn refuse_or_wait(&mut self, began: Instant) {
        let (refused, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.uses.stops)
            .into_iter()
            .partition(|stop| stop.asked <= began && stop.until.is_none());
        self.uses.stops = waiting;
        let error = self.in_use();
        refused.iter().for_each(|stop| self.refuse(stop.from, &error));
        let now = Instant::now();
        let mut is_late = false;
        for stop in &mut self.uses.stops {
            stop.is_judged |= stop.asked <= began;
            is_late |= !stop.is_judged;
        }
        if is_late {
            return self.look();
        }
        if !self.uses.stops.is_empty() {
            self.watch_readers();
            if self.leases.count() == 0 {
                self.uses.look_again = Some(now + self.uses.pause);
                self.uses.pause = (2 * self.uses.pause).min(PAUSE_MAX);
            }
        }
    }

    fn postpone_eviction(&mut self, is_news: bool) {
        let now = Instant::now();
        // It was in use a moment ago, so that the time counts anew.
        self.idle_since = now;
        self.uses.eviction_after = Some(now + EVICTION_PAUSE_MIN);
        self.watch_readers();
        if is_news {
            let readers = self.named_readers();
            self.log.line(format_args!("--idle-ttl is over, but it is read without a lease by {readers}"));
        }
    }

    /// No look could be taken: force goes without, everything else stays as it is.
    fn decide_blindly(&mut self, began: Instant, error: &Error) {
        self.log.line(error.message());
        self.uses.eviction_after = Some(Instant::now() + EVICTION_PAUSE_MIN);
        if self.uses.stops.iter().any(|stop| stop.force) {
            let remove_view = self.uses.stops.iter().any(|stop| stop.force && stop.remove_view);
            self.begin_stop(remove_view, None);
            return;
        }
        let (refused, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.uses.stops).into_iter().partition(|stop| stop.asked <= began);
        self.uses.stops = later;
        refused.iter().for_each(|stop| self.refuse(stop.from, error));
        if !self.uses.stops.is_empty() {
            self.look();
        }
    }

    // Looks.

    fn segments(&self) -> Option<Arc<Segments>> {
        match &self.phase {
            Phase::Ready(resident) => Some(Arc::clone(&resident.segments)),
            _ => None,
        }
    }

    /// Looks for readers. Where a look is being taken already, what it finds has the next one begin.
    fn look(&mut self) {
        self.uses.look_again = None;
        if let Some(segments) = self.segments() {
            self.uses.decisive.begin(&segments);
        }
    }

    /// Wakes the daemon when one of the readers ends.
    fn watch_readers(&mut self) {
        self.uses.watched.clear();
        for reader in self.uses.readers.iter().take(WATCHED_MAX) {
            let process = Pid::from_raw(reader.process.pid)
                .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
                .filter(|process| self.listener.watch_reader(process).is_ok());
            self.uses.watched.extend(process);
        }
    }

    // Words.

    pub(super) fn in_words(&self, seen: &Seen) -> Readers {
        let reader = |reader: &Reader| ReaderInfo {
            pid: reader.process.pid,
            command: reader.process.command.clone(),
            lease: self.leases.is_held_by(reader.process.pid),
            descriptors: reader.descriptors,
            mapped_bytes: reader.mapped_bytes,
            resident_bytes: reader.memory.map(|memory| memory.resident_bytes),
            private_bytes: reader.memory.map(|memory| memory.private_bytes),
            own_bytes: reader.memory.and_then(|memory| memory.own_bytes),
        };
        let unseen = seen
            .unseen
            .iter()
            .map(|process| LeaseInfo { pid: process.pid, command: process.command.clone() });
        Readers {
            readers: seen.readers.iter().map(reader).collect(),
            unseen: unseen.collect(),
            unseen_of_others: seen.unseen_of_others,
        }
    }

    fn named_readers(&self) -> String {
        let readers = &self.uses.readers;
        named(readers.iter().map(|reader| (reader.process.pid, reader.process.command.as_str())))
    }

    fn in_use(&self) -> Error {
        let name = &self.config.name;
        let message = if self.leases.count() > 0 {
            let leases = self.leases.list();
            let holders = named(leases.iter().map(|lease| (lease.pid, lease.command.as_str())));
            let readers = match self.leases.are_left_over() && !self.uses.readers.is_empty() {
                true => format!("; it is read by {}", self.named_readers()),
                false => String::new(),
            };
            format!("'{name}' is in use by {holders}{readers}")
        } else {
            format!("'{name}' is in use without a lease by {}", self.named_readers())
        };
        Error::new(Kind::InUse, message).hint("wait for them with --wait, or stop it under them with --force")
    }

    fn blind(&self) -> Error {
        let message = format!(
            "'{}' is not stopped: the look through the processes for its readers takes more than {} s",
            self.config.name,
            LOOK_MAX.as_secs()
        );
        Error::new(Kind::TimedOut, message).hint(
            "a process may hang in the kernel (state D in ps); --force stops the cache without that look",
        )
    }
}
