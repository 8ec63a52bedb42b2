use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sha2::{Digest as _, Sha256};

use super::*;
use crate::engine::Choice;
use crate::manifest::{Digest, SelectionRules};
use crate::source::select;

mod crashes;
mod faults;

/// Watches and counts.
#[derive(Default)]
pub(in crate::disk) struct Seen {
    pub(in crate::disk) read: AtomicU64,
    pub(in crate::disk) wrote: AtomicU64,
    pub(in crate::disk) files: AtomicU64,
    pub(in crate::disk) waited: AtomicBool,
    /// Cancelled when so many bytes were read; 0: never.
    pub(in crate::disk) cancel_after: AtomicU64,
    planned: Mutex<(u64, u64, u64)>,
}

impl Watch for Seen {
    fn planned(&self, read_bytes: u64, written_bytes: u64, files: u64) {
        *self.planned.lock().unwrap() = (read_bytes, written_bytes, files);
    }

    fn read(&self, bytes: u64) {
        self.read.fetch_add(bytes, Ordering::Relaxed);
    }

    fn wrote(&self, bytes: u64) {
        self.wrote.fetch_add(bytes, Ordering::Relaxed);
    }

    fn finished_file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    fn waiting(&self) {
        self.waited.store(true, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        let after = self.cancel_after.load(Ordering::Relaxed);
        after > 0 && self.read.load(Ordering::Relaxed) >= after
    }
}

/// A source and a root beside each other.
pub(in crate::disk) struct Bed {
    directory: tempfile::TempDir,
    pub(in crate::disk) name: Name,
    pub(in crate::disk) refresh: bool,
    pub(in crate::disk) workers: usize,
    pub(in crate::disk) engine: Selected,
}

/// Bytes that no other seed has.
pub(in crate::disk) fn bytes_of(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = std::iter::repeat_with(&mut next).take(length.div_ceil(8)).flatten().collect();
    bytes.truncate(length);
    bytes
}

/// Lengths around everything that is done by length: pages, pieces, chunks, files that go through the page cache.
const FILES: &[(&str, usize)] = &[
    ("config.json", 700),
    ("empty", 0),
    ("sub/deep/one-page", 4096),
    ("tokenizer.json", 140_001),
    ("model-1.safetensors", (4 << 20) + 4097),
    ("model-2.safetensors", (2 << 20)),
    ("sub/model-3.safetensors", (1 << 20) - 1),
];

impl Bed {
    pub(in crate::disk) fn empty() -> Bed {
        Bed::empty_in(tempfile::tempdir().unwrap())
    }

    /// Where nothing waits for a device, as far as there is such a place.
    pub(in crate::disk) fn in_memory(files: &[(&str, usize)]) -> Bed {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Bed::empty_in(directory.unwrap()).with(files)
    }

    fn empty_in(directory: tempfile::TempDir) -> Bed {
        fs::create_dir(directory.path().join("source")).unwrap();
        Bed {
            directory,
            name: "m".parse().unwrap(),
            refresh: false,
            workers: 3,
            engine: Selected::probe(Choice::Auto, Some(4)).unwrap(),
        }
    }

    pub(in crate::disk) fn new(files: &[(&str, usize)]) -> Bed {
        Bed::empty().with(files)
    }

    fn with(self, files: &[(&str, usize)]) -> Bed {
        for (index, (path, length)) in files.iter().enumerate() {
            self.put(path, &bytes_of(index as u64 + 1, *length));
        }
        self
    }

    pub(in crate::disk) fn put(&self, path: &str, bytes: &[u8]) {
        let path = self.source().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Another inode each time, as tools that download do.
        let _ = fs::remove_file(&path);
        fs::write(path, bytes).unwrap();
    }

    pub(in crate::disk) fn source(&self) -> PathBuf {
        fs::canonicalize(self.directory.path()).unwrap().join("source")
    }

    pub(in crate::disk) fn root(&self) -> PathBuf {
        fs::canonicalize(self.directory.path()).unwrap().join("root")
    }

    pub(in crate::disk) fn store(&self) -> Store {
        Store::create(&self.root(), true).unwrap()
    }

    pub(in crate::disk) fn selection(&self) -> Selection {
        select(&self.source(), &SelectionRules::default()).unwrap()
    }

    pub(in crate::disk) fn build_as(
        &self,
        medium: &dyn Medium,
        store: &Store,
        selection: &Selection,
        watch: &dyn Watch,
    ) -> Result<Built> {
        let request = Request {
            name: &self.name,
            selection,
            refresh: self.refresh,
            workers: self.workers,
            chunk_bytes: 1,
            engine: self.engine.clone(),
        };
        build_on(medium, store, &request, watch)
    }

    pub(in crate::disk) fn try_build(&self) -> Result<Built> {
        self.build_as(&Disk, &self.store(), &self.selection(), &Seen::default())
    }

    fn build(&self) -> Built {
        let built = self.try_build().unwrap();
        is_whole(&built.generation, &self.source());
        built
    }

    /// What stands in the root, without our own directory.
    pub(in crate::disk) fn entries(&self) -> Vec<String> {
        let entries = fs::read_dir(self.root()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != OUR_DIRECTORY);
        names.sort();
        names
    }
}

/// Path and digest of every file below a directory, links followed, without what is ours.
pub(in crate::disk) fn digests_below(top: &Path) -> BTreeMap<String, Digest> {
    let mut found = BTreeMap::new();
    let mut left = vec![top.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let relative = path.strip_prefix(top).unwrap().to_str().unwrap().to_owned();
            if relative == OUR_DIRECTORY || relative == "SHA256SUMS" {
                continue;
            }
            if path.is_dir() {
                left.push(path);
            } else {
                found.insert(relative, Digest(Sha256::digest(fs::read(path).unwrap()).into()));
            }
        }
    }
    found
}

/// The generation is the source, byte for byte and with its times, and its manifest says so.
pub(in crate::disk) fn is_whole(generation: &Generation, source: &Path) {
    let there = digests_below(generation.path());
    assert_eq!(there, digests_below(source));
    for file in &generation.manifest().files {
        assert_eq!(file.sha256, Some(there[&file.path]), "{}", file.path);
        let (copy, original) = (generation.path().join(&file.path), source.join(&file.path));
        let (copy, original) = (fs::metadata(copy).unwrap(), fs::metadata(original).unwrap());
        assert_eq!((copy.mtime(), copy.mtime_nsec()), (original.mtime(), original.mtime_nsec()));
        assert_eq!(copy.mode() & 0o777, 0o400);
    }
    generation.selection(&[]).unwrap();
}

#[test]
fn a_source_is_copied_and_then_fresh() {
    for choice in [Choice::Auto, Choice::Threads] {
        let mut bed = Bed::new(FILES);
        bed.engine = Selected::probe(choice, None).unwrap();
        let seen = Seen::default();
        let selection = bed.selection();
        let built = bed.build_as(&Disk, &bed.store(), &selection, &seen).unwrap();
        is_whole(&built.generation, &bed.source());
        let bytes = selection.bytes();
        assert_eq!((built.was_fresh, built.copied_bytes, built.reused_bytes), (false, bytes, 0));
        assert_eq!(*seen.planned.lock().unwrap(), (bytes, bytes, FILES.len() as u64));
        assert_eq!(seen.read.load(Ordering::Relaxed), bytes);
        assert_eq!(seen.wrote.load(Ordering::Relaxed), bytes);
        assert_eq!(seen.files.load(Ordering::Relaxed), FILES.len() as u64);
        assert_eq!(bed.entries(), ["m@1"]);
        assert_eq!(fs::metadata(built.generation.path()).unwrap().mode() & 0o777, 0o700);
        let own = fs::read_dir(built.generation.path().join(OUR_DIRECTORY)).unwrap();
        let mut own: Vec<_> = own.map(|entry| entry.unwrap().file_name()).collect();
        own.sort();
        assert_eq!(own, ["lock", "manifest.json", "used"]);
        let again = bed.build();
        assert!(again.was_fresh);
        assert_eq!(again.generation.path(), built.generation.path());
    }
}

#[test]
fn links_of_the_source_stay_links() {
    let bed = Bed::new(&[("a/weights", 5000), ("b/c/other", 10)]);
    symlink("a/weights", bed.source().join("same")).unwrap();
    symlink("../a", bed.source().join("b/link")).unwrap();
    let built = bed.build();
    let at = |path: &str| built.generation.path().join(path);
    assert_eq!(fs::read_link(at("b/link")).unwrap(), Path::new("../a"));
    assert_eq!(fs::metadata(at("same")).unwrap().ino(), fs::metadata(at("a/weights")).unwrap().ino());
    assert!(!fs::symlink_metadata(at("same")).unwrap().is_symlink());
    assert!(fs::read(at("b/link/weights")).unwrap() == bytes_of(1, 5000));
}

#[test]
fn unchanged_files_are_linked_and_superseded_generations_removed() {
    let bed = Bed::new(FILES);
    let first = bed.build();
    let old = first.generation.path().join("model-1.safetensors");
    let inode = fs::metadata(&old).unwrap().ino();
    bed.put("config.json", b"{}");
    let second = bed.build();
    assert_eq!(second.generation.number(), 2);
    assert_eq!(second.copied_bytes, 2);
    assert_eq!(second.reused_bytes, bed.selection().bytes() - 2);
    let new = second.generation.path().join("model-1.safetensors");
    assert_eq!(fs::metadata(new).unwrap().ino(), inode);
    assert_eq!(bed.entries(), ["m@2"]);
    assert!(second.notes.iter().any(|note| note.starts_with("removed ")), "{:?}", second.notes);
}

#[test]
fn a_leased_generation_stays_and_that_is_said() {
    let bed = Bed::new(&[("a", 10), ("b", 5000)]);
    let first = bed.build();
    let lease = first.generation.lease().unwrap();
    bed.put("a", b"new");
    let second = bed.build();
    assert_eq!(bed.entries(), ["m@1", "m@2"]);
    assert!(second.notes.iter().any(|note| note.contains("m@1 stays: ")), "{:?}", second.notes);
    drop(lease);
    bed.put("a", b"newer");
    bed.build();
    assert_eq!(bed.entries(), ["m@3"]);
}

#[test]
fn a_refresh_reuses_nothing() {
    let mut bed = Bed::new(FILES);
    bed.build();
    bed.refresh = true;
    let again = bed.build();
    assert!(!again.was_fresh);
    assert_eq!((again.reused_bytes, again.generation.number()), (0, 2));
    assert_eq!(again.copied_bytes + again.cloned_bytes, bed.selection().bytes());
}

#[test]
fn a_damaged_file_is_copied_anew() {
    for is_shorter in [false, true] {
        let bed = Bed::new(FILES);
        let first = bed.build();
        let path = first.generation.path().join("model-2.safetensors");
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let changed = if is_shorter { 5 } else { 2 << 20 };
        file.set_len(changed).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"x", 3).unwrap();
        file.set_modified(modified).unwrap();
        fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
        bed.put("config.json", b"{}");
        let second = bed.build();
        assert_eq!(second.copied_bytes, 2 + (2 << 20));
        // A length is seen without reading; a flipped bit is not.
        let told =
            second.notes.iter().any(|note| note.starts_with("model-2.safetensors of an older generation"));
        assert_eq!(told, !is_shorter, "{:?}", second.notes);
    }
}

#[test]
fn a_generation_with_a_missing_file_is_not_fresh() {
    let bed = Bed::new(&[("a", 10), ("b", 5000)]);
    let first = bed.build();
    fs::remove_file(first.generation.path().join("b")).unwrap();
    let second = bed.build();
    assert!(!second.was_fresh);
    assert_eq!(second.copied_bytes, 5000);
    assert!(second.notes.iter().any(|note| note.contains("m@1 is not used: ")), "{:?}", second.notes);
}

#[test]
fn a_cancelled_copy_says_so_and_the_next_one_works() {
    let bed = Bed::new(FILES);
    let seen = Seen { cancel_after: AtomicU64::new(1), ..Seen::default() };
    let error = bed.build_as(&Disk, &bed.store(), &bed.selection(), &seen).unwrap_err();
    assert_eq!(error.kind(), Kind::Cancelled);
    assert!(error.message().contains("'m' was cancelled"), "{error}");
    let stays = error.hint_text().is_some_and(|hint| hint.contains("goes on from"));
    assert_eq!(bed.entries(), if stays { vec![".m@1.staging"] } else { vec![] });
    bed.build();
    assert_eq!(bed.entries(), ["m@2"]);
}

/// Gives up when so many files are finished.
struct Until(u64, Seen);

impl Watch for Until {
    fn planned(&self, _: u64, _: u64, _: u64) {}
    fn read(&self, _: u64) {}
    fn wrote(&self, _: u64) {}
    fn finished_file(&self) {
        self.1.finished_file();
    }
    fn waiting(&self) {}
    fn cancelled(&self) -> bool {
        self.1.files.load(Ordering::Relaxed) >= self.0
    }
}

#[test]
fn what_is_all_read_and_written_can_still_be_cancelled() {
    let bed = Bed::new(FILES);
    let all = FILES.len() as u64;
    let watch = Until(all, Seen::default());
    let error = bed.build_as(&Disk, &bed.store(), &bed.selection(), &watch).unwrap_err();
    assert_eq!(error.kind(), Kind::Cancelled, "{error}");
    assert_eq!(bed.entries(), [".m@1.staging"]);
    let built = bed.build();
    assert_eq!(built.reused_bytes, FILES.iter().map(|file| file.1 as u64).sum::<u64>());
    // With nothing to read: what is linked is given up as well.
    bed.put("config.json", b"another");
    let at_once = bed.build_as(&Disk, &bed.store(), &bed.selection(), &Until(0, Seen::default()));
    assert_eq!(at_once.unwrap_err().kind(), Kind::Cancelled);
    assert_eq!(bed.entries(), ["m@2"]);
}

#[test]
fn a_name_belongs_to_one_source() {
    let bed = Bed::new(&[("a", 10)]);
    bed.build();
    let mut other = Bed::new(&[("a", 10)]);
    other.name = bed.name.clone();
    let error = bed.build_as(&Disk, &bed.store(), &other.selection(), &Seen::default()).unwrap_err();
    assert_eq!(error.kind(), Kind::Stale);
    for source in [bed.source(), other.source()] {
        assert!(error.message().contains(source.to_str().unwrap()), "{error}");
    }
    assert!(error.hint_text().is_some_and(|hint| hint.contains("--cache-name")));
    assert_eq!(bed.entries(), ["m@1"]);
}

#[test]
fn places_inside_each_other_and_names_of_ours_are_refused() {
    let bed = Bed::new(&[("a", 10)]);
    let inside = Store::create(&bed.source().join("root"), true).unwrap();
    let error = bed.build_as(&Disk, &inside, &bed.selection(), &Seen::default()).unwrap_err();
    assert_eq!(error.kind(), Kind::Usage);
    assert!(error.message().contains("is in the model directory"), "{error}");
    let bed = Bed::new(&[(".iloader/other.json", 10)]);
    let error = bed.try_build().unwrap_err();
    assert_eq!(error.kind(), Kind::Usage);
    assert!(error.hint_text().is_some_and(|hint| hint.contains("--also-exclude")), "{error:?}");
}

#[test]
fn a_blob_of_the_hub_must_be_what_it_is_called() {
    let bed = Bed::empty();
    let model = bed.root().parent().unwrap().join("models--org--m");
    let snapshot = model.join("snapshots/0123456789abcdef0123456789abcdef01234567");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir(model.join("blobs")).unwrap();
    let bytes = bytes_of(5, 300_000);
    let digest = Digest(Sha256::digest(&bytes).into());
    let blob = model.join(format!("blobs/{digest}"));
    fs::write(&blob, &bytes).unwrap();
    symlink(&blob, snapshot.join("model.safetensors")).unwrap();
    let selected = || select(&snapshot, &SelectionRules::default()).unwrap();
    let built = bed.build_as(&Disk, &bed.store(), &selected(), &Seen::default()).unwrap();
    assert_eq!(built.generation.manifest().files[0].sha256, Some(digest));
    fs::write(&blob, bytes_of(6, 300_000)).unwrap();
    let error = bed.build_as(&Disk, &bed.store(), &selected(), &Seen::default()).unwrap_err();
    assert_eq!(error.kind(), Kind::Verification);
    let got = Digest(Sha256::digest(bytes_of(6, 300_000)).into());
    for part in [blob.to_str().unwrap(), &digest.to_string(), &got.to_string()] {
        assert!(error.message().contains(part), "{error}");
    }
    assert_eq!(bed.entries(), ["m@1"]);
}

#[test]
fn two_builders_of_one_name_build_once() {
    let bed = Bed::new(FILES);
    let (store, selection) = (bed.store(), bed.selection());
    let built = std::thread::scope(|scope| {
        let build = || {
            let seen = Seen::default();
            bed.build_as(&Disk, &store, &selection, &seen).unwrap()
        };
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(build)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<Built>>()
    });
    assert_eq!(built.iter().filter(|built| !built.was_fresh).count(), 1);
    assert_eq!(bed.entries(), ["m@1"]);
}

#[test]
fn whoever_waits_for_another_builder_is_told_and_can_be_cancelled() {
    let bed = Bed::new(&[("a", 10)]);
    let store = bed.store();
    let lock = store.try_lock_name(&bed.name).unwrap().unwrap();
    let seen = Seen { cancel_after: AtomicU64::new(1), ..Seen::default() };
    seen.read.store(1, Ordering::Relaxed);
    let error = bed.build_as(&Disk, &store, &bed.selection(), &seen).unwrap_err();
    assert_eq!(error.kind(), Kind::Cancelled);
    let seen = Seen::default();
    std::thread::scope(|scope| {
        let building = scope.spawn(|| bed.build_as(&Disk, &store, &bed.selection(), &seen));
        while !seen.waited.load(Ordering::Relaxed) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        drop(lock);
        assert!(!building.join().unwrap().unwrap().was_fresh);
    });
}

#[test]
fn generations_of_another_name_are_reused_too() {
    let mut bed = Bed::new(FILES);
    bed.build();
    bed.name = "other".parse().unwrap();
    let second = bed.build();
    assert_eq!(second.reused_bytes, bed.selection().bytes());
    assert_eq!(bed.entries(), ["m@1", "other@1"]);
}

#[test]
fn what_only_has_the_name_of_a_leftover_is_left_alone() {
    let bed = Bed::new(&[("config.json", 700), ("tokenizer.json", 5000)]);
    let precious = bed.source().with_file_name("precious");
    fs::create_dir_all(precious.join("below")).unwrap();
    fs::write(precious.join("below/file"), "mine").unwrap();
    bed.build();
    for (name, target) in
        [(".m@1.staging", "../precious"), (".m@7.staging", "../precious"), (".m@2.removing", "../precious")]
    {
        symlink(target, bed.root().join(name)).unwrap();
    }
    fs::write(bed.root().join(".m@3.staging"), "a file").unwrap();
    for round in 0..2 {
        bed.put("config.json", &bytes_of(9 + round, 700));
        let built = bed.build();
        assert!(!built.was_fresh);
    }
    assert_eq!(fs::read_to_string(precious.join("below/file")).unwrap(), "mine");
    let kept = bed.entries().into_iter().filter(|name| name.starts_with('.')).collect::<Vec<_>>();
    assert_eq!(kept, [".m@1.staging", ".m@2.removing", ".m@3.staging", ".m@7.staging"]);
}

#[test]
fn sums_are_as_sha256sum_reads_them() {
    let bed = Bed::new(FILES);
    let built = bed.build();
    let check = || {
        let mut command = std::process::Command::new("sha256sum");
        command.args(["-c", "--quiet", "SHA256SUMS"]).current_dir(built.generation.path()).status()
    };
    match check() {
        Ok(status) => assert!(status.success()),
        Err(cause) => crate::skipped(format!("no sha256sum here: {cause}")),
    }
}
