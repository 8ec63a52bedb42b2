//! What `docs/benchmarks.md` promises of generations on disk, each measured against its reference in alternating
//! pairs.
//!
//! `cargo bench --bench disk -- [NAME…] [--pairs 9] [--dir DIR] [--size 2GiB]`

mod bed;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use bed::claims::{self, Claim, Ground, ODD_BYTES, SHARDS};
use bed::pairs::{Pairs, Spread, Target, undisturbed};
use bed::{Discard, ModelDir, Outcome, succeed, timed};
use iloader::engine::{Choice, Selected};
use iloader::source::Direct;
use iloader::units::ByteSize;
use serde_json::Value;

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

fn main() -> ExitCode {
    claims::main("disk", &CLAIMS, USAGE)
}

/// The shards of one claim, and what is in the page cache.
fn model(ground: &Ground) -> Outcome<ModelDir> {
    let model = ground.model()?;
    println!("  files        {}, {} in all", model.selection.files.len(), ByteSize(model.bytes()));
    println!("  page cache   nothing of them, checked before every run");
    Ok(model)
}

/// A place for a copy, on the same file system as the model, removed when dropped.
fn place(ground: &Ground) -> Outcome<tempfile::TempDir> {
    Ok(tempfile::Builder::new().prefix("iloader-bench-").tempdir_in(&ground.directory)?)
}

/// How long `iloader cache` takes for all of `model`, until the generation is whole and on the device.
fn timed_cache(ground: &Ground, model: &ModelDir) -> Outcome<Duration> {
    let root = place(ground)?;
    settle(&ground.directory)?;
    model.make_cold()?;
    timed(|| succeed(&mut cache(model.path(), root.path())))
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
    let model = model(ground)?;
    let reference = || {
        let place = place(ground)?;
        settle(&ground.directory)?;
        model.make_cold()?;
        let copy = place.path().join("copy");
        timed(|| {
            succeed(Command::new("cp").arg("-r").arg(model.path()).arg(&copy))?;
            succeed(&mut Command::new("sync"))?;
            succeed(Command::new("openssl").args(["dgst", "-sha256"]).args(files_of(&copy)?))
        })
    };
    let pairs = Pairs::measure(ground.pairs, || timed_cache(ground, &model), reference)?;
    report_rates(&pairs, &model, "cp and rest", Target::AtLeast(1.8));
    Ok(())
}

fn fio(ground: &Ground) -> Outcome<()> {
    succeed(Command::new("fio").arg("--version"))
        .map_err(|error| format!("there is no fio here: {error}"))?;
    let model = model(ground)?;
    let reference = || {
        let place = place(ground)?;
        settle(&ground.directory)?;
        model.make_cold()?;
        fio_copy(&model, place.path())
    };
    let pairs = Pairs::measure(ground.pairs, || timed_cache(ground, &model), reference)?;
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
    let model = model(ground)?;
    let root = place(ground)?;
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
    let (source, root) = (place(ground)?, place(ground)?);
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
