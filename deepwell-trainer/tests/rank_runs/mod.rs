//! What tests of runs of several ranks share: a folder with text, and runs in it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use deepwell_ckpt::Section;
use deepwell_trainer::metrics::StepLine;
use deepwell_trainer::run::{RunOptions, RunSummary, run};
use deepwell_trainer::{Progress, Record, Settings, Start, TrainError, Trainer};

/// A folder with a text to train on.
pub(crate) struct TestFolder(tempfile::TempDir);

impl TestFolder {
    pub(crate) fn new() -> TestFolder {
        let place = TestFolder(tempfile::tempdir().expect("a temporary folder"));
        let words = (0..2000u32).map(|index| format!("{} ", index.wrapping_mul(2_654_435_761)));
        fs::write(place.path("text.txt"), words.collect::<String>()).expect("a file");
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn settings(&self, out: &str, ranks: usize) -> Settings {
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

pub(crate) fn go(settings: &Settings, start: Start) -> Result<RunSummary, TrainError> {
    let options = RunOptions { start, ..RunOptions::default() };
    run(settings, options, Arc::new(AtomicBool::new(false)), &mut ())
}

pub(crate) fn go_until(settings: &Settings, step: u64) -> RunSummary {
    go_on_until(settings, Start::New, step)
}

pub(crate) fn go_on_until(settings: &Settings, start: Start, step: u64) -> RunSummary {
    let stop = Arc::new(AtomicBool::new(false));
    let mut progress = StopAfter(step, Arc::clone(&stop));
    let options = RunOptions { start, ..RunOptions::default() };
    run(settings, options, stop, &mut progress).expect("a run")
}

/// Step, loss and norm of each training step.
pub(crate) type Steps = Vec<(u64, f64, f64)>;

/// The training steps of a run; step and loss of each evaluation.
pub(crate) fn metrics(out: &Path) -> (Steps, Vec<(u64, f64)>) {
    let text = fs::read_to_string(Trainer::metrics_path(out)).expect("metrics");
    let records: Vec<Record> =
        text.lines().map(|line| serde_json::from_str(line).expect("a line")).collect();
    let steps = records.iter().filter_map(|r| Some((r.step, r.loss?, r.grad_norm?))).collect();
    (steps, records.iter().filter_map(|r| Some((r.step, r.val_loss?))).collect())
}

/// Every tensor of the newest checkpoint of a run, whole, by section and name, whoever wrote which
/// part of it.
#[allow(dead_code, reason = "not every test looks into checkpoints")]
pub(crate) fn tensors(out: &Path) -> BTreeMap<(Section, String), Vec<u8>> {
    let listed = deepwell_ckpt::list(&Trainer::checkpoints_path(out)).expect("a folder");
    let newest = deepwell_ckpt::load(&listed.last().expect("a checkpoint").path).expect("whole");
    let read = |section, name: &str| newest.read(section, name).expect("a tensor");
    let all = newest.tensors().iter();
    all.map(|it| ((it.section, it.name.clone()), read(it.section, &it.name))).collect()
}
