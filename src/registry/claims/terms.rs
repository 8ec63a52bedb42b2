//! What stands in a claim: text of a fixed length, so that it is rewritten in place by one write.

use crate::error::{Error, Kind, Result};

/// The first line: what it is, in which version.
const HEAD: &str = "iloader-claim 1";

/// The longest name, that of a cache.
const NAME_BYTES_MAX: usize = 96;

/// What stands where nothing is proposed.
const NOTHING_PROPOSED: &str = "--------------------";

/// What a claim says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The amount claimed.
    pub bytes: u64,
    /// What the group's quota is to become when the holder has succeeded; 0 is none.
    pub proposes: Option<u64>,
    /// The cache that it is for: ASCII, at most 96 bytes.
    pub name: String,
    /// The holder, for messages.
    pub pid: u32,
}

impl Terms {
    /// The length of every claim, in bytes.
    pub const BYTES: usize = 213;

    /// As it is written: [`Terms::BYTES`] long.
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.name.is_ascii() && self.name.len() <= NAME_BYTES_MAX, "the name of a cache");
        let proposes = self.proposes.map_or(NOTHING_PROPOSED.to_owned(), |bytes| format!("{bytes:020}"));
        let body = format!(
            "{HEAD}\nbytes {:020}\nproposes {proposes}\npid {:010}\nname {:NAME_BYTES_MAX$}\n",
            self.bytes, self.pid, self.name
        );
        let text = format!("{body}check {:016x}\n", checksum(body.as_bytes()));
        assert_eq!(text.len(), Terms::BYTES);
        text.into_bytes()
    }

    /// As it was written.
    ///
    /// # Errors
    ///
    /// [`Kind::Failed`] where it is anything else, a claim of another version or half of one included.
    pub fn parse(bytes: &[u8]) -> Result<Terms> {
        let bad = || Error::new(Kind::Failed, "it is no claim of this version");
        if bytes.len() != Terms::BYTES {
            return Err(bad());
        }
        let text = std::str::from_utf8(bytes).map_err(|_| bad())?;
        let (body, check) =
            text.split_at_checked(text.len() - "check 0123456789abcdef\n".len()).ok_or_else(bad)?;
        if check != format!("check {:016x}\n", checksum(body.as_bytes())) {
            return Err(bad());
        }
        let mut lines = body.split_terminator('\n');
        let mut line = |prefix: &str| lines.next().and_then(|line| line.strip_prefix(prefix)).ok_or_else(bad);
        line(HEAD)?;
        let terms = Terms {
            bytes: line("bytes ")?.parse().map_err(|_| bad())?,
            proposes: match line("proposes ")? {
                NOTHING_PROPOSED => None,
                bytes => Some(bytes.parse().map_err(|_| bad())?),
            },
            pid: line("pid ")?.parse().map_err(|_| bad())?,
            name: line("name ")?.trim_end_matches(' ').to_owned(),
        };
        // A text that reads well but is not what we write is not ours either.
        if !terms.name.is_ascii() || terms.name.len() > NAME_BYTES_MAX || terms.encode() != bytes {
            return Err(bad());
        }
        Ok(terms)
    }
}

/// FNV-1a: tells a whole claim from one that is read while it is rewritten. It is no defence, and need not be:
/// who can write the file can write its sum.
fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn terms() -> impl Strategy<Value = Terms> {
        let name = "[A-Za-z0-9][A-Za-z0-9._-]{0,95}";
        (any::<u64>(), any::<Option<u64>>(), name, any::<u32>())
            .prop_map(|(bytes, proposes, name, pid)| Terms { bytes, proposes, name, pid })
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(terms in terms()) {
            prop_assert_eq!(Terms::parse(&terms.encode()).unwrap(), terms);
        }

        /// One that is read while it is rewritten is the old one up to some byte, and the new one from there on.
        #[test]
        fn half_of_two_is_none(one in terms(), other in terms(), at in 0..Terms::BYTES) {
            let (one, other) = (one.encode(), other.encode());
            let torn = [&one[..at], &other[at..]].concat();
            let is_whole = torn == one || torn == other;
            prop_assert_eq!(Terms::parse(&torn).is_ok(), is_whole);
        }

        #[test]
        fn a_changed_byte_is_seen(terms in terms(), at in 0..Terms::BYTES, to in any::<u8>()) {
            let mut bytes = terms.encode();
            let is_same = bytes[at] == to;
            bytes[at] = to;
            prop_assert_eq!(Terms::parse(&bytes).is_ok(), is_same);
        }

        #[test]
        fn garbage_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Terms::parse(&bytes).is_err());
        }
    }

    #[test]
    fn it_is_text_for_people_too() {
        let terms = Terms { bytes: 4096, proposes: Some(0), name: "qwen".to_owned(), pid: 77 };
        let text = String::from_utf8(terms.encode()).unwrap();
        let start = "iloader-claim 1\nbytes 00000000000000004096\nproposes 00000000000000000000\npid 0000000077\nname qwen ";
        assert!(text.starts_with(start), "{text}");
    }
}
