//! Transfers between pipeline stages between the bodies of a step.
//!
//! A send may not complete until the other stage receives. Sends and receives are therefore
//! separated from the bodies: between two bodies, a stage simultaneously sends the outputs of the
//! finished body and receives every [`Arrival`] scheduled there. An arrival may be for a later
//! body: received data is stored in a receive buffer (a place) and copied to where the body reads
//! it when that body is next. Lowering finds an order without deadlock; the program of a single
//! stage does not show deadlocks.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::verify::ALIGNMENT_BYTES;
use super::{BodyId, ByteRange, Call, Program, ValueId};
use crate::ops::CollectiveKind;
use crate::{Op, ProcessGroup, Ranks};

/// Schedule and buffers of the tensors that a stage receives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handover {
    /// First byte of the first place.
    pub offset: usize,
    /// Distance between places; large enough for the receives of any body.
    pub place_bytes: usize,
    /// Number of places.
    pub places: u32,
    /// Arrivals before each invocation of the schedule and after the last; arrivals from one stage
    /// are in the order of its sends.
    pub before: Vec<Vec<Arrival>>,
}

/// All tensors received by an invocation of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrival {
    /// Index of the invocation in the schedule.
    pub invocation: u32,
    /// Index of the receive buffer.
    pub place: u32,
}

impl Handover {
    /// Bytes of all places.
    pub fn range(&self) -> ByteRange {
        ByteRange { offset: self.offset, bytes: self.place_bytes * self.places as usize }
    }
}

/// Transfers of a stage at one point of its schedule, for any micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Meeting {
    /// Body whose sends run, and the slot to send from.
    pub sends: Option<(BodyId, u32)>,
    /// Bodies whose receives run, with the place of each body, in order.
    pub arrivals: Vec<(BodyId, u32)>,
    /// Received data to copy: destination body, its slot, and the source place.
    pub taken: Option<(BodyId, u32, u32)>,
}

impl Call {
    /// Whether the call is a send or receive between pipeline stages.
    pub fn is_handed_over(&self, ranks: &Ranks) -> bool {
        let Op::Collective(op) = &self.op else { return false };
        let group = ranks.group(op.group);
        group.is_some_and(|group| group.name == ProcessGroup::PIPELINE)
            && matches!(op.kind, CollectiveKind::Send { .. } | CollectiveKind::Recv { .. })
    }

    /// Whether the call is a receive.
    pub fn receives(&self) -> bool {
        matches!(&self.op, Op::Collective(op) if matches!(op.kind, CollectiveKind::Recv { .. }))
    }
}

impl Program {
    /// Whether the call is a transfer between bodies.
    pub fn is_handed_over(&self, call: &Call) -> bool {
        self.handover.is_some() && call.is_handed_over(&self.target.ranks)
    }

    /// Transfers of a body as ranges of its calls: receives at the beginning, sends at the end.
    pub fn handed_over(&self, body: BodyId) -> (Range<usize>, Range<usize>) {
        let calls = self.calls_of(body);
        let is = |call: &Call, receives| self.is_handed_over(call) && call.receives() == receives;
        let received = calls.iter().take_while(|call| is(call, true)).count();
        let sent = calls.iter().rev().take_while(|call| is(call, false)).count();
        (0..received, calls.len() - sent..calls.len())
    }

    /// Transfers before invocation `index` of the schedule, or after the last; `None` without
    /// transfers between bodies.
    pub fn meeting(&self, index: usize) -> Option<Meeting> {
        let handover = self.handover.as_ref()?;
        let former = index.checked_sub(1).and_then(|former| self.schedule.get(former));
        let sends = former.filter(|it| !self.handed_over(it.body).1.is_empty());
        let receives = |body: BodyId| !self.handed_over(body).0.is_empty();
        let arrivals = handover.before.get(index)?.iter().filter_map(|arrival| {
            let body = self.schedule.get(arrival.invocation as usize)?.body;
            receives(body).then_some((body, arrival.place))
        });
        let taken = self.schedule.get(index).filter(|next| receives(next.body)).and_then(|next| {
            let arrivals = handover.before[..=index].iter().flatten();
            let arrival = arrivals.rev().find(|it| it.invocation as usize == index)?;
            Some((next.body, next.slot, arrival.place))
        });
        let meeting = Meeting {
            sends: sends.map(|it| (it.body, it.slot)),
            arrivals: arrivals.collect(),
            taken,
        };
        (meeting != Meeting::default()).then_some(meeting)
    }

    /// Values that a body receives, with consecutive byte ranges relative to a place.
    pub fn landings(&self, body: BodyId) -> Vec<(ValueId, ByteRange)> {
        let received = &self.calls_of(body)[self.handed_over(body).0];
        let values = received.iter().flat_map(|call| call.outputs()).map(|operand| operand.value);
        let mut offset = 0;
        let landing = |value: ValueId| {
            let range = ByteRange { offset, bytes: self.value(value).range.bytes };
            offset = range.end().next_multiple_of(ALIGNMENT_BYTES);
            (value, range)
        };
        values.map(landing).collect()
    }

    /// Bytes that a body needs in a place.
    pub fn landing_bytes(&self, body: BodyId) -> usize {
        let end = self.landings(body).last().map_or(0, |(_, range)| range.end());
        end.next_multiple_of(ALIGNMENT_BYTES)
    }

    /// The program with received values located in `place`.
    pub fn with_landings(&self, place: u32) -> Program {
        let mut landed = self.clone();
        let Some(handover) = &self.handover else { return landed };
        let first = handover.offset + place as usize * handover.place_bytes;
        for body in (0..self.bodies.len()).map(|body| BodyId(body as u32)) {
            for (value, range) in self.landings(body) {
                let value = &mut landed.values[value.index()];
                value.range.offset = first + range.offset;
                value.slot_stride_bytes = 0;
            }
        }
        landed
    }
}
