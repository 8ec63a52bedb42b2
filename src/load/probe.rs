//! On network and FUSE file systems O_DIRECT may be the slower way: read a little both ways and see.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Options, StartEngine};
use crate::engine::{Direction, Engine, Transfer};
use crate::error::Result;
use crate::plan::Plan;
use crate::source::{Direct, Method, SelectedFile, SourceFile};
use crate::sys::map::Mapping;

/// What is read each way: long enough for a rate, and nothing beside a model.
const PROBE_BYTES: u64 = 8 << 20;

/// O_DIRECT is given up only where it is clearly slower: it costs less CPU and leaves the cache alone.
const CLEARLY: f64 = 1.25;

/// The devices among the plan's sources that are remote and read faster through the page cache.
pub(super) fn devices_better_buffered(
    plan: &Plan,
    files: &[SelectedFile],
    start_engine: StartEngine<'_>,
    options: &Options,
    read_bytes: u64,
) -> Result<HashSet<u64>> {
    let mut slow = HashSet::new();
    // Which way is faster does not matter to a load that is to be slow.
    if options.direct != Direct::Auto || options.bytes_per_second.is_some() {
        return Ok(slow);
    }
    for selected in longest_of_each_device(plan, files) {
        if selected.identity.bytes < 2 * PROBE_BYTES {
            continue;
        }
        let source = SourceFile::open(selected, Direct::Auto, read_bytes)?;
        if !source.is_remote() {
            continue;
        }
        // Pages that are there already would make the buffered way look fast.
        let is_cold = |at: u64| source.method(at, false) == Method::Direct;
        if !(0..2 * PROBE_BYTES).step_by(read_bytes as usize).all(is_cold) {
            continue;
        }
        let direct = time_to_read(start_engine()?.as_mut(), &source, Method::Direct, 0, read_bytes);
        source.go_on_buffered()?;
        let buffered =
            time_to_read(start_engine()?.as_mut(), &source, Method::Buffered, PROBE_BYTES, read_bytes);
        source.forget(0, 2 * PROBE_BYTES);
        if let (Some(direct), Some(buffered)) = (direct, buffered)
            && direct.as_secs_f64() > CLEARLY * buffered.as_secs_f64()
        {
            slow.insert(selected.identity.device);
        }
    }
    Ok(slow)
}

fn longest_of_each_device<'a>(plan: &Plan, files: &'a [SelectedFile]) -> Vec<&'a SelectedFile> {
    let mut longest: Vec<&SelectedFile> = Vec::new();
    for file in plan.sources.iter().map(|&index| &files[index]) {
        match longest.iter_mut().find(|other| other.identity.device == file.identity.device) {
            Some(other) if other.identity.bytes >= file.identity.bytes => {}
            Some(other) => *other = file,
            None => longest.push(file),
        }
    }
    longest
}

/// Reads [`PROBE_BYTES`] from `offset` and throws them away. `None` where a read fails: the load will meet
/// the failure itself, and report it.
fn time_to_read(
    engine: &mut dyn Engine,
    source: &SourceFile,
    method: Method,
    offset: u64,
    read_bytes: u64,
) -> Option<Duration> {
    let mut memory = Mapping::anonymous(PROBE_BYTES as usize).ok()?;
    memory.as_mut_slice().fill(0);
    let start = Instant::now();
    let (mut at, mut in_flight, mut completions) = (0, 0, Vec::new());
    while at < PROBE_BYTES || in_flight > 0 {
        while at < PROBE_BYTES && in_flight < engine.depth() {
            let length = read_bytes.min(PROBE_BYTES - at);
            let window = memory.split_to(length as usize);
            let file = Arc::clone(source.descriptor(method));
            let direction = Direction::Read;
            engine.submit(Transfer { token: 0, direction, file, offset: offset + at, window }).ok()?;
            (at, in_flight) = (at + length, in_flight + 1);
        }
        engine.reap(&mut completions).ok()?;
        in_flight -= completions.len();
        if completions.drain(..).any(|completion| completion.result.is_err()) {
            return None;
        }
    }
    Some(start.elapsed())
}
