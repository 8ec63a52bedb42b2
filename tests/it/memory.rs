//! Memory that runs out: in a control group of its own, a start is refused, a load is stopped before the kernel's
//! OOM killer acts, and one that just fits is left alone.

use std::path::PathBuf;
use std::process::Command;

use rustix::process::{Signal, kill_process};

use crate::containers::{inside, works};
use crate::harness::{Frozen, Job, Sandbox, has_ended, scratch_dir, skipped, until};
use crate::memory_group::{MemoryGroup, hierarchy};

const MIB: u64 = 1 << 20;

/// Every way to load that allocates differently.
const WAYS: [[&str; 4]; 4] = [
    ["--backing", "memfd", "--engine", "auto"],
    ["--backing", "auto", "--engine", "auto"],
    ["--backing", "memfd", "--engine", "threads"],
    ["--backing", "auto", "--engine", "threads"],
];

/// One small read at a time: some seconds for the models here.
const SLOWLY: [&str; 6] = ["--engine", "threads", "--read-size", "4096", "--queue-depth", "1"];

/// A sandbox with a model of so many bytes. It takes none on disk.
fn sandbox_of(bytes: u64) -> Sandbox {
    let sandbox = Sandbox::empty();
    sandbox.write("config.json", b"{}");
    sandbox.write("tokenizer.json", b"{}");
    let weights = std::fs::File::create(sandbox.model().join("model.safetensors")).unwrap();
    weights.set_len(bytes).unwrap();
    sandbox
}

/// Waits until a load has begun to fill its memory.
fn until_it_loads(sandbox: &Sandbox) {
    until("a load", || sandbox.run_file("json").exists() && sandbox.run_file("sock").exists());
    until("progress", || sandbox.status()["progress"]["files_done"].as_u64() > Some(0));
}

#[test]
fn what_does_not_fit_into_a_cgroup_is_refused_and_the_cgroup_is_named() {
    let sandbox = sandbox_of(160 * MIB);
    let Some(group) = MemoryGroup::new(&sandbox) else { return };
    group.limit(400 * MIB);
    for way in WAYS {
        let refused = group.spawn(&sandbox.start_command(&way)).wait();
        let hint = refused.stderr.clone();
        refused.expect_refusal(6, &format!("iloader-{}", sandbox.name()));
        assert!(hint.contains("select fewer files, which need "), "{hint}");
        sandbox.nothing_left();
    }
    assert_eq!(group.oom_kills(), 0);
    group.is_given_back(0);
}

/// Takes all that there is under the limits.
const ALL_OF_IT: [&str; 4] = ["--max-memory-fraction", "1", "--reserve-bytes", "0"];

/// Two groups in one, and a load of 160 MiB that is stopped early in the first of them, by a start behind `words`.
struct Siblings {
    // Dropped in this order, and the groups below before the one above.
    _frozen: Frozen,
    loading: Sandbox,
    _one: MemoryGroup,
    other: MemoryGroup,
    above: MemoryGroup,
}

fn siblings(words: &[&str]) -> Option<Siblings> {
    let loading = sandbox_of(160 * MIB);
    let above = MemoryGroup::new(&loading)?;
    let (one, other) = (above.below("one")?, above.below("other")?);
    let spawn = |start: Command| one.spawn(&if words.is_empty() { start } else { inside(words, &start) });
    let frozen = loading.freeze_by(spawn, &["--limit-rate", "1MiB"])?;
    assert_eq!(one.processes(), [loading.daemon()]);
    Some(Siblings { _frozen: frozen, loading, _one: one, other, above })
}

#[test]
fn what_is_promised_in_another_cgroup_takes_nothing_from_this_one() {
    let Some(siblings) = siblings(&[]) else { return };
    let sandbox = sandbox_of(160 * MIB);
    let start = || siblings.other.spawn(&sandbox.start_command(&ALL_OF_IT)).wait();
    // Of two such, one.
    siblings.other.limit(260 * MIB);
    start().expect(0);
    sandbox.ask("stop", &[]).expect(0);
    // Under a limit that holds for both there is none for the second.
    siblings.above.limit(260 * MIB);
    let refused = start();
    let whole = refused.stderr.clone();
    refused.expect_refusal(6, &format!("/iloader-{}, less ", siblings.loading.name()));
    assert!(whole.contains(" promised to starts under way)"), "{whole}");
    sandbox.nothing_left();
    // And once the first is gone there is.
    siblings.loading.kill_daemon();
    start().expect(0);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
    assert_eq!(siblings.above.oom_kills(), 0);
}

#[test]
fn what_is_promised_where_the_cgroups_above_are_hidden_counts_everywhere() {
    let namespace = ["unshare", "--mount"];
    if !works(&namespace) {
        return;
    }
    // The promises of these two alone: such a one is in the way of every test that has a cgroup.
    let promises = scratch_dir();
    let apart = "mount --bind \"$1\" /dev/shm && shift && exec \"$@\"";
    let apart = [&namespace[..], &["sh", "-c", apart, "sh", promises.path().to_str().unwrap()]].concat();
    // As in a container: where the hierarchy was, there is nothing but the group that it begins in.
    let hide = "hierarchy=$1; shift; own=$(sed -n 's/^[0-9]*:\\(memory\\|\\):\\(.*\\/one\\)$/\\2/p' /proc/self/cgroup)
        mount --bind \"$hierarchy$own\" \"$hierarchy\" && exec \"$@\"";
    let Some((root, _)) = hierarchy() else { return skipped("there is no cgroup hierarchy with memory") };
    let words = [&apart[..], &["sh", "-c", hide, "sh", root.to_str().unwrap()]].concat();
    let Some(siblings) = siblings(&words) else { return };
    let sandbox = sandbox_of(160 * MIB);
    let start = || siblings.other.spawn(&inside(&apart, &sandbox.start_command(&ALL_OF_IT))).wait();
    siblings.other.limit(260 * MIB);
    start().expect_refusal(6, "/other, less ");
    siblings.loading.kill_daemon();
    start().expect(0);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn what_a_replaced_cache_gives_back_counts_in_its_own_cgroup_alone() {
    let sandbox = sandbox_of(160 * MIB);
    let Some(above) = MemoryGroup::new(&sandbox) else { return };
    let (Some(one), Some(other)) = (above.below("one"), above.below("other")) else { return };
    let start = |group: &MemoryGroup, more: &[&str]| {
        group.spawn(&sandbox.start_command(&[&ALL_OF_IT[..], more].concat())).wait()
    };
    // Of two such, one.
    one.limit(260 * MIB);
    start(&one, &[]).expect(0);
    let daemon = sandbox.daemon();
    // The old one's memory is charged elsewhere, and does not come free here.
    other.limit(120 * MIB);
    let replace = ["--replace", "--pattern", "model.safetensors"];
    let refused = start(&other, &replace);
    let whole = refused.stderr.clone();
    refused.expect_refusal(6, &format!("'{}' is not replaced", sandbox.name()));
    assert!(whole.contains("/other"), "{whole}");
    assert_eq!((sandbox.daemon(), sandbox.status()["state"].clone()), (daemon, "ready".into()));
    // In its own it does, and there is room for no other.
    start(&one, &replace).expect(0);
    assert_ne!(sandbox.daemon(), daemon);
    // As there is elsewhere, where it fits beside it.
    other.limit(260 * MIB);
    start(&other, &["--replace"]).expect(0);
    assert_eq!(other.processes(), [sandbox.daemon()]);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
    assert_eq!((one.oom_kills(), other.oom_kills()), (0, 0));
}

#[test]
fn a_forced_load_that_does_not_fit_ends_before_the_oom_killer_acts() {
    let sandbox = sandbox_of(160 * MIB);
    let Some(group) = MemoryGroup::new(&sandbox) else { return };
    for limit in [60, 150] {
        group.limit(limit * MIB);
        for way in WAYS {
            for workers in ["1", "8"] {
                let words = [&way[..], &["--workers", workers, "--force"]].concat();
                let ran = group.spawn(&sandbox.start_command(&words)).wait();
                let hint = ran.stderr.clone();
                ran.expect_refusal(6, &format!("iloader-{}, and ", sandbox.name()));
                assert!(
                    hint.contains("nothing of it is left") && hint.contains("--force does not lift"),
                    "{hint}"
                );
                sandbox.nothing_left();
                assert_eq!(group.oom_kills(), 0);
                group.is_given_back(0);
            }
        }
    }
}

#[test]
fn a_load_that_fits_with_little_to_spare_is_not_stopped() {
    let sandbox = sandbox_of(80 * MIB);
    let Some(group) = MemoryGroup::new(&sandbox) else { return };
    let start = |way: &[&str]| {
        group.spawn(&sandbox.start_command(&[way, &["--force"]].concat())).wait().expect(0);
        sandbox.ask("stop", &[]).expect(0);
        sandbox.nothing_left();
        group.is_given_back(0);
    };
    WAYS.iter().for_each(|way| start(way));
    let Some(peak) = group.peak() else { return skipped("this kernel does not tell the peak of a cgroup") };
    assert!(peak < 90 * MIB, "{peak}");
    group.limit(peak + MIB);
    for way in WAYS.iter().cycle().take(20) {
        start(way);
    }
    assert_eq!(group.oom_kills(), 0);
}

#[test]
fn a_load_ends_for_a_neighbour_that_grows_and_the_neighbour_lives() {
    let sandbox = sandbox_of(300 * MIB);
    let Some(group) = MemoryGroup::new(&sandbox) else { return };
    group.limit(400 * MIB);
    for backing in ["memfd", "auto"] {
        let words = [&SLOWLY[..], &["--backing", backing, "--force"]].concat();
        let start = group.spawn(&sandbox.start_command(&words));
        until_it_loads(&sandbox);
        let neighbour = group.grow(300 * MIB);
        start.wait().expect_refusal(6, "in memory, before that runs out: ");
        sandbox.nothing_left();
        until("a neighbour of full size", || group.usage() > 300 * MIB);
        assert_eq!(group.oom_kills(), 0);
        assert!(!has_ended(neighbour.pid()), "the neighbour lives");
        group.processes().into_iter().for_each(|pid| kill_process(pid, Signal::KILL).unwrap());
        drop(neighbour);
        group.is_given_back(0);
    }
}

#[test]
fn a_limit_that_is_lowered_ends_a_load_that_no_longer_fits() {
    let sandbox = sandbox_of(300 * MIB);
    let Some(group) = MemoryGroup::new(&sandbox) else { return };
    for backing in ["memfd", "auto"] {
        group.limit(2048 * MIB);
        let start = group.spawn(&sandbox.start_command(&[&SLOWLY[..], &["--backing", backing]].concat()));
        until_it_loads(&sandbox);
        // The size of the rest is far above what is left then.
        group.limit(group.usage() + 60 * MIB);
        start.wait().expect_refusal(6, &format!("iloader-{}", sandbox.name()));
        sandbox.nothing_left();
        assert_eq!(group.oom_kills(), 0);
        group.is_given_back(0);
    }
}

#[test]
fn a_shortage_that_passes_holds_a_load_and_does_not_end_it() {
    let sandbox = sandbox_of(200 * MIB);
    let Some(group) = MemoryGroup::new(&sandbox) else { return };
    // On a machine that is busy, the shortage may take longer than the load waits.
    for _ in 0..5 {
        group.limit(1024 * MIB);
        let start = group.spawn(&sandbox.start_command(&SLOWLY));
        until_it_loads(&sandbox);
        // Above half of what must be there, so that it waits.
        group.limit(group.usage() + 100 * MIB);
        until("a load that is held", || log_of(&sandbox).contains("the load is held: "));
        group.limit(1024 * MIB);
        let ran = start.wait();
        if ran.code == Some(6) {
            std::fs::remove_file(log_path(&sandbox)).unwrap();
            continue;
        }
        ran.expect(0);
        assert!(log_of(&sandbox).contains("the load goes on: "), "{}", log_of(&sandbox));
        sandbox.ask("stop", &[]).expect(0);
        return sandbox.nothing_left();
    }
    panic!("it never went on");
}

fn log_path(sandbox: &Sandbox) -> PathBuf {
    sandbox.path("base/logs").join(format!("{}.log", sandbox.name()))
}

fn log_of(sandbox: &Sandbox) -> String {
    std::fs::read_to_string(log_path(sandbox)).unwrap()
}

#[test]
fn status_names_the_cgroup_that_is_charged() {
    let sandbox = Sandbox::new();
    let charged = |sandbox: &Sandbox| sandbox.status()["charged_cgroup"].as_str().map(str::to_owned);
    sandbox.started(&[]);
    let membership = std::fs::read_to_string("/proc/self/cgroup").unwrap();
    assert_eq!(charged(&sandbox).is_some(), !membership.trim().is_empty());
    sandbox.ask("stop", &[]).expect(0);

    let Some(group) = MemoryGroup::new(&sandbox) else { return };
    group.spawn(&sandbox.start_command(&[])).wait().expect(0);
    let named = charged(&sandbox).unwrap();
    assert!(named.starts_with(if group.is_v1 { "cgroup v1 /" } else { "cgroup v2 /" }), "{named}");
    assert!(named.ends_with(&format!("/iloader-{}", sandbox.name())), "{named}");
    let shown = sandbox.ask("status", &[]).expect(0).stdout;
    assert!(shown.lines().any(|line| line.starts_with("charged to:") && line.ends_with(&named)), "{shown}");
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_daemon_that_is_killed_while_it_loads_leaves_the_numbers_and_a_hint() {
    let sandbox = sandbox_of(300 * MIB);
    let start = Job::spawn(sandbox.start_command(&SLOWLY));
    until_it_loads(&sandbox);
    kill_process(sandbox.daemon(), Signal::KILL).unwrap();
    let ran = start.wait();
    let hint = ran.stderr.clone();
    ran.expect_refusal(1, "was killed by SIGKILL before it was ready");
    assert!(hint.contains("the kernel kills when memory runs out") && hint.contains("dmesg"), "{hint}");
    let log = log_of(&sandbox);
    let numbers = log.lines().find(|line| line.contains(" needs ")).unwrap();
    // What another test's start was promised at that moment stands behind them.
    let promised = numbers.strip_suffix(" of it promised to starts under way");
    let own = promised.map_or(numbers, |numbers| numbers.rsplit_once(", ").unwrap().0);
    assert!(own.contains(" available (") && own.ends_with(')'), "{numbers}");
    sandbox.nothing_left();
}
