//! The ratios that `docs/benchmarks.md` promises, each measured against its reference in alternating pairs.
//!
//! `cargo bench --bench pairs -- [NAME…] [--pairs 9] [--dir DIR] [--size 2GiB]`

mod bed;

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use bed::claims::{self, Claim, Ground};
use bed::machine;
use bed::pairs::{Pairs, Spread, Target, undisturbed};
use bed::{Discard, ModelDir, Outcome, succeed, timed};
use iloader::memory::{Choice, Resident, Settings};
use iloader::source::Direct;
use iloader::sys::map::{Mapping, ReaderMap, Window};
use iloader::sys::memfd;
use iloader::units::ByteSize;
use rustix::time::ClockId;

/// The directory of small files.
const SMALL_FILES: usize = 10_000;
const SMALL_BYTES: u64 = 1024;

/// What a reader copies at a time.
const COPY_BYTES: usize = 8 << 20;

const USAGE: &str = "usage: cargo bench --bench pairs -- [NAME...] [--pairs N] [--dir DIR] [--size SIZE]\n\
    NAME: cold, cpu, warm, view, small; all without a name\n\
    --pairs N     alternating pairs of each, at least 9 (9)\n\
    --dir DIR     where the files are made, and removed again (target/tmp)\n\
    --size SIZE   how much is loaded (2GiB)";

const CLAIMS: [Claim; 5] = [
    Claim {
        name: "cold",
        what: "preload from storage, against the same engine throwing the bytes away",
        measure: cold,
    },
    Claim { name: "cpu", what: "CPU seconds per GB of a preload from storage", measure: cpu },
    Claim {
        name: "warm",
        what: "preload from the page cache, against dd bs=1M of=/dev/null on the same files",
        measure: warm,
    },
    Claim { name: "view", what: "copying out of a fresh private map of every file", measure: view },
    Claim { name: "small", what: "10,000 files of 1 KiB, against cp -r to a tmpfs", measure: small },
];

fn main() -> ExitCode {
    claims::main("pairs", &CLAIMS, USAGE)
}

fn cold(ground: &Ground) -> Outcome<()> {
    let model = ground.model()?;
    let settings = bed::settings(Choice::Auto)?;
    let mut reference = Discard::new(&settings.engine, bed::read_bytes())?;
    describe_load(&model, &settings, "nothing of them, checked before every run")?;
    let mut seconds = Vec::new();
    let pairs = Pairs::measure(
        ground.pairs,
        || {
            let (time, processor) = cold_preload(&model, &settings)?;
            seconds.push(processor.as_secs_f64() / model.gigabytes());
            Ok(time)
        },
        || {
            model.make_cold()?;
            timed(|| reference.read(&model.selection.files, Direct::Always))
        },
    )?;
    let (preload, read) = pairs.rates(model.gigabytes());
    println!("  preload      {preload:.2} GB/s");
    println!("  reference    {read:.2} GB/s");
    // Where this varies much, a hypervisor supplied memory, or others used this processor.
    println!("  processor    {:.3} s/GB in the preload", Spread::of(seconds));
    report("rate ratio", &pairs.rate_ratio(), Target::AtLeast(0.9));
    Ok(())
}

fn cpu(ground: &Ground) -> Outcome<()> {
    let model = ground.model()?;
    let settings = bed::settings(Choice::Auto)?;
    describe_load(&model, &settings, "nothing of them, checked before every run")?;
    let mut seconds = Vec::new();
    for _ in 0..ground.pairs {
        let (_, processor) = cold_preload(&model, &settings)?;
        seconds.push(processor.as_secs_f64() / model.gigabytes());
    }
    let seconds = Spread::of(seconds);
    println!("  user+system  {seconds:.3} s/GB");
    // What others do to the caches of the processor adds to it and never takes away: the best is ours.
    println!("  best         {:.3} s/GB, {}", seconds.least(), Target::AtMost(0.12).verdict(seconds.least()));
    Ok(())
}

/// Wall and processor time of a preload of files that are not in the page cache.
fn cold_preload(model: &ModelDir, settings: &Settings) -> Outcome<(Duration, Duration)> {
    undisturbed(|| {
        model.make_cold()?;
        bed::have_memory(model.bytes())?;
        let (wall, processor) = (Instant::now(), processor_time());
        let resident = model.preload(settings)?;
        let (wall, processor) = (wall.elapsed(), processor_time() - processor);
        Ok((resident.counts.cached_bytes == 0).then_some((wall, processor)))
    })
}

fn warm(ground: &Ground) -> Outcome<()> {
    let model = ground.model()?;
    let settings = bed::settings(Choice::Auto)?;
    describe_load(&model, &settings, "all of them, checked before every run")?;
    let pairs = Pairs::measure(
        ground.pairs,
        || {
            undisturbed(|| {
                model.make_warm()?;
                bed::have_memory(model.bytes())?;
                warm_preload(&model, &settings)
            })
        },
        || {
            undisturbed(|| {
                model.make_warm()?;
                let time = timed(|| model.files().try_for_each(dd))?;
                Ok(model.is_warm()?.then_some(time))
            })
        },
    )?;
    let (preload, read) = pairs.rates(model.gigabytes());
    println!("  preload      {preload:.2} GB/s");
    println!("  dd           {read:.2} GB/s");
    report("rate ratio", &pairs.rate_ratio(), Target::AtLeast(0.25));
    Ok(())
}

/// How long a preload takes, where all of it came from the page cache.
fn warm_preload(model: &ModelDir, settings: &Settings) -> Outcome<Option<Duration>> {
    let start = Instant::now();
    let resident = model.preload(settings)?;
    let time = start.elapsed();
    Ok((resident.counts.cached_bytes == model.bytes()).then_some(time))
}

/// One `dd` of one file, as a person would try what the page cache gives.
fn dd(file: &Path) -> Outcome<()> {
    let mut input = std::ffi::OsString::from("if=");
    input.push(file);
    succeed(Command::new("dd").arg(input).args(["of=/dev/null", "bs=1M", "status=none"]))
}

fn view(ground: &Ground) -> Outcome<()> {
    let model = ground.model()?;
    let settings = bed::settings(Choice::Auto)?;
    let resident = describe_load(&model, &settings, "all of them, checked once before the pairs")?;
    println!("  shmem        {}", machine::shmem_enabled());
    let published: Vec<PathBuf> = resident.segments.iter().map(|s| descriptor(s.descriptor())).collect();
    let small_pages = small_page_memfds(&model)?;
    let small_paths: Vec<PathBuf> =
        small_pages.iter().map(|file| descriptor(std::os::fd::AsRawFd::as_raw_fd(file))).collect();
    let cached: Vec<PathBuf> = model.files().map(Path::to_owned).collect();
    model.make_warm()?;
    let mut buffer = Mapping::anonymous(COPY_BYTES)?;
    buffer.as_mut_slice().fill(1);
    let buffer = std::cell::RefCell::new(buffer);
    let copy = |files: &[PathBuf]| timed(|| copy_out(files, &mut buffer.borrow_mut()));
    for (other, files, target) in [("4 KiB memfd", &small_paths, 2.2), ("page cache", &cached, 0.95)] {
        let pairs = Pairs::measure(ground.pairs, || copy(&published), || copy(files))?;
        let (view, reference) = pairs.rates(model.gigabytes());
        println!("  view         {view:.1} GB/s");
        println!("  {other:<11}  {reference:.1} GB/s");
        report("rate ratio", &pairs.rate_ratio(), Target::AtLeast(target));
    }
    Ok(())
}

/// What a view's links lead to.
fn descriptor(number: i32) -> PathBuf {
    format!("/proc/self/fd/{number}").into()
}

/// The files in memfds that were written to: on pages of 4 KiB, where the system does not give huge ones.
fn small_page_memfds(model: &ModelDir) -> Outcome<Vec<File>> {
    let setting = machine::shmem_enabled();
    if ["always", "within_size", "force"].contains(&setting.as_str()) {
        return Err(format!("with shmem_enabled={setting} a memfd has no pages of 4 KiB").into());
    }
    let copy = |path: &Path| {
        let mut memory = memfd::create("bench:4k")?;
        std::io::copy(&mut File::open(path)?.take(u64::MAX), &mut memory)?;
        Ok(memory)
    };
    model.files().map(copy).collect()
}

/// Reads as a stock loader does: a fresh map of each file where the kernel puts it, and copies out of it.
fn copy_out(files: &[PathBuf], buffer: &mut Window) -> Outcome<()> {
    for path in files {
        let file = File::open(path)?;
        let bytes = usize::try_from(file.metadata()?.len())?;
        let map = ReaderMap::new(&file, bytes)?;
        for offset in (0..bytes).step_by(COPY_BYTES) {
            let length = COPY_BYTES.min(bytes - offset);
            map.copy(offset, &mut buffer.as_mut_slice()[..length]);
        }
    }
    Ok(())
}

fn small(ground: &Ground) -> Outcome<()> {
    raise_descriptor_limit()?;
    let memory = Path::new("/dev/shm");
    let kind = machine::file_system(memory)?;
    if kind != "tmpfs" {
        return Err(format!("/dev/shm is no tmpfs but {kind}").into());
    }
    let model = ModelDir::make(&ground.directory, SMALL_FILES, SMALL_BYTES)?;
    let settings = bed::settings(Choice::Auto)?;
    describe_load(&model, &settings, "all of them, checked before every run")?;
    let copy = || {
        model.make_warm()?;
        let target = tempfile::Builder::new().prefix("iloader-bench-").tempdir_in(memory)?;
        timed(|| succeed(Command::new("cp").arg("-r").arg(model.path()).arg(target.path())))
    };
    let load = || {
        undisturbed(|| {
            model.make_warm()?;
            warm_preload(&model, &settings)
        })
    };
    report_times("preload", &Pairs::measure(ground.pairs, load, copy)?);
    let start = || {
        model.make_warm()?;
        start_and_stop(model.path(), memory)
    };
    report_times("start", &Pairs::measure(ground.pairs, start, copy)?);
    Ok(())
}

fn report_times(name: &str, pairs: &Pairs) {
    let (ours, reference) = pairs.times();
    println!("  {name:<11}  {ours:.3} s");
    println!("  cp -r        {reference:.3} s");
    report("time ratio", &pairs.time_ratio(), Target::AtMost(3.0));
}

/// How long the whole command takes until the view is there. What it started is stopped again. BASE, and with
/// it the view's links, lies in `memory` like the copy that is compared: what 10,000 links cost on a disk is
/// its file system's affair.
fn start_and_stop(source: &Path, memory: &Path) -> Outcome<Duration> {
    let base = tempfile::Builder::new().prefix("iloader-bench-").tempdir_in(memory)?;
    let command = |name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_iloader"));
        command.arg(name).arg("--base-dir").arg(base.path());
        command
    };
    let time = timed(|| succeed(command("start").arg(source).args(["--name", "bench", "--quiet"])));
    let view = base.path().join("views/bench");
    let published = std::fs::read_dir(&view).map(Iterator::count);
    let stopped = succeed(command("stop").args(["bench", "--force", "--wait=60"]));
    let time = time?;
    match published {
        Ok(SMALL_FILES) => stopped.map(|()| time),
        Ok(files) => Err(format!("`iloader start` published {files} of {SMALL_FILES} files").into()),
        Err(cause) => Err(format!("`iloader start` published no view: {cause}").into()),
    }
}

/// Ten thousand segments are ten thousand descriptors.
fn raise_descriptor_limit() -> Outcome<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    Ok(())
}

/// Loads once, untimed, and says what is loaded and how.
fn describe_load(model: &ModelDir, settings: &Settings, page_cache: &str) -> Outcome<Resident> {
    let resident = model.preload(settings)?;
    println!("  files        {}, {} in all", model.selection.files.len(), ByteSize(model.bytes()));
    println!("  page cache   {page_cache}");
    let engine = &settings.engine;
    println!(
        "  engine       {}, {} worker, depth {}, reads of {}",
        engine.model,
        settings.options.workers,
        engine.depth(),
        ByteSize(bed::read_bytes())
    );
    let share = 100.0 * resident.huge_page_bytes() as f64 / resident.allocated_bytes() as f64;
    println!("  backing      {} ({}), {share:.1} % on huge pages", resident.backing, resident.backing_reason);
    Ok(resident)
}

fn report(name: &str, ratio: &Spread, target: Target) {
    println!("  {name:<11}  {ratio:.2}, {}", target.verdict(ratio.median()));
}

/// User and system time of all threads of this process, the ended ones and the kernel's workers included.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("less than a second"))
}
