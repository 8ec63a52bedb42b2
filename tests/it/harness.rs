//! What the stories share: scratch directories on a real file system, seeded bytes.

use std::io::Write;
use std::path::PathBuf;

/// A directory of its own, removed at the end also when the test fails. On the file system of the build,
/// which is a real one more often than `/tmp` is; `ILOADER_TEST_DIR` names another.
pub(crate) fn scratch_dir() -> tempfile::TempDir {
    let named = std::env::var_os("ILOADER_TEST_DIR").map(PathBuf::from);
    let places = named.into_iter().chain([PathBuf::from(env!("CARGO_TARGET_TMPDIR")), std::env::temp_dir()]);
    places
        .filter_map(|place| tempfile::Builder::new().prefix("iloader-test-").tempdir_in(place).ok())
        .next()
        .expect("some directory for temporary files is writable")
}

/// `length` bytes that depend on `seed` and on their place, so that swapped or shifted blocks differ.
pub(crate) fn bytes_of(seed: u64, length: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1;
    let mut bytes = Vec::with_capacity(length as usize + 8);
    while (bytes.len() as u64) < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length as usize);
    bytes
}

/// Says why a test, or a part of it, does not run here. Written past the capture of the test runner: a skip
/// that nobody sees is a hole.
pub(crate) fn skipped(why: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
