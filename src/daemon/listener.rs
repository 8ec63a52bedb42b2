//! The daemon's only way to wait: connections, signals, processes, the load and time, one event at a time.
//!
//! Everything that a client could hold on to has a limit: how many connections, how long a request may
//! take to arrive, how long an answer may take to be read, and how much of it is kept. Where there is
//! nothing to do and no time to watch, [`Listener::next`] sleeps in `epoll_wait` for ever.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};

use crate::control::frame::{self, REPLY_BYTES_MAX};
use crate::control::message::{Operation, Progress, Reply};
use crate::daemon::connection::{Connection, REQUEST_TIME_MAX, Received, Role};
use crate::daemon::leases::{ConnectionId, Process};
use crate::error::{Error, Kind, Result, shown};
use crate::failure::Failure;
use crate::registry;
use crate::sys::signals::SignalDescriptor;
use crate::sys::{crash, peer};

/// Connections at one time, those that carry leases not counted.
pub const CONNECTIONS_MAX: usize = 256;

/// Bytes of answers that are kept for clients which do not keep up, over all connections: four of the longest,
/// so that nobody can fill the memory with manifests that he does not read.
pub const UNREAD_BYTES_MAX: usize = 4 * REPLY_BYTES_MAX;

/// Connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 128;

/// Events taken from the kernel at once.
const EVENTS_AT_ONCE: usize = 64;

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A client asks for something and must be answered, now or later.
    Request {
        /// Who asks.
        from: ConnectionId,
        /// What it wants.
        operation: Operation,
    },
    /// A connection is gone, whichever end closed it.
    Closed {
        /// Which.
        from: ConnectionId,
    },
    /// A process given to [`Listener::watch_process`] ended.
    ProcessEnded {
        /// The connection whose lease it held.
        lease: ConnectionId,
    },
    /// A process given to [`Listener::watch_reader`] ended.
    ReaderEnded,
    /// A descriptor given to [`Listener::watch_look`] is readable.
    Look,
    /// A signal arrived.
    Signal(i32),
    /// The descriptor given to [`Listener::watch_load`] is readable.
    Load,
    /// The descriptor given to [`Listener::watch_removal`] is readable.
    Removal,
    /// The deadline given to [`Listener::next`] passed.
    Deadline,
}

/// What epoll watches, as it is written into its user data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Watched {
    Socket,
    Signals,
    Load,
    Removal,
    Connection(ConnectionId),
    Process(ConnectionId),
    Look,
    Reader,
}

impl Watched {
    /// The lowest bits say what, the others which.
    fn data(self) -> epoll::EventData {
        epoll::EventData::new_u64(match self {
            Watched::Socket => 0,
            Watched::Signals => 1,
            Watched::Load => 2,
            Watched::Connection(id) => id << 3 | 3,
            Watched::Process(id) => id << 3 | 4,
            Watched::Look => 5,
            Watched::Reader => 6,
            Watched::Removal => 7,
        })
    }

    fn from_data(data: u64) -> Watched {
        match data & 7 {
            0 => Watched::Socket,
            1 => Watched::Signals,
            2 => Watched::Load,
            3 => Watched::Connection(data >> 3),
            4 => Watched::Process(data >> 3),
            5 => Watched::Look,
            6 => Watched::Reader,
            7 => Watched::Removal,
            _ => unreachable!("only data() makes these"),
        }
    }
}

/// The control socket and everything else that can wake the daemon.
#[derive(Debug)]
pub struct Listener {
    epoll: OwnedFd,
    /// `None` once nobody can connect any more.
    socket: Option<OwnedFd>,
    path: PathBuf,
    /// Device and inode of the socket's file. No other file gets them while the socket is open.
    file: (u64, u64),
    signals: SignalDescriptor,
    connections: BTreeMap<ConnectionId, Connection>,
    next_id: ConnectionId,
    /// Events that were found and not handed out yet.
    found: VecDeque<Event>,
    /// Connections whose buffer may hold another request.
    buffered: VecDeque<ConnectionId>,
    /// Given up for a moment where no descriptor is left, to accept a connection and tell it so. Without
    /// it the connection would stay in the queue and wake the daemon without end.
    spare: Option<OwnedFd>,
}

impl Listener {
    /// Listens at `path`, which only this user can connect to. A socket there that nobody listens on is
    /// replaced; the caller holds the cache's lock, so it is a dead daemon's.
    ///
    /// `signals` become [`Event::Signal`].
    pub fn bind(path: &Path, signals: SignalDescriptor) -> Result<Listener> {
        let (socket, file) = bind_private(path)?;
        let failed = |errno: Errno| Error::os("set up the event loop", &errno.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        epoll::add(&epoll, &socket, Watched::Socket.data(), epoll::EventFlags::IN).map_err(failed)?;
        epoll::add(&epoll, &signals, Watched::Signals.data(), epoll::EventFlags::IN).map_err(failed)?;
        Ok(Listener {
            epoll,
            socket: Some(socket),
            path: path.to_owned(),
            file,
            signals,
            connections: BTreeMap::new(),
            next_id: 0,
            found: VecDeque::new(),
            buffered: VecDeque::new(),
            spare: spare_descriptor(),
        })
    }

    /// Makes [`Event::Load`] of a readable `descriptor`, which stays open as long as this.
    pub fn watch_load(&self, descriptor: &impl AsFd) -> Result<()> {
        epoll::add(&self.epoll, descriptor, Watched::Load.data(), epoll::EventFlags::IN)
            .map_err(|errno| Error::os("watch the load", &errno.into()))
    }

    /// Makes [`Event::Look`] of a readable `descriptor`, which stays open as long as this.
    pub fn watch_look(&self, descriptor: &impl AsFd) -> Result<()> {
        epoll::add(&self.epoll, descriptor, Watched::Look.data(), epoll::EventFlags::IN)
            .map_err(|errno| Error::os("watch for what a look finds", &errno.into()))
    }

    /// Makes [`Event::ReaderEnded`] of the end of the process behind a pidfd, again and again until that is
    /// closed.
    pub fn watch_reader(&self, process: &OwnedFd) -> Result<()> {
        epoll::add(&self.epoll, process, Watched::Reader.data(), epoll::EventFlags::IN)
            .map_err(|errno| Error::os("watch a reader", &errno.into()))
    }

    /// Makes [`Event::Removal`] of a readable `descriptor`, which stays open as long as this.
    pub fn watch_removal(&self, descriptor: impl AsFd) -> Result<()> {
        epoll::add(&self.epoll, descriptor, Watched::Removal.data(), epoll::EventFlags::IN)
            .map_err(|errno| Error::os("watch for the removal of BASE", &errno.into()))
    }

    /// Makes one [`Event::ProcessEnded`] of the end of `process`, until its descriptor is closed.
    pub fn watch_process(&self, lease: ConnectionId, process: &Process) -> Result<()> {
        let Some(descriptor) = process.descriptor() else { return Ok(()) };
        epoll::add(&self.epoll, descriptor, Watched::Process(lease).data(), epoll::EventFlags::IN)
            .map_err(|errno| Error::os("watch a process", &errno.into()))
    }

    /// The process at the other end of a connection that is still open.
    pub fn process(&self, connection: ConnectionId) -> Option<Process> {
        self.connections.get(&connection).map(Connection::process)
    }

    /// The number of that process, for the log.
    pub fn pid(&self, connection: ConnectionId) -> i32 {
        self.connections.get(&connection).map_or(0, Connection::pid)
    }

    /// The connection waits for something that may take any time.
    pub fn set_waiting(&mut self, connection: ConnectionId) {
        self.set_role(connection, Role::Waiting);
    }

    /// The connection carries a lease: it may rest for ever and takes no one else's place.
    pub fn set_leasing(&mut self, connection: ConnectionId) {
        self.set_role(connection, Role::Leasing);
    }

    fn set_role(&mut self, connection: ConnectionId, role: Role) {
        // Once leasing, always leasing: a lease ends by closing the connection.
        if let Some(connection) = self.connections.get_mut(&connection)
            && connection.role != Role::Leasing
        {
            connection.role = role;
        }
    }

    /// Sends the last answer to what `to` asked. A connection that is gone is not told anything.
    pub fn reply(&mut self, to: ConnectionId, reply: &Reply) {
        self.set_role(to, Role::Asking);
        let unread: usize = self.connections.values().map(Connection::unread_bytes).sum();
        let frame = frame::encode(reply, REPLY_BYTES_MAX).map(|frame| {
            let fits = unread == 0 || unread + frame.len() <= UNREAD_BYTES_MAX;
            if fits { frame } else { too_busy("too many answers wait to be read") }
        });
        let frame = frame.unwrap_or_else(|error| error_frame(&error));
        self.send_to(to, &frame);
    }

    /// Sends how far the load is to a connection that goes on waiting. One that has not read the last answer yet
    /// is left out: it gets a later one.
    pub fn reply_progress(&mut self, to: ConnectionId, progress: Progress) {
        let keeps_up = self.connections.get(&to).is_some_and(|connection| connection.unread_bytes() == 0);
        if keeps_up && let Ok(frame) = frame::encode(&Reply::Progress(progress), REPLY_BYTES_MAX) {
            self.send_to(to, &frame);
        }
    }

    fn send_to(&mut self, to: ConnectionId, frame: &[u8]) {
        let Some(connection) = self.connections.get_mut(&to) else { return };
        if connection.answer(frame).is_err() {
            return self.close(to);
        }
        if connection.may_have_request() {
            self.buffered.push_back(to);
        }
        self.settle(to);
    }

    /// The next event, waited for until `deadline` (`None`: for ever).
    pub fn next(&mut self, deadline: Option<Instant>) -> Result<Event> {
        loop {
            if let Some(event) = self.found.pop_front() {
                return Ok(event);
            }
            if let Some(id) = self.buffered.pop_front() {
                self.take_buffered_request(id);
                continue;
            }
            let now = Instant::now();
            self.close_late_connections(now);
            if !self.found.is_empty() {
                continue;
            }
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(Event::Deadline);
            }
            let first = self.connections.values().filter_map(Connection::deadline).chain(deadline).min();
            self.wait(first.map(|first| first - now))?;
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<()> {
        let mut events = Vec::with_capacity(EVENTS_AT_ONCE);
        let timeout = timeout.map(frame::timespec);
        match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::os("wait for events", &errno.into())),
        }
        for event in events {
            match Watched::from_data(event.data.u64()) {
                Watched::Socket => self.accept_all(),
                Watched::Signals => self.take_signals()?,
                Watched::Load => self.found.push_back(Event::Load),
                Watched::Removal => self.found.push_back(Event::Removal),
                Watched::Connection(id) => self.handle_ready(id, event.flags),
                Watched::Process(id) => self.found.push_back(Event::ProcessEnded { lease: id }),
                Watched::Look => self.found.push_back(Event::Look),
                Watched::Reader => self.found.push_back(Event::ReaderEnded),
            }
        }
        Ok(())
    }

    fn take_signals(&mut self) -> Result<()> {
        while let Some(signal) =
            self.signals.read().map_err(|error| Error::os("read which signal came", &error))?
        {
            self.found.push_back(Event::Signal(signal));
        }
        Ok(())
    }

    /// Accepts what is queued, but no more than a round's worth: others want to be served, too.
    fn accept_all(&mut self) {
        for _ in 0..EVENTS_AT_ONCE {
            let Some(socket) = &self.socket else { return };
            match accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(descriptor) => self.admit(descriptor),
                Err(Errno::MFILE | Errno::NFILE) => return self.refuse_without_descriptors(),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => return,
            }
        }
    }

    fn refuse_without_descriptors(&mut self) {
        drop(self.spare.take());
        if let Some(socket) = &self.socket
            && let Ok(descriptor) = accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
        {
            refuse(&descriptor, &too_busy("it has no file descriptor left (see ulimit -n)"));
        }
        self.spare = spare_descriptor();
    }

    fn admit(&mut self, descriptor: OwnedFd) {
        let Ok(peer) = peer::credentials(descriptor.as_fd()) else { return };
        if peer.uid != 0 && !peer::is_same_user(peer.uid) {
            let what = format!("this cache belongs to another user than {}", peer.uid);
            let error = Error::new(Kind::Failed, what).hint("start one of your own");
            return refuse(&descriptor, &error_frame(&error));
        }
        let open = self.connections.values().filter(|connection| connection.role != Role::Leasing).count();
        if open >= CONNECTIONS_MAX {
            return refuse(&descriptor, &too_busy(&format!("it has {open} connections already")));
        }
        let mut connection = Connection::new(descriptor, peer);
        let id = self.next_id;
        connection.interest = connection.wanted_interest();
        if epoll::add(&self.epoll, &connection, Watched::Connection(id).data(), connection.interest).is_ok() {
            self.next_id += 1;
            self.connections.insert(id, connection);
        }
    }

    fn handle_ready(&mut self, id: ConnectionId, flags: epoll::EventFlags) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.unread_bytes() > 0 {
            let is_broken = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
            if connection.send().is_err() || (is_broken && connection.unread_bytes() > 0) {
                return self.close(id);
            }
            if connection.may_have_request() {
                self.buffered.push_back(id);
            }
        } else {
            let received = connection.receive();
            self.handle_received(id, received);
        }
        self.settle(id);
    }

    fn take_buffered_request(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(&id)
            && connection.may_have_request()
        {
            let received = connection.take_request();
            self.handle_received(id, received);
            self.settle(id);
        }
    }

    fn handle_received(&mut self, id: ConnectionId, received: Result<Received>) {
        match received {
            Ok(Received::Operation(operation)) => {
                self.found.push_back(Event::Request { from: id, operation });
                // More may have come with it; that is looked at when this one is answered, or waits.
                if self.connections.get(&id).is_some_and(Connection::may_have_request) {
                    self.buffered.push_back(id);
                }
            }
            Ok(Received::Nothing) => {}
            Ok(Received::End) => self.close(id),
            Err(error) => self.answer_and_close(id, &error),
        }
    }

    fn answer_and_close(&mut self, id: ConnectionId, error: &Error) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.close_when_sent();
        }
        self.send_to(id, &error_frame(error));
    }

    /// Closes a connection that is done, and has epoll watch any other one for what it waits for.
    fn settle(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let wanted = connection.wanted_interest();
        if connection.is_done() {
            return self.close(id);
        }
        if wanted != connection.interest {
            connection.interest = wanted;
            if epoll::modify(&self.epoll, &*connection, Watched::Connection(id).data(), wanted).is_err() {
                self.close(id);
            }
        }
    }

    fn close_late_connections(&mut self, now: Instant) {
        let is_late = |connection: &Connection| connection.deadline().is_some_and(|time| now >= time);
        let late: Vec<ConnectionId> = self
            .connections
            .iter()
            .filter(|(_, connection)| is_late(connection))
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            if self.connections.get(&id).is_some_and(Connection::is_within_request) {
                let seconds = REQUEST_TIME_MAX.as_secs();
                let error =
                    Error::new(Kind::TimedOut, format!("the request did not come whole in {seconds} s"));
                self.answer_and_close(id, &error);
            }
            self.close(id);
        }
    }

    /// Closes a connection, which its last descriptor does, and says so once.
    fn close(&mut self, id: ConnectionId) {
        if self.connections.remove(&id).is_some() {
            self.found.push_back(Event::Closed { from: id });
        }
    }

    /// Removes the socket's file where it is still ours, and closes the socket: nobody can connect any more. The
    /// connections stay.
    pub fn stop_listening(&mut self) -> Result<()> {
        let removed = match std::fs::symlink_metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) == self.file => std::fs::remove_file(&self.path),
            _ => Ok(()),
        };
        self.socket = None;
        removed.map_err(|error| Error::io("remove the socket", &self.path, &error))
    }

    /// Sends what is left of the answers, until `deadline`, and closes everything.
    pub fn finish(mut self, deadline: Instant) {
        self.connections.retain(|_, connection| connection.unread_bytes() > 0);
        while !self.connections.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut waiting: Vec<PollFd<'_>> =
                self.connections.values().map(|connection| PollFd::new(connection, PollFlags::OUT)).collect();
            match poll(&mut waiting, Some(&frame::timespec(left))) {
                Ok(0) => return,
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
            self.connections
                .retain(|_, connection| connection.send().is_ok() && connection.unread_bytes() > 0);
        }
    }
}

/// The listening socket, and device and inode of its file. The kernel makes the file with the mode that the socket
/// has, less the umask, so that it is 0600 from its first moment on: to set it by its path later would follow a
/// link that somebody put there in between.
fn bind_private(path: &Path) -> Result<(OwnedFd, (u64, u64))> {
    let failed = |error: &io::Error| Error::io("listen at", path, error);
    let address = SocketAddrUnix::new(path).map_err(|errno| failed(&errno.into()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|errno| failed(&errno.into()))?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(|errno| failed(&errno.into()))?;
    if let Err(errno) = bind(&socket, &address) {
        if errno != Errno::ADDRINUSE {
            return Err(failed(&errno.into()));
        }
        registry::remove_socket(path).map_err(|error| {
            error.hint("choose another path with --socket; it may be a cache of another name")
        })?;
        bind(&socket, &address).map_err(|errno| failed(&errno.into()))?;
    }
    crash::point("socket-made");
    let found = std::fs::symlink_metadata(path).map_err(|error| failed(&error))?;
    if !found.file_type().is_socket() || found.uid() != rustix::process::geteuid().as_raw() {
        let message = format!("cannot listen at {}: somebody else took the path's place", shown(path));
        return Err(Error::new(Kind::Failed, message).hint("choose another path with --socket"));
    }
    listen(&socket, BACKLOG).map_err(|errno| failed(&errno.into()))?;
    Ok((socket, (found.dev(), found.ino())))
}

fn spare_descriptor() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").ok().map(OwnedFd::from)
}

/// The answer for which the client asks again in a moment.
fn too_busy(why: &str) -> Vec<u8> {
    let error = Error::new(Kind::NoRoom, format!("the daemon can't take more now: {why}"))
        .hint("try again in a moment, or with a longer timeout");
    frame::encode(&Reply::Busy(Failure::from(&error)), REPLY_BYTES_MAX).unwrap_or_default()
}

fn error_frame(error: &Error) -> Vec<u8> {
    // An error's texts are short, so this fails never; an empty frame would only end the conversation.
    frame::encode(&Reply::Error(Failure::from(error)), REPLY_BYTES_MAX).unwrap_or_default()
}

/// Tells a connection that was not admitted why, as far as its buffer takes it, which is far.
fn refuse(descriptor: &OwnedFd, frame: &[u8]) {
    let _ = rustix::io::write(descriptor, frame);
}
