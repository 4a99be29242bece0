//! Runs of several ranks: one folder, one set of metrics, and they go on where they stopped.

mod rank_runs;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use deepwell_ckpt::{CkptDtype, Section};
use deepwell_trainer::export::{ExportOptions, export_hf};
use deepwell_trainer::profile::Profile;
use deepwell_trainer::run::{RunOptions, run};
use deepwell_trainer::{Record, RunRecord, Settings, Start, TrainError, Trainer};

use rank_runs::{TestFolder, go, go_on_until, go_until, metrics, tensors};

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

#[test]
fn ranks_go_on_where_they_stopped() {
    let place = TestFolder::new();
    let whole = place.settings("whole", 3);
    let whole = Settings { batch_size: 6, ..whole };
    let summary = go(&whole, Start::New).unwrap();
    let parts = Settings { out: place.path("parts"), ..whole.clone() };
    assert!(go_until(&parts, 2).fit.interrupted);
    let resumed = go(&parts, Start::Resume).unwrap();
    assert!(resumed.fit.resumed_after.is_some_and(|step| (2..6).contains(&step)));
    assert_eq!(metrics(&parts.out), metrics(&whole.out));
    assert_eq!(resumed.fit.heldout_losses, summary.fit.heldout_losses);
    assert!(tensors(&parts.out) == tensors(&whole.out));
}

/// What each rank has a part of only is whole in a checkpoint, and from there any number of ranks
/// takes its parts again.
#[test]
fn shared_optimizer_state_is_saved_whole() {
    let place = TestFolder::new();
    let whole = place.settings("whole", 4);
    let expected = go(&whole, Start::New).unwrap();
    let shared = Settings { zero: 1, ..place.settings("shared", 4) };
    let got = go(&shared, Start::New).unwrap();
    assert_eq!(metrics(&shared.out), metrics(&whole.out));
    assert_eq!(got.fit.heldout_losses, expected.fit.heldout_losses);
    assert!(tensors(&shared.out) == tensors(&whole.out), "masters, moments and copies");
    assert!(got.peak_bytes_predicted < expected.peak_bytes_predicted);

    // Stopped with shares of the state, gone on with, and without.
    for (name, zero) in [("shared-again", 1), ("whole-then", 0)] {
        let stopped = Settings { zero: 1, ..place.settings(name, 4) };
        assert!(go_until(&stopped, 2).fit.interrupted);
        let start = if zero == 1 { Start::Resume } else { Start::ResumeChanged };
        go(&Settings { zero, ..stopped.clone() }, start).unwrap();
        assert_eq!(metrics(&stopped.out), metrics(&whole.out), "{name}");
        assert!(tensors(&stopped.out) == tensors(&whole.out), "{name}");
    }
    // Of two ranks each has other parts than of four.
    let two = Settings { zero: 1, ..place.settings("four-then-two", 4) };
    assert!(go_until(&two, 3).fit.interrupted);
    let done = metrics(&two.out).0.len();
    go(&Settings { ranks: 2, ..two.clone() }, Start::ResumeChanged).unwrap();
    let ((_, loss, _), (_, expected, _)) = (metrics(&two.out).0[done], metrics(&whole.out).0[done]);
    assert!((loss - expected).abs() <= 8.0 * f64::from(f32::EPSILON) / 2.0 * expected);
}

/// After the loss of ranks a run goes on with those that are left, and with more again: the batch
/// stays, and every step takes the batch that would have come. Only sums are made in another order.
#[test]
fn a_run_goes_on_with_other_ranks() {
    let place = TestFolder::new();
    let of = |name: &str, ranks| Settings {
        batch_size: 12,
        micro_batch: None,
        steps: 9,
        ..place.settings(name, ranks)
    };
    let four = of("four", 4);
    go(&four, Start::New).unwrap();
    let expected = metrics(&four.out).0;
    let changed = of("changed", 4);
    assert!(go_until(&changed, 2).fit.interrupted);
    let before = tensors(&changed.out);
    // With another change beside it nothing goes on, and nothing is touched.
    let two = of("changed", 2);
    let other = Settings { learning_rate: Some(1.0), ..two.clone() };
    let error = go(&other, Start::Resume).unwrap_err();
    let TrainError::OtherRun { differences, .. } = &error else { panic!("{error}") };
    let fields: Vec<&str> = differences.iter().map(|it| it.field.as_str()).collect();
    assert!(fields.contains(&"data_ranks") && fields.contains(&"learning_rate"), "{fields:?}");
    assert!(tensors(&changed.out) == before, "nothing was touched");

    assert!(go_on_until(&two, Start::Resume, 5).fit.interrupted);
    let done = metrics(&changed.out).0.len();
    let summary = go(&of("changed", 3), Start::Resume).unwrap();
    assert_eq!((summary.ranks, summary.fit.resumed_after), (3, Some(done as u64)));
    let got = metrics(&changed.out).0;
    assert_eq!(got.iter().map(|line| line.0).collect::<Vec<_>>(), (1..=9).collect::<Vec<_>>());
    for ((step, loss, _), (_, expected, _)) in got.iter().zip(&expected) {
        // Twelve rows, summed in another order, round otherwise: sums of up to twelve terms, in
        // weights that have taken nine such steps at most. The next batch is off by 0.15 %.
        let bound = 24.0 * 9.0 * f64::from(f32::EPSILON) * expected;
        assert!((loss - expected).abs() <= bound, "step {step}: {loss} beside {expected}");
    }
    let record = std::fs::read_to_string(changed.out.join("run.json")).unwrap();
    let record: RunRecord = serde_json::from_str(&record).unwrap();
    let steps: Vec<u64> = record.changes.iter().map(|change| change.after_step).collect();
    assert!(steps.len() == 2 && steps[1] == done as u64, "{steps:?}");
    let ranks = record.changes.iter().flat_map(|change| &change.differences);
    let ranks: Vec<_> = ranks.filter(|it| it.field == "data_ranks").collect();
    assert_eq!(
        ranks.iter().map(|it| it.now.clone()).collect::<Vec<_>>(),
        [Some(2.into()), Some(3.into())]
    );
}

/// Masters and moments, which do not depend on who has copies of the weights.
fn state_by_name(out: &Path) -> BTreeMap<(Section, String), Vec<u8>> {
    let is_state = |section: &Section| {
        matches!(section, Section::Master | Section::MomentFirst | Section::MomentSecond)
    };
    let all = tensors(out).into_iter();
    all.filter(|((section, _), _)| is_state(section)).collect()
}

/// Gradients in slices, and weights too: the same run, and each goes on from what another saved.
#[test]
fn gradients_and_weights_in_slices_are_one_run() {
    let place = TestFolder::new();
    let whole = place.settings("whole", 4);
    let expected = go(&whole, Start::New).unwrap();
    let of_whole = state_by_name(&whole.out);
    for zero in [2, 3] {
        let sliced = Settings { zero, ..place.settings(&format!("zero-{zero}"), 4) };
        let got = go(&sliced, Start::New).unwrap();
        assert_eq!(metrics(&sliced.out), metrics(&whole.out), "ZeRO {zero}");
        assert_eq!(got.fit.heldout_losses, expected.fit.heldout_losses);
        assert!(state_by_name(&sliced.out) == of_whole, "ZeRO {zero}");
        assert!(got.peak_bytes_predicted < expected.peak_bytes_predicted);
        for (then, start) in [(zero, Start::Resume), (0, Start::ResumeChanged)] {
            let stopped = place.settings(&format!("{zero}-then-{then}"), 4);
            assert!(go_until(&Settings { zero, ..stopped.clone() }, 2).fit.interrupted);
            go(&Settings { zero: then, ..stopped.clone() }, start).unwrap();
            assert_eq!(metrics(&stopped.out), metrics(&whole.out), "ZeRO {zero}, then {then}");
            assert!(state_by_name(&stopped.out) == of_whole, "ZeRO {zero}, then {then}");
        }
    }
    // And from whole ones to slices.
    let stopped = place.settings("0-then-3", 4);
    assert!(go_until(&stopped, 2).fit.interrupted);
    go(&Settings { zero: 3, ..stopped.clone() }, Start::ResumeChanged).unwrap();
    assert_eq!(metrics(&stopped.out), metrics(&whole.out));
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

/// A pipeline logs, evaluates and saves what one rank does, and each goes on from what the other
/// has saved: two stages, then one rank, then two stages again.
#[test]
fn a_pipeline_is_one_run() {
    let place = TestFolder::new();
    let stages = |name: &str, pipeline, zero| Settings {
        pipeline,
        zero,
        ..place.settings(name, if zero == 1 { 2 * pipeline } else { pipeline })
    };
    let whole = stages("whole", 1, 0);
    let expected = go(&whole, Start::New).unwrap();
    let two = stages("two-stages", 2, 0);
    let got = go(&two, Start::New).unwrap();
    assert_eq!(got.ranks, 2);
    assert_eq!(got.tokens_per_step, expected.tokens_per_step);
    assert_eq!(got.fit.heldout_losses, expected.fit.heldout_losses);
    assert_eq!(metrics(&two.out), metrics(&whole.out));
    assert!(tensors(&two.out) == tensors(&whole.out), "masters, moments, copies");

    let moved = stages("two-then-one-then-two", 2, 0);
    assert!(go_until(&moved, 2).fit.interrupted);
    let on_one = Settings { ranks: 1, pipeline: 1, ..moved.clone() };
    assert!(go_on_until(&on_one, Start::ResumeChanged, 4).fit.interrupted);
    go(&moved, Start::ResumeChanged).unwrap();
    assert_eq!(metrics(&moved.out), metrics(&whole.out));
    assert!(tensors(&moved.out) == tensors(&whole.out));

    // Two pipelines that have a part of the optimizer state each, beside two whole models.
    let of_ranks = go(&place.settings("two-ranks", 2), Start::New).unwrap();
    let shared = stages("shared", 2, 1);
    let got = go(&shared, Start::New).unwrap();
    assert_eq!(metrics(&shared.out), metrics(&place.settings("two-ranks", 2).out));
    assert_eq!(got.fit.heldout_losses, of_ranks.fit.heldout_losses);
    let expected = tensors(&place.settings("two-ranks", 2).out);
    assert!(tensors(&shared.out) == expected);
}
