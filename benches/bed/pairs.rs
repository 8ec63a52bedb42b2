//! Two things measured in turns, A B A B, so that both meet the same weather; and what their ratios say.

use std::fmt;
use std::time::Duration;

use super::Outcome;

/// What was measured several times, sorted.
pub(crate) struct Spread(Vec<f64>);

impl Spread {
    /// Of at least one value.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.into_iter().collect();
        assert!(!values.is_empty());
        values.sort_by(f64::total_cmp);
        Spread(values)
    }

    /// The value at a share of the way from the least to the greatest, between two values where it falls
    /// there.
    fn quantile(&self, share: f64) -> f64 {
        let place = share * (self.0.len() - 1) as f64;
        let (below, above) = (self.0[place.floor() as usize], self.0[place.ceil() as usize]);
        below + (above - below) * place.fract()
    }

    /// The middle value.
    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The least value.
    pub(crate) fn least(&self) -> f64 {
        self.0[0]
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = formatter.precision().unwrap_or(2);
        let [least, lower, median, upper, greatest] = [0.0, 0.25, 0.5, 0.75, 1.0].map(|s| self.quantile(s));
        write!(
            formatter,
            "{median:.places$} ({least:.places$} - {greatest:.places$}, quartiles {lower:.places$} and {upper:.places$})"
        )
    }
}

/// How often a run is repeated whose page cache did not stay as it was made.
const REPEATS_MAX: usize = 5;

/// Runs `run` until the page cache was during the run what it should have been: `None` is a run in which it
/// was not, because the system took memory back meanwhile.
pub(crate) fn undisturbed<T>(mut run: impl FnMut() -> Outcome<Option<T>>) -> Outcome<T> {
    for _ in 0..REPEATS_MAX {
        if let Some(figure) = run()? {
            return Ok(figure);
        }
    }
    Err(format!("in {REPEATS_MAX} runs in a row the page cache did not stay as it was made").into())
}

/// The times of two things measured in turns.
pub(crate) struct Pairs(Vec<(Duration, Duration)>);

impl Pairs {
    /// Measures `a` and `b` in turns, `count` times each. Each prepares what it needs, takes its own time,
    /// and cleans up, so that only what is promised is timed.
    pub(crate) fn measure(
        count: usize,
        mut a: impl FnMut() -> Outcome<Duration>,
        mut b: impl FnMut() -> Outcome<Duration>,
    ) -> Outcome<Pairs> {
        (0..count).map(|_| Ok((a()?, b()?))).collect::<Outcome<_>>().map(Pairs)
    }

    /// How many times as long as B A took, pair by pair.
    pub(crate) fn time_ratio(&self) -> Spread {
        Spread::of(self.0.iter().map(|(a, b)| a.as_secs_f64() / b.as_secs_f64()))
    }

    /// How many times as fast as B A was, pair by pair.
    pub(crate) fn rate_ratio(&self) -> Spread {
        Spread::of(self.0.iter().map(|(a, b)| b.as_secs_f64() / a.as_secs_f64()))
    }

    /// How many seconds longer than B A took, pair by pair.
    pub(crate) fn differences(&self) -> impl Iterator<Item = f64> {
        self.0.iter().map(|(a, b)| a.as_secs_f64() - b.as_secs_f64())
    }

    /// The rates of A and of B for `gigabytes` each.
    pub(crate) fn rates(&self, gigabytes: f64) -> (Spread, Spread) {
        let rate = |time: Duration| gigabytes / time.as_secs_f64();
        (
            Spread::of(self.0.iter().map(|pair| rate(pair.0))),
            Spread::of(self.0.iter().map(|pair| rate(pair.1))),
        )
    }

    /// The times of A and of B in seconds.
    pub(crate) fn times(&self) -> (Spread, Spread) {
        (
            Spread::of(self.0.iter().map(|pair| pair.0.as_secs_f64())),
            Spread::of(self.0.iter().map(|pair| pair.1.as_secs_f64())),
        )
    }
}

/// What is promised of a figure.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    /// So much or more.
    AtLeast(f64),
    /// So much or less.
    AtMost(f64),
}

impl Target {
    /// Whether `value` keeps the promise, in words.
    pub(crate) fn verdict(self, value: f64) -> String {
        let (met, target) = match self {
            Target::AtLeast(bound) => (value >= bound, format!("at least {bound}")),
            Target::AtMost(bound) => (value <= bound, format!("at most {bound}")),
        };
        format!("target {target}: {}", if met { "met" } else { "NOT met" })
    }
}
