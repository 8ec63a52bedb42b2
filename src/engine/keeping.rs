//! What whoever keeps an engine full needs, whether it reads or writes: places for what is under way, counts of
//! attempts, and windows joined again.

use std::time::Duration;

use crate::error::{Error, Kind, Result, shown};
use crate::sys::map::Window;

/// Times that one transfer is tried again in a row that brought nothing, before that is taken for an error.
const RETRIES_MAX: u32 = 1000;

/// Those of them that follow at once; before each further one is a pause.
const RETRIES_AT_ONCE: u32 = 8;
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Attempts in a row that brought nothing: EINTR, EAGAIN, or too few bytes to go on behind them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attempts(u32);

impl Attempts {
    /// One brought something.
    pub(crate) fn forget(&mut self) {
        self.0 = 0;
    }

    /// Whether there may be one more.
    pub(crate) fn may_try(self) -> bool {
        self.0 < RETRIES_MAX
    }

    /// Counts one more, and waits a little after the first few. `doing` is `read` or `write`.
    pub(crate) fn try_again(
        &mut self,
        doing: &str,
        name: impl AsRef<std::ffi::OsStr>,
        at: u64,
    ) -> Result<()> {
        if !self.may_try() {
            let what = shown(name.as_ref());
            let message = format!("cannot {doing} {what} at {at}: {RETRIES_MAX} attempts brought nothing");
            return Err(Error::new(Kind::Failed, message));
        }
        self.0 += 1;
        if self.0 > RETRIES_AT_ONCE {
            std::thread::sleep(RETRY_PAUSE);
        }
        Ok(())
    }
}

/// The index of an empty place; made where there is none.
pub(crate) fn free_slot<T>(places: &mut Vec<Option<T>>) -> usize {
    match places.iter().position(Option::is_none) {
        Some(index) => index,
        None => {
            places.push(None);
            places.len() - 1
        }
    }
}

/// Puts `next` behind what short transfers have done so far.
pub(crate) fn append(done: &mut Option<Window>, next: Window) {
    match done {
        Some(before) => before.join(next),
        None => *done = Some(next),
    }
}

/// The window that was cut into `parts`, all of which are back.
pub(crate) fn joined(parts: Vec<Option<Window>>) -> Window {
    let mut parts = parts.into_iter().map(|part| part.expect("every part is back"));
    let mut window = parts.next().expect("there is at least one part");
    parts.for_each(|part| window.join(part));
    window
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_that_bring_nothing_end() {
        let mut attempts = Attempts(RETRIES_MAX - 1);
        attempts.try_again("read", "f", 7).unwrap();
        assert!(!attempts.may_try());
        let error = attempts.try_again("read", "f", 7).unwrap_err();
        assert_eq!(error.message(), "cannot read f at 7: 1000 attempts brought nothing");
        attempts.forget();
        attempts.try_again("read", "f", 7).unwrap();
    }

    #[test]
    fn an_empty_place_is_used_again() {
        let mut places = vec![Some(1), None, Some(3)];
        assert_eq!(free_slot(&mut places), 1);
        places[1] = Some(2);
        assert_eq!(free_slot(&mut places), 3);
        assert_eq!(places, [Some(1), Some(2), Some(3), None]);
    }
}
