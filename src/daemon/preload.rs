//! The load itself, put together: select → lay_out → admit → load → publish.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use crate::budget::{self, limits};
use crate::control::message::{Progress, ReadCounts};
use crate::daemon::config::Config;
use crate::daemon::load::{LoadControl, LoadReport, Loaded, PassedThrough, Published, PublishedFile, Work};
use crate::engine;
use crate::error::{Error, Kind, Result, shown};
use crate::load::{self, Options, READ_BYTES_DEFAULT, Watch};
use crate::manifest::{self, DirectoryLink, FileEntry, Manifest};
use crate::memory::{self, Resident, Settings};
use crate::plan::{self, Plan};
use crate::source::{self, Direct, Selection};
use crate::view::{View, ViewLink};

/// Published descriptors have numbers from somewhere in here on, so that a process that later gets this one's
/// number hardly has a descriptor where a stale link points. Below 65,536 the table stays small.
const DESCRIPTORS_FROM: std::ops::Range<u64> = 1024..32_768;

/// Descriptors besides the published ones: the standard streams, the load's own, leases and connections.
const DESCRIPTORS_OTHER: u64 = 1024;

/// What a daemon for `config` does: loads into memory, and publishes a view of links to its descriptors.
pub fn work(config: &Config) -> Work {
    let config = config.clone();
    Work { load: Box::new(move |control| load(&config, control)), publish: Box::new(publish) }
}

/// Loads what `config` asks for. On failure nothing is left.
fn load(config: &Config, control: &LoadControl) -> Result<Loaded> {
    let started = Instant::now();
    let selection = source::select(Path::new(&config.source), &config.rules)?;
    if source::identity::digest(&selection) != config.selection {
        let message = format!("the source {} changed since the start was asked for", shown(&selection.root));
        return Err(Error::new(Kind::SourceChanged, message).hint("start it again"));
    }
    let plan = plan::lay_out(&selection, config.tuning.chunk_bytes);
    let settings = settings(config, &plan)?;
    let grant = admit(config, &plan, &settings)?;
    let watch = Reporter::new(control, &plan, started);
    let resident = memory::load(&plan, &selection, &settings, &grant, &watch)?;
    watch.report();
    Ok(loaded(config, &selection, &settings, resident))
}

fn settings(config: &Config, plan: &Plan) -> Result<Settings> {
    let tuning = &config.tuning;
    let options = Options {
        workers: tuning.workers as usize,
        read_bytes: tuning.read_bytes.unwrap_or(READ_BYTES_DEFAULT),
        direct: Direct::from_name(&tuning.direct)?,
    };
    options.check()?;
    Ok(Settings {
        cache_name: config.name.clone(),
        backing: memory::Choice::from_name(&tuning.backing)?,
        engine: engine::Selected::probe(engine::Choice::from_name(&tuning.engine)?, tuning.queue_depth)?,
        options,
        lowest_descriptor: lowest_descriptor(plan)?,
    })
}

/// A random place for the published descriptors, as far up as the limit of open files allows.
fn lowest_descriptor(plan: &Plan) -> Result<i32> {
    let needed_from = |base: u64| base + plan.targets.len() as u64 + DESCRIPTORS_OTHER;
    let mut random = [0; 8];
    let base = match rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()) {
        Ok(_) => {
            let span = DESCRIPTORS_FROM.end - DESCRIPTORS_FROM.start;
            DESCRIPTORS_FROM.start + u64::from_ne_bytes(random) % span
        }
        Err(errno) => return Err(Error::os("choose descriptor numbers", &errno.into())),
    };
    if limits::raise_descriptors(needed_from(base)).is_ok() {
        return Ok(base as i32);
    }
    // A low limit: as many as are needed, from the lowest number that leaves room for the daemon's own.
    limits::raise_descriptors(needed_from(0))?;
    Ok(DESCRIPTORS_OTHER as i32)
}

fn admit(config: &Config, plan: &Plan, settings: &Settings) -> Result<budget::Grant> {
    limits::check_file_size(plan.bytes_of_longest())?;
    let need_bytes = memory::need_bytes(plan, &settings.engine, settings.options.workers);
    limits::check_address_space(need_bytes)?;
    let request = budget::Request {
        need_bytes,
        memory_fraction: config.limits.memory_fraction,
        reserve_bytes: config.limits.reserve_bytes,
        memory_bytes_max: config.limits.memory_bytes_max,
        force: config.limits.force,
    };
    budget::admit(&request, &budget::available()?)
        .map_err(|error| error.context(format_args!("cannot start '{}'", config.name)))
}

/// Adds up what the workers report.
struct Reporter<'a> {
    control: &'a LoadControl,
    started: Instant,
    progress: Mutex<Progress>,
}

impl Reporter<'_> {
    fn new<'a>(control: &'a LoadControl, plan: &Plan, started: Instant) -> Reporter<'a> {
        let progress = Progress {
            bytes_total: plan.bytes(),
            files_total: plan.targets.len() as u64,
            ..Progress::default()
        };
        let reporter = Reporter { control, started, progress: Mutex::new(progress) };
        reporter.report();
        reporter
    }

    fn report(&self) {
        self.change(|_| {});
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
        let mut progress = self.progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        change(&mut progress);
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
}

fn loaded(config: &Config, selection: &Selection, settings: &Settings, resident: Resident) -> Loaded {
    let mut links = Vec::new();
    let mut passthrough = Vec::new();
    for (file, segment) in selection.files.iter().zip(&resident.segment_of_file) {
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
    let load::Counts { direct_bytes, cached_bytes, buffered_bytes } = resident.counts;
    Loaded {
        manifest: manifest_of(config, selection),
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
            read: ReadCounts { direct_bytes, cached_bytes, buffered_bytes },
            warnings: selection.warnings.clone(),
        },
        keep: Box::new(resident),
    }
}

fn manifest_of(config: &Config, selection: &Selection) -> Manifest {
    let entry = |file: &source::SelectedFile| FileEntry {
        path: file.path.clone(),
        bytes: file.identity.bytes,
        mtime: file.identity.mtime_rfc3339(),
        device: file.identity.device,
        inode: file.identity.inode,
        passthrough: file.passthrough,
    };
    let link =
        |link: &source::DirectoryLink| DirectoryLink { path: link.path.clone(), target: link.target.clone() };
    Manifest {
        schema: manifest::SCHEMA,
        name: config.name.clone(),
        source: config.source.clone(),
        selection: config.rules.clone(),
        files: selection.files.iter().map(entry).collect(),
        directory_links: selection.directory_links.iter().map(link).collect(),
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
