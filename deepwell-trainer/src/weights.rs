//! Loads Hugging Face weights into an engine, or into a model that only generates.

use std::collections::HashMap;

use bytemuck::cast_slice;
use deepwell_ir::capture::{ModelConfig, ModelWeights, StoredSlice};
use deepwell_ir::{Program, ValueId};

use crate::TrainError;

mod packed;

/// A target for FP32 master weights.
pub trait MasterWeights {
    /// The program with the parameters.
    fn program(&self) -> &Program;

    /// Writes a master weight, a value of [`MasterWeights::program`], from the whole tensor; a rank
    /// with a slice stores only the slice.
    ///
    /// # Errors
    /// Bytes of the wrong length.
    fn write_master(&mut self, id: ValueId, bytes: &[u8]) -> Result<(), TrainError>;

    /// Recomputes the compute copies from the masters.
    ///
    /// # Errors
    /// The backend fails.
    fn refresh_copies(&mut self) -> Result<(), TrainError>;
}

/// Rejects a stored output head that differs from its tied token table: transformers would train
/// two tensors there.
fn check_tied_head(weights: &ModelWeights) -> Result<(), TrainError> {
    let ModelWeights { files, tensors: stored, .. } = weights;
    const HEAD: &str = "lm_head.weight";
    let tables = [
        "model.embed_tokens.weight",
        "embed_tokens.weight",
        "transformer.wte.weight",
        "wte.weight",
    ];
    let table = stored.iter().find(|tensor| tables.contains(&tensor.name.as_str()));
    let is_ignored = files.tensor(HEAD).is_some() && stored.iter().all(|t| t.name != HEAD);
    let Some(table) = table.filter(|_| is_ignored) else { return Ok(()) };
    let differ = {
        let head = files.read_f32(HEAD, &table.shape)?;
        let table = files.read_f32(&table.name, &table.shape)?;
        head.iter().zip(&table).filter(|(a, b)| a != b).count()
    };
    if differ == 0 {
        return Ok(());
    }
    Err(TrainError::Setting {
        setting: "model",
        expected: format!("`{HEAD}` to be `{}`, as `tie_word_embeddings` says", table.name),
        got: format!("another tensor: {differ} elements differ"),
        hint: Some(
            "set `tie_word_embeddings` to false in config.json to train both, or take \
             `lm_head.weight` out of the weights"
                .to_string(),
        ),
    })
}

/// Loads the master weights from the weights of a model folder and computes the compute copies.
///
/// Names, shapes and types were checked when the folder was opened.
///
/// # Errors
/// A file cannot be read, a value is not finite, or a stored head differs from its tied table.
pub fn load(
    target: &mut dyn MasterWeights,
    config: &ModelConfig,
    weights: &ModelWeights,
) -> Result<(), TrainError> {
    let parts = config.stored_slices().into_iter().map(|(spec, parts)| (spec.name, parts));
    let parts: HashMap<String, Vec<StoredSlice>> = parts.collect();
    check_tied_head(weights)?;
    let files = &weights.files;
    let mut buffer: Vec<f32> = Vec::new();
    for index in 0..target.program().parameters.len() {
        let state = target.program().parameters[index].clone();
        let shape = target.program().whole_shape(&state);
        let parts = parts.get(&state.name).map(Vec::as_slice).unwrap_or_default();
        let mut values = vec![0.0; shape.iter().product()];
        for part in parts {
            let stored = weights.stored_name(&part.name);
            let (elements, shape) = part.elements_of(&shape);
            let values = &mut values[elements];
            if part.shape == shape && !part.transposed && part.packing.is_none() {
                files.read_f32_into(stored, &part.shape, values)?;
                continue;
            }
            buffer.clear();
            buffer.resize(part.shape.iter().product(), 0.0);
            match part.packing {
                None => files.read_f32_into(stored, &part.shape, &mut buffer)?,
                Some(packing) => packed::read(files, part, packing, &mut buffer)?,
            }
            let slice = part.extract(&buffer, shape).ok_or_else(|| TrainError::Setting {
                setting: "model",
                expected: format!("`{stored}` to hold `{}` {shape:?}", state.name),
                got: format!("{:?}", part.shape),
                hint: None,
            })?;
            values.copy_from_slice(&slice);
        }
        target.write_master(state.master.value(), cast_slice(&values))?;
    }
    target.refresh_copies()
}
