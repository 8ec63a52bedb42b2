//! Who has a cache's memory open or mapped, with a lease or without one: found in `/proc`, by the device and
//! inode of its segments.
//!
//! A look costs a few system calls for each process and descriptor, about 0.13 ms for a process that does little, so that
//! it is taken when a decision hangs on it and never to pass the time. It sees what its
//! `/proc` shows: the processes of this PID namespace and of those below it. Whatever may not be looked into
//! is counted, and named where it belongs to this user: the kernel lets nobody else follow a link of the view
//! but root and processes with its capabilities.

mod maps;
mod process;

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

pub use maps::Memory;
pub use process::{HOLDER_GONE, OUT_OF_SIGHT, command_of, named};

/// The segments of one cache, each known by device and inode; or the files below one directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segments {
    inodes: HashSet<(u64, u64)>,
    /// What stands in the path of each as `/proc` shows it, so that no other file is asked for its inode: that could
    /// wait for a network file system which does not answer.
    mark: Vec<u8>,
    /// By [`Segments::below`]: the numbers without their devices.
    below: HashSet<u64>,
}

impl Segments {
    /// Files below a directory called `name`, wherever it is mounted: under another path they are not meant.
    pub fn below(name: &str, pairs: impl Iterator<Item = (u64, u64)>) -> Segments {
        let inodes: HashSet<(u64, u64)> = pairs.collect();
        let below = inodes.iter().map(|(_, inode)| *inode).collect();
        Segments { inodes, mark: format!("/{name}/").into_bytes(), below }
    }

    fn contains(&self, device: u64, inode: u64) -> bool {
        self.inodes.contains(&(device, inode))
    }

    /// Whether a path that `/proc` shows may be one of them.
    fn may_be(&self, path: &[u8]) -> bool {
        path.windows(self.mark.len()).any(|part| part == self.mark)
    }

    /// Whether a line of `maps` with these numbers is one of them.
    fn maps(&self, device: u64, inode: u64, line: &[u8]) -> bool {
        // The device of a file's map may be another than `stat` tells: on Btrfs it is.
        self.contains(device, inode) && self.below.is_empty()
            || self.below.contains(&inode) && self.may_be(line)
    }
}

impl Default for Segments {
    fn default() -> Segments {
        Segments::from_iter([])
    }
}

/// Of pairs of `st_dev` and `st_ino`.
impl FromIterator<(u64, u64)> for Segments {
    fn from_iter<T: IntoIterator<Item = (u64, u64)>>(pairs: T) -> Segments {
        let inodes = pairs.into_iter().collect();
        Segments { inodes, mark: process::SEGMENT_MARK.to_vec(), below: HashSet::new() }
    }
}

/// How closely a reader is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Who it is: enough for a decision.
    Who,
    /// Also what it does with the memory, which takes the kernel milliseconds for each GiB on small pages.
    Memory,
}

/// A process, by its number in this PID namespace and what it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// Its command line, as [`command_of`] gives it.
    pub command: String,
}

/// A process that has a segment open or mapped. Its threads are not counted apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reader {
    /// Which.
    pub process: Process,
    /// Descriptors that lead to segments.
    pub descriptors: u64,
    /// Bytes of address space on segments, in whole pages.
    pub mapped_bytes: u64,
    /// What it does with them; `None` where that was not asked for, or may not be seen.
    pub memory: Option<Memory>,
}

/// What a look came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Who reads, by number. Never this process, nor another of this program: its commands look into a view for
    /// a moment.
    pub readers: Vec<Reader>,
    /// Processes of this user that may not be looked into: each of them could be a reader.
    pub unseen: Vec<Process>,
    /// How many processes of other users may not be looked into. Only what is privileged among them can read.
    pub unseen_of_others: u64,
}

/// Looks through all processes for those that have one of `segments` open or mapped. One that ends meanwhile is
/// left out.
///
/// # Errors
///
/// Where `/proc` cannot be read.
pub fn find(segments: &Segments, detail: Detail) -> Result<Seen> {
    let proc = Path::new("/proc");
    let failed = |cause: std::io::Error| {
        Error::io("look for readers in", proc, &cause).hint("mount it, or stop the cache with --force")
    };
    let entries = std::fs::read_dir(proc).map_err(failed)?;
    // Its number in the namespace that this `/proc` shows, which need not be ours.
    let own = std::fs::read_link(proc.join("self")).map_err(failed)?;
    let mut pids = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        let pid = name.to_str().and_then(|name| name.parse::<i32>().ok());
        pids.extend(pid.filter(|_| Path::new(&name) != own));
    }
    pids.sort_unstable();
    let us = rustix::process::geteuid().as_raw();
    let program = identity_of(&proc.join("self/exe"));
    let mut seen = Seen::default();
    for pid in pids {
        let directory = proc.join(pid.to_string());
        let looked = process::look_at(&directory, segments);
        if looked.held.is_some() {
            if program.is_none() || identity_of(&directory.join("exe")) != program {
                seen.readers.push(reader(pid, looked, segments, detail));
            }
        } else if looked.is_hidden {
            match std::fs::metadata(&directory).map(|found| found.uid()) {
                Ok(uid) if uid == us => seen.unseen.push(Process { pid, command: command_of(pid) }),
                Ok(_) => seen.unseen_of_others += 1,
                // It has ended.
                Err(_) => {}
            }
        }
    }
    Ok(seen)
}

fn reader(pid: i32, looked: process::Looked, segments: &Segments, detail: Detail) -> Reader {
    let directory: PathBuf = looked.directory;
    let is_asked = detail == Detail::Memory;
    let memory = is_asked.then(|| process::memory_of(&directory, segments)).flatten();
    Reader {
        process: Process { pid, command: command_of(pid) },
        descriptors: looked.held.descriptors,
        mapped_bytes: looked.held.mapped_bytes,
        memory,
    }
}

fn identity_of(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

#[cfg(test)]
mod tests;
