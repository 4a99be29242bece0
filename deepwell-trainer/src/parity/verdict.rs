//! The checks that decide a comparison, each with its figure and where the bound comes from.

use serde::{Deserialize, Serialize};

use super::FinishedRun;

/// Held-out losses, or training losses, by step.
pub type Curve = Vec<(u64, f64)>;

/// Largest relative gap of held-out loss between MXFP8 and BF16: the bound that the project set
/// itself, about the noise of one evaluation on 64k tokens.
pub const GAP_TOLERANCE_REL: f64 = 0.005;

/// Steps after which every single evaluation must hold: before, both curves fall so fast that a
/// gap says more of the moment than of the precision.
const SETTLED_AFTER_STEP: u64 = 200;

/// Runs at least this long are asked to have learned more than pairs of tokens.
const LEARNED_AFTER_STEPS: u64 = 1000;

/// One check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// What is checked.
    pub name: String,
    /// Whether it holds.
    pub passed: bool,
    /// Figure and bound, in words.
    pub detail: String,
}

/// All checks and the figures behind them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Verdict {
    /// Mean gap over the last three evaluations.
    pub(crate) val_gap_rel: f64,
    /// Largest gap after the settling time.
    pub(crate) val_gap_rel_max_after_warmup: f64,
    /// Largest gap of the control.
    pub(crate) control_gap_rel: Option<f64>,
    /// The checks.
    pub(crate) checks: Vec<Check>,
}

/// Relative differences of two curves at the steps that both have.
pub(super) fn gaps(base: &Curve, other: &Curve) -> Curve {
    base.iter()
        .filter_map(|&(step, base)| {
            let &(_, other) = other.iter().find(|&&(at, _)| at == step)?;
            Some((step, (other - base) / base))
        })
        .collect()
}

fn mean_of_last_three(curve: &Curve) -> f64 {
    let last = &curve[curve.len().saturating_sub(3)..];
    last.iter().map(|&(_, gap)| gap).sum::<f64>() / last.len().max(1) as f64
}

fn largest_after(curve: &Curve, step: u64) -> f64 {
    let settled = curve.iter().filter(|&&(at, _)| at > step);
    let magnitude = |gap: f64| if gap.is_nan() { f64::INFINITY } else { gap.abs() };
    settled.map(|&(_, gap)| magnitude(gap)).fold(0.0, f64::max)
}

/// Judges a comparison.
pub(crate) fn judge(
    bf16: &FinishedRun,
    mxfp8: &FinishedRun,
    control: Option<&FinishedRun>,
    bigram_entropy: f64,
) -> Verdict {
    let settings = &mxfp8.summary.settings;
    let early_part = settings.schedule().warmup_steps.max(settings.steps / 5);
    let settled_after = SETTLED_AFTER_STEP.min(early_part);
    let base = bf16.evaluations();
    let curve = gaps(&base, &mxfp8.evaluations());
    let val_gap_rel = mean_of_last_three(&curve);
    let largest = largest_after(&curve, settled_after);
    let control_gap_rel =
        control.map(|control| largest_after(&gaps(&base, &control.evaluations()), settled_after));
    let bound = GAP_TOLERANCE_REL.max(2.0 * control_gap_rel.unwrap_or(0.0));
    let percent = |value: f64| format!("{:+.3} %", 100.0 * value);
    let mut checks = vec![
        Check {
            name: "held-out loss, mean of the last three evaluations".to_string(),
            passed: val_gap_rel.abs() <= GAP_TOLERANCE_REL,
            detail: format!("gap {}, bound {}", percent(val_gap_rel), percent(GAP_TOLERANCE_REL)),
        },
        Check {
            name: format!("held-out loss, every evaluation after step {settled_after}"),
            passed: largest <= bound,
            detail: format!("largest gap {}, bound {}", percent(largest), percent(bound)),
        },
    ];
    if let Some(audit) = &mxfp8.summary.fit.audit {
        checks.push(Check {
            name: "audit of the first MXFP8 step, call by call".to_string(),
            passed: audit.is_clean(),
            detail: match audit.findings.first() {
                None => format!("{} calls as their slow definitions", audit.calls_checked),
                Some(first) => format!(
                    "{} findings, the first: {}: {}",
                    audit.findings_total, first.call, first.what
                ),
            },
        });
    }
    let final_loss = mxfp8.evaluations().last().map_or(f64::NAN, |&(_, loss)| loss);
    if settings.steps >= LEARNED_AFTER_STEPS {
        checks.push(Check {
            name: "final held-out loss below the bigram's cross-entropy".to_string(),
            passed: final_loss < bigram_entropy,
            detail: format!("{final_loss:.4} against {bigram_entropy:.4} nats per token"),
        });
    }
    Verdict { val_gap_rel, val_gap_rel_max_after_warmup: largest, control_gap_rel, checks }
}
