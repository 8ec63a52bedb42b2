//! May this load begin: what limits the process, memory, promised one start at a time, and the shared quota.

use crate::budget::{self, Availability, Grant, Promised, Request, Room, limits};
use crate::daemon::config::Config;
use crate::daemon::ledger::{Ledger, Share};
use crate::daemon::log::Log;
use crate::daemon::preload::{chunk_bytes, settings};
use crate::daemon::promise::{self, Promise};
use crate::error::Result;
use crate::memory::{self, Settings};
use crate::plan::{self, Plan};
use crate::registry::BaseDir;
use crate::source::Selection;

/// The stack of a thread, as the standard library maps it.
const STACK_BYTES: u64 = 2 << 20;

/// Asks for the memory, one start at a time.
///
/// # Errors
///
/// [`Kind::NoRoom`](crate::Kind::NoRoom) where it does not fit, or a limit of this process is too low.
pub(super) fn admit(
    config: &Config,
    plan: &Plan,
    settings: &Settings,
    room: &mut budget::Limits,
    log: &Log,
) -> Result<(Grant, Promise)> {
    let request = request(config, plan, settings);
    check_limits(plan, settings, request.need_bytes)?;
    let run_dir = BaseDir::prepared(config.base.clone().into()).run_dir();
    promise::admit(&request, room, &config.name, &run_dir, log)
}

/// Takes the cache's share of the quota, before anything is allocated: the segments in whole pages, without the
/// buffers.
///
/// # Errors
///
/// As [`Ledger::reserve`].
pub(super) fn take_share(config: &Config, plan: &Plan, log: &Log) -> Result<Share> {
    let proposes = config.limits.resident_bytes_max;
    let (share, notes) =
        Ledger::of_socket(&config.socket).reserve(&config.name, plan.allocated_bytes(), proposes)?;
    notes.iter().for_each(|note| log.line(format_args!("quota: {note}")));
    Ok(share)
}

/// What a running cache gives back when it ends for another one of its name.
#[derive(Clone, Copy, Debug)]
pub struct Leaving {
    /// Its process, in its own PID namespace.
    pub pid: u32,
    /// Bytes that it has in memory.
    pub filled_bytes: u64,
}

/// Whether a load of `selection` would be begun by a daemon of this process's kind once the running cache of that
/// name has left. Allocates nothing and makes nothing.
///
/// # Errors
///
/// The one that such a load would end with at once.
pub fn rehearse(config: &Config, selection: &Selection, leaving: Leaving) -> Result<()> {
    let plan = plan::lay_out(selection, chunk_bytes(&config.tuning));
    let settings = settings(config, &plan)?;
    let request = request(config, &plan, &settings);
    check_limits(&plan, &settings, request.need_bytes)?;
    // In this order, as at a start: what is filled in between counts twice.
    let promises = promise::standing(Some(leaving.pid));
    let later = without(leaving, budget::available()?.rooms, &promises);
    budget::admit(&request, &later).map(drop)?;
    let proposes = config.limits.resident_bytes_max;
    Ledger::of_socket(&config.socket).rehearse((&config.name, leaving.pid), plan.allocated_bytes(), proposes)
}

/// What there will be for others without a cache, of what there is with it. Its memory counts under the limits that
/// it is charged to, and no others.
fn without(leaving: Leaving, rooms: Vec<Room>, promises: &[Promised]) -> Availability {
    let charged = budget::groups_of(leaving.pid);
    // A group that is hidden from us is above the cache too, where its others are ours.
    let counts = |room: &Room| room.group.is_none_or(|group| charged.contains(&group));
    let grown = |room: Room| match counts(&room) {
        true => Room { bytes: room.bytes.saturating_add(leaving.filled_bytes), ..room },
        false => room,
    };
    Availability::of(rooms.into_iter().map(grown).collect()).beside(promises)
}

fn request(config: &Config, plan: &Plan, settings: &Settings) -> Request {
    Request {
        need_bytes: memory::need_bytes(
            plan,
            &settings.engine,
            settings.options.workers,
            hashing_threads(settings),
        ),
        memory_fraction: config.limits.memory_fraction,
        reserve_bytes: config.limits.reserve_bytes,
        memory_bytes_max: config.limits.memory_bytes_max,
        force: config.limits.force,
    }
}

fn hashing_threads(settings: &Settings) -> usize {
    settings.hashing.as_ref().map_or(0, |hashing| hashing.threads)
}

/// What this process may: write files so long, map so much, lock so much.
fn check_limits(plan: &Plan, settings: &Settings, need_bytes: u64) -> Result<()> {
    let workers = settings.options.workers as u64;
    let threads = workers + hashing_threads(settings) as u64;
    limits::check_file_size(plan.bytes_of_longest())?;
    // A worker maps the file that it is finishing and the one that it goes on to.
    let mapped = match hashing_threads(settings) {
        0 => workers + 1,
        // Files wait in memory for the threads that hash them.
        threads => memory::open_max(&settings.engine, settings.options.workers, threads) as u64,
    };
    let filled = plan.bytes_of_longest().saturating_mul(mapped).min(plan.bytes());
    let locked = if settings.lock_memory { plan.allocated_bytes() } else { 0 };
    let own = need_bytes.saturating_sub(plan.allocated_bytes()).saturating_add(threads * STACK_BYTES);
    limits::check_memory(filled.saturating_add(locked), own)?;
    if settings.lock_memory {
        let segments = plan.targets.iter().filter(|target| target.bytes > 0).count() as u64;
        limits::check_locked_memory(plan.allocated_bytes(), segments)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::cgroup::{GroupId, Version};

    /// Its memory comes back under the limits that it is charged to.
    #[test]
    fn what_a_cache_gives_back_counts_where_it_is_charged() {
        let here = std::process::id();
        let mut rooms = vec![Room::of_all(50, "the host")];
        rooms.extend(
            budget::groups_of(here)
                .into_iter()
                .map(|group| Room { group: Some(group), ..Room::of_all(70, "a group of ours") }),
        );
        let elsewhere = GroupId { version: Version::V1, inode: u64::MAX };
        rooms.push(Room { group: Some(elsewhere), ..Room::of_all(55, "a group of others") });
        let later = without(Leaving { pid: here, filled_bytes: 10 }, rooms, &[]);
        assert_eq!((later.bytes, later.binding.what.as_str()), (55, "a group of others"));
        let of_ours = later.rooms.iter().filter(|room| room.what == "a group of ours");
        assert!(of_ours.into_iter().all(|room| room.bytes == 80));
    }
}
