//! Deepwell's own runs: the time of a step and the memory of a GPU.

use super::table::{Row, Table};
use super::time::{gpu_of, stages_fit};
use super::{Scored, ScoredRow};
use deepwell_lower::PlanError;
use deepwell_lower::schedule::orders;
use deepwell_search::gpu_model::GpuModel;
use deepwell_search::memory::{StageLayers, stage_memory};
use deepwell_search::search::{Machines, SearchRequest};
use deepwell_search::step_time::step_time;
use deepwell_search::{ActivationRecompute, ModelShape, Strategy};

/// Columns of this kind.
pub(super) const COLUMNS: [&str; 6] = ["model", "seq", "gbs", "mbs", "precision", "step_ms"];

const MIB: f64 = (1u64 << 20) as f64;

pub(super) fn score(table: &Table) -> Result<Scored, PlanError> {
    let mut scored = Scored::new("step time and memory, Deepwell's own runs", "ms, MiB", false);
    for row in table.rows() {
        let (request, at) = run(&row)?;
        let label = format!("{} {} {at}", row.text("model"), row.text("precision"));
        let refuse = |error: PlanError| row.refuse(error.to_string());
        if row.number("step_ms")?.is_some() {
            let (gpu, fabric) = request.machines.parts();
            let rules = request.step_rules();
            let time = step_time(&request.shape, &at, gpu, fabric, &rules, request.seq);
            let predicted = 1e3 * time.map_err(refuse)?.seconds;
            let measured = row.positive("step_ms")?;
            scored.rows.push(ScoredRow::new(row.line, label.clone(), "time", predicted, measured));
        }
        if row.number("memory_MiB")?.is_some() {
            let order = orders(at.schedule, at.pp, at.micro_batches, at.vpp).map_err(refuse)?;
            let rules = request.memory_rules();
            let of_stage = |(stage, order): (usize, &Vec<_>)| {
                let layers = StageLayers::of(&request.shape, &at, stage);
                stage_memory(&request.shape, &at, &rules, request.seq, &layers, order).allocated()
            };
            let allocated = order.iter().enumerate().map(of_stage).fold(0.0, f64::max);
            let predicted = (allocated + request.outside_bytes_among(at.gpus())) / MIB;
            let measured = row.positive("memory_MiB")?;
            let label = format!("{label}, memory");
            scored.rows.push(ScoredRow::new(row.line, label, "memory", predicted, measured));
        }
    }
    scored.notes.push(
        "memory is that of the search, which has no kernels; `deepwell dryrun` knows the arena"
            .to_string(),
    );
    Ok(scored)
}

fn run(row: &Row<'_>) -> Result<(SearchRequest, Strategy), PlanError> {
    let name = row.text("model");
    let Some(shape) = ModelShape::known(name) else {
        return Err(row.refuse(format!("`model`: expected a preset of Deepwell, got `{name}`")));
    };
    let (tp, pp) = (row.size_or("TP", 1)?, row.size_or("PP", 1)?);
    let gpus = row.size_or("nGPU", 1)?;
    let cp = row.size_or("CP", 1)?;
    let dp = row.share("nGPU", gpus, tp * pp * cp)?;
    let micro_batch = row.size("mbs")?;
    let micro_batches = row.share("gbs", row.size("gbs")?, micro_batch * dp)?;
    let recompute = match row.text("recompute") {
        "" => ActivationRecompute::None,
        text => {
            *ActivationRecompute::ALL.iter().find(|one| one.name() == text).ok_or_else(|| {
                row.refuse(format!("`recompute`: expected none, selective or full, got `{text}`"))
            })?
        }
    };
    let fp8 = match row.text("precision") {
        "bf16" => false,
        text if text.starts_with("mxfp8") => true,
        text => {
            return Err(row.refuse(format!("`precision`: expected bf16 or mxfp8, got `{text}`")));
        }
    };
    let zero = row.number("zero")?.unwrap_or(0.0);
    if !(0.0..=3.0).contains(&zero) || zero.fract() != 0.0 {
        return Err(row.refuse(format!("`zero`: expected 0 to 3, got `{zero}`")));
    }
    let at = Strategy {
        tp,
        sp: tp > 1,
        pp,
        vpp: row.size_or("VP", 1)?,
        ep: row.size_or("EP", 1)?,
        cp,
        dp,
        zero: zero as u8,
        micro_batch,
        micro_batches,
        recompute,
        ..Strategy::SINGLE
    };
    stages_fit(row, &shape, &at)?;
    row.share("GPUs of a stage", at.tp * at.dp, at.ep)?;
    let gpu = gpu_of(row, GpuModel::h200)?;
    let seq = row.size("seq")?;
    let machines = Machines::of_gpus(gpu, gpus);
    let request =
        SearchRequest { fp8, ..SearchRequest::new(shape, seq, at.global_batch(), machines) };
    Ok((request, at))
}
