//! Building a generation: reuse → copy → check → commit.

use std::path::Path;

use super::copy::Copying;
use super::format::{Entry, FINISHED_FILE, OUR_DIRECTORY, State};
use super::medium::{Disk, Medium};
use super::{Generation, NameLock, Store};
use crate::engine::Selected;
use crate::error::{Error, Kind, Result, shown};
use crate::hub;
use crate::registry::Name;
use crate::source::{Selection, identity};
use crate::sys::crash;

/// A generation that is wanted.
#[derive(Debug)]
pub struct Request<'a> {
    /// Whose it is.
    pub name: &'a Name,
    /// What it is to hold, as selected now.
    pub selection: &'a Selection,
    /// Use nothing of older generations.
    pub refresh: bool,
    /// Files that are copied at the same time.
    pub workers: usize,
    /// The unit that a worker takes at a time, in bytes.
    pub chunk_bytes: u64,
    /// Which engine reads and writes.
    pub engine: Selected,
}

/// How it went.
#[derive(Debug)]
pub struct Built {
    /// The generation, whole and on disk.
    pub generation: Generation,
    /// It was there already; nothing was copied.
    pub was_fresh: bool,
    /// Bytes copied from the source.
    pub copied_bytes: u64,
    /// Bytes whose blocks are shared with the source.
    pub cloned_bytes: u64,
    /// Bytes taken over from older generations or an interrupted copy, checked.
    pub reused_bytes: u64,
    /// What a person should know: files of an older generation that were damaged, what was removed.
    pub notes: Vec<String>,
}

/// Who watches a copy. Called by several threads at once, and often: it must be quick.
pub trait Watch: Sync {
    /// It is known what is to be done. May come again: a damaged file of an older generation is copied after all.
    fn planned(&self, read_bytes: u64, written_bytes: u64, files: u64);
    /// So many more bytes were read.
    fn read(&self, bytes: u64);
    /// So many more bytes were written.
    fn wrote(&self, bytes: u64);
    /// One more file is whole.
    fn finished_file(&self);
    /// Another command works on a generation of that name, and is waited for.
    fn waiting(&self);
    /// Whether to give up.
    fn cancelled(&self) -> bool;
}

/// The newest generation of the name where it is fresh, else a new one.
///
/// # Errors
///
/// [`Kind::Stale`] where the name belongs to another source; [`Kind::NoRoom`] where the disk is full, or would be;
/// [`Kind::Verification`] where a file is not what the hub says; [`Kind::SourceChanged`]; [`Kind::Cancelled`];
/// [`Kind::Usage`] where root and source are in each other, or the source has files that would be taken for ours.
pub fn build(store: &Store, request: &Request<'_>, watch: &dyn Watch) -> Result<Built> {
    build_on(&Disk, store, request, watch)
}

/// The same on any medium.
pub(super) fn build_on(
    medium: &dyn Medium,
    store: &Store,
    request: &Request<'_>,
    watch: &dyn Watch,
) -> Result<Built> {
    let selection = loaded_whole(request.selection);
    check_places(store.root(), &selection)?;
    let mut notes = Vec::new();
    // Without the lock: on a root that cannot be written to, what is there serves as well.
    if let Some(generation) = find_fresh(store, request, &selection, &mut notes)? {
        if let Ok(Some(lock)) = store.try_lock_name(request.name) {
            remove_superseded(medium, store, &lock, &generation, &mut notes);
        }
        return Ok(fresh(generation, notes));
    }
    notes.clear();
    let lock = store.lock_name(request.name, &|| watch.waiting(), &|| watch.cancelled())?;
    // Whoever was waited for may have built it.
    if let Some(generation) = find_fresh(store, request, &selection, &mut notes)? {
        return Ok(fresh(generation, notes));
    }
    let number = store.next_number(&lock)?;
    let entry = Entry { name: request.name.clone(), number, state: State::Staging };
    let copying = Copying { medium, store, request, watch, selection: &selection, entry };
    let (path, copied) = copying.run(&mut notes)?;
    let generation = Generation::open(&path)?;
    generation.mark_used();
    remove_superseded(medium, store, &lock, &generation, &mut notes);
    drop(lock);
    Ok(Built {
        generation,
        was_fresh: false,
        copied_bytes: copied.copied_bytes,
        cloned_bytes: copied.cloned_bytes,
        reused_bytes: copied.reused_bytes,
        notes,
    })
}

/// What makes `generation` another one than `selection` asks for, one line each; empty: it is fresh.
///
/// Which files are passed through is no matter of a generation: it holds them all. Nor is the directory of a hub
/// snapshot: another commit with the same files is the same model.
pub fn differences(generation: &Generation, selection: &Selection, lines_max: usize) -> Vec<String> {
    differences_whole(generation, &loaded_whole(selection), lines_max)
}

/// The same for a selection of which nothing is passed through.
fn differences_whole(generation: &Generation, now: &Selection, lines_max: usize) -> Vec<String> {
    let mut before = Selection::of_manifest(generation.manifest());
    if hub::same_source(&before.root, &now.root) {
        before.root.clone_from(&now.root);
    }
    identity::differences(&before, now, lines_max)
}

/// The selection with nothing passed through.
fn loaded_whole(selection: &Selection) -> Selection {
    let mut selection = selection.clone();
    selection.rules.passthrough.clear();
    selection.files.iter_mut().for_each(|file| file.passthrough = false);
    selection
}

/// The newest generation of the name where it is what is asked for, and looks whole.
fn find_fresh(
    store: &Store,
    request: &Request<'_>,
    selection: &Selection,
    notes: &mut Vec<String>,
) -> Result<Option<Generation>> {
    let Some(newest) = store.newest(request.name)? else { return Ok(None) };
    check_owner(&newest, selection, request.name)?;
    if request.refresh || !differences_whole(&newest, selection, 1).is_empty() {
        return Ok(None);
    }
    match newest.selection(&[]) {
        Ok(_) => Ok(Some(newest)),
        Err(error) => {
            notes.push(format!("{} is not used: {error}", shown(newest.path())));
            Ok(None)
        }
    }
}

fn fresh(generation: Generation, notes: Vec<String>) -> Built {
    generation.mark_used();
    Built { generation, was_fresh: true, copied_bytes: 0, cloned_bytes: 0, reused_bytes: 0, notes }
}

/// Refuses what would copy a copy into itself, and a source with files under a name of ours.
fn check_places(root: &Path, selection: &Selection) -> Result<()> {
    let root = std::fs::canonicalize(root).map_err(|cause| Error::io("open", root, &cause))?;
    let source = &selection.root;
    if root.starts_with(source) || source.starts_with(&root) {
        let (inner, outer) = if root.starts_with(source) {
            ("the root of the generations", "the model directory")
        } else {
            ("the model directory", "the root of the generations")
        };
        let message = format!("{inner} is in {outer}: {} and {}", shown(&root), shown(source));
        return Err(Error::new(Kind::Usage, message).hint("choose another place with --cache-root"));
    }
    let is_ours = |path: &str| path.split('/').next() == Some(OUR_DIRECTORY);
    let files = selection.files.iter().map(|file| &file.path);
    let links = selection.directory_links.iter().map(|link| &link.path);
    match files.chain(links).find(|path| is_ours(path)) {
        Some(path) => Err(Error::new(
            Kind::Usage,
            format!(
                "{} cannot be in a generation: {OUR_DIRECTORY} is where iloader keeps its own files",
                shown(path)
            ),
        )
        .hint(format!("leave it out: --also-exclude '{OUR_DIRECTORY}/'"))),
        None => Ok(()),
    }
}

/// Refuses a name that belongs to another source.
fn check_owner(generation: &Generation, selection: &Selection, name: &Name) -> Result<()> {
    let theirs = Path::new(&generation.manifest().source);
    if hub::same_source(theirs, &selection.root) {
        return Ok(());
    }
    let message = format!(
        "the generations called '{name}' are of {}, not of {}",
        shown(theirs),
        shown(&selection.root)
    );
    Err(Error::new(Kind::Stale, message).hint(
        "give this one another name (cache: --name, start: --cache-name), or remove those first: iloader cache-remove",
    ))
}

/// Removes the journal of the newest generation, the older generations of the name, unless somebody uses them, and
/// what interrupted commands left of it.
fn remove_superseded(
    medium: &dyn Medium,
    store: &Store,
    lock: &NameLock,
    newest: &Generation,
    notes: &mut Vec<String>,
) {
    // It is of no use any more, and of no harm where it stays.
    let _ = medium.remove_file(&newest.path().join(OUR_DIRECTORY).join(FINISHED_FILE));
    let entries = match store.entries() {
        Ok(entries) => entries,
        Err(error) => return notes.push(format!("older generations stay: {error}")),
    };
    for entry in entries.iter().filter(|entry| entry.name == *lock.name()) {
        let path = store.path_of(entry);
        let removed = match entry.state {
            State::Whole if entry.number >= newest.number() => continue,
            State::Whole => remove_whole(store, entry, notes),
            // We have the lock of who builds: nobody is at work in it. What only has such a name is not ours.
            State::Staging => match store.leftover(entry) {
                Ok(Some(_)) => store.remove_tree(medium, &path),
                Ok(None) => continue,
                Err(error) => Err(error),
            },
            State::Removing => match store.leftover(entry) {
                Ok(Some(left)) if !left.is_in_use => store.remove_leftover(&left),
                Ok(_) => continue,
                Err(error) => Err(error),
            },
        };
        if let Err(error) = removed {
            notes.push(format!("{} stays: {error}", shown(&path)));
        }
    }
}

/// Removes an older generation and notes it. One that cannot be read stays: a person may want to look at it.
fn remove_whole(store: &Store, entry: &Entry, notes: &mut Vec<String>) -> Result<()> {
    let generation = match store.generation(&entry.name, entry.number) {
        Ok(generation) => generation,
        Err(error) if error.kind() == Kind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    store.remove(&generation)?;
    crash::point("generation-superseded-removed");
    notes.push(format!("removed {}, which this one replaces", shown(generation.path())));
    Ok(())
}

#[cfg(test)]
mod tests;
