//! Up to eight ranks train a dense model and a mixture of experts as one rank does: in plans where
//! each degree of parallelism occurs with each other one, and with `DEEPWELL_ALL_LAYOUTS` each
//! degree alone and more plans.
//!
//! Stages alone add up what one rank does in its order: their losses, norms and masters are its
//! bits. All other ranks sum in another order, or round partial sums, and their bound is measured
//! where that arises: in control runs each sum that ranks have made has its last bits flipped at
//! random, and so have keys and values that go around a ring: attention of ranks rounds as if they
//! had. What a run differs from one rank by may be [`FACTOR`] times what the furthest control
//! differs from the run itself by, for a control is one draw from the same chaos.

mod layouts;
mod rank_faults;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use bytemuck::cast_slice_mut;
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{DType, Graph, MemoryKind, ProcessGroup, Split, ValueId};
use deepwell_kernels::{Exchange, InProcess};
use deepwell_moe::{RouterTraining, with_router_training};
use deepwell_plan::schedule::PipelineSchedule;
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Engine, Parallel, TrainError, World};

use crate::rank_faults::{Tampered, first_for_all, furthest, own_for_all, own_part, relative_norm};

/// How long a rank waits for another; longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);
const SEQ: usize = 32;
/// Sequences of a step, each a micro-batch.
const ROWS: usize = 8;
const STEPS: usize = 10;
const CONTROLS: u64 = 3;
/// Of two draws from one distribution one is seldom four times as far as the furthest of three.
const FACTOR: f64 = 4.0;

/// Models that eight ranks can split.
fn model(name: &str) -> Graph {
    let preset = |name| LlamaConfig::preset(name).unwrap();
    let (num_layers, num_heads) = (4, 8);
    let config = match name {
        "dense" => LlamaConfig {
            num_layers,
            num_heads,
            num_kv_heads: 8,
            head_dim: 16,
            intermediate_size: 128,
            ..preset("llama-micro")
        },
        // A table that is both ends of the model.
        "tied" => LlamaConfig {
            num_layers,
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 32,
            intermediate_size: 128,
            tie_word_embeddings: true,
            ..preset("llama-micro")
        },
        _ => LlamaConfig { num_layers, num_heads: 4, num_kv_heads: 4, ..preset("moe-micro") },
    };
    let graph = capture(&config).unwrap();
    match name {
        "balanced" => {
            let training = RouterTraining { balance: 0.05, z: 0.01, capacity_factor: None };
            with_router_training(&graph, &training).unwrap()
        }
        _ => graph,
    }
}

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

fn batch(step: usize) -> (Vec<i32>, Vec<i32>) {
    let token = |row: usize, at: usize| {
        ((step * 7919 + row * 104_729 + at * at * 31 + at * 7) % 256) as i32
    };
    let inputs = (0..ROWS * SEQ).map(|it| token(it / SEQ, it % SEQ));
    let targets = (0..ROWS * SEQ).map(|it| token(it / SEQ, it % SEQ + 1));
    (inputs.collect(), targets.collect())
}

/// What goes wrong between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// A control: the last bits of sums are flipped.
    Flips(u64),
    /// What a group sums is each rank's own part alone.
    NoSum(&'static str),
    /// Gradients that tensor-parallel ranks have parts of are not summed.
    NoGradientSum,
    /// Whose experts tokens chose is what the first rank's chose, for the losses of routers.
    ChoicesOfFirst,
    /// What the first rank gives counts for the whole group.
    NormOfFirst(&'static str),
    /// What goes around a ring is lost.
    KeysStay,
    /// Rows and gates of other ranks are this rank's own.
    RowsStay,
}

impl Fault {
    /// What it does to the result of an exchange.
    fn tamper(self, rank: u32, exchange: &Exchange, input: &[u8], output: &mut [u8]) {
        let (group, kind) = (exchange.group.name.as_str(), &exchange.kind);
        match (self, kind) {
            (
                Fault::Flips(seed),
                CollectiveKind::ReduceScatter { .. } | CollectiveKind::AllReduce { .. },
            ) if group != ProcessGroup::PIPELINE => flip(exchange.dtype, seed, output),
            // Sums of gradients, and in BF16 keys and values.
            (Fault::Flips(seed), CollectiveKind::Shift { .. })
                if group == ProcessGroup::CONTEXT =>
            {
                flip(exchange.dtype, seed, output);
            }
            (Fault::KeysStay, CollectiveKind::Shift { .. }) if group == ProcessGroup::CONTEXT => {
                output.fill(0);
            }
            (Fault::NoSum(name), CollectiveKind::ReduceScatter { .. }) if group == name => {
                own_part(rank, exchange, input, output);
            }
            (Fault::NoSum(name), CollectiveKind::AllReduce { .. }) if group == name => {
                output.copy_from_slice(input);
            }
            (Fault::NoGradientSum, CollectiveKind::AllReduce { .. })
                if group == ProcessGroup::TENSOR =>
            {
                output.copy_from_slice(input);
            }
            (Fault::ChoicesOfFirst, CollectiveKind::AllGather)
                if group == ProcessGroup::TENSOR && exchange.dtype == DType::I32 =>
            {
                first_for_all(input, output);
            }
            (Fault::NormOfFirst(name), CollectiveKind::AllGather)
                if group == name && exchange.dtype == DType::U64 =>
            {
                first_for_all(input, output);
            }
            (Fault::RowsStay, CollectiveKind::AllGather)
                if group == ProcessGroup::EXPERT && exchange.dtype == DType::F32 =>
            {
                own_for_all(input, output);
            }
            _ => {}
        }
    }
}

/// Flips the last bit of about half of BF16 numbers: a sum of rounded parts is off by about that.
/// Of F32 numbers the last three bits are drawn anew: a sum of K = 128 terms in another order is
/// off by about the root of K in units of half the last place.
fn flip(dtype: DType, seed: u64, output: &mut [u8]) {
    rank_faults::flip(dtype, if dtype == DType::Bf16 { 1 } else { 7 }, seed, output);
}

/// Some numbers of a tensor of a parameter: which slice of it the rank has, its shape, and which
/// elements of that these are.
struct TensorSample {
    name: String,
    split: Option<Split>,
    shape: Vec<usize>,
    range: Range<usize>,
    values: Vec<f32>,
}

/// What a rank has of all masters, or of all first moments, which after one step are gradients but
/// for a factor.
fn parts(
    engine: &mut Engine,
    parallel: Parallel,
    moments: bool,
) -> Result<Vec<TensorSample>, TrainError> {
    let program = engine.program().clone();
    let mut parts = Vec::new();
    for state in &program.parameters {
        let id = if moments { state.first_moment } else { Some(state.master) };
        // Others are there in slices, and copies in BF16.
        let is_whole = |id: &ValueId| {
            let value = program.value(*id);
            value.memory != MemoryKind::Activations && value.dtype == DType::F32
        };
        let Some(id) = id.filter(is_whole) else { continue };
        let value = program.value(id);
        let mut values = vec![0f32; value.elements()];
        engine.read_value(id, cast_slice_mut(&mut values))?;
        let (name, split, shape) = (state.name.clone(), state.split, value.shape.clone());
        parts.push(TensorSample { name, split, shape, range: 0..values.len(), values });
    }
    for shard in &program.shards {
        let id = if moments { shard.first_moment } else { shard.master };
        let mut slice = vec![0f32; program.value(id).elements()];
        engine.read_value(id, cast_slice_mut(&mut slice))?;
        for &(index, offset) in &shard.parameters {
            let state = &program.parameters[index];
            let over = state.split.map(|split| split.over).unwrap_or_default();
            let begin = parallel.shard_place(engine.rank(), over) * slice.len();
            let value = program.value(state.master);
            let from = begin.max(offset);
            let to = (begin + slice.len()).min(offset + value.elements());
            if from >= to {
                continue;
            }
            let (name, split, shape) = (state.name.clone(), state.split, value.shape.clone());
            let values = slice[from - begin..to - begin].to_vec();
            parts.push(TensorSample {
                name,
                split,
                shape,
                range: from - offset..to - offset,
                values,
            });
        }
    }
    Ok(parts)
}

/// Whole tensors of what ranks have of them, by name.
fn join(of_ranks: Vec<Vec<TensorSample>>) -> BTreeMap<String, Vec<f32>> {
    type Slices = BTreeMap<usize, (Option<Split>, Vec<usize>, Vec<f32>)>;
    let mut slices: BTreeMap<String, Slices> = BTreeMap::new();
    for TensorSample { name, split, shape, range, values } in of_ranks.into_iter().flatten() {
        let place = split.map_or(0, |split| split.place);
        let unknown = || (split, shape.clone(), vec![f32::NAN; shape.iter().product()]);
        let slice = slices.entry(name).or_default().entry(place).or_insert_with(unknown);
        slice.2[range].copy_from_slice(&values);
    }
    let whole = |slices: Slices| match slices.values().next() {
        Some((Some(split), shape, _)) => {
            let mut whole = vec![f32::NAN; split.whole_shape(shape).iter().product()];
            for (split, shape, values) in slices.values() {
                split.unwrap().insert(values, shape, &mut whole);
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
struct Run {
    losses: Vec<f32>,
    norms: Vec<f32>,
    /// First moments after the first step.
    gradients: BTreeMap<String, Vec<f32>>,
    /// After the last step.
    masters: BTreeMap<String, Vec<f32>>,
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
        Tampered::wrap(comm, move |rank, exchange: &Exchange, input: &[u8], output: &mut [u8]| {
            fault.tamper(rank, exchange, input, output);
        })
    };
    let comms = InProcess::world(ranks as u32, PATIENCE);
    World::compile_on(comms, &wrap, graph.clone(), hardware(), options).unwrap()
}

fn train(graph: &Graph, options: &CompileOptions, fault: Fault, steps: usize) -> Run {
    let ends = world(graph, options, fault).on_all(|engine| {
        engine.initialize(7)?;
        let (mut outcomes, mut gradients) = (Vec::new(), Vec::new());
        for step in 0..steps {
            let (inputs, targets) = batch(step);
            let outcome = engine.step(&inputs, &targets, 1e-3, 0.5)?;
            assert!(!outcome.skipped);
            outcomes.push([outcome.loss, outcome.grad_norm]);
            if step == 0 {
                gradients = parts(engine, options.parallel, true)?;
            }
        }
        Ok((outcomes, (gradients, parts(engine, options.parallel, false)?)))
    });
    let (outcomes, parts): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
    let (gradients, masters): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    let bits = |of: &[[f32; 2]]| of.iter().map(|it| it.map(f32::to_bits)).collect::<Vec<_>>();
    let are_equal = outcomes.iter().all(|of| bits(of) == bits(&outcomes[0]));
    let is_sound = matches!(fault, Fault::None | Fault::Flips(_));
    assert!(are_equal || !is_sound, "{}: ranks saw other losses", options.parallel);
    Run {
        losses: outcomes[0].iter().map(|it| it[0]).collect(),
        norms: outcomes[0].iter().map(|it| it[1]).collect(),
        gradients: join(gradients),
        masters: join(masters),
    }
}

/// How far a run is from another, thing by thing.
fn distances(run: &Run, other: &Run) -> Vec<(String, f64)> {
    let mut distances = vec![
        ("losses".to_string(), furthest(&run.losses, &other.losses)),
        ("norms".to_string(), furthest(&run.norms, &other.norms)),
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

/// How far ranks may be from one.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    Bits,
    Controls,
}

fn single() -> Parallel {
    Parallel::default()
}

/// Ranks that split each sequence.
fn context(context: usize) -> Parallel {
    Parallel { context, ..Parallel::data(context) }
}

fn data(data: usize, zero: u8) -> Parallel {
    Parallel { zero, ..Parallel::data(data) }
}

/// A run of ranks without a fault, and how far from one rank each of its results may be.
struct Sound {
    run: Run,
    bounds: Vec<f64>,
}

impl Sound {
    fn of(graph: &Graph, options: &CompileOptions, steps: usize) -> Sound {
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
    fn beyond(&self, run: &Run, alone: &Run) -> Vec<(String, f64, f64)> {
        let distances = distances(run, alone).into_iter().zip(&self.bounds);
        let distances = distances.map(|((name, distance), bound)| (name, distance, *bound));
        distances.filter(|(_, distance, bound)| distance.is_nan() || distance > bound).collect()
    }
}

fn check(name: &str, precision: &str, rows: &[(Parallel, Bound)]) {
    if rows.is_empty() {
        return;
    }
    let graph = model(name);
    let alone = train(&graph, &options(precision, single()), Fault::None, STEPS);
    let first = train(&graph, &options(precision, single()), Fault::None, 0);
    let still = alone.masters.iter().find(|(name, values)| first.masters[*name] == **values);
    assert!(still.is_none(), "{:?} was not trained", still.map(|(name, _)| name));
    for &(parallel, bound) in rows {
        let what = format!("{name} in {precision}, {parallel}");
        assert!(parallel.world_size() <= 8, "{what}");
        let options = options(precision, parallel);
        if bound == Bound::Bits {
            let got = train(&graph, &options, Fault::None, STEPS);
            assert_eq!((&got.losses, &got.norms), (&alone.losses, &alone.norms), "{what}");
            assert!(got == alone, "{what}: gradients or masters");
            continue;
        }
        let sound = Sound::of(&graph, &options, STEPS);
        let beyond = sound.beyond(&sound.run, &alone);
        assert!(beyond.is_empty(), "{what}: {beyond:?}");
    }
}

#[test]
fn dense_ranks_train_as_one_does() {
    let stages = |pipeline, chunks| Parallel { pipeline, chunks, ..single() };
    let tensor = |tensor| Parallel { tensor, ..single() };
    let covering = [
        (data(8, 2), Bound::Controls),
        (stages(2, 2), Bound::Bits),
        (Parallel { schedule: PipelineSchedule::ZbH1, ..stages(4, 1) }, Bound::Bits),
        (Parallel { tensor: 2, ..data(4, 3) }, Bound::Controls),
    ];
    let others = [
        (data(8, 0), Bound::Controls),
        (data(8, 1), Bound::Controls),
        (data(8, 3), Bound::Controls),
        (tensor(8), Bound::Controls),
        (stages(4, 1), Bound::Bits),
        (Parallel { pipeline: 2, chunks: 2, ..data(4, 2) }, Bound::Controls),
    ];
    check("dense", "bf16", &layouts::rows(&covering, &others));
    let mixed = |zero| (Parallel { tensor: 2, pipeline: 2, ..data(2, zero) }, Bound::Controls);
    check("tied", "mxfp8", &layouts::rows(&[mixed(1)], &[mixed(3)]));
}

#[test]
fn mixtures_train_as_one_rank_does() {
    let with =
        |data: Parallel, tensor, pipeline, expert| Parallel { tensor, pipeline, expert, ..data };
    let of_all = [
        (with(data(8, 0), 1, 1, 8), Bound::Controls),
        (with(data(1, 0), 1, 4, 1), Bound::Bits),
        (with(data(1, 0), 4, 1, 1), Bound::Controls),
        (with(data(8, 1), 1, 1, 2), Bound::Controls),
        (with(data(8, 1), 1, 1, 8), Bound::Controls),
        (with(data(4, 0), 1, 2, 2), Bound::Controls),
        (with(data(2, 0), 4, 1, 8), Bound::Controls),
        (with(data(1, 0), 4, 1, 2), Bound::Controls),
    ];
    check("experts", "bf16", &layouts::rows(&[], &of_all));
    // All four degrees in each.
    let interleaved = (Parallel { chunks: 2, ..with(data(2, 2), 2, 2, 4) }, Bound::Controls);
    let others = [
        (with(data(2, 1), 2, 2, 2), Bound::Controls),
        (
            Parallel { schedule: PipelineSchedule::ZbH1, ..with(data(2, 3), 2, 2, 2) },
            Bound::Controls,
        ),
    ];
    check("experts", "mxfp8", &layouts::rows(&[interleaved], &others));
}

/// The losses of routers are of all tokens of a micro-batch, of which tensor-parallel ranks have a
/// part each.
#[test]
fn balanced_mixtures_train_as_one_rank_does() {
    let with =
        |data: Parallel, tensor, pipeline, expert| Parallel { tensor, pipeline, expert, ..data };
    check(
        "balanced",
        "bf16",
        &layouts::rows(
            &[(with(data(2, 1), 2, 2, 2), Bound::Controls)],
            &[(with(data(1, 0), 4, 1, 1), Bound::Controls)],
        ),
    );
}

/// Ranks that have a part of each sequence, alone, beside ranks with sequences of their own, in
/// stages and with tensor-parallel ranks.
#[test]
fn rings_train_as_one_rank_does() {
    let mixed = Parallel { data: 4, zero: 3, ..context(2) };
    check(
        "dense",
        "f32",
        &layouts::rows(
            &[(Parallel { tensor: 2, pipeline: 2, ..context(2) }, Bound::Controls)],
            &[(context(8), Bound::Controls)],
        ),
    );
    check("tied", "bf16", &[(mixed, Bound::Controls)]);
    let of_experts = Parallel { data: 4, expert: 2, ..context(2) };
    check("experts", "f32", &[(of_experts, Bound::Controls)]);
}

#[test]
fn planted_faults_are_beyond_the_bound() {
    let plan = Parallel { tensor: 2, pipeline: 2, expert: 2, ..data(2, 1) };
    let apart = Parallel { zero: 0, expert: 4, ..plan };
    let wide = Parallel { expert: 4, ..Parallel { tensor: 2, ..data(4, 0) } };
    let graph = model("experts");
    let alone = train(&graph, &options("f32", single()), Fault::None, 2);
    let mut sound: Vec<(Parallel, Sound)> = Vec::new();
    for (parallel, fault, what) in [
        (plan, Fault::NoSum(ProcessGroup::EXPERT_DATA), "gradient of model.layers.1.mlp.experts"),
        (wide, Fault::NoSum(ProcessGroup::EXPERT_DATA), "gradient of model.layers.1.mlp.experts"),
        (plan, Fault::NoSum(ProcessGroup::DATA), "gradient of lm_head"),
        (plan, Fault::NoSum(ProcessGroup::TENSOR), "losses"),
        (plan, Fault::NoGradientSum, "gradient of model.layers.0.mlp.gate"),
        (plan, Fault::NormOfFirst(ProcessGroup::DATA), "norms"),
        (plan, Fault::NormOfFirst(ProcessGroup::TENSOR), "norms"),
        (plan, Fault::NormOfFirst(ProcessGroup::PIPELINE), "norms"),
        (apart, Fault::NormOfFirst(ProcessGroup::DATA), "norms"),
        (apart, Fault::NormOfFirst(ProcessGroup::TENSOR), "norms"),
        (plan, Fault::RowsStay, "losses"),
        (plan, Fault::NoSum(ProcessGroup::EXPERT), "losses"),
        (Parallel { data: 4, ..context(2) }, Fault::KeysStay, "losses"),
        (context(2), Fault::NoSum(ProcessGroup::DATA), "gradient of lm_head"),
    ] {
        let options = options("f32", parallel);
        if sound.iter().all(|(known, _)| *known != parallel) {
            sound.push((parallel, Sound::of(&graph, &options, 2)));
        }
        let sound = sound.iter().find(|(known, _)| *known == parallel).map(|(_, sound)| sound);
        let got = train(&graph, &options, fault, 2);
        let beyond = sound.expect("it has run").beyond(&got, &alone);
        assert!(
            beyond.iter().any(|(name, ..)| name.contains(what)),
            "{parallel}, {fault:?}: `{what}` not among {beyond:?}"
        );
    }
    let graph = model("balanced");
    let alone = train(&graph, &options("f32", single()), Fault::None, 2);
    let split = options("f32", Parallel { tensor: 2, ..single() });
    let got = train(&graph, &split, Fault::ChoicesOfFirst, 2);
    let beyond = Sound::of(&graph, &split, 2).beyond(&got, &alone);
    let what = "gradient of model.layers.0.mlp.gate";
    assert!(beyond.iter().any(|(name, ..)| name.contains(what)), "{beyond:?}");
}
