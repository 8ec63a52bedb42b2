//! The one error type: what kind it is, what failed on what and why, and what to do about it.
//!
//! An [`Error`] is written for the person who reads it: one line that names the thing, the numbers and
//! the cause, then a hint with the way out. Its [`Kind`] is what callers branch on, and each kind has
//! one exit code. Errors cross the control socket as kind, message and hint.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::path::Path;

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// The closed list of failures that a caller tells apart. Each is one exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Anything without a kind of its own (exit 1).
    Failed,
    /// The command line or a value in it is wrong (exit 2).
    Usage,
    /// No such cache, file or directory (exit 3).
    NotFound,
    /// The time allowed ran out (exit 4).
    TimedOut,
    /// Leases or readers are live (exit 5).
    InUse,
    /// Not enough memory or disk, or a limit is reached (exit 6).
    NoRoom,
    /// Bytes are not what they must be (exit 7).
    Verification,
    /// The source changed while it was read (exit 8).
    SourceChanged,
    /// Stale, or running with another identity (exit 9).
    Stale,
    /// `run`: the command exists but cannot be executed (exit 126).
    NotExecutable,
    /// `run`: there is no such command (exit 127).
    CommandNotFound,
    /// Cancelled by Ctrl-C (exit 130).
    Cancelled,
}

impl Kind {
    /// Every kind with its exit code and its name on the wire.
    pub const ALL: [(Kind, u8, &'static str); 12] = [
        (Kind::Failed, 1, "failed"),
        (Kind::Usage, 2, "usage"),
        (Kind::NotFound, 3, "not-found"),
        (Kind::TimedOut, 4, "timed-out"),
        (Kind::InUse, 5, "in-use"),
        (Kind::NoRoom, 6, "no-room"),
        (Kind::Verification, 7, "verification"),
        (Kind::SourceChanged, 8, "source-changed"),
        (Kind::Stale, 9, "stale"),
        (Kind::NotExecutable, 126, "not-executable"),
        (Kind::CommandNotFound, 127, "command-not-found"),
        (Kind::Cancelled, 130, "cancelled"),
    ];

    fn row(self) -> (Kind, u8, &'static str) {
        *Self::ALL.iter().find(|row| row.0 == self).expect("ALL lists every kind")
    }

    /// The exit code, as the table in `docs/usage.md` lists it.
    pub fn exit_code(self) -> u8 {
        self.row().1
    }

    /// The name that crosses the socket.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// The kind of a name from the wire; a name that a newer program made up is [`Kind::Failed`].
    pub fn from_name(name: &str) -> Kind {
        Self::ALL.iter().find(|row| row.2 == name).map_or(Kind::Failed, |row| row.0)
    }
}

/// What failed, on what, and why; and what to do about it.
#[derive(Clone, Debug)]
pub struct Error {
    kind: Kind,
    message: String,
    hint: Option<String>,
}

impl Error {
    /// An error of `kind` whose `message` is one line without a final full stop.
    pub fn new(kind: Kind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), hint: None }
    }

    /// An I/O failure: "cannot `doing` `path`: why". The kind follows from the errno.
    pub fn io(doing: &str, path: &Path, cause: &io::Error) -> Error {
        Error::new(kind_of(cause), format!("cannot {doing} {}: {}", shown(path), reason(cause)))
            .way_out(cause)
    }

    /// The same for a failure without a path: "cannot `doing`: why".
    pub fn os(doing: &str, cause: &io::Error) -> Error {
        Error::new(kind_of(cause), format!("cannot {doing}: {}", reason(cause))).way_out(cause)
    }

    /// A process or thread that can't be made: "cannot `doing`: why", with the limits that may be behind it.
    pub fn spawning(doing: &str, cause: &io::Error) -> Error {
        if cause.raw_os_error() != Some(libc::EAGAIN) {
            return Error::os(doing, cause);
        }
        // The C library says the same where a thread's stack finds no place.
        let limits = "processes and threads (RLIMIT_NPROC, pids cgroup) or address space (RLIMIT_AS)";
        Error::new(Kind::NoRoom, format!("cannot {doing}: a limit is reached, on {limits} (EAGAIN)"))
            .hint("raise it (ulimit -u, ulimit -v, systemd: TasksMax=, containers: --pids-limit), or end other processes")
    }

    /// Adds the hint that the errno alone is enough for.
    fn way_out(self, cause: &io::Error) -> Error {
        match cause.raw_os_error() {
            Some(libc::EFBIG) => self.hint("raise the limit: ulimit -S -f unlimited (systemd: LimitFSIZE=)"),
            Some(libc::EMFILE) => self.hint(
                "raise the limit: ulimit -n 4096 (systemd: LimitNOFILE=, containers: --ulimit nofile=)",
            ),
            Some(libc::ENFILE) => {
                self.hint("close other programs, or have root raise it: sysctl fs.file-max")
            }
            _ => self,
        }
    }

    /// Adds what the user can do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = Some(hint.into());
        self
    }

    /// The same error as another kind, where the caller knows better than the errno.
    #[must_use]
    pub fn with_kind(mut self, kind: Kind) -> Error {
        self.kind = kind;
        self
    }

    /// The same error in a wider context: "`context`: message".
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Error {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// What callers branch on.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The one line, without "error:".
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What to do about it, without "hint:".
    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// The kind that an errno amounts to where nothing better is known. A caller that knows what an errno means for
/// what it did decides by itself, or says so with [`Error::with_kind`].
fn kind_of(cause: &io::Error) -> Kind {
    match cause.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => Kind::NotFound,
        Some(libc::ENOSPC | libc::EDQUOT | libc::ENOMEM | libc::EFBIG | libc::EMFILE | libc::ENFILE) => {
            Kind::NoRoom
        }
        Some(libc::ETIMEDOUT) => Kind::TimedOut,
        _ => Kind::Failed,
    }
}

/// An I/O failure in words, with the errno's name and never only its number.
pub fn reason(cause: &io::Error) -> String {
    let words = match cause.raw_os_error() {
        Some(libc::EACCES) => "permission denied (EACCES)",
        Some(libc::EPERM) => "operation not permitted (EPERM)",
        Some(libc::ENOENT) => "no such file or directory",
        Some(libc::ENOTDIR) => "a part of the path is not a directory",
        Some(libc::EISDIR) => "it is a directory",
        Some(libc::EEXIST) => "it exists already",
        Some(libc::ELOOP) => "too many levels of symbolic links (ELOOP)",
        Some(libc::ENAMETOOLONG) => "the name is too long",
        Some(libc::ENOSPC) => "no space left on the device (ENOSPC)",
        Some(libc::EDQUOT) => "the disk quota is used up (EDQUOT)",
        Some(libc::ENOMEM) => "not enough memory (ENOMEM)",
        Some(libc::EFBIG) => "the file size limit is too small (EFBIG; RLIMIT_FSIZE, see ulimit -f)",
        Some(libc::EMFILE) => "this process has too many open files (EMFILE; RLIMIT_NOFILE, see ulimit -n)",
        Some(libc::ENFILE) => "the system has too many open files (ENFILE)",
        Some(libc::EROFS) => "the file system is read-only",
        Some(libc::EIO) => "the device reported an input/output error (EIO)",
        Some(libc::EINVAL) => "invalid argument (EINVAL)",
        Some(libc::EBADF) => "it is closed, or not open for this (EBADF)",
        Some(libc::EBUSY) => "it is busy (EBUSY)",
        Some(libc::ENOTEMPTY) => "the directory is not empty",
        Some(libc::ECONNREFUSED) => "nobody answers there (ECONNREFUSED)",
        Some(libc::EPIPE) => "the other end closed the connection (EPIPE)",
        Some(libc::ECONNRESET) => "the other end reset the connection (ECONNRESET)",
        Some(libc::EAGAIN) => "not ready, or a limit is reached (EAGAIN)",
        Some(libc::ESTALE) => "stale file handle: it was replaced on the server (ESTALE)",
        Some(libc::ENOSYS) => "this kernel does not have the call (ENOSYS)",
        Some(libc::EOPNOTSUPP) => "the file system does not support it (EOPNOTSUPP)",
        Some(_) => {
            // The standard library's text, "Text (os error N)", for the errnos that nobody meets often.
            return cause.to_string().replace("os error ", "errno ");
        }
        None => return cause.to_string(),
    };
    words.to_owned()
}

/// A path or name for a person: control characters and bytes that are not UTF-8 are escaped, and a name
/// with blanks or escapes stands in quotes.
pub fn shown(path: impl AsRef<OsStr>) -> String {
    let name = path.as_ref();
    let mut text = String::with_capacity(name.len());
    let mut quoted = name.is_empty();
    for chunk in name.as_encoded_bytes().utf8_chunks() {
        for character in chunk.valid().chars() {
            if steers_a_terminal(character) {
                text.extend(character.escape_default());
                quoted = true;
            } else {
                quoted |= character == ' ' || character == '\'';
                text.push(character);
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
            quoted = true;
        }
    }
    if quoted { format!("'{text}'") } else { text }
}

/// Whether a character changes how a terminal shows what follows: control characters, bidirectional controls,
/// line separators.
pub fn steers_a_terminal(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn exit_codes_are_those_of_the_usage_page() {
        let codes: Vec<u8> = Kind::ALL.iter().map(|row| row.0.exit_code()).collect();
        assert_eq!(codes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 126, 127, 130]);
        for (kind, _, name) in Kind::ALL {
            assert_eq!(Kind::from_name(name), kind);
        }
        assert_eq!(Kind::from_name("from-the-future"), Kind::Failed);
    }

    #[test]
    fn errno_becomes_kind_and_words() {
        let full = io::Error::from_raw_os_error(28);
        let error = Error::io("write", Path::new("/a/b"), &full);
        assert_eq!(error.kind(), Kind::NoRoom);
        assert_eq!(error.message(), "cannot write /a/b: no space left on the device (ENOSPC)");
        assert_eq!(kind_of(&io::Error::from_raw_os_error(2)), Kind::NotFound);
    }

    #[test]
    fn too_many_open_files_have_a_way_out() {
        for (errno, way) in [(libc::EMFILE, "ulimit -n"), (libc::ENFILE, "fs.file-max")] {
            let cause = io::Error::from_raw_os_error(errno);
            for error in [Error::io("open", Path::new("/a"), &cause), Error::os("make a pipe", &cause)] {
                assert_eq!(error.kind(), Kind::NoRoom);
                assert!(error.hint_text().is_some_and(|hint| hint.contains(way)), "{error:?}");
            }
        }
    }

    #[test]
    fn what_cannot_be_spawned_names_the_limits() {
        let error = Error::spawning("start a thread", &io::Error::from_raw_os_error(libc::EAGAIN));
        assert_eq!(error.kind(), Kind::NoRoom);
        assert!(error.message().contains("RLIMIT_NPROC") && error.message().contains("RLIMIT_AS"), "{error}");
        let error = Error::spawning("start a thread", &io::Error::from_raw_os_error(libc::EPERM));
        assert_eq!(error.message(), "cannot start a thread: operation not permitted (EPERM)");
    }

    #[test]
    fn names_are_shown_without_control_characters() {
        assert_eq!(shown("plain/name.json"), "plain/name.json");
        assert_eq!(shown("two words"), "'two words'");
        assert_eq!(shown("a\n\u{1b}[31mb"), "'a\\n\\u{1b}[31mb'");
        assert_eq!(shown(OsStr::from_bytes(b"a\xffb")), "'a\\xffb'");
        assert_eq!(shown("模型"), "模型");
        assert_eq!(shown(""), "''");
    }
}
