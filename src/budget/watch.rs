//! Whether a load that runs may go on: the rule, pure, so that every course can be tried.
//!
//! A load that does not fit must end before the kernel's OOM killer acts, whose victim may be anybody; one
//! that just fits must not be stopped. So what is left is compared with what is still to be filled, and with
//! a floor that others need to breathe: whichever is less must be there.
//!
//! A shortage may pass. Pages of files that are being written are free in a moment, and a neighbour may be
//! about to end. So the load first takes no more, and gives up only when that does not help.

use std::time::Duration;

/// Memory that is left to others while more is to be filled than that. Above it also lies what a neighbour
/// can take between two looks, and what the kernel takes for its own tables.
pub const FLOOR_BYTES: u64 = 128 << 20;

/// What a load may take after a look that found room: with less, it would look all the time. It is part of
/// the floor.
const TAKE_BYTES_MIN: u64 = 16 << 20;

/// How long a load waits for room before it gives up.
const PATIENCE: Duration = Duration::from_secs(1);

/// The same where what is missing is only being written.
const PATIENCE_WRITING: Duration = Duration::from_secs(10);

/// Looks in a row that find less than half of what must be there, after which a load gives up at once: a
/// neighbour grows while it waits.
const CRITICAL_LOOKS: u32 = 2;

/// The times between two looks. The longer the way to the floor, the later the next one: each takes some tenths
/// of a millisecond, of which a load that runs must not notice anything.
const LOOK_SOONEST: Duration = Duration::from_millis(20);
const LOOK_LATEST: Duration = Duration::from_millis(200);

/// The same for a load that is held.
const LOOK_WHILE_HELD: Duration = Duration::from_millis(10);

/// How many bytes a second a neighbour is believed to take: faulting pages in, several processes at once.
const NEIGHBOUR_BYTES_PER_SECOND: u64 = 8 << 30;

/// What one look finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Bytes that may still be allocated under all limits.
    pub room_bytes: u64,
    /// The same if every dirty page of files were written.
    pub room_when_written_bytes: u64,
    /// Bytes that the load is allocating at this moment: nothing can take them back any more.
    pub pending_bytes: u64,
    /// Bytes that it has not begun to allocate.
    pub left_bytes: u64,
}

impl Look {
    /// The room with which the load may surely take more.
    pub fn wanted_bytes(&self) -> u64 {
        self.pending_bytes.saturating_add(self.least_bytes())
    }

    /// The room without which it surely may not. What is pending is in the usage already, nobody knows how much
    /// of it: a load that just fits must not end for having it counted twice.
    fn least_bytes(&self) -> u64 {
        self.left_bytes.min(FLOOR_BYTES)
    }
}

/// What a load does after a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may take so many bytes more, and then looks again.
    GoOn {
        /// Bytes beyond those that are pending.
        take_bytes: u64,
    },
    /// It takes no more until the next look.
    Hold,
    /// It ends: the room does not come back.
    Stop,
}

/// The course of the looks of one load.
#[derive(Debug, Default)]
pub struct Course {
    is_held: bool,
    /// Since when there is surely too little room, as a time since some beginning.
    short_since: Option<Duration>,
    critical_looks: u32,
}

impl Course {
    /// What to do after `look`, which was taken `at` a time since the load's beginning.
    pub fn judge(&mut self, look: &Look, at: Duration) -> Verdict {
        let (wanted, least) = (look.wanted_bytes(), look.least_bytes());
        if look.room_bytes >= wanted {
            *self = Course::default();
            return Verdict::GoOn { take_bytes: ((look.room_bytes - wanted) / 2).max(TAKE_BYTES_MIN) };
        }
        self.is_held = true;
        if look.room_bytes >= least {
            // What is pending comes to its end while nothing more is taken: the next looks see more clearly.
            (self.short_since, self.critical_looks) = (None, 0);
            return Verdict::Hold;
        }
        let short = at.saturating_sub(*self.short_since.get_or_insert(at));
        let is_critical = look.room_when_written_bytes < least / 2;
        self.critical_looks = if is_critical { self.critical_looks + 1 } else { 0 };
        let is_being_written = look.room_when_written_bytes >= least;
        let patience = if is_being_written { PATIENCE_WRITING } else { PATIENCE };
        if self.critical_looks >= CRITICAL_LOOKS || short >= patience { Verdict::Stop } else { Verdict::Hold }
    }

    /// Whether the load takes no more, as the last look found.
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// How long there has surely been too little room, at a look that was just judged.
    pub fn short_for(&self, at: Duration) -> Duration {
        self.short_since.map_or(Duration::ZERO, |since| at.saturating_sub(since))
    }

    /// When to look again at the latest.
    pub fn next_look(&self, look: &Look) -> Duration {
        if self.is_held {
            return LOOK_WHILE_HELD;
        }
        let spare = look.room_bytes.saturating_sub(look.wanted_bytes());
        let way = Duration::from_secs_f64(spare as f64 / NEIGHBOUR_BYTES_PER_SECOND as f64);
        way.clamp(LOOK_SOONEST, LOOK_LATEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn look(room: u64, left: u64) -> Look {
        Look {
            room_bytes: room * MIB,
            room_when_written_bytes: room * MIB,
            pending_bytes: 0,
            left_bytes: left * MIB,
        }
    }

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_load_with_room_takes_half_of_it_before_it_looks_again() {
        let mut course = Course::default();
        assert_eq!(
            course.judge(&look(1128, 5000), at(0)),
            Verdict::GoOn { take_bytes: 500 * MIB },
            "forced or not, it goes on until the room is used up"
        );
        assert_eq!(course.judge(&look(128, 5000), at(1)), Verdict::GoOn { take_bytes: TAKE_BYTES_MIN });
        assert_eq!(course.judge(&look(127, 5000), at(2)), Verdict::Hold);
    }

    #[test]
    fn a_load_that_just_fits_goes_on_to_its_end() {
        let mut course = Course::default();
        for left in (0..=200).rev() {
            assert!(matches!(course.judge(&look(left, left), at(0)), Verdict::GoOn { .. }), "{left}");
        }
    }

    #[test]
    fn what_is_pending_must_fit_beside_the_floor() {
        let pending = Look { pending_bytes: 50 * MIB, ..look(177, 5000) };
        assert_eq!(Course::default().judge(&pending, at(0)), Verdict::Hold);
        let enough = Look { room_bytes: 178 * MIB, ..pending };
        assert!(matches!(Course::default().judge(&enough, at(0)), Verdict::GoOn { .. }));
    }

    #[test]
    fn a_load_that_just_fits_waits_for_what_is_pending_however_long_that_takes() {
        // The last reads are under way, slowly, and their pages are in the usage already.
        let last = Look { pending_bytes: 16 * MIB, ..look(2, 0) };
        let mut course = Course::default();
        for second in 0..100 {
            assert_eq!(course.judge(&last, at(second * 1000)), Verdict::Hold, "{second}");
        }
        // The same with some more to come, for which there is room.
        let not_last = Look { left_bytes: 2 * MIB, ..last };
        assert_eq!(course.judge(&not_last, at(200_000)), Verdict::Hold);
        assert_eq!(course.judge(&not_last, at(300_000)), Verdict::Hold);
        assert!(matches!(course.judge(&look(2, 2), at(300_001)), Verdict::GoOn { .. }));
    }

    #[test]
    fn a_dip_passes_and_a_shortage_that_stays_ends_it() {
        let mut course = Course::default();
        assert_eq!(course.judge(&look(100, 500), at(0)), Verdict::Hold);
        assert_eq!(course.judge(&look(100, 500), at(999)), Verdict::Hold);
        assert!(matches!(course.judge(&look(200, 500), at(1000)), Verdict::GoOn { .. }));
        assert_eq!(course.judge(&look(100, 500), at(1001)), Verdict::Hold, "the patience begins anew");
        assert_eq!(course.judge(&look(100, 500), at(2001)), Verdict::Stop);
    }

    #[test]
    fn a_neighbour_that_grows_meanwhile_ends_it_at_once_but_one_look_is_no_proof() {
        let mut course = Course::default();
        assert_eq!(course.judge(&look(63, 500), at(0)), Verdict::Hold);
        assert_eq!(course.judge(&look(64, 500), at(10)), Verdict::Hold);
        assert_eq!(course.judge(&look(63, 500), at(20)), Verdict::Hold);
        assert_eq!(course.judge(&look(63, 500), at(30)), Verdict::Stop);
        // The same for one that is almost done, on its own scale.
        let mut course = Course::default();
        assert_eq!(course.judge(&look(9, 20), at(0)), Verdict::Hold);
        assert_eq!(course.judge(&look(9, 20), at(10)), Verdict::Stop);
    }

    #[test]
    fn pages_that_are_being_written_are_waited_for_but_not_for_ever() {
        let writing = Look { room_when_written_bytes: 400 * MIB, ..look(0, 500) };
        let mut course = Course::default();
        for second in 0..10 {
            assert_eq!(course.judge(&writing, at(second * 1000)), Verdict::Hold, "{second}");
        }
        assert_eq!(course.judge(&writing, at(10_000)), Verdict::Stop);
    }

    #[test]
    fn the_nearer_the_floor_the_sooner_the_next_look() {
        let course = Course::default();
        assert_eq!(course.next_look(&look(128 + 8192, 90_000)), LOOK_LATEST);
        assert_eq!(course.next_look(&look(128 + 819, 90_000)).as_millis(), 99);
        assert_eq!(course.next_look(&look(128, 90_000)), LOOK_SOONEST);
        let mut held = Course::default();
        assert_eq!(held.judge(&look(100, 500), at(0)), Verdict::Hold);
        assert_eq!(held.next_look(&look(100, 500)), LOOK_WHILE_HELD);
    }

    proptest! {
        /// Whoever fits is never held, and whoever goes on leaves room for what it may take without looking.
        #[test]
        fn no_one_is_stopped_who_fits_and_no_one_goes_on_who_does_not(
            room_bytes in 0..1u64 << 40,
            unwritten in 0..1u64 << 40,
            pending_bytes in 0..1u64 << 36,
            left_bytes in 0..1u64 << 40,
        ) {
            let room_when_written_bytes = room_bytes + unwritten;
            let look = Look { room_bytes, room_when_written_bytes, pending_bytes, left_bytes };
            match Course::default().judge(&look, Duration::ZERO) {
                Verdict::GoOn { take_bytes } => {
                    let taken = pending_bytes + take_bytes.min(left_bytes);
                    prop_assert!(taken <= room_bytes, "{taken}");
                }
                Verdict::Hold => prop_assert!(room_bytes < pending_bytes + left_bytes),
                Verdict::Stop => prop_assert!(false, "a single look is no proof"),
            }
        }
    }
}
