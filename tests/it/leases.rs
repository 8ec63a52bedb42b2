//! Leases: what a cache is in use by, and when a use ends.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::{Job, Sandbox, until};

/// Becomes the sleeping command, and waits until it has.
fn sleeper(sandbox: &Sandbox) -> Job {
    let before = leases(sandbox).len();
    let job = sandbox.run(&["sleep", "600"]);
    let pid = job.pid().as_raw_nonzero().get();
    until("a lease of the command", || {
        leases(sandbox).iter().any(|lease| lease["pid"] == pid && lease["command"] == "sleep 600")
    });
    assert_eq!(leases(sandbox).len(), before + 1);
    job
}

fn leases(sandbox: &Sandbox) -> Vec<Value> {
    sandbox.status()["leases"].as_array().unwrap().clone()
}

#[test]
fn a_leased_cache_is_not_stopped() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    let first = sleeper(&sandbox);
    let second = sleeper(&sandbox);
    assert_eq!(sandbox.status()["idle_seconds"], 0.0);
    for more in [&[][..], &["--wait=0"], &["--wait=0.05"], &["--remove-view"]] {
        let refused = sandbox.ask("stop", more).expect_refusal(5, &first.pid().as_raw_nonzero().to_string());
        assert!(refused.stderr.contains("sleep 600"), "{refused:?}");
    }
    sandbox.iloader(&["stop", "--all"]).expect_refusal(5, sandbox.name());
    assert_eq!(sandbox.ask("view", &[]).expect(0).path(), view);

    // A stop that waits goes on when the last command has ended.
    let mut stop = Job::spawn(sandbox.command(&["stop", sandbox.name(), "--wait"]));
    first.signal(Signal::KILL);
    until("the end of a lease", || leases(&sandbox).len() == 1);
    assert!(!stop.is_over());
    drop(second);
    let stopped = stop.wait().expect(0);
    assert!(stopped.stderr.contains("waiting for"), "{stopped:?}");
    sandbox.nothing_left();
}

#[test]
fn a_stop_that_is_given_up_stops_nothing() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let job = sleeper(&sandbox);
    let stop = Job::spawn(sandbox.command(&["stop", sandbox.name(), "--wait"]));
    until("a stop that waits", || stop.waits_on_a_socket());
    stop.signal(Signal::INT);
    stop.wait();
    drop(job);
    until("the end of the lease", || leases(&sandbox).is_empty());
    assert_eq!(sandbox.status()["state"], "ready");
}

#[test]
fn force_stops_a_cache_under_its_readers() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let mut job = sleeper(&sandbox);
    sandbox.ask("stop", &["--force"]).expect(0);
    assert!(!job.is_over(), "the command is left alone");
    sandbox.nothing_left();
}

#[test]
fn a_lease_outlives_its_command_where_a_child_has_the_connection() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let script = "sleep 600 <\"$0/config.json\" >/dev/null 2>&1 & echo $$ $!";
    let ran = sandbox.run(&["sh", "-c", script, "{model}"]).wait().expect(0);
    let (holder, child) = ran.stdout.trim().split_once(' ').unwrap();
    assert_eq!(leases(&sandbox).len(), 1);
    let left = format!("process {holder}, which has ended and left its connection to another process");
    // The one who is meant is named, with or without patience.
    for more in [&[][..], &["--wait=0.2"]] {
        let refused = sandbox.ask("stop", more).expect_refusal(5, &format!("in use by {left}"));
        assert!(
            refused.stderr.contains(&format!("; it is read by process {child} 'sleep 600'")),
            "{refused:?}"
        );
    }
    let kept = sandbox.iloader(&["gc", "--resident", "--ttl", "0"]).expect(0);
    let kept = format!("{}{}", kept.stdout, kept.stderr);
    assert!(kept.contains(&format!("leased by {left}")), "{kept}");
    let child = Pid::from_raw(child.parse().unwrap()).unwrap();
    kill_process(child, Signal::KILL).unwrap();
    until("the end of the lease", || leases(&sandbox).is_empty());
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_lease_lasts_as_long_as_a_command_that_closes_everything() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    // As engines do that close every descriptor which they did not open.
    let script = "for fd in /proc/self/fd/*; do n=${fd##*/}; [ $n -gt 2 ] && eval \"exec $n>&-\"; done; \
                  echo; exec sleep 600";
    let job = sandbox.run(&["bash", "-c", script]);
    until("the command", || leases(&sandbox).iter().any(|lease| lease["command"] == "sleep 600"));
    sandbox.ask("stop", &[]).expect_refusal(5, "sleep 600");
    drop(job);
    until("the end of the lease", || leases(&sandbox).is_empty());
}

#[test]
fn an_idle_cache_is_evicted_and_a_leased_one_is_not() {
    let sandbox = Sandbox::new();
    sandbox.started(&["--idle-ttl", "2", "--no-wait"]);
    let job = sandbox.run(&["sleep", "600"]);
    until("a lease", || !leases(&sandbox).is_empty());
    assert_eq!(sandbox.status()["idle_ttl_seconds"], 2.0);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(sandbox.status()["state"], "ready");
    drop(job);
    sandbox.nothing_left();
    let log = std::fs::read_to_string(sandbox.path("base/logs").join(format!("{}.log", sandbox.name())));
    assert!(log.unwrap().contains("--idle-ttl"));
}

#[test]
fn idle_seconds_count_from_readiness_and_from_the_last_lease() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let idle = || sandbox.status()["idle_seconds"].as_f64().unwrap();
    let before = idle();
    until("more idleness", || idle() > before);
    drop(sleeper(&sandbox));
    until("the end of the lease", || leases(&sandbox).is_empty());
    let after = idle();
    until("more idleness", || idle() > after);
}
