//! What must hold of every decoder, whatever bytes it is given. Shared by the fuzz targets, which look for bytes
//! that break it, and by `tests/it/decoders.rs`, which tries those that were found before.
//!
//! A new decoder takes a function here, a row in [`ALL`], a file of one line in `fuzz_targets/`, a `[[bin]]` in
//! `Cargo.toml`, and a directory with a few valid examples in `corpus/`.

#![allow(dead_code, reason = "each target uses one function of these")]

use std::path::{Path, PathBuf};

use iloader::budget::{cgroup, meminfo, quota as quota_file};
use iloader::control::frame::{Decoder, HEADER_BYTES};
use iloader::control::message::{PROTOCOL, PROTOCOL_OLDEST, Reply, Request};
use iloader::disk::{format, journal as disk_journal, manifest, sums};
use iloader::manifest::{Digest, SelectionRules};
use iloader::registry::{Name, Record, Terms};
use iloader::source::{Identity, SelectedFile, Selection, advice, select};
use iloader::units::{ByteSize, parse_seconds};

/// What checks a decoder.
pub(crate) type Check = fn(&[u8]);

/// Every decoder by the name of its target.
pub(crate) const ALL: &[(&str, Check)] = &[
    ("advice", advice),
    ("cgroup", cgroup),
    ("claim", claim),
    ("frame", frame),
    ("generation", generation),
    ("journal", journal),
    ("pattern", pattern),
    ("quota", quota),
    ("record", record),
    ("reply", reply),
    ("request", request),
    ("size", size),
];

/// The first byte is the limit, the second the length of the pieces; the rest is the stream.
pub(crate) fn frame(bytes: &[u8]) {
    let [limit, piece, stream @ ..] = bytes else { return };
    let limit = usize::from(*limit);
    let mut decoder = Decoder::new(limit);
    let mut passed = 0;
    for piece in stream.chunks(usize::from(*piece).max(1)) {
        decoder.fill(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => {
                    assert!(frame.len() <= limit, "a frame over the limit");
                    let (header, rest) =
                        stream[passed..].split_first_chunk::<HEADER_BYTES>().expect("a header");
                    assert_eq!(u32::from_le_bytes(*header) as usize, frame.len());
                    assert_eq!(rest[..frame.len()], frame, "another frame than was sent");
                    passed += HEADER_BYTES + frame.len();
                }
                Ok(None) => break,
                Err(error) => {
                    assert_short(error.message());
                    let (header, _) = stream[passed..].split_first_chunk::<HEADER_BYTES>().expect("a header");
                    assert!(
                        u32::from_le_bytes(*header) as usize > limit,
                        "a sound frame is refused: {error}"
                    );
                    return;
                }
            }
        }
    }
    assert_eq!(decoder.has_begun(), passed < stream.len(), "bytes are lost or made up");
}

/// A request as a daemon takes it.
pub(crate) fn request(bytes: &[u8]) {
    match Request::parse(bytes) {
        Ok(request) => {
            assert!(request.oldest <= PROTOCOL && request.protocol >= PROTOCOL_OLDEST);
            let written = serde_json::to_vec(&request).expect("what was read can be written");
            assert_eq!(Request::parse(&written).expect("what was written can be read"), request);
        }
        Err(error) => assert!(!error.message().contains('\n'), "not one line: {error}"),
    }
}

/// A reply as a client takes it.
pub(crate) fn reply(bytes: &[u8]) {
    if let Ok(reply) = serde_json::from_slice::<Reply>(bytes) {
        let written = serde_json::to_vec(&reply).expect("what was read can be written");
        // Not compared: the last digit of a number of seconds may differ.
        serde_json::from_slice::<Reply>(&written).expect("what was written can be read");
        if let Reply::Error(failure) = reply {
            let _ = iloader::Error::from(failure).kind().exit_code();
        }
    }
}

/// A registration as it stands in BASE.
pub(crate) fn record(bytes: &[u8]) {
    let Ok(record) = Record::parse(bytes) else { return };
    record.name.parse::<Name>().expect("a registration of a name");
    assert!(record.pid > 0, "kill(0) and kill(-1) reach others");
    for path in [&record.socket, &record.view, &record.source, &record.pid_file, &record.log_file] {
        assert!(Path::new(path).is_absolute() && !path.contains('\0'), "{path:?}");
    }
    if let Some(kept) = &record.kept_dirname {
        let inside = Path::new("/view").join(kept);
        assert_eq!(inside.parent(), Some(Path::new("/view")), "{kept:?}");
    }
    let _ = record.failure();
    let written = serde_json::to_vec(&record).expect("what was read can be written");
    assert_eq!(Record::parse(&written).expect("what was written can be read"), record);
}

/// What people type: a size, seconds, a name.
pub(crate) fn size(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(size) = text.parse::<ByteSize>() {
        assert_eq!(size.0.to_string().parse(), Ok(size));
        assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'.'), "{text:?}");
        let _ = size.to_string();
    }
    if let Ok(seconds) = parse_seconds(text) {
        assert!(seconds.as_secs_f64() <= 1e9);
        assert!(std::time::Instant::now().checked_add(seconds).is_some());
    }
    match text.parse::<Name>() {
        Ok(name) => {
            assert_eq!(name.as_str(), text);
            assert!((1..=96).contains(&text.len()) && !text.contains("..") && !text.starts_with(['.', '-']));
            assert!(
                text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)),
                "{text:?}"
            );
        }
        Err(error) => assert!(!error.message().contains('\n'), "not one line: {error}"),
    }
}

/// The first line is a pattern, each further one a path.
pub(crate) fn pattern(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let mut lines = text.split('\n');
    let pattern = lines.next().unwrap_or_default();
    let rules = |patterns: &[&str], also_exclude: &[&str], passthrough: &[&str]| {
        let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        SelectionRules {
            patterns: owned(patterns),
            exclude: Some(Vec::new()),
            also_exclude: owned(also_exclude),
            passthrough: owned(passthrough),
        }
    };
    for path in lines.filter(|path| is_relative(path)) {
        let judged = |rules: &SelectionRules| select::judge(rules, Path::new(path)).ok();
        let left_out = judged(&rules(&[], &[pattern], &[]));
        let passed = judged(&rules(&[], &[], &[pattern]));
        let taken = judged(&rules(&[pattern], &[], &[]));
        assert_eq!(left_out.is_some(), passed.is_some(), "one option takes the pattern, the other does not");
        assert_eq!(left_out.is_some(), taken.is_some(), "one option takes the pattern, the other does not");
        let (Some((kept, _)), Some((all, passes)), Some((takes, _))) = (left_out, passed, taken) else {
            return;
        };
        assert!(all, "no exclusion leaves nothing out");
        assert_eq!(kept, !passes, "--also-exclude and --passthrough mean the same files");
        assert!(!takes || !kept, "what --pattern takes, --also-exclude leaves out");
    }
}

/// The kernel's files about memory and control groups.
pub(crate) fn cgroup(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let _ = cgroup::parse_membership(&text);
    for mount in cgroup::parse_mounts(&text) {
        assert!(mount.root.len() <= text.len() && mount.point.as_os_str().len() <= text.len());
    }
    for limit in [cgroup::parse_limit(&text), cgroup::parse_hierarchical_limit(&text)].into_iter().flatten() {
        assert!(limit < i64::MAX as u64, "no limit is taken for one");
    }
    for version in [cgroup::Version::V1, cgroup::Version::V2] {
        let _ = cgroup::parse_file_pages(version, &text);
    }
    let _ = cgroup::parse_oom_kills(&text);
    for name in ["MemAvailable", "CommitLimit", ""] {
        let _ = meminfo::field(&text, name);
    }
}

/// The file of a quota: what is read from it is written as something that reads the same.
pub(crate) fn quota(bytes: &[u8]) {
    match quota_file::parse(bytes) {
        Ok(quota_bytes) => {
            let written = quota_file::to_json(quota_bytes).expect("a number can be written");
            assert_eq!(quota_file::parse(&written).expect("what was written reads back"), quota_bytes);
        }
        Err(error) => assert_short(error.message()),
    }
}

/// The file of one claim: of this version, nothing but what is written is taken for one.
pub(crate) fn claim(bytes: &[u8]) {
    match Terms::parse(bytes) {
        Ok(terms) if bytes.starts_with(b"iloader-claim 1\n") => {
            assert_eq!(terms.encode(), bytes, "another text is taken for this claim");
        }
        // Of another version only what every version has is read.
        Ok(terms) => assert!(terms.groups.is_none() && bytes.starts_with(b"iloader-claim ")),
        Err(error) => assert_short(error.message()),
    }
}

/// The manifest of a generation: whatever it says, nothing leads out of the generation.
pub(crate) fn generation(bytes: &[u8]) {
    let manifest = match manifest::parse(bytes) {
        Ok(manifest) => manifest,
        Err(manifest::Fault::Version(error) | manifest::Fault::Damaged(error)) => {
            assert!(error.message().len() < 1500 && !error.message().contains('\n'), "{error:?}");
            return;
        }
    };
    let files = manifest.files.iter().map(|file| file.path.as_str());
    let links = manifest.directory_links.iter().flat_map(|link| [link.path.as_str(), link.target.as_str()]);
    for path in files.chain(links) {
        assert!(is_relative(path) && path.split('/').next() != Some(format::OUR_DIRECTORY), "{path:?}");
    }
    assert!(manifest.files.is_sorted_by(|a, b| a.path < b.path), "files stand twice");
    assert!(Selection::of_manifest(&manifest).bytes() == manifest.bytes, "the sizes do not add up");
    let lines = sums::text(&manifest, Digest([1; 32]));
    assert_eq!(lines.lines().count(), manifest.files.len() + 1, "one line each: {lines:?}");
    assert_eq!(sums::of_manifest(lines.as_bytes()), Some(Digest([1; 32])));
    let written = manifest::encode(&manifest).expect("what was read can be written");
    assert_eq!(manifest::parse(&written).expect("what was written can be read"), manifest);
}

/// The journal of an interrupted copy; the first line is also tried as a name in a root.
pub(crate) fn journal(bytes: &[u8]) {
    let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    if let Some(entry) = std::str::from_utf8(first).ok().and_then(format::Entry::parse) {
        assert_eq!(entry.to_string().as_bytes(), first, "two names of one thing");
    }
    let Some(journal) = disk_journal::parse(bytes) else { return };
    assert!(Path::new(&journal.source).is_absolute());
    for file in &journal.finished {
        assert!(is_relative(&file.path) && file.sha256.is_some(), "{file:?}");
    }
    // What follows a sound journal adds to it, or nothing.
    let cut = &bytes[..bytes.len() - 1];
    if let Some(shorter) = disk_journal::parse(cut) {
        assert_eq!(shorter.finished[..], journal.finished[..shorter.finished.len()]);
    }
}

/// Each line is the path of a file in a model.
pub(crate) fn advice(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let mut paths: Vec<&str> = text.split('\n').filter(|path| is_relative(path)).take(100).collect();
    paths.sort_unstable();
    paths.dedup();
    let file = |(inode, path): (usize, &&str)| SelectedFile {
        path: (*path).to_owned(),
        real: PathBuf::from("/m").join(path),
        identity: Identity {
            device: 1,
            inode: inode as u64,
            bytes: 1 << 30,
            mtime_seconds: 0,
            mtime_nanoseconds: 0,
        },
        passthrough: false,
    };
    let selection = Selection::of_files("/m", paths.iter().enumerate().map(file).collect());
    for advice in advice::advise(&selection) {
        assert!(advice.files > 0 && advice.bytes > 0 && !advice.flags.is_empty(), "{advice:?}");
        assert!(advice.files <= paths.len() as u64 && advice.bytes <= selection.bytes(), "{advice:?}");
    }
}

/// A path as a selection has them.
fn is_relative(path: &str) -> bool {
    !path.is_empty() && !path.split('/').any(|part| matches!(part, "" | "." | "..")) && !path.contains('\0')
}

/// Whatever a peer sends, the error about it is one short line.
fn assert_short(message: &str) {
    assert!(message.len() < 300 && !message.contains('\n'), "{message:?}");
}
