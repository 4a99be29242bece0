//! Options of a quantized folder.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use deepwell_precision::{PrecisionPolicy, QuantFormat};

use super::names::{Convention, FolderFormat};

/// The format of a weight under the policy of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct AssignedWeight {
    /// Format of the weight in the forward pass; none for BF16.
    pub format: Option<QuantFormat>,
    /// Reason, for the report.
    pub reason: String,
}

/// Options of [`quantize_folder`](super::quantize_folder).
#[derive(Clone, Debug)]
pub struct QuantizeFolderOptions {
    /// A folder with `config.json` and safetensors weights.
    pub input: PathBuf,
    /// The output folder, which must not exist.
    pub output: PathBuf,
    /// Format of the quantized modules.
    pub format: FolderFormat,
    /// Names and configuration.
    pub convention: Convention,
    /// Policy that selects the tensors, by default every linear weight of blocks and experts.
    pub policy: Option<PrecisionPolicy>,
    /// Formats by tensor name, in place of a policy. Tensors without an entry are kept. Weights
    /// in MXFP8 keep it if `format` is NVFP4 and some weight has NVFP4.
    pub assigned: Option<BTreeMap<String, AssignedWeight>>,
    /// Largest magnitude of the input of each weight, by tensor name, for the input scales of
    /// NVFP4. If a quantized weight has none, activations are not quantized.
    pub input_amax: BTreeMap<String, f32>,
    /// Whether kept tensors of F32 become BF16.
    pub keeps_as_bf16: bool,
    /// Names of tensors that stay F32 in any case.
    pub keeps_f32: BTreeSet<String>,
}
