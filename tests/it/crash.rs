//! Killed at every step: the next ordinary command works, and nothing is left.
//!
//! The points are calls of `crash::point` in the sources, which a debug build obeys: each must have its row
//! below.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

use crate::harness::{Job, MODEL, Ran, Sandbox, bytes_of, entries, skipped, until};

/// What is killed at a point, and by which command it is met.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Met {
    /// The daemon, before its starter hears that it is registered.
    Booting,
    /// The daemon, while it loads, with nobody waiting.
    Loading,
    /// The daemon, when the first lease is taken.
    Leasing,
    /// The daemon, while it is stopped.
    Stopping,
    /// The daemon, whose load fails and whose failure nobody heard of.
    Failing,
    /// The command that starts it.
    Starting,
    /// The command that cleans up after a daemon which was killed.
    CleaningUp,
}

/// Every point, which times of it are tried, and how it is met.
const POINTS: &[(&str, &[u32], Met)] = &[
    ("lock-taken", &[1], Met::Starting),
    ("cleaned-up", &[1], Met::Starting),
    ("daemon-spawned", &[1], Met::Starting),
    ("registration-heard", &[1], Met::Starting),
    ("waiting", &[1], Met::Starting),
    ("orders-read", &[1], Met::Booting),
    ("socket-made", &[1], Met::Booting),
    ("socket-bound", &[1], Met::Booting),
    ("file-written-aside", &[1, 2], Met::Booting),
    ("pid-file-written", &[1], Met::Booting),
    ("registered", &[1], Met::Booting),
    ("starter-told", &[1], Met::Loading),
    ("selected", &[1], Met::Loading),
    ("admitted", &[1], Met::Loading),
    ("backing-chosen", &[1], Met::Loading),
    ("segment-made", &[1, 2], Met::Loading),
    ("chunk-filled", &[1, 3, 6], Met::Loading),
    ("segment-sealed", &[1, 4], Met::Loading),
    ("loaded", &[1], Met::Loading),
    ("view-begun", &[1], Met::Loading),
    ("view-link-made", &[1, 4], Met::Loading),
    ("view-built", &[1], Met::Loading),
    ("view-published", &[1], Met::Loading),
    ("ready-notified", &[1], Met::Loading),
    ("leased", &[1], Met::Leasing),
    ("stop-received", &[1], Met::Stopping),
    ("view-taken-aside", &[1], Met::Stopping),
    ("view-emptied", &[1], Met::Stopping),
    ("view-withdrawn", &[1], Met::Stopping),
    ("memory-released", &[1], Met::Stopping),
    ("socket-removed", &[1], Met::Stopping),
    ("registration-removed", &[1], Met::Stopping),
    ("lock-released", &[1], Met::Stopping),
    ("failure-registered", &[1], Met::Failing),
    ("dead-view-taken-aside", &[1], Met::CleaningUp),
    ("dead-view-withdrawn", &[1], Met::CleaningUp),
    ("dead-files-removed", &[1], Met::CleaningUp),
    ("dead-registration-removed", &[1], Met::CleaningUp),
];

/// The command that is killed at a point of a generation's life.
#[derive(Clone, Copy, Debug, PartialEq)]
enum OnDisk {
    /// The first `cache` of a name.
    Made,
    /// One that replaces a generation.
    Refreshed,
    /// `cache-remove`.
    Removed,
}

/// The points of generations on disk, which times of them are tried, and how they are met.
const DISK_POINTS: &[(&str, &[u32], OnDisk)] = &[
    ("generation-staged", &[1], OnDisk::Made),
    ("generation-file-finished", &[1, 4], OnDisk::Made),
    ("generation-manifest-written", &[1], OnDisk::Made),
    ("generation-renamed", &[1], OnDisk::Made),
    ("generation-committed", &[1], OnDisk::Refreshed),
    ("generation-superseded-removed", &[1], OnDisk::Refreshed),
    ("generation-taken-aside", &[1], OnDisk::Removed),
    ("generation-half-removed", &[1], OnDisk::Removed),
];

/// Small enough for several chunks of the model's files.
const CHUNKS: [&str; 2] = ["--chunk-size", "2097152"];

const VARIABLE: &str = "ILOADER_TEST_CRASH_AT";

/// `iloader` with `words`, to be killed at `point`, itself or the daemon that it starts.
fn doomed(sandbox: &Sandbox, words: &[&str], point: &str) -> Ran {
    let mut command = sandbox.command(words);
    command.env(VARIABLE, point);
    Job::spawn(command).wait()
}

/// Brings the kill about: afterwards what was to be killed is dead.
fn crash(sandbox: &Sandbox, backing: &str, point: &str, met: Met) {
    let (model, name) = (sandbox.model(), sandbox.name());
    let start = ["start", model.to_str().unwrap(), "--name", name, "--backing", backing];
    let start = [&start[..], &CHUNKS].concat();
    let alone = [&start[..], &["--no-wait"]].concat();
    let is_killed = |ran: &Ran| assert_eq!(ran.signal, Some(9), "{point}: {ran:#?}");
    match met {
        Met::Starting => is_killed(&doomed(sandbox, &start, point)),
        // With its starter, which cleans up, and without one.
        Met::Booting if backing == "memfd" => {
            let refused = doomed(sandbox, &start, point);
            let refused = refused.expect_refusal(1, "was killed by SIGKILL before it was registered");
            assert!(refused.stderr.contains("hint: its log may say why"), "{refused:#?}");
            sandbox.nothing_left();
        }
        Met::Booting => is_killed(&doomed(sandbox, &start, &format!("daemon-spawned,{point}"))),
        Met::Loading => drop(doomed(sandbox, &alone, point).expect(0)),
        Met::Leasing => {
            doomed(sandbox, &start, point).expect(0);
            sandbox.run(&["true"]).wait().expect(125);
        }
        Met::Stopping => {
            doomed(sandbox, &start, point).expect(0);
            // A daemon that dies while it ends has ended.
            sandbox.ask("stop", &[]).expect(0);
            let log = sandbox.path("base/logs").join(format!("{name}.log"));
            assert!(!fs::read_to_string(log).unwrap().contains(" ended\n"), "{point} was not met");
        }
        Met::Failing => {
            let never = [&alone[..], &["--max-memory-bytes", "1"]].concat();
            doomed(sandbox, &never, point).expect(0);
        }
        Met::CleaningUp => {
            sandbox.iloader(&start).expect(0);
            sandbox.kill_daemon();
            is_killed(&doomed(sandbox, &["stop", name], point));
        }
    }
    if met != Met::Starting {
        until("the end of the daemon", || sandbox.daemons().is_empty());
    }
}

/// The view is the model, byte for byte, and nothing else.
fn is_whole(view: &Path) {
    for (index, (path, bytes)) in MODEL.iter().enumerate() {
        assert!(fs::read(view.join(path)).unwrap() == bytes_of(index as u64, *bytes), "{path}");
    }
    assert_eq!(entries(view).len(), MODEL.len());
}

/// Whether some of the files that can be read below `view` is not the model's.
fn serves_rubbish(view: &Path) -> bool {
    MODEL.iter().enumerate().any(|(index, (path, bytes))| {
        fs::read(view.join(path)).is_ok_and(|found| found != bytes_of(index as u64, *bytes))
    })
}

/// The next commands after a crash at `point`.
fn recover(sandbox: &Sandbox, backing: &str, point: &str, next: &str) {
    let had_left = entries(&sandbox.path("base/run"));
    assert!(!serves_rubbish(&sandbox.view()), "{point}");
    // Looking is possible at any time, and changes nothing.
    sandbox.iloader(&["list"]).expect(0);
    let looked = sandbox.ask("status", &[]);
    assert!(matches!(looked.code, Some(0 | 1 | 3 | 4)), "{point}: {looked:#?}");
    match next {
        "start" => {
            let started = sandbox.start(&[&["--backing", backing], &CHUNKS[..]].concat()).expect(0);
            let says =
                had_left.iter().all(|file| file.ends_with(".lock")) || started.stderr.contains("note: ");
            // A daemon whose starter died is joined: there is nothing to clean up.
            assert!(says || looked.code != Some(1), "{point} left {had_left:?}: {started:#?}");
            is_whole(&started.path());
            sandbox.ask("stop", &[]).expect(0);
        }
        "view" | "wait" => {
            let seen = sandbox.ask(next, &[]);
            assert!(matches!(seen.code, Some(0 | 1 | 3)), "{point}: {seen:#?}");
            if seen.code == Some(0) {
                is_whole(&sandbox.view());
                sandbox.ask("stop", &[]).expect(0);
            } else if next == "wait" && seen.stderr.contains("the load of") {
                sandbox.ask("stop", &[]).expect(0);
            }
        }
        _ => {
            let stopped = sandbox.ask("stop", &[]);
            let code = if had_left.is_empty() { 3 } else { 0 };
            // What a stop ended by the crash would have said was said by that stop.
            let stopped = stopped.expect(code);
            assert!(stopped.stderr.contains("clean") || stopped.stderr.contains("stopped") || code == 3);
        }
    }
    sandbox.nothing_left();
    assert_eq!(entries(&sandbox.path("base/views")).iter().filter(|name| name.starts_with('.')).count(), 0);
}

/// Point, time, how it is met, backing, and the next command: what differs little is shared out.
fn all_cases() -> Vec<(String, Met, &'static str, &'static str)> {
    let mut cases = Vec::new();
    for (index, (point, times, met)) in POINTS.iter().enumerate() {
        for time in *times {
            let point = format!("{point}:{time}");
            let third = ["view", "start", "wait", "stop"][(index + *time as usize) % 4];
            cases.push((point.clone(), *met, "tmpfs", third));
            if *time == times[0] {
                cases.push((point.clone(), *met, "memfd", "start"));
                cases.push((point, *met, "memfd", "stop"));
            }
        }
    }
    cases
}

#[test]
fn a_kill_at_any_point_leaves_nothing_that_the_next_command_does_not_clean() {
    if !cfg!(debug_assertions) {
        return skipped("a release build has no crash points");
    }
    let cases = Mutex::new(all_cases().into_iter());
    let work = || {
        while let Some((point, met, backing, next)) = { cases.lock().unwrap().next() } {
            let sandbox = Sandbox::new();
            crash(&sandbox, backing, &point, met);
            recover(&sandbox, backing, &point, next);
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            worker.join().unwrap();
        }
    });
}

#[test]
fn a_kill_at_any_point_of_a_generations_life_leaves_nothing_that_the_next_cache_does_not_clean() {
    if !cfg!(debug_assertions) {
        return skipped("a release build has no crash points");
    }
    let cases = DISK_POINTS
        .iter()
        .flat_map(|(point, times, met)| times.iter().map(move |time| (format!("{point}:{time}"), *met)));
    for (point, met) in cases {
        let sandbox = Sandbox::new();
        let (model, root) = (sandbox.model(), sandbox.path("root"));
        let on_root = ["--cache-root", root.to_str().unwrap()];
        let cache = [&["cache", model.to_str().unwrap(), "--name", "qwen"], &on_root[..]].concat();
        if met != OnDisk::Made {
            sandbox.iloader(&cache).expect(0);
        }
        let words = match met {
            OnDisk::Made => cache.clone(),
            OnDisk::Refreshed => [&cache[..], &["--refresh"]].concat(),
            OnDisk::Removed => [&["cache-remove", "qwen"], &on_root[..]].concat(),
        };
        let killed = doomed(&sandbox, &words, &point);
        assert_eq!(killed.signal, Some(9), "{point}: {killed:#?}");
        // Looking changes nothing.
        sandbox.iloader(&[&["cache-list"], &on_root[..]].concat()).expect(0);
        let generation = sandbox.iloader(&cache).expect(0).path();
        for (index, (path, bytes)) in MODEL.iter().enumerate() {
            let found = fs::read(generation.join(path)).unwrap();
            assert!(found == bytes_of(index as u64, *bytes), "{point}: {path}");
        }
        sandbox.iloader(&["verify", generation.to_str().unwrap()]).expect(0);
        let name = generation.file_name().unwrap().to_str().unwrap();
        assert_eq!(entries(&root), [".iloader", name], "{point}");
        assert!(!generation.join(".iloader/finished").exists(), "{point}: the journal stays");
    }
}

#[test]
fn every_point_of_the_sources_is_tried() {
    fn points_in(directory: &Path, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                points_in(&path, found);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let calls = text.split("crash::point(\"").skip(1).map(|rest| rest.split('"').next().unwrap());
            for name in calls {
                assert!(found.insert(name.to_owned()), "{name} stands twice");
            }
        }
    }
    let mut found = BTreeSet::new();
    points_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    let points = POINTS.iter().map(|row| row.0).chain(DISK_POINTS.iter().map(|row| row.0));
    let tried: BTreeSet<String> = points.map(str::to_owned).collect();
    assert_eq!(found, tried);
}
