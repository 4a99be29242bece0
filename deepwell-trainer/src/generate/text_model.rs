//! A trained model with a tokenizer, from a checkpoint or from a Hugging Face folder.

use std::path::{Path, PathBuf};

use bytemuck::cast_slice_mut;
use deepwell_ckpt::{Checkpoint, Section};
use deepwell_ir::PrecisionPolicy;
use deepwell_probe::probe;

use super::Forward;
use crate::data::Tokenizer;
use crate::export::kept_folder;
use crate::init::{self, initial_values};
use crate::weights::MasterWeights;
use crate::{BYTES, Device, ModelSource, Settings, SpecialTokens, TrainError, open_tokenizer};

/// Overrides of the values in the checkpoint or the model folder.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Replaces the model configuration named by the run.
    pub model: Option<String>,
    /// Replaces the tokenizer of the run or the folder: a `tokenizer.json` or `bytes`.
    pub tokenizer: Option<PathBuf>,
    /// Name of a precision preset; default is the precision of the run, for a folder BF16.
    pub precision: Option<String>,
    /// Maximum number of tokens in a window.
    pub window: Option<usize>,
    /// Device of the model.
    pub device: Device,
    /// Expected number of tokens, including the prompt, if known: limits the window of a folder's
    /// model.
    pub tokens_wanted: usize,
    /// Whether the model computes losses, for [`TextModel::evaluate`].
    pub scores: bool,
    /// The evaluation data: token files need no tokenizer.
    pub data: Vec<PathBuf>,
}

/// A model with a tokenizer.
pub struct TextModel {
    /// The checkpoint or the folder.
    pub path: PathBuf,
    /// Training steps done, of a checkpoint.
    pub step: Option<u64>,
    /// Name of the precision.
    pub precision: String,
    /// Tokens and text.
    pub tokenizer: Tokenizer,
    /// Start and end tokens of a text named in the model's files, in addition to the tokenizer's
    /// end.
    pub special: SpecialTokens,
    /// Longest supported sequence of the model, if known.
    pub window_max: Option<usize>,
    /// Tokens and logits.
    pub forward: Forward,
}

/// Windows of folders are multiples of this number of tokens.
const WINDOW_STEP: usize = 128;

impl TextModel {
    /// Opens a checkpoint of `deepwell train`: the run's model, tokenizer, precision and sequence
    /// length, and the master weights. Layers that had fallen back to BF16 are in BF16.
    ///
    /// # Errors
    /// The checkpoint is damaged or without settings, or the model or tokenizer has moved since the
    /// run.
    pub fn from_checkpoint(path: &Path, options: &OpenOptions) -> Result<TextModel, TrainError> {
        let checkpoint = deepwell_ckpt::load(path)?;
        let unreadable = |what: &str, error: serde_json::Error| TrainError::Setting {
            setting: "checkpoint",
            expected: format!("the {what} of a run of `deepwell train`"),
            got: format!("`{}`: {error}", path.display()),
            hint: Some("checkpoints of other programs have none".to_string()),
        };
        let settings: Settings = serde_json::from_value(checkpoint.run()["settings"].clone())
            .map_err(|error| unreadable("settings", error))?;
        let (precision, policy) = match &options.precision {
            Some(name) => (name.clone(), PrecisionPolicy::preset(name)?),
            None => {
                let policy = serde_json::from_value(checkpoint.policy().clone())
                    .map_err(|error| unreadable("precision policy", error))?;
                let file = settings.policy.as_ref().map(|file| file.display().to_string());
                (file.unwrap_or(settings.precision), policy)
            }
        };
        let name = options.model.as_deref().unwrap_or(&settings.model);
        let model = ModelSource::open(name).map_err(|error| match (error, &options.model) {
            (TrainError::Setting { setting, expected, got, .. }, None) => TrainError::Setting {
                setting,
                expected,
                got,
                hint: Some(
                    "the run was started with it; `--model` says where it is now".to_string(),
                ),
            },
            (error, _) => error,
        })?;
        let tokenizer = match (&options.tokenizer, &settings.tokenizer) {
            (Some(path), _) => open_tokenizer(Some(path))?,
            (None, Some(path)) if path.as_os_str() != BYTES && !path.exists() => {
                return Err(TrainError::Setting {
                    setting: "tokenizer",
                    expected: format!("`{}`, which the run used", path.display()),
                    got: "no such file".to_string(),
                    hint: Some("`--tokenizer` says where it is now".to_string()),
                });
            }
            (None, named) => open_tokenizer(named.as_deref())?,
        };
        // The model files in the run's folder match the run's tokenizer.
        let kept = kept_folder(path);
        let special = match &options.tokenizer {
            None if kept.is_dir() => SpecialTokens::of_folder(&kept)?,
            named => {
                let named = named.as_deref().or(settings.tokenizer.as_deref());
                SpecialTokens::of_model(&model, named)?
            }
        };
        let window = options.window.unwrap_or(settings.seq_len);
        let mut forward = open_forward(&model, &policy, window, options)?;
        load_masters(&checkpoint, &mut forward)?;
        Ok(TextModel {
            path: path.to_path_buf(),
            step: Some(checkpoint.step()),
            precision,
            tokenizer,
            special,
            window_max: model.seq_max(),
            forward,
        })
    }

    /// Opens a Hugging Face model folder: `config.json`, safetensors weights, `tokenizer.json`, and
    /// `generation_config.json` if present. A model of 256 tokens needs no tokenizer: its tokens
    /// are bytes.
    ///
    /// # Errors
    /// The weights do not match the configuration, or the tokenizer is missing.
    pub fn from_folder(path: &Path, options: &OpenOptions) -> Result<TextModel, TrainError> {
        let name = path.display().to_string();
        let mut model = ModelSource::open(&name)?;
        // The initial weights of a preset or a configuration can be scored.
        if !model.has_weights() && (!options.scores || path.is_dir()) {
            return Err(TrainError::Setting {
                setting: "model",
                expected: format!("weights in `{name}`"),
                got: "a configuration alone".to_string(),
                hint: Some("`deepwell train --model` trains it from fresh weights".to_string()),
            });
        }
        let named = options.tokenizer.as_deref();
        let tokenizer = model.choose_tokenizer(named, &options.data)?.tokenizer;
        let special = SpecialTokens::of_model(&model, options.tokenizer.as_deref())?;
        let precision = options.precision.clone().unwrap_or_else(|| "bf16".to_string());
        let policy = PrecisionPolicy::preset(&precision)?;
        let wanted = options.tokens_wanted.next_multiple_of(WINDOW_STEP).max(WINDOW_STEP);
        let window =
            options.window.unwrap_or_else(|| wanted.min(model.seq_max().unwrap_or(wanted)));
        let mut forward = open_forward(&model, &policy, window, options)?;
        if !model.load_weights(&mut forward)? {
            begin_anew(&model, &mut forward, window)?;
        }
        let window_max = model.seq_max();
        let path = path.to_path_buf();
        Ok(TextModel { path, step: None, precision, tokenizer, special, window_max, forward })
    }
}

/// Copies the master weights of a checkpoint to a model.
pub(crate) fn load_masters(
    checkpoint: &Checkpoint,
    forward: &mut Forward,
) -> Result<(), TrainError> {
    let mut buffer: Vec<f32> = Vec::new();
    for state in MasterWeights::program(forward).parameters.clone() {
        let shape = MasterWeights::program(forward).value(state.master.value()).shape.clone();
        buffer.clear();
        buffer.resize(shape.iter().product(), 0.0);
        checkpoint.read_f32_into(Section::Master, &state.name, &shape, &mut buffer)?;
        forward.write_master(state.master.value(), cast_slice_mut(&mut buffer))?;
    }
    forward.refresh_copies()
}

/// Initializes a model like a run with seed 0.
fn begin_anew(model: &ModelSource, forward: &mut Forward, window: usize) -> Result<(), TrainError> {
    let graph = model.capture(Some(window))?;
    let inits = initial_values(&graph);
    let mut buffer: Vec<f32> = Vec::new();
    for state in MasterWeights::program(forward).parameters.clone() {
        let shape = MasterWeights::program(forward).value(state.master.value()).shape.clone();
        buffer.clear();
        buffer.resize(shape.iter().product(), 0.0);
        if let Some(&init) = inits.get(&state.name) {
            init::fill(init, 0, &state.name, &mut buffer);
        }
        forward.write_master(state.master.value(), cast_slice_mut(&mut buffer))?;
    }
    forward.refresh_copies()
}

fn open_forward(
    model: &ModelSource,
    policy: &PrecisionPolicy,
    window: usize,
    options: &OpenOptions,
) -> Result<Forward, TrainError> {
    if window == 0 {
        return Err(TrainError::Setting {
            setting: "window",
            expected: "at least 1 token".to_string(),
            got: "0".to_string(),
            hint: None,
        });
    }
    let graph = model.capture(Some(window))?;
    Forward::open_as(&graph, policy, window, options.device, &probe(), options.scores)
}
