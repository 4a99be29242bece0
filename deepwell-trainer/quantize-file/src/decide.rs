//! Decides which tensors of a model are quantized, by a policy.

use std::fs::File;
use std::path::Path;

use deepwell_ir::capture::StoredTensor;
use deepwell_precision::{OperandClass, PrecisionPolicy, TensorUse};

use super::QuantizeFileError;
use super::safetensors::Header;
use super::tensor::SourceType;
use super::uses::uses;

/// An open file of the model.
pub(super) struct ModelFile<'a> {
    pub(super) path: &'a Path,
    /// Name in the model's folder.
    pub(super) name: &'a str,
    pub(super) file: File,
    pub(super) header: Header,
}

/// Decision about one tensor, with the reason.
pub(super) struct Decision {
    pub(super) is_quantized: bool,
    pub(super) is_inputs_first: bool,
    pub(super) reason: String,
}

/// A decision for each tensor of the headers, in order, and remarks. `folder` is the model's
/// folder.
pub(super) fn decide<'a>(
    policy: Option<&PrecisionPolicy>,
    folder: &Path,
    headers: impl Iterator<Item = &'a Header>,
) -> Result<(Vec<Decision>, Vec<String>), QuantizeFileError> {
    let tensors: Vec<&StoredTensor> = headers.flat_map(|header| &header.tensors).collect();
    let is_float = |tensor: &StoredTensor| SourceType::of(tensor).is_some();
    let (usage, notes) = uses(&tensors, folder);
    let uses: Vec<TensorUse<'_>> = tensors
        .iter()
        .zip(&usage)
        .filter(|(tensor, _)| is_float(tensor))
        .map(|(tensor, usage)| TensorUse { name: &tensor.name, role: usage.role, layer: None })
        .collect();
    let policy = match policy {
        Some(policy) => policy.clone(),
        // A file has no order of execution, so first and last are undefined.
        None => PrecisionPolicy::from_toml("keep_first_last_bf16 = false", "default policy")?,
    };
    let mut assigned = policy.assign(&uses)?.into_iter();
    let mut decisions = Vec::new();
    for (tensor, usage) in tensors.into_iter().zip(usage) {
        let assignment = if is_float(tensor) { assigned.next() } else { None };
        let is_inputs_first = usage.is_inputs_first;
        let (is_quantized, reason) = match (assignment, usage.kept) {
            (None, _) => (false, format!("type {} is not quantized", tensor.dtype)),
            (Some(_), Some(reason)) => (false, reason.to_owned()),
            // A file contains the weights of the forward pass.
            (Some(assignment), None) => (
                assignment.operand(OperandClass::FpropWeight).is_some() && tensor.size_bytes > 0,
                assignment.reason,
            ),
        };
        decisions.push(Decision { is_quantized, is_inputs_first, reason });
    }
    match decisions.iter().any(|decision| decision.is_quantized) {
        true => Ok((decisions, notes)),
        false => Err(QuantizeFileError::NothingToQuantize),
    }
}
