//! Fingerprint of a run: everything that determines its numbers.
//!
//! A checkpoint contains the fingerprint of its run. `--resume` compares the fingerprint, field by
//! field, with that of the current settings. Settings that change no number are left out: paths,
//! checkpoint interval and retention, the index of a GPU, the recomputation rule.

use std::collections::BTreeMap;

use deepwell_ir::{Graph, SavedActivations};
use deepwell_plan::schedule::PipelineSchedule;
use deepwell_plan::{OptimizerSpec, Plan};
use deepwell_precision::GuardConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;

mod difference;
mod weights_hash;

pub(crate) use self::difference::short;
use self::difference::to_value;
pub use self::difference::{Difference, differences};
pub use self::weights_hash::{HashedWeights, WeightsHash};
use crate::data::TokenCache;
use crate::{Device, Documents, Engine, Settings};

/// Everything that determines the numbers of a run. Hashes are BLAKE3, of contents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Hash of the captured graph.
    pub model: String,
    /// Hash of the initial weights, or a note that the weights are made from `seed`.
    pub initial_weights: String,
    /// Hash of the tokens of both parts.
    pub data: String,
    /// Hash of the tokenizer.
    pub tokenizer: String,
    /// The precision policy, without changes by guards.
    pub policy: Value,
    /// Thresholds of the guards.
    pub guards: GuardConfig,
    /// `cpu`, `cuda`, or the emulated device.
    pub device: String,
    /// Architecture of the device.
    pub arch: String,
    /// The kernels of each op, with their tiles.
    pub kernels: BTreeMap<String, Vec<String>>,
    /// Seed of initialized weights.
    pub seed: u64,
    /// Seed of the order of the data.
    pub data_seed: u64,
    /// Seed of a perturbation of the initial weights.
    pub perturb_weights_seed: Option<u64>,
    /// Steps of the run.
    pub steps: u64,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Whether documents of a sequence attend to each other.
    #[serde(default, skip_serializing_if = "is_joined")]
    pub documents: Documents,
    /// Sequences of a step.
    pub batch_size: usize,
    /// Sequences per micro-batch.
    pub micro_batch: usize,
    /// Ranks that split the tokens of a step; they determine the order of sums.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub data_ranks: usize,
    /// Context-parallel ranks: attention sums over the keys of each of them.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub context_ranks: usize,
    /// Tensor-parallel ranks: sums over a layer's columns are sums of partial sums.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub tensor_ranks: usize,
    /// Expert-parallel ranks: gradients of experts are sums over the tokens of all these ranks.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub expert_ranks: usize,
    /// Pipeline-parallel ranks. They change no sum, and neither do the four fields below, but the
    /// kernels of each rank depend on its layers.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pipeline_ranks: usize,
    /// Model chunks per stage.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pipeline_chunks: usize,
    /// Pipeline schedule.
    #[serde(default, skip_serializing_if = "is_one_f_one_b")]
    pub pipeline_schedule: PipelineSchedule,
    /// Layers of each stage.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pipeline_layers: Vec<usize>,
    /// ZeRO stage of the data-parallel ranks.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub zero: u8,
    /// Storage of activations between the passes, if it changes the numbers.
    #[serde(default, skip_serializing_if = "SavedActivations::is_exact")]
    pub saved_activations: SavedActivations,
    /// The largest learning rate.
    pub learning_rate: f64,
    /// Warmup steps to the learning rate.
    pub warmup_steps: u64,
    /// Last learning rate over the largest.
    pub final_learning_rate_ratio: f64,
    /// Largest gradient norm.
    pub max_grad_norm: f64,
    /// AdamW's constants.
    pub optimizer: OptimizerSpec,
    /// Steps between two evaluations.
    pub eval_every: u64,
    /// Held-out tokens of the last evaluation, at least.
    pub eval_tokens: u64,
    /// Held-out tokens of each earlier evaluation, at least.
    pub interim_eval_tokens: u64,
}

/// Inputs of a run that are known neither to its engine nor to its settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// Hash of the tokenizer.
    pub tokenizer: Option<String>,
    /// Hash of the loaded weights; none if initialized from the seed.
    pub weights: Option<String>,
}

impl Fingerprint {
    /// The fingerprint of a run that has not begun.
    pub fn of(
        engine: &Engine,
        settings: &Settings,
        tokens: &TokenCache,
        sources: &Sources,
    ) -> Fingerprint {
        let plan = engine.plan();
        let schedule = settings.schedule();
        let unknown = || "not told".to_string();
        Fingerprint {
            model: graph_hash(engine.graph()),
            initial_weights: sources.weights.clone().unwrap_or_else(|| "from seed".to_string()),
            data: tokens.content_hash(),
            tokenizer: sources.tokenizer.clone().unwrap_or_else(unknown),
            policy: without_places(to_value(engine.policy())),
            guards: settings.guards.clone(),
            device: match settings.device {
                Device::Cuda(_) => "cuda".to_string(),
                device => device.to_string(),
            },
            arch: plan.arch.clone(),
            kernels: kernels(plan),
            seed: settings.seed,
            data_seed: settings.data_seed.unwrap_or(settings.seed),
            perturb_weights_seed: settings.perturb_weights_seed,
            steps: settings.steps,
            seq_len: settings.seq_len,
            documents: settings.documents,
            batch_size: settings.batch_size,
            micro_batch: plan.micro_batch,
            data_ranks: plan.parallel.data,
            context_ranks: plan.parallel.context,
            tensor_ranks: plan.parallel.tensor,
            expert_ranks: plan.parallel.expert,
            pipeline_ranks: plan.parallel.pipeline,
            pipeline_chunks: plan.parallel.chunks,
            pipeline_schedule: plan.parallel.schedule,
            pipeline_layers: plan.stages.clone(),
            zero: plan.parallel.zero,
            saved_activations: plan.saved_activations.in_numbers(),
            learning_rate: schedule.peak,
            warmup_steps: schedule.warmup_steps,
            final_learning_rate_ratio: schedule.final_ratio,
            max_grad_norm: settings.max_grad_norm,
            optimizer: settings.optimizer.clone(),
            eval_every: settings.eval_interval(),
            eval_tokens: settings.eval_tokens,
            interim_eval_tokens: settings.interim_eval_tokens(),
        }
    }

    /// As JSON, with every `f32` in the short form of a run file.
    pub fn to_value(&self) -> Value {
        to_value(self)
    }
}

fn is_joined(documents: &Documents) -> bool {
    *documents == Documents::Joined
}

fn is_one_f_one_b(schedule: &PipelineSchedule) -> bool {
    *schedule == PipelineSchedule::OneFOneB
}

fn is_zero(stage: &u8) -> bool {
    *stage == 0
}

fn one() -> usize {
    1
}

fn is_one(count: &usize) -> bool {
    *count == 1
}

/// Hash of a graph without its model's name.
fn graph_hash(graph: &Graph) -> String {
    let unnamed = Graph { name: String::new(), ..graph.clone() };
    let text = serde_json::to_vec(&unnamed).expect("a graph is plain data");
    blake3::hash(&text).to_hex().to_string()
}

fn kernels(plan: &Plan) -> BTreeMap<String, Vec<String>> {
    let mut kernels: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for kernel in &plan.kernels {
        let tile = kernel.tile.as_ref().map(|tile| format!(" {}", to_value(tile)));
        let text = format!("{}{}", kernel.kernel, tile.unwrap_or_default());
        kernels.entry(kernel.op.clone()).or_default().push(text);
    }
    kernels
}

/// A policy without the positions of its rules in a file.
fn without_places(mut policy: Value) -> Value {
    match &mut policy {
        Value::Object(fields) => {
            fields.remove("place");
            fields.values_mut().for_each(|value| *value = without_places(value.take()));
        }
        Value::Array(values) => {
            values.iter_mut().for_each(|value| *value = without_places(value.take()));
        }
        _ => {}
    }
    policy
}
