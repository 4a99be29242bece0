//! The profile of a call.

use deepwell_ir::Phase;
use serde::{Deserialize, Serialize};

/// One call for one micro-batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallProfile {
    /// Name of the call.
    pub name: String,
    /// Name of the op.
    pub op: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Phase of the step.
    pub phase: Phase,
    /// Transformer layer.
    pub layer: Option<u32>,
    /// Stream.
    pub stream: u32,
    /// Seconds from the first call's begin.
    pub begin_s: f64,
    /// Duration in seconds.
    pub time_s: f64,
    /// Least time of a run by the roofline.
    pub roofline_s: f64,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes that have to be moved.
    pub bytes: u64,
    /// CTAs of the largest launch over the number of SMs, at most 1: a property of the grid, not a
    /// measurement. `None` without a known grid (a CPU, a library's GEMM, a collective).
    #[serde(default)]
    pub grid_fill: Option<f64>,
    /// Number of runs in a step.
    pub runs: usize,
}

impl CallProfile {
    /// Sum of a quantity over the runs of a step.
    pub(super) fn in_step(&self, of_run: f64) -> f64 {
        of_run * self.runs as f64
    }
}

pub(super) fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
