//! Writes the model of a checkpoint as a Hugging Face folder.

use std::path::{Path, PathBuf};

use deepwell_ckpt::hf::{FolderOptions, WrittenFolder, write_folder};
use deepwell_ckpt::{Checkpoint, CkptDtype};
use serde::Serialize;
use serde_json::Value;

use super::files::{self, ModelFiles, TokensOf};
use super::tensors::Tensors;
use crate::{ModelSource, Settings, TrainError, open_tokenizer};

/// Subfolder of a run's output folder for [`ModelFiles`].
pub const KEPT: &str = "model";

/// Options of an export.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// A checkpoint of a run.
    pub checkpoint: PathBuf,
    /// The output folder, which must be missing or empty.
    pub to: PathBuf,
    /// `F32`, the type of the master weights, or `Bf16`.
    pub dtype: CkptDtype,
    /// Most bytes of tensors in a weight file.
    pub shard_bytes_max: u64,
    /// Replaces the model in the run's folder: a preset, a `config.json`, a model folder or a
    /// `.pt2` archive.
    pub model: Option<String>,
    /// Replaces the tokenizer in the run's folder: a `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
    /// `config.json` for the folder of a `.pt2` archive, which has no configuration.
    pub config: Option<PathBuf>,
}

/// Result of an export.
#[derive(Clone, Debug, Serialize)]
pub struct Exported {
    /// The checkpoint.
    pub checkpoint: PathBuf,
    /// Training steps done.
    pub step: u64,
    /// Family of the model, or `pt2`.
    pub family: &'static str,
    /// Element type of the weights.
    pub dtype: CkptDtype,
    /// The folder.
    #[serde(flatten)]
    pub folder: WrittenFolder,
    /// Remarks for the user; sentences.
    pub remarks: Vec<String>,
}

/// Writes the model of a checkpoint as a Hugging Face folder, completely or not at all. `progress`
/// receives the bytes written and the total.
///
/// # Errors
/// The checkpoint is damaged or belongs to another model; the model or tokenizer has moved since
/// the run; or writing fails.
pub fn export_hf(
    options: &ExportOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Exported, TrainError> {
    let checkpoint = deepwell_ckpt::load(&options.checkpoint)?;
    let settings = settings_of(&checkpoint)?;
    let mut model = open_model(options, &settings)?;
    export_opened(options, &checkpoint, &settings, &mut model, progress)
}

/// [`export_hf`] of an opened checkpoint and its model.
pub(super) fn export_opened(
    options: &ExportOptions,
    checkpoint: &Checkpoint,
    settings: &Settings,
    model: &mut ModelSource,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Exported, TrainError> {
    let kept = kept_folder(&options.checkpoint);
    let family = model.family();
    let tensors = Tensors::of(checkpoint, model)?;
    let mut files = if kept.is_dir() && (&options.tokenizer, &options.model) == (&None, &None) {
        ModelFiles::read(&kept)?
    } else {
        let beside = Some(kept.join(files::TOKENIZER)).filter(|path| path.is_file());
        let tokenizer = options.tokenizer.as_ref().or(settings.tokenizer.as_ref());
        let tokenizer = tokenizer.or(beside.as_ref()).map(PathBuf::as_path);
        let opened = open_tokenizer(tokenizer)?;
        ModelFiles::of(tensors.model(), TokensOf::run(tokenizer, &opened, kept.is_dir()))?
    };
    if let Some(path) = &options.config {
        files.set_config(read_config(path)?);
    }
    files.set_dtype(options.dtype);
    let mut remarks = tensors.remarks.clone();
    for (name, remark) in [
        (files::CONFIG, "a .pt2 archive has none; `--config FILE` takes that of the module"),
        (files::TOKENIZER, "the run was on token files; `--tokenizer FILE` takes theirs"),
    ] {
        if !files.has(name) {
            remarks.push(format!("no {name}: {remark}"));
        }
    }
    let tokens = files.tokens(&kept);
    remarks.extend(tokens.and_then(|tokens| tensors.model().note_on_vocabulary(tokens)));
    let total = tensors.bytes(options.dtype);
    let folder = write_folder(
        &options.to,
        &files.into_contents(),
        &tensors.list(),
        FolderOptions { dtype: options.dtype, shard_bytes_max: options.shard_bytes_max },
        tensors.reader(checkpoint),
        |bytes| progress(bytes, total),
    )?;
    Ok(Exported {
        checkpoint: options.checkpoint.clone(),
        step: checkpoint.step(),
        family,
        dtype: options.dtype,
        folder,
        remarks,
    })
}

/// The settings of the run that wrote a checkpoint.
pub(super) fn settings_of(checkpoint: &Checkpoint) -> Result<Settings, TrainError> {
    serde_json::from_value(checkpoint.run()["settings"].clone()).map_err(|error| {
        TrainError::Setting {
            setting: "checkpoint",
            expected: "the settings of a run of `deepwell train`".to_string(),
            got: format!("`{}`: {error}", checkpoint.path().display()),
            hint: Some("checkpoints of other programs have none".to_string()),
        }
    })
}

/// Folder of the [`ModelFiles`] of a checkpoint's run, next to `checkpoints`.
pub(crate) fn kept_folder(checkpoint: &Path) -> PathBuf {
    let checkpoint = checkpoint.canonicalize().unwrap_or_else(|_| checkpoint.to_path_buf());
    let root = checkpoint.parent().unwrap_or(Path::new("."));
    match root.file_name() {
        Some(name) if name == "checkpoints" => root.with_file_name(KEPT),
        _ => root.join(KEPT),
    }
}

/// Opens the named model, the model in the run's folder, or the model at its original path.
pub(super) fn open_model(
    options: &ExportOptions,
    settings: &Settings,
) -> Result<ModelSource, TrainError> {
    let kept = kept_folder(&options.checkpoint).join(files::CONFIG);
    match &options.model {
        Some(name) => ModelSource::open(name),
        None if kept.is_file() => ModelSource::open(&kept.display().to_string()),
        None => ModelSource::open(&settings.model).map_err(|error| match error {
            TrainError::Setting { setting, expected, got, .. } => TrainError::Setting {
                setting,
                expected,
                got,
                hint: Some(
                    "the run was started with it; `--model` says where it is now".to_string(),
                ),
            },
            error => error,
        }),
    }
}

fn read_config(path: &Path) -> Result<Value, TrainError> {
    let text = std::fs::read_to_string(path).map_err(TrainError::io(path))?;
    serde_json::from_str::<Value>(&text).ok().filter(Value::is_object).ok_or_else(|| {
        TrainError::Setting {
            setting: "config",
            expected: "a JSON object".to_string(),
            got: format!("`{}`", path.display()),
            hint: Some("`model.config.save_pretrained(DIR)` in Python writes one".to_string()),
        }
    })
}
