//! Decoders: whatever bytes come from a peer, a file or a person, they are taken as they are meant or refused.
//!
//! `tools/fuzz` looks for bytes that break this; here those that are kept in `fuzz/corpus` are tried again, and
//! more that are drawn or made from them.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proptest::prelude::*;

#[path = "../../fuzz/decoders.rs"]
mod fuzzed;

fn project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The examples that are kept for a decoder.
fn corpus(name: &str) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(project("fuzz/corpus").join(name))
        .unwrap_or_else(|cause| panic!("{name} has no corpus: {cause}"))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{name} has an empty corpus");
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

/// Bytes with a few changes: overwritten, inserted, cut out, doubled.
fn changed(mut bytes: Vec<u8>, changes: &[(usize, u8, u8)]) -> Vec<u8> {
    for &(place, kind, byte) in changes {
        let at = place % (bytes.len() + 1);
        let end = (at + usize::from(byte)).min(bytes.len());
        match kind % 4 {
            0 if at < bytes.len() => bytes[at] = byte,
            0 | 1 => bytes.insert(at, byte),
            2 => drop(bytes.drain(at..end)),
            _ => {
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
        }
    }
    bytes
}

/// Characters that mean something to one decoder or another.
const SPEAKING: &str = "[-\\[\\]{}(),.:;\"'/\\\\*?!~^ \\n\\t0-9a-zA-Z_é\u{200b}]{0,60}";

#[test]
fn what_was_found_before_holds() {
    for (name, decode) in fuzzed::ALL {
        corpus(name).iter().for_each(|bytes| decode(bytes));
    }
}

#[test]
fn every_decoder_has_a_target() {
    let manifest = std::fs::read_to_string(project("fuzz/Cargo.toml")).unwrap();
    for (name, _) in fuzzed::ALL {
        assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name}");
        let target = std::fs::read_to_string(project(&format!("fuzz/fuzz_targets/{name}.rs"))).unwrap();
        assert!(target.contains(&format!("decoders::{name}(")), "{name}");
    }
    assert_eq!(manifest.matches("[[bin]]").count(), fuzzed::ALL.len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_decoded_or_refused(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        text in SPEAKING,
    ) {
        for (_, decode) in fuzzed::ALL {
            decode(&bytes);
            decode(text.as_bytes());
        }
    }

    #[test]
    fn examples_with_changes_are_decoded_or_refused(
        example in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((any::<usize>(), any::<u8>(), any::<u8>()), 1..6),
    ) {
        static CORPORA: LazyLock<Vec<Vec<Vec<u8>>>> =
            LazyLock::new(|| fuzzed::ALL.iter().map(|(name, _)| corpus(name)).collect());
        for ((_, decode), examples) in fuzzed::ALL.iter().zip(CORPORA.iter()) {
            decode(&changed(example.get(examples).clone(), &changes));
        }
    }
}
