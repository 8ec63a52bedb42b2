//! The CONVERSATION between a client and a daemon, shared by both ends.

pub mod client;
pub mod frame;
pub mod message;
