//! An engine's state into a checkpoint and back.

use std::path::Path;

use deepwell_ckpt::{
    CheckpointContents, CheckpointEntry, CkptDtype, SaveOptions, Section, TensorView,
};
use deepwell_ir::{DType, MemoryKind, ValueId};
use deepwell_precision::Guards;
use serde_json::json;

use crate::{Engine, Settings, TrainError};

/// Where a run stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    /// Steps done.
    pub step: u64,
    /// Guards after that step.
    pub guards: Guards,
}

/// The stored element type of a value.
fn stored(dtype: DType) -> CkptDtype {
    match dtype {
        DType::Bf16 => CkptDtype::Bf16,
        DType::I32 => CkptDtype::I32,
        DType::U64 => CkptDtype::U64,
        DType::E4m3 => CkptDtype::E4M3,
        DType::E8m0 => CkptDtype::E8M0,
        _ => CkptDtype::F32,
    }
}

/// Values that a checkpoint holds, with their sections: master weights, moments, and the compute
/// copies with their scales.
fn sections(engine: &Engine) -> Vec<(ValueId, Section)> {
    let program = engine.program();
    let mut sections = Vec::new();
    for state in &program.parameters {
        sections.push((state.master, Section::Master));
        sections.extend(state.first_moment.map(|id| (id, Section::MomentFirst)));
        sections.extend(state.second_moment.map(|id| (id, Section::MomentSecond)));
    }
    for (index, value) in program.values.iter().enumerate() {
        if value.memory == MemoryKind::Weights {
            let section = match value.dtype {
                DType::E4m3 => Section::Quantized,
                DType::E8m0 => Section::Scales,
                _ => Section::Weights,
            };
            sections.push((ValueId(index as u32), section));
        }
    }
    sections
}

/// Writes a checkpoint of the state after `position.step`.
///
/// # Errors
/// Non-finite state, or a disk that refuses; nothing is listed then.
pub fn save(
    root: &Path,
    engine: &mut Engine,
    position: &Position,
    settings: &Settings,
) -> Result<(), TrainError> {
    let (applied, skipped) = engine.applied_steps()?;
    let program = engine.program();
    let mut contents = CheckpointContents::new(position.step);
    for (id, section) in sections(engine) {
        let value = program.value(id);
        let data = engine.host_view(id).ok_or_else(|| TrainError::Setting {
            setting: "checkpoint",
            expected: "a backend whose memory the host sees".to_string(),
            got: format!("value `{}` elsewhere", value.name),
            hint: None,
        })?;
        contents.tensors.push(TensorView {
            name: &value.name,
            dtype: stored(value.dtype),
            shape: value.shape.clone(),
            data,
            section,
        });
    }
    contents.plan = to_json(engine.plan());
    contents.policy = to_json(&engine.plan().policy);
    contents.guards = to_json(&position.guards);
    contents.rng = json!({ "seed": settings.seed, "data_seed": settings.data_seed });
    contents.data_position = json!({ "next_batch": position.step });
    contents.run = json!({
        "settings": to_json(settings),
        "applied_steps": applied,
        "skipped_steps": skipped,
        "version": env!("CARGO_PKG_VERSION"),
    });
    let options = SaveOptions { keep_last: Some(settings.keep_last), ..SaveOptions::default() };
    let saved = deepwell_ckpt::save(root, &contents, &options)?;
    for warning in &saved.warnings {
        tracing::warn!("{warning}");
    }
    Ok(())
}

fn to_json<T: serde::Serialize>(value: &T) -> serde_json::Value {
    serde_json::to_value(value).expect("settings, plans and guards are plain data")
}

/// Loads a checkpoint into an engine compiled for the same settings.
///
/// # Errors
/// A damaged checkpoint, or one of another run.
pub fn load(
    entry: &CheckpointEntry,
    engine: &mut Engine,
    settings: &Settings,
) -> Result<Position, TrainError> {
    let checkpoint = deepwell_ckpt::load(&entry.path)?;
    let refuse = |what: String| TrainError::Resume { path: entry.path.clone(), what };
    let saved: Settings = serde_json::from_value(checkpoint.run()["settings"].clone())
        .map_err(|error| refuse(format!("its settings are unreadable: {error}")))?;
    if let Some(what) = difference(&saved, settings) {
        return Err(refuse(what));
    }
    let guards: Guards = serde_json::from_value(checkpoint.guards().clone())
        .map_err(|error| refuse(format!("its guard state is unreadable: {error}")))?;
    let layers = guards.in_fallback();
    if !layers.is_empty() {
        engine.fall_back(&layers, "in fallback when the checkpoint was written")?;
    }
    let mut buffer: Vec<u8> = Vec::new();
    for (id, section) in sections(engine) {
        if !matches!(section, Section::Master | Section::MomentFirst | Section::MomentSecond) {
            continue;
        }
        let value = engine.program().value(id).clone();
        checkpoint.expect(section, &value.name, stored(value.dtype), &value.shape)?;
        buffer.clear();
        buffer.resize(value.range.bytes, 0);
        checkpoint.read_into(section, &value.name, &mut buffer)?;
        engine.write_value(id, &buffer)?;
    }
    let count = |name: &str| checkpoint.run()[name].as_u64().unwrap_or(0);
    engine.set_applied_steps(count("applied_steps"), count("skipped_steps"))?;
    engine.refresh_weight_copies()?;
    Ok(Position { step: checkpoint.step(), guards })
}

/// The first setting that changes the numbers and differs.
fn difference(saved: &Settings, now: &Settings) -> Option<String> {
    let pairs = [
        ("model", format!("{:?}", saved.model), format!("{:?}", now.model)),
        ("data", format!("{:?}", saved.data), format!("{:?}", now.data)),
        ("tokenizer", format!("{:?}", saved.tokenizer), format!("{:?}", now.tokenizer)),
        ("precision", saved.precision.clone(), now.precision.clone()),
        ("policy", format!("{:?}", saved.policy), format!("{:?}", now.policy)),
        ("steps", saved.steps.to_string(), now.steps.to_string()),
        ("seq_len", saved.seq_len.to_string(), now.seq_len.to_string()),
        ("batch_size", saved.batch_size.to_string(), now.batch_size.to_string()),
        ("seed", saved.seed.to_string(), now.seed.to_string()),
        ("data_seed", format!("{:?}", saved.data_seed), format!("{:?}", now.data_seed)),
        ("learning_rate", saved.learning_rate.to_string(), now.learning_rate.to_string()),
        ("optimizer", format!("{:?}", saved.optimizer), format!("{:?}", now.optimizer)),
    ];
    pairs
        .into_iter()
        .find(|(_, saved, now)| saved != now)
        .map(|(name, saved, now)| format!("it was written with {name} = {saved}, now it is {now}"))
}
