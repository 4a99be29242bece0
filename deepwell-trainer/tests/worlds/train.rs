//! Runs of a world, what they gave, and how far two of them are apart.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use bytemuck::cast_slice_mut;
use deepwell_ir::{DType, Graph, MemoryKind, ParameterState, Split, ValueId};
use deepwell_kernels::{Exchange, InProcess};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Engine, Parallel, TrainError, World};

use crate::fault::Fault;
use crate::rank_faults::{Tampered, furthest, relative_norm};

/// How long a rank waits for another; longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);
pub(crate) const SEQ: usize = 32;
pub(crate) const STEPS: usize = 10;
const EVALUATIONS: usize = 8;
const CONTROLS: u64 = 3;
/// Of two draws from one distribution one is seldom four times as far as the furthest of three.
const FACTOR: f64 = 4.0;

pub(crate) fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

/// Inputs and targets of a step `[rows, SEQ]`.
pub(crate) fn batch(step: usize, rows: usize) -> (Vec<i32>, Vec<i32>) {
    let token = |row: usize, at: usize| {
        ((step * 7919 + row * 104_729 + at * at * 31 + at * 7) % 256) as i32
    };
    let inputs = (0..rows * SEQ).map(|it| token(it / SEQ, it % SEQ));
    let targets = (0..rows * SEQ).map(|it| token(it / SEQ, it % SEQ + 1));
    (inputs.collect(), targets.collect())
}

/// Options of so many sequences a step, each a micro-batch.
pub(crate) fn options(precision: &str, parallel: Parallel, rows: usize) -> CompileOptions {
    let policy = PrecisionPolicy::preset(precision).expect("a preset");
    CompileOptions { micro_batch: Some(1), parallel, ..CompileOptions::new(policy, SEQ, rows) }
}

pub(crate) fn world(graph: &Graph, options: &CompileOptions, fault: Fault) -> World {
    let ranks = options.parallel.world_size();
    if ranks == 1 {
        return World::compile(graph.clone(), hardware(), options).expect("a program");
    }
    let wrap = |comm| {
        let mut sent = 0;
        Tampered::wrap(comm, move |rank, exchange: &Exchange, input: &[u8], output: &mut [u8]| {
            fault.tamper(&mut sent, rank, exchange, input, output);
        })
    };
    let comms = InProcess::world(ranks as u32, PATIENCE);
    World::compile_on(comms, &wrap, graph.clone(), hardware(), options).expect("programs")
}

/// What is read of each parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Read {
    Masters,
    /// After one step these are gradients but for a factor.
    FirstMoments,
    /// Whole ones alone.
    Gradients,
}

/// Some numbers of a tensor of a parameter: which slice of it the rank has, its shape, and which
/// elements of that these are.
pub(crate) struct TensorSample {
    name: String,
    split: Option<Split>,
    shape: Vec<usize>,
    range: Range<usize>,
    values: Vec<f32>,
}

/// What a rank has of all parameters.
pub(crate) fn samples(
    engine: &mut Engine,
    parallel: Parallel,
    read: Read,
) -> Result<Vec<TensorSample>, TrainError> {
    let program = engine.program().clone();
    let sample = |state: &ParameterState, range, values| {
        let shape = program.value(state.master.value()).shape.clone();
        TensorSample { name: state.name.clone(), split: state.split, shape, range, values }
    };
    let mut samples = Vec::new();
    for state in &program.parameters {
        let id = match read {
            Read::Masters => Some(state.master.value()),
            Read::FirstMoments => state.first_moment,
            Read::Gradients => state.gradient,
        };
        // Others are there in slices, and copies in BF16.
        let is_whole = |id: &ValueId| {
            let value = program.value(*id);
            value.memory != MemoryKind::Activations && value.dtype == DType::F32
        };
        let Some(id) = id.filter(is_whole) else { continue };
        let mut values = vec![0f32; program.value(id).elements()];
        engine.read_value(id, cast_slice_mut(&mut values))?;
        samples.push(sample(state, 0..values.len(), values));
    }
    if read == Read::Gradients {
        return Ok(samples);
    }
    for shard in &program.shards {
        let id = if read == Read::Masters { shard.master } else { shard.first_moment };
        let mut slice = vec![0f32; program.value(id).elements()];
        engine.read_value(id, cast_slice_mut(&mut slice))?;
        for &(index, offset) in &shard.parameters {
            let state = &program.parameters[index];
            let over = state.split.map(|split| split.over).unwrap_or_default();
            let begin = parallel.shard_place(engine.rank(), over) * slice.len();
            let from = begin.max(offset);
            let to =
                (begin + slice.len()).min(offset + program.value(state.master.value()).elements());
            if from < to {
                let values = slice[from - begin..to - begin].to_vec();
                samples.push(sample(state, from - offset..to - offset, values));
            }
        }
    }
    Ok(samples)
}

/// Whole tensors of what ranks have of them, by name. Where ranks have the same numbers twice,
/// these are equal unless something `is_wrong`.
pub(crate) fn join(of_ranks: Vec<Vec<TensorSample>>, is_wrong: bool) -> BTreeMap<String, Vec<f32>> {
    type Slices = BTreeMap<usize, (Option<Split>, Vec<usize>, Vec<f32>)>;
    let mut slices: BTreeMap<String, Slices> = BTreeMap::new();
    for TensorSample { name, split, shape, range, values } in of_ranks.into_iter().flatten() {
        let place = split.map_or(0, |split| split.place);
        let unknown = || (split, shape.clone(), vec![f32::NAN; shape.iter().product()]);
        let slice = slices.entry(name.clone()).or_default().entry(place).or_insert_with(unknown);
        let known = &mut slice.2[range];
        let is_same = known.iter().zip(&values).all(|(known, it)| known.is_nan() || known == it);
        assert!(is_same || is_wrong, "two ranks have another `{name}`");
        known.copy_from_slice(&values);
    }
    let whole = |slices: Slices| match slices.values().next() {
        Some((Some(split), shape, _)) => {
            let mut whole = vec![f32::NAN; split.whole_shape(shape).iter().product()];
            for (split, shape, values) in slices.values() {
                split.expect("a slice").insert(values, shape, &mut whole);
            }
            whole
        }
        Some((None, _, values)) => values.clone(),
        None => Vec::new(),
    };
    slices.into_iter().map(|(name, slices)| (name, whole(slices))).collect()
}

/// What a run gave.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Run {
    pub(crate) losses: Vec<f32>,
    pub(crate) norms: Vec<f32>,
    /// Losses of evaluations after the last step. Not of ranks that split sequences, nor of runs
    /// shorter than [`STEPS`].
    evaluated: Vec<f32>,
    /// First moments after the first step.
    gradients: BTreeMap<String, Vec<f32>>,
    /// After the last step.
    pub(crate) masters: BTreeMap<String, Vec<f32>>,
}

pub(crate) fn train(graph: &Graph, options: &CompileOptions, fault: Fault, steps: usize) -> Run {
    let (parallel, rows) = (options.parallel, options.global_batch);
    let ends = world(graph, options, fault).on_all(|engine| {
        engine.initialize(7)?;
        let (mut outcomes, mut gradients, mut evaluated) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..steps {
            let (inputs, targets) = batch(step, rows);
            let outcome = engine.step(&inputs, &targets, 1e-3, 0.5)?;
            assert!(!outcome.skipped);
            outcomes.push([outcome.loss, outcome.grad_norm]);
            if step == 0 {
                gradients = samples(engine, parallel, Read::FirstMoments)?;
            }
        }
        if parallel.context == 1 && steps >= STEPS {
            let tokens = engine.evaluation_rows() * SEQ;
            for (inputs, targets) in (steps..steps + EVALUATIONS).map(|step| batch(step, rows)) {
                evaluated.push(engine.evaluate(&inputs[..tokens], &targets[..tokens])?);
            }
        }
        let masters = samples(engine, parallel, Read::Masters)?;
        Ok((outcomes, evaluated, gradients, masters))
    });
    let (mut outcomes, mut evaluated) = (Vec::new(), Vec::new());
    let (mut gradients, mut masters) = (Vec::new(), Vec::new());
    for end in ends.expect("a run") {
        outcomes.push(end.0);
        evaluated.push(end.1);
        gradients.push(end.2);
        masters.push(end.3);
    }
    let bits = |of: &[[f32; 2]]| of.iter().map(|it| it.map(f32::to_bits)).collect::<Vec<_>>();
    let is_wrong = !fault.is_sound();
    let are_equal = outcomes.iter().all(|of| bits(of) == bits(&outcomes[0]));
    assert!(are_equal || is_wrong, "{parallel}: ranks saw other losses");
    // Of a pipeline the last stage has the loss, the others give zero.
    let last = evaluated.split_off(evaluated.len() - evaluated.len() / parallel.pipeline);
    assert!(last.iter().all(|it| *it == last[0]) || is_wrong, "{parallel}: other evaluations");
    Run {
        losses: outcomes[0].iter().map(|it| it[0]).collect(),
        norms: outcomes[0].iter().map(|it| it[1]).collect(),
        evaluated: last[0].clone(),
        gradients: join(gradients, is_wrong),
        masters: join(masters, is_wrong),
    }
}

/// How far a run is from another, thing by thing.
fn distances(run: &Run, other: &Run) -> Vec<(String, f64)> {
    let mut distances = vec![
        ("losses".to_string(), furthest(&run.losses, &other.losses)),
        ("norms".to_string(), furthest(&run.norms, &other.norms)),
        ("evaluations".to_string(), furthest(&run.evaluated, &other.evaluated)),
    ];
    for (what, run, other) in
        [("gradient of ", &run.gradients, &other.gradients), ("", &run.masters, &other.masters)]
    {
        assert!(run.keys().eq(other.keys()), "other tensors");
        let pairs = run.iter().zip(other.values());
        distances
            .extend(pairs.map(|((name, a), b)| (format!("{what}{name}"), relative_norm(a, b))));
    }
    distances
}

/// A run of ranks without a fault, and how far from one rank each of its results may be.
pub(crate) struct Sound {
    pub(crate) run: Run,
    bounds: Vec<f64>,
}

impl Sound {
    pub(crate) fn of(graph: &Graph, options: &CompileOptions, steps: usize) -> Sound {
        let run = train(graph, options, Fault::None, steps);
        let mut bounds = vec![0.0; distances(&run, &run).len()];
        for seed in 0..CONTROLS {
            let control = train(graph, options, Fault::Flips(seed), steps);
            for (bound, (_, distance)) in bounds.iter_mut().zip(distances(&control, &run)) {
                *bound = f64::max(*bound, FACTOR * distance);
            }
        }
        Sound { run, bounds }
    }

    /// Results of a run that are beyond the bound, with distance and bound.
    pub(crate) fn beyond(&self, run: &Run, alone: &Run) -> Vec<(String, f64, f64)> {
        let distances = distances(run, alone).into_iter().zip(&self.bounds);
        let distances = distances.map(|((name, distance), bound)| (name, distance, *bound));
        distances.filter(|(_, distance, bound)| distance.is_nan() || distance > bound).collect()
    }
}
