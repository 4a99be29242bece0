//! Ranks that have some of the experts each: gradients to the bit, rows that are nobody's, buffers,
//! and what ranks do together.
//!
//! What one rank computes for a token they compute from the same numbers in the same order, but for
//! one thing: what several experts of a rank give a token is rounded before the sums of ranks are
//! added up. Where a token has two experts there is nothing to round, and where a capacity has rows
//! sent in place of sums there are no such sums: the first step's gradients of experts are then to
//! the bit those of one rank where all ranks are one group.

use std::collections::BTreeMap;

use bytemuck::cast_slice;
use deepwell_ir::{Call, Graph, Op, ProcessGroup, Program, verify_program};
use deepwell_moe::{RouterTraining, with_router_training};
use deepwell_trainer::{CompileOptions, Engine, Parallel, TrainError, World};

use crate::fault::Fault;
use crate::model::model;
use crate::observers::poisoned;
use crate::train::{self, Read, TensorSample, batch, hardware, samples, world};

const ROWS: usize = 4;

/// Ranks that run their sequences of a step together.
fn options(precision: &str, parallel: Parallel) -> CompileOptions {
    let micro_batch = Some(ROWS / parallel.data);
    CompileOptions { micro_batch, ..train::options(precision, parallel, ROWS) }
}

/// One rank that runs the micro-batches of a group whole.
fn alone(options: &CompileOptions) -> CompileOptions {
    let micro_batch = options.micro_batch.map(|rows| rows * options.parallel.expert);
    CompileOptions { parallel: Parallel::default(), micro_batch, ..options.clone() }
}

fn parallel(data: usize, expert: usize) -> Parallel {
    Parallel { expert, ..Parallel::data(data) }
}

/// Gradients of experts after `run`.
fn gradients_of_experts(
    graph: &Graph,
    options: &CompileOptions,
    run: impl Fn(&mut Engine) -> Result<(), TrainError> + Sync,
) -> BTreeMap<String, Vec<f32>> {
    let ends = world(graph, options, Fault::None).on_all(|engine| {
        engine.initialize(7)?;
        run(engine)?;
        samples(engine, options.parallel, Read::Gradients)
    });
    let of_ranks: Vec<Vec<TensorSample>> = ends.expect("a run");
    let mut gradients = train::join(of_ranks, false);
    gradients.retain(|name, _| name.contains(".experts."));
    assert!(gradients.len() >= 3);
    gradients
}

fn step(engine: &mut Engine, rate: f64) -> Result<(), TrainError> {
    let (inputs, targets) = batch(0, ROWS);
    let outcome = engine.step(&inputs, &targets, rate, 0.5)?;
    assert!(!outcome.skipped && outcome.grad_norm.is_finite() && outcome.grad_norm > 0.0);
    Ok(())
}

#[test]
fn gradients_of_experts_are_those_of_one_rank_to_the_bit() {
    for (name, precision, ranks) in [
        ("moe-micro", "f32", 2),
        ("moe-micro", "mxfp8", 4),
        ("gpt-oss-micro", "bf16", 2),
        ("deepseek-micro", "mxfp8", 2),
        ("four of eight, sent", "bf16", 2),
    ] {
        let graph = model(name);
        let options = options(precision, parallel(ranks, ranks));
        let of = |options: &CompileOptions| {
            gradients_of_experts(&graph, options, |engine| step(engine, 1e-3))
        };
        let (got, expected) = (of(&options), of(&alone(&options)));
        for (tensor, values) in &got {
            assert!(values.iter().any(|&value| value != 0.0), "{name}: `{tensor}` is zero");
            let is_equal = *values == expected[tensor];
            assert!(is_equal, "{name} in {precision}, {ranks} ranks: `{tensor}`");
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
            let (inputs, targets) = batch(0, ROWS);
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
fn gradients_of_equal_scores(
    graph: &Graph,
    options: &CompileOptions,
) -> BTreeMap<String, Vec<f32>> {
    let is_router = |name: &str| name.contains("gate.weight") || name.contains("router.");
    gradients_of_experts(graph, options, |engine| {
        step(engine, 0.0)?;
        for state in engine.program().parameters.clone() {
            if is_router(&state.name) {
                let zeros = vec![0f32; engine.program().value(state.master.value()).elements()];
                engine.write_value(state.master.value(), cast_slice(&zeros))?;
            }
        }
        engine.refresh_weight_copies()?;
        step(engine, 0.0)
    })
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
        let expected = gradients_of_equal_scores(&graph, &alone(&options));
        for (tensor, got) in &got {
            let of_expert = got.len() / 8;
            let (chosen, others) = got.split_at(2 * of_expert);
            assert!(chosen.iter().any(|&value| value != 0.0), "{name}: `{tensor}` is zero");
            assert!(others.iter().all(|&value| value == 0.0), "{name}: `{tensor}` of nobody");
            // Ranks take other rows together where there are several micro-batches.
            assert!(accumulates || *got == expected[tensor], "{name} in {precision}: `{tensor}`");
        }
    }
}

#[test]
fn a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() {
    let options = options("mxfp8", parallel(4, 2));
    let skipped = world(&model("moe-micro"), &options, Fault::None).on_all(|engine| {
        engine.initialize(7)?;
        let (inputs, targets) = batch(0, ROWS);
        // A gradient of an expert is no number on one rank, before squares are summed.
        let number = if engine.rank() == 1 { f32::NAN } else { 0.0 };
        let of_expert = |program: &Program| {
            program.parameters.iter().find(|state| state.split.is_some())?.gradient
        };
        let mut poison = poisoned("grad_norm.squares", of_expert, number);
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
        let (inputs, targets) = batch(0, ROWS);
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
        let options = train::options("bf16", parallel, 12);
        let error = World::compile(graph, hardware(), &options).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
