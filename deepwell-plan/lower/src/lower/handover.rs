//! Receives and sends of a pipeline stage between its bodies.

use deepwell_ir::{ALIGNMENT_BYTES, Arrival, Body, Call, Handover, Program, Ranks, Schedule};

use crate::arena::align;
use crate::schedule::StageHandover;

/// Moves the receives of each body to the begin and the sends to the end, for stages that
/// communicate between bodies: no call may run before a receive or after a send.
pub(super) fn receive_first_and_send_last(calls: &mut [Call], bodies: &[Body], ranks: &Ranks) {
    let place = |call: &Call| match call.is_handed_over(ranks) {
        true if call.receives() => 0,
        true => 2,
        false => 1,
    };
    for body in bodies {
        calls[body.calls.clone()].sort_by_key(place);
    }
}

/// Plans the receives before each invocation, into buffers at the end of the arena.
pub(super) fn hand_over(program: &mut Program, passes: &Schedule, stage: &StageHandover) {
    let place_bytes = landing_bytes(program);
    let offset = align(program.arena.bytes);
    let bytes = stage.places * place_bytes;
    program.arena.bytes = offset + bytes;
    program.arena.transient_lower_bound_bytes += bytes;
    // The invocation of each pass and whether the pass has a body; for a pass without one, the next
    // invocation.
    let mut invocations = Vec::with_capacity(passes.passes.len() + 1);
    let mut next = 0;
    for pass in &passes.passes {
        let is_body = |body: &Body| (body.phase, body.chunk) == (pass.phase, pass.chunk);
        let runs = program.bodies.iter().any(is_body);
        invocations.push((next, runs));
        next += u32::from(runs);
    }
    invocations.push((next, false));
    let mut before = vec![Vec::new(); program.schedule.len() + 1];
    for (&(at, _), arrivals) in invocations.iter().zip(&stage.before) {
        let arrivals = arrivals.iter().filter_map(|&(pass, place)| {
            let (invocation, runs) = invocations[pass];
            runs.then_some(Arrival { invocation, place: place as u32 })
        });
        before[at as usize].extend(arrivals);
    }
    let places = stage.places as u32;
    program.handover = Some(Handover { offset, place_bytes, places, before });
}

/// The largest number of bytes that a body receives.
fn landing_bytes(program: &Program) -> usize {
    let ranks = &program.target.ranks;
    let bytes = |call: &Call| -> usize {
        let values = call.outputs().iter().map(|output| program.value(output.value));
        values.map(|value| value.range.bytes.next_multiple_of(ALIGNMENT_BYTES)).sum()
    };
    let of_body = |calls: &[Call]| -> usize {
        let received = calls.iter().filter(|it| it.is_handed_over(ranks) && it.receives());
        received.map(bytes).sum()
    };
    let bodies = program.bodies.iter().map(|body| of_body(&program.calls[body.calls.clone()]));
    bodies.max().unwrap_or(0)
}
