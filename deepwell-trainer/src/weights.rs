//! Hugging Face weights into an engine.

use std::collections::HashMap;
use std::path::Path;

use bytemuck::cast_slice;
use deepwell_ckpt::hf;
use deepwell_ir::capture::{ModelFolder, StoredPart};

use crate::{Engine, TrainError};

/// Whether a folder holds weights beside its `config.json`.
pub fn has_weights(path: &Path) -> bool {
    ["model.safetensors", "model.safetensors.index.json"]
        .iter()
        .any(|name| path.join(name).is_file())
}

/// Loads the master weights from a model folder and makes the compute copies.
///
/// # Errors
/// A folder whose tensors are not those of its configuration, unreadable files, and weights that
/// are stored in a form that is not read: packed, or experts one by one.
pub fn load_model_folder(engine: &mut Engine, path: &Path) -> Result<(), TrainError> {
    // Names, shapes and types are checked before anything is read.
    let model = ModelFolder::open_any(path)?;
    let parts: HashMap<String, Option<StoredPart>> = model
        .config
        .parameters_and_parts()
        .into_iter()
        .map(|(spec, part)| (spec.name, part))
        .collect();
    let folder = hf::open_model_folder(path)?;
    let mut buffer: Vec<f32> = Vec::new();
    for index in 0..engine.program().parameters.len() {
        let state = engine.program().parameters[index].clone();
        let value = engine.program().value(state.master).clone();
        let Some(part) = parts.get(&state.name).and_then(Option::as_ref) else {
            return Err(TrainError::Setting {
                setting: "model",
                expected: format!("`{}` in one tensor of F32, BF16 or F16", state.name),
                got: "packed weights, or experts one by one".to_string(),
                hint: Some("start from nothing with the config.json alone".to_string()),
            });
        };
        // GPT-2's files put `transformer.` before a name, or not.
        let prefixed = format!("transformer.{}", part.name);
        let is_prefixed = model.tensors.iter().any(|tensor| tensor.name == prefixed);
        let stored = if is_prefixed { &prefixed } else { &part.name };
        buffer.clear();
        buffer.resize(part.shape.iter().product(), 0.0);
        folder.read_f32_into(stored, &part.shape, &mut buffer)?;
        if part.shape == value.shape && !part.transposed {
            engine.write_value(state.master, cast_slice(&buffer))?;
            continue;
        }
        let values = part.extract(&buffer, &value.shape).ok_or_else(|| TrainError::Setting {
            setting: "model",
            expected: format!("`{stored}` to hold `{}` {:?}", state.name, value.shape),
            got: format!("{:?}", part.shape),
            hint: None,
        })?;
        engine.write_value(state.master, cast_slice(&values))?;
    }
    engine.refresh_weight_copies()
}
