//! What stands in a claim: text of a fixed length, so that it is rewritten in place by one write.
//!
//! The first lines (`bytes`, `proposes`, `pid`, `name`) and the last one (`check`) are those of every version, so that
//! the starts of two versions of this program count each other: a cache may live for weeks, and the program be
//! replaced meanwhile.

use crate::error::{Error, Kind, Result};

/// The first line: what it is, and in which version.
const HEAD: &str = "iloader-claim ";
const VERSION: &str = "1";

/// The last line of every version, but for its 16 digits.
const CHECK: &str = "check ";
const CHECK_BYTES: usize = CHECK.len() + 16 + 1;

/// The longest name, that of a cache.
const NAME_BYTES_MAX: usize = 96;

/// What stands where nothing is proposed.
const NOTHING_PROPOSED: &str = "--------------------";

/// What stands where it is not known which groups are charged.
const GROUPS_UNKNOWN: &str = "unknown";

/// The length of all groups: for each its hierarchy, a colon and 20 digits, and between two a blank.
const GROUPS_BYTES: usize = Terms::GROUPS_MAX * "1:01234567890123456789 ".len() - 1;

/// A memory control group, as the kernel numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChargedGroup {
    /// The version of its hierarchy: 1 or 2.
    pub hierarchy: u8,
    /// The inode of its directory.
    pub inode: u64,
}

/// What a claim says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The amount claimed.
    pub bytes: u64,
    /// What the group's quota is to become when the holder has succeeded; 0 is none.
    pub proposes: Option<u64>,
    /// The memory control groups that the amount is charged to, at most [`Terms::GROUPS_MAX`]: it counts under their
    /// limits, and under no other group's. `None` where they are not known.
    pub groups: Option<Vec<ChargedGroup>>,
    /// The cache that it is for: ASCII, at most 96 bytes.
    pub name: String,
    /// The holder, for messages.
    pub pid: u32,
}

impl Terms {
    /// The length of every claim of this version, in bytes.
    pub const BYTES: usize = 221 + GROUPS_BYTES;

    /// The longest claim of any version, in bytes.
    pub const BYTES_MAX: usize = 4096;

    /// The most groups that are written down: control groups are seldom nested deeper than half of it.
    pub const GROUPS_MAX: usize = 16;

    /// As it is written: [`Terms::BYTES`] long.
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.name.is_ascii() && self.name.len() <= NAME_BYTES_MAX, "the name of a cache");
        let proposes = self.proposes.map_or(NOTHING_PROPOSED.to_owned(), |bytes| format!("{bytes:020}"));
        let groups = self.groups.as_deref().map_or(GROUPS_UNKNOWN.to_owned(), encode_groups);
        let body = format!(
            "{HEAD}{VERSION}\nbytes {:020}\nproposes {proposes}\npid {:010}\nname {:NAME_BYTES_MAX$}\n\
             groups {groups:GROUPS_BYTES$}\n",
            self.bytes, self.pid, self.name
        );
        let text = format!("{body}{CHECK}{:016x}\n", checksum(body.as_bytes()));
        assert_eq!(text.len(), Terms::BYTES);
        text.into_bytes()
    }

    /// As it was written. Of another version what every version has; its groups are then not known.
    ///
    /// # Errors
    ///
    /// [`Kind::Failed`] where it is anything else, half of a claim included.
    pub fn parse(bytes: &[u8]) -> Result<Terms> {
        if !(CHECK_BYTES..=Terms::BYTES_MAX).contains(&bytes.len()) {
            return Err(bad());
        }
        let text = std::str::from_utf8(bytes).map_err(|_| bad())?;
        let (body, check) = text.split_at_checked(text.len() - CHECK_BYTES).ok_or_else(bad)?;
        if check != format!("{CHECK}{:016x}\n", checksum(body.as_bytes())) {
            return Err(bad());
        }
        let mut lines = body.split_terminator('\n');
        let mut line = |prefix: &str| lines.next().and_then(|line| line.strip_prefix(prefix)).ok_or_else(bad);
        let version = line(HEAD)?;
        let is_ours = version == VERSION;
        let terms = Terms {
            bytes: line("bytes ")?.parse().map_err(|_| bad())?,
            proposes: match line("proposes ")? {
                NOTHING_PROPOSED => None,
                bytes => Some(bytes.parse().map_err(|_| bad())?),
            },
            pid: line("pid ")?.parse().map_err(|_| bad())?,
            name: line("name ")?.trim_end_matches(' ').to_owned(),
            groups: if is_ours { parse_groups(line("groups ")?.trim_end_matches(' '))? } else { None },
        };
        if !terms.name.is_ascii() || terms.name.len() > NAME_BYTES_MAX {
            return Err(bad());
        }
        // A text that reads well but is not what a version writes is not of it either.
        let is_right = if is_ours { terms.encode() == bytes } else { version.parse::<u32>().is_ok() };
        if is_right { Ok(terms) } else { Err(bad()) }
    }
}

fn bad() -> Error {
    Error::new(Kind::Failed, "it is no claim")
}

fn encode_groups(groups: &[ChargedGroup]) -> String {
    assert!(groups.len() <= Terms::GROUPS_MAX, "whoever has more says that they are not known");
    let group = |group: &ChargedGroup| format!("{}:{:020}", group.hierarchy, group.inode);
    groups.iter().map(group).collect::<Vec<_>>().join(" ")
}

fn parse_groups(text: &str) -> Result<Option<Vec<ChargedGroup>>> {
    if text == GROUPS_UNKNOWN {
        return Ok(None);
    }
    let groups = text.split(' ').filter(|group| !group.is_empty()).map(parse_group);
    let groups = groups.collect::<Option<Vec<_>>>().ok_or_else(bad)?;
    if groups.len() > Terms::GROUPS_MAX { Err(bad()) } else { Ok(Some(groups)) }
}

fn parse_group(text: &str) -> Option<ChargedGroup> {
    let (hierarchy, inode) = text.split_once(':')?;
    let hierarchy = match hierarchy {
        "1" => 1,
        "2" => 2,
        _ => return None,
    };
    Some(ChargedGroup { hierarchy, inode: inode.parse().ok()? })
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
        let group = (1..=2u8, any::<u64>()).prop_map(|(hierarchy, inode)| ChargedGroup { hierarchy, inode });
        let groups = proptest::option::of(proptest::collection::vec(group, 0..=Terms::GROUPS_MAX));
        (any::<u64>(), any::<Option<u64>>(), groups, name, any::<u32>())
            .prop_map(|(bytes, proposes, groups, name, pid)| Terms { bytes, proposes, groups, name, pid })
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
        fn garbage_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..2 * Terms::BYTES)) {
            prop_assert!(Terms::parse(&bytes).is_err());
        }
    }

    #[test]
    fn it_is_text_for_people_too() {
        let group = |hierarchy, inode| ChargedGroup { hierarchy, inode };
        let groups = Some(vec![group(1, 4711), group(2, u64::MAX)]);
        let terms = Terms { bytes: 4096, proposes: Some(0), groups, name: "qwen".to_owned(), pid: 77 };
        let text = String::from_utf8(terms.encode()).unwrap();
        let start = "iloader-claim 1\nbytes 00000000000000004096\nproposes 00000000000000000000\n\
            pid 0000000077\nname qwen ";
        assert!(text.starts_with(start), "{text}");
        assert!(text.contains(" \ngroups 1:00000000000000004711 2:18446744073709551615 "), "{text}");
        let text = String::from_utf8(Terms { groups: None, ..terms }.encode()).unwrap();
        assert!(text.contains("\ngroups unknown "), "{text}");
    }

    /// A cache of an older or a newer program counts, also where that says more, or less, of it.
    #[test]
    fn what_every_version_has_is_read_of_any() {
        let common = "bytes 7\nproposes 9\npid 1\nname qwen  \n";
        let read = |body: String| {
            let text = format!("{body}check {:016x}\n", checksum(body.as_bytes()));
            Terms::parse(text.as_bytes())
        };
        let terms = Terms { bytes: 7, proposes: Some(9), groups: None, name: "qwen".to_owned(), pid: 1 };
        for (head, more) in [("0", ""), ("2", ""), ("3", "mood good\ngroups none\n")] {
            assert_eq!(read(format!("iloader-claim {head}\n{common}{more}")).unwrap(), terms);
        }
        for head in ["iloader-claim 1", "iloader-claim ", "iloader-claim x", "another 2"] {
            assert!(read(format!("{head}\n{common}")).is_err(), "{head}");
        }
        assert!(read("iloader-claim 2\nproposes 9\nbytes 7\n".to_owned()).is_err());
    }

    /// Like a claim with its right sum, but of groups that nobody writes.
    #[test]
    fn groups_of_another_form_are_refused() {
        let terms =
            Terms { bytes: 1, proposes: None, groups: Some(Vec::new()), name: "a".to_owned(), pid: 1 };
        let text = String::from_utf8(terms.encode()).unwrap();
        let with = |groups: &str| {
            let body = text.replace(&format!("groups {groups:GROUPS_BYTES$}", groups = ""), "groups @");
            let body = body.replace('@', &format!("{groups:GROUPS_BYTES$}"));
            let body = body.split_once("check ").unwrap().0;
            let text = format!("{body}check {:016x}\n", checksum(body.as_bytes()));
            assert_eq!(text.len(), Terms::BYTES);
            Terms::parse(text.as_bytes())
        };
        assert_eq!(with("").unwrap(), terms);
        assert_eq!(with("unknown").unwrap().groups, None);
        let many = ["1:1"; Terms::GROUPS_MAX + 1].join(" ");
        for wrong in ["unknown ", "unknown 1:1", "1:1", "3:00000000000000000001", "1:", ":", "x", &many] {
            assert_eq!(with(wrong).is_ok(), wrong.trim_end() == "unknown", "{wrong}");
        }
    }
}
