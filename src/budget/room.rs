//! What one limit still allows, and where the kernel says so.

use std::io;
use std::path::Path;

/// What one limit still allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes that may still be allocated under this limit.
    pub bytes: u64,
    /// Whose limit it is, for messages: `host MemAvailable`, `cgroup v1 /path`.
    pub what: String,
}

/// The text of the kernel's file `path`, looked up under `root`. Bytes that are not UTF-8 (somebody's
/// mount point) become U+FFFD: they never stand in what we look for.
pub(super) fn read(root: &Path, path: &Path) -> io::Result<String> {
    let below = path.strip_prefix("/").unwrap_or(path);
    Ok(String::from_utf8_lossy(&std::fs::read(root.join(below))?).into_owned())
}
