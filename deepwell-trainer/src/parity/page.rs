//! The parity report as one HTML page.

use deepwell_plan::format_bytes;

use super::text::{control, evaluations, fullest_rows, headline, routing, status};
use super::verdict::{confidence, gaps, in_percent, title};
use super::{
    Curve, FinishedRun, LayerAgreement, ParityOptions, ParityReport, RunKind, SeedRuns, Verdict,
};
use crate::expert_charts::expert_charts;
use crate::report::{
    Block, KeyValueTable, LineChart, Marker, Outcome, ReferenceLine, Scale, Section, Series,
    Stroke, Table, html_page,
};

fn points(curve: &Curve) -> Vec<(f64, f64)> {
    curve.iter().map(|&(step, value)| (step as f64, value)).collect()
}

/// Mean over windows of steps, so that a thousand noisy steps show as a curve.
fn smoothed(curve: &Curve) -> Vec<(f64, f64)> {
    let window = (curve.len() / 100).max(1);
    curve
        .chunks(window)
        .map(|chunk| {
            let mean = chunk.iter().map(|&(_, value)| value).sum::<f64>() / chunk.len() as f64;
            (chunk[chunk.len() - 1].0 as f64, mean)
        })
        .collect()
}

fn chart(title: &str, y_label: &str, series: Vec<Series>) -> LineChart {
    LineChart {
        title: title.to_string(),
        description: format!("{title} over training steps"),
        x_label: "step".to_string(),
        y_label: y_label.to_string(),
        y_scale: Scale::Linear,
        series,
        references: Vec::new(),
        markers: Vec::new(),
    }
}

/// A curve for every run: a colour for each kind of run, the name only at the first seed.
fn of_runs(
    report: &ParityReport,
    runs: &[SeedRuns],
    curve: impl Fn(&FinishedRun) -> Vec<(f64, f64)>,
) -> Vec<Series> {
    let mut all = Vec::new();
    for (index, pair) in runs.iter().enumerate() {
        for (color, (kind, run)) in pair.all().enumerate() {
            let name = if index == 0 { shown_name(report, kind) } else { String::new() };
            let stroke = if runs.len() > 1 { Stroke::Faint } else { Stroke::Solid };
            all.push(Series { stroke, color: Some(color), ..Series::new(name, curve(run)) });
        }
    }
    all
}

fn shown_name(report: &ParityReport, kind: RunKind) -> String {
    match kind {
        RunKind::Bf16 => "BF16".to_string(),
        RunKind::LowPrecision => title(&report.precision),
        RunKind::Control => "control (BF16 from perturbed weights)".to_string(),
    }
}

/// Name of a run in a table, as in metrics and on the terminal.
fn short_name(report: &ParityReport, kind: RunKind) -> &str {
    if kind == RunKind::LowPrecision { &report.precision } else { kind.name() }
}

/// The whole page.
pub(super) fn html(options: &ParityOptions, report: &ParityReport, runs: &[SeedRuns]) -> String {
    let mut sections = vec![
        Section { heading: "Verdict".to_string(), blocks: vec![verdict(report), summary(report)] },
        Section { heading: "Gap".to_string(), blocks: gap(report, runs) },
        Section { heading: "Loss".to_string(), blocks: losses(report, runs) },
        Section { heading: "Gradients and guards".to_string(), blocks: gradients(report, runs) },
        Section { heading: "Memory and speed".to_string(), blocks: memory(report, runs) },
        Section { heading: "Precision".to_string(), blocks: precision(report, runs) },
    ];
    let experts = experts(report, runs);
    if !experts.is_empty() {
        sections.insert(4, Section { heading: "Experts".to_string(), blocks: experts });
    }
    let settings = toml::to_string(&options.settings).unwrap_or_default();
    sections.push(Section {
        heading: "Settings".to_string(),
        blocks: settings.lines().map(|line| Block::Text(line.to_string())).collect(),
    });
    let subject = format!("Deepwell parity: {} against BF16", title(&report.precision));
    html_page(&subject, &sections)
}

fn verdict(report: &ParityReport) -> Block {
    let outcome = match report.verdict {
        Verdict::Holds => Outcome::Pass,
        Verdict::DoesNotHold | Verdict::Invalid => Outcome::Fail,
        Verdict::CannotTell | Verdict::Interrupted => Outcome::Open,
    };
    let reasons = report
        .checks
        .iter()
        .map(|check| format!("{} - {}: {}", status(check.status).trim(), check.name, check.detail))
        .chain(control(report))
        .collect();
    Block::Verdict(crate::report::VerdictBlock { outcome, headline: headline(report), reasons })
}

fn summary(report: &ParityReport) -> Block {
    let learning_rate = report.learning_rate.map_or_else(String::new, |rate| format!("{rate:e}"));
    Block::KeyValues(
        KeyValueTable::default()
            .row("parameters", report.params.to_string())
            .row("pairs of runs", report.pairs.len().to_string())
            .row("steps", report.steps.to_string())
            .row("tokens per run", report.tokens.to_string())
            .row("largest learning rate", learning_rate)
            .row("device", report.device.clone())
            .row(
                "gap at the end, of the last evaluation",
                report.gap_rel.as_ref().map_or_else(|| "none yet".to_string(), in_percent),
            )
            .row("evaluations", evaluations(report))
            .row(
                "quantized share of linear FLOPs",
                format!(
                    "{:.2} % of the blocks' ran, {:.2} % planned, {:.2} % with the head",
                    100.0 * report.quantized_flop_share,
                    100.0 * report.quantized_flop_share_planned,
                    100.0 * report.quantized_flop_share_with_head
                ),
            ),
    )
}

fn reference(label: &str, y: f64) -> ReferenceLine {
    ReferenceLine { label: label.to_string(), y }
}

/// The mean gap over steps with its interval, the gap of each pair, and a table of the final gaps.
fn gap(report: &ParityReport, runs: &[SeedRuns]) -> Vec<Block> {
    let in_percent_at = |value: &dyn Fn(&super::Estimate) -> f64| -> Vec<(f64, f64)> {
        let by_step = report.gap_rel_by_step.iter();
        by_step.map(|(step, gap)| (*step as f64, 100.0 * value(gap))).collect()
    };
    let mean = format!("mean gap of {}", title(&report.precision));
    let mean = Series::new(&mean, in_percent_at(&|gap| gap.mean));
    let mut series = vec![Series { color: Some(1), ..mean }];
    if runs.len() > 1 {
        let confidence = report.gap_rel_by_step.first().map(|(_, gap)| confidence(gap));
        let interval = format!("{} interval", confidence.unwrap_or_default());
        for (name, points) in [
            (interval.as_str(), in_percent_at(&super::Estimate::lower)),
            ("", in_percent_at(&super::Estimate::upper)),
        ] {
            let stroke = Stroke::Dashed;
            series.push(Series { color: Some(1), stroke, ..Series::new(name, points) });
        }
    }
    for (index, pair) in runs.iter().enumerate() {
        let base = pair.bf16.evaluations();
        for (color, (kind, run)) in pair.all().enumerate().skip(1) {
            let curve = gaps(&base, &run.evaluations());
            let points = curve.iter().map(|&(s, g)| (s as f64, 100.0 * g)).collect();
            let name = match (index, kind) {
                (0, RunKind::LowPrecision) => "each pair".to_string(),
                (0, kind) => shown_name(report, kind),
                _ => String::new(),
            };
            let stroke = Stroke::Faint;
            series.push(Series { color: Some(color), stroke, ..Series::new(name, points) });
        }
    }
    let mut chart = chart("Held-out loss relative to BF16", "%", series);
    chart.references = vec![reference("tolerance", 100.0 * report.tolerance_rel)];
    let cell = |gap: Option<f64>| gap.map_or_else(String::new, super::verdict::percent);
    let rows = report
        .pairs
        .iter()
        .map(|pair| {
            vec![
                pair.seed.to_string(),
                format!("{:.4}", pair.bf16.val_loss),
                pair.low_precision
                    .as_ref()
                    .map_or_else(String::new, |run| format!("{:.4}", run.val_loss)),
                cell(pair.gap_rel),
                cell(pair.control_gap_rel),
            ]
        })
        .collect();
    let held_out = format!("{} held-out", title(&report.precision));
    let columns = ["seed", "BF16 held-out", &held_out, "gap", "gap of the control"];
    let table = Table { columns: columns.map(str::to_string).to_vec(), rows };
    vec![Block::Chart(chart), Block::Text(evaluations(report)), Block::Table(table)]
}

fn losses(report: &ParityReport, runs: &[SeedRuns]) -> Vec<Block> {
    let curves = of_runs(report, runs, |run| points(&run.evaluations()));
    let mut held_out = chart("Held-out loss", "nats per token", curves);
    held_out.references = vec![
        reference("unigram", report.unigram_entropy),
        reference("bigram", report.bigram_entropy),
    ];
    let curves = of_runs(report, runs, |run| smoothed(&run.losses()));
    vec![Block::Chart(held_out), Block::Chart(chart("Training loss", "nats per token", curves))]
}

fn gradients(report: &ParityReport, runs: &[SeedRuns]) -> Vec<Block> {
    let norms = |run: &FinishedRun| {
        let curve: Curve =
            run.records.iter().filter_map(|r| Some((r.step, r.grad_norm?))).collect();
        smoothed(&curve)
    };
    let norms = of_runs(report, runs, norms);
    let mut norm_chart = chart("Gradient norm before clipping", "L2 norm", norms);
    let mut rows = Vec::new();
    for pair in runs {
        for (kind, run) in pair.all() {
            let name = short_name(report, kind);
            for event in run.records.iter().filter_map(|record| record.guard.as_ref()) {
                let label = format!("{name} {}", event.gemm);
                norm_chart.markers.push(Marker { label, x: event.step as f64 });
                rows.push(vec![
                    format!("{name}, seed {}", pair.seed),
                    event.step.to_string(),
                    event.gemm.clone(),
                    format!("{:?}", event.kind),
                    event.reason.clone(),
                ]);
            }
        }
    }
    let events = if rows.is_empty() {
        Block::Text("No guard acted in any run.".to_string())
    } else {
        let columns = ["run", "step", "GEMMs of", "event", "reason"];
        Block::Table(Table { columns: columns.map(str::to_string).to_vec(), rows })
    };
    vec![Block::Chart(norm_chart), events]
}

/// Distribution of tokens over experts, for each run of the first seed; empty for a dense model.
fn experts(report: &ParityReport, runs: &[SeedRuns]) -> Vec<Block> {
    let Some(first) = runs.first() else { return Vec::new() };
    let of_run = |(kind, run): (RunKind, &FinishedRun)| {
        let steps: Vec<_> = run.records.iter().map(|r| (r.step, r.experts.as_slice())).collect();
        expert_charts(&shown_name(report, kind), &steps)
    };
    let charts = first.all().flat_map(of_run);
    routing_blocks(report).into_iter().chain(charts).collect()
}

/// Share of routing choices that agree between both precisions, by layer.
fn routing_blocks(report: &ParityReport) -> Vec<Block> {
    let texts = [routing(report), fullest_rows(report)];
    let mut blocks: Vec<Block> = texts.into_iter().flatten().map(Block::Text).collect();
    let Some(routing) = &report.routing else { return blocks };
    let row = |own: &LayerAgreement| {
        let tokens_alike = own.tokens_alike as f64 / routing.tokens as f64;
        vec![
            own.layer.to_string(),
            own.experts.to_string(),
            own.choices.to_string(),
            format!("{:.2} %", 100.0 * own.share()),
            format!("{:.2} %", 100.0 * tokens_alike),
        ]
    };
    let columns =
        ["layer", "experts", "choices", "choices alike", "tokens whose choices are all alike"];
    let rows = routing.layers.iter().map(row).collect();
    blocks.push(Block::Table(Table { columns: columns.map(str::to_string).to_vec(), rows }));
    blocks
}

fn memory(report: &ParityReport, runs: &[SeedRuns]) -> Vec<Block> {
    let row = |name: String, run: &FinishedRun| {
        let summary = &run.summary;
        let (predicted, measured) = (summary.peak_bytes_predicted, summary.peak_bytes_measured);
        let ratio = measured.map_or_else(String::new, |measured| {
            format!("{:+.2} %", 100.0 * (predicted as f64 / measured as f64 - 1.0))
        });
        vec![
            name,
            format_bytes(predicted),
            measured.map_or_else(|| "not measured".to_string(), format_bytes),
            ratio,
            format!("{:.0}", summary.fit.tokens_per_s),
            format!("{:.1} s", summary.wall_s),
        ]
    };
    let rows = runs
        .iter()
        .flat_map(|pair| {
            pair.all().map(move |(kind, run)| {
                row(format!("{}, seed {}", short_name(report, kind), pair.seed), run)
            })
        })
        .collect();
    let columns =
        ["run", "predicted peak", "measured peak", "predicted / measured", "tokens/s", "wall"];
    let table = Table { columns: columns.map(str::to_string).to_vec(), rows };
    vec![Block::Table(table), Block::Table(memory_by_kind(report, &runs[0]))]
}

/// Predicted memory at the peak, a column for each run of a seed.
fn memory_by_kind(report: &ParityReport, pair: &SeedRuns) -> Table {
    let mut kinds: Vec<&String> =
        pair.all().flat_map(|(_, run)| run.summary.bytes_at_peak.keys()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let row = |name: &str, value: &dyn Fn(&FinishedRun) -> Option<u64>| {
        let cells = pair.all().map(|(_, run)| value(run).map_or_else(String::new, format_bytes));
        std::iter::once(name.to_string()).chain(cells).collect::<Vec<_>>()
    };
    let mut rows: Vec<Vec<String>> = kinds
        .into_iter()
        .map(|kind| row(kind, &|run| run.summary.bytes_at_peak.get(kind).copied()))
        .collect();
    rows.push(row("arena", &|run| Some(run.summary.arena_bytes[0])));
    rows.push(row("lower bound of the arena", &|run| Some(run.summary.arena_bytes[1])));
    let names = pair.all().map(|(kind, _)| shown_name(report, kind));
    let columns = std::iter::once("predicted at the peak".to_string()).chain(names).collect();
    Table { columns, rows }
}

fn precision(report: &ParityReport, runs: &[SeedRuns]) -> Vec<Block> {
    let (gemms, bytes) = (&report.quantized_gemms_run, &report.quantized_bytes);
    let row = |name: &str, gemms: u64, bytes: u64| {
        vec![name.to_string(), gemms.to_string(), format_bytes(bytes)]
    };
    let in_formats = format!("run in {}", title(&report.precision));
    let gemms = Table {
        columns: ["GEMM", &in_formats, "quantized bytes read"].map(str::to_string).to_vec(),
        rows: vec![
            row("fprop", gemms.fprop, bytes.fprop),
            row("dgrad", gemms.dgrad, bytes.dgrad),
            row("wgrad", gemms.wgrad, bytes.wgrad),
        ],
    };
    let mut blocks = vec![Block::Table(gemms)];
    if let Some(run) = runs.first().and_then(|pair| pair.low_precision.as_ref()) {
        let rows = run
            .summary
            .precision
            .iter()
            .map(|t| vec![t.tensor.clone(), t.format.to_string(), t.reason.clone()])
            .collect();
        let columns = ["tensor", "format", "reason"].map(str::to_string).to_vec();
        blocks.push(Block::Table(Table { columns, rows }));
    }
    blocks
}
