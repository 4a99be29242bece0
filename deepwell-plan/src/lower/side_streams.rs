//! Which calls of a GPU run beside those of the stream that computes, 0.
//!
//! A kernel leaves SMs idle while its last CTAs run, and many have fewer CTAs than there are SMs.
//! Calls that do not depend on each other fill those gaps where they are on different streams. Each
//! computes what it did of the same operands: bits do not change.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{Access, Call, Op, Phase, StreamId, ValueId};

use super::EXCHANGES;

/// Streams of calls that run beside those of the stream that computes.
const SIDE_STREAMS: [StreamId; 3] = [2, 3, 4];

/// The stream of gradients of weights, which nothing that computes reads in their body.
const GRADIENTS: StreamId = 5;

/// One more than the largest number of a stream.
const STREAMS: usize = 6;

pub(super) fn is_collective(call: &Call) -> bool {
    matches!(call.op, Op::Collective(_))
}

/// Puts the calls of a body into streams.
///
/// Of copies of weights those that need no scratch take turns. In a forward or backward pass a
/// call follows the one that made an operand of it, where nothing has followed that one yet; else
/// it goes to a side stream whose calls are over. Exchanges have their own stream.
///
/// Where `in_turns`, passes have one stream: with ZeRO 2 and 3 each layer's gradients and gathered
/// weights make room for those of the next, which waits for what stands beside it.
pub(super) fn spread(calls: &mut [Call], phase: Phase, in_turns: bool) {
    for call in calls.iter_mut() {
        call.stream = if is_collective(call) { EXCHANGES } else { 0 };
    }
    match phase {
        Phase::Weights => spread_copies(calls),
        Phase::Forward | Phase::Backward if !in_turns => {
            let ends = match phase {
                Phase::Backward => ends(calls),
                _ => vec![false; calls.len()],
            };
            let mut placed = Placed::default();
            for (call, is_end) in calls.iter_mut().zip(ends) {
                placed.place(call, is_end);
            }
        }
        _ => {}
    }
}

/// Copies of weights depend on nothing but masters, and many are so small that starting and ending
/// takes most of their time.
fn spread_copies(calls: &mut [Call]) {
    let copies = calls.iter_mut().filter(|call| {
        let is_copy = matches!(call.op, Op::Quantize(_) | Op::Cast(_));
        is_copy && call.choice.workspace_bytes == 0
    });
    let streams = [0].into_iter().chain(SIDE_STREAMS).cycle();
    for (call, stream) in copies.zip(streams) {
        call.stream = stream;
    }
}

/// Whether no later call that computes reads what a call writes: a gradient, which exchanges may
/// read.
fn ends(calls: &[Call]) -> Vec<bool> {
    let mut read: HashSet<ValueId> = HashSet::new();
    let mut ends = vec![false; calls.len()];
    for (call, is_end) in calls.iter().zip(&mut ends).rev() {
        if is_collective(call) {
            continue;
        }
        *is_end = !call.outputs().iter().any(|output| read.contains(&output.value));
        let reads = call.operands.iter().filter(|operand| operand.access == Access::Read);
        read.extend(reads.map(|operand| operand.value));
    }
    ends
}

/// Of each stream how many of its calls are over: a call is known by its stream and its place
/// there, from 1.
type Clock = [usize; STREAMS];

/// Calls that have streams.
#[derive(Default)]
struct Placed {
    /// Of the last call of each stream, itself counted.
    last: [Clock; STREAMS],
    /// The stream of who wrote a value last, and its clock.
    writers: HashMap<ValueId, (usize, Clock)>,
}

impl Placed {
    fn place(&mut self, call: &mut Call, is_end: bool) {
        let operands = call.operands.iter().map(|operand| operand.value);
        let makers: Vec<(usize, Clock)> =
            operands.filter_map(|value| self.writers.get(&value).copied()).collect();
        if !is_collective(call) {
            call.stream = if is_end { GRADIENTS } else { self.stream_after(&makers) };
        }
        let stream = call.stream as usize;
        let mut clock = self.last[stream];
        for (_, maker) in &makers {
            clock = std::array::from_fn(|at| clock[at].max(maker[at]));
        }
        clock[stream] = self.last[stream][stream] + 1;
        self.last[stream] = clock;
        let written = call.operands.iter().filter(|operand| operand.access != Access::Read);
        self.writers.extend(written.map(|operand| (operand.value, (stream, clock))));
    }

    /// The stream of a call whose operands `makers` made.
    fn stream_after(&self, makers: &[(usize, Clock)]) -> StreamId {
        let is_over = |side: &StreamId| {
            let side = *side as usize;
            self.last[0][side] >= self.last[side][side]
        };
        let continued = |stream: &StreamId| {
            let stream = *stream as usize;
            let end = self.last[stream][stream];
            makers.iter().any(|(of, clock)| *of == stream && clock[stream] == end)
        };
        let mut computing = [0].into_iter().chain(SIDE_STREAMS);
        computing
            .find(continued)
            .or_else(|| SIDE_STREAMS.into_iter().find(is_over).filter(|_| !makers.is_empty()))
            .unwrap_or(0)
    }
}

/// How many layers wait at most for calls that run beside them: what those use is kept as long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// A layer begins when the side streams are done with the layer before it. For steps that
    /// recompute, where what a layer uses is most of what is alive.
    OneLayer,
    /// Side streams may still be busy with the layer before, with no earlier one.
    TwoLayers,
}

/// Adds to what calls wait for so that side streams keep no more than `kept`.
pub(super) fn bound_kept_layers(calls: &[Call], waits: &mut [Vec<usize>], kept: Kept) {
    // The last call of each side stream: now, and when the last layer began.
    let mut last: [Option<usize>; STREAMS] = [None; STREAMS];
    let (mut at_layer, mut waited_for) = (last, last);
    let mut layer = None;
    for (index, call) in calls.iter().enumerate() {
        if is_collective(call) || call.phase == Phase::Weights {
            continue;
        }
        if layer != Some(call.layer) {
            waited_for = if kept == Kept::OneLayer { last } else { at_layer };
            (layer, at_layer) = (Some(call.layer), last);
        }
        match call.stream {
            0 => waits[index].extend(std::mem::take(&mut waited_for).iter().flatten()),
            side => last[side as usize] = Some(index),
        }
    }
}
