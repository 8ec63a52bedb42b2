//! Byte for byte: what a segment holds is what the file held, for every engine, method, backing and
//! number of workers, on good days and bad ones.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use iloader::engine::fault::{Faults, Faulty};
use iloader::engine::{self, Engine, Selected};
use iloader::load::{Counts, Options, Watch};
use iloader::memory::{self, Resident, Segment};
use iloader::source::{Direct, Identity, SelectedFile, Selection};
use iloader::sys::map::ReaderMap;
use iloader::{Kind, Result, plan};

use crate::harness::{bytes_of, scratch_dir, skipped};

const CHUNK: u64 = 4 << 20;

/// Lengths around every boundary of the design.
const LENGTHS: [u64; 15] = [
    0,
    1,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    (2 << 20) - 1,
    2 << 20,
    (2 << 20) + 1,
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    2 * CHUNK + 12_345,
];

#[derive(Default)]
pub(crate) struct Meter {
    bytes: AtomicU64,
    files: AtomicU64,
    cancelled: AtomicBool,
    cancel_at: u64,
}

impl Watch for Meter {
    fn advanced(&self, bytes: u64) {
        let before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if self.cancel_at > 0 && before + bytes >= self.cancel_at {
            self.cancelled.store(true, Ordering::Relaxed);
        }
    }
    fn finished_file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }
    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

/// The files of a directory as a selection, made without the code that selects.
pub(crate) fn select(directory: &Path) -> Selection {
    let mut files: Vec<SelectedFile> = std::fs::read_dir(directory)
        .unwrap()
        .map(std::result::Result::unwrap)
        .filter(|entry| entry.file_type().unwrap().is_file())
        .map(|entry| SelectedFile {
            path: entry.file_name().into_string().unwrap(),
            real: entry.path(),
            identity: Identity::of(&entry.metadata().unwrap()),
            passthrough: false,
        })
        .collect();
    files.sort_by(|one, other| one.path.cmp(&other.path));
    Selection::of_files(directory, files)
}

pub(crate) fn settings(
    name: &str,
    engine: engine::Choice,
    backing: memory::Choice,
    options: Options,
) -> memory::Settings {
    memory::Settings {
        cache_name: name.to_owned(),
        backing,
        engine: Selected::probe(engine, Some(4)).unwrap(),
        options,
        lowest_descriptor: 600,
        lock_memory: false,
        hashing: None,
        stands_for: None,
    }
}

pub(crate) fn engines() -> Vec<engine::Choice> {
    let mut all = vec![engine::Choice::Threads];
    match Selected::probe(engine::Choice::IoUring, None) {
        Ok(_) => all.push(engine::Choice::IoUring),
        Err(error) => skipped(format!("io-uring: {error}")),
    }
    all
}

fn backings() -> Vec<memory::Choice> {
    let mut all = vec![memory::Choice::Memfd];
    match memory::Backing::choose(memory::Choice::Tmpfs, 4096, 1) {
        Ok(_) => all.push(memory::Choice::Tmpfs),
        Err(error) => skipped(format!("tmpfs backing: {error}")),
    }
    all
}

/// Compares every segment with its file, and what stands behind its end with zero.
fn check(selection: &Selection, resident: &Resident) {
    let Counts { direct_bytes, cached_bytes, buffered_bytes } = resident.counts;
    let bytes: u64 = resident.segments.iter().map(|segment| segment.bytes()).sum();
    assert_eq!(direct_bytes + cached_bytes + buffered_bytes, bytes, "every byte is read once");
    for (file, segment) in selection.files.iter().zip(&resident.segment_of_file) {
        let segment = &resident.segments[segment.unwrap()];
        assert_eq!(segment.bytes(), file.identity.bytes);
        let expected = std::fs::read(&file.real).unwrap();
        assert!(content(segment) == expected, "{} differs", file.path);
        assert!(segment.is_immutable(), "{}", file.path);
        assert_zero_behind_end(segment);
        let about = File::from(segment.as_fd().try_clone_to_owned().unwrap()).metadata().unwrap();
        assert!(file.identity.is_unchanged(&Identity { inode: file.identity.inode, ..Identity::of(&about) }));
    }
}

pub(crate) fn content(segment: &Segment) -> Vec<u8> {
    let file = File::from(segment.as_fd().try_clone_to_owned().unwrap());
    let mut bytes = vec![1; segment.bytes() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn assert_zero_behind_end(segment: &Segment) {
    let (bytes, pages) = (segment.bytes() as usize, segment.allocated_bytes() as usize);
    if pages > bytes {
        let file = File::from(segment.as_fd().try_clone_to_owned().unwrap());
        let mut behind = vec![1; pages - bytes];
        ReaderMap::new(&file, pages).unwrap().copy(bytes, &mut behind);
        assert!(behind.iter().all(|byte| *byte == 0), "bytes behind the end of a file of {bytes}");
    }
}

/// No memory file of this cache is open or mapped in this process any more.
fn assert_nothing_left(cache_name: &str) {
    let name = format!("iloader:{cache_name}:");
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        assert!(!target.to_string_lossy().contains(&name), "left open: {}", target.display());
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains(&name), "left mapped");
}

fn write_files(directory: &Path, lengths: &[u64]) {
    for (index, length) in lengths.iter().enumerate() {
        std::fs::write(directory.join(format!("f{index:02}-{length}")), bytes_of(index as u64, *length))
            .unwrap();
    }
}

#[test]
fn every_length_by_every_way() {
    let directory = scratch_dir();
    write_files(directory.path(), &LENGTHS);
    let selection = select(directory.path());
    let plan = plan::lay_out(&selection, CHUNK);
    for engine in engines() {
        for direct in [Direct::Auto, Direct::Always, Direct::Never] {
            for backing in backings() {
                for workers in [1, 4] {
                    for read_bytes in [256 << 10, 3 << 20] {
                        let options = Options { workers, read_bytes, direct, ..Options::default() };
                        let settings = settings("matrix", engine, backing, options);
                        let meter = Meter::default();
                        let resident = memory::load_with(
                            &plan,
                            &selection,
                            &settings,
                            &|| settings.engine.start(),
                            &meter,
                        );
                        let resident = match resident {
                            Err(error)
                                if direct == Direct::Always && error.message().contains("O_DIRECT") =>
                            {
                                skipped(format!("--direct always: {error}"));
                                continue;
                            }
                            other => other.unwrap(),
                        };
                        check(&selection, &resident);
                        assert_eq!(meter.bytes.load(Ordering::Relaxed), plan.bytes());
                        assert_eq!(
                            meter.files.load(Ordering::Relaxed),
                            LENGTHS.len() as u64 - 1,
                            "but the empty one"
                        );
                    }
                }
            }
        }
    }
    assert_nothing_left("matrix");
}

/// Empties the page cache of one file, as far as its file system does that.
fn forget(file: &SelectedFile) {
    let file = File::open(&file.real).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// What one faulty load came to: fine, with the right bytes, or an error that names a file.
fn load_with_faults(
    selection: &Selection,
    engine: engine::Choice,
    direct: Direct,
    faults: Faults,
) -> Result<u64> {
    // A name of its own: other tests run at the same time.
    static LOADS: AtomicU64 = AtomicU64::new(0);
    let name = format!("faulty-{}", LOADS.fetch_add(1, Ordering::Relaxed));
    let plan = plan::lay_out(selection, CHUNK);
    let options = Options { workers: 2, read_bytes: 256 << 10, direct, ..Options::default() };
    let settings = settings(&name, engine, memory::Choice::Memfd, options);
    let faults = Arc::new(faults);
    let start = || -> Result<Box<dyn Engine>> {
        Ok(Box::new(Faulty::new(settings.engine.start()?, Arc::clone(&faults))))
    };
    let result = memory::load_with(&plan, selection, &settings, &start, &Meter::default());
    match result {
        Ok(resident) => check(selection, &resident),
        Err(error) => {
            assert_nothing_left(&name);
            return Err(error);
        }
    }
    assert_nothing_left(&name);
    Ok(faults.operations.load(Ordering::Relaxed))
}

#[test]
fn short_reads_and_another_order_change_nothing() {
    let directory = scratch_dir();
    write_files(directory.path(), &[0, 1, 4097, 100_000, (2 << 20) + 1, CHUNK + 4097]);
    let selection = select(directory.path());
    for engine in engines() {
        for direct in [Direct::Auto, Direct::Always, Direct::Never] {
            if let Err(error) = load_with_faults(&selection, engine, direct, Faults::default()) {
                assert_eq!(direct, Direct::Always, "{error}");
                skipped(format!("--direct always: {error}"));
                continue;
            }
            for short_bytes in [4096, 8192 + 512, 5000, 100_000] {
                for cold in [false, true] {
                    if cold {
                        selection.files.iter().for_each(forget);
                    }
                    let faults = Faults { short_bytes, reorder: true, ..Faults::default() };
                    load_with_faults(&selection, engine, direct, faults).unwrap();
                }
            }
        }
    }
}

#[test]
fn the_nth_read_fails_for_every_n() {
    let directory = scratch_dir();
    write_files(directory.path(), &[1, 4097, 300_000, CHUNK + 4097]);
    let selection = select(directory.path());
    for engine in engines() {
        let all = load_with_faults(&selection, engine, Direct::Auto, Faults::default()).unwrap();
        assert!(all > 15, "{all} operations");
        for fail_at in 1..=all {
            for (errno, fail_on) in [(5, false), (5, true), (11, false), (4, false), (22, false)] {
                // From the device or from the page cache, in turns.
                if fail_at % 2 == 0 {
                    selection.files.iter().for_each(forget);
                }
                let faults = Faults { fail_at, fail_on, errno, ..Faults::default() };
                match load_with_faults(&selection, engine, Direct::Auto, faults) {
                    // An interrupted read is tried again.
                    Ok(operations) => assert!(errno != 5 && operations >= all, "errno {errno}"),
                    // So is one that O_DIRECT refuses; but through the page cache EINVAL is an error.
                    Err(error) => {
                        assert!(errno == 5 || errno == 22, "{error}");
                        assert_eq!(error.kind(), Kind::Failed);
                        let named = selection.files.iter().any(|file| error.message().contains(&file.path));
                        assert!(named, "the error names the file: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_read_that_never_gets_through_is_an_error_in_the_end() {
    let directory = scratch_dir();
    write_files(directory.path(), &[4097]);
    let faults = Faults { fail_at: 1, fail_on: true, errno: 11, ..Faults::default() };
    let error = load_with_faults(&select(directory.path()), engine::Choice::Threads, Direct::Auto, faults);
    assert!(error.unwrap_err().message().contains("f00-4097"));
}

#[test]
fn a_cancelled_load_leaves_nothing() {
    let directory = scratch_dir();
    write_files(directory.path(), &[CHUNK, CHUNK, CHUNK, CHUNK]);
    let selection = select(directory.path());
    let plan = plan::lay_out(&selection, CHUNK);
    for engine in engines() {
        let settings = settings("cancelled", engine, memory::Choice::Memfd, Options::default());
        let meter = Meter { cancel_at: CHUNK, ..Meter::default() };
        let error = memory::load_with(&plan, &selection, &settings, &|| settings.engine.start(), &meter);
        assert_eq!(error.unwrap_err().kind(), Kind::Cancelled);
        assert_nothing_left("cancelled");
    }
}

/// Runs a hook whenever a file is in place.
struct AtFinishedFile<'a>(&'a (dyn Fn() + Sync));

impl Watch for AtFinishedFile<'_> {
    fn advanced(&self, _: u64) {}
    fn finished_file(&self) {
        (self.0)();
    }
    fn cancelled(&self) -> bool {
        false
    }
}

#[test]
fn a_source_that_changes_is_named() {
    type Change = fn(&Path);
    let changes: [(&str, Change); 5] = [
        ("shorter", |path| File::options().write(true).open(path).unwrap().set_len(10).unwrap()),
        ("longer", |path| File::options().write(true).open(path).unwrap().set_len(20_000).unwrap()),
        ("touched", |path| {
            let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
            File::options().write(true).open(path).unwrap().set_modified(later).unwrap();
        }),
        ("replaced", |path| {
            std::fs::write(path.with_extension("new"), bytes_of(9, 10_000)).unwrap();
            std::fs::rename(path.with_extension("new"), path).unwrap();
        }),
        ("gone", |path| std::fs::remove_file(path).unwrap()),
    ];
    for (how, change) in changes {
        for late in [false, true] {
            let directory = scratch_dir();
            write_files(directory.path(), &[10_000, CHUNK]);
            let selection = select(directory.path());
            let path = selection.files[0].real.clone();
            let plan = plan::lay_out(&selection, CHUNK);
            let settings =
                settings("changing", engine::Choice::Auto, memory::Choice::Memfd, Options::default());
            let once = std::sync::Once::new();
            let hook = || once.call_once(|| change(&path));
            if !late {
                hook();
            }
            let error = memory::load_with(
                &plan,
                &selection,
                &settings,
                &|| settings.engine.start(),
                &AtFinishedFile(&hook),
            );
            let error = error.expect_err(how);
            assert_eq!(error.kind(), Kind::SourceChanged, "{how}: {error}");
            assert!(error.message().contains("f00-10000"), "{how}: {error}");
            assert_nothing_left("changing");
        }
    }
}

/// An engine that truncates a file before its first read begins.
struct Truncating {
    engine: Box<dyn Engine>,
    path: PathBuf,
}

impl Engine for Truncating {
    fn depth(&self) -> usize {
        self.engine.depth()
    }

    fn submit(&mut self, read: engine::Transfer) -> std::result::Result<(), engine::Transfer> {
        self.engine.submit(read)
    }

    fn start(&mut self) -> Result<()> {
        File::options().write(true).open(&self.path).unwrap().set_len(5).unwrap();
        self.engine.start()
    }

    fn reap(&mut self, completions: &mut Vec<engine::Completion>) -> Result<()> {
        self.start()?;
        self.engine.reap(completions)
    }
}

/// O_DIRECT goes on at whole blocks only, so that a few bytes at the new end are read again and again.
#[test]
fn a_source_that_is_cut_to_a_few_bytes_before_it_is_read_has_changed() {
    for engine in engines() {
        for direct in [Direct::Always, Direct::Never] {
            let directory = scratch_dir();
            write_files(directory.path(), &[CHUNK]);
            let selection = select(directory.path());
            let path = selection.files[0].real.clone();
            forget(&selection.files[0]);
            let plan = plan::lay_out(&selection, CHUNK);
            let options = Options { direct, ..Options::default() };
            let settings = settings("cut", engine, memory::Choice::Memfd, options);
            let start = || {
                let engine = Truncating { engine: settings.engine.start()?, path: path.clone() };
                Ok(Box::new(engine) as Box<dyn Engine>)
            };
            let error = memory::load_with(&plan, &selection, &settings, &start, &Meter::default());
            let error = error.expect_err("cut");
            assert_eq!(error.kind(), Kind::SourceChanged, "{direct:?}: {error}");
            assert_nothing_left("cut");
        }
    }
}

/// A page that is dirty already can be changed through a map without moving the modification time, unless
/// the load has it written out first.
#[test]
fn a_source_that_is_written_through_a_map_is_named() {
    let directory = scratch_dir();
    write_files(directory.path(), &[10_000, CHUNK]);
    let path = directory.path().join("f00-10000");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    if iloader::sys::cache::unwritten_pages(&file).is_err() {
        return skipped("this kernel does not tell which pages are unwritten");
    }
    let (_mapping, mut window) = iloader::sys::map::Mapping::shared(&file, 10_000).unwrap();
    window.as_mut_slice()[5] = 1;
    let window = std::sync::Mutex::new(window);
    let selection = select(directory.path());
    let plan = plan::lay_out(&selection, CHUNK);
    let settings = settings("mapped", engine::Choice::Auto, memory::Choice::Memfd, Options::default());
    // Times are kept in steps of some milliseconds.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let change = || window.lock().unwrap().as_mut_slice()[5] += 1;
    let watch = AtFinishedFile(&change);
    let error = memory::load_with(&plan, &selection, &settings, &|| settings.engine.start(), &watch);
    let error = error.expect_err("the file changed");
    assert_eq!(error.kind(), Kind::SourceChanged, "{error}");
    assert!(error.message().contains("f00-10000"), "{error}");
}

#[test]
fn the_source_does_not_enter_the_page_cache() {
    let directory = scratch_dir();
    write_files(directory.path(), &[3000, 100_000, 3 * CHUNK + 77]);
    let selection = select(directory.path());
    let plan = plan::lay_out(&selection, CHUNK);
    let cached = |file: &SelectedFile| {
        let file = File::open(&file.real).unwrap();
        iloader::sys::cache::cached_pages(&file, 0, 0).ok()
    };
    if cached(&selection.files[0]).is_none() {
        return skipped("this kernel does not tell what is in the page cache");
    }
    selection.files.iter().for_each(forget);
    if selection.files.iter().any(|file| cached(file) != Some(0)) {
        return skipped("the page cache of the test's file system cannot be emptied");
    }
    // Of the last file the middle is in the page cache: it is copied from there, and stays there.
    let warm = CHUNK..2 * CHUNK;
    let last = &selection.files[2];
    let mut middle = vec![0; CHUNK as usize];
    let file = File::open(&last.real).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    file.read_exact_at(&mut middle, warm.start).unwrap();
    let before = cached(last).unwrap();
    assert!((CHUNK / 4096..3 * CHUNK / 4096).contains(&before));
    for engine in engines() {
        for direct in [Direct::Auto, Direct::Never] {
            let options = Options { direct, read_bytes: 1 << 20, ..Options::default() };
            let settings = settings("cold", engine, memory::Choice::Memfd, options);
            let resident = memory::load_with(
                &plan,
                &selection,
                &settings,
                &|| settings.engine.start(),
                &Meter::default(),
            )
            .unwrap();
            check_without_reading_source(&resident, &middle, warm.start);
            assert_eq!(cached(&selection.files[0]), Some(0), "{direct:?}");
            assert_eq!(cached(&selection.files[1]), Some(0), "{direct:?}");
            let after = cached(last).unwrap();
            assert!(after <= before, "{direct:?}: {before} pages before, {after} after");
            assert!(after >= CHUNK / 4096, "{direct:?}: what was cached before stays cached");
            let counts = resident.counts;
            assert!(counts.cached_bytes >= CHUNK, "{direct:?}: {counts:?}");
            match direct {
                Direct::Auto => assert!(counts.direct_bytes > 0 && counts.buffered_bytes == 0, "{counts:?}"),
                _ => assert!(counts.direct_bytes == 0 && counts.buffered_bytes > 0, "{counts:?}"),
            }
        }
    }
}

fn check_without_reading_source(resident: &Resident, middle: &[u8], at: u64) {
    let file = File::from(resident.segments[2].as_fd().try_clone_to_owned().unwrap());
    let mut bytes = vec![0; middle.len()];
    file.read_exact_at(&mut bytes, at).unwrap();
    assert!(bytes == middle);
}

#[test]
fn extents_of_large_files_are_on_huge_pages() {
    let directory = scratch_dir();
    write_files(directory.path(), &[1000, 3 * CHUNK + 77]);
    let selection = select(directory.path());
    let plan = plan::lay_out(&selection, CHUNK);
    for backing in backings() {
        let settings = settings("huge", engine::Choice::Auto, backing, Options::default());
        let resident =
            memory::load_with(&plan, &selection, &settings, &|| settings.engine.start(), &Meter::default())
                .unwrap();
        let segment = &resident.segments[1];
        // The kernel's own count, from a map of the whole segment at an aligned address.
        let file = File::from(segment.as_fd().try_clone_to_owned().unwrap());
        let about = file.metadata().unwrap();
        assert_eq!(about.len(), 3 * CHUNK + 77);
        let claimed = segment.huge_page_bytes();
        if claimed == 0 {
            skipped(format!("no huge pages here for {backing:?}"));
            continue;
        }
        assert_eq!(claimed, 3 * CHUNK, "{backing:?}: every whole extent");
        assert_eq!(resident.segments[0].huge_page_bytes(), 0);
        let map = ReaderMap::new(&file, segment.bytes() as usize).unwrap();
        let mut byte = [0];
        for at in (0..segment.bytes() as usize).step_by(4096) {
            map.copy(at, &mut byte);
        }
        if map.address().is_multiple_of(2 << 20) {
            assert_eq!(huge_bytes_mapped_at(map.address()), claimed, "{backing:?}");
        } else {
            assert_eq!(backing, memory::Choice::Memfd, "maps of the private tmpfs are aligned");
        }
    }
}

/// `FilePmdMapped` and `ShmemPmdMapped` of the mapping that begins at `address`.
fn huge_bytes_mapped_at(address: usize) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let begin = smaps.find(&format!("\n{address:x}-")).expect("the mapping is listed");
    let entry = smaps[begin..].split("VmFlags").next().unwrap();
    let kib = |field: &str| -> u64 {
        let line = entry.lines().find(|line| line.starts_with(field)).unwrap_or_default();
        line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0)
    };
    (kib("FilePmdMapped:") + kib("ShmemPmdMapped:")) << 10
}

#[test]
fn a_sparse_file_over_4_gib() {
    const LENGTH: u64 = (4 << 30) + 4097;
    let available = std::fs::read_to_string("/proc/meminfo").unwrap();
    let available = iloader::budget::meminfo::field(&available, "MemAvailable").unwrap_or(0);
    if available < 8 << 30 {
        return println!(
            "skipped: a segment of 4 GiB needs more memory than the {available} bytes available"
        );
    }
    let directory = scratch_dir();
    let path = directory.path().join("sparse");
    let file = File::create(&path).unwrap();
    file.set_len(LENGTH).unwrap();
    let marks = [0, (2 << 30) - 3, (4 << 30) - 2, (4 << 30) + 4090];
    for mark in marks {
        file.write_all_at(b"mark", mark).unwrap();
    }
    drop(file);
    let selection = select(directory.path());
    let plan = plan::lay_out(&selection, 64 << 20);
    for engine in engines() {
        let options = Options { workers: 2, ..Options::default() };
        let settings = settings("sparse", engine, memory::Choice::Auto, options);
        let resident =
            memory::load_with(&plan, &selection, &settings, &|| settings.engine.start(), &Meter::default())
                .unwrap();
        let segment = File::from(resident.segments[0].as_fd().try_clone_to_owned().unwrap());
        let mut bytes = vec![1u8; 16 << 20];
        let zeros = vec![0u8; 16 << 20];
        let mut at = 0;
        while at < LENGTH {
            let length = (bytes.len() as u64).min(LENGTH - at) as usize;
            segment.read_exact_at(&mut bytes[..length], at).unwrap();
            let marked = marks.iter().any(|mark| mark + 4 > at && *mark < at + length as u64);
            assert!(marked || bytes[..length] == zeros[..length], "at {at}");
            at += length as u64;
        }
        for mark in marks {
            let mut four = [0; 4];
            segment.read_exact_at(&mut four, mark).unwrap();
            assert_eq!(&four, b"mark");
        }
        assert_zero_behind_end(&resident.segments[0]);
    }
}
