//! What is there already: files of other generations and of interrupted copies, found by what they are copies of.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::manifest::{Digest, FileEntry};
use crate::source::{Identity, SelectedFile};

/// Files on disk that are copies, each with what it is a copy of.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    copies: HashMap<Key, Vec<Copy>>,
}

/// What must be the same in every case.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    inode: u64,
    bytes: u64,
    mtime_seconds: i64,
    mtime_nanoseconds: u32,
}

impl Key {
    fn of(identity: &Identity) -> Key {
        Key {
            inode: identity.inode,
            bytes: identity.bytes,
            mtime_seconds: identity.mtime_seconds,
            mtime_nanoseconds: identity.mtime_nanoseconds,
        }
    }
}

#[derive(Debug)]
struct Copy {
    /// Where the generation is, and the file in it.
    directory: Rc<Path>,
    path: String,
    /// Of what: a device keeps its number while it is mounted, a path stands for it after that.
    device: u64,
    source: Rc<str>,
    digest: Digest,
}

impl Shelf {
    /// Puts the files of a generation on it, or those that an interrupted copy has finished.
    pub(super) fn add(&mut self, directory: &Path, source: &str, files: &[FileEntry]) {
        let (directory, source): (Rc<Path>, Rc<str>) = (directory.into(), source.into());
        for file in files {
            let (Some(identity), Some(digest)) = (Identity::of_entry(file), file.sha256) else { continue };
            self.copies.entry(Key::of(&identity)).or_default().push(Copy {
                directory: Rc::clone(&directory),
                path: file.path.clone(),
                device: file.device,
                source: Rc::clone(&source),
                digest,
            });
        }
    }

    /// The copies of a file of the source at `root`: those that were put on it first come first.
    pub(super) fn find(&self, root: &Path, file: &SelectedFile) -> impl Iterator<Item = (PathBuf, Digest)> {
        let copies = self.copies.get(&Key::of(&file.identity)).map_or(&[][..], Vec::as_slice);
        let is_of_it = move |copy: &&Copy| {
            copy.device == file.identity.device
                || (Path::new(&*copy.source) == root && copy.path == file.path)
        };
        copies.iter().filter(is_of_it).map(|copy| (copy.directory.join(&copy.path), copy.digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_found_by_what_it_is_of() {
        let identity = Identity { device: 1, inode: 2, bytes: 3, mtime_seconds: 4, mtime_nanoseconds: 5 };
        let file = SelectedFile { path: "f".into(), real: "/m/f".into(), identity, passthrough: false };
        let digest = Digest([7; 32]);
        let mut shelf = Shelf::default();
        shelf.add(Path::new("/r/m@1"), "/m", &[FileEntry { sha256: Some(digest), ..FileEntry::from(&file) }]);
        let found = |root: &str, file: &SelectedFile| shelf.find(Path::new(root), file).collect::<Vec<_>>();
        let copy = vec![(PathBuf::from("/r/m@1/f"), digest)];
        assert_eq!(found("/m", &file), copy);
        // By another path of the same file.
        assert_eq!(found("/n", &SelectedFile { path: "g".into(), ..file.clone() }), copy);
        // The file system was mounted again, under another number.
        let elsewhere = SelectedFile { identity: Identity { device: 9, ..identity }, ..file.clone() };
        assert_eq!(found("/m", &elsewhere), copy);
        assert_eq!(found("/n", &elsewhere), []);
        for other in [
            Identity { bytes: 4, ..identity },
            Identity { inode: 3, ..identity },
            Identity { mtime_nanoseconds: 6, ..identity },
        ] {
            assert_eq!(found("/m", &SelectedFile { identity: other, ..file.clone() }), []);
        }
    }
}
