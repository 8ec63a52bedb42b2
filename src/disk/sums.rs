//! `SHA256SUMS` as `sha256sum` prints it, so that a generation can be checked without any tool of ours.

use std::fmt::Write;

use super::format::{MANIFEST_FILE, OUR_DIRECTORY, SUMS_FILE};
use crate::manifest::{Digest, Manifest};

/// The text for the files of a manifest, and in the last line for the file that the manifest itself stands in, whose
/// bytes have the digest `of_manifest`. `sha256sum -c` reads it in the generation's directory.
pub fn text(manifest: &Manifest, of_manifest: Digest) -> String {
    let mut text = String::new();
    for file in &manifest.files {
        let Some(digest) = file.sha256 else { continue };
        // A line with escapes in its name starts with a backslash.
        let is_plain = !file.path.contains(['\\', '\n', '\r']);
        let before = if is_plain { "" } else { "\\" };
        let path = match is_plain {
            true => file.path.clone(),
            false => file.path.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r"),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{before}{digest}  {path}");
    }
    let _ = writeln!(text, "{of_manifest}  {OUR_DIRECTORY}/{MANIFEST_FILE}");
    text
}

/// What the last line of a text says of the manifest; `None` where it says nothing of it.
pub fn of_manifest(text: &[u8]) -> Option<Digest> {
    let line = text.strip_suffix(b"\n")?.rsplit(|byte| *byte == b'\n').next()?;
    let (digest, path) = std::str::from_utf8(line).ok()?.split_once("  ")?;
    digest.parse().ok().filter(|_| path == format!("{OUR_DIRECTORY}/{MANIFEST_FILE}"))
}

/// Where it stands in a generation.
pub fn place(manifest: &Manifest) -> String {
    match is_at_top(manifest) {
        true => SUMS_FILE.to_owned(),
        false => format!("{OUR_DIRECTORY}/{SUMS_FILE}"),
    }
}

/// Whether our file stands at the top of the generation: not where the source has one of that name there, file or
/// directory.
pub fn is_at_top(manifest: &Manifest) -> bool {
    let taken = |path: &str| path.split('/').next() == Some(SUMS_FILE);
    !manifest.files.iter().any(|file| taken(&file.path))
        && !manifest.directory_links.iter().any(|link| taken(&link.path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::testing::Root;
    use std::process::Command;

    #[test]
    fn the_real_sha256sum_prints_and_checks_the_same() {
        let root = Root::new();
        let files: &[(&str, &[u8])] = &[
            ("plain", b"1"),
            ("two words", b"2"),
            ("back\\slash", b"3"),
            ("line\nbreak", b"4"),
            ("re\rturn", b"5"),
            (" *odd", b"6"),
            ("d/é", b"7"),
            ("-option", b""),
        ];
        let generation = root.add("m", 1, files);
        let text = std::fs::read_to_string(generation.path().join(SUMS_FILE)).unwrap();
        let run = |arguments: &[&str]| {
            let mut command = Command::new("sha256sum");
            command.args(arguments).current_dir(generation.path()).env("LC_ALL", "C").output()
        };
        let of_manifest = format!("{OUR_DIRECTORY}/{MANIFEST_FILE}");
        let paths = generation.manifest().files.iter().map(|file| file.path.as_str()).chain([&*of_manifest]);
        let printed = match run(&["--"].into_iter().chain(paths).collect::<Vec<_>>()) {
            Ok(output) => String::from_utf8(output.stdout).unwrap(),
            Err(cause) => return crate::skipped(format!("sha256sum cannot be run: {cause}")),
        };
        assert_eq!(text, printed);
        let check = || run(&["-c", "--strict", "--quiet", SUMS_FILE]).unwrap();
        assert!(check().status.success(), "{:?}", check());
        std::fs::write(generation.path().join("plain"), b"!").unwrap();
        assert!(!check().status.success());
    }

    #[test]
    fn a_file_of_the_source_keeps_its_place() {
        let root = Root::new();
        let is_at_top = |files: &[(&str, &[u8])]| sums::is_at_top(root.add("m", 1, files).manifest());
        use crate::disk::sums;
        assert!(is_at_top(&[("a", b"1"), ("d/SHA256SUMS", b"")]));
        assert!(!is_at_top(&[("a", b"1"), ("SHA256SUMS", b"")]));
    }
}
