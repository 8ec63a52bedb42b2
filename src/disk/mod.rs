//! Bytes on disk: generations, which are verified copies of a selection, under one root.
//!
//! `docs/on-disk-format.md` says what is where, and what each crash leaves.

pub mod build;
pub mod generation;
pub mod store;
pub mod verify;

pub use build::{Built, Request, build};
pub use generation::{Generation, Lease};
pub use store::Store;
pub use verify::{Depth, Finding, Report, verify};
