//! `verify`: is a generation what its manifest says?

use std::collections::BTreeSet;
use std::path::PathBuf;

use clap::Args;

use super::json;
use super::output::{self, Align, Table};
use super::watch::{self, Work};
use crate::budget::limits;
use crate::disk::{self, Depth, Generation, Report};
use crate::engine::{self, Selected};
use crate::error::{Error, Kind, Result, shown};
use crate::manifest::SelectionRules;
use crate::registry::Environment;
use crate::units::ByteSize;

/// Descriptors beside those that every program has: many files are read at once.
const DESCRIPTORS: u64 = 256;

const HELP_AFTER: &str = "\
GENERATION is the path that 'iloader cache' printed, or ROOT/NAME for the newest one of a name. Every byte is read past \
the page cache: what is on disk is what is checked. 'sha256sum -c SHA256SUMS' inside of it checks the same without \
iloader. Meanwhile the generation is leased. Exit codes: 0 it is whole, 3 there is none, 7 it is not what its manifest \
says, 130 cancelled.

Example:
  iloader verify /nvme/models/Qwen3-8B@1";

/// Compare a copy on local disk with the SHA-256 of each file in its manifest
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct VerifyArgs {
    /// The generation's path
    #[arg(value_name = "GENERATION")]
    generation: PathBuf,
    /// Look at names, sizes and times only
    #[arg(long)]
    quick: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Verifies it, and prints what was found.
pub(crate) fn verify(args: &VerifyArgs) -> Result<()> {
    limits::raise_descriptors(DESCRIPTORS)?;
    let path = Environment::of_process().absolute(&args.generation, "the generation")?;
    let generation = Generation::open(&path)?;
    let _lease = generation.lease()?;
    let engine = Selected::probe(engine::Choice::Auto, None)?;
    let report = look(&generation, args, &engine)?;
    print(args, &generation, &report)?;
    // One file may have several findings.
    let paths: BTreeSet<&str> = report.findings.iter().map(|finding| finding.path.as_str()).collect();
    match paths.len() {
        0 => Ok(()),
        count => Err(not_whole(&generation, count)),
    }
}

fn look(generation: &Generation, args: &VerifyArgs, engine: &Selected) -> Result<Report> {
    let (manifest, name) = (generation.manifest(), called(generation));
    let depth = if args.quick { Depth::Quick } else { Depth::Full };
    // A look at names and times is over before there is anything to show.
    let work = Work { doing: "verifying", name: &name, quiet: args.quick };
    let total = (manifest.bytes, manifest.files.len() as u64);
    watch::checking(&work, total, |watcher| disk::verify(generation, depth, engine, watcher))
}

/// `qwen@2`
fn called(generation: &Generation) -> String {
    format!("{}@{}", generation.name(), generation.number())
}

fn print(args: &VerifyArgs, generation: &Generation, report: &Report) -> Result<()> {
    if args.json {
        return output::print_json(&json::VerifyAnswer {
            name: generation.name().as_str(),
            number: generation.number(),
            path: generation.path().to_string_lossy(),
            quick: args.quick,
            files: report.files,
            bytes: report.bytes,
            findings: report.findings.iter().map(json::Finding::from).collect(),
        });
    }
    if report.findings.is_empty() {
        let (name, files) = (called(generation), report.files);
        let checked = match args.quick {
            true => format!("{files} files have the names, sizes and times of its manifest"),
            false => format!("{files} files, {}, are what its manifest says", ByteSize(report.bytes)),
        };
        return output::print(&format!("{name}: {checked}\n"));
    }
    let mut table = Table::new(&[("FOUND", Align::Left), ("FILE", Align::Left), ("", Align::Left)]);
    for finding in &report.findings {
        table.row([finding.what, &finding.path, &finding.detail]);
    }
    output::print(&table.render())
}

fn not_whole(generation: &Generation, count: usize) -> Error {
    let files = if count == 1 { "1 file differs".to_owned() } else { format!("{count} files differ") };
    let (name, source) = (called(generation), shown(&generation.manifest().source));
    let (called, root) = (generation.name(), generation.path().parent().map_or_else(String::new, shown));
    let is_all = generation.manifest().selection == SelectionRules::default();
    let patterns = if is_all { "" } else { ", with the patterns that it was made with" };
    Error::new(Kind::Verification, format!("{name} is not what its manifest says: {files}")).hint(format!(
        "make another one, which takes its place unless it is in use: iloader cache {source} --name {called} \
         --cache-root {root} --refresh{patterns}"
    ))
}
