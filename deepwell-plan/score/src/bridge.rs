//! NVIDIA's runs of Megatron-Bridge: throughput of dense models and of mixtures.

use super::table::{Row, Table};
use super::time::{gpu_of, stages_fit};
use super::{Scored, ScoredRow};
use deepwell_lower::PlanError;
use deepwell_search::collectives::Fabric;
use deepwell_search::gpu_model::GpuModel;
use deepwell_search::step_time::{StepRules, step_time};
use deepwell_search::{ModelShape, Strategy};

/// Columns of this kind.
pub(super) const COLUMNS: [&str; 7] =
    ["model", "seq", "nGPU", "precision", "TP", "PP", "tok_s_gpu"];

pub(super) fn score(table: &Table) -> Result<Scored, PlanError> {
    let mut scored = Scored::new("throughput, Megatron-Bridge", "tokens/s/GPU", false);
    scored.larger_is_better = true;
    for row in table.rows() {
        let name = row.text("model");
        let Some(shape) = ModelShape::known(name) else {
            return Err(row.refuse(format!("`model`: expected a preset, got `{name}`")));
        };
        let (at, fsdp) = strategy(&row, &shape)?;
        let gpu = gpu_of(&row, GpuModel::h100)?;
        let fabric = Fabric::new(gpu.generation, gpu.domain_gpus, gpu.nic_gbps);
        let fp8 = match row.text("precision") {
            "bf16" => false,
            "fp8" => true,
            other => {
                let what = format!("`precision`: expected bf16 or fp8, got `{other}`");
                return Err(row.refuse(what));
            }
        };
        // Transformer Engine's kernels are fused; experts are evenly loaded.
        let rules = StepRules {
            fp8,
            expert_imbalance: 1.0,
            ..StepRules::MODERN.of_compiled_pytorch(gpu.generation)
        };
        let seq = row.size("seq")?;
        let time = step_time(&shape, &at, &gpu, &fabric, &rules, seq);
        let time = time.map_err(|error| row.refuse(error.to_string()))?;
        let predicted = (at.global_batch() * seq) as f64 / time.seconds / at.gpus() as f64;
        let label = format!("{name} {} {} {at}", row.text("gpu"), row.text("precision"));
        let group = if shape.experts.is_some() { "mixtures" } else { "dense" };
        let measured = row.positive("tok_s_gpu")?;
        let mut scored_row = ScoredRow::new(row.line, label, group, predicted, measured);
        scored_row.unmodelled = fsdp.then_some("Megatron-FSDP's own buffers");
        scored.rows.push(scored_row);
    }
    Ok(scored)
}

/// The degrees of a row, and whether ranks shard weights by Megatron-FSDP.
fn strategy(row: &Row<'_>, shape: &ModelShape) -> Result<(Strategy, bool), PlanError> {
    let (tp, pp, cp) = (row.size("TP")?, row.size("PP")?, row.size_or("CP", 1)?);
    let dp = row.share("nGPU", row.size("nGPU")?, tp * pp * cp)?;
    let micro_batch = row.size("mbs")?;
    let fsdp = row.number("fsdp")?.is_some_and(|ranks| ranks > 0.0);
    let at = Strategy {
        tp,
        sp: tp > 1,
        pp,
        vpp: row.size_or("VP", 1)?,
        cp,
        ep: row.size_or("EP", 1)?,
        dp,
        zero: if fsdp { 3 } else { 1 },
        micro_batch,
        micro_batches: row.share("gbs", row.size("gbs")?, micro_batch * dp)?,
        ..Strategy::SINGLE
    };
    stages_fit(row, shape, &at)?;
    row.share("GPUs of a stage", at.tp * at.cp * at.dp, at.ep)?;
    Ok((at, fsdp))
}
