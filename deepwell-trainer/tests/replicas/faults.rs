//! What goes wrong on a rank or between ranks is seen, and ends all of them.

use std::time::Duration;

use deepwell_ir::{Call, Graph, Op, Program, verify_program};
use deepwell_kernels::{Backend, CallAction, Comm, CommError, Exchange, InProcess};
use deepwell_trainer::{Engine, TrainError, World};

use crate::observers::{Before, left_out, poisoned};
use crate::ranks::reference::{SEED, scale};
use crate::ranks::{graph, hardware};
use crate::reference;
use crate::train::{SEQ, STEPS, batch, bits, compile, observed, options, run, step, wide, world};

/// How long a rank waits for another; longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Sums in the order opposite to that of the ranks, as by who came when.
struct Reversed(InProcess);

impl Comm for Reversed {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn world_size(&self) -> u32 {
        self.0.world_size()
    }

    fn exchange(
        &mut self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let mut reversed = exchange.clone();
        reversed.group.ranks.reverse();
        self.0.exchange(&reversed, input, output)
    }

    fn abort(&mut self, reason: &str) {
        self.0.abort(reason);
    }
}

#[test]
fn another_order_of_sums_is_seen() {
    let expected = reference("bf16", 3, 1, false);
    let comms = InProcess::world(3, PATIENCE);
    let wrap = |comm| -> Box<dyn Comm> { Box::new(Reversed(comm)) };
    let options = options("bf16", 0, 3, 1);
    let world = World::compile_on(comms, &wrap, graph(), hardware(), &options).unwrap();
    // Every rank has the same sum.
    assert!(run(world, 0, STEPS).masters != expected.masters, "floats were added in another order");
}

/// A fault in the first step of a rank.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The mean of its own tokens in place of that of all.
    OwnMean,
    /// It reads the rows of rank 0.
    FirstRows,
    /// It leaves out what others sum, with them.
    NoSum,
}

#[test]
fn planted_faults_are_seen() {
    let expected = reference("bf16", 2, 1, false);
    for fault in [Fault::OwnMean, Fault::FirstRows, Fault::NoSum] {
        let got = world("bf16", 0, 2, 1).on_all(|engine| {
            engine.initialize(SEED)?;
            let (mut inputs, mut targets) = batch(0, 2);
            let own = engine.rank() * SEQ..(engine.rank() + 1) * SEQ;
            let own_scale = scale(&targets[own]);
            if matches!(fault, Fault::FirstRows) {
                inputs.copy_within(..SEQ, SEQ);
                targets.copy_within(..SEQ, SEQ);
            }
            let mut planted = Before(|program: &Program, call: &Call, to: &mut dyn Backend| {
                match (fault, &call.op) {
                    (Fault::OwnMean, Op::LinearCrossEntropyGrad(_)) => {
                        let scale = program.host.loss_scale.expect("a scale");
                        to.write(program.value(scale).range, &own_scale.to_le_bytes())?;
                    }
                    (Fault::NoSum, Op::Collective(_)) if call.name == "all_reduce.gradients.0" => {
                        return Ok(CallAction::Skip);
                    }
                    _ => {}
                }
                Ok(CallAction::Run)
            });
            let outcome = engine.step_observed(&inputs, &targets, 1e-2, 0.5, &mut planted)?;
            Ok([outcome.loss.to_bits(), outcome.grad_norm.to_bits()])
        });
        let got = got.unwrap();
        assert!(got.iter().any(|step| *step != expected.steps[0]), "{fault:?} changed nothing");
    }
}

/// Leaves out one call that gathers, scatters or copies slices after the other.
#[test]
fn calls_that_are_left_out_are_seen() {
    let check = |graph: &Graph, precision: &str, zero: u8, names: &[&str]| {
        let mut world = compile(graph, &options(precision, zero, 2, 1));
        let program = world.first().program().clone();
        let mut train = |fault: Option<&str>| {
            let steps = world.on_all(|engine| {
                engine.initialize(SEED)?;
                let mut fault = left_out(fault);
                (0..3).map(|at| observed(engine, at, &mut fault)).collect::<Result<Vec<_>, _>>()
            });
            steps.unwrap().remove(0)
        };
        let expected = train(None);
        for &name in names {
            assert!(program.calls.iter().any(|call| call.name == name), "{name}");
            assert!(train(Some(name)) != expected, "ZeRO {zero} without {name} is the same");
        }
    };
    let names = ["reduce_scatter.gradients.1", "all_gather.weights.1", "cast.shard.1"];
    check(&graph(), "bf16", 2, &names);
    let again = ["all_gather.weights.1.again", "cast.shard.1.again"];
    check(&graph(), "bf16", 3, &[&names[..2], &again].concat());
    let joined = "join.model.layers.0.mlp.gate_proj.weight.mx.col";
    let joined = [joined.to_string(), format!("{joined}.scale")];
    let names = ["quantize.shard.4", "all_gather.planes.3", &joined[0], &joined[1]];
    check(&wide(), "mxfp8", 2, &names);
    let joined = joined.map(|name| format!("{name}.again"));
    let planes = ["all_gather.planes.4", "all_gather.planes.4.again"];
    let names = ["quantize.shard.4", "quantize.shard.4.again", &joined[0], &joined[1]];
    check(&wide(), "mxfp8", 3, &[&names[..], &planes].concat());
}

#[test]
fn a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() {
    for (at, value) in [(0, f32::NAN), (1, f32::NAN), (2, f32::INFINITY)] {
        let mut world = world("mxfp8", 0, 3, 1);
        let skipped = world.on_all(|engine| {
            engine.initialize(SEED)?;
            step(engine, 0)?;
            let before = bits(engine)?;
            let (inputs, targets) = batch(1, 3);
            let number = if engine.rank() == at { value } else { 0.0 };
            let gradient = |program: &Program| program.parameters[5].gradient;
            let mut poison = poisoned("all_reduce.gradients.0", gradient, number);
            let outcome = engine.step_observed(&inputs, &targets, 1e-2, 0.5, &mut poison)?;
            assert!(outcome.skipped && !outcome.grad_norm.is_finite());
            assert!(bits(engine)? == before, "a skipped step changes nothing");
            assert_eq!(engine.applied_steps()?, (1, 1));
            // And they go on.
            step(engine, 2)
        });
        let skipped = skipped.unwrap();
        assert!(skipped.iter().all(|after| *after == skipped[0]), "{skipped:?}");
    }
}

#[test]
fn a_rank_that_fails_ends_all_and_is_named() {
    type Fails<'a> = &'a (dyn Fn(&mut Engine) -> Result<(), TrainError> + Sync);
    let check = |fails: Fails<'_>, begins: &str, expected: &str| {
        let mut world = world("mxfp8", 0, 3, 1);
        let begin = std::time::Instant::now();
        let error = world.on_all(|engine| {
            engine.initialize(SEED)?;
            if engine.rank() == 1 {
                fails(engine)?;
            }
            step(engine, 0)?;
            step(engine, 1)
        });
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(begins), "{error}");
        assert!(error.contains(expected), "{error}");
        assert!(begin.elapsed() < PATIENCE, "the others did not wait for it");
    };
    check(
        &|engine| engine.step(&[], &[], 0.1, 1.0).map(drop),
        "rank 1 of 3: ",
        "expected 96 inputs and targets",
    );
    // A token that is not in the vocabulary, in the part of rank 1.
    check(
        &|engine| {
            let (mut inputs, targets) = batch(0, 3);
            inputs[SEQ + 5] = 256;
            engine.step(&inputs, &targets, 0.1, 1.0).map(drop)
        },
        "rank 1 of 3: ",
        "token 256",
    );
    // It goes another way than the others; who sees it first says so.
    check(
        &|engine| {
            step(engine, 0)?;
            engine.statistics_of_ranks().map(drop)
        },
        "rank ",
        "wait for each other",
    );
}

#[test]
fn a_rank_that_panics_ends_all() {
    let panics = std::panic::catch_unwind(|| {
        let mut world = world("bf16", 0, 2, 1);
        let _ = world.on_all(|engine| {
            engine.initialize(SEED)?;
            assert!(engine.rank() == 0, "on purpose");
            step(engine, 0)
        });
    });
    let message = panics.unwrap_err();
    let message = message.downcast_ref::<&str>().copied().unwrap_or("");
    assert!(message.contains("on purpose"), "{message}");
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
