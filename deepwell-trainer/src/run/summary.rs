//! The summary of a run, `summary.json`.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use deepwell_ir::TensorPrecision;
use deepwell_plan::PrecisionFallback;
use serde::{Deserialize, Serialize};

use super::fitted::Fitted;
use super::memory_table::predicted_peak_bytes;
use crate::atomic_write::write_atomically;
use crate::data::DatasetSummary;
use crate::run_folder::RunFolder;
use crate::run_report::{self, RankCoordinates, rank_map};
use crate::trainer::{FitReport, Progress};
use crate::{AutoPrecision, GemmCounts, Settings, TrainError};

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
    fn of(data: &DatasetSummary) -> DataFacts {
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

/// Writes the summary and the report of a run to its folder, and returns the summary. The summary
/// of a run that had already ended stays.
///
/// # Errors
/// A file cannot be written.
pub(super) fn summarize(
    fitted: Fitted<'_>,
    started: Instant,
    progress: &mut dyn Progress,
) -> Result<RunSummary, TrainError> {
    let settings = &fitted.run.settings;
    let path = settings.out.join("summary.json");
    if fitted.fit.resumed_after == Some(settings.steps)
        && let Some(summary) = summary_of_ended(&path, settings.steps)
    {
        progress.note("the run has ended already; its summary stays");
        return Ok(summary);
    }
    let is_first = fitted.run.request.is_first();
    let (summary, _folder) = RunSummary::of(fitted, started);
    if is_first {
        let text = serde_json::to_string_pretty(&summary).expect("a summary is plain data");
        write_atomically(&path, &text)?;
        run_report::write(&summary)?;
    }
    Ok(summary)
}

/// Returns the summary of a run that has completed all steps: its speed and memory were measured by
/// the process that ran the steps, not by one that found nothing to do.
fn summary_of_ended(path: &Path, steps: u64) -> Option<RunSummary> {
    let text = std::fs::read_to_string(path).ok()?;
    let summary: RunSummary = serde_json::from_str(&text).ok()?;
    (summary.fit.step == steps).then_some(summary)
}

impl RunSummary {
    /// The summary of a run, and its folder, which stays locked until the files are written.
    fn of(fitted: Fitted<'_>, started: Instant) -> (RunSummary, Option<RunFolder>) {
        let Fitted { run, world, fit, copy_bytes, peak_bytes_measured } = fitted;
        let engine = world.first();
        let program = engine.program();
        let rank = &engine.prediction().ranks[0];
        let counts = engine.counts();
        let (share, share_with_head) = counts.quantized_flop_share();
        let summary = RunSummary {
            device: run.settings.device.to_string(),
            fit,
            weights: run.weights_origin,
            data: DataFacts::of(run.dataset.summary()),
            params: engine.graph().parameter_count(),
            tokens_per_step: engine.tokens_per_step() as u64,
            ranks: world.size(),
            rank_map: match world.size() {
                1 => Vec::new(),
                _ => rank_map(engine.plan(), engine.prediction(), engine.graph().layer_count()),
            },
            peak_bytes_predicted: predicted_peak_bytes(&world),
            peak_bytes_measured,
            pinned_bytes_predicted: copy_bytes.iter().sum(),
            arena_bytes: [rank.arena_bytes, rank.arena_lower_bound_bytes],
            bytes_at_peak: rank.bytes_at_peak.clone(),
            flops_per_step: program.flops(),
            predicted_step_s: engine.prediction().time_s,
            expected_speedup_over_bf16: engine.prediction().expected_speedup_over_bf16,
            quantized_flop_share: share,
            quantized_flop_share_with_head: share_with_head,
            quantized_flop_share_planned: engine.quantized_flop_share_planned().0,
            quantized_gemms_run: counts.quantized_gemms,
            quantized_bytes: counts.quantized_bytes,
            precision: program.precision.clone(),
            auto_precision: run.auto_precision,
            precision_fallbacks: engine.precision_fallbacks().to_vec(),
            wall_s: started.elapsed().as_secs_f64(),
            settings: run.settings,
        };
        (summary, run.folder)
    }
}
