//! The one integration test binary: a file per story.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod collect;
mod containers;
mod copy;
mod crash;
mod crowd;
mod dead;
mod decoders;
mod disk_full;
mod file_systems;
mod generations;
mod hangs;
mod harness;
mod havoc;
mod immutable;
mod leases;
mod limits;
mod main_job;
mod make_model;
mod memory;
mod memory_group;
mod pids;
mod pressure;
mod quota;
mod readers;
mod removed;
mod resting;
mod reuse;
mod signals;
mod source_changes;
mod start;
mod strangers;
mod surroundings;
mod tidy;
mod unprivileged;
mod usage;
mod views;
