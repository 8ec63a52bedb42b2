//! Standing back while loading: the load's threads behind everybody else's, the daemon itself as it was.

use std::fs::{read_to_string, write};
use std::time::Duration;

use rustix::process::setpriority_process;

use crate::error::{Error, Result};
use crate::sys::priority;

/// The least CPU priority that a thread can have without never getting any: with the idle class a thread could
/// hold, for as long as others keep the processors busy, what the daemon needs for its answers.
const NICE_LEAST: i32 = 19;

/// Where the kernel groups processes by session, so that priorities compare only inside one, the group's own.
const SESSION_GROUP: &str = "/proc/self/autogroup";

/// The kernel lets ordinary users change it ten times a second, all together.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(100);

/// The calling thread, and the threads that it starts from now on, stand back for good; the group of the
/// daemon's session until this is dropped.
#[derive(Debug)]
pub(super) struct StandingBack {
    group_nice_before: Option<i32>,
}

impl StandingBack {
    pub(super) fn begin() -> Result<StandingBack> {
        let hint = "leave out --background, or permit the call (container seccomp profile)";
        priority::make_io_idle()
            .map_err(|cause| Error::os("lower the I/O priority (ioprio_set)", &cause).hint(hint))?;
        setpriority_process(None, NICE_LEAST)
            .map_err(|errno| Error::os("lower the CPU priority (setpriority)", &errno.into()).hint(hint))?;
        // In the foreground the session may be somebody else's, with more in it than this.
        let group_nice_before = group_nice().filter(|nice| {
            priority::leads_its_session() && *nice < NICE_LEAST && set_group_nice(NICE_LEAST).is_ok()
        });
        Ok(StandingBack { group_nice_before })
    }
}

impl Drop for StandingBack {
    fn drop(&mut self) {
        if let Some(nice) = self.group_nice_before {
            // A daemon that rests needs no priority: where it stays low nothing is lost but a moment.
            let _ = set_group_nice(nice);
        }
    }
}

fn group_nice() -> Option<i32> {
    parse_group_nice(&read_to_string(SESSION_GROUP).ok()?)
}

/// The number in `/autogroup-25 nice 0`.
fn parse_group_nice(text: &str) -> Option<i32> {
    text.rsplit_once("nice ")?.1.trim().parse().ok()
}

fn set_group_nice(nice: i32) -> std::io::Result<()> {
    let mut outcome = write(SESSION_GROUP, nice.to_string());
    for _ in 1..TRIES {
        if !outcome.as_ref().is_err_and(|cause| cause.raw_os_error() == Some(libc::EAGAIN)) {
            break;
        }
        std::thread::sleep(PAUSE);
        outcome = write(SESSION_GROUP, nice.to_string());
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_priority_of_a_session_is_read() {
        assert_eq!(parse_group_nice("/autogroup-25 nice 0\n"), Some(0));
        assert_eq!(parse_group_nice("/autogroup-1 nice -5\n"), Some(-5));
        assert_eq!(parse_group_nice(""), None);
    }

    #[test]
    fn only_the_thread_that_asks_stands_back() {
        let nice_of_this_thread = || {
            let stat = read_to_string("/proc/thread-self/stat").unwrap();
            let after_name = stat.rsplit_once(')').unwrap().1;
            after_name.split_whitespace().nth(16).unwrap().parse::<i32>().unwrap()
        };
        let before = nice_of_this_thread();
        let of_load = std::thread::spawn(move || {
            let _standing_back = StandingBack::begin().unwrap();
            let of_worker = std::thread::spawn(nice_of_this_thread).join().unwrap();
            (nice_of_this_thread(), of_worker)
        });
        assert_eq!(of_load.join().unwrap(), (19, 19));
        assert_eq!(nice_of_this_thread(), before);
    }
}
