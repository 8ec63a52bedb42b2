//! What the tests of this module and of `view` share.

use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Command;

/// The other user of the tests: `nobody`.
pub(crate) const NOBODY: u32 = 65534;

const AS_ORDINARY_USER: &str = "ILOADER_TEST_AS_ORDINARY_USER";

/// Whether the test may give files to another user.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Gives `path` itself, not what it leads to, to `nobody`.
pub(crate) fn give_away(path: &Path) {
    if path.is_symlink() {
        std::os::unix::fs::lchown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    } else {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
}

/// Runs `body` as somebody whom permissions bind. Root runs the test `name` (its whole path) of this
/// same program again as `nobody`, and prints why where that cannot be done.
pub(crate) fn as_ordinary_user(name: &str, body: impl FnOnce()) {
    if !is_root() || std::env::var_os(AS_ORDINARY_USER).is_some() {
        return body();
    }
    let program = std::env::current_exe().unwrap();
    let run = |arguments: &[&str]| {
        Command::new("setpriv")
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"])
            .args(arguments)
            .env(AS_ORDINARY_USER, "1")
            .current_dir("/")
            .output()
    };
    let program = program.to_str().unwrap();
    match run(&["test", "-x", program]) {
        Err(cause) => return eprintln!("skipped {name}: no setpriv: {cause}"),
        Ok(output) if !output.status.success() => {
            return eprintln!("skipped {name}: nobody cannot run {program}");
        }
        Ok(_) => {}
    }
    let output = run(&[program, "--exact", name, "--nocapture"]).unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "no test is called {name}: {text}");
}
