//! Where a figure was measured: without it, it is a rumour.

use std::fs::read_to_string;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use iloader::units::ByteSize;

use super::Outcome;

/// Prints machine, kernel, file system, huge-page settings, load, date and command.
pub(crate) fn describe(directory: &Path, bench: &str) -> Outcome<()> {
    let cores = std::thread::available_parallelism()?;
    println!("machine        {}, {cores} cores, {} memory", processor()?, memory()?);
    let system = rustix::system::uname();
    println!("kernel         {} {}", system.release().to_string_lossy(), system.machine().to_string_lossy());
    println!("file system    {} at {}", file_system(directory)?, directory.display());
    println!("shmem_enabled  {}", shmem_enabled());
    println!("load           {} (running and waiting, 1 minute)", load_average()?);
    println!("date           {}", jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC"));
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    println!("command        cargo bench --bench {bench} -- {}", arguments.join(" "));
    Ok(())
}

/// Which of its settings the kernel has chosen for huge pages of shared memory, or why that is not known.
pub(crate) fn shmem_enabled() -> String {
    let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    match read_to_string(path) {
        Ok(text) => {
            let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
            chosen.map_or(text.trim(), |(chosen, _)| chosen).to_owned()
        }
        Err(cause) => format!("unknown ({cause})"),
    }
}

/// Programs that ran or waited for a core in the last minute.
pub(crate) fn load_average() -> Outcome<f64> {
    let text = read_to_string("/proc/loadavg")?;
    Ok(text.split_whitespace().next().ok_or("/proc/loadavg is empty")?.parse()?)
}

fn processor() -> Outcome<String> {
    let text = read_to_string("/proc/cpuinfo")?;
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    Ok(name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.to_owned()))
}

fn memory() -> Outcome<ByteSize> {
    let text = read_to_string("/proc/meminfo")?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next());
    Ok(ByteSize(total.ok_or("/proc/meminfo has no MemTotal")?.parse::<u64>()? << 10))
}

/// The type of the file system that holds `directory`, found by its device number.
pub(crate) fn file_system(directory: &Path) -> Outcome<String> {
    let device = std::fs::metadata(directory)?.dev();
    let wanted = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mounts = read_to_string("/proc/self/mountinfo")?;
    let kind = mounts.lines().find_map(|line| {
        let (mount, about) = line.split_once(" - ")?;
        (mount.split(' ').nth(2)? == wanted).then(|| about.split(' ').next().unwrap_or("?").to_owned())
    });
    Ok(kind.unwrap_or_else(|| format!("device {wanted}")))
}
