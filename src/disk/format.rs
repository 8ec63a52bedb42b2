//! What things are called in a root and in a generation.
//!
//! Every name is printed and read here, so that no two parts of the program can differ about one.

use std::fmt;

pub use crate::manifest::{MANIFEST_FILE, OUR_DIRECTORY, SUMS_FILE};
use crate::registry::Name;

/// In [`OUR_DIRECTORY`] of a generation: shared it is a lease, exclusive a removal.
pub const LOCK_FILE: &str = "lock";

/// In [`OUR_DIRECTORY`] of a generation: its modification time is that of the last use.
pub const USED_FILE: &str = "used";

/// In [`OUR_DIRECTORY`] of what is being built: the files that are finished.
pub const FINISHED_FILE: &str = "finished";

/// The highest number of a generation. Every program can read it as a number of JSON.
pub const NUMBER_MAX: u64 = 1 << 53;

/// Between the name and the number of a generation. No name holds it.
const BETWEEN: char = '@';

/// Something of ours at the top of a root.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry {
    /// Whose it is.
    pub name: Name,
    /// Of which generation.
    pub number: u64,
    /// In which state.
    pub state: State,
}

/// What a directory at the top of a root is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// `NAME@N`: whole.
    Whole,
    /// `.NAME@N.staging`: being built, or what an interrupted command left of that.
    Staging,
    /// `.NAME@N.removing`: being deleted, or what an interrupted command left of that.
    Removing,
}

impl State {
    /// What stands before and behind `NAME@N`.
    fn around(self) -> (&'static str, &'static str) {
        match self {
            State::Whole => ("", ""),
            State::Staging => (".", ".staging"),
            State::Removing => (".", ".removing"),
        }
    }
}

impl Entry {
    /// The directory of a whole generation.
    pub fn whole(name: &Name, number: u64) -> Entry {
        Entry { name: name.clone(), number, state: State::Whole }
    }

    /// The same generation in another state.
    #[must_use]
    pub fn in_state(&self, state: State) -> Entry {
        Entry { state, ..self.clone() }
    }

    /// What a file name means; `None`: it is none of ours. Only what [`Entry`] prints is taken.
    pub fn parse(file_name: &str) -> Option<Entry> {
        let states = [State::Whole, State::Staging, State::Removing];
        states.into_iter().find_map(|state| {
            let (before, behind) = state.around();
            let (name, number) = file_name.strip_prefix(before)?.strip_suffix(behind)?.split_once(BETWEEN)?;
            Some(Entry { name: name.parse().ok()?, number: parse_number(number)?, state })
        })
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, behind) = self.state.around();
        write!(formatter, "{before}{}{BETWEEN}{}{behind}", self.name, self.number)
    }
}

/// The file that is locked by who builds generations of a name. It stands in [`OUR_DIRECTORY`] of the root.
pub fn name_lock(name: &Name) -> String {
    format!("{name}.lock")
}

/// A number from 1 to [`NUMBER_MAX`], in the one way that it is printed.
pub(super) fn parse_number(text: &str) -> Option<u64> {
    let is_plain = text.bytes().all(|digit| digit.is_ascii_digit()) && !text.starts_with('0');
    is_plain.then(|| text.parse().ok()).flatten().filter(|number| *number <= NUMBER_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_as_documented() {
        let entry = Entry::whole(&"org--m.v1".parse().unwrap(), 12);
        assert_eq!(entry.to_string(), "org--m.v1@12");
        assert_eq!(entry.in_state(State::Staging).to_string(), ".org--m.v1@12.staging");
        assert_eq!(entry.in_state(State::Removing).to_string(), ".org--m.v1@12.removing");
        assert_eq!(name_lock(&entry.name), "org--m.v1.lock");
    }

    #[test]
    fn what_is_not_ours_is_not_taken() {
        for foreign in [
            "",
            "m",
            "@1",
            "m@",
            "m@0",
            "m@01",
            "m@+1",
            "m@-1",
            "m@1 ",
            "m@9007199254740993",
            "m@18446744073709551615",
            "m@18446744073709551616",
            "m@@1",
            "a..b@1",
            ".m@1",
            "m@1.staging",
            ".m@1.stagin",
            ".m@1.staging.removing",
            ".m.staging",
            ".iloader",
            "é@1",
        ] {
            assert_eq!(Entry::parse(foreign), None, "{foreign}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(
            name in "[a-zA-Z0-9][-a-zA-Z0-9_]{0,60}(\\.[-a-zA-Z0-9_]{1,10}){0,3}",
            number in 1..=NUMBER_MAX,
            state in prop::sample::select(vec![State::Whole, State::Staging, State::Removing]),
        ) {
            let entry = Entry { name: name.parse().unwrap(), number, state };
            let text = entry.to_string();
            prop_assert!(text.len() <= 255);
            prop_assert_eq!(Entry::parse(&text), Some(entry));
        }

        #[test]
        fn one_name_means_one_thing(text in "\\.?[-@.a-z0-9]{0,12}(\\.staging|\\.removing)?") {
            if let Some(entry) = Entry::parse(&text) {
                prop_assert_eq!(entry.to_string(), text);
            }
        }
    }
}
