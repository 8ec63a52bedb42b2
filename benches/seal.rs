//! Sealing a filled memfd, on huge pages and on pages of 4 KiB: the kernel walks the pages. No file and no
//! page cache takes part.

mod bed;

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use bed::{Outcome, machine};
use criterion::SamplingMode;
use iloader::sys::map::Mapping;
use iloader::sys::memfd;
use iloader::units::HUGE_PAGE_BYTES;

const MEMFD_BYTES: usize = 256 << 20;

/// Makes a filled memfd that is not sealed yet.
type Fill = fn() -> Outcome<File>;

fn main() -> Outcome<()> {
    let mut criterion = bed::criterion();
    let mut group = criterion.benchmark_group("seal 256 MiB");
    group.sampling_mode(SamplingMode::Flat);
    let small = format!("written (shmem_enabled={})", machine::shmem_enabled());
    let kinds: [(&str, Fill); 2] = [("on huge pages", on_huge_pages), (&small, on_small_pages)];
    for (name, fill) in kinds {
        if let Err(error) = fill() {
            eprintln!("left out: {name}: {error}");
            continue;
        }
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|times| {
                let mut sum = Duration::ZERO;
                for _ in 0..times {
                    let file = fill().expect("it was filled before");
                    let start = Instant::now();
                    let sealed = memfd::seal(file).expect("nothing maps it");
                    sum += start.elapsed();
                    drop(sealed);
                }
                sum
            });
        });
    }
    group.finish();
    criterion.final_summary();
    Ok(())
}

/// Filled through a map, a huge page under every extent.
fn on_huge_pages() -> Outcome<File> {
    let file = memfd::create("bench:huge")?;
    file.set_len(MEMFD_BYTES as u64)?;
    let (mapping, mut window) = Mapping::shared(&file, MEMFD_BYTES)?;
    for offset in (0..MEMFD_BYTES).step_by(HUGE_PAGE_BYTES as usize) {
        window.collapse_extent(offset)?;
    }
    window.as_mut_slice().fill(1);
    drop(window);
    mapping.unmap().map_err(|_| "the only window is gone")?;
    Ok(file)
}

/// Filled by writing.
fn on_small_pages() -> Outcome<File> {
    let mut file = memfd::create("bench:4k")?;
    let piece = vec![1; HUGE_PAGE_BYTES as usize];
    for _ in 0..MEMFD_BYTES / piece.len() {
        file.write_all(&piece)?;
    }
    Ok(file)
}
