//! The limits of this process, met before anything is half-made: descriptors, file size, address space, data
//! and stack.
//!
//! Each check is a pure decision over a [`Limit`] and a thin shell that asks the kernel for it.

use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{Error, Kind, Result, reason};
use crate::sys::lock;
use crate::units::ByteSize;

/// One resource limit. `None` is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What the kernel enforces.
    pub soft: Option<u64>,
    /// How far the process may raise it.
    pub hard: Option<u64>,
}

impl From<Rlimit> for Limit {
    fn from(limit: Rlimit) -> Limit {
        Limit { soft: limit.current, hard: limit.maximum }
    }
}

impl From<Limit> for Rlimit {
    fn from(limit: Limit) -> Rlimit {
        Rlimit { current: limit.soft, maximum: limit.hard }
    }
}

/// Whether `needed` descriptors can be had, raising the soft limit if need be. `needed` is the highest
/// descriptor number plus 1, which is what the limit bounds.
///
/// # Errors
///
/// [`Kind::NoRoom`] where the hard limit is lower.
pub fn check_descriptors(needed: u64) -> Result<()> {
    descriptors_fit(needed, getrlimit(Resource::Nofile).into())
}

/// Raises the soft limit of descriptors to `needed`, never further: a process table grows with it. A limit
/// that is high enough stays.
///
/// # Errors
///
/// As [`check_descriptors`], or when the kernel refuses.
pub fn raise_descriptors(needed: u64) -> Result<()> {
    let old = Limit::from(getrlimit(Resource::Nofile));
    descriptors_fit(needed, old)?;
    if let Some(raised) = raised(needed, old) {
        set_descriptors(raised)?;
    }
    Ok(())
}

fn set_descriptors(limit: Limit) -> Result<()> {
    setrlimit(Resource::Nofile, limit.into())
        .map_err(|errno| Error::os("set the limit of open files (RLIMIT_NOFILE)", &errno.into()))
}

fn descriptors_fit(needed: u64, limit: Limit) -> Result<()> {
    let Some(hard) = limit.hard.filter(|hard| needed > *hard) else { return Ok(()) };
    let message =
        format!("needs {needed} descriptors, but the hard limit of this process is {hard} (RLIMIT_NOFILE)");
    Err(Error::new(Kind::NoRoom, message).hint(format!(
        "raise it to {needed} (as root: ulimit -n {needed}; systemd: LimitNOFILE=; containers: \
         --ulimit nofile=), or select fewer files (--pattern)"
    )))
}

/// The limit with the soft one raised to `needed`, or `None` where it is high enough.
fn raised(needed: u64, limit: Limit) -> Option<Limit> {
    limit.soft.filter(|soft| *soft < needed).map(|_| Limit { soft: Some(needed), hard: limit.hard })
}

/// Whether a file of `largest` bytes may be made. The limit counts for files in memory too, and the kernel
/// answers with a signal that ends the process.
///
/// # Errors
///
/// [`Kind::NoRoom`] where the limit is lower.
pub fn check_file_size(largest: u64) -> Result<()> {
    file_size_fits(largest, getrlimit(Resource::Fsize).into())
}

fn file_size_fits(largest: u64, limit: Limit) -> Result<()> {
    let Some(soft) = limit.soft.filter(|soft| largest > *soft) else { return Ok(()) };
    let message = format!(
        "the largest file has {largest} bytes ({}), but this process may only write files of {soft} bytes \
         ({}) (RLIMIT_FSIZE)",
        ByteSize(largest),
        ByteSize(soft)
    );
    Err(Error::new(Kind::NoRoom, message).hint(way_out(largest, limit, "-f", "LimitFSIZE=", "fsize")))
}

/// What a process of ours maps beside segments and buffers: its heap, the stacks of some threads, and what the C
/// library sets aside for them. Where memory cannot be had for these, a program ends without a word.
pub const OWN_BYTES: u64 = 24 << 20;

/// The smallest stack that the command line is read on.
const STACK_BYTES_MIN: u64 = 512 << 10;

/// Whether `mapped` bytes more of address space can be mapped, and `data` bytes more of it be private memory: heap,
/// buffers and stacks. Both without [`OWN_BYTES`], which come on top.
///
/// # Errors
///
/// [`Kind::NoRoom`] where a limit leaves less; where there is a limit, also when `/proc/self/statm`
/// cannot be read.
pub fn check_memory(mapped: u64, data: u64) -> Result<()> {
    for (space, bytes) in [(ADDRESS_SPACE, mapped.saturating_add(data)), (DATA, data)] {
        let limit = Limit::from(getrlimit(space.resource));
        if limit.soft.is_none() {
            continue;
        }
        let path = Path::new("/proc/self/statm");
        let statm = std::fs::read_to_string(path).map_err(|cause| Error::io("read", path, &cause))?;
        let in_use =
            pages_bytes(&statm, space.field, rustix::param::page_size() as u64).ok_or_else(|| {
                Error::new(Kind::Failed, format!("cannot read the mapped pages from {}", path.display()))
            })?;
        space_fits(&space, bytes.saturating_add(OWN_BYTES), in_use, limit)?;
    }
    Ok(())
}

/// A limit on what is mapped.
struct Space {
    resource: Resource,
    /// The field of `/proc/self/statm` that says what of it is in use, in pages.
    field: usize,
    what: &'static str,
    name: &'static str,
    flag: &'static str,
    unit_line: &'static str,
    container: &'static str,
}

const ADDRESS_SPACE: Space = Space {
    resource: Resource::As,
    field: 0,
    what: "address space",
    name: "RLIMIT_AS",
    flag: "-v",
    unit_line: "LimitAS=",
    container: "as",
};

const DATA: Space = Space {
    resource: Resource::Data,
    field: 5,
    what: "private memory",
    name: "RLIMIT_DATA",
    flag: "-d",
    unit_line: "LimitDATA=",
    container: "data",
};

/// A number of pages in `/proc/self/statm`, in bytes.
fn pages_bytes(statm: &str, field: usize, page_bytes: u64) -> Option<u64> {
    statm.split_ascii_whitespace().nth(field)?.parse::<u64>().ok()?.checked_mul(page_bytes)
}

fn space_fits(space: &Space, bytes: u64, in_use: u64, limit: Limit) -> Result<()> {
    let needed = bytes.saturating_add(in_use);
    let Some(soft) = limit.soft.filter(|soft| needed > *soft) else { return Ok(()) };
    let Space { what, name, .. } = space;
    let message = format!(
        "needs {} of {what} beside the {} in use, but this process may only have {} ({name})",
        ByteSize(bytes),
        ByteSize(in_use),
        ByteSize(soft)
    );
    Err(Error::new(Kind::NoRoom, message).hint(way_out(
        needed,
        limit,
        space.flag,
        space.unit_line,
        space.container,
    )))
}

/// Whether the stack is large enough for a program of this size, to be asked before much of it is used.
///
/// # Errors
///
/// [`Kind::NoRoom`] where it is not.
pub fn check_stack() -> Result<()> {
    stack_fits(getrlimit(Resource::Stack).into())
}

fn stack_fits(limit: Limit) -> Result<()> {
    let Some(soft) = limit.soft.filter(|soft| *soft < STACK_BYTES_MIN) else { return Ok(()) };
    let message = format!(
        "needs a stack of {}, but this process may only have {} (RLIMIT_STACK)",
        ByteSize(STACK_BYTES_MIN),
        ByteSize(soft)
    );
    Err(Error::new(Kind::NoRoom, message).hint(way_out(STACK_BYTES_MIN, limit, "-s", "LimitSTACK=", "stack")))
}

/// Mappings that a process needs beside those of locked segments while it loads: program, heap, the stacks of its
/// threads, and the segments being filled.
const MAPPINGS_OWN: u64 = 1024;

/// Whether `bytes`, in so many `segments`, can be locked in memory, raising the soft limit if need be. Call it
/// after [`check_memory`], which has a clearer word for its own limit.
///
/// # Errors
///
/// [`Kind::NoRoom`] where less may be locked, or so many segments cannot be mapped.
pub fn check_locked_memory(bytes: u64, segments: u64) -> Result<()> {
    let path = "/proc/sys/vm/max_map_count";
    let mappings_max = std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok());
    mappings_fit(segments, mappings_max)?;
    let limit = Limit::from(getrlimit(Resource::Memlock));
    if limit.soft.is_some_and(|soft| soft < bytes) {
        // What the process may allow itself is no reason to refuse. Where it fails the kernel's answer decides.
        let _ = setrlimit(Resource::Memlock, Limit { soft: limit.hard, ..limit }.into());
    }
    let length = usize::try_from(bytes).unwrap_or(usize::MAX);
    lock::may_lock(length).map_err(|cause| locking_refused(bytes, limit, &cause))
}

fn mappings_fit(segments: u64, mappings_max: Option<u64>) -> Result<()> {
    let needed = segments.saturating_add(MAPPINGS_OWN);
    let Some(most) = mappings_max.filter(|most| needed > *most) else { return Ok(()) };
    let message = format!(
        "--mlock maps each file, {needed} mappings in all, but a process may have {most} (vm.max_map_count)"
    );
    Err(Error::new(Kind::NoRoom, message).hint(format!(
        "raise it (as root: sysctl vm.max_map_count={needed}), select fewer files (--pattern), or leave out \
         --mlock"
    )))
}

fn locking_refused(bytes: u64, limit: Limit, cause: &std::io::Error) -> Error {
    let allowed = match limit.hard {
        Some(hard) => format!("only {} may be locked", ByteSize(hard)),
        None => reason(cause),
    };
    let message = format!(
        "--mlock needs {} ({bytes} bytes) of locked memory, but {allowed} (RLIMIT_MEMLOCK)",
        ByteSize(bytes)
    );
    Error::new(Kind::NoRoom, message).hint(format!(
        "raise it where it was set (ulimit -l {}; /etc/security/limits.conf; systemd: LimitMEMLOCK=; containers: \
         --ulimit memlock=), or leave out --mlock",
        bytes.div_ceil(1024)
    ))
}

/// How a limit in bytes is raised: by the user himself where the hard limit allows, else where it was set.
fn way_out(needed: u64, limit: Limit, flag: &str, unit_line: &str, container: &str) -> String {
    if let Some(hard) = limit.hard.filter(|hard| needed > *hard) {
        return format!(
            "the hard limit is {}: raise it where it was set (/etc/security/limits.conf, systemd: {unit_line}, \
             containers: --ulimit {container}=), or select fewer files (--pattern)",
            ByteSize(hard)
        );
    }
    // Shells count in KiB here.
    let most = limit.hard.map_or_else(|| "unlimited".to_owned(), |hard| (hard / 1024).to_string());
    format!("raise it first: ulimit -S {flag} {most}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Limit = Limit { soft: None, hard: None };

    fn limit(soft: u64, hard: u64) -> Limit {
        Limit { soft: Some(soft), hard: Some(hard) }
    }

    #[test]
    fn the_hard_limit_bounds_descriptors() {
        assert!(descriptors_fit(4096, limit(1024, 4096)).is_ok());
        assert!(descriptors_fit(u64::MAX, NONE).is_ok());
        let error = descriptors_fit(20300, limit(1024, 4096)).unwrap_err();
        assert_eq!(error.kind(), Kind::NoRoom);
        assert_eq!(
            error.message(),
            "needs 20300 descriptors, but the hard limit of this process is 4096 (RLIMIT_NOFILE)"
        );
        assert!(error.hint_text().unwrap().contains("ulimit -n 20300"));
    }

    #[test]
    fn locked_memory_that_may_not_be_had_is_refused_with_the_way_out() {
        let refused = std::io::Error::from_raw_os_error(libc::ENOMEM);
        let error = locking_refused(5 << 30, limit(64 << 10, 8 << 20), &refused);
        assert_eq!(
            (error.kind(), error.message()),
            (
                Kind::NoRoom,
                "--mlock needs 5.0 GiB (5368709120 bytes) of locked memory, but only 8.0 MiB may be locked \
                 (RLIMIT_MEMLOCK)"
            )
        );
        let hint = error.hint_text().unwrap();
        assert!(hint.contains("ulimit -l 5242880") && hint.contains("LimitMEMLOCK="), "{hint}");
        // No limit, and the kernel refuses all the same.
        let error = locking_refused(4096, NONE, &refused);
        assert!(error.message().contains("not enough memory (ENOMEM)"), "{error}");
    }

    #[test]
    fn each_locked_segment_takes_a_mapping() {
        assert!(mappings_fit(64_506, Some(65_530)).is_ok());
        assert!(mappings_fit(u64::MAX, None).is_ok());
        let error = mappings_fit(70_000, Some(65_530)).unwrap_err();
        assert_eq!(error.kind(), Kind::NoRoom);
        assert!(error.message().contains("71024 mappings in all, but a process may have 65530"), "{error}");
        assert!(error.hint_text().unwrap().contains("vm.max_map_count=71024"));
    }

    #[test]
    fn the_soft_limit_rises_only_as_far_as_needed() {
        assert_eq!(raised(2000, limit(1024, 4096)), Some(limit(2000, 4096)));
        assert_eq!(raised(1024, limit(1024, 4096)), None);
        assert_eq!(
            raised(2000, Limit { soft: Some(1), hard: None }),
            Some(Limit { soft: Some(2000), hard: None })
        );
        assert_eq!(raised(2000, NONE), None);
    }

    /// A limit belongs to the whole process, so that this runs in one of its own, with nothing beside it.
    #[test]
    fn the_kernel_takes_what_is_raised() {
        const MARK: &str = "ILOADER_TEST_LIMITS_ALONE";
        const LIMITS: Limit = Limit { soft: Some(100), hard: Some(200) };
        if std::env::var_os(MARK).is_none() {
            let test = "budget::limits::tests::the_kernel_takes_what_is_raised";
            let child = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test, "--test-threads=1"])
                .env(MARK, "1")
                .output()
                .unwrap();
            assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
            assert!(String::from_utf8_lossy(&child.stdout).contains("1 passed"));
            return;
        }
        let now = || Limit::from(getrlimit(Resource::Nofile));
        set_descriptors(LIMITS).unwrap();
        assert!(check_descriptors(200).is_ok());
        assert_eq!(check_descriptors(201).unwrap_err().kind(), Kind::NoRoom);
        assert_eq!(raise_descriptors(201).unwrap_err().kind(), Kind::NoRoom);
        assert_eq!(now(), LIMITS, "a refusal changes nothing");
        raise_descriptors(100).unwrap();
        assert_eq!(now(), LIMITS, "enough stays as it is");
        raise_descriptors(150).unwrap();
        assert_eq!(now(), limit(150, 200));
    }

    #[test]
    fn the_soft_limit_bounds_files_and_says_how_to_raise_it() {
        assert!(file_size_fits(1 << 30, NONE).is_ok());
        assert!(file_size_fits(1 << 20, limit(1 << 20, 1 << 20)).is_ok());
        let error = file_size_fits((1 << 20) + 1, limit(1 << 20, 1 << 20)).unwrap_err();
        assert_eq!(error.kind(), Kind::NoRoom);
        assert!(
            error.message().contains("1048577 bytes") && error.message().contains("RLIMIT_FSIZE"),
            "{error}"
        );
        assert!(error.hint_text().unwrap().starts_with("the hard limit is 1.0 MiB"), "{error:?}");
        let error = file_size_fits(2 << 20, Limit { soft: Some(1 << 20), hard: None }).unwrap_err();
        assert_eq!(error.hint_text(), Some("raise it first: ulimit -S -f unlimited"));
        let error = file_size_fits(2 << 20, limit(1 << 20, 4 << 20)).unwrap_err();
        assert_eq!(error.hint_text(), Some("raise it first: ulimit -S -f 4096"));
    }

    #[test]
    fn address_space_counts_what_is_mapped() {
        assert_eq!(pages_bytes("1000 200 30 4 0 50 0\n", 0, 4096), Some(4_096_000));
        assert_eq!(pages_bytes("1000 200 30 4 0 50 0\n", 5, 4096), Some(50 * 4096));
        assert_eq!(pages_bytes("", 0, 4096), None);
        assert_eq!(pages_bytes("18446744073709551615 1", 0, 4096), None);
        for (space, name) in [(ADDRESS_SPACE, "RLIMIT_AS"), (DATA, "RLIMIT_DATA")] {
            assert!(space_fits(&space, 600, 400, limit(1000, 1000)).is_ok());
            let error = space_fits(&space, 601, 400, limit(1000, 1000)).unwrap_err();
            assert_eq!(error.kind(), Kind::NoRoom);
            assert!(error.message().contains(name), "{error}");
            assert!(space_fits(&space, u64::MAX, 400, limit(1000, 1000)).is_err());
            assert!(space_fits(&space, u64::MAX, u64::MAX, NONE).is_ok());
        }
        assert!(check_memory(4096, 4096).is_ok());
    }

    #[test]
    fn a_small_stack_is_named() {
        assert!(check_stack().is_ok() && stack_fits(NONE).is_ok());
        let error = stack_fits(Limit { soft: Some(64 << 10), hard: None }).unwrap_err();
        assert!(error.message().contains("RLIMIT_STACK"), "{error}");
        assert_eq!(error.hint_text(), Some("raise it first: ulimit -S -s unlimited"));
    }
}
