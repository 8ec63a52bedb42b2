//! Where the things of a cache are to be, and where they may not.

use std::path::{Path, PathBuf};

use super::options::StartArgs;
use crate::error::{Error, Kind, Result, shown};
use crate::registry::{self, BaseDir, Environment, Liveness, Paths, check_socket_path};
use crate::view;

/// Where the things of the cache are to be, absolute.
pub(super) struct Places {
    pub(super) socket: PathBuf,
    pub(super) pid_file: PathBuf,
    pub(super) log_file: PathBuf,
    pub(super) view: PathBuf,
}

/// One of them, as its option names it.
struct Place<'a> {
    option: &'static str,
    path: &'a Path,
    default: PathBuf,
    /// What would be written to, with links resolved.
    resolved: PathBuf,
}

impl Places {
    pub(super) fn of(args: &StartArgs, environment: &Environment, base: &BaseDir) -> Result<Places> {
        let paths = base.paths(&args.name);
        let place = |given: &Option<PathBuf>, default: PathBuf, option: &str| match given {
            Some(path) => environment.absolute(path, option),
            None => Ok(default),
        };
        Ok(Places {
            socket: place(&args.socket, paths.socket, "--socket")?,
            pid_file: place(&args.pid_file, paths.pid_file, "--pid-file")?,
            log_file: place(&args.log_file, paths.log_file, "--log-file")?,
            view: place(&args.view, paths.view, "--view")?,
        })
    }

    /// Refuses what would be written into the source or over another thing of this or another cache, and a socket
    /// path that is too long.
    pub(super) fn check(&self, args: &StartArgs, base: &BaseDir, source: &Path) -> Result<()> {
        // What is made in BASE tells more than BASE itself, which may be a link.
        check_outside(&base.run_dir(), "--base-dir", source)?;
        check_outside(&self.socket, "--socket", source)?;
        check_outside(&self.pid_file, "--pid-file", source)?;
        check_outside(&self.log_file, "--log-file", source)?;
        match is_out_of_reach(source) {
            true => check_outside(&self.view, "--view", source)?,
            false => view::check_place(&self.view, source)?,
        }
        check_socket_path(&self.socket, &args.name)?;
        let places = self.resolved(base.paths(&args.name))?;
        // A link of the user's own is followed for a log.
        check_outside(&places[2].resolved, "--log-file", source)?;
        check_apart(&places)?;
        let run = base.run_dir();
        let run = std::fs::canonicalize(&run).or_else(|_| view::resolve(&run, "--base-dir"))?;
        places.iter().try_for_each(|place| place.check_run(&run))?;
        if args.pid_file.is_some() || args.log_file.is_some() {
            check_others(&places[1..=2], args, base)?;
        }
        Ok(())
    }

    /// Socket, pid file, log file and view, in this order.
    fn resolved(&self, default: Paths) -> Result<[Place<'_>; 4]> {
        let place = |option, path, default| {
            Ok::<_, Error>(Place { option, path, default, resolved: view::resolve(path, option)? })
        };
        let log = place("--log-file", &self.log_file, default.log_file)?;
        let log = Place { resolved: std::fs::canonicalize(log.path).unwrap_or(log.resolved), ..log };
        Ok([
            place("--socket", &self.socket, default.socket)?,
            place("--pid-file", &self.pid_file, default.pid_file)?,
            log,
            place("--view", &self.view, default.view)?,
        ])
    }
}

impl Place<'_> {
    /// Refuses what is in BASE/run and not this cache's own: another cache has or will have its files there, and a
    /// pid file or log there would be taken for one of them.
    fn check_run(&self, run: &Path) -> Result<()> {
        let Place { option, path, default, resolved } = self;
        if !resolved.starts_with(run) || view::resolve(default, option)? == *resolved {
            return Ok(());
        }
        let message = format!(
            "{option} {} would be in {}, where the caches have their own files",
            shown(path),
            shown(run)
        );
        Err(Error::new(Kind::Usage, message)
            .hint(format!("choose a path elsewhere, or leave out {option} for {}", shown(default))))
    }
}

/// A generation stands in for it: what its path says is all that is known.
fn is_out_of_reach(source: &Path) -> bool {
    std::fs::canonicalize(source).is_err()
}

fn check_outside(path: &Path, option: &str, source: &Path) -> Result<()> {
    if !is_out_of_reach(source) {
        return view::check_outside(path, option, source);
    }
    if view::resolve(path, option)?.starts_with(source) {
        let message = format!("{option} {} would be inside the source {}", shown(path), shown(source));
        return Err(Error::new(Kind::Usage, message).hint(format!("choose another {option}, apart from it")));
    }
    Ok(())
}

/// Refuses two things at one path, and one in the view.
fn check_apart(places: &[Place<'_>]) -> Result<()> {
    for (index, place) in places.iter().enumerate() {
        for other in &places[index + 1..] {
            let (option, path) = (place.option, shown(place.path));
            let message = if place.resolved == other.resolved {
                format!("{option} and {} are both {path}", other.option)
            } else if other.option == "--view" && place.resolved.starts_with(&other.resolved) {
                format!("{option} {path} would be in the view {}", shown(other.path))
            } else {
                continue;
            };
            let hint = format!("choose another {option}, or another {}", other.option);
            return Err(Error::new(Kind::Usage, message).hint(hint));
        }
    }
    Ok(())
}

/// Refuses the pid file of another cache of BASE that runs, which would then seem to be ours.
fn check_others(places: &[Place<'_>], args: &StartArgs, base: &BaseDir) -> Result<()> {
    let others = registry::list(base)?.into_iter();
    for other in others.filter(|other| other.name != args.name && other.liveness != Liveness::Dead) {
        let Ok(record) = &other.record else { continue };
        let Ok(pid_file) = view::resolve(Path::new(&record.pid_file), "--pid-file") else { continue };
        if let Some(place) = places.iter().find(|place| place.resolved == pid_file) {
            let (option, path) = (place.option, shown(place.path));
            let message = format!("{option} {path} is the pid file of '{}', which runs", other.name);
            return Err(Error::new(Kind::Usage, message).hint(format!("choose another {option}")));
        }
    }
    Ok(())
}
