//! The command that started a daemon, as the daemon sees it: the other end of a pipe.

use std::os::fd::OwnedFd;

use rustix::stdio::{dup2_stdout, stderr, stdout};

use crate::control::frame;
use crate::daemon::config::Boot;
use crate::error::{Error, Result};

/// The longest [`Boot`]: an error with its hint. A pipe takes so much at once.
pub const BOOT_BYTES_MAX: usize = 32 << 10;

/// Whoever started this daemon, and hears until the cache is ready what becomes of it. A failure is told here besides
/// to those who wait: the starter need not have connected yet when the load fails.
#[derive(Debug)]
pub struct Starter {
    pipe: OwnedFd,
}

impl Starter {
    /// The starter behind standard output, which becomes the log: the pipe closes with this.
    pub fn on_stdout() -> Result<Starter> {
        let failed = |errno: rustix::io::Errno| {
            Error::os("keep the pipe to the command that starts the daemon", &errno.into())
        };
        let pipe = rustix::io::fcntl_dupfd_cloexec(stdout(), 3).map_err(failed)?;
        // A starter that was stopped must not stop the daemon.
        rustix::io::ioctl_fionbio(&pipe, true).map_err(failed)?;
        dup2_stdout(stderr()).map_err(failed)?;
        Ok(Starter { pipe })
    }

    /// Tells it. An error where it has gone.
    pub fn tell(&self, message: &Boot) -> Result<()> {
        let frame = frame::encode(message, BOOT_BYTES_MAX)?;
        // A pipe's buffer takes it whole: it is shorter, and next to nothing was written before.
        match rustix::io::write(&self.pipe, &frame) {
            Ok(_) => Ok(()),
            Err(errno) => Err(Error::os("tell the starting command of the daemon", &errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::frame::Decoder;
    use crate::error::Kind;

    #[test]
    fn a_starter_reads_one_message_after_the_other_and_then_the_end() {
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        let starter = Starter { pipe: writer.into() };
        let said = [
            Boot::Registered {},
            Boot::Failed((&Error::new(Kind::NoRoom, "é".repeat(4000)).hint("make some")).into()),
        ];
        // Both at once: neither may be lost with the other.
        said.iter().for_each(|message| starter.tell(message).expect("told"));
        drop(starter);
        let mut decoder = Decoder::new(BOOT_BYTES_MAX);
        for message in said {
            let frame = frame::read(&mut reader, &mut decoder, None).expect("read").expect("a message");
            assert_eq!(Boot::from_json(&frame).expect("read"), message);
        }
        assert!(frame::read(&mut reader, &mut decoder, None).expect("read").is_none());
    }

    #[test]
    fn a_starter_that_has_gone_is_told_nothing() {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let starter = Starter { pipe: writer.into() };
        assert!(starter.tell(&Boot::Registered {}).is_err());
    }
}
