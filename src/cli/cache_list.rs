//! `cache-list`: every generation under a root.

use std::collections::HashMap;

use clap::Args;

use super::args::RootArgs;
use super::json;
use super::output::{self, Align, Table};
use super::root::Root;
use crate::disk::store::Listing;
use crate::error::{Result, shown};
use crate::units::ByteSize;

const HELP_AFTER: &str = "\
The newest generation of a name, the one with the highest number, is the one in use; older ones stay as long as they \
are leased or read. SIZE is that of the files; the total is what they take on disk, where a file that several \
generations have counts once. With --json sizes are bytes, and times seconds or RFC 3339.

Example:
  iloader cache-list --cache-root /nvme/models";

/// List the copies of models on local disk
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct CacheListArgs {
    #[command(flatten)]
    root: RootArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the list.
pub(crate) fn cache_list(args: &CacheListArgs) -> Result<()> {
    let root = Root::find(&args.root)?;
    let listing = match root.open()? {
        Some(store) => store.list()?,
        None => Listing::default(),
    };
    // One that was removed meanwhile is left out.
    let generations: Vec<_> =
        listing.generations.iter().filter_map(|one| json::Generation::of(one).ok()).collect();
    let allocated_bytes = allocated_bytes(&listing);
    if args.json {
        return output::print_json(&json::CacheListAnswer {
            root: &root.path.to_string_lossy(),
            generations,
            allocated_bytes,
            unreadable: listing.unreadable.iter().map(json::Unreadable::from).collect(),
            leftovers: listing.leftovers.iter().map(json::DiskLeftover::from).collect(),
        });
    }
    say_what_is_none(&listing);
    if generations.is_empty() {
        output::note(&format!(
            "there are no generations in {}; make one with: iloader cache MODEL_DIR",
            shown(&root.path)
        ));
    }
    let total = format!("total: {} on disk\n", ByteSize(allocated_bytes));
    let total = if generations.is_empty() { String::new() } else { total };
    output::print(&format!("{}{total}", table(&generations)))
}

fn table(generations: &[json::Generation<'_>]) -> String {
    let mut table = Table::new(&[
        ("NAME", Align::Left),
        ("SIZE", Align::Right),
        ("FILES", Align::Right),
        ("CREATED", Align::Left),
        ("IDLE", Align::Right),
        ("LEASED", Align::Left),
        ("PATH", Align::Left),
    ]);
    for one in generations {
        table.row([
            format!("{}@{}", one.name, one.number).as_str(),
            &ByteSize(one.bytes).to_string(),
            &one.files.to_string(),
            one.created,
            &output::seconds(one.idle_seconds),
            if one.leased { "yes" } else { "no" },
            &one.path,
        ]);
    }
    table.render()
}

/// What cannot be read, and what is no generation yet or any more.
fn say_what_is_none(listing: &Listing) {
    for unreadable in &listing.unreadable {
        let path = shown(&unreadable.path);
        let why = unreadable.error.message();
        output::warn(&format!("{path}: {why}; 'iloader cache-remove {path}' removes it"));
    }
    for leftover in &listing.leftovers {
        let (path, size) = (shown(&leftover.path), ByteSize(leftover.bytes));
        let what = leftover.what;
        output::note(&match leftover.is_in_use {
            true => format!("{path}: {what}, {size} so far; somebody works in it"),
            false => format!("{path}: {what}, {size}; 'iloader gc --apply' removes it"),
        });
    }
}

/// What all generations take: a file that several have counts once.
fn allocated_bytes(listing: &Listing) -> u64 {
    let inodes = listing.generations.iter().filter_map(|generation| generation.inodes().ok()).flatten();
    let distinct: HashMap<(u64, u64), u64> =
        inodes.map(|(device, inode, bytes)| ((device, inode), bytes)).collect();
    distinct.values().fold(0, |sum, bytes| sum.saturating_add(*bytes))
}
