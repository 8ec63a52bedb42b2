//! Claims: amounts of something that processes share, each counted for exactly as long as its holder lives.
//!
//! A claim is a small file in a directory that all who share know, and it counts while its holder keeps it
//! locked. So the kernel takes a claim back however its holder ends, and nothing asks about a pid. The holder
//! rewrites it in place; what a dead one left is removed by whoever looks next.
//!
//! Looking and adding happen under the group's own lock, one process at a time: whoever decides by the sum of
//! the claims adds its own before anybody else can look.
//!
//! ```text
//! .quota-<uid>.lock            the group's lock
//! .quota-<uid>.<random>.claim  one claim, locked by its holder
//! .quota-<uid>.json            what the group keeps beside them, for the quota
//! ```
//!
//! The user is a part of the names because the directory may be one that users share: a socket may be told to
//! be in `/tmp`. What somebody else planted there under such a name is no claim, and never counted as one.

mod group;
mod terms;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{self, AtFlags, CWD, FileType, Mode};
use rustix::io::Errno;

use super::dir::{self, DIRECTORY_MODE};
use super::lock::Lock;
use crate::error::{Error, Kind, Result, reason, shown};

pub use group::{Claim, Group, Seat};
pub use terms::{ChargedGroup, Terms};

/// How long the group's lock is waited for. Who holds it reads a few small files.
const PATIENCE: Duration = Duration::from_secs(10);

/// The same for tidying up, which can be left to the next one.
const TIDYING_PATIENCE: Duration = Duration::from_secs(2);

/// The pause between two attempts to take it.
const PAUSE: Duration = Duration::from_millis(1);

/// Memory's own file system, which every process of a user sees whatever its BASE.
const SHARED_MEMORY: &str = "/dev/shm";

/// The claims of one purpose in one directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claims {
    directory: PathBuf,
    /// The common part of the names: `quota-1000`.
    stem: String,
    /// The directory is there for the claims alone: made with the first of them, removed with the last.
    owns_directory: bool,
}

impl Claims {
    /// Shares of the quota of the quota group `directory`, where the control sockets of its caches are.
    pub fn of_quota(directory: &Path) -> Claims {
        Claims {
            directory: directory.to_owned(),
            stem: format!("quota-{}", dir::outer_uid()),
            owns_directory: false,
        }
    }

    /// Promises of memory to the starts of this user, whatever their BASE; and, where they can only be counted
    /// in `run_dir`, the `run` of one BASE, the reason.
    pub fn of_promises(run_dir: &Path) -> (Claims, Option<String>) {
        Claims::of_promises_under(Path::new(SHARED_MEMORY), run_dir)
    }

    /// Those promises where they are counted for the whole user, and there are some. Makes nothing.
    pub fn standing_promises() -> Option<Claims> {
        let root = Path::new(SHARED_MEMORY);
        let directory = user_directory(root);
        let stem = format!("promises-{}", dir::outer_uid());
        let is_there = check_user_directory(root, &directory) == Ok(true);
        is_there.then_some(Claims { directory, stem, owns_directory: true })
    }

    fn of_promises_under(root: &Path, run_dir: &Path) -> (Claims, Option<String>) {
        let stem = format!("promises-{}", dir::outer_uid());
        let directory = user_directory(root);
        let why = loop {
            match make_user_directory(&directory).and_then(|()| check_user_directory(root, &directory)) {
                Ok(true) => return (Claims { directory, stem, owns_directory: true }, None),
                // The last holder of a promise removed it in between.
                Ok(false) => {}
                Err(why) => break why,
            }
        };
        (Claims { directory: run_dir.to_owned(), stem, owns_directory: false }, Some(why))
    }

    /// The file that the group keeps beside its claims. Written and read under the group's lock.
    pub fn kept_file(&self) -> PathBuf {
        self.directory.join(self.kept_name())
    }

    fn kept_name(&self) -> OsString {
        format!(".{}.json", self.stem).into()
    }

    fn lock_file(&self) -> PathBuf {
        self.directory.join(format!(".{}.lock", self.stem))
    }

    /// Takes the group's lock, for looking and adding.
    ///
    /// # Errors
    ///
    /// [`Kind::TimedOut`] where somebody keeps it for seconds; others where the directory cannot be written, or
    /// somebody else's file has the lock's name.
    pub fn lock(&self) -> Result<Group<'_>> {
        self.lock_within(PATIENCE)
    }

    fn lock_within(&self, patience: Duration) -> Result<Group<'_>> {
        let deadline = Instant::now() + patience;
        loop {
            self.check_own_directory()?;
            match Lock::try_exclusive(&self.lock_file()) {
                Ok(Some(lock)) => return Ok(Group::new(self, lock)),
                // The last holder of a claim removed the directory just now.
                Err(error) if error.kind() == Kind::NotFound && self.owns_directory => {
                    make_user_directory(&self.directory).map_err(|why| Error::new(Kind::Failed, why))?;
                }
                Err(error) => return Err(error),
                Ok(None) => {}
            }
            if Instant::now() >= deadline {
                return Err(self.kept_locked(patience));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// In the root of a directory of its own everybody may make names: what is there now need not be what was there
    /// before.
    fn check_own_directory(&self) -> Result<()> {
        let Some(root) = self.directory.parent().filter(|_| self.owns_directory) else { return Ok(()) };
        check_user_directory(root, &self.directory).map(drop).map_err(|why| Error::new(Kind::Failed, why))
    }

    fn kept_locked(&self, patience: Duration) -> Error {
        let lock = shown(self.lock_file());
        let seconds = patience.as_secs();
        Error::new(Kind::TimedOut, format!("another command has kept {lock} locked for {seconds} seconds"))
            .hint(format!("it may be stopped or hang: 'fuser {lock}' names it"))
    }

    /// Whether there is nothing of the group, so that nobody has a claim and nothing is kept.
    pub fn are_absent(&self) -> bool {
        match std::fs::read_dir(&self.directory) {
            Ok(entries) => !entries.flatten().any(|entry| self.is_of_group(&entry.file_name())),
            // What else is wrong is met again, with its reason, by who looks.
            Err(cause) => cause.kind() == std::io::ErrorKind::NotFound,
        }
    }

    /// Removes what dead holders left; a line for each. Makes nothing where there is nothing.
    ///
    /// # Errors
    ///
    /// As [`Claims::lock`] and [`Group::live`].
    pub fn sweep(&self) -> Result<Vec<String>> {
        if self.are_absent() {
            return Ok(Vec::new());
        }
        let mut group = self.lock()?;
        group.live()?;
        Ok(group.take_notes())
    }

    /// Removes the group's lock, and a directory of its own, where nothing else is left. What fails is left to
    /// the next one.
    fn tidy(&self) {
        if !self.directory.exists() {
            return;
        }
        if let Ok(group) = self.lock_within(TIDYING_PATIENCE) {
            drop(group);
        }
    }

    fn is_of_group(&self, name: &OsStr) -> bool {
        let name = name.as_encoded_bytes();
        // A half-written kept file has one dot more.
        [format!(".{}.", self.stem), format!("..{}.", self.stem)]
            .iter()
            .any(|prefix| name.starts_with(prefix.as_bytes()))
    }
}

/// Removes what dead starts left of the user's promises, and of those in `run_dir`.
pub(super) fn sweep_promises(run_dir: &Path) {
    let stem = format!("promises-{}", dir::outer_uid());
    let root = Path::new(SHARED_MEMORY);
    let common = user_directory(root);
    let places = [(run_dir, false), (common.as_path(), true)];
    for (directory, owns_directory) in places {
        if owns_directory && check_user_directory(root, directory) != Ok(true) {
            continue;
        }
        // They are counted no more; that their files stay for the next start is no matter for a message.
        let _ = Claims { directory: directory.to_owned(), stem: stem.clone(), owns_directory }.sweep();
    }
}

/// Where the promises of this user are.
fn user_directory(root: &Path) -> PathBuf {
    root.join(format!("iloader-{}", dir::outer_uid()))
}

fn make_user_directory(directory: &Path) -> std::result::Result<(), String> {
    let failed = |errno: Errno| {
        format!("cannot create {}: {}", shown(directory), reason(&std::io::Error::from(errno)))
    };
    match fs::mkdir(directory, DIRECTORY_MODE) {
        // A umask may have taken our own bits away. In a directory that passes the check below nobody else can
        // have replaced it.
        Ok(()) => match fs::chmodat(CWD, directory, DIRECTORY_MODE, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(failed(errno)),
        },
        Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

/// Whether `directory`, in `root` where everybody may create names, is there; or why it cannot be trusted: it must
/// be a directory and no link, ours, and nobody else's to write to or to replace.
fn check_user_directory(root: &Path, directory: &Path) -> std::result::Result<bool, String> {
    let failed = |path: &Path, errno: Errno| {
        format!("cannot use {}: {}", shown(path), reason(&std::io::Error::from(errno)))
    };
    let around = fs::stat(root).map_err(|errno| failed(root, errno))?;
    let is_sticky = Mode::from_raw_mode(around.st_mode).contains(Mode::SVTX);
    if dir::is_writable_by_others(&around) && !is_sticky {
        return Err(format!("{} lets others replace what is in it", shown(root)));
    }
    // One look is enough: what is ours, nobody else can replace in such a directory.
    let found = match fs::statat(CWD, directory, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(false),
        found => found.map_err(|errno| failed(directory, errno))?,
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
        return Err(format!("{} is not a directory", shown(directory)));
    }
    if found.st_uid != dir::our_uid() {
        return Err(format!("{} belongs to uid {}", shown(directory), found.st_uid));
    }
    if dir::is_writable_by_others(&found) {
        return Err(format!("{} is writable by others (mode {:o})", shown(directory), found.st_mode & 0o777));
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
