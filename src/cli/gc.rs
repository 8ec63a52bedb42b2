//! `gc`: remove what nobody uses, the least recently used first.

mod disk;
mod resident;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::args::{self, BaseArgs, RootArgs};
use super::output::{self, Align, Table};
use crate::error::Result;
use crate::gc::{Policy, Why};
use crate::units::ByteSize;

const HELP_AFTER: &str = "\
Shows what would be done; --apply does it. What is leased or read by any process stays, and is named with the reason; \
with --resident also what is loading or out of reach. What comes into use meanwhile stays, too. Without --max-bytes and \
--ttl only leftovers are looked for, which go in any case: on disk what interrupted copies left, and generations of a \
name that has a newer one; with --resident what dead daemons left. The time of use is that of the last lease, or of \
readiness. A file that several generations have counts once. Exit codes: 0 done, also where something had to stay, \
1 failed.

Example:
  iloader gc --cache-root /nvme/models --max-bytes 500GiB
  iloader gc --resident --ttl 86400 --apply";

/// Remove copies on local disk, or caches in memory, that nobody uses: only shown, unless --apply is given
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct GcArgs {
    /// Look at the caches in memory, in place of the generations on disk
    #[arg(long, conflicts_with = "cache_root")]
    resident: bool,
    /// The directory that holds the generations [default: BASE/model-cache]
    #[arg(long, value_name = "PATH")]
    cache_root: Option<PathBuf>,
    /// Remove the least recently used until all together take at most SIZE [default: no limit]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    max_bytes: Option<ByteSize>,
    /// Remove what was not used for SECONDS [default: no limit]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = args::seconds)]
    ttl: Option<Duration>,
    /// Do it
    #[arg(long)]
    apply: bool,
    #[command(flatten)]
    base: BaseArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Collects, or says what it would.
pub(crate) fn gc(args: &GcArgs) -> Result<()> {
    if args.resident { resident::collect(args) } else { disk::collect(args) }
}

impl GcArgs {
    fn policy(&self) -> Policy {
        Policy { bytes_max: self.max_bytes.map(|size| size.0), ttl: self.ttl }
    }

    fn root(&self) -> RootArgs {
        RootArgs { cache_root: self.cache_root.clone(), base: self.base.clone() }
    }
}

/// What becomes of something that takes room.
#[derive(Debug)]
enum Fate {
    /// Nothing is decided: it stays, unless it becomes a victim.
    Open,
    /// It may not go.
    Kept(String),
    /// It went, or would.
    Gone(String),
}

impl Fate {
    /// What `--json` says is done with it, where `going` is the word for what goes; and why.
    fn told<'a>(&'a self, going: &'static str) -> (&'static str, Option<&'a str>) {
        match self {
            Fate::Open => ("keep", None),
            Fate::Kept(reason) => ("keep", Some(reason)),
            Fate::Gone(reason) => (going, Some(reason)),
        }
    }

    /// Why it goes, in words.
    fn gone(why: Why, all: &str) -> Fate {
        Fate::Gone(match why {
            Why::Idle => "not used for --ttl".to_owned(),
            Why::Room => format!("the {all} take more than --max-bytes"),
        })
    }
}

/// What is shown of each thing, without rows yet.
fn table() -> Table {
    Table::new(&[
        ("NAME", Align::Left),
        ("SIZE", Align::Right),
        ("IDLE", Align::Right),
        ("WHAT", Align::Left),
        ("WHY", Align::Left),
    ])
}

/// The last word, where nobody reads JSON.
fn say_what_is_left_to_do(args: &GcArgs, has_work: bool) {
    match (has_work, args.apply) {
        (false, _) => output::note("there is nothing to collect"),
        (true, false) => output::note("nothing was done: --apply does it"),
        (true, true) => {}
    }
}

/// Says that what stays takes more than was asked for.
fn say_what_is_over(args: &GcArgs, after: u64) {
    if let Some(most) = args.max_bytes.filter(|most| after > most.0) {
        let after = ByteSize(after);
        output::note(&format!("what stays takes {after}, more than {most}: it is in use, or out of reach"));
    }
}
