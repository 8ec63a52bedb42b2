//! Standing back behind others: the priority of a thread's I/O, and whose session it is.

use std::io;

/// `IOPRIO_WHO_PROCESS`; with 0 for the calling thread.
const WHO_THREAD: libc::c_int = 1;

/// `IOPRIO_CLASS_IDLE`, in the bits that the kernel's `ioprio.h` puts the class in.
const CLASS_IDLE: libc::c_int = 3 << 13;

/// Has the storage serve the calling thread, and those that it starts from now on, only when nobody else wants
/// it. It counts for reads through io_uring too: the kernel takes the priority of the thread that submits them.
/// Any user may ask for it. What comes of it depends on the device's I/O scheduler.
pub fn make_io_idle() -> io::Result<()> {
    // SAFETY: the call takes three integers, and changes nothing but a number of the calling thread.
    let result = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_THREAD, 0, CLASS_IDLE) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether this process leads its session, and so began it.
///
/// The leader has no number where it lives outside of this PID namespace, as with the first process of a
/// container: then getsid says 0, which a `Pid` of rustix can't hold.
pub fn leads_its_session() -> bool {
    // SAFETY: both calls take and give plain integers.
    unsafe { libc::getsid(0) == libc::getpid() }
}
