//! MAY we: whether a load fits into what the host, the cgroups above us and the process limits allow.
//!
//! Everything here is asked before the first byte is allocated, so that a refusal leaves nothing behind.

pub mod admit;
pub mod cgroup;
pub mod limits;
pub mod meminfo;
pub mod quota;
mod room;
pub mod swap;
pub mod watch;

pub use admit::{Grant, Request, admit};
pub use cgroup::groups_of;
pub use meminfo::{Availability, Limits, available};
pub use room::{Promised, Room};
