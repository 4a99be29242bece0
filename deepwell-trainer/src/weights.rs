//! Hugging Face weights into an engine.

use std::path::Path;

use bytemuck::cast_slice;
use deepwell_ckpt::hf;
use deepwell_ir::capture::ModelFolder;

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
/// A folder whose tensors are not those of its configuration, or unreadable files.
pub fn load_model_folder(engine: &mut Engine, path: &Path) -> Result<(), TrainError> {
    // Names, shapes and types are checked before anything is read.
    ModelFolder::open(path)?;
    let folder = hf::open_model_folder(path)?;
    let mut buffer: Vec<f32> = Vec::new();
    for index in 0..engine.program().parameters.len() {
        let state = engine.program().parameters[index].clone();
        let value = engine.program().value(state.master).clone();
        buffer.clear();
        buffer.resize(value.elements(), 0.0);
        folder.read_f32_into(&state.name, &value.shape, &mut buffer)?;
        engine.write_value(state.master, cast_slice(&buffer))?;
    }
    engine.refresh_weight_copies()
}
