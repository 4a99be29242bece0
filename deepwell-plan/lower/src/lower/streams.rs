//! Events between calls of different streams.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use deepwell_ir::{Access, Body, Call, EventId, Phase, Recompute, StreamId, Value, ValueId};

use super::side_streams::{self, Kept, is_host_copy, is_transfer};
use crate::Plan;

/// The last writer and readers of a value within a body.
#[derive(Default)]
struct Users {
    writer: Option<usize>,
    /// The last reader on each stream since the last write.
    readers: BTreeMap<StreamId, usize>,
}

/// Assigns each call to the stream that `stream_of` names. A call waits for an event of another
/// stream's call if that call wrote a value which the first call uses, or used a value which the
/// first call writes. All streams join at the end of a body.
pub(super) fn assign(calls: &mut [Call], bodies: &[Body], stream_of: &dyn Fn(&Call) -> StreamId) {
    for call in calls.iter_mut() {
        call.stream = stream_of(call);
    }
    connect(calls, bodies, &|calls| vec![Vec::new(); calls.len()]);
}

/// [`assign`] on GPUs: independent calls go to side streams ([`side_streams`]), collectives to
/// their own stream. Additional waits limit the buffers kept alive for collectives to one layer's.
pub(super) fn assign_on_gpu(calls: &mut [Call], bodies: &[Body], values: &[Value], plan: &Plan) {
    let in_turns = plan.has_one_stream();
    let kept = if plan.recompute == Recompute::None { Kept::TwoLayers } else { Kept::OneLayer };
    for body in bodies {
        side_streams::spread(&mut calls[body.calls.clone()], body.phase, in_turns);
    }
    // Freeing: a value within a step ends with its last reader.
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

/// Calls between which the buffers of transfers are freed.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// The calls of a layer.
    Layer(Option<u32>),
    /// A single call.
    Call(usize),
}

/// Waits in addition to those for operands. A transfer waits for the last compute call issued
/// before it, so that its outputs can reuse memory freed by then. A layer waits for the
/// memory-freeing transfers that were issued before the previous layer began. Outside of layers,
/// calls with copies from the host are as many layers.
fn waits_of_layers(calls: &[Call], frees: &dyn Fn(&Call) -> bool) -> Vec<Vec<usize>> {
    let mut waits = vec![Vec::new(); calls.len()];
    let (mut last_computed, mut last_freeing) = (None, None);
    let (mut layer, mut before_layer) = (None, None);
    let has_copies = calls.iter().any(is_host_copy);
    let in_pass = |call: &Call| !matches!(call.phase, Phase::Optimizer | Phase::Weights);
    for (index, call) in calls.iter().enumerate() {
        if call.stream != 0 && !is_transfer(call) {
            continue;
        }
        if is_transfer(call) {
            waits[index].extend(last_computed);
            if frees(call) {
                last_freeing = Some(index);
            }
            continue;
        }
        let place = match has_copies && !in_pass(call) {
            true => Place::Call(index),
            false => Place::Layer(call.layer),
        };
        if layer != Some(place) {
            waits[index].extend(before_layer);
            (layer, before_layer) = (Some(place), last_freeing);
        }
        last_computed = Some(index);
    }
    waits
}

/// Adds events between calls of different streams. `others` returns the waits of a body's calls not
/// derived from operands.
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

/// The waits of each call: for the last needed call of every other stream, unless an earlier call
/// of the same stream has already waited for that call or a later call. `others`: waits not derived
/// from operands.
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
