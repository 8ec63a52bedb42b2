//! The stories, one file each, in one test binary.

#![allow(clippy::unwrap_used)]

mod copy;
mod harness;
