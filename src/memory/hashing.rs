//! `--verify`: what is hashed on its way into memory, and what its digests are compared with.

use crate::error::{Error, Kind, Result, shown};
use crate::manifest::Digest;

/// How the bytes of a load are hashed, and what they must be.
#[derive(Clone, Debug, Default)]
pub struct Hashing {
    /// Threads that hash.
    pub threads: usize,
    /// For each file of the selection the digest that its bytes must have, where one is known; empty: of none.
    pub expected: Vec<Option<Digest>>,
    /// Who says so, to stand before "says".
    pub authority: String,
    /// What to do about a file that is another.
    pub remedy: String,
}

impl Hashing {
    /// What a file must be, where that is known.
    pub fn expected(&self, file: usize) -> Option<Digest> {
        self.expected.get(file).copied().flatten()
    }

    /// Compares the digest of a file with what it must be.
    ///
    /// # Errors
    ///
    /// [`Kind::Verification`] where it is another one.
    pub fn check(&self, file: usize, path: &str, found: Digest) -> Result<()> {
        let Some(expected) = self.expected(file).filter(|expected| *expected != found) else { return Ok(()) };
        let message = format!(
            "{} is not what {} says: its SHA-256 must be {expected}, and is {found}",
            shown(path),
            self.authority
        );
        Err(Error::new(Kind::Verification, message).hint(self.remedy.clone()))
    }
}
