//! What runs already under the name, and whether it is what is asked for.

use std::path::Path;

use super::super::{output, preflight};
use super::local::LocalCache;
use super::wanted::Wanted;
use crate::control::client::Client;
use crate::control::message::{Operation, Reply, State, Status};
use crate::error::{Error, Kind, Result, shown};
use crate::manifest::Manifest;
use crate::registry::{self, Liveness, Registration};
use crate::source::Selection;
use crate::source::identity::differences;

/// An error names no more files than this.
const FILES_NAMED_MAX: usize = 3;

/// What stands under the name.
pub(super) enum Running {
    /// Nothing that lives, though perhaps leftovers, or a command that holds the lock.
    Nothing,
    /// A daemon that does not listen yet or any more.
    Busy,
    /// What is asked for, loading or ready.
    Same { client: Client, status: Box<Status> },
    /// Another identity, which `error` says.
    Other { client: Client, status: Box<Status>, error: Error },
}

/// Looks at the registration, asks the daemon, and compares.
///
/// # Errors
///
/// [`Kind::Failed`] where the daemon is out of reach.
pub(super) fn look(wanted: &Wanted) -> Result<Running> {
    let Some(registration) = registry::look_up(&wanted.base, &wanted.paths.name) else {
        return Ok(Running::Nothing);
    };
    match &registration.liveness {
        Liveness::Dead => Ok(Running::Nothing),
        Liveness::Elsewhere(place) => {
            Err(Error::new(Kind::Failed, format!("the daemon of '{}' is {place}", registration.name))
                .hint("choose another --name, or another --base-dir"))
        }
        Liveness::Alive => ask(wanted, &registration),
    }
}

fn ask(wanted: &Wanted, registration: &Registration) -> Result<Running> {
    let record = registration.record.as_ref().map_err(Clone::clone)?;
    let mut client = match wanted.connect(Path::new(&record.socket)) {
        Err(error) if error.kind() == Kind::NotFound => {
            return registration.displaced().map_or(Ok(Running::Busy), Err);
        }
        client => client?,
    };
    let status = match client.request(Operation::Status {}) {
        Ok(Reply::Status(status)) => status,
        // It ended between the connecting and the asking.
        Err(error) if error.kind() == Kind::NotFound => return Ok(Running::Busy),
        Err(error) => return Err(error),
        Ok(_) => return Err(Error::new(Kind::Failed, "the daemon answered out of turn")),
    };
    if status.state == State::Stopping {
        return Ok(Running::Busy);
    }
    if status.identity == wanted.config.identity {
        return Ok(Running::Same { client, status });
    }
    let error = other_identity(wanted, &status, &mut client);
    Ok(Running::Other { client, status, error })
}

/// Whether the cache at the other end can be reused: not so where it is ending, which withdraws its view first.
///
/// # Errors
///
/// [`Kind::Failed`] where the view of a cache that lives on is broken.
pub(super) fn is_whole(client: &mut Client, status: &Status) -> Result<bool> {
    match preflight::check_published(client, status) {
        Ok(()) => Ok(true),
        Err(_) if is_ending(client) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the cache at the other end, which was not ending a moment ago, is ending or has ended by now.
pub(super) fn is_ending(client: &mut Client) -> bool {
    match client.request(Operation::Status {}) {
        Ok(Reply::Status(status)) => status.state == State::Stopping,
        Ok(_) => false,
        Err(error) => error.kind() == Kind::NotFound,
    }
}

fn other_identity(wanted: &Wanted, status: &Status, client: &mut Client) -> Error {
    let mut found: Vec<String> = Vec::new();
    let now = &wanted.config.settings;
    let names: std::collections::BTreeSet<&String> = status.settings.keys().chain(now.keys()).collect();
    for name in names {
        let value = |map: &std::collections::BTreeMap<String, String>| map.get(name).cloned();
        let (was, is) = (value(&status.settings), value(now));
        if was != is {
            let or_unknown = |value: Option<String>| value.unwrap_or_else(|| "unknown".to_owned());
            found.push(format!("{name} {} → {}", or_unknown(was), or_unknown(is)));
        }
    }
    if let Ok(Reply::Manifest(manifest)) = client.request(Operation::Manifest {}) {
        found.extend(file_differences(&manifest, &wanted.selection));
    }
    if found.is_empty() {
        found.push("the files of the source have changed".to_owned());
    }
    let name = &status.name;
    Error::new(Kind::Stale, format!("'{name}' runs with another identity: {}", found.join("; "))).hint(
        format!(
            "stop it first (iloader stop {name}, or --replace), or choose another --name; it runs on undisturbed"
        ),
    )
}

/// Which files are others than those that were loaded; empty where another source or selection says it all.
fn file_differences(manifest: &Manifest, now: &Selection) -> Vec<String> {
    if Path::new(&manifest.source) != now.root || manifest.selection != now.rules {
        return Vec::new();
    }
    differences(&Selection::of_manifest(manifest), now, FILES_NAMED_MAX)
}

/// Says where what runs was loaded in another way than is asked for, which changes nothing any more.
pub(super) fn note_other_tuning(wanted: &Wanted, status: &Status) {
    let asked = wanted.config.tuning.by_name();
    let differ: Vec<String> = asked
        .iter()
        .filter_map(|(name, value)| {
            let was = status.tuning.get(name).filter(|was| *was != value)?;
            Some(format!("--{name} {was}, not {value}"))
        })
        .collect();
    if !differ.is_empty() {
        let (name, differ) = (&wanted.config.name, differ.join(", "));
        output::note(&match status.state {
            State::Loading => {
                format!("'{name}' is being loaded, with {differ}; 'iloader stop {name}' ends that")
            }
            _ => format!("'{name}' is loaded already, with {differ}"),
        });
    }
}

/// Says that no generation is made for a cache that runs already.
pub(super) fn note_no_refresh(wanted: &Wanted) {
    if wanted.local.as_ref().is_some_and(LocalCache::is_refreshed) {
        let name = &wanted.config.name;
        output::note(&format!("'{name}' runs already: --refresh-cache copies nothing"));
    }
}

/// Says where what runs listens, where that is not what is asked for: later commands must be given it.
pub(super) fn note_other_socket(wanted: &Wanted, status: &Status) {
    let (name, asked) = (&wanted.config.name, &wanted.config.socket);
    if status.socket != *asked {
        let (socket, asked) = (shown(&status.socket), shown(asked));
        output::note(&format!("'{name}' runs already, with the socket {socket}, not {asked}"));
    }
}
