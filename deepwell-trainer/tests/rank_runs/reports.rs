//! What runs of ranks show and give: metrics, pages, profiles, checkpoints, model folders.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use deepwell_ckpt::{CkptDtype, Section};
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::export::{ExportOptions, export_hf};
use deepwell_trainer::profile::Profile;
use deepwell_trainer::run::{RunOptions, run};
use deepwell_trainer::{CompileOptions, Parallel, Record, Settings, Start, Trainer, World};

use crate::rank_runs::{TestFolder, go, metrics, tensors};

#[test]
fn a_run_of_ranks_is_one_run() {
    let place = TestFolder::new();
    let [one, two] = [1, 2].map(|ranks| place.settings(&format!("of-{ranks}"), ranks));
    let (alone, together) = (go(&one, Start::New).unwrap(), go(&two, Start::New).unwrap());
    assert_eq!((alone.ranks, together.ranks), (1, 2));
    assert_eq!(alone.tokens_per_step, together.tokens_per_step);
    assert_eq!(alone.fit.heldout_losses.len(), together.fit.heldout_losses.len());
    let ((steps_of_one, evaluations_of_one), (steps, evaluations)) =
        (metrics(&one.out), metrics(&two.out));
    assert_eq!(steps.iter().map(|line| line.0).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    assert_eq!(evaluations.iter().map(|line| line.0).collect::<Vec<_>>(), [0, 3, 6]);
    // From the same weights on the same windows, which the ranks share.
    assert_eq!(evaluations[0], evaluations_of_one[0]);
    // Four micro-batches, summed in another order: eight roundings of half a last bit at most.
    let (loss, expected) = (steps[0].1, steps_of_one[0].1);
    assert!((loss - expected).abs() <= 8.0 * f64::from(f32::EPSILON) / 2.0 * expected);
    assert!(together.peak_bytes_predicted > alone.peak_bytes_predicted);
}

/// One of two ranks has no third window, and gathers the weights for the other's: it went on, and
/// both waited for ever.
#[test]
fn ranks_with_parts_of_weights_evaluate_an_odd_number_of_windows() {
    let place = TestFolder::new();
    let of = |name: &str, ranks, zero| {
        let settings = place.settings(name, ranks);
        let rank_timeout_s = 60;
        go(&Settings { zero, eval_tokens: 96, rank_timeout_s, ..settings }, Start::New).unwrap()
    };
    let (alone, together) = (of("of-1", 1, 0), of("of-2", 2, 3));
    assert_eq!(alone.fit.heldout_losses.len(), 3);
    assert_eq!(together.fit.heldout_losses.len(), 3);
}

/// Users see one run: times by rank in metrics, summary and page, and who has what.
#[test]
fn ranks_are_seen() {
    let place = TestFolder::new();
    let of = |name: &str, ranks| Settings { steps: 12, ..place.settings(name, ranks) };
    let two = Settings { pipeline: 2, ..of("stages-of-two", 4) };
    let summary = go(&two, Start::New).unwrap();
    let text = std::fs::read_to_string(Trainer::metrics_path(&two.out)).unwrap();
    let records: Vec<Record> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of_steps: Vec<&Record> = records.iter().filter(|record| record.loss.is_some()).collect();
    assert_eq!(of_steps.len(), 12);
    for record in of_steps {
        let ranks: Vec<u32> = record.ranks.iter().map(|time| time.rank).collect();
        assert_eq!(ranks, [0, 1, 2, 3], "step {}", record.step);
        assert!(record.ranks.iter().all(|time| time.busy_s > 0.0 && time.waited_s > 0.0));
    }
    assert_eq!(summary.fit.ranks.len(), 4);
    let layers: Vec<&str> = summary.rank_map.iter().map(|it| it.layers.as_str()).collect();
    assert_eq!(layers, ["0", "0", "1", "1"]);
    let places = summary.rank_map.iter().map(|it| (it.data, it.pipeline));
    assert_eq!(places.collect::<Vec<_>>(), [(0, 0), (1, 0), (0, 1), (1, 1)]);
    assert!(summary.rank_map.iter().all(|it| it.peak_bytes > 0 && it.bytes_on_link > 0));
    let page = std::fs::read_to_string(two.out.join("report.html")).unwrap();
    for part in ["<h2>Ranks</h2>", "rank 3", "4 (data 2, pipeline 2)", "held-out"] {
        assert!(page.contains(part), "expected `{part}` in the page");
    }
    // Of one rank there is nothing to map.
    let one = of("one", 1);
    let summary = go(&one, Start::New).unwrap();
    assert!(summary.rank_map.is_empty() && summary.fit.ranks.is_empty());
    let page = std::fs::read_to_string(one.out.join("report.html")).unwrap();
    assert!(page.contains("<svg") && !page.contains("<h2>Ranks</h2>"));
}

/// A profile has every rank: what it exchanges, and that ranks of a processor do so in turns with
/// what computes.
#[test]
fn a_profile_has_all_ranks() {
    let place = TestFolder::new();
    let two = Settings { zero: 3, ..place.settings("profiled", 2) };
    let options = RunOptions { profile: true, ..RunOptions::default() };
    run(&two, options, Arc::new(AtomicBool::new(false)), &mut ()).unwrap();
    let read = |name: &str| std::fs::read_to_string(two.out.join(name)).unwrap();
    let profile: Profile = serde_json::from_str(&read("profile.json")).unwrap();
    let kinds = |op: &str| profile.ranks.exchanges.iter().find(|it| it.op == op).unwrap();
    let (gather, scatter) = (kinds("all_gather"), kinds("reduce_scatter"));
    for exchange in [gather, scatter] {
        assert_eq!((exchange.group.as_str(), exchange.ranks), ("data", 2));
        assert!(exchange.bytes_on_link > 0 && exchange.time_s > 0.0 && exchange.bus_gbps > 0.0);
    }
    // Masters are gathered for forward and backward, but for the embedding's, which the backward
    // does not read; gradients of as many bytes are scattered once.
    let ratio = gather.bytes_on_link as f64 / scatter.bytes_on_link as f64;
    assert!((1.5..2.0).contains(&ratio), "{ratio}");
    let all_s: f64 = profile.ranks.exchanges.iter().map(|it| it.time_s).sum();
    assert_eq!(profile.ranks.exposed_s, Some(all_s));
    let table = read("profile.txt");
    for part in ["rank 0  all_gather", "rank 1  all_gather", "rank 1  reduce_scatter", "exposed"] {
        assert!(table.contains(part), "expected `{part}` in {table}");
    }
    let trace: serde_json::Value = serde_json::from_str(&read("trace.json")).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..2 {
        let of_rank = |event: &&serde_json::Value| event["pid"] == rank && event["ph"] == "X";
        assert_eq!(events.iter().filter(of_rank).count(), profile.calls.len(), "rank {rank}");
    }
}

/// Copies from which checkpoints are written are predicted, whoever writes which part.
#[test]
fn copies_for_checkpoints_are_predicted() {
    let place = TestFolder::new();
    let whole = place.settings("direct", 4);
    assert_eq!(go(&whole, Start::New).unwrap().pinned_bytes_predicted, 0);
    let copied = Settings { async_checkpoints: true, ..place.settings("copied", 4) };
    let summary = go(&copied, Start::New).unwrap();
    assert!(tensors(&copied.out) == tensors(&whole.out));
    assert_eq!(metrics(&copied.out), metrics(&whole.out));
    // Each byte is copied by one rank; scales are copied as they lie, in tiles that are filled up.
    let all = tensors(&copied.out);
    let bytes = |of: &dyn Fn(Section) -> bool| -> usize {
        all.iter().filter(|((section, _), _)| of(*section)).map(|(_, bytes)| bytes.len()).sum()
    };
    let of_scales = bytes(&|section| section == Section::Scales);
    let others = bytes(&|section| section != Section::Scales);
    let copied = summary.pinned_bytes_predicted as usize - others;
    let are_tiles = copied >= of_scales && copied.is_multiple_of(512);
    assert!(are_tiles, "{copied} for {of_scales} of scales");
}

/// Weights leave for a Hugging Face folder from the slices of ranks, and come from one into stages.
#[test]
fn hugging_face_folders_are_those_of_any_ranks() {
    let place = TestFolder::new();
    let exported = |settings: &Settings| {
        go(settings, Start::New).unwrap();
        let listed = deepwell_ckpt::list(&Trainer::checkpoints_path(&settings.out)).unwrap();
        let to = settings.out.join("exported");
        let options = ExportOptions {
            checkpoint: listed.last().unwrap().path.clone(),
            to: to.clone(),
            dtype: CkptDtype::F32,
            shard_bytes_max: 1 << 30,
            model: None,
            tokenizer: None,
            config: None,
        };
        export_hf(&options, &mut |_, _| ()).unwrap();
        to
    };
    let whole = exported(&place.settings("whole", 4));
    let sliced = exported(&Settings { zero: 3, ..place.settings("sliced", 4) });
    let weights = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(weights(&whole) == weights(&sliced));

    let model = sliced.to_str().unwrap().to_string();
    let from = |name: &str, pipeline| Settings {
        model: model.clone(),
        pipeline,
        ..place.settings(name, pipeline)
    };
    let (one, two) = (from("one", 1), from("two-stages", 2));
    go(&one, Start::New).unwrap();
    go(&two, Start::New).unwrap();
    assert_eq!(metrics(&one.out), metrics(&two.out));
    // They go on where the weights were, not at those of a seed.
    let (first, last) = (metrics(&one.out).1[0].1, metrics(&place.path("sliced")).1[2].1);
    assert!((first - last).abs() < 0.01 * last, "{first} beside {last}");
}

#[test]
fn rings_train_and_evaluate_as_one_rank_does() {
    let place = TestFolder::new();
    let alone = go(&place.settings("alone", 1), Start::New).unwrap();
    let (of_alone, evaluations_of_alone) = metrics(&place.path("alone"));
    for (name, context, ranks, zero) in [("ring", 2, 2, 0), ("both", 2, 4, 1)] {
        let run = Settings { zero, context, ..place.settings(name, ranks) };
        let summary = go(&run, Start::New).unwrap();
        assert_eq!((summary.ranks, summary.tokens_per_step), (ranks, alone.tokens_per_step));
        let (got, evaluations) = metrics(&run.out);
        assert_eq!(got.len(), of_alone.len());
        // Losses fall by more than this from step to step; a part alone would be half of it.
        let is_near = |got: f64, expected: f64| (got - expected).abs() < 0.02 * expected;
        for ((step, loss, _), (_, expected, _)) in got.iter().zip(&of_alone) {
            assert!(is_near(*loss, *expected), "{name}, step {step}: {loss} {expected}");
        }
        assert_eq!(evaluations.len(), evaluations_of_alone.len());
        for ((step, loss), (_, expected)) in evaluations.iter().zip(&evaluations_of_alone) {
            assert!(is_near(*loss, *expected), "{name}, step {step}: {loss} {expected}");
        }
        let (got, expected) = (&summary.fit.heldout_losses, &alone.fit.heldout_losses);
        assert_eq!(got.len(), expected.len());
        assert!(got.iter().zip(expected).all(|(got, expected)| is_near(*got, *expected)));
    }
}

#[test]
fn what_no_ring_takes_is_refused() {
    let check = |parallel: Parallel, seq: usize, expected: &str| {
        let graph = capture(&LlamaConfig::preset("llama-micro").unwrap()).unwrap();
        let options =
            CompileOptions { parallel, ..CompileOptions::new(PrecisionPolicy::bf16(), seq, 4) };
        let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
        let world = World::compile(graph, Hardware::cpu_only(cpu), &options);
        let error = world.err().expect("an error");
        assert!(error.to_string().contains(expected), "{error}");
    };
    let of = |data, context| Parallel { context, ..Parallel::data(data) };
    check(of(2, 2), 30, "sequence length: expected a multiple of 4, two chunks for each");
    check(of(4, 3), 32, "context-parallel ranks: expected a divisor of the 4 ranks");
}
