//! What a daemon has in files while it lives: lock, socket, pid file, registration; and their removal.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::daemon::config::Config;
use crate::daemon::listener::Listener;
use crate::daemon::log::Log;
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::registry::record::SCHEMA;
use crate::registry::{self, BaseDir, Host, Lock, Record};
use crate::sys::crash;
use crate::sys::signals::SignalDescriptor;

/// The files of a living daemon. The name's lock is held as long as this lives.
#[derive(Debug)]
pub struct Registered {
    record: Record,
    record_path: PathBuf,
    /// Keeps cleaners of temporary directories away from BASE.
    _hold: Option<OwnedFd>,
    /// Wakes when the lock's file may have been removed; `None` where the user has no watch left.
    removal: Option<OwnedFd>,
    /// Let go of last: whoever gets it must find nothing of ours.
    lock: Lock,
}

impl Registered {
    /// Listens, and then says where: pid file, registration. Where one of them fails, nothing is left, and the
    /// lock is let go of.
    pub fn new(
        config: &Config,
        lock: Lock,
        signals: SignalDescriptor,
        log: &Log,
    ) -> Result<(Registered, Listener)> {
        let base = BaseDir::prepared(PathBuf::from(&config.base));
        let paths = base.paths(&config.name.parse()?);
        let registered = Registered {
            record: record_of(config, rustix::process::getpid().as_raw_nonzero().get()),
            record_path: paths.record.clone(),
            removal: lock.watch_removal().map_err(|error| log.line(error.message())).ok(),
            _hold: base.hold().map_err(|error| log.line(error.message())).ok(),
            lock,
        };
        let mut listener = match Listener::bind(Path::new(&config.socket), signals) {
            Ok(listener) => listener,
            Err(error) => {
                // The socket may be another cache's, so that only the lock is ours.
                registered.release(log);
                return Err(error);
            }
        };
        crash::point("socket-bound");
        let record = &registered.record;
        if let Err(error) = registry::write_pid_file(Path::new(&record.pid_file), record.pid, &paths) {
            // What is there is not ours, and an empty file would be taken for it.
            note(log, listener.stop_listening());
            registered.release(log);
            return Err(error);
        }
        crash::point("pid-file-written");
        match record.write(&registered.record_path) {
            Ok(()) => {
                crash::point("registered");
                Ok((registered, listener))
            }
            Err(error) => {
                registered.remove(&mut listener, log);
                Err(error)
            }
        }
    }

    /// When the cache was made, RFC 3339.
    pub fn created(&self) -> &str {
        &self.record.created
    }

    /// Whether the files are still found: not so once BASE was removed or cleaned.
    pub fn is_in_place(&self) -> bool {
        self.lock.is_in_place().unwrap_or(false)
    }

    /// What becomes readable when [`Registered::is_removed`] may have become true.
    pub fn removal(&self) -> Option<BorrowedFd<'_>> {
        self.removal.as_ref().map(OwnedFd::as_fd)
    }

    /// Whether BASE was removed, or cleaned of our files: no command will find this cache by its name again. Not
    /// so where BASE was moved. Acknowledges what [`Registered::removal`] had to say.
    pub fn is_removed(&self) -> bool {
        let mut events = [0u8; 4096];
        if let Some(removal) = &self.removal {
            while matches!(rustix::io::read(removal, &mut events), Ok(count) if count > 0) {}
        }
        self.lock.is_removed()
    }

    /// Removes everything, then lets go of the lock: the orderly end.
    pub fn remove(self, listener: &mut Listener, log: &Log) {
        self.remove_files(listener, log);
        if self.is_in_place() {
            note(log, remove_file(&self.record_path));
        }
        crash::point("registration-removed");
        self.release(log);
        crash::point("lock-released");
    }

    /// The same, but the registration stays and says why the load failed.
    pub fn keep_failure(mut self, error: &Error, listener: &mut Listener, log: &Log) {
        self.remove_files(listener, log);
        if self.is_in_place() {
            self.record.failed = Some(Failure::from(error));
            note(log, self.record.write(&self.record_path));
        }
        crash::point("failure-registered");
        self.release(log);
    }

    fn remove_files(&self, listener: &mut Listener, log: &Log) {
        note(log, listener.stop_listening());
        crash::point("socket-removed");
        note(log, registry::remove_pid_file(Path::new(&self.record.pid_file), Some(self.record.pid)));
    }

    fn release(self, log: &Log) {
        note(log, self.lock.remove_and_release());
    }
}

fn note<T>(log: &Log, outcome: Result<T>) {
    if let Err(error) = outcome {
        log.line(error.message());
    }
}

fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, &error)),
        _ => Ok(()),
    }
}

/// The registration of a daemon for `config` with the process number `pid`.
pub(super) fn record_of(config: &Config, pid: i32) -> Record {
    Record {
        schema: SCHEMA,
        name: config.name.clone(),
        pid,
        host: Host::current(),
        socket: config.socket.clone(),
        view: config.view.clone(),
        kept_dirname: config.kept_dirname.clone(),
        source: config.source.clone(),
        pid_file: config.pid_file.clone(),
        log_file: config.log_file.clone(),
        created: format!("{:.3}", jiff::Timestamp::now()),
        tool: env!("CARGO_PKG_VERSION").to_owned(),
        failed: None,
    }
}
