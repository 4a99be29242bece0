//! Many runs as one page, and as a Markdown table.

use std::fmt::Write as _;

use deepwell_report::{Cell, Column, Curve, Dashboard, DashboardChart, DashboardRun};

use crate::details::details;
use crate::row::{COLUMNS, RunRow};
use crate::run::{Metric, Run};

/// A chart of the page.
struct ChartSpec {
    /// `None` for the utilization, which follows from the speed.
    metric: Option<Metric>,
    title: &'static str,
    y_label: &'static str,
    help: &'static str,
    is_noisy: bool,
    /// Whether the chart is left out if no run has values.
    is_optional: bool,
}

const fn chart(
    metric: Metric,
    title: &'static str,
    y_label: &'static str,
    help: &'static str,
) -> ChartSpec {
    ChartSpec { metric: Some(metric), title, y_label, help, is_noisy: true, is_optional: false }
}

const CHARTS: [ChartSpec; 13] = [
    chart(Metric::Loss, "Training loss", "nats per token", "Mean of each step."),
    ChartSpec {
        is_noisy: false,
        ..chart(Metric::ValLoss, "Held-out loss", "nats per token", "Mean of each evaluation.")
    },
    chart(Metric::GradNorm, "Gradient norm", "norm", "Of all gradients, before clipping."),
    ChartSpec {
        is_noisy: false,
        ..chart(Metric::LearningRate, "Learning rate", "learning rate", "Of each step.")
    },
    chart(
        Metric::TokensPerS,
        "Speed",
        "tokens/s",
        "Of all ranks together, without evaluations and checkpoints.",
    ),
    ChartSpec {
        metric: None,
        title: "MFU",
        y_label: "share",
        help: "FLOPs of a step over the dense BF16 peak of the hardware; recomputed FLOPs count.",
        is_noisy: true,
        is_optional: false,
    },
    ChartSpec {
        is_noisy: false,
        ..chart(
            Metric::Goodput,
            "Goodput so far",
            "share",
            "Time of steps whose update counted over the time since the start.",
        )
    },
    ChartSpec {
        is_optional: true,
        ..chart(
            Metric::SpeedOfLight,
            "Roofline",
            "share",
            "Predicted least time of a step over its measured time.",
        )
    },
    ChartSpec {
        is_optional: true,
        ..chart(Metric::Entropy, "Routing: entropy", "1 is even", "Of the layer with the lowest.")
    },
    ChartSpec {
        is_optional: true,
        ..chart(
            Metric::LargestLoad,
            "Routing: largest load",
            "over the mean",
            "Of the layer with the highest; 1 is even.",
        )
    },
    ChartSpec {
        is_optional: true,
        ..chart(Metric::DeadExperts, "Routing: dead experts", "experts", "All layers together.")
    },
    ChartSpec {
        is_optional: true,
        ..chart(Metric::Dropped, "Routing: dropped pairs", "pairs", "Pairs of token and expert.")
    },
    ChartSpec {
        is_optional: true,
        ..chart(
            Metric::SignalToError,
            "Quantized GEMMs",
            "dB",
            "Lowest signal-to-error ratio of a GEMM, in steps that measure it.",
        )
    },
];

impl ChartSpec {
    fn curve(&self, run: &Run, speed_at: usize) -> Curve {
        match self.metric {
            Some(metric) => match run.curve(metric) {
                [] => Curve::None,
                points => Curve::Points(points.to_vec()),
            },
            None => match run.utilization_per_token() {
                Some(factor) => Curve::Scaled { chart: speed_at, factor },
                None => Curve::None,
            },
        }
    }
}

/// Makes a page over runs. With `refresh_s` a browser loads the page again after these seconds.
pub fn dashboard(runs: &[Run], title: &str, refresh_s: Option<u64>) -> Dashboard {
    let is_drawn = |chart: &&ChartSpec| {
        let has = |run: &Run| chart.metric.is_some_and(|metric| !run.curve(metric).is_empty());
        !chart.is_optional || runs.iter().any(has)
    };
    let charts: Vec<&ChartSpec> = CHARTS.iter().filter(is_drawn).collect();
    let is_speed = |chart: &&ChartSpec| chart.metric == Some(Metric::TokensPerS);
    let speed_at = charts.iter().position(is_speed).unwrap_or(0);
    let of_run = |run: &Run| {
        let row = RunRow::of(run);
        DashboardRun {
            name: run.name.clone(),
            cells: COLUMNS.iter().map(|column| column.cell(&row)).collect(),
            settings: run.settings.iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
            tokens_per_step: run.facts.tokens_per_step,
            times: run.times.clone(),
            curves: charts.iter().map(|chart| chart.curve(run, speed_at)).collect(),
            event_steps: run.events.iter().map(|event| event.step as f64).collect(),
            details: details(run),
        }
    };
    Dashboard {
        title: title.to_owned(),
        remarks: remarks(runs),
        columns: COLUMNS
            .iter()
            .map(|it| Column { title: it.title.to_owned(), help: it.help.to_owned() })
            .collect(),
        charts: charts
            .iter()
            .map(|it| DashboardChart {
                title: it.title.to_owned(),
                y_label: it.y_label.to_owned(),
                help: it.help.to_owned(),
                is_noisy: it.is_noisy,
            })
            .collect(),
        runs: runs.iter().map(of_run).collect(),
        refresh_s,
    }
}

/// What a reader of the page has to know about the data.
fn remarks(runs: &[Run]) -> Vec<String> {
    let plural = if runs.len() == 1 { "" } else { "s" };
    let mut remarks = vec![format!("{} run{plural} of Deepwell.", runs.len())];
    let names = |is_of: &dyn Fn(&Run) -> bool| -> Vec<&str> {
        runs.iter().filter(|run| is_of(run)).map(|run| run.name.as_str()).collect()
    };
    let list = |names: &[&str]| match names.len() {
        0..=5 => names.join(", "),
        count => format!("{} and {} more", names[..4].join(", "), count - 4),
    };
    let no_clock = names(&|run| !run.has_clock && !run.times.is_empty());
    if !no_clock.is_empty() {
        remarks.push(format!(
            "The log of {} has no clock: time is the sum of the times of steps there, without \
             evaluations and checkpoints.",
            list(&no_clock)
        ));
    }
    let noted = names(&|run| !run.notes.is_empty());
    if !noted.is_empty() {
        remarks.push(format!(
            "Parts of {} could not be read; the details of the run say which.",
            list(&noted)
        ));
    }
    remarks
}

/// Runs as a Markdown table, with a line about each missing value left as `–`.
///
/// ```
/// let table = deepwell_runs::markdown(&[]);
/// assert!(table.starts_with("| run | model | precision |"));
/// ```
pub fn markdown(runs: &[Run]) -> String {
    let columns: Vec<_> = COLUMNS.iter().filter(|column| column.is_brief).collect();
    let mut out = String::from("| run |");
    for column in &columns {
        let _ = write!(out, " {} |", column.title);
    }
    out.push_str("\n|---|");
    for column in &columns {
        let is_number = !matches!(column.title, "model" | "precision" | "hardware");
        out.push_str(if is_number { "---:|" } else { "---|" });
    }
    out.push('\n');
    for run in runs {
        let row = RunRow::of(run);
        let _ = write!(out, "| {} |", escaped(&row.name));
        for column in &columns {
            let text = match column.cell(&row) {
                Cell::Text(text) | Cell::Number { text, .. } => text,
                Cell::Missing(_) => "–".to_owned(),
            };
            let _ = write!(out, " {} |", escaped(&text));
        }
        out.push('\n');
    }
    out
}

/// Text for a cell of a Markdown table.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests;
