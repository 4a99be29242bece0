//! Pipeline schedules: the order of each stage's ops, and an event-driven simulation.
//!
//! A schedule is data: a list of [`PipelineOp`] for each stage. [`simulate`] runs all lists
//! together: an op starts when its stage is free and its input has arrived, P2P latency included.
//! The times of ops are given by the caller.
//!
//! ```
//! use deepwell_lower::schedule::{OpTimes, PipelineSchedule, orders, simulate};
//!
//! let times = OpTimes { forward: 1.0, dgrad: 1.0, wgrad: 1.0, p2p: 0.0 };
//! let orders = orders(PipelineSchedule::OneFOneB, 4, 8, 1)?;
//! let run = simulate(&orders, 1, &vec![times; 4])?;
//! // (p - 1) (F + B + W) of idle time beside m (F + B + W) of work.
//! assert!((run.bubble_rate() - 3.0 / 11.0).abs() < 1e-12);
//! # Ok::<(), deepwell_lower::PlanError>(())
//! ```

mod handover;
mod orders;
mod simulate;
mod timeline;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use handover::{StageHandover, handovers};
pub use orders::{in_flight, interleaving_group, orders};
pub use simulate::{OpRun, OpTimes, PipelineRun, simulate};

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
