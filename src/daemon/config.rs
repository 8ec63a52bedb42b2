//! What a `start` tells the daemon that it becomes or spawns.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::failure::Failure;
use crate::manifest::SelectionRules;
use crate::view;

/// What a `start` writes to the standard input of the daemon that it spawns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Orders {
    /// The number of the inherited descriptor that holds the name's lock.
    pub lock_descriptor: i32,
    /// Everything else.
    pub config: Config,
}

/// What a spawned daemon says to its starter: how its start went, and later why its load failed, if it did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Boot {
    /// It listens and is registered; the load begins.
    Registered {},
    /// It did not come so far, or the load failed; it has ended, or is about to.
    Failed(Failure),
}

/// Everything a daemon needs to know. It travels as JSON from `start` to the re-executed program, which
/// is the same binary, so it has no version. All paths are absolute and UTF-8.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// The cache's name.
    pub name: String,
    /// The runtime root.
    pub base: String,
    /// The control socket.
    pub socket: String,
    /// The pid file.
    pub pid_file: String,
    /// The log file.
    pub log_file: String,
    /// The published directory.
    pub view: String,
    /// `--keep-dirname`: publish under one more level of this name.
    pub kept_dirname: Option<String>,
    /// The source directory, resolved through links.
    pub source: String,
    /// The generation on disk to read from, absolute; `None`: the source itself.
    pub generation: Option<String>,
    /// Hash what is loaded, and compare it: `--verify`.
    pub verify: bool,
    /// What to select.
    pub rules: SelectionRules,
    /// How to load.
    pub tuning: Tuning,
    /// What the load may take.
    pub limits: Limits,
    /// Evict after this long without a lease or another reader.
    pub idle_ttl_seconds: Option<f64>,
    /// The load goes on although nobody waits for it: `--no-wait`, or a daemon in the foreground.
    pub loads_unattended: bool,
    /// The digest of the selection when it was asked for: what is loaded must have the same.
    pub selection: String,
    /// The digest of source, files, selection and settings: see `Status::identity`.
    pub identity: String,
    /// The settings behind the digest, by name.
    pub settings: BTreeMap<String, String>,
}

impl Orders {
    /// As they are written.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self)
            .map_err(|error| Error::new(Kind::Failed, format!("cannot write the daemon's orders: {error}")))
    }

    /// As they were written by the same program.
    pub fn from_json(json: &[u8]) -> Result<Orders> {
        serde_json::from_slice(json).map_err(|error| {
            Error::new(Kind::Usage, format!("these are no orders of 'iloader start': {error}"))
                .hint("this command is for 'iloader start' alone")
        })
    }
}

impl Boot {
    /// As it was said by the same program.
    pub fn from_json(json: &[u8]) -> Result<Boot> {
        serde_json::from_slice(json)
            .map_err(|error| Error::new(Kind::Failed, format!("cannot read what the daemon said: {error}")))
    }
}

impl Config {
    /// Where readers find the model: the view, with the kept directory name where asked for.
    pub fn model_dir(&self) -> String {
        let directory = view::model_dir(Path::new(&self.view), self.kept_dirname.as_deref());
        directory.into_os_string().into_string().expect("both parts are UTF-8")
    }
}

/// Storage tuning of one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    /// Parallel workers.
    pub workers: u32,
    /// The unit that a worker takes at a time, in bytes.
    pub chunk_bytes: u64,
    /// `auto`, `io-uring` or `threads`.
    pub engine: String,
    /// Reads in flight per worker; `None`: the engine's default.
    pub queue_depth: Option<u32>,
    /// Bytes of one read; `None`: the default.
    pub read_bytes: Option<u64>,
    /// Whether to bypass the page cache: `auto`, `always` or `never`.
    pub direct: String,
    /// Bytes that may be read in a second; `None`: no limit.
    pub bytes_per_second: Option<u64>,
    /// Stand back behind others: `--background`.
    pub background: bool,
    /// Where the pages are placed: a node's number, or `interleave`.
    pub numa: Option<String>,
    /// What holds the bytes: `auto`, `memfd` or `tmpfs`.
    pub backing: String,
    /// Keep the bytes from being swapped out: `--mlock`.
    pub lock_memory: bool,
}

/// What a load may take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Share of the available memory, 0 to 1.
    pub memory_fraction: f64,
    /// Cap for this cache, buffers included.
    pub memory_bytes_max: Option<u64>,
    /// Headroom left for others.
    pub reserve_bytes: u64,
    /// The shared quota to set when the cache is loaded; 0 is none. No part of the identity.
    pub resident_bytes_max: Option<u64>,
    /// Skip the check of available memory.
    pub force: bool,
}

impl Tuning {
    /// What another start may ask for otherwise without being another cache, by the option's name.
    /// Backing and `--mlock` are not among it: they are a part of the identity.
    pub fn by_name(&self) -> BTreeMap<String, String> {
        let number = |value: Option<u64>| value.map_or("default".to_owned(), |value| value.to_string());
        [
            ("workers", self.workers.to_string()),
            ("chunk-size", self.chunk_bytes.to_string()),
            ("engine", self.engine.clone()),
            ("queue-depth", number(self.queue_depth.map(u64::from))),
            ("read-size", number(self.read_bytes)),
            ("direct", self.direct.clone()),
            ("limit-rate", self.bytes_per_second.map_or("none".to_owned(), |rate| rate.to_string())),
            ("background", if self.background { "on" } else { "off" }.to_owned()),
            ("numa", self.numa.clone().unwrap_or_else(|| "none".to_owned())),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }
}
