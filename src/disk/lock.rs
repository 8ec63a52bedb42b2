//! Locks of a root: on one generation, and on whoever builds generations of a name.
//!
//! Each is a `flock` on a file opened for reading, which works on a read-only root and on what another user of the
//! group made. It belongs to the open file: however its holder ends, the kernel lets go of it, and a program that
//! inherits the descriptor holds it on.
//!
//! **Asking** whether somebody holds a shared lock means to take it exclusively for microseconds. So whoever meets
//! somebody else's exclusive lock tries again for a while, before it is taken for more than a question.

use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{self, AtFlags, CWD, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::format::{NUMBER_MAX, parse_number};
use crate::error::{Error, Kind, Result, shown};
use crate::registry::Name;
use crate::registry::dir::{Inode, failed};

/// How often a lock is tried that somebody may only ask about.
const ATTEMPTS: u32 = 20;

/// The pause between two attempts.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(1);

/// How often a lock is tried that is waited for.
const WAITING_PAUSE: Duration = Duration::from_millis(50);

/// Whether something else than a lock file stands at `path`: a link, FIFO or directory. Nobody can hold that.
pub(super) fn is_strange(path: &Path) -> bool {
    fs::lstat(path).is_ok_and(|found| FileType::from_raw_mode(found.st_mode) != FileType::RegularFile)
}

/// Opens a lock file; `None` where there is none.
fn open(path: &Path) -> Result<Option<OwnedFd>> {
    // NONBLOCK: a FIFO that somebody put there must not hold us up.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match fs::open(path, flags, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        Err(Errno::LOOP | Errno::NXIO) => return Err(strange(path)),
        opened => opened.map_err(failed("open the lock file", path))?,
    };
    let found = fs::fstat(&file).map_err(failed("look at", path))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(strange(path));
    }
    Ok(Some(file))
}

fn strange(path: &Path) -> Error {
    let why = format!("the lock file {} is no regular file", shown(path));
    Error::new(Kind::Failed, why).hint("remove it if you know where it comes from")
}

fn try_lock(file: &OwnedFd, how: FlockOperation, path: &Path) -> Result<bool> {
    match fs::flock(file, how) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
        Err(errno @ (Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP)) => {
            Err(failed("lock", path)(errno).hint("choose a --cache-root on a file system that has locks"))
        }
        Err(errno) => Err(failed("lock", path)(errno)),
    }
}

/// Whether the path leads to the file that is open.
fn still_names(path: &Path, file: &OwnedFd) -> Result<bool> {
    let held = fs::fstat(file).map_err(failed("look at", path))?;
    match fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(named) => Ok(Inode::of(&named) == Inode::of(&held)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
        Err(errno) => Err(failed("look at", path)(errno)),
    }
}

/// Takes the lock `path` shared; `None` where it was removed. `make` makes the file where it is missing and should
/// not be.
pub(super) fn shared(path: &Path, make: impl Fn() -> Result<()>) -> Result<Option<OwnedFd>> {
    // Who removes holds it until the path leads nowhere: that is what is waited for.
    for _ in 0..ATTEMPTS * 100 {
        let file = match open(path)? {
            Some(file) => file,
            None => {
                make()?;
                match open(path)? {
                    Some(file) => file,
                    None => return Ok(None),
                }
            }
        };
        if try_lock(&file, FlockOperation::NonBlockingLockShared, path)? && still_names(path, &file)? {
            return Ok(Some(file));
        }
        std::thread::sleep(ATTEMPT_PAUSE);
    }
    let why = format!("{} is locked by a command that removes what it is in", shown(path));
    Err(Error::new(Kind::InUse, why).hint("try again"))
}

/// Takes the lock `path` exclusively; `None` where somebody holds it, shared or not, or the path leads elsewhere
/// by now. Where there is no file, or no regular one, there is nothing that anybody could hold: `Ok(Some(None))`.
pub(super) fn exclusive(path: &Path) -> Result<Option<Option<OwnedFd>>> {
    for attempt in 0..ATTEMPTS {
        if is_strange(path) {
            return Ok(Some(None));
        }
        let Some(file) = open(path)? else { return Ok(Some(None)) };
        if try_lock(&file, FlockOperation::NonBlockingLockExclusive, path)? && still_names(path, &file)? {
            return Ok(Some(Some(file)));
        }
        if attempt + 1 < ATTEMPTS {
            std::thread::sleep(ATTEMPT_PAUSE);
        }
    }
    Ok(None)
}

/// Whether somebody holds the lock, shared or exclusively.
pub(super) fn is_held(path: &Path) -> Result<bool> {
    for _ in 0..ATTEMPTS {
        if is_strange(path) {
            return Ok(false);
        }
        let Some(file) = open(path)? else { return Ok(false) };
        if try_lock(&file, FlockOperation::NonBlockingLockExclusive, path)? {
            return Ok(false);
        }
        // Who else only asks is gone by the next attempt.
        std::thread::sleep(ATTEMPT_PAUSE);
    }
    Ok(true)
}

/// The numbers of a name are given by who holds this: builders and committers, one at a time.
#[derive(Debug)]
pub struct NameLock {
    file: std::fs::File,
    path: PathBuf,
    name: Name,
}

impl NameLock {
    /// Takes the lock `path`, made with `mode` where it is missing; `None` where somebody holds it.
    pub(super) fn try_take(
        path: &Path,
        name: &Name,
        mode: Mode,
        is_shared: bool,
    ) -> Result<Option<NameLock>> {
        for _ in 0..ATTEMPTS * 100 {
            let file = match open(path)? {
                Some(file) => file,
                None => {
                    make(path, mode, is_shared)?;
                    continue;
                }
            };
            if try_lock(&file, FlockOperation::NonBlockingLockExclusive, path)? {
                if still_names(path, &file)? {
                    return Ok(Some(NameLock {
                        file: file.into(),
                        path: path.to_owned(),
                        name: name.clone(),
                    }));
                }
                continue;
            }
            if !try_lock(&file, FlockOperation::NonBlockingLockShared, path)? {
                return Ok(None);
            }
            // Only askers were in the way.
            drop(file);
            std::thread::sleep(ATTEMPT_PAUSE);
        }
        Ok(None)
    }

    /// The same, waited for. `waiting` is called once, where it is not to be had at once.
    pub(super) fn take(
        attempt: impl Fn() -> Result<Option<NameLock>>,
        waiting: &dyn Fn(),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<NameLock> {
        let mut is_said = false;
        loop {
            if let Some(lock) = attempt()? {
                return Ok(lock);
            }
            if cancelled() {
                return Err(Error::new(Kind::Cancelled, "cancelled while another command was waited for"));
            }
            if !is_said {
                waiting();
                is_said = true;
            }
            std::thread::sleep(WAITING_PAUSE);
        }
    }

    /// Whose numbers it is about.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// The highest number that was ever given, as far as the file tells; 0 where it does not.
    pub(super) fn last_number(&self) -> Result<u64> {
        const NUMBER_BYTES_MAX: u64 = 32;
        let failed = |cause| Error::io("read the lock file", &self.path, &cause);
        let mut file = &self.file;
        file.rewind().map_err(failed)?;
        let mut text = Vec::new();
        file.take(NUMBER_BYTES_MAX).read_to_end(&mut text).map_err(failed)?;
        let text = String::from_utf8_lossy(&text);
        Ok(parse_number(text.trim_end()).unwrap_or(0))
    }

    /// Notes on disk that `number` was given.
    pub(super) fn note_number(&self, number: u64) -> Result<()> {
        if number > NUMBER_MAX {
            let why = format!("there is no number left for a generation of {}", self.name);
            return Err(Error::new(Kind::Failed, why).hint("choose another --cache-name"));
        }
        if self.last_number()? >= number {
            return Ok(());
        }
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = fs::open(&self.path, flags, Mode::empty()).map_err(|errno| {
            let error = failed("note a generation's number in", &self.path)(errno);
            match errno {
                Errno::ACCESS => error.hint(
                    "its owner should let the group write to it (chmod g+w), and use umask 002 in a shared root",
                ),
                _ => error,
            }
        })?;
        let mut file = std::fs::File::from(file);
        let text = format!("{number}\n");
        // A number never has fewer digits than the one before, so that writing over it leaves nothing of that; what
        // no number was is cut off.
        file.write_all(text.as_bytes())
            .and_then(|()| file.set_len(text.len() as u64))
            .and_then(|()| file.sync_data())
            .map_err(|cause| Error::io("note a generation's number in", &self.path, &cause))
    }
}

impl AsFd for NameLock {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Makes a lock file. In a directory that the group may write to, the group may write to it too, whatever the umask.
fn make(path: &Path, mode: Mode, is_shared: bool) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match fs::open(path, flags, mode) {
        Ok(file) => {
            if is_shared {
                let found = fs::fstat(&file).map_err(failed("look at", path))?;
                let group = Mode::RGRP | Mode::WGRP;
                fs::fchmod(&file, Mode::from_raw_mode(found.st_mode) | group)
                    .map_err(failed("set the mode of", path))?;
            }
            Ok(())
        }
        Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(failed("create the lock file", path)(errno)),
    }
}
