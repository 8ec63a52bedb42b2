//! Memory files: creation with every protection that the kernel knows, seals, and the proof of both.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use memfd::{FileSeal, Memfd};
use rustix::fs::{MemfdFlags, OFlags, SealFlags};

/// The longest name that the kernel takes.
pub const NAME_BYTES_MAX: usize = 249;

/// The four seals that make a memfd immutable. Kernels set further ones of their own (0x20 for no-exec).
pub const SEALS: SealFlags =
    SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::WRITE);

/// [`SEALS`] in the form of the library that sets them.
const IMMUTABLE: [FileSeal; 4] =
    [FileSeal::SealWrite, FileSeal::SealShrink, FileSeal::SealGrow, FileSeal::SealSeal];

/// Creates an empty memfd that can be sealed and, where the kernel knows how (Linux 6.3), never executed.
pub fn create(name: &str) -> io::Result<File> {
    assert!(name.len() <= NAME_BYTES_MAX);
    let name = CString::new(name.replace('\0', "?")).expect("NUL was replaced");
    let common = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let descriptor = match rustix::fs::memfd_create(&*name, common | MemfdFlags::NOEXEC_SEAL) {
        Err(rustix::io::Errno::INVAL) => rustix::fs::memfd_create(&*name, common)?,
        other => other?,
    };
    Ok(File::from(descriptor))
}

/// Forbids changes of length while the file is filled: nobody can make a mapped page vanish.
pub fn fix_length(file: &File) -> io::Result<()> {
    rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(())
}

/// Adds all four seals. EBUSY while the file is mapped writable, or for a moment after the kernel was
/// still holding its pages for I/O.
pub fn seal(file: File) -> Result<File, (File, io::Error)> {
    let memfd = match Memfd::try_from_file(file) {
        Ok(memfd) => memfd,
        Err(file) => return Err((file, io::Error::from_raw_os_error(libc::EINVAL))),
    };
    match memfd.add_seals(&IMMUTABLE) {
        Ok(()) => Ok(memfd.into_file()),
        Err(memfd::Error::AddSeals(cause)) => Err((memfd.into_file(), cause)),
        Err(other) => Err((memfd.into_file(), io::Error::other(other.to_string()))),
    }
}

/// Whether all four seals are set.
pub fn is_sealed(descriptor: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(descriptor).is_ok_and(|seals| seals.contains(SEALS))
}

/// Opens the same file once more, read-only: a new open file description, unlike `dup`.
pub fn reopen_read_only(file: &File) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, rustix::fs::Mode::empty())?)
}

/// Moves a descriptor to the lowest free number from `lowest` up.
pub fn move_to_or_above(descriptor: OwnedFd, lowest: i32) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(descriptor, lowest)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_sealed_memfd_refuses_every_change() {
        let mut file = create("iloader:test:name").unwrap();
        file.write_all(b"bytes").unwrap();
        fix_length(&file).unwrap();
        assert!(!is_sealed(file.as_fd()));
        assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        let file = seal(file).unwrap();
        assert!(is_sealed(file.as_fd()));
        assert_eq!(file.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        let again = File::from(reopen_read_only(&file).unwrap());
        let moved = File::from(move_to_or_above(again.into(), 700).unwrap());
        assert!(moved.as_raw_fd() >= 700);
        let mut bytes = [0; 5];
        moved.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"bytes");
    }
}
