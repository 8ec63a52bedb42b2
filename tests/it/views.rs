//! The published view: its shape, its place, and what it shares.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::harness::{Job, MODEL, Sandbox, bytes_of, entries, has_ended, until};

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn inode(path: &Path) -> (u64, u64) {
    let found = fs::metadata(path).unwrap();
    (found.dev(), found.ino())
}

#[test]
fn a_view_is_directories_of_links_that_nobody_writes_to() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    for directory in ["", "text_encoder", "text_encoder/sub"] {
        assert_eq!(mode(&view.join(directory)), 0o555, "{directory}");
    }
    assert_eq!(entries(&view), ["config.json", MODEL[1].0, MODEL[2].0, "text_encoder"]);
    assert_eq!(entries(&sandbox.path("base/views")), [sandbox.name()], "nothing beside it");
    let pid = sandbox.daemon();
    for (path, bytes) in MODEL {
        let target = fs::read_link(view.join(path)).unwrap();
        assert!(target.starts_with(format!("/proc/{pid}/fd")), "{target:?}");
        assert_eq!(fs::metadata(view.join(path)).unwrap().len(), bytes);
    }
}

#[test]
fn files_that_share_an_inode_share_memory() {
    let sandbox = Sandbox::new();
    let model = sandbox.model();
    fs::hard_link(model.join(MODEL[1].0), model.join("hard.safetensors")).unwrap();
    let blob = sandbox.path("blob");
    fs::write(&blob, bytes_of(9, 1 << 20)).unwrap();
    symlink(&blob, model.join("first.bin")).unwrap();
    symlink("../blob", model.join("second.bin")).unwrap();
    symlink(MODEL[0].0, model.join("alias.json")).unwrap();
    sandbox.write("empty.txt", b"");
    let view = sandbox.started(&[]);
    for (one, other) in
        [(MODEL[1].0, "hard.safetensors"), ("first.bin", "second.bin"), (MODEL[0].0, "alias.json")]
    {
        assert_eq!(inode(&view.join(one)), inode(&view.join(other)), "{one} and {other}");
    }
    assert!(fs::read(view.join("second.bin")).unwrap() == bytes_of(9, 1 << 20));
    assert_eq!(fs::read(view.join("empty.txt")).unwrap(), [0; 0]);
    let distinct: u64 = MODEL.iter().map(|(_, bytes)| bytes).sum::<u64>() + (1 << 20);
    let status = sandbox.status();
    assert_eq!((&status["bytes"], &status["files"]), (&distinct.into(), &9.into()));
    let segments = segments(&sandbox);
    assert_eq!(segments.len(), 6, "{segments:?}");
}

/// The descriptors of the daemon that are segments.
fn segments(sandbox: &Sandbox) -> Vec<PathBuf> {
    let of_the_cache = format!("iloader:{}:", sandbox.name());
    let descriptors = fs::read_dir(format!("/proc/{}/fd", sandbox.daemon())).unwrap();
    descriptors
        .map(|entry| fs::read_link(entry.unwrap().path()).unwrap())
        .filter(|target| target.to_string_lossy().contains(&of_the_cache))
        .collect()
}

#[test]
fn links_to_directories_stay_links() {
    let sandbox = Sandbox::new();
    symlink("text_encoder", sandbox.model().join("alias")).unwrap();
    let view = sandbox.started(&[]);
    let link = fs::symlink_metadata(view.join("alias")).unwrap();
    assert!(link.file_type().is_symlink());
    assert!(fs::read_link(view.join("alias")).unwrap().is_relative());
    assert!(fs::read(view.join("alias/sub/weights.bin")).unwrap() == bytes_of(3, MODEL[3].1));
    let manifest = sandbox.ask("manifest", &[]).json();
    assert_eq!(
        manifest["directory_links"],
        serde_json::json!([{ "path": "alias", "target": "text_encoder" }])
    );
    assert_eq!(sandbox.status()["view_faults"], serde_json::json!([]));
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn the_directory_name_is_kept_where_asked_for() {
    let sandbox = Sandbox::new();
    let inside = sandbox.view().join("model");
    assert_eq!(sandbox.started(&["--keep-dirname"]), inside);
    assert_eq!(entries(&sandbox.view()), ["model"]);
    assert_eq!((mode(&sandbox.view()), mode(&inside)), (0o555, 0o555));
    assert_eq!(sandbox.ask("view", &[]).path(), inside);
    assert_eq!(sandbox.status()["view"], inside.to_str().unwrap());
    let ran = sandbox.run(&["sh", "-c", "echo \"$ILOADER_MODEL_PATH\""]).wait().expect(0);
    assert_eq!(ran.path(), inside);
    assert!(fs::read(inside.join(MODEL[1].0)).unwrap() == bytes_of(1, MODEL[1].1));
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn files_passed_through_are_the_source_and_marked_so() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&["--passthrough", "*.json", "--passthrough", "text_encoder/"]);
    let source = sandbox.model().join("config.json");
    assert_eq!(fs::read_link(view.join("config.json")).unwrap(), source);
    assert_eq!(inode(&view.join("config.json")), inode(&source));
    assert_eq!(segments(&sandbox).len(), 2);
    let manifest = sandbox.ask("manifest", &[]).json();
    let passed: Vec<&str> = manifest["files"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|file| file["passthrough"] == true)
        .map(|file| file["path"].as_str().unwrap())
        .collect();
    assert_eq!(passed, ["config.json", MODEL[3].0]);
    let status = sandbox.status();
    assert_eq!((&status["bytes"], &status["files"]), (&(MODEL[1].1 + MODEL[2].1).into(), &4.into()));
    assert_eq!(status["passthrough"], serde_json::json!(["config.json", MODEL[3].0]));
    let text = sandbox.ask("status", &[]).expect(0).stdout;
    assert!(text.contains("passed through") && text.contains("config.json"), "{text}");
    sandbox.run(&["cat", "{model}/config.json"]).wait().expect(0);
    sandbox.ask("stop", &["--remove-view"]).expect(0);
    sandbox.nothing_left();
    assert!(source.exists());
}

#[test]
fn only_an_empty_directory_or_a_dead_view_is_taken_over() {
    let sandbox = Sandbox::new();
    let view = sandbox.path("elsewhere/view");
    fs::create_dir_all(&view).unwrap();
    let at = ["--view", view.to_str().unwrap()];
    assert_eq!(sandbox.started(&at), view);

    // A live view, of another cache.
    let model = sandbox.model();
    let other = format!("{}.other", sandbox.name());
    let start_other = [&["start", model.to_str().unwrap(), "--name", &other], &at[..]].concat();
    sandbox.iloader(&start_other).expect_refusal(5, view.to_str().unwrap());
    assert!(view.join("config.json").exists());
    // A dead one.
    let killed = sandbox.daemon();
    sandbox.kill_daemon();
    until("its end", || has_ended(killed));
    sandbox.iloader(&start_other).expect(0);
    let links_to = fs::read_link(view.join("config.json")).unwrap();
    let cleaned = sandbox.ask("stop", &[]).expect(0);
    assert!(!cleaned.stderr.contains("withdrew"), "{cleaned:?}");
    assert_eq!(fs::read_link(view.join("config.json")).unwrap(), links_to, "another cache's view by now");
    sandbox.iloader(&["stop", &other, "--remove-view"]).expect(0);
    sandbox.nothing_left();
    assert_eq!(entries(&sandbox.path("elsewhere")), [""; 0]);

    // What is no view.
    let refused = |what: &str| {
        sandbox.start(&at).expect_refusal(1, what);
        sandbox.nothing_left();
    };
    fs::write(&view, "mine").unwrap();
    refused("not a directory");
    assert_eq!(fs::read_to_string(&view).unwrap(), "mine");
    fs::remove_file(&view).unwrap();
    symlink(sandbox.path("tmp"), &view).unwrap();
    refused("symbolic link");
    fs::remove_file(&view).unwrap();
    fs::create_dir(&view).unwrap();
    fs::write(view.join("mine"), "mine").unwrap();
    refused("mine");
    assert_eq!(entries(&view), ["mine"]);
    fs::remove_file(view.join("mine")).unwrap();
    symlink("/etc/passwd", view.join("mine")).unwrap();
    refused("holds no link of a view");
    assert_eq!(entries(&view), ["mine"]);
}

#[test]
fn a_view_stands_apart_from_its_source() {
    let sandbox = Sandbox::new();
    symlink(sandbox.model(), sandbox.path("link")).unwrap();
    let overlapping = [
        sandbox.model(),
        sandbox.model().join("view"),
        sandbox.model().join("text_encoder/new/view"),
        sandbox.path("link/view"),
        sandbox.path(""),
        sandbox.path("tmp/../model/view"),
    ];
    for view in overlapping {
        sandbox.start(&["--view", view.to_str().unwrap()]).expect_refusal(2, "the source");
    }
    sandbox.nothing_left();
    assert_eq!(entries(&sandbox.model()), ["config.json", MODEL[1].0, MODEL[2].0, "text_encoder"]);
}

#[test]
fn a_model_of_a_hub_cache_is_started_by_its_name() {
    let sandbox = Sandbox::empty();
    let (model, commit) = (sandbox.path("hub/models--org--name"), "0123456789abcdef0123456789abcdef01234567");
    let snapshot = model.join("snapshots").join(commit);
    for directory in [&snapshot, &model.join("blobs"), &model.join("refs")] {
        fs::create_dir_all(directory).unwrap();
    }
    fs::write(model.join("refs/main"), commit).unwrap();
    for (index, path) in ["config.json", "model.safetensors", "model-copy.safetensors"].iter().enumerate() {
        // Two names for one blob.
        let blob = format!("blob{}", index.min(1));
        fs::write(model.join("blobs").join(&blob), bytes_of(index.min(1) as u64, 300_000)).unwrap();
        symlink(format!("../../blobs/{blob}"), snapshot.join(path)).unwrap();
    }
    let hub = |words: &[&str]| {
        let mut command = sandbox.command(words);
        command.env("HF_HUB_CACHE", sandbox.path("hub"));
        Job::spawn(command).wait()
    };
    hub(&["inspect", "org/name"]).expect(0);
    let start = ["start", "org/name", "--name", sandbox.name(), "--keep-dirname"];
    let view = hub(&start).expect(0).path();
    assert_eq!(view, sandbox.view().join("org--name"));
    let status = sandbox.status();
    assert_eq!(status["source"], fs::canonicalize(&snapshot).unwrap().to_str().unwrap());
    assert_eq!(status["bytes"], 600_000);
    assert!(fs::read(view.join("model-copy.safetensors")).unwrap() == bytes_of(1, 300_000));
    assert_eq!(hub(&start).expect(0).path(), view, "the same cache by the same name");
    hub(&["start", "org/none", "--name", "none"]).expect_refusal(3, "org/none");
    sandbox.ask("stop", &["--remove-view"]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn strange_files_in_a_view_are_kept_and_named() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    for directory in [view.clone(), view.join("text_encoder")] {
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::write(view.join("mine.txt"), "mine").unwrap();
    fs::write(view.join("text_encoder/mine.txt"), "mine").unwrap();
    // A link of ours that somebody replaced is not ours any more.
    fs::remove_file(view.join("config.json")).unwrap();
    symlink("/etc/hostname", view.join("config.json")).unwrap();
    let stopped = sandbox.ask("stop", &["--remove-view"]).expect(0);
    for strange in ["mine.txt", "text_encoder/mine.txt", "config.json"] {
        assert!(stopped.stderr.contains(strange), "{strange}: {stopped:?}");
    }
    assert_eq!(entries(&view), ["config.json", "mine.txt", "text_encoder"]);
    assert_eq!(entries(&view.join("text_encoder")), ["mine.txt"]);
    let refused = sandbox.start(&[]).expect_refusal(1, "not taken over");
    assert!(!refused.stderr.contains("note: "), "said once: {refused:#?}");
    fs::remove_dir_all(&view).unwrap();
    sandbox.started(&[]);
}

#[test]
fn a_view_that_was_moved_away_is_not_looked_for() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    let moved = sandbox.path("moved");
    fs::set_permissions(&view, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(&view, &moved).unwrap();
    assert!(File::open(moved.join("config.json")).is_ok());
    let status = sandbox.status();
    assert_eq!(status["view_faults"].as_array().unwrap().len(), 1, "{status}");
    sandbox.run(&["true"]).wait().expect_refusal(125, view.to_str().unwrap());
    fs::create_dir(&view).unwrap();
    fs::write(view.join("mine"), "mine").unwrap();
    sandbox.ask("stop", &["--remove-view"]).expect(0);
    assert_eq!(entries(&view), ["mine"], "somebody else's by now");
    assert!(File::open(moved.join("config.json")).is_err());
}

/// A view is only a directory: its owner can remove it under the daemon. Then nobody is sent there any more.
#[test]
fn a_view_that_was_removed_or_damaged_is_not_handed_out() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 3] = [
        ("removed", |view| {
            fs::set_permissions(view.join("text_encoder"), fs::Permissions::from_mode(0o755)).unwrap();
            fs::set_permissions(view.join("text_encoder/sub"), fs::Permissions::from_mode(0o755)).unwrap();
            fs::remove_dir_all(view).unwrap();
        }),
        ("a link short", |view| fs::remove_file(view.join("config.json")).unwrap()),
        ("another file", |view| {
            fs::remove_file(view.join("config.json")).unwrap();
            symlink("/etc/hostname", view.join("config.json")).unwrap();
        }),
    ];
    for (how, damage) in damages {
        let sandbox = Sandbox::new();
        let view = sandbox.started(&[]);
        sandbox.ask("view", &[]).expect(0);
        fs::set_permissions(&view, fs::Permissions::from_mode(0o755)).unwrap();
        damage(&view);
        println!("{how}");
        sandbox.ask("view", &[]).expect_refusal(1, "is not whole any more");
        sandbox.start(&[]).expect_refusal(1, "is not whole any more");
        let told = sandbox.status()["view_faults"].as_array().map_or(0, Vec::len);
        assert!(told > 0, "{how}: status names what is wrong");
        sandbox.run(&["true"]).wait().expect(125);
        sandbox.ask("stop", &["--remove-view"]).expect(0);
        if how != "another file" {
            sandbox.started(&[]);
        }
    }
}
