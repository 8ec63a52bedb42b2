//! The one integration test binary: a file per story.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod collect;
mod containers;
mod copy;
mod crowd;
mod dead;
mod decoders;
mod file_systems;
mod harness;
mod havoc;
mod immutable;
mod leases;
mod main_job;
mod make_model;
mod memory;
mod pressure;
mod quota;
mod readers;
mod resting;
mod reuse;
mod start;
mod strangers;
mod surroundings;
mod tidy;
mod unprivileged;
mod usage;
mod views;
