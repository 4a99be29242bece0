//! What moves the frames of a rank: the one thread that touches its transport.

use std::sync::PoisonError;
use std::thread;
use std::time::{Duration, Instant};

use super::frame::{Frame, Kind, Outgoing};
use super::{Shared, State};

/// For how long after something has moved it looks again at once.
const AT_ONCE: Duration = Duration::from_micros(100);
/// Between two looks after that, while somebody waits or something has not gone.
const LOOK_EVERY: Duration = Duration::from_micros(50);
/// The most between two looks then: each look without anything lengthens the next wait.
const LOOK_EVERY_AT_MOST: Duration = Duration::from_micros(500);
/// Between two looks while the rank computes.
const LOOK_EVERY_IDLE: Duration = Duration::from_millis(2);

/// What brings frames from rank to rank, in the order in which they were posted for each.
pub(crate) trait Transport {
    /// Takes a frame for another rank; it goes when it can.
    fn post(&mut self, to: u32, frame: Outgoing) -> Result<(), String>;

    /// Moves what can be moved without waiting, and adds frames that have come whole to `arrived`,
    /// with their senders. Whether anything has moved.
    fn poll(&mut self, arrived: &mut Vec<(u32, Vec<u8>)>) -> Result<bool, String>;

    /// Whether all that was posted has gone.
    fn is_sent(&self) -> bool;
}

/// Carries the frames of a rank until it is closed and all have gone. Whether that was in order:
/// everybody has said goodbye, and nobody has failed.
pub(crate) fn carry(shared: &Shared, transport: &mut dyn Transport) -> bool {
    let mut moved_at = Instant::now();
    let mut nap = LOOK_EVERY;
    let mut arrived = Vec::new();
    loop {
        let outgoing = std::mem::take(&mut shared.lock().outbox);
        let mut has_moved = !outgoing.is_empty();
        let posted = outgoing.into_iter().try_for_each(|(to, frame)| transport.post(to, frame));
        match posted.and_then(|()| transport.poll(&mut arrived)) {
            Ok(moved) => has_moved |= moved,
            Err(reason) => {
                // Nobody can be told by what does not work any more.
                shared.abort(shared.rank, &reason);
                return false;
            }
        }
        let mut state = shared.lock();
        for (from, frame) in arrived.drain(..) {
            state.take(from, frame);
        }
        let is_sent = state.outbox.is_empty() && transport.is_sent();
        if has_moved || is_sent != state.is_sent {
            state.is_sent = is_sent;
            shared.arrived.notify_all();
        }
        if state.is_closed && is_sent {
            return state.failure.is_none();
        }
        if has_moved {
            (moved_at, nap) = (Instant::now(), LOOK_EVERY);
        }
        let is_busy = state.is_waited_for || !is_sent;
        if !state.outbox.is_empty() || (is_busy && moved_at.elapsed() < AT_ONCE) {
            drop(state);
            thread::yield_now();
            continue;
        }
        // Whoever posts a frame or begins to wait ends the nap.
        let limit = if is_busy { nap } else { LOOK_EVERY_IDLE };
        nap = (nap * 2).min(LOOK_EVERY_AT_MOST);
        let woken = shared.posted.wait_timeout(state, limit);
        let (state, waited) = woken.unwrap_or_else(PoisonError::into_inner);
        drop(state);
        if !waited.timed_out() {
            (moved_at, nap) = (Instant::now(), LOOK_EVERY);
        }
    }
}

impl State {
    /// Takes a frame that has come.
    fn take(&mut self, from: u32, frame: Vec<u8>) {
        let failure = match Frame::of(frame) {
            Ok(frame) => match frame.kind {
                Kind::Part => {
                    let mail = self.mail.entry((from, frame.digests.channel)).or_default();
                    return mail.push_back(frame);
                }
                Kind::Goodbye => return self.ended.push(from),
                Kind::Failure => frame.words(),
            },
            Err(reason) => format!("it has sent {reason}"),
        };
        self.failure.get_or_insert((from, failure));
    }
}
