//! Schedules, passes and the ops of a stage.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::PlanError;

/// Order of forward and backward passes on the stages of a pipeline.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum PipelineSchedule {
    #[default]
    /// One forward, one backward (PipeDream-flush); interleaved if a stage has several chunks.
    OneFOneB,
    /// Zero bubble with the memory of 1F1B: weight gradients fill the bubble at the end.
    ZbH1,
    /// Zero bubble with twice the memory: additional forward passes fill the bubble at the start.
    ZbH2,
}

impl PipelineSchedule {
    /// All schedules.
    pub const ALL: [PipelineSchedule; 3] =
        [PipelineSchedule::OneFOneB, PipelineSchedule::ZbH1, PipelineSchedule::ZbH2];

    /// Whether weight gradients have passes of their own.
    pub const fn defers_weight_gradients(self) -> bool {
        matches!(self, PipelineSchedule::ZbH1 | PipelineSchedule::ZbH2)
    }

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            PipelineSchedule::OneFOneB => "1f1b",
            PipelineSchedule::ZbH1 => "zb-h1",
            PipelineSchedule::ZbH2 => "zb-h2",
        }
    }
}

impl fmt::Display for PipelineSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PipelineSchedule {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<PipelineSchedule, PlanError> {
        let found = PipelineSchedule::ALL.into_iter().find(|schedule| schedule.name() == text);
        found.ok_or_else(|| PlanError::Request {
            what: "schedule",
            expected: PipelineSchedule::ALL.map(PipelineSchedule::name).join(", "),
            got: format!("`{text}`"),
        })
    }
}

/// Computation of a pipeline op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Pass {
    /// F: the forward pass.
    Forward,
    /// B: gradients of the input, needed by the previous stage.
    Dgrad,
    /// W: gradients of the weights, needed by no other pass.
    Wgrad,
    /// B and W as one op.
    Backward,
}

/// One op of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PipelineOp {
    /// Computation of the op.
    pub pass: Pass,
    /// Chunk of the stage, from 0.
    pub chunk: u32,
    /// Micro-batch, from 0.
    pub micro_batch: u32,
}
