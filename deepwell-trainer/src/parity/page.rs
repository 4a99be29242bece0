//! The parity report for people: one HTML page, and a table for the terminal.

use deepwell_plan::format_bytes;

use super::verdict::gaps;
use super::{Curve, FinishedRun, GAP_TOLERANCE_REL, ParityOptions, ParityReport, RunReport};
use crate::report::{
    Block, KeyValueTable, LineChart, Marker, Outcome, ReferenceLine, Scale, Section, Series, Table,
    Verdict, html_page,
};

const RUN_NAMES: [&str; 3] = ["BF16", "MXFP8", "control (BF16, other data order)"];

fn points(curve: &Curve) -> Vec<(f64, f64)> {
    curve.iter().map(|&(step, value)| (step as f64, value)).collect()
}

/// Mean over windows of steps, so that a thousand noisy steps read as a curve.
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

fn named(runs: &[FinishedRun], curve: impl Fn(&FinishedRun) -> Vec<(f64, f64)>) -> Vec<Series> {
    runs.iter().zip(RUN_NAMES).map(|(run, name)| Series::new(name, curve(run))).collect()
}

/// The whole page.
pub(super) fn html(options: &ParityOptions, report: &ParityReport, runs: &[FinishedRun]) -> String {
    let mut sections = vec![
        Section { heading: "Verdict".to_string(), blocks: vec![verdict(report), summary(report)] },
        Section { heading: "Loss".to_string(), blocks: losses(report, runs) },
        Section { heading: "Gradients and guards".to_string(), blocks: gradients(runs) },
        Section { heading: "Memory and speed".to_string(), blocks: memory(report, runs) },
        Section { heading: "Precision".to_string(), blocks: precision(report, runs) },
    ];
    let settings = toml::to_string(&options.settings).unwrap_or_default();
    sections.push(Section {
        heading: "Settings".to_string(),
        blocks: settings.lines().map(|line| Block::Text(line.to_string())).collect(),
    });
    html_page("Deepwell parity: MXFP8 against BF16", &sections)
}

fn verdict(report: &ParityReport) -> Block {
    let outcome = match report.verdict.as_str() {
        "pass" => Outcome::Pass,
        "fail" => Outcome::Fail,
        _ => Outcome::Open,
    };
    let headline = match outcome {
        Outcome::Pass => "MXFP8 holds BF16's loss",
        Outcome::Fail => "MXFP8 does not hold BF16's loss",
        Outcome::Open => "Interrupted: no verdict yet",
    };
    let reasons = report
        .checks
        .iter()
        .map(|check| {
            let mark = if check.passed { "holds" } else { "fails" };
            format!("{} {mark}: {}", check.name, check.detail)
        })
        .collect();
    Block::Verdict(Verdict { outcome, headline: headline.to_string(), reasons })
}

fn summary(report: &ParityReport) -> Block {
    Block::KeyValues(
        KeyValueTable::default()
            .row("parameters", report.params.to_string())
            .row("steps", report.steps.to_string())
            .row("tokens per run", report.tokens.to_string())
            .row("device", report.device.clone())
            .row(
                "gap, mean of the last three",
                report
                    .val_gap_rel
                    .map_or_else(|| "none yet".to_string(), |gap| format!("{:+.4} %", 100.0 * gap)),
            )
            .row(
                "MXFP8 share of linear FLOPs",
                format!(
                    "{:.2} % of the blocks, {:.2} % with the head",
                    100.0 * report.mxfp8_flop_share,
                    100.0 * report.mxfp8_flop_share_with_head
                ),
            ),
    )
}

fn losses(report: &ParityReport, runs: &[FinishedRun]) -> Vec<Block> {
    let mut held_out =
        chart("Held-out loss", "nats per token", named(runs, |run| points(&run.evaluations())));
    let reference = |label: &str, y| ReferenceLine { label: label.to_string(), y };
    held_out.references = vec![
        reference("unigram", report.unigram_entropy),
        reference("bigram", report.bigram_entropy),
    ];
    let training =
        chart("Training loss", "nats per token", named(runs, |run| smoothed(&run.losses())));
    let mut blocks = vec![Block::Chart(held_out), Block::Chart(training)];
    if let Some(base) = runs.first().filter(|_| runs.len() > 1) {
        // Each run in the color that it has in the other charts.
        let differences = runs
            .iter()
            .zip(RUN_NAMES)
            .enumerate()
            .skip(1)
            .map(|(index, (run, name))| {
                let gaps = gaps(&base.evaluations(), &run.evaluations());
                let points = gaps.iter().map(|&(s, g)| (s as f64, 100.0 * g)).collect();
                Series { color: Some(index), ..Series::new(name, points) }
            })
            .collect();
        let mut difference = chart("Held-out loss relative to BF16", "%", differences);
        difference.references = vec![
            reference("tolerance", 100.0 * GAP_TOLERANCE_REL),
            reference("tolerance", -100.0 * GAP_TOLERANCE_REL),
        ];
        blocks.push(Block::Chart(difference));
    }
    blocks
}

fn gradients(runs: &[FinishedRun]) -> Vec<Block> {
    let norms = |run: &FinishedRun| {
        let curve: Curve =
            run.records.iter().filter_map(|r| Some((r.step, r.grad_norm?))).collect();
        smoothed(&curve)
    };
    let mut norm_chart = chart("Gradient norm before clipping", "L2 norm", named(runs, norms));
    let mut rows = Vec::new();
    for (run, name) in runs.iter().zip(RUN_NAMES) {
        for event in run.records.iter().filter_map(|record| record.guard.as_ref()) {
            norm_chart
                .markers
                .push(Marker { label: format!("{name} {}", event.layer), x: event.step as f64 });
            rows.push(vec![
                name.to_string(),
                event.step.to_string(),
                event.layer.clone(),
                format!("{:?}", event.kind),
                event.reason.clone(),
            ]);
        }
    }
    let events = if rows.is_empty() {
        Block::Text("No guard acted in any run.".to_string())
    } else {
        let columns = ["run", "step", "layer", "event", "reason"];
        Block::Table(Table { columns: columns.map(str::to_string).to_vec(), rows })
    };
    vec![Block::Chart(norm_chart), events]
}

fn bytes(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "not measured".to_string(), format_bytes)
}

fn memory(report: &ParityReport, runs: &[FinishedRun]) -> Vec<Block> {
    let reports: Vec<&RunReport> =
        [Some(&report.bf16), report.mxfp8.as_ref(), report.control.as_ref()]
            .into_iter()
            .flatten()
            .take(runs.len())
            .collect();
    let rows = reports
        .iter()
        .zip(RUN_NAMES)
        .map(|(run, name)| {
            let ratio = run.peak_bytes_measured.map_or_else(String::new, |measured| {
                let ratio = run.peak_bytes_predicted as f64 / measured as f64 - 1.0;
                format!("{:+.2} %", 100.0 * ratio)
            });
            vec![
                name.to_string(),
                format_bytes(run.peak_bytes_predicted),
                bytes(run.peak_bytes_measured),
                ratio,
                format!("{:.0}", run.tokens_per_s),
                format!("{:.1} s", run.wall_s),
            ]
        })
        .collect();
    let columns =
        ["run", "predicted peak", "measured peak", "predicted / measured", "tokens/s", "wall"];
    let table = Table { columns: columns.map(str::to_string).to_vec(), rows };
    vec![Block::Table(table), Block::Table(memory_by_kind(runs))]
}

/// What memory is predicted to hold at the peak, a column for each run.
fn memory_by_kind(runs: &[FinishedRun]) -> Table {
    let mut kinds: Vec<&String> =
        runs.iter().flat_map(|run| run.summary.bytes_at_peak.keys()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let row = |name: &str, value: &dyn Fn(&FinishedRun) -> Option<u64>| {
        let cells = runs.iter().map(|run| value(run).map_or_else(String::new, format_bytes));
        std::iter::once(name.to_string()).chain(cells).collect::<Vec<_>>()
    };
    let mut rows: Vec<Vec<String>> = kinds
        .into_iter()
        .map(|kind| row(kind, &|run| run.summary.bytes_at_peak.get(kind).copied()))
        .collect();
    rows.push(row("arena", &|run| Some(run.summary.arena_bytes[0])));
    rows.push(row("lower bound of the arena", &|run| Some(run.summary.arena_bytes[1])));
    let names = RUN_NAMES.iter().take(runs.len()).map(|name| name.to_string());
    let columns = std::iter::once("predicted at the peak".to_string()).chain(names).collect();
    Table { columns, rows }
}

fn precision(report: &ParityReport, runs: &[FinishedRun]) -> Vec<Block> {
    let (gemms, bytes) = (&report.mxfp8_gemms_run, &report.mxfp8_quantized_bytes);
    let row = |name: &str, gemms: u64, bytes: u64| {
        vec![name.to_string(), gemms.to_string(), format_bytes(bytes)]
    };
    let products = Table {
        columns: ["product", "MXFP8 GEMMs run", "quantized bytes read"]
            .map(str::to_string)
            .to_vec(),
        rows: vec![
            row("fprop", gemms.fprop, bytes.fprop),
            row("dgrad", gemms.dgrad, bytes.dgrad),
            row("wgrad", gemms.wgrad, bytes.wgrad),
        ],
    };
    let mut blocks = vec![Block::Table(products)];
    if let Some(run) = runs.get(1) {
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

/// The report for a terminal.
pub(super) fn text(report: &ParityReport) -> String {
    let line = |name: &str, run: &RunReport| {
        format!(
            "  {name:<8} held-out {:.4} (ppl {:.3})  train {:.4}  {:.0} tok/s  peak {} predicted, \
             {} measured\n",
            run.val_loss,
            run.val_ppl,
            run.train_loss,
            run.tokens_per_s,
            format_bytes(run.peak_bytes_predicted),
            bytes(run.peak_bytes_measured),
        )
    };
    let mut text = format!("parity over {} steps: {}\n", report.steps, report.verdict);
    text.push_str(&line("bf16", &report.bf16));
    for (name, run) in [("mxfp8", &report.mxfp8), ("control", &report.control)] {
        if let Some(run) = run {
            text.push_str(&line(name, run));
        }
    }
    text.push_str(&format!(
        "  unigram {:.4}, bigram {:.4} nats per token\n",
        report.unigram_entropy, report.bigram_entropy
    ));
    for check in &report.checks {
        let mark = if check.passed { "ok  " } else { "FAIL" };
        text.push_str(&format!("  {mark} {}: {}\n", check.name, check.detail));
    }
    text
}
