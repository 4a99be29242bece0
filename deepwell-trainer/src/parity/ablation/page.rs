//! The ablation report: one HTML page, and a table for the terminal.

use std::fmt::Write as _;

use super::AblationReport;
use crate::parity::Estimate;
use crate::parity::verdict::{in_percent, percent};
use crate::report::{
    Block, Interval, IntervalChart, IntervalRow, KeyValueTable, Section, Table, html_page,
};

fn interval(estimate: &Estimate) -> Interval {
    let half_width = estimate.half_width.map(|half_width| 100.0 * half_width);
    Interval { value: 100.0 * estimate.mean, half_width }
}

/// Subject of the report, in a few words.
fn subject(report: &AblationReport) -> String {
    let of = report.tensors.as_deref().map_or_else(String::new, |glob| format!(" of `{glob}`"));
    let (seeds, what) = (report.whole.pairs, if is_recipe(report) { "recipe" } else { "operands" });
    format!("{} steps on {}, {seeds} seeds, {what}{of}", report.steps, report.device)
}

fn is_recipe(report: &AblationReport) -> bool {
    report.by.is_of_parts()
}

/// Names of the two gaps of a class.
fn names(report: &AblationReport) -> [String; 2] {
    let names = match is_recipe(report) {
        true => ["gap with this part alone", "regained by leaving it out"],
        false => ["quantized alone", "regained by leaving it out"],
    };
    names.map(str::to_string)
}

/// The whole page.
pub(super) fn html(report: &AblationReport) -> String {
    let rows = report
        .classes
        .iter()
        .map(|cost| IntervalRow {
            label: cost.class.clone(),
            intervals: vec![interval(&cost.alone), interval(&cost.regained)],
        })
        .collect();
    let chart = IntervalChart {
        title: "What each class costs".to_string(),
        x_label: "held-out loss relative to BF16, %".to_string(),
        names: names(report).to_vec(),
        rows,
        reference: Some(100.0 * report.whole.mean),
    };
    let rows = report
        .classes
        .iter()
        .map(|cost| vec![cost.class.clone(), in_percent(&cost.alone), in_percent(&cost.regained)])
        .collect();
    let [alone, regained] = names(report);
    let table = Table { columns: vec!["class".to_string(), alone, regained], rows };
    let summary = KeyValueTable::default()
        .row("runs", subject(report))
        .row("parameters", report.params.to_string())
        .row("whole policy", in_percent(&report.whole));
    let section = |heading: &str, blocks| Section { heading: heading.to_string(), blocks };
    html_page(
        "Deepwell ablation: where the loss goes",
        &[
            section("Whole policy", vec![Block::KeyValues(summary)]),
            section("Classes", vec![Block::Intervals(chart), Block::Table(table)]),
        ],
    )
}

/// The report in lines.
pub(super) fn text(report: &AblationReport) -> String {
    let mut text = format!("ablation: {}\n", subject(report));
    let _ = writeln!(text, "  whole policy {}", in_percent(&report.whole));
    let short = |estimate: &Estimate| {
        let half_width = estimate
            .half_width
            .map_or_else(String::new, |half_width| format!(" ± {:.3}", 100.0 * half_width));
        format!("{}{half_width}", percent(estimate.mean))
    };
    let width = report.classes.iter().map(|cost| cost.class.chars().count()).max();
    let width = width.unwrap_or_default().max(18);
    let _ = writeln!(text, "  {:<width$} {:>22} {:>22}", "class", "alone", "regained without");
    for cost in &report.classes {
        let (alone, regained) = (short(&cost.alone), short(&cost.regained));
        let _ = writeln!(text, "  {:<width$} {alone:>22} {regained:>22}", cost.class);
    }
    text
}
