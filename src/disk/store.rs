//! The root that generations stand under: looking up, listing, removing.

use std::path::{Path, PathBuf};

use super::Generation;
use crate::error::{Error, Kind, Result};
use crate::registry::Name;

/// A directory of generations.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
}

/// A generation that cannot be read, and why.
#[derive(Debug)]
pub struct Unreadable {
    /// Where.
    pub path: PathBuf,
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
    pub fn open(_root: &Path) -> Result<Store> {
        Err(Error::new(Kind::Failed, "not built yet"))
    }

    /// The same, made where it is missing: `is_private` with mode 0700, else by the umask.
    pub fn create(_root: &Path, _is_private: bool) -> Result<Store> {
        Err(Error::new(Kind::Failed, "not built yet"))
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Everything of ours under the root.
    pub fn list(&self) -> Result<Listing> {
        Err(Error::new(Kind::Failed, "not built yet"))
    }

    /// The newest whole generation of a name: the one with the highest number.
    pub fn newest(&self, _name: &Name) -> Result<Option<Generation>> {
        Err(Error::new(Kind::Failed, "not built yet"))
    }

    /// Removes a generation: renamed aside first, so that nobody meets half of it.
    ///
    /// # Errors
    ///
    /// [`Kind::InUse`] where it is leased, or a process has one of its files open or mapped; names who.
    pub fn remove(&self, _generation: &Generation) -> Result<()> {
        Err(Error::new(Kind::Failed, "not built yet"))
    }

    /// Removes a leftover, unless somebody works in it now.
    pub fn remove_leftover(&self, _leftover: &Leftover) -> Result<()> {
        Err(Error::new(Kind::Failed, "not built yet"))
    }
}
