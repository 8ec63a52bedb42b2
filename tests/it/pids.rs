//! A number is no proof of a process: pids that are used again, and registrations of other hosts and containers.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::containers::{inside, pid_namespace, works};
use crate::harness::{Job, Sandbox, entries, skipped, until};

/// In a PID namespace of its own: kills the daemon, gives its number to a process that has a secret open under the
/// numbers of the view's links, and then gives the command.
const REUSED: &str = r#"
    start=("$@")
    round() {
        "${start[@]}" >/dev/null || exit 78
        daemon=$(<"$RUN.pid")
        link=$(readlink "$VIEW/config.json"); number=${link##*/}
        kill -9 "$daemon"
        while [ -e "/proc/$daemon" ]; do sleep 0.01; done
        echo $((daemon - 1)) >/proc/sys/kernel/ns_last_pid 2>/dev/null || exit 77
        bash -c "exec $number<'$SECRET'; exec sleep 600" &
        [ $! = "$daemon" ] || exit 79
        until [ "$(<"/proc/$daemon/comm")" = sleep ]; do sleep 0.01; done
        echo "$1 direct: $(cat "$VIEW/config.json")"
        echo "$1 state: $("$ILOADER" status --json "$NAME" 2>/dev/null | grep '"state"')"
        echo "$1 listed: $("$ILOADER" list --json | grep '"state"')"
        echo "$1 said: $("$ILOADER" "$1" "$NAME" $2 2>&1 | tr '\n' ' ')"
        [ -e "$VIEW/config.json" ] && echo "$1 follows: $(cat "$VIEW/config.json")"
        kill -0 "$daemon" && echo "$1 lives"
        kill "$daemon"; wait "$daemon" 2>/dev/null
        "$ILOADER" stop "$NAME" 2>/dev/null
    }
    round view; round wait; round stop; round run "-- cat {model}/config.json"
"#;

#[test]
fn a_pid_that_is_used_again_is_not_taken_for_the_daemon() {
    let namespace = pid_namespace();
    if !works(&namespace) {
        return;
    }
    let sandbox = Sandbox::new();
    let secret = sandbox.path("secret");
    fs::write(&secret, "secret").unwrap();
    let words = [&namespace[..], &["bash", "-c", REUSED, "bash"]].concat();
    let mut command = inside(&words, &sandbox.start_command(&[]));
    command
        .env("NAME", sandbox.name())
        .env("VIEW", sandbox.view())
        .env("SECRET", &secret)
        .env("RUN", sandbox.path("base/run").join(sandbox.name()))
        .env("ILOADER", env!("CARGO_BIN_EXE_iloader"));
    let ran = Job::spawn(command).wait();
    if ran.code == Some(77) {
        return skipped("/proc/sys/kernel/ns_last_pid cannot be written here");
    }
    if ran.code == Some(79) {
        return skipped("another process took the number first");
    }
    for command in ["view", "wait", "stop", "run"] {
        let line = |what: &str| {
            let found = ran.stdout.lines().find_map(|line| line.strip_prefix(&format!("{command} {what}")));
            found.unwrap_or_else(|| panic!("{command} {what}: {ran:#?}")).to_owned()
        };
        // This is what a reader without `run` would meet, by the unlikeliest chance.
        assert_eq!(line("direct: "), "secret");
        assert!(line("state: ").contains("dead") && line("listed: ").contains("dead"), "{ran:#?}");
        let said = line("said: ");
        assert!(said.contains("was killed or crashed") || said.contains("had ended already"), "{said}");
        assert!(!said.contains("secret"), "{said}");
        assert_eq!(line("lives"), "", "{command} ended another process");
    }
    assert!(!ran.stdout.contains("follows"), "a dead view was left: {ran:#?}");
    sandbox.nothing_left();
}

/// Every file below BASE/run and BASE/views, with what can be read of it.
fn contents(sandbox: &Sandbox) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for directory in [sandbox.path("base/run"), sandbox.view()] {
        for name in entries(&directory) {
            let path = directory.join(name);
            found.insert(path.clone(), fs::read(&path).unwrap_or_default());
        }
    }
    found
}

/// The commands that could clean up, each with the exit code of a refusal.
fn refusals(sandbox: &Sandbox) -> Vec<(i32, Command)> {
    let name = sandbox.name();
    let words: [(i32, &[&str]); 7] = [
        (1, &["stop", name]),
        (1, &["stop", "--all"]),
        (1, &["view", name]),
        (1, &["wait", name]),
        (1, &["manifest", name]),
        (1, &["status", name]),
        (125, &["run", name, "--", "true"]),
    ];
    let mut commands: Vec<(i32, Command)> =
        words.iter().map(|(code, words)| (*code, sandbox.command(words))).collect();
    commands.push((1, sandbox.start_command(&[])));
    commands
}

#[test]
fn a_base_seen_from_another_pid_namespace_is_left_alone() {
    let namespace = pid_namespace();
    if !works(&namespace) {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let before = contents(&sandbox);
    for (code, command) in refusals(&sandbox) {
        let ran = Job::spawn(inside(&namespace, &command)).wait().expect(code);
        assert!(ran.stderr.contains("is in another PID namespace (a container) of this machine"), "{ran:#?}");
    }
    let list = Job::spawn(inside(&namespace, &sandbox.command(&["list", "--json"]))).wait().expect(0).json();
    assert_eq!(list["caches"][0]["state"], "unreachable");
    assert_eq!(contents(&sandbox), before);
    assert_eq!(sandbox.status()["view_faults"], serde_json::json!([]));
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

/// Changes the registration as another host would have written it.
fn register(file: &Path, change: impl Fn(&mut serde_json::Value)) {
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    change(&mut record);
    fs::write(file, record.to_string()).unwrap();
}

#[test]
fn a_registration_of_another_host_whose_lock_is_held_is_left_alone() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let file = sandbox.run_file("json");
    let ours = fs::read(&file).unwrap();
    register(&file, |record| {
        record["boot_id"] = "00000000-0000-4000-8000-000000000000".into();
        record["host"] = "elsewhere".into();
    });
    let before = contents(&sandbox);
    for (code, command) in refusals(&sandbox) {
        let ran = Job::spawn(command).wait().expect(code);
        assert!(ran.stderr.contains("is on host elsewhere, or before a restart"), "{ran:#?}");
    }
    assert_eq!(contents(&sandbox), before);
    fs::write(&file, ours).unwrap();
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn what_a_restart_of_the_machine_left_is_cleaned_up() {
    for command in ["start", "stop", "view"] {
        let sandbox = Sandbox::new();
        sandbox.started(&[]);
        sandbox.kill_daemon();
        until("the end of the daemon", || sandbox.daemons().is_empty());
        // On a file system of this machine a free lock is a dead daemon's, whenever it was.
        register(&sandbox.run_file("json"), |record| {
            record["boot_id"] = "00000000-0000-4000-8000-000000000000".into();
        });
        match command {
            "start" => {
                let started = sandbox.start(&[]).expect(0);
                assert!(started.stderr.contains("removed the registration"), "{started:#?}");
                sandbox.ask("stop", &[]).expect(0);
            }
            "stop" => drop(sandbox.ask("stop", &[]).expect(0)),
            _ => drop(sandbox.ask("view", &[]).expect_refusal(1, "was killed or crashed")),
        }
        sandbox.nothing_left();
    }
}
