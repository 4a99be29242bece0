//! The summary of a run, `summary.json`.

use std::collections::BTreeMap;

use deepwell_ir::TensorPrecision;
use deepwell_plan::PrecisionFallback;
use serde::{Deserialize, Serialize};

use crate::data::DatasetSummary;
use crate::fit_report::FitReport;
use crate::rank_map::RankCoordinates;
use crate::{AutoPrecision, GemmCounts, Settings};

/// Contents of `summary.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    /// The settings.
    pub settings: Settings,
    /// Result of the training.
    pub fit: FitReport,
    /// Origin of the initial weights.
    #[serde(default)]
    pub weights: String,
    /// Training data.
    #[serde(default)]
    pub data: DataFacts,
    /// Trained values.
    pub params: u64,
    /// Tokens per step.
    pub tokens_per_step: u64,
    /// `cpu`, or the GPU.
    pub device: String,
    /// Number of ranks; values of a single rank are those of rank 0.
    #[serde(default = "one_rank")]
    pub ranks: usize,
    /// Each rank's share of the plan, for several ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rank_map: Vec<RankCoordinates>,
    /// Predicted peak memory, the sum over ranks that share it.
    pub peak_bytes_predicted: u64,
    /// Highest anonymous resident memory, or GPU memory as counted by the driver, less its value
    /// before compilation.
    pub peak_bytes_measured: Option<u64>,
    /// Host memory for checkpoint copies of the ranks in this process, pinned for GPUs; 0 if
    /// checkpoints are written without a copy.
    #[serde(default)]
    pub pinned_bytes_predicted: u64,
    /// Arena size and its lower bound.
    pub arena_bytes: [u64; 2],
    /// Predicted bytes by kind at the peak.
    pub bytes_at_peak: BTreeMap<String, u64>,
    /// FLOPs of a step.
    pub flops_per_step: u64,
    /// Least predicted time of a step.
    pub predicted_step_s: f64,
    /// Predicted speedup over BF16.
    pub expected_speedup_over_bf16: Option<f64>,
    /// Quantized share of the FLOPs of the blocks' linear layers, over all steps of the run.
    #[serde(alias = "mxfp8_flop_share")]
    pub quantized_flop_share: f64,
    /// Quantized share over all steps if the output head counts as a linear layer.
    #[serde(alias = "mxfp8_flop_share_with_head")]
    pub quantized_flop_share_with_head: f64,
    /// The planned share of the blocks, without any fallback.
    #[serde(default, alias = "mxfp8_flop_share_planned")]
    pub quantized_flop_share_planned: f64,
    /// Quantized GEMMs that ran, including those before a resumption and in evaluations.
    #[serde(alias = "mxfp8_gemms_run")]
    pub quantized_gemms_run: GemmCounts,
    /// Bytes of quantized operands read by these GEMMs.
    pub quantized_bytes: GemmCounts,
    /// Format of each tensor, with the reason.
    pub precision: Vec<TensorPrecision>,
    /// The choice of `--precision auto` for each linear layer; none without a choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_precision: Option<AutoPrecision>,
    /// Parts of the requested precision that the device does not support, by reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub precision_fallbacks: Vec<PrecisionFallback>,
    /// Wall time of this process's part of the run.
    pub wall_s: f64,
}

/// Data of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFacts {
    /// The inputs.
    pub source: String,
    /// The tokenizer.
    pub tokenizer: String,
    /// Every token is below this.
    pub vocab_size: u64,
    /// Tokens of the training part.
    pub tokens_train: u64,
    /// Tokens of the held-out part.
    pub tokens_heldout: u64,
    /// All skipped files, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped_files: BTreeMap<String, Vec<String>>,
}

impl DataFacts {
    pub(super) fn of(data: &DatasetSummary) -> DataFacts {
        let DatasetSummary { vocab_size, tokens_train, tokens_heldout, .. } = *data;
        let source = data.source.clone();
        let tokenizer = data.tokenizer.clone();
        let skipped_files = data.skipped_files.clone();
        DataFacts { source, tokenizer, vocab_size, tokens_train, tokens_heldout, skipped_files }
    }
}

fn one_rank() -> usize {
    1
}
