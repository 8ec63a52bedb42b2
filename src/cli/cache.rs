//! `cache`: a verified copy of a model on local disk, built or found there.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::args::{self, CopyArgs};
use super::json;
use super::output;
use super::root::{self, Root};
use super::watch::{self, Work};
use crate::budget::limits;
use crate::disk::{self, Built, Store};
use crate::engine::{self, Selected};
use crate::error::{Kind, Result, shown};
use crate::hub;
use crate::load::WORKERS_MAX;
use crate::source;
use crate::sys::signals;
use crate::units::ByteSize;

/// `--cache-workers` where it is not given.
pub(crate) const CACHE_WORKERS: u32 = 4;

/// Descriptors beside those of the workers.
const DESCRIPTORS_OWN: u64 = 256;

const HELP_AFTER: &str = "\
MODEL_DIR is a directory, or the name of a model in a local hub cache (org/name). The path of the generation is \
printed alone on stdout; it means the same bytes for ever. Where the newest generation of the name is what MODEL_DIR \
holds, nothing is copied. What is copied is hashed on the way, and SHA256SUMS lists the digests. Files that an older \
generation has are linked, after they were read and found whole. Exit codes: 0 done, 2 wrong usage, 3 there is no such \
directory, 6 the disk is full, 7 a file is not what its hub says, 8 the source changed, 9 the name belongs to another \
source, 130 cancelled: the files that were finished are kept for the next time.

Example:
  GENERATION=$(iloader cache /mnt/nfs/Qwen3-8B --cache-root /nvme/models)
  iloader run --cache-path \"$GENERATION\" -- vllm serve '{model}'";

/// Copy a model to local disk, verified, or find the copy there, and print its path
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct CacheArgs {
    /// The model's directory; never written to
    #[arg(value_name = "MODEL_DIR")]
    model_dir: PathBuf,
    #[command(flatten)]
    copy: CopyArgs,
    /// Copy every file anew, whatever older generations have
    #[arg(long)]
    refresh: bool,
    /// Files that are copied at the same time
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = CACHE_WORKERS, value_parser = args::number(1..=WORKERS_MAX as u32))]
    cache_workers: u32,
    /// Bytes that a worker takes at a time, a plain number; rounded up to 2 MiB inside
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true, default_value_t = args::CHUNK_BYTES, value_parser = args::plain_bytes)]
    chunk_size: u64,
    /// What reads and writes; auto takes io-uring where the kernel permits it
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = PossibleValuesParser::new(engine::Choice::NAMES))]
    engine: String,
    /// Show no progress
    #[arg(long)]
    quiet: bool,
    /// Print JSON in place of the path
    #[arg(long)]
    json: bool,
}

/// Builds the generation or finds it, and prints its path.
pub(crate) fn cache(args: &CacheArgs) -> Result<()> {
    // Where the limit on file sizes is small, a failed write with a message is wanted, and not the end.
    signals::ignore(libc::SIGXFSZ);
    limits::raise_descriptors(DESCRIPTORS_OWN)?;
    let model = hub::resolve(&args.model_dir)?;
    let name = root::name_of(args.copy.name.as_ref(), &model);
    let selection = source::select(&model.root, &args.copy.files.rules())?;
    let engine = Selected::probe(engine::Choice::from_name(&args.engine)?, None)?;
    let store = Root::make(&args.copy.root, &model.root)?;
    selection.warnings.iter().for_each(|warning| output::warn(warning));
    let request = disk::Request {
        name: &name,
        selection: &selection,
        refresh: args.refresh,
        workers: args.cache_workers as usize,
        chunk_bytes: args.chunk_size,
        engine,
    };
    let built = build(&store, &request, args.quiet)?;
    if !args.quiet {
        say_what_was_done(&built);
    }
    if args.json {
        return output::print_json(&json::CacheAnswer::of(&built)?);
    }
    output::hand_over_path(built.generation.path())
        .map_err(|error| error.hint("the generation is there: iloader cache-list shows it"))
}

/// Builds with progress on stderr, and Ctrl-C that ends it.
pub(super) fn build(store: &Store, request: &disk::Request<'_>, quiet: bool) -> Result<Built> {
    let work = Work { doing: "caching", name: request.name.as_str(), quiet };
    let mut finished = 0;
    let outcome = watch::copying(&work, |watcher| {
        let outcome = disk::build(store, request, watcher);
        finished = watcher.finished_files();
        outcome
    });
    let built = outcome.map_err(|error| match error.kind() {
        Kind::Cancelled if finished > 0 => {
            let root = shown(store.root());
            error.hint(format!(
                "files that were finished are kept for the next time; to drop them: iloader gc --cache-root {root} \
                 --apply"
            ))
        }
        _ => error,
    })?;
    built.notes.iter().for_each(|note| output::note(note));
    Ok(built)
}

/// What a person would else wonder about: why it was so quick.
fn say_what_was_done(built: &Built) {
    let parts: Vec<String> = [
        (built.copied_bytes, "copied"),
        (built.cloned_bytes, "shared with the source"),
        (built.reused_bytes, "taken over and checked"),
    ]
    .into_iter()
    .filter(|(bytes, _)| *bytes > 0)
    .map(|(bytes, how)| format!("{} {how}", ByteSize(bytes)))
    .collect();
    if built.was_fresh || built.cloned_bytes.saturating_add(built.reused_bytes) > 0 {
        let how =
            if built.was_fresh { "it is fresh, nothing was copied".to_owned() } else { parts.join(", ") };
        output::note(&format!("{}@{}: {how}", built.generation.name().as_str(), built.generation.number()));
    }
}
