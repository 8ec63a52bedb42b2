//! `start --local-cache`: a generation on disk is prepared once, loaded from, and stands in for its source.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use rustix::process::Signal;

use crate::digests::{digests, sha256, snapshot};
use crate::harness::{Frozen, Job, MODEL, Ran, Sandbox, bytes_of, entries, skipped, until};

/// The generations of the sandbox's own root.
fn generations(sandbox: &Sandbox) -> Vec<String> {
    let names = entries(&sandbox.path("base/model-cache")).into_iter();
    names.filter(|name| !name.starts_with('.')).collect()
}

fn generation(sandbox: &Sandbox, number: u32) -> PathBuf {
    sandbox.path("base/model-cache").join(format!("{}@{number}", sandbox.name())).canonicalize().unwrap()
}

/// Starts from a local cache, which must succeed.
fn started(sandbox: &Sandbox, words: &[&str]) -> Ran {
    sandbox.start(&[&["--local-cache"], words].concat()).expect(0)
}

fn stop(sandbox: &Sandbox) {
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

/// The view is the model as the sandbox made it.
fn assert_whole(sandbox: &Sandbox) {
    for (index, (path, bytes)) in MODEL.iter().enumerate() {
        let found = std::fs::read(sandbox.view().join(path)).unwrap();
        assert!(found == bytes_of(index as u64, *bytes), "{path} is another");
    }
}

#[test]
fn a_cache_is_loaded_from_a_generation_and_is_about_the_source() {
    let sandbox = Sandbox::new();
    for backing in ["memfd", "auto"] {
        for engine in ["auto", "threads"] {
            let ran = started(&sandbox, &["--backing", backing, "--engine", engine]);
            assert_eq!(ran.path(), sandbox.view());
            assert_whole(&sandbox);
            assert_eq!(generations(&sandbox), [format!("{}@1", sandbox.name())]);
            let status = sandbox.status();
            assert_eq!(status["generation"], generation(&sandbox, 1).to_str().unwrap());
            assert_eq!(status["source"], sandbox.model().canonicalize().unwrap().to_str().unwrap());
            assert_eq!(status["source_changed"], false, "{status:#}");
            assert_eq!(status["view_faults"], serde_json::json!([]), "{status:#}");
            assert_eq!(status["verified"], false);
            let manifest = sandbox.ask("manifest", &[]).expect(0).json();
            assert_eq!(manifest["generation"], status["generation"]);
            assert_eq!(manifest["source"], status["source"]);
            for file in manifest["files"].as_array().unwrap() {
                use std::os::unix::fs::MetadataExt;
                let source = std::fs::metadata(sandbox.model().join(file["path"].as_str().unwrap())).unwrap();
                assert_eq!((&file["inode"], &file["device"]), (&source.ino().into(), &source.dev().into()));
                assert!(file["sha256"].is_null(), "only what was hashed in memory has a digest here");
            }
            assert!(sandbox.ask("status", &[]).stdout.contains("loaded from"));
            stop(&sandbox);
        }
    }
    // Without it nothing is said of a generation.
    sandbox.started(&[]);
    assert!(sandbox.status()["generation"].is_null());
    assert!(sandbox.ask("manifest", &[]).expect(0).json()["generation"].is_null());
}

#[test]
fn what_runs_is_reused_without_a_copy_and_another_identity_is_refused_before_one() {
    let sandbox = Sandbox::new();
    started(&sandbox, &[]);
    let (root, one) = (sandbox.path("base/model-cache"), generation(&sandbox, 1));
    let daemon = sandbox.daemon();
    // Whatever became of the generation: memory has its bytes.
    std::fs::rename(&root, sandbox.path("away")).unwrap();
    started(&sandbox, &[]);
    let ran = started(&sandbox, &["--refresh-cache"]);
    assert!(ran.stderr.contains("--refresh-cache copies nothing"), "{ran:#?}");
    assert!(!root.exists() && sandbox.daemon() == daemon);
    std::fs::rename(sandbox.path("away"), &root).unwrap();

    let elsewhere = sandbox.path("elsewhere");
    for (words, differs) in [
        (&[][..], "--local-cache"),
        (&["--local-cache", "--cache-name", "other"], "--local-cache"),
        (&["--local-cache", "--cache-root", elsewhere.to_str().unwrap()], "--local-cache"),
        (&["--local-cache", "--verify"], "--verify off → on"),
    ] {
        sandbox.start(words).expect_refusal(9, differs);
    }
    sandbox.write("config.json", b"{\"another\": 1}");
    sandbox.start(&["--local-cache"]).expect_refusal(9, "config.json: size 1234 → 14");
    assert_eq!(generations(&sandbox), [format!("{}@1", sandbox.name())], "nothing is copied");
    assert!(!elsewhere.exists() && sandbox.daemon() == daemon && one.exists());

    let ran = started(&sandbox, &["--replace"]);
    assert!(ran.stderr.contains("stopped '"), "{ran:#?}");
    assert_eq!(generations(&sandbox), [format!("{}@2", sandbox.name())]);
    assert_eq!(std::fs::read(sandbox.view().join("config.json")).unwrap(), b"{\"another\": 1}");
    assert_eq!(sandbox.status()["source_changed"], false);
}

/// What cannot be prepared disturbs nothing.
#[test]
fn a_replacement_that_cannot_be_prepared_leaves_what_runs() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    let daemon = sandbox.daemon();
    let file = sandbox.path("file");
    std::fs::write(&file, "").unwrap();
    let ran = sandbox.start(&["--local-cache", "--replace", "--cache-root", file.to_str().unwrap()]);
    assert!(ran.code.is_some_and(|code| code != 0), "{ran:#?}");
    assert_eq!(sandbox.daemon(), daemon);
    assert_whole(&sandbox);
}

#[test]
fn two_starts_at_once_prepare_one_generation() {
    let sandbox = Sandbox::new();
    let root = sandbox.path("root");
    let start = |name: &str| {
        let (model, root) = (sandbox.model(), root.to_str().unwrap());
        let words = ["start", model.to_str().unwrap(), "--name", name, "--local-cache", "--cache-root", root];
        Job::spawn(sandbox.command(&[&words[..], &["--cache-name", "shared"]].concat()))
    };
    let second = format!("{}-2", sandbox.name());
    for job in [start(sandbox.name()), start(sandbox.name()), start(&second)] {
        job.wait().expect(0);
    }
    let names: Vec<String> = entries(&root).into_iter().filter(|name| !name.starts_with('.')).collect();
    assert_eq!(names, ["shared@1"]);
    assert_whole(&sandbox);
    // A directory that is given goes by the umask, as a group would share it.
    let mode = std::fs::metadata(&root).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o777 & !umask(), "{mode:o}");
    sandbox.iloader(&["stop", &second, sandbox.name()]).expect(0);
    sandbox.nothing_left();
}

fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:")).unwrap();
    u32::from_str_radix(line.trim(), 8).unwrap()
}

#[test]
fn a_root_that_the_daemon_cannot_be_told_of_is_refused_before_anything_is_copied() {
    let sandbox = Sandbox::new();
    let root = sandbox.path("").join(OsStr::from_bytes(b"root\xff"));
    let mut start = sandbox.command(&["start", "model", "--name", "qwen", "--local-cache", "--cache-root"]);
    start.arg(&root).current_dir(sandbox.path(""));
    Job::spawn(start).wait().expect_refusal(2, "is not UTF-8");
    assert!(!root.exists());
}

#[test]
fn a_generation_serves_while_the_source_cannot_be_reached() {
    let sandbox = Sandbox::new();
    let model = sandbox.model();
    sandbox.start(&["--local-cache", "--cache-name", "m"]).expect(0);
    let identity = sandbox.status()["identity"].clone();
    let away = sandbox.path("away");
    std::fs::rename(&model, &away).unwrap();
    // The same cache all the same.
    let reused = started(&sandbox, &["--cache-name", "m"]);
    assert!(reused.stderr.contains("the source can't be reached"), "{reused:#?}");
    stop(&sandbox);

    let serves = |words: &[&str]| {
        let ran = started(&sandbox, &[&["--cache-name", "m"], words].concat());
        let path = sandbox.path("base/model-cache/m@1");
        for part in ["warning: the source can't be reached", " old", path.to_str().unwrap()] {
            assert!(ran.stderr.contains(part), "no '{part}': {ran:#?}");
        }
        assert_whole(&sandbox);
        let status = sandbox.status();
        assert_eq!(status["source_changed"], true, "{status:#}");
        status
    };
    assert_eq!(serves(&[])["identity"], identity);
    stop(&sandbox);
    let verified = serves(&["--verify", "--passthrough", "config.json"]);
    assert_eq!(
        (&verified["verified"], &verified["passthrough"]),
        (&true.into(), &serde_json::json!(["config.json"]))
    );
    stop(&sandbox);
    // A directory without a file, as a mount point is on which nothing is mounted; and one that can't be followed.
    std::fs::create_dir(&model).unwrap();
    serves(&[]);
    stop(&sandbox);
    std::fs::remove_dir(&model).unwrap();
    std::os::unix::fs::symlink("model", &model).unwrap();
    serves(&[]);
    stop(&sandbox);
    std::fs::remove_file(&model).unwrap();

    // Not for what it is no copy of, and not for who wants a new one.
    let refused = |words: &[&str]| {
        let ran = sandbox.start(&[&["--local-cache"], words].concat());
        ran.expect_refusal(3, "model");
        sandbox.nothing_left();
    };
    refused(&[]);
    refused(&["--cache-name", "m", "--refresh-cache"]);
    refused(&["--cache-name", "m", "--pattern", "*.json"]);
    let other = sandbox.path("other");
    let words =
        ["start", other.to_str().unwrap(), "--name", sandbox.name(), "--local-cache", "--cache-name", "m"];
    sandbox.iloader(&words).expect_refusal(3, "other");
    sandbox.start(&[]).expect_refusal(3, "model");
    // And nothing of the cache is put where the source will be again.
    let inside = model.join("view");
    let words = ["--local-cache", "--cache-name", "m", "--view", inside.to_str().unwrap()];
    sandbox.start(&words).expect_refusal(2, "inside the source");
    assert!(!model.exists());
}

#[test]
fn a_bit_that_flipped_in_a_generation_is_found_before_anything_is_published() {
    let sandbox = Sandbox::new();
    started(&sandbox, &["--verify"]);
    assert_eq!(
        (&sandbox.status()["verified"], &sandbox.status()["verified_files"]),
        (&true.into(), &4.into())
    );
    for (index, (path, digest)) in digests(&sandbox).iter().enumerate() {
        assert_eq!(*digest, sha256(&bytes_of(index as u64, MODEL[index].1)), "{path}");
    }
    assert!(sandbox.ask("status", &[]).stdout.contains("4 files, against the generation"));
    stop(&sandbox);

    let (path, bytes) = MODEL[1];
    let file = generation(&sandbox, 1).join(path);
    let modified = std::fs::metadata(&file).unwrap().modified().unwrap();
    let mut flipped = bytes_of(1, bytes);
    flipped[3 << 20] ^= 8;
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
    std::fs::write(&file, &flipped).unwrap();
    std::fs::File::options().write(true).open(&file).unwrap().set_modified(modified).unwrap();
    for engine in ["auto", "threads"] {
        for backing in ["auto", "memfd"] {
            let words = ["--local-cache", "--verify", "--engine", engine, "--backing", backing];
            let ran = sandbox.start(&words).expect_refusal(7, path);
            for part in [sha256(&bytes_of(1, bytes)), sha256(&flipped), "iloader verify".to_owned()] {
                assert!(ran.stderr.contains(&part), "no {part}: {ran:#?}");
            }
            sandbox.nothing_left();
        }
    }
    // The way out that the hint names.
    started(&sandbox, &["--verify", "--refresh-cache"]);
    assert_whole(&sandbox);
    assert_eq!(sandbox.status()["generation"], generation(&sandbox, 2).to_str().unwrap());
}

#[test]
fn a_generation_is_leased_while_it_loads_and_longer_where_files_are_passed_through() {
    let sandbox = Sandbox::slow();
    let is_leased = |number| lease_is_held(&generation(&sandbox, number));
    started(&sandbox, &["--quiet"]);
    assert!(!is_leased(1), "what is in memory needs it no more");
    stop(&sandbox);
    if let Some(frozen) = freeze(&sandbox) {
        assert!(is_leased(1));
        let name = format!("{}@1", sandbox.name());
        sandbox.iloader(&["cache-remove", &name]).expect_refusal(5, &name);
        // The next generation takes files over as links: that is no change of this one.
        std::fs::hard_link(generation(&sandbox, 1).join("model.safetensors"), sandbox.path("linked"))
            .unwrap();
        drop(frozen);
        sandbox.ask("wait", &[]).expect(0);
        until("an end of the lease", || !is_leased(1));
        stop(&sandbox);
    }
    started(&sandbox, &["--passthrough", "config.json"]);
    assert!(is_leased(1));
    let link = std::fs::canonicalize(sandbox.view().join("config.json")).unwrap();
    assert_eq!(link, generation(&sandbox, 1).join("config.json"));
    assert!(sandbox.ask("status", &[]).stdout.contains("the generation itself, not in memory"));
    stop(&sandbox);
    assert!(!is_leased(1));
}

/// Whether anybody holds a shared lock on it.
fn lease_is_held(generation: &std::path::Path) -> bool {
    let lock = std::fs::File::open(generation.join(".iloader/lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err()
}

/// A load from the generation that is met in its middle.
fn freeze(sandbox: &Sandbox) -> Option<Frozen> {
    let frozen = sandbox.freeze_with(&["--local-cache"]);
    if frozen.is_none() {
        skipped("a load from the generation cannot be met");
    }
    frozen
}

#[test]
fn a_root_and_its_source_stand_apart() {
    let sandbox = Sandbox::new();
    let inside = sandbox.model().join("copies");
    let (inside, around) = (inside.to_str().unwrap(), sandbox.path(""));
    for root in [inside, around.to_str().unwrap()] {
        let ran = sandbox.start(&["--local-cache", "--cache-root", root]).expect_refusal(2, "--cache-root");
        assert!(ran.stderr.contains("the source"), "{ran:#?}");
    }
    assert!(!std::path::Path::new(inside).exists() && !sandbox.path("base/run").exists(), "nothing is made");
    for words in [["--cache-root", "/r"], ["--cache-name", "n"], ["--cache-workers", "2"]] {
        sandbox.start(&words).expect_refusal(2, "--local-cache");
    }
    sandbox.start(&["--refresh-cache"]).expect_refusal(2, "--local-cache");
}

#[test]
fn no_wait_prepares_in_the_foreground_and_refresh_makes_a_new_generation() {
    let sandbox = Sandbox::new();
    // Preparing is no part of the time to wait.
    started(&sandbox, &["--no-wait", "--wait-timeout", "0"]);
    assert_eq!(generations(&sandbox), [format!("{}@1", sandbox.name())]);
    sandbox.ask("wait", &[]).expect(0);
    assert_whole(&sandbox);
    stop(&sandbox);
    started(&sandbox, &["--refresh-cache"]);
    assert_eq!(generations(&sandbox), [format!("{}@2", sandbox.name())]);
    assert_whole(&sandbox);
}

#[test]
fn a_daemon_in_the_foreground_loads_from_a_generation() {
    let sandbox = Sandbox::new();
    let start = Job::spawn(sandbox.start_command(&["--foreground", "--local-cache"]));
    until("readiness", || sandbox.ask("view", &[]).code == Some(0));
    assert_whole(&sandbox);
    assert_eq!(sandbox.status()["generation"], generation(&sandbox, 1).to_str().unwrap());
    assert!(!lease_is_held(&generation(&sandbox, 1)));
    sandbox.ask("stop", &[]).expect(0);
    start.wait().expect(0);
    sandbox.nothing_left();
}

#[test]
fn ctrl_c_while_it_is_prepared_starts_nothing_and_keeps_what_was_copied() {
    let sandbox = Sandbox::empty();
    let root = sandbox.path("base/model-cache");
    sandbox.write("a.bin", &bytes_of(1, 1 << 20));
    sandbox.write("z.bin", &bytes_of(2, 400 << 20));
    let start = Job::spawn(sandbox.start_command(&["--local-cache", "--cache-workers", "2"]));
    until("a copy under way", || {
        entries(&root).iter().any(|name| name.ends_with(".staging") || name.ends_with("@1"))
    });
    start.signal(Signal::INT);
    let ran = start.wait();
    if ran.code == Some(0) {
        skipped("a copy is over too fast to be met here");
        return;
    }
    ran.expect_refusal(130, "cancelled");
    sandbox.nothing_left();
    assert_eq!(generations(&sandbox), [""; 0]);
    assert!(!sandbox.view().exists());
    started(&sandbox, &[]);
    assert_eq!(sandbox.status()["source_changed"], false);
    assert!(std::fs::read(sandbox.view().join("z.bin")).unwrap() == bytes_of(2, 400 << 20));
}

#[test]
fn a_snapshot_of_a_hub_cache_that_is_gone_is_served_by_its_name() {
    let sandbox = Sandbox::empty();
    let weights = bytes_of(3, (3 << 20) + 1);
    let path = snapshot(&sandbox, &[("config.json", b"{}", false), ("a.safetensors", &weights, true)]);
    let start = |more: &[&str]| {
        let words =
            ["start", "org/m", "--name", sandbox.name(), "--local-cache", "--verify", "--keep-dirname"];
        let mut command = sandbox.command(&[&words[..], more].concat());
        command.env("HF_HUB_CACHE", sandbox.path("hub"));
        Job::spawn(command).wait()
    };
    let refs = sandbox.path("hub/models--org--m/refs");
    std::fs::create_dir(&refs).unwrap();
    std::fs::write(refs.join("main"), path.file_name().unwrap().to_str().unwrap()).unwrap();
    let view = start(&[]).expect(0).path();
    assert!(view.ends_with("org--m"), "{view:?}");
    stop(&sandbox);
    std::fs::rename(sandbox.path("hub"), sandbox.path("away")).unwrap();
    let ran = start(&[]).expect(0);
    assert_eq!(ran.path(), view);
    assert!(ran.stderr.contains("the source can't be reached"), "{ran:#?}");
    assert_eq!(std::fs::read(view.join("a.safetensors")).unwrap(), weights);
}

#[test]
fn a_generation_that_was_damaged_is_made_anew() {
    let sandbox = Sandbox::new();
    started(&sandbox, &[]);
    stop(&sandbox);
    let file = generation(&sandbox, 1).join(MODEL[2].0);
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
    std::fs::File::options().write(true).open(&file).unwrap().set_len(5).unwrap();
    // It does not stand in for a source that is gone: the error is that of the source.
    let away = sandbox.path("away");
    std::fs::rename(sandbox.model(), &away).unwrap();
    let ran = sandbox.start(&["--local-cache"]).expect_refusal(3, "model");
    assert!(ran.stderr.contains("can't stand in") && ran.stderr.contains(MODEL[2].0), "{ran:#?}");
    sandbox.nothing_left();
    // From the source it is made anew, and that is said.
    std::fs::rename(&away, sandbox.model()).unwrap();
    let ran = started(&sandbox, &[]);
    assert!(ran.stderr.contains("is not used") && ran.stderr.contains(MODEL[2].0), "{ran:#?}");
    assert_eq!(generations(&sandbox), [format!("{}@2", sandbox.name())]);
    assert_whole(&sandbox);
}
