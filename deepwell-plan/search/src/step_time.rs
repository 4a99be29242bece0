//! Time of a training step of a distributed plan.
//!
//! Each stage's forward and backward pass is a sum of GEMMs at the efficiency of their shape,
//! attention, memory-bound kernels, and exposed communication. The pipeline is simulated with these
//! times; data-parallel communication and the optimizer follow.

mod data_parallel;
mod gathered;
mod layers;

use serde::{Deserialize, Serialize};

use crate::collectives::{Fabric, Generation};
use crate::gpu_model::GpuModel;
use crate::memory::StageLayers;
use crate::{LayerSplit, ModelShape, Strategy};
use deepwell_lower::PlanError;
use deepwell_lower::schedule::{OpTimes, PipelineSchedule, orders, simulate};

pub(crate) use layers::LAST_LAYERS;
use layers::LayerTime;
pub(crate) use layers::LayerTimes;

/// Properties of a framework that affect step time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRules {
    /// Whether attention scores are stored in memory.
    pub unfused_attention: bool,
    /// Whether dropout runs.
    pub dropout: bool,
    /// Exposed share of tensor-parallel communication.
    pub tp_exposed: f64,
    /// Whether data-parallel communication overlaps with the backward pass.
    pub dp_overlap: bool,
    /// Whether all-to-alls of experts overlap with computation of another micro-batch.
    pub ep_overlap: bool,
    /// Whether ranks all-gather the tokens of the expert-parallel group and reduce-scatter the
    /// experts' outputs, as Deepwell does. Otherwise all-to-alls send each token to the ranks of
    /// its experts.
    pub expert_gather: bool,
    /// Bytes per element of a reduced gradient.
    pub gradient_bytes: f64,
    /// Slowdown of computation overlapped with communication.
    pub interference: f64,
    /// Whether the wgrad GEMM accumulates into the FP32 sum; otherwise a separate kernel does.
    pub fused_accumulation: bool,
    /// Whether a stage is idle during its sends and receives.
    pub p2p_blocks: bool,
    /// Bytes read and written per logit by the loss, forward and backward.
    pub loss_traffic: (f64, f64),
    /// Time of the framework's kernels relative to Deepwell's kernels, on which efficiencies are
    /// calibrated.
    pub framework: f64,
    /// Additional factor for memory-bound kernels without fusion.
    pub unfused: f64,
    /// Additional factor for flash attention older than FlashAttention 2.
    pub attention: f64,
    /// Whether attention is Deepwell's: its kernels for context parallelism and Blackwell are
    /// portable.
    #[serde(default)]
    pub own_attention: bool,
    /// Whether ranks gather weights as Deepwell does: FP32 masters after an update; in ZeRO-2 and 3
    /// BF16 copies, or quantized data and scales if slices are whole blocks. Otherwise ranks gather
    /// BF16 copies.
    #[serde(default)]
    pub own_gather: bool,
    /// Rows of the busiest expert rank over the mean.
    pub expert_imbalance: f64,
    /// Expert capacity as a multiple of an even share. All-to-alls then transfer whole buffers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// Whether linear layers are quantized to FP8.
    pub fp8: bool,
    /// Whether the quantized linear layers are in NVFP4, but for the last layers: the format of
    /// these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvfp4: Option<LastLayers>,
}

/// Format of the last 15 % of the layers where the others are in NVFP4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LastLayers {
    /// NVFP4, too, as in `bf16_with_nvfp4_mixed` of Megatron-Bridge.
    Nvfp4,
    /// BF16, as in the published recipe.
    Bf16,
    /// MXFP8, as in Deepwell's.
    Mxfp8,
}

impl StepRules {
    /// Megatron-LM of 2021 and 2022: attention through memory, dropout, no overlap.
    pub const MEGATRON_2021: StepRules = StepRules {
        unfused_attention: true,
        dropout: true,
        tp_exposed: 1.0,
        dp_overlap: false,
        ep_overlap: false,
        expert_gather: false,
        gradient_bytes: 4.0,
        interference: 1.0,
        fused_accumulation: false,
        p2p_blocks: true,
        // Cast to FP32, maximum, difference, exponential, sum, quotient; backward scaling and cast
        // to BF16.
        loss_traffic: (38.0, 14.0),
        framework: 1.0,
        unfused: 1.0,
        attention: 1.0,
        own_attention: false,
        own_gather: false,
        expert_imbalance: 1.0,
        capacity_factor: None,
        fp8: false,
        nvfp4: None,
    };

    /// Step time of PyTorch with `torch.compile` relative to Deepwell: llama-1.1b, 8 x 2048 tokens
    /// in BF16 (`benchmarks/train_h200_2026-11-23.md`).
    pub const PYTORCH: f64 = 1.21;
    /// Time of memory-bound kernels without `torch.compile` relative to compiled kernels; GEMMs and
    /// attention are unaffected. The same step then takes 1.37 times as long as Deepwell's.
    pub const PYTORCH_UNFUSED: f64 = 1.96;

    /// FlashAttention 1 relative to FlashAttention 2, by the abstract of arXiv 2307.08691.
    pub const FLASH_ATTENTION_1: f64 = 2.0;

    /// Current trainers: flash attention, gradient reduction overlapped with the backward pass,
    /// half of the tensor-parallel communication hidden.
    pub const MODERN: StepRules = StepRules {
        unfused_attention: false,
        dropout: false,
        tp_exposed: 0.5,
        dp_overlap: true,
        // Collectives occupy 16 of 132 SMs (Megatron-Core's figure for registered buffers).
        interference: 1.0 + 16.0 / 132.0,
        fused_accumulation: true,
        p2p_blocks: false,
        expert_imbalance: 1.1,
        ..StepRules::MEGATRON_2021
    };

    /// These rules with PyTorch's kernels, compiled or fused.
    ///
    /// Ampere's efficiencies of GEMMs and attention are published rates of cuBLAS and
    /// FlashAttention, which PyTorch calls, so only its memory-bound kernels have a factor: their
    /// efficiency is Deepwell's on every generation.
    pub fn of_compiled_pytorch(self, generation: Generation) -> StepRules {
        match generation {
            Generation::Ampere => StepRules { framework: 1.0, unfused: StepRules::PYTORCH, ..self },
            Generation::Hopper | Generation::Blackwell => {
                StepRules { framework: StepRules::PYTORCH, ..self }
            }
        }
    }

    /// [`StepRules::of_compiled_pytorch`] without `torch.compile`.
    pub fn of_eager_pytorch(self, generation: Generation) -> StepRules {
        let compiled = self.of_compiled_pytorch(generation);
        StepRules { unfused: compiled.unfused * StepRules::PYTORCH_UNFUSED, ..compiled }
    }
}

/// Total and exposed communication.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overlap {
    /// Seconds of all communication.
    pub seconds: f64,
    /// Seconds not hidden by computation.
    pub exposed: f64,
}

impl Overlap {
    fn of(seconds: f64, exposed_share: f64) -> Overlap {
        Overlap { seconds, exposed: seconds * exposed_share }
    }

    fn times(self, count: f64) -> Overlap {
        Overlap { seconds: self.seconds * count, exposed: self.exposed * count }
    }

    /// Share hidden by computation, 0 to 1; 1 without communication.
    pub fn hidden_share(&self) -> f64 {
        if self.seconds > 0.0 { 1.0 - self.exposed / self.seconds } else { 1.0 }
    }
}

/// Communication of a step by parallelism, on the first stage. Pipeline P2P is not included: its
/// cost is part of the bubble.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Communication {
    /// Tensor-parallel collectives.
    pub tensor: Overlap,
    /// Ring exchange of keys and values.
    pub context: Overlap,
    /// Tokens sent to experts and back.
    pub expert: Overlap,
    /// Gradients and parameters of data-parallel ranks.
    pub data: Overlap,
}

impl Communication {
    /// Each kind with its name.
    pub fn kinds(&self) -> [(&'static str, Overlap); 4] {
        [
            ("tensor", self.tensor),
            ("context", self.context),
            ("expert", self.expert),
            ("data", self.data),
        ]
    }

    /// All kinds together.
    pub fn total(&self) -> Overlap {
        self.kinds().iter().fold(Overlap::default(), |sum, (_, one)| Overlap {
            seconds: sum.seconds + one.seconds,
            exposed: sum.exposed + one.exposed,
        })
    }

    fn times(&self, count: f64) -> Communication {
        Communication {
            tensor: self.tensor.times(count),
            context: self.context.times(count),
            expert: self.expert.times(count),
            data: self.data.times(count),
        }
    }
}

/// Seconds of a step and its components.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepTime {
    /// The whole step.
    pub seconds: f64,
    /// The pipeline, bubbles included.
    pub pipeline: f64,
    /// Idle share of the pipeline.
    pub bubble: f64,
    /// Seconds of the bubble.
    pub bubble_s: f64,
    /// Communication between ranks.
    pub communication: Communication,
    /// The optimizer.
    pub optimizer: f64,
}

impl StepTime {
    /// Seconds of the kernels of the passes, including the slowdown by overlapped communication.
    pub fn compute(&self) -> f64 {
        let exposed = self.communication.total().exposed;
        self.seconds - self.bubble_s - self.optimizer - exposed
    }
}

/// Inputs of the cost model.
struct Cost<'a> {
    known: Option<&'a LayerTimes>,
    shape: &'a ModelShape,
    at: &'a Strategy,
    gpu: &'a GpuModel,
    fabric: &'a Fabric,
    rules: &'a StepRules,
    seq: usize,
}

/// Predicts a step.
///
/// # Errors
/// A schedule unsupported for the degrees.
pub fn step_time(
    shape: &ModelShape,
    at: &Strategy,
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

/// Times of each stage for one micro-batch, as input of [`simulate`].
pub fn stage_times(
    shape: &ModelShape,
    at: &Strategy,
    gpu: &GpuModel,
    fabric: &Fabric,
    rules: &StepRules,
    seq: usize,
) -> Vec<OpTimes> {
    Cost { known: None, shape, at, gpu, fabric, rules, seq }.stage_times()
}

/// [`step_time`] with closed forms of the bubbles instead of a simulation: accurate within a few
/// percent, at a cost independent of stages and micro-batches.
pub fn step_time_estimate(
    shape: &ModelShape,
    at: &Strategy,
    gpu: &GpuModel,
    fabric: &Fabric,
    rules: &StepRules,
    seq: usize,
) -> StepTime {
    Cost { known: None, shape, at, gpu, fabric, rules, seq }.estimate()
}

/// [`step_time_estimate`] with a cache of layer times in `known`.
pub(crate) fn step_time_known(
    shape: &ModelShape,
    at: &Strategy,
    machine: (&GpuModel, &Fabric),
    rules: &StepRules,
    seq: usize,
    known: &LayerTimes,
) -> StepTime {
    let (gpu, fabric) = machine;
    Cost { known: Some(known), shape, at, gpu, fabric, rules, seq }.estimate()
}

/// The first stage whose layers all have experts, if some layers of the model have none: it has the
/// most compute and memory of the middle stages.
pub(crate) fn first_full_stage(shape: &ModelShape, at: &Strategy) -> usize {
    let dense = shape.experts.map_or(0, |experts| experts.dense_layers);
    // With [`LayerSplit::Ends`] the embedding counts as a layer, so the first full stage comes
    // later.
    let (before, ends) = match at.split {
        LayerSplit::Even => (dense, 0),
        LayerSplit::Ends => (dense + 1, 2),
        LayerSplit::Balanced => (dense, shape.head_layers()),
        LayerSplit::Given => return fullest_given(shape, at),
    };
    let each = (shape.layers + ends).div_ceil(at.pp * at.vpp).max(1);
    before.div_ceil(each).min(at.pp - 1)
}

/// The first stage of a layout with the most layers, among stages without embedding and head.
fn fullest_given(shape: &ModelShape, at: &Strategy) -> usize {
    let count = |stage: &usize| StageLayers::of(shape, at, *stage).count();
    (1..at.pp.saturating_sub(1)).rev().max_by_key(count).unwrap_or(0)
}

impl Cost<'_> {
    fn estimate(&self) -> StepTime {
        let at = self.at;
        let (first, last) = (self.stage_time(0), self.stage_time(at.pp - 1));
        let middle = self.stage_time(first_full_stage(self.shape, at));
        let total = |times: &OpTimes| times.forward + times.dgrad + times.wgrad;
        let slower = |a, b| if total(&b) > total(&a) { b } else { a };
        let slowest = slower(slower(first, middle), last);
        let (count, stages) = (at.micro_batches as f64, at.pp as f64);
        let hops = 2.0 * (stages * at.vpp as f64 - 1.0) * first.p2p;
        let filling = match at.schedule {
            PipelineSchedule::OneFOneB => total(&slowest) / at.vpp as f64,
            PipelineSchedule::ZbH1 => (total(&slowest) - 2.0 * slowest.wgrad).max(0.0),
            PipelineSchedule::ZbH2 => (total(&slowest) - 3.0 * slowest.wgrad).max(0.0),
        };
        let bubble = (stages - 1.0) * filling + if at.pp > 1 { hops } else { 0.0 };
        let pipeline = count * total(&slowest) + bubble;
        self.with_data_parallel(&[first, slowest, last], pipeline, bubble / pipeline)
    }
}

impl Cost<'_> {
    /// Times of each stage for one micro-batch.
    fn stage_times(&self) -> Vec<OpTimes> {
        (0..self.at.pp).map(|stage| self.stage_time(stage)).collect()
    }

    fn stage_time(&self, stage: usize) -> OpTimes {
        let (shape, at) = (self.shape, self.at);
        let held = StageLayers::of(shape, at, stage);
        let (dense, expert) = held.kinds(shape);
        let mut sum = LayerTime::default();
        let mut add = |count: usize, layer: usize| {
            if count > 0 {
                let time = self.layer(layer);
                sum.forward += count as f64 * time.forward;
                sum.dgrad += count as f64 * time.dgrad;
                sum.wgrad += count as f64 * time.wgrad;
            }
        };
        add(dense, 0);
        add(expert, shape.layers - 1);
        let tokens = self.tokens();
        let (hidden, vocab) = (shape.hidden as f64, shape.vocab as f64 / at.tp as f64);
        if held.has_head {
            let head = [(vocab, hidden)];
            let bf16 =
                Cost { rules: &StepRules { fp8: false, nvfp4: None, ..*self.rules }, ..*self };
            let time = bf16.linears(tokens, &head);
            let (forward, backward) = self.rules.loss_traffic;
            sum.forward += time.forward + self.kernels(tokens * vocab * forward, 8.0);
            sum.dgrad += time.dgrad + self.kernels(tokens * vocab * backward, 3.0);
            sum.wgrad += time.wgrad;
        }
        if held.has_embedding {
            let bytes = tokens * hidden * 6.0;
            sum.forward += self.kernels(bytes, 4.0);
            sum.wgrad += self.kernels(2.0 * bytes, 4.0);
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
            dgrad: sum.dgrad + blocked,
            wgrad: sum.wgrad,
            p2p,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of `benchmarks/train_h200_2026-11-23.md` on a single H200, with a single micro-batch.
    #[test]
    fn steps_are_near_those_measured() {
        let gpu = GpuModel::h200();
        let fabric = Fabric::new(Generation::Hopper, 1, 50.0);
        let rows = [
            ("llama-1.1b", 8, 2048, false, 219.5),
            ("llama-1.1b", 8, 2048, true, 175.7),
            ("llama-134m", 32, 1024, false, 54.0),
            ("llama-134m", 32, 1024, true, 51.5),
        ];
        for (model, micro_batch, seq, fp8, ms) in rows {
            let shape = ModelShape::known(model).unwrap();
            let at = Strategy { micro_batch, ..Strategy::SINGLE };
            let rules = StepRules { fp8, loss_traffic: (8.0, 6.0), ..StepRules::MODERN };
            let found = step_time(&shape, &at, &gpu, &fabric, &rules, seq).unwrap().seconds * 1e3;
            println!("{model} fp8 {fp8}: {found:.1} ms, measured {ms}");
            assert!((found / ms - 1.0).abs() < 0.25, "{model} {fp8}: {found} {ms}");
        }
    }

    /// Steps in NVFP4 against MXFP8, tokens/s over tokens/s: torchtitan's with 15 % of the layers
    /// in BF16 on four GPUs of 185 GiB (`torchtitan/components/quantization/nvfp4.md`), and
    /// Megatron-Bridge's without exceptions on 64 and 256 GPUs (`docs/performance-summary.md`),
    /// with the layouts of `megatron_bridge.csv`. No constant was fitted to these rows.
    #[test]
    fn nvfp4_gains_as_published() {
        use LastLayers::{Bf16, Nvfp4};
        let (gb200, gb300) = (GpuModel::gb200 as fn() -> GpuModel, GpuModel::gb300 as fn() -> _);
        let zero3 = |dp, micro_batch| Strategy { dp, micro_batch, zero: 3, ..Strategy::SINGLE };
        let stages = |pp, dp| Strategy {
            tp: 4,
            sp: true,
            pp,
            vpp: 4,
            dp,
            micro_batches: 1536 / dp,
            zero: 1,
            ..Strategy::SINGLE
        };
        let llama = ModelShape::known("llama-3-8b").unwrap();
        let qwen3 = ModelShape { layers: 36, ffn: 12_288, vocab: 151_936, ..llama };
        for (model, gpu, at, seq, last, measured, tolerance) in [
            ("llama-3-8b", gb200, zero3(4, 32), 2048, Bf16, 30_040.0 / 28_084.0, 0.1),
            // Wrong sign: measured, MXFP8 is faster. With Llama's gain for a token, 0.23 s of this
            // step do not depend on tokens, and have no place in this model.
            ("qwen3-8b", gb200, zero3(4, 16), 2048, Bf16, 26_732.0 / 27_587.0, 0.15),
            ("llama-3-70b", gb300, zero3(64, 2), 8192, Nvfp4, 7296.0 / 4864.0, 0.1),
            ("llama-3-70b", gb200, zero3(64, 2), 8192, Nvfp4, 4864.0 / 3712.0, 0.1),
            ("llama-3.1-405b", gb300, stages(8, 8), 8192, Nvfp4, 1440.0 / 960.0, 0.1),
            ("llama-3.1-405b", gb200, stages(16, 4), 8192, Nvfp4, 1184.0 / 800.0, 0.1),
        ] {
            let shape = ModelShape::known(model).unwrap_or_else(|| qwen3.clone());
            let gpu = gpu();
            let fabric = Fabric::new(gpu.generation, gpu.domain_gpus, gpu.nic_gbps);
            let seconds = |nvfp4| {
                let rules = StepRules { fp8: true, nvfp4, ..StepRules::MODERN };
                let rules = rules.of_compiled_pytorch(gpu.generation);
                step_time(&shape, &at, &gpu, &fabric, &rules, seq).unwrap().seconds
            };
            let found = seconds(None) / seconds(Some(last));
            println!("{model} {}: {found:.3}, measured {measured:.3}", gpu.name);
            let error = (found / measured - 1.0).abs();
            assert!(error < tolerance, "{model} {}: {found}, not {measured}", gpu.name);
            assert!(found > 1.0, "{model} {}: {found}", gpu.name);
        }
    }

    /// PyTorch's factors reproduce the measured ratios of step times.
    #[test]
    fn frameworks_take_as_much_longer_as_measured() {
        let gpu = GpuModel::h200();
        let fabric = Fabric::new(Generation::Hopper, 1, 50.0);
        let ours = StepRules { loss_traffic: (8.0, 6.0), ..StepRules::MODERN };
        let compiled = StepRules { framework: StepRules::PYTORCH, ..ours };
        let eager = StepRules { unfused: StepRules::PYTORCH_UNFUSED, ..compiled };
        let shape = ModelShape::known("llama-1.1b").unwrap();
        let at = Strategy { micro_batch: 8, ..Strategy::SINGLE };
        let seconds =
            |rules: &StepRules| step_time(&shape, &at, &gpu, &fabric, rules, 2048).unwrap().seconds;
        for (rules, ratio) in [(compiled, 1.21), (eager, 1.37)] {
            let found = seconds(&rules) / seconds(&ours);
            assert!((found - ratio).abs() < 0.005, "{found} {ratio}");
        }
    }
}
