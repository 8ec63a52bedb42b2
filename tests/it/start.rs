//! `start` and the daemon that it leaves behind, as processes: what is reused, refused, cancelled and left.

use std::collections::BTreeSet;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use iloader::control::client::Client;
use iloader::control::message::Operation;
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{bytes_of, heed_ctrl_c, scratch_dir, skipped};

/// How long a test waits for what must happen. It is never waited for where all is well.
const PATIENCE: Duration = Duration::from_secs(60);

/// One small read at a time past the page cache: some tens of megabytes per second at the best.
const SLOWLY: [&str; 8] =
    ["--engine", "threads", "--read-size", "4096", "--direct", "always", "--queue-depth", "1"];

/// Long enough at that rate to be met while it loads.
const SLOW_BYTES: u64 = 400 << 20;

/// A model and a BASE; the daemons of it end with it.
struct Sandbox {
    home: tempfile::TempDir,
}

impl Sandbox {
    fn new(weights_bytes: u64) -> Sandbox {
        heed_ctrl_c();
        let home = scratch_dir();
        let model = home.path().join("model");
        std::fs::create_dir(&model).unwrap();
        std::fs::write(model.join("config.json"), "{}").unwrap();
        std::fs::write(model.join("model.safetensors"), bytes_of(1, weights_bytes)).unwrap();
        Sandbox { home }
    }

    fn path(&self, leaf: &str) -> PathBuf {
        self.home.path().join(leaf)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_iloader"));
        command.args(words).env("ILOADER_BASE_DIR", self.path("base")).stdin(Stdio::null());
        command
    }

    fn start_command(&self, more: &[&str]) -> Command {
        let mut command = self.command(&["start", "--name", "n"]);
        command.arg(self.path("model")).args(more);
        command
    }

    fn start(&self, more: &[&str]) -> Output {
        self.start_command(more).output().unwrap()
    }

    /// A start that goes on, once its daemon is registered.
    fn start_slowly(&self) -> Running {
        let running = self.in_background(&SLOWLY);
        until("a registration", || self.path("base/run/n.json").exists());
        running
    }

    fn in_background(&self, more: &[&str]) -> Running {
        let mut command = self.start_command(more);
        Running(Some(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()))
    }

    fn iloader(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    fn pid(&self) -> Pid {
        let text = std::fs::read_to_string(self.path("base/run/n.pid")).unwrap();
        Pid::from_raw(text.trim().parse().unwrap()).unwrap()
    }

    fn proc(&self, leaf: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{leaf}", self.pid().as_raw_nonzero()))
    }

    /// The names in BASE/run.
    fn run_files(&self) -> BTreeSet<String> {
        let entries = std::fs::read_dir(self.path("base/run")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn loads(&self) -> usize {
        let log = std::fs::read_to_string(self.path("base/logs/n.log")).unwrap();
        log.lines().filter(|line| line.contains(" loads 'n' ")).count()
    }

    fn assert_nothing_runs(&self) {
        until("an orderly end", || self.run_files().is_empty());
        assert!(std::fs::read_dir(self.path("base/views/n")).map_or(0, Iterator::count) == 0);
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.command(&["stop", "--force", "n"]).output();
    }
}

/// A command that is ended when the test fails.
struct Running(Option<Child>);

impl Running {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(self.0.as_ref().unwrap()), signal).unwrap();
    }

    fn output(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "there was never {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("ended by a signal: {output:?}"))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn assert_printed_path(output: &Output, path: &Path) {
    assert_eq!(code(output), 0, "{}", stderr(output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{}\n", path.display()));
}

#[test]
fn a_start_prints_the_view_and_a_second_one_reuses_it() {
    let sandbox = Sandbox::new(5 << 20);
    let view = sandbox.path("base/views/n");
    // A read to the end of both pipes: it returns only where the daemon keeps neither.
    assert_printed_path(&sandbox.start(&[]), &view);
    let bytes = std::fs::read(view.join("model.safetensors")).unwrap();
    assert!(bytes == bytes_of(1, 5 << 20), "the view holds other bytes");
    let pid = sandbox.pid();
    let again = sandbox.start(&["--workers", "3"]);
    assert_printed_path(&again, &view);
    assert!(stderr(&again).contains("--workers 1, not 3"), "{}", stderr(&again));
    assert_eq!((sandbox.pid(), sandbox.loads()), (pid, 1));

    let other = sandbox.start(&["--pattern", "*.json"]);
    assert_eq!((code(&other), other.stdout.len()), (9, 0));
    assert!(stderr(&other).contains("--pattern none → *.json"), "{}", stderr(&other));
    std::fs::write(sandbox.path("model/config.json"), "{ }").unwrap();
    let changed = sandbox.start(&[]);
    assert_eq!(code(&changed), 9);
    assert!(stderr(&changed).contains("config.json: size 2 → 3"), "{}", stderr(&changed));
    assert_eq!(std::fs::read_to_string(view.join("config.json")).unwrap(), "{}", "undisturbed");

    assert_eq!(code(&sandbox.iloader(&["stop", "n"])), 0);
    sandbox.assert_nothing_runs();
    assert!(view.is_dir());
}

#[test]
fn a_daemon_keeps_nothing_of_its_caller() {
    let sandbox = Sandbox::new(1 << 10);
    let mine = sandbox.path("callers-lock");
    let script = format!(
        "trap '' HUP INT TERM USR1; exec 9>'{}'; umask 0; '{}' start '{}' --name n",
        mine.display(),
        env!("CARGO_BIN_EXE_iloader"),
        sandbox.path("model").display(),
    );
    let output = Command::new("sh")
        .args(["-c", &script])
        .env("ILOADER_BASE_DIR", sandbox.path("base"))
        .env("HF_TOKEN", "secret")
        .current_dir(sandbox.home.path())
        .output()
        .unwrap();
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let mut open: Vec<PathBuf> = Vec::new();
    // The starter's connection may close just while it is looked at.
    until("a look at descriptors of which none closes", || {
        let entries = std::fs::read_dir(sandbox.proc("fd")).unwrap();
        let links = entries.map(|entry| std::fs::read_link(entry.unwrap().path()));
        links.collect::<std::io::Result<_>>().map(|links| open = links).is_ok()
    });
    assert!(mine.exists() && !open.contains(&mine), "{open:?}");
    assert_eq!(std::fs::read_link(sandbox.proc("cwd")).unwrap(), Path::new("/"));
    let environment = std::fs::read(sandbox.proc("environ")).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("secret"));
    let status = std::fs::read_to_string(sandbox.proc("status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    for signal in [Signal::HUP, Signal::INT, Signal::TERM, Signal::USR1] {
        assert_eq!(field("SigIgn:") & (1 << (signal.as_raw() - 1)), 0, "{signal:?}");
    }
    assert_eq!(
        u64::from_str_radix(status.lines().find_map(|l| l.strip_prefix("Umask:")).unwrap().trim(), 8),
        Ok(0o77)
    );
    // The sixth field of stat, counted behind the name, is the session: its own.
    let stat = std::fs::read_to_string(sandbox.proc("stat")).unwrap();
    let session = stat.rsplit(") ").next().unwrap().split(' ').nth(3).unwrap();
    assert_eq!(session, sandbox.pid().as_raw_nonzero().to_string());
}

#[test]
fn a_daemon_that_rests_does_not_wake() {
    let sandbox = Sandbox::new(1 << 10);
    assert_eq!(code(&sandbox.start(&[])), 0);
    let switches = || {
        let status = std::fs::read_to_string(sandbox.proc("status")).unwrap();
        status.lines().filter(|line| line.contains("ctxt_switches")).map(str::to_owned).collect::<Vec<_>>()
    };
    // The starter's connection closes a moment after the starter has ended; then there is nothing to do.
    until("a rest", || {
        let before = switches();
        std::thread::sleep(Duration::from_millis(500));
        switches() == before
    });
}

#[test]
fn of_two_starts_one_loads_and_both_print() {
    let sandbox = Sandbox::new(50 << 20);
    let both: Vec<Running> = (0..4).map(|_| sandbox.in_background(&["--quiet"])).collect();
    for start in both {
        assert_printed_path(&start.output(), &sandbox.path("base/views/n"));
    }
    assert_eq!(sandbox.loads(), 1);
}

#[test]
fn ctrl_c_ends_a_load_unless_another_waits() {
    for another_waits in [false, true] {
        let sandbox = Sandbox::new(SLOW_BYTES);
        let start = sandbox.start_slowly();
        let waiter = another_waits.then(|| {
            let mut client = Client::connect(&sandbox.path("base/run/n.sock"), PATIENCE).unwrap();
            client.send(Operation::Wait { progress: true }).unwrap();
            // Its first answer says that it waits.
            client.next(Some(Instant::now() + PATIENCE)).unwrap();
            client
        });
        start.signal(Signal::INT);
        let output = start.output();
        if stderr(&output).contains("O_DIRECT") {
            return skipped("this file system refuses O_DIRECT, so that no load is slow enough to be met");
        }
        assert_eq!((code(&output), output.stdout.len()), (130, 0), "{}", stderr(&output));
        assert_eq!(stderr(&output).contains("goes on"), another_waits, "{}", stderr(&output));
        if another_waits {
            assert_eq!(code(&sandbox.iloader(&["status", "n"])), 4);
            drop(waiter);
        } else {
            // At once: the command returns when nothing is left.
            assert_eq!(sandbox.run_files(), BTreeSet::new());
            sandbox.assert_nothing_runs();
        }
    }
}

#[test]
fn a_lost_terminal_and_an_expired_wait_end_no_load() {
    let sandbox = Sandbox::new(SLOW_BYTES);
    let start = sandbox.start_slowly();
    start.signal(Signal::HUP);
    drop(start);
    let waited = sandbox.start(&["--wait-timeout", "0"]);
    if sandbox.path("base/views/n").exists() || !sandbox.path("base/run/n.sock").exists() {
        return skipped("the load was over too soon");
    }
    assert_eq!((code(&waited), waited.stdout.len()), (4, 0), "{}", stderr(&waited));
    assert!(stderr(&waited).contains("iloader wait n"), "{}", stderr(&waited));
    assert_eq!(code(&sandbox.iloader(&["status", "n"])), 4);
    assert_printed_path(&sandbox.start(&["--no-wait"]), &sandbox.path("base/views/n"));
    assert_eq!((code(&sandbox.iloader(&["stop", "n"])), sandbox.loads()), (0, 1));
    sandbox.assert_nothing_runs();
}

#[test]
fn a_failed_load_is_told_or_kept() {
    let sandbox = Sandbox::new(5 << 20);
    let refused = sandbox.start(&["--max-memory-bytes", "1MiB"]);
    assert_eq!((code(&refused), refused.stdout.len()), (6, 0), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("--max-memory-bytes"), "{}", stderr(&refused));
    sandbox.assert_nothing_runs();
    assert_eq!(code(&sandbox.start(&["--no-wait", "--max-memory-bytes", "1MiB"])), 0);
    until("an end", || !sandbox.path("base/run/n.pid").exists());
    until("a failure", || code(&sandbox.iloader(&["status", "n"])) == 1);
    let waited = sandbox.iloader(&["wait", "n"]);
    assert_eq!(code(&waited), 1);
    assert!(stderr(&waited).contains("capped at"), "{}", stderr(&waited));
    assert_eq!(code(&sandbox.start(&[])), 0, "a failure is in nobody's way");
}

#[test]
fn signals_end_a_daemon_in_order_and_a_kill_leaves_nothing_in_the_way() {
    let sandbox = Sandbox::new(5 << 20);
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        assert_eq!(code(&sandbox.start(&[])), 0);
        kill_process(sandbox.pid(), signal).unwrap();
        sandbox.assert_nothing_runs();
    }
    assert_eq!(code(&sandbox.start(&[])), 0);
    let killed = sandbox.pid();
    kill_process(killed, Signal::KILL).unwrap();
    until("an end", || !Path::new(&format!("/proc/{}/fd/0", killed.as_raw_nonzero())).exists());
    let again = sandbox.start(&[]);
    assert_printed_path(&again, &sandbox.path("base/views/n"));
    assert_ne!(sandbox.pid(), killed);
    assert!(stderr(&again).contains("withdrew the dead view"), "{}", stderr(&again));
}

#[test]
fn a_daemon_killed_while_it_loads_is_told_and_cleaned_up() {
    let sandbox = Sandbox::new(SLOW_BYTES);
    let start = sandbox.start_slowly();
    kill_process(sandbox.pid(), Signal::KILL).unwrap();
    let output = start.output();
    if stderr(&output).contains("O_DIRECT") {
        return skipped("this file system refuses O_DIRECT, so that no load is slow enough to be met");
    }
    assert_eq!((code(&output), output.stdout.len()), (1, 0));
    assert!(stderr(&output).contains("was killed by SIGKILL"), "{}", stderr(&output));
    assert_eq!(sandbox.run_files(), BTreeSet::new());
}

#[test]
fn a_daemon_in_the_foreground_tells_its_manager_and_ends_with_zero() {
    let sandbox = Sandbox::new(5 << 20);
    let manager = UnixDatagram::bind(sandbox.path("notify")).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = sandbox.start_command(&["--foreground"]);
    command.env("NOTIFY_SOCKET", sandbox.path("notify")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let daemon = Running(Some(command.spawn().unwrap()));
    let heard = |word: &str| {
        let mut buffer = [0; 4096];
        loop {
            let length = manager.recv(&mut buffer).expect("the manager is told");
            if String::from_utf8_lossy(&buffer[..length]).lines().any(|line| line == word) {
                return;
            }
        }
    };
    heard("READY=1");
    assert_eq!(sandbox.pid(), Pid::from_child(daemon.0.as_ref().unwrap()));
    assert!(sandbox.path("base/views/n/config.json").exists());
    let second = sandbox.start(&["--foreground"]);
    assert_eq!(code(&second), 5, "{}", stderr(&second));
    assert_printed_path(&sandbox.start(&[]), &sandbox.path("base/views/n"));
    daemon.signal(Signal::TERM);
    heard("STOPPING=1");
    let output = daemon.output();
    assert_eq!((code(&output), output.stdout.len()), (0, 0));
    assert!(stderr(&output).contains("ready: 2 files"), "{}", stderr(&output));
    sandbox.assert_nothing_runs();
}
