//! The test bed of the benchmarks: seeded model directories, the page cache in a known state, and reading
//! without keeping.

// Every benchmark is a program of its own and uses a part of this.
#![allow(dead_code)]

pub(crate) mod claims;
pub(crate) mod machine;
pub(crate) mod pairs;

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use iloader::engine::{self, Direction, Selected, Transfer};
use iloader::load::{self, Options, Watch};
use iloader::memory::{self, Resident, Settings};
use iloader::plan::{self, Plan};
use iloader::source::{Direct, Identity, SelectedFile, Selection};
use iloader::sys::cache;
use iloader::sys::map::Mapping;
use iloader::units::{PAGE_BYTES, round_up};
use tempfile::TempDir;

/// A benchmark that cannot give an honest figure says why instead.
pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// What `start` takes at a time where nothing else is asked for.
const CHUNK_BYTES: u64 = 64 << 20;

/// Where published descriptors begin: behind those of the benchmark itself.
const LOWEST_DESCRIPTOR: i32 = 64;

/// How often files are read until the page cache has all of them.
const WARMING_MAX: usize = 3;

/// How much is generated, evicted or copied at a time.
const PIECE_BYTES: usize = 8 << 20;

/// A model directory made for a benchmark, removed when dropped.
pub(crate) struct ModelDir {
    directory: TempDir,
    /// Its files, as a selection of all of them.
    pub(crate) selection: Selection,
    /// The same, laid out.
    pub(crate) plan: Plan,
}

impl ModelDir {
    /// Makes `files` files of `bytes_each` under `parent`, filled with seeded random bytes and written to
    /// the device, so that the page cache may drop them.
    pub(crate) fn make(parent: &Path, files: usize, bytes_each: u64) -> Outcome<ModelDir> {
        std::fs::create_dir_all(parent)?;
        let directory = tempfile::Builder::new().prefix("iloader-bench-").tempdir_in(parent)?;
        let root = directory.path().canonicalize()?;
        let mut random = Random(0x1105_1997);
        let mut piece = vec![0; PIECE_BYTES];
        let mut selected = Vec::with_capacity(files);
        for index in 0..files {
            let path = format!("model-{index:05}-of-{files:05}.safetensors");
            let real = root.join(&path);
            let mut file = File::create(&real)?;
            let mut left = bytes_each;
            while left > 0 {
                let length = left.min(PIECE_BYTES as u64) as usize;
                random.fill(&mut piece[..length]);
                file.write_all(&piece[..length])?;
                left -= length as u64;
            }
            let identity = Identity::of(&file.metadata()?);
            selected.push(SelectedFile { path, real, identity, passthrough: false });
        }
        // One flush of the file system instead of one of each file.
        rustix::fs::syncfs(File::open(&root)?)?;
        let selection = Selection::of_files(root, selected);
        let plan = plan::lay_out(&selection, CHUNK_BYTES);
        Ok(ModelDir { directory, selection, plan })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Bytes in all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    /// Decimal gigabytes in all files.
    pub(crate) fn gigabytes(&self) -> f64 {
        self.bytes() as f64 / 1e9
    }

    /// The files, absolute.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Path> {
        self.selection.files.iter().map(|file| file.real.as_path())
    }

    /// Drops all of it from the page cache, and looks whether that was so. A figure that was not cold is
    /// not given.
    pub(crate) fn make_cold(&self) -> Outcome<()> {
        for path in self.files() {
            rustix::fs::fadvise(File::open(path)?, 0, None, rustix::fs::Advice::DontNeed)?;
        }
        match self.cached_pages()? {
            0 => Ok(()),
            pages => Err(format!("not cold: {pages} pages stayed in the page cache").into()),
        }
    }

    /// Reads all of it into the page cache, and looks whether it is there.
    pub(crate) fn make_warm(&self) -> Outcome<()> {
        // Where memory was just freed the system may still be taking pages back: once more brings them in again.
        for _ in 0..WARMING_MAX {
            self.read_once()?;
            if self.is_warm()? {
                return Ok(());
            }
        }
        Err("not warm: the page cache does not keep all of it".into())
    }

    /// Whether all of it is in the page cache.
    pub(crate) fn is_warm(&self) -> Outcome<bool> {
        let pages: u64 = self.selection.files.iter().map(|f| f.identity.bytes.div_ceil(PAGE_BYTES)).sum();
        Ok(self.cached_pages()? == pages)
    }

    fn read_once(&self) -> Outcome<()> {
        let mut piece = vec![0; PIECE_BYTES];
        for path in self.files() {
            let mut file = File::open(path)?;
            while file.read(&mut piece)? > 0 {}
        }
        Ok(())
    }

    /// Pages of its files in the page cache now.
    fn cached_pages(&self) -> Outcome<u64> {
        let mut pages = 0;
        for file in &self.selection.files {
            let open = File::open(&file.real)?;
            let bytes = usize::try_from(file.identity.bytes)?;
            pages += match cache::cached_pages(&open, 0, 0) {
                Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                    cache::resident_pages(&open, 0, bytes)?
                }
                other => other?,
            };
        }
        Ok(pages)
    }

    /// Brings all of it into sealed memory, as a daemon would.
    pub(crate) fn preload(&self, settings: &Settings) -> Outcome<Resident> {
        let start = || settings.engine.start();
        Ok(memory::load_with(&self.plan, &self.selection, settings, &start, &Nobody)?)
    }
}

/// The settings of a plain `start`: one worker, everything else chosen by probing.
pub(crate) fn settings(backing: memory::Choice) -> Outcome<Settings> {
    Ok(Settings {
        cache_name: "bench".to_owned(),
        backing,
        engine: Selected::probe(engine::Choice::Auto, None)?,
        options: Options::default(),
        lowest_descriptor: LOWEST_DESCRIPTOR,
        lock_memory: false,
        hashing: None,
        stands_for: None,
    })
}

/// Watches nothing.
struct Nobody;

impl Watch for Nobody {
    fn advanced(&self, _bytes: u64) {}

    fn finished_file(&self) {}

    fn cancelled(&self) -> bool {
        false
    }
}

/// Reads files in order through an engine that is kept full, into buffers on huge pages that are used again
/// and again: what the storage gives to somebody who keeps nothing.
pub(crate) struct Discard {
    engine: Box<dyn engine::Engine>,
    windows: Vec<iloader::sys::map::Window>,
    read_bytes: u64,
}

impl Discard {
    /// Starts the engine, and touches the buffers so that their pages are there.
    pub(crate) fn new(selected: &Selected, read_bytes: u64) -> Outcome<Discard> {
        let engine = selected.start()?;
        let mut memory = Mapping::anonymous(engine.depth() * read_bytes as usize)?;
        memory.as_mut_slice().fill(1);
        let windows = (0..engine.depth()).map(|_| memory.split_to(read_bytes as usize)).collect();
        Ok(Discard { engine, windows, read_bytes })
    }

    /// Reads every file from its start to its end, with O_DIRECT or through the page cache.
    pub(crate) fn read(&mut self, files: &[SelectedFile], direct: Direct) -> Outcome<()> {
        let flags = if direct == Direct::Never { 0 } else { libc::O_DIRECT };
        let (mut wanted, mut in_flight, mut got) = (0, 0, 0);
        let mut completions = Vec::new();
        for selected in files {
            let file = OpenOptions::new().read(true).custom_flags(flags).open(&selected.real)?;
            let (file, bytes) = (Arc::new(file), selected.identity.bytes);
            wanted += bytes;
            for offset in (0..bytes).step_by(self.read_bytes as usize) {
                if self.windows.is_empty() {
                    got += self.reap(&mut completions, &mut in_flight)?;
                }
                let window = self.windows.pop().ok_or("the engine gave no buffer back")?;
                let (file, direction) = (Arc::clone(&file), Direction::Read);
                let read = Transfer { token: 0, direction, file, offset, window };
                self.engine.submit(read).map_err(|_| "the engine takes fewer reads than its depth")?;
                in_flight += 1;
            }
        }
        while in_flight > 0 {
            got += self.reap(&mut completions, &mut in_flight)?;
        }
        match got == wanted {
            true => Ok(()),
            false => Err(format!("the reference read {got} of {wanted} bytes: a read was short").into()),
        }
    }

    fn reap(&mut self, completions: &mut Vec<engine::Completion>, in_flight: &mut usize) -> Outcome<u64> {
        self.engine.reap(completions)?;
        *in_flight -= completions.len();
        let mut got = 0;
        for completion in completions.drain(..) {
            got += completion.result? as u64;
            self.windows.push(completion.window);
        }
        Ok(got)
    }
}

/// How long after the last large free a kernel hands what is free to the host of a virtual machine, where it
/// does (`page_reporting`): 2 seconds, and a little more to do it in.
const REPORTING: Duration = Duration::from_millis(2500);

/// Sees to it that the next `bytes` that are taken are really there, for a run that follows at once.
///
/// A virtual machine may have handed its free memory to the host, and then whoever takes it waits for the
/// host, five times as long as the kernel needs to clear it. So this waits until what was freed before has
/// been handed over, then touches as much again and frees it.
pub(crate) fn have_memory(bytes: u64) -> Outcome<()> {
    std::thread::sleep(REPORTING);
    Mapping::anonymous(usize::try_from(bytes)?)?.as_mut_slice().fill(1);
    Ok(())
}

/// How long `work` takes.
pub(crate) fn timed(work: impl FnOnce() -> Outcome<()>) -> Outcome<Duration> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

/// Runs a command to its end, without its output; its failure is ours.
pub(crate) fn succeed(command: &mut Command) -> Outcome<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let program = command.get_program().to_string_lossy();
    Err(format!("{program} failed ({}): {}", output.status, said.trim()).into())
}

/// Few samples and short ones: these benchmarks compare factors, not percents.
pub(crate) fn criterion() -> criterion::Criterion {
    criterion::Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3))
        .configure_from_args()
}

/// Where files are made where nothing else is asked for.
pub(crate) fn directory() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// The default length of one read, in whole pages.
pub(crate) fn read_bytes() -> u64 {
    round_up(load::READ_BYTES_DEFAULT, PAGE_BYTES)
}

/// A fast generator of bytes that no device can compress or deduplicate: SplitMix64.
struct Random(u64);

impl Random {
    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            word.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes()[..word.len()]);
        }
    }
}
