//! Joins the processes of a run before their library does, and tells when one of them fails.
//!
//! Each rank has a TCP connection with rank 0. Over it goes the id by which the collective library
//! connects the ranks, and from then on nothing but signs of life and the reason of a failure: what
//! the ranks compute or decide goes through that library. A connection that closes before its rank
//! has said goodbye is a rank that has died. So is one that is silent for long, as when a machine
//! loses power. A rank may live and not go on: with its signs of life a rank tells how many things
//! it has begun that all ranks do (steps, exchanges between hosts). Where that number stands still
//! on all of them for longer than the limit, the one that has begun least keeps the others waiting.

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

/// Between two looks at what is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long a stranger may take to introduce itself, a message to be taken, and a failure to be
/// answered.
const PROMPT: Duration = Duration::from_secs(5);

/// How long what may take, each shorter than the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Between two signs of life.
    pub(super) beat: Duration,
    /// A connection without one for so long is dead.
    pub(super) silence: Duration,
    /// Ranks of which none goes on for so long are stuck.
    pub(super) stuck: Duration,
}

impl Limits {
    /// Those of ranks that wait so long for each other in an exchange.
    pub(super) fn of(exchange: Duration) -> Limits {
        let silence = Duration::from_secs(120).min(exchange / 3);
        Limits { beat: silence / 24, silence, stuck: exchange / 10 * 9 }
    }
}

/// Who failed first, and how.
pub(super) type Failure = (u32, String);
/// Told of the first failure.
type OnFailure = Box<dyn Fn(u32, &str) + Send>;

/// One rank's end of the connections.
pub(super) struct Lifeline {
    shared: Arc<Shared>,
}

struct Shared {
    own: Hello,
    limits: Limits,
    /// Of this program and of its library, which all ranks have alike.
    versions: String,
    /// What this rank has begun of what all ranks do.
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
    /// Rank 0 has been told, or has told, of the failure.
    is_told: bool,
    on_failure: Option<OnFailure>,
    /// What each rank has begun, of rank 0, which hears of all.
    begun: BTreeMap<u32, u64>,
    /// When that has changed last.
    moved: Option<Instant>,
    /// Ranks that have said goodbye.
    done: Vec<u32>,
    /// This rank listens no more.
    is_closed: bool,
}

impl Lifeline {
    /// Listens where the others look for rank 0, or goes there and tries for so long.
    ///
    /// # Errors
    /// A port that is taken, and nobody who listens within the limit.
    pub(super) fn open(
        launched: &Launched,
        limit: Duration,
        limits: Limits,
        versions: &str,
    ) -> Result<Lifeline, TrainError> {
        let Launched { rank, world_size, attempt, .. } = *launched;
        let shared = Arc::new(Shared {
            own: Hello { rank, world_size, attempt },
            limits,
            versions: versions.to_string(),
            begun: Arc::default(),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
        });
        let lifeline = Lifeline { shared };
        match launched.is_first() {
            true => lifeline.listen(launched)?,
            false => lifeline.go(launched, limit)?,
        }
        let shared = Arc::clone(&lifeline.shared);
        spawn("lifeline-beat", move || shared.beat())?;
        Ok(lifeline)
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
        spawn("lifeline-listen", move || shared.accept(&listener))
    }

    fn go(&self, launched: &Launched, limit: Duration) -> Result<(), TrainError> {
        let end = Instant::now() + limit;
        let place = (launched.address.as_str(), launched.port);
        loop {
            let error = match connect(place).and_then(|mut stream| {
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

    /// Waits until all ranks have come and gives them the library's id.
    ///
    /// # Errors
    /// Ranks that do not come in time, or have failed.
    #[cfg_attr(not(any(feature = "cuda", feature = "mpi")), allow(dead_code))]
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

    /// Waits for the library's id, which rank 0 gives once it is ready.
    ///
    /// # Errors
    /// A rank that has failed, and a rank 0 that is not ready in time.
    pub(super) fn id(&self, limit: Duration) -> Result<Vec<u8>, TrainError> {
        let id = self.shared.wait(limit, |state| state.id.clone())?;
        id.ok_or_else(|| TrainError::Setting {
            setting: "rank 0",
            expected: "to be ready with data and folder".to_string(),
            got: format!("nothing for {limit:?}"),
            hint: None,
        })
    }

    /// Counts what this rank has begun of what all ranks do; nobody is stuck before the first.
    pub(super) fn begun(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.shared.begun)
    }

    /// Who failed first, and how.
    pub(super) fn failure(&self) -> Option<Failure> {
        self.shared.lock().failure.clone()
    }

    /// Calls `tell` with the first failure, now or when it comes.
    #[cfg_attr(not(any(feature = "cuda", feature = "mpi")), allow(dead_code))]
    pub(super) fn on_failure(&self, tell: impl Fn(u32, &str) + Send + 'static) {
        let mut state = self.shared.lock();
        if let Some((rank, reason)) = &state.failure {
            tell(*rank, reason);
        }
        state.on_failure = Some(Box::new(tell));
    }

    /// Tells all ranks why this one fails, unless one has failed before, and waits a little until
    /// rank 0 knows.
    pub(super) fn fail(&self, reason: &str) {
        let shared = &self.shared;
        shared.failed(shared.own.rank, reason);
        // Rank 0 tells everybody, also whom it has it from.
        let end = Instant::now() + PROMPT;
        while !shared.lock().is_told && Instant::now() < end {
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Whether rank 0 knows of a failure.
    pub(super) fn is_told(&self) -> bool {
        self.shared.lock().is_told
    }

    /// Says goodbye: what happens to this rank's connections from here on is no failure.
    pub(super) fn finish(&self) {
        self.shared.send_to_all((kind::DONE, self.shared.own.rank), &[]);
        self.shared.lock().is_closed = true;
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_closed = true;
        for (_, stream) in state.others.drain(..) {
            // The threads that read wake up by it; one that is closed already has none.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` gives something; none where that takes too long.
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

    /// Takes the ranks that come, until all are there.
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
                    // Who is slow to say who it is keeps nobody else waiting.
                    let shared = Arc::clone(&self);
                    let _ = spawn("lifeline-hello", move || shared.admit(stream));
                }
                Err(_) => thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// Looks at who has come.
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
            let own = self.own.world_size;
            Some(format!("it was told of {world_size} ranks, rank 0 of {own}"))
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

    /// Keeps a connection, and listens to it.
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
        spawn("lifeline-read", move || shared.read(rank, &mut reader))
    }

    /// Takes what rank `from` sends until the connection ends.
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
                        let own = &self.versions;
                        let reason = format!(
                            "it has {theirs}, rank {} has {own}\n\
                             hint: start every rank with the same program and libraries",
                            self.own.rank
                        );
                        self.failed(from, &reason);
                    }
                }
                Ok((kind::FAILED, rank, reason)) => {
                    // What rank 0 says, it has said to all.
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

    /// Keeps the first failure and tells it: rank 0 all others, they rank 0.
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

    /// Sends a message over each connection. One that is broken is seen by who reads it.
    fn send_to_all(&self, (kind, rank): (u8, u32), text: &[u8]) {
        let message = message((kind, rank), text);
        for (_, stream) in &mut self.lock().others {
            let _ = stream.write_all(&message);
        }
    }

    /// Gives signs of life; on rank 0, looks for ranks that are stuck.
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
    /// Takes what a rank says that it has begun.
    fn heard(&mut self, rank: u32, begun: u64) {
        let before = self.begun.insert(rank, begun);
        if before != Some(begun) {
            self.moved = Some(Instant::now());
        }
    }

    /// The rank that keeps the others waiting, where none has gone on for so long.
    fn stuck(&self, world_size: u32, limit: Duration) -> Option<Failure> {
        let waited = self.moved?.elapsed();
        let are_known = self.begun.len() == world_size as usize;
        let (least, most) = (*self.begun.values().min()?, *self.begun.values().max()?);
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

fn connect(place: (&str, u16)) -> io::Result<TcpStream> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in place.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, PROMPT) {
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
