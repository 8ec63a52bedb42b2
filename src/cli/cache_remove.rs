//! `cache-remove`: remove a generation, or all of a name.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use clap::Args;

use super::args::RootArgs;
use super::output;
use super::root::Root;
use crate::disk::Store;
use crate::disk::store::Listing;
use crate::error::{Error, Kind, Result, shown};
use crate::registry::{Environment, Name};

const HELP_AFTER: &str = "\
NAME removes every generation of that name, and what interrupted copies of it left. NAME@N, as 'iloader cache-list' \
shows it, or a path, which has a '/', removes one generation. What is leased or read by any process stays: it is named, \
and the exit code is 5. The source stays as it is. Exit codes: 0 removed, 3 there is none, 5 it is in use.

Example:
  iloader cache-remove Qwen3-8B --cache-root /nvme/models
  iloader cache-remove /nvme/models/Qwen3-8B@3";

/// Remove copies of a model from local disk, unless they are in use
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct CacheRemoveArgs {
    /// A name, NAME@N, or the path of a generation
    #[arg(value_name = "NAME|GENERATION")]
    what: OsString,
    #[command(flatten)]
    root: RootArgs,
}

/// Removes what is named.
pub(crate) fn cache_remove(args: &CacheRemoveArgs) -> Result<()> {
    let wanted = Wanted::of(args)?;
    let store = match wanted.root.open()? {
        Some(store) => store,
        None => return Err(wanted.not_found(&Listing::default())),
    };
    let listing = store.list()?;
    let mut outcome = Outcome::default();
    for generation in listing.generations.iter().filter(|one| wanted.has(one.path())) {
        outcome.add(generation.path(), store.remove(generation));
    }
    for unreadable in listing.unreadable.iter().filter(|one| wanted.has(&one.path)) {
        outcome.add(&unreadable.path, store.remove_unreadable(unreadable));
    }
    if wanted.number.is_none() {
        remove_leftovers(&store, &listing, &wanted.name, &mut outcome);
    }
    match outcome {
        Outcome { failure: Some(error), .. } => Err(error),
        Outcome { removed: 0, .. } => Err(wanted.not_found(&listing)),
        _ => Ok(()),
    }
}

fn remove_leftovers(store: &Store, listing: &Listing, name: &Name, outcome: &mut Outcome) {
    for leftover in listing.leftovers.iter().filter(|leftover| leftover.name == *name) {
        let removed = match leftover.is_in_use {
            true => Err(Error::new(
                Kind::InUse,
                format!("{} is in use: another command works on '{name}'", shown(&leftover.path)),
            )
            .hint("wait until it has ended, or end it")),
            false => store.remove_leftover(leftover),
        };
        outcome.add(&leftover.path, removed);
    }
}

/// How it went: what fails does not keep the rest.
#[derive(Default)]
struct Outcome {
    removed: usize,
    failure: Option<Error>,
}

impl Outcome {
    fn add(&mut self, path: &Path, removed: Result<()>) {
        match removed {
            Ok(()) => {
                self.removed += 1;
                output::note(&format!("removed {}", shown(path)));
            }
            // Somebody else was quicker.
            Err(error) if error.kind() == Kind::NotFound => self.removed += 1,
            Err(error) => {
                if let Some(earlier) = self.failure.replace(error) {
                    output::error(&earlier);
                }
            }
        }
    }
}

/// What is to be removed.
struct Wanted {
    root: Root,
    name: Name,
    /// One generation; `None`: all of the name.
    number: Option<u64>,
}

impl Wanted {
    fn of(args: &CacheRemoveArgs) -> Result<Wanted> {
        let what = Path::new(&args.what);
        if !args.what.as_bytes().contains(&b'/') {
            let (name, number) = name_and_number(&args.what)?;
            return Ok(Wanted { root: Root::find(&args.root)?, name, number });
        }
        let path = Environment::of_process().absolute(what, "the generation")?;
        // A link is not the generation that it leads to: that one has a name of its own.
        if path.is_symlink() {
            let to = path.canonicalize().map_or_else(|_| "nothing".to_owned(), shown);
            return Err(Error::new(
                Kind::Usage,
                format!("{} is a link to {to}, and no generation", shown(what)),
            )
            .hint("name the generation itself; iloader cache-list shows them"));
        }
        let path = path.canonicalize().unwrap_or(path);
        let (Some(parent), Some(last)) = (path.parent(), path.file_name()) else {
            return Err(Error::new(Kind::Usage, format!("{} is no generation", shown(what)))
                .hint("iloader cache-list shows them"));
        };
        let (name, number) = name_and_number(last)?;
        Ok(Wanted { root: Root { path: parent.to_owned(), is_private: false }, name, number })
    }

    /// Whether it is to go.
    fn has(&self, path: &Path) -> bool {
        path.file_name().and_then(|last| name_and_number(last).ok()).is_some_and(|(name, number)| {
            name == self.name && (self.number.is_none() || self.number == number)
        })
    }

    fn not_found(&self, listing: &Listing) -> Error {
        let (root, name) = (shown(&self.root.path), &self.name);
        let message = match self.number {
            Some(number) => format!("there is no generation {name}@{number} in {root}"),
            None => format!("there are no generations of '{name}' in {root}"),
        };
        let error = Error::new(Kind::NotFound, message);
        let of_name = listing.generations.iter().filter(|one| one.name() == name);
        let mut there: Vec<String> = of_name.map(|one| format!("{name}@{}", one.number())).collect();
        if there.is_empty() {
            there = listing.generations.iter().map(|one| one.name().to_string()).collect();
            there.dedup();
        }
        if there.is_empty() {
            return error
                .hint("iloader cache-list shows what there is; --cache-root PATH names another directory");
        }
        error.hint(format!("there are: {}", there.join(", ")))
    }
}

/// `NAME` or `NAME@N`.
fn name_and_number(text: &OsStr) -> Result<(Name, Option<u64>)> {
    let wrong = || {
        Error::new(Kind::Usage, format!("{} is neither a NAME nor a generation NAME@N", shown(text)))
            .hint("iloader cache-list shows them")
    };
    let text = text.to_str().ok_or_else(wrong)?;
    match text.split_once('@') {
        None => Ok((text.parse()?, None)),
        Some((name, number)) => {
            let number = number.parse().map_err(|_| wrong())?;
            Ok((name.parse()?, Some(number)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_generations_are_told_apart() {
        let read =
            |text: &str| name_and_number(OsStr::new(text)).map(|(name, number)| (name.to_string(), number));
        assert_eq!(read("qwen").expect("a name"), ("qwen".to_owned(), None));
        assert_eq!(read("qwen@12").expect("a generation"), ("qwen".to_owned(), Some(12)));
        for wrong in ["", "@1", "qwen@", "qwen@x", "qwen@1@2", ".qwen@1.staging", "a b"] {
            assert_eq!(read(wrong).expect_err(wrong).kind(), Kind::Usage);
        }
    }
}
