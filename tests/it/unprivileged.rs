//! Ordinary users: everything works without privilege, and nobody can do anything to another user's cache.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Gid, Pid, Signal, Uid, kill_process};
use rustix::thread::{set_thread_res_gid, set_thread_res_uid};

use crate::harness::{Job, Ran, bytes_of, entries, skipped, until};

/// The first of the users that these tests run as. They need no entry anywhere.
const USERS_FROM: u32 = 61_300;

/// A directory that everybody may enter, with the program and a model, and users with a home each. Their
/// daemons end with it.
pub(crate) struct Town {
    home: tempfile::TempDir,
}

/// Somebody who gives commands: a user made up for the test where it runs as root, else who runs it.
#[derive(Clone)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) home: PathBuf,
    is_made_up: bool,
}

impl Town {
    /// `None`, with a line that says why, where other users cannot run the program.
    pub(crate) fn new() -> Option<Town> {
        let home = tempfile::Builder::new().prefix("iloader-town-").tempdir().unwrap();
        let town = Town { home };
        open_to_all(town.home.path());
        let built = Path::new(env!("CARGO_BIN_EXE_iloader"));
        if std::fs::hard_link(built, town.program()).is_err() {
            std::fs::copy(built, town.program()).unwrap();
        }
        std::fs::create_dir(town.model()).unwrap();
        std::fs::write(town.model().join("config.json"), "{}").unwrap();
        std::fs::write(town.model().join("model.safetensors"), bytes_of(3, WEIGHTS_BYTES)).unwrap();
        let works = Job::spawn(town.command(&town.user(), &["--version"])).wait().code == Some(0);
        if !works {
            skipped(format!("other users cannot run programs in {}", std::env::temp_dir().display()));
        }
        works.then_some(town)
    }

    pub(crate) fn path(&self, leaf: &str) -> PathBuf {
        self.home.path().join(leaf)
    }

    fn program(&self) -> PathBuf {
        self.path("iloader")
    }

    pub(crate) fn model(&self) -> PathBuf {
        self.path("model")
    }

    /// A user that nobody else is: limits on processes count all of a user's.
    pub(crate) fn user(&self) -> User {
        static NEXT: AtomicU32 = AtomicU32::new(USERS_FROM);
        let is_made_up = rustix::process::geteuid().is_root();
        let (uid, gid) = if is_made_up {
            let id = NEXT.fetch_add(1, Ordering::Relaxed);
            (id, id)
        } else {
            (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
        };
        let home = self.path(&format!("home-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        std::fs::create_dir(&home).unwrap();
        open_to_all(&home);
        chown(&home, Some(uid), Some(gid)).unwrap();
        User { uid, gid, home, is_made_up }
    }

    /// `words` as `user`, whose home has everything that it makes.
    pub(crate) fn command(&self, user: &User, words: &[&str]) -> Command {
        self.any_command(user, self.program().to_str().unwrap(), words)
    }

    /// Another program as `user`.
    pub(crate) fn any_command(&self, user: &User, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        if user.is_made_up {
            command = Command::new("setpriv");
            command.args(["--reuid", &user.uid.to_string(), "--regid", &user.gid.to_string()]);
            command.args(["--clear-groups", "--inh-caps=-all", "--", program]);
        }
        command
            .args(words)
            .env_remove("XDG_CACHE_HOME")
            .env("HOME", &user.home)
            .env("TMPDIR", &user.home)
            .env("ILOADER_BASE_DIR", user.base())
            .current_dir("/")
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn iloader(&self, user: &User, words: &[&str]) -> Ran {
        Job::spawn(self.command(user, words)).wait()
    }

    /// `start` of the model as 'n'.
    pub(crate) fn start(&self, user: &User, more: &[&str]) -> Ran {
        let model = self.model();
        self.iloader(user, &[&["start", model.to_str().unwrap(), "--name", "n"], more].concat())
    }
}

impl Drop for Town {
    fn drop(&mut self) {
        let program = self.program();
        for pid in
            entries(Path::new("/proc")).iter().filter_map(|name| name.parse().ok().and_then(Pid::from_raw))
        {
            let files = format!("/proc/{}", pid.as_raw_nonzero());
            if std::fs::read_link(format!("{files}/exe")).is_ok_and(|exe| exe == program) {
                let _ = kill_process(pid, Signal::KILL);
                until("the end of a killed process", || entries(&Path::new(&files).join("fd")).is_empty());
            }
        }
        // The directories of a view forbid to remove what is in them.
        let _ = Command::new("chmod").arg("-R").arg("u+rwX").arg(self.home.path()).output();
    }
}

impl User {
    pub(crate) fn base(&self) -> PathBuf {
        self.home.join("base")
    }

    fn owns(&self, path: &Path) {
        std::os::unix::fs::lchown(path, Some(self.uid), Some(self.gid)).unwrap();
    }

    pub(crate) fn assert_nothing_runs(&self) {
        until("an orderly end", || entries(&self.base().join("run")).is_empty());
        assert_eq!(entries(&self.base().join("views/n")), [""; 0]);
    }
}

const WEIGHTS_BYTES: u64 = (4 << 20) + 5;

fn open_to_all(directory: &Path) {
    std::fs::set_permissions(directory, PermissionsExt::from_mode(0o755)).unwrap();
}

/// Whether this test can be two users at once; else a line says that it is left out.
fn is_root(what: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skipped(format!("{what} needs root, to be two users"));
    }
    is_root
}

/// What `act` gives, done by a thread of `user`.
fn as_user<T: Send + 'static>(user: &User, act: impl FnOnce() -> T + Send + 'static) -> T {
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    let thread = std::thread::spawn(move || {
        set_thread_res_gid(gid, gid, gid).unwrap();
        set_thread_res_uid(uid, uid, uid).unwrap();
        act()
    });
    thread.join().unwrap()
}

#[test]
fn an_ordinary_user_has_every_backing_and_engine() {
    let Some(town) = Town::new() else { return };
    let user = town.user();
    for (backing, engine) in
        [("memfd", "io-uring"), ("memfd", "threads"), ("tmpfs", "io-uring"), ("tmpfs", "threads")]
    {
        let started = town.start(&user, &["--backing", backing, "--engine", engine]);
        if started.code != Some(0)
            && ["private tmpfs", "io_uring"].iter().any(|why| started.stderr.contains(why))
        {
            skipped(format!("{backing} with {engine}: {}", started.stderr.trim()));
            user.assert_nothing_runs();
            continue;
        }
        assert_eq!(started.expect(0).path(), user.base().join("views/n"));
        let status = town.iloader(&user, &["status", "n", "--json"]).expect(0).json();
        assert_eq!((&status["backing"], &status["engine"]), (&backing.into(), &engine.into()));
        assert_eq!(status["view_faults"], serde_json::json!([]));
        let source = town.model().join("model.safetensors");
        let compare = ["run", "n", "--", "cmp", "{model}/model.safetensors", source.to_str().unwrap()];
        town.iloader(&user, &compare).expect(0);
        for change in ["echo >> {model}/config.json", "truncate -s 0 {model}/config.json"] {
            let refused = town.iloader(&user, &["run", "n", "--", "sh", "-c", change]);
            assert_ne!(refused.code, Some(0), "{change} on {backing}");
        }
        town.iloader(&user, &["stop", "n"]).expect(0);
        user.assert_nothing_runs();
    }
}

#[test]
fn another_user_can_neither_read_nor_ask_nor_stop() {
    if !is_root("keeping users apart") {
        return;
    }
    let Some(town) = Town::new() else { return };
    let (owner, other) = (town.user(), town.user());
    let (view, socket) = (owner.home.join("view"), owner.home.join("socket"));
    let place = ["--view", view.to_str().unwrap(), "--socket", socket.to_str().unwrap()];
    town.start(&owner, &place).expect(0);
    // Everything that files' modes can open is open.
    open_to_all(&owner.base());
    std::fs::set_permissions(&socket, PermissionsExt::from_mode(0o777)).unwrap();

    let file = view.join("config.json");
    let read = as_user(&other, move || std::fs::read(file));
    assert_eq!(read.unwrap_err().kind(), ErrorKind::PermissionDenied);
    let at = socket.to_str().unwrap();
    let whose = format!("belongs to user {}", owner.uid);
    town.iloader(&other, &["run", "--socket", at, "n", "--", "true"]).expect_refusal(125, &whose);
    town.iloader(&other, &["stop", "--socket", at, "--force"]).expect_refusal(1, &whose);
    town.iloader(&other, &["view", "--socket", at]).expect_refusal(1, &whose);
    let base = owner.base();
    for words in [&["list"][..], &["status", "n"], &["stop", "n"], &["start", "/", "--name", "n"]] {
        let words = [words, &["--base-dir", base.to_str().unwrap()]].concat();
        town.iloader(&other, &words).expect_refusal(1, &format!("belongs to uid {}", owner.uid));
    }

    // A client that does not care whose the socket is meets the daemon's own check.
    let path = socket.clone();
    let answer = as_user(&other, move || {
        let mut connection = UnixStream::connect(path).unwrap();
        let mut answer = Vec::new();
        let _ = connection.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    });
    assert!(answer.contains(&format!("belongs to another user than {}", other.uid)), "{answer:?}");

    let status = town.iloader(&owner, &["status", "n", "--json"]).expect(0).json();
    assert_eq!(status["leases"], serde_json::json!([]));
    town.iloader(&owner, &["stop", "n"]).expect(0);
    owner.assert_nothing_runs();
}

#[test]
fn nobody_passes_for_a_daemon_of_another_user() {
    if !is_root("impersonation") {
        return;
    }
    let Some(town) = Town::new() else { return };
    let (victim, thief) = (town.user(), town.user());
    let planted = town.path("planted");
    std::fs::create_dir(&planted).unwrap();
    std::fs::set_permissions(&planted, PermissionsExt::from_mode(0o1777)).unwrap();
    let socket = planted.join("socket");
    let path = socket.clone();
    let listener = as_user(&thief, move || UnixListener::bind(path).unwrap());
    std::fs::set_permissions(&socket, PermissionsExt::from_mode(0o777)).unwrap();
    listener.set_nonblocking(true).unwrap();
    // The victim's own link to it is no proof of what is behind it.
    let link = victim.home.join("link");
    symlink(&socket, &link).unwrap();
    victim.owns(&link);

    let whose = format!("belongs to user {}", thief.uid);
    for at in [&socket, &link] {
        let at = at.to_str().unwrap();
        town.iloader(&victim, &["run", "--socket", at, "n", "--", "true"]).expect_refusal(125, &whose);
        town.iloader(&victim, &["stop", "--socket", at]).expect_refusal(1, &whose);
        let status = town.iloader(&victim, &["status", "--socket", at]).expect(1);
        assert!(status.stdout.contains(&whose) || status.stderr.contains(&whose), "{status:#?}");
    }
    let started = town.start(&victim, &["--socket", socket.to_str().unwrap()]);
    assert_ne!(started.code, Some(0), "{started:#?}");
    assert!(started.stderr.contains(socket.to_str().unwrap()), "{started:#?}");
    victim.assert_nothing_runs();
    while let Ok((mut connection, _)) = listener.accept() {
        let mut heard = Vec::new();
        connection.set_nonblocking(false).unwrap();
        connection.read_to_end(&mut heard).unwrap();
        assert_eq!(String::from_utf8_lossy(&heard), "", "the thief heard something");
    }
}

#[test]
fn planted_links_are_not_followed() {
    if !is_root("planting what belongs to another user") {
        return;
    }
    let Some(town) = Town::new() else { return };
    let (victim, thief) = (town.user(), town.user());
    let treasure = victim.home.join("treasure");
    std::fs::write(&treasure, "untouched").unwrap();
    victim.owns(&treasure);
    let whose = format!("(uid {})", thief.uid);
    let plant = |at: &Path, target: &Path| {
        let _ = std::fs::remove_dir(at);
        symlink(target, at).unwrap();
        thief.owns(at);
    };

    town.start(&victim, &[]).expect(0);
    town.iloader(&victim, &["stop", "n"]).expect(0);
    for inside in ["run", "views", "logs"] {
        let at = victim.base().join(inside);
        std::fs::rename(&at, victim.home.join("aside")).unwrap();
        plant(&at, &thief.home);
        town.start(&victim, &[]).expect_refusal(1, &whose);
        town.iloader(&victim, &["list"]).expect_refusal(1, &whose);
        std::fs::remove_file(&at).unwrap();
        std::fs::rename(victim.home.join("aside"), &at).unwrap();
    }
    for (leaf, extension) in
        [("run/n", "lock"), ("run/n", "json"), ("run/n", "pid"), ("logs/n", "log"), ("views/n", "")]
    {
        let at = victim.base().join(leaf).with_extension(extension);
        let _ = std::fs::remove_file(&at);
        plant(&at, &treasure);
        let started = town.start(&victim, &[]);
        assert_eq!(std::fs::read_to_string(&treasure).unwrap(), "untouched", "{leaf}.{extension}");
        if started.code == Some(0) {
            // Replaced, as files are that a dead daemon left.
            assert!(!at.is_symlink(), "{leaf}.{extension}");
            town.iloader(&victim, &["stop", "n"]).expect(0);
        } else {
            assert!(started.stderr.contains(at.to_str().unwrap()), "{started:#?}");
            std::fs::remove_file(&at).unwrap();
        }
        victim.assert_nothing_runs();
    }
    assert_eq!(entries(&thief.home), [""; 0]);

    // The fallback is in a directory where everybody may put something.
    let shared = town.path("shared");
    std::fs::create_dir(&shared).unwrap();
    std::fs::set_permissions(&shared, PermissionsExt::from_mode(0o1777)).unwrap();
    let fallback = shared.join(format!("infiniloader-{}", victim.uid));
    let homeless = |words: &[&str]| {
        let mut command = town.command(&victim, words);
        command.env_remove("HOME").env_remove("ILOADER_BASE_DIR").env("TMPDIR", &shared);
        Job::spawn(command).wait()
    };
    let model = town.model();
    let start = ["start", model.to_str().unwrap(), "--name", "n"];
    plant(&fallback, &thief.home);
    homeless(&start).expect_refusal(1, &whose);
    homeless(&["list"]).expect_refusal(1, &whose);
    std::fs::remove_file(&fallback).unwrap();
    std::fs::create_dir(&fallback).unwrap();
    thief.owns(&fallback);
    homeless(&start).expect_refusal(1, &format!("belongs to uid {}", thief.uid));
    assert_eq!(entries(&thief.home), [""; 0]);
    assert_eq!(entries(&fallback), [""; 0]);
}

#[test]
fn a_file_that_may_not_be_read_is_named() {
    let Some(town) = Town::new() else { return };
    let user = town.user();
    let closed = town.model().join("closed.bin");
    std::fs::write(&closed, "x").unwrap();
    std::fs::create_dir(town.model().join("cellar")).unwrap();
    for (path, mode) in [("closed.bin", 0o644), ("cellar", 0o755)] {
        let at = town.model().join(path);
        std::fs::set_permissions(&at, PermissionsExt::from_mode(0o000)).unwrap();
        for refused in
            [town.start(&user, &[]), town.iloader(&user, &["inspect", town.model().to_str().unwrap()])]
        {
            assert!(refused.stderr.contains("EACCES"), "{refused:#?}");
            refused.expect_refusal(1, at.to_str().unwrap());
        }
        user.assert_nothing_runs();
        town.start(&user, &["--also-exclude", path]).expect(0);
        town.iloader(&user, &["stop", "n"]).expect(0);
        std::fs::set_permissions(&at, PermissionsExt::from_mode(mode)).unwrap();
    }
}

#[test]
fn limits_of_an_ordinary_user_are_named() {
    let Some(town) = Town::new() else { return };
    let user = town.user();
    let model = town.model();
    let program = town.program();
    let limited = |limit: &str, more: &[&str]| {
        let start = [limit, program.to_str().unwrap(), "start", model.to_str().unwrap(), "--name", "n"];
        Job::spawn(town.any_command(&user, "prlimit", &[&start, more].concat())).wait()
    };
    if Job::spawn(town.any_command(&user, "prlimit", &["--version"])).wait().code != Some(0) {
        return skipped("there is no prlimit");
    }
    // Each step of a start has its turn to be the one that fails, where nobody else counts for this user.
    let limits = if user.is_made_up { vec![0, 1, 2, 3, 4, 5, 6, 7, 8, 64] } else { vec![0] };
    let mut started = false;
    for processes in limits {
        let ran = limited(&format!("--nproc={processes}:{processes}"), &["--engine", "threads"]);
        if ran.code == Some(0) {
            started = true;
            town.iloader(&user, &["stop", "n"]).expect(0);
        } else {
            ran.expect_refusal(6, "RLIMIT_NPROC");
        }
        user.assert_nothing_runs();
    }
    assert_eq!(started, user.is_made_up);

    let ring = limited("--memlock=0:0", &["--engine", "io-uring", "--backing", "memfd"]);
    if ring.code == Some(0) {
        skipped("this kernel does not count rings as locked memory");
        town.iloader(&user, &["stop", "n"]).expect(0);
    } else if ring.stderr.contains("RLIMIT_MEMLOCK") {
        ring.expect_refusal(6, "RLIMIT_MEMLOCK");
    } else {
        skipped(format!("io_uring is forbidden here: {}", ring.stderr.trim()));
    }
    user.assert_nothing_runs();
    limited("--memlock=0:0", &[]).expect(0);
    let status = town.iloader(&user, &["status", "n", "--json"]).expect(0).json();
    if status["engine"] == "threads" {
        assert!(status["engine_reason"].as_str().unwrap().starts_with("cannot set up io_uring"), "{status}");
    }
    town.iloader(&user, &["stop", "n"]).expect(0);
}

#[test]
fn a_log_goes_through_no_link_of_another_user() {
    if !is_root("a link of another user") {
        return;
    }
    let Some(town) = Town::new() else { return };
    let (user, thief) = (town.user(), town.user());
    let (target, link) = (user.home.join("target"), user.home.join("link"));
    std::fs::File::create(&target).unwrap().write_all(b"mine").unwrap();
    user.owns(&target);
    symlink(&target, &link).unwrap();
    thief.owns(&link);
    let log = ["--log-file", link.to_str().unwrap()];
    town.start(&user, &log).expect_refusal(1, &format!("is a symbolic link of user {}", thief.uid));
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "mine");
    user.assert_nothing_runs();
    user.owns(&link);
    town.start(&user, &log).expect(0);
    assert!(std::fs::read_to_string(&target).unwrap().contains("ready: 2 files"));
    town.iloader(&user, &["stop", "n"]).expect(0);
}
