//! A plan for a cluster, with all details, as data.

use std::ops::Range;

use deepwell_ir::ops::MomentFormat;
use serde::{Deserialize, Serialize};

use super::{Found, Machines, PrecisionTime, RankMap, SearchRequest, warnings};
use crate::memory::{PhaseMemory, StageLayers, StageMemory, stage_memory, stage_memory_estimate};
use crate::step_time::{StepTime, stage_times};
use crate::{ModelShape, ProgramBytes, Strategy};
use deepwell_lower::PlanError;
use deepwell_lower::schedule::{PipelineRun, orders, simulate};

/// Largest number of pipeline passes simulated op by op.
const PASSES_MAX: usize = 2_000_000;

/// Placement and memory of a pipeline stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StagePlan {
    /// The stage, from 0.
    pub stage: usize,
    /// Ranks of the stage.
    pub ranks: Range<usize>,
    /// Nodes of the ranks.
    pub nodes: Range<usize>,
    /// Layers of the stage.
    pub layers: StageLayers,
    /// Idle share of the pipeline's time; `None` if the pipeline is too long for a simulation.
    pub idle: Option<f64>,
    /// Memory of a rank, by use.
    pub memory: StageMemory,
    /// Memory of a rank, by phase.
    pub phases: [PhaseMemory; 4],
}

/// Time and cost of a whole run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunCost {
    /// Tokens of the run.
    pub tokens: f64,
    /// Hours.
    pub hours: f64,
    /// GPU hours.
    pub gpu_hours: f64,
    /// Price of the GPU hours, if known.
    pub cost: Option<f64>,
}

/// A plan for a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterPlan {
    /// The model.
    pub model: ModelShape,
    /// Tokens per sequence.
    pub seq: usize,
    /// Sequences per step.
    pub global_batch: usize,
    /// Whether linear layers run in MXFP8.
    pub fp8: bool,
    /// Whether linear layers run in NVFP4, but for the last layers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub nvfp4: bool,
    /// Times of a step in each precision, if the fastest was taken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub precisions: Vec<PrecisionTime>,
    /// GPUs and networks.
    pub machines: Machines,
    /// Degrees of parallelism and other choices.
    pub strategy: Strategy,
    /// Step time and its components.
    pub step: StepTime,
    /// Tokens per second of all GPUs.
    pub tokens_per_s: f64,
    /// MFU: model FLOPs relative to the peak of the precision, 0 to 1.
    pub mfu: f64,
    /// Rows of the busiest expert rank over the mean, as used in the step time.
    #[serde(default = "balanced")]
    pub expert_imbalance: f64,
    /// Expert capacity as a multiple of an even share. Without a limit no pair is dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// Storage of the moments of AdamW.
    #[serde(default, skip_serializing_if = "MomentFormat::is_fp32")]
    pub moments: MomentFormat,
    /// Usable bytes of a GPU.
    pub memory_limit_bytes: f64,
    /// All stages.
    pub stages: Vec<StagePlan>,
    /// Groups of ranks.
    pub ranks: RankMap,
    /// The whole run, if its tokens are known.
    pub run: Option<RunCost>,
    /// Why the trainer does not run the plan yet; `None` if the plan is within the trainer's rules.
    pub not_run_yet: Option<String>,
    /// Whether the programs were lowered and fit: the trainer runs such a plan.
    #[serde(default)]
    pub is_lowered: bool,
    /// The fastest plan, if unsupported by the trainer and this plan was taken instead, with
    /// seconds per step by the closed form.
    #[serde(default)]
    pub faster: Option<(Strategy, f64)>,
    /// Warnings with remedies.
    pub warnings: Vec<String>,
}

fn balanced() -> f64 {
    1.0
}

impl ClusterPlan {
    /// The best plan of a search, for a run over `tokens` tokens.
    ///
    /// # Errors
    /// As [`super::search`].
    pub fn new(
        request: &SearchRequest,
        found: &Found,
        tokens: Option<f64>,
    ) -> Result<ClusterPlan, PlanError> {
        let at = found.best.at;
        let step = found.step.clone();
        let tokens_per_s = request.tokens() / step.seconds;
        let gpus = at.gpus() as f64;
        let gpu = &request.machines.gpu;
        let peak = match (request.nvfp4, request.fp8) {
            (true, _) => gpu.nvfp4_flops,
            (false, true) => gpu.fp8_flops,
            (false, false) => gpu.bf16_flops,
        };
        let flops = request.shape.model_flops(request.tokens(), request.seq);
        let run = tokens.map(|tokens| {
            let hours = tokens / tokens_per_s / 3600.0;
            let gpu_hours = hours * gpus;
            let cost = request.machines.price_per_gpu_hour.map(|price| price * gpu_hours);
            RunCost { tokens, hours, gpu_hours, cost }
        });
        Ok(ClusterPlan {
            model: request.shape.clone(),
            seq: request.seq,
            global_batch: request.global_batch,
            fp8: request.fp8,
            nvfp4: request.nvfp4,
            precisions: Vec::new(),
            strategy: at,
            mfu: flops / step.seconds / gpus / peak,
            tokens_per_s,
            expert_imbalance: request.expert_imbalance,
            capacity_factor: request.capacity_factor,
            moments: request.moments,
            memory_limit_bytes: request.memory_limit_bytes(),
            stages: stages(request, &at)?,
            ranks: RankMap::new(&at, &request.machines),
            run,
            faster: found.faster.as_ref().map(|other| (other.at, other.seconds)),
            not_run_yet: at.parallel().err().map(|error| error.to_string()),
            is_lowered: false,
            warnings: warnings::of(request, found),
            machines: request.machines.clone(),
            step,
        })
    }

    /// Replaces the memory of the closed form by the memory of lowered programs, by stage.
    pub fn take_programs(&mut self, needed: &[ProgramBytes]) {
        for (stage, bytes) in self.stages.iter_mut().zip(needed) {
            stage.memory = bytes.of_stage(&stage.memory);
            stage.phases = stage.memory.phases();
        }
    }

    /// Bytes of a GPU on the fullest stage.
    pub fn memory_bytes(&self) -> f64 {
        self.stages.iter().map(|stage| stage.memory.device()).fold(0.0, f64::max)
    }

    /// The stage with the most bytes of a GPU.
    pub fn fullest_stage(&self) -> Option<&StagePlan> {
        self.stages.iter().max_by(|a, b| a.memory.device().total_cmp(&b.memory.device()))
    }
}

/// The simulated pipeline of a strategy; `None` if the pipeline is too long.
pub(super) fn pipeline(
    request: &SearchRequest,
    at: &Strategy,
) -> Result<Option<PipelineRun>, PlanError> {
    if at.pp * at.vpp * at.micro_batches > PASSES_MAX {
        return Ok(None);
    }
    let orders = orders(at.schedule, at.pp, at.micro_batches, at.vpp)?;
    let (gpu, fabric) = request.machines.parts();
    let rules = request.step_rules();
    let times = stage_times(&request.shape, at, gpu, fabric, &rules, request.seq);
    simulate(&orders, at.vpp, &times).map(Some)
}

fn stages(request: &SearchRequest, at: &Strategy) -> Result<Vec<StagePlan>, PlanError> {
    let run = pipeline(request, at)?;
    let orders = match &run {
        Some(_) => orders(at.schedule, at.pp, at.micro_batches, at.vpp)?,
        None => Vec::new(),
    };
    let ranks = at.gpus() / at.pp;
    let node = request.machines.node_gpus.max(1);
    let of_stage = |stage: usize| {
        let layers = StageLayers::of(&request.shape, at, stage);
        let rules = request.memory_rules();
        let (shape, seq) = (&request.shape, request.seq);
        let memory = match orders.get(stage) {
            Some(order) => stage_memory(shape, at, &rules, seq, &layers, order),
            None => stage_memory_estimate(shape, at, &rules, seq, stage),
        };
        let memory = StageMemory { outside: request.outside_bytes_among(at.gpus()), ..memory };
        let own = stage * ranks..(stage + 1) * ranks;
        let idle = run.as_ref().map(|run| 1.0 - run.busy(stage) / run.makespan());
        StagePlan {
            stage,
            nodes: own.start / node..own.end.div_ceil(node),
            ranks: own,
            layers,
            idle,
            memory,
            phases: memory.phases(),
        }
    };
    Ok((0..at.pp).map(of_stage).collect())
}
