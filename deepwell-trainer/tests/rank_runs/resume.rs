//! Checkpoints of ranks hold whole tensors by name: the same ranks go on with equal bits, and any
//! other ones from the same weights.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytemuck::cast_slice_mut;
use deepwell_ckpt::{Checkpoint, Section};
use deepwell_ir::ParameterState;
use deepwell_ir::capture::{LlamaConfig, ModelConfig};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::run::{RunOptions, RunSummary, run};
use deepwell_trainer::{
    CompileOptions, Engine, Parallel, Settings, Start, TrainError, Trainer, World, checkpoint,
};

use crate::degrees::{context, data, expert, single, stages, tensor};
use crate::rank_runs::{TestFolder, go, go_on_until, go_until, metrics, tensors};
use crate::shared;

/// A dense model that four ranks can split, with a table that is both ends of it.
fn dense() -> ModelConfig {
    let preset = LlamaConfig::preset("llama-micro").unwrap();
    let (num_heads, num_kv_heads, head_dim) = (4, 4, 32);
    let config = LlamaConfig { num_heads, num_kv_heads, head_dim, ..preset };
    LlamaConfig { intermediate_size: 128, tie_word_embeddings: true, ..config }.into()
}

fn mixture() -> ModelConfig {
    ModelConfig::preset("moe-micro").unwrap()
}

/// Settings of one rank that trains the model.
fn settings(place: &TestFolder, config: &ModelConfig) -> Settings {
    let path = place.path(&format!("{}.json", config.family()));
    fs::write(&path, config.to_json().to_string()).expect("a file");
    let model = path.to_str().expect("a path").to_string();
    Settings { model, ..place.settings("alone", 1) }
}

/// A run of the same settings in a folder of its own, by ranks that share the model so.
fn run_of(base: &Settings, name: &str, parallel: Parallel) -> Settings {
    Settings { out: base.out.with_file_name(name), ..shared(parallel, base) }
}

/// Checks that an engine has what a checkpoint holds, or its slices of that.
fn expect_loaded(engine: &mut Engine, checkpoint: &Checkpoint) -> Result<(), TrainError> {
    let program = engine.program().clone();
    let sections = |state: &ParameterState| {
        let moment = |name| format!("{name}.{}", state.name);
        [
            (Section::Master, state.name.clone(), Some(state.master.value())),
            (Section::MomentFirst, moment("moment1"), state.first_moment),
            (Section::MomentSecond, moment("moment2"), state.second_moment),
        ]
    };
    for state in &program.parameters {
        for (section, name, id) in sections(state) {
            let shape = program.whole_shape(state);
            let mut whole = vec![0f32; shape.iter().product()];
            checkpoint.read_f32_into(section, &name, &shape, &mut whole).unwrap();
            assert!(whole.iter().any(|&value| value != 0.0), "`{name}` is empty");
            // Ranks that share the optimizer state have it in slices.
            let Some(id) = id else { continue };
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

/// Ranks of each layout of `saved` save a checkpoint, which ranks of each layout of `loaded` load.
fn check_loads(config: &ModelConfig, saved: &[Parallel], loaded: &[Parallel]) {
    let place = TestFolder::new();
    let base = Settings { steps: 2, ..settings(&place, config) };
    let graph = config.capture(None).unwrap();
    for &parallel in saved {
        let saved = run_of(&base, &parallel.to_string(), parallel);
        go(&saved, Start::New).unwrap();
        let entries = deepwell_ckpt::list(&Trainer::checkpoints_path(&saved.out)).unwrap();
        let entry = entries.last().unwrap();
        let checkpoint = deepwell_ckpt::load(&entry.path).unwrap();
        for &parallel in loaded {
            let policy = PrecisionPolicy::preset("mxfp8").unwrap();
            let options = CompileOptions::new(policy, 32, 4);
            let options = CompileOptions { micro_batch: Some(1), parallel, ..options };
            let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
            let hardware = Hardware::cpu_only(cpu);
            let mut world = World::compile(graph.clone(), hardware, &options).unwrap();
            let loaded = world.on_all(|engine| {
                assert_eq!(checkpoint::load(entry, engine, &mut |_| ())?.step, 2);
                expect_loaded(engine, &checkpoint)
            });
            loaded.unwrap();
        }
    }
}

#[test]
fn any_world_loads_what_another_saved() {
    let [two, four] = [2, 4].map(|ranks| tensor(ranks, single()));
    let both = tensor(2, data(2, 1));
    let all = stages(2, both);
    let saved = [two, four, both, stages(2, two), all];
    check_loads(&dense(), &saved, &[single(), data(2, 0), two, four, both, all]);
    let [two, four] = [2, 4].map(|ranks| expert(2, data(ranks, 0)));
    let loaded = [single(), data(2, 0), two, expert(4, four)];
    check_loads(&mixture(), &[single(), two, four], &loaded);
}

/// Stops a run and goes on, which gives what a whole run does.
fn check_goes_on(whole: &Settings, stop_after: u64) -> RunSummary {
    let what = whole.out.display().to_string();
    let summary = go(whole, Start::New).unwrap();
    assert_eq!(summary.ranks, whole.ranks);
    let parts = Settings { out: whole.out.with_extension("parts"), ..whole.clone() };
    assert!(go_until(&parts, stop_after).fit.interrupted);
    let resumed = go(&parts, Start::Resume).unwrap();
    assert!(resumed.fit.resumed_after.is_some_and(|step| (stop_after..6).contains(&step)));
    assert_eq!(metrics(&parts.out), metrics(&whole.out), "{what}");
    assert_eq!(resumed.fit.heldout_losses, summary.fit.heldout_losses, "{what}");
    assert!(tensors(&parts.out) == tensors(&whole.out), "{what}");
    summary
}

#[test]
fn ranks_go_on_where_they_stopped() {
    let place = TestFolder::new();
    let dense = settings(&place, &dense());
    for parallel in [
        tensor(2, single()),
        tensor(4, single()),
        tensor(2, data(2, 1)),
        stages(2, tensor(2, single())),
        stages(2, tensor(2, data(2, 1))),
        context(2, data(2, 1)),
    ] {
        check_goes_on(&run_of(&dense, &parallel.to_string(), parallel), 3);
    }
    let of_six = Settings { batch_size: 6, ..dense };
    check_goes_on(&run_of(&of_six, "of-six", data(3, 0)), 2);
    // Held-out windows that ranks cannot share evenly are evaluated all the same.
    let mixture = Settings { eval_tokens: 160, ..settings(&place, &mixture()) };
    for ranks in [2, 4] {
        let run = run_of(&mixture, &format!("{ranks}-with-experts"), expert(2, data(ranks, 0)));
        assert_eq!(check_goes_on(&run, 3).fit.heldout_losses.len(), 5);
    }
}

/// Two ranks, then one, then two again: each goes on from the other's weights.
#[test]
fn a_run_goes_on_with_other_ranks() {
    for (config, parallel) in [
        (dense(), tensor(2, single())),
        (mixture(), expert(2, data(2, 0))),
        (dense(), context(2, single())),
    ] {
        let place = TestFolder::new();
        let base = settings(&place, &config);
        let two = run_of(&base, "run", parallel);
        assert!(go_until(&two, 2).fit.interrupted);
        let one = run_of(&base, "run", single());
        // It stops after its first step.
        let options = RunOptions { start: Start::Resume, ..RunOptions::default() };
        let stop = Arc::new(AtomicBool::new(true));
        assert!(run(&one, options, stop, &mut ()).unwrap().fit.interrupted);
        go(&two, Start::Resume).unwrap();
        go(&base, Start::New).unwrap();
        let (got, expected) = (metrics(&two.out).0, metrics(&base.out).0);
        assert_eq!(got.iter().map(|it| it.0).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        for ((step, loss, _), (_, expected, _)) in got.into_iter().zip(expected) {
            // Losses fall by more than this from step to step; other weights would show.
            let is_near = (loss - expected).abs() < 0.02 * expected;
            assert!(is_near, "{parallel}, step {step}: {loss} {expected}");
        }
    }
}

/// What a run leaves in its newest checkpoint, without the copies of weights, of which ranks have
/// slices in ZeRO 2 and 3.
fn state(out: &Path, zero: u8) -> BTreeMap<(Section, String), Vec<u8>> {
    let is_state = |section: Section| {
        matches!(section, Section::Master | Section::MomentFirst | Section::MomentSecond)
    };
    let all = tensors(out).into_iter();
    all.filter(|((section, _), _)| zero < 2 || is_state(*section)).collect()
}

/// Optimizer state in slices, gradients and weights too: the same run, and each goes on from what
/// another saved.
#[test]
fn gradients_and_weights_in_slices_are_one_run() {
    let place = TestFolder::new();
    let whole = place.settings("whole", 4);
    let expected = go(&whole, Start::New).unwrap();
    let check = |out: &Path, zero: u8, what: &str| {
        assert_eq!(metrics(out), metrics(&whole.out), "{what}");
        assert!(state(out, zero) == state(&whole.out, zero), "{what}");
    };
    for zero in [1, 2, 3] {
        let sliced = Settings { zero, ..place.settings(&format!("zero-{zero}"), 4) };
        let got = go(&sliced, Start::New).unwrap();
        check(&sliced.out, zero, &format!("ZeRO {zero}"));
        assert_eq!(got.fit.heldout_losses, expected.fit.heldout_losses);
        assert!(got.peak_bytes_predicted < expected.peak_bytes_predicted);
    }
    for (zero, then) in [(1, 1), (1, 0), (2, 2), (2, 0), (3, 3), (3, 0), (0, 3)] {
        let stopped = Settings { zero, ..place.settings(&format!("{zero}-then-{then}"), 4) };
        assert!(go_until(&stopped, 2).fit.interrupted);
        let start = if then == zero { Start::Resume } else { Start::ResumeChanged };
        go(&Settings { zero: then, ..stopped.clone() }, start).unwrap();
        check(&stopped.out, zero.max(then), &format!("ZeRO {zero}, then {then}"));
    }
    // Of two ranks each has other parts than of four.
    let two = Settings { zero: 1, ..place.settings("four-then-two", 4) };
    assert!(go_until(&two, 3).fit.interrupted);
    let done = metrics(&two.out).0.len();
    go(&Settings { ranks: 2, ..two.clone() }, Start::ResumeChanged).unwrap();
    let ((_, loss, _), (_, expected, _)) = (metrics(&two.out).0[done], metrics(&whole.out).0[done]);
    assert!((loss - expected).abs() <= 8.0 * f64::from(f32::EPSILON) / 2.0 * expected);
}

/// A pipeline logs, evaluates and saves what whole models do: two stages as one rank, also with a
/// step on one rank in between, and two pipelines that share the optimizer state as two ranks.
#[test]
fn a_pipeline_is_one_run() {
    let place = TestFolder::new();
    let base = place.settings("alone", 1);
    let check = |whole: Parallel, staged: Parallel| {
        let [whole, staged] = [whole, staged].map(|it| run_of(&base, &it.to_string(), it));
        let [expected, got] = [&whole, &staged].map(|it| go(it, Start::New).unwrap());
        assert_eq!((got.ranks, got.tokens_per_step), (staged.ranks, expected.tokens_per_step));
        assert_eq!(got.fit.heldout_losses, expected.fit.heldout_losses);
        assert_eq!(metrics(&staged.out), metrics(&whole.out));
        assert!(tensors(&staged.out) == tensors(&whole.out), "masters, moments, copies");
        whole
    };
    let whole = check(single(), stages(2, single()));
    check(data(2, 0), stages(2, data(2, 1)));

    let moved = run_of(&base, "two-then-one-then-two", stages(2, single()));
    assert!(go_until(&moved, 2).fit.interrupted);
    let on_one = Settings { ranks: 1, pipeline: 1, ..moved.clone() };
    assert!(go_on_until(&on_one, Start::ResumeChanged, 4).fit.interrupted);
    go(&moved, Start::ResumeChanged).unwrap();
    assert_eq!(metrics(&moved.out), metrics(&whole.out));
    assert!(tensors(&moved.out) == tensors(&whole.out));
}
