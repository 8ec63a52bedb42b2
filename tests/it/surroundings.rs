//! What a command finds around it: descriptors, signals, limits, environment, names, times, and a BASE that
//! is full, read-only or gone.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Signal, kill_process};

use crate::harness::{Job, Ran, Sandbox, entries, skipped, until};

/// `command`, made by a shell after `setup`; in it, "$@" is the command.
fn after(setup: &str, command: &Command) -> Command {
    wrapped(&["sh", "-c", &format!("{setup}\nexec \"$@\""), "sh"], command)
}

/// `words` with `command` behind them, in the command's environment.
fn wrapped(words: &[&str], command: &Command) -> Command {
    let mut wrapper = Command::new(words[0]);
    wrapper.args(&words[1..]).arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapper.env(name, value),
            None => wrapper.env_remove(name),
        };
    }
    wrapper
}

fn has(program: &str, words: &[&str]) -> bool {
    let found = Command::new(program).args(words).output().is_ok_and(|output| output.status.success());
    if !found {
        skipped(format!("there is no {program} that takes {words:?}"));
    }
    found
}

/// A line of `/proc/PID/status` as a set of bits.
fn signals(status: &str, field: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

fn bit(signal: Signal) -> u64 {
    1 << (signal.as_raw() - 1)
}

#[test]
fn a_daemon_keeps_no_lock_pipe_or_signal_of_its_caller() {
    let sandbox = Sandbox::new();
    let lock = std::fs::File::create(sandbox.path("lock")).unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut start = sandbox.start_command(&[]);
    if has("env", &["--block-signal=TERM,USR2", "true"]) {
        start = wrapped(&["env", "--block-signal=TERM,USR2"], &start);
    }
    // Descriptors 8 and 9 are a lock and, as standard output's copy, a pipe that somebody waits on.
    let setup = format!(
        "trap '' HUP USR1 TSTP; exec 9>&1 8>>'{}'; flock -n 8 || :; VIEW=$(\"$@\") && echo \"view $VIEW\"; exit",
        sandbox.path("lock").display()
    );
    let mut command = after(&setup, &start);
    command.stdout(writer);
    let mut caller = command.spawn().unwrap();
    // It holds the pipe's writing end.
    drop(command);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut reader, &mut said).unwrap();
    assert!(caller.wait().unwrap().success());
    assert_eq!(said, format!("view {}\n", sandbox.view().display()));

    flock(&lock, FlockOperation::NonBlockingLockExclusive).expect("the caller's lock is free");
    let pid = sandbox.daemon().as_raw_nonzero();
    let descriptors = format!("/proc/{pid}/fd");
    for name in entries(Path::new(&descriptors)) {
        let file = std::fs::read_link(Path::new(&descriptors).join(&name)).unwrap();
        assert!(!file.starts_with(sandbox.path("lock")), "descriptor {name}");
        assert!(!file.to_string_lossy().starts_with("pipe:"), "descriptor {name}: {}", file.display());
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for signal in [Signal::HUP, Signal::USR1, Signal::USR2, Signal::TSTP, Signal::TERM] {
        assert_eq!(signals(&status, "SigIgn:") & bit(signal), 0, "{signal:?} is ignored");
    }
    assert_eq!(signals(&status, "SigBlk:") & bit(Signal::USR2), 0);
    kill_process(sandbox.daemon(), Signal::TERM).unwrap();
    sandbox.nothing_left();
}

#[test]
fn a_signal_that_the_caller_ignores_ends_no_waiting_command() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze() else { return };
    let mut start = Job::spawn(after("trap '' INT HUP", &sandbox.start_command(&["--wait-timeout", "600"])));
    until("a start that waits", || start.waits_on_a_socket());
    start.signal(Signal::INT);
    start.signal(Signal::HUP);
    assert!(!start.is_over());
    drop(frozen);
    assert_eq!(start.wait().expect(0).path(), sandbox.view());
}

/// What a process was given, as it sees it itself. The lease is the only difference that `run` makes.
const PROBE: &str = r#"
    cat /proc/$$/limits
    grep -E '^((Sig(Blk|Ign)|Cap[A-Z][a-z]+|Umask|Seccomp|NoNewPrivs|Groups):)' /proc/self/status
    readlink /proc/$$/cwd
    for n in 0 2 3 4 5 6 7 8 9; do echo $n; readlink /proc/$$/fd/$n || echo closed; done
    echo "$1 $2 <$3>"
"#;

#[test]
fn run_hands_on_exactly_what_its_caller_had() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    let directory = sandbox.path("caller's directory");
    std::fs::create_dir(&directory).unwrap();
    let change = format!("cd \"{}\"", directory.display());
    let setups = [
        change.as_str(),
        "ulimit -S -n 100; ulimit -c 0; ulimit -f 2000; ulimit -s 4096; ulimit -v 9000000",
        "ulimit -n 64",
        "umask 027; exec 7</dev/zero 9>/dev/null 3<&0",
        "umask 000; trap '' PIPE HUP USR1 INT CHLD",
        "exec <&-",
        "exec 2>&-",
        "exec <&- 2>&-; umask 777",
        "mkdir gone 2>/dev/null; cd gone; rmdir ../gone",
    ];
    let probe = |program: &Command, setup: &str| {
        let mut command = after(setup, program);
        command.current_dir(&directory).env("KEPT", "as it is");
        Job::spawn(command).wait()
    };
    let words = ["sh", "-c", PROBE, "sh", "{model}", "x{model}y{model}", "a  b\n'\"$KEPT"];
    let line = format!("{0} x{0}y{0} <", view.display());
    for setup in setups {
        let mut direct = Command::new(words[0]);
        direct.args(&words[1..]);
        let direct = probe(&direct, setup).stdout.replace("{model} x{model}y{model} <", &line);
        let run = probe(&sandbox.command(&[&["run", sandbox.name(), "--"], &words[..]].concat()), setup);
        // Both have a standard error of their own that is a pipe.
        let comparable = |text: &str| {
            let lines = text.lines().map(|line| line.split_once("pipe:").map_or(line, |(before, _)| before));
            lines.map(str::to_owned).collect::<Vec<String>>()
        };
        assert!(direct.contains(&line), "{direct}");
        assert_eq!(comparable(&run.stdout), comparable(&direct), "after {setup}: {run:#?}");
    }
    if has("env", &["--block-signal=USR2", "true"]) {
        let masked =
            wrapped(&["env", "--block-signal=USR2"], &sandbox.command(&["run", sandbox.name(), "--"]));
        let mut masked = masked;
        masked.args(["cat", "/proc/self/status"]);
        let status = Job::spawn(masked).wait().expect(0).stdout;
        assert_ne!(signals(&status, "SigBlk:") & bit(Signal::USR2), 0);
    }
}

#[test]
fn limits_are_named_before_anything_is_half_made() {
    let sandbox = Sandbox::empty();
    sandbox.write("config.json", b"{}");
    // A hole: nothing of it is read, because nothing of it is admitted.
    std::fs::File::create(sandbox.model().join("weights.bin")).unwrap().set_len(512 << 20).unwrap();
    if !has("prlimit", &["--version"]) {
        return;
    }
    let limited = |limits: &[&str], command: &Command| {
        Job::spawn(wrapped(&[&["prlimit"], limits].concat(), command)).wait()
    };
    let start = sandbox.start_command(&[]);
    for (limit, words) in [
        ("--fsize=0", "RLIMIT_FSIZE"),
        ("--fsize=300", "RLIMIT_FSIZE"),
        (
            "--fsize=100000000",
            "536870912 bytes (512 MiB), but this process may only write files of 100000000",
        ),
        ("--as=500000000", "RLIMIT_AS"),
        ("--nofile=16:16", "needs 512 descriptors, but the hard limit of this process is 16 (RLIMIT_NOFILE)"),
        (
            "--nofile=512:512",
            "needs 514 descriptors, but the hard limit of this process is 512 (RLIMIT_NOFILE)",
        ),
    ] {
        let refused = limited(&[limit], &start).expect_refusal(6, words);
        assert!(refused.stderr.contains(" hint: "), "{limit}: {refused:#?}");
        sandbox.nothing_left();
    }

    std::fs::remove_file(sandbox.model().join("weights.bin")).unwrap();
    limited(&["--nofile=1024:1024"], &start).expect(0);
    limited(&["--nofile=1024:1024"], &sandbox.command(&["run", sandbox.name(), "--", "true"])).expect(0);
    sandbox.ask("stop", &[]).expect(0);
    for file in 0..600 {
        sandbox.write(&format!("part-{file}.json"), b"{}");
    }
    let many = "needs 1113 descriptors, but the hard limit of this process is 1024 (RLIMIT_NOFILE)";
    limited(&["--nofile=1024:1024"], &start).expect_refusal(6, many);
    sandbox.nothing_left();
    limited(&["--nofile=64:4096"], &start).expect(0);
    let ulimit = sandbox.command(&["run", sandbox.name(), "--", "sh", "-c", "ulimit -S -n; ulimit -H -n"]);
    assert_eq!(limited(&["--nofile=20:30"], &ulimit).expect(0).stdout, "20\n30\n");
    sandbox.ask("stop", &[]).expect(0);
}

#[test]
fn any_environment_and_umask_will_do() {
    let sandbox = Sandbox::new();
    let base = sandbox.path("base");
    let words = ["--base-dir", base.to_str().unwrap()];
    for (umask, variables) in
        [("000", &[][..]), ("077", &["LANG=C", "TERM=dumb"]), ("777", &["LC_ALL=no-such", "HOME=", "TERM="])]
    {
        let bare = |command: &Command| {
            let command = wrapped(&[&["env", "-i"], variables].concat(), command);
            let ran = Job::spawn(after(&format!("umask {umask}"), &command)).wait().expect(0);
            assert!(!ran.stderr.contains('\x1b') && !ran.stdout.contains('\x1b'), "{ran:#?}");
            ran
        };
        let view = bare(&sandbox.start_command(&words)).path();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
        for directory in ["", "run", "logs", "views"] {
            assert_eq!(mode(&base.join(directory)), 0o700, "{directory} after umask {umask}");
        }
        for extension in ["json", "lock", "pid", "sock"] {
            assert_eq!(mode(&sandbox.run_file(extension)), 0o600, "{extension} after umask {umask}");
        }
        let log = base.join("logs").join(format!("{}.log", sandbox.name()));
        assert_eq!(mode(&log), 0o600, "the log after umask {umask}");
        for (path, expected) in [("", 0o555), ("text_encoder/sub", 0o555), ("config.json", 0o444)] {
            assert_eq!(mode(&view.join(path)), expected, "{path} after umask {umask}");
        }
        bare(&sandbox.command(&[&["status", sandbox.name()], &words[..]].concat()));
        bare(&sandbox.command(&[&["stop", sandbox.name(), "--remove-view"], &words[..]].concat()));
        std::fs::remove_dir_all(&base).unwrap();
    }
}

#[test]
fn closed_streams_and_a_deleted_directory_are_no_obstacle() {
    let sandbox = Sandbox::new();
    let gone = sandbox.path("gone");
    for setup in ["exec <&-", "exec >&-", "exec 2>&-", "exec <&- >&- 2>&-"] {
        // Nothing that belongs on a stream may end in a file that got its number.
        let start = Job::spawn(after(setup, &sandbox.start_command(&[]))).wait();
        // Where the path of the view can't be handed over, that alone is what fails.
        let code = if setup.contains(">&- ") || setup.ends_with(" >&-") { 1 } else { 0 };
        assert_eq!((start.code, start.signal), (Some(code), None), "after {setup}: {start:#?}");
        assert_eq!(sandbox.status()["view_faults"], serde_json::json!([]), "after {setup}");
        Job::spawn(after(setup, &sandbox.command(&["stop", sandbox.name()]))).wait().expect(0);
        sandbox.nothing_left();
    }
    std::fs::create_dir(&gone).unwrap();
    let mut start = after(&format!("rmdir '{}'", gone.display()), &sandbox.start_command(&[]));
    start.current_dir(&gone);
    Job::spawn(start).wait().expect(0);
    std::fs::create_dir(&gone).unwrap();
    let mut relative =
        after(&format!("rmdir '{}'", gone.display()), &sandbox.command(&["list", "--base-dir", "b"]));
    relative.current_dir(&gone);
    Job::spawn(relative).wait().expect_refusal(3, "the working directory is gone");
    sandbox.ask("stop", &[]).expect(0);
}

#[test]
fn a_stream_that_cannot_be_written_to_is_an_error_except_a_closed_pipe() {
    let sandbox = Sandbox::new();
    let name = sandbox.name();
    sandbox.started(&[]);
    let reading = [
        &["status", name][..],
        &["list"],
        &["manifest", name],
        &["view", name],
        &["inspect", sandbox.model().to_str().unwrap()].map(|word| &*word.to_owned().leak()),
        &["--help"],
    ];
    let into = |words: &[&str], stdout: Stdio| {
        let mut command = sandbox.command(words);
        command.stdout(stdout).stderr(Stdio::piped());
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let closed_pipe = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        Stdio::from(writer)
    };
    let closed = |words: &[&str]| Job::spawn(after("exec >&-", &sandbox.command(words))).wait();
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    for words in reading {
        assert_eq!(into(words, closed_pipe()).0, Some(0), "{words:?}");
        let (code, error) = into(words, full());
        assert_eq!(code, Some(1), "{words:?}");
        assert!(
            error.contains("error: cannot write the answer to standard output: no space left"),
            "{error}"
        );
        closed(words).expect_refusal(1, "cannot write the answer to standard output: it is closed");
    }
    let start = ["start", sandbox.model().to_str().unwrap(), "--name", name].map(str::to_owned);
    for stdout in [closed_pipe(), full()] {
        let (code, error) = into(&start.each_ref().map(String::as_str), stdout);
        assert_eq!(code, Some(1));
        assert!(error.contains(&format!("'iloader view {name}' prints its path")), "{error}");
    }
    sandbox.ask("stop", &[]).expect(0);
}

/// Everything that may stand in a file's name and means something somewhere else.
const ODD_NAMES: [&str; 14] = [
    "config.json",
    "a b",
    " leading and trailing ",
    "quotes'\"`",
    "new\nline",
    "escape\x1b[31mred",
    "tab\t",
    "return\r",
    "delete\x7f",
    "-option",
    "{model}",
    "back\\slash",
    "🦀 模型",
    "right-to-left\u{202e}",
];

fn assert_steers_no_terminal(ran: &Ran) {
    for text in [&ran.stdout, &ran.stderr] {
        let steers = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!text.contains(steers), "{ran:#?}");
        assert!(!text.lines().any(|line| line.starts_with("line")), "a name broke its line: {ran:#?}");
    }
}

#[test]
fn odd_names_and_times_are_served_and_shown_escaped() {
    let sandbox = Sandbox::empty();
    let before = SystemTime::UNIX_EPOCH - Duration::new(86_400 * 365 * 5, 0) + Duration::from_nanos(1);
    let after = SystemTime::UNIX_EPOCH + Duration::from_secs(86_400 * 365 * 300);
    for (name, time) in ODD_NAMES.iter().zip([before, after, SystemTime::now()].iter().cycle()) {
        sandbox.write(name, name.as_bytes());
        let file = std::fs::File::options().write(true).open(sandbox.model().join(name)).unwrap();
        file.set_modified(*time).unwrap();
    }
    let _socket = UnixListener::bind(sandbox.model().join("so\tcket")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, sandbox.model().join("fi\tfo"), rustix::fs::Mode::RUSR).unwrap();

    let started = sandbox.start(&[]).expect(0);
    assert!(started.stderr.contains("warning: 'fi\\tfo' is a named pipe and is skipped"), "{started:#?}");
    assert!(started.stderr.contains("warning: 'so\\tcket' is a socket and is skipped"), "{started:#?}");
    assert_steers_no_terminal(&started);
    let view = sandbox.view();
    assert_eq!(entries(&view).len(), ODD_NAMES.len());
    for name in ODD_NAMES {
        let (copy, original) = (view.join(name), sandbox.model().join(name));
        assert_eq!(std::fs::read(&copy).unwrap(), name.as_bytes());
        let time = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
        assert_eq!(time(&copy), time(&original), "{name:?}");
    }
    let status = sandbox.status();
    assert_eq!((&status["source_changed"], &status["view_faults"]), (&false.into(), &serde_json::json!([])));
    assert_eq!(sandbox.start(&[]).expect(0).path(), view);
    for words in [&["inspect", sandbox.model().to_str().unwrap()][..], &["status", sandbox.name()], &["list"]]
    {
        assert_steers_no_terminal(&sandbox.iloader(words).expect(0));
    }
    let manifest = sandbox.ask("manifest", &[]).expect(0);
    assert_steers_no_terminal(&manifest);
    let listed = manifest.json()["files"].as_array().unwrap().clone();
    let paths: Vec<&str> = listed.iter().map(|file| file["path"].as_str().unwrap()).collect();
    assert!(ODD_NAMES.iter().all(|name| paths.contains(name)), "{paths:?}");

    sandbox.write("new\nline", b"changed");
    let changed = sandbox.start(&[]).expect(9);
    assert!(changed.stderr.contains("new\\nline"), "{changed:#?}");
    assert_steers_no_terminal(&changed);
    assert_steers_no_terminal(&sandbox.ask("status", &[]).expect(0));
    sandbox.ask("stop", &[]).expect(0);
}

#[test]
fn a_name_that_is_not_utf8_is_refused_by_name() {
    let sandbox = Sandbox::new();
    let odd = sandbox.model().join(std::ffi::OsStr::from_bytes(b"bad\xff\n.bin"));
    if std::fs::write(&odd, "x").is_err() {
        return skipped("this file system has UTF-8 names only");
    }
    let model = sandbox.model();
    for refused in [sandbox.start(&[]), sandbox.iloader(&["inspect", model.to_str().unwrap()])] {
        assert_steers_no_terminal(&refused);
        refused.expect_refusal(1, "bad\\xff\\n.bin' is not UTF-8");
    }
    sandbox.nothing_left();
    sandbox.start(&["--also-exclude", "bad*"]).expect(0);
    assert_eq!(entries(&sandbox.view()).len(), 4);
    sandbox.ask("stop", &[]).expect(0);
}

#[test]
fn seconds_and_names_that_cannot_be_meant_are_wrong_usage() {
    let sandbox = Sandbox::new();
    let (model, name) = (sandbox.model(), sandbox.name());
    let model = model.to_str().unwrap();
    for seconds in ["inf", "-inf", "nan", "-1", "1e300", "0x10", "", "5s"] {
        for (code, words) in [
            (2, &["start", model, "--name", name, "--wait-timeout"][..]),
            (2, &["start", model, "--name", name, "--idle-ttl"]),
            (2, &["wait", name, "--timeout"]),
            (2, &["status", name, "--timeout"]),
            (2, &["list", "--timeout"]),
            (125, &["run", name, "--wait-timeout"]),
        ] {
            let given = format!("{}={seconds}", words.last().unwrap());
            let words =
                [&words[..words.len() - 1], &[&given, "--", "true"][..if code == 125 { 3 } else { 1 }]];
            let refused = sandbox.iloader(&words.concat()).expect(code);
            assert_eq!(
                (refused.stdout.as_str(), refused.stderr.starts_with("error: ")),
                ("", true),
                "{given}"
            );
        }
    }
    for (given, way_out) in [
        ("--chunk-size=64MiB", "write it as a plain number of bytes: 67108864"),
        ("--chunk-size=x", "write a plain number of bytes"),
        ("--workers=two", "write a whole number from 1 to 256"),
        ("--queue-depth=1.5", "write a whole number from 1 to 1024"),
    ] {
        sandbox.iloader(&["start", model, "--name", name, given]).expect_refusal(2, way_out);
    }
    let longest = "x".repeat(96);
    for bad in ["", ".a", "_a", "..", "a..b", "a/b", "a b", "a\nb", "é", &format!("{longest}x")] {
        let refused =
            sandbox.iloader(&["start", model, "--name", bad]).expect_refusal(2, "is not a cache name");
        assert_steers_no_terminal(&refused);
    }
    let long = sandbox.path(&"d".repeat(107 - sandbox.path("").as_os_str().len()));
    let refused = sandbox.iloader(&["start", model, "--name", "n", "--base-dir", long.to_str().unwrap()]);
    refused.expect_refusal(2, "but a Unix socket's path has 107 at the most");
    assert!(!long.join("run/n.lock").exists());
    sandbox.nothing_left();
}

#[test]
fn a_daemon_whose_base_was_removed_ends_without_a_trace() {
    let sandbox = Sandbox::new();
    let socket = sandbox.path("socket");
    let at = socket.to_str().unwrap();
    let base = sandbox.path("base");
    let remove = || {
        std::fs::set_permissions(sandbox.view(), PermissionsExt::from_mode(0o700)).unwrap();
        let _ =
            std::fs::set_permissions(sandbox.view().join("text_encoder"), PermissionsExt::from_mode(0o700));
        let _ = std::fs::set_permissions(
            sandbox.view().join("text_encoder/sub"),
            PermissionsExt::from_mode(0o700),
        );
        std::fs::remove_dir_all(&base).unwrap();
    };
    sandbox.started(&["--socket", at]);
    let reader = sandbox.iloader(&["status", "--socket", at]).expect(0);
    assert!(!reader.stdout.contains("was removed"), "{reader:#?}");
    // As long as it is leased it stays.
    let lease = ["run", "--socket", at, sandbox.name(), "--", "sleep", "600"];
    let lease = Job::spawn(sandbox.command(&lease));
    until("a lease", || sandbox.status()["leases"].as_array().is_some_and(|leases| !leases.is_empty()));
    remove();
    let status = sandbox.iloader(&["status", "--socket", at]).expect(0);
    assert!(status.stdout.contains("was removed or cleaned"), "{status:#?}");
    sandbox.iloader(&["run", "--socket", at, sandbox.name(), "--", "true"]).expect_refusal(125, "the view");
    // A new one can be started beside it, and is not mixed up with it.
    assert_eq!(sandbox.started(&[]), sandbox.view());
    sandbox.iloader(&["stop", "--socket", at, "--force"]).expect(0);
    drop(lease);
    assert!(!socket.exists());
    assert_eq!(sandbox.status()["view_faults"], serde_json::json!([]), "the second one is undisturbed");

    let second = sandbox.daemon();
    remove();
    kill_process(second, Signal::TERM).unwrap();
    sandbox.nothing_left();
    assert!(!base.exists());
    sandbox.started(&[]);
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_base_that_was_moved_and_a_socket_that_was_removed_are_said() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let (base, moved, name) = (sandbox.path("base"), sandbox.path("moved"), sandbox.name());
    std::fs::rename(&base, &moved).unwrap();
    let there = ["--base-dir", moved.to_str().unwrap()];
    let model = sandbox.model();
    for (code, words) in [
        (125, &["run", name, "--", "true"][..]),
        (1, &["view", name]),
        (1, &["stop", name]),
        (1, &["start", model.to_str().unwrap(), "--name", name]),
    ] {
        let words = [&words[..1], &there, &words[1..]].concat();
        sandbox.iloader(&words).expect_refusal(code, "BASE was moved, or is mounted at another path");
    }
    let socket = moved.join("run").join(format!("{name}.sock"));
    sandbox.iloader(&["status", "--socket", socket.to_str().unwrap()]).expect(0);
    std::fs::rename(&moved, &base).unwrap();
    assert_eq!(sandbox.status()["view_faults"], serde_json::json!([]));

    std::fs::remove_file(sandbox.run_file("sock")).unwrap();
    sandbox.ask("view", &["--timeout", "0.2"]).expect_refusal(4, "lives, but its socket");
    kill_process(sandbox.daemon(), Signal::TERM).unwrap();
    sandbox.nothing_left();
}

/// Commands in a mount namespace of their own, where `base` is what `script` makes of it.
pub(crate) fn in_own_mounts(sandbox: &Sandbox, base: &Path, script: &str) -> Option<Ran> {
    let mut unshare = vec!["unshare", "--mount", "--map-root-user"];
    if rustix::process::geteuid().is_root() {
        unshare.truncate(2);
    }
    if !has(unshare[0], &[&unshare[1..], &["true"]].concat()) {
        return None;
    }
    let command = wrapped(&[&unshare[..], &["sh", "-c", script, "sh"]].concat(), &sandbox.start_command(&[]));
    let mut command = command;
    command.env("ILOADER_BASE_DIR", base.join("b")).env("MOUNT", base);
    command.env("ILOADER", env!("CARGO_BIN_EXE_iloader"));
    Some(Job::spawn(command).wait())
}

#[test]
fn a_full_or_read_only_base_is_an_error_that_leaves_nothing() {
    let sandbox = Sandbox::new();
    let base = sandbox.path("mount");
    std::fs::create_dir(&base).unwrap();
    // For every number of files that fit: the start fails and leaves nothing, or works and can be stopped.
    let script = r#"
        fresh() { umount -l "$MOUNT" 2>/dev/null; mount -t tmpfs -o "$1" none "$MOUNT" || exit 77; }
        left() { find "$MOUNT/b" ! -type d ! -name '*.log'; find "$MOUNT/b/views" -mindepth 1; }
        for files in $(seq 2 19) ; do
            fresh nr_inodes=$files
            "$@"; code=$?
            echo "files $files: exit $code"
            if [ $code = 0 ]; then "$ILOADER" stop --remove-view "$4" || echo "no stop"; fi
            [ -d "$MOUNT/b/views" ] && left
        done
        fresh size=64k
        head -c 100000 /dev/zero >"$MOUNT/fill" 2>/dev/null
        "$@"; echo "full: exit $?"; left
        fresh ro
        "$@"; echo "read-only: exit $?"
    "#;
    let script = script.replace("\"$4\"", sandbox.name());
    let Some(ran) = in_own_mounts(&sandbox, &base, &script) else { return };
    if ran.code == Some(77) {
        return skipped(format!("no tmpfs can be mounted: {}", ran.stderr.trim()));
    }
    let view = base.join("b/views").join(sandbox.name());
    let told: Vec<&str> = ran.stdout.lines().filter(|line| Path::new(line) != view).collect();
    let code = |what: &str| {
        let line = told
            .iter()
            .find_map(|line| line.strip_prefix(what))
            .unwrap_or_else(|| panic!("{what}: {ran:#?}"));
        line.trim_start_matches(": exit ").to_owned()
    };
    assert_eq!((code("files 2").as_str(), code("files 19").as_str()), ("6", "0"), "{ran:#?}");
    assert_eq!((code("full").as_str(), code("read-only").as_str()), ("6", "1"), "{ran:#?}");
    for line in &told {
        assert!(
            line.contains(": exit 0") || line.contains(": exit 6") || line.starts_with("read-only"),
            "{ran:#?}"
        );
    }
    assert!(ran.stderr.contains("ENOSPC") && ran.stderr.contains("the file system is read-only"), "{ran:#?}");
    assert_eq!(told.len(), 20, "something is left: {ran:#?}");
}

#[test]
fn the_default_base_gives_way_and_an_explicit_one_does_not() {
    let sandbox = Sandbox::new();
    let fallback = format!("infiniloader-{}", rustix::process::geteuid().as_raw());
    let with = |variables: &[(&str, &str)], words: &[&str]| {
        let mut command = sandbox.command(words);
        command
            .env_remove("ILOADER_BASE_DIR")
            .current_dir(sandbox.path("home"))
            .envs(variables.iter().copied());
        Job::spawn(command).wait()
    };
    let model = sandbox.model();
    let start = ["start", model.to_str().unwrap(), "--name", sandbox.name()];
    let stop = ["stop", "--remove-view", sandbox.name()];
    // An empty or relative XDG_CACHE_HOME is none at all.
    for cache in ["", "relative", "./x"] {
        let view = with(&[("XDG_CACHE_HOME", cache)], &start).expect(0).path();
        assert!(view.starts_with(sandbox.path("home/.cache/infiniloader/views")), "{}", view.display());
        with(&[("XDG_CACHE_HOME", cache)], &stop).expect(0);
        assert_eq!(entries(&sandbox.path("home")), [".cache"]);
    }
    // Nobody, root included, can write there.
    for home in
        [("HOME", "/proc"), ("HOME", "/dev/null/x"), ("HOME", "relative"), ("XDG_CACHE_HOME", "/proc/x")]
    {
        let started = with(&[home], &start).expect(0);
        assert!(started.path().starts_with(sandbox.path("tmp").join(&fallback)), "{started:#?}");
        assert_eq!(started.stderr.matches(&fallback).count(), 1, "{started:#?}");
        let seen = with(&[home], &["status", sandbox.name()]).expect(0);
        assert_eq!(seen.stderr.matches(&fallback).count(), 1, "{seen:#?}");
        with(&[home], &stop).expect(0);
        std::fs::remove_dir_all(sandbox.path("tmp").join(&fallback)).unwrap();
    }
    for explicit in ["/proc/x", "/dev/null/x"] {
        let refused = with(&[("ILOADER_BASE_DIR", explicit)], &start);
        assert!(matches!(refused.code, Some(1 | 3)), "{refused:#?}");
        assert!(refused.stderr.contains(explicit) && refused.stderr.contains(" hint: "), "{refused:#?}");
        let refused = with(&[], &[&start[..], &["--base-dir", explicit]].concat());
        assert!(matches!(refused.code, Some(1 | 3)) && refused.stdout.is_empty(), "{refused:#?}");
        assert_eq!(entries(&sandbox.path("tmp")), [""; 0], "no fallback was made");
    }
}
