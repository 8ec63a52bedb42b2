//! Does a view lead this very process to the segments that its daemon holds? If not, why not?
//!
//! A reader whose access is refused does not say so: engines see a missing file and report a model they
//! cannot recognise, and a recycled pid opens another process's file. So `run` opens every link before
//! it becomes its command, with the rights the command will have, and compares what it gets.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::process::Pid;

use crate::control::client::Client;
use crate::control::message::{Leased, Link, Operation, Reply, State, Status};
use crate::error::{Error, Kind, Result, reason, shown};
use crate::manifest::{FileEntry, Manifest};
use crate::source::Identity;
use crate::sys::memfd::SEALS;
use crate::view;

/// The way out of a view that is not what it was.
const RESTART: &str = "stop the cache and start it again";

/// The mode of every segment.
const SEGMENT_MODE: u32 = 0o444;

/// The process at the other end of a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Daemon {
    /// Its pid as this process counts them; `None` where it runs in a PID namespace out of sight.
    pub(crate) pid: Option<Pid>,
    /// Its user, as this process's user namespace numbers it.
    pub(crate) user: u32,
}

impl Daemon {
    /// Who answers on `connection`, as the kernel noted it when the daemon began to listen.
    pub(crate) fn of(connection: BorrowedFd<'_>) -> Result<Daemon> {
        let peer = crate::sys::peer::credentials(connection)
            .map_err(|cause| Error::os("see who answers on the socket", &cause))?;
        Ok(Daemon { pid: Pid::from_raw(peer.pid), user: peer.uid })
    }
}

/// Opens every link of the view and compares it with what the daemon holds.
pub(crate) fn check(leased: &Leased, daemon: Daemon) -> Result<()> {
    let view = Path::new(&leased.view);
    let directory = open_view(view)
        .map_err(|errno| Error::io("open the view", view, &errno.into()).hint("start the cache again"))?;
    for link in &leased.links {
        if let Err(fault) = check_link(directory.as_fd(), link, &leased.backing) {
            return Err(explain(&directory, view, link, fault, daemon));
        }
    }
    Ok(())
}

/// What is wrong with one link, to stand after "it".
enum Fault {
    /// It can't be opened or looked at.
    Refused(Errno),
    /// It leads to something else than the segment.
    Another(String),
    /// It leads to the segment, but anybody could change that.
    Mutable(&'static str),
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Refused(errno) => write!(formatter, "can't be opened: {}", reason(&(*errno).into())),
            Fault::Another(what) => write!(formatter, "leads to {what}"),
            Fault::Mutable(why) => formatter.write_str(why),
        }
    }
}

/// The regular file behind a link of the view, which has `bytes` bytes.
struct Found {
    file: OwnedFd,
    stat: Stat,
}

impl Found {
    /// Opens it, not blocking and without a terminal to gain: a recycled pid may have put anything there.
    fn behind(view: BorrowedFd<'_>, path: &str, bytes: u64) -> std::result::Result<Found, Fault> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(view, path, flags, Mode::empty()).map_err(Fault::Refused)?;
        let stat = rustix::fs::fstat(&file).map_err(Fault::Refused)?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(Fault::Another("something that is not a regular file".to_owned()));
        }
        if stat.st_size.try_into() != Ok(bytes) {
            return Err(Fault::Another(format!(
                "a file of another size, {} B instead of {bytes}",
                stat.st_size
            )));
        }
        Ok(Found { file, stat })
    }

    /// It is the segment itself.
    fn is_segment(&self, link: &Link) -> std::result::Result<(), Fault> {
        match (self.stat.st_dev, self.stat.st_ino) == (link.device, link.inode) {
            true => Ok(()),
            false => Err(Fault::Another("another file".to_owned())),
        }
    }

    /// The proof that fits the backing: four seals on a memfd, a read-only mount under a tmpfs file.
    fn is_immutable(&self, backing: &str) -> std::result::Result<(), Fault> {
        if backing == "tmpfs" {
            let mount = rustix::fs::fstatvfs(&self.file).map_err(Fault::Refused)?;
            let read_only = mount.f_flag.contains(StatVfsMountFlags::RDONLY);
            return if read_only { Ok(()) } else { Err(Fault::Mutable("its mount is not read-only")) };
        }
        match rustix::fs::fcntl_get_seals(&self.file) {
            Ok(seals) if seals.contains(SEALS) => Ok(()),
            Ok(_) => Err(Fault::Mutable("seals are missing")),
            Err(_) => Err(Fault::Another("a file that is not a memfd".to_owned())),
        }
    }

    /// Mode and time, which seals don't cover, are still those of the segment of `entry`.
    fn is_untouched(&self, entry: &FileEntry) -> std::result::Result<(), String> {
        let mode = self.stat.st_mode & 0o7777;
        if mode != SEGMENT_MODE {
            return Err(format!("its mode is {mode:04o} instead of {SEGMENT_MODE:04o}: somebody changed it"));
        }
        match Identity::of_entry(entry).is_some_and(|noted| !has_time_of(&self.stat, &noted)) {
            true => Err("its modification time was changed".to_owned()),
            false => Ok(()),
        }
    }
}

fn check_link(view: BorrowedFd<'_>, link: &Link, backing: &str) -> std::result::Result<(), Fault> {
    let found = Found::behind(view, &link.path, link.bytes)?;
    found.is_segment(link)?;
    found.is_immutable(backing)
}

fn open_view(view: &Path) -> std::result::Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(view, flags, Mode::empty())
}

/// Whether the view of a cache whose daemon answers on `client` is still whole, where it is ready: it is only a
/// directory, and can be removed.
///
/// # Errors
///
/// [`Kind::Failed`] names the first file that is missing or not immutable.
pub(crate) fn check_published(client: &mut Client, status: &Status) -> Result<()> {
    if status.state != State::Ready {
        return Ok(());
    }
    match client.request(Operation::Manifest {})? {
        Reply::Manifest(manifest) => check_whole(Path::new(&status.view), &manifest, &status.backing),
        _ => Err(Error::new(Kind::Failed, "the daemon answered out of turn")),
    }
}

fn check_whole(view: &Path, manifest: &Manifest, backing: &str) -> Result<()> {
    let broken = |what: String| {
        Error::new(Kind::Failed, format!("the view {} is not whole any more: {what}", shown(view)))
            .hint(format!("stop the cache and start it again: iloader stop {}", manifest.name))
    };
    let directory = open_view(view).map_err(|errno| match lacks_descriptors(errno) {
        true => Error::io("open the view", view, &errno.into()),
        false => broken(reason(&errno.into())),
    })?;
    for entry in manifest.files.iter().filter(|entry| !entry.passthrough) {
        let found = Found::behind(directory.as_fd(), &entry.path, entry.bytes);
        match found.and_then(|found| found.is_immutable(backing)) {
            Ok(()) => {}
            // That is this process's own fault, and says nothing of the view.
            Err(Fault::Refused(errno)) if lacks_descriptors(errno) => {
                return Err(Error::io("open", &view.join(&entry.path), &errno.into()));
            }
            Err(fault) => return Err(broken(format!("{} {fault}", shown(&entry.path)))),
        }
    }
    Ok(())
}

fn lacks_descriptors(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE)
}

/// What is wrong with the view of a ready cache, one line for each fault; empty: it is whole. At most
/// `lines_max` lines, the last of which then counts the rest.
///
/// Seals don't cover metadata: the cache's own user can `chmod` and `touch` a memfd through its link, and
/// can move the links. So mode, size and time are compared too, besides what [`check`] looks at.
///
/// `seen` is shown each file that is whole, while it is open.
pub(crate) fn faults(
    view: &Path,
    manifest: &Manifest,
    backing: &str,
    lines_max: usize,
    seen: &mut dyn FnMut(OwnedFd, &Stat),
) -> Vec<String> {
    let directory = match open_view(view) {
        Ok(directory) => directory,
        Err(errno) => return vec![format!("{} can't be opened: {}", shown(view), reason(&errno.into()))],
    };
    let mut lines = Vec::new();
    let mut faulty = 0;
    for entry in manifest.files.iter().filter(|entry| !entry.passthrough) {
        let fault = match check_entry(directory.as_fd(), entry, backing) {
            Ok(found) => {
                seen(found.file, &found.stat);
                continue;
            }
            Err(fault) => fault,
        };
        faulty += 1;
        if lines.len() < lines_max {
            lines.push(format!("{}: {fault}", shown(&entry.path)));
        }
    }
    if faulty > lines.len() {
        let kept = lines_max.saturating_sub(1);
        lines.truncate(kept);
        lines.push(format!("and {} more", faulty - kept));
    }
    lines
}

fn check_entry(view: BorrowedFd<'_>, entry: &FileEntry, backing: &str) -> std::result::Result<Found, String> {
    let found = Found::behind(view, &entry.path, entry.bytes).map_err(|fault| fault.to_string())?;
    found.is_untouched(entry)?;
    found.is_immutable(backing).map_err(|fault| fault.to_string())?;
    Ok(found)
}

/// Whether a segment carries the time of its source.
fn has_time_of(stat: &Stat, noted: &Identity) -> bool {
    stat.st_mtime == noted.mtime_seconds
        && i64::try_from(stat.st_mtime_nsec) == Ok(i64::from(noted.mtime_nanoseconds))
}

/// The error for `fault`: the true reason, found by looking at this process and the daemon.
fn explain(directory: &OwnedFd, view: &Path, link: &Link, fault: Fault, daemon: Daemon) -> Error {
    let file = view.join(&link.path);
    let target = rustix::fs::readlinkat(directory, &link.path, Vec::new());
    let holder = target.ok().and_then(|target| linked_process(target.to_bytes()));
    if let Some(error) = out_of_sight(&file, holder, daemon) {
        return error;
    }
    let replaced = |what: &str| {
        Error::new(
            Kind::Failed,
            format!("{} leads to {what}: the view was replaced or damaged", shown(&file)),
        )
        .hint(RESTART)
    };
    match fault {
        Fault::Another(what) => replaced(&what),
        Fault::Mutable(why) => {
            Error::new(Kind::Verification, format!("{} is not immutable: {why}", shown(&file))).hint(RESTART)
        }
        Fault::Refused(Errno::ACCESS | Errno::PERM) => refused(&file, daemon),
        Fault::Refused(Errno::NOENT) if missing(directory, &link.path) => Error::new(
            Kind::Failed,
            format!("{} is missing: the view was replaced or withdrawn", shown(&file)),
        )
        .hint(RESTART),
        Fault::Refused(Errno::NOENT) => replaced("a descriptor that its daemon does not have"),
        Fault::Refused(errno) => Error::io("open", &file, &errno.into()),
    }
}

fn missing(directory: &OwnedFd, path: &str) -> bool {
    rustix::fs::statat(directory, path, AtFlags::SYMLINK_NOFOLLOW).is_err()
}

/// The process whose descriptor a link of a view leads to.
fn linked_process(target: &[u8]) -> Option<Pid> {
    Pid::from_raw(view::process_of(target)?.try_into().ok()?)
}

/// The reasons that don't depend on rights: the daemon is in another PID namespace, or gone, or the link
/// is not its own. `holder` is the process that the link names.
fn out_of_sight(file: &Path, holder: Option<Pid>, daemon: Daemon) -> Option<Error> {
    let elsewhere = || {
        let what = format!("cannot read {}: the daemon runs in another PID namespace", shown(file));
        Error::new(Kind::Failed, what).hint(
            "run the command where the cache was started, or share the PID namespace (--pid=host, \
             --pid=container:NAME)",
        )
    };
    let Some(pid) = daemon.pid else { return Some(elsewhere()) };
    if rustix::process::test_kill_process(pid) == Err(Errno::SRCH) {
        let what = format!("cannot read {}: its daemon (pid {pid}) has ended", shown(file));
        return Some(Error::new(Kind::Failed, what).hint("start the cache again"));
    }
    let holder = holder.filter(|holder| *holder != pid)?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    if innermost_pid(&status) == Some(holder) {
        return Some(elsewhere());
    }
    let what = format!("{} leads to process {holder}, and the daemon is process {pid}", shown(file));
    Some(Error::new(Kind::Failed, format!("{what}: the view was replaced")).hint(RESTART))
}

/// Why the kernel refuses to follow a link into the daemon's descriptors: the checks of `ptrace(2)`, in
/// the order in which they are the likelier cause.
fn refused(file: &Path, daemon: Daemon) -> Error {
    let (reason, hint) = refusal(daemon);
    Error::new(Kind::Failed, format!("cannot read {}: {reason}", shown(file))).hint(hint)
}

fn refusal(daemon: Daemon) -> (String, &'static str) {
    let process = |leaf: &str| match daemon.pid {
        Some(pid) => PathBuf::from(format!("/proc/{pid}/{leaf}")),
        None => PathBuf::from("/proc/none"),
    };
    if other_user_namespace(&process("ns/user"), &process("uid_map")) {
        return (
            "this process is in another user namespace than the daemon (a rootless container?)".to_owned(),
            "start the cache in the same container or namespace as the command",
        );
    }
    let user = rustix::process::geteuid().as_raw();
    if user != daemon.user {
        return (
            format!("this process runs as user {user}, the daemon as user {}", daemon.user),
            "run the command as the user that started the cache",
        );
    }
    let group = rustix::process::getegid().as_raw();
    let status = std::fs::read_to_string(process("status")).unwrap_or_default();
    if let Some(other) = effective_group(&status).filter(|other| *other != group) {
        return (
            format!("this process has primary group {group}, the daemon group {other}"),
            "run the command with the primary group that the cache was started with (newgrp, setpriv --regid)",
        );
    }
    // The kernel's rule compares what the daemon may have with what the reader uses now.
    let own = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let lacking = match (capabilities(&status, "CapPrm:"), capabilities(&own, "CapEff:")) {
        (Some(needed), Some(held)) => needed & !held,
        _ => 0,
    };
    if lacking != 0 {
        return (
            format!("the daemon holds capabilities that this process lacks ({lacking:#x})"),
            "start the cache inside the same container or with the same privileges as the command",
        );
    }
    (
        "the kernel refuses access to the daemon's descriptors, though user, group and capabilities match"
            .to_owned(),
        "a security module (AppArmor, SELinux, a seccomp profile) may forbid it: see its log",
    )
}

/// Whether the process of these two files is in another user namespace than this one. The link says it
/// outright, but may be read only by those who could follow the view too; the map may be read by all.
fn other_user_namespace(link: &Path, map: &Path) -> bool {
    if let (Ok(own), Ok(other)) = (std::fs::read_link("/proc/self/ns/user"), std::fs::read_link(link)) {
        return own != other;
    }
    match (std::fs::read("/proc/self/uid_map"), std::fs::read(map)) {
        (Ok(own), Ok(other)) => own != other,
        _ => false,
    }
}

/// A process's number in its own PID namespace, the last in `/proc/PID/status`.
fn innermost_pid(status: &str) -> Option<Pid> {
    let value = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    Pid::from_raw(value.split_whitespace().last()?.parse().ok()?)
}

/// A mask of `/proc/PID/status`.
fn capabilities(status: &str, field: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(field))?;
    u64::from_str_radix(value.trim(), 16).ok()
}

/// The second of the four groups of `/proc/PID/status`.
fn effective_group(status: &str) -> Option<u32> {
    let value = status.lines().find_map(|line| line.strip_prefix("Gid:"))?;
    value.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    /// A view of one file whose segment this process holds.
    struct Sample {
        directory: tempfile::TempDir,
        segment: OwnedFd,
    }

    impl Sample {
        fn new(seals: SealFlags) -> Sample {
            let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
            let segment = rustix::fs::memfd_create("iloader:test", flags).expect("a memfd");
            rustix::io::write(&segment, b"weights").expect("written");
            rustix::fs::fcntl_add_seals(&segment, seals).expect("sealed");
            let directory = tempfile::tempdir().expect("a directory");
            let sample = Sample { directory, segment };
            sample.link("model.safetensors", std::process::id());
            sample
        }

        fn link(&self, path: &str, pid: u32) {
            let target = format!("/proc/{pid}/fd/{}", self.segment.as_raw_fd());
            symlink(target, self.directory.path().join(path)).expect("linked");
        }

        fn leased(&self) -> Leased {
            let stat = rustix::fs::fstat(&self.segment).expect("stat");
            let link = Link {
                path: "model.safetensors".to_owned(),
                bytes: 7,
                device: stat.st_dev,
                inode: stat.st_ino,
            };
            let view = self.directory.path().to_str().expect("UTF-8").to_owned();
            Leased { view, backing: "memfd".to_owned(), links: vec![link] }
        }
    }

    fn this_process() -> Daemon {
        Daemon { pid: Some(rustix::process::getpid()), user: rustix::process::geteuid().as_raw() }
    }

    fn refusal_of(leased: &Leased, daemon: Daemon) -> String {
        check(leased, daemon).expect_err("refused").message().to_owned()
    }

    #[test]
    fn a_good_view_passes() {
        let sample = Sample::new(SEALS);
        check(&sample.leased(), this_process()).expect("passes");
    }

    #[test]
    fn missing_seals_are_a_failed_verification() {
        for missing in [SealFlags::SEAL, SealFlags::SHRINK, SealFlags::GROW, SealFlags::WRITE] {
            let sample = Sample::new(SEALS.difference(missing));
            let error = check(&sample.leased(), this_process()).expect_err("refused");
            assert_eq!(error.kind(), Kind::Verification, "{missing:?}");
        }
    }

    #[test]
    fn a_link_to_something_else_is_a_replaced_view() {
        let sample = Sample::new(SEALS);
        let mut leased = sample.leased();
        leased.links[0].bytes += 1;
        assert!(refusal_of(&leased, this_process()).contains("another size"));
        let mut leased = sample.leased();
        leased.links[0].inode += 1;
        assert!(refusal_of(&leased, this_process()).contains("another file"));
        leased.links[0].path = "pipe".to_owned();
        let pipe = sample.directory.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RUSR).expect("a pipe");
        assert!(refusal_of(&leased, this_process()).contains("not a regular file"));
        leased.links[0].path = "absent".to_owned();
        assert!(refusal_of(&leased, this_process()).contains("is missing"));
    }

    #[test]
    fn a_daemon_out_of_sight_or_gone_is_said_to_be() {
        let sample = Sample::new(SEALS);
        let mut leased = sample.leased();
        leased.links[0].path = "far".to_owned();
        // Larger than any pid that Linux gives.
        let far = 1 << 22;
        sample.link("far", far);
        assert!(refusal_of(&leased, this_process()).contains(": the view was replaced"));
        let unseen = Daemon { pid: None, ..this_process() };
        assert!(refusal_of(&leased, unseen).contains("another PID namespace"));
        let ended = Daemon { pid: Pid::from_raw(far as i32), ..this_process() };
        assert!(refusal_of(&leased, ended).contains("has ended"));
    }

    #[test]
    fn the_reason_for_a_refusal_is_found_in_this_order() {
        let reason = |daemon| refusal(daemon).0;
        let other_user = Daemon { user: u32::MAX - 1, ..this_process() };
        assert!(reason(other_user).contains("the daemon as user 4294967294"));
        assert!(reason(this_process()).contains("user, group and capabilities match"));
    }

    #[test]
    fn the_fields_of_a_status_file_are_read() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nCapPrm:\t00000000a80425fb\nCapEff:\t0\n";
        assert_eq!(effective_group(status), Some(6));
        assert_eq!(capabilities(status, "CapPrm:"), Some(0xa804_25fb));
        assert_eq!(capabilities(status, "CapBnd:"), None);
        assert_eq!(innermost_pid("NSpid:\t5000\t17\n"), Pid::from_raw(17));
        assert_eq!(innermost_pid(status), None);
        assert_eq!(linked_process(b"/proc/17/fd/2000"), Pid::from_raw(17));
        assert_eq!(linked_process(b"/proc/self/fd/2"), None);
        assert_eq!(linked_process(b"/models/a"), None);
    }
}
