//! The parity report for a terminal.

use std::fmt::Write as _;

use deepwell_plan::format_bytes;

use super::verdict::{CheckStatus, Verdict, in_percent, percent, title};
use super::{ParityReport, RunReport};
use crate::ExpertRows;

/// Headline of the verdict.
pub(super) fn headline(report: &ParityReport) -> String {
    let title = title(&report.precision);
    match report.verdict {
        Verdict::Holds => format!("{title} holds BF16's loss"),
        Verdict::DoesNotHold => format!("{title} does not hold BF16's loss"),
        Verdict::CannotTell => format!("Cannot tell yet whether {title} holds BF16's loss"),
        Verdict::Invalid => "The runs cannot be compared".to_string(),
        Verdict::Interrupted => "Interrupted: no verdict".to_string(),
    }
}

/// The word for a check's status, padded to a common width.
pub(super) fn status(status: CheckStatus) -> &'static str {
    match status {
        CheckStatus::Holds => "holds",
        CheckStatus::Fails => "FAILS",
        CheckStatus::Open => "open ",
        CheckStatus::LeftOut => "-    ",
    }
}

/// Text of the control, next to the gap.
pub(super) fn control(report: &ParityReport) -> Option<String> {
    let gap = report.control_gap_rel.as_ref()?;
    Some(format!(
        "chaos alone (BF16 from weights perturbed in their last bit): {}",
        in_percent(gap)
    ))
}

fn bytes(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "not measured".to_string(), format_bytes)
}

fn run_line(seed: u64, name: &str, run: &RunReport, gap: Option<f64>) -> String {
    let gap = gap.map_or_else(String::new, |gap| format!("  gap {}", percent(gap)));
    format!(
        "  seed {seed} {name:<8} held-out {:.4} (ppl {:.3})  train {:.4}  {:.0} tok/s  peak {} \
         predicted, {} measured{gap}\n",
        run.val_loss,
        run.val_ppl,
        run.train_loss,
        run.tokens_per_s,
        format_bytes(run.peak_bytes_predicted),
        bytes(run.peak_bytes_measured),
    )
}

/// Sizes of the evaluations, if they differ.
pub(super) fn evaluations(report: &ParityReport) -> String {
    let (last, interim) = (report.eval_tokens, report.interim_eval_tokens);
    if last == interim {
        return format!("{last} held-out tokens in each evaluation");
    }
    let mut text =
        format!("{last} held-out tokens in the last evaluation, {interim} in each before");
    // The error falls with the root of the number of tokens.
    if let Some(error) = report.evaluation_error_rel {
        let interim_error = 100.0 * error * (last as f64 / interim as f64).sqrt();
        let _ = write!(text, ", whose mean gap has an error of about {interim_error:.3} % by it");
    }
    text
}

/// Agreement of a mixture's routing, or the reason why it is unknown.
pub(super) fn routing(report: &ParityReport) -> Option<String> {
    if let Some(reason) = &report.routing_left_out {
        return Some(format!("routing of both precisions not compared: {reason}"));
    }
    let routing = report.routing.as_ref()?;
    let layers = routing.layers.iter();
    let least = layers.min_by(|a, b| a.share().total_cmp(&b.share()))?;
    Some(format!(
        "routing alike in BF16 and {}: {:.2} % of choices, {:.2} % in layer {}, where it is least \
         (the same weights, of seed {} after step {}, and {} held-out tokens)",
        title(&report.precision),
        100.0 * routing.share,
        100.0 * least.share(),
        least.layer,
        routing.seed,
        routing.step,
        routing.tokens
    ))
}

/// Use of the experts' buffers in the run with the fullest buffer.
pub(super) fn fullest_rows(report: &ParityReport) -> Option<String> {
    let runs = report.pairs.iter().flat_map(|pair| {
        [Some(&pair.bf16), pair.low_precision.as_ref(), pair.control.as_ref()].into_iter().flatten()
    });
    let rows: Vec<ExpertRows> = runs.flat_map(|run| run.expert_rows.iter().copied()).collect();
    ExpertRows::fullest(&rows)
}

/// The report in lines.
pub(super) fn text(report: &ParityReport) -> String {
    let mut text = String::new();
    let pairs = report.pairs.len();
    let _ = writeln!(
        text,
        "parity of {} over {} steps and {pairs} seeds",
        title(&report.precision),
        report.steps
    );
    for pair in &report.pairs {
        text.push_str(&run_line(pair.seed, "bf16", &pair.bf16, None));
        if let Some(run) = &pair.low_precision {
            text.push_str(&run_line(pair.seed, &report.precision, run, pair.gap_rel));
        }
        if let Some(run) = &pair.control {
            text.push_str(&run_line(pair.seed, "control", run, pair.control_gap_rel));
        }
    }
    let _ = writeln!(
        text,
        "  unigram {:.4}, bigram {:.4} nats per token",
        report.unigram_entropy, report.bigram_entropy
    );
    let _ = writeln!(text, "  {}", evaluations(report));
    if let Some(control) = control(report) {
        let _ = writeln!(text, "  {control}");
    }
    if let Some(routing) = routing(report) {
        let _ = writeln!(text, "  {routing}");
    }
    if let Some(rows) = fullest_rows(report) {
        let _ = writeln!(text, "  {rows}");
    }
    for check in &report.checks {
        let _ = writeln!(text, "  {} {}: {}", status(check.status), check.name, check.detail);
    }
    let _ = write!(text, "verdict: {}", headline(report));
    text
}
