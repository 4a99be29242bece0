//! A model folder: `config.json` and safetensors files, whose headers are compared with the
//! configuration. No weights are read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;

use super::weight_files::{INDEX, SINGLE, WeightFiles, WeightTensor};
use crate::capture::{
    CaptureError, CaptureNotes, LlamaConfig, ModelFamily, StoredDType, StoredElement,
};

/// Prefix that `save_pretrained` adds to all tensors but the head; a base model is saved without
/// the prefix.
const PREFIX: &str = "model.";
/// The output head, which may be stored instead of a tied token table.
pub(in crate::capture) const HEAD: &str = "lm_head.weight";

/// A tensor in a weight file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name in the file. [`ModelFolder::stored_name`] maps the name of a
    /// [`StoredSlice`](crate::capture::StoredSlice) to this name.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: StoredDType,
    /// The file of the tensor.
    pub file: PathBuf,
    /// Offset of the data from the start of the file.
    pub offset_bytes: u64,
    /// Size of the data.
    pub size_bytes: u64,
}

/// A Hugging Face model folder whose files match its configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFolder<C = LlamaConfig> {
    /// The folder.
    pub path: PathBuf,
    /// Its `config.json`.
    pub config: C,
    /// Remarks on the configuration and on ignored tensors.
    pub notes: CaptureNotes,
    /// Tensors of the weight files that the model uses, in the order of
    /// [`LlamaConfig::stored_tensors`]: one per parameter, unless experts are stored separately or
    /// weights are packed.
    pub tensors: Vec<StoredTensor>,
    /// Names in the files that differ from the names of
    /// [`StoredSlice`](crate::capture::StoredSlice)s, by part name.
    pub stored_names: BTreeMap<String, String>,
}

impl<C> ModelFolder<C> {
    /// Name in the files for the name of a part.
    pub fn stored_name<'a>(&'a self, part: &'a str) -> &'a str {
        self.stored_names.get(part).map_or(part, String::as_str)
    }
}

impl ModelFolder {
    /// Opens a folder with `config.json` and the weights found by [`WeightFiles`]. Accepts F32,
    /// BF16 and F16 weights.
    ///
    /// As in transformers, files of a base model omit the `model.` prefix, and a tied token table
    /// may be stored as `lm_head.weight` only.
    ///
    /// # Errors
    /// Errors of [`LlamaConfig::from_path`] and [`WeightFiles::find`]; a file that is missing,
    /// truncated or has a broken header; a tensor that is missing, not part of the model, or of
    /// another shape or element type.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFolder, CaptureError> {
        let folder = path.as_ref().to_path_buf();
        let (config, mut notes) = LlamaConfig::from_path(folder.join("config.json"))?;
        let mut stored_tensors = find_tensors(&folder, &mut notes)?;
        let is_base = !stored_tensors.keys().any(|name| name.starts_with(PREFIX));
        let specs = config.stored_tensors();
        let mut tensors = Vec::with_capacity(specs.len());
        let mut stored_names = BTreeMap::new();
        for spec in &specs {
            let bare = spec.name.strip_prefix(PREFIX).filter(|_| is_base);
            let is_table = spec.name == "model.embed_tokens.weight";
            let head = (config.tie_word_embeddings && is_table).then_some(HEAD);
            let name = [Some(spec.name.as_str()), bare, head]
                .into_iter()
                .flatten()
                .find(|name| stored_tensors.contains_key(*name));
            let Some((name, stored)) = name.and_then(|name| stored_tensors.remove_entry(name))
            else {
                return Err(missing_tensor(
                    &folder,
                    &spec.name,
                    &spec.shape,
                    &stored_tensors,
                    config.tie_word_embeddings,
                ));
            };
            tensors.push(stored.check_as(&name, &spec.shape, spec.element)?);
            if name != spec.name {
                stored_names.insert(spec.name.clone(), name);
            }
        }
        let mut further = 0;
        for (name, stored) in stored_tensors {
            if config.family == ModelFamily::DeepseekV3 && layer_of(&name) >= config.num_layers {
                further += 1;
            } else if config.tie_word_embeddings && name == HEAD {
                stored.check(&name, &[config.vocab_size, config.hidden_size])?;
                notes.remarks.push(
                    "`lm_head.weight` is stored but tied: the token table is used for it"
                        .to_string(),
                );
            } else if name.ends_with("rotary_emb.inv_freq") {
                notes.remarks.push(format!(
                    "`{name}` is a stored buffer, not a weight: it is computed from the config"
                ));
            } else {
                return Err(unexpected_tensor(name, stored.path));
            }
        }
        if further > 0 {
            notes.remarks.push(format!(
                "{further} tensors of layers that predict further tokens are ignored"
            ));
        }
        note_dtypes(config.torch_dtype, &tensors, &mut notes);
        Ok(ModelFolder { path: folder, config, notes, tensors, stored_names })
    }
}

/// Layer index in a tensor's name; 0 without one.
fn layer_of(name: &str) -> usize {
    let rest = name.strip_prefix("model.layers.").unwrap_or_default();
    rest.split('.').next().and_then(|layer| layer.parse().ok()).unwrap_or(0)
}

impl WeightTensor {
    pub(in crate::capture) fn check(
        self,
        name: &str,
        shape: &[usize],
    ) -> Result<StoredTensor, CaptureError> {
        self.check_as(name, shape, StoredElement::Float)
    }

    /// Checks shape and element type.
    fn check_as(
        self,
        name: &str,
        shape: &[usize],
        element: StoredElement,
    ) -> Result<StoredTensor, CaptureError> {
        let dtype = match self.dtype {
            Dtype::F32 => Some(StoredDType::F32),
            Dtype::BF16 => Some(StoredDType::Bf16),
            Dtype::F16 => Some(StoredDType::F16),
            Dtype::F8_E4M3 => Some(StoredDType::E4m3),
            Dtype::U8 => Some(StoredDType::U8),
            _ => None,
        };
        let dtype = dtype.filter(|&dtype| match element {
            StoredElement::Float => !matches!(dtype, StoredDType::E4m3 | StoredDType::U8),
            StoredElement::Exactly(expected) => dtype == expected,
        });
        if self.shape != shape {
            return Err(CaptureError::TensorMismatch {
                name: name.to_string(),
                path: self.path,
                expected: format!("shape {shape:?}"),
                got: format!("shape {:?}", self.shape),
                hint: "config.json and the weights are of different models".to_string(),
            });
        }
        let Some(dtype) = dtype else {
            let (expected, hint) = match element {
                StoredElement::Float => {
                    ("F32, BF16 or F16", "save the model unquantized, in one of these types")
                }
                StoredElement::Exactly(expected) => (
                    expected.safetensors_name(),
                    "`quantization_config` and the weights are of different models",
                ),
            };
            return Err(CaptureError::TensorMismatch {
                name: name.to_string(),
                path: self.path,
                expected: expected.to_string(),
                got: format!("{:?}", self.dtype),
                hint: hint.to_string(),
            });
        };
        Ok(StoredTensor {
            name: name.to_string(),
            shape: self.shape,
            dtype,
            file: self.path,
            offset_bytes: self.offset_bytes,
            size_bytes: self.size_bytes,
        })
    }
}

/// All tensors in a folder's weight files, by name.
pub(in crate::capture) fn find_tensors(
    folder: &Path,
    notes: &mut CaptureNotes,
) -> Result<BTreeMap<String, WeightTensor>, CaptureError> {
    let Some(mut files) = WeightFiles::find(folder)? else {
        return Err(CaptureError::NotFound {
            path: folder.to_path_buf(),
            expected: format!("`{SINGLE}`, or `{INDEX}` and its shards"),
            hint: "download the weights too; the config.json alone begins from fresh weights"
                .to_string(),
        });
    };
    let tensors = files.tensors()?;
    notes.remarks.append(&mut files.remarks);
    Ok(tensors)
}

pub(in crate::capture) fn note_dtypes(
    torch_dtype: Option<StoredDType>,
    tensors: &[StoredTensor],
    notes: &mut CaptureNotes,
) {
    let stored: BTreeSet<&str> = tensors
        .iter()
        // `quantization_config` determines the types of packed tensors and their factors.
        .filter(|t| !matches!(t.dtype, StoredDType::E4m3 | StoredDType::U8))
        .filter(|t| !t.name.ends_with("_scale_inv") && !t.name.ends_with("_correction_bias"))
        .map(|t| t.dtype.safetensors_name())
        .collect();
    let declared = torch_dtype.map(StoredDType::safetensors_name);
    if declared.is_some_and(|declared| stored.iter().any(|&dtype| dtype != declared)) {
        let stored: Vec<&str> = stored.into_iter().collect();
        notes.remarks.push(format!(
            "weights are stored as {}, config.json says {}: taken as stored",
            stored.join(" and "),
            declared.unwrap_or_default()
        ));
    }
}

/// Error for a missing tensor, with a hint if the files hold a similar tensor.
pub(in crate::capture) fn missing_tensor(
    folder: &Path,
    name: &str,
    shape: &[usize],
    rest: &BTreeMap<String, WeightTensor>,
    is_tied: bool,
) -> CaptureError {
    let longer = |other: &&String| other.strip_suffix(name).is_some_and(|it| it.ends_with('.'));
    let hint = if let Some(other) = rest.keys().find(longer) {
        format!("the files hold `{other}`: take what stands before its name off all names")
    } else if name == HEAD && !is_tied {
        "the files hold no output head: if it is the token table, set `tie_word_embeddings` to \
         true in config.json, else save the model with its head"
            .to_string()
    } else if rest.is_empty() {
        "the files hold no other tensor: they are incomplete".to_string()
    } else {
        "config.json and the weights are of different models, or a file is incomplete".to_string()
    };
    CaptureError::MissingTensor {
        name: name.to_string(),
        expected: format!("shape {shape:?}"),
        folder: folder.to_path_buf(),
        hint,
    }
}

pub(in crate::capture) fn unexpected_tensor(name: String, path: PathBuf) -> CaptureError {
    let hint = if name.ends_with(".bias") {
        "set `attention_bias` or `mlp_bias` in config.json if the model has biases"
    } else {
        "config.json and the weights are of different models"
    };
    CaptureError::UnexpectedTensor { name, path, hint: hint.to_string() }
}
