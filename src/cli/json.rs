//! What `--json` prints, in one place: field names are API, and the same across commands.

use std::borrow::Cow;

use serde::Serialize;

use crate::budget::Room;
use crate::control::message::{LeaseInfo, ReaderInfo, State, Status};
use crate::disk;
use crate::error::Result;
use crate::failure::Failure;
use crate::manifest::Manifest;
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

/// The answer of `manifest`.
#[derive(Debug, Serialize)]
pub(super) struct ManifestAnswer<'a> {
    #[serde(flatten)]
    pub(super) manifest: &'a Manifest,
    /// What the bytes were read from; null: the source itself.
    pub(super) generation: Option<&'a str>,
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
    pub(super) directory: Cow<'a, str>,
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

/// One generation on disk.
#[derive(Debug, Serialize)]
pub(super) struct Generation<'a> {
    pub(super) name: &'a str,
    pub(super) number: u64,
    pub(super) path: Cow<'a, str>,
    pub(super) source: &'a str,
    pub(super) bytes: u64,
    /// Blocks of its files, also of those that other generations have, too.
    pub(super) allocated_bytes: u64,
    pub(super) files: u64,
    pub(super) created: &'a str,
    /// Since it was used last.
    pub(super) idle_seconds: f64,
    pub(super) leased: bool,
}

impl<'a> Generation<'a> {
    pub(super) fn of(generation: &'a disk::Generation) -> Result<Generation<'a>> {
        let manifest = generation.manifest();
        let inodes = generation.inodes()?;
        Ok(Generation {
            name: generation.name().as_str(),
            number: generation.number(),
            path: generation.path().to_string_lossy(),
            source: &manifest.source,
            bytes: manifest.bytes,
            allocated_bytes: inodes.iter().fold(0, |sum, inode| sum.saturating_add(inode.2)),
            files: manifest.files.len() as u64,
            created: &manifest.created,
            idle_seconds: generation.idle().as_secs_f64(),
            leased: generation.is_leased()?,
        })
    }
}

/// The answer of `cache`.
#[derive(Debug, Serialize)]
pub(super) struct CacheAnswer<'a> {
    #[serde(flatten)]
    generation: Generation<'a>,
    /// It was there already.
    was_fresh: bool,
    copied_bytes: u64,
    /// Blocks shared with the source.
    cloned_bytes: u64,
    /// Taken over from older generations or an interrupted copy.
    reused_bytes: u64,
    notes: &'a [String],
}

impl<'a> CacheAnswer<'a> {
    pub(super) fn of(built: &'a disk::Built) -> Result<CacheAnswer<'a>> {
        Ok(CacheAnswer {
            generation: Generation::of(&built.generation)?,
            was_fresh: built.was_fresh,
            copied_bytes: built.copied_bytes,
            cloned_bytes: built.cloned_bytes,
            reused_bytes: built.reused_bytes,
            notes: &built.notes,
        })
    }
}

/// The answer of `cache-status`.
#[derive(Debug, Serialize)]
pub(super) struct CacheStatusAnswer<'a> {
    pub(super) name: &'a str,
    /// `fresh`, `stale`, `missing`, or `unknown` where the source cannot be looked at.
    pub(super) state: &'a str,
    pub(super) source: &'a str,
    /// The newest one; null where there is none.
    pub(super) generation: Option<Generation<'a>>,
    pub(super) source_changes: &'a [String],
    /// Why the source cannot be looked at, or what is there of that name cannot be used.
    pub(super) error: Option<Failure>,
}

/// The answer of `cache-list`.
#[derive(Debug, Serialize)]
pub(super) struct CacheListAnswer<'a> {
    pub(super) root: &'a str,
    pub(super) generations: Vec<Generation<'a>>,
    /// Blocks of all of them: a file that several have counts once.
    pub(super) allocated_bytes: u64,
    pub(super) unreadable: Vec<Unreadable<'a>>,
    pub(super) leftovers: Vec<DiskLeftover<'a>>,
}

/// What looks like a generation and cannot be read.
#[derive(Debug, Serialize)]
pub(super) struct Unreadable<'a> {
    pub(super) path: Cow<'a, str>,
    pub(super) error: Failure,
}

impl<'a> From<&'a disk::store::Unreadable> for Unreadable<'a> {
    fn from(unreadable: &'a disk::store::Unreadable) -> Unreadable<'a> {
        Unreadable { path: unreadable.path.to_string_lossy(), error: Failure::from(&unreadable.error) }
    }
}

/// What an interrupted command left under a root.
#[derive(Debug, Serialize)]
pub(super) struct DiskLeftover<'a> {
    pub(super) name: &'a str,
    pub(super) path: Cow<'a, str>,
    pub(super) what: &'a str,
    pub(super) allocated_bytes: u64,
    /// Somebody works in it.
    pub(super) in_use: bool,
    /// Why it stays although it was to go.
    pub(super) error: Option<Failure>,
}

impl<'a> From<&'a disk::store::Leftover> for DiskLeftover<'a> {
    fn from(leftover: &'a disk::store::Leftover) -> DiskLeftover<'a> {
        DiskLeftover {
            name: leftover.name.as_str(),
            path: leftover.path.to_string_lossy(),
            what: leftover.what,
            allocated_bytes: leftover.bytes,
            in_use: leftover.is_in_use,
            error: None,
        }
    }
}

/// The answer of `gc` for what is on disk.
#[derive(Debug, Serialize)]
pub(super) struct DiskCollectAnswer<'a> {
    pub(super) root: &'a str,
    /// Whether it was done, or would be.
    pub(super) applied: bool,
    pub(super) generations: Vec<DiskCollected<'a>>,
    pub(super) leftovers: Vec<DiskLeftover<'a>>,
    pub(super) unreadable: Vec<Unreadable<'a>>,
    /// Blocks of all generations before: a file that several have counts once.
    pub(super) allocated_bytes: u64,
    /// The same of those that stay.
    pub(super) remaining_bytes: u64,
}

/// What becomes of one generation.
#[derive(Debug, Serialize)]
pub(super) struct DiskCollected<'a> {
    pub(super) name: &'a str,
    pub(super) number: u64,
    pub(super) path: Cow<'a, str>,
    /// Blocks of its files, also of those that other generations have, too.
    pub(super) allocated_bytes: u64,
    pub(super) idle_seconds: f64,
    /// `remove` or `keep`.
    pub(super) action: &'a str,
    /// Why it goes, or why it may not; null where nothing wants it to go.
    pub(super) reason: Option<&'a str>,
}

/// The answer of `verify`.
#[derive(Debug, Serialize)]
pub(super) struct VerifyAnswer<'a> {
    pub(super) name: &'a str,
    pub(super) number: u64,
    pub(super) path: Cow<'a, str>,
    /// Only names, sizes and times were looked at.
    pub(super) quick: bool,
    /// Files that were looked at.
    pub(super) files: u64,
    /// Bytes that were read.
    pub(super) bytes: u64,
    pub(super) findings: Vec<Finding<'a>>,
}

/// What is wrong with one file.
#[derive(Debug, Serialize)]
pub(super) struct Finding<'a> {
    pub(super) path: &'a str,
    /// `bad`, `missing`, `extra`, `size` or `mtime`.
    pub(super) what: &'a str,
    pub(super) detail: &'a str,
}

impl<'a> From<&'a disk::Finding> for Finding<'a> {
    fn from(finding: &'a disk::Finding) -> Finding<'a> {
        Finding { path: &finding.path, what: finding.what, detail: &finding.detail }
    }
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
