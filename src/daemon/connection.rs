//! One client's connection: what has come of its request, what is left of its answer, and until when.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use crate::control::frame::{Decoder, REQUEST_BYTES_MAX};
use crate::control::message::{Operation, Request};
use crate::daemon::leases::{Process, since_boot};
use crate::error::Result;
use crate::sys::peer::Peer;

/// A request must be complete this long after its first byte, and the first one after the connecting.
pub(super) const REQUEST_TIME_MAX: Duration = Duration::from_secs(5);

/// A connection that waits for nothing is closed after this long without a request.
pub(super) const IDLE_TIME_MAX: Duration = Duration::from_secs(60);

/// An answer of which nothing is read for this long is given up.
pub(super) const REPLY_STALL_MAX: Duration = Duration::from_secs(10);

/// What a connection is for, which decides about its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Asks and is answered.
    Asking,
    /// Has asked, and the answer comes when something happens.
    Waiting,
    /// Carries a lease.
    Leasing,
}

/// What reading from a connection came to.
#[derive(Debug)]
pub(super) enum Received {
    /// A whole request.
    Operation(Operation),
    /// Not a whole one yet.
    Nothing,
    /// The client closed its end, or the connection broke.
    End,
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    peer: Peer,
    /// After boot; for telling the peer from a later process of the same number.
    accepted: Duration,
    decoder: Decoder,
    /// Answers of which the client has read nothing or a part: the bytes from `sent` on.
    answer: Vec<u8>,
    sent: usize,
    pub(super) role: Role,
    /// Nothing more is read; it is closed when the answer is out.
    is_closing: bool,
    request_deadline: Option<Instant>,
    stall_deadline: Option<Instant>,
    asked_last: Instant,
    /// What epoll watches it for.
    pub(super) interest: EventFlags,
}

impl Connection {
    pub(super) fn new(descriptor: OwnedFd, peer: Peer) -> Connection {
        let now = Instant::now();
        Connection {
            stream: UnixStream::from(descriptor),
            peer,
            accepted: since_boot(),
            decoder: Decoder::new(REQUEST_BYTES_MAX),
            answer: Vec::new(),
            sent: 0,
            role: Role::Asking,
            is_closing: false,
            request_deadline: Some(now + REQUEST_TIME_MAX),
            stall_deadline: None,
            asked_last: now,
            interest: EventFlags::empty(),
        }
    }

    /// The process that connected.
    pub(super) fn process(&self) -> Process {
        Process::behind(self.stream.as_fd(), self.peer, self.accepted)
    }

    pub(super) fn pid(&self) -> i32 {
        self.peer.pid
    }

    /// Bytes of answers that the client has not taken.
    pub(super) fn unread_bytes(&self) -> usize {
        self.answer.len() - self.sent
    }

    /// Whether a request may lie in what was received already. The next one is looked at only when the
    /// answer to the last is out, so that a client can't pile up answers.
    pub(super) fn may_have_request(&self) -> bool {
        self.decoder.has_begun() && self.unread_bytes() == 0 && !self.is_closing
    }

    /// What epoll should watch it for: the end of the answer first, then the next request.
    pub(super) fn wanted_interest(&self) -> EventFlags {
        if self.unread_bytes() > 0 { EventFlags::OUT } else { EventFlags::IN | EventFlags::RDHUP }
    }

    /// Reads what came, once, and takes the first request out of it. An error says what is wrong with it.
    pub(super) fn receive(&mut self) -> Result<Received> {
        match self.decoder.fill_from(&mut self.stream) {
            Ok(0) => Ok(Received::End),
            Ok(_) => self.take_request(),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(Received::Nothing)
            }
            Err(_) => Ok(Received::End),
        }
    }

    /// Takes the first request out of what was received.
    pub(super) fn take_request(&mut self) -> Result<Received> {
        let frame = self.decoder.next_frame()?;
        if frame.is_some() {
            self.asked_last = Instant::now();
            self.request_deadline = None;
        }
        if self.decoder.has_begun() && self.request_deadline.is_none() {
            self.request_deadline = Some(Instant::now() + REQUEST_TIME_MAX);
        }
        match frame {
            Some(frame) => Ok(Received::Operation(Request::parse(&frame)?.operation)),
            None => Ok(Received::Nothing),
        }
    }

    /// Adds an encoded answer and sends what the client takes of it. `Err`: the connection is broken.
    pub(super) fn answer(&mut self, frame: &[u8]) -> io::Result<()> {
        self.answer.extend_from_slice(frame);
        self.send()
    }

    /// Sends what the client takes at this moment.
    pub(super) fn send(&mut self) -> io::Result<()> {
        while self.unread_bytes() > 0 {
            match self.stream.write(&self.answer[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.sent += count;
                    self.stall_deadline = None;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let stalled = || Instant::now() + REPLY_STALL_MAX;
                    self.stall_deadline = Some(self.stall_deadline.unwrap_or_else(stalled));
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        // Given back, not only emptied: a manifest may have been tens of megabytes.
        self.answer = Vec::new();
        self.sent = 0;
        self.stall_deadline = None;
        self.asked_last = Instant::now();
        Ok(())
    }

    /// Reads nothing more; the connection ends when the answer is out.
    pub(super) fn close_when_sent(&mut self) {
        self.is_closing = true;
    }

    /// Whether it is to be closed now.
    pub(super) fn is_done(&self) -> bool {
        self.is_closing && self.unread_bytes() == 0
    }

    /// Until when something must have happened here; `None`: it may rest for ever.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let idle = (self.role == Role::Asking).then(|| self.asked_last + IDLE_TIME_MAX);
        self.stall_deadline.or(self.request_deadline).or(idle)
    }

    /// Whether the time ran out within a request, which the client is told, rather than an answer or idleness.
    pub(super) fn is_within_request(&self) -> bool {
        self.stall_deadline.is_none() && self.request_deadline.is_some() && self.decoder.has_begun()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
