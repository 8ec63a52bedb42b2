//! What dead daemons left in BASE, found without changing anything: for `gc`, which shows it before it goes.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::cleanup::is_pid_file;
use super::dir::{is_temporary_name, temporary_stem};
use super::{BaseDir, Name, Paths, Record, is_dead_socket};
use crate::error::{Error, Result};

/// Ends of names in BASE/run, each behind a cache's name.
const ENDS: [&str; 4] = [".json", ".lock", ".sock", ".pid"];

/// Ends of half-made and half-removed views, see `view`.
const VIEW_ENDS: [&str; 2] = ["new", "old"];

/// Every name that something in BASE is called by: a living cache, a dead one, or pieces of one.
///
/// # Errors
///
/// Where BASE/run or BASE/views exists and cannot be read.
pub fn names_in_use(base: &BaseDir) -> Result<Vec<Name>> {
    let mut names = BTreeSet::new();
    let mut add = |name: &[u8]| {
        let name = std::str::from_utf8(name).ok().and_then(|name| name.parse::<Name>().ok());
        names.extend(name);
    };
    for file in entries(&base.run_dir())? {
        let file = file.as_bytes();
        ENDS.iter().filter_map(|end| file.strip_suffix(end.as_bytes())).for_each(&mut add);
        if let Some(name) = temporary_stem(file, "tmp").and_then(|stem| stem.strip_suffix(b".json")) {
            add(name);
        }
    }
    for file in entries(&base.views_dir())? {
        let file = file.as_bytes();
        add(file);
        VIEW_ENDS.iter().filter_map(|end| temporary_stem(file, end)).for_each(&mut add);
    }
    Ok(names.into_iter().collect())
}

/// The files of a dead daemon that are there: socket, pid file, registration with its half-written ones, lock.
/// `record` is what is registered, where it can be read.
///
/// # Errors
///
/// Where BASE/run cannot be read.
pub fn left_files(paths: &Paths, record: Option<&Record>) -> Result<Vec<PathBuf>> {
    let socket = record.map_or(paths.socket.as_path(), |record| Path::new(&record.socket));
    let pid_file = record.map_or(paths.pid_file.as_path(), |record| Path::new(&record.pid_file));
    let is_there = |path: &Path| std::fs::symlink_metadata(path).is_ok();
    let mut left: Vec<PathBuf> = Vec::new();
    // One that somebody listens on is another cache's, started with --socket.
    left.extend(is_dead_socket(socket).is_ok_and(|is_dead| is_dead).then(|| socket.to_owned()));
    left.extend(is_pid_file(pid_file).then(|| pid_file.to_owned()));
    left.extend([&paths.record, &paths.lock].into_iter().filter(|path| is_there(path)).cloned());
    if let (Some(run), Some(name)) = (paths.record.parent(), paths.record.file_name()) {
        let files = entries(run)?;
        let half_written = files.iter().filter(|file| is_temporary_name(file.as_bytes(), name, "tmp"));
        left.extend(half_written.map(|file| run.join(file)));
    }
    Ok(left)
}

/// The sorted names in a directory; none where it does not exist.
fn entries(directory: &Path) -> Result<BTreeSet<std::ffi::OsString>> {
    let failed = |cause| Error::io("read the directory", directory, &cause);
    match std::fs::read_dir(directory) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(cause) => Err(failed(cause)),
        Ok(entries) => entries.map(|entry| entry.map(|entry| entry.file_name()).map_err(failed)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::BaseDir;

    #[test]
    fn every_piece_tells_its_name_and_foreign_files_tell_none() {
        let home = tempfile::tempdir().unwrap();
        let base = BaseDir::for_tests(home.path());
        assert_eq!(names_in_use(&base).unwrap(), [], "nothing is there yet");
        for directory in [base.run_dir(), base.views_dir()] {
            std::fs::create_dir(directory).unwrap();
        }
        for file in
            ["a.json", "b.lock", "c.sock", "d.pid", ".e.json.0123456789abcdef.tmp", "quota", ".x", "-.json"]
        {
            std::fs::write(base.run_dir().join(file), "").unwrap();
        }
        for file in
            ["f", ".g.0123456789abcdef.new", ".h.0123456789abcdef.old", ".i.0123456789abcde.old", "two words"]
        {
            std::fs::create_dir(base.views_dir().join(file)).unwrap();
        }
        let names: Vec<String> = names_in_use(&base).unwrap().iter().map(Name::to_string).collect();
        assert_eq!(names, ["a", "b", "c", "d", "e", "f", "g", "h"]);
        let left = |name: &str| left_files(&base.paths(&name.parse().unwrap()), None).unwrap();
        assert_eq!(left("e"), [base.run_dir().join(".e.json.0123456789abcdef.tmp")]);
        assert_eq!(left("c"), [""; 0].map(PathBuf::from), "no socket, whatever it is");
        std::fs::remove_file(base.run_dir().join("c.sock")).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(base.run_dir().join("c.sock")).unwrap();
        assert_eq!(left("c"), [""; 0].map(PathBuf::from), "somebody listens");
        drop(listener);
        assert_eq!(left("c"), [base.run_dir().join("c.sock")]);
        assert_eq!(left("f"), [""; 0].map(PathBuf::from));
    }
}
