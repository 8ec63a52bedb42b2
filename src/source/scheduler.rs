//! Which I/O scheduler stands between a file system and its disks: priorities count only with some.

use std::fs::{canonicalize, read_dir, read_to_string};
use std::path::{Path, PathBuf};

/// Schedulers that serve a request of the idle class last: mq-deadline since Linux 5.14.
const HEED_PRIORITIES: [&str; 3] = ["bfq", "mq-deadline", "cfq"];

/// Devices may stand on devices so deep.
const LAYERS_MAX: usize = 16;

/// The schedulers of the disks under the file system of `device` (`st_dev`), each once. None for one without
/// disks, such as a network file system or one in memory.
pub fn io_schedulers(device: u64) -> Vec<String> {
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mut found = Vec::new();
    if let Ok(directory) = canonicalize(Path::new("/sys/dev/block").join(number)) {
        collect(&directory, LAYERS_MAX, &mut found);
    }
    found.sort();
    found.dedup();
    found
}

/// Whether a load of low I/O priority stands back under this scheduler.
pub fn heeds_priorities(scheduler: &str) -> bool {
    HEED_PRIORITIES.contains(&scheduler)
}

/// Those of a block device's directory in sysfs: of what it is made of, where it is made of others.
fn collect(directory: &Path, layers: usize, found: &mut Vec<String>) {
    if layers == 0 {
        return;
    }
    let entries = read_dir(directory.join("slaves")).into_iter().flatten();
    let below: Vec<PathBuf> = entries.filter_map(|entry| canonicalize(entry.ok()?.path()).ok()).collect();
    if !below.is_empty() {
        return below.iter().for_each(|directory| collect(directory, layers - 1, found));
    }
    // A partition has none of its own: its disk's is one level up.
    let places = [directory.join("queue/scheduler"), directory.join("../queue/scheduler")];
    let text = places.iter().find_map(|place| read_to_string(place).ok());
    found.extend(text.as_deref().and_then(chosen).map(str::to_owned));
}

/// The one in brackets of `none [mq-deadline] kyber`.
fn chosen(text: &str) -> Option<&str> {
    Some(text.split_once('[')?.1.split_once(']')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_chosen_one_is_read() {
        assert_eq!(chosen("none [mq-deadline] kyber bfq \n"), Some("mq-deadline"));
        assert_eq!(chosen("[none] \n"), Some("none"));
        assert_eq!(chosen("none\n"), None);
        assert!(heeds_priorities("bfq") && !heeds_priorities("none") && !heeds_priorities("kyber"));
    }

    #[test]
    fn what_a_device_is_made_of_counts() {
        let sysfs = tempfile::tempdir().unwrap();
        let disk = |name: &str, scheduler: &str| {
            let queue = sysfs.path().join(name).join("queue");
            std::fs::create_dir_all(&queue).unwrap();
            std::fs::write(queue.join("scheduler"), scheduler).unwrap();
            sysfs.path().join(name)
        };
        let (fast, slow, raid) =
            (disk("fast", "[none] bfq"), disk("slow", "none [bfq]"), disk("raid", "[none]"));
        let partition = fast.join("fast1");
        std::fs::create_dir(&partition).unwrap();
        std::fs::create_dir(raid.join("slaves")).unwrap();
        let schedulers = |directory: &Path| {
            let mut found = Vec::new();
            collect(directory, LAYERS_MAX, &mut found);
            found.sort();
            found
        };
        assert_eq!(schedulers(&partition), ["none"]);
        symlink(&partition, raid.join("slaves/fast1")).unwrap();
        symlink(&slow, raid.join("slaves/slow")).unwrap();
        assert_eq!(schedulers(&raid), ["bfq", "none"]);
        // A circle ends.
        std::fs::create_dir(slow.join("slaves")).unwrap();
        symlink(&slow, slow.join("slaves/slow")).unwrap();
        assert_eq!(schedulers(&slow), [""; 0]);
    }
}
