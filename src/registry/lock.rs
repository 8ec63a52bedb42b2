//! Liveness as a held lock: a daemon lives exactly as long as somebody holds its lock file.
//!
//! The lock is `flock`, exclusive. It belongs to the open file, so that the command that starts a daemon
//! takes it and hands it on as an inherited descriptor without a gap, and the kernel lets go of it
//! however the daemon ends.
//!
//! **Asking** whether it is held must not disturb who takes it. No call asks about a `flock` without
//! taking it (`F_OFD_GETLK` sees only its own kind, and `/proc/locks` hides other PID namespaces), so
//! [`is_held`] takes it *shared* for a moment. Who wants it exclusively and fails tries it shared in
//! turn: that fails exactly when somebody holds it exclusively; when it succeeds, only askers were in the
//! way, and the next attempt follows. So an asker is never taken for an owner.
//!
//! **The end** of an orderly daemon removes the file while the lock is held. Who opened it just before
//! then locks a file without a name; so whoever has locked it looks whether the path still leads to it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{self, AtFlags, FileType, FlockOperation, Mode, OFlags, inotify};
use rustix::io::Errno;

use super::dir::{self, FILE_MODE, Inode, failed};
use crate::error::{Error, Kind, Result, shown};

/// How often a lock is tried against askers and removals. Both pass in microseconds; only a storm of
/// them reaches the limit.
const ATTEMPTS_MAX: u32 = 2000;

/// The pause between two attempts.
const ATTEMPT_PAUSE: Duration = Duration::from_micros(500);

/// A lock that is held, until this value and every copy of its descriptor are closed.
#[derive(Debug)]
pub struct Lock {
    descriptor: OwnedFd,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock `path`, creating the file with mode 0600, or `None` where somebody holds it. The
    /// descriptor closes on `exec`.
    ///
    /// # Errors
    ///
    /// Where the file cannot be created or locked, is no regular file, or belongs to somebody else.
    pub fn try_exclusive(path: &Path) -> Result<Option<Lock>> {
        for _ in 0..ATTEMPTS_MAX {
            let flags = OFlags::RDWR | OFlags::CREATE;
            let Some(descriptor) = open(path, flags)? else { continue };
            match fs::flock(&descriptor, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if still_names(path, &descriptor)? => {
                    return Ok(Some(Lock { descriptor, path: path.to_owned() }));
                }
                Ok(()) | Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => {
                    if is_exclusive_elsewhere(&descriptor, path)? && still_names(path, &descriptor)? {
                        return Ok(None);
                    }
                    drop(descriptor);
                    std::thread::sleep(ATTEMPT_PAUSE);
                }
                Err(errno) => return Err(failed("lock", path)(errno)),
            }
        }
        Err(too_busy(path))
    }

    /// The descriptor that holds the lock, to be handed to a process that will hold it on.
    pub fn into_fd(self) -> OwnedFd {
        self.descriptor
    }

    /// The lock again, from a descriptor that was handed over with it held.
    ///
    /// # Errors
    ///
    /// Where `path` does not lead to that file, or somebody else holds its lock.
    pub fn from_fd(descriptor: OwnedFd, path: &Path) -> Result<Lock> {
        if !still_names(path, &descriptor)? {
            let error = format!("the lock file {} was removed or replaced", shown(path));
            return Err(Error::new(Kind::Failed, error));
        }
        // Taking what one holds succeeds and changes nothing.
        fs::flock(&descriptor, FlockOperation::NonBlockingLockExclusive).map_err(failed("lock", path))?;
        Ok(Lock { descriptor, path: path.to_owned() })
    }

    /// The lock file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Holds it by the descriptor `seat` from now on, in place of what that was; as before where that fails.
    pub(super) fn move_to(&mut self, mut seat: OwnedFd) {
        // A copy of the descriptor holds the same lock.
        if rustix::io::dup3(&self.descriptor, &mut seat, rustix::io::DupFlags::CLOEXEC).is_ok() {
            self.descriptor = seat;
        }
    }

    /// Whether the path still leads to the file that is locked: not so once BASE was removed or cleaned.
    ///
    /// # Errors
    ///
    /// Where the path cannot be looked at.
    pub fn is_in_place(&self) -> Result<bool> {
        still_names(&self.path, &self.descriptor)
    }

    /// Whether the file has no name any more, wherever BASE was moved to: nobody will ever find this lock.
    pub fn is_removed(&self) -> bool {
        fs::fstat(&self.descriptor).is_ok_and(|found| found.st_nlink == 0)
    }

    /// A descriptor that becomes readable when the file may have been removed; see [`Lock::is_removed`].
    ///
    /// # Errors
    ///
    /// Where the user has no watch left, or `/proc` is not mounted.
    pub fn watch_removal(&self) -> Result<OwnedFd> {
        let failed = |errno: Errno| {
            Error::io("watch for the removal of", &self.path, &errno.into())
                .hint("see fs.inotify.max_user_instances and fs.inotify.max_user_watches")
        };
        let watch =
            inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).map_err(failed)?;
        // By the descriptor: the path may lead elsewhere by now. While it is open the removal is a change of
        // the number of links, and the end of the file comes later than anybody waits for.
        let file = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
        inotify::add_watch(&watch, file, inotify::WatchFlags::ATTRIB).map_err(failed)?;
        Ok(watch)
    }

    /// Removes the file, then lets go: the orderly end. A file that is not ours any more stays.
    ///
    /// # Errors
    ///
    /// Where the file cannot be removed; the lock is let go of all the same.
    pub fn remove_and_release(self) -> Result<()> {
        if !self.is_in_place()? {
            return Ok(());
        }
        match fs::unlink(&self.path) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(failed("remove", &self.path)(errno)),
        }
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Whether somebody holds the lock `path`. Disturbs neither them nor who is about to take it. Somebody may be
/// a command that starts the daemon or cleans up after one, for as long as that takes.
///
/// # Errors
///
/// Where the file cannot be opened, is no regular file, or belongs to somebody else.
pub fn is_held(path: &Path) -> Result<bool> {
    for _ in 0..ATTEMPTS_MAX {
        let Some(descriptor) = open(path, OFlags::RDONLY)? else { return Ok(false) };
        let is_held = is_exclusive_elsewhere(&descriptor, path)?;
        // Held or not, it says nothing once the path leads elsewhere: the next owner has another file.
        if still_names(path, &descriptor)? {
            return Ok(is_held);
        }
    }
    Err(too_busy(path))
}

/// Whether somebody else holds the lock exclusively, found by taking it shared for a moment.
fn is_exclusive_elsewhere(descriptor: &OwnedFd, path: &Path) -> Result<bool> {
    match fs::flock(descriptor, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) => Ok(true),
        Ok(()) => {
            fs::flock(descriptor, FlockOperation::Unlock).map_err(failed("unlock", path))?;
            Ok(false)
        }
        Err(errno) => Err(failed("lock", path)(errno)),
    }
}

/// Opens the lock file, or `None` where it is absent or was removed in the meantime.
fn open(path: &Path, access: OFlags) -> Result<Option<OwnedFd>> {
    // NONBLOCK: a FIFO that somebody put there must not hold us up.
    let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let descriptor = match fs::open(path, flags, FILE_MODE) {
        Err(Errno::NOENT) if !access.contains(OFlags::CREATE) => return Ok(None),
        Err(Errno::LOOP) => return Err(foreign(path, "a symbolic link")),
        Err(Errno::ACCESS) => {
            let owner = fs::statat(fs::CWD, path, AtFlags::SYMLINK_NOFOLLOW).map(|found| found.st_uid);
            return Err(match owner {
                Ok(owner) if owner != dir::our_uid() => another_users(path, owner),
                _ => failed("open the lock file", path)(Errno::ACCESS),
            });
        }
        opened => opened.map_err(failed("open the lock file", path))?,
    };
    let found = fs::fstat(&descriptor).map_err(failed("look at", path))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(foreign(path, "not a regular file"));
    }
    if found.st_uid != dir::our_uid() {
        return Err(another_users(path, found.st_uid));
    }
    if found.st_nlink == 0 {
        return Ok(None);
    }
    if access.contains(OFlags::CREATE) && Mode::from_raw_mode(found.st_mode) != FILE_MODE {
        fs::fchmod(&descriptor, FILE_MODE).map_err(failed("set the mode of", path))?;
    }
    Ok(Some(descriptor))
}

fn still_names(path: &Path, descriptor: &OwnedFd) -> Result<bool> {
    let held = fs::fstat(descriptor).map_err(failed("look at", path))?;
    match fs::statat(fs::CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(named) => Ok(Inode::of(&named) == Inode::of(&held)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
        Err(errno) => Err(failed("look at", path)(errno)),
    }
}

fn another_users(path: &Path, owner: u32) -> Error {
    foreign(path, &format!("another user's (uid {owner})"))
}

fn foreign(path: &Path, what: &str) -> Error {
    Error::new(Kind::Failed, format!("the lock file {} is {what}", shown(path)))
        .hint("remove it if you know where it comes from")
}

fn too_busy(path: &Path) -> Error {
    Error::os(&format!("lock {}", shown(path)), &io::Error::from(Errno::BUSY)).hint("try again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    #[test]
    fn one_holds_it_and_others_see_that() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("n.lock");
        assert!(!is_held(&path).unwrap());
        assert!(!path.exists(), "asking creates nothing");
        let lock = Lock::try_exclusive(&path).unwrap().unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
        assert!(is_held(&path).unwrap());
        assert!(Lock::try_exclusive(&path).unwrap().is_none());
        drop(lock);
        assert!(!is_held(&path).unwrap());
        assert!(path.exists(), "a crash leaves the file");
        Lock::try_exclusive(&path).unwrap().unwrap().remove_and_release().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn it_outlives_its_taker_in_a_copied_descriptor() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("n.lock");
        let taken = Lock::try_exclusive(&path).unwrap().unwrap().into_fd();
        let inherited = taken.try_clone().unwrap();
        drop(taken);
        assert!(is_held(&path).unwrap());
        let lock = Lock::from_fd(inherited, &path).unwrap();
        assert!(lock.is_in_place().unwrap());
        std::fs::remove_file(&path).unwrap();
        assert!(!lock.is_in_place().unwrap());
        let next = Lock::try_exclusive(&path).unwrap().unwrap();
        lock.remove_and_release().unwrap();
        assert!(next.is_in_place().unwrap(), "the next one's file stays");
        let stranger = std::fs::File::open(home.path()).unwrap();
        assert!(Lock::from_fd(stranger.into(), &path).is_err());
        let second = std::fs::File::open(&path).unwrap();
        assert!(Lock::from_fd(second.into(), &path).is_err(), "held by another open file");
    }

    #[test]
    fn a_removal_wakes_and_a_move_does_not() {
        use rustix::event::{PollFd, PollFlags, poll};
        let home = tempfile::tempdir().unwrap();
        let run = home.path().join("run");
        std::fs::create_dir(&run).unwrap();
        let lock = Lock::try_exclusive(&run.join("n.lock")).unwrap().unwrap();
        let watch = lock.watch_removal().unwrap();
        let wakes = || {
            let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(&watch, PollFlags::IN)], Some(&now)).unwrap() > 0
        };
        let moved = home.path().join("moved");
        std::fs::rename(&run, &moved).unwrap();
        assert!(!wakes() && !lock.is_removed() && !lock.is_in_place().unwrap());
        std::fs::remove_dir_all(&moved).unwrap();
        assert!(wakes() && lock.is_removed());
    }

    #[test]
    fn a_removed_file_is_not_taken_for_the_lock() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("n.lock");
        let old = Lock::try_exclusive(&path).unwrap().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(!is_held(&path).unwrap(), "its owner has no name any more");
        assert!(Lock::try_exclusive(&path).unwrap().is_some());
        drop(old);
    }

    #[test]
    fn askers_never_keep_it_from_who_wants_it() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("n.lock");
        drop(Lock::try_exclusive(&path).unwrap());
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        is_held(&path).unwrap();
                    }
                });
            }
            for round in 0..200 {
                let lock = Lock::try_exclusive(&path).unwrap();
                assert!(lock.is_some(), "round {round}: an asker was taken for an owner");
                if round % 2 == 0 {
                    lock.unwrap().remove_and_release().unwrap();
                }
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn at_most_one_of_many_holds_it_while_files_come_and_go() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("n.lock");
        let holders = AtomicU32::new(0);
        let taken = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        if let Some(lock) = Lock::try_exclusive(&path).unwrap() {
                            assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                            assert!(is_held(&path).unwrap());
                            taken.fetch_add(1, Ordering::SeqCst);
                            holders.fetch_sub(1, Ordering::SeqCst);
                            lock.remove_and_release().unwrap();
                        }
                    }
                });
            }
        });
        assert!(taken.load(Ordering::SeqCst) > 0);
        assert!(!path.exists());
    }

    #[test]
    fn what_is_not_our_file_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("target");
        std::fs::write(&target, "precious").unwrap();
        let link = home.path().join("l.lock");
        symlink(&target, &link).unwrap();
        assert!(Lock::try_exclusive(&link).unwrap_err().message().contains("symbolic link"));
        assert!(is_held(&link).is_err());
        assert_eq!(std::fs::read(&target).unwrap(), b"precious");

        let fifo = home.path().join("f.lock");
        fs::mknodat(fs::CWD, &fifo, FileType::Fifo, FILE_MODE, 0).unwrap();
        assert!(Lock::try_exclusive(&fifo).unwrap_err().message().contains("not a regular file"));
        assert!(is_held(&fifo).is_err());

        if super::super::testing::is_root() {
            super::super::testing::give_away(&target);
            assert!(Lock::try_exclusive(&target).unwrap_err().message().contains("uid 65534"));
        }
        assert_eq!(Lock::try_exclusive(&home.path().join("no/l")).unwrap_err().kind(), Kind::NotFound);
    }
}
