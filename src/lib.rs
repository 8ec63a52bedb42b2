//! `iloader` keeps AI model files in immutable huge-page memory, independent of the inference process.
//!
//! The spine, from the command line to what an engine opens:
//!
//! ```text
//! ModelDir ── source::select ──▶ Selection         sorted files: path, length, identity
//! Selection ── plan::lay_out ──▶ Plan              pure: targets + chunks {source range → target range}
//! Plan.need ── budget::admit ──▶ Grant             refuse before the first allocation
//! Need ── daemon::admission ───▶ Promise + Share   what other starts leave to this one: memory, and of the quota
//! Plan ── memory::Filling ─────▶ [OpenSegment]     one per inode; one Window carved per chunk
//! Plan+Engine+Sink ─ load::run ▶ (done)            Windows leave empty, return full: the only copy loop;
//!                                                  daemon::watch holds or ends it when memory runs out
//! OpenSegment ── seal(self) ──▶ Segment            the only thing that may be published
//! Manifest+[Segment]+Share ───▶ Resident           what a daemon keeps alive
//! Resident ── view::publish ──▶ View               directory of links, appears in one rename
//! Resident+View ─ daemon::serve                    control socket, leases, stop
//! Segments ── readers::find ───▶ Seen              who else reads: decides stop, eviction and gc beside the leases
//! same Plan ── load::run(disk) ▶ Staging           hashed on the way, written past the page cache, synced
//! Staging ── commit ───────────▶ Generation        a verified copy on disk: manifest last, one rename
//! Generation ─ daemon::origin ─▶ Selection         stands for its source: the next load reads from there
//! ```
//!
//! Modules in reading order, each importing only what stands in a lower row (`tests/it/tidy.rs` checks it):
//! see `docs/architecture.md`.

#[cfg(not(target_os = "linux"))]
compile_error!("iloader runs on Linux only: it rests on memfd seals, io_uring and /proc");

#[cfg(not(target_pointer_width = "64"))]
compile_error!("iloader needs 64-bit addresses: it maps whole model files");

pub mod error;
pub mod failure;
pub mod units;

pub mod manifest;

pub mod sys;

pub mod hub;
pub mod source;

pub mod plan;

pub mod budget;
pub mod gc;
pub mod readers;

pub mod engine;
pub mod load;

pub mod disk;
pub mod memory;

pub mod registry;
pub mod view;

pub mod control;
pub mod daemon;

pub mod cli;

pub use error::{Error, Kind, Result};

/// Says why a unit test does not run here, past the capture of the test runner: a skip that nobody sees is
/// a hole.
#[cfg(test)]
pub(crate) fn skipped(why: impl std::fmt::Display) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
