use super::*;
use crate::registry::testing::{self, as_ordinary_user, give_away, is_root};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

/// A home directory and an environment that knows nothing else.
fn home() -> (tempfile::TempDir, Environment) {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join("tmp")).unwrap();
    std::fs::set_permissions(home.path().join("tmp"), PermissionsExt::from_mode(0o1777)).unwrap();
    let environment = Environment {
        home: Some(home.path().join("home").into()),
        temporary: Some(home.path().join("tmp").into()),
        working_directory: Some(home.path().to_owned()),
        ..Environment::default()
    };
    std::fs::create_dir(home.path().join("home")).unwrap();
    (home, environment)
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

fn mode_of(path: &Path) -> u32 {
    path.metadata().unwrap().mode() & 0o7777
}

fn fallback_of(environment: &Environment) -> PathBuf {
    environment.fallback()
}

#[test]
fn the_order_is_option_variable_cache_home_home() {
    let (home, mut environment) = home();
    let find = |explicit: Option<&str>, environment: &Environment| {
        BaseDir::find(explicit.map(Path::new), environment).unwrap().path
    };
    assert_eq!(find(None, &environment), home.path().join("home/.cache/infiniloader"));
    environment.cache_home = Some(home.path().join("xdg").into());
    assert_eq!(find(None, &environment), home.path().join("xdg/infiniloader"));
    for ignored in ["", "relative/cache"] {
        environment.cache_home = Some(ignored.into());
        assert_eq!(find(None, &environment), home.path().join("home/.cache/infiniloader"));
    }
    environment.base_dir = Some("".into());
    assert_eq!(find(None, &environment), home.path().join("home/.cache/infiniloader"));
    environment.base_dir = Some("./from//variable/.".into());
    assert_eq!(find(None, &environment), home.path().join("from/variable"));
    assert_eq!(find(Some("from/option/"), &environment), home.path().join("from/option"));
    assert!(!home.path().join("home/.cache").exists(), "looking creates nothing");
    assert!(!home.path().join("from").exists());
}

#[test]
fn paths_that_cannot_be_meant_are_refused() {
    let (_home, mut environment) = home();
    let refused = |path: &str, environment: &Environment| {
        let error = BaseDir::find(Some(Path::new(path)), environment).unwrap_err();
        assert!(error.hint_text().is_some(), "{}", error.message());
        error
    };
    assert!(refused("~/x", &environment).message().contains("'~'"));
    assert_eq!(refused("~u/x", &environment).kind(), Kind::Usage);
    assert_eq!(refused("", &environment).kind(), Kind::Usage);
    assert!(BaseDir::find(Some(Path::new("./~x")), &environment).unwrap().path.ends_with("~x"));
    let not_utf8 = OsStr::from_bytes(b"/tmp/\xff");
    assert!(refused_os(not_utf8, &environment).message().contains("UTF-8"));
    environment.working_directory = None;
    assert!(refused("relative", &environment).message().contains("working directory is gone"));
    environment.base_dir = Some("~/x".into());
    assert!(BaseDir::find(None, &environment).unwrap_err().message().starts_with("ILOADER_BASE_DIR"));
}

fn refused_os(path: &OsStr, environment: &Environment) -> Error {
    BaseDir::find(Some(Path::new(path)), environment).unwrap_err()
}

#[test]
fn prepare_makes_private_directories_and_find_finds_them() {
    let (home, environment) = home();
    let prepared = BaseDir::prepare(None, &environment).unwrap();
    assert_eq!(prepared.fallback_reason(), None);
    assert_eq!(prepared.path(), home.path().join("home/.cache/infiniloader"));
    for directory in [prepared.path(), &prepared.run_dir(), &prepared.views_dir(), &prepared.logs_dir()] {
        assert_eq!(mode_of(directory), 0o700, "{directory:?}");
    }
    assert_eq!(std::fs::read_dir(prepared.run_dir()).unwrap().count(), 0, "the proofs are gone");
    assert_eq!(BaseDir::prepare(None, &environment).unwrap(), prepared);
    assert_eq!(BaseDir::find(None, &environment).unwrap(), prepared);
    let held = prepared.hold().unwrap();
    let cleaner = std::fs::File::open(prepared.path()).unwrap();
    assert_eq!(fs::flock(&cleaner, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK));
    assert_eq!(BaseDir::prepare(None, &environment).unwrap(), prepared, "two may hold it");
    drop(held);
}

#[test]
fn one_that_others_may_read_serves_and_one_they_may_write_does_not() {
    let (home, environment) = home();
    let path = home.path().join("base");
    std::fs::create_dir(&path).unwrap();
    set_mode(&path, 0o755);
    let base = BaseDir::prepare(Some(&path), &environment).unwrap();
    assert_eq!(mode_of(&path), 0o755);
    assert_eq!(mode_of(&base.run_dir()), 0o700);
    for mode in [0o770, 0o702] {
        set_mode(&path, mode);
        for result in [BaseDir::prepare(Some(&path), &environment), BaseDir::find(Some(&path), &environment)]
        {
            let error = result.unwrap_err();
            assert!(error.message().contains(&format!("mode {mode:o}")), "{}", error.message());
        }
    }
    set_mode(&path, 0o700);
    set_mode(&base.run_dir(), 0o777);
    assert!(BaseDir::find(Some(&path), &environment).unwrap_err().message().contains("run"));
}

#[test]
fn the_default_one_is_not_passed_over_when_others_may_write_to_it() {
    let (_home, environment) = home();
    let base = BaseDir::prepare(None, &environment).unwrap();
    set_mode(base.path(), 0o777);
    assert!(BaseDir::find(None, &environment).is_err());
    assert!(BaseDir::prepare(None, &environment).is_err());
    assert!(!fallback_of(&environment).exists());
}

#[test]
fn what_is_no_directory_is_an_error_when_explicit_and_passed_over_by_default() {
    let (home, mut environment) = home();
    let file = home.path().join("file");
    std::fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("base")] {
        assert!(BaseDir::find(Some(&path), &environment).is_err(), "{path:?}");
        assert!(BaseDir::prepare(Some(&path), &environment).is_err(), "{path:?}");
    }
    environment.home = Some(file.into());
    let prepared = BaseDir::prepare(None, &environment).unwrap();
    assert_eq!(prepared.path(), fallback_of(&environment));
    assert!(prepared.fallback_reason().unwrap().contains("file"));
    assert_eq!(mode_of(prepared.path()), 0o700);
    assert_eq!(BaseDir::find(None, &environment).unwrap(), prepared);
}

#[test]
fn without_a_home_the_fallback_serves() {
    let (_home, mut environment) = home();
    for home in [None, Some("".into()), Some("relative".into())] {
        environment.home = home;
        let found = BaseDir::find(None, &environment).unwrap();
        assert!(found.fallback_reason().unwrap().contains("HOME"));
        assert!(!found.path().exists(), "looking creates nothing");
    }
    environment.temporary = Some("relative".into());
    let uid = dir::our_uid();
    assert_eq!(environment.fallback(), Path::new(&format!("/tmp/infiniloader-{uid}")));
}

#[test]
fn the_fallback_takes_nothing_that_was_planted() {
    let (home, mut environment) = home();
    environment.home = None;
    let path = fallback_of(&environment);
    symlink(home.path().join("home"), &path).unwrap();
    for result in [BaseDir::prepare(None, &environment), BaseDir::find(None, &environment)] {
        let error = result.unwrap_err();
        assert!(error.message().contains("symbolic link"), "{}", error.message());
    }
    assert_eq!(std::fs::read_dir(home.path().join("home")).unwrap().count(), 0);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "").unwrap();
    assert!(BaseDir::prepare(None, &environment).is_err());
    std::fs::remove_file(&path).unwrap();
    if is_root() {
        std::fs::create_dir(&path).unwrap();
        give_away(&path);
        for result in [BaseDir::prepare(None, &environment), BaseDir::find(None, &environment)] {
            assert!(result.unwrap_err().message().contains("uid 65534"));
        }
    }
}

#[test]
fn base_may_be_a_link_of_ones_own_and_so_may_its_parts() {
    let (home, environment) = home();
    let real = home.path().join("real");
    std::fs::create_dir(&real).unwrap();
    set_mode(&real, 0o700);
    let link = home.path().join("link");
    symlink(&real, &link).unwrap();
    std::fs::create_dir(home.path().join("logs-elsewhere")).unwrap();
    set_mode(&home.path().join("logs-elsewhere"), 0o700);
    symlink("../logs-elsewhere", real.join("logs")).unwrap();
    let base = BaseDir::prepare(Some(&link), &environment).unwrap();
    assert_eq!(base.path(), link);
    assert!(real.join("run").is_dir());
    if !is_root() {
        return;
    }
    give_away(&real.join("logs"));
    for result in [BaseDir::prepare(Some(&link), &environment), BaseDir::find(Some(&link), &environment)] {
        let error = result.unwrap_err();
        assert!(error.message().contains("link of another user"), "{}", error.message());
    }
    std::fs::remove_file(real.join("logs")).unwrap();
    give_away(&link);
    assert!(BaseDir::prepare(Some(&link), &environment).is_err());
    assert!(BaseDir::find(Some(&link), &environment).is_err());
}

#[test]
fn a_link_that_leads_nowhere_is_an_error() {
    let (home, environment) = home();
    let link = home.path().join("link");
    symlink("nowhere", &link).unwrap();
    assert!(BaseDir::prepare(Some(&link), &environment).is_err());
    assert!(BaseDir::find(Some(&link), &environment).is_err());
}

#[test]
fn another_users_home_is_not_filled_by_root() {
    if !is_root() {
        return;
    }
    let (home, environment) = home();
    give_away(&home.path().join("home"));
    let base = BaseDir::prepare(None, &environment).unwrap();
    assert_eq!(base.path(), fallback_of(&environment));
    assert!(base.fallback_reason().unwrap().contains(&format!("uid {}", testing::NOBODY)));
    assert!(!home.path().join("home/.cache").exists());
    let theirs = home.path().join("home/.cache/infiniloader");
    std::fs::create_dir_all(&theirs).unwrap();
    give_away(&theirs);
    assert_eq!(BaseDir::find(None, &environment).unwrap().path(), fallback_of(&environment));
    assert!(BaseDir::find(Some(&theirs), &environment).unwrap_err().message().contains("belongs to uid"));
}

#[test]
fn where_home_cannot_be_written_all_commands_meet_in_the_fallback() {
    as_ordinary_user(
        "registry::base_dir::tests::where_home_cannot_be_written_all_commands_meet_in_the_fallback",
        || {
            let (home, environment) = home();
            set_mode(&home.path().join("home"), 0o555);
            let found = BaseDir::find(None, &environment).unwrap();
            assert_eq!(found.path(), fallback_of(&environment));
            assert!(found.fallback_reason().unwrap().contains("EACCES"));
            let prepared = BaseDir::prepare(None, &environment).unwrap();
            assert_eq!(prepared, found);

            let unreachable = home.path().join("home/base");
            let error = BaseDir::prepare(Some(&unreachable), &environment).unwrap_err();
            assert!(error.message().contains("EACCES"), "{}", error.message());
            set_mode(&home.path().join("home"), 0o000);
            assert_eq!(BaseDir::find(None, &environment).unwrap().path(), found.path());
            set_mode(&home.path().join("home"), 0o700);
        },
    );
}

#[test]
fn a_fallback_that_was_filled_is_found_while_the_default_one_is_absent() {
    let (_home, environment) = home();
    let homeless = Environment { home: None, ..environment.clone() };
    let filled = BaseDir::prepare(None, &homeless).unwrap();
    assert_eq!(BaseDir::find(None, &environment).unwrap().path(), filled.path());
    let default = BaseDir::prepare(None, &environment).unwrap();
    assert_ne!(default.path(), filled.path());
    assert_eq!(BaseDir::find(None, &environment).unwrap(), default);
}

#[test]
fn the_probe_of_a_killed_command_goes_with_the_next() {
    let (_home, environment) = home();
    let base = BaseDir::prepare(None, &environment).unwrap();
    let left = base.run_dir().join(".probe.0123456789abcdef.tmp");
    std::fs::write(&left, "").unwrap();
    std::fs::write(base.run_dir().join(".probe.mine"), "").unwrap();
    BaseDir::prepare(None, &environment).unwrap();
    let names: Vec<_> = std::fs::read_dir(base.run_dir()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, [".probe.mine"]);
}
