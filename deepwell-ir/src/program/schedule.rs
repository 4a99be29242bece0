//! Bodies of calls, and the order in which a step invokes them.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Phase;

/// Index of a body in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BodyId(pub u32);

impl BodyId {
    /// As an index into [`Program::bodies`](crate::Program::bodies).
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Calls that run together: the forward pass of a micro-batch, for example.
///
/// All streams join where a body begins and where it ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Body {
    /// When its calls run.
    pub phase: Phase,
    /// Of which of the rank's chunks of layers; 0 where it has one.
    #[serde(default, skip_serializing_if = "is_first_chunk")]
    pub chunk: u32,
    /// Its calls, as indices into [`Program::calls`](crate::Program::calls).
    pub calls: Range<usize>,
}

fn is_first_chunk(chunk: &u32) -> bool {
    *chunk == 0
}

/// What one run of a body differs in from another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance {
    /// Which copy of the activations it uses.
    pub slot: u32,
    /// Whether it is the first of its step, which overwrites accumulators where others add.
    pub is_first: bool,
    /// Whether it is the last of its step, which has sums of what all of them have added up.
    pub is_last: bool,
    /// Whether it is outside of a step: copies of weights that were loaded, all of them.
    pub is_alone: bool,
}

impl Instance {
    /// The only run in its step.
    pub const ONLY: Instance = Instance { slot: 0, is_first: true, is_last: true, is_alone: false };
    /// The run of a body alone, outside of a step.
    pub const ALONE: Instance = Instance { is_alone: true, ..Instance::ONLY };
}

/// One run of a body within a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invocation {
    /// Which body.
    pub body: BodyId,
    /// Micro-batch, counted from 0.
    pub micro_batch: u32,
    /// Which copy of the activations.
    pub slot: u32,
}

/// A pass of one micro-batch through a chunk of layers, in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slotted {
    /// [`Phase::Forward`], [`Phase::Backward`] or [`Phase::WeightGradients`].
    pub phase: Phase,
    /// Which of the rank's chunks of layers, counted from 0.
    pub chunk: u32,
    /// Micro-batch, counted from 0.
    pub micro_batch: u32,
    /// Which copy of the activations.
    pub slot: u32,
}

/// The order of forward and backward passes on one rank, and how many of them have activations in
/// flight at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Copies of the activations that a backward pass reads.
    pub slots: u32,
    /// Passes in the order they run.
    pub passes: Vec<Slotted>,
}

impl Schedule {
    /// Whether gradients of weights are passes of their own.
    pub fn defers_weight_gradients(&self) -> bool {
        self.passes.iter().any(|pass| pass.phase == Phase::WeightGradients)
    }

    /// F B F B …: each micro-batch whole, over one slot.
    pub fn gradient_accumulation(micro_batches: usize) -> Schedule {
        Schedule::one_forward_one_backward(micro_batches, 1, 0)
    }

    /// The schedule of pipeline stage `stage` of `stages` that PipeDream-Flush and Megatron-LM
    /// call 1F1B: `stages - stage - 1` forward passes to warm up, then one forward and one
    /// backward in turn, then the backward passes that are left. A stage holds the activations of
    /// at most `stages - stage` micro-batches.
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
