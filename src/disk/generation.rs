//! One generation: opened, leased, and as something to load from.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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
use super::tree;
use crate::error::{Error, Kind, Result, shown};
use crate::manifest::{FileEntry, Manifest};
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
        let newest = match name.parse::<Name>() {
            Ok(name) => store.newest(&name)?,
            Err(_) => None,
        };
        newest.ok_or_else(|| match real.exists() {
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
                return Err(absent(failed("open the generation", &path)(errno)));
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
        let manifest = read_manifest(ours.as_fd(), &path)?;
        if manifest.name != entry.name.as_str() {
            let why = format!(
                "{} has the manifest of a generation of {}",
                shown(&path),
                manifest::brief(&manifest.name)
            );
            let error = Error::new(Kind::Verification, why).hint("a generation keeps its name: move it back");
            return Err(Unfit::Unreadable(error));
        }
        Ok(Generation { path, name: entry.name.clone(), number: entry.number, manifest })
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
    /// [`Kind::Verification`] where a file is missing, of another size or modification time.
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
fn read_manifest(ours: BorrowedFd<'_>, path: &Path) -> std::result::Result<Manifest, Unfit> {
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
    manifest::parse(&bytes).map_err(|fault| match fault {
        Fault::Version(error) => Unfit::Version(error.context(format!("the generation {}", shown(path)))),
        Fault::Damaged(error) => unreadable(error),
    })
}
