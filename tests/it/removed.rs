//! A BASE that is removed under its daemons takes them with it; one that is moved does not.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rustix::process::{Signal, kill_process};

use crate::harness::{Job, SLOWLY, Sandbox, skipped, until};

/// Removes BASE as its user would who found that `rm -rf` alone may not empty a view.
fn remove(sandbox: &Sandbox) {
    let base = sandbox.path("base");
    assert!(Command::new("chmod").arg("-R").arg("u+rwX").arg(&base).status().unwrap().success());
    std::fs::remove_dir_all(base).unwrap();
}

#[test]
fn a_cache_without_leases_ends_when_its_base_is_removed() {
    for backing in ["memfd", "tmpfs"] {
        let sandbox = Sandbox::new();
        sandbox.started(&["--backing", backing]);
        remove(&sandbox);
        sandbox.nothing_left();
        assert!(!sandbox.path("base").exists(), "the end made it anew");
    }
}

#[test]
fn a_view_that_still_stands_is_withdrawn() {
    let sandbox = Sandbox::new();
    let view = sandbox.path("view");
    std::fs::create_dir(&view).unwrap();
    sandbox.started(&["--view", view.to_str().unwrap()]);
    // An `rm -rf` as an ordinary user ends at the views, which are read-only; the rest is gone then.
    std::fs::remove_dir_all(sandbox.path("base/run")).unwrap();
    sandbox.nothing_left();
    assert!(view.exists() && std::fs::read_dir(&view).unwrap().next().is_none());

    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    std::fs::remove_dir_all(sandbox.path("base/run")).unwrap();
    sandbox.nothing_left();
    assert!(!sandbox.view().exists());
}

#[test]
fn a_leased_cache_ends_after_its_last_lease() {
    let sandbox = Sandbox::new();
    sandbox.started(&["--idle-ttl", "1000"]);
    let lease = sandbox.run(&["sleep", "600"]);
    until("a lease", || sandbox.status()["leases"].as_array().is_some_and(|leases| leases.len() == 1));
    let log = sandbox.path("log");
    std::fs::hard_link(sandbox.path("base/logs").join(format!("{}.log", sandbox.name())), &log).unwrap();
    let said = |what: &str| std::fs::read_to_string(&log).unwrap().contains(what);
    remove(&sandbox);
    until("a line in the log", || said("was removed: it ends when nobody reads it any more"));
    assert_eq!(sandbox.daemons().len(), 1);
    drop(lease);
    sandbox.nothing_left();
    assert!(said("nobody reads it: it ends"));
}

#[test]
fn a_load_is_given_up_when_its_base_is_removed() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze() else { return };
    remove(&sandbox);
    drop(frozen);
    sandbox.nothing_left();
    assert!(!sandbox.path("base").exists());
    // And so that its starter hears of it.
    let start = Job::spawn(sandbox.start_command(&SLOWLY));
    until("progress", || {
        sandbox.ask("status", &["--json"]).stdout.contains("loading\"") && start.waits_on_a_socket()
    });
    remove(&sandbox);
    start.wait().expect_refusal(1, "was removed while");
    sandbox.nothing_left();
}

#[test]
fn a_base_that_is_moved_is_not_removed() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let (base, moved) = (sandbox.path("base"), sandbox.path("moved"));
    std::fs::rename(&base, &moved).unwrap();
    let socket = moved.join("run").join(format!("{}.sock", sandbox.name()));
    let status = ["status", "--socket", socket.to_str().unwrap()];
    let said = sandbox.iloader(&status).expect(0);
    assert!(said.stdout.contains("was moved") && !said.stdout.contains("it ends"), "{said:#?}");
    // The removal of the moved one is one.
    Command::new("chmod").arg("-R").arg("u+rwX").arg(&moved).status().unwrap();
    std::fs::remove_dir_all(&moved).unwrap();
    sandbox.nothing_left();
}

#[test]
fn a_base_on_a_tmpfs_is_watched_as_any() {
    let shm = Path::new("/dev/shm");
    let Ok(base) = tempfile::Builder::new().prefix("iloader-base-").tempdir_in(shm) else {
        return skipped("no tmpfs is writable at /dev/shm");
    };
    std::fs::set_permissions(base.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let sandbox = Sandbox::new();
    let socket = sandbox.path("socket");
    let place = ["--base-dir", base.path().to_str().unwrap(), "--socket", socket.to_str().unwrap()];
    sandbox.started(&place);
    std::fs::remove_file(base.path().join("run").join(format!("{}.lock", sandbox.name()))).unwrap();
    // It is told at once, by whom it can still be asked.
    let status = sandbox.iloader(&["status", "--socket", socket.to_str().unwrap()]).expect(0);
    assert!(status.stdout.contains("it ends when nobody reads it any more"), "{status:#?}");
    until("the end of the daemon", || sandbox.holders().is_empty());
    until("the end of its socket", || !socket.exists());
    assert!(!base.path().join("views").join(sandbox.name()).exists());
}

#[test]
fn what_is_done_to_the_lock_beside_its_removal_ends_nothing() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let lock = sandbox.run_file("lock");
    std::fs::set_permissions(&lock, PermissionsExt::from_mode(0o640)).unwrap();
    std::fs::File::open(&lock).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert!(!sandbox.status()["warnings"].to_string().contains("removed"));
    kill_process(sandbox.daemon(), Signal::TERM).unwrap();
    sandbox.nothing_left();
}
