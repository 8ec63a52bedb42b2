//! What a `start` tells the daemon that it becomes or spawns.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::manifest::SelectionRules;

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
    /// What to select.
    pub rules: SelectionRules,
    /// How to load.
    pub tuning: Tuning,
    /// What the load may take.
    pub limits: Limits,
    /// Evict after this long without readers.
    pub idle_ttl_seconds: Option<f64>,
    /// The digest of source, files, selection and settings: see `Status::identity`.
    pub identity: String,
    /// The settings behind the digest, by name.
    pub settings: BTreeMap<String, String>,
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
    /// What holds the bytes: `auto`, `memfd` or `tmpfs`.
    pub backing: String,
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
    /// Skip the check of available memory.
    pub force: bool,
}
