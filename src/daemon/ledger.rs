//! The shared quota of the caches whose control sockets are in one directory: shares taken and given back, and
//! the quota set.
//!
//! Every cache takes a share, whether or not there is a quota: one that is set later must count it.

use std::path::Path;

use crate::budget::quota::{self, Ask, Holder};
use crate::error::{Error, Result, shown};
use crate::registry::{Claim, Claims, Group, Seat, Terms};

/// The shares and the quota of one quota group.
#[derive(Debug)]
pub struct Ledger {
    claims: Claims,
}

/// What a group has and uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The quota in bytes, where there is one.
    pub quota_bytes: Option<u64>,
    /// Bytes of all segments, as allocated.
    pub used_bytes: u64,
}

impl Ledger {
    /// The ledger of the group in `directory`.
    pub fn of_group(directory: &Path) -> Ledger {
        Ledger { claims: Claims::of_quota(directory) }
    }

    /// The ledger of the cache that listens at `socket`.
    pub fn of_socket(socket: &str) -> Ledger {
        Ledger::of_group(Path::new(socket).parent().unwrap_or(Path::new("/")))
    }

    /// Takes a share of `bytes` for the cache `name`, or says why not. It counts until it is dropped or this process
    /// ends. `proposes` is the quota that [`Share::commit`] will set, 0 for none; until then it binds others. The
    /// lines say what was found on the way.
    ///
    /// # Errors
    ///
    /// [`Kind::NoRoom`](crate::Kind::NoRoom) where the quota has no room; others where the ledger cannot be read or
    /// written. Nothing is then taken.
    pub fn reserve(&self, name: &str, bytes: u64, proposes: Option<u64>) -> Result<(Share, Vec<String>)> {
        let mut group = self.claims.lock()?;
        let holders = holders(&mut group)?;
        quota::admit(Ask { need_bytes: bytes, proposes }, self.quota(&group)?, &holders)?;
        // The quota knows no control groups.
        let groups = Some(Vec::new());
        let terms = Terms { bytes, proposes, groups, name: name.to_owned(), pid: std::process::id() };
        let claim = group.add(&terms)?;
        Ok((Share { terms, claim }, group.take_notes()))
    }

    /// Whether [`Ledger::reserve`] would take this share once that of `leaving`, a cache by its name and process, is
    /// given back. Changes nothing.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn rehearse(&self, leaving: (&str, u32), bytes: u64, proposes: Option<u64>) -> Result<()> {
        if self.claims.are_absent() {
            return quota::admit(Ask { need_bytes: bytes, proposes }, None, &[]);
        }
        let mut group = self.claims.lock()?;
        let mut others = group.peek()?;
        others.retain(|terms| (terms.name.as_str(), terms.pid) != leaving);
        let others: Vec<Holder> = others.into_iter().map(holder).collect();
        quota::admit(Ask { need_bytes: bytes, proposes }, self.quota(&group)?, &others)
    }

    /// Sets the quota to `bytes`, 0 for none, for who starts nothing.
    ///
    /// # Errors
    ///
    /// [`Kind::NoRoom`](crate::Kind::NoRoom) where more is in use; others where the ledger cannot be read or
    /// written. Nothing is then changed.
    pub fn set(&self, bytes: u64) -> Result<Vec<String>> {
        let mut group = self.claims.lock()?;
        let holders = holders(&mut group)?;
        let kept = self.quota(&group)?;
        quota::admit(Ask { need_bytes: 0, proposes: Some(bytes) }, kept, &holders)?;
        keep(&group, bytes)?;
        Ok(group.take_notes())
    }

    /// What the group has and uses. Changes nothing.
    ///
    /// # Errors
    ///
    /// Where the ledger cannot be read.
    pub fn usage(&self) -> Result<Usage> {
        if self.claims.are_absent() {
            return Ok(Usage::default());
        }
        let mut group = self.claims.lock()?;
        let used_bytes = quota::used_bytes(&group.peek()?.into_iter().map(holder).collect::<Vec<_>>());
        Ok(Usage { quota_bytes: self.quota(&group)?, used_bytes })
    }

    fn quota(&self, group: &Group<'_>) -> Result<Option<u64>> {
        let cannot_be_used = |error: Error| {
            let error =
                error.context(format_args!("the quota {} cannot be used", shown(self.claims.kept_file())));
            match error.hint_text() {
                Some(_) => error,
                None => error
                    .hint("remove it, and set the quota again with 'iloader start' and --max-resident-bytes"),
            }
        };
        let kept = group.kept().map_err(cannot_be_used)?;
        kept.map(|json| quota::parse(&json).map_err(cannot_be_used)).transpose()
    }
}

fn holders(group: &mut Group<'_>) -> Result<Vec<Holder>> {
    Ok(group.live()?.into_iter().map(holder).collect())
}

fn holder(terms: Terms) -> Holder {
    Holder { name: terms.name, bytes: terms.bytes, proposes: terms.proposes }
}

fn keep(group: &Group<'_>, quota_bytes: u64) -> Result<()> {
    match quota_bytes {
        0 => group.keep(None),
        bytes => group.keep(Some(&quota::to_json(bytes)?)),
    }
}

/// A share of this process. It must outlive the memory that it stands for.
#[derive(Debug)]
pub struct Share {
    terms: Terms,
    claim: Claim,
}

impl Share {
    /// Sets the quota that was proposed, where one was: the cache is loaded. It fits still, because others were
    /// bound by it since.
    ///
    /// # Errors
    ///
    /// Where it cannot be written: the quota is then as it was.
    pub fn commit(&mut self) -> Result<()> {
        let Some(quota_bytes) = self.terms.proposes else { return Ok(()) };
        let group = self.claim.claims().lock()?;
        let settled = Terms { proposes: None, ..self.terms.clone() };
        // First what can be undone, so that a quota which is kept is one of a start that succeeded.
        self.claim.rewrite(&settled)?;
        if let Err(error) = keep(&group, quota_bytes) {
            // Where this fails too nobody is bound for longer than the failed start has its share.
            let _ = self.claim.rewrite(&self.terms);
            return Err(error);
        }
        drop(group);
        self.terms = settled;
        Ok(())
    }

    /// Has it held at the descriptor `seat` from now on.
    pub fn take_seat(&mut self, seat: Seat) {
        self.claim.take_seat(seat);
    }

    /// Ends as a crash does.
    #[cfg(test)]
    fn crash(self) {
        self.claim.crash();
    }
}

#[cfg(test)]
mod tests;
