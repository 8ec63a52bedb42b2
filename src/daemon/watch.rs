//! The watch over host and control groups while a load runs: it holds a load that is short of memory, and ends
//! one for which that does not help, before the kernel's OOM killer ends somebody.
//!
//! Two looks make up for each other. The loader looks itself, before it takes more than the last look allowed:
//! so it can't outrun the watch at any speed. A thread looks as time goes on: a neighbour may grow, or a limit
//! be lowered, while the load hardly moves.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::budget::watch::{Course, Look, Verdict};
use crate::budget::{Availability, Limits};
use crate::daemon::load::LoadControl;
use crate::daemon::log::Log;
use crate::error::{Error, Kind};
use crate::units::ByteSize;

/// While a load is held, its workers ask again and again: the answer is not looked for more often than this.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A load that is held for so long is spoken of in the log.
const HELD_TOLD: Duration = Duration::from_millis(100);

/// The watch over one load.
#[derive(Debug)]
pub(super) struct MemoryWatch<'a> {
    cache: &'a str,
    control: &'a LoadControl,
    log: &'a Log,
    /// Bytes that all segments take.
    total_bytes: u64,
    /// Bytes that the loader was granted, and those of them that are allocated.
    granted: AtomicU64,
    taken: AtomicU64,
    /// How far `granted` may go until the next look.
    allowed: AtomicU64,
    looks: Mutex<Looks>,
    /// The load is over. Notified once, with `looks` at hand.
    over: Condvar,
}

#[derive(Debug)]
struct Looks {
    limits: Limits,
    course: Course,
    began: Instant,
    last: Option<Instant>,
    /// When the next one is due at the latest.
    next: Duration,
    is_over: bool,
    /// A look failed, which is said once.
    is_blind: bool,
    /// That the load is held was said.
    is_held_told: bool,
}

impl<'a> MemoryWatch<'a> {
    /// A watch over a load of `total_bytes` into the cache of that name, against `limits`.
    pub(super) fn new(
        cache: &'a str,
        total_bytes: u64,
        limits: Limits,
        control: &'a LoadControl,
        log: &'a Log,
    ) -> MemoryWatch<'a> {
        let looks = Looks {
            limits,
            course: Course::default(),
            began: Instant::now(),
            last: None,
            next: Duration::ZERO,
            is_over: false,
            is_blind: false,
            is_held_told: false,
        };
        MemoryWatch {
            cache,
            control,
            log,
            total_bytes,
            granted: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            allowed: AtomicU64::new(0),
            looks: Mutex::new(looks),
            over: Condvar::new(),
        }
    }

    /// Does `load` under the watch.
    pub(super) fn over<T>(&self, load: impl FnOnce() -> T) -> T {
        std::thread::scope(|scope| {
            // Without the thread, the loader's own looks have to do.
            let thread = std::thread::Builder::new().name("watch".to_owned());
            let _ = thread.spawn_scoped(scope, || self.look_until_over());
            // Also where the load panics: the thread is waited for.
            let _ending = Ending(self);
            load()
        })
    }

    fn look_until_over(&self) {
        let mut looks = self.looks();
        while !looks.is_over {
            self.look(&mut looks);
            let next = looks.next;
            let waited = self.over.wait_timeout(looks, next);
            looks = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether the loader may take so many bytes more now.
    pub(super) fn may_take(&self, bytes: u64) -> bool {
        let granted = self.granted.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let is_allowed = || granted <= self.allowed.load(Ordering::Relaxed);
        if is_allowed() {
            return true;
        }
        let mut looks = self.looks();
        // Another worker may have looked meanwhile.
        if is_allowed() {
            return true;
        }
        let is_fresh = looks.last.is_some_and(|last| last.elapsed() < LOOK_AGAIN);
        let waits_for_next_look = looks.course.is_held() && is_fresh;
        if !waits_for_next_look {
            self.look(&mut looks);
        }
        if !is_allowed() {
            self.granted.fetch_sub(bytes, Ordering::Relaxed);
            return false;
        }
        true
    }

    /// So many of the granted bytes are allocated.
    pub(super) fn took(&self, bytes: u64) {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many of the granted bytes were not needed.
    pub(super) fn left_untaken(&self, bytes: u64) {
        self.granted.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn looks(&self) -> MutexGuard<'_, Looks> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self, looks: &mut Looks) {
        // What is allocated during the look counts twice, as pending and in the usage: never not at all.
        let taken = self.taken.load(Ordering::Relaxed);
        let available = match looks.limits.available() {
            Ok(available) => available,
            Err(error) => return self.go_blind(looks, &error),
        };
        let granted = self.granted.load(Ordering::Relaxed);
        let look = Look {
            room_bytes: available.bytes,
            room_when_written_bytes: available.when_written_bytes,
            pending_bytes: granted.saturating_sub(taken),
            left_bytes: self.total_bytes.saturating_sub(granted),
        };
        let at = looks.began.elapsed();
        let allowed = match looks.course.judge(&look, at) {
            Verdict::GoOn { take_bytes } => granted.saturating_add(take_bytes),
            Verdict::Hold => 0,
            Verdict::Stop => {
                self.stop(&available, &look);
                0
            }
        };
        self.allowed.store(allowed, Ordering::Relaxed);
        let is_held = looks.course.short_for(at) >= HELD_TOLD;
        if is_held && !looks.is_held_told {
            self.log.line(format_args!("the load is held: {}", shortage(&available, &look)));
        } else if looks.is_held_told && !looks.course.is_held() {
            self.log.line("the load goes on: there is room again");
        }
        looks.is_held_told = looks.course.is_held() && (is_held || looks.is_held_told);
        looks.last = Some(Instant::now());
        looks.next = looks.course.next_look(&look);
    }

    /// Without numbers the load goes on, as it would without a watch.
    fn go_blind(&self, looks: &mut Looks, error: &Error) {
        if !looks.is_blind {
            looks.is_blind = true;
            self.log.line(format_args!("memory is not watched: {}", error.message()));
        }
        self.allowed.store(u64::MAX, Ordering::Relaxed);
        looks.last = Some(Instant::now());
        looks.next = Duration::from_secs(1);
    }

    fn stop(&self, available: &Availability, look: &Look) {
        if self.control.cancelled() {
            return;
        }
        let message = format!(
            "'{}' stopped with {} of {} in memory, before that runs out: {}",
            self.cache,
            ByteSize(self.taken.load(Ordering::Relaxed)),
            ByteSize(self.total_bytes),
            shortage(available, look)
        );
        let limit = &available.binding.what;
        let raise = match limit.contains("cgroup") {
            true => format!("raise the memory limit of {limit}, "),
            false => String::new(),
        };
        self.control.give_up(Error::new(Kind::NoRoom, message).hint(format!(
            "nothing of it is left. Stop another cache (iloader list), select fewer files (--pattern), {raise}or end \
             what else takes memory there; --force does not lift this"
        )));
    }
}

fn shortage(available: &Availability, look: &Look) -> String {
    let left = look.left_bytes.saturating_add(look.pending_bytes);
    let room = ByteSize(look.room_bytes);
    format!("{room} is left under {}, and {} is still to be loaded", available.binding.what, ByteSize(left))
}

/// Tells the thread that the load is over, when it is dropped.
struct Ending<'a>(&'a MemoryWatch<'a>);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.looks().is_over = true;
        self.0.over.notify_all();
    }
}
