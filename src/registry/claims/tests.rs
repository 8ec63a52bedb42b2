use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::registry::testing::{give_away, is_root};

fn terms(name: &str, bytes: u64) -> Terms {
    Terms { bytes, proposes: None, groups: None, name: name.to_owned(), pid: std::process::id() }
}

fn sum(claims: &Claims) -> u64 {
    claims.lock().unwrap().live().unwrap().iter().map(|terms| terms.bytes).sum()
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn claim_file(directory: &Path) -> PathBuf {
    let mut names = names(directory);
    names.retain(|name| name.ends_with(".claim"));
    assert_eq!(names.len(), 1, "{names:?}");
    directory.join(&names[0])
}

#[test]
fn a_claim_counts_while_it_is_held_and_nothing_stays_after_the_last() {
    let home = tempfile::tempdir().unwrap();
    let claims = Claims::of_quota(home.path());
    assert!(claims.are_absent() && claims.sweep().unwrap().is_empty());
    assert_eq!(names(home.path()), [""; 0], "looking makes nothing");
    let one = claims.lock().unwrap().add(&terms("a", 10)).unwrap();
    let two = claims.lock().unwrap().add(&terms("b", 7)).unwrap();
    assert_eq!(sum(&claims), 17);
    one.rewrite(&terms("a", 3)).unwrap();
    assert_eq!(sum(&claims), 10);
    for name in names(home.path()) {
        assert!(name.starts_with('.'), "{name} may be taken for a registration");
        assert_eq!(home.path().join(&name).metadata().unwrap().permissions().mode() & 0o7777, 0o600);
    }
    drop(one);
    assert_eq!(sum(&claims), 7);
    drop(two);
    assert_eq!(names(home.path()), [""; 0]);
}

#[test]
fn what_a_dead_holder_left_is_removed_whatever_it_is() {
    let home = tempfile::tempdir().unwrap();
    let claims = Claims::of_quota(home.path());
    claims.lock().unwrap().add(&terms("gone", 4096)).unwrap().crash();
    let path = claim_file(home.path());
    let notes = claims.sweep().unwrap();
    assert_eq!(notes.len(), 1);
    assert!(notes[0].starts_with("freed 4.0 KiB of 'gone' (process "), "{notes:?}");
    assert!(!path.exists());
    for garbage in [&b""[..], b"garbage", &[0xff; 5000]] {
        claims.lock().unwrap().add(&terms("gone", 1)).unwrap().crash();
        std::fs::write(claim_file(home.path()), garbage).unwrap();
        assert_eq!(claims.sweep().unwrap().len(), 1);
        assert_eq!(names(home.path()), [""; 0]);
    }
}

#[test]
fn who_only_peeks_removes_nothing() {
    let home = tempfile::tempdir().unwrap();
    let claims = Claims::of_quota(home.path());
    claims.lock().unwrap().add(&terms("gone", 1)).unwrap().crash();
    assert_eq!(claims.lock().unwrap().peek().unwrap(), []);
    assert!(claim_file(home.path()).exists());
}

#[test]
fn a_held_claim_that_makes_no_sense_is_an_error_that_names_it() {
    let home = tempfile::tempdir().unwrap();
    let claims = Claims::of_quota(home.path());
    let _claim = claims.lock().unwrap().add(&terms("a", 10)).unwrap();
    let path = claim_file(home.path());
    let whole = std::fs::read_to_string(&path).unwrap();
    for wrong in [String::new(), whole.replace("claim 1", "claim 3"), whole.replace("000010", "000001")] {
        std::fs::write(&path, wrong).unwrap();
        let error = claims.lock().unwrap().live().unwrap_err();
        assert!(error.message().contains(path.to_str().unwrap()), "{error}");
        assert!(error.hint_text().unwrap().contains("fuser"), "{error:?}");
    }
}

#[test]
fn a_claim_is_understood_while_it_is_rewritten() {
    let home = tempfile::tempdir().unwrap();
    let claims = Claims::of_quota(home.path());
    let claim = claims.lock().unwrap().add(&terms("a", u64::MAX)).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let both = [terms("a", u64::MAX), terms("long-name", 1 << 60)];
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                both.iter().for_each(|terms| claim.rewrite(terms).unwrap());
            }
        });
        for _ in 0..300 {
            assert!([u64::MAX, 1 << 60].contains(&sum(&claims)));
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn what_others_plant_is_no_claim_and_is_left_alone() {
    let home = tempfile::tempdir().unwrap();
    let claims = Claims::of_quota(home.path());
    let _claim = claims.lock().unwrap().add(&terms("a", 10)).unwrap();
    let stem = format!(".quota-{}", dir::outer_uid());
    let precious = home.path().join("precious");
    std::fs::write(&precious, "precious").unwrap();
    let link = home.path().join(format!("{stem}.0123456789abcdef.claim"));
    symlink(&precious, &link).unwrap();
    let mut planted = vec![link];
    if is_root() {
        let foreign = home.path().join(format!("{stem}.00000000000000ff.claim"));
        std::fs::write(&foreign, terms("evil", 1 << 40).encode()).unwrap();
        give_away(&foreign);
        planted.push(foreign);
    }
    let mut group = claims.lock().unwrap();
    assert_eq!(group.live().unwrap().len(), 1);
    let notes = group.take_notes();
    assert_eq!(notes.len(), planted.len(), "{notes:?}");
    assert!(notes.iter().all(|note| note.contains("left alone")), "{notes:?}");
    drop(group);
    assert!(planted.iter().all(|path| std::fs::symlink_metadata(path).is_ok()));
    assert_eq!(std::fs::read_to_string(precious).unwrap(), "precious");
}

#[test]
fn a_planted_lock_or_kept_file_is_refused_by_name() {
    let home = tempfile::tempdir().unwrap();
    let claims = Claims::of_quota(home.path());
    let precious = home.path().join("precious");
    std::fs::write(&precious, "precious").unwrap();
    symlink(&precious, claims.kept_file()).unwrap();
    let error = claims.lock().unwrap().kept().unwrap_err();
    assert!(error.message().contains("symbolic link") && error.message().contains(".json"), "{error}");
    std::fs::remove_file(claims.kept_file()).unwrap();
    std::fs::write(claims.kept_file(), vec![b' '; 5000]).unwrap();
    assert!(claims.lock().unwrap().kept().unwrap_err().message().contains("longer than 4096 bytes"));
    std::fs::remove_file(claims.kept_file()).unwrap();
    std::fs::create_dir(claims.kept_file()).unwrap();
    assert!(claims.lock().unwrap().kept().unwrap_err().message().contains("not a regular file"));
    std::fs::remove_dir(claims.kept_file()).unwrap();
    if is_root() {
        std::fs::write(claims.kept_file(), "{}").unwrap();
        give_away(&claims.kept_file());
        assert!(claims.lock().unwrap().kept().unwrap_err().message().contains("uid 65534"));
        std::fs::remove_file(claims.kept_file()).unwrap();
    }
    // Nothing but what was planted kept the lock's file.
    drop(claims.lock().unwrap());
    assert_eq!(names(home.path()), ["precious"]);
    symlink(&precious, claims.lock_file()).unwrap();
    assert!(claims.lock().unwrap_err().message().contains("symbolic link"));
    assert_eq!(std::fs::read_to_string(precious).unwrap(), "precious");
}

#[test]
fn a_group_that_stays_locked_is_an_error_in_time() {
    let home = tempfile::tempdir().unwrap();
    let claims = Claims::of_quota(home.path());
    let held = claims.lock().unwrap();
    let error = claims.lock_within(Duration::from_millis(30)).unwrap_err();
    assert_eq!(error.kind(), Kind::TimedOut);
    assert!(error.message().contains(".lock"), "{error}");
    drop(held);
    claims.lock().unwrap();
}

#[test]
fn what_is_kept_is_replaced_whole_and_keeps_the_lock_file() {
    let home = tempfile::tempdir().unwrap();
    let claims = Claims::of_quota(home.path());
    claims.lock().unwrap().keep(Some(b"one")).unwrap();
    assert_eq!(claims.lock().unwrap().kept().unwrap().unwrap(), b"one");
    assert_eq!(names(home.path()).len(), 2);
    // As after a kill in the middle.
    let half = dir::temporary_name(&claims.kept_name(), "tmp").unwrap();
    let half = home.path().join(std::str::from_utf8(&half).unwrap());
    std::fs::write(&half, "ha").unwrap();
    claims.lock().unwrap().live().unwrap();
    assert!(!half.exists());
    claims.lock().unwrap().keep(None).unwrap();
    assert_eq!(names(home.path()), [""; 0]);
}

#[test]
fn a_directory_of_its_own_comes_and_goes_under_many_hands() {
    let root = tempfile::tempdir().unwrap();
    let (claims, why) = Claims::of_promises_under(root.path(), Path::new("/unused"));
    assert_eq!(why, None);
    std::thread::scope(|scope| {
        for number in 0..4 {
            let claims = &claims;
            scope.spawn(move || {
                for _ in 0..50 {
                    let claim = claims.lock().unwrap().add(&terms("a", 1 << number)).unwrap();
                    let sum = sum(claims);
                    assert!(sum & (1 << number) != 0 && sum < 16, "{sum}");
                    drop(claim);
                }
            });
        }
    });
    assert_eq!(names(root.path()), [""; 0]);
}

#[test]
fn a_directory_that_somebody_else_made_meanwhile_is_not_used() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run");
    std::fs::create_dir(&run).unwrap();
    let (claims, why) = Claims::of_promises_under(root.path(), &run);
    assert_eq!(why, None);
    let claim = claims.lock().unwrap().add(&terms("a", 1)).unwrap();
    let directory = user_directory(root.path());
    std::fs::remove_dir_all(&directory).unwrap();
    symlink(&run, &directory).unwrap();
    let refused = claims.lock().unwrap_err();
    assert!(refused.message().contains("is not a directory"), "{refused}");
    drop(claim);
    assert_eq!(names(&run), [""; 0]);
}

#[test]
fn an_unsafe_directory_is_passed_over_with_a_reason() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run");
    std::fs::create_dir(&run).unwrap();
    let directory = user_directory(root.path());
    let reason = || {
        let (claims, why) = Claims::of_promises_under(root.path(), &run);
        assert_eq!(claims.directory, run);
        claims.lock().unwrap().add(&terms("a", 1)).unwrap();
        why.unwrap()
    };
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    symlink(&run, &directory).unwrap();
    assert!(reason().contains("is not a directory"), "{}", reason());
    std::fs::remove_file(&directory).unwrap();
    std::fs::create_dir(&directory).unwrap();
    mode(&directory, 0o770);
    assert!(reason().contains("writable by others (mode 770)"), "{}", reason());
    mode(&directory, 0o700);
    mode(root.path(), 0o777);
    assert!(reason().contains("lets others replace"), "{}", reason());
    mode(root.path(), 0o1777);
    assert_eq!(Claims::of_promises_under(root.path(), &run).1, None);
    if is_root() {
        give_away(&directory);
        assert!(reason().contains("belongs to uid 65534"), "{}", reason());
    }
    assert!(Claims::of_promises_under(&root.path().join("none"), &run).1.unwrap().contains("cannot create"));
    assert_eq!(names(&run), [""; 0]);
}
