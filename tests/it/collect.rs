//! `gc --resident`: what goes, in which order, and what stays.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::{Job, Ran, Sandbox, entries, until};

/// Caches of the sandbox's model under the names a, b and c, used last in this order.
fn three() -> (Sandbox, u64) {
    let sandbox = Sandbox::new();
    for name in ["a", "b", "c"] {
        start(&sandbox, name, &[]);
    }
    let bytes = status(&sandbox, "a")["allocated_bytes"].as_u64().unwrap();
    (sandbox, bytes)
}

fn start(sandbox: &Sandbox, name: &str, more: &[&str]) {
    let model = sandbox.model();
    sandbox.iloader(&[&["start", model.to_str().unwrap(), "--name", name], more].concat()).expect(0);
}

fn status(sandbox: &Sandbox, name: &str) -> Value {
    sandbox.iloader(&["status", name, "--json"]).json()
}

fn pid(sandbox: &Sandbox, name: &str) -> Pid {
    Pid::from_raw(status(sandbox, name)["pid"].as_i64().unwrap() as i32).unwrap()
}

fn gc(sandbox: &Sandbox, more: &[&str]) -> Ran {
    sandbox.iloader(&[&["gc", "--resident"], more].concat())
}

/// What is done with each cache, in the order of their names, and why.
fn fates(sandbox: &Sandbox, more: &[&str]) -> Vec<(String, String)> {
    let answer = gc(sandbox, &[more, &["--json"]].concat()).expect(0).json();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let caches = answer["caches"].as_array().unwrap();
    caches.iter().map(|cache| (text(&cache["action"]), text(&cache["reason"]))).collect()
}

fn actions(sandbox: &Sandbox, more: &[&str]) -> Vec<String> {
    fates(sandbox, more).into_iter().map(|(action, _)| action).collect()
}

fn names(sandbox: &Sandbox) -> Vec<String> {
    let caches = sandbox.iloader(&["list", "--json"]).expect(0).json()["caches"].clone();
    caches.as_array().unwrap().iter().map(|cache| cache["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn the_least_recently_used_go_and_only_when_told_to() {
    let (sandbox, bytes) = three();
    let limit = |caches: u64| (caches * bytes).to_string();
    assert_eq!(actions(&sandbox, &["--max-bytes", &limit(3)]), ["keep", "keep", "keep"]);
    assert_eq!(actions(&sandbox, &["--max-bytes", &limit(2)]), ["stop", "keep", "keep"]);
    assert_eq!(actions(&sandbox, &["--max-bytes", &(2 * bytes - 1).to_string()]), ["stop", "stop", "keep"]);
    assert_eq!(actions(&sandbox, &["--ttl", "0"]), ["stop", "stop", "stop"]);
    assert_eq!(actions(&sandbox, &["--ttl", "86400"]), ["keep", "keep", "keep"]);
    // A lease that ended makes it the last one to go.
    sandbox.iloader(&["run", "a", "--", "true"]).expect(0);
    until("the end of the lease", || status(&sandbox, "a")["leases"] == serde_json::json!([]));
    let shown = gc(&sandbox, &["--max-bytes", &limit(2)]).expect(0);
    let row = |name: &str| shown.stdout.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(row("b").contains("would be stopped") && row("b").contains("--max-bytes"), "{shown:?}");
    assert!(row("a").contains("stays") && shown.stderr.contains("--apply does it"), "{shown:?}");
    assert_eq!(names(&sandbox), ["a", "b", "c"], "all of that was only shown");

    let done = gc(&sandbox, &["--max-bytes", &limit(2), "--apply", "--json"]).expect(0).json();
    assert_eq!((&done["applied"], &done["allocated_bytes"]), (&true.into(), &(3 * bytes).into()));
    assert_eq!(done["remaining_bytes"], 2 * bytes);
    assert_eq!(names(&sandbox), ["a", "c"]);
    gc(&sandbox, &["--ttl", "0", "--apply"]).expect(0);
    assert_eq!(names(&sandbox), [""; 0]);
    assert!(gc(&sandbox, &["--ttl", "0", "--apply"]).expect(0).stderr.contains("nothing to collect"));
    sandbox.nothing_left();
}

#[test]
fn what_is_in_use_stays_and_says_why() {
    let (sandbox, bytes) = three();
    let leased = Job::spawn(sandbox.command(&["run", "a", "--", "sleep", "600"]));
    until("a lease", || status(&sandbox, "a")["leases"][0]["command"] == "sleep 600");
    let mut command = Command::new("sleep");
    command.arg("601").stdin(File::open(sandbox.path("base/views/b/config.json")).unwrap());
    let read = Job::spawn(command);
    let check = |fates: &[(String, String)]| {
        let pid = |job: &Job| format!("process {} 'sleep 60", job.pid().as_raw_nonzero());
        assert_eq!((fates[0].0.as_str(), fates[1].0.as_str()), ("keep", "keep"), "{fates:?}");
        assert!(fates[0].1.contains("leased by") && fates[0].1.contains(&pid(&leased)), "{fates:?}");
        assert!(fates[1].1.contains("without a lease"), "{fates:?}");
        assert!(fates[1].1.contains(&read.pid().as_raw_nonzero().to_string()), "{fates:?}");
    };
    // One that may go takes the place of one that may not.
    for policy in [&["--max-bytes", &bytes.to_string()][..], &["--ttl", "0"]] {
        let shown = fates(&sandbox, policy);
        check(&shown);
        assert_eq!(shown[2].0, "stop");
    }
    let done = fates(&sandbox, &["--max-bytes", "0", "--apply"]);
    check(&done);
    assert_eq!(names(&sandbox), ["a", "b"]);
    let over = gc(&sandbox, &["--max-bytes", "0", "--apply"]).expect(0);
    assert!(over.stderr.contains("what stays takes"), "{over:?}");
    drop((leased, read));
    until("caches that nobody uses", || {
        actions(&sandbox, &["--ttl", "0", "--apply"]).iter().all(|a| a == "stop")
    });
    sandbox.nothing_left();
}

#[test]
fn a_load_and_a_daemon_that_hangs_stay() {
    let sandbox = Sandbox::slow();
    start(&sandbox, "other", &["--pattern", "config.json"]);
    let Some(frozen) = sandbox.freeze() else { return };
    let stays = |fates: Vec<(String, String)>, why: &str| {
        assert_eq!((fates[0].0.as_str(), fates[1].0.as_str()), ("keep", "stop"), "{fates:?}");
        assert!(fates[0].1.contains(why), "{fates:?}");
    };
    stays(fates(&sandbox, &["--ttl", "0"]), "out of reach");
    let told = gc(&sandbox, &["--ttl", "0", "--json"]).expect(0);
    assert_eq!(told.json()["caches"][0]["allocated_bytes"], serde_json::Value::Null, "{told:?}");
    assert!(told.stderr.is_empty(), "{told:?}");
    let told = gc(&sandbox, &["--ttl", "0"]).expect(0);
    assert!(told.stderr.contains("is not known and not counted: "), "{told:?}");
    drop(frozen);
    let now = fates(&sandbox, &["--ttl", "0", "--apply"]);
    if now[0].1.contains("loading") {
        stays(now, "it is loading");
        sandbox.ask("wait", &["--quiet"]).expect(0);
        gc(&sandbox, &["--ttl", "0", "--apply"]).expect(0);
    }
    sandbox.nothing_left();
}

#[test]
fn what_dead_daemons_left_is_shown_and_goes() {
    let (sandbox, _) = three();
    kill_process(pid(&sandbox, "a"), Signal::KILL).unwrap();
    until("a dead cache", || status(&sandbox, "a")["state"] == "dead");
    let (run, views) = (sandbox.path("base/run"), sandbox.path("base/views"));
    // What a start or a registration leaves that was killed in the middle, and what is nobody's of ours.
    for file in ["half.lock", ".half.json.0123456789abcdef.tmp", "foreign.txt"] {
        fs::write(run.join(file), "").unwrap();
    }
    fs::create_dir(views.join(".gone.0123456789abcdef.old")).unwrap();
    fs::create_dir(views.join("foreign")).unwrap();
    fs::write(views.join("foreign/file"), "precious").unwrap();
    // A living cache whose things are called after nobody.
    let place = |leaf: &str| sandbox.path("base").join(leaf).to_str().unwrap().to_owned();
    let (socket, pid_file) = (place("far.sock"), place("far.pid"));
    start(&sandbox, "d", &["--socket", &socket, "--pid-file", &pid_file, "--view", &place("views/far")]);
    let before = (entries(&run), entries(&views));
    let left = |more: &[&str]| {
        let answer = gc(&sandbox, &[more, &["--json"]].concat()).expect(0).json();
        assert_eq!(
            answer["caches"],
            serde_json::json!([]),
            "without a criterion nothing that lives is looked at"
        );
        let names = answer["leftovers"].as_array().unwrap().clone();
        for leftover in &names {
            assert!(leftover["error"].is_null(), "{leftover}");
        }
        names.iter().map(|leftover| leftover["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(left(&[]), ["a", "gone", "half"]);
    let shown = gc(&sandbox, &[]).expect(0).stdout;
    for part in
        ["a.json", "views/a", "a.sock", "a.pid", "half.lock", ".half.json.0123456789abcdef.tmp", ".gone."]
    {
        assert!(shown.contains(part) && shown.contains("would be removed"), "{part}: {shown}");
    }
    assert_eq!((entries(&run), entries(&views)), before, "it was only shown");
    assert_eq!(left(&["--apply"]), ["a", "gone", "half"]);
    assert_eq!(left(&["--apply"]), [""; 0]);
    assert_eq!(names(&sandbox), ["b", "c", "d"]);
    assert!(Path::new(&socket).exists() && Path::new(&pid_file).exists());
    assert_eq!(entries(&views), ["a", "b", "c", "far", "foreign"]);
    assert_eq!(entries(&views.join("a")), [""; 0], "its directory stays, emptied");
    assert_eq!(fs::read_to_string(views.join("foreign/file")).unwrap(), "precious");
    assert!(run.join("foreign.txt").exists());
    fs::remove_file(run.join("foreign.txt")).unwrap();
    fs::remove_dir_all(views.join("foreign")).unwrap();
    sandbox.iloader(&["stop", "--all"]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn it_looks_at_one_of_memory_and_disk() {
    let sandbox = Sandbox::empty();
    sandbox.iloader(&["gc", "--resident", "--cache-root", "/tmp"]).expect_refusal(2, "cannot be used with");
    sandbox.iloader(&["gc", "--resident", "--ttl", "-1"]).expect_refusal(2, "-1");
    sandbox.iloader(&["gc", "--resident", "--max-bytes", "many"]).expect_refusal(2, "many");
    let nothing = gc(&sandbox, &["--ttl", "0"]).expect(0);
    assert!(nothing.stdout.is_empty() && nothing.stderr.contains("nothing to collect"), "{nothing:?}");
}
