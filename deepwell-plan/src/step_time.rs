//! Time of a training step of a distributed plan.
//!
//! Each stage's forward and backward pass is a sum of GEMMs at the efficiency of their shape,
//! attention, memory-bound kernels, and exposed communication; the pipeline is simulated over
//! them; data-parallel communication and the optimizer follow.

use std::cell::RefCell;
use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::collectives::{Collective, Fabric};
use crate::gpu_model::GpuModel;
use crate::memory::StageLayers;
use crate::schedule::{OpTimes, PipelineRun, PipelineSchedule, orders, simulate};
use crate::{ActivationRecompute, ModelShape, Parallelism, PlanError};

/// How a framework runs what the plan says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRules {
    /// Whether scores of attention go through memory.
    pub unfused_attention: bool,
    /// Whether dropout runs.
    pub dropout: bool,
    /// Share of tensor-parallel communication that is not hidden behind GEMMs.
    pub tp_exposed: f64,
    /// Whether data-parallel communication runs beside the backward pass.
    pub dp_overlap: bool,
    /// Whether all-to-alls of experts run beside the computation of another micro-batch.
    pub ep_overlap: bool,
    /// Bytes of a gradient as it is reduced.
    pub gradient_bytes: f64,
    /// How much slower computation is while communication runs beside it.
    pub interference: f64,
    /// Whether the GEMM of a weight's gradient adds to the FP32 sum itself; else a kernel does.
    pub fused_accumulation: bool,
    /// Whether a stage computes nothing while it sends or receives.
    pub p2p_blocks: bool,
    /// Bytes read and written for each logit by the loss, forward and backward.
    pub loss_traffic: (f64, f64),
    /// Shares of the GPU's attention efficiency that the framework's kernels reach.
    pub attention_share: f64,
    /// Rows of the busiest expert rank over the mean.
    pub expert_imbalance: f64,
    /// Whether linear layers are quantized to FP8.
    pub fp8: bool,
}

impl StepRules {
    /// Megatron-LM of 2021 and 2022: attention through memory, dropout, nothing overlapped.
    pub const MEGATRON_2021: StepRules = StepRules {
        unfused_attention: true,
        dropout: true,
        tp_exposed: 1.0,
        dp_overlap: false,
        ep_overlap: false,
        gradient_bytes: 4.0,
        interference: 1.0,
        fused_accumulation: false,
        p2p_blocks: true,
        // To FP32, maximum, difference, exponential, sum, quotient; scaled and back to BF16.
        loss_traffic: (38.0, 14.0),
        attention_share: 1.0,
        expert_imbalance: 1.0,
        fp8: false,
    };

    /// Today's trainers: flash attention, gradients reduced beside the backward pass, half of the
    /// tensor-parallel communication hidden.
    pub const MODERN: StepRules = StepRules {
        unfused_attention: false,
        dropout: false,
        tp_exposed: 0.5,
        dp_overlap: true,
        // Collectives hold 16 of the 132 SMs (Megatron-Core's figure for registered buffers).
        interference: 1.0 + 16.0 / 132.0,
        fused_accumulation: true,
        p2p_blocks: false,
        expert_imbalance: 1.1,
        ..StepRules::MEGATRON_2021
    };
}

/// Seconds of a step and of its parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepTime {
    /// The whole step.
    pub seconds: f64,
    /// The pipeline with its bubbles.
    pub pipeline: f64,
    /// Idle share of the pipeline.
    pub bubble: f64,
    /// Data-parallel communication that nothing hides.
    pub data_parallel: f64,
    /// The optimizer.
    pub optimizer: f64,
    /// Tensor- and expert-parallel communication in the slowest stage, as far as it is exposed.
    pub exposed_in_stage: f64,
}

/// Forward and backward seconds of one layer, one micro-batch.
#[derive(Clone, Copy, Debug, Default)]
struct LayerTime {
    forward: f64,
    input_grad: f64,
    weight_grad: f64,
    exposed: f64,
}

/// What a layer's time depends on while model, GPU, rules and sequence stay: TP and SP, CP, EP,
/// ETP, micro-batch, recomputation, FP8, experts.
type LayerKey = ((usize, bool), usize, usize, usize, usize, ActivationRecompute, bool, bool);

/// Times of layers that a search has asked for, of one model, GPU, set of rules and sequence.
#[derive(Default)]
pub(crate) struct LayerTimes(RefCell<HashMap<LayerKey, LayerTime>>);

/// The parts of the model that all functions here look at.
struct Cost<'a> {
    known: Option<&'a LayerTimes>,
    shape: &'a ModelShape,
    at: &'a Parallelism,
    gpu: &'a GpuModel,
    fabric: &'a Fabric,
    rules: &'a StepRules,
    seq: usize,
}

/// Predicts a step.
///
/// # Errors
/// A schedule that the degrees do not allow.
pub fn step_time(
    shape: &ModelShape,
    at: &Parallelism,
    gpu: &GpuModel,
    fabric: &Fabric,
    rules: &StepRules,
    seq: usize,
) -> Result<StepTime, PlanError> {
    let cost = Cost { known: None, shape, at, gpu, fabric, rules, seq };
    let times = cost.stage_times();
    let order = orders(at.schedule, at.pp, at.micro_batches, at.vpp)?;
    let run = simulate(&order, at.vpp, &times)?;
    Ok(cost.with_data_parallel(&times, run.makespan(), run.bubble_rate()))
}

/// The simulated pipeline itself, for timelines.
///
/// # Errors
/// As [`step_time`].
pub fn pipeline_run(
    shape: &ModelShape,
    at: &Parallelism,
    gpu: &GpuModel,
    fabric: &Fabric,
    rules: &StepRules,
    seq: usize,
) -> Result<PipelineRun, PlanError> {
    let times = Cost { known: None, shape, at, gpu, fabric, rules, seq }.stage_times();
    simulate(&orders(at.schedule, at.pp, at.micro_batches, at.vpp)?, at.vpp, &times)
}

/// As [`step_time`] with the closed forms of the bubbles in place of a simulation: within a few per
/// cent of it, at a cost that does not grow with stages and micro-batches.
pub fn step_time_estimate(
    shape: &ModelShape,
    at: &Parallelism,
    gpu: &GpuModel,
    fabric: &Fabric,
    rules: &StepRules,
    seq: usize,
) -> StepTime {
    Cost { known: None, shape, at, gpu, fabric, rules, seq }.estimate()
}

/// As [`step_time_estimate`], with times of layers kept in `known` from call to call.
pub(crate) fn step_time_known(
    shape: &ModelShape,
    at: &Parallelism,
    machine: (&GpuModel, &Fabric),
    rules: &StepRules,
    seq: usize,
    known: &LayerTimes,
) -> StepTime {
    let (gpu, fabric) = machine;
    Cost { known: Some(known), shape, at, gpu, fabric, rules, seq }.estimate()
}

impl Cost<'_> {
    fn estimate(&self) -> StepTime {
        let at = self.at;
        let (first, last) = (self.stage_time(0), self.stage_time(at.pp - 1));
        // Of the stages between them the first without dense layers has the most to do.
        let dense = self.shape.experts.map_or(0, |experts| experts.dense_layers);
        let each = self.shape.layers.div_ceil(at.pp * at.vpp).max(1);
        let middle = self.stage_time(dense.div_ceil(each).min(at.pp - 1));
        let total = |times: &OpTimes| times.forward + times.input_grad + times.weight_grad;
        let slower = |a, b| if total(&b) > total(&a) { b } else { a };
        let slowest = slower(slower(first, middle), last);
        let (count, stages) = (at.micro_batches as f64, at.pp as f64);
        let hops = 2.0 * (stages * at.vpp as f64 - 1.0) * first.p2p;
        let filling = match at.schedule {
            PipelineSchedule::OneFOneB => total(&slowest) / at.vpp as f64,
            PipelineSchedule::ZbH1 => (total(&slowest) - 2.0 * slowest.weight_grad).max(0.0),
            PipelineSchedule::ZbH2 => (total(&slowest) - 3.0 * slowest.weight_grad).max(0.0),
        };
        let bubble = (stages - 1.0) * filling + if at.pp > 1 { hops } else { 0.0 };
        let pipeline = count * total(&slowest) + bubble;
        self.with_data_parallel(&[first, slowest, last], pipeline, bubble / pipeline)
    }
}

impl Cost<'_> {
    /// Tokens of a micro-batch on one context-parallel rank.
    fn tokens(&self) -> f64 {
        (self.at.micro_batch * self.seq) as f64 / self.at.cp as f64
    }

    /// Ranks of a group whose neighbours are `stride` apart that share an NVLink domain.
    fn local(&self, ranks: usize, stride: usize) -> usize {
        (self.fabric.domain_gpus / stride.max(1)).clamp(1, ranks)
    }

    fn gemm(&self, m: f64, n: f64, k: f64) -> f64 {
        let (peak, bytes) =
            if self.rules.fp8 { (self.gpu.fp8_flops, 1.0) } else { (self.gpu.bf16_flops, 2.0) };
        self.gpu.gemm_s(m, n, k, peak, bytes) + self.gpu.gap_s
    }

    /// Kernels that read and write `bytes` together.
    fn kernels(&self, bytes: f64, count: f64) -> f64 {
        self.gpu.memory_s(bytes) + count * self.gpu.gap_s
    }

    /// Forward, dgrad, wgrad of linear layers on `m` tokens.
    fn linears(&self, m: f64, sizes: &[(f64, f64)]) -> LayerTime {
        let mut time = LayerTime::default();
        for &(n, k) in sizes {
            time.forward += self.gemm(m, n, k);
            time.input_grad += self.gemm(m, k, n);
            let gemm = self.gemm(n, k, m);
            // The FP32 sum of micro-batches is read and written, by the GEMM or after it.
            time.weight_grad += if self.rules.fused_accumulation {
                gemm.max(self.gpu.memory_s(8.0 * n * k))
            } else {
                gemm + self.kernels(10.0 * n * k, 1.0)
            };
        }
        time
    }

    /// Scores, softmax and values: forward and backward seconds.
    fn attention_core(&self) -> (f64, f64) {
        let (gpu, at) = (self.gpu, self.at);
        let heads = self.shape.heads as f64 / at.tp as f64;
        let local = self.seq as f64 / at.cp as f64;
        let rows = at.micro_batch as f64;
        let flops = self.shape.score_flops(rows, self.seq) / (at.tp * at.cp) as f64;
        if !self.rules.unfused_attention {
            // Causal: half of the square. Backward is five GEMMs where forward is two.
            let half = flops / 2.0 / gpu.bf16_flops;
            let mut forward = half / gpu.attention_forward_efficiency / self.rules.attention_share;
            let mut backward =
                2.5 * half / gpu.attention_backward_efficiency / self.rules.attention_share;
            if at.cp > 1 {
                // A ring of keys and values beside the computation, as fast as the slower of them.
                let kv = 4.0 * self.tokens() * (self.shape.kv_heads * self.shape.head_dim) as f64
                    / at.tp as f64;
                let within = at.tp * at.cp <= self.fabric.domain_gpus;
                let ring = (at.cp - 1) as f64 * self.fabric.send(kv, within);
                forward = forward.max(ring);
                backward = backward.max(2.0 * ring);
            }
            return (forward + gpu.gap_s, backward + 2.0 * gpu.gap_s);
        }
        let scores = rows * heads * local * self.seq as f64;
        let peak = gpu.bf16_flops * gpu.gemm_efficiency;
        let dropout = if self.rules.dropout { 5.0 } else { 0.0 };
        // Of each score: written, softmax read and written, dropout and its mask, read again.
        let forward = (flops / 2.0 / peak).max(gpu.memory_s(2.0 * scores))
            + (flops / 2.0 / peak).max(gpu.memory_s(2.0 * scores))
            + self.kernels(scores * (4.0 + dropout), 4.0);
        let backward = 2.0 * (flops / peak).max(gpu.memory_s(4.0 * scores))
            + self.kernels(scores * (6.0 + dropout), 6.0);
        (forward, backward)
    }

    fn layer(&self, layer: usize) -> LayerTime {
        let Some(LayerTimes(known)) = self.known else { return self.layer_anew(layer) };
        let at = self.at;
        let has_experts = self.shape.has_experts(layer);
        let key = (
            (at.tp, at.sp),
            at.cp,
            at.ep,
            at.etp,
            at.micro_batch,
            at.recompute,
            self.rules.fp8,
            has_experts,
        );
        let found = known.borrow().get(&key).copied();
        found.unwrap_or_else(|| {
            let time = self.layer_anew(layer);
            known.borrow_mut().insert(key, time);
            time
        })
    }

    fn layer_anew(&self, layer: usize) -> LayerTime {
        let (shape, at) = (self.shape, self.at);
        let (hidden, tp) = (shape.hidden as f64, at.tp as f64);
        let tokens = self.tokens();
        let between = tokens * hidden / at.sequence_ranks() as f64;
        let width = shape.head_dim as f64;
        let heads = shape.heads as f64;
        let mut sizes: Vec<(f64, f64)> = match shape.latent {
            Some(latent) => {
                let (q, kv) = (latent.q_rank as f64, latent.kv_rank as f64);
                let qk = (latent.qk_dim + latent.rope_dim) as f64;
                let v = latent.v_dim as f64;
                let down = (q + kv + latent.rope_dim as f64, hidden);
                let q_in = if latent.q_rank > 0 { q } else { hidden };
                let up = (heads * (latent.qk_dim as f64 + v) / tp, kv);
                vec![down, (heads * qk / tp, q_in), up, (hidden, heads * v / tp)]
            }
            None => {
                let qkv = (heads + 2.0 * shape.kv_heads as f64) * width / tp;
                vec![(qkv, hidden), (hidden, heads * width / tp)]
            }
        };
        let gate = shape.gate_factor();
        let experts = shape.experts.filter(|_| shape.has_experts(layer));
        let ffn = match experts {
            None => shape.ffn as f64,
            Some(experts) => experts.shared_ffn as f64,
        } / tp;
        if ffn > 0.0 {
            sizes.extend([(gate * ffn, hidden), (hidden, ffn)]);
        }
        let mut time = self.linears(tokens, &sizes);
        // Norms read and write; dropout and the residual read two, write one and a mask.
        let mask = if self.rules.dropout { 1.0 } else { 0.0 };
        let frame = between * 2.0 * (4.0 + 6.0 + mask);
        let act = tokens * ffn * 2.0 * (gate + 1.0);
        let elementwise = self.kernels(frame + act, 6.0);
        time.forward += elementwise;
        time.input_grad += self.kernels(1.5 * (frame + act), 8.0);
        let (core_forward, core_backward) = self.attention_core();
        time.forward += core_forward;
        time.input_grad += core_backward;
        // Two collectives over the hidden states, whatever they are made of.
        let bytes = 2.0 * tokens * hidden;
        let local = self.local(at.tp, 1);
        let collective = self.fabric.time(Collective::AllReduce, bytes, at.tp, local).seconds;
        let exposed = 2.0 * collective * self.rules.tp_exposed;
        let mut comm_forward = exposed;
        let mut comm_backward = exposed;
        if let Some(experts) = experts {
            let routed = self.routed(experts.experts, experts.top_k, experts.ffn);
            time.forward += routed.forward;
            time.input_grad += routed.input_grad;
            time.weight_grad += routed.weight_grad;
            comm_forward += routed.exposed;
            comm_backward += routed.exposed;
        }
        time.forward += comm_forward;
        time.input_grad += comm_backward;
        time.exposed = comm_forward + comm_backward;
        match at.recompute {
            ActivationRecompute::None => {}
            ActivationRecompute::Selective => {
                time.input_grad += if self.rules.unfused_attention { core_forward } else { 0.0 };
            }
            ActivationRecompute::Full => {
                time.input_grad += time.forward;
                time.exposed += comm_forward;
            }
        }
        time
    }

    /// Routed experts: grouped GEMMs, permutation, and the two all-to-alls of a direction.
    fn routed(&self, experts: usize, top_k: usize, ffn: usize) -> LayerTime {
        let (shape, at) = (self.shape, self.at);
        let (hidden, etp) = (shape.hidden as f64, at.etp as f64);
        let rows = self.tokens() / at.tp as f64 * top_k as f64 * etp * self.rules.expert_imbalance;
        let held = (experts / at.ep).max(1) as f64;
        let (width, gate) = (ffn as f64 / etp, shape.gate_factor());
        let each = self.linears(rows / held, &[(gate * width, hidden), (hidden, width)]);
        // Grouped: the experts' tiles share waves, so that only whole rows cost.
        let mut time = LayerTime {
            forward: each.forward * held,
            input_grad: each.input_grad * held,
            weight_grad: each.weight_grad * held,
            exposed: 0.0,
        };
        let moved = rows * hidden * 2.0;
        let act = rows * width * 2.0 * (gate + 1.0);
        time.forward += self.kernels(4.0 * moved + act, 6.0);
        time.input_grad += self.kernels(4.0 * moved + 1.5 * act, 8.0);
        if at.ep > 1 {
            let local = self.local(at.ep, at.etp);
            let one = self.fabric.time(Collective::AllToAll, moved / etp, at.ep, local).seconds;
            let hidden_share = if self.rules.ep_overlap { 0.3 } else { 1.0 };
            time.exposed = 2.0 * one * hidden_share;
        }
        time
    }

    /// Seconds that a gathering of nothing takes over all data-parallel ranks.
    fn layer_latency(&self, ranks: usize) -> f64 {
        let local = self.local(ranks, self.at.tp);
        self.fabric.time(Collective::AllGather, 1.0, ranks, local).seconds
    }

    /// Times of each stage for one micro-batch.
    fn stage_times(&self) -> Vec<OpTimes> {
        (0..self.at.pp).map(|stage| self.stage_time(stage)).collect()
    }

    fn stage_time(&self, stage: usize) -> OpTimes {
        let (shape, at) = (self.shape, self.at);
        let held = StageLayers::even(shape.layers, stage, at.pp, at.vpp);
        let layers = held.chunks.iter().flatten().copied();
        let (mut dense, mut expert) = (0, 0);
        for layer in layers {
            if shape.has_experts(layer) { expert += 1 } else { dense += 1 }
        }
        let mut sum = LayerTime::default();
        let mut add = |count: usize, layer: usize| {
            if count > 0 {
                let time = self.layer(layer);
                sum.forward += count as f64 * time.forward;
                sum.input_grad += count as f64 * time.input_grad;
                sum.weight_grad += count as f64 * time.weight_grad;
            }
        };
        add(dense, 0);
        add(expert, shape.layers - 1);
        let tokens = self.tokens();
        let (hidden, vocab) = (shape.hidden as f64, shape.vocab as f64 / at.tp as f64);
        if held.has_head {
            let head = [(vocab, hidden)];
            let bf16 = Cost { rules: &StepRules { fp8: false, ..*self.rules }, ..*self };
            let time = bf16.linears(tokens, &head);
            let (forward, backward) = self.rules.loss_traffic;
            sum.forward += time.forward + self.kernels(tokens * vocab * forward, 8.0);
            sum.input_grad += time.input_grad + self.kernels(tokens * vocab * backward, 3.0);
            sum.weight_grad += time.weight_grad;
        }
        if held.has_embedding {
            let bytes = tokens * hidden * 6.0;
            sum.forward += self.kernels(bytes, 4.0);
            sum.weight_grad += self.kernels(2.0 * bytes, 4.0);
        }
        let p2p = if at.pp > 1 {
            let within = at.tp * at.cp * at.dp * 2 <= self.fabric.domain_gpus;
            self.fabric.send(2.0 * tokens * hidden / at.tp as f64, within)
        } else {
            0.0
        };
        // Each chunk's pass ends with a send and begins with a receive.
        let blocked = if self.rules.p2p_blocks { p2p * at.vpp as f64 } else { 0.0 };
        OpTimes {
            forward: sum.forward + blocked,
            input_grad: sum.input_grad + blocked,
            weight_grad: sum.weight_grad,
            p2p,
        }
    }

    /// Adds gradients' reduction, parameters' gathering and the optimizer to a pipeline's time.
    fn with_data_parallel(&self, times: &[OpTimes], pipeline: f64, bubble: f64) -> StepTime {
        let (shape, at) = (self.shape, self.at);
        let held = StageLayers::even(shape.layers, 0, at.pp, at.vpp);
        let (mut dense, mut routed) = (0.0, 0.0);
        for &layer in held.chunks.iter().flatten() {
            let of_layer = shape.layer_parameters(layer, at.tp, at.etp, at.ep);
            dense += of_layer.dense;
            routed += of_layer.routed;
        }
        let tables = if at.pp == 1 && !shape.tied { 2.0 } else { 1.0 };
        dense += tables * (shape.vocab * shape.hidden) as f64 / at.tp as f64;
        let ranks = at.dp * at.cp;
        let groups = [
            (dense, ranks, self.local(ranks, at.tp)),
            (routed, at.expert_dp(), self.local(at.expert_dp(), at.etp * at.ep)),
        ];
        let (mut reduce, mut gather) = (0.0, 0.0);
        let mut held_states = 0.0;
        for (parameters, ranks, local) in groups {
            let time =
                |collective, bytes| self.fabric.time(collective, bytes, ranks, local).seconds;
            let gradients = parameters * self.rules.gradient_bytes;
            if at.zero == 0 {
                reduce += time(Collective::AllReduce, gradients);
                held_states += parameters;
            } else {
                reduce += time(Collective::ReduceScatter, gradients);
                gather += time(Collective::AllGather, 2.0 * parameters);
                held_states += parameters / ranks as f64;
            }
        }
        let of = |pick: fn(&OpTimes) -> f64| times.iter().map(pick).fold(0.0, f64::max);
        let forward = of(|times| times.forward);
        let backward = of(|times| times.input_grad + times.weight_grad);
        let count = at.micro_batches as f64;
        let (mut pipeline, mut exposed) = (pipeline, reduce + gather);
        if at.zero >= 3 {
            // Parameters are gathered for each pass, layer by layer beside the one before.
            let slow = self.rules.interference - 1.0;
            let both = |compute: f64, comm: f64| (compute + slow * comm.min(compute)).max(comm);
            // A collective for each layer, each with its own latency.
            let latency = self.layer_latency(ranks) * shape.layers as f64;
            let pass =
                both(forward, gather + latency) + both(backward, gather + reduce + 2.0 * latency);
            let idle = pipeline - count * (forward + backward);
            pipeline = count * pass + idle;
            // The first layer's gathering and the last one's reduction have nothing beside them.
            exposed = (gather + reduce) / shape.layers as f64;
        } else if self.rules.dp_overlap {
            let hidden = 0.9 * (forward + backward);
            let slow = if exposed > 0.0 { self.rules.interference - 1.0 } else { 0.0 };
            pipeline += exposed.min(hidden) * slow;
            exposed = (exposed - hidden).max(0.05 * exposed);
        }
        // Gradient, master weight and two moments read, three of them and the copy written.
        let optimizer = self.kernels(held_states * 34.0, 40.0);
        let layers = held.chunks.iter().flatten().count() as f64;
        let exposed_in_stage = count * layers * self.layer(shape.layers - 1).exposed;
        StepTime {
            seconds: pipeline + exposed + optimizer,
            pipeline,
            bubble,
            data_parallel: exposed,
            optimizer,
            exposed_in_stage,
        }
    }
}
