//! Bytes in RAM: segments that nobody can change, and what holds them.

mod backing;
mod filling;
mod hashing;
mod resident;
mod segment;

pub use backing::{Backing, Choice};
pub use filling::Filling;
pub use hashing::Hashing;
pub use resident::{Resident, Settings, load, load_with, need_bytes, open_max};
pub use segment::Segment;
