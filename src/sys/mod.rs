//! The only unsafe code: thin, safe wrappers over what the kernel offers.
//!
//! Each file wraps one thing and proves each unsafe block. Nothing here knows what a model is, and
//! nothing here imports anything of ours.

#![allow(unsafe_code)]

pub mod cache;
pub mod crash;
pub mod lock;
pub mod map;
pub mod memfd;
pub mod namespace;
pub mod numa;
pub mod peer;
pub mod priority;
pub mod process;
pub mod ring;
pub mod signals;
