//! What a run does in its output folder: it goes on as what it was, and takes nothing of another.

mod run_starts;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use deepwell_ir::ValueId;
use deepwell_ir::capture::{LlamaConfig, capture_for_sequence};
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::fingerprint::HashedWeights;
use deepwell_trainer::lock::OutputLock;
use deepwell_trainer::metrics::StepLine;
use deepwell_trainer::run::{RunOptions, RunSummary, run};
use deepwell_trainer::weights::MasterWeights;
use deepwell_trainer::{
    CompileOptions, Documents, Progress, Record, RunRecord, Settings, Start, TrainError, Trainer,
    compile,
};

/// A temporary folder with a text and a run of the smallest model on it.
struct TestFolder(tempfile::TempDir);

impl TestFolder {
    fn new() -> TestFolder {
        let place = TestFolder(tempfile::tempdir().expect("a temporary folder"));
        place.write_text("text.txt", 2_654_435_761);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write_text(&self, name: &str, factor: u32) {
        let words = (0..2000u32).map(|index| format!("{} ", index.wrapping_mul(factor)));
        self.write(name, &words.collect::<String>());
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("a file in a temporary folder");
    }

    fn settings(&self) -> Settings {
        Settings {
            model: "llama-micro".to_string(),
            data: vec![self.path("text.txt")],
            cache_dir: self.path("cache"),
            out: self.path("out"),
            precision: "mxfp8".to_string(),
            steps: 6,
            seq_len: 32,
            batch_size: 2,
            eval_tokens: 64,
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
    let options = RunOptions { start, ..RunOptions::default() };
    run(settings, options, Arc::new(AtomicBool::new(false)), &mut ())
}

/// Runs, and is stopped at the step behind `step`.
fn go_until(settings: &Settings, step: u64) -> RunSummary {
    let stop = Arc::new(AtomicBool::new(false));
    let mut progress = StopAfter(step, Arc::clone(&stop));
    let summary = run(settings, RunOptions::default(), stop, &mut progress).expect("a run");
    assert!(summary.fit.interrupted);
    summary
}

fn record(out: &Path) -> RunRecord {
    let text = fs::read_to_string(out.join("run.json")).expect("a run has a record");
    serde_json::from_str(&text).expect("a record")
}

/// Steps of a folder's checkpoints.
fn checkpoint_steps(out: &Path) -> Vec<u64> {
    let listed = deepwell_ckpt::list(&Trainer::checkpoints_path(out)).expect("a folder");
    listed.into_iter().map(|entry| entry.step).collect()
}

/// Every file below a folder with its bytes, but the lock.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if !path.ends_with(".deepwell.lock") {
                found.insert(path.clone(), fs::read(&path).expect("a file"));
            }
        }
    }
    found
}

#[test]
fn the_last_evaluation_reads_the_most() {
    let place = TestFolder::new();
    let settings = Settings { eval_tokens: 512, ..place.settings() };
    let read = |settings: &Settings| -> (Vec<(u64, u64)>, Vec<f64>) {
        let summary = go(settings, Start::New).expect("a run");
        let text = fs::read_to_string(Trainer::metrics_path(&settings.out)).expect("metrics");
        let records =
            text.lines().map(|line| serde_json::from_str::<Record>(line).expect("a line"));
        let evaluations =
            records.filter_map(|r| Some((r.step, r.val_loss.and(r.val_tokens)?))).collect();
        (evaluations, summary.fit.heldout_losses)
    };
    let (all, losses_of_all) = read(&settings);
    assert_eq!(all, [(0, 512), (3, 512), (6, 512)]);
    let out = place.path("interim");
    let (some, losses) = read(&Settings { interim_eval_tokens: Some(65), out, ..settings.clone() });
    // Whole batches of 2 x 32 tokens.
    assert_eq!(some, [(0, 128), (3, 128), (6, 512)]);
    assert_eq!(losses, losses_of_all, "what the end says does not depend on evaluations before");
    assert_eq!(losses.len(), 8);

    let out = place.path("stopped");
    let stopped = go_until(&Settings { interim_eval_tokens: Some(65), out, ..settings }, 4);
    assert!(stopped.fit.heldout_losses.is_empty(), "those of step 3 are of fewer tokens");
}

#[test]
fn a_run_leaves_the_results_of_another_alone() {
    let place = TestFolder::new();
    let (settings, out) = (place.settings(), place.path("out"));
    go(&settings, Start::New).expect("a run");
    let before = contents(&out);
    let other = Settings { seed: 1, steps: 3, ..settings.clone() };
    let error = go(&other, Start::New).expect_err("the folder is taken").to_string();
    let id = record(&out).id;
    assert!(error.starts_with(&format!("`{}` holds the results of run {id}", out.display())));
    for part in ["checkpoints", "metrics.jsonl", "`--resume`", "`--out`", "`--overwrite`"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(contents(&out) == before, "nothing was touched");

    // The folder of the former run, had it been left there as it was.
    let kept = place.path("kept");
    fs::rename(Trainer::checkpoints_path(&out).join("step-00000006"), &kept).expect("a move");
    place.write("out/notes.txt", "of the user");
    let summary = go(&other, Start::Overwrite).expect("a run in place of the other");
    assert_eq!((summary.fit.step, summary.fit.resumed_after), (3, None));
    assert_eq!(checkpoint_steps(&out), [2, 3]);
    assert_ne!(record(&out).id, id);
    assert!(out.join("notes.txt").exists(), "only results are deleted");

    // Its step is higher than any of the run's own, so that it would be taken for the newest.
    let foreign = Trainer::checkpoints_path(&out).join("step-00000006");
    fs::rename(&kept, &foreign).expect("a move");
    let before = contents(&out);
    let error = go(&other, Start::Resume).expect_err("two runs in one folder").to_string();
    assert!(error.contains(&format!("cannot resume from `{}`", foreign.display())), "{error}");
    assert!(error.contains(&format!("it is of run {id}")), "{error}");
    assert!(contents(&out) == before, "nothing was touched");
    fs::remove_dir_all(&foreign).expect("a folder");
    let again = go(&other, Start::Resume).expect("its own are there");
    assert_eq!(again, summary, "it has ended: nothing is left to do");
}

/// A run on files that do not see each other goes on with the same bits, and counts the tokens that
/// it predicts.
#[test]
fn documents_are_told_apart_before_and_after() {
    let place = TestFolder::new();
    fs::create_dir(place.path("texts")).expect("a folder");
    for file in 0..60u32 {
        let words = (0..file % 7 * 3 + 1).map(|word| format!("{} ", word * file));
        place.write(&format!("texts/{file}.txt"), &words.collect::<String>());
    }
    let of = |documents, out: &str| Settings {
        model: "gpt2-micro".to_string(),
        data: vec![place.path("texts")],
        documents,
        out: place.path(out),
        ..place.settings()
    };
    let last = |out: &str| -> Record {
        let text = fs::read_to_string(Trainer::metrics_path(&place.path(out))).expect("metrics");
        serde_json::from_str(text.lines().last().expect("a line")).expect("a record")
    };
    let masked = of(Documents::Masked, "masked");
    let whole = go(&masked, Start::New).expect("a run");
    let stopped = of(Documents::Masked, "stopped");
    go_until(&stopped, 2);
    let resumed = go(&stopped, Start::Resume).expect("the same run");
    assert_eq!(resumed.fit.heldout_losses, whole.fit.heldout_losses);
    let joined = go(&of(Documents::Joined, "joined"), Start::New).expect("a run");
    assert_ne!(joined.fit.heldout_losses, whole.fit.heldout_losses);
    let [of_masked, of_joined] = ["masked", "joined"].map(|out| last(out).val_tokens);
    assert_eq!(of_joined, Some(64));
    assert!(of_masked < of_joined && of_masked > Some(32), "{of_masked:?}");
    assert_eq!(last("masked").val_loss, last("stopped").val_loss);

    let split = Settings { context: 2, ranks: 2, ..of(Documents::Masked, "split") };
    let message = split.check().expect_err("a ring").to_string();
    assert!(message.contains("masked with 2 context-parallel ranks"), "{message}");
    assert_eq!("masked".parse(), Ok(Documents::Masked));
    assert!("mask".parse::<Documents>().is_err());
}

/// Each setting that changes numbers is missed by its name, and only those are.
#[test]
fn a_run_goes_on_as_what_it_was() {
    let place = TestFolder::new();
    let settings = place.settings();
    place.write("policy.toml", "precision = \"mxfp8\"\n");
    let settings = Settings { policy: Some(place.path("policy.toml")), ..settings };
    go_until(&settings, 2);
    let out = place.path("out");
    let before = contents(&out);

    type Change<'a> = (&'a [&'a str], &'a dyn Fn(&mut Settings));
    let refused: &[Change<'_>] = &[
        (&["seed", "data_seed"], &|s| s.seed = 7),
        (&["data_seed"], &|s| s.data_seed = Some(7)),
        (&["steps"], &|s| s.steps = 7),
        (&["learning_rate"], &|s| s.learning_rate = Some(1e-3)),
        (&["warmup_steps"], &|s| s.warmup_steps = Some(1)),
        (&["final_learning_rate_ratio"], &|s| s.final_learning_rate_ratio = 0.2),
        (&["max_grad_norm"], &|s| s.max_grad_norm = 0.5),
        (&["optimizer.beta2"], &|s| s.optimizer.beta2 = 0.99),
        (&["eval_every"], &|s| s.eval_every = Some(2)),
        (&["micro_batch"], &|s| s.micro_batch = Some(1)),
        (&["guards.strikes_max"], &|s| s.guards.strikes_max = 4),
        (&["policy.scale_rule"], &|s| {
            s.policy = None;
            s.precision = "mxfp8-floor".to_string();
        }),
        (&["data"], &|s| {
            place.write_text("other.txt", 40_503);
            s.data = vec![place.path("other.txt")];
        }),
        // The graph is another one as well.
        (&["documents", "model"], &|s| s.documents = Documents::Masked),
        (&["model"], &|s| s.model = "gpt2-micro".to_string()),
    ];
    for &(fields, change) in refused {
        let mut changed = settings.clone();
        change(&mut changed);
        let error = go(&changed, Start::Resume).expect_err("another run");
        let TrainError::OtherRun { differences, .. } = &error else {
            panic!("{fields:?}: {error}");
        };
        let named: Vec<&str> = differences.iter().map(|d| d.field.as_str()).collect();
        if fields == ["model"] {
            // Other kernels come with another model.
            assert!(named.contains(&"model"), "{named:?}");
        } else {
            let mut sorted = fields.to_vec();
            sorted.sort_unstable();
            assert_eq!(named, sorted);
        }
        assert!(error.to_string().contains("`--accept-changes`"), "{error}");
    }
    assert!(contents(&out) == before, "nothing was touched");

    // Nothing here changes a number.
    place.write("same.toml", "# the same policy\nscale_rule = \"rceil\"\n");
    fs::create_dir(place.path("moved")).expect("a folder");
    fs::rename(place.path("text.txt"), place.path("moved/text.txt")).expect("a move");
    fs::rename(&out, place.path("elsewhere")).expect("a move");
    let moved = Settings {
        data: vec![place.path("moved/text.txt")],
        cache_dir: place.path("other-cache"),
        out: place.path("elsewhere"),
        policy: Some(place.path("same.toml")),
        recompute: Some(deepwell_ir::Recompute::Full),
        checkpoint_every: Some(5),
        keep_last: 9,
        ..settings
    };
    let summary = go(&moved, Start::Resume).expect("the same run");
    assert_eq!((summary.fit.resumed_after, summary.fit.step), (Some(3), 6));
}

#[test]
fn accepted_changes_are_kept_in_the_record() {
    let place = TestFolder::new();
    let settings = place.settings();
    go_until(&settings, 2);
    let out = place.path("out");
    let id = record(&out).id;
    let longer = Settings { steps: 8, ..settings.clone() };
    let summary = go(&longer, Start::ResumeChanged).expect("a longer run");
    assert_eq!((summary.fit.resumed_after, summary.fit.step), (Some(3), 8));
    let kept = record(&out);
    assert_eq!((kept.id, kept.changes.len()), (id, 1));
    assert_eq!(kept.changes[0].after_step, 3);
    let shown: Vec<String> = kept.changes[0].differences.iter().map(ToString::to_string).collect();
    assert!(shown.contains(&"steps: the run has 6, now 8".to_string()), "{shown:?}");
    // From here on it is the longer run.
    assert!(matches!(go(&settings, Start::Resume), Err(TrainError::OtherRun { .. })));
    assert_eq!(go(&longer, Start::Resume).expect("the same"), summary);
}

#[test]
fn a_folder_that_another_process_writes_to_is_refused() {
    let place = TestFolder::new();
    let out = place.path("out");
    let held = OutputLock::acquire(&out).expect("a free folder");
    for start in [Start::New, Start::Resume, Start::Overwrite] {
        let error = go(&place.settings(), start).expect_err("it is taken");
        assert!(matches!(error, TrainError::Locked { .. }), "{error}");
    }
    assert_eq!(contents(&out).len(), 0);
    drop(held);
    go(&place.settings(), Start::New).expect("it is free");
}

/// What ran, over all parts of a run: an uninterrupted one says the same.
#[test]
fn counts_and_the_audit_survive_a_resumption() {
    let place = TestFolder::new();
    let audited = |out: &str| Settings { audit: true, out: place.path(out), ..place.settings() };
    let whole = go(&audited("whole"), Start::New).expect("a run");
    let stopped = go_until(&audited("stopped"), 3);
    let resumed = go(&audited("stopped"), Start::Resume).expect("the rest");
    assert!(resumed.fit.resumed_after.is_some());
    assert!(stopped.quantized_gemms_run.total() < whole.quantized_gemms_run.total());
    assert_eq!(resumed.quantized_gemms_run, whole.quantized_gemms_run);
    assert_eq!(resumed.quantized_bytes, whole.quantized_bytes);
    assert_eq!(resumed.quantized_flop_share, whole.quantized_flop_share);
    assert_eq!(whole.quantized_flop_share, whole.quantized_flop_share_planned);
    let audit = whole.fit.audit.expect("it was asked for");
    assert!(audit.is_clean() && audit.calls_checked > 0);
    assert_eq!(resumed.fit.audit, Some(audit));
}

/// Weights that are loaded are known by name and bytes, and arrive as they are.
#[test]
fn loaded_weights_are_known_by_what_they_are() {
    let config = LlamaConfig::preset("llama-micro").expect("a preset");
    let graph = capture_for_sequence(&config, 32).expect("a graph");
    let options = CompileOptions::new(PrecisionPolicy::bf16(), 32, 1);
    let mut engine = compile(graph, deepwell_probe::probe(), &options).expect("an engine");
    let [first, second] = [0, 1].map(|index| engine.program().parameters[index].master.value());
    let [bytes, others] =
        [first, second].map(|id| vec![0u8; engine.program().value(id).range.bytes]);
    let mut hash = |writes: &[(ValueId, &[u8])]| {
        let mut hashed = HashedWeights::new(&mut engine);
        for &(id, bytes) in writes {
            hashed.write_master(id, bytes).expect("it fits");
        }
        hashed.hash()
    };
    let whole = hash(&[(first, &bytes), (second, &others)]);
    assert_eq!(hash(&[(first, &bytes), (second, &others)]), whole);
    let mut changed = bytes.clone();
    changed[7] = 0x80;
    let turned = hash(&[(second, &others), (first, &bytes)]);
    assert_eq!(turned, whole, "ranks load them in any order");
    assert_ne!(hash(&[(first, &bytes)]), whole);
    assert_ne!(hash(&[(first, &changed), (second, &others)]), whole);
    let mut arrived = vec![0u8; bytes.len()];
    engine.read_value(first, &mut arrived).expect("a value");
    assert_eq!(arrived, changed);
}

/// A run that only measures leaves numbers and nothing to go on from, also where it is stopped.
#[test]
fn a_run_without_checkpoints_writes_none() {
    let place = TestFolder::new();
    for stops_after in [u64::MAX, 3] {
        let out = place.path(&format!("out-{stops_after}"));
        let settings = Settings { no_checkpoints: true, out, ..place.settings() };
        let stop = Arc::new(AtomicBool::new(false));
        let mut progress = StopAfter(stops_after, Arc::clone(&stop));
        let summary = run(&settings, RunOptions::default(), stop, &mut progress).expect("a run");
        assert_eq!(summary.fit.interrupted, stops_after == 3);
        assert_eq!(summary.fit.checkpoint_stalls_s, [0.0; 0]);
        let folder = Trainer::checkpoints_path(&settings.out);
        let written = fs::read_dir(&folder).map_or(0, Iterator::count);
        assert_eq!(written, 0, "{}", folder.display());
        assert!(Trainer::metrics_path(&settings.out).exists());
    }
}
