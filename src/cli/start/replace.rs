//! `--replace`: the end of what runs under the name with other settings, after everything that could keep its
//! successor from starting was looked at.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{self, Access, AtFlags, CWD};

use super::super::output;
use super::super::stop::{self, Manner};
use super::super::target::Target;
use super::running;
use super::wanted::Wanted;
use crate::control::client::Client;
use crate::control::message::{LOOK_MAX, State, Status};
use crate::daemon::admission::{self, Leaving};
use crate::error::{Error, Kind, Result, shown};
use crate::registry;
use crate::view::{self, Standing};

/// How long the daemon may take to agree, beside its look through all processes.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Stops the cache at the other end of `client`, which is neither leased nor read, and waits until it is gone.
///
/// # Errors
///
/// [`Kind::InUse`] where it is in use, and whatever would keep the new one from starting, as far as that can be
/// seen: the old one then runs on.
pub(super) fn stop_other(wanted: &Wanted, mut client: Client, status: &Status) -> Result<()> {
    if let Err(error) = check_successor(wanted, status) {
        // Another command may have stopped it, and the next one may have taken its places.
        return match running::is_ending(&mut client) {
            true => Ok(()),
            false => Err(error.context(format_args!("'{}' is not replaced", wanted.config.name))),
        };
    }
    let target = Target::in_base(wanted.base.clone(), &wanted.paths.name, ANSWER_TIMEOUT);
    // Where the new view is elsewhere, nobody fills the directory of the old one again.
    let remove_view = status.view != wanted.config.model_dir();
    let manner = Manner { remove_view, ..Manner::default() };
    stop::end(&target, client, &manner, Some(Instant::now() + ANSWER_TIMEOUT + LOOK_MAX))?;
    output::note(&format!("stopped '{}', which had other settings", wanted.config.name));
    Ok(())
}

/// What can be known before: that there will be room, that the files can be read, and that view, socket, pid file
/// and log find their places.
fn check_successor(wanted: &Wanted, old: &Status) -> Result<()> {
    let filled_bytes = if old.state == State::Ready { old.allocated_bytes } else { old.progress.bytes_done };
    let leaving = Leaving { pid: old.pid.cast_unsigned(), filled_bytes };
    admission::rehearse(&wanted.config, &wanted.selection, leaving)?;
    for file in wanted.selection.files.iter().filter(|file| !file.passthrough) {
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

/// Whether the files of the new daemon can be made where they are to be.
fn check_places(wanted: &Wanted, old: &Status) -> Result<()> {
    let config = &wanted.config;
    let (socket, pid_file) = (Path::new(&config.socket), Path::new(&config.pid_file));
    // A log that is there is appended to; it may be the standard error of a daemon in the foreground.
    let log = Some(Path::new(&config.log_file)).filter(|log| !log.exists());
    for path in [socket, pid_file].into_iter().chain(log) {
        check_writable(path.parent().unwrap_or(path))?;
    }
    if config.socket != old.socket {
        registry::is_dead_socket(socket)?;
    }
    registry::check_pid_file(pid_file)?;
    // What is missing above a view is made.
    let above = Path::new(&config.view).ancestors().skip(1).find(|above| above.exists());
    above.map_or(Ok(()), check_writable)
}

fn check_writable(directory: &Path) -> Result<()> {
    let access = Access::WRITE_OK | Access::EXEC_OK;
    fs::accessat(CWD, directory, access, AtFlags::EACCESS)
        .map_err(|errno| Error::io("write to", directory, &errno.into()))
}
