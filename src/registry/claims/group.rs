//! The claims of a group, seen and changed by the one process that has locked it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{self, AtFlags, CWD, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::{Claims, Terms};
use crate::error::{Error, Kind, Result, shown};
use crate::registry::dir::{self, failed};
use crate::registry::lock::Lock;
use crate::units::ByteSize;

/// The longest file that a group keeps.
const KEPT_BYTES_MAX: u64 = 4096;

/// How often a claim that does not read well is read again, and the pause in between: its holder may be just
/// rewriting it, which takes microseconds.
const READS_MAX: u32 = 50;
const READ_PAUSE: Duration = Duration::from_millis(1);

/// A group that this process has locked. When it is dropped, the lock file goes too where nothing else is left.
#[derive(Debug)]
pub struct Group<'a> {
    claims: &'a Claims,
    /// Until the drop.
    lock: Option<Lock>,
    notes: Vec<String>,
}

/// What a file with the name of a claim turns out to be.
enum Found {
    /// Its holder lives.
    Live(Terms),
    /// Its holder has ended. What it said, where that can be read.
    Dead(Option<Terms>),
    /// It went away meanwhile.
    Gone,
    /// No claim of this user, for this reason: what others plant is not counted.
    Strange(String),
}

impl<'a> Group<'a> {
    pub(super) fn new(claims: &'a Claims, lock: Lock) -> Group<'a> {
        Group { claims, lock: Some(lock), notes: Vec::new() }
    }

    /// Every claim whose holder lives, in no order. What dead ones left is removed, which
    /// [`Group::take_notes`] tells of.
    ///
    /// # Errors
    ///
    /// Where the directory cannot be read, or a live claim makes no sense: its amount is never guessed.
    pub fn live(&mut self) -> Result<Vec<Terms>> {
        self.examine_all(true)
    }

    /// The same, but nothing is removed.
    ///
    /// # Errors
    ///
    /// As [`Group::live`].
    pub fn peek(&mut self) -> Result<Vec<Terms>> {
        self.examine_all(false)
    }

    fn examine_all(&mut self, removes_dead: bool) -> Result<Vec<Terms>> {
        let mut live = Vec::new();
        for path in self.claim_files()? {
            match examine(&path)? {
                Found::Live(terms) => live.push(terms),
                Found::Dead(terms) if removes_dead => self.remove_dead(&path, terms),
                Found::Dead(_) | Found::Gone => {}
                Found::Strange(why) => self.notes.push(format!("{} is left alone: {why}", shown(&path))),
            }
        }
        if removes_dead {
            self.remove_half_written();
        }
        Ok(live)
    }

    fn remove_dead(&mut self, path: &Path, terms: Option<Terms>) {
        let what = match terms {
            Some(Terms { bytes, name, pid, .. }) => {
                format!("{} of '{}' (process {pid}, which has ended)", ByteSize(bytes), name.escape_debug())
            }
            None => format!("the claim {} of a process that has ended", shown(path)),
        };
        self.notes.push(match fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => format!("freed {what}"),
            // It counts no more, whether or not its file stays.
            Err(errno) => failed("remove", path)(errno).message().to_owned(),
        });
    }

    /// Removes what a process left that was killed while it wrote the kept file.
    fn remove_half_written(&mut self) {
        let kept = self.claims.kept_name();
        for name in self.names().unwrap_or_default() {
            if dir::is_temporary_name(name.as_bytes(), &kept, "tmp") {
                let _ = fs::unlink(self.claims.directory.join(name));
            }
        }
    }

    fn names(&self) -> Result<Vec<std::ffi::OsString>> {
        let directory = &self.claims.directory;
        let failed = |cause| Error::io("read the directory", directory, &cause);
        let entries = std::fs::read_dir(directory).map_err(failed)?;
        entries.map(|entry| entry.map(|entry| entry.file_name()).map_err(failed)).collect()
    }

    fn claim_files(&self) -> Result<Vec<PathBuf>> {
        let stem = OsStr::new(&self.claims.stem);
        let mut names = self.names()?;
        names.retain(|name| dir::is_temporary_name(name.as_bytes(), stem, "claim"));
        Ok(names.into_iter().map(|name| self.claims.directory.join(name)).collect())
    }

    /// What was removed or left alone since the last call, in words.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Adds a claim of this process. It counts until the value is dropped or the process ends.
    ///
    /// # Errors
    ///
    /// Where the directory cannot be written or is full. Nothing is then left.
    pub fn add(&self, terms: &Terms) -> Result<Claim> {
        let name = dir::temporary_name(OsStr::new(&self.claims.stem), "claim");
        let name = name.map_err(failed("make a file in", &self.claims.directory))?;
        let path = self.claims.directory.join(OsStr::from_bytes(&name));
        let Some(lock) = Lock::try_exclusive(&path)? else {
            return Err(failed("lock", &path)(Errno::BUSY));
        };
        if let Err(error) = write(&lock, terms) {
            // The first error is the one to tell.
            let _ = lock.remove_and_release();
            return Err(error);
        }
        Ok(Claim { lock: Some(lock), claims: self.claims.clone() })
    }

    /// What the group keeps beside its claims, or `None`.
    ///
    /// # Errors
    ///
    /// Where it cannot be read, is no regular file of this user, or is longer than anything we write.
    pub fn kept(&self) -> Result<Option<Vec<u8>>> {
        let path = self.claims.kept_file();
        let refuse = |why: &str| Err(Error::new(Kind::Failed, format!("{} {why}", shown(&path))));
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match fs::open(&path, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => return refuse("is a symbolic link"),
            opened => opened.map_err(failed("open", &path))?,
        };
        let found = fs::fstat(&file).map_err(failed("look at", &path))?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return refuse("is not a regular file");
        }
        if found.st_uid != dir::our_uid() {
            return refuse(&format!("belongs to uid {}, not to you (uid {})", found.st_uid, dir::our_uid()));
        }
        let mut bytes = Vec::new();
        File::from(file)
            .take(KEPT_BYTES_MAX + 1)
            .read_to_end(&mut bytes)
            .map_err(|cause| Error::io("read", &path, &cause))?;
        if bytes.len() as u64 > KEPT_BYTES_MAX {
            return refuse(&format!("is longer than {KEPT_BYTES_MAX} bytes"));
        }
        Ok(Some(bytes))
    }

    /// Keeps `bytes`, in place of what was kept, or nothing where it is `None`. The change is whole or none.
    ///
    /// # Errors
    ///
    /// Where the directory cannot be written or is full.
    pub fn keep(&self, bytes: Option<&[u8]>) -> Result<()> {
        let path = self.claims.kept_file();
        let Some(bytes) = bytes else {
            return match fs::unlink(&path) {
                Ok(()) | Err(Errno::NOENT) => Ok(()),
                Err(errno) => Err(failed("remove", &path)(errno)),
            };
        };
        let directory = &self.claims.directory;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened =
            fs::open(directory, flags, Mode::empty()).map_err(failed("open the directory", directory))?;
        dir::replace_file(opened, &self.claims.kept_name(), bytes).map_err(failed("write", &path))
    }

    /// Whether nothing of the group is left but its lock.
    fn is_empty(&self) -> bool {
        let lock = self.claims.lock_file();
        let is_lock = |name: &OsStr| lock.file_name() == Some(name);
        self.names()
            .is_ok_and(|names| !names.iter().any(|name| self.claims.is_of_group(name) && !is_lock(name)))
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        let Some(lock) = self.lock.take() else { return };
        if !self.is_empty() {
            return;
        }
        // Who waits for the lock opens the file anew at each attempt, and does not take one without a name.
        if lock.remove_and_release().is_ok() && self.claims.owns_directory {
            // It stays where somebody else has made something in it by now.
            let _ = fs::rmdir(&self.claims.directory);
        }
    }
}

/// Looks at one claim. Its holder locked it before it could be seen, and nobody locks it exclusively later: once
/// its lock is free, its holder has ended.
fn examine(path: &Path) -> Result<Found> {
    let found = match fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(Found::Gone),
        found => found.map_err(failed("look at", path))?,
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Ok(Found::Strange("it is not a regular file".to_owned()));
    }
    if found.st_uid != dir::our_uid() {
        return Ok(Found::Strange(format!("it belongs to uid {}", found.st_uid)));
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match fs::open(path, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(Found::Gone),
        opened => opened.map_err(failed("open the claim", path))?,
    };
    for _ in 0..READS_MAX {
        let is_dead = match fs::flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => true,
            Err(Errno::WOULDBLOCK) => false,
            Err(errno) => return Err(failed("lock the claim", path)(errno)),
        };
        match (read(&file, path), is_dead) {
            (Ok(terms), false) => return Ok(Found::Live(terms)),
            (terms, true) => return Ok(Found::Dead(terms.ok())),
            (Err(_), false) => std::thread::sleep(READ_PAUSE),
        }
    }
    let what = format!("the claim {} is held, and cannot be understood", shown(path));
    Err(Error::new(Kind::Failed, what)
        .hint(format!("'fuser {}' names the process that holds it; stop its cache", shown(path))))
}

fn read(file: impl AsFd, path: &Path) -> Result<Terms> {
    let mut bytes = [0; Terms::BYTES_MAX + 1];
    let count = rustix::io::pread(file, &mut bytes, 0).map_err(failed("read the claim", path))?;
    Terms::parse(&bytes[..count])
}

/// Writes a claim in place, by one write.
fn write(lock: &Lock, terms: &Terms) -> Result<()> {
    let bytes = terms.encode();
    match rustix::io::pwrite(lock, &bytes, 0) {
        Ok(count) if count == bytes.len() => Ok(()),
        Ok(_) => Err(failed("write the claim", lock.path())(Errno::NOSPC)),
        Err(errno) => Err(failed("write the claim", lock.path())(errno)),
    }
}

/// A claim of this process. It ends when this is dropped, or with the process.
#[derive(Debug)]
pub struct Claim {
    /// Until the drop.
    lock: Option<Lock>,
    claims: Claims,
}

impl Claim {
    /// Rewrites it. Cheap enough to be done often. To claim less needs no lock of the group; to claim more, or to
    /// propose something, does.
    ///
    /// # Errors
    ///
    /// Where the file cannot be written. The claim then counts for what it said before, or cannot be understood,
    /// which has others wait or fail but never count less.
    pub fn rewrite(&self, terms: &Terms) -> Result<()> {
        self.lock.as_ref().map_or(Ok(()), |lock| write(lock, terms))
    }

    /// The group that it belongs to.
    pub fn claims(&self) -> &Claims {
        &self.claims
    }

    /// Whether others still find it: not so once its directory was removed or cleaned.
    pub fn is_in_place(&self) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.is_in_place().unwrap_or(false))
    }

    /// Has it held at the descriptor `seat` from now on.
    pub fn take_seat(&mut self, seat: Seat) {
        if let Some(lock) = &mut self.lock {
            lock.move_to(seat.0);
        }
    }

    /// Ends as a crash does: the lock is let go of, and the file stays.
    #[cfg(test)]
    pub(crate) fn crash(mut self) {
        drop(self.lock.take());
    }
}

/// A descriptor kept free for a claim, to be taken before any that the claim is to outlive.
///
/// When a process is killed, the kernel lets go of its files in the order of their numbers, the highest first. A
/// claim on memory must be let go of after the memory, so that it needs a lower number than every memory file.
#[derive(Debug)]
pub struct Seat(OwnedFd);

impl Seat {
    /// The lowest free descriptor; `None` where there is none any more.
    pub fn lowest() -> Option<Seat> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        fs::open("/", flags, Mode::empty()).ok().map(Seat)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(lock) = self.lock.take() {
            // Whether or not its file can be removed, it counts no more.
            let _ = lock.remove_and_release();
            self.claims.tidy();
        }
    }
}
