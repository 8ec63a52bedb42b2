//! Real processes that hold a memfd and a file of a private tmpfs, in every way there is.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::fs::{Mode, OFlags};

use super::*;

const BYTES: usize = 3 << 20;

/// A file in memory, as a segment is one.
fn memory_file(kind: &str) -> Option<File> {
    let file: OwnedFd = match kind {
        "memfd" => {
            rustix::fs::memfd_create("iloader:test:a b", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd")
        }
        _ => {
            let tmpfs = match crate::sys::namespace::private_tmpfs(64 << 20, 16) {
                Ok(tmpfs) => tmpfs,
                Err(refused) => {
                    crate::skipped(format_args!("a private tmpfs: {refused:?}"));
                    return None;
                }
            };
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
            let file =
                rustix::fs::openat(&tmpfs.writable, "iloader:test:b", flags, Mode::RUSR).expect("a file");
            rustix::fs::unlinkat(&tmpfs.writable, "iloader:test:b", rustix::fs::AtFlags::empty())
                .expect("unlinked");
            file
        }
    };
    let mut file = File::from(file);
    file.write_all(&vec![7; BYTES]).expect("written");
    Some(file)
}

fn segments(file: &File) -> Segments {
    let found = file.metadata().expect("examined");
    [(found.dev(), found.ino())].into_iter().collect()
}

/// A python3 that does what it is told with descriptor 0, says so, and waits for its input to end.
struct Python {
    child: Child,
    rest: Option<ChildStdin>,
}

impl Python {
    /// `None`, with a line that says why, where there is none.
    fn start(file: &File, script: &str) -> Option<Python> {
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let script = format!(
            "import mmap, os, sys, threading\npath = {path:?}\n{script}\nprint('done', flush=True)\nsys.stdin.read()\n"
        );
        let child = Command::new("python3")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut child) = child else {
            crate::skipped("there is no python3");
            return None;
        };
        let rest = child.stdin.take();
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("readable");
        assert_eq!(line, "done\n", "{script}");
        Some(Python { child, rest })
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        self.rest = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn look(file: &File) -> Vec<Reader> {
    find(&segments(file), Detail::Memory).expect("there is a /proc").readers
}

#[test]
fn whoever_has_it_open_or_mapped_is_found_once() {
    for kind in ["memfd", "tmpfs"] {
        let Some(file) = memory_file(kind) else { continue };
        assert_eq!(look(&file), [], "this process itself is none");
        let Some(open) = Python::start(&file, "keep = [open(path, 'rb') for _ in range(3)]") else { return };
        let found = look(&file);
        assert_eq!(found.len(), 1, "{kind}: {found:?}");
        let reader = &found[0];
        assert_eq!((reader.process.pid, reader.descriptors, reader.mapped_bytes), (open.pid(), 3, 0));
        assert!(reader.process.command.contains("python3"), "{reader:?}");

        // Maps alone, without a descriptor; two megabytes of a private one are written to.
        let script = "f = os.open(path, os.O_RDONLY)\n\
                      m = mmap.mmap(f, 0, access=mmap.ACCESS_COPY)\nos.close(f)\n\
                      f = os.open(path, os.O_RDONLY)\n\
                      n = mmap.mmap(f, 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)\nos.close(f)\n\
                      sum(n[i] for i in range(0, len(n), 4096))\n\
                      m[:2 << 20] = b'x' * (2 << 20)\n\
                      threading.Thread(target=threading.Event().wait, daemon=True).start()";
        let maps = Python::start(&file, script).expect("there was a python3");
        let found = look(&file);
        assert_eq!(found.len(), 2, "{kind}: {found:?}");
        let reader = found.iter().find(|reader| reader.process.pid == maps.pid()).expect("found");
        // Python duplicates the descriptor that it maps.
        assert_eq!((reader.descriptors, reader.mapped_bytes), (2, 2 * BYTES as u64), "{kind}");
        let memory = reader.memory.expect("it is our own process");
        assert_eq!(memory.private_bytes, 2 << 20, "{kind}: {memory:?}");
        assert!(memory.resident_bytes >= (BYTES + (2 << 20)) as u64, "{kind}: {memory:?}");
        assert!(memory.own_bytes.expect("told") >= memory.private_bytes, "{kind}: {memory:?}");
        let who = find(&segments(&file), Detail::Who).expect("there is a /proc");
        assert!(who.readers.iter().all(|reader| reader.memory.is_none()));
        drop((open, maps));
        assert_eq!(look(&file), [], "{kind}: they have ended");
    }
}

#[test]
fn a_process_goes_on_reading_when_its_first_thread_has_ended() {
    let file = memory_file("memfd").expect("always");
    let script = "import ctypes\nkeep = open(path, 'rb')\n\
                  def rest():\n    print('done', flush=True)\n    sys.stdin.read()\n    os._exit(0)\n\
                  threading.Thread(target=rest).start()\nctypes.CDLL(None).pthread_exit(None)";
    let Some(python) = Python::start(&file, script) else { return };
    let state = || std::fs::read_to_string(format!("/proc/{}/stat", python.pid())).expect("alive");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !state().contains(") Z ") {
        assert!(std::time::Instant::now() < deadline, "its first thread never ended");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let found = look(&file);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].process.pid, found[0].descriptors), (python.pid(), 1));
}

#[test]
fn what_cannot_be_looked_into_is_named() {
    if rustix::process::geteuid().is_root() {
        return crate::skipped("root may look into every process");
    }
    let file = memory_file("memfd").expect("always");
    let script = "import ctypes\nkeep = open(path, 'rb')\nctypes.CDLL(None).prctl(4, 0)";
    let Some(python) = Python::start(&file, script) else { return };
    let seen = find(&segments(&file), Detail::Who).expect("there is a /proc");
    assert_eq!(seen.readers, []);
    let named = seen.unseen.iter().find(|process| process.pid == python.pid()).expect("named");
    assert!(named.command.contains("python3"), "{named:?}");
}
