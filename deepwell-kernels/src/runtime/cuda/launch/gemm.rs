//! Shared by launchers of GEMMs: sizes, tiles, limits.

use deepwell_ir::ops::Epilogue;
use deepwell_ir::{KernelRequest, Op};

use crate::runtime::cuda::blas::Matrix;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::DevicePtr;
use crate::runtime::cuda::prepare::CallView;

/// Rows and columns of the result tile that a CTA of our kernels computes.
pub(crate) const TILE: usize = 128;
/// Largest extent for the 32-bit indices of our kernels, including a tile past the end.
const LARGEST_EXTENT: usize = i32::MAX as usize - TILE;

/// Workspace of a library call: the library's recommendation for Hopper and newer.
pub(crate) const LIBRARY_SCRATCH_BYTES: usize = 32 << 20;
/// Alignment of the workspace; scales need less.
pub(crate) const LIBRARY_ALIGNMENT_BYTES: usize = 256;

/// Rounds up to the library's alignment. Workspaces of calls are not so aligned: request
/// [`LIBRARY_ALIGNMENT_BYTES`] more.
pub(crate) fn align_for_library(pointer: DevicePtr) -> DevicePtr {
    DevicePtr(pointer.0.next_multiple_of(LIBRARY_ALIGNMENT_BYTES as u64))
}

/// Describes a tensor of rank 2 as a matrix for the library.
pub(crate) fn matrix(tensor: &DeviceTensor) -> Matrix {
    let (rows, columns) = (tensor.shape[0], tensor.shape[1]);
    Matrix { pointer: tensor.pointer, dtype: tensor.dtype, rows, columns, leading: columns }
}

/// The matrix that the library adds to the result `out` of a call: the residual of the epilogue, or
/// `out` itself to accumulate.
pub(crate) fn added_to(call: &CallView<'_>, out: &Matrix) -> Option<DevicePtr> {
    match call.call.op.epilogue() {
        [Epilogue::Residual { .. }] => Some(call.input(call.call.input_count - 1).pointer),
        _ => call.accumulate().then_some(out.pointer),
    }
}

/// Sizes of a linear layer: x `[tokens, inputs]`, w `[outputs, inputs]`, y `[tokens, outputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinearSizes {
    pub(crate) tokens: usize,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
}

impl LinearSizes {
    /// Sizes from the shapes of the first two operands of any of the layer's three GEMMs.
    pub(crate) fn new(op: &Op, first: &[usize], second: &[usize]) -> LinearSizes {
        let (tokens, inputs) = (first[0], second[1]);
        let outputs = match op {
            Op::Linear(_) => second[0],
            _ => first[1],
        };
        LinearSizes { tokens, outputs, inputs }
    }
}

/// Number of CTAs for a result of `rows` x `columns`: one per tile, at least 1.
pub(crate) fn tile_ctas(rows: usize, columns: usize) -> u32 {
    (rows.div_ceil(TILE) * columns.div_ceil(TILE)).max(1) as u32
}

/// Rejects extents that our kernels cannot index.
pub(crate) fn extents_fit(request: &KernelRequest<'_>, operands: &[usize]) -> Option<String> {
    let mut extents = operands.iter().flat_map(|&index| &request.operands[index].shape);
    let largest = extents.find(|&&extent| extent > LARGEST_EXTENT)?;
    Some(format!("takes extents up to {LARGEST_EXTENT}, not {largest}"))
}

/// Rejects GEMMs with an empty matrix or K = 0, which the library does not support.
pub(crate) fn not_empty(request: &KernelRequest<'_>, operands: &[usize]) -> Option<String> {
    let mut extents = operands.iter().flat_map(|&index| &request.operands[index].shape);
    extents.any(|&extent| extent == 0).then(|| "takes no empty matrices".to_string())
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops;

    use super::*;

    #[test]
    fn sizes_from_the_operands_of_each_gemm() {
        let sizes = LinearSizes { tokens: 5, outputs: 3, inputs: 7 };
        let (x, w, dy) = ([5, 7], [3, 7], [5, 3]);
        for (op, first, second) in [
            (Op::from(ops::Linear { bias: true }), x, w),
            (ops::LinearDgrad {}.into(), dy, w),
            (ops::LinearWgrad {}.into(), dy, x),
        ] {
            assert_eq!(LinearSizes::new(&op, &first, &second), sizes, "{}", op.name());
        }
    }

    #[test]
    fn a_block_for_each_tile() {
        for (rows, columns, ctas) in
            [(0, 5, 1), (1, 1, 1), (128, 128, 1), (129, 128, 2), (129, 257, 6)]
        {
            assert_eq!(tile_ctas(rows, columns), ctas, "{rows}x{columns}");
        }
    }
}
