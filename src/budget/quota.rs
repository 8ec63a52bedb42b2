//! The shared quota: how much memory the caches of one quota group may take together. The decision, and the form
//! in which the quota is kept; both pure.
//!
//! A start that sets a quota proposes it while it loads, and the quota becomes what it proposed once it has
//! succeeded. Meanwhile the proposal binds the others too, so that what is then set is not exceeded already.
//! It binds the start itself in place of the quota that it is to replace.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::units::ByteSize;

/// The version of the kept form. A reader refuses any other.
const SCHEMA: u32 = 1;

/// A refusal names no more caches than this.
const HOLDERS_NAMED_MAX: usize = 5;

/// A share of the quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The cache that has it.
    pub name: String,
    /// Bytes of its segments, as allocated.
    pub bytes: u64,
    /// What the quota is to become once it is loaded; 0 is none.
    pub proposes: Option<u64>,
}

/// What somebody wants of a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Bytes to take; 0 of who only sets the quota.
    pub need_bytes: u64,
    /// The quota to set, in bytes; 0 is none; `None` leaves it as it is.
    pub proposes: Option<u64>,
}

/// Where a limit comes from.
enum Origin<'a> {
    /// It is the quota that was set.
    Kept,
    /// Who asks wants to set it.
    Own,
    /// This cache sets it when it is loaded.
    Proposed(&'a str),
}

/// Whether the group whose quota is `kept` (`None`: there is none) has room for `ask` beside `others`, which are
/// all that live.
///
/// Where only what this admits is added, and a proposal becomes the quota, the sum of all shares never exceeds
/// a proposal; and the sum of those that propose nothing never exceeds the quota.
///
/// # Errors
///
/// [`Kind::NoRoom`], with what is in use and by which caches, and what would fit.
pub fn admit(ask: Ask, kept: Option<u64>, others: &[Holder]) -> Result<()> {
    let used = used_bytes(others);
    let Some((limit, origin)) = binding(ask, kept, others) else { return Ok(()) };
    // A sum that can't be counted is more than any limit.
    if used.checked_add(ask.need_bytes).is_some_and(|sum| sum <= limit) {
        return Ok(());
    }
    Err(refusal(ask, limit, &origin, others))
}

/// The sum of the shares. Saturates instead of overflowing.
pub fn used_bytes(holders: &[Holder]) -> u64 {
    holders.iter().fold(0, |sum, holder| sum.saturating_add(holder.bytes))
}

/// The smallest limit that holds for `ask`; 0 means none where it is set or proposed.
fn binding<'a>(ask: Ask, kept: Option<u64>, others: &'a [Holder]) -> Option<(u64, Origin<'a>)> {
    let own = match ask.proposes {
        Some(quota) => Some((quota, Origin::Own)),
        None => kept.map(|quota| (quota, Origin::Kept)),
    };
    let proposed =
        others.iter().filter_map(|holder| Some((holder.proposes?, Origin::Proposed(&holder.name))));
    own.into_iter().chain(proposed).filter(|(limit, _)| *limit > 0).min_by_key(|(limit, _)| *limit)
}

fn refusal(ask: Ask, limit: u64, origin: &Origin<'_>, others: &[Holder]) -> Error {
    let used = used_bytes(others);
    let size = |bytes| shown(bytes, limit, used, ask.need_bytes);
    let whose = match origin {
        Origin::Kept => format!("the quota of {}", size(limit)),
        Origin::Own => format!("the quota of {} asked for (--max-resident-bytes)", size(limit)),
        Origin::Proposed(name) => {
            format!("the quota of {} that '{}' sets when it is loaded", size(limit), name.escape_debug())
        }
    };
    let in_use = match used {
        0 => "nothing of it is in use".to_owned(),
        used => format!("{} is in use: {}", size(used), named(others)),
    };
    let kept = if ask.proposes.is_some() { "; the quota stays as it was" } else { "" };
    let message = match ask.need_bytes {
        0 => format!("{whose} is too small: {in_use}{kept}"),
        need => {
            let left = limit.saturating_sub(used);
            format!("needs {}, but {whose} has room for {}: {in_use}{kept}", size(need), size(left))
        }
    };
    Error::new(Kind::NoRoom, message).hint(match ask.need_bytes {
        0 => "stop a cache (iloader stop NAME), or give --max-resident-bytes more",
        _ => {
            "stop a cache (iloader stop NAME), select fewer files (--pattern), or set a larger quota \
             (--max-resident-bytes); --force does not lift it"
        }
    })
}

/// The holders by size, the largest first.
fn named(holders: &[Holder]) -> String {
    let mut holders: Vec<&Holder> = holders.iter().collect();
    holders.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let one = |holder: &&Holder| format!("'{}' {}", holder.name.escape_debug(), ByteSize(holder.bytes));
    let mut words: Vec<String> = holders.iter().take(HOLDERS_NAMED_MAX).map(one).collect();
    if holders.len() > HOLDERS_NAMED_MAX {
        words.push(format!("{} more", holders.len() - HOLDERS_NAMED_MAX));
    }
    words.join(", ")
}

/// A size for a sentence about whether `used` and `need` fit in `limit`: in bytes, where the rounding of a suffix
/// would hide why they do not.
fn shown(bytes: u64, limit: u64, used: u64, need: u64) -> String {
    let excess = used.saturating_add(need).saturating_sub(limit);
    // A suffix shows a tenth of its unit, which is at most a hundredth of the size.
    if excess < limit / 64 { format!("{bytes} bytes") } else { ByteSize(bytes).to_string() }
}

/// The kept form.
#[derive(Serialize, Deserialize)]
struct Document {
    schema: u32,
    quota_bytes: u64,
}

/// The field that every version has.
#[derive(Deserialize)]
struct Versioned {
    schema: u32,
}

/// A quota as it is kept.
///
/// # Errors
///
/// Never in practice: a number can be written down.
pub fn to_json(quota_bytes: u64) -> Result<Vec<u8>> {
    let mut json = serde_json::to_vec(&Document { schema: SCHEMA, quota_bytes })
        .map_err(|cause| Error::new(Kind::Failed, format!("cannot write the quota: {cause}")))?;
    json.push(b'\n');
    Ok(json)
}

/// A kept quota, in bytes; never 0.
///
/// # Errors
///
/// [`Kind::Failed`] where it is not one of this version: what cannot be read is never taken for no quota.
pub fn parse(json: &[u8]) -> Result<u64> {
    let bad = |why: String| {
        Error::new(Kind::Failed, why)
            .hint("remove it, and set the quota again with 'iloader start' and --max-resident-bytes")
    };
    let version: Versioned = serde_json::from_slice(json).map_err(|cause| bad(cause.to_string()))?;
    if version.schema != SCHEMA {
        let error = format!("it has version {}, and this program reads version {SCHEMA}", version.schema);
        return Err(Error::new(Kind::Failed, error).hint("use the program that set the quota"));
    }
    let document: Document = serde_json::from_slice(json).map_err(|cause| bad(cause.to_string()))?;
    if document.quota_bytes == 0 {
        return Err(bad("a quota of 0 bytes is none, and is not kept".to_owned()));
    }
    Ok(document.quota_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn holder(name: &str, bytes: u64, proposes: Option<u64>) -> Holder {
        Holder { name: name.to_owned(), bytes, proposes }
    }

    fn need(need_bytes: u64) -> Ask {
        Ask { need_bytes, proposes: None }
    }

    #[test]
    fn it_holds_to_the_byte() {
        let others = [holder("a", 60, None), holder("b", 30, None)];
        assert!(admit(need(10), Some(100), &others).is_ok());
        let error = admit(need(11), Some(100), &others).unwrap_err();
        assert_eq!(error.kind(), Kind::NoRoom);
        assert!(admit(need(u64::MAX), None, &others).is_ok(), "there is no quota");
        let sum = [holder("a", u64::MAX, None), holder("b", 30, None)];
        assert!(admit(need(0), Some(u64::MAX), &[holder("a", u64::MAX, None)]).is_ok());
        assert!(admit(need(1), Some(u64::MAX), &sum).is_err(), "a sum that overflows is too much");
    }

    #[test]
    fn a_proposal_binds_others_and_replaces_the_quota_for_who_makes_it() {
        let lowers = [holder("a", 20, Some(50))];
        assert!(admit(need(30), Some(100), &lowers).is_ok());
        assert!(admit(need(31), Some(100), &lowers).is_err(), "it may be 50 soon");
        assert!(admit(need(31), None, &lowers).is_err());
        let raises = Ask { need_bytes: 50, proposes: Some(200) };
        assert!(admit(raises, Some(100), &[holder("a", 90, None)]).is_ok());
        assert!(admit(raises, Some(100), &[holder("a", 90, Some(120))]).is_err());
        // What clears the quota is bound by nothing of its own, and binds nobody.
        let clears = Ask { need_bytes: 500, proposes: Some(0) };
        assert!(admit(clears, Some(100), &[holder("a", 90, None)]).is_ok());
        assert!(admit(need(10), Some(100), &[holder("a", 90, Some(0))]).is_ok());
        assert!(admit(need(11), Some(100), &[holder("a", 90, Some(0))]).is_err());
    }

    #[test]
    fn a_refusal_names_quota_use_need_room_and_caches() {
        let others = [holder("small", GIB, None), holder("large", 6 * GIB, None)];
        let error = admit(need(5 * GIB), Some(10 * GIB), &others).unwrap_err();
        assert_eq!(
            error.message(),
            "needs 5.0 GiB, but the quota of 10.0 GiB has room for 3.0 GiB: 7.0 GiB is in use: 'large' 6.0 GiB, \
             'small' 1.0 GiB"
        );
        assert!(error.hint_text().unwrap().ends_with("--force does not lift it"));
        let error = admit(need(5 * GIB), Some(4 * GIB), &[]).unwrap_err();
        let text = "needs 5.0 GiB, but the quota of 4.0 GiB has room for 4.0 GiB: nothing of it is in use";
        assert_eq!(error.message(), text);

        let error = admit(Ask { need_bytes: GIB, proposes: Some(5 * GIB) }, None, &others).unwrap_err();
        assert!(
            error.message().starts_with(
                "needs 1.0 GiB, but the quota of 5.0 GiB asked for (--max-resident-bytes) has room for 0 B: 7.0 GiB"
            ) && error.message().ends_with("; the quota stays as it was"),
            "{error}"
        );
        let error = admit(Ask { need_bytes: 0, proposes: Some(5 * GIB) }, None, &others).unwrap_err();
        assert!(error.message().contains("is too small: 7.0 GiB is in use"), "{error}");
        let error = admit(need(GIB), None, &[holder("b", GIB, Some(GIB))]).unwrap_err();
        assert!(error.message().contains("that 'b' sets when it is loaded"), "{error}");

        let many: Vec<Holder> = (0..9).map(|number| holder(&format!("n{number}"), GIB, None)).collect();
        let error = admit(need(GIB), Some(GIB), &many).unwrap_err();
        assert!(error.message().ends_with("'n4' 1.0 GiB, 4 more"), "{error}");
    }

    #[test]
    fn a_byte_too_much_is_told_in_bytes() {
        let error = admit(need(4 * GIB + 1), Some(10 * GIB), &[holder("a", 6 * GIB, None)]).unwrap_err();
        let text = "needs 4294967297 bytes, but the quota of 10737418240 bytes has room for 4294967296 bytes";
        assert!(error.message().starts_with(text), "{error}");
    }

    #[test]
    fn only_a_quota_of_this_version_is_read() {
        assert_eq!(parse(&to_json(77).unwrap()).unwrap(), 77);
        assert_eq!(to_json(u64::MAX).unwrap(), b"{\"schema\":1,\"quota_bytes\":18446744073709551615}\n");
        for bad in [
            "",
            "{}",
            "77",
            "null",
            r#"{"schema":1}"#,
            r#"{"schema":1,"quota_bytes":-1}"#,
            r#"{"schema":1,"quota_bytes":1.5}"#,
            r#"{"schema":1,"quota_bytes":0}"#,
            r#"{"schema":1,"quota_bytes":18446744073709551616}"#,
            "{\"schema\":1,\"quota_bytes\":7}x",
        ] {
            let error = parse(bad.as_bytes()).unwrap_err();
            assert!(error.hint_text().unwrap().contains("--max-resident-bytes"), "{bad}: {error}");
        }
        let error = parse(br#"{"schema":2,"quota":"other"}"#).unwrap_err();
        assert!(error.message().contains("version 2"), "{error}");
    }

    proptest! {
        #[test]
        fn any_quota_reads_back_and_garbage_does_not_panic(
            quota in 1..=u64::MAX, garbage in proptest::collection::vec(any::<u8>(), 0..60),
        ) {
            prop_assert_eq!(parse(&to_json(quota).unwrap()).unwrap(), quota);
            let _ = parse(&garbage);
        }

        #[test]
        fn nothing_above_a_limit_is_admitted(
            need_bytes in 0u64..200, proposes in proptest::option::of(0u64..200), kept in proptest::option::of(1u64..200),
            others in proptest::collection::vec((0u64..100, proptest::option::of(0u64..200)), 0..4),
        ) {
            let others: Vec<Holder> = others.iter().map(|(bytes, proposes)| holder("a", *bytes, *proposes)).collect();
            let sum = used_bytes(&others) + need_bytes;
            let own = if proposes.is_some() { proposes } else { kept };
            let limits = own.into_iter().chain(others.iter().filter_map(|holder| holder.proposes));
            let fits = limits.filter(|limit| *limit != 0).all(|limit| sum <= limit);
            prop_assert_eq!(admit(Ask { need_bytes, proposes }, kept, &others).is_ok(), fits);
        }
    }
}
