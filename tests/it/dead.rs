//! A daemon that was killed: nobody follows what it left, and the next command cleans it up.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{Job, MODEL, Sandbox, bytes_of, entries, until};

/// A cache whose daemon was killed. What it left stands.
fn dead() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    sandbox.kill_daemon();
    assert!(fs::symlink_metadata(sandbox.view().join("config.json")).is_ok());
    assert!(sandbox.run_file("sock").exists() && sandbox.run_file("json").exists());
    sandbox
}

#[test]
fn a_dead_cache_is_said_to_be_dead() {
    let sandbox = dead();
    let status = sandbox.ask("status", &[]).expect(1);
    assert!(status.stdout.contains("dead") && status.stderr.contains("was killed or crashed"), "{status:?}");
    let status = sandbox.ask("status", &["--json"]).expect(1).json();
    assert_eq!((&status["state"], &status["name"]), (&"dead".into(), &sandbox.name().into()));
    assert_eq!(status["view"], sandbox.view().to_str().unwrap());
    assert_eq!(status["error"]["kind"], "failed");
    let list = sandbox.iloader(&["list", "--json"]).expect(0).json();
    assert_eq!(list["caches"][0]["state"], "dead");
    // Looking changes nothing.
    assert!(fs::symlink_metadata(sandbox.view().join("config.json")).is_ok());
}

#[test]
fn no_command_follows_a_dead_view_and_each_cleans_up() {
    for (command, code) in [("view", 1), ("wait", 1), ("manifest", 1), ("run", 125)] {
        let sandbox = dead();
        let more: &[&str] = if command == "run" { &["--", "cat", "{model}/config.json"] } else { &[] };
        let refused = sandbox.ask(command, more).expect_refusal(code, "was killed or crashed");
        assert!(refused.stderr.contains("iloader start"), "{refused:?}");
        sandbox.nothing_left();
        sandbox.ask("status", &[]).expect_refusal(3, sandbox.name());
    }
}

#[test]
fn a_start_and_a_stop_clean_up_what_is_dead() {
    let sandbox = dead();
    let started = sandbox.start(&[]).expect(0);
    assert!(started.stderr.contains("withdrew the dead view"), "{started:?}");
    assert!(fs::read(sandbox.view().join(MODEL[1].0)).unwrap() == bytes_of(1, MODEL[1].1));
    sandbox.kill_daemon();
    let stopped = sandbox.ask("stop", &["--remove-view"]).expect(0);
    assert!(stopped.stderr.contains("had ended already"), "{stopped:?}");
    sandbox.nothing_left();
    assert!(!sandbox.view().exists());
    // Other settings are in nobody's way once the cache is dead.
    sandbox.started(&[]);
    sandbox.kill_daemon();
    sandbox.started(&["--keep-dirname"]);
}

#[test]
fn a_stop_cleans_up_after_a_daemon_that_is_killed_while_it_waits() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    let mut lease = sandbox.run(&["sleep", "600"]);
    until("a lease", || sandbox.status()["leases"].as_array().is_some_and(|leases| leases.len() == 1));
    let stop = Job::spawn(sandbox.command(&["stop", sandbox.name(), "--wait"]));
    // Its question is with the daemon once it has said whom it waits for; before that it would meet
    // a dead cache.
    until("a stop that waits", || stop.waits_on_a_socket());
    sandbox.kill_daemon();
    let stopped = stop.wait().expect(0);
    assert!(stopped.stderr.contains("cleaned up: withdrew the dead view"), "{stopped:?}");
    assert!(!stopped.stderr.contains("stopped '"), "{stopped:?}");
    assert_eq!(entries(&view), [""; 0]);
    sandbox.nothing_left();
    assert!(!lease.is_over(), "the command is left alone");
}

#[test]
fn a_stop_cleans_up_after_a_daemon_that_is_killed_before_it_says_how_it_is() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    kill_process(sandbox.daemon(), Signal::STOP).unwrap();
    let stop = Job::spawn(sandbox.command(&["stop", sandbox.name(), "--timeout", "60"]));
    until("a stop that asks", || stop.waits_on_a_socket());
    sandbox.kill_daemon();
    let stopped = stop.wait().expect(0);
    assert!(stopped.stderr.contains("was killed before it stopped; cleaned up: withdrew"), "{stopped:?}");
    assert_eq!(entries(&view), [""; 0]);
    sandbox.nothing_left();
}

#[test]
fn strange_files_in_a_dead_view_are_kept_and_named() {
    let sandbox = dead();
    fs::set_permissions(sandbox.view(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(sandbox.view().join("mine.txt"), "mine").unwrap();
    let stopped = sandbox.ask("stop", &["--remove-view"]).expect(0);
    assert!(stopped.stderr.contains("mine.txt"), "{stopped:?}");
    assert_eq!(fs::read_to_string(sandbox.view().join("mine.txt")).unwrap(), "mine");
    assert_eq!(entries(&sandbox.path("base/run")), [""; 0]);
}

/// Another process of ours, with a file of ours open under the numbers of the view's links.
struct Bystander {
    job: Job,
}

impl Bystander {
    fn new(sandbox: &Sandbox) -> Bystander {
        fs::write(sandbox.path("secret"), "another process's file").unwrap();
        let mut command = Command::new("sleep");
        command.arg("600").stdin(fs::File::open(sandbox.path("secret")).unwrap());
        Bystander { job: Job::spawn(command) }
    }

    fn pid(&self) -> Pid {
        self.job.pid()
    }

    fn lives(&mut self) -> bool {
        !self.job.is_over()
    }
}

/// Makes every link of the directory lead to what `target` says.
fn lead_elsewhere(directory: &Path, target: &impl Fn(&Path) -> String) {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
    for name in entries(directory) {
        let path = directory.join(name);
        if fs::symlink_metadata(&path).unwrap().is_dir() {
            lead_elsewhere(&path, target);
        } else {
            let target = target(&path);
            fs::remove_file(&path).unwrap();
            symlink(target, path).unwrap();
        }
    }
    fs::set_permissions(directory, fs::Permissions::from_mode(0o555)).unwrap();
}

/// The registration, as if the daemon had had another pid.
fn register_as(sandbox: &Sandbox, pid: Pid) {
    let mut record: serde_json::Value =
        serde_json::from_slice(&fs::read(sandbox.run_file("json")).unwrap()).unwrap();
    record["pid"] = pid.as_raw_nonzero().get().into();
    fs::write(sandbox.run_file("json"), record.to_string()).unwrap();
    fs::write(sandbox.run_file("pid"), format!("{pid}\n")).unwrap();
}

#[test]
fn a_pid_that_another_process_has_by_now_is_not_followed() {
    for command in ["run", "view", "start", "stop"] {
        let sandbox = dead();
        let mut bystander = Bystander::new(&sandbox);
        let pid = bystander.pid();
        lead_elsewhere(&sandbox.view(), &|_| format!("/proc/{pid}/fd/0"));
        register_as(&sandbox, pid);
        assert_eq!(fs::read_to_string(sandbox.view().join("config.json")).unwrap(), "another process's file");
        assert_eq!(sandbox.ask("status", &["--json"]).expect(1).json()["state"], "dead");
        match command {
            "run" => {
                let ran = sandbox.run(&["cat", "{model}/config.json"]).wait();
                ran.expect_refusal(125, "was killed or crashed");
            }
            "view" => drop(sandbox.ask("view", &[]).expect_refusal(1, "was killed or crashed")),
            "stop" => drop(sandbox.ask("stop", &[]).expect(0)),
            _ => {
                sandbox.started(&[]);
                assert_eq!(fs::read(sandbox.view().join("config.json")).unwrap(), bytes_of(0, MODEL[0].1));
                sandbox.ask("stop", &[]).expect(0);
            }
        }
        sandbox.nothing_left();
        assert!(bystander.lives(), "{command} ended a process that is none of ours");
    }
}

#[test]
fn a_live_view_that_leads_elsewhere_is_not_run_on() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let bystander = Bystander::new(&sandbox);
    let pid = bystander.pid();
    lead_elsewhere(&sandbox.view(), &|_| format!("/proc/{pid}/fd/0"));
    sandbox.run(&["cat", "{model}/config.json"]).wait().expect_refusal(125, &format!("process {pid}"));
    assert_eq!(sandbox.status()["view_faults"].as_array().unwrap().len(), MODEL.len());
}

#[test]
fn a_dead_view_that_leads_to_another_cache_is_left_to_it() {
    let sandbox = dead();
    let model = sandbox.model();
    let other = format!("{}.other", sandbox.name());
    let start = ["start", model.to_str().unwrap(), "--name", other.as_str()];
    let view = sandbox.iloader(&start).expect(0).path();
    // The new daemon got the pid and, by the unlikeliest chance, the numbers of the dead one.
    let depth = sandbox.view();
    lead_elsewhere(&sandbox.view(), &|path| {
        let same = view.join(path.strip_prefix(&depth).unwrap());
        fs::read_link(same).unwrap().to_str().unwrap().to_owned()
    });
    sandbox.ask("view", &[]).expect_refusal(1, "was killed or crashed");
    sandbox.start(&[]).expect_refusal(5, sandbox.view().to_str().unwrap());
    assert_eq!(sandbox.iloader(&["view", &other]).expect(0).path(), view);
    assert!(fs::read(view.join(MODEL[1].0)).unwrap() == bytes_of(1, MODEL[1].1));
}

#[test]
fn a_daemon_killed_at_any_moment_of_its_start_is_in_nobodys_way() {
    let sandbox = Sandbox::new();
    for pause in 0..12 {
        let start = Job::spawn(sandbox.start_command(&["--quiet"]));
        let file = sandbox.run_file("pid");
        until("a pid", || file.exists() || sandbox.view().join("config.json").exists());
        std::thread::sleep(std::time::Duration::from_millis(pause * pause / 2));
        if let Some(pid) = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok()) {
            let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
        }
        let ended = start.wait();
        assert!(matches!(ended.code, Some(0 | 1)), "{ended:?}");
        sandbox.started(&[]);
        sandbox.kill_daemon();
    }
    sandbox.started(&[]);
    assert_eq!(entries(&sandbox.path("base/views")), [sandbox.name()]);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_base_that_is_removed_under_a_daemon_leaves_nothing_in_the_end() {
    let sandbox = Sandbox::new();
    let socket = sandbox.path("socket");
    let socket = socket.to_str().unwrap();
    sandbox.started(&["--socket", socket]);
    fs::rename(sandbox.path("base"), sandbox.path("gone")).unwrap();
    let status = sandbox.iloader(&["status", "--socket", socket]).expect(0);
    assert!(status.stdout.contains("was moved"), "{status:?}");
    sandbox.ask("status", &[]).expect_refusal(3, sandbox.name());
    sandbox.iloader(&["stop", "--socket", socket]).expect(0);
    sandbox.nothing_left();
    assert!(!sandbox.path("socket").exists());
}
