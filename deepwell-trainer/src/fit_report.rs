//! The result of training.

use serde::{Deserialize, Serialize};

use crate::ExpertRows;
use crate::audit::AuditReport;
use crate::rank_times::RankTime;

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FitReport {
    /// Steps done.
    pub step: u64,
    /// Whether the run stopped on request before its last step.
    pub interrupted: bool,
    /// Step after which the run was resumed.
    pub resumed_after: Option<u64>,
    /// Median tokens per second of the steps of this process, without evaluation and checkpoints.
    pub tokens_per_s: f64,
    /// Stall of the training for each checkpoint, in seconds.
    #[serde(default)]
    pub checkpoint_stalls_s: Vec<f64>,
    /// The median of the last steps of each rank; empty as in
    /// [`Record::ranks`](crate::Record::ranks).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankTime>,
    /// Fullest use of the buffers of each layer's experts in the steps of this process, on the
    /// reporting rank; empty without experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_rows: Vec<ExpertRows>,
    /// Findings of the audit of the first step, if requested.
    pub audit: Option<AuditReport>,
    /// Held-out losses after the last step, batch by batch; empty if a loss is not finite or the
    /// run is incomplete.
    #[serde(default)]
    pub heldout_losses: Vec<f64>,
}
