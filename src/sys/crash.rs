//! Places where a test has this process killed, as by `kill -9`. A release build has nothing of them.
//!
//! `tests/it/crash.rs` reads the names from the sources, kills at each one, and looks at what is left.

#[cfg(debug_assertions)]
pub use debug::{inherited, point};

#[cfg(not(debug_assertions))]
pub use release::{inherited, point};

#[cfg(debug_assertions)]
mod debug {
    use std::collections::HashMap;
    use std::ffi::OsString;
    use std::sync::{Mutex, OnceLock, PoisonError};

    use rustix::process::{Signal, getpid, kill_process};

    /// Where to be killed: names of points separated by commas, each with `:n` where the n-th time is meant.
    const VARIABLE: &str = "ILOADER_TEST_CRASH_AT";

    /// How many times each point is still to be passed.
    fn wanted() -> &'static Mutex<HashMap<String, u32>> {
        static WANTED: OnceLock<Mutex<HashMap<String, u32>>> = OnceLock::new();
        WANTED.get_or_init(|| Mutex::new(parse(&std::env::var(VARIABLE).unwrap_or_default())))
    }

    fn parse(text: &str) -> HashMap<String, u32> {
        let one = |point: &str| match point.split_once(':') {
            Some((name, time)) => (name.to_owned(), time.parse().unwrap_or(1)),
            None => (point.to_owned(), 1),
        };
        text.split(',').filter(|point| !point.is_empty()).map(one).collect()
    }

    /// Kills this process where the environment names this point, and it is met for the time that is meant.
    pub fn point(name: &'static str) {
        let mut wanted = wanted().lock().unwrap_or_else(PoisonError::into_inner);
        let Some(left) = wanted.get_mut(name) else { return };
        *left = left.saturating_sub(1);
        if *left == 0 && kill_process(getpid(), Signal::KILL).is_ok() {
            // The signal takes every thread; nothing more is to happen in this one until it does.
            loop {
                std::thread::park();
            }
        }
    }

    /// The variable that names the points, as a daemon is to inherit it.
    pub fn inherited() -> Option<(&'static str, OsString)> {
        Some((VARIABLE, std::env::var_os(VARIABLE)?))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn points_are_read_from_the_variable() {
            let expected = [("a".to_owned(), 1), ("b-c".to_owned(), 3)];
            assert_eq!(parse("a,b-c:3"), expected.into());
            assert!(parse("").is_empty());
            point("named nowhere");
        }
    }
}

#[cfg(not(debug_assertions))]
mod release {
    /// Nothing: only a debug build can be killed at a point.
    #[inline(always)]
    pub fn point(_: &'static str) {}

    /// Nothing.
    #[inline(always)]
    pub fn inherited() -> Option<(&'static str, std::ffi::OsString)> {
        None
    }
}
