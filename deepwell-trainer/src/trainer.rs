//! A trainer: an engine, tokens and settings, with the logs and report of a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use deepwell_precision::GuardEvent;
use serde::{Deserialize, Serialize};

use crate::audit::AuditReport;
use crate::data::TokenCache;
use crate::fingerprint::{Fingerprint, Sources};
use crate::fit::Fit;
use crate::metrics::StepLine;
use crate::metrics::nonfinite::option as number;
use crate::rank_times::RankTime;
use crate::run_folder::{Opened, RunFolder, Start};
use crate::{Engine, ExpertLoad, ExpertRows, Settings, TrainError};

/// One line of `metrics.jsonl`. `None` means not measured; a measured number that is not finite is
/// stored as the string `"NaN"`, `"inf"` or `"-inf"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Steps done.
    pub step: u64,
    /// Mean training loss of the step, nats per token.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub loss: Option<f64>,
    /// Global gradient norm before clipping.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub grad_norm: Option<f64>,
    /// Learning rate of the step.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub learning_rate: Option<f64>,
    /// Tokens per second of the step.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub tokens_per_s: Option<f64>,
    /// Predicted time of the step over its measured time.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub speed_of_light: Option<f64>,
    /// Held-out loss, nats per token.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub val_loss: Option<f64>,
    /// `exp(val_loss)`.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub val_ppl: Option<f64>,
    /// Number of held-out tokens predicted by the evaluation.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_tokens: Option<u64>,
    /// Action of a guard after the step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub guard: Option<GuardEvent>,
    /// Busy and waiting time of each rank; empty for a single rank, and for GPUs.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub ranks: Vec<RankTime>,
    /// Distribution of the step's tokens over experts, by layer.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub experts: Vec<ExpertRecord>,
    /// Whether the update was skipped because the gradient norm was not finite.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub skipped: bool,
}

/// The load of a layer's experts in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertRecord {
    /// The counts.
    #[serde(flatten)]
    pub load: ExpertLoad,
    /// Number of experts that no token chose.
    pub dead: usize,
    /// Entropy of the load over the entropy of a uniform load, 0 to 1.
    pub entropy: f64,
    /// The largest load over the mean.
    pub largest_over_mean: f64,
}

impl From<&ExpertLoad> for ExpertRecord {
    fn from(load: &ExpertLoad) -> ExpertRecord {
        let (dead, entropy) = (load.dead(), load.entropy());
        let largest_over_mean = load.largest_over_mean();
        ExpertRecord { load: load.clone(), dead, entropy, largest_over_mean }
    }
}

impl Record {
    /// A line with only its step.
    pub(crate) fn at(step: u64) -> Record {
        Record {
            step,
            loss: None,
            grad_norm: None,
            learning_rate: None,
            tokens_per_s: None,
            speed_of_light: None,
            val_loss: None,
            val_ppl: None,
            val_tokens: None,
            guard: None,
            ranks: Vec::new(),
            experts: Vec::new(),
            skipped: false,
        }
    }
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FitReport {
    /// Steps done.
    pub step: u64,
    /// Whether the run stopped on request before its last step.
    pub interrupted: bool,
    /// Step after which the run was resumed.
    pub resumed_after: Option<u64>,
    /// Median tokens per second of the steps of this process, without evaluation and checkpoints.
    pub tokens_per_s: f64,
    /// Stall of the training for each checkpoint, in seconds.
    #[serde(default)]
    pub checkpoint_stalls_s: Vec<f64>,
    /// The median of the last steps of each rank; empty as in [`Record::ranks`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankTime>,
    /// Fullest use of the buffers of each layer's experts in the steps of this process, on the
    /// reporting rank; empty without experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_rows: Vec<ExpertRows>,
    /// Findings of the audit of the first step, if requested.
    pub audit: Option<AuditReport>,
    /// Held-out losses after the last step, batch by batch; empty if a loss is not finite or the
    /// run is incomplete.
    #[serde(default)]
    pub heldout_losses: Vec<f64>,
}

/// Receives the progress of a run.
pub trait Progress {
    /// A step is done.
    fn step(&mut self, line: &StepLine);
    /// An evaluation is done.
    fn evaluation(&mut self, step: u64, val_loss: f64);
    /// A remark for the user.
    fn note(&mut self, text: &str);
}

/// Ignores progress.
impl Progress for () {
    fn step(&mut self, _line: &StepLine) {}
    fn evaluation(&mut self, _step: u64, _val_loss: f64) {}
    fn note(&mut self, _text: &str) {}
}

/// Trains an engine on tokens.
pub struct Trainer {
    engine: Engine,
    settings: Settings,
    tokens: Arc<TokenCache>,
    stop: Arc<AtomicBool>,
    sources: Sources,
    start: Start,
    folder: Option<RunFolder>,
}

impl Trainer {
    /// A trainer of an initialized engine. [`Trainer::fit`] starts at the first step.
    pub fn from_engine(engine: Engine, settings: Settings, tokens: Arc<TokenCache>) -> Trainer {
        let stop = Arc::new(AtomicBool::new(false));
        Trainer {
            engine,
            settings,
            tokens,
            stop,
            sources: Sources::default(),
            start: Start::New,
            folder: None,
        }
    }

    /// Sets how the run starts in its output folder. The default is [`Start::New`].
    #[must_use]
    pub fn starting(mut self, start: Start) -> Trainer {
        self.start = start;
        self
    }

    /// Trains in a folder that is already claimed; otherwise [`Trainer::fit`] claims one.
    #[must_use]
    pub fn in_folder(mut self, folder: RunFolder) -> Trainer {
        self.folder = Some(folder);
        self
    }

    /// Sets the sources of the run, for its fingerprint.
    #[must_use]
    pub fn made_from(mut self, sources: Sources) -> Trainer {
        self.sources = sources;
        self
    }

    /// Stops with a checkpoint after the step during which `stop` becomes true.
    #[must_use]
    pub fn stopping_on(mut self, stop: Arc<AtomicBool>) -> Trainer {
        self.stop = stop;
        self
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The engine, for use between runs.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Path of the metrics.
    pub fn metrics_path(out: &Path) -> PathBuf {
        out.join("metrics.jsonl")
    }

    /// Folder of the checkpoints.
    pub fn checkpoints_path(out: &Path) -> PathBuf {
        out.join("checkpoints")
    }

    /// Trains to the last step, or until stopped.
    ///
    /// # Errors
    /// Data, disk or guards stop the run, or the folder belongs to another run. Checkpoints written
    /// so far are kept.
    pub fn fit(&mut self, progress: &mut dyn Progress) -> Result<FitReport, TrainError> {
        let opened = self.begin(progress)?;
        let run = Fit::begin(&mut self.engine, &self.settings, &self.tokens, opened, progress)?;
        run.run_to_end(&self.stop)
    }

    /// Claims the output folder, and finds the checkpoint to resume from.
    fn begin(&mut self, progress: &mut dyn Progress) -> Result<Opened, TrainError> {
        let folder = match self.folder.take() {
            Some(folder) => folder,
            None => RunFolder::claim(&self.settings.out, self.start)?,
        };
        let fingerprint =
            Fingerprint::of(&self.engine, &self.settings, &self.tokens, &self.sources);
        // The folder stays claimed for the trainer's lifetime.
        self.folder.insert(folder).begin(&fingerprint, progress)
    }
}
