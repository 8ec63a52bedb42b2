//! The parsers and the walk, on systems written into a directory.

use super::*;

/// The room under each limit of the groups of process `pid`.
fn rooms(root: &Path, pid: u32, unread: &mut Vec<String>) -> Vec<Room> {
    let allowed = Groups::find(root, pid, unread).allowed(unread);
    allowed.into_iter().map(|allowed| allowed.room).collect()
}

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
    let found: Vec<_> = mounts.iter().map(|mount| (mount.version, mount.point.to_str().unwrap())).collect();
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
    let pages = |clean_bytes, unwritten_bytes| FilePages { clean_bytes, unwritten_bytes };
    assert_eq!(parse_file_pages(Version::V1, STAT_V1), pages(3850, 150));
    let v2 =
        "anon 5\nfile 900\nshmem 300\nfile_dirty 10\nfile_writeback 5\ninactive_file 400\nactive_file 200\n";
    assert_eq!(parse_file_pages(Version::V2, v2), pages(585, 15));
    assert_eq!(parse_file_pages(Version::V2, "file_dirty 10\ninactive_file 4\n"), pages(0, 4));
    assert_eq!(parse_file_pages(Version::V2, ""), pages(0, 0));
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
    system.write("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n");
    system.write("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
    system.v2("/sys/fs/cgroup/a", "8000", "5000", 1000);
    system.write("/sys/fs/cgroup/a/memory.stat", "inactive_file 300\nactive_file 200\nfile_dirty 100\n");
    system.v2("/sys/fs/cgroup/a/b", "max", "max", 900);
    system.v2("/sys/fs/cgroup/a/b/c", "7000", "max", 900);
    assert_eq!(system.found(), [(6100, "cgroup v2 /a/b/c".to_owned()), (4400, "cgroup v2 /a".to_owned())]);
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
    assert_eq!(system.found(), [(200, "cgroup v1 /a/y/job".to_owned()), (150, "cgroup v1 /a/y".to_owned())]);
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

/// A system as a file of `tests/fixtures/cgroup` tells it: `== PATH`, then the text of that file. Process 4242 is
/// the one that looks.
fn system_of(fixture: &str) -> System {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/cgroup");
    let text = std::fs::read_to_string(directory.join(fixture)).unwrap();
    let system = System::new();
    for section in text.split("\n== ").skip(1) {
        let (path, content) = section.split_once('\n').unwrap();
        system.write(path, &format!("{}\n", content.trim_end()));
    }
    system
}

/// What is found on a system that was written down: each limit with its room, and the group that is charged.
#[track_caller]
fn expect(fixture: &str, rooms: &[(u64, &str)], charged: &str) {
    let system = system_of(fixture);
    let rooms: Vec<_> = rooms.iter().map(|(bytes, what)| (*bytes, what.to_string())).collect();
    assert_eq!(system.found(), rooms, "{fixture}");
    let groups = Groups::find(system.root(), 4242, &mut Vec::new());
    assert_eq!(groups.charged(), Some(charged), "{fixture}");
}

#[test]
fn systems_of_version_1() {
    let nested = [(258_306_048, "cgroup v1 /batch/job.1"), (526_942_208, "cgroup v1 /batch")];
    expect("hybrid-nested.txt", &nested, "cgroup v1 /batch/job.1/step");
    // Found by the process number below a mount that is older than the namespace.
    expect("v1-namespace.txt", &nested, "cgroup v1 /");
    let group =
        "cgroup v1 /libpod_parent/libpod-b1b4a8965a231d23f2deb83d2b885bc7cf9d6bface27479c52a2b1e49a69873a";
    expect("v1-container-bind.txt", &[(313_249_792, group)], group);
    expect("v1-container-private.txt", &[(313_303_040, "cgroup v1 /")], "cgroup v1 /");
    let group = "cgroup v1 /kubepods/burstable/pod6a1c2b8e-0d0d-4f39-9d7b-2f1f0a6f3c11/8f1d3f0f6c0f5c7f";
    let above = format!("a hidden ancestor of {group}");
    expect("v1-pod.txt", &[(8_065_646_592, &above)], group);
}

#[test]
fn systems_of_version_2() {
    let session = "/user.slice/user-1000.slice/user@1000.service/app.slice/run-r4c1f.scope";
    expect(
        "v2-user-session.txt",
        &[(10_690_271_744, "cgroup v2 /user.slice/user-1000.slice")],
        &format!("cgroup v2 {session}"),
    );
    expect("v2-unlimited.txt", &[], "cgroup v2 /system.slice");
    expect("v2-pod.txt", &[(2_679_111_680, "cgroup v2 /")], "cgroup v2 /");
}

#[test]
fn kills_are_counted_where_the_memory_is_charged() {
    let kills = |fixture| {
        let system = system_of(fixture);
        let kills = Groups::find(system.root(), 4242, &mut Vec::new()).oom_kills().unwrap();
        (kills.count, kills.counted_in.to_str().unwrap().to_owned())
    };
    assert_eq!(kills("v1-pod.txt"), (1, "/sys/fs/cgroup/memory/memory.oom_control".to_owned()));
    assert_eq!(kills("v2-pod.txt"), (3, "/sys/fs/cgroup/memory.events".to_owned()));
    assert_eq!(
        kills("hybrid-nested.txt"),
        (0, "/sys/fs/cgroup/memory/batch/job.1/step/memory.oom_control".to_owned())
    );
}

/// The inodes of directories, as groups that are charged.
fn ids(system: &System, version: Version, directories: &[&str]) -> Option<Vec<GroupId>> {
    let inode = |directory: &&str| system.root().join(directory).metadata().unwrap().ino();
    Some(directories.iter().map(|directory| GroupId { version, inode: inode(directory) }).collect())
}

fn charged_ids(system: &System) -> Option<Vec<GroupId>> {
    Groups::find(system.root(), 4242, &mut Vec::new()).charged_ids
}

#[test]
fn all_groups_that_are_charged_are_known_up_to_the_root_of_their_hierarchy() {
    let memory = "sys/fs/cgroup/memory";
    let nested = [
        &format!("{memory}/batch/job.1/step"),
        &format!("{memory}/batch/job.1"),
        &format!("{memory}/batch"),
        memory,
    ];
    for fixture in ["hybrid-nested.txt", "v1-namespace.txt"] {
        let system = system_of(fixture);
        assert_eq!(charged_ids(&system), None, "{fixture}: as if more were above");
        system.write(&format!("{memory}/release_agent"), "");
        assert_eq!(charged_ids(&system), ids(&system, Version::V1, &nested), "{fixture}");
        // Its own rooms are told apart from those of others, and what is hidden is not.
        let allowed = Groups::find(system.root(), 4242, &mut Vec::new()).allowed(&mut Vec::new());
        let rooms = allowed.iter().map(|allowed| allowed.room.group.unwrap()).collect::<Vec<_>>();
        assert_eq!(Some(rooms), ids(&system, Version::V1, &nested[1..3]), "{fixture}");
    }
    for hidden in ["v1-container-bind.txt", "v1-container-private.txt", "v1-pod.txt"] {
        assert_eq!(charged_ids(&system_of(hidden)), None, "{hidden}");
    }
    let allowed =
        Groups::find(system_of("v1-pod.txt").root(), 4242, &mut Vec::new()).allowed(&mut Vec::new());
    assert!(allowed.iter().all(|allowed| allowed.room.group.is_none()), "{allowed:?}");
}

#[test]
fn of_version_2_the_root_is_told_by_what_it_lacks() {
    let system = System::new();
    system.write("/proc/self/cgroup", "1:name=systemd:/x\n0::/a/b\n");
    let mount = |root: &str| {
        system.write("/proc/self/mountinfo", &format!("30 23 0:26 {root} /cg rw - cgroup2 cgroup2 rw\n"));
    };
    mount("/");
    // One without the controller today may have it tomorrow.
    for group in ["/cg", "/cg/a", "/cg/a/b"] {
        system.write(&format!("{group}/cgroup.procs"), "");
    }
    system.v2("/cg/a", "100", "max", 0);
    assert_eq!(charged_ids(&system), ids(&system, Version::V2, &["cg/a/b", "cg/a", "cg"]));
    // The root of a namespace has the same path.
    system.write("/cg/cgroup.events", "");
    assert_eq!(charged_ids(&system), None);
    std::fs::remove_file(system.root().join("cg/cgroup.events")).unwrap();
    // Mounted over: what stands there is no part of what was mounted.
    std::fs::remove_dir_all(system.root().join("cg/a/b")).unwrap();
    assert_eq!(charged_ids(&system), None);
    mount("/elsewhere");
    assert_eq!(charged_ids(&system), None, "nothing of it is visible");
    // Moved out of the namespace, and found by nobody.
    system.write("/proc/self/cgroup", "0::/../a\n");
    mount("/");
    assert_eq!(charged_ids(&system), None);
}

#[test]
fn beside_version_1_the_other_hierarchy_is_not_charged() {
    let system = System::new();
    system.write("/proc/self/cgroup", HYBRID_CGROUP);
    system.write("/proc/self/mountinfo", HYBRID_MOUNTINFO);
    system.write("/sys/fs/cgroup/unified/cgroup.procs", "");
    system.write("/sys/fs/cgroup/unified/slice/cgroup.procs", "4242\n");
    assert_eq!(charged_ids(&system), None, "its own group of version 1 is not there");
    system.v1("/sys/fs/cgroup/memory/box/job", 1000, 0, "");
    system.v1("/sys/fs/cgroup/memory/box", 1000, 0, "");
    system.write("/sys/fs/cgroup/memory/release_agent", "");
    let memory = ["sys/fs/cgroup/memory/box/job", "sys/fs/cgroup/memory/box", "sys/fs/cgroup/memory"];
    assert_eq!(charged_ids(&system), ids(&system, Version::V1, &memory));
    // Where accounting is not hierarchical, nothing above is charged, visible or not.
    system.write("/sys/fs/cgroup/memory/box/memory.use_hierarchy", "0\n");
    std::fs::remove_file(system.root().join("sys/fs/cgroup/memory/release_agent")).unwrap();
    assert_eq!(charged_ids(&system), ids(&system, Version::V1, &memory[..1]));
}

#[test]
fn pages_that_are_not_written_yet_are_told_apart() {
    let system = system_of("hybrid-nested.txt");
    let allowed = Groups::find(system.root(), 4242, &mut Vec::new()).allowed(&mut Vec::new());
    assert_eq!(allowed[0].unwritten_bytes, 8_396_800);
}

#[test]
fn a_process_that_was_moved_is_followed() {
    let system = System::new();
    system.write("/proc/self/cgroup", "0::/a\n");
    system.write("/proc/self/mountinfo", "1 0 0:1 / /cg rw - cgroup2 x rw\n");
    system.v2("/cg/a", "100", "max", 0);
    system.v2("/cg/b", "70", "max", 0);
    let mut groups = Groups::find(system.root(), 1, &mut Vec::new());
    let room = |groups: &Groups| groups.allowed(&mut Vec::new())[0].room.bytes;
    assert_eq!(room(&groups), 100);
    system.v2("/cg/a", "90", "max", 0);
    assert_eq!(room(&groups), 90, "a limit that is lowered is seen at the next look");
    system.write("/proc/self/cgroup", "0::/b\n");
    groups.follow(&mut Vec::new());
    assert_eq!((room(&groups), groups.charged()), (70, Some("cgroup v2 /b")));
}
