//! Tables of step times and throughputs.

use super::table::{Row, Table};
use super::{Scored, ScoredRow};
use deepwell_lower::PlanError;
use deepwell_lower::schedule::orders;
use deepwell_search::collectives::{Fabric, Generation};
use deepwell_search::gpu_model::GpuModel;
use deepwell_search::memory::{AttentionKernel, MemoryRules, StageLayers, stage_memory};
use deepwell_search::step_time::{StepRules, step_time};
use deepwell_search::{ActivationRecompute, ModelShape, Strategy};

/// Columns of "Reducing Activation Recomputation".
pub(super) const KORTHIKANTI: [&str; 5] = ["iter_present_s", "L", "h", "TP", "PP"];
/// Columns of the same paper's table with full recomputation only.
pub(super) const KORTHIKANTI_FULL: [&str; 5] = ["iter_full_s", "L", "h", "TP", "PP"];
/// Columns of the Megatron-LM papers' weak scaling on A100.
pub(super) const SC21: [&str; 5] = ["params_B", "TF_per_GPU", "nGPU", "TP", "PP"];
/// Columns of Megatron-Core's weak scaling on H100.
pub(super) const H100: [&str; 5] = ["params", "TF_per_GPU", "nGPU", "TP", "PP"];
/// Columns of the comparison with ZeRO-3.
pub(super) const ZERO3: [&str; 5] = ["scheme", "params_B", "nGPU", "mbs", "TF_per_GPU"];
/// Columns of vTrain's measurements.
pub(super) const VTRAIN: [&str; 5] = ["iter_ms", "L", "TP", "DP", "PP"];

/// Largest number of passes of a step.
const PASSES_MAX: usize = 4_000_000;
/// Largest number of chunks per stage tried by a choice.
const CHOICE_CHUNKS_MAX: usize = 128;
/// Largest number of passes of a step with a choice of micro-batch and chunks.
const CHOICE_PASSES_MAX: usize = 200_000;

/// Sequence length and padded vocabulary of the A100 papers.
const A100_SEQ: usize = 2048;
const A100_VOCAB: usize = 51200;

/// The paper's runs, from the authors' script (`examples/sc21/run_table_1.sh` of Megatron-LM):
/// layers, hidden size, TP, PP, batch; micro-batch and chunks.
const SC21_RUNS: [([usize; 5], [usize; 2]); 10] = [
    ([24, 2304, 1, 1, 512], [16, 1]),
    ([30, 3072, 2, 1, 512], [16, 1]),
    ([36, 4096, 4, 1, 512], [16, 1]),
    ([40, 6144, 8, 1, 1024], [8, 1]),
    ([48, 8192, 8, 2, 1536], [4, 1]),
    ([60, 10240, 8, 4, 1792], [2, 3]),
    ([80, 12288, 8, 8, 2304], [2, 2]),
    ([96, 16384, 8, 16, 2160], [1, 2]),
    ([105, 20480, 8, 35, 2520], [1, 3]),
    ([128, 25600, 8, 64, 3072], [1, 1]),
];

fn a100_fabric() -> Fabric {
    Fabric::new(Generation::Ampere, 8, 25.0)
}

/// The GPU of a row: given by the column `gpu`, otherwise the default.
pub(super) fn gpu_of(row: &Row<'_>, default: fn() -> GpuModel) -> Result<GpuModel, PlanError> {
    let name = row.text("gpu");
    if name.is_empty() {
        return Ok(default());
    }
    GpuModel::named(name).ok_or_else(|| {
        let known = "a100, h100, h200, b200, b300, gb200, gb300";
        row.refuse(format!("`gpu`: expected one of {known}, got `{name}`"))
    })
}

/// The table's network, or NVIDIA's own for a row with a GPU of another generation.
fn fabric_of(gpu: &GpuModel, table: Fabric) -> Fabric {
    if gpu.generation == table.generation {
        table
    } else {
        Fabric::new(gpu.generation, gpu.domain_gpus, gpu.nic_gbps)
    }
}

/// Tokens per sequence, from either of two column names.
fn seq_of(row: &Row<'_>, default: usize) -> Result<usize, PlanError> {
    let default = row.size_or("s", default)?;
    row.size_or("seq", default)
}

/// Chunks per stage, from any of the column names; `None` without such a column.
fn chunks_of(row: &Row<'_>) -> Result<Option<usize>, PlanError> {
    for column in ["VP", "VPP", "interleave"] {
        if !row.text(column).is_empty() {
            return row.size(column).map(Some);
        }
    }
    Ok(None)
}

fn gpt(row: &Row<'_>, seq: usize, vocab: usize) -> Result<ModelShape, PlanError> {
    let (layers, hidden, heads) = (row.size("L")?, row.size("h")?, row.size("a")?);
    if !hidden.is_multiple_of(heads) {
        return Err(row.refuse(format!("`h`: expected a multiple of {heads} heads, got {hidden}")));
    }
    let vocab = row.size_or("V", vocab)?;
    let kv_heads = row.size_or("kv", heads)?;
    if !heads.is_multiple_of(kv_heads) {
        let what = format!("`kv`: expected a divisor of {heads} heads, got {kv_heads}");
        return Err(row.refuse(what));
    }
    let ffn = row.size_or("ffn", 4 * hidden)?;
    Ok(ModelShape { kv_heads, ffn, ..ModelShape::gpt(layers, hidden, heads, vocab, seq) })
}

/// Checks a requirement of every pipeline: all stages have layers.
pub(super) fn stages_fit(
    row: &Row<'_>,
    shape: &ModelShape,
    at: &Strategy,
) -> Result<(), PlanError> {
    if shape.layers < at.pp * at.vpp {
        let (layers, parts) = (shape.layers, at.pp * at.vpp);
        return Err(row.refuse(format!("`L`: expected {parts} layers or more, got {layers}")));
    }
    if at.pp * at.micro_batches * at.vpp > PASSES_MAX {
        return Err(row.refuse("expected at most 4,000,000 passes".to_string()));
    }
    Ok(())
}

pub(super) fn korthikanti(table: &Table) -> Result<Scored, PlanError> {
    let mut scored = Scored::new("step time, Korthikanti et al.", "s", false);
    scored.published = "Calculon: 3.65 % average, 8.87 % at most, with the next table";
    for row in table.rows() {
        let gpu = gpu_of(&row, GpuModel::a100)?;
        let seq = seq_of(&row, A100_SEQ)?;
        let shape = gpt(&row, seq, A100_VOCAB)?;
        let (tp, pp) = (row.size("TP")?, row.size("PP")?);
        let dp = row.share("nGPU", row.size("nGPU")?, tp * pp)?;
        let micro_batch = row.size("mbs")?;
        let micro_batches = row.share("gbs", row.size("gbs")?, micro_batch * dp)?;
        let base = Strategy {
            tp,
            pp,
            dp,
            micro_batch,
            micro_batches,
            vpp: chunks_of(&row)?.unwrap_or(1),
            ..Strategy::SINGLE
        };
        stages_fit(&row, &shape, &base)?;
        let runs = [
            ("iter_full_s", false, ActivationRecompute::Full),
            ("iter_present_s", true, ActivationRecompute::Selective),
        ];
        for (column, sp, recompute) in runs {
            if row.number(column)?.is_none() {
                continue;
            }
            let measured = row.positive(column)?;
            let at = Strategy { sp, recompute, ..base };
            let rules = &StepRules::MEGATRON_2021;
            let fabric = fabric_of(&gpu, a100_fabric());
            let time = step_time(&shape, &at, &gpu, &fabric, rules, seq);
            let time = time.map_err(|error| row.refuse(error.to_string()))?;
            let label = format!("{} {}", row.text("model"), recompute.name());
            let group = recompute.name();
            scored.rows.push(ScoredRow::new(row.line, label, group, time.seconds, measured));
        }
    }
    Ok(scored)
}

/// The micro-batch and chunks of the row; otherwise `known` values; otherwise the fastest predicted
/// choice that fits.
#[expect(clippy::too_many_arguments, reason = "a row, its run and the machine")]
fn chosen(
    row: &Row<'_>,
    shape: &ModelShape,
    base: &Strategy,
    gpu: &GpuModel,
    fabric: &Fabric,
    rules: (&StepRules, &MemoryRules),
    seq: usize,
    known: Option<[usize; 2]>,
) -> Result<(Strategy, f64), PlanError> {
    let per_rank = row.share("gbs", row.size("gbs")?, base.dp)?;
    stages_fit(row, shape, &Strategy { micro_batches: per_rank, ..*base })?;
    let mut best: Option<(Strategy, f64)> = None;
    let mut first_error = None;
    let mut given = (row.size_or("mbs", 0)?, chunks_of(row)?);
    if let ((0, None), Some([micro_batch, vpp])) = (given, known) {
        given = (micro_batch, Some(vpp));
    }
    if given.0 > 0 {
        row.share("gbs of a data-parallel rank", per_rank, given.0)?;
    }
    let sizes = if given.0 > 0 { vec![given.0] } else { vec![1, 2, 4, 8, 16] };
    // Any number of chunks that divides the layers of a stage.
    let each = if base.pp > 1 { shape.layers / base.pp } else { 1 };
    let divides = |vpp: &usize| *vpp == 1 || shape.layers.is_multiple_of(base.pp * vpp);
    let each = each.min(CHOICE_CHUNKS_MAX);
    let chunks = given.1.map_or_else(|| (1..=each).filter(divides).collect(), |vpp| vec![vpp]);
    for micro_batch in sizes.into_iter().filter(|&size| per_rank.is_multiple_of(size)) {
        for &vpp in &chunks {
            let at = Strategy { micro_batch, micro_batches: per_rank / micro_batch, vpp, ..*base };
            // Dozens of choices are simulated, so each has the smaller limit.
            let is_choice = given.0 == 0 && (micro_batch, vpp) != (1, 1);
            let most = if is_choice { CHOICE_PASSES_MAX } else { PASSES_MAX };
            if at.pp * at.micro_batches * vpp > most {
                continue;
            }
            let Ok(orders) = orders(at.schedule, at.pp, at.micro_batches, vpp) else { continue };
            let layers = StageLayers::even(shape.layers, 0, at.pp, vpp);
            let memory = stage_memory(shape, &at, rules.1, seq, &layers, &orders[0]);
            if memory.allocated() > 0.9 * gpu.memory_bytes && is_choice {
                continue;
            }
            match step_time(shape, &at, gpu, fabric, rules.0, seq) {
                Ok(time) if best.is_none_or(|(_, least)| time.seconds < least) => {
                    best = Some((at, time.seconds));
                }
                Ok(_) => {}
                Err(error) => first_error = Some(error),
            }
        }
    }
    best.ok_or_else(|| {
        let why = first_error.map_or("nothing fits".to_string(), |error| error.to_string());
        row.refuse(format!("expected degrees with a schedule, got none: {why}"))
    })
}

pub(super) fn sc21(table: &Table) -> Result<Scored, PlanError> {
    let mut scored = Scored::new("step time, Megatron-LM SC21", "s", false);
    scored.published = "Calculon: 3.65 % average, 8.87 % at most, with the table before";
    for row in table.rows() {
        let gpu = gpu_of(&row, GpuModel::a100)?;
        let seq = seq_of(&row, A100_SEQ)?;
        let shape = gpt(&row, seq, A100_VOCAB)?;
        let (tp, pp) = (row.size("TP")?, row.size("PP")?);
        let dp = row.share("nGPU", row.size("nGPU")?, tp * pp)?;
        let base =
            Strategy { tp, pp, dp, recompute: ActivationRecompute::Full, ..Strategy::SINGLE };
        let memory = MemoryRules { attention: AttentionKernel::Unfused, ..MemoryRules::megatron() };
        let rules = (&StepRules::MEGATRON_2021, &memory);
        let fabric = fabric_of(&gpu, a100_fabric());
        let run = [shape.layers, shape.hidden, tp, pp, row.size("gbs")?];
        let known = SC21_RUNS.iter().find(|(of, _)| *of == run).map(|(_, choice)| *choice);
        let (at, time) = chosen(&row, &shape, &base, &gpu, &fabric, rules, seq, known)?;
        let measured = sc21_seconds(&row, &shape, seq)?;
        let label = format!("{}B {at}", row.text("params_B"));
        scored.rows.push(ScoredRow::new(row.line, label, "sc21", time, measured));
    }
    scored.notes.push(
        "where micro-batch and interleaving are not in the table: those of least time".into(),
    );
    Ok(scored)
}

/// Seconds computed from the paper's FLOP/s per GPU, which include recomputation.
fn sc21_seconds(row: &Row<'_>, shape: &ModelShape, seq: usize) -> Result<f64, PlanError> {
    let (layers, hidden) = (shape.layers as f64, shape.hidden as f64);
    let tokens = (row.size("gbs")? * seq) as f64;
    let rest = seq as f64 / (6.0 * hidden) + shape.vocab as f64 / (16.0 * layers * hidden);
    let flops = 96.0 * tokens * layers * hidden * hidden * (1.0 + rest);
    Ok(flops / row.positive("TF_per_GPU")? / 1e12 / row.size("nGPU")? as f64)
}

pub(super) fn h100(table: &Table) -> Result<Scored, PlanError> {
    let mut scored = Scored::new("step time, Megatron-Core weak scaling", "s", false);
    let own = Fabric::new(Generation::Hopper, 8, 50.0);
    for row in table.rows() {
        let gpu = gpu_of(&row, GpuModel::h100)?;
        let fabric = fabric_of(&gpu, own);
        let seq = seq_of(&row, 4096)?;
        let shape = ModelShape { tied: false, ..gpt(&row, seq, 131_072)? };
        let (tp, pp) = (row.size("TP")?, row.size("PP")?);
        let dp = row.share("nGPU", row.size("nGPU")?, tp * pp)?;
        let base = Strategy { tp, pp, dp, sp: tp > 1, zero: 1, ..Strategy::SINGLE };
        // Transformer Engine's kernels are fused, comparable to `torch.compile`.
        let step = StepRules::MODERN.of_compiled_pytorch(gpu.generation);
        let rules = (&step, &MemoryRules { dropout: false, ..MemoryRules::megatron() });
        let (at, time) = chosen(&row, &shape, &base, &gpu, &fabric, rules, seq, None)?;
        let tokens = (row.size("gbs")? * seq) as f64;
        let flops = shape.model_flops(tokens, seq);
        let measured = flops / row.positive("TF_per_GPU")? / 1e12 / row.size("nGPU")? as f64;
        let label = format!("{} {at}", row.text("params"));
        scored.rows.push(ScoredRow::new(row.line, label, "h100", time, measured));
    }
    scored.notes.push(
        "where micro-batch and interleaving are not in the table: those of least time".into(),
    );
    Ok(scored)
}

pub(super) fn zero3(table: &Table) -> Result<Scored, PlanError> {
    let mut scored = Scored::new("step time, ZeRO-3 and Megatron-LM SC21", "s", false);
    for row in table.rows() {
        let gpu = gpu_of(&row, GpuModel::a100)?;
        let billions = row.positive("params_B")?;
        // The two models of the comparison, GPT-3 and MT-NLG, unless the row has sizes.
        let shape = if !row.text("L").is_empty() {
            gpt(&row, A100_SEQ, A100_VOCAB)?
        } else if billions < 300.0 {
            ModelShape::gpt(96, 12288, 96, A100_VOCAB, A100_SEQ)
        } else {
            ModelShape::gpt(105, 20480, 128, A100_VOCAB, A100_SEQ)
        };
        if (shape.parameters() / 1e9 / billions - 1.0).abs() > 0.02 {
            let what = format!(
                "`params_B`: expected 174.6, 529.6, or L, h and a of a model of that size, got \
                 `{billions}`"
            );
            return Err(row.refuse(what));
        }
        let gpus = row.size("nGPU")?;
        let scheme = row.text("scheme");
        let (tp, pp) = match (scheme, billions < 300.0) {
            ("zero3", _) => (1, 1),
            ("ptd(MP96)", true) => (8, 12),
            ("ptd(MP280)", false) => (8, 35),
            _ => {
                let what =
                    format!("`scheme`: expected zero3, ptd(MP96) or ptd(MP280), got `{scheme}`");
                return Err(row.refuse(what));
            }
        };
        let dp = row.share("nGPU", gpus, tp * pp)?;
        let micro_batch = row.size("mbs")?;
        let micro_batches = row.share("gbs", row.size("gbs")?, micro_batch * dp)?;
        let at = Strategy {
            tp,
            pp,
            dp,
            micro_batch,
            micro_batches,
            zero: if scheme == "zero3" { 3 } else { 0 },
            recompute: ActivationRecompute::Full,
            ..Strategy::SINGLE
        };
        stages_fit(&row, &shape, &at)?;
        let half = StepRules { gradient_bytes: 2.0, ..StepRules::MEGATRON_2021 };
        let rules = if scheme == "zero3" { half } else { StepRules::MEGATRON_2021 };
        let fabric = fabric_of(&gpu, a100_fabric());
        let time = step_time(&shape, &at, &gpu, &fabric, &rules, A100_SEQ);
        let time = time.map_err(|error| row.refuse(error.to_string()))?;
        let measured = sc21_seconds(&row, &shape, A100_SEQ)?;
        let label = format!("{scheme} {billions}B {gpus} GPUs");
        let group = if scheme == "zero3" { "zero3" } else { "ptd" };
        let mut scored_row = ScoredRow::new(row.line, label, group, time.seconds, measured);
        // Twice the GPUs took the same time, so the waiting is not explained by NCCL's constants.
        scored_row.unmodelled = (scheme == "zero3").then_some("ZeRO-3 of DeepSpeed in 2021");
        scored.rows.push(scored_row);
    }
    Ok(scored)
}

pub(super) fn vtrain(table: &Table) -> Result<Scored, PlanError> {
    let mut scored = Scored::new("step time and ranking, vTrain", "s", false);
    scored.published = "vTrain: 14.7 % over several nodes; regret: nobody";
    scored.ranks = true;
    // 800 Gbit/s per node of eight GPUs.
    let own = Fabric { nic_gbps: 12.5, ..a100_fabric() };
    for row in table.rows() {
        let gpu = gpu_of(&row, GpuModel::a100)?;
        let fabric = fabric_of(&gpu, own);
        let seq = seq_of(&row, A100_SEQ)?;
        let shape = gpt(&row, seq, A100_VOCAB)?;
        let (tp, dp, pp) = (row.size("TP")?, row.size("DP")?, row.size("PP")?);
        if tp * dp * pp != row.size_or("nGPU", tp * dp * pp)? {
            return Err(row.refuse(format!("`nGPU`: expected {}, TP x DP x PP", tp * dp * pp)));
        }
        let micro_batch = row.size("mbs")?;
        let micro_batches = row.share("gbs", row.size("gbs")?, micro_batch * dp)?;
        let at = Strategy {
            tp,
            pp,
            dp,
            micro_batch,
            micro_batches,
            vpp: chunks_of(&row)?.unwrap_or(1),
            recompute: ActivationRecompute::Full,
            ..Strategy::SINGLE
        };
        stages_fit(&row, &shape, &at)?;
        let rules = &StepRules::MEGATRON_2021;
        let time = step_time(&shape, &at, &gpu, &fabric, rules, seq);
        let time = time.map_err(|error| row.refuse(error.to_string()))?;
        let size = match row.text("params_B") {
            "" => format!("{:.1}", shape.parameters() / 1e9),
            size => size.to_string(),
        };
        let label = format!("{size}B TP{tp} DP{dp} PP{pp} mbs{micro_batch}");
        // Plans of one model and batch on the same number of GPUs are alternatives.
        let group = format!("{size}B on {}", tp * dp * pp);
        let measured = row.positive("iter_ms")? / 1e3;
        scored.rows.push(ScoredRow::new(row.line, label, &group, time.seconds, measured));
    }
    Ok(scored)
}
