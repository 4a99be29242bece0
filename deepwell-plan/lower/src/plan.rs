//! A training plan for given hardware, as data.

use std::fmt;

use deepwell_ir::ops::{MasterFormat, MomentFormat};
use deepwell_ir::{PrecisionPolicy, Recompute, SavedActivations, TensorPrecision, Tile};
use deepwell_precision::{Fallback, GemmMode};
use serde::{Deserialize, Serialize};

use crate::{Parallel, format_bytes};

/// The kernel of an op, and the number of calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelPlan {
    /// Name of the op.
    pub op: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Tile of the kernel, if the kernel has tiles.
    pub tile: Option<Tile>,
    /// Calls per step.
    pub calls: usize,
}

/// The optimizer and its constants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerSpec {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay of matrices; vectors have none.
    pub weight_decay: f32,
    /// Step size of the selection biases of routers, which follow the load of experts.
    #[serde(skip_serializing_if = "is_default_rate")]
    pub selection_bias_rate: f32,
    /// Storage of the master weights.
    #[serde(skip_serializing_if = "MasterFormat::is_fp32")]
    pub masters: MasterFormat,
    /// Storage of the moments of AdamW.
    #[serde(skip_serializing_if = "MomentFormat::is_fp32")]
    pub moments: MomentFormat,
    /// Whether parameters are updated in the backward pass, with gradients clipped by the norm of
    /// the step before: gradients need little memory. For one rank and one micro-batch per step.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub in_backward: bool,
    /// Whether masters and moments lie in host memory and are copied to the device for each
    /// update.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub on_host: bool,
}

/// The rate in most of the training of DeepSeek-V3, arXiv 2412.19437, section 4.2.
const SELECTION_BIAS_RATE: f32 = 1e-3;

fn is_default_rate(rate: &f32) -> bool {
    *rate == SELECTION_BIAS_RATE
}

impl Default for OptimizerSpec {
    /// The constants of the Llama papers: betas 0.9 and 0.95, decay 0.1.
    fn default() -> OptimizerSpec {
        OptimizerSpec {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            selection_bias_rate: SELECTION_BIAS_RATE,
            masters: MasterFormat::Fp32,
            moments: MomentFormat::Fp32,
            in_backward: false,
            on_host: false,
        }
    }
}

/// All decisions about a model's training, on one device or on several ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Name of the model.
    pub model: String,
    /// `cpu`, `cuda:N`, or `emulated:ARCH` such as `emulated:sm90`.
    pub device: String,
    /// Architecture of the device.
    pub arch: String,
    /// Tokens per sequence.
    pub seq: usize,
    /// Sequences per micro-batch.
    pub micro_batch: usize,
    /// Micro-batches per step on each rank.
    pub micro_batches: usize,
    /// Recomputation in the backward pass.
    pub recompute: Recompute,
    /// Storage of activations between the forward and the backward pass.
    #[serde(default, skip_serializing_if = "SavedActivations::is_exact")]
    pub saved_activations: SavedActivations,
    /// The precision policy, from which `precision` is derived.
    pub policy: PrecisionPolicy,
    /// Format of each parameter.
    pub precision: Vec<TensorPrecision>,
    /// The kernel of each op.
    pub kernels: Vec<KernelPlan>,
    /// The optimizer.
    pub optimizer: OptimizerSpec,
    /// Largest bucket of the optimizer, in bytes of gradients. A larger parameter is not split but
    /// has a bucket of its own.
    pub bucket_bytes: usize,
    /// Expert capacity as a multiple of an even share; limits the rows of buffers. Without a limit
    /// no pair is dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// Whether forward and backward passes of a GPU use one compute stream. Several streams keep
    /// operands longer: more memory, less time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub one_stream: bool,
    /// Whether the program measures the error of its quantized GEMMs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub measures_products: bool,
    /// Degrees of parallelism.
    #[serde(default, skip_serializing_if = "Parallel::is_single")]
    pub parallel: Parallel,
    /// Layers of each pipeline stage, in order; empty for one stage.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<usize>,
    /// Tables of measured times used in kernel selection; other kernels are selected by predicted
    /// times.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tuned: Vec<String>,
}

impl Plan {
    /// The bucket size of Megatron-LM, 40 Mi parameters: the optimizer moves 1.2 GB per bucket, so
    /// launch gaps cost little; a model of 1B has 24 buckets.
    pub const BUCKET_BYTES: usize = 160 << 20;

    /// Whether passes of a GPU use one compute stream: if requested, and with ZeRO 2 and 3, where
    /// the gathered weights of a layer reuse the memory of the previous layer.
    pub const fn has_one_stream(&self) -> bool {
        self.one_stream || self.parallel.shards_gradients()
    }

    /// Whether guards may move GEMMs to another format, for which memory is reserved. The other
    /// answers stop a run or only record an event.
    pub fn moves_gemms(&self) -> bool {
        self.policy.fallback() == Fallback::Safe
    }

    /// The plan of the steps with forward GEMMs in BF16; `None` without a repair in the policy.
    pub fn repaired(&self) -> Option<Plan> {
        self.policy.repaired().map(|policy| Plan { policy, ..self.clone() })
    }

    /// The plan of the steps that measure the error of quantized GEMMs: of formats with four bits,
    /// multiplied as they are, where a rank has whole master weights. `None` for others.
    pub fn measured(&self) -> Option<Plan> {
        let has_four_bits = self.policy.format().has_four_bits();
        let is_native = self.policy.gemm() == GemmMode::Native;
        let is_measured = has_four_bits && is_native && !self.parallel.shards_optimizer();
        is_measured.then(|| Plan { measures_products: true, ..self.clone() })
    }

    /// Tokens per sequence on a rank.
    pub const fn rank_seq(&self) -> usize {
        self.seq / self.parallel.context
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { model, device, arch, seq, micro_batch, micro_batches, .. } = self;
        let bucket = format_bytes(self.bucket_bytes as u64);
        let of_arch = if device == arch { String::new() } else { format!(" ({arch})") };
        writeln!(f, "plan of {model:?} on {device}{of_arch}")?;
        let parallel = self.parallel;
        let ranks = match parallel.batch_ranks() {
            1 => String::new(),
            ranks => format!("{ranks} ranks of "),
        };
        writeln!(
            f,
            "  batch         {} x {seq} tokens = {ranks}{micro_batches} micro-batches of \
             {micro_batch}",
            micro_batches * micro_batch * parallel.batch_ranks()
        )?;
        if !parallel.is_single() {
            writeln!(f, "  ranks         {} = {parallel}", parallel.world_size())?;
        }
        if !self.stages.is_empty() {
            let layers: Vec<String> = self.stages.iter().map(usize::to_string).collect();
            writeln!(f, "  stages        of {} layers", layers.join(", "))?;
        }
        writeln!(f, "  recompute     {}", self.recompute)?;
        if !self.saved_activations.is_exact() {
            writeln!(f, "  saved         activations {}", self.saved_activations)?;
        }
        if let Some(factor) = self.capacity_factor {
            writeln!(f, "  capacity      {factor} times the even share of an expert")?;
        }
        if self.one_stream {
            writeln!(f, "  streams       one for each pass, as memory is short")?;
        }
        writeln!(f, "  optimizer     in buckets of {bucket} of gradients")?;
        for table in &self.tuned {
            writeln!(f, "  tuned         by {table}")?;
        }
        for kernel in &self.kernels {
            writeln!(f, "  {:<26} {:>4} x {}", kernel.op, kernel.calls, kernel.kernel)?;
        }
        let mut runs: Vec<(String, usize)> = Vec::new();
        for tensor in &self.precision {
            let text = format!("{}: {}", tensor.format, tensor.explanation());
            match runs.iter_mut().find(|(known, _)| *known == text) {
                Some((_, count)) => *count += 1,
                None => runs.push((text, 1)),
            }
        }
        for (text, count) in runs {
            writeln!(f, "  {count:>4} tensors  {text}")?;
        }
        Ok(())
    }
}
