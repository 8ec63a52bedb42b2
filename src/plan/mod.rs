//! Pure arithmetic: which bytes of which file go where. No I/O.

mod layout;

pub use layout::{Chunk, Plan, SMALL_BYTES_MAX, Target, lay_out};
