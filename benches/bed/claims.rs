//! Claims that are measured: the command line of a benchmark that has some, and the ground that they stand on.

use std::path::PathBuf;
use std::process::ExitCode;

use iloader::units::ByteSize;

use super::{ModelDir, Outcome, machine};

/// A model of this many shards.
pub(crate) const SHARDS: u64 = 8;

/// A shard is not a whole number of pages: models never are.
pub(crate) const ODD_BYTES: u64 = 1234;

/// Fewer pairs than this say nothing about spread.
const PAIRS_MIN: usize = 9;

/// A claim: its name, what is measured, and how.
pub(crate) struct Claim {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    pub(crate) measure: fn(&Ground) -> Outcome<()>,
}

/// What the claims are measured on.
pub(crate) struct Ground {
    pub(crate) pairs: usize,
    pub(crate) directory: PathBuf,
    pub(crate) bytes: u64,
}

/// Measures what the command line asks for.
pub(crate) fn main(bench: &str, claims: &'static [Claim], usage: &str) -> ExitCode {
    // `cargo test --benches` runs this too, without the flag: there is nothing to test here.
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("{usage}");
        return ExitCode::SUCCESS;
    }
    let (claims, ground) = match parse(claims, std::env::args().skip(1)) {
        Ok(parsed) => parsed,
        Err(message) => {
            eprintln!("error: {message}\n{usage}");
            return ExitCode::from(2);
        }
    };
    match run(bench, &claims, ground) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(
    claims: &'static [Claim],
    mut words: impl Iterator<Item = String>,
) -> Result<(Vec<&'static Claim>, Ground), String> {
    let mut wanted = Vec::new();
    let mut ground = Ground { pairs: PAIRS_MIN, directory: super::directory().to_owned(), bytes: 2 << 30 };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--bench" => {}
            "--pairs" => ground.pairs = value()?.parse().map_err(|_| "--pairs takes a number")?,
            "--dir" => ground.directory = value()?.into(),
            "--size" => ground.bytes = value()?.parse::<ByteSize>()?.0,
            name => {
                let claim = claims.iter().find(|claim| claim.name == name);
                wanted.push(claim.ok_or(format!("there is no claim '{name}'"))?);
            }
        }
    }
    if wanted.is_empty() {
        wanted = claims.iter().collect();
    }
    if ground.pairs < PAIRS_MIN {
        return Err(format!("fewer than {PAIRS_MIN} pairs say nothing about spread"));
    }
    if ground.bytes < SHARDS << 21 {
        return Err(format!("--size must be at least {}", ByteSize(SHARDS << 21)));
    }
    Ok((wanted, ground))
}

fn run(bench: &str, claims: &[&Claim], mut ground: Ground) -> Outcome<()> {
    std::fs::create_dir_all(&ground.directory)?;
    machine::describe(&ground.directory, bench)?;
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
    pub(crate) fn model(&self) -> Outcome<ModelDir> {
        ModelDir::make(&self.directory, SHARDS as usize, self.bytes / SHARDS + ODD_BYTES)
    }
}
