//! Laying out a selection: pure arithmetic. No file and no page cache takes part.

mod bed;

use std::hint::black_box;

use bed::Outcome;
use criterion::Throughput;
use iloader::plan::lay_out;
use iloader::source::{Identity, SelectedFile, Selection};

const CHUNK_BYTES: u64 = 64 << 20;

fn main() -> Outcome<()> {
    let mut criterion = bed::criterion();
    let mut group = criterion.benchmark_group("plan");
    for (name, files, bytes) in
        [("10,000 files of 1 KiB", 10_000, 1 << 10), ("190 files of 4 GiB", 190, 4 << 30)]
    {
        let selection = invented(files, bytes);
        group.throughput(Throughput::Elements(files));
        group.bench_function(name, |bencher| {
            bencher.iter(|| lay_out(black_box(&selection), CHUNK_BYTES));
        });
    }
    group.finish();
    criterion.final_summary();
    Ok(())
}

/// A selection of files that need not exist: a plan does not look.
fn invented(files: u64, bytes: u64) -> Selection {
    let file = |inode| SelectedFile {
        path: format!("blobs/{inode:08}"),
        real: format!("/model/blobs/{inode:08}").into(),
        identity: Identity { device: 1, inode, bytes, mtime_seconds: 0, mtime_nanoseconds: 0 },
        passthrough: false,
    };
    Selection::of_files("/model", (0..files).map(file).collect())
}
