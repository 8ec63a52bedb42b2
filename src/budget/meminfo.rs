//! How much memory may still be taken: the smallest room that the host and every cgroup leave.

use std::path::{Path, PathBuf};

use super::cgroup::{GroupId, Groups, OomKills};
use super::room::{Promised, Room, read};
use crate::error::{Error, Kind, Result};

/// The room under every limit that was found, and the one that leaves the least, which binds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Availability {
    /// Bytes that may still be allocated under `binding`, promised ones included.
    pub bytes: u64,
    /// The limit with the least room that is promised to nobody. Of equals, the first found, so that the host's comes
    /// first.
    pub binding: Room,
    /// The same if every dirty page of files under those limits were written already: what is missing to
    /// this is there in a moment.
    pub when_written_bytes: u64,
    /// Every limit that was found, the host's first, then the cgroups from ours upwards.
    pub rooms: Vec<Room>,
    /// Limit files that exist but could not be read, each with the reason; their limits are not counted.
    pub unread: Vec<String>,
}

impl Availability {
    /// The least of `rooms`, which are not empty.
    pub fn of(rooms: Vec<Room>) -> Availability {
        // `min_by_key` gives the first of equals.
        let binding = rooms.iter().min_by_key(|room| room.unpromised_bytes()).cloned();
        let binding = binding.expect("the host's room is always among the rooms");
        Availability {
            bytes: binding.bytes,
            when_written_bytes: binding.bytes,
            binding,
            rooms,
            unread: Vec::new(),
        }
    }

    /// The same beside `promises`, each of which takes from the rooms that it counts under. Another limit may bind
    /// then.
    pub fn beside(self, promises: &[Promised]) -> Availability {
        let rooms = self.rooms.into_iter().map(|room| room.beside(promises)).collect();
        let Availability { when_written_bytes, unread, .. } = self;
        Availability { when_written_bytes, unread, ..Availability::of(rooms) }
    }

    /// What is available under every limit and promised to nobody.
    pub fn unpromised_bytes(&self) -> u64 {
        self.binding.unpromised_bytes()
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

    /// Every control group that memory of this process is charged to, its own and those above, whether they have a
    /// limit today or not; `None` where they cannot all be seen.
    pub fn charged_groups(&self) -> Option<&[GroupId]> {
        self.groups.charged_ids()
    }

    fn host_rooms(&self) -> Result<Vec<Room>> {
        let path = PathBuf::from("/proc/meminfo");
        let text = read(&self.root, &path).map_err(|cause| Error::io("read", &path, &cause))?;
        let bytes = field(&text, "MemAvailable").ok_or_else(|| {
            Error::new(Kind::Failed, "/proc/meminfo has no MemAvailable: the room on this host is unknown")
                .hint("mount /proc of a Linux kernel 3.14 or newer")
        })?;
        let mut rooms = vec![Room::of_all(bytes, "host MemAvailable")];
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
    let bytes = limit.saturating_sub(committed);
    Some(Room::of_all(bytes, "host CommitLimit (vm.overcommit_memory is 2)"))
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
        assert_eq!(found.binding, Room::of_all(24295328 * 1024, "host MemAvailable"));
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
        assert_eq!((found.binding.bytes, found.binding.what.as_str()), (4_000_000, "cgroup v2 /a"));
        assert_eq!(found.bytes, 4_000_000);
        assert_eq!(found.rooms.len(), 2);
    }

    /// `/a/b` of a system where `/a` has a limit, and what is found by a process in it.
    fn nested(system: &System) -> Limits {
        system.write("/proc/meminfo", MEMINFO);
        system.write("/proc/self/cgroup", "0::/a/b\n");
        system.write("/proc/self/mountinfo", "41 31 0:38 / /cg rw - cgroup2 cgroup2 rw\n");
        system.write("/cg/cgroup.procs", "");
        for (directory, limit) in [("/cg/a", "5000000\n"), ("/cg/a/b", "4000000\n")] {
            system.write(&format!("{directory}/memory.max"), limit);
            system.write(&format!("{directory}/memory.current"), "0\n");
        }
        Limits::find_under(system.root(), 1)
    }

    #[test]
    fn what_is_promised_elsewhere_takes_nothing_from_a_group() {
        let system = System::new();
        let mut limits = nested(&system);
        let [b, a, root] = limits.charged_groups().unwrap() else { panic!("{limits:?}") };
        let sibling = GroupId { inode: u64::MAX, ..*b };
        let beside = |groups: &[GroupId], bytes| {
            let promised = Promised { bytes, groups: Some(groups.to_vec()) };
            let found = Limits::find_under(system.root(), 1).available().unwrap().beside(&[promised]);
            (found.binding.what.clone(), found.bytes, found.unpromised_bytes())
        };
        let b_binds = |free| ("cgroup v2 /a/b".to_owned(), 4_000_000, free);
        assert_eq!(beside(&[sibling, *root], 3_000_000), b_binds(4_000_000));
        assert_eq!(beside(&[*b, *a, *root], 3_000_000), b_binds(1_000_000));
        // Beside each other under the limit of /a, which binds then.
        assert_eq!(
            beside(&[sibling, *a, *root], 3_000_000),
            ("cgroup v2 /a".to_owned(), 5_000_000, 2_000_000)
        );
        // The host's room is everybody's.
        let host = 24295328 * 1024;
        assert_eq!(beside(&[sibling], host - 7), ("host MemAvailable".to_owned(), host, 7));
        let unknown = Promised { bytes: 4_500_000, groups: None };
        let found = limits.available().unwrap().beside(&[unknown]);
        assert_eq!((found.unpromised_bytes(), found.when_written_bytes), (0, 4_000_000));
    }

    #[test]
    fn this_machine_has_room() {
        let found = available().unwrap();
        assert!(found.bytes > 0);
        assert!(found.rooms.contains(&found.binding));
        assert_eq!(found.rooms[0].what, "host MemAvailable");
    }
}
