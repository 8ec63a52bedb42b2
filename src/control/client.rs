//! The client's end: connect, ask, and read the answers.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::control::frame::{self, Decoder, REPLY_BYTES_MAX, REQUEST_BYTES_MAX};
use crate::control::message::{Operation, PROTOCOL, Reply, Request};
use crate::error::{Error, Kind, Result, shown};
use crate::failure::Failure;
use crate::sys::peer;
use crate::sys::process::is_stopped;

/// A conversation with one daemon.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    decoder: Decoder,
    socket: PathBuf,
    timeout: Duration,
    /// The daemon's process; 0 where it lives in a PID namespace that this one can't see.
    pid: i32,
    /// What was asked last, for a daemon that has no room at the moment.
    asked: Option<Operation>,
    /// Since when it has had none.
    busy_since: Option<Instant>,
}

/// The pauses between two attempts at a daemon that has no room: short at first, as most lulls are.
const BUSY_PAUSES: std::ops::Range<Duration> = Duration::from_millis(5)..Duration::from_millis(200);

impl Client {
    /// Connects to the daemon that listens at `socket`, an absolute path.
    ///
    /// `timeout` bounds the connecting, each sending, the answer that [`Client::request`] waits for, and how long
    /// a daemon that has no room for a connection is asked again.
    /// [`Kind::NotFound`] where nobody listens, [`Kind::TimedOut`] where the daemon takes no connection
    /// in time. A socket or a daemon of another user (but root) is refused.
    pub fn connect(socket: &Path, timeout: Duration) -> Result<Client> {
        check_owner(socket)?;
        let address = SocketAddrUnix::new(socket).map_err(|_| {
            let length = socket.as_os_str().len();
            Error::new(
                Kind::Usage,
                format!("the socket path {} has {length} bytes, and 107 are possible", shown(socket)),
            )
            .hint("choose a shorter one with --socket or --base-dir")
        })?;
        let connecting = |error: io::Error| cannot_connect(socket, timeout, &error);
        let descriptor = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|errno| connecting(errno.into()))?;
        // A connect to a Unix socket waits only for room in the listener's queue, and this bounds it.
        // Zero would mean for ever.
        let patience = timeout.max(Duration::from_millis(1));
        set_socket_timeout(&descriptor, Timeout::Send, Some(patience))
            .map_err(|errno| connecting(errno.into()))?;
        let deadline = Instant::now().checked_add(timeout);
        while let Err(errno) = rustix::net::connect(&descriptor, &address) {
            let out_of_time = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if errno != rustix::io::Errno::INTR || out_of_time {
                return Err(connecting(errno.into()));
            }
        }
        let stream = UnixStream::from(descriptor);
        stream.set_nonblocking(true).map_err(connecting)?;
        let server = peer::credentials(stream.as_fd()).map_err(connecting)?;
        if !is_trusted(server.uid) {
            return Err(belongs_to_another(socket, "the process that listens at", server.uid));
        }
        Ok(Client {
            stream,
            decoder: Decoder::new(REPLY_BYTES_MAX),
            socket: socket.to_owned(),
            timeout,
            pid: server.pid,
            asked: None,
            busy_since: None,
        })
    }

    /// Sends `operation` and waits for one reply. An error reply comes back as the error it carries.
    pub fn request(&mut self, operation: Operation) -> Result<Reply> {
        self.send(operation)?;
        match self.next(Instant::now().checked_add(self.timeout))? {
            Reply::Error(error) => Err(error.into()),
            reply => Ok(reply),
        }
    }

    /// Sends `operation` and does not wait for an answer.
    pub fn send(&mut self, operation: Operation) -> Result<()> {
        let frame = frame::encode(&Request::new(operation.clone()), REQUEST_BYTES_MAX)?;
        self.asked = Some(operation);
        let deadline = Instant::now().checked_add(self.timeout);
        let mut rest = &frame[..];
        while !rest.is_empty() {
            match (&self.stream).write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    frame::wait_until(&self.stream, PollFlags::OUT, deadline, "room for a request")
                        .map_err(|error| self.at_socket(error))?;
                }
                // A daemon that refuses a connection says why before it closes it.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    return match self.receive(deadline) {
                        Ok(Reply::Error(error)) => Err(error.into()),
                        Ok(Reply::Busy(busy)) => self.ask_again(&busy),
                        _ => Err(self.ended()),
                    };
                }
                Err(error) => return Err(self.at_socket(Error::os("send a request", &error))),
            }
        }
        Ok(())
    }

    /// The next reply, an error reply included. [`Kind::TimedOut`] where none comes until `deadline`
    /// (`None`: wait for ever), after which the conversation can go on. [`Kind::NotFound`] where the daemon
    /// closed the connection.
    pub fn next(&mut self, deadline: Option<Instant>) -> Result<Reply> {
        loop {
            match self.receive(deadline)? {
                Reply::Busy(busy) => self.ask_again(&busy)?,
                reply => {
                    self.busy_since = None;
                    return Ok(reply);
                }
            }
        }
    }

    /// Connects anew and asks the same once more, after a pause that grows. Where the daemon has had no room for
    /// as long as the timeout, its words are the error.
    fn ask_again(&mut self, busy: &Failure) -> Result<()> {
        let busy = || Err(Error::from(busy.clone()).with_kind(Kind::TimedOut));
        let waited = self.busy_since.get_or_insert_with(Instant::now).elapsed();
        let (Some(left), Some(asked)) = (self.timeout.checked_sub(waited), self.asked.clone()) else {
            return busy();
        };
        let pause = (waited / 2).clamp(BUSY_PAUSES.start, BUSY_PAUSES.end);
        if left < pause {
            return busy();
        }
        std::thread::sleep(pause);
        let again = Client::connect(&self.socket, left - pause)?;
        *self = Client { timeout: self.timeout, busy_since: self.busy_since, ..again };
        self.send(asked)
    }

    fn receive(&mut self, deadline: Option<Instant>) -> Result<Reply> {
        let frame = match frame::read(&mut self.stream, &mut self.decoder, deadline) {
            Ok(Some(frame)) => frame,
            Ok(None) => return Err(self.ended()),
            Err(error) => return Err(self.at_socket(error)),
        };
        serde_json::from_slice(&frame).map_err(|error| {
            Error::new(
                Kind::Failed,
                format!(
                    "the daemon at {} gave an answer that this program can't read: {error}",
                    shown(&self.socket)
                ),
            )
            .hint(format!(
                "this is iloader {} with protocol {PROTOCOL}; use the program version that started the cache, \
                 or stop the cache and start it again",
                env!("CARGO_PKG_VERSION")
            ))
        })
    }

    /// Waits until the daemon closes the connection, which it does when everything is removed. Replies
    /// that still come are dropped. [`Kind::TimedOut`] at `deadline`.
    pub fn wait_for_end(&mut self, deadline: Option<Instant>) -> Result<()> {
        loop {
            match frame::read(&mut self.stream, &mut self.decoder, deadline) {
                Ok(Some(_)) => {}
                Ok(None) => return Ok(()),
                Err(error) if error.kind() == Kind::TimedOut => return Err(self.at_socket(error)),
                // A daemon that died is an end, too.
                Err(_) => return Ok(()),
            }
        }
    }

    /// The socket that this is connected to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The connection as a descriptor that stays open, close-on-exec, for holding a lease.
    pub fn into_fd(self) -> OwnedFd {
        self.stream.into()
    }

    fn ended(&self) -> Error {
        Error::new(Kind::NotFound, format!("the daemon at {} ended", shown(&self.socket))).hint(match log_of(
            &self.socket,
        ) {
            Some(log) => format!("its log says why: {}", shown(log)),
            None => "its log says why (start --log-file)".to_owned(),
        })
    }

    fn at_socket(&self, error: Error) -> Error {
        if error.kind() == Kind::TimedOut {
            return self.did_not_answer();
        }
        error.context(format_args!("the daemon at {}", shown(&self.socket)))
    }

    /// Whether the daemon is stopped by a signal, as far as its process can be seen: it answers nothing then.
    pub fn is_stopped(&self) -> bool {
        is_stopped(self.pid)
    }

    /// The error for a daemon that takes connections and does not answer.
    pub fn did_not_answer(&self) -> Error {
        let Client { pid, .. } = self;
        let socket = shown(&self.socket);
        if self.is_stopped() {
            let what =
                format!("the daemon at {socket} does not answer: its process {pid} is stopped by a signal");
            return Error::new(Kind::TimedOut, what).hint(format!("let it go on: kill -CONT {pid}"));
        }
        let process = if *pid == 0 { String::new() } else { format!(" (process {pid})") };
        Error::new(Kind::TimedOut, format!("the daemon at {socket}{process} did not answer in time"))
            .hint("it may be busy, or short of memory: try a longer timeout, or see its log")
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The log of the daemon that listens at `socket`, where both are in their default places.
fn log_of(socket: &Path) -> Option<PathBuf> {
    let base = socket.parent()?.parent()?;
    let log = base.join("logs").join(socket.file_stem()?).with_added_extension("log");
    log.exists().then_some(log)
}

fn is_trusted(uid: u32) -> bool {
    uid == 0 || peer::is_same_user(uid)
}

/// Refuses what is no socket of ours before a single byte is sent to it.
fn check_owner(socket: &Path) -> Result<()> {
    let found = match std::fs::symlink_metadata(socket) {
        Ok(found) => found,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Err(nobody_listens(socket));
        }
        Err(error) => return Err(Error::io("look at the socket", socket, &error)),
    };
    if !is_trusted(found.uid()) {
        return Err(belongs_to_another(socket, "the socket", found.uid()));
    }
    // A link of the user's own is followed by the kernel; what it leads to is judged by its owner.
    if found.file_type().is_symlink() || found.file_type().is_socket() {
        return Ok(());
    }
    Err(Error::new(Kind::Failed, format!("{} is no socket", shown(socket)))
        .hint("give the path that 'start' was given with --socket"))
}

fn belongs_to_another(socket: &Path, what: &str, uid: u32) -> Error {
    Error::new(Kind::Failed, format!("{what} {} belongs to user {uid}, who is not trusted", shown(socket)))
        .hint(match rustix::process::geteuid().is_root() {
            // What root did with it would be up to that user.
            true => format!("give the command as that user: sudo -u '#{uid}' iloader …"),
            false => "only caches of your own user, or of root, can be used".to_owned(),
        })
}

fn nobody_listens(socket: &Path) -> Error {
    Error::new(Kind::NotFound, format!("no cache answers at {}", shown(socket)))
        .hint("'iloader list' shows the caches there are")
}

fn cannot_connect(socket: &Path, timeout: Duration, error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED | libc::ENOENT | libc::ENOTDIR) => nobody_listens(socket),
        Some(libc::EAGAIN | libc::EINTR) => Error::new(
            Kind::TimedOut,
            format!("the daemon at {} took no connection in {:.1} s", shown(socket), timeout.as_secs_f64()),
        )
        .hint("it may be busy or stopped by a signal; try a longer timeout"),
        _ => Error::io("connect to", socket, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    use crate::control::message::PROTOCOL_OLDEST;

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// A daemon that answers each request of one connection with the next of `replies`, raw.
    fn answering(
        replies: Vec<Vec<u8>>,
    ) -> (tempfile::TempDir, PathBuf, std::thread::JoinHandle<Vec<Request>>) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).expect("bound");
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut decoder = Decoder::new(REQUEST_BYTES_MAX);
            let mut requests = Vec::new();
            for reply in replies {
                let frame = frame::read(&mut stream, &mut decoder, None).expect("sound").expect("a request");
                requests.push(serde_json::from_slice(&frame).expect("a request"));
                stream.write_all(&reply).expect("written");
            }
            requests
        });
        (directory, path, thread)
    }

    #[test]
    fn error_replies_are_errors_and_requests_carry_the_protocol() {
        let wire = Failure { kind: "in-use".into(), message: "leased".into(), hint: Some("wait".into()) };
        let reply = frame::encode(&Reply::Error(wire), REPLY_BYTES_MAX).expect("encoded");
        let (_directory, path, thread) = answering(vec![reply]);
        let mut client = Client::connect(&path, TIMEOUT).expect("connected");
        let error = client.request(Operation::Lease {}).expect_err("an error reply");
        assert_eq!((error.kind(), error.message(), error.hint_text()), (Kind::InUse, "leased", Some("wait")));
        let requests = thread.join().expect("served");
        assert_eq!((requests[0].protocol, requests[0].oldest), (PROTOCOL, PROTOCOL_OLDEST));
        let ended = client.next(None).expect_err("the daemon is gone");
        assert_eq!(ended.kind(), Kind::NotFound);
    }

    #[test]
    fn a_daemon_without_room_is_asked_again_until_the_time_is_over() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).expect("bound");
        let busy = Failure { kind: "no-room".into(), message: "no room".into(), hint: None };
        let busy = frame::encode(&Reply::Busy(busy), REPLY_BYTES_MAX).expect("encoded");
        let last = frame::encode(&Reply::Stopping { notes: Vec::new(), holders: None }, REPLY_BYTES_MAX)
            .expect("encoded");
        let server = std::thread::spawn(move || {
            // Twice refused before anything is read, as a daemon does it, then served, then refused for ever.
            for answered in 0.. {
                let (mut stream, _) = listener.accept().expect("a connection");
                if answered == 2 {
                    let request = frame::read(&mut stream, &mut Decoder::new(REQUEST_BYTES_MAX), None);
                    let request = request.expect("sound").expect("a request");
                    assert!(String::from_utf8_lossy(&request).contains("manifest"));
                    stream.write_all(&last).expect("written");
                } else if stream.write_all(&busy).is_err() || answered > 3 {
                    return answered;
                }
            }
            0
        });
        let mut client = Client::connect(&path, TIMEOUT).expect("connected");
        let reply = client.request(Operation::Manifest {}).expect("served in the end");
        assert!(matches!(reply, Reply::Stopping { .. }), "{reply:?}");
        let mut client = Client::connect(&path, Duration::from_millis(300)).expect("connected");
        let error = client.request(Operation::Status {}).expect_err("never served");
        assert!(error.message() == "no room" || error.kind() == Kind::NotFound, "{error}");
        assert!(server.join().expect("served") > 3);
    }

    #[test]
    fn an_unknown_answer_names_the_versions() {
        let reply = frame::encode(&serde_json::json!({"from-the-future": {}}), 1000).expect("encoded");
        let (_directory, path, thread) = answering(vec![reply]);
        let mut client = Client::connect(&path, TIMEOUT).expect("connected");
        let error = client.request(Operation::Status {}).expect_err("unknown");
        assert!(error.message().contains("from-the-future"), "{error}");
        assert!(error.hint_text().is_some_and(|hint| hint.contains("protocol 1")));
        thread.join().expect("served");
    }

    #[test]
    fn nobody_listening_is_not_found() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let missing = Client::connect(&path, TIMEOUT).expect_err("nothing there");
        assert_eq!(missing.kind(), Kind::NotFound);
        drop(UnixListener::bind(&path).expect("bound"));
        let left_over = Client::connect(&path, TIMEOUT).expect_err("nobody behind it");
        assert_eq!(left_over.kind(), Kind::NotFound);
        let plain = directory.path().join("file");
        std::fs::write(&plain, "x").expect("written");
        let no_socket = Client::connect(&plain, TIMEOUT).expect_err("no socket");
        assert_eq!(no_socket.kind(), Kind::Failed);
        let long = directory.path().join("x".repeat(120));
        std::fs::write(&long, "x").expect("written");
        std::fs::remove_file(&long).expect("removed");
        std::os::unix::fs::symlink("s", &long).expect("linked");
        assert_eq!(Client::connect(&long, TIMEOUT).expect_err("too long").kind(), Kind::Usage);
    }

    #[test]
    fn a_daemon_that_does_not_accept_times_out() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .expect("a socket");
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).expect("short")).expect("bound");
        rustix::net::listen(&listener, 0).expect("listening");
        let short = Duration::from_millis(20);
        // The first one fills the queue; its request is never read.
        let mut first = Client::connect(&path, short).expect("queued");
        assert_eq!(first.request(Operation::Status {}).expect_err("no answer").kind(), Kind::TimedOut);
        let _second = Client::connect(&path, short);
        let third = Client::connect(&path, short).expect_err("the queue is full");
        assert_eq!(third.kind(), Kind::TimedOut);
    }

    #[test]
    fn a_foreign_socket_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return; // Only root can make a file that belongs to somebody else.
        }
        assert!(is_trusted(0));
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let _listener = UnixListener::bind(&path).expect("bound");
        std::os::unix::fs::chown(&path, Some(12345), None).expect("root may");
        let error = Client::connect(&path, TIMEOUT).expect_err("foreign");
        assert!(error.message().contains("user 12345"), "{error}");
    }
}
