//! The root that generations stand under: looking up, listing, removing.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{self, Mode, OFlags, Stat};

use super::format::{Entry, State};
use super::generation::Unfit;
use super::{Generation, tree};
use crate::error::{Error, Kind, Result, shown};
use crate::registry::Name;
use crate::registry::dir::{self, failed};

/// A directory of generations.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    is_private: bool,
}

/// A generation that cannot be read, and why.
#[derive(Debug)]
pub struct Unreadable {
    /// Where.
    pub path: PathBuf,
    /// Whose it is.
    pub name: Name,
    /// Its number.
    pub number: u64,
    /// Why: a damaged manifest, another version.
    pub error: Error,
}

/// Something that an interrupted command left: it is no generation, and may be removed.
#[derive(Debug)]
pub struct Leftover {
    /// Where.
    pub path: PathBuf,
    /// The name that it belongs to.
    pub name: Name,
    /// The number that the generation had, or was to have.
    pub number: u64,
    /// What it is, in words.
    pub what: &'static str,
    /// Bytes that it takes, blocks as allocated.
    pub bytes: u64,
    /// Somebody works in it: it is no leftover yet.
    pub is_in_use: bool,
}

/// What a root holds. What is not ours is not in it.
#[derive(Debug, Default)]
pub struct Listing {
    /// Sorted by name and number.
    pub generations: Vec<Generation>,
    /// What looks like one and cannot be read.
    pub unreadable: Vec<Unreadable>,
    /// Staging and half-removed directories.
    pub leftovers: Vec<Leftover>,
}

impl Store {
    /// The root at `root`, which must be a directory. Nothing is written.
    ///
    /// # Errors
    ///
    /// [`Kind::NotFound`] where there is none.
    pub fn open(root: &Path) -> Result<Store> {
        let doing = "open the directory of generations";
        let real = std::fs::canonicalize(root).map_err(|cause| Error::io(doing, root, &cause))?;
        let mut store = Store { root: real, is_private: false };
        let found = fs::fstat(store.open_root()?).map_err(failed("look at", &store.root))?;
        store.is_private = !Mode::from_raw_mode(found.st_mode).intersects(Mode::RWXG | Mode::RWXO);
        Ok(store)
    }

    /// The same, made where it is missing: `is_private` with mode 0700, else by the umask.
    ///
    /// # Errors
    ///
    /// Where it cannot be made, and where a private one belongs to somebody else or may be written by others.
    pub fn create(root: &Path, is_private: bool) -> Result<Store> {
        if !is_private {
            std::fs::create_dir_all(root).map_err(|cause| {
                Error::io("create the directory of generations", root, &cause)
                    .hint("choose another one with --cache-root")
            })?;
            return Store::open(root);
        }
        dir::make_directories(root)?;
        let mut store = Store::open(root)?;
        store.is_private = true;
        let found = fs::fstat(store.open_root()?).map_err(failed("look at", &store.root))?;
        let why = if found.st_uid != dir::our_uid() {
            format!("belongs to another user (uid {})", found.st_uid)
        } else if dir::is_writable_by_others(&found) {
            format!("may be written by others (mode {:o})", found.st_mode & 0o777)
        } else {
            return Ok(store);
        };
        Err(Error::new(Kind::Failed, format!("{} is to be private, but {why}", shown(&store.root)))
            .hint("chmod 700, or choose another directory with --base-dir or --cache-root"))
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether what is made in it is for this user alone: directories 0700 and files 0400, whatever the umask. Else
    /// the umask says who may read.
    pub fn is_private(&self) -> bool {
        self.is_private
    }

    /// The root itself, opened for reading.
    pub(super) fn open_root(&self) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        fs::open(&self.root, flags, Mode::empty())
            .map_err(failed("open the directory of generations", &self.root))
    }

    /// Everything of ours at the top of the root, sorted.
    pub(super) fn entries(&self) -> Result<Vec<Entry>> {
        let names = tree::names(self.open_root()?).map_err(failed("read the directory", &self.root))?;
        let mut entries: Vec<Entry> = names.iter().filter_map(|name| Entry::parse(name.to_str()?)).collect();
        entries.sort();
        Ok(entries)
    }

    /// Everything of ours under the root.
    ///
    /// # Errors
    ///
    /// Where the root cannot be read.
    pub fn list(&self) -> Result<Listing> {
        let mut listing = Listing::default();
        for entry in self.entries()? {
            if entry.state != State::Whole {
                listing.leftovers.extend(self.leftover(&entry)?);
                continue;
            }
            match Generation::open_in(self, &entry) {
                Ok(generation) => listing.generations.push(generation),
                // Removed meanwhile, or somebody else's directory that is called like one of ours.
                Err(Unfit::Absent(_)) => {}
                Err(Unfit::Version(error) | Unfit::Unreadable(error)) => {
                    listing.unreadable.push(Unreadable {
                        path: self.path_of(&entry),
                        name: entry.name,
                        number: entry.number,
                        error,
                    })
                }
            }
        }
        Ok(listing)
    }

    /// The newest whole generation of a name: the one with the highest number. A damaged one is none.
    ///
    /// # Errors
    ///
    /// [`Kind::Verification`] where a newer program made a newer one: an older one is not what is meant then.
    pub fn newest(&self, name: &Name) -> Result<Option<Generation>> {
        for entry in self.entries()?.into_iter().rev() {
            if entry.state != State::Whole || entry.name != *name {
                continue;
            }
            match Generation::open_in(self, &entry) {
                Ok(generation) => return Ok(Some(generation)),
                Err(Unfit::Version(error)) => return Err(error),
                Err(Unfit::Absent(_) | Unfit::Unreadable(_)) => {}
            }
        }
        Ok(None)
    }

    /// The generation of that name and number.
    ///
    /// # Errors
    ///
    /// As [`Generation::open`].
    pub fn generation(&self, name: &Name, number: u64) -> Result<Generation> {
        Ok(Generation::open_in(self, &Entry::whole(name, number))?)
    }

    pub(super) fn path_of(&self, entry: &Entry) -> PathBuf {
        self.root.join(entry.to_string())
    }
}

/// Refuses what somebody planted in a root that everybody may write to: there only what is ours, root's or the root's
/// owner's is trusted. In a root that a group shares, everybody of the group is.
pub(super) fn check_owner(root: &OwnedFd, found: &Stat, path: &Path) -> Result<()> {
    let around = fs::fstat(root).map_err(failed("look at the directory around", path))?;
    let trusted = [dir::our_uid(), 0, around.st_uid];
    let is_open = Mode::from_raw_mode(around.st_mode).contains(Mode::WOTH);
    if !is_open || trusted.contains(&found.st_uid) {
        return Ok(());
    }
    let why = format!(
        "{} belongs to another user (uid {}), in a directory that everybody may write to",
        shown(path),
        found.st_uid
    );
    Err(Error::new(Kind::Failed, why).hint("use a --cache-root that only those you trust may write to"))
}
