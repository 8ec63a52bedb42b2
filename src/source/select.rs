//! The selection of a model directory: which files are taken, and where each really is.
//!
//! Links are followed, to files and to directories. A link to a directory whose files are selected
//! under their own name as well stays a link. What the patterns leave out is never looked at closely:
//! it may be dangling, unreadable or badly named. Sockets, pipes and devices are never opened.
//!
//! The tree may change while it is walked. A selection is therefore what was seen, with the identity of
//! each file; who opens `SelectedFile::real` compares that identity with the descriptor in hand.

use std::collections::{HashMap, HashSet};
use std::fs::{self, DirEntry, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::pattern::{Globs, Inclusions, flag_leaving_out};
use super::{DirectoryLink, Excluded, Identity, SelectedFile, Selection, advice};
use crate::error::{Error, Kind, Result, shown};
use crate::manifest::{MANIFEST_FILE, OUR_DIRECTORY, SUMS_FILE, SelectionRules};

/// What is left out unless `--exclude` replaces the list: bookkeeping of version control, download
/// tools, editors and engines, and what is half written.
pub const BUILT_IN_EXCLUSIONS: &[&str] = &[
    ".git/",
    ".gitattributes",
    ".gitignore",
    ".gitmodules",
    ".cache/",
    ".huggingface/",
    ".locks/",
    ".no_exist/",
    ".msc",
    ".mdl",
    ".mv",
    "._____temp/",
    "*.lock",
    "*.incomplete",
    "*.part",
    "*.partial",
    "*.tmp",
    "*.temp",
    "*.aria2",
    "*.crdownload",
    "*.download",
    "*~",
    ".*.sw?",
    ".nfs*",
    ".fuse_hidden*",
    ".DS_Store",
    "._*",
    "Thumbs.db",
    "desktop.ini",
    "lost+found/",
    ".Trash*/",
    "__pycache__/",
    "*.pyc",
    ".ipynb_checkpoints/",
    ".venv/",
    ".idea/",
    ".vscode/",
    "np/",
    "presharded/",
    "_tmp_presharding/",
];

/// How a message names the option behind [`BUILT_IN_EXCLUSIONS`].
const BUILT_IN: &str = "the built-in exclusion";

/// The most files of one selection: each takes a descriptor of the daemon. Models have tens to a few
/// thousand.
pub const FILES_MAX: usize = 200_000;

/// The most directory entries looked at, links to directories counted each time they are followed. It
/// keeps a mistyped `/` from being walked to its end.
pub const ENTRIES_MAX: usize = 1_000_000;

/// The most directories inside each other.
pub const DEPTH_MAX: usize = 64;

/// The most links followed for one name, as in the kernel.
const LINKS_MAX: usize = 40;

/// The most sockets, pipes and devices that are named one by one.
const STRANGE_NAMED_MAX: usize = 10;

/// The files of the directory `root` that `rules` take, sorted by path.
///
/// Fails with [`Kind::Usage`] for a wrong pattern or a file in place of the directory,
/// [`Kind::NotFound`] where the directory is missing, a link dangles or nothing is selected, and for
/// what the selection takes but cannot be used: an unreadable file or directory, a name that is not
/// UTF-8, a link to a directory that holds it.
pub fn select(root: &Path, rules: &SelectionRules) -> Result<Selection> {
    select_within(root, rules, Limits { files: FILES_MAX, entries: ENTRIES_MAX })
}

/// Whether `rules` take a file, and whether they pass it through, going by its path in the source alone.
///
/// # Errors
///
/// [`Kind::Usage`] for a wrong pattern.
#[doc(hidden)]
pub fn judge(rules: &SelectionRules, path: &Path) -> Result<(bool, bool)> {
    let filter = Filter::new(rules)?;
    let taken = filter.included.cover(path) && !filter.excluded.cover(path);
    Ok((taken, taken && filter.passed.cover(path)))
}

/// Which of some files the `--passthrough` patterns mean, going by their paths alone.
///
/// # Errors
///
/// [`Kind::Usage`] for a wrong pattern.
pub fn passed_through<'a>(patterns: &[String], paths: impl Iterator<Item = &'a str>) -> Result<Vec<bool>> {
    let passed = patterns.iter().map(|pattern| ("--passthrough", pattern.as_str()));
    let passed = Globs::leaving_out(passed)?;
    Ok(paths.map(|path| passed.cover(Path::new(path))).collect())
}

/// How much is selected and looked at, so that a test need not make a million files.
#[derive(Clone, Copy)]
struct Limits {
    files: usize,
    entries: usize,
}

fn select_within(root: &Path, rules: &SelectionRules, limits: Limits) -> Result<Selection> {
    let filter = Filter::new(rules)?;
    let root = resolve_root(root)?;
    let mut walk = Walk::new(&root, &filter, limits);
    walk.everything()?;
    let Walk { mut files, mut links, mut excluded, strange, .. } = walk;

    files.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    links.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    excluded.sort_by(|a, b| a.path.cmp(&b.path));
    if files.is_empty() {
        return Err(nothing_selected(&root, &filter, &excluded, &strange));
    }
    let mut warnings = filter.unused(&files);
    warnings.extend(strange_warnings(&strange));
    let (files, directory_links) = fold(files, links);
    let links: HashSet<&str> = directory_links.iter().map(|link| link.path.as_str()).collect();
    excluded.retain(|left_out| !is_below_any(&left_out.path, &links));

    let mut selection = Selection { root, rules: rules.clone(), files, directory_links, excluded, warnings };
    let advised = advice::warnings(&selection);
    selection.warnings.extend(advised);
    Ok(selection)
}

/// What is never a part of the model in a generation that is loaded from as a directory: our own directory, and our
/// sums, which stand in it where the source itself has something of that name.
fn own_files(root: &Path) -> Vec<&'static str> {
    let ours = root.join(OUR_DIRECTORY);
    let is_file = |name: &str| fs::symlink_metadata(ours.join(name)).is_ok_and(|found| found.is_file());
    match (is_file(MANIFEST_FILE), is_file(SUMS_FILE)) {
        (false, _) => Vec::new(),
        (true, true) => vec![OUR_DIRECTORY],
        (true, false) => vec![OUR_DIRECTORY, SUMS_FILE],
    }
}

/// The directory itself, absolute and without links.
fn resolve_root(root: &Path) -> Result<PathBuf> {
    let real = fs::canonicalize(root).map_err(|cause| Error::io("open the model directory", root, &cause))?;
    let metadata =
        fs::metadata(&real).map_err(|cause| Error::io("open the model directory", root, &cause))?;
    if !metadata.is_dir() {
        let error = Error::new(Kind::Usage, format!("{} is not a directory", shown(root)));
        return Err(match (real.parent(), real.file_name()) {
            (Some(parent), Some(name)) if metadata.is_file() => {
                error.hint(format!("give its directory: {} --pattern {}", shown(parent), shown(name)))
            }
            _ => error.hint("give the directory that holds the model's files"),
        });
    }
    if real.to_str().is_none() {
        return Err(not_utf8(&real).hint("rename the directory, or reach the files through another one"));
    }
    Ok(real)
}

/// The patterns of one selection, compiled.
struct Filter {
    included: Inclusions,
    excluded: Globs,
    passed: Globs,
}

impl Filter {
    fn new(rules: &SelectionRules) -> Result<Filter> {
        let mut exclusions: Vec<(&'static str, &str)> = match &rules.exclude {
            Some(given) => given.iter().map(|pattern| ("--exclude", pattern.as_str())).collect(),
            None => BUILT_IN_EXCLUSIONS.iter().map(|pattern| (BUILT_IN, *pattern)).collect(),
        };
        exclusions.extend(rules.also_exclude.iter().map(|pattern| ("--also-exclude", pattern.as_str())));
        let passed = rules.passthrough.iter().map(|pattern| ("--passthrough", pattern.as_str()));
        Ok(Filter {
            included: Inclusions::new(rules.patterns.iter().map(String::as_str))?,
            excluded: Globs::leaving_out(exclusions)?,
            passed: Globs::leaving_out(passed)?,
        })
    }

    /// A warning for each `--pattern` and `--passthrough` that took no part in the selection.
    fn unused(&self, files: &[SelectedFile]) -> Vec<String> {
        let mut warnings = Vec::new();
        // The patterns were compiled together before, so they compile alone.
        for pattern in self.included.patterns() {
            let used = Inclusions::new([pattern])
                .is_ok_and(|alone| files.iter().any(|file| alone.cover(Path::new(&file.path))));
            if !used {
                warnings.push(format!("--pattern {} selects no file", shown(pattern)));
            }
        }
        for pattern in self.passed.patterns() {
            let used = Globs::leaving_out([("--passthrough", pattern)])
                .is_ok_and(|alone| files.iter().any(|file| alone.cover(Path::new(&file.path))));
            if !used {
                warnings.push(format!("--passthrough {} matches no selected file", shown(pattern)));
            }
        }
        warnings
    }
}

/// A directory as the selection sees it.
#[derive(Default)]
struct Place {
    /// Relative to the root; empty: the root itself.
    path: PathBuf,
    /// A `--pattern` took the directory with everything below it.
    taken: bool,
    /// A `--passthrough` did.
    passed: bool,
}

struct Walk<'a> {
    root: &'a Path,
    filter: &'a Filter,
    limits: Limits,
    files: Vec<SelectedFile>,
    /// Links to directories inside the root. Their files are in `files` too until [`fold`].
    links: Vec<DirectoryLink>,
    excluded: Vec<Excluded>,
    /// Sockets, pipes and devices, each with what it is.
    strange: Vec<(PathBuf, &'static str)>,
    /// What of the root is our own, where it is a generation.
    own: Vec<&'static str>,
    entries: usize,
    /// Directories that links point into, resolved: a snapshot's links all point into one.
    resolved: HashMap<PathBuf, PathBuf>,
}

/// A directory to be walked, and where it stands.
struct Below {
    place: Place,
    real: PathBuf,
}

/// A directory that is being walked, with the entries still to be looked at.
struct Level {
    place: Place,
    real: PathBuf,
    entries: std::vec::IntoIter<DirEntry>,
}

impl<'a> Walk<'a> {
    fn new(root: &'a Path, filter: &'a Filter, limits: Limits) -> Walk<'a> {
        Walk {
            root,
            filter,
            limits,
            files: Vec::new(),
            links: Vec::new(),
            excluded: Vec::new(),
            strange: Vec::new(),
            own: own_files(root),
            entries: 0,
            resolved: HashMap::new(),
        }
    }

    /// Everything below the root. Not by recursion: a caller may have left us a small stack.
    fn everything(&mut self) -> Result<()> {
        let mut levels = vec![self.level(Below { place: Place::default(), real: self.root.to_owned() })?];
        while let Some(level) = levels.last_mut() {
            let Some(entry) = level.entries.next() else {
                levels.pop();
                continue;
            };
            let Some(below) = self.entry(&levels, &entry)? else { continue };
            if levels.len() > DEPTH_MAX {
                return Err(self
                    .failed(&below.place.path, format!("is more than {DEPTH_MAX} directories deep"))
                    .hint(leave_out_hint(&below.place.path, true)));
            }
            levels.push(self.level(below)?);
        }
        Ok(())
    }

    fn level(&mut self, Below { place, real }: Below) -> Result<Level> {
        let entries = self.entries(&place, &real)?.into_iter();
        Ok(Level { place, real, entries })
    }

    /// One entry of the last of `levels`, and the directory that it leads into.
    fn entry(&mut self, levels: &[Level], entry: &DirEntry) -> Result<Option<Below>> {
        let Level { place, real, .. } = levels.last().expect("an entry is one of a directory");
        let path = place.path.join(entry.file_name());
        if self.own.iter().any(|own| path == Path::new(own)) {
            return Ok(None);
        }
        let kind = entry.file_type().map_err(|cause| Error::io("look at", &self.root.join(&path), &cause))?;
        if kind.is_symlink() {
            return self.link(levels, path, &real.join(entry.file_name()));
        }
        if kind.is_dir() {
            return Ok(self.is_entered(place, &path).then(|| self.below(place, path, entry.path())));
        }
        self.file(place, path, entry).map(|()| None)
    }

    /// The entries of a directory in the order of their names, so that errors come in one order too.
    fn entries(&mut self, place: &Place, real: &Path) -> Result<Vec<DirEntry>> {
        let failed = |cause: io::Error| {
            let error = Error::io("read the directory", real, &cause);
            if place.path.as_os_str().is_empty() {
                error
            } else {
                error.hint(leave_out_hint(&place.path, true))
            }
        };
        let mut entries = Vec::new();
        for entry in fs::read_dir(real).map_err(failed)? {
            entries.push(entry.map_err(failed)?);
            self.entries += 1;
            if self.entries > self.limits.entries {
                return Err(Error::new(
                    Kind::Failed,
                    format!(
                        "{} holds more than {} files and directories",
                        shown(self.root),
                        self.limits.entries
                    ),
                )
                .hint("give the directory of one model, or leave directories out with --also-exclude"));
            }
        }
        entries.sort_by_cached_key(DirEntry::file_name);
        Ok(entries)
    }

    /// An entry that is neither a link nor a directory.
    fn file(&mut self, place: &Place, path: PathBuf, entry: &DirEntry) -> Result<()> {
        let bytes = || entry.metadata().map_or(0, |metadata| metadata.len());
        if let Some(index) = self.filter.excluded.find(&path, false) {
            self.leave_out(&path, Some(index), bytes());
            return Ok(());
        }
        if !self.is_taken(place, &path) {
            self.leave_out(&path, None, bytes());
            return Ok(());
        }
        let metadata = entry.metadata().map_err(|cause| self.vanished(&path, &cause))?;
        self.take(place, &path, entry.path(), &metadata)
    }

    /// The link `here` in the last of `levels`, wherever it leads.
    fn link(&mut self, levels: &[Level], path: PathBuf, here: &Path) -> Result<Option<Below>> {
        let Level { place, .. } = levels.last().expect("a link stands in a directory");
        if let Some(index) = self.filter.excluded.find(&path, false) {
            let bytes = fs::metadata(here).ok().filter(Metadata::is_file).map_or(0, |file| file.len());
            self.leave_out(&path, Some(index), bytes);
            return Ok(None);
        }
        match self.follow(here) {
            Ok((target, metadata)) if metadata.is_dir() => {
                return self.linked_directory(levels, path, target);
            }
            Ok((target, metadata)) if self.is_taken(place, &path) => {
                self.take(place, &path, target, &metadata)?;
            }
            Ok((_, metadata)) => self.leave_out(&path, None, metadata.len()),
            Err(cause) => {
                // Nobody can know what it was meant to lead to, so both kinds of pattern count.
                let excluded = self.filter.excluded.find(&path, true);
                let wanted = self.is_taken(place, &path) || self.filter.included.name_as_directory(&path);
                if excluded.is_none() && wanted {
                    return Err(self.bad_link(&path, here, &cause));
                }
                self.leave_out(&path, excluded, 0);
            }
        }
        Ok(None)
    }

    fn linked_directory(
        &mut self,
        levels: &[Level],
        path: PathBuf,
        target: PathBuf,
    ) -> Result<Option<Below>> {
        let place = &levels.last().expect("a link stands in a directory").place;
        if !self.is_entered(place, &path) {
            return Ok(None);
        }
        // Below an ancestor of any directory on the way here, this link would be met again.
        if levels.iter().any(|level| level.real.starts_with(&target)) {
            return Err(self
                .failed(&path, format!("is a link to {}, a directory that holds it", shown(&target)))
                .hint(leave_out_hint(&path, true)));
        }
        if let (Ok(inside), Some(link)) = (target.strip_prefix(self.root), path.to_str())
            && let Some(inside) = inside.to_str()
        {
            self.links.push(DirectoryLink { path: link.to_owned(), target: inside.to_owned() });
        }
        Ok(Some(self.below(place, path, target)))
    }

    /// Whether something in this directory can be selected; notes it as left out otherwise.
    fn is_entered(&mut self, place: &Place, path: &Path) -> bool {
        if let Some(index) = self.filter.excluded.find(path, true) {
            self.leave_out(path, Some(index), 0);
            return false;
        }
        let included = &self.filter.included;
        if place.taken || included.find(path, true).is_some() || included.may_lead_into(path) {
            return true;
        }
        self.leave_out(path, None, 0);
        false
    }

    fn below(&self, place: &Place, path: PathBuf, real: PathBuf) -> Below {
        let taken = place.taken || self.filter.included.find(&path, true).is_some();
        let passed = place.passed || self.filter.passed.find(&path, true).is_some();
        Below { place: Place { path, taken, passed }, real }
    }

    /// A `--pattern` takes this file, or there is none.
    fn is_taken(&self, place: &Place, path: &Path) -> bool {
        let included = &self.filter.included;
        place.taken || included.takes_all() || included.find(path, false).is_some()
    }

    /// Selects what is at `real`, which the patterns take, if it is a file that can be used.
    fn take(&mut self, place: &Place, path: &Path, real: PathBuf, metadata: &Metadata) -> Result<()> {
        if !metadata.is_file() {
            self.strange.push((path.to_owned(), what_it_is(metadata)));
            return Ok(());
        }
        let Some(name) = path.to_str() else {
            return Err(
                not_utf8(&self.root.join(path)).hint("rename it, or leave it out with --also-exclude")
            );
        };
        let passthrough = place.passed || self.filter.passed.find(path, false).is_some();
        // A file that is passed through is not opened by us.
        if !passthrough
            && let Err(cause @ (rustix::io::Errno::ACCESS | rustix::io::Errno::PERM)) =
                accessat(CWD, &real, Access::READ_OK, AtFlags::EACCESS)
        {
            return Err(
                Error::io("read", &self.root.join(path), &cause.into()).hint(leave_out_hint(path, false))
            );
        }
        if self.files.len() == self.limits.files {
            return Err(Error::new(
                Kind::Failed,
                format!("more than {} files are selected in {}", self.limits.files, shown(self.root)),
            )
            .hint("give the directory of one model, or select fewer files (--pattern, --also-exclude)"));
        }
        let identity = Identity::of(metadata);
        self.files.push(SelectedFile { path: name.to_owned(), real, identity, passthrough });
        Ok(())
    }

    fn leave_out(&mut self, path: &Path, pattern: Option<usize>, bytes: u64) {
        let pattern = pattern.map(|index| self.filter.excluded.given(index).to_owned());
        self.excluded.push(Excluded { path: path.to_string_lossy().into_owned(), pattern, bytes });
    }

    /// Where a link leads in the end: its path without any link, and what is there. Every directory on
    /// the way is resolved once, however many links point into it.
    fn follow(&mut self, link: &Path) -> io::Result<(PathBuf, Metadata)> {
        let mut at = link.to_owned();
        for _ in 0..LINKS_MAX {
            let parent = at.parent().unwrap_or(Path::new("/"));
            let target = parent.join(fs::read_link(&at)?);
            let found = self.resolve_parent(target).and_then(|next| {
                let metadata = fs::symlink_metadata(&next)?;
                Ok((next, metadata))
            });
            match found {
                Ok((next, metadata)) if metadata.is_symlink() => at = next,
                Ok(found) => return Ok(found),
                // The links in /proc/<pid>/fd lead to files that have no path.
                Err(cause) => return fs::metadata(&at).map(|metadata| (at, metadata)).map_err(|_| cause),
            }
        }
        Err(io::Error::from_raw_os_error(libc::ELOOP))
    }

    /// `path` with everything resolved but its last part.
    fn resolve_parent(&mut self, path: PathBuf) -> io::Result<PathBuf> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return fs::canonicalize(path);
        };
        if let Some(resolved) = self.resolved.get(parent) {
            return Ok(resolved.join(name));
        }
        let resolved = fs::canonicalize(parent)?;
        let joined = resolved.join(name);
        self.resolved.insert(parent.to_owned(), resolved);
        Ok(joined)
    }

    fn bad_link(&self, path: &Path, here: &Path, cause: &io::Error) -> Error {
        let target = fs::read_link(here).map_or_else(|_| "nowhere".to_owned(), |target| shown(&target));
        let error = match cause.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => self
                .failed(path, format!("is a dangling link: {target} does not exist"))
                .with_kind(Kind::NotFound),
            Some(libc::ELOOP) => self.failed(path, format!("is a link in a circle of links, to {target}")),
            _ => Error::io("follow the link", &self.root.join(path), cause),
        };
        error.hint(leave_out_hint(path, false))
    }

    fn vanished(&self, path: &Path, cause: &io::Error) -> Error {
        let error = Error::io("look at", &self.root.join(path), cause);
        if error.kind() != Kind::NotFound {
            return error;
        }
        self.failed(path, "disappeared while its directory was read".to_owned())
            .with_kind(Kind::SourceChanged)
    }

    fn failed(&self, path: &Path, why: String) -> Error {
        Error::new(Kind::Failed, format!("{} {why}", shown(self.root.join(path))))
    }
}

fn not_utf8(path: &Path) -> Error {
    Error::new(Kind::Failed, format!("the name {} is not UTF-8", shown(path)))
}

fn leave_out_hint(path: &Path, is_directory: bool) -> String {
    match path.to_str() {
        Some(path) if !path.contains(char::is_control) => {
            format!("repair it, or leave it out: {}", flag_leaving_out(path, is_directory))
        }
        _ => "repair it, or leave it out with --also-exclude".to_owned(),
    }
}

fn what_it_is(metadata: &Metadata) -> &'static str {
    let kind = metadata.file_type();
    if kind.is_socket() {
        "a socket"
    } else if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_block_device() || kind.is_char_device() {
        "a device"
    } else {
        "no regular file"
    }
}

fn strange_warnings(strange: &[(PathBuf, &'static str)]) -> Vec<String> {
    let named = strange.iter().take(STRANGE_NAMED_MAX);
    let mut warnings: Vec<String> =
        named.map(|(path, what)| format!("{} is {what} and is skipped", shown(path))).collect();
    if strange.len() > STRANGE_NAMED_MAX {
        let more = strange.len() - STRANGE_NAMED_MAX;
        warnings.push(format!("{more} more sockets, pipes and devices are skipped"));
    }
    warnings
}

/// Replaces the files seen through a directory link by the link, where the same files are selected
/// under the directory's own name: then both show the same tree. Both lists are sorted by path.
fn fold(files: Vec<SelectedFile>, links: Vec<DirectoryLink>) -> (Vec<SelectedFile>, Vec<DirectoryLink>) {
    let mut kept = HashSet::new();
    let mut removed: Vec<Range<usize>> = Vec::new();
    // An outer link comes before those that were seen through it.
    for link in &links {
        if is_below_any(&link.path, &kept) {
            continue;
        }
        let (seen, own) = (below(&files, &link.path), below(&files, &link.target));
        let same = seen.len() == own.len()
            && files[seen.clone()].iter().zip(&files[own]).all(|(a, b)| {
                a.path[link.path.len()..] == b.path[link.target.len()..]
                    && (&a.real, a.identity, a.passthrough) == (&b.real, b.identity, b.passthrough)
            });
        if same && !seen.is_empty() {
            removed.push(seen);
            kept.insert(link.path.as_str());
        }
    }
    let kept = links.iter().filter(|link| kept.contains(link.path.as_str())).cloned().collect();
    removed.sort_unstable_by_key(|range| range.start);
    let mut gone = removed.into_iter().peekable();
    let files = files.into_iter().enumerate().filter_map(|(index, file)| {
        while gone.next_if(|range| range.end <= index).is_some() {}
        (!gone.peek().is_some_and(|range| range.contains(&index))).then_some(file)
    });
    (files.collect(), kept)
}

/// The files below a directory, in a list sorted by path.
fn below(files: &[SelectedFile], directory: &str) -> Range<usize> {
    let first = format!("{directory}/");
    // `0` is the character behind `/`.
    let behind = format!("{directory}0");
    let start = files.partition_point(|file| file.path < first);
    let end = files.partition_point(|file| file.path < behind);
    start..end
}

fn is_below_any(path: &str, directories: &HashSet<&str>) -> bool {
    !directories.is_empty() && path.match_indices('/').any(|(end, _)| directories.contains(&path[..end]))
}

/// The error for an empty selection: what left everything out.
fn nothing_selected(
    root: &Path,
    filter: &Filter,
    excluded: &[Excluded],
    strange: &[(PathBuf, &'static str)],
) -> Error {
    let nothing =
        |why: String| Error::new(Kind::NotFound, format!("nothing is selected in {}: {why}", shown(root)));
    if excluded.is_empty() {
        let why = strange.first().map_or("it holds no files".to_owned(), |(path, what)| {
            format!("it holds no regular files ({} is {what})", shown(path))
        });
        return nothing(why).hint("is the download complete?");
    }
    let mut counts: Vec<(Option<&str>, usize)> = Vec::new();
    for left_out in excluded {
        let pattern = left_out.pattern.as_deref();
        match counts.iter_mut().find(|row| row.0 == pattern) {
            Some(row) => row.1 += 1,
            None => counts.push((pattern, 1)),
        }
    }
    counts.sort_by_key(|row| std::cmp::Reverse(row.1));
    const REASONS_MAX: usize = 4;
    let mut reasons: Vec<String> = counts
        .iter()
        .take(REASONS_MAX)
        .map(|(pattern, count)| reason_left_out(filter, *pattern, *count))
        .collect();
    if counts.len() > REASONS_MAX {
        reasons.push(format!("{} more patterns leave out the rest", counts.len() - REASONS_MAX));
    }
    nothing(reasons.join("; "))
        .hint("give another --pattern, or replace the list of exclusions with --exclude")
}

fn reason_left_out(filter: &Filter, pattern: Option<&str>, count: usize) -> String {
    let entries = if count == 1 { "1 entry".to_owned() } else { format!("{count} entries") };
    let Some(pattern) = pattern else {
        let patterns: Vec<String> = filter.included.patterns().take(4).map(shown).collect();
        return format!("--pattern {} leaves out {entries}", patterns.join(" "));
    };
    let option = filter.excluded.option_of(pattern);
    format!("{option} {} leaves out {entries}", shown(pattern))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    #[test]
    fn what_is_our_own_in_a_generation_is_never_selected() {
        let root = crate::disk::testing::Root::new();
        let selected = |files: &[(&str, &[u8])], number, rules: &SelectionRules| {
            let generation = root.add("m", number, files);
            let selection = select(generation.path(), rules).unwrap();
            selection.files.into_iter().map(|file| file.path).collect::<Vec<_>>()
        };
        let all = SelectionRules { exclude: Some(Vec::new()), ..SelectionRules::default() };
        for (number, rules) in [(1, &SelectionRules::default()), (2, &all)] {
            let files: &[(&str, &[u8])] = &[("a", b"1"), ("d/SHA256SUMS", b"2"), ("d/.iloader/x", b"3")];
            assert_eq!(selected(files, number, rules), ["a", "d/.iloader/x", "d/SHA256SUMS"]);
        }
        assert_eq!(selected(&[("SHA256SUMS", b"1"), ("a", b"1")], 3, &all), ["SHA256SUMS", "a"]);
        // No generation: nothing of ours.
        let tree = Tree::new(&["SHA256SUMS", "a", ".iloader/x"]);
        assert_eq!(select(tree.root(), &all).unwrap().files.len(), 3);
    }

    /// A directory to select from, removed with everything in it.
    struct Tree {
        directory: tempfile::TempDir,
    }

    impl Tree {
        fn new(files: &[&str]) -> Tree {
            let tree = Tree { directory: tempfile::tempdir().unwrap() };
            files.iter().for_each(|file| tree.write(file));
            tree
        }

        fn root(&self) -> &Path {
            self.directory.path()
        }

        fn write(&self, path: &str) {
            let file = self.root().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, path).unwrap();
        }

        fn link(&self, path: &str, target: impl AsRef<Path>) {
            let link = self.root().join(path);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(target, link).unwrap();
        }

        fn select(&self, rules: &SelectionRules) -> Result<Selection> {
            select(self.root(), rules)
        }

        #[track_caller]
        fn paths(&self, rules: &SelectionRules) -> Vec<String> {
            self.select(rules).unwrap().files.into_iter().map(|file| file.path).collect()
        }

        #[track_caller]
        fn refusal(&self, rules: &SelectionRules) -> Error {
            self.select(rules).unwrap_err()
        }
    }

    /// A directory that nobody may enter, until the test is over and it is to be removed.
    struct Closed(PathBuf);

    impl Closed {
        fn new(directory: PathBuf) -> Closed {
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o000)).unwrap();
            Closed(directory)
        }
    }

    impl Drop for Closed {
        fn drop(&mut self) {
            let _ = fs::set_permissions(&self.0, fs::Permissions::from_mode(0o755));
        }
    }

    fn strings(patterns: &[&str]) -> Vec<String> {
        patterns.iter().map(|pattern| (*pattern).to_owned()).collect()
    }

    fn patterns(patterns: &[&str]) -> SelectionRules {
        SelectionRules { patterns: strings(patterns), ..SelectionRules::default() }
    }

    fn exclude(patterns: &[&str]) -> SelectionRules {
        SelectionRules { exclude: Some(strings(patterns)), ..SelectionRules::default() }
    }

    fn also_exclude(patterns: &[&str]) -> SelectionRules {
        SelectionRules { also_exclude: strings(patterns), ..SelectionRules::default() }
    }

    fn default() -> SelectionRules {
        SelectionRules::default()
    }

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    #[test]
    fn files_are_sorted_by_path() {
        let tree = Tree::new(&["b", "a/z", "a-b", "a.json", ".hidden", "B"]);
        assert_eq!(tree.paths(&default()), [".hidden", "B", "a-b", "a.json", "a/z", "b"]);
        let selection = tree.select(&default()).unwrap();
        assert_eq!(selection.root, tree.root().canonicalize().unwrap());
        assert_eq!(selection.files[4].real, selection.root.join("a/z"));
        assert_eq!(
            selection.files[4].identity,
            Identity::of(&fs::metadata(tree.root().join("a/z")).unwrap())
        );
        assert_eq!(selection.bytes(), 7 + 1 + 3 + 6 + 3 + 1);
    }

    #[test]
    fn built_in_exclusions_apply_at_any_depth_until_replaced() {
        let left_out = [
            ".cache/huggingface/download/x.metadata",
            ".git/config",
            ".gitattributes",
            "sub/.DS_Store",
            "sub/._x",
            "sub/.model.swp",
            "sub/__pycache__/m.pyc",
            "model.safetensors.incomplete",
            "x.lock",
            ".lock",
            "x~",
            "np/x",
            ".nfs000",
        ];
        let tree = Tree::new(&left_out);
        for kept in ["config.json", "lockfile", "sub/np.json", "tmp", "part.json"] {
            tree.write(kept);
        }
        assert_eq!(tree.paths(&default()), ["config.json", "lockfile", "part.json", "sub/np.json", "tmp"]);
        let mut all: Vec<&str> = left_out.to_vec();
        all.extend(["config.json", "lockfile", "sub/np.json", "tmp", "part.json"]);
        all.sort_unstable();
        assert_eq!(tree.paths(&exclude(&[])), all);
        let mut rules = exclude(&["*.json"]);
        rules.also_exclude = strings(&["sub/"]);
        assert!(!tree.paths(&rules).iter().any(|path| path.ends_with(".json") || path.starts_with("sub/")));
        assert!(tree.paths(&rules).contains(&".gitattributes".to_owned()));
    }

    #[test]
    fn what_is_left_out_is_listed_with_the_pattern() {
        let tree = Tree::new(&["a.json", "b.tmp", "c.bin", "original/deep/x"]);
        let mut rules = also_exclude(&["original"]);
        rules.patterns = strings(&["*.json"]);
        let excluded = tree.select(&rules).unwrap().excluded;
        let row = |path: &str, pattern: Option<&str>, bytes| Excluded {
            path: path.to_owned(),
            pattern: pattern.map(str::to_owned),
            bytes,
        };
        let expected =
            [row("b.tmp", Some("*.tmp"), 5), row("c.bin", None, 5), row("original", Some("original"), 0)];
        assert_eq!(excluded, expected);
    }

    #[test]
    fn directories_can_be_named() {
        let tree =
            Tree::new(&["a.bin", "original/a.bin", "original/b/c.bin", "sub/original/d.bin", "original2"]);
        for pattern in ["original", "original/"] {
            assert_eq!(tree.paths(&also_exclude(&[pattern])), ["a.bin", "original2"], "{pattern}");
            assert_eq!(
                tree.paths(&patterns(&[pattern])),
                ["original/a.bin", "original/b/c.bin", "sub/original/d.bin"],
                "{pattern}"
            );
        }
        for pattern in ["original/*", "original/**", "./original", "./original/"] {
            let kept = ["a.bin", "original2", "sub/original/d.bin"];
            assert_eq!(tree.paths(&also_exclude(&[pattern])), kept, "{pattern}");
        }
        assert_eq!(tree.paths(&patterns(&["original/*"])), ["original/a.bin"]);
        assert_eq!(tree.paths(&patterns(&["original/**"])), ["original/a.bin", "original/b/c.bin"]);
        assert_eq!(tree.paths(&patterns(&["./*"])), ["a.bin", "original2"]);
        assert_eq!(tree.paths(&patterns(&["*.bin"])).len(), 4);
    }

    #[test]
    fn passed_through_files_stay_and_are_marked() {
        let tree = Tree::new(&["a.json", "original/x/w.pth", "w.safetensors"]);
        let mut rules = SelectionRules { passthrough: strings(&["original/", "*.zip"]), ..default() };
        let selection = tree.select(&rules).unwrap();
        let marks: Vec<(&str, bool)> =
            selection.files.iter().map(|file| (file.path.as_str(), file.passthrough)).collect();
        assert_eq!(marks, [("a.json", false), ("original/x/w.pth", true), ("w.safetensors", false)]);
        assert_eq!(selection.bytes(), 6 + 13);
        assert!(selection.warnings.contains(&"--passthrough *.zip matches no selected file".to_owned()));
        rules.passthrough = strings(&["*"]);
        let warnings = tree.select(&rules).unwrap().warnings;
        assert!(warnings.iter().any(|text| text.starts_with("every selected file is passed through")));
    }

    #[test]
    fn a_pattern_without_a_match_is_warned_about() {
        let tree = Tree::new(&["a.json"]);
        let warnings = tree.select(&patterns(&["*", "*.json", "*.jsn"])).unwrap().warnings;
        assert_eq!(warnings, ["--pattern *.jsn selects no file"]);
    }

    /// A hub cache as `hf download` leaves it; returns the snapshot.
    fn hub_cache(tree: &Tree) -> PathBuf {
        let folder = "hub/models--org--name";
        let snapshot = format!("{folder}/snapshots/0123abcd");
        for (name, blob) in [
            ("config.json", "c0"),
            ("tokenizer.json", "t0"),
            ("model-00001-of-00002.safetensors", "w1"),
            ("model-00002-of-00002.safetensors", "w2"),
        ] {
            tree.write(&format!("{folder}/blobs/{blob}"));
            tree.link(&format!("{snapshot}/{name}"), format!("../../blobs/{blob}"));
        }
        tree.write(&format!("{folder}/blobs/deep"));
        tree.link(&format!("{snapshot}/text_encoder/config.json"), "../../../blobs/deep");
        tree.link(&format!("{snapshot}/copy.safetensors"), "../../blobs/w1");
        tree.write(&format!("{folder}/blobs/w3.incomplete"));
        tree.write(&format!("{folder}/refs/main"));
        tree.root().join(snapshot)
    }

    #[test]
    fn a_hub_snapshot_is_links_into_blobs() {
        let tree = Tree::new(&[]);
        let snapshot = hub_cache(&tree);
        let selection = select(&snapshot, &default()).unwrap();
        let blobs = tree.root().canonicalize().unwrap().join("hub/models--org--name/blobs");
        let found: Vec<(&str, PathBuf)> = selection
            .files
            .iter()
            .map(|file| (file.path.as_str(), file.real.strip_prefix(&blobs).unwrap().to_owned()))
            .collect();
        let expected = [
            ("config.json", "c0"),
            ("copy.safetensors", "w1"),
            ("model-00001-of-00002.safetensors", "w1"),
            ("model-00002-of-00002.safetensors", "w2"),
            ("text_encoder/config.json", "deep"),
            ("tokenizer.json", "t0"),
        ];
        assert_eq!(found, expected.map(|row| (row.0, PathBuf::from(row.1))));
        assert_eq!(selection.files[1].identity, selection.files[2].identity);
        let each: u64 = selection.files.iter().map(|file| file.identity.bytes).sum();
        assert_eq!(selection.bytes(), each - selection.files[1].identity.bytes);
        assert_eq!(selection.warnings, Vec::<String>::new());
        assert_eq!(selection.directory_links, []);
    }

    #[test]
    fn the_root_may_be_a_link() {
        let tree = Tree::new(&["real/a"]);
        tree.link("model", "real");
        let selection = select(&tree.root().join("model"), &default()).unwrap();
        assert_eq!(selection.root, tree.root().canonicalize().unwrap().join("real"));
    }

    #[test]
    fn chains_of_links_are_followed_to_the_end() {
        let tree = Tree::new(&["store/deep/w", "model/x"]);
        tree.link("up", "store/deep");
        tree.link("model/a", "../up/../deep/b");
        tree.link("store/deep/b", "w");
        tree.link("model/absolute", tree.root().join("up/w"));
        let selection = select(&tree.root().join("model"), &default()).unwrap();
        let real = tree.root().canonicalize().unwrap().join("store/deep/w");
        assert_eq!(selection.files[0].real, real);
        assert_eq!(selection.files[1].real, real);
    }

    #[test]
    fn descriptors_of_a_process_can_be_followed() {
        let tree = Tree::new(&["a"]);
        let file = fs::File::open(tree.root().join("a")).unwrap();
        fs::remove_file(tree.root().join("a")).unwrap();
        let descriptor =
            format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&file));
        tree.link("view", &descriptor);
        let selection = tree.select(&default()).unwrap();
        assert_eq!(selection.files[0].real, PathBuf::from(&descriptor));
        assert_eq!(selection.files[0].identity, Identity::of(&file.metadata().unwrap()));
    }

    fn links(selection: &Selection) -> Vec<(&str, &str)> {
        selection.directory_links.iter().map(|link| (link.path.as_str(), link.target.as_str())).collect()
    }

    #[test]
    fn a_link_to_a_selected_directory_stays_a_link() {
        let tree = Tree::new(&["v2/a.json", "v2/x.tmp", "v2/sub/b.json", "v2-x"]);
        tree.link("latest", "v2");
        tree.link("v2/inner", "sub");
        let selection = tree.select(&default()).unwrap();
        let paths: Vec<&str> = selection.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["v2-x", "v2/a.json", "v2/sub/b.json"]);
        assert_eq!(links(&selection), [("latest", "v2"), ("v2/inner", "v2/sub")]);
        assert_eq!(selection.excluded.len(), 1, "{:?}", selection.excluded);
    }

    #[test]
    fn a_link_that_shows_another_selection_is_a_directory() {
        let tree = Tree::new(&["v2/a.json", "v2/b.bin", ".cache/c.json"]);
        tree.link("latest", "v2");
        tree.link("kept", ".cache");
        let selection = tree.select(&patterns(&["latest/*", "v2/a.json", "kept/*"])).unwrap();
        let paths: Vec<&str> = selection.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["kept/c.json", "latest/a.json", "latest/b.bin", "v2/a.json"]);
        assert_eq!(links(&selection), []);
        // The same inode under two names.
        assert_eq!(selection.files[1].identity, selection.files[3].identity);
        assert_eq!(links(&tree.select(&patterns(&["*.json"])).unwrap()), [("latest", "v2")]);
        assert_eq!(links(&tree.select(&also_exclude(&["latest"])).unwrap()), []);
        assert_eq!(links(&tree.select(&patterns(&["v2/*"])).unwrap()), []);
    }

    #[test]
    fn a_link_out_of_the_source_is_walked() {
        let tree = Tree::new(&["model/config.json", "elsewhere/w/x.bin"]);
        tree.link("model/weights", "../elsewhere");
        let selection = select(&tree.root().join("model"), &default()).unwrap();
        let paths: Vec<&str> = selection.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["config.json", "weights/w/x.bin"]);
        assert_eq!(selection.directory_links, []);
        let rules = also_exclude(&["weights/"]);
        assert_eq!(select(&tree.root().join("model"), &rules).unwrap().files.len(), 1);
    }

    #[test]
    fn loops_are_named_unless_left_out() {
        for (link, target) in [("a/self", "."), ("a/up", ".."), ("a/b/up", "../.."), ("a/out", "../..")] {
            let tree = Tree::new(&["a/b/x", "keep"]);
            tree.link(link, target);
            let error = tree.refusal(&default());
            assert_eq!(error.kind(), Kind::Failed);
            assert!(error.message().contains(&format!("{link} is a link to ")), "{error}");
            assert!(error.hint_text().unwrap().contains(&format!("'{link}/'")), "{error:?}");
            assert_eq!(tree.paths(&also_exclude(&[link])), ["a/b/x", "keep"], "{link}");
            assert_eq!(tree.paths(&patterns(&["./keep"])), ["keep"], "{link}");
        }
        let tree = Tree::new(&["a/x", "b/y"]);
        tree.link("a/to-b", "../b");
        tree.link("b/to-a", "../a");
        assert!(tree.refusal(&default()).message().contains("a/to-b/to-a is a link to"));
    }

    #[test]
    fn links_that_lead_nowhere_are_named_unless_left_out() {
        let tree = Tree::new(&["config.json"]);
        tree.link("w.safetensors", "../blobs/missing");
        let error = tree.refusal(&default());
        assert_eq!(error.kind(), Kind::NotFound);
        assert!(error.message().contains("w.safetensors is a dangling link: ../blobs/missing"), "{error}");
        assert!(error.hint_text().unwrap().contains("--also-exclude './w.safetensors'"), "{error:?}");
        for rules in
            [also_exclude(&["*.safetensors"]), also_exclude(&["w.safetensors/"]), patterns(&["*.json"])]
        {
            assert_eq!(tree.paths(&rules), ["config.json"]);
        }
        for rules in [patterns(&["w.*", "*.json"]), patterns(&["w.safetensors/x", "*.json"])] {
            assert!(tree.refusal(&rules).message().contains("dangling"));
        }
        let tree = Tree::new(&["config.json"]);
        tree.link("a", "b");
        tree.link("b", "a");
        assert!(tree.refusal(&default()).message().contains("circle"));
        assert_eq!(tree.paths(&also_exclude(&["a", "b"])), ["config.json"]);
    }

    #[test]
    fn unreadable_things_are_named_unless_left_out() {
        if is_root() {
            // Nothing is unreadable for root.
            return;
        }
        let tree = Tree::new(&["a.json", "closed/x", "secret.bin"]);
        fs::set_permissions(tree.root().join("secret.bin"), fs::Permissions::from_mode(0o000)).unwrap();
        assert!(tree.refusal(&default()).message().contains("secret.bin: permission denied"));
        let _closed = Closed::new(tree.root().join("closed"));
        let error = tree.refusal(&also_exclude(&["secret.bin"]));
        assert!(error.message().contains("closed: permission denied"), "{error}");
        for pattern in ["closed", "closed/", "closed/*", "closed/**"] {
            assert_eq!(tree.paths(&also_exclude(&["secret.bin", pattern])), ["a.json"], "{pattern}");
        }
        assert_eq!(tree.paths(&patterns(&["./*.json"])), ["a.json"]);
    }

    #[test]
    fn names_that_are_not_utf_8_are_refused_unless_left_out() {
        let tree = Tree::new(&["a.json"]);
        fs::write(tree.root().join(OsString::from_vec(b"b\xff.bin".to_vec())), "x").unwrap();
        let error = tree.refusal(&default());
        assert!(error.message().contains(r"b\xff.bin' is not UTF-8"), "{error}");
        assert_eq!(tree.paths(&also_exclude(&["*.bin"])), ["a.json"]);
        assert_eq!(tree.paths(&patterns(&["*.json"])), ["a.json"]);
        let directory = tree.root().join(OsString::from_vec(b"d\xfe".to_vec()));
        fs::create_dir(&directory).unwrap();
        assert_eq!(tree.paths(&also_exclude(&["*.bin"])), ["a.json"], "an empty directory has no say");
        fs::write(directory.join("c.json"), "x").unwrap();
        let error = tree.refusal(&patterns(&["*.json"]));
        assert!(error.message().contains(r"d\xfe/c.json' is not UTF-8"), "{error}");
        let error = select(&directory, &default()).unwrap_err();
        assert!(error.message().contains("is not UTF-8"), "{error}");
    }

    #[test]
    fn sockets_and_pipes_are_skipped_with_a_warning() {
        let tree = Tree::new(&["a.json"]);
        let _socket = UnixListener::bind(tree.root().join("s")).unwrap();
        rustix::fs::mknodat(
            CWD,
            tree.root().join("p"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        tree.link("null", "/dev/null");
        let selection = tree.select(&default()).unwrap();
        assert_eq!(selection.files.len(), 1);
        assert_eq!(
            selection.warnings,
            [
                "null is a device and is skipped",
                "p is a named pipe and is skipped",
                "s is a socket and is skipped"
            ]
        );
        assert_eq!(tree.select(&patterns(&["*.json"])).unwrap().warnings, Vec::<String>::new());
    }

    #[test]
    fn an_empty_selection_says_what_left_everything_out() {
        let tree = Tree::new(&["a.json", "b.json", "c.tmp", "d.bin"]);
        let mut rules = also_exclude(&["*.bin"]);
        rules.patterns = strings(&["*.gguf"]);
        let error = tree.refusal(&rules);
        assert_eq!(error.kind(), Kind::NotFound);
        for part in [
            "--pattern *.gguf leaves out 2 entries",
            "the built-in exclusion *.tmp leaves out 1 entry",
            "--also-exclude *.bin leaves out 1 entry",
        ] {
            assert!(error.message().contains(part), "{error}");
        }
        assert!(Tree::new(&[]).refusal(&default()).message().contains("it holds no files"));
    }

    #[test]
    fn only_a_directory_will_do() {
        let tree = Tree::new(&["w.gguf"]);
        let error = select(&tree.root().join("w.gguf"), &default()).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage);
        assert!(error.hint_text().unwrap().contains("--pattern w.gguf"));
        let error = select(&tree.root().join("missing"), &default()).unwrap_err();
        assert_eq!(error.kind(), Kind::NotFound);
        assert!(error.message().contains("missing"));
    }

    #[test]
    fn a_wrong_pattern_is_found_before_the_directory_is() {
        let error = select(Path::new("/missing"), &exclude(&["["])).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage);
        assert!(error.message().contains("--exclude ["), "{error}");
    }

    #[test]
    fn depth_is_limited() {
        let names = vec!["d"; DEPTH_MAX];
        let tree = Tree::new(&[&format!("{}/x", names.join("/")), "y"]);
        assert_eq!(tree.paths(&default()).len(), 2);
        tree.write(&format!("{}/d/x", names.join("/")));
        let error = tree.refusal(&default());
        assert!(error.message().contains("64 directories deep"), "{error}");
        assert_eq!(tree.paths(&patterns(&["./y"])), ["y"]);
        assert_eq!(tree.paths(&also_exclude(&["d"])), ["y"]);
    }

    #[test]
    fn deep_trees_take_no_deep_stack() {
        let deepest = vec!["d"; DEPTH_MAX].join("/");
        let tree = Tree::new(&[&format!("{deepest}/x")]);
        // Far below what can be opened by one path.
        let mut bottom = std::fs::File::open(tree.root().join(&deepest)).unwrap();
        for _ in 0..1000 {
            rustix::fs::mkdirat(&bottom, "d", rustix::fs::Mode::RWXU).unwrap();
            let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
            bottom = rustix::fs::openat(&bottom, "d", flags, rustix::fs::Mode::empty()).unwrap().into();
        }
        let root = tree.root().to_owned();
        let walk =
            move || (select(&root, &default()), select(&root, &also_exclude(&[&format!("{deepest}/d")])));
        let thread = std::thread::Builder::new().stack_size(160 << 10).spawn(walk).unwrap();
        let (refused, selected) = thread.join().unwrap();
        // The standard library would need a descriptor for each level.
        assert!(std::process::Command::new("rm").arg("-rf").arg(tree.root()).status().unwrap().success());
        assert!(refused.unwrap_err().message().contains("64 directories deep"));
        assert_eq!(selected.unwrap().files.len(), 1);
    }

    #[test]
    fn numbers_of_files_are_limited() {
        let tree = Tree::new(&["a", "b", "sub/c"]);
        let within = |files, entries| select_within(tree.root(), &default(), Limits { files, entries });
        assert_eq!(within(3, 4).unwrap().files.len(), 3);
        let error = within(2, 4).unwrap_err();
        assert!(error.message().contains("more than 2 files are selected"), "{error}");
        let error = within(3, 3).unwrap_err();
        assert!(error.message().contains("holds more than 3 files and directories"), "{error}");
    }

    /// The rules of selection in their simplest form: each path by itself, with the pattern matcher
    /// that is tested against a naive one elsewhere, one pattern at a time.
    fn expected(all: &BTreeSet<String>, rules: &SelectionRules) -> Vec<(String, bool)> {
        let built_in = strings(BUILT_IN_EXCLUSIONS);
        let mut exclusions = rules.exclude.clone().unwrap_or(built_in);
        exclusions.extend(rules.also_exclude.clone());
        let alone = |patterns: &[String]| -> Vec<Globs> {
            let each =
                patterns.iter().map(|pattern| Globs::leaving_out([("--exclude", pattern.as_str())]).unwrap());
            each.collect()
        };
        let included: Vec<Inclusions> =
            rules.patterns.iter().map(|pattern| Inclusions::new([pattern.as_str()]).unwrap()).collect();
        let (excluded, passed) = (alone(&exclusions), alone(&rules.passthrough));
        let covered = |globs: &[Globs], path: &str| globs.iter().any(|glob| glob.cover(Path::new(path)));
        let is_included =
            |path: &str| included.is_empty() || included.iter().any(|glob| glob.cover(Path::new(path)));
        let selected = all.iter().filter(|path| !covered(&excluded, path) && is_included(path));
        selected.map(|path| (path.clone(), covered(&passed, path))).collect()
    }

    fn glob() -> impl Strategy<Value = String> {
        let part = prop_oneof![4 => "[ab*?]{1,2}", 1 => Just("**".to_owned())];
        (prop::collection::vec(part, 1..4), any::<bool>())
            .prop_map(|(parts, directory)| format!("{}{}", parts.join("/"), if directory { "/" } else { "" }))
    }

    fn some_rules() -> impl Strategy<Value = SelectionRules> {
        let few = || prop::collection::vec(glob(), 0..3);
        (few(), prop::option::of(few()), few(), few()).prop_map(
            |(patterns, exclude, also_exclude, passthrough)| SelectionRules {
                patterns,
                exclude,
                also_exclude,
                passthrough,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn the_walk_agrees_with_the_rules_path_by_path(
            wanted in prop::collection::btree_set("[ab]{1,2}(/[ab]{1,2}){0,3}", 1..12),
            rules in prop::collection::vec(some_rules(), 8),
        ) {
            // A name cannot be a file and a directory.
            let all: BTreeSet<String> = wanted
                .iter()
                .filter(|path| !wanted.iter().any(|other| other.starts_with(&format!("{path}/"))))
                .cloned()
                .collect();
            let tree = Tree::new(&[]);
            all.iter().for_each(|path| tree.write(path));
            for rules in &rules {
                let wanted = expected(&all, rules);
                match tree.select(rules) {
                    Ok(selection) => {
                        let found: Vec<(String, bool)> =
                            selection.files.into_iter().map(|file| (file.path, file.passthrough)).collect();
                        prop_assert_eq!(found, wanted, "{:?}", rules);
                    }
                    Err(error) => prop_assert!(wanted.is_empty(), "{error} {rules:?}"),
                }
            }
        }

        #[test]
        fn links_show_what_following_them_would(
            files in prop::collection::btree_set("[ab]/[cd](/[ef])?", 1..8),
            targets in prop::collection::vec((0..3usize, "[ab](/[cd])?"), 1..4),
            rules in some_rules(),
        ) {
            let tree = Tree::new(&[]);
            for path in &files {
                let _ = fs::create_dir_all(tree.root().join(path).parent().unwrap());
                let _ = fs::write(tree.root().join(path), path);
            }
            for (number, (place, target)) in targets.iter().enumerate() {
                let (directory, up) = [("", ""), ("a/", "../"), ("b/", "../")][*place];
                if tree.root().join(target).is_dir() && tree.root().join(directory).is_dir() {
                    tree.link(&format!("{directory}l{number}"), format!("{up}{target}"));
                }
            }
            let Some(all) = follow_everything(tree.root()) else {
                prop_assert!(tree.select(&default()).is_err(), "a loop must be named");
                return Ok(());
            };
            let wanted: BTreeSet<(String, bool)> = expected(&all, &rules).into_iter().collect();
            let Ok(selection) = tree.select(&rules) else {
                prop_assert!(wanted.is_empty());
                return Ok(());
            };
            prop_assert_eq!(unfold(&selection), wanted, "{:?} {:?}", rules, selection);
        }
    }

    /// Every file below `root` through every link; `None` where that has no end.
    fn follow_everything(root: &Path) -> Option<BTreeSet<String>> {
        let mut found = BTreeSet::new();
        let mut pending = vec![PathBuf::new()];
        while let Some(path) = pending.pop() {
            if path.iter().count() > 12 {
                return None;
            }
            for entry in fs::read_dir(root.join(&path)).unwrap() {
                let path = path.join(entry.unwrap().file_name());
                if root.join(&path).is_dir() {
                    pending.push(path);
                } else {
                    found.insert(path.to_str().unwrap().to_owned());
                }
            }
        }
        Some(found)
    }

    /// The files that a reader finds who follows the directory links of a selection.
    fn unfold(selection: &Selection) -> BTreeSet<(String, bool)> {
        let mut found: BTreeSet<(String, bool)> =
            selection.files.iter().map(|file| (file.path.clone(), file.passthrough)).collect();
        loop {
            let before = found.len();
            for link in &selection.directory_links {
                let inside = format!("{}/", link.target);
                let seen: Vec<_> = found
                    .iter()
                    .filter_map(|(path, mark)| {
                        Some((format!("{}/{}", link.path, path.strip_prefix(&inside)?), *mark))
                    })
                    .collect();
                found.extend(seen);
            }
            if found.len() == before {
                return found;
            }
        }
    }
}
