//! A memory cgroup of a test's own, of v1 or v2.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::containers::inside;
use crate::harness::{Job, Sandbox, skipped, until};

const MIB: u64 = 1 << 20;

/// Where the hierarchy is that may limit memory, and whether it is of v1.
pub(crate) fn hierarchy() -> Option<(PathBuf, bool)> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let mount = |is_meant: &dyn Fn(&[&str]) -> bool| {
        let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        fields.find(|fields| is_meant(fields)).map(|fields| PathBuf::from(fields[1]))
    };
    let v1 = mount(&|fields| fields[2] == "cgroup" && fields[3].split(',').any(|option| option == "memory"));
    v1.map(|root| (root, true)).or_else(|| Some((mount(&|fields| fields[2] == "cgroup2")?, false)))
}

/// A control group with a limit on its memory, of v1 or v2. At the end it is removed, with all that is in it.
pub(crate) struct MemoryGroup {
    directory: PathBuf,
    pub(crate) is_v1: bool,
}

impl MemoryGroup {
    /// A group of its own for `sandbox`; where none can be made, a line says so.
    pub(crate) fn new(sandbox: &Sandbox) -> Option<MemoryGroup> {
        let group = MemoryGroup::made(&format!("iloader-{}", sandbox.name()));
        if group.is_none() {
            skipped(
                "no cgroup with a limit on memory can be made: that needs root, and v1 or v2 with memory",
            );
        }
        group
    }

    fn made(name: &str) -> Option<MemoryGroup> {
        let (root, is_v1) = hierarchy()?;
        let group = MemoryGroup { directory: root.join(name), is_v1 };
        std::fs::create_dir(&group.directory).ok()?;
        group.directory.join(group.file("memory.limit_in_bytes", "memory.max")).exists().then_some(group)
    }

    /// A group below it; where none can be made, a line says so.
    pub(crate) fn below(&self, leaf: &str) -> Option<MemoryGroup> {
        if !self.is_v1 {
            // What it does not pass on, the group below does not have.
            let _ = std::fs::write(self.directory.join("cgroup.subtree_control"), "+memory");
        }
        let group = MemoryGroup { directory: self.directory.join(leaf), is_v1: self.is_v1 };
        std::fs::create_dir(&group.directory).unwrap();
        let can_limit = group.directory.join(self.file("memory.limit_in_bytes", "memory.max")).exists();
        if !can_limit {
            skipped("no cgroup with a limit on memory can be made below another");
        }
        can_limit.then_some(group)
    }

    fn file(&self, v1: &'static str, v2: &'static str) -> &'static str {
        if self.is_v1 { v1 } else { v2 }
    }

    fn read(&self, v1: &'static str, v2: &'static str) -> String {
        std::fs::read_to_string(self.directory.join(self.file(v1, v2))).unwrap()
    }

    pub(crate) fn limit(&self, bytes: u64) {
        let file = self.directory.join(self.file("memory.limit_in_bytes", "memory.max"));
        std::fs::write(file, bytes.to_string()).unwrap();
    }

    pub(crate) fn usage(&self) -> u64 {
        self.read("memory.usage_in_bytes", "memory.current").trim().parse().unwrap()
    }

    /// The highest usage so far; `None` on kernels that do not tell it.
    pub(crate) fn peak(&self) -> Option<u64> {
        let file = self.directory.join(self.file("memory.max_usage_in_bytes", "memory.peak"));
        std::fs::read_to_string(file).ok()?.trim().parse().ok()
    }

    pub(crate) fn oom_kills(&self) -> u64 {
        let text = self.read("memory.oom_control", "memory.events");
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.unwrap().trim().parse().unwrap()
    }

    pub(crate) fn processes(&self) -> Vec<Pid> {
        let text = std::fs::read_to_string(self.directory.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
    }

    /// `command`, in it from its start.
    pub(crate) fn around(&self, command: &Command) -> Command {
        let join = format!("echo $$ >'{}' && exec \"$@\"", self.directory.join("cgroup.procs").display());
        inside(&["sh", "-c", &join, "sh"], command)
    }

    /// Runs `command` in it.
    pub(crate) fn spawn(&self, command: &Command) -> Job {
        Job::spawn(self.around(command))
    }

    /// Has the kernel take back all that it can. What it can't is no error here.
    pub(crate) fn reclaim(&self) {
        let file = self.directory.join(self.file("memory.force_empty", "memory.reclaim"));
        for _ in 0..3 {
            let _ = std::fs::write(&file, if self.is_v1 { "0" } else { "1G" });
        }
    }

    /// Bytes of files in memory that are in memory, by the kernel's own account.
    pub(crate) fn shared_bytes(&self) -> u64 {
        self.account("shmem")
    }

    /// Bytes on swap.
    pub(crate) fn swapped_bytes(&self) -> u64 {
        match std::fs::read_to_string(self.directory.join("memory.swap.current")) {
            Ok(text) => text.trim().parse().unwrap(),
            Err(_) => self.account("swap"),
        }
    }

    fn account(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(self.directory.join("memory.stat")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    /// A neighbour that takes so many bytes of memory, and keeps them until the end of the group.
    pub(crate) fn grow(&self, bytes: u64) -> Job {
        // What has no end of a line is kept whole.
        let script = format!("(head -c {bytes} /dev/zero; exec sleep 1000) | tail -n 1");
        let mut command = Command::new("sh");
        self.spawn(command.args(["-c", &script]))
    }

    /// Nothing of a load is left in it but what was there before, and some of the kernel's own.
    pub(crate) fn is_given_back(&self, before: u64) {
        until("memory that is given back", || self.usage() < before + 8 * MIB);
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        for _ in 0..500 {
            for pid in self.processes() {
                let _ = kill_process(pid, Signal::KILL);
            }
            if std::fs::remove_dir(&self.directory).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
