//! Readers without a lease: whoever has a file of the view open or mapped keeps the cache.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::{Job, MODEL, Sandbox, skipped, until};
use crate::unprivileged::Town;

const BACKINGS: [&str; 2] = ["memfd", "tmpfs"];

/// A process that has `file` open as its standard input, and takes no lease.
fn sleeper(file: &Path) -> Job {
    let mut command = Command::new("sleep");
    command.arg("600").stdin(File::open(file).unwrap());
    Job::spawn(command)
}

/// A python3 that runs `script` with `path` set, says so, and rests. `None` where there is none.
fn python(file: &Path, script: &str) -> Option<Job> {
    if Command::new("python3").arg("--version").output().is_err() {
        skipped("there is no python3");
        return None;
    }
    let mut command = Command::new("python3");
    command.args(["-c", &python_script(file, script)]).stdin(Stdio::null());
    let job = Job::spawn(command);
    Some(job)
}

fn python_script(file: &Path, script: &str) -> String {
    format!("import ctypes, mmap, os, time\npath = {file:?}\n{script}\ntime.sleep(600)")
}

fn readers(sandbox: &Sandbox) -> Vec<Value> {
    sandbox.ask("status", &["--readers", "--json"]).expect(0).json()["readers"].as_array().unwrap().clone()
}

fn number(job: &Job) -> String {
    job.pid().as_raw_nonzero().to_string()
}

/// Starts the cache on `backing`, unless that cannot be had here.
fn started(sandbox: &Sandbox, backing: &str, more: &[&str]) -> bool {
    let ran = sandbox.start(&[&["--backing", backing], more].concat());
    if ran.code != Some(0) && ran.stderr.contains("private tmpfs") {
        skipped(format!("no private tmpfs: {}", ran.stderr.trim()));
        return false;
    }
    ran.expect(0);
    true
}

#[test]
fn an_open_file_keeps_the_cache_like_a_lease() {
    for backing in BACKINGS {
        let sandbox = Sandbox::new();
        if !started(&sandbox, backing, &[]) {
            continue;
        }
        let first = sleeper(&sandbox.view().join(MODEL[1].0));
        let second = sleeper(&sandbox.view().join(MODEL[0].0));
        for more in [&[][..], &["--wait=0"], &["--wait=0.3"], &["--remove-view"]] {
            let refused = sandbox.ask("stop", more).expect_refusal(5, "in use without a lease by");
            for part in [&number(&first), &number(&second), "sleep 600"] {
                assert!(refused.stderr.contains(part), "{part}: {refused:?}");
            }
        }
        let status = sandbox.status();
        assert!(status["readers"].is_null() && status["leases"] == serde_json::json!([]), "{status}");
        let found = readers(&sandbox);
        assert_eq!(found.len(), 2, "{backing}: {found:?}");
        for reader in &found {
            assert_eq!(
                (&reader["lease"], &reader["descriptors"], &reader["mapped_bytes"]),
                (&false.into(), &1.into(), &0.into())
            );
        }
        let text = sandbox.ask("status", &["--readers"]).expect(0).stdout;
        assert!(text.contains("sleep 600: no lease, 0 B mapped"), "{text}");

        let mut stop = sandbox.command(&["stop", sandbox.name(), "--wait"]);
        let mut stop = stop.stderr(Stdio::piped()).spawn().unwrap();
        let mut told = BufReader::new(stop.stderr.take().unwrap()).lines();
        let waits = told.next().unwrap().unwrap();
        assert!(waits.contains("waiting for process") && waits.contains(&number(&first)), "{waits}");
        drop(first);
        until("one reader", || readers(&sandbox).len() == 1);
        assert!(stop.try_wait().unwrap().is_none());
        drop(second);
        let stopped = told.next().unwrap().unwrap();
        assert!(stop.wait().unwrap().success() && !stopped.contains("memory stays"), "{stopped}");
        sandbox.nothing_left();
    }
}

#[test]
fn a_copied_map_is_shown_and_survives_a_stop_by_force() {
    for backing in BACKINGS {
        let sandbox = Sandbox::new();
        if !started(&sandbox, backing, &[]) {
            continue;
        }
        let (file, bytes) = (sandbox.view().join(MODEL[2].0), MODEL[2].1);
        let script = "f = open(path, 'rb')\nm = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)\nf.close()\n\
                      m[:1 << 20] = b'x' * (1 << 20)";
        let Some(mut job) = python(&file, script) else { return };
        until("a private copy", || {
            readers(&sandbox).iter().any(|reader| reader["private_bytes"] == (1 << 20))
        });
        let found = &readers(&sandbox)[0];
        assert_eq!(
            (&found["pid"], &found["mapped_bytes"]),
            (&job.pid().as_raw_nonzero().get().into(), &bytes.into())
        );
        assert!(found["resident_bytes"].as_u64() >= Some(1 << 20), "{found}");
        assert!(found["own_bytes"].as_u64() >= Some(1 << 20), "{found}");
        sandbox.ask("stop", &[]).expect_refusal(5, &number(&job));
        let stopped = sandbox.ask("stop", &["--force"]).expect(0);
        assert!(stopped.stderr.contains("its memory stays with"), "{stopped:?}");
        assert!(stopped.stderr.contains(&format!("process {}", number(&job))), "{stopped:?}");
        assert!(!job.is_over(), "the reader is left alone");
        drop(job);
        sandbox.nothing_left();
    }
}

#[test]
fn a_reader_with_a_lease_is_told_from_one_without() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let leased = sandbox.run(&["sh", "-c", "exec sleep 600 < {model}/config.json"]);
    until("a reader", || readers(&sandbox).iter().any(|reader| reader["command"] == "sleep 600"));
    let bare = sleeper(&sandbox.view().join("config.json"));
    let found = readers(&sandbox);
    let lease = |job: &Job| {
        let pid = job.pid().as_raw_nonzero().get();
        found.iter().find(|reader| reader["pid"] == pid).map(|reader| reader["lease"].clone())
    };
    assert_eq!((lease(&leased), lease(&bare)), (Some(true.into()), Some(false.into())));
    // Waits for the lease, and then for the other.
    let mut stop = Job::spawn(sandbox.command(&["stop", sandbox.name(), "--wait"]));
    drop(leased);
    until("the end of the lease", || sandbox.status()["leases"] == serde_json::json!([]));
    std::thread::sleep(Duration::from_millis(500));
    assert!(!stop.is_over());
    let refused = sandbox.ask("stop", &[]).expect_refusal(5, "without a lease");
    assert!(refused.stderr.contains(&number(&bare)), "{refused:?}");
    drop(bare);
    stop.wait().expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_process_that_closes_the_file_is_no_reader_any_more() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let gate = sandbox.path("gate");
    assert!(Command::new("mkfifo").arg(&gate).status().unwrap().success());
    let mut command = Command::new("bash");
    let script = "exec 7<\"$0\"; read -r line <\"$1\"; exec 7<&-; exec sleep 600";
    command.args(["-c", script]).arg(sandbox.view().join("config.json")).arg(&gate).stdin(Stdio::null());
    let mut job = Job::spawn(command);
    until("a reader", || !readers(&sandbox).is_empty());
    let mut stop = Job::spawn(sandbox.command(&["stop", sandbox.name(), "--wait=600"]));
    until("a stop that waits", || stop.waits_on_a_socket());
    assert!(!stop.is_over());
    File::options().write(true).open(&gate).unwrap().write_all(b"go\n").unwrap();
    stop.wait().expect(0);
    assert!(!job.is_over(), "nothing ended but the reading");
    sandbox.nothing_left();
}

#[test]
fn what_a_command_leaves_behind_is_a_reader() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    // It closes the connection that it inherited, and outlives the process that the lease belonged to.
    let script = "exec 32>&-; sleep 600 < \"$1/config.json\" >/dev/null 2>&1 & echo $!";
    let ran = sandbox.run(&["bash", "-c", script, "bash", "{model}"]).wait().expect(0);
    let child = Pid::from_raw(ran.stdout.trim().parse().unwrap()).unwrap();
    until("the end of the lease", || sandbox.status()["leases"] == serde_json::json!([]));
    let refused = sandbox.ask("stop", &[]);
    let killed = kill_process(child, Signal::KILL);
    assert!(
        refused.expect_refusal(5, "without a lease").stderr.contains(&child.as_raw_nonzero().to_string())
    );
    killed.unwrap();
    sandbox.ask("stop", &["--wait=60"]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn eviction_waits_for_readers_without_a_lease() {
    for backing in BACKINGS {
        let sandbox = Sandbox::new();
        // No lease is ever taken: the time counts from readiness, and from the last reader that was seen.
        if !started(&sandbox, backing, &["--idle-ttl", "1"]) {
            continue;
        }
        let Ok(file) = File::open(sandbox.view().join(MODEL[1].0)) else {
            skipped("the machine is too busy: the cache was evicted before it was read");
            continue;
        };
        let mut command = Command::new("sleep");
        command.arg("600").stdin(file);
        let job = Job::spawn(command);
        let log = || {
            let path = sandbox.path("base/logs").join(format!("{}.log", sandbox.name()));
            std::fs::read_to_string(path).unwrap()
        };
        until("a postponed eviction", || log().contains("--idle-ttl is over, but it is read"));
        assert!(log().contains(&number(&job)), "{}", log());
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(sandbox.status()["state"], "ready");
        drop(job);
        sandbox.nothing_left();
        assert!(log().contains("it is evicted"));
    }
}

#[test]
fn the_commands_of_this_program_are_no_readers() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let lease = sandbox.run(&["sleep", "600"]);
    until("a lease", || sandbox.status()["leases"][0]["command"] == "sleep 600");
    // One that waits, with a file open as every command has it that checks the view.
    let mut command = sandbox.command(&["stop", sandbox.name(), "--wait"]);
    command.stdin(File::open(sandbox.view().join(MODEL[1].0)).unwrap());
    let stop = Job::spawn(command);
    until("a stop that waits", || stop.waits_on_a_socket());
    assert_eq!(readers(&sandbox), [Value::Null; 0]);
    drop(lease);
    stop.wait().expect(0);
    sandbox.nothing_left();
}

#[test]
fn an_ordinary_user_is_told_what_cannot_be_looked_into() {
    let Some(town) = Town::new() else { return };
    let user = town.user();
    // The first one in PATH may be in a home of somebody else.
    let python = if Path::new("/usr/bin/python3").exists() { "/usr/bin/python3" } else { "python3" };
    if Job::spawn(town.any_command(&user, python, &["--version"])).wait().code != Some(0) {
        return skipped("there is no python3 for other users");
    }
    for backing in BACKINGS {
        let ran = town.start(&user, &["--backing", backing]);
        if ran.code != Some(0) && ran.stderr.contains("private tmpfs") {
            skipped(format!("no private tmpfs: {}", ran.stderr.trim()));
            continue;
        }
        let file = ran.expect(0).path().join("model.safetensors");
        let look = || town.iloader(&user, &["status", "n", "--readers", "--json"]).expect(0).json();
        let plain = python_script(&file, "f = open(path, 'rb')");
        let reader = Job::spawn(town.any_command(&user, python, &["-c", &plain]));
        until("a reader", || look()["readers"][0]["descriptors"] == 1);
        town.iloader(&user, &["stop", "n"]).expect_refusal(5, &number(&reader));
        drop(reader);
        until("no reader", || look()["readers"] == serde_json::json!([]));

        // Nobody but root may look into it: not even its own user.
        let closed = python_script(&file, "f = open(path, 'rb')\nctypes.CDLL(None).prctl(4, 0)");
        let opaque = Job::spawn(town.any_command(&user, python, &["-c", &closed]));
        let pid = opaque.pid().as_raw_nonzero().get();
        let is_opaque = || {
            let unseen = look()["unseen"].clone();
            unseen.as_array().unwrap().iter().any(|process| process["pid"] == pid)
        };
        until("a process that can't be looked into", is_opaque);
        assert_eq!(look()["readers"], serde_json::json!([]));
        let stopped = town.iloader(&user, &["stop", "n"]).expect(0);
        let (named, why) = (format!("process {pid}"), "cannot be looked into");
        assert!(stopped.stderr.contains(&named) && stopped.stderr.contains(why), "{stopped:?}");
        drop(opaque);
        user.assert_nothing_runs();
    }
}
