//! `status`: what a cache is doing, who uses it, and whether source and view are still what they were.

use std::path::Path;

use clap::Args;

use super::args::{TargetArgs, TimeoutArgs};
use super::json;
use super::output;
use super::preflight;
use super::swapped::Swapped;
use super::target::{LEFT_FOR_LATER, Standing, Target};
use crate::control::client::Client;
use crate::control::message::{LeaseInfo, Operation, Progress, ReaderInfo, Readers, Reply, State, Status};
use crate::error::{Error, Kind, Result, shown};
use crate::failure::Failure;
use crate::manifest::Manifest;
use crate::registry::Record;
use crate::source::{self, Selection, identity};
use crate::units::ByteSize;

/// Changes of the source, and faults of the view, that are named one by one.
const LINES_MAX: usize = 5;

const HELP_AFTER: &str = "\
Compares the source with what was loaded, and checks that every file of the view is still whole and \
immutable. --readers has the daemon look through all processes for those that have a file of it open or mapped, \
and shows what each has mapped, how much of that is resident or became private copies, and its own memory: a \
loader that copies the model is seen there. Sizes carry binary suffixes; with --json they are bytes, and times \
seconds. Exit codes: 0 ready, 1 failed, dead, stopping or unreachable, 3 there is no such cache, 4 loading.

Example:
  iloader status qwen --json | jq .huge_page_bytes
  iloader status qwen --readers";

/// Show a cache's state, memory, leases and integrity
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    answer: TimeoutArgs,
    /// Show every process that has it open or mapped, with a lease or without
    #[arg(long)]
    readers: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the status; gives the exit code that the state stands for.
pub(crate) fn status(args: &StatusArgs) -> Result<u8> {
    let target = Target::of(&args.target, args.answer.timeout)?;
    let (snapshot, client) = ask(&target)?;
    let findings = match (client, snapshot.status()) {
        (Some(client), Some(status)) if status.state == State::Ready => {
            examine(&target, client, status, args.readers)
        }
        _ => Findings::default(),
    };
    if args.json {
        output::print_json(&json::StatusAnswer {
            cache: snapshot.document(),
            source_changed: findings.source_changes.as_ref().map(|changes| !changes.is_empty()),
            source_changes: findings.source_changes.as_deref().unwrap_or_default(),
            view_faults: &findings.view_faults,
            passthrough: findings.passthrough.as_deref(),
            swapped_bytes: findings.swapped_bytes,
            readers: findings.readers.as_ref().map(|found| found.readers.as_slice()),
            unseen: findings.readers.as_ref().map(|found| found.unseen.as_slice()),
            unseen_of_others: findings.readers.as_ref().map(|found| found.unseen_of_others),
        })?;
    } else {
        output::print(&output::fields(&rows(&snapshot, &findings)))?;
        if let Some(error) = snapshot.error.as_ref() {
            output::error(error);
        }
    }
    Ok(exit_code(snapshot.state))
}

fn exit_code(state: State) -> u8 {
    match state {
        State::Ready => 0,
        State::Loading => Kind::TimedOut.exit_code(),
        State::Stopping | State::Failed | State::Dead | State::Unreachable => Kind::Failed.exit_code(),
    }
}

/// A cache at one moment: what its daemon says, or what is known without it.
#[derive(Debug)]
pub(super) struct Snapshot {
    name: String,
    state: State,
    status: Option<Box<Status>>,
    record: Option<Record>,
    /// Why there is no status.
    error: Option<Error>,
}

impl Snapshot {
    /// Asks the daemon of `target`.
    ///
    /// # Errors
    ///
    /// [`Kind::NotFound`] where there is no such cache (any more). A daemon that is dead or does not answer
    /// is no error but a state.
    pub(super) fn of(target: &Target) -> Result<Snapshot> {
        ask(target).map(|(snapshot, _)| snapshot)
    }

    fn without_answer(target: &Target, state: State, error: Option<Error>) -> Snapshot {
        let record = target.record().cloned();
        Snapshot { name: target.bare_name().to_owned(), state, status: None, record, error }
    }

    /// What the daemon said.
    pub(super) fn status(&self) -> Option<&Status> {
        self.status.as_deref()
    }

    /// The cache's name; empty where only its socket is known and nobody answers.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// What it is doing.
    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Why its daemon says nothing.
    pub(super) fn error(&self) -> Option<&Error> {
        self.error.as_ref()
    }

    /// The state as JSON and people read it.
    pub(super) fn state_name(&self) -> &'static str {
        match self.state {
            State::Loading => "loading",
            State::Ready => "ready",
            State::Stopping => "stopping",
            State::Failed => "failed",
            State::Dead => "dead",
            State::Unreachable => "unreachable",
        }
    }

    /// The source directory, where it is known.
    pub(super) fn source(&self) -> Option<&str> {
        let registered = || self.record.as_ref().map(|record| record.source.as_str());
        self.status.as_ref().map(|status| status.source.as_str()).or_else(registered)
    }

    /// The cache in JSON.
    pub(super) fn document(&self) -> json::Cache<'_> {
        if let Some(status) = &self.status {
            return json::Cache::Known(status);
        }
        let record = self.record.as_ref();
        json::Cache::Registered(json::Registered {
            name: &self.name,
            state: self.state,
            pid: record.map(|record| record.pid),
            view: record.map(|record| record.view.as_str()),
            source: record.map(|record| record.source.as_str()),
            created: record.map(|record| record.created.as_str()),
            log: record.map(|record| record.log_file.as_str()),
            socket: record.map(|record| record.socket.as_str()),
            error: self.error.as_ref().map(Failure::from),
        })
    }
}

/// Asks the daemon, and keeps the conversation for more.
fn ask(target: &Target) -> Result<(Snapshot, Option<Client>)> {
    let unanswered = |state, error| Ok((Snapshot::without_answer(target, state, Some(error)), None));
    match target.standing() {
        Standing::Unknown => return Err(target.unknown()),
        Standing::Failed(error) => return unanswered(State::Failed, error),
        Standing::Dead => return unanswered(State::Dead, target.dead(LEFT_FOR_LATER)),
        Standing::Elsewhere(place) => return unanswered(State::Unreachable, target.elsewhere(place)),
        Standing::Alive => {}
    }
    match converse(target) {
        Ok(Some((status, client))) => {
            let (name, state, record) = (status.name.clone(), status.state, target.record().cloned());
            let status = Some(Box::new(status));
            Ok((Snapshot { name, state, status, record, error: None }, Some(client)))
        }
        // It is going: a daemon listens before it is registered.
        Ok(None) => Ok((Snapshot::without_answer(target, State::Stopping, None), None)),
        Err(error) if error.kind() == Kind::NotFound => {
            let now = target.refreshed();
            match now.standing() {
                Standing::Failed(error) => unanswered(State::Failed, error),
                Standing::Dead => unanswered(State::Dead, now.dead(LEFT_FOR_LATER)),
                Standing::Alive if now.is_registered() => {
                    Ok((Snapshot::without_answer(target, State::Stopping, None), None))
                }
                _ => Err(error),
            }
        }
        Err(error) => unanswered(State::Unreachable, error),
    }
}

fn converse(target: &Target) -> Result<Option<(Status, Client)>> {
    let Some(mut client) = target.try_connect()? else { return Ok(None) };
    match client.request(Operation::Status {})? {
        Reply::Status(status) => Ok(Some((*status, client))),
        other => Err(target.unexpected(&other)),
    }
}

/// What was found beside what the daemon says.
#[derive(Debug, Default)]
struct Findings {
    /// What differs in the source; `None`: not looked at.
    source_changes: Option<Vec<String>>,
    /// What is wrong with the view.
    view_faults: Vec<String>,
    /// Whether the view was looked at.
    is_view_checked: bool,
    /// Files of the view that are the source itself, which may change; `None`: not looked at.
    passthrough: Option<Vec<String>>,
    /// They are those of a generation on disk.
    is_generation: bool,
    /// How much of it is swapped out; `None`: not known.
    swapped_bytes: Option<u64>,
    /// Who reads; `None`: not looked at.
    readers: Option<Box<Readers>>,
}

/// Looks at source and view of a ready cache, and at its readers where asked for.
fn examine(target: &Target, mut client: Client, status: &Status, wants_readers: bool) -> Findings {
    let manifest = match client.request(Operation::Manifest {}) {
        Ok(Reply::Manifest(manifest)) => Ok(manifest),
        Ok(other) => Err(target.unexpected(&other)),
        Err(error) => Err(error),
    };
    // Last: a look that takes longer than it is waited for leaves a connection on which nothing else can be asked.
    let readers = wants_readers.then(|| readers_of(target, &mut client)).flatten();
    let manifest = match manifest {
        Ok(manifest) => manifest,
        Err(error) => return Findings::unknown(&error, readers),
    };
    let passed = manifest.files.iter().filter(|file| file.passthrough);
    let mut swapped = Swapped::new();
    let mut count = |file, stat: &_| swapped.count(file, stat);
    let view = Path::new(&status.view);
    let view_faults = preflight::faults(view, &manifest, &status.backing, LINES_MAX, &mut count);
    // A file that is not what it was is not counted: the sum would be short of it.
    let swapped_bytes = swapped.bytes().filter(|_| view_faults.is_empty());
    Findings {
        passthrough: Some(passed.map(|file| file.path.clone()).collect()),
        is_generation: status.generation.is_some(),
        source_changes: Some(source_changes(&manifest)),
        view_faults,
        is_view_checked: true,
        swapped_bytes,
        readers,
    }
}

/// Who reads, as the daemon sees it: what its decisions hang on.
fn readers_of(target: &Target, client: &mut Client) -> Option<Box<Readers>> {
    let error = match client.request(Operation::Readers {}) {
        Ok(Reply::Readers(readers)) => return Some(readers),
        Ok(other) => target.unexpected(&other),
        Err(error) => error,
    };
    output::warn(&format!("the readers are not known: {}", error.message()));
    None
}

impl Findings {
    fn unknown(error: &Error, readers: Option<Box<Readers>>) -> Findings {
        output::warn(&format!("source and view were not compared: {}", error.message()));
        Findings { readers, ..Findings::default() }
    }
}

/// What the same selection would find different today, one line each.
fn source_changes(manifest: &Manifest) -> Vec<String> {
    match source::select(Path::new(&manifest.source), &manifest.selection) {
        Ok(now) => identity::differences(&Selection::of_manifest(manifest), &now, LINES_MAX),
        Err(error) => vec![error.message().to_owned()],
    }
}

/// The status for people: a label and a value each.
fn rows(snapshot: &Snapshot, findings: &Findings) -> Vec<(&'static str, String)> {
    let mut rows = vec![("name", snapshot.name.clone()), ("state", snapshot.state_name().to_owned())];
    match (&snapshot.status, &snapshot.record) {
        (Some(status), _) => {
            rows.extend(load_rows(status));
            rows.extend(finding_rows(findings));
            rows.extend(lease_rows(status));
            rows.extend(findings.readers.iter().flat_map(|found| reader_rows(found)));
            rows.extend(memory_rows(status));
            rows.extend(daemon_rows(status));
        }
        (None, Some(record)) => rows.extend([
            ("pid", record.pid.to_string()),
            ("view", record.view.clone()),
            ("source", record.source.clone()),
            ("created", record.created.clone()),
            ("log", record.log_file.clone()),
        ]),
        (None, None) => {}
    }
    rows
}

fn load_rows(status: &Status) -> Vec<(&'static str, String)> {
    let Progress { bytes_done, bytes_total, files_done, files_total, seconds } = status.progress;
    let mut rows = Vec::new();
    if status.state == State::Loading {
        let so_far = format!(
            "{} of {} ({} of {} files) in {}",
            ByteSize(bytes_done),
            ByteSize(bytes_total),
            files_done,
            files_total,
            output::seconds(seconds)
        );
        rows.push(("progress", so_far));
    }
    rows.push(("view", status.view.clone()));
    rows.push(("source", status.source.clone()));
    rows.extend(status.generation.clone().map(|generation| ("loaded from", generation)));
    rows.push(("bytes", format!("{} ({} bytes)", ByteSize(status.bytes), status.bytes)));
    rows.push(("files", status.files.to_string()));
    if status.state == State::Ready {
        rows.push(("loaded in", output::seconds(seconds)));
        rows.extend(verified_row(status));
    }
    rows
}

/// What `--verify` compared, where it was asked for.
fn verified_row(status: &Status) -> Option<(&'static str, String)> {
    let is_asked_for = status.settings.get("--verify").is_some_and(|setting| setting == "on");
    let compared = match status.verified_files {
        0 => "hashed, with nothing to compare with".to_owned(),
        files => {
            let whose = if status.generation.is_some() { "the generation" } else { "the hub cache" };
            format!("{files} files, against {whose}")
        }
    };
    is_asked_for.then_some(("verified", compared))
}

fn finding_rows(findings: &Findings) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    let mut lines = |label, good: &str, bad: &[String]| {
        if bad.is_empty() {
            rows.push((label, good.to_owned()));
        }
        rows.extend(bad.iter().map(|line| (label, line.clone())));
    };
    if let Some(changes) = &findings.source_changes {
        lines("source now", "unchanged", changes);
    }
    if findings.is_view_checked {
        lines("view now", "whole and immutable", &findings.view_faults);
    }
    let swapped = findings.swapped_bytes.map(|bytes| ("swapped", ByteSize(bytes).to_string()));
    rows.extend(swapped);
    rows.extend(passthrough_row(findings));
    rows
}

/// What a reader of the view does not get from memory, and can't rely on to stay as it is.
fn passthrough_row(findings: &Findings) -> Option<(&'static str, String)> {
    let paths = findings.passthrough.as_deref().unwrap_or_default();
    let mut named: Vec<String> = paths.iter().take(LINES_MAX).map(shown).collect();
    if paths.len() > named.len() {
        named.push(format!("{} more", paths.len() - named.len()));
    }
    let whose = if findings.is_generation { "the generation" } else { "the source" };
    let what = format!("{} ({whose} itself, not in memory)", named.join(", "));
    (!named.is_empty()).then_some(("passed through", what))
}

fn lease_rows(status: &Status) -> Vec<(&'static str, String)> {
    let mut rows = vec![("leases", status.leases.len().to_string())];
    rows.extend(status.leases.iter().map(|lease| ("lease", format!("pid {}  {}", lease.pid, lease.command))));
    if status.state == State::Ready && status.leases.is_empty() {
        let ttl = status.idle_ttl_seconds.map(|ttl| format!(" (evicted after {})", output::seconds(ttl)));
        rows.push(("idle", output::seconds(status.idle_seconds) + &ttl.unwrap_or_default()));
    }
    rows
}

fn reader_rows(found: &Readers) -> Vec<(&'static str, String)> {
    let mut rows = vec![("readers", found.readers.len().to_string())];
    rows.extend(found.readers.iter().map(|reader| ("reader", reader_in_words(reader))));
    let hidden = |process: &LeaseInfo| format!("pid {}  {}", process.pid, process.command);
    rows.extend(
        found.unseen.iter().map(|process| ("not seen", hidden(process) + ": it can't be looked into")),
    );
    if found.unseen_of_others > 0 {
        let count = found.unseen_of_others;
        rows.push((
            "not seen",
            format!("{count} processes of other users, of whom only the privileged can read it"),
        ));
    }
    rows
}

fn reader_in_words(reader: &ReaderInfo) -> String {
    let ReaderInfo { pid, command, lease, descriptors, mapped_bytes, .. } = reader;
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), |bytes| ByteSize(bytes).to_string());
    format!(
        "pid {pid}  {command}: {} lease, {} mapped, {} of it resident, {} private copies, {} of its own, \
         {descriptors} descriptors",
        if *lease { "a" } else { "no" },
        ByteSize(*mapped_bytes),
        size(reader.resident_bytes),
        size(reader.private_bytes),
        size(reader.own_bytes),
    )
}

fn memory_rows(status: &Status) -> Vec<(&'static str, String)> {
    let reason =
        |what: &str, why: &str| if why.is_empty() { what.to_owned() } else { format!("{what} ({why})") };
    let mut rows = vec![("backing", reason(&status.backing, &status.backing_reason))];
    rows.push(("engine", reason(&status.engine, &status.engine_reason)));
    rows.extend(status.charged_cgroup.clone().map(|cgroup| ("charged to", cgroup)));
    if status.state == State::Ready {
        let (huge, all) = (status.huge_page_bytes, status.allocated_bytes);
        let locked = match status.locked_bytes {
            0 => String::new(),
            locked => format!(", {} locked", ByteSize(locked)),
        };
        rows.push(("memory", ByteSize(all).to_string() + &locked));
        rows.push(("huge pages", format!("{} ({} %)", ByteSize(huge), percent(huge, all))));
        rows.push((
            "read",
            format!(
                "{} direct, {} from the page cache, {} through it",
                ByteSize(status.read.direct_bytes),
                ByteSize(status.read.cached_bytes),
                ByteSize(status.read.buffered_bytes)
            ),
        ));
    }
    rows
}

fn daemon_rows(status: &Status) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("pid", status.pid.to_string()),
        ("created", status.created.clone()),
        ("socket", status.socket.clone()),
        ("log", status.log.clone()),
        ("version", format!("{} (protocol {})", status.tool, status.protocol)),
    ];
    rows.extend(status.warnings.iter().map(|warning| ("warning", warning.clone())));
    rows
}

/// Rounded down, so that 100 means all of it; of nothing, all.
fn percent(part: u64, whole: u64) -> u64 {
    match whole {
        0 => 100,
        _ => u64::try_from(u128::from(part) * 100 / u128::from(whole)).unwrap_or(u64::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{self, FILE, Standin};
    use super::*;
    use std::os::fd::AsFd;

    fn json(standin: &Standin) -> serde_json::Value {
        let output = standin.iloader(&["status", "--json", "--base-dir", "BASE", "qwen"]);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    }

    #[test]
    fn a_ready_cache_is_shown_with_source_and_view() {
        let standin = Standin::start(true, testing::ready);
        let output = standin.iloader(&["status", "--base-dir", "BASE", "qwen"]);
        assert_eq!((output.status.code(), testing::text(&output.stderr).as_str()), (Some(0), ""));
        let text = testing::text(&output.stdout);
        for line in [
            "state:       ready",
            "source now:  unchanged",
            "view now:    whole and immutable",
            "swapped:     0 B",
            "leases:      1",
            "lease:       pid 77  engine\\n--now",
            "bytes:       7 B (7 bytes)",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} in\n{text}");
        }
        let json = json(&standin);
        assert_eq!(
            (&json["schema"], &json["state"], &json["pid"]),
            (&1.into(), &"ready".into(), &std::process::id().into())
        );
        assert_eq!((&json["source_changed"], &json["view_faults"]), (&false.into(), &serde_json::json!([])));
    }

    #[test]
    fn readers_are_shown_where_asked_for() {
        let standin = Standin::start(true, |operation, facts| match operation {
            Operation::Readers {} => {
                let hidden = LeaseInfo { pid: 8, command: "agent".to_owned() };
                let readers = vec![testing::reader(9)];
                vec![Reply::Readers(Box::new(Readers { readers, unseen: vec![hidden], unseen_of_others: 3 }))]
            }
            _ => testing::ready(operation, facts),
        });
        let text = |more: &[&str]| {
            let output = standin.iloader(&[&["status", "--base-dir", "BASE", "qwen"], more].concat());
            testing::text(&output.stdout)
        };
        let shown = text(&["--readers"]);
        for part in [
            "readers:     1",
            "reader:      pid 9  engine: no lease, 4.0 KiB mapped, 4.0 KiB of it resident, 0 B private copies, ? of",
            "not seen:    pid 8  agent: it can't be looked into",
            "not seen:    3 processes of other users",
        ] {
            assert!(shown.lines().any(|line| line.starts_with(part)), "{part} in\n{shown}");
        }
        assert!(!text(&[]).contains("reader"), "nobody asked");
        let json: serde_json::Value = serde_json::from_str(&text(&["--readers", "--json"])).expect("JSON");
        assert_eq!((&json["readers"][0]["pid"], &json["readers"][0]["own_bytes"]), (&9.into(), &().into()));
        assert_eq!((&json["unseen"][0]["pid"], &json["unseen_of_others"]), (&8.into(), &3.into()));
        let json: serde_json::Value = serde_json::from_str(&text(&["--json"])).expect("JSON");
        assert!(json["readers"].is_null() && json["unseen"].is_null(), "{json}");
    }

    #[test]
    fn a_look_that_takes_long_leaves_the_rest_known() {
        let standin = Standin::start(true, |operation, facts| match operation {
            Operation::Readers {} => Vec::new(),
            _ => testing::ready(operation, facts),
        });
        let words = ["status", "--readers", "--json", "--timeout=0.2", "--base-dir", "BASE", "qwen"];
        let output = standin.iloader(&words);
        let stderr = testing::text(&output.stderr);
        assert!(stderr.contains("the readers are not known") && !stderr.contains("compared"), "{stderr}");
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!((&json["source_changed"], json["readers"].is_null()), (&false.into(), true));
    }

    #[test]
    fn a_changed_source_is_named() {
        let standin = Standin::start(true, |operation, facts| {
            let mut replies = testing::ready(operation, facts);
            if let Some(Reply::Manifest(manifest)) = replies.first_mut() {
                manifest.files[0].bytes += 1;
                manifest.files[0].path = "gone.json".to_owned();
            }
            replies
        });
        let changes = json(&standin)["source_changes"].to_string();
        assert!(
            changes.contains("gone.json: removed") && changes.contains("model.safetensors: added"),
            "{changes}"
        );
    }

    #[test]
    fn a_view_that_was_meddled_with_is_named() {
        let standin = Standin::start(true, testing::ready);
        let faults =
            |standin: &Standin| json(standin)["view_faults"][0].as_str().unwrap_or("whole").to_owned();
        let segment = standin.facts.segment.as_fd();
        rustix::fs::fchmod(segment, rustix::fs::Mode::RWXU).expect("seals don't cover the mode");
        assert!(faults(&standin).contains("its mode is 0700 instead of 0444"), "{}", faults(&standin));
        rustix::fs::fchmod(segment, rustix::fs::Mode::from_raw_mode(0o444)).expect("set back");
        testing::touch(&std::fs::File::from(standin.facts.segment.try_clone().expect("a copy")));
        assert!(faults(&standin).contains("modification time was changed"));
        std::fs::remove_file(standin.facts.directory.join("view").join(FILE)).expect("removed");
        assert!(faults(&standin).contains("can't be opened"));
    }

    #[test]
    fn states_have_their_exit_codes() {
        for (state, code) in [(State::Loading, 4), (State::Stopping, 1)] {
            let standin = Standin::start(true, move |_, facts| {
                vec![Reply::Status(Box::new(testing::status(facts, state)))]
            });
            let output = standin.iloader(&["status", "--base-dir", "BASE", "qwen"]);
            assert_eq!(output.status.code(), Some(code), "{state:?}");
            let unknown = standin.iloader(&["status", "--base-dir", "BASE", "another"]);
            assert_eq!(unknown.status.code(), Some(3));
        }
    }

    #[test]
    fn a_daemon_that_does_not_answer_is_unreachable() {
        let standin = Standin::start(true, |_, _| Vec::new());
        let output = standin.iloader(&["status", "--json", "--timeout", "0.1", "--base-dir", "BASE", "qwen"]);
        assert_eq!(output.status.code(), Some(1));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!((&json["state"], &json["error"]["kind"]), (&"unreachable".into(), &"timed-out".into()));
        assert_eq!(json["source"], standin.facts.text("source"));
    }

    #[test]
    fn percentages_do_not_overflow() {
        assert_eq!((percent(0, 0), percent(1, 3), percent(u64::MAX, 1)), (100, 33, u64::MAX));
    }
}
