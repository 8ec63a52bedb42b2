//! SHA-256 in flight: a sink that hashes each file in order on threads of its own, and hands the windows on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard};

use sha2::{Digest as _, Sha256};

use super::{Sink, Vessel};
use crate::error::{Error, Kind, Result};
use crate::manifest::Digest;
use crate::plan::{Chunk, Plan};
use crate::sys::map::Window;

/// As many threads as there are cores for this process: hashing keeps one busy, and is slower than reading.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs `load` with a sink that hashes what passes through it to `inner`, and gives the digest of each target, in the
/// order of the plan's targets, with what `load` gives.
///
/// A chunk's window waits until the chunks before it in its target were hashed, is hashed on one of `threads` threads,
/// and goes on to `inner.filled` from there; just before a target's last chunk goes on, `inner.digested` is called.
/// Of one target no two calls are made at the same time, and its chunks come to `inner` in their order, whatever the
/// order in which several workers have filled them. Of an empty target, which has no chunk, `inner.digested` is called
/// by this thread before the load begins.
///
/// A sink that has few windows needs the jobs of [`Plan::by_file`]: else all of them may hold chunks that wait for one
/// that has got none.
///
/// # Errors
///
/// The first error of `inner` ends the load, and is what comes out; unless the load found that its source had changed,
/// which then is the reason of both. A load that fails drops what waits to be hashed; but where a source has changed, which
/// a load looks for when all is read, what can still be hashed is, so that `inner` knows what the bytes were. When this
/// returns, every window has been handed on or dropped, and no thread of it is left.
pub fn hashed<T>(
    plan: &Plan,
    inner: &dyn Sink,
    threads: usize,
    load: impl FnOnce(&dyn Sink) -> Result<T>,
) -> Result<(T, Vec<Digest>)> {
    let empty = Digest(Sha256::digest([]).into());
    for (target, _) in plan.targets.iter().enumerate().filter(|(_, target)| target.bytes == 0) {
        inner.digested(target, empty)?;
    }
    let hashing = Hashing { plan, inner, state: Mutex::new(State::of(plan)), more: Condvar::new() };
    // Chunks of one target are hashed one after the other.
    let threads = threads.clamp(1, plan.targets.len().max(1));
    let loaded = std::thread::scope(|scope| {
        // Ends the threads, also where the load panics.
        let _end = End(&hashing);
        for index in 0..threads {
            let thread = std::thread::Builder::new().name(format!("hash-{index}"));
            if let Err(cause) = thread.spawn_scoped(scope, || hashing.work()) {
                // Fewer threads than asked for are slower, not wrong.
                if index == 0 {
                    return Err(Error::spawning("start a thread that hashes", &cause));
                }
                break;
            }
        }
        let loaded = load(&hashing);
        if loaded.as_ref().is_err_and(|error| error.kind() != Kind::SourceChanged) {
            hashing.give_up();
        }
        loaded
    });
    let state = hashing.state.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    match (loaded, state.failure) {
        (Err(reason), Some(_)) if reason.kind() == Kind::SourceChanged => Err(reason),
        (_, Some(failure)) => Err(failure),
        (Err(error), None) => Err(error),
        (Ok(value), None) => {
            let digest = |target: Target| target.digest.expect("a load that succeeds has filled every chunk");
            Ok((value, state.targets.into_iter().map(digest).collect()))
        }
    }
}

/// A sink in front of another one.
struct Hashing<'a> {
    plan: &'a Plan,
    inner: &'a dyn Sink,
    state: Mutex<State>,
    /// There is something to hash, or nothing will come any more.
    more: Condvar,
}

struct State {
    targets: Vec<Target>,
    /// Targets whose next chunk is there, each once, the one first that was ready first.
    ready: VecDeque<usize>,
    /// The load has ended: what is ready is the last.
    has_ended: bool,
    /// The first error of the inner sink: nothing is handed on any more.
    failure: Option<Error>,
}

/// How far a target is hashed.
struct Target {
    /// `None` while a thread has it.
    hasher: Option<Sha256>,
    /// It is in the queue.
    is_queued: bool,
    /// Where the next chunk begins.
    next: u64,
    /// Full chunks that were not hashed yet, by where they begin.
    waiting: BTreeMap<u64, Full>,
    digest: Option<Digest>,
}

/// A chunk as [`Sink::filled`] was given it.
struct Full {
    chunk: Chunk,
    window: Window,
    huge_bytes: u64,
}

impl State {
    fn of(plan: &Plan) -> State {
        let target = |_| {
            let hasher = Some(Sha256::new());
            Target { hasher, is_queued: false, next: 0, waiting: BTreeMap::new(), digest: None }
        };
        let mut targets: Vec<Target> = plan.targets.iter().map(target).collect();
        for (target, _) in targets.iter_mut().zip(&plan.targets).filter(|(_, planned)| planned.bytes == 0) {
            target.digest = Some(Digest(Sha256::digest([]).into()));
        }
        State { targets, ready: VecDeque::new(), has_ended: false, failure: None }
    }

    /// Puts a target in the queue where no thread has it, it is not there yet, and its next chunk has come. Whether
    /// it did.
    fn queue(&mut self, index: usize) -> bool {
        let target = &mut self.targets[index];
        let is_next =
            target.hasher.is_some() && !target.is_queued && target.waiting.contains_key(&target.next);
        if is_next {
            target.is_queued = true;
            self.ready.push_back(index);
        }
        is_next
    }

    /// Forgets what was not hashed yet.
    fn drop_waiting(&mut self) {
        self.ready.clear();
        for target in &mut self.targets {
            target.is_queued = false;
            target.waiting.clear();
        }
    }
}

impl Hashing<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Nothing is hashed any more.
    fn give_up(&self) {
        self.state().drop_waiting();
    }

    /// Keeps the first failure.
    fn fail(&self, error: Error) {
        let mut state = self.state();
        state.failure.get_or_insert(error);
        state.drop_waiting();
        self.more.notify_all();
    }

    fn check(&self) -> Result<()> {
        self.state().failure.clone().map_or(Ok(()), Err)
    }

    /// One thread's life: chunks that are ready, until the load has ended and none is left.
    fn work(&self) {
        let _report = ReportPanic(self);
        while let Some((index, hasher, full)) = self.next() {
            match self.hash(index, hasher, full) {
                Ok((hasher, digest, end)) => self.hashed(index, hasher, digest, end),
                Err(error) => self.fail(error),
            }
        }
    }

    /// The next chunk to hash; waits for one.
    fn next(&self) -> Option<(usize, Sha256, Full)> {
        let mut state = self.state();
        loop {
            if let Some(index) = state.ready.pop_front() {
                let target = &mut state.targets[index];
                target.is_queued = false;
                let full =
                    target.waiting.remove(&target.next).expect("a target is ready when its chunk is there");
                let hasher = target.hasher.take().expect("a target is ready when nobody has it");
                return Some((index, hasher, full));
            }
            if state.has_ended || state.failure.is_some() {
                return None;
            }
            state = self.more.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Hashes one chunk and hands it on. Gives back what is hashed up to its end.
    fn hash(&self, index: usize, mut hasher: Sha256, full: Full) -> Result<(Sha256, Option<Digest>, u64)> {
        let Full { chunk, window, huge_bytes } = full;
        hasher.update(&window.as_slice()[..chunk.bytes as usize]);
        let end = chunk.to + chunk.bytes;
        let digest = (end == self.plan.targets[index].bytes).then(|| Digest(hasher.finalize_reset().into()));
        if let Some(digest) = digest {
            self.inner.digested(index, digest)?;
        }
        self.inner.filled(&chunk, window, huge_bytes)?;
        Ok((hasher, digest, end))
    }

    /// Notes how far a target is hashed now, and goes on with it after those that were ready before.
    fn hashed(&self, index: usize, hasher: Sha256, digest: Option<Digest>, end: u64) {
        let mut state = self.state();
        let target = &mut state.targets[index];
        (target.hasher, target.digest, target.next) = (Some(hasher), digest, end);
        // This thread is about to look for the next one itself, but another target may be ready as well.
        if state.queue(index) {
            self.more.notify_one();
        }
    }
}

impl Sink for Hashing<'_> {
    fn open(&self, chunk: &Chunk) -> Result<Option<Vessel>> {
        self.check()?;
        self.inner.open(chunk)
    }

    fn wait_for_room(&self) {
        // Where the inner sink has failed it may have nothing to wait for: `open` tells.
        if self.check().is_ok() {
            self.inner.wait_for_room();
        }
    }

    fn filled(&self, chunk: &Chunk, window: Window, huge_bytes: u64) -> Result<()> {
        let mut state = self.state();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let full = Full { chunk: *chunk, window, huge_bytes };
        let before = state.targets[chunk.target].waiting.insert(chunk.to, full);
        assert!(before.is_none(), "a chunk is filled once");
        if state.queue(chunk.target) {
            self.more.notify_one();
        }
        Ok(())
    }
}

/// Tells the threads that the load has ended.
struct End<'a>(&'a Hashing<'a>);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if std::thread::panicking() {
            state.drop_waiting();
        }
        state.has_ended = true;
        self.0.more.notify_all();
    }
}

/// Ends the load where a thread that hashes panics: nobody would go on with its target. The panic itself comes out at
/// the end of the scope.
struct ReportPanic<'a>(&'a Hashing<'a>);

impl Drop for ReportPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::new(Kind::Failed, "a thread that hashes has panicked"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::map::Mapping;
    use crate::units::{PAGE_BYTES, round_up};
    use std::sync::atomic::{AtomicUsize, Ordering};

    const CHUNK_BYTES: u64 = 4096;

    /// A plan of targets of these lengths in chunks of a page.
    fn plan_of(lengths: &[u64]) -> Plan {
        let targets = lengths.iter().map(|&bytes| crate::plan::Target { bytes, file: 0 }).collect();
        let mut chunks = Vec::new();
        for (target, &bytes) in lengths.iter().enumerate() {
            for to in (0..bytes).step_by(CHUNK_BYTES as usize) {
                let bytes = CHUNK_BYTES.min(bytes - to);
                chunks.push(Chunk { source: target, from: to, target, to, bytes });
            }
        }
        let jobs = (0..chunks.len()).map(|index| index..index + 1).collect();
        Plan { sources: Vec::new(), targets, target_of_file: Vec::new(), chunks, jobs }
    }

    fn content(target: usize, bytes: u64) -> Vec<u8> {
        (0..bytes).map(|at| (at % 251) as u8 ^ target as u8).collect()
    }

    fn full(chunk: &Chunk) -> Window {
        let mut window = Mapping::anonymous(round_up(chunk.bytes, PAGE_BYTES) as usize).unwrap();
        let bytes = content(chunk.target, chunk.to + chunk.bytes);
        window.as_mut_slice()[..chunk.bytes as usize].copy_from_slice(&bytes[chunk.to as usize..]);
        window
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Event {
        Digested(usize, Digest),
        Filled(Chunk),
    }

    /// Notes what it is given; fails or panics at the n-th call.
    #[derive(Default)]
    struct Recorder {
        events: Mutex<Vec<Event>>,
        calls: AtomicUsize,
        fail_at: usize,
        panic_at: usize,
    }

    impl Recorder {
        fn note(&self, event: Event) -> Result<()> {
            let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
            assert!(call != self.panic_at, "as the test wants it");
            if call == self.fail_at {
                return Err(Error::new(Kind::Verification, "no such digest"));
            }
            self.events.lock().unwrap().push(event);
            Ok(())
        }
    }

    impl Sink for Recorder {
        fn open(&self, chunk: &Chunk) -> Result<Option<Vessel>> {
            let window = Mapping::anonymous(round_up(chunk.bytes, PAGE_BYTES) as usize).unwrap();
            Ok(Some(Vessel { window, collapse: false }))
        }

        fn filled(&self, chunk: &Chunk, window: Window, _huge_bytes: u64) -> Result<()> {
            let expected = content(chunk.target, chunk.to + chunk.bytes);
            assert_eq!(window.as_slice()[..chunk.bytes as usize], expected[chunk.to as usize..]);
            self.note(Event::Filled(*chunk))
        }

        fn digested(&self, target: usize, digest: Digest) -> Result<()> {
            self.note(Event::Digested(target, digest))
        }
    }

    /// Fills the chunks by two threads, each its half, from the last to the first.
    fn fill_backwards(plan: &Plan, sink: &dyn Sink) -> Result<()> {
        let fill = |which: usize| {
            let mine = plan.chunks.iter().rev().skip(which).step_by(2);
            mine.map(|chunk| sink.filled(chunk, full(chunk), 0)).collect::<Result<Vec<()>>>()
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| fill(1));
            fill(0)?;
            other.join().expect("it does not panic").map(|_| ())
        })
    }

    const LENGTHS: [u64; 6] = [0, 3 * 4096 + 5, 1, 40 * 4096, 0, 4096];

    #[test]
    fn chunks_in_any_order_are_hashed_in_theirs() {
        let plan = plan_of(&LENGTHS);
        for threads in [1, 3, 100] {
            let recorder = Recorder::default();
            let ((), digests) =
                hashed(&plan, &recorder, threads, |sink| fill_backwards(&plan, sink)).unwrap();
            let events = recorder.events.into_inner().unwrap();
            assert_eq!(events.len(), plan.chunks.len() + plan.targets.len(), "everything came once");
            for (target, (&bytes, digest)) in LENGTHS.iter().zip(&digests).enumerate() {
                let expected = Digest(Sha256::digest(content(target, bytes)).into());
                assert_eq!(*digest, expected, "{target}");
                let mine: Vec<&Event> = events
                    .iter()
                    .filter(|event| match event {
                        Event::Digested(of, _) => *of == target,
                        Event::Filled(chunk) => chunk.target == target,
                    })
                    .collect();
                let mut wanted: Vec<Event> = plan
                    .chunks
                    .iter()
                    .filter(|chunk| chunk.target == target)
                    .map(|c| Event::Filled(*c))
                    .collect();
                wanted.insert(wanted.len().saturating_sub(1), Event::Digested(target, expected));
                assert_eq!(mine, wanted.iter().collect::<Vec<_>>(), "the digest comes before the last chunk");
            }
        }
    }

    #[test]
    fn every_failure_of_the_inner_sink_ends_the_load_and_comes_out() {
        let plan = plan_of(&LENGTHS);
        for fail_at in 1..=plan.chunks.len() + plan.targets.len() {
            let recorder = Recorder { fail_at, ..Recorder::default() };
            let error = hashed(&plan, &recorder, 2, |sink| fill_backwards(&plan, sink)).unwrap_err();
            assert_eq!((error.kind(), error.message()), (Kind::Verification, "no such digest"), "{fail_at}");
        }
        // A load that goes on meets it at the next call.
        let recorder = Recorder { fail_at: 3, ..Recorder::default() };
        let error = hashed(&plan, &recorder, 1, |sink| {
            let first = &plan.chunks[0];
            sink.filled(first, full(first), 0)?;
            loop {
                std::thread::yield_now();
                sink.wait_for_room();
                sink.open(first).inspect_err(|error| assert_eq!(error.kind(), Kind::Verification))?;
            }
            #[allow(unreachable_code)]
            Ok(())
        });
        assert_eq!(error.unwrap_err().kind(), Kind::Verification);
    }

    #[test]
    fn the_loads_own_failure_comes_out_and_its_windows_are_dropped() {
        let plan = plan_of(&LENGTHS);
        let recorder = Recorder::default();
        let error = hashed(&plan, &recorder, 2, |sink| -> Result<()> {
            // The second chunk waits for ever: the first one never comes.
            let second = &plan.chunks[1];
            sink.filled(second, full(second), 0)?;
            Err(Error::new(Kind::Cancelled, "the load was cancelled"))
        });
        assert_eq!(error.unwrap_err().kind(), Kind::Cancelled);
        let events = recorder.events.into_inner().unwrap();
        assert!(events.iter().all(|event| matches!(event, Event::Digested(0 | 4, _))), "{events:?}");
    }

    #[test]
    fn a_changed_source_is_the_reason_of_a_digest_that_is_wrong() {
        let plan = plan_of(&[1]);
        let recorder = Recorder { fail_at: 1, ..Recorder::default() };
        let error = hashed(&plan, &recorder, 1, |sink| -> Result<()> {
            sink.filled(&plan.chunks[0], full(&plan.chunks[0]), 0)?;
            Err(Error::new(Kind::SourceChanged, "a changed"))
        });
        assert_eq!(error.unwrap_err().kind(), Kind::SourceChanged);
        // The digest is told all the same.
        let recorder = Recorder::default();
        let error = hashed(&plan, &recorder, 1, |sink| -> Result<()> {
            sink.filled(&plan.chunks[0], full(&plan.chunks[0]), 0)?;
            Err(Error::new(Kind::SourceChanged, "a changed"))
        });
        assert_eq!(error.unwrap_err().kind(), Kind::SourceChanged);
        assert_eq!(recorder.events.into_inner().unwrap().len(), 2);
    }

    #[test]
    fn a_panic_of_either_side_hangs_nobody() {
        let plan = plan_of(&LENGTHS);
        let recorder = Recorder { panic_at: 5, ..Recorder::default() };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            hashed(&plan, &recorder, 2, |sink| {
                fill_backwards(&plan, sink)?;
                // As a worker that waits for a window that is lost.
                loop {
                    sink.open(&plan.chunks[0])?;
                    std::thread::yield_now();
                }
                #[allow(unreachable_code)]
                Ok(())
            })
        }));
        assert!(outcome.is_err());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            hashed(&plan, &Recorder::default(), 2, |_| -> Result<()> { panic!("as the test wants it") })
        }));
        assert!(outcome.is_err());
    }
}
