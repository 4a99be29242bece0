//! A model folder, opened once: its `config.json`, and its weight files, whose headers are compared
//! with the configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{Matching, StoredTensor, WeightFiles, Weights};
use crate::capture::json::{parse_object, read_text};
use crate::capture::{CaptureError, CaptureNotes, ModelConfig, StoredDType};

/// A Hugging Face model folder, or its `config.json` alone.
///
/// All readers take this value: a load reads `config.json` and each header once.
///
/// ```
/// use deepwell_ir::capture::{ModelConfig, ModelFolder};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let config = ModelConfig::preset("gpt2-micro").unwrap();
/// std::fs::write(folder.join("config.json"), config.to_json().to_string())?;
/// let model = ModelFolder::open(folder)?;
/// assert_eq!((model.config, model.weights.is_some()), (config, false));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ModelFolder {
    /// The `config.json`.
    pub config_file: PathBuf,
    /// The contents of `config.json`.
    pub json: Map<String, Value>,
    /// The configuration.
    pub config: ModelConfig,
    /// Remarks on the configuration and on ignored tensors.
    pub notes: CaptureNotes,
    /// The weights; None for a folder without weights in any form, and for a `config.json` that is
    /// named directly.
    pub weights: Option<ModelWeights>,
}

/// The weights of a folder, which match its configuration.
#[derive(Debug)]
pub struct ModelWeights {
    /// The weight files.
    pub files: Weights,
    /// Tensors of the weight files that the model uses, in the order of
    /// [`LlamaConfig::stored_tensors`](crate::capture::LlamaConfig::stored_tensors), or of
    /// [`Gpt2Config::parameters_and_parts`](crate::capture::Gpt2Config::parameters_and_parts): one
    /// per parameter, unless experts are stored separately, parameters share a tensor, or weights
    /// are packed.
    pub tensors: Vec<StoredTensor>,
    /// Names in the files that differ from the names of
    /// [`StoredSlice`](crate::capture::StoredSlice)s, by part name.
    pub stored_names: BTreeMap<String, String>,
}

impl ModelWeights {
    /// Name in the files for the name of a part.
    pub fn stored_name<'a>(&'a self, part: &'a str) -> &'a str {
        self.stored_names.get(part).map_or(part, String::as_str)
    }
}

impl ModelFolder {
    /// Opens a folder with `config.json` and the weights found by [`WeightFiles`], or a
    /// `config.json` alone, whatever other files its folder has. Accepts F32, BF16 and F16 weights,
    /// and the packed weights of some mixtures. No tensor is read.
    ///
    /// # Errors
    /// A missing or unreadable file; errors of [`ModelConfig::from_json`], [`WeightFiles::find`]
    /// and [`WeightFiles::open`]; a tensor that is missing, not part of the model, or of another
    /// shape or element type.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFolder, CaptureError> {
        let path = path.as_ref();
        // A folder with weights in another form is refused before its configuration is read.
        let files = if path.is_dir() { WeightFiles::find(path)? } else { None };
        let config_file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let (text, location) = read_text(&config_file)?;
        let json = parse_object(&text, &location)?;
        let (config, mut notes) = ModelConfig::from_object(&json, &location)?;
        let weights = files.map(|files| matched(files, &config, &mut notes)).transpose()?;
        Ok(ModelFolder { config_file, json, config, notes, weights })
    }
}

/// Opens weight files and compares them with the configuration.
fn matched(
    files: WeightFiles,
    config: &ModelConfig,
    notes: &mut CaptureNotes,
) -> Result<ModelWeights, CaptureError> {
    let mut files = files.open()?;
    notes.remarks.append(&mut files.remarks);
    let (is_tied, torch_dtype) = match config {
        ModelConfig::Llama(config) => (config.tie_word_embeddings, config.torch_dtype),
        ModelConfig::Gpt2(config) => (config.tie_word_embeddings, config.torch_dtype),
    };
    let mut matching = Matching::new(&files, is_tied);
    match config {
        ModelConfig::Llama(config) => config.take_tensors(&mut matching)?,
        ModelConfig::Gpt2(config) => config.take_tensors(&mut matching)?,
    }
    let Matching { tensors, stored_names, mut remarks, .. } = matching;
    let tensors: Vec<StoredTensor> = tensors.into_iter().cloned().collect();
    notes.remarks.append(&mut remarks);
    note_dtypes(torch_dtype, &tensors, notes);
    Ok(ModelWeights { files, tensors, stored_names })
}

fn note_dtypes(
    torch_dtype: Option<StoredDType>,
    tensors: &[StoredTensor],
    notes: &mut CaptureNotes,
) {
    let stored: BTreeSet<&str> = tensors
        .iter()
        .filter(|t| !t.name.ends_with("_scale_inv") && !t.name.ends_with("_correction_bias"))
        .filter_map(|t| StoredDType::of(t.dtype))
        // `quantization_config` determines the types of packed tensors and their factors.
        .filter(|dtype| !matches!(dtype, StoredDType::E4m3 | StoredDType::U8))
        .map(StoredDType::safetensors_name)
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
