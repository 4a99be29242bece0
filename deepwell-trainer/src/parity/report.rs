//! `report.json` of a comparison.

use serde::{Deserialize, Serialize};

use super::routing::RoutingAgreement;
use super::statistics::Estimate;
use super::verdict::{Check, CheckStatus, GAP_CHECK, Verdict};
use crate::{ExitStatus, ExpertRows, GemmCounts};

/// One run in the report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// Mean training loss over the last tenth of the steps, nats per token.
    pub train_loss: f64,
    /// Held-out loss after the last step.
    pub val_loss: f64,
    /// `exp(val_loss)`.
    pub val_ppl: f64,
    /// Median over steps.
    pub tokens_per_s: f64,
    /// Steps done.
    pub steps: u64,
    /// Step after which the run was resumed, if at all.
    pub resumed_after: Option<u64>,
    /// Predicted peak memory.
    pub peak_bytes_predicted: u64,
    /// Measured peak memory.
    pub peak_bytes_measured: Option<u64>,
    /// Use of the buffers of each layer's experts; empty without experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_rows: Vec<ExpertRows>,
    /// Wall time.
    pub wall_s: f64,
}

/// The runs of one seed in the report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairReport {
    /// Seed of weights and data order.
    pub seed: u64,
    /// The BF16 run.
    pub bf16: RunReport,
    /// The low-precision run; none if the comparison stopped before this run.
    #[serde(alias = "mxfp8")]
    pub low_precision: Option<RunReport>,
    /// BF16 from perturbed weights.
    pub control: Option<RunReport>,
    /// `(low_precision - bf16) / bf16` of the held-out losses after the last step.
    pub gap_rel: Option<f64>,
    /// `(control - bf16) / bf16` of the held-out losses after the last step.
    pub control_gap_rel: Option<f64>,
}

/// `report.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParityReport {
    /// Formats of the quantized tensors, `nvfp4` for example.
    pub precision: String,
    /// The answer.
    pub verdict: Verdict,
    /// Each check with its figures.
    pub checks: Vec<Check>,
    /// Mean over pairs of the gap at the end, relative to BF16's loss.
    pub gap_rel: Option<Estimate>,
    /// Largest gap that counts as holding.
    pub tolerance_rel: f64,
    /// The gap of every evaluation, by step.
    pub gap_rel_by_step: Vec<(u64, Estimate)>,
    /// Mean over pairs of the control's gap at the end: the effect of chaos alone.
    pub control_gap_rel: Option<Estimate>,
    /// Error of the mean gap caused by the finite evaluation set.
    pub evaluation_error_rel: Option<f64>,
    /// Number of held-out tokens predicted by the last evaluation.
    pub eval_tokens: u64,
    /// Number of held-out tokens predicted by each earlier evaluation.
    pub interim_eval_tokens: u64,
    /// Number of pairs that would settle an open verdict, for the same mean and deviation.
    pub pairs_that_tell: Option<u64>,
    /// Each pair.
    pub pairs: Vec<PairReport>,
    /// Steps asked for.
    pub steps: u64,
    /// Tokens per run.
    pub tokens: u64,
    /// Trained values.
    pub params: u64,
    /// Device of the runs.
    pub device: String,
    /// Largest learning rate of each run.
    pub learning_rate: Option<f64>,
    /// Held-out cross-entropy of a unigram model, nats per token.
    pub unigram_entropy: f64,
    /// Held-out cross-entropy of an add-one bigram model, nats per token.
    pub bigram_entropy: f64,
    /// Share of the FLOPs of the blocks' linear layers planned in low precision.
    pub quantized_flop_share_planned: f64,
    /// Share of these FLOPs that ran in low precision, in the run with the smallest share.
    pub quantized_flop_share: f64,
    /// Share that ran in low precision if the output head counts as a linear layer.
    pub quantized_flop_share_with_head: f64,
    /// Quantized GEMMs of the first low-precision run, by GEMM of a layer.
    pub quantized_gemms_run: GemmCounts,
    /// Bytes of quantized operands read by these GEMMs.
    pub quantized_bytes: GemmCounts,
    /// For a mixture of experts, the share of routing choices that agree between both precisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing: Option<RoutingAgreement>,
    /// Reason for a missing routing agreement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing_left_out: Option<String>,
    /// Predicted peak of a run in low precision.
    pub peak_bytes_predicted: u64,
    /// Measured peak of a run in low precision.
    pub peak_bytes_measured: Option<u64>,
}

impl ParityReport {
    /// Whether nothing but the interval of the gap leaves the verdict open.
    pub(super) fn is_open_by_gap(&self) -> bool {
        let open = self.checks.iter().filter(|check| check.status == CheckStatus::Open);
        self.verdict == Verdict::CannotTell && open.map(|check| check.name.as_str()).eq([GAP_CHECK])
    }

    /// The exit status of the verdict.
    pub fn exit_status(&self) -> ExitStatus {
        match self.verdict {
            Verdict::Holds => ExitStatus::Success,
            Verdict::DoesNotHold | Verdict::Invalid => ExitStatus::Failed,
            Verdict::CannotTell => ExitStatus::Open,
            Verdict::Interrupted => ExitStatus::Interrupted,
        }
    }
}
