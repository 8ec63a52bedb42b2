//! A BASE without room, at every height: an error of its own kind and nothing half-made, or a cache that works.

use crate::harness::{Ran, Sandbox, skipped};
use crate::surroundings::in_own_mounts;

/// What the scripts share: "$@" starts the cache, `left` names what a command should not have left, and `try` says
/// how a start ended and stops what it started.
const SHARED: &str = r#"
    name=NAME
    left() {
        find "$MOUNT/b/run" -mindepth 1 -printf "left $1: %p\n" 2>/dev/null
        find "$MOUNT/b/views" -mindepth 2 -printf "left $1: %p\n" 2>/dev/null
    }
    try() {
        what=$1; stopped=0; shift
        "$@" >/dev/null; echo "$what: exit $?"
        if [ -e "$MOUNT/b/run/$name.json" ]; then
            cmp "$MODEL/config.json" "$MOUNT/b/views/$name/config.json" || echo "left $what: a bad view"
            stopped=1; "$ILOADER" stop "$name"; echo "$what: stop $?"
        fi
        [ ! -d "$MOUNT/b/logs" ] || [ $stopped = 0 ] || [ -d "$MOUNT/b/views/$name" ] || echo "left $what: no directory"
        left "$what"
    }
"#;

fn run(sandbox: &Sandbox, script: &str) -> Option<Ran> {
    let mount = sandbox.path("mount");
    std::fs::create_dir(&mount).unwrap();
    let model = sandbox.model();
    let variables = format!("MODEL='{}'\n{SHARED}", model.display()).replace("NAME", sandbox.name());
    let ran = in_own_mounts(sandbox, &mount, &format!("{variables}{script}"))?;
    if ran.code == Some(77) {
        skipped(format!("no such file system can be mounted: {}", ran.stderr.trim()));
        return None;
    }
    assert!(!ran.stdout.contains("left"), "{ran:#?}");
    Some(ran)
}

/// The exit codes of the lines `what N: exit CODE`, in order.
fn codes(ran: &Ran, what: &str) -> Vec<i32> {
    let lines = ran.stdout.lines().filter(|line| line.starts_with(what));
    lines.filter_map(|line| line.split_once(": exit ")?.1.parse().ok()).collect()
}

/// Too little room is exit 6, enough is 0, and there is one height between them.
fn is_a_threshold(ran: &Ran, what: &str, tried: usize) {
    let codes = codes(ran, what);
    assert_eq!(codes.len(), tried, "{ran:#?}");
    assert_eq!((codes[0], codes[tried - 1]), (6, 0), "{ran:#?}");
    assert!(codes.iter().all(|code| [0, 6].contains(code)) && codes.is_sorted_by(|a, b| a >= b), "{ran:#?}");
    assert!(ran.stderr.contains("no space left on the device (ENOSPC)"), "{ran:#?}");
    assert!(!ran.stdout.contains(": stop ") || ran.stdout.contains(": stop 0"), "{ran:#?}");
    assert!(!ran.stdout.lines().any(|line| line.contains(": stop ") && !line.ends_with(" 0")), "{ran:#?}");
}

#[test]
fn a_tmpfs_of_any_size_and_number_of_files() {
    let sandbox = Sandbox::new();
    let script = r#"
        fresh() { umount -l "$MOUNT" 2>/dev/null; mount -t tmpfs -o "$1" none "$MOUNT" || exit 77; }
        for pages in $(seq 1 12); do fresh size=$((pages * 4))k; try "pages $pages" "$@"; done
        for files in $(seq 2 22); do fresh nr_inodes=$files; try "files $files" "$@"; done
    "#;
    let Some(ran) = run(&sandbox, script) else { return };
    is_a_threshold(&ran, "pages", 12);
    is_a_threshold(&ran, "files", 21);
}

#[test]
fn an_ext4_with_any_room_left() {
    if !rustix::process::geteuid().is_root() {
        return skipped("mounting an ext4 needs root");
    }
    let sandbox = Sandbox::new();
    // Blocks of 1 KiB: directories take some, too. Everything that fits is filled but for so many of them.
    let script = r#"
        truncate -s 4M "$MOUNT.ext4"
        mkfs.ext4 -q -b 1024 -m 0 -O ^has_journal "$MOUNT.ext4" && mount -o loop "$MOUNT.ext4" "$MOUNT" || exit 77
        for blocks in $(seq 0 32); do
            chmod -R u+rwX "$MOUNT"; rm -rf "$MOUNT/b" "$MOUNT/fill"
            head -c 100000000 /dev/zero >"$MOUNT/fill" 2>/dev/null
            truncate -s -$((blocks * 1024)) "$MOUNT/fill"
            try "blocks $blocks" "$@"
        done
        umount -l "$MOUNT"
    "#;
    let Some(ran) = run(&sandbox, script) else { return };
    is_a_threshold(&ran, "blocks", 33);
}

#[test]
fn a_disk_that_fills_up_under_a_daemon_ends_nothing() {
    let sandbox = Sandbox::new();
    let script = r#"
        mount -t tmpfs -o size=256k none "$MOUNT" || exit 77
        "$@" >/dev/null; echo "before: exit $?"
        head -c 1000000 /dev/zero >"$MOUNT/fill" 2>/dev/null
        for round in $(seq 1 100); do "$ILOADER" run $name -- true; done; echo "leases: exit $?"
        "$ILOADER" status $name >/dev/null; echo "status: exit $?"
        "$@" >/dev/null; echo "again: exit $?"
        cmp "$MODEL/config.json" "$MOUNT/b/views/$name/config.json"; echo "bytes: exit $?"
        "$ILOADER" stop $name; echo "stop: exit $?"
        left stop
        "$@"; echo "full: exit $?"; left full
        rm "$MOUNT/fill"
        try freed "$@"
    "#;
    let Some(ran) = run(&sandbox, script) else { return };
    for (what, code) in [
        ("before", 0),
        ("leases", 0),
        ("status", 0),
        ("again", 0),
        ("bytes", 0),
        ("stop", 0),
        ("full", 6),
        ("freed", 0),
    ] {
        assert_eq!(codes(&ran, &format!("{what}:")), [code], "{what}: {ran:#?}");
    }
}
