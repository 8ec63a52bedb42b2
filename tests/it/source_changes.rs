//! The source changes under us: while it is read nothing is published, and afterwards it is told.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::SystemTime;

use iloader::sys::process::is_stopped;
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{Job, MODEL, SLOWLY, Sandbox, bytes_of, entries, skipped, until};

const WEIGHTS: &str = "model.safetensors";

fn overwrite(file: &Path) {
    let file = fs::File::options().write(true).open(file).unwrap();
    rustix::io::pwrite(&file, b"changed", 4096).unwrap();
}

fn append(file: &Path) {
    std::io::Write::write_all(&mut fs::File::options().append(true).open(file).unwrap(), b"more").unwrap();
}

fn replace(file: &Path) {
    let aside = file.with_extension("aside");
    fs::copy(file, &aside).unwrap();
    let time = file.metadata().unwrap().modified().unwrap();
    fs::File::options().write(true).open(&aside).unwrap().set_modified(time).unwrap();
    fs::rename(aside, file).unwrap();
}

fn write_and_set_back(file: &Path) {
    let time = file.metadata().unwrap().modified().unwrap();
    overwrite(file);
    fs::File::options().write(true).open(file).unwrap().set_modified(time).unwrap();
}

/// What a process has read so far.
fn bytes_read(pid: Pid) -> u64 {
    let io = fs::read_to_string(format!("/proc/{}/io", pid.as_raw_nonzero())).unwrap();
    io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[test]
fn whatever_is_done_to_a_file_while_it_is_read_nothing_is_published() {
    type Change = fn(&Path);
    let changes: [(&str, Change, &str); 8] = [
        ("written", overwrite, "modified"),
        ("appended to", append, "size"),
        ("truncated", |file| drop(fs::File::options().write(true).open(file).unwrap().set_len(5)), ""),
        (
            "touched",
            |file| {
                let file = fs::File::options().write(true).open(file).unwrap();
                file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
            },
            "modified",
        ),
        ("replaced", replace, "replaced"),
        ("removed", |file| fs::remove_file(file).unwrap(), "it is gone"),
        ("written and set back", write_and_set_back, "although size and modification time are the same"),
        (
            "given another mode",
            |file| fs::set_permissions(file, fs::Permissions::from_mode(0o640)).unwrap(),
            "although size and modification time are the same",
        ),
    ];
    for (what, change, words) in changes {
        let sandbox = Sandbox::slow();
        let start = Job::spawn(sandbox.start_command(&SLOWLY));
        until("a load under way", || {
            let status = sandbox.ask("status", &["--json"]);
            status.code == Some(0) || (status.code == Some(4) && status.json()["progress"]["bytes_done"] != 0)
        });
        // What is not read yet when the daemon rests is read after the change.
        let daemon = sandbox.daemon();
        kill_process(daemon, Signal::STOP).unwrap();
        until("a stopped daemon", || is_stopped(daemon.as_raw_nonzero().get()));
        let is_met = bytes_read(daemon) < 60 << 20;
        change(&sandbox.model().join(WEIGHTS));
        kill_process(daemon, Signal::CONT).unwrap();
        let ended = start.wait();
        if !is_met {
            return skipped("no load is slow enough here to be met");
        }
        let ended = ended.expect_refusal(8, WEIGHTS);
        assert!(
            ended.stderr.contains(words) && ended.stderr.contains("hint: start again"),
            "{what}: {ended:#?}"
        );
        sandbox.nothing_left();
        assert_eq!(entries(&sandbox.path("base/views")), [""; 0], "{what}");
    }
}

#[test]
fn a_file_that_is_only_looked_at_while_it_is_read_is_no_other() {
    let sandbox = Sandbox::slow();
    let Some(frozen) = sandbox.freeze() else { return };
    assert!(fs::read(sandbox.model().join(WEIGHTS)).unwrap() == bytes_of(7, 64 << 20));
    fs::rename(sandbox.model().join("config.json"), sandbox.model().join("aside")).unwrap();
    fs::rename(sandbox.model().join("aside"), sandbox.model().join("config.json")).unwrap();
    drop(frozen);
    // It is read whole by now, or looked at anew: its name is the same, and a rename is a change of the file.
    let waited = sandbox.ask("wait", &[]);
    assert!(waited.code == Some(0) || waited.stderr.contains("config.json changed"), "{waited:#?}");
}

#[test]
fn a_source_that_changed_is_told_by_status_and_refused_by_start_with_what_differs() {
    let sandbox = Sandbox::new();
    let view = sandbox.started(&[]);
    let (daemon, model) = (sandbox.daemon(), sandbox.model());
    replace(&model.join(MODEL[1].0));
    fs::remove_file(model.join(MODEL[2].0)).unwrap();
    sandbox.write("new.json", b"{}");
    let expected = [(MODEL[1].0, "replaced (inode"), (MODEL[2].0, "removed"), ("new.json", "added")];
    let names = |line: &str, (path, how): (&str, &str)| line.contains(path) && line.contains(how);
    let status = sandbox.status();
    let changes: Vec<&str> =
        status["source_changes"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect();
    assert_eq!((changes.len(), &status["source_changed"]), (3, &true.into()), "{changes:?}");
    assert!(expected.iter().all(|what| changes.iter().any(|line| names(line, *what))), "{changes:?}");
    let text = sandbox.ask("status", &[]).expect(0).stdout;
    assert_eq!(text.matches("source now").count(), 3, "{text}");
    let refused = sandbox.start(&[]).expect_refusal(9, "runs with another identity");
    let line = refused.stderr.lines().find(|line| line.starts_with("error: ")).unwrap();
    assert!(expected.iter().all(|what| names(line, *what)), "{refused:#?}");
    assert!(refused.stderr.contains("iloader stop") && refused.stderr.contains("runs on undisturbed"));

    // Many are counted.
    for number in 0..20 {
        sandbox.write(&format!("more-{number:02}.json"), b"{}");
    }
    let refused = sandbox.start(&[]).expect_refusal(9, "and 21 more");
    assert!(!refused.stderr.contains("more-10.json"), "{refused:#?}");
    let changes = sandbox.status()["source_changes"].as_array().unwrap().clone();
    assert_eq!((changes.len(), &changes[4]), (5, &"and 19 more".into()));

    // A source that is gone is no other matter.
    fs::rename(&model, sandbox.path("gone")).unwrap();
    assert_eq!(sandbox.status()["source_changed"], true);
    sandbox.start(&[]).expect(3);
    assert_eq!(sandbox.daemon(), daemon);
    assert!(fs::read(view.join(MODEL[2].0)).unwrap() == bytes_of(2, MODEL[2].1));
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}
