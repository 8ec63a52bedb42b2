//! A BASE that is removed under its daemon, and the end of a cache that nobody has a use for.

use std::path::Path;
use std::time::{Duration, Instant};

use super::{Phase, Server};
use crate::error::{Error, Kind, shown};

/// How long a cache whose BASE was removed goes on without leases: time for who has just looked up its view.
const REMOVED_GRACE: Duration = Duration::from_secs(10);

impl Server {
    /// When a cache whose BASE was removed is to end, where it has no leases.
    pub(super) fn removal_due(&self) -> Option<Instant> {
        self.removed.map(|removed| removed.max(self.idle_since) + REMOVED_GRACE)
    }

    pub(super) fn evict(&mut self) {
        if self.removed.is_some() {
            self.log.line("BASE was removed, and nobody has a lease: it ends");
            // The user wanted all that stands in BASE gone; a directory at another place is his own.
            let remove_view = Path::new(&self.config.view).starts_with(&self.config.base);
            self.begin_stop(remove_view);
        } else {
            self.log.line("nobody has had a lease for --idle-ttl: it is evicted");
            self.begin_stop(false);
        }
    }

    /// Who removes BASE wants its caches gone. One that is ready ends when its leases have, after a moment; a
    /// load is given up, because its view would make BASE anew.
    pub(super) fn notice_removal(&mut self) {
        if self.removed.is_some() || !self.registered.is_removed() {
            return;
        }
        self.removed = Some(Instant::now());
        let base = shown(&self.config.base);
        match self.phase {
            Phase::Loading => {
                let what = format!("{base} was removed while '{}' was loaded", self.config.name);
                self.fail(Error::new(Kind::Failed, what).hint("start it again"));
            }
            Phase::Ready(_) => {
                self.log.line(format_args!("{base} was removed: it ends when no lease is left"))
            }
            Phase::Stopping { .. } | Phase::Ended(_) => {}
        }
    }
}
