//! `manifest`: what a cache holds, as JSON.

use clap::Args;

use super::args::{TargetArgs, TimeoutArgs};
use super::json;
use super::output;
use super::target::Target;
use crate::control::message::{Operation, Reply};
use crate::error::Result;

const HELP_AFTER: &str = "\
Sizes are in bytes, times RFC 3339. Files marked \"passthrough\" are links to the source, or to the generation, and not \
in memory. \"sha256\" stands where start --verify hashed the bytes in memory; \"generation\" is what --local-cache read \
them from, else null.

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
    let mut client = target.connect()?;
    let manifest = match client.request(Operation::Manifest {})? {
        Reply::Manifest(manifest) => manifest,
        other => return Err(target.unexpected(&other)),
    };
    let generation = match client.request(Operation::Status {})? {
        Reply::Status(status) => status.generation,
        other => return Err(target.unexpected(&other)),
    };
    output::print_json(&json::ManifestAnswer { manifest: &manifest, generation: generation.as_deref() })
}
