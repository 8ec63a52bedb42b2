//! `view`: where the cache's files are to be read.

use std::time::{Duration, Instant};

use clap::Args;

use super::args::{self, TargetArgs};
use super::output;
use super::preflight;
use super::target::Target;
use super::wait;
use crate::control::message::{Operation, Reply};
use crate::error::Result;

const HELP_AFTER: &str = "\
Prints nothing and fails until the cache is ready. Reading the view directly takes no lease: the cache \
is kept while a file of it is open or mapped, and not in between. 'iloader run' keeps it all the time.

Example:
  VIEW=$(iloader view qwen) && vllm serve \"$VIEW\"";

/// Print the path of a cache's view, alone on stdout
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct ViewArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// How many seconds to wait for readiness
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value = "5", value_parser = args::seconds)]
    timeout: Duration,
}

/// Prints the path.
pub(crate) fn view(args: &ViewArgs) -> Result<()> {
    let target = Target::of(&args.target, args.timeout)?;
    let (view, mut client) = wait::until_ready(&target, Instant::now() + args.timeout, true)?;
    match client.request(Operation::Status {})? {
        Reply::Status(status) => preflight::check_published(&mut client, &status)?,
        other => return Err(target.unexpected(&other)),
    }
    output::print_path(&view)
}
