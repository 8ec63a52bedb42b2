//! The manifest: what a cache holds, in one versioned JSON form for memory and disk alike.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The version of the JSON form. A reader refuses any other.
pub const SCHEMA: u32 = 1;

/// The directory of our own files, at the top of a root and of each generation. It is in no view.
pub const OUR_DIRECTORY: &str = ".iloader";

/// In [`OUR_DIRECTORY`] of a generation: what it holds. Written last, so that there is no generation without one.
pub const MANIFEST_FILE: &str = "manifest.json";

/// The sums as `sha256sum` writes them: at the top of a generation, or in [`OUR_DIRECTORY`] where the source has a
/// file of that name at its top.
pub const SUMS_FILE: &str = "SHA256SUMS";

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
    /// The SHA-256 of its bytes, where they were hashed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<Digest>,
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

/// A SHA-256 digest, written as `sha256sum` prints it: 64 hexadecimal digits in lower case.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest(pub [u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl FromStr for Digest {
    type Err = String;

    /// Reads 64 hexadecimal digits in lower case, and nothing else.
    fn from_str(text: &str) -> Result<Digest, String> {
        let wrong =
            || format!("'{}' is no SHA-256: 64 hexadecimal digits in lower case", text.escape_debug());
        let nibble = |digit: u8| match digit {
            b'0'..=b'9' => Ok(digit - b'0'),
            b'a'..=b'f' => Ok(digit - b'a' + 10),
            _ => Err(wrong()),
        };
        let digits: &[u8; 64] = text.as_bytes().try_into().map_err(|_| wrong())?;
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
        }
        Ok(Digest(bytes))
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Digest, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_as_they_are_written() {
        let text = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest: Digest = text.parse().unwrap();
        assert_eq!(digest.to_string(), text);
        assert_eq!(digest.0[..2], [0xe3, 0xb0]);
        let upper = text.to_uppercase();
        for wrong in ["", &text[1..], &upper, &format!("{text}0"), &text.replace('e', "g"), "é"] {
            assert!(wrong.parse::<Digest>().is_err(), "{wrong}");
        }
    }
}
