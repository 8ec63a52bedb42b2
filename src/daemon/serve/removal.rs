//! A BASE that is removed under its daemon, and the end of a cache that nobody has a use for.

use std::path::Path;
use std::time::{Duration, Instant};

use super::{Phase, Server};
use crate::error::{Error, Kind, shown};

/// How long a cache whose BASE was removed goes on without readers: time for who has just looked up its view.
const REMOVED_GRACE: Duration = Duration::from_secs(10);

impl Server {
    /// When a cache whose BASE was removed is to end, where nobody reads it.
    pub(super) fn removal_due(&self) -> Option<Instant> {
        self.removed.map(|removed| removed.max(self.idle_since) + REMOVED_GRACE)
    }

    /// Why a cache that nobody uses goes, for the log.
    pub(super) fn why_evicted(&self) -> &'static str {
        match self.removed {
            Some(_) => "BASE was removed, and nobody reads it: it ends",
            None => "nobody has read it for --idle-ttl: it is evicted",
        }
    }

    /// Whether the view's directory goes with the cache however it ends: who removed BASE wanted all that stands in it
    /// gone, while a directory at another place is his own.
    pub(super) fn is_view_unwanted(&self) -> bool {
        self.removed.is_some() && Path::new(&self.config.view).starts_with(&self.config.base)
    }

    /// Who removes BASE wants its caches gone. One that is ready ends when its readers have, after a moment; a
    /// load is given up, because its view would make BASE anew.
    pub(super) fn notice_removal(&mut self) {
        // Asked first, because asking acknowledges what woke the daemon.
        if !self.registered.is_removed() || self.removed.is_some() {
            return;
        }
        self.removed = Some(Instant::now());
        let base = shown(&self.config.base);
        match self.phase {
            Phase::Loading => {
                let what = format!("{base} was removed while '{}' was loaded", self.config.name);
                self.load.give_up(Error::new(Kind::Failed, what).hint("start it again"));
            }
            Phase::Ready(_) => {
                self.log.line(format_args!("{base} was removed: it ends when nobody reads it any more"))
            }
            Phase::Stopping { .. } | Phase::Ended(_) => {}
        }
    }
}
