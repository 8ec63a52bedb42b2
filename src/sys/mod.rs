//! sys

pub mod peer;
pub mod signals;
