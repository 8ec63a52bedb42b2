//! `wait`: until a cache is ready, with its progress.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;

use super::args::{self, TargetArgs};
use super::progress::Bar;
use super::target::{LEFT_FOR_LATER, Standing, Target};
use crate::control::client::Client;
use crate::control::message::{Operation, Progress, Reply};
use crate::error::{Error, Kind, Result};
use crate::units::ByteSize;

/// How long a daemon may take for an answer while the wait itself is longer.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause before a daemon that is just ending, or its successor, is asked again.
const ASKED_AGAIN_AFTER: Duration = Duration::from_millis(20);

const HELP_AFTER: &str = "\
Exit codes: 0 ready, 1 the load failed or its daemon died, 3 there is no such cache (any more), 4 timed out; \
the load then goes on.

Example:
  iloader start /models/Qwen3-8B --name qwen --no-wait
  iloader wait qwen --timeout 300";

/// Wait until a cache is ready
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct WaitArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// How many seconds to wait
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value = "600", value_parser = args::seconds)]
    timeout: Duration,
    /// Show no progress
    #[arg(long)]
    quiet: bool,
}

/// Waits. Prints nothing on stdout.
pub(crate) fn wait(args: &WaitArgs) -> Result<()> {
    let target = Target::of(&args.target, args.timeout.min(ANSWER_TIMEOUT))?;
    until_ready(&target, Instant::now() + args.timeout, args.quiet).map(drop)
}

/// Waits until the cache is ready; gives the path of its view and the conversation, for more.
///
/// # Errors
///
/// [`Kind::TimedOut`] at `deadline`, [`Kind::Failed`] where the load failed or the daemon died,
/// [`Kind::NotFound`] where the cache is gone.
pub(crate) fn until_ready(target: &Target, deadline: Instant, quiet: bool) -> Result<(PathBuf, Client)> {
    // Made late, so that a cache that is ready shows none.
    let mut bar: Option<Bar> = None;
    let mut last: Option<Progress> = None;
    let mut client = ask(target, deadline)?;
    loop {
        match client.next(Some(deadline)) {
            Ok(Reply::Ready { view }) => {
                if let Some(bar) = bar {
                    bar.finish();
                }
                return Ok((PathBuf::from(view), client));
            }
            Ok(Reply::Progress(progress)) => {
                last = Some(progress);
                bar.get_or_insert_with(|| Bar::new(&format!("loading {}", target.label()), quiet))
                    .update(&progress);
            }
            Ok(Reply::Error(error)) => return Err(failed(target, error.into())),
            Ok(Reply::Stopping { .. }) => return Err(stopped(target)),
            Ok(other) => return Err(target.unexpected(&other)),
            Err(error) if error.kind() == Kind::TimedOut => {
                // A daemon that loads says so at once: one that said nothing hangs.
                return Err(match last {
                    Some(progress) if !client.is_stopped() => timed_out(target, &progress),
                    _ => error.context(target.label()),
                });
            }
            Err(error) if error.kind() == Kind::NotFound => {
                ended(target, error, deadline)?;
                client = ask(target, deadline)?;
            }
            Err(error) => return Err(error),
        }
    }
}

fn ask(target: &Target, deadline: Instant) -> Result<Client> {
    loop {
        let mut client = target.connect_until(deadline)?;
        match client.send(Operation::Wait { progress: true }) {
            Ok(()) => return Ok(client),
            Err(error) if error.kind() == Kind::NotFound => ended(target, error, deadline)?,
            Err(error) => return Err(error),
        }
    }
}

/// A load that fails is a failed wait, whatever made it fail.
fn failed(target: &Target, error: Error) -> Error {
    error.with_kind(Kind::Failed).context(format!("{} did not become ready", target.label()))
}

fn stopped(target: &Target) -> Error {
    Error::new(Kind::NotFound, format!("{} was stopped", target.label())).hint("start it again")
}

/// The connection is gone: what became of the cache stands in the registry. `Ok` where it is to be asked
/// again: the daemon closes its ear before it registers why, or another one has taken its place.
fn ended(target: &Target, error: Error, deadline: Instant) -> Result<()> {
    let now = target.refreshed();
    Err(match now.standing() {
        Standing::Failed(error) => error,
        Standing::Dead => now.dead(LEFT_FOR_LATER),
        Standing::Unknown => stopped(target),
        Standing::Alive if target.is_registered() && Instant::now() < deadline => {
            std::thread::sleep(ASKED_AGAIN_AFTER);
            return Ok(());
        }
        Standing::Alive | Standing::Elsewhere(_) => error,
    })
}

fn timed_out(target: &Target, progress: &Progress) -> Error {
    let so_far = match progress.bytes_total {
        0 => String::new(),
        total => format!(" ({} of {} so far)", ByteSize(progress.bytes_done), ByteSize(total)),
    };
    Error::new(Kind::TimedOut, format!("{} is not ready yet{so_far}; the load goes on", target.label())).hint(
        format!("follow it with 'iloader wait {0}', or end it with 'iloader stop {0}'", target.argument()),
    )
}

#[cfg(test)]
mod tests {
    use super::super::testing::{self, Standin};
    use super::*;
    use crate::failure::Failure;

    #[test]
    fn each_end_of_a_wait_has_its_exit_code() {
        for kind in [Kind::SourceChanged, Kind::NoRoom, Kind::NotFound] {
            let standin = Standin::start(true, move |_, _| {
                vec![Reply::Error(Failure::from(&Error::new(kind, "it went wrong").hint("mend it")))]
            });
            let output = standin.iloader(&["wait", "--base-dir", "BASE", "qwen"]);
            assert_eq!(output.status.code(), Some(1), "{kind:?}");
            let stderr = testing::text(&output.stderr);
            assert!(stderr.contains("it went wrong\n hint: mend it\n"), "{stderr}");
        }
        let standin = Standin::start(true, |_, _| vec![Reply::Stopping { notes: Vec::new(), holders: None }]);
        assert_eq!(standin.iloader(&["wait", "--base-dir", "BASE", "qwen"]).status.code(), Some(3));
        let standin = Standin::start(true, |_, _| vec![Reply::Progress(Progress::default())]);
        let code = |arguments: &[&str]| standin.iloader(arguments).status.code();
        assert_eq!(code(&["wait", "--timeout", "0.1", "--base-dir", "BASE", "qwen"]), Some(4));
        assert_eq!(code(&["wait", "--base-dir", "BASE", "another"]), Some(3));
    }

    #[test]
    fn a_ready_cache_prints_its_view_and_manifest() {
        let standin = Standin::start(true, testing::ready);
        assert!(standin.iloader(&["wait", "--base-dir", "BASE", "--name", "qwen"]).stdout.is_empty());
        let output = standin.iloader(&["view", "--base-dir", "BASE", "qwen"]);
        assert_eq!(testing::text(&output.stdout), format!("{}\n", standin.facts.text("view")));
        let output = standin.iloader(&["manifest", "--base-dir", "BASE", "qwen"]);
        let manifest: crate::manifest::Manifest = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(manifest, standin.facts.manifest());
    }

    #[test]
    fn a_view_that_is_not_ready_prints_nothing() {
        let standin = Standin::start(true, |_, _| vec![Reply::Progress(Progress::default())]);
        let output = standin.iloader(&["view", "--timeout", "0.1", "--base-dir", "BASE", "qwen"]);
        assert_eq!((output.stdout.is_empty(), output.status.code()), (true, Some(4)));
    }

    #[test]
    fn a_dead_cache_is_said_to_be_dead_and_cleaned_up() {
        let standin = Standin::start(false, testing::ready);
        let path = standin.facts.directory.join("run/qwen.json");
        testing::crashed(&standin.facts).write(&path).expect("registered");
        let view = || standin.iloader(&["view", "--base-dir", "BASE", "qwen"]);
        let output = view();
        assert_eq!((output.stdout.is_empty(), output.status.code()), (true, Some(1)));
        assert!(testing::text(&output.stderr).contains("was killed or crashed"), "{output:?}");
        assert!(!path.exists());
        assert_eq!(view().status.code(), Some(3));
    }

    #[test]
    fn a_failed_load_says_why_and_is_kept() {
        let standin = Standin::start(false, testing::ready);
        let mut record = testing::registration(&standin.facts);
        record.failed =
            Some((&Error::new(Kind::SourceChanged, "a.json changed").hint("load it again")).into());
        let path = standin.facts.directory.join("run/qwen.json");
        record.write(&path).expect("registered");
        let output = standin.iloader(&["wait", "--base-dir", "BASE", "qwen"]);
        assert_eq!(output.status.code(), Some(1));
        let stderr = testing::text(&output.stderr);
        assert!(stderr.contains("the load of 'qwen' failed: a.json changed"), "{stderr}");
        let output = standin.iloader(&["status", "--json", "--base-dir", "BASE", "qwen"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(testing::text(&output.stdout).contains("\"state\": \"failed\""), "{output:?}");
        assert!(path.exists());
    }
}
