//! `SHA256SUMS` as `sha256sum` prints it, so that a generation can be checked without any tool of ours.

use std::fmt::Write;

use super::format::SUMS_FILE;
use crate::manifest::Manifest;

/// The text for the files of a manifest. `sha256sum -c` reads it in the generation's directory.
pub fn text(manifest: &Manifest) -> String {
    let mut text = String::new();
    for file in &manifest.files {
        let Some(digest) = file.sha256 else { continue };
        // A line with escapes in its name starts with a backslash.
        let is_plain = !file.path.contains(['\\', '\n', '\r']);
        let before = if is_plain { "" } else { "\\" };
        let path = match is_plain {
            true => file.path.clone(),
            false => file.path.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r"),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{before}{digest}  {path}");
    }
    text
}

/// Whether our file stands at the top of the generation: not where the source has one of that name there, file or
/// directory.
pub fn is_at_top(manifest: &Manifest) -> bool {
    let taken = |path: &str| path.split('/').next() == Some(SUMS_FILE);
    !manifest.files.iter().any(|file| taken(&file.path))
        && !manifest.directory_links.iter().any(|link| taken(&link.path))
}
