//! `--local-cache`: the generation that is loaded from, prepared in the foreground, or found where the source can't be
//! reached.

use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::super::cache;
use super::super::output;
use super::super::root::Root;
use super::options::{LocalCacheArgs, StartArgs};
use crate::daemon::config::Config;
use crate::daemon::origin::Origin;
use crate::disk::store::Unreadable;
use crate::disk::{self, Generation};
use crate::engine::{self, Selected};
use crate::error::{Error, Kind, Result, shown};
use crate::hub::{self, ModelDir};
use crate::manifest::SelectionRules;
use crate::registry::{BaseDir, Name};
use crate::source::Selection;
use crate::view;

/// Links followed from a model directory that can't be reached.
const LINKS_MAX: usize = 40;

/// Where the generation is to be, and how it is made.
#[derive(Debug)]
pub(super) struct LocalCache {
    root: Root,
    name: Name,
    refresh: bool,
    workers: usize,
    quiet: bool,
}

/// A generation in place of a source that can't be reached.
#[derive(Debug)]
pub(super) struct StandIn {
    pub(super) model: ModelDir,
    pub(super) origin: Origin,
}

impl StandIn {
    pub(super) fn apart(self) -> (ModelDir, Option<Origin>) {
        (self.model, Some(self.origin))
    }
}

impl LocalCache {
    /// What was asked for; `None`: nothing.
    pub(super) fn of(args: &StartArgs, base: &BaseDir) -> Result<Option<LocalCache>> {
        let LocalCacheArgs { local_cache, cache_root, cache_name, refresh_cache, cache_workers } =
            &args.local;
        if !local_cache {
            return Ok(None);
        }
        let root = Root::explicit(cache_root.as_deref())?.unwrap_or_else(|| Root::in_base(base));
        Ok(Some(LocalCache {
            root,
            name: cache_name.clone().unwrap_or_else(|| args.name.clone()),
            refresh: *refresh_cache,
            workers: *cache_workers as usize,
            quiet: args.quiet,
        }))
    }

    /// Refuses a root inside the source or around it. One that stands in for a source that is out of reach was apart
    /// from it when it was made.
    pub(super) fn check(&self, source: &Path) -> Result<()> {
        if std::fs::canonicalize(source).is_err() { Ok(()) } else { self.root.check(source) }
    }

    /// The directory of its generations.
    pub(super) fn root(&self) -> &Path {
        &self.root.path
    }

    /// Whether a generation is made although there is a fresh one.
    pub(super) fn is_refreshed(&self) -> bool {
        self.refresh
    }

    /// The setting that the identity has of it: the same before and after the root is made.
    pub(super) fn setting(&self) -> String {
        let root = view::resolve(&self.root.path, "--cache-root").unwrap_or_else(|_| self.root.path.clone());
        format!("{} in {}", self.name, shown(root))
    }

    /// The newest generation of the name where it is a copy of what `args` name, which can't be reached because of
    /// `cause`. It is said, on stderr.
    ///
    /// # Errors
    ///
    /// `cause` itself where there is none, or where it tells of a wrong command line.
    pub(super) fn stand_in(&self, args: &StartArgs, root: Option<&Path>, cause: Error) -> Result<StandIn> {
        let is_out_of_reach = matches!(cause.kind(), Kind::NotFound | Kind::Failed | Kind::TimedOut);
        // Who wants a new copy does not want the old one.
        if !is_out_of_reach || self.refresh {
            return Err(cause);
        }
        let rules = args.selection.rules();
        let Some(generation) = self.newest() else {
            if let Some(damaged) = self.damaged() {
                let why = damaged.error.message();
                output::warn(&format!("a generation can't stand in for the source: {why}"));
            }
            return Err(cause);
        };
        let source = PathBuf::from(&generation.manifest().source);
        let is_asked_for = root.map_or_else(|| is_meant(&args.model_dir, &source), |root| root == source);
        if !is_asked_for || unpassed(&generation.manifest().selection) != unpassed(&rules) {
            return Err(cause);
        }
        let origin = match Origin::of_generation(generation.path(), &source, &rules) {
            Ok(origin) => origin,
            Err(error) => {
                output::warn(&format!("a generation can't stand in for the source: {}", error.message()));
                return Err(cause);
            }
        };
        output::warn(&format!(
            "the source can't be reached ({}): '{}' is loaded from the generation {}, which is {} old{}",
            cause.message(),
            args.name,
            shown(generation.path()),
            age(&generation),
            other_revision(&args.model_dir, &source).unwrap_or_default()
        ));
        Ok(StandIn { model: ModelDir { label: label(&args.model_dir, &source), root: source }, origin })
    }

    /// One that can't be read does not stand in for anything.
    fn newest(&self) -> Option<Generation> {
        self.root.open().ok()??.newest(&self.name).ok()?
    }

    fn damaged(&self) -> Option<Unreadable> {
        self.root.open().ok()??.damaged(&self.name).ok()?
    }

    /// Builds the generation for what was selected, or finds it, with progress, and leases it.
    pub(super) fn prepare(&self, config: &Config, selection: &Selection) -> Result<Origin> {
        let source = Path::new(&config.source);
        let store = self.root.create(source)?;
        let request = disk::Request {
            name: &self.name,
            // A generation holds what is passed through as well: it stands for the source.
            selection,
            refresh: self.refresh,
            workers: self.workers,
            chunk_bytes: config.tuning.chunk_bytes,
            engine: Selected::probe(engine::Choice::from_name(&config.tuning.engine)?, None)?,
        };
        let built = cache::build(&store, &request, self.quiet)?;
        Origin::of_generation(built.generation.path(), source, &config.rules)
    }
}

/// The rules without what decides only how a file is published.
fn unpassed(rules: &SelectionRules) -> SelectionRules {
    SelectionRules { passthrough: Vec::new(), ..rules.clone() }
}

/// How long ago a generation was made.
fn age(generation: &Generation) -> String {
    let Ok(created) = generation.manifest().created.parse::<Timestamp>() else { return "?".to_owned() };
    output::seconds(Timestamp::now().duration_since(created).as_secs_f64().max(0.0))
}

/// Whether a model directory that can't be looked at is `source`, as far as its path tells: by itself, through links
/// that still can be read, or as the name of a model whose snapshot that is.
fn is_meant(argument: &Path, source: &Path) -> bool {
    if is_model_of_hub(argument, source) {
        return true;
    }
    let Ok(mut path) = std::path::absolute(argument) else { return false };
    for _ in 0..LINKS_MAX {
        let resolved = view::resolve(&path, "MODEL_DIR").unwrap_or_else(|_| path.clone());
        if resolved == source {
            return true;
        }
        let (Ok(target), Some(parent)) = (std::fs::read_link(&resolved), resolved.parent()) else {
            return false;
        };
        path = parent.join(target);
    }
    false
}

/// Whether `argument` is `org/name`, or that with the beginning of a commit, and `source` that model's snapshot.
fn is_model_of_hub(argument: &Path, source: &Path) -> bool {
    let parts = || Some((argument.to_str()?, hub::snapshot_label(source)?, source.file_name()?.to_str()?));
    let Some((argument, label, commit)) = parts() else { return false };
    let (model, revision) = argument.split_once('@').unwrap_or((argument, ""));
    model.replacen('/', "--", 1) == label && commit.starts_with(revision)
}

/// What is said where the name of a model means another revision by now than the one that `source` is.
fn other_revision(argument: &Path, source: &Path) -> Option<String> {
    let argument = argument.to_str().filter(|_| is_model_of_hub(argument, source))?;
    let revision = argument.split_once('@').map_or("main", |(_, revision)| revision);
    let (have, folder) = (source.file_name()?.to_str()?, source.parent()?.parent()?);
    let wanted = std::fs::read_to_string(folder.join("refs").join(revision)).ok()?;
    let wanted = wanted.trim();
    (wanted != have).then(|| {
        format!(
            " and of another revision than the one asked for: it is {have}, '{revision}' is {}",
            shown(wanted)
        )
    })
}

/// What the directory is called, as if it could be looked at: see [`ModelDir::label`].
fn label(argument: &Path, source: &Path) -> String {
    let own = source.file_name();
    let given =
        argument.file_name().filter(|given| Some(*given) != own && !is_model_of_hub(argument, source));
    let text = |name: &std::ffi::OsStr| name.to_string_lossy().into_owned();
    let by_itself = || hub::snapshot_label(source).map(str::to_owned).or_else(|| own.map(text));
    given.map(text).or_else(by_itself).unwrap_or_else(|| "model".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_source_that_is_gone_is_known_by_its_path() {
        let home = tempfile::tempdir().expect("a directory");
        let home = home.path().canonicalize().expect("resolved");
        std::fs::create_dir(home.join("real")).expect("made");
        symlink("real", home.join("link")).expect("made");
        symlink("real/model", home.join("alias")).expect("made");
        let source = home.join("real/model");
        for (path, name) in [("real/model", "model"), ("link/model", "model"), ("alias", "alias")] {
            assert!(is_meant(&home.join(path), &source), "{path}");
            assert_eq!(label(&home.join(path), &source), name);
        }
        for path in ["real/model2", "real", "link"] {
            assert!(!is_meant(&home.join(path), &source), "{path}");
        }
    }

    #[test]
    fn another_revision_than_the_one_asked_for_is_told() {
        let hub = tempfile::tempdir().expect("a directory");
        let folder = hub.path().join("models--org--m");
        let source = folder.join("snapshots/aaaa");
        let said = || other_revision(Path::new("org/m"), &source);
        assert_eq!(said(), None, "nothing is known");
        std::fs::create_dir_all(folder.join("refs")).expect("made");
        std::fs::write(folder.join("refs/main"), "aaaa").expect("written");
        assert_eq!(said(), None);
        std::fs::write(folder.join("refs/main"), "bbbb").expect("written");
        assert!(said().expect("said").contains("it is aaaa, 'main' is bbbb"));
        assert_eq!(other_revision(Path::new("org/m@aaaa"), &source), None);
    }

    #[test]
    fn a_model_of_a_hub_cache_that_is_gone_is_known_by_its_name() {
        let source = Path::new("/hub/models--Qwen--Qwen3-8B/snapshots/aaaa0000");
        for name in ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B@aaaa"] {
            assert!(is_meant(Path::new(name), source), "{name}");
            assert_eq!(label(Path::new(name), source), "Qwen--Qwen3-8B");
        }
        for name in ["Qwen/Qwen3", "Qwen/Qwen3-8B@bbbb", "Qwen/Qwen3-8B@main", "Qwen3-8B"] {
            assert!(!is_meant(Path::new(name), source), "{name}");
        }
        assert_eq!(label(source, source), "Qwen--Qwen3-8B");
    }
}
