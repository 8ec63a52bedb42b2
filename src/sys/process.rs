//! What the caller of this process had set up, and handing it on unchanged with `exec`.
//!
//! Before `main`, Rust's runtime sets `SIGPIPE` to ignored and opens `/dev/null` in the place of
//! standard descriptors that the caller had closed. Both survive an `exec`, so a command started from
//! here would see something else than what its caller arranged: `yes | head` style pipelines would no
//! longer end by the signal. A function in `.init_array` runs earlier than the runtime and notes both;
//! [`exec`] puts them back.

use std::ffi::{CStr, CString, OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

use super::signals;

/// The bit that says that [`note_inheritance`] ran; the bits below it are only meaningful then.
const NOTED: u8 = 0x80;
/// The bit for "the caller ignored `SIGPIPE`".
const PIPE_IGNORED: u8 = 0x08;
/// The standard descriptors; descriptor `n` has bit `1 << n`, set where the caller had closed it.
const STANDARD_DESCRIPTORS: [i32; 3] = [libc::STDIN_FILENO, libc::STDOUT_FILENO, libc::STDERR_FILENO];

/// What [`note_inheritance`] saw.
static INHERITED: AtomicU8 = AtomicU8::new(0);

// SAFETY: the section holds pointers to functions that the C runtime calls once each, on the only
// thread, before `main`. The function matches that signature (the arguments that glibc passes may be
// left unread under the C calling convention), never unwinds, and needs nothing of Rust's runtime: four
// system calls through libc, which is initialised by then, and one atomic store.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE_INHERITANCE: extern "C" fn() = note_inheritance;

extern "C" fn note_inheritance() {
    let mut seen = NOTED;
    for descriptor in STANDARD_DESCRIPTORS {
        // SAFETY: F_GETFD takes no pointer and changes nothing; a closed descriptor gives EBADF.
        if unsafe { libc::fcntl(descriptor, libc::F_GETFD) } == -1 {
            seen |= 1 << descriptor;
        }
    }
    if signals::is_ignored(libc::SIGPIPE) {
        seen |= PIPE_IGNORED;
    }
    INHERITED.store(seen, Ordering::Relaxed);
}

/// Whether the caller had closed standard descriptor 0, 1 or 2. What stands there now is `/dev/null`.
pub fn was_closed(descriptor: i32) -> bool {
    assert!(STANDARD_DESCRIPTORS.contains(&descriptor));
    INHERITED.load(Ordering::Relaxed) & (1 << descriptor) != 0
}

/// Whether the caller had `SIGPIPE` ignored, before Rust's runtime ignored it for everybody.
pub fn was_pipe_ignored() -> bool {
    INHERITED.load(Ordering::Relaxed) & PIPE_IGNORED != 0
}

/// Becomes `command` (its first element is searched in `PATH` as `execvp` does, scripts without a first
/// line included), with `variables` set over the environment. Returns only where that failed, with the
/// reason; this process is then as it was before.
///
/// The command has what the caller of this process had: `SIGPIPE` as it was, standard descriptors that
/// were closed are closed again. Everything else (limits, mask, working directory, umask) is inherited,
/// and descriptors that are not close-on-exec stay open.
pub fn exec(command: &[OsString], variables: &[(&str, &OsStr)]) -> io::Error {
    let arguments: Vec<CString> = match command.iter().map(|part| CString::new(part.as_bytes())).collect() {
        Ok(arguments) => arguments,
        Err(error) => return io::Error::other(error),
    };
    let Some(program) = arguments.first() else {
        return io::Error::from_raw_os_error(libc::ENOENT);
    };
    let added: Vec<CString> = match variables.iter().map(|(name, value)| assignment(name, value)).collect() {
        Ok(added) => added,
        Err(error) => return error,
    };
    let argument_pointers = null_terminated(arguments.iter().map(|argument| argument.as_ptr()));
    let names: Vec<&str> = variables.iter().map(|variable| variable.0).collect();
    let environment = null_terminated(
        inherited_environment(&names).into_iter().chain(added.iter().map(|entry| entry.as_ptr())),
    );

    let handed_back = HandedBack::apply();
    // SAFETY: `program` is NUL-terminated; both arrays end in a null pointer, and each other element
    // points to a NUL-terminated string: of `arguments` and `added`, alive until this function returns,
    // or of the environment block, which nothing in this program changes or frees.
    unsafe { libc::execvpe(program.as_ptr(), argument_pointers.as_ptr(), environment.as_ptr()) };
    let error = io::Error::last_os_error();
    handed_back.undo();
    error
}

fn assignment(name: &str, value: &OsStr) -> io::Result<CString> {
    assert!(!name.is_empty() && !name.contains('='), "a variable's name");
    let mut entry = Vec::with_capacity(name.len() + 1 + value.len());
    entry.extend_from_slice(name.as_bytes());
    entry.push(b'=');
    entry.extend_from_slice(value.as_bytes());
    CString::new(entry).map_err(io::Error::other)
}

fn null_terminated(pointers: impl Iterator<Item = *const libc::c_char>) -> Vec<*const libc::c_char> {
    pointers.chain(std::iter::once(ptr::null())).collect()
}

/// The entries of this process's environment, byte for byte, but for those that set one of `names`.
/// `std::env::vars_os` would lose entries without `=`, which the caller may have on purpose.
fn inherited_environment(names: &[&str]) -> Vec<*const libc::c_char> {
    unsafe extern "C" {
        static mut environ: *const *const libc::c_char;
    }
    let mut entries = Vec::new();
    // SAFETY: `environ` is null or an array that ends in a null pointer, of NUL-terminated strings. The
    // program never sets a variable (`std::env::set_var` is unsafe, and unsafe is denied outside `sys`,
    // where nothing calls it), so neither the array nor a string moves while it is walked or later.
    unsafe {
        let mut entry = environ;
        while !entry.is_null() && !(*entry).is_null() {
            let text = CStr::from_ptr(*entry).to_bytes();
            let sets =
                |name: &&str| text.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.starts_with(b"="));
            if !names.iter().any(sets) {
                entries.push(*entry);
            }
            entry = entry.add(1);
        }
    }
    entries
}

/// The caller's own state, put back for the length of an `exec`.
struct HandedBack {
    pipe_before: libc::sighandler_t,
}

impl HandedBack {
    fn apply() -> HandedBack {
        // Close-on-exec instead of closing: where the `exec` fails, this process goes on unharmed.
        mark_closed_descriptors(libc::FD_CLOEXEC);
        let original = if was_pipe_ignored() { libc::SIG_IGN } else { libc::SIG_DFL };
        HandedBack { pipe_before: signals::set_disposition(libc::SIGPIPE, original) }
    }

    fn undo(self) {
        if self.pipe_before == libc::SIG_IGN || self.pipe_before == libc::SIG_DFL {
            signals::set_disposition(libc::SIGPIPE, self.pipe_before);
        }
        mark_closed_descriptors(0);
    }
}

fn mark_closed_descriptors(flags: i32) {
    for descriptor in STANDARD_DESCRIPTORS.into_iter().filter(|descriptor| was_closed(*descriptor)) {
        // SAFETY: F_SETFD takes an integer and changes no ownership. The descriptor is the /dev/null
        // that Rust's runtime opened there and that nobody owns.
        unsafe { libc::fcntl(descriptor, libc::F_SETFD, flags) };
    }
}

/// Whether the process `pid` is stopped by a signal or a debugger: it does nothing until it is continued. `false`
/// also where it cannot be seen.
pub fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    matches!(state_in(&stat), Some(b'T' | b't'))
}

/// The letter of the state in the `stat` of a process or thread.
pub fn state_in(stat: &[u8]) -> Option<u8> {
    // The name in parentheses may hold anything.
    let end_of_name = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(end_of_name + 2).copied()
}

/// Has all threads share one heap from now on, where the C library would else set 64 MiB of address space aside for
/// each thread that allocates: a daemon allocates little, and a limit on its address space should mean the same in
/// every run.
pub fn share_one_heap() {
    // SAFETY: sets a number that the allocator reads when it is to make another heap; no allocation is touched.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives the heap's free pages back to the kernel, where the C library has a way to: what a load took for a
/// moment would otherwise stay with a daemon that rests.
pub fn trim_heap() {
    // SAFETY: takes the allocator's own locks and returns free pages only; no allocation is touched.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Command, Output};

    /// Names the command that [`child`] becomes; each part is one line.
    const COMMAND: &str = "ILOADER_TEST_EXEC";

    /// Not a test of its own: what the other tests start as a child. It becomes the command it is told to.
    #[test]
    fn child() {
        let Some(command) = std::env::var_os(COMMAND) else { return };
        let command: Vec<OsString> = command
            .as_bytes()
            .split(|byte| *byte == b'\n')
            .map(|part| OsStr::from_bytes(part).into())
            .collect();
        let error = exec(&command, &[("ILOADER_TEST_ADDED", OsStr::from_bytes(b"a=\xff b"))]);
        println!("exec failed: {:?}", error.raw_os_error());
        // A write into a closed pipe must again be an error instead of the end of this process.
        assert!(signals::is_ignored(libc::SIGPIPE));
        // SAFETY: F_GETFD takes no pointer and changes nothing.
        assert_eq!(unsafe { libc::fcntl(0, libc::F_GETFD) }, 0);
    }

    /// Runs this test binary's [`child`] from a shell that first does `setup`.
    fn become_after(setup: &str, command: &[&str]) -> Output {
        let this = std::env::current_exe().expect("the test binary has a path");
        Command::new("sh")
            .arg("-c")
            .arg(format!("{setup}\nexec \"$0\" --exact sys::process::tests::child --nocapture"))
            .arg(this)
            .env(COMMAND, command.join("\n"))
            .env("ILOADER_TEST_ADDED", "old")
            .output()
            .expect("sh starts")
    }

    fn printed(output: &Output) -> String {
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[test]
    fn sigpipe_is_as_the_caller_had_it() {
        let show = ["grep", "SigIgn", "/proc/self/status"];
        let ignored = |setup| {
            let text = printed(&become_after(setup, &show));
            let mask = text.split("SigIgn:").nth(1).expect("grep printed the line").trim().to_owned();
            u64::from_str_radix(&mask, 16).expect("a mask") & (1 << (libc::SIGPIPE - 1)) != 0
        };
        assert!(!ignored("trap - PIPE"));
        assert!(ignored("trap '' PIPE"));
    }

    #[test]
    fn closed_descriptors_are_closed_again() {
        let show = [
            "sh",
            "-c",
            "for n in 0 2; do if [ -e /proc/$$/fd/$n ]; then echo open $n; else echo closed $n; fi; done",
        ];
        let text = printed(&become_after("exec <&- 2>&-", &show));
        assert!(text.contains("closed 0") && text.contains("closed 2"), "{text}");
        let text = printed(&become_after(":", &show));
        assert!(text.contains("open 0") && text.contains("open 2"), "{text}");
    }

    #[test]
    fn a_failed_exec_says_why_and_restores_this_process() {
        let output = become_after("exec <&-", &["/no/such/command"]);
        let text = printed(&output);
        assert!(text.contains("exec failed: Some(2)") && output.status.success(), "{text}");
        let output = become_after("exec <&-", &["/etc/passwd"]);
        assert!(printed(&output).contains("exec failed: Some(13)") && output.status.success());
    }

    #[test]
    fn variables_are_replaced_and_bytes_kept() {
        let output = become_after("export ODD=1", &["env"]);
        let added: Vec<&[u8]> = output
            .stdout
            .split(|byte| *byte == b'\n')
            .filter(|line| line.starts_with(b"ILOADER_TEST_ADDED"))
            .collect();
        assert_eq!(added, [b"ILOADER_TEST_ADDED=a=\xff b"]);
        assert!(printed(&output).contains("ODD=1\n"));
    }

    #[test]
    fn a_script_without_a_first_line_runs_as_execvp_runs_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let script = directory.path().join("plain");
        std::fs::write(&script, "echo from the script: $1\n").expect("written");
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).expect("made executable");
        let setup = format!("PATH='{}':$PATH", directory.path().display());
        assert!(printed(&become_after(&setup, &["plain", "x y"])).contains("from the script: x y\n"));
    }
}
