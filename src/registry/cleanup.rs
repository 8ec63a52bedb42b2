//! What a cache leaves behind in files, and its removal: only what is ours, and never through a link.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{self, AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::dir::{self, failed};
use super::{Claims, Lock, Paths, Record, claims};
use crate::error::{Error, Kind, Result, shown};

/// Removes what a daemon that ended without an orderly end left in files beside its registration: socket, pid
/// file, half-written files, and what it had of the quota and of promised memory. The view comes before that and
/// is `view`'s to remove, the registration last ([`clean_up_registration`]); the lock file stays for its holder.
///
/// `held` is the name's lock, held by the caller. `record` is what was registered, where it can be read.
/// Returns a line for each thing removed and each left alone.
pub fn clean_up_files(paths: &Paths, record: Option<&Record>, held: &Lock) -> Vec<String> {
    assert_eq!(held.path(), paths.lock, "a clean-up holds the lock of its name");
    let socket = record.map_or(paths.socket.as_path(), |record| Path::new(&record.socket));
    let pid_file = record.map_or(paths.pid_file.as_path(), |record| Path::new(&record.pid_file));
    claims::sweep_promises(&paths.run_dir());
    let freed = socket.parent().map_or(Ok(Vec::new()), |directory| Claims::of_quota(directory).sweep());
    let freed = freed.unwrap_or_else(|error| vec![error.message().to_owned()]);
    let half_written = [paths.record.as_path(), pid_file, socket];
    let half_written =
        half_written.map(|path| told("half-written files beside", path, remove_temporary_files(path)));
    let removed = [
        told("socket", socket, remove_socket(socket)),
        told("pid file", pid_file, remove_pid_file(pid_file, record.map(|record| record.pid))),
    ];
    removed.into_iter().chain(half_written).flatten().chain(freed).collect()
}

/// Removes the registration of a dead daemon: the end of a clean-up, so that an interrupted one is taken up
/// again. `held` is the name's lock, held by the caller. Returns a line where it was removed or left alone.
pub fn clean_up_registration(paths: &Paths, held: &Lock) -> Option<String> {
    assert_eq!(held.path(), paths.lock, "a clean-up holds the lock of its name");
    told("registration", &paths.record, remove_record(&paths.record))
}

/// The line for what was removed, or left alone; none where there was nothing.
fn told(what: &str, path: &Path, removed: Result<bool>) -> Option<String> {
    match removed {
        Ok(true) => Some(format!("removed the {what} {}", shown(path))),
        Ok(false) => None,
        Err(error) => Some(error.message().to_owned()),
    }
}

/// Removes a socket of ours that nobody listens on; `false` where there is none.
///
/// # Errors
///
/// [`Kind::InUse`] where somebody listens on it; [`Kind::Failed`] where it is no socket or not ours.
pub fn remove_socket(path: &Path) -> Result<bool> {
    Ok(is_dead_socket(path)? && unlink(path)?)
}

/// Whether there is a socket of ours that nobody listens on; `false` where there is nothing.
///
/// # Errors
///
/// As [`remove_socket`].
pub fn is_dead_socket(path: &Path) -> Result<bool> {
    let Some(found) = look_at(path)? else { return Ok(false) };
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket || found.st_uid != dir::our_uid() {
        return Err(left_alone(path, "it is no socket of ours"));
    }
    match connect_without_waiting(path) {
        Err(Errno::CONNREFUSED) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        _ => Err(left_alone(path, "another process listens on it").with_kind(Kind::InUse)),
    }
}

/// An answer other than ECONNREFUSED means that somebody has the socket, even one too busy to accept.
fn connect_without_waiting(path: &Path) -> rustix::io::Result<()> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    connect(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?, &address)
}

/// Writes `pid` and a line end to the pid file at `path`, mode 0600, as a whole. `paths` are the cache's own places.
///
/// # Errors
///
/// Where there is something that is not a pid file, or the directory cannot be written.
pub fn write_pid_file(path: &Path, pid: i32, paths: &Paths) -> Result<()> {
    check_pid_file(path, paths)?;
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(failed("write the pid file", path)(Errno::ISDIR));
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = fs::open(directory, flags, Mode::empty()).map_err(failed("write the pid file", path))?;
    dir::replace_file(directory, name, format!("{pid}\n").as_bytes())
        .map_err(failed("write the pid file", path))
}

/// Refuses what is at the place of a pid file and is none. An empty one may be what a power failure left of a pid
/// file, where nothing else has its place: at the default of the cache.
///
/// # Errors
///
/// As [`write_pid_file`], but for the directory.
pub fn check_pid_file(path: &Path, paths: &Paths) -> Result<()> {
    let Some(file) = open_pid_file(path)? else { return Ok(()) };
    match pid_in(file, path)? {
        None if path != paths.pid_file => Err(left_alone(path, "it is empty, which no pid file is")),
        _ => Ok(()),
    }
}

/// Whether there is what [`remove_pid_file`] would remove, whatever pid is in it.
pub(super) fn is_pid_file(path: &Path) -> bool {
    open_pid_file(path).is_ok_and(|file| file.is_some_and(|file| pid_in(file, path).is_ok()))
}

/// Removes the pid file at `path` where it holds `pid`, or any where `pid` is `None`; `false` where there is
/// none or it holds another one.
///
/// # Errors
///
/// Where there is something that is not a pid file of ours, or it cannot be removed.
pub fn remove_pid_file(path: &Path, pid: Option<i32>) -> Result<bool> {
    let Some(file) = open_pid_file(path)? else { return Ok(false) };
    let found = pid_in(file, path)?;
    if pid.is_some() && found.is_some() && found != pid {
        return Ok(false);
    }
    unlink(path)
}

fn open_pid_file(path: &Path) -> Result<Option<OwnedFd>> {
    let Some(found) = look_at(path)? else { return Ok(None) };
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile || found.st_uid != dir::our_uid() {
        return Err(left_alone(path, "it is no pid file of ours"));
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    fs::open(path, flags, Mode::empty()).map(Some).map_err(failed("open the pid file", path))
}

/// The pid in a pid file; `None` in an empty one.
fn pid_in(file: OwnedFd, path: &Path) -> Result<Option<i32>> {
    const PID_FILE_BYTES_MAX: u64 = 32;
    let mut text = Vec::new();
    File::from(file)
        .take(PID_FILE_BYTES_MAX)
        .read_to_end(&mut text)
        .map_err(|cause| Error::io("read the pid file", path, &cause))?;
    if text.is_empty() {
        return Ok(None);
    }
    let pid = std::str::from_utf8(&text).ok().and_then(|text| text.trim().parse().ok());
    pid.map(Some).ok_or_else(|| left_alone(path, "what it holds is not a pid"))
}

fn remove_record(path: &Path) -> Result<bool> {
    let Some(found) = look_at(path)? else { return Ok(false) };
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile || found.st_uid != dir::our_uid() {
        return Err(left_alone(path, "it is no registration of ours"));
    }
    unlink(path)
}

/// Removes what [`dir::replace_file`] left where it was killed before its rename, and [`dir::try_making`] before it
/// had removed what it made.
fn remove_temporary_files(path: &Path) -> Result<bool> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return Ok(false) };
    let failed = |cause| Error::io("read the directory", directory, &cause);
    let mut any = false;
    let entries = match std::fs::read_dir(directory) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        entries => entries.map_err(failed)?,
    };
    for entry in entries {
        let file = entry.map_err(failed)?.file_name();
        if dir::is_temporary_name(file.as_bytes(), name, "tmp") {
            let left = directory.join(OsStr::new(&file));
            any |= if is_socket_of_ours(&left)? { unlink(&left)? } else { remove_record(&left)? };
        }
    }
    Ok(any)
}

fn is_socket_of_ours(path: &Path) -> Result<bool> {
    let is_one = |found: Stat| {
        FileType::from_raw_mode(found.st_mode) == FileType::Socket && found.st_uid == dir::our_uid()
    };
    Ok(look_at(path)?.is_some_and(is_one))
}

fn look_at(path: &Path) -> Result<Option<Stat>> {
    match fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(errno) => Err(failed("look at", path)(errno)),
    }
}

fn unlink(path: &Path) -> Result<bool> {
    match fs::unlink(path) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(failed("remove", path)(errno)),
    }
}

fn left_alone(path: &Path, why: &str) -> Error {
    Error::new(Kind::Failed, format!("{} is left alone: {why}", shown(path)))
        .hint("move it away, or choose another path")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{BaseDir, Host};
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    fn base() -> (tempfile::TempDir, Paths) {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join("run")).unwrap();
        let paths = BaseDir::for_tests(home.path()).paths(&"n".parse().unwrap());
        (home, paths)
    }

    fn record(paths: &Paths) -> Record {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        Record {
            schema: crate::registry::record::SCHEMA,
            name: "n".to_owned(),
            pid: 4242,
            host: Host::current(),
            socket: text(&paths.socket),
            view: text(&paths.view),
            kept_dirname: None,
            source: "/models/m".to_owned(),
            pid_file: text(&paths.pid_file),
            log_file: text(&paths.log_file),
            created: "2026-01-01T00:00:00Z".to_owned(),
            tool: "0.1.0".to_owned(),
            failed: None,
        }
    }

    fn clean_up(paths: &Paths, record: Option<&Record>, lock: &Lock) -> Vec<String> {
        let mut lines = clean_up_files(paths, record, lock);
        lines.extend(clean_up_registration(paths, lock));
        lines
    }

    #[test]
    fn what_a_killed_daemon_left_goes_and_is_named() {
        let (home, paths) = base();
        let record = record(&paths);
        record.write(&paths.record).unwrap();
        drop(UnixListener::bind(&paths.socket).unwrap());
        write_pid_file(&paths.pid_file, record.pid, &paths).unwrap();
        let run = home.path().join("run");
        std::fs::write(run.join(".n.json.0123456789abcdef.tmp"), "{").unwrap();
        drop(UnixListener::bind(run.join(".n.sock.0123456789abcdef.tmp")).unwrap());
        std::fs::write(run.join(".n.pid.0123456789abcdef.tmp"), "42").unwrap();
        std::fs::write(run.join("quota"), "foreign").unwrap();
        let lock = Lock::try_exclusive(&paths.lock).unwrap().unwrap();
        let lines = clean_up(&paths, Some(&record), &lock);
        assert_eq!(lines.len(), 6, "{lines:?}");
        assert!(lines.iter().all(|line| line.starts_with("removed the")), "{lines:?}");
        let mut left: Vec<_> = std::fs::read_dir(&run).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["n.lock", "quota"]);
        assert_eq!(clean_up(&paths, Some(&record), &lock), [""; 0]);
    }

    #[test]
    fn what_is_not_ours_stays() {
        let (home, paths) = base();
        let precious = home.path().join("precious");
        std::fs::write(&precious, "words").unwrap();
        std::fs::write(&paths.socket, "words").unwrap();
        symlink(&precious, &paths.pid_file).unwrap();
        symlink(&precious, &paths.record).unwrap();
        let lock = Lock::try_exclusive(&paths.lock).unwrap().unwrap();
        let lines = clean_up(&paths, None, &lock);
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines.iter().all(|line| line.contains("is left alone")), "{lines:?}");
        assert_eq!(std::fs::read(&precious).unwrap(), b"words");
        assert!(paths.socket.exists() && paths.pid_file.is_symlink() && paths.record.is_symlink());
    }

    #[test]
    fn a_socket_that_somebody_listens_on_stays() {
        let (_home, paths) = base();
        let listener = UnixListener::bind(&paths.socket).unwrap();
        assert_eq!(remove_socket(&paths.socket).unwrap_err().kind(), Kind::InUse);
        drop(listener);
        assert!(remove_socket(&paths.socket).unwrap());
        assert!(!remove_socket(&paths.socket).unwrap());
    }

    #[test]
    fn a_pid_file_is_told_from_other_files() {
        let (home, paths) = base();
        write_pid_file(&paths.pid_file, 7, &paths).unwrap();
        write_pid_file(&paths.pid_file, 8, &paths).unwrap();
        assert_eq!(std::fs::read_to_string(&paths.pid_file).unwrap(), "8\n");
        assert!(!remove_pid_file(&paths.pid_file, Some(7)).unwrap(), "another daemon's");
        assert!(remove_pid_file(&paths.pid_file, Some(8)).unwrap());
        let letter = home.path().join("letter.txt");
        std::fs::write(&letter, "dear all").unwrap();
        assert!(write_pid_file(&letter, 7, &paths).unwrap_err().message().contains("not a pid"));
        assert!(remove_pid_file(&letter, None).is_err());
        assert_eq!(std::fs::read(&letter).unwrap(), b"dear all");
        let link = home.path().join("link.pid");
        symlink(&letter, &link).unwrap();
        assert!(write_pid_file(&link, 7, &paths).is_err());
        for (empty, is_taken) in [(&letter, false), (&paths.pid_file, true)] {
            std::fs::write(empty, "").unwrap();
            assert_eq!(write_pid_file(empty, 7, &paths).is_ok(), is_taken);
        }
    }
}
