//! The runtime root: where it is, whether it serves, and its making.
//!
//! Every command of one user must come to the same BASE, whether it may create it or only looks. So what
//! decides between the default place and the fallback is judged the same way by [`BaseDir::find`] and
//! [`BaseDir::prepare`].

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{self, Access, AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::dir::{self, FILE_MODE, failed};
use super::file_system;
use crate::error::{Error, Kind, Result, reason, shown};

/// The directories that [`BaseDir::prepare`] makes in BASE.
const INSIDE: [&str; 3] = ["run", "views", "logs"];

/// The directory of generations in BASE, which is made only where it is needed.
const MODEL_CACHE: &str = "model-cache";

/// What of the caller's environment decides where BASE is. An empty variable counts as unset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// `ILOADER_BASE_DIR`.
    pub base_dir: Option<OsString>,
    /// `XDG_CACHE_HOME`.
    pub cache_home: Option<OsString>,
    /// `HOME`.
    pub home: Option<OsString>,
    /// `TMPDIR`.
    pub temporary: Option<OsString>,
    /// The working directory; `None` where it was removed.
    pub working_directory: Option<PathBuf>,
}

impl Environment {
    /// The environment of this process.
    pub fn of_process() -> Environment {
        Environment {
            base_dir: std::env::var_os("ILOADER_BASE_DIR"),
            cache_home: std::env::var_os("XDG_CACHE_HOME"),
            home: std::env::var_os("HOME"),
            temporary: std::env::var_os("TMPDIR"),
            working_directory: std::env::current_dir().ok(),
        }
    }

    /// `path` as an absolute one, against the working directory. `option` names it in errors. `..` stays:
    /// what it means depends on links.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`] for an empty path and for one that starts with a `~` that no shell expanded;
    /// [`Kind::NotFound`] for a relative one where the working directory is gone.
    pub fn absolute(&self, path: &Path, option: &str) -> Result<PathBuf> {
        let bytes = path.as_os_str().as_bytes();
        if bytes.is_empty() {
            return Err(Error::new(Kind::Usage, format!("{option} is empty")).hint("give a path"));
        }
        if bytes.contains(&0) {
            return Err(Error::new(Kind::Usage, format!("{option} {} holds a zero byte", shown(path))));
        }
        if bytes[0] == b'~' {
            let error = format!("{option} {} starts with a '~' that no shell expanded", shown(path));
            return Err(Error::new(Kind::Usage, error)
                .hint("write $HOME or the whole path; ./~ for a name that starts with '~'"));
        }
        let whole = match (path.is_absolute(), &self.working_directory) {
            (true, _) => path.to_owned(),
            (false, Some(directory)) => directory.join(path),
            (false, None) => {
                let error =
                    format!("{option} {} is relative, and the working directory is gone", shown(path));
                return Err(Error::new(Kind::NotFound, error).hint("give an absolute path"));
            }
        };
        Ok(whole.components().filter(|part| *part != Component::CurDir).collect())
    }

    fn absolute_or_ignored(value: &Option<OsString>) -> Option<PathBuf> {
        value.as_deref().map(Path::new).filter(|path| path.is_absolute()).map(Path::to_owned)
    }

    fn fallback(&self) -> PathBuf {
        Self::absolute_or_ignored(&self.temporary)
            .unwrap_or_else(|| PathBuf::from("/tmp"))
            .join(format!("infiniloader-{}", dir::our_uid()))
    }
}

/// The runtime root BASE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseDir {
    path: PathBuf,
    fallback_reason: Option<String>,
}

/// Where BASE is to be, before anything was looked at.
enum Choice {
    Explicit(PathBuf),
    Default(PathBuf),
    /// There is no default place, for this reason.
    Fallback(String),
}

impl BaseDir {
    /// Finds BASE without creating anything: for commands that only look. A BASE that does not exist
    /// holds no caches, which is no error. `explicit` is `--base-dir`.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`] for a path that cannot be meant; others where an existing BASE is not safe to
    /// use: not the caller's, writable by others, reached through somebody else's link.
    pub fn find(explicit: Option<&Path>, environment: &Environment) -> Result<BaseDir> {
        let fallback = |reason| {
            let path = environment.fallback();
            check_inside(&path, open_base(&path, LinksFollowed::None)?)?;
            Ok(BaseDir { path, fallback_reason: Some(reason) })
        };
        let path = match choose(explicit, environment)? {
            Choice::Fallback(reason) => return fallback(reason),
            Choice::Default(path) => match why_unsuitable(&path)? {
                Some(reason) => return fallback(reason),
                // Creating the default place can fail in ways that nobody foresees, a full disk quota
                // for one. The caches are then in the fallback.
                None if is_absent(&path) && is_our_base(&environment.fallback()) => {
                    return fallback(format!("{} could not be created earlier", shown(&path)));
                }
                None => path,
            },
            Choice::Explicit(path) => path,
        };
        check_inside(&path, open_base(&path, LinksFollowed::Own)?)?;
        Ok(BaseDir { path, fallback_reason: None })
    }

    /// Finds BASE and creates what is missing of it: itself with its parents, `run`, `views`, `logs`.
    /// Proves that locks and sockets work there.
    ///
    /// # Errors
    ///
    /// As [`BaseDir::find`], and where an explicit BASE or the fallback cannot be created or does not serve.
    pub fn prepare(explicit: Option<&Path>, environment: &Environment) -> Result<BaseDir> {
        let fallback = |reason: String| {
            let path = environment.fallback();
            let base = create_fallback(&path).map_err(|error| {
                error.context(format!("no runtime directory: {reason}")).hint("choose one with --base-dir")
            })?;
            fill(&path, &base)?;
            Ok(BaseDir { path, fallback_reason: Some(reason) })
        };
        let path = match choose(explicit, environment)? {
            Choice::Fallback(reason) => return fallback(reason),
            Choice::Default(path) => match why_unsuitable(&path)? {
                Some(reason) => return fallback(reason),
                None => match create(&path) {
                    Err(error) if is_absent(&path) => return fallback(error.message().to_owned()),
                    created => created.map(|_| path)?,
                },
            },
            Choice::Explicit(path) => path,
        };
        fill(&path, &create(&path)?)?;
        Ok(BaseDir { path, fallback_reason: None })
    }

    /// A BASE at `path`, unchecked: for a daemon, which is told by the command that prepared it.
    pub fn prepared(path: PathBuf) -> BaseDir {
        assert!(path.is_absolute(), "a prepared BASE is absolute");
        BaseDir { path, fallback_reason: None }
    }

    /// Keeps cleaners of temporary directories away from BASE while the descriptor is open: they leave a
    /// directory alone that somebody holds a lock on.
    ///
    /// # Errors
    ///
    /// Where BASE is gone or cannot be locked at this moment.
    pub fn hold(&self) -> Result<OwnedFd> {
        let base = fs::open(&self.path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(failed("open the runtime directory", &self.path))?;
        fs::flock(&base, FlockOperation::NonBlockingLockShared)
            .map_err(failed("lock the runtime directory", &self.path))?;
        Ok(base)
    }

    /// BASE itself, absolute.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why BASE is the fallback and not the default place. To be said once, on stderr.
    pub fn fallback_reason(&self) -> Option<&str> {
        self.fallback_reason.as_deref()
    }

    /// `BASE/run`: sockets, locks, pid files, registrations.
    pub fn run_dir(&self) -> PathBuf {
        self.path.join("run")
    }

    /// `BASE/views`.
    pub fn views_dir(&self) -> PathBuf {
        self.path.join("views")
    }

    /// `BASE/model-cache`: generations on disk, unless `--cache-root` says otherwise. Made with the first of them.
    pub fn model_cache_dir(&self) -> PathBuf {
        self.path.join(MODEL_CACHE)
    }

    /// `BASE/logs`.
    pub fn logs_dir(&self) -> PathBuf {
        self.path.join("logs")
    }

    #[cfg(test)]
    pub(crate) fn for_tests(path: &Path) -> BaseDir {
        BaseDir::prepared(path.to_owned())
    }
}

fn choose(explicit: Option<&Path>, environment: &Environment) -> Result<Choice> {
    let variable = environment.base_dir.as_deref().filter(|value| !value.is_empty()).map(Path::new);
    let asked_for = explicit.map(|path| (path, "--base-dir"));
    if let Some((path, option)) = asked_for.or(variable.map(|path| (path, "ILOADER_BASE_DIR"))) {
        let path = environment.absolute(path, option)?;
        return match path.to_str() {
            Some(_) => Ok(Choice::Explicit(path)),
            None => {
                let error = format!("{option} {} is not UTF-8", shown(&path));
                Err(Error::new(Kind::Usage, error).hint("choose a directory with a UTF-8 name"))
            }
        };
    }
    let cache_home = Environment::absolute_or_ignored(&environment.cache_home)
        .or_else(|| Environment::absolute_or_ignored(&environment.home).map(|home| home.join(".cache")));
    Ok(match cache_home.map(|directory| directory.join("infiniloader")) {
        None => Choice::Fallback("HOME is not set to an absolute path".to_owned()),
        Some(path) if path.to_str().is_none() => Choice::Fallback(format!("{} is not UTF-8", shown(&path))),
        Some(path) => Choice::Default(path),
    })
}

/// Whose links may lead to a directory.
#[derive(Clone, Copy, PartialEq)]
enum LinksFollowed {
    /// Nobody's: in a directory where everybody may create names.
    None,
    /// The caller's own.
    Own,
    /// The caller's own and root's, who may set up another's home.
    OwnAndRoot,
}

/// Opens the directory `name` in `parent` once nobody else can have put it there, or `None` where it is
/// absent. `path` is for messages.
fn open_checked(
    parent: BorrowedFd<'_>,
    name: &OsStr,
    path: &Path,
    links: LinksFollowed,
) -> Result<Option<OwnedFd>> {
    let found = match fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(None),
        found => found.map_err(|errno| {
            failed("look at", path)(errno).hint("choose another directory with --base-dir")
        })?,
    };
    let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::Symlink => check_link(&found, path, links)?,
        // A link that takes the directory's place after this look is refused.
        FileType::Directory => flags |= OFlags::NOFOLLOW,
        _ if found.st_uid != dir::our_uid() => return Err(belongs_to_another(path, found.st_uid)),
        _ => {
            return Err(Error::new(Kind::Failed, format!("{} is not a directory", shown(path)))
                .hint("move it away, or choose another directory with --base-dir"));
        }
    }
    let owner = found.st_uid;
    let opened = match fs::openat(parent, name, flags, Mode::empty()) {
        Err(Errno::ACCESS) if owner != dir::our_uid() => return Err(belongs_to_another(path, owner)),
        opened => opened.map_err(failed("open the directory", path))?,
    };
    let found = fs::fstat(&opened).map_err(failed("look at", path))?;
    if found.st_uid != dir::our_uid() {
        return Err(belongs_to_another(path, found.st_uid));
    }
    if dir::is_writable_by_others(&found) {
        let mode = found.st_mode & 0o777;
        let error = format!("{} is writable by others (mode {mode:o})", shown(path));
        // A shared directory such as /tmp is meant to be writable by all.
        let hint = match found.st_mode & Mode::SVTX.bits() {
            0 => format!("chmod go-w {}, or choose another --base-dir", shown(path)),
            _ => format!("choose a directory of your own in it: --base-dir {}", shown(path.join("iloader"))),
        };
        return Err(Error::new(Kind::Failed, error).hint(hint));
    }
    Ok(Some(opened))
}

fn check_link(link: &Stat, path: &Path, links: LinksFollowed) -> Result<()> {
    let is_own = link.st_uid == dir::our_uid();
    let is_allowed = match links {
        LinksFollowed::None => false,
        LinksFollowed::Own => is_own,
        LinksFollowed::OwnAndRoot => is_own || link.st_uid == 0,
    };
    if is_allowed {
        return Ok(());
    }
    let whose = if is_own { String::new() } else { format!(" of another user (uid {})", link.st_uid) };
    Err(Error::new(Kind::Failed, format!("{} is a symbolic link{whose}: refusing to follow it", shown(path)))
        .hint("remove it, or choose another --base-dir"))
}

fn belongs_to_another(path: &Path, owner: u32) -> Error {
    let error = format!("{} belongs to uid {owner}, not to you (uid {})", shown(path), dir::our_uid());
    Error::new(Kind::Failed, error).hint("choose a directory of your own with --base-dir")
}

/// Opens BASE, checked, or `None` where it is absent. `..` and links in its parents are followed.
fn open_base(path: &Path, links: LinksFollowed) -> Result<Option<OwnedFd>> {
    let links = if links == LinksFollowed::Own { LinksFollowed::OwnAndRoot } else { links };
    open_checked(CWD, path.as_os_str(), path, links)
}

/// Checks what is there of [`INSIDE`] and [`MODEL_CACHE`] in BASE.
fn check_inside(path: &Path, base: Option<OwnedFd>) -> Result<()> {
    let Some(base) = base else { return Ok(()) };
    for name in INSIDE.into_iter().chain([MODEL_CACHE]) {
        open_checked(base.as_fd(), OsStr::new(name), &path.join(name), LinksFollowed::Own)?;
    }
    Ok(())
}

/// Whether there is a BASE that we made: anybody can make a directory of the fallback's name.
fn is_our_base(path: &Path) -> bool {
    fs::lstat(path).is_ok_and(|found| found.st_uid == dir::our_uid()) && path.join("run").is_dir()
}

fn is_absent(path: &Path) -> bool {
    // An answer other than "absent" is for the caller to meet again, as an error with a reason.
    !matches!(path.try_exists(), Ok(true) | Err(_))
}

/// Why the default place cannot be BASE, or `None` where it can.
///
/// # Errors
///
/// Where it is one that must not be passed over in silence: writable by others, a link of somebody else.
fn why_unsuitable(path: &Path) -> Result<Option<String>> {
    let link = match fs::lstat(path) {
        Ok(found) if FileType::from_raw_mode(found.st_mode) == FileType::Symlink => Some(found),
        _ => None,
    };
    if let Some(link) = link {
        check_link(&link, path, LinksFollowed::OwnAndRoot)?;
    }
    match fs::stat(path) {
        Ok(found) if found.st_uid != dir::our_uid() => {
            Ok(Some(belongs_to_another(path, found.st_uid).message().to_owned()))
        }
        Ok(_) => {
            let base = open_base(path, LinksFollowed::Own)?;
            base.map_or(Ok(None), |base| Ok(why_not_there(base.as_fd(), path, path)))
        }
        Err(Errno::NOENT) => Ok(why_not_created(path)),
        Err(errno) => Ok(Some(format!("{}: {}", shown(path), reason(&errno.into())))),
    }
}

/// Why BASE cannot be created as `path`, as far as its nearest existing parent shows.
fn why_not_created(path: &Path) -> Option<String> {
    for ancestor in path.ancestors().skip(1) {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = match fs::open(ancestor, flags, Mode::empty()) {
            Err(Errno::NOENT) => continue,
            Err(errno) => return Some(format!("{}: {}", shown(ancestor), reason(&errno.into()))),
            Ok(directory) => directory,
        };
        let Ok(found) = fs::fstat(&directory) else { continue };
        // Root who kept a user's HOME would leave a BASE there that the user cannot use; and whoever owns
        // the parent can put anything in BASE's place.
        if found.st_uid != dir::our_uid() && found.st_uid != 0 {
            return Some(format!(
                "{} cannot be created, {} belongs to uid {}",
                shown(path),
                shown(ancestor),
                found.st_uid
            ));
        }
        return why_not_there(directory.as_fd(), ancestor, path);
    }
    Some(format!("{} has no existing parent", shown(path)))
}

/// Why BASE, as `path`, cannot be in (or be) the existing `directory`.
fn why_not_there(directory: BorrowedFd<'_>, existing: &Path, path: &Path) -> Option<String> {
    if let Ok(Some(kind)) = file_system::network_kind(directory) {
        return Some(format!("{} is on a network file system ({kind})", shown(existing)));
    }
    if let Err(errno) = fs::accessat(CWD, existing, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS) {
        return Some(format!("{} cannot be written to: {}", shown(existing), reason(&errno.into())));
    }
    if existing != path {
        return None;
    }
    match fs::flock(directory, FlockOperation::NonBlockingLockShared) {
        Ok(()) | Err(Errno::WOULDBLOCK) => None,
        Err(errno) => Some(format!("{} cannot be locked: {}", shown(path), reason(&errno.into()))),
    }
}

/// Creates BASE where it is missing, parents included, and opens it, checked.
fn create(path: &Path) -> Result<OwnedFd> {
    if let Some(base) = open_base(path, LinksFollowed::Own)? {
        return Ok(base);
    }
    dir::make_directories(path).map_err(|error| error.hint("choose another directory with --base-dir"))?;
    open_base(path, LinksFollowed::Own)?.ok_or_else(|| failed("open the directory", path)(Errno::NOENT))
}

/// Creates the fallback in a directory where everybody may create names: nothing that somebody else put
/// there is taken, and no link followed.
fn create_fallback(path: &Path) -> Result<OwnedFd> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(failed("create the directory", path)(Errno::EXIST));
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let made = fs::open(parent, flags, Mode::empty()).and_then(|parent| dir::make_directory(parent, name));
    match made {
        Ok(_) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(failed("create the directory", path)(errno)),
    }
    open_base(path, LinksFollowed::None)?.ok_or_else(|| failed("open the directory", path)(Errno::NOENT))
}

/// Makes [`INSIDE`] and proves that BASE serves.
fn fill(path: &Path, base: &OwnedFd) -> Result<()> {
    for name in INSIDE {
        let inside = path.join(name);
        match dir::make_directory(base, OsStr::new(name)) {
            Ok(_) | Err(Errno::EXIST) => {}
            Err(errno) => {
                let error = failed("create the directory", &inside)(errno);
                return Err(error.hint("choose another directory with --base-dir"));
            }
        }
        let opened = open_checked(base.as_fd(), OsStr::new(name), &inside, LinksFollowed::Own)?;
        let opened = opened.ok_or_else(|| failed("open the directory", &inside)(Errno::NOENT))?;
        if name == "run" {
            prove(opened.as_fd(), &inside)?;
        }
    }
    open_checked(base.as_fd(), OsStr::new(MODEL_CACHE), &path.join(MODEL_CACHE), LinksFollowed::Own)?;
    Ok(())
}

/// What the files are called by which a directory is tried.
const PROBE: &str = "probe";

/// Proves that files in `run` can be locked and that sockets can be made there.
///
/// Its files live for microseconds. One that a killed command left is removed by the next; should it be another
/// command's that is just at it, that one has seen already what it wanted to.
fn prove(run: BorrowedFd<'_>, path: &Path) -> Result<()> {
    let unfit = |what: &str, errno: Errno| {
        failed(what, path)(errno)
            .hint("choose a --base-dir on a local file system that has locks and sockets")
    };
    remove_probes(run);
    let name = dir::temporary_name(OsStr::new(PROBE), "tmp").map_err(|errno| unfit("write in", errno))?;
    let name = OsStr::from_bytes(&name);
    let remove = || match fs::unlinkat(run, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno),
    };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = fs::openat(run, name, flags, FILE_MODE).map_err(|errno| unfit("create a file in", errno))?;
    let locked = fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
    remove().map_err(|errno| unfit("remove a file in", errno))?;
    locked.map_err(|errno| unfit("lock a file in", errno))?;
    // The node alone, without a socket behind it, is what a file system may refuse.
    fs::mknodat(run, name, FileType::Socket, FILE_MODE, 0)
        .map_err(|errno| unfit("make a socket in", errno))?;
    remove().map_err(|errno| unfit("remove a socket in", errno))
}

/// Removes what killed commands left of their probes. What can't be read or removed is met again by the probe
/// itself, which says why.
fn remove_probes(run: BorrowedFd<'_>) {
    let Ok(entries) = fs::Dir::read_from(run) else { return };
    for entry in entries.filter_map(rustix::io::Result::ok) {
        let name = entry.file_name();
        if dir::is_temporary_name(name.to_bytes(), OsStr::new(PROBE), "tmp") {
            let _ = fs::unlinkat(run, name, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests;
