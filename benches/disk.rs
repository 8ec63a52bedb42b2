//! What `docs/benchmarks.md` promises of generations on disk, each measured against its reference in alternating
//! pairs.
//!
//! `cargo bench --bench disk -- [NAME…] [--pairs 9] [--dir DIR] [--size 2GiB]`

mod bed;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use bed::machine;
use bed::pairs::{Pairs, Spread, Target, undisturbed};
use bed::{Discard, ModelDir, Outcome, succeed, timed};
use iloader::engine::{Choice, Selected};
use iloader::source::Direct;
use iloader::units::ByteSize;
use serde_json::Value;

/// A model of this many shards.
const SHARDS: u64 = 8;

/// A shard is not a whole number of pages: models never are.
const ODD_BYTES: u64 = 1234;

/// Fewer pairs than this say nothing about spread.
const PAIRS_MIN: usize = 9;

/// The model whose copy must not take more memory than a small one: sparse, so that reading it costs nothing.
const SPARSE_BYTES: u64 = 20 << 30;

/// What that copy may take.
const PEAK_BYTES_MAX: u64 = 600 << 20;

/// How often a running command is asked for its peak.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

const USAGE: &str = "usage: cargo bench --bench disk -- [NAME...] [--pairs N] [--dir DIR] [--size SIZE]\n\
    NAME: cp, fio, verify, memory; all without a name\n\
    --pairs N     alternating pairs of each, at least 9 (9)\n\
    --dir DIR     where files and copies are made, and removed again (target/tmp)\n\
    --size SIZE   how much is copied (2GiB); `memory` copies 20 GiB in any case";

/// A claim: its name, what is measured, and how.
struct Claim {
    name: &'static str,
    what: &'static str,
    measure: fn(&Ground) -> Outcome<()>,
}

const CLAIMS: [Claim; 4] = [
    Claim {
        name: "cp",
        what: "cache, against cp -r, sync and openssl dgst -sha256 of the copy",
        measure: cp,
    },
    Claim {
        name: "fio",
        what: "cache, against fio reading and writing as much at the same time with O_DIRECT",
        measure: fio,
    },
    Claim {
        name: "verify",
        what: "verify, against the slower of reading with O_DIRECT and hashing from the page cache on all cores",
        measure: verify,
    },
    Claim { name: "memory", what: "peak of the memory of a cache of 20 GiB", measure: memory },
];

/// What the claims are measured on.
struct Ground {
    pairs: usize,
    directory: PathBuf,
    bytes: u64,
}

fn main() -> ExitCode {
    // `cargo test --benches` runs this too, without the flag: there is nothing to test here.
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let (claims, ground) = match parse(std::env::args().skip(1)) {
        Ok(parsed) => parsed,
        Err(message) => {
            eprintln!("error: {message}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&claims, ground) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<(Vec<&'static Claim>, Ground), String> {
    let mut claims = Vec::new();
    let mut ground = Ground { pairs: PAIRS_MIN, directory: bed::directory().to_owned(), bytes: 2 << 30 };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--bench" => {}
            "--pairs" => ground.pairs = value()?.parse().map_err(|_| "--pairs takes a number")?,
            "--dir" => ground.directory = value()?.into(),
            "--size" => ground.bytes = value()?.parse::<ByteSize>()?.0,
            name => {
                let claim = CLAIMS.iter().find(|claim| claim.name == name);
                claims.push(claim.ok_or(format!("there is no claim '{name}'"))?);
            }
        }
    }
    if claims.is_empty() {
        claims = CLAIMS.iter().collect();
    }
    if ground.pairs < PAIRS_MIN {
        return Err(format!("fewer than {PAIRS_MIN} pairs say nothing about spread"));
    }
    if ground.bytes < SHARDS << 21 {
        return Err(format!("--size must be at least {}", ByteSize(SHARDS << 21)));
    }
    Ok((claims, ground))
}

fn run(claims: &[&Claim], mut ground: Ground) -> Outcome<()> {
    std::fs::create_dir_all(&ground.directory)?;
    machine::describe(&ground.directory, "disk")?;
    let cores = std::thread::available_parallelism()?.get() as f64;
    if machine::load_average()? > cores / 2.0 {
        println!("note           other programs are running: these figures are preliminary");
    }
    ground.directory = ground.directory.canonicalize()?;
    for claim in claims {
        println!("\n{}: {}", claim.name, claim.what);
        // One that cannot be measured here leaves the others alone.
        if let Err(error) = (claim.measure)(&ground) {
            println!("  no figure    {error}");
        }
    }
    Ok(())
}

impl Ground {
    /// The shards, made anew for each claim so that none inherits another's page cache.
    fn model(&self) -> Outcome<ModelDir> {
        let model = ModelDir::make(&self.directory, SHARDS as usize, self.bytes / SHARDS + ODD_BYTES)?;
        println!("  files        {}, {} in all", model.selection.files.len(), ByteSize(model.bytes()));
        println!("  page cache   nothing of them, checked before every run");
        Ok(model)
    }

    /// A place for a copy, on the same file system as the model, removed when dropped.
    fn place(&self) -> Outcome<tempfile::TempDir> {
        Ok(tempfile::Builder::new().prefix("iloader-bench-").tempdir_in(&self.directory)?)
    }

    /// How long `iloader cache` takes for all of `model`, until the generation is whole and on the device.
    fn cache(&self, model: &ModelDir) -> Outcome<Duration> {
        let root = self.place()?;
        settle(&self.directory)?;
        model.make_cold()?;
        timed(|| succeed(&mut cache(model.path(), root.path())))
    }
}

fn cache(model: &Path, root: &Path) -> Command {
    let mut command = iloader();
    command.arg("cache").arg(model).args(["--name", "bench", "--quiet", "--cache-root"]).arg(root);
    command
}

fn iloader() -> Command {
    Command::new(env!("CARGO_BIN_EXE_iloader"))
}

/// What earlier runs wrote and removed must not be on its way to the device any more.
fn settle(directory: &Path) -> Outcome<()> {
    Ok(rustix::fs::syncfs(std::fs::File::open(directory)?)?)
}

fn cp(ground: &Ground) -> Outcome<()> {
    let model = ground.model()?;
    let reference = || {
        let place = ground.place()?;
        settle(&ground.directory)?;
        model.make_cold()?;
        let copy = place.path().join("copy");
        timed(|| {
            succeed(Command::new("cp").arg("-r").arg(model.path()).arg(&copy))?;
            succeed(&mut Command::new("sync"))?;
            succeed(Command::new("openssl").args(["dgst", "-sha256"]).args(files_of(&copy)?))
        })
    };
    let pairs = Pairs::measure(ground.pairs, || ground.cache(&model), reference)?;
    report_rates(&pairs, &model, "cp and rest", Target::AtLeast(1.8));
    Ok(())
}

fn fio(ground: &Ground) -> Outcome<()> {
    succeed(Command::new("fio").arg("--version"))
        .map_err(|error| format!("there is no fio here: {error}"))?;
    let model = ground.model()?;
    let reference = || {
        let place = ground.place()?;
        settle(&ground.directory)?;
        model.make_cold()?;
        fio_copy(&model, place.path())
    };
    let pairs = Pairs::measure(ground.pairs, || ground.cache(&model), reference)?;
    report_rates(&pairs, &model, "fio", Target::AtLeast(0.85));
    Ok(())
}

/// Has fio read the model's files and write as many bytes to new ones at the same time, and asks it how long the
/// slower of the two took: its own start is not counted.
fn fio_copy(model: &ModelDir, place: &Path) -> Outcome<Duration> {
    let files: Vec<&str> =
        model.files().map(|file| file.to_str().ok_or("not UTF-8")).collect::<Result<_, _>>()?;
    let mut command = Command::new("fio");
    command
        .args(["--output-format=json", "--direct=1", "--ioengine=io_uring", "--iodepth=16", "--bs=1M"])
        .args(["--name=read", "--rw=read", "--file_service_type=sequential"])
        .arg(format!("--filename={}", files.join(":")))
        .args(["--name=write", "--rw=write", "--file_service_type=sequential", "--end_fsync=1"])
        .arg(format!("--directory={}", place.display()))
        .arg(format!("--nrfiles={SHARDS}"))
        .arg(format!("--size={}", model.bytes()));
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        return Err(format!("fio failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let milliseconds = |job: usize, direction: &str| -> Outcome<(u64, u64)> {
        let job = &report["jobs"][job][direction];
        let number = |key: &str| job[key].as_u64().ok_or(format!("fio's report has no {direction} {key}"));
        Ok((number("runtime")?, number("io_bytes")?))
    };
    let (read, write) = (milliseconds(0, "read")?, milliseconds(1, "write")?);
    // It moves whole blocks only.
    let least = model.bytes() - SHARDS * (1 << 20);
    if read.1 < least || write.1 < least {
        return Err(format!("fio read {} and wrote {} of {} bytes", read.1, write.1, model.bytes()).into());
    }
    Ok(Duration::from_millis(read.0.max(write.0)))
}

fn verify(ground: &Ground) -> Outcome<()> {
    let model = ground.model()?;
    let root = ground.place()?;
    succeed(&mut cache(model.path(), root.path()))?;
    let generation = root.path().join("bench@1");
    let engine = Selected::probe(Choice::Auto, None)?;
    let mut read = Discard::new(&engine, bed::read_bytes())?;
    let (mut reads, mut hashes) = (Vec::new(), Vec::new());
    let check = || {
        settle(&ground.directory)?;
        timed(|| succeed(iloader().arg("verify").arg(&generation)))
    };
    let reference = || {
        model.make_cold()?;
        let reading = timed(|| read.read(&model.selection.files, Direct::Always))?;
        let hashing = undisturbed(|| {
            model.make_warm()?;
            let time = timed(|| hash_on_all_cores(&model))?;
            Ok(model.is_warm()?.then_some(time))
        })?;
        reads.push(model.gigabytes() / reading.as_secs_f64());
        hashes.push(model.gigabytes() / hashing.as_secs_f64());
        Ok(reading.max(hashing))
    };
    let pairs = Pairs::measure(ground.pairs, check, reference)?;
    println!("  read         {:.2} GB/s with O_DIRECT, the bytes thrown away", Spread::of(reads));
    println!("  hash         {:.2} GB/s, one openssl for each core", Spread::of(hashes));
    report_rates(&pairs, &model, "the slower", Target::AtLeast(0.9));
    Ok(())
}

/// Hashes the model with as many programs as there are cores, each its share of the files.
fn hash_on_all_cores(model: &ModelDir) -> Outcome<()> {
    let cores = std::thread::available_parallelism()?.get();
    let files: Vec<&Path> = model.files().collect();
    let hash = |files: &[&Path]| {
        Command::new("openssl").args(["dgst", "-sha256"]).args(files).stdout(Stdio::null()).spawn()
    };
    let programs: Vec<Child> =
        files.chunks(files.len().div_ceil(cores)).map(hash).collect::<Result<_, _>>()?;
    for mut program in programs {
        let status = program.wait()?;
        if !status.success() {
            return Err(format!("openssl failed ({status})").into());
        }
    }
    Ok(())
}

fn memory(ground: &Ground) -> Outcome<()> {
    let space = rustix::fs::statvfs(&ground.directory)?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if free < SPARSE_BYTES + (SPARSE_BYTES >> 3) {
        return Err(format!("{} are free, {} are copied", ByteSize(free), ByteSize(SPARSE_BYTES)).into());
    }
    let (source, root) = (ground.place()?, ground.place()?);
    for shard in 0..SHARDS / 2 {
        let file = std::fs::File::create(source.path().join(format!("model-{shard}.safetensors")))?;
        file.set_len(SPARSE_BYTES / (SHARDS / 2) + ODD_BYTES)?;
    }
    let begun = Instant::now();
    let mut running = cache(source.path(), root.path()).stdout(Stdio::null()).spawn()?;
    let mut peak = 0;
    let status = loop {
        peak = peak_of(&running).unwrap_or(0).max(peak);
        if let Some(status) = running.try_wait()? {
            break status;
        }
        std::thread::sleep(LOOK_PAUSE);
    };
    if !status.success() {
        return Err(format!("iloader cache failed ({status})").into());
    }
    println!("  time         {:.1} s for {}", begun.elapsed().as_secs_f64(), ByteSize(SPARSE_BYTES));
    let verdict = Target::AtMost(PEAK_BYTES_MAX as f64).verdict(peak as f64);
    println!("  peak         {} (bytes: {verdict})", ByteSize(peak));
    Ok(())
}

/// The most memory that a process has had, shared memory that it has mapped included (`VmHWM`), in bytes.
fn peak_of(process: &Child) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

fn files_of(directory: &Path) -> Outcome<Vec<PathBuf>> {
    std::fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect()
}

fn report_rates(pairs: &Pairs, model: &ModelDir, reference: &str, target: Target) {
    let (ours, theirs) = pairs.rates(model.gigabytes());
    println!("  iloader      {ours:.2} GB/s");
    println!("  {reference:<11}  {theirs:.2} GB/s");
    let ratio = pairs.rate_ratio();
    println!("  rate ratio   {ratio:.2}, {}", target.verdict(ratio.median()));
}
