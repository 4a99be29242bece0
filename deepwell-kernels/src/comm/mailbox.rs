//! Ranks that communicate by frames.
//!
//! In a collective, every rank sends each other rank of the group the part meant for it, possibly
//! empty, and waits for the parts of all ranks. Ranks that disagree therefore still receive each
//! other's frames, and each detects the mismatch. Parts are combined in the order of the group, as
//! for ranks that are threads, so results have the same bits.
//!
//! Two threads share the state of a rank. The rank's own thread posts frames to the `outbox` and
//! waits until the needed frames are in its `mail`. Only the carrier thread touches the transport;
//! the carrier moves frames while the rank computes. A rank always waits on a condition variable of
//! its own process, with a timeout, whatever the transport does.

mod carrier;
mod frame;
mod meeting;

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use deepwell_ir::ops::CollectiveKind;

pub(super) use self::carrier::{Transport, carry};
use self::frame::{Frame, Kind};
pub(super) use self::frame::{Outgoing, frame_bytes};
use self::meeting::Meeting;
use super::parts::{assemble, part};
use super::want::Want;
use super::{Comm, CommError, Exchange};

/// All-reduces of at least this many bytes are split: each rank reduces one slice for all ranks. A
/// rank then sends twice the input, however many ranks there are, instead of the input once to
/// every other rank.
const SLICED_BYTES: usize = 64 << 10;

/// State shared by the threads of a rank and of the carrier.
pub(super) struct Shared {
    rank: u32,
    size: u32,
    /// Timeout of waiting for a rank.
    timeout: Duration,
    state: Mutex<State>,
    /// Notifies the rank's thread.
    arrived: Condvar,
    /// Notifies the carrier.
    posted: Condvar,
}

#[derive(Default)]
struct State {
    /// The first failure known to this rank: the rank that failed, and the reason.
    failure: Option<(u32, String)>,
    /// Received parts, by sender and channel.
    mail: HashMap<(u32, u64), VecDeque<Frame>>,
    /// Ranks that send no more frames.
    ended: Vec<u32>,
    outbox: Vec<(u32, Outgoing)>,
    /// The rank's thread waits for mail.
    is_waited_for: bool,
    /// All posted frames have been sent.
    is_sent: bool,
    /// This rank has sent its goodbye.
    has_left: bool,
    /// The carrier must end once all posted frames are sent.
    is_closed: bool,
    /// The carrier has ended.
    is_over: bool,
}

impl State {
    fn check(&self) -> Result<(), CommError> {
        match self.failure.clone() {
            None => Ok(()),
            Some((rank, reason)) => Err(CommError::Failed { rank, reason }),
        }
    }
}

impl Shared {
    pub(super) fn new(rank: u32, size: u32, timeout: Duration) -> Arc<Shared> {
        Arc::new(Shared {
            rank,
            size,
            timeout,
            state: Mutex::default(),
            arrived: Condvar::new(),
            posted: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the state consistent, so a panic while the lock is held is
        // harmless.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.rank;
        (0..self.size).filter(move |&rank| rank != own)
    }

    fn post(&self, state: &mut State, frames: impl IntoIterator<Item = (u32, Outgoing)>) {
        state.outbox.extend(frames);
        state.is_sent = false;
        self.posted.notify_all();
    }

    /// Records an error of this rank, notifies all other ranks, and returns the error.
    fn fail(&self, error: CommError) -> CommError {
        let mut state = self.lock();
        if state.failure.is_none() {
            let notice = frame::notice(Kind::Failure, &error.to_string());
            let notices = self.others().map(|to| (to, Arc::clone(&notice)));
            self.post(&mut state, notices);
            state.failure = Some((self.rank, error.to_string()));
            self.arrived.notify_all();
        }
        error
    }

    /// Fails this rank's current and later collectives with a reason of `rank`, unless a failure
    /// came before. Other ranks are not notified.
    pub(super) fn abort(&self, rank: u32, reason: &str) {
        self.lock().failure.get_or_insert_with(|| (rank, reason.to_string()));
        self.arrived.notify_all();
        self.posted.notify_all();
    }

    /// Sends a goodbye to all other ranks.
    fn leave(&self) {
        let mut state = self.lock();
        if !state.has_left {
            state.has_left = true;
            let notice = frame::notice(Kind::Goodbye, "");
            self.post(&mut state, self.others().map(|to| (to, Arc::clone(&notice))));
        }
    }

    /// Sends a goodbye, and waits for the goodbyes of all other ranks and for the end of the
    /// carrier.
    ///
    /// # Errors
    /// A failed rank, or a missing goodbye.
    pub(super) fn finish(&self, limit: Duration) -> Result<(), CommError> {
        self.leave();
        let what = "the end of the run".to_string();
        let missing =
            |state: &State| self.others().filter(|it| !state.ended.contains(it)).collect();
        self.wait(limit, what.clone(), missing, |state| {
            // A rank that failed sends a goodbye as well.
            let is_in_order = state.failure.is_none() && state.is_sent;
            (is_in_order && state.ended.len() + 1 == self.size as usize).then_some(())
        })?;
        self.lock().is_closed = true;
        self.posted.notify_all();
        self.wait(limit, what, |_| Vec::new(), |state| state.is_over.then_some(()))
    }

    /// Notes that the carrier has ended.
    pub(super) fn is_over(&self) {
        self.lock().is_over = true;
        self.arrived.notify_all();
    }

    /// Waits until `take` returns a value, or until that has become impossible.
    fn wait<T>(
        &self,
        limit: Duration,
        what: String,
        missing: impl Fn(&State) -> Vec<u32>,
        mut take: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, CommError> {
        let begin = Instant::now();
        let mut state = self.lock();
        loop {
            // Data that has arrived is taken even after a failure.
            if let Some(taken) = take(&mut state) {
                state.is_waited_for = false;
                return Ok(taken);
            }
            state.check()?;
            let absent = missing(&state);
            if let Some(&rank) = absent.iter().find(|rank| state.ended.contains(rank)) {
                drop(state);
                return Err(self.fail(CommError::Ended { what, rank }));
            }
            let waited = begin.elapsed();
            let Some(rest) = limit.checked_sub(waited).filter(|rest| !rest.is_zero()) else {
                drop(state);
                return Err(self.fail(CommError::Timeout { what, waited: limit, missing: absent }));
            };
            if !state.is_waited_for {
                state.is_waited_for = true;
                self.posted.notify_all();
            }
            let woken = self.arrived.wait_timeout(state, rest);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A rank. A clone is a second handle to the same rank; the rank ends when all clones are dropped.
#[derive(Clone)]
pub(super) struct Mailbox {
    seat: Arc<Seat>,
}

struct Seat {
    shared: Arc<Shared>,
    /// Time spent in [`Comm::exchange`] so far.
    waited_ns: AtomicU64,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.fail(panicked(self.shared.rank));
        }
        self.shared.leave();
    }
}

fn panicked(rank: u32) -> CommError {
    let what = format!("rank {rank}");
    CommError::Request { what, reason: "its thread panicked".to_string() }
}

impl Mailbox {
    pub(super) fn new(shared: Arc<Shared>) -> Mailbox {
        Mailbox { seat: Arc::new(Seat { shared, waited_ns: AtomicU64::new(0) }) }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.seat.shared
    }

    fn take_part(
        &self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let shared = self.shared();
        shared.lock().check()?;
        let rank_and_size = (shared.rank, shared.size);
        let want = Want::of(exchange, rank_and_size, input.len(), output.len());
        let meeting = Meeting::of(shared, want.map_err(|error| shared.fail(error))?);
        let (kind, ranks) = (&exchange.kind, meeting.want.group.ranks.len());
        match *kind {
            CollectiveKind::Send { to } => meeting.send(to as usize, input),
            CollectiveKind::Recv { from, .. } => {
                let frames = meeting.receive(&[from as usize])?;
                output.copy_from_slice(frames[0].bytes());
                Ok(())
            }
            CollectiveKind::AllReduce { reduction } if ranks > 1 && input.len() >= SLICED_BYTES => {
                meeting.reduce_slices(reduction, input, output)
            }
            _ => {
                let to = |to| part(kind, input, (meeting.place, to), ranks);
                let frames = meeting.round(to)?;
                let parts = meeting.parts(&frames, to(meeting.place));
                let made = assemble(kind, exchange.dtype, &parts, output);
                made.map_err(|reason| meeting.cannot(reason))
            }
        }
    }
}

impl Comm for Mailbox {
    fn rank(&self) -> u32 {
        self.shared().rank
    }

    fn world_size(&self) -> u32 {
        self.shared().size
    }

    fn waited(&self) -> Option<Duration> {
        Some(Duration::from_nanos(self.seat.waited_ns.load(Ordering::Relaxed)))
    }

    fn exchange(
        &mut self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let begin = Instant::now();
        let exchanged = self.take_part(exchange, input, output);
        let spent_ns = begin.elapsed().as_nanos() as u64;
        self.seat.waited_ns.fetch_add(spent_ns, Ordering::Relaxed);
        exchanged
    }

    fn abort(&mut self, reason: &str) {
        let what = format!("rank {}", self.rank());
        self.shared().fail(CommError::Request { what, reason: reason.to_string() });
    }
}
