//! Runs of ranks that have a part of each sequence each: what they report, and how they go on.

mod rank_runs;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Parallel, Settings, Start, World};

use rank_runs::{TestFolder, go, go_until, metrics, tensors};

/// Settings of so many ranks, `context` of which share each sequence.
fn settings(place: &TestFolder, out: &str, context: usize, ranks: usize) -> Settings {
    Settings { context, ..place.settings(out, ranks) }
}

#[test]
fn rings_train_and_evaluate_as_one_rank_does() {
    let place = TestFolder::new();
    let alone = go(&settings(&place, "alone", 1, 1), Start::New).unwrap();
    let (of_alone, evaluations_of_alone) = metrics(&place.path("alone"));
    for (name, context, ranks, zero) in [("ring", 2, 2, 0), ("both", 2, 4, 1)] {
        let run = Settings { zero, ..settings(&place, name, context, ranks) };
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
fn rings_go_on_where_they_stopped() {
    let place = TestFolder::new();
    let whole = Settings { zero: 1, ..settings(&place, "whole", 2, 4) };
    let summary = go(&whole, Start::New).unwrap();
    let parts = Settings { out: place.path("parts"), ..whole.clone() };
    assert!(go_until(&parts, 3).fit.interrupted);
    let resumed = go(&parts, Start::Resume).unwrap();
    assert_eq!(metrics(&parts.out), metrics(&whole.out));
    assert_eq!(resumed.fit.heldout_losses, summary.fit.heldout_losses);
    assert!(tensors(&parts.out) == tensors(&whole.out));
    // Another world goes on, too.
    let other = settings(&place, "other", 2, 2);
    assert!(go_until(&other, 2).fit.interrupted);
    let more = Settings { context: 1, ..other };
    go(&more, Start::Resume).unwrap();
    let steps: Vec<u64> = metrics(&more.out).0.iter().map(|it| it.0).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
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
