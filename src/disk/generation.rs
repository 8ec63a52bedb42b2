//! One generation: opened, leased, and as something to load from.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use rustix::fs::{
    self, AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, UTIME_NOW,
};
use rustix::io::Errno;

use super::format::{Entry, LOCK_FILE, MANIFEST_FILE, OUR_DIRECTORY, State, USED_FILE};
use super::lock;
use super::manifest::{self, Fault, MANIFEST_BYTES_MAX};
use super::store::{Store, check_owner};
use super::sums;
use super::tree;
use super::verify;
use crate::error::{Error, Kind, Result, shown};
use crate::manifest::{Digest, FileEntry, Manifest};
use crate::registry::Name;
use crate::registry::dir::failed;
use crate::source::{Identity, SelectedFile, Selection, select};

/// A whole generation: its manifest was read and checked; its files are what verify looks at.
#[derive(Clone, Debug)]
pub struct Generation {
    path: PathBuf,
    name: Name,
    number: u64,
    manifest: Manifest,
    manifest_digest: Digest,
}

/// Keeps a generation from being removed while it is held: a shared lock.
#[derive(Debug)]
pub struct Lease {
    lock: OwnedFd,
}

impl Lease {
    /// The descriptor whose open description holds the lock: it may be handed on to a program that is executed.
    pub fn into_fd(self) -> OwnedFd {
        self.lock
    }
}

/// Why a directory is no generation that can be used.
#[derive(Debug)]
pub(super) enum Unfit {
    /// There is none, or it is nothing of ours.
    Absent(Error),
    /// It is of a version that this program does not know.
    Version(Error),
    /// It cannot be read, is damaged, or must not be trusted.
    Unreadable(Error),
}

impl From<Unfit> for Error {
    fn from(unfit: Unfit) -> Error {
        match unfit {
            Unfit::Absent(error) | Unfit::Version(error) | Unfit::Unreadable(error) => error,
        }
    }
}

impl Generation {
    /// The generation at `path`, absolute or relative, or the newest one of a name where `path` is `ROOT/NAME`.
    ///
    /// # Errors
    ///
    /// [`Kind::NotFound`] where there is none; [`Kind::Verification`] where its manifest is damaged, is of another
    /// version, or names paths that lead out.
    pub fn open(path: &Path) -> Result<Generation> {
        let none = |why: String| {
            Error::new(Kind::NotFound, why).hint("'iloader cache-list' shows those that there are")
        };
        let real = match std::fs::canonicalize(path) {
            Ok(real) => real,
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
                // The newest of a name has no path of its own.
                let parent = match path.parent() {
                    Some(parent) if !parent.as_os_str().is_empty() => parent,
                    _ => Path::new("."),
                };
                let root = std::fs::canonicalize(parent)
                    .map_err(|_| none(format!("there is no generation {}", shown(path))))?;
                path.file_name().map_or(root.clone(), |name| root.join(name))
            }
            Err(cause) => return Err(Error::io("open the generation", path, &cause)),
        };
        let (Some(root), Some(name)) = (real.parent(), real.file_name().and_then(OsStr::to_str)) else {
            return Err(none(format!("{} is no generation", shown(path))));
        };
        let store = Store::open(root)?;
        if let Some(entry) = Entry::parse(name) {
            if entry.state != State::Whole {
                return Err(none(format!(
                    "{} is no whole generation: an interrupted command left it",
                    shown(path)
                )));
            }
            return Ok(Generation::open_in(&store, &entry)?);
        }
        if let Ok(name) = name.parse::<Name>() {
            if let Some(newest) = store.newest(&name)? {
                return Ok(newest);
            }
            if let Some(damaged) = store.damaged(&name)? {
                return Err(damaged.error);
            }
        }
        Err(match real.exists() {
            true => none(format!("{} is no generation: those are called NAME@N", shown(path))),
            false => none(format!("there is no generation {}", shown(path))),
        })
    }

    /// Opens the generation of a root, every step by descriptor.
    pub(super) fn open_in(store: &Store, entry: &Entry) -> std::result::Result<Generation, Unfit> {
        let file_name = entry.to_string();
        let path = store.root().join(&file_name);
        let absent = |error: Error| Unfit::Absent(error.with_kind(Kind::NotFound));
        let root = store.open_root().map_err(Unfit::Unreadable)?;
        let directory = match tree::open_inside(&root, OsStr::new(&file_name)) {
            Ok(directory) => directory,
            Err(errno @ (Errno::NOENT | Errno::NOTDIR | Errno::LOOP)) => {
                let error = failed("open the generation", &path)(errno);
                return Err(absent(error.hint("'iloader cache-list' shows those that there are")));
            }
            Err(errno) => return Err(Unfit::Unreadable(failed("open the generation", &path)(errno))),
        };
        let ours = match tree::open_inside(&directory, OsStr::new(OUR_DIRECTORY)) {
            Ok(ours) => ours,
            Err(Errno::NOENT) => {
                let why = format!("{} is no generation: it has no {OUR_DIRECTORY}", shown(&path));
                return Err(Unfit::Absent(Error::new(Kind::NotFound, why)));
            }
            Err(errno) => {
                return Err(Unfit::Unreadable(failed("open", &path.join(OUR_DIRECTORY))(errno)));
            }
        };
        let owner = fs::fstat(&directory).map_err(failed("look at", &path)).map_err(Unfit::Unreadable)?;
        check_owner(&root, &owner, &path).map_err(Unfit::Unreadable)?;
        let (manifest, manifest_digest) = read_manifest(ours.as_fd(), &path)?;
        let lock_path = path.join(OUR_DIRECTORY).join(LOCK_FILE);
        if lock::is_strange(&lock_path) {
            let why = format!("the generation {}: its lock file is no regular file", shown(&path));
            let error = Error::new(Kind::Verification, why).hint("remove it with 'iloader cache-remove'");
            return Err(Unfit::Unreadable(error));
        }
        check_sum(directory.as_fd(), &path, &manifest, manifest_digest)?;
        if manifest.name != entry.name.as_str() {
            let why = format!(
                "{} has the manifest of a generation of {}",
                shown(&path),
                manifest::brief(&manifest.name)
            );
            let error = Error::new(Kind::Verification, why).hint("a generation keeps its name: move it back");
            return Err(Unfit::Unreadable(error));
        }
        Ok(Generation { path, name: entry.name.clone(), number: entry.number, manifest, manifest_digest })
    }

    /// Where it is, absolute and resolved through links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose it is.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Its number: later ones of a name have higher numbers.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// What it holds. `files` have the identity of the source's files at the copy, and their digests.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What its directory is called, and in which state.
    pub(super) fn entry(&self) -> Entry {
        Entry::whole(&self.name, self.number)
    }

    fn own_file(&self, name: &str) -> PathBuf {
        self.path.join(OUR_DIRECTORY).join(name)
    }

    /// The digest of the manifest's own file.
    pub fn manifest_digest(&self) -> Digest {
        self.manifest_digest
    }

    /// Takes a lease.
    ///
    /// # Errors
    ///
    /// [`Kind::NotFound`] where it was removed meanwhile.
    pub fn lease(&self) -> Result<Lease> {
        let path = self.own_file(LOCK_FILE);
        lock::shared(&path, || self.make_lock(&path))?.map(|lock| Lease { lock }).ok_or_else(|| {
            Error::new(Kind::NotFound, format!("the generation {} was just removed", shown(&self.path)))
                .hint("try again: there may be a newer one")
        })
    }

    /// Makes the lock file where somebody deleted it, in a generation that is there.
    fn make_lock(&self, path: &Path) -> Result<()> {
        if fs::lstat(&self.path).is_err() {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match fs::open(path, flags, self.file_mode(Mode::RUSR | Mode::RGRP | Mode::ROTH)) {
            Ok(_) => Ok(()),
            Err(Errno::NOENT | Errno::NOTDIR) if fs::lstat(&self.path).is_err() => Ok(()),
            Err(errno) => {
                Err(failed("make the missing lock file", path)(errno).with_kind(Kind::Verification))
            }
        }
    }

    /// The mode of a file of ours in it, before the umask.
    fn file_mode(&self, mode: Mode) -> Mode {
        let is_private = fs::stat(&self.path).is_ok_and(|found| found.st_mode & 0o077 == 0);
        if is_private { mode & Mode::RWXU } else { mode }
    }

    /// Whether anybody holds a lease, or removes it. Who takes a lease at this moment is not hindered.
    ///
    /// # Errors
    ///
    /// Where its lock file cannot be opened.
    pub fn is_leased(&self) -> Result<bool> {
        lock::is_held(&self.own_file(LOCK_FILE))
    }

    /// What it holds, as something to load from: paths and links of the manifest, each file the one on disk with the
    /// identity that it has there. `passthrough` of its files is as the patterns say.
    ///
    /// # Errors
    ///
    /// [`Kind::Verification`] where a file is missing, of another size or modification time, and where a link to a
    /// directory is missing or leads elsewhere.
    pub fn selection(&self, passthrough: &[String]) -> Result<Selection> {
        let paths = self.manifest.files.iter().map(|file| file.path.as_str());
        let passed = select::passed_through(passthrough, paths)?;
        let top = fs::open(
            &self.path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(failed("open the generation", &self.path))?;
        let mut files = Vec::with_capacity(self.manifest.files.len());
        // Files of one directory stand together, so that it is opened once.
        let mut opened: Option<(&str, OwnedFd)> = None;
        for (entry, passthrough) in self.manifest.files.iter().zip(passed) {
            let (parent, name) = entry.path.rsplit_once('/').unwrap_or(("", &entry.path));
            let stat = if parent.is_empty() {
                look_at(top.as_fd(), name)
            } else {
                if opened.as_ref().is_none_or(|(at, _)| *at != parent) {
                    let directory =
                        open_directory(&top, parent).map_err(|errno| self.wrong_file(entry, errno))?;
                    opened = Some((parent, directory));
                }
                opened.as_ref().map_or(Err(Errno::NOENT), |(_, directory)| look_at(directory.as_fd(), name))
            };
            let stat = stat.map_err(|errno| self.wrong_file(entry, errno))?;
            files.push(SelectedFile {
                path: entry.path.clone(),
                real: self.path.join(&entry.path),
                identity: self.identity_on_disk(entry, &stat)?,
                passthrough,
            });
        }
        self.check_links()?;
        let mut rules = self.manifest.selection.clone();
        rules.passthrough = passthrough.to_vec();
        Ok(Selection {
            root: self.path.clone(),
            rules,
            files,
            directory_links: self.manifest.directory_links.clone(),
            excluded: Vec::new(),
            warnings: Vec::new(),
        })
    }

    /// Each link to a directory must lead where the manifest says.
    fn check_links(&self) -> Result<()> {
        for link in &self.manifest.directory_links {
            let at = self.path.join(&link.path);
            let found = std::fs::symlink_metadata(&at).map_err(|cause| match cause.kind() {
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
                    self.damaged(&link.path, "it is missing")
                }
                _ => Error::io("look at", &at, &cause),
            })?;
            if let Some(finding) = verify::look_at_link(&link.path, found.file_type(), &at, &link.target) {
                return Err(self.damaged(&link.path, &finding.detail));
            }
        }
        Ok(())
    }

    /// The identity of a file of it, which must be what the manifest says.
    fn identity_on_disk(&self, entry: &FileEntry, stat: &Stat) -> Result<Identity> {
        let now = identity_of(stat);
        let noted = Identity::of_entry(entry).map(|noted| Identity {
            device: now.device,
            // The copy is another inode than the source's.
            inode: now.inode,
            ..noted
        });
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let differences = noted.map_or_else(Vec::new, |noted| noted.differences(&now));
        if is_file && differences.is_empty() {
            return Ok(now);
        }
        let why = if is_file { differences.join(", ") } else { "it is no regular file".to_owned() };
        Err(self.damaged(&entry.path, &why))
    }

    fn wrong_file(&self, entry: &FileEntry, errno: Errno) -> Error {
        match errno {
            Errno::NOENT => self.damaged(&entry.path, "it is missing"),
            Errno::NOTDIR | Errno::LOOP | Errno::XDEV => {
                self.damaged(&entry.path, "something else is in place of its directory")
            }
            errno => failed("look at", &self.path.join(&entry.path))(errno),
        }
    }

    fn damaged(&self, path: &str, why: &str) -> Error {
        let at = shown(self.path.join(path));
        Error::new(Kind::Verification, format!("{at} is not what its manifest says: {why}")).hint(format!(
            "'iloader verify {}' names all that is wrong; 'iloader cache' makes a new generation",
            shown(&self.path)
        ))
    }

    /// Notes that it is used now. That it cannot be noted, on a read-only root for one, is no error.
    pub fn mark_used(&self) {
        let path = self.own_file(USED_FILE);
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        if fs::utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW) != Err(Errno::NOENT) {
            return;
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let everybody = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
        // Made now, it has the time of now.
        let _ = fs::open(&path, flags, self.file_mode(everybody));
    }

    /// When it was used last, or made.
    pub fn last_used(&self) -> Timestamp {
        let created = self.manifest.created.parse().unwrap_or(Timestamp::UNIX_EPOCH);
        let used = fs::lstat(self.own_file(USED_FILE))
            .ok()
            .and_then(|found| Timestamp::new(found.st_mtime, i32::try_from(found.st_mtime_nsec).ok()?).ok());
        used.map_or(created, |used| used.max(created))
    }

    /// How long ago it was used last, or made. A clock that was set back makes it no less than nothing.
    pub fn idle(&self) -> Duration {
        let now = Timestamp::try_from(SystemTime::now()).unwrap_or(Timestamp::UNIX_EPOCH);
        Duration::try_from(now.duration_since(self.last_used())).unwrap_or(Duration::ZERO)
    }

    /// Everything that it holds: device, inode, and bytes on disk, blocks as allocated. What is linked into several
    /// generations is the same inode in each of them.
    ///
    /// # Errors
    ///
    /// Where a directory of it cannot be read.
    pub fn inodes(&self) -> Result<Vec<(u64, u64, u64)>> {
        let directory = fs::open(
            &self.path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(failed("open the generation", &self.path))?;
        let mut inodes: Vec<(u64, u64, u64)> = tree::walk(directory, &self.path)?
            .into_iter()
            .map(|found| (found.device, found.inode, found.bytes))
            .collect();
        inodes.sort_unstable();
        inodes.dedup();
        Ok(inodes)
    }
}

fn look_at(directory: BorrowedFd<'_>, name: &str) -> rustix::io::Result<Stat> {
    fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// Opens a directory of a generation, through no link on the way.
fn open_directory(top: &OwnedFd, path: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    match fs::openat2(top, path, flags, Mode::empty(), resolve) {
        // A sandbox may not know the call.
        Err(Errno::NOSYS | Errno::PERM) => {
            let mut parts = path.split('/');
            let first = fs::openat(top, parts.next().unwrap_or_default(), flags, Mode::empty())?;
            parts.try_fold(first, |directory, part| fs::openat(&directory, part, flags, Mode::empty()))
        }
        opened => opened,
    }
}

fn identity_of(stat: &Stat) -> Identity {
    Identity {
        device: stat.st_dev,
        inode: stat.st_ino,
        bytes: u64::try_from(stat.st_size).unwrap_or(0),
        mtime_seconds: stat.st_mtime,
        mtime_nanoseconds: u32::try_from(stat.st_mtime_nsec).ok().filter(|n| *n < 1_000_000_000).unwrap_or(0),
    }
}

/// Reads the manifest in the directory of our own files of the generation `path`.
fn read_manifest(ours: BorrowedFd<'_>, path: &Path) -> std::result::Result<(Manifest, Digest), Unfit> {
    let unreadable =
        |error: Error| Unfit::Unreadable(error.context(format!("the generation {}", shown(path))));
    let file_path = path.join(OUR_DIRECTORY).join(MANIFEST_FILE);
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match fs::openat(ours, MANIFEST_FILE, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(errno @ (Errno::NOENT | Errno::LOOP)) => {
            let error = failed("open its manifest", &file_path)(errno).with_kind(Kind::Verification);
            return Err(unreadable(error.hint("remove it with 'iloader cache-remove'")));
        }
        Err(errno) => return Err(unreadable(failed("open its manifest", &file_path)(errno))),
    };
    let found = file.metadata().map_err(|cause| unreadable(Error::io("look at", &file_path, &cause)))?;
    if !found.is_file() {
        let why = format!("{} is no regular file", shown(&file_path));
        return Err(unreadable(Error::new(Kind::Verification, why)));
    }
    if found.len() > MANIFEST_BYTES_MAX {
        return Err(unreadable(manifest::too_long(found.len())));
    }
    let mut bytes = Vec::new();
    file.take(MANIFEST_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|cause| unreadable(Error::io("read its manifest", &file_path, &cause)))?;
    let manifest = manifest::parse(&bytes).map_err(|fault| match fault {
        Fault::Version(error) => Unfit::Version(error.context(format!("the generation {}", shown(path)))),
        Fault::Damaged(error) => unreadable(error),
    })?;
    Ok((manifest, manifest::digest(&bytes)))
}

/// Refuses a manifest that is not the one that `SHA256SUMS` notes: a bit that fell over in it can still make sense.
/// That the sums are gone or say nothing of it is for verify to tell.
fn check_sum(
    directory: BorrowedFd<'_>,
    path: &Path,
    manifest: &Manifest,
    digest: Digest,
) -> std::result::Result<(), Unfit> {
    let place = sums::place(manifest);
    match last_line(directory, &place).as_deref().and_then(sums::of_manifest) {
        Some(noted) if noted != digest => {
            let why = format!(
                "the generation {}: its manifest has the SHA-256 {digest}, but {place} says {noted}",
                shown(path)
            );
            let error = Error::new(Kind::Verification, why).hint("remove it with 'iloader cache-remove'");
            Err(Unfit::Unreadable(error))
        }
        _ => Ok(()),
    }
}

/// The end of a file, long enough for the line of the manifest; `None` where there is no such file.
fn last_line(directory: BorrowedFd<'_>, place: &str) -> Option<Vec<u8>> {
    const BYTES_MAX: u64 = 256;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(fs::openat(directory, place, flags, Mode::empty()).ok()?);
    let bytes = file.metadata().ok().filter(std::fs::Metadata::is_file)?.len();
    let mut line = vec![0; usize::try_from(bytes.min(BYTES_MAX)).ok()?];
    file.read_exact_at(&mut line, bytes.saturating_sub(BYTES_MAX)).ok()?;
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::testing::Root;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    const FILES: &[(&str, &[u8])] =
        &[("config.json", b"{}"), ("a/b/one.safetensors", b"one"), ("a/two", b"two two"), ("empty", b"")];

    #[test]
    fn a_manifest_with_any_bit_changed_is_none() {
        let root = Root::new();
        let generation = root.add("m", 1, FILES);
        let at = generation.path().join(OUR_DIRECTORY).join(MANIFEST_FILE);
        let whole = std::fs::read(&at).unwrap();
        for (index, bit) in (0..whole.len()).map(|index| (index, 1 << (index % 8))) {
            let mut changed = whole.clone();
            changed[index] ^= bit;
            std::fs::write(&at, changed).unwrap();
            let error = Generation::open(generation.path()).expect_err("a changed manifest");
            assert_eq!(error.kind(), Kind::Verification, "byte {index}: {error}");
        }
        std::fs::write(&at, whole).unwrap();
        Generation::open(generation.path()).unwrap();
    }

    fn refused(path: &Path, kind: Kind, words: &str) {
        let error = Generation::open(path).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(words), "{error}");
        assert!(!error.message().contains('\n'), "{error}");
    }

    #[test]
    fn a_generation_is_opened_by_path_link_and_name() {
        let root = Root::new();
        root.add("m", 9, FILES);
        root.add("m", 10, FILES);
        root.add("n", 11, FILES);
        let newest = Generation::open(&root.path("m")).unwrap();
        assert_eq!((newest.name().as_str(), newest.number()), ("m", 10));
        assert_eq!(newest.path(), root.path("m@10"));
        assert_eq!(newest.manifest().bytes, 12);
        assert_eq!(Generation::open(&root.path("m@9/")).unwrap().number(), 9);
        let link = root.beside("link");
        symlink(root.path("m@9"), &link).unwrap();
        assert_eq!(Generation::open(&link).unwrap().path(), root.path("m@9"));
        // A directory that is called like a name is not in the way.
        std::fs::create_dir(root.path("n")).unwrap();
        assert_eq!(Generation::open(&root.path("n")).unwrap().number(), 11);
    }

    #[test]
    fn what_is_no_generation_is_said_to_be_none() {
        let root = Root::new();
        root.add_staging("m", 1, b"x");
        std::fs::create_dir(root.path("foreign@1")).unwrap();
        std::fs::create_dir(root.path("two words")).unwrap();
        std::fs::write(root.path("file@1"), "").unwrap();
        refused(&root.path("m@1"), Kind::NotFound, "m@1");
        refused(&root.path("m"), Kind::NotFound, "there is no generation");
        refused(&root.path(".m@1.staging"), Kind::NotFound, "interrupted");
        refused(&root.path("foreign@1"), Kind::NotFound, "no .iloader");
        refused(&root.path("file@1"), Kind::NotFound, "file@1");
        refused(&root.path("two words"), Kind::NotFound, "NAME@N");
        refused(&root.path("missing/m"), Kind::NotFound, "there is no generation");
        refused(Path::new("/"), Kind::NotFound, "is no generation");
        refused(Path::new("nowhere-to-be-seen"), Kind::NotFound, "there is no generation");
    }

    #[test]
    fn a_manifest_that_cannot_be_trusted_is_refused() {
        let root = Root::new();
        let generation = root.add("m", 1, FILES);
        let path = generation.own_file(MANIFEST_FILE);
        let text = std::fs::read_to_string(&path).unwrap();
        // Whoever forges one can forge the sums, too.
        std::fs::remove_file(root.path("m@1/SHA256SUMS")).unwrap();
        let with = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            std::fs::write(&path, text.replace(from, to)).unwrap();
        };
        with("\"schema\": 1", "\"schema\": 2, \"files\": 5, \"unheard-of\": []");
        refused(generation.path(), Kind::Verification, "version 2");
        with("a/two", "a/../../../etc/passwd");
        refused(generation.path(), Kind::Verification, "leads elsewhere");
        with("\"name\": \"m\"", "\"name\": \"other\"");
        refused(generation.path(), Kind::Verification, "of other");
        with("\"bytes\": 12", "\"bytes\": 13");
        refused(generation.path(), Kind::Verification, "12 bytes, but it says 13");
        std::fs::write(&path, &text[..text.len() / 2]).unwrap();
        refused(generation.path(), Kind::Verification, "damaged");
        std::fs::File::create(&path).unwrap().set_len(MANIFEST_BYTES_MAX + 1).unwrap();
        refused(generation.path(), Kind::Verification, "are the most");
        std::fs::remove_file(&path).unwrap();
        refused(generation.path(), Kind::Verification, "manifest");
        // A planted link is not followed, wherever it leads.
        let elsewhere = root.beside("elsewhere.json");
        std::fs::write(&elsewhere, &text).unwrap();
        symlink(&elsewhere, &path).unwrap();
        refused(generation.path(), Kind::Verification, "manifest");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, text.replace("\"schema\": 1", "\"schema\": 1, \"later\": true")).unwrap();
        Generation::open(generation.path()).unwrap();
        std::fs::rename(root.path("m@1/.iloader"), root.beside("ours")).unwrap();
        symlink(root.beside("ours"), root.path("m@1/.iloader")).unwrap();
        assert!(Generation::open(generation.path()).is_err(), "a link in place of our directory");
    }

    #[test]
    fn a_selection_is_what_is_on_disk() {
        let root = Root::new();
        let made = root.add_linked("m", 1, FILES, &[("c", "a")]);
        std::fs::remove_file(made.path().join("a/two")).unwrap();
        std::fs::hard_link(made.path().join("config.json"), made.path().join("a/two")).unwrap();
        let error = made.selection(&[]).unwrap_err();
        assert_eq!(error.kind(), Kind::Verification);
        assert!(error.message().contains("a/two") && error.message().contains("size 7 → 2"), "{error}");
        assert!(error.hint_text().unwrap().contains("iloader verify"));

        let generation = root.add_linked("m", 2, FILES, &[("c", "a")]);
        let selection = generation.selection(&["a/b/".to_owned(), "empty".to_owned()]).unwrap();
        assert_eq!(selection.root, generation.path());
        assert_eq!(selection.directory_links, generation.manifest().directory_links);
        let seen: Vec<(&str, u64, bool)> = selection
            .files
            .iter()
            .map(|file| (file.path.as_str(), file.identity.bytes, file.passthrough))
            .collect();
        assert_eq!(
            seen,
            [
                ("a/b/one.safetensors", 3, true),
                ("a/two", 7, false),
                ("config.json", 2, false),
                ("empty", 0, true)
            ]
        );
        for file in &selection.files {
            let found = std::fs::metadata(&file.real).unwrap();
            assert_eq!(file.identity, Identity::of(&found));
        }
        assert_eq!(generation.selection(&["[".to_owned()]).unwrap_err().kind(), Kind::Usage);
    }

    #[test]
    fn files_that_changed_on_disk_are_named() {
        let root = Root::new();
        let mut number = 0;
        let mut broken = |what: &dyn Fn(&Path), words: &str| {
            number += 1;
            let generation = root.add("m", number, FILES);
            what(generation.path());
            let error = generation.selection(&[]).unwrap_err();
            assert_eq!(error.kind(), Kind::Verification, "{error}");
            assert!(error.message().contains(words), "{error}");
        };
        broken(&|at| std::fs::remove_file(at.join("a/two")).unwrap(), "it is missing");
        broken(&|at| std::fs::remove_dir_all(at.join("a")).unwrap(), "it is missing");
        broken(&|at| std::fs::write(at.join("empty"), "x").unwrap(), "size 0 → 1");
        broken(
            &|at| {
                std::fs::File::open(at.join("a/two"))
                    .unwrap()
                    .set_times(std::fs::FileTimes::new().set_modified(SystemTime::UNIX_EPOCH))
                    .unwrap()
            },
            "modified",
        );
        broken(
            &|at| {
                std::fs::rename(at.join("a/two"), at.join("x")).unwrap();
                symlink("../x", at.join("a/two")).unwrap();
            },
            "no regular file",
        );
        broken(
            &|at| {
                std::fs::rename(at.join("a"), at.join("x")).unwrap();
                symlink("x", at.join("a")).unwrap();
            },
            "something else is in place",
        );
    }

    #[test]
    fn leases_are_seen_and_end_with_their_descriptor() {
        let root = Root::new();
        let generation = root.add("m", 1, FILES);
        assert!(!generation.is_leased().unwrap());
        let one = generation.lease().unwrap();
        let two = generation.lease().unwrap();
        assert!(generation.is_leased().unwrap());
        drop(one);
        let handed_on = two.into_fd();
        assert!(generation.is_leased().unwrap());
        assert!(generation.lease().is_ok(), "asking disturbs nobody");
        drop(handed_on);
        assert!(!generation.is_leased().unwrap());
        std::fs::remove_file(generation.own_file(LOCK_FILE)).unwrap();
        let _made_again = generation.lease().unwrap();
        assert!(generation.is_leased().unwrap());
        std::fs::remove_dir_all(generation.path()).unwrap();
        assert_eq!(generation.lease().unwrap_err().kind(), Kind::NotFound);
    }

    #[test]
    fn use_is_noted_by_the_time_of_a_file() {
        let root = Root::new();
        let generation = root.add("m", 1, FILES);
        assert_eq!(generation.last_used().to_string(), generation.manifest().created);
        assert!(!generation.own_file(USED_FILE).exists());
        generation.mark_used();
        assert!(generation.idle() < Duration::from_secs(60));
        let set = |time| {
            let file = std::fs::File::options().write(true).open(generation.own_file(USED_FILE)).unwrap();
            file.set_times(std::fs::FileTimes::new().set_modified(time)).unwrap();
        };
        set(SystemTime::now() - Duration::from_secs(100));
        assert!((100..160).contains(&generation.idle().as_secs()), "{:?}", generation.idle());
        set(SystemTime::now() + Duration::from_secs(86_400));
        assert_eq!(generation.idle(), Duration::ZERO, "the clock was set back");
        generation.mark_used();
        set(SystemTime::UNIX_EPOCH);
        assert_eq!(generation.last_used().to_string(), generation.manifest().created);
    }

    #[test]
    fn a_link_to_a_directory_must_lead_where_the_manifest_says() {
        let root = Root::new();
        let generation = root.add_linked("m", 1, &[("v1/f", b"1"), ("v2/f", b"2")], &[("latest", "v1")]);
        generation.selection(&[]).unwrap();
        let link = generation.path().join("latest");
        let wrong = |expected: &str| {
            let error = generation.selection(&[]).unwrap_err();
            assert_eq!(error.kind(), Kind::Verification);
            assert!(error.message().contains(expected), "{error}");
            assert!(error.hint_text().unwrap().contains("iloader verify"));
        };
        std::fs::remove_file(&link).unwrap();
        wrong("it is missing");
        for target in ["/etc", "v2", "../m@1/v1"] {
            std::os::unix::fs::symlink(target, &link).unwrap();
            wrong(&format!("leads to {target}"));
            std::fs::remove_file(&link).unwrap();
        }
        std::fs::create_dir(&link).unwrap();
        wrong("stands where a link");
    }

    #[test]
    fn a_lock_that_is_no_file_is_damage_and_hinders_no_removal() {
        let root = Root::new();
        type Make = fn(&Path);
        let makes: [Make; 3] = [
            |at| std::os::unix::fs::symlink("/etc/passwd", at).unwrap(),
            |at| fs::mknodat(CWD, at, FileType::Fifo, Mode::RUSR, 0).unwrap(),
            |at| std::fs::create_dir(at).unwrap(),
        ];
        for make in makes {
            let generation = root.add("m", 1, &[("f", b"1")]);
            let lock = generation.own_file(LOCK_FILE);
            std::fs::remove_file(&lock).unwrap();
            make(&lock);
            assert!(root.store.newest(generation.name()).unwrap().is_none());
            let error = Generation::open(&root.path("m")).unwrap_err();
            assert_eq!(error.kind(), Kind::Verification, "{error}");
            let error = Generation::open(generation.path()).unwrap_err();
            assert_eq!(error.kind(), Kind::Verification);
            let listing = root.store.list().unwrap();
            let error = &listing.unreadable[0].error;
            assert!(error.message().contains("its lock file is no regular file"), "{error}");
            assert!(error.hint_text().unwrap().contains("cache-remove"));
            root.store.remove_unreadable(&listing.unreadable[0]).unwrap();
            assert!(!generation.path().exists());
        }
    }

    #[test]
    fn linked_files_are_one_inode() {
        let root = Root::new();
        let generation = root.add("m", 1, &[("one", &[7; 10_000])]);
        let before = generation.inodes().unwrap();
        std::fs::hard_link(generation.path().join("one"), generation.path().join("two")).unwrap();
        assert_eq!(generation.inodes().unwrap().len(), before.len());
        let found = std::fs::metadata(generation.path().join("one")).unwrap();
        assert!(before.contains(&(found.dev(), found.ino(), found.blocks() * 512)));
        std::fs::set_permissions(generation.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    }
}
