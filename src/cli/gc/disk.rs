//! `gc` of what is on disk: generations that nobody uses, and what interrupted copies left.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Duration;

use super::super::json;
use super::super::output;
use super::super::root::Root;
use super::{Fate, GcArgs};
use crate::disk::store::{Leftover, Listing};
use crate::disk::{Generation, Store};
use crate::error::{Error, Kind, Result, shown};
use crate::failure::Failure;
use crate::gc::{self, Candidate};
use crate::units::ByteSize;

/// Collects generations, or says what it would.
pub(super) fn collect(args: &GcArgs) -> Result<()> {
    let root = Root::find(&args.root())?;
    let mut sweep = Sweep { apply: args.apply, failure: None };
    let mut held = Vec::new();
    let mut gone = Vec::new();
    let mut listing = Listing::default();
    let mut before = 0;
    if let Some(store) = root.open()? {
        listing = store.list()?;
        held = held_of(&listing);
        before = taken(&held);
        gone = sweep.leftovers(&store, &listing.leftovers);
        sweep.superseded(&store, &mut held);
        sweep.victims(&store, &mut held, args);
    }
    let found = Found { root: &root, held: &held, leftovers: &gone, listing: &listing, before };
    found.print(args)?;
    sweep.failure.map_or(Ok(()), Err)
}

/// A generation, and what it holds.
struct Held<'a> {
    generation: &'a Generation,
    /// Device and inode of its files, and their blocks in bytes.
    inodes: Vec<(u64, u64, u64)>,
    idle: Duration,
    fate: Fate,
}

impl Held<'_> {
    fn is_there(&self) -> bool {
        !matches!(self.fate, Fate::Gone(_))
    }

    fn called(&self) -> String {
        format!("{}@{}", self.generation.name(), self.generation.number())
    }
}

/// A leftover, and why it stays where it was to go.
struct Left<'a> {
    leftover: &'a Leftover,
    error: Option<Error>,
}

fn held_of(listing: &Listing) -> Vec<Held<'_>> {
    let mut held = Vec::new();
    for generation in &listing.generations {
        match generation.inodes() {
            Ok(inodes) => {
                held.push(Held { generation, inodes, idle: generation.idle(), fate: Fate::Open });
            }
            // Removed since it was listed.
            Err(error) if error.kind() == Kind::NotFound => {}
            // Nobody can tell what it holds: it stays, and the others are looked at.
            Err(error) => {
                let fate = Fate::Kept(error.message().to_owned());
                held.push(Held { generation, inodes: Vec::new(), idle: generation.idle(), fate });
            }
        }
    }
    held
}

/// What each generation takes: a file that several have counts for the one that was used last, because removing
/// another frees nothing of it.
fn own_bytes(held: &[Held<'_>]) -> Vec<u64> {
    let mut order: Vec<usize> = (0..held.len()).filter(|at| held[*at].is_there()).collect();
    order.sort_by_key(|at| (held[*at].idle, std::cmp::Reverse(held[*at].generation.number())));
    let mut counted = HashSet::new();
    let mut bytes = vec![0u64; held.len()];
    for at in order {
        for (device, inode, blocks) in &held[at].inodes {
            if counted.insert((*device, *inode)) {
                bytes[at] = bytes[at].saturating_add(*blocks);
            }
        }
    }
    bytes
}

fn taken(held: &[Held<'_>]) -> u64 {
    own_bytes(held).into_iter().fold(0, u64::saturating_add)
}

/// Goes through a root, and removes where it may.
struct Sweep {
    apply: bool,
    /// The last failure that is no reason to keep something.
    failure: Option<Error>,
}

impl Sweep {
    fn leftovers<'a>(&mut self, store: &Store, leftovers: &'a [Leftover]) -> Vec<Left<'a>> {
        let idle = leftovers.iter().filter(|leftover| !leftover.is_in_use);
        let mut found = Vec::new();
        for leftover in idle {
            let removed = if self.apply { store.remove_leftover(leftover) } else { Ok(()) };
            let error = removed.err().filter(|error| error.kind() != Kind::NotFound);
            found.push(Left { leftover, error });
        }
        found
    }

    /// Generations of a name that has a newer one.
    fn superseded(&mut self, store: &Store, held: &mut [Held<'_>]) {
        let mut newest: HashMap<String, u64> = HashMap::new();
        for one in held.iter() {
            let number = newest.entry(one.generation.name().to_string()).or_default();
            *number = one.generation.number().max(*number);
        }
        for one in held.iter_mut().filter(|one| matches!(one.fate, Fate::Open)) {
            let number = newest.get(one.generation.name().as_str()).copied().unwrap_or_default();
            if number > one.generation.number() {
                let reason = format!("{}@{number} is newer", one.generation.name());
                one.fate = self.dispose(store, one).map_or(Fate::Gone(reason), Fate::Kept);
            }
        }
    }

    /// Decides about one victim after the other, each in the light of those before: what it shares with one that
    /// went is its own from then on.
    fn victims(&mut self, store: &Store, held: &mut [Held<'_>], args: &GcArgs) {
        let policy = args.policy();
        loop {
            let candidates = candidates(held);
            let Some((at, why)) = gc::victims(&candidates, &policy).first().copied() else { return };
            held[at].fate =
                self.dispose(store, &held[at]).map_or_else(|| Fate::gone(why, "generations"), Fate::Kept);
        }
    }

    /// Removes a generation, or finds out whether that would be refused: gives why it stays.
    fn dispose(&mut self, store: &Store, one: &Held<'_>) -> Option<String> {
        // Used since it was listed: what was the least recently used is that no more.
        if one.generation.idle() < one.idle {
            return Some("it was used a moment ago".to_owned());
        }
        let outcome = match self.apply {
            true => store.remove(one.generation).map(|()| None),
            false => {
                store.refusal(one.generation).map(|refusal| refusal.map(|error| error.message().to_owned()))
            }
        };
        match outcome {
            Ok(reason) => reason,
            // It went by itself.
            Err(error) if error.kind() == Kind::NotFound => None,
            Err(error) => {
                let reason = error.message().to_owned();
                if error.kind() != Kind::InUse
                    && let Some(earlier) = self.failure.replace(error)
                {
                    output::error(&earlier);
                }
                Some(reason)
            }
        }
    }
}

/// A reason without what stands beside it already: which generation it is about, and that it stays.
fn without_path<'a>(reason: &'a str, path: &Path) -> &'a str {
    let path = shown(path);
    let about = [format!("{path} is not removed: "), format!("the generation {path}: ")];
    about.iter().find_map(|about| reason.strip_prefix(about.as_str())).unwrap_or(reason)
}

fn candidates(held: &[Held<'_>]) -> Vec<Candidate> {
    let bytes = own_bytes(held);
    let candidate = |(one, bytes): (&Held<'_>, u64)| Candidate {
        name: one.called(),
        bytes,
        idle: one.idle,
        is_kept: !matches!(one.fate, Fate::Open),
    };
    held.iter().zip(bytes).map(candidate).collect()
}

/// What there was, and what became of it.
struct Found<'a> {
    root: &'a Root,
    held: &'a [Held<'a>],
    leftovers: &'a [Left<'a>],
    listing: &'a Listing,
    before: u64,
}

impl Found<'_> {
    fn print(&self, args: &GcArgs) -> Result<()> {
        let after = taken(self.held);
        if args.json {
            return output::print_json(&json::DiskCollectAnswer {
                root: &self.root.path.to_string_lossy(),
                applied: args.apply,
                generations: self.held.iter().map(collected).collect(),
                leftovers: self.leftovers.iter().map(left).collect(),
                unreadable: self.listing.unreadable.iter().map(json::Unreadable::from).collect(),
                allocated_bytes: self.before,
                remaining_bytes: after,
            });
        }
        for unreadable in &self.listing.unreadable {
            let path = shown(&unreadable.path);
            let why = without_path(unreadable.error.message(), &unreadable.path);
            output::warn(&format!("{path} stays: {why}"));
        }
        if !self.held.is_empty() || !self.leftovers.is_empty() {
            output::print(&self.table(args))?;
        }
        super::say_what_is_over(args, after);
        let has_work = !self.leftovers.is_empty() || self.held.iter().any(|one| !one.is_there());
        let is_held_back = self.held.iter().any(|one| matches!(one.fate, Fate::Kept(_)));
        if !has_work && is_held_back {
            output::note("nothing can be collected now: WHY tells what holds it back");
        } else {
            super::say_what_is_left_to_do(args, has_work);
        }
        Ok(())
    }

    fn table(&self, args: &GcArgs) -> String {
        let mut table = super::table();
        let removed = if args.apply { "removed" } else { "would be removed" };
        for one in self.held {
            let size = one.inodes.iter().fold(0, |sum: u64, inode| sum.saturating_add(inode.2));
            let (what, why) = match &one.fate {
                Fate::Open => ("stays", ""),
                Fate::Kept(reason) => ("stays", without_path(reason, one.generation.path())),
                Fate::Gone(reason) => (removed, reason.as_str()),
            };
            let idle = output::seconds(one.idle.as_secs_f64());
            table.row([one.called().as_str(), &ByteSize(size).to_string(), &idle, what, why]);
        }
        for Left { leftover, error } in self.leftovers {
            let what = if error.is_some() { "stays" } else { removed };
            let why = match error {
                Some(error) => error.message().to_owned(),
                None => format!("{}: {}", leftover.what, shown(&leftover.path)),
            };
            table.row([leftover.name.as_str(), &ByteSize(leftover.bytes).to_string(), "", what, &why]);
        }
        table.render()
    }
}

fn collected<'a>(one: &'a Held<'_>) -> json::DiskCollected<'a> {
    let (action, reason) = one.fate.told("remove");
    json::DiskCollected {
        name: one.generation.name().as_str(),
        number: one.generation.number(),
        path: one.generation.path().to_string_lossy(),
        allocated_bytes: one.inodes.iter().fold(0, |sum, inode| sum.saturating_add(inode.2)),
        idle_seconds: one.idle.as_secs_f64(),
        action,
        reason,
    }
}

fn left<'a>(left: &'a Left<'_>) -> json::DiskLeftover<'a> {
    json::DiskLeftover {
        error: left.error.as_ref().map(Failure::from),
        ..json::DiskLeftover::from(left.leftover)
    }
}
