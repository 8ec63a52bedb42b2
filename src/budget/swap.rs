//! Whether memory may leave for a swap device: files in memory are swapped like any other page.

/// Whether any swap is on, for the whole machine: a cgroup may still keep its own pages from it.
pub fn is_on() -> bool {
    // A kernel without swap has no such file.
    std::fs::read_to_string("/proc/swaps").is_ok_and(|swaps| has_device(&swaps))
}

/// Whether `/proc/swaps`, a heading and a line for each device or file, names one.
fn has_device(swaps: &str) -> bool {
    swaps.lines().skip(1).any(|line| !line.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heading_is_no_device() {
        let heading = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert!(!has_device(heading));
        assert!(!has_device(""));
        assert!(has_device(&format!(
            "{heading}/dev/zram0                              partition\t1048572\t\t0\t\t-2\n"
        )));
        assert!(has_device(&format!("{heading}/swap\\040file file 1 0 -2\n")));
    }
}
