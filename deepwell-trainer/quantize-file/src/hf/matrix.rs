//! A tensor of a folder as a matrix.

use deepwell_ir::capture::StoredTensor;

use super::super::QuantizeFileError;
use super::super::shape::Matrices;
use super::super::tensor::{SourceFile, SourceType, Weight};

/// A tensor as a matrix to quantize.
pub(super) fn weight_of<'a>(
    file: SourceFile<'a>,
    tensor: &'a StoredTensor,
) -> Result<Weight<'a>, QuantizeFileError> {
    let invalid = || {
        let detail = format!("`{}` is no matrix of floats that a file can hold", tensor.name);
        QuantizeFileError::invalid(file.path, detail)
    };
    let kind = SourceType::of(tensor).ok_or_else(invalid)?;
    let matrices = Matrices::new(&tensor.shape).ok_or_else(invalid)?;
    Ok(Weight { file, tensor, kind, matrices, is_inputs_first: false })
}
