//! A disk that loses power: what was not synced is forgotten, or half there.
//!
//! Every call is carried out on real files, so that everything that looks finds them. Beside that it is kept what a
//! disk would have of them: the bytes of a file as of its last sync, the entries of a directory as of its last sync.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::fs::AtFlags;

use super::medium::{Disk, Medium};
use super::writer::lock;
use crate::engine::{Completion, Engine, Selected, Transfer};
use crate::error::Result;
use crate::source::Identity;

/// Something on a disk, with everything below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Image {
    File { bytes: Vec<u8>, mode: u32, modified: (i64, i64) },
    Directory { entries: BTreeMap<OsString, Image>, mode: u32 },
    Link(PathBuf),
}

impl Image {
    /// What is at `path`.
    pub(super) fn read(path: &Path) -> Image {
        let about = fs::symlink_metadata(path).unwrap();
        let mode = about.mode() & 0o7777;
        if about.is_symlink() {
            return Image::Link(fs::read_link(path).unwrap());
        }
        if about.is_file() {
            let modified = (about.mtime(), about.mtime_nsec());
            return Image::File { bytes: fs::read(path).unwrap(), mode, modified };
        }
        let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
        let entries = entries.map(|entry| (entry.file_name(), Image::read(&entry.path()))).collect();
        Image::Directory { entries, mode }
    }

    /// Puts it at `path`, where there is nothing.
    pub(super) fn write(&self, path: &Path) {
        match self {
            Image::Link(target) => std::os::unix::fs::symlink(target, path).unwrap(),
            Image::File { bytes, mode, modified } => {
                let file =
                    fs::OpenOptions::new().write(true).create_new(true).mode(*mode).open(path).unwrap();
                io::Write::write_all(&mut &file, bytes).unwrap();
                let identity = Identity {
                    device: 0,
                    inode: 0,
                    bytes: 0,
                    mtime_seconds: modified.0,
                    mtime_nanoseconds: modified.1 as u32,
                };
                Disk.set_modified(&file, &identity).unwrap();
            }
            Image::Directory { entries, mode } => {
                fs::DirBuilder::new().mode(0o700).create(path).unwrap();
                for (name, image) in entries {
                    image.write(&path.join(name));
                }
                fs::set_permissions(path, fs::Permissions::from_mode(*mode)).unwrap();
            }
        }
    }
}

/// What the disk has of directories that were changed and not synced when the power went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// They are as they were synced last.
    Forgotten,
    /// They are as they were when the power went: the files in them have their length, and zeros where they were not
    /// synced.
    Kept,
}

/// A number for what an inode is at one time: the real ones are used again.
type Id = u64;

#[derive(Clone)]
enum Entry {
    Known(Id),
    Link(PathBuf),
}

#[derive(Default)]
struct State {
    operations: u64,
    is_down: bool,
    last: Id,
    ids: HashMap<(u64, u64), Id>,
    /// As of the last sync.
    files: HashMap<Id, Image>,
    directories: HashMap<Id, (BTreeMap<OsString, Entry>, u32)>,
}

/// The disk under one directory.
pub(super) struct Simulated {
    root: PathBuf,
    /// The operation, counted from 1, that is not done any more, nor any after it. 0: none.
    stop_at: u64,
    state: Arc<Mutex<State>>,
}

impl Simulated {
    /// The disk under `root`, everything in it synced.
    pub(super) fn new(root: &Path, stop_at: u64) -> Simulated {
        let mut state = State::default();
        state.sync_tree(root);
        Simulated { root: root.to_owned(), stop_at, state: Arc::new(Mutex::new(state)) }
    }

    /// Whether the power has gone.
    pub(super) fn is_down(&self) -> bool {
        lock(&self.state).is_down
    }

    /// What is there when the power is back.
    pub(super) fn after(&self, outcome: Outcome) -> Image {
        let mut state = lock(&self.state);
        match outcome {
            Outcome::Forgotten => {
                let root = state.id_at(&self.root);
                state.synced(root)
            }
            Outcome::Kept => state.kept(&self.root),
        }
    }

    fn step(&self) -> io::Result<()> {
        step(&self.state, self.stop_at)
    }
}

fn step(state: &Mutex<State>, stop_at: u64) -> io::Result<()> {
    let mut state = lock(state);
    state.operations += 1;
    state.is_down |= state.operations == stop_at;
    if state.is_down { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
}

impl State {
    /// A new inode, of which the disk has nothing.
    fn make(&mut self, about: &fs::Metadata) -> Id {
        self.last += 1;
        self.ids.insert((about.dev(), about.ino()), self.last);
        self.last
    }

    fn id_at(&mut self, path: &Path) -> Id {
        let about = fs::symlink_metadata(path).unwrap();
        match self.ids.get(&(about.dev(), about.ino())) {
            Some(id) => *id,
            // Made past us: what that is, is not what is tested.
            None => self.sync_tree(path),
        }
    }

    fn entry_at(&mut self, path: &Path) -> Entry {
        match fs::read_link(path) {
            Ok(target) => Entry::Link(target),
            Err(_) => Entry::Known(self.id_at(path)),
        }
    }

    fn sync_tree(&mut self, path: &Path) -> Id {
        let about = fs::symlink_metadata(path).unwrap();
        let id = self.make(&about);
        if about.is_dir() {
            self.sync_directory(id, path);
        } else {
            self.files.insert(id, Image::read(path));
        }
        id
    }

    fn sync_directory(&mut self, id: Id, path: &Path) {
        let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
        let entries = entries.map(|entry| (entry.file_name(), self.entry_at(&entry.path()))).collect();
        let mode = fs::metadata(path).unwrap().mode() & 0o7777;
        self.directories.insert(id, (entries, mode));
    }

    /// What the disk has for sure.
    fn synced(&self, id: Id) -> Image {
        if let Some(file) = self.files.get(&id) {
            return file.clone();
        }
        match self.directories.get(&id) {
            Some((entries, mode)) => {
                let image = |entry: &Entry| match entry {
                    Entry::Known(id) => self.synced(*id),
                    Entry::Link(target) => Image::Link(target.clone()),
                };
                let entries = entries.iter().map(|(name, entry)| (name.clone(), image(entry))).collect();
                Image::Directory { entries, mode: *mode }
            }
            // A name, and nothing behind it yet.
            None => Image::File { bytes: Vec::new(), mode: 0o400, modified: (0, 0) },
        }
    }

    /// What it may have.
    fn kept(&mut self, path: &Path) -> Image {
        match Image::read(path) {
            Image::File { bytes, mode, modified } => {
                let id = self.id_at(path);
                let zeros = || Image::File { bytes: vec![0; bytes.len()], mode, modified };
                self.files.get(&id).cloned().unwrap_or_else(zeros)
            }
            Image::Directory { entries, mode } => {
                let entries = entries.into_keys().map(|name| (name.clone(), self.kept(&path.join(name))));
                Image::Directory { entries: entries.collect(), mode }
            }
            link => link,
        }
    }
}

impl Medium for Simulated {
    fn make_directory(&self, path: &Path, mode: u32) -> io::Result<()> {
        self.step()?;
        Disk.make_directory(path, mode)?;
        let mut state = lock(&self.state);
        let id = state.make(&fs::metadata(path)?);
        state.directories.insert(id, (BTreeMap::new(), mode));
        Ok(())
    }

    fn make_file(&self, path: &Path, mode: u32) -> io::Result<File> {
        self.step()?;
        let file = Disk.make_file(path, mode)?;
        lock(&self.state).make(&file.metadata()?);
        Ok(file)
    }

    fn preallocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        self.step()?;
        Disk.preallocate(file, bytes)
    }

    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.step()?;
        Disk.write(file, bytes, offset)
    }

    fn set_length(&self, file: &File, bytes: u64) -> io::Result<()> {
        self.step()?;
        Disk.set_length(file, bytes)
    }

    fn set_modified(&self, file: &File, identity: &Identity) -> io::Result<()> {
        self.step()?;
        Disk.set_modified(file, identity)
    }

    fn set_mode(&self, file: &File, mode: u32) -> io::Result<()> {
        self.step()?;
        Disk.set_mode(file, mode)
    }

    fn clone_blocks(&self, from: &File, to: &File) -> io::Result<()> {
        self.step()?;
        Disk.clone_blocks(from, to)
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        self.step()?;
        let path = fs::canonicalize(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        let mut state = lock(&self.state);
        let id = state.id_at(&path);
        state.files.insert(id, Image::read(&path));
        Ok(())
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        let mut state = lock(&self.state);
        let id = state.id_at(path);
        state.sync_directory(id, path);
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        Disk.link(from, to)
    }

    fn symlink(&self, target: &Path, path: &Path) -> io::Result<()> {
        self.step()?;
        Disk.symlink(target, path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        Disk.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        Disk.remove_file(path)
    }

    fn unlink_at(&self, directory: BorrowedFd<'_>, name: &OsStr, flags: AtFlags) -> rustix::io::Result<()> {
        self.step().map_err(|_| rustix::io::Errno::IO)?;
        Disk.unlink_at(directory, name, flags)
    }

    fn start_engine(&self, engine: &Selected) -> Result<Box<dyn Engine>> {
        let engine = Disk.start_engine(engine)?;
        let (state, stop_at) = (Arc::clone(&self.state), self.stop_at);
        Ok(Box::new(Powered { engine, state, stop_at, failed: Vec::new() }))
    }
}

/// An engine of the simulated disk: each write is a step.
struct Powered {
    engine: Box<dyn Engine>,
    state: Arc<Mutex<State>>,
    stop_at: u64,
    failed: Vec<Completion>,
}

impl Engine for Powered {
    fn depth(&self) -> usize {
        self.engine.depth()
    }

    fn submit(&mut self, transfer: Transfer) -> std::result::Result<(), Transfer> {
        match step(&self.state, self.stop_at) {
            Ok(()) => self.engine.submit(transfer),
            Err(cause) => {
                let Transfer { token, window, .. } = transfer;
                self.failed.push(Completion { token, window, result: Err(cause) });
                Ok(())
            }
        }
    }

    fn start(&mut self) -> Result<()> {
        self.engine.start()
    }

    fn reap(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        if self.failed.is_empty() {
            return self.engine.reap(completions);
        }
        completions.append(&mut self.failed);
        Ok(())
    }
}
