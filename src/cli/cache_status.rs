//! `cache-status`: is the newest generation what the source holds?

use std::path::{Path, PathBuf};

use clap::Args;

use super::args::CopyArgs;
use super::json;
use super::output;
use super::root::{self, Root};
use crate::disk::{self, Generation};
use crate::error::{Error, Kind, Result, shown};
use crate::failure::Failure;
use crate::hub::{self, ModelDir};
use crate::manifest::SelectionRules;
use crate::registry::Name;
use crate::source::{self, Selection};
use crate::units::ByteSize;

/// Differences that are shown; the rest is counted.
const CHANGES_SHOWN_MAX: usize = 20;

const HELP_AFTER: &str = "\
Compares names, sizes, times and inodes with those that the copy was made from, and names, sizes and times of the copy \
with its manifest; no file is read ('iloader verify' does). Exit codes: 0 fresh, 9 stale, damaged or of another \
source, 3 there is no generation of that name, 1 the source cannot be reached: the generation is shown all the same.

Example:
  iloader cache-status /mnt/nfs/Qwen3-8B || iloader cache /mnt/nfs/Qwen3-8B";

/// Tell whether the copy of a model on local disk is fresh, and what has changed
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct CacheStatusArgs {
    /// The model's directory
    #[arg(value_name = "MODEL_DIR")]
    model_dir: PathBuf,
    #[command(flatten)]
    copy: CopyArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What the newest generation of the name is, seen from the source.
enum State {
    Fresh,
    Stale(Vec<String>),
    /// There is none, or none that can be used, because of this.
    Missing(Option<Error>),
    /// The source cannot be looked at.
    Unreachable(Error),
}

/// Prints it. The exit code is the state's.
pub(crate) fn cache_status(args: &CacheStatusArgs) -> Result<u8> {
    let root = Root::find(&args.copy.root)?;
    let source = Source::look(&args.model_dir, &args.copy.files.rules())?;
    let name = root::name_of(args.copy.name.as_ref(), &source.model);
    let store = root.open()?;
    let generation = store.as_ref().map(|store| store.newest(&name)).transpose()?.flatten();
    let damaged = match (&store, &generation) {
        (Some(store), None) => store.damaged(&name)?.map(|one| one.error),
        _ => None,
    };
    let state = match (&generation, source.selection) {
        (None, Ok(_)) => State::Missing(damaged),
        // Nothing is known of either.
        (None, Err(error)) => return Err(error),
        (Some(_), Err(error)) => State::Unreachable(error),
        (Some(generation), Ok(selection)) => {
            match disk::build::differences(generation, &selection, CHANGES_SHOWN_MAX) {
                changes if changes.is_empty() => State::of_copy(generation),
                changes => State::Stale(changes),
            }
        }
    };
    print(args, &name, &source.model, generation.as_ref(), &state)?;
    match state {
        State::Unreachable(error) => {
            // 3 would say that there is no generation.
            let error = error.with_kind(Kind::Failed).context("the source cannot be reached");
            Err(match &generation {
                Some(generation) => error.hint(format!(
                    "the generation can be used without it: iloader run --cache-path {} -- COMMAND",
                    shown(generation.path())
                )),
                None => error,
            })
        }
        State::Missing(Some(error)) => {
            let none = format!("there is no generation of '{name}' that can be used");
            Err(error.with_kind(Kind::NotFound).context(none))
        }
        state => Ok(state.exit_code()),
    }
}

/// The source as far as it can be looked at.
struct Source {
    model: ModelDir,
    selection: Result<Selection>,
}

impl Source {
    fn look(argument: &Path, rules: &SelectionRules) -> Result<Source> {
        match hub::resolve(argument) {
            Ok(model) => {
                let selection = match source::select(&model.root, rules) {
                    // It is not the source that is wrong.
                    Err(error) if error.kind() == Kind::Usage => return Err(error),
                    selection => selection,
                };
                Ok(Source { model, selection })
            }
            Err(error) if error.kind() == Kind::Usage => Err(error),
            Err(error) => Ok(Source { model: as_it_was_named(argument), selection: Err(error) }),
        }
    }
}

/// A model directory that cannot be looked at, by what was typed.
fn as_it_was_named(argument: &Path) -> ModelDir {
    ModelDir { root: argument.to_owned(), label: hub::label_of_absent(argument) }
}

impl State {
    /// Of a generation that was made from what the source holds: 'cache' takes it only where its files are there.
    fn of_copy(generation: &Generation) -> State {
        match generation.selection(&[]) {
            Ok(_) => State::Fresh,
            Err(error) => State::Stale(vec![error.message().to_owned()]),
        }
    }

    fn word(&self) -> &'static str {
        match self {
            State::Fresh => "fresh",
            State::Stale(_) => "stale",
            State::Missing(_) => "missing",
            State::Unreachable(_) => "unknown",
        }
    }

    fn exit_code(&self) -> u8 {
        match self {
            State::Fresh => 0,
            State::Stale(_) => Kind::Stale.exit_code(),
            State::Missing(_) => Kind::NotFound.exit_code(),
            State::Unreachable(_) => Kind::Failed.exit_code(),
        }
    }
}

fn print(
    args: &CacheStatusArgs,
    name: &Name,
    model: &ModelDir,
    generation: Option<&Generation>,
    state: &State,
) -> Result<()> {
    let changes: &[String] = if let State::Stale(changes) = state { changes } else { &[] };
    if args.json {
        let error = match state {
            State::Unreachable(error) | State::Missing(Some(error)) => Some(Failure::from(error)),
            _ => None,
        };
        return output::print_json(&json::CacheStatusAnswer {
            name: name.as_str(),
            state: state.word(),
            source: &model.root.to_string_lossy(),
            generation: generation.map(json::Generation::of).transpose()?,
            source_changes: changes,
            error,
        });
    }
    let mut rows = vec![("name", name.to_string()), ("state", state.word().to_owned())];
    rows.extend(changes.iter().map(|change| ("change", change.clone())));
    if let Some(generation) = generation {
        let manifest = generation.manifest();
        let files = manifest.files.len();
        rows.push(("generation", shown(generation.path())));
        rows.push(("source", shown(&manifest.source)));
        rows.push(("size", format!("{} in {files} files", ByteSize(manifest.bytes))));
        rows.push(("created", manifest.created.clone()));
        rows.push(("last used", format!("{} ago", output::seconds(generation.idle().as_secs_f64()))));
    }
    output::print(&output::fields(&rows))
}
