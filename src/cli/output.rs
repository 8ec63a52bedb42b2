//! What the user sees: answers on stdout, everything else on stderr, and how each is written.
//!
//! stdout carries the answer alone, stderr errors, hints, warnings and notes. A reading command whose
//! output pipe is closed ends quietly: its reader has seen enough, so that the write counts as done and
//! the command's own exit code stands. Any other failed write is an error. SIGPIPE is ignored in a Rust
//! program, which is why the closed pipe arrives here as EPIPE.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::Serialize;
use unicode_width::UnicodeWidthStr;

use crate::error::{Error, Kind, Result, shown, steers_a_terminal};
use crate::sys::process;

/// The version of everything that `--json` prints.
pub const SCHEMA: u32 = 1;

/// Prints `error: …` and, where there is one, ` hint: …` on stderr.
pub fn error(error: &Error) {
    say(&error_lines(error, stderr_is_coloured()));
}

/// Prints `warning: …` on stderr: something that the user should look at, although the command goes on.
pub fn warn(text: &str) {
    say(&line(Tag::Warning, text, stderr_is_coloured()));
}

/// Prints `note: …` on stderr: something that the user may want to know.
pub fn note(text: &str) {
    say(&line(Tag::Note, text, stderr_is_coloured()));
}

/// Writes `text` to stderr in one piece. A failure is not reported: there is nowhere left to do so.
fn say(text: &str) {
    let stderr = io::stderr();
    let _ = Stream(stderr.as_fd()).write_all(text.as_bytes());
}

/// Prints the answer of a reading command, whose lines the caller has ended.
///
/// # Errors
///
/// A failed write, as [`Kind::Failed`]; a closed pipe is none.
pub fn print(text: &str) -> Result<()> {
    answer(text.as_bytes(), ClosedPipe::IsTheEnd)
}

/// Prints a path alone on its line, byte for byte as it is: it is for programs.
///
/// # Errors
///
/// As [`print()`].
pub fn print_path(path: &Path) -> Result<()> {
    answer(&path_line(path), ClosedPipe::IsTheEnd)
}

/// Prints the path that a command which does something (`start`) has to hand over.
///
/// # Errors
///
/// A failed write, as [`Kind::Failed`], a closed pipe too: the caller never learns the path.
pub fn hand_over_path(path: &Path) -> Result<()> {
    answer(&path_line(path), ClosedPipe::Fails)
}

/// Prints `document` as the answer of a `--json`: see [`json_text`].
///
/// # Errors
///
/// As [`print()`] and [`json_text`].
pub fn print_json(document: &impl Serialize) -> Result<()> {
    print(&json_text(document)?)
}

fn path_line(path: &Path) -> Vec<u8> {
    [path.as_os_str().as_bytes(), b"\n"].concat()
}

/// Whether a pipe that nobody reads any more is a failure.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ClosedPipe {
    IsTheEnd,
    Fails,
}

/// Writes an answer to the standard output that the caller gave. Where the caller closed it, the runtime has
/// opened `/dev/null` in its place, which takes everything and loses it.
fn answer(bytes: &[u8], closed_pipe: ClosedPipe) -> Result<()> {
    if process::was_closed(libc::STDOUT_FILENO) {
        return Err(not_written(&io::Error::from_raw_os_error(libc::EBADF)));
    }
    write_answer(io::stdout().as_fd(), bytes, closed_pipe)
}

fn not_written(cause: &io::Error) -> Error {
    // A full disk behind stdout is a failed write and not "no room" for a cache.
    Error::os("write the answer to standard output", cause).with_kind(Kind::Failed)
}

fn write_answer(stdout: BorrowedFd<'_>, bytes: &[u8], closed_pipe: ClosedPipe) -> Result<()> {
    match Stream(stdout).write_all(bytes) {
        Err(cause) if cause.kind() == io::ErrorKind::BrokenPipe && closed_pipe == ClosedPipe::IsTheEnd => {
            Ok(())
        }
        written => written.map_err(|cause| not_written(&cause)),
    }
}

/// An unbuffered stream over a standard descriptor. The standard library's own would hold bytes back, and
/// takes a bad descriptor for success.
pub(super) struct Stream<'a>(pub(super) BorrowedFd<'a>);

impl Write for Stream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::io::write(self.0, bytes) {
                Ok(written) => return Ok(written),
                Err(rustix::io::Errno::INTR) => {}
                // Whoever shares the pipe or terminal with us may have made it non-blocking.
                Err(rustix::io::Errno::AGAIN) => {
                    let mut wanted = [rustix::event::PollFd::new(&self.0, rustix::event::PollFlags::OUT)];
                    match rustix::event::poll(&mut wanted, None) {
                        Ok(_) | Err(rustix::io::Errno::INTR) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What stands before a line on stderr.
#[derive(Clone, Copy)]
enum Tag {
    Error,
    Hint,
    Warning,
    Note,
}

impl Tag {
    /// The word, and the terminal's code for its colour.
    fn word_and_colour(self) -> (&'static str, &'static str) {
        match self {
            Tag::Error => ("error:", "1;31"),
            // Moved in by one, so that its colon stands below that of "error:".
            Tag::Hint => (" hint:", "36"),
            Tag::Warning => ("warning:", "1;33"),
            Tag::Note => ("note:", "1"),
        }
    }
}

fn line(tag: Tag, text: &str, coloured: bool) -> String {
    let (word, colour) = tag.word_and_colour();
    let text = plain(text);
    if coloured { format!("\x1b[{colour}m{word}\x1b[0m {text}\n") } else { format!("{word} {text}\n") }
}

fn error_lines(error: &Error, coloured: bool) -> String {
    let mut lines = line(Tag::Error, error.message(), coloured);
    if let Some(hint) = error.hint_text() {
        lines.push_str(&line(Tag::Hint, hint, coloured));
    }
    lines
}

fn stderr_is_coloured() -> bool {
    is_coloured(
        io::stderr().is_terminal(),
        std::env::var_os("NO_COLOR").as_deref(),
        std::env::var_os("TERM").as_deref(),
    )
}

/// Colour only on a terminal that knows it, and never with a `NO_COLOR` that is not empty.
fn is_coloured(is_terminal: bool, no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    is_terminal && no_color.is_none_or(OsStr::is_empty) && moves_the_cursor(term)
}

/// Whether a terminal of this `TERM` understands escape sequences; without a `TERM` nobody knows.
pub(super) fn moves_the_cursor(term: Option<&OsStr>) -> bool {
    term.is_some_and(|term| !term.is_empty() && term != "dumb")
}

/// Text for a person, on one line and unable to steer the terminal: control characters and those that
/// change the direction of writing are escaped as [`shown`] does, but without quotes.
pub fn plain(text: &str) -> String {
    let shown = shown(text);
    // `shown` puts everything in quotes that has a quote, so that these two are its own.
    match shown.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\'')) {
        Some(inner) => inner.to_owned(),
        None => shown,
    }
}

/// `document`, which serializes as an object, as indented JSON with `"schema": 1` before its own fields
/// and a newline at the end. A document that has a field `schema` itself (a manifest) is left as it is.
/// Characters that steer a terminal are escaped too, also where JSON does not ask for it, so that it can be
/// looked at on one.
///
/// # Errors
///
/// [`Kind::Failed`] when it does not serialize as an object, which is a mistake of this program.
pub fn json_text(document: &impl Serialize) -> Result<String> {
    #[derive(Serialize)]
    struct WithSchema<'a, T> {
        schema: u32,
        #[serde(flatten)]
        document: &'a T,
    }
    let wrong = |cause: serde_json::Error| {
        Error::new(Kind::Failed, format!("cannot write the answer as JSON: {cause}"))
            .hint("this is a mistake in iloader: please report it")
    };
    let has_schema = serde_json::to_value(document).map_err(wrong)?.get("schema").is_some();
    let text = if has_schema {
        serde_json::to_string_pretty(document)
    } else {
        serde_json::to_string_pretty(&WithSchema { schema: SCHEMA, document })
    };
    let text = text.map_err(wrong)?;
    let mut safe = String::with_capacity(text.len() + 1);
    for character in text.chars() {
        // Inside a JSON text only strings can hold these, where an escape means the same.
        if steers_a_terminal(character) && character != '\n' {
            safe.push_str(&format!("\\u{:04x}", u32::from(character)));
        } else {
            safe.push(character);
        }
    }
    safe.push('\n');
    Ok(safe)
}

/// On which side of its column a cell stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Names and words.
    Left,
    /// Numbers.
    Right,
}

/// A table: a line of headings, then rows, with columns as wide as their widest cell on a terminal.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

/// What stands between two columns.
const GAP: &str = "  ";

impl Table {
    /// A table without rows, with these headings.
    pub fn new(columns: &[(&str, Align)]) -> Table {
        let headings = columns.iter().map(|(heading, _)| plain(heading)).collect();
        Table { columns: columns.iter().map(|(_, align)| *align).collect(), rows: vec![headings] }
    }

    /// Adds a row with one cell for each column. Control characters in cells are escaped.
    pub fn row<I>(&mut self, cells: I)
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let cells: Vec<String> = cells.into_iter().map(|cell| plain(cell.as_ref())).collect();
        assert_eq!(cells.len(), self.columns.len(), "a row has a cell for each column");
        self.rows.push(cells);
    }

    /// The lines, each ended; none ends with blanks.
    pub fn render(&self) -> String {
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|column| self.rows.iter().map(|row| row[column].width()).max().unwrap_or(0))
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, align), width) in row.iter().zip(&self.columns).zip(&widths) {
                let filler = " ".repeat(width - cell.width());
                match align {
                    Align::Left => line.extend([cell, filler.as_str(), GAP]),
                    Align::Right => line.extend([filler.as_str(), cell, GAP]),
                }
            }
            text.push_str(line.trim_end_matches(' '));
            text.push('\n');
        }
        text
    }
}

/// Lines of `name:  value` with the values below each other: the answer about one thing.
pub fn fields<N: AsRef<str>, V: AsRef<str>>(rows: &[(N, V)]) -> String {
    let names: Vec<String> = rows.iter().map(|(name, _)| format!("{}:", plain(name.as_ref()))).collect();
    let width = names.iter().map(|name| name.width()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, (_, value)) in names.iter().zip(rows) {
        let filler = " ".repeat(width - name.width());
        let line = format!("{name}{filler}{GAP}{}", plain(value.as_ref()));
        text.push_str(line.trim_end_matches(' '));
        text.push('\n');
    }
    text
}

/// Seconds as people say them, in the two largest units: `0.4 s`, `12 s`, `3 min 12 s`, `2 h 5 min`,
/// `4 d 3 h`. What is no duration is shown as `?`.
pub fn seconds(seconds: f64) -> String {
    const TENTHS_BELOW: f64 = 9.95;
    /// Beyond it (about 270 years) a number comes from a broken clock.
    const SECONDS_MAX: f64 = 1e10 - 1.0;
    if !(0.0..=SECONDS_MAX).contains(&seconds) {
        return "?".to_owned();
    }
    if seconds < TENTHS_BELOW {
        // `abs` for the zero that is negative.
        return format!("{:.1} s", seconds.abs());
    }
    let whole = seconds.round() as u64;
    let (minutes, hours, days) = (whole / 60, whole / 3600, whole / 86400);
    let (large, small) = match whole {
        0..60 => return format!("{whole} s"),
        60..3600 => ((minutes, "min"), (whole % 60, "s")),
        3600..86400 => ((hours, "h"), (minutes % 60, "min")),
        _ => ((days, "d"), (hours % 24, "h")),
    };
    match small.0 {
        0 => format!("{} {}", large.0, large.1),
        rest => format!("{} {} {rest} {}", large.0, large.1, small.1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::fs::{File, OpenOptions};
    use std::io::Read;

    #[test]
    fn an_error_is_a_line_and_a_hint() {
        let error =
            Error::new(Kind::NoRoom, "cannot start 'a b': too big").hint("stop another (iloader list)");
        assert_eq!(
            error_lines(&error, false),
            "error: cannot start 'a b': too big\n hint: stop another (iloader list)\n"
        );
        assert_eq!(error_lines(&Error::new(Kind::Failed, "x"), true), "\x1b[1;31merror:\x1b[0m x\n");
        let smuggled = Error::new(Kind::Failed, "a\nb\x1b[2Jc\u{202e}d");
        assert_eq!(error_lines(&smuggled, false), "error: a\\nb\\u{1b}[2Jc\\u{202e}d\n");
    }

    #[test]
    fn plain_escapes_without_quoting() {
        for (text, seen) in [
            ("", ""),
            ("two words", "two words"),
            ("'quoted'", "'quoted'"),
            ("'", "'"),
            ("it's", "it's"),
            ("back\\slash", "back\\slash"),
            ("模型\t", "模型\\t"),
        ] {
            assert_eq!(plain(text), seen);
        }
    }

    #[test]
    fn colour_needs_a_terminal_and_consent() {
        let some = |text: &'static str| Some(OsStr::new(text));
        assert!(is_coloured(true, None, some("xterm")));
        assert!(is_coloured(true, some(""), some("xterm")));
        assert!(!is_coloured(false, None, some("xterm")));
        assert!(!is_coloured(true, some("0"), some("xterm")));
        assert!(!is_coloured(true, None, some("dumb")));
        assert!(!is_coloured(true, None, some("")));
        assert!(!is_coloured(true, None, None));
    }

    #[test]
    fn a_closed_pipe_is_the_end_of_reading_but_loses_an_answer() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(reader);
        assert!(write_answer(writer.as_fd(), b"text", ClosedPipe::IsTheEnd).is_ok());
        let error = write_answer(writer.as_fd(), b"text", ClosedPipe::Fails).unwrap_err();
        assert_eq!(error.kind(), Kind::Failed);
        assert!(error.message().contains("EPIPE"), "{error}");
    }

    #[test]
    fn another_failed_write_is_a_failure() {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let error = write_answer(full.as_fd(), b"text", ClosedPipe::IsTheEnd).unwrap_err();
        assert_eq!(error.kind(), Kind::Failed, "exit 1, not that of a full cache");
        assert!(error.message().contains("standard output"), "{error}");
        let read_only = File::open("/dev/null").unwrap();
        assert!(write_answer(read_only.as_fd(), b"text", ClosedPipe::IsTheEnd).is_err());
    }

    #[test]
    fn a_pipe_that_does_not_block_gets_everything() {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        let text = vec![b'x'; 1 << 20];
        let expected = text.len();
        let consumer = std::thread::spawn(move || {
            let mut read = Vec::new();
            File::from(reader).read_to_end(&mut read).unwrap();
            read.len()
        });
        write_answer(writer.as_fd(), &text, ClosedPipe::Fails).unwrap();
        drop(writer);
        assert_eq!(consumer.join().unwrap(), expected);
    }

    #[test]
    fn schema_comes_first_and_once() {
        #[derive(Serialize)]
        struct Document<'a> {
            zebra: u64,
            name: &'a str,
        }
        let text = json_text(&Document { zebra: u64::MAX, name: "a\u{9b}\u{7f}\n\"é" }).unwrap();
        assert_eq!(
            text,
            "{\n  \"schema\": 1,\n  \"zebra\": 18446744073709551615,\n  \
             \"name\": \"a\\u009b\\u007f\\n\\\"é\"\n}\n"
        );
        let parsed: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(parsed["name"], "a\u{9b}\u{7f}\n\"é");
        let own = json_text(&BTreeMap::from([("schema", 7)])).unwrap();
        assert_eq!(own, "{\n  \"schema\": 7\n}\n");
        assert_eq!(json_text(&[1, 2]).unwrap_err().kind(), Kind::Failed);
    }

    #[test]
    fn columns_align_by_what_is_seen() {
        let mut table = Table::new(&[("NAME", Align::Left), ("SIZE", Align::Right), ("STATE", Align::Left)]);
        table.row(["模型", "1.5 GiB", "ready"]);
        table.row(["a\nb", "12 B", ""]);
        assert_eq!(table.render(), "NAME     SIZE  STATE\n模型  1.5 GiB  ready\na\\nb     12 B\n");
    }

    #[test]
    fn fields_align_their_values() {
        assert_eq!(
            fields(&[("name", "qwen"), ("idle time", "3 s"), ("log", "")]),
            "name:       qwen\nidle time:  3 s\nlog:\n"
        );
        assert_eq!(fields::<&str, &str>(&[]), "");
    }

    #[test]
    fn seconds_as_people_say_them() {
        for (value, text) in [
            (0.0, "0.0 s"),
            (-0.0, "0.0 s"),
            (0.44, "0.4 s"),
            (9.94, "9.9 s"),
            (9.96, "10 s"),
            (59.4, "59 s"),
            (59.9, "1 min"),
            (192.0, "3 min 12 s"),
            (3599.7, "1 h"),
            (7500.0, "2 h 5 min"),
            (7229.0, "2 h"),
            (356_400.0, "4 d 3 h"),
            (f64::NAN, "?"),
            (-1.0, "?"),
            (f64::INFINITY, "?"),
            (1e300, "?"),
        ] {
            assert_eq!(seconds(value), text, "{value}");
        }
    }
}
