//! The one integration test binary: a file per story.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod containers;
mod copy;
mod crash;
mod dead;
mod disk_full;
mod file_systems;
mod hangs;
mod harness;
mod immutable;
mod leases;
mod limits;
mod main_job;
mod make_model;
mod pids;
mod removed;
mod resting;
mod reuse;
mod signals;
mod source_changes;
mod start;
mod surroundings;
mod tidy;
mod unprivileged;
mod usage;
mod views;
