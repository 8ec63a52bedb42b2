//! Daemons that hang, clients that hang or talk nonsense, and sockets that are somebody else's.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use iloader::control::client::Client;
use iloader::control::frame::{self, REQUEST_BYTES_MAX};
use iloader::control::message::{Operation, Reply, Request};
use rustix::process::{Signal, kill_process};

use crate::harness::{PATIENCE, Sandbox, until};

/// A `kill -STOP` that took effect, until it is dropped.
struct Stopped(rustix::process::Pid);

impl Stopped {
    fn new(sandbox: &Sandbox) -> Stopped {
        let pid = sandbox.daemon();
        kill_process(pid, Signal::STOP).unwrap();
        until("a stopped daemon", || iloader::sys::process::is_stopped(pid.as_raw_nonzero().get()));
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

#[test]
fn every_command_times_out_at_a_daemon_that_is_stopped_and_says_so() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let (model, name, socket) = (sandbox.model(), sandbox.name(), sandbox.run_file("sock"));
    let (model, socket) = (model.to_str().unwrap(), socket.to_str().unwrap());
    let stopped = Stopped::new(&sandbox);
    let pid = stopped.0.as_raw_nonzero();
    for (code, words) in [
        (4, &["wait", name, "--timeout", "0.2"][..]),
        (4, &["view", name, "--timeout", "0.2"]),
        (4, &["manifest", name, "--timeout", "0.2"]),
        (4, &["stop", name, "--timeout", "0.2"]),
        (4, &["stop", name, "--force", "--timeout", "0.2"]),
        (4, &["wait", "--socket", socket, "--timeout", "0.2"]),
        (125, &["run", "--wait-timeout", "0.2", name, "--", "true"]),
        (4, &["start", model, "--name", name, "--wait-timeout", "0.2"]),
    ] {
        let refused = sandbox.iloader(words).expect_refusal(code, &format!("its process {pid} is stopped"));
        assert!(refused.stderr.contains(&format!("hint: let it go on: kill -CONT {pid}")), "{refused:#?}");
        assert!(!refused.stderr.contains("load goes on"), "{refused:#?}");
    }
    let status = sandbox.ask("status", &["--json", "--timeout", "0.2"]).expect(1).json();
    assert_eq!((&status["state"], &status["error"]["kind"]), (&"unreachable".into(), &"timed-out".into()));
    let list = sandbox.iloader(&["list", "--json", "--timeout", "0.2"]).expect(0).json();
    assert_eq!(list["caches"][0]["state"], "unreachable");
    sandbox.iloader(&["stop", "--all", "--timeout", "0.2"]).expect_refusal(4, "is stopped");

    drop(stopped);
    // A stop that was given up does not happen later by surprise.
    assert_eq!(sandbox.status()["state"], "ready");
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_load_whose_daemon_is_stopped_does_not_go_on() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze() else { return };
    for words in
        [&["wait", sandbox.name(), "--timeout", "0.2"][..], &["view", sandbox.name(), "--timeout", "0.2"]]
    {
        let refused = sandbox.iloader(words).expect_refusal(4, "is stopped by a signal");
        assert!(!refused.stderr.contains("the load goes on"), "{refused:#?}");
    }
    drop(frozen);
    sandbox.ask("wait", &[]).expect(0);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

fn connected(sandbox: &Sandbox) -> UnixStream {
    let stream = UnixStream::connect(sandbox.run_file("sock")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn asking(operation: Operation) -> Vec<u8> {
    frame::encode(&Request::new(operation), REQUEST_BYTES_MAX).unwrap()
}

#[test]
fn clients_that_hang_or_talk_nonsense_keep_nobody_waiting() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let lease = sandbox.run(&["sleep", "600"]);
    until("a lease", || sandbox.status()["leases"].as_array().is_some_and(|leases| leases.len() == 1));
    let mut hanging = Vec::new();
    for begun in 0..100usize {
        let mut stream = connected(&sandbox);
        // Nothing, a piece of a length, and a piece of a request.
        stream.write_all(&asking(Operation::Status {})[..begun % 3 * 5 / 2]).unwrap();
        hanging.push(stream);
    }
    for rubbish in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[2, 0, 0, 0, b'{', b'!'], &[0; 64]] {
        let mut stream = connected(&sandbox);
        // The daemon may have closed it before all is written.
        let _ = stream.write_all(rubbish);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(String::from_utf8_lossy(&answer).contains("\"error\""), "{rubbish:?}: {answer:?}");
    }
    // A client that has nothing more to say is answered all the same.
    let mut half = connected(&sandbox);
    half.write_all(&asking(Operation::Status {})).unwrap();
    half.shutdown(Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    half.read_to_end(&mut answer).unwrap();
    assert!(String::from_utf8_lossy(&answer).contains("\"status\""));

    assert_eq!(sandbox.status()["state"], "ready");
    sandbox.run(&["true"]).wait().expect(0);
    drop(lease);
    until("the end of the lease", || sandbox.status()["leases"] == serde_json::json!([]));
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn more_clients_at_once_than_it_takes_are_all_served() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    // Every place is taken, until the daemon closes what asks for nothing.
    let idle: Vec<UnixStream> = (0..300).map(|_| connected(&sandbox)).collect();
    let socket = sandbox.run_file("sock");
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..64)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = Client::connect(&socket, PATIENCE).unwrap();
                    client.request(Operation::Status {}).unwrap()
                })
            })
            .collect();
        for client in clients {
            assert!(matches!(client.join().unwrap(), Reply::Status(_)));
        }
    });
    drop(idle);
    // The commands give their own time to it.
    let idle: Vec<UnixStream> = (0..300).map(|_| connected(&sandbox)).collect();
    sandbox.ask("status", &["--timeout", "60"]).expect(0);
    drop(idle);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_socket_path_that_is_taken_is_left_to_its_owner() {
    let sandbox = Sandbox::new();
    let at = sandbox.path("socket");
    let place = ["--socket", at.to_str().unwrap()];
    let is_untouched = |what: &str| {
        assert!(std::fs::symlink_metadata(&at).is_ok(), "{what} is gone");
        sandbox.nothing_left();
    };

    let listener = UnixListener::bind(&at).unwrap();
    let refused = sandbox.start(&place).expect_refusal(5, "another process listens on it");
    assert!(refused.stderr.contains("--socket"), "{refused:#?}");
    is_untouched("the listening socket");
    // Whoever has it still gets its own clients, and no command takes it for a daemon of ours.
    listener.set_nonblocking(true).unwrap();
    while listener.accept().is_ok() {}
    for words in [&["status", "--timeout", "0.2"][..], &["stop", "--timeout", "0.2"]] {
        let ran = sandbox.iloader(&[&words[..1], &place, &words[1..]].concat());
        assert!(matches!(ran.code, Some(1 | 4)) && ran.stderr.contains("did not answer in time"), "{ran:#?}");
    }
    while listener.accept().is_ok() {}
    let answering = std::thread::spawn(move || {
        listener.set_nonblocking(false).unwrap();
        let mut answered = 0;
        while answered < 2 {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            let mut heard = [0; 512];
            if stream.read(&mut heard).is_ok_and(|length| length > 0) {
                answered += 1;
            }
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
        listener
    });
    for words in [&["status"][..], &["stop"]] {
        let ran = sandbox.iloader(&[&words[..1], &place, &words[1..]].concat()).expect(1);
        assert!(ran.stderr.contains("what came is no control message"), "{ran:#?}");
    }
    drop(answering.join().unwrap());

    // Nobody listens any more: as a daemon's that was killed.
    sandbox.started(&place);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
    assert!(!at.exists());

    std::fs::create_dir(&at).unwrap();
    sandbox.start(&place).expect_refusal(1, "it is no socket of ours");
    is_untouched("the directory");
    std::fs::remove_dir(&at).unwrap();
    std::fs::write(&at, "words").unwrap();
    sandbox.start(&place).expect_refusal(1, "it is no socket of ours");
    is_untouched("the file");
    assert_eq!(std::fs::read(&at).unwrap(), b"words");
    std::fs::remove_file(&at).unwrap();
    std::os::unix::fs::symlink("/nowhere", &at).unwrap();
    sandbox.start(&place).expect_refusal(1, "it is no socket of ours");
    is_untouched("the link");
}
