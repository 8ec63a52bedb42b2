use super::*;
use crate::registry::{Lock, testing};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

fn base() -> (tempfile::TempDir, BaseDir) {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join("run")).unwrap();
    let base = BaseDir::for_tests(home.path());
    (home, base)
}

fn record(name: &str) -> Record {
    Record {
        schema: SCHEMA,
        name: name.to_owned(),
        pid: 4242,
        host: Host::current(),
        socket: format!("/base/run/{name}.sock"),
        view: format!("/base/views/{name}"),
        kept_dirname: Some("org--model".to_owned()),
        source: "/models/with \"quotes\"\n".to_owned(),
        pid_file: format!("/base/run/{name}.pid"),
        log_file: format!("/base/logs/{name}.log"),
        created: "2026-01-01T00:00:00Z".to_owned(),
        tool: "0.1.0".to_owned(),
        failed: None,
    }
}

fn record_path(base: &BaseDir, name: &str) -> PathBuf {
    base.paths(&name.parse().unwrap()).record
}

#[test]
fn a_record_is_read_as_written_and_private() {
    let (_home, base) = base();
    let path = record_path(&base, "n");
    assert_eq!(Record::read(&path).unwrap(), None);
    let mut written = record("n");
    written.write(&path).unwrap();
    assert_eq!(Record::read(&path).unwrap().unwrap(), written);
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o600);

    let error = Error::new(Kind::SourceChanged, "it changed").hint("try again");
    written.failed = Some(Failure::from(&error));
    written.write(&path).unwrap();
    let failure = Record::read(&path).unwrap().unwrap().failure().unwrap();
    assert_eq!(failure.kind(), Kind::SourceChanged);
    assert_eq!(failure.message(), "it changed");
    assert_eq!(failure.hint_text(), Some("try again"));
    assert_eq!(std::fs::read_dir(base.run_dir()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn an_unknown_version_is_refused_by_its_number() {
    let (_home, base) = base();
    let path = record_path(&base, "n");
    std::fs::write(&path, r#"{"schema": 7, "everything": "else"}"#).unwrap();
    let error = Record::read(&path).unwrap_err();
    assert!(error.message().contains("version 7"), "{}", error.message());
    assert!(error.message().contains("n.json"), "{}", error.message());
    // Fields that a later program of the same version adds do no harm.
    let mut value = serde_json::to_value(record("n")).unwrap();
    value["added"] = true.into();
    std::fs::write(&path, value.to_string()).unwrap();
    assert_eq!(Record::read(&path).unwrap().unwrap(), record("n"));
}

#[test]
fn bad_records_are_refused() {
    let (_home, base) = base();
    let path = record_path(&base, "n");
    let refused = |change: &dyn Fn(&mut serde_json::Value), why: &str| {
        let mut value = serde_json::to_value(record("n")).unwrap();
        change(&mut value);
        std::fs::write(&path, value.to_string()).unwrap();
        let error = Record::read(&path).unwrap_err();
        assert!(error.message().contains(why), "{}", error.message());
        assert!(!error.message().contains('\n'));
    };
    refused(&|v| v["socket"] = "run/n.sock".into(), "socket run/n.sock is not an absolute path");
    refused(&|v| v["view"] = "/a\0b".into(), "not an absolute path");
    refused(&|v| v["kept_dirname"] = "a/b".into(), "kept_dirname");
    refused(&|v| v["kept_dirname"] = "..".into(), "kept_dirname");
    refused(&|v| v["pid"] = 0.into(), "0 is not a process");
    refused(&|v| v["name"] = "../n".into(), "not a cache name");
    refused(&|v| v["name"] = "other".into(), "names another cache, 'other'");
    std::fs::write(&path, "").unwrap();
    assert!(Record::read(&path).is_err());
    std::fs::write(&path, vec![b' '; RECORD_BYTES_MAX as usize + 1]).unwrap();
    assert!(Record::read(&path).unwrap_err().message().contains("longer than"));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(Record::read(&path).unwrap_err().message().contains("not a regular file"));
    let mut relative = record("n");
    relative.view = "views/n".to_owned();
    assert!(relative.write(&path).unwrap_err().message().contains("view views/n"));
}

#[test]
fn links_and_files_of_others_are_not_read() {
    let (home, base) = base();
    let real = home.path().join("real.json");
    record("n").write(&home.path().join("n.json")).unwrap();
    std::fs::rename(home.path().join("n.json"), &real).unwrap();
    let path = record_path(&base, "n");
    symlink(&real, &path).unwrap();
    assert!(Record::read(&path).is_err());
    if testing::is_root() {
        std::fs::remove_file(&path).unwrap();
        std::fs::rename(&real, &path).unwrap();
        testing::give_away(&path);
        assert!(Record::read(&path).unwrap_err().message().contains("uid 65534"));
    }
}

#[test]
fn the_list_tells_the_living_from_the_dead() {
    let (_home, base) = base();
    for name in ["b-dead", "a-alive"] {
        record(name).write(&record_path(&base, name)).unwrap();
    }
    std::fs::write(record_path(&base, "c-bad"), "{").unwrap();
    for foreign in [".hidden.json", "quota", "x y.json", "notes.txt", ".a.json.0123456789abcdef.tmp"] {
        std::fs::write(base.run_dir().join(foreign), "{}").unwrap();
    }
    let lock = Lock::try_exclusive(&base.paths(&"a-alive".parse().unwrap()).lock).unwrap().unwrap();
    let listed = list(&base).unwrap();
    let summary: Vec<_> =
        listed.iter().map(|r| (r.name.as_str(), r.record.is_ok(), r.liveness.clone())).collect();
    assert_eq!(
        summary,
        [
            ("a-alive", true, Liveness::Alive),
            ("b-dead", true, Liveness::Dead),
            ("c-bad", false, Liveness::Dead)
        ]
    );
    drop(lock);
    assert_eq!(look_up(&base, &"a-alive".parse().unwrap()).unwrap().liveness, Liveness::Dead);
    assert!(look_up(&base, &"nobody".parse().unwrap()).is_none());
}

#[test]
fn a_base_that_does_not_exist_holds_nothing() {
    let home = tempfile::tempdir().unwrap();
    assert!(list(&BaseDir::for_tests(&home.path().join("absent"))).unwrap().is_empty());
}

#[test]
fn a_daemon_elsewhere_is_not_ours_to_judge() {
    let (_home, base) = base();
    let name: Name = "n".parse().unwrap();
    let path = record_path(&base, "n");
    let mut there = record("n");
    there.host.pid_namespace += 1;
    there.write(&path).unwrap();
    let lock = Lock::try_exclusive(&base.paths(&name).lock).unwrap().unwrap();
    let liveness = look_up(&base, &name).unwrap().liveness;
    assert!(matches!(&liveness, Liveness::Elsewhere(why) if why.contains("PID namespace")), "{liveness:?}");
    there.host.boot_id = "another".to_owned();
    there.host.host = "far".to_owned();
    there.write(&path).unwrap();
    let liveness = look_up(&base, &name).unwrap().liveness;
    assert!(matches!(&liveness, Liveness::Elsewhere(why) if why.contains("host far")), "{liveness:?}");
    // After a restart of this machine, the free lock on its own disk says that the daemon is gone.
    drop(lock);
    assert_eq!(look_up(&base, &name).unwrap().liveness, Liveness::Dead);
    // A lock that cannot be judged is nobody's to clean up.
    std::fs::remove_file(base.paths(&name).lock).unwrap();
    std::fs::create_dir(base.paths(&name).lock).unwrap();
    let registration = look_up(&base, &name).unwrap();
    assert!(registration.record.is_err());
    assert!(matches!(registration.liveness, Liveness::Elsewhere(_)));
}

#[test]
fn what_is_hidden_about_a_host_is_taken_to_be_the_same() {
    let here = Host { host: "h".to_owned(), boot_id: "b".to_owned(), pid_namespace: 3 };
    assert_eq!(here.seen_from(&here), None);
    assert_eq!(Host::default().seen_from(&here), None);
    assert_eq!(here.seen_from(&Host::default()), None);
    assert!(Host { boot_id: "c".to_owned(), ..here.clone() }.seen_from(&here).is_some());
    assert!(Host { pid_namespace: 4, ..here.clone() }.seen_from(&here).is_some());
    assert_eq!(Host { host: "renamed".to_owned(), ..here.clone() }.seen_from(&here), None);
}

#[test]
fn this_host_is_known() {
    let here = Host::current();
    assert!(!here.boot_id.is_empty() && here.pid_namespace != 0 && !here.host.is_empty(), "{here:?}");
}
