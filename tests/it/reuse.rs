//! One name, one cache: what a second start finds, what waits for what, and what a failed one leaves.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode};
use rustix::process::Signal;

use crate::harness::{Job, MODEL, Sandbox, bytes_of, entries, skipped, until};

#[test]
fn every_setting_of_the_identity_is_named_where_it_differs() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    let (daemon, identity) = (sandbox.daemon(), sandbox.status()["identity"].clone());
    let elsewhere = sandbox.path("elsewhere");
    for (words, named) in [
        (&["--pattern", "*.json"][..], "--pattern"),
        (&["--exclude", "*.bin"], "--exclude"),
        (&["--also-exclude", "*.bin"], "--also-exclude"),
        (&["--passthrough", "*.json"], "--passthrough"),
        (&["--view", elsewhere.to_str().unwrap()], "view"),
        (&["--keep-dirname"], "view"),
        (&["--max-memory-bytes", "1GiB"], "--max-memory-bytes"),
        (&["--idle-ttl", "60"], "--idle-ttl"),
    ] {
        let refused = sandbox.start(words).expect_refusal(9, named);
        assert!(refused.stderr.contains(" hint: "), "{refused:?}");
    }
    let other = sandbox.path("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("config.json"), "{}").unwrap();
    sandbox
        .iloader(&["start", other.to_str().unwrap(), "--name", sandbox.name()])
        .expect_refusal(9, other.to_str().unwrap());
    assert!(!elsewhere.exists());
    assert_eq!((sandbox.daemon(), &sandbox.status()["identity"]), (daemon, &identity));
    assert!(fs::read(view.join(MODEL[1].0)).unwrap() == bytes_of(1, MODEL[1].1));
    // The same, by another path and with what is not identity.
    std::os::unix::fs::symlink(sandbox.model(), sandbox.path("link")).unwrap();
    let link = sandbox.path("link");
    let start = ["start", link.to_str().unwrap(), "--name", sandbox.name()];
    let more = ["--force", "--quiet", "--wait-timeout", "5", "--engine", "threads", "--workers", "2"];
    let socket = sandbox.path("another-socket");
    let more = [&more[..], &["--socket", socket.to_str().unwrap()]].concat();
    let again = sandbox.iloader(&[&start[..], &more].concat()).expect(0);
    assert_eq!(again.path(), view);
    for noted in ["--engine auto, not threads", "--workers 1, not 2", "another-socket"] {
        assert!(again.stderr.contains(noted), "{again:?}");
    }
    assert_eq!(sandbox.daemon(), daemon);
}

#[test]
fn another_cache_of_the_name_is_replaced_where_asked_for() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    let first = sandbox.daemon();
    sandbox.start(&["--replace"]).expect(0);
    assert_eq!(sandbox.daemon(), first, "what is asked for runs already");
    let ran = sandbox.start(&["--replace", "--pattern", "config.json"]).expect(0);
    assert_eq!(ran.path(), view);
    assert!(ran.stderr.contains("which had other settings"), "{ran:?}");
    assert_ne!(sandbox.daemon(), first);
    assert_eq!(entries(&view), ["config.json"]);
    // With another view, nothing stays of the old one.
    let elsewhere = sandbox.path("elsewhere");
    sandbox.start(&["--replace", "--view", elsewhere.to_str().unwrap()]).expect(0);
    assert!(!view.exists() && elsewhere.join(MODEL[1].0).exists());
    sandbox.ask("stop", &["--remove-view"]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn what_is_in_use_or_has_no_successor_is_not_replaced() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    let daemon = sandbox.daemon();
    let other = ["--replace", "--pattern", "*.json"];
    let lease = sandbox.run(&["sleep", "600"]);
    until("a lease", || sandbox.status()["leases"][0]["command"] == "sleep 600");
    let refused = sandbox.start(&other).expect_refusal(5, &lease.pid().as_raw_nonzero().to_string());
    // Every option that is named is one of the command that is named.
    let advice = format!("'iloader stop {} --wait'", sandbox.name());
    assert!(refused.stderr.contains(&advice) && refused.stderr.contains("is not replaced"), "{refused:?}");
    assert!(!refused.stderr.contains("--force"), "{refused:?}");
    let waited = sandbox.ask("stop", &["--wait=0.1"]).expect_refusal(5, "sleep");
    assert!(waited.stderr.contains("wait longer") && waited.stderr.contains("--force"), "{waited:?}");
    drop(lease);
    until("the end of the lease", || sandbox.status()["leases"] == serde_json::json!([]));
    let mut command = Command::new("sleep");
    command.arg("600").stdin(fs::File::open(view.join(MODEL[1].0)).unwrap());
    let reader = Job::spawn(command);
    let refused = sandbox.start(&other).expect_refusal(5, "without a lease");
    assert!(refused.stderr.contains(&reader.pid().as_raw_nonzero().to_string()), "{refused:?}");
    drop(reader);

    // Each of these would fail after the old one's end, and is found out before.
    let foreign = sandbox.path("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("file"), "precious").unwrap();
    for (code, words, named) in [
        (6, &["--max-memory-bytes", "1"][..], "capped at"),
        (6, &["--pattern", "*", "--reserve-bytes", "1000TiB"], "available"),
        (1, &["--view", foreign.to_str().unwrap()], "foreign"),
        (3, &["--pattern", "*.nothing"], ""),
        (3, &["--pattern", "*", "--socket", "/no/such/place/socket"], "/no/such/place"),
    ] {
        sandbox.start(&[&["--replace"], words].concat()).expect_refusal(code, named);
    }
    assert_eq!((sandbox.daemon(), sandbox.status()["state"].clone()), (daemon, "ready".into()));
    assert!(fs::read(view.join(MODEL[1].0)).unwrap() == bytes_of(1, MODEL[1].1));
    sandbox.ask("stop", &["--wait=60"]).expect(0);
    sandbox.nothing_left();
}

/// Sets or clears an attribute of a file; `false` where that can't be done here.
fn change_attribute(change: &str, path: &Path) -> bool {
    Command::new("chattr").arg(change).arg(path).output().is_ok_and(|ran| ran.status.success())
}

/// A file with the attribute `i`, which goes with it.
struct Immutable(PathBuf);

impl Drop for Immutable {
    fn drop(&mut self) {
        change_attribute("-i", &self.0);
    }
}

#[test]
fn a_cache_stays_where_a_place_of_its_successor_cannot_be_had() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let daemon = sandbox.daemon();
    let scratch = sandbox.path("scratch");
    fs::create_dir(&scratch).unwrap();
    let at = |leaf: &str| scratch.join(leaf).to_str().unwrap().to_owned();
    let pipe = at("pipe");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    let mut tries = vec![
        (1, "--log-file", scratch.to_str().unwrap().to_owned()),
        (1, "--log-file", pipe),
        (3, "--log-file", at("missing/log")),
        (1, "--pid-file", scratch.to_str().unwrap().to_owned()),
        (3, "--pid-file", at("missing/pid")),
    ];
    for option in ["--log-file", "--pid-file", "--socket", "--view"] {
        tries.push((3, option, "/proc/iloader-test".to_owned()));
    }
    let mut guards = Vec::new();
    let (words, pid) = (at("immutable-log"), at("immutable-pid"));
    for (path, text, option) in [(words, "words", "--log-file"), (pid, "4242\n", "--pid-file")] {
        fs::write(&path, text).unwrap();
        if change_attribute("+i", Path::new(&path)) {
            guards.push(Immutable(PathBuf::from(&path)));
            tries.push((1, option, path));
        } else {
            skipped("no file can be made immutable here, which root can on most file systems");
        }
    }
    let before = (entries(&scratch), entries(&sandbox.path("base/run")), entries(&sandbox.path("base/logs")));
    for (code, option, place) in tries {
        let refused = sandbox.start(&["--replace", "--pattern", "config.json", option, &place]);
        let refused = refused.expect_refusal(code, &place);
        assert!(refused.stderr.contains("is not replaced"), "{refused:?}");
    }
    assert_eq!((sandbox.daemon(), sandbox.status()["state"].clone()), (daemon, "ready".into()));
    // A log that would have been made is not, where the old one stays after all.
    let lease = sandbox.run(&["sleep", "600"]);
    until("a lease", || sandbox.status()["leases"][0]["command"] == "sleep 600");
    let log = at("new-log");
    sandbox.start(&["--replace", "--pattern", "config.json", "--log-file", &log]).expect_refusal(5, "sleep");
    drop(lease);
    let after = (entries(&scratch), entries(&sandbox.path("base/run")), entries(&sandbox.path("base/logs")));
    assert_eq!(after, before, "nothing is left of what was tried");

    // All of them can be had.
    let places =
        ["--log-file", &log, "--pid-file", &at("pid"), "--socket", &at("sock"), "--view", &at("a/b/v")];
    sandbox.start(&[&["--replace", "--pattern", "config.json"], &places[..]].concat()).expect(0);
    assert!(fs::read_to_string(&log).unwrap().contains("ready"));
    sandbox.ask("stop", &["--remove-view"]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_cache_takes_no_file_of_another_one() {
    let sandbox = Sandbox::new();
    let model = sandbox.model();
    let model = model.to_str().unwrap();
    let scratch = sandbox.path("scratch");
    fs::create_dir(&scratch).unwrap();
    let at = |leaf: &str| scratch.join(leaf).to_str().unwrap().to_owned();
    let its_pid_file = at("b.pid");
    sandbox.iloader(&["start", model, "--name", "b"]).expect(0);
    sandbox.iloader(&["start", model, "--name", "far", "--pid-file", &its_pid_file]).expect(0);
    let run = sandbox.path("base/run");
    std::os::unix::fs::symlink(run.join("b.pid"), scratch.join("link")).unwrap();
    std::os::unix::fs::symlink(sandbox.path("base"), scratch.join("base")).unwrap();
    fs::write(at("empty"), "").unwrap();
    let contents = || {
        let files = entries(&run).into_iter().filter(|file| !file.ends_with(".sock"));
        files.map(|file| (fs::read(run.join(&file)).unwrap(), file)).collect::<Vec<_>>()
    };
    let before = contents();
    let file = |leaf: &str| run.join(leaf).to_str().unwrap().to_owned();
    let mut tries = vec![
        (2, "--pid-file", its_pid_file.clone()),
        (2, "--log-file", its_pid_file.clone()),
        (2, "--log-file", at("link")),
        (2, "--pid-file", at("base/run/b.pid")),
        (1, "--pid-file", at("empty")),
    ];
    for option in ["--pid-file", "--log-file", "--socket", "--view"] {
        for leaf in ["b.lock", "b.pid", "b.json", "b.sock", "new.pid", ".hidden"] {
            tries.push((2, option, file(leaf)));
        }
    }
    for (code, option, place) in tries {
        let refused = sandbox.start(&[option, &place]).expect_refusal(code, &place);
        assert!(code != 2 || refused.stderr.contains(option), "{refused:?}");
    }
    let both = at("both");
    sandbox.start(&["--pid-file", &both, "--log-file", &both]).expect_refusal(2, "--log-file");
    assert_eq!(contents(), before);
    assert_eq!(entries(&scratch), ["b.pid", "base", "empty", "link"]);
    for name in ["b", "far"] {
        assert_eq!(sandbox.iloader(&["status", name, "--json"]).expect(0).json()["state"], "ready");
    }
    // Its own default places may be named, and an empty file at one of them is what a power failure left.
    fs::write(sandbox.run_file("pid"), "").unwrap();
    let own = [("--pid-file", "pid"), ("--socket", "sock")].map(|(option, extension)| {
        [option.to_owned(), sandbox.run_file(extension).to_str().unwrap().to_owned()]
    });
    let own: Vec<&str> = own.iter().flatten().map(String::as_str).collect();
    sandbox.start(&own).expect(0);
    // The place of a cache that is gone may be had.
    sandbox.iloader(&["stop", "far"]).expect(0);
    sandbox.start(&["--replace", "--pattern", "config.json", "--pid-file", &its_pid_file]).expect(0);
    sandbox.iloader(&["stop", "--all"]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_daemon_in_the_foreground_replaces_and_is_replaced() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let job = Job::spawn(sandbox.start_command(&["--foreground", "--replace", "--pattern", "config.json"]));
    let pid = job.pid().as_raw_nonzero().get();
    until("another daemon", || {
        let ran = sandbox.ask("status", &["--json"]);
        ran.code == Some(0) && ran.json()["pid"] == pid
    });
    sandbox.start(&["--replace"]).expect(0);
    job.wait().expect(0);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_load_is_replaced_too() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze() else { return };
    // It goes on, and is not done yet.
    drop(frozen);
    let ran = sandbox.start(&["--replace", "--pattern", "config.json"]).expect(0);
    assert_eq!(entries(&ran.path()), ["config.json"]);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_start_meets_the_end_of_the_same_cache_and_loads_it_anew() {
    let sandbox = Sandbox::empty();
    sandbox.write("config.json", b"{}");
    // It is evicted at any step of who starts it.
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for round in 0..40 {
                    sandbox.start(&["--idle-ttl", "0.03", "--quiet"]).expect(0);
                    std::thread::sleep(Duration::from_millis(round % 6 * 10));
                }
            });
        }
    });
    sandbox.nothing_left();
    for _ in 0..20 {
        sandbox.started(&[]);
        let stop = Job::spawn(sandbox.command(&["stop", sandbox.name()]));
        sandbox.start(&["--quiet"]).expect(0);
        stop.wait().expect(0);
    }
    // One of them replaces it, and the others join that one.
    for round in 1..=10 {
        let ttl = (1000 + round).to_string();
        let words = ["--replace", "--idle-ttl", &ttl, "--quiet"];
        let starts: Vec<Job> = (0..3).map(|_| Job::spawn(sandbox.start_command(&words))).collect();
        starts.into_iter().for_each(|start| drop(start.wait().expect(0)));
    }
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_file_that_is_touched_is_another_identity() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let file = fs::File::options().append(true).open(sandbox.model().join(MODEL[1].0)).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    sandbox.start(&[]).expect_refusal(9, MODEL[1].0);
    assert_eq!(sandbox.status()["state"], "ready");
    sandbox.ask("stop", &[]).expect(0);
    sandbox.started(&[]);
}

#[test]
fn all_that_wait_get_the_view_when_it_is_there() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze() else { return };
    let name = sandbox.name();
    // A daemon that does not answer is told from one that is not there.
    let status = sandbox.ask("status", &["--timeout", "0.2", "--json"]).expect(1).json();
    assert_eq!(status["state"], "unreachable");
    let list = sandbox.iloader(&["list", "--timeout", "0.2", "--json"]).expect(0).json();
    assert_eq!(list["caches"][0]["state"], "unreachable");
    sandbox.ask("view", &["--timeout", "0.2"]).expect_refusal(4, name);
    sandbox.ask("wait", &["--timeout", "0.2"]).expect_refusal(4, name);
    let run = ["run", "--wait-timeout", "0.2", name, "--", "true"];
    sandbox.iloader(&run).expect_refusal(125, name);
    sandbox.ask("stop", &["--timeout", "0.2"]).expect_refusal(4, name);

    let mut wait = Job::spawn(sandbox.command(&["wait", name]));
    let mut view = Job::spawn(sandbox.command(&["view", name, "--timeout", "600"]));
    let mut run = sandbox.run(&["cat", "{model}/config.json"]);
    until("three that wait", || [&wait, &view, &run].iter().all(|job| job.waits_on_a_socket()));
    assert!(!wait.is_over() && !view.is_over() && !run.is_over());
    drop(frozen);
    assert_eq!(wait.wait().expect(0).stdout, "");
    assert_eq!(view.wait().expect(0).path(), sandbox.view());
    assert_eq!(run.wait().expect(0).stdout, "{}");
    sandbox.ask("stop", &["--wait"]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn whoever_waits_is_told_that_the_load_was_stopped() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze() else { return };
    let wait = Job::spawn(sandbox.command(&["wait", sandbox.name()]));
    let run = sandbox.run(&["true"]);
    let stop = Job::spawn(sandbox.command(&["stop", sandbox.name(), "--timeout", "60"]));
    until("three that wait", || [&wait, &run, &stop].iter().all(|job| job.waits_on_a_socket()));
    drop(frozen);
    stop.wait().expect(0);
    wait.wait().expect_refusal(3, "stopped");
    run.wait().expect_refusal(125, "stopped");
    sandbox.nothing_left();
    assert!(!sandbox.view().join("config.json").exists());
}

#[test]
fn a_source_that_changes_under_a_load_is_not_published() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze() else { return };
    // A start joins the load before the source changes; after that it would be another identity.
    let start = Job::spawn(sandbox.start_command(&["--quiet"]));
    until("a start that waits", || start.waits_on_a_socket());
    let file = fs::File::options().write(true).open(sandbox.model().join("model.safetensors")).unwrap();
    rustix::io::pwrite(&file, b"changed", 50 << 20).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    drop(frozen);
    start.wait().expect_refusal(8, "model.safetensors");
    sandbox.nothing_left();
    assert_eq!(entries(&sandbox.path("base/views")), [""; 0]);
    sandbox.started(&[]);
}

#[test]
fn a_start_that_gives_up_says_that_the_load_goes_on() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze() else { return };
    let mut start = Job::spawn(sandbox.start_command(&["--wait-timeout", "600"]));
    until("a start that waits", || start.waits_on_a_socket());
    assert!(!start.is_over());
    drop(frozen);
    start.signal(Signal::INT);
    let ended = start.wait();
    if ended.code == Some(0) {
        return skipped("the load was over before the start was interrupted");
    }
    // Started with --no-wait, it goes on by itself.
    let ended = ended.expect_refusal(130, "");
    assert!(ended.stderr.contains("goes on") || ended.stderr.contains("was ready just before"), "{ended:?}");
    sandbox.ask("wait", &[]).expect(0);
}

#[test]
fn a_failure_that_was_told_is_not_kept() {
    let sandbox = Sandbox::new();
    // Such a load fails so early that the daemon has often nobody to tell it to yet.
    for _ in 0..50 {
        sandbox.start(&["--max-memory-bytes", "1"]).expect_refusal(6, "capped at");
        assert_eq!(entries(&sandbox.path("base/run")), [""; 0]);
    }
}

#[test]
fn a_failure_that_nobody_waited_for_is_kept_for_who_asks() {
    let sandbox = Sandbox::new();
    for _ in 0..30 {
        let started = sandbox.start(&["--no-wait", "--max-memory-bytes", "1"]).expect(0);
        assert_eq!(started.path(), sandbox.view());
        sandbox.ask("wait", &[]).expect_refusal(1, "capped at");
        sandbox.ask("stop", &[]);
        sandbox.nothing_left();
    }
    sandbox.started(&["--no-wait"]);
    sandbox.ask("wait", &[]).expect(0);
}

#[test]
fn what_cannot_be_loaded_leaves_nothing() {
    let sandbox = Sandbox::new();
    let nothing = || {
        sandbox.nothing_left();
        assert_eq!(entries(&sandbox.path("base/views")), [""; 0]);
        sandbox.ask("status", &[]).expect_refusal(3, sandbox.name());
    };
    sandbox.start(&["--max-memory-bytes", "1MiB"]).expect_refusal(6, sandbox.name());
    nothing();
    sandbox.start(&["--reserve-bytes", "1000TiB"]).expect_refusal(6, "available");
    nothing();
    let huge = fs::File::create(sandbox.model().join("huge.safetensors")).unwrap();
    huge.set_len(8 << 40).unwrap();
    let refused = sandbox.start(&[]).expect_refusal(6, "8.0 TiB");
    assert!(refused.stderr.contains("--force"), "{refused:?}");
    nothing();
    fs::remove_file(sandbox.model().join("huge.safetensors")).unwrap();

    std::os::unix::fs::symlink("gone", sandbox.model().join("dangling.json")).unwrap();
    sandbox.start(&[]).expect_refusal(3, "dangling.json");
    nothing();
    fs::remove_file(sandbox.model().join("dangling.json")).unwrap();
    sandbox.start(&["--pattern", "*.nothing"]).expect_refusal(3, "");
    nothing();
    let missing = sandbox.path("missing");
    let start = ["start", missing.to_str().unwrap(), "--name", sandbox.name()];
    sandbox.iloader(&start).expect_refusal(3, "missing");
    nothing();
    if rustix::process::geteuid().is_root() {
        return skipped("root can read every file: an unreadable one is not tried");
    }
    let config = sandbox.model().join("config.json");
    fs::set_permissions(&config, fs::Permissions::from_mode(0o000)).unwrap();
    sandbox.start(&[]).expect_refusal(1, "config.json");
    nothing();
}
