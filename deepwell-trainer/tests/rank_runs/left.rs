//! Runs that go on with what is left of their ranks.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use deepwell_ir::capture::LlamaConfig;
use deepwell_trainer::metrics::StepLine;
use deepwell_trainer::run::{RunOptions, run};
use deepwell_trainer::{Progress, RunRecord, Settings, Start, TrainError};

use crate::rank_runs::{TestFolder, go, go_on_until, go_until, metrics, tensors};

/// Twelve sequences a step of a model that two ranks can split.
fn settings(place: &TestFolder, out: &str, ranks: usize) -> Settings {
    let preset = LlamaConfig::preset("llama-micro").unwrap();
    let config = LlamaConfig {
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 32,
        intermediate_size: 128,
        ..preset
    };
    let path = place.path("config.json");
    fs::write(&path, config.to_json().to_string()).expect("a file");
    let model = path.to_str().expect("a path").to_string();
    Settings { model, steps: 9, batch_size: 12, tensor: 2, ..place.settings(out, ranks) }
}

/// Notes of a run.
#[derive(Default)]
struct Notes(Vec<String>);

impl Progress for Notes {
    fn step(&mut self, _line: &StepLine) {}
    fn evaluation(&mut self, _step: u64, _val_loss: f64) {}
    fn note(&mut self, text: &str) {
        self.0.push(text.to_string());
    }
}

/// After a loss of ranks a run goes on with what is left of them: with its degrees where they still
/// divide the ranks, and else with others, chosen anew and said once.
#[test]
fn degrees_are_chosen_anew_for_the_ranks_that_are_left() {
    let place = TestFolder::new();
    let of = |name: &str, ranks| settings(&place, name, ranks);
    let whole = of("whole", 4);
    go(&whole, Start::New).unwrap();
    let expected = metrics(&whole.out).0;
    let lost = of("lost", 4);
    assert!(go_until(&lost, 2).fit.interrupted);
    // Three ranks are no multiple of two.
    let three = of("lost", 3);
    let error = go(&three, Start::New).unwrap_err().to_string();
    assert!(error.contains("a multiple of 2 tensor"), "{error}");
    assert!(go_on_until(&three, Start::Resume, 5).fit.interrupted);
    // Two are.
    let mut notes = Notes::default();
    let options = RunOptions { start: Start::Resume, ..RunOptions::default() };
    let two = of("lost", 2);
    let summary = run(&two, options, Arc::new(AtomicBool::new(false)), &mut notes).unwrap();
    assert!(!notes.0.iter().any(|note| note.contains("cannot go on")), "{:?}", notes.0);
    assert_eq!((summary.ranks, summary.tokens_per_step), (2, 12 * 32));
    let got = metrics(&lost.out).0;
    assert_eq!(got.iter().map(|line| line.0).collect::<Vec<_>>(), (1..=9).collect::<Vec<_>>());
    for ((step, loss, _), (_, expected, _)) in got.iter().zip(&expected) {
        // Ranks that split layers round partial sums to BF16 where others do not, 2^-9 of each, and
        // quantize another way what lies between two numbers; the next batch is off by 0.15 %.
        assert!((loss - expected).abs() <= 5e-4 * expected, "step {step}: {loss}, {expected}");
    }
    let record = std::fs::read_to_string(lost.out.join("run.json")).unwrap();
    let record: RunRecord = serde_json::from_str(&record).unwrap();
    let ranks = record.changes.iter().map(|change| {
        let of = |field: &str| {
            let found = change.differences.iter().find(|it| it.field == field);
            found.and_then(|it| Some(it.now.as_ref()?.to_string()))
        };
        (of("data_ranks"), of("tensor_ranks"))
    });
    let some = |text: &str| Some(text.to_string());
    assert_eq!(ranks.collect::<Vec<_>>(), [(some("3"), some("1")), (some("1"), some("2"))]);
}

/// One message says how many ranks there are, how they share the model now, and why; one error that
/// there is no way.
#[test]
fn ranks_that_cannot_go_on_as_they_were_are_told() {
    let place = TestFolder::new();
    let of = |ranks| settings(&place, "told", ranks);
    assert!(go_until(&of(4), 2).fit.interrupted);
    let mut notes = Notes::default();
    let options = RunOptions { start: Start::Resume, ..RunOptions::default() };
    run(&of(3), options, Arc::new(AtomicBool::new(false)), &mut notes).unwrap();
    let told: Vec<&String> = notes.0.iter().filter(|note| note.contains("cannot go on")).collect();
    let expected = "note: 3 ranks cannot go on as tensor 2 with 12 sequences of a step: they are \
                    data 3 now, which takes least of the 1 ways there are";
    assert!(told.len() == 1 && told[0].starts_with(expected), "{told:?}");
    // Neither rows nor heads nor layers are for five.
    let error = go(&of(5), Start::Resume).unwrap_err().to_string();
    let expected = "as many as can share the model and the 12 sequences of a step";
    assert!(error.contains(expected), "{error}");
}

/// After the loss of ranks a run goes on with those that are left, and with more again: the batch
/// stays, and every step takes the batch that would have come. Only sums are made in another order.
#[test]
fn a_run_goes_on_with_fewer_ranks_and_with_more() {
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
