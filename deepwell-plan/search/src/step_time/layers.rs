//! Seconds of a layer: GEMMs, attention, memory-bound kernels, communication.

use std::cell::RefCell;
use std::collections::HashMap;

use super::{Communication, Cost, LastLayers, Overlap, StepRules};
use crate::ActivationRecompute;
use crate::collectives::{Collective, Generation};
use crate::model_shape::ExpertShape;

/// Exposed share of the experts' all-to-alls overlapped with another micro-batch.
const EP_OVERLAP_EXPOSED: f64 = 0.3;
/// Exposed share of the gathers and sums of experts' tokens: of the four in a layer, only the
/// gather of the tokens' gradients overlaps, with weight gradients.
const EP_GATHER_EXPOSED: f64 = 0.75;
/// Exposed share of a ring's sends overlapped with attention: 0.3 to 1.1 of 8.0 ms on two H100s
/// (`benchmarks/ranks_h100_2026-11-27.md`).
const RING_EXPOSED: f64 = 0.09;
/// Share of the tuner's NVLink rate that Deepwell's shifts of a ring reach: 906 MB in 8.0 ms on two
/// H100s, messages of 6 and 13 MB (the same benchmark).
const RING_SHARE: f64 = 0.305;
/// Bytes moved per quantized element: BF16 read, MXFP8 and scales written rowwise and columnwise.
const QUANTIZE_BYTES: f64 = 2.0 + 2.0 * (1.0 + 1.0 / 32.0);
/// The same for NVFP4, as bytes that take as long: largest magnitude, transform and both directions
/// of 2048 x 28672 elements take 106 us on a GB200 (torchao's
/// `benchmarks/prototype/nvfp4_training`), at 80 % of 8 TB/s.
const NVFP4_QUANTIZE_BYTES: f64 = 106e-6 * 0.8 * 8e12 / (2048.0 * 28672.0);
/// Share of the layers that are not in NVFP4.
pub(crate) const LAST_LAYERS: f64 = 0.15;

/// Forward and backward seconds of one layer, one micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LayerTime {
    pub(super) forward: f64,
    pub(super) dgrad: f64,
    pub(super) wgrad: f64,
    /// The communication included in these times, and the overlapped communication.
    pub(super) communication: Communication,
}

/// Parameters of a layer's time for a fixed model, GPU, rules and sequence length: TP and SP, CP,
/// EP, ETP, micro-batch, recomputation, FP8 and NVFP4, experts.
type LayerKey = ((usize, bool), usize, usize, usize, usize, ActivationRecompute, [bool; 2], bool);

/// Cached layer times of a search, for one model, GPU, set of rules and sequence length.
#[derive(Default)]
pub(crate) struct LayerTimes(RefCell<HashMap<LayerKey, LayerTime>>);

impl Cost<'_> {
    /// Tokens of a micro-batch on one context-parallel rank.
    pub(super) fn tokens(&self) -> f64 {
        (self.at.micro_batch * self.seq) as f64 / self.at.cp as f64
    }

    /// Ranks in one NVLink domain, of a group of `ranks` ranks with the given stride.
    pub(super) fn local(&self, ranks: usize, stride: usize) -> usize {
        (self.fabric.domain_gpus / stride.max(1)).clamp(1, ranks)
    }

    fn gemm(&self, m: f64, n: f64, k: f64) -> f64 {
        let seconds = match (self.rules.nvfp4, self.rules.fp8) {
            (Some(_), _) => self.gpu.nvfp4_gemm_s(m, n, k),
            (None, true) => self.gpu.fp8_gemm_s(m, n, k),
            (None, false) => self.gpu.gemm_s(m, n, k),
        };
        self.rules.framework * (seconds + self.gpu.gap_s)
    }

    /// Seconds of quantizing `elements` numbers for both directions; none in BF16.
    fn quantize(&self, elements: f64, count: f64) -> f64 {
        match (self.rules.nvfp4, self.rules.fp8) {
            (Some(_), _) => self.kernels(NVFP4_QUANTIZE_BYTES * elements, 2.0 * count),
            (None, true) => self.kernels(QUANTIZE_BYTES * elements, count),
            (None, false) => 0.0,
        }
    }

    /// Seconds of memory-bound kernels with `bytes` read and written in total.
    pub(super) fn kernels(&self, bytes: f64, count: f64) -> f64 {
        let factor = self.rules.framework * self.rules.unfused;
        factor * (self.gpu.memory_s(bytes) + count * self.gpu.gap_s)
    }

    /// Forward, dgrad and wgrad of linear layers on `m` tokens.
    pub(super) fn linears(&self, m: f64, sizes: &[(f64, f64)]) -> LayerTime {
        let mut time = LayerTime::default();
        for &(n, k) in sizes {
            time.forward += self.gemm(m, n, k);
            time.dgrad += self.gemm(m, k, n);
            // Quantization of the input before fprop, and of the output gradient before dgrad.
            time.forward += self.quantize(m * k, 1.0);
            time.dgrad += self.quantize(m * n, 1.0);
            let gemm = self.gemm(n, k, m);
            // The FP32 accumulator is read and written, by the GEMM or after it.
            time.wgrad += if self.rules.fused_accumulation {
                gemm.max(self.gpu.memory_s(8.0 * n * k))
            } else {
                gemm + self.kernels(10.0 * n * k, 1.0)
            };
        }
        time
    }

    /// Scores, softmax and values: forward and backward seconds, and the ring of keys and values.
    fn attention_core(&self) -> (f64, f64, Overlap) {
        let (gpu, at) = (self.gpu, self.at);
        let heads = self.shape.heads as f64 / at.tp as f64;
        let local = self.seq as f64 / at.cp as f64;
        let rows = at.micro_batch as f64;
        let flops = self.shape.score_flops(rows, self.seq) / (at.tp * at.cp) as f64;
        if !self.rules.unfused_attention {
            // Causal: half of the square. Backward has five GEMMs, forward two.
            let half = flops / 2.0 / gpu.bf16_flops;
            let half = self.rules.framework * self.rules.attention * half;
            let (of_forward, of_backward) = self.attention_efficiency();
            let mut forward = half / of_forward;
            let mut backward = 2.5 * half / of_backward;
            let mut context = Overlap::default();
            if at.cp > 1 {
                let (q, kv) = self.ring_elements();
                let [ring, ring_back] = self.ring_s(kv);
                let steps = at.cp as f64;
                if self.rules.own_attention {
                    // Each step's FP32 output rows are merged; each step's FP32 gradients are added
                    // and rounded.
                    forward += self.kernels(8.0 * steps * q, 2.0 * steps);
                    backward += self.kernels((16.0 * steps - 6.0) * (q + kv), 4.0 * steps);
                }
                // The ring of keys and values overlaps with computation.
                let beside = |comm: f64, compute: &mut f64| {
                    *compute += (self.rules.interference - 1.0) * comm.min(*compute);
                    let exposed = (comm - *compute).max(RING_EXPOSED * comm);
                    *compute += exposed;
                    exposed
                };
                context.seconds = ring + ring_back;
                context.exposed = beside(ring, &mut forward) + beside(ring_back, &mut backward);
            }
            return (forward + gpu.gap_s, backward + 2.0 * gpu.gap_s, context);
        }
        let (seq, count) = (self.seq as f64, rows * heads);
        let width = self.shape.head_dim as f64;
        let (qk, v) = self.shape.latent.map_or((width, width), |latent| {
            ((latent.qk_dim + latent.rope_dim) as f64, latent.v_dim as f64)
        });
        // GEMMs of one head with K or N equal to the head width are far below the rate of large
        // GEMMs.
        let gemm =
            |m, n, k| self.rules.framework * (gpu.batched_gemm_s(count, m, n, k) + gpu.gap_s);
        let scores = count * local * seq;
        let dropout = if self.rules.dropout { 5.0 } else { 0.0 };
        // Per score: softmax read and written, dropout and its mask.
        let forward = gemm(local, seq, qk)
            + gemm(local, v, seq)
            + self.kernels(scores * (4.0 + dropout), 4.0);
        let backward = gemm(local, seq, v)
            + gemm(seq, v, local)
            + gemm(local, qk, seq)
            + gemm(seq, qk, local)
            + self.kernels(scores * (6.0 + dropout), 6.0);
        (forward, backward, Overlap::default())
    }

    /// Share of peak of flash attention, forward and backward.
    fn attention_efficiency(&self) -> (f64, f64) {
        let gpu = self.gpu;
        let is_portable = self.at.cp > 1 || gpu.generation == Generation::Blackwell;
        match self.rules.own_attention && is_portable {
            true => (gpu.portable_forward_efficiency, gpu.portable_backward_efficiency),
            false => (gpu.attention_forward_efficiency, gpu.attention_backward_efficiency),
        }
    }

    /// Seconds of a ring's sends, forward and backward, for `kv` elements of keys and values.
    ///
    /// Keys and values go to all other ranks, in both passes. Their gradients follow in the
    /// backward pass, and return to their rank: in Deepwell as FP32 sums, elsewhere in BF16.
    fn ring_s(&self, kv: f64) -> [f64; 2] {
        let at = self.at;
        let within = at.tp * at.cp <= self.fabric.domain_gpus;
        let (hops, steps) = ((at.cp - 1) as f64, at.cp as f64);
        if !self.rules.own_attention {
            let ring = hops * self.fabric.send(2.0 * kv, within);
            return [ring, 2.0 * ring];
        }
        let share = if within { RING_SHARE } else { 1.0 };
        let send = |bytes: f64| self.fabric.send(bytes / share, within);
        // Keys and values are separate messages.
        let keys = hops * 2.0 * send(kv);
        [keys, keys + steps * 2.0 * send(2.0 * kv)]
    }

    /// Elements of queries, and of keys and values, on one rank of a ring.
    fn ring_elements(&self) -> (f64, f64) {
        let (shape, tp) = (self.shape, self.at.tp as f64);
        let of = |heads: usize| self.tokens() * (heads * shape.head_dim) as f64 / tp;
        (of(shape.heads), 2.0 * of(shape.kv_heads))
    }

    /// A layer; with NVFP4 the mean of its formats over all layers.
    pub(super) fn layer(&self, layer: usize) -> LayerTime {
        let time = self.layer_in_format(layer);
        let last = match self.rules.nvfp4 {
            None | Some(LastLayers::Nvfp4) => return time,
            Some(last) => last,
        };
        let rules = StepRules { fp8: last == LastLayers::Mxfp8, nvfp4: None, ..*self.rules };
        let of_last = Cost { rules: &rules, ..*self }.layer_in_format(layer);
        let mean = |in_nvfp4: f64, last: f64| (1.0 - LAST_LAYERS) * in_nvfp4 + LAST_LAYERS * last;
        LayerTime {
            forward: mean(time.forward, of_last.forward),
            dgrad: mean(time.dgrad, of_last.dgrad),
            wgrad: mean(time.wgrad, of_last.wgrad),
            communication: time.communication,
        }
    }

    fn layer_in_format(&self, layer: usize) -> LayerTime {
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
            [self.rules.fp8, self.rules.nvfp4.is_some()],
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
        // Up-projections of latent attention.
        let mut up: Vec<(f64, f64)> = Vec::new();
        let mut sizes: Vec<(f64, f64)> = match shape.latent {
            Some(latent) => {
                let (q, kv) = (latent.q_rank as f64, latent.kv_rank as f64);
                let qk = (latent.qk_dim + latent.rope_dim) as f64;
                let v = latent.v_dim as f64;
                let down = (q + kv + latent.rope_dim as f64, hidden);
                let q_in = if latent.q_rank > 0 { q } else { hidden };
                up = vec![(heads * qk / tp, q_in), (heads * (latent.qk_dim as f64 + v) / tp, kv)];
                vec![down, up[0], up[1], (hidden, heads * v / tp)]
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
        time.dgrad += self.kernels(1.5 * (frame + act), 8.0);
        let (core_forward, core_backward, context) = self.attention_core();
        time.communication.context = context;
        time.forward += core_forward;
        time.dgrad += core_backward;
        // Two collectives over the hidden states, of any composition.
        let bytes = 2.0 * tokens * hidden;
        let local = self.local(at.tp, 1);
        let collective = self.fabric.time(Collective::AllReduce, bytes, at.tp, local).seconds;
        // Two in each direction.
        let tensor = Overlap::of(2.0 * collective, self.rules.tp_exposed);
        let mut expert = Overlap::default();
        let mut expert_act = 0.0;
        if let Some(experts) = experts {
            let rows = tokens * experts.top_k as f64 / tp * self.rules.expert_imbalance;
            expert_act = rows * experts.ffn as f64 * 2.0 * (gate + 1.0);
            let (routed, dispatch) = self.routed(&experts);
            time.forward += routed.forward;
            time.dgrad += routed.dgrad;
            time.wgrad += routed.wgrad;
            expert = dispatch;
        }
        let exposed = tensor.exposed + expert.exposed;
        time.forward += exposed;
        time.dgrad += exposed;
        let passes = if at.recompute == ActivationRecompute::Full { 3.0 } else { 2.0 };
        time.communication.tensor = tensor.times(passes);
        time.communication.expert = expert.times(passes);
        match at.recompute {
            ActivationRecompute::None => {}
            ActivationRecompute::Selective if self.rules.unfused_attention => {
                time.dgrad += core_forward;
            }
            // Norms are read and written again.
            ActivationRecompute::Norms => time.dgrad += self.kernels(8.0 * between, 2.0),
            ActivationRecompute::Activations => {
                time.dgrad += self.kernels(act + expert_act, 1.0);
            }
            ActivationRecompute::Selective => {
                time.dgrad += self.kernels(8.0 * between + act + expert_act, 3.0);
                time.dgrad += up.iter().map(|&(n, k)| self.gemm(tokens, n, k)).sum::<f64>();
            }
            ActivationRecompute::Full => time.dgrad += time.forward,
        }
        time
    }

    /// Routed experts: grouped GEMMs and permutation, and the two collectives of each direction.
    fn routed(&self, of: &ExpertShape) -> (LayerTime, Overlap) {
        let ExpertShape { experts, top_k, ffn, .. } = *of;
        let (shape, at) = (self.shape, self.at);
        let (hidden, etp) = (shape.hidden as f64, at.etp as f64);
        let rows = self.tokens() / at.tp as f64 * top_k as f64 * etp * self.rules.expert_imbalance;
        let held = (experts / at.ep).max(1) as f64;
        let (width, gate) = (ffn as f64 / etp, shape.gate_factor());
        let each = self.linears(rows / held, &[(gate * width, hidden), (hidden, width)]);
        // Grouped GEMMs: the tiles of all experts share waves, so partial waves do not count.
        let mut time = LayerTime {
            forward: each.forward * held,
            dgrad: each.dgrad * held,
            wgrad: each.wgrad * held,
            communication: Communication::default(),
        };
        // With gathered tokens the buffer has room for all possible pairs. Kernels that move or
        // activate rows process the whole buffer; GEMMs process only the rows present.
        let room = match self.rules.expert_gather && at.ep > 1 {
            true => {
                let pairs = at.ep * at.etp * top_k.min((experts / at.ep).max(1));
                self.tokens() / at.tp as f64 * pairs as f64
            }
            false => rows,
        };
        let moved = room * hidden * 2.0;
        let act = room * width * 2.0 * (gate + 1.0);
        time.forward += self.kernels(4.0 * moved + act, 6.0);
        time.dgrad += self.kernels(4.0 * moved + 1.5 * act, 8.0);
        let elements = (room - rows).max(0.0) * (hidden + width);
        time.forward += self.quantize(elements, 0.0);
        time.dgrad += self.quantize(elements, 0.0);
        if at.ep == 1 {
            return (time, Overlap::default());
        }
        if self.rules.expert_gather {
            // All ranks gather the tokens of all ranks, for any routing; outputs of experts are
            // reduce-scattered.
            let ranks = at.ep * at.etp;
            let tokens = self.tokens() / at.tp as f64 * ranks as f64;
            let (bytes, local) = (2.0 * tokens * hidden, self.local(ranks, 1));
            let kinds = [Collective::AllGather, Collective::ReduceScatter];
            let seconds = kinds.map(|kind| self.fabric.time(kind, bytes, ranks, local).seconds);
            return (time, Overlap::of(seconds.iter().sum(), EP_GATHER_EXPOSED));
        }
        let local = self.local(at.ep, at.etp);
        let imbalance = self.rules.expert_imbalance;
        let room = |factor| of.room_over_mean(factor, at.ep) / imbalance;
        let sent = moved / etp * self.rules.capacity_factor.map_or(1.0, room);
        let one = self.fabric.time(Collective::AllToAll, sent, at.ep, local).seconds;
        let exposed = if self.rules.ep_overlap { EP_OVERLAP_EXPOSED } else { 1.0 };
        (time, Overlap::of(2.0 * one, exposed))
    }
}
