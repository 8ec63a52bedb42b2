//! What the stories share: scratch directories on a real file system, seeded bytes, and a sandbox with a
//! model and a BASE of its own.

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Makes Ctrl-C count in every command that is started from here. A shell that runs the tests in the
/// background has it ignored, which the commands inherit and respect.
pub(crate) fn heed_ctrl_c() {
    iloader::sys::signals::restore(libc::SIGINT);
}

/// A directory of its own, removed at the end also when the test fails. On the file system of the build,
/// which is a real one more often than `/tmp` is; `ILOADER_TEST_DIR` names another.
pub(crate) fn scratch_dir() -> tempfile::TempDir {
    let named = std::env::var_os("ILOADER_TEST_DIR").map(PathBuf::from);
    let places = named.into_iter().chain([PathBuf::from(env!("CARGO_TARGET_TMPDIR")), std::env::temp_dir()]);
    places
        .filter_map(|place| tempfile::Builder::new().prefix("iloader-test-").tempdir_in(place).ok())
        .next()
        .expect("some directory for temporary files is writable")
}

/// `length` bytes that depend on `seed` and on their place, so that swapped or shifted blocks differ.
pub(crate) fn bytes_of(seed: u64, length: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1;
    let mut bytes = Vec::with_capacity(length as usize + 8);
    while (bytes.len() as u64) < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length as usize);
    bytes
}

/// Says why a test, or a part of it, does not run here. Written past the capture of the test runner: a skip
/// that nobody sees is a hole.
pub(crate) fn skipped(why: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

/// How long a test waits for what must happen. It is never waited for where all is well.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// One small read at a time past the page cache: some tens of megabytes per second at the best.
pub(crate) const SLOWLY: [&str; 8] =
    ["--engine", "threads", "--read-size", "4096", "--direct", "always", "--queue-depth", "1"];

/// Long enough at that rate for a load to be met, and short enough to be waited for.
const SLOW_BYTES: u64 = 64 << 20;

/// A model directory and a BASE of its own. Its cache's name is found nowhere else on the machine, so that
/// what it leaves can be told from what others do. Every daemon of the BASE ends with it.
pub(crate) struct Sandbox {
    home: tempfile::TempDir,
    name: String,
}

impl Sandbox {
    /// With an empty model directory.
    pub(crate) fn empty() -> Sandbox {
        heed_ctrl_c();
        let home = scratch_dir();
        let unique =
            home.path().file_name().unwrap().to_str().unwrap().rsplit('-').next().unwrap().to_owned();
        for leaf in ["model", "home", "tmp"] {
            std::fs::create_dir(home.path().join(leaf)).unwrap();
        }
        Sandbox { home, name: format!("it-{unique}") }
    }

    /// With a model of four files and two directories.
    pub(crate) fn new() -> Sandbox {
        let sandbox = Sandbox::empty();
        for (index, (path, bytes)) in MODEL.iter().enumerate() {
            sandbox.write(path, &bytes_of(index as u64, *bytes));
        }
        sandbox
    }

    /// With a model whose load can be met: see [`Sandbox::freeze`].
    pub(crate) fn slow() -> Sandbox {
        let sandbox = Sandbox::empty();
        sandbox.write("config.json", b"{}");
        sandbox.write("model.safetensors", &bytes_of(7, SLOW_BYTES));
        sandbox
    }

    /// A path below the sandbox's own directory.
    pub(crate) fn path(&self, leaf: &str) -> PathBuf {
        self.home.path().join(leaf)
    }

    /// The source directory.
    pub(crate) fn model(&self) -> PathBuf {
        self.path("model")
    }

    /// The name of the cache that [`Sandbox::start`] starts.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Where its view is published.
    pub(crate) fn view(&self) -> PathBuf {
        self.path("base/views").join(&self.name)
    }

    /// A file of the cache in BASE/run.
    pub(crate) fn run_file(&self, extension: &str) -> PathBuf {
        self.path("base/run").join(format!("{}.{extension}", self.name))
    }

    /// Writes a file of the model, and the directories that it stands in.
    pub(crate) fn write(&self, path: &str, bytes: &[u8]) {
        let file = self.model().join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, bytes).unwrap();
    }

    /// `iloader` with `words`, in an environment that says nothing but where BASE is.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_iloader"));
        let speaks = |name: &str| {
            ["ILOADER_", "XDG_", "HF_", "HUGGINGFACE_", "NOTIFY_"].iter().any(|start| name.starts_with(start))
        };
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(speaks)) {
            command.env_remove(name);
        }
        command
            .args(words)
            .env("ILOADER_BASE_DIR", self.path("base"))
            .env("HOME", self.path("home"))
            .env("TMPDIR", self.path("tmp"))
            .stdin(Stdio::null());
        command
    }

    /// Runs `iloader` with `words` to its end.
    pub(crate) fn iloader(&self, words: &[&str]) -> Ran {
        Job::spawn(self.command(words)).wait()
    }

    /// Runs `iloader COMMAND NAME` with more `words`.
    pub(crate) fn ask(&self, command: &str, words: &[&str]) -> Ran {
        self.iloader(&[&[command, &self.name], words].concat())
    }

    /// `iloader run NAME -- WORDS`.
    pub(crate) fn run(&self, words: &[&str]) -> Job {
        Job::spawn(self.command(&[&["run", self.name.as_str(), "--"], words].concat()))
    }

    /// `iloader start` of the model under the sandbox's name.
    pub(crate) fn start_command(&self, words: &[&str]) -> Command {
        let model = self.model();
        self.command(&[&["start", model.to_str().unwrap(), "--name", &self.name], words].concat())
    }

    /// Runs it to its end.
    pub(crate) fn start(&self, words: &[&str]) -> Ran {
        Job::spawn(self.start_command(words)).wait()
    }

    /// Starts the cache, which must succeed, and gives the path that was printed.
    pub(crate) fn started(&self, words: &[&str]) -> PathBuf {
        self.start(words).expect(0).path()
    }

    /// Starts a load and stops its daemon's process in the middle of it. `None`, with a line that says why,
    /// where the load cannot be made slow enough to be met. It goes on when the value is dropped.
    pub(crate) fn freeze(&self) -> Option<Frozen> {
        self.freeze_with(&[])
    }

    /// The same of a start with more `words`.
    pub(crate) fn freeze_with(&self, words: &[&str]) -> Option<Frozen> {
        self.freeze_by(Job::spawn, words)
    }

    /// The same where `spawn` says how the start is run.
    pub(crate) fn freeze_by(&self, spawn: impl FnOnce(Command) -> Job, words: &[&str]) -> Option<Frozen> {
        let start = self.start_command(&[&SLOWLY[..], &["--no-wait"], words].concat());
        let ran = spawn(start).wait().expect(0);
        until("progress", || {
            let status = self.status();
            status["state"] == "ready" || status["progress"]["bytes_done"].as_u64() > Some(0)
        });
        let frozen = Frozen(self.daemon());
        kill_process(frozen.0, Signal::STOP).unwrap();
        until("a stopped process", || is_stopped(frozen.0));
        if ran.path().join("config.json").exists() {
            skipped("no load is slow enough here to be met: this file system refuses O_DIRECT");
            return None;
        }
        Some(frozen)
    }

    /// The daemon's process.
    pub(crate) fn daemon(&self) -> Pid {
        let text = std::fs::read_to_string(self.run_file("pid")).unwrap();
        Pid::from_raw(text.trim().parse().unwrap()).unwrap()
    }

    /// Kills the daemon, and waits until everybody can know: its lock is free, though what it held may not be
    /// given back yet.
    pub(crate) fn kill_daemon(&self) {
        kill_process(self.daemon(), Signal::KILL).unwrap();
        until("a free lock", || !iloader::registry::lock::is_held(&self.run_file("lock")).unwrap());
    }

    /// What `status --json` prints.
    pub(crate) fn status(&self) -> serde_json::Value {
        self.ask("status", &["--json"]).json()
    }

    /// Waits until nothing of the caches is left: no daemon, no file in BASE/run, no memory, and of
    /// the default views at most empty directories.
    pub(crate) fn nothing_left(&self) {
        until("an end that leaves no daemon", || self.daemons().is_empty());
        assert_eq!(entries(&self.path("base/run")), [""; 0], "files stay in BASE/run");
        for view in entries(&self.path("base/views")) {
            let inside = entries(&self.path("base/views").join(&view));
            assert_eq!(inside, [""; 0], "something stays of the view {view}");
        }
        assert_eq!(self.holders(), [0; 0], "processes hold its memory");
    }

    /// The processes of this program that have a file of this sandbox open, such as their lock and log.
    pub(crate) fn daemons(&self) -> Vec<Pid> {
        let program = std::fs::metadata(env!("CARGO_BIN_EXE_iloader")).unwrap();
        let is_ours = |pid: &u32| {
            std::fs::metadata(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.ino() == program.ino())
                && open_files(*pid).iter().any(|file| file.starts_with(self.home.path()))
        };
        processes().into_iter().filter(is_ours).filter_map(|pid| Pid::from_raw(pid as i32)).collect()
    }

    /// The processes that have a segment of a cache open or mapped whose name begins with the sandbox's.
    pub(crate) fn holders(&self) -> Vec<u32> {
        let segment = format!("iloader:{}", self.name);
        let maps = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let holds = |pid: &u32| {
            open_files(*pid).iter().any(|file| file.to_string_lossy().contains(&segment))
                || maps(pid).contains(&segment)
        };
        processes().into_iter().filter(holds).collect()
    }
}

/// The model of [`Sandbox::new`]: paths and lengths, none a multiple of a page but one.
pub(crate) const MODEL: [(&str, u64); 4] = [
    ("config.json", 1234),
    ("model-00001-of-00002.safetensors", (5 << 20) + 77),
    ("model-00002-of-00002.safetensors", 4 << 20),
    ("text_encoder/sub/weights.bin", 3 * 4096 + 1),
];

impl Drop for Sandbox {
    fn drop(&mut self) {
        for _ in 0..3 {
            for pid in self.daemons() {
                let _ = kill_process(pid, Signal::KILL);
                let deadline = Instant::now() + PATIENCE;
                while !has_ended(pid) && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        // The directories of a view forbid to remove what is in them.
        let _ = Command::new("chmod").arg("-R").arg("u+rwX").arg(self.home.path()).output();
    }
}

/// A process that is stopped, until this is dropped.
pub(crate) struct Frozen(Pid);

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// A command that runs beside the test, and is ended with it.
pub(crate) struct Job {
    child: Child,
    line: String,
    stdout: mpsc::Receiver<String>,
    stderr: mpsc::Receiver<String>,
}

impl Job {
    pub(crate) fn spawn(mut command: Command) -> Job {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        Job { child, line: format!("{command:?}"), stdout: drain(stdout), stderr: drain(stderr) }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Whether it rests, connected to something: a command that waits for a daemon.
    pub(crate) fn waits_on_a_socket(&self) -> bool {
        let pid = self.child.id();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().any(|line| line.starts_with("State:") && line.contains("S (sleeping)"))
            && open_files(pid).iter().any(|file| file.to_string_lossy().starts_with("socket:"))
    }

    pub(crate) fn is_over(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for its end, and for the end of both its streams.
    pub(crate) fn wait(mut self) -> Ran {
        let what = format!("an end of {}", self.line);
        until(&what, || self.is_over());
        let status = self.child.wait().unwrap();
        let text = |stream: &mpsc::Receiver<String>| {
            stream
                .recv_timeout(PATIENCE)
                .unwrap_or_else(|_| panic!("somebody keeps a stream of {}", self.line))
        };
        Ran {
            code: status.code(),
            signal: status.signal(),
            stdout: text(&self.stdout),
            stderr: text(&self.stderr),
            line: self.line.clone(),
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn drain(mut stream: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

/// A command that ended.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// For messages.
    #[allow(dead_code, reason = "the derived Debug reads it")]
    line: String,
}

impl Ran {
    /// It ended with this exit code.
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Ran {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    /// It failed with this exit code: nothing on stdout, and on stderr an error and what to do.
    #[track_caller]
    pub(crate) fn expect_refusal(self, code: i32, words: &str) -> Ran {
        let ran = self.expect(code);
        assert_eq!(ran.stdout, "", "{ran:#?}");
        let mut lines = ran.stderr.lines().skip_while(|line| !line.starts_with("error: "));
        assert!(lines.next().is_some_and(|line| line.contains(words)), "no error with '{words}': {ran:#?}");
        ran
    }

    /// The one line of stdout as a path.
    #[track_caller]
    pub(crate) fn path(&self) -> PathBuf {
        let path = self.stdout.strip_suffix('\n').unwrap_or_else(|| panic!("no line: {self:#?}"));
        assert!(path.starts_with('/') && !path.contains('\n'), "{self:#?}");
        PathBuf::from(path)
    }

    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

/// Waits until something is so, which it must be.
#[track_caller]
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "there was never {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The sorted names in a directory; none where it does not exist.
pub(crate) fn entries(directory: &Path) -> Vec<String> {
    let Ok(found) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<String> =
        found.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

pub(crate) fn processes() -> Vec<u32> {
    entries(Path::new("/proc")).iter().filter_map(|name| name.parse().ok()).collect()
}

/// What a process has open, as far as it can be seen.
pub(crate) fn open_files(pid: u32) -> Vec<PathBuf> {
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    descriptors.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).collect()
}

/// Whether a process has given everything back: that nobody waited for it yet does not matter.
pub(crate) fn has_ended(pid: Pid) -> bool {
    state_of(pid).is_none_or(|state| state.starts_with(['Z', 'X']))
}

fn is_stopped(pid: Pid) -> bool {
    state_of(pid).is_some_and(|state| state.starts_with('T'))
}

fn state_of(pid: Pid) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
    status.lines().find_map(|line| line.strip_prefix("State:")).map(|state| state.trim().to_owned())
}
