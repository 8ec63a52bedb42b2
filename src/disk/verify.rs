//! Is a generation what its manifest says?

mod bytes;
mod names;
#[cfg(test)]
mod tests;

pub(super) use names::look_at_link;

use std::path::Path;

use super::{Generation, sums};
use crate::engine::Selected;
use crate::error::{Error, Kind, Result, reason};
use crate::load::StartEngine;
use crate::manifest::{Digest, FileEntry, Manifest};
use crate::source::SelectedFile;

/// How closely to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Names, sizes and modification times.
    Quick,
    /// Every byte.
    Full,
}

/// What is wrong with one path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Relative to the generation.
    pub path: String,
    /// `bad`, `missing`, `extra`, `size` or `mtime`.
    pub what: &'static str,
    /// The same in words, with the figures.
    pub detail: String,
}

impl Finding {
    fn new(path: &str, what: &'static str, detail: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), what, detail: detail.into() }
    }
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Files of the manifest that were looked at.
    pub files: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Sorted by path; empty: all is well.
    pub findings: Vec<Finding>,
}

/// Who watches. See [`super::build::Watch`].
pub trait Watch: Sync {
    /// So many more bytes were read. Files that had to be read twice count twice.
    fn read(&self, bytes: u64);
    /// One more file of the manifest is done.
    fn finished_file(&self);
    /// Whether to give up.
    fn cancelled(&self) -> bool;
}

/// A file that is there with the right length.
struct Present<'a> {
    /// What it should be.
    entry: &'a FileEntry,
    /// What it is.
    file: SelectedFile,
}

/// Compares a generation with its manifest. What is wrong is in the report, not an error; also a file that cannot be
/// read, or that vanishes meanwhile: the others are still looked at.
///
/// [`Depth::Full`] reads what the device holds, past the page cache, and leaves the page cache as it was. Where the file
/// system refuses O_DIRECT, a page that some process has mapped is read as it is in memory.
///
/// # Errors
///
/// [`Kind::Cancelled`]; [`Kind::NoRoom`] where memory or descriptors run out; the
/// generation's directory cannot be read.
pub fn verify(generation: &Generation, depth: Depth, engine: &Selected, watch: &dyn Watch) -> Result<Report> {
    let (manifest, digest) = (generation.manifest(), generation.manifest_digest());
    verify_at(generation.path(), manifest, digest, depth, &|| engine.start(), watch)
}

/// The same for a directory and a manifest, the bytes of whose file have the digest `of_manifest`.
fn verify_at(
    root: &Path,
    manifest: &Manifest,
    of_manifest: Digest,
    depth: Depth,
    start_engine: StartEngine<'_>,
    watch: &dyn Watch,
) -> Result<Report> {
    let mut report = Report::default();
    names::look_around(root, manifest, watch, &mut report.findings)?;
    check_sums(root, manifest, of_manifest, &mut report.findings);
    let present = names::look_at_files(root, manifest, watch, &mut report)?;
    if depth == Depth::Full {
        report.bytes = bytes::check(root, &present, start_engine, watch, &mut report.findings)?;
    } else {
        present.iter().for_each(|_| watch.finished_file());
    }
    report.findings.sort();
    report.findings.dedup();
    Ok(report)
}

fn cancelled() -> Error {
    Error::new(Kind::Cancelled, "the check was cancelled")
}

/// Our own file of sums must say what the manifest says: people check with it.
fn check_sums(root: &Path, manifest: &Manifest, of_manifest: Digest, findings: &mut Vec<Finding>) {
    use std::io::Read;

    use rustix::fs::{Mode, OFlags};

    let path = sums::place(manifest);
    let expected = sums::text(manifest, of_manifest);
    // What stands there may be anything: a FIFO is not waited for, and no more is read than is compared.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let text = rustix::fs::open(root.join(&path), flags, Mode::empty()).map_err(std::io::Error::from);
    let text = text.and_then(|descriptor| {
        let mut text = Vec::new();
        std::fs::File::from(descriptor).take(expected.len() as u64 + 1).read_to_end(&mut text)?;
        Ok(text)
    });
    findings.extend(match text {
        Ok(text) if text == expected.as_bytes() => None,
        Ok(_) => Some(Finding::new(&path, "bad", "it does not say what the manifest says")),
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
            Some(Finding::new(&path, "missing", "there is no such file"))
        }
        Err(cause) => Some(Finding::new(&path, "bad", format!("it cannot be read: {}", reason(&cause)))),
    });
}
