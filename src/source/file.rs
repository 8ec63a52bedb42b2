//! One source file, opened: by O_DIRECT or why not, and how much of it is in the page cache.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Advice, AtFlags, Mode, OFlags, StatxFlags};

use super::{Identity, SelectedFile};
use crate::error::{Error, Kind, Result, shown};
use crate::sys::cache;
use crate::units::PAGE_BYTES;

/// Whether to bypass the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// From the page cache what is there, the rest with O_DIRECT where that is possible and not slower.
    #[default]
    Auto,
    /// O_DIRECT for everything; an error where it is refused.
    Always,
    /// Through the page cache.
    Never,
    /// What the device holds, whatever the page cache has: with O_DIRECT where that is possible, else through the
    /// page cache after what it has of the file was written out and dropped. Not on the command line: it is for
    /// checking files against what they should be.
    Storage,
}

impl Direct {
    /// The names on the command line.
    pub const NAMES: [&'static str; 3] = ["auto", "always", "never"];

    /// The choice of a name.
    pub fn from_name(name: &str) -> Result<Direct> {
        match name {
            "auto" => Ok(Direct::Auto),
            "always" => Ok(Direct::Always),
            "never" => Ok(Direct::Never),
            _ => Err(Error::new(Kind::Usage, format!("--direct cannot be '{}'", name.escape_debug()))
                .hint("choose auto, always or never")),
        }
    }
}

/// How one range is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// With O_DIRECT, from the device.
    Direct,
    /// Copied from the page cache, where it is whole.
    Cached,
    /// Through the page cache, from the device.
    Buffered,
}

/// How much of the file was in the page cache when it was opened, before anything of it was read.
#[derive(Debug)]
enum Residency {
    /// Nothing.
    None,
    /// The kernel does not tell: it shows the page cache only of files that the caller owns or may write.
    Unknown,
    /// All of it.
    All,
    /// By units of [`SourceFile::unit`] bytes: the pages of each.
    Mixed(Vec<u32>),
}

/// An open source file.
#[derive(Debug)]
pub struct SourceFile {
    name: String,
    file: Arc<File>,
    /// A second description with O_DIRECT, or `file` itself where that was switched over.
    direct: Option<Arc<File>>,
    /// What O_DIRECT needs of offsets and addresses, in bytes.
    alignment: u64,
    direct_refused: AtomicBool,
    /// Some of it was read through the page cache, from the device.
    buffered: AtomicBool,
    choice: Direct,
    bytes: u64,
    unit: u64,
    residency: Residency,
    change_time: Option<ChangeTime>,
}

/// When the kernel last noted a change of a file or of what it knows of it (`st_ctime`). Nobody can set it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeTime {
    seconds: i64,
    nanoseconds: i64,
}

impl ChangeTime {
    /// Of the file at `path`, where its file system's word on that is taken: see [`SourceFile::change_time`].
    pub fn told_at(path: &Path) -> Option<ChangeTime> {
        let is_told = rustix::fs::statfs(path).is_ok_and(|about| is_local(about.f_type as u64));
        if !is_told {
            return None;
        }
        std::fs::symlink_metadata(path).ok().map(|metadata| ChangeTime::of(&metadata))
    }

    /// What `metadata` says.
    pub fn of(metadata: &Metadata) -> ChangeTime {
        ChangeTime { seconds: metadata.ctime(), nanoseconds: metadata.ctime_nsec() }
    }
}

impl SourceFile {
    /// Opens a file and checks that it is the one that was selected. `unit` is the length in which it
    /// will be read and residency is looked at: a multiple of the page size.
    pub fn open(selected: &SelectedFile, choice: Direct, unit: u64) -> Result<SourceFile> {
        assert!(unit > 0 && unit.is_multiple_of(PAGE_BYTES));
        // Not blocking, and not following: what was a file may have become a FIFO or a link since.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        let descriptor =
            rustix::fs::open(&selected.real, flags, Mode::empty()).map_err(|errno| match errno {
                rustix::io::Errno::NOENT | rustix::io::Errno::LOOP => {
                    changed(&selected.path, "it is gone or replaced")
                }
                _ => Error::io("open", &selected.real, &errno.into()),
            })?;
        let file = File::from(descriptor);
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::from_bits_retain(libc::STATX_DIOALIGN);
        let about = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, wanted)
            .map_err(|errno| Error::io("examine", &selected.real, &errno.into()))?;
        check_identity(selected, &about)?;
        settle_writes(&file);
        let change_time = match tells_change_time(&file) {
            true => file.metadata().ok().map(|metadata| ChangeTime::of(&metadata)),
            false => None,
        };
        let bytes = selected.identity.bytes;
        let residency = match choice {
            Direct::Always => Residency::None,
            _ => residency(&file, bytes, unit, about.stx_uid),
        };
        let alignment = direct_alignment(&about);
        let mut source = SourceFile {
            name: selected.path.clone(),
            file: Arc::new(file),
            direct: None,
            alignment: alignment.unwrap_or(PAGE_BYTES),
            direct_refused: AtomicBool::new(false),
            buffered: AtomicBool::new(false),
            choice,
            bytes,
            unit,
            residency,
            change_time,
        };
        source.set_up_direct(alignment.is_some())?;
        if choice == Direct::Storage && !source.can_read_direct() {
            source.drop_cached();
            source.residency = Residency::None;
        }
        source.forgo_readahead();
        Ok(source)
    }

    /// Makes the description for O_DIRECT where it will be used, and clears O_NONBLOCK on the other.
    fn set_up_direct(&mut self, possible: bool) -> Result<()> {
        let wanted = match self.choice {
            Direct::Never => false,
            Direct::Storage => possible,
            Direct::Auto | Direct::Always => possible && !matches!(self.residency, Residency::All),
        };
        let single =
            self.bytes <= self.unit && matches!(self.residency, Residency::None | Residency::Unknown);
        let result = if !wanted {
            self.set_flags(OFlags::empty())
        } else if single {
            // The file is one read: switching its description over saves opening it twice.
            self.set_flags(OFlags::DIRECT).map(|()| self.direct = Some(Arc::clone(&self.file)))
        } else {
            self.set_flags(OFlags::empty()).and_then(|()| {
                let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
                let descriptor = rustix::fs::open(path, flags, Mode::empty())?;
                self.direct = Some(Arc::new(File::from(descriptor)));
                Ok(())
            })
        };
        match result {
            Ok(()) if self.direct.is_none() && self.choice == Direct::Always && self.bytes > 0 => {
                Err(self.refuses_direct("the file system does not support it"))
            }
            Ok(()) => Ok(()),
            Err(cause) if self.choice == Direct::Always => {
                Err(self.refuses_direct(&crate::error::reason(&cause)))
            }
            Err(_) => {
                self.direct = None;
                self.set_flags(OFlags::empty())
                    .map_err(|cause| Error::io("set up", self.name.as_ref(), &cause))
            }
        }
    }

    /// Many reads are in flight at once, so the kernel's own readahead gains nothing; but it would bring in
    /// pages that another worker has read and dropped already.
    fn forgo_readahead(&self) {
        let all_cached = matches!(self.residency, Residency::All) && self.choice != Direct::Storage;
        if self.bytes > self.unit && !all_cached {
            // Advice: with readahead the load is as right, only the page cache is less so.
            let _ = rustix::fs::fadvise(&self.file, 0, None, Advice::Random);
        }
    }

    fn set_flags(&self, flags: OFlags) -> io::Result<()> {
        Ok(rustix::fs::fcntl_setfl(&self.file, flags)?)
    }

    fn refuses_direct(&self, why: &str) -> Error {
        Error::new(Kind::Failed, format!("cannot read {} with O_DIRECT: {why}", shown(&self.name)))
            .hint("leave --direct at auto")
    }

    /// Its path in the source directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// When it had last been changed before anything was read. `None` where the file system's word on that is not
    /// taken: some that live in another process or machine make one up each time they are asked.
    pub fn change_time(&self) -> Option<ChangeTime> {
        self.change_time
    }

    /// What O_DIRECT needs of offsets and lengths.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// How to read `[offset, offset + length)`, a range inside one unit. `prefer_buffered`: reading this
    /// file system through the page cache was found to be faster.
    pub fn method(&self, offset: u64, prefer_buffered: bool) -> Method {
        let whole = match &self.residency {
            Residency::None | Residency::Unknown => false,
            Residency::All => true,
            Residency::Mixed(pages) => {
                let unit = offset / self.unit;
                pages.get(unit as usize).is_some_and(|pages| u64::from(*pages) == self.pages_of_unit(unit))
            }
        };
        let direct_possible = self.can_read_direct()
            && !self.direct_refused.load(Ordering::Relaxed)
            && offset.is_multiple_of(self.alignment);
        match self.choice {
            Direct::Always => Method::Direct,
            Direct::Storage if direct_possible => Method::Direct,
            Direct::Auto | Direct::Never if whole => Method::Cached,
            Direct::Auto if direct_possible && !prefer_buffered => Method::Direct,
            _ => {
                self.buffered.store(true, Ordering::Relaxed);
                Method::Buffered
            }
        }
    }

    /// Whether there is a description for O_DIRECT that takes windows of whole pages.
    fn can_read_direct(&self) -> bool {
        self.direct.is_some() && self.alignment <= PAGE_BYTES
    }

    /// Has the file written out and drops it from the page cache. A page that somebody has mapped stays, and is what
    /// is read: the kernel has no way around it.
    fn drop_cached(&self) {
        // Where it is refused (a read-only file system) there is nothing to write out.
        let _ = rustix::fs::fdatasync(&self.file);
        // Advice: where it is refused the file is read as the kernel has it.
        let _ = rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed);
    }

    fn pages_of_unit(&self, unit: u64) -> u64 {
        let start = unit * self.unit;
        (self.bytes - start).min(self.unit).div_ceil(PAGE_BYTES)
    }

    /// The descriptor for a method.
    pub fn descriptor(&self, method: Method) -> &Arc<File> {
        match method {
            Method::Direct => self.direct.as_ref().unwrap_or(&self.file),
            Method::Cached | Method::Buffered => &self.file,
        }
    }

    /// Called when a direct read was refused: from now on this file is read through the page cache. An
    /// error where the user insists on O_DIRECT.
    pub fn direct_was_refused(&self, cause: &io::Error) -> Result<Method> {
        if self.insists_on_direct() {
            return Err(self.refuses_direct(&crate::error::reason(cause)));
        }
        self.direct_refused.store(true, Ordering::Relaxed);
        self.go_on_buffered()
    }

    /// Whether nothing may be read in another way than with O_DIRECT.
    pub fn insists_on_direct(&self) -> bool {
        self.choice == Direct::Always
    }

    /// Called where the rest of a range can only be read through the page cache, because a direct read ended
    /// at an odd offset.
    pub fn go_on_buffered(&self) -> Result<Method> {
        assert!(!self.insists_on_direct());
        let is_first = !self.buffered.swap(true, Ordering::Relaxed);
        if is_first && self.choice == Direct::Storage {
            self.drop_cached();
        }
        if self.direct.as_ref().is_some_and(|direct| Arc::ptr_eq(direct, &self.file)) {
            self.set_flags(OFlags::empty())
                .map_err(|cause| Error::io("set up", self.name.as_ref(), &cause))?;
        }
        Ok(Method::Buffered)
    }

    /// Drops from the page cache what reading `[offset, offset + length)` brought into it: what was there
    /// before stays. Some file systems serve O_DIRECT through the cache, so this looks in every case. To be
    /// called for each range behind the cursor, and for the whole file at the end: readahead goes further
    /// than what was asked for.
    pub fn forget(&self, offset: u64, length: u64) {
        match &self.residency {
            Residency::All => {}
            // What others have there must not suffer from reads that went past the page cache.
            Residency::Unknown if !self.buffered.load(Ordering::Relaxed) => {}
            Residency::None | Residency::Unknown => self.drop_range(offset, length, 0),
            Residency::Mixed(pages) => {
                let mut at = offset / self.unit;
                while at * self.unit < offset + length {
                    let before = u64::from(pages[at as usize]);
                    if before < self.pages_of_unit(at) {
                        self.drop_range(at * self.unit, self.unit.min(self.bytes - at * self.unit), before);
                    }
                    at += 1;
                }
            }
        }
    }

    /// [`SourceFile::forget`] for the whole file.
    pub fn forget_all(&self) {
        self.forget(0, self.bytes);
    }

    /// Drops a range where it now holds more pages than `before`, or where that cannot be known: an overlay
    /// counts none, whatever its layers hold.
    fn drop_range(&self, offset: u64, length: u64, before: u64) {
        let Some(nonzero) = std::num::NonZeroU64::new(length) else { return };
        let all_direct = !self.buffered.load(Ordering::Relaxed);
        if all_direct && cache::cached_pages(&self.file, offset, length).is_ok_and(|pages| pages <= before) {
            return;
        }
        // Advice: where it is refused the pages stay until the kernel needs them.
        let _ = rustix::fs::fadvise(&self.file, offset, Some(nonzero), Advice::DontNeed);
    }

    /// Whether the file lies on a network or FUSE file system, where O_DIRECT may be the slower way.
    pub fn is_remote(&self) -> bool {
        rustix::fs::fstatfs(&self.file)
            .is_ok_and(|about| REMOTE.contains(&(about.f_type as u64 & 0xffff_ffff)))
    }
}

fn tells_change_time(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|about| is_local(about.f_type as u64))
}

fn is_local(kind: u64) -> bool {
    LOCAL.contains(&(kind & 0xffff_ffff))
}

/// `f_type` of file systems of this kernel's own, whose change time moves by a change and by nothing else: ext4,
/// XFS, Btrfs, tmpfs, F2FS, overlay, ZFS, bcachefs.
const LOCAL: [u64; 8] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0xf2f5_2010, 0x794c_7630, 0x2fc1_2fc1, 0xca45_1a4e];

/// `f_type` of file systems whose bytes come over a network or out of another process: NFS, SMB (three
/// generations), Ceph, FUSE, 9P, Lustre, AFS, Coda, GFS2, OCFS2, and virtiofs (which reports FUSE).
const REMOTE: [u64; 12] = [
    0x6969,
    0x517b,
    0xff53_4d42,
    0xfe53_4d42,
    0x00c3_6400,
    0x6573_5546,
    0x0102_1997,
    0x0bd0_0bd0,
    0x5346_414f,
    0x7375_7245,
    0x0116_1970,
    0x7461_636f,
];

/// The error for a file that is not what was selected any more.
pub fn changed(path: &str, how: &str) -> Error {
    Error::new(Kind::SourceChanged, format!("{} changed while it was read: {how}", shown(path)))
        .hint("start again when nothing writes to the model directory any more")
}

/// Has changed pages written out. Who writes through a shared map moves the modification time only when a
/// page becomes dirty: pages that are dirty already could be changed during the load without a trace, clean
/// ones cannot.
fn settle_writes(file: &File) {
    if cache::unwritten_pages(file).is_ok_and(|pages| pages > 0) {
        // Where it is refused (a read-only file system) there is nothing unwritten of that kind.
        let _ = rustix::fs::fdatasync(file);
    }
}

fn check_identity(selected: &SelectedFile, about: &rustix::fs::Statx) -> Result<()> {
    let now = Identity {
        device: rustix::fs::makedev(about.stx_dev_major, about.stx_dev_minor),
        inode: about.stx_ino,
        bytes: about.stx_size,
        mtime_seconds: about.stx_mtime.tv_sec,
        mtime_nanoseconds: about.stx_mtime.tv_nsec,
    };
    check_unchanged(selected, &now)
}

/// Whether `now` is still the file that was selected; the error says how it changed.
pub fn check_unchanged(selected: &SelectedFile, now: &Identity) -> Result<()> {
    if selected.identity.is_unchanged(now) {
        return Ok(());
    }
    Err(changed(&selected.path, &selected.identity.differences(now).join(", ")))
}

/// What O_DIRECT needs here; `None` where the file system says that it cannot. Kernels before 6.1 and file
/// systems that do not tell get the page size, which serves all common devices.
fn direct_alignment(about: &rustix::fs::Statx) -> Option<u64> {
    if about.stx_mask & libc::STATX_DIOALIGN == 0 {
        return Some(PAGE_BYTES);
    }
    let alignment = u64::from(about.stx_dio_offset_align.max(about.stx_dio_mem_align));
    (alignment > 0).then_some(alignment)
}

/// Looks at the page cache before anything is read.
fn residency(file: &File, bytes: u64, unit: u64, owner: u32) -> Residency {
    if bytes == 0 {
        return Residency::None;
    }
    // The kernel hides the truth from who neither owns nor may write the file, and `mincore` even lies.
    let own = rustix::process::geteuid();
    let may_ask_mincore = own.is_root() || own.as_raw() == owner;
    let count = |offset: u64, length: u64| match cache::cached_pages(file, offset, length) {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) && may_ask_mincore => {
            cache::resident_pages(file, offset, usize::try_from(length).unwrap_or(usize::MAX)).ok()
        }
        other => other.ok(),
    };
    match count(0, bytes) {
        None => Residency::Unknown,
        Some(0) => Residency::None,
        Some(pages) if pages >= bytes.div_ceil(PAGE_BYTES) => Residency::All,
        Some(_) => {
            let units = (0..bytes.div_ceil(unit)).map(|index| {
                let start = index * unit;
                count(start, unit.min(bytes - start)).unwrap_or(0) as u32
            });
            Residency::Mixed(units.collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    const BYTES: usize = 3 << 20;
    const UNIT: u64 = 1 << 20;

    /// A file that is written out, as selected.
    fn file_in(directory: &tempfile::TempDir) -> SelectedFile {
        let real = directory.path().join("a");
        std::fs::write(&real, vec![3; BYTES]).unwrap();
        let file = File::open(&real).unwrap();
        file.sync_all().unwrap();
        let identity = Identity::of(&file.metadata().unwrap());
        SelectedFile { path: "a".to_owned(), real, identity, passthrough: false }
    }

    fn cached(selected: &SelectedFile) -> u64 {
        cache::cached_pages(&File::open(&selected.real).unwrap(), 0, 0).unwrap_or(u64::MAX)
    }

    /// Brings it into the page cache, or drops it from there. Whether that can be seen to work here.
    fn set_cached(selected: &SelectedFile, wanted: bool) -> bool {
        let mut file = File::open(&selected.real).unwrap();
        if wanted {
            file.read_to_end(&mut Vec::new()).unwrap();
        } else {
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        }
        let whole = (BYTES as u64).div_ceil(PAGE_BYTES);
        cached(selected) == if wanted { whole } else { 0 }
    }

    #[test]
    fn storage_is_read_whatever_the_page_cache_has() {
        let directory = tempfile::tempdir().unwrap();
        let selected = file_in(&directory);
        if !set_cached(&selected, false) || !set_cached(&selected, true) {
            return crate::skipped("the page cache of the temporary directory cannot be looked at");
        }
        let auto = SourceFile::open(&selected, Direct::Auto, UNIT).unwrap();
        assert_eq!(auto.method(0, false), Method::Cached, "the test would show nothing");
        let source = SourceFile::open(&selected, Direct::Storage, UNIT).unwrap();
        if source.direct.is_none() {
            return crate::skipped("the temporary directory takes no O_DIRECT");
        }
        assert_eq!(source.method(0, false), Method::Direct);
        source.forget_all();
        assert_eq!(cached(&selected), BYTES as u64 / PAGE_BYTES, "what others have there stays");
        // The device refuses after all: what the page cache has must not be taken for what the device holds.
        let refused = io::Error::from_raw_os_error(libc::EINVAL);
        assert_eq!(source.direct_was_refused(&refused).unwrap(), Method::Buffered);
        assert_eq!(cached(&selected), 0);
        assert_eq!(source.method(UNIT, false), Method::Buffered);
        assert!(!source.insists_on_direct());
        assert!(Direct::NAMES.iter().all(|name| Direct::from_name(name).unwrap() != Direct::Storage));
    }
}
