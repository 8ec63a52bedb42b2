//! Disk's sink: full windows are written by one thread with one engine, files are finished by a few others.
//!
//! ```text
//! load's workers ─ open ─▶ a window of the pool, and the file, made at its first chunk
//!   hashing      ─ filled ─▶ writer thread: pieces, past the page cache ─▶ window back to the pool
//!                              └ last chunk of a file ─▶ finishing threads: cut, dated, synced, noted
//! ```

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{Advice, AtFlags, OFlags, StatxFlags};

use super::build::Watch;
use super::medium::Medium;
use super::pieces;
use super::staging::make_readable;
use crate::engine::Selected;
use crate::error::{Error, Kind, Result};
use crate::load::buffers::Pool;
use crate::load::{Sink, Vessel};
use crate::manifest::Digest;
use crate::plan::Chunk;
use crate::source::Identity;
use crate::sys::map::Window;
use crate::units::{PAGE_BYTES, round_up};

/// Threads that sync files while others are written: as many syncs at once share one commit of a file system's journal.
const FINISHERS: usize = 8;

/// Files that wait to be finished.
const FINISHING_MAX: usize = 64;

/// Files that are open at a time, from their first chunk until they are synced, each with a descriptor: small ones
/// wait in thousands where syncing them is slower than reading.
pub(super) const FILES_OPEN_MAX: usize = 256;

/// How long a worker waits for a place before it looks whether to go on at all.
const WAIT_MAX: Duration = Duration::from_millis(50);

/// Up to so many bytes a file goes through the page cache: one copy is cheaper than a round trip to the device that
/// the sync makes once more.
const BUFFERED_BYTES_MAX: u64 = 128 << 10;

/// A file that is to be written.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    /// Where.
    pub(super) path: PathBuf,
    /// Its length and modification time.
    pub(super) identity: Identity,
    /// What its bytes must be, where somebody said so.
    pub(super) expected: Option<Digest>,
}

/// What a writer needs.
pub(super) struct Setting<'a> {
    pub(super) medium: &'a dyn Medium,
    /// The targets of the plan that is loaded, in order.
    pub(super) files: &'a [Wanted],
    /// How many chunks each of them has.
    pub(super) chunks: &'a [usize],
    /// The mode of a file.
    pub(super) mode: u32,
    pub(super) pool: &'a Pool,
    pub(super) engine: &'a Selected,
    pub(super) watch: &'a dyn Watch,
    /// Told of each file of which nothing was read yet.
    pub(super) begun: &'a (dyn Fn(usize) + Sync),
    /// Told of each file that is whole and synced.
    pub(super) finished: &'a (dyn Fn(usize, Digest) -> Result<()> + Sync),
    /// A digest that is not the expected one, as an error.
    pub(super) mismatch: &'a (dyn Fn(usize, Digest, Digest) -> Error + Sync),
}

/// A chunk that is full.
pub(super) struct Full {
    pub(super) chunk: Chunk,
    pub(super) window: Window,
}

/// The sink.
pub(super) struct Writer<'a> {
    pub(super) setting: &'a Setting<'a>,
    targets: Vec<Mutex<Target>>,
    /// Taken when the load has ended: then the writing thread ends with the queue.
    full: Mutex<Option<Sender<Full>>>,
    /// Taken when the writing thread has ended: then the finishing threads do.
    finishing: Mutex<Option<SyncSender<usize>>>,
    /// Files that are open.
    open: Mutex<usize>,
    /// One of them was finished.
    room: Condvar,
    failure: Failure,
}

/// A file that is being written.
struct Target {
    file: Option<Arc<File>>,
    /// Whether it is written past the page cache.
    is_direct: bool,
    chunks_left: usize,
    digest: Option<Digest>,
}

/// The first failure of any thread: it ends all.
#[derive(Default)]
struct Failure {
    is_there: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl Failure {
    fn set(&self, error: Error) {
        lock(&self.error).get_or_insert(error);
        self.is_there.store(true, Ordering::Release);
    }

    fn check(&self) -> Result<()> {
        if !self.is_there.load(Ordering::Acquire) {
            return Ok(());
        }
        match &*lock(&self.error) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

/// Runs `load` with a sink that writes the files of `setting`. When this returns, each of them is whole, synced and
/// was told to `finished`; or it failed, and no thread works on any of them any more.
pub(super) fn write<T>(setting: &Setting<'_>, load: impl FnOnce(&dyn Sink) -> Result<T>) -> Result<T> {
    let (full, fulls) = channel();
    let (finishing, unfinished) = sync_channel(FINISHING_MAX);
    // Owned by the finishing threads alone: whoever sends to them learns that none is left.
    let unfinished = Arc::new(Mutex::new(unfinished));
    let target = |chunks: &usize| {
        Mutex::new(Target { file: None, is_direct: false, chunks_left: *chunks, digest: None })
    };
    let writer = Writer {
        setting,
        targets: setting.chunks.iter().map(target).collect(),
        full: Mutex::new(Some(full)),
        finishing: Mutex::new(Some(finishing)),
        open: Mutex::new(0),
        room: Condvar::new(),
        failure: Failure::default(),
    };
    let loaded = std::thread::scope(|scope| {
        let writer = &writer;
        let end = OnEnd(writer);
        for index in 0..FINISHERS {
            let unfinished = Arc::clone(&unfinished);
            let work = move || writer.finish_files(&unfinished);
            match std::thread::Builder::new().name(format!("finish-{index}")).spawn_scoped(scope, work) {
                Ok(_) => {}
                Err(cause) if index == 0 => {
                    return Err(Error::spawning("start a thread that syncs files", &cause));
                }
                // With fewer it is slower, not wrong.
                Err(_) => break,
            }
        }
        drop(unfinished);
        let work = move || {
            let _end = end;
            let fulls = fulls;
            let engine = setting.medium.start_engine(setting.engine);
            if let Err(error) = engine.and_then(|engine| pieces::write_all(writer, engine, &fulls)) {
                writer.failure.set(error);
            }
        };
        let moving = std::thread::Builder::new().name("write".to_owned()).spawn_scoped(scope, work);
        let loaded = match moving {
            Ok(_) => load(writer),
            Err(cause) => Err(Error::spawning("start a thread that writes", &cause)),
        };
        if let Err(error) = &loaded {
            writer.failure.set(error.clone());
        }
        lock(&writer.full).take();
        loaded
    });
    writer.failure.check()?;
    loaded
}

/// Ends the finishing threads, whatever ends the thread that gives them work. Where that is a panic, it ends the load
/// too: its workers wait for windows that nobody gives back.
struct OnEnd<'a>(&'a Writer<'a>);

impl Drop for OnEnd<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failure.set(Error::new(Kind::Failed, "the thread that writes has panicked"));
        }
        lock(&self.0.finishing).take();
    }
}

impl Writer<'_> {
    /// Makes a file, with its blocks.
    fn make(&self, index: usize) -> Result<(Arc<File>, bool)> {
        (self.setting.begun)(index);
        let wanted = &self.setting.files[index];
        let medium = self.setting.medium;
        let failed = |cause: io::Error| failed("write", &wanted.path, &cause);
        let file = make_readable(medium, &wanted.path, self.setting.mode).map_err(failed)?;
        let bytes = wanted.identity.bytes;
        if bytes > 0 {
            // The whole last page is written, and cut off at the end.
            medium.preallocate(&file, round_up(bytes, PAGE_BYTES)).map_err(failed)?;
        }
        let is_direct = bytes > BUFFERED_BYTES_MAX
            && takes_pages(&file)
            && rustix::fs::fcntl_setfl(&file, OFlags::DIRECT).is_ok();
        Ok((Arc::new(file), is_direct))
    }

    fn target(&self, index: usize) -> MutexGuard<'_, Target> {
        lock(&self.targets[index])
    }

    /// The file of a target that is being written, and whether it is written past the page cache.
    pub(super) fn file(&self, target: usize) -> (Arc<File>, bool) {
        let target = self.target(target);
        (
            Arc::clone(target.file.as_ref().expect("a chunk that is written has its file open")),
            target.is_direct,
        )
    }

    /// The rest of a file goes through the page cache, because `cause` is its answer to O_DIRECT.
    pub(super) fn direct_was_refused(&self, target: usize) -> Result<()> {
        let mut state = self.target(target);
        if state.is_direct {
            state.is_direct = false;
            let file = state.file.as_ref().expect("a chunk that is written has its file open");
            rustix::fs::fcntl_setfl(file, OFlags::empty()).map_err(|errno| {
                failed("write", &self.setting.files[target].path, &io::Error::from(errno))
            })?;
        }
        Ok(())
    }

    /// One chunk is written: its window goes back, and its file is finished when it was the last one.
    pub(super) fn chunk_done(&self, chunk: &Chunk, window: Window) {
        self.setting.pool.give(window);
        let mut target = self.target(chunk.target);
        target.chunks_left -= 1;
        let is_last = target.chunks_left == 0;
        drop(target);
        if is_last {
            self.hand_to_finishers(chunk.target);
        }
    }

    fn hand_to_finishers(&self, target: usize) {
        let finishing = lock(&self.finishing).clone();
        // Fails where the finishers are gone, which they are only after a failure.
        let _ = finishing.map(|finishing| finishing.send(target));
    }

    /// Whether to stop: another thread failed, or the copy was cancelled, which when all is read nobody else looks at.
    pub(super) fn check(&self) -> Result<()> {
        self.failure.check()?;
        check_cancelled(self.setting.watch)
    }

    /// Finishes files until there are no more, or somebody fails.
    fn finish_files(&self, unfinished: &Mutex<Receiver<usize>>) {
        loop {
            let next = lock(unfinished).recv();
            let Ok(target) = next else { return };
            // What waits is let go: a sync may take long.
            if let Err(error) = check_cancelled(self.setting.watch) {
                self.failure.set(error);
                continue;
            }
            if let Err(error) = self.finish(target) {
                self.failure.set(error);
            }
        }
    }

    fn finish(&self, index: usize) -> Result<()> {
        let wanted = &self.setting.files[index];
        let (file, is_direct, digest) = {
            let mut target = self.target(index);
            let file = target.file.take().expect("a file is finished once");
            (
                file,
                target.is_direct,
                target.digest.expect("a file is hashed before its last chunk is written"),
            )
        };
        finish_file(self.setting.medium, &file, wanted)?;
        if !is_direct {
            // Advice: where it is refused the pages stay until the kernel needs them.
            let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
        }
        drop(file);
        *lock(&self.open) -= 1;
        self.room.notify_all();
        (self.setting.finished)(index, digest)
    }
}

impl Sink for Writer<'_> {
    fn open(&self, chunk: &Chunk) -> Result<Option<Vessel>> {
        self.check()?;
        // Only one worker opens the chunks of a file.
        let is_new = self.target(chunk.target).file.is_none();
        if is_new && *lock(&self.open) >= FILES_OPEN_MAX {
            return Ok(None);
        }
        let Some(window) = self.setting.pool.take(round_up(chunk.bytes, PAGE_BYTES) as usize)? else {
            return Ok(None);
        };
        let mut target = self.target(chunk.target);
        if is_new {
            *lock(&self.open) += 1;
            let (file, is_direct) = self.make(chunk.target)?;
            (target.file, target.is_direct) = (Some(file), is_direct);
        }
        Ok(Some(Vessel { window, collapse: false }))
    }

    fn wait_for_room(&self) {
        let open = lock(&self.open);
        if *open < FILES_OPEN_MAX {
            drop(open);
            return self.setting.pool.wait();
        }
        let is_full = |open: &mut usize| *open >= FILES_OPEN_MAX;
        drop(self.room.wait_timeout_while(open, WAIT_MAX, is_full));
    }

    fn filled(&self, chunk: &Chunk, window: Window, _huge_bytes: u64) -> Result<()> {
        self.check()?;
        let full = lock(&self.full).clone();
        let sent = full.is_some_and(|full| full.send(Full { chunk: *chunk, window }).is_ok());
        if sent {
            return Ok(());
        }
        self.check()?;
        Err(Error::new(Kind::Failed, "the thread that writes has ended"))
    }

    fn digested(&self, target: usize, digest: Digest) -> Result<()> {
        if let Some(expected) = self.setting.files[target].expected.filter(|expected| *expected != digest) {
            return Err((self.setting.mismatch)(target, expected, digest));
        }
        let mut state = self.target(target);
        state.digest = Some(digest);
        if state.chunks_left > 0 {
            return Ok(());
        }
        // An empty file has no chunk that would make and finish it.
        state.file = Some(self.make(target)?.0);
        *lock(&self.open) += 1;
        drop(state);
        self.hand_to_finishers(target);
        Ok(())
    }
}

/// Refuses to go on where nobody wants it any more.
pub(super) fn check_cancelled(watch: &dyn Watch) -> Result<()> {
    if watch.cancelled() {
        return Err(Error::new(Kind::Cancelled, "the copy was cancelled"));
    }
    Ok(())
}

/// Makes a file that has all its bytes last: its length, its time, its blocks.
pub(super) fn finish_file(medium: &dyn Medium, file: &File, wanted: &Wanted) -> Result<()> {
    let failed = |cause: io::Error| failed("finish", &wanted.path, &cause);
    let bytes = wanted.identity.bytes;
    if !bytes.is_multiple_of(PAGE_BYTES) {
        medium.set_length(file, bytes).map_err(failed)?;
    }
    medium.set_modified(file, &wanted.identity).map_err(failed)?;
    medium.sync_file(file).map_err(failed)
}

/// Whether writes of whole pages at whole pages are what O_DIRECT takes of this file, as far as the kernel tells.
fn takes_pages(file: &File) -> bool {
    let wanted = StatxFlags::from_bits_retain(libc::STATX_DIOALIGN);
    match rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted) {
        Ok(about) if about.stx_mask & libc::STATX_DIOALIGN != 0 => {
            (1..=PAGE_BYTES).contains(&u64::from(about.stx_dio_offset_align))
                && u64::from(about.stx_dio_mem_align) <= PAGE_BYTES
        }
        // Older kernels do not tell: the write will.
        _ => true,
    }
}

/// A failure to change `path`, with the way out where the disk is full.
pub(super) fn failed(doing: &str, path: &Path, cause: &io::Error) -> Error {
    let error = Error::io(doing, path, cause);
    match cause.raw_os_error() {
        Some(libc::ENOSPC) => error
            .hint("free some space (iloader cache-list, iloader gc), or choose another disk (--cache-root)"),
        Some(libc::EDQUOT) => {
            error.hint("free some space, have the quota raised, or choose another disk (--cache-root)")
        }
        Some(libc::EFBIG) => error,
        // What is missing is ours, and was there: not what the caller asked for.
        _ if error.kind() == Kind::NotFound => error.with_kind(Kind::Failed),
        _ => error,
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
