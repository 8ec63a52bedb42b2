//! Whether a view, or another thing that a cache makes, may stand at a path, seen from its source.

use std::path::{Component, Path, PathBuf};

use rustix::fs;

use crate::error::{Error, Kind, Result, shown};
use crate::registry::dir::Inode;

/// Refuses a view inside its source, which would then be written to, and one around it, which would hide
/// it. Links and bind mounts are seen through. The view need not exist.
///
/// # Errors
///
/// [`Kind::Usage`] where the two overlap; others where a path cannot be resolved.
pub fn check_place(view: &Path, source: &Path) -> Result<()> {
    let source = resolve_source(source)?;
    let resolved = resolve(view, "--view")?;
    if is_inside(&resolved, &source) {
        return Err(refused(view, "--view", "inside", &source));
    }
    if is_inside(&source, &resolved) {
        return Err(refused(view, "--view", "around", &source));
    }
    Ok(())
}

/// Refuses anything else that a cache makes, named by `option`, inside the source. Around it is no harm: a
/// source may well stand in BASE. Seen through links and bind mounts, and it need not exist, as a view.
///
/// # Errors
///
/// As [`check_place`].
pub fn check_outside(path: &Path, option: &str, source: &Path) -> Result<()> {
    let source = resolve_source(source)?;
    if is_inside(&resolve(path, option)?, &source) {
        return Err(refused(path, option, "inside", &source));
    }
    Ok(())
}

fn resolve_source(source: &Path) -> Result<PathBuf> {
    std::fs::canonicalize(source).map_err(|cause| Error::io("resolve the source", source, &cause))
}

fn is_inside(path: &Path, directory: &Path) -> bool {
    path.starts_with(directory) || any_ancestor_is(path, directory)
}

fn refused(path: &Path, option: &str, how: &str, source: &Path) -> Error {
    let error = format!("{option} {} would be {how} the source {}", shown(path), shown(source));
    Error::new(Kind::Usage, error).hint(format!("choose another {option}, apart from it"))
}

/// Whether `path` or a directory above it is the same directory as `other`, by whatever path.
fn any_ancestor_is(path: &Path, other: &Path) -> bool {
    let inode = |path: &Path| fs::stat(path).ok().map(|found| Inode::of(&found));
    let Some(other) = inode(other) else { return false };
    path.ancestors().any(|ancestor| inode(ancestor) == Some(other))
}

/// The path that `option` names with its existing parents resolved through links. Its last part is not: a
/// link there is never followed for a view.
///
/// # Errors
///
/// [`Kind::Usage`] where it is no absolute path of a name, or goes up from what does not exist; others where a
/// directory above it cannot be looked at.
pub fn resolve(path: &Path, option: &str) -> Result<PathBuf> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        let error = format!("{option} {} does not end in a name", shown(path));
        return Err(Error::new(Kind::Usage, error).hint(format!("choose another {option}")));
    };
    for existing in parent.ancestors() {
        let missing = parent.strip_prefix(existing).unwrap_or(Path::new(""));
        match std::fs::canonicalize(existing) {
            Ok(resolved) if missing.components().all(|part| matches!(part, Component::Normal(_))) => {
                return Ok(resolved.join(missing).join(name));
            }
            Ok(_) => {
                let error = format!("{option} {} goes up from a directory that does not exist", shown(path));
                return Err(Error::new(Kind::Usage, error).hint(format!("write {option} without '..'")));
            }
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {}
            Err(cause) => return Err(Error::io("look at", existing, &cause)),
        }
    }
    Err(Error::new(Kind::Usage, format!("{option} {} is not an absolute path", shown(path))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_view_stands_apart_from_its_source() {
        let home = tempfile::tempdir().unwrap();
        let at = |path: &str| home.path().join(path);
        std::fs::create_dir_all(at("models/m/sub")).unwrap();
        symlink("models/m", at("link")).unwrap();
        symlink("models", at("up")).unwrap();
        let refused = |view: &str, source: &str, how: &str| {
            let error = check_place(&at(view), &at(source)).unwrap_err();
            assert_eq!(error.kind(), Kind::Usage);
            assert!(error.message().contains(how), "{view}: {}", error.message());
        };
        refused("models/m", "models/m", "inside");
        refused("models/m/view", "models/m", "inside");
        refused("models/m/new/view", "models/m", "inside");
        refused("link/view", "models/m", "inside");
        refused("models/m/view", "link", "inside");
        refused("up/m/sub/view", "link", "inside");
        refused("models", "models/m", "around");
        refused("models", "link", "around");
        refused("models/m/../m/v", "models/m", "inside");
        refused("absent/../models/m/v", "models/m", "goes up");
        assert!(check_place(Path::new("/"), &at("models/m")).is_err());
        for fine in ["models/m2", "views/m", "models/view", "m/models/m", "models/m.view"] {
            check_place(&at(fine), &at("models/m")).unwrap();
        }
        check_outside(&at("models/run"), "--base-dir", &at("models/m")).unwrap();
        for inside in ["models/m/log", "link/new/log", "up/m/sub/log"] {
            let error = check_outside(&at(inside), "--log-file", &at("models/m")).unwrap_err();
            assert_eq!(error.kind(), Kind::Usage);
            assert!(error.message().starts_with("--log-file") && error.message().contains("inside"));
        }
        assert_eq!(check_place(&at("v"), &at("absent")).unwrap_err().kind(), Kind::NotFound);
    }
}
