//! Messages on the wire: four bytes of length, little-endian, then so many bytes of JSON.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use crate::error::{Error, Kind, Result};
use crate::units::ByteSize;

/// Bytes of the length in front of every message.
pub const HEADER_BYTES: usize = 4;

/// The longest request: the operations carry a handful of numbers, so this is generous.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;

/// The longest reply: a manifest of about 300,000 files. It bounds what a client lets a daemon make it hold.
pub const REPLY_BYTES_MAX: usize = 64 << 20;

/// One read asks for so much; a reply of ordinary size then takes one read.
const READ_BYTES: usize = 64 << 10;

/// The message as a frame, refused where it is longer than `bytes_max`.
pub fn encode(message: &impl Serialize, bytes_max: usize) -> Result<Vec<u8>> {
    let mut frame = vec![0; HEADER_BYTES];
    serde_json::to_writer(&mut frame, message)
        .map_err(|error| Error::new(Kind::Failed, format!("cannot write a control message: {error}")))?;
    let length = frame.len() - HEADER_BYTES;
    if length > bytes_max {
        return Err(too_long(length, bytes_max));
    }
    let length = u32::try_from(length).map_err(|_| too_long(length, bytes_max))?;
    frame[..HEADER_BYTES].copy_from_slice(&length.to_le_bytes());
    Ok(frame)
}

fn too_long(length: usize, bytes_max: usize) -> Error {
    let (length, limit) = (ByteSize(length as u64), ByteSize(bytes_max as u64));
    Error::new(Kind::Failed, format!("a control message of {length} is longer than the limit of {limit}"))
}

/// Puts frames together from whatever pieces arrive.
///
/// It holds no more than was received and `bytes_max` allows: a length that is announced reserves nothing.
#[derive(Debug)]
pub struct Decoder {
    received: Vec<u8>,
    bytes_max: usize,
}

impl Decoder {
    /// A decoder that refuses messages longer than `bytes_max`.
    pub fn new(bytes_max: usize) -> Decoder {
        Decoder { received: Vec::new(), bytes_max }
    }

    /// Adds bytes as they came from the socket.
    pub fn fill(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
    }

    /// Reads what `source` has, once. `Ok(0)` is the end of the stream.
    pub fn fill_from(&mut self, source: &mut impl Read) -> io::Result<usize> {
        let before = self.received.len();
        self.received.resize(before + READ_BYTES, 0);
        let outcome = source.read(&mut self.received[before..]);
        self.received.truncate(before + *outcome.as_ref().unwrap_or(&0));
        outcome
    }

    /// The next whole message, without its length. An error means that the stream can't be followed any
    /// further: what came is no message of this protocol, or is too long.
    pub fn next_frame(&mut self) -> Result<Option<Vec<u8>>> {
        let Some(header) = self.received.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let length = u32::from_le_bytes(*header) as usize;
        if length > self.bytes_max {
            return Err(if header.iter().all(|byte| matches!(byte, b' '..=b'~' | b'\r' | b'\n' | b'\t')) {
                let text = String::from_utf8_lossy(header).escape_debug().to_string();
                Error::new(Kind::Failed, format!("what came is no control message: it begins with '{text}'"))
            } else {
                too_long(length, self.bytes_max)
            });
        }
        if self.received.len() - HEADER_BYTES < length {
            return Ok(None);
        }
        let rest = self.received.split_off(HEADER_BYTES + length);
        let mut frame = std::mem::replace(&mut self.received, rest);
        frame.drain(..HEADER_BYTES);
        Ok(Some(frame))
    }

    /// Whether a message has begun and is not complete, or is complete and not taken yet.
    pub fn has_begun(&self) -> bool {
        !self.received.is_empty()
    }
}

/// Waits for the next whole message of a non-blocking `stream`, until `deadline` (`None`: for ever). `Ok(None)` is an
/// orderly end of the stream; an end within a message is an error.
pub fn read<S: Read + AsFd>(
    stream: &mut S,
    decoder: &mut Decoder,
    deadline: Option<Instant>,
) -> Result<Option<Vec<u8>>> {
    loop {
        if let Some(frame) = decoder.next_frame()? {
            return Ok(Some(frame));
        }
        match decoder.fill_from(stream) {
            Ok(0) if decoder.has_begun() => {
                return Err(Error::new(Kind::Failed, "the connection ended within a control message"));
            }
            Ok(0) => return Ok(None),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A daemon that ended with our request unread, or that never accepted us.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait_until(stream, PollFlags::IN, deadline, "the answer")?;
            }
            Err(error) => return Err(Error::os("read from the control connection", &error)),
        }
    }
}

/// Waits until `stream` is ready for `flags`, or fails with [`Kind::TimedOut`] at `deadline`.
pub(super) fn wait_until(
    stream: &impl AsFd,
    flags: PollFlags,
    deadline: Option<Instant>,
    what: &str,
) -> Result<()> {
    loop {
        let timeout = deadline.map(|deadline| timespec(deadline.saturating_duration_since(Instant::now())));
        match poll(&mut [PollFd::new(stream, flags)], timeout.as_ref()) {
            Ok(0) => return Err(Error::new(Kind::TimedOut, format!("{what} did not come in time"))),
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::os("wait for the control connection", &errno.into())),
        }
    }
}

/// A duration for `poll` and `epoll_wait`, rounded up to whole milliseconds so that a wait never ends early, and cut to what
/// kernels before 5.11 take.
pub fn timespec(duration: Duration) -> Timespec {
    const SECONDS_MAX: u64 = i32::MAX as u64 / 1000;
    let mut milliseconds = duration.as_millis();
    if !duration.subsec_nanos().is_multiple_of(1_000_000) {
        milliseconds += 1;
    }
    let milliseconds = u64::try_from(milliseconds).unwrap_or(u64::MAX).min(SECONDS_MAX * 1000);
    Timespec { tv_sec: (milliseconds / 1000) as i64, tv_nsec: (milliseconds % 1000 * 1_000_000) as i64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;

    fn frame_of(text: &str) -> Vec<u8> {
        encode(&text, 1 << 20).expect("it fits")
    }

    proptest! {
        #[test]
        fn frames_come_out_whole_however_they_are_cut(
            texts in prop::collection::vec(".{0,40}", 1..6),
            cuts in prop::collection::vec(1usize..30, 1..20),
        ) {
            let stream: Vec<u8> = texts.iter().flat_map(|text| frame_of(text)).collect();
            let mut decoder = Decoder::new(1 << 10);
            let mut found: Vec<String> = Vec::new();
            let mut rest = &stream[..];
            let mut cuts = cuts.iter().cycle();
            while !rest.is_empty() {
                let (piece, left) = rest.split_at(rest.len().min(*cuts.next().expect("cycles")));
                decoder.fill(piece);
                rest = left;
                while let Some(frame) = decoder.next_frame().expect("sound") {
                    found.push(serde_json::from_slice(&frame).expect("JSON"));
                }
            }
            prop_assert_eq!(found, texts);
            prop_assert!(!decoder.has_begun());
        }
    }

    #[test]
    fn the_limit_counts_the_message_without_its_length() {
        // Two quotes and six letters are eight bytes of JSON.
        assert_eq!(encode(&"abcdef", 8).expect("fits").len(), 12);
        let error = encode(&"abcdefg", 8).expect_err("one byte too long");
        assert!(error.message().contains("9 B") && error.message().contains("8 B"), "{error}");
        let mut decoder = Decoder::new(8);
        decoder.fill(&frame_of("abcdef"));
        assert!(decoder.next_frame().expect("allowed").is_some());
        decoder.fill(&frame_of("abcdefg")[..4]);
        assert!(decoder.next_frame().expect_err("refused by its length alone").message().contains("9 B"));
    }

    #[test]
    fn text_of_another_protocol_is_named() {
        let mut decoder = Decoder::new(REQUEST_BYTES_MAX);
        decoder.fill(b"GET / HTTP/1.1\r\n");
        let error = decoder.next_frame().expect_err("no frame");
        assert!(error.message().contains("'GET '"), "{error}");
    }

    #[test]
    fn a_blocking_read_ends_at_its_deadline_and_at_the_end() {
        let (mut ours, mut theirs) = UnixStream::pair().expect("a pair");
        ours.set_nonblocking(true).expect("non-blocking");
        let mut decoder = Decoder::new(100);
        let frame = frame_of("hello");
        theirs.write_all(&frame[..6]).expect("written");
        let now = Some(Instant::now());
        assert_eq!(read(&mut ours, &mut decoder, now).expect_err("half").kind(), Kind::TimedOut);
        theirs.write_all(&frame[6..]).expect("written");
        assert_eq!(read(&mut ours, &mut decoder, now).expect("whole").as_deref(), Some(&b"\"hello\""[..]));
        theirs.write_all(&frame[..6]).expect("written");
        drop(theirs);
        assert_eq!(read(&mut ours, &mut decoder, None).expect_err("cut").kind(), Kind::Failed);
        let (mut ours, theirs) = UnixStream::pair().expect("a pair");
        ours.set_nonblocking(true).expect("non-blocking");
        drop(theirs);
        assert_eq!(read(&mut ours, &mut Decoder::new(100), None).expect("an end"), None);
    }

    #[test]
    fn timeouts_are_rounded_up_and_bounded() {
        let short = timespec(Duration::from_nanos(1));
        assert_eq!((short.tv_sec, short.tv_nsec), (0, 1_000_000));
        let long = timespec(Duration::MAX);
        assert_eq!((long.tv_sec, long.tv_nsec), (2_147_483, 0));
    }
}
