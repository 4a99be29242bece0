//! Memory of a plan by the accounting of other frameworks.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::ClusterPlan;
use crate::memory::{
    AttentionKernel, MemoryRules, StageLayers, StageMemory, fsdp_memory, stage_memory,
};
use crate::{ModelShape, Strategy};
use deepwell_lower::PlanError;
use deepwell_lower::schedule::orders;

/// The framework whose accounting is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Accounting {
    /// Megatron-LM: bytes allocated by PyTorch on each rank, without CUDA context and NCCL.
    Megatron,
    /// PyTorch's FSDP: FP32 parameters, gradients and moments sharded over all ranks, BF16 weights
    /// gathered per layer.
    Fsdp,
}

impl FromStr for Accounting {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Accounting, PlanError> {
        match text {
            "megatron" => Ok(Accounting::Megatron),
            "fsdp" => Ok(Accounting::Fsdp),
            _ => Err(PlanError::Request {
                what: "accounting",
                expected: "`megatron` or `fsdp`".to_string(),
                got: format!("`{text}`"),
            }),
        }
    }
}

/// Bytes of the ranks of each stage by another framework's accounting.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Count {
    /// The framework.
    pub accounting: Accounting,
    /// Memory of each stage.
    pub stages: Vec<StageMemory>,
    /// Megatron-LM's report before training: weights with optimizer, and activations, of the
    /// fullest (first) stage.
    pub theoretical: Option<(f64, f64)>,
}

impl Count {
    /// Counts the memory of a plan.
    ///
    /// # Errors
    /// A plan unsupported by the framework: FSDP with a pipeline, or without ZeRO 2 or 3.
    pub fn of(plan: &ClusterPlan, accounting: Accounting) -> Result<Count, PlanError> {
        let ClusterPlan { model, strategy: at, seq, .. } = plan;
        if accounting == Accounting::Fsdp {
            if at.pp > 1 || at.tp > 1 || at.zero < 2 {
                return Err(PlanError::Request {
                    what: "memory as FSDP counts it",
                    expected: "a plan with ZeRO 2 or 3 and neither TP nor PP\n\
                               hint: add `--pin zero=3 --pin pp=1 --pin tp=1`"
                        .to_string(),
                    got: at.to_string(),
                });
            }
            let stages = vec![fsdp_memory(model, at, *seq, AttentionKernel::Flash)];
            return Ok(Count { accounting, stages, theoretical: None });
        }
        let rules = MemoryRules {
            dropout: false,
            selective: MemoryRules::lean().selective,
            ..MemoryRules::megatron()
        };
        let orders = orders(at.schedule, at.pp, at.micro_batches, at.vpp)?;
        let of_stage = |(stage, order): (usize, &Vec<_>)| {
            let layers = StageLayers::of(model, at, stage);
            stage_memory(model, at, &rules, *seq, &layers, order)
        };
        let stages: Vec<StageMemory> = orders.iter().enumerate().map(of_stage).collect();
        let states = stages.first().map_or(0.0, |m| m.parameters + m.gradients + m.optimizer);
        let theoretical = Some((states, theoretical_activations(model, at, *seq)));
        Ok(Count { accounting, stages, theoretical })
    }
}

/// Activations by the formula of Megatron-LM's `theoretical_memory_usage.py`, for a dense GPT with
/// sequence parallelism and selective recomputation, regardless of the actual model and plan.
fn theoretical_activations(shape: &ModelShape, at: &Strategy, seq: usize) -> f64 {
    let tokens = (seq * at.micro_batch) as f64;
    let (hidden, ffn) = (shape.hidden as f64, shape.ffn as f64);
    let (pp, tp) = (at.pp as f64, at.tp as f64);
    let mut bytes = tokens * hidden * (18.0 + 4.0 * ffn / hidden) * shape.layers as f64;
    // Token ids, and the embedding's dropout.
    bytes += 8.0 * tokens * pp + tokens * hidden * pp;
    if at.vpp > 1 {
        bytes *= 1.0 + (pp - 1.0) / (pp * at.vpp as f64);
    } else if at.pp > 1 {
        bytes *= (at.micro_batches as f64 / pp).min(1.0);
    }
    if at.pp == 1 {
        bytes += tokens * hidden * 4.0 * (1.0 + shape.vocab as f64 / hidden);
    }
    bytes / tp
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = match self.accounting {
            Accounting::Megatron => {
                "as Megatron-LM counts it (max allocated of a rank; its log has the last stage's)"
            }
            Accounting::Fsdp => "as PyTorch's FSDP counts it (max allocated of a rank)",
        };
        writeln!(f, "\nmemory in GB {whose}")?;
        writeln!(
            f,
            "stage  parameters  gradients  optimizer  activations  logits  workspace  allocated  \
             reserved"
        )?;
        for (stage, memory) in self.stages.iter().enumerate() {
            let gb = |bytes: f64| bytes / 1e9;
            writeln!(
                f,
                "{stage:>5}  {:>10.2}  {:>9.2}  {:>9.2}  {:>11.2}  {:>6.2}  {:>9.2}  {:>9.2}  \
                 {:>8.2}",
                gb(memory.parameters),
                gb(memory.gradients),
                gb(memory.optimizer),
                gb(memory.activations),
                gb(memory.logits),
                gb(memory.workspace),
                gb(memory.allocated()),
                gb(memory.reserved())
            )?;
        }
        if let Some((states, activations)) = self.theoretical {
            writeln!(
                f,
                "  its theoretical report: weights and optimizer {:.2}, activations {:.2}",
                states / 1e9,
                activations / 1e9
            )?;
        }
        Ok(())
    }
}
