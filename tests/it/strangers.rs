//! Other users: what they can reach of a cache, and what they can put in its way.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use iloader::control::frame;
use iloader::control::message::{Operation, Request};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{Job, Ran, entries, skipped};
use crate::unprivileged::{Town, User, as_user, is_root, open_to_all};

/// A directory in which everybody may make files; with the sticky bit, only their owners may remove them. Where
/// the kernel protects links (`fs.protected_symlinks`), it does so in sticky directories alone.
fn shared(town: &Town, leaf: &str, mode: u32) -> PathBuf {
    let directory = town.path(leaf);
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, PermissionsExt::from_mode(mode)).unwrap();
    directory
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The daemon of the user's cache 'n'.
fn daemon_of(user: &User) -> Pid {
    let pid = std::fs::read_to_string(user.base().join("run/n.pid")).unwrap();
    Pid::from_raw(pid.trim().parse().unwrap()).unwrap()
}

/// Everything below `directory`, links not followed.
fn below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for name in entries(directory) {
        let path = directory.join(name);
        if path.symlink_metadata().unwrap().is_dir() {
            found.extend(below(&path));
        }
        found.push(path);
    }
    found
}

#[test]
fn everything_is_private_whatever_the_umask() {
    let Some(town) = Town::new() else { return };
    let user = town.user();
    let program = town.program();
    for umask in ["000", "077", "777"] {
        let deep = user.home.join("deep");
        let places = ["view", "pid", "log", "sock"].map(|leaf| deep.join(leaf).join("n"));
        for place in &places[1..] {
            let directory = place.parent().unwrap();
            std::fs::create_dir_all(directory).unwrap();
            for made in [deep.as_path(), directory] {
                std::fs::set_permissions(made, PermissionsExt::from_mode(0o700)).unwrap();
                user.owns(made);
            }
        }
        let [view, pid, log, socket] = places.each_ref().map(|path| text(path));
        let script = format!("umask {umask}; exec \"$@\"");
        let model = town.model();
        for more in [
            &[][..],
            &["--view", view, "--pid-file", pid, "--log-file", log, "--socket", socket, "--backing", "memfd"],
        ] {
            let start = ["-c", &script, "sh", text(&program), "start", text(&model), "--name", "n"];
            Job::spawn(town.any_command(&user, "sh", &[&start, more].concat())).wait().expect(0);
            for path in below(&user.base()).into_iter().chain(below(&deep)).chain([user.base()]) {
                let found = path.symlink_metadata().unwrap();
                assert_eq!(found.uid(), user.uid, "{path:?}");
                let is_published = ["views/n", "deep/view/n"].iter().any(|view| text(&path).contains(view));
                if found.is_symlink() {
                    assert!(is_published, "{path:?}");
                    continue;
                }
                let expected = match (found.is_dir(), is_published) {
                    (true, true) => 0o555,
                    (true, false) => 0o700,
                    (false, _) => 0o600,
                };
                assert_eq!(found.mode() & 0o7777, expected, "{path:?} after umask {umask} with {more:?}");
            }
            town.iloader(&user, &["stop", "n", "--remove-view"]).expect(0);
            user.assert_nothing_runs();
        }
    }
}

#[test]
fn another_user_reaches_nothing_of_a_daemon() {
    if !is_root("looking into another user's daemon") {
        return;
    }
    let Some(town) = Town::new() else { return };
    let (owner, other) = (town.user(), town.user());
    for backing in ["memfd", "tmpfs"] {
        let started = town.start(&owner, &["--backing", backing]);
        if started.code != Some(0) && started.stderr.contains("private tmpfs") {
            skipped(format!("{backing}: {}", started.stderr.trim()));
            continue;
        }
        let view = started.expect(0).path();
        let daemon = daemon_of(&owner);
        // Numbers and link targets are no secret; that they lead nowhere for others is what counts.
        let process = PathBuf::from(format!("/proc/{}", daemon.as_raw_nonzero()));
        let mut doors: Vec<PathBuf> = entries(&process.join("fd"))
            .into_iter()
            .flat_map(|number| [process.join("fd").join(&number), process.join("map_files")])
            .collect();
        assert!(doors.len() > 4, "{doors:?}");
        doors.extend(["mem", "maps", "environ", "fd", "root", "cwd", "exe"].map(|leaf| process.join(leaf)));
        doors.extend(["config.json", "model.safetensors"].map(|leaf| view.join(leaf)));
        doors.push(std::fs::read_link(view.join("config.json")).unwrap());
        let opened = as_user(&other, move || {
            let opens = |path: &PathBuf| match path.ends_with("root") || path.ends_with("cwd") {
                true => std::fs::read_dir(path).is_ok(),
                false => std::fs::File::open(path).is_ok() || std::fs::read_dir(path).is_ok(),
            };
            doors.into_iter().filter(opens).collect::<Vec<PathBuf>>()
        });
        assert!(opened.is_empty(), "opened by another user: {opened:?}");
        let killed = as_user(&other, move || kill_process(daemon, Signal::TERM));
        assert_eq!(killed, Err(rustix::io::Errno::PERM));
        let status = town.iloader(&owner, &["status", "n", "--json"]).expect(0).json();
        assert_eq!(status["state"], "ready");
        town.iloader(&owner, &["stop", "n"]).expect(0);
        owner.assert_nothing_runs();
    }
}

#[test]
fn a_daemon_does_nothing_for_another_user_but_root() {
    if !is_root("asking another user's daemon") {
        return;
    }
    let Some(town) = Town::new() else { return };
    let (owner, other) = (town.user(), town.user());
    let socket = owner.home.join("socket");
    town.start(&owner, &["--socket", text(&socket)]).expect(0);
    std::fs::set_permissions(&socket, PermissionsExt::from_mode(0o777)).unwrap();
    let stop = || Operation::Stop { force: true, remove_view: true, wait_milliseconds: None };
    for operation in [stop(), Operation::Lease {}, Operation::Status {}, Operation::Manifest {}] {
        let path = socket.clone();
        let answer = as_user(&other, move || {
            let mut connection = UnixStream::connect(path).unwrap();
            let request = frame::encode(&Request::new(operation), frame::REQUEST_BYTES_MAX).unwrap();
            // It may be closed already.
            let _ = connection.write_all(&request);
            let mut answer = Vec::new();
            let _ = connection.read_to_end(&mut answer);
            String::from_utf8_lossy(&answer).into_owned()
        });
        // Whoever writes after the refusal may lose it to the reset.
        assert!(answer.is_empty() || answer.contains("belongs to another user"), "{answer:?}");
        assert!(!answer.contains(text(&socket)) && !answer.contains("safetensors"), "{answer:?}");
    }
    let status = town.iloader(&owner, &["status", "n", "--json"]).expect(0).json();
    assert_eq!((&status["state"], &status["leases"]), (&"ready".into(), &serde_json::json!([])));

    // Root's client does not trust the daemon, which could give it anything.
    let root = |words: &[&str]| Job::spawn(as_root(&town, words)).wait();
    let whose = format!("belongs to user {}", owner.uid);
    root(&["run", "--socket", text(&socket), "n", "--", "true"]).expect_refusal(125, &whose);
    root(&["stop", "--socket", text(&socket), "--force"]).expect_refusal(1, &whose);
    let base = owner.base();
    let refused = root(&["list", "--base-dir", text(&base)]);
    refused.expect_refusal(1, &format!("belongs to uid {}", owner.uid));
    town.iloader(&owner, &["stop", "n"]).expect(0);
    owner.assert_nothing_runs();
}

/// The program as root, who keeps nothing of his own in it.
fn as_root(town: &Town, words: &[&str]) -> Command {
    let mut command = Command::new(town.program());
    command.args(words).env("HOME", town.path("no-home")).env_remove("ILOADER_BASE_DIR").current_dir("/");
    command
}

#[test]
fn files_of_another_user_in_base_are_neither_used_nor_changed() {
    if !is_root("planting what belongs to another user") {
        return;
    }
    let Some(town) = Town::new() else { return };
    let (victim, thief) = (town.user(), town.user());
    town.start(&victim, &[]).expect(0);
    let run = victim.base().join("run");
    let registration = std::fs::read_to_string(run.join("n.json")).unwrap();
    town.iloader(&victim, &["stop", "n"]).expect(0);
    let trap = thief.home.join("trap");
    let path = trap.clone();
    let listener = as_user(&thief, move || UnixListener::bind(path).unwrap());
    listener.set_nonblocking(true).unwrap();
    std::fs::set_permissions(&trap, PermissionsExt::from_mode(0o777)).unwrap();
    let registration = registration.replace(text(&run.join("n.sock")), text(&trap));
    assert!(registration.contains(text(&trap)));
    for (leaf, content) in [
        ("run/n.json", registration.as_str()),
        ("run/n.lock", ""),
        ("run/n.pid", "1\n"),
        ("run/n.sock", "no socket"),
        ("logs/n.log", "old\n"),
        ("views/n", "words"),
    ] {
        let at = victim.base().join(leaf);
        let _ = std::fs::remove_dir(&at);
        let _ = std::fs::remove_file(&at);
        std::fs::write(&at, content).unwrap();
        std::fs::set_permissions(&at, PermissionsExt::from_mode(0o666)).unwrap();
        thief.owns(&at);
        for words in [&["status", "n"][..], &["view", "n"], &["stop", "n"], &["run", "n", "--", "true"]] {
            let ran = town.iloader(&victim, words);
            // There is nothing to stop, which is as good as stopped.
            assert!(ran.code != Some(0) || words[0] == "stop", "{leaf}: {ran:#?}");
        }
        town.iloader(&victim, &["list"]);
        let started = town.start(&victim, &[]);
        if started.code == Some(0) {
            // A registration is replaced by rename, as a dead daemon's is.
            assert_eq!((leaf, at.symlink_metadata().unwrap().uid()), ("run/n.json", victim.uid));
            town.iloader(&victim, &["stop", "n"]).expect(0);
        } else {
            assert!(started.stderr.contains(text(&at)), "{started:#?}");
            assert_eq!(std::fs::read_to_string(&at).unwrap(), content, "{leaf} was changed");
            std::fs::remove_file(&at).unwrap();
        }
        let _ = std::fs::remove_file(run.join("n.lock"));
        victim.assert_nothing_runs();
    }
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "the thief was asked");
}

#[test]
fn a_base_that_others_may_write_to_is_refused() {
    let Some(town) = Town::new() else { return };
    let user = town.user();
    town.start(&user, &[]).expect(0);
    for mode in [0o720, 0o702, 0o777] {
        for leaf in ["", "run", "views", "logs"] {
            let at = user.base().join(leaf);
            std::fs::set_permissions(&at, PermissionsExt::from_mode(mode)).unwrap();
            for words in [&["list"][..], &["status", "n"], &["stop", "n"]] {
                town.iloader(&user, words).expect_refusal(1, "is writable by others");
            }
            town.start(&user, &[]).expect_refusal(1, "is writable by others");
            std::fs::set_permissions(&at, PermissionsExt::from_mode(0o700)).unwrap();
        }
    }
    town.iloader(&user, &["stop", "n"]).expect(0);
    user.assert_nothing_runs();
}

#[test]
fn what_stands_at_a_path_that_was_given_is_not_used_if_it_is_another_users() {
    if !is_root("planting what belongs to another user") {
        return;
    }
    let Some(town) = Town::new() else { return };
    let (victim, thief) = (town.user(), town.user());
    let treasure = victim.home.join("treasure");
    std::fs::write(&treasure, "untouched").unwrap();
    std::fs::create_dir(victim.home.join("chest")).unwrap();
    for owned in ["treasure", "chest"] {
        victim.owns(&victim.home.join(owned));
    }
    for (leaf, mode) in [("sticky", 0o1777), ("open", 0o777)] {
        let directory = shared(&town, leaf, mode);
        let at = directory.join("at");
        let plants: [(&str, &dyn Fn()); 6] = [
            ("a link to a file", &|| symlink(&treasure, &at).unwrap()),
            ("a link to a directory", &|| symlink(victim.home.join("chest"), &at).unwrap()),
            ("a link to nothing", &|| symlink(victim.home.join("new"), &at).unwrap()),
            ("a file", &|| std::fs::write(&at, "").unwrap()),
            ("a pipe", &|| make_pipe(&at)),
            ("a socket", &|| drop(UnixListener::bind(&at).unwrap())),
        ];
        for (what, plant) in plants {
            plant();
            thief.owns(&at);
            if !at.is_symlink() {
                std::fs::set_permissions(&at, PermissionsExt::from_mode(0o666)).unwrap();
            }
            let before = at.symlink_metadata().unwrap();
            for option in ["--view", "--log-file", "--pid-file", "--socket"] {
                let refused = town.start(&victim, &[option, text(&at)]);
                let told = format!("{option} at {what} in {leaf}: {refused:#?}");
                assert!(refused.code.is_some_and(|code| code != 0), "{told}");
                assert!(refused.stderr.contains(text(&at)) && refused.stderr.contains(" hint: "), "{told}");
                let after = at.symlink_metadata().unwrap();
                assert_eq!((after.ino(), after.len()), (before.ino(), before.len()), "{told}");
                assert_eq!(std::fs::read_to_string(&treasure).unwrap(), "untouched", "{told}");
                assert_eq!(entries(&victim.home.join("chest")), [""; 0], "{told}");
                assert!(!victim.home.join("new").exists(), "{told}");
                victim.assert_nothing_runs();
            }
            std::fs::remove_file(&at).unwrap();
        }
        assert_eq!(entries(&directory), [""; 0], "something is left in {leaf}");
    }
}

fn make_pipe(at: &Path) {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, at, mode).unwrap();
}

#[test]
fn a_log_that_nobody_reads_keeps_nobody_waiting() {
    let Some(town) = Town::new() else { return };
    let user = town.user();
    let pipe = user.home.join("pipe");
    make_pipe(&pipe);
    user.owns(&pipe);
    town.start(&user, &["--log-file", text(&pipe)]).expect_refusal(1, "a pipe or socket that nobody reads");
    user.assert_nothing_runs();
    town.start(&user, &["--log-file", "/dev/null"]).expect(0);
    town.iloader(&user, &["stop", "n"]).expect(0);
    user.assert_nothing_runs();
}

#[test]
fn the_fallback_is_no_place_that_another_user_made() {
    if !is_root("planting what belongs to another user") {
        return;
    }
    let Some(town) = Town::new() else { return };
    let (victim, thief) = (town.user(), town.user());
    let model = town.model();
    let start = ["start", text(&model), "--name", "n"];
    // Who has no BASE yet, and a home for it, does not look at the fallback that another user made.
    let decoy = shared(&town, "decoy", 0o1777);
    std::fs::create_dir_all(decoy.join(format!("infiniloader-{}/run", victim.uid))).unwrap();
    thief.owns(&decoy.join(format!("infiniloader-{}", victim.uid)));
    let mut list = town.command(&victim, &["list"]);
    list.env_remove("ILOADER_BASE_DIR").env("TMPDIR", &decoy);
    Job::spawn(list).wait().expect(0);
    for (leaf, mode) in [("sticky", 0o1777), ("open", 0o777)] {
        let directory = shared(&town, leaf, mode);
        let fallback = directory.join(format!("infiniloader-{}", victim.uid));
        let homeless = |words: &[&str]| -> Ran {
            let mut command = town.command(&victim, words);
            command.env_remove("HOME").env_remove("ILOADER_BASE_DIR").env("TMPDIR", &directory);
            Job::spawn(command).wait()
        };
        let chest = victim.home.join(format!("chest-{leaf}"));
        std::fs::create_dir(&chest).unwrap();
        victim.owns(&chest);
        let plants: [(&str, &dyn Fn()); 5] = [
            ("a directory", &|| std::fs::create_dir(&fallback).unwrap()),
            ("a link to the victim's", &|| symlink(&chest, &fallback).unwrap()),
            ("a link to the thief's", &|| symlink(&thief.home, &fallback).unwrap()),
            ("a link to nothing", &|| symlink(victim.home.join("new"), &fallback).unwrap()),
            ("a file", &|| std::fs::write(&fallback, "").unwrap()),
        ];
        for (what, plant) in plants {
            plant();
            thief.owns(&fallback);
            if fallback.is_dir() && !fallback.is_symlink() {
                open_to_all(&fallback);
            }
            for words in [&start[..], &["list"], &["status", "n"], &["stop", "n"]] {
                let refused = homeless(words);
                assert_eq!(refused.code, Some(1), "{what} in {leaf}: {refused:#?}");
                let told = refused.stderr.contains(text(&fallback)) && refused.stderr.contains("--base-dir");
                assert!(told, "{what} in {leaf}: {refused:#?}");
            }
            assert_eq!(entries(&thief.home), [""; 0], "{what} in {leaf}");
            assert_eq!(entries(&chest), [""; 0], "{what} in {leaf}");
            assert!(!victim.home.join("new").exists(), "{what} in {leaf}");
            let removed = std::fs::remove_file(&fallback).or_else(|_| std::fs::remove_dir(&fallback));
            removed.unwrap_or_else(|cause| panic!("{what} in {leaf}: {cause}"));
        }
        homeless(&start).expect(0);
        assert_eq!(std::fs::metadata(&fallback).unwrap().mode() & 0o7777, 0o700);
        homeless(&["stop", "n"]).expect(0);
    }
}

#[test]
fn the_number_of_all_unknown_users_is_nobodys() {
    if !is_root("being two users") {
        return;
    }
    let Some(town) = Town::new() else { return };
    let (victim, thief) = (town.user(), town.user());
    // Without a mapping this user, and every other one, is shown as 65534.
    let unshare = |words: &[&str]| Job::spawn(town.any_command(&victim, "unshare", words)).wait();
    if unshare(&["--user", "id", "-u"]).stdout.trim() != "65534" {
        return skipped("no user namespace without users can be made");
    }
    let trap = thief.home.join("trap");
    let path = trap.clone();
    let listener = as_user(&thief, move || UnixListener::bind(path).unwrap());
    listener.set_nonblocking(true).unwrap();
    std::fs::set_permissions(&trap, PermissionsExt::from_mode(0o777)).unwrap();
    let program = town.program();
    let refused = unshare(&["--user", text(&program), "stop", "--socket", text(&trap)]);
    refused.expect_refusal(1, "belongs to user 65534");
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "the thief was asked");
}
