//! What stands at a view's path, told by its structure alone: engines and `cp -rL` must not meet files
//! that are not the model's, so a view carries no mark.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{self, CWD, FileType};
use rustix::io::Errno;

use super::spot::Spot;
use super::tree::{DEPTH_MAX, for_each_entry, read_link};
use crate::error::{Result, shown};
use crate::registry::dir::{self, Inode};
use crate::sys::process::state_in;

/// How many links are followed to see whether a view lives.
const SAMPLES_MAX: usize = 16;

/// What stands at the path of a view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing.
    Absent,
    /// An empty directory, which a view may replace.
    Empty,
    /// A view whose links lead to a live daemon's segments, or may do: what cannot be told counts as live.
    Live {
        /// The daemon's process.
        pid: u32,
    },
    /// A view of ours whose daemon is gone.
    Dead {
        /// The process that it was.
        pid: u32,
    },
    /// Something else.
    Foreign {
        /// What, to stand after "it".
        what: String,
    },
}

/// Looks at the path of a view, never through a link at the path itself.
///
/// A view is a directory of ours, of nothing but directories and links, one link at least leading to
/// `/proc/<pid>/fd/<n>`, and all such links to one process. It lives while one of its links leads to a
/// segment of ours.
///
/// # Errors
///
/// Where the path cannot be looked at.
pub fn examine(at: &Path) -> Result<Standing> {
    match Spot::find(at)? {
        None => Ok(Standing::Absent),
        Some(spot) => Ok(stand(&spot)?.0),
    }
}

/// The same, with the directory that was looked at.
pub(super) fn stand(spot: &Spot) -> Result<(Standing, Option<Inode>)> {
    let Some(found) = spot.look()? else { return Ok((Standing::Absent, None)) };
    let foreign = |what: String| (Standing::Foreign { what }, None);
    match FileType::from_raw_mode(found.st_mode) {
        FileType::Directory => {}
        FileType::Symlink => return Ok(foreign("is a symbolic link".to_owned())),
        _ => return Ok(foreign("is not a directory".to_owned())),
    }
    let top = match dir::open_directory(spot.parent(), spot.name()) {
        Err(Errno::ACCESS) => return Ok(foreign("cannot be read (EACCES)".to_owned())),
        Err(Errno::NOENT) => return Ok((Standing::Absent, None)),
        opened => opened.map_err(dir::failed("open the directory", spot.path()))?,
    };
    let mut survey = Survey::default();
    survey.enter(&top, "", 0);
    let standing = match (survey.strange, survey.pid) {
        (None, None) if !survey.has_entries => Standing::Empty,
        (Some(what), _) => Standing::Foreign { what },
        (None, None) => Standing::Foreign { what: "holds no link of a view".to_owned() },
        (None, Some(_)) if found.st_uid != dir::our_uid() => {
            Standing::Foreign { what: format!("belongs to uid {}", found.st_uid) }
        }
        (None, Some(pid)) if survey.samples.iter().any(|link| may_be_alive(link, pid)) => {
            Standing::Live { pid }
        }
        (None, Some(pid)) => Standing::Dead { pid },
    };
    Ok((standing, Some(Inode::of(&found))))
}

/// What a walk through a tree has seen. It ends at the first thing that no view has.
#[derive(Default)]
struct Survey {
    has_entries: bool,
    pid: Option<u32>,
    samples: Vec<OsString>,
    strange: Option<String>,
}

impl Survey {
    fn enter(&mut self, directory: &OwnedFd, path: &str, depth: usize) {
        if depth > DEPTH_MAX {
            self.strange = Some(format!("has more than {DEPTH_MAX} levels"));
            return;
        }
        let walked = for_each_entry(directory, |name, kind| {
            self.has_entries = true;
            self.meet(directory, path, name, kind, depth);
            self.strange.is_none()
        });
        if let Err(errno) = walked {
            self.strange = Some(format!("cannot be read: {}", crate::error::reason(&errno.into())));
        }
    }

    fn meet(&mut self, directory: &OwnedFd, path: &str, name: &OsStr, kind: FileType, depth: usize) {
        let path = format!("{path}{}", name.to_string_lossy());
        match kind {
            FileType::Directory => match dir::open_directory(directory, name) {
                Ok(inside) => self.enter(&inside, &format!("{path}/"), depth + 1),
                Err(_) => self.strange = Some(format!("holds {}, which cannot be read", shown(&path))),
            },
            FileType::Symlink => {
                let Some(target) = read_link(directory, name) else { return };
                let Some(pid) = process_of(target.as_bytes()) else { return };
                if self.pid.is_some_and(|other| other != pid) {
                    self.strange = Some("holds links to several processes".to_owned());
                }
                self.pid = Some(pid);
                if self.samples.len() < SAMPLES_MAX {
                    self.samples.push(target);
                }
            }
            _ => self.strange = Some(format!("holds {}, which is no link", shown(&path))),
        }
    }
}

/// The pid of a link to `/proc/<pid>/fd/<n>`; `None` where it leads elsewhere.
pub fn process_of(target: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(target).ok()?;
    let (pid, descriptor) = text.strip_prefix("/proc/")?.split_once("/fd/")?;
    let number = |digits: &str| {
        let is_plain = digits.bytes().all(|b| b.is_ascii_digit()) && !digits.starts_with('0');
        digits.parse::<u32>().ok().filter(|_| is_plain || digits == "0")
    };
    number(descriptor)?;
    number(pid).filter(|pid| *pid != 0)
}

/// Whether the link of a view may lead to a segment of a live daemon.
fn may_be_alive(link: &OsStr, pid: u32) -> bool {
    let target = fs::readlinkat(CWD, link, Vec::new()).map(|target| OsString::from_vec(target.into_bytes()));
    let owner = || {
        let found = fs::stat(format!("/proc/{pid}")).ok()?;
        (!has_ended(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)).then_some(found.st_uid)
    };
    judge(target, owner)
}

/// Whether the process of this `stat` has ended, and only its number is kept until its parent asks for it,
/// which in a container may be never. It has no descriptors, but whoever is not root is refused a look.
fn has_ended(stat: &[u8]) -> bool {
    matches!(state_in(stat), Some(b'Z' | b'X'))
}

/// `target` is what the descriptor leads to, `owner` the user of the process where it lives.
fn judge(target: rustix::io::Result<OsString>, owner: impl FnOnce() -> Option<u32>) -> bool {
    match target {
        Ok(target) => is_segment(target.as_bytes()),
        Err(Errno::NOENT | Errno::SRCH | Errno::NOTDIR) => false,
        // It is hidden from us: the daemon has more capabilities, or we are in another user namespace. But
        // a daemon is always seen as its user's, and so a process of another user has only the pid.
        Err(_) => owner() == Some(dir::our_uid()),
    }
}

/// The names that segments have: a memfd, or a file on the private tmpfs without a name any more.
fn is_segment(target: &[u8]) -> bool {
    target.starts_with(b"/memfd:iloader:")
        || (target.starts_with(b"/iloader:") && target.ends_with(b" (deleted)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_descriptors_are_told_from_others() {
        assert_eq!(process_of(b"/proc/12/fd/3"), Some(12));
        assert_eq!(process_of(b"/proc/12/fd/0"), Some(12));
        for other in [
            "/proc/self/fd/3",
            "/proc/12/fd/",
            "/proc/12/fd/3/x",
            "/proc/12/fd/03",
            "/proc/12/fd/+3",
            "/proc/0/fd/3",
            "/proc//fd/3",
            "/proc/12/exe",
            "proc/12/fd/3",
            "/proc/99999999999/fd/3",
            "../proc/12/fd/3",
        ] {
            assert_eq!(process_of(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn a_process_that_nobody_waited_for_has_ended() {
        let mut child = std::process::Command::new("true").spawn().expect("spawned");
        let stat = format!("/proc/{}/stat", child.id());
        let has_ended = || has_ended(&std::fs::read(&stat).expect("nobody waited for it"));
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !has_ended() {
            assert!(std::time::Instant::now() < deadline, "it never ended");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().expect("waited for");
        assert!(!super::has_ended(&std::fs::read("/proc/self/stat").expect("ours")));
        assert!(super::has_ended(b"12 (a) R (b) Z 1 12"));
        assert!(!super::has_ended(b"12 (a) Z) R 1 12"));
        assert!(!super::has_ended(b""));
    }

    #[test]
    fn only_segments_of_ours_are_alive() {
        let us = Some(dir::our_uid());
        let alive = |target: &str| judge(Ok(target.into()), || us);
        assert!(alive("/memfd:iloader:qwen:model.safetensors (deleted)"));
        assert!(alive("/iloader:qwen:model.safetensors (deleted)"));
        assert!(!alive("/memfd:other (deleted)"));
        assert!(!alive("/iloader:on-disk"));
        assert!(!alive("/dev/null"));
        assert!(!judge(Err(Errno::NOENT), || us));
        assert!(judge(Err(Errno::ACCESS), || us), "what cannot be told counts as live");
        assert!(!judge(Err(Errno::ACCESS), || Some(dir::our_uid() + 1)), "another user's process");
        assert!(!judge(Err(Errno::ACCESS), || None), "it ended in between");
    }
}
