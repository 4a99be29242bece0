//! Connects the processes of a run before their collective library does, and detects the failure of
//! a process.
//!
//! Each rank has a TCP connection to rank 0. The connection transmits the id with which the
//! collective library connects the ranks, and afterwards only heartbeats and the reason of a
//! failure: data and decisions of the ranks go through the library. If a connection closes before
//! its rank has said goodbye, or is silent for long, as after a power loss, the rank has died. A
//! living rank may be stuck: with each heartbeat a rank sends the number of collective operations
//! that it has begun (steps, collectives between hosts). If this number does not change on any rank
//! for longer than the limit, the rank with the smallest number keeps the others waiting.

mod wire;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use self::wire::{Hello, kind, message, read_message};
use super::Launched;
use crate::TrainError;

/// Polling interval.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Time limit for a client to introduce itself, for sending a message, and for the answer to a
/// failure.
const PROMPT: Duration = Duration::from_secs(5);

/// Time limits, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Interval between two heartbeats.
    pub(super) beat: Duration,
    /// A connection without a heartbeat for this long is dead.
    pub(super) silence: Duration,
    /// Ranks without progress on any rank for this long are stuck.
    pub(super) stuck: Duration,
}

impl Limits {
    /// Limits for ranks that wait for each other for at most `exchange`.
    pub(super) fn of(exchange: Duration) -> Limits {
        let silence = Duration::from_secs(120).min(exchange / 3);
        Limits { beat: silence / 24, silence, stuck: exchange / 10 * 9 }
    }
}

/// The first failed rank, and the reason.
pub(super) type Failure = (u32, String);
/// Called with the first failure.
type OnFailure = Box<dyn Fn(u32, &str) + Send>;

/// One rank's connections.
pub(super) struct Heartbeat {
    shared: Arc<Shared>,
}

struct Shared {
    own: Hello,
    limits: Limits,
    /// Versions of this program and its library, equal on all ranks.
    versions: String,
    /// Number of collective operations that this rank has begun.
    begun: Arc<AtomicU64>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Connections, by the rank at the other end.
    others: Vec<(u32, TcpStream)>,
    id: Option<Vec<u8>>,
    failure: Option<Failure>,
    /// Whether rank 0 knows the failure.
    is_told: bool,
    on_failure: Option<OnFailure>,
    /// Number of begun operations of each rank; on rank 0, which receives all.
    begun: BTreeMap<u32, u64>,
    /// Time of the last change of `begun`.
    moved: Option<Instant>,
    /// Ranks that have sent [`kind::DONE`].
    done: Vec<u32>,
    /// Whether the heartbeat is closed: its threads then end and ignore further messages.
    is_closed: bool,
}

impl Heartbeat {
    /// Listens at rank 0's address, or connects to it, with retries for at most `limit`.
    ///
    /// # Errors
    /// The port is in use, or rank 0 does not listen within the limit.
    pub(super) fn open(
        launched: &Launched,
        limit: Duration,
        limits: Limits,
        versions: &str,
    ) -> Result<Heartbeat, TrainError> {
        let Launched { rank, world_size, attempt, .. } = *launched;
        let shared = Arc::new(Shared {
            own: Hello { rank, world_size, attempt },
            limits,
            versions: versions.to_string(),
            begun: Arc::default(),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
        });
        let heartbeat = Heartbeat { shared };
        match launched.is_first() {
            true => heartbeat.listen(launched)?,
            false => heartbeat.go(launched, limit)?,
        }
        let shared = Arc::clone(&heartbeat.shared);
        spawn("heartbeat-send", move || shared.beat())?;
        Ok(heartbeat)
    }

    fn listen(&self, launched: &Launched) -> Result<(), TrainError> {
        let failed = |error: io::Error| TrainError::Setting {
            setting: "MASTER_PORT",
            expected: format!("port {} of this machine, the next one, to be free", launched.port),
            got: error.to_string(),
            hint: Some("give all ranks another `MASTER_PORT`".to_string()),
        };
        let listener = TcpListener::bind(("0.0.0.0", launched.port)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let shared = Arc::clone(&self.shared);
        spawn("heartbeat-listen", move || shared.accept(&listener))
    }

    fn go(&self, launched: &Launched, limit: Duration) -> Result<(), TrainError> {
        let end = Instant::now() + limit;
        let address = (launched.address.as_str(), launched.port);
        loop {
            let error = match connect(address).and_then(|mut stream| {
                stream.write_all(&self.shared.own.to_bytes())?;
                let versions = self.shared.versions.as_bytes();
                stream.write_all(&message((kind::VERSIONS, self.shared.own.rank), versions))?;
                stream.set_read_timeout(Some(self.shared.limits.silence))?;
                Ok(stream)
            }) {
                Ok(stream) => return self.shared.add(0, stream),
                Err(error) => error,
            };
            if Instant::now() > end {
                return Err(TrainError::Setting {
                    setting: "MASTER_ADDR",
                    expected: format!("rank 0 at `{}`, port {}", launched.address, launched.port),
                    got: format!("{error}, for {limit:?}"),
                    hint: Some(
                        "it listens once its process runs; a firewall may keep the port from \
                         other machines"
                            .to_string(),
                    ),
                });
            }
            thread::sleep(4 * LOOK_EVERY);
        }
    }

    /// Waits until all ranks have connected and sends them the library's id.
    ///
    /// # Errors
    /// A rank does not connect in time, or has failed.
    pub(super) fn publish(&self, id: &[u8], limit: Duration) -> Result<(), TrainError> {
        let world_size = self.shared.own.world_size;
        let are_there = self
            .shared
            .wait(limit, |state| (state.others.len() + 1 == world_size as usize).then_some(()))?;
        are_there.ok_or_else(|| {
            let state = self.shared.lock();
            let is_there = |rank: &u32| state.others.iter().any(|(other, _)| other == rank);
            let missing: Vec<String> = (1..world_size)
                .filter(|rank| !is_there(rank))
                .map(|rank| format!("rank {rank}"))
                .collect();
            TrainError::Setting {
                setting: "WORLD_SIZE",
                expected: format!("{world_size} ranks"),
                got: format!("nothing of {} for {limit:?}", missing.join(", ")),
                hint: Some("start all ranks with the same `MASTER_ADDR` and port".to_string()),
            }
        })?;
        self.shared.send_to_all((kind::ID, 0), id);
        Ok(())
    }

    /// Waits for the library's id, which rank 0 sends once it is ready.
    ///
    /// # Errors
    /// A rank has failed, or rank 0 is not ready in time.
    pub(super) fn id(&self, limit: Duration) -> Result<Vec<u8>, TrainError> {
        let id = self.shared.wait(limit, |state| state.id.clone())?;
        id.ok_or_else(|| TrainError::Setting {
            setting: "rank 0",
            expected: "to be ready with data and folder".to_string(),
            got: format!("nothing for {limit:?}"),
            hint: None,
        })
    }

    /// Counter of the collective operations that this rank has begun; no rank is stuck before its
    /// first.
    pub(super) fn begun(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.shared.begun)
    }

    /// The first failed rank, and the reason.
    pub(super) fn failure(&self) -> Option<Failure> {
        self.shared.lock().failure.clone()
    }

    /// Calls `tell` with the first failure, now or later.
    pub(super) fn on_failure(&self, tell: impl Fn(u32, &str) + Send + 'static) {
        let mut state = self.shared.lock();
        if let Some((rank, reason)) = &state.failure {
            tell(*rank, reason);
        }
        state.on_failure = Some(Box::new(tell));
    }

    /// Reports this rank's failure to all ranks, unless a rank has failed before, and waits briefly
    /// until rank 0 knows.
    pub(super) fn fail(&self, reason: &str) {
        let shared = &self.shared;
        shared.failed(shared.own.rank, reason);
        // Rank 0 forwards a failure to all ranks, including the sender.
        let end = Instant::now() + PROMPT;
        while !shared.lock().is_told && Instant::now() < end {
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Whether rank 0 knows of a failure.
    pub(super) fn is_told(&self) -> bool {
        self.shared.lock().is_told
    }

    /// Says goodbye: later changes of this rank's connections are no failure.
    pub(super) fn finish(&self) {
        self.shared.send_to_all((kind::DONE, self.shared.own.rank), &[]);
        self.shared.lock().is_closed = true;
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_closed = true;
        for (_, stream) in state.others.drain(..) {
            // This wakes the reading threads; a connection that is already closed has none.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` returns a value; none after `limit`.
    fn wait<T>(
        &self,
        limit: Duration,
        ready: impl Fn(&State) -> Option<T>,
    ) -> Result<Option<T>, TrainError> {
        let end = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            if let Some((rank, reason)) = state.failure.clone() {
                return Err(TrainError::of_rank(rank, self.own.world_size, reason));
            }
            if let Some(ready) = ready(&state) {
                return Ok(Some(ready));
            }
            if Instant::now() > end {
                return Ok(None);
            }
            let waited = self.changed.wait_timeout(state, LOOK_EVERY);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Accepts connections of ranks until all are connected.
    fn accept(self: Arc<Shared>, listener: &TcpListener) {
        loop {
            {
                let state = self.lock();
                if state.is_closed || state.others.len() + 1 == self.own.world_size as usize {
                    return;
                }
            }
            match listener.accept() {
                Ok((stream, _)) => {
                    // A separate thread, so that a slow client does not delay others.
                    let shared = Arc::clone(&self);
                    let _ = spawn("heartbeat-hello", move || shared.admit(stream));
                }
                Err(_) => thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// Checks a new connection.
    fn admit(self: Arc<Shared>, mut stream: TcpStream) {
        let is_ready = stream.set_nonblocking(false).is_ok()
            && stream.set_read_timeout(Some(PROMPT)).is_ok()
            && stream.set_write_timeout(Some(PROMPT)).is_ok();
        let hello = if is_ready { Hello::read(&mut stream) } else { None };
        let Some(Hello { rank, world_size, attempt }) = hello else { return };
        if attempt != self.own.attempt {
            return;
        }
        let is_known = self.lock().others.iter().any(|(other, _)| *other == rank);
        let wrong = if world_size != self.own.world_size {
            let expected = self.own.world_size;
            Some(format!("it was told of {world_size} ranks, rank 0 of {expected}"))
        } else if rank == 0 || rank >= world_size || is_known {
            Some(format!("two processes were told to be rank {rank} of {world_size}"))
        } else {
            None
        };
        if stream.set_read_timeout(Some(self.limits.silence)).is_ok() {
            let _ = Arc::clone(&self).add(rank, stream);
        }
        if let Some(wrong) = wrong {
            self.failed(rank, &wrong);
        }
    }

    /// Keeps a connection, and reads from it.
    fn add(self: &Arc<Shared>, rank: u32, stream: TcpStream) -> Result<(), TrainError> {
        let mut reader = stream.try_clone().map_err(TrainError::io("a connection"))?;
        let known = {
            let mut state = self.lock();
            state.others.push((rank, stream));
            state.failure.clone()
        };
        self.changed.notify_all();
        if let Some((of, reason)) = known {
            self.send_to_all((kind::FAILED, of), reason.as_bytes());
        }
        let shared = Arc::clone(self);
        spawn("heartbeat-read", move || shared.read(rank, &mut reader))
    }

    /// Processes the messages of rank `from` until the connection ends.
    fn read(&self, from: u32, stream: &mut TcpStream) {
        loop {
            let message = read_message(stream);
            let mut state = self.lock();
            if state.is_closed {
                return;
            }
            match message {
                Ok((kind::BEAT, rank, begun)) => {
                    let begun = begun.try_into().map_or(0, u64::from_le_bytes);
                    state.heard(rank, begun);
                }
                Ok((kind::ID, _, bytes)) => {
                    state.id = Some(bytes);
                    self.changed.notify_all();
                }
                Ok((kind::DONE, ..)) => state.done.push(from),
                Ok((kind::VERSIONS, _, theirs)) => {
                    drop(state);
                    let theirs = String::from_utf8_lossy(&theirs);
                    if theirs != self.versions {
                        let ours = &self.versions;
                        let reason = format!(
                            "it has {theirs}, rank {} has {ours}\n\
                             hint: start every rank with the same program and libraries",
                            self.own.rank
                        );
                        self.failed(from, &reason);
                    }
                }
                Ok((kind::FAILED, rank, reason)) => {
                    // Rank 0 sends its messages to all ranks.
                    state.is_told |= from == 0;
                    drop(state);
                    self.failed(rank, &String::from_utf8_lossy(&reason));
                }
                Ok((kind, ..)) => {
                    drop(state);
                    self.failed(from, &format!("sent a message of the unknown kind {kind}"));
                    return;
                }
                Err(error) => {
                    let has_left = state.done.contains(&from);
                    drop(state);
                    if !has_left {
                        self.failed(from, &lost(&error, self.limits.silence));
                    }
                    return;
                }
            }
        }
    }

    /// Stores the first failure and sends it: rank 0 to all other ranks, other ranks to rank 0.
    fn failed(&self, rank: u32, reason: &str) {
        {
            let mut state = self.lock();
            if state.failure.is_some() {
                return;
            }
            state.failure = Some((rank, reason.to_string()));
            state.is_told |= self.own.rank == 0;
            if let Some(tell) = &state.on_failure {
                tell(rank, reason);
            }
        }
        self.changed.notify_all();
        self.send_to_all((kind::FAILED, rank), reason.as_bytes());
    }

    /// Sends a message over each connection. The reading thread detects broken connections.
    fn send_to_all(&self, (kind, rank): (u8, u32), text: &[u8]) {
        let message = message((kind, rank), text);
        for (_, stream) in &mut self.lock().others {
            let _ = stream.write_all(&message);
        }
    }

    /// Sends heartbeats; on rank 0, also looks for stuck ranks.
    fn beat(&self) {
        let look_every = LOOK_EVERY.min(self.limits.beat);
        let mut last: Option<Instant> = None;
        while !self.lock().is_closed {
            if last.is_none_or(|last| last.elapsed() > self.limits.beat) {
                last = Some(Instant::now());
                let begun = self.begun.load(Ordering::Relaxed);
                self.lock().heard(self.own.rank, begun);
                self.send_to_all((kind::BEAT, self.own.rank), &begun.to_le_bytes());
                if self.own.rank == 0 {
                    self.look_for_stuck();
                }
            }
            thread::sleep(look_every);
        }
    }

    fn look_for_stuck(&self) {
        let stuck = self.lock().stuck(self.own.world_size, self.limits.stuck);
        if let Some((rank, reason)) = stuck {
            self.failed(rank, &reason);
        }
    }
}

impl State {
    /// Records the number of begun operations of a rank.
    fn heard(&mut self, rank: u32, begun: u64) {
        let before = self.begun.insert(rank, begun);
        if before != Some(begun) {
            self.moved = Some(Instant::now());
        }
    }

    /// The rank that keeps the others waiting, if no rank has made progress for `limit`.
    fn stuck(&self, world_size: u32, limit: Duration) -> Option<Failure> {
        let waited = self.moved?.elapsed();
        let are_known = self.begun.len() == world_size as usize;
        let least = *self.begun.values().min()?;
        let most = *self.begun.values().max()?;
        if waited < limit || !are_known || least == 0 || !self.done.is_empty() {
            return None;
        }
        let behind: Vec<u32> = self
            .begun
            .iter()
            .filter(|(_, begun)| **begun == least)
            .map(|(rank, _)| *rank)
            .collect();
        let reason = if least == most {
            format!(
                "no rank has gone on for {limit:?}, and none is behind the others\n\
                 hint: a GPU or its link is stuck; its system's log may say which"
            )
        } else {
            format!(
                "it has not gone on for {limit:?}, and the others wait for it\n\
                 hint: a longer `--rank-timeout` waits longer"
            )
        };
        Some((behind[0], reason))
    }
}

/// Why a connection has ended.
fn lost(error: &io::Error, silence: Duration) -> String {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            format!("gave no sign of life for {silence:?}")
        }
        _ => "its process ended without a word\n\
              hint: what it wrote before its end, or its system's log, says why"
            .to_string(),
    }
}

fn connect(address: (&str, u16)) -> io::Result<TcpStream> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for socket_address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&socket_address, PROMPT) {
            Ok(stream) => {
                stream.set_write_timeout(Some(PROMPT))?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), TrainError> {
    let thread = thread::Builder::new().name(name.to_string()).spawn(work);
    thread.map(drop).map_err(TrainError::io("a thread"))
}

#[cfg(test)]
mod tests;
