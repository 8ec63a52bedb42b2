//! The tree inside a view: planned as a whole, built and removed relative to open directories, so that
//! neither the depth nor the number of files makes a path walk per file.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::ViewLink;
use crate::error::{Error, Kind, Result, shown};
use crate::registry::dir::{self, DIRECTORY_MODE, failed};
use crate::source::DirectoryLink;
use crate::sys::crash;

/// Levels of directories: each is one open descriptor while a tree is walked.
pub(super) const DEPTH_MAX: usize = 128;

/// Mode of a published directory: loaders that write beside the weights are refused.
const PUBLISHED_MODE: Mode = Mode::from_raw_mode(0o555);

/// One link of a view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    /// Relative to the view, the kept directory name included.
    path: String,
    target: OsString,
}

/// Everything that a view will hold, sorted so that each directory's entries stand together.
///
/// # Errors
///
/// Where a path leaves the view, stands twice, or is both a file and a directory.
pub(super) fn plan(
    kept_dirname: Option<&str>,
    links: &[ViewLink],
    directory_links: &[DirectoryLink],
) -> Result<Vec<Planned>> {
    let under = |path: &str| match kept_dirname {
        Some(kept) => format!("{kept}/{path}"),
        None => path.to_owned(),
    };
    let files = links
        .iter()
        .map(|link| Planned { path: under(&link.path), target: link.target.as_os_str().to_owned() });
    let directories = directory_links
        .iter()
        .map(|link| Planned { path: under(&link.path), target: relative(&link.path, &link.target).into() });
    let mut planned: Vec<Planned> = files.chain(directories).collect();
    planned.sort_by(|a, b| a.path.split('/').cmp(b.path.split('/')));
    for entry in &planned {
        check(entry)?;
    }
    for pair in planned.windows(2) {
        let (first, second) = (&pair[0].path, &pair[1].path);
        if second.strip_prefix(first.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
            return Err(unfit(second, &format!("{} stands there already", shown(first))));
        }
    }
    if planned.is_empty() {
        return Err(Error::new(Kind::Failed, "a view of no files cannot be published"));
    }
    Ok(planned)
}

fn check(entry: &Planned) -> Result<()> {
    let path = &entry.path;
    if path.split('/').any(|part| matches!(part, "" | "." | "..")) || path.contains('\0') {
        return Err(unfit(path, "it leads out of the view"));
    }
    if path.split('/').count() > DEPTH_MAX {
        return Err(unfit(path, &format!("more than {DEPTH_MAX} levels")));
    }
    if entry.target.is_empty() || entry.target.as_bytes().contains(&0) {
        return Err(unfit(path, "its link would lead nowhere"));
    }
    Ok(())
}

fn unfit(path: &str, why: &str) -> Error {
    Error::new(Kind::Failed, format!("{} cannot be in a view: {why}", shown(path)))
}

/// The text of a link at `link` that leads to `target`, both relative to one directory.
fn relative(link: &str, target: &str) -> String {
    let target: Vec<&str> = target.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    let parents: Vec<&str> = link.split('/').collect();
    let parents = &parents[..parents.len() - 1];
    let common = parents.iter().zip(&target).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n("..", parents.len() - common);
    let text = up.chain(target[common..].iter().copied()).collect::<Vec<_>>().join("/");
    if text.is_empty() { ".".to_owned() } else { text }
}

/// Fills the empty directory `top`; every directory is sealed against writing as soon as it is complete,
/// `top` last. `at` is for messages.
pub(super) fn build(top: &OwnedFd, planned: &[Planned], at: &Path) -> Result<()> {
    let failed = |what: &str, path: &str, errno| failed(what, &at.join(path))(errno);
    let mut open: Vec<(&str, OwnedFd)> = Vec::new();
    for entry in planned {
        let mut parents: Vec<&str> = entry.path.split('/').collect();
        let name = parents.pop().expect("split gives one part at least");
        let common = open.iter().zip(&parents).take_while(|((open, _), part)| open == *part).count();
        while open.len() > common {
            let (_, complete) = open.pop().expect("it is longer than `common`");
            fs::fchmod(&complete, PUBLISHED_MODE)
                .map_err(|errno| failed("protect a directory before", &entry.path, errno))?;
        }
        for part in &parents[common..] {
            let parent = open.last().map_or(top, |(_, directory)| directory);
            let made = dir::make_directory(parent, OsStr::new(part))
                .map_err(|errno| failed("create the directory of", &entry.path, errno))?;
            open.push((part, made));
        }
        let parent = open.last().map_or(top, |(_, directory)| directory);
        fs::symlinkat(entry.target.as_os_str(), parent, name)
            .map_err(|errno| failed("create the link", &entry.path, errno))?;
        crash::point("view-link-made");
    }
    while let Some((name, complete)) = open.pop() {
        fs::fchmod(&complete, PUBLISHED_MODE)
            .map_err(|errno| failed("protect the directory", name, errno))?;
    }
    fs::fchmod(top, PUBLISHED_MODE).map_err(|errno| failed("protect the directory", "", errno))
}

/// What of a tree may be removed.
pub(super) enum Ours<'a> {
    /// Every link and every directory: the tree was found to be a dead view, or stands under a name that
    /// only we use.
    AnyLink,
    /// Exactly what was planned, so that a stranger's link or directory stays.
    Exactly { links: HashMap<&'a str, &'a OsStr>, directories: HashSet<&'a str> },
}

impl<'a> Ours<'a> {
    pub(super) fn exactly(planned: &'a [Planned]) -> Ours<'a> {
        let links = planned.iter().map(|entry| (entry.path.as_str(), entry.target.as_os_str())).collect();
        let mut directories = HashSet::new();
        for entry in planned {
            let mut path = entry.path.as_str();
            while let Some((parent, _)) = path.rsplit_once('/') {
                if !directories.insert(parent) {
                    break;
                }
                path = parent;
            }
        }
        Ours::Exactly { links, directories }
    }

    fn has_link(&self, path: &[u8], target: impl FnOnce() -> Option<OsString>) -> bool {
        match self {
            Ours::AnyLink => true,
            Ours::Exactly { links, .. } => std::str::from_utf8(path)
                .ok()
                .and_then(|path| links.get(path))
                .is_some_and(|planned| target().is_some_and(|found| found == *planned)),
        }
    }

    fn has_directory(&self, path: &[u8]) -> bool {
        match self {
            Ours::AnyLink => true,
            Ours::Exactly { directories, .. } => {
                std::str::from_utf8(path).is_ok_and(|path| directories.contains(path))
            }
        }
    }
}

/// Empties the directory `top` of what is ours and returns what stays, relative to it, sorted, each in
/// the form for messages, a directory with a final `/`. Nothing is followed, and what is strange is
/// neither changed nor entered.
pub(super) fn clear(top: &OwnedFd, ours: &Ours<'_>) -> Vec<String> {
    let mut strange = Vec::new();
    clear_directory(top, &mut Vec::new(), 0, ours, &mut strange);
    strange.sort();
    strange
}

/// Returns whether `directory` is empty now.
fn clear_directory(
    directory: &OwnedFd,
    path: &mut Vec<u8>,
    depth: usize,
    ours: &Ours<'_>,
    strange: &mut Vec<String>,
) -> bool {
    // The owner of a 0555 directory cannot unlink in it. Where this fails, the unlinks do, and are told.
    let _ = fs::fchmod(directory, DIRECTORY_MODE);
    let Ok(entries) = entries(directory) else {
        strange.push(told(path, true));
        return false;
    };
    let mut is_empty = true;
    for (name, kind) in entries {
        let length = path.len();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name.as_bytes());
        is_empty &= clear_entry(directory, &name, kind, path, depth, ours, strange);
        path.truncate(length);
    }
    is_empty
}

/// Returns whether the entry is gone.
fn clear_entry(
    directory: &OwnedFd,
    name: &OsStr,
    kind: FileType,
    path: &mut Vec<u8>,
    depth: usize,
    ours: &Ours<'_>,
    strange: &mut Vec<String>,
) -> bool {
    let removed = match kind {
        FileType::Symlink if ours.has_link(path, || read_link(directory, name)) => {
            fs::unlinkat(directory, name, AtFlags::empty())
        }
        FileType::Directory if depth < DEPTH_MAX && ours.has_directory(path) => {
            match dir::open_directory(directory, name) {
                // What is inside has been told.
                Ok(inside) if !clear_directory(&inside, path, depth + 1, ours, strange) => return false,
                Ok(_) => fs::unlinkat(directory, name, AtFlags::REMOVEDIR),
                Err(errno) => Err(errno),
            }
        }
        _ => Err(Errno::PERM),
    };
    let is_gone = matches!(removed, Ok(()) | Err(Errno::NOENT));
    if !is_gone {
        strange.push(told(path, kind == FileType::Directory));
    }
    is_gone
}

fn told(path: &[u8], is_directory: bool) -> String {
    let mut path = path.to_vec();
    if is_directory {
        path.push(b'/');
    }
    shown(OsStr::from_bytes(&path))
}

pub(super) fn read_link(directory: &OwnedFd, name: &OsStr) -> Option<OsString> {
    let target = fs::readlinkat(directory, name, Vec::new()).ok()?;
    Some(OsString::from_vec(target.into_bytes()))
}

/// The names in a directory with their types.
pub(super) fn entries(directory: &OwnedFd) -> rustix::io::Result<Vec<(OsString, FileType)>> {
    let mut found = Vec::new();
    for_each_entry(directory, |name, kind| {
        found.push((name.to_owned(), kind));
        true
    })?;
    Ok(found)
}

/// Visits the names in a directory with their types until `visit` returns `false`.
pub(super) fn for_each_entry(
    directory: &OwnedFd,
    mut visit: impl FnMut(&OsStr, FileType) -> bool,
) -> rustix::io::Result<()> {
    // A descriptor of its own: a second walk begins at the start.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let stream = Dir::new(fs::openat(directory.as_fd(), ".", flags, Mode::empty())?)?;
    for entry in stream {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => {
                let found = fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
                FileType::from_raw_mode(found.st_mode)
            }
            kind => kind,
        };
        if !visit(name, kind) {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(path: &str) -> ViewLink {
        ViewLink { path: path.to_owned(), target: "/proc/1/fd/2".into() }
    }

    #[test]
    fn directory_links_are_relative_to_where_they_stand() {
        for (at, target, text) in [
            ("link", "a", "a"),
            ("link", "a/b", "a/b"),
            ("x/link", "a", "../a"),
            ("a/link", "a/b", "b"),
            ("a/b/link", "a/c/d", "../c/d"),
            ("a/link", "a", "."),
            ("a/link", "", ".."),
            ("link", "", "."),
        ] {
            assert_eq!(relative(at, target), text, "{at} to {target}");
        }
    }

    #[test]
    fn a_plan_keeps_each_directory_together() {
        let planned = plan(Some("kept"), &[link("b/x"), link("b.txt"), link("b/a"), link("a")], &[]).unwrap();
        let paths: Vec<_> = planned.iter().map(|entry| entry.path.as_str()).collect();
        assert_eq!(paths, ["kept/a", "kept/b/a", "kept/b/x", "kept/b.txt"]);
    }

    #[test]
    fn what_leads_out_of_the_view_or_stands_twice_is_refused() {
        for path in ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\0"] {
            assert!(plan(None, &[link(path)], &[]).is_err(), "{path:?}");
        }
        assert!(plan(Some(".."), &[link("a")], &[]).is_err());
        assert!(plan(None, &[link("a"), link("a")], &[]).is_err());
        assert!(plan(None, &[link("a"), link("a/b")], &[]).is_err());
        let directory = DirectoryLink { path: "a".to_owned(), target: "b".to_owned() };
        assert!(plan(None, &[link("a/x"), link("b/x")], &[directory]).is_err());
        plan(None, &[link("a"), link("a.b"), link("a-b/c")], &[]).unwrap();
        assert!(plan(None, &[], &[]).is_err());
        let deep = vec!["d"; DEPTH_MAX + 1].join("/");
        assert!(plan(None, &[link(&deep)], &[]).unwrap_err().message().contains("128 levels"));
        let nowhere = ViewLink { path: "a".to_owned(), target: "".into() };
        assert!(plan(None, &[nowhere], &[]).is_err());
    }
}
