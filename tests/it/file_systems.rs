//! Sources on other file systems: the bytes are right, and the page cache is left as it was found, also
//! where O_DIRECT is refused or quietly served through it. And copies there: whole, found to be so, and of
//! shared blocks where the file system can.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use iloader::load::Options;
use iloader::memory::{self, Resident};
use iloader::plan;
use iloader::source::Direct;

use crate::copy::{Meter, content, engines, select, settings};
use crate::harness::{Job, Sandbox, bytes_of, scratch_dir, skipped};

/// A mount of ours, taken away at the end also when the test fails.
struct Mount(PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        let gone = Command::new("umount").arg(&self.0).stderr(Stdio::null()).status();
        if !gone.is_ok_and(|status| status.success()) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
}

fn runs(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// Makes a file system in a file and mounts it at `at`.
fn loop_mount(kind: &str, options: &str, image: &Path, at: &Path) -> Result<Mount, String> {
    let file = File::create(image).map_err(|error| error.to_string())?;
    file.set_len(320 << 20).map_err(|error| error.to_string())?;
    std::fs::create_dir_all(at).map_err(|error| error.to_string())?;
    let (image, at_text) = (image.to_str().unwrap(), at.to_str().unwrap());
    runs(&format!("mkfs.{kind}"), &["-q", image])?;
    runs("mount", &["-o", &format!("loop,{options}"), image, at_text])?;
    Ok(Mount(at.to_owned()))
}

/// Bytes that compress, so that a compressing file system has something to do.
fn lengths_and_bytes() -> Vec<(&'static str, Vec<u8>)> {
    let repeated = |length: u64| bytes_of(3, 4096).into_iter().cycle().take(length as usize).collect();
    vec![
        ("empty", Vec::new()),
        ("compressible", repeated((20 << 20) + 77)),
        ("random", bytes_of(5, (9 << 20) + 4097)),
        ("small", bytes_of(6, 3000)),
    ]
}

/// Fills `directory`, drops what that left in the page cache, loads it by every engine and method, and
/// compares; `cache_of` is where the pages of the files are counted.
fn check_on(kind: &str, directory: &Path, cache_of: &Path) {
    let files = lengths_and_bytes();
    for (name, bytes) in &files {
        std::fs::write(directory.join(name), bytes).unwrap();
    }
    let selection = select(directory);
    let plan = plan::lay_out(&selection, 4 << 20);
    for engine in engines() {
        for direct in [Direct::Auto, Direct::Never, Direct::Storage] {
            let cold = files.iter().all(|(name, _)| forget(&cache_of.join(name)));
            let options = Options { direct, workers: 2, ..Options::default() };
            let settings = settings("elsewhere", engine, memory::Choice::Auto, options);
            let loaded = memory::load_with(
                &plan,
                &selection,
                &settings,
                &|| settings.engine.start(),
                &Meter::default(),
            );
            let resident: Resident = loaded.unwrap_or_else(|error| panic!("{kind}, {direct:?}: {error}"));
            for (index, file) in selection.files.iter().enumerate() {
                let expected = &files.iter().find(|(name, _)| *name == file.path).unwrap().1;
                let segment = &resident.segments[resident.segment_of_file[index].unwrap()];
                assert!(content(segment) == *expected, "{kind}, {direct:?}: {} differs", file.path);
            }
            if !cold {
                skipped(format!(
                    "{kind}: its page cache cannot be emptied, so what a load leaves there is not looked at"
                ));
                continue;
            }
            for (name, _) in &files {
                let pages = cached(&cache_of.join(name));
                assert_eq!(
                    pages,
                    Some(0),
                    "{kind}, {direct:?}: pages of {name} left behind, {:?}",
                    resident.counts
                );
            }
        }
    }
}

/// Whether a copy can share the blocks of its source.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Blocks {
    Copied,
    Shared,
}

/// Makes copies in `directory` of a source that lies there and of one that lies elsewhere, by each engine.
fn check_copies(kind: &str, directory: &Path, blocks: Blocks) {
    let sandbox = Sandbox::empty();
    let here = directory.join("source");
    std::fs::create_dir(&here).unwrap();
    let mut length = 0;
    for (name, bytes) in &lengths_and_bytes() {
        std::fs::write(here.join(name), bytes).unwrap();
        sandbox.write(name, bytes);
        length += bytes.len() as u64;
    }
    for (from, source) in [("here", &here), ("elsewhere", &sandbox.model())] {
        for engine in ["auto", "threads"] {
            let root = directory.join(format!("root-{from}-{engine}"));
            let before = free_bytes(directory);
            let mut words = vec!["cache", source.to_str().unwrap(), "--name", "m", "--engine", engine];
            words.extend(["--cache-root", root.to_str().unwrap()]);
            let made = Job::spawn(sandbox.command(&words)).wait().expect(0);
            let generation = PathBuf::from(made.stdout.trim_end());
            for (name, bytes) in &lengths_and_bytes() {
                let copy = std::fs::read(generation.join(name)).unwrap();
                assert!(copy == *bytes, "{kind}, {from}, {engine}: {name} differs");
            }
            let verify = ["verify", generation.to_str().unwrap()];
            Job::spawn(sandbox.command(&verify)).wait().expect(0);
            let mut check = Command::new("sha256sum");
            check.args(["--check", "--strict", "--quiet", "SHA256SUMS"]).current_dir(&generation);
            Job::spawn(check).wait().expect(0);
            let taken = before.saturating_sub(free_bytes(directory));
            let shares = blocks == Blocks::Shared && from == "here";
            assert!(
                !shares || taken < length / 4,
                "{kind}, {engine}: {taken} bytes were taken by a copy of {length}"
            );
            std::fs::remove_dir_all(&root).unwrap();
        }
    }
    std::fs::remove_dir_all(&here).unwrap();
}

fn free_bytes(directory: &Path) -> u64 {
    rustix::fs::syncfs(File::open(directory).unwrap()).unwrap();
    let space = rustix::fs::statvfs(directory).unwrap();
    space.f_bfree * space.f_frsize
}

fn cached(path: &Path) -> Option<u64> {
    iloader::sys::cache::cached_pages(&File::open(path).unwrap(), 0, 0).ok()
}

/// Empties the page cache of one file; false where that does not work.
fn forget(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    cached(path) == Some(0)
}

/// Why mounting cannot be tried here at all.
fn may_mount() -> Result<(), String> {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err("mounting needs root".to_owned()) }
}

fn on_loop_mount(kind: &str, options: &str, blocks: Blocks) {
    let scratch = scratch_dir();
    let at = scratch.path().join("mounted");
    match may_mount().and_then(|()| loop_mount(kind, options, &scratch.path().join("image"), &at)) {
        Ok(_mount) => {
            check_on(&format!("{kind} {options}"), &at, &at);
            check_copies(&format!("{kind} {options}"), &at, blocks);
        }
        Err(why) => skipped(format!("{kind} on a loop device: {why}")),
    }
}

#[test]
fn ext4() {
    on_loop_mount("ext4", "noatime", Blocks::Copied);
}

#[test]
fn xfs() {
    on_loop_mount("xfs", "noatime", Blocks::Shared);
}

#[test]
fn btrfs() {
    on_loop_mount("btrfs", "noatime", Blocks::Shared);
}

/// Btrfs reads compressed extents through the page cache although O_DIRECT was asked for.
#[test]
fn btrfs_that_compresses() {
    on_loop_mount("btrfs", "compress-force=zstd", Blocks::Shared);
}

#[test]
fn tmpfs() {
    let scratch = scratch_dir();
    let at = scratch.path().join("mounted");
    std::fs::create_dir_all(&at).unwrap();
    match may_mount().and_then(|()| runs("mount", &["-t", "tmpfs", "tmpfs", at.to_str().unwrap()])) {
        Ok(()) => {
            let _mount = Mount(at.clone());
            check_on("tmpfs", &at, &at);
            check_copies("tmpfs", &at, Blocks::Copied);
        }
        Err(why) => skipped(format!("tmpfs: {why}")),
    }
}

#[test]
fn overlayfs() {
    let scratch = scratch_dir();
    let part = |name: &str| {
        let path = scratch.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    };
    let (lower, upper, work, at) = (part("lower"), part("upper"), part("work"), part("mounted"));
    let options =
        format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let mount = ["-t", "overlay", "-o", &options, "overlay", at.to_str().unwrap()];
    match may_mount().and_then(|()| runs("mount", &mount)) {
        Ok(()) => {
            let _mount = Mount(at.clone());
            // An overlay's own files hold no pages: those of the layer below do.
            check_on("overlayfs", &at, &upper);
            check_copies("overlayfs", &at, Blocks::Copied);
        }
        Err(why) => skipped(format!("overlayfs: {why}")),
    }
}

#[test]
fn fuse() {
    let scratch = scratch_dir();
    let (behind, at) = (scratch.path().join("behind"), scratch.path().join("mounted"));
    std::fs::create_dir_all(&behind).unwrap();
    std::fs::create_dir_all(&at).unwrap();
    let mount = [behind.to_str().unwrap(), at.to_str().unwrap()];
    match may_mount().and_then(|()| runs("bindfs", &mount)) {
        Ok(()) => {
            let _mount = Mount(at.clone());
            check_on("fuse", &at, &at);
            check_copies("fuse", &at, Blocks::Copied);
        }
        Err(why) => skipped(format!("fuse: {why}")),
    }
}
