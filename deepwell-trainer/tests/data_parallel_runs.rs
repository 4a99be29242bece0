//! Runs of several ranks: one folder, one set of metrics, and they go on where they stopped.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use deepwell_trainer::metrics::StepLine;
use deepwell_trainer::run::{RunOptions, RunSummary, run};
use deepwell_trainer::{Progress, Record, Settings, Start, TrainError, Trainer};

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().expect("a temporary folder"));
        let words = (0..2000u32).map(|index| format!("{} ", index.wrapping_mul(2_654_435_761)));
        fs::write(place.path("text.txt"), words.collect::<String>()).expect("a file");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn settings(&self, out: &str, ranks: usize) -> Settings {
        Settings {
            model: "llama-micro".to_string(),
            data: vec![self.path("text.txt")],
            cache_dir: self.path("cache"),
            out: self.path(out),
            precision: "mxfp8".to_string(),
            ranks,
            steps: 6,
            seq_len: 32,
            batch_size: 4,
            micro_batch: Some(1),
            eval_tokens: 100,
            eval_every: Some(3),
            checkpoint_every: Some(2),
            ..Settings::default()
        }
    }
}

/// Stops the run after a step.
struct StopAfter(u64, Arc<AtomicBool>);

impl Progress for StopAfter {
    fn step(&mut self, line: &StepLine) {
        if line.step >= self.0 {
            self.1.store(true, Ordering::Relaxed);
        }
    }
    fn evaluation(&mut self, _step: u64, _val_loss: f64) {}
    fn note(&mut self, _text: &str) {}
}

fn go(settings: &Settings, start: Start) -> Result<RunSummary, TrainError> {
    let options = RunOptions { start, profile: false };
    run(settings, options, Arc::new(AtomicBool::new(false)), &mut ())
}

fn go_until(settings: &Settings, step: u64) -> RunSummary {
    let stop = Arc::new(AtomicBool::new(false));
    let mut progress = StopAfter(step, Arc::clone(&stop));
    run(settings, RunOptions::default(), stop, &mut progress).expect("a run")
}

/// Step, loss and norm of each training step; step and loss of each evaluation.
fn metrics(out: &Path) -> (Vec<(u64, f64, f64)>, Vec<(u64, f64)>) {
    let text = fs::read_to_string(Trainer::metrics_path(out)).expect("metrics");
    let records: Vec<Record> =
        text.lines().map(|line| serde_json::from_str(line).expect("a line")).collect();
    let steps = records.iter().filter_map(|r| Some((r.step, r.loss?, r.grad_norm?))).collect();
    (steps, records.iter().filter_map(|r| Some((r.step, r.val_loss?))).collect())
}

/// Everything in the newest checkpoint of a run but what says how it was made.
fn tensors(out: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let listed = deepwell_ckpt::list(&Trainer::checkpoints_path(out)).expect("a folder");
    let newest = &listed.last().expect("a checkpoint").path;
    let mut files: Vec<PathBuf> = Vec::new();
    let mut folders = vec![newest.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.extension().is_some_and(|it| it == "safetensors") => files.push(path),
                false => {}
            }
        }
    }
    files.sort();
    assert!(!files.is_empty());
    let relative = |path: &PathBuf| path.strip_prefix(newest).expect("inside").to_path_buf();
    files.iter().map(|path| (relative(path), fs::read(path).expect("a file"))).collect()
}

#[test]
fn a_run_of_ranks_is_one_run() {
    let place = Place::new();
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

#[test]
fn ranks_go_on_where_they_stopped() {
    let place = Place::new();
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
    let place = Place::new();
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

/// Tensors lie in checkpoints by name and whole, so that any number of ranks reads what any other
/// has written.
#[test]
fn a_run_goes_on_with_other_ranks() {
    let place = Place::new();
    let four = place.settings("four", 4);
    go(&four, Start::New).unwrap();
    let expected = metrics(&four.out).0;
    for ranks in [1, 2] {
        let settings = place.settings(&format!("four-then-{ranks}"), 4);
        assert!(go_until(&settings, 3).fit.interrupted);
        let done = metrics(&settings.out).0.len();
        let before = tensors(&settings.out);
        let fewer = Settings { ranks, ..settings };
        let error = go(&fewer, Start::Resume).unwrap_err();
        let TrainError::OtherRun { differences, .. } = &error else { panic!("{error}") };
        let fields: Vec<&str> = differences.iter().map(|it| it.field.as_str()).collect();
        assert!(fields.contains(&"data_ranks"), "{fields:?}");
        assert!(tensors(&fewer.out) == before, "nothing was touched");
        go(&fewer, Start::ResumeChanged).unwrap();
        let got = metrics(&fewer.out).0;
        assert_eq!(got.len(), 6);
        // The same batch on the same weights, summed in another order.
        let ((step, loss, _), (_, expected, _)) = (got[done], expected[done]);
        let bound = 8.0 * f64::from(f32::EPSILON) / 2.0 * expected;
        assert!((loss - expected).abs() <= bound, "step {step}: {loss} beside {expected}");
        assert_eq!(got[..done], metrics(&four.out).0[..done]);
    }
}
