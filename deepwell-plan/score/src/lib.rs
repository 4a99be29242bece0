//! Compares the planner with published measurements and with Deepwell's own runs.
//!
//! A table is a CSV file whose columns determine its kind. Each row is predicted from the row's own
//! values, and compared. No constant of the model is fitted to a row scored here.
//!
//! ```
//! use deepwell_score::{TABLES, score};
//!
//! let (file, text) = TABLES[0];
//! let scored = score(file, text).expect("a table of the crate");
//! assert!(!scored.rows.is_empty());
//! ```

mod bridge;
mod bubbles;
mod figure;
mod fsdp;
mod megatron;
mod own;
mod report;
mod table;
mod time;

use serde::Serialize;

use deepwell_lower::PlanError;
pub use figure::{docs_table, figure};
use table::Table;

/// The tables of the repository: file name and text.
pub const TABLES: [(&str, &str); 13] = [
    ("zero_bubble_rates.csv", include_str!("../scores/zero_bubble_rates.csv")),
    ("megatron_small_memory.csv", include_str!("../scores/megatron_small_memory.csv")),
    ("korthikanti_time.csv", include_str!("../scores/korthikanti_time.csv")),
    ("megatron_sc21_time.csv", include_str!("../scores/megatron_sc21_time.csv")),
    ("megatron_h100_weak_scaling.csv", include_str!("../scores/megatron_h100_weak_scaling.csv")),
    ("vtrain_time.csv", include_str!("../scores/vtrain_time.csv")),
    ("foundry_fsdp_h100.csv", include_str!("../scores/foundry_fsdp_h100.csv")),
    ("megatron_sc21_zero3.csv", include_str!("../scores/megatron_sc21_zero3.csv")),
    ("zero_bubble_memory.csv", include_str!("../scores/zero_bubble_memory.csv")),
    ("deepwell_h200.csv", include_str!("../scores/deepwell_h200.csv")),
    (UNFITTED[0], include_str!("../scores/deepwell_ranks_h100.csv")),
    (UNFITTED[1], include_str!("../scores/foundry_fsdp_a100.csv")),
    (UNFITTED[2], include_str!("../scores/megatron_bridge.csv")),
];

/// Tables of runs whose times were not used to fit any constant of the model.
pub const UNFITTED: [&str; 3] =
    ["deepwell_ranks_h100.csv", "foundry_fsdp_a100.csv", "megatron_bridge.csv"];

/// A prediction and its measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScoredRow {
    /// Line of the file.
    pub line: usize,
    /// Description of the row.
    pub label: String,
    /// Group of rows ranked against each other.
    pub group: String,
    /// The planner's prediction.
    pub predicted: f64,
    /// The measurement.
    pub measured: f64,
    /// A feature of the row that is not modelled.
    pub unmodelled: Option<&'static str>,
    /// GB at this micro-batch and at the next larger one.
    pub memory_gb: Option<(f64, f64)>,
}

impl ScoredRow {
    fn new(line: usize, label: String, group: &str, predicted: f64, measured: f64) -> ScoredRow {
        let group = group.to_string();
        ScoredRow { line, label, group, predicted, measured, unmodelled: None, memory_gb: None }
    }
}

/// Counts of rows by predicted fit of the measured micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FitCounts {
    /// Number of rows.
    pub rows: usize,
    /// Rows whose micro-batch is predicted to fit.
    pub fits: usize,
    /// Rows where one more sequence is predicted not to fit.
    pub next_does_not: usize,
    /// Rows where twice the micro-batch is predicted not to fit.
    pub twice_does_not: usize,
    /// Rows whose micro-batch is not the largest possible, as shown by another row of the table.
    pub refuted: usize,
    /// Rows where one more sequence is predicted not to fit, without the refuted rows.
    pub next_does_not_of_others: usize,
}

/// A scored table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scored {
    /// File of the table.
    pub file: String,
    /// Measured quantity.
    pub kind: &'static str,
    /// Unit of the figures.
    pub unit: &'static str,
    /// Rows in the order of the file.
    pub rows: Vec<ScoredRow>,
    /// Whether errors are differences rather than ratios.
    pub absolute: bool,
    /// Whether the rows of a group are alternatives.
    pub ranks: bool,
    /// Whether larger figures are better.
    pub larger_is_better: bool,
    /// Fit of the micro-batches, if the table has the largest that fit.
    pub fits: Option<FitCounts>,
    /// The best published result; empty if none is known.
    pub published: &'static str,
    /// Remarks on the figures.
    pub notes: Vec<String>,
}

/// Ranking quality within a group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupScore {
    /// The group.
    pub group: String,
    /// Number of rows in the group.
    pub rows: usize,
    /// Measured time of the best predicted plan relative to the best measured plan, less 1.
    pub regret: f64,
    /// Kendall's rank correlation of predictions and measurements (τ-b).
    pub tau: f64,
}

/// Reads a table, determines its kind, and scores it.
///
/// # Errors
/// [`PlanError::Score`] with file and line for an invalid table.
pub fn score(file: &str, text: &str) -> Result<Scored, PlanError> {
    let table = Table::read(file, text)?;
    type Kind = (&'static [&'static str], fn(&Table) -> Result<Scored, PlanError>);
    let kinds: [Kind; 12] = [
        (&bubbles::COLUMNS, bubbles::score),
        (&bubbles::MEMORY, bubbles::memory),
        (&megatron::COLUMNS, megatron::score),
        (&time::KORTHIKANTI, time::korthikanti),
        (&time::KORTHIKANTI_FULL, time::korthikanti),
        (&fsdp::COLUMNS, fsdp::score),
        (&own::COLUMNS, own::score),
        (&bridge::COLUMNS, bridge::score),
        (&time::ZERO3, time::zero3),
        (&time::SC21, time::sc21),
        (&time::H100, time::h100),
        (&time::VTRAIN, time::vtrain),
    ];
    let Some((_, score)) = kinds.iter().find(|(columns, _)| table.has(columns)) else {
        let known = kinds.map(|(columns, _)| columns.join(", ")).join("; or ");
        let what = format!("expected the columns {known}; got {}", table.columns());
        return Err(PlanError::Score { file: file.to_string(), line: 1, what });
    };
    let mut scored = score(&table)?;
    scored.file = file.to_string();
    Ok(scored)
}

impl Scored {
    fn new(kind: &'static str, unit: &'static str, absolute: bool) -> Scored {
        Scored {
            file: String::new(),
            kind,
            unit,
            rows: Vec::new(),
            absolute,
            ranks: false,
            larger_is_better: false,
            fits: None,
            published: "",
            notes: Vec::new(),
        }
    }

    /// Signed error of a row: a difference for absolute kinds, otherwise the ratio less 1.
    pub fn error(&self, row: &ScoredRow) -> f64 {
        if self.absolute {
            row.predicted - row.measured
        } else {
            row.predicted / row.measured - 1.0
        }
    }

    /// Magnitudes of errors, smallest first.
    fn magnitudes(&self) -> Vec<f64> {
        let mut errors: Vec<f64> = self.rows.iter().map(|row| self.error(row).abs()).collect();
        errors.sort_by(f64::total_cmp);
        errors
    }

    /// Mean magnitude of the errors.
    pub fn mean_error(&self) -> f64 {
        let errors = self.magnitudes();
        errors.iter().sum::<f64>() / errors.len().max(1) as f64
    }

    /// Magnitude not exceeded by `share` of the rows.
    pub fn error_quantile(&self, share: f64) -> f64 {
        let errors = self.magnitudes();
        let at = ((errors.len() as f64 * share).ceil() as usize).clamp(1, errors.len().max(1));
        errors.get(at - 1).copied().unwrap_or(0.0)
    }

    /// Regret and rank correlation of each group with at least two rows.
    pub fn groups(&self) -> Vec<GroupScore> {
        if !self.ranks {
            return Vec::new();
        }
        let mut names: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !names.contains(&row.group.as_str()) {
                names.push(&row.group);
            }
        }
        let groups = names.into_iter().map(|name| {
            let rows: Vec<&ScoredRow> = self.rows.iter().filter(|row| row.group == name).collect();
            let sign = if self.larger_is_better { -1.0 } else { 1.0 };
            let best = |figure: fn(&ScoredRow) -> f64| {
                rows.iter()
                    .copied()
                    .min_by(|a, b| (sign * figure(a)).total_cmp(&(sign * figure(b))))
            };
            let chosen = best(|row| row.predicted).map_or(1.0, |row| row.measured);
            let least = best(|row| row.measured).map_or(1.0, |row| row.measured);
            let regret = if self.larger_is_better { least / chosen } else { chosen / least } - 1.0;
            GroupScore { group: name.to_string(), rows: rows.len(), regret, tau: tau(&rows) }
        });
        groups.filter(|group| group.rows > 1).collect()
    }
}

/// Kendall's τ-b, which corrects for ties.
fn tau(rows: &[&ScoredRow]) -> f64 {
    let (mut sum, mut predicted_pairs, mut measured_pairs) = (0.0, 0.0, 0.0);
    for (at, a) in rows.iter().enumerate() {
        for b in &rows[at + 1..] {
            let sign =
                |x: f64, y: f64| x.partial_cmp(&y).map_or(0.0, |order| f64::from(order as i8));
            let (predicted, measured) =
                (sign(a.predicted, b.predicted), sign(a.measured, b.measured));
            sum += predicted * measured;
            predicted_pairs += predicted.abs();
            measured_pairs += measured.abs();
        }
    }
    let pairs = (predicted_pairs * measured_pairs).sqrt();
    if pairs > 0.0 { sum / pairs } else { 0.0 }
}

#[cfg(test)]
mod tests;
