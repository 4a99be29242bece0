//! Names for how ranks share a model, one degree around another: `tensor(2, data(4, 3))`.
#![allow(dead_code, reason = "not every test has every degree")]

use deepwell_plan::schedule::PipelineSchedule;
use deepwell_trainer::Parallel;

pub(crate) fn single() -> Parallel {
    Parallel::default()
}

/// Ranks that share the batch, in a stage of ZeRO.
pub(crate) fn data(data: usize, zero: u8) -> Parallel {
    Parallel { zero, ..Parallel::data(data) }
}

/// Ranks that split each sequence.
pub(crate) fn context(context: usize, plan: Parallel) -> Parallel {
    Parallel { context, data: context * plan.data, ..plan }
}

pub(crate) fn tensor(tensor: usize, plan: Parallel) -> Parallel {
    Parallel { tensor, ..plan }
}

pub(crate) fn stages(pipeline: usize, plan: Parallel) -> Parallel {
    Parallel { pipeline, ..plan }
}

pub(crate) fn expert(expert: usize, plan: Parallel) -> Parallel {
    Parallel { expert, ..plan }
}

pub(crate) fn interleaved(plan: Parallel) -> Parallel {
    Parallel { chunks: 2, ..plan }
}

pub(crate) fn zero_bubble(plan: Parallel) -> Parallel {
    Parallel { schedule: PipelineSchedule::ZbH1, ..plan }
}
