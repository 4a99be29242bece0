//! The verdict of a comparison: whether it is valid, and on which side of the tolerance the gap
//! lies.

use deepwell_precision::Fallback;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::options::{Curve, RunKind};
use super::reference::known_deviation;
use super::statistics::{Estimate, evaluation_error_rel};
use crate::Settings;
use crate::audit::AuditReport;
use crate::fingerprint::{differences, short};

/// Default for the largest mean relative gap of held-out loss that counts as holding BF16's loss.
/// The project chose this value; it does not come from a measurement.
pub const GAP_TOLERANCE_REL: f64 = 0.005;

/// Largest allowed error of the evaluation set, as a fraction of the tolerance.
const EVALUATION_ERROR_PART: f64 = 0.1;

/// Runs at least this long are asked to have learned more than pairs of tokens.
const LEARNED_AFTER_STEPS: u64 = 1000;

/// Precision of a comparison of BF16 with itself, which should find no difference.
const BF16: &str = "bf16";

/// Rounding slack of the quantized share of a run below the planned share.
const SHARE_SLACK: f64 = 1e-9;

/// Smallest fraction of the planned share that has to run quantized if guards may move GEMMs to
/// BF16: with much less, the comparison would be of BF16 with itself.
const SHARE_KEPT_MIN: f64 = 0.9;

/// The check of the gap's interval.
pub(super) const GAP_CHECK: &str = "held-out loss at the end, mean gap over pairs";

/// The answer to whether a low precision holds BF16's loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The upper end of the gap's interval is within the tolerance.
    Holds,
    /// The lower end of the gap's interval is above the tolerance.
    DoesNotHold,
    /// The interval reaches over the tolerance, or the evaluation set is too small.
    CannotTell,
    /// The runs cannot be compared: they differ in more than the precision, or the low-precision
    /// run did not run as planned.
    Invalid,
    /// The user interrupted the comparison.
    Interrupted,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckStatus {
    /// The check holds.
    Holds,
    /// The check does not hold.
    Fails,
    /// Too little data for a decision.
    Open,
    /// Not checked; the detail has the reason.
    LeftOut,
}

/// One check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Subject of the check.
    pub name: String,
    /// Result of the check.
    pub status: CheckStatus,
    /// Figures and limits, in words.
    pub detail: String,
}

/// Facts about one run for a verdict.
#[derive(Clone, Debug)]
pub(crate) struct RunFacts {
    pub(crate) settings: Settings,
    /// The run's [`crate::fingerprint::Fingerprint`].
    pub(crate) fingerprint: Value,
    /// Steps done.
    pub(crate) steps: u64,
    /// Training losses by step.
    pub(crate) losses: Curve,
    /// Held-out losses by step.
    pub(crate) evaluations: Curve,
    /// Held-out losses of the last evaluation, batch by batch.
    pub(crate) heldout_losses: Vec<f64>,
    /// Number of quantized GEMMs that ran.
    pub(crate) quantized_gemms: u64,
    /// Quantized share of the linear FLOPs as planned before the first step.
    pub(crate) quantized_share_planned: f64,
    /// Share of the FLOPs that ran quantized.
    pub(crate) quantized_share_run: f64,
    /// Number of guard offences after which the GEMMs stayed in low precision.
    pub(crate) guard_offences: usize,
    pub(crate) audit: Option<AuditReport>,
}

/// The runs of one seed: same weights, same batches.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) bf16: RunFacts,
    pub(crate) low_precision: RunFacts,
    pub(crate) control: Option<RunFacts>,
}

/// The question of a comparison.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question<'a> {
    /// Formats of the quantized tensors.
    pub(crate) precision: &'a str,
    /// Largest mean relative gap that counts as holding.
    pub(crate) tolerance_rel: f64,
    /// Whether the question is asked of half of the pairs and, if open, of all pairs.
    pub(crate) is_asked_twice: bool,
}

/// All checks with their figures.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Judgement {
    pub(crate) verdict: Verdict,
    /// Gap of the last evaluation, which reads the most tokens.
    pub(crate) gap: Estimate,
    /// Gap of every evaluation.
    pub(crate) gap_by_step: Vec<(u64, Estimate)>,
    /// Gap of the control at the end.
    pub(crate) control_gap: Option<Estimate>,
    /// Error of the mean gap caused by the finite evaluation set.
    pub(crate) evaluation_error_rel: Option<f64>,
    /// Number of pairs that would settle an open verdict.
    pub(crate) pairs_that_tell: Option<u64>,
    pub(crate) checks: Vec<Check>,
}

/// Relative differences of two curves at their common steps.
pub(super) fn gaps(base: &Curve, other: &Curve) -> Curve {
    let other: std::collections::BTreeMap<u64, f64> = other.iter().copied().collect();
    base.iter()
        .filter_map(|&(step, base)| Some((step, (other.get(&step)? - base) / base)))
        .collect()
}

/// Gap of one pair at the end.
pub(super) fn gap_at_end(base: &RunFacts, other: &RunFacts) -> f64 {
    at_end(&gaps(&base.evaluations, &other.evaluations))
}

pub(super) fn percent(value: f64) -> String {
    format!("{:+.3} %", 100.0 * value)
}

/// Confidence level of an interval: `95 %`.
pub(super) fn confidence(estimate: &Estimate) -> String {
    // Digits below a hundredth of a percent are floating-point noise.
    format!("{} %", (1e4 * estimate.confidence).round() / 100.0)
}

/// A mean with its interval, in percent.
pub(super) fn in_percent(estimate: &Estimate) -> String {
    match estimate.half_width {
        Some(_) => format!(
            "{}, {} interval {} to {}",
            percent(estimate.mean),
            confidence(estimate),
            percent(estimate.lower()),
            percent(estimate.upper())
        ),
        None => format!("{}, no interval from one pair", percent(estimate.mean)),
    }
}

/// Judges a comparison of at least one pair. `audit_left_out` is the reason for a missing audit.
pub(crate) fn judge(
    pairs: &[Pair],
    question: &Question<'_>,
    bigram_entropy: f64,
    audit_left_out: Option<&str>,
) -> Judgement {
    let &Question { precision, tolerance_rel, is_asked_twice } = question;
    let gaps_at_end: Vec<f64> =
        pairs.iter().map(|pair| gap_at_end(&pair.bf16, &pair.low_precision)).collect();
    let recorded_deviation =
        pairs.first().and_then(|pair| known_deviation(&pair.low_precision.settings));
    let gap = match recorded_deviation {
        Some(recorded_deviation) => Estimate::of_known(&gaps_at_end, recorded_deviation),
        None => Estimate::of(&gaps_at_end),
    };
    let gap = if is_asked_twice { gap.of_each_look() } else { gap };
    let control_gaps: Vec<f64> = pairs
        .iter()
        .filter_map(|pair| Some(gap_at_end(&pair.bf16, pair.control.as_ref()?)))
        .collect();
    let control_gap = (!control_gaps.is_empty()).then(|| Estimate::of(&control_gaps));

    let mut checks = vec![complete(pairs), same_runs(pairs), ran_as_planned(pairs, precision)];
    checks.push(audited(pairs, audit_left_out));
    checks.extend(learned(pairs, bigram_entropy));
    let is_valid = checks.iter().all(|check| check.status != CheckStatus::Fails);

    let (evaluation, evaluation_error_rel) = evaluation_error(pairs, tolerance_rel);
    let pairs_that_tell = gap.pairs_that_tell(tolerance_rel);
    let gap_check = gap_within(&gap, tolerance_rel, pairs_that_tell);
    let verdict = match (is_valid, gap_check.status, evaluation.status) {
        (false, ..) => Verdict::Invalid,
        (true, CheckStatus::Fails, _) => Verdict::DoesNotHold,
        (true, CheckStatus::Holds, CheckStatus::Holds) => Verdict::Holds,
        _ => Verdict::CannotTell,
    };
    checks.extend([evaluation, gap_check]);
    Judgement {
        verdict,
        gap,
        gap_by_step: gap_by_step(pairs),
        control_gap,
        evaluation_error_rel,
        pairs_that_tell,
        checks,
    }
}

/// The mean gap at each step that all pairs evaluated.
fn gap_by_step(pairs: &[Pair]) -> Vec<(u64, Estimate)> {
    let curves: Vec<std::collections::BTreeMap<u64, f64>> = pairs
        .iter()
        .map(|pair| {
            gaps(&pair.bf16.evaluations, &pair.low_precision.evaluations).into_iter().collect()
        })
        .collect();
    let Some(first) = curves.first() else { return Vec::new() };
    first
        .keys()
        .filter_map(|step| {
            let at_step: Option<Vec<f64>> =
                curves.iter().map(|curve| curve.get(step).copied()).collect();
            Some((*step, Estimate::of(&at_step?)))
        })
        .collect()
}

fn check(name: &str, problems: Vec<String>, otherwise: String) -> Check {
    let status = if problems.is_empty() { CheckStatus::Holds } else { CheckStatus::Fails };
    let detail = if problems.is_empty() { otherwise } else { problems.join("; ") };
    Check { name: name.to_string(), status, detail }
}

/// Every run of every pair with a name for messages.
fn runs(pairs: &[Pair]) -> impl Iterator<Item = (String, &RunFacts)> {
    pairs.iter().flat_map(|pair| {
        let runs = [
            (RunKind::Bf16, Some(&pair.bf16)),
            (RunKind::LowPrecision, Some(&pair.low_precision)),
            (RunKind::Control, pair.control.as_ref()),
        ];
        runs.into_iter().filter_map(|(kind, run)| {
            run.map(|run| (format!("{} of seed {}", kind.name(), run.settings.seed), run))
        })
    })
}

/// Checks that every step was trained, every planned evaluation was made and every loss is a
/// number.
fn complete(pairs: &[Pair]) -> Check {
    let mut problems = Vec::new();
    for (name, run) in runs(pairs) {
        let steps = run.settings.steps;
        if run.steps != steps {
            problems.push(format!("{name}: {} of {steps} steps", run.steps));
        }
        let interval = run.settings.eval_interval();
        let planned = (0..=steps).filter(|step| step.is_multiple_of(interval) || *step == steps);
        if let Some(step) = planned.clone().find(|&step| !is_finite_at(&run.evaluations, step)) {
            problems.push(format!("{name}: no finite held-out loss at step {step}"));
        }
        if run.evaluations.len() != planned.count() {
            problems.push(format!("{name}: evaluations at other steps than planned"));
        }
        let trained: Vec<u64> = run.losses.iter().map(|&(step, _)| step).collect();
        if trained != (1..=steps).collect::<Vec<u64>>() {
            problems.push(format!("{name}: {} training losses for {steps} steps", trained.len()));
        } else if let Some((step, _)) = run.losses.iter().find(|(_, loss)| !loss.is_finite()) {
            problems.push(format!("{name}: the training loss of step {step} is not finite"));
        }
    }
    check("complete curves of finite losses", problems, "all steps and evaluations".to_string())
}

/// Fields of the fingerprint that may differ between the runs of a pair.
const FREE_IN_A_PAIR: [&str; 8] = [
    "policy",
    "kernels",
    "micro_batch",
    "perturb_weights_seed",
    "saved_activations",
    "optimizer.masters",
    "optimizer.moments",
    "optimizer.in_backward",
];

/// Additional fields that may differ between pairs.
const FREE_BETWEEN_PAIRS: [&str; 2] = ["seed", "data_seed"];

/// Checks that only the precision differs within a pair, with the same weights and batches, and
/// that only the seed differs between pairs.
fn same_runs(pairs: &[Pair]) -> Check {
    let mut problems = Vec::new();
    let mut compare = |base: &RunFacts, other: &RunFacts, free: &[&str]| {
        let differing = differences(&base.fingerprint, &other.fingerprint);
        let is_free = |field: &str| {
            free.iter().any(|&free| field == free || field.split('.').next() == Some(free))
        };
        let differing: Vec<String> = differing
            .iter()
            .filter(|difference| !is_free(&difference.field))
            .map(|difference| {
                let [was, now] =
                    [&difference.was, &difference.now].map(|value| short(value.as_ref()));
                format!("{} {was} and {now}", difference.field)
            })
            .collect();
        if !differing.is_empty() {
            let seeds = [&base.settings, &other.settings].map(|settings| settings.seed);
            problems.push(format!("seeds {} and {}: {}", seeds[0], seeds[1], differing.join(", ")));
        }
    };
    let between = [&FREE_IN_A_PAIR[..], &FREE_BETWEEN_PAIRS].concat();
    for pair in pairs {
        for other in [Some(&pair.low_precision), pair.control.as_ref()].into_iter().flatten() {
            compare(&pair.bf16, other, &FREE_IN_A_PAIR);
        }
        compare(&pairs[0].bf16, &pair.bf16, &between);
    }
    let otherwise = "by the content of model, data, tokenizer and settings".to_string();
    check("the same weights and batches", problems, otherwise)
}

/// Checks that quantized GEMMs ran: the planned share if guards only report, and most of it if
/// guards move GEMMs to BF16.
fn ran_as_planned(pairs: &[Pair], precision: &str) -> Check {
    let title = title(precision);
    let mut problems = Vec::new();
    let mut least = f64::INFINITY;
    let mut offences = 0;
    for pair in pairs {
        let (run, seed) = (&pair.low_precision, pair.low_precision.settings.seed);
        let (share, planned) = (run.quantized_share_run, run.quantized_share_planned);
        let guards_move = run.settings.fallback != Some(Fallback::Off);
        let wanted = if guards_move { SHARE_KEPT_MIN * planned } else { planned - SHARE_SLACK };
        least = least.min(share);
        offences += run.guard_offences;
        if precision == BF16 {
            if run.quantized_gemms > 0 {
                problems.push(format!("quantized GEMMs ran in the second run of seed {seed}"));
            }
        } else if run.quantized_gemms == 0 {
            problems.push(format!("no quantized GEMM ran in the run of seed {seed}"));
        } else if share < wanted {
            let hint = if guards_move {
                "; guards moved the others to BF16: `--fallback off` compares without"
            } else {
                ""
            };
            problems.push(format!(
                "seed {seed}: {:.2} % of the linear FLOPs ran in {title}, the plan promised \
                 {:.2} %{hint}",
                100.0 * share,
                100.0 * planned
            ));
        }
        if pair.bf16.quantized_gemms > 0 {
            problems.push(format!("quantized GEMMs ran in the BF16 run of seed {seed}"));
        }
    }
    let mut otherwise = match precision {
        BF16 => "BF16 was compared with itself, and no operand was quantized".to_string(),
        _ => format!("{:.2} % of the blocks' linear FLOPs ran in {title}", 100.0 * least),
    };
    if offences > 0 {
        otherwise.push_str(&format!("; guards told of {offences} offences and moved no GEMM"));
    }
    check("quantized GEMMs ran as planned", problems, otherwise)
}

/// The first step in low precision, call by call against slow definitions.
fn audited(pairs: &[Pair], left_out: Option<&str>) -> Check {
    let name = "audit of the first step in low precision, call by call";
    if let Some(reason) = left_out {
        let (name, detail) = (name.to_string(), reason.to_string());
        return Check { name, status: CheckStatus::LeftOut, detail };
    }
    let mut problems = Vec::new();
    let mut calls = 0;
    let audit = pairs.first().and_then(|pair| pair.low_precision.audit.as_ref());
    match audit {
        None => problems.push("the run in low precision has no result of it".to_string()),
        Some(audit) => {
            calls = audit.calls_checked;
            if let Some(first) = audit.findings.first() {
                problems.push(format!(
                    "{} findings, the first: {}: {}",
                    audit.findings_total, first.call, first.what
                ));
            }
        }
    }
    check(name, problems, format!("{calls} calls as their slow definitions"))
}

fn is_finite_at(curve: &Curve, step: u64) -> bool {
    curve.iter().any(|&(at, loss)| at == step && loss.is_finite())
}

/// The last point of a curve; NaN for an empty curve. Earlier evaluations read fewer tokens.
pub(super) fn at_end(curve: &Curve) -> f64 {
    curve.last().map_or(f64::NAN, |&(_, value)| value)
}

/// The formats compared with BF16, for use in a sentence.
pub(super) fn title(precision: &str) -> String {
    precision.to_uppercase()
}

fn learned(pairs: &[Pair], bigram_entropy: f64) -> Option<Check> {
    let steps = pairs.first()?.low_precision.settings.steps;
    if steps < LEARNED_AFTER_STEPS {
        return None;
    }
    let mut problems = Vec::new();
    let mut largest = f64::NEG_INFINITY;
    for (name, run) in runs(pairs) {
        largest = largest.max(at_end(&run.evaluations));
        // A NaN is not below.
        if at_end(&run.evaluations).partial_cmp(&bigram_entropy) != Some(std::cmp::Ordering::Less) {
            problems.push(format!(
                "{name} ends at {:.4}, the bigram model reaches {bigram_entropy:.4} nats per token",
                at_end(&run.evaluations)
            ));
        }
    }
    let otherwise = format!("{largest:.4} at most, the bigram model reaches {bigram_entropy:.4}");
    Some(check("final held-out loss below a bigram model's", problems, otherwise))
}

/// Whether the evaluation set is large enough for the tolerance.
fn evaluation_error(pairs: &[Pair], tolerance_rel: f64) -> (Check, Option<f64>) {
    let losses = pairs.iter().map(|pair| {
        [pair.bf16.heldout_losses.as_slice(), pair.low_precision.heldout_losses.as_slice()]
    });
    let error = evaluation_error_rel(&losses.collect::<Vec<_>>());
    let limit = EVALUATION_ERROR_PART * tolerance_rel;
    let name = "error of the evaluation set".to_string();
    let (status, detail) = match error {
        Some(error) if error <= limit => (
            CheckStatus::Holds,
            format!("{:.3} % of the loss, at most {:.3} %", 100.0 * error, 100.0 * limit),
        ),
        Some(error) if error.is_finite() => {
            let tokens =
                pairs[0].low_precision.settings.eval_tokens as f64 * (error / limit).powi(2);
            let detail = format!(
                "{:.3} % of the loss, should be at most {:.3} %: `--eval-tokens {:.0}` would do",
                100.0 * error,
                100.0 * limit,
                (tokens / 1024.0).ceil() * 1024.0
            );
            (CheckStatus::Open, detail)
        }
        _ => {
            let detail = "needs two batches of finite losses: give more `--eval-tokens`";
            (CheckStatus::Open, detail.to_string())
        }
    };
    (Check { name, status, detail }, error)
}

fn gap_within(gap: &Estimate, tolerance_rel: f64, pairs_that_tell: Option<u64>) -> Check {
    let status = if gap.upper() <= tolerance_rel {
        CheckStatus::Holds
    } else if gap.lower() > tolerance_rel {
        CheckStatus::Fails
    } else {
        CheckStatus::Open
    };
    let mut detail = format!("{}; tolerance {}", in_percent(gap), percent(tolerance_rel));
    if let (Some(deviation), Some(recorded)) = (gap.deviation, gap.pooled_with) {
        detail.push_str(&format!(
            "; a pair deviates by {:.3} %, pooled with {:.3} % of recorded pairs",
            100.0 * deviation,
            100.0 * recorded.deviation
        ));
    }
    if status == CheckStatus::Open {
        detail.push_str(&match (gap.deviation, pairs_that_tell) {
            (None, _) => "; runs differ by chaos, so that one pair cannot tell: `--seeds 4` \
                          gives an interval"
                .to_string(),
            (Some(_), Some(pairs)) => format!("; about `--seeds {pairs}` would tell"),
            (Some(_), None) => {
                "; too close to the tolerance for a thousand pairs to tell".to_string()
            }
        });
    }
    Check { name: GAP_CHECK.to_string(), status, detail }
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
