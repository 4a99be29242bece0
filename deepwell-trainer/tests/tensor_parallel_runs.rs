//! Checkpoints of ranks that split each layer hold whole tensors by name: any other world goes on
//! from them with equal bits.

mod rank_runs;

use std::fs;

use bytemuck::cast_slice_mut;
use deepwell_ckpt::Section;
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Graph, ParameterState, ValueId};
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::run::RunOptions;
use deepwell_trainer::{
    CompileOptions, Engine, Parallel, Settings, Start, TrainError, Trainer, World, checkpoint,
};

use rank_runs::{TestFolder, go, go_until, metrics, tensors};

fn config() -> LlamaConfig {
    LlamaConfig {
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 32,
        intermediate_size: 128,
        tie_word_embeddings: true,
        ..LlamaConfig::preset("llama-micro").unwrap()
    }
}

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

fn graph() -> Graph {
    capture(&config()).unwrap()
}

/// Settings of so many tensor-parallel ranks, stages and data-parallel ranks.
fn staged(place: &TestFolder, out: &str, [tensor, pipeline, data]: [usize; 3]) -> Settings {
    Settings { pipeline, ranks: tensor * pipeline * data, ..settings(place, out, tensor, data) }
}

fn settings(place: &TestFolder, out: &str, tensor: usize, data: usize) -> Settings {
    let path = place.path("config.json");
    fs::write(&path, config().to_json().to_string()).expect("a file");
    let model = path.to_str().expect("a path").to_string();
    Settings { model, tensor, ..place.settings(out, tensor * data) }
}

/// Masters and moments that a rank has, with their sections.
fn sections(state: &ParameterState) -> Vec<(Section, String, ValueId)> {
    let name = &state.name;
    let moments = [
        (Section::MomentFirst, format!("moment1.{name}"), state.first_moment),
        (Section::MomentSecond, format!("moment2.{name}"), state.second_moment),
    ];
    let moments = moments.into_iter().filter_map(|(section, name, id)| Some((section, name, id?)));
    [(Section::Master, name.clone(), state.master)].into_iter().chain(moments).collect()
}

/// Checks that an engine has what a checkpoint holds, or its slices of that.
fn expect_loaded(
    engine: &mut Engine,
    checkpoint: &deepwell_ckpt::Checkpoint,
) -> Result<(), TrainError> {
    let program = engine.program().clone();
    for state in &program.parameters {
        for (section, name, id) in sections(state) {
            let shape = program.whole_shape(state);
            let mut whole = vec![0f32; shape.iter().product()];
            checkpoint.read_f32_into(section, &name, &shape, &mut whole).unwrap();
            let own = match state.split {
                Some(split) => split.extract(&whole, &program.value(id).shape),
                None => whole,
            };
            let mut got = vec![0f32; own.len()];
            engine.read_value(id, cast_slice_mut(&mut got))?;
            assert!(got == own, "rank {}: `{name}`", engine.rank());
        }
    }
    Ok(())
}

#[test]
fn any_world_loads_what_another_saved() {
    let place = TestFolder::new();
    let whole = Settings { steps: 2, ..settings(&place, "whole", 1, 1) };
    go(&whole, Start::New).unwrap();
    let expected: Vec<(Section, String, Vec<usize>)> = {
        let entries = deepwell_ckpt::list(&Trainer::checkpoints_path(&whole.out)).unwrap();
        let of_one = deepwell_ckpt::load(&entries.last().unwrap().path).unwrap();
        let program = World::compile(graph(), hardware(), &options(Parallel::data(1)));
        let program = program.unwrap().first().program().clone();
        let of = |state: &ParameterState| {
            let shape = program.whole_shape(state);
            sections(state)
                .into_iter()
                .map(|(section, name, _)| (section, name, shape.clone()))
                .collect()
        };
        let all: Vec<Vec<_>> = program.parameters.iter().map(of).collect();
        for (section, name, shape) in all.iter().flatten() {
            let mut values = vec![0f32; shape.iter().product()];
            of_one.read_f32_into(*section, name, shape, &mut values).unwrap();
        }
        all.concat()
    };
    for (degrees, zero) in
        [([2, 1, 1], 0), ([4, 1, 1], 0), ([2, 1, 2], 1), ([2, 2, 1], 0), ([2, 2, 2], 1)]
    {
        let name = format!("{degrees:?}-{zero}");
        let saved = Settings { zero, steps: 2, ..staged(&place, &name, degrees) };
        go(&saved, Start::New).unwrap();
        let entries = deepwell_ckpt::list(&Trainer::checkpoints_path(&saved.out)).unwrap();
        let entry = entries.last().unwrap();
        let checkpoint = deepwell_ckpt::load(&entry.path).unwrap();
        // The tensors of one rank, under their names and with their shapes.
        for (section, name, shape) in &expected {
            let mut values = vec![0f32; shape.iter().product()];
            checkpoint.read_f32_into(*section, name, shape, &mut values).unwrap();
            assert!(values.iter().any(|&value| value != 0.0), "`{name}` is empty");
        }
        for parallel in [
            Parallel::data(1),
            Parallel::data(2),
            Parallel { tensor: 2, ..Parallel::data(1) },
            Parallel { tensor: 4, ..Parallel::data(1) },
            Parallel { tensor: 2, zero: 1, ..Parallel::data(2) },
            Parallel { tensor: 2, pipeline: 2, zero: 1, ..Parallel::data(2) },
        ] {
            let mut world = World::compile(graph(), hardware(), &options(parallel)).unwrap();
            let loaded = world.on_all(|engine| {
                let position = checkpoint::load(entry, engine, &mut |_| ())?;
                assert_eq!(position.step, 2);
                expect_loaded(engine, &checkpoint)
            });
            loaded.unwrap();
        }
    }
}

fn options(parallel: Parallel) -> CompileOptions {
    let policy = deepwell_precision::PrecisionPolicy::preset("mxfp8").unwrap();
    CompileOptions { micro_batch: Some(1), parallel, ..CompileOptions::new(policy, 32, 4) }
}

#[test]
fn ranks_go_on_where_they_stopped() {
    let place = TestFolder::new();
    for (name, degrees, zero) in [
        ("two", [2, 1, 1], 0),
        ("four", [4, 1, 1], 0),
        ("both", [2, 1, 2], 1),
        ("stages", [2, 2, 1], 0),
        ("all", [2, 2, 2], 1),
    ] {
        let whole = Settings { zero, ..staged(&place, name, degrees) };
        let summary = go(&whole, Start::New).unwrap();
        assert_eq!(summary.ranks, degrees.iter().product::<usize>());
        let parts = Settings { out: place.path(&format!("{name}-parts")), ..whole.clone() };
        assert!(go_until(&parts, 3).fit.interrupted);
        let resumed = go(&parts, Start::Resume).unwrap();
        assert_eq!(metrics(&parts.out), metrics(&whole.out), "{name}");
        assert_eq!(resumed.fit.heldout_losses, summary.fit.heldout_losses);
        assert!(tensors(&parts.out) == tensors(&whole.out), "{name}");
    }
}

/// Two ranks, then one, then two: each goes on from the other's weights.
#[test]
fn a_run_goes_on_with_other_ranks() {
    let place = TestFolder::new();
    let run = settings(&place, "run", 2, 1);
    assert!(go_until(&run, 2).fit.interrupted);
    let one = Settings { tensor: 1, ranks: 1, ..run.clone() };
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let changed = RunOptions { start: Start::Resume, ..RunOptions::default() };
    let stopped = deepwell_trainer::run::run(&one, changed, stop, &mut ()).unwrap();
    assert!(stopped.fit.interrupted);
    go(&run, Start::Resume).unwrap();
    let alone = Settings { tensor: 1, ranks: 1, ..settings(&place, "alone", 1, 1) };
    go(&alone, Start::New).unwrap();
    let (got, expected) = (metrics(&run.out).0, metrics(&alone.out).0);
    assert_eq!(got.len(), 6);
    for ((step, loss, _), (_, expected, _)) in got.into_iter().zip(expected) {
        // Losses fall by more than this from step to step; other weights would show.
        assert!((loss - expected).abs() < 0.02 * expected, "step {step}: {loss} {expected}");
    }
}
