//! The place of a view: its parent directory, held open, and what is done there by rename.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, CWD, FlockOperation, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use crate::error::{Error, Kind, Result, shown};
use crate::registry::dir::{self, Inode, failed};

/// Suffix of a directory that is being built.
pub(super) const NEW: &str = "new";

/// Suffix of a directory that is being removed, or is about to take a view's place, empty.
pub(super) const OLD: &str = "old";

/// How often a name is tried again because somebody else was there at the same moment.
pub(super) const ATTEMPTS_MAX: u32 = 16;

/// Where a view stands or is to stand.
pub(super) struct Spot {
    parent: OwnedFd,
    name: OsString,
    path: PathBuf,
    /// Whether the file system may be asked to exchange two names in one step. Few lack it.
    exchanges: bool,
}

/// A directory beside the spot under a name that nobody else uses. While its descriptor is open it is
/// locked, which keeps [`super::remove_leftovers`] and cleaners of temporary directories away.
pub(super) struct Aside {
    pub(super) name: OsString,
    pub(super) directory: OwnedFd,
}

impl Spot {
    /// The spot of the view `at`, or `None` where its parent directory does not exist.
    pub(super) fn find(at: &Path) -> Result<Option<Spot>> {
        let (parent, name) = split(at)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match fs::openat(CWD, parent, flags, Mode::empty()) {
            Ok(opened) => Ok(Some(Spot::new(opened, name, at))),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(failed("open the directory", parent)(errno)),
        }
    }

    /// The same, creating the parent directories that are missing with mode 0700.
    pub(super) fn create(at: &Path) -> Result<Spot> {
        let (parent, name) = split(at)?;
        Ok(Spot::new(dir::make_directories(parent)?, name, at))
    }

    fn new(parent: OwnedFd, name: &OsStr, at: &Path) -> Spot {
        Spot { parent, name: name.to_owned(), path: at.to_owned(), exchanges: true }
    }

    #[cfg(test)]
    pub(super) fn without_exchange(self) -> Spot {
        Spot { exchanges: false, ..self }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn parent(&self) -> &OwnedFd {
        &self.parent
    }

    pub(super) fn name(&self) -> &OsStr {
        &self.name
    }

    /// A path beside the view's, for messages.
    pub(super) fn beside(&self, name: &OsStr) -> PathBuf {
        self.path.with_file_name(name)
    }

    /// What stands there, itself and not what it leads to.
    pub(super) fn look(&self) -> Result<Option<Stat>> {
        self.look_beside(&self.name)
    }

    /// The same for another name in the same parent directory.
    pub(super) fn look_beside(&self, name: &OsStr) -> Result<Option<Stat>> {
        match fs::statat(&self.parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => Ok(Some(found)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(failed("look at", &self.beside(name))(errno)),
        }
    }

    /// Makes an empty directory of mode 0700 beside the spot.
    pub(super) fn make_aside(&self, suffix: &str) -> Result<Aside> {
        let failed = failed("create a directory beside", &self.path);
        for _ in 0..ATTEMPTS_MAX {
            let name = self.temporary_name(suffix)?;
            let directory = match dir::make_directory(&self.parent, &name) {
                // Another process took it for a leftover before it was locked.
                Err(Errno::EXIST | Errno::NOENT) if self.is_parent_there() => continue,
                made => made.map_err(&failed)?,
            };
            // A file system without locks has nobody that heeds them: any other error is no hindrance.
            if fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
                continue;
            }
            let made = fs::fstat(&directory).map_err(&failed)?;
            let is_in_place =
                self.look_beside(&name)?.is_some_and(|found| Inode::of(&found) == Inode::of(&made));
            if is_in_place {
                return Ok(Aside { name, directory });
            }
        }
        Err(failed(Errno::BUSY))
    }

    fn is_parent_there(&self) -> bool {
        fs::fstat(&self.parent).is_ok_and(|found| found.st_nlink > 0)
    }

    fn temporary_name(&self, suffix: &str) -> Result<OsString> {
        let name = dir::temporary_name(&self.name, suffix);
        name.map(OsString::from_vec).map_err(failed("make a name beside", &self.path))
    }

    /// Renames `aside` to the spot. Only nothing or an empty directory is ever replaced: `false` where
    /// something else stands there.
    pub(super) fn put(&self, aside: &OsStr) -> Result<bool> {
        match fs::renameat(&self.parent, aside, &self.parent, &self.name) {
            Ok(()) => Ok(true),
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => Ok(false),
            Err(errno) => Err(failed("rename a directory to", &self.path)(errno)),
        }
    }

    /// Lets `aside` and what stands at the spot change places, in one step: `false` where the file system
    /// cannot.
    pub(super) fn exchange(&self, aside: &OsStr) -> Result<bool> {
        if !self.exchanges {
            return Ok(false);
        }
        match fs::renameat_with(&self.parent, aside, &self.parent, &self.name, RenameFlags::EXCHANGE) {
            Ok(()) => Ok(true),
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Ok(false),
            Err(errno) => Err(failed("rename a directory to", &self.path)(errno)),
        }
    }

    /// Takes the directory `expected` from the spot and returns its name aside, or `None` where it is not
    /// what stands there. An empty directory takes its place when `leave_empty`; in one step, where the
    /// file system can exchange names. Where there is no room for one, the place stays empty: [`Spot::settle`].
    pub(super) fn take_aside(&self, expected: Inode, leave_empty: bool) -> Result<Option<OsString>> {
        if !self.look()?.is_some_and(|found| Inode::of(&found) == expected) {
            return Ok(None);
        }
        let taken = if leave_empty { self.swap_for_empty()? } else { self.rename_aside()? };
        if self.look_beside(&taken)?.is_some_and(|found| Inode::of(&found) == expected) {
            return Ok(Some(taken));
        }
        // Somebody put another thing there between the look and the rename: it goes back where it was.
        self.put_back(&taken, leave_empty)?;
        Ok(None)
    }

    fn rename_aside(&self) -> Result<OsString> {
        let aside = self.temporary_name(OLD)?;
        fs::renameat(&self.parent, &self.name, &self.parent, &aside).map_err(failed("rename", &self.path))?;
        Ok(aside)
    }

    fn swap_for_empty(&self) -> Result<OsString> {
        let empty = match self.make_aside(OLD) {
            // A view must be withdrawn from a full disk, too.
            Err(error) if error.kind() == Kind::NoRoom => return self.rename_aside(),
            made => made?,
        };
        let swapped = match self.exchange(&empty.name) {
            Ok(true) => return Ok(empty.name),
            Ok(false) => self.rename_aside(),
            Err(error) => Err(error),
        };
        match swapped {
            Ok(taken) => {
                self.put(&empty.name)?;
                Ok(taken)
            }
            Err(error) => {
                self.remove_empty(&empty.name)?;
                Err(error)
            }
        }
    }

    /// Renames what was taken aside by mistake, whatever it is, to the spot again; `left_empty` says that an
    /// empty directory of ours is there now. Nothing else is replaced.
    fn put_back(&self, aside: &OsStr, left_empty: bool) -> Result<()> {
        if left_empty && self.look()?.is_some() {
            if self.exchange(aside)? {
                return self.remove_empty(aside);
            }
            self.remove_empty(&self.name)?;
        }
        let (parent, name) = (&self.parent, &self.name);
        match fs::renameat_with(parent, aside, parent, name, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(()),
            Err(errno) => {
                let (aside, path) = (self.beside(aside), &self.path);
                let why = crate::error::reason(&errno.into());
                let error = format!("{} cannot be put back to {}: {why}", shown(&aside), shown(path));
                Err(Error::new(Kind::Failed, error).hint("move it by hand"))
            }
        }
    }

    /// Ends what [`Spot::take_aside`] began with a directory that is empty by now: it goes back to the spot where an
    /// empty one was to stay and nothing is, else it goes.
    pub(super) fn settle(&self, aside: &OsStr, leave_empty: bool) -> Result<()> {
        if leave_empty && self.look()?.is_none() && self.put(aside)? {
            return Ok(());
        }
        self.remove_empty(aside)
    }

    /// Removes an empty directory beside the spot.
    pub(super) fn remove_empty(&self, aside: &OsStr) -> Result<()> {
        match fs::unlinkat(&self.parent, aside, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(failed("remove the directory", &self.beside(aside))(errno)),
        }
    }

    /// Opens the directory `name` in the spot's parent, to read it.
    pub(super) fn open_beside(&self, name: &OsStr) -> Result<OwnedFd> {
        dir::open_directory(self.parent.as_fd(), name)
            .map_err(failed("open the directory", &self.beside(name)))
    }
}

fn split(at: &Path) -> Result<(&Path, &OsStr)> {
    assert!(at.is_absolute(), "a view's path is absolute");
    match (at.parent(), at.file_name()) {
        (Some(parent), Some(name)) => Ok((parent, name)),
        _ => {
            let error = format!("{} cannot be a view: it does not end in a name", shown(at));
            Err(Error::new(Kind::Usage, error).hint("choose another --view"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_by_mistake_goes_back() {
        for (leave_empty, exchanges) in [(false, true), (true, true), (true, false)] {
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join("view");
            let spot = Spot::create(&path).unwrap();
            let spot = if exchanges { spot } else { spot.without_exchange() };
            std::fs::write(&path, "words").unwrap();
            let taken = if leave_empty { spot.swap_for_empty() } else { spot.rename_aside() }.unwrap();
            assert_eq!(path.is_dir(), leave_empty);
            spot.put_back(&taken, leave_empty).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"words");
            assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1);

            let directory = fs::stat(home.path()).unwrap();
            assert_eq!(spot.take_aside(Inode::of(&directory), leave_empty).unwrap(), None);
            let taken = spot.rename_aside().unwrap();
            std::fs::write(&path, "newer words").unwrap();
            assert!(spot.put_back(&taken, false).is_err(), "nothing is replaced");
            assert_eq!(std::fs::read(&path).unwrap(), b"newer words");
        }
    }
}
