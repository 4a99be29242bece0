//! A checkpoint of a version whose guards watched layers goes on: all GEMMs of a layer that was in
//! fallback are, until the layer's time is over.

use std::fs;
use std::path::Path;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_precision::{
    Fallback, GuardConfig, GuardEventKind, Guards, PrecisionPolicy, QuantStats,
};
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::checkpoint::{self, Position, Writer};
use deepwell_trainer::{
    CompileOptions, Engine, Parallel, RunIdentity, Settings, StepOutcome, TrainError, World,
};
use serde_json::{Value, json};

const SEQ: usize = 16;
const ROWS: usize = 4;
const BACKOFF_STEPS: u64 = 4;

/// Four layers, of which each stage of a pipeline has two.
fn world(parallel: Parallel) -> World {
    let micro = LlamaConfig::preset("llama-micro").expect("a preset");
    let graph = capture(&LlamaConfig { num_layers: 4, ..micro }).expect("a graph");
    let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
    let policy = PrecisionPolicy::preset("mxfp8").expect("a preset");
    let options = CompileOptions::new(policy, SEQ, ROWS);
    let options = CompileOptions { micro_batch: Some(1), parallel, ..options };
    World::compile(graph, Hardware::cpu_only(cpu), &options).expect("a world")
}

fn step(engine: &mut Engine, step: usize) -> Result<StepOutcome, TrainError> {
    let token = |at: usize| ((step * 7919 + at * at * 31 + at * 7) % 256) as i32;
    let inputs: Vec<i32> = (0..ROWS * SEQ).map(token).collect();
    let targets: Vec<i32> = (0..ROWS * SEQ).map(|at| token(at + 1)).collect();
    engine.step(&inputs, &targets, 1e-2, 1.0)
}

/// Guards over four layers, the second of which fell back after step 2.
fn over_layers() -> Guards {
    let config =
        GuardConfig { strikes_max: 1, backoff_steps: BACKOFF_STEPS, ..GuardConfig::default() };
    let names = (0..4).map(|layer| format!("layers.{layer}")).collect();
    let mut guards = Guards::new(config, names, Fallback::Safe);
    let bad = QuantStats { amax: 1.0, elements: 64, underflows: 60, ..QuantStats::default() };
    guards.observe_tensor(2, &[1], &bad);
    guards.observe_loss(2, 5.0, 1.0);
    assert_eq!(guards.decide(2).expect("no error").len(), 1);
    guards
}

/// Rewrites a checkpoint's guards to the form that they had over layers.
fn as_of_layers(checkpoint: &Path) {
    let path = checkpoint.join("manifest.json");
    let text = fs::read_to_string(&path).expect("a manifest");
    let mut manifest: Value = serde_json::from_str(&text).expect("JSON");
    let guards = manifest["guards"].as_object_mut().expect("guards");
    let layers = guards.remove("gemms").expect("their state");
    assert_eq!(layers[1]["name"], "layers.1");
    guards.insert("layers".to_string(), layers);
    guards.remove("is_nonfinite").expect("a flag");
    guards.insert("nonfinite_layer".to_string(), Value::Null);
    for event in guards["events"].as_array_mut().expect("events") {
        let name = event.as_object_mut().and_then(|event| event.remove("gemm"));
        event["layer"] = name.expect("a name");
    }
    let text = manifest.to_string();
    fs::write(&path, &text).expect("written");
    let checksum = blake3::hash(text.as_bytes()).to_hex().to_string();
    fs::write(checkpoint.join("manifest.blake3"), checksum + "\n").expect("written");
}

#[test]
fn gemms_of_a_layer_in_fallback_stay_there() {
    let of_second: Vec<usize> = (7..14).collect();
    for parallel in [Parallel::default(), Parallel { pipeline: 2, ..Parallel::default() }] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = folder.path();
        let position = Position { step: 2, guards: over_layers(), next_batch: 2, audit: None };
        let identity = RunIdentity { id: "a".repeat(32), fingerprint: json!({}) };
        let mut before = world(parallel);
        let expected = before.on_all(|engine| {
            engine.initialize(3)?;
            (0..2).try_for_each(|at| step(engine, at).map(drop))?;
            engine.fall_back(&of_second, "a layer")?;
            let mut writer = Writer::default();
            writer.save(root, engine, &position, &Settings::default(), &identity)?;
            writer.finish(engine)?;
            step(engine, 2)
        });
        let expected = expected.expect("saved");
        let entries = deepwell_ckpt::list(root).expect("a folder");
        as_of_layers(&entries[0].path);

        let mut after = world(parallel);
        let loaded = after.on_all(|engine| {
            let mut notes = Vec::new();
            let note = &mut |text: &str| notes.push(text.to_string());
            let position = checkpoint::load(&entries[0], engine, note)?;
            let outcome = step(engine, 2)?;
            let names: Vec<String> =
                engine.gemms().iter().map(|gemm| gemm.weight.clone()).collect();
            Ok((position, notes, outcome, names))
        });
        for (loaded, expected) in loaded.expect("loaded").into_iter().zip(expected) {
            let (Position { mut guards, step, .. }, notes, outcome, names) = loaded;
            assert_eq!((step, guards.in_fallback()), (2, of_second.clone()), "{parallel}");
            assert!(guards.names().eq(names.iter().map(String::as_str)), "{parallel}");
            assert_eq!(
                notes,
                ["the checkpoint has guards over layers: the GEMMs of each go on as their layer \
                  stood, 7 of 28 in bf16; their histories begin anew"]
            );
            assert_eq!(outcome, expected, "{parallel}: the step that would have come");
            let events = guards.decide(2 + BACKOFF_STEPS).expect("no error");
            assert_eq!(events.len(), 7, "{events:?}");
            for event in events {
                assert!(matches!(event.kind, GuardEventKind::BackToLow { .. }), "{event:?}");
                assert!(event.gemm.starts_with("model.layers.1."), "{event:?}");
            }
        }
    }
}
