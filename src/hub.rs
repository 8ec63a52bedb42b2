//! The model directory that an argument means: a path, or the name of a model in a local Hugging Face
//! hub cache.
//!
//! A hub cache holds each model as `models--<org>--<name>`, with `refs/<branch>` naming a commit and
//! `snapshots/<commit>` holding links into `blobs/`. Nothing is ever fetched.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Kind, Result, shown};
use crate::manifest::Digest;

/// A directory that exists, to select a model's files from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelDir {
    /// Absolute and resolved through links.
    pub root: PathBuf,
    /// The directory's name as it was given, or `<org>--<model>` for a snapshot of a hub cache, which
    /// would be named by a commit.
    pub label: String,
}

/// What of the environment decides where a model is.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Where relative paths start; `None` where the directory is gone.
    pub current_directory: Option<PathBuf>,
    /// The user's home.
    pub home: Option<PathBuf>,
    /// `HF_HUB_CACHE`: the hub cache itself.
    pub hf_hub_cache: Option<OsString>,
    /// `HUGGINGFACE_HUB_CACHE`: its older name.
    pub huggingface_hub_cache: Option<OsString>,
    /// `HF_HOME`: the directory that holds `hub`.
    pub hf_home: Option<OsString>,
    /// `XDG_CACHE_HOME`: the directory that holds `huggingface/hub`.
    pub xdg_cache_home: Option<OsString>,
}

impl Surroundings {
    /// Those of this process.
    pub fn of_process() -> Surroundings {
        Surroundings {
            current_directory: std::env::current_dir().ok(),
            home: std::env::home_dir(),
            hf_hub_cache: std::env::var_os("HF_HUB_CACHE"),
            huggingface_hub_cache: std::env::var_os("HUGGINGFACE_HUB_CACHE"),
            hf_home: std::env::var_os("HF_HOME"),
            xdg_cache_home: std::env::var_os("XDG_CACHE_HOME"),
        }
    }
}

/// The longest `refs/` file read: it holds one commit, 40 characters.
const REF_BYTES_MAX: u64 = 1024;

/// The fewest characters of a commit that stand for all of it.
const COMMIT_PREFIX_MIN: usize = 4;

/// The most revisions that a hint lists.
const REVISIONS_SHOWN_MAX: usize = 5;

/// The directory that `argument` means: an existing path, else `org/name` or `org/name@revision` in the
/// local hub cache, where a revision is a branch, a tag or the beginning of a commit.
///
/// Fails with [`Kind::NotFound`] and the places that were looked at, and with [`Kind::Usage`] for a
/// path that is no directory or starts with a `~` that no shell expanded.
pub fn resolve(argument: &Path) -> Result<ModelDir> {
    resolve_in(argument, &Surroundings::of_process())
}

/// [`resolve`] in other surroundings than those of this process.
pub fn resolve_in(argument: &Path, surroundings: &Surroundings) -> Result<ModelDir> {
    if argument.as_os_str().is_empty() {
        return Err(Error::new(Kind::Usage, "the model directory is an empty path"));
    }
    if argument.as_os_str().as_bytes().starts_with(b"~") {
        return Err(Error::new(
            Kind::Usage,
            format!("{} starts with a '~' that no shell has expanded", shown(argument)),
        )
        .hint("write \"$HOME/...\", or ./~... for a directory of that name"));
    }
    let path = match &surroundings.current_directory {
        _ if argument.is_absolute() => argument.to_owned(),
        Some(current) => current.join(argument),
        None => {
            if let Some(name) = HubName::parse(argument) {
                return in_hub_cache(&name, surroundings);
            }
            return Err(Error::new(
                Kind::NotFound,
                format!("{} is relative, but the current directory is gone", shown(argument)),
            )
            .hint("give an absolute path, or change to a directory that exists"));
        }
    };
    match fs::canonicalize(&path) {
        Ok(root) => existing(argument, root),
        Err(cause) => match HubName::parse(argument) {
            Some(name) if is_missing(&cause) && fs::symlink_metadata(&path).is_err() => {
                in_hub_cache(&name, surroundings)
            }
            _ => Err(not_there(argument, &path, &cause)),
        },
    }
}

fn is_missing(cause: &io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

fn not_there(argument: &Path, path: &Path, cause: &io::Error) -> Error {
    match fs::read_link(path) {
        Ok(target) if is_missing(cause) => Error::new(
            Kind::NotFound,
            format!("{} is a dangling link: {} does not exist", shown(argument), shown(&target)),
        ),
        _ => Error::io("open the model directory", argument, cause),
    }
}

/// The model directory at a path that exists.
fn existing(argument: &Path, root: PathBuf) -> Result<ModelDir> {
    let metadata = fs::metadata(&root).map_err(|cause| Error::io("look at", argument, &cause))?;
    if !metadata.is_dir() {
        let error = Error::new(Kind::Usage, format!("{} is not a directory", shown(argument)));
        return Err(match (root.parent(), root.file_name()) {
            (Some(parent), Some(name)) if metadata.is_file() => {
                error.hint(format!("give its directory: {} --pattern {}", shown(parent), shown(name)))
            }
            _ => error.hint("give the directory that holds the model's files"),
        });
    }
    if let Some(error) = all_snapshots(argument, &root) {
        return Err(error);
    }
    let own = root.file_name();
    // A name that the user gave to a link says more than what it leads to.
    let given = match argument.components().next_back() {
        Some(Component::Normal(name)) if Some(name) != own => Some(name),
        _ => None,
    };
    let label = match (given, snapshot_label(&root), own) {
        (Some(name), _, _) => name.to_string_lossy().into_owned(),
        (None, Some(label), _) => label.to_owned(),
        (None, None, Some(name)) => name.to_string_lossy().into_owned(),
        (None, None, None) => "model".to_owned(),
    };
    Ok(ModelDir { root, label })
}

/// The refusal of the folder around a model's snapshots: every file stands in it by the name of its
/// blob, and again in each revision.
fn all_snapshots(argument: &Path, root: &Path) -> Option<Error> {
    let label = root.file_name()?.to_str()?.strip_prefix("models--")?;
    let is_folder = ["snapshots", "blobs"].iter().all(|part| root.join(part).is_dir());
    is_folder.then(|| {
        Error::new(
            Kind::Usage,
            format!("{} is a model's folder in a hub cache, not one revision of it", shown(argument)),
        )
        .hint(format!(
            "give the model's name, {}, or one of the directories in {}",
            label.replacen("--", "/", 1),
            shown(root.join("snapshots"))
        ))
    })
}

/// The [label](ModelDir::label) of a model directory that cannot be looked at, as far as what was typed tells it.
pub fn label_of_absent(argument: &Path) -> String {
    let by_hub = || HubName::parse(argument).filter(|name| name.model.contains('/')).map(|name| name.label());
    let last = argument.components().rev().find_map(|part| match part {
        Component::Normal(name) => Some(name.to_string_lossy().into_owned()),
        _ => None,
    });
    snapshot_label(argument).map(str::to_owned).or_else(by_hub).or(last).unwrap_or_else(|| "model".to_owned())
}

/// `…/models--org--name/snapshots/<commit>` → `org--name`.
pub fn snapshot_label(root: &Path) -> Option<&str> {
    let snapshots = root.parent()?;
    let folder = snapshots.parent()?.file_name()?.to_str()?;
    (snapshots.file_name()? == "snapshots").then(|| folder.strip_prefix("models--"))?
}

/// The digest that the hub gave a file of a hub cache: the name of its blob, for a large file the SHA-256 of its bytes.
/// `None` for small files, whose names are Git's, and for files of no hub cache. `real` is the path without links.
pub fn blob_digest(real: &Path) -> Option<Digest> {
    let blobs = real.parent().filter(|blobs| blobs.file_name() == Some(OsStr::new("blobs")))?;
    let folder = blobs.parent()?.file_name()?.as_bytes();
    let is_hub = FOLDERS.iter().any(|kind| folder.starts_with(kind.as_bytes()));
    real.file_name()?.to_str()?.parse().ok().filter(|_| is_hub)
}

/// What a hub cache calls its folders, each followed by `org--name`.
const FOLDERS: [&str; 2] = ["models--", "datasets--"];

/// Whether two model directories, resolved through links, are one source: the same directory, or the same place in two
/// snapshots of one model of one hub cache. A new revision is the same model.
pub fn same_source(a: &Path, b: &Path) -> bool {
    let in_snapshot = |path: &Path| {
        let commit = path.ancestors().find(|at| {
            let snapshots = at.parent().filter(|parent| parent.file_name() == Some(OsStr::new("snapshots")));
            let folder = snapshots.and_then(Path::parent).and_then(Path::file_name);
            folder.is_some_and(|folder| {
                FOLDERS.iter().any(|kind| folder.as_bytes().starts_with(kind.as_bytes()))
            })
        })?;
        Some((commit.parent()?.to_owned(), path.strip_prefix(commit).ok()?.to_owned()))
    };
    a == b || in_snapshot(a).is_some_and(|place| in_snapshot(b) == Some(place))
}

/// `org/name@revision`, taken apart.
struct HubName {
    /// `org/name`, or `name` alone.
    model: String,
    revision: Option<String>,
}

impl HubName {
    fn parse(argument: &Path) -> Option<HubName> {
        let text = argument.to_str()?;
        let (model, revision) = match text.split_once('@') {
            Some((model, revision)) => (model, Some(revision)),
            None => (text, None),
        };
        let is_part = |part: &str| {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
            part.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '_')
                && part.len() <= 96
                && !part.contains("--")
                && part.bytes().all(plain)
        };
        let is_model = model.split('/').count() <= 2 && model.split('/').all(is_part);
        let is_revision = |revision: &str| {
            let names = revision.split('/').all(|name| !matches!(name, "" | "." | ".."));
            names && revision.len() <= 255 && !revision.contains(char::is_control)
        };
        (is_model && revision.is_none_or(is_revision))
            .then(|| HubName { model: model.to_owned(), revision: revision.map(str::to_owned) })
    }

    /// `org--name`.
    fn label(&self) -> String {
        self.model.replace('/', "--")
    }

    /// The command that would bring it here.
    fn download(&self) -> String {
        match &self.revision {
            Some(revision) => format!("hf download {} --revision {revision}", self.model),
            None => format!("hf download {}", self.model),
        }
    }
}

/// The hub cache, and the setting that says so.
fn hub_cache(surroundings: &Surroundings) -> Option<(PathBuf, &'static str)> {
    let absolute = |value: &OsStr| {
        let path = Path::new(value);
        match (path.strip_prefix("~"), &surroundings.home, &surroundings.current_directory) {
            // The hub's own library expands it in these two variables.
            (Ok(rest), Some(home), _) => Some(home.join(rest)),
            (_, _, Some(current)) => Some(current.join(path)),
            _ => path.is_absolute().then(|| path.to_owned()),
        }
    };
    let set = |value: &Option<OsString>| value.clone().filter(|value| !value.is_empty());
    let direct = [
        (&surroundings.hf_hub_cache, "HF_HUB_CACHE"),
        (&surroundings.huggingface_hub_cache, "HUGGINGFACE_HUB_CACHE"),
    ];
    for (value, name) in direct {
        if let Some(value) = set(value) {
            return absolute(&value).map(|path| (path, name));
        }
    }
    if let Some(value) = set(&surroundings.hf_home) {
        return absolute(&value).map(|path| (path.join("hub"), "HF_HOME"));
    }
    if let Some(value) = set(&surroundings.xdg_cache_home).filter(|value| Path::new(value).is_absolute()) {
        return Some((Path::new(&value).join("huggingface/hub"), "XDG_CACHE_HOME"));
    }
    let home = surroundings.home.as_ref().filter(|home| home.is_absolute())?;
    Some((home.join(".cache/huggingface/hub"), "the default"))
}

/// The snapshot of a model in the hub cache.
fn in_hub_cache(name: &HubName, surroundings: &Surroundings) -> Result<ModelDir> {
    let Some((cache, setting)) = hub_cache(surroundings) else {
        return Err(Error::new(
            Kind::NotFound,
            format!("{} is no directory, and there is no home for a hub cache", shown(&name.model)),
        )
        .hint("give the path of the model's directory, or set HF_HUB_CACHE"));
    };
    let folder = cache.join(format!("models--{}", name.label()));
    match fs::metadata(&folder) {
        Ok(metadata) if metadata.is_dir() => {}
        Err(cause) if !is_missing(&cause) => {
            return Err(Error::io("look into the hub cache", &folder, &cause));
        }
        _ => return Err(no_such_model(name, &cache, setting)),
    }
    let commit = commit_of(name, &folder)?;
    let snapshot = folder.join("snapshots").join(&commit);
    let root = fs::canonicalize(&snapshot).map_err(|cause| {
        if !is_missing(&cause) {
            return Error::io("open the snapshot", &snapshot, &cause);
        }
        Error::new(
            Kind::NotFound,
            format!(
                "the hub cache names commit {} of {}, but {} is missing",
                commit,
                name.model,
                shown(&snapshot)
            ),
        )
        .hint(format!("complete it: {}", name.download()))
    })?;
    if !root.is_dir() {
        return Err(Error::new(Kind::NotFound, format!("{} is not a directory", shown(&snapshot)))
            .hint(format!("download it again: {}", name.download())));
    }
    Ok(ModelDir { root, label: name.label() })
}

fn no_such_model(name: &HubName, cache: &Path, setting: &str) -> Error {
    let error = Error::new(
        Kind::NotFound,
        format!(
            "{} is neither a directory nor a model in the hub cache {} ({setting})",
            shown(&name.model),
            shown(cache)
        ),
    );
    match other_spelling(name, cache) {
        Some(spelled) => error.hint(format!("there is {}", shown(spelled))),
        None => {
            error.hint(format!("download it with '{}', or give the path of its directory", name.download()))
        }
    }
}

/// The model in the cache whose name differs only in upper and lower case.
fn other_spelling(name: &HubName, cache: &Path) -> Option<String> {
    let wanted = format!("models--{}", name.label());
    let names = fs::read_dir(cache).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let found = names.into_iter().find(|found| found.eq_ignore_ascii_case(&wanted))?;
    Some(found.strip_prefix("models--").or(found.get("models--".len()..))?.replacen("--", "/", 1))
}

/// The commit that the revision means: a branch or tag first, as in the hub's own library.
fn commit_of(name: &HubName, folder: &Path) -> Result<String> {
    let revision = name.revision.as_deref().unwrap_or("main");
    let reference = folder.join("refs").join(revision);
    match read_reference(&reference) {
        Ok(commit) if is_commit(&commit) => return Ok(commit),
        Ok(text) => {
            return Err(Error::new(
                Kind::Failed,
                format!("{} does not hold a commit, but {}", shown(&reference), shown(text)),
            )
            .hint(format!("download it again: {}", name.download())));
        }
        // A revision with a `/` in it, or one that is only the first part of another.
        Err(cause) if is_missing(&cause) || cause.raw_os_error() == Some(libc::EISDIR) => {}
        Err(cause) => return Err(Error::io("read", &reference, &cause)),
    }
    let mut commits = commits_in(&folder.join("snapshots"))?;
    if commits.iter().any(|commit| commit == revision) {
        return Ok(revision.to_owned());
    }
    let is_prefix =
        revision.len() >= COMMIT_PREFIX_MIN && revision.bytes().all(|byte| byte.is_ascii_hexdigit());
    let wanted = revision.to_ascii_lowercase();
    let mut matching = commits.iter().filter(|commit| is_prefix && commit.starts_with(&wanted));
    match (matching.next(), matching.next()) {
        (Some(commit), None) => Ok(commit.clone()),
        (Some(_), Some(_)) => {
            commits.retain(|commit| commit.starts_with(&wanted));
            Err(Error::new(
                Kind::Usage,
                format!("revision {} of {} is the beginning of several commits", shown(revision), name.model),
            )
            .hint(format!("write one out: {}", revisions(name, &commits))))
        }
        _ => Err(no_such_revision(name, revision, folder, &commits)),
    }
}

fn no_such_revision(name: &HubName, revision: &str, folder: &Path, commits: &[String]) -> Error {
    let error = Error::new(
        Kind::NotFound,
        format!("{} has no revision {} in {}", name.model, shown(revision), shown(folder)),
    );
    match commits {
        [] => error.hint(format!("download it: {}", name.download())),
        _ => {
            error.hint(format!("there is {}; or download it: {}", revisions(name, commits), name.download()))
        }
    }
}

fn revisions(name: &HubName, commits: &[String]) -> String {
    let shown: Vec<String> =
        commits.iter().take(REVISIONS_SHOWN_MAX).map(|commit| format!("{}@{commit}", name.model)).collect();
    let more = if commits.len() > REVISIONS_SHOWN_MAX { " and more" } else { "" };
    format!("{}{more}", shown.join(" "))
}

fn read_reference(path: &Path) -> io::Result<String> {
    // Opening a named pipe would wait for a writer.
    let metadata = fs::metadata(path)?;
    if metadata.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(REF_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}

fn is_commit(text: &str) -> bool {
    // The hub writes 40 hexadecimal digits; other servers of the protocol are less strict.
    !text.is_empty()
        && text.len() <= 128
        && !text.starts_with('.')
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

/// The snapshots, sorted by commit.
fn commits_in(snapshots: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(snapshots) {
        Ok(entries) => entries,
        Err(cause) if is_missing(&cause) => return Ok(Vec::new()),
        Err(cause) => return Err(Error::io("read the directory", snapshots, &cause)),
    };
    let mut commits = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|cause| Error::io("read the directory", snapshots, &cause))?;
        commits.extend(entry.file_name().into_string().ok().filter(|name| is_commit(name)));
    }
    commits.sort();
    Ok(commits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const MAIN: &str = "aaaa00001111222233334444555566667777aaaa";
    const OTHER: &str = "aaaa9999111122223333444455556666777700bb";

    /// A home with a hub cache that holds `Qwen/Qwen3-8B` in two revisions, and a current directory.
    struct Sandbox {
        root: tempfile::TempDir,
    }

    impl Sandbox {
        fn new() -> Sandbox {
            let sandbox = Sandbox { root: tempfile::tempdir().unwrap() };
            fs::create_dir(sandbox.path("here")).unwrap();
            sandbox.add_model("home/.cache/huggingface/hub");
            sandbox
        }

        fn path(&self, relative: &str) -> PathBuf {
            // The temporary directory itself may be reached through links.
            self.root.path().canonicalize().unwrap().join(relative)
        }

        fn add_model(&self, hub: &str) -> PathBuf {
            let folder = self.path(hub).join("models--Qwen--Qwen3-8B");
            fs::create_dir_all(folder.join("blobs")).unwrap();
            fs::create_dir_all(folder.join("refs/refs/pr")).unwrap();
            fs::write(folder.join("refs/main"), MAIN).unwrap();
            fs::write(folder.join("refs/refs/pr/1"), format!("{OTHER}\n")).unwrap();
            for commit in [MAIN, OTHER] {
                fs::create_dir_all(folder.join("snapshots").join(commit)).unwrap();
            }
            folder
        }

        fn surroundings(&self) -> Surroundings {
            Surroundings {
                current_directory: Some(self.path("here")),
                home: Some(self.path("home")),
                ..Surroundings::default()
            }
        }

        fn resolve(&self, argument: &str) -> Result<ModelDir> {
            resolve_in(Path::new(argument), &self.surroundings())
        }

        fn snapshot(&self, hub: &str, commit: &str) -> PathBuf {
            self.path(hub).join("models--Qwen--Qwen3-8B/snapshots").join(commit)
        }
    }

    const HUB: &str = "home/.cache/huggingface/hub";

    #[test]
    fn a_name_and_revision_lead_to_a_snapshot() {
        let sandbox = Sandbox::new();
        for (argument, commit) in [
            ("Qwen/Qwen3-8B", MAIN),
            ("Qwen/Qwen3-8B@main", MAIN),
            ("Qwen/Qwen3-8B@refs/pr/1", OTHER),
            (&format!("Qwen/Qwen3-8B@{OTHER}"), OTHER),
            ("Qwen/Qwen3-8B@aaaa9", OTHER),
            ("Qwen/Qwen3-8B@AAAA0", MAIN),
        ] {
            let found = sandbox.resolve(argument).unwrap();
            assert_eq!(found.root, sandbox.snapshot(HUB, commit), "{argument}");
            assert_eq!(found.label, "Qwen--Qwen3-8B", "{argument}");
        }
    }

    #[test]
    fn each_setting_names_the_cache() {
        let sandbox = Sandbox::new();
        for hub in ["a", "b", "c/hub", "d/huggingface/hub", "here/e", "home/f"] {
            sandbox.add_model(hub);
        }
        let value = |relative: &str| Some(sandbox.path(relative).into_os_string());
        let plain = sandbox.surroundings();
        let all = Surroundings {
            hf_hub_cache: value("a"),
            huggingface_hub_cache: value("b"),
            hf_home: value("c"),
            xdg_cache_home: value("d"),
            ..plain.clone()
        };
        let empty = Some(OsString::new());
        for (surroundings, hub) in [
            (all.clone(), "a"),
            (Surroundings { hf_hub_cache: None, ..all.clone() }, "b"),
            (
                Surroundings { hf_hub_cache: empty.clone(), huggingface_hub_cache: None, ..all.clone() },
                "c/hub",
            ),
            (Surroundings { xdg_cache_home: value("d"), ..plain.clone() }, "d/huggingface/hub"),
            (Surroundings { xdg_cache_home: Some("relative".into()), ..plain.clone() }, HUB),
            (Surroundings { xdg_cache_home: empty, ..plain.clone() }, HUB),
            (Surroundings { hf_hub_cache: Some("e".into()), ..plain.clone() }, "here/e"),
            (Surroundings { hf_hub_cache: Some("~/f".into()), ..plain }, "home/f"),
        ] {
            let found = resolve_in(Path::new("Qwen/Qwen3-8B"), &surroundings).unwrap();
            assert_eq!(found.root, sandbox.snapshot(hub, MAIN), "{surroundings:?}");
        }
    }

    #[test]
    fn a_path_comes_before_a_name() {
        let sandbox = Sandbox::new();
        fs::create_dir_all(sandbox.path("here/Qwen/Qwen3-8B")).unwrap();
        let found = sandbox.resolve("Qwen/Qwen3-8B").unwrap();
        assert_eq!(found, ModelDir { root: sandbox.path("here/Qwen/Qwen3-8B"), label: "Qwen3-8B".into() });
    }

    #[test]
    fn labels_name_the_model() {
        let sandbox = Sandbox::new();
        fs::create_dir_all(sandbox.path("here/plain")).unwrap();
        symlink(sandbox.snapshot(HUB, MAIN), sandbox.path("here/my-qwen")).unwrap();
        fs::create_dir_all(sandbox.snapshot(HUB, MAIN).join("vae")).unwrap();
        let snapshot = sandbox.snapshot(HUB, MAIN);
        let snapshot = snapshot.to_str().unwrap();
        for (argument, label) in [
            ("plain", "plain"),
            ("plain/", "plain"),
            ("./plain/.", "plain"),
            ("plain/..", "here"),
            (".", "here"),
            ("my-qwen", "my-qwen"),
            (snapshot, "Qwen--Qwen3-8B"),
            (&format!("{snapshot}/"), "Qwen--Qwen3-8B"),
            (&format!("{snapshot}/vae"), "vae"),
            ("/", "model"),
        ] {
            assert_eq!(sandbox.resolve(argument).unwrap().label, label, "{argument}");
        }
    }

    #[track_caller]
    fn assert_refused(sandbox: &Sandbox, argument: &str, kind: Kind, message: &str, hint: &str) {
        let error = sandbox.resolve(argument).unwrap_err();
        let given = error.hint_text().unwrap_or_default();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(message), "{error}");
        assert!(given.contains(hint), "{error} hint: {given}");
    }

    #[test]
    fn errors_say_what_was_looked_at() {
        let sandbox = Sandbox::new();
        let hub = shown(sandbox.path(HUB));
        let folder = format!("{hub}/models--Qwen--Qwen3-8B");
        fs::write(sandbox.path("here/model.gguf"), b"x").unwrap();
        symlink("nowhere", sandbox.path("here/broken")).unwrap();
        for (argument, kind, message, hint) in [
            ("", Kind::Usage, "empty", ""),
            ("~/models/x", Kind::Usage, "~/models/x starts with a '~'", "$HOME"),
            ("~", Kind::Usage, "no shell has expanded", "$HOME"),
            ("./missing", Kind::NotFound, "no such file or directory", ""),
            ("/missing/a/b", Kind::NotFound, "no such file or directory", ""),
            ("broken", Kind::NotFound, "dangling link: nowhere", ""),
            ("model.gguf", Kind::Usage, "not a directory", "--pattern model.gguf"),
            (&folder, Kind::Usage, "not one revision", "the model's name, Qwen/Qwen3-8B"),
            ("org/name", Kind::NotFound, &hub, "hf download org/name"),
            ("org/name@v1", Kind::NotFound, "the default", "hf download org/name --revision v1"),
            ("qwen/qwen3-8b", Kind::NotFound, "neither a directory nor a model", "there is Qwen/Qwen3-8B"),
            ("Qwen/Qwen3-8B@v9", Kind::NotFound, "no revision v9", &format!("Qwen/Qwen3-8B@{MAIN}")),
            ("Qwen/Qwen3-8B@aaaa", Kind::Usage, "several commits", OTHER),
            ("Qwen/Qwen3-8B@refs/pr", Kind::NotFound, "no revision", "hf download"),
            ("Qwen/Qwen3-8B@../x", Kind::NotFound, "no such file or directory", ""),
        ] {
            assert_refused(&sandbox, argument, kind, message, hint);
        }
    }

    #[test]
    fn a_half_made_cache_is_named() {
        let sandbox = Sandbox::new();
        let folder = sandbox.path(HUB).join("models--Qwen--Qwen3-8B");
        fs::remove_dir(folder.join("snapshots").join(MAIN)).unwrap();
        assert_refused(&sandbox, "Qwen/Qwen3-8B", Kind::NotFound, "is missing", "hf download Qwen/Qwen3-8B");
        fs::write(folder.join("refs/main"), "../../../etc").unwrap();
        assert_refused(
            &sandbox,
            "Qwen/Qwen3-8B",
            Kind::Failed,
            "does not hold a commit",
            "download it again",
        );
        fs::remove_file(folder.join("refs/main")).unwrap();
        assert_refused(&sandbox, "Qwen/Qwen3-8B", Kind::NotFound, "no revision main", OTHER);
        fs::remove_dir_all(folder.join("snapshots")).unwrap();
        assert_refused(&sandbox, "Qwen/Qwen3-8B", Kind::NotFound, "no revision main", "hf download");
    }

    #[test]
    fn surroundings_may_be_bare() {
        let sandbox = Sandbox::new();
        let bare = Surroundings::default();
        let error = resolve_in(Path::new("./name"), &bare).unwrap_err();
        assert!(error.message().contains("the current directory is gone"), "{error}");
        let there = resolve_in(&sandbox.path("here"), &bare).unwrap();
        assert_eq!(there.root, sandbox.path("here"));
        let nowhere = Surroundings { home: Some(sandbox.path("home")), ..bare.clone() };
        let found = resolve_in(Path::new("Qwen/Qwen3-8B"), &nowhere).unwrap();
        assert_eq!(found.root, sandbox.snapshot(HUB, MAIN));
        let homeless = Surroundings { current_directory: Some(sandbox.path("here")), ..bare };
        let error = resolve_in(Path::new("org/name"), &homeless).unwrap_err();
        assert!(error.message().contains("no home"), "{error}");
    }

    #[test]
    fn what_is_gone_has_the_label_that_it_had() {
        for (argument, label) in [
            ("/hub/models--org--m/snapshots/aaaa", "org--m"),
            ("org/m", "org--m"),
            ("org/m@main", "org--m"),
            ("/mnt/m/", "m"),
            ("mnt/models/m", "m"),
            ("./m", "m"),
            ("m", "m"),
            ("/", "model"),
        ] {
            assert_eq!(label_of_absent(Path::new(argument)), label, "{argument}");
        }
    }

    #[test]
    fn a_large_blob_is_named_by_its_digest() {
        let digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let git = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391";
        let found = |folder: &str, name: &str| blob_digest(&Path::new("/hub").join(folder).join(name));
        assert_eq!(found("models--o--m/blobs", digest).unwrap().to_string(), digest);
        assert!(found("datasets--o--d/blobs", digest).is_some());
        for (folder, name) in [
            ("models--o--m/blobs", git),
            ("models--o--m/blobs", &digest.to_uppercase()),
            ("models--o--m/blobs", &format!("{digest}.incomplete")),
            ("models--o--m/snapshots", digest),
            ("other/blobs", digest),
            ("blobs", digest),
        ] {
            assert_eq!(found(folder, name), None, "{folder}/{name}");
        }
        assert_eq!(blob_digest(Path::new("/")), None);
    }

    #[test]
    fn revisions_of_a_model_are_one_source() {
        let same = |a: &str, b: &str| {
            assert_eq!(same_source(Path::new(a), Path::new(b)), same_source(Path::new(b), Path::new(a)));
            same_source(Path::new(a), Path::new(b))
        };
        assert!(same("/models/m", "/models/m"));
        assert!(!same("/models/m", "/models/n"));
        assert!(same("/h/models--o--m/snapshots/aa", "/h/models--o--m/snapshots/bb"));
        assert!(same("/h/models--o--m/snapshots/aa/sub", "/h/models--o--m/snapshots/bb/sub"));
        assert!(!same("/h/models--o--m/snapshots/aa/sub", "/h/models--o--m/snapshots/bb"));
        assert!(!same("/h/models--o--m/snapshots/aa", "/h/models--o--n/snapshots/aa"));
        assert!(!same("/h/models--o--m/snapshots/aa", "/g/models--o--m/snapshots/aa"));
        assert!(!same("/h/m/snapshots/aa", "/h/m/snapshots/bb"));
    }
}
