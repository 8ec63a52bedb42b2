//! The journal of what is being built: which files are finished, so that the next command can take them over.
//!
//! One JSON line each: first what it is about, then one line per finished file, added as it is finished and never
//! changed. A last line that was cut by a crash is as good as none.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use rustix::fs::{self, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::format::{FINISHED_FILE, OUR_DIRECTORY};
use super::manifest::{MANIFEST_BYTES_MAX, check_path};
use super::medium::Medium;
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
        Ok(file) => File::from(file),
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
pub(super) struct Writer<'a> {
    medium: &'a dyn Medium,
    file: File,
    bytes: u64,
}

impl<'a> Writer<'a> {
    /// Begins a journal in `file`, which is new and empty.
    pub(super) fn begin(medium: &'a dyn Medium, file: File, source: &str) -> io::Result<Writer<'a>> {
        let mut writer = Writer { medium, file, bytes: 0 };
        writer.line(&Heading { schema: SCHEMA, source: source.to_owned() })?;
        Ok(writer)
    }

    /// Adds a finished file, whose bytes are on disk by now. The line itself is when `sync` was called.
    pub(super) fn add(&mut self, entry: &FileEntry) -> io::Result<()> {
        self.line(entry)
    }

    /// Waits until what was added is on disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.medium.sync_file(&self.file)
    }

    /// In one call, so that a kill leaves all of the line or none.
    fn line(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.medium.write(&self.file, &line, self.bytes)?;
        self.bytes += line.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::testing::Root;

    #[test]
    fn what_was_finished_is_read_back() {
        let root = Root::new();
        let staging = root.add_staging("m", 1, b"words");
        let journal = read(&staging).unwrap().unwrap();
        assert_eq!(journal.source, "/models/m");
        assert_eq!(journal.finished.len(), 1);
        assert_eq!((journal.finished[0].path.as_str(), journal.finished[0].bytes), ("finished", 5));
        std::fs::remove_file(staging.join(OUR_DIRECTORY).join(FINISHED_FILE)).unwrap();
        assert_eq!(read(&staging).unwrap(), None);
        assert_eq!(read(&root.path("missing")).unwrap(), None);
        std::os::unix::fs::symlink("/etc/passwd", staging.join(OUR_DIRECTORY).join(FINISHED_FILE)).unwrap();
        assert_eq!(read(&staging).unwrap(), None, "a link is not followed");
    }

    #[test]
    fn what_a_crash_cut_is_left_out() {
        let root = Root::new();
        let staging = root.add_staging("m", 1, b"words");
        let path = staging.join(OUR_DIRECTORY).join(FINISHED_FILE);
        let text = std::fs::read_to_string(&path).unwrap();
        let (heading, line) = text.split_once('\n').unwrap();
        let finished = |text: &str| parse(text.as_bytes()).map(|journal| journal.finished.len());
        assert_eq!(finished(&format!("{heading}\n{line}{line}")), Some(2));
        for cut in 0..line.len() {
            assert_eq!(finished(&format!("{heading}\n{line}{}", &line[..cut])), Some(1), "{cut}");
        }
        for cut in 0..=heading.len() {
            assert_eq!(finished(&heading[..cut]), None, "{cut}");
        }
        assert_eq!(
            finished(&format!("{heading}\n{line}rubbish\n{line}")),
            Some(1),
            "no line behind a broken one"
        );
        for (from, to) in [("\"finished\"", "\"../finished\""), ("\"sha256\"", "\"sha\""), ("T", "x")] {
            assert_eq!(finished(&format!("{heading}\n{}", line.replace(from, to))), Some(0), "{from}");
        }
        assert_eq!(finished(&text.replace("\"schema\":1", "\"schema\":2")), None);
    }
}
