//! The shared quota: set by a start, kept, shown, never exceeded, and never lost by a crash.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::harness::{Job, Ran, Sandbox, entries, skipped, until};
use crate::unprivileged::Town;

const MIB: u64 = 1 << 20;

/// A BASE with models of so many MiB each, weights alone. They are called by their number.
fn sandbox(mebibytes: &[u64]) -> Sandbox {
    let sandbox = Sandbox::empty();
    for (number, mebibytes) in mebibytes.iter().enumerate() {
        let directory = sandbox.path(&format!("m{number}"));
        fs::create_dir(&directory).unwrap();
        let file = fs::File::create(directory.join("model.safetensors")).unwrap();
        file.set_len(mebibytes * MIB).unwrap();
    }
    sandbox
}

fn name(sandbox: &Sandbox, number: usize) -> String {
    format!("{}-{number}", sandbox.name())
}

fn start(sandbox: &Sandbox, number: usize, more: &[&str]) -> Ran {
    let (model, name) = (sandbox.path(&format!("m{number}")), name(sandbox, number));
    let words = ["start", model.to_str().unwrap(), "--name", &name, "--quiet"];
    sandbox.iloader(&[&words[..], more].concat())
}

fn stop(sandbox: &Sandbox, number: usize) {
    sandbox.iloader(&["stop", &name(sandbox, number)]).expect(0);
}

/// The quota and what is used of it, in MiB.
fn usage(sandbox: &Sandbox) -> (Option<u64>, u64) {
    let list = sandbox.iloader(&["list", "--json"]).expect(0).json();
    assert!(list.get("quota_error").is_none(), "{list}");
    (list["quota_bytes"].as_u64().map(|bytes| bytes / MIB), list["quota_used_bytes"].as_u64().unwrap() / MIB)
}

fn quota_file(run: &Path) -> PathBuf {
    run.join(format!(".quota-{}.json", rustix::process::geteuid().as_raw()))
}

#[test]
fn a_start_sets_it_and_the_next_ones_keep_to_it() {
    let sandbox = sandbox(&[4, 6, 2, 10]);
    assert_eq!(usage(&sandbox), (None, 0));
    start(&sandbox, 0, &["--max-resident-bytes", "10MiB"]).expect(0);
    assert_eq!(usage(&sandbox), (Some(10), 4));
    let text = sandbox.iloader(&["list"]).expect(0).stdout;
    assert!(text.ends_with("\n\nquota: 10.0 MiB, 4.0 MiB in use, 6.0 MiB free\n"), "{text}");
    // To the byte: what is taken is what is allocated, without the buffers.
    start(&sandbox, 1, &[]).expect(0);
    assert_eq!(sandbox.iloader(&["status", &name(&sandbox, 1), "--json"]).json()["allocated_bytes"], 6 * MIB);
    assert_eq!(usage(&sandbox), (Some(10), 10));
    for force in [&[][..], &["--force"]] {
        let refused = start(&sandbox, 2, force).expect_refusal(6, "the quota of 10.0 MiB has room for 0 B");
        let error = refused.stderr;
        assert!(error.contains(&format!("cannot start '{}': needs 2.0 MiB", name(&sandbox, 2))), "{error}");
        assert!(error.contains(&format!("'{}' 6.0 MiB", name(&sandbox, 1))), "{error}");
        assert!(error.contains("--force does not lift it"), "{error}");
    }
    assert_eq!(usage(&sandbox), (Some(10), 10));
    // A stop followed by a start that just fits.
    stop(&sandbox, 1);
    start(&sandbox, 1, &[]).expect(0);
    stop(&sandbox, 0);
    stop(&sandbox, 1);
    start(&sandbox, 3, &[]).expect(0);
    stop(&sandbox, 3);
    assert_eq!(usage(&sandbox), (Some(10), 0), "it is kept");
    start(&sandbox, 2, &["--max-resident-bytes", "0"]).expect(0);
    assert_eq!(usage(&sandbox), (None, 2));
    stop(&sandbox, 2);
    sandbox.nothing_left();
}

#[test]
fn of_many_starts_of_what_does_not_fit_each_is_told_why() {
    let sandbox = sandbox(&[6, 8]);
    start(&sandbox, 0, &["--max-resident-bytes", "10MiB"]).expect(0);
    let (model, name) = (sandbox.path("m1"), name(&sandbox, 1));
    let words = ["start", model.to_str().unwrap(), "--name", &name, "--quiet"];
    // Whose daemon it is that fails, and who is waiting for it by then, differs from time to time.
    for _ in 0..15 {
        let starts: Vec<Job> = (0..8).map(|_| Job::spawn(sandbox.command(&words))).collect();
        for start in starts {
            start.wait().expect_refusal(6, "has room for 4.0 MiB");
        }
    }
    start(&sandbox, 0, &["--max-resident-bytes", "0"]).expect(0);
    stop(&sandbox, 0);
    sandbox.nothing_left();
}

#[test]
fn a_quota_that_does_not_fit_is_refused_and_the_old_one_stays() {
    let sandbox = sandbox(&[6, 4, 4]);
    // It was started before there was a quota, and counts.
    start(&sandbox, 0, &[]).expect(0);
    start(&sandbox, 1, &["--max-resident-bytes", "9MiB"]).expect_refusal(6, "9.0 MiB asked for");
    assert_eq!(usage(&sandbox), (None, 6));
    start(&sandbox, 1, &["--max-resident-bytes", "10MiB"]).expect(0);
    assert_eq!(usage(&sandbox), (Some(10), 10));
    // A larger one is set by the start that needs it.
    start(&sandbox, 2, &["--max-resident-bytes", "13MiB"]).expect_refusal(6, "has room for 3.0 MiB");
    assert_eq!(usage(&sandbox), (Some(10), 10));
    start(&sandbox, 2, &["--max-resident-bytes", "14MiB"]).expect(0);
    assert_eq!(usage(&sandbox), (Some(14), 14));
    // What runs already sets it too, where it fits; it is no other cache for that.
    start(&sandbox, 2, &["--max-resident-bytes", "13MiB"])
        .expect_refusal(6, "is too small: 14.0 MiB is in use");
    assert_eq!(usage(&sandbox), (Some(14), 14));
    start(&sandbox, 2, &["--max-resident-bytes", "20MiB"]).expect(0);
    assert_eq!(usage(&sandbox), (Some(20), 14));
    // A start that fails for another reason sets nothing.
    stop(&sandbox, 2);
    fs::create_dir_all(sandbox.path("taken/by-others")).unwrap();
    let taken = sandbox.path("taken");
    let view = ["--view", taken.to_str().unwrap(), "--max-resident-bytes", "30MiB"];
    let failed = start(&sandbox, 2, &view);
    assert_ne!(failed.code, Some(0), "{failed:?}");
    assert_eq!(usage(&sandbox), (Some(20), 10));
}

#[test]
fn a_quota_under_way_binds_others_and_goes_with_a_crash() {
    let sandbox = Sandbox::slow();
    let small = sandbox.path("small");
    fs::create_dir(&small).unwrap();
    fs::File::create(small.join("model.safetensors")).unwrap().set_len(8 * MIB).unwrap();
    // Its load takes a while, and the quota is set when it is done.
    let Some(frozen) = sandbox.freeze_with(&["--max-resident-bytes", "70MiB"]) else { return };
    assert_eq!(usage(&sandbox), (None, 64));
    let words = ["start", small.to_str().unwrap(), "--name", "it-small", "--quiet"];
    let refused = sandbox.iloader(&words).expect_refusal(6, "sets when it is loaded");
    assert!(refused.stderr.contains(sandbox.name()), "{refused:?}");
    sandbox.kill_daemon();
    drop(frozen);
    let again = sandbox.iloader(&words).expect(0);
    assert!(again.stdout.ends_with("it-small\n"), "{again:?}");
    assert!(again.stderr.contains("freed 64.0 MiB of"), "what was cleaned is said: {again:?}");
    assert_eq!(usage(&sandbox), (None, 8));
    sandbox.iloader(&["stop", "it-small"]).expect(0);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_quota_that_cannot_be_set_in_the_end_is_a_start_that_failed() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze_with(&["--max-resident-bytes", "70MiB"]) else { return };
    // In the way of the file, for root too.
    let kept = quota_file(&sandbox.path("base/run"));
    fs::create_dir(&kept).unwrap();
    drop(frozen);
    let waited = sandbox.ask("wait", &[]).expect_refusal(1, "the quota cannot be set (--max-resident-bytes)");
    assert!(waited.stderr.contains(kept.to_str().unwrap()), "{waited:?}");
    until("an end", || sandbox.daemons().is_empty());
    assert_eq!(entries(&sandbox.view()), [""; 0], "the view is withdrawn");
    fs::remove_dir(&kept).unwrap();
    assert_eq!(usage(&sandbox), (None, 0));
    // The failure is kept where it was not told in time.
    sandbox.ask("stop", &[]);
    sandbox.nothing_left();
}

#[test]
fn what_a_load_has_still_to_fill_is_promised_to_it() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze() else { return };
    let model = sandbox.model();
    let promised = || {
        let inspected = sandbox.iloader(&["inspect", model.to_str().unwrap(), "--json"]).expect(0).json();
        inspected["memory"]["promised_bytes"].as_u64().unwrap()
    };
    // It was met early in its 64 MiB. Other tests have promises of their own.
    assert!(promised() >= 16 * MIB, "{}", promised());
    let log = fs::read_to_string(sandbox.path("base/logs").join(format!("{}.log", sandbox.name()))).unwrap();
    assert!(!log.contains("only the starts of this BASE"), "{log}");
    drop(frozen);
    sandbox.ask("wait", &[]).expect(0);
    sandbox.ask("stop", &[]).expect(0);
}

#[test]
fn two_bases_share_the_quota_of_one_socket_directory() {
    let (one, other) = (sandbox(&[4]), sandbox(&[4]));
    let directory = one.path("sockets");
    fs::create_dir(&directory).unwrap();
    let socket = |leaf: &str| directory.join(leaf).to_str().unwrap().to_owned();
    start(&one, 0, &["--socket", &socket("a"), "--max-resident-bytes", "7MiB"]).expect(0);
    start(&other, 0, &["--socket", &socket("b")]).expect_refusal(6, "has room for 3.0 MiB");
    start(&other, 0, &[]).expect(0);
    stop(&other, 0);
    // BASE has none; the list tells of the group that the cache is in.
    let list = one.iloader(&["list", "--json"]).expect(0).json();
    assert_eq!(list["quota_bytes"], serde_json::Value::Null);
    assert_eq!(list["other_quotas"][0]["directory"], directory.to_str().unwrap());
    assert_eq!(list["other_quotas"][0]["quota_bytes"], 7 * MIB);
    let text = one.iloader(&["list"]).expect(0).stdout;
    assert!(text.contains(&format!("quota of {}: 7.0 MiB, 4.0 MiB in use", directory.display())), "{text}");
    stop(&one, 0);
    start(&other, 0, &["--socket", &socket("b"), "--max-resident-bytes", "0"]).expect(0);
    stop(&other, 0);
    assert_eq!(entries(&directory), [""; 0]);
}

#[test]
fn a_quota_that_cannot_be_read_stops_starts_and_nothing_else() {
    let sandbox = sandbox(&[2, 2]);
    start(&sandbox, 0, &[]).expect(0);
    let path = quota_file(&sandbox.path("base/run"));
    fs::write(&path, "{\"schema\":1,\"quota_by").unwrap();
    let refused = start(&sandbox, 1, &[]).expect_refusal(1, path.to_str().unwrap());
    assert!(refused.stderr.contains("hint: remove it, and set the quota again"), "{refused:?}");
    start(&sandbox, 1, &["--max-resident-bytes", "5MiB"]).expect_refusal(1, path.to_str().unwrap());
    let list = sandbox.iloader(&["list"]).expect(0);
    assert!(list.stderr.contains(path.to_str().unwrap()) && list.stdout.contains("ready"), "{list:?}");
    let json = sandbox.iloader(&["list", "--json"]).expect(0).json();
    assert!(json["quota_error"]["message"].as_str().unwrap().contains("cannot be used"), "{json}");
    stop(&sandbox, 0);
    fs::remove_file(&path).unwrap();
    // A link is not followed, whoever made it.
    fs::write(sandbox.path("precious"), "{\"schema\":1,\"quota_bytes\":1}").unwrap();
    symlink(sandbox.path("precious"), &path).unwrap();
    start(&sandbox, 1, &[]).expect_refusal(1, "symbolic link");
    fs::remove_file(&path).unwrap();
    start(&sandbox, 1, &[]).expect(0);
    stop(&sandbox, 1);
    sandbox.nothing_left();
}

#[test]
fn a_cache_whose_base_was_removed_counts_no_more_and_harms_nobody() {
    let sandbox = sandbox(&[4, 4]);
    start(&sandbox, 0, &["--max-resident-bytes", "5MiB"]).expect(0);
    let daemon = sandbox.daemons();
    assert_eq!(daemon.len(), 1);
    let aside = sandbox.path("base-aside");
    fs::rename(sandbox.path("base"), &aside).unwrap();
    // A new BASE at the same path is a new group, with no quota.
    assert_eq!(usage(&sandbox), (None, 0));
    start(&sandbox, 1, &["--max-resident-bytes", "4MiB"]).expect(0);
    assert_eq!(usage(&sandbox), (Some(4), 4));
    rustix::process::kill_process(daemon[0], rustix::process::Signal::TERM).unwrap();
    until("an orderly end", || sandbox.daemons().len() == 1);
    assert_eq!(usage(&sandbox), (Some(4), 4), "the end of one takes nothing of the other");
    stop(&sandbox, 1);
    assert_eq!(usage(&sandbox), (Some(4), 0));
}

/// Whether some directory of this process can be mounted read-only or small, in a namespace of its own.
fn in_a_small_base(sandbox: &Sandbox, bytes: &str, words: &[&str]) -> Option<Ran> {
    let script = format!(
        "mount -t tmpfs -o mode=700,size={bytes} tmpfs '{0}/base/run' 2>/dev/null || exit 99; \
         dd if=/dev/zero of='{0}/base/run/filler' bs=4096 2>/dev/null; shift; \"$@\"",
        sandbox.path("").display()
    );
    let mut command = sandbox.command(&[]);
    command = {
        let mut wrapped = std::process::Command::new("unshare");
        wrapped.args(["--mount", "--", "sh", "-c", &script, "sh", "-"]).arg(command.get_program());
        wrapped.args(words).envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        wrapped
    };
    let ran = Job::spawn(command).wait();
    if ran.code == Some(99) || ran.stderr.contains("unshare") {
        skipped("nothing can be mounted here");
        return None;
    }
    Some(ran)
}

#[test]
fn a_full_disk_is_met_before_anything_is_allocated() {
    let sandbox = sandbox(&[4]);
    start(&sandbox, 0, &[]).expect(0);
    stop(&sandbox, 0);
    let model = sandbox.path("m0");
    let words = ["start", model.to_str().unwrap(), "--name", "it-full", "--quiet"];
    let Some(ran) = in_a_small_base(&sandbox, "64k", &words) else { return };
    let ran = ran.expect_refusal(6, "no space left on the device");
    assert!(ran.stderr.contains("base/run"), "{ran:?}");
    sandbox.nothing_left();
}

#[test]
fn any_umask_leaves_it_private_and_usable() {
    for umask in ["000", "077", "777"] {
        let sandbox = sandbox(&[2]);
        let start = sandbox.command(&[]);
        let script = format!(
            "umask {umask}; '{}' start '{}' --name '{}' --quiet --max-resident-bytes 2MiB",
            start.get_program().to_str().unwrap(),
            sandbox.path("m0").display(),
            name(&sandbox, 0)
        );
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &script]).envs(start.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Job::spawn(command).wait().expect(0);
        assert_eq!(usage(&sandbox), (Some(2), 2));
        for file in fs::read_dir(sandbox.path("base/run")).unwrap() {
            let (file, mode) = file.map(|file| (file.file_name(), file.metadata().unwrap())).unwrap();
            if file.to_string_lossy().starts_with(".quota") {
                assert_eq!(mode.permissions().mode() & 0o7777, 0o600, "{file:?} under umask {umask}");
            }
        }
        stop(&sandbox, 0);
    }
}

#[test]
fn ordinary_users_have_quotas_of_their_own_even_in_one_directory() {
    let Some(town) = Town::new() else { return };
    let (one, other) = (town.user(), town.user());
    if one.uid == other.uid {
        return skipped("there are no two users here");
    }
    let directory = town.path("sockets");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o1777)).unwrap();
    let socket = |leaf: &str| directory.join(leaf).to_str().unwrap().to_owned();
    town.start(&one, &["--socket", &socket("a"), "--max-resident-bytes", "5MiB"]).expect(0);
    town.start(&other, &["--socket", &socket("b"), "--max-resident-bytes", "6MiB"]).expect(0);
    let quotas = |user| town.iloader(user, &["list", "--json"]).expect(0).json()["other_quotas"].clone();
    assert_eq!(quotas(&one)[0]["quota_bytes"], 5 * MIB);
    assert_eq!(quotas(&other)[0]["quota_bytes"], 6 * MIB);
    town.iloader(&one, &["stop", "n"]).expect(0);
    // What another plants under the name of the lock is refused by name, and nothing is started.
    let third = town.user();
    let planted = directory.join(format!(".quota-{}.lock", third.uid));
    fs::write(&planted, "").unwrap();
    let refused = town.start(&third, &["--socket", &socket("c")]).expect_refusal(1, "another user's");
    assert!(refused.stderr.contains(planted.to_str().unwrap()), "{refused:?}");
    fs::remove_file(&planted).unwrap();
    town.start(&third, &["--socket", &socket("c")]).expect(0);
    for user in [&other, &third] {
        town.iloader(user, &["stop", "n"]).expect(0);
    }
}
