//! The root that generations stand under: looking up, listing, removing.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::format::{Entry, OUR_DIRECTORY, State};
use super::generation::Unfit;
use super::{Generation, tree};
use crate::error::{Error, Kind, Result, shown};
use crate::registry::Name;
use crate::registry::dir::{self, failed};

/// The highest number of what is not ours that a new generation's is above.
const FOREIGN_NUMBER_MAX: u64 = 1 << 32;

/// A directory of generations.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    is_private: bool,
}

/// A generation that cannot be read, and why.
#[derive(Debug)]
pub struct Unreadable {
    /// Where.
    pub path: PathBuf,
    /// Whose it is.
    pub name: Name,
    /// Its number.
    pub number: u64,
    /// Why: a damaged manifest, another version.
    pub error: Error,
}

/// Something that an interrupted command left: it is no generation, and may be removed.
#[derive(Debug)]
pub struct Leftover {
    /// Where.
    pub path: PathBuf,
    /// The name that it belongs to.
    pub name: Name,
    /// The number that the generation had, or was to have.
    pub number: u64,
    /// What it is, in words.
    pub what: &'static str,
    /// Bytes that it takes, blocks as allocated.
    pub bytes: u64,
    /// Somebody works in it: it is no leftover yet.
    pub is_in_use: bool,
}

/// What a root holds. What is not ours is not in it.
#[derive(Debug, Default)]
pub struct Listing {
    /// Sorted by name and number.
    pub generations: Vec<Generation>,
    /// What looks like one and cannot be read.
    pub unreadable: Vec<Unreadable>,
    /// Staging and half-removed directories.
    pub leftovers: Vec<Leftover>,
}

impl Store {
    /// The root at `root`, which must be a directory. Nothing is written.
    ///
    /// # Errors
    ///
    /// [`Kind::NotFound`] where there is none, [`Kind::Usage`] where it is no directory.
    pub fn open(root: &Path) -> Result<Store> {
        let doing = "open the directory of generations";
        let no_directory = || {
            Error::new(Kind::Usage, format!("cannot {doing}: {} is no directory", shown(root)))
                .hint("give the directory that holds the generations")
        };
        let real = std::fs::canonicalize(root).map_err(|cause| match cause.kind() {
            std::io::ErrorKind::NotADirectory => no_directory(),
            _ => Error::io(doing, root, &cause),
        })?;
        if std::fs::metadata(&real).is_ok_and(|found| !found.is_dir()) {
            return Err(no_directory());
        }
        let mut store = Store { root: real, is_private: false };
        let found = fs::fstat(store.open_root()?).map_err(failed("look at", &store.root))?;
        store.is_private = !Mode::from_raw_mode(found.st_mode).intersects(Mode::RWXG | Mode::RWXO);
        Ok(store)
    }

    /// The same, made where it is missing: `is_private` with mode 0700, else by the umask.
    ///
    /// # Errors
    ///
    /// Where it cannot be made, and where a private one belongs to somebody else or may be written by others.
    pub fn create(root: &Path, is_private: bool) -> Result<Store> {
        if !is_private {
            std::fs::create_dir_all(root).map_err(|cause| {
                Error::io("create the directory of generations", root, &cause)
                    .hint("choose another one with --cache-root")
            })?;
            return Store::open(root);
        }
        dir::make_directories(root)?;
        let mut store = Store::open(root)?;
        store.is_private = true;
        let found = fs::fstat(store.open_root()?).map_err(failed("look at", &store.root))?;
        let why = if found.st_uid != dir::our_uid() {
            format!("belongs to another user (uid {})", found.st_uid)
        } else if dir::is_writable_by_others(&found) {
            format!("may be written by others (mode {:o})", found.st_mode & 0o777)
        } else {
            return Ok(store);
        };
        Err(Error::new(Kind::Failed, format!("{} is to be private, but {why}", shown(&store.root)))
            .hint("chmod 700, or choose another directory with --base-dir or --cache-root"))
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether what is made in it is for this user alone: directories 0700 and files 0400, whatever the umask. Else
    /// the umask says who may read.
    pub fn is_private(&self) -> bool {
        self.is_private
    }

    /// The root itself, opened for reading.
    pub(super) fn open_root(&self) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        fs::open(&self.root, flags, Mode::empty())
            .map_err(failed("open the directory of generations", &self.root))
    }

    /// Everything at the top of the root that has a name of ours, sorted: those names are taken. What only is called
    /// so (a file or link, a directory without [`OUR_DIRECTORY`] or of somebody who is not trusted) is left out where
    /// its number would use up those that there are.
    pub(super) fn entries(&self) -> Result<Vec<Entry>> {
        let root = self.open_root()?;
        let mut entries = self.named_like_ours()?;
        entries.retain(|entry| entry.number <= FOREIGN_NUMBER_MAX || self.is_ours(&root, entry));
        Ok(entries)
    }

    fn is_ours(&self, root: &OwnedFd, entry: &Entry) -> bool {
        let Ok(directory) = tree::open_inside(root, OsStr::new(&entry.to_string())) else { return false };
        let is_trusted =
            fs::fstat(&directory).is_ok_and(|found| check_owner(root, &found, &self.path_of(entry)).is_ok());
        // What is built or removed may have it not yet, or no more.
        let has_own =
            || !matches!(fs::statat(&directory, OUR_DIRECTORY, AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT));
        is_trusted && (entry.state != State::Whole || has_own())
    }

    /// Everything at the top of the root that has a name of ours, sorted.
    fn named_like_ours(&self) -> Result<Vec<Entry>> {
        let names = tree::names(self.open_root()?).map_err(failed("read the directory", &self.root))?;
        let mut entries: Vec<Entry> = names.iter().filter_map(|name| Entry::parse(name.to_str()?)).collect();
        entries.sort();
        Ok(entries)
    }

    /// Everything of ours under the root.
    ///
    /// # Errors
    ///
    /// Where the root cannot be read.
    pub fn list(&self) -> Result<Listing> {
        let mut listing = Listing::default();
        for entry in self.named_like_ours()? {
            if entry.state != State::Whole {
                listing.leftovers.extend(self.leftover(&entry)?);
                continue;
            }
            match Generation::open_in(self, &entry) {
                Ok(generation) => listing.generations.push(generation),
                // Removed meanwhile, or somebody else's directory that is called like one of ours.
                Err(Unfit::Absent(_)) => {}
                Err(Unfit::Version(error) | Unfit::Unreadable(error)) => {
                    listing.unreadable.push(Unreadable {
                        path: self.path_of(&entry),
                        name: entry.name,
                        number: entry.number,
                        error,
                    })
                }
            }
        }
        Ok(listing)
    }

    /// The newest whole generation of a name: the one with the highest number. A damaged one is none.
    ///
    /// # Errors
    ///
    /// [`Kind::Verification`] where a newer program made a newer one: an older one is not what is meant then.
    pub fn newest(&self, name: &Name) -> Result<Option<Generation>> {
        for entry in self.named_like_ours()?.into_iter().rev() {
            if entry.state != State::Whole || entry.name != *name {
                continue;
            }
            match Generation::open_in(self, &entry) {
                Ok(generation) => return Ok(Some(generation)),
                Err(Unfit::Version(error)) => return Err(error),
                Err(Unfit::Absent(_) | Unfit::Unreadable(_)) => {}
            }
        }
        Ok(None)
    }

    /// The newest of a name that cannot be read: what is said where there is no whole one.
    ///
    /// # Errors
    ///
    /// Where the root cannot be read.
    pub fn damaged(&self, name: &Name) -> Result<Option<Unreadable>> {
        let listing = self.list()?;
        Ok(listing.unreadable.into_iter().rfind(|one| one.name == *name))
    }

    /// The generation of that name and number.
    ///
    /// # Errors
    ///
    /// As [`Generation::open`].
    pub fn generation(&self, name: &Name, number: u64) -> Result<Generation> {
        Ok(Generation::open_in(self, &Entry::whole(name, number))?)
    }

    pub(super) fn path_of(&self, entry: &Entry) -> PathBuf {
        self.root.join(entry.to_string())
    }
}

/// Refuses what somebody planted in a root that everybody may write to: there only what is ours, root's or the root's
/// owner's is trusted. In a root that a group shares, everybody of the group is.
pub(super) fn check_owner(root: &OwnedFd, found: &Stat, path: &Path) -> Result<()> {
    let around = fs::fstat(root).map_err(failed("look at the directory around", path))?;
    let trusted = [dir::our_uid(), 0, around.st_uid];
    let is_open = Mode::from_raw_mode(around.st_mode).contains(Mode::WOTH);
    if !is_open || trusted.contains(&found.st_uid) {
        return Ok(());
    }
    let why = format!(
        "{} belongs to another user (uid {}), in a directory that everybody may write to",
        shown(path),
        found.st_uid
    );
    Err(Error::new(Kind::Failed, why).hint("use a --cache-root that only those you trust may write to"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::format::NUMBER_MAX;
    use crate::disk::testing::Root;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    #[test]
    fn a_root_is_made_or_must_be_there() {
        let home = tempfile::tempdir().unwrap();
        let missing = home.path().join("missing");
        assert_eq!(Store::open(&missing).unwrap_err().kind(), Kind::NotFound);
        std::fs::write(home.path().join("file"), "").unwrap();
        for file in ["file", "file/x"] {
            let error = Store::open(&home.path().join(file)).unwrap_err();
            assert_eq!(error.kind(), Kind::Usage);
            assert!(error.message().contains("is no directory"), "{error}");
        }
        assert!(Store::create(&home.path().join("file/x"), false).is_err());

        let private = Store::create(&home.path().join("a/private"), true).unwrap();
        assert!(private.is_private());
        assert_eq!(std::fs::metadata(private.root()).unwrap().mode() & 0o777, 0o700);
        let shared = Store::create(&home.path().join("b/shared"), false).unwrap();
        std::fs::set_permissions(shared.root(), PermissionsExt::from_mode(0o755)).unwrap();
        assert!(!Store::open(shared.root()).unwrap().is_private());
        assert!(Store::open(private.root()).unwrap().is_private());
        std::fs::set_permissions(private.root(), PermissionsExt::from_mode(0o770)).unwrap();
        let error = Store::create(private.root(), true).unwrap_err();
        assert!(error.message().contains("may be written by others (mode 770)"), "{error}");
    }

    #[test]
    fn all_of_ours_is_listed_and_nothing_else() {
        let root = Root::new();
        assert!(root.store.list().unwrap().generations.is_empty());
        for (name, number) in [("b", 10), ("b", 9), ("a", 1)] {
            root.add(name, number, &[("f", b"1")]);
        }
        root.add("c", 1, &[("f", b"1")]);
        std::fs::write(root.path("c@1/.iloader/manifest.json"), "{}").unwrap();
        let staging = root.add_staging("a", 2, &[1; 100_000]);
        std::fs::create_dir(root.path(".a@1.removing")).unwrap();
        std::fs::create_dir(root.path("foreign@1")).unwrap();
        std::fs::create_dir(root.path("d")).unwrap();
        std::fs::write(root.path("e@1"), "").unwrap();
        symlink(root.path("a@1"), root.path("f@1")).unwrap();
        symlink(&staging, root.path(".f@2.staging")).unwrap();

        let listing = root.store.list().unwrap();
        let names: Vec<String> = listing.generations.iter().map(|g| g.entry().to_string()).collect();
        assert_eq!(names, ["a@1", "b@9", "b@10"]);
        let unreadable = &listing.unreadable[..];
        assert_eq!(unreadable.len(), 1);
        assert_eq!((unreadable[0].path.clone(), unreadable[0].number), (root.path("c@1"), 1));
        let found: Vec<(&str, u64, bool)> =
            listing.leftovers.iter().map(|left| (left.what, left.number, left.is_in_use)).collect();
        assert_eq!(found, [("half removed", 1, false), ("an interrupted copy", 2, false)]);
        let blocks = std::fs::metadata(staging.join("finished")).unwrap().blocks() * 512;
        assert!(listing.leftovers[1].bytes >= blocks && blocks > 0);
    }

    #[test]
    fn the_newest_has_the_highest_number_and_is_whole() {
        let root = Root::new();
        let newest = || {
            let found = root.store.newest(&"m".parse().unwrap());
            found.map(|found| found.map(|generation| generation.number()))
        };
        assert_eq!(newest().unwrap(), None);
        for number in [9, 10, 11] {
            root.add("m", number, &[("f", b"1")]);
        }
        root.add("m2", 12, &[("f", b"1")]);
        root.add_staging("m", 13, b"x");
        assert_eq!(newest().unwrap(), Some(11));
        let manifest = root.path("m@11/.iloader/manifest.json");
        std::fs::write(&manifest, "torn").unwrap();
        assert_eq!(newest().unwrap(), Some(10), "a damaged one is none");
        std::fs::write(&manifest, r#"{"schema": 2}"#).unwrap();
        assert_eq!(newest().unwrap_err().kind(), Kind::Verification, "nobody guesses past a newer program's");
        assert_eq!(root.store.generation(&"m".parse().unwrap(), 9).unwrap().number(), 9);
    }

    #[test]
    fn numbers_are_never_given_twice() {
        let root = Root::new();
        let name: Name = "m".parse().unwrap();
        let lock = root.store.try_lock_name(&name).unwrap().unwrap();
        assert_eq!(root.store.next_number(&lock).unwrap(), 1);
        assert_eq!(root.store.next_number(&lock).unwrap(), 2, "whatever became of 1");
        root.add_staging("m", 7, b"x");
        assert_eq!(root.store.next_number(&lock).unwrap(), 8);
        assert!(root.store.try_lock_name(&name).unwrap().is_none(), "held");
        assert!(root.store.try_lock_name(&"n".parse().unwrap()).unwrap().is_some());
        drop(lock);
        let generation = root.add("m", 20, &[("f", b"1")]);
        root.store.remove(&generation).unwrap();
        let lock = root.store.try_lock_name(&name).unwrap().unwrap();
        assert_eq!(root.store.next_number(&lock).unwrap(), 21);
        drop(lock);
        // What a power failure may leave of the file.
        std::fs::write(root.path(".iloader/m.lock"), [0; 3]).unwrap();
        root.add("m", 30, &[("f", b"1")]);
        let lock = root.store.try_lock_name(&name).unwrap().unwrap();
        assert_eq!(root.store.next_number(&lock).unwrap(), 31);
        std::fs::write(root.path(".iloader/m.lock"), format!("{}\n", u64::MAX)).unwrap();
        // What is not ours does not count.
        std::fs::create_dir(root.path(&format!("m@{NUMBER_MAX}"))).unwrap();
        std::fs::create_dir(root.path(&format!("m@{}", u64::MAX))).unwrap();
        std::fs::write(root.path(&format!("m@{}", NUMBER_MAX - 1)), "").unwrap();
        assert_eq!(root.store.next_number(&lock).unwrap(), 31);
        assert_eq!(root.store.next_number(&lock).unwrap(), 32);
        std::fs::write(root.path(".iloader/m.lock"), format!("{NUMBER_MAX}\n")).unwrap();
        assert!(root.store.next_number(&lock).unwrap_err().message().contains("no number left"));
    }

    #[test]
    fn what_is_private_is_so_whatever_the_umask_and_what_is_shared_can_be_locked() {
        let home = tempfile::tempdir().unwrap();
        let private = Store::create(&home.path().join("private"), true).unwrap();
        drop(private.try_lock_name(&"m".parse().unwrap()).unwrap().unwrap());
        let mode = |path: PathBuf| std::fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(private.root().join(OUR_DIRECTORY)), 0o700);
        assert_eq!(mode(private.root().join(".iloader/m.lock")), 0o600);
        let shared = Store::create(&home.path().join("shared"), false).unwrap();
        std::fs::set_permissions(shared.root(), PermissionsExt::from_mode(0o2775)).unwrap();
        let shared = Store::open(shared.root()).unwrap();
        std::fs::create_dir(shared.root().join(OUR_DIRECTORY)).unwrap();
        std::fs::set_permissions(shared.root().join(OUR_DIRECTORY), PermissionsExt::from_mode(0o2775))
            .unwrap();
        drop(shared.try_lock_name(&"m".parse().unwrap()).unwrap().unwrap());
        assert_eq!(mode(shared.root().join(".iloader/m.lock")) & 0o660, 0o660, "the group may build too");
    }
}
