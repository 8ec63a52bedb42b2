//! WHAT is read: the selection of a model directory, and how each file of it is told from any other.

use std::collections::HashSet;
use std::path::PathBuf;

use crate::manifest::SelectionRules;

pub mod advice;
mod file;
pub mod identity;
mod pattern;
pub mod scheduler;
pub mod select;

pub use crate::manifest::DirectoryLink;
pub use file::{ChangeTime, Direct, Method, SourceFile, changed, check_unchanged};
pub use select::{BUILT_IN_EXCLUSIONS, select};

/// The files of a model directory that are taken, and why the others are not.
#[derive(Clone, Debug)]
pub struct Selection {
    /// The source directory, absolute and resolved through links.
    pub root: PathBuf,
    /// The patterns that made it.
    pub rules: SelectionRules,
    /// The files taken, sorted by path, passed-through ones included.
    pub files: Vec<SelectedFile>,
    /// Links to directories whose target is inside the selection: they stay links.
    pub directory_links: Vec<DirectoryLink>,
    /// What was left out by a pattern, and by which.
    pub excluded: Vec<Excluded>,
    /// What a person should know: skipped sockets, weights without a config.
    pub warnings: Vec<String>,
}

impl Selection {
    /// Some files and nothing else: nothing was asked for, and nothing left out.
    pub fn of_files(root: impl Into<PathBuf>, files: Vec<SelectedFile>) -> Selection {
        Selection {
            root: root.into(),
            rules: SelectionRules::default(),
            files,
            directory_links: Vec::new(),
            excluded: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Bytes of the files to load: each distinct inode once, passed-through files not counted.
    /// Saturates.
    pub fn bytes(&self) -> u64 {
        let mut seen = HashSet::with_capacity(self.files.len());
        self.files
            .iter()
            .filter(|file| !file.passthrough && seen.insert((file.identity.device, file.identity.inode)))
            .fold(0, |sum, file| sum.saturating_add(file.identity.bytes))
    }
}

/// One file of a selection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectedFile {
    /// Relative to the source, `/` between the parts.
    pub path: String,
    /// The file that links lead to, absolute: what is opened.
    pub real: PathBuf,
    /// What it was when it was selected.
    pub identity: Identity,
    /// Stays a link to the source instead of being loaded.
    pub passthrough: bool,
}

/// What tells a file from any other, and from itself after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Modification time, whole seconds since 1970 (negative before).
    pub mtime_seconds: i64,
    /// Modification time, nanoseconds within the second.
    pub mtime_nanoseconds: u32,
}

/// A file or directory that a pattern left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excluded {
    /// Relative to the source.
    pub path: String,
    /// The exclusion that matched, or `None` where no `--pattern` did.
    pub pattern: Option<String>,
    /// Length in bytes; 0 for a directory, which is not entered.
    pub bytes: u64,
}
