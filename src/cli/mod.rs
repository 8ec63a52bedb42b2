//! The command line: one file per command, named as typed.
//!
//! Only this module and those below it read arguments, print, and choose exit codes. stdout carries the
//! answer alone; everything else goes to stderr.

mod args;
mod cache;
mod cache_list;
mod cache_remove;
mod cache_status;
mod gc;
mod inspect;
mod json;
mod list;
mod manifest;
pub mod output;
mod preflight;
pub mod progress;
mod root;
mod run;
mod start;
mod status;
mod stop;
mod swapped;
mod target;
#[cfg(test)]
mod testing;
mod verify;
mod view;
mod wait;
mod watch;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use crate::budget::limits;
use crate::daemon;
use crate::error::{Error, Kind, Result};

const HELP_AFTER: &str = "\
Sizes are bytes or carry a binary suffix (512MiB, 32GiB); times are seconds. Exit codes: 0 done, 1 failed, \
2 wrong usage, 3 not found, 4 timed out or still loading, 5 in use, 6 no memory, disk or a limit, \
7 not what it must be, 8 the source changed, 9 stale or another identity.

Example:
  iloader start /models/Qwen3-8B --name qwen
  iloader run qwen -- vllm serve '{model}'
  iloader stop qwen";

/// Keeps AI model files in memory, so that inference engines restart without reading storage again
#[derive(Debug, Parser)]
#[command(name = "iloader", version, after_help = HELP_AFTER, arg_required_else_help = false)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Inspect(inspect::InspectArgs),
    Start(Box<start::StartArgs>),
    Run(run::RunArgs),
    Status(status::StatusArgs),
    Wait(wait::WaitArgs),
    View(view::ViewArgs),
    Manifest(manifest::ManifestArgs),
    List(list::ListArgs),
    Stop(stop::StopArgs),
    Cache(cache::CacheArgs),
    CacheStatus(cache_status::CacheStatusArgs),
    CacheList(cache_list::CacheListArgs),
    CacheRemove(cache_remove::CacheRemoveArgs),
    Verify(verify::VerifyArgs),
    Gc(gc::GcArgs),
    /// The daemon itself: `start` executes this program again with it
    #[command(name = daemon::spawn::COMMAND, hide = true)]
    Daemon,
}

/// Runs the command of this process, and gives its exit code. `run` does not return where it succeeds.
pub fn main() -> ExitCode {
    ExitCode::from(execute(std::env::args_os().collect()))
}

fn execute(arguments: Vec<OsString>) -> u8 {
    let is_run = arguments.get(1).is_some_and(|first| first == "run");
    let outcome = limits::check_stack().and_then(|()| parse_and_dispatch(arguments, is_run));
    outcome.unwrap_or_else(|error| {
        output::error(&error);
        if is_run { run::exit_code(&error) } else { error.kind().exit_code() }
    })
}

fn parse_and_dispatch(arguments: Vec<OsString>, is_run: bool) -> Result<u8> {
    match CommandLine::try_parse_from(arguments) {
        Ok(line) => dispatch(&line.command),
        Err(error) => answer_or_refuse(&error, is_run),
    }
}

fn dispatch(command: &Command) -> Result<u8> {
    let done = |()| 0;
    match command {
        Command::Inspect(args) => inspect::inspect(args).map(done),
        Command::Start(args) => start::start(args).map(done),
        Command::Run(args) => run::run(args).map(|never| match never {}),
        Command::Status(args) => status::status(args),
        Command::Wait(args) => wait::wait(args).map(done),
        Command::View(args) => view::view(args).map(done),
        Command::Manifest(args) => manifest::manifest(args).map(done),
        Command::List(args) => list::list(args).map(done),
        Command::Stop(args) => stop::stop(args).map(done),
        Command::Cache(args) => cache::cache(args).map(done),
        Command::CacheStatus(args) => cache_status::cache_status(args),
        Command::CacheList(args) => cache_list::cache_list(args).map(done),
        Command::CacheRemove(args) => cache_remove::cache_remove(args).map(done),
        Command::Verify(args) => verify::verify(args).map(done),
        Command::Gc(args) => gc::gc(args).map(done),
        Command::Daemon => daemon::spawn::become_daemon().map(done),
    }
}

/// Help and version are answers; everything else that the parser says is wrong usage.
fn answer_or_refuse(error: &clap::Error, is_run: bool) -> Result<u8> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            output::print(&error.render().to_string()).map(|()| 0)
        }
        ErrorKind::MissingSubcommand => {
            Err(Error::new(Kind::Usage, "a command is missing").hint("iloader --help lists them"))
        }
        _ if is_run => {
            let form = format!("everything after -- is the command: {}", run::EXAMPLE);
            Err(usage_error(error).hint(form))
        }
        _ => Err(usage_error(error)),
    }
}

/// What the parser has to say, as one line and a hint like every other error: its tips and the usage.
fn usage_error(error: &clap::Error) -> Error {
    let text = error.render().to_string();
    let mut paragraphs = text.split("\n\n").map(one_line);
    let message = paragraphs.next().unwrap_or_default();
    let hints: Vec<String> = paragraphs
        .filter_map(|paragraph| {
            let usage = paragraph.strip_prefix("Usage: ").map(usages_in_words);
            // What looks like a number below zero was meant as the value of the option before it.
            let is_number = paragraph.starts_with("tip: to pass '-")
                && paragraph.as_bytes().get("tip: to pass '-".len()).is_some_and(u8::is_ascii_digit);
            let tip = paragraph.strip_prefix("tip: ").filter(|_| !is_number);
            usage.or_else(|| tip.map(str::to_owned))
        })
        .collect();
    let error = Error::new(Kind::Usage, shortened(message.strip_prefix("error: ").unwrap_or(&message)));
    if hints.is_empty() { error.hint("see iloader --help") } else { error.hint(hints.join("; ")) }
}

/// The ways to call a command, which the parser writes one below the other.
fn usages_in_words(usages: &str) -> String {
    let ways: Vec<&str> = usages.split(" iloader ").collect();
    format!("usage: {}", ways.join(", or iloader "))
}

/// A message that repeats a value of any length, with the middle left out where it is long.
fn shortened(message: &str) -> String {
    const HALF_CHARS_MAX: usize = 200;
    let count = message.chars().count();
    if count <= 2 * HALF_CHARS_MAX {
        return message.to_owned();
    }
    let head: String = message.chars().take(HALF_CHARS_MAX).collect();
    let tail: String = message.chars().skip(count - HALF_CHARS_MAX).collect();
    format!("{head} … {tail}")
}

fn one_line(paragraph: &str) -> String {
    paragraph.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn refusal(line: &str) -> Error {
        let error = CommandLine::try_parse_from(line.split(' ')).expect_err("wrong usage");
        usage_error(&error)
    }

    #[test]
    fn the_parser_is_consistent() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn every_help_ends_with_an_example() {
        let mut command = CommandLine::command();
        command.build();
        for command in command.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
            let name = command.get_name().to_owned();
            if name == "help" {
                continue;
            }
            let help = command.render_help().to_string();
            let (_, example) =
                help.rsplit_once("Example:\n").unwrap_or_else(|| panic!("{name} has no example"));
            assert!(example.contains(&format!("iloader {name}")), "{name}: {example}");
        }
    }

    #[test]
    fn a_long_value_is_not_repeated_whole() {
        let error = refusal(&format!("iloader status --timeout {}", "é".repeat(100_000)));
        let length = error.message().chars().count();
        assert!(length < 500, "{length} characters");
        assert!(error.message().starts_with("invalid value 'é"), "{error}");
        assert!(error.message().contains("is not a number of seconds"), "{error}");
    }

    #[test]
    fn wrong_usage_is_one_line_and_a_hint() {
        let unknown = refusal("iloader status --jsom qwen");
        assert_eq!(unknown.message(), "unexpected argument '--jsom' found");
        assert_eq!(
            unknown.hint_text(),
            Some("a similar argument exists: '--json'; usage: iloader status --json [NAME]")
        );
        let several = refusal("iloader stop --all qwen");
        assert_eq!(
            several.hint_text(),
            Some(
                "usage: iloader stop [OPTIONS] NAME..., or iloader stop [OPTIONS] --all, or iloader stop \
                 [OPTIONS] --socket PATH"
            )
        );
        for line in [
            "iloader inspect",
            "iloader gc --max-bytes -1",
            "iloader list --timeout -1",
            "iloader list --timeout inf",
        ] {
            let error = refusal(line);
            assert!(!error.message().contains('\n') && error.hint_text().is_some(), "{line}");
            assert_eq!(error.kind().exit_code(), 2);
        }
    }
}
