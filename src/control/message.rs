//! What the two ends say to each other: one request, then replies until a final one.
//!
//! Versions: a request names the protocol it speaks and the oldest it can live with. New fields are
//! optional and unknown ones ignored, so that [`PROTOCOL`] rises only when a meaning changes. An
//! operation that a daemon does not know is answered with an error that names both versions.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::failure::Failure;
use crate::manifest::Manifest;

/// The protocol that this program speaks.
pub const PROTOCOL: u32 = 1;

/// The oldest protocol that this program understands.
pub const PROTOCOL_OLDEST: u32 = 1;

/// How long a daemon may look for readers before it answers a `Stop`: what a client allows on top of its patience.
pub const LOOK_MAX: Duration = Duration::from_secs(10);

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

impl Request {
    /// `operation` as this program asks for it.
    pub fn new(operation: Operation) -> Request {
        Request {
            protocol: PROTOCOL,
            oldest: PROTOCOL_OLDEST,
            tool: env!("CARGO_PKG_VERSION").to_owned(),
            operation,
        }
    }

    /// A request as it came from the socket. The versions are read first, so that a client that speaks
    /// another protocol, or asks for something newer, is told so rather than that its JSON is wrong.
    pub fn parse(json: &[u8]) -> Result<Request> {
        #[derive(Deserialize)]
        struct Envelope {
            protocol: u32,
            oldest: u32,
            #[serde(default)]
            tool: String,
            operation: serde_json::Value,
        }
        let envelope: Envelope = serde_json::from_slice(json).map_err(|error| {
            Error::new(Kind::Failed, format!("what came is no request of this protocol: {error}"))
        })?;
        let Envelope { protocol, oldest, tool, operation } = envelope;
        if oldest > PROTOCOL || protocol < PROTOCOL_OLDEST {
            return Err(versions_differ("cannot talk to this client", protocol, &tool));
        }
        let operation = serde_json::from_value(operation)
            .map_err(|error| versions_differ(&format!("cannot do this: {error}"), protocol, &tool))?;
        Ok(Request { protocol, oldest, tool, operation })
    }
}

fn versions_differ(what: &str, protocol: u32, tool: &str) -> Error {
    let daemon = env!("CARGO_PKG_VERSION");
    let tool = tool.escape_debug();
    Error::new(
        Kind::Failed,
        format!(
            "the daemon {what}; it is iloader {daemon} with protocol {PROTOCOL}, the client iloader {tool} \
             with protocol {protocol}"
        ),
    )
    .hint(
        "use the program version that started the cache, or end the daemon with SIGTERM ('iloader list' \
         shows its pid) and start it again",
    )
}

/// What can be asked of a daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// One [`Reply::Status`].
    Status {},
    /// One [`Reply::Manifest`]; an error until ready.
    Manifest {},
    /// [`Reply::Ready`] or an error, once it is known. The connection is a waiter: see `Cancel`.
    Wait {
        /// Send [`Reply::Progress`] meanwhile, a few times a second while it changes.
        #[serde(default)]
        progress: bool,
    },
    /// Sent on a connection that waits: stop the load if nobody else waits for it and it was not started
    /// to go on by itself (`--no-wait`). The connection waits no more. The answer is [`Reply::Stopping`],
    /// or [`Reply::Progress`] where the load goes on.
    Cancel {},
    /// [`Reply::Leased`]: a lease for the process at the other end. It lives while the connection or
    /// that process does. An error until ready.
    Lease {},
    /// [`Reply::Readers`]: who has the cache's memory open or mapped. An error until ready.
    Readers {},
    /// [`Reply::Stopping`], after which the daemon withdraws the view and ends: the connection then closes.
    Stop {
        /// Stop although leases or readers are live.
        #[serde(default)]
        force: bool,
        /// Remove the view's directory too, instead of leaving it empty.
        #[serde(default)]
        remove_view: bool,
        /// Wait for leases and readers to end, so many milliseconds at the most; `None`: refuse at once.
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
    /// To `Readers`.
    Readers(Box<Readers>),
    /// To `Stop` and `Cancel`, and to `Wait` where the cache is stopped before it is ready.
    Stopping {
        /// What the user should know of the withdrawn view, such as files in it that are not ours.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        notes: Vec<String>,
        /// To `Stop`: who still holds the memory of a cache that was ready; `None` where that was not seen.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        holders: Option<Box<Readers>>,
    },
    /// Any operation can fail.
    Error(Failure),
    /// There is no room for this connection or its answer at the moment, and nothing was done: connect again.
    Busy(Failure),
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
    /// Seconds since the last lease ended, or since readiness, or since a reader without one was last met; 0 while
    /// leased or loading.
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
    /// Bytes of them that are kept from being swapped out.
    #[serde(default)]
    pub locked_bytes: u64,
    /// How the bytes were read.
    #[serde(default)]
    pub read: ReadCounts,
    /// The generation on disk that the bytes were read from; `None`: from the source itself.
    #[serde(default)]
    pub generation: Option<String>,
    /// The bytes in memory were hashed, and all of them that a digest was known for were what it says; there was one
    /// at least.
    #[serde(default)]
    pub verified: bool,
    /// How many files were compared so.
    #[serde(default)]
    pub verified_files: u64,
    /// The digest of everything that makes this cache what it is, hexadecimal.
    pub identity: String,
    /// The settings behind the digest, by name, for saying what differs.
    pub settings: std::collections::BTreeMap<String, String>,
    /// How it was loaded, by name: what another start may ask for otherwise without being another cache.
    #[serde(default)]
    pub tuning: std::collections::BTreeMap<String, String>,
    /// Log file.
    pub log: String,
    /// Control socket.
    pub socket: String,
    /// The daemon's program version.
    pub tool: String,
    /// The daemon's [`PROTOCOL`].
    pub protocol: u32,
    /// Seconds without a lease or another reader until eviction, where set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ttl_seconds: Option<f64>,
    /// The control group that the memory is charged to, such as `cgroup v2 /user.slice`; `None` where the kernel
    /// charges none.
    #[serde(default)]
    pub charged_cgroup: Option<String>,
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

/// One live lease, or another process that matters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseInfo {
    /// The process.
    pub pid: i32,
    /// Its command, as far as it can be read.
    pub command: String,
}

/// Who has a cache's memory open or mapped, as far as its daemon sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readers {
    /// Who reads, by number; never the daemon itself.
    pub readers: Vec<ReaderInfo>,
    /// Processes of the daemon's user that may not be looked into: each could be a reader.
    #[serde(default)]
    pub unseen: Vec<LeaseInfo>,
    /// How many processes of other users may not be looked into.
    #[serde(default)]
    pub unseen_of_others: u64,
}

/// One process that has a cache's memory open or mapped. Field names are API, as those of [`Status`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReaderInfo {
    /// The process.
    pub pid: i32,
    /// Its command, as far as it can be read.
    pub command: String,
    /// Whether it holds a lease.
    pub lease: bool,
    /// Descriptors that lead to the cache's memory.
    pub descriptors: u64,
    /// Bytes of its address space on the cache's memory, in whole pages.
    pub mapped_bytes: u64,
    /// Bytes of that in its page tables; `None` where not looked at, or not to be seen.
    #[serde(default)]
    pub resident_bytes: Option<u64>,
    /// Bytes of that which it has private copies of, because it wrote to them.
    #[serde(default)]
    pub private_bytes: Option<u64>,
    /// Memory of its own altogether, those copies included.
    #[serde(default)]
    pub own_bytes: Option<u64>,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(json: &str) -> Result<Request> {
        Request::parse(json.as_bytes())
    }

    #[test]
    fn requests_read_back_and_unknown_fields_are_ignored() {
        let request =
            Request::new(Operation::Stop { force: true, remove_view: false, wait_milliseconds: None });
        let json = serde_json::to_string(&request).expect("JSON");
        assert_eq!(parsed(&json).expect("read back"), request);
        let newer = r#"{"protocol":7,"oldest":1,"tool":"9","operation":{"stop":{"new":1}},"extra":[]}"#;
        let Operation::Stop { force, wait_milliseconds, .. } = parsed(newer).expect("compatible").operation
        else {
            panic!("another operation");
        };
        assert_eq!((force, wait_milliseconds), (false, None));
    }

    #[test]
    fn other_protocols_and_operations_name_both_versions() {
        for json in [
            r#"{"protocol":7,"oldest":5,"tool":"9.9","operation":{"status":{}}}"#,
            r#"{"protocol":0,"oldest":0,"tool":"9.9","operation":{"status":{}}}"#,
            r#"{"protocol":7,"oldest":1,"tool":"9.9","operation":{"teleport":{}}}"#,
        ] {
            let error = parsed(json).expect_err("refused");
            for part in ["iloader 9.9", &format!("protocol {PROTOCOL}"), env!("CARGO_PKG_VERSION")] {
                assert!(error.message().contains(part), "{error}");
            }
            assert!(error.hint_text().is_some());
        }
        for json in ["", "{}", "[]", "nonsense", r#"{"protocol":-1}"#, "\u{0}"] {
            assert!(parsed(json).expect_err("garbage").message().contains("no request"));
        }
    }
}
