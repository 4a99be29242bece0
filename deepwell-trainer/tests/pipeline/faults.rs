//! Faults that are planted are seen, and what goes wrong on one stage is every stage's.

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{Call, Instance, ProcessGroup, Program};
use deepwell_kernels::{
    Backend, CallAction, Comm, CommError, Exchange, InProcess, KernelError, Observer,
};
use deepwell_trainer::{CompileOptions, World};

use super::observers::poisoned;
use super::ranks::hardware;
use super::{
    CLIP, LEARNING_RATE, Model, PATIENCE, ROWS, SEED, batch, compile, options, stages, tensors,
};

/// Sends the first two activations of each step in the other order.
struct Swapped {
    inner: InProcess,
    held: Option<Vec<u8>>,
    sent: usize,
}

impl Comm for Swapped {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn exchange(
        &mut self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let is_activation = exchange.kind == CollectiveKind::Send { to: 1 }
            && exchange.group.name == ProcessGroup::PIPELINE
            && self.inner.rank() == 0;
        if !is_activation {
            return self.inner.exchange(exchange, input, output);
        }
        self.sent += 1;
        if self.sent % ROWS == 1 {
            self.held = Some(input.to_vec());
            return Ok(());
        }
        self.inner.exchange(exchange, input, output)?;
        match self.held.take() {
            Some(held) => self.inner.exchange(exchange, &held, output),
            None => Ok(()),
        }
    }

    fn abort(&mut self, reason: &str) {
        self.inner.abort(reason);
    }
}

/// A fault in the first step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The gradients of a tied table stay apart.
    NoTiedSum,
    /// The norm is that of the first stage's gradients.
    OneStagesNorm,
}

impl Observer for Fault {
    fn before(
        &mut self,
        _program: &Program,
        call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        let is_tied = call.name.starts_with("all_reduce.tied.");
        Ok(match self {
            Fault::NoTiedSum if is_tied => CallAction::Skip,
            _ => CallAction::Run,
        })
    }

    fn after(
        &mut self,
        program: &Program,
        call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        if *self == Fault::OneStagesNorm && call.name == "all_gather.grad_norm.stages" {
            let range = program.value(call.outputs()[0].value).range;
            let mut sums = vec![0u64; range.bytes / size_of::<u64>()];
            backend.read(range, cast_slice_mut(&mut sums))?;
            let own = sums.len() / 2;
            sums[own..].fill(0);
            backend.write(range, cast_slice(&sums))?;
        }
        Ok(())
    }
}

#[test]
fn planted_faults_are_seen() {
    let step = |world: &mut World, fault: Fault| {
        let done = world.on_all(|engine| {
            engine.initialize(SEED)?;
            let (inputs, targets) = batch(0);
            let mut fault = fault;
            let outcome =
                engine.step_observed(&inputs, &targets, LEARNING_RATE, CLIP, &mut fault)?;
            Ok(([outcome.loss.to_bits(), outcome.grad_norm.to_bits()], tensors(engine)?))
        });
        done.expect("a step")
    };
    let options = options("bf16", stages(2));
    let sound = step(&mut compile(Model::TiedLlama, &options), Fault::None);
    for fault in [Fault::NoTiedSum, Fault::OneStagesNorm] {
        let faulty = step(&mut compile(Model::TiedLlama, &options), fault);
        let seen = faulty.iter().zip(&sound).any(|(a, b)| a.0 != b.0);
        assert!(seen, "{fault:?} changed no norm");
    }
    // Activations of one micro-batch with the targets of another.
    let wrap = |inner| -> Box<dyn Comm> { Box::new(Swapped { inner, held: None, sent: 0 }) };
    let comms = InProcess::world(2, PATIENCE);
    let graph = Model::TiedLlama.graph();
    let mut swapped = World::compile_on(comms, &wrap, graph, hardware(), &options).unwrap();
    let swapped = step(&mut swapped, Fault::None);
    assert!(swapped[0].0 != sound[0].0, "swapped micro-batches changed nothing");
    assert_eq!(swapped[0].0, swapped[1].0);
}

#[test]
fn a_step_that_is_not_finite_on_one_stage_is_skipped_on_all() {
    for (at, value) in [(0, f32::NAN), (1, f32::INFINITY), (2, f32::NAN)] {
        let options =
            CompileOptions { stage_layers: Some(vec![1, 2, 1]), ..options("mxfp8", stages(3)) };
        let after = compile(Model::Llama, &options).on_all(|engine| {
            engine.initialize(SEED)?;
            let (inputs, targets) = batch(0);
            engine.step(&inputs, &targets, LEARNING_RATE, CLIP)?;
            let before = tensors(engine)?;
            let number = if engine.rank() == at { value } else { 0.0 };
            let (inputs, targets) = batch(1);
            let gradient = |program: &Program| program.parameters[1].gradient;
            let mut poison = poisoned("grad_norm.squares", gradient, number);
            let outcome =
                engine.step_observed(&inputs, &targets, LEARNING_RATE, CLIP, &mut poison)?;
            assert!(outcome.skipped && !outcome.grad_norm.is_finite());
            assert!(tensors(engine)? == before, "a skipped step changes nothing");
            assert_eq!(engine.applied_steps()?, (1, 1));
            // And they go on.
            let outcome = engine.step(&inputs, &targets, LEARNING_RATE, CLIP)?;
            assert!(!outcome.skipped);
            Ok([outcome.loss.to_bits(), outcome.grad_norm.to_bits()])
        });
        let after = after.expect("steps");
        assert!(after.iter().all(|step| *step == after[0]), "{after:?}");
    }
}
