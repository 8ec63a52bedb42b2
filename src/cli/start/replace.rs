//! `--replace`: the end of what runs under the name with other settings, after everything that could keep its
//! successor from starting was looked at.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::super::output;
use super::super::stop::{self, Manner};
use super::super::target::Target;
use super::running;
use super::wanted::Wanted;
use crate::control::client::Client;
use crate::control::message::{LOOK_MAX, State, Status};
use crate::daemon::admission::{self, Leaving};
use crate::daemon::spawn;
use crate::error::{Error, Kind, Result, shown};
use crate::registry;
use crate::registry::dir::{self, Made};
use crate::view::{self, Standing};

/// How long the daemon may take to agree, beside its look through all processes.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Stops the cache at the other end of `client`, which is neither leased nor read, and waits until it is gone. Gives
/// the new one's `log`, open; `None` is the standard error of a daemon in the foreground.
///
/// # Errors
///
/// [`Kind::InUse`] where it is in use, and whatever would keep the new one from starting, as far as that can be
/// seen: the old one then runs on.
pub(super) fn stop_other(
    wanted: &Wanted,
    mut client: Client,
    status: &Status,
    log: Option<&Path>,
) -> Result<Option<Log>> {
    let name = &wanted.config.name;
    let stays = |error: Error| error.context(format_args!("'{name}' is not replaced"));
    // The log last: it is the one thing that is made by looking.
    let log = match check_successor(wanted, status).and_then(|()| log.map(Log::open).transpose()) {
        Ok(log) => log,
        // Another command may have stopped it, and the next one may have taken its places.
        Err(_) if running::is_ending(&mut client) => return Ok(None),
        Err(error) => return Err(stays(error)),
    };
    let target = Target::in_base(wanted.base.clone(), &wanted.paths.name, ANSWER_TIMEOUT);
    // Where the new view is elsewhere, nobody fills the directory of the old one again.
    let remove_view = status.view != wanted.config.model_dir();
    let manner = Manner { remove_view, ..Manner::default() };
    let ended = stop::end(&target, client, &manner, Some(Instant::now() + ANSWER_TIMEOUT + LOOK_MAX));
    match ended {
        Ok(_) => {}
        Err(error) => {
            log.into_iter().for_each(Log::discard);
            // What the daemon advises are options of 'stop'.
            return Err(if error.kind() == Kind::InUse { in_use(stays(error), name) } else { error });
        }
    }
    output::note(&format!("stopped '{name}', which had other settings"));
    Ok(log)
}

fn in_use(error: Error, name: &str) -> Error {
    error.hint(format!(
        "end what uses it, or have 'iloader stop {name} --wait' wait for that, and start again; or choose another --name"
    ))
}

/// What can be known before: that there will be room, that the files can be read, and that view, socket, pid file
/// and log find their places.
fn check_successor(wanted: &Wanted, old: &Status) -> Result<()> {
    let filled_bytes = if old.state == State::Ready { old.allocated_bytes } else { old.progress.bytes_done };
    let leaving = Leaving { pid: old.pid.cast_unsigned(), filled_bytes };
    admission::rehearse(&wanted.config, wanted.to_load(), leaving)?;
    for file in wanted.to_load().files.iter().filter(|file| !file.passthrough) {
        File::open(&file.real).map_err(|cause| Error::io("read", &file.real, &cause))?;
    }
    check_places(wanted, old)?;
    let at = Path::new(&wanted.config.view);
    let is_olds = |pid: u32| i32::try_from(pid) == Ok(old.pid);
    match view::examine(at)? {
        Standing::Live { pid } if !is_olds(pid) => {
            let message = format!("the view {} is in use by the daemon with pid {pid}", shown(at));
            Err(Error::new(Kind::InUse, message).hint("choose another --view"))
        }
        Standing::Foreign { what } => {
            let message = format!("the view {} can't be published: it {what}", shown(at));
            Err(Error::new(Kind::Failed, message).hint("choose another --view, or move away what is there"))
        }
        _ => Ok(()),
    }
}

/// Whether the things of the new daemon can be made where they are to be, by making them under other names.
fn check_places(wanted: &Wanted, old: &Status) -> Result<()> {
    let config = &wanted.config;
    let (socket, pid_file) = (Path::new(&config.socket), Path::new(&config.pid_file));
    try_making(Made::Socket, socket, "--socket")?;
    if config.socket != old.socket {
        registry::is_dead_socket(socket)?;
    }
    try_making(Made::File, pid_file, "--pid-file")?;
    registry::check_pid_file(pid_file, &wanted.paths)?;
    dir::check_mutable(pid_file).map_err(|error| error.hint("choose another --pid-file"))?;
    // What is missing above a view is made.
    let view = Path::new(&config.view);
    let topmost = view.ancestors().take_while(|above| *above == view || !above.exists()).last();
    try_making(Made::Directory, topmost.unwrap_or(view), "--view")?;
    dir::check_mutable(view).map_err(|error| error.hint("choose another --view"))
}

fn try_making(made: Made, path: &Path, option: &str) -> Result<()> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::new(Kind::Usage, format!("{option} {} does not end in a name", shown(path)))
            .hint(format!("choose another {option}")));
    };
    dir::try_making(made, directory, name).map_err(|error| {
        error
            .context(format_args!("{option} {} can't be made", shown(path)))
            .hint(format!("choose another {option}"))
    })
}

/// The log, opened as the daemon will open it, and kept open until it has: whoever reads a pipe would meet its end.
pub(super) struct Log {
    _file: File,
    /// Where it was made, and is not wanted where the old daemon stays.
    made_at: Option<PathBuf>,
}

impl Log {
    fn open(path: &Path) -> Result<Log> {
        let is_new = path.symlink_metadata().is_err();
        let file = spawn::open_log(path)?;
        Ok(Log { _file: file, made_at: is_new.then(|| path.to_owned()) })
    }

    /// Removes it where it was made here and nobody wrote to it. That it may stay is the lesser matter.
    fn discard(self) {
        if let Some(path) = self.made_at
            && path.symlink_metadata().is_ok_and(|found| found.is_file() && found.len() == 0)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}
