//! Many commands at one moment: of one name, of more models than fit, and of everything under a quota while
//! processes are killed.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use crate::harness::{Job, Ran, Sandbox, entries, open_files, processes, until};
use crate::memory_group::MemoryGroup;

const MIB: u64 = 1 << 20;

/// One small read at a time past the page cache, so that loads overlap.
const SLOWLY: [&str; 8] =
    ["--engine", "threads", "--read-size", "65536", "--direct", "always", "--queue-depth", "1"];

/// A model of weights alone, of exactly so many bytes.
fn model(sandbox: &Sandbox, leaf: &str, bytes: u64) -> PathBuf {
    let directory = sandbox.path(leaf);
    fs::create_dir(&directory).unwrap();
    fs::File::create(directory.join("model.safetensors")).unwrap().set_len(bytes).unwrap();
    directory
}

fn start(sandbox: &Sandbox, model: &Path, name: &str, more: &[&str]) -> Command {
    sandbox.command(&[&["start", model.to_str().unwrap(), "--name", name, "--quiet"], more].concat())
}

/// The memory files of the caches whose names begin with `prefix`: how much each has allocated. Whatever vanishes
/// while it is looked at is left out.
fn allocated(prefix: &str) -> HashMap<(u64, u64), u64> {
    let segment = format!("iloader:{prefix}");
    let program = fs::metadata(env!("CARGO_BIN_EXE_iloader")).unwrap().ino();
    let is_ours = |pid: &u32| fs::metadata(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.ino() == program);
    let mut found = HashMap::new();
    for pid in processes().into_iter().filter(is_ours) {
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for descriptor in descriptors.flatten() {
            let is_segment = |link: PathBuf| link.to_string_lossy().contains(&segment);
            if fs::read_link(descriptor.path()).is_ok_and(is_segment)
                && let Ok(file) = fs::metadata(descriptor.path())
            {
                found.insert((file.dev(), file.ino()), file.blocks() * 512);
            }
        }
    }
    found
}

/// What the caches have allocated at one moment, at the least: what was there before and after it. Nothing is given
/// back and taken anew under the same number in between.
fn allocated_at_once(prefix: &str) -> u64 {
    let (before, after) = (allocated(prefix), allocated(prefix));
    before.iter().filter(|(file, _)| after.contains_key(*file)).map(|(_, bytes)| bytes).sum()
}

#[test]
fn of_32_starts_of_one_name_one_loads_and_all_print() {
    let sandbox = Sandbox::empty();
    let directory = model(&sandbox, "m", 32 * MIB);
    let name = sandbox.name();
    let more = [&SLOWLY[..], &["--max-resident-bytes", "40MiB"]].concat();
    let starts: Vec<Job> = (0..32).map(|_| Job::spawn(start(&sandbox, &directory, name, &more))).collect();
    for start in starts {
        assert_eq!(start.wait().expect(0).path(), sandbox.view());
    }
    let log = fs::read_to_string(sandbox.path("base/logs").join(format!("{name}.log"))).unwrap();
    assert_eq!(log.lines().filter(|line| line.contains(" loads '")).count(), 1, "{log}");
    assert_eq!(sandbox.daemons().len(), 1);
    assert_eq!(allocated_at_once(name), 32 * MIB, "one set of memory");
    let list = sandbox.iloader(&["list", "--json"]).expect(0).json();
    assert_eq!((&list["quota_bytes"], &list["quota_used_bytes"]), (&(40 * MIB).into(), &(32 * MIB).into()));
    sandbox.ask("stop", &[]).expect(0);
}

#[test]
fn of_8_starts_that_do_not_all_fit_some_finish_and_the_others_are_refused() {
    let sandbox = Sandbox::empty();
    let Some(group) = MemoryGroup::new(&sandbox) else { return };
    group.limit(512 * MIB);
    // Four of them fit beside the reserve, six would not fit at all.
    let models: Vec<PathBuf> =
        (0..8).map(|number| model(&sandbox, &format!("m{number}"), 80 * MIB)).collect();
    // Slow enough for the last to be asked for while the first loads.
    let more = [&SLOWLY[..], &["--reserve-bytes", "96MiB", "--limit-rate", "40MiB"]].concat();
    let starts: Vec<Job> = models
        .iter()
        .enumerate()
        .map(|(number, model)| start(&sandbox, model, &format!("{}-{number}", sandbox.name()), &more))
        .map(|command| group.spawn(&command))
        .collect();
    let ended: Vec<Ran> = starts.into_iter().map(Job::wait).collect();
    let (admitted, refused): (Vec<&Ran>, Vec<&Ran>) = ended.iter().partition(|ran| ran.code == Some(0));
    assert!(admitted.len() >= 2 && !refused.is_empty(), "{ended:#?}");
    for ran in refused {
        assert_eq!(ran.code, Some(6), "{ran:?}");
        assert!(
            ran.stderr.contains("cannot start '") && ran.stderr.contains(" is available after "),
            "{ran:?}"
        );
    }
    assert!(ended.iter().any(|ran| ran.stderr.contains("promised to starts under way")), "{ended:#?}");
    assert_eq!(group.oom_kills(), 0, "the kernel killed for want of memory");
    for ran in admitted {
        assert_eq!(fs::metadata(ran.path().join("model.safetensors")).unwrap().len(), 80 * MIB);
    }
    // Nothing is promised any more: what was refused fits once the others are gone.
    sandbox.iloader(&["stop", "--all"]).expect(0);
    let again = start(&sandbox, &models[7], sandbox.name(), &["--reserve-bytes", "96MiB"]);
    group.spawn(&again).wait().expect(0);
    sandbox.ask("stop", &[]).expect(0);
}

/// Numbers from a seed, so that a failing run can be repeated as far as the machine allows.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) % end
    }
}

/// The quota of the stress test, and the sizes of its caches: any three of them may be too much.
const QUOTA: u64 = 24 * MIB;
const SIZES: [u64; 6] = [4, 6, 8, 10, 12, 16];
const ROUNDS: usize = 8;

/// Kills who holds the lock of `name`: its daemon, or a command that starts it. That it is the one is told by its lock, not by a number in a file.
fn kill_daemon(sandbox: &Sandbox, name: &str) {
    let lock = sandbox.path("base/run").join(format!("{name}.lock"));
    for pid in sandbox.daemons() {
        if open_files(pid.as_raw_nonzero().get() as u32).contains(&lock) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Starts, kills and stops one cache in an order of its own.
fn torment(sandbox: &Sandbox, number: usize) {
    let mut dice = Dice(0x1234_5678_9abc ^ ((number as u64 + 1) << 40));
    let name = format!("{}-{number}", sandbox.name());
    let directory = sandbox.path(&format!("m{number}"));
    for _ in 0..ROUNDS {
        let backing = ["--backing", ["memfd", "auto"][number % 2]];
        let proposal = [&[][..], &["--max-resident-bytes", "24MiB"], &["--max-resident-bytes", "18MiB"]];
        let more = [&backing[..], proposal[dice.below(5) as usize % 3]].concat();
        let pause = Duration::from_millis(dice.below(150));
        match dice.below(4) {
            0 => {
                let starter = Job::spawn(start(sandbox, &directory, &name, &more));
                std::thread::sleep(pause);
                starter.signal(Signal::KILL);
                drop(starter);
            }
            1 => {
                let starter = Job::spawn(start(sandbox, &directory, &name, &more));
                std::thread::sleep(pause);
                kill_daemon(sandbox, &name);
                // Killed, refused, or too quick for it; or it held the lock itself, and was killed with it.
                let ran = starter.wait();
                assert!(matches!(ran.code, None | Some(0 | 1 | 6)), "{ran:#?}");
            }
            _ => {
                let ran = Job::spawn(start(sandbox, &directory, &name, &more)).wait();
                assert!(matches!(ran.code, Some(0 | 6)), "{ran:#?}");
            }
        }
        match dice.below(3) {
            0 => kill_daemon(sandbox, &name),
            1 => {
                let ran = sandbox.iloader(&["stop", &name]);
                assert!(matches!(ran.code, Some(0 | 3)), "{ran:#?}");
            }
            _ => {}
        }
    }
}

#[test]
fn whatever_is_started_stopped_and_killed_the_quota_holds() {
    let sandbox = Sandbox::empty();
    for (number, mebibytes) in SIZES.iter().enumerate() {
        model(&sandbox, &format!("m{number}"), mebibytes * MIB);
    }
    let whole = model(&sandbox, "whole", QUOTA);
    let prefix = sandbox.name();
    let quota = ["--max-resident-bytes", "24MiB"];
    Job::spawn(start(&sandbox, &whole, prefix, &quota)).wait().expect(0);
    assert_eq!(allocated_at_once(prefix), QUOTA, "memory is seen where there is some");
    sandbox.ask("stop", &[]).expect(0);
    assert_eq!(allocated_at_once(prefix), 0);

    let done = AtomicBool::new(false);
    let mut most = 0;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..SIZES.len())
            .map(|number| (scope, &sandbox, number))
            .map(|(scope, sandbox, number)| scope.spawn(move || torment(sandbox, number)))
            .collect();
        let watch = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                most = most.max(allocated_at_once(prefix));
            }
        });
        let outcomes: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        done.store(true, Ordering::Relaxed);
        watch.join().unwrap();
        outcomes.into_iter().for_each(|outcome| outcome.unwrap());
    });
    assert!(most <= QUOTA, "{most} bytes are allocated under a quota of {QUOTA}");
    assert!(most > 0, "nothing was ever loaded");

    // A starter that was killed may have left a daemon that is just coming up.
    until("an end of all", || {
        sandbox.iloader(&["stop", "--all", "--force"]);
        sandbox.daemons().is_empty()
    });
    let list = sandbox.iloader(&["list", "--json"]).expect(0).json();
    assert_eq!(list["quota_used_bytes"], 0, "{list}");
    Job::spawn(start(&sandbox, &whole, prefix, &quota)).wait().expect(0);
    sandbox.ask("stop", &[]).expect(0);
    let tiny = model(&sandbox, "tiny", 1);
    Job::spawn(start(&sandbox, &tiny, prefix, &["--max-resident-bytes", "0"])).wait().expect(0);
    sandbox.ask("stop", &[]).expect(0);
    // What killed commands left of other things is no matter of the quota.
    let left = entries(&sandbox.path("base/run"));
    let left: Vec<&String> = left.iter().filter(|name| name.contains(".quota-")).collect();
    assert!(left.is_empty(), "files stay in BASE/run: {left:?}");
}
