//! One process, as far as `/proc` shows it.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::Segments;
use super::maps::{self, Memory};
use crate::error::shown;
use crate::sys::process::state_in;

/// A command line is shown up to this many bytes.
const COMMAND_BYTES_MAX: usize = 200;

/// A message names no more processes than this.
const NAMED_MAX: usize = 5;

/// What stands in the name of every segment, whatever backs it.
pub(super) const SEGMENT_MARK: &[u8] = b"iloader:";

/// What a process has of some segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    /// Descriptors that lead to one.
    pub(super) descriptors: u64,
    /// Bytes of address space on them.
    pub(super) mapped_bytes: u64,
}

impl Held {
    pub(super) fn is_some(self) -> bool {
        self != Held::default()
    }
}

/// A process that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Looked {
    /// What it has, as far as that was seen.
    pub(super) held: Held,
    /// Something of it may not be looked into.
    pub(super) is_hidden: bool,
    /// Where it was seen: the process's directory, or that of a thread of it.
    pub(super) directory: PathBuf,
    /// It has no address space: it is the kernel's, or has ended.
    is_bare: bool,
}

/// Looks at the process with `directory` in `/proc`. One whose first thread has ended before the others shows
/// what it has in the directories of those.
pub(super) fn look_at(directory: &Path, segments: &Segments) -> Looked {
    let looked = look_into(directory, segments);
    if looked.held.is_some() || !(looked.is_bare || looked.is_hidden) || !has_ended(directory) {
        return looked;
    }
    let threads = std::fs::read_dir(directory.join("task")).into_iter().flatten().flatten();
    let living = threads.map(|thread| thread.path()).find(|thread| !has_ended(thread));
    // One that nobody waited for has nothing left to be hidden.
    living.map_or(Looked { is_hidden: false, ..looked }, |thread| look_into(&thread, segments))
}

fn look_into(directory: &Path, segments: &Segments) -> Looked {
    let mut looked =
        Looked { held: Held::default(), is_hidden: false, directory: directory.to_owned(), is_bare: false };
    match descriptors(&directory.join("fd"), segments) {
        Ok(count) => looked.held.descriptors = count,
        Err(error) => looked.is_hidden |= !is_end(&error),
    }
    match std::fs::read(directory.join("maps")) {
        Ok(text) => {
            looked.is_bare = text.is_empty();
            looked.held.mapped_bytes = maps::mapped_bytes(&text, segments);
        }
        Err(error) if is_end(&error) => looked.is_bare = true,
        Err(_) => looked.is_hidden = true,
    }
    looked
}

/// How many descriptors lead to one of `segments`.
fn descriptors(directory: &Path, segments: &Segments) -> io::Result<u64> {
    let mut count = 0;
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let target = match std::fs::read_link(&path) {
            Ok(target) => target,
            // Closed meanwhile.
            Err(error) if is_end(&error) => continue,
            Err(error) => return Err(error),
        };
        if !segments.may_be(target.as_os_str().as_bytes()) {
            continue;
        }
        match std::fs::metadata(&path) {
            Ok(found) => count += u64::from(segments.contains(found.dev(), found.ino())),
            Err(error) if is_end(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

/// What a process does with the segments that it has mapped; `None` where that may not be seen.
pub(super) fn memory_of(directory: &Path, segments: &Segments) -> Option<Memory> {
    let smaps = std::fs::read(directory.join("smaps")).ok()?;
    let status = std::fs::read(directory.join("status")).unwrap_or_default();
    Some(maps::memory(&smaps, &status, segments))
}

/// Whether an error says that the process, or its descriptor, is gone.
fn is_end(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// Whether a process or thread runs no more, though nobody may have waited for it yet.
fn has_ended(directory: &Path) -> bool {
    let Ok(stat) = std::fs::read(directory.join("stat")) else { return true };
    matches!(state_in(&stat), None | Some(b'Z' | b'X'))
}

/// The command line of a process, its parts separated by blanks, cut where it is long; the name of a process
/// that shows none in brackets; empty where neither can be read.
pub fn command_of(pid: i32) -> String {
    let Ok(mut line) = std::fs::read(format!("/proc/{pid}/cmdline")) else { return String::new() };
    while line.last() == Some(&0) {
        line.pop();
    }
    if line.is_empty() {
        let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        let name = String::from_utf8_lossy(&name).trim_end().to_owned();
        return if name.is_empty() { name } else { format!("[{name}]") };
    }
    let is_cut = line.len() > COMMAND_BYTES_MAX;
    line.truncate(COMMAND_BYTES_MAX);
    for byte in line.iter_mut().filter(|byte| **byte == 0) {
        *byte = b' ';
    }
    let mut text = String::from_utf8_lossy(&line).into_owned();
    if is_cut {
        text.push('…');
    }
    text
}

/// In place of the command of a lease whose process has ended, or cannot be watched.
pub const HOLDER_GONE: &str = "which has ended and left its connection to another process";

/// In place of the command of a process that has no number here.
pub const OUT_OF_SIGHT: &str = "in another PID namespace";

/// Processes by number and [`command_of`] in a message, as many as fit a line. What stands in place of a command goes
/// without quotes.
pub fn named<'a>(processes: impl ExactSizeIterator<Item = (i32, &'a str)>) -> String {
    let count = processes.len();
    let in_words = |(pid, command)| match command {
        "" => format!("process {pid}"),
        HOLDER_GONE => format!("process {pid}, {HOLDER_GONE}"),
        OUT_OF_SIGHT => format!("a process {OUT_OF_SIGHT}"),
        command => format!("process {pid} {}", shown(command)),
    };
    let mut named: Vec<String> = processes.take(NAMED_MAX).map(in_words).collect();
    if count > NAMED_MAX {
        named.push(format!("{} more", count - NAMED_MAX));
    }
    named.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_named_up_to_a_limit() {
        assert_eq!(named([(7, "sleep 600\n"), (8, "")].into_iter()), "process 7 'sleep 600\\n', process 8");
        assert_eq!(named([(0, OUT_OF_SIGHT)].into_iter()), "a process in another PID namespace");
        assert!(named([(7, HOLDER_GONE)].into_iter()).starts_with("process 7, which has ended and left"));
        let many: Vec<(i32, &str)> = (1..=8).map(|pid| (pid, "engine")).collect();
        assert!(named(many.into_iter()).ends_with("process 5 engine, 3 more"));
    }

    #[test]
    fn commands_are_read_from_the_process() {
        let command = command_of(std::process::id() as i32);
        assert!(command.contains("iloader"), "{command}");
        assert_eq!(command_of(-1), "");
    }

    #[test]
    fn a_process_that_is_gone_has_nothing_and_hides_nothing() {
        let looked = look_at(Path::new("/proc/4294967295"), &Segments::default());
        assert_eq!((looked.held, looked.is_hidden), (Held::default(), false));
        let mut child = std::process::Command::new("true").spawn().expect("spawned");
        let directory = PathBuf::from(format!("/proc/{}", child.id()));
        while !has_ended(&directory) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let looked = look_at(&directory, &Segments::default());
        assert!(!looked.is_hidden, "nobody waited for it yet");
        child.wait().expect("waited for");
        assert!(!has_ended(Path::new("/proc/self")));
    }
}
