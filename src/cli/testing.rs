//! What the tests of commands share: a stand-in daemon that holds one real segment behind one real view, and
//! running a command of this program in a process of its own.

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::SystemTime;

use rustix::fs::{MemfdFlags, Mode};

use crate::control::frame::{self, Decoder, REPLY_BYTES_MAX, REQUEST_BYTES_MAX};
use crate::control::message::{
    Leased, Link, Operation, PROTOCOL, Progress, ReadCounts, ReaderInfo, Reply, Request, State, Status,
};
use crate::error::{Error, Kind};
use crate::failure::Failure;
use crate::manifest::{self, FileEntry, Manifest, SelectionRules};
use crate::registry::{BaseDir, Host, Lock, Record, record};
use crate::source::Identity;
use crate::sys::memfd::SEALS;

/// The bytes of the one file.
const BYTES: &[u8] = b"weights";

/// The one file.
pub(super) const FILE: &str = "model.safetensors";

/// The cache's name.
pub(super) const NAME: &str = "qwen";

/// Parts of a command line, in the environment of [`child`].
const ARGUMENTS: &str = "ILOADER_TEST_ARGUMENTS";

/// Stands between them.
const SEPARATOR: u8 = 0x1f;

/// What a stand-in has for each request.
type Answers = Box<dyn Fn(&Operation, &Facts) -> Vec<Reply> + Send + Sync>;

/// A cache of one file: source, sealed memfd and view, in a directory of its own that is also its BASE.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) directory: PathBuf,
    pub(super) segment: OwnedFd,
}

impl Facts {
    fn new(directory: &Path) -> Facts {
        for part in ["source", "view", "run"] {
            std::fs::create_dir(directory.join(part)).expect("a directory");
        }
        let source = directory.join("source").join(FILE);
        std::fs::write(&source, BYTES).expect("written");
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let memfd = rustix::fs::memfd_create("iloader:test", flags).expect("a memfd");
        rustix::io::write(&memfd, BYTES).expect("written");
        let file = std::fs::File::from(memfd);
        let modified = source.metadata().and_then(|found| found.modified()).expect("a time");
        file.set_modified(modified).expect("the source's time");
        let segment = OwnedFd::from(file);
        rustix::fs::fchmod(&segment, Mode::RUSR | Mode::RGRP | Mode::ROTH).expect("mode 0444");
        rustix::fs::fcntl_add_seals(&segment, SEALS).expect("sealed");
        let target = format!("/proc/{}/fd/{}", std::process::id(), segment.as_raw_fd());
        symlink(target, directory.join("view").join(FILE)).expect("linked");
        Facts { directory: directory.to_owned(), segment }
    }

    /// A path in the directory, as text.
    pub(super) fn text(&self, leaf: &str) -> String {
        self.directory.join(leaf).to_str().expect("UTF-8").to_owned()
    }

    /// What a lease gives.
    pub(super) fn leased(&self) -> Leased {
        let stat = rustix::fs::fstat(&self.segment).expect("stat");
        let link = Link {
            path: FILE.to_owned(),
            bytes: BYTES.len() as u64,
            device: stat.st_dev,
            inode: stat.st_ino,
        };
        Leased { view: self.text("view"), backing: "memfd".to_owned(), links: vec![link] }
    }

    /// What it holds.
    pub(super) fn manifest(&self) -> Manifest {
        let found = std::fs::metadata(self.directory.join("source").join(FILE)).expect("the source");
        let identity = Identity::of(&found);
        let file = FileEntry {
            path: FILE.to_owned(),
            bytes: identity.bytes,
            mtime: identity.mtime_rfc3339(),
            device: identity.device,
            inode: identity.inode,
            sha256: None,
            passthrough: false,
        };
        Manifest {
            schema: manifest::SCHEMA,
            name: NAME.to_owned(),
            source: self.text("source"),
            selection: SelectionRules::default(),
            files: vec![file],
            directory_links: Vec::new(),
            bytes: BYTES.len() as u64,
            created: "2026-01-01T00:00:00Z".to_owned(),
            tool: "0.1.0".to_owned(),
        }
    }
}

/// A thread that answers at a socket as a daemon would.
pub(super) struct Standin {
    pub(super) facts: std::sync::Arc<Facts>,
    /// Says for each connection that ended.
    ended: Receiver<()>,
    _directory: tempfile::TempDir,
    _lock: Option<Lock>,
}

impl Standin {
    /// Listens at `run/qwen.sock` of its directory and gives `answers` to every request. With `registered`
    /// it is found by its name in the directory as BASE.
    pub(super) fn start(
        registered: bool,
        answers: impl Fn(&Operation, &Facts) -> Vec<Reply> + Send + Sync + 'static,
    ) -> Standin {
        let directory = tempfile::tempdir().expect("a directory");
        let facts = std::sync::Arc::new(Facts::new(directory.path()));
        let listener = UnixListener::bind(facts.text("run/qwen.sock")).expect("bound");
        let lock = registered.then(|| register(&facts));
        let (sender, ended) = channel();
        let (shared, answers): (_, Answers) = (facts.clone(), Box::new(answers));
        let answers = std::sync::Arc::new(answers);
        // It ends with the test process: a listener has no other end.
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let (facts, sender, answers) = (shared.clone(), sender.clone(), answers.clone());
                std::thread::spawn(move || converse(stream, &facts, &answers, &sender));
            }
        });
        Standin { facts, ended, _directory: directory, _lock: lock }
    }

    /// Runs a command of this program with `BASE` in place of the directory.
    pub(super) fn iloader(&self, arguments: &[&str]) -> Output {
        let base = self.facts.text("");
        iloader(
            &arguments
                .iter()
                .map(|part| part.replace("BASE", base.trim_end_matches('/')))
                .collect::<Vec<_>>(),
        )
    }

    /// Whether so many connections have ended.
    pub(super) fn has_ended(&self, connections: usize) -> bool {
        self.ended.try_iter().count() == connections
    }

    /// Waits for the end of one more connection.
    pub(super) fn wait_for_end(&self) {
        self.ended.recv().expect("the connection ends");
    }
}

/// Registers the stand-in in its directory, with this process as the daemon; gives the lock.
fn register(facts: &Facts) -> Lock {
    let paths = BaseDir::prepared(facts.directory.clone()).paths(&NAME.parse().expect("a name"));
    let lock = Lock::try_exclusive(&paths.lock).expect("lockable").expect("free");
    registration(facts).write(&paths.record).expect("registered");
    lock
}

/// The registration of the stand-in.
pub(super) fn registration(facts: &Facts) -> Record {
    Record {
        schema: record::SCHEMA,
        name: NAME.to_owned(),
        pid: std::process::id() as i32,
        host: Host::current(),
        socket: facts.text("run/qwen.sock"),
        view: facts.text("view"),
        kept_dirname: None,
        source: facts.text("source"),
        pid_file: facts.text("run/qwen.pid"),
        log_file: facts.text("qwen.log"),
        created: "2026-01-01T00:00:00Z".to_owned(),
        tool: "0.1.0".to_owned(),
        failed: None,
    }
}

/// The same of one that was killed: no process holds its view any more.
pub(super) fn crashed(facts: &Facts) -> Record {
    Record { view: facts.text("views/qwen"), ..registration(facts) }
}

fn converse(mut stream: UnixStream, facts: &Facts, answers: &Answers, ended: &Sender<()>) {
    let mut decoder = Decoder::new(REQUEST_BYTES_MAX);
    // As a daemon, it takes no other question from who still waits for an answer.
    let mut is_waiting = false;
    while let Ok(Some(frame)) = frame::read(&mut stream, &mut decoder, None) {
        let operation = Request::parse(&frame).expect("a request").operation;
        let replies = match operation {
            Operation::Cancel {} => answers(&operation, facts),
            _ if is_waiting => {
                vec![Reply::Error(Failure::from(&Error::new(Kind::Usage, "this connection waits already")))]
            }
            _ => answers(&operation, facts),
        };
        is_waiting = replies.is_empty();
        for reply in replies {
            let frame = frame::encode(&reply, REPLY_BYTES_MAX).expect("encoded");
            // A client that has seen enough is gone.
            if stream.write_all(&frame).is_err() {
                break;
            }
        }
    }
    let _ = ended.send(());
}

/// What a ready daemon answers.
pub(super) fn ready(operation: &Operation, facts: &Facts) -> Vec<Reply> {
    vec![match operation {
        Operation::Status {} => Reply::Status(Box::new(status(facts, State::Ready))),
        Operation::Manifest {} => Reply::Manifest(Box::new(facts.manifest())),
        Operation::Wait { .. } => Reply::Ready { view: facts.text("view") },
        Operation::Lease {} => Reply::Leased(Box::new(facts.leased())),
        Operation::Readers {} => Reply::Readers(Box::default()),
        Operation::Stop { .. } | Operation::Cancel {} => Reply::Stopping { notes: Vec::new(), holders: None },
    }]
}

/// A process that reads.
pub(super) fn reader(pid: i32) -> ReaderInfo {
    ReaderInfo {
        pid,
        command: "engine".to_owned(),
        lease: false,
        descriptors: 1,
        mapped_bytes: 4096,
        resident_bytes: Some(4096),
        private_bytes: Some(0),
        own_bytes: None,
    }
}

/// A status in `state`.
pub(super) fn status(facts: &Facts, state: State) -> Status {
    let fields = serde_json::json!({
        "name": NAME, "state": state, "pid": std::process::id(), "view": facts.text("view"),
        "source": facts.text("source"), "bytes": BYTES.len(), "files": 1,
        "progress": Progress { bytes_done: 3, bytes_total: 7, files_done: 0, files_total: 1, seconds: 2.0 },
        "leases": [{"pid": 77, "command": "engine\n--now"}], "idle_seconds": 0.0,
        "created": "2026-01-01T00:00:00Z", "backing": "memfd", "backing_reason": "asked for",
        "huge_page_bytes": 0, "engine": "threads", "engine_reason": "asked for", "allocated_bytes": 4096,
        "read": ReadCounts::default(), "identity": "00", "settings": {}, "tuning": {},
        "log": facts.text("qwen.log"), "socket": facts.text("run/qwen.sock"), "tool": "0.1.0",
        "protocol": PROTOCOL,
    });
    serde_json::from_value(fields).expect("a status")
}

/// Runs a command of this program, without its name, in a process of its own.
pub(super) fn iloader(arguments: &[String]) -> Output {
    let joined = arguments.join(std::str::from_utf8(&[SEPARATOR]).expect("ASCII"));
    let this = std::env::current_exe().expect("the test binary has a path");
    let mut output = Command::new(this)
        .args(["--exact", "cli::testing::child", "--nocapture"])
        .env(ARGUMENTS, joined)
        .env("ILOADER_BASE_DIR", "/no/such/base")
        .output()
        .expect("the test binary starts");
    // What the test harness prints before the test begins.
    const PREFIX: &[u8] = b"\nrunning 1 test\n";
    assert!(output.stdout.starts_with(PREFIX), "{output:?}");
    output.stdout.drain(..PREFIX.len());
    output
}

/// Not a test of its own: what [`iloader`] starts.
#[test]
fn child() {
    let Some(joined) = std::env::var_os(ARGUMENTS) else { return };
    let arguments =
        joined.as_bytes().split(|byte| *byte == SEPARATOR).map(|part| OsString::from_vec(part.to_vec()));
    let code = super::execute(std::iter::once("iloader".into()).chain(arguments).collect());
    std::process::exit(code.into());
}

/// What was printed.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Sets a time in the past on `file`.
pub(super) fn touch(file: &std::fs::File) {
    file.set_modified(SystemTime::UNIX_EPOCH).expect("a time can be set");
}
