//! How a model trains on the hardware at hand, as data.

use std::fmt;

use deepwell_ir::{PrecisionPolicy, Recompute, TensorPrecision, Tile};
use serde::{Deserialize, Serialize};

use crate::format_bytes;

/// How many devices share what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Degrees {
    /// Devices that split each matrix product (TP).
    pub tensor: usize,
    /// Devices that split the experts (EP).
    pub expert: usize,
    /// Devices that split the sequence (SP).
    pub sequence: usize,
    /// Replicas that split the batch (DP).
    pub data: usize,
}

impl Default for Degrees {
    fn default() -> Degrees {
        Degrees { tensor: 1, expert: 1, sequence: 1, data: 1 }
    }
}

/// Consecutive layers on one group of devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StagePlan {
    /// First layer.
    pub first_layer: u32,
    /// Number of layers.
    pub layer_count: u32,
    /// Whether the embedding is here.
    pub has_embedding: bool,
    /// Whether the head is here.
    pub has_head: bool,
    /// Degrees within the stage.
    pub degrees: Degrees,
}

/// Where a rank runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// The rank.
    pub rank: u32,
    /// Index into [`Plan::stages`].
    pub stage: usize,
    /// `cpu`, `cuda:N`, or `emulated:sm90` and its like.
    pub device: String,
}

/// The kernel that serves an op, and how often.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelPlan {
    /// Name of the op.
    pub op: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Its tile, for those that have one.
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
}

impl Default for OptimizerSpec {
    /// The constants of the Llama papers: betas 0.9 and 0.95, decay 0.1.
    fn default() -> OptimizerSpec {
        OptimizerSpec { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
    }
}

/// Everything that decides how a model runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Name of the model.
    pub model: String,
    /// Architecture of the devices.
    pub arch: String,
    /// Tokens per sequence.
    pub seq: usize,
    /// Sequences per step.
    pub global_batch: usize,
    /// Sequences per micro-batch and replica.
    pub micro_batch: usize,
    /// Micro-batches per step.
    pub micro_batches: usize,
    /// Pipeline stages.
    pub stages: Vec<StagePlan>,
    /// Ranks and their devices.
    pub placement: Vec<Placement>,
    /// ZeRO level: 0 replicates the optimizer state, 1 splits it, 2 gradients too, 3 weights too.
    pub zero_level: u8,
    /// What the backward makes again.
    pub recompute: Recompute,
    /// The policy that `precision` follows from.
    pub policy: PrecisionPolicy,
    /// What each parameter got.
    pub precision: Vec<TensorPrecision>,
    /// Which kernel serves which op.
    pub kernels: Vec<KernelPlan>,
    /// The optimizer.
    pub optimizer: OptimizerSpec,
    /// Gradients that one call of the optimizer takes at most, in bytes. A parameter is never
    /// split: one with more is alone in its bucket.
    pub bucket_bytes: usize,
}

impl Plan {
    /// As large as the buckets of Megatron-LM, 40 Mi parameters: a launch over one takes some
    /// 300 µs on an H200, so that where it ends costs nothing, and a model of 1B has 24.
    pub const BUCKET_BYTES: usize = 160 << 20;

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.placement.len()
    }

    /// Tokens per step over all replicas.
    pub fn tokens_per_step(&self) -> usize {
        self.global_batch * self.seq
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "plan of {:?} on {} x {}", self.model, self.world_size(), self.arch)?;
        writeln!(
            f,
            "  batch         {} x {} tokens = {} micro-batches of {}",
            self.global_batch, self.seq, self.micro_batches, self.micro_batch
        )?;
        writeln!(f, "  recompute     {}", self.recompute)?;
        writeln!(f, "  zero level    {}", self.zero_level)?;
        writeln!(f, "  bucket        {} of gradients", format_bytes(self.bucket_bytes as u64))?;
        for (index, stage) in self.stages.iter().enumerate() {
            let degrees = &stage.degrees;
            writeln!(
                f,
                "  stage {index}       layers {}..{}{}{}, TP {} EP {} SP {} DP {}",
                stage.first_layer,
                stage.first_layer + stage.layer_count,
                if stage.has_embedding { ", embedding" } else { "" },
                if stage.has_head { ", head" } else { "" },
                degrees.tensor,
                degrees.expert,
                degrees.sequence,
                degrees.data
            )?;
        }
        for placement in &self.placement {
            writeln!(
                f,
                "  rank {}        stage {} on {}",
                placement.rank, placement.stage, placement.device
            )?;
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
