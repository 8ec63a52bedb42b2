//! Signals to daemons and to the commands that wait for them.

use rustix::process::{Signal, kill_process};

use crate::harness::{Job, SLOWLY, Sandbox, entries, skipped, until};

#[test]
fn a_start_that_is_ended_leaves_its_load_to_go_on() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze() else { return };
    let start = Job::spawn(sandbox.start_command(&[]));
    until("a start that waits", || start.waits_on_a_socket());
    start.signal(Signal::TERM);
    assert_eq!(start.wait().signal, Some(Signal::TERM.as_raw()));
    drop(frozen);
    sandbox.ask("wait", &[]).expect(0);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_daemon_that_gets_a_signal_under_leases_ends_in_order() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let sandbox = Sandbox::new();
        let view = sandbox.started(&[]);
        let mut lease = sandbox.run(&["sleep", "600"]);
        until("a lease", || sandbox.status()["leases"].as_array().is_some_and(|leases| leases.len() == 1));
        kill_process(sandbox.daemon(), signal).unwrap();
        sandbox.nothing_left();
        assert!(!lease.is_over(), "the command is left alone");
        assert_eq!(entries(&view), [""; 0]);
        let log = sandbox.path("base/logs").join(format!("{}.log", sandbox.name()));
        assert!(std::fs::read_to_string(log).unwrap().contains("it is stopped, with 1 live leases"));
    }
}

/// A load in the foreground that is met while it runs; `None`, with a reason, where that cannot be.
fn loading(sandbox: &Sandbox) -> Option<Job> {
    let job = Job::spawn(sandbox.start_command(&[&SLOWLY[..], &["--foreground"]].concat()));
    until("a load that is under way", || {
        let status = sandbox.ask("status", &["--json"]);
        status.code == Some(0) || (status.code == Some(4) && status.json()["progress"]["bytes_done"] != 0)
    });
    if sandbox.status()["state"] == "ready" {
        skipped("no load is slow enough here to be met");
        return None;
    }
    Some(job)
}

#[test]
fn a_load_in_the_foreground_ends_by_the_signal_that_ends_it() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let sandbox = Sandbox::slow();
        let Some(job) = loading(&sandbox) else { return };
        job.signal(signal);
        let ended = job.wait();
        assert_eq!(ended.signal, Some(signal.as_raw()), "{ended:#?}");
        assert!(ended.stderr.contains("while it loaded; nothing of it is left"), "{ended:#?}");
        sandbox.nothing_left();
    }
    let sandbox = Sandbox::slow();
    let Some(job) = loading(&sandbox) else { return };
    sandbox.ask("stop", &[]).expect(0);
    job.wait().expect_refusal(3, "was stopped while it loaded");
    sandbox.nothing_left();
}

#[test]
fn a_daemon_that_gets_a_signal_while_it_loads_ends_in_order_and_tells_who_waits() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let sandbox = Sandbox::slow();
        let start = Job::spawn(sandbox.start_command(&SLOWLY));
        until("a load under way", || {
            sandbox.ask("status", &["--json"]).stdout.contains("loading\"") && start.waits_on_a_socket()
        });
        kill_process(sandbox.daemon(), signal).unwrap();
        start.wait().expect_refusal(3, "was stopped while it loaded");
        sandbox.nothing_left();
    }
}
