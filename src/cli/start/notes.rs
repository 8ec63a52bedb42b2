//! What a user should know before a load begins.

use crate::budget::swap;
use crate::error::shown;
use crate::load::{Placement, placement};
use crate::source::scheduler;

use super::super::output;
use super::wanted::Wanted;

/// Says it, each thing once: of a cache that runs already it was said before.
pub(super) fn say(wanted: &Wanted) {
    let tuning = &wanted.config.tuning;
    if swap::is_on() && !tuning.lock_memory {
        output::note(
            "swap is on, and a cache can be swapped out like other memory: --mlock keeps it resident, and \
             'iloader status' shows how much is out",
        );
    }
    if tuning.background
        && let Some(note) = background_note(wanted)
    {
        output::note(&note);
    }
    if wanted.config.verify
        && let Some(note) = verify_note(wanted.verifiable())
    {
        output::note(&note);
    }
    if tuning.numa.is_some() && wanted.placement == Placement::Anywhere {
        let node = placement::nodes().first().copied().unwrap_or_default();
        output::note(&format!(
            "--numa changes nothing here: node {node} is the only one that this process may use"
        ));
    }
}

/// Where files are hashed that nothing is known of.
fn verify_note((known, files): (usize, usize)) -> Option<String> {
    let name_them = "'iloader manifest' shows their digests";
    match files - known {
        0 => None,
        _ if known == 0 => Some(format!("--verify has nothing to compare with: {name_them}")),
        others => {
            Some(format!("--verify has nothing to compare {others} of {files} files with: {name_them}"))
        }
    }
}

/// Where the storage does not know priorities.
fn background_note(wanted: &Wanted) -> Option<String> {
    let device = wanted.to_load().files.first()?.identity.device;
    let schedulers = scheduler::io_schedulers(device);
    if schedulers.iter().any(|scheduler| scheduler::heeds_priorities(scheduler)) {
        return None;
    }
    let source = shown(&wanted.to_load().root);
    let why = match schedulers.as_slice() {
        [] => format!("there is no I/O scheduler under {source}"),
        named => format!("the I/O scheduler under {source} ({}) knows no priorities", named.join(", ")),
    };
    Some(format!("--background lowers the CPU priority only: {why}; --limit-rate works everywhere"))
}
