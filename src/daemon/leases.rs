//! Leases: who claims the cache, and when a claim ends.
//!
//! A lease is a connection and the process that made it. It ends when both are gone: the process may
//! close the connection without knowing (an engine that closes every descriptor it did not open), and it
//! may leave the connection to its children.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{ClockId, clock_gettime};

use crate::control::message::LeaseInfo;
use crate::readers::{HOLDER_GONE, OUT_OF_SIGHT, command_of};
use crate::sys::peer::{self, Peer};

/// Which connection a lease came on. Never used twice in the life of a daemon.
pub type ConnectionId = u64;

/// The most leases at one time.
pub const LEASES_MAX: usize = 1024;

/// Descriptors of the daemon that a lease takes: its connection, and its process.
pub const DESCRIPTORS_PER_LEASE: usize = 2;

/// The process behind a connection, kept so that its number can't come to mean another one.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    /// `None` where the process can't be watched: it lives in a PID namespace that this one can't see,
    /// has ended already, or the kernel has no pidfds. The connection alone then carries the lease.
    descriptor: Option<OwnedFd>,
}

impl Process {
    /// The process that connected `socket`, which was accepted `accepted` after boot (see [`since_boot`]).
    pub fn behind(socket: BorrowedFd<'_>, peer: Peer, accepted: Duration) -> Process {
        let descriptor = peer::pidfd(socket).or_else(|_| open_by_number(peer.pid, accepted)).ok();
        Process { pid: peer.pid, descriptor }
    }

    /// A descriptor that becomes readable when the process ends.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(OwnedFd::as_fd)
    }
}

/// Before Linux 6.5: by its number, which may have come to mean another process since it connected. A
/// process that began after its connection was accepted is such a one.
fn open_by_number(pid: i32, accepted: Duration) -> io::Result<OwnedFd> {
    let gone = || io::Error::from_raw_os_error(libc::ESRCH);
    let pid = Pid::from_raw(pid).ok_or_else(gone)?;
    let descriptor = pidfd_open(pid, PidfdFlags::empty())?;
    // The descriptor holds whichever process it is, so the number can't change its meaning any more
    // unless that one ends meanwhile, and then the reading below finds nothing or a younger one.
    let began = began_after_boot(pid).ok_or_else(gone)?;
    if began <= accepted { Ok(descriptor) } else { Err(gone()) }
}

/// When a process began, after boot. Field 22 of its `stat`, counted behind the name in parentheses.
fn began_after_boot(pid: Pid) -> Option<Duration> {
    let stat = std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    let end_of_name = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(&stat[end_of_name + 1..]).ok()?;
    let ticks: u64 = fields.split_ascii_whitespace().nth(22 - 3)?.parse().ok()?;
    let milliseconds = ticks.checked_mul(1000)? / rustix::param::clock_ticks_per_second().max(1);
    Some(Duration::from_millis(milliseconds))
}

/// The present time on the clock that processes' beginnings are told by.
pub fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// The live leases.
#[derive(Debug, Default)]
pub struct Leases {
    live: BTreeMap<ConnectionId, Lease>,
}

#[derive(Debug)]
struct Lease {
    process: Process,
    is_connected: bool,
}

impl Lease {
    fn is_live(&self) -> bool {
        self.is_connected || self.process.descriptor.is_some()
    }
}

impl Leases {
    /// Notes a lease of `process` on `connection`.
    pub fn take(&mut self, connection: ConnectionId, process: Process) {
        self.live.insert(connection, Lease { process, is_connected: true });
    }

    /// Whether `connection` carries a live lease.
    pub fn contains(&self, connection: ConnectionId) -> bool {
        self.live.contains_key(&connection)
    }

    /// The connection is closed. Gives the process whose lease ended with it.
    pub fn connection_closed(&mut self, connection: ConnectionId) -> Option<i32> {
        self.live.get_mut(&connection)?.is_connected = false;
        self.remove_if_ended(connection)
    }

    /// The process has ended. Gives its number where its lease ended with it.
    pub fn process_ended(&mut self, connection: ConnectionId) -> Option<i32> {
        self.live.get_mut(&connection)?.process.descriptor = None;
        self.remove_if_ended(connection)
    }

    fn remove_if_ended(&mut self, connection: ConnectionId) -> Option<i32> {
        if self.live.get(&connection)?.is_live() {
            return None;
        }
        self.live.remove(&connection).map(|lease| lease.process.pid)
    }

    /// Whether a live lease is one of process `pid`.
    pub fn is_held_by(&self, pid: i32) -> bool {
        self.live.values().any(|lease| lease.process.pid == pid && lease.process.descriptor.is_some())
    }

    /// Whether all processes of live leases have ended, so that it is not known who holds their connections.
    pub fn are_left_over(&self) -> bool {
        self.live.values().all(|lease| lease.process.descriptor.is_none())
    }

    /// Live leases.
    pub fn count(&self) -> usize {
        self.live.len()
    }

    /// Who holds them, with what each process runs at this moment.
    pub fn list(&self) -> Vec<LeaseInfo> {
        self.live
            .values()
            .map(|lease| LeaseInfo {
                pid: lease.process.pid,
                command: match &lease.process {
                    Process { pid: 0, .. } => OUT_OF_SIGHT.to_owned(),
                    Process { pid, descriptor: Some(_) } => command_of(*pid),
                    // Ended, or never to be watched: its command line may be another process's by now.
                    Process { descriptor: None, .. } => HOLDER_GONE.to_owned(),
                },
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(watched: bool) -> Process {
        let descriptor =
            watched.then(|| open_by_number(std::process::id() as i32, since_boot()).expect("ours"));
        Process { pid: 42, descriptor }
    }

    #[test]
    fn a_lease_ends_when_both_connection_and_process_are_gone() {
        for connection_first in [true, false] {
            let mut leases = Leases::default();
            leases.take(7, process(true));
            let (first, second) = if connection_first {
                (leases.connection_closed(7), leases.process_ended(7))
            } else {
                (leases.process_ended(7), leases.connection_closed(7))
            };
            assert_eq!((first, second), (None, Some(42)));
            assert_eq!(leases.count(), 0);
            assert_eq!(leases.connection_closed(7), None);
        }
    }

    #[test]
    fn a_process_that_cannot_be_watched_ends_with_its_connection() {
        let mut leases = Leases::default();
        leases.take(1, process(false));
        assert_eq!(leases.connection_closed(1), Some(42));
    }

    #[test]
    fn a_number_that_was_reused_is_not_the_peer() {
        let ours = std::process::id() as i32;
        assert!(open_by_number(ours, since_boot()).is_ok());
        // Accepted right after boot, long before this process began.
        let error = open_by_number(ours, Duration::ZERO).expect_err("another process of the same number");
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
        assert!(open_by_number(0, since_boot()).is_err());
    }
}
