//! The memory limits of the control groups above this process, for v1, v2 and both side by side.
//!
//! A process stands in one group of each hierarchy, and the limit of every ancestor holds for it too.
//! `/proc/self/cgroup` names the group, `/proc/self/mountinfo` says where the hierarchy can be seen and
//! from which of its groups downwards. In a container the upper part is hidden: what is visible there is
//! read, and of v1 the kernel tells the smallest limit of the hidden part too.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::room::{Room, read};
use crate::error::{reason, shown};

/// From here on a v1 limit means "none". The kernel prints the largest multiple of its page size that it
/// can count, 9223372036854771712 with pages of 4 KiB and less with pages of 64 KiB.
const UNLIMITED_V1: u64 = i64::MAX as u64 & !0xffff;

/// How many directories are looked at to find our own group where its path is not told.
const SEARCHED_GROUPS_MAX: usize = 10_000;

/// Which of the two interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// One hierarchy per controller; we look at the one with `memory`.
    V1,
    /// The unified hierarchy.
    V2,
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Version::V1 => "cgroup v1",
            Version::V2 => "cgroup v2",
        })
    }
}

/// Where a process stands, as `/proc/self/cgroup` tells it: the path of its group in each hierarchy that
/// can limit memory, seen from the root of its cgroup namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Membership {
    /// In the v1 hierarchy with the memory controller.
    pub v1: Option<String>,
    /// In the unified hierarchy.
    pub v2: Option<String>,
}

/// Reads `/proc/self/cgroup`. Lines of another form are passed over.
pub fn parse_membership(text: &str) -> Membership {
    let mut membership = Membership::default();
    for line in text.lines() {
        // A path may contain colons, the two fields before it never do.
        let mut fields = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        if id == "0" && controllers.is_empty() {
            membership.v2 = Some(path.to_owned());
        } else if controllers.split(',').any(|controller| controller == "memory") {
            membership.v1 = Some(path.to_owned());
        }
    }
    membership
}

/// One mount of a hierarchy that can limit memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Which interface it offers.
    pub version: Version,
    /// The group that its top directory shows, seen from the root of our cgroup namespace; `/..` is the
    /// parent of that root.
    pub root: String,
    /// Its top directory.
    pub point: PathBuf,
}

/// Reads `/proc/self/mountinfo`: the mounts of the unified hierarchy and of v1 with the memory controller.
pub fn parse_mounts(text: &str) -> Vec<Mount> {
    text.lines().filter_map(parse_mount).collect()
}

fn parse_mount(line: &str) -> Option<Mount> {
    // Optional fields, as many as there are, end with a lone dash.
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let root = unescape(place.next()?);
    let point = PathBuf::from(unescape(place.next()?));
    let mut kind = kind.split(' ');
    let version = match kind.next()? {
        "cgroup2" => Version::V2,
        "cgroup" if kind.nth(1)?.split(',').any(|option| option == "memory") => Version::V1,
        _ => return None,
    };
    Some(Mount { version, root, point })
}

/// Undoes mountinfo's `\040` for a blank, and the same for tab, newline, backslash and `#`.
fn unescape(field: &str) -> String {
    let mut text = String::with_capacity(field.len());
    let mut rest = field;
    while let Some(at) = rest.find('\\') {
        text.push_str(&rest[..at]);
        let code = rest.get(at + 1..at + 4).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) if code.is_ascii() => {
                text.push(char::from(code));
                rest = &rest[at + 4..];
            }
            _ => {
                text.push('\\');
                rest = &rest[at + 1..];
            }
        }
    }
    text.push_str(rest);
    text
}

/// Reads a limit file of either version: `max` and v1's largest number are no limit, and neither is what
/// is no number.
pub fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|limit| *limit < UNLIMITED_V1)
}

/// The bytes of page cache in a `memory.stat` that the kernel can drop at once when the group meets its
/// limit: file pages that are neither dirty nor being written. Shared memory is on other lists.
pub fn parse_reclaimable(version: Version, stat: &str) -> u64 {
    let (files, unclean) = match version {
        Version::V1 => (["total_inactive_file", "total_active_file"], ["total_dirty", "total_writeback"]),
        Version::V2 => (["inactive_file", "active_file"], ["file_dirty", "file_writeback"]),
    };
    let sum = |names: [&str; 2]| {
        names.iter().fold(0u64, |sum, name| sum.saturating_add(stat_value(stat, name).unwrap_or(0)))
    };
    sum(files).saturating_sub(sum(unclean))
}

/// The smallest v1 limit of a group and all its ancestors, hidden ones too, from its `memory.stat`.
pub fn parse_hierarchical_limit(stat: &str) -> Option<u64> {
    stat_value(stat, "hierarchical_memory_limit").filter(|limit| *limit < UNLIMITED_V1)
}

fn stat_value(stat: &str, name: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// What a limit leaves, where `reclaimable` bytes of the usage go when room is wanted. A group may stand
/// above its limit: usage is counted in batches, and a limit can be lowered.
fn room_bytes(limit: u64, usage: u64, reclaimable: u64) -> u64 {
    limit.saturating_sub(usage.saturating_sub(reclaimable))
}

/// One control group that this process or an ancestor of its group is in.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    version: Version,
    /// Seen from the root of our cgroup namespace.
    path: String,
    directory: PathBuf,
    /// Nothing above it can be seen through its mount.
    topmost: bool,
}

impl Group {
    fn named(&self) -> String {
        // Levels above our namespace have no names; what was found below them reads better alone.
        let mut path = self.path.as_str();
        while let Some(rest) =
            path.strip_prefix("/..").filter(|rest| rest.is_empty() || rest.starts_with('/'))
        {
            path = rest;
        }
        format!("{} {}", self.version, shown(if path.is_empty() { "/" } else { path }))
    }
}

/// The room under each limit of the groups of process `pid`, on the system whose files stand under `root`.
/// What exists but cannot be read goes to `unread`.
pub(super) fn rooms(root: &Path, pid: u32, unread: &mut Vec<String>) -> Vec<Room> {
    let mut files = Files { root, unread };
    // A kernel without control groups has neither file.
    let Some(membership) = files.read(Path::new("/proc/self/cgroup")) else { return Vec::new() };
    let Some(mounts) = files.read(Path::new("/proc/self/mountinfo")) else { return Vec::new() };
    let membership = parse_membership(&membership);
    let mut seen: Vec<(Version, String)> = Vec::new();
    let mut rooms = Vec::new();
    for mount in parse_mounts(&mounts) {
        for group in files.groups(&mount, &membership, pid) {
            let key = (group.version, group.path.clone());
            // A hierarchy may be mounted several times, each time showing another part of it.
            if !seen.contains(&key) && files.has_limits(&group) {
                seen.push(key);
                rooms.extend(files.group_rooms(&group));
            }
        }
    }
    rooms
}

/// The kernel's files under a root, and what of them could not be read.
struct Files<'a> {
    root: &'a Path,
    unread: &'a mut Vec<String>,
}

impl Files<'_> {
    /// A file's text, `None` where it does not exist, its group was just removed, or it is not for us.
    fn read(&mut self, path: &Path) -> Option<String> {
        match read(self.root, path) {
            Ok(text) => Some(text),
            Err(cause) => {
                if !is_absence(&cause) {
                    self.unread.push(format!("{}: {}", shown(path), reason(&cause)));
                }
                None
            }
        }
    }

    fn has_limits(&self, group: &Group) -> bool {
        let name = match group.version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        };
        let path = group.directory.join(name);
        self.root.join(path.strip_prefix("/").unwrap_or(&path)).exists()
    }

    /// Our group and its ancestors as far as `mount` shows them, ours first.
    fn groups(&mut self, mount: &Mount, membership: &Membership, pid: u32) -> Vec<Group> {
        let ours = match mount.version {
            Version::V1 => &membership.v1,
            Version::V2 => &membership.v2,
        };
        let Some(ours) = ours else { return Vec::new() };
        let below = match relation(&mount.root, ours) {
            Relation::Below(parts) => parts,
            // Our group is somewhere below: if it is not found, at least the top of the mount is known
            // to be above us.
            Relation::SomewhereBelow { levels, rest } => {
                find_group(&self.at(&mount.point), levels, &rest, pid).unwrap_or_default()
            }
            Relation::Unrelated => return Vec::new(),
        };
        let mut groups = Vec::new();
        for depth in (0..=below.len()).rev() {
            let mut path = mount.root.trim_end_matches('/').to_owned();
            let mut directory = mount.point.clone();
            for part in &below[..depth] {
                path = format!("{path}/{part}");
                directory.push(part);
            }
            if path.is_empty() {
                path.push('/');
            }
            let group = Group { version: mount.version, path, directory, topmost: depth == 0 };
            // A v1 group without hierarchical accounting does not limit the groups below it.
            let limits_us = depth == below.len() || self.is_hierarchical(&group);
            if !limits_us {
                break;
            }
            groups.push(group);
        }
        groups
    }

    fn is_hierarchical(&mut self, group: &Group) -> bool {
        group.version == Version::V2
            || self.read(&group.directory.join("memory.use_hierarchy")).is_none_or(|flag| flag.trim() != "0")
    }

    fn at(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn group_rooms(&mut self, group: &Group) -> Vec<Room> {
        let stat = self.read(&group.directory.join("memory.stat")).unwrap_or_default();
        let reclaimable = parse_reclaimable(group.version, &stat);
        let mut rooms = Vec::new();
        match group.version {
            Version::V1 => {
                let usage = self.number(group, "memory.usage_in_bytes");
                if let Some(limit) = self.limit(group, "memory.limit_in_bytes") {
                    rooms.push(Room { bytes: room_bytes(limit, usage, reclaimable), what: group.named() });
                }
                // Of the hidden ancestor only the limit is told. Its usage is at least ours, so that this
                // is the most that it can leave.
                if group.topmost
                    && let Some(limit) = parse_hierarchical_limit(&stat)
                {
                    let what = format!("a hidden ancestor of {}", group.named());
                    rooms.push(Room { bytes: room_bytes(limit, usage, reclaimable), what });
                }
                // Memory and swap together: pages that were swapped out count here and not above.
                if let Some(limit) = self.limit(group, "memory.memsw.limit_in_bytes") {
                    let usage = self.number(group, "memory.memsw.usage_in_bytes");
                    let what = format!("{} (memory and swap)", group.named());
                    rooms.push(Room { bytes: room_bytes(limit, usage, reclaimable), what });
                }
            }
            Version::V2 => {
                let usage = self.number(group, "memory.current");
                // Above `memory.high` a group is not killed but slowed down until it hardly moves.
                let limits = [self.limit(group, "memory.max"), self.limit(group, "memory.high")];
                if let Some(limit) = limits.into_iter().flatten().min() {
                    rooms.push(Room { bytes: room_bytes(limit, usage, reclaimable), what: group.named() });
                }
            }
        }
        // Of equal limits on one group the first names it best: a hidden ancestor matters only where it
        // leaves less.
        rooms.dedup_by(|later, earlier| later.bytes >= earlier.bytes);
        rooms
    }

    fn limit(&mut self, group: &Group, name: &str) -> Option<u64> {
        parse_limit(&self.read(&group.directory.join(name))?)
    }

    /// A usage; where it cannot be read it is taken for 0, so that at least the limit itself holds.
    fn number(&mut self, group: &Group, name: &str) -> u64 {
        self.read(&group.directory.join(name)).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }
}

/// Whether a file is simply not there: no such group, controller not enabled, group removed meanwhile.
fn is_absence(cause: &io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ENODEV))
}

/// How our group lies to the group that a mount shows at its top.
#[derive(Debug, PartialEq, Eq)]
enum Relation {
    /// That many parts below it, none where it is the same.
    Below(Vec<String>),
    /// The top lies above the root of our namespace: `levels` names that nobody tells, then `rest`.
    SomewhereBelow { levels: usize, rest: Vec<String> },
    /// Not below it, so that its limits do not concern us.
    Unrelated,
}

fn relation(mount_root: &str, ours: &str) -> Relation {
    let parts = |path: &str| -> Vec<String> {
        path.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect()
    };
    let (top, ours) = (parts(mount_root), parts(ours));
    if let Some(below) = ours.strip_prefix(top.as_slice()) {
        // We were moved out of our namespace's root: "/../other" is beside the top, not below it.
        if below.first().is_some_and(|part| part == "..") {
            return Relation::Unrelated;
        }
        return Relation::Below(below.to_vec());
    }
    let climbs = ours.iter().take_while(|part| *part == "..").count();
    if top.iter().all(|part| part == "..") && top.len() > climbs {
        return Relation::SomewhereBelow { levels: top.len() - climbs, rest: ours[climbs..].to_vec() };
    }
    Relation::Unrelated
}

/// The parts of the group of `pid`, which lies `rest` below a directory that is `levels` below `top`.
fn find_group(top: &Path, levels: usize, rest: &[String], pid: u32) -> Option<Vec<String>> {
    let mut budget = SEARCHED_GROUPS_MAX;
    let mut level: Vec<Vec<String>> = vec![Vec::new()];
    for _ in 0..levels {
        let mut next = Vec::new();
        for parts in &level {
            let directory = parts.iter().fold(top.to_owned(), |path, part| path.join(part));
            for entry in std::fs::read_dir(directory).ok().into_iter().flatten().flatten() {
                budget = budget.checked_sub(1)?;
                if let (true, Ok(name)) =
                    (entry.file_type().is_ok_and(|kind| kind.is_dir()), entry.file_name().into_string())
                {
                    next.push(parts.iter().cloned().chain([name]).collect());
                }
            }
        }
        level = next;
    }
    let pid = pid.to_string();
    level.into_iter().map(|parts| [parts, rest.to_vec()].concat()).find(|parts| {
        let directory = parts.iter().fold(top.to_owned(), |path, part| path.join(part));
        std::fs::read_to_string(directory.join("cgroup.procs"))
            .is_ok_and(|pids| pids.lines().any(|line| line == pid))
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A directory that stands for `/` of a system.
    pub(in crate::budget) struct System(tempfile::TempDir);

    impl System {
        pub(in crate::budget) fn new() -> System {
            System(tempfile::tempdir().unwrap())
        }

        pub(in crate::budget) fn root(&self) -> &Path {
            self.0.path()
        }

        pub(in crate::budget) fn write(&self, path: &str, text: &str) {
            let path = self.root().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        fn v1(&self, directory: &str, limit: u64, usage: u64, stat: &str) {
            self.write(&format!("{directory}/memory.limit_in_bytes"), &format!("{limit}\n"));
            self.write(&format!("{directory}/memory.usage_in_bytes"), &format!("{usage}\n"));
            self.write(&format!("{directory}/memory.use_hierarchy"), "1\n");
            self.write(&format!("{directory}/memory.stat"), stat);
        }

        fn v2(&self, directory: &str, max: &str, high: &str, current: u64) {
            self.write(&format!("{directory}/memory.max"), &format!("{max}\n"));
            self.write(&format!("{directory}/memory.high"), &format!("{high}\n"));
            self.write(&format!("{directory}/memory.current"), &format!("{current}\n"));
        }

        fn found(&self) -> Vec<(u64, String)> {
            let mut unread = Vec::new();
            let found = rooms(self.root(), 4242, &mut unread);
            assert_eq!(unread, Vec::<String>::new());
            found.into_iter().map(|room| (room.bytes, room.what)).collect()
        }
    }

    const NONE_V1: u64 = 9223372036854771712;

    const HYBRID_CGROUP: &str = "9:name=systemd:/\n8:pids:/\n4:memory:/box/job\n1:cpu:/\n0::/slice\n";

    const HYBRID_MOUNTINFO: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:10 master:3 - cgroup2 cgroup2 rw
";

    const STAT_V1: &str = "\
cache 2342912
shmem 5000
inactive_file 11
active_file 22
unevictable 0
hierarchical_memory_limit 9223372036854771712
hierarchical_memsw_limit 9223372036854771712
total_cache 9000
total_shmem 5000
total_dirty 100
total_writeback 50
total_inactive_file 3000
total_active_file 1000
";

    #[test]
    fn membership_of_each_layout() {
        let hybrid = parse_membership(HYBRID_CGROUP);
        assert_eq!(hybrid, Membership { v1: Some("/box/job".into()), v2: Some("/slice".into()) });
        let unified = parse_membership("0::/user.slice/a:b.scope\n");
        assert_eq!(unified, Membership { v1: None, v2: Some("/user.slice/a:b.scope".into()) });
        let joined = parse_membership("3:cpuset,memory:/x\n2:name=memory:/no\n");
        assert_eq!(joined, Membership { v1: Some("/x".into()), v2: None });
        assert_eq!(parse_membership("rubbish\n1:2\n\n"), Membership::default());
    }

    #[test]
    fn mounts_of_each_layout() {
        let mounts = parse_mounts(HYBRID_MOUNTINFO);
        let found: Vec<_> =
            mounts.iter().map(|mount| (mount.version, mount.point.to_str().unwrap())).collect();
        assert_eq!(found, [(Version::V1, "/sys/fs/cgroup/memory"), (Version::V2, "/sys/fs/cgroup/unified")]);
        let odd = parse_mounts("1 2 0:3 /a\\040b /c\\134d\\x rw - cgroup2 cgroup2 rw\n");
        assert_eq!(odd[0].root, "/a b");
        assert_eq!(odd[0].point, Path::new("/c\\d\\x"));
        assert!(parse_mounts("1 2 0:3\n\n - cgroup2\n1 2 0:3 / /x rw - cgroup\n").is_empty());
    }

    #[test]
    fn no_limit_in_either_spelling() {
        assert_eq!(parse_limit("max\n"), None);
        assert_eq!(parse_limit("9223372036854771712\n"), None);
        assert_eq!(parse_limit("9223372036854710272\n"), None, "pages of 64 KiB");
        assert_eq!(parse_limit("18446744073709551615\n"), None);
        assert_eq!(parse_limit("1073741824\n"), Some(1 << 30));
        assert_eq!(parse_limit("0\n"), Some(0));
        assert_eq!(parse_limit("rubbish"), None);
        assert_eq!(parse_hierarchical_limit("a 1\nhierarchical_memory_limit 77\n"), Some(77));
        assert_eq!(parse_hierarchical_limit(STAT_V1), None);
    }

    #[test]
    fn clean_file_pages_are_room() {
        assert_eq!(parse_reclaimable(Version::V1, STAT_V1), 3850);
        let v2 = "anon 5\nfile 900\nshmem 300\nfile_dirty 10\nfile_writeback 5\ninactive_file 400\nactive_file 200\n";
        assert_eq!(parse_reclaimable(Version::V2, v2), 585);
        assert_eq!(parse_reclaimable(Version::V2, "file_dirty 10\ninactive_file 4\n"), 0);
        assert_eq!(parse_reclaimable(Version::V2, ""), 0);
        assert_eq!(room_bytes(100, 70, 20), 50);
        assert_eq!(room_bytes(100, 130, 20), 0);
        assert_eq!(room_bytes(100, 10, 20), 100, "the counters are read one after the other");
    }

    #[test]
    fn hybrid_counts_both_hierarchies_and_every_ancestor() {
        let system = System::new();
        system.write("/proc/self/cgroup", HYBRID_CGROUP);
        system.write("/proc/self/mountinfo", HYBRID_MOUNTINFO);
        system.v1("/sys/fs/cgroup/memory", NONE_V1, 77777, STAT_V1);
        system.v1("/sys/fs/cgroup/memory/box", 50000, 20000, STAT_V1);
        system.v1("/sys/fs/cgroup/memory/box/job", NONE_V1, 1000, "");
        // The unified hierarchy beside v1 has no memory controller: the files are missing.
        system.write("/sys/fs/cgroup/unified/slice/cgroup.procs", "4242\n");
        assert_eq!(system.found(), [(33850, "cgroup v1 /box".to_owned())]);
    }

    #[test]
    fn v1_memory_and_swap_binds_where_pages_are_swapped_out() {
        let system = System::new();
        system.write("/proc/self/cgroup", "4:memory:/a\n");
        system.write("/proc/self/mountinfo", HYBRID_MOUNTINFO);
        system.v1("/sys/fs/cgroup/memory/a", 1000, 200, "");
        system.write("/sys/fs/cgroup/memory/a/memory.memsw.limit_in_bytes", "1000\n");
        system.write("/sys/fs/cgroup/memory/a/memory.memsw.usage_in_bytes", "700\n");
        assert_eq!(
            system.found(),
            [(800, "cgroup v1 /a".to_owned()), (300, "cgroup v1 /a (memory and swap)".to_owned())]
        );
    }

    #[test]
    fn v1_without_hierarchy_ends_the_walk() {
        let system = System::new();
        system.write("/proc/self/cgroup", "4:memory:/a/b\n");
        system.write("/proc/self/mountinfo", HYBRID_MOUNTINFO);
        system.v1("/sys/fs/cgroup/memory/a", 10, 0, "");
        system.v1("/sys/fs/cgroup/memory/a/b", 500, 0, "");
        assert_eq!(system.found().len(), 2);
        system.write("/sys/fs/cgroup/memory/a/memory.use_hierarchy", "0\n");
        assert_eq!(system.found(), [(500, "cgroup v1 /a/b".to_owned())]);
    }

    #[test]
    fn a_container_of_v1_sees_its_own_group_and_the_hidden_limit() {
        let system = System::new();
        system.write("/proc/self/cgroup", "4:memory:/docker/abc/sub\n");
        system.write(
            "/proc/self/mountinfo",
            "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        );
        system.v1("/sys/fs/cgroup/memory", 9000, 1000, "hierarchical_memory_limit 6000\n");
        system.v1("/sys/fs/cgroup/memory/sub", NONE_V1, 10, "hierarchical_memory_limit 6000\n");
        assert_eq!(
            system.found(),
            [
                (8000, "cgroup v1 /docker/abc".to_owned()),
                (5000, "a hidden ancestor of cgroup v1 /docker/abc".to_owned())
            ]
        );
        system.v1("/sys/fs/cgroup/memory", 9000, 1000, "hierarchical_memory_limit 9000\n");
        assert_eq!(system.found(), [(8000, "cgroup v1 /docker/abc".to_owned())]);
    }

    #[test]
    fn v2_takes_the_smaller_of_max_and_high_at_every_level() {
        let system = System::new();
        system.write("/proc/self/cgroup", "0::/a/b/c\n");
        system.write(
            "/proc/self/mountinfo",
            "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n",
        );
        system.write("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
        system.v2("/sys/fs/cgroup/a", "8000", "5000", 1000);
        system.write("/sys/fs/cgroup/a/memory.stat", "inactive_file 300\nactive_file 200\nfile_dirty 100\n");
        system.v2("/sys/fs/cgroup/a/b", "max", "max", 900);
        system.v2("/sys/fs/cgroup/a/b/c", "7000", "max", 900);
        assert_eq!(
            system.found(),
            [(6100, "cgroup v2 /a/b/c".to_owned()), (4400, "cgroup v2 /a".to_owned())]
        );
    }

    #[test]
    fn the_root_of_a_namespace_is_a_group_with_limits() {
        let system = System::new();
        system.write("/proc/self/cgroup", "0::/\n");
        system.write("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
        system.v2("/sys/fs/cgroup", "4000", "max", 1500);
        assert_eq!(system.found(), [(2500, "cgroup v2 /".to_owned())]);
    }

    #[test]
    fn our_group_is_found_below_a_mount_from_outside_the_namespace() {
        let system = System::new();
        system.write("/proc/self/cgroup", "4:memory:/job\n0::/../other\n");
        system.write(
            "/proc/self/mountinfo",
            "35 31 0:32 /../.. /m rw - cgroup cgroup rw,memory\n36 31 0:33 / /u rw - cgroup2 cgroup2 rw\n",
        );
        for (group, limit) in [("/m/a/x/job", 100), ("/m/a/y/job", 200), ("/m/b/y/job", 300)] {
            system.v1(group, limit, 0, "");
        }
        system.v1("/m/a/y", 150, 0, "");
        system.write("/m/a/x/job/cgroup.procs", "42\n424\n");
        system.write("/m/a/y/job/cgroup.procs", "1\n4242\n9999\n");
        // The process was moved beside the root of its v2 namespace: nothing of that mount is above it.
        system.v2("/u", "5", "max", 0);
        assert_eq!(
            system.found(),
            [(200, "cgroup v1 /a/y/job".to_owned()), (150, "cgroup v1 /a/y".to_owned())]
        );
    }

    #[test]
    fn relations() {
        let below = |parts: &[&str]| Relation::Below(parts.iter().map(|part| part.to_string()).collect());
        assert_eq!(relation("/", "/"), below(&[]));
        assert_eq!(relation("/", "/a/b"), below(&["a", "b"]));
        assert_eq!(relation("/a", "/a/b"), below(&["b"]));
        assert_eq!(relation("/a", "/ab"), Relation::Unrelated);
        assert_eq!(relation("/a/b", "/a"), Relation::Unrelated);
        assert_eq!(relation("/", "/../a"), Relation::Unrelated);
        assert_eq!(relation("/..", "/../a"), below(&["a"]));
        assert_eq!(relation("/../x", "/"), Relation::Unrelated);
        assert_eq!(relation("/..", "/"), Relation::SomewhereBelow { levels: 1, rest: vec![] });
        assert_eq!(
            relation("/../..", "/../a"),
            Relation::SomewhereBelow { levels: 1, rest: vec!["a".to_owned()] }
        );
    }

    #[test]
    fn a_hierarchy_mounted_twice_counts_once() {
        let system = System::new();
        system.write("/proc/self/cgroup", "0::/a/b\n");
        system.write(
            "/proc/self/mountinfo",
            "1 0 0:1 /a/b /first rw - cgroup2 x rw\n2 0 0:1 / /second rw - cgroup2 x rw\n\
             3 0 0:1 /elsewhere /third rw - cgroup2 x rw\n",
        );
        system.v2("/first", "100", "max", 0);
        system.v2("/second/a/b", "100", "max", 0);
        system.v2("/second/a", "90", "max", 0);
        system.v2("/third", "1", "max", 0);
        assert_eq!(system.found(), [(100, "cgroup v2 /a/b".to_owned()), (90, "cgroup v2 /a".to_owned())]);
    }

    #[test]
    fn what_cannot_be_read_is_told() {
        let system = System::new();
        system.write("/proc/self/cgroup", "0::/a\n");
        system.write("/proc/self/mountinfo", "1 0 0:1 / /cg rw - cgroup2 x rw\n");
        // A directory in place of the file fails for root too.
        std::fs::create_dir_all(system.root().join("cg/a/memory.max")).unwrap();
        let mut unread = Vec::new();
        assert!(rooms(system.root(), 1, &mut unread).is_empty());
        assert_eq!(unread, ["/cg/a/memory.max: it is a directory"]);
    }
}
