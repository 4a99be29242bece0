//! Steps in flight, and their results.

use std::collections::VecDeque;
use std::sync::Arc;

use deepwell_ir::Phase;
use deepwell_kernels::Readback;
use serde::{Deserialize, Serialize};

use super::gemms::Statistics;
use super::products::{ProductSums, Products};
use super::routing::{ExpertLoad, LoadCounters};
use super::{OperandStats, RunCounts};

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepOutcome {
    /// Mean loss over the tokens of the step, nats.
    pub loss: f32,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f32,
    /// Whether the update was skipped because the norm was not finite.
    pub skipped: bool,
}

/// A step in flight.
#[derive(Debug)]
pub struct PendingStep {
    pub(super) number: u64,
}

/// Device time of a step, by the device's clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Seconds since the step's first inputs were on the device.
    pub since_staged_s: f64,
    /// From the end of the step before, in seconds; `None` for the first.
    pub since_readback_s: Option<f64>,
}

/// A readback in flight.
#[derive(Debug)]
pub(super) struct PendingReadback {
    pub(super) step: u64,
    pub(super) readback: Readback,
    /// The pass of the counters.
    pub(super) pass: (u32, Phase, u32),
    pub(super) statistics: Statistics,
    pub(super) products: Products,
    pub(super) loads: Arc<[LoadCounters]>,
    /// Whether the readback ends with loss, norm and counters of the step.
    pub(super) is_last: bool,
}

/// Results of a step so far.
#[derive(Debug, Default)]
pub(super) struct StepResults {
    pub(super) number: u64,
    /// Counts of the program that was loaded when the step began.
    pub(super) per_step: RunCounts,
    pub(super) counted: Vec<OperandStats>,
    /// The pass of each statistic: micro-batch, phase and chunk.
    pub(super) passes: Vec<(u32, Phase, u32)>,
    pub(super) loads: Vec<ExpertLoad>,
    /// Products, in a step that measures.
    pub(super) products: Vec<ProductSums>,
    pub(super) since_staged_s: Option<f64>,
    pub(super) since_readback_s: Option<f64>,
    pub(super) has_gap: bool,
    /// Loss, norm of the gradients, skipped steps; present once the step is complete.
    pub(super) scalars: Option<(f32, f32, u64)>,
}

/// Steps in flight, and the last finished step.
#[derive(Debug, Default)]
pub(super) struct Steps {
    pub(super) begun: u64,
    pub(super) readbacks: VecDeque<PendingReadback>,
    pub(super) in_flight: VecDeque<StepResults>,
    pub(super) finished: StepResults,
}
