//! Steps in flight: the host writes inputs and reads results while the device runs.
//!
//! Each body with quantizations is followed by a readback of their counters; the last body of a
//! step also reads back its loss, norm and counters. At most [`READBACKS`] readbacks are in flight;
//! before another is enqueued, the oldest is fetched, which bounds the host's lead over the device.

use std::borrow::Cow;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::ops::{Quantize, Zigzag};
use deepwell_ir::{Invocation, Phase, ValueId};
use deepwell_kernels::{KernelError, Observer, READBACKS};
use deepwell_plan::Parallel;

use super::products::add_products;
use super::routing::{ExpertLoad, add_load};
use super::steps::{PendingReadback, PendingStep, StepOutcome, StepResults, StepTime};
use super::{Engine, OperandStats};
use crate::TrainError;
use crate::documents::{self, loss_scale, masked_targets};

/// This rank's part of a batch, with the scalars of a step.
struct StepInputs<'a> {
    tokens: &'a [i32],
    targets: &'a [i32],
    /// For masked documents, two values for each token.
    documents: &'a [i32],
    positions: &'a [i32],
    scale: [f32; 1],
    schedule: [f32; 2],
    /// Seed and number of the step.
    key: [u64; 2],
}

impl Engine {
    /// Trains one step on `inputs` and `targets`, i32 `[global batch · seq]` row-major. Every rank
    /// is given the whole batch and takes its part: consecutive sequences, in the order of the
    /// ranks; context-parallel ranks share the sequences, with two chunks of each sequence per
    /// rank. Loss and norm cover all ranks.
    ///
    /// # Errors
    /// Batches of the wrong size, or data that a call rejects.
    pub fn step(
        &mut self,
        inputs: &[i32],
        targets: &[i32],
        learning_rate: f64,
        max_grad_norm: f64,
    ) -> Result<StepOutcome, TrainError> {
        let pending = self.start_step(inputs, targets, learning_rate, max_grad_norm)?;
        self.finish_step(pending)
    }

    /// Begins a step like [`Engine::step`], without waiting for it if the device is asynchronous.
    /// Two steps may be in flight; the older step must be finished next.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn start_step(
        &mut self,
        inputs: &[i32],
        targets: &[i32],
        learning_rate: f64,
        max_grad_norm: f64,
    ) -> Result<PendingStep, TrainError> {
        let schedule = [learning_rate, max_grad_norm];
        let mut observer = self.observer.take();
        let observed = observer.as_deref_mut().map(|it| it as &mut dyn Observer);
        let begun = self.run_schedule(inputs, targets, schedule, observed);
        self.observer = observer;
        begun
    }

    /// Sets an observer around each call of every step to come, also of the steps of a
    /// [`Trainer`](crate::Trainer): tests plant faults in a run. Observed calls run one by one.
    pub fn observe_steps(&mut self, observer: Box<dyn Observer + Send>) {
        self.observer = Some(observer);
    }

    /// [`Engine::step`] with an observer around each call.
    ///
    /// # Errors
    /// As [`Engine::step`], and errors of the observer.
    pub fn step_observed(
        &mut self,
        inputs: &[i32],
        targets: &[i32],
        learning_rate: f64,
        max_grad_norm: f64,
        observer: &mut dyn Observer,
    ) -> Result<StepOutcome, TrainError> {
        let schedule = [learning_rate, max_grad_norm];
        let pending = self.run_schedule(inputs, targets, schedule, Some(observer))?;
        self.finish_step(pending)
    }

    /// Waits for a step and returns its result. Afterwards [`Engine::statistics`] returns the
    /// counters of its quantizations.
    ///
    /// # Errors
    /// The device fails.
    pub fn finish_step(&mut self, pending: PendingStep) -> Result<StepOutcome, TrainError> {
        loop {
            match self.steps.in_flight.front() {
                Some(results) if results.number < pending.number => {
                    self.steps.in_flight.pop_front();
                }
                Some(results) if results.number == pending.number && results.scalars.is_some() => {
                    break;
                }
                Some(_) if !self.steps.readbacks.is_empty() => self.fetch_oldest()?,
                _ => {
                    let what = "was finished before, or another after it".to_string();
                    return Err(KernelError::Run { call: "step".to_string(), what }.into());
                }
            }
        }
        self.steps.finished = self.steps.in_flight.pop_front().unwrap_or_default();
        let finished = &self.steps.finished;
        let (loss, grad_norm, skipped) = finished.scalars.unwrap_or_default();
        let was_skipped = skipped != self.skipped_steps;
        self.skipped_steps = skipped;
        self.counts.add(&finished.per_step);
        Ok(StepOutcome { loss, grad_norm, skipped: was_skipped })
    }

    /// The statistics of the last finished step's quantizations, with the GEMMs that read each
    /// operand; saturations by design of a format are left out.
    pub fn statistics(&self) -> &[OperandStats] {
        &self.steps.finished.counted
    }

    /// The passes of [`Engine::statistics`]: micro-batch, phase and chunk.
    pub(super) fn passes_of_statistics(&self) -> &[(u32, Phase, u32)] {
        &self.steps.finished.passes
    }

    /// Expert loads of the last finished step, by layer; empty for a model without experts.
    pub fn expert_loads(&self) -> &[ExpertLoad] {
        &self.steps.finished.loads
    }

    /// Device time of the last finished step, by the device's clock; `None` for a synchronous
    /// device.
    pub fn step_time(&self) -> Option<StepTime> {
        let finished = &self.steps.finished;
        let since_readback_s = finished.since_readback_s.filter(|_| !finished.has_gap);
        Some(StepTime { since_staged_s: finished.since_staged_s?, since_readback_s })
    }

    /// Enqueues the whole schedule, with inputs and readbacks.
    fn run_schedule(
        &mut self,
        inputs: &[i32],
        targets: &[i32],
        schedule: [f64; 2],
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<PendingStep, TrainError> {
        let tokens_per_step = self.tokens_per_step();
        if inputs.len() != tokens_per_step || targets.len() != tokens_per_step {
            return Err(TrainError::Setting {
                setting: "batch",
                expected: format!("{tokens_per_step} inputs and targets"),
                got: format!("{} and {}", inputs.len(), targets.len()),
                hint: None,
            });
        }
        let targets = &*masked_targets(inputs, targets, self.document_end);
        let tokens = self.part_of_batch(inputs);
        let own_targets = self.part_of_batch(targets);
        let (bounds, places) = self.documents_of(&tokens);
        let inputs = StepInputs {
            tokens: &tokens,
            targets: &own_targets,
            documents: &bounds,
            positions: &places,
            // Computed over the tokens of all ranks: a mean of means would differ if targets are
            // ignored.
            scale: [loss_scale(targets)],
            schedule: schedule.map(|value| value as f32),
            key: [self.rounding_seed, self.steps_begun],
        };
        self.steps.begun += 1;
        self.steps_begun += 1;
        let number = self.steps.begun;
        let per_step = self.per_step;
        self.steps.in_flight.push_back(StepResults { number, per_step, ..StepResults::default() });
        let invocations = self.program().schedule.len();
        for index in 0..invocations {
            let invocation = self.program().schedule[index];
            if self.program().bodies[invocation.body.index()].phase == Phase::Forward {
                self.stage(&invocation, &inputs)?;
            }
            match observer.as_deref_mut() {
                None => self.executor.invoke(&self.training, index)?,
                Some(observer) => {
                    self.executor.invoke_observed(&self.training, index, observer)?;
                }
            }
            self.read_later(&invocation, index + 1 == invocations)?;
        }
        // A rank that has not got here keeps the devices of other ranks waiting.
        self.peers.has_begun();
        Ok(PendingStep { number })
    }

    /// This rank's part of the tokens or targets of a step.
    fn part_of_batch<'a>(&self, all: &'a [i32]) -> Cow<'a, [i32]> {
        let parallel = self.plan.parallel;
        let own = self.program().tokens_per_step() * parallel.context;
        let place = parallel.batch_place(self.rank());
        self.part_of_sequences(&all[place * own..(place + 1) * own])
    }

    /// This rank's part of sequences shared by context-parallel ranks.
    pub(super) fn part_of_sequences<'a>(&self, whole: &'a [i32]) -> Cow<'a, [i32]> {
        let Parallel { context: ranks, .. } = self.plan.parallel;
        if ranks == 1 {
            return Cow::Borrowed(whole);
        }
        let place = self.plan.parallel.context_place(self.rank());
        Cow::Owned(Zigzag { place, ranks }.part_of(whole, self.plan.seq))
    }

    /// Start and end of the document of each of a rank's tokens, and the token's position in the
    /// document. Both empty if documents are joined.
    pub(super) fn documents_of(&self, tokens: &[i32]) -> (Vec<i32>, Vec<i32>) {
        let Some(end) = self.document_end else { return (Vec::new(), Vec::new()) };
        let bounds = documents::bounds(tokens, self.plan.seq, end);
        let positions = documents::positions(&bounds, self.plan.seq);
        (bounds, positions)
    }

    /// Key of a micro-batch of this rank: its own seed for each micro-batch of the step, counted
    /// over all ranks, so that tokens meet the same random words on any number of data-parallel
    /// ranks, and no two micro-batches the same.
    fn rounding_key(&self, [seed, step]: [u64; 2], micro_batch: u32) -> [u64; 2] {
        let place = self.plan.parallel.data_place(self.rank()) * self.plan.micro_batches;
        let index = place as u64 + u64::from(micro_batch);
        [seed.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15)), step]
    }

    /// Copies a micro-batch into its slot; the first one with the scalars of the step.
    fn stage(
        &mut self,
        invocation: &Invocation,
        inputs: &StepInputs<'_>,
    ) -> Result<(), TrainError> {
        let program = self.training.program();
        let host = &program.host;
        let tokens = program.batch * program.seq;
        let first = invocation.micro_batch as usize * tokens;
        let mut values: Vec<(ValueId, &[u8])> = Vec::new();
        for (id, all, width) in [
            (host.tokens, inputs.tokens, 1),
            (host.targets, inputs.targets, 1),
            (host.documents, inputs.documents, 2),
            (host.positions, inputs.positions, 1),
        ] {
            let range = width * first..width * (first + tokens);
            values.extend(id.map(|id| (id, cast_slice(&all[range]))));
        }
        let key = self.rounding_key(inputs.key, invocation.micro_batch);
        values.extend(host.rounding_key.map(|id| (id, cast_slice(&key))));
        if invocation.micro_batch == 0 {
            values.extend(host.loss_scale.map(|id| (id, cast_slice(&inputs.scale))));
            values.extend(host.schedule.map(|id| (id, cast_slice(&inputs.schedule))));
        }
        Ok(self.executor.stage(program, invocation.slot, &values)?)
    }

    /// Enqueues a readback of an invocation's results, if any.
    fn read_later(&mut self, invocation: &Invocation, is_last: bool) -> Result<(), TrainError> {
        let statistics = Arc::clone(&self.statistics[invocation.body.index()]);
        let loads = Arc::clone(&self.loads[invocation.body.index()]);
        let products = Arc::clone(&self.products[invocation.body.index()]);
        if statistics.is_empty() && loads.is_empty() && products.is_empty() && !is_last {
            return Ok(());
        }
        while self.steps.readbacks.len() >= READBACKS {
            self.fetch_oldest()?;
        }
        let program = self.training.program();
        let mut values: Vec<ValueId> = statistics.iter().map(|counters| counters.id).collect();
        values.extend(loads.iter().map(|load| load.id));
        values.extend(products.iter().map(|product| product.id));
        if is_last {
            let host = &program.host;
            let (Some(loss), Some(grad_norm), Some(counters)) =
                (host.loss, host.grad_norm, host.counters)
            else {
                let what = "the program has no loss, norm or counters to read".to_string();
                return Err(KernelError::Run { call: program.name.clone(), what }.into());
            };
            values.extend([loss, grad_norm, counters]);
        }
        let ranges: Vec<_> = values.iter().map(|&id| program.value(id).range).collect();
        let readback = self.executor.backend_mut().read_later(&ranges)?;
        let step = self.steps.begun;
        let body = &program.bodies[invocation.body.index()];
        let pass = (invocation.micro_batch, body.phase, body.chunk);
        self.steps.readbacks.push_back(PendingReadback {
            step,
            readback,
            pass,
            statistics,
            products,
            loads,
            is_last,
        });
        Ok(())
    }

    /// Waits for the oldest readback and adds its values to its step.
    fn fetch_oldest(&mut self) -> Result<(), TrainError> {
        let Some(pending) = self.steps.readbacks.pop_front() else { return Ok(()) };
        let mut counters = vec![[0u64; Quantize::STATISTICS]; pending.statistics.len()];
        let mut loads: Vec<Vec<i32>> =
            pending.loads.iter().map(|load| vec![0; 2 * load.experts]).collect();
        let mut products = vec![[0f32; 2]; pending.products.len()];
        let mut scalars = ([0f32; 1], [0f32; 1], [0u64; 2]);
        let mut bytes: Vec<&mut [u8]> =
            counters.iter_mut().map(|words| cast_slice_mut(words.as_mut_slice())).collect();
        bytes.extend(loads.iter_mut().map(|load| cast_slice_mut(load.as_mut_slice())));
        bytes.extend(products.iter_mut().map(|sums| cast_slice_mut(sums.as_mut_slice())));
        if pending.is_last {
            bytes.push(cast_slice_mut(&mut scalars.0));
            bytes.push(cast_slice_mut(&mut scalars.1));
            bytes.push(cast_slice_mut(&mut scalars.2));
        }
        let backend = self.executor.backend_mut();
        backend.fetch(pending.readback, &mut bytes)?;
        let time = backend.time_of(pending.readback)?;
        let Some(results) =
            self.steps.in_flight.iter_mut().find(|results| results.number == pending.step)
        else {
            return Ok(());
        };
        let counted = pending.statistics.iter().zip(&counters);
        results.counted.extend(counted.map(|(of, words)| of.decode(words)));
        results.passes.resize(results.counted.len(), pending.pass);
        for (of, sums) in pending.products.iter().zip(&products) {
            add_products(&mut results.products, of.decode(*sums));
        }
        for (of, load) in pending.loads.iter().zip(&loads) {
            add_load(&mut results.loads, of, load);
        }
        if let Some(time) = time {
            let own_s = time.since_readback_s.unwrap_or_default();
            results.since_staged_s = match results.since_staged_s {
                None => time.since_staged_s,
                Some(before_s) => Some(before_s + own_s),
            };
            results.since_readback_s = Some(results.since_readback_s.unwrap_or_default() + own_s);
            results.has_gap |= time.since_readback_s.is_none();
        }
        if pending.is_last {
            let (loss, grad_norm, [_, skipped]) = scalars;
            results.scalars = Some((loss[0], grad_norm[0], skipped));
        }
        Ok(())
    }
}
