//! `stop`: end daemons, and give their memory back.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::{PollFd, PollFlags};

use super::args::{self, BaseArgs, TimeoutArgs};
use super::output;
use super::target::{self, Standing, Target};
use crate::control::client::Client;
use crate::control::frame;
use crate::control::message::{LOOK_MAX, Operation, Readers, Reply, State, Status};
use crate::error::{Error, Kind, Result};
use crate::readers::named;
use crate::registry::{self, Name, lock};
use crate::sys;
use crate::units::ByteSize;

/// How long a daemon that agreed to stop may take to be gone. Giving back hundreds of GiB takes seconds.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// The pause between two looks at a lock, where the end of a process can't be waited for.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

const HELP_AFTER: &str = "\
A cache is in use while somebody holds a lease, and while a process has a file of it open or mapped, with or \
without one. The view is withdrawn first; its directory stays, emptied, unless --remove-view is given. The \
source stays as it is. What a dead daemon left is cleaned up. Returns when the daemons are gone, and says who \
still holds their memory. Exit codes: 0 stopped, 3 there is no such cache, 4 the daemon did not answer, 5 it is \
in use.

Example:
  iloader stop qwen --wait=60
  iloader stop --all --remove-view";

/// Stop caches: refused while they are in use, unless --force or --wait is given
#[derive(Args, Clone, Debug)]
#[command(
    after_help = HELP_AFTER,
    override_usage = "iloader stop [OPTIONS] NAME...\n       iloader stop [OPTIONS] --all\n       \
                      iloader stop [OPTIONS] --socket PATH"
)]
pub(crate) struct StopArgs {
    /// The caches' names
    #[arg(value_name = "NAME", value_parser = args::name())]
    names: Vec<Name>,
    /// A cache's name, as an option; repeatable
    #[arg(long = "name", value_name = "NAME", value_parser = args::name())]
    name_options: Vec<Name>,
    /// Stop every cache of BASE
    #[arg(long, conflicts_with_all = ["names", "name_options", "socket"])]
    all: bool,
    /// The control socket of the one daemon to stop [default: BASE/run/NAME.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    #[command(flatten)]
    base: BaseArgs,
    #[command(flatten)]
    answer: TimeoutArgs,
    /// Remove the view's directory too [default: it stays, emptied]
    #[arg(long)]
    remove_view: bool,
    /// Stop although they are in use: readers keep what they have open or mapped
    #[arg(long)]
    force: bool,
    /// Wait for leases and readers to end, SECONDS at the most [default: refuse at once; without SECONDS: no limit]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, num_args = 0..=1, require_equals = true, value_parser = args::seconds)]
    wait: Option<Option<Duration>>,
}

/// What "no limit" is on the wire, where a limit is a number: about 30 years.
const WAIT_UNLIMITED: Duration = Duration::from_secs(1_000_000_000);

/// Stops what is named. Goes on after a failure, which it reports; the last one is the result.
pub(crate) fn stop(args: &StopArgs) -> Result<()> {
    let mut failure = None;
    for target in targets(args)? {
        match stop_one(&target, args) {
            Ok(done) => output::note(&done),
            Err(error) => {
                if let Some(earlier) = failure.replace(error) {
                    output::error(&earlier);
                }
            }
        }
    }
    failure.map_or(Ok(()), Err)
}

fn targets(args: &StopArgs) -> Result<Vec<Target>> {
    let timeout = args.answer.timeout;
    if args.all {
        let base = target::find_base(&args.base)?;
        let mut names: Vec<Name> = registry::list(&base)?.into_iter().map(|found| found.name).collect();
        // A lock that is held is a start's that is not registered yet: it is no cache to stop.
        let left = registry::unregistered(&base)?.into_iter();
        names.extend(left.filter(|name| matches!(lock::is_held(&base.paths(name).lock), Ok(false))));
        if names.is_empty() {
            output::note("there are no caches to stop");
        }
        return Ok(names.iter().map(|name| Target::in_base(base.clone(), name, timeout)).collect());
    }
    let names = names(args);
    if names.is_empty() && args.socket.is_none() {
        return Err(Error::new(Kind::Usage, "no cache is named")
            .hint("give NAMEs (iloader list shows them), --all, or the --socket of a daemon"));
    }
    if let Some(socket) = &args.socket {
        if names.len() > 1 {
            return Err(Error::new(Kind::Usage, "--socket is one daemon's, and several caches are named")
                .hint("stop them one by one"));
        }
        return Ok(vec![Target::resolve(names.first().copied(), Some(socket), &args.base, timeout)?]);
    }
    let base = target::find_base(&args.base)?;
    Ok(names.into_iter().map(|name| Target::in_base(base.clone(), name, timeout)).collect())
}

/// The caches that are named, each once: a second stop of the same one would find nothing.
fn names(args: &StopArgs) -> Vec<&Name> {
    let mut names: Vec<&Name> = Vec::new();
    for name in args.names.iter().chain(&args.name_options) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Stops one cache; gives what to say about it.
fn stop_one(target: &Target, args: &StopArgs) -> Result<String> {
    match target.standing() {
        Standing::Unknown => {
            let lines = target.clean_up_unregistered(args.remove_view)?.ok_or_else(|| target.unknown())?;
            return Ok(format!("{} never came up; cleaned up: {}", target.label(), lines.join(", ")));
        }
        Standing::Elsewhere(place) => return Err(target.elsewhere(place)),
        Standing::Dead | Standing::Failed(_) => {
            let lines = target.clean_up(args.remove_view).map_err(|error| {
                error.context(format_args!("{} had ended already, but is not cleaned up", target.label()))
            })?;
            return Ok(format!("{} had ended already; cleaned up: {}", target.label(), lines.join(", ")));
        }
        Standing::Alive => {}
    }
    let (client, status) = match ask_status(target) {
        // It ended since its registration was looked at.
        Err(error) if error.kind() == Kind::NotFound => {
            return clean_up_killed(target, args.remove_view)?
                .map(|lines| killed(target, &lines))
                .ok_or(error);
        }
        asked => asked?,
    };
    if args.wait.is_some() && !args.force {
        note_uses(target, &status);
    }
    let manner = Manner {
        force: args.force,
        remove_view: args.remove_view,
        wait: args.wait.map(|limit| limit.unwrap_or(WAIT_UNLIMITED)),
    };
    let holders = end(target, client, &manner, answer_deadline(args))?;
    if let Some(lines) = clean_up_killed(target, args.remove_view)? {
        return Ok(killed(target, &lines));
    }
    Ok(stopped(target, &status, holders.as_deref(), args.force))
}

fn killed(target: &Target, lines: &[String]) -> String {
    let lines = lines.join(", ");
    format!("the daemon of {} was killed before it stopped; cleaned up: {lines}", target.label())
}

/// Cleans up what stays of a daemon that has ended, where it did not end in order: its registration then still
/// stands. `None` where it did.
fn clean_up_killed(target: &Target, remove_view: bool) -> Result<Option<Vec<String>>> {
    let left = target.refreshed();
    if !matches!(left.standing(), Standing::Dead) || is_another(target) {
        return Ok(None);
    }
    match left.clean_up(remove_view) {
        Ok(lines) => Ok(Some(lines)),
        // A command that starts or stops the cache does it just now.
        Err(error) if error.kind() == Kind::InUse => Ok(None),
        Err(error) => Err(error.context(format_args!(
            "the daemon of {} was killed before it stopped, and is not cleaned up",
            target.label()
        ))),
    }
}

/// In which manner a cache is stopped.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Manner {
    pub(super) force: bool,
    pub(super) remove_view: bool,
    /// How long to wait for uses to end; `None`: refuse at once.
    pub(super) wait: Option<Duration>,
}

/// Has the daemon stop, and waits until it is gone. Gives who still holds its memory, where it says so.
///
/// # Errors
///
/// [`Kind::InUse`] where it is leased or read; [`Kind::TimedOut`] where it does not answer until `deadline`.
pub(super) fn end(
    target: &Target,
    mut client: Client,
    manner: &Manner,
    deadline: Option<Instant>,
) -> Result<Option<Box<Readers>>> {
    // Taken before the daemon is told to end, so that it is this very process that is waited for.
    let process = sys::peer::pidfd(client.as_fd()).ok();
    let asked = client.send(Operation::Stop {
        force: manner.force,
        remove_view: manner.remove_view,
        wait_milliseconds: manner.wait.map(milliseconds),
    });
    let still_held = match asked.and_then(|()| client.next(deadline)) {
        Ok(Reply::Stopping { notes, holders }) => {
            notes.iter().for_each(|note| output::note(note));
            holders
        }
        Ok(Reply::Error(error)) => return Err(error.into()),
        Ok(other) => return Err(target.unexpected(&other)),
        // It ended before it answered: somebody else's stop, or a crash. Either way it is going.
        Err(error) if error.kind() == Kind::NotFound => None,
        Err(error) => return Err(error),
    };
    wait_for_end(target, &mut client, process)?;
    Ok(still_held)
}

/// Says what is waited for. The question has a connection of its own: where a look takes long it stays unanswered,
/// and the daemon takes no other from who waits for an answer.
fn note_uses(target: &Target, status: &Status) {
    if !status.leases.is_empty() {
        let leases = status.leases.iter().map(|lease| (lease.pid, lease.command.as_str()));
        return output::note(&format!("waiting for {}", named(leases)));
    }
    // A daemon that does not know the question can't wait for readers either.
    if let Ok(Some(mut client)) = target.try_connect()
        && let Ok(Reply::Readers(readers)) = client.request(Operation::Readers {})
        && !readers.readers.is_empty()
    {
        let readers = readers.readers.iter().map(|reader| (reader.pid, reader.command.as_str()));
        output::note(&format!("waiting for {}, without a lease", named(readers)));
    }
}

/// What to say of a cache that is gone. How much memory came free is not known: whoever has a segment open or
/// mapped keeps it.
fn stopped(target: &Target, status: &Status, holders: Option<&Readers>, force: bool) -> String {
    let label = target.label();
    if status.state != State::Ready {
        return format!("stopped {label}");
    }
    let size = ByteSize(status.allocated_bytes);
    match holders {
        Some(Readers { readers, .. }) if !readers.is_empty() => {
            let readers = readers.iter().map(|reader| (reader.pid, reader.command.as_str()));
            format!(
                "stopped {label} ({size}); its memory stays with whoever has it open or mapped, until they let \
                 go: {}",
                named(readers)
            )
        }
        Some(Readers { unseen, .. }) if !unseen.is_empty() => {
            // What they are is enough here: every stop may have to name the same ones.
            let program = |command: &'_ str| command.split(' ').next().unwrap_or_default().to_owned();
            let unseen: Vec<_> =
                unseen.iter().map(|process| (process.pid, program(&process.command))).collect();
            let unseen = unseen.iter().map(|(pid, program)| (*pid, program.as_str()));
            format!(
                "stopped {label} ({size}); its memory is free, unless one of these processes has it open, which \
                 cannot be looked into: {}",
                named(unseen)
            )
        }
        // Without --force the leases have ended before it.
        None if force && !status.leases.is_empty() => {
            format!("stopped {label} ({size}); readers that still map it keep its memory until they end")
        }
        _ => format!("stopped {label} ({size})"),
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// When the answer must be there: what the daemon may look for readers and wait for uses to end comes on top.
fn answer_deadline(args: &StopArgs) -> Option<Instant> {
    let wait = match args.wait {
        Some(None) => return None,
        Some(Some(limit)) => limit,
        None => Duration::ZERO,
    };
    Instant::now().checked_add(args.answer.timeout + wait + LOOK_MAX)
}

fn ask_status(target: &Target) -> Result<(Client, Box<Status>)> {
    let mut client = target.connect()?;
    match client.request(Operation::Status {})? {
        Reply::Status(status) => Ok((client, status)),
        other => Err(target.unexpected(&other)),
    }
}

/// Waits until the daemon is gone: its connection closed, and its process ended or its lock free.
fn wait_for_end(target: &Target, client: &mut Client, process: Option<OwnedFd>) -> Result<()> {
    let deadline = Instant::now() + END_TIMEOUT;
    let late = || {
        let seconds = END_TIMEOUT.as_secs();
        Error::new(
            Kind::TimedOut,
            format!("the daemon of {} agreed to stop, but is still there after {seconds} s", target.label()),
        )
        .hint("it may be giving back much memory; look again with 'iloader list'")
    };
    client.wait_for_end(Some(deadline)).map_err(|_| late())?;
    if let Some(process) = process {
        // The lock went with its descriptors. Whoever has it now is another cache of that name.
        return if has_ended(&process, deadline) { Ok(()) } else { Err(late()) };
    }
    // Without a pidfd (Linux before 6.5) the lock tells.
    let Some(path) = target.lock() else { return Ok(()) };
    while lock::is_held(&path)? {
        if is_another(target) {
            break;
        }
        if Instant::now() >= deadline {
            return Err(late());
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    Ok(())
}

fn has_ended(process: &OwnedFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = frame::timespec(left);
        let mut ended = [PollFd::new(process, PollFlags::IN)];
        match rustix::event::poll(&mut ended, Some(&timeout)) {
            Ok(0) => return false,
            Err(rustix::io::Errno::INTR) => {}
            // An error here can only be a lack of memory: then the lock has to tell.
            Ok(_) | Err(_) => return true,
        }
    }
}

/// Whether the lock that is held belongs to a cache started after the one that was stopped.
fn is_another(target: &Target) -> bool {
    let created = |target: &Target| target.record().map(|record| (record.pid, record.created.clone()));
    let now = target.refreshed();
    now.record().is_some() && created(&now) != created(target)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{self, Standin};
    use super::*;
    use crate::control::message::LeaseInfo;
    use crate::failure::Failure;
    use crate::registry::Record;
    use clap::Parser;

    #[derive(Parser)]
    struct Sample {
        #[command(flatten)]
        stop: StopArgs,
    }

    fn parse(line: &str) -> std::result::Result<StopArgs, clap::Error> {
        Sample::try_parse_from(line.split(' ')).map(|sample| sample.stop)
    }

    #[test]
    fn waiting_has_no_limit_unless_one_is_given() {
        let wait = |line| parse(line).expect(line).wait;
        assert_eq!(wait("stop qwen"), None);
        assert_eq!(wait("stop --wait qwen"), Some(None));
        assert_eq!(wait("stop --wait=2.5 qwen"), Some(Some(Duration::from_millis(2500))));
        for value in ["-1", "nan", "inf", "1e300"] {
            assert!(parse(&format!("stop --wait={value} qwen")).is_err(), "{value}");
        }
    }

    #[test]
    fn all_goes_with_no_names() {
        assert!(parse("stop --all qwen").is_err());
        assert!(parse("stop --all --socket /s").is_err());
        assert_eq!(targets(&parse("stop").expect("parses")).expect_err("nothing named").kind(), Kind::Usage);
        let several = parse("stop --socket /s one two").expect("parses");
        assert_eq!(targets(&several).expect_err("one socket, two names").kind(), Kind::Usage);
    }

    #[test]
    fn a_name_that_is_given_twice_is_stopped_once() {
        let args = parse("stop one two one --name two --name three").expect("parses");
        let named: Vec<String> = names(&args).into_iter().map(ToString::to_string).collect();
        assert_eq!(named, ["one", "two", "three"]);
        let one = parse("stop --socket /s one --name one").expect("parses");
        assert_eq!(names(&one).len(), 1, "one cache behind one socket");
    }

    #[test]
    fn leases_refuse_a_stop_with_their_holders() {
        let standin = Standin::start(true, |operation, facts| match operation {
            Operation::Stop { force: false, .. } => {
                let error = Error::new(Kind::InUse, "'qwen' is in use by process 77 engine").hint("wait");
                vec![Reply::Error(Failure::from(&error))]
            }
            _ => testing::ready(operation, facts),
        });
        let output = standin.iloader(&["stop", "--base-dir", "BASE", "qwen"]);
        assert_eq!(output.status.code(), Some(5));
        assert!(testing::text(&output.stderr).contains("process 77"), "{output:?}");
        assert!(output.stdout.is_empty());
    }

    #[test]
    fn a_look_that_takes_long_does_not_keep_the_stop_from_being_asked_for() {
        let standin = Standin::start(true, |operation, facts| match operation {
            Operation::Status {} => {
                let status = testing::status(facts, State::Ready);
                vec![Reply::Status(Box::new(Status { leases: Vec::new(), ..status }))]
            }
            Operation::Readers {} => Vec::new(),
            Operation::Stop { .. } => {
                vec![Reply::Error(Failure::from(&Error::new(Kind::InUse, "read without a lease")))]
            }
            _ => testing::ready(operation, facts),
        });
        let output = standin.iloader(&["stop", "--base-dir", "BASE", "--timeout=0.2", "--wait=9", "qwen"]);
        assert_eq!(output.status.code(), Some(5), "{output:?}");
    }

    #[test]
    fn what_can_be_stopped_is_and_each_failure_is_reported() {
        let standin = Standin::start(false, testing::ready);
        let crashed = testing::crashed(&standin.facts);
        let path = standin.facts.directory.join("run/qwen.json");
        crashed.write(&path).expect("registered");
        let output = standin.iloader(&["stop", "--base-dir", "BASE", "none", "qwen", "nothing"]);
        assert_eq!(output.status.code(), Some(3));
        let stderr = testing::text(&output.stderr);
        assert!(
            stderr.contains("there is no cache 'none'") && stderr.contains("there is no cache 'nothing'")
        );
        assert!(stderr.contains("'qwen' had ended already; cleaned up"), "{stderr}");
        assert!(!path.exists());
    }

    #[test]
    fn a_dead_view_that_cannot_be_removed_is_a_failure_and_not_forgotten() {
        let standin = Standin::start(false, testing::ready);
        let crashed =
            Record { view: standin.facts.text("loop/view"), ..testing::registration(&standin.facts) };
        let path = standin.facts.directory.join("run/qwen.json");
        crashed.write(&path).expect("registered");
        // For root, too, there is no way through it.
        let hindrance = standin.facts.directory.join("loop");
        std::os::unix::fs::symlink("loop", &hindrance).expect("linked");
        let output = standin.iloader(&["stop", "--base-dir", "BASE", "qwen"]);
        assert_eq!(output.status.code(), Some(1));
        let stderr = testing::text(&output.stderr);
        assert!(stderr.contains("'qwen' had ended already, but is not cleaned up"), "{stderr}");
        assert!(path.exists());
        std::fs::remove_file(hindrance).expect("removed");
        assert_eq!(standin.iloader(&["stop", "--base-dir", "BASE", "qwen"]).status.code(), Some(0));
        assert!(!path.exists());
    }

    #[test]
    fn what_is_said_of_the_memory_is_known() {
        let facts = Standin::start(true, testing::ready).facts.clone();
        let target =
            Target::resolve(None, Some(&facts.directory.join("s")), &BaseArgs::default(), END_TIMEOUT)
                .expect("a socket is enough");
        let said = |state, force| stopped(&target, &testing::status(&facts, state), None, force);
        assert!(
            said(State::Ready, true)
                .ends_with("(4.0 KiB); readers that still map it keep its memory until they end")
        );
        assert!(said(State::Ready, false).ends_with(" (4.0 KiB)"));
        assert!(!said(State::Loading, true).contains("KiB"));
        let process = |pid| LeaseInfo { pid, command: "engine".to_owned() };
        let mut holders = Readers { unseen: vec![process(8)], unseen_of_others: 3, ..Readers::default() };
        let said = |holders: &Readers| {
            stopped(&target, &testing::status(&facts, State::Ready), Some(holders), false)
        };
        assert!(said(&holders).ends_with("cannot be looked into: process 8 engine"), "{}", said(&holders));
        holders.readers.push(testing::reader(9));
        assert!(said(&holders).ends_with("until they let go: process 9 engine"), "{}", said(&holders));
        assert!(said(&Readers::default()).ends_with(" (4.0 KiB)"));
    }

    #[test]
    fn stopping_all_of_nothing_is_done() {
        let standin = Standin::start(false, testing::ready);
        let output = standin.iloader(&["stop", "--all", "--base-dir", "BASE"]);
        assert_eq!(output.status.code(), Some(0));
    }

    #[test]
    fn the_end_of_a_process_is_waited_for() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("a process");
        let pid = rustix::process::Pid::from_child(&child);
        let process =
            rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("a pidfd");
        assert!(!has_ended(&process, Instant::now()));
        child.kill().expect("ended");
        assert!(has_ended(&process, Instant::now() + END_TIMEOUT));
        child.wait().expect("reaped");
    }
}
