//! What launchers of GEMMs share: sizes, tiles, limits.

use deepwell_ir::ops::Epilogue;
use deepwell_ir::{KernelRequest, Op};

use crate::cuda::blas::Matrix;
use crate::cuda::driver::DevicePtr;
use crate::cuda::prepare::{CallView, DeviceTensor};

/// Rows and columns of the tile of the result that a CTA of our kernels computes.
pub(crate) const TILE: usize = 128;
/// Largest extent that our kernels' 32-bit indices reach, a tile past the end included.
const LARGEST_EXTENT: usize = i32::MAX as usize - TILE;

/// Scratch of a call of the vendor's library: what it recommends for Hopper and newer.
pub(crate) const LIBRARY_SCRATCH_BYTES: usize = 32 << 20;
/// Alignment of that scratch, and more than scales need.
pub(crate) const LIBRARY_ALIGNMENT_BYTES: usize = 256;

/// The next address that is aligned for the library. Workspaces are not: ask for
/// [`LIBRARY_ALIGNMENT_BYTES`] more.
pub(crate) fn align_for_library(pointer: DevicePtr) -> DevicePtr {
    DevicePtr(pointer.0.next_multiple_of(LIBRARY_ALIGNMENT_BYTES as u64))
}

/// A tensor of rank 2 as a matrix of the library.
pub(crate) fn matrix(tensor: &DeviceTensor) -> Matrix {
    let (rows, columns) = (tensor.shape[0], tensor.shape[1]);
    Matrix { pointer: tensor.pointer, dtype: tensor.dtype, rows, columns, leading: columns }
}

/// What the library adds to the result `out` of a call: the matrix of its epilogue, or what is
/// there already.
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
    /// From the shapes of the first two operands of one of the layer's three GEMMs.
    pub(crate) fn new(op: &Op, first: &[usize], second: &[usize]) -> LinearSizes {
        let (tokens, inputs) = (first[0], second[1]);
        let outputs = match op {
            Op::Linear(_) => second[0],
            _ => first[1],
        };
        LinearSizes { tokens, outputs, inputs }
    }
}

/// CTAs for a result of `rows` x `columns`, one for each tile; at least one.
pub(crate) fn tile_ctas(rows: usize, columns: usize) -> u32 {
    (rows.div_ceil(TILE) * columns.div_ceil(TILE)).max(1) as u32
}

/// Refuses extents beyond what our kernels index.
pub(crate) fn extents_fit(request: &KernelRequest<'_>, operands: &[usize]) -> Option<String> {
    let mut extents = operands.iter().flat_map(|&index| &request.operands[index].shape);
    let largest = extents.find(|&&extent| extent > LARGEST_EXTENT)?;
    Some(format!("takes extents up to {LARGEST_EXTENT}, not {largest}"))
}

/// Refuses GEMMs without elements or without a contraction: the library takes none.
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
            (ops::LinearInputGrad {}.into(), dy, w),
            (ops::LinearWeightGrad {}.into(), dy, x),
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
