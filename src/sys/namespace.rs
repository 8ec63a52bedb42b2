//! A private tmpfs on huge pages, mounted without privilege in a namespace that lives for microseconds.
//!
//! A short-lived child makes a user and a mount namespace, mounts the tmpfs there and binds it a second
//! time read-only. It shares our descriptor table, so the two directories it opens are ours as well. When
//! it exits, its namespace goes and both mounts live on in the descriptors alone: nobody can reach them
//! by a path, and nothing has to be cleaned after a crash.

use std::ffi::{CStr, CString, c_int};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Two mounts of one private tmpfs.
#[derive(Debug)]
pub struct PrivateTmpfs {
    /// Its root on the writable mount: files are made and filled through it.
    pub writable: OwnedFd,
    /// Its root on the mount that was read-only from the start: what is opened through it can never be
    /// changed, nor its mode and times.
    pub read_only: OwnedFd,
}

/// Why a private tmpfs could not be had: which step, and the kernel's answer.
#[derive(Debug)]
pub struct Refused {
    /// What was tried.
    pub step: &'static str,
    /// The answer.
    pub cause: io::Error,
}

/// The child's steps, in order; a report carries the number of the one that failed.
const STEPS: [&str; 9] = [
    "make a process",
    "make a user namespace",
    "map the user into it",
    "make a mount namespace",
    "keep its mounts to itself",
    "mount a tmpfs with huge pages",
    "open it",
    "bind it a second time",
    "make the second mount read-only",
];

/// Where the child mounts, first one that serves: only in its own namespace, so nobody sees it.
const MOUNT_POINTS: [&CStr; 5] = [c"/tmp", c"/run", c"/var", c"/dev", c"/proc"];

/// What the child tells: the failed step (0 when done), its errno, and the two descriptors.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Report {
    step: c_int,
    errno: c_int,
    writable: c_int,
    read_only: c_int,
}

/// Everything that the child needs, made before it exists: it may not allocate.
struct Orders {
    user_map: CString,
    group_map: CString,
    options: CString,
    /// The capability to mount is there already: only a mount namespace is needed.
    privileged: bool,
    report_to: c_int,
}

/// Mounts a tmpfs of at most `bytes` and `files`, huge pages within the size of each file.
pub fn private_tmpfs(bytes: u64, files: u64) -> Result<PrivateTmpfs, Refused> {
    let (from_child, to_parent) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|cause| Refused { step: "make a pipe", cause: cause.into() })?;
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let text = |text: String| CString::new(text).expect("no NUL in numbers");
    let mut orders = Orders {
        user_map: text(format!("{user} {user} 1")),
        group_map: text(format!("{group} {group} 1")),
        options: text(format!("huge=within_size,mode=700,size={bytes},nr_inodes={files}")),
        privileged: has_mount_capability(),
        report_to: to_parent.as_raw_fd(),
    };
    let report = match run_child(&orders, File::from(from_child.try_clone().map_err(pipe_failed)?)) {
        // A container may leave the capability but forbid its use: try what an ordinary user would.
        Ok(report) if report.step != 0 && orders.privileged => {
            orders.privileged = false;
            run_child(&orders, File::from(from_child))
        }
        other => other,
    }?;
    drop(to_parent);
    if report.step != 0 {
        let step = STEPS.get(report.step as usize).copied().unwrap_or("set up a tmpfs");
        return Err(Refused { step, cause: io::Error::from_raw_os_error(report.errno) });
    }
    // SAFETY: the child opened both in the table that it shared with us and left them to us.
    let (writable, read_only) =
        unsafe { (OwnedFd::from_raw_fd(report.writable), OwnedFd::from_raw_fd(report.read_only)) };
    Ok(PrivateTmpfs { writable, read_only })
}

fn pipe_failed(cause: io::Error) -> Refused {
    Refused { step: "make a pipe", cause }
}

/// Whether CAP_SYS_ADMIN is effective.
fn has_mount_capability() -> bool {
    rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::SYS_ADMIN))
}

/// Makes the child, waits for its report and its end.
fn run_child(orders: &Orders, mut reports: File) -> Result<Report, Refused> {
    // SAFETY: a fork that shares the descriptor table. The child runs `child`, which makes raw system
    // calls on memory prepared here and never returns, so that no lock of another thread of ours (the
    // allocator's, say) is ever needed in it. All other arguments are zero: no new stack, no thread
    // pointer, and their order, which differs between architectures, does not matter.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0) };
    if pid < 0 {
        return Err(Refused { step: STEPS[0], cause: io::Error::last_os_error() });
    }
    if pid == 0 {
        child(orders);
    }
    let mut bytes = [0u8; size_of::<Report>()];
    // The pipe's other end stays open here, but the child always writes before it exits; if it is killed
    // instead, waiting for it first would hang nobody: so wait, then read without blocking.
    let mut status = 0;
    loop {
        // SAFETY: waits for our own child and writes its status to a live integer.
        let waited = unsafe { libc::waitpid(pid as libc::pid_t, &raw mut status, 0) };
        if waited >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            break;
        }
    }
    let cause = match rustix::io::ioctl_fionread(&reports) {
        Ok(waiting) if waiting as usize >= bytes.len() => {
            io::Read::read_exact(&mut reports, &mut bytes).err()
        }
        Ok(_) => Some(io::Error::other("the helper process was killed")),
        Err(errno) => Some(errno.into()),
    };
    if let Some(cause) = cause {
        return Err(Refused { step: STEPS[0], cause });
    }
    let field = |index: usize| {
        let at = index * size_of::<c_int>();
        c_int::from_ne_bytes(bytes[at..at + size_of::<c_int>()].try_into().expect("four bytes"))
    };
    Ok(Report { step: field(0), errno: field(1), writable: field(2), read_only: field(3) })
}

/// The child's life: only system calls, no allocation, no return.
fn child(orders: &Orders) -> ! {
    let mut report = Report::default();
    if let Err(step) = child_steps(orders, &mut report) {
        // SAFETY: reads this thread's errno.
        report.errno = unsafe { *libc::__errno_location() };
        report.step = step;
    }
    // SAFETY: writes a plain struct that lives on this stack to the pipe, then ends without running
    // anything that belongs to the parent (`_exit`, no destructors, no flushing).
    unsafe {
        libc::write(orders.report_to, (&raw const report).cast(), size_of::<Report>());
        libc::_exit(0)
    }
}

/// The steps; the number of the one that failed, with errno set.
fn child_steps(orders: &Orders, report: &mut Report) -> Result<(), c_int> {
    let done = |step: c_int, result: c_int| if result < 0 { Err(step) } else { Ok(result) };
    // SAFETY: plain system calls on NUL-terminated strings that live in `orders` or are static.
    unsafe {
        if !orders.privileged {
            done(1, libc::unshare(libc::CLONE_NEWUSER))?;
            // Absent before Linux 3.19, and refused where it is not needed.
            let _ = write_file(c"/proc/self/setgroups", c"deny");
            done(2, write_file(c"/proc/self/uid_map", &orders.user_map))?;
            done(2, write_file(c"/proc/self/gid_map", &orders.group_map))?;
        }
        done(3, libc::unshare(libc::CLONE_NEWNS))?;
        let none = std::ptr::null();
        done(4, libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()))?;
        let safe = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
        let tmpfs = c"tmpfs".as_ptr();
        let point = MOUNT_POINTS
            .into_iter()
            .find(|point| {
                libc::mount(tmpfs, point.as_ptr(), tmpfs, safe, orders.options.as_ptr().cast()) == 0
            })
            .ok_or(5)?
            .as_ptr();
        let directory = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        report.writable = done(6, libc::open(point, directory))?;
        let second = done(7, libc::mount(point, point, none, libc::MS_BIND, none.cast()))
            .and_then(|_| {
                let read_only = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | safe;
                done(8, libc::mount(none, point, none, read_only, none.cast()))
            })
            .and_then(|_| done(6, libc::open(point, directory)));
        match second {
            Ok(descriptor) => report.read_only = descriptor,
            Err(step) => {
                let errno = *libc::__errno_location();
                libc::close(report.writable);
                *libc::__errno_location() = errno;
                return Err(step);
            }
        }
    }
    Ok(())
}

/// Writes `text` to a file of /proc in one call; negative with errno set on failure.
unsafe fn write_file(path: &CStr, text: &CStr) -> c_int {
    // SAFETY: plain system calls on NUL-terminated strings; the descriptor is closed again.
    unsafe {
        let file = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file < 0 {
            return -1;
        }
        let length = text.count_bytes();
        let written = libc::write(file, text.as_ptr().cast(), length);
        let errno = *libc::__errno_location();
        libc::close(file);
        *libc::__errno_location() = errno;
        if written == length as isize { 0 } else { -1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{AtFlags, Mode, OFlags};
    use std::io::Write;

    #[test]
    fn what_is_opened_read_only_can_not_be_changed() {
        let tmpfs = match private_tmpfs(4 << 20, 16) {
            Ok(tmpfs) => tmpfs,
            Err(refused) => return crate::skipped(format!("cannot {}: {}", refused.step, refused.cause)),
        };
        let create = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let writable = rustix::fs::openat(&tmpfs.writable, "a", create, Mode::from(0o444)).unwrap();
        let published =
            rustix::fs::openat(&tmpfs.read_only, "a", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                .unwrap();
        rustix::fs::unlinkat(&tmpfs.writable, "a", AtFlags::empty()).unwrap();
        let mut writable = File::from(writable);
        writable.write_all(b"bytes").unwrap();
        drop(writable);
        drop(tmpfs);
        let path = format!("/proc/self/fd/{}", published.as_raw_fd());
        assert_eq!(std::fs::read(&path).unwrap(), b"bytes");
        let refused = |result: io::Result<()>| result.unwrap_err().raw_os_error();
        let read_only = [Some(libc::EROFS), Some(libc::EACCES)];
        assert!(read_only.contains(&refused(File::options().write(true).open(&path).map(drop))));
        let times = std::fs::FileTimes::new().set_modified(std::time::SystemTime::now());
        let file = File::from(published);
        assert!(read_only.contains(&refused(file.set_times(times))));
        assert_eq!(
            refused(rustix::fs::fchmod(&file, Mode::from(0o600)).map_err(Into::into)),
            Some(libc::EROFS)
        );
        assert!(rustix::fs::fstatvfs(&file).unwrap().f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY));
    }
}
