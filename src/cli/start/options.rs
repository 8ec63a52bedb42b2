//! The command line of `start`, as typed.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::super::args::{self, BaseArgs, SelectionArgs};
use super::super::cache::CACHE_WORKERS;
use crate::engine::{self, DEPTH_MAX};
use crate::load::{RATE_MIN, READ_BYTES_DEFAULT, READ_BYTES_MAX, WORKERS_MAX};
use crate::memory;
use crate::registry::Name;
use crate::source::Direct;
use crate::units::ByteSize;

const HELP_AFTER: &str = "\
MODEL_DIR is a directory, or the name of a model in a local hub cache (org/name). Sizes (SIZE) are bytes or \
carry a binary suffix: 512MiB, 32GiB. The path of the view is printed alone on stdout when the model is ready. \
Starting again what runs already prints the path at once; other settings under the same name are refused, unless \
--replace is given. With --local-cache the copy is made in the foreground, before anything is started, and one that is \
there serves while MODEL_DIR can't be reached. Exit code 7: a file is not what --verify knows of it.

Example:
  VIEW=$(iloader start /models/Qwen3-8B --name qwen --max-memory-bytes 32GiB)
  vllm serve \"$VIEW\"
  iloader start /models/Qwen3-8B-2 --name qwen --replace
  iloader start /mnt/nfs/Qwen3-8B --name qwen --local-cache --cache-root /nvme/models --verify";

/// Load a model into memory, keep it there, and print the path of its view
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct StartArgs {
    /// The model's directory; never written to
    #[arg(value_name = "MODEL_DIR")]
    pub(super) model_dir: PathBuf,
    /// The name to give to the cache: letters, digits, '.', '_', '-'
    #[arg(long, value_name = "NAME", value_parser = args::name())]
    pub(super) name: Name,
    /// Where to publish the model [default: BASE/views/NAME]
    #[arg(long, value_name = "PATH")]
    pub(super) view: Option<PathBuf>,
    /// Publish under one more level, the source directory's name: some engines choose templates by it
    #[arg(long)]
    pub(super) keep_dirname: bool,
    #[command(flatten)]
    pub(super) base: BaseArgs,
    /// The control socket, at most 107 bytes [default: BASE/run/NAME.sock]
    #[arg(long, value_name = "PATH")]
    pub(super) socket: Option<PathBuf>,
    /// The pid file [default: BASE/run/NAME.pid]
    #[arg(long, value_name = "PATH")]
    pub(super) pid_file: Option<PathBuf>,
    /// The daemon's log [default: BASE/logs/NAME.log; with --foreground: stderr]
    #[arg(long, value_name = "PATH")]
    pub(super) log_file: Option<PathBuf>,
    #[command(flatten)]
    pub(super) selection: SelectionArgs,
    #[command(flatten)]
    pub(super) tuning: TuningArgs,
    #[command(flatten)]
    pub(super) local: LocalCacheArgs,
    #[command(flatten)]
    pub(super) limits: LimitArgs,
    #[command(flatten)]
    pub(super) life: LifeArgs,
    /// How many seconds to wait until the model is ready
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value = "600", value_parser = args::seconds,
          help_heading = "Waiting")]
    pub(super) wait_timeout: Duration,
    /// Return once the daemon is registered, and print the path that the view will have
    #[arg(long, conflicts_with = "foreground", help_heading = "Waiting")]
    pub(super) no_wait: bool,
    /// Be the daemon, in the foreground, until the cache ends: for systemd and containers
    #[arg(long, help_heading = "Waiting")]
    pub(super) foreground: bool,
    /// Stop a cache of that name that has other settings, unless it is in use, and start this one
    #[arg(long)]
    pub(super) replace: bool,
    /// Show no progress
    #[arg(long, help_heading = "Waiting")]
    pub(super) quiet: bool,
}

/// How the bytes move, and what holds them.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Loading")]
pub(crate) struct TuningArgs {
    /// What holds the bytes; auto takes what gives readers huge pages
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = PossibleValuesParser::new(memory::Choice::NAMES))]
    pub(super) backing: String,
    /// Parallel preload workers
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = args::WORKERS as u32, value_parser = args::number(1..=WORKERS_MAX as u32))]
    pub(super) workers: u32,
    /// Bytes that a worker takes at a time, a plain number; rounded up to 2 MiB inside
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true, default_value_t = args::CHUNK_BYTES, value_parser = args::plain_bytes)]
    pub(super) chunk_size: u64,
    /// What reads the source; auto takes io-uring where the kernel permits it
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = PossibleValuesParser::new(engine::Choice::NAMES))]
    pub(super) engine: String,
    /// Reads in flight per worker [default: by the engine]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = args::number(1..=DEPTH_MAX as u32))]
    pub(super) queue_depth: Option<u32>,
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, help = read_size_help(), value_parser = read_size)]
    pub(super) read_size: Option<ByteSize>,
    /// Whether to bypass the page cache; auto reads from it what is there, the rest past it
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = PossibleValuesParser::new(Direct::NAMES))]
    pub(super) direct: String,
    /// Take at most so many bytes in a second, from storage and page cache alike [default: no limit]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = rate)]
    pub(super) limit_rate: Option<ByteSize>,
    /// Load behind everybody else: idle I/O priority, and the least CPU priority
    #[arg(long)]
    pub(super) background: bool,
    /// Place the pages on one NUMA node as long as it has room, or on all in turns [default: by the kernel]
    #[arg(long, value_name = "NODE|interleave", allow_negative_numbers = true, value_parser = numa)]
    pub(super) numa: Option<String>,
    /// Hash what is loaded, and refuse what is not as its generation or hub cache says; manifest shows the digests
    #[arg(long)]
    pub(super) verify: bool,
}

/// The copy on local disk that is loaded from.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Local disk")]
pub(crate) struct LocalCacheArgs {
    /// Copy the model to local disk first, or find the copy there, and load from it
    #[arg(long)]
    pub(super) local_cache: bool,
    /// The directory that holds the copies [default: BASE/model-cache]
    #[arg(long, value_name = "PATH", requires = "local_cache")]
    pub(super) cache_root: Option<PathBuf>,
    /// The name of the copies of this model [default: the cache's NAME]
    #[arg(long, value_name = "NAME", value_parser = args::name(), requires = "local_cache")]
    pub(super) cache_name: Option<Name>,
    /// Copy every file anew, whatever older copies have
    #[arg(long, requires = "local_cache")]
    pub(super) refresh_cache: bool,
    /// Files that are copied at the same time
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = CACHE_WORKERS, value_parser = args::number(1..=WORKERS_MAX as u32), requires = "local_cache")]
    pub(super) cache_workers: u32,
}

/// What the load may take.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Memory")]
pub(crate) struct LimitArgs {
    /// Share of the available memory that this start may take, above 0 and at most 1
    #[arg(long, value_name = "F", allow_negative_numbers = true, default_value_t = args::MEMORY_FRACTION, value_parser = fraction)]
    pub(super) max_memory_fraction: f64,
    /// Cap for this cache, buffers included [default: none]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(super) max_memory_bytes: Option<ByteSize>,
    /// Memory to leave for others [default: 256MiB]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(super) reserve_bytes: Option<ByteSize>,
    /// Quota for all caches whose sockets are in one directory, set when this start succeeds and kept; 0: none [default: as it is]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(super) max_resident_bytes: Option<ByteSize>,
    /// Skip the check of available memory; caps, quota and the watch while loading still hold
    #[arg(long)]
    pub(super) force: bool,
    /// Keep the cache from being swapped out; needs RLIMIT_MEMLOCK for all of it, or CAP_IPC_LOCK
    #[arg(long)]
    pub(super) mlock: bool,
}

/// How long the cache lives.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Life")]
pub(crate) struct LifeArgs {
    /// Evict the cache after so many seconds without a lease or another reader [default: never]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = args::seconds)]
    pub(super) idle_ttl: Option<Duration>,
}

fn read_size_help() -> String {
    format!(
        "Length of one read, at most {} [default: {}]",
        ByteSize(READ_BYTES_MAX),
        ByteSize(READ_BYTES_DEFAULT)
    )
}

fn read_size(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse()?;
    if (1..=READ_BYTES_MAX).contains(&size.0) {
        return Ok(size);
    }
    Err(format!("choose 1 byte to {}", ByteSize(READ_BYTES_MAX)))
}

fn rate(text: &str) -> Result<ByteSize, String> {
    let rate: ByteSize = text.parse()?;
    if rate.0 >= RATE_MIN { Ok(rate) } else { Err(format!("choose {} or more", ByteSize(RATE_MIN))) }
}

fn numa(text: &str) -> Result<String, String> {
    if text == "interleave" {
        return Ok(text.to_owned());
    }
    let node: u32 = text
        .parse()
        .map_err(|_| format!("'{}' is no node's number, nor 'interleave'", text.escape_debug()))?;
    Ok(node.to_string())
}

fn fraction(text: &str) -> Result<f64, String> {
    let wrong = || format!("'{}' is not a number above 0 and at most 1", text.escape_debug());
    let value: f64 = text.parse().map_err(|_| wrong())?;
    if value > 0.0 && value <= 1.0 { Ok(value) } else { Err(wrong()) }
}
