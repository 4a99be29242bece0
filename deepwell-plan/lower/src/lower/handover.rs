//! Receives and sends of a pipeline stage between its bodies.

use deepwell_ir::{ALIGNMENT_BYTES, Arena, Arrival, Call, Handover, Invocation};

use super::Lowering;
use crate::arena::align;

impl Lowering<'_> {
    /// Moves the receives of each body to the begin and the sends to the end, if stages communicate
    /// between bodies: no call may run before a receive or after a send.
    pub(super) fn receive_first_and_send_last(&mut self) {
        if self.handover.is_none() {
            return;
        }
        let ranks = &self.target.ranks;
        let place = |call: &Call| match call.is_handed_over(ranks) {
            true if call.receives() => 0,
            true => 2,
            false => 1,
        };
        for body in &self.bodies {
            self.calls[body.calls.clone()].sort_by_key(place);
        }
    }

    /// Plans the receives before each invocation, into buffers at the end of the arena.
    pub(super) fn hand_over(&self, schedule: &[Invocation], arena: &mut Arena) -> Option<Handover> {
        let found = self.handover?;
        let place_bytes = self.landing_bytes();
        let places = found.places as u32;
        let offset = align(arena.bytes);
        let bytes = found.places * place_bytes;
        arena.bytes = offset + bytes;
        arena.transient_lower_bound_bytes += bytes;
        // The invocation of each pass and whether the pass has a body; for a pass without one, the
        // next invocation.
        let mut invocations = Vec::with_capacity(self.passes.passes.len() + 1);
        let mut next = 0;
        for pass in &self.passes.passes {
            let runs = self.body_of(pass.phase, pass.chunk).is_some();
            invocations.push((next, runs));
            next += u32::from(runs);
        }
        invocations.push((next, false));
        let mut before = vec![Vec::new(); schedule.len() + 1];
        for (&(at, _), arrivals) in invocations.iter().zip(&found.before) {
            let arrivals = arrivals.iter().filter_map(|&(pass, place)| {
                let (invocation, runs) = invocations[pass];
                runs.then_some(Arrival { invocation, place: place as u32 })
            });
            before[at as usize].extend(arrivals);
        }
        Some(Handover { offset, place_bytes, places, before })
    }

    /// The largest number of bytes that a body receives.
    fn landing_bytes(&self) -> usize {
        let ranks = &self.target.ranks;
        let bytes = |call: &Call| -> usize {
            let values = call.outputs().iter().map(|output| &self.values[output.value.index()]);
            values.map(|value| value.range.bytes.next_multiple_of(ALIGNMENT_BYTES)).sum()
        };
        let of_body = |calls: &[Call]| -> usize {
            let received = calls.iter().filter(|it| it.is_handed_over(ranks) && it.receives());
            received.map(bytes).sum()
        };
        let bodies = self.bodies.iter().map(|body| of_body(&self.calls[body.calls.clone()]));
        bodies.max().unwrap_or(0)
    }
}
