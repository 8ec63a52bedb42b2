//! Who reads what next: jobs are handed out one at a time, sources opened at their first chunk and closed
//! after their last.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::Options;
use crate::error::{Error, Kind, Result};
use crate::plan::Plan;
use crate::source::{ChangeTime, Direct, Identity, SelectedFile, SourceFile, changed, check_unchanged};

/// The state that all workers of a load share.
pub(super) struct Schedule<'a> {
    plan: &'a Plan,
    files: &'a [SelectedFile],
    direct: Direct,
    heeds_change_time: bool,
    unit: u64,
    /// Devices on which reading through the page cache was found to be faster.
    slow_direct: HashSet<u64>,
    next_job: AtomicUsize,
    sources: Vec<Mutex<Source>>,
}

/// One source: how many of its chunks are still to come, and the file while any is being read.
struct Source {
    chunks_left: usize,
    open: Option<Arc<SourceFile>>,
    /// See [`SourceFile::change_time`].
    change_time: Option<ChangeTime>,
}

impl<'a> Schedule<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        files: &'a [SelectedFile],
        options: &Options,
        unit: u64,
        slow_direct: HashSet<u64>,
    ) -> Schedule<'a> {
        let mut chunks_left = vec![0; plan.sources.len()];
        for chunk in &plan.chunks {
            chunks_left[chunk.source] += 1;
        }
        let sources =
            chunks_left.into_iter().map(|chunks_left| Source { chunks_left, open: None, change_time: None });
        Schedule {
            plan,
            files,
            direct: options.direct,
            heeds_change_time: options.heeds_change_time,
            unit,
            slow_direct,
            next_job: AtomicUsize::new(0),
            sources: sources.map(Mutex::new).collect(),
        }
    }

    /// The next job that nobody has taken.
    pub(super) fn take_job(&self) -> Option<Range<usize>> {
        let index = self.next_job.fetch_add(1, Ordering::Relaxed);
        self.plan.jobs.get(index).cloned()
    }

    /// The open file of a source, and whether it is better read through the page cache.
    pub(super) fn source(&self, index: usize) -> Result<(Arc<SourceFile>, bool)> {
        let selected = &self.files[self.plan.sources[index]];
        let mut source = self.lock(index);
        let file = match &source.open {
            Some(file) => Arc::clone(file),
            None => {
                let file = Arc::new(SourceFile::open(selected, self.direct, self.unit)?);
                source.change_time = file.change_time().filter(|_| self.heeds_change_time);
                source.open = Some(Arc::clone(&file));
                file
            }
        };
        Ok((file, self.slow_direct.contains(&selected.identity.device)))
    }

    /// One chunk of a source has been filled. True if it was the last: the file is then closed here.
    pub(super) fn chunk_done(&self, index: usize) -> bool {
        let mut source = self.lock(index);
        source.chunks_left -= 1;
        if source.chunks_left == 0 {
            source.open = None;
        }
        source.chunks_left == 0
    }

    fn lock(&self, index: usize) -> std::sync::MutexGuard<'_, Source> {
        self.sources[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Compares every source with what was selected, by its path: so a file that was replaced is seen too. And
    /// with when it was changed last: a modification time can be set back, by who writes as well as by tools
    /// that copy times.
    pub(super) fn check_sources(&self) -> Result<()> {
        for (source, &index) in self.plan.sources.iter().enumerate() {
            let selected = &self.files[index];
            let metadata = match std::fs::symlink_metadata(&selected.real) {
                Ok(metadata) => metadata,
                Err(cause) => {
                    let error = Error::io("examine", &selected.real, &cause);
                    return Err(match error.kind() {
                        Kind::NotFound => changed(&selected.path, "it is gone"),
                        _ => error,
                    });
                }
            };
            check_unchanged(selected, &Identity::of(&metadata))?;
            let before = self.lock(source).change_time;
            if before.is_some_and(|before| before != ChangeTime::of(&metadata)) {
                let how =
                    "its bytes, mode, owner or links were, although size and modification time are the same";
                return Err(changed(&selected.path, how));
            }
        }
        Ok(())
    }
}
