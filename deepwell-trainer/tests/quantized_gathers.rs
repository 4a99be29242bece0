//! Ranks that have weights in slices gather quantized ones as data and scales, in place of FP32
//! masters: the bits of ranks that have them whole, over fewer bytes.

#[expect(dead_code, reason = "matrices here have more rows than those of other tests")]
mod ranks;
mod shard_slices;

use bytemuck::cast_slice_mut;
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Call, Instance, Op, Phase, Program};
use deepwell_kernels::{Backend, CallAction, KernelError, Observer};
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::{CompileOptions, Engine, Parallel, TrainError, World};

use ranks::reference::{CLIP, LEARNING_RATE, SEED};
use ranks::{hardware, masters_of};
use shard_slices::{masters, slices};

const SEQ: usize = 32;
const STEPS: usize = 3;

/// Two ranks cut all but the projections to keys and values between blocks, four the first two of
/// the feed-forward layers.
fn model() -> LlamaConfig {
    LlamaConfig {
        hidden_size: 256,
        intermediate_size: 512,
        ..LlamaConfig::preset("llama-micro").unwrap()
    }
}

fn options(precision: &str, zero: u8, ranks: usize) -> CompileOptions {
    CompileOptions {
        micro_batch: Some(1),
        parallel: Parallel { zero, ..Parallel::data(ranks) },
        ..CompileOptions::new(PrecisionPolicy::preset(precision).unwrap(), SEQ, ranks)
    }
}

fn world(precision: &str, zero: u8, ranks: usize) -> World {
    let graph = capture(&model()).unwrap();
    World::compile(graph, hardware(), &options(precision, zero, ranks)).unwrap()
}

/// Leaves out a call, if it has a name.
struct LeftOut(Option<String>);

impl Observer for LeftOut {
    fn before(
        &mut self,
        _program: &Program,
        call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        let is_it = self.0.as_ref().is_some_and(|name| *name == call.name);
        Ok(if is_it { CallAction::Skip } else { CallAction::Run })
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

fn step(engine: &mut Engine, at: usize, fault: Option<&str>) -> Result<[u32; 2], TrainError> {
    let rows = engine.program().target.ranks.world_size as usize;
    let (inputs, targets) = ranks::reference::batch(at, rows, SEQ);
    let (rate, clip) = (f64::from(LEARNING_RATE), f64::from(CLIP));
    let mut fault = LeftOut(fault.map(str::to_string));
    let outcome = engine.step_observed(&inputs, &targets, rate, clip, &mut fault)?;
    Ok([outcome.loss.to_bits(), outcome.grad_norm.to_bits()])
}

/// Loss and norm of each step, the loss of an evaluation, and the masters.
type Bits = (Vec<[u32; 2]>, u32, Vec<u32>);

fn train(mut world: World) -> Bits {
    let program = world.first().program().clone();
    let ends = world.on_all(|engine| {
        engine.initialize(SEED)?;
        let steps: Result<Vec<_>, _> = (0..STEPS).map(|at| step(engine, at, None)).collect();
        let (inputs, targets) = ranks::reference::batch(9, 1, SEQ);
        let evaluated = engine.evaluate(&inputs, &targets)?.to_bits();
        let mut whole = Vec::new();
        if program.shards.is_empty() {
            for id in masters_of(&program) {
                let mut values = vec![0u32; program.value(id).elements()];
                engine.read_value(id, cast_slice_mut(&mut values))?;
                whole.extend(values);
            }
        }
        Ok((steps?, evaluated, whole, slices(engine)?))
    });
    let ends = ends.unwrap();
    for end in &ends {
        assert!((&end.0, end.1) == (&ends[0].0, ends[0].1), "ranks saw other losses");
    }
    let (steps, evaluated, whole, _) = ends[0].clone();
    let of_ranks: Vec<_> = ends.into_iter().map(|(.., slices)| slices).collect();
    let masters = if whole.is_empty() { masters(&program, &of_ranks) } else { whole };
    (steps, evaluated, masters)
}

/// Names of the gathers of weights.
fn gathers(program: &Program) -> Vec<&Call> {
    let is_gather = |call: &&Call| {
        matches!(&call.op, Op::Collective(_)) && call.name.starts_with("all_gather.")
    };
    program.calls.iter().filter(is_gather).filter(|call| call.phase != Phase::Optimizer).collect()
}

#[test]
fn quantized_weights_train_as_those_of_whole_masters_do() {
    for (precision, ranks) in
        [("mxfp8", 2), ("mxfp8", 4), ("mxfp8-128", 2), ("mxfp8-2d", 2), ("mxfp8-floor", 2)]
    {
        let expected = train(world(precision, 0, ranks));
        for zero in [2, 3] {
            let world = world(precision, zero, ranks);
            let scales = gathers(world.first().program());
            assert!(scales.iter().any(|call| call.name.contains(".planes.")));
            let got = train(world);
            let what = format!("ZeRO {zero}, {precision}, {ranks} ranks");
            assert_eq!((&got.0, got.1), (&expected.0, expected.1), "{what}");
            assert!(got.2 == expected.2, "{what}: masters");
        }
    }
}

/// Four bytes an element of what comes as masters; one and a thirty-second of what comes quantized:
/// in ZeRO 2 along both axes, in ZeRO 3 along that which a pass reads.
#[test]
fn planes_that_a_pass_reads_are_gathered() {
    let listed = |zero: u8| {
        let program = world("mxfp8", zero, 2).first().program().clone();
        let gathers = gathers(&program).into_iter().filter(|call| call.layer.is_none());
        let is_quantized = |call: &&Call| !call.name.starts_with("all_gather.weights.");
        let listed = gathers.filter(is_quantized).map(|call| {
            let names = call.outputs().iter().map(|it| &*program.value(it.value).name);
            let names: Vec<&str> = names.collect();
            format!("{} {} {}", call.name, call.cost.bytes_on_link, names.join(" "))
        });
        listed.collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!("zero_2", listed(2));
    insta::assert_snapshot!("zero_3", listed(3));
}

/// Of a stack of experts ranks have whole matrices, which arrive where they lie along both axes.
#[test]
fn experts_train_as_those_of_whole_masters_do() {
    let graph = capture(&LlamaConfig::preset("moe-micro").unwrap()).unwrap();
    for (ranks, expert) in [(2, 1), (4, 2)] {
        let world = |zero: u8| {
            let options = options("mxfp8", zero, ranks);
            let parallel = Parallel { expert, ..options.parallel };
            let options = CompileOptions { parallel, ..options };
            World::compile(graph.clone(), hardware(), &options).unwrap()
        };
        let steps = |zero: u8| {
            let ends = world(zero).on_all(|engine| {
                engine.initialize(SEED)?;
                (0..STEPS).map(|at| step(engine, at, None)).collect::<Result<Vec<_>, _>>()
            });
            ends.unwrap()
        };
        let expected = steps(0);
        for zero in [2, 3] {
            let program = world(zero).first().program().clone();
            let of_experts = |call: &&Call| {
                let mut slices = call.inputs().iter().map(|it| program.value(it.value));
                call.name.contains(".planes.") && slices.any(|slice| slice.name.contains("experts"))
            };
            assert!(gathers(&program).iter().any(of_experts), "{ranks} ranks");
            let joins = program.calls.iter().filter(|call| matches!(call.op, Op::JoinParts(_)));
            assert_eq!(joins.filter(|call| call.name.contains("experts")).count(), 0);
            assert_eq!(steps(zero), expected, "ZeRO {zero}, {ranks} ranks, expert {expert}");
        }
    }
}

/// What is not gathered so says why.
#[test]
fn masters_are_gathered_for_a_reason() {
    let program = world("mxfp8", 3, 4).first().program().clone();
    let of_masters = gathers(&program).into_iter().filter(|it| it.name.contains(".masters."));
    let reasons: Vec<String> = of_masters.map(|call| call.rejected[0].reason.clone()).collect();
    assert!(!reasons.is_empty());
    for reason in reasons {
        let expected = "on 4 ranks are not whole blocks of E4M3: they are with a multiple of 128";
        assert!(reason.contains(expected), "{reason}");
    }
}

#[test]
fn planted_faults_are_seen() {
    for (zero, left_out) in [
        (2, "quantize.shard.4"),
        (2, "all_gather.planes.3"),
        (2, "join.model.layers.0.mlp.gate_proj.weight.mx.col"),
        (2, "join.model.layers.0.mlp.gate_proj.weight.mx.col.scale"),
        (3, "quantize.shard.4"),
        (3, "quantize.shard.4.again"),
        (3, "all_gather.planes.4"),
        (3, "all_gather.planes.4.again"),
        (3, "join.model.layers.0.mlp.gate_proj.weight.mx.col.again"),
        (3, "join.model.layers.0.mlp.gate_proj.weight.mx.col.scale.again"),
    ] {
        let mut world = world("mxfp8", zero, 2);
        let known = world.first().program().calls.iter().any(|call| call.name == left_out);
        assert!(known, "{left_out}");
        let mut train = |fault: Option<&str>| {
            let steps = world.on_all(|engine| {
                engine.initialize(SEED)?;
                (0..STEPS).map(|at| step(engine, at, fault)).collect::<Result<Vec<_>, _>>()
            });
            steps.unwrap().remove(0)
        };
        let expected = train(None);
        assert!(train(Some(left_out)) != expected, "ZeRO {zero} without {left_out} is the same");
    }
}

/// What is counted of a weight's slices is of the layer that reads it, and of all of it.
#[test]
fn slices_are_counted_as_whole_weights_are() {
    let counted = |zero: u8| {
        let ends = world("mxfp8", zero, 2).on_all(|engine| {
            engine.initialize(SEED)?;
            step(engine, 0, None)?;
            engine.statistics_of_ranks()
        });
        let mut counted: Vec<(std::sync::Arc<[usize]>, u32)> =
            (ends.unwrap().remove(0).into_iter())
                .map(|it| (it.gemms, it.stats.amax.to_bits()))
                .collect();
        counted.sort_unstable();
        counted
    };
    let expected = counted(0);
    assert!(expected.len() > 20);
    assert_eq!(counted(2), expected);
}

/// GEMMs that fall back keep the slices of their weight's state, and gather casts of them.
#[test]
fn ranks_fall_back_together() {
    let train = |zero: u8| {
        let ends = world("mxfp8", zero, 2).on_all(|engine| {
            engine.initialize(SEED)?;
            step(engine, 0, None)?;
            // Queries, values and the last matrix of the second layer.
            engine.fall_back(&[7, 9, 13], "a test")?;
            step(engine, 1, None)
        });
        let ends = ends.unwrap();
        assert_eq!(ends[0], ends[1]);
        ends[0]
    };
    let expected = train(0);
    assert_eq!([train(2), train(3)], [expected; 2]);
}
