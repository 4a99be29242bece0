//! A run as a row of a table.

use std::path::PathBuf;

use deepwell_report::Cell;
use serde::Serialize;

use crate::run::{Metric, Run};
use crate::units::{bytes, count, duration, percent};

/// A run as a row of a table; `null` in JSON where the run has no such value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunRow {
    /// Name, unique among the runs read together.
    pub name: String,
    /// The folder.
    pub folder: PathBuf,
    /// `finished`, `running`, `interrupted`, `ended early` or `unknown`.
    pub state: &'static str,
    /// Identity of the run, 32 hexadecimal digits.
    pub id: Option<String>,
    /// Time of the start.
    pub started: Option<String>,
    /// Version of Deepwell.
    pub version: Option<String>,
    /// The model.
    pub model: Option<String>,
    /// Precision preset, or format of a policy file.
    pub precision: Option<String>,
    /// Quantized share of the FLOPs of linear layers, 0 to 1.
    pub quantized_share: Option<f64>,
    /// The device.
    pub device: Option<String>,
    /// GPU or processor.
    pub machine: Option<String>,
    /// Number of ranks.
    pub ranks: Option<u64>,
    /// Trained values.
    pub params: Option<f64>,
    /// Last step of the log.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: Option<u64>,
    /// Tokens trained on.
    pub tokens: Option<f64>,
    /// Mean of the last 20 training losses, nats per token.
    pub loss: Option<f64>,
    /// Last held-out loss, nats per token.
    pub val_loss: Option<f64>,
    /// Step of the last held-out loss.
    pub val_step: Option<f64>,
    /// Median tokens per second.
    pub tokens_per_s: Option<f64>,
    /// Median FLOP/s over the BF16 peak, 0 to 1.
    pub mfu: Option<f64>,
    /// Time of counted steps over the time since the start, 0 to 1.
    pub goodput: Option<f64>,
    /// Predicted peak memory, bytes.
    pub peak_bytes_predicted: Option<f64>,
    /// Measured peak memory, bytes.
    pub peak_bytes_measured: Option<f64>,
    /// Seconds from the start to the last line.
    pub wall_s: Option<f64>,
    /// Number of guard events.
    pub guard_events: usize,
    /// Number of steps whose update was skipped.
    pub skipped_steps: u64,
    /// What could not be read.
    pub notes: Vec<String>,
}

impl RunRow {
    /// The row of a run.
    pub fn of(run: &Run) -> RunRow {
        let facts = run.facts.clone();
        let val = run.last(Metric::ValLoss);
        RunRow {
            name: run.name.clone(),
            folder: run.folder.clone(),
            state: run.state.name(),
            id: facts.id,
            started: facts.started,
            version: facts.version,
            model: facts.model,
            precision: facts.precision_name,
            quantized_share: facts.quantized_share,
            device: facts.device,
            machine: facts.machine,
            ranks: facts.ranks,
            params: facts.params,
            step: run.step_last,
            steps: facts.steps,
            tokens: run.tokens(),
            loss: run.loss(),
            val_loss: val.map(|point| point.1),
            val_step: val.map(|point| point.0),
            tokens_per_s: run.median(Metric::TokensPerS),
            mfu: run.utilization(),
            goodput: run.goodput(),
            peak_bytes_predicted: facts.peak_bytes_predicted,
            peak_bytes_measured: facts.peak_bytes_measured,
            wall_s: run.wall_s(),
            guard_events: run.events.len(),
            skipped_steps: run.skipped_steps,
            notes: run.notes.clone(),
        }
    }
}

/// A column of the table of runs.
pub(crate) struct ColumnSpec {
    pub(crate) title: &'static str,
    pub(crate) help: &'static str,
    pub(crate) value: fn(&RunRow) -> Option<Cell>,
    /// The reason for a missing value.
    pub(crate) lacks: &'static str,
    /// Whether the column is in the Markdown table.
    pub(crate) is_brief: bool,
}

impl ColumnSpec {
    pub(crate) fn cell(&self, row: &RunRow) -> Cell {
        (self.value)(row).unwrap_or_else(|| Cell::Missing(self.lacks.to_owned()))
    }
}

fn text(text: &Option<String>) -> Option<Cell> {
    text.clone().map(Cell::Text)
}

fn number(value: Option<f64>, format: impl Fn(f64) -> String) -> Option<Cell> {
    value.filter(|value| value.is_finite()).map(|value| Cell::Number { value, text: format(value) })
}

const NO_FACTS: &str = "no facts.json or summary.json: an earlier version began the run, or the \
                        run never reached its first step";

/// The columns of the table of runs.
pub(crate) const COLUMNS: [ColumnSpec; 16] = [
    ColumnSpec {
        title: "state",
        help: "finished; running (its process is on this machine); interrupted on request; ended \
               early: no process on this machine, and fewer steps than asked for",
        value: |row| Some(Cell::Text(row.state.to_owned())),
        lacks: "",
        is_brief: false,
    },
    ColumnSpec {
        title: "model",
        help: "preset or path",
        value: |row| text(&row.model),
        lacks: NO_FACTS,
        is_brief: true,
    },
    ColumnSpec {
        title: "precision",
        help: "preset of the precision, or format of the policy file",
        value: |row| text(&row.precision),
        lacks: NO_FACTS,
        is_brief: true,
    },
    ColumnSpec {
        title: "quantized",
        help: "quantized share of the FLOPs of linear layers in the blocks; before the end of a \
               run the planned share",
        value: |row| number(row.quantized_share, percent),
        lacks: NO_FACTS,
        is_brief: false,
    },
    ColumnSpec {
        title: "hardware",
        help: "GPU or processor, and the number of ranks",
        value: hardware,
        lacks: NO_FACTS,
        is_brief: true,
    },
    ColumnSpec {
        title: "steps",
        help: "last step of the log, of the steps asked for",
        value: steps,
        lacks: "",
        is_brief: true,
    },
    ColumnSpec {
        title: "tokens",
        help: "tokens trained on: steps times tokens of a step",
        value: |row| number(row.tokens, count),
        lacks: "the tokens of a step are unknown without run.json",
        is_brief: true,
    },
    ColumnSpec {
        title: "training loss",
        help: "mean of the last 20 steps, nats per token",
        value: |row| number(row.loss, |loss| format!("{loss:.4}")),
        lacks: "no finite training loss in the log",
        is_brief: true,
    },
    ColumnSpec {
        title: "held-out loss",
        help: "last evaluation, nats per token",
        value: |row| number(row.val_loss, |loss| format!("{loss:.4}")),
        lacks: "no finite held-out loss in the log",
        is_brief: true,
    },
    ColumnSpec {
        title: "tokens/s",
        help: "median over steps",
        value: |row| number(row.tokens_per_s, count),
        lacks: "no speed in the log",
        is_brief: true,
    },
    ColumnSpec {
        title: "MFU",
        help: "FLOPs of a step over the dense BF16 peak of the hardware, median over steps; with \
               recomputation its FLOPs count too. The peak of a processor is an estimate",
        value: |row| number(row.mfu, percent),
        lacks: "the peak of the hardware is unknown: an emulator, an unknown GPU, or a run of an \
                earlier version",
        is_brief: true,
    },
    ColumnSpec {
        title: "goodput",
        help: "time of steps whose update counted over the whole time since the start; \
               evaluations, checkpoints, interruptions and repeated steps are lost time",
        value: |row| number(row.goodput, percent),
        lacks: "no clock in the log of an earlier version, and no summary of a run in one piece",
        is_brief: true,
    },
    ColumnSpec {
        title: "peak memory",
        help: "measured by the process or the driver, less what was held before compilation",
        value: |row| number(row.peak_bytes_measured, bytes),
        lacks: "measured at the end of a run; predicted memory is in the next column",
        is_brief: true,
    },
    ColumnSpec {
        title: "predicted memory",
        help: "peak memory predicted before the run",
        value: |row| number(row.peak_bytes_predicted, bytes),
        lacks: NO_FACTS,
        is_brief: false,
    },
    ColumnSpec {
        title: "guard events",
        help: "fallbacks, returns, loss spikes and non-finite steps",
        value: |row| number(Some(row.guard_events as f64), |events| format!("{events}")),
        lacks: "",
        is_brief: false,
    },
    ColumnSpec {
        title: "time",
        help: "from the start to the last line of the log, interruptions included",
        value: |row| number(row.wall_s, duration),
        lacks: "no clock in the log of an earlier version, and no summary of a run in one piece",
        is_brief: true,
    },
];

fn hardware(row: &RunRow) -> Option<Cell> {
    let name = row.machine.clone().or(row.device.clone())?;
    Some(Cell::Text(match row.ranks {
        Some(ranks) if ranks > 1 => format!("{ranks} ranks, {name}"),
        _ => name,
    }))
}

fn steps(row: &RunRow) -> Option<Cell> {
    let text = match row.steps {
        Some(steps) if steps != row.step => format!("{} of {steps}", row.step),
        _ => row.step.to_string(),
    };
    Some(Cell::Number { value: row.step as f64, text })
}
