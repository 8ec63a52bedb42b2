//! The registration of a cache: `BASE/run/NAME.json`, by which every command finds it.
//!
//! It says where things are, never whether the daemon lives: that is the lock's to say.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path};
use std::str::FromStr;

use rustix::fs::{self, FileType, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::dir::{self, failed};
use super::{BaseDir, Name, Paths, file_system, lock};
use crate::error::{Error, Kind, Result, shown};
use crate::failure::Failure;

/// The version of the JSON form. A reader refuses any other.
pub const SCHEMA: u32 = 1;

/// The longest registration: seven paths of 4096 bytes with every byte escaped come to 172,032.
pub const RECORD_BYTES_MAX: u64 = 256 << 10;

/// What a daemon is and where its things are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The cache's name.
    pub name: String,
    /// The daemon's process, in the PID namespace below.
    pub pid: i32,
    /// The machine and namespace that the pid means something in.
    #[serde(flatten)]
    pub host: Host,
    /// The control socket.
    pub socket: String,
    /// The view that is or will be published.
    pub view: String,
    /// `--keep-dirname`: the one more level of the view.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_dirname: Option<String>,
    /// The source directory.
    pub source: String,
    /// The pid file.
    pub pid_file: String,
    /// The log file.
    pub log_file: String,
    /// When the cache was made, RFC 3339.
    pub created: String,
    /// The version of the program that wrote this.
    pub tool: String,
    /// Why the load failed, where it did: the daemon has then ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<Failure>,
}

/// The machine, its boot and the PID namespace that a process belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The host's name, for messages: it may change, and several may have it.
    pub host: String,
    /// The kernel's identifier of this boot; empty where it is hidden.
    pub boot_id: String,
    /// Inode of the PID namespace; 0 where it is hidden.
    pub pid_namespace: u64,
}

impl Host {
    /// Where this process runs.
    pub fn current() -> Host {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Host {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            boot_id: boot_id.trim().to_owned(),
            pid_namespace: std::fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino()),
        }
    }

    fn is_of_another_boot(&self, here: &Host) -> bool {
        !self.boot_id.is_empty() && !here.boot_id.is_empty() && self.boot_id != here.boot_id
    }

    /// What a process on `self` is to one on `here`: `None` where they share machine, boot and PID
    /// namespace, else where the first one is, in words. What is hidden is taken to be the same.
    fn seen_from(&self, here: &Host) -> Option<String> {
        if self.is_of_another_boot(here) {
            return Some(format!("on host {}, or before a restart", shown(&self.host)));
        }
        let (there, here) = (self.pid_namespace, here.pid_namespace);
        (there != 0 && here != 0 && there != here).then(|| {
            format!("in another PID namespace (a container) of this machine, as host {}", shown(&self.host))
        })
    }
}

/// The one field that every version has.
#[derive(Deserialize)]
struct Versioned {
    schema: u32,
}

impl Record {
    /// Writes the registration at `path`, mode 0600, so that a reader meets the old one or this one.
    ///
    /// # Errors
    ///
    /// Where the directory cannot be written, or a path in the record would be refused by a reader.
    pub fn write(&self, path: &Path) -> Result<()> {
        self.check()
            .map_err(|why| Error::new(Kind::Failed, format!("cannot register '{}': {why}", self.name)))?;
        let mut bytes = serde_json::to_vec_pretty(self)
            .map_err(|cause| Error::new(Kind::Failed, format!("cannot register '{}': {cause}", self.name)))?;
        bytes.push(b'\n');
        let (directory, name) = split(path)?;
        dir::replace_file(open_directory(directory)?, name, &bytes)
            .map_err(failed("write the registration", path))
    }

    /// Reads the registration at `path`, or `None` where there is none.
    ///
    /// # Errors
    ///
    /// Where the file is not a registration of this version, names a cache other than the file does, is
    /// no regular file, or is not the caller's.
    pub fn read(path: &Path) -> Result<Option<Record>> {
        let Some(bytes) = read_capped(path)? else { return Ok(None) };
        let record = Record::parse(&bytes)
            .map_err(|error| error.context(format!("the registration {} cannot be used", shown(path))))?;
        let expected = format!("{}.json", record.name);
        if path.file_name() != Some(OsStr::new(&expected)) {
            let error = format!("the registration {} names another cache, '{}'", shown(path), record.name);
            return Err(Error::new(Kind::Failed, error).hint("stop and start that cache again"));
        }
        Ok(Some(record))
    }

    /// A registration as it stands in a file.
    ///
    /// # Errors
    ///
    /// Where it is none of this version, or commands could not act on what it says.
    pub fn parse(bytes: &[u8]) -> Result<Record> {
        let bad =
            |why: String| Error::new(Kind::Failed, why).hint("it is replaced by the next start of that name");
        let version: Versioned = serde_json::from_slice(bytes).map_err(|cause| bad(cause.to_string()))?;
        if version.schema != SCHEMA {
            let error = format!("it has version {}, and this program reads version {SCHEMA}", version.schema);
            return Err(Error::new(Kind::Failed, error).hint("use the program that started the cache"));
        }
        let record: Record = serde_json::from_slice(bytes).map_err(|cause| bad(cause.to_string()))?;
        record.check().map_err(bad)?;
        Ok(record)
    }

    /// The failure, as an error.
    pub fn failure(&self) -> Option<Error> {
        self.failed.clone().map(Error::from)
    }

    /// What is wrong with the fields that commands act on.
    fn check(&self) -> std::result::Result<(), String> {
        Name::from_str(&self.name).map_err(|error| error.message().to_owned())?;
        if self.pid <= 0 {
            return Err(format!("{} is not a process", self.pid));
        }
        for (what, path) in [
            ("socket", &self.socket),
            ("view", &self.view),
            ("source", &self.source),
            ("pid_file", &self.pid_file),
            ("log_file", &self.log_file),
        ] {
            if !path.starts_with('/') || path.contains('\0') {
                return Err(format!("{what} {} is not an absolute path", shown(path)));
            }
        }
        match &self.kept_dirname {
            Some(name) if !is_plain_component(name) => {
                Err(format!("kept_dirname {} is not a directory's name", shown(name)))
            }
            _ => Ok(()),
        }
    }
}

/// Whether `name` is one path component that leads nowhere else.
fn is_plain_component(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let is_one = matches!(parts.next(), Some(Component::Normal(part)) if part == name);
    is_one && parts.next().is_none() && !name.contains('\0')
}

fn read_capped(path: &Path) -> Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match fs::open(path, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        opened => opened.map_err(failed("open the registration", path))?,
    };
    let refuse = |why: String| Error::new(Kind::Failed, format!("the registration {} {why}", shown(path)));
    let found = fs::fstat(&file).map_err(failed("look at", path))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(refuse("is not a regular file".to_owned()));
    }
    if found.st_uid != dir::our_uid() {
        return Err(refuse(format!("belongs to uid {}, not to you (uid {})", found.st_uid, dir::our_uid())));
    }
    let mut bytes = Vec::new();
    File::from(file)
        .take(RECORD_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|cause| Error::io("read the registration", path, &cause))?;
    if bytes.len() as u64 > RECORD_BYTES_MAX {
        return Err(refuse(format!("is longer than {RECORD_BYTES_MAX} bytes")));
    }
    Ok(Some(bytes))
}

fn split(path: &Path) -> Result<(&Path, &OsStr)> {
    match (path.parent(), path.file_name()) {
        (Some(directory), Some(name)) => Ok((directory, name)),
        _ => Err(failed("write the registration", path)(Errno::ISDIR)),
    }
}

fn open_directory(path: &Path) -> Result<std::os::fd::OwnedFd> {
    fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(failed("open the directory", path))
}

/// A name of a BASE, what is registered for it, and whether its daemon lives.
#[derive(Clone, Debug)]
pub struct Registration {
    /// The cache.
    pub name: Name,
    /// Its default places; the record says which ones it uses.
    pub paths: Paths,
    /// What is registered, or why that cannot be told.
    pub record: Result<Record>,
    /// Whether its lock is held.
    pub liveness: Liveness,
}

impl Registration {
    /// Why the daemon can't be reached by the path that it listens at, where that is because BASE stands at
    /// another path here than there: it was moved, or mounted into a container elsewhere.
    pub fn displaced(&self) -> Option<Error> {
        let record = self.record.as_ref().ok()?;
        let (there, here) = (Path::new(&record.socket), self.paths.socket.as_path());
        if there == here || there.exists() || !here.exists() {
            return None;
        }
        let message = format!(
            "the daemon of '{}' listens at {}, which is {} here: BASE was moved, or is mounted at another path",
            self.name,
            shown(there),
            shown(here)
        );
        Some(Error::new(Kind::Failed, message).hint(format!(
            "let BASE have the path it had when the cache was started; status and stop work with --socket {}",
            shown(here)
        )))
    }
}

/// Whether a daemon lives, by its lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// Its lock is held on this machine, in this PID namespace. It may be a command that starts the
    /// daemon or cleans up after it.
    Alive,
    /// Nobody holds its lock: it ended without an orderly end, or its load failed.
    Dead,
    /// It is not ours to judge, or out of reach: on another host that shares the file system, or alive in
    /// another PID namespace. Says which, to stand after "the daemon is". Never to be cleaned up.
    Elsewhere(String),
}

/// Everything registered in a BASE, by name. What is no registration is left out; a bad one is reported
/// in its place.
///
/// # Errors
///
/// Where `run` exists and cannot be read.
pub fn list(base: &BaseDir) -> Result<Vec<Registration>> {
    let here = Host::current();
    let names = names_with(base, b".json")?;
    Ok(names.iter().filter_map(|name| examine(base, name, &here)).collect())
}

/// The names whose lock file exists although nothing is registered: of commands and daemons that were killed
/// early in a start, and of those that are just at it.
///
/// # Errors
///
/// As [`list`].
pub fn unregistered(base: &BaseDir) -> Result<Vec<Name>> {
    let mut names = names_with(base, b".lock")?;
    let registered = names_with(base, b".json")?;
    names.retain(|name| !registered.contains(name));
    Ok(names)
}

/// What is registered under `name`, or `None`.
pub fn look_up(base: &BaseDir, name: &Name) -> Option<Registration> {
    examine(base, name, &Host::current())
}

/// The names of the files in `run` that end so, sorted. What is no cache's name is left out.
fn names_with(base: &BaseDir, ending: &[u8]) -> Result<Vec<Name>> {
    let run = base.run_dir();
    let failed = |cause| Error::io("read the directory", &run, &cause);
    let entries = match std::fs::read_dir(&run) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let file = entry.map_err(failed)?.file_name();
        let stem = file.as_bytes().strip_suffix(ending).and_then(|stem| std::str::from_utf8(stem).ok());
        names.extend(stem.and_then(|stem| stem.parse::<Name>().ok()));
    }
    names.sort();
    Ok(names)
}

fn examine(base: &BaseDir, name: &Name, here: &Host) -> Option<Registration> {
    let paths = base.paths(name);
    let (record, held) = read_with_lock(&paths)?;
    let registered = record.as_ref().ok();
    let there = registered.and_then(|record| record.host.seen_from(here));
    let is_other_boot = registered.is_some_and(|record| record.host.is_of_another_boot(here));
    let (record, liveness) = match (held, there) {
        // Whether the lock is held cannot be told, so nothing may be cleaned up.
        (Err(error), _) => {
            let why = format!("unknown: {}", error.message());
            (record.and(Err(error)), Liveness::Elsewhere(why))
        }
        (Ok(true), None) => (record, Liveness::Alive),
        (Ok(true), Some(there)) => (record, Liveness::Elsewhere(there)),
        // A lock that this kernel sees free is held by none of its processes, whatever their namespace.
        // Only a shared file system may hide another host's from us.
        (Ok(false), Some(there)) if is_other_boot && is_shared(&base.run_dir()) => {
            (record, Liveness::Elsewhere(there))
        }
        (Ok(false), _) => (record, Liveness::Dead),
    };
    Some(Registration { name: name.clone(), paths, record, liveness })
}

/// What is registered and whether the lock is held, of one moment, or `None` where nothing is registered.
///
/// A daemon holds the lock from before it writes its record until after it removes it. So a record that
/// was there before and after the lock was seen free is a dead one's; one that came or went meanwhile is
/// looked at again.
fn read_with_lock(paths: &Paths) -> Option<(Result<Record>, Result<bool>)> {
    const LOOKS_MAX: u32 = 100;
    let mut record = Record::read(&paths.record);
    for _ in 0..LOOKS_MAX {
        let held = lock::is_held(&paths.lock);
        if !matches!(held, Ok(false)) {
            return Some((record.transpose()?, held));
        }
        let again = Record::read(&paths.record);
        let is_same = match (&record, &again) {
            (Ok(before), Ok(after)) => before == after,
            (Err(before), Err(after)) => before.message() == after.message(),
            _ => false,
        };
        record = again;
        if is_same {
            return Some((record.transpose()?, held));
        }
    }
    let busy = Error::new(Kind::Failed, format!("{} keeps changing", shown(&paths.record)));
    Some((record.transpose()?, Err(busy.hint("try again"))))
}

fn is_shared(run: &Path) -> bool {
    use std::os::fd::AsFd;
    let Ok(run) = File::open(run) else { return true };
    !matches!(file_system::network_kind(run.as_fd()), Ok(None))
}

#[cfg(test)]
mod tests;
