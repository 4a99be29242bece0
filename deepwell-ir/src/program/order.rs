//! Happens-before order of the calls of a program.
//!
//! Calls of one stream run in order; a call waits for its events; all streams join between two
//! bodies. No other order exists. The order is stored as one vector clock per call: the number of
//! calls of each stream that are complete when the call begins, itself included.

use std::collections::{BTreeMap, HashMap};

use super::{Body, Call, EventId, StreamId};

/// Happens-before order of the calls of a program, one body after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Stream of each call, numbered from 0.
    stream: Vec<usize>,
    /// Calls of each stream, by index.
    of_stream: Vec<Vec<usize>>,
    /// Position of each call in its stream, from 1.
    place: Vec<usize>,
    /// `[call][stream]`.
    clocks: Vec<usize>,
}

impl Order {
    /// Computes the order of `calls`, which `bodies` must cover.
    ///
    /// # Errors
    /// A call outside all bodies, or an event that is waited for before the same body records it.
    pub fn of(calls: &[Call], bodies: &[Body]) -> Result<Order, String> {
        let mut numbers: BTreeMap<StreamId, usize> =
            calls.iter().map(|call| (call.stream, 0)).collect();
        for (number, (_, slot)) in numbers.iter_mut().enumerate() {
            *slot = number;
        }
        let streams = numbers.len();
        let mut order = Order {
            stream: Vec::with_capacity(calls.len()),
            of_stream: vec![Vec::new(); streams],
            place: Vec::with_capacity(calls.len()),
            clocks: Vec::with_capacity(calls.len() * streams),
        };
        let mut now = vec![vec![0; streams]; streams];
        let mut next = 0;
        for body in bodies {
            if body.calls.start != next || body.calls.end < next || body.calls.end > calls.len() {
                return Err(format!(
                    "the body of {} has calls {}..{}, expected them to begin at {next} and to \
                     end at {} at most",
                    body.phase,
                    body.calls.start,
                    body.calls.end,
                    calls.len()
                ));
            }
            next = body.calls.end;
            order.join(&mut now);
            let mut recorded: HashMap<EventId, Vec<usize>> = HashMap::new();
            for (index, call) in body.calls.clone().zip(&calls[body.calls.clone()]) {
                let stream = numbers[&call.stream];
                let mut clock = now[stream].clone();
                for event in &call.waits {
                    let Some(other) = recorded.get(event) else {
                        return Err(format!(
                            "call `{}` waits for event {event}, which no call before it in its \
                             body records",
                            call.name
                        ));
                    };
                    merge(&mut clock, other);
                }
                clock[stream] += 1;
                order.stream.push(stream);
                order.place.push(clock[stream]);
                order.of_stream[stream].push(index);
                order.clocks.extend_from_slice(&clock);
                if let Some(event) = call.records {
                    recorded.insert(event, clock.clone());
                }
                now[stream] = clock;
            }
        }
        if next != calls.len() {
            return Err(format!("call `{}` is in no body", calls[next].name));
        }
        Ok(order)
    }

    /// Makes all streams wait for one another.
    fn join(&self, now: &mut [Vec<usize>]) {
        let all: Vec<usize> = self.of_stream.iter().map(Vec::len).collect();
        for clock in now {
            clock.copy_from_slice(&all);
        }
    }

    /// Number of streams.
    pub fn streams(&self) -> usize {
        self.of_stream.len()
    }

    /// Number of the stream of a call, from 0.
    pub fn stream(&self, call: usize) -> usize {
        self.stream[call]
    }

    /// Whether call `before` is complete when call `after` begins.
    pub fn is_before(&self, before: usize, after: usize) -> bool {
        before != after && self.clock(after)[self.stream[before]] >= self.place[before]
    }

    /// Last call in issue order that may overlap with `call`; `call` itself if every later call
    /// waits for it. Memory of `call` is free for all calls after the returned one.
    pub fn last_beside(&self, call: usize) -> usize {
        let own = self.stream[call];
        self.of_stream
            .iter()
            .filter_map(|calls| {
                // Clocks are monotonic along a stream.
                let beside = calls.partition_point(|&other| {
                    other == call || self.clock(other)[own] < self.place[call]
                });
                beside.checked_sub(1).map(|last| calls[last])
            })
            .fold(call, usize::max)
    }

    fn clock(&self, call: usize) -> &[usize] {
        &self.clocks[call * self.streams()..][..self.streams()]
    }
}

fn merge(clock: &mut [usize], other: &[usize]) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}
