//! The daemon's log: one line per thing that happened, with the time in UTC.

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;

use crate::error::{Error, Result};

/// Where log lines go. A failed write is not reported anywhere: there is nowhere left to report it.
#[derive(Debug)]
pub struct Log {
    out: File,
}

impl Log {
    /// A log into `out`, opened for appending.
    pub fn new(out: File) -> Log {
        Log { out }
    }

    /// The log of a process whose standard error is the log, or a terminal that stands for it.
    pub fn standard_error() -> Result<Log> {
        let out = std::io::stderr()
            .as_fd()
            .try_clone_to_owned()
            .map_err(|error| Error::os("use standard error as the log", &error))?;
        Ok(Log { out: File::from(out) })
    }

    /// A log into the same file, for another thread.
    pub fn try_clone(&self) -> Result<Log> {
        self.out.try_clone().map(Log::new).map_err(|error| Error::os("share the log", &error))
    }

    /// Writes `text` with the present time in front, in one write, so that lines of two processes that append
    /// to one file do not mix.
    pub fn line(&self, text: impl fmt::Display) {
        let line = format!("{:.3} {text}\n", jiff::Timestamp::now());
        let _ = (&self.out).write_all(line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_begins_with_the_time_in_utc() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let log = Log::new(file.reopen().expect("opened"));
        log.line(format_args!("ready after {} s", 3));
        let text = std::fs::read_to_string(file.path()).expect("readable");
        let (time, rest) = text.split_once(' ').expect("two parts");
        assert_eq!(rest, "ready after 3 s\n");
        assert!(time.ends_with('Z') && time.parse::<jiff::Timestamp>().is_ok(), "{time}");
    }
}
