//! Becoming a daemon: the same program, executed again, that keeps nothing of its caller.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{PipeReader, Read, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, Mode, memfd_create};
use rustix::process::{DumpableBehavior, chdir, set_dumpable_behavior, setsid, umask};
use rustix::stdio::dup2_stdin;

use crate::budget::{self, cgroup::OomKills};
use crate::control::frame::{self, Decoder};
use crate::daemon::config::{Boot, Config, Orders};
use crate::daemon::log::Log;
use crate::daemon::preload;
use crate::daemon::registered::{Registered, record_of};
use crate::daemon::serve::{Ended, Start, serve};
use crate::daemon::starter::{BOOT_BYTES_MAX, Starter};
use crate::error::{Error, Kind, Result, shown};
use crate::failure::Failure;
use crate::registry::{BaseDir, Lock};
use crate::sys::process::share_one_heap;
use crate::sys::signals::{self, SignalDescriptor};
use crate::sys::{crash, peer};
use crate::view;

/// The hidden command by which the program is executed again.
pub const COMMAND: &str = "__daemon";

/// How long a daemon may take from its start until it is registered: some files in BASE.
const BOOT_MAX: Duration = Duration::from_secs(60);

/// The variables that a daemon keeps. The others are its caller's affair, and some are secrets, which would
/// stand in `/proc/<pid>/environ` for as long as the cache lives.
const VARIABLES_KEPT: [&str; 5] = ["HOME", "PATH", "TMPDIR", "TZ", "RUST_BACKTRACE"];

/// A daemon that was spawned and is registered.
#[derive(Debug)]
pub struct Spawned {
    child: Child,
    boot: BootReader,
}

impl Spawned {
    /// How the daemon ended, where it has. It is waited for: its connections close before its lock, and giving
    /// back much memory takes seconds.
    pub fn ended(&mut self) -> End {
        const PATIENCE: Duration = Duration::from_secs(10);
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) if status.success() => return End::InOrder,
                Ok(Some(status)) => return End::Other(in_words(status)),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                _ => return End::Unknown,
            }
        }
    }

    /// Why the load failed, as the daemon said at its end, where it ended so.
    pub fn failure(&mut self) -> Option<Error> {
        match self.boot.read(Instant::now()) {
            Ok(Some(Boot::Failed(failure))) => Some(failure.into()),
            _ => None,
        }
    }
}

/// The reading end of the pipe on which a daemon tells its starter of itself.
#[derive(Debug)]
struct BootReader {
    pipe: PipeReader,
    decoder: Decoder,
}

impl BootReader {
    fn read(&mut self, deadline: Instant) -> Result<Option<Boot>> {
        match frame::read(&mut self.pipe, &mut self.decoder, Some(deadline))? {
            Some(message) => Boot::from_json(&message).map(Some),
            None => Ok(None),
        }
    }
}

/// How a daemon ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It was stopped, and left nothing.
    InOrder,
    /// It failed, crashed or was killed: the words for it.
    Other(String),
    /// It is another command's to wait for, or has not ended yet.
    Unknown,
}

impl fmt::Display for End {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            End::InOrder => "ended in order",
            End::Other(how) => how,
            End::Unknown => "ended",
        })
    }
}

/// The error for a daemon that ended as `how` says, with nothing said by itself.
pub fn ended_early(config: &Config, how: &str) -> Error {
    let (name, log) = (&config.name, shown(&config.log_file));
    if ran_out_of_memory(Path::new(&config.log_file)) {
        let what = format!(
            "the daemon of '{name}' {how}: memory for its own was refused, by a limit (RLIMIT_AS, RLIMIT_DATA) or by \
             the kernel (vm.overcommit_memory)"
        );
        return Error::new(Kind::NoRoom, what)
            .hint("raise the limit (ulimit -v, ulimit -d; systemd: LimitAS=, LimitDATA=), or free memory");
    }
    Error::new(Kind::Failed, format!("the daemon of '{name}' {how}")).hint(format!(
        "its log may say why, and what memory there was: {log}; the kernel kills when memory runs out: {}",
        where_kills_are_seen(budget::Limits::find().oom_kills())
    ))
}

/// Where the kernel says that it killed. The daemon was in the group of the command that started it.
fn where_kills_are_seen(kills: Option<OomKills>) -> String {
    let dmesg = "dmesg then says so, and under which limit";
    match kills {
        Some(kills) if kills.count > 0 => {
            format!("{} counts {} (oom_kill), and {dmesg}", shown(&kills.counted_in), kills.count)
        }
        _ => dmesg.to_owned(),
    }
}

/// Whether the last thing in a log is that an allocation failed: the standard library then ends the process.
fn ran_out_of_memory(log: &Path) -> bool {
    const TAIL_BYTES: i64 = 512;
    let tail = || {
        // A named pipe must not hold us up.
        let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(log).ok()?;
        let length = i64::try_from(file.metadata().ok()?.len()).ok()?;
        file.seek(std::io::SeekFrom::End(-TAIL_BYTES.min(length))).ok()?;
        let mut tail = Vec::new();
        file.take(TAIL_BYTES as u64).read_to_end(&mut tail).ok()?;
        Some(String::from_utf8_lossy(&tail).into_owned())
    };
    let last_line = |text: String| text.trim_end().lines().last().map(str::to_owned);
    tail().and_then(last_line).is_some_and(|line| line.starts_with("memory allocation of "))
}

fn in_words(status: ExitStatus) -> String {
    match status.signal() {
        Some(libc::SIGKILL) => "was killed by SIGKILL".to_owned(),
        Some(signal) => format!("ended by signal {signal}"),
        None => format!("ended with exit code {}", status.code().unwrap_or(-1)),
    }
}

/// Starts a daemon for `config`, and returns when it listens and is registered. `lock` is the name's, held; the
/// daemon holds it on. Where it fails, nothing is left but the log, and the lock is let go of.
///
/// The caller must be the only thread that starts processes: the lock's descriptor is inheritable for a moment.
pub fn spawn(config: &Config, lock: Lock) -> Result<Spawned> {
    let path = lock.path().to_owned();
    let held = lock.into_fd();
    let mut pid = None;
    let spawned = spawn_with(config, &held, &mut pid);
    if spawned.is_err()
        // It was removed already where the daemon ended in order.
        && let Ok(lock) = Lock::from_fd(held, &path)
    {
        if let Some(pid) = pid {
            clean_up_unregistered(config, pid, &lock);
        }
        lock.remove_and_release().ok();
    }
    spawned
}

/// Removes what the daemon `pid`, which was killed or hangs before its registration was heard of, left: the
/// next command would not know the places that `config` names.
fn clean_up_unregistered(config: &Config, pid: i32, lock: &Lock) {
    let Ok(name) = config.name.parse() else { return };
    let paths = BaseDir::prepared(config.base.clone().into()).paths(&name);
    // What can't be removed is met again, with its reason, by whoever needs its place.
    view::clean_up_crashed(&paths, Some(&record_of(config, pid)), lock, true);
}

fn spawn_with(config: &Config, held: &OwnedFd, pid: &mut Option<i32>) -> Result<Spawned> {
    let failed = |error: &std::io::Error| Error::os("start the daemon", error);
    let log = open_log(Path::new(&config.log_file))?;
    let (pipe, boot_writer) = std::io::pipe().map_err(|error| failed(&error))?;
    rustix::io::ioctl_fionbio(&pipe, true).map_err(|errno| failed(&errno.into()))?;
    let inherited = inheritable(held).map_err(|errno| failed(&errno.into()))?;
    let orders = Orders { lock_descriptor: inherited.as_raw_fd(), config: config.clone() };
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("iloader")
        .arg(COMMAND)
        .env_clear()
        .envs(VARIABLES_KEPT.iter().filter_map(|name| Some((name, std::env::var_os(name)?))))
        .envs(crash::inherited())
        .current_dir("/")
        .stdin(written(&orders)?)
        .stdout(boot_writer)
        .stderr(log);
    let child = command.spawn().map_err(|error| Error::spawning("start the daemon", &error))?;
    *pid = i32::try_from(child.id()).ok();
    crash::point("daemon-spawned");
    drop(inherited);
    // The command holds the pipe's writing end, which must close for the reading end to see an end.
    drop(command);
    let mut spawned = Spawned { child, boot: BootReader { pipe, decoder: Decoder::new(BOOT_BYTES_MAX) } };
    match spawned.boot.read(Instant::now() + BOOT_MAX) {
        Ok(Some(Boot::Registered {})) => {
            crash::point("registration-heard");
            Ok(spawned)
        }
        Ok(Some(Boot::Failed(error))) => {
            let _ = spawned.child.wait();
            Err(error.into())
        }
        Ok(None) => {
            let how = match spawned.ended() {
                End::Unknown => "closed its standard output".to_owned(),
                how => how.to_string(),
            };
            Err(ended_early(config, &format!("{how} before it was registered")))
        }
        Err(error) => {
            // It may hang on a file system that does not answer, and must not come up later.
            let _ = spawned.child.kill();
            let _ = spawned.ended();
            Err(error.context("the daemon did not come up"))
        }
    }
}

/// A copy that stays open in the program that is executed next.
fn inheritable(descriptor: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let copy = rustix::io::fcntl_dupfd_cloexec(descriptor, 3)?;
    rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty())?;
    Ok(copy)
}

/// The orders as a file that the daemon reads from its beginning.
fn written(orders: &Orders) -> Result<Stdio> {
    let failed = |error: &std::io::Error| Error::os("write the daemon's orders", error);
    let memory =
        memfd_create("iloader:orders", MemfdFlags::CLOEXEC).map_err(|errno| failed(&errno.into()))?;
    let mut file = File::from(memory);
    file.write_all(&orders.to_json()?).and_then(|()| file.rewind()).map_err(|error| failed(&error))?;
    Ok(file.into())
}

/// Opens a log for appending, mode 0600 where it is new.
///
/// # Errors
///
/// Also where it is a link or a file that neither this user nor root made: a link could lead to any file of this
/// user's, and a file would show the log to its owner.
pub fn open_log(path: &Path) -> Result<File> {
    let failed = |error: std::io::Error| {
        Error::io("open the log", path, &error).hint("choose another one with --log-file")
    };
    match OpenOptions::new().append(true).create_new(true).mode(0o600).open(path) {
        Ok(new) => {
            // A umask may have taken our own bits away, and the next start could not append.
            new.set_permissions(Permissions::from_mode(0o600)).map_err(failed)?;
            return Ok(new);
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    // A pipe that nobody reads would keep the opening waiting for ever.
    let open = |flags: i32| {
        let flags = flags | libc::O_NONBLOCK | libc::O_NOCTTY;
        OpenOptions::new().append(true).mode(0o600).custom_flags(flags).open(path)
    };
    let log = match open(libc::O_NOFOLLOW) {
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            check_log(&std::fs::symlink_metadata(path).map_err(failed)?, path)?;
            open(libc::O_CREAT).map_err(failed)?
        }
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
            let message = format!("the log {} is a pipe or socket that nobody reads", shown(path));
            return Err(Error::new(Kind::Failed, message).hint("choose another one with --log-file"));
        }
        opened => opened.map_err(failed)?,
    };
    check_log(&log.metadata().map_err(failed)?, path)?;
    rustix::io::ioctl_fionbio(&log, false).map_err(|errno| failed(errno.into()))?;
    Ok(log)
}

/// Refuses a log that is somebody else's. A device is nobody's: a terminal, `/dev/null`.
fn check_log(found: &Metadata, path: &Path) -> Result<()> {
    let (kind, owner) = (found.file_type(), found.uid());
    if kind.is_char_device() || owner == 0 || peer::is_same_user(owner) {
        return Ok(());
    }
    let what = if kind.is_symlink() { "is a symbolic link of user" } else { "belongs to user" };
    let message = format!("the log {} {what} {owner}", shown(path));
    Err(Error::new(Kind::Failed, message).hint("remove it, or choose another --log-file"))
}

/// The life of a spawned daemon, in the process that [`spawn`] started: reads its orders, detaches, tells its
/// starter that it is registered, or why not, loads and serves. Returns when the cache has ended.
pub fn become_daemon() -> Result<()> {
    let mut orders = Vec::new();
    let orders: Orders = std::io::stdin()
        .read_to_end(&mut orders)
        .map_err(|error| Error::os("read the orders", &error))
        .and_then(|_| Orders::from_json(&orders))?;
    let lock =
        peer::keep_only(orders.lock_descriptor).map_err(|error| Error::os("inherit the lock", &error))?;
    crash::point("orders-read");
    let booted = detach().and_then(|signals| boot(orders.config, lock, signals));
    let starter = Starter::on_stdout();
    let told = starter.and_then(|starter| {
        let message = match &booted {
            Ok(_) => Boot::Registered {},
            Err(error) => Boot::Failed(Failure::from(error)),
        };
        starter.tell(&message).map(|()| starter)
    });
    let mut start = booted?;
    crash::point("starter-told");
    // Where it failed nobody waits any more, but the load was asked for.
    start.starter = told.map_err(|error| start.log.line(error.message())).ok();
    serve(start).map(drop)
}

/// Leaves the caller's session, directory, streams, signals and umask behind.
fn detach() -> Result<SignalDescriptor> {
    let failed = |error: &std::io::Error| Error::os("detach from the caller", error);
    signals::reset_all().map_err(|error| failed(&error))?;
    // A client that goes away, and a log that reaches a size limit, are errors and not ends.
    signals::ignore(libc::SIGPIPE);
    signals::ignore(libc::SIGXFSZ);
    let signals = SignalDescriptor::new(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP])
        .map_err(|error| failed(&error))?;
    // Fails only for the leader of a process group, who has no terminal to lose but by SIGHUP, which is read.
    let _ = setsid();
    chdir("/").map_err(|errno| failed(&errno.into()))?;
    umask(Mode::RWXG | Mode::RWXO);
    let null = File::open("/dev/null").map_err(|error| failed(&error))?;
    dup2_stdin(&null).map_err(|errno| failed(&errno.into()))?;
    // Shown by ps and top; it would be "exe" after the path it was executed by.
    let _ = rustix::thread::set_name(c"iloader");
    stay_readable();
    share_one_heap();
    Ok(signals)
}

/// Readers follow links to this process's descriptors, which the kernel refuses for one that is not dumpable, as it
/// is where the program's file can't be read.
fn stay_readable() {
    let _ = set_dumpable_behavior(DumpableBehavior::Dumpable);
}

fn boot(config: Config, lock: OwnedFd, signals: SignalDescriptor) -> Result<Start> {
    let log = Log::standard_error()?;
    let base = BaseDir::prepared(config.base.clone().into());
    let lock = Lock::from_fd(lock, &base.paths(&config.name.parse()?).lock)?;
    let (registered, listener) = Registered::new(&config, lock, signals, &log)?;
    let work = preload::work(&config, &log);
    Ok(Start { config, listener, registered, log, work, starter: None })
}

/// Is the daemon in this process, for `start --foreground`. Log lines go to `log`. Returns when the cache has
/// ended. The caller's streams, session and environment stay. `lock` is the name's, held, and let go of in any case.
pub fn run_in_foreground(config: Config, lock: Lock, log: Log) -> Result<Ended> {
    let signals = match settle_in_foreground() {
        Ok(signals) => signals,
        Err(error) => {
            // The first error is the one to tell.
            let _ = lock.remove_and_release();
            return Err(error);
        }
    };
    let (registered, listener) = Registered::new(&config, lock, signals, &log)?;
    let work = preload::work(&config, &log);
    serve(Start { config, listener, registered, log, work, starter: None })
}

/// Makes this process one that can be the daemon.
fn settle_in_foreground() -> Result<SignalDescriptor> {
    signals::ignore(libc::SIGXFSZ);
    // What the caller ignores stays ignored: nohup keeps a service alive when its terminal goes.
    let wanted: Vec<i32> = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP]
        .into_iter()
        .filter(|signal| *signal == libc::SIGTERM || !signals::is_ignored(*signal))
        .collect();
    let signals = SignalDescriptor::new(&wanted).map_err(|error| Error::os("wait for signals", &error))?;
    chdir("/").map_err(|errno| Error::os("leave the working directory", &errno.into()))?;
    umask(Mode::RWXG | Mode::RWXO);
    stay_readable();
    share_one_heap();
    Ok(signals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_that_the_kernel_counts_is_named() {
        let kills = |count| Some(OomKills { count, counted_in: "/cg/x y/memory.events".into() });
        assert_eq!(
            where_kills_are_seen(kills(2)),
            "'/cg/x y/memory.events' counts 2 (oom_kill), and dmesg then says so, and under which limit"
        );
        assert_eq!(where_kills_are_seen(kills(0)), where_kills_are_seen(None));
    }
}
