//! Events where a call of one stream waits for one of another.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use deepwell_ir::{Access, Body, Call, EventId, Recompute, StreamId, Value, ValueId};

use super::side_streams::{self, Kept, is_collective};
use crate::Plan;

/// Who used a value last within a body.
#[derive(Default)]
struct Users {
    writer: Option<usize>,
    /// The last reader on each stream since.
    readers: BTreeMap<StreamId, usize>,
}

/// Puts each call into the stream that `stream_of` names. A call that uses what one of another
/// stream wrote, or writes what one of another stream used, waits for an event of that one. Streams
/// join between bodies.
pub(super) fn assign(calls: &mut [Call], bodies: &[Body], stream_of: &dyn Fn(&Call) -> StreamId) {
    for call in calls.iter_mut() {
        call.stream = stream_of(call);
    }
    connect(calls, bodies, &|calls| vec![Vec::new(); calls.len()]);
}

/// [`assign`] on GPUs: what nothing waits for at once runs beside the rest ([`side_streams`]), and
/// exchanges have a stream, which waits for what computes and is waited for so that as much is kept
/// for them as for one layer, and not for all.
pub(super) fn assign_on_gpu(calls: &mut [Call], bodies: &[Body], values: &[Value], plan: &Plan) {
    let in_turns = plan.has_one_stream();
    let kept = if plan.recompute == Recompute::None { Kept::TwoLayers } else { Kept::OneLayer };
    for body in bodies {
        side_streams::spread(&mut calls[body.calls.clone()], body.phase, in_turns);
    }
    // What it reads makes room for other values.
    let frees = |call: &Call| {
        let mut read = call.operands.iter().filter(|operand| operand.access != Access::Write);
        read.any(|operand| !values[operand.value.index()].memory.is_persistent())
    };
    connect(calls, bodies, &|calls| {
        let mut waits = waits_of_layers(calls, &frees);
        side_streams::bound_kept_layers(calls, &mut waits, kept);
        waits
    });
}

/// What calls wait for, beside what made their operands. An exchange begins behind the last call
/// before it of the stream that computes, so that what it writes takes the place of what is over
/// then. A layer begins when those exchanges are over that free memory and were there before the
/// layer before it began.
fn waits_of_layers(calls: &[Call], frees: &dyn Fn(&Call) -> bool) -> Vec<Vec<usize>> {
    let mut waits = vec![Vec::new(); calls.len()];
    let (mut last_computed, mut last_freeing) = (None, None);
    let (mut layer, mut before_layer) = (None, None);
    for (index, call) in calls.iter().enumerate() {
        if call.stream != 0 && !is_collective(call) {
            continue;
        }
        if is_collective(call) {
            waits[index].extend(last_computed);
            if frees(call) {
                last_freeing = Some(index);
            }
            continue;
        }
        if layer != Some(call.layer) {
            waits[index].extend(before_layer);
            (layer, before_layer) = (Some(call.layer), last_freeing);
        }
        last_computed = Some(index);
    }
    waits
}

/// Events between calls of different streams. `others`: what calls of a body wait for whatever they
/// write.
fn connect(calls: &mut [Call], bodies: &[Body], others: &dyn Fn(&[Call]) -> Vec<Vec<usize>>) {
    for body in bodies {
        let calls = &mut calls[body.calls.clone()];
        let waits = waits(calls, &others(calls));
        let recorded: BTreeSet<usize> = waits.iter().flatten().copied().collect();
        let events: HashMap<usize, EventId> = recorded.into_iter().zip(0..).collect();
        for (index, call) in calls.iter_mut().enumerate() {
            call.records = events.get(&index).copied();
            call.waits = waits[index].iter().map(|other| events[other]).collect();
        }
    }
}

/// The calls that each call waits for: of each other stream the last one, and only where no call
/// before it on its own stream has waited for that one or a later one. `others`: those that it
/// waits for whatever they write.
fn waits(calls: &[Call], others: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut users: HashMap<ValueId, Users> = HashMap::new();
    let mut seen: HashMap<(StreamId, StreamId), usize> = HashMap::new();
    let mut waits = Vec::with_capacity(calls.len());
    for (index, call) in calls.iter().enumerate() {
        let mut needed: BTreeMap<StreamId, usize> = BTreeMap::new();
        for &other in &others[index] {
            let stream = calls[other].stream;
            if stream != call.stream {
                let latest = needed.entry(stream).or_insert(other);
                *latest = other.max(*latest);
            }
        }
        for operand in &call.operands {
            let users = users.entry(operand.value).or_default();
            let readers = users.readers.values().filter(|_| operand.access != Access::Read);
            for &other in users.writer.iter().chain(readers) {
                let stream = calls[other].stream;
                if stream != call.stream {
                    let latest = needed.entry(stream).or_insert(other);
                    *latest = other.max(*latest);
                }
            }
        }
        needed.retain(|&stream, other| {
            let waited = seen.get(&(call.stream, stream));
            waited.is_none_or(|waited| waited < other)
        });
        seen.extend(needed.iter().map(|(&stream, &other)| ((call.stream, stream), other)));
        for operand in &call.operands {
            let users = users.entry(operand.value).or_default();
            if operand.access == Access::Read {
                users.readers.insert(call.stream, index);
            } else {
                *users = Users { writer: Some(index), readers: BTreeMap::new() };
            }
        }
        waits.push(needed.into_values().collect());
    }
    waits
}
