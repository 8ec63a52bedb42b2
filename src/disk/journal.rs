//! The journal of what is being built: which files are finished, so that the next command can take them over.
//!
//! One JSON line each: first what it is about, then one line per finished file, added as it is finished and never
//! changed. A last line that was cut by a crash is as good as none.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{self, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::format::{FINISHED_FILE, OUR_DIRECTORY};
use super::manifest::{MANIFEST_BYTES_MAX, check_path};
use crate::error::{Error, Result};
use crate::manifest::FileEntry;
use crate::registry::dir::failed;
use crate::source::Identity;
use crate::source::select::FILES_MAX;

/// The version of the journal. One of another version is as good as none.
pub const SCHEMA: u32 = 1;

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heading {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The source directory, absolute and resolved through links.
    pub source: String,
}

/// What a journal says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journal {
    /// The source directory that was copied.
    pub source: String,
    /// Finished files in the order in which they were finished: with the identity of the source and the digest.
    pub finished: Vec<FileEntry>,
}

/// Reads a journal as far as it is sound: up to the first line that is broken. `None` where there is nothing to go by.
pub fn parse(bytes: &[u8]) -> Option<Journal> {
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').map_while(|line| line.strip_suffix(b"\n"));
    let heading: Heading = serde_json::from_slice(lines.next()?).ok()?;
    if heading.schema != SCHEMA || !heading.source.starts_with('/') {
        return None;
    }
    let finished = lines.map_while(|line| {
        let entry: FileEntry = serde_json::from_slice(line).ok()?;
        let is_sound = check_path(&entry.path).is_ok()
            && entry.sha256.is_some()
            && !entry.passthrough
            && Identity::of_entry(&entry).is_some();
        is_sound.then_some(entry)
    });
    Some(Journal { source: heading.source, finished: finished.take(FILES_MAX).collect() })
}

/// Reads the journal of the staging directory at `staging`. `None` where there is none that can be used.
///
/// # Errors
///
/// Where it is there and cannot be read.
pub fn read(staging: &Path) -> Result<Option<Journal>> {
    let path = staging.join(OUR_DIRECTORY).join(FINISHED_FILE);
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match fs::open(&path, flags, Mode::empty()) {
        Ok(file) => std::fs::File::from(file),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
        Err(errno) => return Err(failed("open the journal", &path)(errno)),
    };
    let mut bytes = Vec::new();
    let failed = |cause| Error::io("read the journal", &path, &cause);
    if !file.metadata().map_err(failed)?.is_file() {
        return Ok(None);
    }
    // What stands behind the limit is lost, which costs a copy.
    file.take(MANIFEST_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
    Ok(parse(&bytes))
}

/// A journal that is written.
#[derive(Debug)]
pub struct Writer {
    file: std::fs::File,
}

impl Writer {
    /// Begins a journal in `file`, which is new and empty.
    ///
    /// # Errors
    ///
    /// Where it cannot be written.
    pub fn begin(file: OwnedFd, source: &str) -> std::io::Result<Writer> {
        let mut writer = Writer { file: file.into() };
        writer.line(&Heading { schema: SCHEMA, source: source.to_owned() })?;
        Ok(writer)
    }

    /// Adds a finished file: its bytes must be on disk by now. Each line is on disk when this returns only where
    /// `sync` is called.
    ///
    /// # Errors
    ///
    /// Where it cannot be written.
    pub fn add(&mut self, entry: &FileEntry) -> std::io::Result<()> {
        self.line(entry)
    }

    /// Waits until what was added is on disk.
    ///
    /// # Errors
    ///
    /// Where it could not be written.
    pub fn sync(&self) -> std::io::Result<()> {
        self.file.sync_data()
    }

    fn line(&mut self, value: &impl Serialize) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        // In one call, so that a kill leaves all of it or none.
        self.file.write_all(&line)
    }
}
