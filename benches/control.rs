//! What the commands around a running cache cost: `start` again, `run` before its command, `status` at rest and
//! while a load runs, `list` of many, and the daemon that rests.
//!
//! `cargo bench --bench control -- [--runs 15]`

mod bed;

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use bed::pairs::{Pairs, Spread, Target};
use bed::{ModelDir, Outcome, machine};
use iloader::units::ByteSize;

/// Files of the models: up to the first the cost of `run` is a sum, beyond it one for each file.
const FILES_FEW: usize = 200;
const FILES_MANY: usize = 10_000;
const FILE_BYTES: u64 = 1024;

/// Caches that `list` is asked for.
const CACHES_MANY: usize = 100;

/// What is loaded while `status` is asked: some seconds of work for any device.
const LOADED_FILES: usize = 4;
const LOADED_FILE_BYTES: u64 = 512 << 20;

/// How long a daemon is watched while it rests.
const REST: Duration = Duration::from_secs(3);

/// A running cache in a BASE of its own; stopped at the end, also when a measurement fails.
struct Cache {
    base: tempfile::TempDir,
    model: ModelDir,
}

impl Cache {
    /// BASE lies in memory: what links and records cost on a disk is the file system's affair.
    fn start(files: usize) -> Outcome<Cache> {
        let cache = Cache::prepare(files, FILE_BYTES)?;
        succeed(&mut cache.start_again())?;
        Ok(cache)
    }

    /// A BASE and a model, and nothing running yet.
    fn prepare(files: usize, bytes_each: u64) -> Outcome<Cache> {
        let shared_memory = Path::new("/dev/shm");
        let parent = if shared_memory.is_dir() { shared_memory.to_owned() } else { std::env::temp_dir() };
        let base = tempfile::Builder::new().prefix("iloader-bench-").tempdir_in(parent)?;
        Ok(Cache { base, model: ModelDir::make(bed::directory(), files, bytes_each)? })
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_iloader"));
        command.arg(name).arg("--base-dir").arg(self.base.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    fn start_again(&self) -> Command {
        self.start_as("bench")
    }

    fn start_as(&self, name: &str) -> Command {
        let mut command = self.command("start");
        command.arg(self.model.path()).args(["--name", name]);
        command
    }

    fn run_true(&self) -> Command {
        let mut command = self.command("run");
        command.args(["bench", "--", "/bin/true"]);
        command
    }

    /// The daemon's process, from its pid file.
    fn pid(&self) -> Outcome<u32> {
        Ok(std::fs::read_to_string(self.base.path().join("run/bench.pid"))?.trim().parse()?)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let _ = self.command("stop").args(["--all", "--force", "--remove-view"]).status();
    }
}

/// The time of a command that has to succeed.
fn succeed(command: &mut Command) -> Outcome<Duration> {
    let start = Instant::now();
    let status = command.status()?;
    let time = start.elapsed();
    if status.success() { Ok(time) } else { Err(format!("{command:?}: {status}").into()) }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --benches` runs this too, without the flag: there is nothing to test here.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return ExitCode::SUCCESS;
    }
    let runs = arguments.iter().position(|word| word == "--runs").and_then(|at| arguments.get(at + 1));
    let runs = runs.and_then(|number| number.parse().ok()).unwrap_or(15usize);
    match measure(runs) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(runs: usize) -> Outcome<()> {
    machine::describe(Path::new("/dev/shm"), "control")?;
    let few = Cache::start(FILES_FEW)?;
    println!("\nstart of what runs already, {FILES_FEW} files");
    let mut again = Vec::new();
    for _ in 0..runs {
        again.push(succeed(&mut few.start_again())?.as_secs_f64() * 1e3);
    }
    report("start again", "ms", &Spread::of(again), Target::AtMost(30.0));

    println!("\nrun, before its command: `run -- /bin/true` against `/bin/true`, in turns");
    let added_few = added(runs, &few)?;
    report(&format!("{FILES_FEW} files"), "ms", &added_few, Target::AtMost(10.0));
    let many = Cache::start(FILES_MANY)?;
    let added_many = added(runs, &many)?;
    println!("  {FILES_MANY} files    {added_many:.2} ms");
    let per_file = (added_many.median() - added_few.median()) * 1e3 / (FILES_MANY - FILES_FEW) as f64;
    println!("  each further {per_file:.1} µs, {}", Target::AtMost(15.0).verdict(per_file));

    println!("\nstatus, {FILES_FEW} files");
    let mut status = Vec::new();
    for _ in 0..runs {
        let mut command = few.command("status");
        status.push(succeed(command.arg("bench"))?.as_secs_f64() * 1e3);
    }
    println!("  status       {:.2} ms", Spread::of(status));
    measure_status_while_loading(runs)?;
    measure_list(runs)?;

    println!("\nthe daemon at rest, its segments aside");
    for (files, cache) in [(FILES_FEW, &few), (FILES_MANY, &many)] {
        let pid = cache.pid()?;
        let own = own_memory(pid)?;
        let mib = own as f64 / f64::from(1 << 20);
        println!(
            "  {files} files: {} of its own, {}",
            ByteSize(own),
            Target::AtMost(10.0).verdict(mib) + " MiB"
        );
    }
    let pid = few.pid()?;
    let before = activity(pid)?;
    std::thread::sleep(REST);
    let after = activity(pid)?;
    println!(
        "  in {} s: {} ticks of CPU time, {} context switches",
        REST.as_secs(),
        after.0 - before.0,
        after.1 - before.1
    );
    Ok(())
}

/// `status` of a cache whose load runs as fast as it can, once the device's work and once the processors'. Loads
/// are started until there are `runs` figures.
fn measure_status_while_loading(runs: usize) -> Outcome<()> {
    let cache = Cache::prepare(LOADED_FILES, LOADED_FILE_BYTES)?;
    println!("\nstatus while a load of {} runs, one worker", ByteSize(cache.model.bytes()));
    for place in ["storage", "the page cache"] {
        let mut times = Vec::new();
        let mut loads = 0;
        while times.len() < runs {
            let prepared = if place == "storage" { cache.model.make_cold() } else { cache.model.make_warm() };
            if let Err(why) = prepared {
                println!("  from {place}: no figure, {why}");
                break;
            }
            succeed(cache.start_again().arg("--no-wait"))?;
            loads += 1;
            while let Some(time) = time_of_status_while_loading(&cache)? {
                times.push(time.as_secs_f64() * 1e3);
            }
            succeed(cache.command("stop").arg("bench"))?;
            if loads > runs {
                return Err("loads end before they can be asked".into());
            }
        }
        if times.len() >= runs {
            println!("  from {place}, {} figures in {loads} loads", times.len());
            report("status", "ms", &Spread::of(times), Target::AtMost(10.0));
        }
    }
    Ok(())
}

/// The time of one `status`; `None` once the cache is ready.
fn time_of_status_while_loading(cache: &Cache) -> Outcome<Option<Duration>> {
    let mut command = cache.command("status");
    let start = Instant::now();
    let status = command.arg("bench").status()?;
    let time = start.elapsed();
    match status.code() {
        Some(4) => Ok(Some(time)),
        Some(0) => Ok(None),
        _ => Err(format!("{command:?}: {status}").into()),
    }
}

/// `list` of many caches, each of one small file.
fn measure_list(runs: usize) -> Outcome<()> {
    let caches = Cache::prepare(1, FILE_BYTES)?;
    println!("\nlist, {CACHES_MANY} caches");
    for number in 0..CACHES_MANY {
        succeed(&mut caches.start_as(&format!("bench-{number:03}")))?;
    }
    let mut times = Vec::new();
    for _ in 0..runs {
        times.push(succeed(&mut caches.command("list"))?.as_secs_f64() * 1e3);
    }
    let listed = caches.command("list").arg("--json").stdout(Stdio::piped()).output()?;
    let ready = String::from_utf8(listed.stdout)?.matches("\"state\": \"ready\"").count();
    if ready != CACHES_MANY {
        return Err(format!("{ready} of {CACHES_MANY} caches were listed as ready").into());
    }
    report("list", "ms", &Spread::of(times), Target::AtMost(200.0));
    Ok(())
}

/// What `run` adds to its command, in milliseconds.
fn added(runs: usize, cache: &Cache) -> Outcome<Spread> {
    let pairs = Pairs::measure(
        runs,
        || succeed(&mut cache.run_true()),
        || succeed(Command::new("/bin/true").stdin(Stdio::null())),
    )?;
    Ok(Spread::of(pairs.differences().map(|seconds| seconds * 1e3)))
}

fn report(what: &str, unit: &str, spread: &Spread, target: Target) {
    println!("  {what:<12} {spread:.2} {unit}, {}", target.verdict(spread.median()));
}

/// Resident memory of a process that is no memory file of ours: its program, heap, stacks and tables.
fn own_memory(pid: u32) -> Outcome<u64> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let (mut sum, mut is_segment) = (0, false);
    for line in maps.lines() {
        if let Some(size) = line.strip_prefix("Rss:") {
            let kib: u64 = size.trim().trim_end_matches("kB").trim().parse()?;
            sum += if is_segment { 0 } else { kib << 10 };
        } else if line.split_once('-').is_some_and(|(start, _)| u64::from_str_radix(start, 16).is_ok()) {
            is_segment = line.contains("iloader:");
        }
    }
    Ok(sum)
}

/// Ticks of CPU time and context switches of all threads of a process.
fn activity(pid: u32) -> Outcome<(u64, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let number = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    let mut switches = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = std::fs::read_to_string(thread?.path().join("status"))?;
        let counts = status.lines().filter(|line| line.contains("_ctxt_switches:"));
        switches +=
            counts.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum::<u64>();
    }
    Ok((number(11) + number(12), switches))
}
