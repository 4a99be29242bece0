//! Ranks without exchanges: one that runs the parts of all of them.

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::ops::IGNORED_TARGET;
use deepwell_ir::{Call, Phase, ValueId};
use deepwell_kernels::{Executor, LoadedProgram};
use deepwell_plan::{OptimizerSpec, PlanRequest, autoplan};
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::{Device, OpenDevice, init};

use super::{graph, hardware, masters_of, moments_of};

pub(crate) const SEED: u64 = 7;
pub(crate) const LEARNING_RATE: f32 = 1e-2;
pub(crate) const CLIP: f32 = 0.5;

/// Inputs and targets of a step `[rows, seq]`. Rows leave out different numbers of targets, so that
/// a mean of the ranks' means is another number.
pub(crate) fn batch(step: usize, rows: usize, seq: usize) -> (Vec<i32>, Vec<i32>) {
    let token = |row: usize, at: usize| {
        let number = step * 7919 + row * 104_729 + at * at * 31 + at * 7;
        (number % 256) as i32
    };
    let inputs = (0..rows * seq).map(|it| token(it / seq, it % seq)).collect();
    let targets = (0..rows * seq).map(|it| match (it / seq, it % seq) {
        (row, at) if at < 3 * row => IGNORED_TARGET,
        (row, at) => token(row, at + 1),
    });
    (inputs, targets.collect())
}

/// What the losses of a step's tokens are multiplied by.
pub(crate) fn scale(targets: &[i32]) -> f32 {
    1.0 / targets.iter().filter(|&&target| target != IGNORED_TARGET).count() as f32
}

/// What a run gave: bits of loss and norm of each step, then of all masters, and of all moments
/// that are whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bits {
    pub(crate) steps: Vec<[u32; 2]>,
    pub(crate) masters: Vec<u32>,
    pub(crate) moments: Vec<u32>,
}

/// What the reference trains.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    pub(crate) device: Device,
    pub(crate) precision: &'a str,
    /// Tokens of a sequence.
    pub(crate) seq: usize,
    /// Ranks that there would be.
    pub(crate) parts: usize,
    /// Sequences of each, one a micro-batch.
    pub(crate) rows: usize,
    pub(crate) steps: usize,
}

impl Case<'_> {
    /// Trains, with gradients summed over the micro-batches of a rank first.
    pub(crate) fn run(self) -> Bits {
        let parts: Vec<usize> = (0..self.parts).collect();
        self.run_in_order(vec![parts])
    }

    /// Trains on parts of one micro-batch each: sums over the parts of a group first, but of what a
    /// call writes with the loss over a rank's own, the same of all groups.
    #[allow(dead_code, reason = "not every test has such ranks")]
    pub(crate) fn run_by_micro_batch(self) -> Bits {
        let Case { parts, rows, .. } = self;
        let group = |at: usize| (0..parts).map(|rank| rank * rows + at).collect();
        let alone = Case { parts: parts * rows, rows: 1, ..self };
        alone.run_in_order((0..rows).map(group).collect())
    }

    fn run_in_order(self, groups: Vec<Vec<usize>>) -> Bits {
        let mut reference = Reference { groups, ..Reference::new(self) };
        let steps = (0..self.steps).map(|step| reference.step(step)).collect();
        let program = reference.loaded.program().clone();
        let mut bits = |ids: Vec<ValueId>| {
            ids.into_iter().flat_map(|id| reference.read(id)).map(f32::to_bits).collect()
        };
        let masters = bits(masters_of(&program));
        Bits { steps, masters, moments: bits(moments_of(&program)) }
    }
}

struct Reference {
    executor: Executor,
    loaded: LoadedProgram,
    parts: usize,
    seq: usize,
    /// Parts in the order of sums: over those of a group, then over groups.
    groups: Vec<Vec<usize>>,
}

/// Sums of lists, in their order.
fn sum(lists: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
    let add = |mut sum: Vec<f32>, own: Vec<f32>| {
        sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        sum
    };
    lists.reduce(add).unwrap_or_default()
}

impl Reference {
    fn new(case: Case<'_>) -> Reference {
        let request = PlanRequest {
            seq: case.seq,
            global_batch: case.rows,
            policy: PrecisionPolicy::preset(case.precision).unwrap(),
            optimizer: OptimizerSpec::default(),
            memory_limit_bytes: None,
            micro_batch: Some(1),
            recompute: None,
            saved_activations: Default::default(),
        };
        let (graph, hardware) = (graph(), hardware());
        let OpenDevice { backend, catalog, target } = case.device.open(&hardware).unwrap();
        let planned = autoplan(&graph, &hardware, &request, catalog.as_ref(), &target).unwrap();
        let program = planned.program;
        let mut executor = Executor::new(backend, program.arena.bytes).unwrap();
        let loaded = executor.load(program.clone()).unwrap();
        for ((_, tensor), state) in graph.parameters().zip(&program.parameters) {
            let deepwell_ir::TensorKind::Parameter { init, .. } = tensor.kind else { panic!() };
            let mut values = vec![0f32; program.value(state.master.value()).elements()];
            init::fill(init, SEED, &state.name, &mut values);
            executor.write(&program, state.master.value(), cast_slice(&values)).unwrap();
        }
        executor.run_phase(&loaded, Phase::Weights).unwrap();
        Reference { executor, loaded, parts: case.parts, seq: case.seq, groups: Vec::new() }
    }

    fn read(&mut self, id: ValueId) -> Vec<f32> {
        let mut values = vec![0f32; self.loaded.program().value(id).elements()];
        self.executor.read(self.loaded.program(), id, cast_slice_mut(&mut values)).unwrap();
        values
    }

    fn step(&mut self, step: usize) -> [u32; 2] {
        let program = self.loaded.program().clone();
        let (host, rows) = (&program.host, program.batch * program.micro_batches);
        let (inputs, targets) = batch(step, self.parts * rows, self.seq);
        let gradients: Vec<ValueId> =
            program.parameters.iter().filter_map(|state| state.gradient).collect();
        let summed: Vec<ValueId> = gradients.into_iter().chain(host.loss).collect();
        let schedule = [LEARNING_RATE, CLIP];
        self.executor.write(&program, host.schedule.unwrap(), cast_slice(&schedule)).unwrap();
        let scale = [scale(&targets)];
        self.executor.write(&program, host.loss_scale.unwrap(), cast_slice(&scale)).unwrap();
        let mut of_parts: Vec<Vec<Vec<f32>>> = Vec::new();
        for part in 0..self.parts {
            for (index, invocation) in program.schedule.iter().enumerate() {
                let phase = program.bodies[invocation.body.index()].phase;
                if phase == Phase::Forward {
                    let row = part * rows + invocation.micro_batch as usize * program.batch;
                    let tokens = row * self.seq..(row + program.batch) * self.seq;
                    let values = [
                        (host.tokens.unwrap(), cast_slice(&inputs[tokens.clone()])),
                        (host.targets.unwrap(), cast_slice(&targets[tokens])),
                    ];
                    self.executor.stage(&program, invocation.slot, &values).unwrap();
                }
                if matches!(phase, Phase::Forward | Phase::Backward) {
                    self.executor.invoke(&self.loaded, index).unwrap();
                }
            }
            of_parts.push(summed.iter().map(|&id| self.read(id)).collect());
        }
        let writes_loss =
            |call: &&Call| call.outputs().iter().any(|output| Some(output.value) == host.loss);
        let beside_loss: Vec<ValueId> = (program.calls.iter().filter(writes_loss))
            .flat_map(|call| call.outputs().iter().map(|output| output.value))
            .collect();
        for (index, &id) in summed.iter().enumerate() {
            let of_group =
                |parts: &[usize]| sum(parts.iter().map(|&part| of_parts[part][index].clone()));
            let total = if beside_loss.contains(&id) {
                let of_rank = |place: usize| -> Vec<usize> {
                    self.groups.iter().map(|group| group[place]).collect()
                };
                sum((0..self.groups[0].len()).map(|place| of_group(&of_rank(place))))
            } else {
                sum(self.groups.iter().map(|group| of_group(group)))
            };
            self.executor.write(&program, id, cast_slice(&total)).unwrap();
        }
        for (index, invocation) in program.schedule.iter().enumerate() {
            let phase = program.bodies[invocation.body.index()].phase;
            if matches!(phase, Phase::Optimizer | Phase::Weights) {
                self.executor.invoke(&self.loaded, index).unwrap();
            }
        }
        [host.loss, host.grad_norm].map(|id| self.read(id.unwrap())[0].to_bits())
    }
}
