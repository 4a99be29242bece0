//! The training loop: batches, steps, guards, evaluation, metrics, checkpoints.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use deepwell_precision::{GuardEvent, GuardEventKind, Guards};
use serde::{Deserialize, Serialize};

use crate::audit::{Audit, AuditReport};
use crate::checkpoint::{self, Position};
use crate::data::{HeldoutWindows, Loader, Split, TokenCache};
use crate::fingerprint::{Fingerprint, Sources};
use crate::metrics::StepLine;
use crate::metrics::nonfinite::option as number;
use crate::run_folder::{Opened, RunFolder, Start};
use crate::run_log::Log;
use crate::{Engine, PendingStep, Settings, StepOutcome, TrainError};

/// One line of `metrics.jsonl`. A number that is `None` was not taken; one that was taken and is
/// not finite is there, as the string `"NaN"`, `"inf"` or `"-inf"`.
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
    /// Predicted least time of the step over the time it took.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub speed_of_light: Option<f64>,
    /// Held-out loss, nats per token.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub val_loss: Option<f64>,
    /// `exp(val_loss)`.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub val_ppl: Option<f64>,
    /// What a guard did after the step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub guard: Option<GuardEvent>,
    /// Whether the update was left out because the gradient norm was not finite.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub skipped: bool,
}

impl Record {
    /// A line that says nothing but its step.
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
            guard: None,
            skipped: false,
        }
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FitReport {
    /// Steps done.
    pub step: u64,
    /// Whether it was asked to stop before its last step.
    pub interrupted: bool,
    /// Step that it was resumed after.
    pub resumed_after: Option<u64>,
    /// Median tokens per second of the steps of this process, evaluation and checkpoints left
    /// out.
    pub tokens_per_s: f64,
    /// How long training stood still for each checkpoint.
    #[serde(default)]
    pub checkpoint_stalls_s: Vec<f64>,
    /// What the audit of the first step found, when it was asked for.
    pub audit: Option<AuditReport>,
    /// Held-out losses of the last evaluation, batch by batch; empty if one is not finite.
    #[serde(default)]
    pub heldout_losses: Vec<f64>,
}

/// Told about progress.
pub trait Progress {
    /// A step is done.
    fn step(&mut self, line: &StepLine);
    /// An evaluation is done.
    fn evaluation(&mut self, step: u64, val_loss: f64);
    /// Something worth a line.
    fn note(&mut self, text: &str);
}

/// Says nothing.
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

    /// How the run begins in its output folder. Without this, [`Start::New`].
    #[must_use]
    pub fn starting(mut self, start: Start) -> Trainer {
        self.start = start;
        self
    }

    /// Trains in a folder that was taken before, in place of one that [`Trainer::fit`] takes.
    #[must_use]
    pub fn in_folder(mut self, folder: RunFolder) -> Trainer {
        self.folder = Some(folder);
        self
    }

    /// Tells what the run is made from, for its fingerprint.
    #[must_use]
    pub fn made_from(mut self, sources: Sources) -> Trainer {
        self.sources = sources;
        self
    }

    /// Stops after the step during which `stop` becomes true: with a checkpoint.
    #[must_use]
    pub fn stopping_on(mut self, stop: Arc<AtomicBool>) -> Trainer {
        self.stop = stop;
        self
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The engine, to do something with it between runs.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Where metrics go.
    pub fn metrics_path(out: &Path) -> PathBuf {
        out.join("metrics.jsonl")
    }

    /// Where checkpoints go.
    pub fn checkpoints_path(out: &Path) -> PathBuf {
        out.join("checkpoints")
    }

    /// Trains to the last step, or until asked to stop.
    ///
    /// # Errors
    /// Data, disk or guards that stop the run; a folder that belongs to another run. Checkpoints
    /// written so far stay.
    pub fn fit(&mut self, progress: &mut dyn Progress) -> Result<FitReport, TrainError> {
        let settings = self.settings.clone();
        let out = &settings.out;
        let opened = self.begin(progress)?;
        let layers = (0..self.engine.layer_count()).map(|layer| format!("layers.{layer}"));
        let policy_fallback = self.engine.plan().policy.fallback();
        let mut position = Position {
            step: 0,
            guards: Guards::new(settings.guards.clone(), layers.collect(), policy_fallback),
            next_batch: 0,
            audit: None,
        };
        let mut resumed_after = None;
        if let Some(entry) = &opened.from {
            position = checkpoint::load(entry, &mut self.engine)?;
            resumed_after = Some(position.step);
            progress.note(&format!("resumed after step {}", position.step));
        }
        let mut log = Log::open(out, position.step, progress)?;
        let mut loader = Loader::new(
            Arc::clone(&self.tokens),
            Split::Train,
            settings.batch_size,
            settings.seq_len,
            settings.data_seed.unwrap_or(settings.seed),
        )?;
        loader.start_at(position.next_batch);
        let heldout = HeldoutWindows::new(
            Arc::clone(&self.tokens),
            self.engine.evaluation_rows(),
            settings.seq_len,
            Some(settings.eval_tokens),
        )?;
        let schedule = settings.schedule();
        let mut speeds: Vec<f64> = Vec::new();
        let mut heldout_losses = Vec::new();
        let mut interrupted = false;
        if position.step == 0 {
            self.evaluate(&heldout, 0, &mut log, progress)?;
        }
        // While the device runs a step, the one before is looked at: one step is in flight.
        let mut in_flight: Option<InFlight> = None;
        let mut writer = checkpoint::Writer::default();
        writer.reserve(&mut self.engine)?;
        let mut checkpoint_stalls_s: Vec<f64> = Vec::new();
        let mut last_end = Instant::now();
        let mut started_steps = position.step;
        while position.step < settings.steps {
            let step = started_steps + 1;
            let learning_rate = schedule.at(step);
            let batch = loader.next_batch()?;
            let is_audited = settings.audit && step == 1;
            let clip = settings.max_grad_norm;
            let is_first = in_flight.is_none();
            if is_first {
                last_end = Instant::now();
            }
            let started = if is_audited {
                let mut audit = Audit::new(self.engine.program());
                let outcome = self.engine.step_observed(
                    &batch.inputs,
                    &batch.targets,
                    learning_rate,
                    clip,
                    &mut audit,
                )?;
                position.audit = Some(audit.finish());
                Begun::Audited(outcome)
            } else {
                let inputs = (&batch.inputs, &batch.targets);
                Begun::Pending(self.engine.start_step(inputs.0, inputs.1, learning_rate, clip)?)
            };
            started_steps = step;
            let before = in_flight.replace(InFlight {
                step,
                next_batch: batch.index + 1,
                learning_rate,
                tokens: batch.inputs.len(),
                is_first,
                begun: started,
            });
            let last = step == settings.steps;
            let evaluates = last || step.is_multiple_of(settings.eval_interval());
            interrupted = !last && self.stop.load(Ordering::Relaxed);
            let saves = last || interrupted || step.is_multiple_of(settings.checkpoint_interval());
            // Whoever looks at the state after this step waits for it.
            let waits = evaluates || saves || is_audited || !self.engine.is_asynchronous();
            let ended = before.into_iter().chain(waits.then(|| in_flight.take()).flatten());
            for flight in ended {
                let outcome = match flight.begun {
                    Begun::Audited(outcome) => outcome,
                    Begun::Pending(pending) => self.engine.finish_step(pending)?,
                };
                let by_device = self.engine.step_time().and_then(|time| {
                    if flight.is_first { Some(time.since_staged_s) } else { time.since_readback_s }
                });
                let elapsed_s = by_device.unwrap_or(last_end.elapsed().as_secs_f64());
                last_end = Instant::now();
                let tokens_per_s = flight.tokens as f64 / elapsed_s;
                if !is_audited {
                    speeds.push(tokens_per_s);
                }
                position.step = flight.step;
                position.next_batch = flight.next_batch;
                let line = StepLine {
                    step: flight.step,
                    steps_total: settings.steps,
                    loss: f64::from(outcome.loss),
                    grad_norm: f64::from(outcome.grad_norm),
                    tokens_per_s,
                    speed_of_light: Some(self.engine.prediction().time_s / elapsed_s),
                };
                log.step(&line, flight.learning_rate, outcome.skipped)?;
                progress.step(&line);
                self.guard(&mut position, &outcome, &mut log, progress)?;
            }
            if evaluates {
                heldout_losses = self.evaluate(&heldout, step, &mut log, progress)?;
            }
            if saves {
                // The checkpoint is what a resumed run trusts: metrics up to it must be there.
                log.sync()?;
                let root = Trainer::checkpoints_path(out);
                let begun = Instant::now();
                let identity = &opened.identity;
                writer.save(&root, &mut self.engine, &position, &settings, identity)?;
                checkpoint_stalls_s.push(begun.elapsed().as_secs_f64());
            }
            if interrupted {
                progress.note(&format!("stopped after step {step}; `--resume` goes on"));
                break;
            }
        }
        writer.finish(&mut self.engine)?;
        log.sync()?;
        if heldout_losses.is_empty() && !interrupted {
            // Resumed after the last evaluation, whose line has the mean alone.
            heldout_losses = self.heldout_losses(&heldout)?;
        }
        speeds.sort_by(f64::total_cmp);
        Ok(FitReport {
            step: position.step,
            interrupted,
            resumed_after,
            tokens_per_s: speeds.get(speeds.len() / 2).copied().unwrap_or(0.0),
            checkpoint_stalls_s,
            audit: position.audit,
            heldout_losses: match heldout_losses.iter().all(|loss: &f64| loss.is_finite()) {
                true => heldout_losses,
                false => Vec::new(),
            },
        })
    }

    /// Takes the output folder, and finds where the run goes on.
    fn begin(&mut self, progress: &mut dyn Progress) -> Result<Opened, TrainError> {
        let folder = match self.folder.take() {
            Some(folder) => folder,
            None => RunFolder::claim(&self.settings.out, self.start)?,
        };
        let fingerprint =
            Fingerprint::of(&self.engine, &self.settings, &self.tokens, &self.sources);
        // It stays taken for as long as there is a trainer.
        self.folder.insert(folder).begin(&fingerprint, progress)
    }

    /// Shows the step to the guards and does what they decide.
    fn guard(
        &mut self,
        position: &mut Position,
        outcome: &StepOutcome,
        log: &mut Log,
        progress: &mut dyn Progress,
    ) -> Result<(), TrainError> {
        let step = position.step;
        let guards = &mut position.guards;
        for (layer, stats) in self.engine.statistics() {
            guards.observe_tensor(step, *layer, stats);
        }
        guards.observe_loss(step, outcome.loss, outcome.grad_norm);
        let events = guards.decide(step)?;
        let switches = events.iter().any(|event| {
            matches!(event.kind, GuardEventKind::ToBf16 { .. } | GuardEventKind::BackToLow { .. })
        });
        for event in &events {
            progress.note(&format!(
                "guard at step {step}: {:?} {}: {}",
                event.kind, event.layer, event.reason
            ));
            log.guard(event)?;
        }
        if switches {
            let reason = events.last().map_or("", |event| event.reason.as_str());
            self.engine.fall_back(&guards.in_fallback(), reason)?;
        }
        Ok(())
    }

    /// Held-out losses, batch by batch.
    fn heldout_losses(&mut self, heldout: &HeldoutWindows) -> Result<Vec<f64>, TrainError> {
        let mut batch = heldout.buffer();
        let mut losses = Vec::with_capacity(heldout.len() as usize);
        for index in 0..heldout.len() {
            heldout.fill(index, &mut batch);
            losses.push(f64::from(self.engine.evaluate(&batch.inputs, &batch.targets)?));
        }
        Ok(losses)
    }

    /// Evaluates and logs; gives the losses batch by batch.
    fn evaluate(
        &mut self,
        heldout: &HeldoutWindows,
        step: u64,
        log: &mut Log,
        progress: &mut dyn Progress,
    ) -> Result<Vec<f64>, TrainError> {
        let losses = self.heldout_losses(heldout)?;
        let val_loss = losses.iter().sum::<f64>() / heldout.len() as f64;
        log.evaluation(step, val_loss)?;
        progress.evaluation(step, val_loss);
        Ok(losses)
    }
}

/// A step that was started and not looked at yet.
struct InFlight {
    step: u64,
    /// Number of the batch behind its own.
    next_batch: u64,
    learning_rate: f64,
    tokens: usize,
    /// The device had nothing to do before it.
    is_first: bool,
    begun: Begun,
}

enum Begun {
    /// It ran call by call, and has ended.
    Audited(StepOutcome),
    /// The device runs it.
    Pending(PendingStep),
}
