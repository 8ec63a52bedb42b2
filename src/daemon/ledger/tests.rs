use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::error::Kind;

/// What may happen to a ledger. Shares are named by their number among those that live.
#[derive(Clone, Debug)]
enum Step {
    Reserve { bytes: u64, proposes: Option<u64> },
    Commit(usize),
    Drop(usize),
    Crash(usize),
    Set(u64),
    Look,
}

fn step() -> impl Strategy<Value = Step> {
    let quota = || prop_oneof![1 => Just(0u64), 6 => 1u64..120];
    prop_oneof![
        6 => (0u64..60, proptest::option::weighted(0.4, quota()))
            .prop_map(|(bytes, proposes)| Step::Reserve { bytes, proposes }),
        3 => (0usize..8).prop_map(Step::Commit),
        3 => (0usize..8).prop_map(Step::Drop),
        3 => (0usize..8).prop_map(Step::Crash),
        1 => quota().prop_map(Step::Set),
        1 => Just(Step::Look),
    ]
}

/// The same, in plain numbers.
#[derive(Debug, Default)]
struct Model {
    quota: Option<u64>,
    /// Bytes, and what is proposed.
    shares: BTreeMap<u32, (u64, Option<u64>)>,
}

impl Model {
    fn used(&self) -> u64 {
        self.shares.values().map(|share| share.0).sum()
    }

    fn fits(&self, bytes: u64, proposes: Option<u64>) -> bool {
        let own = if proposes.is_some() { proposes } else { self.quota };
        let limits = own.into_iter().chain(self.shares.values().filter_map(|share| share.1));
        limits.filter(|limit| *limit > 0).all(|limit| self.used() + bytes <= limit)
    }

    fn set(&mut self, bytes: u64) {
        self.quota = Some(bytes).filter(|bytes| *bytes > 0);
    }

    /// What must hold whatever happened.
    fn check(&self) {
        let proposals = || self.shares.values().filter_map(|share| share.1).filter(|bytes| *bytes > 0);
        assert!(proposals().all(|proposed| self.used() <= proposed), "a proposal is exceeded: {self:?}");
        let settled = self.shares.values().filter(|share| share.1.is_none());
        let settled: u64 = settled.map(|share| share.0).sum();
        assert!(self.quota.is_none_or(|quota| settled <= quota), "the quota is exceeded: {self:?}");
        if self.shares.values().all(|share| share.1.is_none()) {
            assert!(self.quota.is_none_or(|quota| self.used() <= quota), "the quota is exceeded: {self:?}");
        }
    }
}

fn files(directory: &Path) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// Whatever starts, ends, crashes and sets do in whatever order, the ledger is the model: nothing above the
    /// quota is taken, and nothing is lost by a crash.
    #[test]
    fn a_ledger_is_its_model(steps in proptest::collection::vec(step(), 1..40)) {
        let home = tempfile::tempdir().unwrap();
        let ledger = Ledger::of_group(home.path());
        let mut model = Model::default();
        let mut shares: BTreeMap<u32, Share> = BTreeMap::new();
        let mut crashed = 0;
        for (number, step) in (0u32..).zip(steps) {
            let nth = |index: usize| shares.keys().nth(index % shares.len().max(1)).copied();
            match step {
                Step::Reserve { bytes, proposes } => {
                    let answer = ledger.reserve("n", bytes, proposes);
                    prop_assert_eq!(answer.is_ok(), model.fits(bytes, proposes));
                    match answer {
                        Ok((share, notes)) => {
                            prop_assert_eq!(notes.len(), crashed);
                            crashed = 0;
                            shares.insert(number, share);
                            model.shares.insert(number, (bytes, proposes));
                        }
                        Err(error) => {
                            prop_assert_eq!(error.kind(), Kind::NoRoom);
                            crashed = 0;
                        }
                    }
                }
                Step::Commit(index) => if let Some(key) = nth(index) {
                    shares.get_mut(&key).unwrap().commit().unwrap();
                    if let Some(quota) = model.shares.get_mut(&key).unwrap().1.take() {
                        model.set(quota);
                    }
                },
                Step::Drop(index) => if let Some(key) = nth(index) {
                    shares.remove(&key);
                    model.shares.remove(&key);
                },
                Step::Crash(index) => if let Some(key) = nth(index) {
                    shares.remove(&key).unwrap().crash();
                    model.shares.remove(&key);
                    crashed += 1;
                },
                Step::Set(bytes) => {
                    let answer = ledger.set(bytes);
                    prop_assert_eq!(answer.is_ok(), model.fits(0, Some(bytes)));
                    if answer.is_ok() {
                        model.set(bytes);
                    }
                    crashed = 0;
                }
                Step::Look => {}
            }
            model.check();
            let usage = ledger.usage().unwrap();
            prop_assert_eq!(usage, Usage { quota_bytes: model.quota, used_bytes: model.used() });
        }
        shares.clear();
        prop_assert_eq!(ledger.usage().unwrap(), Usage { quota_bytes: model.quota, used_bytes: 0 });
        if let Some(quota) = model.quota {
            // All of it is free again, to the byte.
            prop_assert!(ledger.reserve("n", quota + 1, None).is_err());
            drop(ledger.reserve("n", quota, None).unwrap());
        }
        ledger.set(0).unwrap();
        prop_assert_eq!(files(home.path()), 0, "files stay");
    }
}

#[test]
fn many_threads_never_take_more_than_there_is() {
    let home = tempfile::tempdir().unwrap();
    let ledger = Ledger::of_group(home.path());
    ledger.set(100).unwrap();
    let (taken, refused) = (std::sync::atomic::AtomicU64::new(0), std::sync::atomic::AtomicU64::new(0));
    use std::sync::atomic::Ordering::SeqCst;
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let (ledger, taken, refused) = (&ledger, &taken, &refused);
            scope.spawn(move || {
                for round in 0..40 {
                    let bytes = 10 + (thread * 7 + round) % 40;
                    match ledger.reserve("n", bytes, None) {
                        Ok((share, _)) => {
                            let sum = taken.fetch_add(bytes, SeqCst) + bytes;
                            assert!(sum <= 100, "{sum} of 100 are taken");
                            std::thread::yield_now();
                            taken.fetch_sub(bytes, SeqCst);
                            if round % 3 == 0 { share.crash() } else { drop(share) }
                        }
                        Err(error) => {
                            assert_eq!(error.kind(), Kind::NoRoom, "{error}");
                            refused.fetch_add(1, SeqCst);
                        }
                    }
                }
            });
        }
    });
    assert!(refused.load(SeqCst) > 0, "there was always room");
    drop(ledger.reserve("n", 100, None).unwrap());
    ledger.set(0).unwrap();
    assert_eq!(files(home.path()), 0);
}

#[test]
fn a_quota_that_cannot_be_read_is_never_none() {
    let home = tempfile::tempdir().unwrap();
    let ledger = Ledger::of_group(home.path());
    let path = ledger.claims.kept_file();
    let long = vec![b' '; 5000];
    for (bad, word) in [
        (&b"{\"schema\":1,"[..], "EOF"),
        (b"", "EOF"),
        (b"{\"schema\":2,\"quota_bytes\":5}", "version 2"),
        (&long, "longer than 4096"),
    ] {
        std::fs::write(&path, bad).unwrap();
        for error in [
            ledger.reserve("n", 1, None).unwrap_err(),
            ledger.reserve("n", 1, Some(5)).unwrap_err(),
            ledger.set(5).unwrap_err(),
            ledger.usage().unwrap_err(),
        ] {
            let text = error.message();
            assert!(text.contains(path.to_str().unwrap()) && text.contains(word), "{error}");
            assert!(error.hint_text().is_some(), "{error}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), bad, "it is left as it was");
    }
    std::fs::remove_file(&path).unwrap();
    ledger.set(5).unwrap();
    ledger.set(0).unwrap();
    assert_eq!(files(home.path()), 0);
}

#[test]
fn a_commit_that_cannot_be_written_changes_nothing() {
    let home = tempfile::tempdir().unwrap();
    let ledger = Ledger::of_group(home.path());
    let (mut share, _) = ledger.reserve("n", 5, Some(50)).unwrap();
    // A rename onto a directory fails, for root too.
    std::fs::create_dir(ledger.claims.kept_file()).unwrap();
    assert!(share.commit().is_err());
    std::fs::remove_dir(ledger.claims.kept_file()).unwrap();
    assert_eq!(ledger.usage().unwrap(), Usage { quota_bytes: None, used_bytes: 5 });
    assert_eq!(ledger.reserve("m", 46, None).unwrap_err().kind(), Kind::NoRoom, "it binds others as before");
    share.commit().unwrap();
    assert_eq!(ledger.usage().unwrap(), Usage { quota_bytes: Some(50), used_bytes: 5 });
}

#[test]
fn a_rehearsal_leaves_out_one_cache_and_not_its_namesake() {
    let home = tempfile::tempdir().unwrap();
    let ledger = Ledger::of_group(home.path());
    ledger.set(10).unwrap();
    let (_share, _) = ledger.reserve("n", 6, None).unwrap();
    let own = std::process::id();
    ledger.rehearse(("n", own), 10, None).unwrap();
    assert_eq!(ledger.rehearse(("n", own), 11, None).unwrap_err().kind(), Kind::NoRoom);
    for leaving in [("n", own + 1), ("another", own)] {
        assert_eq!(ledger.rehearse(leaving, 5, None).unwrap_err().kind(), Kind::NoRoom);
        ledger.rehearse(leaving, 4, None).unwrap();
    }
}
