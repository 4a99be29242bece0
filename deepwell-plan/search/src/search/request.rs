//! The request of a search.

use deepwell_ir::ops::MomentFormat;
use serde::Serialize;

use crate::memory::{CONTEXT_BYTES, MemoryRules, OUTSIDE_BYTES};
use crate::step_time::{LAST_LAYERS, LastLayers, StepRules, StepTime, step_time_estimate};
use crate::{ModelShape, Strategy};
use deepwell_lower::{PlanError, usable_bytes};

use super::{Machines, Pin};

/// Share of Deepwell's tensor-parallel collectives that is exposed: 26.5 of 30.7 ms in llama-1.1b
/// on two H100s (`benchmarks/ranks_h100_2026-11-27.md`).
const TP_EXPOSED: f64 = 0.86;

/// Model, batch, machines, and fixed values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SearchRequest {
    /// The model.
    pub shape: ModelShape,
    /// Tokens per sequence.
    pub seq: usize,
    /// Sequences per step.
    pub global_batch: usize,
    /// Numbers of GPUs to try.
    pub gpus: Vec<usize>,
    /// GPUs and networks.
    pub machines: Machines,
    /// Memory rules.
    pub memory: MemoryRules,
    /// Bytes of CUDA context and NCCL of a rank in a group, outside of the allocator.
    pub outside_bytes: f64,
    /// Usable bytes of a GPU; `None` for [`usable_bytes`](deepwell_lower::usable_bytes) of its
    /// memory.
    pub gpu_memory_bytes: Option<f64>,
    /// Fixed or forbidden values.
    pub pins: Vec<Pin>,
    /// Whether linear layers run in MXFP8 instead of BF16.
    pub fp8: bool,
    /// Whether linear layers run in NVFP4, but for the last layers, which `fp8` says; set together
    /// with `fp8`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub nvfp4: bool,
    /// Rows of the busiest expert rank over the mean, for time and memory.
    pub expert_imbalance: f64,
    /// Expert capacity as a multiple of an even share. Without a limit no pair is dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// Storage of the moments of AdamW.
    #[serde(skip_serializing_if = "MomentFormat::is_fp32")]
    pub moments: MomentFormat,
    /// Whether the trainer has to support the plan.
    pub by_trainer: ByTrainer,
}

/// Whether the trainer has to support the chosen plan ([`Strategy::parallel`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ByTrainer {
    /// Takes the plan with the least time, even if unsupported.
    #[default]
    Whatever,
    /// Prefers plans supported by the trainer to all others.
    First,
    /// Takes only supported plans.
    Only,
}

impl SearchRequest {
    /// A request for all GPUs of `machines`, in BF16.
    pub fn new(
        shape: ModelShape,
        seq: usize,
        global_batch: usize,
        machines: Machines,
    ) -> SearchRequest {
        SearchRequest {
            shape,
            seq,
            global_batch,
            gpus: vec![machines.gpus],
            machines,
            memory: MemoryRules::lean(),
            outside_bytes: OUTSIDE_BYTES,
            gpu_memory_bytes: None,
            pins: Vec::new(),
            fp8: false,
            nvfp4: false,
            expert_imbalance: StepRules::MODERN.expert_imbalance,
            capacity_factor: None,
            moments: MomentFormat::Fp32,
            by_trainer: ByTrainer::Whatever,
        }
    }

    /// Usable bytes of a GPU.
    pub fn memory_limit_bytes(&self) -> f64 {
        self.gpu_memory_bytes
            .unwrap_or_else(|| usable_bytes(self.machines.gpu.memory_bytes as u64) as f64)
    }

    /// Bytes outside of the allocator on a GPU of `gpus`: NCCL only for more than one GPU.
    pub fn outside_bytes_among(&self, gpus: usize) -> f64 {
        if gpus > 1 { self.outside_bytes } else { self.outside_bytes.min(CONTEXT_BYTES) }
    }

    /// The rules of Deepwell's own steps.
    pub fn step_rules(&self) -> StepRules {
        StepRules {
            fp8: self.fp8,
            nvfp4: self.nvfp4.then_some(LastLayers::Mxfp8),
            // With a capacity factor, ranks send only the kept rows.
            expert_gather: self.capacity_factor.is_none(),
            loss_traffic: (8.0, 6.0),
            own_attention: true,
            own_gather: true,
            tp_exposed: TP_EXPOSED,
            expert_imbalance: self
                .capacity_factor
                .map_or(self.expert_imbalance, |factor| factor.min(self.expert_imbalance)),
            capacity_factor: self.capacity_factor,
            ..StepRules::MODERN
        }
    }

    /// Bytes of an element with its scales, in the mean over all linear layers.
    fn quantized_bytes(&self) -> f64 {
        let [mxfp8, nvfp4] = [1.0 + 1.0 / 32.0, 0.5 + 1.0 / 16.0];
        let share = if self.nvfp4 { 1.0 - LAST_LAYERS } else { 0.0 };
        share * nvfp4 + (1.0 - share) * mxfp8
    }

    /// The memory rules with the compute copies of the precision: rowwise and columnwise data with
    /// scales in MXFP8 and NVFP4.
    pub fn memory_rules(&self) -> MemoryRules {
        let copies = 2.0 * self.quantized_bytes();
        let parameter_bytes = if self.fp8 { copies } else { self.memory.parameter_bytes };
        // Weight gradients read operands quantized columnwise.
        let expert_operand_bytes = Some(if self.fp8 { self.quantized_bytes() } else { 2.0 });
        let SearchRequest { expert_imbalance, .. } = *self;
        // Without a capacity factor ranks gather all tokens, so buffers have room for any routing.
        let capacity_factor = self.capacity_factor.or(Some(f64::MAX));
        let stored = [self.moments, MomentFormat::Fp32].map(MomentFormat::bytes_per_parameter);
        MemoryRules {
            parameter_bytes,
            optimizer_bytes: self.memory.optimizer_bytes + stored[0] - stored[1],
            expert_imbalance,
            capacity_factor,
            expert_operand_bytes,
            ..self.memory
        }
    }

    pub(crate) fn estimate(&self, at: &Strategy) -> StepTime {
        let rules = self.step_rules();
        let Machines { gpu, fabric, .. } = &self.machines;
        step_time_estimate(&self.shape, at, gpu, fabric, &rules, self.seq)
    }

    /// Tokens per step.
    pub fn tokens(&self) -> f64 {
        (self.seq * self.global_batch) as f64
    }

    pub(super) fn check(&self) -> Result<(), PlanError> {
        let shape = &self.shape;
        let sizes = [
            ("tokens of a sequence", self.seq),
            ("sequences of a step", self.global_batch),
            ("layers", shape.layers),
            ("hidden size", shape.hidden),
            ("heads", shape.heads),
            ("GPUs", self.gpus.iter().copied().min().unwrap_or(0)),
        ];
        if !(self.expert_imbalance >= 1.0 && self.expert_imbalance.is_finite()) {
            return Err(PlanError::Request {
                what: "imbalance of experts",
                expected: "1 or more".to_string(),
                got: self.expert_imbalance.to_string(),
            });
        }
        if let Some(factor) = self.capacity_factor.filter(|it| !it.is_finite() || *it <= 0.0) {
            return Err(PlanError::Request {
                what: "capacity factor of experts",
                expected: "a number over 0".to_string(),
                got: factor.to_string(),
            });
        }
        if self.capacity_factor.is_some() && shape.experts.is_none() {
            return Err(PlanError::Request {
                what: "capacity factor of experts",
                expected: "a model with experts".to_string(),
                got: format!("`{}`, which has none", shape.name),
            });
        }
        for (what, size) in sizes {
            if size == 0 {
                let expected = "at least 1".to_string();
                return Err(PlanError::Request { what, expected, got: "0".to_string() });
            }
        }
        Ok(())
    }
}
