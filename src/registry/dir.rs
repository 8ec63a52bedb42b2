//! Directories and files of ours: made private whatever the umask, and reached by descriptor, so that
//! no path is walked twice.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{self, Access, AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;

use crate::error::{Error, Result};
use crate::sys::crash;

/// Mode of every directory that we make.
pub(crate) const DIRECTORY_MODE: Mode = Mode::RWXU;

/// Mode of every file that we make.
pub(crate) const FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// Hexadecimal digits in the random part of a temporary name.
const RANDOM_DIGITS: usize = 16;

/// What tells one file from every other on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    device: u64,
    inode: u64,
}

impl Inode {
    pub(crate) fn of(stat: &Stat) -> Inode {
        Inode { device: stat.st_dev, inode: stat.st_ino }
    }
}

/// Turns the errno of a call on `path` into an error: "cannot `doing` `path`: why".
pub(crate) fn failed(doing: &str, path: &Path) -> impl Fn(Errno) -> Error {
    move |errno| Error::io(doing, path, &io::Error::from(errno))
}

/// The user whose files are ours.
pub(crate) fn our_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The number that the user has outside the user namespace of this process: in it, root may stand for anybody. So
/// all processes of a user find what is called by it.
pub(crate) fn outer_uid() -> u32 {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    mapped_uid(&map, our_uid())
}

/// What `map`, a `uid_map`, makes of `uid`; itself where that does not tell.
fn mapped_uid(map: &str, uid: u32) -> u32 {
    let outer = map.lines().find_map(|line| {
        let mut numbers = line.split_ascii_whitespace().map(str::parse::<u64>);
        let (inner, outer, count) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
        let offset = u64::from(uid).checked_sub(inner).filter(|offset| *offset < count)?;
        u32::try_from(outer.checked_add(offset)?).ok()
    });
    outer.unwrap_or(uid)
}

/// Whether somebody other than the owner may write, by the mode. An access list shows in the group bits.
pub(crate) fn is_writable_by_others(stat: &Stat) -> bool {
    Mode::from_raw_mode(stat.st_mode).intersects(Mode::WGRP | Mode::WOTH)
}

/// Opens a directory to read it, itself and never through a link.
pub(crate) fn open_directory(parent: impl AsFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    fs::openat(
        parent,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

/// Makes a directory of mode 0700 and opens it. One that is there already is EEXIST.
pub(crate) fn make_directory(parent: impl AsFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let parent = parent.as_fd();
    fs::mkdirat(parent, name, DIRECTORY_MODE)?;
    let directory = match open_directory(parent, name) {
        // A umask took our own bits away.
        Err(Errno::ACCESS) => {
            make_accessible(parent, name)?;
            open_directory(parent, name)?
        }
        opened => opened?,
    };
    // Where others may write in `parent`, one of theirs may have taken its place.
    if fs::fstat(&directory)?.st_uid != our_uid() {
        return Err(Errno::PERM);
    }
    fs::fchmod(&directory, DIRECTORY_MODE)?;
    Ok(directory)
}

/// Gives a directory [`DIRECTORY_MODE`] that cannot be opened to read, itself and never through a link.
fn make_accessible(parent: impl AsFd, name: &OsStr) -> rustix::io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let itself = fs::openat(parent, name, flags, Mode::empty())?;
    fs::chmod(format!("/proc/self/fd/{}", itself.as_raw_fd()), DIRECTORY_MODE)
}

/// Opens the directory `path`, making it and its parents where they are missing, each with mode 0700.
pub(crate) fn make_directories(path: &Path) -> Result<OwnedFd> {
    let open = || fs::openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    match open() {
        Err(Errno::NOENT) => {}
        opened => return opened.map_err(failed("open the directory", path)),
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(failed("create the directory", path)(Errno::NOENT));
    };
    let parent = make_directories(parent)?;
    match make_directory(&parent, name) {
        Ok(directory) => Ok(directory),
        // Another process made it at the same moment; or it is a link that leads nowhere, which the
        // second attempt reports.
        Err(Errno::EXIST) => open().map_err(failed("open the directory", path)),
        Err(errno) => Err(failed("create the directory", path)(errno)),
    }
}

/// Replaces the file `name` by one of mode 0600 with `bytes`: readers meet the old one or the new one.
pub(crate) fn replace_file(directory: impl AsFd, name: &OsStr, bytes: &[u8]) -> rustix::io::Result<()> {
    let directory = directory.as_fd();
    let temporary = temporary_name(name, "tmp")?;
    let written = write_new_file(directory, OsStr::from_bytes(&temporary), bytes).and_then(|()| {
        crash::point("file-written-aside");
        fs::renameat(directory, temporary.as_slice(), directory, name)
    });
    if written.is_err() {
        // What failed is reported; that the half-made file may stay is the lesser matter, and the next
        // clean-up knows it by its name.
        let _ = fs::unlinkat(directory, temporary.as_slice(), AtFlags::empty());
    }
    written
}

fn write_new_file(directory: impl AsFd, name: &OsStr, bytes: &[u8]) -> rustix::io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = fs::openat(directory, name, flags, FILE_MODE)?;
    fs::fchmod(&file, FILE_MODE)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        match rustix::io::write(&file, rest) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => rest = &rest[count..],
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// What [`try_making`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Made {
    File,
    Socket,
    Directory,
}

/// Proves that something called `name` can be made in `directory` and removed, by doing so under a temporary name.
/// Modes and access lists tell less: a directory may be immutable, or of a file system that makes no such things.
///
/// # Errors
///
/// The one that its making would meet.
pub(crate) fn try_making(made: Made, directory: &Path, name: &OsStr) -> Result<()> {
    let failed = failed("create a file in", directory);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = fs::open(directory, flags, Mode::empty()).map_err(&failed)?;
    let suffix = if made == Made::Directory { "new" } else { "tmp" };
    let name = temporary_name(name, suffix).map_err(&failed)?;
    let name = name.as_slice();
    let tried = match made {
        Made::File => write_new_file(&parent, OsStr::from_bytes(name), &[]),
        // The node alone, without a socket behind it, is what a file system may refuse.
        Made::Socket => fs::mknodat(&parent, name, FileType::Socket, FILE_MODE, 0),
        Made::Directory => fs::mkdirat(&parent, name, DIRECTORY_MODE),
    };
    tried.map_err(&failed)?;
    let how = if made == Made::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    match fs::unlinkat(&parent, name, how) {
        // A clean-up took it for something that was left.
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

/// Refuses what cannot be replaced by a rename although its directory may be written: it is immutable.
///
/// # Errors
///
/// Where it is so. Nothing at the path is fine.
pub(crate) fn check_mutable(path: &Path) -> Result<()> {
    match fs::accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS) {
        // By its mode alone it would be EACCES, which hinders no rename.
        Err(Errno::PERM) => Err(failed("replace", path)(Errno::PERM)),
        _ => Ok(()),
    }
}

/// A name beside `name` that nobody has: `.NAME.<random>.<suffix>`. A long NAME is cut, so that the
/// result is a file name too.
pub(crate) fn temporary_name(name: &OsStr, suffix: &str) -> rustix::io::Result<Vec<u8>> {
    let mut random = [0; RANDOM_DIGITS / 2];
    rustix::rand::getrandom(&mut random, GetRandomFlags::empty())?;
    let mut temporary = temporary_prefix(name);
    for byte in random {
        temporary.extend_from_slice(format!("{byte:02x}").as_bytes());
    }
    temporary.push(b'.');
    temporary.extend_from_slice(suffix.as_bytes());
    Ok(temporary)
}

/// Whether `candidate` is a [`temporary_name`] of `name` with that suffix.
pub(crate) fn is_temporary_name(candidate: &[u8], name: &OsStr, suffix: &str) -> bool {
    let kept = temporary_prefix(name);
    temporary_stem(candidate, suffix).is_some_and(|stem| stem == &kept[1..kept.len() - 1])
}

/// What a [`temporary_name`] with that suffix was made from, as far as it kept it.
pub(crate) fn temporary_stem<'a>(candidate: &'a [u8], suffix: &str) -> Option<&'a [u8]> {
    let rest = candidate.strip_prefix(b".")?.strip_suffix(suffix.as_bytes())?.strip_suffix(b".")?;
    let (stem, random) = rest.split_at_checked(rest.len().checked_sub(RANDOM_DIGITS)?)?;
    let is_random = random.iter().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(b));
    stem.strip_suffix(b".").filter(|_| is_random)
}

fn temporary_prefix(name: &OsStr) -> Vec<u8> {
    const NAME_BYTES_KEPT: usize = 200;
    let name = name.as_bytes();
    let mut prefix = vec![b'.'];
    prefix.extend_from_slice(&name[..name.len().min(NAME_BYTES_KEPT)]);
    prefix.push(b'.');
    prefix
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn mode_of(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_user_has_one_number_whatever_the_namespace() {
        let whole = "         0          0 4294967295\n";
        assert_eq!((mapped_uid(whole, 0), mapped_uid(whole, 1000)), (0, 1000));
        let rootless = "         0       1000          1\n         1     100000      65536\n";
        assert_eq!((mapped_uid(rootless, 0), mapped_uid(rootless, 5)), (1000, 100_004));
        for map in ["", "0 1000", "x y z", "0 4294967295 99", rootless] {
            assert_eq!(mapped_uid(map, 70_000), 70_000, "{map}");
        }
    }

    #[test]
    fn directories_are_made_with_their_parents_and_private() {
        let home = tempfile::tempdir().unwrap();
        let deep = home.path().join("a/b/c");
        make_directories(&deep).unwrap();
        make_directories(&deep).unwrap();
        for made in ["a", "a/b", "a/b/c"] {
            assert_eq!(mode_of(&home.path().join(made)), 0o700);
        }
        std::fs::write(home.path().join("file"), "").unwrap();
        assert!(make_directories(&home.path().join("file/x")).is_err());
        symlink("nowhere", home.path().join("dangling")).unwrap();
        let error = make_directories(&home.path().join("dangling/x")).unwrap_err();
        assert!(error.message().contains("dangling"), "{}", error.message());
    }

    #[test]
    fn a_file_is_replaced_whole_and_private() {
        let home = tempfile::tempdir().unwrap();
        let directory = make_directories(home.path()).unwrap();
        replace_file(&directory, OsStr::new("f"), b"one").unwrap();
        replace_file(&directory, OsStr::new("f"), b"two").unwrap();
        let path = home.path().join("f");
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(mode_of(&path), 0o600);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1);

        std::fs::create_dir(home.path().join("d")).unwrap();
        assert!(replace_file(&directory, OsStr::new("d"), b"three").is_err());
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 2, "no temporary file is left");
    }

    #[test]
    fn what_is_tried_leaves_nothing() {
        let home = tempfile::tempdir().unwrap();
        for made in [Made::File, Made::Socket, Made::Directory] {
            try_making(made, home.path(), OsStr::new("n")).unwrap();
            assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "{made:?}");
            for place in [Path::new("/proc"), &home.path().join("missing")] {
                let error = try_making(made, place, OsStr::new("n")).unwrap_err();
                assert!(error.message().contains(place.to_str().unwrap()), "{error:?}");
            }
        }
        check_mutable(home.path()).unwrap();
        check_mutable(&home.path().join("missing")).unwrap();
    }

    #[test]
    fn temporary_names_are_told_from_the_names_of_others() {
        let name = OsStr::new("m");
        let temporary = temporary_name(name, "new").unwrap();
        assert!(is_temporary_name(&temporary, name, "new"));
        assert!(!is_temporary_name(&temporary, name, "old"));
        assert!(!is_temporary_name(&temporary, OsStr::new("n"), "new"));
        let other = temporary_name(OsStr::new("m.0123456789abcdef"), "new").unwrap();
        assert!(!is_temporary_name(&other, name, "new"));
        assert!(!is_temporary_name(b".m.new", name, "new"));
        let long = "x".repeat(255);
        let temporary = temporary_name(OsStr::new(&long), "new").unwrap();
        assert!(temporary.len() <= 255);
        assert!(is_temporary_name(&temporary, OsStr::new(&long), "new"));
    }
}
