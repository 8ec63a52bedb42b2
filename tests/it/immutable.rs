//! What a reader gets cannot be changed by anybody, whatever holds it.

use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use iloader::sys::map::Mapping;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::harness::{Job, MODEL, Sandbox, bytes_of, skipped};

const WEIGHTS: &str = MODEL[1].0;

/// Starts the cache on `backing`, or says why it cannot be had here.
fn started(sandbox: &Sandbox, backing: &str) -> bool {
    let ran = sandbox.start(&["--backing", backing]);
    if backing == "tmpfs" && ran.code == Some(1) {
        skipped(format!("no private tmpfs: {}", ran.stderr));
        return false;
    }
    ran.expect(0);
    assert_eq!(sandbox.status()["backing"], backing);
    true
}

/// Tries everything that would change a file through `writer`, and says what did not fail.
fn changes_through(writer: &File) -> Vec<&'static str> {
    let mut changed = Vec::new();
    let mut tried = |what, outcome: rustix::io::Result<()>| {
        if outcome.is_ok() {
            changed.push(what);
        }
    };
    tried("write", rustix::io::pwrite(writer, b"x", 0).map(drop));
    tried("append", rustix::io::pwrite(writer, b"x", MODEL[1].1).map(drop));
    tried("shrink", rustix::fs::ftruncate(writer, 10));
    tried("grow", rustix::fs::ftruncate(writer, MODEL[1].1 + 10));
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    tried("hole punch", rustix::fs::fallocate(writer, hole, 0, 4096));
    tried("zero range", rustix::fs::fallocate(writer, FallocateFlags::ZERO_RANGE, 0, 4096));
    let is_mapped = Mapping::shared(writer, 4096).is_ok();
    tried("shared writable map", if is_mapped { Ok(()) } else { Err(Errno::PERM) });
    changed
}

/// A private map may be written to, and what is written stays in it.
fn private_maps_work(file: &Path) {
    let script = "import mmap, sys\n\
        f = open(sys.argv[1], 'rb')\n\
        m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)\n\
        before = m[0]\n\
        m[0] = before ^ 255\n\
        print(m[0] == before ^ 255 and f.read(1)[0] == before)\n";
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped("no python3: private writable maps are not tried");
    }
    let mut command = Command::new("python3");
    command.args(["-c", script]).arg(file);
    assert_eq!(Job::spawn(command).wait().expect(0).stdout, "True\n");
}

fn assert_unchanged(file: &Path) {
    assert!(std::fs::read(file).unwrap() == bytes_of(1, MODEL[1].1), "the bytes changed");
}

#[test]
fn a_memfd_refuses_every_change_of_its_bytes() {
    let sandbox = Sandbox::new();
    started(&sandbox, "memfd");
    let file = sandbox.view().join(WEIGHTS);
    assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o7777, 0o444);
    // Its own user can lift the mode, so the mode is not what protects it.
    std::fs::set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
    let writer = OpenOptions::new().read(true).write(true).open(&file).unwrap();
    assert_eq!(changes_through(&writer), [""; 0]);
    assert!(OpenOptions::new().write(true).truncate(true).open(&file).is_err());
    private_maps_work(&file);
    assert_unchanged(&file);
}

#[test]
fn a_private_tmpfs_refuses_changes_of_metadata_too() {
    let sandbox = Sandbox::new();
    if !started(&sandbox, "tmpfs") {
        return;
    }
    let file = sandbox.view().join(WEIGHTS);
    let before = std::fs::metadata(&file).unwrap();
    assert_eq!(before.mode() & 0o7777, 0o444);
    for options in [OpenOptions::new().write(true), OpenOptions::new().read(true).append(true)] {
        let errno = options.open(&file).unwrap_err().raw_os_error();
        assert!(errno == Some(Errno::ROFS.raw_os_error()) || errno == Some(Errno::ACCESS.raw_os_error()));
    }
    let reader = File::open(&file).unwrap();
    assert_eq!(changes_through(&reader), [""; 0]);
    assert!(std::fs::set_permissions(&file, Permissions::from_mode(0o666)).is_err());
    assert!(reader.set_modified(SystemTime::UNIX_EPOCH).is_err());
    assert!(std::os::unix::fs::chown(&file, None, Some(before.gid())).is_err());
    private_maps_work(&file);
    assert_unchanged(&file);
    let after = std::fs::metadata(&file).unwrap();
    assert_eq!(
        (after.mode(), after.mtime_nsec(), after.ctime_nsec()),
        (before.mode(), before.mtime_nsec(), before.ctime_nsec())
    );
    assert_eq!(sandbox.status()["view_faults"], serde_json::json!([]));
}

#[test]
fn a_status_notices_what_seals_do_not_cover() {
    let sandbox = Sandbox::new();
    started(&sandbox, "memfd");
    let file = sandbox.view().join(WEIGHTS);
    let modified = std::fs::metadata(&file).unwrap().modified().unwrap();
    assert_eq!(modified, std::fs::metadata(sandbox.model().join(WEIGHTS)).unwrap().modified().unwrap());
    let faults = || sandbox.status()["view_faults"].as_array().unwrap().clone();
    assert!(faults().is_empty());

    std::fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    let found = faults();
    assert!(found.len() == 1 && found[0].as_str().unwrap().contains(WEIGHTS), "{found:?}");
    assert!(found[0].as_str().unwrap().contains("0644"), "{found:?}");
    std::fs::set_permissions(&file, Permissions::from_mode(0o444)).unwrap();
    assert!(faults().is_empty());

    File::open(&file).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    let found = faults();
    assert!(found.len() == 1 && found[0].as_str().unwrap().contains("time"), "{found:?}");
    let text = sandbox.ask("status", &[]).expect(0).stdout;
    assert!(text.contains("modification time was changed"), "{text}");
}

#[test]
fn a_status_notices_that_the_source_changed() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    sandbox.write("config.json", b"{}");
    sandbox.write("new.json", b"{}");
    std::fs::remove_file(sandbox.model().join(MODEL[2].0)).unwrap();
    let status = sandbox.status();
    assert_eq!((&status["state"], &status["source_changed"]), (&"ready".into(), &true.into()));
    let changes = status["source_changes"].to_string();
    for path in ["config.json", "new.json", MODEL[2].0] {
        assert!(changes.contains(path), "{path}: {changes}");
    }
    assert_unchanged(&sandbox.view().join(WEIGHTS));
}
