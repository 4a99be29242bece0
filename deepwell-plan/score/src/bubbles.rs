//! Tables of op times with bubble rates from another simulator, and tables with the memory of the
//! same runs.

use super::table::{Row, Table};
use super::{Scored, ScoredRow};
use deepwell_lower::PlanError;
use deepwell_lower::schedule::{OpTimes, PipelineSchedule, orders, simulate};
use deepwell_search::memory::{AttentionKernel, MemoryRules, StageLayers, stage_memory};
use deepwell_search::{LayerSplit, ModelShape, Strategy};

/// Columns of this kind.
pub(super) const COLUMNS: [&str; 6] = ["p", "m", "T_F", "T_B", "T_W", "T_comm"];

/// Columns of peak memory by schedule.
pub(super) const MEMORY: [&str; 3] = ["model", "1F1B", "1F1B-I"];

/// Models of the paper: name, layers, heads, hidden size, stages, micro-batch.
const MODELS: [(&str, [usize; 5]); 4] = [
    ("1.5B", [22, 24, 2304, 8, 6]),
    ("6.2B", [30, 32, 4096, 8, 3]),
    ("14.6B", [46, 40, 5120, 16, 1]),
    ("28.3B", [62, 48, 6144, 32, 1]),
];
/// GPT-2's vocabulary, padded to a multiple of 128.
const VOCAB: usize = 50304;
const GIB: f64 = (1u64 << 30) as f64;

/// A column, its schedule, and whether the schedule is interleaved with one layer per chunk.
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
    // The first and the last stage have one layer fewer.
    let chunks = if interleaved { (row.size("L")? + 2).div_ceil(stages) } else { 1 };
    let times = OpTimes {
        forward: row.positive("T_F")?,
        dgrad: row.positive("T_B")?,
        wgrad: row.positive("T_W")?,
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

/// Peak memory of the same models: bytes allocated on the fullest stage. A sequence has 1,024
/// tokens, attention is unfused, and the number of micro-batches fills the pipeline.
pub(super) fn memory(table: &Table) -> Result<Scored, PlanError> {
    let mut scored = Scored::new("peak memory of pipelines", "GiB", false);
    for row in table.rows() {
        let name = row.text("model");
        let known = MODELS.iter().find(|(known, _)| *known == name).map(|(_, sizes)| *sizes);
        let [layers, heads, hidden, pp, micro_batch] = match known {
            Some(sizes) if row.text("L").is_empty() => sizes,
            None if row.text("L").is_empty() => {
                let names = MODELS.map(|(known, _)| known).join(", ");
                let what = format!("`model`: expected one of {names}, or L, a, h, p and mbs");
                return Err(row.refuse(format!("{what}, got `{name}`")));
            }
            _ => [row.size("L")?, row.size("a")?, row.size("h")?, row.size("p")?, row.size("mbs")?],
        };
        let seq = row.size_or("seq", 1024)?;
        if pp > 1024 || layers > 100_000 {
            return Err(row.refuse("expected at most 1,024 stages, 100,000 layers".to_string()));
        }
        if !hidden.is_multiple_of(heads) || !(layers + 2).is_multiple_of(pp) || layers + 2 < 2 * pp
        {
            let what =
                "expected heads that divide h, and stages that divide L + 2, two or more each";
            return Err(
                row.refuse(format!("{what}, got L {layers}, a {heads}, h {hidden}, p {pp}"))
            );
        }
        let shape = ModelShape::gpt(layers, hidden, heads, VOCAB, seq);
        let chunks = (layers + 2) / pp;
        let columns = [
            ("1F1B", PipelineSchedule::OneFOneB, 1),
            ("1F1B-I", PipelineSchedule::OneFOneB, chunks),
            ("ZB-1p", PipelineSchedule::ZbH1, 1),
            ("ZB-2p", PipelineSchedule::ZbH2, 1),
        ];
        for (column, schedule, vpp) in columns {
            if row.number(column)?.is_none() {
                continue;
            }
            let measured = row.positive(column)?;
            let at = Strategy {
                pp,
                vpp,
                schedule,
                micro_batch,
                micro_batches: 3 * pp,
                split: LayerSplit::Ends,
                ..Strategy::SINGLE
            };
            let order = orders(schedule, pp, at.micro_batches, vpp);
            let order = order.map_err(|error| row.refuse(error.to_string()))?;
            let rules =
                MemoryRules { attention: AttentionKernel::Unfused, ..MemoryRules::megatron() };
            let of_stage = |stage: usize| {
                let held = StageLayers::of(&shape, &at, stage);
                stage_memory(&shape, &at, &rules, seq, &held, &order[stage]).allocated()
            };
            let predicted = (0..pp).map(of_stage).fold(0.0, f64::max) / GIB;
            let label = format!("{name} {column}");
            scored.rows.push(ScoredRow::new(row.line, label, column, predicted, measured));
        }
    }
    scored.notes.push("ZB-1p and ZB-2p as ZB-H1 and ZB-H2, which have their limits".to_string());
    Ok(scored)
}
