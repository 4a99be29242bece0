//! Ranks that split each layer train as one rank does, but for the roundings of partial sums.
//!
//! The bound is measured, where it arises: in control runs every sum over tensor-parallel ranks
//! that is scattered has its last bits flipped at random, which is what the roundings of partial
//! sums do to it. What a run differs from one rank by may be [`FACTOR`] times what the furthest
//! control differs from the run itself by, for a control is one draw from the same chaos.

mod layouts;
mod rank_faults;

use std::collections::BTreeMap;
use std::time::Duration;

use bytemuck::cast_slice_mut;
use deepwell_ir::capture::{Gpt2Config, LlamaConfig, capture, capture_gpt2};
use deepwell_ir::ops::{CollectiveKind, Reduction};
use deepwell_ir::{DType, Graph, MemoryKind, Plane, ProcessGroup, Split, ValueId};
use deepwell_kernels::{Exchange, InProcess};
use deepwell_precision::PrecisionPolicy;
use deepwell_precision::random::split_mix64;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Engine, Parallel, TrainError, World};

use crate::rank_faults::{Tampered, first_for_all, furthest, relative_norm};

/// How long a rank waits for another; longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);
const SEQ: usize = 32;
const ROWS: usize = 4;
const STEPS: usize = 10;
const EVALUATIONS: usize = 8;
const CONTROLS: u64 = 3;
/// Of two draws from one distribution one is seldom four times as far as the furthest of three.
const FACTOR: f64 = 4.0;

/// Small models that four ranks can split: their slices are of whole blocks of 32.
fn model(name: &str) -> Graph {
    let sized = |config: LlamaConfig, num_kv_heads| LlamaConfig {
        num_heads: 4,
        num_kv_heads,
        head_dim: 32,
        intermediate_size: 128,
        ..config
    };
    let llama = || LlamaConfig::preset("llama-micro").unwrap();
    match name {
        "llama" => capture(&sized(llama(), 4)).unwrap(),
        // Grouped heads, biases and a tied head.
        "llama-gqa" => {
            let (attention_bias, mlp_bias, tie_word_embeddings) = (true, true, true);
            let config = sized(llama(), 2);
            let tied = LlamaConfig { attention_bias, mlp_bias, tie_word_embeddings, ..config };
            capture(&tied).unwrap()
        }
        "qwen3" => capture(&sized(LlamaConfig::preset("qwen3-micro").unwrap(), 2)).unwrap(),
        _ => {
            let micro = Gpt2Config::preset("gpt2-micro").unwrap();
            capture_gpt2(&Gpt2Config { num_heads: 4, hidden_size: 128, ..micro }).unwrap()
        }
    }
}

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

fn batch(step: usize) -> (Vec<i32>, Vec<i32>) {
    let token = |row: usize, at: usize| {
        ((step * 7919 + row * 104_729 + at * at * 31 + at * 7) % 256) as i32
    };
    let at = |it: usize| (it / SEQ, it % SEQ);
    let inputs = (0..ROWS * SEQ).map(|it| token(at(it).0, at(it).1));
    let targets = (0..ROWS * SEQ).map(|it| token(at(it).0, at(it).1 + 1));
    (inputs.collect(), targets.collect())
}

/// What goes wrong between tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// A control: the last bits of scattered sums are flipped.
    Flips(u64),
    /// Scattered sums are this rank's own part alone.
    NoSum,
    /// Gradients of parameters that all ranks have whole are not summed up.
    NoGradientSum,
    /// The first rank's sums of squares count for all.
    NormOfFirst,
    /// A slice's largest magnitude counts for the whole tensor.
    OwnAmax,
}

impl Fault {
    /// What it does to the result of the exchange that is number `count`.
    fn tamper(self, count: u64, rank: u32, exchange: &Exchange, input: &[u8], output: &mut [u8]) {
        if exchange.group.name != ProcessGroup::TENSOR {
            return;
        }
        let place = exchange.group.position_of(rank).unwrap();
        match (self, &exchange.kind) {
            (Fault::Flips(seed), CollectiveKind::ReduceScatter { .. }) => {
                // By the place: groups that split the batch evaluate alike, as sound ones do.
                let seed = split_mix64(seed + 1000 * count + place as u64);
                flip(exchange.dtype, seed, output);
            }
            (Fault::NoSum, CollectiveKind::ReduceScatter { .. }) => {
                let own = place * output.len();
                output.copy_from_slice(&input[own..own + output.len()]);
            }
            (Fault::NoGradientSum, CollectiveKind::AllReduce { .. }) => {
                output.copy_from_slice(input);
            }
            (Fault::OwnAmax, CollectiveKind::AllReduce { reduction: Reduction::Max })
                if output.len() == size_of::<f32>() =>
            {
                output.copy_from_slice(input);
            }
            (Fault::NormOfFirst, CollectiveKind::AllGather) if exchange.dtype == DType::U64 => {
                first_for_all(input, output);
            }
            _ => {}
        }
    }
}

/// Flips the last bit of about half of BF16 numbers: a sum of rounded parts is off by about that.
/// Of F32 numbers the last three bits are drawn anew: a sum of K = 128 terms in another order is
/// off by about the root of K in units of half the last place.
fn flip(dtype: DType, seed: u64, output: &mut [u8]) {
    let (size, mask) = if dtype == DType::Bf16 { (2, 1) } else { (4, 7) };
    for (index, number) in output.chunks_exact_mut(size).enumerate() {
        if number.iter().any(|&byte| byte != 0) {
            number[0] ^= split_mix64(seed.wrapping_add(index as u64)) as u8 & mask;
        }
    }
}

/// What a run gave.
#[derive(Clone, Debug)]
struct Run {
    losses: Vec<f32>,
    norms: Vec<f32>,
    /// Each gradient after the first step, whole, by its parameter's name.
    gradients: Vec<(String, Vec<f32>)>,
    /// Losses of evaluations after the last step.
    evaluated: Vec<f32>,
}

/// A gradient or master of a rank, and which slice of it that is.
type TensorSlice = (String, Option<Split>, Vec<usize>, Vec<f32>);

fn parts(engine: &mut Engine, gradients: bool) -> Result<Vec<TensorSlice>, TrainError> {
    let program = engine.program().clone();
    let mut parts = Vec::new();
    for state in &program.parameters {
        let id = if gradients { state.gradient.unwrap() } else { state.master };
        let value = program.value(id);
        let mut values = vec![0f32; value.elements()];
        engine.read_value(id, cast_slice_mut(&mut values))?;
        parts.push((state.name.clone(), state.split, value.shape.clone(), values));
    }
    Ok(parts)
}

/// Whole tensors of what ranks have of them, by name: stages of a pipeline have some each, and
/// replicas the same.
fn join(of_ranks: &[Vec<TensorSlice>]) -> Vec<(String, Vec<f32>)> {
    let mut wholes: BTreeMap<&str, Vec<f32>> = BTreeMap::new();
    for (name, split, shape, values) in of_ranks.iter().flatten() {
        let Some(split) = split else {
            wholes.entry(name).or_insert_with(|| values.clone());
            continue;
        };
        let unknown = || vec![f32::NAN; split.whole_shape(shape).iter().product()];
        split.insert(values, shape, wholes.entry(name).or_insert_with(unknown));
    }
    wholes.into_iter().map(|(name, values)| (name.to_string(), values)).collect()
}

fn options(precision: &str, parallel: Parallel) -> CompileOptions {
    let policy = PrecisionPolicy::preset(precision).unwrap();
    CompileOptions { micro_batch: Some(1), parallel, ..CompileOptions::new(policy, SEQ, ROWS) }
}

fn world(graph: &Graph, options: &CompileOptions, fault: Fault) -> World {
    let ranks = options.parallel.world_size();
    if ranks == 1 {
        return World::compile(graph.clone(), hardware(), options).unwrap();
    }
    let wrap = |comm| {
        let mut count = 0;
        Tampered::wrap(comm, move |rank, exchange: &Exchange, input: &[u8], output: &mut [u8]| {
            count += 1;
            fault.tamper(count, rank, exchange, input, output);
        })
    };
    let comms = InProcess::world(ranks as u32, PATIENCE);
    World::compile_on(comms, &wrap, graph.clone(), hardware(), options).unwrap()
}

fn train(graph: &Graph, options: &CompileOptions, fault: Fault, steps: usize) -> Run {
    let keeps_gradients = options.parallel.zero == 0;
    let mut world = world(graph, options, fault);
    let ends = world.on_all(|engine| {
        engine.initialize(7)?;
        let (mut outcomes, mut gradients) = (Vec::new(), Vec::new());
        for step in 0..steps {
            let (inputs, targets) = batch(step);
            let outcome = engine.step(&inputs, &targets, 1e-3, 0.5)?;
            assert!(!outcome.skipped);
            outcomes.push([outcome.loss, outcome.grad_norm]);
            if step == 0 && keeps_gradients {
                gradients = parts(engine, true)?;
            }
        }
        let tokens = engine.evaluation_rows() * SEQ;
        let mut evaluated = Vec::new();
        for (inputs, targets) in (steps..steps + EVALUATIONS).map(batch) {
            evaluated.push(engine.evaluate(&inputs[..tokens], &targets[..tokens])?);
        }
        Ok((outcomes, gradients, evaluated, parts(engine, false)?))
    });
    let ends = ends.unwrap();
    let (outcomes, _, _, masters) = &ends[0];
    let evaluated = &ends[ends.len() - 1].2;
    for (rank, (others, _, evaluated_there, masters_there)) in ends.iter().enumerate() {
        let bits = |outcomes: &[[f32; 2]]| -> Vec<[u32; 2]> {
            outcomes.iter().map(|it| it.map(f32::to_bits)).collect()
        };
        assert_eq!(bits(others), bits(outcomes), "rank {rank} saw other losses or norms");
        for (name, split, _, own) in masters_there {
            let same = |other: &&TensorSlice| other.0 == *name && other.1 == *split;
            let first = masters.iter().find(same);
            if let Some((.., first)) = first
                && fault != Fault::NoGradientSum
            {
                assert!(own == first, "rank {rank} has another `{name}`");
            }
        }
        // Of a pipeline the last stage has the loss, the others give zero.
        let is_last =
            rank * options.parallel.pipeline >= ends.len() * (options.parallel.pipeline - 1);
        assert!(!is_last || evaluated_there == evaluated, "rank {rank}: evaluations");
    }
    let gradients: Vec<Vec<TensorSlice>> =
        ends.iter().map(|(_, gradients, ..)| gradients.clone()).collect();
    Run {
        losses: outcomes.iter().map(|it| it[0]).collect(),
        norms: outcomes.iter().map(|it| it[1]).collect(),
        gradients: if keeps_gradients { join(&gradients) } else { Vec::new() },
        evaluated: evaluated.clone(),
    }
}

/// How far a run is from another, thing by thing.
fn distances(run: &Run, other: &Run) -> Vec<(String, f64)> {
    let mut distances = vec![
        ("losses".to_string(), furthest(&run.losses, &other.losses)),
        ("norms".to_string(), furthest(&run.norms, &other.norms)),
        ("evaluations".to_string(), furthest(&run.evaluated, &other.evaluated)),
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
    let alone = CompileOptions { parallel: Parallel::default(), ..options.clone() };
    let alone = train(graph, &alone, Fault::None, steps);
    let sound = train(graph, options, Fault::None, steps);
    let got =
        if fault == Fault::None { sound.clone() } else { train(graph, options, fault, steps) };
    let mut bounds: Vec<f64> = distances(&sound, &sound).iter().map(|_| 0.0).collect();
    for seed in 0..CONTROLS {
        let control = train(graph, options, Fault::Flips(seed), steps);
        for (bound, (_, distance)) in bounds.iter_mut().zip(distances(&control, &sound)) {
            *bound = bound.max(FACTOR * distance);
        }
    }
    let distances = distances(&got, &alone).into_iter().zip(bounds);
    let distances = distances.map(|((name, distance), bound)| (name, distance, bound));
    distances.filter(|(_, distance, bound)| distance.is_nan() || distance > bound).collect()
}

#[test]
fn ranks_train_as_one_does_but_for_roundings() {
    let parallel = |tensor, data, zero| Parallel { tensor, zero, ..Parallel::data(data) };
    let staged =
        |tensor, pipeline, data, zero| Parallel { pipeline, ..parallel(tensor, data, zero) };
    let covering = [
        ("llama", "bf16", parallel(4, 1, 0)),
        ("gpt2", "f32", parallel(4, 1, 0)),
        ("qwen3", "mxfp8", parallel(2, 1, 0)),
        ("gpt2", "mxfp8", staged(2, 2, 1, 0)),
        ("llama-gqa", "mxfp8", staged(2, 2, 2, 1)),
        // Tensor scales are those of whole tensors, and random words those of whole operands.
        ("llama", "nvfp4", parallel(2, 1, 0)),
        ("llama-gqa", "nvfp4", staged(2, 2, 2, 1)),
    ];
    let others = [
        ("llama", "f32", parallel(2, 1, 0)),
        ("llama", "mxfp8", parallel(2, 1, 0)),
        ("llama", "bf16", parallel(2, 2, 0)),
        ("llama", "mxfp8", parallel(2, 2, 1)),
        ("llama-gqa", "mxfp8", parallel(2, 1, 0)),
        ("llama-gqa", "bf16", parallel(2, 1, 0)),
        ("gpt2", "mxfp8", parallel(2, 1, 0)),
        ("gpt2", "bf16", parallel(2, 1, 0)),
        ("qwen3", "f32", parallel(2, 1, 0)),
        ("llama-gqa", "bf16", staged(2, 2, 1, 0)),
    ];
    for (name, precision, parallel) in layouts::rows(&covering, &others) {
        let options = options(precision, parallel);
        let beyond = beyond(&model(name), &options, Fault::None, STEPS);
        assert!(beyond.is_empty(), "{name} in {precision}, {parallel}: {beyond:?}");
    }
}

/// A slice of a tensor has the tensor scale of the whole tensor: that of one rank, to the bit.
#[test]
fn tensor_scales_are_those_of_whole_weights() {
    let scales = |parallel: Parallel, fault: Fault| -> Vec<Vec<(String, u32)>> {
        let mut world = world(&model("llama"), &options("nvfp4", parallel), fault);
        let of_rank = |engine: &mut Engine| {
            engine.initialize(7)?;
            let program = engine.program().clone();
            let is_scale = |value: &&deepwell_ir::Value| {
                let is_weight = value.memory == MemoryKind::Weights;
                is_weight && value.link.and_then(|link| link.plane()) == Some(Plane::TensorScale)
            };
            let ids = (0..program.values.len() as u32).map(ValueId);
            let mut scales = Vec::new();
            for id in ids.filter(|&id| is_scale(&program.value(id))) {
                let mut value = [0f32];
                engine.read_value(id, cast_slice_mut(&mut value))?;
                scales.push((program.value(id).name.clone(), value[0].to_bits()));
            }
            Ok(scales)
        };
        world.on_all(of_rank).unwrap()
    };
    let alone = scales(Parallel::default(), Fault::None).remove(0);
    assert!(alone.len() > 4, "{alone:?}");
    let two = Parallel { tensor: 2, ..Parallel::data(1) };
    for of_rank in scales(two, Fault::None) {
        assert_eq!(of_rank, alone);
    }
    let own = scales(two, Fault::OwnAmax);
    assert!(own.iter().any(|of_rank| *of_rank != alone), "an own amax goes unnoticed");
}

#[test]
fn planted_faults_are_beyond_the_bound() {
    let parallel = Parallel { tensor: 2, ..Parallel::data(1) };
    for (name, precision, fault, what) in [
        ("llama", "bf16", Fault::NoSum, "losses"),
        ("llama", "bf16", Fault::NoGradientSum, "gradient of model.norm.weight"),
        ("qwen3", "f32", Fault::NoGradientSum, "q_norm.weight"),
        ("gpt2", "bf16", Fault::NoGradientSum, "wpe.weight"),
        ("llama", "mxfp8", Fault::NormOfFirst, "norms"),
    ] {
        let beyond = beyond(&model(name), &options(precision, parallel), fault, 2);
        assert!(
            beyond.iter().any(|(name, ..)| name.contains(what)),
            "{name}, {fault:?}: `{what}` not among {beyond:?}"
        );
    }
}
