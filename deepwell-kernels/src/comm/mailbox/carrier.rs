//! The carrier: the thread that moves the frames of a rank, and the only user of its transport.

use std::sync::PoisonError;
use std::thread;
use std::time::{Duration, Instant};

use super::frame::{Frame, Kind, Outgoing};
use super::{Shared, State};

/// After a frame has moved, the carrier polls without sleeping for this long.
const AT_ONCE: Duration = Duration::from_micros(100);
/// First sleep between two polls after that, while the rank waits or frames are unsent.
const LOOK_EVERY: Duration = Duration::from_micros(50);
/// Longest sleep in this state: every poll without progress doubles the next sleep.
const LOOK_EVERY_AT_MOST: Duration = Duration::from_micros(500);
/// Sleep between two polls while the rank computes.
const LOOK_EVERY_IDLE: Duration = Duration::from_millis(2);

/// Moves frames between ranks; frames for the same rank stay in posting order.
pub(crate) trait Transport {
    /// Accepts a frame for another rank; the frame is sent as soon as possible.
    fn post(&mut self, to: u32, frame: Outgoing) -> Result<(), String>;

    /// Makes progress without blocking, and appends completely received frames with their senders
    /// to `arrived`. Returns whether any data has moved.
    fn poll(&mut self, arrived: &mut Vec<(u32, Vec<u8>)>) -> Result<bool, String>;

    /// Whether all posted frames have been sent.
    fn is_sent(&self) -> bool;
}

/// Carries the frames of a rank until the mailbox is closed and all frames are sent. Returns
/// whether the run ended in order, without a failure.
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
                // Other ranks cannot be notified: the transport no longer works.
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
        // A posted frame or a rank that begins to wait interrupts the sleep.
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
    /// Files a received frame.
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
