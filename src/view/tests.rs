use super::*;
use crate::registry::testing::{as_ordinary_user, give_away, is_root};
use crate::registry::{BaseDir, Host};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::{Command, Stdio};

/// A descriptor that is named like a segment of ours, and the text of a link to it.
fn segment() -> (OwnedFd, PathBuf) {
    let memfd = fs::memfd_create("iloader:n:file", fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&memfd, b"bytes").unwrap();
    let link = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), memfd.as_raw_fd()));
    (memfd, link)
}

/// A link as a daemon leaves it that was killed: its process is gone.
fn dead_link() -> PathBuf {
    let mut child = Command::new("true").spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    PathBuf::from(format!("/proc/{pid}/fd/4242"))
}

fn links(target: &Path, paths: &[&str]) -> Vec<ViewLink> {
    paths.iter().map(|path| ViewLink { path: (*path).to_owned(), target: target.to_owned() }).collect()
}

fn directory_link(path: &str, target: &str) -> DirectoryLink {
    DirectoryLink { path: path.to_owned(), target: target.to_owned() }
}

/// Every path under `top`, with what it is: a link's target, or `mode/`.
fn tree_of(top: &Path) -> BTreeMap<String, String> {
    let mut tree = BTreeMap::new();
    let mut pending = vec![top.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let found = path.symlink_metadata().unwrap();
            let what = if found.is_symlink() {
                path.read_link().unwrap().to_str().unwrap().to_owned()
            } else if found.is_dir() {
                pending.push(path.clone());
                format!("{:o}/", found.mode() & 0o7777)
            } else {
                "file".to_owned()
            };
            tree.insert(path.strip_prefix(top).unwrap().to_str().unwrap().to_owned(), what);
        }
    }
    tree
}

fn names_in(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

/// A temporary directory that can be removed although views stand in it.
struct Home(Option<tempfile::TempDir>);

impl Home {
    fn new() -> Home {
        Home(Some(tempfile::tempdir().unwrap()))
    }

    fn at(&self, path: &str) -> PathBuf {
        self.path().join(path)
    }

    fn path(&self) -> &Path {
        self.0.as_ref().unwrap().path()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let mut pending = vec![self.path().to_owned()];
        while let Some(directory) = pending.pop() {
            let _ = std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o700));
            for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    pending.push(entry.path());
                }
            }
        }
        drop(self.0.take());
    }
}

#[test]
fn a_view_is_the_tree_of_links_and_nothing_else() {
    let home = Home::new();
    let (_segment, target) = segment();
    let at = home.at("deep/er/view");
    let mut files = links(&target, &["z.txt", "sub/a.json", "sub/x/y/w.bin", "sub/x/b.bin", "sub.txt"]);
    files.push(ViewLink { path: "passed".to_owned(), target: "/models/m/passed".into() });
    let view = View::publish(&at, None, &files, &[directory_link("sub/again", "sub/x")]).unwrap();
    let target = target.to_str().unwrap();
    let expected = [
        ("passed", "/models/m/passed"),
        ("sub", "555/"),
        ("sub.txt", target),
        ("sub/a.json", target),
        ("sub/again", "x"),
        ("sub/x", "555/"),
        ("sub/x/b.bin", target),
        ("sub/x/y", "555/"),
        ("sub/x/y/w.bin", target),
        ("z.txt", target),
    ];
    let expected: BTreeMap<_, _> =
        expected.iter().map(|(path, what)| ((*path).to_owned(), (*what).to_owned())).collect();
    assert_eq!(tree_of(&at), expected);
    assert_eq!(at.metadata().unwrap().mode() & 0o7777, 0o555);
    assert_eq!(home.at("deep").metadata().unwrap().mode() & 0o7777, 0o700);
    assert_eq!(std::fs::read(at.join("sub/again/y/w.bin")).unwrap(), b"bytes");
    assert_eq!(view.model_dir(), at);
    assert_eq!(names_in(at.parent().unwrap()), ["view"]);
    assert_eq!(examine(&at).unwrap(), Standing::Live { pid: std::process::id() });
}

#[test]
fn the_kept_name_is_one_more_level() {
    let home = Home::new();
    let (_segment, target) = segment();
    let at = home.at("view");
    let view =
        View::publish(&at, Some("org--m"), &links(&target, &["a/b"]), &[directory_link("l", "a")]).unwrap();
    assert_eq!(view.model_dir(), at.join("org--m"));
    assert_eq!(std::fs::read(view.model_dir().join("l/b")).unwrap(), b"bytes");
    assert_eq!(view.model_dir().metadata().unwrap().mode() & 0o7777, 0o555);
    assert_eq!(view.withdraw(false).unwrap(), Withdrawn::default());
    assert_eq!(tree_of(&at), BTreeMap::new());
}

#[test]
fn withdrawing_leaves_an_empty_directory_or_none() {
    let home = Home::new();
    let (_segment, target) = segment();
    let at = home.at("view");
    let files = links(&target, &["a", "sub/b"]);
    let view = View::publish(&at, None, &files, &[]).unwrap();
    assert_eq!(view.withdraw(false).unwrap(), Withdrawn::default());
    assert_eq!(examine(&at).unwrap(), Standing::Empty);
    assert_eq!(at.metadata().unwrap().mode() & 0o7777, 0o700);
    let view = View::publish(&at, None, &files, &[]).unwrap();
    assert_eq!(view.withdraw(true).unwrap(), Withdrawn::default());
    assert_eq!(examine(&at).unwrap(), Standing::Absent);
    assert_eq!(names_in(home.path()), [""; 0]);
}

#[test]
fn without_an_exchange_of_names_it_works_too() {
    let home = Home::new();
    let (_segment, target) = segment();
    let at = home.at("view");
    let dead = dead_link();
    drop(View::publish(&at, None, &links(&dead, &["old"]), &[]).unwrap());
    let spot = Spot::create(&at).unwrap().without_exchange();
    let view = publish_at(&spot, None, tree::plan(None, &links(&target, &["new"]), &[]).unwrap()).unwrap();
    assert_eq!(names_in(&at), ["new"]);
    assert_eq!(withdraw_from(&spot, &view, false).unwrap(), Withdrawn::default());
    assert_eq!(examine(&at).unwrap(), Standing::Empty);
    assert_eq!(names_in(home.path()), ["view"]);
}

#[test]
fn what_others_wrote_into_a_view_is_named_and_stays() {
    for (remove, exchanges) in [(false, true), (true, true), (false, false)] {
        let home = Home::new();
        let (_segment, target) = segment();
        let at = home.at("view");
        let view = View::publish(&at, None, &links(&target, &["a", "sub/b", "sub2/c"]), &[]).unwrap();
        for directory in [at.clone(), at.join("sub")] {
            set_mode(&directory, 0o755);
        }
        std::fs::create_dir(at.join("np")).unwrap();
        std::fs::write(at.join("np/w"), "weights").unwrap();
        std::fs::create_dir(at.join("empty")).unwrap();
        std::fs::write(at.join("sub/notes"), "words").unwrap();
        symlink("/etc/passwd", at.join("sub/link")).unwrap();
        std::fs::remove_file(at.join("a")).unwrap();
        symlink("/etc/hostname", at.join("a")).unwrap();
        let spot = Spot::find(&at).unwrap().unwrap();
        let spot = if exchanges { spot } else { spot.without_exchange() };
        let withdrawn = withdraw_from(&spot, &view, remove).unwrap();
        assert_eq!(withdrawn.strange, ["a", "empty/", "np/", "sub/link", "sub/notes"]);
        assert_eq!(withdrawn.strange_at.as_deref(), Some(at.as_path()));
        assert_eq!(names_in(&at), ["a", "empty", "np", "sub"]);
        assert_eq!(std::fs::read(at.join("np/w")).unwrap(), b"weights");
        assert_eq!(names_in(home.path()), ["view"]);
        assert!(matches!(examine(&at).unwrap(), Standing::Foreign { .. }));
    }
}

#[test]
fn a_view_that_is_not_there_any_more_is_not_withdrawn() {
    let home = Home::new();
    let (_segment, target) = segment();
    let at = home.at("parent/view");
    let files = links(&target, &["a"]);
    let publish = || View::publish(&at, None, &files, &[]).unwrap();
    let gone = Withdrawn { was_gone: true, ..Withdrawn::default() };

    let view = publish();
    std::fs::rename(&at, home.at("parent/moved")).unwrap();
    assert_eq!(view.withdraw(false).unwrap(), gone);
    assert_eq!(names_in(&home.at("parent/moved")), ["a"]);

    let view = publish();
    std::fs::rename(&at, home.at("parent/moved2")).unwrap();
    std::fs::create_dir(&at).unwrap();
    std::fs::write(at.join("theirs"), "").unwrap();
    assert_eq!(view.withdraw(true).unwrap(), gone);
    assert_eq!(names_in(&at), ["theirs"]);

    std::fs::rename(home.at("parent"), home.at("earlier")).unwrap();
    let view = publish();
    std::fs::rename(home.at("parent"), home.at("elsewhere")).unwrap();
    assert_eq!(view.withdraw(false).unwrap(), gone);
}

#[test]
fn a_reader_whose_working_directory_is_inside_is_no_hindrance() {
    let home = Home::new();
    let (_segment, target) = segment();
    let at = home.at("view");
    for remove in [false, true] {
        let view = View::publish(&at, None, &links(&target, &["sub/a"]), &[]).unwrap();
        let mut reader = Command::new("cat")
            .current_dir(at.join("sub"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let withdrawn = view.withdraw(remove);
        drop(reader.stdin.take());
        reader.wait().unwrap();
        assert_eq!(withdrawn.unwrap(), Withdrawn::default());
    }
    assert_eq!(names_in(home.path()), [""; 0]);
}

#[test]
fn the_path_never_lacks_while_views_come_and_go() {
    let home = Home::new();
    let (_segment, target) = segment();
    let at = home.at("view");
    std::fs::create_dir(&at).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    let files = links(&target, &["a", "b", "sub/c"]);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut lacks = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                lacks += u32::from(at.symlink_metadata().is_err());
            }
            lacks
        });
        for _ in 0..100 {
            View::publish(&at, None, &files, &[]).unwrap().withdraw(false).unwrap();
        }
        let dead = dead_link();
        drop(View::publish(&at, None, &links(&dead, &["old"]), &[]).unwrap());
        drop(View::publish(&at, None, &files, &[]).unwrap());
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(watcher.join().unwrap(), 0);
    });
    assert_eq!(names_in(home.path()), ["view"]);
}

#[test]
fn only_nothing_an_empty_directory_or_a_dead_view_is_replaced() {
    let home = Home::new();
    let (_segment, target) = segment();
    let at = home.at("view");
    let files = links(&target, &["a"]);
    let refused = |kind: Kind, what: &str| {
        let before = at.symlink_metadata().unwrap().ino();
        let error = View::publish(&at, None, &files, &[]).unwrap_err();
        assert_eq!(error.kind(), kind);
        assert!(error.message().contains(what), "{}", error.message());
        assert_eq!(at.symlink_metadata().unwrap().ino(), before);
        assert_eq!(names_in(home.path()), ["view"], "nothing is left");
    };
    std::fs::write(&at, "words").unwrap();
    refused(Kind::Failed, "not a directory");
    std::fs::remove_file(&at).unwrap();
    symlink("nowhere", &at).unwrap();
    refused(Kind::Failed, "symbolic link");
    std::fs::remove_file(&at).unwrap();
    std::fs::create_dir(&at).unwrap();
    std::fs::write(at.join("file\n"), "").unwrap();
    refused(Kind::Failed, "holds 'file\\n'");
    std::fs::remove_file(at.join("file\n")).unwrap();
    std::fs::create_dir(at.join("sub")).unwrap();
    refused(Kind::Failed, "no link of a view");
    symlink("/etc/passwd", at.join("sub/link")).unwrap();
    refused(Kind::Failed, "no link of a view");
    symlink("/proc/1/fd/0", at.join("one")).unwrap();
    symlink("/proc/2/fd/0", at.join("two")).unwrap();
    refused(Kind::Failed, "several processes");
    std::fs::remove_dir_all(&at).unwrap();
    let view = View::publish(&at, None, &files, &[]).unwrap();
    refused(Kind::InUse, "in use by the daemon with pid");
    view.withdraw(false).unwrap();
    if is_root() {
        drop(View::publish(&at, None, &links(&dead_link(), &["a"]), &[]).unwrap());
        give_away(&at);
        refused(Kind::Failed, "belongs to uid 65534");
    }
}

#[test]
fn a_dead_view_is_known_by_its_links() {
    let home = Home::new();
    let at = home.at("view");
    let dead = dead_link();
    let pid = dead.to_str().unwrap().split('/').nth(2).unwrap().parse().unwrap();
    let mut files = links(&dead, &["a", "sub/b"]);
    files.push(ViewLink { path: "passed".to_owned(), target: "/models/m/passed".into() });
    files.push(ViewLink { path: "relative".to_owned(), target: "../m/x".into() });
    drop(View::publish(&at, Some("kept"), &files, &[directory_link("l", "sub")]).unwrap());
    assert_eq!(examine(&at).unwrap(), Standing::Dead { pid });
    let (_segment, target) = segment();
    let view = View::publish(&at, None, &links(&target, &["new"]), &[]).unwrap();
    assert_eq!(view.notes(), [""; 0]);
    assert_eq!(names_in(&at), ["new"]);
    assert_eq!(names_in(home.path()), ["view"]);
}

#[test]
fn a_process_that_only_has_the_pid_is_no_daemon() {
    let home = Home::new();
    let at = home.at("view");
    let pid = std::process::id();
    let file = std::fs::File::open("/dev/null").unwrap();
    let recycled = PathBuf::from(format!("/proc/{pid}/fd/{}", file.as_raw_fd()));
    drop(View::publish(&at, None, &links(&recycled, &["a"]), &[]).unwrap());
    assert_eq!(examine(&at).unwrap(), Standing::Dead { pid });
    let closed = PathBuf::from(format!("/proc/{pid}/fd/2000000000"));
    drop(View::publish(&at, None, &links(&closed, &["a"]), &[]).unwrap());
    assert_eq!(examine(&at).unwrap(), Standing::Dead { pid });
}

#[test]
fn dead_views_are_removed_and_nothing_else_is() {
    let home = Home::new();
    let at = home.at("view");
    assert_eq!(withdraw_crashed(&home.at("no/parent"), None, true).unwrap(), None);
    assert_eq!(withdraw_crashed(&at, None, true).unwrap(), None);
    assert_eq!(examine(&at).unwrap(), Standing::Absent);
    let dead = dead_link();
    for keep in [true, false] {
        drop(View::publish(&at, None, &links(&dead, &["a", "sub/b"]), &[]).unwrap());
        assert!(withdraw_crashed(&at, None, keep).unwrap().unwrap().starts_with("withdrew the dead view"));
        assert_eq!(examine(&at).unwrap(), if keep { Standing::Empty } else { Standing::Absent });
        assert_eq!(withdraw_crashed(&at, None, keep).unwrap(), None);
    }
    let (_segment, target) = segment();
    drop(View::publish(&at, None, &links(&target, &["a"]), &[]).unwrap());
    for its_daemon in [None, i32::try_from(std::process::id()).ok()] {
        assert_eq!(withdraw_crashed(&at, its_daemon, false).unwrap_err().kind(), Kind::InUse);
    }
    // Another cache has taken the place, which is no matter of the dead one's any more.
    let told = withdraw_crashed(&at, Some(1), false).unwrap().unwrap();
    assert!(told.contains("is left alone: it is a view of the daemon"), "{told}");
    std::fs::create_dir(home.at("mine")).unwrap();
    std::fs::write(home.at("mine/words"), "words").unwrap();
    let told = withdraw_crashed(&home.at("mine"), Some(1), false).unwrap().unwrap();
    assert!(told.contains("is left alone: it holds words"), "{told}");
    assert_eq!(withdraw_crashed(&home.at("mine"), None, false).unwrap(), None, "nobody knows of a daemon");
    assert_eq!(names_in(&at), ["a"]);
}

/// A lock of the name `n`, its default paths with the view at `view`.
fn held(home: &Home) -> (Paths, Lock) {
    std::fs::create_dir_all(home.at("base/run")).unwrap();
    let paths = BaseDir::prepared(home.at("base")).paths(&"n".parse().unwrap());
    let lock = Lock::try_exclusive(&paths.lock).unwrap().unwrap();
    (paths, lock)
}

#[test]
fn leftovers_of_a_killed_daemon_go_and_those_of_a_live_one_stay() {
    let home = Home::new();
    let (_, lock) = held(&home);
    let at = home.at("views/n");
    let spot = Spot::create(&at).unwrap();
    let planned = tree::plan(None, &links(&dead_link(), &["a", "sub/b"]), &[]).unwrap();
    for suffix in [NEW, OLD] {
        let aside = spot.make_aside(suffix).unwrap();
        tree::build(&aside.directory, &planned, &at).unwrap();
    }
    drop(spot.make_aside(NEW).unwrap());
    let at_work = spot.make_aside(NEW).unwrap();
    let with_strangers = spot.make_aside(OLD).unwrap();
    std::fs::write(spot.beside(&with_strangers.name).join("theirs"), "words").unwrap();
    let strangers = with_strangers.name.into_string().unwrap();
    drop(with_strangers.directory);
    std::fs::create_dir(home.at("views/.m.0123456789abcdef.new")).unwrap();
    std::fs::write(home.at("views/.n.0123456789abcdef.new"), "a file").unwrap();

    let lines = remove_leftovers(&at, &lock);
    assert_eq!(lines.iter().filter(|line| line.starts_with("removed the half-made view")).count(), 3);
    assert_eq!(lines.iter().filter(|line| line.contains("it holds theirs")).count(), 1);
    assert_eq!(lines.len(), 4, "{lines:?}");
    let mut left = vec![
        ".m.0123456789abcdef.new".to_owned(),
        ".n.0123456789abcdef.new".to_owned(),
        at_work.name.into_string().unwrap(),
        strangers,
    ];
    left.sort();
    assert_eq!(names_in(&home.at("views")), left);
}

#[test]
fn a_crashed_cache_is_cleaned_up_as_a_whole() {
    let home = Home::new();
    let (paths, lock) = held(&home);
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let view = home.at("elsewhere/view");
    let record = Record {
        schema: crate::registry::record::SCHEMA,
        name: "n".to_owned(),
        pid: 4242,
        host: Host::current(),
        socket: text(&paths.socket),
        view: text(&view),
        kept_dirname: None,
        source: "/models/m".to_owned(),
        pid_file: text(&paths.pid_file),
        log_file: text(&paths.log_file),
        created: "2026-01-01T00:00:00Z".to_owned(),
        tool: "0.1.0".to_owned(),
        failed: None,
    };
    record.write(&paths.record).unwrap();
    drop(View::publish(&view, None, &links(&dead_link(), &["a"]), &[]).unwrap());
    drop(std::os::unix::net::UnixListener::bind(&paths.socket).unwrap());
    let CleanedUp { lines, view_stays } = clean_up_crashed(&paths, Some(&record), &lock, true);
    assert!(view_stays.is_none(), "{view_stays:?}");
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(lines[0].starts_with("withdrew the dead view"), "{lines:?}");
    assert_eq!(examine(&view).unwrap(), Standing::Empty);
    assert_eq!(names_in(&home.at("base/run")), ["n.lock"]);
    assert_eq!(clean_up_crashed(&paths, Some(&record), &lock, true).lines, [""; 0]);
}

#[test]
fn ten_thousand_links_come_and_go() {
    // An ext4 without a journal is slow to reuse the inodes that other tests just removed.
    let home = Home(Some(tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()));
    let (_segment, target) = segment();
    let at = home.at("view");
    let paths: Vec<String> = (0..10_000).map(|n| format!("d{:02}/e{}/f{n}", n % 40, n % 7)).collect();
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let started = std::time::Instant::now();
    let view = View::publish(&at, None, &links(&target, &paths), &[]).unwrap();
    let published = started.elapsed();
    assert_eq!(std::fs::read(at.join("d39/e2/f3999")).unwrap(), b"bytes");
    assert_eq!(tree_of(&at).values().filter(|what| !what.ends_with('/')).count(), 10_000);
    let started = std::time::Instant::now();
    assert_eq!(view.withdraw(false).unwrap(), Withdrawn::default());
    println!("published in {published:?}, withdrawn in {:?}", started.elapsed());
    assert_eq!(names_in(home.path()), ["view"]);
}

#[test]
fn a_failed_publication_leaves_nothing() {
    let home = Home::new();
    let (_segment, target) = segment();
    let too_long = "x".repeat(256);
    let files = links(&target, &["a", "sub/b", &format!("sub/{too_long}"), "z"]);
    let error = View::publish(&home.at("view"), None, &files, &[]).unwrap_err();
    assert!(error.message().contains("name is too long"), "{}", error.message());
    assert_eq!(names_in(home.path()), [""; 0]);
    let error = View::publish(&home.at(&too_long), None, &files[..1], &[]).unwrap_err();
    assert!(error.message().contains("name is too long"), "{}", error.message());
    assert_eq!(names_in(home.path()), [""; 0]);
    std::fs::write(home.at("file"), "").unwrap();
    assert!(View::publish(&home.at("file/view"), None, &files[..1], &[]).is_err());
    assert_eq!(View::publish(Path::new("/"), None, &files[..1], &[]).unwrap_err().kind(), Kind::Usage);
}

#[test]
fn a_parent_that_cannot_be_written_stops_everything_with_a_reason() {
    as_ordinary_user("view::tests::a_parent_that_cannot_be_written_stops_everything_with_a_reason", || {
        let home = Home::new();
        let (_segment, target) = segment();
        let files = links(&target, &["a"]);
        let at = home.at("parent/view");
        let view = View::publish(&at, None, &files, &[]).unwrap();
        assert!(std::fs::write(at.join("np"), "").is_err(), "a view cannot be written to");
        set_mode(&home.at("parent"), 0o555);
        let error = View::publish(&home.at("parent/other"), None, &files, &[]).unwrap_err();
        assert!(error.message().contains("parent/other: permission denied"), "{}", error.message());
        assert!(view.withdraw(false).unwrap_err().message().contains("permission denied"));
        assert_eq!(names_in(&at), ["a"], "a view that cannot be withdrawn stands whole");
        set_mode(&home.at("parent"), 0o755);
        // The process with that pid is root's, so it is not our daemon.
        drop(View::publish(&home.at("init"), None, &links(Path::new("/proc/1/fd/0"), &["a"]), &[]).unwrap());
        assert_eq!(examine(&home.at("init")).unwrap(), Standing::Dead { pid: 1 });
    });
}
