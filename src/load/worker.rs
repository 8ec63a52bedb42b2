//! One worker: keeps its engine full of reads, resumes short ones, and hands full chunks to the sink.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::pages::Pages;
use super::{Shared, Vessel, Watch};
use crate::engine::keeping::{Attempts, append, free_slot, joined};
use crate::engine::{Completion, Direction, Engine, Transfer};
use crate::error::{Error, Kind, Result};
use crate::plan::Chunk;
use crate::source::{Method, SourceFile, changed};
use crate::sys::map::Window;
use crate::units::{HUGE_PAGE_BYTES, PAGE_BYTES, round_down};

/// How long a worker that may not read yet sleeps before it looks whether the load was cancelled.
const SLEEP_MAX: Duration = Duration::from_millis(50);

/// Chunks that a worker cuts or prepares at one time.
pub(super) const CHUNKS_OPEN_MAX: usize = 2;

/// Extents that are given a huge page between two looks for completions.
const EXTENTS_AT_ONCE: usize = 4;

/// How long a worker waits that may take no more memory now and has nothing else to do.
const HELD_PAUSE: Duration = Duration::from_millis(5);

/// A chunk that is being filled.
struct Active {
    chunk: Chunk,
    source: Arc<SourceFile>,
    prefer_buffered: bool,
    /// The part that is not cut into reads yet, and where in the chunk it begins.
    rest: Window,
    at: u64,
    collapse: bool,
    /// Where in the chunk the next extent begins that was not given a huge page yet: never before `at`.
    extent: u64,
    /// Which of the extents before it have one.
    huge_extents: Vec<bool>,
    huge_bytes: u64,
    /// The parts that were read, in order, until all are there.
    parts: Vec<Option<Window>>,
    parts_filled: usize,
}

impl Active {
    /// Whether an extent that lies wholly inside the chunk was not given a huge page yet.
    fn has_extent_left(&self) -> bool {
        self.collapse && self.extent + HUGE_PAGE_BYTES <= self.chunk.bytes
    }

    /// Gives a huge page to every extent that begins before `end` and lies wholly inside the chunk; `false` where
    /// no more memory may be taken now.
    fn prepare_extents(&mut self, pages: &mut Pages, watch: &dyn Watch, end: u64) -> bool {
        while self.has_extent_left() && self.extent < end {
            if !watch.may_take(HUGE_PAGE_BYTES) {
                return false;
            }
            let is_huge = pages.prepare(&mut self.rest, self.extent - self.at);
            if is_huge {
                self.huge_bytes += HUGE_PAGE_BYTES;
                watch.took(HUGE_PAGE_BYTES);
            } else {
                // Its pages come with the reads.
                watch.left_untaken(HUGE_PAGE_BYTES);
            }
            self.huge_extents.push(is_huge);
            self.extent += HUGE_PAGE_BYTES;
        }
        true
    }

    /// How many of the next `bytes` are not on huge pages: they are allocated when they are read.
    fn small_bytes(&self, bytes: u64) -> u64 {
        let end = self.at + bytes;
        let extents = self.at / HUGE_PAGE_BYTES..end.div_ceil(HUGE_PAGE_BYTES);
        let on_huge_page = |extent: u64| {
            let from = extent * HUGE_PAGE_BYTES;
            let is_huge = self.huge_extents.get(extent as usize).is_some_and(|is_huge| *is_huge);
            if is_huge { end.min(from + HUGE_PAGE_BYTES) - self.at.max(from) } else { 0 }
        };
        bytes - extents.map(on_huge_page).sum::<u64>()
    }
}

/// One part of a chunk that is being read.
struct Part {
    active: usize,
    index: usize,
    /// Where in the source the next read begins.
    offset: u64,
    /// Bytes of the source in this part, and how many are still wanted.
    bytes: u64,
    wanted: u64,
    /// Bytes of memory that are allocated by reading it.
    small_bytes: u64,
    /// What short reads have filled so far.
    filled: Option<Window>,
    method: Method,
    attempts: Attempts,
}

/// What came of opening the next chunk.
#[derive(PartialEq, Eq)]
enum Opened {
    Yes,
    /// The sink has no window for it now.
    NoRoom,
    /// No job is left.
    NoJob,
}

/// What a worker can do next.
enum Next {
    Read(Transfer),
    /// So long until it is worth asking again: the rate allows no other read yet, or no more memory may be taken.
    Wait(Duration),
    /// The sink has no window now.
    NoRoom,
    Nothing,
}

/// What one worker has under way.
struct Worker<'a> {
    shared: &'a Shared<'a>,
    engine: Box<dyn Engine>,
    pages: Pages,
    job: Range<usize>,
    /// The chunk that there was no room for.
    unopened: Option<usize>,
    /// The chunks that are being cut into reads, in order: the first one, and the one after it where its huge
    /// pages are being prepared already.
    cutting: VecDeque<usize>,
    active: Vec<Option<Active>>,
    parts: Vec<Option<Part>>,
    in_flight: usize,
    /// Reads to be submitted before any new one: resumed and retried ones.
    again: VecDeque<Transfer>,
}

/// Works until no job is left, or somebody fails.
pub(super) fn work(shared: &Shared<'_>, engine: Box<dyn Engine>) -> Result<()> {
    let depth = engine.depth();
    let mut worker = Worker {
        shared,
        engine,
        pages: Pages::new(shared.placement),
        job: 0..0,
        unopened: None,
        cutting: VecDeque::with_capacity(CHUNKS_OPEN_MAX),
        active: Vec::new(),
        parts: (0..depth).map(|_| None).collect(),
        in_flight: 0,
        again: VecDeque::new(),
    };
    let mut completions = Vec::with_capacity(depth);
    while !shared.stopped() {
        let next = worker.fill_engine()?;
        if worker.in_flight == 0 {
            match next {
                Next::Wait(wait) => std::thread::sleep(wait.min(SLEEP_MAX)),
                Next::NoRoom => shared.sink.wait_for_room(),
                Next::Read(_) | Next::Nothing => break,
            }
            continue;
        }
        worker.engine.start()?;
        worker.prepare_ahead()?;
        worker.engine.reap(&mut completions)?;
        for completion in completions.drain(..) {
            worker.in_flight -= 1;
            worker.settle(completion)?;
        }
    }
    Ok(())
}

impl Worker<'_> {
    /// Submits reads until the engine is full, or tells why there is no other one now.
    fn fill_engine(&mut self) -> Result<Next> {
        while self.in_flight < self.parts.len() {
            let read = match self.again.pop_front() {
                Some(read) => read,
                None => match self.next_read()? {
                    Next::Read(read) => read,
                    none => return Ok(none),
                },
            };
            let submitted = self.engine.submit(read);
            assert!(submitted.is_ok(), "an engine takes as many reads as its depth");
            self.in_flight += 1;
        }
        Ok(Next::Nothing)
    }

    /// Cuts the next part off the current chunk, going on to the next chunk and job where it is used up.
    fn next_read(&mut self) -> Result<Next> {
        if self.cutting.is_empty() {
            match self.open_chunk()? {
                Opened::Yes => {}
                Opened::NoRoom => return Ok(Next::NoRoom),
                Opened::NoJob => return Ok(Next::Nothing),
            }
        }
        let slot = self.cutting[0];
        let active = self.active[slot].as_mut().expect("the chunk that is cut is active");
        let offset = active.chunk.from + active.at;
        // Cut where the source's units of residency end, so that each part is read by one method.
        let unit = self.shared.read_bytes;
        let wanted = (unit - offset % unit).min(active.chunk.bytes - active.at);
        let last = active.at + wanted == active.chunk.bytes;
        let length = if last { active.rest.len() } else { wanted as usize };
        let watch = self.shared.watch;
        if !active.prepare_extents(&mut self.pages, watch, active.at + wanted) {
            return Ok(Next::Wait(HELD_PAUSE));
        }
        if let Some(Err(wait)) = self.shared.limiter.as_ref().map(|limiter| limiter.take(wanted)) {
            return Ok(Next::Wait(wait));
        }
        let small_bytes = active.small_bytes(length as u64);
        // Last, because what was granted must be used.
        if !watch.may_take(small_bytes) {
            return Ok(Next::Wait(HELD_PAUSE));
        }
        let token = free_slot(&mut self.parts);
        let window = active.rest.split_to(length);
        let method = active.source.method(offset, active.prefer_buffered);
        let index = active.parts.len();
        active.parts.push(None);
        active.at += wanted;
        if last {
            self.cutting.pop_front();
        }
        let file = Arc::clone(active.source.descriptor(method));
        self.parts[token] = Some(Part {
            active: slot,
            index,
            offset,
            bytes: wanted,
            wanted,
            small_bytes,
            filled: None,
            method,
            attempts: Attempts::default(),
        });
        Ok(Next::Read(read(token, file, offset, window)))
    }

    /// Gives huge pages to the next extents while the device works on the reads that were started: the kernel
    /// clears each page, which takes a good part of the time that the device takes to fill it. As far ahead as
    /// the queue is deep, and a few at a time, so that completions do not wait.
    fn prepare_ahead(&mut self) -> Result<()> {
        let ahead_max = self.parts.len() as u64 * self.shared.read_bytes;
        for _ in 0..EXTENTS_AT_ONCE {
            let mut ahead = 0;
            let mut unprepared = None;
            for &slot in &self.cutting {
                let active = self.active[slot].as_ref().expect("a chunk that is cut is active");
                if active.has_extent_left() {
                    ahead += active.extent.saturating_sub(active.at);
                    unprepared = Some(slot);
                    break;
                }
                ahead += active.chunk.bytes - active.at;
            }
            if ahead >= ahead_max {
                break;
            }
            match unprepared {
                Some(slot) => {
                    let active = self.active[slot].as_mut().expect("looked at above");
                    let end = active.extent + 1;
                    if !active.prepare_extents(&mut self.pages, self.shared.watch, end) {
                        break;
                    }
                }
                None if self.cutting.len() < CHUNKS_OPEN_MAX && self.open_chunk()? == Opened::Yes => {}
                None => break,
            }
        }
        Ok(())
    }

    /// Opens the next chunk, to be cut after those that are.
    fn open_chunk(&mut self) -> Result<Opened> {
        let index = match self.unopened.take().or_else(|| self.job.next()) {
            Some(index) => index,
            None => {
                let Some(mut job) = self.shared.schedule.take_job() else { return Ok(Opened::NoJob) };
                let first = job.next().expect("a job has a chunk");
                self.job = job;
                first
            }
        };
        let chunk = self.shared.plan.chunks[index];
        let (source, prefer_buffered) = self.shared.schedule.source(chunk.source)?;
        let Some(Vessel { window, collapse }) = self.shared.sink.open(&chunk)? else {
            self.unopened = Some(index);
            return Ok(Opened::NoRoom);
        };
        assert_eq!(window.len() as u64, chunk.bytes.next_multiple_of(PAGE_BYTES), "a window fits its chunk");
        let slot = free_slot(&mut self.active);
        self.active[slot] = Some(Active {
            chunk,
            source,
            prefer_buffered,
            rest: window,
            at: 0,
            collapse,
            extent: 0,
            huge_extents: Vec::new(),
            huge_bytes: 0,
            parts: Vec::new(),
            parts_filled: 0,
        });
        self.cutting.push_back(slot);
        Ok(Opened::Yes)
    }

    /// Takes one completion: done, to be resumed, to be retried, or an error.
    fn settle(&mut self, completion: Completion) -> Result<()> {
        let token = completion.token as usize;
        let part = self.parts[token].as_mut().expect("a completion belongs to a part");
        let active = self.active[part.active].as_ref().expect("a part belongs to an active chunk");
        let source = &active.source;
        let mut window = completion.window;
        match completion.result {
            Ok(bytes) if bytes as u64 >= part.wanted => return self.part_done(token, window),
            Ok(0) => {
                let how = format!("it ends after {} bytes", part.offset);
                return Err(changed(source.name(), &how));
            }
            Ok(bytes) => {
                // Short is normal. O_DIRECT goes on at an aligned offset: the file's end aside, it only ends
                // at another where something is odd, so the rest is better read through the page cache.
                let mut keep = bytes as u64;
                if part.method == Method::Direct && !keep.is_multiple_of(source.alignment()) {
                    keep = round_down(keep, source.alignment());
                    if !source.insists_on_direct() {
                        part.method = source.go_on_buffered()?;
                    }
                }
                if keep > 0 {
                    let filled = window.split_to(keep as usize);
                    append(&mut part.filled, filled);
                    part.offset += keep;
                    part.wanted -= keep;
                    part.attempts.forget();
                } else {
                    part.attempts.try_again("read", source.name(), part.offset)?;
                }
            }
            Err(cause) => match cause.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) if part.attempts.may_try() => {
                    part.attempts.try_again("read", source.name(), part.offset)?;
                }
                Some(libc::EINVAL | libc::EOPNOTSUPP) if part.method == Method::Direct => {
                    part.method = source.direct_was_refused(&cause)?;
                }
                _ => {
                    let doing = format!("read {} bytes at {} of", part.wanted, part.offset);
                    return Err(
                        Error::io(&doing, source.name().as_ref(), &cause).with_kind(read_kind(&cause))
                    );
                }
            },
        }
        let file = Arc::clone(source.descriptor(part.method));
        self.again.push_back(read(token, file, part.offset, window));
        Ok(())
    }

    /// One part is whole; when all parts of its chunk are, the chunk goes to the sink.
    fn part_done(&mut self, token: usize, window: Window) -> Result<()> {
        let mut part = self.parts[token].take().expect("a completion belongs to a part");
        let slot = part.active;
        append(&mut part.filled, window);
        self.count(part.method, part.bytes);
        self.shared.watch.advanced(part.bytes);
        let active = self.active[slot].as_mut().expect("a part belongs to an active chunk");
        // What is read into a buffer takes its memory when it is written from there.
        if active.collapse {
            self.shared.watch.took(part.small_bytes);
        }
        active.parts[part.index] = part.filled;
        active.parts_filled += 1;
        if active.at < active.chunk.bytes || active.parts_filled < active.parts.len() {
            return Ok(());
        }
        let active = self.active[slot].take().expect("checked above");
        self.chunk_done(active)
    }

    fn chunk_done(&mut self, active: Active) -> Result<()> {
        let Active { chunk, source, rest, collapse, huge_bytes, parts, .. } = active;
        // What is left to cut is empty, but it would still hold the mapping.
        drop(rest);
        let mut window = joined(parts);
        // The last page of a file is read whole: what stands behind its end is nobody's.
        window.as_mut_slice()[chunk.bytes as usize..].fill(0);
        let allocated = window.len() as u64;
        self.shared.sink.filled(&chunk, window, huge_bytes)?;
        if !collapse {
            self.shared.watch.took(allocated);
        }
        if self.shared.schedule.chunk_done(chunk.source) {
            source.forget_all();
            self.shared.watch.finished_file();
        } else {
            source.forget(chunk.from, chunk.bytes);
        }
        Ok(())
    }

    fn count(&self, method: Method, bytes: u64) {
        let counters = &self.shared.counters;
        let counter = match method {
            Method::Direct => &counters.direct,
            Method::Cached => &counters.cached,
            Method::Buffered => &counters.buffered,
        };
        counter.fetch_add(bytes, Ordering::Relaxed);
    }
}

fn read(token: usize, file: Arc<File>, offset: u64, window: Window) -> Transfer {
    Transfer { token: token as u64, direction: Direction::Read, file, offset, window }
}

/// The kind of a failed read: the file was found and opened, so nothing is "not found" any more.
fn read_kind(cause: &std::io::Error) -> Kind {
    match cause.raw_os_error() {
        Some(libc::ENOMEM) => Kind::NoRoom,
        Some(libc::ESTALE) => Kind::SourceChanged,
        _ => Kind::Failed,
    }
}
