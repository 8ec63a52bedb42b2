//! `start`: preload a model, leave a daemon behind that keeps it, and print where it is.

mod follow;
mod local;
mod notes;
mod options;
mod places;
mod replace;
mod running;
mod wanted;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::output;
use crate::control::message::Status;
use crate::daemon::ledger::Ledger;
use crate::daemon::log::Log;
use crate::daemon::serve::Ended;
use crate::daemon::spawn::{self, Spawned};
use crate::error::{Error, Kind, Result};
use crate::registry::{Lock, Record};
use crate::sys::{crash, signals};
use crate::view;

use follow::{Follow, Interrupt};
pub(crate) use options::StartArgs;
use running::Running;
use wanted::Wanted;

/// The pause between two looks at a cache that another command is just starting or ending.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// Starts a cache, or finds it running, and prints its view when it is ready.
pub(crate) fn start(args: &StartArgs) -> Result<()> {
    // Where the limit on file sizes is small, a failed write with a message is wanted, and not the end.
    signals::ignore(libc::SIGXFSZ);
    let mut wanted = Wanted::resolve(args)?;
    if args.foreground {
        return run_in_foreground(args, &mut wanted);
    }
    let mut deadline = Instant::now().checked_add(args.wait_timeout);
    let view = loop {
        if let Some(view) = bring_up(args, &wanted, deadline)? {
            break view;
        }
        let began = Instant::now();
        wanted.prepare()?;
        // The time that the copy took is no time that was waited for the load.
        deadline = deadline.and_then(|deadline| deadline.checked_add(began.elapsed()));
    };
    let name = &args.name;
    output::hand_over_path(&view)
        .map_err(|error| error.hint(format!("the cache runs, and 'iloader view {name}' prints its path")))
}

/// Reuses what runs, or starts it, and waits for it. Gives the view's path; `None` where a generation has to be
/// prepared before anything is started or stopped.
fn bring_up(args: &StartArgs, wanted: &Wanted, deadline: Option<Instant>) -> Result<Option<PathBuf>> {
    // Before there is anything to cancel: from here on Ctrl-C is an event and not an end.
    let mut interrupt = Interrupt::watch()?;
    let mut _log = None;
    loop {
        match running::look(wanted)? {
            Running::Same { mut client, status } => {
                if running::is_whole(&mut client, &status)? {
                    running::note_other_tuning(wanted, &status);
                    running::note_other_socket(wanted, &status);
                    running::note_no_refresh(wanted);
                    if let Some(view) =
                        follow(args, wanted, Follow::joined(client), deadline, &mut interrupt)?
                    {
                        set_quota(wanted, &status)?;
                        return Ok(Some(view));
                    }
                }
            }
            Running::Busy => {}
            Running::Other { error, .. } if !args.replace => return Err(error),
            Running::Other { .. } | Running::Nothing if wanted.is_unprepared() => return Ok(None),
            Running::Other { client, status, .. } => {
                _log =
                    replace::stop_other(wanted, client, &status, Some(Path::new(&wanted.config.log_file)))?;
                continue;
            }
            Running::Nothing => {
                if let Some(lock) = Lock::try_exclusive(&wanted.paths.lock)? {
                    let spawned = spawn_daemon(wanted, lock).map_err(|error| interrupt.explain(error))?;
                    if args.no_wait {
                        // Registered is all that was asked for: a load that failed since then is told by
                        // 'wait', whether or not this command was quick enough to meet it.
                        return Ok(Some(PathBuf::from(wanted.config.model_dir())));
                    }
                    if let Some(spawned) = Follow::spawned(wanted, spawned)?
                        && let Some(view) = follow(args, wanted, spawned, deadline, &mut interrupt)?
                    {
                        return Ok(Some(view));
                    }
                }
            }
        }
        wait_for_the_other(wanted, deadline, &mut interrupt)?;
    }
}

fn follow(
    args: &StartArgs,
    wanted: &Wanted,
    follow: Follow,
    deadline: Option<Instant>,
    interrupt: &mut Interrupt,
) -> Result<Option<PathBuf>> {
    if args.no_wait {
        return Ok(Some(PathBuf::from(wanted.config.model_dir())));
    }
    follow.until_ready(wanted, deadline, args.quiet, interrupt)
}

/// Sets the quota that was asked for: what runs already was started with another one, or with none.
fn set_quota(wanted: &Wanted, status: &Status) -> Result<()> {
    let Some(bytes) = wanted.config.limits.resident_bytes_max else { return Ok(()) };
    let notes = Ledger::of_socket(&status.socket).set(bytes).map_err(|error| {
        error.context(format_args!(
            "'{}' runs, but the quota cannot be set (--max-resident-bytes)",
            status.name
        ))
    })?;
    notes.iter().for_each(|note| output::note(note));
    Ok(())
}

/// Another command is starting or ending the cache, and takes no requests yet or any more.
fn wait_for_the_other(wanted: &Wanted, deadline: Option<Instant>, interrupt: &mut Interrupt) -> Result<()> {
    let name = &wanted.config.name;
    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
        return Err(Error::new(Kind::TimedOut, format!("another command is starting or ending '{name}'"))
            .hint("try again, or give --wait-timeout more seconds"));
    }
    std::thread::sleep(BUSY_PAUSE);
    interrupt.check()
}

fn spawn_daemon(wanted: &Wanted, lock: Lock) -> Result<Spawned> {
    crash::point("lock-taken");
    let lock = clean_up(wanted, lock)?;
    notes::say(wanted);
    crash::point("cleaned-up");
    spawn::spawn(&wanted.config, lock)
}

/// Removes what a dead daemon of this name left. Whatever can't be removed is met again, with its reason,
/// by whoever needs its place.
///
/// # Errors
///
/// Where a view stays at another place than the new one's: the new registration would take the place of
/// the only one that tells of it.
fn clean_up(wanted: &Wanted, lock: Lock) -> Result<Lock> {
    let record = Record::read(&wanted.paths.record).ok().flatten();
    let cleaned_up = view::clean_up_crashed(&wanted.paths, record.as_ref(), &lock, true);
    cleaned_up.lines.iter().for_each(|line| output::note(line));
    match cleaned_up.view_stays {
        Some(error) if record.is_some_and(|record| record.view != wanted.config.view) => {
            lock.remove_and_release()?;
            Err(error.context(format_args!("cannot clean up after '{}'", wanted.config.name)))
        }
        Some(error) => {
            output::note(error.message());
            Ok(lock)
        }
        None => Ok(lock),
    }
}

fn run_in_foreground(args: &StartArgs, wanted: &mut Wanted) -> Result<()> {
    let name = wanted.config.name.clone();
    let log_file = args.log_file.as_ref().map(|_| PathBuf::from(&wanted.config.log_file));
    let log_file = log_file.as_deref();
    let mut _log = None;
    let already = |what: String| {
        Err(Error::new(Kind::InUse, what)
            .hint(format!("stop it first (iloader stop {name}), or choose another --name")))
    };
    let may_begin = |running: &Running| match running {
        Running::Other { .. } => args.replace,
        Running::Busy | Running::Nothing => true,
        Running::Same { .. } => false,
    };
    let mut running = running::look(wanted)?;
    if wanted.is_unprepared() && may_begin(&running) {
        wanted.prepare()?;
        running = running::look(wanted)?;
    }
    match running {
        Running::Same { status, .. } => {
            return already(format!("'{name}' runs already, as process {}", status.pid));
        }
        Running::Other { client, status, .. } if args.replace => {
            _log = replace::stop_other(wanted, client, &status, log_file)?;
        }
        Running::Other { error, .. } => return Err(error),
        Running::Busy | Running::Nothing => {}
    }
    // Before the lock is taken, whose file would stay where the log can't be had.
    let log = match log_file {
        Some(path) => Log::new(spawn::open_log(path)?),
        None => Log::standard_error()?,
    };
    let Some(lock) = Lock::try_exclusive(&wanted.paths.lock)? else {
        return already(format!("another command is starting or ending '{name}'"));
    };
    let lock = clean_up(wanted, lock)?;
    notes::say(wanted);
    // The daemon in this process takes a lease of its own, and lets go of it when it has loaded.
    wanted.release();
    match spawn::run_in_foreground(wanted.config.clone(), lock, log)? {
        Ended::Ready => Ok(()),
        Ended::Loading { signal: None } => {
            Err(Error::new(Kind::NotFound, format!("'{name}' was stopped while it loaded"))
                .hint("start it again"))
        }
        Ended::Loading { signal: Some(signal) } => {
            // To whoever watches this process it ended by that signal: neither a success nor a failure of its own.
            output::note(&format!("signal {signal} ended '{name}' while it loaded; nothing of it is left"));
            signals::end_by(signal);
            Err(Error::new(Kind::Cancelled, format!("signal {signal} ended '{name}'")).hint("start it again"))
        }
    }
}
