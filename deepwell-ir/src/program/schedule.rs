//! Bodies of calls, and the order in which a step invokes them.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Phase;

/// Index of a body in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BodyId(pub u32);

impl BodyId {
    /// The id as an index into [`Program::bodies`](crate::Program::bodies).
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Calls that run together, for example the forward pass of a micro-batch.
///
/// All streams join at the beginning and at the end of a body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Body {
    /// Phase of the calls.
    pub phase: Phase,
    /// Chunk of layers on this rank; 0 if the rank has a single chunk.
    #[serde(default, skip_serializing_if = "is_first_chunk")]
    pub chunk: u32,
    /// Calls of the body, as indices into [`Program::calls`](crate::Program::calls).
    pub calls: Range<usize>,
}

fn is_first_chunk(chunk: &u32) -> bool {
    *chunk == 0
}

/// Properties in which runs of a body differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance {
    /// Activation slot.
    pub slot: u32,
    /// Whether this is the first run of a step, which overwrites accumulators instead of adding.
    pub is_first: bool,
    /// Whether this is the last run of a step, which sums accumulated gradients over ranks.
    pub is_last: bool,
    /// Whether the run is outside of a step: makes all compute copies after weights are loaded.
    pub is_alone: bool,
}

impl Instance {
    /// The only run in a step.
    pub const ONLY: Instance = Instance { slot: 0, is_first: true, is_last: true, is_alone: false };
    /// A run outside of a step.
    pub const ALONE: Instance = Instance { is_alone: true, ..Instance::ONLY };
}

/// One run of a body within a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invocation {
    /// The body.
    pub body: BodyId,
    /// Micro-batch, counted from 0.
    pub micro_batch: u32,
    /// Activation slot.
    pub slot: u32,
}

/// A pass of one micro-batch through a chunk of layers, in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slotted {
    /// [`Phase::Forward`], [`Phase::Backward`] or [`Phase::WeightGradients`].
    pub phase: Phase,
    /// Chunk of layers on this rank, counted from 0.
    pub chunk: u32,
    /// Micro-batch, counted from 0.
    pub micro_batch: u32,
    /// Activation slot.
    pub slot: u32,
}

/// Order of forward and backward passes on one rank, and the number of passes with activations in
/// flight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Number of activation slots.
    pub slots: u32,
    /// Passes in execution order.
    pub passes: Vec<Slotted>,
}

impl Schedule {
    /// Whether weight gradients are separate passes.
    pub fn defers_weight_gradients(&self) -> bool {
        self.passes.iter().any(|pass| pass.phase == Phase::WeightGradients)
    }

    /// F B F B …: forward and backward of each micro-batch in turn, in a single slot.
    pub fn gradient_accumulation(micro_batches: usize) -> Schedule {
        Schedule::one_forward_one_backward(micro_batches, 1, 0)
    }

    /// The 1F1B schedule (PipeDream-Flush, Megatron-LM) for pipeline stage `stage` of `stages`:
    /// `stages - stage - 1` warm-up forward passes, then forward and backward passes alternating,
    /// then the remaining backward passes. A stage holds the activations of at most
    /// `stages - stage` micro-batches.
    ///
    /// ```
    /// use deepwell_ir::Schedule;
    ///
    /// // The first of two stages: its second forward runs before the first backward.
    /// let schedule = Schedule::one_forward_one_backward(3, 2, 0);
    /// let passes: Vec<String> = schedule
    ///     .passes
    ///     .iter()
    ///     .map(|pass| format!("{} {} in {}", pass.phase, pass.micro_batch, pass.slot))
    ///     .collect();
    /// assert_eq!(schedule.slots, 2);
    /// assert_eq!(
    ///     passes.join(", "),
    ///     "forward 0 in 0, forward 1 in 1, backward 0 in 0, \
    ///      forward 2 in 0, backward 1 in 1, backward 2 in 0"
    /// );
    /// ```
    pub fn one_forward_one_backward(micro_batches: usize, stages: usize, stage: usize) -> Schedule {
        let slots = stages.saturating_sub(stage).min(micro_batches).max(1) as u32;
        let pass = |phase, micro_batch: u32| {
            let slot = micro_batch % slots;
            Slotted { phase, chunk: 0, micro_batch, slot }
        };
        let mut passes = Vec::with_capacity(2 * micro_batches);
        for micro_batch in 0..micro_batches as u32 {
            passes.push(pass(Phase::Forward, micro_batch));
            if let Some(oldest) = (micro_batch + 1).checked_sub(slots) {
                passes.push(pass(Phase::Backward, oldest));
            }
        }
        let drained = (micro_batches as u32 + 1).saturating_sub(slots);
        passes.extend((drained..micro_batches as u32).map(|m| pass(Phase::Backward, m)));
        Schedule { slots, passes }
    }
}
