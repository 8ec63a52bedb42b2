//! What pages cost: a preload on huge pages by backing, against writing the same bytes to a memfd on pages
//! of 4 KiB. The file is wholly in the page cache, so that no device hides the difference.

mod bed;

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use bed::{ModelDir, Outcome, machine};
use criterion::Throughput;
use iloader::memory::Choice;
use iloader::sys::memfd;

const FILE_BYTES: u64 = 256 << 20;

/// What is read and written at a time.
const BUFFER_BYTES: usize = 1 << 20;

fn main() -> Outcome<()> {
    let mut criterion = bed::criterion();
    let model = ModelDir::make(bed::directory(), 1, FILE_BYTES)?;
    model.make_warm()?;
    let mut group = criterion.benchmark_group("preload, wholly in the page cache");
    group.throughput(Throughput::Bytes(FILE_BYTES));
    for (name, choice) in [("memfd", Choice::Memfd), ("tmpfs", Choice::Tmpfs)] {
        let settings = bed::settings(choice)?;
        match model.preload(&settings) {
            Ok(_) => {}
            Err(error) => {
                eprintln!("left out: {error}");
                continue;
            }
        }
        group.bench_function(format!("{name} on huge pages"), |bencher| {
            bencher.iter_custom(|times| {
                // Giving the memory back is not part of it.
                let mut sum = Duration::ZERO;
                for _ in 0..times {
                    let start = Instant::now();
                    let resident = model.preload(&settings).expect("it was loaded before");
                    sum += start.elapsed();
                    drop(resident);
                }
                sum
            });
        });
    }
    let name = format!("memfd that is written to (shmem_enabled={})", machine::shmem_enabled());
    group.bench_function(name, |bencher| {
        let mut buffer = vec![0; BUFFER_BYTES];
        bencher.iter_custom(|times| {
            let mut sum = Duration::ZERO;
            for _ in 0..times {
                let start = Instant::now();
                let memory = write_memfd(model.files(), &mut buffer).expect("a memfd can be written");
                sum += start.elapsed();
                drop(memory);
            }
            sum
        });
    });
    group.finish();
    criterion.final_summary();
    Ok(())
}

/// Reads each file into a buffer, writes it to a memfd and seals that.
fn write_memfd<'a>(files: impl Iterator<Item = &'a Path>, buffer: &mut [u8]) -> Outcome<Vec<File>> {
    let copy = |path: &Path| -> Outcome<File> {
        let (mut source, mut memory) = (File::open(path)?, memfd::create("bench:4k")?);
        loop {
            match source.read(buffer)? {
                0 => return memfd::seal(memory).map_err(|(_, cause)| cause.into()),
                bytes => memory.write_all(&buffer[..bytes])?,
            }
        }
    };
    files.map(copy).collect()
}
