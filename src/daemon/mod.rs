//! Who KEEPS a cache alive: the detached process, its control socket, its leases.

pub mod admission;
mod background;
pub mod config;
mod connection;
pub mod leases;
pub mod ledger;
pub mod listener;
pub mod load;
pub mod log;
pub mod looks;
pub mod origin;
pub mod preload;
pub mod promise;
pub mod registered;
pub mod serve;
pub mod spawn;
pub mod starter;
mod watch;
