//! Exports a checkpoint or a model folder with quantized weights, for inference engines.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use deepwell_ckpt::{Checkpoint, CkptDtype};
use deepwell_ir::{Graph, weight_assignments};
use deepwell_precision::{Guards, OperandClass, PrecisionPolicy};
use deepwell_quantize_file::{
    AssignedWeight, Convention, FolderFormat, QuantizeFolderOptions, QuantizedFolder,
    quantize_folder,
};
use serde::Serialize;

use super::checkpoint::{ExportOptions, export_opened, open_model, settings_of};
use crate::source::StoredParameter;
use crate::{ModelSource, Settings, TrainError};

/// How weights are quantized.
#[derive(Clone, Debug)]
pub struct Quantization {
    /// Format of the weights.
    pub format: FolderFormat,
    /// Names and configuration.
    pub convention: Convention,
    /// Replaces the run's policy, or selects the tensors of a folder.
    pub policy: Option<PrecisionPolicy>,
}

/// Result of a quantized export.
#[derive(Clone, Debug, Serialize)]
pub struct ExportedQuantized {
    /// Training steps done, for a checkpoint.
    pub step: Option<u64>,
    /// Naming of the tensors.
    pub convention: Convention,
    /// The tensors and files.
    #[serde(flatten)]
    pub folder: QuantizedFolder,
    /// Remarks for the user; sentences.
    pub remarks: Vec<String>,
}

/// Quantizes a Hugging Face folder into `to`. `keeps_as_bf16` rounds the F32 tensors that are not
/// quantized.
///
/// # Errors
/// The folder cannot be read or quantized, or `to` is not empty.
pub fn quantize_hf(
    input: &Path,
    to: &Path,
    quantization: &Quantization,
    keeps_as_bf16: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ExportedQuantized, TrainError> {
    make_way(to)?;
    let options = QuantizeFolderOptions {
        input: input.to_path_buf(),
        output: to.to_path_buf(),
        format: quantization.format,
        convention: quantization.convention,
        policy: quantization.policy.clone(),
        assigned: None,
        input_amax: BTreeMap::new(),
        keeps_as_bf16,
        keeps_f32: BTreeSet::new(),
    };
    let folder = quantize_folder(&options, progress)?;
    let source = "a folder has no amax of activations";
    Ok(exported(None, quantization, folder, Vec::new(), source))
}

/// Quantizes the model of a checkpoint into a Hugging Face folder. The master weights are written
/// as F32 to a temporary folder beside the output first.
///
/// # Errors
/// As [`export_hf`](super::export_hf); a weight cannot be quantized.
pub fn export_hf_quantized(
    options: &ExportOptions,
    quantization: &Quantization,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ExportedQuantized, TrainError> {
    make_way(&options.to)?;
    let parent = match options.to.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(parent).map_err(TrainError::io(parent))?;
    let partial = tempfile::Builder::new()
        .prefix(".deepwell-export-")
        .tempdir_in(parent)
        .map_err(TrainError::io(parent))?;
    let plain = partial.path().join("plain");
    let unquantized = ExportOptions { to: plain.clone(), dtype: CkptDtype::F32, ..options.clone() };
    let checkpoint = deepwell_ckpt::load(&options.checkpoint)?;
    let settings = settings_of(&checkpoint)?;
    let mut model = open_model(options, &settings)?;
    let written = export_opened(&unquantized, &checkpoint, &settings, &mut model, progress)?;
    let slices = model.stored_slices()?;
    let assigned = assigned(&checkpoint, &settings, &model, &slices, quantization)?;
    let folder = quantize_folder(
        &QuantizeFolderOptions {
            input: plain,
            output: options.to.clone(),
            format: quantization.format,
            convention: quantization.convention,
            policy: None,
            assigned,
            input_amax: input_amax(&checkpoint, &slices),
            keeps_as_bf16: options.dtype == CkptDtype::Bf16,
            keeps_f32: slices
                .iter()
                .filter(|it| it.keeps_f32)
                .map(|it| it.part.name.clone())
                .collect(),
        },
        progress,
    )?;
    let source = "the run did not quantize all their inputs in its last steps";
    Ok(exported(Some(checkpoint.step()), quantization, folder, written.remarks, source))
}

/// Adds the remarks of the quantization.
fn exported(
    step: Option<u64>,
    quantization: &Quantization,
    mut folder: QuantizedFolder,
    mut remarks: Vec<String>,
    source: &str,
) -> ExportedQuantized {
    remarks.append(&mut folder.report.notes);
    if folder.activations == "none" {
        remarks.push(format!(
            "activations are not quantized (W4A16): {source}, which input scales need"
        ));
    }
    ExportedQuantized { step, convention: quantization.convention, folder, remarks }
}

/// Accepts a missing or an empty output folder, which is removed.
fn make_way(to: &Path) -> Result<(), TrainError> {
    let is_empty = || std::fs::read_dir(to).is_ok_and(|mut entries| entries.next().is_none());
    match to.symlink_metadata().is_ok() {
        false => Ok(()),
        true if is_empty() => std::fs::remove_dir(to).map_err(TrainError::io(to)),
        true => Err(deepwell_ckpt::hf::HfError::Exists { path: to.to_path_buf() }.into()),
    }
}

/// The formats of the weights under the run's policy, by the names of their tensors. None where
/// the policy quantizes nothing: every linear weight of blocks and experts is then quantized.
fn assigned(
    checkpoint: &Checkpoint,
    settings: &Settings,
    model: &ModelSource,
    slices: &[StoredParameter],
    quantization: &Quantization,
) -> Result<Option<BTreeMap<String, AssignedWeight>>, TrainError> {
    let policy = match &quantization.policy {
        Some(policy) => policy.clone(),
        None => serde_json::from_value(checkpoint.policy().clone()).map_err(|error| {
            TrainError::Setting {
                setting: "checkpoint",
                expected: "the precision policy of a run of `deepwell train`".to_string(),
                got: format!("`{}`: {error}", checkpoint.path().display()),
                hint: Some("checkpoints of other programs have none".to_string()),
            }
        })?,
    };
    let graph: Graph = model.capture(Some(settings.seq_len))?;
    let of_parameter: HashMap<String, AssignedWeight> = weight_assignments(&graph, &policy)?
        .into_iter()
        .map(|(id, assignment)| {
            let format = assignment.operand(OperandClass::FpropWeight);
            let assigned = AssignedWeight { format, reason: assignment.reason };
            (graph.tensor(id).name.clone(), assigned)
        })
        .collect();
    if of_parameter.values().all(|assigned| assigned.format.is_none()) {
        return Ok(None);
    }
    let of_slice = |slice: &StoredParameter| {
        Some((slice.part.name.clone(), of_parameter.get(&slice.name)?.clone()))
    };
    Ok(Some(slices.iter().filter_map(of_slice).collect()))
}

/// The largest amax of each weight's input in the run's last steps, by tensor name.
fn input_amax(checkpoint: &Checkpoint, slices: &[StoredParameter]) -> BTreeMap<String, f32> {
    // Guards of earlier versions have no such history.
    let Ok(guards) = serde_json::from_value::<Guards>(checkpoint.guards().clone()) else {
        return BTreeMap::new();
    };
    let amax: HashMap<&str, f32> = guards.activation_amax().collect();
    let of_slice =
        |slice: &StoredParameter| Some((slice.part.name.clone(), *amax.get(slice.name.as_str())?));
    slices.iter().filter_map(of_slice).collect()
}
