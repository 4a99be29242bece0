//! llm-foundry's MPT runs with FSDP: throughput, and the largest micro-batch.

use super::table::{Row, Table};
use super::time::{gpu_of, stages_fit};
use super::{FitCounts, Scored, ScoredRow};
use deepwell_lower::PlanError;
use deepwell_search::collectives::{Fabric, Generation};
use deepwell_search::gpu_model::GpuModel;
use deepwell_search::memory::{AttentionKernel, OUTSIDE_BYTES, fsdp_memory};
use deepwell_search::step_time::{StepRules, step_time};
use deepwell_search::{ActivationRecompute, ModelShape, Strategy};

/// Columns of this kind.
pub(super) const COLUMNS: [&str; 6] = ["model", "seq", "nGPU", "mbs", "tok_s_gpu", "shard"];

const VOCAB: usize = 50368;
/// GPU memory reserved by the driver: an H100 of 81,559 MiB has 79.11 GiB for allocations
/// (vllm-project/vllm#27508).
const DRIVER_BYTES: f64 = 81_559.0 * 1_048_576.0 - 79.11 * 1_073_741_824.0;

/// Sizes of MPT: name, layers, hidden size, heads.
const MPT: [(&str, usize, usize, usize); 9] = [
    ("125m", 12, 768, 12),
    ("350m", 24, 1024, 16),
    ("760m", 24, 1536, 12),
    ("1b", 24, 2048, 16),
    ("3b", 32, 2560, 20),
    ("7b", 32, 4096, 32),
    ("13b", 40, 5120, 40),
    ("30b", 48, 7168, 56),
    ("70b", 80, 8192, 64),
];

pub(super) fn score(table: &Table) -> Result<Scored, PlanError> {
    let mut scored =
        Scored::new("throughput and micro-batch, llm-foundry FSDP", "tokens/s/GPU", false);
    scored.published = "regret: nobody";
    scored.ranks = true;
    scored.larger_is_better = true;
    let mut fits = FitCounts::default();
    let mut runs: Vec<(Run, f64)> = Vec::new();
    for row in table.rows() {
        let run = Run::of(&row)?;
        let time = run.tokens_per_s(&row)?;
        let group = format!("{} on {}", row.text("model"), run.gpu.name);
        let label = format!(
            "{} seq{} {}GPU mbs{} {}",
            row.text("model"),
            run.seq,
            run.at.dp,
            run.at.micro_batch,
            row.text("shard")
        );
        let measured = row.positive("tok_s_gpu")?;
        let mut scored_row = ScoredRow::new(row.line, label, &group, time, measured);
        if run.offload {
            scored_row.unmodelled = Some("activations on the host");
            scored.rows.push(scored_row);
            continue;
        }
        let (this, next) = (run.bytes(run.at.micro_batch), run.bytes(run.at.micro_batch + 1));
        let limit = run.limit_bytes();
        fits.rows += 1;
        fits.fits += usize::from(this <= limit);
        fits.next_does_not += usize::from(next > limit);
        fits.twice_does_not += usize::from(run.bytes(2 * run.at.micro_batch) > limit);
        scored_row.memory_gb = Some((this / 1e9, next / 1e9));
        scored.rows.push(scored_row);
        runs.push((run, next));
    }
    for (run, next) in &runs {
        let is_refuted = runs.iter().any(|(other, _)| other.shows_room_for_more_than(run));
        fits.refuted += usize::from(is_refuted);
        fits.next_does_not_of_others += usize::from(!is_refuted && *next > run.limit_bytes());
    }
    scored.fits = Some(fits);
    Ok(scored)
}

struct Run {
    /// Whether attention is Triton's. llm-foundry's `sweep.py` selects Triton for 13b and 30b, and
    /// `flash` for other sizes; its setup.py (at b2a43a14, the table's commit) installed flash-attn
    /// 1.0.9. No single factor describes Triton relative to FlashAttention 2.
    triton: bool,
    /// Whether activations are offloaded to the host, included in neither time nor memory.
    offload: bool,
    shape: ModelShape,
    at: Strategy,
    gpu: GpuModel,
    seq: usize,
}

impl Run {
    fn of(row: &Row<'_>) -> Result<Run, PlanError> {
        let text = row.text("model").to_ascii_lowercase();
        let size = text.trim_start_matches("mpt-");
        let known = MPT.iter().find(|known| known.0 == size);
        let (layers, hidden, heads) = match known {
            _ if !row.text("L").is_empty() => (row.size("L")?, row.size("h")?, row.size("a")?),
            Some(&(_, layers, hidden, heads)) => (layers, hidden, heads),
            None => {
                let known = MPT.map(|known| known.0).join(", ");
                let what = format!("`model`: expected one of {known}, or L, h and a, got `{size}`");
                return Err(row.refuse(what));
            }
        };
        if !hidden.is_multiple_of(heads) {
            let what = format!("`h`: expected a multiple of {heads} heads, got {hidden}");
            return Err(row.refuse(what));
        }
        let seq = row.size("seq")?;
        // MPT: no biases, LayerNorm without bias, ALiBi or learned positions, tied embedding.
        let shape = ModelShape {
            bias: false,
            norm_vectors: 1,
            ..ModelShape::gpt(layers, hidden, heads, VOCAB, seq)
        };
        let zero = match row.text("shard") {
            "FS" | "FULL_SHARD" => 3,
            "SGO" | "SHARD_GRAD_OP" => 2,
            "NO" | "NO_SHARD" => 0,
            other => {
                return Err(row.refuse(format!("`shard`: expected FS, SGO or NO, got `{other}`")));
            }
        };
        let is_on = |column: &str| match row.text(column).to_ascii_lowercase().as_str() {
            "1" | "true" => Ok(true),
            "" | "-" | "0" | "false" => Ok(false),
            other => Err(row.refuse(format!("`{column}`: expected 0 or 1, got `{other}`"))),
        };
        let recompute = match is_on("AC")? {
            true => ActivationRecompute::Full,
            false => ActivationRecompute::None,
        };
        let at = Strategy {
            dp: row.size("nGPU")?,
            zero,
            micro_batch: row.size("mbs")?,
            micro_batches: row.size_or("GA", 1)?,
            recompute,
            ..Strategy::SINGLE
        };
        stages_fit(row, &shape, &at)?;
        let triton = matches!(size, "13b" | "30b");
        let offload = is_on("offload")?;
        Ok(Run { triton, offload, shape, at, gpu: gpu_of(row, GpuModel::h100)?, seq })
    }

    fn tokens_per_s(&self, row: &Row<'_>) -> Result<f64, PlanError> {
        let (generation, domain_gpus) = (self.gpu.generation, 8);
        let nic_gbps = if generation == Generation::Ampere { 25.0 } else { 50.0 };
        let fabric = Fabric::new(generation, domain_gpus, nic_gbps);
        let fp8 = row.text("prec").contains("fp8");
        // The loss is one kernel in each direction.
        let eager = StepRules::MODERN.of_eager_pytorch(generation);
        let rules = StepRules {
            gradient_bytes: 2.0,
            fp8,
            attention: if self.triton { 1.0 } else { StepRules::FLASH_ATTENTION_1 },
            loss_traffic: (8.0, 6.0),
            ..eager
        };
        let time = step_time(&self.shape, &self.at, &self.gpu, &fabric, &rules, self.seq)?;
        Ok((self.at.micro_batch * self.at.micro_batches * self.seq) as f64 / time.seconds)
    }

    /// Bytes on a GPU with this micro-batch, CUDA context and NCCL included. With `flash`, MPT pads
    /// the output of the attention kernel, another copy.
    fn bytes(&self, micro_batch: usize) -> f64 {
        let at = Strategy { micro_batch, ..self.at };
        let kernel = match self.triton {
            true => AttentionKernel::Flash,
            false => AttentionKernel::FusedWithCopy,
        };
        fsdp_memory(&self.shape, &at, self.seq, kernel).allocated() + OUTSIDE_BYTES
    }

    /// Bytes available for allocation.
    fn limit_bytes(&self) -> f64 {
        self.gpu.memory_bytes - DRIVER_BYTES
    }

    /// Whether this run's micro-batch has at least the tokens of `other`'s plus one sequence, on no
    /// more GPUs: then the micro-batch of `other` is not the largest possible.
    fn shows_room_for_more_than(&self, other: &Run) -> bool {
        let (own, others) = (&self.at, &other.at);
        self.shape.layers == other.shape.layers
            && self.gpu == other.gpu
            && (own.zero, own.recompute) == (others.zero, others.recompute)
            && own.dp <= others.dp
            && self.seq * own.micro_batch >= other.seq * (others.micro_batch + 1)
    }
}
