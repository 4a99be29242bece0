//! Where a model comes from: a preset, a `config.json`, a model folder, or a `.pt2` archive.

use std::path::{Path, PathBuf};

use bytemuck::cast_slice;
use deepwell_ir::capture::{
    ArchiveTensor, CaptureNotes, ModelConfig, ModelFolder, OpaqueCall, ParameterRole, Pt2Model,
    StoredPart, StoredTensor, WeightFiles,
};
use deepwell_ir::{Graph, Op, Role, TensorKind};
use serde_json::Value;

use crate::TrainError;
use crate::weights::{self, MasterWeights};

mod special_tokens;
mod tokenizer;
mod weights_origin;

pub use special_tokens::SpecialTokens;
pub use tokenizer::{BYTES, ChosenTokenizer, open_tokenizer};

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
    /// The file that its configuration is from.
    config_file: Option<PathBuf>,
    /// The folder, if it holds weights.
    folder: Option<PathBuf>,
    stored: Option<Vec<StoredTensor>>,
    /// What is to be said of weights beside a `config.json` that are not read.
    unread_weights: Option<String>,
}

/// A parameter, or a matrix of it, and where it lies in the weight files.
#[derive(Clone, Debug)]
pub struct StoredParameter {
    /// Name of the parameter.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its place.
    pub part: StoredPart,
    /// Whether it is written in F32 even where others are BF16: the steps of a selection bias are
    /// smaller than what BF16 tells apart.
    pub keeps_f32: bool,
}

impl ModelSource {
    /// Finds a model by the name of a preset, or the path of a `config.json`, of a model folder or
    /// of a `.pt2` archive. A preset goes before a file or folder of the same name.
    ///
    /// A folder gives its weights. Only one without weights in any form begins from fresh weights,
    /// as a preset does, and a `config.json` that is named itself, whatever lies beside it.
    ///
    /// # Errors
    /// Nothing of that name, a folder with weights that are not read, and whatever of it cannot be
    /// captured.
    pub fn open(name: &str) -> Result<ModelSource, TrainError> {
        let source = |description, notes, folder, stored| ModelSource {
            name: name.to_string(),
            description,
            notes,
            config_file: None,
            folder,
            stored,
            unread_weights: None,
        };
        let config = |config| Description::Config(Box::new(config));
        if let Some(preset) = ModelConfig::preset(name) {
            return Ok(source(config(preset), CaptureNotes::default(), None, None));
        }
        let path = Path::new(name);
        if !path.exists() {
            return Err(no_such_model(name));
        }
        let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let with_file = |model| ModelSource { config_file: Some(file), ..model };
        if Pt2Model::is_archive(path) {
            let model = Pt2Model::open(path)?;
            let notes = CaptureNotes { remarks: model.remarks.clone(), ..CaptureNotes::default() };
            return Ok(source(Description::Exported(Box::new(model)), notes, None, None));
        }
        if path.is_dir() && WeightFiles::find(path)?.is_some() {
            let folder = ModelFolder::open_any(path)?;
            let stored = Some(folder.tensors);
            let model = source(config(folder.config), folder.notes, Some(folder.path), stored);
            return Ok(with_file(model));
        }
        let (read, notes) = ModelConfig::from_path(path)?;
        let unread_weights =
            if path.is_file() { weights_origin::unread_beside(path) } else { None };
        let model = source(config(read), notes, None, None);
        Ok(with_file(ModelSource { unread_weights, ..model }))
    }

    /// The file that its configuration is from.
    pub(crate) fn config_file(&self) -> Option<&Path> {
        self.config_file.as_deref()
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

    /// Its configuration as a `config.json`, and whether that is its own file; one without
    /// `architectures` gets them, and one of packed weights loses what says so, as weights are
    /// written unpacked. None for an exported graph.
    ///
    /// # Errors
    /// A file that can no longer be read.
    pub fn config_json(&self) -> Result<Option<(Value, bool)>, TrainError> {
        let Some(config) = self.config() else { return Ok(None) };
        let mut written = config.clone().unpacked().to_json();
        let Some(file) = &self.config_file else { return Ok(Some((written, false))) };
        let text = std::fs::read(file).map_err(TrainError::io(file))?;
        let own = serde_json::from_slice::<Value>(&text);
        let own = own.map_err(std::io::Error::other).map_err(TrainError::io(file))?;
        let Value::Object(mut object) = own else { return Ok(Some((written, false))) };
        object.remove("quantization_config");
        if object.get("architectures").is_none_or(Value::is_null) {
            object.insert("architectures".to_string(), written["architectures"].take());
        }
        Ok(Some((Value::Object(object), true)))
    }

    /// The `generation_config.json` of its folder.
    pub fn generation_config(&self) -> Option<PathBuf> {
        let file = self.config_file.as_ref()?.with_file_name("generation_config.json");
        file.is_file().then_some(file)
    }

    /// Its parameters by name with their shapes, and where each lies in the weight files, under the
    /// names that transformers, or the exported module, has for them: a stack of experts once for
    /// each of them. Weights are not packed.
    ///
    /// # Errors
    /// A parameter of an exported graph that is nowhere in its archive.
    pub fn stored_parts(&self) -> Result<Vec<StoredParameter>, TrainError> {
        let refuse = |name: &str| TrainError::Setting {
            setting: "model",
            expected: format!("`{name}` in tensors of F32, BF16 or F16"),
            got: "none of its shape".to_string(),
            hint: None,
        };
        match &self.description {
            Description::Config(config) => {
                let mut all = Vec::new();
                for (spec, parts) in (**config).clone().unpacked().stored_parts() {
                    let is_head = spec.role == ParameterRole::Head;
                    for mut part in parts {
                        if matches!(**config, ModelConfig::Gpt2(_)) && !is_head {
                            part.name = format!("transformer.{}", part.name);
                        }
                        let (name, shape) = (spec.name.clone(), spec.shape.clone());
                        let keeps_f32 = spec.role == ParameterRole::SelectionBias;
                        all.push(StoredParameter { name, shape, part, keeps_f32 });
                    }
                }
                Ok(all)
            }
            Description::Exported(model) => model
                .graph
                .parameters()
                .map(|(_, tensor)| {
                    let part = model.part(&tensor.name).ok_or_else(|| refuse(&tensor.name))?;
                    let shape = tensor.shape.as_fixed().unwrap_or_default();
                    let name = tensor.name.clone();
                    Ok(StoredParameter { name, shape, part, keeps_f32: false })
                })
                .collect(),
        }
    }

    /// The tensors of an archive's weights, whether the graph reads them or not. None for models of
    /// a configuration.
    pub fn archive_tensors(&self) -> Vec<ArchiveTensor> {
        self.exported().map(Pt2Model::stored).unwrap_or_default()
    }

    /// The values of one of them.
    pub(crate) fn read_stored(&mut self, name: &str) -> Result<Vec<f32>, TrainError> {
        match &mut self.description {
            Description::Exported(model) => Ok(model.read_stored(name)?),
            Description::Config(_) => Err(TrainError::Setting {
                setting: "model",
                expected: format!("all of `{name}` to be trained"),
                got: "a part of it".to_string(),
                hint: None,
            }),
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

    /// Whether the model has parameters that were exported with `requires_grad = false`.
    pub(crate) fn has_frozen(&self) -> bool {
        matches!(&self.description, Description::Exported(model) if !model.frozen.is_empty())
    }

    /// Checks that training this model changes what PyTorch would change. `trains_frozen` allows
    /// parameters that were exported with `requires_grad = false`, which then train like any
    /// other.
    ///
    /// # Errors
    /// An exported graph with calls that no op here stands for, without a table of tokens or an
    /// output head, or with such parameters.
    pub fn check_trainable(&self, trains_frozen: bool) -> Result<(), TrainError> {
        let Description::Exported(model) = &self.description else { return Ok(()) };
        let refuse = |expected: &str, got: String, hint: &str| {
            let (expected, hint) = (expected.to_string(), Some(hint.to_string()));
            Err(TrainError::Setting { setting: "model", expected, got, hint })
        };
        let opaque = model.opaque();
        // Views that only bring an operand to such a call say nothing of it.
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
    /// projections of experts in one.
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
