//! Leases of real processes.

use super::*;

/// A child that has taken a lease; see `child`.
struct LeasingChild {
    child: Child,
    input: Option<std::process::ChildStdin>,
    output: BufReader<std::process::ChildStdout>,
}

const CHILD_SOCKET: &str = "ILOADER_TEST_LEASE_SOCKET";
const CHILD_MODE: &str = "ILOADER_TEST_LEASE_MODE";

/// Not a test of its own: what the lease tests start as a child. It takes a lease and does as its mode says,
/// until its standard input ends.
#[test]
fn child() {
    let (Some(socket), Ok(mode)) = (std::env::var_os(CHILD_SOCKET), std::env::var(CHILD_MODE)) else {
        return;
    };
    let mut client = Client::connect(Path::new(&socket), PATIENCE).expect("connected");
    lease(&mut client);
    let connection = client.into_fd();
    match mode.as_str() {
        "hold" => {}
        "close" => drop(connection),
        "leave" => {
            // A grandchild inherits the connection and nothing else of it.
            rustix::io::fcntl_setfd(&connection, rustix::io::FdFlags::empty()).expect("inheritable");
            let mut grandchild = Command::new("sleep");
            grandchild.arg("1000").stdin(Stdio::null()).stdout(Stdio::null());
            println!("\ngrandchild {}", grandchild.spawn().expect("sleep starts").id());
            return;
        }
        other => panic!("no mode {other}"),
    }
    println!("\nleased");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

fn leasing_child(sandbox: &Sandbox, mode: &str) -> LeasingChild {
    let mut child = Command::new(std::env::current_exe().expect("the test binary has a path"))
        .args(["--exact", "daemon::serve::tests::leases::child", "--nocapture"])
        .env(CHILD_SOCKET, &sandbox.paths.socket)
        .env(CHILD_MODE, mode)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the child starts");
    let input = child.stdin.take();
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let mut leasing = LeasingChild { child, input, output };
    if mode != "leave" {
        leasing.line("leased");
    }
    leasing
}

impl LeasingChild {
    /// The rest of the child's line that begins with `word`.
    fn line(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).expect("readable"), 0, "the child ended early");
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
    }

    fn end(&mut self) {
        self.input = None;
        self.child.wait().expect("waited for");
    }
}

impl Drop for LeasingChild {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_lease_outlives_its_connection_while_the_process_lives() {
    let sandbox = Sandbox::ready();
    let mut reader = leasing_child(&sandbox, "close");
    // Asked over a later connection: the end of the first one has been seen by then.
    let leases = sandbox.status().leases;
    assert_eq!(leases.len(), 1);
    assert_eq!(leases[0].pid, reader.child.id() as i32);
    assert!(leases[0].command.contains("serve::tests::leases::child"), "{leases:?}");
    assert_eq!(refusal(&mut sandbox.client(), stop()).kind(), Kind::InUse);
    reader.end();
    sandbox.leases_become(0);
}

#[test]
fn a_lease_outlives_its_process_while_the_connection_is_held() {
    let sandbox = Sandbox::ready();
    let mut reader = leasing_child(&sandbox, "leave");
    let grandchild: i32 = reader.line("grandchild").parse().expect("a pid");
    reader.child.wait().expect("waited for");
    let leases = sandbox.status().leases;
    let grandchild = rustix::process::Pid::from_raw(grandchild).expect("a pid");
    let refused = sandbox.client().request(stop());
    rustix::process::kill_process(grandchild, rustix::process::Signal::KILL).expect("ours, just started");
    assert_eq!(leases.len(), 1);
    assert_eq!(refused.expect_err("leased").kind(), Kind::InUse);
    sandbox.leases_become(0);
}

#[test]
fn a_killed_reader_has_no_lease() {
    let sandbox = Sandbox::ready();
    let mut reader = leasing_child(&sandbox, "hold");
    sandbox.leases_become(1);
    reader.child.kill().expect("killed");
    // Not even waited for: a zombie reads nothing.
    sandbox.leases_become(0);
}

#[test]
fn a_stop_waits_for_leases_or_gives_up() {
    let mut sandbox = Sandbox::ready();
    let mut reader = leasing_child(&sandbox, "hold");
    let wait = |wait_milliseconds| Operation::Stop {
        force: false,
        remove_view: false,
        wait_milliseconds: Some(wait_milliseconds),
    };
    let error = refusal(&mut sandbox.client(), wait(1));
    assert_eq!(error.kind(), Kind::InUse);
    // One that went away stops nothing.
    let mut gone = sandbox.client();
    gone.send(wait(u64::MAX)).expect("sent");
    assert_eq!(status_of(&mut sandbox.client()).state, State::Ready);
    drop(gone);
    let mut stopper = sandbox.client();
    stopper.send(wait(u64::MAX)).expect("sent");
    assert_eq!(sandbox.status().state, State::Ready);
    reader.end();
    assert_eq!(notes_of(stopper.next(soon())), ["strange file"]);
    stopper.wait_for_end(soon()).expect("closed");
    sandbox.ended().expect("an orderly end");
}
