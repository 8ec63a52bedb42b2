//! One generation: opened, leased, and as something to load from.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::manifest::Manifest;
use crate::registry::Name;
use crate::source::Selection;

/// A whole generation: its manifest was read and checked; its files are what verify looks at.
#[derive(Clone, Debug)]
pub struct Generation {
    path: PathBuf,
    name: Name,
    number: u64,
    manifest: Manifest,
}

/// Keeps a generation from being removed while it is held: a shared lock.
#[derive(Debug)]
pub struct Lease {
    lock: OwnedFd,
}

impl Lease {
    /// The descriptor whose open description holds the lock: it may be handed on to a program that is executed.
    pub fn into_fd(self) -> OwnedFd {
        self.lock
    }
}

impl Generation {
    /// The generation at `path`, absolute or relative, or the newest one of a name where `path` is `ROOT/NAME`.
    ///
    /// # Errors
    ///
    /// [`Kind::NotFound`] where there is none; [`Kind::Verification`] where its manifest is damaged, is of another
    /// version, or names paths that lead out.
    pub fn open(_path: &Path) -> Result<Generation> {
        Err(Error::new(Kind::Failed, "not built yet"))
    }

    /// Where it is, absolute and resolved through links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose it is.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Its number: later ones of a name have higher numbers.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// What it holds. `files` have the identity of the source's files at the copy, and their digests.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Takes a lease.
    ///
    /// # Errors
    ///
    /// [`Kind::NotFound`] where it was removed meanwhile.
    pub fn lease(&self) -> Result<Lease> {
        Err(Error::new(Kind::Failed, "not built yet"))
    }

    /// Whether anybody holds a lease.
    pub fn is_leased(&self) -> Result<bool> {
        Err(Error::new(Kind::Failed, "not built yet"))
    }

    /// What it holds, as something to load from: paths and links of the manifest, each file the one on disk with the
    /// identity that it has there. `passthrough` of its files is as the patterns say.
    ///
    /// # Errors
    ///
    /// [`Kind::Verification`] where a file is missing, of another size or modification time.
    pub fn selection(&self, _passthrough: &[String]) -> Result<Selection> {
        Err(Error::new(Kind::Failed, "not built yet"))
    }

    /// Notes that it is used now. That it cannot be noted, on a read-only root for one, is no error.
    pub fn mark_used(&self) {}

    /// How long ago it was used last, or made.
    pub fn idle(&self) -> Duration {
        Duration::ZERO
    }

    /// Bytes on disk, blocks as allocated, by inode: what is linked into several generations is the same inode.
    pub fn inodes(&self) -> Result<Vec<(u64, u64, u64)>> {
        Err(Error::new(Kind::Failed, "not built yet"))
    }
}
