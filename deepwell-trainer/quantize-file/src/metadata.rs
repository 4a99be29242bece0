//! Metadata in the header of a quantized file.

use std::collections::BTreeMap;
use std::path::Path;

use deepwell_precision::ScaleRule;
use serde::{Deserialize, Serialize};

use super::safetensors::Header;
use super::{FileFormat, QuantizeFileError, ScaleLayout};

/// Metadata key whose value is a [`Quantized`] as JSON.
pub(super) const KEY: &str = "deepwell_quantized";
const VERSION: u32 = 1;

/// Quantization of the tensors of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Quantized {
    version: u32,
    pub(super) format: FileFormat,
    pub(super) scale_rule: ScaleRule,
    pub(super) layout: ScaleLayout,
    /// The quantized tensors' original types and shapes.
    pub(super) tensors: BTreeMap<String, Original>,
}

/// A tensor before quantization.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Original {
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// Whether the tensor was `[.., inputs, outputs]`: data and scales are those of the transpose.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) transposed: bool,
}

impl Quantized {
    pub(super) fn new(format: FileFormat, scale_rule: ScaleRule, layout: ScaleLayout) -> Self {
        Self { version: VERSION, format, scale_rule, layout, tensors: BTreeMap::new() }
    }

    /// Returns the quantization metadata of a header, if any.
    pub(super) fn of(header: &Header, path: &Path) -> Result<Option<Self>, QuantizeFileError> {
        let Some(text) = header.metadata.get(KEY) else { return Ok(None) };
        let invalid = |detail: String| QuantizeFileError::invalid(path, detail);
        let this: Self =
            serde_json::from_str(text).map_err(|error| invalid(format!("`{KEY}`: {error}")))?;
        if this.version != VERSION {
            let got = this.version;
            return Err(invalid(format!("`{KEY}`: expected version {VERSION}, got {got}")));
        }
        Ok(Some(this))
    }
}
