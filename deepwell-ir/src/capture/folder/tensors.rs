//! A model folder: `config.json` beside safetensors files, whose headers are compared with what
//! the configuration asks for. No weight is read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde_json::Value;

use crate::capture::{
    CaptureError, CaptureNotes, LlamaConfig, ModelFamily, StoredDType, StoredElement,
};
use crate::{SafetensorsError, SafetensorsHeader};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A tensor as it lies in a weight file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name in the file; that of a [`ParameterSpec`](crate::capture::ParameterSpec) or
    /// [`StoredPart`](crate::capture::StoredPart), save for a `transformer.` before the latter.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: StoredDType,
    /// The file that holds it.
    pub file: PathBuf,
    /// Where its bytes begin, from the start of the file.
    pub offset_bytes: u64,
    /// How many bytes it takes.
    pub size_bytes: u64,
}

/// A Hugging Face model folder whose files fit its configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFolder<C = LlamaConfig> {
    /// The folder.
    pub path: PathBuf,
    /// Its `config.json`.
    pub config: C,
    /// Remarks on the configuration and on tensors that are ignored.
    pub notes: CaptureNotes,
    /// One entry per tensor of the weight files that the model takes, in the order of
    /// [`LlamaConfig::stored_tensors`]: one per parameter, unless experts are stored one by one or
    /// weights are packed.
    pub tensors: Vec<StoredTensor>,
}

/// A header entry and the file it is from.
pub(in crate::capture) struct Found {
    pub(in crate::capture) path: PathBuf,
    dtype: Dtype,
    shape: Vec<usize>,
    offset_bytes: u64,
    size_bytes: u64,
}

impl ModelFolder {
    /// Opens a folder with `config.json` and `model.safetensors`, or shards listed in
    /// `model.safetensors.index.json`. F32, BF16 and F16 weights are taken.
    ///
    /// # Errors
    /// Those of [`LlamaConfig::from_path`]; a file that is missing, truncated or has a broken
    /// header; a tensor that is missing, not part of the model, or of another shape or element
    /// type.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFolder, CaptureError> {
        let folder = path.as_ref().to_path_buf();
        let (config, mut notes) = LlamaConfig::from_path(folder.join("config.json"))?;
        let mut found = find_tensors(&folder, &mut notes)?;
        let specs = config.stored_tensors();
        let mut tensors = Vec::with_capacity(specs.len());
        for spec in &specs {
            let Some(stored) = found.remove(&spec.name) else {
                return Err(missing_tensor(
                    &folder,
                    &spec.name,
                    &spec.shape,
                    &found,
                    config.family.architecture(),
                ));
            };
            tensors.push(stored.check_as(&spec.name, &spec.shape, spec.element)?);
        }
        let mut further = 0;
        for (name, stored) in found {
            if config.family == ModelFamily::DeepseekV3 && layer_of(&name) >= config.num_layers {
                further += 1;
            } else if config.tie_word_embeddings && name == "lm_head.weight" {
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
        Ok(ModelFolder { path: folder, config, notes, tensors })
    }
}

/// The layer in a tensor's name; 0 if there is none.
fn layer_of(name: &str) -> usize {
    let rest = name.strip_prefix("model.layers.").unwrap_or_default();
    rest.split('.').next().and_then(|layer| layer.parse().ok()).unwrap_or(0)
}

impl Found {
    pub(in crate::capture) fn check(
        self,
        name: &str,
        shape: &[usize],
    ) -> Result<StoredTensor, CaptureError> {
        self.check_as(name, shape, StoredElement::Float)
    }

    /// Wants this shape and element type.
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

/// All header entries of a folder by name.
pub(in crate::capture) fn find_tensors(
    folder: &Path,
    notes: &mut CaptureNotes,
) -> Result<BTreeMap<String, Found>, CaptureError> {
    let single = folder.join(SINGLE);
    let index = folder.join(INDEX);
    if single.is_file() {
        if index.is_file() {
            notes.remarks.push(format!("`{INDEX}` is ignored: `{SINGLE}` holds the whole model"));
        }
        return read_header(&single);
    }
    if index.is_file() {
        return read_shards(folder, &index);
    }
    let hint = if folder.join("pytorch_model.bin").is_file()
        || folder.join("pytorch_model.bin.index.json").is_file()
    {
        "`pytorch_model.bin` is not read: load the model in transformers and save it again with \
         `save_pretrained`"
    } else {
        "download the weights too, or train from nothing with the config.json alone"
    };
    Err(CaptureError::NotFound {
        path: folder.to_path_buf(),
        expected: format!("`{SINGLE}` or `{INDEX}`"),
        hint: hint.to_string(),
    })
}

fn read_shards(folder: &Path, index: &Path) -> Result<BTreeMap<String, Found>, CaptureError> {
    let broken = |problem: String| CaptureError::WeightFile {
        path: index.to_path_buf(),
        problem,
        hint: "download the file again".to_string(),
    };
    let bytes = std::fs::read(index).map_err(|source| io_error(index, source))?;
    let json: Value =
        serde_json::from_slice(&bytes).map_err(|error| broken(format!("not JSON: {error}")))?;
    let map = json
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| broken("expected an object `weight_map` of tensor to file".to_string()))?;

    let mut expected: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, file) in map {
        // Only plain names, so that an index cannot point out of its folder.
        let file = file
            .as_str()
            .filter(|file| Path::new(file).file_name().is_some_and(|plain| plain == *file))
            .ok_or_else(|| broken(format!("tensor `{name}`: expected a file name, got {file}")))?;
        expected.entry(file).or_default().insert(name);
    }
    let mut all = BTreeMap::new();
    for (file, names) in expected {
        let path = folder.join(file);
        if !path.is_file() {
            return Err(CaptureError::NotFound {
                path,
                expected: format!("a shard listed in `{INDEX}`"),
                hint: "download the missing shard".to_string(),
            });
        }
        let found = read_header(&path)?;
        if let Some(name) = names.iter().find(|name| !found.contains_key(**name)) {
            return Err(CaptureError::WeightFile {
                path,
                problem: format!("tensor `{name}` is not in it, though `{INDEX}` says so"),
                hint: "index and shards are from different versions of the model".to_string(),
            });
        }
        for (name, stored) in found {
            if !names.contains(name.as_str()) {
                return Err(unexpected_tensor(name, stored.path));
            }
            all.insert(name, stored);
        }
    }
    Ok(all)
}

/// The entries of one safetensors file, whose length must fit them.
fn read_header(path: &Path) -> Result<BTreeMap<String, Found>, CaptureError> {
    let file = File::open(path).map_err(|source| io_error(path, source))?;
    let SafetensorsHeader { metadata, data_begin } =
        SafetensorsHeader::read(&file).map_err(|error| match error {
            SafetensorsError::Io(source) => io_error(path, source),
            error => CaptureError::WeightFile {
                path: path.to_path_buf(),
                problem: error.to_string(),
                hint: "download or save the file again".to_string(),
            },
        })?;
    let entry = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let (start, end) = info.data_offsets;
        let stored = Found {
            path: path.to_path_buf(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            offset_bytes: data_begin + start as u64,
            size_bytes: (end - start) as u64,
        };
        (name, stored)
    };
    Ok(metadata.tensors().into_iter().map(entry).collect())
}

pub(in crate::capture) fn note_dtypes(
    torch_dtype: Option<StoredDType>,
    tensors: &[StoredTensor],
    notes: &mut CaptureNotes,
) {
    let stored: BTreeSet<&str> = tensors
        .iter()
        // Packed tensors, and factors beside them, are as `quantization_config` says.
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

fn io_error(path: &Path, source: std::io::Error) -> CaptureError {
    CaptureError::Io { path: path.to_path_buf(), source }
}

pub(in crate::capture) fn missing_tensor(
    folder: &Path,
    name: &str,
    shape: &[usize],
    rest: &BTreeMap<String, Found>,
    architecture: &str,
) -> CaptureError {
    let bare = name.strip_prefix("model.").filter(|bare| rest.contains_key(*bare));
    let hint = match bare {
        Some(bare) => format!(
            "the files hold `{bare}`: the model was saved without its head; save it as \
             {architecture}"
        ),
        None => "config.json and the weights are of different models, or a file is incomplete"
            .to_string(),
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
