//! Who is at the other end of a Unix socket, and which inherited descriptors stay open.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// `SO_PEERPIDFD` (Linux 6.5), which the libc crate does not name. The number is the same on x86-64 and
/// arm64, the machines that this program runs on.
const SO_PEERPIDFD: i32 = 77;

/// The process that connected a Unix socket (or listens on it), as it was at that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its process, or 0 where it lives in a PID namespace that this process can't see.
    pub pid: i32,
    /// Its effective user.
    pub uid: u32,
}

/// Asks the kernel who is at the other end of `socket`.
///
/// Not rustix's `socket_peercred`: its `Pid` can't be zero, which is what a peer outside our PID namespace has.
pub fn credentials(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let found: libc::ucred = option(socket, libc::SO_PEERCRED)?;
    Ok(Peer { pid: found.pid, uid: found.uid })
}

/// Whether `uid`, as this process sees it, is its own user.
///
/// In a user namespace that knows few users, all the others are shown as one: the overflow user, 65534. Where
/// this process is shown as that user too, the number says nothing, and nobody is the same.
pub fn is_same_user(uid: u32) -> bool {
    let maps = || std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    uid == rustix::process::geteuid().as_raw() && (uid != OVERFLOW_UID || knows_every_user(&maps()))
}

/// The user that the kernel shows for those that a user namespace does not know, unless root set another.
const OVERFLOW_UID: u32 = 65534;

/// Whether a `uid_map` has a number for every user, so that none is shown as another.
fn knows_every_user(map: &str) -> bool {
    let lengths = map.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok());
    lengths.sum::<u64>() >= u64::from(u32::MAX)
}

/// A pidfd of the process at the other end, without a race: the kernel kept the process, not its number.
/// `ENOPROTOOPT` before Linux 6.5; `ESRCH`, `ENODATA` or `EINVAL` where it has ended.
pub fn pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let descriptor: RawFd = option(socket, SO_PEERPIDFD)?;
    if descriptor < 0 {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    // SAFETY: the kernel made this descriptor for this call (close-on-exec), and nothing else knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Types that any bytes from the kernel make a valid value of.
trait PlainOption: Copy {}
impl PlainOption for libc::ucred {}
impl PlainOption for RawFd {}

fn option<T: PlainOption>(socket: BorrowedFd<'_>, name: i32) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` has room for `length` bytes, and the kernel writes no more than `length`. It began as
    // zeroes and `T` is made of integers, so it is a valid value however many bytes were written.
    let value = unsafe {
        let result = libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            value.as_mut_ptr().cast(),
            &raw mut length,
        );
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        value.assume_init()
    };
    if length as usize == size_of::<T>() {
        Ok(value)
    } else {
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }
}

/// Set by the first [`keep_only`] of this process.
static KEPT: AtomicBool = AtomicBool::new(false);

/// Takes ownership of the descriptor `number`, which the program that executed this one left open for it,
/// and closes every other one from 3 up: a daemon keeps no lock, pipe or socket of its caller.
///
/// For the first moments of `main` only, before anything of this program owns a descriptor. Refused with
/// `EBADF` where `number` is a standard stream's or not open. It becomes close-on-exec.
pub fn keep_only(number: RawFd) -> io::Result<OwnedFd> {
    const FIRST: RawFd = 3;
    assert!(!KEPT.swap(true, Ordering::Relaxed), "a second owner would close the first one's descriptor");
    // SAFETY: F_SETFD takes an integer, and a number that is not open gives EBADF.
    if number < FIRST || unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: it is open, as just seen, and was inherited through exec: nothing in this process owns it,
    // because this runs once, and before the program opens anything.
    let kept = unsafe { OwnedFd::from_raw_fd(number) };
    if close_span(FIRST, number - 1).and_then(|()| close_span(number.saturating_add(1), RawFd::MAX)).is_ok() {
        return Ok(kept);
    }
    // Before Linux 5.9 there is no close_range. The listing's own descriptor is among the numbers and
    // closed when the listing ends, so the numbers are collected first.
    let listed: Vec<RawFd> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for descriptor in listed.into_iter().filter(|listed| *listed >= FIRST && *listed != number) {
        // SAFETY: as in `close_span`; a number that is not open (the listing's own) gives EBADF.
        unsafe { libc::close(descriptor) };
    }
    Ok(kept)
}

fn close_span(first: RawFd, last: RawFd) -> io::Result<()> {
    if first > last {
        return Ok(());
    }
    // SAFETY: closes descriptors that this program inherited and never wrapped in an owner: `keep_only`
    // runs once and before anything is opened, and leaves the one that it does own out of both spans.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_peer_of_a_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().expect("a pair");
        let peer = credentials(one.as_fd()).expect("credentials");
        assert_eq!(peer.pid, std::process::id() as i32);
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        assert!(!is_same_user(peer.uid + 1));
    }

    #[test]
    fn a_namespace_of_few_users_is_told_from_that_of_all() {
        assert!(knows_every_user("         0          0 4294967295\n"));
        assert!(knows_every_user("0 0 1000\n1000 1000 4294966295\n"));
        assert!(!knows_every_user("      1000       1000          1\n"));
        assert!(!knows_every_user(""));
        assert!(!knows_every_user("no numbers here\n"));
    }
}
