//! MOVING bytes: the only copy loop. It takes windows from a sink empty and gives them back full.

pub mod buffers;
pub mod digest;
mod pages;
pub mod placement;
mod probe;
mod rate;
mod schedule;
mod worker;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::engine::Engine;
use crate::error::{Error, Kind, Result};
use crate::manifest::Digest;
use crate::plan::{Chunk, Plan, SMALL_BYTES_MAX};
use crate::source::{Direct, SelectedFile};
use crate::sys::map::Window;
use crate::units::{HUGE_PAGE_BYTES, PAGE_BYTES, round_up};

pub use placement::Placement;
use rate::Limiter;
pub use rate::RATE_MIN;
use schedule::Schedule;

/// The length of one read where nothing else is asked for: long enough for every device measured, short
/// enough that a chunk keeps a deep queue busy.
pub const READ_BYTES_DEFAULT: u64 = 1 << 20;

/// The longest read that may be asked for.
pub const READ_BYTES_MAX: u64 = 64 << 20;

/// Workers that may be asked for.
pub const WORKERS_MAX: usize = 256;

/// How to load.
#[derive(Clone, Debug)]
pub struct Options {
    /// Parallel workers, each with an engine of its own.
    pub workers: usize,
    /// The length of one read in bytes; rounded up to whole pages.
    pub read_bytes: u64,
    /// Whether to bypass the page cache.
    pub direct: Direct,
    /// Bytes that may be taken in a second, from wherever they come; `None`: no limit.
    pub bytes_per_second: Option<u64>,
    /// Where the pages are placed. The thread that loads has it applied already: see [`Placement::apply`].
    pub placement: Placement,
    /// Other names of the files may come and go meanwhile, as those of a generation do: that changes nothing in them,
    /// though the kernel notes it as a change.
    pub may_be_linked: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            workers: 1,
            read_bytes: READ_BYTES_DEFAULT,
            direct: Direct::Auto,
            bytes_per_second: None,
            placement: Placement::Anywhere,
            may_be_linked: false,
        }
    }
}

impl Options {
    /// Checks the ranges.
    pub fn check(&self) -> Result<()> {
        let wrong = |what: &str, value: u64, range: String| {
            Err(Error::new(Kind::Usage, format!("{what} cannot be {value}")).hint(format!("choose {range}")))
        };
        if !(1..=WORKERS_MAX).contains(&self.workers) {
            return wrong("--workers", self.workers as u64, format!("1 to {WORKERS_MAX}"));
        }
        if !(1..=READ_BYTES_MAX).contains(&self.read_bytes) {
            return wrong("--read-size", self.read_bytes, format!("1 to {READ_BYTES_MAX} bytes"));
        }
        if let Some(rate) = self.bytes_per_second.filter(|rate| *rate < RATE_MIN) {
            return wrong("--limit-rate", rate, format!("{RATE_MIN} bytes per second or more"));
        }
        Ok(())
    }

    /// The length of one read in bytes, whole pages: short enough that a limited load does not come in bursts.
    fn unit(&self) -> u64 {
        let unit = round_up(self.read_bytes, PAGE_BYTES);
        self.bytes_per_second.map_or(unit, |rate| rate::read_bytes(unit, rate))
    }
}

/// Where the bytes of a plan go. Called by several workers at once.
///
/// For every chunk the loop calls `open` until it gets a window, and then `filled` once, unless the load fails: then
/// windows that are out are dropped. One worker opens the chunks of a job in their order.
pub trait Sink: Sync {
    /// The empty window for a chunk. Its length is the chunk's, rounded up to whole pages, and its address
    /// is that of a page. `None`: not now, because all windows are out; the worker asks again when it has got on
    /// with those that it has, and calls `wait_for_room` where it has none.
    fn open(&self, chunk: &Chunk) -> Result<Option<Vessel>>;

    /// Waits until `open` may have a window, or for a moment: whoever waits looks between whether the load was
    /// cancelled. Called by a worker that holds no window.
    fn wait_for_room(&self) {}

    /// Takes the chunk's window back, full; the bytes behind the chunk's end are zero. `huge_bytes` of it
    /// are on huge pages.
    fn filled(&self, chunk: &Chunk, window: Window, huge_bytes: u64) -> Result<()>;

    /// The digest of a target is known: called where the bytes are hashed, just before the target's last chunk is
    /// handed over by `filled`.
    fn digested(&self, _target: usize, _digest: Digest) -> Result<()> {
        Ok(())
    }
}

/// What a sink gives to be filled.
#[derive(Debug)]
pub struct Vessel {
    /// Where the bytes go.
    pub window: Window,
    /// The window is fresh shared memory: each huge-page extent that lies wholly inside the chunk is given
    /// a huge page just ahead of the reads.
    pub collapse: bool,
}

/// Who watches a load. Called by several workers at once, and often: it must be quick.
pub trait Watch: Sync {
    /// So many more bytes were read.
    fn advanced(&self, bytes: u64);
    /// One more file is in place.
    fn finished_file(&self);
    /// Whether to give up.
    fn cancelled(&self) -> bool;

    /// Asked before so many bytes of the targets are allocated. `false`: not now; the load goes on with what it
    /// has, and asks again. Every byte that was granted is accounted for by `took` or `left_untaken`.
    fn may_take(&self, _bytes: u64) -> bool {
        true
    }

    /// So many of the granted bytes are allocated.
    fn took(&self, _bytes: u64) {}

    /// So many of the granted bytes are not allocated now; they will be asked for again.
    fn left_untaken(&self, _bytes: u64) {}
}

/// How the bytes were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// With O_DIRECT.
    pub direct_bytes: u64,
    /// From the page cache, where they were already.
    pub cached_bytes: u64,
    /// Through the page cache, and dropped again.
    pub buffered_bytes: u64,
}

/// The same, counted by several workers.
#[derive(Debug, Default)]
struct Counters {
    direct: AtomicU64,
    cached: AtomicU64,
    buffered: AtomicU64,
}

/// What all workers of one load share.
struct Shared<'a> {
    plan: &'a Plan,
    schedule: Schedule<'a>,
    sink: &'a dyn Sink,
    watch: &'a dyn Watch,
    read_bytes: u64,
    limiter: Option<Limiter>,
    placement: &'a Placement,
    counters: Counters,
    /// Set by the first failure: the others stop.
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl Shared<'_> {
    /// Keeps the first failure and stops everybody.
    fn fail(&self, error: Error) {
        let mut failure = self.failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        failure.get_or_insert(error);
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether to stop: somebody failed, or the load was cancelled.
    fn stopped(&self) -> bool {
        if self.stop.load(Ordering::Relaxed) {
            return true;
        }
        if self.watch.cancelled() {
            self.fail(Error::new(Kind::Cancelled, "the load was cancelled"));
            return true;
        }
        false
    }
}

/// Starts an engine for the calling thread.
pub type StartEngine<'a> = &'a (dyn Fn() -> Result<Box<dyn Engine>> + Sync);

/// Copies every chunk of `plan` from `files` into `sink`.
///
/// `files` is the selection that the plan was laid out from. At the end every file that was read is
/// compared with what was selected: an error of kind [`Kind::SourceChanged`] names the one that changed.
/// On failure all reads in flight have ended and all windows are dropped when this returns.
pub fn run(
    plan: &Plan,
    files: &[SelectedFile],
    start_engine: StartEngine<'_>,
    sink: &dyn Sink,
    watch: &dyn Watch,
    options: &Options,
) -> Result<Counts> {
    options.check()?;
    let read_bytes = options.unit();
    let slow_direct = probe::devices_better_buffered(plan, files, start_engine, options, read_bytes)?;
    let shared = Shared {
        plan,
        schedule: Schedule::new(plan, files, options.direct, read_bytes, slow_direct)
            .linked(options.may_be_linked),
        sink,
        watch,
        read_bytes,
        limiter: options.bytes_per_second.map(Limiter::new),
        placement: &options.placement,
        counters: Counters::default(),
        stop: AtomicBool::new(false),
        failure: Mutex::new(None),
    };
    let work = |engine: Result<Box<dyn Engine>>| {
        if let Err(error) = engine.and_then(|engine| worker::work(&shared, engine)) {
            shared.fail(error);
        }
    };
    // With fewer workers than asked for the load is slower, not wrong: only the first one must be had.
    let help = || {
        if let Ok(engine) = start_engine() {
            work(Ok(engine));
        }
    };
    let workers = options.workers.min(plan.jobs.len());
    std::thread::scope(|scope| {
        for index in 1..workers {
            let thread = std::thread::Builder::new().name(format!("load-{index}"));
            if thread.spawn_scoped(scope, help).is_err() {
                break;
            }
        }
        work(start_engine());
    });
    if let Some(error) = shared.failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        return Err(explained(error, &shared.schedule));
    }
    shared.schedule.check_sources()?;
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Ok(Counts {
        direct_bytes: count(&shared.counters.direct),
        cached_bytes: count(&shared.counters.cached),
        buffered_bytes: count(&shared.counters.buffered),
    })
}

/// A read that fails because its file was truncated or taken away meanwhile fails in many ways: what has changed is
/// the reason to tell.
fn explained(error: Error, schedule: &Schedule<'_>) -> Error {
    if matches!(error.kind(), Kind::Cancelled | Kind::NoRoom | Kind::SourceChanged) {
        return error;
    }
    match schedule.check_sources() {
        Err(reason) if reason.kind() == Kind::SourceChanged => reason,
        _ => error,
    }
}

/// Files that one worker of this depth has under way at the most: one for each read in flight, and those
/// that it is cutting or preparing.
pub fn files_under_way(depth: usize) -> usize {
    depth + worker::CHUNKS_OPEN_MAX
}

/// Memory that a load takes beside its targets: the buffers of one huge page that small files are read
/// into, and the stacks of reader threads. `depth` is the reads in flight of one worker.
///
/// A buffer is given back when the last file in it is done, so in the worst case every small file that a
/// worker has under way keeps one. In no case are there more than the small files need, each buffer at
/// least half full.
pub fn buffer_bytes(plan: &Plan, workers: usize, depth: usize, reader_threads: usize) -> u64 {
    const STACK_BYTES: u64 = 128 << 10;
    let small = plan.targets.iter().filter(|target| target.bytes <= SMALL_BYTES_MAX);
    let (files, bytes) =
        small.fold((0u64, 0u64), |sum, target| (sum.0 + 1, sum.1 + round_up(target.bytes, PAGE_BYTES)));
    let under_way = files.min((workers * files_under_way(depth)) as u64);
    let buffers = ((under_way + 1) * HUGE_PAGE_BYTES).min(bytes.saturating_mul(2) + HUGE_PAGE_BYTES);
    buffers.saturating_add((workers * reader_threads) as u64 * STACK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Target, lay_out};
    use crate::source::Selection;

    fn plan_of(lengths: &[u64]) -> Plan {
        let selection = Selection::of_files("/m", Vec::new());
        let targets = lengths.iter().map(|&bytes| Target { bytes, file: 0 }).collect();
        Plan { targets, ..lay_out(&selection, 1) }
    }

    #[test]
    fn buffers_are_counted_as_they_can_be_in_use() {
        let megabyte = 1 << 20;
        // A few small files beside large ones: one buffer holds them.
        let few = buffer_bytes(&plan_of(&[4096; 6]), 1, 16, 0);
        assert_eq!(few, HUGE_PAGE_BYTES + 2 * 6 * 4096);
        // Files that fill a buffer each, as many as are under way at once, and one being handed over.
        let many = buffer_bytes(&plan_of(&[3 * megabyte / 2; 1000]), 2, 16, 0);
        assert_eq!(many, (2 * 18 + 1) * HUGE_PAGE_BYTES);
        // Large files need none, threads a stack each.
        assert_eq!(
            buffer_bytes(&plan_of(&[100 * megabyte]), 1, 8, 8),
            HUGE_PAGE_BYTES.min(2 * megabyte) + megabyte
        );
    }
}
