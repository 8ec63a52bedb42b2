//! SHA-256 in flight: a sink that hashes each file in order on threads of its own, and hands the windows on.

use super::Sink;
use crate::error::{Error, Kind, Result};
use crate::manifest::Digest;
use crate::plan::Plan;

/// Runs `load` with a sink that hashes what passes through it to `inner`, and gives the digest of each target, in the
/// order of the plan's targets, with what `load` gives.
///
/// A chunk's window waits until the chunks before it in its target were hashed, is hashed on one of `threads` threads,
/// and goes on to `inner.filled` from there; just before a target's last chunk goes on, `inner.digested` is called.
/// An error of `inner` ends the load. When this returns every window has been handed on or dropped.
pub fn hashed<T>(
    _plan: &Plan,
    _inner: &dyn Sink,
    _threads: usize,
    _load: impl FnOnce(&dyn Sink) -> Result<T>,
) -> Result<(T, Vec<Digest>)> {
    Err(Error::new(Kind::Failed, "not built yet"))
}
