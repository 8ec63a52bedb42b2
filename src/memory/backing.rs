//! What holds the bytes of a segment: a sealed memfd, or a file on a private read-only huge-page tmpfs.
//!
//! Both are immutable and both are filled on huge pages without privilege. They differ in what a stock
//! reader's map looks like: the kernel aligns maps of the tmpfs to a huge page always, and maps of a memfd
//! only where `shmem_enabled` is not `never`, which is the default of most distributions.

use std::fmt;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use rustix::fs::{AtFlags, Mode, OFlags};

use crate::error::{Error, Kind, Result, reason};
use crate::sys::{map, memfd, namespace};
use crate::units::{HUGE_PAGE_BYTES, PAGE_BYTES};

/// What the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// A memfd where readers' maps of it are aligned, else the private tmpfs where it can be had, else a
    /// memfd.
    #[default]
    Auto,
    /// Sealed memfds.
    Memfd,
    /// Files on a private tmpfs.
    Tmpfs,
}

impl Choice {
    /// The names on the command line.
    pub const NAMES: [&'static str; 3] = ["auto", "memfd", "tmpfs"];

    /// The choice of a name.
    pub fn from_name(name: &str) -> Result<Choice> {
        match name {
            "auto" => Ok(Choice::Auto),
            "memfd" => Ok(Choice::Memfd),
            "tmpfs" => Ok(Choice::Tmpfs),
            _ => Err(Error::new(Kind::Usage, format!("there is no backing '{}'", name.escape_debug()))
                .hint("choose auto, memfd or tmpfs")),
        }
    }
}

/// A backing that is known to work here.
#[derive(Debug)]
pub struct Backing {
    kind: BackingKind,
    reason: String,
}

#[derive(Debug)]
enum BackingKind {
    Memfd,
    /// The mounts, and a lock for the moment in which a file has a name on them.
    Tmpfs(namespace::PrivateTmpfs, Mutex<()>),
}

/// A new, empty file of a backing, of its final length: `writable` to fill it, and for the tmpfs already
/// the description that will be published.
#[derive(Debug)]
pub(super) struct NewFile {
    pub(super) writable: File,
    pub(super) read_only: Option<OwnedFd>,
}

impl Backing {
    /// Chooses for segments of `allocated_bytes` in `files` files. An error where the backing asked for by
    /// name cannot be had.
    pub fn choose(choice: Choice, allocated_bytes: u64, files: u64) -> Result<Backing> {
        let memfd = |reason: String| Backing { kind: BackingKind::Memfd, reason };
        let tmpfs = |reason: &str| match private_tmpfs(allocated_bytes, files) {
            Ok(mounts) => {
                Ok(Backing { kind: BackingKind::Tmpfs(mounts, Mutex::new(())), reason: reason.to_owned() })
            }
            Err(refused) => Err((refused.step, refused.cause)),
        };
        match choice {
            Choice::Memfd => Ok(memfd("asked for".to_owned())),
            Choice::Tmpfs => tmpfs("asked for").map_err(|(step, cause)| {
                Error::new(Kind::Failed, format!("cannot have a private tmpfs: cannot {step}: {}", reason(&cause)))
                    .hint("leave --backing at auto, which falls back to a memfd; `sysctl user.max_user_namespaces` \
                           and AppArmor's rule for unprivileged user namespaces decide")
            }),
            Choice::Auto if maps_of_memfd_are_aligned() => {
                Ok(memfd("this kernel aligns readers' maps of a memfd".to_owned()))
            }
            Choice::Auto => tmpfs("this kernel does not align readers' maps of a memfd").or_else(|(step, cause)| {
                Ok(memfd(format!(
                    "readers' maps will not be aligned: a private tmpfs cannot be had (cannot {step}: {})",
                    reason(&cause)
                )))
            }),
        }
    }

    /// Why this one.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Creates a file of `bytes`. `name` shows in `/proc`: at most [`memfd::NAME_BYTES_MAX`] bytes.
    pub(super) fn create(&self, name: &str, bytes: u64) -> Result<NewFile> {
        let created = match &self.kind {
            BackingKind::Memfd => memfd::create(name).map(|writable| NewFile { writable, read_only: None }),
            BackingKind::Tmpfs(mounts, naming) => {
                let _alone = naming.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                create_unlinked(mounts, &name.replace('/', ":"))
            }
        };
        let file = created.map_err(|cause| Error::os("create a memory file", &cause))?;
        file.writable
            .set_len(bytes)
            .map_err(|cause| Error::os(&format!("give a memory file {bytes} bytes"), &cause))?;
        if matches!(self.kind, BackingKind::Memfd) {
            memfd::fix_length(&file.writable)
                .map_err(|cause| Error::os("fix the length of a memfd", &cause))?;
        }
        Ok(file)
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self.kind {
            BackingKind::Memfd => "memfd",
            BackingKind::Tmpfs(..) => "tmpfs",
        })
    }
}

/// A mount with room for the segments and a little more, so that filling it never meets its limit: a page
/// that is mapped and cannot be had is a SIGBUS.
fn private_tmpfs(
    allocated_bytes: u64,
    files: u64,
) -> std::result::Result<namespace::PrivateTmpfs, namespace::Refused> {
    // Within a file's length pages come in whole extents, so each file may take one extent more for a while.
    let slack = files.saturating_add(16).saturating_mul(HUGE_PAGE_BYTES);
    let bytes = allocated_bytes.saturating_add(slack).min(u64::MAX / 2) / PAGE_BYTES * PAGE_BYTES;
    namespace::private_tmpfs(bytes, files.saturating_add(16))
}

/// A file that has a name for the time of three calls: opened twice, by both mounts, then unlinked.
fn create_unlinked(mounts: &namespace::PrivateTmpfs, name: &str) -> std::io::Result<NewFile> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let writable = rustix::fs::openat(&mounts.writable, name, flags, Mode::from(0o444))?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let read_only = rustix::fs::openat(&mounts.read_only, name, flags, Mode::empty());
    rustix::fs::unlinkat(&mounts.writable, name, AtFlags::empty())?;
    Ok(NewFile { writable: File::from(writable), read_only: Some(read_only?) })
}

/// Whether a stock reader's map of a memfd would be aligned to a huge page: tried, not believed.
fn maps_of_memfd_are_aligned() -> bool {
    let aligned = |pages: u64| -> std::io::Result<bool> {
        let file = memfd::create("iloader:probe")?;
        let bytes = 2 * HUGE_PAGE_BYTES + pages * PAGE_BYTES;
        file.set_len(bytes)?;
        let map = map::ReaderMap::new(&file, bytes as usize)?;
        Ok((map.address() as u64).is_multiple_of(HUGE_PAGE_BYTES))
    };
    // A kernel that does not align puts each map right below the same neighbour, whose address is often a
    // multiple of a huge page. Lengths that differ by a page then begin at different places of a huge page,
    // so that one of them at most is aligned by chance.
    [0, 1, 2].into_iter().all(|pages| aligned(pages).unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's own setting decides, so the probe must agree with it where it is at an extreme.
    #[test]
    fn the_probe_agrees_with_the_kernel() {
        let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        match setting {
            Ok(text) if text.contains("[never]") || text.contains("[deny]") => {
                assert!(!maps_of_memfd_are_aligned(), "{text}");
            }
            Ok(text) if text.contains("[always]") || text.contains("[force]") => {
                assert!(maps_of_memfd_are_aligned(), "{text}");
            }
            other => crate::skipped(format!("shmem_enabled is {other:?}")),
        }
    }

    #[test]
    fn an_aligned_neighbour_is_not_taken_for_an_aligning_kernel() {
        let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        if !setting.is_ok_and(|text| text.contains("[never]")) {
            return crate::skipped("shmem_enabled is not never: this kernel may align");
        }
        // Whatever gap the kernel uses next, sooner or later it is one below such a mapping.
        let mut neighbours = Vec::new();
        for _ in 0..16 {
            neighbours.push(map::Mapping::anonymous(HUGE_PAGE_BYTES as usize).unwrap());
            assert!(!maps_of_memfd_are_aligned());
        }
    }

    #[test]
    fn auto_always_finds_one_and_says_why() {
        let backing = Backing::choose(Choice::Auto, 4096, 1).unwrap();
        assert!(!backing.reason().is_empty());
        let file = backing.create("iloader:a/b", 5).unwrap();
        assert_eq!(file.writable.metadata().unwrap().len(), 5);
        for name in Choice::NAMES {
            Choice::from_name(name).unwrap();
        }
    }
}
