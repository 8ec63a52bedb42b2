//! The CONVERSATION between a client and a daemon, shared by both ends.

pub mod message;
