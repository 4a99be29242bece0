//! Checks that received tensors go to a free place and are read once.

use super::ByteRange;
use crate::{Accumulate, BodyId, Program};

pub(super) fn check(program: &Program) -> Result<(), String> {
    let Some(handover) = &program.handover else { return Ok(()) };
    calls(program)?;
    let expected = program.schedule.len() + 1;
    if handover.before.len() != expected {
        let got = handover.before.len();
        return Err(format!("stages meet {got} times, expected {expected}: around each body"));
    }
    places_apart(program, handover.range())?;
    let mut held: Vec<Option<u32>> = vec![None; handover.places as usize];
    for (index, arrivals) in handover.before.iter().enumerate() {
        for arrival in arrivals {
            let of = arrival.invocation;
            let Some(receiver) = program.schedule.get(of as usize) else {
                return Err(format!("something arrives for invocation {of}, which there is not"));
            };
            if (of as usize) < index || held.contains(&Some(of)) {
                return Err(format!("invocation {of} receives twice, or when it is over"));
            }
            let Some(place) = held.get_mut(arrival.place as usize) else {
                let (place, places) = (arrival.place, handover.places);
                return Err(format!("something lands in place {place}, there are {places}"));
            };
            if let Some(other) = place.replace(of) {
                let place = arrival.place;
                return Err(format!(
                    "what invocation {of} receives lands in place {place} on what {other} reads"
                ));
            }
            let bytes = program.landing_bytes(receiver.body);
            if bytes > handover.place_bytes {
                let place = handover.place_bytes;
                return Err(format!("{bytes} bytes land in a place of {place}"));
            }
        }
        let Some(next) = program.schedule.get(index) else { continue };
        let place = held.iter_mut().find(|held| **held == Some(index as u32));
        match place {
            Some(place) => *place = None,
            None if program.handed_over(next.body).0.is_empty() => {}
            None => {
                let phase = program.bodies[next.body.index()].phase;
                let micro_batch = next.micro_batch;
                return Err(format!(
                    "{phase} of micro-batch {micro_batch} begins before it has received anything"
                ));
            }
        }
    }
    match held.iter().flatten().next() {
        Some(of) => Err(format!("what invocation {of} receives is never read")),
        None => Ok(()),
    }
}

/// Checks that receives come first and sends last in a body, in every run.
fn calls(program: &Program) -> Result<(), String> {
    for body in (0..program.bodies.len()).map(|body| BodyId(body as u32)) {
        let (received, sent) = program.handed_over(body);
        let calls = program.calls_of(body);
        let inner = &calls[received.end..sent.start.max(received.end)];
        if let Some(call) = inner.iter().find(|call| program.is_handed_over(call)) {
            let name = &call.name;
            return Err(format!(
                "call `{name}` stands among others that compute: expected it first, \
                 or, where it sends, last"
            ));
        }
        let mut handed_over = calls.iter().filter(|call| program.is_handed_over(call));
        let differs = |call: &&crate::Call| call.last_only || call.accumulate != Accumulate::Never;
        if let Some(call) = handed_over.find(differs) {
            return Err(format!("call `{}` does not run alike in all micro-batches", call.name));
        }
    }
    Ok(())
}

/// Checks that places do not overlap with any other memory of the program.
fn places_apart(program: &Program, places: ByteRange) -> Result<(), String> {
    let arena = &program.arena;
    let is_aligned = places.offset.is_multiple_of(super::ALIGNMENT_BYTES);
    if places.offset < arena.transient_offset || places.end() > arena.bytes || !is_aligned {
        let (offset, end) = (places.offset, places.end());
        return Err(format!("what stages receive lands in {offset}..{end}, outside of the arena"));
    }
    let last_slot = program.slots.saturating_sub(1);
    let whole = |value: &crate::Value| ByteRange {
        bytes: value.range_in(last_slot).end() - value.range.offset,
        ..value.range
    };
    let values = program.values.iter().map(|value| (&value.name, whole(value)));
    let workspaces = program.calls.iter().map(|call| (&call.name, call.workspace));
    match values.chain(workspaces).find(|(_, range)| range.overlaps(&places)) {
        Some((name, _)) => Err(format!("`{name}` lies where what stages receive lands")),
        None => Ok(()),
    }
}
