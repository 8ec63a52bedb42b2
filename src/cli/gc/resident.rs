//! `gc --resident`: stop caches that nobody uses, least recently used first, and remove what dead ones left.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::super::json::{CollectAnswer, Collected, Leftover};
use super::super::list;
use super::super::output;
use super::super::status::Snapshot;
use super::super::stop::{self, Manner};
use super::super::target::{self, Target};
use super::{Fate, GcArgs};
use crate::control::message::{LOOK_MAX, Operation, Reply, State, Status};
use crate::error::{Error, Kind, Result, shown};
use crate::failure::Failure;
use crate::gc::{self, Candidate};
use crate::readers::named;
use crate::registry::{self, BaseDir, Liveness, Name, Record, lock};
use crate::units::ByteSize;
use crate::view;

/// How long each daemon has to answer. One that does not is left alone.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Collects caches in memory, or says what it would.
pub(super) fn collect(args: &GcArgs) -> Result<()> {
    let base = target::find_base(&args.base)?;
    let mut caches = if args.max_bytes.is_some() || args.ttl.is_some() { caches(&base)? } else { Vec::new() };
    let (before, failure) = decide(&mut caches, args);
    let leftovers = leftovers(&base, args.apply)?;
    let after = taken(&caches);
    print(args, &base, &caches, &leftovers, (before, after))?;
    failure.map_or(Ok(()), Err)
}

/// A cache whose daemon lives, or may do.
#[derive(Debug)]
struct Cache {
    target: Target,
    name: String,
    state: &'static str,
    /// `None` where its daemon does not tell.
    bytes: Option<u64>,
    /// The same.
    idle_seconds: Option<f64>,
    fate: Fate,
}

fn caches(base: &BaseDir) -> Result<Vec<Cache>> {
    let targets: Vec<Target> = registry::list(base)?
        .into_iter()
        .map(|registration| Target::registered(base.clone(), registration, ANSWER_TIMEOUT))
        .collect();
    let snapshots = list::ask_all(&targets);
    let known = targets.into_iter().zip(snapshots).filter_map(|(target, snapshot)| Some((target, snapshot?)));
    // What has ended is a leftover.
    let alive = known.filter(|(_, snapshot)| !matches!(snapshot.state(), State::Dead | State::Failed));
    Ok(alive.map(|(target, snapshot)| cache(target, &snapshot)).collect())
}

fn cache(target: Target, snapshot: &Snapshot) -> Cache {
    let status = snapshot.status();
    let loading = |status: &Status| status.allocated_bytes.max(status.progress.bytes_total);
    let kept = match snapshot.state() {
        State::Ready => status.and_then(leased_by),
        State::Loading => Some("it is loading".to_owned()),
        State::Stopping => Some("it is being started or stopped by somebody".to_owned()),
        _ => {
            let why = snapshot.error().map_or("it does not answer", Error::message);
            Some(format!("out of reach: {why}"))
        }
    };
    Cache {
        target,
        name: snapshot.name().to_owned(),
        state: snapshot.state_name(),
        bytes: status.map(loading),
        idle_seconds: status.map(|status| status.idle_seconds),
        fate: kept.map_or(Fate::Open, Fate::Kept),
    }
}

fn leased_by(status: &Status) -> Option<String> {
    let leases = status.leases.iter().map(|lease| (lease.pid, lease.command.as_str()));
    (!status.leases.is_empty()).then(|| format!("leased by {}", named(leases)))
}

/// Decides about one victim after the other, each in the light of those before. Gives the memory that all took
/// before, and the last failure that is no reason to keep a cache.
fn decide(caches: &mut [Cache], args: &GcArgs) -> (u64, Option<Error>) {
    let policy = args.policy();
    let before = taken(caches);
    let mut failure: Option<Error> = None;
    loop {
        let candidates: Vec<Candidate> = caches.iter().map(candidate).collect();
        let Some((at, why)) = gc::victims(&candidates, &policy).first().copied() else {
            return (before, failure);
        };
        let cache = &mut caches[at];
        cache.fate = match dispose(cache, args.apply) {
            Ok(None) => Fate::gone(why, "caches"),
            Ok(Some(reason)) => Fate::Kept(reason),
            Err(error) => {
                let reason = error.message().to_owned();
                if !matches!(error.kind(), Kind::InUse | Kind::TimedOut)
                    && let Some(earlier) = failure.replace(error)
                {
                    output::error(&earlier);
                }
                Fate::Kept(reason)
            }
        };
    }
}

fn candidate(cache: &Cache) -> Candidate {
    Candidate {
        name: cache.name.clone(),
        bytes: if matches!(cache.fate, Fate::Gone(_)) { 0 } else { cache.bytes.unwrap_or(0) },
        idle: Duration::try_from_secs_f64(cache.idle_seconds.unwrap_or(0.0)).unwrap_or_default(),
        is_kept: !matches!(cache.fate, Fate::Open),
    }
}

fn taken(caches: &[Cache]) -> u64 {
    caches.iter().map(candidate).fold(0, |sum, cache| sum.saturating_add(cache.bytes))
}

/// Stops a cache, or finds out whether that would be refused: gives why it stays.
fn dispose(cache: &Cache, apply: bool) -> Result<Option<String>> {
    let mut client = match cache.target.try_connect() {
        Ok(Some(client)) => client,
        Ok(None) => return Ok(Some("it is being started or stopped by somebody".to_owned())),
        // It went by itself.
        Err(error) if error.kind() == Kind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match client.request(Operation::Status {})? {
        Reply::Status(status) if !status.leases.is_empty() => return Ok(leased_by(&status)),
        // Leased and let go of since it was listed: what was the least recently used is that no more.
        Reply::Status(status) if Some(status.idle_seconds) < cache.idle_seconds => {
            return Ok(Some("it was used a moment ago".to_owned()));
        }
        Reply::Status(_) => {}
        other => return Err(cache.target.unexpected(&other)),
    }
    if apply {
        let deadline = Instant::now() + ANSWER_TIMEOUT + LOOK_MAX;
        return stop::end(&cache.target, client, &Manner::default(), Some(deadline)).map(|_| None);
    }
    match client.request(Operation::Readers {})? {
        Reply::Readers(found) if found.readers.is_empty() => Ok(None),
        Reply::Readers(found) => {
            let readers = found.readers.iter().map(|reader| (reader.pid, reader.command.as_str()));
            Ok(Some(format!("read without a lease by {}", named(readers))))
        }
        other => Err(cache.target.unexpected(&other)),
    }
}

/// What dead daemons left under each name of BASE; removed where `apply`.
fn leftovers(base: &BaseDir, apply: bool) -> Result<Vec<Leftover>> {
    let mut found = Vec::new();
    let living = places_of_the_living(base)?;
    for name in registry::names_in_use(base)? {
        let Some(paths) = left_under(base, &name, &living).transpose() else { continue };
        let mut leftover = Leftover { name: name.to_string(), paths: Vec::new(), error: None };
        match paths {
            Ok(paths) => {
                leftover.paths = paths.iter().map(|path| path.to_string_lossy().into_owned()).collect();
                if apply {
                    let target = Target::in_base(base.clone(), &name, ANSWER_TIMEOUT);
                    leftover.error = target.clean_up(false).err().as_ref().map(Failure::from);
                }
            }
            Err(error) => leftover.error = Some(Failure::from(&error)),
        }
        found.push(leftover);
    }
    Ok(found)
}

/// Where living caches have their things, which may be where another name would have them by default.
fn places_of_the_living(base: &BaseDir) -> Result<Vec<PathBuf>> {
    let living = registry::list(base)?.into_iter().filter(|found| found.liveness != Liveness::Dead);
    let records = living.filter_map(|found| found.record.ok());
    Ok(records.flat_map(|record| [record.socket, record.pid_file, record.view]).map(PathBuf::from).collect())
}

/// `None` where nothing is left, or it is not known to be a dead daemon's.
fn left_under(base: &BaseDir, name: &Name, living: &[PathBuf]) -> Result<Option<Vec<PathBuf>>> {
    let paths = base.paths(name);
    let record: Option<Record> = match registry::look_up(base, name) {
        Some(registration) if registration.liveness != Liveness::Dead => return Ok(None),
        Some(registration) => registration.record.ok(),
        None if lock::is_held(&paths.lock)? => return Ok(None),
        None => None,
    };
    let left = view::left_by_crashed(&paths, record.as_ref())?;
    let is_anothers = left.iter().any(|path| living.contains(path));
    Ok((!left.is_empty() && !is_anothers).then_some(left))
}

fn print(
    args: &GcArgs,
    base: &BaseDir,
    caches: &[Cache],
    leftovers: &[Leftover],
    (before, after): (u64, u64),
) -> Result<()> {
    if args.json {
        return output::print_json(&CollectAnswer {
            base: &base.path().to_string_lossy(),
            applied: args.apply,
            caches: caches.iter().map(collected).collect(),
            leftovers,
            allocated_bytes: before,
            remaining_bytes: after,
        });
    }
    if !caches.is_empty() || !leftovers.is_empty() {
        output::print(&table(args, caches, leftovers))?;
    }
    super::say_what_is_over(args, after);
    let untold: Vec<&str> =
        caches.iter().filter(|cache| cache.bytes.is_none()).map(|cache| cache.name.as_str()).collect();
    if !untold.is_empty() {
        output::note(&format!("what these take is not known and not counted: {}", untold.join(", ")));
    }
    let has_work = !leftovers.is_empty() || caches.iter().any(|cache| matches!(cache.fate, Fate::Gone(_)));
    super::say_what_is_left_to_do(args, has_work);
    Ok(())
}

fn collected(cache: &Cache) -> Collected<'_> {
    let (action, reason) = cache.fate.told("stop");
    Collected {
        name: &cache.name,
        state: cache.state,
        allocated_bytes: cache.bytes,
        idle_seconds: cache.idle_seconds,
        action,
        reason,
    }
}

fn table(args: &GcArgs, caches: &[Cache], leftovers: &[Leftover]) -> String {
    let mut table = super::table();
    for cache in caches {
        let Collected { name, action, reason, .. } = collected(cache);
        let what = match action {
            "stop" if args.apply => "stopped",
            "stop" => "would be stopped",
            _ => "stays",
        };
        let size = cache.bytes.map_or("-".to_owned(), |bytes| ByteSize(bytes).to_string());
        let idle = cache.idle_seconds.map_or("-".to_owned(), output::seconds);
        table.row([name, &size, &idle, what, reason.unwrap_or("")]);
    }
    for leftover in leftovers {
        let what = match (&leftover.error, args.apply) {
            (Some(_), _) => "stays",
            (None, true) => "removed",
            (None, false) => "would be removed",
        };
        let paths = leftover.paths.iter().map(|path| shown(Path::new(path))).collect::<Vec<_>>().join(" ");
        let why = match &leftover.error {
            Some(error) => error.message.clone(),
            None => format!("left by a dead daemon: {paths}"),
        };
        table.row([leftover.name.as_str(), "", "", what, &why]);
    }
    table.render()
}
