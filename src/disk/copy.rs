//! One new generation: what is there already is linked or cloned and checked, the rest is copied, all is committed.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use jiff::Timestamp;

use super::build::{Request, Watch};
use super::format::{Entry, OUR_DIRECTORY, State};
use super::medium::Medium;
use super::reuse::Shelf;
use super::room;
use super::staging::{Modes, Staging, files_in, make_readable};
use super::writer::{self, Setting, Wanted, check_cancelled, failed, finish_file};
use super::{Leftover, Store, sums};
use super::{journal, manifest};
use crate::budget;
use crate::error::{Error, Kind, Result, shown};
use crate::hub;
use crate::load::buffers::{Passing, Pool};
use crate::load::digest::{self, hashed};
use crate::load::{self, Options, Sink};
use crate::manifest::{Digest, FileEntry, Manifest, SCHEMA};
use crate::plan::{Plan, lay_out};
use crate::source::{
    ChangeTime, Direct, Identity, Method, SelectedFile, Selection, SourceFile, changed, check_unchanged,
};
use crate::units::{HUGE_PAGE_BYTES, PAGE_BYTES, round_up};

/// What a build knows.
pub(super) struct Copying<'a> {
    pub(super) medium: &'a dyn Medium,
    pub(super) store: &'a Store,
    pub(super) request: &'a Request<'a>,
    pub(super) watch: &'a dyn Watch,
    /// With nothing passed through.
    pub(super) selection: &'a Selection,
    pub(super) entry: Entry,
}

/// How the bytes came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Copied {
    pub(super) copied_bytes: u64,
    pub(super) cloned_bytes: u64,
    pub(super) reused_bytes: u64,
}

/// A distinct file of the generation: one inode of the source.
struct Piece {
    /// Its first name, as an index in the selection.
    file: usize,
    way: Way,
    digest: Option<Digest>,
}

/// Where its bytes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// It is in the staging directory, taken over from a generation that noted this digest.
    Reused(Digest),
    /// It is in the staging directory, and shares the blocks of the source.
    Cloned(Option<ChangeTime>),
    /// It is to be copied.
    Copied,
}

impl Copying<'_> {
    /// Makes the generation, and says where it is. What is left where it fails is fit to go on from, or nothing.
    pub(super) fn run(&self, notes: &mut Vec<String>) -> Result<(PathBuf, Copied)> {
        let modes = Modes::of(self.store.is_private());
        let (shelf, interrupted) = self.shelf(notes)?;
        let files = self.selection.files.iter().map(|file| file.path.as_str());
        let links = &self.selection.directory_links;
        let made = Staging::make(
            self.medium,
            self.store.root(),
            self.entry.clone(),
            modes,
            self.source(),
            files,
            links,
        );
        let staging = made.map_err(|error| self.ended(error, false))?;
        let filled = self.fill(&staging, &shelf, &interrupted, notes);
        let committed = filled.and_then(|(pieces, copied)| {
            let manifest = self.manifest(&pieces)?;
            self.link_names(&staging)?;
            let text = manifest::encode(&manifest)?;
            let sums = sums::text(&manifest, manifest::digest(&text));
            let go_on = || check_cancelled(self.watch);
            Ok((staging.commit(&text, (&sums, sums::is_at_top(&manifest)), &go_on)?, copied))
        });
        committed.map_err(|error| {
            // Where the disk is full, what was copied is in the way of others.
            let stays = error.kind() != Kind::NoRoom && staging.has_finished_any();
            self.ended(error, stays)
        })
    }

    /// What becomes of a staging directory whose build has failed.
    fn ended(&self, error: Error, stays: bool) -> Error {
        let name = self.request.name;
        if !stays {
            // The error that there is matters more than one about this. The next build removes it.
            let path = self.store.root().join(self.entry.in_state(State::Staging).to_string());
            let _ = self.store.remove_tree(self.medium, &path);
        }
        match error.kind() {
            Kind::Cancelled if stays => {
                Error::new(Kind::Cancelled, format!("the copy of '{name}' was cancelled"))
                    .hint("the same command goes on from the files that were finished")
            }
            Kind::Cancelled => Error::new(Kind::Cancelled, format!("the copy of '{name}' was cancelled")),
            _ => error,
        }
    }
}

impl Copying<'_> {
    /// What is there already: files of whole generations, and of interrupted copies of this name; and where those
    /// copies are.
    fn shelf(&self, notes: &mut Vec<String>) -> Result<(Shelf, Vec<PathBuf>)> {
        let mut shelf = Shelf::default();
        let mut interrupted = Vec::new();
        let listing = self.store.list()?;
        let is_ours = |left: &Leftover| {
            let file_name = left.path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            left.name == *self.request.name
                && Entry::parse(file_name).is_some_and(|entry| entry.state == State::Staging)
        };
        for left in listing.leftovers.into_iter().filter(is_ours) {
            // In a root that several users share it may be another's, and not for us to read.
            match journal::read(&left.path) {
                Ok(Some(journal)) if !self.request.refresh => {
                    shelf.add(&left.path, &journal.source, &journal.finished);
                }
                Ok(_) => {}
                Err(error) => notes.push(format!("{} is not used: {error}", shown(&left.path))),
            }
            interrupted.push(left.path);
        }
        if !self.request.refresh {
            // The newest ones first, of which the most is alike.
            for generation in listing.generations.iter().rev() {
                let manifest = generation.manifest();
                shelf.add(generation.path(), &manifest.source, &manifest.files);
            }
        }
        Ok((shelf, interrupted))
    }

    fn source(&self) -> &str {
        self.selection.root.to_str().unwrap_or_default()
    }

    /// Puts every distinct file of the selection into the staging directory, hashed and synced.
    fn fill(
        &self,
        staging: &Staging<'_>,
        shelf: &Shelf,
        interrupted: &[PathBuf],
        notes: &mut Vec<String>,
    ) -> Result<(Vec<Piece>, Copied)> {
        let laid_out = lay_out(self.selection, HUGE_PAGE_BYTES);
        let mut pieces = Vec::with_capacity(laid_out.targets.len());
        let mut refusing = HashSet::new();
        for target in &laid_out.targets {
            check_cancelled(self.watch)?;
            let way = self.take_over(staging, shelf, target.file, &mut refusing)?;
            pieces.push(Piece { file: target.file, way, digest: None });
        }
        for left in interrupted {
            // Where it stays, the room that it takes may be missed, which is then told.
            let _ = self.remove_unfinished(left);
        }
        self.check_room(&pieces)?;
        let (pool, workers, chunk_bytes) =
            room::buffers(self.request.workers, self.request.chunk_bytes, laid_out.bytes_of_longest())?;
        let mut reading = Reading { pool, workers, chunk_bytes };
        room::check_descriptors(workers, self.request.engine.depth(), laid_out.targets.len())?;
        self.tell_plan(&pieces);
        let damaged = self.check(staging, &mut pieces, &reading)?;
        if !damaged.is_empty() {
            // Windows that were out when a read failed are gone with it.
            reading.pool = Pool::new(workers, chunk_bytes);
            notes.extend(damaged);
            self.check_room(&pieces)?;
            self.tell_plan(&pieces);
        }
        // What was worth keeping is noted in the new one. What cannot be removed is tried, and told, at the end again.
        for left in interrupted {
            let _ = self.store.remove_tree(self.medium, left);
        }
        let copied = sums_of(self.selection, &pieces);
        self.copy(staging, &mut pieces, &reading)?;
        self.check_sources(&pieces)?;
        Ok((pieces, copied))
    }

    /// Removes what an interrupted copy had not finished: it takes room, and is good for nothing.
    fn remove_unfinished(&self, left: &Path) -> Result<()> {
        let finished: HashSet<PathBuf> = match journal::read(left)? {
            Some(journal) => journal.finished.iter().map(|entry| left.join(&entry.path)).collect(),
            None => HashSet::new(),
        };
        let own = left.join(OUR_DIRECTORY);
        for file in files_in(left)? {
            if !file.starts_with(&own) && !finished.contains(&file) {
                self.medium.remove_file(&file).map_err(|cause| failed("remove", &file, &cause))?;
            }
        }
        Ok(())
    }

    /// Refuses what the disk has no room for.
    fn check_room(&self, pieces: &[Piece]) -> Result<()> {
        let copied = pieces.iter().filter(|piece| piece.way == Way::Copied);
        let (bytes, longest) = copied.fold((0u64, 0), |(sum, longest), piece| {
            let bytes = round_up(self.file(piece).identity.bytes, PAGE_BYTES);
            (sum.saturating_add(bytes), bytes.max(longest))
        });
        budget::limits::check_file_size(longest)?;
        room::check_disk(self.store.root(), self.request.name, bytes, pieces.len() as u64)
    }

    fn tell_plan(&self, pieces: &[Piece]) {
        let sums = sums_of(self.selection, pieces);
        let read = sums.copied_bytes.saturating_add(sums.cloned_bytes).saturating_add(sums.reused_bytes);
        self.watch.planned(read, sums.copied_bytes, pieces.len() as u64);
    }

    fn file(&self, piece: &Piece) -> &SelectedFile {
        &self.selection.files[piece.file]
    }

    /// Gets a file into the staging directory without reading it, where that can be done.
    fn take_over(
        &self,
        staging: &Staging<'_>,
        shelf: &Shelf,
        index: usize,
        refusing: &mut HashSet<u64>,
    ) -> Result<Way> {
        let file = &self.selection.files[index];
        let to = staging.file(&file.path);
        for (from, digest) in shelf.find(&self.selection.root, file) {
            if !is_intact(&from, &file.identity) {
                continue;
            }
            // A file of another user, or one with all the links that it can have: then its blocks at least.
            if self.medium.link(&from, &to).is_ok() {
                return Ok(Way::Reused(digest));
            }
            if let Ok(from) = File::open(&from)
                && self.clone_into(&from, &to, file, staging.modes())?
            {
                return Ok(Way::Reused(digest));
            }
        }
        if file.identity.bytes == 0 || refusing.contains(&file.identity.device) {
            return Ok(Way::Copied);
        }
        let source = SourceFile::open(file, Direct::Never, HUGE_PAGE_BYTES)?;
        if self.clone_into(source.descriptor(Method::Buffered), &to, file, staging.modes())? {
            return Ok(Way::Cloned(source.change_time()));
        }
        refusing.insert(file.identity.device);
        Ok(Way::Copied)
    }

    /// Makes `to` a file that shares the blocks of `from`; `false` where that cannot be done.
    fn clone_into(&self, from: &File, to: &Path, file: &SelectedFile, modes: Modes) -> Result<bool> {
        let made = make_readable(self.medium, to, modes.file).map_err(|cause| failed("make", to, &cause))?;
        if let Err(cause) = self.medium.clone_blocks(from, &made) {
            if matches!(cause.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) {
                return Err(failed("write", to, &cause));
            }
            drop(made);
            self.medium.remove_file(to).map_err(|cause| failed("remove", to, &cause))?;
            return Ok(false);
        }
        let wanted = Wanted { path: to.to_owned(), identity: file.identity, expected: None };
        finish_file(self.medium, &made, &wanted)?;
        Ok(true)
    }

    /// Reads and hashes what was taken over. What is damaged is to be copied, and is told.
    fn check(&self, staging: &Staging<'_>, pieces: &mut [Piece], reading: &Reading) -> Result<Vec<String>> {
        let taken: Vec<usize> = (0..pieces.len()).filter(|&index| pieces[index].way != Way::Copied).collect();
        if taken.is_empty() {
            return Ok(Vec::new());
        }
        let files = taken.iter().map(|&index| in_staging(staging, self.file(&pieces[index])));
        let files = files.collect::<Result<Vec<SelectedFile>>>()?;
        let (plan, files) = plan_of(files, reading.chunk_bytes);
        let found: Mutex<HashMap<usize, Digest>> = Mutex::default();
        let shared: &[Piece] = pieces;
        // A target of this plan may stand for several pieces, whose source's inodes were one file of a generation.
        let positions_of = plan.files_of_targets();
        let digested = |target: usize, digest: Digest| {
            for index in positions_of[target].iter().map(|&position| taken[position]) {
                let piece = &shared[index];
                if matches!(piece.way, Way::Reused(noted) if noted != digest) {
                    continue;
                }
                self.check_blob(self.file(piece), digest)?;
                // Before it is noted, so that nobody takes over what was cloned while somebody wrote to it.
                if matches!(piece.way, Way::Cloned(before) if check_source(self.file(piece), before).is_err())
                {
                    continue;
                }
                staging.note(&entry_of(self.file(piece), digest))?;
                writer::lock(&found).insert(index, digest);
                self.watch.finished_file();
            }
            Ok(())
        };
        let sink = Passing { pool: &reading.pool, digested: &digested };
        // What is on disk counts, not what the page cache has of it. Other generations may take and drop links to
        // these files meanwhile; that they are what was noted is told by their digests.
        let options = Options { direct: Direct::Storage, may_be_linked: true, ..Options::default() };
        let outcome = self.read(&plan, &files, &sink, reading, options);
        if let Err(error) = &outcome
            && matches!(error.kind(), Kind::Cancelled | Kind::NoRoom | Kind::Verification)
        {
            return Err(error.clone());
        }
        let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut damaged = Vec::new();
        for index in taken {
            if let Some(digest) = found.get(&index) {
                pieces[index].digest = Some(*digest);
                continue;
            }
            let path = staging.file(&self.file(&pieces[index]).path);
            self.medium.remove_file(&path).map_err(|cause| failed("remove", &path, &cause))?;
            damaged.push(match &outcome {
                Ok(_) if matches!(pieces[index].way, Way::Cloned(_)) => format!(
                    "{} was written to while it was cloned, and is copied anew",
                    shown(&self.file(&pieces[index]).path)
                ),
                Ok(_) => format!(
                    "{} of an older generation is damaged, and is copied anew",
                    shown(&self.file(&pieces[index]).path)
                ),
                Err(error) => format!("{} is copied anew: {error}", shown(&self.file(&pieces[index]).path)),
            });
            pieces[index].way = Way::Copied;
        }
        Ok(damaged)
    }

    /// Copies what is left to copy.
    fn copy(&self, staging: &Staging<'_>, pieces: &mut [Piece], reading: &Reading) -> Result<()> {
        let left: Vec<usize> = (0..pieces.len()).filter(|&index| pieces[index].way == Way::Copied).collect();
        if left.is_empty() {
            return Ok(());
        }
        let files = left.iter().map(|&index| self.file(&pieces[index]).clone()).collect();
        let (plan, files) = plan_of(files, reading.chunk_bytes);
        let wanted = |file: &SelectedFile| Wanted {
            path: staging.file(&file.path),
            identity: file.identity,
            expected: hub::blob_digest(&file.real),
        };
        let wanted: Vec<Wanted> = files.iter().map(wanted).collect();
        let mut chunks = vec![0; plan.targets.len()];
        plan.chunks.iter().for_each(|chunk| chunks[chunk.target] += 1);
        let before: Vec<OnceLock<Option<ChangeTime>>> = wanted.iter().map(|_| OnceLock::new()).collect();
        let begun = |target: usize| {
            before[target].get_or_init(|| ChangeTime::told_at(&files[target].real));
        };
        let finished = |target: usize, digest: Digest| {
            // The load looks at the end of all, but what is noted here outlives a kill before that: half old and half
            // new, under the old modification time, it would be taken over as whole.
            check_source(&files[target], before[target].get().copied().flatten())?;
            staging.note(&entry_of(&files[target], digest))?;
            self.watch.finished_file();
            Ok(())
        };
        let mismatch =
            |target: usize, expected: Digest, got: Digest| blob_mismatch(&files[target], expected, got);
        let setting = Setting {
            medium: self.medium,
            files: &wanted,
            chunks: &chunks,
            mode: staging.modes().file,
            pool: &reading.pool,
            engine: &self.request.engine,
            watch: self.watch,
            begun: &begun,
            finished: &finished,
            mismatch: &mismatch,
        };
        let digests =
            writer::write(&setting, |sink| self.read(&plan, &files, sink, reading, Options::default()))?;
        for (index, digest) in left.into_iter().zip(digests) {
            pieces[index].digest = Some(digest);
        }
        Ok(())
    }

    /// The one copy loop, with hashing between it and `sink`.
    fn read(
        &self,
        plan: &Plan,
        files: &[SelectedFile],
        sink: &dyn Sink,
        reading: &Reading,
        options: Options,
    ) -> Result<Vec<Digest>> {
        let start_engine = || self.medium.start_reader(&self.request.engine);
        let options = Options { workers: reading.workers, ..options };
        let watch = Forward(self.watch);
        let load = |sink: &dyn Sink| load::run(plan, files, &start_engine, sink, &watch, &options);
        hashed(plan, sink, digest::threads(), load).map(|(_, digests)| digests)
    }

    /// Compares with what the hub calls the file.
    fn check_blob(&self, file: &SelectedFile, digest: Digest) -> Result<()> {
        match hub::blob_digest(&file.real) {
            Some(expected) if expected != digest => Err(blob_mismatch(file, expected, digest)),
            _ => Ok(()),
        }
    }

    /// Whether the source is still what was selected. Of what was copied the copy loop has looked already.
    fn check_sources(&self, pieces: &[Piece]) -> Result<()> {
        for piece in pieces {
            check_cancelled(self.watch)?;
            let before = if let Way::Cloned(before) = piece.way { before } else { None };
            check_source(self.file(piece), before)?;
        }
        Ok(())
    }

    /// The further names of files that have several, and the links to directories.
    fn link_names(&self, staging: &Staging<'_>) -> Result<()> {
        let plan = lay_out(self.selection, HUGE_PAGE_BYTES);
        for (index, target) in plan.target_of_file.iter().enumerate() {
            check_cancelled(self.watch)?;
            let Some(target) = target else { continue };
            let first = plan.targets[*target].file;
            if first != index {
                staging.link_file(&self.selection.files[first].path, &self.selection.files[index].path)?;
            }
        }
        self.selection.directory_links.iter().try_for_each(|link| staging.link_directory(link))
    }

    /// What the generation holds.
    fn manifest(&self, pieces: &[Piece]) -> Result<Manifest> {
        let key = |file: &SelectedFile| (file.identity.device, file.identity.inode);
        let digests: HashMap<(u64, u64), Digest> =
            pieces.iter().filter_map(|piece| Some((key(self.file(piece)), piece.digest?))).collect();
        let entry = |file: &SelectedFile| {
            let sha256 = digests.get(&key(file)).copied();
            assert!(sha256.is_some(), "every file was hashed");
            FileEntry { sha256, ..FileEntry::from(file) }
        };
        Ok(Manifest {
            schema: SCHEMA,
            name: self.request.name.to_string(),
            source: self.source().to_owned(),
            selection: self.selection.rules.clone(),
            files: self.selection.files.iter().map(entry).collect(),
            directory_links: self.selection.directory_links.clone(),
            bytes: self.selection.bytes(),
            created: format!("{:.3}", Timestamp::now()),
            tool: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }
}

/// How a load of this build reads.
struct Reading {
    pool: Pool,
    workers: usize,
    chunk_bytes: u64,
}

/// The watch of a build as that of a load. Files are told when they are whole on disk, not when they were read.
struct Forward<'a>(&'a dyn Watch);

impl load::Watch for Forward<'_> {
    fn advanced(&self, bytes: u64) {
        self.0.read(bytes);
    }

    fn finished_file(&self) {}

    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }
}

/// The bytes of each way.
fn sums_of(selection: &Selection, pieces: &[Piece]) -> Copied {
    let mut sums = Copied::default();
    for piece in pieces {
        let sum = match piece.way {
            Way::Reused(_) => &mut sums.reused_bytes,
            Way::Cloned(_) => &mut sums.cloned_bytes,
            Way::Copied => &mut sums.copied_bytes,
        };
        *sum = sum.saturating_add(selection.files[piece.file].identity.bytes);
    }
    sums
}

/// The plan of some distinct files, each read in order, and the files.
fn plan_of(files: Vec<SelectedFile>, chunk_bytes: u64) -> (Plan, Vec<SelectedFile>) {
    let selection = Selection::of_files(PathBuf::new(), files);
    (lay_out(&selection, chunk_bytes).by_file(), selection.files)
}

/// A file of the staging directory as something to read.
fn in_staging(staging: &Staging<'_>, file: &SelectedFile) -> Result<SelectedFile> {
    let real = staging.file(&file.path);
    let metadata = std::fs::symlink_metadata(&real).map_err(|cause| failed("examine", &real, &cause))?;
    Ok(SelectedFile { path: file.path.clone(), real, identity: Identity::of(&metadata), passthrough: false })
}

/// Refuses a file of the source that is not what was selected, or was changed since `before`.
fn check_source(file: &SelectedFile, before: Option<ChangeTime>) -> Result<()> {
    let metadata = match std::fs::symlink_metadata(&file.real) {
        Ok(metadata) => metadata,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
            return Err(changed(&file.path, "it is gone"));
        }
        Err(cause) => return Err(Error::io("examine", &file.real, &cause)),
    };
    check_unchanged(file, &Identity::of(&metadata))?;
    match before {
        Some(before) if before != ChangeTime::of(&metadata) => {
            let how =
                "its bytes, mode, owner or links were, although size and modification time are the same";
            Err(changed(&file.path, how))
        }
        _ => Ok(()),
    }
}

fn entry_of(file: &SelectedFile, digest: Digest) -> FileEntry {
    FileEntry { sha256: Some(digest), ..FileEntry::from(file) }
}

/// Whether a file of a generation looks as it was made: a file of that length and time, that nobody may write to.
fn is_intact(path: &Path, identity: &Identity) -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).is_ok_and(|about| {
        let now = Identity::of(&about);
        let expected = Identity { device: now.device, inode: now.inode, ..*identity };
        about.is_file() && about.mode() & 0o222 == 0 && expected.is_unchanged(&now)
    })
}

fn blob_mismatch(file: &SelectedFile, expected: Digest, got: Digest) -> Error {
    let message =
        format!("{} is damaged: the hub says its SHA-256 is {expected}, but it is {got}", shown(&file.real));
    Error::new(Kind::Verification, message).hint("download it again (hf download --force-download)")
}
