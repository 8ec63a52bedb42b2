//! `manifest`: what a cache holds, as JSON.

use clap::Args;

use super::args::{TargetArgs, TimeoutArgs};
use super::output;
use super::target::Target;
use crate::control::message::{Operation, Reply};
use crate::error::Result;

const HELP_AFTER: &str = "\
Sizes are in bytes, times RFC 3339. Files marked \"passthrough\" are links to the source and not in memory.

Example:
  iloader manifest qwen | jq -r '.files[].path'";

/// Print what a cache holds, as JSON: source, selection, files with sizes and times, totals
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct ManifestArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    answer: TimeoutArgs,
}

/// Prints the manifest.
pub(crate) fn manifest(args: &ManifestArgs) -> Result<()> {
    let target = Target::of(&args.target, args.answer.timeout)?;
    match target.connect()?.request(Operation::Manifest {})? {
        Reply::Manifest(manifest) => output::print_json(&*manifest),
        other => Err(target.unexpected(&other)),
    }
}
