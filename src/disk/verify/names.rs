//! What stands in a generation: names, lengths and times, without reading a file.

use std::collections::{BTreeMap, HashSet};
use std::fs::{FileType, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

use super::super::{format, sums};
use super::{Finding, Present, Report, Watch, cancelled};
use crate::error::{Error, Result, reason, shown};
use crate::manifest::{FileEntry, Manifest};
use crate::source::{Identity, SelectedFile};

fn check_cancelled(watch: &dyn Watch) -> Result<()> {
    match watch.cancelled() {
        true => Err(cancelled()),
        false => Ok(()),
    }
}

/// Looks at each file of the manifest. Gives those that are there with the right length; the others are told to `watch`
/// as done.
pub(super) fn look_at_files<'a>(
    root: &Path,
    manifest: &'a Manifest,
    watch: &dyn Watch,
    report: &mut Report,
) -> Result<Vec<Present<'a>>> {
    let mut present = Vec::with_capacity(manifest.files.len());
    for entry in manifest.files.iter().filter(|entry| !entry.passthrough) {
        check_cancelled(watch)?;
        report.files += 1;
        let real = root.join(&entry.path);
        match look_at_file(entry, std::fs::symlink_metadata(&real), &mut report.findings) {
            Some(identity) => {
                let file = SelectedFile { path: entry.path.clone(), real, identity, passthrough: false };
                present.push(Present { entry, file });
            }
            None => watch.finished_file(),
        }
    }
    Ok(present)
}

/// What one file is, where it is worth reading.
fn look_at_file(
    entry: &FileEntry,
    metadata: io::Result<Metadata>,
    findings: &mut Vec<Finding>,
) -> Option<Identity> {
    let mut found = |what, detail: String| findings.push(Finding::new(&entry.path, what, detail));
    let metadata = match metadata {
        Ok(metadata) if metadata.is_file() => metadata,
        Ok(metadata) => {
            found("bad", format!("{} stands in its place", in_words(metadata.file_type())));
            return None;
        }
        Err(cause) if matches!(cause.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            found("missing", "there is no such file".to_owned());
            return None;
        }
        Err(cause) => {
            found("bad", format!("it cannot be examined: {}", reason(&cause)));
            return None;
        }
    };
    let now = Identity::of(&metadata);
    // A file system may keep whole seconds only, and gave it an inode of its own.
    let noted =
        Identity::of_entry(entry).map(|noted| Identity { inode: now.inode, bytes: now.bytes, ..noted });
    if !noted.is_some_and(|noted| noted.is_unchanged(&now)) {
        found("mtime", format!("it was modified at {}, not at {}", now.mtime_rfc3339(), shown(&entry.mtime)));
    }
    if now.bytes != entry.bytes {
        found("size", format!("it has {} bytes, not {}", now.bytes, entry.bytes));
        return None;
    }
    Some(now)
}

/// Looks for what the manifest does not know, and at the links to directories.
pub(super) fn look_around(
    root: &Path,
    manifest: &Manifest,
    watch: &dyn Watch,
    findings: &mut Vec<Finding>,
) -> Result<()> {
    let known = Known::of(manifest);
    let mut directories = vec![String::new()];
    let mut links_left = known.links.clone();
    while let Some(directory) = directories.pop() {
        check_cancelled(watch)?;
        let at = root.join(&directory);
        let entries = std::fs::read_dir(&at).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
        let entries = match entries {
            Ok(entries) => entries,
            Err(cause) if directory.is_empty() => return Err(Error::io("read the directory", root, &cause)),
            Err(cause) => {
                let detail = format!("the directory cannot be read: {}", reason(&cause));
                findings.push(Finding::new(&directory, "bad", detail));
                continue;
            }
        };
        for entry in entries {
            let name = entry.file_name();
            let path = match directory.is_empty() {
                true => name.to_string_lossy().into_owned(),
                false => format!("{directory}/{}", name.to_string_lossy()),
            };
            // What has no name in UTF-8 is in no manifest, whatever it looks like.
            let is_known = name.to_str().is_some();
            let file_type = match entry.file_type() {
                Ok(file_type) => file_type,
                // It went away meanwhile: who misses it says so.
                Err(_) => continue,
            };
            if is_known && file_type.is_dir() && known.directories.contains(path.as_str()) {
                directories.push(path);
            } else if is_known && let Some(target) = known.links.get(path.as_str()) {
                links_left.remove(path.as_str());
                findings.extend(look_at_link(&path, file_type, &entry.path(), target));
            } else if is_known && known.directories.contains(path.as_str()) {
                let detail = format!("{} stands where a directory should be", in_words(file_type));
                findings.push(Finding::new(&path, "bad", detail));
            } else if !(is_known && known.others.contains(path.as_str())) {
                let detail = format!("the manifest does not know this {}", plain(file_type));
                findings.push(Finding::new(&path, "extra", detail));
            }
        }
    }
    findings.extend(
        links_left.keys().map(|path| Finding::new(path, "missing", "there is no such link to a directory")),
    );
    Ok(())
}

/// What a generation of a manifest holds, by path.
struct Known<'a> {
    /// With files or links below them.
    directories: HashSet<&'a str>,
    /// Links to directories: where each leads.
    links: BTreeMap<&'a str, &'a str>,
    /// Files, which are looked at elsewhere, and what is ours.
    others: HashSet<&'a str>,
}

impl Known<'_> {
    fn of(manifest: &Manifest) -> Known<'_> {
        let files = manifest.files.iter().filter(|file| !file.passthrough).map(|file| file.path.as_str());
        let links = manifest.directory_links.iter();
        let mut directories = HashSet::new();
        for path in files.clone().chain(links.clone().map(|link| link.path.as_str())) {
            let mut path = path;
            while let Some((parent, _)) = path.rsplit_once('/') {
                if !directories.insert(parent) {
                    break;
                }
                path = parent;
            }
        }
        let mut others: HashSet<&str> = files.collect();
        others.insert(format::OUR_DIRECTORY);
        if sums::is_at_top(manifest) {
            others.insert(format::SUMS_FILE);
        }
        let links = links.map(|link| (link.path.as_str(), link.target.as_str())).collect();
        Known { directories, links, others }
    }
}

pub(in crate::disk) fn look_at_link(
    path: &str,
    file_type: FileType,
    at: &Path,
    target: &str,
) -> Option<Finding> {
    if !file_type.is_symlink() {
        let detail = format!("{} stands where a link to {} should be", in_words(file_type), shown(target));
        return Some(Finding::new(path, "bad", detail));
    }
    let text = match std::fs::read_link(at) {
        Ok(text) => text,
        Err(cause) => {
            let detail = format!("the link cannot be read: {}", reason(&cause));
            return Some(Finding::new(path, "bad", detail));
        }
    };
    let wanted: Vec<&str> = target.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    if leads_to(path, &text) == Some(wanted.iter().collect::<PathBuf>()) {
        return None;
    }
    let detail = format!("the link leads to {}, not to {}", shown(&text), shown(target));
    Some(Finding::new(path, "bad", detail))
}

/// Where in the generation a link at `path` with this text leads, by its words alone. `None`: out of it.
fn leads_to(path: &str, text: &Path) -> Option<PathBuf> {
    let mut to = Path::new(path).parent().unwrap_or(Path::new("")).to_owned();
    for component in text.components() {
        match component {
            Component::Normal(part) => to.push(part),
            Component::CurDir => {}
            Component::ParentDir => {
                if !to.pop() {
                    return None;
                }
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(to)
}

fn plain(file_type: FileType) -> &'static str {
    match file_type {
        _ if file_type.is_file() => "file",
        _ if file_type.is_dir() => "directory",
        _ if file_type.is_symlink() => "link",
        _ if file_type.is_fifo() => "FIFO",
        _ if file_type.is_socket() => "socket",
        _ => "device",
    }
}

fn in_words(file_type: FileType) -> String {
    format!("a {}", plain(file_type))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_by_their_words() {
        let to = |path, text| leads_to(path, Path::new(text)).map(|to| to.display().to_string());
        assert_eq!(to("a/link", "../b/./c").as_deref(), Some("b/c"));
        assert_eq!(to("link", "b").as_deref(), Some("b"));
        assert_eq!(to("a/link", ".."), Some(String::new()));
        assert_eq!(to("a/link", "../../b"), None);
        assert_eq!(to("a/link", "/b"), None);
    }
}
