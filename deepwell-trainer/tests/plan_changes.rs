//! A checkpoint of any plan goes on under any other, and back: weights and moments to the bit, and
//! then the loss that would have come.

use std::collections::BTreeMap;
use std::path::Path;

use deepwell_ckpt::Section;
use deepwell_ir::Graph;
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::ops::{MasterFormat, MomentFormat};
use deepwell_plan::OptimizerSpec;
use deepwell_precision::{Fallback, GuardConfig, Guards, PrecisionPolicy};
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::checkpoint::{self, Position, Writer};
use deepwell_trainer::{
    CompileOptions, Engine, Parallel, RunIdentity, Settings, TrainError, World,
};

const SEQ: usize = 16;
const ROWS: usize = 12;
const SEED: u64 = 3;

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

/// Four layers with a table that embedding and head share. Two ranks cut the first matrices of the
/// feed-forward layers between blocks.
fn dense() -> Graph {
    let config = LlamaConfig {
        num_layers: 4,
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 32,
        intermediate_size: 256,
        tie_word_embeddings: true,
        ..LlamaConfig::preset("llama-micro").expect("a preset")
    };
    capture(&config).expect("a graph")
}

fn experts() -> Graph {
    let micro = LlamaConfig::preset("moe-micro").expect("a preset");
    capture(&LlamaConfig { num_kv_heads: 2, ..micro }).expect("a graph")
}

fn world(graph: &Graph, parallel: Parallel) -> World {
    world_with(graph, parallel, &OptimizerSpec::default())
}

fn world_with(graph: &Graph, parallel: Parallel, optimizer: &OptimizerSpec) -> World {
    let policy = PrecisionPolicy::preset("mxfp8").expect("a preset");
    let options = CompileOptions::new(policy, SEQ, ROWS);
    let optimizer = optimizer.clone();
    let options = CompileOptions { micro_batch: Some(1), parallel, optimizer, ..options };
    World::compile(graph.clone(), hardware(), &options).expect("a world")
}

fn step(engine: &mut Engine, step: usize) -> Result<[u32; 2], TrainError> {
    let token = |at: usize| ((step * 7919 + at * at * 31 + at * 7) % 256) as i32;
    let inputs: Vec<i32> = (0..ROWS * SEQ).map(token).collect();
    let targets: Vec<i32> = (0..ROWS * SEQ).map(|at| token(at + 1)).collect();
    let outcome = engine.step(&inputs, &targets, 1e-2, 1.0)?;
    Ok([outcome.loss.to_bits(), outcome.grad_norm.to_bits()])
}

fn save(world: &mut World, root: &Path, step: u64, settings: &Settings) {
    let guards = Guards::new(GuardConfig::default(), Vec::new(), Fallback::Off);
    let identity = RunIdentity { id: "a".repeat(32), fingerprint: serde_json::json!({}) };
    let position = Position { step, guards, next_batch: step, audit: None };
    let saved = world.on_all(|engine| {
        let mut writer = Writer::default();
        writer.save(root, engine, &position, settings, &identity)?;
        writer.finish(engine)
    });
    saved.expect("saved");
}

fn load(world: &mut World, root: &Path, step: u64) {
    let entries = deepwell_ckpt::list(root).expect("a folder");
    let entry = entries.iter().find(|entry| entry.step == step).expect("it was saved");
    let loaded = world.on_all(|engine| checkpoint::load(entry, engine, &mut |_| ()));
    assert!(loaded.expect("loaded").iter().all(|position| position.step == step));
}

/// Masters and moments of a step, whole.
fn state(root: &Path, step: u64) -> BTreeMap<(Section, String), Vec<u8>> {
    let entries = deepwell_ckpt::list(root).expect("a folder");
    let entry = entries.iter().find(|entry| entry.step == step).expect("it was saved");
    let report = deepwell_ckpt::verify(&entry.path).expect("it can be read");
    assert!(report.is_sound(), "{report}");
    let checkpoint = deepwell_ckpt::load(&entry.path).expect("whole");
    let is_state =
        |section| matches!(section, Section::Master | Section::MomentFirst | Section::MomentSecond);
    let tensors = checkpoint.tensors().iter().filter(|tensor| is_state(tensor.section));
    tensors
        .map(|it| {
            let bytes = checkpoint.read(it.section, &it.name).expect("a tensor");
            assert!(bytes.iter().any(|&byte| byte != 0), "`{}` ({}) is empty", it.name, it.section);
            ((it.section, it.name.clone()), bytes)
        })
        .collect()
}

/// Trains under `first`, goes on under `other`, comes back, and takes the next step.
fn check(graph: &Graph, first: Parallel, other: Parallel) {
    let what = format!("{first} -> {other} -> {first}");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (root, settings) = (folder.path(), Settings { keep_last: 9, ..Settings::default() });
    let mut before = world(graph, first);
    let trained = before.on_all(|engine| {
        engine.initialize(SEED)?;
        (0..2).try_for_each(|at| step(engine, at).map(drop))
    });
    trained.expect("steps");
    save(&mut before, root, 2, &settings);
    let expected = before.on_all(|engine| step(engine, 2)).expect("a step");
    drop(before);

    let mut between = world(graph, other);
    load(&mut between, root, 2);
    // From a copy, while nothing else happens: the same bytes.
    let copied = Settings { async_checkpoints: true, ..settings.clone() };
    save(&mut between, root, 3, &copied);
    drop(between);
    let mut manifest = std::fs::read_to_string(root.join("step-00000003/manifest.json")).unwrap();
    manifest.truncate(40);
    assert!(manifest.contains("\"step\":3"), "{manifest}");

    let mut back = world(graph, first);
    load(&mut back, root, 3);
    save(&mut back, root, 4, &settings);
    let of_first = state(root, 2);
    assert!(of_first.len() > 9, "{what}");
    for step in [3, 4] {
        let state = state(root, step);
        assert_eq!(state.len(), of_first.len(), "{what}: step {step}");
        for (key, bytes) in &of_first {
            assert!(state.get(key) == Some(bytes), "{what}: {key:?} of step {step}");
        }
    }
    let got = back.on_all(|engine| step(engine, 2)).expect("a step");
    assert_eq!(got, expected, "{what}: loss and norm of the next step");
}

/// Trains under `first` with moments in FP8 and goes on under the same ranks, with the same bits,
/// and under `other`, where other blocks round moments once more.
fn check_stored(graph: &Graph, optimizer: &OptimizerSpec, first: Parallel, other: Parallel) {
    let what = format!("{optimizer:?}, {first} -> {other}");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (root, settings) = (folder.path(), Settings { keep_last: 9, ..Settings::default() });
    let mut before = world_with(graph, first, optimizer);
    let trained = before.on_all(|engine| {
        engine.initialize(SEED)?;
        (0..2).try_for_each(|at| step(engine, at).map(drop))
    });
    trained.expect("steps");
    save(&mut before, root, 2, &settings);
    let expected = before.on_all(|engine| step(engine, 2)).expect("a step");
    let next = before.on_all(|engine| step(engine, 3)).expect("a step");
    drop(before);

    let mut again = world_with(graph, first, optimizer);
    load(&mut again, root, 2);
    save(&mut again, root, 3, &Settings { async_checkpoints: true, ..settings });
    assert!(state(root, 3) == state(root, 2), "{what}: masters and moments");
    let got = again.on_all(|engine| step(engine, 2)).expect("a step");
    assert_eq!(got, expected, "{what}: the next step under the same ranks");

    let mut elsewhere = world_with(graph, other, optimizer);
    load(&mut elsewhere, root, 2);
    let loss = |steps: &[[u32; 2]]| f32::from_bits(steps[0][0]);
    let got = elsewhere.on_all(|engine| step(engine, 2)).expect("a step");
    // Moments have no effect before the update: other ranks quantize and sum other slices.
    assert!((loss(&got) - loss(&expected)).abs() <= 1e-3, "{what}: {got:?} {expected:?}");
    let got = elsewhere.on_all(|engine| step(engine, 3)).expect("a step");
    // A sixteenth of each moment, in both directions, changes an update by less than a tenth.
    assert!((loss(&got) - loss(&next)).abs() <= 0.1, "{what}: {got:?} {next:?}");
}

fn of(tensor: usize, pipeline: usize, data: usize, zero: u8) -> Parallel {
    Parallel { tensor, pipeline, zero, ..Parallel::data(data) }
}

#[test]
fn dense_models_go_from_any_plan_to_any_other_and_back() {
    let graph = dense();
    let interleaved = Parallel { chunks: 2, ..of(1, 2, 1, 0) };
    for (first, other) in [
        (of(1, 1, 1, 0), of(1, 1, 2, 1)),
        (of(1, 1, 1, 0), of(2, 1, 1, 0)),
        (of(1, 1, 2, 0), of(1, 2, 1, 0)),
        (of(1, 1, 4, 1), of(2, 1, 1, 0)),
        (of(1, 1, 3, 3), of(1, 1, 1, 0)),
        (of(1, 1, 2, 2), of(1, 1, 4, 3)),
        (of(2, 1, 1, 0), of(1, 2, 1, 0)),
        (of(1, 2, 1, 0), of(2, 1, 2, 1)),
        (of(2, 2, 2, 1), of(1, 1, 3, 3)),
        (interleaved, of(1, 1, 2, 3)),
        (Parallel { context: 2, ..of(1, 1, 4, 3) }, of(2, 1, 1, 0)),
        (of(1, 1, 1, 0), Parallel { context: 4, ..of(1, 1, 4, 1) }),
    ] {
        check(&graph, first, other);
    }
}

#[test]
fn moments_in_fp8_go_on_as_they_were_and_under_other_ranks() {
    let fp8 = OptimizerSpec { moments: MomentFormat::Fp8, ..OptimizerSpec::default() };
    let graph = dense();
    for (first, other) in [
        (of(1, 1, 1, 0), of(1, 1, 2, 1)),
        (of(1, 1, 2, 1), of(2, 1, 1, 0)),
        (of(1, 1, 3, 3), of(1, 1, 1, 0)),
        (of(2, 2, 2, 1), of(1, 1, 3, 3)),
    ] {
        check_stored(&graph, &fp8, first, other);
    }
    let expert = Parallel { expert: 2, ..Parallel::data(2) };
    check_stored(&experts(), &fp8, expert, Parallel::data(1));
}

#[test]
fn mixtures_go_from_any_plan_to_any_other_and_back() {
    let graph = experts();
    let of = |data, expert| Parallel { expert, ..Parallel::data(data) };
    let mixed = Parallel { tensor: 2, pipeline: 2, zero: 1, ..of(2, 2) };
    let folded = Parallel { tensor: 2, zero: 1, ..of(2, 4) };
    for (first, other) in [
        (of(2, 2), of(1, 1)),
        (of(4, 2), of(4, 4)),
        (mixed, of(1, 1)),
        (of(4, 2), mixed),
        (folded, mixed),
    ] {
        check(&graph, first, other);
    }
}

#[test]
fn masters_in_bf16_go_on_as_they_were_and_under_other_ranks() {
    let (masters, spec) = (MasterFormat::Bf16, OptimizerSpec::default());
    for optimizer in [
        OptimizerSpec { masters, ..spec.clone() },
        OptimizerSpec { masters, moments: MomentFormat::Fp8, ..spec },
    ] {
        let graph = dense();
        for (first, other) in [
            (of(1, 1, 1, 0), of(1, 1, 2, 0)),
            (of(1, 1, 2, 0), of(2, 1, 1, 0)),
            (of(2, 2, 2, 0), of(1, 1, 1, 0)),
        ] {
            check_stored(&graph, &optimizer, first, other);
        }
        let expert = Parallel { expert: 2, ..Parallel::data(2) };
        check_stored(&experts(), &optimizer, expert, Parallel::data(1));
    }
}
