//! Side streams: GPU calls that overlap with the calls of the main stream, 0.
//!
//! A kernel leaves SMs idle while its last CTAs run, and many kernels have fewer CTAs than the GPU
//! has SMs. Independent calls on different streams fill those gaps. Operands do not change, and
//! neither do the bits of results.

use std::collections::{HashMap, HashSet};

use deepwell_ir::ops::{HostCopy, HostCopyDirection};
use deepwell_ir::{Access, Call, Op, Phase, StreamId, ValueId};

use super::scheduling::EXCHANGES;

/// Side streams of forward and backward passes and of weight copies.
const SIDE_STREAMS: [StreamId; 3] = [2, 3, 4];

/// The stream of weight gradients, which no compute call of the same body reads.
const GRADIENTS: StreamId = 5;

/// The stream of copies from the host to the device.
const FETCHES: StreamId = 6;

/// The stream of copies from the device to the host: the link has both directions at once.
const STORES: StreamId = 7;

/// One more than the largest number of a stream.
const STREAMS: usize = 8;

/// Whether a call uses a link and no SMs: a collective, or a copy to or from the host.
pub(super) fn is_transfer(call: &Call) -> bool {
    matches!(call.op, Op::Collective(_) | Op::HostCopy(_))
}

pub(super) fn is_host_copy(call: &Call) -> bool {
    matches!(call.op, Op::HostCopy(_))
}

/// The stream of a transfer; of other calls the main stream.
fn stream_of_transfer(call: &Call) -> StreamId {
    match &call.op {
        Op::Collective(_) => EXCHANGES,
        Op::HostCopy(HostCopy { direction: HostCopyDirection::ToDevice }) => FETCHES,
        Op::HostCopy(HostCopy { direction: HostCopyDirection::ToHost }) => STORES,
        _ => 0,
    }
}

/// Assigns the calls of a body to streams.
///
/// Weight copies without a workspace rotate over the streams. In a forward or backward pass a call
/// follows the writer of one of its operands on the writer's stream, if the writer is still the
/// stream's last call. Otherwise the call goes to a side stream whose calls have all ended before
/// the last call of the main stream, or to the main stream. In a backward pass, calls whose outputs
/// no later compute call reads go to the stream of weight gradients. Collectives have their own
/// stream, and so have copies from and to the host.
///
/// With `in_turns`, passes use one compute stream: under ZeRO 2 and 3 each layer's gradients and
/// gathered weights reuse the memory of the layer before, so overlapping calls would be waited for.
pub(super) fn spread(calls: &mut [Call], phase: Phase, in_turns: bool) {
    for call in calls.iter_mut() {
        call.stream = stream_of_transfer(call);
    }
    match phase {
        // Copies of masters from the host wait for the link anyway.
        Phase::Weights if !calls.iter().any(is_host_copy) => spread_copies(calls),
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

/// Weight copies depend on master weights alone. In many small copies, launch and drain dominate
/// the time.
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

/// Whether no later compute call reads the outputs of a call: a gradient, which only collectives
/// may read.
fn ends(calls: &[Call]) -> Vec<bool> {
    let mut read: HashSet<ValueId> = HashSet::new();
    let mut ends = vec![false; calls.len()];
    for (call, is_end) in calls.iter().zip(&mut ends).rev() {
        if is_transfer(call) {
            continue;
        }
        *is_end = !call.outputs().iter().any(|output| read.contains(&output.value));
        let reads = call.operands.iter().filter(|operand| operand.access == Access::Read);
        read.extend(reads.map(|operand| operand.value));
    }
    ends
}

/// The number of ended calls of each stream, as far as known. A stream's calls are numbered from 1.
type Clock = [usize; STREAMS];

/// State of the assignment of calls to streams.
#[derive(Default)]
struct Placed {
    /// Clock of the last call of each stream, the call itself included.
    last: [Clock; STREAMS],
    /// Stream and clock of the last writer of each value.
    writers: HashMap<ValueId, (usize, Clock)>,
}

impl Placed {
    fn place(&mut self, call: &mut Call, is_end: bool) {
        let operands = call.operands.iter().map(|operand| operand.value);
        let makers: Vec<(usize, Clock)> =
            operands.filter_map(|value| self.writers.get(&value).copied()).collect();
        if !is_transfer(call) {
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

    /// The stream of a call whose operands were written by `makers`.
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

/// Number of layers whose buffers side streams may keep alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// A layer waits until the side streams have ended the previous layer. For steps that
    /// recompute, where the buffers of a single layer are most of the live memory.
    OneLayer,
    /// Side streams may still run calls of the previous layer, but none of an earlier layer.
    TwoLayers,
}

/// Adds waits so that side streams keep no more than `kept`.
pub(super) fn bound_kept_layers(calls: &[Call], waits: &mut [Vec<usize>], kept: Kept) {
    // The last call of each side stream: now, and when the last layer began.
    let mut last: [Option<usize>; STREAMS] = [None; STREAMS];
    let (mut at_layer, mut waited_for) = (last, last);
    let mut layer = None;
    for (index, call) in calls.iter().enumerate() {
        if is_transfer(call) || call.phase == Phase::Weights {
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
