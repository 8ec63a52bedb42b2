//! Namespaces, capabilities, PID 1 and the ends of sessions: what a reader in a container meets, and what ends
//! a daemon. The namespaces are made with `unshare`, which is all that a container is to the kernel here.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::harness::{Job, Ran, Sandbox, entries, skipped, until};
use crate::unprivileged::Town;

/// `command` behind `words`, in the command's environment.
pub(crate) fn inside(words: &[&str], command: &Command) -> Command {
    let mut wrapper = Command::new(words[0]);
    wrapper.args(&words[1..]).arg(command.get_program()).args(command.get_args());
    wrapper.stdin(std::process::Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapper.env(name, value),
            None => wrapper.env_remove(name),
        };
    }
    wrapper
}

/// Whether commands can be run by `words`; else a line says that they can't.
pub(crate) fn works(words: &[&str]) -> bool {
    let output = Command::new(words[0]).args(&words[1..]).arg("true").output();
    let works = output.as_ref().is_ok_and(|output| output.status.success());
    if !works {
        let why =
            output.map_or_else(|error| error.to_string(), |output| String::from_utf8(output.stderr).unwrap());
        skipped(format!("'{}' is not possible here: {}", words.join(" "), why.trim()));
    }
    works
}

/// How this user makes a PID namespace with a /proc of its own.
pub(crate) fn pid_namespace() -> Vec<&'static str> {
    let mut words = vec!["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    if !rustix::process::geteuid().is_root() {
        words.extend(["--user", "--map-root-user"]);
    }
    words
}

fn run_inside(sandbox: &Sandbox, words: &[&str], more: &[&str]) -> Ran {
    let run = [&["run"], more, &[sandbox.name(), "--", "cat", "{model}/config.json"]].concat();
    Job::spawn(inside(words, &sandbox.command(&run))).wait()
}

#[test]
fn a_reader_in_another_namespace_is_told_the_true_reason() {
    let sandbox = Sandbox::new();
    for backing in ["memfd", "auto"] {
        sandbox.started(&["--backing", backing]);
        let socket = sandbox.run_file("sock");
        let by_socket = ["--socket", socket.to_str().unwrap()];
        for mapping in [&[][..], &["--map-root-user"], &["--map-user=1000"]] {
            let words = [&["unshare", "--user"], mapping].concat();
            if !works(&words) {
                continue;
            }
            // Unmapped, the files of BASE belong to nobody in there, and that comes first.
            let refused = run_inside(&sandbox, &words, &by_socket);
            let reasons = ["another user namespace", "who is not trusted", "permission denied"];
            assert!(reasons.iter().any(|reason| refused.stderr.contains(reason)), "{refused:#?}");
            if mapping == ["--map-root-user"] {
                assert!(refused.stderr.contains("in another user namespace than the daemon"), "{refused:#?}");
            }
            refused.expect_refusal(125, "");
        }
        let pid_namespace = pid_namespace();
        if works(&pid_namespace) {
            run_inside(&sandbox, &pid_namespace, &[]).expect_refusal(125, "is in another PID namespace");
            let refused = run_inside(&sandbox, &pid_namespace, &by_socket);
            refused.expect_refusal(125, "the daemon runs in another PID namespace");
            // Asking and stopping go through the socket alone; nothing is cleaned up that lives elsewhere.
            let from_there =
                |words: &[&str]| Job::spawn(inside(&pid_namespace, &sandbox.command(words))).wait();
            from_there(&["stop", sandbox.name()]).expect_refusal(1, "is in another PID namespace");
            let start = Job::spawn(inside(&pid_namespace, &sandbox.start_command(&[]))).wait();
            start.expect_refusal(1, "is in another PID namespace");
            let status = from_there(&["status", sandbox.name()]).expect(1);
            assert!(status.stdout.contains("unreachable"), "{status:#?}");
            assert_eq!(sandbox.status()["view_faults"], serde_json::json!([]), "it is undisturbed");
            from_there(&["status", "--socket", socket.to_str().unwrap()]).expect(0);
            from_there(&["stop", "--socket", socket.to_str().unwrap()]).expect(0);
        } else {
            sandbox.ask("stop", &[]).expect(0);
        }
        sandbox.nothing_left();
    }
}

#[test]
fn namespaces_that_do_not_matter_do_not_matter() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let is_root = rustix::process::geteuid().is_root();
    for words in
        [&["unshare", "--mount"][..], &["unshare", "--net"], &["unshare", "--ipc"], &["unshare", "--uts"]]
    {
        if !is_root {
            skipped(format!("'{}' without a user namespace needs root", words.join(" ")));
        } else if works(words) {
            run_inside(&sandbox, words, &[]).expect(0);
        }
    }
    if works(&["setpriv", "--no-new-privs"]) {
        run_inside(&sandbox, &["setpriv", "--no-new-privs"], &[]).expect(0);
    }
    sandbox.ask("stop", &[]).expect(0);
}

#[test]
fn a_reader_with_less_is_told_what_it_lacks() {
    if !rustix::process::geteuid().is_root() {
        return skipped("giving up capabilities and changing groups needs root");
    }
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    // As root in a container has it: fewer capabilities, and not the one that makes up for it.
    let fewer = ["setpriv", "--inh-caps=-all", "--bounding-set=-sys_ptrace,-sys_admin"];
    if works(&fewer) {
        let refused = run_inside(&sandbox, &fewer, &[]);
        refused.expect_refusal(125, "the daemon holds capabilities that this process lacks");
    }
    sandbox.ask("stop", &[]).expect(0);

    let Some(town) = Town::new() else { return };
    let user = town.user();
    town.start(&user, &[]).expect(0);
    let mut elsewhere = user.clone();
    elsewhere.gid += 1;
    let refused = town.iloader(&elsewhere, &["run", "n", "--", "true"]);
    let groups = format!("this process has primary group {}, the daemon group {}", elsewhere.gid, user.gid);
    refused.expect_refusal(125, &groups);
    town.iloader(&user, &["run", "n", "--", "true"]).expect(0);
    town.iloader(&user, &["stop", "n"]).expect(0);
}

/// A user namespace in which no other one can be made, and nobody may mount: a container of the usual kind.
const CONFINED: &str = "echo 0 >/proc/sys/user/max_user_namespaces && \
    exec setpriv --inh-caps=-all --bounding-set=-all -- \"$@\"";

#[test]
fn where_no_namespace_can_be_made_a_memfd_is_the_backing_and_the_reason_is_shown() {
    let sandbox = Sandbox::new();
    let confined = ["unshare", "--user", "--map-root-user", "sh", "-c", CONFINED, "sh"];
    if !works(&confined) {
        return;
    }
    let confined = |command: &Command| Job::spawn(inside(&confined, command)).wait();
    let refused = confined(&sandbox.start_command(&["--backing", "tmpfs"]));
    refused.expect_refusal(1, "cannot have a private tmpfs: cannot make a user namespace");
    sandbox.nothing_left();
    let script =
        r#""$ILOADER" "$@" && "$ILOADER" status "$NAME" --json >"$OUT" && "$ILOADER" run "$NAME" -- true"#;
    let mut start = inside(&["sh", "-c", script, "sh"], &Command::new("start"));
    let out = sandbox.path("status.json");
    for (name, value) in sandbox.command(&[]).get_envs().filter_map(|(name, value)| Some((name, value?))) {
        start.env(name, value);
    }
    start.arg(sandbox.model()).args(["--name", sandbox.name()]);
    start.env("ILOADER", env!("CARGO_BIN_EXE_iloader")).env("NAME", sandbox.name()).env("OUT", &out);
    confined(&start).expect(0);
    let status: serde_json::Value = serde_json::from_slice(&std::fs::read(out).unwrap()).unwrap();
    assert_eq!(status["backing"], "memfd");
    let reason = status["backing_reason"].as_str().unwrap();
    let expected = ["a private tmpfs cannot be had (cannot make a user namespace", "aligns readers' maps"];
    assert!(expected.iter().any(|words| reason.contains(words)), "{reason}");
    kill_process(sandbox.daemon(), Signal::TERM).unwrap();
    sandbox.nothing_left();
}

/// The first process inside the namespace that `unshare` made.
fn child_of(parent: Pid) -> Option<Pid> {
    let is_child = |name: &String| {
        let stat = std::fs::read_to_string(Path::new("/proc").join(name).join("stat")).unwrap_or_default();
        let parent_field =
            stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1).map(str::to_owned));
        parent_field == Some(parent.as_raw_nonzero().to_string())
    };
    entries(Path::new("/proc"))
        .iter()
        .find(|name| is_child(name))
        .and_then(|pid| Pid::from_raw(pid.parse().ok()?))
}

#[test]
fn pid_1_of_a_container_ends_in_order_at_sigterm() {
    let namespace = pid_namespace();
    if !works(&namespace) {
        return;
    }
    let sandbox = Sandbox::new();
    let container = Job::spawn(inside(&namespace, &sandbox.start_command(&["--foreground"])));
    until("a view", || sandbox.view().join("config.json").is_symlink());
    assert_eq!(std::fs::read_to_string(sandbox.run_file("pid")).unwrap().trim(), "1");
    // A signal from outside its namespace; from inside, those that it does not handle would be ignored.
    kill_process(child_of(container.pid()).expect("PID 1"), Signal::TERM).unwrap();
    let ended = container.wait().expect(0);
    assert!(ended.stderr.contains("signal 15: it is stopped"), "{ended:#?}");
    sandbox.nothing_left();
}

#[test]
fn a_daemon_ends_with_its_container_and_the_next_start_cleans_up() {
    let namespace = pid_namespace();
    if !works(&namespace) {
        return;
    }
    let sandbox = Sandbox::new();
    // The first process of the namespace ends, and the kernel kills the rest of it.
    let container = [&namespace[..], &["sh", "-c", "\"$@\" && echo inside", "sh"]].concat();
    let ran = Job::spawn(inside(&container, &sandbox.start_command(&[]))).wait().expect(0);
    assert!(ran.stdout.ends_with("inside\n"), "{ran:#?}");
    until("a free lock", || sandbox.ask("status", &[]).stdout.contains("dead"));
    sandbox.ask("run", &["--", "true"]).expect_refusal(125, "was killed or crashed");
    sandbox.nothing_left();
    sandbox.started(&[]);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn the_end_of_a_process_group_or_session_ends_no_daemon() {
    let sandbox = Sandbox::new();
    let mut shell =
        inside(&["sh", "-c", "\"$@\" && echo started && exec sleep 1000", "sh"], &sandbox.start_command(&[]));
    shell.process_group(0);
    let shell = Job::spawn(shell);
    until("a view", || sandbox.view().join("config.json").exists());
    // As a terminal that goes away does it, and then as a supervisor that only knows the group.
    for signal in [Signal::HUP, Signal::KILL] {
        let _ = kill_process_group(shell.pid(), signal);
    }
    drop(shell);
    assert_eq!(sandbox.status()["state"], "ready");
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

/// A cgroup that is removed at the end, with all that is in it.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(name: &str) -> Option<Cgroup> {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let mut hierarchies = mounts.lines().filter(|line| line.split(' ').nth(2) == Some("cgroup2"));
        let root = Path::new(hierarchies.next()?.split(' ').nth(1)?);
        let cgroup = Cgroup(root.join(format!("iloader-{name}")));
        std::fs::create_dir(&cgroup.0).ok()?;
        cgroup.0.join("cgroup.kill").exists().then_some(cgroup)
    }

    fn processes(&self) -> String {
        std::fs::read_to_string(self.0.join("cgroup.procs")).unwrap()
    }

    fn kill(&self) {
        std::fs::write(self.0.join("cgroup.kill"), "1").unwrap();
        until("an empty cgroup", || self.processes().is_empty());
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("cgroup.kill"), "1");
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

/// How batch systems and service managers end a job: by its cgroup, which no process of it can leave.
#[test]
fn a_daemon_ends_with_the_cgroup_of_the_job_that_started_it() {
    let sandbox = Sandbox::new();
    let Some(cgroup) = Cgroup::new(sandbox.name()) else {
        return skipped("no cgroup (version 2, with cgroup.kill) can be made");
    };
    let join = format!("echo $$ >'{}' && exec \"$@\"", cgroup.0.join("cgroup.procs").display());
    let in_job = |command: &Command| Job::spawn(inside(&["sh", "-c", &join, "sh"], command));
    in_job(&sandbox.start_command(&[])).wait().expect(0);
    assert!(
        cgroup.processes().contains(&sandbox.daemon().as_raw_nonzero().to_string()),
        "a daemon stays in it"
    );
    cgroup.kill();
    until("a free lock", || sandbox.ask("status", &[]).stdout.contains("dead"));
    let again = sandbox.start(&[]).expect(0);
    assert!(again.stderr.contains("withdrew the dead view"), "{again:#?}");

    // Started outside of it, the cache outlives the job, whose lease ends with it.
    let reader = in_job(&sandbox.command(&["run", sandbox.name(), "--", "sleep", "1000"]));
    until("a lease", || sandbox.status()["leases"].as_array().unwrap().len() == 1);
    cgroup.kill();
    drop(reader);
    until("the end of the lease", || sandbox.status()["leases"].as_array().unwrap().is_empty());
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}
