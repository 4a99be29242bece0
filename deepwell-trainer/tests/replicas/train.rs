//! Ranks that share the batch, and what they give after some steps.

use bytemuck::cast_slice_mut;
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Graph, ValueId};
use deepwell_kernels::Observer;
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::{CompileOptions, Engine, Parallel, TrainError, World};

use crate::observers::left_out;
use crate::ranks::reference::{self, CLIP, LEARNING_RATE, SEED};
use crate::ranks::{self, hardware};
use crate::shard_slices::{masters, slices};

pub(crate) const SEQ: usize = 32;
pub(crate) const STEPS: usize = 4;

/// Two ranks cut all but the projections to keys and values between blocks, four the first two of
/// the feed-forward layers.
pub(crate) fn wide() -> Graph {
    let preset = LlamaConfig::preset("llama-micro").unwrap();
    capture(&LlamaConfig { hidden_size: 256, intermediate_size: 512, ..preset }).unwrap()
}

/// Options of ranks with so many sequences each, one a micro-batch.
pub(crate) fn options(precision: &str, zero: u8, ranks: usize, rows: usize) -> CompileOptions {
    let policy = PrecisionPolicy::preset(precision).unwrap();
    CompileOptions {
        micro_batch: Some(1),
        parallel: Parallel { zero, ..Parallel::data(ranks) },
        ..CompileOptions::new(policy, SEQ, ranks * rows)
    }
}

pub(crate) fn compile(graph: &Graph, options: &CompileOptions) -> World {
    World::compile(graph.clone(), hardware(), options).unwrap()
}

pub(crate) fn world(precision: &str, zero: u8, ranks: usize, rows: usize) -> World {
    compile(&ranks::graph(), &options(precision, zero, ranks, rows))
}

pub(crate) fn batch(step: usize, rows: usize) -> (Vec<i32>, Vec<i32>) {
    reference::batch(step, rows, SEQ)
}

/// Bits of the loss and the norm of a step with a fault, which may have it skipped.
pub(crate) fn observed(
    engine: &mut Engine,
    step: usize,
    fault: &mut dyn Observer,
) -> Result<[u32; 2], TrainError> {
    let program = engine.program();
    let of_rank = program.batch * program.micro_batches;
    let (inputs, targets) = batch(step, of_rank * program.target.ranks.world_size as usize);
    let (rate, clip) = (f64::from(LEARNING_RATE), f64::from(CLIP));
    let outcome = engine.step_observed(&inputs, &targets, rate, clip, fault)?;
    Ok([outcome.loss.to_bits(), outcome.grad_norm.to_bits()])
}

pub(crate) fn step(engine: &mut Engine, step: usize) -> Result<[u32; 2], TrainError> {
    let outcome = observed(engine, step, &mut left_out(None))?;
    assert!(outcome.iter().all(|&bits| f32::from_bits(bits).is_finite()));
    Ok(outcome)
}

pub(crate) fn bits_of(engine: &mut Engine, ids: Vec<ValueId>) -> Result<Vec<u32>, TrainError> {
    let program = engine.program().clone();
    let mut bits = Vec::new();
    for id in ids {
        let mut values = vec![0u32; program.value(id).elements()];
        engine.read_value(id, cast_slice_mut(&mut values))?;
        bits.extend(values);
    }
    Ok(bits)
}

/// Bits of masters and moments.
pub(crate) fn bits(engine: &mut Engine) -> Result<Vec<u32>, TrainError> {
    let program = engine.program();
    let ids = [ranks::masters_of(program), ranks::moments_of(program)].concat();
    bits_of(engine, ids)
}

/// Bits of what a run gave.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Run {
    /// Loss and norm of each step.
    pub(crate) steps: Vec<[u32; 2]>,
    /// Loss of an evaluation.
    pub(crate) evaluated: u32,
    pub(crate) masters: Vec<u32>,
    /// Moments that are whole.
    pub(crate) moments: Vec<u32>,
}

/// Trains a world in a stage of ZeRO for so many steps; all ranks see the same.
pub(crate) fn run(mut world: World, zero: u8, steps: usize) -> Run {
    let program = world.first().program().clone();
    let is_whole = zero < 2;
    let ends = world.on_all(|engine| {
        engine.initialize(SEED)?;
        let steps: Result<Vec<_>, _> = (0..steps).map(|at| step(engine, at)).collect();
        let (inputs, targets) = batch(9, 1);
        let evaluated = engine.evaluate(&inputs, &targets)?.to_bits();
        let of = engine.program().clone();
        let moments = bits_of(engine, ranks::moments_of(&of))?;
        let masters = if is_whole { bits_of(engine, ranks::masters_of(&of))? } else { Vec::new() };
        Ok((Run { steps: steps?, evaluated, masters, moments }, slices(engine)?))
    });
    let (runs, of_ranks): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
    for (rank, run) in runs.iter().enumerate() {
        assert!(*run == runs[0], "rank {rank} has other losses or weights");
    }
    let mut run = runs[0].clone();
    if !is_whole {
        run.masters = masters(&program, &of_ranks);
    }
    run
}
