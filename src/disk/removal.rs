//! Removing generations, and what interrupted commands left.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{self, Mode, RenameFlags};
use rustix::io::Errno;

use super::format::{Entry, LOCK_FILE, OUR_DIRECTORY, State, name_lock};
use super::lock::{self, NameLock};
use super::medium::{Disk, Medium};
use super::store::{Leftover, Store, Unreadable, check_owner};
use super::{Generation, holders, tree};
use crate::error::{Error, Kind, Result, shown};
use crate::registry::Name;
use crate::registry::dir::{self, failed};
use crate::sys::crash;

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
        fs::fsync(root).map_err(failed("write down the removal in", self.root()))?;
        crash::point("generation-taken-aside");
        Ok(())
    }

    /// Removes a directory at the top of the root, for who holds its lock.
    pub(super) fn remove_tree(&self, medium: &dyn Medium, path: &Path) -> Result<()> {
        let name = path.file_name().unwrap_or_default();
        tree::remove(medium, self.open_root()?.as_fd(), name, path, OUR_DIRECTORY)
    }

    fn delete(&self, root: &OwnedFd, entry: &Entry) -> Result<()> {
        let path = self.path_of(entry);
        tree::remove(&Disk, root.as_fd(), OsStr::new(&entry.to_string()), &path, OUR_DIRECTORY)?;
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
        // What another user of the group keeps to himself is not counted.
        let mut inodes = tree::walk(directory, &path).unwrap_or_default();
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
            // Where a lock may not be looked at, it may be held.
            is_in_use: self.is_worked_on(entry).unwrap_or(true),
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
        let path = self.path_of(&staging);
        let directory = match tree::open_inside(&root, OsStr::new(&staging.to_string())) {
            Ok(directory) => directory,
            Err(Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(failed("open", &path)(errno)),
        };
        // What cannot all be removed, because something is mounted in it, is not begun with.
        tree::walk(directory, &path)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::testing::Root;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::{Command, Stdio};

    fn left(root: &Root) -> Vec<String> {
        let entries = std::fs::read_dir(root.store.root()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_generation_goes_and_nothing_outside_of_it() {
        let root = Root::new();
        let precious = root.beside("precious");
        std::fs::create_dir(&precious).unwrap();
        std::fs::write(precious.join("letter"), "dear all").unwrap();
        let kept = root.add("m", 1, &[("f", b"1")]);
        let generation = root.add("m", 2, &[("a/b/c", b"1"), ("f", b"2")]);
        symlink(&precious, generation.path().join("link")).unwrap();
        symlink(precious.join("letter"), generation.path().join("a/link")).unwrap();
        std::fs::hard_link(kept.path().join("f"), generation.path().join("shared")).unwrap();
        std::fs::create_dir(generation.path().join("foreign")).unwrap();
        std::fs::write(generation.path().join("foreign/file"), "").unwrap();
        for directory in ["a/b", "a"] {
            let path = generation.path().join(directory);
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o500)).unwrap();
        }
        // What an earlier removal left is in the way.
        std::fs::create_dir_all(root.path(".m@2.removing/old")).unwrap();
        root.store.remove(&generation).unwrap();
        assert_eq!(left(&root), [".iloader", "m@1"]);
        assert_eq!(std::fs::read(precious.join("letter")).unwrap(), b"dear all");
        kept.selection(&[]).unwrap();
        assert_eq!(root.store.remove(&generation).unwrap_err().kind(), Kind::NotFound);
    }

    #[test]
    fn a_leased_generation_stays_and_the_holder_is_named() {
        let root = Root::new();
        let generation = root.add("m", 1, &[("f", b"1")]);
        let lease = generation.lease().unwrap();
        let error = root.store.remove(&generation).unwrap_err();
        assert_eq!(error.kind(), Kind::InUse);
        assert!(error.message().contains(&format!("leased by process {}", std::process::id())), "{error}");
        generation.selection(&[]).unwrap();
        drop(lease);
        root.store.remove(&generation).unwrap();
    }

    #[test]
    fn a_generation_that_is_read_without_a_lease_stays_and_the_reader_is_named() {
        let root = Root::new();
        let generation = root.add("m", 1, &[("f", b"1")]);
        let copy = root.add("m", 2, &[("g", b"2")]);
        std::fs::hard_link(generation.path().join("f"), copy.path().join("f")).unwrap();
        let mut reader = Command::new("sleep")
            .arg("600")
            .stdin(std::fs::File::open(generation.path().join("f")).unwrap())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // The other one has the same inode, but is not what was opened.
        let other = root.store.remove(&copy);
        let error = root.store.remove(&generation).unwrap_err();
        reader.kill().unwrap();
        reader.wait().unwrap();
        other.unwrap();
        assert_eq!(error.kind(), Kind::InUse);
        assert!(error.message().contains(&format!("process {}", reader.id())), "{error}");
        assert!(error.message().contains("sleep"), "{error}");
        root.store.remove(&generation).unwrap();
    }

    #[test]
    fn what_cannot_be_read_can_be_removed() {
        let root = Root::new();
        root.add("m", 1, &[("f", b"1")]);
        std::fs::write(root.path("m@1/.iloader/manifest.json"), "{").unwrap();
        let listing = root.store.list().unwrap();
        root.store.remove_unreadable(&listing.unreadable[0]).unwrap();
        assert_eq!(left(&root), [".iloader"]);
    }

    #[test]
    fn leftovers_go_unless_somebody_works_in_them() {
        let root = Root::new();
        let name: Name = "m".parse().unwrap();
        root.add_staging("m", 3, b"x");
        std::fs::create_dir_all(root.path(".m@2.removing/.iloader")).unwrap();
        std::fs::write(root.path(".m@2.removing/.iloader/lock"), "").unwrap();
        let leftovers = || root.store.list().unwrap().leftovers;

        let building = root.store.try_lock_name(&name).unwrap().unwrap();
        let removing = lock::exclusive(&root.path(".m@2.removing/.iloader/lock")).unwrap().unwrap();
        assert!(leftovers().iter().all(|leftover| leftover.is_in_use));
        for leftover in leftovers() {
            assert_eq!(root.store.remove_leftover(&leftover).unwrap_err().kind(), Kind::InUse);
        }
        drop((building, removing));
        assert_eq!(leftovers().len(), 2);
        for leftover in leftovers() {
            assert!(!leftover.is_in_use);
            root.store.remove_leftover(&leftover).unwrap();
            root.store.remove_leftover(&leftover).unwrap();
        }
        assert_eq!(left(&root), [".iloader"]);
    }

    #[test]
    fn what_others_plant_in_an_open_root_is_not_trusted() {
        if !rustix::process::geteuid().is_root() {
            return crate::skipped("only root can give files away");
        }
        let root = Root::new();
        let give = |inside: &str, mode| {
            let path = root.path(inside);
            std::os::unix::fs::chown(&path, Some(61_235), None).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        };
        root.add("m", 1, &[("f", b"1")]);
        root.add("m", 2, &[("f", b"2")]);
        root.add_staging("m", 3, b"x");
        give("m@2", 0o755);
        give(".m@3.staging", 0o700);
        let name: Name = "m".parse().unwrap();
        let newest = || root.store.newest(&name).unwrap().unwrap().number();
        assert_eq!((newest(), root.store.list().unwrap().leftovers.len()), (2, 1), "a group's root");
        std::fs::set_permissions(root.path(""), PermissionsExt::from_mode(0o1777)).unwrap();
        assert_eq!(newest(), 1);
        let listing = root.store.list().unwrap();
        assert!(listing.unreadable[0].error.message().contains("another user (uid 61235)"));
        assert!(listing.leftovers.is_empty());
        assert!(Generation::open(&root.path("m@2")).is_err());
        std::fs::create_dir(root.path(".iloader")).unwrap();
        give(".iloader", 0o777);
        let error = root.store.try_lock_name(&name).unwrap_err();
        assert!(error.message().contains("uid 61235"), "{error}");
        // To whom the root belongs, its owner may put anything into it.
        give("", 0o1777);
        assert_eq!(newest(), 2);
    }

    #[test]
    fn a_root_that_cannot_be_written_can_be_used() {
        if rustix::process::geteuid().is_root() {
            return crate::skipped("modes do not bind root");
        }
        let root = Root::new();
        let generation = root.add("m", 1, &[("f", b"1")]);
        drop(root.store.try_lock_name(generation.name()).unwrap().unwrap());
        let set = |mode| {
            for path in [root.path(".iloader"), root.path("m@1/.iloader"), root.path("m@1"), root.path("")] {
                std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
            }
        };
        set(0o555);
        let store = Store::open(root.store.root()).unwrap();
        let found = store.newest(generation.name()).unwrap().unwrap();
        let lease = found.lease().unwrap();
        assert!(found.is_leased().unwrap());
        found.mark_used();
        assert_eq!(found.last_used().to_string(), found.manifest().created);
        drop(lease);
        let lock = store.try_lock_name(found.name()).unwrap().unwrap();
        drop(lock);
        let error = store.try_lock_name(&"other".parse().unwrap()).unwrap_err();
        assert!(error.message().contains("permission denied"), "{error}");
        assert!(store.remove(&found).unwrap_err().message().contains("permission denied"));
        found.selection(&[]).unwrap();
        set(0o755);
        store.remove(&found).unwrap();
    }

    #[test]
    fn a_lock_is_waited_for_until_it_is_free_or_nobody_wants_it() {
        let root = Root::new();
        let name: Name = "m".parse().unwrap();
        let held = root.store.try_lock_name(&name).unwrap().unwrap();
        let waits = std::cell::Cell::new(0);
        let waiting = || waits.set(waits.get() + 1);
        let error = root.store.lock_name(&name, &waiting, &|| waits.get() > 0).unwrap_err();
        assert_eq!((error.kind(), waits.get()), (Kind::Cancelled, 1));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(120));
                drop(held);
            });
            root.store.lock_name(&name, &waiting, &|| false).unwrap();
        });
        assert_eq!(waits.get(), 2, "said once for each");
        root.store.lock_name(&name, &waiting, &|| false).unwrap();
        assert_eq!(waits.get(), 2);
    }
}
