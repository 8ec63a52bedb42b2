//! The power goes at every step: afterwards the old generation is whole or the new one, and the next build works.

use super::faults::{Bad, at};
use super::*;
use crate::disk::journal;
use crate::disk::simulated::{Image, Outcome, Simulated};

/// One file past the page cache, one through it, one empty, and one below a directory.
const SMALL: &[(&str, usize)] =
    &[("config.json", 700), ("empty", 0), ("sub/weights-1", 140_001), ("weights-2", 8192)];

/// What was in the root before, and what a build makes of it, for every step of it.
fn sweep(bed: &Bed, before: &Image, olds: &[BTreeMap<String, Digest>]) {
    let selection = bed.selection();
    let new = digests_below(&bed.source());
    let mut steps = 0;
    loop {
        steps += 1;
        before.write(&bed.root());
        let store = bed.store();
        let disk = Simulated::new(store.root(), steps);
        let outcome = bed.build_as(&disk, &store, &selection, &Seen::default());
        if !disk.is_down() {
            is_whole(&outcome.unwrap().generation, &bed.source());
            fs::remove_dir_all(bed.root()).unwrap();
            break;
        }
        let images = [Outcome::Forgotten, Outcome::Kept].map(|outcome| disk.after(outcome));
        for image in images {
            fs::remove_dir_all(bed.root()).unwrap();
            image.write(&bed.root());
            let at = format!("step {steps}: {:?}", bed.entries());
            let store = bed.store();
            let listing = store.list().unwrap();
            assert!(listing.unreadable.is_empty(), "{at}: {:?}", listing.unreadable);
            let newest = store.newest(&bed.name).unwrap();
            assert!(newest.is_some() || olds.is_empty(), "{at}: the old generation is lost");
            for generation in &listing.generations {
                let there = digests_below(generation.path());
                assert!(there == new || olds.contains(&there), "{at}: {}", generation.path().display());
                generation.selection(&[]).unwrap_or_else(|error| panic!("{at}: {error}"));
            }
            let disk = Simulated::new(store.root(), 0);
            let built = bed.build_as(&disk, &store, &selection, &Seen::default());
            let built = built.unwrap_or_else(|error| panic!("{at}: {error}"));
            is_whole(&built.generation, &bed.source());
            assert_eq!(bed.entries().len(), 1, "{at}: {:?}", bed.entries());
        }
        fs::remove_dir_all(bed.root()).unwrap();
    }
    assert!(steps > 30, "only {steps} steps were met");
}

fn empty_root(bed: &Bed) -> Image {
    bed.store();
    taken(bed)
}

/// What is in the root now, which is gone after that.
fn taken(bed: &Bed) -> Image {
    let image = Image::read(&bed.root());
    fs::remove_dir_all(bed.root()).unwrap();
    image
}

#[test]
fn a_first_build_is_there_or_not() {
    let bed = Bed::in_memory(SMALL);
    sweep(&bed, &empty_root(&bed), &[]);
}

#[test]
fn a_new_generation_is_whole_or_the_old_one_is() {
    let bed = Bed::in_memory(SMALL);
    bed.build();
    let old = digests_below(&bed.source());
    let before = taken(&bed);
    bed.put("weights-2", &bytes_of(99, 9000));
    bed.put("more/added", &bytes_of(98, 10));
    sweep(&bed, &before, &[old]);
}

#[test]
fn what_was_interrupted_is_gone_on_with_or_begun_anew() {
    let mut bed = Bed::in_memory(SMALL);
    // One write after the other, of which the last fails: the files before it are finished.
    bed.engine = Selected::probe(Choice::Auto, Some(1)).unwrap();
    bed.workers = 1;
    let disk = Bad { writes: at(3, true, libc::EIO), ..Bad::default() };
    bed.build_as(&disk, &bed.store(), &bed.selection(), &Seen::default()).unwrap_err();
    assert_eq!(bed.entries(), [".m@1.staging"]);
    let journal = journal::read(&bed.root().join(".m@1.staging")).unwrap().unwrap();
    assert_eq!(journal.finished.len(), 3);
    let before = taken(&bed);
    before.write(&bed.root());
    let built = bed.build();
    let left = journal.finished.iter().map(|file| file.bytes).sum::<u64>();
    assert_eq!((built.reused_bytes, bed.entries()), (left, vec!["m@2".to_owned()]));
    fs::remove_dir_all(bed.root()).unwrap();
    sweep(&bed, &before, &[]);
}
