//! The manifest: what a cache holds, in one versioned JSON form for memory and disk alike.

use serde::{Deserialize, Serialize};

/// The version of the JSON form. A reader refuses any other.
pub const SCHEMA: u32 = 1;

/// What one cache holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The cache's name.
    pub name: String,
    /// The source directory, absolute and resolved through links.
    pub source: String,
    /// What was asked for.
    pub selection: SelectionRules,
    /// The files, sorted by path.
    pub files: Vec<FileEntry>,
    /// Links to directories that stay links, because their target is inside the selection.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub directory_links: Vec<DirectoryLink>,
    /// The bytes held: each distinct inode once, passed-through files not counted.
    pub bytes: u64,
    /// When the cache was made, RFC 3339.
    pub created: String,
    /// The version of the program that wrote this.
    pub tool: String,
}

/// The patterns that made the selection, as given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelectionRules {
    /// Patterns that a file must match one of; empty: all files.
    #[serde(default)]
    pub patterns: Vec<String>,
    /// Exclusions given in place of the built-in list; `None`: the built-in list.
    #[serde(default)]
    pub exclude: Option<Vec<String>>,
    /// Exclusions on top.
    #[serde(default)]
    pub also_exclude: Vec<String>,
    /// Files that stay in the view as links to the source.
    #[serde(default)]
    pub passthrough: Vec<String>,
}

/// One file of a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Relative to the source, `/` between the parts.
    pub path: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Modification time of the source, RFC 3339 with nanoseconds.
    pub mtime: String,
    /// Device of the source file.
    pub device: u64,
    /// Inode of the source file.
    pub inode: u64,
    /// A link to the source itself: its bytes are not in memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub passthrough: bool,
}

/// A link to a directory of the same selection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryLink {
    /// Where the link stands, relative to the source.
    pub path: String,
    /// The directory it leads to, relative to the source.
    pub target: String,
}
