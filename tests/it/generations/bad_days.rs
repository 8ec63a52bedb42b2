//! What may go wrong with a generation: a damaged manifest, a full disk, a read-only root, two at once, Ctrl-C.

use super::*;
use crate::surroundings::in_own_mounts;

fn manifest(generation: &Path) -> PathBuf {
    generation.join(".iloader/manifest.json")
}

#[test]
fn a_damaged_manifest_is_refused_and_named() {
    let sandbox = Sandbox::new();
    let generation = cached(&sandbox);
    let file = manifest(&generation);
    let whole = fs::read_to_string(&file).unwrap();
    make_writable(&file);
    let path = generation.to_str().unwrap();
    let refused = |text: &str, words: &str| {
        fs::write(&file, text).unwrap();
        sandbox.iloader(&["verify", path]).expect_refusal(7, words);
        let ran = Job::spawn(run_on(&sandbox, &generation, &["echo", "ran"])).wait();
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(125), ""), "{ran:?}");
        let list = on_root(&sandbox, "cache-list", &[]).expect(0);
        assert!(list.stderr.contains("qwen@1") && !list.stdout.contains("qwen@1"), "{list:?}");
        let kept = on_root(&sandbox, "gc", &["--ttl", "0", "--apply"]).expect(0);
        assert!(kept.stderr.contains("qwen@1"), "{kept:?}");
    };
    refused(&whole[..whole.len() / 2], "manifest");
    refused("", "manifest");
    refused(&whole.replace("config.json", "../escape.j"), "..");
    refused(&whole.replace("config.json", "/etc/passwd"), "/etc/passwd");
    let version =
        whole.replacen("\"schema\": 1", "\"schema\": 99", 1).replacen("\"schema\":1", "\"schema\":99", 1);
    assert_ne!(version, whole);
    refused(&version, "99");
    // A newer program made it: nothing is guessed, and nothing written over it.
    cache(&sandbox, &[]).expect_refusal(7, "99");
    fs::write(&file, "{").unwrap();
    assert_eq!(cached(&sandbox), generation.with_file_name("qwen@2"), "a damaged one is none");
    on_root(&sandbox, "cache-remove", &["qwen"]).expect(0);
    assert!(!generation.exists());
}

#[test]
fn two_at_once_copy_it_once() {
    let sandbox = Sandbox::new();
    let (model, root) = (sandbox.model(), root(&sandbox));
    let words = ["cache", model.to_str().unwrap(), "--cache-root", root.to_str().unwrap(), "--json"];
    let jobs: Vec<Job> = (0..4).map(|_| Job::spawn(sandbox.command(&words))).collect();
    let answers: Vec<Value> = jobs.into_iter().map(|job| job.wait().expect(0).json()).collect();
    assert_eq!(answers.iter().filter(|answer| answer["was_fresh"] == false).count(), 1, "{answers:?}");
    assert!(answers.iter().all(|answer| answer["path"] == answers[0]["path"]), "{answers:?}");
    assert_eq!(listed(&sandbox), ["model@1"]);
}

#[test]
fn what_ctrl_c_leaves_is_taken_over() {
    let sandbox = Sandbox::empty();
    for at in 0..24 {
        sandbox.write(&format!("part-{at:02}.bin"), &bytes_of(at, 8 << 20));
    }
    let root = root(&sandbox);
    let journal = || {
        let staging = entries(&root).into_iter().find(|name| name.ends_with(".staging"))?;
        fs::read_to_string(root.join(staging).join(".iloader/finished")).ok()
    };
    let model = sandbox.model();
    let words = ["cache", model.to_str().unwrap(), "--cache-root", root.to_str().unwrap(), "--name", "qwen"];
    let slowly = ["--cache-workers", "1", "--chunk-size", "2097152", "--engine", "threads"];
    let mut job = Job::spawn(sandbox.command(&[&words[..], &slowly].concat()));
    until("a finished file", || job.is_over() || journal().is_some_and(|lines| !lines.is_empty()));
    if job.is_over() {
        return skipped("the copy is too quick here to be interrupted");
    }
    job.signal(Signal::INT);
    let ran = job.wait();
    if ran.code == Some(0) {
        return skipped("the copy was done before Ctrl-C came");
    }
    let ran = ran.expect_refusal(130, "cancel");
    assert!(
        ran.stderr.contains("kept for the next time") && ran.stderr.contains("gc --cache-root"),
        "{ran:?}"
    );
    assert_eq!(listed(&sandbox), [""; 0]);
    let list = on_root(&sandbox, "cache-list", &["--json"]).expect(0).json();
    assert_eq!(
        (&list["leftovers"][0]["name"], &list["leftovers"][0]["in_use"]),
        (&"qwen".into(), &false.into())
    );
    let answer = cache(&sandbox, &["--json"]).expect(0).json();
    assert!(answer["reused_bytes"].as_u64() >= Some(8 << 20), "{answer}");
    sandbox.iloader(&["verify", answer["path"].as_str().unwrap()]).expect(0);
    let left: Vec<String> = entries(&root).into_iter().filter(|name| name.contains("staging")).collect();
    assert_eq!(left, [""; 0]);
}

#[test]
fn a_check_ends_with_ctrl_c() {
    let sandbox = Sandbox::empty();
    for at in 0..8 {
        sandbox.write(&format!("part-{at}.bin"), &bytes_of(at, 32 << 20));
    }
    let generation = cached(&sandbox);
    let mut job = Job::spawn(sandbox.command(&["verify", generation.to_str().unwrap()]));
    let leased = || on_root(&sandbox, "cache-list", &["--json"]).json()["generations"][0]["leased"] == true;
    until("a lease", || job.is_over() || leased());
    if job.is_over() {
        return skipped("the check is too quick here to be interrupted");
    }
    job.signal(Signal::INT);
    let ran = job.wait();
    if ran.code == Some(0) {
        return skipped("the check was done before Ctrl-C came");
    }
    ran.expect_refusal(130, "cancel");
}

/// Runs `script` with `$ROOT` and `$MODEL` in mounts of its own, where `$MOUNT` is an empty directory.
fn with_mounts(sandbox: &Sandbox, script: &str) -> Option<Ran> {
    let mount = sandbox.path("mount");
    fs::create_dir(&mount).unwrap();
    let (root, model) = (root(sandbox), sandbox.model());
    let script = format!("ROOT='{}'; MODEL='{}'; {script}", root.display(), model.display());
    let Some(ran) = in_own_mounts(sandbox, &mount, &script) else {
        skipped("no mount namespace can be made");
        return None;
    };
    if ran.code == Some(77) {
        skipped(format!("it cannot be mounted: {}", ran.stderr.trim()));
        return None;
    }
    Some(ran)
}

#[test]
fn a_read_only_root_serves_and_is_not_written() {
    let sandbox = Sandbox::new();
    cached(&sandbox);
    let script = r#"
        mount --bind "$ROOT" "$MOUNT" && mount -o remount,bind,ro "$MOUNT" || exit 77
        "$ILOADER" run --cache-path "$MOUNT/qwen@1" -- cmp "$MODEL/config.json" '{model}/config.json'; echo "run: $?"
        "$ILOADER" verify "$MOUNT/qwen@1" >/dev/null; echo "verify: $?"
        "$ILOADER" cache-list --cache-root "$MOUNT" >/dev/null; echo "list: $?"
        "$ILOADER" cache-status "$MODEL" --name qwen --cache-root "$MOUNT" >/dev/null; echo "status: $?"
        "$ILOADER" cache "$MODEL" --name qwen --cache-root "$MOUNT" >/dev/null; echo "fresh: $?"
        "$ILOADER" gc --cache-root "$MOUNT" --ttl 0 >/dev/null; echo "gc: $?"
        "$ILOADER" cache "$MODEL" --name new --cache-root "$MOUNT"; echo "cache: $?"
        "$ILOADER" cache-remove qwen --cache-root "$MOUNT"; echo "remove: $?"
    "#;
    let Some(ran) = with_mounts(&sandbox, script) else { return };
    let expected = "run: 0\nverify: 0\nlist: 0\nstatus: 0\nfresh: 0\ngc: 0\ncache: 1\nremove: 1\n";
    assert_eq!(ran.stdout, expected, "{ran:#?}");
    assert!(ran.stderr.contains("the file system is read-only"), "{ran:#?}");
}

#[test]
fn a_disk_without_room_is_exit_6_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    let script = r#"
        for kib in 64 1024 4096 6144 9216 9280 9344 20480; do
            mount -t tmpfs -o "size=${kib}k" none "$MOUNT" || exit 77
            "$ILOADER" cache "$MODEL" --name qwen --cache-root "$MOUNT/root" >/dev/null; code=$?
            echo "$kib: $code"
            if [ $code = 0 ]; then "$ILOADER" verify "$MOUNT/root/qwen@1" >/dev/null || echo "bad $kib"
            else find "$MOUNT/root" -name '*@*' -printf "left $kib: %p\n"; fi
            umount "$MOUNT"
        done
    "#;
    let Some(ran) = with_mounts(&sandbox, script) else { return };
    let codes: Vec<&str> =
        ran.stdout.lines().filter_map(|line| line.split_once(": ")).map(|(_, code)| code).collect();
    assert!(!ran.stdout.contains("left") && !ran.stdout.contains("bad"), "{ran:#?}");
    assert_eq!((codes[0], codes[1], codes[codes.len() - 1]), ("6", "6", "0"), "{ran:#?}");
    assert!(codes.iter().all(|code| ["0", "6"].contains(code)), "{ran:#?}");
    assert!(ran.stderr.contains("hint:"), "{ran:#?}");
}
