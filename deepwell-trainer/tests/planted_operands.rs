//! A fault that is planted in one operand moves the GEMMs that read it to BF16, and no others, and
//! brings them back.

#[expect(dead_code, reason = "runs of one rank need less")]
mod rank_runs;

mod planted_model;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use deepwell_ir::capture::{LlamaConfig, ModelConfig};
use deepwell_precision::GuardConfig;
use deepwell_trainer::metrics::StepLine;
use deepwell_trainer::run::{RunOptions, run};
use deepwell_trainer::{Progress, Settings};

use planted_model::{Tensor, planted_model};
use rank_runs::TestFolder;

/// What guards do: step, event and weight, and why.
#[derive(Clone, Debug, PartialEq)]
struct Told {
    step: u64,
    event: String,
    gemm: String,
    reason: String,
}

#[derive(Default)]
struct Listener(Vec<Told>);

impl Progress for Listener {
    fn step(&mut self, _line: &StepLine) {}
    fn evaluation(&mut self, _step: u64, _val_loss: f64) {}
    fn note(&mut self, text: &str) {
        let told = text.strip_prefix("guard at step ").and_then(|text| text.split_once(": "));
        let Some((step, text)) = told else { return };
        // Events of the whole run, such as a spike, name no weight.
        let (event, about) = text.split_at(text.find("model.").unwrap_or(text.len()));
        let (gemm, reason) = about.split_once(": ").unwrap_or_default();
        let [event, gemm, reason] = [event, gemm, reason].map(str::to_string);
        let step = step.parse().expect("a number");
        self.0.push(Told { step, event, gemm, reason });
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

/// Three layers, as the first linear tensor and the last one stay BF16, which two ranks can split.
fn dense() -> LlamaConfig {
    LlamaConfig {
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 32,
        intermediate_size: 128,
        tie_word_embeddings: true,
        ..LlamaConfig::preset("llama-micro").expect("a preset")
    }
}

fn settings(place: &TestFolder, out: &str, model: String, guards: GuardConfig) -> Settings {
    Settings {
        model,
        guards,
        steps: 6,
        seq_len: 16,
        batch_size: 2,
        eval_every: Some(10_000),
        no_checkpoints: true,
        checkpoint_every: None,
        // So that what is planted stays as it is.
        learning_rate: Some(1e-44),
        ..place.settings(out, 1)
    }
}

/// A model folder of fresh weights with something planted.
fn planted(place: &TestFolder, config: &str, plant: impl FnOnce(&mut [Tensor])) -> String {
    let path = place.path("config.json");
    fs::write(&path, config).expect("a file");
    let model = path.to_str().expect("a path").to_string();
    planted_model(settings(place, "made", model, calm()), &place.path("planted"), plant)
}

fn planted_in_dense(place: &TestFolder, plant: impl FnOnce(&mut [Tensor])) -> String {
    planted(place, &dense().to_json().to_string(), plant)
}

/// Changes each element of a weight by its row and column.
fn change(tensors: &mut [Tensor], weight: &str, new: impl Fn(usize, usize, f32) -> f32) {
    let found = tensors.iter_mut().find(|(name, ..)| name == weight);
    let (_, shape, values) = found.unwrap_or_else(|| panic!("no `{weight}`"));
    for (index, value) in values.iter_mut().enumerate() {
        *value = new(index / shape[1], index % shape[1], *value);
    }
}

fn told(settings: &Settings) -> Vec<Told> {
    let mut listener = Listener::default();
    let stop = Arc::new(AtomicBool::new(false));
    let summary = run(settings, RunOptions::default(), stop, &mut listener).expect("a run");
    let (planned, done) = (summary.quantized_flop_share_planned, summary.quantized_flop_share);
    let Listener(told) = listener;
    let moves = told.iter().any(|it| it.event.contains("ToBf16"));
    assert_eq!(done < planned, moves, "{done} of {planned}: {told:#?}");
    told
}

/// The first moves of a run are those of the GEMMs of `expected`, for `reason`, and they come back
/// two steps later.
fn check(told: &[Told], reason: &str, expected: &[&str]) {
    let mut moves = told.iter().filter(|it| it.event.contains("ToBf16")).peekable();
    let first = moves.peek().unwrap_or_else(|| panic!("nothing moved: {told:#?}")).step;
    let moved: Vec<&str> = moves.filter(|it| it.step == first).map(|it| it.gemm.as_str()).collect();
    assert_eq!(moved, expected, "{told:#?}");
    for it in told.iter().filter(|it| it.step == first && !it.gemm.is_empty()) {
        assert!(it.reason.contains(reason), "expected `{reason}`: {it:?}");
    }
    let back = told.iter().filter(|it| it.event.contains("BackToLow") && it.step == first + 2);
    assert_eq!(back.map(|it| it.gemm.as_str()).collect::<Vec<_>>(), expected, "{told:#?}");
}

/// No other GEMMs than those moved at any step.
fn check_alone(told: &[Told], reason: &str, expected: &[&str]) {
    check(told, reason, expected);
    for it in told.iter().filter(|it| it.event.contains("ToBf16")) {
        assert!(expected.contains(&it.gemm.as_str()), "{told:#?}");
    }
}

const UNDERFLOW: &str = "of the elements of a tensor underflowed to zero";
const DOWN: &str = "model.layers.1.mlp.down_proj.weight";

/// The output of the gated unit of the second layer spans 24 binades within each block. Its two
/// factors span 12 each, which E4M3 holds.
fn plant_in_input_of_down(tensors: &mut [Tensor]) {
    for factor in ["gate", "up"] {
        let weight = format!("model.layers.1.mlp.{factor}_proj.weight");
        change(tensors, &weight, |row, _, it| if row % 32 == 0 { it } else { it * 2f32.powi(-12) });
    }
}

/// Of both axes of an operand one underflows, almost half of its elements.
fn guard_underflow() -> GuardConfig {
    GuardConfig { underflow_fraction_max: 0.3, ..calm() }
}

#[test]
fn an_input_that_underflows_moves_its_gemm_alone() {
    let place = TestFolder::new();
    let model = planted_in_dense(&place, plant_in_input_of_down);
    let settings = settings(&place, "run", model, guard_underflow());
    check_alone(&told(&settings), UNDERFLOW, &[DOWN]);
}

#[test]
fn a_weight_that_underflows_moves_its_gemm_alone() {
    let place = TestFolder::new();
    let weight = "model.layers.1.self_attn.q_proj.weight";
    let model = planted_in_dense(&place, |tensors| {
        // One large element in each block of both axes.
        let is_large = |row: usize, column: usize| row % 32 == column % 32;
        let small = 2f32.powi(-24);
        let new = |row, column, it: f32| if is_large(row, column) { it } else { it * small };
        change(tensors, weight, new);
    });
    let settings = settings(&place, "run", model, guard_underflow());
    check_alone(&told(&settings), UNDERFLOW, &[weight]);
}

#[test]
fn an_input_that_several_weights_read_moves_their_gemms_together() {
    let place = TestFolder::new();
    let model = planted_in_dense(&place, |tensors| {
        let norm = "model.layers.1.input_layernorm.weight";
        let found = tensors.iter_mut().find(|(name, ..)| name == norm).expect("the norm");
        for (index, value) in found.2.iter_mut().enumerate().filter(|(index, _)| index % 32 != 0) {
            *value = 2f32.powi(-24) * (1 + index % 3) as f32;
        }
    });
    let settings = settings(&place, "run", model, guard_underflow());
    let expected = ["q", "k", "v"].map(|it| format!("model.layers.1.self_attn.{it}_proj.weight"));
    check_alone(&told(&settings), UNDERFLOW, &expected.each_ref().map(String::as_str));
}

#[test]
fn clamped_scales_of_a_weight_move_its_gemm_alone() {
    let place = TestFolder::new();
    let weight = "model.layers.1.self_attn.q_proj.weight";
    let model = planted_in_dense(&place, |tensors| {
        let new = |row, column, it: f32| if row < 32 && column < 32 { it * 1e-37 } else { it };
        change(tensors, weight, new);
    });
    let guards = GuardConfig { scale_clamp_fraction_max: 0.01, ..calm() };
    let settings = settings(&place, "run", model, guards);
    check_alone(&told(&settings), "of the scales of a tensor fell below 2^-127", &[weight]);
}

#[test]
fn saturation_of_a_weight_moves_its_gemm_alone() {
    let place = TestFolder::new();
    let weight = "model.layers.1.self_attn.k_proj.weight";
    let model = planted_in_dense(&place, |tensors| {
        // The floor rule clips what is above 1.75 binades of the largest.
        change(tensors, weight, |_, _, it| 1.9f32.copysign(it) * 2f32.powi(-6));
    });
    let guards = GuardConfig { saturation_fraction_max: 0.3, ..calm() };
    let settings = settings(&place, "run", model, guards);
    let settings = Settings { precision: "mxfp8-floor".to_string(), ..settings };
    check_alone(&told(&settings), "of the elements of a tensor saturated", &[weight]);
}

/// They spread through the layers behind it, which move in later steps.
#[test]
fn non_finite_values_of_an_input_move_its_gemm_first() {
    let place = TestFolder::new();
    let model = planted_in_dense(&place, |tensors| {
        let weight = "model.layers.1.mlp.up_proj.weight";
        change(tensors, weight, |_, _, it| 3e38f32.copysign(it));
    });
    let settings = settings(&place, "run", model, calm());
    check(&told(&settings), "NaN or infinite values were to be quantized", &[DOWN]);
}

/// A stack of experts is one weight: a block of one expert moves it, and no other stack.
#[test]
fn a_block_of_one_expert_moves_its_stack_alone() {
    let place = TestFolder::new();
    let ModelConfig::Llama(config) = ModelConfig::preset("moe-micro").expect("a preset") else {
        panic!("another family")
    };
    let model = planted(&place, &config.to_json().to_string(), |tensors| {
        let is_planted =
            |name: &str| name.contains("layers.0.") && name.contains("experts.0.down_proj");
        let names: Vec<&String> = tensors.iter().map(|(name, ..)| name).collect();
        let found = names.iter().find(|name| is_planted(name));
        let weight = found.unwrap_or_else(|| panic!("{names:#?}")).to_string();
        let new = |row, column, it: f32| if row < 32 && column < 32 { it * 1e-37 } else { it };
        change(tensors, &weight, new);
    });
    let guards = GuardConfig { scale_clamp_fraction_max: 0.001, ..calm() };
    let settings = settings(&place, "run", model, guards);
    let expected = "model.layers.0.mlp.experts.down_proj.weight";
    check_alone(&told(&settings), "of the scales of a tensor fell below 2^-127", &[expected]);
}

/// A token that occurs now and then makes one element of the input of `down_proj` large. At a loss
/// spike that GEMM departs from its history, and no other.
#[test]
fn a_departure_at_a_loss_spike_moves_its_gemm_alone() {
    let place = TestFolder::new();
    let text: String = (0..4000u32)
        .map(|index| {
            let rare = if index % 11 == 0 { "Z" } else { "" };
            format!("{}{rare} ", index.wrapping_mul(2_654_435_761) % 100_000)
        })
        .collect();
    fs::write(place.path("text.txt"), text).expect("a file");
    let model = planted_in_dense(&place, |tensors| {
        let found = tensors.iter().find(|(name, ..)| name == "model.embed_tokens.weight");
        let (_, shape, table) = found.expect("the table");
        let width = shape[1];
        let direction = |token: u8| -> Vec<f32> {
            let row = &table[usize::from(token) * width..][..width];
            let length = row.iter().map(|it| it * it).sum::<f32>().sqrt();
            row.iter().map(|it| it / length).collect()
        };
        // Towards the rare token, away from all others.
        let mut fires = direction(b'Z');
        for other in b"0123456789 " {
            fires.iter_mut().zip(direction(*other)).for_each(|(sum, it)| *sum -= 0.5 * it);
        }
        // What comes before the gated unit is the token alone.
        change(tensors, "model.layers.0.self_attn.o_proj.weight", |_, _, it| it * 1e-3);
        for factor in ["gate", "up"] {
            let weight = format!("model.layers.0.mlp.{factor}_proj.weight");
            let new = |row, column, it| if row == 5 { 8.0 * fires[column] } else { it };
            change(tensors, &weight, new);
        }
        // Nothing of it goes on.
        let new = |_, column, it| if column == 5 { 0.0 } else { it };
        change(tensors, "model.layers.0.mlp.down_proj.weight", new);
    });
    // Half of all losses are above the median.
    let guards = GuardConfig {
        amax_history_len: 4,
        loss_window: 4,
        loss_warmup: 2,
        spike_deviations: 1e-9,
        spike_fraction_min: 0.0,
        spike_departure_min: 64.0,
        ..calm()
    };
    let settings = Settings { steps: 40, ..settings(&place, "run", model, guards) };
    let told = told(&settings);
    check_alone(&told, "amax rose from", &["model.layers.0.mlp.down_proj.weight"]);
    assert!(told.iter().filter(|it| it.event.contains("LossSpike")).count() > 10, "{told:#?}");
}

/// All ranks decide as one rank does, however they split the model.
#[test]
fn ranks_move_the_gemms_that_one_rank_moves() {
    let place = TestFolder::new();
    let model = planted_in_dense(&place, plant_in_input_of_down);
    let events = |out: &str, ranks: usize, other: &dyn Fn(Settings) -> Settings| {
        let own = settings(&place, out, model.clone(), guard_underflow());
        let told = told(&other(Settings { ranks, ..own }));
        told.into_iter().map(|it| (it.step, it.event, it.gemm)).collect::<Vec<_>>()
    };
    let expected = events("one", 1, &|it| it);
    assert!(expected.iter().all(|(_, _, gemm)| gemm == DOWN), "{expected:?}");
    assert!(expected.len() > 2, "{expected:?}");
    let rows: [(&str, &dyn Fn(Settings) -> Settings); 5] = [
        ("data", &|it| it),
        ("zero-3", &|it| Settings { zero: 3, ..it }),
        ("tensor", &|it| Settings { tensor: 2, ..it }),
        ("context", &|it| Settings { context: 2, ..it }),
        ("pipeline", &|it| Settings { pipeline: 2, ..it }),
    ];
    for (what, other) in rows {
        assert_eq!(events(what, 2, other), expected, "{what}");
    }
}
