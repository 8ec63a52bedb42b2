//! A daemon at rest, and one under a service manager.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::harness::{Job, PATIENCE, Sandbox, bytes_of, until};

/// Ticks of processor time that a process has used, and how often any of its threads has gone to sleep.
fn work_of(pid: Pid) -> (u64, u64) {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<u64> =
        stat.rsplit(") ").next().unwrap().split(' ').map(|field| field.parse().unwrap_or(0)).collect();
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let switches = tasks.map(|task| {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.map_or(0, |count| count.trim().parse().unwrap())
    });
    // The fields 14 and 15, counted from the third.
    (fields[11] + fields[12], switches.sum())
}

#[test]
fn a_cache_at_rest_does_nothing_at_all() {
    let sandbox = Sandbox::new();
    sandbox.started(&["--idle-ttl", "3600"]);
    let lease = sandbox.run(&["sleep", "600"]);
    until("a lease", || !sandbox.status()["leases"].as_array().unwrap().is_empty());
    let daemon = sandbox.daemon();
    let tasks = fs::read_dir(format!("/proc/{daemon}/task")).unwrap().count();
    assert_eq!(tasks, 1, "the load's threads are gone");
    let rests = || {
        let before = work_of(daemon);
        std::thread::sleep(Duration::from_secs(2));
        assert!(work_of(daemon).0 - before.0 <= 1, "processor time while nothing happens");
        work_of(daemon) == before
    };
    // The connections of the commands above close a moment after the commands have ended.
    until("a rest under a lease", rests);
    drop(lease);
    until("a rest without one", rests);
}

#[test]
fn a_daemon_in_the_foreground_is_stopped_by_its_manager() {
    for signal in [Signal::INT, Signal::TERM] {
        let sandbox = Sandbox::new();
        let manager = UnixDatagram::bind(sandbox.path("notify")).unwrap();
        manager.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut command = sandbox.start_command(&["--foreground"]);
        command.env("NOTIFY_SOCKET", sandbox.path("notify"));
        let job = Job::spawn(command);
        let mut heard: Vec<String> = Vec::new();
        let mut listen_for = |word: &str| {
            let mut buffer = [0; 4096];
            while !heard.iter().any(|line| line == word) {
                let length = manager.recv(&mut buffer).expect("the manager is told");
                heard.extend(String::from_utf8_lossy(&buffer[..length]).lines().map(str::to_owned));
            }
            heard.clone()
        };
        let lines = listen_for("READY=1");
        assert!(lines.iter().any(|line| line.starts_with("STATUS=")), "{lines:?}");
        assert_eq!(sandbox.daemon(), job.pid());
        // The environment of the manager is not the commands'.
        let ran = sandbox.run(&["cat", "{model}/config.json"]).wait().expect(0);
        assert_eq!(ran.stdout.as_bytes(), String::from_utf8_lossy(&bytes_of(0, 1234)).as_bytes());
        assert_eq!(sandbox.status()["log"], format!("/proc/{}/fd/2", job.pid()));
        job.signal(signal);
        listen_for("STOPPING=1");
        let ended = job.wait().expect(0);
        assert_eq!(ended.stdout, "");
        sandbox.nothing_left();
    }
}

#[test]
fn a_daemon_in_the_foreground_ends_with_its_cache_and_with_its_failure() {
    let sandbox = Sandbox::new();
    let job = Job::spawn(sandbox.start_command(&["--foreground", "--idle-ttl", "0"]));
    job.wait().expect(0);
    sandbox.nothing_left();

    let job = Job::spawn(sandbox.start_command(&["--foreground"]));
    until("readiness", || sandbox.ask("wait", &["--quiet"]).code == Some(0));
    sandbox.ask("stop", &["--remove-view"]).expect(0);
    job.wait().expect(0);
    sandbox.nothing_left();

    sandbox.start(&["--foreground", "--max-memory-bytes", "1MiB"]).expect_refusal(6, "--max-memory-bytes");
    let directory = sandbox.model();
    sandbox
        .start(&["--foreground", "--log-file", directory.parent().unwrap().to_str().unwrap()])
        .expect_refusal(1, "log");
    assert!(!sandbox.run_file("lock").exists());
    until("a registered failure, or none", || sandbox.ask("status", &[]).code != Some(4));
    sandbox.start(&["--foreground", "--idle-ttl", "0"]).expect(0);
    sandbox.nothing_left();
}
