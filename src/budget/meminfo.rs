//! How much memory may still be taken: the smallest room that the host and every cgroup leave.

use std::path::{Path, PathBuf};

use super::cgroup::{Groups, OomKills};
use super::room::{Room, read};
use crate::error::{Error, Kind, Result};

/// The room under every limit that was found, and the smallest of them, which binds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Availability {
    /// Bytes that may still be allocated under all limits: those of `binding`.
    pub bytes: u64,
    /// The limit with the least room. Of equals, the first found, so that the host's comes first.
    pub binding: Room,
    /// The same if every dirty page of files under those limits were written already: what is missing to
    /// this is there in a moment.
    pub when_written_bytes: u64,
    /// Every limit that was found, the host's first, then the cgroups from ours upwards.
    pub rooms: Vec<Room>,
    /// Bytes that starts under way have still to fill: available now, and not for long.
    pub promised_bytes: u64,
    /// Limit files that exist but could not be read, each with the reason; their limits are not counted.
    pub unread: Vec<String>,
}

impl Availability {
    /// The smallest of `rooms`, which are not empty.
    pub fn of(rooms: Vec<Room>) -> Availability {
        // `min_by_key` gives the first of equals.
        let binding = rooms.iter().min_by_key(|room| room.bytes).cloned();
        let binding = binding.expect("the host's room is always among the rooms");
        Availability {
            bytes: binding.bytes,
            when_written_bytes: binding.bytes,
            binding,
            rooms,
            promised_bytes: 0,
            unread: Vec::new(),
        }
    }

    /// What is available and promised to nobody.
    pub fn unpromised_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.promised_bytes)
    }
}

/// The limits that hold for this process: found once, and read as often as one likes.
#[derive(Debug)]
pub struct Limits {
    root: PathBuf,
    groups: Groups,
    /// Whether the kernel counts what is promised against a limit.
    is_overcommit_strict: bool,
    /// What could not be read when they were found.
    unread: Vec<String>,
}

impl Limits {
    /// Finds the limits of this process.
    pub fn find() -> Limits {
        Limits::find_under(Path::new("/"), std::process::id())
    }

    /// [`Limits::find`] for the process `pid` of the system whose `/proc` and cgroup mounts stand under `root`.
    fn find_under(root: &Path, pid: u32) -> Limits {
        let mut unread = Vec::new();
        let groups = Groups::find(root, pid, &mut unread);
        // Where the setting cannot be read (a bare /proc), the default applies, which has no such limit.
        let mode = read(root, Path::new("/proc/sys/vm/overcommit_memory"));
        let is_overcommit_strict = mode.is_ok_and(|mode| mode.trim() == "2");
        Limits { root: root.to_owned(), groups, is_overcommit_strict, unread }
    }

    /// What this process may still allocate, read afresh: a number that is true for a moment only. Some small
    /// files are read, in about a tenth of a millisecond.
    ///
    /// # Errors
    ///
    /// When `/proc/meminfo` cannot be read or has no `MemAvailable`. Cgroup files that cannot be read are
    /// listed in [`Availability::unread`] instead.
    pub fn available(&mut self) -> Result<Availability> {
        self.groups.follow(&mut self.unread);
        let mut rooms = self.host_rooms()?;
        let mut unread = self.unread.clone();
        // Of the host, MemAvailable counts dirty pages as available already.
        let mut when_written = rooms.iter().map(|room| room.bytes).min().unwrap_or(0);
        for allowed in self.groups.allowed(&mut unread) {
            when_written = when_written.min(allowed.room.bytes.saturating_add(allowed.unwritten_bytes));
            rooms.push(allowed.room);
        }
        Ok(Availability { when_written_bytes: when_written, unread, ..Availability::of(rooms) })
    }

    /// How often the kernel's OOM killer ended a process of the group that memory of this process is charged
    /// to, where it counts that.
    pub fn oom_kills(&self) -> Option<OomKills> {
        self.groups.oom_kills()
    }

    /// The control group that memory of this process is charged to, such as `cgroup v2 /user.slice`; `None`
    /// where the kernel charges none.
    pub fn charged_cgroup(&self) -> Option<&str> {
        self.groups.charged()
    }

    fn host_rooms(&self) -> Result<Vec<Room>> {
        let path = PathBuf::from("/proc/meminfo");
        let text = read(&self.root, &path).map_err(|cause| Error::io("read", &path, &cause))?;
        let bytes = field(&text, "MemAvailable").ok_or_else(|| {
            Error::new(Kind::Failed, "/proc/meminfo has no MemAvailable: the room on this host is unknown")
                .hint("mount /proc of a Linux kernel 3.14 or newer")
        })?;
        let mut rooms = vec![Room { bytes, what: "host MemAvailable".to_owned() }];
        // Under strict accounting an allocation fails at the commit limit, however much memory is free.
        if self.is_overcommit_strict {
            rooms.extend(commit_room(&text));
        }
        Ok(rooms)
    }
}

/// What this process may still allocate now: [`Limits::available`] of limits that are just found.
///
/// # Errors
///
/// As of [`Limits::available`].
pub fn available() -> Result<Availability> {
    Limits::find().available()
}

/// The room under the commit limit, which holds where `vm.overcommit_memory` is 2.
fn commit_room(meminfo: &str) -> Option<Room> {
    let limit = field(meminfo, "CommitLimit")?;
    let committed = field(meminfo, "Committed_AS")?;
    let what = "host CommitLimit (vm.overcommit_memory is 2)".to_owned();
    Some(Room { bytes: limit.saturating_sub(committed), what })
}

/// One field of `/proc/meminfo` in bytes, `None` where it is missing or no number.
pub fn field(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::cgroup::tests::System;

    fn available_under(root: &Path, pid: u32) -> Result<Availability> {
        Limits::find_under(root, pid).available()
    }

    const MEMINFO: &str = "MemTotal:       24683656 kB\nMemFree:        22525064 kB\n\
        MemAvailable:   24295328 kB\nBuffers:           13672 kB\nCommitLimit:    12341828 kB\n\
        Committed_AS:    2341828 kB\nHugePages_Total:       0\n";

    #[test]
    fn fields_are_found_by_their_whole_name() {
        assert_eq!(field(MEMINFO, "MemAvailable"), Some(24295328 * 1024));
        assert_eq!(field(MEMINFO, "Mem"), None);
        assert_eq!(field(MEMINFO, "HugePages_Total"), None);
        assert_eq!(field("MemAvailable: x kB\n", "MemAvailable"), None);
        assert_eq!(field("MemAvailable: 18446744073709551615 kB\n", "MemAvailable"), None);
        assert_eq!(field("", "MemAvailable"), None);
    }

    #[test]
    fn the_host_binds_without_cgroups() {
        let system = System::new();
        system.write("/proc/meminfo", MEMINFO);
        let found = available_under(system.root(), 1).unwrap();
        assert_eq!(found.binding, Room { bytes: 24295328 * 1024, what: "host MemAvailable".into() });
        assert_eq!(found.rooms.len(), 1);
        assert!(found.unread.is_empty());
    }

    #[test]
    fn strict_overcommit_is_a_limit_of_its_own() {
        let system = System::new();
        system.write("/proc/meminfo", MEMINFO);
        system.write("/proc/sys/vm/overcommit_memory", "0\n");
        assert_eq!(available_under(system.root(), 1).unwrap().bytes, 24295328 * 1024);
        system.write("/proc/sys/vm/overcommit_memory", "2\n");
        let found = available_under(system.root(), 1).unwrap();
        assert_eq!(found.bytes, 10_000_000 * 1024);
        assert!(found.binding.what.contains("CommitLimit"), "{}", found.binding.what);
    }

    #[test]
    fn without_meminfo_nothing_is_guessed() {
        let system = System::new();
        assert_eq!(available_under(system.root(), 1).unwrap_err().kind(), Kind::NotFound);
        system.write("/proc/meminfo", "MemTotal: 1 kB\n");
        let error = available_under(system.root(), 1).unwrap_err();
        assert!(error.message().contains("MemAvailable"), "{error}");
    }

    #[test]
    fn the_smallest_cgroup_binds() {
        let system = System::new();
        system.write("/proc/meminfo", MEMINFO);
        system.write("/proc/self/cgroup", "0::/a\n");
        system.write("/proc/self/mountinfo", "41 31 0:38 / /cg rw - cgroup2 cgroup2 rw\n");
        system.write("/cg/a/memory.max", "4096000\n");
        system.write("/cg/a/memory.current", "96000\n");
        let found = available_under(system.root(), 1).unwrap();
        assert_eq!(found.binding, Room { bytes: 4_000_000, what: "cgroup v2 /a".into() });
        assert_eq!(found.bytes, 4_000_000);
        assert_eq!(found.rooms.len(), 2);
    }

    #[test]
    fn this_machine_has_room() {
        let found = available().unwrap();
        assert!(found.bytes > 0);
        assert!(found.rooms.contains(&found.binding));
        assert_eq!(found.rooms[0].what, "host MemAvailable");
    }
}
