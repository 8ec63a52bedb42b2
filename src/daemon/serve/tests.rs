//! The daemon over real sockets, with real child processes, and a load that the tests steer.

mod leases;
mod strays;
mod uses;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::*;
use crate::budget::limits;
use crate::control::client::Client;
use crate::control::frame;
use crate::control::message::{Request, State, Status};
use crate::daemon::config::{Limits, Tuning};
use crate::daemon::listener::CONNECTIONS_MAX;
use crate::daemon::load::{LoadControl, LoadReport, Published, PublishedFile};
use crate::manifest::{FileEntry, Manifest, SelectionRules};
use crate::readers::{self, Detail, Memory, Reader, Seen};
use crate::registry::{BaseDir, Lock, Paths, Record};
use crate::sys::signals::SignalDescriptor;

/// How long a test waits for what must happen. It is never waited for where all is well.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the segments are that nobody has open.
const FAR_DEVICE: u64 = u64::MAX;

/// What the tests tell the load to do.
enum Step {
    Progress(u64),
    Finish,
    Fail(Error),
    Panic,
}

/// What the tests have a look find.
#[derive(Clone, Default)]
struct Sight {
    pids: Vec<i32>,
    unseen: Vec<i32>,
    is_blind: bool,
    /// It takes until this is false.
    hangs: bool,
    looks: usize,
}

fn find(sight: &Mutex<Sight>, detail: Detail) -> Result<Seen> {
    let look = || sight.lock().expect("no panic");
    look().looks += 1;
    while look().hangs {
        std::thread::sleep(Duration::from_millis(5));
    }
    let found = look().clone();
    if found.is_blind {
        return Err(Error::new(Kind::Failed, "there is no /proc"));
    }
    let process = |pid: &i32| readers::Process { pid: *pid, command: format!("engine {pid}") };
    let reader = |pid: &i32| Reader {
        process: process(pid),
        descriptors: 1,
        mapped_bytes: 4096,
        memory: (detail == Detail::Memory).then(Memory::default),
    };
    Ok(Seen {
        readers: found.pids.iter().map(reader).collect(),
        unseen: found.unseen.iter().map(process).collect(),
        unseen_of_others: 2,
    })
}

/// A daemon in this process, its BASE, and the strings of its load.
struct Sandbox {
    home: tempfile::TempDir,
    paths: Paths,
    steps: Sender<Step>,
    happened: Arc<Mutex<Vec<String>>>,
    /// What a look for readers finds.
    sight: Arc<Mutex<Sight>>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// Notes when the memory is given back, and what is still there at that moment.
struct Segments {
    happened: Arc<Mutex<Vec<String>>>,
    socket: PathBuf,
}

impl Drop for Segments {
    fn drop(&mut self) {
        let socket = if self.socket.exists() { "with" } else { "without" };
        self.happened.lock().expect("no panic").push(format!("released {socket} the socket"));
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

fn config(base: &BaseDir, paths: &Paths) -> Config {
    Config {
        name: "n".to_owned(),
        base: text(base.path()),
        socket: text(&paths.socket),
        pid_file: text(&paths.pid_file),
        log_file: text(&paths.log_file),
        view: text(&paths.view),
        kept_dirname: None,
        source: "/models/m".to_owned(),
        generation: None,
        verify: false,
        rules: SelectionRules::default(),
        tuning: Tuning {
            workers: 1,
            chunk_bytes: 64 << 20,
            engine: "auto".to_owned(),
            queue_depth: None,
            read_bytes: None,
            direct: "auto".to_owned(),
            bytes_per_second: None,
            background: false,
            numa: None,
            backing: "auto".to_owned(),
            lock_memory: false,
        },
        limits: Limits {
            memory_fraction: 0.9,
            memory_bytes_max: None,
            reserve_bytes: 0,
            resident_bytes_max: None,
            force: false,
        },
        idle_ttl_seconds: None,
        loads_unattended: false,
        selection: "def".to_owned(),
        identity: "abc".to_owned(),
        settings: [("view".to_owned(), "v".to_owned())].into(),
    }
}

fn loaded(files: usize, keep: Segments) -> Loaded {
    let entry = |number: usize| FileEntry {
        path: format!("file-{number:05}"),
        bytes: 10,
        mtime: "2026-01-01T00:00:00.000000000Z".to_owned(),
        device: 1,
        inode: number as u64,
        sha256: None,
        passthrough: false,
    };
    let files: Vec<FileEntry> = (0..files).map(entry).collect();
    let link = |file: &FileEntry| PublishedFile {
        path: file.path.clone(),
        descriptor: 0,
        // No file of this machine has such a one.
        device: FAR_DEVICE,
        inode: file.inode + 100,
        bytes: file.bytes,
    };
    Loaded {
        links: files.iter().map(link).collect(),
        manifest: Manifest {
            schema: crate::manifest::SCHEMA,
            name: "n".to_owned(),
            source: "/models/m".to_owned(),
            selection: SelectionRules::default(),
            bytes: 10 * files.len() as u64,
            files,
            directory_links: Vec::new(),
            created: "2026-01-01T00:00:00Z".to_owned(),
            tool: "0".to_owned(),
        },
        passthrough: Vec::new(),
        directory_links: Vec::new(),
        report: LoadReport {
            engine: "threads".to_owned(),
            backing: "memfd".to_owned(),
            allocated_bytes: 4096,
            ..LoadReport::default()
        },
        keep: Box::new(keep),
        share: None,
    }
}

/// Does what it is told until it is done or cancelled.
fn steered_load(
    control: &LoadControl,
    steps: &Receiver<Step>,
    done: impl FnOnce() -> Loaded,
) -> Result<Loaded> {
    loop {
        match steps.recv_timeout(Duration::from_millis(5)) {
            Ok(Step::Progress(bytes_done)) => {
                control.progress(Progress { bytes_done, bytes_total: 100, ..Progress::default() });
            }
            Ok(Step::Finish) => return Ok(done()),
            Ok(Step::Fail(error)) => return Err(error),
            Ok(Step::Panic) => panic!("as the test wanted"),
            Err(RecvTimeoutError::Timeout) if !control.cancelled() => {}
            Err(_) => return Err(Error::new(Kind::Cancelled, "cancelled")),
        }
    }
}

impl Sandbox {
    fn new() -> Sandbox {
        Sandbox::with(3, |_| {})
    }

    fn ready() -> Sandbox {
        let sandbox = Sandbox::new();
        sandbox.finish_loading();
        sandbox
    }

    fn with(files: usize, change: impl FnOnce(&mut Config)) -> Sandbox {
        let home = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(home.path(), PermissionsExt::from_mode(0o700)).expect("ours");
        let base = BaseDir::prepared(home.path().to_owned());
        for directory in [base.run_dir(), base.views_dir(), base.logs_dir()] {
            std::fs::create_dir(directory).expect("made");
        }
        let paths = base.paths(&"n".parse().expect("a name"));
        let mut config = config(&base, &paths);
        change(&mut config);
        let lock = Lock::try_exclusive(&paths.lock).expect("lockable").expect("free");
        let (steps, told) = channel();
        let happened = Arc::new(Mutex::new(Vec::new()));
        let sight = Arc::new(Mutex::new(Sight::default()));
        let (is_up, up) = channel();
        let thread = std::thread::spawn({
            let (happened, sight) = (Arc::clone(&happened), Arc::clone(&sight));
            move || run_daemon(config, lock, files, told, (happened, sight), &is_up)
        });
        up.recv_timeout(PATIENCE).expect("the daemon listens");
        Sandbox { home, paths, steps, happened, sight, thread: Some(thread) }
    }

    fn client(&self) -> Client {
        Client::connect(&self.paths.socket, PATIENCE).expect("connected")
    }

    fn tell(&self, step: Step) {
        self.steps.send(step).expect("the load listens");
    }

    fn finish_loading(&self) {
        let mut client = self.client();
        client.send(Operation::Wait { progress: false }).expect("sent");
        self.tell(Step::Finish);
        assert!(matches!(client.next(soon()).expect("an answer"), Reply::Ready { .. }));
    }

    fn see(&self, change: impl FnOnce(&mut Sight)) {
        change(&mut self.sight.lock().expect("no panic"));
    }

    fn looks(&self) -> usize {
        self.sight.lock().expect("no panic").looks
    }

    fn status(&self) -> Status {
        status_of(&mut self.client())
    }

    fn leases_become(&self, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.status().leases.len() != count {
            assert!(Instant::now() < deadline, "{:?}", self.status().leases);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the daemon's end, and gives how it ended.
    fn ended(&mut self) -> Result<()> {
        self.thread.take().expect("not waited for yet").join().expect("no assertion failed in the daemon")
    }

    fn happened(&self) -> Vec<String> {
        self.happened.lock().expect("no panic").clone()
    }

    /// The names in BASE/run.
    fn left(&self) -> BTreeSet<String> {
        let run = std::fs::read_dir(self.home.path().join("run")).expect("there");
        run.map(|entry| text(Path::new(&entry.expect("read").file_name()))).collect()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.paths.log_file).expect("a log")
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if self.thread.is_none() {
            return;
        }
        self.see(|sight| sight.hangs = false);
        if let Ok(mut client) = Client::connect(&self.paths.socket, PATIENCE) {
            let _ =
                client.request(Operation::Stop { force: true, remove_view: true, wait_milliseconds: None });
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run_daemon(
    config: Config,
    lock: Lock,
    files: usize,
    told: Receiver<Step>,
    (happened, sight): (Arc<Mutex<Vec<String>>>, Arc<Mutex<Sight>>),
    is_up: &Sender<()>,
) -> Result<()> {
    let log = Log::new(std::fs::File::create(&config.log_file).expect("a log"));
    let signals = SignalDescriptor::new(&[libc::SIGWINCH]).expect("a descriptor");
    let (registered, listener) = Registered::new(&config, lock, signals, &log)?;
    let keep = Segments { happened: Arc::clone(&happened), socket: PathBuf::from(&config.socket) };
    let publish = move |_: &Config, _: &Loaded| -> Result<Published> {
        happened.lock().expect("no panic").push("published".to_owned());
        let withdraw: Withdraw = Box::new(move |remove| {
            happened.lock().expect("no panic").push(format!("withdrawn, remove {remove}"));
            Ok(vec!["strange file".to_owned()])
        });
        Ok(Published { withdraw, notes: Vec::new() })
    };
    let load = move |control: &LoadControl| steered_load(control, &told, || loaded(files, keep));
    is_up.send(()).expect("the test waits");
    serve(Start {
        config,
        listener,
        registered,
        log,
        work: Work {
            load: Box::new(load),
            publish: Box::new(publish),
            find: Arc::new(move |_, detail| find(&sight, detail)),
        },
        starter: None,
    })
    .map(drop)
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + PATIENCE)
}

fn status_of(client: &mut Client) -> Status {
    match client.request(Operation::Status {}).expect("a status") {
        Reply::Status(status) => *status,
        other => panic!("{other:?}"),
    }
}

fn stop() -> Operation {
    Operation::Stop { force: false, remove_view: false, wait_milliseconds: None }
}

fn lease(client: &mut Client) -> Leased {
    match client.request(Operation::Lease {}).expect("a lease") {
        Reply::Leased(leased) => *leased,
        other => panic!("{other:?}"),
    }
}

/// The notes of an answer that says that it stops.
fn notes_of(answer: Result<Reply>) -> Vec<String> {
    match answer.expect("it stops") {
        Reply::Stopping { notes, .. } => notes,
        other => panic!("{other:?}"),
    }
}

fn refusal(client: &mut Client, operation: Operation) -> Error {
    client.request(operation).expect_err("refused")
}

#[test]
fn a_load_is_followed_until_it_is_ready() {
    let sandbox = Sandbox::new();
    let status = sandbox.status();
    assert_eq!((status.state, status.pid), (State::Loading, std::process::id() as i32));
    assert_eq!(status.tuning["chunk-size"], "67108864");
    for operation in [Operation::Manifest {}, Operation::Lease {}] {
        assert_eq!(refusal(&mut sandbox.client(), operation).kind(), Kind::TimedOut);
    }
    let (mut watcher, mut waiter) = (sandbox.client(), sandbox.client());
    watcher.send(Operation::Wait { progress: true }).expect("sent");
    waiter.send(Operation::Wait { progress: false }).expect("sent");
    assert!(matches!(watcher.next(soon()).expect("at once"), Reply::Progress(_)));
    for bytes_done in [10, 20, 70] {
        sandbox.tell(Step::Progress(bytes_done));
    }
    // Some of the steps may be left out, never the last one.
    loop {
        match watcher.next(soon()).expect("progress") {
            Reply::Progress(Progress { bytes_done: 70, bytes_total: 100, .. }) => break,
            Reply::Progress(_) => {}
            other => panic!("{other:?}"),
        }
    }
    sandbox.tell(Step::Finish);
    let view = text(&sandbox.paths.view);
    assert_eq!(watcher.next(soon()).expect("the end"), Reply::Ready { view: view.clone() });
    assert_eq!(waiter.next(soon()).expect("the end"), Reply::Ready { view: view.clone() });
    assert_eq!(waiter.request(Operation::Wait { progress: true }).expect("at once"), Reply::Ready { view });
    let status = sandbox.status();
    assert_eq!((status.state, status.files, status.bytes), (State::Ready, 3, 30));
    assert_eq!((status.engine.as_str(), status.allocated_bytes), ("threads", 4096));
    assert_eq!(status.settings["view"], "v");
}

#[test]
fn manifest_and_lease_say_what_is_published() {
    let sandbox = Sandbox::with(3, |config| config.kept_dirname = Some("org--model".to_owned()));
    sandbox.finish_loading();
    let Reply::Manifest(manifest) = sandbox.client().request(Operation::Manifest {}).expect("ready") else {
        panic!("another answer");
    };
    assert_eq!(manifest.files.len(), 3);
    let leased = lease(&mut sandbox.client());
    assert_eq!(leased.view, format!("{}/org--model", sandbox.paths.view.display()));
    let second = Link { path: "file-00001".into(), bytes: 10, device: FAR_DEVICE, inode: 101 };
    assert_eq!((leased.links.len(), &leased.links[1]), (3, &second));
}

#[test]
fn the_end_has_an_order_and_leaves_nothing() {
    let mut sandbox = Sandbox::ready();
    assert_eq!(sandbox.left().into_iter().collect::<Vec<_>>(), ["n.json", "n.lock", "n.pid", "n.sock"]);
    let mut client = sandbox.client();
    let operation = Operation::Stop { force: false, remove_view: true, wait_milliseconds: None };
    assert_eq!(notes_of(client.request(operation)), ["strange file"]);
    client.wait_for_end(soon()).expect("closed");
    // The connection's end is the last thing: all of this is done by now.
    assert_eq!(sandbox.left(), BTreeSet::new());
    let expected = ["published", "withdrawn, remove true", "released with the socket"];
    assert_eq!(sandbox.happened(), expected);
    sandbox.ended().expect("an orderly end");
    assert!(sandbox.log().contains("strange file") && sandbox.log().contains("ended"));
    let error = Client::connect(&sandbox.paths.socket, PATIENCE).expect_err("gone");
    assert_eq!(error.kind(), Kind::NotFound);
}

#[test]
fn a_leased_cache_is_not_stopped_unless_forced() {
    let mut sandbox = Sandbox::ready();
    let mut reader = sandbox.client();
    lease(&mut reader);
    lease(&mut reader);
    assert_eq!(sandbox.status().leases.len(), 1, "one connection, one lease");
    let error = refusal(&mut sandbox.client(), stop());
    assert_eq!(error.kind(), Kind::InUse);
    assert!(error.message().contains(&format!("process {}", std::process::id())), "{error}");
    assert_eq!(sandbox.status().state, State::Ready, "a refused stop changes nothing");
    let forced = Operation::Stop { force: true, remove_view: false, wait_milliseconds: None };
    assert_eq!(notes_of(sandbox.client().request(forced)), ["strange file"]);
    sandbox.ended().expect("an orderly end");
    assert_eq!(sandbox.happened()[1], "withdrawn, remove false");
    assert_eq!(reader.next(soon()).expect_err("closed").kind(), Kind::NotFound);
}

#[test]
fn as_many_leases_are_given_as_are_promised() {
    // The daemon's descriptors, and the clients' in the same process.
    limits::raise_descriptors(4096).expect("the hard limit allows it");
    let sandbox = Sandbox::ready();
    let reader = |_| {
        let mut client = sandbox.client();
        lease(&mut client);
        client
    };
    let _readers: Vec<Client> = (0..LEASES_MAX).map(reader).collect();
    let mut late = sandbox.client();
    let error = refusal(&mut late, Operation::Lease {});
    assert_eq!(error.kind(), Kind::NoRoom);
    assert!(error.message().contains("1024 leases, which is the most"), "{error}");
    assert_eq!(sandbox.status().leases.len(), LEASES_MAX, "who only asks is still served");
}

#[test]
fn cancel_ends_a_load_that_nobody_else_waits_for() {
    let mut sandbox = Sandbox::new();
    let (mut first, mut second) = (sandbox.client(), sandbox.client());
    for client in [&mut first, &mut second] {
        client.send(Operation::Wait { progress: true }).expect("sent");
        assert!(matches!(client.next(soon()).expect("at once"), Reply::Progress(_)));
    }
    assert!(matches!(first.request(Operation::Cancel {}).expect("goes on"), Reply::Progress(_)));
    assert_eq!(sandbox.status().state, State::Loading);
    assert_eq!(refusal(&mut first, Operation::Cancel {}).kind(), Kind::Usage);
    assert_eq!(notes_of(second.request(Operation::Cancel {})), [""; 0]);
    second.wait_for_end(soon()).expect("closed");
    assert_eq!(sandbox.left(), BTreeSet::new());
    sandbox.ended().expect("an orderly end");
    assert_eq!(
        sandbox.happened(),
        ["released with the socket"],
        "by the load itself, and nothing was published"
    );
}

#[test]
fn a_load_that_was_started_to_go_on_is_not_cancelled() {
    let sandbox = Sandbox::with(3, |config| config.loads_unattended = true);
    let mut client = sandbox.client();
    // Both at once: the second must not be overlooked in what was received with the first.
    let mut frames = Vec::new();
    for operation in [Operation::Wait { progress: false }, Operation::Cancel {}] {
        frames.extend(frame::encode(&Request::new(operation), 1000).expect("encoded"));
    }
    rustix::io::write(client.as_fd(), &frames).expect("written");
    assert!(matches!(client.next(soon()).expect("an answer"), Reply::Progress(_)));
    sandbox.finish_loading();
}

#[test]
fn a_stop_while_loading_tells_who_waits() {
    let mut sandbox = Sandbox::new();
    let mut waiter = sandbox.client();
    waiter.send(Operation::Wait { progress: false }).expect("sent");
    assert_eq!(sandbox.status().state, State::Loading);
    assert_eq!(notes_of(sandbox.client().request(stop())), [""; 0]);
    // Not an error: that is what a load that fails gets, of whatever kind.
    assert_eq!(notes_of(waiter.next(soon())), [""; 0]);
    sandbox.ended().expect("an orderly end");
    assert_eq!(sandbox.left(), BTreeSet::new());
}

#[test]
fn a_failed_load_is_told_or_kept() {
    let failure = || Error::new(Kind::NoRoom, "no room for it").hint("make some");
    let mut told = Sandbox::new();
    let mut waiter = told.client();
    waiter.send(Operation::Wait { progress: false }).expect("sent");
    assert_eq!(told.status().state, State::Loading);
    told.tell(Step::Fail(failure()));
    let Reply::Error(error) = waiter.next(soon()).expect("an answer") else { panic!("another answer") };
    assert_eq!(Error::from(error).kind(), Kind::NoRoom);
    assert_eq!(told.ended().expect_err("failed").kind(), Kind::NoRoom);
    assert_eq!(told.left(), BTreeSet::new());
    assert!(told.log().contains("no room for it"));

    let mut unattended = Sandbox::new();
    unattended.tell(Step::Fail(failure()));
    assert_eq!(unattended.ended().expect_err("failed").kind(), Kind::NoRoom);
    assert_eq!(unattended.left().into_iter().collect::<Vec<_>>(), ["n.json"]);
    let record = Record::read(&unattended.paths.record).expect("readable").expect("kept");
    let kept = record.failure().expect("why");
    assert_eq!((kept.kind(), kept.hint_text()), (Kind::NoRoom, Some("make some")));
}

#[test]
fn a_panic_in_the_load_is_a_failure() {
    let mut sandbox = Sandbox::new();
    sandbox.tell(Step::Panic);
    assert_eq!(sandbox.ended().expect_err("failed").kind(), Kind::Failed);
}

#[test]
fn an_idle_cache_is_evicted() {
    let mut sandbox = Sandbox::with(3, |config| config.idle_ttl_seconds = Some(0.0));
    let mut client = sandbox.client();
    client.send(Operation::Wait { progress: true }).expect("sent");
    assert!(matches!(client.next(soon()).expect("it waits"), Reply::Progress(_)));
    sandbox.tell(Step::Finish);
    assert!(matches!(client.next(soon()).expect("an answer"), Reply::Ready { .. }));
    sandbox.ended().expect("an orderly end");
    assert_eq!(sandbox.left(), BTreeSet::new());
    assert!(sandbox.log().contains("--idle-ttl"));
}

#[test]
fn a_removed_base_is_noticed_and_another_daemons_files_stay() {
    let mut sandbox = Sandbox::with(1, |config| {
        config.socket = config.socket.replace("/run/n.sock", "/views/elsewhere.sock");
    });
    sandbox.paths.socket = sandbox.home.path().join("views/elsewhere.sock");
    sandbox.finish_loading();
    assert_eq!(sandbox.status().warnings, [""; 0]);
    let run = sandbox.home.path().join("run");
    std::fs::remove_dir_all(&run).expect("removed");
    std::fs::create_dir(&run).expect("made again");
    std::fs::write(run.join("n.json"), "the next daemon's").expect("written");
    assert!(sandbox.status().warnings[0].contains("was removed"));
    sandbox.client().request(stop()).expect("stopped");
    sandbox.ended().expect("an orderly end");
    assert_eq!(sandbox.left().into_iter().collect::<Vec<_>>(), ["n.json"]);
    assert!(!sandbox.paths.socket.exists());
    assert!(sandbox.happened().contains(&"withdrawn, remove true".to_owned()), "{:?}", sandbox.happened());
}

#[test]
fn a_load_whose_base_is_removed_gives_its_memory_back_before_anybody_hears_of_it() {
    for finishes in [false, true] {
        let mut sandbox = Sandbox::with(1, |config| {
            config.socket = config.socket.replace("/run/n.sock", "/views/elsewhere.sock");
        });
        sandbox.paths.socket = sandbox.home.path().join("views/elsewhere.sock");
        let mut waiting = sandbox.client();
        waiting.send(Operation::Wait { progress: true }).expect("sent");
        assert!(matches!(waiting.next(soon()).expect("an answer"), Reply::Progress(_)));
        std::fs::remove_dir_all(sandbox.home.path().join("run")).expect("removed");
        if finishes {
            sandbox.tell(Step::Finish);
        }
        let refused = loop {
            match waiting.next(soon()).expect("an answer") {
                Reply::Progress(_) => {}
                Reply::Error(error) => break error,
                other => panic!("{other:?}"),
            }
        };
        assert!(refused.message.contains("was removed while 'n' was loaded"), "{refused:?}");
        assert_eq!(sandbox.happened(), ["released with the socket"]);
        assert!(sandbox.ended().expect_err("a failure").message().contains("was removed while"));
        assert!(!sandbox.home.path().join("run").exists());
    }
}

// The socket.

#[test]
fn only_a_dead_socket_is_replaced() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("s");
    let signals = || SignalDescriptor::new(&[libc::SIGWINCH]).expect("a descriptor");
    let living = UnixListener::bind(&path).expect("bound");
    assert_eq!(Listener::bind(&path, signals()).expect_err("somebody listens").kind(), Kind::InUse);
    drop(living);
    let _listener = Listener::bind(&path, signals()).expect("replaced");
    let mode = std::fs::metadata(&path).expect("there").permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    let file = directory.path().join("f");
    std::fs::write(&file, "words").expect("written");
    assert!(Listener::bind(&file, signals()).is_err());
    assert_eq!(std::fs::read(&file).expect("there"), b"words");
}

#[test]
fn what_cannot_be_registered_leaves_nothing() {
    let home = tempfile::tempdir().expect("a directory");
    let base = BaseDir::prepared(home.path().to_owned());
    std::fs::create_dir(base.run_dir()).expect("made");
    let paths = base.paths(&"n".parse().expect("a name"));
    let mut config = config(&base, &paths);
    let letter = home.path().join("letter");
    std::fs::write(&letter, "dear all").expect("written");
    config.pid_file = text(&letter);
    let log = Log::new(tempfile::tempfile().expect("a file"));
    let lock = Lock::try_exclusive(&paths.lock).expect("lockable").expect("free");
    let signals = SignalDescriptor::new(&[libc::SIGWINCH]).expect("a descriptor");
    Registered::new(&config, lock, signals, &log).expect_err("the pid file is a letter");
    assert_eq!(std::fs::read_dir(base.run_dir()).expect("there").count(), 0);
    assert_eq!(std::fs::read(&letter).expect("there"), b"dear all");
}
