//! Is a generation what its manifest says?

use super::Generation;
use crate::engine::Selected;
use crate::error::{Error, Kind, Result};

/// How closely to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Names, sizes and modification times.
    Quick,
    /// Every byte.
    Full,
}

/// What is wrong with one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Relative to the generation.
    pub path: String,
    /// `bad`, `missing`, `extra`, `size` or `mtime`.
    pub what: &'static str,
    /// The same in words, with the figures.
    pub detail: String,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Files that were looked at.
    pub files: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Sorted by path; empty: all is well.
    pub findings: Vec<Finding>,
}

/// Who watches. See [`super::build::Watch`].
pub trait Watch: Sync {
    /// So many more bytes were read.
    fn read(&self, bytes: u64);
    /// One more file is done.
    fn finished_file(&self);
    /// Whether to give up.
    fn cancelled(&self) -> bool;
}

/// Compares a generation with its manifest, past the page cache. What is wrong is in the report, not an error.
pub fn verify(
    _generation: &Generation,
    _depth: Depth,
    _engine: &Selected,
    _watch: &dyn Watch,
) -> Result<Report> {
    Err(Error::new(Kind::Failed, "not built yet"))
}
