//! The directories of a root, walked and removed by descriptor: no link is followed, and no other file system is
//! entered, whatever somebody put there.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::medium::Medium;
use crate::error::{Error, Kind, Result, shown};
use crate::registry::dir::failed;
use crate::sys::crash;

/// The most directories inside each other that are entered. A selection's are fewer.
const DEPTH_MAX: usize = 128;

/// The unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// An inode that a directory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) device: u64,
    pub(super) inode: u64,
    /// As allocated.
    pub(super) bytes: u64,
    pub(super) is_file: bool,
}

impl Found {
    fn of(stat: &Stat) -> Found {
        Found {
            device: stat.st_dev,
            inode: stat.st_ino,
            bytes: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES),
            is_file: FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
        }
    }
}

/// Opens the directory `name` in `parent`, itself and never through a link. A mount point is EXDEV.
pub(super) fn open_inside(parent: impl AsFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let parent = parent.as_fd();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    match fs::openat2(parent, name, flags, Mode::empty(), resolve) {
        // A sandbox may not know the call. Then a mount of the same file system is taken for a part of it.
        Err(Errno::NOSYS | Errno::PERM) => {
            let directory = fs::openat(parent, name, flags, Mode::empty())?;
            let is_same = fs::fstat(&directory)?.st_dev == fs::fstat(parent)?.st_dev;
            if is_same { Ok(directory) } else { Err(Errno::XDEV) }
        }
        opened => opened,
    }
}

/// The sorted names in a directory.
pub(super) fn names(directory: impl AsFd) -> rustix::io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(OsStr::from_bytes(name).to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// A directory that is being walked.
struct Level {
    directory: OwnedFd,
    path: PathBuf,
    left: std::vec::IntoIter<OsString>,
}

impl Level {
    fn new(directory: OwnedFd, path: PathBuf) -> Result<Level> {
        let left = names(&directory).map_err(failed("read the directory", &path))?.into_iter();
        Ok(Level { directory, path, left })
    }
}

fn enter(parent: BorrowedFd<'_>, name: &OsStr, path: &Path) -> Result<Option<OwnedFd>> {
    match open_inside(parent, name) {
        Ok(directory) => Ok(Some(directory)),
        Err(Errno::NOENT) => Ok(None),
        Err(Errno::XDEV) => Err(Error::new(
            Kind::InUse,
            format!("another file system is mounted at {}, which is left alone", shown(path)),
        )
        .hint(format!("umount {}", shown(path)))),
        Err(errno) => Err(failed("open the directory", path)(errno)),
    }
}

fn check_depth(levels: &[Level], path: &Path) -> Result<()> {
    if levels.len() < DEPTH_MAX {
        return Ok(());
    }
    let why = format!("{} is more than {DEPTH_MAX} directories deep", shown(path));
    Err(Error::new(Kind::Failed, why).hint("no generation of ours is: remove it by hand"))
}

/// Everything in a directory, itself included, links counted as themselves. What vanishes meanwhile is left out.
pub(super) fn walk(directory: OwnedFd, path: &Path) -> Result<Vec<Found>> {
    let look = |stat: rustix::io::Result<Stat>, path: &Path| match stat {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(failed("look at", path)(errno)),
    };
    let mut found: Vec<Found> = look(fs::fstat(&directory), path)?.iter().map(Found::of).collect();
    let mut levels = vec![Level::new(directory, path.to_owned())?];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.left.next() else {
            levels.pop();
            continue;
        };
        let path = level.path.join(&name);
        let stat = fs::statat(&level.directory, &name, AtFlags::SYMLINK_NOFOLLOW);
        let Some(stat) = look(stat, &path)? else { continue };
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            let Some(inside) = enter(level.directory.as_fd(), &name, &path)? else { continue };
            check_depth(&levels, &path)?;
            levels.push(Level::new(inside, path)?);
        }
        found.push(Found::of(&stat));
    }
    Ok(found)
}

/// Removes the directory `name` in `parent` with everything in it. `last` is removed after everything else at its
/// top. What somebody else removes at the same time is no error.
pub(super) fn remove(
    medium: &dyn Medium,
    parent: BorrowedFd<'_>,
    name: &OsStr,
    path: &Path,
    last: &str,
) -> Result<()> {
    let Some(directory) = enter(parent, name, path)? else { return Ok(()) };
    make_writable(&directory);
    let mut top = Level::new(directory, path.to_owned())?;
    let mut names: Vec<OsString> = top.left.collect();
    names.sort_by_key(|name| name == last);
    top.left = names.into_iter();
    let mut levels = vec![top];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.left.next() else {
            let emptied = levels.pop().map(|level| level.path).unwrap_or_default();
            let (parent, name) = match (levels.last(), emptied.file_name()) {
                (Some(above), Some(name)) => (above.directory.as_fd(), name),
                _ => (parent, name),
            };
            removed(medium.unlink_at(parent, name, AtFlags::REMOVEDIR), &emptied)?;
            continue;
        };
        let path = level.path.join(&name);
        if name == last {
            crash::point("generation-half-removed");
        }
        match medium.unlink_at(level.directory.as_fd(), &name, AtFlags::empty()) {
            // Which of the two it is depends on the file system.
            Err(Errno::ISDIR | Errno::PERM) if is_directory(&level.directory, &name) => {
                let Some(inside) = enter(level.directory.as_fd(), &name, &path)? else { continue };
                check_depth(&levels, &path)?;
                make_writable(&inside);
                levels.push(Level::new(inside, path)?);
            }
            unlinked => removed(unlinked, &path)?,
        }
    }
    Ok(())
}

fn is_directory(parent: impl AsFd, name: &OsStr) -> bool {
    fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Directory)
}

/// Gives us the right to remove what is in a directory, where somebody took it away. That it cannot be given shows
/// in the removal.
fn make_writable(directory: &OwnedFd) {
    if let Ok(found) = fs::fstat(directory) {
        let mode = Mode::from_raw_mode(found.st_mode);
        if !mode.contains(Mode::RWXU) {
            let _ = fs::fchmod(directory, mode | Mode::RWXU);
        }
    }
}

fn removed(result: rustix::io::Result<()>, path: &Path) -> Result<()> {
    match result {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed("remove", path)(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::medium::Disk;
    use std::os::unix::fs::symlink;

    fn open(path: &Path) -> OwnedFd {
        std::fs::File::open(path).unwrap().into()
    }

    #[test]
    fn neither_links_nor_mounts_are_entered() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join("d")).unwrap();
        symlink("d", home.path().join("link")).unwrap();
        let inside = |name: &str| open_inside(open(home.path()), OsStr::new(name)).map(drop);
        assert_eq!(inside("d"), Ok(()));
        assert!(matches!(inside("link"), Err(Errno::LOOP | Errno::NOTDIR)));
        assert_eq!(inside("missing"), Err(Errno::NOENT));
        assert_eq!(open_inside(open(Path::new("/")), OsStr::new("proc")).map(drop), Err(Errno::XDEV));
        let root = open(Path::new("/"));
        let error = enter(root.as_fd(), OsStr::new("proc"), Path::new("/proc")).unwrap_err();
        assert!(error.message().contains("mounted at /proc"), "{error}");
        assert_eq!(error.hint_text(), Some("umount /proc"));
        let error = remove(&Disk, root.as_fd(), OsStr::new("proc"), Path::new("/proc"), "").unwrap_err();
        assert_eq!(error.kind(), Kind::InUse);
    }

    #[test]
    fn a_walk_sees_each_entry_and_a_removal_takes_it() {
        let home = tempfile::tempdir().unwrap();
        let deep = home.path().join("d/a/b/c");
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("f"), [1; 5000]).unwrap();
        symlink("/etc/passwd", deep.join("link")).unwrap();
        let found = walk(open(&home.path().join("d")), Path::new("d")).unwrap();
        assert_eq!(found.len(), 6);
        assert_eq!(found.iter().filter(|found| found.is_file).count(), 1);
        let parent = open(home.path());
        remove(&Disk, parent.as_fd(), OsStr::new("d"), &home.path().join("d"), "a").unwrap();
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
        remove(&Disk, parent.as_fd(), OsStr::new("d"), &home.path().join("d"), "a").unwrap();
        assert!(Path::new("/etc/passwd").exists());
    }

    #[test]
    fn what_is_too_deep_is_not_entered() {
        let home = tempfile::tempdir().unwrap();
        let deep = ["d"; DEPTH_MAX + 2].join("/");
        std::fs::create_dir_all(home.path().join(deep)).unwrap();
        let error = walk(open(home.path()), home.path()).unwrap_err();
        assert!(error.message().contains("directories deep"), "{error}");
    }
}
