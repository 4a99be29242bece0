//! Ranks that have some of the experts each train as one rank does, but for the order in which
//! gradients are summed.
//!
//! What one rank computes for a token they compute from the same numbers in the same order, but for
//! one thing: what several experts of a rank give a token is rounded before the sums of ranks are
//! added up. Where a token has two experts there is nothing to round, and where a capacity has rows
//! sent in place of sums there are no such sums: the first step's gradients of experts are then to
//! the bit those of one rank where all ranks are one group.
//!
//! Gradients of all else are sums over ranks. Their bound is measured: in control runs one rank has
//! the sequences of each batch in another order, in which it then sums, and in others the last bits
//! of what ranks have summed for tokens are flipped at random: a sum of rounded parts is off by
//! about that. What ranks differ from one rank by may be [`FACTOR`] times what the furthest control
//! differs from its run by, for a control is one draw from the same chaos.

mod layouts;
mod rank_faults;

use std::time::Duration;

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{Call, DType, Graph, Instance, Op, ProcessGroup, Program, Split, verify_program};
use deepwell_kernels::{Backend, CallAction, Exchange, InProcess, KernelError, Observer};
use deepwell_moe::{RouterTraining, with_router_training};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Engine, Parallel, TrainError, World};

use crate::rank_faults::{
    Tampered, first_for_all, flip, furthest, own_for_all, own_part, relative_norm,
};

/// How long a rank waits for another; longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);
const SEQ: usize = 32;
const ROWS: usize = 4;
const STEPS: usize = 10;
/// The sequences of a batch in other orders.
const CONTROLS: [[usize; ROWS]; 3] = [[1, 2, 3, 0], [2, 0, 3, 1], [3, 1, 0, 2]];
const IN_ORDER: [usize; ROWS] = [0, 1, 2, 3];
/// Of two draws from one distribution one is seldom four times as far as the furthest of three.
const FACTOR: f64 = 4.0;

fn model(name: &str) -> Graph {
    let preset = |name| LlamaConfig::preset(name).unwrap();
    if name != FOUR_OF_EIGHT {
        return capture(&preset(name)).unwrap();
    }
    let mut config = preset("moe-micro");
    config.experts.as_mut().unwrap().experts_per_token = 4;
    capture(&config).unwrap()
}

/// moe-micro whose tokens have four experts each, so that a rank adds some of them up.
const FOUR_OF_EIGHT: &str = "four of eight";

/// The model with a capacity that no expert reaches: nothing is dropped, and rows are sent.
fn with_room_for_all(graph: &Graph) -> Graph {
    let training = RouterTraining { capacity_factor: Some(64.0), ..RouterTraining::default() };
    with_router_training(graph, &training).unwrap()
}

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

fn batch(step: usize, order: [usize; ROWS]) -> (Vec<i32>, Vec<i32>) {
    let token = |row: usize, at: usize| {
        ((step * 7919 + row * 104_729 + at * at * 31 + at * 7) % 256) as i32
    };
    let at = |it: usize| (order[it / SEQ], it % SEQ);
    let inputs = (0..ROWS * SEQ).map(|it| token(at(it).0, at(it).1));
    let targets = (0..ROWS * SEQ).map(|it| token(at(it).0, at(it).1 + 1));
    (inputs.collect(), targets.collect())
}

/// What goes wrong between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// A control: the last bits of what experts of several ranks gave tokens are flipped.
    Flips(u64),
    /// Gradients of the same experts on other ranks are left out.
    NoSum,
    /// The first rank's sums of squares count for all.
    NormOfFirst,
    /// Each rank sorts the tokens of others by what its own wanted.
    OwnChoices,
    /// Tokens of others have the gates of its own.
    OwnGates,
    /// What experts of other ranks give tokens does not come back.
    NotReturned,
}

impl Fault {
    /// What it does to the result of an exchange; `sent`: exchanges of rows that were sent so far.
    fn tamper(
        self,
        sent: &mut u64,
        (rank, exchange): (u32, &Exchange),
        input: &[u8],
        output: &mut [u8],
    ) {
        let (group, dtype) = (exchange.group.name.as_str(), exchange.dtype);
        let is_sent = dtype == DType::Bf16 && exchange.kind == CollectiveKind::AllToAll;
        *sent += u64::from(is_sent);
        let is_returned = is_sent && sent.is_multiple_of(2);
        match (self, &exchange.kind, group) {
            (Fault::Flips(seed), CollectiveKind::ReduceScatter { .. }, ProcessGroup::EXPERT) => {
                flip(dtype, 1, seed, output)
            }
            (Fault::NoSum, CollectiveKind::AllReduce { .. }, ProcessGroup::EXPERT_DATA) => {
                output.copy_from_slice(input);
            }
            (Fault::NormOfFirst, CollectiveKind::AllGather, ProcessGroup::EXPERT)
                if dtype == DType::U64 =>
            {
                first_for_all(input, output);
            }
            (Fault::OwnChoices, CollectiveKind::AllGather, ProcessGroup::EXPERT)
                if dtype == DType::I32 =>
            {
                own_for_all(input, output);
            }
            (Fault::OwnChoices, CollectiveKind::AllToAll, _) if dtype == DType::I32 => {
                output.copy_from_slice(input);
            }
            (Fault::OwnGates, CollectiveKind::AllGather, ProcessGroup::EXPERT)
                if dtype == DType::F32 =>
            {
                own_for_all(input, output);
            }
            (Fault::NotReturned, CollectiveKind::ReduceScatter { .. }, ProcessGroup::EXPERT)
                if dtype == DType::Bf16 =>
            {
                own_part(rank, exchange, input, output)
            }
            // Rows go and come in turns.
            (Fault::NotReturned, CollectiveKind::AllToAll, _) if is_returned => {
                output.copy_from_slice(input);
            }
            _ => {}
        }
    }

    fn is_sound(self) -> bool {
        matches!(self, Fault::None | Fault::Flips(_))
    }
}

/// What a run gave.
#[derive(Clone, Debug)]
struct Run {
    losses: Vec<f32>,
    norms: Vec<f32>,
    /// Each gradient after the first step, whole, by its parameter's name.
    gradients: Vec<(String, Vec<f32>)>,
}

/// A gradient of a rank, and which slice of it that is.
type TensorSlice = (String, Option<Split>, Vec<usize>, Vec<f32>);

fn gradients(engine: &mut Engine) -> Result<Vec<TensorSlice>, TrainError> {
    let program = engine.program().clone();
    let mut parts = Vec::new();
    for state in &program.parameters {
        let Some(id) = state.gradient else { continue };
        let value = program.value(id);
        let mut values = vec![0f32; value.elements()];
        engine.read_value(id, cast_slice_mut(&mut values))?;
        parts.push((state.name.clone(), state.split, value.shape.clone(), values));
    }
    Ok(parts)
}

/// Whole tensors of what ranks have of them.
fn join(of_ranks: &[Vec<TensorSlice>]) -> Vec<(String, Vec<f32>)> {
    let joined = |index: usize| {
        let (name, split, shape, values) = &of_ranks[0][index];
        let Some(split) = split else { return (name.clone(), values.clone()) };
        let mut whole = vec![f32::NAN; split.whole_shape(shape).iter().product()];
        for rank in of_ranks {
            let (_, split, shape, values) = &rank[index];
            split.unwrap().insert(values, shape, &mut whole);
        }
        (name.clone(), whole)
    };
    (0..of_ranks[0].len()).map(joined).collect()
}

/// Ranks with a row each at a time; one rank with those of a group at a time.
fn options(precision: &str, parallel: Parallel) -> CompileOptions {
    let policy = PrecisionPolicy::preset(precision).unwrap();
    let micro_batch = Some(ROWS / parallel.data);
    CompileOptions { micro_batch, parallel, ..CompileOptions::new(policy, SEQ, ROWS) }
}

fn world(graph: &Graph, options: &CompileOptions, fault: Fault) -> World {
    let ranks = options.parallel.world_size();
    if ranks == 1 {
        return World::compile(graph.clone(), hardware(), options).unwrap();
    }
    let wrap = |comm| {
        let mut sent = 0;
        Tampered::wrap(comm, move |rank, exchange: &Exchange, input: &[u8], output: &mut [u8]| {
            fault.tamper(&mut sent, (rank, exchange), input, output);
        })
    };
    let comms = InProcess::world(ranks as u32, PATIENCE);
    World::compile_on(comms, &wrap, graph.clone(), hardware(), options).unwrap()
}

fn train(
    graph: &Graph,
    options: &CompileOptions,
    fault: Fault,
    steps: usize,
    order: [usize; ROWS],
) -> Run {
    let ends = world(graph, options, fault).on_all(|engine| {
        engine.initialize(7)?;
        let (mut outcomes, mut first) = (Vec::new(), Vec::new());
        for step in 0..steps {
            let (inputs, targets) = batch(step, order);
            let outcome = engine.step(&inputs, &targets, 1e-3, 0.5)?;
            assert!(!outcome.skipped);
            outcomes.push([outcome.loss, outcome.grad_norm]);
            if step == 0 {
                first = gradients(engine)?;
            }
        }
        Ok((outcomes, first))
    });
    let ends = ends.unwrap();
    let outcomes = &ends[0].0;
    for (rank, (others, _)) in ends.iter().enumerate() {
        let bits = |outcomes: &[[f32; 2]]| -> Vec<[u32; 2]> {
            outcomes.iter().map(|it| it.map(f32::to_bits)).collect()
        };
        let are_equal = !fault.is_sound() || bits(others) == bits(outcomes);
        assert!(are_equal, "rank {rank} saw other losses or norms");
    }
    let gradients: Vec<Vec<TensorSlice>> =
        ends.iter().map(|(_, gradients)| gradients.clone()).collect();
    Run {
        losses: outcomes.iter().map(|it| it[0]).collect(),
        norms: outcomes.iter().map(|it| it[1]).collect(),
        gradients: join(&gradients),
    }
}

/// One rank that runs the micro-batches of a group whole.
fn alone(graph: &Graph, options: &CompileOptions, steps: usize, order: [usize; ROWS]) -> Run {
    let rows = options.micro_batch.map(|rows| rows * options.parallel.expert);
    let alone =
        CompileOptions { parallel: Parallel::default(), micro_batch: rows, ..options.clone() };
    train(graph, &alone, Fault::None, steps, order)
}

/// How far a run is from another, thing by thing.
fn distances(run: &Run, other: &Run) -> Vec<(String, f64)> {
    let mut distances = vec![
        ("losses".to_string(), furthest(&run.losses, &other.losses)),
        ("norms".to_string(), furthest(&run.norms, &other.norms)),
    ];
    distances.extend(
        run.gradients
            .iter()
            .zip(&other.gradients)
            .map(|((name, a), (_, b))| (format!("gradient of {name}"), relative_norm(a, b))),
    );
    distances
}

/// What is further from one rank than the bound, with its distance and the bound.
fn beyond(
    graph: &Graph,
    options: &CompileOptions,
    fault: Fault,
    steps: usize,
) -> Vec<(String, f64, f64)> {
    let expected = alone(graph, options, steps, IN_ORDER);
    let got = train(graph, options, fault, steps, IN_ORDER);
    let flips = (0..CONTROLS.len() as u64).map(Fault::Flips);
    let flipped: Vec<Run> =
        flips.map(|flips| train(graph, options, flips, steps, IN_ORDER)).collect();
    // What one rank sums in FP64 and rounds once, ranks round each, and once more with each sum.
    let rounding = options.parallel.data as f64 * f64::from(f32::EPSILON);
    let mut bounds = vec![rounding; 2 + expected.gradients.len()];
    let mut widen = |control: &Run, run: &Run| {
        for (bound, (_, distance)) in bounds.iter_mut().zip(distances(control, run)) {
            *bound = bound.max(FACTOR * distance);
        }
    };
    for order in CONTROLS {
        widen(&alone(graph, options, steps, order), &expected);
    }
    let sound = match fault {
        Fault::None => &got,
        _ => &train(graph, options, Fault::None, steps, IN_ORDER),
    };
    flipped.iter().for_each(|control| widen(control, sound));
    let distances = distances(&got, &expected).into_iter().zip(bounds);
    let distances = distances.map(|((name, distance), bound)| (name, distance, bound));
    distances.filter(|(_, distance, bound)| distance.is_nan() || distance > bound).collect()
}

fn parallel(data: usize, expert: usize) -> Parallel {
    Parallel { expert, ..Parallel::data(data) }
}

#[test]
fn ranks_train_as_one_does_but_for_the_order_of_sums() {
    let covering = [
        ("moe-micro", "mxfp8", parallel(4, 2)),
        (FOUR_OF_EIGHT, "f32", parallel(4, 4)),
        ("gpt-oss-micro", "bf16", parallel(4, 4)),
        ("deepseek-micro", "mxfp8", parallel(2, 2)),
    ];
    let others = [
        ("moe-micro", "f32", parallel(2, 2)),
        ("moe-micro", "bf16", parallel(4, 2)),
        ("moe-micro", "mxfp8", parallel(4, 4)),
        (FOUR_OF_EIGHT, "bf16", parallel(4, 2)),
        (FOUR_OF_EIGHT, "mxfp8", parallel(2, 2)),
    ];
    for (name, precision, parallel) in layouts::rows(&covering, &others) {
        let options = options(precision, parallel);
        let beyond = beyond(&model(name), &options, Fault::None, STEPS);
        assert!(beyond.is_empty(), "{name} in {precision}, {parallel}: {beyond:?}");
    }
}

#[test]
fn gradients_of_experts_are_those_of_one_rank_to_the_bit() {
    for (name, precision, ranks) in [
        ("moe-micro", "f32", 2),
        ("moe-micro", "mxfp8", 4),
        ("gpt-oss-micro", "bf16", 2),
        ("deepseek-micro", "mxfp8", 2),
        (FOUR_OF_EIGHT, "bf16", 2),
    ] {
        let graph = match name {
            FOUR_OF_EIGHT => with_room_for_all(&model(name)),
            _ => model(name),
        };
        let options = options(precision, parallel(ranks, ranks));
        let got = train(&graph, &options, Fault::None, 1, IN_ORDER);
        let expected = alone(&graph, &options, 1, IN_ORDER);
        let of_experts = |(name, _): &&(String, Vec<f32>)| name.contains(".experts.");
        let got: Vec<_> = got.gradients.iter().filter(of_experts).collect();
        assert!(got.len() >= 3);
        for (got, expected) in got.into_iter().zip(expected.gradients.iter().filter(of_experts)) {
            assert!(got.1.iter().any(|&value| value != 0.0), "{name}: `{}` is zero", got.0);
            assert!(got == expected, "{name} in {precision}, {ranks} ranks: `{}`", got.0);
        }
    }
}

/// Rows that ranks use and plan with a capacity factor, of 64 or 32 tokens each with two of eight
/// experts, in groups of 32 rows.
#[test]
fn buffers_of_ranks_hold_what_experts_take() {
    let check = |ranks: usize, capacity_factor: f64, planned: u64| {
        let training =
            RouterTraining { capacity_factor: Some(capacity_factor), ..RouterTraining::default() };
        let graph = with_router_training(&model("moe-micro"), &training).unwrap();
        let options = options("mxfp8", parallel(ranks, ranks));
        let loads = world(&graph, &options, Fault::None).on_all(|engine| {
            engine.initialize(7)?;
            let (inputs, targets) = batch(0, IN_ORDER);
            engine.step(&inputs, &targets, 1e-3, 0.5)?;
            Ok(engine.expert_loads().to_vec())
        });
        let loads = loads.unwrap().concat();
        assert_eq!(loads.len(), 2 * ranks, "two layers");
        for load in loads {
            let what = format!("{ranks} ranks, {capacity_factor}: {load:?}");
            assert_eq!(load.rows_planned, planned, "{what}");
            assert!(load.rows_used <= planned && load.rows_used % 32 == 0, "{what}");
            // The factors below 1 drop pairs, so an expert of each rank is full.
            assert!(load.rows_used > 0, "{what}");
        }
    };
    // Four experts with 2 x 8, 2 x 16 and 2 x 24 pairs; all pairs of both ranks are 2 x 128.
    check(2, 0.5, 4 * 32);
    check(2, 1.0, 4 * 32);
    check(2, 1.5, 4 * 64);
    check(2, 64.0, 2 * 128 + 4 * 32);
    // Two experts with 4 x 2 and 4 x 8 pairs; all tokens of four ranks choose both.
    check(4, 0.25, 2 * 32);
    check(4, 1.0, 2 * 32);
    check(4, 4.0, 2 * 128);
}

/// Gradients of experts after a step in which all tokens choose the first ones, as of equal scores
/// the lower index wins. A step before it has left gradients of all.
fn gradients_of_equal_scores(graph: &Graph, options: &CompileOptions) -> Vec<(String, Vec<f32>)> {
    let is_router = |name: &str| name.contains("gate.weight") || name.contains("router.");
    let ends = world(graph, options, Fault::None).on_all(|engine| {
        engine.initialize(7)?;
        let (inputs, targets) = batch(0, IN_ORDER);
        engine.step(&inputs, &targets, 0.0, 0.5)?;
        for state in engine.program().parameters.clone() {
            if is_router(&state.name) {
                let zeros = vec![0f32; engine.program().value(state.master).elements()];
                engine.write_value(state.master, cast_slice(&zeros))?;
            }
        }
        engine.refresh_weight_copies()?;
        let outcome = engine.step(&inputs, &targets, 0.0, 0.5)?;
        assert!(!outcome.skipped && outcome.grad_norm.is_finite() && outcome.grad_norm > 0.0);
        gradients(engine)
    });
    join(&ends.unwrap()).into_iter().filter(|(name, _)| name.contains(".experts.")).collect()
}

/// A rank whose experts nobody chooses has gradients of exactly zero, with accumulation too, and
/// the others those of one rank.
#[test]
fn a_rank_without_rows_has_no_gradients() {
    for (name, precision, ranks, micro_batch) in [
        ("moe-micro", "f32", 2, 2),
        ("moe-micro", "mxfp8", 4, 1),
        ("moe-micro", "bf16", 2, 1),
        ("gpt-oss-micro", "mxfp8", 4, 1),
    ] {
        let graph = model(name);
        let whole = options(precision, parallel(ranks, ranks));
        let accumulates = micro_batch * ranks < ROWS;
        let options = CompileOptions { micro_batch: Some(micro_batch), ..whole };
        let got = gradients_of_equal_scores(&graph, &options);
        let alone = CompileOptions {
            parallel: Parallel::default(),
            micro_batch: Some(micro_batch * ranks),
            ..options
        };
        let expected = gradients_of_equal_scores(&graph, &alone);
        for ((tensor, got), (_, expected)) in got.iter().zip(&expected) {
            let of_expert = got.len() / 8;
            let (chosen, others) = got.split_at(2 * of_expert);
            assert!(chosen.iter().any(|&value| value != 0.0), "{name}: `{tensor}` is zero");
            assert!(others.iter().all(|&value| value == 0.0), "{name}: `{tensor}` of nobody");
            // Ranks take other rows together where there are several micro-batches.
            assert!(accumulates || got == expected, "{name} in {precision}: `{tensor}`");
        }
    }
}

#[test]
fn planted_faults_are_beyond_the_bound() {
    let check = |graph: &Graph, (fault, precision), parallel, what| {
        let beyond = beyond(graph, &options(precision, parallel), fault, 2);
        assert!(
            beyond.iter().any(|(name, ..)| name.contains(what)),
            "{fault:?}: `{what}` not among {beyond:?}"
        );
    };
    let gathers = model(FOUR_OF_EIGHT);
    let sends = with_room_for_all(&gathers);
    check(&gathers, (Fault::NoSum, "bf16"), parallel(4, 2), "experts");
    check(&gathers, (Fault::NormOfFirst, "bf16"), parallel(2, 2), "norms");
    // Gates are nearly alike at first: other ones are seen in F32.
    check(&gathers, (Fault::OwnGates, "f32"), parallel(2, 2), "losses");
    for graph in [&gathers, &sends] {
        check(graph, (Fault::OwnChoices, "bf16"), parallel(2, 2), "experts.down_proj");
        check(graph, (Fault::NotReturned, "bf16"), parallel(2, 2), "experts.down_proj");
    }
}

/// Makes a gradient of an expert no number on one rank, before squares are summed.
struct Poison(bool);

impl Observer for Poison {
    fn before(
        &mut self,
        program: &Program,
        call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        if self.0 && call.name == "grad_norm.squares" {
            let state = program.parameters.iter().find(|state| state.split.is_some()).unwrap();
            let range = program.value(state.gradient.unwrap()).range;
            let first = deepwell_ir::ByteRange { bytes: 4, ..range };
            backend.write(first, cast_slice(&[f32::NAN]))?;
        }
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

#[test]
fn a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() {
    let options = options("mxfp8", parallel(4, 2));
    let skipped = world(&model("moe-micro"), &options, Fault::None).on_all(|engine| {
        engine.initialize(7)?;
        let (inputs, targets) = batch(0, IN_ORDER);
        let mut poison = Poison(engine.rank() == 1);
        let outcome = engine.step_observed(&inputs, &targets, 1e-3, 0.5, &mut poison)?;
        Ok((outcome.skipped, engine.applied_steps()?))
    });
    // The poisoned expert's rank is alone in having it, and its group's norm is that of all.
    let skipped = skipped.unwrap();
    assert_eq!(skipped[..2], [(true, (0, 1)); 2], "{skipped:?}");
}

#[test]
fn ranks_fall_back_together() {
    let options = options("mxfp8", parallel(2, 2));
    let ends = world(&model("moe-micro"), &options, Fault::None).on_all(|engine| {
        engine.initialize(7)?;
        let (inputs, targets) = batch(0, IN_ORDER);
        engine.step(&inputs, &targets, 1e-3, 0.5)?;
        // A stack of experts and a projection of each layer.
        let of_layer = engine.gemms().len() / 2;
        engine.fall_back(&[2, of_layer - 1, of_layer, 2 * of_layer - 2], "a test")?;
        let outcome = engine.step(&inputs, &targets, 1e-3, 0.5)?;
        Ok([outcome.loss.to_bits(), outcome.grad_norm.to_bits()])
    });
    let ends = ends.unwrap();
    assert_eq!(ends[0], ends[1]);
}

/// The verifier refuses programs in which gradients of experts are summed over ranks that have
/// others, or not over those that have the same.
#[test]
fn sums_over_the_wrong_ranks_are_refused() {
    let world = world(&model("moe-micro"), &options("bf16", parallel(4, 2)), Fault::None);
    let program = world.first().program().clone();
    verify_program(&program).unwrap();
    let named = |name: &str| program.target.ranks.named(name).unwrap().0;
    let (of_all, of_same) = (named(ProcessGroup::DATA), named(ProcessGroup::EXPERT_DATA));
    let sums = |call: &Call, over| match &call.op {
        Op::Collective(op) => op.group == over && call.name.starts_with("all_reduce.gradients"),
        _ => false,
    };
    for (from, to, ranks, expected) in [
        (of_same, of_all, 4, "has a slice"),
        (of_all, of_same, 2, "is not summed over the 4 ranks of group `data` yet"),
    ] {
        let mut broken = program.clone();
        let call = broken.calls.iter_mut().find(|call| sums(call, from)).unwrap();
        let Op::Collective(op) = &mut call.op else { unreachable!() };
        (op.group, op.ranks) = (to, ranks);
        let error = verify_program(&broken).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn what_cannot_be_split_is_refused() {
    for (graph, parallel, expected) in [
        (model("llama-micro"), parallel(2, 2), "expected a model with experts"),
        (model("moe-micro"), parallel(3, 3), "expected experts that they divide"),
    ] {
        let options = CompileOptions {
            micro_batch: Some(1),
            parallel,
            ..CompileOptions::new(PrecisionPolicy::bf16(), SEQ, 12)
        };
        let error = World::compile(graph, hardware(), &options).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
