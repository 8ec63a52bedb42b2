//! What has to go: candidates and a policy in, victims out. Pure, so that every case can be tried, and the same
//! for what is in memory and what is on disk.

use std::time::Duration;

/// Something that takes room and may be removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// What it is called; decides between two that were last used at the same time.
    pub name: String,
    /// The room that it takes, in bytes.
    pub bytes: u64,
    /// How long ago it was used last.
    pub idle: Duration,
    /// It is in use, and never a victim. What it takes counts all the same.
    pub is_kept: bool,
}

/// When something has to go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// All candidates together may take so many bytes; `None`: any number.
    pub bytes_max: Option<u64>,
    /// What was not used for so long goes; `None`: nothing does for that reason.
    pub ttl: Option<Duration>,
}

/// Why something has to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It was not used for [`Policy::ttl`].
    Idle,
    /// All together take more than [`Policy::bytes_max`].
    Room,
}

/// The indices of those that have to go, the least recently used first, each with the reason: all that were idle
/// too long, and then as few more as bring the sum down to the limit in that order. Where what is kept takes more
/// than the limit alone, everything else goes.
pub fn victims(candidates: &[Candidate], policy: &Policy) -> Vec<(usize, Why)> {
    let mut order: Vec<usize> = (0..candidates.len()).filter(|at| !candidates[*at].is_kept).collect();
    order.sort_by(|a, b| {
        let (a, b) = (&candidates[*a], &candidates[*b]);
        b.idle.cmp(&a.idle).then_with(|| a.name.cmp(&b.name))
    });
    // Sums of sizes that others tell may not overflow.
    let mut sum: u128 = candidates.iter().map(|candidate| u128::from(candidate.bytes)).sum();
    let mut victims = Vec::new();
    for at in order {
        let candidate = &candidates[at];
        let why = if policy.ttl.is_some_and(|ttl| candidate.idle >= ttl) {
            Why::Idle
        } else if policy.bytes_max.is_some_and(|most| sum > u128::from(most)) {
            Why::Room
        } else {
            break;
        };
        sum -= u128::from(candidate.bytes);
        victims.push((at, why));
    }
    victims
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidate(name: &str, bytes: u64, idle: u64) -> Candidate {
        Candidate { name: name.to_owned(), bytes, idle: Duration::from_secs(idle), is_kept: false }
    }

    fn kept(name: &str, bytes: u64, idle: u64) -> Candidate {
        Candidate { is_kept: true, ..candidate(name, bytes, idle) }
    }

    fn names(candidates: &[Candidate], bytes_max: Option<u64>, ttl: Option<u64>) -> Vec<String> {
        let policy = Policy { bytes_max, ttl: ttl.map(Duration::from_secs) };
        victims(candidates, &policy).iter().map(|(at, _)| candidates[*at].name.clone()).collect()
    }

    #[test]
    fn the_least_recently_used_go_first() {
        let all =
            [candidate("new", 10, 1), candidate("old", 10, 9), kept("kept", 10, 99), candidate("mid", 10, 5)];
        assert_eq!(names(&all, None, None), [""; 0]);
        assert_eq!(names(&all, Some(40), None), [""; 0]);
        assert_eq!(names(&all, Some(39), None), ["old"]);
        assert_eq!(names(&all, Some(30), None), ["old"]);
        assert_eq!(names(&all, Some(29), None), ["old", "mid"]);
        assert_eq!(names(&all, Some(0), None), ["old", "mid", "new"], "as far as it goes");
        assert_eq!(names(&all, None, Some(5)), ["old", "mid"]);
        assert_eq!(names(&all, None, Some(0)), ["old", "mid", "new"]);
        assert_eq!(names(&all, Some(15), Some(9)), ["old", "mid", "new"]);
        let same = [candidate("b", 1, 3), candidate("a", 1, 3)];
        assert_eq!(names(&same, Some(1), None), ["a"]);
    }

    #[test]
    fn reasons_are_told() {
        let all = [candidate("a", 10, 9), candidate("b", 10, 1)];
        let policy = Policy { bytes_max: Some(0), ttl: Some(Duration::from_secs(5)) };
        assert_eq!(victims(&all, &policy), [(0, Why::Idle), (1, Why::Room)]);
    }

    fn any_candidate() -> impl Strategy<Value = Candidate> {
        let bytes = prop_oneof![0..100u64, Just(u64::MAX), any::<u64>()];
        ("[a-c]{1,2}", bytes, 0..20u64, any::<bool>())
            .prop_map(|(name, bytes, idle, is_kept)| Candidate { is_kept, ..candidate(&name, bytes, idle) })
    }

    proptest! {
        #[test]
        fn victims_are_the_fewest_of_the_idlest(
            all in proptest::collection::vec(any_candidate(), 0..12),
            bytes_max in proptest::option::of(prop_oneof![0..300u64, any::<u64>()]),
            ttl in proptest::option::of(0..20u64),
        ) {
            let policy = Policy { bytes_max, ttl: ttl.map(Duration::from_secs) };
            let found = victims(&all, &policy);
            let is_victim = |at: usize| found.iter().any(|(victim, _)| *victim == at);
            let sum = |gone: &[(usize, Why)]| -> u128 {
                let stays = |at: &usize| !gone.iter().any(|(victim, _)| victim == at);
                (0..all.len()).filter(stays).map(|at| u128::from(all[at].bytes)).sum()
            };
            let fits = |gone: &[(usize, Why)]| bytes_max.is_none_or(|most| sum(gone) <= u128::from(most));
            let is_old = |at: usize| policy.ttl.is_some_and(|ttl| all[at].idle >= ttl);
            for at in 0..all.len() {
                prop_assert!(!(all[at].is_kept && is_victim(at)), "what is in use stays");
                prop_assert!(all[at].is_kept || !is_old(at) || is_victim(at), "what is too old goes");
                for other in 0..all.len() {
                    let is_idler = !all[other].is_kept && all[other].idle > all[at].idle;
                    prop_assert!(!(is_victim(at) && is_idler) || is_victim(other), "the idler one goes first");
                }
            }
            prop_assert!(fits(&found) || (0..all.len()).all(|at| all[at].is_kept || is_victim(at)));
            // One fewer would not do.
            if let Some((last, fewer)) = found.split_last() {
                prop_assert!(is_old(last.0) || !fits(fewer));
            }
            prop_assert!(found.windows(2).all(|pair| all[pair[0].0].idle >= all[pair[1].0].idle));
        }
    }
}
