//! `start --verify`: what is in memory is hashed, compared with what is known of it, and refused where it differs.

use std::os::unix::fs::symlink;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::harness::{MODEL, Ran, Sandbox, bytes_of};

/// The SHA-256 of bytes, as `sha256sum` prints it.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Every way in which files are read and held.
const WAYS: [[&str; 4]; 4] = [
    ["--engine", "io-uring", "--backing", "memfd"],
    ["--engine", "threads", "--backing", "memfd"],
    ["--engine", "io-uring", "--backing", "tmpfs"],
    ["--engine", "threads", "--backing", "tmpfs"],
];

/// Starts that way, unless this machine or this user has no such engine or backing.
fn start(sandbox: &Sandbox, way: &[&str], more: &[&str]) -> Option<Ran> {
    let ran = sandbox.start(&[way, more].concat());
    let is_refused = ran.code == Some(1)
        && ["io_uring", "--backing tmpfs", "private tmpfs"].iter().any(|what| ran.stderr.contains(what));
    if is_refused {
        crate::harness::skipped(format!("{way:?} cannot be had here: {}", ran.stderr.trim_end()));
    }
    (!is_refused).then_some(ran)
}

/// What the manifest has of each file: its digest, null where it has none.
pub(crate) fn digests(sandbox: &Sandbox) -> Vec<(String, serde_json::Value)> {
    let manifest = sandbox.ask("manifest", &[]).expect(0).json();
    let entry =
        |file: &serde_json::Value| (file["path"].as_str().unwrap().to_owned(), file["sha256"].clone());
    manifest["files"].as_array().unwrap().iter().map(entry).collect()
}

/// A snapshot of a hub cache in the sandbox: each file a link to its blob, named by its digest or, where `is_lfs` is
/// false, by something else.
pub(crate) fn snapshot(sandbox: &Sandbox, files: &[(&str, &[u8], bool)]) -> std::path::PathBuf {
    let folder = sandbox.path("hub/models--org--m");
    let snapshot = folder.join("snapshots/0123456789012345678901234567890123456789");
    std::fs::create_dir_all(folder.join("blobs")).unwrap();
    std::fs::create_dir_all(&snapshot).unwrap();
    for (path, bytes, is_lfs) in files {
        let name = if *is_lfs { sha256(bytes) } else { sha256(bytes)[..40].to_owned() };
        std::fs::write(folder.join("blobs").join(&name), bytes).unwrap();
        symlink(Path::new("../../blobs").join(name), snapshot.join(path)).unwrap();
    }
    snapshot
}

#[test]
fn a_manifest_has_the_digests_of_what_is_in_memory_and_none_without_verify() {
    let sandbox = Sandbox::new();
    sandbox.write("empty.txt", b"");
    sandbox.write("passed.txt", b"passed");
    let mut expected: Vec<(String, serde_json::Value)> = MODEL
        .iter()
        .enumerate()
        .map(|(index, (path, bytes))| (path.to_string(), sha256(&bytes_of(index as u64, *bytes)).into()))
        .collect();
    expected.push(("empty.txt".to_owned(), sha256(b"").into()));
    expected.push(("passed.txt".to_owned(), serde_json::Value::Null));
    expected.sort_by(|a, b| a.0.cmp(&b.0));
    for way in WAYS {
        for workers in ["1", "4"] {
            let more =
                ["--verify", "--workers", workers, "--chunk-size", "2097152", "--passthrough", "passed.txt"];
            let Some(ran) = start(&sandbox, &way, &more) else { break };
            let ran = ran.expect(0);
            let note = "note: --verify has nothing to compare with";
            assert_eq!(ran.stderr.matches(note).count(), 1, "{ran:#?}");
            assert_eq!(digests(&sandbox), expected, "{way:?}");
            for (path, bytes) in [("empty.txt", &b""[..]), ("passed.txt", b"passed")] {
                assert_eq!(std::fs::read(sandbox.view().join(path)).unwrap(), bytes);
            }
            let status = sandbox.status();
            assert_eq!((&status["verified"], &status["verified_files"]), (&false.into(), &0.into()));
            assert!(sandbox.ask("status", &[]).stdout.contains("nothing to compare with"));
            sandbox.ask("stop", &[]).expect(0);
        }
    }
    sandbox.started(&[]);
    assert!(digests(&sandbox).iter().all(|(_, digest)| digest.is_null()));
    assert_eq!(sandbox.status()["verified"], false);
    assert!(!sandbox.ask("status", &[]).stdout.contains("verified"));
    // It is a part of the identity.
    sandbox.start(&["--verify"]).expect_refusal(9, "--verify off → on");
}

#[test]
fn what_a_hub_cache_names_is_compared() {
    let sandbox = Sandbox::empty();
    let weights = bytes_of(3, (5 << 20) + 1);
    let snapshot = snapshot(
        &sandbox,
        &[("config.json", b"{}", false), ("a.safetensors", &weights, true), ("e", b"", true)],
    );
    let start = |way: &[&str]| {
        let model = snapshot.to_str().unwrap();
        sandbox.iloader(&[&["start", model, "--name", sandbox.name(), "--verify"], way].concat())
    };
    let ran = start(&["--workers", "2", "--chunk-size", "2097152"]).expect(0);
    assert!(ran.stderr.contains("nothing to compare 1 of 3 files with"), "{ran:#?}");
    let status = sandbox.status();
    assert_eq!((&status["verified"], &status["verified_files"]), (&true.into(), &2.into()));
    assert!(sandbox.ask("status", &[]).stdout.contains("2 files, against the hub cache"));
    assert_eq!(digests(&sandbox)[0].1, sha256(&weights));
    sandbox.ask("stop", &[]).expect(0);

    // One bit, anywhere; and an empty file where another one should be.
    let blob = snapshot.join("a.safetensors").canonicalize().unwrap();
    for place in [0, weights.len() / 2, weights.len() - 1] {
        let mut flipped = weights.clone();
        flipped[place] ^= 1;
        std::fs::write(&blob, &flipped).unwrap();
        for way in WAYS {
            let model = snapshot.to_str().unwrap();
            let words = [&["start", model, "--name", sandbox.name(), "--verify"][..], &way].concat();
            let ran = sandbox.iloader(&words);
            if ran.code == Some(1) {
                crate::harness::skipped(format!("{way:?} cannot be had here"));
                continue;
            }
            let ran = ran.expect_refusal(7, "a.safetensors is not what its name in the hub cache says");
            for digest in [sha256(&weights), sha256(&flipped)] {
                assert!(ran.stderr.contains(&digest), "{ran:#?}");
            }
            assert!(ran.stderr.contains("hint: "), "{ran:#?}");
            sandbox.nothing_left();
        }
    }
    std::fs::write(&blob, b"").unwrap();
    start(&[]).expect_refusal(7, &sha256(b""));
    sandbox.nothing_left();
    // Without --verify nobody looks.
    let model = snapshot.to_str().unwrap();
    sandbox.iloader(&["start", model, "--name", sandbox.name()]).expect(0);
}

#[test]
fn many_small_files_are_hashed_with_few_descriptors() {
    let sandbox = Sandbox::empty();
    for index in 0..2000u64 {
        sandbox.write(&format!("d{}/f{index:04}", index % 7), &bytes_of(index, 1 + index * 37));
    }
    sandbox.write("large.bin", &bytes_of(1, (9 << 20) + 5));
    sandbox.started(&["--verify", "--workers", "4", "--chunk-size", "2097152"]);
    let digests = digests(&sandbox);
    assert_eq!(digests.len(), 2001);
    for (path, digest) in digests {
        assert_eq!(digest, sha256(&std::fs::read(sandbox.model().join(&path)).unwrap()), "{path}");
    }
}
