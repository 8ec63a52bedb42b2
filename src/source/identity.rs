//! Did it change? What a file was when it was selected, compared with what it is now.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use jiff::Timestamp;
use sha2::{Digest, Sha256};

use super::{Identity, SelectedFile, Selection};
use crate::error::shown;
use crate::manifest::{FileEntry, Manifest};

/// The seconds of 0000-01-01 and of 9999-12-30: the years that RFC 3339 can write.
const RFC_3339_SECONDS: std::ops::RangeInclusive<i64> = -62_167_219_200..=253_402_207_200;

impl Identity {
    /// What `metadata` says of the file.
    pub fn of(metadata: &Metadata) -> Identity {
        Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            mtime_seconds: metadata.mtime(),
            // The kernel keeps it below 10^9; a file system that does not gets zero.
            mtime_nanoseconds: u32::try_from(metadata.mtime_nsec())
                .ok()
                .filter(|nanoseconds| *nanoseconds < 1_000_000_000)
                .unwrap_or(0),
        }
    }

    /// What a manifest noted of the file; `None` where its time is none that [`Identity::mtime_rfc3339`]
    /// writes.
    pub fn of_entry(entry: &FileEntry) -> Option<Identity> {
        let (mtime_seconds, mtime_nanoseconds) = parse_mtime(&entry.mtime)?;
        Some(Identity {
            device: entry.device,
            inode: entry.inode,
            bytes: entry.bytes,
            mtime_seconds,
            mtime_nanoseconds,
        })
    }

    /// The modification time as RFC 3339 with nanoseconds, in UTC. A time outside the years 0 to 9999
    /// is written `@seconds.nanoseconds`.
    pub fn mtime_rfc3339(&self) -> String {
        let nanoseconds = self.mtime_nanoseconds.min(999_999_999);
        if RFC_3339_SECONDS.contains(&self.mtime_seconds)
            && let Ok(time) = Timestamp::new(self.mtime_seconds, nanoseconds as i32)
        {
            return format!("{time:.9}");
        }
        format!("@{}.{nanoseconds:09}", self.mtime_seconds)
    }

    /// What makes `now` another file than this one, in words; empty: it is the same.
    ///
    /// The device is not compared: network file systems and volumes get another number when they are
    /// mounted again. Where one of the times has whole seconds only, whole seconds are compared.
    pub fn differences(&self, now: &Identity) -> Vec<String> {
        let mut found = Vec::new();
        if self.bytes != now.bytes {
            found.push(format!("size {} → {}", self.bytes, now.bytes));
        }
        let coarse = self.mtime_nanoseconds == 0 || now.mtime_nanoseconds == 0;
        if self.mtime_seconds != now.mtime_seconds
            || (!coarse && self.mtime_nanoseconds != now.mtime_nanoseconds)
        {
            found.push(format!("modified {} → {}", self.mtime_rfc3339(), now.mtime_rfc3339()));
        }
        if self.inode != now.inode {
            found.push(format!("replaced (inode {} → {})", self.inode, now.inode));
        }
        found
    }

    /// It is the same file, unchanged: see [`Identity::differences`].
    pub fn is_unchanged(&self, now: &Identity) -> bool {
        self.differences(now).is_empty()
    }
}

impl Selection {
    /// The selection that a manifest was made from, as far as it notes it: what was left out is not known.
    ///
    /// A file whose time can't be read back gets one that differs from any.
    pub fn of_manifest(manifest: &Manifest) -> Selection {
        let root = PathBuf::from(&manifest.source);
        let file = |entry: &FileEntry| {
            let unreadable = Identity {
                device: entry.device,
                inode: entry.inode,
                bytes: entry.bytes,
                mtime_seconds: i64::MIN,
                mtime_nanoseconds: 0,
            };
            SelectedFile {
                path: entry.path.clone(),
                real: root.join(&entry.path),
                identity: Identity::of_entry(entry).unwrap_or(unreadable),
                passthrough: entry.passthrough,
            }
        };
        Selection {
            files: manifest.files.iter().map(file).collect(),
            directory_links: manifest.directory_links.clone(),
            root,
            rules: manifest.selection.clone(),
            excluded: Vec::new(),
            warnings: Vec::new(),
        }
    }
}

impl From<&SelectedFile> for FileEntry {
    /// The entry that [`Identity::of_entry`] reads back.
    fn from(file: &SelectedFile) -> FileEntry {
        FileEntry {
            path: file.path.clone(),
            bytes: file.identity.bytes,
            mtime: file.identity.mtime_rfc3339(),
            device: file.identity.device,
            inode: file.identity.inode,
            sha256: None,
            passthrough: file.passthrough,
        }
    }
}

/// Seconds and nanoseconds of a time that [`Identity::mtime_rfc3339`] wrote.
fn parse_mtime(text: &str) -> Option<(i64, u32)> {
    if let Some(plain) = text.strip_prefix('@') {
        let (seconds, nanoseconds) = plain.split_once('.')?;
        let nanoseconds: u32 = nanoseconds.parse().ok().filter(|_| nanoseconds.len() == 9)?;
        return Some((seconds.parse().ok()?, nanoseconds));
    }
    let time: Timestamp = text.parse().ok()?;
    // Before 1970 the library counts both parts down from zero, stat counts nanoseconds up.
    let (seconds, nanoseconds) = (time.as_second(), time.subsec_nanosecond());
    Some(if nanoseconds < 0 {
        (seconds - 1, (nanoseconds + 1_000_000_000) as u32)
    } else {
        (seconds, nanoseconds as u32)
    })
}

/// What makes `now` another selection than `before`, one line for each difference: the source, files
/// that were added, removed or changed, marks and directory links. At most `lines_max` lines; where
/// there is more to say, the last one counts it.
pub fn differences(before: &Selection, now: &Selection, lines_max: usize) -> Vec<String> {
    let mut lines = Vec::new();
    if before.root != now.root {
        lines.push(format!("source {} → {}", shown(&before.root), shown(&now.root)));
    }
    file_differences(&before.files, &now.files, &mut lines);
    let links = |selection: &Selection| -> BTreeMap<String, String> {
        selection
            .directory_links
            .iter()
            .map(|link| (link.path.clone(), format!("link to {}", shown(&link.target))))
            .collect()
    };
    map_differences(&links(before), &links(now), &mut lines);
    cap(lines, lines_max)
}

/// The lines for two lists of files, in the order of their paths.
fn file_differences(before: &[SelectedFile], now: &[SelectedFile], lines: &mut Vec<String>) {
    let old: BTreeMap<&str, &SelectedFile> = before.iter().map(|file| (file.path.as_str(), file)).collect();
    let new: BTreeMap<&str, &SelectedFile> = now.iter().map(|file| (file.path.as_str(), file)).collect();
    for (path, file) in &old {
        match new.get(path) {
            None => lines.push(format!("{}: removed", shown(path))),
            Some(other) => {
                let mut found = file.identity.differences(&other.identity);
                if file.passthrough != other.passthrough {
                    found
                        .push(if other.passthrough { "now passed through" } else { "now loaded" }.to_owned());
                }
                if !found.is_empty() {
                    lines.push(format!("{}: {}", shown(path), found.join(", ")));
                }
            }
        }
    }
    lines.extend(
        new.keys().filter(|path| !old.contains_key(*path)).map(|path| format!("{}: added", shown(path))),
    );
}

fn map_differences(
    before: &BTreeMap<String, String>,
    now: &BTreeMap<String, String>,
    lines: &mut Vec<String>,
) {
    for (path, old) in before {
        match now.get(path) {
            None => lines.push(format!("{}: {old} removed", shown(path))),
            Some(new) if new != old => lines.push(format!("{}: {old} → {new}", shown(path))),
            Some(_) => {}
        }
    }
    let added = now.iter().filter(|(path, _)| !before.contains_key(*path));
    lines.extend(added.map(|(path, new)| format!("{}: {new} added", shown(path))));
}

/// At most `lines_max` lines, the last of which counts the rest.
fn cap(mut lines: Vec<String>, lines_max: usize) -> Vec<String> {
    if lines.len() > lines_max {
        let kept = lines_max.saturating_sub(1);
        let rest = lines.len() - kept;
        lines.truncate(kept);
        if lines_max > 0 {
            lines.push(format!("and {rest} more"));
        }
    }
    lines
}

/// The SHA-256, in hexadecimal, of what makes a selection what it is: the source, each file's path,
/// length, modification time, inode and pass-through mark, and the directory links.
///
/// Every text is preceded by its length and every list by its count, so that no two selections make
/// the same input. The device is left out for the reason given at [`Identity::differences`].
pub fn digest(selection: &Selection) -> String {
    let mut hash = Sha256::new();
    let text = |hash: &mut Sha256, bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    text(&mut hash, b"iloader selection 1");
    text(&mut hash, selection.root.as_os_str().as_encoded_bytes());
    hash.update((selection.files.len() as u64).to_le_bytes());
    for file in &selection.files {
        text(&mut hash, file.path.as_bytes());
        hash.update(file.identity.bytes.to_le_bytes());
        hash.update(file.identity.mtime_seconds.to_le_bytes());
        hash.update(file.identity.mtime_nanoseconds.to_le_bytes());
        hash.update(file.identity.inode.to_le_bytes());
        hash.update([u8::from(file.passthrough)]);
    }
    hash.update((selection.directory_links.len() as u64).to_le_bytes());
    for link in &selection.directory_links {
        text(&mut hash, link.path.as_bytes());
        text(&mut hash, link.target.as_bytes());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::SelectionRules;
    use crate::source::DirectoryLink;
    use proptest::prelude::*;

    const FILE: Identity =
        Identity { device: 1, inode: 12, bytes: 10, mtime_seconds: 1_700_000_000, mtime_nanoseconds: 5 };

    fn file(path: &str, identity: Identity) -> SelectedFile {
        SelectedFile {
            path: path.to_owned(),
            real: format!("/m/{path}").into(),
            identity,
            passthrough: false,
        }
    }

    fn selection(files: Vec<SelectedFile>) -> Selection {
        Selection {
            root: "/m".into(),
            rules: SelectionRules::default(),
            files,
            directory_links: Vec::new(),
            excluded: Vec::new(),
            warnings: Vec::new(),
        }
    }

    #[test]
    fn metadata_becomes_identity() {
        let here = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(here.path(), b"four").unwrap();
        let identity = Identity::of(&std::fs::metadata(here.path()).unwrap());
        assert_eq!(identity.bytes, 4);
        assert!(identity.inode > 0 && identity.mtime_seconds > 1_600_000_000);
    }

    #[test]
    fn differences_are_said_in_words() {
        assert_eq!(FILE.differences(&FILE), Vec::<String>::new());
        assert_eq!(FILE.differences(&Identity { bytes: 12, ..FILE }), ["size 10 → 12"]);
        assert_eq!(FILE.differences(&Identity { inode: 15, ..FILE }), ["replaced (inode 12 → 15)"]);
        assert_eq!(
            FILE.differences(&Identity { mtime_nanoseconds: 6, ..FILE }),
            ["modified 2023-11-14T22:13:20.000000005Z → 2023-11-14T22:13:20.000000006Z"]
        );
        assert!(FILE.is_unchanged(&Identity { device: 7, ..FILE }));
    }

    #[test]
    fn whole_seconds_are_compared_where_one_side_has_no_more() {
        let coarse = Identity { mtime_nanoseconds: 0, ..FILE };
        assert!(FILE.is_unchanged(&coarse));
        assert!(coarse.is_unchanged(&FILE));
        assert!(!coarse.is_unchanged(&Identity { mtime_seconds: FILE.mtime_seconds + 1, ..FILE }));
    }

    #[test]
    fn times_are_written_for_any_year() {
        for (seconds, nanoseconds, text) in [
            (0, 0, "1970-01-01T00:00:00.000000000Z"),
            (-1, 500_000_000, "1969-12-31T23:59:59.500000000Z"),
            (4_102_444_800, 1, "2100-01-01T00:00:00.000000001Z"),
            (-62_167_219_200, 0, "0000-01-01T00:00:00.000000000Z"),
            (-62_167_219_201, 0, "@-62167219201.000000000"),
            (i64::MAX, 999_999_999, "@9223372036854775807.999999999"),
            (i64::MIN, 0, "@-9223372036854775808.000000000"),
        ] {
            let identity = Identity { mtime_seconds: seconds, mtime_nanoseconds: nanoseconds, ..FILE };
            assert_eq!(identity.mtime_rfc3339(), text);
        }
    }

    #[test]
    fn selections_are_compared_file_by_file() {
        let before = selection(vec![file("a", FILE), file("b", FILE), file("c", FILE)]);
        let mut now = selection(vec![
            file("b", Identity { bytes: 11, ..FILE }),
            SelectedFile { passthrough: true, ..file("c", FILE) },
            file("d e", FILE),
        ]);
        now.directory_links.push(DirectoryLink { path: "l".into(), target: "t".into() });
        let all =
            ["a: removed", "b: size 10 → 11", "c: now passed through", "'d e': added", "l: link to t added"];
        assert_eq!(differences(&before, &now, 5), all);
        assert_eq!(differences(&before, &now, 3), ["a: removed", "b: size 10 → 11", "and 3 more"]);
        assert_eq!(differences(&before, &now, 1), ["and 5 more"]);
        assert_eq!(differences(&before, &now, 0), Vec::<String>::new());
        assert_eq!(differences(&before, &before, 5), Vec::<String>::new());
    }

    #[test]
    fn a_manifest_gives_its_selection_back() {
        let mut before = selection(vec![
            file("a", FILE),
            SelectedFile { passthrough: true, ..file("b/c", Identity { mtime_seconds: i64::MAX, ..FILE }) },
        ]);
        before.rules.also_exclude.push("*.bin".into());
        before.directory_links.push(DirectoryLink { path: "l".into(), target: "b".into() });
        let mut manifest = Manifest {
            schema: crate::manifest::SCHEMA,
            name: "m".into(),
            source: "/m".into(),
            selection: before.rules.clone(),
            files: before.files.iter().map(FileEntry::from).collect(),
            directory_links: before.directory_links.clone(),
            bytes: before.bytes(),
            created: String::new(),
            tool: String::new(),
        };
        let back = Selection::of_manifest(&manifest);
        assert_eq!((&back.root, &back.rules, &back.files), (&before.root, &before.rules, &before.files));
        assert_eq!(digest(&back), digest(&before));
        manifest.files[0].mtime = "yesterday".into();
        let changed = differences(&Selection::of_manifest(&manifest), &before, 5);
        assert!(changed.len() == 1 && changed[0].starts_with("a: modified "), "{changed:?}");
    }

    #[test]
    fn the_digest_changes_with_everything_that_counts() {
        let base = selection(vec![file("a", FILE), file("b", FILE)]);
        let mut others = vec![
            Selection { root: "/n".into(), ..base.clone() },
            selection(vec![file("a", FILE)]),
            selection(vec![file("ab", FILE), file("", FILE)]),
            selection(vec![file("a", FILE), SelectedFile { passthrough: true, ..file("b", FILE) }]),
        ];
        for changed in [
            Identity { bytes: 11, ..FILE },
            Identity { inode: 13, ..FILE },
            Identity { mtime_seconds: 0, ..FILE },
            Identity { mtime_nanoseconds: 0, ..FILE },
        ] {
            others.push(selection(vec![file("a", FILE), file("b", changed)]));
        }
        for link in [("l", "tt"), ("lt", "t")] {
            let mut linked = base.clone();
            linked.directory_links.push(DirectoryLink { path: link.0.into(), target: link.1.into() });
            others.push(linked);
        }
        let mut digests: Vec<String> = others.iter().map(digest).collect();
        digests.push(digest(&base));
        assert!(digests.iter().all(|text| text.len() == 64));
        digests.sort();
        digests.dedup();
        assert_eq!(digests.len(), others.len() + 1);
        let moved = selection(vec![file("a", Identity { device: 9, ..FILE }), file("b", FILE)]);
        assert_eq!(digest(&moved), digest(&base));
    }

    proptest! {
        #[test]
        fn any_time_is_written_and_read_back(seconds: i64, small in -70_000_000_000i64..300_000_000_000, nanoseconds in 0u32..1_000_000_000) {
            for mtime_seconds in [seconds, small] {
                let identity = Identity { mtime_seconds, mtime_nanoseconds: nanoseconds, ..FILE };
                let entry = FileEntry {
                    path: "a".into(),
                    bytes: identity.bytes,
                    mtime: identity.mtime_rfc3339(),
                    device: identity.device,
                    inode: identity.inode,
                    sha256: None,
                    passthrough: false,
                };
                prop_assert_eq!(Identity::of_entry(&entry), Some(identity));
            }
        }
    }
}
