//! The manifest of a generation, read as something that anybody may have written: sizes are limited, an unknown
//! version is refused, and no path leads out of the generation.

use std::collections::{BTreeSet, HashMap, HashSet};

use jiff::Timestamp;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::format::OUR_DIRECTORY;
use crate::error::{Error, Kind, Result, shown};
use crate::manifest::{Digest, FileEntry, Manifest, SCHEMA};
use crate::registry::Name;
use crate::source::Identity;
use crate::source::select::FILES_MAX;

/// The longest manifest that is read. One of as many files as a selection may have, with long paths, is shorter.
pub const MANIFEST_BYTES_MAX: u64 = 256 << 20;

/// The longest path in a manifest, as the kernel's own limit.
const PATH_BYTES_MAX: usize = 4095;

/// The longest part of a path: what file systems allow.
const PART_BYTES_MAX: usize = 255;

/// Messages show no more of a path than this.
const SHOWN_BYTES_MAX: usize = 120;

/// Why there is no manifest to be had.
#[derive(Debug)]
pub enum Fault {
    /// It is of a version that this program does not know.
    Version(Error),
    /// It is none, or one that nobody of ours writes.
    Damaged(Error),
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Error {
        match fault {
            Fault::Version(error) | Fault::Damaged(error) => error,
        }
    }
}

/// Reads a manifest and checks it.
///
/// # Errors
///
/// [`Kind::Verification`] either way.
pub fn parse(bytes: &[u8]) -> std::result::Result<Manifest, Fault> {
    #[derive(Deserialize)]
    struct Probe {
        schema: u64,
    }
    if bytes.len() as u64 > MANIFEST_BYTES_MAX {
        return Err(Fault::Damaged(too_long(bytes.len() as u64)));
    }
    // Of another version only this field is known.
    let probe: Probe = serde_json::from_slice(bytes).map_err(|cause| Fault::Damaged(no_json(&cause)))?;
    if probe.schema != u64::from(SCHEMA) {
        return Err(Fault::Version(other_version(probe.schema)));
    }
    let manifest: Manifest =
        serde_json::from_slice(bytes).map_err(|cause| Fault::Damaged(no_json(&cause)))?;
    check(&manifest).map_err(Fault::Damaged)?;
    Ok(manifest)
}

/// What `SHA256SUMS` says of a manifest file with these bytes.
pub fn digest(bytes: &[u8]) -> Digest {
    Digest(Sha256::digest(bytes).into())
}

/// The bytes of a manifest file, ending in a line break.
///
/// # Errors
///
/// Where [`parse`] would refuse them.
pub fn encode(manifest: &Manifest) -> Result<Vec<u8>> {
    check(manifest)?;
    let mut bytes = serde_json::to_vec_pretty(manifest)
        .map_err(|cause| Error::new(Kind::Failed, format!("cannot write the manifest: {cause}")))?;
    bytes.push(b'\n');
    if bytes.len() as u64 > MANIFEST_BYTES_MAX {
        return Err(too_long(bytes.len() as u64));
    }
    Ok(bytes)
}

/// The error for a manifest longer than [`MANIFEST_BYTES_MAX`].
pub(super) fn too_long(bytes: u64) -> Error {
    damaged(format!("it has {bytes} bytes, and {MANIFEST_BYTES_MAX} are the most"))
}

fn no_json(cause: &serde_json::Error) -> Error {
    // The library's text quotes what it found, at any length.
    let mut text = cause.to_string().replace(char::is_control, " ");
    if text.chars().count() > SHOWN_BYTES_MAX {
        text = format!("{}…", text.chars().take(SHOWN_BYTES_MAX).collect::<String>());
    }
    damaged(format!("it is no manifest: {text}"))
}

fn other_version(schema: u64) -> Error {
    let why = format!("its manifest is of version {schema}, and this program knows version {SCHEMA} only");
    Error::new(Kind::Verification, why)
        .hint("use the version of iloader that wrote it, or another --cache-name or --cache-root")
}

fn damaged(why: String) -> Error {
    Error::new(Kind::Verification, format!("its manifest is damaged: {why}"))
        .hint("make a new generation with 'iloader cache', and remove this one with 'iloader cache-remove'")
}

/// A path in a message: at most a line of it.
pub(super) fn brief(path: &str) -> String {
    if path.len() <= SHOWN_BYTES_MAX {
        return shown(path);
    }
    let end = (0..=SHOWN_BYTES_MAX).rev().find(|end| path.is_char_boundary(*end)).unwrap_or(0);
    // Escapes make it longer again.
    shown(&path[..end]).chars().take(SHOWN_BYTES_MAX).chain("…".chars()).collect()
}

/// Whether a path of a manifest stays inside: relative, of plain parts, and none of our own files. Else why not.
pub(super) fn check_path(path: &str) -> std::result::Result<(), &'static str> {
    if path.is_empty() {
        return Err("is empty");
    }
    if path.len() > PATH_BYTES_MAX {
        return Err("is longer than a path can be");
    }
    if path.starts_with('/') {
        return Err("is absolute");
    }
    if path.contains('\0') {
        return Err("holds a zero byte");
    }
    for part in path.split('/') {
        match part {
            "" => return Err("has an empty part"),
            "." | ".." => return Err("leads elsewhere"),
            part if part.len() > PART_BYTES_MAX => return Err("has a part that is too long"),
            _ => {}
        }
    }
    match path.split('/').next() {
        Some(OUR_DIRECTORY) => Err("is in the directory of iloader's own files"),
        _ => Ok(()),
    }
}

/// Checks what a manifest says of a generation. What it returns on success can be joined to the generation's path
/// without leading out of it.
pub(super) fn check(manifest: &Manifest) -> Result<()> {
    let Manifest { schema, name, source, files, created, .. } = manifest;
    if *schema != SCHEMA {
        return Err(other_version(u64::from(*schema)));
    }
    if name.parse::<Name>().is_err() {
        return Err(damaged(format!("{} is no name", brief(name))));
    }
    if !source.starts_with('/') || source.contains('\0') {
        return Err(damaged(format!("the source {} is no absolute path", brief(source))));
    }
    if created.parse::<Timestamp>().is_err() {
        return Err(damaged(format!("{} is no time", brief(created))));
    }
    if files.is_empty() || files.len() > FILES_MAX {
        return Err(damaged(format!("it names {} files, and 1 to {FILES_MAX} are possible", files.len())));
    }
    files.iter().try_for_each(check_file)?;
    if let Some(pair) = files.windows(2).find(|pair| pair[0].path >= pair[1].path) {
        return Err(damaged(match pair[0].path == pair[1].path {
            true => format!("it names {} twice", brief(&pair[0].path)),
            false => format!("{} is out of order", brief(&pair[1].path)),
        }));
    }
    check_links(manifest)?;
    check_parents(manifest)?;
    check_bytes(manifest)
}

fn check_file(file: &FileEntry) -> Result<()> {
    check_path(&file.path).map_err(|why| damaged(format!("the path {} {why}", brief(&file.path))))?;
    if file.sha256.is_none() {
        return Err(damaged(format!("{} has no digest", brief(&file.path))));
    }
    if file.passthrough {
        return Err(damaged(format!(
            "{} is passed through, which no file of a generation is",
            brief(&file.path)
        )));
    }
    if Identity::of_entry(file).is_none() {
        return Err(damaged(format!("the time of {}, {}, is none", brief(&file.path), brief(&file.mtime))));
    }
    Ok(())
}

fn check_links(manifest: &Manifest) -> Result<()> {
    let links = &manifest.directory_links;
    if links.len() > FILES_MAX {
        return Err(damaged(format!("it names {} links, and {FILES_MAX} are possible", links.len())));
    }
    let mut seen = BTreeSet::new();
    for link in links {
        for path in [&link.path, &link.target] {
            check_path(path).map_err(|why| damaged(format!("the path {} {why}", brief(path))))?;
        }
        if !seen.insert(link.path.as_str()) || find_file(manifest, &link.path) {
            return Err(damaged(format!("it names {} twice", brief(&link.path))));
        }
    }
    for link in links {
        let bad =
            |why: &str| damaged(format!("the link {} to {} {why}", brief(&link.path), brief(&link.target)));
        if is_below(&link.path, &link.target) || link.path == link.target {
            return Err(bad("leads to a directory that holds it"));
        }
        let first = format!("{}/", link.target);
        let holds_link = seen.range(first.as_str()..).next().is_some_and(|path| path.starts_with(&first));
        if !holds_link && !holds_files(manifest, &first) {
            return Err(bad("leads to no directory of the selection"));
        }
        if seen.contains(link.target.as_str()) || parents(&link.target).any(|parent| seen.contains(parent)) {
            return Err(bad("leads through another link"));
        }
    }
    Ok(())
}

/// No file or link stands below a file or below a link.
fn check_parents(manifest: &Manifest) -> Result<()> {
    let files = manifest.files.iter().map(|file| file.path.as_str());
    let links = manifest.directory_links.iter().map(|link| link.path.as_str());
    let leaves: HashSet<&str> = files.clone().chain(links.clone()).collect();
    for path in files.chain(links) {
        if let Some(leaf) = parents(path).find(|parent| leaves.contains(parent)) {
            return Err(damaged(format!(
                "{} stands below {}, which is no directory",
                brief(path),
                brief(leaf)
            )));
        }
    }
    Ok(())
}

/// The numbers add up: entries of one inode agree, and each counts once.
fn check_bytes(manifest: &Manifest) -> Result<()> {
    let mut inodes: HashMap<(u64, u64), (u64, &str, Option<Digest>)> = HashMap::new();
    let mut sum: u64 = 0;
    for file in &manifest.files {
        let facts = (file.bytes, file.mtime.as_str(), file.sha256);
        match inodes.insert((file.device, file.inode), facts) {
            None => {
                sum = sum.checked_add(file.bytes).filter(|sum| *sum <= i64::MAX as u64).ok_or_else(|| {
                    damaged("the sizes of its files add up to more than a file system holds".to_owned())
                })?;
            }
            Some(before) if before != facts => {
                return Err(damaged(format!(
                    "{} has the inode of another file, and another size, time or digest",
                    brief(&file.path)
                )));
            }
            Some(_) => {}
        }
    }
    if sum != manifest.bytes {
        return Err(damaged(format!("its files have {sum} bytes, but it says {}", manifest.bytes)));
    }
    Ok(())
}

fn find_file(manifest: &Manifest, path: &str) -> bool {
    manifest.files.binary_search_by(|file| file.path.as_str().cmp(path)).is_ok()
}

/// Whether there are files whose paths start so.
fn holds_files(manifest: &Manifest, first: &str) -> bool {
    let at = manifest.files.partition_point(|file| file.path.as_str() < first);
    manifest.files.get(at).is_some_and(|file| file.path.starts_with(first))
}

fn is_below(path: &str, directory: &str) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.starts_with('/'))
}

/// The directories that a path leads through.
pub(super) fn parents(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(end, _)| &path[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{DirectoryLink, SelectionRules};

    fn file(path: &str, inode: u64) -> FileEntry {
        FileEntry {
            path: path.to_owned(),
            bytes: 5,
            mtime: "2026-01-01T00:00:00.000000001Z".to_owned(),
            device: 1,
            inode,
            sha256: Some(Digest([7; 32])),
            passthrough: false,
        }
    }

    fn link(path: &str, target: &str) -> DirectoryLink {
        DirectoryLink { path: path.to_owned(), target: target.to_owned() }
    }

    /// `a/x` and `a/y` are one inode, `b` leads to `a`.
    fn sound() -> Manifest {
        Manifest {
            schema: SCHEMA,
            name: "m".to_owned(),
            source: "/models/m".to_owned(),
            selection: SelectionRules::default(),
            files: vec![file("a/x", 1), file("a/y", 1), file("config.json", 2)],
            directory_links: vec![link("b", "a")],
            bytes: 10,
            created: "2026-01-01T00:00:00Z".to_owned(),
            tool: "0.1.0".to_owned(),
        }
    }

    fn refused(change: impl FnOnce(&mut Manifest), words: &str) {
        let mut manifest = sound();
        change(&mut manifest);
        let error = encode(&manifest).unwrap_err();
        assert!(error.message().contains(words), "{error}");
        let bytes = serde_json::to_vec(&manifest).unwrap();
        let error = Error::from(parse(&bytes).unwrap_err());
        assert_eq!(error.kind(), Kind::Verification);
        assert!(error.message().contains(words), "{error}");
        assert!(error.message().len() < 500 && !error.message().contains('\n'), "{error}");
        assert!(error.hint_text().is_some());
    }

    #[test]
    fn what_is_written_is_read_back() {
        let manifest = sound();
        let bytes = encode(&manifest).unwrap();
        assert!(bytes.ends_with(b"}\n"));
        assert_eq!(parse(&bytes).unwrap(), manifest);
    }

    #[test]
    fn no_path_leads_out() {
        for (path, why) in [
            ("", "is empty"),
            ("/etc/passwd", "is absolute"),
            ("..", "leads elsewhere"),
            ("a/../../b", "leads elsewhere"),
            ("./a", "leads elsewhere"),
            ("a//b", "has an empty part"),
            ("a/", "has an empty part"),
            ("a\0b", "holds a zero byte"),
            (".iloader", "iloader's own files"),
            (".iloader/lock", "iloader's own files"),
            (&"x".repeat(256), "a part that is too long"),
            (&"x/".repeat(3000), "longer than a path"),
        ] {
            assert_eq!(check_path(path).map_err(|found| found.contains(why)), Err(true), "{path}");
            refused(|manifest| manifest.files[0].path = path.to_owned(), why);
            refused(|manifest| manifest.directory_links[0].path = path.to_owned(), why);
            refused(|manifest| manifest.directory_links[0].target = path.to_owned(), why);
        }
        for fine in ["a", "...", "a/.iloader", "a\nb", "é", ".iloaderx"] {
            assert_eq!(check_path(fine), Ok(()), "{fine}");
        }
    }

    #[test]
    fn links_stay_inside_and_nothing_stands_below_them() {
        refused(
            |manifest| manifest.directory_links[0].target = "missing".to_owned(),
            "no directory of the selection",
        );
        refused(|manifest| manifest.directory_links[0].target = "config.json".to_owned(), "no directory");
        refused(|manifest| manifest.directory_links[0].target = "b".to_owned(), "a directory that holds it");
        refused(|manifest| manifest.directory_links[0] = link("a/up", "a"), "a directory that holds it");
        refused(|manifest| manifest.directory_links[0].path = "config.json".to_owned(), "twice");
        refused(|manifest| manifest.directory_links.push(link("b", "a")), "twice");
        refused(|manifest| manifest.directory_links.push(link("b/c", "a")), "stands below b");
        refused(|manifest| manifest.directory_links.push(link("c", "b")), "no directory of the selection");
        refused(
            |manifest| manifest.directory_links.extend([link("b/c", "a"), link("d", "b")]),
            "through another link",
        );
        refused(
            |manifest| {
                manifest.files.insert(2, file("b/z", 3));
                manifest.bytes = 15;
            },
            "stands below b",
        );
        refused(
            |manifest| {
                manifest.files.insert(1, file("a/x/z", 3));
                manifest.bytes = 15;
            },
            "stands below a/x",
        );
        // A directory that holds nothing but a link.
        let mut manifest = sound();
        manifest.directory_links = vec![link("c", "d"), link("d/e", "a")];
        encode(&manifest).unwrap();
    }

    #[test]
    fn facts_that_cannot_be_are_refused() {
        refused(|manifest| manifest.schema = 7, "version 7");
        refused(|manifest| manifest.name = "a b".to_owned(), "is no name");
        refused(|manifest| manifest.source = "relative".to_owned(), "no absolute path");
        refused(|manifest| manifest.created = "yesterday".to_owned(), "is no time");
        refused(|manifest| manifest.files.clear(), "names 0 files");
        refused(|manifest| manifest.files.swap(0, 2), "out of order");
        refused(|manifest| manifest.files[1].path = "a/x".to_owned(), "twice");
        refused(|manifest| manifest.files[2].sha256 = None, "no digest");
        refused(|manifest| manifest.files[2].passthrough = true, "passed through");
        refused(|manifest| manifest.files[2].mtime = "now".to_owned(), "the time of config.json");
        refused(|manifest| manifest.bytes = 15, "have 10 bytes, but it says 15");
        refused(|manifest| manifest.files[1].sha256 = Some(Digest([8; 32])), "another size, time or digest");
        refused(|manifest| manifest.files[2].bytes = u64::MAX - 2, "more than a file system holds");
    }

    #[test]
    fn another_version_is_told_before_anything_else_is_read() {
        let error = parse(br#"{"schema": 12, "files": "of another kind"}"#).unwrap_err();
        assert!(
            matches!(&error, Fault::Version(error) if error.message().contains("version 12")),
            "{error:?}"
        );
        for bytes in [
            &b""[..],
            b"{}",
            b"[]",
            b"\xff",
            br#"{"schema": "1"}"#,
            br#"{"schema": 1}"#,
            br#"{"schema": -1}"#,
        ] {
            assert!(matches!(parse(bytes), Err(Fault::Damaged(_))), "{bytes:?}");
        }
    }
}
