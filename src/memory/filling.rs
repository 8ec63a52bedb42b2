//! Memory's sink: segments that are being filled, each sealed as soon as its last chunk is there.

use std::os::fd::RawFd;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use super::backing::Backing;
use super::hashing::Hashing;
use super::segment::{OpenSegment, Segment};
use crate::error::{Error, Result, shown};
use crate::load::{Sink, Vessel};
use crate::manifest::Digest;
use crate::plan::{Chunk, Plan, SMALL_BYTES_MAX};
use crate::source::SelectedFile;
use crate::sys::map::{Mapping, Window};
use crate::sys::{crash, memfd};
use crate::units::{HUGE_PAGE_BYTES, PAGE_BYTES, round_up};

/// How long a worker waits for a place before it looks whether the load was cancelled.
const WAIT_MAX: Duration = Duration::from_millis(50);

/// The segments of one plan on their way from empty to sealed.
pub struct Filling<'a> {
    plan: &'a Plan,
    files: &'a [SelectedFile],
    cache_name: &'a str,
    backing: &'a Backing,
    lowest_descriptor: RawFd,
    targets: Vec<Mutex<Target>>,
    /// What is left of the buffer that small files are read into: their windows are cut from it. The
    /// buffer is unmapped when the last of them is back.
    buffer: Mutex<Option<Window>>,
    lock_memory: bool,
    hashing: Option<&'a Hashing>,
    /// Segments that are being filled, and how many may be.
    open: Mutex<usize>,
    open_max: usize,
    /// One of them was sealed.
    room: Condvar,
}

enum Target {
    Untouched,
    Open(Box<Open>),
    Sealed(Segment),
}

/// A segment of which some chunks are filled. Windows are empty for a small one, which is written instead.
struct Open {
    // Dropped before the segment: a mapping ends when its last window does.
    windows: Vec<Option<Window>>,
    first_chunk: usize,
    chunks_left: usize,
    huge_bytes: u64,
    segment: OpenSegment,
}

impl<'a> Filling<'a> {
    /// Nothing is allocated yet: each segment is made at its first chunk. `lowest_descriptor` is where the
    /// numbers of the published descriptors begin.
    pub fn new(
        plan: &'a Plan,
        files: &'a [SelectedFile],
        cache_name: &'a str,
        backing: &'a Backing,
        lowest_descriptor: RawFd,
    ) -> Filling<'a> {
        let targets = plan.targets.iter().map(|_| Mutex::new(Target::Untouched)).collect();
        let buffer = Mutex::new(None);
        Filling {
            plan,
            files,
            cache_name,
            backing,
            lowest_descriptor,
            targets,
            buffer,
            lock_memory: false,
            hashing: None,
            open: Mutex::new(0),
            open_max: usize::MAX,
            room: Condvar::new(),
        }
    }

    /// The same, with each segment locked in memory as soon as it is sealed.
    pub fn locked(self) -> Filling<'a> {
        Filling { lock_memory: true, ..self }
    }

    /// The same, refusing a file whose digest is not what it must be. Not more than `open_max` segments are open at a
    /// time, however far the hashing is behind the reading: each takes descriptors, and small ones buffers.
    ///
    /// Nobody waits for ever: workers take chunks in the order of their targets, so every chunk of an open segment is
    /// with a worker that may go on with it.
    pub fn compared(self, hashing: &'a Hashing, open_max: usize) -> Filling<'a> {
        Filling { hashing: Some(hashing), open_max, ..self }
    }

    /// Takes one of the places for open segments; `false` where all are taken.
    fn take_place(&self) -> bool {
        let mut open = lock(&self.open);
        let is_free = *open < self.open_max;
        *open += usize::from(is_free);
        is_free
    }

    fn give_place_back(&self) {
        *lock(&self.open) -= 1;
        self.room.notify_all();
    }

    /// The segments, in the order of the plan's targets. Call it after the load has succeeded.
    pub fn finish(self) -> Result<Vec<Segment>> {
        let mut segments = Vec::with_capacity(self.targets.len());
        for (index, target) in self.targets.iter().enumerate() {
            let mut target = lock(target);
            if matches!(*target, Target::Untouched) {
                assert_eq!(self.plan.targets[index].bytes, 0, "every chunk of a finished load was filled");
                *target = Target::Sealed(self.seal(index, self.create(index)?, 0)?);
            }
            match std::mem::replace(&mut *target, Target::Untouched) {
                Target::Sealed(segment) => segments.push(segment),
                Target::Untouched | Target::Open(_) => panic!("every segment of a finished load is sealed"),
            }
        }
        Ok(segments)
    }

    fn file(&self, target: usize) -> &SelectedFile {
        &self.files[self.plan.targets[target].file]
    }

    fn create(&self, target: usize) -> Result<OpenSegment> {
        let path = &self.file(target).path;
        let mut name = format!("iloader:{}:{path}", self.cache_name);
        name.truncate(name.floor_char_boundary(memfd::NAME_BYTES_MAX));
        OpenSegment::create(self.backing, &name, self.plan.targets[target].bytes)
            .map_err(|error| error.context(shown(path)))
    }

    fn seal(&self, target: usize, segment: OpenSegment, huge_bytes: u64) -> Result<Segment> {
        let file = self.file(target);
        let sealed = segment.seal(&file.identity, self.lowest_descriptor, huge_bytes);
        crash::point("segment-sealed");
        let locked = if self.lock_memory { sealed.and_then(Segment::locked) } else { sealed };
        locked.map_err(|error| error.context(shown(&file.path)))
    }

    /// Makes the segment of a target and, for a large one, carves one window for each of its chunks.
    fn open_target(&self, index: usize) -> Result<Box<Open>> {
        let mut segment = self.create(index)?;
        let first_chunk = self.plan.chunks.partition_point(|chunk| chunk.target < index);
        let chunks = self.plan.chunks[first_chunk..].iter().take_while(|chunk| chunk.target == index);
        let mut windows = Vec::new();
        if self.plan.targets[index].bytes > SMALL_BYTES_MAX {
            let mut rest = segment.map().map_err(|error| error.context(shown(&self.file(index).path)))?;
            windows.extend(
                chunks.clone().map(|chunk| Some(rest.split_to(round_up(chunk.bytes, PAGE_BYTES) as usize))),
            );
            assert!(rest.is_empty(), "the chunks of a target cover it");
        }
        let chunks_left = chunks.count();
        crash::point("segment-made");
        Ok(Box::new(Open { windows, first_chunk, chunks_left, huge_bytes: 0, segment }))
    }

    /// A piece of the buffer for a small file.
    fn buffer_window(&self, bytes: u64) -> Result<Window> {
        let bytes = round_up(bytes, PAGE_BYTES) as usize;
        let mut buffer = lock(&self.buffer);
        if buffer.as_ref().is_none_or(|left| left.len() < bytes) {
            let fresh = Mapping::anonymous(HUGE_PAGE_BYTES as usize);
            *buffer = Some(fresh.map_err(|cause| Error::os("map a buffer", &cause))?);
        }
        Ok(buffer.as_mut().expect("made above").split_to(bytes))
    }
}

impl Sink for Filling<'_> {
    fn open(&self, chunk: &Chunk) -> Result<Option<Vessel>> {
        let mut target = lock(&self.targets[chunk.target]);
        if matches!(*target, Target::Untouched) {
            if !self.take_place() {
                return Ok(None);
            }
            *target = Target::Open(self.open_target(chunk.target)?);
        }
        let Target::Open(open) = &mut *target else { panic!("a sealed segment has no chunk left") };
        if open.windows.is_empty() {
            drop(target);
            return Ok(Some(Vessel { window: self.buffer_window(chunk.bytes)?, collapse: false }));
        }
        let chunks = &self.plan.chunks[open.first_chunk..][..open.windows.len()];
        let index = chunks.partition_point(|other| other.to < chunk.to);
        let window = open.windows[index].take().expect("a chunk is opened once");
        Ok(Some(Vessel { window, collapse: true }))
    }

    fn filled(&self, chunk: &Chunk, window: Window, huge_bytes: u64) -> Result<()> {
        crash::point("chunk-filled");
        let mut target = lock(&self.targets[chunk.target]);
        let Target::Open(open) = &mut *target else { panic!("a filled chunk belongs to an open segment") };
        if open.windows.is_empty() {
            open.segment
                .write(&window.as_slice()[..chunk.bytes as usize])
                .map_err(|error| error.context(shown(&self.file(chunk.target).path)))?;
        }
        drop(window);
        open.huge_bytes += huge_bytes;
        open.chunks_left -= 1;
        if open.chunks_left == 0
            && let Target::Open(open) = std::mem::replace(&mut *target, Target::Untouched)
        {
            *target = Target::Sealed(self.seal(chunk.target, open.segment, open.huge_bytes)?);
            self.give_place_back();
        }
        Ok(())
    }

    fn wait_for_room(&self) {
        let open = lock(&self.open);
        let is_full = |open: &mut usize| *open >= self.open_max;
        // That it took longer is no matter: whoever waits looks between whether to go on at all.
        drop(self.room.wait_timeout_while(open, WAIT_MAX, is_full));
    }

    /// Called before the last chunk is handed over: a file that is another is never sealed.
    fn digested(&self, target: usize, digest: Digest) -> Result<()> {
        let file = self.plan.targets[target].file;
        self.hashing.map_or(Ok(()), |hashing| hashing.check(file, &self.files[file].path, digest))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
