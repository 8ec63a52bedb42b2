//! The flags that commands share, and how their values are read.
//!
//! Parsing records what was typed and looks at nothing else; `resolve` functions then turn it into
//! absolute paths and registrations. A SIZE needs no reader here: its type reads itself.

use std::ffi::OsString;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};

use crate::error::{Error, Kind, Result, shown};
use crate::manifest::SelectionRules;
use crate::registry::Name;
use crate::units::{self, ByteSize};

/// `--workers` where it is not given.
pub(crate) const WORKERS: usize = 1;

/// `--chunk-size` where it is not given.
pub(crate) const CHUNK_BYTES: u64 = 64 << 20;

/// `--max-memory-fraction` where it is not given.
pub(crate) const MEMORY_FRACTION: f64 = 0.90;

/// `--reserve-bytes` where it is not given.
pub(crate) const RESERVE_BYTES: u64 = 256 << 20;

/// Which files of a model directory are taken.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Selection")]
pub(crate) struct FilesArgs {
    /// Take only files that match GLOB, relative to MODEL_DIR; repeatable [default: all files]
    #[arg(long = "pattern", value_name = "GLOB", value_parser = text())]
    patterns: Vec<String>,
    /// Leave out what matches GLOB, in place of the built-in exclusions; repeatable [default: version
    /// control, download leftovers, editor and Python caches]
    #[arg(long, value_name = "GLOB", value_parser = text())]
    exclude: Option<Vec<String>>,
    /// Leave out what matches GLOB too, besides the exclusions in force; repeatable [default: none]
    #[arg(long, value_name = "GLOB", value_parser = text())]
    also_exclude: Vec<String>,
}

impl FilesArgs {
    /// The rules as given.
    pub(crate) fn rules(&self) -> SelectionRules {
        SelectionRules {
            patterns: self.patterns.clone(),
            exclude: self.exclude.clone(),
            also_exclude: self.also_exclude.clone(),
            passthrough: Vec::new(),
        }
    }
}

/// The same, and which of them stay outside memory.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Selection")]
pub(crate) struct SelectionArgs {
    #[command(flatten)]
    files: FilesArgs,
    /// Keep files that match GLOB in the view as links to the source, outside memory; repeatable
    /// [default: none]
    #[arg(long, value_name = "GLOB", value_parser = text())]
    passthrough: Vec<String>,
}

impl SelectionArgs {
    /// The rules as given.
    pub(crate) fn rules(&self) -> SelectionRules {
        SelectionRules { passthrough: self.passthrough.clone(), ..self.files.rules() }
    }
}

/// Where the registrations of caches are.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct BaseArgs {
    /// Runtime root [default: $ILOADER_BASE_DIR, else $XDG_CACHE_HOME/infiniloader, else
    /// ~/.cache/infiniloader]
    #[arg(long, value_name = "PATH")]
    pub(crate) base_dir: Option<PathBuf>,
}

/// Where the generations on disk are.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct RootArgs {
    /// The directory that holds the generations [default: BASE/model-cache]
    #[arg(long, value_name = "PATH")]
    pub(crate) cache_root: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) base: BaseArgs,
}

/// Which generations on disk are meant by a model directory.
#[derive(Args, Clone, Debug)]
pub(crate) struct CopyArgs {
    /// The name of its generations [default: the directory's name, <org>--<model> for a hub snapshot]
    #[arg(long, visible_alias = "cache-name", value_name = "NAME", value_parser = name())]
    pub(crate) name: Option<Name>,
    #[command(flatten)]
    pub(crate) root: RootArgs,
    #[command(flatten)]
    pub(crate) files: FilesArgs,
}

/// One cache, as `status`, `view`, `manifest` and others name it.
#[derive(Args, Clone, Debug)]
pub(crate) struct TargetArgs {
    /// The cache's name
    #[arg(value_name = "NAME", value_parser = name())]
    name: Option<Name>,
    /// The cache's name, as an option
    #[arg(long = "name", value_name = "NAME", value_parser = name(), conflicts_with = "name")]
    name_option: Option<Name>,
    /// The daemon's control socket [default: BASE/run/NAME.sock]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) base: BaseArgs,
}

/// How long a command waits for a daemon.
#[derive(Args, Clone, Debug)]
pub(crate) struct TimeoutArgs {
    /// How many seconds to wait for the daemon's answer
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value = "5", value_parser = seconds)]
    pub(crate) timeout: Duration,
}

impl TargetArgs {
    /// The name, from wherever it was given. Without a `--socket` there must be one.
    pub(crate) fn name(&self) -> Result<Option<&Name>> {
        let name = self.name.as_ref().or(self.name_option.as_ref());
        if name.is_none() && self.socket.is_none() {
            return Err(Error::new(Kind::Usage, "no cache is named")
                .hint("give its NAME (iloader list shows them), or the --socket of its daemon"));
        }
        Ok(name)
    }
}

/// Reads a cache's NAME.
pub(crate) fn name() -> impl TypedValueParser<Value = Name> {
    text().try_map(|text| text.parse::<Name>().map_err(|error| one_line(&error)))
}

/// Reads text, and says of a value that is none which one it is.
pub(crate) fn text() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().try_map(|value: OsString| {
        value.into_string().map_err(|bytes| format!("{} is not UTF-8", shown(bytes)))
    })
}

/// Reads a whole number that lies in `range`.
pub(crate) fn number<N>(range: RangeInclusive<N>) -> impl Fn(&str) -> std::result::Result<N, String> + Clone
where
    N: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text| match text.parse() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => Err(format!("write a whole number from {} to {}", range.start(), range.end())),
    }
}

/// Reads a plain number of bytes, at least one. Who gives a SIZE, as other options take it, is told what to type.
pub(crate) fn plain_bytes(text: &str) -> std::result::Result<u64, String> {
    let wrong = || "write a plain number of bytes, such as 67108864".to_owned();
    match text.parse() {
        Ok(0) => Err(wrong()),
        Ok(bytes) => Ok(bytes),
        Err(_) => Err(match text.parse::<ByteSize>() {
            Ok(size) if size.0 > 0 => format!("write it as a plain number of bytes: {}", size.0),
            _ => wrong(),
        }),
    }
}

/// Reads a number of seconds, fractions allowed.
pub(crate) fn seconds(text: &str) -> std::result::Result<Duration, String> {
    units::parse_seconds(text)
}

fn one_line(error: &Error) -> String {
    match error.hint_text() {
        Some(hint) => format!("{}; {hint}", error.message()),
        None => error.message().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    #[derive(Parser)]
    struct Sample {
        #[command(flatten)]
        target: TargetArgs,
        #[command(flatten)]
        selection: SelectionArgs,
    }

    fn parse(arguments: &[&OsStr]) -> std::result::Result<Sample, clap::Error> {
        Sample::try_parse_from([OsStr::new("sample")].iter().chain(arguments))
    }

    fn words(line: &str) -> Vec<&OsStr> {
        line.split(' ').map(OsStr::new).collect()
    }

    #[test]
    fn a_name_is_given_once_in_either_way() {
        for line in ["qwen", "--name qwen"] {
            let sample = parse(&words(line)).expect("parses");
            assert_eq!(
                sample.target.name().expect("named").map(ToString::to_string).as_deref(),
                Some("qwen")
            );
        }
        assert!(parse(&words("qwen --name qwen")).is_err());
        assert_eq!(parse(&[]).expect("parses").target.name().expect_err("unnamed").kind(), Kind::Usage);
        assert!(
            parse(&words("--socket /s")).expect("parses").target.name().expect("socket is enough").is_none()
        );
    }

    #[test]
    fn values_that_are_not_text_are_named() {
        let error = parse(&[OsStr::from_bytes(b"a\xff")]).err().expect("not UTF-8").to_string();
        assert!(error.contains("'a\\xff' is not UTF-8"), "{error}");
        let sample = parse(&[OsStr::new("--socket"), OsStr::from_bytes(b"/a\xff")]).expect("paths are bytes");
        assert_eq!(sample.target.socket.as_deref(), Some(Path::new(OsStr::from_bytes(b"/a\xff"))));
    }

    #[test]
    fn numbers_say_what_to_type() {
        let workers = number(1u32..=8);
        assert_eq!(workers("8"), Ok(8));
        for text in ["0", "9", "", "x", "-1", "1.5", "1e3", " 1", "99999999999999999999"] {
            assert_eq!(workers(text), Err("write a whole number from 1 to 8".to_owned()), "{text}");
        }
        assert_eq!(plain_bytes("67108864"), Ok(64 << 20));
        let refusal = |text| plain_bytes(text).expect_err(text);
        assert_eq!(refusal("64MiB"), "write it as a plain number of bytes: 67108864");
        assert_eq!(refusal("1.5G"), "write it as a plain number of bytes: 1610612736");
        for text in ["0", "0K", "", "x", "-1", "1.5", "1_000", "18446744073709551616"] {
            assert_eq!(refusal(text), "write a plain number of bytes, such as 67108864", "{text}");
        }
    }

    #[test]
    fn giving_an_exclusion_is_told_from_giving_none() {
        let rules = |line| parse(&words(line)).expect("parses").selection.rules();
        assert_eq!(rules("q --also-exclude a --also-exclude b").exclude, None);
        assert_eq!(rules("q --exclude a").exclude, Some(vec!["a".to_owned()]));
        assert_eq!(rules("q --pattern *.json --pattern *.py").patterns, ["*.json", "*.py"]);
    }
}
