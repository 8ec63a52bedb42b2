//! What a `start` is to bring about: everything that was typed, resolved and looked at.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::super::output;
use super::local::{LocalCache, StandIn};
use super::options::StartArgs;
use super::places::Places;
use crate::budget::limits;
use crate::control::client::Client;
use crate::daemon::config::{Config, Limits, Tuning};
use crate::daemon::origin::{self, Origin};
use crate::daemon::preload::DESCRIPTORS_OWN;
use crate::error::{Error, Kind, Result, shown};
use crate::hub;
use crate::load::{Placement, placement};
use crate::manifest::SelectionRules;
use crate::registry::{BaseDir, Environment, Paths};
use crate::source::{self, Selection};
use crate::units::ByteSize;

/// How long a daemon may take for an answer that it has at hand.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A cache as it is asked for.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) base: BaseDir,
    pub(super) paths: Paths,
    /// The files of the source.
    pub(super) selection: Selection,
    pub(super) local: Option<LocalCache>,
    /// The generation to load from, leased, as soon as there is one: see [`Wanted::prepare`].
    origin: Option<Origin>,
    pub(super) placement: Placement,
    pub(super) config: Config,
}

impl Wanted {
    /// Finds the model, prepares BASE, looks through the source once, and checks what can be checked before
    /// anything is started.
    pub(super) fn resolve(args: &StartArgs) -> Result<Wanted> {
        // Where there are too few, each thing below would fail in a way of its own.
        limits::raise_descriptors(DESCRIPTORS_OWN)
            .and_then(|()| limits::check_memory(0, 0))
            .map_err(|error| error.context(format_args!("cannot start '{}'", args.name)))?;
        let environment = Environment::of_process();
        let placement = Placement::from_name(args.tuning.numa.as_deref(), &placement::nodes())?;
        let model = hub::resolve(&args.model_dir);
        // Nothing is made, BASE included, before it is known that none of it falls into the source.
        let found = match (&model, args.local.local_cache) {
            (Err(error), false) => return Err(error.clone()),
            _ => BaseDir::find(args.base.base_dir.as_deref(), &environment)?,
        };
        let local = LocalCache::of(args, &found)?;
        // The daemon is told where the generation is: better now than when it was copied.
        local.as_ref().map_or(Ok(()), |local| text(local.root(), "--cache-root").map(drop))?;
        let (model, origin) = match (model, &local) {
            (Ok(model), _) => (model, None),
            (Err(error), Some(local)) => local.stand_in(args, None, error).map(StandIn::apart)?,
            (Err(error), None) => return Err(error),
        };
        local.as_ref().map_or(Ok(()), |local| local.check(&model.root))?;
        Places::of(args, &environment, &found)?.check(args, &found, &model.root)?;
        let base = BaseDir::prepare(args.base.base_dir.as_deref(), &environment)?;
        if let Some(reason) = base.fallback_reason() {
            output::note(&format!("using {} for caches: {reason}", shown(base.path())));
        }
        // It is another one where the default can't be created after all.
        let places = Places::of(args, &environment, &base)?;
        places.check(args, &base, &model.root)?;
        let Places { socket, pid_file, log_file, view } = places;
        // It is another one where BASE is.
        let local = LocalCache::of(args, &base)?;
        local.as_ref().map_or(Ok(()), |local| local.check(&model.root))?;
        let (selection, origin) = match origin {
            Some(origin) => (origin.source.clone(), Some(origin)),
            None => select(args, &model.root, local.as_ref())?,
        };
        for warning in &selection.warnings {
            output::warn(warning);
        }
        let config = Config {
            name: args.name.to_string(),
            base: text(base.path(), "the runtime directory")?,
            socket: text(&socket, "--socket")?,
            pid_file: text(&pid_file, "--pid-file")?,
            log_file: self::log_file(args, &log_file)?,
            view: text(&view, "--view")?,
            kept_dirname: args.keep_dirname.then_some(model.label),
            source: text(&selection.root, "the model directory")?,
            generation: None,
            verify: args.tuning.verify,
            rules: selection.rules.clone(),
            tuning: tuning(args),
            limits: limits_of(args),
            idle_ttl_seconds: args.life.idle_ttl.map(|ttl| ttl.as_secs_f64()),
            loads_unattended: args.no_wait || args.foreground,
            selection: source::identity::digest(&selection),
            identity: String::new(),
            settings: BTreeMap::new(),
        };
        let paths = base.paths(&args.name);
        let config = identified(config, &selection, local.as_ref());
        let mut wanted = Wanted { base, paths, config, selection, local, origin: None, placement };
        origin.map_or(Ok(()), |origin| wanted.load_from(origin))?;
        Ok(wanted)
    }

    /// Whether a generation has to be built or found first.
    pub(super) fn is_unprepared(&self) -> bool {
        self.local.is_some() && self.origin.is_none()
    }

    /// Builds the generation, or finds it.
    pub(super) fn prepare(&mut self) -> Result<()> {
        let Some(local) = &self.local else { return Ok(()) };
        let origin = local.prepare(&self.config, &self.selection)?;
        self.load_from(origin)
    }

    fn load_from(&mut self, origin: Origin) -> Result<()> {
        self.config.generation = origin.generation().map(|path| text(path, "--cache-root")).transpose()?;
        // As the generation notes the source, which may be coarser. The identity stays that of what was asked for.
        self.config.selection = source::identity::digest(&origin.source);
        self.origin = Some(origin);
        Ok(())
    }

    /// Lets go of the generation, which the daemon holds now, or is about to.
    pub(super) fn release(&mut self) {
        self.origin = None;
    }

    /// What a load would read.
    pub(super) fn to_load(&self) -> &Selection {
        self.origin.as_ref().map_or(&self.selection, Origin::files)
    }

    /// Files that `--verify` has something to compare with, and how many there are in memory.
    pub(super) fn verifiable(&self) -> (usize, usize) {
        let in_memory = self.selection.files.iter().filter(|file| !file.passthrough).count();
        match &self.origin {
            Some(_) => (in_memory, in_memory),
            None => (origin::of_hub(&self.selection).iter().flatten().count(), in_memory),
        }
    }

    /// Connects to a daemon of this cache.
    pub(super) fn connect(&self, socket: &Path) -> Result<Client> {
        Client::connect(socket, ANSWER_TIMEOUT)
    }
}

/// Looks through the source. Where that fails, a generation may stand in.
fn select(args: &StartArgs, root: &Path, local: Option<&LocalCache>) -> Result<(Selection, Option<Origin>)> {
    match (source::select(root, &args.selection.rules()), local) {
        (Ok(selection), _) => Ok((selection, None)),
        (Err(error), None) => Err(error),
        (Err(error), Some(local)) => {
            let origin = local.stand_in(args, Some(root), error)?.origin;
            Ok((origin.source.clone(), Some(origin)))
        }
    }
}

fn text(path: &Path, what: &str) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Error::new(Kind::Usage, format!("{what} {} is not UTF-8", shown(path)))
            .hint("choose a path of ordinary characters")
    })
}

/// A daemon in the foreground writes to its standard error, which has a path, too.
fn log_file(args: &StartArgs, path: &Path) -> Result<String> {
    if args.foreground && args.log_file.is_none() {
        return Ok(format!("/proc/{}/fd/2", std::process::id()));
    }
    text(path, "--log-file")
}

fn tuning(args: &StartArgs) -> Tuning {
    let given = &args.tuning;
    Tuning {
        workers: given.workers,
        chunk_bytes: given.chunk_size,
        engine: given.engine.clone(),
        queue_depth: given.queue_depth,
        read_bytes: given.read_size.map(|size| size.0),
        direct: given.direct.clone(),
        bytes_per_second: given.limit_rate.map(|size| size.0),
        background: given.background,
        numa: given.numa.clone(),
        backing: given.backing.clone(),
        lock_memory: args.limits.mlock,
    }
}

fn limits_of(args: &StartArgs) -> Limits {
    let given = &args.limits;
    Limits {
        memory_fraction: given.max_memory_fraction,
        memory_bytes_max: given.max_memory_bytes.map(|size| size.0),
        reserve_bytes: given.reserve_bytes.map_or(super::super::args::RESERVE_BYTES, |size| size.0),
        resident_bytes_max: given.max_resident_bytes.map(|size| size.0),
        force: given.force,
    }
}

/// Adds what makes the cache what it is: the settings by name, and the digest over them and the selection.
fn identified(mut config: Config, selection: &Selection, local: Option<&LocalCache>) -> Config {
    config.settings = settings(&config, selection, local);
    let mut hash = Sha256::new();
    let mut text = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    text("iloader cache 1");
    text(&config.selection);
    for (name, value) in &config.settings {
        text(name);
        text(value);
    }
    config.identity = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    config
}

fn settings(config: &Config, selection: &Selection, local: Option<&LocalCache>) -> BTreeMap<String, String> {
    let SelectionRules { patterns, exclude, also_exclude, passthrough } = &config.rules;
    let globs = |globs: &[String]| match globs {
        [] => "none".to_owned(),
        globs => globs.iter().map(shown).collect::<Vec<_>>().join(" "),
    };
    let files = format!("{} ({})", selection.files.len(), ByteSize(selection.bytes()));
    let ttl = config.idle_ttl_seconds.map_or("off".to_owned(), |seconds| format!("{seconds} s"));
    let cap = config.limits.memory_bytes_max.map_or("none".to_owned(), |bytes| bytes.to_string());
    [
        ("source", shown(&config.source)),
        ("files", files),
        ("--pattern", globs(patterns)),
        ("--exclude", exclude.as_deref().map_or("the built-in list".to_owned(), globs)),
        ("--also-exclude", globs(also_exclude)),
        ("--passthrough", globs(passthrough)),
        ("view", shown(config.model_dir())),
        ("--local-cache", local.map_or("off".to_owned(), LocalCache::setting)),
        ("--verify", if config.verify { "on" } else { "off" }.to_owned()),
        ("--backing", config.tuning.backing.clone()),
        ("--max-memory-bytes", cap),
        ("--mlock", if config.tuning.lock_memory { "on" } else { "off" }.to_owned()),
        ("--idle-ttl", ttl),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        start: StartArgs,
    }

    fn wanted(model: &Path, base: &Path, more: &[&str]) -> Result<Wanted> {
        let mut line = vec!["start", model.to_str().expect("UTF-8"), "--name", "n", "--base-dir"];
        line.push(base.to_str().expect("UTF-8"));
        line.extend(more);
        Wanted::resolve(&Line::try_parse_from(line).expect("parses").start)
    }

    #[test]
    fn the_identity_is_the_settings_that_count() {
        let home = tempfile::tempdir().expect("a directory");
        let (model, base) = (home.path().join("m"), home.path().join("b"));
        std::fs::create_dir(&model).expect("made");
        for file in ["config.json", "a.safetensors"] {
            std::fs::write(model.join(file), "{}").expect("written");
        }
        let identity = |more: &[&str]| wanted(&model, &base, more).expect("resolves").config.identity;
        let plain = identity(&[]);
        for same in [
            &["--workers", "4"][..],
            &["--chunk-size", "1"],
            &["--engine", "threads"],
            &["--force", "--quiet", "--wait-timeout", "1"],
            &["--no-wait"],
            &["--socket", "/elsewhere/socket"],
            &["--max-memory-fraction", "0.5", "--reserve-bytes", "0"],
            &["--max-resident-bytes", "1GiB"],
        ] {
            assert_eq!(identity(same), plain, "{same:?}");
        }
        let (view, root) = (home.path().join("v"), home.path().join("r"));
        let others = [
            &["--pattern", "*.json"][..],
            &["--exclude", "x"],
            &["--also-exclude", "x"],
            &["--passthrough", "*.json"],
            &["--view", view.to_str().expect("UTF-8")],
            &["--keep-dirname"],
            &["--backing", "memfd"],
            &["--max-memory-bytes", "1GiB"],
            &["--idle-ttl", "5"],
            &["--verify"],
            &["--local-cache"],
            &["--local-cache", "--cache-name", "m"],
            &["--local-cache", "--cache-root", root.to_str().expect("UTF-8")],
        ];
        let mut seen = vec![plain.clone()];
        for other in others {
            let identity = identity(other);
            assert!(!seen.contains(&identity), "{other:?}");
            seen.push(identity);
        }
        std::fs::write(model.join("config.json"), "{ }").expect("written");
        assert!(!seen.contains(&identity(&[])), "a file that changed");
    }

    #[test]
    fn what_cannot_be_is_refused_before_anything_starts() {
        let home = tempfile::tempdir().expect("a directory");
        let (model, base) = (home.path().join("m"), home.path().join("b"));
        std::fs::create_dir(&model).expect("made");
        std::fs::write(model.join("config.json"), "{}").expect("written");
        let kind = |more: &[&str]| wanted(&model, &base, more).expect_err("refused").kind();
        let inside = model.join("inside");
        for option in ["--view", "--socket", "--pid-file", "--log-file"] {
            assert_eq!(kind(&[option, inside.to_str().expect("UTF-8")]), Kind::Usage, "{option}");
        }
        for base in [&model, &inside] {
            assert_eq!(wanted(&model, base, &[]).expect_err("refused").kind(), Kind::Usage);
        }
        assert_eq!(kind(&["--view", home.path().to_str().expect("UTF-8")]), Kind::Usage);
        assert_eq!(kind(&["--socket", &format!("/{}", "s".repeat(107))]), Kind::Usage);
        assert_eq!(kind(&["--log-file", "~/log"]), Kind::Usage);
        let at = |place: &str| home.path().join(place).to_str().expect("UTF-8").to_owned();
        for option in ["--view", "--socket", "--pid-file", "--log-file"] {
            for file in ["run/o.pid", "run/n.json", "run/n.lock", "run/.x", "run/o/new", "run"] {
                assert_eq!(kind(&[option, &at(&format!("b/{file}"))]), Kind::Usage, "{option} {file}");
            }
        }
        for two in [["--pid-file", "--log-file"], ["--socket", "--view"], ["--log-file", "--view"]] {
            assert_eq!(kind(&[two[0], &at("x"), two[1], &at("./y/../x")]), Kind::Usage, "{two:?}");
        }
        assert_eq!(kind(&["--view", &at("v"), "--log-file", &at("v/log")]), Kind::Usage);
        assert!(!base.exists() && std::fs::read_dir(&model).expect("read").count() == 1, "nothing is made");
        for line in [
            "--workers 0",
            "--workers 100000",
            "--chunk-size 64MiB",
            "--chunk-size 0",
            "--max-memory-fraction nan",
            "--max-memory-fraction 0",
            "--max-memory-fraction 1.1",
            "--idle-ttl inf",
            "--wait-timeout -1",
            "--engine tokio",
            "--read-size 0",
            "--no-wait --foreground",
            "--cache-root /r",
            "--cache-name m",
            "--refresh-cache",
            "--cache-workers 2",
            "--local-cache --cache-workers 0",
            "--local-cache --cache-name a@1",
        ] {
            let words = ["start", "m", "--name", "n"].into_iter().chain(line.split(' '));
            assert!(Line::try_parse_from(words).is_err(), "{line}");
        }
        // A number below zero is a wrong value, and no option that nobody knows.
        let numbers = ["--wait-timeout", "--idle-ttl", "--workers", "--chunk-size", "--max-memory-fraction"];
        let sizes =
            ["--max-memory-bytes", "--reserve-bytes", "--max-resident-bytes", "--read-size", "--limit-rate"];
        for option in numbers.into_iter().chain(sizes) {
            let words = ["start", "m", "--name", "n", option, "-1"];
            let error = Line::try_parse_from(words).err().expect("refused").to_string();
            assert!(error.contains("'-1'") && error.contains(option), "{error}");
            assert!(!error.contains("-- -1"), "{error}");
        }
    }
}
