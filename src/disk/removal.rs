//! Removing generations, and what interrupted commands left.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{self, Mode, RenameFlags};
use rustix::io::Errno;

use super::format::{Entry, LOCK_FILE, OUR_DIRECTORY, State, name_lock};
use super::lock::{self, NameLock};
use super::store::{Leftover, Store, Unreadable, check_owner};
use super::{Generation, holders, tree};
use crate::error::{Error, Kind, Result, shown};
use crate::registry::Name;
use crate::registry::dir::{self, failed};

impl Store {
    /// Removes a generation: renamed aside first, so that nobody meets half of it.
    ///
    /// # Errors
    ///
    /// [`Kind::InUse`] where it is leased, or a process has one of its files open or mapped; names who.
    pub fn remove(&self, generation: &Generation) -> Result<()> {
        self.remove_whole(&generation.entry())
    }

    /// Removes one that cannot be read, under the same conditions.
    ///
    /// # Errors
    ///
    /// As [`Store::remove`].
    pub fn remove_unreadable(&self, unreadable: &Unreadable) -> Result<()> {
        self.remove_whole(&Entry::whole(&unreadable.name, unreadable.number))
    }

    /// What would refuse to remove a generation now: who leases or reads it. `None`: nobody that can be seen.
    ///
    /// # Errors
    ///
    /// Where it cannot be looked at.
    pub fn refusal(&self, generation: &Generation) -> Result<Option<Error>> {
        let entry = generation.entry();
        let path = self.path_of(&entry);
        let lock_path = path.join(OUR_DIRECTORY).join(LOCK_FILE);
        if lock::is_held(&lock_path)? {
            return Ok(Some(leased(&path, &lock_path)));
        }
        let directory = tree::open_inside(self.open_root()?, OsStr::new(&entry.to_string()))
            .map_err(failed("open the generation", &path))?;
        let readers = holders::readers(&entry, &tree::walk(directory, &path)?)?;
        Ok(readers.map(|who| read(&path, &who)))
    }

    fn remove_whole(&self, entry: &Entry) -> Result<()> {
        let path = self.path_of(entry);
        let lock_path = path.join(OUR_DIRECTORY).join(LOCK_FILE);
        let root = self.open_root()?;
        let directory = tree::open_inside(&root, OsStr::new(&entry.to_string()))
            .map_err(failed("open the generation", &path))?;
        // Held until everything is gone: what takes it for a leftover meanwhile leaves it alone.
        let Some(_lock) = lock::exclusive(&lock_path)? else {
            return Err(leased(&path, &lock_path));
        };
        let held = tree::walk(directory, &path)?;
        if let Some(who) = holders::readers(entry, &held)? {
            return Err(read(&path, &who));
        }
        // A number is never given twice, even if this is the highest. Who has the lock of the name has seen it.
        if let Some(name_lock) = self.try_lock_name(&entry.name)? {
            name_lock.note_number(entry.number)?;
        }
        let aside = entry.in_state(State::Removing);
        self.move_aside(&root, entry, &aside)?;
        self.delete(&root, &aside)
    }

    /// Renames something of ours to the name of what is being removed.
    fn move_aside(&self, root: &OwnedFd, entry: &Entry, aside: &Entry) -> Result<()> {
        let path = self.path_of(entry);
        let rename = || {
            let (from, to) = (entry.to_string(), aside.to_string());
            match fs::renameat_with(root, &from, root, &to, RenameFlags::NOREPLACE) {
                // Not every file system has this one. A directory replaces none but an empty one.
                Err(Errno::INVAL | Errno::NOSYS) => fs::renameat(root, &from, root, &to),
                renamed => renamed,
            }
        };
        match rename() {
            // An interrupted command left one of that name.
            Err(Errno::EXIST | Errno::NOTEMPTY) => {
                self.delete(root, aside)?;
                rename()
            }
            renamed => renamed,
        }
        .map_err(failed("rename", &path))?;
        fs::fsync(root).map_err(failed("write down the removal in", self.root()))
    }

    fn delete(&self, root: &OwnedFd, entry: &Entry) -> Result<()> {
        let path = self.path_of(entry);
        tree::remove(root.as_fd(), OsStr::new(&entry.to_string()), &path, OUR_DIRECTORY)?;
        fs::fsync(root).map_err(failed("write down the removal in", self.root()))
    }

    /// What an interrupted command left, looked at; `None` where it is gone, or not ours.
    pub(super) fn leftover(&self, entry: &Entry) -> Result<Option<Leftover>> {
        let path = self.path_of(entry);
        let root = self.open_root()?;
        let directory = match tree::open_inside(&root, OsStr::new(&entry.to_string())) {
            Ok(directory) => directory,
            // Gone, or somebody else's file, link or file system.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => return Ok(None),
            Err(errno) => return Err(failed("open", &path)(errno)),
        };
        let found = fs::fstat(&directory).map_err(failed("look at", &path))?;
        if check_owner(&root, &found, &path).is_err() {
            return Ok(None);
        }
        let mut inodes = tree::walk(directory, &path)?;
        inodes.sort_unstable_by_key(|found| (found.device, found.inode));
        inodes.dedup_by_key(|found| (found.device, found.inode));
        let what = match entry.state {
            State::Staging => "an interrupted copy",
            _ => "half removed",
        };
        Ok(Some(Leftover {
            name: entry.name.clone(),
            number: entry.number,
            what,
            bytes: inodes.iter().fold(0, |sum, found| sum.saturating_add(found.bytes)),
            is_in_use: self.is_worked_on(entry)?,
            path,
        }))
    }

    fn is_worked_on(&self, entry: &Entry) -> Result<bool> {
        match entry.state {
            State::Staging => lock::is_held(&self.name_lock_path(&entry.name)),
            _ => lock::is_held(&self.path_of(entry).join(OUR_DIRECTORY).join(LOCK_FILE)),
        }
    }

    /// Removes a leftover, unless somebody works in it now.
    ///
    /// # Errors
    ///
    /// [`Kind::InUse`] where somebody does.
    pub fn remove_leftover(&self, leftover: &Leftover) -> Result<()> {
        let file_name = leftover.path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let Some(entry) = Entry::parse(file_name).filter(|entry| entry.state != State::Whole) else {
            let why = format!("{} is no leftover of ours", shown(&leftover.path));
            return Err(Error::new(Kind::Failed, why));
        };
        let root = self.open_root()?;
        let busy = || in_use(&self.path_of(&entry), "another command works in it");
        if entry.state == State::Removing {
            let path = self.path_of(&entry).join(OUR_DIRECTORY).join(LOCK_FILE);
            let _lock = lock::exclusive(&path)?.ok_or_else(busy)?;
            return self.delete(&root, &entry);
        }
        let lock = self.try_lock_name(&entry.name)?.ok_or_else(busy)?;
        self.remove_staging(&lock, entry.number)
    }

    /// Removes what is being built as `number`, by who holds the name's lock.
    ///
    /// # Errors
    ///
    /// Where something of it cannot be removed.
    pub fn remove_staging(&self, lock: &NameLock, number: u64) -> Result<()> {
        let staging = Entry::whole(lock.name(), number).in_state(State::Staging);
        let aside = staging.in_state(State::Removing);
        let root = self.open_root()?;
        if fs::lstat(self.path_of(&staging)).is_err() {
            return Ok(());
        }
        // Half of it would else be taken for what an interrupted copy had finished.
        self.move_aside(&root, &staging, &aside)?;
        self.delete(&root, &aside)
    }

    fn name_lock_path(&self, name: &Name) -> std::path::PathBuf {
        self.root().join(OUR_DIRECTORY).join(name_lock(name))
    }

    /// Takes the lock of who builds generations of `name`; `None` where somebody has it.
    ///
    /// # Errors
    ///
    /// Where it cannot be made or locked: on a read-only root, for one.
    pub fn try_lock_name(&self, name: &Name) -> Result<Option<NameLock>> {
        let ours = self.root().join(OUR_DIRECTORY);
        let (mode, group) = if self.is_private() {
            (dir::FILE_MODE, false)
        } else {
            (Mode::from_raw_mode(0o666), self.make_own_directory()?)
        };
        if self.is_private() {
            self.make_own_directory()?;
        }
        NameLock::try_take(&ours.join(name_lock(name)), name, mode, group)
    }

    /// The same, waited for, for as long as `cancelled` lets it. `waiting` is called once, where somebody has it.
    ///
    /// # Errors
    ///
    /// [`Kind::Cancelled`], and as [`Store::try_lock_name`].
    pub fn lock_name(
        &self,
        name: &Name,
        waiting: &dyn Fn(),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<NameLock> {
        NameLock::take(|| self.try_lock_name(name), waiting, cancelled)
    }

    /// Makes the directory of our own files at the top of the root; whether its group may write to it.
    fn make_own_directory(&self) -> Result<bool> {
        let root = self.open_root()?;
        let path = self.root().join(OUR_DIRECTORY);
        let name = OsStr::new(OUR_DIRECTORY);
        let made = match self.is_private() {
            true => dir::make_directory(&root, name).map(drop),
            false => fs::mkdirat(&root, name, Mode::from_raw_mode(0o777)),
        };
        match made {
            Ok(()) => fs::fsync(&root).map_err(failed("write down", &path))?,
            Err(Errno::EXIST) => {}
            Err(errno) => {
                return Err(failed("create the directory", &path)(errno)
                    .hint("choose a directory that you may write to with --cache-root"));
            }
        }
        let ours = tree::open_inside(&root, name).map_err(failed("open the directory", &path))?;
        let found = fs::fstat(&ours).map_err(failed("look at", &path))?;
        check_owner(&root, &found, &path)?;
        Ok(Mode::from_raw_mode(found.st_mode).contains(Mode::WGRP))
    }

    /// The number of the next generation of a name, noted on disk before it is used. Higher than any that was ever
    /// given.
    ///
    /// # Errors
    ///
    /// Where it cannot be noted.
    pub fn next_number(&self, lock: &NameLock) -> Result<u64> {
        let standing = self.entries()?.into_iter().filter(|entry| entry.name == *lock.name());
        let highest = standing.map(|entry| entry.number).max().unwrap_or(0).max(lock.last_number()?);
        let next = highest.checked_add(1).ok_or_else(|| {
            Error::new(Kind::Failed, format!("there is no number left for a generation of {}", lock.name()))
                .hint("choose another --cache-name")
        })?;
        lock.note_number(next)?;
        Ok(next)
    }
}

fn read(path: &Path, who: &str) -> Error {
    in_use(path, &format!("its files are open or mapped in {who}"))
}

fn leased(path: &Path, lock_path: &Path) -> Error {
    match holders::of_lock(lock_path) {
        Some(who) => in_use(path, &format!("it is leased by {who}")),
        None => in_use(path, "it is leased"),
    }
}

fn in_use(path: &Path, why: &str) -> Error {
    Error::new(Kind::InUse, format!("{} is not removed: {why}", shown(path)))
        .hint("end what uses it, and try again")
}
