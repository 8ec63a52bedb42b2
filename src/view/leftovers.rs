//! What a daemon that was killed left in files: the view's part of it, and the list of all of it, for a command
//! that only says what it would remove.

use std::path::{Path, PathBuf};

use super::spot::Spot;
use super::{Standing, examine, leftovers};
use crate::error::Result;
use crate::registry::{self, Paths, Record};

/// What [`super::clean_up_crashed`] would remove, or try to: the view where it is a dead one, what is half-made
/// beside it, socket, pid file, registration and lock file. Nothing is changed. Whether the daemon is dead is for
/// the caller to know; `record` is what is registered, where it can be read.
///
/// # Errors
///
/// Where one of the places cannot be looked at.
pub fn left_by_crashed(paths: &Paths, record: Option<&Record>) -> Result<Vec<PathBuf>> {
    let at = record.map_or(paths.view.as_path(), |record| Path::new(&record.view));
    let mut left = Vec::new();
    if matches!(examine(at)?, Standing::Dead { .. }) {
        left.push(at.to_owned());
    }
    if let Some(spot) = Spot::find(at)? {
        left.extend(leftovers(&spot)?.iter().map(|name| spot.beside(name)));
    }
    left.extend(registry::left_files(paths, record)?);
    Ok(left)
}
