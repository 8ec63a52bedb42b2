//! Readers without a lease, as a look finds them.

use super::*;

fn waiting_stop() -> Operation {
    Operation::Stop { force: false, remove_view: false, wait_milliseconds: Some(u64::MAX) }
}

fn forced_stop() -> Operation {
    Operation::Stop { force: true, remove_view: false, wait_milliseconds: None }
}

#[test]
fn a_stop_is_decided_by_a_look_and_nothing_else_looks() {
    let mut sandbox = Sandbox::ready();
    sandbox.see(|sight| sight.pids = vec![11, 12]);
    for _ in 0..20 {
        sandbox.status();
    }
    assert_eq!(sandbox.looks(), 0, "nobody wanted to know");
    let error = refusal(&mut sandbox.client(), stop());
    assert_eq!(error.kind(), Kind::InUse);
    assert!(error.message().contains("without a lease by process 11 'engine 11', process 12"), "{error}");
    assert_eq!((sandbox.looks(), sandbox.status().state), (1, State::Ready));
    let mut leaser = sandbox.client();
    lease(&mut leaser);
    assert!(!refusal(&mut sandbox.client(), stop()).message().contains("engine 11"), "leases come first");
    assert_eq!(sandbox.looks(), 1);
    sandbox.see(|sight| sight.unseen = vec![13]);
    let Reply::Stopping { holders: Some(holders), .. } =
        sandbox.client().request(forced_stop()).expect("stopped")
    else {
        panic!("another answer");
    };
    let pids: Vec<i32> = holders.readers.iter().map(|reader| reader.pid).collect();
    assert_eq!((pids, holders.unseen[0].pid, holders.unseen_of_others), (vec![11, 12], 13, 2));
    sandbox.ended().expect("an orderly end");
}

#[test]
fn a_stop_waits_for_readers_too() {
    let mut sandbox = Sandbox::ready();
    // Of another process than those that are found: their end is not what is seen here.
    sandbox.see(|sight| sight.pids = vec![i32::MAX]);
    let mut stopper = sandbox.client();
    stopper.send(waiting_stop()).expect("sent");
    let deadline = Instant::now() + PATIENCE;
    while sandbox.looks() < 3 {
        assert!(Instant::now() < deadline, "it looks again and again");
        assert_eq!(sandbox.status().state, State::Ready);
        std::thread::sleep(Duration::from_millis(5));
    }
    // Others are answered by a look of their own.
    assert_eq!(refusal(&mut sandbox.client(), stop()).kind(), Kind::InUse);
    let short = Operation::Stop { force: false, remove_view: false, wait_milliseconds: Some(1) };
    assert!(refusal(&mut sandbox.client(), short).message().contains("without a lease by"));
    sandbox.see(|sight| sight.pids.clear());
    assert_eq!(notes_of(stopper.next(soon())), ["strange file"]);
    sandbox.ended().expect("an orderly end");
}

#[test]
fn nobody_looks_for_a_stop_that_was_given_up() {
    let sandbox = Sandbox::ready();
    sandbox.see(|sight| sight.pids = vec![i32::MAX]);
    let mut stopper = sandbox.client();
    stopper.send(waiting_stop()).expect("sent");
    let deadline = Instant::now() + PATIENCE;
    while sandbox.looks() < 1 {
        assert!(Instant::now() < deadline, "it looks");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(stopper);
    // The closing is seen at the latest with the second of these.
    sandbox.status();
    sandbox.status();
    let looks = sandbox.looks();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(sandbox.looks(), looks);
    assert_eq!(sandbox.status().state, State::Ready);
}

#[test]
fn a_reader_that_ends_has_the_stop_look_again() {
    let mut sandbox = Sandbox::ready();
    let mut child = Command::new("sleep").arg("1000").spawn().expect("sleep starts");
    sandbox.see(|sight| sight.pids = vec![child.id() as i32]);
    let mut stopper = sandbox.client();
    stopper.send(waiting_stop()).expect("sent");
    // Until the pauses between two looks are longer than this test may take.
    let deadline = Instant::now() + PATIENCE;
    while sandbox.looks() < 3 {
        assert!(Instant::now() < deadline, "it looks");
        std::thread::sleep(Duration::from_millis(5));
    }
    sandbox.see(|sight| sight.pids.clear());
    child.kill().expect("killed");
    assert_eq!(notes_of(stopper.next(soon())), ["strange file"]);
    child.wait().expect("waited for");
    sandbox.ended().expect("an orderly end");
}

#[test]
fn a_look_that_hangs_holds_up_only_who_needs_it() {
    let mut sandbox = Sandbox::ready();
    sandbox.see(|sight| sight.hangs = true);
    let (mut stopper, mut curious) = (sandbox.client(), sandbox.client());
    stopper.send(stop()).expect("sent");
    curious.send(Operation::Readers {}).expect("sent");
    // Everybody else is served, and may even take a lease.
    for _ in 0..10 {
        assert_eq!(sandbox.status().state, State::Ready);
    }
    let Ok(Reply::Error(error)) = stopper.next(soon()) else { panic!("another answer") };
    assert_eq!(Error::from(error).kind(), Kind::TimedOut);
    lease(&mut sandbox.client());
    assert_eq!(refusal(&mut sandbox.client(), stop()).kind(), Kind::InUse, "leases need no look");
    // Nor does force, in the end.
    let Reply::Stopping { holders, .. } = sandbox.client().request(forced_stop()).expect("stopped") else {
        panic!("another answer");
    };
    assert_eq!(holders, None, "nobody looked");
    let answer = curious.next(soon()).expect("an answer");
    assert!(matches!(answer, Reply::Error(_)), "{answer:?}");
    sandbox.see(|sight| sight.hangs = false);
    sandbox.ended().expect("an orderly end");
}

#[test]
fn where_nobody_can_look_only_force_stops() {
    let mut sandbox = Sandbox::ready();
    sandbox.see(|sight| sight.is_blind = true);
    assert!(refusal(&mut sandbox.client(), stop()).message().contains("no /proc"));
    assert!(refusal(&mut sandbox.client(), Operation::Readers {}).message().contains("no /proc"));
    assert_eq!(sandbox.status().state, State::Ready);
    assert_eq!(notes_of(sandbox.client().request(forced_stop())), ["strange file"]);
    sandbox.ended().expect("an orderly end");
}

#[test]
fn an_idle_cache_that_is_read_is_looked_at_once_and_stays() {
    let mut sandbox = Sandbox::with(3, |config| config.idle_ttl_seconds = Some(0.2));
    let mut child = Command::new("sleep").arg("1000").spawn().expect("sleep starts");
    sandbox.see(|sight| sight.pids = vec![child.id() as i32]);
    sandbox.finish_loading();
    let deadline = Instant::now() + PATIENCE;
    while sandbox.looks() == 0 {
        assert!(Instant::now() < deadline, "its time is over");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!((sandbox.looks(), sandbox.status().state), (1, State::Ready), "nothing polls");
    sandbox.see(|sight| sight.pids.clear());
    child.kill().expect("killed");
    sandbox.ended().expect("evicted when its reader had ended");
    child.wait().expect("waited for");
    assert!(sandbox.log().contains("read without a lease by process"), "{}", sandbox.log());
}

#[test]
fn readers_are_told_with_their_leases() {
    let sandbox = Sandbox::ready();
    let mut client = sandbox.client();
    lease(&mut client);
    let us = std::process::id() as i32;
    sandbox.see(|sight| sight.pids = vec![us, i32::MAX]);
    let Reply::Readers(found) = sandbox.client().request(Operation::Readers {}).expect("an answer") else {
        panic!("another answer");
    };
    let told: Vec<(i32, bool)> = found.readers.iter().map(|reader| (reader.pid, reader.lease)).collect();
    assert_eq!(told, [(us, true), (i32::MAX, false)]);
    assert_eq!(found.readers[0].resident_bytes, Some(0));
    let loading = Sandbox::new();
    assert_eq!(refusal(&mut loading.client(), Operation::Readers {}).kind(), Kind::TimedOut);
}
