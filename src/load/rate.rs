//! A load that may only take so many bytes in a second, whatever device or cache they come from.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::units::{PAGE_BYTES, round_down};

/// The least limit that may be asked for, in bytes per second: one page is the least that is read.
pub const RATE_MIN: u64 = PAGE_BYTES;

/// How much lateness is made up for: sleeps and reads end a little after their time.
const CREDIT: Duration = Duration::from_millis(50);

/// A limited load reads so often in a second at the least, so that it does not come in bursts.
const READS_PER_SECOND_MIN: u64 = 20;

/// Hands out bytes at a rate. Shared by all workers of a load.
#[derive(Debug)]
pub(super) struct Limiter {
    started: Instant,
    bucket: Mutex<Bucket>,
}

impl Limiter {
    pub(super) fn new(bytes_per_second: u64) -> Limiter {
        Limiter { started: Instant::now(), bucket: Mutex::new(Bucket::new(bytes_per_second)) }
    }

    /// Takes `bytes`, or tells how long to wait before asking again.
    pub(super) fn take(&self, bytes: u64) -> Result<(), Duration> {
        let mut bucket = self.bucket.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        bucket.take(self.started.elapsed(), bytes)
    }
}

/// The length of one read under a limit: `read_bytes`, or less where that would come in bursts.
pub(super) fn read_bytes(read_bytes: u64, bytes_per_second: u64) -> u64 {
    read_bytes.min(round_down(bytes_per_second / READS_PER_SECOND_MIN, PAGE_BYTES).max(PAGE_BYTES))
}

/// The rate, and until when it is used up. Times count from the start of the load.
///
/// What is taken is paid for afterwards: the next bytes are handed out when the last ones' time is over. So
/// at every moment the bytes that were handed out, the last portion aside, are at most rate × time.
#[derive(Debug)]
struct Bucket {
    bytes_per_second: u64,
    used_up_until: Duration,
}

impl Bucket {
    fn new(bytes_per_second: u64) -> Bucket {
        assert!(bytes_per_second > 0);
        Bucket { bytes_per_second, used_up_until: Duration::ZERO }
    }

    fn take(&mut self, now: Duration, bytes: u64) -> Result<(), Duration> {
        if now < self.used_up_until {
            return Err(self.used_up_until - now);
        }
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        let time = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        self.used_up_until = self.used_up_until.max(now.saturating_sub(CREDIT)).saturating_add(time);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Takes portions for `seconds` of a clock that sleeps as long as it is told and `late` more. Gives how
    /// many bytes were handed out by when.
    fn handed_out(rate: u64, portion: u64, seconds: u64, late: Duration) -> Vec<(Duration, u64)> {
        let mut bucket = Bucket::new(rate);
        let (mut now, mut bytes, mut moments) = (Duration::ZERO, 0, Vec::new());
        while now < Duration::from_secs(seconds) {
            match bucket.take(now, portion) {
                Ok(()) => {
                    bytes += portion;
                    moments.push((now, bytes));
                }
                Err(wait) => now += wait + late,
            }
        }
        moments
    }

    #[test]
    fn the_rate_is_kept_and_never_exceeded() {
        for (rate, portion) in [(10 * MIB, MIB / 2), (100 * MIB, MIB), (3 * MIB + 17, 4096), (4096, 4096)] {
            for late in [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(20)] {
                let moments = handed_out(rate, portion, 30, late);
                for (now, bytes) in &moments {
                    let most = now.as_secs_f64() * rate as f64 + portion as f64;
                    assert!(
                        *bytes as f64 <= most * 1.000_001,
                        "{rate} {portion} {late:?}: {bytes} at {now:?}"
                    );
                }
                let share = moments.last().unwrap().1 as f64 / (30.0 * rate as f64);
                assert!((0.98..1.1).contains(&share), "{rate} {portion} {late:?}: {share}");
            }
        }
    }

    #[test]
    fn it_comes_evenly() {
        let rate = 10 * MIB;
        let moments = handed_out(rate, read_bytes(MIB, rate), 10, Duration::from_millis(1));
        for second in 0..10 {
            let within = |at: &&(Duration, u64)| at.0.as_secs() == second;
            let bytes = moments.iter().filter(within).count() as u64 * read_bytes(MIB, rate);
            assert!((rate * 9 / 10..=rate * 11 / 10).contains(&bytes), "second {second}: {bytes}");
        }
    }

    #[test]
    fn a_pause_is_not_made_up_for() {
        let mut bucket = Bucket::new(MIB);
        let later = Duration::from_secs(3600);
        let mut taken = 0;
        while bucket.take(later, 4096).is_ok() {
            taken += 4096;
        }
        assert!(taken <= MIB / 20 + 4096, "{taken} bytes at once after an hour");
    }

    #[test]
    fn reads_are_short_where_the_rate_is_low() {
        assert_eq!(read_bytes(MIB, 1 << 40), MIB);
        assert_eq!(read_bytes(MIB, 20 * MIB), MIB);
        assert_eq!(read_bytes(MIB, 2 * MIB), 102_400);
        assert_eq!(read_bytes(MIB, RATE_MIN), PAGE_BYTES);
    }

    #[test]
    fn the_longest_times_do_not_overflow() {
        let mut bucket = Bucket::new(1);
        bucket.take(Duration::ZERO, u64::MAX).unwrap();
        bucket.take(Duration::ZERO, 1).unwrap_err();
        bucket.take(Duration::MAX, u64::MAX).unwrap();
    }
}
