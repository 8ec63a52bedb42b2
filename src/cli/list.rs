//! `list`: every resident cache of a BASE, the dead ones too.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::Args;

use super::args::{self, BaseArgs};
use super::json;
use super::output::{self, Align, Table};
use super::status::Snapshot;
use super::target::{self, Target};
use crate::error::Result;
use crate::registry;
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
    let targets: Vec<Target> = registry::list(&base)?
        .into_iter()
        .map(|registration| Target::registered(base.clone(), registration, args.timeout))
        .collect();
    let snapshots: Vec<Snapshot> = ask_all(&targets).into_iter().flatten().collect();
    if args.json {
        let caches = snapshots.iter().map(Snapshot::document).collect();
        return output::print_json(&json::ListAnswer { base: &base.path().to_string_lossy(), caches });
    }
    if snapshots.is_empty() {
        output::note("there are no caches; start one with: iloader start MODEL_DIR --name NAME");
    }
    output::print(&table(&snapshots))
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
