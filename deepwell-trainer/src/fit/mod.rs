//! The training loop: batches, steps, guards, evaluation, metrics, checkpoints.
//!
//! The host processes the results of a step while the device runs the next step: one step is in
//! flight.
//!
//! Each rank has its own [`Fit`], and all ranks perform the same operations in the same order:
//! decisions follow from numbers that are equal on all ranks, or are made by rank 0. Only rank 0
//! writes metrics and checkpoints.

mod guard;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::audit::Audit;
use crate::checkpoint::{self, Position};
use crate::data::{HeldoutWindows, Loader, Split, TokenCache};
use crate::fit_report::FitReport;
use crate::metrics::StepLine;
use crate::progress::Progress;
use crate::rank_times::{RankTime, RankTimes};
use crate::run_folder::{Opened, RunIdentity};
use crate::run_log::Log;
use crate::run_paths;
use crate::stalls::UnreportedStalls;
use crate::{
    Engine, ExpertRows, LearningRateSchedule, PendingStep, Settings, StepOutcome, TrainError,
};

/// Longest checkpoint stall, in steps, that is not reported.
const STALL_STEPS_MAX: f64 = 2.0;

/// A run in progress.
pub(crate) struct Fit<'r> {
    engine: &'r mut Engine,
    settings: &'r Settings,
    progress: &'r mut dyn Progress,
    identity: RunIdentity,
    resumed_after: Option<u64>,
    schedule: LearningRateSchedule,
    loader: Loader,
    /// Windows of the evaluation after the last step.
    heldout: HeldoutWindows,
    /// Windows of earlier evaluations.
    interim: HeldoutWindows,
    /// Only on rank 0.
    log: Option<Log>,
    rank_times: RankTimes,
    expert_rows: Vec<ExpertRows>,
    writer: checkpoint::Writer,
    /// State after the last processed step.
    position: Position,
    in_flight: Option<InFlight>,
    /// Time at which the last step was processed.
    last_end: Instant,
    /// Tokens per second of each step, except the audited step.
    speeds: Vec<f64>,
    checkpoint_stalls_s: Vec<f64>,
    /// Stalls above [`STALL_STEPS_MAX`] since the last note about stalls.
    unreported_stalls: UnreportedStalls,
    /// After the last step, batch by batch.
    heldout_losses: Vec<f64>,
}

/// Source of a run's batches.
pub(crate) struct Batches {
    loader: Loader,
    /// Windows of the evaluation after the last step.
    heldout: HeldoutWindows,
    /// Windows of earlier evaluations.
    interim: HeldoutWindows,
}

impl Batches {
    /// Batches of a run that evaluates `rows` sequences at a time, starting with batch 0. `end` is
    /// the token that ends a document, if documents are masked.
    ///
    /// # Errors
    /// The data are too short, or the held-out part has nothing to predict.
    pub(crate) fn new(
        settings: &Settings,
        tokens: &Arc<TokenCache>,
        rows: usize,
        end: Option<i32>,
    ) -> Result<Batches, TrainError> {
        let Settings { batch_size, seq_len: seq, .. } = *settings;
        let seed = settings.data_seed.unwrap_or(settings.seed);
        let loader = Loader::new(Arc::clone(tokens), Split::Train, batch_size, seq, seed)?;
        let windows = |least| heldout_windows(settings, tokens, rows, seq, least, end);
        let heldout = windows(settings.eval_tokens)?;
        let interim = windows(settings.interim_eval_tokens())?;
        Ok(Batches { loader, heldout, interim })
    }
}

/// A step started but not yet processed.
struct InFlight {
    step: u64,
    /// Number of the next batch.
    next_batch: u64,
    learning_rate: f64,
    tokens: usize,
    /// Whether any target counts in the loss.
    has_targets: bool,
    /// The device was idle before the step.
    is_first: bool,
    /// Start of the step, and this rank's accumulated waiting time at that moment.
    began: Instant,
    waited_before: Option<Duration>,
    begun: Begun,
}

enum Begun {
    /// The step ran call by call, and is complete.
    Audited(StepOutcome),
    /// The device runs the step.
    Pending(PendingStep),
}

/// Actions after a step.
struct NextActions {
    evaluates: bool,
    interrupts: bool,
    saves: bool,
    /// Whether the host waits for the step, because the state after it is needed.
    waits: bool,
}

impl<'r> Fit<'r> {
    /// A run at its first step, or resumed from a checkpoint.
    pub(crate) fn begin(
        engine: &'r mut Engine,
        settings: &'r Settings,
        tokens: &Arc<TokenCache>,
        opened: Opened,
        progress: &'r mut dyn Progress,
    ) -> Result<Fit<'r>, TrainError> {
        let mut position = Position {
            step: 0,
            guards: guard::guards_of(engine, settings),
            next_batch: 0,
            audit: None,
        };
        let (rows, end) = (engine.evaluation_rows(), engine.document_end());
        let batches = Batches::new(settings, tokens, rows, end)?;
        let Batches { mut loader, heldout, interim } = batches;
        let mut resumed_after = None;
        if let Some(entry) = &opened.from {
            position = checkpoint::load(entry, engine, &mut |text| progress.note(text))?;
            resumed_after = Some(position.step);
            progress.note(&format!("resumed after step {}", position.step));
        }
        loader.start_at(position.next_batch);
        let log = match engine.peers.is_first() {
            true => Some(Log::open(&settings.out, position.step, progress)?),
            false => None,
        };
        if heldout.is_whole() {
            progress.note(&format!(
                "note: each evaluation predicts all of the {} held-out tokens, which are less than \
                 {}",
                tokens.len(Split::Heldout),
                settings.eval_tokens
            ));
        }
        Ok(Fit {
            engine,
            settings,
            progress,
            identity: opened.identity,
            resumed_after,
            schedule: settings.schedule(),
            loader,
            heldout,
            interim,
            log,
            rank_times: RankTimes::default(),
            expert_rows: Vec::new(),
            writer: checkpoint::Writer::default(),
            position,
            in_flight: None,
            last_end: Instant::now(),
            speeds: Vec::new(),
            checkpoint_stalls_s: Vec::new(),
            unreported_stalls: UnreportedStalls::default(),
            heldout_losses: Vec::new(),
        })
    }

    /// Trains to the last step, or until `stop` becomes true.
    pub(crate) fn run_to_end(mut self, stop: &AtomicBool) -> Result<FitReport, TrainError> {
        if self.position.step == 0 {
            self.evaluate(0)?;
        }
        self.writer.reserve(self.engine, self.settings)?;
        let mut interrupted = false;
        for step in self.position.step + 1..=self.settings.steps {
            let before = self.start_step(step)?;
            let next = self.decide_next(step, stop)?;
            if let Some(before) = before {
                self.finish_step(before)?;
            }
            if next.waits
                && let Some(flight) = self.in_flight.take()
            {
                self.finish_step(flight)?;
            }
            if next.evaluates {
                self.evaluate(step)?;
            }
            if next.saves {
                self.save()?;
            }
            interrupted = next.interrupts;
            if interrupted {
                self.progress.note(&format!("stopped after step {step}; `--resume` goes on"));
                break;
            }
        }
        self.report(interrupted)
    }

    /// Starts a step; returns the previous step, if in flight.
    fn start_step(&mut self, step: u64) -> Result<Option<InFlight>, TrainError> {
        self.switch_repair(step)?;
        let learning_rate = self.schedule.at(step);
        let clip = self.settings.max_grad_norm;
        let batch = self.loader.next_batch()?;
        let (inputs, targets) = (&batch.inputs, &batch.targets);
        let has_targets = batch.counted(self.engine.document_end()) > 0;
        let is_first = self.in_flight.is_none();
        if is_first {
            self.last_end = Instant::now();
        }
        let began = Instant::now();
        let waited_before = self.engine.peers.waited();
        let begun = if self.settings.audit && step == 1 {
            let mut audit = Audit::new(self.engine.program());
            let observed =
                self.engine.step_observed(inputs, targets, learning_rate, clip, &mut audit);
            let outcome = observed?;
            self.position.audit = Some(audit.finish());
            Begun::Audited(outcome)
        } else {
            let every = self.settings.guards.product_every_steps;
            let measures = self.engine.can_measure() && every > 0 && step.is_multiple_of(every);
            let pending = match measures {
                true => self.engine.start_measured_step(inputs, targets, learning_rate, clip)?,
                false => self.engine.start_step(inputs, targets, learning_rate, clip)?,
            };
            Begun::Pending(pending)
        };
        Ok(self.in_flight.replace(InFlight {
            step,
            next_batch: batch.index + 1,
            learning_rate,
            tokens: inputs.len(),
            has_targets,
            is_first,
            began,
            waited_before,
            begun,
        }))
    }

    /// Decides the actions after a step that was just started.
    fn decide_next(&mut self, step: u64, stop: &AtomicBool) -> Result<NextActions, TrainError> {
        let last = step == self.settings.steps;
        let evaluates = last || step.is_multiple_of(self.settings.eval_interval());
        // Ranks that read the flag at different times would stop after different steps.
        let own = [stop.load(Ordering::Relaxed), self.writer.is_written()].map(u64::from);
        let all = self.engine.peers.gather(&own)?;
        let stops = all[0][0] == 1;
        if self.writer.is_pending() && all.iter().all(|of_rank| of_rank[1] == 1) {
            self.writer.complete(self.engine)?;
        }
        let interrupts = !last && stops;
        let is_due = step.is_multiple_of(self.settings.checkpoint_interval());
        let saves = !self.settings.no_checkpoints && (last || interrupts || is_due);
        let is_audited = matches!(&self.in_flight, Some(InFlight { begun: Begun::Audited(_), .. }));
        let waits = evaluates || saves || is_audited || !self.engine.is_asynchronous();
        Ok(NextActions { evaluates, interrupts, saves, waits })
    }

    /// Waits for a step, logs its results and passes them to the guards.
    fn finish_step(&mut self, flight: InFlight) -> Result<(), TrainError> {
        let is_audited = matches!(flight.begun, Begun::Audited(_));
        let (began, waited_before) = (flight.began, flight.waited_before);
        let outcome = match flight.begun {
            Begun::Audited(outcome) => outcome,
            Begun::Pending(pending) => self.engine.finish_step(pending)?,
        };
        let by_device = self.engine.step_time().and_then(|time| {
            if flight.is_first { Some(time.since_staged_s) } else { time.since_readback_s }
        });
        let elapsed_s = by_device.unwrap_or(self.last_end.elapsed().as_secs_f64());
        self.last_end = Instant::now();
        let tokens_per_s = flight.tokens as f64 / elapsed_s;
        if !is_audited {
            self.speeds.push(tokens_per_s);
        }
        self.position.step = flight.step;
        self.position.next_batch = flight.next_batch;
        let line = StepLine {
            step: flight.step,
            steps_total: self.settings.steps,
            loss: flight.has_targets.then(|| f64::from(outcome.loss)),
            grad_norm: f64::from(outcome.grad_norm),
            tokens_per_s,
            speed_of_light: Some(self.engine.prediction().time_s / elapsed_s),
        };
        let ranks = self.times_of_ranks(began, waited_before)?;
        let loads = self.engine.expert_loads_of_stages()?;
        ExpertRows::add(&mut self.expert_rows, &loads);
        if let Some(log) = &mut self.log {
            log.step(&line, flight.learning_rate, outcome.skipped, &loads, &ranks)?;
            let parallel = self.engine.plan().parallel;
            if let Some(note) = self.rank_times.add(&ranks, |rank| parallel.class(rank)) {
                self.progress.note(&note);
            }
        }
        self.progress.step(&line);
        self.guard(&outcome, flight.has_targets)
    }

    /// Busy and waiting time of each rank since a step began; empty for asynchronous devices, whose
    /// waiting the host does not see.
    fn times_of_ranks(
        &mut self,
        began: Instant,
        waited_before: Option<Duration>,
    ) -> Result<Vec<RankTime>, TrainError> {
        let (waited, before) = match (self.engine.peers.waited(), waited_before) {
            (Some(waited), Some(before)) if !self.engine.is_asynchronous() => (waited, before),
            _ => return Ok(Vec::new()),
        };
        let waited = waited - before;
        let busy = began.elapsed().saturating_sub(waited);
        let own = [busy, waited].map(|time| time.as_nanos() as u64);
        let all = self.engine.peers.gather(&own)?;
        let of_rank = |(rank, words): (usize, &Vec<u64>)| RankTime {
            rank: rank as u32,
            busy_s: words[0] as f64 / 1e9,
            waited_s: words[1] as f64 / 1e9,
        };
        Ok(all.iter().enumerate().map(of_rank).collect())
    }

    /// Evaluates and logs, after the last step on all windows.
    fn evaluate(&mut self, step: u64) -> Result<(), TrainError> {
        let last = step == self.settings.steps;
        let windows = if last { &self.heldout } else { &self.interim };
        let losses = losses_on(self.engine, windows)?;
        let end = self.engine.document_end();
        let counts = windows.counts(end);
        let tokens = counts.iter().sum();
        let is_even = end.is_none() && counts.iter().all(|&count| count == counts[0]);
        let val_loss = match tokens {
            // A mean over nothing has no value.
            0 => None,
            _ if is_even => Some(losses.iter().sum::<f64>() / losses.len() as f64),
            // Weighted by the number of counted targets of each batch.
            _ => {
                let terms = losses.iter().zip(&counts).map(|(loss, &count)| loss * count as f64);
                Some(terms.sum::<f64>() / tokens as f64)
            }
        };
        if let Some(log) = &mut self.log {
            log.evaluation(step, val_loss, tokens)?;
        }
        match val_loss {
            Some(val_loss) => self.progress.evaluation(step, val_loss),
            None => self.progress.note(&format!("step {step}: nothing to predict, no loss")),
        }
        let counted = losses.iter().zip(&counts).filter(|(_, count)| **count > 0);
        let losses: Vec<f64> = counted.map(|(loss, _)| *loss).collect();
        if last {
            self.heldout_losses = losses;
        }
        Ok(())
    }

    /// Writes a checkpoint, or begins to.
    fn save(&mut self) -> Result<(), TrainError> {
        // A resumed run trusts the checkpoint: metrics up to it must be on the disk.
        if let Some(log) = &mut self.log {
            log.sync()?;
        }
        let root = run_paths::checkpoints(&self.settings.out);
        let begun = Instant::now();
        let (settings, identity) = (self.settings, &self.identity);
        self.writer.save(&root, self.engine, &self.position, settings, identity)?;
        let stall_s = begun.elapsed().as_secs_f64();
        self.checkpoint_stalls_s.push(stall_s);
        self.warn_about_stall(stall_s);
        Ok(())
    }

    /// Reports a checkpoint stall above the limit, with a hint.
    fn warn_about_stall(&mut self, stall_s: f64) {
        let mut speeds = self.speeds.clone();
        speeds.sort_by(f64::total_cmp);
        let Some(speed) = speeds.get(speeds.len() / 2).filter(|speed| **speed > 0.0) else {
            return;
        };
        let steps = stall_s * speed / self.engine.tokens_per_step() as f64;
        if steps <= STALL_STEPS_MAX {
            return;
        }
        let Some(also) = self.unreported_stalls.add(stall_s) else { return };
        let is_copied = self.settings.async_checkpoints || self.engine.is_asynchronous();
        let hint = match is_copied {
            true => "the disk had not taken the one before: raise `--checkpoint-every`",
            false => "`--async-checkpoints` writes from a copy while training goes on",
        };
        self.progress.note(&format!(
            "the checkpoint of step {} took {steps:.1} steps, {stall_s:.2} s{also}; {hint}",
            self.position.step
        ));
    }

    /// Waits for the last checkpoint, and returns the report of the run.
    fn report(mut self, interrupted: bool) -> Result<FitReport, TrainError> {
        self.writer.finish(self.engine)?;
        if let Some(log) = &mut self.log {
            log.sync()?;
        }
        if self.heldout_losses.is_empty() && !interrupted {
            // The run resumed after the last evaluation: its metrics line has only the mean, and
            // the checkpoint has counted its GEMMs.
            let counts = self.engine.counts();
            let losses = losses_on(self.engine, &self.heldout)?;
            let of_windows = self.heldout.counts(self.engine.document_end());
            let counted = losses.into_iter().zip(of_windows).filter(|(_, count)| *count > 0);
            self.heldout_losses = counted.map(|(loss, _)| loss).collect();
            self.engine.set_counts(counts);
        }
        self.speeds.sort_by(f64::total_cmp);
        let are_finite = self.heldout_losses.iter().all(|loss| loss.is_finite());
        if let Some(note) = ExpertRows::fullest(&self.expert_rows) {
            self.progress.note(&note);
        }
        Ok(FitReport {
            step: self.position.step,
            interrupted,
            resumed_after: self.resumed_after,
            tokens_per_s: self.speeds.get(self.speeds.len() / 2).copied().unwrap_or(0.0),
            checkpoint_stalls_s: self.checkpoint_stalls_s,
            ranks: self.rank_times.medians(),
            expert_rows: self.expert_rows,
            audit: self.position.audit,
            heldout_losses: if are_finite { self.heldout_losses } else { Vec::new() },
        })
    }
}

/// The windows of an evaluation: enough to cover `least` tokens; or at most all windows, if the
/// number is a default.
fn heldout_windows(
    settings: &Settings,
    tokens: &Arc<TokenCache>,
    rows: usize,
    seq: usize,
    least: u64,
    end: Option<i32>,
) -> Result<HeldoutWindows, TrainError> {
    let tokens = Arc::clone(tokens);
    let windows = match settings.takes_what_is_there() {
        true => HeldoutWindows::at_most(tokens, rows, seq, least)?,
        false => HeldoutWindows::new(tokens, rows, seq, Some(least))?,
    };
    windows.check_targets(end)?;
    Ok(windows)
}

/// Windows that a rank evaluates between two collectives: this limits how far a pipeline stage runs
/// ahead of later stages.
const TURNS_AHEAD: usize = 16;

/// Losses on held-out windows, batch by batch. Ranks that split a batch in training evaluate
/// different windows, and all ranks get all losses. The stages of a pipeline evaluate a window
/// together, and the last stage has the loss; the partial losses of context-parallel ranks are
/// summed.
fn losses_on(engine: &mut Engine, windows: &HeldoutWindows) -> Result<Vec<f64>, TrainError> {
    let parallel = engine.plan().parallel;
    let own_place = parallel.batch_place(engine.rank());
    let (place, places) = (own_place as u64, parallel.batch_ranks() as u64);
    let knows = |rank: &usize| {
        parallel.pipeline_place(*rank) + 1 == parallel.pipeline && parallel.tensor_place(*rank) == 0
    };
    let mut batch = windows.buffer();
    let turns = windows.len().div_ceil(places);
    let mut losses = Vec::with_capacity(windows.len() as usize);
    for first in (0..turns).step_by(TURNS_AHEAD) {
        let mut own = Vec::with_capacity(TURNS_AHEAD);
        for turn in first..turns.min(first + TURNS_AHEAD as u64) {
            let index = turn * places + place;
            // Ranks that share experts or weights evaluate together; if no window is left, the last
            // window again.
            let together = parallel.expert > 1 || parallel.shards_weights();
            let loss = if index < windows.len() || together {
                windows.fill(index.min(windows.len() - 1), &mut batch);
                f64::from(engine.evaluate(&batch.inputs, &batch.targets)?)
            } else {
                f64::NAN
            };
            own.push(loss.to_bits());
        }
        let all = engine.peers.gather(&own)?;
        for turn in 0..own.len() {
            let of_place = |place: usize| -> f64 {
                let known = (0..all.len()).filter(knows);
                let of_window = known.filter(|&rank| parallel.batch_place(rank) == place);
                of_window.map(|rank| f64::from_bits(all[rank][turn])).sum()
            };
            losses.extend((0..parallel.batch_ranks()).map(of_place));
        }
    }
    losses.truncate(windows.len() as usize);
    Ok(losses)
}
