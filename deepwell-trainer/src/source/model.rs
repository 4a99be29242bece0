//! The model that a name or a path stands for.

use std::path::{Path, PathBuf};

use bytemuck::cast_slice;
use deepwell_ir::capture::{
    ArchiveTensor, CaptureNotes, ModelConfig, ModelFolder, ModelWeights, OpaqueCall, ParameterRole,
    Pt2Model, StoredSlice, StoredTensor,
};
use deepwell_ir::{Graph, Op, Role, TensorKind};
use serde_json::Value;

use super::unread_weights::unread_beside;
use crate::TrainError;
use crate::weights::{self, MasterWeights};

/// Description of a model.
#[derive(Debug)]
pub(super) enum Description {
    /// The configuration of a preset.
    Preset(Box<ModelConfig>),
    /// A folder, or its `config.json` alone.
    Folder(Box<ModelFolder>),
    /// A graph of PyTorch.
    Exported(Box<Pt2Model>),
}

/// A model from any source.
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
    pub(super) name: String,
    pub(super) description: Description,
    pub(super) notes: CaptureNotes,
    /// Remark about weights next to a `config.json` that are not read.
    pub(super) unread_weights: Option<String>,
}

/// A parameter, or a matrix of a parameter, with its location in the weight files.
#[derive(Clone, Debug)]
pub struct StoredParameter {
    /// Name of the parameter.
    pub name: String,
    /// Shape of the parameter.
    pub shape: Vec<usize>,
    /// Location of the parameter.
    pub part: StoredSlice,
    /// Whether the parameter is written in F32 even if others are BF16: the steps of a selection
    /// bias are smaller than BF16's resolution.
    pub keeps_f32: bool,
}

impl ModelSource {
    /// Opens a model by the name of a preset, or by the path of a `config.json`, of a model folder
    /// or of a `.pt2` archive. A preset takes precedence over a file or folder of the same name.
    ///
    /// A folder provides its weights. Fresh weights are used for a preset, a folder without weights
    /// in any form, and a `config.json` named directly, whatever other files its folder has.
    ///
    /// # Errors
    /// The name does not exist, the folder has weights in an unsupported form, or the model cannot
    /// be captured.
    pub fn open(name: &str) -> Result<ModelSource, TrainError> {
        let source = |description, notes, unread_weights| ModelSource {
            name: name.to_string(),
            description,
            notes,
            unread_weights,
        };
        if let Some(preset) = ModelConfig::preset(name) {
            let preset = Description::Preset(Box::new(preset));
            return Ok(source(preset, CaptureNotes::default(), None));
        }
        let path = Path::new(name);
        if !path.exists() {
            return Err(no_such_model(name));
        }
        if Pt2Model::is_archive(path) {
            let model = Pt2Model::open(path)?;
            let notes = CaptureNotes { remarks: model.remarks.clone(), ..CaptureNotes::default() };
            return Ok(source(Description::Exported(Box::new(model)), notes, None));
        }
        let folder = ModelFolder::open(path)?;
        let notes = folder.notes.clone();
        let unread_weights = if path.is_file() { unread_beside(path) } else { None };
        Ok(source(Description::Folder(Box::new(folder)), notes, unread_weights))
    }

    /// The file with the configuration.
    pub(crate) fn config_file(&self) -> Option<&Path> {
        self.folder().map(|folder| folder.config_file.as_path())
    }

    /// The folder, or the `config.json`, that the model was opened from.
    pub(crate) fn folder(&self) -> Option<&ModelFolder> {
        match &self.description {
            Description::Folder(folder) => Some(folder),
            Description::Preset(_) | Description::Exported(_) => None,
        }
    }

    /// The weights of its folder.
    fn folder_weights(&self) -> Option<&ModelWeights> {
        self.folder()?.weights.as_ref()
    }

    /// The name, as given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The family by its `model_type`, or `pt2` for an exported graph.
    pub fn family(&self) -> &'static str {
        self.config().map_or("pt2", ModelConfig::family)
    }

    /// The configuration, if any.
    pub fn config(&self) -> Option<&ModelConfig> {
        match &self.description {
            Description::Preset(config) => Some(config),
            Description::Folder(folder) => Some(&folder.config),
            Description::Exported(_) => None,
        }
    }

    /// Returns the configuration as a `config.json`, and whether it is the model's own file.
    /// Missing `architectures` are added, and the entries about packed weights are removed, because
    /// weights are written unpacked. None for an exported graph.
    pub fn config_json(&self) -> Option<(Value, bool)> {
        let mut written = self.config()?.clone().unpacked().to_json();
        let Some(folder) = self.folder() else { return Some((written, false)) };
        let mut object = folder.json.clone();
        object.remove("quantization_config");
        if object.get("architectures").is_none_or(Value::is_null) {
            object.insert("architectures".to_string(), written["architectures"].take());
        }
        Some((Value::Object(object), true))
    }

    /// The `generation_config.json` of the model's folder.
    pub fn generation_config(&self) -> Option<PathBuf> {
        let file = self.config_file()?.with_file_name("generation_config.json");
        file.is_file().then_some(file)
    }

    /// Returns the parameters with their names and shapes, and the location of each in the weight
    /// files, under the names in transformers or the exported module: a stack of experts has an
    /// entry for each expert. Weights are not packed.
    ///
    /// # Errors
    /// A parameter of an exported graph is missing in its archive.
    pub fn stored_slices(&self) -> Result<Vec<StoredParameter>, TrainError> {
        let refuse = |name: &str| TrainError::Setting {
            setting: "model",
            expected: format!("`{name}` in tensors of F32, BF16 or F16"),
            got: "none of its shape".to_string(),
            hint: None,
        };
        if let Some(config) = self.config() {
            let mut all = Vec::new();
            for (spec, parts) in config.clone().unpacked().stored_slices() {
                let is_head = spec.role == ParameterRole::Head;
                for mut part in parts {
                    if matches!(config, ModelConfig::Gpt2(_)) && !is_head {
                        part.name = format!("transformer.{}", part.name);
                    }
                    let name = spec.name.clone();
                    let shape = spec.shape.clone();
                    let keeps_f32 = spec.role == ParameterRole::SelectionBias;
                    all.push(StoredParameter { name, shape, part, keeps_f32 });
                }
            }
            return Ok(all);
        }
        let Some(model) = self.exported() else { return Ok(Vec::new()) };
        let stored = |name: &str, shape: Option<Vec<usize>>| {
            let part = model.part(name).ok_or_else(|| refuse(name))?;
            let (name, shape) = (name.to_string(), shape.unwrap_or_default());
            Ok(StoredParameter { name, shape, part, keeps_f32: false })
        };
        let parameters = model.graph.parameters();
        parameters.map(|(_, tensor)| stored(&tensor.name, tensor.shape.as_fixed())).collect()
    }

    /// The tensors of an archive's weights, read by the graph or not. None for models with a
    /// configuration.
    pub fn archive_tensors(&self) -> Vec<ArchiveTensor> {
        self.exported().map(Pt2Model::stored).unwrap_or_default()
    }

    /// Reads the values of an archive's tensor.
    pub(crate) fn read_stored(&mut self, name: &str) -> Result<Vec<f32>, TrainError> {
        match &mut self.description {
            Description::Exported(model) => Ok(model.read_stored(name)?),
            Description::Preset(_) | Description::Folder(_) => Err(TrainError::Setting {
                setting: "model",
                expected: format!("all of `{name}` to be trained"),
                got: "a part of it".to_string(),
                hint: None,
            }),
        }
    }

    /// The exported program, if the model is one.
    pub fn exported(&self) -> Option<&Pt2Model> {
        match &self.description {
            Description::Preset(_) | Description::Folder(_) => None,
            Description::Exported(model) => Some(model),
        }
    }

    /// Notes from the capture.
    pub fn notes(&self) -> &CaptureNotes {
        &self.notes
    }

    /// The tensors of the weight files, for a folder with weights; names, shapes and types are
    /// checked.
    pub fn stored(&self) -> Option<&[StoredTensor]> {
        self.folder_weights().map(|weights| weights.tensors.as_slice())
    }

    /// Size of the vocabulary: rows of the token table.
    pub fn vocab_size(&self) -> usize {
        match &self.description {
            Description::Preset(config) => config.vocab_size(),
            Description::Folder(folder) => folder.config.vocab_size(),
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

    /// Longest supported sequence, if known.
    pub fn seq_max(&self) -> Option<usize> {
        match &self.description {
            Description::Preset(config) => Some(config.max_position_embeddings()),
            Description::Folder(folder) => Some(folder.config.max_position_embeddings()),
            Description::Exported(model) => position_rows(&model.graph),
        }
    }

    /// Calls of an exported graph without a matching op.
    pub fn opaque(&self) -> Vec<OpaqueCall> {
        self.exported().map(Pt2Model::opaque).unwrap_or_default()
    }

    /// Whether the model has parameters exported with `requires_grad = false`.
    pub(crate) fn has_frozen(&self) -> bool {
        matches!(&self.description, Description::Exported(model) if !model.frozen.is_empty())
    }

    /// Checks that training this model changes the same parameters as PyTorch. `trains_frozen`
    /// allows parameters exported with `requires_grad = false`, and trains them like any other.
    ///
    /// # Errors
    /// An exported graph has calls without a matching op, has no token table or output head, or has
    /// such parameters.
    pub fn check_trainable(&self, trains_frozen: bool) -> Result<(), TrainError> {
        let Description::Exported(model) = &self.description else { return Ok(()) };
        let refuse = |expected: &str, got: String, hint: &str| {
            let expected = expected.to_string();
            let hint = Some(hint.to_string());
            Err(TrainError::Setting { setting: "model", expected, got, hint })
        };
        let opaque = model.opaque();
        // Views that only prepare an operand of such a call are not informative.
        let first = opaque.iter().find(|call| call.target != "view").or(opaque.first());
        if let Some(first) = first {
            let more = match opaque.len() - 1 {
                0 => String::new(),
                rest => format!(" and {rest} more"),
            };
            return refuse(
                "an exported graph of known ops",
                format!("`{}` (node `{}`){more}", first.target, first.node),
                "such a model can be captured and counted, not trained; \
                 `deepwell capture MODEL --summary` lists its unknown calls",
            );
        }
        if self.vocab_size() == 0 {
            return refuse(
                "an exported graph that looks token ids up in a table",
                "none".to_string(),
                "use `torch.nn.Embedding` for the tokens and export again",
            );
        }
        if model.graph.loss.is_none() {
            let last = model.graph.nodes.last().map(|node| (node.name.as_str(), &node.op));
            return refuse(
                "an exported graph whose first output is that of a linear layer without bias",
                match last {
                    Some((name, Op::Linear(op))) if op.bias => format!("`{name}` with a bias"),
                    Some((name, op)) => format!("`{name}` (`{}`)", op.name()),
                    None => "no node".to_string(),
                },
                "the loss is computed together with the output head: make that \
                 `torch.nn.Linear(width, vocabulary, bias=False)`, give its logits first, and \
                 export again",
            );
        }
        match model.frozen.as_slice() {
            [first, rest @ ..] if !trains_frozen => refuse(
                "parameters that are all to be trained",
                format!(
                    "`{first}`{} exported with `requires_grad = false`",
                    if rest.is_empty() {
                        String::new()
                    } else {
                        format!(" and {} more", rest.len())
                    }
                ),
                "freezing is not supported: `--train-frozen` trains them too, or call \
                 `requires_grad_(True)` and export again",
            ),
            _ => Ok(()),
        }
    }

    /// Captures the forward graph, for sequences of `seq` tokens if given.
    ///
    /// # Errors
    /// The model cannot be captured, or not for sequences of this length.
    pub fn capture(&self, seq: Option<usize>) -> Result<Graph, TrainError> {
        match &self.description {
            Description::Preset(config) => Ok(config.capture(seq)?),
            Description::Folder(folder) => Ok(folder.config.capture(seq)?),
            Description::Exported(model) => Ok(model.graph.clone()),
        }
    }

    /// Loads the weights, if any, into an engine (or a generating model) of the model's graph, and
    /// computes the compute copies. Returns whether weights were loaded.
    ///
    /// # Errors
    /// The weights cannot be read, or are stored in an unsupported form: packed, or with the
    /// projections of experts in one tensor.
    pub fn load_weights(&mut self, target: &mut dyn MasterWeights) -> Result<bool, TrainError> {
        if let (Some(config), Some(files)) = (self.config(), self.folder_weights()) {
            weights::load(target, config, files)?;
            return Ok(true);
        }
        let Description::Exported(model) = &mut self.description else { return Ok(false) };
        for state in target.program().parameters.clone() {
            let values = model.read(&state.name)?;
            target.write_master(state.master.value(), cast_slice(&values))?;
        }
        target.refresh_copies()?;
        Ok(true)
    }
}

/// The error for a name that is neither a preset nor a path.
fn no_such_model(name: &str) -> TrainError {
    let presets: Vec<&str> = ModelConfig::presets().collect();
    TrainError::Setting {
        setting: "model",
        expected: format!(
            "a preset ({}), a `config.json`, a model folder or a `.pt2` archive",
            presets.join(", ")
        ),
        got: format!("`{name}`"),
        hint: Some(match ModelConfig::similar_preset(name) {
            Some(preset) => format!("did you mean `{preset}`?"),
            None => "there is no such file or folder".to_string(),
        }),
    }
}

/// Rows of the position table, if the graph has one.
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
