//! What the daemon says of itself.

use super::{Phase, Server};
use crate::control::message::{PROTOCOL, State, Status};
use crate::daemon::load::LoadReport;
use crate::error::shown;

impl Server {
    pub(super) fn status(&self) -> Status {
        let config = &self.config;
        let (state, resident) = match &self.phase {
            Phase::Loading => (State::Loading, None),
            Phase::Ready(resident) => (State::Ready, Some(resident)),
            Phase::Stopping { .. } | Phase::Ended(_) => (State::Stopping, None),
        };
        let progress = resident.map_or_else(|| self.load.progress(), |resident| resident.progress);
        let report = match resident {
            Some(resident) => resident.loaded.report.clone(),
            None => LoadReport {
                engine: config.tuning.engine.clone(),
                engine_reason: "as asked for; chosen while it loads".to_owned(),
                backing: config.tuning.backing.clone(),
                backing_reason: "as asked for; chosen while it loads".to_owned(),
                ..LoadReport::default()
            },
        };
        let is_idle = resident.is_some() && self.leases.count() == 0;
        let mut warnings = report.warnings;
        if self.removed.is_some() {
            warnings.push(format!(
                "{} was removed or cleaned: no command finds this cache by its name, and it ends when \
                 nobody reads it any more",
                shown(&config.base)
            ));
        } else if !self.registered.is_in_place() {
            let base = shown(&config.base);
            warnings.push(format!("{base} was moved: no command finds this cache by its name there"));
        }
        Status {
            name: config.name.clone(),
            state,
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            view: config.model_dir(),
            source: config.source.clone(),
            bytes: resident.map_or(progress.bytes_total, |resident| resident.loaded.manifest.bytes),
            files: resident
                .map_or(progress.files_total, |resident| resident.loaded.manifest.files.len() as u64),
            progress,
            leases: self.leases.list(),
            idle_seconds: if is_idle { self.idle_since.elapsed().as_secs_f64() } else { 0.0 },
            created: self.registered.created().to_owned(),
            backing: report.backing,
            backing_reason: report.backing_reason,
            huge_page_bytes: report.huge_page_bytes,
            engine: report.engine,
            engine_reason: report.engine_reason,
            allocated_bytes: report.allocated_bytes,
            locked_bytes: report.locked_bytes,
            read: report.read,
            generation: config.generation.clone(),
            verified: report.verified_files > 0,
            verified_files: report.verified_files,
            identity: config.identity.clone(),
            settings: config.settings.clone(),
            tuning: config.tuning.by_name(),
            log: config.log_file.clone(),
            socket: config.socket.clone(),
            tool: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: PROTOCOL,
            idle_ttl_seconds: config.idle_ttl_seconds,
            charged_cgroup: self.charged_cgroup.clone(),
            warnings,
        }
    }
}
