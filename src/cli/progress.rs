//! How far a load or a copy is, on stderr: a bar on a terminal, a line every few seconds elsewhere.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle, TermLike};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::output::{Stream, moves_the_cursor, plain, seconds};
use crate::control::message::Progress;
use crate::units::ByteSize;

/// Elsewhere than on a terminal, loads shorter than this stay silent.
const FIRST_LINE_AFTER: Duration = Duration::from_secs(2);

/// Elsewhere than on a terminal, how often a line is written.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Over how much of the past the rate is taken: long enough to be calm, short enough to follow a change.
const RATE_OVER: Duration = Duration::from_secs(10);

/// Two samples of the rate are at least so far apart, which bounds how many are kept.
const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// A rate over less than this would jump about.
const RATE_AFTER: Duration = Duration::from_millis(500);

/// A terminal that is narrower, or does not know its width, gets lines.
const COLUMNS_MIN: u16 = 20;

/// The progress of one load or copy. When it is dropped, a bar on the terminal is cleared away, so that what is
/// printed next stands on a line of its own.
pub struct Bar {
    doing: String,
    rate: Rate,
    written: Rate,
    last: Progress,
    clock: Clock,
    surface: Surface,
}

type Clock = Box<dyn Fn() -> Instant + Send>;
type Sink = Box<dyn Write + Send>;
/// How wide the terminal is now.
type Columns = fn() -> u16;

enum Surface {
    Nothing,
    Lines { sink: Sink, due: Instant, written: bool },
    Screen { bar: ProgressBar, columns: Columns },
}

/// Which surface suits the stderr that we have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Nothing,
    Lines,
    Screen,
}

fn shape(quiet: bool, can_redraw: bool, columns: Option<u16>) -> Shape {
    match columns {
        _ if quiet => Shape::Nothing,
        Some(columns) if can_redraw && columns >= COLUMNS_MIN => Shape::Screen,
        _ => Shape::Lines,
    }
}

/// How wide the terminal behind stderr is, `None` where there is none.
fn stderr_columns() -> Option<u16> {
    rustix::termios::tcgetwinsize(io::stderr()).ok().map(|size| size.ws_col)
}

/// A stderr that can be moved elsewhere: unbuffered, without a lock held between writes.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Stream(io::stderr().as_fd()).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Bar {
    /// A bar on stderr for what is being done, such as `loading qwen`; nothing at all with `quiet`.
    pub fn new(doing: &str, quiet: bool) -> Bar {
        let can_redraw = io::stderr().is_terminal() && moves_the_cursor(std::env::var_os("TERM").as_deref());
        let shape = shape(quiet, can_redraw, stderr_columns());
        let columns = || stderr_columns().unwrap_or(COLUMNS_MIN);
        Bar::on(doing, shape, Box::new(Stderr), columns, Box::new(Instant::now))
    }

    fn on(doing: &str, shape: Shape, sink: Sink, columns: Columns, clock: Clock) -> Bar {
        let doing = plain(doing);
        let surface = match shape {
            Shape::Nothing => Surface::Nothing,
            Shape::Lines => Surface::Lines { sink, due: clock() + FIRST_LINE_AFTER, written: false },
            Shape::Screen => Surface::Screen { bar: screen_bar(sink, columns), columns },
        };
        Bar {
            doing,
            rate: Rate::default(),
            written: Rate::default(),
            last: Progress::default(),
            clock,
            surface,
        }
    }

    /// Shows how far it is.
    pub fn update(&mut self, progress: &Progress) {
        let now = (self.clock)();
        self.rate.add(now, progress.bytes_done);
        let rate = self.rate.bytes_per_second(progress.bytes_done, progress.seconds);
        self.show(now, progress, Speed { read: rate, written: None });
    }

    /// The same of a copy, which has read what `progress` says and written `written` bytes.
    pub fn update_copy(&mut self, progress: &Progress, written: u64) {
        let now = (self.clock)();
        self.rate.add(now, progress.bytes_done);
        self.written.add(now, written);
        let read = self.rate.bytes_per_second(progress.bytes_done, progress.seconds);
        let written = self.written.bytes_per_second(written, progress.seconds);
        self.show(now, progress, Speed { read, written: Some(written.unwrap_or(0.0)) });
    }

    fn show(&mut self, now: Instant, progress: &Progress, speed: Speed) {
        self.last = *progress;
        match &mut self.surface {
            Surface::Nothing => {}
            Surface::Lines { sink, due, written } => {
                if now < *due {
                    return;
                }
                *due = now + LINE_EVERY;
                *written = true;
                let line = format!("{}: {}\n", self.doing, so_far(progress, speed));
                if sink.write_all(line.as_bytes()).is_err() {
                    self.surface = Surface::Nothing;
                }
            }
            Surface::Screen { bar, columns } => {
                let columns = usize::from(columns().max(COLUMNS_MIN));
                bar.set_message(bar_line(&self.doing, progress, speed, columns));
            }
        }
    }

    /// The load is done: a bar is cleared away, and where lines were written a last one says what it took.
    pub fn finish(mut self) {
        if let Surface::Lines { sink, written: true, .. } = &mut self.surface {
            let line = format!("{}: {}\n", self.doing, in_the_end(&self.last));
            // The last word; nobody would miss it on a stderr that is gone.
            let _ = sink.write_all(line.as_bytes());
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Surface::Screen { bar, .. } = &self.surface {
            bar.finish_and_clear();
        }
    }
}

/// The whole line is one message, so that a change is one redraw.
fn screen_bar(sink: Sink, columns: Columns) -> ProgressBar {
    let screen = Screen { sink: Mutex::new(sink), columns };
    let style = ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
    // No steady tick: a thread that draws beside us would write into what others print.
    ProgressBar::with_draw_target(None, ProgressDrawTarget::term_like(Box::new(screen)))
        .with_style(style)
        .with_finish(ProgressFinish::AndClear)
}

/// `loading qwen [=====>      ] 4.2 GiB of 15.3 GiB (27 %), …`, shorter than the terminal is wide: a line that
/// wraps cannot be redrawn where the width has changed meanwhile. Plain characters, because the terminal's
/// encoding is unknown.
fn bar_line(doing: &str, progress: &Progress, speed: Speed, columns: usize) -> String {
    const BAR_MIN: usize = 8;
    const BAR_MAX: usize = 40;
    let text = so_far(progress, speed);
    let taken = doing.width() + text.width() + " [] ".len();
    let room = (columns - 1).saturating_sub(taken).min(BAR_MAX);
    if room < BAR_MIN {
        return cut(&format!("{doing}: {text}"), columns - 1);
    }
    let filled = room * percent(progress.bytes_done, progress.bytes_total) as usize / 100;
    let tip = if filled < room { ">" } else { "" };
    format!("{doing} [{:room$}] {text}", "=".repeat(filled) + tip)
}

/// As much of the beginning of `text` as fits.
fn cut(text: &str, columns: usize) -> String {
    let mut left = columns;
    let fits = |character: &char| {
        let width = character.width().unwrap_or(0);
        let fits = width <= left;
        left = left.saturating_sub(width);
        fits
    };
    text.chars().take_while(fits).collect()
}

/// Bytes in a second.
#[derive(Clone, Copy, Default)]
struct Speed {
    /// `None` where nothing can be said yet.
    read: Option<f64>,
    /// `None` where nothing is written.
    written: Option<f64>,
}

/// `4.2 GiB of 15.3 GiB (27 %), 1.3 GiB/s, 9 s left`, of a copy `… (27 %), 1.3 GiB/s read, 1.2 GiB/s written, …`
fn so_far(progress: &Progress, speed: Speed) -> String {
    let (done, total) = (progress.bytes_done, progress.bytes_total);
    let mut text = format!("{} of {} ({} %)", ByteSize(done), ByteSize(total), percent(done, total));
    if let Some(rate) = speed.read {
        let rates = match speed.written {
            None => format!(", {}/s", ByteSize(rate as u64)),
            Some(written) => {
                format!(", {}/s read, {}/s written", ByteSize(rate as u64), ByteSize(written as u64))
            }
        };
        text.push_str(&rates);
        let left = total.saturating_sub(done) as f64 / rate;
        if rate >= 1.0 && left > 0.0 {
            // Whole seconds: a tenth of a guess says nothing.
            text.push_str(&format!(", {} left", whole_seconds(left)));
        }
    }
    text
}

/// `15.3 GiB in 12 s (1.3 GiB/s)`
fn in_the_end(progress: &Progress) -> String {
    let mut text = format!("{} in {}", ByteSize(progress.bytes_done), seconds(progress.seconds));
    let rate = progress.bytes_done as f64 / progress.seconds;
    if rate.is_finite() && progress.seconds > 0.0 {
        text.push_str(&format!(" ({}/s)", ByteSize(rate as u64)));
    }
    text
}

fn whole_seconds(left: f64) -> String {
    if left < 10.0 { format!("{} s", left.ceil()) } else { seconds(left) }
}

/// Rounded down, so that 100 means done; nothing to do is done.
fn percent(done: u64, total: u64) -> u64 {
    if done >= total {
        return 100;
    }
    (u128::from(done) * 100 / u128::from(total)) as u64
}

/// How fast bytes arrive, from the samples of the last seconds.
#[derive(Default)]
struct Rate {
    samples: VecDeque<(Instant, u64)>,
}

impl Rate {
    fn add(&mut self, now: Instant, bytes: u64) {
        if self.samples.back().is_some_and(|(_, before)| bytes < *before) {
            // It began anew.
            self.samples.clear();
        }
        let since = |sample: &(Instant, u64)| now.saturating_duration_since(sample.0);
        if self.samples.back().is_none_or(|last| since(last) >= SAMPLE_EVERY) {
            self.samples.push_back((now, bytes));
        }
        // One sample beyond the span stays, so that the span is covered.
        while self.samples.get(1).is_some_and(|second| since(second) > RATE_OVER) {
            self.samples.pop_front();
        }
    }

    /// The rate over the last seconds; before there are enough of them, that since the load began, which
    /// may have been long before we looked: `done` bytes in `seconds`. `None` where nothing can be said.
    fn bytes_per_second(&self, done: u64, seconds: f64) -> Option<f64> {
        let (first, last) = (self.samples.front()?, self.samples.back()?);
        let span = last.0.saturating_duration_since(first.0);
        if span >= RATE_AFTER {
            return Some((last.1 - first.1) as f64 / span.as_secs_f64());
        }
        let whole = seconds >= RATE_AFTER.as_secs_f64() && seconds.is_finite();
        whole.then(|| done as f64 / seconds)
    }
}

/// The little that a bar needs of a terminal, over any writer. Failed writes are dropped: a bar that cannot
/// be seen must not end the load.
struct Screen {
    sink: Mutex<Sink>,
    columns: Columns,
}

impl fmt::Debug for Screen {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Screen")
    }
}

impl Screen {
    fn put(&self, text: &str) -> io::Result<()> {
        if let Ok(mut sink) = self.sink.lock() {
            let _ = sink.write_all(text.as_bytes());
        }
        Ok(())
    }

    fn cursor(&self, by: usize, direction: char) -> io::Result<()> {
        if by == 0 { Ok(()) } else { self.put(&format!("\x1b[{by}{direction}")) }
    }
}

impl TermLike for Screen {
    fn width(&self) -> u16 {
        // A terminal may be made narrower, down to nothing, while the bar stands.
        (self.columns)().max(COLUMNS_MIN)
    }

    fn move_cursor_up(&self, lines: usize) -> io::Result<()> {
        self.cursor(lines, 'A')
    }

    fn move_cursor_down(&self, lines: usize) -> io::Result<()> {
        self.cursor(lines, 'B')
    }

    fn move_cursor_right(&self, columns: usize) -> io::Result<()> {
        self.cursor(columns, 'C')
    }

    fn move_cursor_left(&self, columns: usize) -> io::Result<()> {
        self.cursor(columns, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.put(&format!("{text}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.put(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.put("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    const GIB: u64 = 1 << 30;

    /// A clock that stands until it is set, and a writer that remembers.
    #[derive(Clone, Default)]
    struct World {
        milliseconds: Arc<AtomicU64>,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl World {
        fn bar(&self, shape: Shape, columns: Columns) -> Bar {
            let (start, milliseconds) = (Instant::now(), self.milliseconds.clone());
            let clock = move || start + Duration::from_millis(milliseconds.load(Ordering::Relaxed));
            Bar::on("loading qwen", shape, Box::new(self.clone()), columns, Box::new(clock))
        }

        fn at(&self, milliseconds: u64) {
            self.milliseconds.store(milliseconds, Ordering::Relaxed);
        }

        fn text(&self) -> String {
            String::from_utf8(self.written.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for World {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.written.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
    }

    fn progress(bytes_done: u64, seconds: f64) -> Progress {
        Progress { bytes_done, bytes_total: 16 * GIB, files_done: 0, files_total: 4, seconds }
    }

    fn reading(rate: f64) -> Speed {
        Speed { read: Some(rate), written: None }
    }

    #[test]
    fn a_copy_shows_both_rates() {
        let world = World::default();
        let mut bar = world.bar(Shape::Lines, || 80);
        for milliseconds in (0..=2_500).step_by(500) {
            world.at(milliseconds);
            let done = milliseconds * GIB / 1000;
            bar.update_copy(&progress(done, milliseconds as f64 / 1000.0), done / 2);
        }
        bar.finish();
        assert_eq!(
            world.text(),
            "loading qwen: 2.0 GiB of 16.0 GiB (12 %), 1.0 GiB/s read, 512 MiB/s written, 14 s left\n\
             loading qwen: 2.5 GiB in 2.5 s (1.0 GiB/s)\n"
        );
    }

    #[test]
    fn the_surface_follows_stderr() {
        assert_eq!(shape(true, true, Some(80)), Shape::Nothing);
        assert_eq!(shape(true, false, None), Shape::Nothing);
        assert_eq!(shape(false, true, Some(80)), Shape::Screen);
        assert_eq!(shape(false, true, Some(0)), Shape::Lines);
        assert_eq!(shape(false, true, None), Shape::Lines);
        assert_eq!(shape(false, false, Some(80)), Shape::Lines);
    }

    #[test]
    fn lines_come_after_two_seconds_and_then_every_five() {
        let world = World::default();
        let mut bar = world.bar(Shape::Lines, || 80);
        for milliseconds in (0..=12_500).step_by(500) {
            world.at(milliseconds);
            bar.update(&progress(milliseconds * GIB / 1000, milliseconds as f64 / 1000.0));
        }
        bar.finish();
        assert_eq!(
            world.text(),
            "loading qwen: 2.0 GiB of 16.0 GiB (12 %), 1.0 GiB/s, 14 s left\n\
             loading qwen: 7.0 GiB of 16.0 GiB (43 %), 1.0 GiB/s, 9 s left\n\
             loading qwen: 12.0 GiB of 16.0 GiB (75 %), 1.0 GiB/s, 4 s left\n\
             loading qwen: 12.5 GiB in 13 s (1.0 GiB/s)\n"
        );
    }

    #[test]
    fn a_short_load_and_a_quiet_one_are_silent() {
        for (shape, milliseconds) in [(Shape::Lines, 1900), (Shape::Nothing, 60_000)] {
            let world = World::default();
            let mut bar = world.bar(shape, || 80);
            bar.update(&progress(0, 0.0));
            world.at(milliseconds);
            bar.update(&progress(16 * GIB, 1.9));
            bar.finish();
            assert_eq!(world.text(), "");
        }
    }

    #[test]
    fn a_bar_shows_bytes_rate_and_time_and_is_cleared() {
        let world = World::default();
        let mut bar = world.bar(Shape::Screen, || 100);
        bar.update(&progress(4 * GIB, 4.0));
        let drawn = world.text();
        assert!(drawn.contains("loading qwen [========>                          ] 4.0 GiB"), "{drawn:?}");
        assert!(drawn.contains("4.0 GiB of 16.0 GiB (25 %), 1.0 GiB/s, 12 s left"), "{drawn:?}");
        assert!(!drawn.contains('\n'), "{drawn:?}");
        drop(bar);
        let end = world.text();
        assert!(end.ends_with("\r\x1b[2K"), "{end:?}");
    }

    #[test]
    fn a_bar_never_wraps() {
        let line = |columns| bar_line("loading 模型", &progress(4 * GIB, 4.0), reading(GIB as f64), columns);
        for columns in 20..200 {
            assert!(line(columns).width() < columns, "{columns}: {}", line(columns));
        }
        assert_eq!(line(20), "loading 模型: 4.0 G");
        assert_eq!(
            line(79),
            "loading 模型 [===>          ] 4.0 GiB of 16.0 GiB (25 %), 1.0 GiB/s, 12 s left"
        );
        let done = bar_line("loading", &progress(16 * GIB, 4.0), Speed::default(), 50);
        assert_eq!(done, "loading [==========] 16.0 GiB of 16.0 GiB (100 %)");
        assert_eq!(cut("ab型", 3), "ab");
    }

    #[test]
    fn a_terminal_that_loses_its_width_and_a_closed_stderr_do_no_harm() {
        let world = World::default();
        let mut bar = world.bar(Shape::Screen, || 0);
        bar.update(&progress(u64::MAX, f64::NAN));
        bar.update(&Progress::default());
        bar.finish();
        assert!(world.text().len() < 10_000);
        for shape in [Shape::Lines, Shape::Screen] {
            let start = Instant::now();
            let clock = move || start + Duration::from_secs(100);
            let mut bar = Bar::on("loading", shape, Box::new(Closed), || 80, Box::new(clock));
            if let Surface::Lines { due, .. } = &mut bar.surface {
                *due = start;
            }
            bar.update(&progress(1, 1.0));
            bar.update(&progress(2, 2.0));
            assert!(!matches!(bar.surface, Surface::Lines { .. }), "a sink that fails is let go");
            bar.finish();
        }
    }

    #[test]
    fn the_rate_is_that_of_the_last_seconds() {
        let start = Instant::now();
        let mut rate = Rate::default();
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        rate.add(after(0), 0);
        assert_eq!(rate.bytes_per_second(0, 0.0), None);
        assert_eq!(rate.bytes_per_second(80, 40.0), Some(2.0), "we joined late");
        for second in 1..=100 {
            rate.add(after(second), second * 10);
        }
        for second in 101..=120 {
            rate.add(after(second), 1000 + (second - 100) * 30);
        }
        assert_eq!(rate.bytes_per_second(0, 0.0), Some(30.0));
        for tick in 0..10_000 {
            rate.add(after(121) + Duration::from_millis(tick), 2000);
        }
        assert!(rate.samples.len() < 120, "{}", rate.samples.len());
        rate.add(after(140), 5);
        assert_eq!(rate.samples.len(), 1, "a load that begins anew has no past");
    }

    #[test]
    fn a_load_that_stands_still_has_no_time_left_to_tell() {
        assert_eq!(so_far(&progress(GIB, 9.0), reading(0.0)), "1.0 GiB of 16.0 GiB (6 %), 0 B/s");
        assert_eq!(so_far(&progress(GIB, 9.0), Speed::default()), "1.0 GiB of 16.0 GiB (6 %)");
        assert_eq!(so_far(&Progress::default(), Speed::default()), "0 B of 0 B (100 %)");
        assert_eq!(percent(u64::MAX - 1, u64::MAX), 99);
        assert_eq!(in_the_end(&progress(GIB, 0.0)), "1.0 GiB in 0.0 s");
        assert_eq!(in_the_end(&progress(GIB, f64::NAN)), "1.0 GiB in ?");
    }
}
