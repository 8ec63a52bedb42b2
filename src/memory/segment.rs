//! One source file in memory: open while it is filled, then immutable.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use rustix::fs::{Mode, StatVfsMountFlags, Timespec, Timestamps};

use super::backing::{Backing, NewFile};
use crate::error::{Error, Kind, Result};
use crate::source::Identity;
use crate::sys::lock::LockedMap;
use crate::sys::map::{Mapping, Window};
use crate::sys::memfd;
use crate::units::{HUGE_PAGE_BYTES, PAGE_BYTES, round_up};

/// How often, and how long apart, sealing is tried while the kernel still holds pages for I/O.
const SEAL_TRIES: u32 = 200;
const SEAL_PAUSE: Duration = Duration::from_millis(1);

/// A segment that is being filled. Only [`OpenSegment::seal`] makes it publishable.
#[derive(Debug)]
pub(super) struct OpenSegment {
    file: NewFile,
    bytes: u64,
    mapping: Option<Mapping>,
}

impl OpenSegment {
    /// A new segment of `bytes`, zero until filled.
    pub(super) fn create(backing: &Backing, name: &str, bytes: u64) -> Result<OpenSegment> {
        Ok(OpenSegment { file: backing.create(name, bytes)?, bytes, mapping: None })
    }

    /// Maps the whole segment; the window covers it up to the end of its last page. At most once.
    pub(super) fn map(&mut self) -> Result<Window> {
        assert!(self.mapping.is_none() && self.bytes > 0);
        let length = usize::try_from(self.bytes).expect("addresses have 64 bits");
        let (mapping, window) = Mapping::shared(&self.file.writable, length).map_err(|cause| {
            Error::os(&format!("map {} bytes", self.bytes), &cause)
                .with_kind(Kind::NoRoom)
                .hint("the address space limit may be too small (ulimit -v)")
        })?;
        // Where the system allows huge pages for shared memory, the first touch gets one.
        window.advise_huge();
        self.mapping = Some(mapping);
        Ok(window)
    }

    /// Writes the content of a segment that is not mapped.
    pub(super) fn write(&self, bytes: &[u8]) -> Result<()> {
        assert_eq!(bytes.len() as u64, self.bytes);
        self.file.writable.write_all_at(bytes, 0).map_err(|cause| Error::os("write a memory file", &cause))
    }

    /// Makes it immutable: unmapped, mode 0444, the source's times, four seals or the read-only mount, and
    /// no writable descriptor left. Its descriptor is the lowest free one from `lowest_descriptor` up.
    ///
    /// All windows must be back.
    pub(super) fn seal(
        self,
        times_of: &Identity,
        lowest_descriptor: RawFd,
        huge_bytes: u64,
    ) -> Result<Segment> {
        if let Some(mapping) = self.mapping {
            assert!(mapping.unmap().is_ok(), "a segment is sealed after all its windows are back");
        }
        let NewFile { writable, read_only } = self.file;
        let os = |doing: &'static str| move |errno: rustix::io::Errno| Error::os(doing, &errno.into());
        rustix::fs::fchmod(&writable, Mode::from(0o444)).map_err(os("set the mode of a memory file"))?;
        set_mtime(&writable, times_of);
        let published = match read_only {
            Some(read_only) => {
                drop(writable);
                read_only
            }
            None => {
                let sealed = seal_patiently(writable)?;
                memfd::reopen_read_only(&sealed)
                    .map_err(|cause| Error::os("open a sealed memfd read-only through /proc", &cause))?
            }
        };
        let moved = memfd::move_to_or_above(published, lowest_descriptor)
            .map_err(|cause| Error::os("number a descriptor", &cause))?;
        let file = File::from(moved);
        let about = file.metadata().map_err(|cause| Error::os("examine a memory file", &cause))?;
        assert_eq!(about.len(), self.bytes, "nothing changed the length of a fixed memory file");
        let segment = Segment {
            file: file.into(),
            bytes: self.bytes,
            device: about.dev(),
            inode: about.ino(),
            huge_bytes,
            lock: None,
        };
        match segment.is_immutable() {
            true => Ok(segment),
            false => Err(Error::new(Kind::Failed, "a memory file could not be made immutable")
                .hint("the kernel accepted the seals or the read-only mount but does not show them; please report this")),
        }
    }
}

/// Seals, waiting for the kernel to let go of pages it still holds for I/O.
fn seal_patiently(mut file: File) -> Result<File> {
    for _ in 0..SEAL_TRIES {
        match memfd::seal(file) {
            Ok(sealed) => return Ok(sealed),
            Err((back, cause)) if cause.raw_os_error() == Some(libc::EBUSY) => file = back,
            Err((_, cause)) => return Err(Error::os("seal a memfd", &cause)),
        }
        std::thread::sleep(SEAL_PAUSE);
    }
    Err(Error::new(Kind::Failed, "cannot seal a memfd: the kernel keeps its pages busy (EBUSY)"))
}

/// Gives the file the source's modification time, as far as its file system can hold it.
fn set_mtime(file: &File, times_of: &Identity) {
    let time = Timespec { tv_sec: times_of.mtime_seconds, tv_nsec: times_of.mtime_nanoseconds.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    // A time that memory's file system cannot hold is no reason to fail: the manifest has it too.
    let _ = rustix::fs::futimens(file, &times);
}

/// Immutable memory with the bytes of one source file. The only thing that may be published.
#[derive(Debug)]
pub struct Segment {
    file: OwnedFd,
    bytes: u64,
    device: u64,
    inode: u64,
    huge_bytes: u64,
    /// Keeps its pages in memory, where asked for.
    lock: Option<LockedMap>,
}

impl Segment {
    /// The same, kept from being swapped out.
    ///
    /// # Errors
    ///
    /// [`Kind::NoRoom`] where so much may not be locked, or memory has run out.
    pub(super) fn locked(self) -> Result<Segment> {
        if self.bytes == 0 {
            return Ok(self);
        }
        let length = usize::try_from(self.bytes).expect("addresses have 64 bits");
        let lock = LockedMap::new(&self.file, length).map_err(|cause| {
            let doing = format!("lock {} bytes in memory (RLIMIT_MEMLOCK, see ulimit -l)", self.bytes);
            Error::os(&doing, &cause).with_kind(Kind::NoRoom).hint("leave out --mlock, or raise the limit")
        })?;
        Ok(Segment { lock: Some(lock), ..self })
    }

    /// How much of it is kept from being swapped out, in whole pages: all or nothing.
    pub fn locked_bytes(&self) -> u64 {
        self.lock.as_ref().map_or(0, |lock| lock.bytes() as u64)
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Memory that it takes, in whole pages.
    pub fn allocated_bytes(&self) -> u64 {
        round_up(self.bytes, PAGE_BYTES)
    }

    /// How much of it was on huge pages when it was filled: a multiple of [`HUGE_PAGE_BYTES`].
    pub fn huge_page_bytes(&self) -> u64 {
        debug_assert!(self.huge_bytes.is_multiple_of(HUGE_PAGE_BYTES));
        self.huge_bytes
    }

    /// `st_dev` of the memory file.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// `st_ino` of the memory file.
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// Its number in this process: `/proc/<pid>/fd/<number>` is what a view links to.
    pub fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// The proof: all four seals, or a read-only mount; a descriptor that cannot write; mode 0444.
    pub fn is_immutable(&self) -> bool {
        let unwritable = rustix::fs::fcntl_getfl(&self.file)
            .is_ok_and(|flags| !flags.intersects(rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::RDWR));
        let mode = rustix::fs::fstat(&self.file).is_ok_and(|about| about.st_mode & 0o777 == 0o444);
        let read_only_mount = || {
            rustix::fs::fstatvfs(&self.file)
                .is_ok_and(|about| about.f_flag.contains(StatVfsMountFlags::RDONLY))
        };
        unwritable && mode && (memfd::is_sealed(self.file.as_fd()) || read_only_mount())
    }
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
