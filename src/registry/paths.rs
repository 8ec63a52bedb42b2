//! Where each thing of one cache stands under the runtime root.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::{BaseDir, Name};
use crate::error::{Error, Kind, Result, shown};

/// The longest path of a Unix socket: `sun_path` has 108 bytes, the last of them zero.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The default places of one cache. `start` may be told other ones for socket, pid file, log file and
/// view; lock and record are always here, so that every cache of a BASE is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// The cache.
    pub name: Name,
    /// `BASE/run/NAME.sock`, the control socket.
    pub socket: PathBuf,
    /// `BASE/run/NAME.pid`.
    pub pid_file: PathBuf,
    /// `BASE/logs/NAME.log`.
    pub log_file: PathBuf,
    /// `BASE/run/NAME.lock`, held by whoever starts or is the daemon.
    pub lock: PathBuf,
    /// `BASE/run/NAME.json`, the registration.
    pub record: PathBuf,
    /// `BASE/views/NAME`, the published directory.
    pub view: PathBuf,
}

impl Paths {
    /// `BASE/run`, where the name's lock is.
    pub(super) fn run_dir(&self) -> PathBuf {
        self.lock.parent().map_or_else(PathBuf::new, Path::to_owned)
    }
}

impl BaseDir {
    /// Where the things of the cache `name` stand by default.
    pub fn paths(&self, name: &Name) -> Paths {
        let run = self.run_dir();
        Paths {
            name: name.clone(),
            socket: run.join(format!("{name}.sock")),
            pid_file: run.join(format!("{name}.pid")),
            log_file: self.logs_dir().join(format!("{name}.log")),
            lock: run.join(format!("{name}.lock")),
            record: run.join(format!("{name}.json")),
            view: self.views_dir().join(name),
        }
    }
}

/// Refuses a socket path that the kernel would refuse, before anything is started.
///
/// # Errors
///
/// [`Kind::Usage`] with the length, the limit, and how many characters are left for the name where the
/// path is made of it.
pub fn check_socket_path(socket: &Path, name: &Name) -> Result<()> {
    let bytes = socket.as_os_str().as_bytes().len();
    if bytes <= SOCKET_PATH_BYTES_MAX {
        return Ok(());
    }
    let error = Error::new(
        Kind::Usage,
        format!(
            "the socket path {} has {bytes} bytes, but a Unix socket's path has {SOCKET_PATH_BYTES_MAX} at the most",
            shown(socket)
        ),
    );
    let is_made_of_the_name = socket.file_name().is_some_and(|file| *file == *format!("{name}.sock"));
    if !is_made_of_the_name {
        return Err(error.hint("choose a shorter --socket"));
    }
    let around_the_name = bytes - name.as_str().len();
    let hint = match SOCKET_PATH_BYTES_MAX.checked_sub(around_the_name) {
        None | Some(0) => "no NAME fits there: choose a shorter --base-dir or --socket".to_owned(),
        Some(left) => format!(
            "NAME may have {left} characters there: choose a shorter one, or a shorter --base-dir or --socket"
        ),
    };
    Err(error.hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn each_thing_has_its_place() {
        let paths = BaseDir::for_tests(Path::new("/base")).paths(&name("qwen.v1"));
        assert_eq!(paths.socket, Path::new("/base/run/qwen.v1.sock"));
        assert_eq!(paths.pid_file, Path::new("/base/run/qwen.v1.pid"));
        assert_eq!(paths.log_file, Path::new("/base/logs/qwen.v1.log"));
        assert_eq!(paths.lock, Path::new("/base/run/qwen.v1.lock"));
        assert_eq!(paths.record, Path::new("/base/run/qwen.v1.json"));
        assert_eq!(paths.view, Path::new("/base/views/qwen.v1"));
    }

    #[test]
    fn a_socket_path_of_107_bytes_passes_and_108_does_not() {
        let directory = format!("/{}", "d".repeat(80));
        let fitting = name(&"n".repeat(107 - 81 - 1 - 5));
        let socket = |name: &Name| PathBuf::from(format!("{directory}/{name}.sock"));
        assert_eq!(socket(&fitting).as_os_str().len(), 107);
        check_socket_path(&socket(&fitting), &fitting).unwrap();

        let longer = name(&format!("{fitting}n"));
        let error = check_socket_path(&socket(&longer), &longer).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage);
        assert!(error.message().contains("108 bytes"), "{}", error.message());
        assert!(error.hint_text().unwrap().starts_with("NAME may have 20 characters"));
    }

    #[test]
    fn where_no_name_fits_it_says_so() {
        let directory = format!("/{}", "d".repeat(101));
        let short = name("n");
        let error = check_socket_path(&PathBuf::from(format!("{directory}/n.sock")), &short).unwrap_err();
        assert!(error.hint_text().unwrap().starts_with("no NAME fits there"));
        let explicit = PathBuf::from(format!("{directory}/elsewhere.socket"));
        let error = check_socket_path(&explicit, &short).unwrap_err();
        assert_eq!(error.hint_text(), Some("choose a shorter --socket"));
    }
}
