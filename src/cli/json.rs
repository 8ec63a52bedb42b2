//! What `--json` prints, in one place: field names are API, and the same across commands.

use serde::Serialize;

use crate::budget::Room;
use crate::control::message::{LeaseInfo, ReaderInfo, State, Status};
use crate::failure::Failure;
use crate::source::{self, SelectedFile, advice};

/// One cache, as far as it is known.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Cache<'a> {
    /// What its daemon says.
    Known(&'a Status),
    /// What is registered of one whose daemon does not answer.
    Registered(Registered<'a>),
}

/// What is known of a cache without its daemon.
#[derive(Debug, Serialize)]
pub(super) struct Registered<'a> {
    pub(super) name: &'a str,
    pub(super) state: State,
    pub(super) pid: Option<i32>,
    pub(super) view: Option<&'a str>,
    pub(super) source: Option<&'a str>,
    pub(super) created: Option<&'a str>,
    pub(super) log: Option<&'a str>,
    pub(super) socket: Option<&'a str>,
    /// Why its daemon does not answer.
    pub(super) error: Option<Failure>,
}

/// The answer of `status`.
#[derive(Debug, Serialize)]
pub(super) struct StatusAnswer<'a> {
    #[serde(flatten)]
    pub(super) cache: Cache<'a>,
    /// Whether the source differs from what was loaded; null where that was not looked at.
    pub(super) source_changed: Option<bool>,
    /// What differs, in words.
    pub(super) source_changes: &'a [String],
    /// What is wrong with the view, in words.
    pub(super) view_faults: &'a [String],
    /// Files of the view that are the source itself; null where that was not looked at.
    pub(super) passthrough: Option<&'a [String]>,
    /// Bytes of the view's files that are swapped out; null where that was not or could not be looked at.
    pub(super) swapped_bytes: Option<u64>,
    /// Who has it open or mapped; null where that was not looked at.
    pub(super) readers: Option<&'a [ReaderInfo]>,
    /// Processes of the daemon's user that cannot be looked into; null as above.
    pub(super) unseen: Option<&'a [LeaseInfo]>,
    /// How many of other users cannot be looked into; null as above.
    pub(super) unseen_of_others: Option<u64>,
}

/// The answer of `list`.
#[derive(Debug, Serialize)]
pub(super) struct ListAnswer<'a> {
    pub(super) base: &'a str,
    pub(super) caches: Vec<Cache<'a>>,
    #[serde(flatten)]
    pub(super) quota: Quota,
    /// Those of the other directories that caches of this BASE listen in.
    pub(super) other_quotas: Vec<OtherQuota<'a>>,
}

/// The quota of one quota group.
#[derive(Debug, Serialize)]
pub(super) struct Quota {
    /// Null where there is none, or where it cannot be told.
    pub(super) quota_bytes: Option<u64>,
    /// What all segments of the group take, of caches of other BASEs too; null where it cannot be told.
    pub(super) quota_used_bytes: Option<u64>,
    /// Why it cannot be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) quota_error: Option<Failure>,
}

/// The quota of a group apart from BASE.
#[derive(Debug, Serialize)]
pub(super) struct OtherQuota<'a> {
    pub(super) directory: std::borrow::Cow<'a, str>,
    #[serde(flatten)]
    pub(super) quota: Quota,
}

/// The answer of `gc --resident`.
#[derive(Debug, Serialize)]
pub(super) struct CollectAnswer<'a> {
    pub(super) base: &'a str,
    /// Whether it was done, or would be.
    pub(super) applied: bool,
    pub(super) caches: Vec<Collected<'a>>,
    pub(super) leftovers: &'a [Leftover],
    /// Memory of all the caches before, as far as it is known.
    pub(super) allocated_bytes: u64,
    /// The same of those that stay.
    pub(super) remaining_bytes: u64,
}

/// What becomes of one cache.
#[derive(Debug, Serialize)]
pub(super) struct Collected<'a> {
    pub(super) name: &'a str,
    pub(super) state: &'a str,
    /// Null where its daemon does not tell.
    pub(super) allocated_bytes: Option<u64>,
    /// The same.
    pub(super) idle_seconds: Option<f64>,
    /// `stop` or `keep`.
    pub(super) action: &'a str,
    /// Why it goes, or why it may not; null where nothing wants it to go.
    pub(super) reason: Option<&'a str>,
}

/// What a dead daemon left under one name.
#[derive(Debug, Serialize)]
pub(super) struct Leftover {
    pub(super) name: String,
    /// The files and directories.
    pub(super) paths: Vec<String>,
    /// Why they stay although they were to go.
    pub(super) error: Option<Failure>,
}

/// The answer of `inspect`.
#[derive(Debug, Serialize)]
pub(super) struct InspectAnswer<'a> {
    pub(super) source: &'a str,
    pub(super) bytes: u64,
    /// Bytes that a start would take, in whole pages and with its buffers.
    pub(super) need_bytes: u64,
    pub(super) files: Vec<File<'a>>,
    pub(super) excluded: Vec<Excluded<'a>>,
    pub(super) memory: Memory<'a>,
    pub(super) advice: Vec<Advice<'a>>,
    pub(super) warnings: &'a [String],
}

/// One selected file.
#[derive(Debug, Serialize)]
pub(super) struct File<'a> {
    pub(super) path: &'a str,
    pub(super) bytes: u64,
    pub(super) mtime: String,
    pub(super) passthrough: bool,
}

/// What a pattern left out.
#[derive(Debug, Serialize)]
pub(super) struct Excluded<'a> {
    pub(super) path: &'a str,
    pub(super) bytes: u64,
    /// The exclusion that matched; null where no `--pattern` did.
    pub(super) pattern: Option<&'a str>,
}

/// Whether there is room.
#[derive(Debug, Serialize)]
pub(super) struct Memory<'a> {
    /// Under the limit that decides.
    pub(super) available_bytes: u64,
    /// What of it is promised to starts under way.
    pub(super) promised_bytes: u64,
    pub(super) limits: Vec<Limit<'a>>,
    /// The most that a start with default settings may take.
    pub(super) admissible_bytes: u64,
    pub(super) admitted: bool,
    /// Why a start would be refused.
    pub(super) refusal: Option<Failure>,
}

/// What one limit still allows.
#[derive(Debug, Serialize)]
pub(super) struct Limit<'a> {
    pub(super) what: &'a str,
    pub(super) available_bytes: u64,
    /// What of it is promised to starts under way.
    pub(super) promised_bytes: u64,
}

/// Something large that is probably not needed.
#[derive(Debug, Serialize)]
pub(super) struct Advice<'a> {
    pub(super) what: &'a str,
    pub(super) bytes: u64,
    pub(super) files: u64,
    /// The options that leave it out.
    pub(super) options: &'a str,
}

impl<'a> From<&'a SelectedFile> for File<'a> {
    fn from(file: &'a SelectedFile) -> File<'a> {
        File {
            path: &file.path,
            bytes: file.identity.bytes,
            mtime: file.identity.mtime_rfc3339(),
            passthrough: file.passthrough,
        }
    }
}

impl<'a> From<&'a source::Excluded> for Excluded<'a> {
    fn from(excluded: &'a source::Excluded) -> Excluded<'a> {
        Excluded { path: &excluded.path, bytes: excluded.bytes, pattern: excluded.pattern.as_deref() }
    }
}

impl<'a> From<&'a Room> for Limit<'a> {
    fn from(room: &'a Room) -> Limit<'a> {
        Limit { what: &room.what, available_bytes: room.bytes, promised_bytes: room.promised_bytes }
    }
}

impl<'a> From<&'a advice::Advice> for Advice<'a> {
    fn from(advice: &'a advice::Advice) -> Advice<'a> {
        Advice { what: &advice.what, bytes: advice.bytes, files: advice.files, options: &advice.flags }
    }
}
