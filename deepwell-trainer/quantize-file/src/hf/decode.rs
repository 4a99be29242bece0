//! Finds the quantized modules of a model folder, in both conventions.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ::safetensors::Dtype;
use deepwell_ir::capture::StoredTensor;
use serde_json::{Map, Value};

use super::super::metadata::Original;
use super::super::planes::{QuantizedTensor, QuantizedTensors};
use super::super::safetensors::Header;
use super::super::shape::Stored;
use super::super::{QuantizeFileError, ScaleLayout};
use super::config::KEY;
use super::folder::CONFIG;
use super::names::{Convention, FolderFormat, WEIGHT};

const PACKED: &str = ".weight_packed";
/// Parameters of a quantized module beside its data.
const SCALES: [&str; 5] =
    ["weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale"];

/// The quantized modules of a file, which become tensors of `dtype`.
pub(crate) fn planes_of(
    header: &Header,
    path: &Path,
    dtype: &str,
) -> Result<QuantizedTensors, QuantizeFileError> {
    let by_name: BTreeMap<&str, &StoredTensor> =
        header.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let mut found = QuantizedTensors::default();
    for tensor in &header.tensors {
        let Some((module, convention, format)) = module_of(tensor, &by_name, path)? else {
            continue;
        };
        let stored = Stored { format: format.into(), layout: ScaleLayout::Plain };
        let names = convention.planes(module, format);
        let mut shape = tensor.shape.clone();
        if let (Some(cols), FolderFormat::Nvfp4) = (shape.last_mut(), format) {
            *cols = cols.checked_mul(2).ok_or_else(|| {
                let detail = format!("`{}` is larger than a file can be", tensor.name);
                QuantizeFileError::invalid(path, detail)
            })?;
        }
        let quantized = QuantizedTensor {
            name: format!("{module}{WEIGHT}"),
            original: Original { dtype: dtype.to_owned(), shape, transposed: false },
            stored,
            scales: names.scales,
            tensor_scale: names.tensor_scale.map(|name| (name, convention.tensor_scale())),
        };
        for suffix in SCALES {
            found.scales.insert(format!("{module}.{suffix}"));
        }
        found.tensors.insert(tensor.name.clone(), quantized);
    }
    Ok(found)
}

/// The module whose quantized data a tensor is.
fn module_of<'a>(
    tensor: &'a StoredTensor,
    by_name: &BTreeMap<&str, &StoredTensor>,
    path: &Path,
) -> Result<Option<(&'a str, Convention, FolderFormat)>, QuantizeFileError> {
    let dtype_of = |module: &str, suffix: &str| {
        by_name.get(format!("{module}.{suffix}").as_str()).map(|tensor| tensor.dtype)
    };
    let refuse = |expected: &str| {
        let detail = format!("`{}` is {}: expected {expected}", tensor.name, tensor.dtype);
        Err(QuantizeFileError::invalid(path, detail))
    };
    if let Some(module) = tensor.name.strip_suffix(PACKED) {
        let scales = (dtype_of(module, "weight_scale"), dtype_of(module, "weight_global_scale"));
        return match (tensor.dtype, scales) {
            (Dtype::U8, (Some(Dtype::F8_E4M3), Some(Dtype::F32))) => {
                Ok(Some((module, Convention::CompressedTensors, FolderFormat::Nvfp4)))
            }
            _ => refuse("U8 with `weight_scale` F8_E4M3 and `weight_global_scale` F32"),
        };
    }
    let Some(module) = tensor.name.strip_suffix(WEIGHT) else { return Ok(None) };
    let scales = (dtype_of(module, "weight_scale"), dtype_of(module, "weight_scale_2"));
    match (tensor.dtype, scales) {
        (Dtype::U8, (Some(Dtype::F8_E4M3), Some(Dtype::F32))) => {
            Ok(Some((module, Convention::Modelopt, FolderFormat::Nvfp4)))
        }
        // Both conventions have the same names here.
        (Dtype::F8_E4M3, (Some(Dtype::U8), None)) => {
            Ok(Some((module, Convention::Modelopt, FolderFormat::Mxfp8)))
        }
        (Dtype::U8 | Dtype::F8_E4M3, _) => refuse(
            "NVFP4 (`weight_scale` F8_E4M3 and `weight_scale_2` F32) or MXFP8 (`weight_scale` U8)",
        ),
        _ => Ok(None),
    }
}

/// The configuration and the element type of a quantized folder; none without `config.json`.
pub(crate) struct FolderConfig {
    config: Map<String, Value>,
    /// Type of the tensors that are not quantized.
    pub(crate) dtype: &'static str,
}

/// Reads the configuration of a quantized folder.
pub(crate) fn folder_config(folder: &Path) -> Result<Option<FolderConfig>, QuantizeFileError> {
    let path = folder.join(CONFIG);
    if !path.is_file() {
        return Ok(None);
    }
    let text = fs::read(&path).map_err(QuantizeFileError::io("read", &path))?;
    let config: Map<String, Value> = serde_json::from_slice(&text)
        .map_err(|error| QuantizeFileError::invalid(&path, error.to_string()))?;
    let dtype = config.get("dtype").or_else(|| config.get("torch_dtype")).and_then(Value::as_str);
    let dtype = match dtype {
        Some("float32") => "F32",
        Some("float16") => "F16",
        _ => "BF16",
    };
    Ok(Some(FolderConfig { config, dtype }))
}

impl FolderConfig {
    /// Writes the configuration without quantization.
    pub(crate) fn write(mut self, target: &Path) -> Result<(), QuantizeFileError> {
        self.config.remove(KEY);
        let text = format!("{:#}\n", Value::Object(self.config));
        fs::write(target, text).map_err(QuantizeFileError::io("write", target))
    }
}
