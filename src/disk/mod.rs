//! Bytes on disk: generations, which are verified copies of a selection, under one root.
//!
//! `docs/on-disk-format.md` says what is where, and what each crash leaves.

pub mod build;
mod copy;
pub mod format;
pub mod generation;
mod holders;
pub mod journal;
pub mod lock;
pub mod manifest;
mod medium;
mod pieces;
mod removal;
mod reuse;
mod room;
mod staging;
pub mod store;
pub mod sums;
mod tree;
pub mod verify;
mod writer;

pub use build::{Built, Request, build};
pub use generation::{Generation, Lease};
pub use lock::NameLock;
pub use store::{Leftover, Listing, Store, Unreadable};
pub use verify::{Depth, Finding, Report, verify};

use crate::hub::ModelDir;
use crate::registry::Name;

/// The name of a model's generations where none is given: its directory's name, or `<org>--<model>` for a snapshot of
/// a hub cache, with `-` for what a name cannot hold.
pub fn default_name(model: &ModelDir) -> Name {
    Name::nearest(&model.label)
}
