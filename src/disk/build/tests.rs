use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sha2::{Digest as _, Sha256};

use super::*;
use crate::engine::Choice;
use crate::manifest::{Digest, SelectionRules};
use crate::source::select;

/// Watches and counts.
#[derive(Default)]
pub(in crate::disk) struct Seen {
    pub(in crate::disk) read: AtomicU64,
    pub(in crate::disk) wrote: AtomicU64,
    pub(in crate::disk) files: AtomicU64,
    pub(in crate::disk) waited: AtomicBool,
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
        after > 0 && self.files.load(Ordering::Relaxed) >= after
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
    ("model-1.safetensors", (5 << 20) + 4097),
    ("model-2.safetensors", (4 << 20)),
    ("sub/model-3.safetensors", (2 << 20) - 1),
];

impl Bed {
    pub(in crate::disk) fn empty() -> Bed {
        let directory = tempfile::tempdir().unwrap();
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
        let bed = Bed::empty();
        for (index, (path, length)) in files.iter().enumerate() {
            bed.put(path, &bytes_of(index as u64 + 1, *length));
        }
        bed
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
