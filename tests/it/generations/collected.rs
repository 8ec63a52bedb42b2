//! `gc` of generations: what goes, in which order, and what stays.

use std::time::Duration;

use super::*;

/// Generations `a@1`, `b@1` and `c@1` of different bytes, used last in this order.
fn three(sandbox: &Sandbox) -> u64 {
    for (at, name) in ["a", "b", "c"].into_iter().enumerate() {
        let source = sandbox.path(name);
        fs::create_dir(&source).unwrap();
        fs::write(source.join("weights.bin"), bytes_of(at as u64 + 20, 1 << 20)).unwrap();
        on_root(sandbox, "cache", &[source.to_str().unwrap()]).expect(0);
        std::thread::sleep(Duration::from_millis(20));
    }
    on_root(sandbox, "cache-list", &["--json"]).expect(0).json()["allocated_bytes"].as_u64().unwrap()
}

fn actions(sandbox: &Sandbox, words: &[&str]) -> Vec<String> {
    let answer = on_root(sandbox, "gc", &[words, &["--json"]].concat()).expect(0).json();
    let action = |one: &Value| one["action"].as_str().unwrap().to_owned();
    answer["generations"].as_array().unwrap().iter().map(action).collect()
}

#[test]
fn the_least_recently_used_go_and_only_when_told_to() {
    let sandbox = Sandbox::empty();
    let all = three(&sandbox);
    assert_eq!(actions(&sandbox, &[]), ["keep", "keep", "keep"]);
    assert_eq!(actions(&sandbox, &["--max-bytes", &all.to_string()]), ["keep", "keep", "keep"]);
    assert_eq!(actions(&sandbox, &["--max-bytes", &(all - 1).to_string()]), ["remove", "keep", "keep"]);
    assert_eq!(actions(&sandbox, &["--max-bytes", "1M"]), ["remove", "remove", "remove"]);
    assert_eq!(actions(&sandbox, &["--ttl", "86400"]), ["keep", "keep", "keep"]);
    // A use makes it the last one to go.
    Job::spawn(run_on(&sandbox, &root(&sandbox).join("a@1"), &["true"])).wait().expect(0);
    let limit = (all - 1).to_string();
    let shown = on_root(&sandbox, "gc", &["--max-bytes", &limit]).expect(0);
    let row = |name: &str| shown.stdout.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(row("b@1").contains("would be removed") && row("b@1").contains("--max-bytes"), "{shown:?}");
    assert!(row("a@1").contains("stays") && shown.stderr.contains("--apply does it"), "{shown:?}");
    assert_eq!(listed(&sandbox), ["a@1", "b@1", "c@1"], "all of that was only shown");
    let done = on_root(&sandbox, "gc", &["--max-bytes", &limit, "--apply", "--json"]).expect(0).json();
    assert_eq!(done["allocated_bytes"], all);
    assert!(done["remaining_bytes"].as_u64() < Some(all - (1 << 20) + 1), "{done}");
    assert_eq!(listed(&sandbox), ["a@1", "c@1"]);
    on_root(&sandbox, "gc", &["--ttl", "0", "--apply"]).expect(0);
    assert_eq!(listed(&sandbox), [""; 0]);
    assert!(on_root(&sandbox, "gc", &["--apply"]).expect(0).stderr.contains("nothing to collect"));
}

#[test]
fn what_a_newer_one_has_linked_counts_once_and_superseded_ones_go() {
    let sandbox = Sandbox::new();
    let first = cached(&sandbox);
    let reader = leasing(&sandbox, &first);
    sandbox.write("config.json", b"{}");
    cached(&sandbox);
    let kept = on_root(&sandbox, "gc", &["--apply", "--json"]).expect(0).json();
    let reason = kept["generations"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("leased") && reason.contains("sleep 600"), "{kept}");
    let weights: u64 = MODEL.iter().map(|file| file.1).sum();
    assert!(kept["allocated_bytes"].as_u64() < Some(weights + (1 << 20)), "{kept}");
    end(reader);
    assert_eq!(actions(&sandbox, &[]), ["remove", "keep"], "without any criterion");
    let done = on_root(&sandbox, "gc", &["--apply"]).expect(0);
    assert!(done.stdout.contains("qwen@2 is newer"), "{done:?}");
    assert_eq!(listed(&sandbox), ["qwen@2"]);
    sandbox.iloader(&["verify", first.with_file_name("qwen@2").to_str().unwrap()]).expect(0);
}

#[test]
fn leftovers_go_and_foreign_files_stay() {
    let sandbox = Sandbox::new();
    let generation = cached(&sandbox);
    let root = root(&sandbox);
    let foreign = ["notes.txt", "qwen", "qwen@x", ".hidden", "other@1"];
    for name in foreign {
        fs::create_dir(root.join(name)).unwrap();
        fs::write(root.join(name).join("mine"), "x").unwrap();
    }
    for name in [".qwen@7.removing", ".gone@3.removing"] {
        fs::create_dir_all(root.join(name).join(".iloader")).unwrap();
        fs::write(root.join(name).join("half"), "x").unwrap();
    }
    let listing = on_root(&sandbox, "cache-list", &[]).expect(0);
    assert!(listing.stderr.contains(".gone@3.removing"), "{listing:?}");
    assert!(on_root(&sandbox, "gc", &[]).expect(0).stdout.contains("would be removed"));
    assert!(root.join(".gone@3.removing").exists(), "that was only shown");
    on_root(&sandbox, "gc", &["--apply"]).expect(0);
    assert!(!root.join(".gone@3.removing").exists() && !root.join(".qwen@7.removing").exists());
    on_root(&sandbox, "cache-remove", &["qwen"]).expect(0);
    assert!(!generation.exists());
    on_root(&sandbox, "cache-remove", &["other@1"]).expect_refusal(3, "other@1");
    on_root(&sandbox, "gc", &["--ttl", "0", "--apply"]).expect(0);
    for name in foreign {
        assert!(root.join(name).join("mine").exists(), "{name}");
    }
}
