//! Building a generation: reuse → copy → check → commit.

use super::{Generation, Store};
use crate::engine::Selected;
use crate::error::{Error, Kind, Result};
use crate::registry::Name;
use crate::source::Selection;

/// A generation that is wanted.
#[derive(Debug)]
pub struct Request<'a> {
    /// Whose it is.
    pub name: &'a Name,
    /// What it is to hold, as selected now.
    pub selection: &'a Selection,
    /// Use nothing of older generations.
    pub refresh: bool,
    /// Files that are copied at the same time.
    pub workers: usize,
    /// The unit that a worker takes at a time, in bytes.
    pub chunk_bytes: u64,
    /// Which engine reads and writes.
    pub engine: Selected,
}

/// How it went.
#[derive(Debug)]
pub struct Built {
    /// The generation, whole and on disk.
    pub generation: Generation,
    /// It was there already; nothing was copied.
    pub was_fresh: bool,
    /// Bytes copied from the source.
    pub copied_bytes: u64,
    /// Bytes whose blocks are shared with the source.
    pub cloned_bytes: u64,
    /// Bytes taken over from older generations or an interrupted copy, checked.
    pub reused_bytes: u64,
    /// What a person should know: files of an older generation that were damaged, what was removed.
    pub notes: Vec<String>,
}

/// Who watches a copy. Called by several threads at once, and often: it must be quick.
pub trait Watch: Sync {
    /// It is known what is to be done. May come again: a damaged file of an older generation is copied after all.
    fn planned(&self, read_bytes: u64, written_bytes: u64, files: u64);
    /// So many more bytes were read.
    fn read(&self, bytes: u64);
    /// So many more bytes were written.
    fn wrote(&self, bytes: u64);
    /// One more file is whole.
    fn finished_file(&self);
    /// Another command works on a generation of that name, and is waited for.
    fn waiting(&self);
    /// Whether to give up.
    fn cancelled(&self) -> bool;
}

/// The newest generation of the name where it is fresh, else a new one.
///
/// # Errors
///
/// [`Kind::Stale`] where the name belongs to another source; [`Kind::NoRoom`] where the disk is full, or would be;
/// [`Kind::Verification`] where a file is not what the hub says; [`Kind::SourceChanged`]; [`Kind::Cancelled`].
pub fn build(_store: &Store, _request: &Request<'_>, _watch: &dyn Watch) -> Result<Built> {
    Err(Error::new(Kind::Failed, "not built yet"))
}

/// What makes `generation` another one than `selection` asks for, one line each; empty: it is fresh.
pub fn differences(_generation: &Generation, _selection: &Selection, _lines_max: usize) -> Vec<String> {
    Vec::new()
}
