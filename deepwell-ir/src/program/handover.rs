//! What the stages of a pipeline send each other between the bodies of a step.
//!
//! A send may end only when the other stage receives. So sends and receives are taken out of the
//! bodies: where one body has ended and the next has not begun, a stage sends what the one made and
//! receives, all at the same time, what has an [`Arrival`] there. That may be for a later body:
//! what is received lands in a place of its own, and is moved to where its body reads it when that
//! body is the next to begin. The order in which all ends is found by whoever lowers; a stage alone
//! does not show whether two wait for each other.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::verify::ALIGNMENT_BYTES;
use super::{BodyId, ByteRange, Call, Program, ValueId};
use crate::ops::CollectiveKind;
use crate::{Op, ProcessGroup, Ranks};

/// When a stage receives what other stages send it, and where that lands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handover {
    /// First byte of the first place.
    pub offset: usize,
    /// From one place to the next; what a body receives fits into one.
    pub place_bytes: usize,
    /// How many there are.
    pub places: u32,
    /// What is received before each invocation of the schedule and behind the last one, that of one
    /// stage in the order in which it is sent.
    pub before: Vec<Vec<Arrival>>,
}

/// All that one invocation of a body receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrival {
    /// Which one, by its index in the schedule.
    pub invocation: u32,
    /// Where it lands.
    pub place: u32,
}

impl Handover {
    /// All places.
    pub fn range(&self) -> ByteRange {
        ByteRange { offset: self.offset, bytes: self.place_bytes * self.places as usize }
    }
}

/// What a stage sends and receives at one point of its schedule, whichever micro-batches it is of.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Meeting {
    /// The body whose sends it runs, and the slot of what they send.
    pub sends: Option<(BodyId, u32)>,
    /// The bodies whose receives it runs, and the place of each, in order.
    pub arrivals: Vec<(BodyId, u32)>,
    /// What is moved then: the body that reads it, its slot, and the place where it is.
    pub taken: Option<(BodyId, u32, u32)>,
}

impl Call {
    /// Whether it sends something to another stage of a pipeline, or receives it.
    pub fn is_handed_over(&self, ranks: &Ranks) -> bool {
        let Op::Collective(op) = &self.op else { return false };
        let group = ranks.group(op.group);
        group.is_some_and(|group| group.name == ProcessGroup::PIPELINE)
            && matches!(op.kind, CollectiveKind::Send { .. } | CollectiveKind::Recv { .. })
    }

    /// Whether it receives what another rank sends.
    pub fn receives(&self) -> bool {
        matches!(&self.op, Op::Collective(op) if matches!(op.kind, CollectiveKind::Recv { .. }))
    }
}

impl Program {
    /// Whether a call is one that stages hand over between bodies.
    pub fn is_handed_over(&self, call: &Call) -> bool {
        self.handover.is_some() && call.is_handed_over(&self.target.ranks)
    }

    /// The calls of a body by what they do with other stages, as ranges of its calls: those that
    /// receive, at its beginning, and those that send, at its end.
    pub fn handed_over(&self, body: BodyId) -> (Range<usize>, Range<usize>) {
        let calls = self.calls_of(body);
        let is = |call: &Call, receives| self.is_handed_over(call) && call.receives() == receives;
        let received = calls.iter().take_while(|call| is(call, true)).count();
        let sent = calls.iter().rev().take_while(|call| is(call, false)).count();
        (0..received, calls.len() - sent..calls.len())
    }

    /// What stages exchange before invocation `index` of the schedule, or behind the last one;
    /// nothing where bodies exchange it themselves.
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

    /// What a body receives, and where in a place each value lands, one behind the other.
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

    /// The bytes of a place that a body needs.
    pub fn landing_bytes(&self, body: BodyId) -> usize {
        let end = self.landings(body).last().map_or(0, |(_, range)| range.end());
        end.next_multiple_of(ALIGNMENT_BYTES)
    }

    /// The program in which what bodies receive lies where it lands, in `place`.
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
