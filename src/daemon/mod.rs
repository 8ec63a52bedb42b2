//! Who KEEPS a cache alive: the detached process, its control socket, its leases.

pub mod config;
