//! What one limit still allows, what of that is promised already, and where the kernel says so.

use std::io;
use std::path::Path;

use super::cgroup::GroupId;

/// What one limit still allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes that may still be allocated under this limit.
    pub bytes: u64,
    /// Whose limit it is, for messages: `host MemAvailable`, `cgroup v1 /path`.
    pub what: String,
    /// The control group whose limit it is. `None` for a limit of the host, and for one of a group that is hidden:
    /// whatever is allocated counts under the one, and may count under the other.
    pub group: Option<GroupId>,
    /// Bytes of it that starts under way have still to fill: available now, and not for long. May be more than `bytes`.
    pub promised_bytes: u64,
}

impl Room {
    /// A room of which nothing is promised, under a limit of the host or of a group that is hidden.
    pub fn of_all(bytes: u64, what: impl Into<String>) -> Room {
        Room { bytes, what: what.into(), group: None, promised_bytes: 0 }
    }

    /// What is available and promised to nobody.
    pub fn unpromised_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.promised_bytes)
    }

    /// The same room beside all of `promises`, of which it counts its own.
    pub(super) fn beside(self, promises: &[Promised]) -> Room {
        let own = promises.iter().filter(|promised| promised.counts_under(self.group));
        let promised_bytes = own.fold(0, |sum: u64, promised| sum.saturating_add(promised.bytes));
        Room { promised_bytes, ..self }
    }
}

/// Memory that a start under way has still to fill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promised {
    /// How much.
    pub bytes: u64,
    /// The control groups that are charged for it: the one that the start is in, and those above. `None` where they
    /// are not known: then it counts under every limit, which is the safe side.
    pub groups: Option<Vec<GroupId>>,
}

impl Promised {
    fn counts_under(&self, limited: Option<GroupId>) -> bool {
        match (&self.groups, limited) {
            (Some(groups), Some(limited)) => groups.contains(&limited),
            _ => true,
        }
    }
}

/// The text of the kernel's file `path`, looked up under `root`. Bytes that are not UTF-8 (somebody's
/// mount point) become U+FFFD: they never stand in what we look for.
pub(super) fn read(root: &Path, path: &Path) -> io::Result<String> {
    let below = path.strip_prefix("/").unwrap_or(path);
    Ok(String::from_utf8_lossy(&std::fs::read(root.join(below))?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::cgroup::Version;

    fn group(inode: u64) -> GroupId {
        GroupId { version: Version::V1, inode }
    }

    fn promised(bytes: u64, inodes: &[u64]) -> Promised {
        Promised { bytes, groups: Some(inodes.iter().copied().map(group).collect()) }
    }

    /// What of a room under the limit of `limited` is promised.
    fn counted(limited: Option<GroupId>, promises: &[Promised]) -> u64 {
        Room { group: limited, ..Room::of_all(1000, "a limit") }.beside(promises).promised_bytes
    }

    #[test]
    fn a_promise_counts_under_its_group_and_those_above() {
        // Two siblings, 10 and 20, below 5 below 1; something nested in 10.
        let promises = [promised(1, &[10, 5, 1]), promised(2, &[20, 5, 1]), promised(4, &[11, 10, 5, 1])];
        assert_eq!(counted(None, &promises), 7, "the host's, and what is hidden");
        assert_eq!(counted(Some(group(1)), &promises), 7);
        assert_eq!(counted(Some(group(5)), &promises), 7);
        assert_eq!(counted(Some(group(10)), &promises), 5);
        assert_eq!(counted(Some(group(11)), &promises), 4);
        assert_eq!(counted(Some(group(20)), &promises), 2);
        assert_eq!(counted(Some(group(30)), &promises), 0);
        // The hierarchies are numbered each for itself.
        assert_eq!(counted(Some(GroupId { version: Version::V2, inode: 10 }), &promises), 0);
    }

    #[test]
    fn a_promise_of_nobody_knows_where_counts_everywhere() {
        let promises = [Promised { bytes: 3, groups: None }, promised(1, &[])];
        assert_eq!(counted(Some(group(10)), &promises), 3);
        assert_eq!(counted(None, &promises), 4);
        let most = [Promised { bytes: u64::MAX, groups: None }, promised(1, &[10])];
        let room = Room { group: Some(group(10)), ..Room::of_all(1000, "a limit") }.beside(&most);
        assert_eq!((room.promised_bytes, room.unpromised_bytes()), (u64::MAX, 0));
    }
}
