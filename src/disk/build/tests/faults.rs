//! What storage does on a bad day: nothing half-made is taken for whole, and the next build works.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::AtFlags;

use super::*;
use crate::engine::Engine;
use crate::engine::fault::{Faults, Faulty};
use crate::source::Identity;

/// The real disk, with faults in the engines and a limit of what can be allocated.
#[derive(Default)]
pub(super) struct Bad {
    pub(super) reads: Arc<Faults>,
    pub(super) writes: Arc<Faults>,
    /// Bytes that can be allocated; 0: all.
    pub(super) room: u64,
    /// Each sync of a file takes so long.
    pub(super) sync_time: std::time::Duration,
    /// Files of the copy that were open at a time, at the most.
    pub(super) open_max: std::sync::atomic::AtomicUsize,
    /// The thread that writes panics.
    pub(super) panics: bool,
    /// Called at each allocation: something that happens in the middle of a copy.
    pub(super) meanwhile: Option<Box<dyn Fn() + Sync>>,
}

impl Medium for Bad {
    fn make_directory(&self, path: &Path, mode: u32) -> io::Result<()> {
        Disk.make_directory(path, mode)
    }
    fn make_file(&self, path: &Path, mode: u32) -> io::Result<File> {
        Disk.make_file(path, mode)
    }
    fn preallocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        self.meanwhile.iter().for_each(|meanwhile| meanwhile());
        if self.room > 0 && bytes > self.room {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        Disk.preallocate(file, bytes)
    }
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        Disk.write(file, bytes, offset)
    }
    fn set_length(&self, file: &File, bytes: u64) -> io::Result<()> {
        Disk.set_length(file, bytes)
    }
    fn set_modified(&self, file: &File, identity: &Identity) -> io::Result<()> {
        Disk.set_modified(file, identity)
    }
    fn set_mode(&self, file: &File, mode: u32) -> io::Result<()> {
        Disk.set_mode(file, mode)
    }
    fn clone_blocks(&self, from: &File, to: &File) -> io::Result<()> {
        Disk.clone_blocks(from, to)
    }
    fn sync_file(&self, file: &File) -> io::Result<()> {
        if !self.sync_time.is_zero() {
            std::thread::sleep(self.sync_time);
            let copy = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
            let is_beside = |path: PathBuf| path.parent() == copy.parent();
            let open =
                fs::read_dir("/proc/self/fd")?.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
            self.open_max.fetch_max(open.filter(|path| is_beside(path.clone())).count(), Ordering::Relaxed);
        }
        Ok(())
    }
    fn sync_directory(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }
    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.link(from, to)
    }
    fn symlink(&self, target: &Path, path: &Path) -> io::Result<()> {
        Disk.symlink(target, path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        Disk.remove_file(path)
    }
    fn unlink_at(&self, directory: BorrowedFd<'_>, name: &OsStr, flags: AtFlags) -> rustix::io::Result<()> {
        Disk.unlink_at(directory, name, flags)
    }
    fn start_engine(&self, engine: &Selected) -> Result<Box<dyn Engine>> {
        assert!(!self.panics, "as the test wants it");
        Ok(Box::new(Faulty::new(engine.start()?, Arc::clone(&self.writes))))
    }
    fn start_reader(&self, engine: &Selected) -> Result<Box<dyn Engine>> {
        Ok(Box::new(Faulty::new(engine.start()?, Arc::clone(&self.reads))))
    }
}

/// A file of two chunks, one of one, and one that goes through the page cache.
const FEW: &[(&str, usize)] = &[("config.json", 700), ("model", (2 << 20) + 5000), ("sub/other", 140_000)];

pub(super) fn at(fail_at: u64, fail_on: bool, errno: i32) -> Arc<Faults> {
    Arc::new(Faults { fail_at, fail_on, errno, ..Faults::default() })
}

/// Fails the n-th operation for every n, once and for ever. `bad` makes the disk of it.
fn every_operation_fails(bad: impl Fn(Arc<Faults>) -> Bad, whose: impl Fn(&Bad) -> &Arc<Faults>) {
    for fail_on in [false, true] {
        let mut failures = 0;
        for n in 1.. {
            let bed = Bed::new(FEW);
            let disk = bad(at(n, fail_on, libc::EIO));
            let outcome = bed.build_as(&disk, &bed.store(), &bed.selection(), &Seen::default());
            if whose(&disk).operations.load(Ordering::Relaxed) < n {
                outcome.unwrap();
                break;
            }
            failures += 1;
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), Kind::Failed, "{error}");
            assert!(error.message().contains("input/output error (EIO)"), "{error}");
            assert!(FEW.iter().any(|(path, _)| error.message().contains(path)), "{error}");
            assert!(bed.store().newest(&bed.name).unwrap().is_none());
            let left = bed.entries();
            assert!(left.is_empty() || left == [".m@1.staging"], "{left:?}");
            bed.build();
            assert_eq!(bed.entries().len(), 1);
        }
        assert!(failures >= 3, "only {failures} operations were met");
    }
}

#[test]
fn a_failed_read_leaves_nothing_that_is_taken_for_whole() {
    every_operation_fails(|reads| Bad { reads, ..Bad::default() }, |bad| &bad.reads);
}

#[test]
fn a_failed_write_leaves_nothing_that_is_taken_for_whole() {
    every_operation_fails(|writes| Bad { writes, ..Bad::default() }, |bad| &bad.writes);
}

#[test]
fn short_and_refused_transfers_are_gone_on_with() {
    for (short_bytes, fail_at, errno) in
        [(5000, 0, 0), (4096, 0, 0), (0, 1, libc::EINTR), (0, 2, libc::EAGAIN), (0, 1, libc::EINVAL)]
    {
        let bed = Bed::new(FEW);
        let faults = || Arc::new(Faults { short_bytes, fail_at, errno, reorder: true, ..Faults::default() });
        // Every write of a file that goes through the page cache would be refused for another reason.
        let (reads, writes) = (Arc::default(), faults());
        let bed = if errno == libc::EINVAL { Bed::new(&FEW[1..2]) } else { bed };
        let disk = Bad { reads, writes, ..Bad::default() };
        let built = bed.build_as(&disk, &bed.store(), &bed.selection(), &Seen::default()).unwrap();
        is_whole(&built.generation, &bed.source());
    }
}

#[test]
fn a_full_disk_is_told_and_left_as_it_was() {
    let bed = Bed::new(FEW);
    let disk = Bad { room: 1 << 20, ..Bad::default() };
    let error = bed.build_as(&disk, &bed.store(), &bed.selection(), &Seen::default()).unwrap_err();
    assert_eq!(error.kind(), Kind::NoRoom);
    assert!(error.message().contains("model: no space left on the device (ENOSPC)"), "{error}");
    assert!(error.hint_text().is_some_and(|hint| hint.contains("--cache-root")));
    assert_eq!(bed.entries(), [""; 0]);
    for (errno, words) in [(libc::ENOSPC, "ENOSPC"), (libc::EDQUOT, "EDQUOT")] {
        let disk = Bad { writes: at(2, true, errno), ..Bad::default() };
        let error = bed.build_as(&disk, &bed.store(), &bed.selection(), &Seen::default()).unwrap_err();
        assert_eq!(error.kind(), Kind::NoRoom);
        assert!(error.message().contains(words), "{error}");
        assert_eq!(bed.entries(), [""; 0]);
    }
    bed.build();
}

#[test]
fn a_source_that_changes_meanwhile_is_refused() {
    let bed = Bed::new(FEW);
    let path = bed.source().join("model");
    let write = move || {
        let file = fs::OpenOptions::new().append(true).open(&path).unwrap();
        io::Write::write_all(&mut &file, b"more").unwrap();
    };
    let disk = Bad { meanwhile: Some(Box::new(write)), ..Bad::default() };
    let error = bed.build_as(&disk, &bed.store(), &bed.selection(), &Seen::default()).unwrap_err();
    assert_eq!(error.kind(), Kind::SourceChanged, "{error}");
    assert!(error.message().contains("model"), "{error}");
    assert!(bed.store().newest(&bed.name).unwrap().is_none());
    bed.build();
    assert_eq!(bed.entries().len(), 1);
}

#[test]
fn what_was_copied_of_a_source_that_was_written_to_is_not_taken_over() {
    let mut bed = Bed::new(&[("model", 6 << 20)]);
    // One after the other through few buffers: the first is finished long before all is read.
    bed.workers = 1;
    (0..40).for_each(|index| bed.put(&format!("part-{index}"), &bytes_of(index, 1 << 20)));
    let path = bed.source().join("model");
    // Longer than the clock of a file system takes from one time to the next.
    std::thread::sleep(std::time::Duration::from_millis(30));
    let write = move || {
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        let before = Identity::of(&file.metadata().unwrap());
        io::Write::write_all(&mut &file, b"more").unwrap();
        Disk.set_modified(&file, &before).unwrap();
    };
    let disk = Bad { meanwhile: Some(Box::new(write)), ..Bad::default() };
    let error = bed.build_as(&disk, &bed.store(), &bed.selection(), &Seen::default()).unwrap_err();
    assert_eq!(error.kind(), Kind::SourceChanged, "{error}");
    if let [left] = &bed.entries()[..] {
        let journal = crate::disk::journal::read(&bed.root().join(left)).unwrap().unwrap();
        assert!(journal.finished.iter().all(|file| file.path != "model"), "{journal:?}");
    }
    bed.build();
}

#[test]
fn a_read_that_fails_while_what_was_taken_over_is_checked_leaves_buffers_for_the_copy() {
    let mut bed = Bed::new(&[("large", 9 << 20), ("other", 9 << 20)]);
    bed.workers = 1;
    bed.build();
    bed.put("added", b"something new");
    let disk = Bad { reads: at(2, false, libc::EIO), ..Bad::default() };
    let built = bed.build_as(&disk, &bed.store(), &bed.selection(), &Seen::default()).unwrap();
    is_whole(&built.generation, &bed.source());
    assert!(built.notes.iter().any(|note| note.contains("is copied anew")), "{:?}", built.notes);
}

#[test]
fn a_panic_of_the_thread_that_writes_hangs_nobody() {
    let mut bed = Bed::new(&[("large", 9 << 20)]);
    bed.workers = 1;
    let disk = Bad { panics: true, ..Bad::default() };
    let build = || bed.build_as(&disk, &bed.store(), &bed.selection(), &Seen::default());
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(build)).is_err());
}

#[test]
fn files_that_wait_for_a_slow_disk_are_not_all_open() {
    let bed = Bed::empty();
    (0..600).for_each(|index| bed.put(&format!("f{index}"), &bytes_of(index, 100)));
    let disk = Bad { sync_time: std::time::Duration::from_millis(30), ..Bad::default() };
    let built = bed.build_as(&disk, &bed.store(), &bed.selection(), &Seen::default()).unwrap();
    is_whole(&built.generation, &bed.source());
    let open = disk.open_max.into_inner();
    assert!(open > 8 && open <= crate::disk::writer::FILES_OPEN_MAX + bed.workers, "{open} were open");
}
