//! The writing thread: cuts full chunks into pieces, keeps its engine full of them, and resumes short ones.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, TryRecvError};

use super::writer::{Full, Writer, failed};
use crate::engine::keeping::{Attempts, append, free_slot, joined};
use crate::engine::{Completion, Direction, Engine, Transfer};
use crate::error::Result;
use crate::plan::Chunk;
use crate::sys::map::Window;
use crate::units::{PAGE_BYTES, round_down};

/// The length of one write: long enough for every device measured, short enough that a chunk keeps a queue busy.
const PIECE_BYTES: usize = 1 << 20;

/// A chunk that is being written.
struct Moving {
    chunk: Chunk,
    /// What is not cut off yet, and where in the chunk it begins.
    rest: Window,
    at: u64,
    /// The pieces that were written, in order, until all are there.
    pieces: Vec<Option<Window>>,
    pieces_written: usize,
}

/// One piece of a chunk that is being written.
struct Piece {
    moving: usize,
    index: usize,
    /// Where in the file the next write of it goes.
    offset: u64,
    /// What short writes have written so far.
    written: Option<Window>,
    is_direct: bool,
    attempts: Attempts,
}

struct Mover<'a> {
    writer: &'a Writer<'a>,
    engine: Box<dyn Engine>,
    moving: Vec<Option<Moving>>,
    /// The chunks that are to be cut, in order.
    cutting: VecDeque<usize>,
    pieces: Vec<Option<Piece>>,
    in_flight: usize,
    /// Writes to be submitted before any new one: resumed and retried ones.
    again: VecDeque<Transfer>,
}

/// Writes what comes until the queue ends, or somebody fails. No write is in flight when this returns.
pub(super) fn write_all(writer: &Writer<'_>, engine: Box<dyn Engine>, fulls: &Receiver<Full>) -> Result<()> {
    let depth = engine.depth();
    let mut mover = Mover {
        writer,
        engine,
        moving: Vec::new(),
        cutting: VecDeque::new(),
        pieces: (0..depth).map(|_| None).collect(),
        in_flight: 0,
        again: VecDeque::new(),
    };
    let mut completions = Vec::with_capacity(depth);
    while mover.take_in(fulls) {
        writer.check()?;
        mover.fill_engine();
        mover.engine.start()?;
        mover.engine.reap(&mut completions)?;
        for completion in completions.drain(..) {
            mover.in_flight -= 1;
            mover.settle(completion)?;
        }
    }
    Ok(())
}

impl Mover<'_> {
    /// Takes what is in the queue, and waits for it where nothing else is to be done; `false` at the queue's end.
    fn take_in(&mut self, fulls: &Receiver<Full>) -> bool {
        loop {
            let has_work = self.in_flight > 0 || !self.cutting.is_empty() || !self.again.is_empty();
            let next = match fulls.try_recv() {
                Err(TryRecvError::Empty) if has_work => return true,
                Err(TryRecvError::Empty) => fulls.recv().map_err(|_| TryRecvError::Disconnected),
                other => other,
            };
            let Ok(Full { chunk, window }) = next else { return has_work };
            let moving = Moving { chunk, rest: window, at: 0, pieces: Vec::new(), pieces_written: 0 };
            let slot = free_slot(&mut self.moving);
            self.moving[slot] = Some(moving);
            self.cutting.push_back(slot);
        }
    }

    /// Submits writes until the engine is full or nothing is left to write.
    fn fill_engine(&mut self) {
        while self.in_flight < self.pieces.len() {
            let Some(write) = self.again.pop_front().or_else(|| self.next_write()) else { return };
            let submitted = self.engine.submit(write);
            assert!(submitted.is_ok(), "an engine takes as many writes as its depth");
            self.in_flight += 1;
        }
    }

    /// Cuts the next piece off the first chunk.
    fn next_write(&mut self) -> Option<Transfer> {
        let slot = *self.cutting.front()?;
        let moving = self.moving[slot].as_mut().expect("a chunk that is cut is being written");
        let (file, is_direct) = self.writer.file(moving.chunk.target);
        let length = PIECE_BYTES.min(moving.rest.len());
        let window = moving.rest.split_to(length);
        let offset = moving.chunk.to + moving.at;
        moving.at += length as u64;
        if moving.rest.is_empty() {
            self.cutting.pop_front();
        }
        let index = moving.pieces.len();
        moving.pieces.push(None);
        let token = free_slot(&mut self.pieces);
        self.pieces[token] = Some(Piece {
            moving: slot,
            index,
            offset,
            written: None,
            is_direct,
            attempts: Attempts::default(),
        });
        Some(Transfer { token: token as u64, direction: Direction::Write, file, offset, window })
    }

    /// Takes one completion: done, to be resumed, to be retried, or an error.
    fn settle(&mut self, completion: Completion) -> Result<()> {
        let token = completion.token as usize;
        let piece = self.pieces[token].as_mut().expect("a completion belongs to a piece");
        let moving = self.moving[piece.moving].as_ref().expect("a piece belongs to a chunk");
        let target = moving.chunk.target;
        let path = &self.writer.setting.files[target].path;
        let mut window = completion.window;
        let mut is_refused = false;
        match completion.result {
            Ok(bytes) if bytes >= window.len() => {
                self.piece_done(token, window);
                return Ok(());
            }
            Ok(bytes) => {
                // Short is normal. O_DIRECT goes on at a whole page; where it ends elsewhere something is odd, so
                // the rest is better written through the page cache.
                let keep = if piece.is_direct { round_down(bytes as u64, PAGE_BYTES) } else { bytes as u64 };
                is_refused = keep != bytes as u64;
                if keep > 0 {
                    let written = window.split_to(keep as usize);
                    append(&mut piece.written, written);
                    piece.offset += keep;
                    piece.attempts.forget();
                } else {
                    piece.attempts.try_again("write", path, piece.offset)?;
                }
            }
            Err(cause) => match cause.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) if piece.attempts.may_try() => {
                    piece.attempts.try_again("write", path, piece.offset)?;
                }
                Some(libc::EINVAL | libc::EOPNOTSUPP) if piece.is_direct => is_refused = true,
                _ => {
                    let doing = format!("write {} bytes at {} of", window.len(), piece.offset);
                    return Err(failed(&doing, path, &cause));
                }
            },
        }
        if is_refused {
            piece.is_direct = false;
            self.writer.direct_was_refused(target)?;
        }
        let (file, _) = self.writer.file(target);
        let offset = piece.offset;
        self.again.push_back(Transfer {
            token: token as u64,
            direction: Direction::Write,
            file,
            offset,
            window,
        });
        Ok(())
    }

    /// One piece is written; when all pieces of its chunk are, the chunk is done.
    fn piece_done(&mut self, token: usize, window: Window) {
        let mut piece = self.pieces[token].take().expect("a completion belongs to a piece");
        append(&mut piece.written, window);
        let moving = self.moving[piece.moving].as_mut().expect("a piece belongs to a chunk");
        moving.pieces[piece.index] = piece.written;
        moving.pieces_written += 1;
        if !moving.rest.is_empty() || moving.pieces_written < moving.pieces.len() {
            return;
        }
        let Moving { chunk, pieces, rest, .. } = self.moving[piece.moving].take().expect("looked at above");
        // What is left to cut is empty, but it would still hold the mapping.
        drop(rest);
        self.writer.setting.watch.wrote(chunk.bytes);
        self.writer.chunk_done(&chunk, joined(pieces));
    }
}
