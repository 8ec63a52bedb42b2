//! What is being built: a directory beside the generations, which one rename makes one of them.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::format::{
    Entry, FINISHED_FILE, LOCK_FILE, MANIFEST_FILE, OUR_DIRECTORY, SUMS_FILE, State, USED_FILE,
};
use super::journal;
use super::medium::Medium;
use super::writer::{failed, lock};
use crate::error::Result;
use crate::manifest::FileEntry;
use crate::source::DirectoryLink;
use crate::sys::crash;

/// The journal of finished files is synced after so many bytes of them: what a power loss takes from it is read again.
const UNSYNCED_BYTES_MAX: u64 = 256 << 20;

/// The modes of what is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Modes {
    /// Of the files of the model: nobody is to write to them.
    pub(super) file: u32,
    /// Of directories.
    pub(super) directory: u32,
    /// Of our own files.
    pub(super) own: u32,
}

impl Modes {
    /// In a private root everything is, elsewhere the umask decides who may read.
    pub(super) fn of(is_private: bool) -> Modes {
        if is_private {
            Modes { file: 0o400, directory: 0o700, own: 0o600 }
        } else {
            Modes { file: 0o444, directory: 0o777, own: 0o666 }
        }
    }
}

/// A generation that is being built.
pub(super) struct Staging<'a> {
    medium: &'a dyn Medium,
    root: &'a Path,
    entry: Entry,
    path: PathBuf,
    modes: Modes,
    /// Every directory in it, parents before what is in them.
    directories: Vec<PathBuf>,
    journal: Mutex<Journal<'a>>,
}

/// The files that are finished, one line each.
struct Journal<'a> {
    writer: journal::Writer<'a>,
    files: u64,
    unsynced_bytes: u64,
}

impl<'a> Staging<'a> {
    /// Makes it, with the directories that `files` and `links` need.
    pub(super) fn make<'p>(
        medium: &'a dyn Medium,
        root: &'a Path,
        entry: Entry,
        modes: Modes,
        source: &str,
        files: impl Iterator<Item = &'p str>,
        links: &'p [DirectoryLink],
    ) -> Result<Staging<'a>> {
        let entry = entry.in_state(State::Staging);
        let path = root.join(entry.to_string());
        let own = path.join(OUR_DIRECTORY);
        let mut directories = vec![path.clone(), own.clone()];
        let parents: BTreeSet<&Path> = files
            .chain(links.iter().map(|link| link.path.as_str()))
            .flat_map(|file| Path::new(file).ancestors().skip(1))
            .filter(|parent| !parent.as_os_str().is_empty())
            .collect();
        directories.extend(parents.iter().map(|parent| path.join(parent)));
        for directory in &directories {
            make_directory(medium, directory, modes.directory)?;
        }
        let make = |name: &str| {
            let path = own.join(name);
            medium.make_file(&path, modes.own).map_err(|cause| failed("make", &path, &cause))
        };
        make(LOCK_FILE)?;
        make(USED_FILE)?;
        let writer = journal::Writer::begin(medium, make(FINISHED_FILE)?, source)
            .map_err(|cause| failed("write", &own.join(FINISHED_FILE), &cause))?;
        let journal = Mutex::new(Journal { writer, files: 0, unsynced_bytes: 0 });
        let staging = Staging { medium, root, entry, path, modes, directories, journal };
        crash::point("generation-staged");
        Ok(staging)
    }

    /// The modes of what is in it.
    pub(super) fn modes(&self) -> Modes {
        self.modes
    }

    /// Where a file of the generation is now.
    pub(super) fn file(&self, path: &str) -> PathBuf {
        self.path.join(path)
    }

    /// Whether a file in it was finished, so that another command can go on from there.
    pub(super) fn has_finished_any(&self) -> bool {
        lock(&self.journal).files > 0
    }

    /// Notes that a file is whole and synced.
    pub(super) fn note(&self, entry: &FileEntry) -> Result<()> {
        let mut journal = lock(&self.journal);
        let failed = |doing| move |cause: io::Error| failed(doing, &self.journal_path(), &cause);
        journal.writer.add(entry).map_err(failed("write"))?;
        journal.files += 1;
        journal.unsynced_bytes = journal.unsynced_bytes.saturating_add(entry.bytes);
        if journal.unsynced_bytes >= UNSYNCED_BYTES_MAX {
            journal.unsynced_bytes = 0;
            journal.writer.sync().map_err(failed("sync"))?;
        }
        drop(journal);
        crash::point("generation-file-finished");
        Ok(())
    }

    fn journal_path(&self) -> PathBuf {
        self.path.join(OUR_DIRECTORY).join(FINISHED_FILE)
    }

    /// A link to a directory of the generation: relative, so that the generation can be moved and mounted elsewhere.
    pub(super) fn link_directory(&self, link: &DirectoryLink) -> Result<()> {
        let path = self.file(&link.path);
        let target = relative(Path::new(&link.path), Path::new(&link.target));
        self.medium.symlink(&target, &path).map_err(|cause| failed("make", &path, &cause))
    }

    /// A further name of a file in it.
    pub(super) fn link_file(&self, from: &str, to: &str) -> Result<()> {
        let path = self.file(to);
        self.medium.link(&self.file(from), &path).map_err(|cause| failed("link", &path, &cause))
    }

    /// Writes what makes it whole, makes all of it outlive a crash, and gives it its name. `sums`: the text, and
    /// whether it stands at the top. `go_on` is asked between the syncs.
    ///
    /// The journal stays: until the new name is on disk it is what the next build goes by.
    pub(super) fn commit(
        &self,
        manifest: &[u8],
        sums: (&str, bool),
        go_on: &dyn Fn() -> Result<()>,
    ) -> Result<PathBuf> {
        let own = self.path.join(OUR_DIRECTORY);
        let (text, is_at_top) = sums;
        let place = if is_at_top { self.path.join(SUMS_FILE) } else { own.join(SUMS_FILE) };
        let sums_mode = if is_at_top { self.modes.file } else { self.modes.own };
        self.write_file(&place, text.as_bytes(), sums_mode)?;
        self.write_file(&own.join(MANIFEST_FILE), manifest, self.modes.own)?;
        for directory in self.directories.iter().rev() {
            go_on()?;
            self.medium.sync_directory(directory).map_err(|cause| failed("sync", directory, &cause))?;
        }
        crash::point("generation-manifest-written");
        let whole = self.root.join(self.entry.in_state(State::Whole).to_string());
        self.medium.rename(&self.path, &whole).map_err(|cause| failed("make", &whole, &cause))?;
        crash::point("generation-renamed");
        self.medium.sync_directory(self.root).map_err(|cause| failed("sync", self.root, &cause))?;
        crash::point("generation-committed");
        Ok(whole)
    }

    /// One of our own files, whole and synced.
    fn write_file(&self, path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
        let failed = |cause: io::Error| failed("write", path, &cause);
        let file = make_readable(self.medium, path, mode).map_err(failed)?;
        self.medium.write(&file, bytes, 0).map_err(failed)?;
        self.medium.sync_file(&file).map_err(failed)
    }
}

/// A file that we can read later, whatever the umask is.
pub(super) fn make_readable(medium: &dyn Medium, path: &Path, mode: u32) -> io::Result<File> {
    let file = medium.make_file(path, mode)?;
    let given = file.metadata()?.mode() & 0o777;
    if given & 0o400 == 0 {
        medium.set_mode(&file, given | 0o400)?;
    }
    Ok(file)
}

/// A directory that we can use, whatever the umask is.
fn make_directory(medium: &dyn Medium, path: &Path, mode: u32) -> Result<()> {
    let failed = |cause: io::Error| failed("make", path, &cause);
    medium.make_directory(path, mode).map_err(failed)?;
    let about = std::fs::metadata(path).map_err(failed)?;
    if about.mode() & 0o700 != 0o700 {
        let itself = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, itself, rustix::fs::Mode::empty());
        let directory = directory.map_err(|errno| failed(errno.into()))?;
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&directory));
        let mode = rustix::fs::Mode::from_raw_mode(about.mode() & 0o777 | 0o700);
        rustix::fs::chmod(path, mode).map_err(|errno| failed(errno.into()))?;
    }
    Ok(())
}

/// Every file and link in a directory and below, on its file system.
pub(super) fn files_in(path: &Path) -> Result<Vec<PathBuf>> {
    let failed = |cause: io::Error| failed("look through", path, &cause);
    let mut files = Vec::new();
    let device = std::fs::symlink_metadata(path).map_err(failed)?.dev();
    let mut left = vec![path.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let about = entry.metadata().map_err(failed)?;
            if about.dev() != device {
                continue;
            }
            if about.is_dir() { left.push(entry.path()) } else { files.push(entry.path()) }
        }
    }
    Ok(files)
}

/// What a link at `from` says to lead to `to`, both relative to the same directory.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let (mut from, mut to) = (from.components().peekable(), to.components().peekable());
    while from.peek().is_some() && from.peek() == to.peek() {
        from.next();
        to.next();
    }
    let up = from.count().saturating_sub(1);
    std::iter::repeat_n(Path::new(".."), up).map(Path::to_owned).chain([to.collect::<PathBuf>()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_from_where_they_stand() {
        let cases = [
            ("link", "original", "original"),
            ("a/link", "original", "../original"),
            ("a/link", "a/original", "original"),
            ("a/b/link", "a/c/d", "../c/d"),
            ("link", "a/b", "a/b"),
        ];
        for (from, to, expected) in cases {
            assert_eq!(relative(Path::new(from), Path::new(to)), Path::new(expected), "{from} {to}");
        }
    }
}
