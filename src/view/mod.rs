//! The published directory: the selection's tree, each file a link to a descriptor of the daemon.
//!
//! A view appears whole, in one rename, and disappears in one: at its path there is never a part of it.
//! It is built under a name beside its path, `.NAME.<random>.new`, and removed under `.NAME.<random>.old`;
//! what a killed daemon leaves under such names, [`remove_leftovers`] finds.

mod leftovers;
mod place;
mod spot;
mod standing;
#[cfg(test)]
mod tests;
mod tree;

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{self, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Error, Kind, Result, shown};
use crate::registry::dir::{self, Inode, failed};
use crate::registry::{Lock, Paths, Record};
use crate::source::DirectoryLink;
use crate::sys::crash;

pub use leftovers::left_by_crashed;
pub use place::{check_outside, check_place, resolve};
use spot::{ATTEMPTS_MAX, NEW, OLD, Spot};
pub use standing::{Standing, examine, process_of};
use tree::{Ours, Planned};

/// One file of a view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ViewLink {
    /// Relative to the source, `/` between the parts.
    pub path: String,
    /// What the link says: `/proc/<pid>/fd/<n>`, or the source's file where it is passed through.
    pub target: PathBuf,
}

/// A view that was published by this process.
#[derive(Debug)]
pub struct View {
    at: PathBuf,
    kept_dirname: Option<String>,
    /// The top directory: what stands at `at` with another inode is not this view.
    top: Inode,
    planned: Vec<Planned>,
    notes: Vec<String>,
}

/// What became of a view that was withdrawn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Withdrawn {
    /// What was not ours and so stays, relative to the view, in the form for messages.
    pub strange: Vec<String>,
    /// Where that is: the view's path, unless something else took it. `None` where nothing is strange.
    pub strange_at: Option<PathBuf>,
    /// The view was removed, moved or replaced by somebody else before: nothing was done.
    pub was_gone: bool,
}

impl View {
    /// Publishes a view at the absolute path `at`, under one more directory level where `kept_dirname` is
    /// given. Missing parent directories are created with mode 0700. An empty directory and a dead view
    /// of ours are replaced.
    ///
    /// # Errors
    ///
    /// [`Kind::InUse`] where a live view stands there; [`Kind::Failed`] where anything else does, or a
    /// path is unfit; others where a directory cannot be written. Nothing but new
    /// parent directories is left then, and what stood there is untouched.
    pub fn publish(
        at: &Path,
        kept_dirname: Option<&str>,
        links: &[ViewLink],
        directory_links: &[DirectoryLink],
    ) -> Result<View> {
        let planned = tree::plan(kept_dirname, links, directory_links)?;
        let spot = Spot::create(at)?;
        publish_at(&spot, kept_dirname, planned)
    }

    /// The published path.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// The directory to give to an engine: the published path, with the kept directory name.
    pub fn model_dir(&self) -> PathBuf {
        model_dir(&self.at, self.kept_dirname.as_deref())
    }

    /// What the user should know although the view is published: remains of a dead view that stay.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Takes the view away: in one rename, so that no reader meets a part of it, and before the daemon's
    /// descriptors close. Its directory stays, empty, unless `remove`. Only what was published is
    /// removed; anything else is named, and stays at the view's path.
    ///
    /// # Errors
    ///
    /// Where the parent directory cannot be written: the view then stands as it was.
    pub fn withdraw(self, remove: bool) -> Result<Withdrawn> {
        match Spot::find(&self.at)? {
            Some(spot) => withdraw_from(&spot, &self, remove),
            None => Ok(Withdrawn { was_gone: true, ..Withdrawn::default() }),
        }
    }
}

/// The directory to give to an engine, of a view at `at`.
pub fn model_dir(at: &Path, kept_dirname: Option<&str>) -> PathBuf {
    kept_dirname.map_or_else(|| at.to_owned(), |kept| at.join(kept))
}

fn publish_at(spot: &Spot, kept_dirname: Option<&str>, planned: Vec<Planned>) -> Result<View> {
    // Told before the work; what counts is the look just before the rename.
    refuse_what_stands(spot, standing::stand(spot)?.0)?;
    let aside = spot.make_aside(NEW)?;
    crash::point("view-begun");
    let published = tree::build(&aside.directory, &planned, spot.path())
        .and_then(|()| fs::fstat(&aside.directory).map_err(failed("look at", spot.path())))
        .and_then(|top| Ok((Inode::of(&top), put_in_place(spot, &aside)?)));
    match published {
        Ok((top, notes)) => Ok(View {
            at: spot.path().to_owned(),
            kept_dirname: kept_dirname.map(str::to_owned),
            top,
            planned,
            notes,
        }),
        Err(error) => {
            tree::clear(&aside.directory, &Ours::AnyLink);
            // The first error is the one to tell; a later clean-up knows the directory by its name.
            let _ = spot.remove_empty(&aside.name);
            Err(error)
        }
    }
}

/// Renames the finished view to its place. Returns what the user should know.
fn put_in_place(spot: &Spot, aside: &spot::Aside) -> Result<Vec<String>> {
    for _ in 0..ATTEMPTS_MAX {
        match standing::stand(spot)? {
            (Standing::Absent | Standing::Empty, _) => {
                crash::point("view-built");
                if spot.put(&aside.name)? {
                    crash::point("view-published");
                    return Ok(Vec::new());
                }
            }
            (Standing::Dead { .. }, Some(dead)) => {
                if !spot.exchange(&aside.name)? {
                    // Absent for a moment, which is the most that this file system allows.
                    take_dead_away(spot, dead, false)?;
                    continue;
                }
                let taken = spot.look_beside(&aside.name)?;
                if !taken.is_some_and(|found| Inode::of(&found) == dead) {
                    // Another thing was put there between the look and the exchange.
                    spot.exchange(&aside.name)?;
                    continue;
                }
                return Ok(discard(spot, &aside.name, false)
                    .err()
                    .map(|e| e.message().to_owned())
                    .into_iter()
                    .collect());
            }
            (standing, _) => refuse_what_stands(spot, standing)?,
        }
    }
    Err(failed("publish the view", spot.path())(Errno::BUSY).hint("something else keeps using that path"))
}

fn refuse_what_stands(spot: &Spot, standing: Standing) -> Result<()> {
    let path = shown(spot.path());
    match standing {
        Standing::Absent | Standing::Empty | Standing::Dead { .. } => Ok(()),
        Standing::Live { pid } => {
            let error = format!("the view {path} is in use by the daemon with pid {pid}");
            Err(Error::new(Kind::InUse, error)
                .hint(format!(
                    "stop that cache (iloader list; if it is not listed there, because its BASE was removed: kill {pid}), or choose another --view"
                )))
        }
        Standing::Foreign { what } => {
            let error = format!("{path} is not taken over as a view: it {what}");
            Err(Error::new(Kind::Failed, error).hint("choose another --view, or move it away"))
        }
    }
}

fn withdraw_from(spot: &Spot, view: &View, remove: bool) -> Result<Withdrawn> {
    let Some(aside) = spot.take_aside(view.top, !remove)? else {
        return Ok(Withdrawn { was_gone: true, ..Withdrawn::default() });
    };
    crash::point("view-taken-aside");
    let strange = tree::clear(&spot.open_beside(&aside)?, &Ours::exactly(&view.planned));
    crash::point("view-emptied");
    if strange.is_empty() {
        spot.settle(&aside, !remove)?;
        return Ok(Withdrawn::default());
    }
    // Somebody wrote there: it must be found where it was written. Unless the path was taken meanwhile.
    let is_back = spot.put(&aside).unwrap_or(false);
    let strange_at = if is_back { spot.path().to_owned() } else { spot.beside(&aside) };
    Ok(Withdrawn { strange, strange_at: Some(strange_at), was_gone: false })
}

/// Withdraws what the daemon with the pid `daemon` published at `at`, once it is dead; nobody knows its pid
/// where that is `None`. Its directory stays, empty, where `keep_empty_directory`. Returns what there is to
/// know: nothing where there is nothing or an empty directory. What is not that daemon's any more stays.
///
/// # Errors
///
/// Where its view stands on, and may go later: [`Kind::InUse`] while its process is not gone, others where
/// the place cannot be looked at or written.
fn withdraw_crashed(at: &Path, daemon: Option<i32>, keep_empty_directory: bool) -> Result<Option<String>> {
    let Some(spot) = Spot::find(at)? else { return Ok(None) };
    let is_its = |pid: u32| daemon.is_none_or(|daemon| i32::try_from(pid) == Ok(daemon));
    match standing::stand(&spot)? {
        (Standing::Dead { .. }, Some(dead)) => {
            let aside = spot.take_aside(dead, keep_empty_directory)?;
            crash::point("dead-view-taken-aside");
            // What stays of it now stays under another name, for its reason, and is a matter for the user.
            let discarded = |aside| match discard(&spot, aside, keep_empty_directory) {
                Ok(()) => format!("withdrew the dead view {}", shown(at)),
                Err(error) => error.message().to_owned(),
            };
            Ok(aside.as_deref().map(discarded))
        }
        (Standing::Live { pid }, _) if is_its(pid) => {
            let error = format!("the view {} stays: its daemon, process {pid}, is not gone yet", shown(at));
            Err(Error::new(Kind::InUse, error)
                .hint("a killed process may need time to free its memory: try again in a moment"))
        }
        // Where no daemon is known there is nothing to say: who wants the place says what is wrong with it.
        (standing, _) => Ok(daemon.and_then(|_| left_standing(at, standing))),
    }
}

/// Says what stands in the place of a dead daemon's view and is none of its.
fn left_standing(at: &Path, standing: Standing) -> Option<String> {
    let what = match standing {
        Standing::Absent | Standing::Empty | Standing::Dead { .. } => return None,
        Standing::Live { pid } => format!("is a view of the daemon with pid {pid}"),
        Standing::Foreign { what } => what,
    };
    Some(format!("{} is left alone: it {what}", shown(at)))
}

fn take_dead_away(spot: &Spot, dead: Inode, keep_empty_directory: bool) -> Result<bool> {
    match spot.take_aside(dead, keep_empty_directory)? {
        Some(aside) => discard(spot, &aside, keep_empty_directory).map(|()| true),
        None => Ok(false),
    }
}

/// Removes what was found to be a dead view and taken aside; an empty directory stays where `leave_empty`.
fn discard(spot: &Spot, aside: &std::ffi::OsStr, leave_empty: bool) -> Result<()> {
    let left = tree::clear(&spot.open_beside(aside)?, &Ours::AnyLink);
    match left.first() {
        None => spot.settle(aside, leave_empty),
        Some(first) => {
            let error = format!("{} of the dead view stays: it holds {first}", shown(spot.beside(aside)));
            Err(Error::new(Kind::Failed, error).hint("look at it and remove it by hand"))
        }
    }
}

/// Removes what a killed daemon left beside the view's path: views half-built or half-removed. `held` is
/// the lock of the cache's name, so that none of its daemons is at work. Returns a line for each thing
/// removed and each left alone.
pub fn remove_leftovers(at: &Path, _held: &Lock) -> Vec<String> {
    let found = Spot::find(at).map(|spot| spot.map(|spot| (leftovers(&spot), spot)));
    let (names, spot) = match found {
        Ok(Some((Ok(names), spot))) => (names, spot),
        Ok(None) => return Vec::new(),
        // A parent that cannot be read hides leftovers; that is worth a line, not a failure.
        Ok(Some((Err(error), _))) | Err(error) => return vec![error.message().to_owned()],
    };
    names.iter().filter_map(|name| remove_leftover(&spot, name)).collect()
}

fn leftovers(spot: &Spot) -> Result<Vec<std::ffi::OsString>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = fs::openat(spot.parent(), ".", flags, Mode::empty());
    let mut names = Vec::new();
    parent
        .and_then(|parent| {
            tree::for_each_entry(&parent, |name, kind| {
                let bytes = name.as_bytes();
                let is_ours = [NEW, OLD].iter().any(|end| dir::is_temporary_name(bytes, spot.name(), end));
                if is_ours && kind == FileType::Directory {
                    names.push(name.to_owned());
                }
                true
            })
        })
        .map_err(failed("look for leftovers beside", spot.path()))?;
    Ok(names)
}

fn remove_leftover(spot: &Spot, name: &std::ffi::OsStr) -> Option<String> {
    let path = shown(spot.beside(name));
    let found = spot.look_beside(name).ok()??;
    if found.st_uid != dir::our_uid() {
        return Some(format!("{path} is left alone: it belongs to uid {}", found.st_uid));
    }
    let directory = spot.open_beside(name).ok()?;
    if fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
        return None;
    }
    match discard(spot, name, false) {
        Ok(()) => Some(format!("removed the half-made view {path}")),
        Err(error) => Some(error.message().to_owned()),
    }
}

/// How long the end of a killed daemon is waited for.
const DYING_MAX: Duration = Duration::from_secs(10);

/// The pause between two looks at it.
const DYING_PAUSE: Duration = Duration::from_millis(20);

/// A killed daemon lets go of its lock before its last descriptor closes, and its view counts as alive until
/// then: freeing much memory takes seconds.
fn wait_for_the_dying(at: &Path, daemon: i32) {
    let deadline = Instant::now() + DYING_MAX;
    let is_dying = || matches!(examine(at), Ok(Standing::Live { pid }) if i32::try_from(pid) == Ok(daemon));
    while is_dying() && Instant::now() < deadline {
        std::thread::sleep(DYING_PAUSE);
    }
}

/// What [`clean_up_crashed`] came to.
#[derive(Debug)]
pub struct CleanedUp {
    /// A line for each thing removed and each left alone.
    pub lines: Vec<String>,
    /// Why the view still stands although it is the dead daemon's. The registration then stays too: it is
    /// all that tells of a view at a place of its own, and has the next command take the clean-up up again.
    pub view_stays: Option<Error>,
}

/// Cleans up after a daemon that ended without an orderly end: its view, then its files, the registration
/// last, so that a clean-up that is itself interrupted is taken up again.
///
/// `held` is the name's lock, held by the caller; `record` what was registered, where it can be read.
/// The view's directory stays, empty, where `keep_view_directory`.
pub fn clean_up_crashed(
    paths: &Paths,
    record: Option<&Record>,
    held: &Lock,
    keep_view_directory: bool,
) -> CleanedUp {
    let at = record.map_or(paths.view.as_path(), |record| Path::new(&record.view));
    record.iter().for_each(|record| wait_for_the_dying(at, record.pid));
    let withdrawn = withdraw_crashed(at, record.map(|record| record.pid), keep_view_directory);
    let (told, view_stays) = match withdrawn {
        Ok(told) => (told, None),
        Err(error) => (None, Some(error)),
    };
    crash::point("dead-view-withdrawn");
    let mut lines: Vec<String> = told.into_iter().collect();
    lines.extend(remove_leftovers(at, held));
    lines.extend(crate::registry::clean_up_files(paths, record, held));
    crash::point("dead-files-removed");
    if view_stays.is_none() {
        lines.extend(crate::registry::clean_up_registration(paths, held));
        crash::point("dead-registration-removed");
    }
    CleanedUp { lines, view_stays }
}
