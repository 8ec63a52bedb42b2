//! A cache while it loads: who hears of its progress, who may cancel it, and what becomes of the load's end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};
use sd_notify::NotifyState;

use super::{Ending, LOAD_END_MAX, Phase, Resident, Server, notify};
use crate::budget::limits;
use crate::control::message::{Progress, Reply};
use crate::daemon::leases::{ConnectionId, DESCRIPTORS_PER_LEASE, LEASES_MAX};
use crate::daemon::ledger::Share;
use crate::daemon::listener::CONNECTIONS_MAX;
use crate::daemon::load::{Loaded, Outcome, Published};
use crate::error::{Error, Kind};
use crate::sys::crash;
use crate::sys::process::trim_heap;
use crate::units::ByteSize;

/// The least time between two [`Reply::Progress`] to one waiter.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// A service manager is told so often that a long load is alive, and believes it three times as long.
const NOTIFY_EVERY: Duration = Duration::from_secs(10);

/// Descriptors that a ready daemon needs beside those of its segments and clients, with room to spare.
const DESCRIPTORS_REST: usize = 64;

impl Server {
    /// When something is to be done while it loads although nothing happens.
    pub(super) fn load_deadline(&self) -> Option<Instant> {
        let progress = self.progress_sent.filter(|_| self.progress_waits);
        let progress = progress.map(|sent| sent + PROGRESS_EVERY);
        progress.into_iter().chain(self.notify_due).chain(self.give_up_due).min()
    }

    pub(super) fn handle_load_deadline(&mut self, now: Instant) {
        if self.progress_waits && self.is_progress_due(now) {
            self.send_progress(now);
        }
        self.notify_of_load(now);
        if self.give_up_due.is_some_and(|due| now >= due)
            && let Some(reason) = self.load.given_up()
        {
            self.log.line("the load did not end in time; the end of the process ends it");
            self.fail(reason);
        }
    }

    pub(super) fn handle_load(&mut self) {
        match (self.load.take_outcome(), &self.phase) {
            (None, Phase::Loading) => {
                self.progress_waits = true;
                let now = Instant::now();
                if self.give_up_due.is_none() && self.load.given_up().is_some() {
                    self.give_up_due = Some(now + LOAD_END_MAX);
                }
                if self.is_progress_due(now) {
                    self.send_progress(now);
                }
            }
            (Some(Outcome::Loaded(Ok(loaded))), Phase::Loading) => {
                // The watch over BASE may be about to tell.
                self.notice_removal();
                match self.removed {
                    None => self.become_ready(loaded),
                    // Its view would make BASE anew.
                    Some(_) => self.load.release(loaded),
                }
            }
            (Some(Outcome::Released), Phase::Loading) => {
                if let Some(reason) = self.load.given_up() {
                    self.fail(reason);
                }
            }
            (Some(Outcome::Loaded(Err(error))), Phase::Loading) => self.fail(error),
            // It was done a moment before it was told to give up. There is no read left that may hang, so
            // that the end waits for the memory, and whoever cancelled hears of it when none is left.
            (Some(Outcome::Loaded(Ok(loaded))), _) => {
                self.phase = Phase::Stopping { until: None };
                self.load.release(loaded);
            }
            (Some(Outcome::Loaded(Err(_)) | Outcome::Released), _) => {
                crash::point("memory-released");
                self.phase = Phase::Ended(Ending::Stopped);
            }
            (None, _) => {}
        }
    }

    fn become_ready(&mut self, mut loaded: Box<Loaded>) {
        // One cache, one time: the registration has it already.
        self.registered.created().clone_into(&mut loaded.manifest.created);
        let Some(publish) = self.publish.take() else { return };
        let Published { withdraw, notes } = match publish(&self.config, &loaded) {
            Ok(published) => published,
            Err(error) => return self.fail(error),
        };
        // From here on the start has succeeded, but for the quota that it was to set.
        if let Some(Err(error)) = loaded.share.as_mut().map(Share::commit) {
            self.withdraw(withdraw, false);
            return self.fail(error.context("the quota cannot be set (--max-resident-bytes)"));
        }
        let progress = self.load.progress();
        for warning in loaded.report.warnings.iter().chain(&notes) {
            self.log.line(format_args!("warning: {warning}"));
        }
        let summary = format!(
            "ready: {} files, {} in {:.1} s",
            loaded.manifest.files.len(),
            ByteSize(loaded.manifest.bytes),
            progress.seconds
        );
        self.log.line(format_args!("{summary}; {}, {}", loaded.report.engine, loaded.report.backing));
        notify(&[NotifyState::Ready, NotifyState::Status(&summary)]);
        crash::point("ready-notified");
        self.make_room_for_clients(loaded.links.len());
        let segments = Arc::new(loaded.links.iter().map(|file| (file.device, file.inode)).collect());
        self.phase = Phase::Ready(Resident { loaded, withdraw, progress, segments });
        self.starter = None;
        self.idle_since = Instant::now();
        let ready = Reply::Ready { view: self.config.model_dir() };
        for (waiter, _) in std::mem::take(&mut self.waiters) {
            self.listener.reply(waiter, &ready);
        }
        trim_heap();
    }

    /// Raises the limit of descriptors to what all the leases and connections take that are admitted, beside
    /// `published` ones, as far as the hard limit goes. Beyond that clients are refused for want of them.
    fn make_room_for_clients(&self, published: usize) {
        let clients = LEASES_MAX * DESCRIPTORS_PER_LEASE + CONNECTIONS_MAX;
        let needed = (published + clients + DESCRIPTORS_REST) as u64;
        let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
        if let Err(error) = limits::raise_descriptors(needed.min(most)) {
            self.log.line(error.message());
        }
    }

    /// Whether the waiters may hear of progress again.
    fn is_progress_due(&self, now: Instant) -> bool {
        self.progress_sent.is_none_or(|sent| now >= sent + PROGRESS_EVERY)
    }

    fn send_progress(&mut self, now: Instant) {
        let progress = self.load.progress();
        self.progress_sent = Some(now);
        self.progress_waits = false;
        for (waiter, _) in self.waiters.iter().filter(|(_, wants_progress)| **wants_progress) {
            self.listener.reply_progress(*waiter, progress);
        }
    }

    fn notify_of_load(&mut self, now: Instant) {
        if self.notify_due.is_none_or(|due| now < due) {
            return;
        }
        self.notify_due = Some(now + NOTIFY_EVERY);
        let Progress { bytes_done, bytes_total, .. } = self.load.progress();
        let status = format!("loading: {} of {}", ByteSize(bytes_done), ByteSize(bytes_total));
        let more = NOTIFY_EVERY.as_micros() as u32 * 3;
        notify(&[NotifyState::Status(&status), NotifyState::ExtendTimeoutUsec(more)]);
    }

    pub(super) fn wait(&mut self, from: ConnectionId, wants_progress: bool) {
        match self.phase {
            Phase::Loading => {}
            Phase::Ready(_) => {
                return self.listener.reply(from, &Reply::Ready { view: self.config.model_dir() });
            }
            Phase::Stopping { .. } | Phase::Ended(_) => {
                return self.listener.reply(from, &Reply::Stopping { notes: Vec::new(), holders: None });
            }
        }
        self.listener.set_waiting(from);
        self.waiters.insert(from, wants_progress);
        if wants_progress {
            let progress = self.load.progress();
            self.listener.reply_progress(from, progress);
        }
    }

    pub(super) fn cancel(&mut self, from: ConnectionId) {
        if !matches!(self.phase, Phase::Loading) || self.waiters.remove(&from).is_none() {
            return self.refuse(from, &Error::new(Kind::Usage, "this connection waits for no load"));
        }
        if !self.waiters.is_empty() || self.config.loads_unattended {
            let progress = self.load.progress();
            return self.listener.reply(from, &Reply::Progress(progress));
        }
        let pid = self.listener.pid(from);
        self.log.line(format_args!("process {pid} cancelled the load, and nobody else waits for it"));
        let reply = self.begin_stop(false, None);
        self.listener.reply(from, &reply);
    }
}
