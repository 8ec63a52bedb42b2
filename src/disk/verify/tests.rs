//! Each kind of damage is found, and nothing else is.

use std::os::unix::fs::{FileExt, symlink};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, SystemTime};

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::*;
use crate::engine::fault::{Faults, Faulty};
use crate::engine::{Choice, Engine};
use crate::manifest::{Digest, DirectoryLink, SCHEMA};
use crate::source::Identity;
use crate::sys::cache;

const LARGE: usize = (9 << 20) + 4097;

/// The manifest's own digest, which is compared where a generation is opened.
const OF_MANIFEST: Digest = Digest([9; 32]);

/// A directory as a generation is, and its manifest.
struct Tree {
    directory: TempDir,
    manifest: Manifest,
}

fn content(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(seed + 7) >> 3) as u8 ^ (at >> 11) as u8).collect()
}

impl Tree {
    fn new() -> Tree {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        for below in [".iloader", "a/b", "c"] {
            std::fs::create_dir_all(root.join(below)).unwrap();
        }
        let mut files: Vec<(String, Vec<u8>)> = vec![
            ("a/b/large".to_owned(), content(1, LARGE)),
            ("a/small".to_owned(), content(2, 5000)),
            ("c/other".to_owned(), content(3, 3 << 20)),
            ("empty".to_owned(), Vec::new()),
        ];
        files.extend((0..200).map(|index| (format!("c/{index:03}"), content(index, index * 40))));
        for (path, bytes) in &files {
            std::fs::write(root.join(path), bytes).unwrap();
        }
        std::fs::hard_link(root.join("a/small"), root.join("twice")).unwrap();
        files.push(("twice".to_owned(), files[1].1.clone()));
        symlink("../a/b", root.join("c/link")).unwrap();
        files.sort();
        let entry = |(path, bytes): &(String, Vec<u8>)| {
            let identity = Identity::of(&std::fs::metadata(root.join(path)).unwrap());
            FileEntry {
                path: path.clone(),
                bytes: identity.bytes,
                mtime: identity.mtime_rfc3339(),
                // Those of the source, which are others.
                device: 1,
                inode: identity.inode + 1,
                sha256: Some(Digest(Sha256::digest(bytes).into())),
                passthrough: false,
            }
        };
        let files: Vec<FileEntry> = files.iter().map(entry).collect();
        let manifest = Manifest {
            schema: SCHEMA,
            name: "m".to_owned(),
            source: "/m".to_owned(),
            selection: Default::default(),
            bytes: files.iter().map(|file| file.bytes).sum::<u64>() - 5000,
            files,
            directory_links: vec![DirectoryLink { path: "c/link".to_owned(), target: "a/b".to_owned() }],
            created: String::new(),
            tool: String::new(),
        };
        std::fs::write(root.join("SHA256SUMS"), sums::text(&manifest, OF_MANIFEST)).unwrap();
        Tree { directory, manifest }
    }

    fn at(&self, path: &str) -> std::path::PathBuf {
        self.directory.path().join(path)
    }

    /// Changes a file without a trace in its length and times.
    fn flip(&self, path: &str, offset: u64) {
        let file = std::fs::File::options().read(true).write(true).open(self.at(path)).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
        file.set_modified(modified).unwrap();
    }

    fn verify_by(&self, depth: Depth, start: StartEngine<'_>, watch: &Meter<'_>) -> Result<Report> {
        verify_at(self.directory.path(), &self.manifest, OF_MANIFEST, depth, start, watch)
    }

    fn verify(&self, depth: Depth) -> Report {
        let meter = Meter::default();
        let engine = Selected::probe(Choice::Auto, None).unwrap();
        let report = self.verify_by(depth, &|| engine.start(), &meter).unwrap();
        assert_eq!(report.files, self.manifest.files.len() as u64);
        assert_eq!(meter.files.load(Ordering::Relaxed), report.files, "each file is told once");
        assert_eq!(meter.bytes.load(Ordering::Relaxed), report.bytes);
        report
    }

    /// What is found, without the words.
    fn found(&self, depth: Depth) -> Vec<(String, &'static str)> {
        in_short(&self.verify(depth))
    }
}

fn in_short(report: &Report) -> Vec<(String, &'static str)> {
    report.findings.iter().map(|finding| (finding.path.clone(), finding.what)).collect()
}

fn list(findings: &[(&str, &'static str)]) -> Vec<(String, &'static str)> {
    findings.iter().map(|(path, what)| ((*path).to_owned(), *what)).collect()
}

/// Counts, cancels when it is told to, and does something at the first read.
#[derive(Default)]
struct Meter<'a> {
    bytes: AtomicU64,
    files: AtomicU64,
    is_cancelled: AtomicBool,
    at_first_read: Option<&'a (dyn Fn() + Sync)>,
    first: Option<Once>,
}

impl Watch for Meter<'_> {
    fn read(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if let (Some(first), Some(act)) = (&self.first, self.at_first_read) {
            first.call_once(act);
        }
    }

    fn finished_file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }
}

#[test]
fn nothing_is_found_where_nothing_is_wrong() {
    let tree = Tree::new();
    assert_eq!(tree.verify(Depth::Quick).bytes, 0);
    let report = tree.verify(Depth::Full);
    assert_eq!(report.findings, []);
    assert_eq!(report.bytes, tree.manifest.bytes, "each inode is read once");
}

#[test]
fn a_flipped_byte_is_found_by_reading() {
    let tree = Tree::new();
    for (path, offset) in [("a/b/large", LARGE as u64 - 1), ("a/small", 0), ("c/150", 5999)] {
        tree.flip(path, offset);
    }
    assert_eq!(tree.found(Depth::Quick), []);
    let report = tree.verify(Depth::Full);
    let wanted = [("a/b/large", "bad"), ("a/small", "bad"), ("c/150", "bad"), ("twice", "bad")];
    assert_eq!(in_short(&report), list(&wanted));
    let expected = tree.manifest.files[0].sha256.unwrap().to_string();
    assert!(report.findings[0].detail.contains(&expected), "{:?}", report.findings[0]);
}

#[test]
fn names_lengths_and_times_are_found_at_a_glance() {
    let tree = Tree::new();
    std::fs::remove_file(tree.at("c/other")).unwrap();
    let cut = std::fs::File::options().write(true).open(tree.at("c/100")).unwrap();
    let modified = cut.metadata().unwrap().modified().unwrap();
    cut.set_len(3999).unwrap();
    cut.set_modified(modified).unwrap();
    let touched = std::fs::File::options().write(true).open(tree.at("c/101")).unwrap();
    touched.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(5)).unwrap();
    std::fs::write(tree.at("a/b/new"), "").unwrap();
    std::fs::create_dir_all(tree.at("d/e")).unwrap();
    std::fs::write(tree.at("d/e/f"), "").unwrap();
    symlink("a", tree.at("link")).unwrap();
    std::fs::write(tree.at(".iloader/anything"), "").unwrap();
    std::fs::remove_file(tree.at("c/102")).unwrap();
    symlink("101", tree.at("c/102")).unwrap();
    let wanted = [
        ("a/b/new", "extra"),
        ("c/100", "size"),
        ("c/101", "mtime"),
        ("c/102", "bad"),
        ("c/other", "missing"),
        ("d", "extra"),
        ("link", "extra"),
    ];
    for depth in [Depth::Quick, Depth::Full] {
        assert_eq!(tree.found(depth), list(&wanted), "{depth:?}");
    }
    let detail = tree.verify(Depth::Quick).findings[1].detail.clone();
    assert_eq!(detail, "it has 3999 bytes, not 4000");
}

#[test]
fn directories_and_the_links_to_them_lead_where_they_did() {
    let tree = Tree::new();
    std::fs::remove_file(tree.at("c/link")).unwrap();
    assert_eq!(tree.found(Depth::Quick), list(&[("c/link", "missing")]));
    // The same place in other words is the same place; any other is not, though it holds the same bytes.
    for (text, wanted) in [
        ("./../a//b/.", vec![]),
        ("../a", vec![("c/link", "bad")]),
        ("/tmp", vec![("c/link", "bad")]),
        ("../../a/b", vec![("c/link", "bad")]),
    ] {
        symlink(text, tree.at("c/link")).unwrap();
        assert_eq!(tree.found(Depth::Quick), list(&wanted), "{text}");
        std::fs::remove_file(tree.at("c/link")).unwrap();
    }
    std::fs::create_dir(tree.at("c/link")).unwrap();
    std::fs::rename(tree.at("a"), tree.at("elsewhere")).unwrap();
    symlink("elsewhere", tree.at("a")).unwrap();
    let wanted = [("a", "bad"), ("c/link", "bad"), ("elsewhere", "extra")];
    assert_eq!(tree.found(Depth::Full), list(&wanted));
}

#[test]
fn the_sums_are_those_of_the_manifest() {
    let tree = Tree::new();
    std::fs::write(tree.at("SHA256SUMS"), format!("{}\n", sums::text(&tree.manifest, OF_MANIFEST))).unwrap();
    assert_eq!(tree.found(Depth::Quick), list(&[("SHA256SUMS", "bad")]));
    std::fs::remove_file(tree.at("SHA256SUMS")).unwrap();
    assert_eq!(tree.found(Depth::Quick), list(&[("SHA256SUMS", "missing")]));
    std::fs::create_dir(tree.at("SHA256SUMS")).unwrap();
    assert_eq!(tree.found(Depth::Full), list(&[("SHA256SUMS", "bad")]));
    rustix::fs::unlink(tree.at("SHA256SUMS")).unwrap_err();
    std::fs::remove_dir(tree.at("SHA256SUMS")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        tree.at("SHA256SUMS"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    assert_eq!(tree.found(Depth::Quick), list(&[("SHA256SUMS", "bad")]), "a FIFO keeps nobody waiting");
}

#[test]
fn each_failing_read_is_the_finding_of_its_file_alone() {
    let tree = Tree::new();
    tree.flip("c/other", 77);
    for choice in [Choice::Auto, Choice::Threads] {
        let engine = Selected::probe(choice, None).unwrap();
        // The large files take 10 and 3 reads, the small ones one each.
        for fail_at in (1..220).step_by(23) {
            let faults = Faults { fail_at, errno: libc::EIO, ..Faults::default() };
            let faults = Arc::new(faults);
            let start = || -> Result<Box<dyn Engine>> {
                Ok(Box::new(Faulty::new(engine.start()?, Arc::clone(&faults))))
            };
            let meter = Meter::default();
            let report = tree.verify_by(Depth::Full, &start, &meter).unwrap();
            assert_eq!(meter.files.load(Ordering::Relaxed), report.files);
            assert!(report.findings.iter().any(|finding| finding.path == "c/other"), "{fail_at}: {report:?}");
            let failed: Vec<_> =
                report.findings.iter().filter(|finding| finding.detail.contains("EIO")).collect();
            // A small one is read again by itself, and well.
            assert!(failed.len() <= 1 && failed.len() + 1 >= report.findings.len(), "{fail_at}: {report:?}");
            assert!(failed.iter().all(|finding| finding.what == "bad"));
        }
        let faults = Arc::new(Faults { fail_at: 1, fail_on: true, errno: libc::EIO, ..Faults::default() });
        let start =
            || -> Result<Box<dyn Engine>> { Ok(Box::new(Faulty::new(engine.start()?, Arc::clone(&faults)))) };
        let report = tree.verify_by(Depth::Full, &start, &Meter::default()).unwrap();
        let bad = report.findings.iter().filter(|finding| finding.detail.contains("EIO")).count();
        // Nothing is read of the two empty ones.
        assert_eq!(bad, tree.manifest.files.len() - 2);
    }
}

#[test]
fn what_is_not_a_files_own_failure_ends_the_check() {
    let tree = Tree::new();
    let no_engine = || Err(Error::new(Kind::Failed, "no engine"));
    let error = tree.verify_by(Depth::Full, &no_engine, &Meter::default()).unwrap_err();
    assert_eq!(error.message(), "no engine");
    let engine = Selected::probe(Choice::Auto, None).unwrap();
    let cancelled = Meter { is_cancelled: AtomicBool::new(true), ..Meter::default() };
    for depth in [Depth::Quick, Depth::Full] {
        let error = tree.verify_by(depth, &|| engine.start(), &cancelled).unwrap_err();
        assert_eq!(error.kind(), Kind::Cancelled);
    }
    // While it reads.
    let cancelled = Meter::default();
    let start = || {
        cancelled.is_cancelled.store(true, Ordering::Relaxed);
        engine.start()
    };
    let error = tree.verify_by(Depth::Full, &start, &cancelled).unwrap_err();
    assert_eq!((error.kind(), error.message()), (Kind::Cancelled, "the check was cancelled"));
    std::fs::remove_dir_all(tree.at("")).unwrap();
    let error = tree.verify_by(Depth::Quick, &|| engine.start(), &Meter::default()).unwrap_err();
    assert_eq!(error.kind(), Kind::NotFound);
}

#[test]
fn a_file_that_goes_away_meanwhile_is_a_finding() {
    let tree = Tree::new();
    let engine = Selected::probe(Choice::Auto, None).unwrap();
    let once = Once::new();
    let start = || {
        // After all were looked at, and before any is opened.
        once.call_once(|| {
            std::fs::remove_file(tree.at("a/b/large")).unwrap();
            std::fs::File::options().write(true).open(tree.at("c/150")).unwrap().set_len(1).unwrap();
            std::fs::write(tree.at("c/other"), content(9, 3 << 20)).unwrap();
        });
        engine.start()
    };
    let report = tree.verify_by(Depth::Full, &start, &Meter::default()).unwrap();
    assert_eq!(in_short(&report), list(&[("a/b/large", "missing"), ("c/150", "size"), ("c/other", "bad")]));
}

#[test]
fn more_links_to_a_file_are_no_change_of_its_bytes() {
    let tree = Tree::new();
    let engine = Selected::probe(Choice::Auto, None).unwrap();
    let other = tempfile::tempdir_in(tree.directory.path().parent().unwrap()).unwrap();
    let link = || {
        for (index, file) in tree.manifest.files.iter().enumerate() {
            std::fs::hard_link(tree.at(&file.path), other.path().join(index.to_string())).unwrap();
        }
    };
    let meter = Meter { at_first_read: Some(&link), first: Some(Once::new()), ..Meter::default() };
    let report = tree.verify_by(Depth::Full, &|| engine.start(), &meter).unwrap();
    assert_eq!(report.findings, []);
}

#[test]
fn the_page_cache_is_left_as_it_was() {
    let tree = Tree::new();
    let pages = |path: &str| {
        let file = std::fs::File::open(tree.at(path)).unwrap();
        cache::cached_pages(&file, 0, 0).unwrap_or(u64::MAX)
    };
    for path in ["a/b/large", "c/other"] {
        let file = std::fs::File::open(tree.at(path)).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
    if pages("a/b/large") != 0 {
        return crate::skipped("the page cache of the temporary directory cannot be looked at");
    }
    std::fs::read(tree.at("c/other")).unwrap();
    assert_eq!(tree.found(Depth::Full), []);
    assert_eq!((pages("a/b/large"), pages("c/other")), (0, (3 << 20) / 4096));
}
