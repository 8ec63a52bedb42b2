//! `list`: every resident cache of a BASE, the dead ones too.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::Args;

use super::args::{self, BaseArgs};
use super::json;
use super::output::{self, Align, Table};
use super::status::Snapshot;
use super::target::{self, Target};
use crate::daemon::ledger::{Ledger, Usage};
use crate::error::{Result, shown};
use crate::failure::Failure;
use crate::registry::{self, Registration};
use crate::units::ByteSize;

/// Daemons that are asked at one time: enough that a few which hang do not hold up the others.
const ASKED_AT_ONCE: usize = 16;

const HELP_AFTER: &str = "\
States: loading, ready, stopping, failed, dead (killed or crashed: 'iloader stop NAME' cleans up), unreachable \
(no answer within --timeout). Sizes carry binary suffixes; with --json they are bytes, and times seconds.

Example:
  iloader list --json | jq -r '.caches[] | select(.state == \"ready\") | .name'";

/// List the resident caches
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    base: BaseArgs,
    /// How many seconds each daemon has to answer
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value = "1", value_parser = args::seconds)]
    timeout: Duration,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the list.
pub(crate) fn list(args: &ListArgs) -> Result<()> {
    let base = target::find_base(&args.base)?;
    let registrations = registry::list(&base)?;
    let groups = Groups::of(&base.run_dir(), &registrations);
    let targets: Vec<Target> = registrations
        .into_iter()
        .map(|registration| Target::registered(base.clone(), registration, args.timeout))
        .collect();
    let snapshots: Vec<Snapshot> = ask_all(&targets).into_iter().flatten().collect();
    if args.json {
        let caches = snapshots.iter().map(Snapshot::document).collect();
        return output::print_json(&json::ListAnswer {
            base: &base.path().to_string_lossy(),
            caches,
            quota: groups.own.document(),
            other_quotas: groups.others.iter().map(QuotaGroup::other_document).collect(),
        });
    }
    if snapshots.is_empty() {
        output::note("there are no caches; start one with: iloader start MODEL_DIR --name NAME");
    }
    for error in groups.all().filter_map(|group| group.usage.as_ref().err()) {
        output::warn(error.message());
    }
    let quotas = groups.lines();
    if quotas.is_empty() {
        return output::print(&table(&snapshots));
    }
    output::print(&format!("{}\n{}", table(&snapshots), quotas.concat()))
}

/// The quota groups that the caches of a BASE belong to: one for each directory that a socket is in.
struct Groups {
    /// The one of BASE.
    own: QuotaGroup,
    others: Vec<QuotaGroup>,
}

struct QuotaGroup {
    directory: PathBuf,
    usage: Result<Usage>,
}

impl Groups {
    fn of(run_dir: &Path, registrations: &[Registration]) -> Groups {
        let sockets = registrations.iter().filter_map(|registration| registration.record.as_ref().ok());
        let others: BTreeSet<&Path> = sockets
            .filter_map(|record| Path::new(&record.socket).parent())
            .filter(|directory| !is_same(directory, run_dir))
            .collect();
        Groups { own: QuotaGroup::of(run_dir), others: others.into_iter().map(QuotaGroup::of).collect() }
    }

    fn all(&self) -> impl Iterator<Item = &QuotaGroup> {
        std::iter::once(&self.own).chain(&self.others)
    }

    /// A line for each group that has a quota.
    fn lines(&self) -> Vec<String> {
        let own = self.own.words().map(|words| format!("quota: {words}\n"));
        let others = self.others.iter().filter_map(|group| {
            group.words().map(|words| format!("quota of {}: {words}\n", shown(&group.directory)))
        });
        own.into_iter().chain(others).collect()
    }
}

/// Whether two paths lead to one directory: BASE may be given by a link.
fn is_same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    one == other || real(one) == real(other)
}

impl QuotaGroup {
    fn of(directory: &Path) -> QuotaGroup {
        QuotaGroup { directory: directory.to_owned(), usage: Ledger::of_group(directory).usage() }
    }

    /// Nothing where there is no quota, or where it cannot be told.
    fn words(&self) -> Option<String> {
        let usage = self.usage.as_ref().ok()?;
        let quota = usage.quota_bytes?;
        let free = quota.saturating_sub(usage.used_bytes);
        Some(format!("{}, {} in use, {} free", ByteSize(quota), ByteSize(usage.used_bytes), ByteSize(free)))
    }

    fn document(&self) -> json::Quota {
        let usage = self.usage.as_ref().ok();
        json::Quota {
            quota_bytes: usage.and_then(|usage| usage.quota_bytes),
            quota_used_bytes: usage.map(|usage| usage.used_bytes),
            quota_error: self.usage.as_ref().err().map(Failure::from),
        }
    }

    fn other_document(&self) -> json::OtherQuota<'_> {
        json::OtherQuota { directory: self.directory.to_string_lossy(), quota: self.document() }
    }
}

/// Asks every daemon, several at a time. `None` for a cache that went away meanwhile.
pub(super) fn ask_all(targets: &[Target]) -> Vec<Option<Snapshot>> {
    let answers: Vec<Mutex<Option<Snapshot>>> = targets.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let ask = || {
        while let Some(index) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|at| *at < targets.len()) {
            let snapshot = Snapshot::of(&targets[index]).ok();
            if let Ok(mut answer) = answers[index].lock() {
                *answer = snapshot;
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..ASKED_AT_ONCE.min(targets.len()) {
            // Where no thread can be had, this one asks alone.
            if std::thread::Builder::new().spawn_scoped(scope, ask).is_err() {
                break;
            }
        }
        ask();
    });
    answers.into_iter().map(|answer| answer.into_inner().unwrap_or(None)).collect()
}

fn table(snapshots: &[Snapshot]) -> String {
    let mut table = Table::new(&[
        ("NAME", Align::Left),
        ("STATE", Align::Left),
        ("SIZE", Align::Right),
        ("FILES", Align::Right),
        ("LEASES", Align::Right),
        ("IDLE", Align::Right),
        ("SOURCE", Align::Left),
    ]);
    for snapshot in snapshots {
        let (state, source) = (snapshot.state_name(), snapshot.source().unwrap_or("?"));
        match snapshot.status() {
            Some(status) => table.row([
                status.name.as_str(),
                state,
                &ByteSize(status.bytes).to_string(),
                &status.files.to_string(),
                &status.leases.len().to_string(),
                &output::seconds(status.idle_seconds),
                source,
            ]),
            None => table.row([snapshot.name(), state, "-", "-", "-", "-", source]),
        }
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{self, Standin};
    use std::os::unix::net::UnixListener;

    #[test]
    fn hanging_and_dead_daemons_are_listed_beside_the_others() {
        let standin = Standin::start(true, testing::ready);
        let run = standin.facts.directory.join("run");
        let mut held = Vec::new();
        let add = |name: &str, socket: &str| {
            let mut record = testing::registration(&standin.facts);
            record.name = name.to_owned();
            record.socket = standin.facts.text(socket);
            record.write(&run.join(format!("{name}.json"))).expect("registered");
        };
        add("dead", "run/dead.sock");
        add("hanging", "run/hanging.sock");
        // It takes connections and never answers.
        held.push(UnixListener::bind(run.join("hanging.sock")).expect("bound"));
        let lock = crate::registry::Lock::try_exclusive(&run.join("hanging.lock")).expect("lockable");
        assert!(lock.is_some());

        let output = standin.iloader(&["list", "--json", "--timeout", "0.2", "--base-dir", "BASE"]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let states: Vec<(&str, &str)> = json["caches"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|cache| (cache["name"].as_str().expect("a name"), cache["state"].as_str().expect("a state")))
            .collect();
        assert_eq!(states, [("dead", "dead"), ("hanging", "unreachable"), ("qwen", "ready")]);
        assert!(run.join("dead.json").exists(), "looking changes nothing");

        let output = standin.iloader(&["list", "--timeout", "0.2", "--base-dir", "BASE"]);
        let text = testing::text(&output.stdout);
        assert!(text.starts_with("NAME     STATE        SIZE  FILES  LEASES   IDLE  SOURCE\n"), "{text}");
        assert!(text.contains("\nqwen     ready         7 B      1       1  0.0 s  /"), "{text}");
    }

    #[test]
    fn no_caches_are_no_error() {
        let standin = Standin::start(false, testing::ready);
        let output = standin.iloader(&["list", "--base-dir", "BASE/none"]);
        assert_eq!(output.status.code(), Some(0));
        assert!(testing::text(&output.stderr).starts_with("note: there are no caches"));
    }
}
