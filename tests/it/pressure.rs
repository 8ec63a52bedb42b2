//! Swap, pressure and neighbours: a cache that is swapped out is whole and says so, one that is locked is not
//! swapped out, and a load that is to stand back does.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use crate::harness::{Job, MODEL, Sandbox, bytes_of, entries, skipped, until};
use crate::memory_group::MemoryGroup;
use crate::unprivileged::Town;

/// Swap in compressed memory, as long as this lives. One test run at a time has it, on the whole machine.
struct Zram {
    number: String,
    _alone: File,
}

impl Zram {
    /// `None`, with a line that says why, where it cannot be had.
    fn on(bytes: u64) -> Option<Zram> {
        if !rustix::process::geteuid().is_root() {
            skipped("swap needs root");
            return None;
        }
        let alone = File::create(std::env::temp_dir().join("iloader-test-swap.lock")).unwrap();
        alone.lock().unwrap();
        let _ = Command::new("modprobe").arg("zram").output();
        let Ok(number) = std::fs::read_to_string("/sys/class/zram-control/hot_add") else {
            skipped("this kernel has no zram");
            return None;
        };
        let zram = Zram { number: number.trim().to_owned(), _alone: alone };
        std::fs::write(zram.sysfs("disksize"), bytes.to_string()).unwrap();
        for program in ["mkswap", "swapon"] {
            match Command::new(program).arg(zram.device()).output() {
                Ok(output) if output.status.success() => {}
                other => {
                    skipped(format!("{program}: {other:?}"));
                    return None;
                }
            }
        }
        Some(zram)
    }

    fn device(&self) -> String {
        format!("/dev/zram{}", self.number)
    }

    fn sysfs(&self, leaf: &str) -> String {
        format!("/sys/block/zram{}/{leaf}", self.number)
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let _ = Command::new("swapoff").arg(self.device()).output();
        // Whoever looks at a new device, such as udev, has it open for a moment.
        for _ in 0..100 {
            if std::fs::write(self.sysfs("reset"), "1").is_ok()
                && std::fs::write("/sys/class/zram-control/hot_remove", &self.number).is_ok()
            {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

const WEIGHTS: &str = "weights.safetensors";
const WEIGHTS_BYTES: u64 = (48 << 20) + 123;

/// What the daemon itself has in memory, and what the kernel's counters may be late by.
const TOLERANCE: u64 = 16 << 20;

fn bytes_in(status: &serde_json::Value, field: &str) -> u64 {
    status[field].as_u64().unwrap_or_else(|| panic!("no {field} in {status}"))
}

fn assert_whole(view: &Path) {
    assert!(std::fs::read(view.join(WEIGHTS)).unwrap() == bytes_of(99, WEIGHTS_BYTES));
    for (index, (path, bytes)) in MODEL.iter().enumerate() {
        assert!(std::fs::read(view.join(path)).unwrap() == bytes_of(index as u64, *bytes), "{path}");
    }
}

/// Bytes that the daemon has mapped of its segments by entries of a whole huge page.
fn mapped_huge_bytes(sandbox: &Sandbox) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", sandbox.daemon().as_raw_nonzero())).unwrap();
    let sizes = maps.lines().filter_map(|line| line.strip_prefix("ShmemPmdMapped:"));
    sizes.map(|size| size.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10).sum()
}

#[test]
fn a_cache_is_whole_when_it_is_swapped_out_and_says_how_much_is() {
    let Some(_zram) = Zram::on(512 << 20) else { return };
    for backing in ["memfd", "tmpfs"] {
        let sandbox = Sandbox::new();
        let Some(cgroup) = MemoryGroup::new(&sandbox) else { return };
        sandbox.write(WEIGHTS, &bytes_of(99, WEIGHTS_BYTES));

        // Held in memory: nothing goes, whatever the pressure.
        let start = |more: &[&str]| {
            let command = sandbox.start_command(&[&["--backing", backing], more].concat());
            let ran = cgroup.spawn(&command).wait();
            ran.expect(0)
        };
        let started = start(&["--mlock"]);
        assert!(!started.stderr.contains("swap is on"), "{started:#?}");
        cgroup.reclaim();
        let status = sandbox.status();
        let allocated = bytes_in(&status, "allocated_bytes");
        assert_eq!((bytes_in(&status, "swapped_bytes"), bytes_in(&status, "locked_bytes")), (0, allocated));
        // Some may have been split before they were locked, where the whole machine is short of memory.
        let (mapped, loaded) = (mapped_huge_bytes(&sandbox), bytes_in(&status, "huge_page_bytes"));
        assert!(mapped >= loaded / 2, "huge pages stay huge: {mapped} of {loaded}");
        assert!(cgroup.shared_bytes() >= allocated, "{} of {allocated}", cgroup.shared_bytes());
        assert_whole(&sandbox.view());
        sandbox.ask("stop", &[]).expect(0);

        // Left to itself.
        let started = start(&[]);
        assert_eq!(started.stderr.matches("note: swap is on").count(), 1, "{started:#?}");
        let swapped = bytes_in(&sandbox.status(), "swapped_bytes");
        assert!(swapped <= allocated / 10, "{swapped} of {allocated} went before there was pressure");
        let again = sandbox.start(&["--backing", backing]).expect(0);
        assert!(!again.stderr.contains("swap is on"), "said once: {again:#?}");
        cgroup.reclaim();
        let status = sandbox.status();
        let (swapped, on_swap) = (bytes_in(&status, "swapped_bytes"), cgroup.swapped_bytes());
        assert!(swapped >= allocated / 10 * 9, "{swapped} of {allocated} went");
        assert!(swapped <= on_swap && on_swap - swapped <= TOLERANCE, "{swapped} of {on_swap} on swap");
        let there = cgroup.shared_bytes();
        assert!((swapped + there).abs_diff(allocated) <= 4 << 20, "{swapped} + {there} of {allocated}");
        let text = sandbox.ask("status", &[]).expect(0).stdout;
        assert!(text.lines().any(|line| line.starts_with("swapped: ") && line.ends_with(" MiB")), "{text}");

        assert_whole(&sandbox.view());
        let back = bytes_in(&sandbox.status(), "swapped_bytes");
        assert!(back <= allocated / 10, "{back} bytes are still out after all was read");
        sandbox.ask("stop", &[]).expect(0);
        sandbox.nothing_left();
    }
}

/// Whole pages of the two files of a town's model.
const TOWN_BYTES: u64 = (4 << 20) + 2 * 4096;

#[test]
fn an_ordinary_user_locks_as_much_as_the_limit_allows() {
    let Some(town) = Town::new() else { return };
    let user = town.user();
    let model = town.model();
    let program = town.program();
    let limited = |soft: u64, hard: u64, more: &[&str]| {
        let limit = format!("--memlock={soft}:{hard}");
        let start = [&limit, program.to_str().unwrap(), "start", model.to_str().unwrap(), "--name", "n"];
        Job::spawn(town.any_command(&user, "prlimit", &[&start, more].concat())).wait()
    };
    for backing in ["memfd", "tmpfs"] {
        let lock = ["--mlock", "--backing", backing];
        let enough = limited(TOWN_BYTES, TOWN_BYTES, &lock);
        if enough.code != Some(0) && !enough.stderr.contains("RLIMIT_MEMLOCK") {
            skipped(format!("{backing}: {}", enough.stderr.trim()));
            continue;
        }
        enough.expect(0);
        let status = town.iloader(&user, &["status", "n", "--json"]).expect(0).json();
        assert_eq!(bytes_in(&status, "locked_bytes"), TOWN_BYTES);
        town.iloader(&user, &["stop", "n"]).expect(0);
        user.assert_nothing_runs();

        // The soft limit is the user's own to raise.
        limited(4096, TOWN_BYTES, &lock).expect(0);
        town.iloader(&user, &["stop", "n"]).expect(0);

        for hard in [0, 4096, TOWN_BYTES - 4096] {
            let refused = limited(hard, hard, &lock);
            for word in ["4.0 MiB", &TOWN_BYTES.to_string(), "ulimit -l 4104", "LimitMEMLOCK="] {
                assert!(refused.stderr.contains(word), "{word}: {refused:#?}");
            }
            refused.expect_refusal(6, "RLIMIT_MEMLOCK");
            user.assert_nothing_runs();
        }
    }
}

#[test]
fn a_locked_cache_is_another_one_and_a_slower_load_is_not() {
    let sandbox = Sandbox::new();
    sandbox.started(&[]);
    sandbox.start(&["--mlock"]).expect_refusal(9, "--mlock off → on");
    let again = sandbox.start(&["--background", "--limit-rate", "1GiB", "--numa", "0"]).expect(0);
    for word in ["--background off, not on", "--limit-rate none, not 1073741824", "--numa none, not 0"] {
        assert!(again.stderr.contains(word), "{word}: {again:#?}");
    }
    let tuning = &sandbox.status()["tuning"];
    assert_eq!((&tuning["background"], &tuning["limit-rate"]), (&"off".into(), &"none".into()));
    sandbox.ask("stop", &[]).expect(0);
    sandbox.nothing_left();
}

#[test]
fn a_limited_load_is_not_faster_than_its_limit() {
    let sandbox = Sandbox::empty();
    let bytes = 3 << 20;
    sandbox.write("config.json", b"{}");
    sandbox.write("model.safetensors", &bytes_of(5, bytes));
    for how in [
        ["--engine", "auto", "--direct", "always"],
        ["--engine", "threads", "--direct", "always"],
        // What is in the page cache counts as well.
        ["--engine", "auto", "--direct", "auto"],
        ["--engine", "threads", "--direct", "never"],
    ] {
        let limit = ["--limit-rate", "4MiB", "--workers", "3"];
        let ran = sandbox.start(&[&how[..], &limit].concat());
        if ran.code != Some(0) {
            skipped(format!("{how:?}: {}", ran.stderr.trim()));
            continue;
        }
        let status = sandbox.status();
        // The last read of at most 1/20 second is paid for afterwards.
        let least = bytes as f64 / f64::from(4 << 20) - 0.05;
        let seconds = status["progress"]["seconds"].as_f64().unwrap();
        assert!(seconds >= least, "{how:?}: {seconds} s, which is less than {least}");
        assert_eq!(status["tuning"]["limit-rate"], "4194304");
        assert!(std::fs::read(sandbox.view().join("model.safetensors")).unwrap() == bytes_of(5, bytes));
        sandbox.ask("stop", &[]).expect(0);
    }
    sandbox.nothing_left();
    for wrong in ["0", "4095", "-1", "fast"] {
        sandbox.start(&[&format!("--limit-rate={wrong}")]).expect_refusal(2, "--limit-rate");
    }
}

/// Starts a load that goes on for minutes, and waits until it is under way.
fn start_slowly(sandbox: &Sandbox, more: &[&str]) {
    sandbox.write("model.safetensors", &bytes_of(5, 8 << 20));
    sandbox.start(&[&["--no-wait", "--limit-rate", "16KiB"], more].concat()).expect(0);
}

#[test]
fn a_load_that_waits_for_its_rate_can_be_cancelled() {
    for engine in ["auto", "threads"] {
        let sandbox = Sandbox::empty();
        start_slowly(&sandbox, &["--engine", engine, "--workers", "2"]);
        assert_eq!(sandbox.status()["state"], "loading");
        sandbox.ask("stop", &[]).expect(0);
        sandbox.nothing_left();
        let log = std::fs::read_to_string(sandbox.path("base/logs").join(format!("{}.log", sandbox.name())));
        let log = log.unwrap();
        assert!(!log.contains("did not end in time"), "{log}");
    }
}

#[test]
fn a_load_in_the_background_stands_back_and_its_daemon_does_not() {
    for engine in ["auto", "threads"] {
        let sandbox = Sandbox::empty();
        start_slowly(&sandbox, &["--background", "--engine", engine, "--workers", "2"]);
        let pid = sandbox.daemon().as_raw_nonzero().get();
        let tasks = format!("/proc/{pid}/task");
        let name_of =
            |task: &str| std::fs::read_to_string(format!("{tasks}/{task}/comm")).unwrap_or_default();
        let is_loading = |task: &str| ["load", "read"].iter().any(|start| name_of(task).starts_with(start));
        let loading =
            || entries(Path::new(&tasks)).into_iter().filter(|task| is_loading(task)).collect::<Vec<_>>();
        until("two workers", || loading().len() >= 2);
        let loading = loading();
        until("a load that stands back", || loading.iter().all(|task| nice_of(&tasks, task) == Some(19)));
        assert_eq!(nice_of(&tasks, &pid.to_string()), nice_of("/proc", "self"));
        let io_class = |task: &str| match Command::new("ionice").args(["-p", task]).output() {
            Ok(output) => Some(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            Err(cause) => {
                skipped(format!("ionice: {cause}"));
                None
            }
        };
        for task in &loading {
            assert!(io_class(task).is_none_or(|class| class == "idle"), "{engine}: {}", name_of(task));
        }
        assert!(io_class(&pid.to_string()).is_none_or(|class| class != "idle"), "the daemon itself");
        sandbox.ask("stop", &[]).expect(0);
        sandbox.nothing_left();
    }
}

/// The niceness of one thread.
fn nice_of(tasks: &str, task: &str) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("{tasks}/{task}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(16)?.parse().ok()
}

#[test]
fn an_absent_node_is_refused_and_a_lone_one_is_noted() {
    let sandbox = Sandbox::new();
    let refused = sandbox.start(&["--numa", "1023"]).expect_refusal(2, "there is no NUMA node 1023");
    assert!(refused.stderr.lines().any(|line| line.contains("hint:") && line.contains('0')), "{refused:#?}");
    sandbox.start(&["--numa", "-1"]).expect_refusal(2, "--numa");
    assert!(!sandbox.path("base").exists(), "nothing is made");

    let nodes = iloader::load::placement::nodes();
    for node in [nodes[0].to_string(), "interleave".to_owned()] {
        for backing in ["memfd", "tmpfs"] {
            let started = sandbox.start(&["--numa", &node, "--backing", backing]);
            if started.code != Some(0) {
                skipped(format!("--numa {node} on {backing}: {}", started.stderr.trim()));
                continue;
            }
            let is_noted = started.stderr.contains("--numa changes nothing here");
            assert_eq!(is_noted, nodes.len() == 1, "{nodes:?}: {started:#?}");
            for (index, (path, bytes)) in MODEL.iter().enumerate() {
                let read = std::fs::read(sandbox.view().join(path)).unwrap();
                assert!(read == bytes_of(index as u64, *bytes), "{path}");
            }
            sandbox.ask("stop", &[]).expect(0);
        }
    }
    sandbox.nothing_left();
}
