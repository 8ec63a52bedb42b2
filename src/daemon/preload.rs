//! The load itself, put together: select → lay_out → admit → load → publish.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::process::{Resource, getrlimit};

use crate::budget::{self, limits};
use crate::control::message::{Progress, ReadCounts};
use crate::daemon::admission;
use crate::daemon::background::StandingBack;
use crate::daemon::config::{Config, Tuning};
use crate::daemon::ledger::Share;
use crate::daemon::load::{LoadControl, LoadReport, Loaded, PassedThrough, Published, PublishedFile, Work};
use crate::daemon::log::Log;
use crate::daemon::origin::Origin;
use crate::daemon::promise::Promise;
use crate::daemon::watch::MemoryWatch;
use crate::engine;
use crate::error::{Error, Kind, Result, shown};
use crate::load::{self, Options, Placement, READ_BYTES_DEFAULT, Watch, digest, placement};
use crate::manifest::{self, FileEntry, Manifest};
use crate::memory::{self, Hashing, Resident, Settings};
use crate::plan::{self, Plan};
use crate::readers;
use crate::registry::Seat;
use crate::source::{self, Direct, Selection};
use crate::sys::crash;
use crate::units::HUGE_PAGE_BYTES;
use crate::view::{View, ViewLink};

/// Where the numbers of published descriptors begin: a random number in this range, so that the process
/// that gets a dead daemon's pid does not have a file open under the same number. Below 65,536 the table of
/// descriptors stays small.
const DESCRIPTORS_FROM: u64 = 1024;
const DESCRIPTORS_TO: u64 = 65_536;

/// Descriptors that a daemon needs beside the published ones: its log, connections and leases, and what is
/// open while a load of ordinary depth runs.
pub const DESCRIPTORS_OWN: u64 = 512;

/// Those of them that have nothing to do with the load.
const DESCRIPTORS_SERVING: u64 = 256;

/// What each file under way has open: the source, perhaps twice, and the memory file, perhaps twice.
const DESCRIPTORS_OF_FILE: u64 = 4;

/// What a daemon for `config` does: loads into memory, publishes a view of links to its descriptors, and looks for
/// readers in `/proc`. What a load was admitted against goes to `log`.
pub fn work(config: &Config, log: &Log) -> Work {
    let (config, log) = (config.clone(), log.clone());
    // Taken now, before there is a client or a memory file: nothing of either gets a lower number.
    let seat = Seat::lowest();
    // A generation is leased before the command that asked for it hears that the daemon is there, and lets go of it.
    let leased = config.generation.as_ref().map(|_| origin(&config));
    Work {
        load: Box::new(move |control| {
            let origin = || leased.unwrap_or_else(|| origin(&config));
            load(&config, origin, seat, &log, control)
        }),
        publish: Box::new(publish),
        find: Arc::new(readers::find),
    }
}

/// Where the bytes come from.
fn origin(config: &Config) -> Result<Origin> {
    let source = Path::new(&config.source);
    match &config.generation {
        Some(generation) => Origin::of_generation(Path::new(generation), source, &config.rules),
        None => Origin::of_source(source, &config.rules),
    }
}

/// Loads what `config` asks for, from what `origin` finds. On failure nothing is left.
fn load(
    config: &Config,
    origin: impl FnOnce() -> Result<Origin>,
    seat: Option<Seat>,
    log: &Log,
    control: &LoadControl,
) -> Result<Loaded> {
    let started = Instant::now();
    let _standing_back = config.tuning.background.then(StandingBack::begin).transpose()?;
    let origin = origin()?;
    crash::point("selected");
    if source::identity::digest(&origin.source) != config.selection {
        let message = format!("the source {} changed since the start was asked for", shown(&config.source));
        return Err(Error::new(Kind::SourceChanged, message).hint("start it again"));
    }
    let plan = plan::lay_out(origin.files(), chunk_bytes(&config.tuning));
    let refused = |error: Error| match error.kind() {
        Kind::NoRoom => error.context(format_args!("cannot start '{}'", config.name)),
        _ => error,
    };
    let settings = settings(config, &plan).map_err(refused)?;
    let hashing = settings.hashing.map(|hashing| origin.hashing(hashing.threads));
    let settings = Settings { hashing, stands_for: origin.stands_for(), ..settings };
    let mut room = budget::Limits::find();
    // Both are given back after the memory: a value that was made later is dropped earlier.
    let (grant, promise) = admission::admit(config, &plan, &settings, &mut room, log).map_err(refused)?;
    let mut share = admission::take_share(config, &plan, log).map_err(refused)?;
    seat.into_iter().for_each(|seat| share.take_seat(seat));
    crash::point("admitted");
    let memory = MemoryWatch::new(&config.name, plan.allocated_bytes(), room, control, log);
    let watch = Reporter::new(control, &memory, &plan, started, promise);
    let resident = memory.over(|| memory::load(&plan, origin.files(), &settings, &grant, &watch))?;
    crash::point("loaded");
    watch.report();
    Ok(loaded(config, origin, &settings, resident, share))
}

pub(super) fn settings(config: &Config, plan: &Plan) -> Result<Settings> {
    let tuning = &config.tuning;
    let options = Options {
        workers: tuning.workers as usize,
        read_bytes: tuning.read_bytes.unwrap_or(READ_BYTES_DEFAULT),
        direct: Direct::from_name(&tuning.direct)?,
        bytes_per_second: tuning.bytes_per_second,
        placement: Placement::from_name(tuning.numa.as_deref(), &placement::nodes())?,
        may_be_linked: config.generation.is_some(),
    };
    options.check()?;
    options.placement.apply()?;
    let engine = engine::Selected::probe(engine::Choice::from_name(&tuning.engine)?, tuning.queue_depth)?;
    let hashing_threads = if config.verify { digest::threads() } else { 0 };
    let lowest_descriptor = lowest_descriptor(plan, &engine, options.workers, hashing_threads)?;
    let hashing = config.verify.then(|| Hashing { threads: hashing_threads, ..Hashing::default() });
    Ok(Settings {
        cache_name: config.name.clone(),
        backing: memory::Choice::from_name(&tuning.backing)?,
        engine,
        options,
        lowest_descriptor,
        lock_memory: tuning.lock_memory,
        hashing,
        stands_for: None,
    })
}

/// What a worker takes at a time. Under a limit not more than it reads in about half a second: progress goes by
/// whole chunks.
pub(super) fn chunk_bytes(tuning: &Tuning) -> u64 {
    let most = tuning.bytes_per_second.map_or(u64::MAX, |rate| (rate / 2).max(HUGE_PAGE_BYTES));
    tuning.chunk_bytes.min(most)
}

/// Where the published descriptors begin, after raising the limit to what they need.
fn lowest_descriptor(
    plan: &Plan,
    engine: &engine::Selected,
    workers: usize,
    hashing_threads: usize,
) -> Result<i32> {
    let count = plan.targets.len() as u64;
    let under_way = count.min(memory::open_max(engine, workers, hashing_threads) as u64);
    let own = DESCRIPTORS_OWN.max(DESCRIPTORS_SERVING + DESCRIPTORS_OF_FILE * under_way);
    limits::check_descriptors(own + count)?;
    let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let lowest = place_descriptors(own, count, hard, random());
    limits::raise_descriptors(lowest + count)?;
    Ok(i32::try_from(lowest).expect("the range ends far below"))
}

/// A place for `count` descriptors above `own` others and under the limit `hard`: in the range where there
/// is room, else below it.
fn place_descriptors(own: u64, count: u64, hard: u64, random: u64) -> u64 {
    let highest = DESCRIPTORS_TO.max(own).min(hard.saturating_sub(count));
    let lowest = if highest > DESCRIPTORS_FROM { DESCRIPTORS_FROM.max(own) } else { own };
    let lowest = lowest.min(highest);
    lowest + random % (highest - lowest + 1)
}

/// Some number: it need not be secret, only different each time.
fn random() -> u64 {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK) {
        Ok(8) => u64::from_ne_bytes(bytes),
        _ => u64::from(std::process::id()).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

/// Adds up what the workers report.
struct Reporter<'a> {
    control: &'a LoadControl,
    memory: &'a MemoryWatch<'a>,
    started: Instant,
    progress: Mutex<(Progress, Promise)>,
}

impl Reporter<'_> {
    fn new<'a>(
        control: &'a LoadControl,
        memory: &'a MemoryWatch<'a>,
        plan: &Plan,
        started: Instant,
        promise: Promise,
    ) -> Reporter<'a> {
        let progress = Progress {
            bytes_total: plan.bytes(),
            files_total: plan.targets.len() as u64,
            // Nothing is read for an empty file.
            files_done: plan.targets.iter().filter(|target| target.bytes == 0).count() as u64,
            ..Progress::default()
        };
        let reporter = Reporter { control, memory, started, progress: Mutex::new((progress, promise)) };
        reporter.report();
        reporter
    }

    fn report(&self) {
        self.change(|_| {});
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
        let mut locked = self.progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (progress, promise) = &mut *locked;
        change(progress);
        promise.lower(progress.bytes_done);
        progress.seconds = self.started.elapsed().as_secs_f64();
        self.control.progress(*progress);
    }
}

impl Watch for Reporter<'_> {
    fn advanced(&self, bytes: u64) {
        self.change(|progress| progress.bytes_done += bytes);
    }

    fn finished_file(&self) {
        self.change(|progress| progress.files_done += 1);
    }

    fn cancelled(&self) -> bool {
        self.control.cancelled()
    }

    fn may_take(&self, bytes: u64) -> bool {
        self.memory.may_take(bytes)
    }

    fn took(&self, bytes: u64) {
        self.memory.took(bytes);
    }

    fn left_untaken(&self, bytes: u64) {
        self.memory.left_untaken(bytes);
    }
}

fn loaded(config: &Config, origin: Origin, settings: &Settings, resident: Resident, share: Share) -> Loaded {
    let mut links = Vec::new();
    let mut passthrough = Vec::new();
    for (file, segment) in origin.files().files.iter().zip(&resident.segment_of_file) {
        match segment.map(|index| &resident.segments[index]) {
            Some(segment) => links.push(PublishedFile {
                path: file.path.clone(),
                descriptor: segment.descriptor(),
                device: segment.device(),
                inode: segment.inode(),
                bytes: segment.bytes(),
            }),
            None => passthrough.push(PassedThrough { path: file.path.clone(), target: file.real.clone() }),
        }
    }
    let selection = &origin.source;
    let load::Counts { direct_bytes, cached_bytes, buffered_bytes } = resident.counts;
    Loaded {
        manifest: manifest_of(config, selection, &resident),
        links,
        passthrough,
        directory_links: selection.directory_links.clone(),
        report: LoadReport {
            engine: settings.engine.model.to_string(),
            engine_reason: settings.engine.reason.clone(),
            backing: resident.backing.clone(),
            backing_reason: resident.backing_reason.clone(),
            huge_page_bytes: resident.huge_page_bytes(),
            allocated_bytes: resident.allocated_bytes(),
            locked_bytes: resident.locked_bytes(),
            read: ReadCounts { direct_bytes, cached_bytes, buffered_bytes },
            verified_files: verified_files(settings, &resident),
            warnings: selection.warnings.clone(),
        },
        // The lease goes after the memory.
        keep: Box::new((resident, origin.into_lease())),
        share: Some(share),
    }
}

/// Files in memory whose digest was compared with one that was known before.
fn verified_files(settings: &Settings, resident: &Resident) -> u64 {
    let Some(hashing) = &settings.hashing else { return 0 };
    let in_memory = resident.segment_of_file.iter().enumerate().filter(|(_, segment)| segment.is_some());
    in_memory.filter(|(file, _)| hashing.expected(*file).is_some()).count() as u64
}

/// With the digests of what was hashed in memory, and no others.
fn manifest_of(config: &Config, selection: &Selection, resident: &Resident) -> Manifest {
    let digests = resident.digests.as_deref();
    let digest = |target: &Option<usize>| target.and_then(|target| digests?.get(target).copied());
    let entry = |(file, target)| FileEntry { sha256: digest(target), ..FileEntry::from(file) };
    Manifest {
        schema: manifest::SCHEMA,
        name: config.name.clone(),
        source: config.source.clone(),
        selection: config.rules.clone(),
        files: selection.files.iter().zip(&resident.segment_of_file).map(entry).collect(),
        directory_links: selection.directory_links.clone(),
        bytes: selection.bytes(),
        created: format!("{:.3}", jiff::Timestamp::now()),
        tool: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// Publishes a view of `loaded` whose links lead to this process's descriptors.
fn publish(config: &Config, loaded: &Loaded) -> Result<Published> {
    let pid = std::process::id();
    let in_memory = loaded.links.iter().map(|file| ViewLink {
        path: file.path.clone(),
        target: PathBuf::from(format!("/proc/{pid}/fd/{}", file.descriptor)),
    });
    let passed = loaded
        .passthrough
        .iter()
        .map(|file| ViewLink { path: file.path.clone(), target: file.target.clone() });
    let links: Vec<ViewLink> = in_memory.chain(passed).collect();
    let at = Path::new(&config.view);
    let view = View::publish(at, config.kept_dirname.as_deref(), &links, &loaded.directory_links)?;
    let notes = view.notes().to_vec();
    let withdraw = Box::new(move |remove| view.withdraw(remove).map(|withdrawn| in_words(&withdrawn)));
    Ok(Published { withdraw, notes })
}

fn in_words(withdrawn: &crate::view::Withdrawn) -> Vec<String> {
    let mut notes = Vec::new();
    if withdrawn.was_gone {
        notes.push("the view was removed, moved or replaced by somebody else before".to_owned());
    }
    if let Some(at) = &withdrawn.strange_at {
        notes.push(format!("{} keeps what is not ours: {}", shown(at), withdrawn.strange.join(", ")));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Wherever the descriptors begin, all of them fit under the limit, and below the common range only
        /// where the limit leaves nothing else.
        #[test]
        fn descriptors_fit_under_the_limit(
            own in 0u64..200_000,
            count in 0u64..100_000,
            spare in 0u64..1_000_000,
            random: u64,
        ) {
            let hard = own + count + spare;
            let lowest = place_descriptors(own, count, hard, random);
            prop_assert!(lowest + count <= hard);
            prop_assert!(lowest >= own);
            if own < DESCRIPTORS_FROM && spare > DESCRIPTORS_FROM {
                prop_assert!((DESCRIPTORS_FROM..=DESCRIPTORS_TO).contains(&lowest));
            }
        }
    }
}
