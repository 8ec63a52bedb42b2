//! The cache that a command is about: found by its name in a BASE, or by its socket.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::args::{BaseArgs, TargetArgs};
use super::output;
use crate::control::client::Client;
use crate::control::message::{Operation, Reply};
use crate::error::{Error, Kind, Result, shown};
use crate::registry::{self, BaseDir, Environment, Liveness, Lock, Name, Record, Registration};
use crate::view;

/// One cache, as the registry shows it at this moment.
#[derive(Debug)]
pub(crate) struct Target {
    /// The name that was given.
    name: Option<Name>,
    /// Where its daemon listens.
    socket: PathBuf,
    /// What is registered under the name; `None` where the socket was given, which needs no BASE.
    registered: Option<Registered>,
    /// How long to wait for each answer.
    timeout: Duration,
}

#[derive(Debug)]
struct Registered {
    base: BaseDir,
    registration: Option<Registration>,
}

/// What became of a cache, as far as the registry tells.
#[derive(Debug)]
pub(crate) enum Standing<'a> {
    /// Nothing is registered under that name.
    Unknown,
    /// Its daemon lives, or a command that starts it; or only its socket is known.
    Alive,
    /// Its load failed in this way, and the daemon ended.
    Failed(Error),
    /// Its daemon was killed or crashed.
    Dead,
    /// Its daemon can't be judged from here. Says where it is, to stand after "the daemon is".
    Elsewhere(&'a str),
}

/// What becomes of a dead cache that a command only looks at.
pub(crate) const LEFT_FOR_LATER: &str = "the next 'iloader start' or 'iloader stop' of that name cleans up";

/// The pause between two looks at a daemon that is just starting.
const STARTING_PAUSE: Duration = Duration::from_millis(20);

/// The BASE of a command that only looks.
pub(crate) fn find_base(args: &BaseArgs) -> Result<BaseDir> {
    let base = BaseDir::find(args.base_dir.as_deref(), &Environment::of_process())?;
    if let Some(reason) = base.fallback_reason() {
        output::note(&format!("using {} for caches: {reason}", shown(base.path())));
    }
    Ok(base)
}

impl Target {
    /// Finds the cache that `args` name.
    pub(crate) fn of(args: &TargetArgs, timeout: Duration) -> Result<Target> {
        Target::resolve(args.name()?, args.socket.as_deref(), &args.base, timeout)
    }

    /// Finds the cache `name`, or the one behind `socket`, which `name` must then be the name of.
    pub(crate) fn resolve(
        name: Option<&Name>,
        socket: Option<&Path>,
        base: &BaseArgs,
        timeout: Duration,
    ) -> Result<Target> {
        if let Some(socket) = socket {
            let socket = Environment::of_process().absolute(socket, "--socket")?;
            return Ok(Target { name: name.cloned(), socket, registered: None, timeout });
        }
        let name = name.ok_or_else(|| Error::new(Kind::Usage, "no cache is named"))?;
        Ok(Target::in_base(find_base(base)?, name, timeout))
    }

    /// The cache `name` of `base`.
    pub(crate) fn in_base(base: BaseDir, name: &Name, timeout: Duration) -> Target {
        match registry::look_up(&base, name) {
            Some(registration) => Target::registered(base, registration, timeout),
            None => Target {
                name: Some(name.clone()),
                socket: base.paths(name).socket,
                registered: Some(Registered { base, registration: None }),
                timeout,
            },
        }
    }

    /// The cache that `registration` was found for in `base`.
    pub(crate) fn registered(base: BaseDir, registration: Registration, timeout: Duration) -> Target {
        let socket = match registration.record.as_ref() {
            Ok(record) => PathBuf::from(&record.socket),
            Err(_) => registration.paths.socket.clone(),
        };
        let name = Some(registration.name.clone());
        let registered = Some(Registered { base, registration: Some(registration) });
        Target { name, socket, registered, timeout }
    }

    /// The same cache, looked up again.
    pub(crate) fn refreshed(&self) -> Target {
        match (&self.registered, &self.name) {
            (Some(registered), Some(name)) => Target::in_base(registered.base.clone(), name, self.timeout),
            _ => Target {
                name: self.name.clone(),
                socket: self.socket.clone(),
                registered: None,
                timeout: self.timeout,
            },
        }
    }

    /// The cache in a message: its name in quotes, or its socket.
    pub(crate) fn label(&self) -> String {
        match &self.name {
            Some(name) => format!("'{name}'"),
            None => format!("the cache at {}", shown(&self.socket)),
        }
    }

    /// The name alone; empty where only the socket was given.
    pub(crate) fn bare_name(&self) -> &str {
        self.name.as_ref().map_or("", Name::as_str)
    }

    /// What names it on a command line: its name, or its socket where that is all that was given.
    pub(crate) fn argument(&self) -> String {
        match (&self.registered, &self.name) {
            (Some(_), Some(name)) => name.to_string(),
            _ => format!("--socket {}", shown(&self.socket)),
        }
    }

    /// The lock that the daemon holds, where it is known.
    pub(crate) fn lock(&self) -> Option<PathBuf> {
        let (registered, name) = (self.registered.as_ref()?, self.name.as_ref()?);
        Some(registered.base.paths(name).lock)
    }

    /// What the registry knows.
    pub(crate) fn standing(&self) -> Standing<'_> {
        match (&self.registered, self.registration()) {
            (None, _) => Standing::Alive,
            (Some(_), None) => Standing::Unknown,
            (Some(_), Some(registration)) => standing(registration),
        }
    }

    /// Whether a registration tells of it, and not its socket alone.
    pub(crate) fn is_registered(&self) -> bool {
        self.registration().is_some()
    }

    fn registration(&self) -> Option<&Registration> {
        self.registered.as_ref()?.registration.as_ref()
    }

    /// What is registered, where it can be read.
    pub(crate) fn record(&self) -> Option<&Record> {
        self.registration()?.record.as_ref().ok()
    }

    /// Connects to the daemon. Where one is just starting, waits for its socket, up to the timeout. A dead
    /// cache is cleaned up and said to be dead.
    ///
    /// # Errors
    ///
    /// [`Kind::NotFound`] where there is no such cache; [`Kind::Failed`] where it is dead or its load
    /// failed; [`Kind::TimedOut`] where the daemon does not answer.
    pub(crate) fn connect(&self) -> Result<Client> {
        self.connect_until(Instant::now() + self.timeout)
    }

    /// [`Target::connect`] with another limit for a daemon that is just starting.
    pub(crate) fn connect_until(&self, deadline: Instant) -> Result<Client> {
        if let Some(client) = self.try_connect()? {
            return Ok(client);
        }
        // Between taking its lock and listening a daemon takes milliseconds, except that its starter may
        // be looking through a large source.
        let since = Instant::now();
        while Instant::now() < deadline {
            std::thread::sleep(STARTING_PAUSE);
            let now = self.refreshed();
            if let Some(client) = now.try_connect()? {
                return Ok(client);
            }
            // A daemon registers after it listens, and removes its registration right after its socket.
            if since.elapsed() >= self.timeout
                && let Some(record) = now.record()
            {
                return Err(now.deaf(record));
            }
        }
        Err(Error::new(
            Kind::TimedOut,
            format!("{} is starting or ending, and takes no requests", self.label()),
        )
        .hint(format!("try again, or wait for it: iloader wait {}", self.argument())))
    }

    /// Connects to the daemon, or gives `None` where one is registered that does not listen (yet).
    pub(crate) fn try_connect(&self) -> Result<Option<Client>> {
        self.require_alive()?;
        let mut client = match Client::connect(&self.socket, self.timeout) {
            Ok(client) => client,
            Err(error) if error.kind() == Kind::NotFound && self.registered.is_some() => {
                return self.registration().and_then(Registration::displaced).map_or(Ok(None), Err);
            }
            Err(error) => return Err(error),
        };
        if self.registered.is_none() {
            self.require_name(&mut client)?;
        }
        Ok(Some(client))
    }

    fn require_alive(&self) -> Result<()> {
        match self.standing() {
            Standing::Alive => Ok(()),
            Standing::Unknown => Err(match self.clean_up_unregistered(false)? {
                Some(_) => self.never_came_up(),
                None => self.unknown(),
            }),
            Standing::Failed(error) => Err(error),
            Standing::Elsewhere(place) => Err(self.elsewhere(place)),
            Standing::Dead => {
                // None of our commands leaves a dead view standing for others to follow.
                Err(match self.clean_up(false) {
                    Ok(_) => self.dead("what it left was removed"),
                    Err(error) => self.dead(&format!("what it left stays: {}", error.message())),
                })
            }
        }
    }

    /// A socket may be another cache's than the user thinks.
    fn require_name(&self, client: &mut Client) -> Result<()> {
        let Some(name) = &self.name else { return Ok(()) };
        match client.request(Operation::Status {})? {
            Reply::Status(status) if status.name == name.as_str() => Ok(()),
            Reply::Status(status) => {
                let message = format!(
                    "the daemon at {} holds '{}', not '{name}'",
                    shown(&self.socket),
                    status.name.escape_debug()
                );
                Err(Error::new(Kind::NotFound, message)
                    .hint("give the --socket that this cache was started with"))
            }
            other => Err(self.unexpected(&other)),
        }
    }

    /// The error for a name under which nothing is registered.
    pub(crate) fn unknown(&self) -> Error {
        let place = match &self.registered {
            Some(registered) => format!(" in {}", shown(registered.base.path())),
            None => String::new(),
        };
        let hint = match &self.name {
            Some(name) => format!(
                "iloader list shows the caches there are; start one with: iloader start MODEL_DIR --name {name}"
            ),
            None => "iloader list shows the caches there are".to_owned(),
        };
        Error::new(Kind::NotFound, format!("there is no cache {}{place}", self.label())).hint(hint)
    }

    /// The error for a name whose start was killed before anything was registered, which is cleaned up.
    fn never_came_up(&self) -> Error {
        let error = self.unknown();
        let message = format!("{}; what a start that was killed had left was removed", error.message());
        let hint = error.hint_text().unwrap_or_default().to_owned();
        Error::new(Kind::NotFound, message).hint(hint)
    }

    /// The error for a daemon that was killed or crashed. `leftovers` says what becomes of what it left.
    pub(crate) fn dead(&self, leftovers: &str) -> Error {
        let label = self.label();
        let Some(record) = self.record() else {
            let message =
                format!("the daemon of {label} is dead, and its registration can't be read; {leftovers}");
            return Error::new(Kind::Failed, message).hint("start the cache again");
        };
        let message =
            format!("the daemon of {label} (pid {}) was killed or crashed; {leftovers}", record.pid);
        Error::new(Kind::Failed, message).hint(format!(
            "start it again: iloader start {} --name {}; its log is {}, and where memory ran out, dmesg says so",
            shown(&record.source),
            record.name,
            shown(&record.log_file)
        ))
    }

    /// The error for a daemon that lives but can't be talked to.
    fn deaf(&self, record: &Record) -> Error {
        let message = format!(
            "the daemon of {} (pid {}) lives, but its socket {} is gone",
            self.label(),
            record.pid,
            shown(&record.socket)
        );
        Error::new(Kind::TimedOut, message)
            .hint(format!("if somebody removed the socket, end the daemon: kill {}", record.pid))
    }

    /// The error for a daemon on another host or in another namespace, or one that can't be judged.
    pub(crate) fn elsewhere(&self, place: &str) -> Error {
        let hint = match self.registration().map(|registration| &registration.record) {
            Some(Err(error)) => error.hint_text().unwrap_or("look at what it names").to_owned(),
            _ => "give the command there".to_owned(),
        };
        Error::new(Kind::Failed, format!("the daemon of {} is {place}", self.label())).hint(hint)
    }

    /// The error for an answer that does not fit the question.
    pub(crate) fn unexpected(&self, reply: &Reply) -> Error {
        let kind = match reply {
            Reply::Status(_) => "a status",
            Reply::Manifest(_) => "a manifest",
            Reply::Progress(_) => "progress",
            Reply::Ready { .. } => "readiness",
            Reply::Leased(_) => "a lease",
            Reply::Readers(_) => "its readers",
            Reply::Stopping { .. } => "its own end",
            Reply::Error(error) | Reply::Busy(error) => return Error::from(error.clone()),
        };
        Error::new(Kind::Failed, format!("the daemon of {} answered with {kind} out of turn", self.label()))
            .hint("use the program version that started the cache")
    }

    /// Removes what a dead daemon, or a failed load, left, whether or not it is registered. The view's directory
    /// stays, empty, unless `remove_view`. Gives a line for each thing removed or left alone.
    ///
    /// # Errors
    ///
    /// [`Kind::InUse`] where somebody else is just starting or cleaning up, or the daemon's process is not
    /// gone yet; others where its view can't be removed. The registration then stays for the next command.
    pub(crate) fn clean_up(&self, remove_view: bool) -> Result<Vec<String>> {
        let (Some(registered), Some(name)) = (&self.registered, &self.name) else { return Ok(Vec::new()) };
        let paths = registered.base.paths(name);
        let busy = || {
            Error::new(Kind::InUse, format!("another command is at work on {}", self.label()))
                .hint("try again")
        };
        let lock = Lock::try_exclusive(&paths.lock)?.ok_or_else(busy)?;
        // What was read before the lock was taken may be another daemon's by now.
        let record = Record::read(&paths.record).ok().flatten();
        let cleaned_up = view::clean_up_crashed(&paths, record.as_ref(), &lock, !remove_view);
        lock.remove_and_release()?;
        cleaned_up.view_stays.map_or(Ok(cleaned_up.lines), Err)
    }

    /// Removes what a start left that was killed before its daemon was registered. `None` where there is nothing
    /// of that kind, or somebody is just starting the cache.
    ///
    /// # Errors
    ///
    /// As [`Target::clean_up`].
    pub(crate) fn clean_up_unregistered(&self, remove_view: bool) -> Result<Option<Vec<String>>> {
        let (Some(registered), Some(name)) = (&self.registered, &self.name) else { return Ok(None) };
        let paths = registered.base.paths(name);
        if std::fs::symlink_metadata(&paths.lock).is_err() {
            return Ok(None);
        }
        let Some(lock) = Lock::try_exclusive(&paths.lock)? else { return Ok(None) };
        let record = Record::read(&paths.record).ok().flatten();
        let mut cleaned_up = view::clean_up_crashed(&paths, record.as_ref(), &lock, !remove_view);
        cleaned_up.lines.push(format!("removed the lock {}", shown(&paths.lock)));
        lock.remove_and_release()?;
        cleaned_up.view_stays.map_or(Ok(Some(cleaned_up.lines)), Err)
    }
}

/// What the registry says of one registration.
pub(crate) fn standing(registration: &Registration) -> Standing<'_> {
    let record = registration.record.as_ref().ok();
    match &registration.liveness {
        Liveness::Alive => Standing::Alive,
        Liveness::Elsewhere(place) => Standing::Elsewhere(place),
        Liveness::Dead => match record.and_then(Record::failure) {
            Some(error) => Standing::Failed(
                error.with_kind(Kind::Failed).context(format!("the load of '{}' failed", registration.name)),
            ),
            None => Standing::Dead,
        },
    }
}
