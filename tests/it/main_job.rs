//! The main job from one end to the other: inspect, start, ask, run, stop.

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{Job, MODEL, Sandbox, bytes_of, entries, until};

const BYTES: u64 = MODEL[0].1 + MODEL[1].1 + MODEL[2].1 + MODEL[3].1;

#[test]
fn a_model_is_inspected_started_read_and_stopped() {
    let sandbox = Sandbox::new();
    let model = sandbox.model();
    let inspected = sandbox.iloader(&["inspect", model.to_str().unwrap(), "--json"]).expect(0).json();
    assert_eq!((&inspected["schema"], &inspected["bytes"]), (&1.into(), &BYTES.into()));
    assert_eq!(inspected["memory"]["admitted"], true);
    assert!(sandbox.iloader(&["inspect", model.to_str().unwrap()]).expect(0).stdout.contains(MODEL[3].0));
    assert!(!sandbox.path("base").exists(), "looking at a model makes no BASE");

    assert_eq!(sandbox.started(&[]), sandbox.view());
    assert_eq!(sandbox.ask("view", &[]).expect(0).path(), sandbox.view());
    let waited = sandbox.ask("wait", &[]).expect(0);
    assert_eq!((waited.stdout.as_str(), waited.stderr.as_str()), ("", ""));
    for (index, (path, bytes)) in MODEL.iter().enumerate() {
        let file = format!("{{model}}/{path}");
        let output = sandbox.command(&["run", sandbox.name(), "--", "cat", &file]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(output.stdout == bytes_of(index as u64, *bytes), "{path} has other bytes");
    }

    let stopped = sandbox.ask("stop", &[]).expect(0);
    assert!(stopped.stdout.is_empty() && stopped.stderr.contains("stopped"), "{stopped:?}");
    sandbox.nothing_left();
    assert!(sandbox.view().is_dir(), "the view's directory stays, emptied");
    assert_eq!(std::fs::read(model.join("config.json")).unwrap(), bytes_of(0, MODEL[0].1));
    sandbox.ask("status", &[]).expect_refusal(3, sandbox.name());
    sandbox.ask("stop", &[]).expect_refusal(3, sandbox.name());

    sandbox.started(&[]);
    sandbox.ask("stop", &["--remove-view"]).expect(0);
    sandbox.nothing_left();
    assert!(!sandbox.view().exists());
}

/// The names in the first column of the tables of a section of `docs/usage.md`, up to the next section.
fn documented(from: &str, to: &str) -> Vec<String> {
    let usage = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/usage.md")).unwrap();
    let (_, section) = usage.split_once(from).unwrap();
    let (section, _) = section.split_once(to).unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once(" | "));
    rows.flat_map(|(names, _)| names.split('`').filter(|name| name.starts_with(char::is_alphabetic)))
        .map(str::to_owned)
        .collect()
}

fn fields(document: &Value) -> Vec<&str> {
    document.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn every_answer_has_the_documented_fields_and_no_other() {
    let sandbox = Sandbox::new();
    sandbox.started(&["--idle-ttl", "3600", "--passthrough", "config.json"]);
    let of_a_cache = documented("each of the `caches` of `list`:", "`status` adds:");
    let of_status = documented("`status` adds:", "\n`list`:\n");
    let of_list = documented("\n`list`:\n", "\nEach of the `generations`");
    // Told only where there is something to tell.
    let optional = ["schema", "warnings", "error", "directory_links", "quota_error"];
    let check = |document: &Value, names: &[&Vec<String>]| {
        let names: Vec<&str> = names.iter().flat_map(|names| names.iter()).map(String::as_str).collect();
        let present = fields(document);
        let missing = names.iter().filter(|name| !optional.contains(name) && !present.contains(name));
        assert_eq!(missing.collect::<Vec<_>>(), [&""; 0]);
        let strange = present.iter().filter(|name| !optional.contains(name) && !names.contains(name));
        assert_eq!(strange.collect::<Vec<_>>(), [&""; 0]);
    };
    let status = sandbox.status();
    assert_eq!(status["schema"], 1);
    check(&status, &[&of_a_cache, &of_status]);
    let list = sandbox.iloader(&["list", "--json"]).expect(0).json();
    check(&list, &[&of_list]);
    check(&list["caches"][0], &[&of_a_cache]);
    let read = sandbox.ask("status", &["--readers", "--json"]).expect(0).json();
    check(&read, &[&of_a_cache, &of_status]);
    let collected = sandbox.iloader(&["gc", "--resident", "--ttl", "3600", "--json"]).expect(0).json();
    check(&collected, &[&documented("\n`gc --resident`:\n", "\n`inspect`:\n")]);
    let manifest = sandbox.ask("manifest", &[]).expect(0).json();
    check(&manifest, &[&documented("\n`manifest`:\n", "## Environment")]);
    let inspected = sandbox.iloader(&["inspect", sandbox.model().to_str().unwrap(), "--json"]).json();
    check(&inspected, &[&documented("\n`inspect`:\n", "\n`manifest`:\n")]);
}

#[test]
fn every_answer_about_generations_has_the_documented_fields_and_no_other() {
    let sandbox = Sandbox::new();
    let ask = |words: &[&str]| {
        let words = [words, &["--json"]].concat();
        sandbox.iloader(&words).expect(0).json()
    };
    let check = |document: &Value, names: &[&Vec<String>]| {
        let mut names: Vec<&str> = names.iter().flat_map(|names| names.iter()).map(String::as_str).collect();
        let mut present: Vec<&str> = fields(document).into_iter().filter(|name| *name != "schema").collect();
        names.sort_unstable();
        present.sort_unstable();
        assert_eq!(present, names);
    };
    let model = sandbox.model();
    let model = model.to_str().unwrap();
    let of_one = documented("and `cache`:\n", "\n`cache` adds:\n");
    let made = ask(&["cache", model, "--name", "m"]);
    check(&made, &[&of_one, &documented("\n`cache` adds:\n", "\n`cache-status`:\n")]);
    let status = ask(&["cache-status", model, "--name", "m"]);
    check(&status, &[&documented("\n`cache-status`:\n", "\n`cache-list`:\n")]);
    check(&status["generation"], &[&of_one]);
    let list = ask(&["cache-list"]);
    check(&list, &[&documented("\n`cache-list`:\n", "\n`verify`:\n")]);
    check(&list["generations"][0], &[&of_one]);
    let path = made["path"].as_str().unwrap();
    check(&ask(&["verify", path]), &[&documented("\n`verify`:\n", "\n`gc` on disk:\n")]);
    check(&ask(&["gc"]), &[&documented("\n`gc` on disk:\n", "\n`gc --resident`:\n")]);
}

#[test]
fn answers_agree_with_each_other() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&["--backing", "memfd"]);
    let status = sandbox.status();
    for (field, value) in [
        ("name", Value::from(sandbox.name())),
        ("state", "ready".into()),
        ("pid", sandbox.daemon().as_raw_nonzero().get().into()),
        ("view", view.to_str().unwrap().into()),
        ("source", sandbox.model().to_str().unwrap().into()),
        ("bytes", BYTES.into()),
        ("files", 4.into()),
        ("leases", Value::Array(Vec::new())),
        ("backing", "memfd".into()),
        ("source_changed", false.into()),
        ("view_faults", Value::Array(Vec::new())),
    ] {
        assert_eq!(status[field], value, "{field}");
    }
    let whole_pages: u64 = MODEL.iter().map(|(_, bytes)| bytes.next_multiple_of(4096)).sum();
    assert_eq!(status["allocated_bytes"], whole_pages);
    let read: u64 = ["direct_bytes", "cached_bytes", "buffered_bytes"]
        .iter()
        .map(|way| status["read"][way].as_u64().unwrap())
        .sum();
    assert_eq!(read, BYTES, "{status}");
    let text = sandbox.ask("status", &[]).expect(0).stdout;
    for words in ["ready", view.to_str().unwrap(), "memfd", "unchanged", "whole and immutable"] {
        assert!(text.contains(words), "{words}: {text}");
    }

    let manifest = sandbox.ask("manifest", &[]).expect(0).json();
    let files = manifest["files"].as_array().unwrap();
    let of = |file: &Value| (file["path"].as_str().unwrap().to_owned(), file["bytes"].as_u64().unwrap());
    assert_eq!(files.iter().map(of).collect::<Vec<_>>(), MODEL.map(|(path, bytes)| (path.to_owned(), bytes)));
    assert_eq!((&manifest["bytes"], &manifest["source"]), (&status["bytes"], &status["source"]));

    let listed = sandbox.iloader(&["list"]).expect(0).stdout;
    let row = listed.lines().find(|line| line.starts_with(sandbox.name())).unwrap();
    assert!(row.contains("ready") && row.contains(sandbox.model().to_str().unwrap()), "{listed}");
    let list = sandbox.iloader(&["list", "--json"]).expect(0).json();
    assert_eq!(list["caches"].as_array().unwrap().len(), 1);
    assert_eq!(list["caches"][0]["identity"], status["identity"]);

    // Every way of naming a cache.
    let socket = sandbox.run_file("sock");
    let socket = socket.to_str().unwrap();
    for way in [&["--name", sandbox.name()][..], &["--socket", socket], &[sandbox.name(), "--socket", socket]]
    {
        for command in ["status", "wait", "view", "manifest"] {
            sandbox.iloader(&[&[command], way].concat()).expect(0);
        }
    }
    let another = sandbox.iloader(&["view", "another", "--socket", socket]);
    another.expect_refusal(3, "not 'another'");
    sandbox.iloader(&["stop", "--socket", socket]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_command_becomes_what_iloader_was() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    let view = view.to_str().unwrap();
    let ran = sandbox
        .run(&["sh", "-c", "echo $$ \"$ILOADER_MODEL_PATH\" \"$0\" \"$1\"", "{model}", "a={model}:{model}/b"])
        .wait()
        .expect(0);
    let words: Vec<&str> = ran.stdout.split_whitespace().collect();
    assert_eq!(words[1..], [view, view, &format!("a={view}:{view}/b")]);

    let job = sandbox.run(&["sh", "-c", "echo $$"]);
    let pid = job.pid().as_raw_nonzero().to_string();
    assert_eq!(job.wait().expect(0).stdout.trim(), pid, "the same process");
    sandbox.run(&["sh", "-c", "exit 42"]).wait().expect(42);
    let killed = sandbox.run(&["sh", "-c", "kill -TERM $$"]).wait();
    assert_eq!((killed.code, killed.signal), (None, Some(Signal::TERM.as_raw())));
    let mut sleeper = sandbox.run(&["sleep", "600"]);
    until("a lease", || sandbox.status()["leases"].as_array().unwrap().len() == 1);
    assert!(!sleeper.is_over());
    sleeper.signal(Signal::INT);
    assert_eq!(sleeper.wait().signal, Some(Signal::INT.as_raw()));

    sandbox.run(&["no-such-command-anywhere"]).wait().expect_refusal(127, "no-such-command-anywhere");
    sandbox.run(&[&format!("{view}/config.json")]).wait().expect_refusal(126, "config.json");
    sandbox.iloader(&["run", "nobody", "--", "true"]).expect_refusal(125, "nobody");
    // Standard input, too, is the command's own.
    let mut command = sandbox.command(&["run", sandbox.name(), "--", "cat"]);
    command.stdin(std::fs::File::open(sandbox.model().join("text_encoder/sub/weights.bin")).unwrap());
    let output = command.output().unwrap();
    assert!(output.stdout == bytes_of(3, MODEL[3].1));
}

#[test]
fn many_caches_are_listed_and_stopped_at_once() {
    let sandbox = Sandbox::new();
    let model = sandbox.model();
    let names: Vec<String> = (0..3).map(|index| format!("{}.{index}", sandbox.name())).collect();
    let start = |name: &str| {
        Job::spawn(sandbox.command(&["start", model.to_str().unwrap(), "--name", name, "--quiet"]))
    };
    let starts: Vec<Job> = names.iter().map(|name| start(name)).collect();
    for (start, name) in starts.into_iter().zip(&names) {
        assert_eq!(start.wait().expect(0).path(), sandbox.path("base/views").join(name));
    }
    let list = sandbox.iloader(&["list", "--json"]).expect(0).json();
    let listed: Vec<&str> =
        list["caches"].as_array().unwrap().iter().map(|cache| cache["name"].as_str().unwrap()).collect();
    assert_eq!(listed, names);
    // One that does not exist does not keep the other from being stopped.
    sandbox.iloader(&["stop", "nobody", &names[0]]).expect_refusal(3, "nobody");
    assert_eq!(entries(&sandbox.path("base/views").join(&names[0])), [""; 0]);
    sandbox.iloader(&["stop", "--all", "--remove-view"]).expect(0);
    sandbox.nothing_left();
    assert_eq!(entries(&sandbox.path("base/views")), [names[0].as_str()]);
    let none = sandbox.iloader(&["stop", "--all"]).expect(0);
    assert!(none.stderr.contains("no caches"), "{none:?}");
}
