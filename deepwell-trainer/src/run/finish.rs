//! The end of a run: its summary and its page.

use std::path::Path;
use std::time::Instant;

use super::fitted::Fitted;
use super::memory_table::predicted_peak_bytes;
use super::summary::{DataFacts, RunSummary};
use crate::atomic_write::write_atomically;
use crate::progress::Progress;
use crate::rank_map::rank_map;
use crate::run_folder::RunFolder;
use crate::{TrainError, run_report};

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
