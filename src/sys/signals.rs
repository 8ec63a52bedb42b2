//! Signals as data: blocked, and read from a descriptor; and the dispositions that a new daemon starts with.

use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// The highest signal number of Linux (`_NSIG` on everything but mips, where more exist and none is ours).
const SIGNAL_MAX: i32 = 64;

/// Signals that are delivered as data on a descriptor instead of interrupting this thread.
///
/// They are blocked in the thread that made this and in every thread it starts afterwards, for as long as
/// this lives: make it before other threads, or one of those takes the signal. Dropping it puts the mask
/// back; a signal that arrived and was not read then acts as it would have.
#[derive(Debug)]
pub struct SignalDescriptor {
    file: File,
    mask_before: libc::sigset_t,
}

impl SignalDescriptor {
    /// Blocks `signals` (numbers such as `libc::SIGTERM`) and opens the descriptor, non-blocking.
    pub fn new(signals: &[i32]) -> io::Result<SignalDescriptor> {
        let set = set_of(signals);
        let mask_before = change_mask(libc::SIG_BLOCK, &set)?;
        // SAFETY: -1 asks for a new descriptor; `set` is an initialised set that the call only reads.
        let descriptor =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if descriptor < 0 {
            let error = io::Error::last_os_error();
            change_mask(libc::SIG_SETMASK, &mask_before)?;
            return Err(error);
        }
        // SAFETY: the kernel just made this descriptor for us, and nothing else knows its number.
        let owned = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Ok(SignalDescriptor { file: File::from(owned), mask_before })
    }

    /// The next signal that arrived, or `None` where none is pending.
    pub fn read(&mut self) -> io::Result<Option<i32>> {
        let mut record = [0u8; size_of::<libc::signalfd_siginfo>()];
        loop {
            match self.file.read(&mut record) {
                // The signal's number is the record's first field, an unsigned 32-bit integer.
                Ok(length) if length == record.len() => {
                    let number = u32::from_ne_bytes([record[0], record[1], record[2], record[3]]);
                    return Ok(i32::try_from(number).ok());
                }
                Ok(_) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for SignalDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SignalDescriptor {
    fn drop(&mut self) {
        // The only failure is an invalid `how`, which this is not.
        let _ = change_mask(libc::SIG_SETMASK, &self.mask_before);
    }
}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the whole set, after which it may be read and added to.
    // `sigaddset` refuses a number that is no signal and then leaves the set alone.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), *signal);
        }
        set.assume_init()
    }
}

fn change_mask(how: i32, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    let mut before = MaybeUninit::uninit();
    // SAFETY: `set` is initialised and only read; on success the call has filled `before`, and on failure
    // it is not looked at.
    unsafe {
        match libc::pthread_sigmask(how, set, before.as_mut_ptr()) {
            0 => Ok(before.assume_init()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Whether `signal` is ignored in this process, as `nohup` and `&` in a script do it for their children.
pub fn is_ignored(signal: i32) -> bool {
    let mut present = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: with a null new action the call only writes the present one into `present`. All zeroes is a
    // valid `sigaction` too (integers and an optional pointer), so it may be read whatever the outcome.
    let present = unsafe {
        libc::sigaction(signal, ptr::null(), present.as_mut_ptr());
        present.assume_init()
    };
    present.sa_sigaction == libc::SIG_IGN
}

/// Ignores `signal` in this process.
pub fn ignore(signal: i32) {
    set_disposition(signal, libc::SIG_IGN);
}

/// Gives `signal` its default effect in this process.
pub fn restore(signal: i32) {
    set_disposition(signal, libc::SIG_DFL);
}

/// Ends this process by `signal`, as its default does. Returns where that is impossible: as process 1 of a PID
/// namespace, which is not ended by what it sends itself, or for a signal that ends nobody.
pub fn end_by(signal: i32) {
    restore(signal);
    let _ = change_mask(libc::SIG_UNBLOCK, &set_of(&[signal]));
    if let (Some(this), Some(signal)) = (
        rustix::process::Pid::from_raw(std::process::id() as i32),
        rustix::process::Signal::from_named_raw(signal),
    ) {
        // Delivered before the call returns where it is delivered at all.
        let _ = rustix::process::kill_process(this, signal);
    }
}

/// Puts every signal that is ignored back to its default, and unblocks all in this thread.
///
/// What the caller of a daemon ignored or blocked is its own affair and must not follow the daemon. An exec
/// keeps nothing else of a caller's dispositions; handlers are this program's own, and stay.
pub fn reset_all() -> io::Result<()> {
    for signal in (1..=SIGNAL_MAX).filter(|signal| is_ignored(*signal)) {
        set_disposition(signal, libc::SIG_DFL);
    }
    change_mask(libc::SIG_SETMASK, &set_of(&[])).map(drop)
}

/// Sets `signal` to `SIG_DFL` or `SIG_IGN`; gives back what it was, or `SIG_ERR` where it cannot be set.
pub(super) fn set_disposition(signal: i32, handler: libc::sighandler_t) -> libc::sighandler_t {
    assert!(handler == libc::SIG_DFL || handler == libc::SIG_IGN);
    // SAFETY: neither value is a function, so no code of ours can run in a signal's context. SIGKILL,
    // SIGSTOP and the numbers that the C library keeps for itself are refused with an error and unharmed.
    unsafe { libc::signal(signal, handler) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_signal_is_read_as_data() {
        // Everything happens in one thread of its own: the mask belongs to the thread.
        std::thread::spawn(|| {
            let mut signals = SignalDescriptor::new(&[libc::SIGWINCH]).expect("a descriptor");
            assert_eq!(signals.read().expect("readable"), None);
            // SAFETY: sends a signal to this thread alone, where it is blocked.
            unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGWINCH) };
            assert_eq!(signals.read().expect("readable"), Some(libc::SIGWINCH));
            assert_eq!(signals.read().expect("readable"), None);
            drop(signals);
            let mask = change_mask(libc::SIG_BLOCK, &set_of(&[])).expect("a mask");
            // SAFETY: `mask` is an initialised set.
            assert_eq!(unsafe { libc::sigismember(&raw const mask, libc::SIGWINCH) }, 0);
        })
        .join()
        .expect("no assertion failed");
    }

    #[test]
    fn ignored_is_told_from_default() {
        assert!(!is_ignored(libc::SIGURG));
        ignore(libc::SIGURG);
        assert!(is_ignored(libc::SIGURG));
        set_disposition(libc::SIGURG, libc::SIG_DFL);
        assert!(!is_ignored(libc::SIGURG));
    }
}
