//! Ranks that have gradients (ZeRO 2) and weights (ZeRO 3) in slices train as ranks that have them
//! whole: the same bits, of less memory.
//!
//! With several micro-batches in a step gradients are summed over the ranks first and then over the
//! micro-batches, and the reference sums in that order.

mod ranks;
mod shard_slices;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Call, Instance, MemoryKind, Program, verify_program};
use deepwell_kernels::{Backend, CallAction, KernelError, Observer};
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::{CompileOptions, Device, Engine, Parallel, TrainError, World};

use ranks::reference::{CLIP, Case, LEARNING_RATE, SEED};
use ranks::{graph, hardware};
use shard_slices::{masters, slices};

const SEQ: usize = 32;
const STEPS: usize = 4;

fn world(precision: &str, zero: u8, ranks: usize, rows: usize) -> World {
    let policy = PrecisionPolicy::preset(precision).unwrap();
    let options = CompileOptions {
        micro_batch: Some(1),
        parallel: Parallel { zero, ..Parallel::data(ranks) },
        ..CompileOptions::new(policy, SEQ, ranks * rows)
    };
    World::compile(graph(), hardware(), &options).unwrap()
}

fn step(
    engine: &mut Engine,
    step: usize,
    rows: usize,
    fault: &mut dyn Observer,
) -> Result<[u32; 2], TrainError> {
    let (inputs, targets) = ranks::reference::batch(step, rows, SEQ);
    let (rate, clip) = (f64::from(LEARNING_RATE), f64::from(CLIP));
    let outcome = engine.step_observed(&inputs, &targets, rate, clip, fault)?;
    Ok([outcome.loss.to_bits(), outcome.grad_norm.to_bits()])
}

/// Trains, and gives loss and norm of each step, evaluations, and the masters.
fn run(mut world: World, rows: usize) -> (Vec<[u32; 2]>, Vec<u32>, Vec<u32>) {
    let rows = rows * world.size();
    let program = world.first().program().clone();
    let ends = world.on_all(|engine| {
        engine.initialize(SEED)?;
        let steps: Result<Vec<_>, _> =
            (0..STEPS).map(|at| step(engine, at, rows, &mut NoFault)).collect();
        let (inputs, targets) = ranks::reference::batch(9, 1, SEQ);
        let evaluated = engine.evaluate(&inputs, &targets)?.to_bits();
        Ok((steps?, evaluated, slices(engine)?))
    });
    let ends = ends.unwrap();
    assert!(ends.iter().all(|(steps, ..)| *steps == ends[0].0), "ranks saw other losses");
    let of_ranks: Vec<_> = ends.iter().map(|(_, _, slices)| slices.clone()).collect();
    let evaluated = ends.iter().map(|(_, loss, _)| *loss).collect();
    (ends[0].0.clone(), evaluated, masters(&program, &of_ranks))
}

struct NoFault;

impl Observer for NoFault {
    fn before(
        &mut self,
        _program: &Program,
        _call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        Ok(CallAction::Run)
    }

    fn after(
        &mut self,
        _program: &Program,
        _call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        Ok(())
    }
}

/// Leaves out a call.
struct LeftOut(&'static str);

impl Observer for LeftOut {
    fn before(
        &mut self,
        _program: &Program,
        call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        Ok(if call.name == self.0 { CallAction::Skip } else { CallAction::Run })
    }

    fn after(
        &mut self,
        _program: &Program,
        _call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        Ok(())
    }
}

/// Three ranks cut parameters in the middle, and fill the last slice up.
#[test]
fn slices_of_gradients_and_weights_train_as_whole_ones_do() {
    for precision in ["f32", "bf16", "mxfp8"] {
        for (ranks, rows) in [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)] {
            let case =
                Case { device: Device::Cpu, precision, seq: SEQ, parts: ranks, rows, steps: STEPS };
            let expected = if rows == 1 { case.run() } else { case.run_by_micro_batch() };
            let mut evaluations = Vec::new();
            for zero in [2, 3] {
                let what = format!("ZeRO {zero}, {precision}, {ranks} ranks, {rows} rows");
                let (steps, evaluated, masters) = run(world(precision, zero, ranks, rows), rows);
                for (got, expected) in steps.iter().zip(&expected.steps) {
                    assert_eq!(got[1], expected[1], "{what}: norm");
                    let [loss, expected] = [got[0], expected[0]].map(f32::from_bits);
                    // Within a micro-batch a loss goes through FP64: with several of them each way
                    // rounds that of a micro-batch, and each sum of them, once at most.
                    let parts = if rows == 1 { 0 } else { ranks * rows };
                    let bound = 2.0 * parts as f32 * f32::EPSILON / 2.0 * expected;
                    assert!((loss - expected).abs() <= bound, "{what}: {loss} beside {expected}");
                }
                assert!(masters == expected.masters, "{what}: masters");
                evaluations.push(evaluated);
            }
            assert_eq!(evaluations[0], evaluations[1], "{precision}, {ranks} ranks, {rows} rows");
        }
    }
}

#[test]
fn planted_faults_are_seen() {
    for (zero, left_out) in [
        (2, "reduce_scatter.gradients.1"),
        (2, "all_gather.weights.1"),
        (2, "cast.shard.1"),
        (3, "reduce_scatter.gradients.1"),
        (3, "all_gather.weights.1"),
        (3, "all_gather.weights.1.again"),
        (3, "cast.shard.1.again"),
    ] {
        let mut world = world("bf16", zero, 2, 1);
        let known = world.first().program().calls.iter().any(|call| call.name == left_out);
        assert!(known, "{left_out}");
        let mut train = |fault: bool| -> Vec<[u32; 2]> {
            let steps = world.on_all(|engine| {
                engine.initialize(SEED)?;
                let mut fault: Box<dyn Observer> =
                    if fault { Box::new(LeftOut(left_out)) } else { Box::new(NoFault) };
                (0..3).map(|at| step(engine, at, 2, fault.as_mut())).collect::<Result<Vec<_>, _>>()
            });
            steps.unwrap().remove(0)
        };
        let expected = train(false);
        assert!(train(true) != expected, "ZeRO {zero} without {left_out} is the same");
    }
}

/// What is not gathered before it is read, or not scattered behind the last that writes it, is no
/// program.
#[test]
fn weights_that_are_not_there_are_refused() {
    for (call, earlier, expected) in [
        ("all_gather.weights.1", false, "which is not there (any more)"),
        ("all_gather.weights.1.again", false, "which is not there (any more)"),
        ("reduce_scatter.gradients.1", true, "scattered already"),
    ] {
        let program = world("bf16", 3, 2, 1).first().program().clone();
        verify_program(&program).unwrap();
        let at = program.calls.iter().position(|it| it.name == call).unwrap();
        let other = if earlier { at - 1 } else { at + 1 };
        let mut broken = program.clone();
        broken.calls.swap(at, other);
        let error = verify_program(&broken).unwrap_err().to_string();
        assert!(error.contains(expected) || error.contains("not there"), "{call}: {error}");
    }
    let mut broken = world("bf16", 2, 2, 1).first().program().clone();
    let shard = broken.calls.iter().position(|it| it.name == "reduce_scatter.gradients.1").unwrap();
    // A sum into slices of gradients that stay as they are.
    broken.calls[shard].phase = deepwell_ir::Phase::Forward;
    assert!(verify_program(&broken).is_err());
}

/// What is gathered is in BF16 where calls read nothing else, and half as long.
#[test]
fn copies_in_bf16_are_gathered_in_place_of_masters() {
    for zero in [2, 3] {
        let bytes = |precision: &str| {
            let program = world(precision, zero, 2, 1).first().program().clone();
            let gathers = program.calls.iter().filter(|call| call.name.starts_with("all_gather."));
            gathers.map(|call| call.cost.bytes_on_link).sum::<u64>()
        };
        let [f32, bf16, mxfp8] = ["f32", "bf16", "mxfp8"].map(bytes);
        assert!(f32.abs_diff(2 * bf16) < f32 / 50, "ZeRO {zero}: {bf16} beside {f32}");
        // Blocks are quantized from FP32; embedding and head are not quantized.
        assert!(bf16 < mxfp8 && mxfp8 < f32, "ZeRO {zero}: {mxfp8} beside {bf16} and {f32}");
    }
}

/// Coins are those of whole parameters, whoever has which slice.
#[test]
fn slices_are_perturbed_as_whole_masters_are() {
    let perturbed = |zero: u8| {
        let mut world = world("bf16", zero, 3, 1);
        let program = world.first().program().clone();
        let ends = world.on_all(|engine| {
            engine.initialize(SEED)?;
            let before = slices(engine)?;
            engine.perturb_weights(5)?;
            Ok((before, slices(engine)?))
        });
        let (before, after): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
        (masters(&program, &before), masters(&program, &after))
    };
    let expected = perturbed(1);
    assert!(expected.0 != expected.1);
    for zero in [2, 3] {
        assert!(perturbed(zero) == expected, "ZeRO {zero}");
    }
}

#[test]
fn ranks_fall_back_together() {
    for zero in [2, 3] {
        let ends = world("mxfp8", zero, 2, 1).on_all(|engine| {
            engine.initialize(SEED)?;
            step(engine, 0, 2, &mut NoFault)?;
            // Queries, values and the last matrix of the second layer.
            engine.fall_back(&[7, 9, 13], "a test")?;
            step(engine, 1, 2, &mut NoFault)
        });
        let ends = ends.unwrap();
        assert_eq!(ends[0], ends[1]);
    }
}

/// Of a model of many layers each stage takes less: gradients are slices, then weights are.
#[test]
fn memory_falls_with_each_stage() {
    let config = LlamaConfig { num_layers: 12, ..LlamaConfig::preset("llama-micro").unwrap() };
    let bytes = |zero: u8| {
        let options = CompileOptions {
            micro_batch: Some(1),
            parallel: Parallel { zero, ..Parallel::data(4) },
            ..CompileOptions::new(PrecisionPolicy::bf16(), SEQ, 4)
        };
        let world = World::compile(capture(&config).unwrap(), hardware(), &options).unwrap();
        let program = world.first().program().clone();
        let of = |kind| program.values_of(kind).map(|value| value.range.bytes).sum::<usize>();
        (of(MemoryKind::Gradients), of(MemoryKind::Weights), program.arena.bytes)
    };
    let [whole, state, gradients, weights] = [0, 1, 2, 3].map(bytes);
    // A slice of four, each filled up to whole 64 bytes.
    assert!(gradients.0 < whole.0 / 4 + whole.0 / 50, "{gradients:?} beside {whole:?}");
    assert_eq!(weights.1, 0);
    assert!(state.2 < whole.2 && gradients.2 < state.2 && weights.2 < gradients.2);
}
