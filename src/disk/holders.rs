//! Who uses a generation, for the message that refuses to remove it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::format::Entry;
use super::tree::Found;
use crate::error::Result;
use crate::readers::{self, Detail, Segments, command_of, named};

/// Who has a file of a generation open or mapped under the generation's own path; `None`: nobody that can be seen.
///
/// A file that is linked into another generation and was opened there is that one's: it stays what it is there.
pub(super) fn readers(entry: &Entry, found: &[Found]) -> Result<Option<String>> {
    let files = found.iter().filter(|found| found.is_file).map(|found| (found.device, found.inode));
    let seen = readers::find(&Segments::below(&entry.to_string(), files), Detail::Who)?;
    let processes = seen.readers.iter().map(|reader| (reader.process.pid, reader.process.command.as_str()));
    Ok((!seen.readers.is_empty()).then(|| named(processes)))
}

/// Who holds a lock on the file, as far as the kernel tells; `None`: nobody that can be seen.
pub(super) fn of_lock(path: &Path) -> Option<String> {
    let file = std::fs::symlink_metadata(path).ok()?;
    let text = std::fs::read_to_string("/proc/locks").ok()?;
    let mut pids: Vec<i32> = text.lines().filter_map(|line| holder(line, file.ino())).collect();
    pids.sort_unstable();
    pids.dedup();
    let processes: Vec<(i32, String)> = pids.into_iter().map(|pid| (pid, command_of(pid))).collect();
    let processes = processes.iter().map(|(pid, command)| (*pid, command.as_str()));
    (processes.len() > 0).then(|| named(processes))
}

/// The process behind a line of `/proc/locks`, where it is a `flock` on a file of that inode:
/// `1: FLOCK  ADVISORY  READ 1234 fe:01:131090 0 EOF`. The device is left out: on Btrfs it is another one than
/// `stat` tells.
fn holder(line: &str, inode: u64) -> Option<i32> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let [_, "FLOCK", _, _, pid, file, ..] = words[..] else { return None };
    let is_same = file.rsplit_once(':').is_some_and(|(_, number)| number.parse() == Ok(inode));
    // 0 is a process of another PID namespace.
    pid.parse().ok().filter(|pid| is_same && *pid > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_read_from_the_kernels_text() {
        let line = "1: FLOCK  ADVISORY  READ 1234 fe:01:131090 0 EOF";
        assert_eq!(holder(line, 131_090), Some(1234));
        assert_eq!(holder(line, 13_109), None);
        assert_eq!(holder(&line.replace("FLOCK", "POSIX"), 131_090), None);
        assert_eq!(holder("1: -> FLOCK  ADVISORY  WRITE 1234 fe:01:131090 0 EOF", 131_090), None, "it waits");
        assert_eq!(holder(&line.replace("1234", "0"), 131_090), None);
        assert_eq!(holder("", 1), None);
    }
}
