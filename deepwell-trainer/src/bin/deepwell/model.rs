//! The model of a command line: a preset, a `config.json` or a model folder.

use std::path::Path;

use anyhow::{Result, bail};
use deepwell_ir::Graph;
use deepwell_ir::capture::{
    CaptureNotes, LlamaConfig, ModelFolder, StoredTensor, capture, capture_for_sequence,
};
use deepwell_trainer::weights::has_weights;

/// A model that was found.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    /// Its name on the command line.
    pub(crate) name: String,
    /// Its configuration.
    pub(crate) config: LlamaConfig,
    /// What reading the configuration brought to light.
    pub(crate) notes: CaptureNotes,
    /// Its weights, where it is a folder that has them; names, shapes and types are checked.
    pub(crate) weights: Option<Vec<StoredTensor>>,
}

impl Model {
    /// Finds a model. A preset goes before a file or folder of the same name.
    pub(crate) fn open(name: &str) -> Result<Model> {
        let model =
            |config, notes, weights| Model { name: name.to_string(), config, notes, weights };
        if let Some(config) = LlamaConfig::preset(name) {
            return Ok(model(config, CaptureNotes::default(), None));
        }
        let path = Path::new(name);
        if !path.exists() {
            bail!(
                "model: expected a preset ({}), a `config.json` or a model folder, got `{name}`\n\
                 hint: there is no such file or folder",
                LlamaConfig::PRESETS.join(", ")
            );
        }
        if has_weights(path) {
            let folder = ModelFolder::open(path)?;
            return Ok(model(folder.config, folder.notes, Some(folder.tensors)));
        }
        let (config, notes) = LlamaConfig::from_path(path)?;
        Ok(model(config, notes, None))
    }

    /// Its forward graph, for sequences of `seq` tokens where that is known.
    pub(crate) fn capture(&self, seq: Option<usize>) -> Result<Graph> {
        Ok(match seq {
            Some(seq) => capture_for_sequence(&self.config, seq)?,
            None => capture(&self.config)?,
        })
    }
}
