//! Admission, one start at a time: each counts what the starts before it have still to fill.
//!
//! The system counts memory as taken once it is touched, and a load touches it over seconds or minutes. So a start
//! that was admitted promises the rest to itself: others see what is available less all promises. Under the limit of
//! a control group only those count that are charged to it.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::budget::cgroup::{GroupId, Version};
use crate::budget::{self, Availability, Grant, Limits, Promised, Request};
use crate::daemon::log::Log;
use crate::error::{Kind, Result};
use crate::registry::{ChargedGroup, Claim, Claims, Terms};
use crate::units::ByteSize;

/// A promise is lowered when so much more was filled, or so much time has passed: often enough for others not to be
/// refused for long, seldom enough to cost nothing.
const LOWERED_EVERY_BYTES: u64 = 64 << 20;
const LOWERED_EVERY: Duration = Duration::from_millis(100);

/// What a load may still fill, in the groups that this process was in at admission. Dropped, or lowered to nothing, it counts no more.
#[derive(Debug)]
pub struct Promise {
    claim: Claim,
    terms: Terms,
    need_bytes: u64,
    lowered: Instant,
}

/// Admits `request` for the cache `name` under `limits`, beside all starts of this user that are under way, and
/// promises what it needs. `run_dir` is where promises are counted if they cannot be counted for the whole user.
///
/// # Errors
///
/// As [`budget::admit()`]; others where promises cannot be read or written. Nothing is then promised.
pub fn admit(
    request: &Request,
    limits: &mut Limits,
    name: &str,
    run_dir: &Path,
    log: &Log,
) -> Result<(Grant, Promise)> {
    let (claims, narrower) = Claims::of_promises(run_dir);
    if let Some(why) = narrower {
        log.line(format_args!("only the starts of this BASE are counted at admission: {why}"));
    }
    admit_beside(&claims, request, limits, name, log)
}

/// What the starts of this user which are under way have still to fill, where that can be told; without that of the
/// process `but`, which is about to end. Changes nothing.
pub fn standing(but: Option<u32>) -> Vec<Promised> {
    let Some(claims) = Claims::standing_promises() else { return Vec::new() };
    let promises = claims.lock().and_then(|mut group| group.peek()).unwrap_or_default();
    promises.iter().filter(|terms| Some(terms.pid) != but).map(promised).collect()
}

fn admit_beside(
    claims: &Claims,
    request: &Request,
    limits: &mut Limits,
    name: &str,
    log: &Log,
) -> Result<(Grant, Promise)> {
    let mut group = claims.lock()?;
    // In this order: what another start fills in between is then counted twice, and never not at all.
    let promises: Vec<Promised> = group.live()?.iter().map(promised).collect();
    let available = limits.available()?.beside(&promises);
    write_down(request, &available, log);
    group.take_notes().iter().for_each(|note| log.line(format_args!("promised memory: {note}")));
    let grant = budget::admit(request, &available)?;
    let need_bytes = grant.need_bytes();
    let groups = charged(limits.charged_groups());
    let terms =
        Terms { bytes: need_bytes, proposes: None, groups, name: name.to_owned(), pid: std::process::id() };
    let claim = group.add(&terms).map_err(|error| match error.kind() {
        Kind::NoRoom => error.hint("make room there: starts count each other by these files"),
        _ => error,
    })?;
    Ok((grant, Promise { claim, terms, need_bytes, lowered: Instant::now() }))
}

/// Groups as a claim has them. More than it can hold are not known to others.
fn charged(groups: Option<&[GroupId]>) -> Option<Vec<ChargedGroup>> {
    let groups = groups.filter(|groups| groups.len() <= Terms::GROUPS_MAX)?;
    let group = |group: &GroupId| ChargedGroup {
        hierarchy: match group.version {
            Version::V1 => 1,
            Version::V2 => 2,
        },
        inode: group.inode,
    };
    Some(groups.iter().map(group).collect())
}

/// What a claim says, as it is counted.
fn promised(terms: &Terms) -> Promised {
    let group = |group: &ChargedGroup| GroupId {
        version: if group.hierarchy == 1 { Version::V1 } else { Version::V2 },
        inode: group.inode,
    };
    let groups = terms.groups.as_ref().map(|groups| groups.iter().map(group).collect());
    Promised { bytes: terms.bytes, groups }
}

/// Leaves in the log what a load was admitted against: a kernel that kills the daemon later writes little.
fn write_down(request: &Request, available: &Availability, log: &Log) {
    let promised = match available.binding.promised_bytes {
        0 => String::new(),
        promised => format!(", {} of it promised to starts under way", ByteSize(promised)),
    };
    log.line(format_args!(
        "needs {}, of {} available ({}){promised}{}",
        ByteSize(request.need_bytes),
        ByteSize(available.bytes),
        available.binding.what,
        if request.force { "; the check is skipped (--force)" } else { "" }
    ));
    available.unread.iter().for_each(|unread| log.line(format_args!("a limit is not known: {unread}")));
}

impl Promise {
    /// Says that `filled_bytes` are in memory by now. Cheap: mostly it does nothing.
    pub fn lower(&mut self, filled_bytes: u64) {
        let left = self.need_bytes.saturating_sub(filled_bytes);
        let gained = self.terms.bytes.saturating_sub(left);
        let is_due = gained >= LOWERED_EVERY_BYTES || self.lowered.elapsed() >= LOWERED_EVERY;
        if gained == 0 || !is_due {
            return;
        }
        self.lowered = Instant::now();
        let lower = Terms { bytes: left, ..self.terms.clone() };
        // Where it cannot be written it stays too high, which is the safe side.
        if self.claim.rewrite(&lower).is_ok() {
            self.terms = lower;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(need_bytes: u64) -> Request {
        Request { need_bytes, memory_fraction: 1.0, reserve_bytes: 0, memory_bytes_max: None, force: false }
    }

    fn promised_bytes(claims: &Claims) -> u64 {
        claims.lock().unwrap().peek().unwrap().iter().map(|terms| terms.bytes).sum()
    }

    /// Most of what there is, so that two do not fit whatever others do meanwhile.
    fn most() -> u64 {
        budget::available().unwrap().bytes / 3 * 2
    }

    #[test]
    fn a_start_counts_what_another_has_still_to_fill() {
        let home = tempfile::tempdir().unwrap();
        let claims = Claims::of_quota(home.path());
        let log = Log::new(tempfile::tempfile().unwrap());
        let need = most();
        let (grant, mut first) =
            admit_beside(&claims, &request(need), &mut Limits::find(), "a", &log).unwrap();
        assert_eq!((grant.need_bytes(), promised_bytes(&claims)), (need, need));
        let refused = admit_beside(&claims, &request(need), &mut Limits::find(), "b", &log).unwrap_err();
        assert_eq!(refused.kind(), Kind::NoRoom);
        assert!(refused.message().contains("promised to starts under way"), "{refused}");
        assert_eq!(promised_bytes(&claims), need, "who is refused promises nothing");
        // Forced, it is admitted, and counted by the next.
        let forced = Request { force: true, ..request(need) };
        let (_, second) = admit_beside(&claims, &forced, &mut Limits::find(), "b", &log).unwrap();
        assert_eq!(promised_bytes(&claims), 2 * need);
        drop(second);
        // As if it had filled all but a byte of it.
        first.lower(need - 1);
        assert_eq!(promised_bytes(&claims), 1);
        let (_, third) = admit_beside(&claims, &request(need), &mut Limits::find(), "b", &log).unwrap();
        drop(first);
        assert_eq!(promised_bytes(&claims), need);
        third.claim.crash();
        assert_eq!(promised_bytes(&claims), 0, "a crash leaves nothing");
        drop(admit_beside(&claims, &request(1), &mut Limits::find(), "c", &log).unwrap());
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "nor a file, for the next");
    }

    #[test]
    fn a_promise_is_never_below_what_is_left() {
        let home = tempfile::tempdir().unwrap();
        let claims = Claims::of_quota(home.path());
        let log = Log::new(tempfile::tempfile().unwrap());
        let need = 300 << 20;
        let (_, mut promise) =
            admit_beside(&claims, &Request { force: true, ..request(need) }, &mut Limits::find(), "a", &log)
                .unwrap();
        let mut filled = 0;
        while filled < need {
            filled += 7 << 20;
            promise.lower(filled);
            let promised = promised_bytes(&claims);
            assert!(promised >= need.saturating_sub(filled), "{promised} at {filled}");
            assert!(
                promised <= (need + LOWERED_EVERY_BYTES).saturating_sub(filled),
                "{promised} at {filled}"
            );
        }
    }

    #[test]
    fn a_promise_names_the_groups_that_this_process_is_charged_in() {
        let group = |version, inode| GroupId { version, inode };
        let known = [group(Version::V1, 7), group(Version::V2, u64::MAX)];
        let terms = |groups| Terms { bytes: 5, proposes: None, groups, name: "a".to_owned(), pid: 1 };
        let read_back = |groups: Option<&[GroupId]>| promised(&terms(charged(groups)));
        assert_eq!(read_back(Some(&known)), Promised { bytes: 5, groups: Some(known.to_vec()) });
        assert_eq!(read_back(Some(&[])).groups, Some(Vec::new()));
        assert_eq!(read_back(None).groups, None);
        let many: Vec<GroupId> = (0..17).map(|inode| group(Version::V2, inode)).collect();
        assert_eq!(read_back(Some(&many[..16])).groups, Some(many[..16].to_vec()));
        assert_eq!(read_back(Some(&many)).groups, None, "too many to write down: they count everywhere");

        let home = tempfile::tempdir().unwrap();
        let claims = Claims::of_quota(home.path());
        let log = Log::new(tempfile::tempfile().unwrap());
        let mut limits = Limits::find();
        let (_, _promise) = admit_beside(&claims, &request(1), &mut limits, "a", &log).unwrap();
        let live = claims.lock().unwrap().live().unwrap();
        assert_eq!(promised(&live[0]).groups.as_deref(), limits.charged_groups());
    }
}
