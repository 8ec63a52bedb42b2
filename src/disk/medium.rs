//! The edge of the world: everything that a build changes on disk goes through here.
//!
//! Looking (reading, listing, examining) does not: a crash cannot come between looks.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, Timespec, Timestamps};

use crate::engine::{Engine, Selected};
use crate::error::Result;
use crate::source::Identity;

/// What changes the disk.
///
/// The contract, which the real one and the simulated one of the tests keep:
///
/// * What a call did is there for every later look, but it outlives a crash only where it was synced: the bytes and
///   the length of a file by [`Medium::sync_file`], the entries of a directory (files and directories made, linked,
///   renamed or removed in it) by [`Medium::sync_directory`]. What was not synced may have happened or not.
/// * A rename is whole: after a crash the name leads to the one or to the other.
/// * A call that fails has changed nothing that matters, and may be tried again.
/// * Nothing is overwritten: files are made new, `link` and `make_directory` meet EEXIST.
pub(super) trait Medium: Sync {
    /// A new directory; the umask takes its part of `mode`.
    fn make_directory(&self, path: &Path, mode: u32) -> io::Result<()>;

    /// A new, empty file, open to read and write whatever its mode is; the umask takes its part of `mode`.
    fn make_file(&self, path: &Path, mode: u32) -> io::Result<File>;

    /// Gives a file so many bytes of length, and the blocks of them where the file system can: it is not full later.
    fn preallocate(&self, file: &File, bytes: u64) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`.
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Cuts a file off, or makes it longer with a hole.
    fn set_length(&self, file: &File, bytes: u64) -> io::Result<()>;

    /// Gives a file the modification time of `identity`.
    fn set_modified(&self, file: &File, identity: &Identity) -> io::Result<()>;

    /// Gives a file a mode, whatever the umask is.
    fn set_mode(&self, file: &File, mode: u32) -> io::Result<()>;

    /// Shares the blocks of `from` with the empty file `to`.
    fn clone_blocks(&self, from: &File, to: &File) -> io::Result<()>;

    /// Makes bytes, length and times of a file outlive a crash.
    fn sync_file(&self, file: &File) -> io::Result<()>;

    /// Makes the entries of a directory outlive a crash.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;

    /// A further name of a file.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// A symbolic link at `path`.
    fn symlink(&self, target: &Path, path: &Path) -> io::Result<()>;

    /// Another name for what is at `from`.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Takes a file or a symbolic link out of its directory.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Takes `name` out of a directory: a file or a link, or an empty directory with `AtFlags::REMOVEDIR`.
    fn unlink_at(&self, directory: BorrowedFd<'_>, name: &OsStr, flags: AtFlags) -> rustix::io::Result<()>;

    /// An engine for writes, for the calling thread.
    fn start_engine(&self, engine: &Selected) -> Result<Box<dyn Engine>>;

    /// An engine for reads, for the calling thread. It changes nothing, but a test has it fail.
    fn start_reader(&self, engine: &Selected) -> Result<Box<dyn Engine>> {
        engine.start()
    }
}

/// The real one.
#[derive(Debug)]
pub(super) struct Disk;

impl Medium for Disk {
    fn make_directory(&self, path: &Path, mode: u32) -> io::Result<()> {
        Ok(rustix::fs::mkdir(path, Mode::from_raw_mode(mode))?)
    }

    fn make_file(&self, path: &Path, mode: u32) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::open(path, flags, Mode::from_raw_mode(mode))?))
    }

    fn preallocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        let allocated = uninterrupted(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes));
        match allocated.map_err(|cause| cause.raw_os_error()) {
            Ok(()) => Ok(()),
            // NFS 3, FUSE and old overlays: blocks come with the writes.
            Err(Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)) => file.set_len(bytes),
            Err(errno) => Err(io::Error::from_raw_os_error(errno.unwrap_or(libc::EIO))),
        }
    }

    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(bytes, offset)
    }

    fn set_length(&self, file: &File, bytes: u64) -> io::Result<()> {
        file.set_len(bytes)
    }

    fn set_modified(&self, file: &File, identity: &Identity) -> io::Result<()> {
        let modified =
            Timespec { tv_sec: identity.mtime_seconds, tv_nsec: identity.mtime_nanoseconds.into() };
        Ok(rustix::fs::futimens(file, &Timestamps { last_access: modified, last_modification: modified })?)
    }

    fn set_mode(&self, file: &File, mode: u32) -> io::Result<()> {
        Ok(rustix::fs::fchmod(file, Mode::from_raw_mode(mode))?)
    }

    fn clone_blocks(&self, from: &File, to: &File) -> io::Result<()> {
        uninterrupted(|| rustix::fs::ioctl_ficlone(to, from))
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        uninterrupted(|| rustix::fs::fsync(file))
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        let directory = File::open(path)?;
        match uninterrupted(|| rustix::fs::fsync(&directory)) {
            // Some network file systems have nothing to sync in a directory: changes are on the server at once.
            Err(cause) if cause.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            other => other,
        }
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::hard_link(from, to)
    }

    fn symlink(&self, target: &Path, path: &Path) -> io::Result<()> {
        std::os::unix::fs::symlink(target, path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            // Network and FUSE file systems: only an empty directory would be replaced, which is no generation.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => std::fs::rename(from, to),
            other => Ok(other?),
        }
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn unlink_at(&self, directory: BorrowedFd<'_>, name: &OsStr, flags: AtFlags) -> rustix::io::Result<()> {
        rustix::fs::unlinkat(directory, name, flags)
    }

    fn start_engine(&self, engine: &Selected) -> Result<Box<dyn Engine>> {
        engine.start()
    }
}

/// Tries again where a signal came between.
fn uninterrupted(mut call: impl FnMut() -> rustix::io::Result<()>) -> io::Result<()> {
    Ok(rustix::io::retry_on_intr(&mut call)?)
}
