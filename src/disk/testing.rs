//! Generations made by hand, for tests.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use sha2::Digest as _;

use super::format::{Entry, FINISHED_FILE, LOCK_FILE, MANIFEST_FILE, OUR_DIRECTORY, SUMS_FILE, State};
use super::medium::Disk;
use super::{Generation, Store, journal, manifest, sums};
use crate::manifest::{Digest, DirectoryLink, FileEntry, Manifest, SCHEMA, SelectionRules};
use crate::registry::Name;
use crate::source::Identity;

/// A root in a directory of its own.
pub(crate) struct Root {
    directory: tempfile::TempDir,
    pub(crate) store: Store,
}

impl Root {
    pub(crate) fn new() -> Root {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create(&directory.path().join("root"), false).unwrap();
        Root { directory, store }
    }

    /// Beside the root.
    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn path(&self, inside: &str) -> PathBuf {
        self.store.root().join(inside)
    }

    /// A generation `NAME@N` with files of these contents, whole as its builder leaves it.
    pub(crate) fn add(&self, name: &str, number: u64, files: &[(&str, &[u8])]) -> Generation {
        self.add_linked(name, number, files, &[])
    }

    pub(crate) fn add_linked(
        &self,
        name: &str,
        number: u64,
        files: &[(&str, &[u8])],
        links: &[(&str, &str)],
    ) -> Generation {
        let name: Name = name.parse().unwrap();
        let path = self.store.path_of(&Entry::whole(&name, number));
        std::fs::create_dir_all(path.join(OUR_DIRECTORY)).unwrap();
        let files: BTreeMap<&str, &[u8]> = files.iter().copied().collect();
        let entries: Vec<FileEntry> =
            files.iter().map(|(file, bytes)| add_file(&path, file, bytes)).collect();
        for (link, target) in links {
            symlink(target, path.join(link)).unwrap();
        }
        let links = links
            .iter()
            .map(|(link, target)| DirectoryLink { path: (*link).to_owned(), target: (*target).to_owned() });
        let written = Manifest {
            schema: SCHEMA,
            name: name.to_string(),
            source: "/models/m".to_owned(),
            selection: SelectionRules::default(),
            bytes: entries.iter().map(|entry| entry.bytes).sum(),
            files: entries,
            directory_links: links.collect(),
            created: "2026-01-01T00:00:00Z".to_owned(),
            tool: "0.1.0".to_owned(),
        };
        let ours = path.join(OUR_DIRECTORY);
        std::fs::write(ours.join(LOCK_FILE), "").unwrap();
        let at = if sums::is_at_top(&written) { &path } else { &ours };
        let encoded = manifest::encode(&written).unwrap();
        std::fs::write(at.join(SUMS_FILE), sums::text(&written, manifest::digest(&encoded))).unwrap();
        std::fs::write(ours.join(MANIFEST_FILE), encoded).unwrap();
        self.store.generation(&name, number).unwrap()
    }

    /// What an interrupted copy leaves: one finished file.
    pub(crate) fn add_staging(&self, name: &str, number: u64, bytes: &[u8]) -> PathBuf {
        let entry = Entry::whole(&name.parse().unwrap(), number).in_state(State::Staging);
        let path = self.store.path_of(&entry);
        std::fs::create_dir_all(path.join(OUR_DIRECTORY)).unwrap();
        let entry = add_file(&path, "finished", bytes);
        let file = std::fs::File::create(path.join(OUR_DIRECTORY).join(FINISHED_FILE)).unwrap();
        journal::Writer::begin(&Disk, file, "/models/m").unwrap().add(&entry).unwrap();
        path
    }
}

/// Writes a file with its directories; its entry has the file itself for the source.
fn add_file(top: &Path, file: &str, bytes: &[u8]) -> FileEntry {
    let path = top.join(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    let identity = Identity::of(&std::fs::metadata(&path).unwrap());
    FileEntry {
        path: file.to_owned(),
        bytes: identity.bytes,
        mtime: identity.mtime_rfc3339(),
        device: identity.device,
        inode: identity.inode,
        sha256: Some(Digest(sha2::Sha256::digest(bytes).into())),
        passthrough: false,
    }
}
