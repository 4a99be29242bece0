//! Ranks that send each other frames.
//!
//! Every rank of a group sends each other one its part of a collective, an empty one where there
//! is nothing to give, and waits for the parts of all: so ranks that disagree meet, and each finds
//! it out. What is made of the parts is made in the order of the group, as by ranks that are
//! threads, and so has the same bits.
//!
//! Two threads share the state of a rank. The rank's own leaves frames in the `outbox` and waits
//! until those it needs are in its `mail`; the carrier alone touches the transport, and moves
//! frames while the rank computes. A rank waits on a condition of this process, with a limit,
//! whatever the transport does.

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

#[cfg_attr(not(feature = "mpi"), allow(unused_imports))]
pub(super) use self::carrier::{Transport, carry};
use self::frame::{Frame, Kind};
#[cfg_attr(not(feature = "mpi"), allow(unused_imports))]
pub(super) use self::frame::{Outgoing, frame_bytes};
use self::meeting::Meeting;
use super::parts::{assemble, part};
use super::want::Want;
use super::{Comm, CommError, Exchange};

/// From how many bytes on each rank sums a slice for all: each sends twice the input then, however
/// many ranks there are, and not once to each of the others.
const SLICED_BYTES: usize = 64 << 10;

/// What a rank and its carrier share.
pub(super) struct Shared {
    rank: u32,
    size: u32,
    /// How long a rank waits for another.
    timeout: Duration,
    state: Mutex<State>,
    /// For whoever waits for other ranks.
    arrived: Condvar,
    /// For the carrier.
    posted: Condvar,
}

#[derive(Default)]
struct State {
    /// Who failed first, as far as this rank knows, and how.
    failure: Option<(u32, String)>,
    /// Parts that have come, by sender and channel.
    mail: HashMap<(u32, u64), VecDeque<Frame>>,
    /// Who sends no more.
    ended: Vec<u32>,
    outbox: Vec<(u32, Outgoing)>,
    /// Somebody waits for mail.
    is_waited_for: bool,
    /// All that was posted has gone.
    is_sent: bool,
    /// This rank has said goodbye.
    has_left: bool,
    /// The carrier shall end once all that was posted has gone.
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
        // The state is whole between statements that change it: a panic leaves nothing half done.
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

    /// Makes an error of this rank everybody's, and gives it back.
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

    /// Lets this rank's present and later exchanges fail with a reason of `rank`, unless something
    /// has failed before. The others are not told.
    pub(super) fn abort(&self, rank: u32, reason: &str) {
        self.lock().failure.get_or_insert_with(|| (rank, reason.to_string()));
        self.arrived.notify_all();
        self.posted.notify_all();
    }

    /// Says goodbye to the others.
    fn leave(&self) {
        let mut state = self.lock();
        if !state.has_left {
            state.has_left = true;
            let notice = frame::notice(Kind::Goodbye, "");
            self.post(&mut state, self.others().map(|to| (to, Arc::clone(&notice))));
        }
    }

    /// Says goodbye, waits for that of all others, and until the carrier has ended.
    ///
    /// # Errors
    /// A rank that has failed, and one that says no goodbye in time.
    pub(super) fn finish(&self, limit: Duration) -> Result<(), CommError> {
        self.leave();
        let what = "the end of the run".to_string();
        let missing =
            |state: &State| self.others().filter(|it| !state.ended.contains(it)).collect();
        self.wait(limit, what.clone(), missing, |state| {
            // One that failed says goodbye as well.
            let is_in_order = state.failure.is_none() && state.is_sent;
            (is_in_order && state.ended.len() + 1 == self.size as usize).then_some(())
        })?;
        self.lock().is_closed = true;
        self.posted.notify_all();
        self.wait(limit, what, |_| Vec::new(), |state| state.is_over.then_some(()))
    }

    /// The carrier has ended.
    pub(super) fn is_over(&self) {
        self.lock().is_over = true;
        self.arrived.notify_all();
    }

    /// Waits until `take` gives something, for as long as that can still happen.
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
            // What is there is taken, whatever happened meanwhile.
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

/// One rank; a clone is the same rank once more, which has ended when all are dropped.
#[derive(Clone)]
pub(super) struct Mailbox {
    seat: Arc<Seat>,
}

struct Seat {
    shared: Arc<Shared>,
    /// Spent in exchanges so far.
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
        let place = (shared.rank, shared.size);
        let want = Want::of(exchange, place, input.len(), output.len());
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
