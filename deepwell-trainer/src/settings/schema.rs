//! The settings of a training run, and their defaults.

use std::path::PathBuf;

use deepwell_ir::{Recompute, SavedActivations};
use deepwell_kernels::cuda::Architecture;
use deepwell_moe::RouterTraining;
use deepwell_plan::schedule::PipelineSchedule;
use deepwell_plan::{OptimizerSpec, Parallel};
use deepwell_precision::{Fallback, GuardConfig};
use serde::{Deserialize, Serialize};

use crate::plan_file::PlanLink;
use crate::{Device, Documents, LearningRateSchedule};

/// Default number of held-out tokens of an evaluation.
///
/// Sufficient for a curve. A comparison needs more, see [`PARITY_EVAL_TOKENS`].
const EVAL_TOKENS: u64 = 131_072;

/// Default number of held-out tokens of a comparison's last evaluation.
///
/// A comparison needs an error from the choice of tokens below 0.05 % of the loss. On an H200
/// parity-3m had up to 0.096 % with 131,072 tokens; the error falls with the root of the number of
/// tokens, and 483,000 would be just enough.
pub const PARITY_EVAL_TOKENS: u64 = 655_360;

/// Earlier evaluations of a comparison read one in this number of tokens, so that on a CPU all
/// evaluations together take no longer than training.
pub const PARITY_INTERIM_PART: u64 = 20;

/// Settings of a run. Each has a default; a run file lists the differences.
///
/// ```
/// let settings = deepwell_trainer::Settings::from_toml("steps = 50\nseed = 7\n", "run.toml")?;
/// assert_eq!((settings.steps, settings.seq_len), (50, 128));
///
/// let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/run.toml");
/// let settings = deepwell_trainer::Settings::from_file(path.as_ref())?;
/// assert_eq!((settings.steps, settings.learning_rate), (2000, Some(3e-4)));
/// # Ok::<(), deepwell_trainer::TrainError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Plan file printed by `deepwell plan MODEL --json`; the other settings must agree with the
    /// plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanLink>,
    /// A preset, a `config.json` or a model folder.
    pub model: String,
    /// Whether parameters exported with `requires_grad = false` are trained like any other;
    /// otherwise a model with such parameters is rejected.
    pub train_frozen: bool,
    /// Files and folders of text or of records, or token files; none takes the default corpus.
    pub data: Vec<PathBuf>,
    /// Inputs to evaluate on, in the forms of `data`; none holds out a share of `data`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub eval_data: Vec<PathBuf>,
    /// Field of a record with its text or messages; by default the first of `text`, `content`,
    /// `messages` and `conversations`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_field: Option<String>,
    /// A Hugging Face `tokenizer.json`, or `bytes`. The default is the file in the folder of the
    /// model's `config.json`, and bytes for a model with fresh weights and no tokenizer.
    pub tokenizer: Option<PathBuf>,
    /// Whether the documents in a sequence attend to each other, `joined` or `masked`.
    #[serde(skip_serializing_if = "is_joined")]
    pub documents: Documents,
    /// Folder of the token cache.
    pub cache_dir: PathBuf,
    /// Output folder for checkpoints and metrics.
    pub out: PathBuf,
    /// `cpu`, `cuda:N`, or `emulated:sm90` and other architectures.
    pub device: Device,
    /// Number of ranks, each on its own `device`; ranks on a CPU share it.
    #[serde(skip_serializing_if = "is_one")]
    pub ranks: usize,
    /// ZeRO stage: 0 off, 1 shards the optimizer state, 2 also gradients, 3 also weights.
    #[serde(skip_serializing_if = "is_zero")]
    pub zero: u8,
    /// Ranks that split each layer; `ranks` is a multiple of `tensor` times `pipeline`.
    #[serde(skip_serializing_if = "is_one")]
    pub tensor: usize,
    /// Ranks that split each sequence; each group of this many ranks has its own sequences.
    #[serde(skip_serializing_if = "is_one")]
    pub context: usize,
    /// Number of pipeline stages, each with a part of the layers.
    #[serde(skip_serializing_if = "is_one")]
    pub pipeline: usize,
    /// Model chunks per pipeline stage: with more than one the schedule is interleaved 1F1B.
    pub chunks: usize,
    /// Order of the passes of the pipeline stages.
    #[serde(skip_serializing_if = "is_one_f_one_b")]
    pub pipeline_schedule: PipelineSchedule,
    /// Layers of each pipeline stage; none balances the stages by FLOPs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pp_layers: Option<Vec<usize>>,
    /// Seconds that a rank waits for another: longer than a whole step, and than the skew between
    /// two ranks at a collective.
    #[serde(skip_serializing_if = "is_rank_timeout")]
    pub rank_timeout_s: u64,
    /// Expert-parallel ranks, each with a part of the experts.
    #[serde(skip_serializing_if = "is_one")]
    pub expert: usize,
    /// Name of a precision preset, or [`Settings::AUTO`].
    pub precision: String,
    /// A policy file; takes the place of `precision`.
    pub policy: Option<PathBuf>,
    /// Whether to train if the device supports no quantization of the precision.
    #[serde(skip_serializing_if = "is_false")]
    pub allow_fallback: bool,
    /// Reaction of guards to GEMMs that offend; none leaves it to the policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
    /// Steps of the run.
    pub steps: u64,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Sequences per step.
    pub batch_size: usize,
    /// Sequences per micro-batch; none lets the planner choose.
    pub micro_batch: Option<usize>,
    /// Recomputation in the backward pass; none lets the planner choose.
    pub recompute: Option<Recompute>,
    /// Storage of activations between the forward and the backward pass: `exact`, `once` or
    /// `mxfp8`.
    #[serde(skip_serializing_if = "SavedActivations::is_exact")]
    pub saved_activations: SavedActivations,
    /// Memory of each device that the planner may use, in bytes; none takes 98 % of what is free.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
    /// Seed of the initial weights.
    pub seed: u64,
    /// Seed of the order of the data; none takes `seed`.
    pub data_seed: Option<u64>,
    /// Seed of random bits that decide for each initial weight whether its last bit is flipped: a
    /// run from such weights differs from the unperturbed run only by chaos. None flips no bits.
    pub perturb_weights_seed: Option<u64>,
    /// Largest learning rate; the default depends on the size of the model, see
    /// [`Settings::default_learning_rate`].
    pub learning_rate: Option<f64>,
    /// Warmup steps; the default is a tenth of the run, but at least 100 steps, and at most a third
    /// of the run.
    pub warmup_steps: Option<u64>,
    /// Last learning rate over the largest.
    pub final_learning_rate_ratio: f64,
    /// Largest gradient norm; larger gradients are scaled down to it.
    pub max_grad_norm: f64,
    /// AdamW's constants.
    pub optimizer: OptimizerSpec,
    /// Auxiliary losses of routers, and how many tokens experts take.
    #[serde(skip_serializing_if = "is_default")]
    pub router: RouterTraining,
    /// Steps between two evaluations; none takes a tenth of the run.
    pub eval_every: Option<u64>,
    /// Held-out tokens of the last evaluation, at least.
    pub eval_tokens: u64,
    /// Whether a held-out part with fewer tokens is an error even if `eval_tokens` is the default.
    /// If not, each evaluation then reads the whole held-out part.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub needs_eval_tokens: bool,
    /// Held-out tokens of each earlier evaluation, at least; `None` takes `eval_tokens`.
    pub interim_eval_tokens: Option<u64>,
    /// Steps between two checkpoints; none takes a fifth of the run.
    pub checkpoint_every: Option<u64>,
    /// Whether no checkpoints are written, as in a run for measurements only: it cannot be resumed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub no_checkpoints: bool,
    /// Number of checkpoints to keep.
    pub keep_last: usize,
    /// Whether checkpoints are written from a copy while training continues, even if the host sees
    /// the device's memory: shorter stalls for more memory. GPUs always use a copy.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub async_checkpoints: bool,
    /// Whether the first step is checked call by call against slow definitions.
    pub audit: bool,
    /// Thresholds of the guards, and how long a GEMM stays in fallback.
    pub guards: GuardConfig,
}

fn is_default(router: &RouterTraining) -> bool {
    *router == RouterTraining::default()
}

fn is_joined(documents: &Documents) -> bool {
    *documents == Documents::Joined
}

fn is_false(is: &bool) -> bool {
    !is
}

fn is_one(count: &usize) -> bool {
    *count == 1
}

fn is_one_f_one_b(schedule: &PipelineSchedule) -> bool {
    *schedule == PipelineSchedule::OneFOneB
}

fn is_rank_timeout(seconds: &u64) -> bool {
    *seconds == Settings::RANK_TIMEOUT_S
}

fn is_zero(stage: &u8) -> bool {
    *stage == 0
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            plan: None,
            model: "parity-3m".to_string(),
            train_frozen: false,
            data: Vec::new(),
            eval_data: Vec::new(),
            text_field: None,
            tokenizer: None,
            documents: Documents::Joined,
            cache_dir: PathBuf::from("target/deepwell-cache"),
            out: PathBuf::from("target/deepwell-run"),
            device: Device::Cpu,
            ranks: 1,
            zero: 0,
            tensor: 1,
            context: 1,
            pipeline: 1,
            chunks: 1,
            pipeline_schedule: PipelineSchedule::OneFOneB,
            pp_layers: None,
            rank_timeout_s: Settings::RANK_TIMEOUT_S,
            expert: 1,
            precision: Settings::AUTO.to_string(),
            policy: None,
            allow_fallback: false,
            fallback: None,
            steps: 1000,
            seq_len: 128,
            batch_size: 8,
            micro_batch: None,
            recompute: None,
            saved_activations: SavedActivations::Exact,
            memory_limit_bytes: None,
            seed: 0,
            data_seed: None,
            perturb_weights_seed: None,
            learning_rate: None,
            warmup_steps: None,
            final_learning_rate_ratio: 0.1,
            max_grad_norm: 1.0,
            optimizer: OptimizerSpec::default(),
            router: RouterTraining::default(),
            eval_every: None,
            eval_tokens: EVAL_TOKENS,
            needs_eval_tokens: false,
            interim_eval_tokens: None,
            checkpoint_every: None,
            no_checkpoints: false,
            keep_last: 2,
            async_checkpoints: false,
            audit: false,
            guards: GuardConfig::default(),
        }
    }
}

impl Settings {
    /// The precision chosen by the device: `mxfp8-128` on Hopper, whose tensor cores do not apply
    /// block scales and therefore need few of them, `mxfp8` elsewhere. On a GPU each linear layer
    /// takes the format with the least predicted time: BF16, MXFP8 or, on Blackwell, NVFP4.
    pub const AUTO: &str = "auto";

    /// Default seconds that a rank waits for another: a whole step of the largest model that trains
    /// on a CPU, with a margin.
    pub const RANK_TIMEOUT_S: u64 = 1800;

    /// Returns the default of the largest learning rate for the given number of parameters.
    ///
    /// For models of 3 and of 134 million parameters this is the rate with which BF16 reached the
    /// lowest held-out loss after 1000 steps, in the sweeps of
    /// `benchmarks/learning_rates_2026-11-22.md`. Rates of larger models have not been swept: they
    /// are those of GPT-3 (Brown et al., arXiv 2005.14165, table 2.1), for batches of half a
    /// million tokens and more.
    ///
    /// ```
    /// use deepwell_trainer::Settings;
    /// assert_eq!(Settings::default_learning_rate(3_082_496), 7e-4);
    /// assert_eq!(Settings::default_learning_rate(134_000_000), 1.2e-3);
    /// assert_eq!(Settings::default_learning_rate(1_100_048_384), 2e-4);
    /// ```
    pub fn default_learning_rate(parameters: u64) -> f64 {
        match parameters {
            0..30_000_000 => 7e-4,
            30_000_000..300_000_000 => 1.2e-3,
            300_000_000..540_000_000 => 3e-4,
            540_000_000..1_000_000_000 => 2.5e-4,
            1_000_000_000..2_000_000_000 => 2e-4,
            2_000_000_000..4_500_000_000 => 1.6e-4,
            _ => 1.2e-4,
        }
    }

    /// Sets the learning rate for the given number of parameters if none is set.
    pub fn resolve_learning_rate(&mut self, parameters: u64) {
        let rate = Settings::default_learning_rate(parameters);
        self.learning_rate.get_or_insert(rate);
    }

    /// The preset of [`Settings::AUTO`] on a target of this architecture.
    ///
    /// ```
    /// use deepwell_trainer::Settings;
    /// assert_eq!(Settings::auto_precision("hopper-sm90"), "mxfp8-128");
    /// assert_eq!(Settings::auto_precision("cpu"), "mxfp8");
    /// ```
    pub fn auto_precision(arch: &str) -> &'static str {
        Settings::auto_presets(arch)[0]
    }

    /// The presets that [`Settings::AUTO`] chooses between, layer by layer, on a GPU of this
    /// architecture: those that its tensor cores multiply in.
    ///
    /// ```
    /// use deepwell_trainer::Settings;
    /// assert_eq!(Settings::auto_presets("blackwell-sm100"), ["mxfp8", "nvfp4"]);
    /// assert_eq!(Settings::auto_presets("hopper-sm90"), ["mxfp8-128"]);
    /// ```
    pub fn auto_presets(arch: &str) -> &'static [&'static str] {
        match Architecture::ALL.into_iter().find(|known| known.target_name() == arch) {
            Some(Architecture::Sm90a) => &["mxfp8-128"],
            Some(Architecture::Sm100a | Architecture::Sm103a | Architecture::Sm120a) => {
                &["mxfp8", "nvfp4"]
            }
            _ => &["mxfp8"],
        }
    }

    /// Parallelism of the run.
    pub fn parallel(&self) -> Parallel {
        let Settings { zero, tensor, pipeline, chunks, expert, pipeline_schedule, .. } = *self;
        let data = self.ranks / (tensor * pipeline).max(1);
        let (context, schedule) = (self.context, pipeline_schedule);
        Parallel {
            context,
            zero,
            tensor,
            pipeline,
            chunks,
            expert,
            schedule,
            ..Parallel::data(data)
        }
    }

    /// The learning rate over the run.
    pub fn schedule(&self) -> LearningRateSchedule {
        let default_warmup_steps = (self.steps / 10).max(100).min(self.steps / 3);
        LearningRateSchedule {
            peak: self.learning_rate.unwrap_or(Settings::default_learning_rate(0)),
            warmup_steps: self.warmup_steps.unwrap_or(default_warmup_steps),
            steps: self.steps,
            final_ratio: self.final_learning_rate_ratio,
        }
    }

    /// Steps between two evaluations.
    pub fn eval_interval(&self) -> u64 {
        self.eval_every.unwrap_or(self.steps / 10).max(1)
    }

    /// Minimum number of held-out tokens of an evaluation before the last one.
    pub fn interim_eval_tokens(&self) -> u64 {
        self.interim_eval_tokens.unwrap_or(self.eval_tokens)
    }

    /// Whether an evaluation reads the whole held-out part if it is small: the number of tokens is
    /// the default, and was not requested.
    pub(crate) fn takes_what_is_there(&self) -> bool {
        !self.needs_eval_tokens
            && self.eval_tokens == EVAL_TOKENS
            && self.interim_eval_tokens.is_none()
    }

    /// Steps between two checkpoints.
    pub fn checkpoint_interval(&self) -> u64 {
        self.checkpoint_every.unwrap_or(self.steps / 5).max(1)
    }
}
