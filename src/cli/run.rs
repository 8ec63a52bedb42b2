//! `run`: take a lease, make sure that this process can read the view or generation, and become the command.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;

use super::args::{self, BaseArgs};
use super::preflight::{self, Daemon};
use super::target::Target;
use super::wait;
use crate::control::message::{Leased, Operation, Reply};
use crate::disk::Generation;
use crate::error::{Error, Kind, Result, reason, shown};
use crate::registry::{Environment, Name};
use crate::sys;

/// The variable that tells the command where the model is.
const MODEL_PATH_VARIABLE: &str = "ILOADER_MODEL_PATH";

/// What stands for the model's path inside an argument.
const PLACEHOLDER: &[u8] = b"{model}";

/// What a command line of `run` looks like, for hints.
pub(crate) const EXAMPLE: &str = "iloader run qwen -- vllm serve '{model}' --port 8000";

/// The lowest number that the lease's descriptor is moved to: scripts use the ones from 3 to 9 for
/// themselves, and a descriptor overwritten is a lease lost. Below 64 the descriptor table does not grow.
const LEASE_DESCRIPTOR_MIN: i32 = 32;

const HELP_AFTER: &str = "\
Every {model} inside COMMAND and its arguments becomes the path of the view, or of the generation, and \
ILOADER_MODEL_PATH is set to it. No shell is involved. COMMAND takes the place of iloader: its signals, terminal and \
exit status are its own. With --cache-path no daemon is needed, and nothing is loaded: COMMAND reads the copy on disk. \
Failures of iloader exit with 125; 126: COMMAND cannot be executed; 127: COMMAND was not found.

Example:
  iloader run qwen -- vllm serve '{model}' --port 8000
  iloader run --cache-path /nvme/models/Qwen3-8B@1 -- vllm serve '{model}'";

/// Run a command on a cache or a copy on disk, which is not stopped, collected or removed meanwhile
#[derive(Args, Clone, Debug)]
#[command(
    after_help = HELP_AFTER,
    override_usage = "iloader run [OPTIONS] NAME -- COMMAND [ARGUMENTS]...\n       \
                      iloader run --cache-path GENERATION -- COMMAND [ARGUMENTS]..."
)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    base: BaseArgs,
    /// The daemon's control socket [default: BASE/run/NAME.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// How many seconds to wait for a cache that is still loading
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value = "600", value_parser = args::seconds)]
    wait_timeout: Duration,
    /// Run on this generation, as 'iloader cache' printed it, without a daemon
    #[arg(long, value_name = "GENERATION", conflicts_with_all = ["name", "socket", "base_dir", "wait_timeout"])]
    cache_path: Option<PathBuf>,
    /// The cache's name
    #[arg(value_name = "NAME", value_parser = args::name(), required_unless_present = "cache_path")]
    name: Option<Name>,
    /// What stands before `--` although it should stand behind it
    #[arg(hide = true, value_name = "STRAY")]
    stray: Vec<OsString>,
    /// The command and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Becomes the command. Returns only where that failed.
pub(crate) fn run(args: &RunArgs) -> Result<std::convert::Infallible> {
    let command = command_of(args)?;
    let (path, lease) = match &args.cache_path {
        Some(generation) => on_disk(generation)?,
        None => in_memory(args)?,
    };
    let path = path.as_os_str();
    let command: Vec<OsString> = command.iter().map(|part| substitute(part, path)).collect();
    let _lease = hand_on(lease)?;
    let cause = sys::process::exec(&command, &[(MODEL_PATH_VARIABLE, path)]);
    Err(not_executed(&command[0], &cause))
}

/// The view of a cache, looked at, and the connection that is its lease.
fn in_memory(args: &RunArgs) -> Result<(PathBuf, OwnedFd)> {
    let target =
        Target::resolve(args.name.as_ref(), args.socket.as_deref(), &args.base, wait::ANSWER_TIMEOUT)?;
    let (leased, connection) = lease(&target, args.wait_timeout)?;
    preflight::check(&leased, Daemon::of(connection.as_fd())?)?;
    Ok((PathBuf::from(leased.view), connection))
}

/// A generation, looked at, and the lock that is its lease.
fn on_disk(path: &Path) -> Result<(PathBuf, OwnedFd)> {
    let path = Environment::of_process().absolute(path, "--cache-path")?;
    let generation = Generation::open(&path)?;
    let lease = generation.lease()?;
    for file in generation.selection(&[])?.files {
        // Whoever may not read one of them is told so here, and not by an engine that is half started.
        rustix::fs::access(&file.real, rustix::fs::Access::READ_OK)
            .map_err(|errno| Error::io("read", &file.real, &errno.into()))?;
    }
    generation.mark_used();
    Ok((generation.path().to_owned(), lease.into_fd()))
}

/// The exit code of a failed `run`: the command's own failures to start are told apart from ours.
pub(crate) fn exit_code(error: &Error) -> u8 {
    match error.kind() {
        kind @ (Kind::NotExecutable | Kind::CommandNotFound) => kind.exit_code(),
        _ => OUR_FAILURE,
    }
}

/// The exit code of everything that went wrong before the command was tried.
pub(crate) const OUR_FAILURE: u8 = 125;

fn command_of(args: &RunArgs) -> Result<&[OsString]> {
    let hint = format!("everything after -- is the command: {EXAMPLE}");
    if let Some(stray) = args.stray.first() {
        let message = format!("{} stands between the cache's name and --", shown(stray));
        return Err(Error::new(Kind::Usage, message).hint(hint));
    }
    if args.command.is_empty() {
        let what = match (&args.name, &args.cache_path) {
            (Some(name), _) => format!("'{name}'"),
            (None, path) => shown(path.as_deref().unwrap_or(Path::new(""))),
        };
        return Err(Error::new(Kind::Usage, format!("no command to run on {what}")).hint(hint));
    }
    Ok(&args.command)
}

/// A lease on the cache, once it is ready.
fn lease(target: &Target, wait_timeout: Duration) -> Result<(Leased, OwnedFd)> {
    let deadline = Instant::now() + wait_timeout;
    let (_, mut client) = wait::until_ready(target, deadline, false)?;
    match client.request(Operation::Lease {})? {
        Reply::Leased(leased) => Ok((*leased, client.into_fd())),
        other => Err(target.unexpected(&other)),
    }
}

/// Makes `connection` survive the `exec`, out of the way of the numbers that scripts use.
fn hand_on(connection: OwnedFd) -> Result<OwnedFd> {
    let moved = rustix::io::fcntl_dupfd_cloexec(&connection, LEASE_DESCRIPTOR_MIN).unwrap_or(connection);
    rustix::io::fcntl_setfd(&moved, rustix::io::FdFlags::empty())
        .map_err(|errno| Error::os("hand the lease to the command", &errno.into()))?;
    Ok(moved)
}

/// `argument` with every [`PLACEHOLDER`] replaced, byte for byte otherwise.
fn substitute(argument: &OsStr, view: &OsStr) -> OsString {
    let mut rest = argument.as_bytes();
    let mut result = Vec::with_capacity(rest.len() + view.len());
    while let Some(at) = rest.windows(PLACEHOLDER.len()).position(|window| window == PLACEHOLDER) {
        result.extend_from_slice(&rest[..at]);
        result.extend_from_slice(view.as_bytes());
        rest = &rest[at + PLACEHOLDER.len()..];
    }
    result.extend_from_slice(rest);
    OsString::from_vec(result)
}

/// Why the command was not executed, as kind and words.
fn not_executed(command: &OsStr, cause: &io::Error) -> Error {
    let name = shown(command);
    let is_searched = !command.as_bytes().contains(&b'/');
    let is_missing = match cause.raw_os_error() {
        Some(libc::ENOENT) => !is_somewhere(command),
        Some(libc::ENOTDIR | libc::ENAMETOOLONG) => true,
        // Where nothing is found, a directory of PATH that may not be entered is all that it speaks of.
        Some(libc::EACCES) => is_searched && !is_somewhere(command),
        _ => false,
    };
    if is_missing {
        let place = if is_searched { " in PATH" } else { "" };
        return Error::new(
            Kind::CommandNotFound,
            format!("cannot run {name}: there is no such command{place}"),
        )
        .hint("check its spelling, and whether its environment (venv, conda, PATH) is active here");
    }
    if cause.raw_os_error() == Some(libc::ENOENT) {
        return Error::new(
            Kind::NotExecutable,
            format!("cannot execute {name}: it exists, but the interpreter or loader that it names does not"),
        )
        .hint("see its first line (head -1), or what file(1) says about it");
    }
    Error::new(Kind::NotExecutable, format!("cannot execute {name}: {}", reason(cause)))
        .hint("COMMAND must be a program with execute permission (chmod +x); no shell is involved")
}

/// Whether a file of that name is where `execvp` looks.
fn is_somewhere(command: &OsStr) -> bool {
    if command.as_bytes().contains(&b'/') {
        return Path::new(command).exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    !command.is_empty() && std::env::split_paths(&path).any(|directory| directory.join(command).exists())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{self, Standin};
    use super::*;
    use crate::control::message::Progress;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Sample {
        #[command(flatten)]
        run: RunArgs,
    }

    fn parse(line: &str) -> std::result::Result<RunArgs, clap::Error> {
        Sample::try_parse_from(std::iter::once("run").chain(line.split(' '))).map(|sample| sample.run)
    }

    #[test]
    fn everything_behind_the_dashes_is_the_command() {
        let args = parse("--wait-timeout 5 qwen -- vllm --wait-timeout 7 -- --help").expect("parses");
        let expected = ["vllm", "--wait-timeout", "7", "--", "--help"].map(OsString::from);
        assert_eq!(command_of(&args).expect("a command"), expected);
        assert_eq!(args.wait_timeout, Duration::from_secs(5));
    }

    #[test]
    fn a_command_without_dashes_is_wrong_usage_with_an_example() {
        for line in ["qwen", "qwen --", "qwen vllm serve", "qwen vllm -- serve"] {
            let error = command_of(&parse(line).expect("parses")).expect_err(line);
            assert_eq!(error.kind(), Kind::Usage);
            assert!(error.hint_text().is_some_and(|hint| hint.contains(EXAMPLE)), "{line}");
            assert_eq!(exit_code(&error), 125);
        }
        assert!(parse("-- vllm").is_err());
        for also in ["qwen", "--socket s", "--base-dir b", "--wait-timeout 5"] {
            assert!(parse(&format!("--cache-path /r/qwen@1 {also} -- vllm")).is_err(), "{also}");
        }
        assert!(parse("--cache-path /r/qwen@1 -- vllm").is_ok());
        assert!(parse("qwen vllm --tp 1").is_err());
    }

    #[test]
    fn the_placeholder_is_replaced_everywhere_and_bytes_stay() {
        let view = OsStr::from_bytes(b"/v/{model}\xff");
        let result = |argument: &[u8]| substitute(OsStr::from_bytes(argument), view).into_vec();
        assert_eq!(result(b"{model}"), b"/v/{model}\xff");
        assert_eq!(result(b"a={model}/c:{model}\xfe"), b"a=/v/{model}\xff/c:/v/{model}\xff\xfe");
        assert_eq!(result(b"{{model}"), b"{/v/{model}\xff");
        assert_eq!(result(b"{mode}l"), b"{mode}l");
        assert_eq!(result(b""), b"");
    }

    #[test]
    fn failures_to_execute_are_told_apart() {
        let directory = tempfile::tempdir().expect("a directory");
        let script = directory.path().join("script");
        std::fs::write(&script, "#!/no/such/interpreter\n").expect("written");
        let not_found = io::Error::from_raw_os_error(libc::ENOENT);
        let code = |command: &OsStr, cause: &io::Error| exit_code(&not_executed(command, cause));
        assert_eq!(code(OsStr::new("no-such-command-at-all"), &not_found), 127);
        assert_eq!(code(script.as_os_str(), &not_found), 126);
        assert_eq!(code(OsStr::new("/etc"), &io::Error::from_raw_os_error(libc::EACCES)), 126);
        assert_eq!(code(OsStr::new(""), &not_found), 127);
        let refused = io::Error::from_raw_os_error(libc::EACCES);
        assert_eq!(code(OsStr::new("no-such-command-at-all"), &refused), 127);
        assert_eq!(code(OsStr::new("sh"), &refused), 126);
        assert_eq!(code(OsStr::new("./no-such-command"), &refused), 126);
    }

    fn standin() -> Standin {
        Standin::start(false, testing::ready)
    }

    const SOCKET: &str = "BASE/run/qwen.sock";

    #[test]
    fn the_command_gets_path_variable_and_exit_code() {
        let standin = standin();
        let script = "cat \"$1/model.safetensors\"; echo \" $ILOADER_MODEL_PATH $0\"; exit 7";
        let output = standin.iloader(&[
            "run",
            "--socket",
            SOCKET,
            "qwen",
            "--",
            "sh",
            "-c",
            script,
            "a{model}b",
            "{model}",
        ]);
        let view = standin.facts.text("view");
        assert_eq!(testing::text(&output.stdout), format!("weights {view} a{view}b\n"));
        assert_eq!((testing::text(&output.stderr).as_str(), output.status.code()), ("", Some(7)));
    }

    #[test]
    fn the_lease_is_held_on_a_high_descriptor_until_the_command_ends() {
        let standin = standin();
        let script =
            "ls -l /proc/$$/fd | grep -c 'socket:'; exec 3>/dev/null 9>/dev/null; test -S /proc/$$/fd/32";
        let output = standin.iloader(&["run", "--socket", SOCKET, "qwen", "--", "sh", "-c", script]);
        assert_eq!(testing::text(&output.stdout), "1\n", "the lease, and nothing else of ours");
        assert!(output.status.success());
        standin.wait_for_end();
        assert!(standin.has_ended(0), "one connection did it all");
    }

    #[test]
    fn a_cache_that_loads_is_waited_for() {
        let standin = Standin::start(false, |operation, facts| match operation {
            Operation::Wait { .. } => {
                let mut replies = vec![Reply::Progress(Progress::default()); 3];
                replies.extend(testing::ready(operation, facts));
                replies
            }
            _ => testing::ready(operation, facts),
        });
        let output = standin.iloader(&["run", "--socket", SOCKET, "qwen", "--", "true"]);
        assert!(output.status.success(), "{output:?}");
    }

    #[test]
    fn a_load_that_takes_too_long_is_our_failure() {
        let standin = Standin::start(false, |operation, facts| match operation {
            Operation::Wait { .. } => {
                vec![Reply::Progress(Progress { bytes_total: 1 << 30, ..Progress::default() })]
            }
            _ => testing::ready(operation, facts),
        });
        let output =
            standin.iloader(&["run", "--wait-timeout", "0.1", "--socket", SOCKET, "qwen", "--", "true"]);
        assert_eq!(output.status.code(), Some(125));
        let stderr = testing::text(&output.stderr);
        assert!(
            stderr.contains("'qwen' is not ready yet (0 B of 1.0 GiB so far); the load goes on"),
            "{stderr}"
        );
    }

    #[test]
    fn nothing_runs_on_a_view_that_is_not_what_it_was() {
        let standin = Standin::start(false, |operation, facts| match operation {
            Operation::Lease {} => {
                let mut leased = facts.leased();
                leased.links[0].inode += 1;
                vec![Reply::Leased(Box::new(leased))]
            }
            _ => testing::ready(operation, facts),
        });
        let output = standin.iloader(&["run", "--socket", SOCKET, "qwen", "--", "echo", "ran"]);
        assert_eq!((testing::text(&output.stdout).as_str(), output.status.code()), ("", Some(125)));
        assert!(testing::text(&output.stderr).contains("leads to another file"));
    }

    #[test]
    fn our_failures_and_the_commands_are_told_apart() {
        let standin = standin();
        let code = |name: &str, command: &str| {
            standin.iloader(&["run", "--socket", SOCKET, name, "--", command]).status.code()
        };
        assert_eq!(code("qwen", "no-such-command-at-all"), Some(127));
        assert_eq!(code("qwen", "/etc/passwd"), Some(126));
        assert_eq!(code("another", "true"), Some(125), "the socket is another cache's");
        let nobody = standin.iloader(&["run", "--socket", "BASE/none.sock", "qwen", "--", "true"]);
        assert_eq!(nobody.status.code(), Some(125));
        assert_eq!(standin.iloader(&["run", "qwen", "vllm", "--tp", "1"]).status.code(), Some(125));
        assert_eq!(standin.iloader(&["run", "--help"]).status.code(), Some(0));
    }
}
