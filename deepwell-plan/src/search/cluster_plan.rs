//! A plan for a cluster with everything that a reader of it wants to know, as data.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Found, Machines, RankMap, SearchRequest, warnings};
use crate::memory::{PhaseMemory, StageLayers, StageMemory, stage_memory, stage_memory_estimate};
use crate::schedule::{PipelineRun, orders, simulate};
use crate::step_time::{StepTime, stage_times};
use crate::{ModelShape, PlanError, ProgramBytes, Strategy};

/// Passes of a pipeline that are simulated op by op, at most.
const PASSES_MAX: usize = 2_000_000;

/// What one stage of the pipeline holds and needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StagePlan {
    /// The stage, from 0.
    pub stage: usize,
    /// Its ranks.
    pub ranks: Range<usize>,
    /// The nodes that they are in.
    pub nodes: Range<usize>,
    /// Its layers.
    pub layers: StageLayers,
    /// Share of the pipeline's time in which it computes nothing; none where the pipeline is too
    /// long to be simulated.
    pub idle: Option<f64>,
    /// Memory of one of its ranks by what holds it.
    pub memory: StageMemory,
    /// And by phase.
    pub phases: [PhaseMemory; 4],
}

/// What a whole run takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunCost {
    /// Tokens of the run.
    pub tokens: f64,
    /// Hours.
    pub hours: f64,
    /// Hours of all GPUs together.
    pub gpu_hours: f64,
    /// Their price, where a price is known.
    pub cost: Option<f64>,
}

/// A plan for a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterPlan {
    /// The model.
    pub model: ModelShape,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Sequences of a step.
    pub global_batch: usize,
    /// Whether linear layers run in MXFP8.
    pub fp8: bool,
    /// GPUs and networks.
    pub machines: Machines,
    /// How the model is divided.
    pub strategy: Strategy,
    /// Seconds of a step and of its parts.
    pub step: StepTime,
    /// Tokens a second of all GPUs.
    pub tokens_per_s: f64,
    /// The model's own FLOPs over the peak of the precision, 0 to 1.
    pub mfu: f64,
    /// Rows of the busiest expert rank over the mean, as the step's time takes it.
    #[serde(default = "balanced")]
    pub expert_imbalance: f64,
    /// Limits the pairs of an expert to so many times the even share. Without a limit no pair is
    /// dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// Bytes of a GPU that may be used.
    pub memory_limit_bytes: f64,
    /// Each stage.
    pub stages: Vec<StagePlan>,
    /// Groups of ranks.
    pub ranks: RankMap,
    /// The whole run, where its tokens are known.
    pub run: Option<RunCost>,
    /// Why the trainer does not run it yet; none if it is within the trainer's rules.
    pub not_run_yet: Option<String>,
    /// Whether its programs were lowered and fit: the trainer runs such a plan.
    #[serde(default)]
    pub is_lowered: bool,
    /// The best plan that the trainer does not run, where this one was taken before it, and the
    /// seconds of its step as the closed form predicts them.
    #[serde(default)]
    pub faster: Option<(Strategy, f64)>,
    /// What to look at.
    pub warnings: Vec<String>,
}

fn balanced() -> f64 {
    1.0
}

impl ClusterPlan {
    /// The best plan of a search, for a run of `tokens` tokens.
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
        let peak = if request.fp8 { gpu.fp8_flops } else { gpu.bf16_flops };
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
            strategy: at,
            mfu: flops / step.seconds / gpus / peak,
            tokens_per_s,
            expert_imbalance: request.expert_imbalance,
            capacity_factor: request.capacity_factor,
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

    /// Takes the memory of programs, by stage, for that of the closed form.
    pub fn take_programs(&mut self, needed: &[ProgramBytes]) {
        for (stage, bytes) in self.stages.iter_mut().zip(needed) {
            stage.memory = bytes.of_stage(&stage.memory);
            stage.phases = stage.memory.phases();
        }
    }

    /// Bytes of a GPU on the stage that needs most.
    pub fn memory_bytes(&self) -> f64 {
        self.stages.iter().map(|stage| stage.memory.device()).fold(0.0, f64::max)
    }

    /// The stage that needs most of a GPU.
    pub fn fullest_stage(&self) -> Option<&StagePlan> {
        self.stages.iter().max_by(|a, b| a.memory.device().total_cmp(&b.memory.device()))
    }
}

/// The simulated pipeline of a strategy; none where it is too long.
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
