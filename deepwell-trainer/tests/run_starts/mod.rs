//! Runs that fail before their first step, and what they leave.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use deepwell_ir::capture::{LlamaConfig, capture_for_sequence};
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::data::Tokenizer;
use deepwell_trainer::metrics::StepLine;
use deepwell_trainer::run::{RunOptions, open_data, run};
use deepwell_trainer::{CompileOptions, Progress, Settings, Start, Trainer, compile};

use crate::{TestFolder, go, go_until, record};

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

/// Names of all that is in a folder, the lock as well.
fn names(folder: &Path) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

/// A model whose two layers take terabytes.
fn huge(place: &TestFolder) -> String {
    let preset = LlamaConfig::preset("llama-micro").expect("a preset");
    let config = LlamaConfig { hidden_size: 1 << 16, intermediate_size: 1 << 22, ..preset };
    place.write("huge.json", &config.to_json().to_string());
    place.path("huge.json").to_str().expect("a path").to_string()
}

/// A first start with a sequence longer than the data once took the folder, so that the corrected
/// command was refused; and a batch that the ranks cannot split was said after all data was read.
#[test]
fn a_run_that_fails_before_its_first_step_leaves_the_folder_free() {
    let place = TestFolder::new();
    let huge = huge(&place);
    type Row<'a> = (&'a str, bool, &'a dyn Fn(&mut Settings));
    let rows: &[Row<'_>] = &[
        // What fails, whether data is read before, and how.
        ("a window of 30000 tokens", true, &|s| s.seq_len = 30_000),
        ("batch size: expected a multiple of the 3 ranks", false, &|s| s.ranks = 3),
        ("micro-batch: expected a divisor", false, &|s| s.micro_batch = Some(3)),
        ("expected key-value heads that they divide, got 1", false, &|s| {
            (s.ranks, s.tensor) = (2, 2);
        }),
        ("layers of the pipeline's stages", false, &|s| {
            (s.ranks, s.pipeline, s.pp_layers) = (2, 2, Some(vec![2, 2]));
        }),
        ("no plan fits into", false, &|s| s.model = huge.clone()),
        ("no-such.txt", true, &|s| s.data = vec![place.path("no-such.txt")]),
        ("steps: expected at least 1", false, &|s| s.steps = 0),
    ];
    for (index, (expected, reads_data, change)) in rows.iter().enumerate() {
        for is_there in [false, true] {
            let outer = place.path(&format!("runs-{index}-{is_there}"));
            let cache_dir = place.path(&format!("cache-{index}-{is_there}"));
            let out = outer.join("a");
            let sound = Settings { out: out.clone(), steps: 1, cache_dir, ..place.settings() };
            let mut settings = sound.clone();
            change(&mut settings);
            if is_there {
                fs::create_dir_all(&out).expect("a folder");
            }
            let mut notes = Notes::default();
            let stop = Arc::new(AtomicBool::new(false));
            let error = run(&settings, RunOptions::default(), stop, &mut notes)
                .expect_err(expected)
                .to_string();
            assert!(error.contains(expected), "expected `{expected}` in: {error}");
            match is_there {
                true => assert_eq!(names(&out), BTreeSet::new(), "{expected}"),
                false => assert!(!outer.exists(), "{expected}: {}", outer.display()),
            }
            if !reads_data {
                let reads = notes.0.iter().any(|note| note.contains("data"));
                assert!(!reads, "{expected}: {:?}", notes.0);
                assert!(!settings.cache_dir.exists(), "{expected}: data was read");
            }
            if index == 0 {
                go(&sound, Start::New).expect("the corrected command");
            }
        }
    }
}

/// What was there before a run that fails stays, the former run of a folder as well.
#[test]
fn a_run_that_fails_touches_nothing_of_others() {
    let place = TestFolder::new();
    let settings = place.settings();
    fs::create_dir(&settings.out).expect("a folder");
    // The model's files cannot be kept there: that comes last, behind compilation.
    fs::write(settings.out.join("model"), "of the user").expect("a file");
    let error = go(&settings, Start::New).expect_err("no folder").to_string();
    assert!(error.contains("model"), "{error}");
    assert_eq!(names(&settings.out), BTreeSet::from([settings.out.join("model")]));
    fs::remove_file(settings.out.join("model")).expect("a file");

    go_until(&settings, 2);
    let before = record(&settings.out);
    let longer = Settings { seq_len: 30_000, ..settings.clone() };
    for start in [Start::Resume, Start::ResumeChanged, Start::Overwrite, Start::New] {
        go(&longer, start).expect_err("too long");
        assert_eq!(record(&settings.out), before, "{start:?}");
    }
    go(&settings, Start::Resume).expect("the rest");
}

/// A record that was written before the run failed goes again.
#[test]
fn a_record_without_a_step_is_taken_back() {
    let place = TestFolder::new();
    let settings = place.settings();
    let config = LlamaConfig::preset("llama-micro").expect("a preset");
    let trainer = |seq_len: usize| {
        let settings = Settings { seq_len, ..settings.clone() };
        let graph = capture_for_sequence(&config, seq_len).expect("a graph");
        let options = CompileOptions::new(PrecisionPolicy::bf16(), seq_len, settings.batch_size);
        let mut engine = compile(graph, deepwell_probe::probe(), &options).expect("an engine");
        engine.initialize(0).expect("weights");
        let data = open_data(&settings, Tokenizer::bytes(), &mut ()).expect("data");
        Trainer::from_engine(engine, settings, Arc::clone(data.tokens()))
    };
    let mut too_long = trainer(30_000);
    let error = too_long.fit(&mut ()).expect_err("too long").to_string();
    assert!(error.contains("a window of 30000 tokens"), "{error}");
    drop(too_long);
    assert!(!settings.out.exists(), "{:?}", names(&settings.out));
    trainer(32).fit(&mut ()).expect("a run");
}

/// Each run said `data` twice.
#[test]
fn a_run_says_once_what_its_data_is() {
    let place = TestFolder::new();
    let mut notes = Notes::default();
    let settings = Settings { steps: 1, ..place.settings() };
    run(&settings, RunOptions::default(), Arc::new(AtomicBool::new(false)), &mut notes)
        .expect("a run");
    let headings = notes.0.iter().flat_map(|note| note.lines()).filter(|line| *line == "data");
    assert_eq!(headings.count(), 1, "{:?}", notes.0);
}
