//! Resource limits at every height: an error that names the limit, and nothing half-made, or a cache that works.

use std::process::{Command, Stdio};

use crate::harness::{Job, MODEL, Ran, Sandbox, bytes_of, skipped};

fn has_prlimit() -> bool {
    let found = Command::new("prlimit").arg("--version").output().is_ok();
    if !found {
        skipped("there is no prlimit");
    }
    found
}

fn limited(limit: &str, command: &Command) -> Ran {
    let mut prlimit = Command::new("prlimit");
    prlimit.arg(limit).arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => prlimit.env(name, value),
            None => prlimit.env_remove(name),
        };
    }
    Job::spawn(prlimit).wait()
}

/// The program did not come so far as to be one of ours.
fn never_began(ran: &Ran) -> bool {
    ran.stderr.contains("error while loading shared libraries")
        || ran.stderr.contains("failed to map segment")
        || (ran.signal.is_some() && ran.stderr.is_empty())
}

/// Starts under `limit`, which must be named where it does not work. Whether it worked.
fn start_under(sandbox: &Sandbox, limit: &str, name: &str, more: &[&str]) -> bool {
    let ran = limited(limit, &sandbox.start_command(more));
    let works = ran.code == Some(0);
    if works {
        for (index, (path, bytes)) in MODEL.iter().enumerate() {
            let found = std::fs::read(sandbox.view().join(path)).unwrap();
            assert!(found == bytes_of(index as u64, *bytes), "{limit}: {path}");
        }
        sandbox.ask("stop", &[]).expect(0);
    } else if !never_began(&ran) {
        let ran = ran.expect_refusal(6, name);
        assert!(ran.stderr.contains(" hint: "), "{limit}: {ran:#?}");
    }
    sandbox.nothing_left();
    works
}

#[test]
fn memory_limits_at_any_height_are_named() {
    if !has_prlimit() {
        return;
    }
    let sandbox = Sandbox::new();
    for (option, name, step, last) in
        [("as", "RLIMIT_AS", 6_000_000, 96), ("data", "RLIMIT_DATA", 2_000_000, 48)]
    {
        let heights = (1..).map(|number| number * step).take_while(|bytes| *bytes <= last * 1_000_000);
        let worked: Vec<bool> = heights
            .enumerate()
            .map(|(index, bytes)| {
                let backing = ["memfd", "tmpfs"][index % 2];
                start_under(&sandbox, &format!("--{option}={bytes}"), name, &["--backing", backing])
            })
            .collect();
        assert_eq!((worked[0], worked[worked.len() - 1]), (false, true), "{option}: {worked:?}");
        // One that works is not followed by one that does not.
        assert!(worked.is_sorted(), "{option}: {worked:?}");
    }
}

#[test]
fn a_small_stack_is_an_error_and_no_crash() {
    if !has_prlimit() {
        return;
    }
    let sandbox = Sandbox::new();
    for kibibytes in [16, 64, 128, 256, 511] {
        assert!(!start_under(&sandbox, &format!("--stack={}", kibibytes << 10), "RLIMIT_STACK", &[]));
        let list = limited(&format!("--stack={}", kibibytes << 10), &sandbox.command(&["list"]));
        assert!(never_began(&list) || list.code == Some(6), "{list:#?}");
    }
    assert!(start_under(&sandbox, "--stack=524288", "RLIMIT_STACK", &[]));
}

#[test]
fn few_descriptors_are_an_error_that_names_them() {
    if !has_prlimit() {
        return;
    }
    let sandbox = Sandbox::new();
    for count in [4, 6, 8, 12, 20, 64, 511] {
        assert!(!start_under(&sandbox, &format!("--nofile={count}:{count}"), "RLIMIT_NOFILE", &[]));
    }
    sandbox.started(&[]);
    // A command that needs few does with few, or says what it lacks.
    for count in [4, 5, 6, 8, 16] {
        for words in [&["status", sandbox.name()][..], &["list"], &["view", sandbox.name()]] {
            let ran = limited(&format!("--nofile={count}:{count}"), &sandbox.command(words));
            let names_it = ran.stderr.contains("RLIMIT_NOFILE") || ran.stdout.contains("unreachable");
            assert!(never_began(&ran) || ran.code == Some(0) || names_it, "{count}: {ran:#?}");
        }
    }
    assert_eq!(sandbox.status()["state"], "ready");
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}
