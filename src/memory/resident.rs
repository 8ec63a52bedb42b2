//! From a plan to the segments that a daemon keeps alive.

use std::os::fd::RawFd;
use std::sync::Arc;

use super::backing::{Backing, Choice};
use super::filling::Filling;
use super::hashing::Hashing;
use super::segment::Segment;
use crate::budget::Grant;
use crate::engine::{Model, Selected};
use crate::error::Result;
use crate::load::digest::hashed;
use crate::load::{self, Counts, StartEngine, Watch};
use crate::manifest::Digest;
use crate::plan::Plan;
use crate::source::{SelectedFile, Selection};
use crate::sys::crash;
use crate::units::{HUGE_PAGE_BYTES, PAGE_BYTES};

/// How a selection is brought into memory.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The cache's name: it shows in the names of its memory files.
    pub cache_name: String,
    /// What holds the bytes.
    pub backing: Choice,
    /// Which engine reads.
    pub engine: Selected,
    /// How.
    pub options: load::Options,
    /// Where the numbers of the published descriptors begin.
    pub lowest_descriptor: RawFd,
    /// Keep each segment from being swapped out, from when it is full.
    pub lock_memory: bool,
    /// Hash what is loaded, and compare it.
    pub hashing: Option<Hashing>,
    /// The files that the segments are to stand for, in the order of the selection, where they are not those that are
    /// read: the segments get their times.
    pub stands_for: Option<Arc<[SelectedFile]>>,
}

/// The segments of one selection, and how they came to be.
#[derive(Debug)]
pub struct Resident {
    /// In the order of the plan's targets.
    pub segments: Vec<Segment>,
    /// For each file of the selection its segment; `None` for a passed-through one.
    pub segment_of_file: Vec<Option<usize>>,
    /// `memfd` or `tmpfs`.
    pub backing: String,
    /// Why this backing.
    pub backing_reason: String,
    /// How the bytes were read.
    pub counts: Counts,
    /// The digests of the bytes in memory, in the order of the plan's targets, where they were hashed.
    pub digests: Option<Vec<Digest>>,
}

impl Resident {
    /// Bytes on huge pages.
    pub fn huge_page_bytes(&self) -> u64 {
        self.segments.iter().map(Segment::huge_page_bytes).sum()
    }

    /// Memory taken, in whole pages.
    pub fn allocated_bytes(&self) -> u64 {
        self.segments.iter().map(Segment::allocated_bytes).sum()
    }

    /// Bytes that cannot be swapped out.
    pub fn locked_bytes(&self) -> u64 {
        self.segments.iter().map(Segment::locked_bytes).sum()
    }
}

/// What the daemon's process takes for itself, and the command that waits for it: measured as 3 to 4 MiB.
const PROCESS_BYTES: u64 = 4 << 20;

/// What the kernel keeps for an open memory file: inode, directory entry, description.
const FILE_BYTES: u64 = 4 << 10;

/// What a thread that hashes touches of its stack.
const HASHING_BYTES: u64 = 128 << 10;

/// One byte in so many is taken by the kernel's tables where no huge pages can be had: 8 bytes in the page table
/// of the mapping, and 9 in the file's index, for each page of 4 KiB.
const BYTES_PER_TABLE_BYTE: u64 = PAGE_BYTES / 17;

/// The memory that loading a plan takes: every segment in whole pages, the buffers, and what process and kernel
/// take beside them. Hashing takes the stacks of its threads and, where small files wait for them, a buffer each; what
/// waits beside waits in its segment.
pub fn need_bytes(plan: &Plan, engine: &Selected, workers: usize, hashing_threads: usize) -> u64 {
    let reader_threads = match engine.model {
        Model::Threads => engine.depth(),
        Model::IoUring => 0,
    };
    let segments = plan.allocated_bytes();
    let kernel = segments / BYTES_PER_TABLE_BYTE + plan.targets.len() as u64 * FILE_BYTES;
    let buffers = load::buffer_bytes(plan, workers, engine.depth(), reader_threads);
    let hashing = hashing_threads as u64 * (HASHING_BYTES + HUGE_PAGE_BYTES);
    let buffers = buffers.saturating_add(hashing);
    segments.saturating_add(kernel).saturating_add(buffers).saturating_add(PROCESS_BYTES)
}

/// Segments that may be open at a time in a load that is hashed: those that the workers have under way, and one for
/// each thread that hashes.
pub fn open_max(engine: &Selected, workers: usize, hashing_threads: usize) -> usize {
    workers * load::files_under_way(engine.depth()) + hashing_threads
}

/// Allocates, fills and seals every target of `plan`. `_grant` is the permission to take the memory. On
/// failure nothing of it is left.
pub fn load(
    plan: &Plan,
    selection: &Selection,
    settings: &Settings,
    _grant: &Grant,
    watch: &dyn Watch,
) -> Result<Resident> {
    load_with(plan, selection, settings, &|| settings.engine.start(), watch)
}

/// The same with another way to start engines, for tests with a faulty one.
pub fn load_with(
    plan: &Plan,
    selection: &Selection,
    settings: &Settings,
    start_engine: StartEngine<'_>,
    watch: &dyn Watch,
) -> Result<Resident> {
    let backing = Backing::choose(settings.backing, plan.allocated_bytes(), plan.targets.len() as u64)?;
    crash::point("backing-chosen");
    let stand_for = settings.stands_for.as_deref().unwrap_or(&selection.files);
    assert_eq!(stand_for.len(), selection.files.len(), "each file stands for one");
    let filling = Filling::new(plan, stand_for, &settings.cache_name, &backing, settings.lowest_descriptor);
    let filling = if settings.lock_memory { filling.locked() } else { filling };
    let run = |sink: &dyn load::Sink| {
        load::run(plan, &selection.files, start_engine, sink, watch, &settings.options)
    };
    let (filling, counts, digests) = match &settings.hashing {
        None => {
            let counts = run(&filling)?;
            (filling, counts, None)
        }
        Some(hashing) => {
            let filling = filling
                .compared(hashing, open_max(&settings.engine, settings.options.workers, hashing.threads));
            let (counts, digests) = hashed(plan, &filling, hashing.threads, run)?;
            (filling, counts, Some(digests))
        }
    };
    Ok(Resident {
        segments: filling.finish()?,
        segment_of_file: plan.target_of_file.clone(),
        backing: backing.to_string(),
        backing_reason: backing.reason().to_owned(),
        counts,
        digests,
    })
}
