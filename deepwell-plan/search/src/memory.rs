//! Memory of a pipeline stage's rank: states, activations, logits, workspaces.
//!
//! Activations are counted tensor by tensor from the reads of each op's backward pass, as saved by
//! Megatron-LM with Transformer Engine. Every term is a number of elements times the bytes of an
//! element; no coefficient is fitted. [`MemoryRules`] selects kernels and buffers.
//! [`MemoryRules::megatron`] is Megatron-LM's own accounting: bytes allocated by PyTorch, without
//! CUDA context and NCCL.

mod fsdp;
mod phases;
mod stage_layers;
mod within_layer;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::model_shape::LayerParameters;
use crate::{ActivationRecompute, ModelShape, Strategy};
use deepwell_lower::schedule::{Pass, PipelineOp, PipelineSchedule};

pub use fsdp::fsdp_memory;
pub use phases::{Phase, PhaseMemory};
pub use stage_layers::expand;
use stage_layers::kinds;
pub use stage_layers::{StageLayers, layout, parse_layout};
use within_layer::{expert_row_bytes, expert_rows, within_layer_bytes};

/// CUDA context and NCCL of a rank in a group: memory outside of the allocator.
pub const OUTSIDE_BYTES: f64 = 3e9;

/// CUDA context of a single rank: driver and kernels, on an H200.
pub const CONTEXT_BYTES: f64 = 560.0 * MIB;

const MIB: f64 = (1u64 << 20) as f64;

/// Attention kernel, which determines the saved tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttentionKernel {
    /// Scores, probabilities, dropout and its mask are stored: 5 bytes per score.
    Unfused,
    /// Flash attention: output and the log-sum-exp of each row.
    Flash,
    /// Flash attention with a second copy of the output: cuDNN's on Blackwell.
    FusedWithCopy,
}

/// Modules recomputed by selective recomputation, with Megatron-LM's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecomputedModules {
    /// Scores and probabilities of attention (`core_attn`).
    pub core_attention: bool,
    /// Activation functions of experts (`moe_act`).
    pub expert_activation: bool,
    /// Dense feed-forward layers and shared experts (`mlp`).
    pub mlp: bool,
    /// Outputs of norms (`layernorm`).
    pub norms: bool,
    /// Queries, keys and values of latent attention (`mla_up_proj`).
    pub mla_up: bool,
    /// Activation functions of dense feed-forward layers and of shared experts.
    pub activation: bool,
}

/// Kernels and buffers that determine a rank's memory, besides the model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryRules {
    /// Kernel of attention.
    pub attention: AttentionKernel,
    /// Bytes per logit during the loss: 6 for BF16 logits and an FP32 copy, 10 for a fused
    /// cross-entropy with separate exponentials, nearly 0 for a chunked loss.
    pub logit_bytes: f64,
    /// GEMM workspaces.
    pub workspace_bytes: f64,
    /// Whether the batch includes a mask of `seq` x `seq` bytes per sequence.
    pub attention_mask: bool,
    /// Whether dropout stores masks.
    pub dropout: bool,
    /// Whether queries and keys are normalized; inputs and outputs of the norms are saved.
    pub qk_norm: bool,
    /// Buffers of hidden states for P2P, in addition to the input of a micro-batch.
    pub p2p_buffers: f64,
    /// Modules recomputed by selective recomputation.
    pub selective: RecomputedModules,
    /// Rows of the busiest expert rank over the mean.
    pub expert_imbalance: f64,
    /// Expert capacity as a multiple of an even share; limits the rows of buffers. Without a limit
    /// buffers have `expert_imbalance` times the mean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// Bytes per element of the operands that Deepwell's experts save for weight gradients: inputs
    /// and activations, but no outputs. `None` for Megatron-LM's experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_operand_bytes: Option<f64>,
    /// Groups of data-parallel ranks that each hold all optimizer states.
    pub optimizer_instances: usize,
    /// Bytes per parameter without ZeRO: compute copy, gradient, master weight, two moments.
    pub parameter_bytes: f64,
    /// See `parameter_bytes`.
    pub gradient_bytes: f64,
    /// See `parameter_bytes`.
    pub optimizer_bytes: f64,
}

impl MemoryRules {
    /// Megatron-LM in BF16 with Transformer Engine on Hopper: two cuBLAS workspaces of PyTorch and
    /// one of Transformer Engine, 32 MiB each.
    pub fn megatron() -> MemoryRules {
        MemoryRules {
            attention: AttentionKernel::Flash,
            logit_bytes: 6.0,
            workspace_bytes: 96.0 * MIB,
            attention_mask: true,
            dropout: true,
            qk_norm: false,
            p2p_buffers: 2.0,
            selective: RecomputedModules {
                core_attention: true,
                expert_activation: true,
                ..RecomputedModules::default()
            },
            expert_imbalance: 1.0,
            capacity_factor: None,
            expert_operand_bytes: None,
            optimizer_instances: 1,
            parameter_bytes: 2.0,
            gradient_bytes: 4.0,
            optimizer_bytes: 12.0,
        }
    }

    /// Without dropout and masks, with a chunked loss: current training of large models.
    ///
    /// Selective recomputation discards outputs of memory-bound kernels: norms, activation
    /// functions, and latent attention's queries, keys and values.
    pub fn lean() -> MemoryRules {
        MemoryRules {
            logit_bytes: 0.5,
            attention_mask: false,
            dropout: false,
            selective: RecomputedModules {
                core_attention: true,
                expert_activation: true,
                mlp: false,
                norms: true,
                mla_up: true,
                activation: true,
            },
            ..Self::megatron()
        }
    }
}

/// Memory of one rank by use, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageMemory {
    /// Compute copies of the parameters.
    pub parameters: f64,
    /// Gradients.
    pub gradients: f64,
    /// Master weights and moments.
    pub optimizer: f64,
    /// Tensors saved by forward passes for backward passes.
    pub activations: f64,
    /// Logits and their derivatives in the loss.
    pub logits: f64,
    /// Workspaces, masks, P2P buffers, gathered parameters.
    pub workspace: f64,
    /// Outside of the allocator: CUDA context, NCCL, CUDA graphs.
    pub outside: f64,
    /// Host memory of pinned batches.
    pub host_batches: f64,
    /// Host memory of master weights and moments, with the optimizer on the host.
    #[serde(default)]
    pub host_optimizer: f64,
    /// Host memory during checkpoint staging: the above, and a copy of the states.
    pub host: f64,
}

impl StageMemory {
    /// Bytes allocated at the peak of a step.
    pub fn allocated(&self) -> f64 {
        self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.workspace
    }

    /// Bytes reserved by the allocator on the device: blocks of 2 MiB for each kind.
    pub fn reserved(&self) -> f64 {
        let parts = [
            self.parameters,
            self.gradients,
            self.optimizer,
            self.activations,
            self.logits,
            self.workspace,
        ];
        parts.into_iter().map(in_blocks).sum()
    }

    /// Bytes needed on the device.
    pub fn device(&self) -> f64 {
        self.reserved() + self.outside
    }
}

/// Rounds bytes up to whole blocks of 2 MiB.
fn in_blocks(bytes: f64) -> f64 {
    (bytes / (2.0 * MIB)).ceil() * 2.0 * MIB
}

/// Bytes saved on one rank by the forward pass of one micro-batch through `layer`.
pub fn layer_activation_bytes(
    shape: &ModelShape,
    at: &Strategy,
    rules: &MemoryRules,
    seq: usize,
    layer: usize,
) -> f64 {
    let tokens = (seq / at.cp * at.micro_batch) as f64;
    let (tp, sequence_ranks) = (at.tp as f64, at.sequence_ranks() as f64);
    // Elements of the hidden states: split by TP, and split only by SP.
    let hidden = tokens * shape.hidden as f64;
    let between = hidden / sequence_ranks;
    if at.recompute == ActivationRecompute::Full {
        return 2.0 * between;
    }
    let mask = if rules.dropout { between } else { 0.0 };
    // Input of the layer, output of its norm, dropout mask; the same around the second block.
    let none = RecomputedModules::default();
    let again = match at.recompute {
        ActivationRecompute::None | ActivationRecompute::Full => none,
        ActivationRecompute::Norms => RecomputedModules { norms: true, ..none },
        ActivationRecompute::Activations => {
            RecomputedModules { activation: true, expert_activation: true, ..none }
        }
        ActivationRecompute::Selective => rules.selective,
    };
    let norm_outputs = if again.norms { 0.0 } else { 2.0 * between };
    let frame = 2.0 * (2.0 * between + norm_outputs + mask);
    let act = if again.activation { 0.0 } else { 1.0 };
    frame + attention_bytes(shape, at, rules, again, seq) + {
        match shape.experts.filter(|_| shape.has_experts(layer)) {
            None if again.mlp => 0.0,
            None => {
                let columns = (shape.gate_factor() + act) * shape.ffn as f64;
                2.0 * tokens * columns / tp
            }
            Some(experts) => {
                let rows = expert_rows(&experts, at, rules, tokens);
                let of_row = expert_row_bytes(shape, &experts, at, rules, again);
                let shared = (shape.gate_factor() + act) * experts.shared_ffn as f64;
                let shared = if again.mlp { 0.0 } else { shared };
                rows * of_row + 2.0 * tokens * shared / tp
            }
        }
    }
}

/// Bytes saved by attention: queries, keys, values, output, statistics or scores.
fn attention_bytes(
    shape: &ModelShape,
    at: &Strategy,
    rules: &MemoryRules,
    again: RecomputedModules,
    seq: usize,
) -> f64 {
    let local = (seq / at.cp) as f64;
    let tokens = local * at.micro_batch as f64;
    let heads = shape.heads as f64 / at.tp as f64;
    let (mut bytes, out_width) = match shape.latent {
        Some(latent) => {
            let (qk, rope, v) = (latent.qk_dim as f64, latent.rope_dim as f64, latent.v_dim as f64);
            // Inputs and outputs of the latent norms, then queries, keys, values, the keys'
            // projection.
            let low = 2.0 * (latent.q_rank + latent.kv_rank) as f64 + rope;
            let high = 2.0 * (qk + rope) + v + (qk + v);
            let high = if again.mla_up { 0.0 } else { high };
            (2.0 * tokens * (low + heads * high), v)
        }
        None => {
            let width = shape.head_dim as f64;
            let kv = 2.0 * shape.kv_heads as f64 / at.tp as f64;
            (2.0 * tokens * (heads + kv) * width, width)
        }
    };
    let output = 2.0 * tokens * heads * out_width;
    bytes += output;
    if rules.attention == AttentionKernel::FusedWithCopy {
        bytes += output;
    }
    // The ring's output has to be reordered for the next GEMM.
    if at.cp > 1 {
        bytes += output;
    }
    if rules.qk_norm || shape.qk_norm {
        bytes += 3.0 * output;
    }
    let rows = heads * tokens;
    bytes += match rules.attention {
        AttentionKernel::Unfused if again.core_attention => 0.0,
        AttentionKernel::Unfused => (4.0 + 5.0 * local) * rows,
        _ => 4.0 * rows,
    };
    bytes
}

/// Bytes saved by the forward pass of one micro-batch through each chunk of a stage.
pub(crate) fn chunk_activation_bytes(
    shape: &ModelShape,
    at: &Strategy,
    rules: &MemoryRules,
    seq: usize,
    layers: &StageLayers,
) -> Vec<f64> {
    // All layers of a kind are equal.
    let of_layer = |layer| layer_activation_bytes(shape, at, rules, seq, layer);
    let (dense, expert) = (of_layer(0), of_layer(shape.layers.saturating_sub(1)));
    let of_chunk = |chunk: &Range<usize>| {
        let (dense_count, expert_count) = kinds(shape, chunk);
        dense_count as f64 * dense + expert_count as f64 * expert
    };
    layers.chunks.iter().map(of_chunk).collect()
}

/// Memory of a rank of the stage with `layers` and `order`.
pub fn stage_memory(
    shape: &ModelShape,
    at: &Strategy,
    rules: &MemoryRules,
    seq: usize,
    layers: &StageLayers,
    order: &[PipelineOp],
) -> StageMemory {
    let peak = |chunk_bytes: &[f64]| peak_bytes(chunk_bytes, order, layers.has_head);
    memory_at_peak(shape, at, rules, seq, layers, &peak)
}

/// [`stage_memory`] for evenly divided layers, at a cost independent of the number of
/// micro-batches.
pub fn stage_memory_estimate(
    shape: &ModelShape,
    at: &Strategy,
    rules: &MemoryRules,
    seq: usize,
    stage: usize,
) -> StageMemory {
    let layers = StageLayers::of(shape, at, stage);
    let passes = match at.schedule {
        PipelineSchedule::OneFOneB if at.vpp > 1 => {
            2 * (at.pp - stage - 1) + (at.vpp - 1) * at.pp + 1
        }
        PipelineSchedule::OneFOneB => at.pp - stage,
        PipelineSchedule::ZbH1 => at.pp,
        PipelineSchedule::ZbH2 => 2 * at.pp - 1,
    };
    let passes = passes.min(at.micro_batches * at.vpp) as f64;
    let peak = |chunk_bytes: &[f64]| {
        let (first, sum) = (chunk_bytes[0], chunk_bytes.iter().sum::<f64>());
        if chunk_bytes.iter().all(|bytes| *bytes == first) {
            return sum * passes / at.vpp as f64;
        }
        interleaved_peak(chunk_bytes, at, stage)
    };
    memory_at_peak(shape, at, rules, seq, &layers, &peak)
}

/// Peak bytes in flight of an interleaved schedule with unequal chunks. The changes by forward and
/// backward passes repeat once each chunk has had as many micro-batches as there are stages, so the
/// peak occurs within one such period after the warm-up.
fn interleaved_peak(chunk_bytes: &[f64], at: &Strategy, stage: usize) -> f64 {
    let (stages, chunks) = (at.pp, chunk_bytes.len());
    let all = at.micro_batches * chunks;
    let warm_up = all.min(2 * (stages - stage - 1) + (chunks - 1) * stages);
    let forward = |pass: usize| pass / stages % chunks;
    let mut live: f64 = (0..warm_up).map(|pass| chunk_bytes[forward(pass)]).sum();
    let has_head = stage + 1 == stages;
    let mut peak = if has_head { 0.0 } else { live };
    for pass in 0..(all - warm_up).min(2 * stages * chunks) {
        let chunk = forward(warm_up + pass);
        live += chunk_bytes[chunk];
        if !has_head || chunk + 1 == chunks {
            peak = peak.max(live);
        }
        live -= chunk_bytes[chunks - 1 - forward(pass)];
    }
    peak
}

fn memory_at_peak(
    shape: &ModelShape,
    at: &Strategy,
    rules: &MemoryRules,
    seq: usize,
    layers: &StageLayers,
    peak: &dyn Fn(&[f64]) -> f64,
) -> StageMemory {
    let tokens = (seq / at.cp * at.micro_batch) as f64;
    let between = tokens * shape.hidden as f64 / at.sequence_ranks() as f64;
    let mut memory = states(shape, at, rules, layers);
    memory.activations = peak(&chunk_activation_bytes(shape, at, rules, seq, layers));
    let mut logits = 0.0;
    if layers.has_head {
        // The last norm's input and output.
        memory.activations += 4.0 * between;
        logits = tokens * shape.vocab as f64 / at.tp as f64 * rules.logit_bytes;
    }
    // The loss is over before the first layer's backward pass.
    let within = within_layer_bytes(shape, at, rules, seq, layers);
    memory.activations += (within - logits).max(0.0);
    memory.logits = logits;
    if layers.has_embedding && rules.dropout {
        memory.activations += between;
    }
    memory.workspace += rules.workspace_bytes;
    if rules.attention_mask {
        memory.workspace += at.micro_batch as f64 * (seq / at.cp).pow(2) as f64;
    }
    if at.pp > 1 {
        memory.workspace += rules.p2p_buffers * 2.0 * between;
    }
    memory.host_batches = 16.0 * tokens * at.micro_batches as f64;
    if at.offload {
        memory.host_optimizer = std::mem::take(&mut memory.optimizer);
    }
    let staged = memory.parameters + memory.optimizer;
    memory.host = staged + memory.host_optimizer + memory.host_batches;
    memory
}

/// Parameters of a stage's layers on one rank, before ZeRO sharding.
pub(crate) fn layer_parameters(
    shape: &ModelShape,
    at: &Strategy,
    layers: &StageLayers,
) -> LayerParameters {
    let (dense_count, expert_count) = layers.kinds(shape);
    let of = |layer| shape.layer_parameters(layer, at.tp, at.etp, at.ep);
    let (dense, expert) = (of(0), of(shape.layers.saturating_sub(1)));
    LayerParameters {
        dense: dense_count as f64 * dense.dense + expert_count as f64 * expert.dense,
        routed: expert_count as f64 * expert.routed,
    }
}

/// Parameters, gradients and optimizer states of a stage's rank, sharded by ZeRO.
pub(crate) fn states(
    shape: &ModelShape,
    at: &Strategy,
    rules: &MemoryRules,
    layers: &StageLayers,
) -> StageMemory {
    let LayerParameters { mut dense, routed } = layer_parameters(shape, at, layers);
    let largest = [0, shape.layers.saturating_sub(1)]
        .into_iter()
        .zip(<[usize; 2]>::from(layers.kinds(shape)))
        .filter(|(_, count)| *count > 0)
        .map(|(layer, _)| shape.layer_parameters(layer, at.tp, at.etp, at.ep))
        .fold(0.0_f64, |largest, of_layer| largest.max(of_layer.dense + of_layer.routed));
    let embedding = (shape.vocab * shape.hidden) as f64 / at.tp as f64;
    let mut tables = 0.0;
    if layers.has_embedding {
        tables += embedding;
        dense += (shape.positions * shape.hidden) as f64;
    }
    if layers.has_head {
        dense += (shape.norm_vectors * shape.hidden) as f64;
        // A tied head on another stage than the embedding is a copy.
        if !shape.tied || !layers.has_embedding {
            tables += embedding;
        }
    }
    dense += tables;
    let ranks = (at.dp * at.cp) as f64;
    let expert_ranks = at.expert_dp() as f64;
    let held = |from_stage: u8| {
        if at.zero >= from_stage { dense / ranks + routed / expert_ranks } else { dense + routed }
    };
    let instances = rules.optimizer_instances.max(1) as f64;
    let held_once = if at.zero >= 1 {
        dense / (ranks / instances).max(1.0) + routed / (expert_ranks / instances).max(1.0)
    } else {
        dense + routed
    };
    // ZeRO-3 gathers two layers at a time, and the head's table during the loss.
    let around_loss = tables.min(embedding) + largest;
    let gathered = if at.zero >= 3 { around_loss.max(2.0 * largest) } else { 0.0 };
    StageMemory {
        parameters: rules.parameter_bytes * held(3),
        gradients: rules.gradient_bytes * held(2),
        optimizer: rules.optimizer_bytes * held_once,
        workspace: rules.parameter_bytes * gathered,
        ..StageMemory::default()
    }
}

/// Peak bytes of activations in flight. On the stage with the loss only passes of the last chunk
/// count, because the logits exist only then.
fn peak_bytes(chunk_bytes: &[f64], order: &[PipelineOp], has_head: bool) -> f64 {
    let (mut live, mut peak) = (0.0, 0.0_f64);
    for op in order {
        let bytes = chunk_bytes.get(op.chunk as usize).copied().unwrap_or(0.0);
        match op.pass {
            Pass::Forward => live += bytes,
            Pass::Backward | Pass::Wgrad => live -= bytes,
            Pass::Dgrad => {}
        }
        if !has_head || op.chunk as usize + 1 == chunk_bytes.len() {
            peak = peak.max(live);
        }
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LayerSplit;
    use deepwell_lower::schedule::orders;

    /// Bytes of a layer compared with table 2 of "Reducing Activation Recomputation in Large
    /// Transformer Models" (arXiv 2205.05198); its formulas leave out the statistics of the
    /// softmax.
    #[test]
    fn layers_are_those_of_korthikanti() {
        let (seq, batch, hidden, heads) = (2048, 4, 6144, 64);
        let shape = ModelShape::gpt(48, hidden, heads, 51200, seq);
        let sbh = (seq * batch * hidden) as f64;
        let scores = 5.0 * (heads * seq) as f64 / hidden as f64;
        let check = |tp: usize, sp: bool, recompute, attention, expected: f64| {
            let at = Strategy { tp, sp, recompute, micro_batch: batch, ..Strategy::SINGLE };
            let rules = MemoryRules { attention, ..MemoryRules::megatron() };
            let statistics = match recompute {
                ActivationRecompute::None => (4 * heads * seq * batch / tp) as f64,
                _ => 0.0,
            };
            let found = layer_activation_bytes(&shape, &at, &rules, seq, 0) - statistics;
            assert!((found / sbh - expected).abs() < 1e-9, "tp {tp}: {} {expected}", found / sbh);
        };
        use ActivationRecompute::{Full, None, Selective};
        use AttentionKernel::{Flash, Unfused};
        check(1, false, None, Unfused, 34.0 + scores);
        check(8, false, None, Unfused, 10.0 + 24.0 / 8.0 + scores / 8.0);
        check(8, true, None, Unfused, (34.0 + scores) / 8.0);
        check(8, true, Selective, Unfused, 34.0 / 8.0);
        check(8, true, None, Flash, 34.0 / 8.0);
        check(8, false, Full, Unfused, 2.0);
    }

    #[test]
    fn states_are_those_of_zero() {
        let shape = ModelShape::gpt(4, 64, 4, 256, 32);
        let check = |zero: u8, expected: fn(f64) -> f64| {
            let at = Strategy { dp: 4, zero, ..Strategy::SINGLE };
            let layers = StageLayers::even(4, 0, 1, 1);
            let memory = states(&shape, &at, &MemoryRules::megatron(), &layers);
            let found = memory.parameters + memory.gradients + memory.optimizer;
            let expected = expected(shape.parameters());
            assert!((found - expected).abs() < 1.0, "ZeRO-{zero}: {found} {expected}");
        };
        check(0, |count| 18.0 * count);
        check(1, |count| (6.0 + 12.0 / 4.0) * count);
        check(2, |count| (2.0 + 16.0 / 4.0) * count);
        check(3, |count| 18.0 / 4.0 * count);
    }

    #[test]
    fn closed_forms_are_those_of_the_orders() {
        let check = |model: &str, at: Strategy| {
            let shape = ModelShape::known(model).unwrap();
            let orders = orders(at.schedule, at.pp, at.micro_batches, at.vpp).unwrap();
            for (stage, order) in orders.iter().enumerate() {
                let layers = StageLayers::of(&shape, &at, stage);
                let rules = MemoryRules::lean();
                let exact = stage_memory(&shape, &at, &rules, 4096, &layers, order).allocated();
                let closed = stage_memory_estimate(&shape, &at, &rules, 4096, stage).allocated();
                assert!((closed / exact - 1.0).abs() < 1e-9, "{at} {stage}: {closed} {exact}");
            }
        };
        let base = Strategy { pp: 4, micro_batches: 16, ..Strategy::SINGLE };
        for vpp in [1, 2, 3, 5, 8] {
            check("llama-3-70b", Strategy { vpp, ..base });
        }
        check("llama-3-70b", Strategy { micro_batches: 4, vpp: 4, ..base });
        check("llama-3-70b", Strategy { vpp: 2, split: LayerSplit::Ends, ..base });
        check("deepseek-v3", Strategy { pp: 16, micro_batches: 32, ep: 8, dp: 8, ..base });
        check("llama-3-70b", Strategy { schedule: PipelineSchedule::ZbH1, ..base });
        check("llama-3-70b", Strategy { schedule: PipelineSchedule::ZbH2, ..base });
    }

    #[test]
    fn the_loss_counts_what_is_in_flight_then() {
        let order = &orders(PipelineSchedule::OneFOneB, 4, 8, 2).unwrap()[3];
        // Four passes of the first chunk, one of the last.
        assert_eq!(peak_bytes(&[10.0, 1.0], order, true), 41.0);
    }
}
