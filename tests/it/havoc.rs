//! Two hundred kills at random, over a running mix of commands: nothing leaks, and nothing half-made is read.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::harness::{Job, Ran, Sandbox, bytes_of, has_ended, until};
use crate::memory_group::MemoryGroup;

/// How many processes are killed, for each backing.
const KILLS: u32 = 200;

/// How many commands run beside one another.
const JOBS_MAX: usize = 4;

/// Caches that the commands are about.
const NAMES: usize = 2;

/// The files of the model: each large enough for several reads, none a multiple of a page.
const FILES: [(&str, u64); 4] = [
    ("config.json", 1234),
    ("model-00001-of-00003.safetensors", (5 << 20) + 77),
    ("model-00002-of-00003.safetensors", (2 << 20) + 1),
    ("model-00003-of-00003.safetensors", 3 * 4096 + 1),
];

#[test]
fn no_kill_leaves_anything_of_a_memfd_cache() {
    Havoc::new("memfd", 0x5eed_0001).wreak();
}

#[test]
fn no_kill_leaves_anything_of_a_tmpfs_cache() {
    Havoc::new("tmpfs", 0x5eed_0002).wreak();
}

/// A sequence that the seed decides. When things happen is the scheduler's affair all the same.
struct Dice(u64);

impl Dice {
    /// A number below `limit`.
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

struct Havoc {
    sandbox: Sandbox,
    backing: &'static str,
    dice: Dice,
    /// The digest of each file.
    digests: BTreeMap<&'static str, String>,
    /// What runs, and which command of `iloader` it is.
    jobs: Vec<(Job, String)>,
    kills: u32,
    /// Where the kernel counts the memory that they take, where that can be had.
    group: Option<MemoryGroup>,
    /// How often a command of each kind ended well: a mix of failures would show nothing.
    successes: BTreeMap<String, u32>,
}

impl Havoc {
    fn new(backing: &'static str, seed: u64) -> Havoc {
        let sandbox = Sandbox::empty();
        let mut digests = BTreeMap::new();
        for (index, (path, length)) in FILES.iter().enumerate() {
            let bytes = bytes_of(index as u64, *length);
            sandbox.write(path, &bytes);
            digests.insert(*path, hexadecimal(&Sha256::digest(&bytes)));
        }
        let group = MemoryGroup::new(&sandbox);
        let (jobs, successes) = (Vec::new(), BTreeMap::new());
        Havoc { sandbox, backing, dice: Dice(seed), digests, jobs, kills: 0, group, successes }
    }

    fn wreak(mut self) {
        while self.kills < KILLS {
            self.reap(JOBS_MAX - 1);
            let job = self.any_command();
            self.jobs.push(job);
            std::thread::sleep(Duration::from_micros(self.dice.below(10_000)));
            if self.dice.below(3) == 0 {
                self.kill_any();
            }
        }
        self.reap(0);
        for kind in ["start", "run", "stop", "gc", "list"] {
            assert!(self.successes.get(kind).is_some_and(|count| *count > 0), "{:?}", self.successes);
        }
        // The next ordinary commands work without any cleaning.
        for name in self.names() {
            let words = [self.start_words(&name), vec!["--replace", "--max-resident-bytes", "0"]].concat();
            let mut started = self.sandbox.iloader(&words);
            // One that has other settings is replaced once the child of a killed command has let go of it.
            until("nobody who reads", || {
                if started.code == Some(5) {
                    started = self.sandbox.iloader(&words);
                }
                started.code != Some(5)
            });
            self.check_whole(&started.expect(0).path());
        }
        self.sandbox.iloader(&["stop", "--all", "--remove-view"]).expect(0);
        let list = self.sandbox.iloader(&["list", "--json"]).expect(0).json();
        assert_eq!((&list["quota_bytes"], &list["quota_used_bytes"]), (&Value::Null, &Value::from(0)));
        self.sandbox.nothing_left();
        if let Some(group) = self.group {
            until("memory that is given back", || group.shared_bytes() == 0);
            assert_eq!(group.oom_kills(), 0);
        }
    }

    fn names(&self) -> Vec<String> {
        (0..NAMES).map(|number| format!("{}.{number}", self.sandbox.name())).collect()
    }

    fn start_words<'a>(&'a self, name: &'a str) -> Vec<&'a str> {
        let model = self.sandbox.path("model");
        let model: &'a str = Box::leak(model.to_str().unwrap().to_owned().into_boxed_str());
        vec!["start", model, "--name", name, "--backing", self.backing, "--quiet"]
    }

    /// Starts one of the commands that a user could type at this moment.
    fn any_command(&mut self) -> (Job, String) {
        let name = self.names().swap_remove(self.dice.below(NAMES as u64) as usize);
        let choice = self.dice.below(20);
        let variant = self.dice.below(3);
        let script = FILES.map(|(path, _)| format!("sha256sum '{{model}}/{path}'")).join("; ");
        let mut words: Vec<&str> = match choice {
            0..8 => self.start_words(&name),
            8..13 => vec!["run", &name, "--", "sh", "-c", &script],
            13..16 => vec!["stop", &name],
            16..18 => vec!["gc", "--resident", "--ttl", "0", "--apply"],
            _ => vec!["list"],
        };
        match (words[0], variant) {
            ("start", 0) => words.push("--no-wait"),
            ("start", 1) => words.extend(["--idle-ttl", "3600", "--replace"]),
            ("start", _) => words.extend(["--max-resident-bytes", "1GiB"]),
            ("stop", 0) => words.push("--force"),
            ("stop", 1) => words.extend(["--force", "--remove-view"]),
            _ => {}
        }
        let command = self.sandbox.command(&words);
        let kind = words[0].to_owned();
        match &self.group {
            Some(group) => (group.spawn(&command), kind),
            None => (Job::spawn(command), kind),
        }
    }

    /// Waits until at most `left` commands run, and checks what the others did.
    fn reap(&mut self, left: usize) {
        loop {
            let mut index = 0;
            while index < self.jobs.len() {
                if self.jobs[index].0.is_over() {
                    let (job, kind) = self.jobs.swap_remove(index);
                    self.check(&job.wait(), kind);
                } else {
                    index += 1;
                }
            }
            if self.jobs.len() <= left {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A command may have failed for what was done to it, but it tells no lie and does not crash.
    fn check(&mut self, ran: &Ran, kind: String) {
        assert!(ran.signal.is_none_or(|signal| signal == libc::SIGKILL), "{ran:#?}");
        assert!(ran.code.is_none_or(|code| code != 101) && !ran.stderr.contains("panicked"), "{ran:#?}");
        let read = if kind == "run" { ran.stdout.as_str() } else { "" };
        for line in read.lines() {
            let (digest, path) = line.split_once("  ").unwrap_or_else(|| panic!("{ran:#?}"));
            let name = Path::new(path).file_name().unwrap().to_str().unwrap();
            assert_eq!(digest, self.digests[name], "wrong bytes were read: {ran:#?}");
        }
        if ran.code == Some(0) {
            *self.successes.entry(kind).or_default() += 1;
        }
    }

    fn kill_any(&mut self) {
        let mut victims = self.sandbox.daemons();
        victims.extend(self.jobs.iter_mut().filter_map(|(job, _)| (!job.is_over()).then(|| job.pid())));
        if victims.is_empty() {
            return;
        }
        let victim: Pid = victims[self.dice.below(victims.len() as u64) as usize];
        // It may have ended since it was seen: then it is no kill.
        if !has_ended(victim) && kill_process(victim, Signal::KILL).is_ok() {
            self.kills += 1;
        }
    }

    fn check_whole(&self, view: &Path) {
        for (path, _) in FILES {
            let bytes = fs::read(view.join(path)).unwrap();
            assert_eq!(hexadecimal(&Sha256::digest(&bytes)), self.digests[path], "{path}");
        }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
