//! Where a model comes from: a preset, a `config.json`, a model folder, or a `.pt2` archive.

use std::path::{Path, PathBuf};

use bytemuck::cast_slice;
use deepwell_ir::capture::{
    CaptureNotes, ModelConfig, ModelFolder, OpaqueCall, Pt2Model, StoredTensor,
};
use deepwell_ir::{Graph, Role, TensorKind};

use crate::TrainError;
use crate::weights::{self, MasterWeights};

/// What describes a model.
#[derive(Debug)]
enum Description {
    /// A configuration.
    Config(Box<ModelConfig>),
    /// A graph of PyTorch.
    Exported(Box<Pt2Model>),
}

/// A model that was found.
///
/// ```
/// use deepwell_trainer::ModelSource;
///
/// # fn main() -> Result<(), deepwell_trainer::TrainError> {
/// let model = ModelSource::open("gpt2-micro")?;
/// assert_eq!((model.family(), model.vocab_size()), ("gpt2", 256));
/// let graph = model.capture(Some(128))?;
/// assert!(graph.loss.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ModelSource {
    name: String,
    description: Description,
    notes: CaptureNotes,
    /// The folder, if it holds weights.
    folder: Option<PathBuf>,
    stored: Option<Vec<StoredTensor>>,
}

impl ModelSource {
    /// Finds a model by the name of a preset, or the path of a `config.json`, of a model folder or
    /// of a `.pt2` archive. A preset goes before a file or folder of the same name.
    ///
    /// # Errors
    /// Nothing of that name, and whatever of it cannot be captured.
    pub fn open(name: &str) -> Result<ModelSource, TrainError> {
        let source = |description, notes, folder, stored| ModelSource {
            name: name.to_string(),
            description,
            notes,
            folder,
            stored,
        };
        let config = |config| Description::Config(Box::new(config));
        if let Some(preset) = ModelConfig::preset(name) {
            return Ok(source(config(preset), CaptureNotes::default(), None, None));
        }
        let path = Path::new(name);
        if !path.exists() {
            let presets: Vec<&str> = ModelConfig::presets().collect();
            return Err(TrainError::Setting {
                setting: "model",
                expected: format!(
                    "a preset ({}), a `config.json`, a model folder or a `.pt2` archive",
                    presets.join(", ")
                ),
                got: format!("`{name}`"),
                hint: Some("there is no such file or folder".to_string()),
            });
        }
        if Pt2Model::is_archive(path) {
            let model = Pt2Model::open(path)?;
            let notes = CaptureNotes { remarks: model.remarks.clone(), ..CaptureNotes::default() };
            return Ok(source(Description::Exported(Box::new(model)), notes, None, None));
        }
        if weights::has_weights(path) {
            let folder = ModelFolder::open_any(path)?;
            let stored = Some(folder.tensors);
            return Ok(source(config(folder.config), folder.notes, Some(folder.path), stored));
        }
        let (read, notes) = ModelConfig::from_path(path)?;
        Ok(source(config(read), notes, None, None))
    }

    /// Its name, as it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The family by its `model_type`, or `pt2` for an exported graph.
    pub fn family(&self) -> &'static str {
        match &self.description {
            Description::Config(config) => config.family(),
            Description::Exported(_) => "pt2",
        }
    }

    /// Its configuration, if it has one.
    pub fn config(&self) -> Option<&ModelConfig> {
        match &self.description {
            Description::Config(config) => Some(config),
            Description::Exported(_) => None,
        }
    }

    /// The exported program, if it is one.
    pub fn exported(&self) -> Option<&Pt2Model> {
        match &self.description {
            Description::Config(_) => None,
            Description::Exported(model) => Some(model),
        }
    }

    /// What reading it brought to light.
    pub fn notes(&self) -> &CaptureNotes {
        &self.notes
    }

    /// The tensors of its weight files, where it is a folder that has them; names, shapes and types
    /// are checked.
    pub fn stored(&self) -> Option<&[StoredTensor]> {
        self.stored.as_deref()
    }

    /// Tokens in its vocabulary: rows of its token table.
    pub fn vocab_size(&self) -> usize {
        match &self.description {
            Description::Config(config) => config.vocab_size(),
            Description::Exported(model) => {
                let table = model.graph.nodes.iter().find_map(|node| match node.op {
                    deepwell_ir::Op::Embedding(_) => node.inputs.get(1),
                    _ => None,
                });
                let rows = table.and_then(|&id| model.graph.tensor(id).shape.0[0].as_fixed());
                rows.unwrap_or(0)
            }
        }
    }

    /// Longest sequence that it is made for, if that is known.
    pub fn seq_max(&self) -> Option<usize> {
        match &self.description {
            Description::Config(config) => Some(config.max_position_embeddings()),
            Description::Exported(model) => position_rows(&model.graph),
        }
    }

    /// Calls of an exported graph that no op here stands for.
    pub fn opaque(&self) -> Vec<OpaqueCall> {
        self.exported().map(Pt2Model::opaque).unwrap_or_default()
    }

    /// Its forward graph, for sequences of `seq` tokens where that is known.
    ///
    /// # Errors
    /// A model that cannot be captured, or not for sequences of this length.
    pub fn capture(&self, seq: Option<usize>) -> Result<Graph, TrainError> {
        match &self.description {
            Description::Config(config) => Ok(config.capture(seq)?),
            Description::Exported(model) => Ok(model.graph.clone()),
        }
    }

    /// Loads its weights into an engine of its graph (or what generates from it), if it has any,
    /// and makes the compute copies.
    /// Says whether it has.
    ///
    /// # Errors
    /// Weights that cannot be read, or that are stored in a form that is not read: packed, or
    /// experts one by one.
    pub fn load_weights(&mut self, target: &mut dyn MasterWeights) -> Result<bool, TrainError> {
        if let Some(folder) = &self.folder {
            weights::load_model_folder(target, folder)?;
            return Ok(true);
        }
        let Description::Exported(model) = &mut self.description else { return Ok(false) };
        for state in target.program().parameters.clone() {
            let values = model.read(&state.name)?;
            target.write_master(state.master, cast_slice(&values))?;
        }
        target.refresh_copies()?;
        Ok(true)
    }
}

/// Rows of the table of positions, if a graph has one.
fn position_rows(graph: &Graph) -> Option<usize> {
    graph.nodes.iter().find_map(|node| match node.op {
        deepwell_ir::Op::AddPositions(_) => {
            let table = graph.tensor(*node.inputs.get(1)?);
            let is_table =
                matches!(table.kind, TensorKind::Parameter { role: Role::Embedding, .. });
            is_table.then(|| table.shape.0[0].as_fixed())?
        }
        _ => None,
    })
}
