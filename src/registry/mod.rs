//! WHERE things are: the runtime root, the names under it, and who of them is alive.
//!
//! A cache is known by its [`Name`]. Under the runtime root, the [`BaseDir`], each name has its
//! [`Paths`]; its [`Record`] says what its daemon is, and its [`Lock`], held by that daemon, says
//! whether it lives. A pid in a file or the mere existence of one never does.

pub mod base_dir;
mod cleanup;
pub(crate) mod dir;
mod file_system;
pub mod lock;
pub mod name;
pub mod paths;
pub mod record;
#[cfg(test)]
pub(crate) mod testing;

pub use base_dir::{BaseDir, Environment};
pub use cleanup::{clean_up_files, clean_up_registration, remove_pid_file, remove_socket, write_pid_file};
pub use lock::Lock;
pub use name::Name;
pub use paths::{Paths, SOCKET_PATH_BYTES_MAX, check_socket_path};
pub use record::{Host, Liveness, Record, Registration, list, look_up, unregistered};
