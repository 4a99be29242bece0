//! Which calls run beside each other: streams, and events where one waits for another.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use deepwell_ir::{Access, Body, Call, EventId, StreamId, ValueId};

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
    for body in bodies {
        let calls = &mut calls[body.calls.clone()];
        for call in calls.iter_mut() {
            call.stream = stream_of(call);
        }
        let waits = waits(calls);
        let recorded: BTreeSet<usize> = waits.iter().flatten().copied().collect();
        let events: HashMap<usize, EventId> = recorded.into_iter().zip(0..).collect();
        for (index, call) in calls.iter_mut().enumerate() {
            call.records = events.get(&index).copied();
            call.waits = waits[index].iter().map(|other| events[other]).collect();
        }
    }
}

/// The calls that each call waits for: of each other stream the last one, and only where no call
/// before it on its own stream has waited for that one or a later one.
fn waits(calls: &[Call]) -> Vec<Vec<usize>> {
    let mut users: HashMap<ValueId, Users> = HashMap::new();
    let mut seen: HashMap<(StreamId, StreamId), usize> = HashMap::new();
    let mut waits = Vec::with_capacity(calls.len());
    for (index, call) in calls.iter().enumerate() {
        let mut needed: BTreeMap<StreamId, usize> = BTreeMap::new();
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
