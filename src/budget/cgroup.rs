//! The memory limits of the control groups above this process, for v1, v2 and both side by side.
//!
//! A process stands in one group of each hierarchy, and the limit of every ancestor holds for it too.
//! `/proc/self/cgroup` names the group, `/proc/self/mountinfo` says where the hierarchy can be seen and
//! from which of its groups downwards. In a container the upper part is hidden: what is visible there is
//! read, and of v1 the kernel tells the smallest limit of the hidden part too.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
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

/// The page cache in a `memory.stat`. Shared memory is on other lists: a cache of ours is no part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FilePages {
    /// Bytes that the kernel can drop at once when the group meets its limit.
    pub clean_bytes: u64,
    /// Bytes that it can drop after they were written: dirty ones, and those being written.
    pub unwritten_bytes: u64,
}

/// Reads the page cache of a group and all below it from its `memory.stat`.
pub fn parse_file_pages(version: Version, stat: &str) -> FilePages {
    let (files, unwritten) = match version {
        Version::V1 => (["total_inactive_file", "total_active_file"], ["total_dirty", "total_writeback"]),
        Version::V2 => (["inactive_file", "active_file"], ["file_dirty", "file_writeback"]),
    };
    let sum = |names: [&str; 2]| {
        names.iter().fold(0u64, |sum, name| sum.saturating_add(stat_value(stat, name).unwrap_or(0)))
    };
    let (files, unwritten) = (sum(files), sum(unwritten));
    FilePages { clean_bytes: files.saturating_sub(unwritten), unwritten_bytes: unwritten.min(files) }
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

/// A control group as the kernel numbers it: by the inode of its directory, which is the same for every process,
/// however much of the hierarchy it sees and under which path. Each hierarchy has numbers of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupId {
    /// Of which hierarchy.
    pub version: Version,
    /// The inode of its directory.
    pub inode: u64,
}

/// One control group that this process or an ancestor of its group is in.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    version: Version,
    /// `None` where its directory cannot be seen.
    id: Option<GroupId>,
    /// Seen from the root of our cgroup namespace.
    path: String,
    directory: PathBuf,
    /// Nothing above it can be seen through its mount.
    topmost: bool,
}

impl Group {
    fn named(&self) -> String {
        named(self.version, &self.path)
    }

    /// How many names its path has.
    fn depth(&self) -> usize {
        self.path.split('/').filter(|part| !part.is_empty()).count()
    }
}

/// A group for messages.
fn named(version: Version, mut path: &str) -> String {
    // Levels above our namespace have no names; what was found below them reads better alone.
    while let Some(rest) = path.strip_prefix("/..").filter(|rest| rest.is_empty() || rest.starts_with('/')) {
        path = rest;
    }
    format!("{version} {}", shown(if path.is_empty() { "/" } else { path }))
}

/// What one limit leaves now, and what it would leave if every page of the group's files were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Allowed {
    /// What it leaves now.
    pub(super) room: Room,
    /// Bytes more that it leaves once they are written.
    pub(super) unwritten_bytes: u64,
}

fn allows(limit: u64, usage: u64, pages: FilePages, what: String, group: Option<GroupId>) -> Allowed {
    let bytes = room_bytes(limit, usage, pages.clean_bytes);
    Allowed { room: Room { group, ..Room::of_all(bytes, what) }, unwritten_bytes: pages.unwritten_bytes }
}

/// Our group and its ancestors as far as one mount shows them, ours first.
#[derive(Debug, Default)]
struct Walk {
    groups: Vec<Group>,
    /// It begins at our group and ends where nothing above is charged.
    is_whole: bool,
}

impl Walk {
    /// All groups that are charged, where these are all.
    fn ids(&self) -> Option<Vec<GroupId>> {
        self.is_whole.then(|| self.groups.iter().map(|group| group.id).collect())?
    }
}

/// The groups whose limits hold for one process: found once, so that a look reads their numbers alone.
#[derive(Debug)]
pub(super) struct Groups {
    root: PathBuf,
    pid: u32,
    /// `/proc/self/cgroup` as it was when they were found.
    membership: String,
    groups: Vec<Group>,
    charged: Option<String>,
    /// Every group that is charged; `None` where they cannot all be seen.
    charged_ids: Option<Vec<GroupId>>,
}

/// How often the kernel's OOM killer ended a process of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomKills {
    /// How often, since the group was made.
    pub count: u64,
    /// The file that says so.
    pub counted_in: PathBuf,
}

/// Reads `memory.events` of v2 or `memory.oom_control` of v1.
pub fn parse_oom_kills(text: &str) -> Option<u64> {
    stat_value(text, "oom_kill")
}

impl Groups {
    /// Finds the groups of process `pid`, ours of each hierarchy first, on the system whose files stand under
    /// `root`. What exists but cannot be read goes to `unread`.
    pub(super) fn find(root: &Path, pid: u32, unread: &mut Vec<String>) -> Groups {
        Groups::find_of(root, pid, Path::new(MEMBERSHIP), unread)
    }

    /// The same for the process that `membership` tells of, such as `/proc/4711/cgroup`.
    fn find_of(root: &Path, pid: u32, membership: &Path, unread: &mut Vec<String>) -> Groups {
        let mut files = Files { root, unread };
        // A kernel without control groups has neither file.
        let text = files.read(membership).unwrap_or_default();
        let mounts = files.read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
        let membership = parse_membership(&text);
        // The controller is in one hierarchy alone.
        let charging = if membership.v1.is_some() { Version::V1 } else { Version::V2 };
        let mut groups: Vec<Group> = Vec::new();
        let mut charged_ids = None;
        for mount in parse_mounts(&mounts) {
            let walk = files.walk(&mount, &membership, pid);
            if mount.version == charging {
                charged_ids = charged_ids.or_else(|| walk.ids());
            }
            for group in walk.groups {
                // A hierarchy may be mounted several times, each time showing another part of it.
                let is_known = |known: &Group| (known.version, &known.path) == (group.version, &group.path);
                if !groups.iter().any(is_known) && files.has_limits(&group) {
                    groups.push(group);
                }
            }
        }
        let charged = charged(&membership, &groups);
        Groups { root: root.to_owned(), pid, membership: text, groups, charged, charged_ids }
    }

    /// Finds them anew where the process was moved to another group since.
    pub(super) fn follow(&mut self, unread: &mut Vec<String>) {
        if read(&self.root, Path::new(MEMBERSHIP)).is_ok_and(|now| now != self.membership) {
            *self = Groups::find(&self.root, self.pid, unread);
        }
    }

    /// What each of their limits leaves now.
    pub(super) fn allowed(&self, unread: &mut Vec<String>) -> Vec<Allowed> {
        let mut files = Files { root: &self.root, unread };
        self.groups.iter().flat_map(|group| files.group_allows(group)).collect()
    }

    /// The OOM kills in the group that memory of this process is charged to, where the kernel counts them.
    pub(super) fn oom_kills(&self) -> Option<OomKills> {
        let group = nearest(&self.groups)?;
        let name = match group.version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        let counted_in = group.directory.join(name);
        let count = parse_oom_kills(&read(&self.root, &counted_in).ok()?)?;
        Some(OomKills { count, counted_in })
    }

    /// The group that the memory of this process is charged to, `None` where the kernel counts none.
    pub(super) fn charged(&self) -> Option<&str> {
        self.charged.as_deref()
    }

    /// That group and all above it, with a limit or without; `None` where they cannot all be seen.
    pub(super) fn charged_ids(&self) -> Option<&[GroupId]> {
        self.charged_ids.as_deref()
    }
}

const MEMBERSHIP: &str = "/proc/self/cgroup";

/// The groups with limits that another process is in, or below, as far as they can be seen from here: what it
/// gives back counts under these.
pub fn groups_of(pid: u32) -> Vec<GroupId> {
    let membership = PathBuf::from(format!("/proc/{pid}/cgroup"));
    let found = Groups::find_of(Path::new("/"), pid, &membership, &mut Vec::new());
    found.groups.iter().filter_map(|group| group.id).collect()
}

/// Of the groups whose limits hold, ours first, the one that is charged: of the v1 hierarchy with the memory
/// controller, where there is one; in the unified hierarchy the nearest for which the controller is enabled.
fn nearest(groups: &[Group]) -> Option<&Group> {
    let of = |version| {
        groups.iter().filter(move |group| group.version == version).max_by_key(|group| group.depth())
    };
    of(Version::V1).or_else(|| of(Version::V2))
}

fn charged(membership: &Membership, groups: &[Group]) -> Option<String> {
    // Told also where its directory can't be seen.
    if let Some(path) = &membership.v1 {
        return Some(named(Version::V1, path));
    }
    let path = membership.v2.as_deref()?;
    // The hierarchy's own root has no limits, and so no such files.
    Some(nearest(groups).map_or_else(|| named(Version::V2, path), Group::named))
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
        self.at(&group.directory.join(name)).exists()
    }

    fn walk(&mut self, mount: &Mount, membership: &Membership, pid: u32) -> Walk {
        let ours = match mount.version {
            Version::V1 => &membership.v1,
            Version::V2 => &membership.v2,
        };
        let Some(ours) = ours else { return Walk::default() };
        let found = match relation(&mount.root, ours) {
            Relation::Below(parts) => Some(parts),
            Relation::SomewhereBelow { levels, rest } => {
                find_group(&self.at(&mount.point), levels, &rest, pid)
            }
            Relation::Unrelated => return Walk::default(),
        };
        let is_ours_found = found.is_some();
        // If our group is not found, at least the top of the mount is known to be above us.
        let below = found.unwrap_or_default();
        let mut groups = Vec::new();
        let mut is_end_seen = self.is_top(mount);
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
            let id = self.id(mount.version, &directory);
            let group = Group { version: mount.version, id, path, directory, topmost: depth == 0 };
            // A v1 group without hierarchical accounting does not limit the groups below it.
            let limits_us = depth == below.len() || self.is_hierarchical(&group);
            if !limits_us {
                is_end_seen = true;
                break;
            }
            groups.push(group);
        }
        Walk { groups, is_whole: is_ours_found && is_end_seen }
    }

    fn id(&self, version: Version, directory: &Path) -> Option<GroupId> {
        let inode = std::fs::metadata(self.at(directory)).ok()?.ino();
        Some(GroupId { version, inode })
    }

    /// Whether `mount` shows the hierarchy from its very root, and not from the root of a namespace or the part that
    /// a container is given: these have the same path and other files.
    fn is_top(&self, mount: &Mount) -> bool {
        let has = |name: &str| self.at(&mount.point.join(name)).try_exists();
        match mount.version {
            // Stands in the root alone.
            Version::V1 => has("release_agent").unwrap_or(false),
            // Stands everywhere but in the root.
            Version::V2 => has("cgroup.procs").unwrap_or(false) && matches!(has("cgroup.events"), Ok(false)),
        }
    }

    fn is_hierarchical(&mut self, group: &Group) -> bool {
        group.version == Version::V2
            || self.read(&group.directory.join("memory.use_hierarchy")).is_none_or(|flag| flag.trim() != "0")
    }

    fn at(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn group_allows(&mut self, group: &Group) -> Vec<Allowed> {
        let mut allowed = match group.version {
            Version::V1 => self.v1_allows(group),
            Version::V2 => self.v2_allows(group),
        };
        // Of equal limits on one group the first names it best: a hidden ancestor matters only where it
        // leaves less.
        allowed.dedup_by(|later, earlier| later.room.bytes >= earlier.room.bytes);
        allowed
    }

    fn v1_allows(&mut self, group: &Group) -> Vec<Allowed> {
        let limit = self.limit(group, "memory.limit_in_bytes");
        // Memory and swap together: pages that were swapped out count here and not above.
        let with_swap = self.limit(group, "memory.memsw.limit_in_bytes");
        if limit.or(with_swap).is_none() && !group.topmost {
            return Vec::new();
        }
        let stat = self.read(&group.directory.join("memory.stat")).unwrap_or_default();
        let pages = parse_file_pages(group.version, &stat);
        let usage = self.number(group, "memory.usage_in_bytes");
        let mut allowed =
            Vec::from_iter(limit.map(|limit| allows(limit, usage, pages, group.named(), group.id)));
        // Of the hidden ancestor only the limit is told. Its usage is at least ours, so that this is the
        // most that it can leave.
        if group.topmost
            && let Some(limit) = parse_hierarchical_limit(&stat)
        {
            let what = format!("a hidden ancestor of {}", group.named());
            allowed.push(allows(limit, usage, pages, what, None));
        }
        if let Some(limit) = with_swap {
            let usage = self.number(group, "memory.memsw.usage_in_bytes");
            let what = format!("{} (memory and swap)", group.named());
            allowed.push(allows(limit, usage, pages, what, group.id));
        }
        allowed
    }

    fn v2_allows(&mut self, group: &Group) -> Vec<Allowed> {
        // Above `memory.high` a group is not killed but slowed down until it hardly moves.
        let limits = [self.limit(group, "memory.max"), self.limit(group, "memory.high")];
        let Some(limit) = limits.into_iter().flatten().min() else { return Vec::new() };
        let stat = self.read(&group.directory.join("memory.stat")).unwrap_or_default();
        let usage = self.number(group, "memory.current");
        vec![allows(limit, usage, parse_file_pages(group.version, &stat), group.named(), group.id)]
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
pub(super) mod tests;
