//! Each guard moves a layer to BF16 within a run, and brings it back.

#[expect(dead_code, reason = "runs of one rank need less")]
mod rank_runs;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use deepwell_ckpt::CkptDtype;
use deepwell_ckpt::hf::{WriteTensor, open_model_folder, write};
use deepwell_precision::GuardConfig;
use deepwell_trainer::export::{ExportOptions, export_hf};
use deepwell_trainer::metrics::StepLine;
use deepwell_trainer::run::{RunOptions, run};
use deepwell_trainer::{Progress, Settings, Start, Trainer};

use rank_runs::{Place, go};

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

/// No guard stirs, and a layer that one moves comes back after two steps.
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

fn settings(place: &Place, out: &str) -> Settings {
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

/// The run moves a layer for `reason`, and takes it back two steps later.
fn check(settings: &Settings, reason: &str) {
    let told = told(settings);
    let step_of = |text: &String| -> u64 {
        let (step, _) = text.split_once(':').expect("a step");
        step.parse().expect("a number")
    };
    let layer_of = |text: &String| -> String {
        let at = text.find("layers.").unwrap_or_else(|| panic!("no layer in {text}"));
        text[at..].chars().take_while(|it| *it != ':').collect()
    };
    let moved = told.iter().find(|it| it.contains("ToBf16") && it.contains(reason));
    let moved = moved.unwrap_or_else(|| panic!("expected `{reason}` in {told:#?}"));
    let (step, layer) = (step_of(moved), layer_of(moved));
    let comes_back = |it: &&String| it.contains("BackToLow") && it.contains(&layer);
    let back = told.iter().find(comes_back).unwrap_or_else(|| panic!("{layer} stays: {told:#?}"));
    assert_eq!(step_of(back), step + 2, "{told:#?}");
    // Whatever other guard there is has said nothing.
    for text in told.iter().filter(|it| it.contains("ToBf16")) {
        assert!(text.contains(reason), "expected `{reason}`: {text}");
    }
}

/// A model folder with one matrix of the second layer scaled to an amax.
fn folder_with(place: &Place, matrix: &str, amax: f32) -> String {
    let made = Settings { no_checkpoints: false, steps: 1, ..settings(place, "made") };
    if !made.out.exists() {
        go(&made, Start::New).expect("a run");
    }
    let checkpoints = deepwell_ckpt::list(&Trainer::checkpoints_path(&made.out)).expect("some");
    let to = place.path(&format!("model-{matrix}"));
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
    scale(&to, &format!("model.layers.1.{matrix}.weight"), amax);
    to.to_str().expect("a path").to_string()
}

fn scale(folder: &Path, matrix: &str, amax: f32) {
    let weights = open_model_folder(folder).expect("weights");
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = weights
        .tensors()
        .map(|(name, tensor)| {
            let values = weights.read_f32(name, &tensor.shape).expect("a tensor");
            (name.to_string(), tensor.shape.clone(), values)
        })
        .collect();
    drop(weights);
    let found = tensors.iter_mut().find(|(name, ..)| name == matrix).expect("the matrix");
    let before = found.2.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    found.2.iter_mut().for_each(|value| *value = *value / before * amax);
    let views: Vec<WriteTensor<'_>> =
        tensors.iter().map(|(name, shape, it)| WriteTensor::from_f32(name, shape, it)).collect();
    write(&folder.join("model.safetensors"), &views).expect("written");
}

#[test]
fn underflow_moves_a_layer_and_brings_it_back() {
    let place = Place::new();
    let guards = GuardConfig { underflow_fraction_max: 0.0, ..calm() };
    let settings = Settings { guards, ..settings(&place, "underflow") };
    check(&settings, "of the elements of a tensor underflowed to zero");
}

#[test]
fn saturation_moves_a_layer_and_brings_it_back() {
    let place = Place::new();
    let guards = GuardConfig { saturation_fraction_max: 0.0, ..calm() };
    let precision = "mxfp8-floor".to_string();
    let settings = Settings { guards, precision, ..settings(&place, "saturation") };
    check(&settings, "of the elements of a tensor saturated");
}

#[test]
fn clamped_scales_move_a_layer_and_bring_it_back() {
    let place = Place::new();
    let guards = GuardConfig { scale_clamp_fraction_max: 0.01, ..calm() };
    // So that weights and what is multiplied with them stay so small.
    let learning_rate = Some(1e-44);
    let model = folder_with(&place, "self_attn.o_proj", 1e-40);
    let settings = Settings { guards, learning_rate, model, ..settings(&place, "clamps") };
    check(&settings, "of the scales of a tensor fell below 2^-127");
}

#[test]
fn growth_moves_a_layer_and_brings_it_back() {
    let place = Place::new();
    let guards = GuardConfig { amax_growth_max: 0.5, ..calm() };
    let settings = Settings { guards, ..settings(&place, "growth") };
    check(&settings, "is more than 0.5 times its median");
}

#[test]
fn non_finite_values_move_a_layer_and_bring_it_back() {
    let place = Place::new();
    let guards = calm();
    let model = folder_with(&place, "mlp.up_proj", 3e38);
    let settings = Settings { guards, model, ..settings(&place, "nonfinite") };
    check(&settings, "NaN or infinite values were to be quantized");
}

#[test]
fn a_spike_moves_a_layer_and_brings_it_back() {
    let place = Place::new();
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
    // Where no layer stands out, a spike is told and moves none.
    let guards = GuardConfig { spike_departure_min: 1e9, ..settings.guards.clone() };
    let settings = Settings { guards, out: place.path("unmoved"), ..settings };
    let told = told(&settings);
    assert!(told.iter().any(|it| it.contains("LossSpike")), "{told:?}");
    assert!(!told.iter().any(|it| it.contains("ToBf16")), "{told:?}");
}
