//! Generations on disk, from the command line: made, found again, looked after, used and removed.

mod bad_days;
mod collected;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::harness::{Job, MODEL, Ran, Sandbox, bytes_of, entries, has_ended, open_files, skipped, until};

/// The root that the tests use, unless they try the default one.
fn root(sandbox: &Sandbox) -> PathBuf {
    sandbox.path("root")
}

/// `iloader COMMAND` on that root.
fn on_root(sandbox: &Sandbox, command: &str, words: &[&str]) -> Ran {
    let root = root(sandbox);
    sandbox.iloader(&[&[command], words, &["--cache-root", root.to_str().unwrap()]].concat())
}

/// `iloader cache` of the sandbox's model, as `qwen`, on that root.
fn cache(sandbox: &Sandbox, words: &[&str]) -> Ran {
    let model = sandbox.model();
    on_root(sandbox, "cache", &[&[model.to_str().unwrap(), "--name", "qwen"], words].concat())
}

fn cached(sandbox: &Sandbox) -> PathBuf {
    cache(sandbox, &[]).expect(0).path()
}

fn cache_status(sandbox: &Sandbox, words: &[&str]) -> Ran {
    let model = sandbox.model();
    on_root(sandbox, "cache-status", &[&[model.to_str().unwrap(), "--name", "qwen"], words].concat())
}

/// NAME@N of what `cache-list` shows.
fn listed(sandbox: &Sandbox) -> Vec<String> {
    let answer = on_root(sandbox, "cache-list", &["--json"]).expect(0).json();
    let called = |one: &Value| format!("{}@{}", one["name"].as_str().unwrap(), one["number"]);
    answer["generations"].as_array().unwrap().iter().map(called).collect()
}

/// `iloader run --cache-path`.
fn run_on(sandbox: &Sandbox, generation: &Path, words: &[&str]) -> Command {
    let generation = generation.to_str().unwrap();
    sandbox.command(&[&["run", "--cache-path", generation, "--"], words].concat())
}

/// A command that has the lease, and runs until it is killed.
fn leasing(sandbox: &Sandbox, generation: &Path) -> Job {
    let mark = sandbox.path("leased");
    let script = format!("touch '{}'; exec sleep 600", mark.display());
    let job = Job::spawn(run_on(sandbox, generation, &["sh", "-c", &script]));
    until("a command under a lease", || mark.exists());
    fs::remove_file(mark).unwrap();
    job
}

fn end(job: Job) {
    job.signal(Signal::KILL);
    let pid = job.pid();
    drop(job);
    until("an end of the command", || has_ended(pid));
}

fn make_writable(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
}

#[test]
fn a_copy_is_checked_listed_used_and_removed() {
    for engine in ["threads", "auto"] {
        let sandbox = Sandbox::new();
        let generation = cache(&sandbox, &["--engine", engine]).expect(0).path();
        assert_eq!(generation, root(&sandbox).canonicalize().unwrap().join("qwen@1"));
        for (index, (path, bytes)) in MODEL.iter().enumerate() {
            assert!(fs::read(generation.join(path)).unwrap() == bytes_of(index as u64, *bytes), "{path}");
        }
        let mut sums = Command::new("sha256sum");
        sums.args(["-c", "--quiet", "--strict", "SHA256SUMS"]).current_dir(&generation);
        let sums = sums.output().unwrap();
        assert!(sums.status.success(), "{sums:?}");
        let before = fs::metadata(sandbox.model().join("config.json")).unwrap();
        let after = fs::metadata(generation.join("config.json")).unwrap();
        assert_eq!((before.mtime(), before.mtime_nsec()), (after.mtime(), after.mtime_nsec()));

        assert!(cache_status(&sandbox, &[]).expect(0).stdout.contains("fresh"));
        let list = on_root(&sandbox, "cache-list", &[]).expect(0);
        assert!(list.stdout.contains("qwen") && list.stdout.contains("qwen@1"), "{list:?}");
        assert_eq!(list.stderr, "");

        let script = "test \"$ILOADER_MODEL_PATH\" = \"$1\" && cat \"$1/config.json\" | wc -c; exit 7";
        let ran = Job::spawn(run_on(&sandbox, &generation, &["sh", "-c", script, "sh", "{model}"])).wait();
        assert_eq!((ran.code, ran.stdout.trim()), (Some(7), "1234"), "{ran:?}");

        let path = generation.to_str().unwrap();
        assert!(sandbox.iloader(&["verify", path]).expect(0).stdout.contains("4 files"));
        let whole = sandbox.iloader(&["verify", path, "--json"]).expect(0).json();
        assert_eq!(whole["bytes"], MODEL.iter().map(|file| file.1).sum::<u64>());
        assert_eq!(whole["findings"], serde_json::json!([]));

        assert!(on_root(&sandbox, "cache-remove", &["qwen"]).expect(0).stderr.contains("removed"));
        assert_eq!(listed(&sandbox), [""; 0]);
        on_root(&sandbox, "cache-remove", &["qwen"]).expect_refusal(3, "no generations of 'qwen'");
    }
}

#[test]
fn a_flipped_bit_in_any_file_is_found_and_a_cut_or_extra_one() {
    let sandbox = Sandbox::new();
    let generation = cached(&sandbox);
    let path = generation.to_str().unwrap();
    let found = |words: &[&str]| {
        let answer = sandbox.iloader(&[&["verify", path, "--json"], words].concat()).expect(7).json();
        let one = |finding: &Value| {
            (finding["what"].as_str().unwrap().to_owned(), finding["path"].as_str().unwrap().to_owned())
        };
        answer["findings"].as_array().unwrap().iter().map(one).collect::<Vec<_>>()
    };
    let what = |what: &str, path: &str| (what.to_owned(), path.to_owned());
    for (name, bytes) in MODEL {
        let file = generation.join(name);
        make_writable(&file);
        let (whole, times) = (fs::read(&file).unwrap(), fs::metadata(&file).unwrap().modified().unwrap());
        let mut bad = whole.clone();
        bad[bytes as usize / 2] ^= 4;
        for bytes in [&bad, &whole] {
            fs::write(&file, bytes).unwrap();
            fs::File::options().write(true).open(&file).unwrap().set_modified(times).unwrap();
            if bytes == &bad {
                assert_eq!(found(&[]), [what("bad", name)]);
                sandbox.iloader(&["verify", path, "--quick"]).expect(0);
            }
        }
    }
    sandbox.iloader(&["verify", path]).expect(0);

    let cut = generation.join(MODEL[2].0);
    make_writable(&cut);
    fs::File::options().write(true).open(&cut).unwrap().set_len(1000).unwrap();
    for words in [&[][..], &["--quick"]] {
        assert!(found(words).contains(&what("size", MODEL[2].0)), "{:?}", found(words));
    }
    let table = sandbox.iloader(&["verify", path]).expect(7);
    assert!(table.stdout.contains(MODEL[2].0) && table.stderr.contains("--refresh"), "{table:?}");
    let refused = Job::spawn(run_on(&sandbox, &generation, &["true"])).wait();
    assert!(refused.code == Some(125) && refused.stderr.contains(MODEL[2].0), "{refused:?}");

    fs::remove_file(&cut).unwrap();
    fs::write(generation.join("extra.bin"), "x").unwrap();
    assert_eq!(found(&["--quick"]), [what("extra", "extra.bin"), what("missing", MODEL[2].0)]);
}

#[test]
fn a_change_makes_it_stale_and_the_rest_is_linked() {
    let sandbox = Sandbox::new();
    let first = cached(&sandbox);
    assert_eq!(cached(&sandbox), first, "a fresh one is found");
    sandbox.write("config.json", b"{}");
    sandbox.write("new.json", b"[]");
    let status = cache_status(&sandbox, &["--json"]).expect(9).json();
    let changes = status["source_changes"].to_string();
    assert_eq!(status["state"], "stale");
    assert!(changes.contains("config.json") && changes.contains("new.json: added"), "{changes}");
    let shown = cache_status(&sandbox, &[]).expect(9).stdout;
    assert!(shown.contains("stale") && shown.contains("new.json"), "{shown}");

    // Kept by a lease, so that the two can be compared.
    let reader = leasing(&sandbox, &first);
    let weights = MODEL[1].0;
    let inode = |generation: &Path| fs::metadata(generation.join(weights)).unwrap().ino();
    let answer = cache(&sandbox, &["--json"]).expect(0).json();
    let second = PathBuf::from(answer["path"].as_str().unwrap());
    assert_eq!(second, first.with_file_name("qwen@2"));
    assert!(answer["reused_bytes"].as_u64() >= Some(MODEL[1].1), "{answer}");
    assert_eq!(fs::read(second.join("config.json")).unwrap(), b"{}");
    assert_eq!(
        fs::read(first.join("config.json")).unwrap().len(),
        1234,
        "a path means the same bytes for ever"
    );
    assert_eq!(inode(&first), inode(&second));
    assert_eq!(listed(&sandbox), ["qwen@1", "qwen@2"]);
    let list = on_root(&sandbox, "cache-list", &["--json"]).expect(0).json();
    let allocated = |at: usize| list["generations"][at]["allocated_bytes"].as_u64().unwrap();
    let total = list["allocated_bytes"].as_u64().unwrap();
    assert!(total + MODEL[1].1 < allocated(0) + allocated(1), "linked files count once: {list}");

    let linked = inode(&second);
    let third =
        PathBuf::from(cache(&sandbox, &["--refresh", "--json"]).expect(0).json()["path"].as_str().unwrap());
    assert_ne!(linked, inode(&third), "nothing is reused with --refresh");
    assert_eq!(listed(&sandbox), ["qwen@1", "qwen@3"], "superseded, unless leased");
    end(reader);
    cache_status(&sandbox, &[]).expect(0);
    cache_status(&sandbox, &["--pattern", "*.json"]).expect(9);
}

#[test]
fn a_name_belongs_to_one_source() {
    let sandbox = Sandbox::new();
    cached(&sandbox);
    let other = sandbox.path("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("config.json"), "{}").unwrap();
    let words = [other.to_str().unwrap(), "--name", "qwen"];
    on_root(&sandbox, "cache", &words).expect_refusal(9, "qwen");
    on_root(&sandbox, "cache-status", &words).expect(9);
    assert_eq!(listed(&sandbox), ["qwen@1"]);
    on_root(&sandbox, "cache", &[other.to_str().unwrap(), "--cache-name", "other"]).expect(0);
    assert_eq!(listed(&sandbox), ["other@1", "qwen@1"]);
    // By default it is called as its directory is.
    let named = on_root(&sandbox, "cache", &[sandbox.model().to_str().unwrap()]).expect(0).path();
    assert!(named.ends_with("model@1"), "{named:?}");
    on_root(&sandbox, "cache-status", &[sandbox.model().to_str().unwrap()]).expect(0);
}

#[test]
fn what_is_leased_or_read_stays() {
    let sandbox = Sandbox::new();
    let generation = cached(&sandbox);
    let reader = leasing(&sandbox, &generation);
    let descriptors = open_files(reader.pid().as_raw_nonzero().get() as u32);
    assert!(descriptors.iter().any(|file| file.ends_with(".iloader/lock")), "{descriptors:?}");
    let list = on_root(&sandbox, "cache-list", &["--json"]).expect(0).json();
    assert_eq!(list["generations"][0]["leased"], true);
    on_root(&sandbox, "cache-remove", &["qwen"]).expect_refusal(5, "qwen@1");
    sandbox.iloader(&["cache-remove", generation.to_str().unwrap()]).expect_refusal(5, "qwen@1");
    let kept = on_root(&sandbox, "gc", &["--ttl", "0", "--apply"]).expect(0);
    assert!(kept.stdout.contains("stays") && kept.stdout.contains("leased"), "{kept:?}");
    end(reader);

    let weights = fs::File::open(generation.join(MODEL[1].0)).unwrap();
    let mut read = Command::new("sleep").arg("600").stdin(weights).spawn().unwrap();
    let refused = on_root(&sandbox, "cache-remove", &["qwen@1"]).expect_refusal(5, "qwen@1");
    assert!(refused.stderr.contains("sleep 600"), "{refused:?}");
    for words in [&["--ttl", "0"][..], &["--ttl", "0", "--apply"]] {
        let kept = on_root(&sandbox, "gc", words).expect(0);
        assert!(kept.stdout.contains("stays") && kept.stdout.contains("sleep 600"), "{kept:?}");
    }
    read.kill().unwrap();
    read.wait().unwrap();
    sandbox.iloader(&["cache-remove", generation.to_str().unwrap()]).expect(0);
    assert!(!generation.exists());
}

#[test]
fn the_default_root_is_private_and_needs_no_more_than_a_base() {
    let sandbox = Sandbox::new();
    let model = sandbox.model();
    let model = model.to_str().unwrap();
    sandbox.iloader(&["cache-status", model]).expect(3);
    assert!(sandbox.iloader(&["cache-list"]).expect(0).stderr.contains("no generations"));
    assert_eq!(
        sandbox.iloader(&["cache-list", "--json"]).expect(0).json()["generations"],
        serde_json::json!([])
    );
    assert!(sandbox.iloader(&["gc", "--ttl", "0"]).expect(0).stderr.contains("nothing to collect"));
    assert!(!sandbox.path("base").exists(), "looking makes nothing");
    let generation = sandbox.iloader(&["cache", model]).expect(0).path();
    assert!(generation.ends_with("base/model-cache/model@1"), "{generation:?}");
    for at in [generation.parent().unwrap(), &generation, &generation.join("text_encoder")] {
        assert_eq!(fs::metadata(at).unwrap().mode() & 0o777, 0o700, "{at:?}");
    }
    assert_eq!(fs::metadata(generation.join("config.json")).unwrap().mode() & 0o777, 0o400);
    assert_eq!(sandbox.iloader(&["cache-status", model, "--json"]).expect(0).json()["state"], "fresh");
    let newest = generation.with_file_name("model");
    sandbox.iloader(&["verify", newest.to_str().unwrap()]).expect(0);
    sandbox.iloader(&["cache-remove", "model"]).expect(0);
}

#[test]
fn an_explicit_root_goes_by_the_umask() {
    let sandbox = Sandbox::new();
    let (model, root) = (sandbox.model(), root(&sandbox));
    let command =
        sandbox.command(&["cache", model.to_str().unwrap(), "--cache-root", root.to_str().unwrap()]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "umask 027; exec \"$0\" \"$@\""]).arg(command.get_program()).args(command.get_args());
    let generation = Job::spawn(shell).wait().expect(0).path();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!((mode(&root), mode(&generation)), (0o750, 0o750));
    assert_eq!(mode(&generation.join("config.json")), 0o440);
}

#[test]
fn a_path_that_cannot_be_meant_is_refused_before_anything_is_made() {
    let sandbox = Sandbox::new();
    let model = sandbox.model();
    let at = |root: &Path| {
        sandbox.iloader(&["cache", model.to_str().unwrap(), "--cache-root", root.to_str().unwrap()])
    };
    at(&model).expect_refusal(2, "inside the source");
    at(&model.join("new/root")).expect_refusal(2, "inside the source");
    at(sandbox.path("").as_path()).expect_refusal(2, "around the source");
    symlink(&model, sandbox.path("link")).unwrap();
    at(&sandbox.path("link")).expect_refusal(2, "inside the source");
    at(Path::new("~/root")).expect_refusal(2, "no shell expanded");
    let base = model.join("base");
    sandbox
        .iloader(&["cache", model.to_str().unwrap(), "--base-dir", base.to_str().unwrap()])
        .expect_refusal(2, "inside the source");
    assert_eq!(entries(&model).len(), 4, "nothing was made there");
    let mut relative = sandbox.command(&["cache", "model", "--cache-root", "root"]);
    relative.current_dir(sandbox.path(""));
    let generation = Job::spawn(relative).wait().expect(0).path();
    assert_eq!(generation, root(&sandbox).canonicalize().unwrap().join("model@1"));
    let mut run = sandbox.command(&["run", "--cache-path", "root/model@1", "--", "echo", "{model}"]);
    run.current_dir(sandbox.path(""));
    assert_eq!(Job::spawn(run).wait().expect(0).path(), generation);
    let missing = sandbox.path("root/none@1");
    sandbox.iloader(&["verify", missing.to_str().unwrap()]).expect_refusal(3, "none@1");
    assert_eq!(Job::spawn(run_on(&sandbox, &missing, &["true"])).wait().code, Some(125));
    assert_eq!(Job::spawn(run_on(&sandbox, &generation, &["/etc/passwd"])).wait().code, Some(126));
    assert_eq!(Job::spawn(run_on(&sandbox, &generation, &["no-such-command"])).wait().code, Some(127));
}

#[test]
fn a_copy_with_a_missing_file_is_not_fresh() {
    let sandbox = Sandbox::new();
    let generation = cached(&sandbox);
    cache_status(&sandbox, &[]).expect(0);
    fs::remove_file(generation.join("config.json")).unwrap();
    let ran = cache_status(&sandbox, &[]).expect(9);
    assert!(ran.stdout.contains("config.json") && ran.stdout.contains("missing"), "{ran:?}");
    assert_ne!(cached(&sandbox), generation, "as 'cache' takes it");
}

#[test]
fn a_source_that_cannot_be_reached_leaves_the_generation() {
    let sandbox = Sandbox::new();
    let generation = cached(&sandbox);
    fs::rename(sandbox.model(), sandbox.path("away")).unwrap();
    let ran = cache_status(&sandbox, &[]).expect(1);
    assert!(ran.stdout.contains("qwen@1") && ran.stderr.contains("cannot be reached"), "{ran:?}");
    let answer = cache_status(&sandbox, &["--json"]).expect(1).json();
    assert_eq!(
        (answer["state"].as_str(), answer["error"]["kind"].as_str()),
        (Some("unknown"), Some("not-found"))
    );
    assert_eq!(answer["generation"]["path"], generation.to_str().unwrap());
    Job::spawn(run_on(&sandbox, &generation, &["true"])).wait().expect(0);
    cache(&sandbox, &[]).expect_refusal(3, "model");
}

/// A snapshot of a hub cache, with one blob named by its SHA-256.
fn snapshot(sandbox: &Sandbox, commit: &str, weights: &[u8], digest: &str) -> PathBuf {
    let folder = sandbox.path("hub/models--org--tiny");
    let snapshot = folder.join("snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(folder.join("blobs")).unwrap();
    fs::write(folder.join("blobs").join(digest), weights).unwrap();
    symlink(format!("../../blobs/{digest}"), snapshot.join("model.safetensors")).unwrap();
    fs::write(snapshot.join("config.json"), "{}").unwrap();
    snapshot
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_snapshot_is_named_by_its_model_and_compared_with_the_hub() {
    let sandbox = Sandbox::empty();
    let weights = bytes_of(5, 100_000);
    let good = snapshot(&sandbox, &"a".repeat(40), &weights, &sha256(&weights));
    let generation = on_root(&sandbox, "cache", &[good.to_str().unwrap()]).expect(0).path();
    assert!(generation.ends_with("org--tiny@1"), "{generation:?}");
    // Another revision is the same source.
    let next = bytes_of(6, 100_000);
    let next = snapshot(&sandbox, &"b".repeat(40), &next, &sha256(&next));
    on_root(&sandbox, "cache-status", &[next.to_str().unwrap()]).expect(9);
    let generation = on_root(&sandbox, "cache", &[next.to_str().unwrap()]).expect(0).path();
    assert!(generation.ends_with("org--tiny@2"), "{generation:?}");
    let bad = snapshot(&sandbox, &"c".repeat(40), &bytes_of(7, 100_000), &sha256(b"another"));
    let refused = on_root(&sandbox, "cache", &[bad.to_str().unwrap()]).expect_refusal(7, "the hub says");
    assert!(refused.stderr.contains("hint:"), "{refused:?}");
    assert_eq!(listed(&sandbox), ["org--tiny@2"]);
    // Without the hub cache it is called the same.
    fs::rename(sandbox.path("hub"), sandbox.path("away")).unwrap();
    let gone = on_root(&sandbox, "cache-status", &[next.to_str().unwrap()]).expect(1);
    assert!(gone.stdout.contains("org--tiny@2"), "{gone:?}");
}

#[test]
fn progress_is_on_stderr_and_quiet_is_quiet() {
    let sandbox = Sandbox::new();
    // Else it warns, which is no progress.
    sandbox.write("tokenizer.json", b"{}");
    let quiet = cache(&sandbox, &["--quiet"]).expect(0);
    assert_eq!(quiet.stderr, "");
    assert_eq!(cache(&sandbox, &["--quiet"]).expect(0).stderr, "");
    assert!(cache(&sandbox, &[]).expect(0).stderr.contains("qwen@1: it is fresh"));
    let json = cache(&sandbox, &["--json", "--quiet"]).expect(0).json();
    assert_eq!((&json["was_fresh"], &json["copied_bytes"]), (&true.into(), &0.into()));
}
