//! WHERE things are: the runtime root, the names under it, and who of them is alive.
//!
//! A cache is known by its [`Name`]. Under the runtime root, the [`BaseDir`], each name has its
//! [`Paths`]; its [`Record`] says what its daemon is, and its [`Lock`], held by that daemon, says
//! whether it lives. A pid in a file or the mere existence of one never does.

pub mod base_dir;
pub mod claims;
mod cleanup;
pub(crate) mod dir;
mod file_system;
mod left;
pub mod lock;
pub mod name;
pub mod paths;
pub mod record;
#[cfg(test)]
pub(crate) mod testing;

pub use base_dir::{BaseDir, Environment};
pub use claims::{ChargedGroup, Claim, Claims, Group, Seat, Terms};
pub use cleanup::{
    check_pid_file, clean_up_files, clean_up_registration, is_dead_socket, remove_pid_file, remove_socket,
    write_pid_file,
};
pub use left::{left_files, names_in_use};
pub use lock::Lock;
pub use name::Name;
pub use paths::{Paths, SOCKET_PATH_BYTES_MAX, check_socket_path};
pub use record::{Host, Liveness, Record, Registration, list, look_up, unregistered};
