//! Sizes as people write them, durations from the command line, and alignment arithmetic.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The base page size that the arithmetic of segments assumes (x86-64, and arm64 with 4 KiB pages).
pub const PAGE_BYTES: u64 = 4096;

/// A huge page at the PMD level: the unit of the huge-page policy and of every chunk.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Rounds up to a multiple of `unit`, a power of two. Saturates instead of overflowing.
pub fn round_up(value: u64, unit: u64) -> u64 {
    assert!(unit.is_power_of_two());
    match value.checked_add(unit - 1) {
        Some(sum) => sum & !(unit - 1),
        None => round_down(u64::MAX, unit),
    }
}

/// Rounds down to a multiple of `unit`, a power of two.
pub fn round_down(value: u64, unit: u64) -> u64 {
    assert!(unit.is_power_of_two());
    value & !(unit - 1)
}

/// A number of bytes: parsed from `4096`, `512MiB`, `1.5TiB`, `32G`; printed with a binary suffix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

const SUFFIXES: [(&str, u32); 5] = [("K", 10), ("M", 20), ("G", 30), ("T", 40), ("P", 50)];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<ByteSize, String> {
        let wrong = || {
            format!(
                "'{}' is not a size; write bytes, or a number with K, M, G or T (512MiB, 1.5TiB)",
                text.escape_debug()
            )
        };
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, suffix) = text.split_at(end);
        let shift = match suffix {
            "" | "B" => 0,
            _ => {
                let letter = suffix.strip_suffix("iB").or_else(|| suffix.strip_suffix('B')).unwrap_or(suffix);
                SUFFIXES.iter().find(|row| row.0.eq_ignore_ascii_case(letter)).ok_or_else(wrong)?.1
            }
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if number.matches('.').count() > 1 || (whole.is_empty() && fraction.is_empty()) || fraction.len() > 18
        {
            return Err(wrong());
        }
        if shift == 0 && !fraction.is_empty() {
            return Err(wrong());
        }
        let too_large = || format!("'{text}' is more than this program can count (16 EiB)");
        let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| too_large())? };
        let mut bytes = whole.checked_mul(1 << shift).ok_or_else(too_large)?;
        if !fraction.is_empty() {
            let digits: u128 = fraction.parse().map_err(|_| wrong())?;
            bytes += (digits << shift) / 10u128.pow(fraction.len() as u32);
        }
        u64::try_from(bytes).map(ByteSize).map_err(|_| too_large())
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (suffix, shift) in SUFFIXES.iter().rev() {
            if self.0 >= 1 << shift {
                let value = self.0 as f64 / (1u64 << shift) as f64;
                let places = if value >= 100.0 { 0 } else { 1 };
                return formatter.pad(&format!("{value:.places$} {suffix}iB"));
            }
        }
        formatter.pad(&format!("{} B", self.0))
    }
}

/// Seconds as people give them on a command line: finite, not negative, at most about 30 years.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    const SECONDS_MAX: f64 = 1e9;
    let seconds: f64 =
        text.parse().map_err(|_| format!("'{}' is not a number of seconds", text.escape_debug()))?;
    if !seconds.is_finite() || !(0.0..=SECONDS_MAX).contains(&seconds) {
        return Err(format!("'{text}' is not between 0 and {SECONDS_MAX} seconds"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_as_binary() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("12B", 12),
            ("1K", 1024),
            ("1k", 1024),
            ("512MiB", 512 << 20),
            ("32GiB", 32 << 30),
            ("32G", 32 << 30),
            ("2MB", 2 << 20),
            ("1.5TiB", 3 << 39),
            (".5K", 512),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in [
            "",
            "-1",
            "1.5",
            "1..5G",
            "G",
            "1 G",
            "1X",
            "1e3",
            "inf",
            "nan",
            "16777216T",
            "99999999999P",
            "1iB",
        ] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_print_with_one_decimal() {
        assert_eq!(ByteSize(0).to_string(), "0 B");
        assert_eq!(ByteSize(1023).to_string(), "1023 B");
        assert_eq!(ByteSize(1536).to_string(), "1.5 KiB");
        assert_eq!(ByteSize(256 << 20).to_string(), "256 MiB");
        assert_eq!(ByteSize(u64::MAX).to_string(), "16384 PiB");
    }

    #[test]
    fn seconds_refuse_what_is_no_duration() {
        assert_eq!(parse_seconds("2.5"), Ok(Duration::from_millis(2500)));
        for text in ["inf", "nan", "-1", "1e300", "", "abc", "-0.1"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rounding_saturates() {
        assert_eq!(round_up(1, PAGE_BYTES), PAGE_BYTES);
        assert_eq!(round_up(PAGE_BYTES, PAGE_BYTES), PAGE_BYTES);
        assert_eq!(round_up(u64::MAX, PAGE_BYTES), u64::MAX - 4095);
        assert_eq!(round_down(4097, PAGE_BYTES), 4096);
    }
}
