//! From a selection to targets and chunks.

use std::collections::HashMap;
use std::ops::Range;

use crate::source::Selection;
use crate::units::{HUGE_PAGE_BYTES, PAGE_BYTES, round_up};

/// A target up to this length has no whole huge page in it: it is read into a buffer and written, which
/// is cheaper than mapping it.
pub const SMALL_BYTES_MAX: u64 = HUGE_PAGE_BYTES - 1;

/// Small files are taken together up to so many bytes and files: enough to keep a device busy, few enough
/// that several workers share a directory of small files.
const BATCH_BYTES: u64 = 8 << 20;
const BATCH_FILES: usize = 128;

/// What to read and where to put it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The files that are read: for each, its index in the selection. One per distinct inode.
    pub sources: Vec<usize>,
    /// What is filled.
    pub targets: Vec<Target>,
    /// For each file of the selection its target; `None` for a passed-through one.
    pub target_of_file: Vec<Option<usize>>,
    /// The ranges to copy, in the order of their targets, and within a target in the order of `to`.
    pub chunks: Vec<Chunk>,
    /// The chunks that a worker takes at a time: one of a large target (after [`Plan::by_file`] all of it), or a
    /// batch of small ones.
    pub jobs: Vec<Range<usize>>,
}

/// One piece of memory or one file to fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its length in bytes.
    pub bytes: u64,
    /// The file of the selection that it takes its name and times from.
    pub file: usize,
}

/// A range of a source that becomes a range of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index in [`Plan::sources`].
    pub source: usize,
    /// Where it begins in the source.
    pub from: u64,
    /// Index in [`Plan::targets`].
    pub target: usize,
    /// Where it begins in the target.
    pub to: u64,
    /// Its length in bytes; never 0.
    pub bytes: u64,
}

impl Plan {
    /// Bytes to copy.
    pub fn bytes(&self) -> u64 {
        self.targets.iter().fold(0, |sum, target| sum.saturating_add(target.bytes))
    }

    /// Bytes of memory that the targets take, in whole pages.
    pub fn allocated_bytes(&self) -> u64 {
        self.targets.iter().fold(0, |sum, target| sum.saturating_add(round_up(target.bytes, PAGE_BYTES)))
    }

    /// For each target the files of the selection that it is for, in their order: several where they are one inode.
    pub fn files_of_targets(&self) -> Vec<Vec<usize>> {
        let mut files = vec![Vec::new(); self.targets.len()];
        for (file, target) in self.target_of_file.iter().enumerate() {
            if let Some(target) = *target {
                files[target].push(file);
            }
        }
        files
    }

    /// The longest target.
    pub fn bytes_of_longest(&self) -> u64 {
        self.targets.iter().map(|target| target.bytes).max().unwrap_or(0)
    }

    /// The same with jobs of whole files: one worker takes all chunks of a large target, in order, and the longest
    /// targets come first, so that no long one is left for the end. Small ones are batched as before, and come last.
    ///
    /// For what must be taken in order, and where windows are few: of each file only the worker that reads it holds
    /// some, and those are the next ones that are needed.
    #[must_use]
    pub fn by_file(mut self) -> Plan {
        let mut whole: Vec<(u64, Range<usize>)> = Vec::new();
        let mut batches = Vec::new();
        for job in std::mem::take(&mut self.jobs) {
            let target = self.chunks[job.start].target;
            let bytes = self.targets[target].bytes;
            match whole.last_mut() {
                _ if bytes <= SMALL_BYTES_MAX => batches.push(job),
                Some((_, before)) if self.chunks[before.start].target == target => before.end = job.end,
                _ => whole.push((bytes, job)),
            }
        }
        whole.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        self.jobs = whole.into_iter().map(|(_, job)| job).chain(batches).collect();
        self
    }
}

/// Lays out a selection as one target per distinct inode, each a whole file, cut into chunks of
/// `chunk_bytes` rounded up to a huge page.
pub fn lay_out(selection: &Selection, chunk_bytes: u64) -> Plan {
    let chunk_bytes = round_up(chunk_bytes.max(1), HUGE_PAGE_BYTES);
    let mut plan = Plan {
        sources: Vec::new(),
        targets: Vec::new(),
        target_of_file: Vec::with_capacity(selection.files.len()),
        chunks: Vec::new(),
        jobs: Vec::new(),
    };
    let mut target_of_inode: HashMap<(u64, u64), usize> = HashMap::new();
    for (index, file) in selection.files.iter().enumerate() {
        if file.passthrough {
            plan.target_of_file.push(None);
            continue;
        }
        let key = (file.identity.device, file.identity.inode);
        let target = *target_of_inode.entry(key).or_insert_with(|| {
            plan.sources.push(index);
            plan.targets.push(Target { bytes: file.identity.bytes, file: index });
            plan.targets.len() - 1
        });
        plan.target_of_file.push(Some(target));
    }
    for (target, bytes) in plan.targets.iter().map(|target| target.bytes).enumerate() {
        let mut at = 0;
        while at < bytes {
            let length = chunk_bytes.min(bytes - at);
            plan.chunks.push(Chunk { source: target, from: at, target, to: at, bytes: length });
            at += length;
        }
    }
    plan.jobs = batch(&plan);
    plan
}

/// Groups neighbouring small targets; every chunk of a larger one is a job of its own.
fn batch(plan: &Plan) -> Vec<Range<usize>> {
    let mut jobs: Vec<Range<usize>> = Vec::new();
    let mut open: Option<(Range<usize>, u64)> = None;
    for (index, chunk) in plan.chunks.iter().enumerate() {
        let small = plan.targets[chunk.target].bytes <= SMALL_BYTES_MAX;
        match &mut open {
            Some((range, bytes))
                if small && range.len() < BATCH_FILES && *bytes + chunk.bytes <= BATCH_BYTES =>
            {
                range.end = index + 1;
                *bytes += chunk.bytes;
            }
            _ => {
                jobs.extend(open.take().map(|(range, _)| range));
                if small {
                    open = Some((index..index + 1, chunk.bytes));
                } else {
                    jobs.push(index..index + 1);
                }
            }
        }
    }
    jobs.extend(open.map(|(range, _)| range));
    jobs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{Identity, SelectedFile};
    use proptest::prelude::*;

    fn selection(lengths: &[(u64, u64, bool)]) -> Selection {
        let files = lengths.iter().enumerate().map(|(index, &(inode, bytes, passthrough))| SelectedFile {
            path: format!("{index:05}"),
            real: format!("/m/{index:05}").into(),
            identity: Identity { device: 1, inode, bytes, mtime_seconds: 0, mtime_nanoseconds: 0 },
            passthrough,
        });
        Selection::of_files("/m", files.collect())
    }

    #[test]
    fn two_links_to_one_inode_are_one_target() {
        let plan = lay_out(&selection(&[(7, 10, false), (8, 20, false), (7, 10, false), (9, 5, true)]), 1);
        assert_eq!(plan.target_of_file, [Some(0), Some(1), Some(0), None]);
        assert_eq!(plan.files_of_targets(), [vec![0, 2], vec![1]]);
        assert_eq!(plan.bytes(), 30);
        assert_eq!(plan.allocated_bytes(), 8192);
        assert_eq!(plan.jobs.as_slice(), std::slice::from_ref(&(0..2)));
    }

    #[test]
    fn small_files_are_batched_and_large_ones_cut() {
        let small: Vec<_> = (0..300).map(|inode| (inode, 1024, false)).collect();
        let plan = lay_out(&selection(&small), 64 << 20);
        assert_eq!(plan.jobs.iter().map(|job| job.len()).collect::<Vec<_>>(), [128, 128, 44]);
        let plan = lay_out(&selection(&[(1, (130 << 20) + 1, false)]), 64 << 20);
        assert_eq!(plan.jobs, [0..1, 1..2, 2..3]);
        assert_eq!(plan.chunks[2].bytes, (2 << 20) + 1);
    }

    #[test]
    fn jobs_of_whole_files_begin_with_the_longest() {
        let large = 5 << 20;
        let lengths = [(1, 10, false), (2, large, false), (3, 20, false), (4, large + (4 << 20), false)];
        let plan = lay_out(&selection(&lengths), 2 << 20);
        assert_eq!(plan.jobs.len(), 1 + 3 + 1 + 5);
        assert_eq!(plan.by_file().jobs, [5..10, 1..4, 0..1, 4..5]);
    }

    proptest! {
        /// By file as well every chunk is in one job; a large target is in one job alone and in order, and no longer
        /// one comes later.
        #[test]
        fn whole_files_are_one_job_each(
            lengths in prop::collection::vec((0u64..(9 << 20), any::<bool>()), 0..60),
            chunk_bytes in 1u64..(8 << 20),
        ) {
            let files: Vec<_> = lengths.iter().enumerate()
                .map(|(index, &(bytes, small))| (index as u64, if small { bytes >> 4 } else { bytes }, false))
                .collect();
            let before = lay_out(&selection(&files), chunk_bytes);
            let plan = before.clone().by_file();
            let mut in_jobs: Vec<usize> = plan.jobs.iter().cloned().flatten().collect();
            in_jobs.sort_unstable();
            prop_assert_eq!(in_jobs, (0..plan.chunks.len()).collect::<Vec<_>>());
            let mut longest = u64::MAX;
            for job in &plan.jobs {
                let chunks = &plan.chunks[job.clone()];
                let bytes = plan.targets[chunks[0].target].bytes;
                if bytes > SMALL_BYTES_MAX {
                    prop_assert!(bytes <= longest);
                    prop_assert!(chunks.iter().all(|chunk| chunk.target == chunks[0].target));
                    prop_assert_eq!(chunks.iter().map(|chunk| chunk.bytes).sum::<u64>(), bytes);
                    longest = bytes;
                } else {
                    prop_assert!(before.jobs.contains(job));
                    longest = SMALL_BYTES_MAX;
                }
            }
            let Plan { jobs: _, ref chunks, ref targets, .. } = plan;
            prop_assert_eq!((chunks, targets), (&before.chunks, &before.targets));
        }

        /// Every byte of every target is filled by exactly one chunk, and every chunk is in one job.
        #[test]
        fn chunks_cover_every_target_once(
            lengths in prop::collection::vec((0u64..40, 0u64..(9 << 20), any::<bool>()), 0..60),
            chunk_bytes in 1u64..(8 << 20),
        ) {
            let unique: Vec<_> = lengths.iter().enumerate()
                .map(|(index, &(inode, bytes, passthrough))| (inode + 100 * index as u64, bytes, passthrough))
                .collect();
            let plan = lay_out(&selection(&unique), chunk_bytes);
            let mut next = vec![0; plan.targets.len()];
            for chunk in &plan.chunks {
                prop_assert!(chunk.bytes > 0);
                prop_assert_eq!(chunk.to, next[chunk.target]);
                prop_assert_eq!(chunk.to % HUGE_PAGE_BYTES, 0);
                prop_assert_eq!(chunk.from, chunk.to);
                next[chunk.target] += chunk.bytes;
            }
            for (target, covered) in plan.targets.iter().zip(next) {
                prop_assert_eq!(target.bytes, covered);
            }
            let in_jobs: Vec<usize> = plan.jobs.iter().cloned().flatten().collect();
            prop_assert_eq!(in_jobs, (0..plan.chunks.len()).collect::<Vec<_>>());
        }
    }
}
