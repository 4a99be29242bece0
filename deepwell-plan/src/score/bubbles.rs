//! Tables of op times and the bubble rates that another simulator gives for them.

use super::table::{Row, Table};
use super::{Scored, ScoredRow};
use crate::PlanError;
use crate::schedule::{OpTimes, PipelineSchedule, orders, simulate};

/// Columns of this kind.
pub(super) const COLUMNS: [&str; 6] = ["p", "m", "T_F", "T_B", "T_W", "T_comm"];

/// A column, its schedule, and whether it is interleaved with one layer in each chunk.
const CELLS: [(&str, PipelineSchedule, bool); 5] = [
    ("bub_1F1B", PipelineSchedule::OneFOneB, false),
    ("bub_1F1B-I", PipelineSchedule::OneFOneB, true),
    ("bub_ZB-H1", PipelineSchedule::ZbH1, false),
    ("bub_ZB-1p", PipelineSchedule::ZbH1, false),
    ("bub_ZB-H2", PipelineSchedule::ZbH2, false),
];

pub(super) fn score(table: &Table) -> Result<Scored, PlanError> {
    let mut scored = Scored::new("pipeline bubbles", "bubble rate", true);
    for row in table.rows() {
        for (column, schedule, interleaved) in CELLS {
            let Some(measured) = row.number(column)? else { continue };
            let predicted = rate(&row, schedule, interleaved)?;
            let label =
                format!("{} p{} m{} {column}", row.text("model"), row.text("p"), row.text("m"));
            scored.rows.push(ScoredRow::new(row.line, label, &column[4..], predicted, measured));
        }
    }
    if table.has(&["bub_ZB-2p"]) {
        scored.notes.push(
            "bub_ZB-2p is not scored: it is the result of a search whose memory limit the table \
             does not give. bub_ZB-1p is scored as ZB-H1, which has the same limit."
                .to_string(),
        );
    }
    Ok(scored)
}

fn rate(row: &Row<'_>, schedule: PipelineSchedule, interleaved: bool) -> Result<f64, PlanError> {
    let (stages, count) = (row.size("p")?, row.size("m")?);
    // One layer fewer on the first and on the last stage.
    let chunks = if interleaved { (row.size("L")? + 2).div_ceil(stages) } else { 1 };
    let times = OpTimes {
        forward: row.positive("T_F")?,
        input_grad: row.positive("T_B")?,
        weight_grad: row.positive("T_W")?,
        p2p: row.number("T_comm")?.unwrap_or(0.0).max(0.0),
    };
    if stages * count * chunks > 4_000_000 {
        return Err(row.refuse(format!(
            "expected at most 4,000,000 passes of stages, micro-batches and chunks, got {stages} x \
             {count} x {chunks}"
        )));
    }
    let order = orders(schedule, stages, count, chunks).map_err(|e| row.refuse(e.to_string()))?;
    let run = simulate(&order, chunks, &vec![times; stages])?;
    Ok(run.bubble_rate())
}
