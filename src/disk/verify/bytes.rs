//! The bytes of a generation: every file is read as the device holds it and hashed, many at once.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::{Finding, Present, Watch, cancelled};
use crate::engine::Engine;
use crate::error::{Error, Kind, Result};
use crate::load::buffers::{Passing, Pool};
use crate::load::digest::{self, hashed};
use crate::load::{self, Options, StartEngine};
use crate::manifest::Digest;
use crate::plan::{self, Plan};
use crate::source::{Direct, Selection};

/// What is read before it is hashed.
const CHUNK_BYTES: u64 = 8 << 20;

/// Files that are read at the same time, at the most.
const FILES_AT_ONCE_MAX: usize = 16;

/// Reads and hashes every file, each distinct inode once. What is wrong goes to `findings`; gives the bytes read.
pub(super) fn check(
    root: &Path,
    present: &[Present<'_>],
    start_engine: StartEngine<'_>,
    watch: &dyn Watch,
    findings: &mut Vec<Finding>,
) -> Result<u64> {
    let selection = Selection::of_files(root, present.iter().map(|present| present.file.clone()).collect());
    let plan = plan::lay_out(&selection, CHUNK_BYTES).by_file();
    let groups = groups(&plan);
    assert!(plan.target_of_file.iter().all(Option::is_some), "no file is passed through");
    let checking = Checking {
        root,
        present,
        files_of_target: plan.files_of_targets(),
        start_engine,
        watch,
        next: AtomicUsize::new(0),
        bytes: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        failure: Mutex::new(None),
        findings: Mutex::new(Vec::new()),
    };
    // Each hashes one file at a time: as many as keep all cores busy, and one that waits for the device meanwhile.
    let at_once = (digest::threads() + 1).min(FILES_AT_ONCE_MAX).min(groups.len());
    std::thread::scope(|scope| {
        for index in 1..at_once {
            let thread = std::thread::Builder::new().name(format!("verify-{index}"));
            // With fewer it is slower, not wrong.
            if thread.spawn_scoped(scope, || checking.work(&groups)).is_err() {
                break;
            }
        }
        checking.work(&groups);
    });
    findings.append(&mut lock(&checking.findings));
    match lock(&checking.failure).take() {
        Some(error) => Err(error),
        None => Ok(checking.bytes.load(Ordering::Relaxed)),
    }
}

/// The targets of each job, and those that have none because they are empty.
fn groups(plan: &Plan) -> Vec<Vec<usize>> {
    let of_job = |job: &std::ops::Range<usize>| {
        let mut targets: Vec<usize> = plan.chunks[job.clone()].iter().map(|chunk| chunk.target).collect();
        targets.dedup();
        targets
    };
    let mut groups: Vec<Vec<usize>> = plan.jobs.iter().map(of_job).collect();
    let empty: Vec<usize> =
        (0..plan.targets.len()).filter(|&target| plan.targets[target].bytes == 0).collect();
    if !empty.is_empty() {
        groups.push(empty);
    }
    groups
}

struct Checking<'a> {
    root: &'a Path,
    present: &'a [Present<'a>],
    /// Of each target the files that are this inode, by their places in `present`.
    files_of_target: Vec<Vec<usize>>,
    start_engine: StartEngine<'a>,
    watch: &'a dyn Watch,
    next: AtomicUsize,
    bytes: AtomicU64,
    /// Set by the first failure that is not a file's own: the others stop.
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
    findings: Mutex<Vec<Finding>>,
}

impl Checking<'_> {
    /// One thread's work: groups until none is left.
    fn work(&self, groups: &[Vec<usize>]) {
        let mut pool = Pool::new(1, CHUNK_BYTES);
        while let Some(targets) = groups.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = self.check_group(targets, &mut pool) {
                lock(&self.failure).get_or_insert(error);
                self.stop.store(true, Ordering::Relaxed);
                return;
            }
        }
    }

    /// Reads the files of a group together, and one by one where that fails: then it is known which one it is.
    fn check_group(&self, targets: &[usize], pool: &mut Pool) -> Result<()> {
        match self.digests(targets, pool)? {
            Ok(digests) => {
                targets.iter().zip(digests).for_each(|(&target, digest)| self.settle(target, Ok(digest)));
            }
            Err(error) if targets.len() == 1 => self.settle(targets[0], Err(&error)),
            Err(_) => {
                for target in targets {
                    self.check_group(std::slice::from_ref(target), pool)?;
                }
            }
        }
        Ok(())
    }

    /// The digests of some targets. The outer error is not the files' own, and ends the check.
    fn digests(&self, targets: &[usize], pool: &mut Pool) -> Result<std::result::Result<Vec<Digest>, Error>> {
        let file = |&target: &usize| self.present[self.files_of_target[target][0]].file.clone();
        let selection = Selection::of_files(self.root, targets.iter().map(file).collect());
        let plan = plan::lay_out(&selection, CHUNK_BYTES).by_file();
        let options = Options { direct: Direct::Storage, may_be_linked: true, ..Options::default() };
        let failed_to_start = AtomicBool::new(false);
        let start = || -> Result<Box<dyn Engine>> {
            (self.start_engine)().inspect_err(|_| failed_to_start.store(true, Ordering::Relaxed))
        };
        let digests = Mutex::new(vec![None; targets.len()]);
        let digested = |target: usize, digest| {
            lock(&digests)[target] = Some(digest);
            Ok(())
        };
        let sink = Passing { pool, digested: &digested };
        let outcome =
            hashed(&plan, &sink, 1, |sink| load::run(&plan, &selection.files, &start, sink, self, &options));
        let known: Option<Vec<Digest>> = lock(&digests).iter().copied().collect();
        match (outcome, known) {
            (Ok((_, digests)), _) => Ok(Ok(digests)),
            // All was read, and the digests tell what the bytes were. What changed may be no more than the number of
            // links to the file: other generations come and go that share it.
            (Err(error), Some(digests)) if error.kind() == Kind::SourceChanged => Ok(Ok(digests)),
            (Err(error), _) => {
                // Windows that were out are gone with the load.
                *pool = Pool::new(1, CHUNK_BYTES);
                match error.kind() {
                    Kind::Cancelled => Err(cancelled()),
                    Kind::NoRoom => Err(error),
                    _ if failed_to_start.load(Ordering::Relaxed) => Err(error),
                    _ => Ok(Err(error)),
                }
            }
        }
    }

    /// Compares what was read of a target with each file of the manifest that is this inode.
    fn settle(&self, target: usize, outcome: std::result::Result<Digest, &Error>) {
        for present in self.files_of_target[target].iter().map(|&file| &self.present[file]) {
            let finding = match outcome {
                Ok(digest) => differing(present, digest),
                Err(error) => Some(unreadable(present, error)),
            };
            lock(&self.findings).extend(finding);
            self.watch.finished_file();
        }
    }
}

/// What is wrong with a file whose bytes have this digest.
fn differing(present: &Present<'_>, digest: Digest) -> Option<Finding> {
    let detail = match present.entry.sha256 {
        Some(expected) if expected == digest => return None,
        Some(expected) => format!("its SHA-256 is {digest}, not {expected}"),
        None => "the manifest has no SHA-256 of it".to_owned(),
    };
    Some(Finding::new(&present.entry.path, "bad", detail))
}

/// What is wrong with a file that could not be read to its end.
fn unreadable(present: &Present<'_>, error: &Error) -> Finding {
    let path = &present.entry.path;
    match std::fs::symlink_metadata(&present.file.real) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
            Finding::new(path, "missing", "it went away while it was read")
        }
        Ok(now) if now.is_file() && now.len() != present.entry.bytes => {
            let detail = format!("it has {} bytes now, not {}", now.len(), present.entry.bytes);
            Finding::new(path, "size", detail)
        }
        _ => Finding::new(path, "bad", error.message()),
    }
}

impl load::Watch for Checking<'_> {
    fn advanced(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.watch.read(bytes);
    }

    fn finished_file(&self) {
        // It is done when its digest was compared.
    }

    fn cancelled(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.watch.cancelled()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
