//! Tests whether a low precision holds BF16's loss. Pairs of runs, one pair per seed, start from
//! the same weights and read the same batches, in BF16 and in MXFP8 or another policy.
//!
//! Runs that differ in a rounding drift apart, so a single pair does not show the effect of the
//! precision. Several pairs give a mean gap with a confidence interval, and the verdict depends on
//! the position of that interval: within, above or across the tolerance. A control, BF16 from
//! weights perturbed in their last bit, shows the effect of chaos alone; it never widens the
//! tolerance.

pub mod ablation;
mod folder;
mod options;
mod page;
pub mod reference;
mod report;
mod routing;
mod runs;
mod seed_runs;
mod statistics;
mod text;
mod verdict;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) use options::RunKind;
pub use options::{Curve, ParityOptions};
pub use report::{PairReport, ParityReport, RunReport};
pub use routing::{LayerAgreement, RoutingAgreement};
pub(crate) use seed_runs::SeedRuns;
pub use statistics::{Estimate, KnownDeviation};
pub use verdict::{Check, CheckStatus, GAP_TOLERANCE_REL, Verdict};

use deepwell_ir::SavedActivations;
use deepwell_ir::ops::{MasterFormat, MomentFormat};
use deepwell_plan::OptimizerSpec;
use runs::{FinishedRun, train_in_child};
use verdict::{Judgement, Pair, Question, judge};

use crate::baselines::{BaselineEntropies, baseline_entropies};
use crate::console::{Console, say};
use crate::data::HeldoutWindows;
use crate::formats::quantized_formats;
use crate::progress::Progress;
use crate::run::open_data;
use crate::{Settings, TrainError};

/// Steps of more floating-point operations are not audited: some 50 times the default run's.
const AUDITED_FLOPS_MAX: u64 = 1_000_000_000_000;

/// Trains all pairs and writes `report.json`, `report.html` and `metrics.jsonl`.
///
/// # Errors
/// A run fails; its own message goes to standard error.
pub fn run(options: &ParityOptions, stop: &Arc<AtomicBool>) -> Result<ParityReport, TrainError> {
    let mut options = options.clone();
    check(&options)?;
    options.settings.resolve_precision(&deepwell_probe::probe())?;
    let settings = &mut options.settings;
    // Reject all invalid settings before the first run starts.
    let model = settings.model_source()?;
    model.check_trainable(settings.train_frozen)?;
    let chosen = settings.resolve_tokenizer(&model)?;
    let graph = model.capture(Some(settings.seq_len))?;
    let policy = settings.precision_policy()?;
    let (_, tensors) = deepwell_ir::apply_precision(&graph, &policy)?;
    let precision = quantized_formats(&tensors).unwrap_or_else(|| settings.precision.clone());
    settings.resolve_learning_rate(graph.parameter_count());
    let options = &options;
    let settings = &options.settings;
    let mut console = Console::new("parity", settings.steps);
    for remark in model.notes().remarks.iter().chain(&chosen.note) {
        Progress::note(&mut console, &format!("note: {remark}"));
    }
    let origin = model.weights_origin(settings.seed);
    Progress::note(&mut console, &format!("weights  {origin}"));
    let dataset = open_data(settings, chosen.tokenizer, &mut console)?;
    let tokens = dataset.tokens();
    tokens.check_vocab(model.vocab_size() as u64)?;
    let windows = HeldoutWindows::new(
        Arc::clone(tokens),
        settings.batch_size,
        settings.seq_len,
        Some(settings.eval_tokens),
    )?;
    windows.check_targets(settings.documents.end(settings.tokenizer.is_some(), &dataset)?)?;
    let entropies = baseline_entropies(tokens, model.vocab_size() as u64, Some(&windows))?;
    let _lock = folder::claim(&options.out, options.start)?;

    // The audit recomputes the step's GEMMs on the CPU.
    let tokens_per_step = (settings.seq_len * settings.batch_size) as u64;
    let flops = 6 * graph.parameter_count() * tokens_per_step;
    let audit_left_out = (flops > AUDITED_FLOPS_MAX).then(|| {
        format!(
            "left out: a step has {:.1} TFLOP, and the processor would take long over more than \
             {:.1}",
            flops as f64 / 1e12,
            AUDITED_FLOPS_MAX as f64 / 1e12
        )
    });
    if let Some(reason) = &audit_left_out {
        Progress::note(&mut console, &format!("audit of the first step {reason}"));
    }
    let mut runs = Vec::new();
    let mut train_and_judge = |pairs: u64| -> Result<ParityReport, TrainError> {
        train_until(pairs, &mut runs, options, audit_left_out.is_none(), stop)?;
        Ok(report(options, pairs, &precision, &runs, entropies, audit_left_out.as_deref()))
    };
    let mut report = train_and_judge(options.seeds)?;
    if options.again && report.is_open_by_gap() {
        let seeds = options.seeds;
        let why = format!("{seeds} pairs leave the verdict open: {seeds} more");
        Progress::note(&mut console, &why);
        report = train_and_judge(2 * seeds)?;
    }
    if report.verdict != Verdict::Interrupted && routing::has_routers(&model)? {
        // A failure here must not lose the report of completed runs.
        match routing::of_pair(options, &model, tokens) {
            Ok(routing) => report.routing = Some(routing),
            Err(error) => report.routing_left_out = Some(error.to_string()),
        }
    }
    write_outputs(options, &report, &runs)?;
    Ok(report)
}

fn check(options: &ParityOptions) -> Result<(), TrainError> {
    options.settings.check()?;
    let fail = |setting, expected: &str, got: String, hint: &str| {
        let (expected, hint) = (expected.to_string(), Some(hint.to_string()));
        Err(TrainError::Setting { setting, expected, got, hint })
    };
    if options.seeds == 0 {
        return fail("seeds", "at least 1", "0".to_string(), "`--seeds 4`");
    }
    let tolerance = options.tolerance_rel;
    if !(tolerance.is_finite() && tolerance > 0.0) {
        let got = (100.0 * tolerance).to_string();
        return fail("tolerance", "a positive number of percent", got, "`--tolerance 0.5`");
    }
    Ok(())
}

/// Trains pair after pair, until `pairs` exist or the user interrupts.
fn train_until(
    pairs: u64,
    all: &mut Vec<SeedRuns>,
    options: &ParityOptions,
    audit: bool,
    stop: &Arc<AtomicBool>,
) -> Result<(), TrainError> {
    let first_seed = options.settings.seed;
    for index in all.len() as u64..pairs {
        let seed = first_seed + index;
        let folder = options.out.join(folder::seed_folder(seed));
        let low_precision =
            Settings { seed, audit: audit && index == 0, ..options.settings.clone() };
        let bf16 = Settings {
            precision: "bf16".to_string(),
            policy: None,
            fallback: None,
            audit: false,
            saved_activations: SavedActivations::Exact,
            optimizer: OptimizerSpec {
                masters: MasterFormat::Fp32,
                moments: MomentFormat::Fp32,
                in_backward: false,
                ..low_precision.optimizer.clone()
            },
            ..low_precision.clone()
        };
        let control = Settings { perturb_weights_seed: Some(seed), ..bf16.clone() };
        let is_stopped =
            |run: &FinishedRun| run.summary.fit.interrupted || stop.load(Ordering::Relaxed);
        let train = |kind: RunKind, settings: Settings| {
            let name = kind.name();
            // Many runs share a disk, and each resumes only from its newest checkpoint.
            let no_checkpoints = settings.no_checkpoints && index > 0;
            let out = folder.join(name);
            let settings = Settings { out, keep_last: 1, no_checkpoints, ..settings };
            let label = match pairs {
                1 => name.to_string(),
                count => format!("{}/{count} {name}", index + 1),
            };
            train_in_child(&label, &settings, options.start)
        };
        let bf16 = train(RunKind::Bf16, bf16)?;
        let mut is_over = is_stopped(&bf16);
        all.push(SeedRuns { seed, bf16, low_precision: None, control: None });
        let Some(runs) = all.last_mut() else { break };
        if !is_over {
            let run = train(RunKind::LowPrecision, low_precision)?;
            is_over = is_stopped(&run);
            runs.low_precision = Some(run);
        }
        if !is_over && options.control {
            let run = train(RunKind::Control, control)?;
            is_over = is_stopped(&run);
            runs.control = Some(run);
        }
        if is_over {
            break;
        }
    }
    Ok(())
}

fn report(
    options: &ParityOptions,
    pairs_wanted: u64,
    precision: &str,
    runs: &[SeedRuns],
    entropies: BaselineEntropies,
    audit_left_out: Option<&str>,
) -> ParityReport {
    let pairs: Vec<Pair> = runs.iter().filter_map(SeedRuns::pair).collect();
    let question =
        Question { precision, tolerance_rel: options.tolerance_rel, is_asked_twice: options.again };
    let judged =
        (!pairs.is_empty()).then(|| judge(&pairs, &question, entropies.bigram, audit_left_out));
    let is_interrupted = pairs.len() < pairs_wanted as usize
        || runs.iter().flat_map(SeedRuns::all).any(|(_, run)| run.summary.fit.interrupted);
    let verdict = match &judged {
        Some(judged) if !is_interrupted => judged.verdict,
        _ => Verdict::Interrupted,
    };
    let least_share = |share: fn(&FinishedRun) -> f64| {
        runs.iter()
            .filter_map(|run| run.low_precision.as_ref())
            .map(share)
            .fold(f64::INFINITY, f64::min)
    };
    let summary = &runs[0].low_precision.as_ref().unwrap_or(&runs[0].bf16).summary;
    let [interim_eval_tokens, last_eval_tokens] = runs[0].bf16.eval_tokens();
    let (gap_rel, judged): (_, Option<Judgement>) =
        (judged.as_ref().map(|judged| judged.gap), judged);
    let of_judged = judged.as_ref();
    ParityReport {
        precision: precision.to_string(),
        verdict,
        checks: of_judged.map_or_else(Vec::new, |judged| judged.checks.clone()),
        gap_rel,
        tolerance_rel: options.tolerance_rel,
        gap_rel_by_step: of_judged.map_or_else(Vec::new, |judged| judged.gap_by_step.clone()),
        control_gap_rel: of_judged.and_then(|judged| judged.control_gap),
        evaluation_error_rel: of_judged.and_then(|judged| judged.evaluation_error_rel),
        eval_tokens: last_eval_tokens,
        interim_eval_tokens,
        pairs_that_tell: of_judged.and_then(|judged| judged.pairs_that_tell),
        pairs: runs.iter().map(SeedRuns::report).collect(),
        steps: options.settings.steps,
        tokens: summary.fit.step * summary.tokens_per_step,
        params: summary.params,
        device: summary.device.clone(),
        learning_rate: summary.settings.learning_rate,
        unigram_entropy: entropies.unigram,
        bigram_entropy: entropies.bigram,
        quantized_flop_share_planned: summary.quantized_flop_share_planned,
        quantized_flop_share: least_share(|run| run.facts().quantized_share_run),
        quantized_flop_share_with_head: summary.quantized_flop_share_with_head,
        quantized_gemms_run: summary.quantized_gemms_run,
        quantized_bytes: summary.quantized_bytes,
        routing: None,
        routing_left_out: None,
        peak_bytes_predicted: summary.peak_bytes_predicted,
        peak_bytes_measured: summary.peak_bytes_measured,
    }
}

fn write_outputs(
    options: &ParityOptions,
    report: &ParityReport,
    runs: &[SeedRuns],
) -> Result<(), TrainError> {
    let write = |name: &str, text: String| {
        let path = options.out.join(name);
        std::fs::write(&path, text).map_err(TrainError::io(&path))
    };
    let json = serde_json::to_string_pretty(report).expect("a report is plain data");
    write("report.json", json)?;
    write("report.html", page::html(options, report, runs))?;
    let mut lines = String::new();
    for pair in runs {
        for (kind, run) in pair.all() {
            for record in &run.records {
                let mut value = serde_json::to_value(record).expect("a record is plain data");
                value["run"] = serde_json::Value::from(kind.name());
                if kind == RunKind::LowPrecision {
                    value["precision"] = serde_json::Value::from(report.precision.as_str());
                }
                value["seed"] = serde_json::Value::from(pair.seed);
                lines.push_str(&value.to_string());
                lines.push('\n');
            }
        }
    }
    write("metrics.jsonl", lines)?;
    say(text::text(report));
    say(format_args!("report: {}", options.out.join("report.html").display()));
    Ok(())
}
