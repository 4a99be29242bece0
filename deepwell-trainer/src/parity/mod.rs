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
mod page;
pub mod reference;
mod routing;
mod runs;
mod statistics;
mod text;
mod verdict;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

pub use routing::{LayerAgreement, RoutingAgreement};
pub use statistics::{Estimate, KnownDeviation};
pub use verdict::{Check, CheckStatus, GAP_TOLERANCE_REL, Verdict};

use runs::{FinishedRun, train_in_child};
use verdict::{GAP_CHECK, Judgement, Pair, Question, gap_at_end, judge};

use crate::baselines::{BaselineEntropies, baseline_entropies};
use crate::console::{Console, say};
use crate::data::HeldoutWindows;
use crate::formats::quantized_formats;
use crate::run::open_data;
use crate::trainer::Progress;
use crate::{ExitStatus, ExpertRows, GemmCounts, Settings, Start, TrainError};

/// Held-out losses, or training losses, by step.
pub type Curve = Vec<(u64, f64)>;

/// Steps of more floating-point operations are not audited: some 50 times the default run's.
const AUDITED_FLOPS_MAX: u64 = 1_000_000_000_000;

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct ParityOptions {
    /// Settings of the low-precision runs, with the seed of the first pair; the BF16 runs differ
    /// only in the precision.
    pub settings: Settings,
    /// Folder of the report and the runs.
    pub out: PathBuf,
    /// Treatment of an earlier comparison in this folder.
    pub start: Start,
    /// Number of pairs, with seeds starting at the seed of the settings.
    pub seeds: u64,
    /// Whether to train the same number of pairs again if the verdict is open.
    pub again: bool,
    /// Whether to train BF16 of each seed again, from weights perturbed in their last bit.
    pub control: bool,
    /// Largest mean relative gap of held-out loss that counts as holding.
    pub tolerance_rel: f64,
}

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
    fn is_open_by_gap(&self) -> bool {
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

/// Kind of a seed's run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunKind {
    Bf16,
    LowPrecision,
    /// BF16 from weights perturbed in their last bit.
    Control,
}

impl RunKind {
    /// Name of the kind in metrics and in folder names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            RunKind::Bf16 => "bf16",
            RunKind::LowPrecision => "low_precision",
            RunKind::Control => "control",
        }
    }
}

/// The completed runs of one seed.
pub(crate) struct SeedRuns {
    pub(crate) seed: u64,
    pub(crate) bf16: FinishedRun,
    pub(crate) low_precision: Option<FinishedRun>,
    pub(crate) control: Option<FinishedRun>,
}

impl SeedRuns {
    /// All runs of the seed.
    fn all(&self) -> impl Iterator<Item = (RunKind, &FinishedRun)> {
        let low_precision = (RunKind::LowPrecision, self.low_precision.as_ref());
        let rest = [low_precision, (RunKind::Control, self.control.as_ref())];
        let rest = rest.into_iter().filter_map(|(kind, run)| Some((kind, run?)));
        std::iter::once((RunKind::Bf16, &self.bf16)).chain(rest)
    }

    fn pair(&self) -> Option<Pair> {
        let low_precision = self.low_precision.as_ref()?.facts();
        let control = self.control.as_ref().map(FinishedRun::facts);
        Some(Pair { bf16: self.bf16.facts(), low_precision, control })
    }

    fn report(&self) -> PairReport {
        let gap = |run: &FinishedRun| gap_at_end(&self.bf16.facts(), &run.facts());
        PairReport {
            seed: self.seed,
            bf16: self.bf16.report(),
            low_precision: self.low_precision.as_ref().map(FinishedRun::report),
            control: self.control.as_ref().map(FinishedRun::report),
            gap_rel: self.low_precision.as_ref().map(gap),
            control_gap_rel: self.control.as_ref().map(gap),
        }
    }
}

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
    let tokenizer_note = settings.resolve_tokenizer(&model)?;
    let graph = model.capture(Some(settings.seq_len))?;
    let policy = settings.precision_policy()?;
    let (_, tensors) = deepwell_ir::apply_precision(&graph, &policy)?;
    let precision = quantized_formats(&tensors).unwrap_or_else(|| settings.precision.clone());
    settings.resolve_learning_rate(graph.parameter_count());
    let options = &options;
    let settings = &options.settings;
    let mut console = Console::new("parity", settings.steps);
    for remark in model.notes().remarks.iter().chain(&tokenizer_note) {
        Progress::note(&mut console, &format!("note: {remark}"));
    }
    let origin = model.weights_origin(settings.seed);
    Progress::note(&mut console, &format!("weights  {origin}"));
    let dataset = open_data(settings, &mut console)?;
    let tokens = dataset.tokens();
    tokens.check_vocab(model.vocab_size() as u64)?;
    let windows = HeldoutWindows::new(
        Arc::clone(tokens),
        settings.batch_size,
        settings.seq_len,
        Some(settings.eval_tokens),
    )?;
    windows.check_targets(settings.documents.end(settings, &dataset)?)?;
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
