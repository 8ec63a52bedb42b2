//! The decision whether a load may begin: pure, so that every input can be tried.
//!
//! The rule: need ≤ fraction × available − reserve, and need ≤ the cache's own cap. `--force` skips the
//! first half, never the second. What is promised to starts under way is not available.

use super::meminfo::Availability;
use crate::error::{Error, Kind, Result};
use crate::units::ByteSize;

/// What a load asks for and under which rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Bytes that the load will allocate, in whole pages, buffers included.
    pub need_bytes: u64,
    /// Share of the available memory that it may take: above 0, at most 1.
    pub memory_fraction: f64,
    /// Bytes left for others.
    pub reserve_bytes: u64,
    /// Cap of this cache; holds with `force` too.
    pub memory_bytes_max: Option<u64>,
    /// Skip the check against the available memory.
    pub force: bool,
}

/// The permission to allocate so many bytes. Only [`admit`] makes one.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a grant is asked for in order to allocate"]
pub struct Grant {
    need_bytes: u64,
}

impl Grant {
    /// The bytes that may be allocated under it.
    pub fn need_bytes(&self) -> u64 {
        self.need_bytes
    }
}

/// Grants `request`, or says why not and what would fit.
///
/// # Errors
///
/// [`Kind::Usage`] for a fraction outside (0, 1], with `force` too; [`Kind::NoRoom`] where the need is
/// above the cap or above what the rule leaves of `available`.
pub fn admit(request: &Request, available: &Availability) -> Result<Grant> {
    let share = share(request.memory_fraction, available.unpromised_bytes())?;
    if let Some(cap) = request.memory_bytes_max.filter(|cap| request.need_bytes > *cap) {
        return Err(above_cap(request.need_bytes, cap));
    }
    let room = share.saturating_sub(request.reserve_bytes);
    if request.need_bytes > room && !request.force {
        return Err(above_room(request, available, room));
    }
    Ok(Grant { need_bytes: request.need_bytes })
}

/// The largest need that [`admit`] would grant under the rule of `request`, whose own need is not looked at.
///
/// # Errors
///
/// [`Kind::Usage`] for a fraction outside (0, 1].
pub fn admissible_bytes(request: &Request, available: &Availability) -> Result<u64> {
    let share = share(request.memory_fraction, available.unpromised_bytes())?;
    let room = if request.force { u64::MAX } else { share.saturating_sub(request.reserve_bytes) };
    Ok(room.min(request.memory_bytes_max.unwrap_or(u64::MAX)))
}

/// `fraction` × `bytes`, rounded down. Exact: a product of floating point numbers could round up, and
/// admit a byte too many.
fn share(fraction: f64, bytes: u64) -> Result<u64> {
    if !(fraction > 0.0 && fraction <= 1.0) {
        let message =
            format!("the share of memory that a start may take is {fraction:?}, not between 0 and 1");
        return Err(Error::new(Kind::Usage, message)
            .hint("give --max-memory-fraction a number above 0 and at most 1, such as 0.9"));
    }
    // A normal number in (0, 1] is mantissa × 2^-shift with a mantissa of 53 bits, so that the product
    // fits in 117 bits. A subnormal one, below 2^-1022, leaves nothing of any number of bytes.
    const MANTISSA_BITS: u32 = f64::MANTISSA_DIGITS - 1;
    let exponent = (fraction.to_bits() >> MANTISSA_BITS) as u32;
    let mantissa = (fraction.to_bits() & ((1 << MANTISSA_BITS) - 1)) | (1 << MANTISSA_BITS);
    let shift = 1023 + MANTISSA_BITS - exponent;
    let product = u128::from(mantissa) * u128::from(bytes);
    let share = product.checked_shr(shift).unwrap_or(0);
    Ok(u64::try_from(share).expect("a share is at most the whole"))
}

fn above_cap(need: u64, cap: u64) -> Error {
    let (need, cap) = told_apart(need, cap);
    Error::new(Kind::NoRoom, format!("needs {need}, but this cache is capped at {cap} (--max-memory-bytes)"))
        .hint("select fewer files (--pattern), or raise --max-memory-bytes; --force does not lift it")
}

fn above_room(request: &Request, available: &Availability, room: u64) -> Error {
    let (need, fits) = told_apart(request.need_bytes, room);
    let after = match request.reserve_bytes {
        0 => String::new(),
        reserve => format!(" after the {} reserve", ByteSize(reserve)),
    };
    let limit = &available.binding.what;
    let of = match available.binding.promised_bytes {
        0 => format!("{}, {limit}", ByteSize(available.bytes)),
        promised => format!(
            "{}: {}, {limit}, less {} promised to starts under way",
            ByteSize(available.unpromised_bytes()),
            ByteSize(available.bytes),
            ByteSize(promised)
        ),
    };
    let message =
        format!("needs {need}, but {fits} is available{after} ({:?} of {of})", request.memory_fraction);
    let mut ways = Vec::new();
    if available.binding.promised_bytes > 0 {
        ways.push("wait for the starts under way".to_owned());
    }
    ways.push("stop another cache (iloader list)".to_owned());
    ways.push(match room {
        0 => "select fewer files (--pattern)".to_owned(),
        _ => format!(
            "select fewer files, which need {fits} at most (--pattern; iloader inspect shows the need)"
        ),
    });
    if request.need_bytes <= available.bytes {
        ways.push("leave less to others (--max-memory-fraction, --reserve-bytes)".to_owned());
    }
    if limit.contains("cgroup") {
        ways.push(format!("raise the memory limit of {limit}"));
    }
    Error::new(Kind::NoRoom, message).hint(format!("{}, or skip this check (--force)", ways.join(", ")))
}

/// Two sizes that differ, for one sentence: in bytes where they would look the same with a suffix.
fn told_apart(one: u64, other: u64) -> (String, String) {
    let (short_one, short_other) = (ByteSize(one).to_string(), ByteSize(other).to_string());
    if short_one == short_other {
        return (format!("{one} bytes"), format!("{other} bytes"));
    }
    (short_one, short_other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::{Promised, Room};
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn host(bytes: u64) -> Availability {
        Availability::of(vec![Room::of_all(bytes, "host MemAvailable")])
    }

    fn request(need_bytes: u64) -> Request {
        Request {
            need_bytes,
            memory_fraction: 0.9,
            reserve_bytes: GIB / 4,
            memory_bytes_max: None,
            force: false,
        }
    }

    #[test]
    fn the_rule_holds_to_the_byte() {
        let available = host(1000);
        let ask = |need_bytes| Request { reserve_bytes: 100, ..request(need_bytes) };
        assert_eq!(admit(&ask(800), &available).unwrap().need_bytes(), 800);
        let error = admit(&ask(801), &available).unwrap_err();
        assert_eq!(error.kind(), Kind::NoRoom);
        assert_eq!(admissible_bytes(&ask(0), &available).unwrap(), 800);
    }

    #[test]
    fn a_refusal_names_need_room_rule_and_limit() {
        let rooms = vec![
            Room::of_all(64 * GIB, "host MemAvailable"),
            Room::of_all(13 * GIB + GIB / 2, "cgroup v1 /box"),
        ];
        let error = admit(&request(15 * GIB), &Availability::of(rooms)).unwrap_err();
        assert_eq!(
            error.message(),
            "needs 15.0 GiB, but 11.9 GiB is available after the 256 MiB reserve (0.9 of 13.5 GiB, cgroup v1 /box)"
        );
        assert_eq!(
            error.hint_text(),
            Some(
                "stop another cache (iloader list), select fewer files, which need 11.9 GiB at most (--pattern; \
                 iloader inspect shows the need), raise the memory limit of cgroup v1 /box, or skip this check \
                 (--force)"
            )
        );
    }

    #[test]
    fn what_is_promised_is_not_available() {
        let beside = |bytes| host(16 * GIB).beside(&[Promised { bytes, groups: None }]);
        let available = beside(6 * GIB);
        assert!(admit(&request(8 * GIB), &available).is_ok());
        let error = admit(&request(9 * GIB), &available).unwrap_err();
        assert_eq!(
            error.message(),
            "needs 9.0 GiB, but 8.8 GiB is available after the 256 MiB reserve \
             (0.9 of 10.0 GiB: 16.0 GiB, host MemAvailable, less 6.0 GiB promised to starts under way)"
        );
        assert!(error.hint_text().unwrap().starts_with("wait for the starts under way"), "{error:?}");
        let available = beside(u64::MAX);
        assert_eq!(admissible_bytes(&request(0), &available).unwrap(), 0);
        assert!(admit(&Request { force: true, ..request(9 * GIB) }, &available).is_ok());
    }

    #[test]
    fn sizes_that_look_alike_are_told_apart() {
        let ask = Request { reserve_bytes: 0, memory_fraction: 1.0, ..request(10 * GIB + 1) };
        let error = admit(&ask, &host(10 * GIB)).unwrap_err();
        assert!(
            error.message().starts_with("needs 10737418241 bytes, but 10737418240 bytes is available ("),
            "{error}"
        );
    }

    #[test]
    fn force_lifts_the_check_but_not_the_cap() {
        let forced = Request { force: true, ..request(15 * GIB) };
        assert_eq!(admit(&forced, &host(GIB)).unwrap().need_bytes(), 15 * GIB);
        let capped = Request { memory_bytes_max: Some(8 * GIB), ..forced };
        let error = admit(&capped, &host(64 * GIB)).unwrap_err();
        assert_eq!(error.kind(), Kind::NoRoom);
        assert_eq!(
            error.message(),
            "needs 15.0 GiB, but this cache is capped at 8.0 GiB (--max-memory-bytes)"
        );
        assert_eq!(admissible_bytes(&capped, &host(GIB)).unwrap(), 8 * GIB);
    }

    #[test]
    fn a_fraction_is_above_0_and_at_most_1() {
        for fraction in [0.0, -0.0, -0.5, 1.0000000000000002, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let ask = Request { memory_fraction: fraction, force: true, ..request(1) };
            assert_eq!(admit(&ask, &host(GIB)).unwrap_err().kind(), Kind::Usage, "{fraction}");
            assert_eq!(admissible_bytes(&ask, &host(GIB)).unwrap_err().kind(), Kind::Usage, "{fraction}");
        }
    }

    #[test]
    fn shares_are_exact_at_the_extremes() {
        assert_eq!(share(1.0, u64::MAX).unwrap(), u64::MAX);
        assert_eq!(share(0.5, u64::MAX).unwrap(), u64::MAX / 2);
        // The largest number below 1 is 1 - 2^-53: a floating point product would round up to 2^64.
        assert_eq!(share(1.0 - f64::EPSILON / 2.0, u64::MAX).unwrap(), u64::MAX - 2048);
        assert_eq!(share(f64::MIN_POSITIVE, u64::MAX).unwrap(), 0);
        assert_eq!(share(5e-324, u64::MAX).unwrap(), 0);
        assert_eq!(share(0.9, 0).unwrap(), 0);
    }

    fn bytes() -> impl Strategy<Value = u64> {
        prop_oneof![any::<u64>(), 0..64 * GIB, Just(0), Just(u64::MAX)]
    }

    proptest! {
        #[test]
        fn nothing_above_the_rule_is_admitted(
            need_bytes in bytes(), reserve_bytes in bytes(), available in bytes(),
            numerator in 1u64..=1 << 20, cap in proptest::option::of(bytes()), force in any::<bool>(),
        ) {
            // The rule once more, in whole numbers: the fraction is numerator / 2^20.
            let most = (i128::from(available) * i128::from(numerator)).div_euclid(1 << 20) - i128::from(reserve_bytes);
            let fits = i128::from(need_bytes) <= most.max(0);
            let capped = cap.is_some_and(|cap| need_bytes > cap);

            let ask = Request {
                need_bytes,
                memory_fraction: numerator as f64 / f64::from(1 << 20),
                reserve_bytes,
                memory_bytes_max: cap,
                force,
            };
            let room = host(available);
            let answer = admit(&ask, &room);
            prop_assert_eq!(answer.is_ok(), !capped && (fits || force));
            match answer {
                Ok(grant) => prop_assert_eq!(grant.need_bytes(), need_bytes),
                Err(error) => prop_assert_eq!(error.kind(), Kind::NoRoom),
            }
            let most_admitted = admissible_bytes(&ask, &room).unwrap();
            prop_assert_eq!(need_bytes <= most_admitted, !capped && (fits || force));
        }

        #[test]
        fn any_fraction_leaves_at_most_the_whole(bits in any::<u64>(), available in bytes()) {
            match share(f64::from_bits(bits), available) {
                Ok(share) => prop_assert!(share <= available),
                Err(error) => prop_assert_eq!(error.kind(), Kind::Usage),
            }
        }
    }
}
