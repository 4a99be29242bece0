//! Stages of a pipeline train as one rank does: the same bits, on every rank.
//!
//! The reference is one rank that runs the same micro-batches one after the other. Of a model whose
//! embedding and head are one table, that rank adds the gradient of each use to the sum so far, and
//! stages add up two sums: other roundings where there are several micro-batches. There the
//! reference keeps the two apart and adds them up before the update.

mod apart;
mod exchanges;
mod faults;
#[path = "../layouts/mod.rs"]
mod layouts;
#[path = "../observers/mod.rs"]
mod observers;
#[path = "../ranks/mod.rs"]
#[expect(dead_code, reason = "models here have more layers than that of other tests")]
mod ranks;
mod tensor;

use std::collections::BTreeMap;
use std::time::Duration;

use bytemuck::cast_slice_mut;
use deepwell_ir::Graph;
use deepwell_ir::capture::{Gpt2Config, LlamaConfig, capture, capture_gpt2};
use deepwell_ir::ops::IGNORED_TARGET;
use deepwell_moe::{RouterTraining, with_router_training};
use deepwell_plan::schedule::PipelineSchedule;
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::{CompileOptions, Engine, Parallel, TrainError, World};

use apart::Apart;
use ranks::hardware;

/// How long a rank waits for another; longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);
const SEQ: usize = 32;
const STEPS: usize = 10;
/// Sequences of a step, each a micro-batch of its own.
const ROWS: usize = 4;
const SEED: u64 = 7;
const LEARNING_RATE: f64 = 1e-2;
const CLIP: f64 = 0.5;
const LAYERS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Model {
    /// With two query heads for one of keys.
    Llama,
    TiedLlama,
    Gpt2,
}

impl Model {
    const ALL: [Model; 3] = [Model::Llama, Model::TiedLlama, Model::Gpt2];

    fn is_tied(self) -> bool {
        self != Model::Llama
    }

    fn graph(self) -> Graph {
        let llama = |tie_word_embeddings| {
            let micro = LlamaConfig::preset("llama-micro").expect("a preset");
            let config = LlamaConfig { num_layers: LAYERS, tie_word_embeddings, ..micro };
            capture(&config).expect("a graph")
        };
        match self {
            Model::Llama => llama(false),
            Model::TiedLlama => llama(true),
            Model::Gpt2 => {
                let text = format!(
                    r#"{{"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": {LAYERS},
                        "n_head": 2, "n_positions": 64, "n_inner": null,
                        "activation_function": "gelu_new", "initializer_range": 0.02,
                        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": true}}"#
                );
                let (config, _) = Gpt2Config::from_json(&text, "config.json").expect("GPT-2");
                capture_gpt2(&config).expect("a graph")
            }
        }
    }
}

/// Inputs and targets of a step, row by row. Rows leave out different numbers of targets.
fn batch(step: usize) -> (Vec<i32>, Vec<i32>) {
    let token = |row: usize, at: usize| {
        let number = step * 7919 + row * 104_729 + at * at * 31 + at * 7;
        (number % 256) as i32
    };
    let inputs = (0..ROWS * SEQ).map(|it| token(it / SEQ, it % SEQ)).collect();
    let targets = (0..ROWS * SEQ).map(|it| match (it / SEQ, it % SEQ) {
        (row, at) if at < 3 * row => IGNORED_TARGET,
        (row, at) => token(row, at + 1),
    });
    (inputs, targets.collect())
}

/// What a rank has at the end: bits of loss and norm of each step, and of masters and whole moments
/// by name.
#[derive(Clone, Debug, PartialEq)]
struct Bits {
    steps: Vec<[u32; 2]>,
    tensors: BTreeMap<String, Vec<u32>>,
}

fn tensors(engine: &mut Engine) -> Result<BTreeMap<String, Vec<u32>>, TrainError> {
    let program = engine.program().clone();
    let mut tensors = BTreeMap::new();
    for state in &program.parameters {
        let of_parameter = [
            ("", Some(state.master.value())),
            ("moment1.", state.first_moment),
            ("moment2.", state.second_moment),
        ];
        for (prefix, id) in of_parameter {
            let Some(id) = id else { continue };
            let mut bits = vec![0u32; program.value(id).elements()];
            engine.read_value(id, cast_slice_mut(&mut bits))?;
            tensors.insert(format!("{prefix}{}", state.name), bits);
        }
    }
    Ok(tensors)
}

fn options(precision: &str, parallel: Parallel) -> CompileOptions {
    let policy = PrecisionPolicy::preset(precision).expect("a preset");
    let new = CompileOptions::new(policy, SEQ, ROWS);
    CompileOptions { micro_batch: Some(1), parallel, ..new }
}

fn stages(pipeline: usize) -> Parallel {
    Parallel { pipeline, ..Parallel::data(1) }
}

/// Two stages of two chunks each.
fn interleaved() -> Parallel {
    Parallel { chunks: 2, ..stages(2) }
}

fn train(mut world: World, observer: impl Fn(&Engine) -> Option<Apart> + Sync) -> Vec<Bits> {
    let done = world.on_all(|engine| {
        engine.initialize(SEED)?;
        let mut steps = Vec::new();
        let mut observer = observer(engine);
        for step in 0..STEPS {
            let (inputs, targets) = batch(step);
            let outcome = match &mut observer {
                None => engine.step(&inputs, &targets, LEARNING_RATE, CLIP)?,
                Some(apart) => {
                    engine.step_observed(&inputs, &targets, LEARNING_RATE, CLIP, apart)?
                }
            };
            assert!(!outcome.skipped);
            steps.push([outcome.loss.to_bits(), outcome.grad_norm.to_bits()]);
        }
        Ok(Bits { steps, tensors: tensors(engine)? })
    });
    done.expect("a run")
}

fn compile(model: Model, options: &CompileOptions) -> World {
    World::compile(model.graph(), hardware(), options).expect("a world")
}

/// Each rank has the steps of the reference, and what it has of its tensors; all of them together
/// have all.
fn check(got: &[Bits], expected: &Bits, what: &str) {
    let mut seen = BTreeMap::new();
    for (rank, got) in got.iter().enumerate() {
        assert_eq!(got.steps, expected.steps, "{what}: loss and norm on rank {rank}");
        for (name, bits) in &got.tensors {
            assert!(expected.tensors.get(name) == Some(bits), "{what}: `{name}` on rank {rank}");
            seen.insert(name, ());
        }
        assert!(got.tensors.len() < expected.tensors.len(), "{what}: rank {rank} has a part");
    }
    assert_eq!(seen.len(), expected.tensors.len(), "{what}: all tensors are somewhere");
}

/// How ranks share a model, and how many layers each stage has.
type Cut = (Parallel, Option<Vec<usize>>);

/// Trains a model on one rank and in stages.
fn check_cuts(name: &str, graph: &Graph, precision: &str, cuts: Vec<Cut>) {
    let of = |options: &CompileOptions| {
        World::compile(graph.clone(), hardware(), options).expect("a world")
    };
    let alone = of(&options(precision, Parallel::default()));
    let expected = train(alone, |engine| Apart::of(engine.program())).remove(0);
    for (parallel, stage_layers) in cuts {
        let what = format!("{name} in {precision}, {parallel}, {stage_layers:?}");
        let options = CompileOptions { stage_layers, ..options(precision, parallel) };
        check(&train(of(&options), |_| None), &expected, &what);
    }
}

fn stages_train_as_one_rank_does(precision: &str) {
    for model in Model::ALL {
        let graph = model.graph();
        let alone = compile(model, &options(precision, Parallel::default()));
        assert_eq!(Apart::of(alone.first().program()).is_some(), model.is_tied());
        let covering = [(stages(3), Some(vec![1, 2, 1])), (interleaved(), None)];
        let others = [(stages(2), None), (stages(4), None), (stages(2), Some(vec![3, 1]))];
        check_cuts(&format!("{model:?}"), &graph, precision, layouts::rows(&covering, &others));
    }
}

#[test]
fn stages_train_as_one_rank_does_in_f32() {
    stages_train_as_one_rank_does("f32");
}

#[test]
fn stages_train_as_one_rank_does_in_bf16() {
    stages_train_as_one_rank_does("bf16");
}

#[test]
fn stages_train_as_one_rank_does_in_mxfp8() {
    stages_train_as_one_rank_does("mxfp8");
}

/// Models with nothing that stages share: odd numbers of layers, and stages of any sizes.
#[test]
fn stages_of_uneven_models_train_as_one_rank_does() {
    let llama = |name: &str, num_layers| {
        let preset = LlamaConfig::preset(name).expect("a preset");
        let config = LlamaConfig { num_layers, tie_word_embeddings: false, ..preset };
        capture(&config).expect("a graph")
    };
    let gpt2 = Gpt2Config::preset("gpt2-micro").expect("a preset");
    let gpt2 = Gpt2Config { num_layers: 3, tie_word_embeddings: false, ..gpt2 };
    let gpt2 = capture_gpt2(&gpt2).expect("a graph");
    // The pass `expand` comes with routers that have no losses, too.
    let mixture = with_router_training(&llama("moe-micro", 3), &RouterTraining::default());
    let zero_bubble = Parallel { schedule: PipelineSchedule::ZbH1, ..stages(2) };
    let cuts = vec![(stages(2), None), (stages(2), Some(vec![1, 2])), (stages(3), None)];
    check_cuts("llama of 3", &llama("llama-micro", 3), "bf16", cuts);
    let cuts = vec![
        (stages(2), Some(vec![4, 1])),
        (interleaved(), Some(vec![1, 2, 1, 1])),
        (zero_bubble, Some(vec![1, 4])),
        (zero_bubble, None),
    ];
    check_cuts("llama of 5", &llama("llama-micro", 5), "bf16", cuts);
    let cuts = vec![(stages(2), None), (zero_bubble, Some(vec![2, 1]))];
    check_cuts("gpt2 of 3", &gpt2, "bf16", cuts);
    let cuts = vec![(stages(2), None), (zero_bubble, Some(vec![1, 2]))];
    check_cuts("mixture of 3", &mixture.expect("a graph"), "bf16", cuts);
}

/// A table that embedding and head share: both stages sum up their own part of its gradient, so
/// that a step differs from one rank's in the order of that sum, and in nothing else.
#[test]
fn a_shared_table_is_all_that_stages_sum_up_otherwise() {
    for model in [Model::TiedLlama, Model::Gpt2] {
        let of = |parallel| train(compile(model, &options("f32", parallel)), |_| None);
        let expected = of(Parallel::default()).remove(0);
        let got = of(stages(2)).remove(0);
        // Nothing has been updated yet.
        assert_eq!(got.steps[0][0], expected.steps[0][0], "{model:?}: the first loss");
        let differs = |(name, bits): (&String, &Vec<u32>)| expected.tensors[name] != *bits;
        assert!(got.tensors.iter().any(differs), "{model:?}: to the bit, after all");
        for (step, (got, expected)) in got.steps.iter().zip(&expected.steps).enumerate() {
            let [got, expected] = [got[0], expected[0]].map(f32::from_bits);
            // The order of a sum in FP32, which AdamW's steps of 1e-2 carry on.
            assert!((got - expected).abs() < 1e-3 * expected, "{model:?}, step {step}: {got}");
        }
    }
}

/// Where a token comes once in a micro-batch and a step has one, both ways to add up the gradients
/// of a tied table round alike: nothing is kept apart here.
#[test]
fn a_tied_table_trains_as_on_one_rank() {
    let distinct = |step: usize| -> (Vec<i32>, Vec<i32>) {
        let token = |at: usize| ((at * 37 + step * 11) % 256) as i32;
        ((0..ROWS * SEQ).map(token).collect(), (0..ROWS * SEQ).map(|at| token(at + 1)).collect())
    };
    let train = |parallel| {
        let options = CompileOptions { micro_batch: Some(ROWS), ..options("bf16", parallel) };
        let mut world = compile(Model::TiedLlama, &options);
        let done = world.on_all(|engine| {
            engine.initialize(SEED)?;
            let mut steps = Vec::new();
            for step in 0..STEPS {
                let (inputs, targets) = distinct(step);
                let outcome = engine.step(&inputs, &targets, LEARNING_RATE, CLIP)?;
                steps.push([outcome.loss.to_bits(), outcome.grad_norm.to_bits()]);
            }
            Ok(Bits { steps, tensors: tensors(engine)? })
        });
        done.expect("a run")
    };
    check(&train(stages(2)), &train(Parallel::default())[0], "a tied table");
}

/// The routers of a mixture add to the loss on the stages of their layers, so that the loss alone
/// is added up in another order: each way rounds it once for each term of each micro-batch at most.
#[test]
fn mixtures_train_as_on_one_rank() {
    let micro = LlamaConfig::preset("moe-micro").expect("a preset");
    let config = LlamaConfig { num_layers: LAYERS, ..micro };
    let routers = RouterTraining { balance: 0.01, z: 1e-3, ..RouterTraining::default() };
    let graph = with_router_training(&capture(&config).expect("a graph"), &routers);
    let graph = graph.expect("routers");
    let train = |parallel| {
        let options = options("mxfp8", parallel);
        train(World::compile(graph.clone(), hardware(), &options).expect("a world"), |_| None)
    };
    let expected = train(Parallel::default()).remove(0);
    let terms = ROWS * (1 + config.num_layers);
    for got in train(stages(2)).into_iter().chain(train(interleaved())) {
        for (got, expected) in got.steps.iter().zip(&expected.steps) {
            assert_eq!(got[1], expected[1], "the norm");
            let [loss, expected] = [got[0], expected[0]].map(f32::from_bits);
            let bound = 2.0 * terms as f32 * f32::EPSILON / 2.0 * expected;
            assert!((loss - expected).abs() <= bound, "{loss} beside {expected}");
        }
        for (name, bits) in &got.tensors {
            assert!(expected.tensors.get(name) == Some(bits), "`{name}`");
        }
    }
}

/// Two pipelines that split the batch, beside two ranks that split it: with whole optimizer state,
/// and with a part of it on each.
#[test]
fn pipelines_split_the_batch_as_ranks_do() {
    for model in [Model::Llama, Model::TiedLlama] {
        let data = compile(model, &options("mxfp8", Parallel::data(2)));
        // Two rows each; apart from each other as on one rank.
        let expected = train(data, |engine| Apart::of(engine.program())).remove(0);
        for (zero, chunks) in [(0, 1), (1, 1), (0, 2), (1, 2)] {
            let parallel = Parallel { pipeline: 2, chunks, zero, ..Parallel::data(2) };
            let world = compile(model, &options("mxfp8", parallel));
            assert_eq!(world.first().program().shards.is_empty(), zero == 0);
            let got = train(world, |_| None);
            let mut masters = 0;
            for (rank, got) in got.iter().enumerate() {
                let what = format!("{model:?}, ZeRO {zero}, {chunks} chunks, rank {rank}");
                assert_eq!(got.steps, expected.steps, "{what}");
                for (name, bits) in &got.tensors {
                    assert!(expected.tensors.get(name) == Some(bits), "{what}: `{name}`");
                    masters += usize::from(!name.starts_with("moment"));
                }
            }
            assert!(masters > got.len(), "ranks have masters");
        }
    }
}

#[test]
fn stages_evaluate_together() {
    let losses = |parallel| {
        let mut world = compile(Model::Llama, &options("mxfp8", parallel));
        let done = world.on_all(|engine| {
            engine.initialize(SEED)?;
            let rows = engine.evaluation_rows() * SEQ;
            (0..3)
                .map(|step| {
                    let (inputs, targets) = batch(step);
                    Ok(engine.evaluate(&inputs[..rows], &targets[..rows])?.to_bits())
                })
                .collect::<Result<Vec<u32>, TrainError>>()
        });
        done.expect("losses")
    };
    let expected = losses(Parallel::default()).remove(0);
    let chunks = losses(interleaved());
    assert_eq!(chunks[1], expected);
    let got = losses(stages(4));
    assert_eq!(got[3], expected);
    assert!(got[..3].iter().flatten().all(|&bits| f32::from_bits(bits) == 0.0));
}

/// GEMMs in BF16 from the third step on: on all stages at the same step, seen from counters of
/// all.
#[test]
fn stages_fall_back_together() {
    let run = |parallel| {
        let mut world = compile(Model::Llama, &options("mxfp8", parallel));
        let done = world.on_all(|engine| {
            engine.initialize(SEED)?;
            let (mut steps, mut counted) = (Vec::new(), Vec::new());
            for step in 0..4 {
                if step == 2 {
                    // GEMMs of the second and the third layer.
                    engine.fall_back(&[7, 11, 14, 15], "a test")?;
                }
                let (inputs, targets) = batch(step);
                let outcome = engine.step(&inputs, &targets, LEARNING_RATE, CLIP)?;
                steps.push([outcome.loss.to_bits(), outcome.grad_norm.to_bits()]);
                counted.push(engine.statistics_of_ranks()?);
            }
            Ok((steps, counted))
        });
        done.expect("a run")
    };
    let expected = run(Parallel::default()).remove(0);
    assert!(expected.1[0].len() > expected.1[2].len());
    for parallel in [stages(2), interleaved()] {
        for got in run(parallel) {
            assert_eq!(got.0, expected.0);
            assert!(got.1 == expected.1, "{parallel}: the same counters in the same order");
        }
    }
}

#[test]
fn what_cannot_be_cut_is_refused() {
    let check = |pipeline, stage_layers: Option<&[usize]>, expected: &str| {
        let stage_layers = stage_layers.map(<[usize]>::to_vec);
        let options = CompileOptions { stage_layers, ..options("bf16", stages(pipeline)) };
        let error = World::compile(Model::Llama.graph(), hardware(), &options).err();
        let error = error.expect("an error").to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(5, None, "pipeline stages: expected from 1 to 4, the layers of the model, got 5");
    check(2, Some(&[2, 1]), "expected 2 numbers of at least 1, 4 together, got [2, 1]");
    check(2, Some(&[4, 0]), "expected 2 numbers of at least 1, 4 together, got [4, 0]");
    check(2, Some(&[4]), "expected 2 numbers of at least 1, 4 together, got [4]");
    let check_chunks = |pipeline, chunks, rows, expected: &str| {
        let parallel = Parallel { chunks, ..stages(pipeline) };
        let options = CompileOptions { global_batch: rows, ..options("bf16", parallel) };
        let error = World::compile(Model::Llama.graph(), hardware(), &options).err();
        let error = error.expect("an error").to_string();
        assert!(error.contains(expected), "{error}");
    };
    check_chunks(2, 2, 3, "micro-batches of an interleaved schedule: expected a multiple of the 2");
    check_chunks(2, 3, 4, "pipeline stages: expected from 1 to 4, the layers of the model, got 6");
    check_chunks(1, 2, 4, "model chunks of a stage: expected 1 where there is one stage");
}
