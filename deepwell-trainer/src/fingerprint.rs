//! What a run is: everything that its numbers follow from.
//!
//! A checkpoint holds the fingerprint of its run. `--resume` compares it, field by field, with that
//! of the settings at hand. What changes no number is not in it: where files lie, how often
//! checkpoints are written and how many stay, the index of a GPU, the rule of recomputation.

use std::collections::BTreeMap;
use std::fmt;

use deepwell_ckpt::json_differences;
use deepwell_ir::Graph;
use deepwell_plan::schedule::PipelineSchedule;
use deepwell_plan::{OptimizerSpec, Plan};
use deepwell_precision::GuardConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::data::TokenCache;
use crate::weights::MasterWeights;
use crate::{Device, Documents, Engine, Settings, TrainError};

/// Everything that the numbers of a run follow from. Hashes are BLAKE3, of contents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Hash of the captured graph.
    pub model: String,
    /// Hash of the weights that the run began with, or that they are made from `seed`.
    pub initial_weights: String,
    /// Hash of the tokens of both parts.
    pub data: String,
    /// Hash of the tokenizer.
    pub tokenizer: String,
    /// The precision policy, as the guards found it.
    pub policy: Value,
    /// Thresholds of the guards.
    pub guards: GuardConfig,
    /// `cpu`, `cuda`, or the emulated device.
    pub device: String,
    /// Architecture of the device.
    pub arch: String,
    /// The kernels of each op, with their tiles.
    pub kernels: BTreeMap<String, Vec<String>>,
    /// Seed of weights that are not loaded.
    pub seed: u64,
    /// Seed of the order of the data.
    pub data_seed: u64,
    /// Seed of a perturbation of the initial weights.
    pub perturb_weights_seed: Option<u64>,
    /// Steps of the run.
    pub steps: u64,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Whether documents of a sequence see each other.
    #[serde(default, skip_serializing_if = "is_joined")]
    pub documents: Documents,
    /// Sequences of a step.
    pub batch_size: usize,
    /// Sequences that run at a time.
    pub micro_batch: usize,
    /// Ranks that split the tokens of a step: the order of sums follows from it.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub data_ranks: usize,
    /// Ranks that split each sequence: attention is a sum over the keys of each of them.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub context_ranks: usize,
    /// Ranks that split each layer: sums over its columns are sums of theirs.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub tensor_ranks: usize,
    /// Ranks that have some of the experts each: their gradients are sums over all their tokens.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub expert_ranks: usize,
    /// Ranks that have some of the layers each. They change no sum, nor do the four below; each
    /// rank has kernels for what it has.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pipeline_ranks: usize,
    /// Chunks of layers that each of them has.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pipeline_chunks: usize,
    /// The order of their passes.
    #[serde(default, skip_serializing_if = "is_one_f_one_b")]
    pub pipeline_schedule: PipelineSchedule,
    /// Layers of each stage.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pipeline_layers: Vec<usize>,
    /// ZeRO stage of the data-parallel ranks.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub zero: u8,
    /// The largest learning rate.
    pub learning_rate: f64,
    /// Steps until it is reached.
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
    /// The same of each evaluation before.
    pub interim_eval_tokens: u64,
}

/// What a run is made from that neither its engine nor its settings tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// Hash of the tokenizer.
    pub tokenizer: Option<String>,
    /// Hash of the weights that were loaded; none where they are made from the seed.
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

    /// As JSON, with every `f32` as short as it is in a run file.
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

/// A field in which two runs differ.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Its name: `optimizer.beta1`.
    pub field: String,
    /// What the run has; none where it has no such field.
    pub was: Option<Value>,
    /// What it would be now.
    pub now: Option<Value>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [was, now] = [&self.was, &self.now].map(|value| short(value.as_ref()));
        write!(f, "{}: the run has {was}, now {now}", self.field)
    }
}

impl Difference {
    /// Whether it is in how ranks share the model.
    pub(crate) fn is_of_ranks(&self) -> bool {
        without_ranks(&self.field).is_some()
    }

    /// Whether it is in something that follows from how ranks share the model: how many sequences
    /// one of them runs at a time, and the kernels for its part of the tensors.
    pub(crate) fn follows_ranks(&self) -> bool {
        self.field == "micro_batch" || self.is_of_kernels()
    }

    /// Whether it is in kernels.
    pub(crate) fn is_of_kernels(&self) -> bool {
        self.field.starts_with("kernels.")
    }
}

/// What a field of the fingerprint has where one rank does it all, if it tells how ranks share the
/// model. Fingerprints leave such values out.
fn without_ranks(field: &str) -> Option<Value> {
    match field.split(['.', '[']).next().unwrap_or_default() {
        "data_ranks" | "context_ranks" | "tensor_ranks" | "expert_ranks" | "pipeline_ranks"
        | "pipeline_chunks" => Some(1.into()),
        "pipeline_schedule" => Some(to_value(&PipelineSchedule::OneFOneB)),
        "pipeline_layers" => Some(Value::Array(Vec::new())),
        "zero" => Some(0.into()),
        _ => None,
    }
}

/// The fields in which a run, by the fingerprint that it was saved with, differs from another.
pub fn differences(was: &Value, now: &Value) -> Vec<Difference> {
    let found = json_differences(was, now).into_iter();
    let known = |field: &str, value: Option<Value>| value.or_else(|| without_ranks(field));
    found
        .map(|place| Difference {
            was: known(&place.path, place.a),
            now: known(&place.path, place.b),
            field: place.path,
        })
        .collect()
}

/// A value for a message: of hashes the first digits.
pub(crate) fn short(value: Option<&Value>) -> String {
    const HASH_DIGITS: usize = 64;
    match value {
        None => "nothing".to_string(),
        Some(Value::String(text))
            if text.len() == HASH_DIGITS && text.bytes().all(|b| b.is_ascii_hexdigit()) =>
        {
            text[..12].to_string()
        }
        Some(value) => value.to_string(),
    }
}

/// The hash of weights, by the names of their tensors: in whichever order, and by whichever ranks
/// they were loaded, those of a model have one.
#[derive(Clone, Debug, Default)]
pub struct WeightsHash {
    tensors: BTreeMap<String, blake3::Hash>,
}

/// Words of 64 bits of the hash of a tensor.
const WORDS: usize = blake3::OUT_LEN / size_of::<u64>();

impl WeightsHash {
    /// The hash of what was written so far.
    pub fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for (name, hash) in &self.tensors {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
            hasher.update(hash.as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// The hashes of these tensors, for another process; zeros for those that were not written.
    pub(crate) fn words(&self, names: &[String]) -> Vec<u64> {
        let of = |name: &String| {
            let hash = self.tensors.get(name).map_or([0; blake3::OUT_LEN], |it| *it.as_bytes());
            bytemuck::cast::<_, [u64; WORDS]>(hash)
        };
        names.iter().flat_map(of).collect()
    }

    /// Takes the hashes of tensors that another process has written.
    pub(crate) fn add_words(&mut self, names: &[String], words: &[u64]) {
        for (name, words) in names.iter().zip(words.as_chunks::<WORDS>().0) {
            if *words != [0; WORDS] {
                let hash = blake3::Hash::from_bytes(bytemuck::cast(*words));
                self.tensors.entry(name.clone()).or_insert(hash);
            }
        }
    }
}

/// Hashes weights while they are loaded, so that nothing is read twice.
pub struct HashedWeights<'a> {
    target: &'a mut dyn MasterWeights,
    hash: WeightsHash,
    makes_copies: bool,
}

impl<'a> HashedWeights<'a> {
    /// Weights on their way to `target`.
    pub fn new(target: &'a mut dyn MasterWeights) -> HashedWeights<'a> {
        HashedWeights { target, hash: WeightsHash::default(), makes_copies: true }
    }

    /// Goes on from the weights of other ranks.
    #[must_use]
    pub fn behind(self, hash: WeightsHash) -> HashedWeights<'a> {
        HashedWeights { hash, ..self }
    }

    /// What was hashed, for the next rank.
    pub fn into_hash(self) -> WeightsHash {
        self.hash
    }

    /// Leaves the compute copies to whoever makes them on all ranks.
    #[must_use]
    pub fn without_copies(self) -> HashedWeights<'a> {
        HashedWeights { makes_copies: false, ..self }
    }

    /// The hash of what was written.
    pub fn hash(&self) -> String {
        self.hash.hash()
    }
}

impl MasterWeights for HashedWeights<'_> {
    fn program(&self) -> &deepwell_ir::Program {
        self.target.program()
    }

    fn write_master(&mut self, id: deepwell_ir::ValueId, bytes: &[u8]) -> Result<(), TrainError> {
        // A value is called otherwise where a rank gathers it.
        let program = self.target.program();
        let state = program.parameters.iter().find(|state| state.master == id);
        let name = state.map_or_else(|| &program.value(id).name, |state| &state.name);
        if !self.hash.tensors.contains_key(name) {
            self.hash.tensors.insert(name.clone(), blake3::hash(bytes));
        }
        self.target.write_master(id, bytes)
    }

    fn refresh_copies(&mut self) -> Result<(), TrainError> {
        if self.makes_copies { self.target.refresh_copies() } else { Ok(()) }
    }
}

/// Hash of a graph, whatever the name that its model was given by.
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

/// Through text, which has an `f32` in its own digits and not in those of an `f64`.
fn to_value(data: &impl Serialize) -> Value {
    let text = serde_json::to_string(data).expect("settings, plans and policies are plain data");
    serde_json::from_str(&text).expect("it was just written")
}

/// A policy without the places of its rules in a file.
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
