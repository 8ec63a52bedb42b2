//! Sequential throughput by engine, against plain `read` and `pread`, of one file that is read and thrown
//! away.

mod bed;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use bed::{Discard, ModelDir, Outcome};
use criterion::Throughput;
use iloader::engine::{Choice, Selected};
use iloader::source::Direct;
use iloader::sys::map::{Mapping, Window};

const FILE_BYTES: u64 = 256 << 20;

fn main() -> Outcome<()> {
    let mut criterion = bed::criterion();
    let model = ModelDir::make(bed::directory(), 1, FILE_BYTES)?;
    let read_bytes = usize::try_from(bed::read_bytes())?;
    let mut buffer = Mapping::anonymous(read_bytes)?;
    buffer.as_mut_slice().fill(1);
    for (name, direct) in
        [("wholly in the page cache", Direct::Never), ("O_DIRECT, nothing in the page cache", Direct::Always)]
    {
        match direct {
            Direct::Never => model.make_warm()?,
            _ => model.make_cold()?,
        }
        let mut group = criterion.benchmark_group(format!("engine, {name}"));
        group.throughput(Throughput::Bytes(FILE_BYTES));
        for choice in [Choice::IoUring, Choice::Threads] {
            let selected = match Selected::probe(choice, None) {
                Ok(selected) => selected,
                Err(error) => {
                    eprintln!("left out: {error}");
                    continue;
                }
            };
            let mut engine = Discard::new(&selected, bed::read_bytes())?;
            group.bench_function(selected.model.to_string(), |bencher| {
                bencher.iter(|| engine.read(&model.selection.files, direct).expect("the file can be read"));
            });
        }
        group.bench_function("one pread at a time", |bencher| {
            bencher.iter(|| {
                model
                    .files()
                    .for_each(|path| read_plainly(path, direct, &mut buffer).expect("it can be read"))
            });
        });
        group.finish();
    }
    criterion.final_summary();
    Ok(())
}

/// What a loop of reads gives, without any engine.
fn read_plainly(path: &Path, direct: Direct, buffer: &mut Window) -> Outcome<()> {
    let flags = if direct == Direct::Never { 0 } else { libc::O_DIRECT };
    let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let mut offset = 0;
    loop {
        match file.read_at(buffer.as_mut_slice(), offset)? {
            0 => return Ok(()),
            bytes => offset += bytes as u64,
        }
    }
}
