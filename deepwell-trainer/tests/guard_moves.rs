//! Guards move GEMMs to BF16 within a run and bring them back. `planted_operands` has which ones.

#[expect(dead_code, reason = "runs of one rank need less")]
mod rank_runs;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use deepwell_precision::GuardConfig;
use deepwell_trainer::metrics::StepLine;
use deepwell_trainer::run::{RunOptions, run};
use deepwell_trainer::{Progress, Settings};

use rank_runs::TestFolder;

/// What the guards say.
#[derive(Default)]
struct Told(Vec<String>);

impl Progress for Told {
    fn step(&mut self, _line: &StepLine) {}
    fn evaluation(&mut self, _step: u64, _val_loss: f64) {}
    fn note(&mut self, text: &str) {
        self.0.extend(text.strip_prefix("guard at step ").map(str::to_string));
    }
}

/// No guard stirs, and GEMMs that one moves come back after two steps.
fn calm() -> GuardConfig {
    GuardConfig {
        underflow_fraction_max: 1.0,
        saturation_fraction_max: 1.0,
        scale_clamp_fraction_max: 1.0,
        amax_history_len: 1,
        strikes_max: 1,
        backoff_steps: 2,
        probation_steps: 1,
        fallbacks_max: 9,
        nonfinite_steps_max: 100,
        ..GuardConfig::default()
    }
}

fn settings(place: &TestFolder, out: &str) -> Settings {
    Settings {
        steps: 8,
        seq_len: 16,
        batch_size: 2,
        eval_every: Some(10_000),
        no_checkpoints: true,
        checkpoint_every: None,
        ..place.settings(out, 1)
    }
}

/// What the guards say in a run, which really computes less in low precision then.
fn told(settings: &Settings) -> Vec<String> {
    let mut told = Told::default();
    let stop = Arc::new(AtomicBool::new(false));
    let summary = run(settings, RunOptions::default(), stop, &mut told).expect("a run");
    let (planned, done) = (summary.quantized_flop_share_planned, summary.quantized_flop_share);
    let moves = told.0.iter().filter(|it| it.contains("ToBf16")).count();
    assert_eq!(done < planned, moves > 0, "{done} of {planned}: {:?}", told.0);
    told.0
}

/// The run moves a GEMM for `reason`, and takes it back two steps later.
fn check(settings: &Settings, reason: &str) {
    let told = told(settings);
    let step_of = |text: &String| -> u64 {
        let (step, _) = text.split_once(':').expect("a step");
        step.parse().expect("a number")
    };
    let gemm_of = |text: &String| -> String {
        let at = text.find("layers.").unwrap_or_else(|| panic!("no GEMM in {text}"));
        text[at..].chars().take_while(|it| *it != ':').collect()
    };
    let moved = told.iter().find(|it| it.contains("ToBf16") && it.contains(reason));
    let moved = moved.unwrap_or_else(|| panic!("expected `{reason}` in {told:#?}"));
    let (step, gemm) = (step_of(moved), gemm_of(moved));
    let comes_back = |it: &&String| it.contains("BackToLow") && it.contains(&gemm);
    let back = told.iter().find(comes_back).unwrap_or_else(|| panic!("{gemm} stays: {told:#?}"));
    assert_eq!(step_of(back), step + 2, "{told:#?}");
    // Whatever other guard there is has said nothing.
    for text in told.iter().filter(|it| it.contains("ToBf16")) {
        assert!(text.contains(reason), "expected `{reason}`: {text}");
    }
}

#[test]
fn underflow_moves_gemms_and_brings_them_back() {
    let place = TestFolder::new();
    let guards = GuardConfig { underflow_fraction_max: 0.0, ..calm() };
    let settings = Settings { guards, ..settings(&place, "underflow") };
    check(&settings, "of the elements of a tensor underflowed to zero");
}

#[test]
fn saturation_moves_gemms_and_brings_them_back() {
    let place = TestFolder::new();
    let guards = GuardConfig { saturation_fraction_max: 0.0, ..calm() };
    let precision = "mxfp8-floor".to_string();
    let settings = Settings { guards, precision, ..settings(&place, "saturation") };
    check(&settings, "of the elements of a tensor saturated");
}

#[test]
fn growth_moves_gemms_and_brings_them_back() {
    let place = TestFolder::new();
    let guards = GuardConfig { amax_growth_max: 0.5, ..calm() };
    let settings = Settings { guards, ..settings(&place, "growth") };
    check(&settings, "is more than 0.5 times its median");
}

#[test]
fn a_spike_moves_gemms_and_brings_them_back() {
    let place = TestFolder::new();
    // Half of all losses are above the median, and some measure is above half of its own.
    let guards = GuardConfig {
        loss_window: 4,
        loss_warmup: 2,
        spike_deviations: 1e-9,
        spike_fraction_min: 0.0,
        spike_departure_min: 0.5,
        ..calm()
    };
    // With next to no learning the loss goes up and down with the batches.
    let learning_rate = Some(1e-6);
    let settings = Settings { guards, steps: 16, learning_rate, ..settings(&place, "spike") };
    check(&settings, "in a step whose loss spiked");
    // Where no GEMM stands out, a spike is told and moves none.
    let guards = GuardConfig { spike_departure_min: 1e9, ..settings.guards.clone() };
    let settings = Settings { guards, out: place.path("unmoved"), ..settings };
    let told = told(&settings);
    assert!(told.iter().any(|it| it.contains("LossSpike")), "{told:?}");
    assert!(!told.iter().any(|it| it.contains("ToBf16")), "{told:?}");
}
