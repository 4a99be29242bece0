//! The engine: programs, the backend and the state between steps.

use std::sync::mpsc;

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::{Graph, Init, MemoryKind, Phase, PrecisionPolicy, Program, ValueId};
use deepwell_kernels::{CallTime, Executor, KernelError, LoadedProgram, Observer};
use deepwell_plan::{DryRun, Plan, PrecisionFallback, lower_evaluation, lower_within};
use deepwell_precision::Format;
use deepwell_probe::Hardware;

use super::RunCounts;
use super::gemms::{Gemm, Statistics, statistics_of};
use super::products::{Measuring, Products};
use super::routing::{LoadCounters, load_counters};
use super::steps::Steps;
use crate::TrainError;
use crate::device::{Catalog, Device};
use crate::documents::{loss_scale, masked_targets};
use crate::init;
use crate::peers::Peers;
use crate::weights::MasterWeights;

/// The norm by which the first step clips updates in the backward pass. A large norm: AdamW's first
/// update does not depend on the size of the gradients, but later updates would remember large
/// squares.
const UNKNOWN_NORM: f32 = 1e4;

/// A model ready to train.
pub struct Engine {
    pub(super) graph: Graph,
    /// GEMMs of the whole model, on every rank.
    pub(super) gemms: Vec<Gemm>,
    pub(super) hardware: Hardware,
    pub(super) target: deepwell_ir::Target,
    pub(super) policy: PrecisionPolicy,
    /// Parts of the policy that the device does not support.
    pub(super) precision_fallbacks: Vec<PrecisionFallback>,
    pub(super) plan: Plan,
    pub(super) prediction: DryRun,
    pub(super) device: Device,
    pub(super) catalog: Catalog,
    pub(crate) executor: Executor,
    pub(super) training: LoadedProgram,
    pub(super) evaluation: LoadedProgram,
    /// The other ranks.
    pub(crate) peers: Peers,
    /// Counters of the quantizations of each body, with the GEMMs that the counters belong to.
    pub(super) statistics: Vec<Statistics>,
    /// Loads of experts of each body.
    pub(super) loads: Vec<std::sync::Arc<[LoadCounters]>>,
    /// The program of the steps that measure products; `None` without a product to measure.
    pub(super) measuring: Option<Measuring>,
    /// Products that the loaded training program measures, by body: none, but in steps that
    /// measure.
    pub(super) products: Vec<Products>,
    pub(super) steps: Steps,
    pub(super) skipped_steps: u64,
    /// Number of begun steps and the seed, for stochastic rounding.
    pub(super) steps_begun: u64,
    pub(super) rounding_seed: u64,
    /// The token that ends a document, if documents are masked.
    pub(super) document_end: Option<i32>,
    /// Counts of a step and of an evaluation of the loaded programs.
    pub(super) per_step: RunCounts,
    pub(super) per_evaluation: RunCounts,
    pub(super) counts: RunCounts,
    pub(super) flop_share_planned: (f64, f64),
    /// Whether the forward GEMMs run in BF16, as the policy's repair says.
    pub(super) is_repaired: bool,
    /// Called around each call of every step.
    pub(super) observer: Option<Box<dyn Observer + Send>>,
}

impl Engine {
    /// The captured graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Parts of the policy that the device does not support, by reason, over all ranks.
    pub fn precision_fallbacks(&self) -> &[PrecisionFallback] {
        &self.precision_fallbacks
    }

    /// Rank of this engine, counted from 0.
    pub fn rank(&self) -> usize {
        self.peers.rank()
    }

    /// Tokens of a step, over all ranks.
    pub fn tokens_per_step(&self) -> usize {
        self.program().tokens_per_step() * self.plan.parallel.data
    }

    /// The predicted memory and time of a step.
    pub fn prediction(&self) -> &DryRun {
        &self.prediction
    }

    /// The training program.
    pub fn program(&self) -> &Program {
        self.training.program()
    }

    /// The evaluation program.
    pub fn evaluation_program(&self) -> &Program {
        self.evaluation.program()
    }

    /// The hardware that the plan was made for.
    pub fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    /// Predicted peak, in bytes: the larger arena of training and evaluation (on a GPU including
    /// the reserve for GEMMs that fall back), plus the backend's own allocations.
    pub fn predicted_peak_bytes(&self) -> u64 {
        let training = self.program();
        let evaluation = self.evaluation_program();
        let arena = match self.device {
            Device::Cpu => training.arena.bytes.max(evaluation.arena.bytes),
            Device::Cuda(_) | Device::Emulated(_) => {
                self.executor.arena_bytes() - self.executor.host_bytes()
            }
        };
        (arena + training.fixed_overhead_bytes) as u64
    }

    /// Counts of all completed steps and evaluations since the start of the run, without profiled
    /// steps.
    pub fn counts(&self) -> RunCounts {
        self.counts
    }

    /// Sets the counts of the part of a run that ended in another process.
    pub fn set_counts(&mut self, counts: RunCounts) {
        self.counts = counts;
    }

    /// Share of the FLOPs of linear layers that a step runs on quantized operands while no GEMM is
    /// in fallback: of the blocks, and of the blocks and the head.
    pub fn quantized_flop_share_planned(&self) -> (f64, f64) {
        self.flop_share_planned
    }

    /// The token that ends a document, if documents are masked.
    pub fn document_end(&self) -> Option<i32> {
        self.document_end
    }

    /// The policy at compilation, without later changes by guards.
    pub fn policy(&self) -> &PrecisionPolicy {
        &self.policy
    }

    /// Initializes the weights from `seed`, zeroes the optimizer and computes the weight copies. A
    /// collective of all ranks.
    ///
    /// # Errors
    /// The backend fails.
    pub fn initialize(&mut self, seed: u64) -> Result<(), TrainError> {
        self.initialize_masters(seed)?;
        self.refresh_weight_copies()
    }

    /// [`Engine::initialize`] without the copies, and so without collectives.
    pub(crate) fn initialize_masters(&mut self, seed: u64) -> Result<(), TrainError> {
        let inits = init::initial_values(&self.graph);
        let program = self.program();
        // A program has the parameters of its graph; a pipeline stage has some of them.
        let initialized = program.parameters.iter().filter_map(|state| {
            let elements = program.whole_shape(state).iter().product();
            Some((state.master.value(), state.name.clone(), *inits.get(&state.name)?, elements))
        });
        let initialized: Vec<(ValueId, String, Init, usize)> = initialized.collect();
        // One thread computes a parameter while this thread writes the parameter before.
        std::thread::scope(|scope| {
            let (filled, masters) = mpsc::sync_channel::<(ValueId, Vec<f32>)>(1);
            let (written, buffers) = mpsc::channel::<Vec<f32>>();
            scope.spawn(move || {
                for (master, name, init, elements) in initialized {
                    let mut buffer = buffers.try_recv().unwrap_or_default();
                    buffer.resize(elements, 0.0);
                    init::fill(init, seed, &name, &mut buffer);
                    if filled.send((master, buffer)).is_err() {
                        return;
                    }
                }
            });
            for (master, buffer) in masters {
                self.write_part(master, cast_slice(&buffer))?;
                // Nobody waits for a buffer after the last parameter.
                let _ = written.send(buffer);
            }
            Ok::<(), TrainError>(())
        })?;
        self.clear_moments()?;
        self.rounding_seed = seed;
        self.set_last_norm(UNKNOWN_NORM)?;
        self.set_applied_steps(0, 0)
    }

    /// Flips the last bit of about half of the master weights and recomputes the weight copies: the
    /// start of a run that differs from the unperturbed run only by chaos.
    ///
    /// # Errors
    /// Masters in BF16, where the last bit is no small change; the backend fails.
    pub fn perturb_weights(&mut self, seed: u64) -> Result<(), TrainError> {
        self.perturb_masters(seed)?;
        self.refresh_weight_copies()
    }

    /// [`Engine::perturb_weights`] without the copies.
    pub(crate) fn perturb_masters(&mut self, seed: u64) -> Result<(), TrainError> {
        if !self.plan.optimizer.masters.is_fp32() {
            return Err(TrainError::Setting {
                setting: "perturbed weights",
                expected: "master weights in FP32".to_string(),
                got: format!("masters in {}", self.plan.optimizer.masters),
                hint: Some("compare runs of several seeds instead".to_string()),
            });
        }
        let mut buffer: Vec<f32> = Vec::new();
        for index in 0..self.program().parameters.len() {
            let state = self.program().parameters[index].clone();
            if state.master.only_in_shard().is_some() {
                buffer = self.read_master_slice(index)?;
            } else {
                buffer.clear();
                buffer.resize(self.program().value(state.master.value()).elements(), 0.0);
                self.read_value(state.master.value(), cast_slice_mut(&mut buffer))?;
            }
            if let Some(split) = state.split {
                // The random bits are drawn for the whole parameter.
                let slice_shape = self.program().value(state.master.value()).shape.clone();
                let mut full = vec![0f32; self.program().whole_shape(&state).iter().product()];
                split.insert(&buffer, &slice_shape, &mut full);
                buffer = full;
            }
            init::perturb(seed, &state.name, &mut buffer);
            self.write_part(state.master.value(), cast_slice(&buffer))?;
        }
        Ok(())
    }

    /// Sets the counters of applied and skipped steps.
    ///
    /// # Errors
    /// The backend fails.
    pub fn set_applied_steps(&mut self, applied: u64, skipped: u64) -> Result<(), TrainError> {
        self.skipped_steps = skipped;
        self.steps_begun = applied + skipped;
        let counters = self.program().host.counters;
        counters.map_or(Ok(()), |id| self.write_value(id, cast_slice(&[applied, skipped])))
    }

    /// Sets the gradient norm of the last step, by which updates in the backward pass clip.
    pub(crate) fn set_last_norm(&mut self, norm: f32) -> Result<(), TrainError> {
        let id = self.program().host.grad_norm;
        id.map_or(Ok(()), |id| self.write_value(id, &norm.to_le_bytes()))
    }

    /// Reads the gradient norm of the last step.
    pub(crate) fn last_norm(&mut self) -> Result<f32, TrainError> {
        let mut bytes = [0; 4];
        if let Some(id) = self.program().host.grad_norm {
            self.read_value(id, &mut bytes)?;
        }
        Ok(f32::from_le_bytes(bytes))
    }

    /// Sets the seed of stochastic rounding, which [`Engine::initialize`] sets too.
    pub fn set_rounding_seed(&mut self, seed: u64) {
        self.rounding_seed = seed;
    }

    /// Reads the counters of applied and skipped steps.
    ///
    /// # Errors
    /// The backend fails.
    pub fn applied_steps(&mut self) -> Result<(u64, u64), TrainError> {
        let mut counters = [0u64; 2];
        if let Some(id) = self.program().host.counters {
            self.read_value(id, cast_slice_mut(&mut counters))?;
        }
        Ok((counters[0], counters[1]))
    }

    /// Recomputes the compute copies from the master weights. A collective of all ranks if masters
    /// are sharded.
    ///
    /// # Errors
    /// The backend fails.
    pub fn refresh_weight_copies(&mut self) -> Result<(), TrainError> {
        self.scatter_masters()?;
        Ok(self.executor.run_phase(&self.training, Phase::Weights)?)
    }

    /// Writes a value of the training program.
    ///
    /// # Errors
    /// Bytes of the wrong length.
    pub fn write_value(&mut self, id: ValueId, bytes: &[u8]) -> Result<(), TrainError> {
        Ok(self.executor.write(self.training.program(), id, bytes)?)
    }

    /// Reads a value of the training program.
    ///
    /// # Errors
    /// Bytes of the wrong length.
    pub fn read_value(&mut self, id: ValueId, bytes: &mut [u8]) -> Result<(), TrainError> {
        Ok(self.executor.read(self.training.program(), id, bytes)?)
    }

    /// Runs a step on the data of the last step, first as a whole and then call by call, and
    /// returns the time of each call.
    ///
    /// # Errors
    /// The device fails.
    pub fn profile_step(&mut self) -> Result<Vec<CallTime>, TrainError> {
        Ok(self.executor.profile(&self.training)?)
    }

    /// Whether the device runs asynchronously once a step is started.
    pub fn is_asynchronous(&self) -> bool {
        self.device != Device::Cpu
    }

    /// Device of the engine.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Computes the mean loss on one micro-batch without training; batches as in [`Engine::step`],
    /// but of [`Engine::evaluation_rows`] sequences.
    ///
    /// The stages of a pipeline evaluate the same batch together; the last stage returns the loss,
    /// the others return zero. Context-parallel ranks also evaluate a batch together, and each
    /// returns its tokens' contribution to the mean.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn evaluate(&mut self, inputs: &[i32], targets: &[i32]) -> Result<f32, TrainError> {
        let targets = &*masked_targets(inputs, targets, self.document_end);
        let rank_inputs = self.part_of_sequences(inputs);
        let rank_targets = self.part_of_sequences(targets);
        let (bounds, places) = self.documents_of(&rank_inputs);
        let program = self.evaluation.program();
        let host = program.host.clone();
        let writes = [
            (host.tokens, cast_slice(&rank_inputs)),
            (host.targets, cast_slice(&rank_targets)),
            (host.documents, cast_slice(&bounds)),
            (host.positions, cast_slice(&places)),
        ];
        for (id, bytes) in writes {
            if let Some(id) = id {
                self.executor.write(program, id, bytes)?;
            }
        }
        if let Some(id) = host.loss_scale {
            self.executor.write(program, id, cast_slice(&[loss_scale(targets)]))?;
        }
        self.executor.run(&self.evaluation)?;
        let mut loss = [0f32; 1];
        if let Some(id) = host.loss {
            self.executor.read(self.evaluation.program(), id, cast_slice_mut(&mut loss))?;
        }
        self.counts.add(&self.per_evaluation);
        Ok(loss[0])
    }

    /// Repeats the last evaluation `count` times back to back and synchronizes once, to time a
    /// forward pass without the host's work for a batch. Not for pipeline stages.
    ///
    /// # Errors
    /// The device fails.
    pub fn repeat_evaluation(&mut self, count: usize) -> Result<(), TrainError> {
        for _ in 0..count {
            for index in 0..self.evaluation.program().schedule.len() {
                self.executor.invoke(&self.evaluation, index)?;
            }
        }
        Ok(self.executor.backend_mut().synchronize()?)
    }

    /// Sequences of one evaluation.
    pub fn evaluation_rows(&self) -> usize {
        self.evaluation.program().batch
    }

    /// The GEMMs of the model that guards watch and that can fall back, one entry for each weight.
    pub fn gemms(&self) -> &[Gemm] {
        &self.gemms
    }

    /// Elements of the weight of each of [`Engine::gemms`].
    pub fn gemm_elements(&self) -> Vec<u64> {
        self.gemms.iter().map(|gemm| gemm.elements).collect()
    }

    /// Compiles again with `gemms`, indices into [`Engine::gemms`], in BF16; the list replaces
    /// earlier lists. Weights and optimizer state stay in place. A collective of all ranks.
    ///
    /// # Errors
    /// An index is out of range, or lowering fails.
    pub fn fall_back(&mut self, gemms: &[usize], reason: &str) -> Result<(), TrainError> {
        let moved: Vec<_> = gemms.iter().map(|&gemm| (gemm, Format::Bf16)).collect();
        self.set_precision(&moved, reason, self.is_repaired)
    }

    /// Whether the forward GEMMs run in BF16, as the policy's repair says.
    pub fn is_repaired(&self) -> bool {
        self.is_repaired
    }

    /// [`Engine::fall_back`] to BF16 or MXFP8, with the forward GEMMs in BF16 if `is_repaired` and
    /// the policy has a repair. A collective of all ranks.
    ///
    /// # Errors
    /// As [`Engine::fall_back`].
    pub fn set_precision(
        &mut self,
        moved: &[(usize, Format)],
        reason: &str,
        is_repaired: bool,
    ) -> Result<(), TrainError> {
        let forced = moved.iter().map(|&(index, format)| {
            let gemm = self.gemms.get(index).ok_or_else(|| TrainError::Setting {
                setting: "GEMMs that fall back",
                expected: format!("indices below {}", self.gemms.len()),
                got: index.to_string(),
                hint: Some("`Engine::gemms` lists them".to_string()),
            })?;
            Ok((format, gemm.weight.clone()))
        });
        let forced: Vec<(Format, String)> = forced.collect::<Result<_, TrainError>>()?;
        let repaired = self.policy.repaired().filter(|_| is_repaired);
        let policy = repaired.unwrap_or_else(|| self.policy.clone());
        let policy = [Format::Bf16, Format::MXFP8].into_iter().fold(
            policy.without_forced(),
            |policy, format| {
                let of_format = forced.iter().filter(|(it, _)| *it == format);
                policy.force(format, of_format.map(|(_, weight)| (weight.as_str(), reason)))
            },
        );
        let plan = Plan { policy, ..self.plan.clone() };
        let arena_bytes = self.executor.arena_bytes();
        let catalog = self.catalog.as_ref();
        let program = lower_within(&self.graph, &plan, arena_bytes, catalog, &self.target)?;
        let evaluation =
            lower_evaluation(&self.graph, &plan, &program, self.catalog.as_ref(), &self.target)?;
        self.check_state_stays(&program)?;
        self.executor.backend_mut().forget_prepared()?;
        self.statistics = statistics_of(&program, &self.gemms);
        self.loads = load_counters(&program);
        self.per_step = RunCounts::of_step(&program);
        self.per_evaluation = RunCounts::of_evaluation(&evaluation);
        self.plan = Plan { precision: program.precision.clone(), ..plan };
        self.measuring = None;
        self.products = vec![Products::default(); program.bodies.len()];
        self.training = self.executor.load(program)?;
        self.evaluation = self.executor.load(evaluation)?;
        self.is_repaired = is_repaired;
        self.load_measuring()?;
        self.refresh_weight_copies()
    }

    fn check_state_stays(&self, program: &Program) -> Result<(), KernelError> {
        let places = |program: &Program| -> Vec<_> {
            let optimizer = program.values_of(MemoryKind::Optimizer);
            optimizer.map(|value| (value.name.clone(), value.range)).collect()
        };
        if places(program) == places(self.program()) {
            return Ok(());
        }
        Err(KernelError::Run {
            call: "fall back".to_string(),
            what: "the optimizer state would move".to_string(),
        })
    }
}

impl MasterWeights for Engine {
    fn program(&self) -> &Program {
        Engine::program(self)
    }

    fn write_master(&mut self, id: ValueId, bytes: &[u8]) -> Result<(), TrainError> {
        self.write_part(id, bytes)
    }

    fn refresh_copies(&mut self) -> Result<(), TrainError> {
        self.refresh_weight_copies()
    }
}
