//! What the two ends say to each other: one request, then replies until a final one.
//!
//! Versions: a request names the protocol it speaks and the oldest it can live with. New fields are
//! optional and unknown ones ignored, so that [`PROTOCOL`] rises only when a meaning changes. An
//! operation that a daemon does not know is answered with an error that names both versions.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind};
use crate::manifest::Manifest;

/// The protocol that this program speaks.
pub const PROTOCOL: u32 = 1;

/// The oldest protocol that this program understands.
pub const PROTOCOL_OLDEST: u32 = 1;

/// What a client sends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The client's [`PROTOCOL`].
    pub protocol: u32,
    /// The client's [`PROTOCOL_OLDEST`].
    pub oldest: u32,
    /// The client's program version, for messages.
    pub tool: String,
    /// What it wants.
    pub operation: Operation,
}

/// What can be asked of a daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// One [`Reply::Status`].
    Status {},
    /// One [`Reply::Manifest`]; an error until ready.
    Manifest {},
    /// [`Reply::Progress`] until [`Reply::Ready`] or an error. The connection is a waiter: see `Cancel`.
    Wait {
        /// The client is a `start` that was interrupted when it sends `Cancel` on this connection.
        #[serde(default)]
        progress: bool,
    },
    /// Sent on a connection that waits: stop the load if nobody else waits for it. The answer is
    /// [`Reply::Stopping`], or [`Reply::Progress`] where others still wait.
    Cancel {},
    /// [`Reply::Leased`]: a lease for the process at the other end. It lives while the connection or
    /// that process does. An error until ready.
    Lease {},
    /// [`Reply::Stopping`], after which the daemon withdraws the view and ends: the connection then closes.
    Stop {
        /// Stop although leases are live.
        #[serde(default)]
        force: bool,
        /// Remove the view's directory too, instead of leaving it empty.
        #[serde(default)]
        remove_view: bool,
        /// Wait for leases to end, so many milliseconds at the most; `None`: refuse at once.
        #[serde(default)]
        wait_milliseconds: Option<u64>,
    },
}

/// What a daemon answers. The last reply to an operation is never [`Reply::Progress`], except to `Cancel`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// To `Status`.
    Status(Box<Status>),
    /// To `Manifest`.
    Manifest(Box<Manifest>),
    /// How far the load is.
    Progress(Progress),
    /// To `Wait`: the view is published.
    Ready {
        /// The view's absolute path, with the kept directory name where asked for.
        view: String,
    },
    /// To `Lease`.
    Leased(Box<Leased>),
    /// To `Stop` and `Cancel`.
    Stopping {},
    /// Any operation can fail.
    Error(WireError),
}

/// How far a load is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Bytes in memory.
    pub bytes_done: u64,
    /// Bytes to load.
    pub bytes_total: u64,
    /// Files sealed.
    pub files_done: u64,
    /// Files to load.
    pub files_total: u64,
    /// Seconds since the load began.
    pub seconds: f64,
}

/// The state of a cache, as `--json` prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Files are being read.
    Loading,
    /// The view is published.
    Ready,
    /// The view is withdrawn and the daemon about to end.
    Stopping,
    /// The load failed; the daemon has ended.
    Failed,
    /// A daemon was killed or crashed: only its registration is left.
    Dead,
    /// Its daemon lives but does not answer in time.
    Unreachable,
}

/// What `status` shows. Field names are API: the table in `docs/usage.md` lists them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The cache's name.
    pub name: String,
    /// What it is doing.
    pub state: State,
    /// The daemon's process.
    pub pid: i32,
    /// The view that is or will be published.
    pub view: String,
    /// The source directory.
    pub source: String,
    /// Bytes of the selection, each distinct inode once, passed-through files not counted.
    pub bytes: u64,
    /// Files in the view.
    pub files: u64,
    /// While loading, how far; when ready, what it took.
    pub progress: Progress,
    /// Live leases.
    pub leases: Vec<LeaseInfo>,
    /// Seconds since the last lease ended, or since readiness; 0 while leased or loading.
    pub idle_seconds: f64,
    /// When the cache was made, RFC 3339.
    pub created: String,
    /// What holds the bytes: `memfd` or `tmpfs`.
    pub backing: String,
    /// Why this backing.
    pub backing_reason: String,
    /// Bytes on huge pages when the load ended.
    pub huge_page_bytes: u64,
    /// Which engine read: `io-uring` or `threads`.
    pub engine: String,
    /// Why this engine.
    pub engine_reason: String,
    /// Bytes allocated for segments, in whole pages.
    pub allocated_bytes: u64,
    /// How the bytes were read.
    #[serde(default)]
    pub read: ReadCounts,
    /// The digest of everything that makes this cache what it is, hexadecimal.
    pub identity: String,
    /// The settings behind the digest, by name, for saying what differs.
    pub settings: std::collections::BTreeMap<String, String>,
    /// Log file.
    pub log: String,
    /// Control socket.
    pub socket: String,
    /// The daemon's program version.
    pub tool: String,
    /// The daemon's [`PROTOCOL`].
    pub protocol: u32,
    /// Seconds until eviction when idle, where set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ttl_seconds: Option<f64>,
    /// Things the user should know about the load.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// How the bytes of a load were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadCounts {
    /// With O_DIRECT, from the device.
    pub direct_bytes: u64,
    /// Copied from the page cache, where they were already.
    pub cached_bytes: u64,
    /// Through the page cache, from the device, and dropped again.
    pub buffered_bytes: u64,
}

/// One live lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseInfo {
    /// The process that took it.
    pub pid: i32,
    /// Its command, as far as it can be read.
    pub command: String,
}

/// What a reader gets with its lease: the view, and what each link of it must lead to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Leased {
    /// The view's absolute path.
    pub view: String,
    /// `memfd` or `tmpfs`: which proof of immutability to look for.
    pub backing: String,
    /// The links of the view, passed-through files not listed.
    pub links: Vec<Link>,
}

/// What one link of a view must lead to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Relative to the view's model directory.
    pub path: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Device of the segment.
    pub device: u64,
    /// Inode of the segment.
    pub inode: u64,
}

/// An [`Error`] on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireError {
    /// [`Kind::name`].
    pub kind: String,
    /// The one line.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl From<&Error> for WireError {
    fn from(error: &Error) -> WireError {
        WireError {
            kind: error.kind().name().to_owned(),
            message: error.message().to_owned(),
            hint: error.hint_text().map(str::to_owned),
        }
    }
}

impl From<WireError> for Error {
    fn from(wire: WireError) -> Error {
        let error = Error::new(Kind::from_name(&wire.kind), wire.message);
        match wire.hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}
