//! One run that goes on under other ranks after each step.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use deepwell_ckpt::CkptDtype;
use deepwell_ir::capture::LlamaConfig;
use deepwell_trainer::export::{ExportOptions, export_hf};
use deepwell_trainer::run::{RunOptions, run};
use deepwell_trainer::{Parallel, RunRecord, Settings, Start, Trainer};

use crate::degrees::{context, data, expert, interleaved, single, stages, tensor, zero_bubble};
use crate::rank_runs::{TestFolder, go, metrics};
use crate::shared;

/// Set to anything, every ordered pair of layouts is tried instead of a circle through all.
const ALL: &str = "DEEPWELL_ALL_RANK_CHANGES";

/// All ways in which one to four ranks share a dense model of four layers and four heads.
fn dense() -> [Parallel; 28] {
    [
        single(),
        data(2, 0),
        data(1, 3),
        data(2, 1),
        tensor(2, single()),
        data(2, 2),
        stages(2, single()),
        data(2, 3),
        context(2, single()),
        interleaved(stages(2, single())),
        data(3, 0),
        zero_bubble(stages(2, single())),
        data(3, 3),
        stages(3, single()),
        data(4, 0),
        tensor(4, single()),
        data(4, 3),
        stages(4, single()),
        context(2, data(1, 3)),
        tensor(2, data(2, 1)),
        stages(2, data(2, 2)),
        context(4, single()),
        tensor(2, stages(2, single())),
        context(2, data(2, 1)),
        tensor(2, data(2, 3)),
        zero_bubble(stages(2, data(2, 1))),
        interleaved(stages(2, data(2, 0))),
        data(4, 1),
    ]
}

/// The same of a mixture of experts.
fn mixture() -> [Parallel; 13] {
    [
        single(),
        expert(2, data(2, 0)),
        data(2, 3),
        expert(4, data(4, 0)),
        tensor(2, single()),
        expert(2, data(4, 1)),
        stages(2, single()),
        expert(2, data(2, 3)),
        expert(2, tensor(2, single())),
        data(3, 1),
        expert(2, stages(2, data(2, 1))),
        context(2, single()),
        expert(4, data(4, 3)),
    ]
}

/// A walk through so many places: a circle, or along every way from one to another, once.
fn walk(places: usize) -> Vec<usize> {
    if std::env::var_os(ALL).is_none() {
        return (0..places).chain([0]).collect();
    }
    // Each place has as many ways out as in, so that no way is left when none leads on.
    let mut ways: Vec<Vec<usize>> =
        (0..places).map(|from| (0..places).filter(|&to| to != from).collect()).collect();
    let (mut path, mut walked) = (vec![0], Vec::new());
    while let Some(&at) = path.last() {
        match ways[at].pop() {
            Some(next) => path.push(next),
            None => walked.extend(path.pop()),
        }
    }
    assert_eq!(walked.len(), places * (places - 1) + 1);
    walked
}

/// Takes a step under each layout of a walk through all; the losses are those of one rank.
fn check(base: &Settings, layouts: &[Parallel]) {
    let walk = walk(layouts.len());
    let base = Settings { steps: walk.len() as u64, ..base.clone() };
    let whole = Settings { out: base.out.with_extension("whole"), ..base.clone() };
    go(&whole, Start::New).expect("one rank trains");
    let expected = metrics(&whole.out).0;
    for (step, pair) in walk.windows(2).enumerate() {
        let settings = shared(layouts[pair[0]], &base);
        // It stops after its first step.
        let stop = Arc::new(AtomicBool::new(true));
        let start = if step == 0 { Start::New } else { Start::Resume };
        let options = RunOptions { start, ..RunOptions::default() };
        let report = run(&settings, options, stop, &mut ())
            .unwrap_or_else(|error| panic!("step {}, {}: {error}", step + 1, layouts[pair[0]]));
        assert_eq!(report.fit.step, step as u64 + 1);
        assert_eq!(report.ranks, settings.ranks);
    }
    for ((step, loss, _), (_, expected, _)) in metrics(&base.out).0.iter().zip(&expected) {
        // The order of sums in FP32, which each step's update carries on.
        assert!((loss - expected).abs() <= 2e-4 * expected, "step {step}: {loss}, {expected}");
    }
    let record = fs::read_to_string(base.out.join("run.json")).expect("a record");
    let record: RunRecord = serde_json::from_str(&record).expect("a record");
    assert_eq!(record.changes.len() + 2, walk.len(), "each change of ranks is written down");
}

fn config(name: &str) -> LlamaConfig {
    let preset = LlamaConfig::preset(name).expect("a preset");
    let heads = (4, 4, 16);
    let (num_heads, num_kv_heads, head_dim) = heads;
    LlamaConfig { num_layers: 4, num_heads, num_kv_heads, head_dim, ..preset }
}

fn settings(place: &TestFolder, config: &LlamaConfig) -> Settings {
    let path = place.path("config.json");
    fs::write(&path, config.to_json().to_string()).expect("a file");
    Settings {
        model: path.to_str().expect("a path").to_string(),
        precision: "f32".to_string(),
        seq_len: 16,
        batch_size: 12,
        micro_batch: None,
        eval_every: Some(10_000),
        checkpoint_every: Some(10_000),
        learning_rate: Some(1e-3),
        ..place.settings("walk", 1)
    }
}

/// Stages of a pipeline, ZeRO stages and slices of layers had kernels of their own, by which a run
/// was taken for another one: 32 of 121 changes were refused.
#[test]
fn ranks_of_any_layout_go_on_with_any_other() {
    let place = TestFolder::new();
    check(&settings(&place, &config("llama-micro")), &dense());
}

/// The hash of loaded weights was that of the order in which ranks had them, and of their names
/// there: each of these layouts has another order.
#[test]
fn loaded_weights_are_the_same_by_whichever_ranks() {
    let place = TestFolder::new();
    let base = settings(&place, &config("llama-micro"));
    let first = Settings { steps: 1, out: place.path("first"), ..base.clone() };
    go(&first, Start::New).expect("a run");
    let checkpoints = deepwell_ckpt::list(&Trainer::checkpoints_path(&first.out)).expect("some");
    let to = place.path("model");
    let options = ExportOptions {
        checkpoint: checkpoints[0].path.clone(),
        to: to.clone(),
        dtype: CkptDtype::F32,
        shard_bytes_max: 1 << 30,
        model: None,
        tokenizer: None,
        config: None,
    };
    export_hf(&options, &mut |_, _| ()).expect("a model folder");
    let loaded = Settings { model: to.to_str().expect("a path").to_string(), ..base };
    let layouts = [
        single(),
        data(2, 3),
        tensor(2, single()),
        stages(3, single()),
        data(3, 3),
        interleaved(stages(2, single())),
        tensor(2, stages(2, single())),
        context(2, single()),
        tensor(2, data(2, 3)),
    ];
    check(&loaded, &layouts);
    assert_ne!(initial_weights(&loaded.out), "from seed");
}

fn initial_weights(out: &Path) -> String {
    let record = fs::read_to_string(out.join("run.json")).expect("a record");
    let record: RunRecord = serde_json::from_str(&record).expect("a record");
    record.fingerprint["initial_weights"].as_str().expect("text").to_string()
}

#[test]
fn mixtures_of_any_layout_go_on_with_any_other() {
    let place = TestFolder::new();
    check(&settings(&place, &config("moe-micro")), &mixture());
}

/// `--ep` that no longer divides the ranks was an error, and so was a micro-batch.
#[test]
fn degrees_that_do_not_divide_the_ranks_any_more_are_chosen_anew() {
    let place = TestFolder::new();
    let base = Settings { steps: 4, ..settings(&place, &config("moe-micro")) };
    let of = |ranks| Settings { ranks, expert: 4, micro_batch: Some(3), ..base.clone() };
    for (ranks, start) in [(4, Start::New), (2, Start::Resume), (1, Start::Resume)] {
        let stop = Arc::new(AtomicBool::new(true));
        let options = RunOptions { start, ..RunOptions::default() };
        run(&of(ranks), options, stop, &mut ()).unwrap_or_else(|it| panic!("{ranks} ranks: {it}"));
    }
    go(&of(3), Start::Resume).expect("three ranks");
    // What no ranks can have stays an error.
    let error = go(&Settings { zero: 7, ..of(2) }, Start::Resume).expect_err("no such stage");
    assert!(error.to_string().starts_with("ZeRO stage: expected 0, 1"), "{error}");
}
