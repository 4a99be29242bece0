//! What the kernels that quantize share on the host: `layout/mx_tile.cuh` and
//! `layout/mx_statistics.cuh`.

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_precision::{BlockShape, ElementFormat, Granularity, MxSpec, ScaleRule};

use crate::KernelError;
use crate::cuda::driver::{
    Argument, DevicePtr, TensorMap, TensorMapElement, TensorMapSpec, TensorMapSwizzle,
};
use crate::cuda::prepare::{CallView, Device, Tensor};

/// Rows and columns of a tile.
pub(super) const TILE: usize = 128;
/// Bytes of a tile of BF16 in shared memory.
pub(super) const BF16_TILE_BYTES: u32 = (TILE * TILE * 2) as u32;
/// Bytes of the stage that the codes of a tile's columns go through.
pub(super) const STAGE_BYTES: u32 = (TILE * TILE) as u32;
/// Threads over a tile of BF16.
pub(super) const BF16_TILE_THREADS: u32 = 256;

/// Bytes of the counts that one block leaves to the last one.
const COUNTS_BYTES: usize = 5 * size_of::<u64>();

/// Scratch for the counts of `blocks` blocks.
pub(super) fn counts_bytes(blocks: usize) -> usize {
    blocks * COUNTS_BYTES
}

/// Blocks whose counts fit into `bytes` of scratch.
pub(super) fn blocks_of_counts(bytes: usize) -> usize {
    bytes / COUNTS_BYTES
}

/// How elements share exponents, as the kernels read it.
pub(super) fn flags(spec: &MxSpec) -> u32 {
    u32::from(spec.scale_rule == ScaleRule::OcpFloor)
        | u32::from(spec.granularity == Granularity::G128) << 1
        | u32::from(spec.block == BlockShape::Square) << 2
}

/// Why the kernels cannot quantize a matrix of this shape in this way.
pub(super) fn reject(quantize: &Quantize, shape: &[usize]) -> Option<String> {
    if quantize.spec.element != ElementFormat::E4M3 {
        return Some(format!("quantizes to e4m3, not {}", quantize.spec.element));
    }
    let limit = u32::MAX as usize - TILE;
    let &[rows, columns] = shape else {
        return Some(format!("quantizes matrices, not {} dimensions", shape.len()));
    };
    (rows.max(columns) > limit)
        .then(|| format!("takes at most {limit} rows and columns, not {rows} x {columns}"))
}

/// A BF16 matrix in boxes of a tile each, for bulk copies; nothing of a matrix whose rows are not
/// whole pieces of 16 bytes, which kernels copy in other ways.
pub(super) fn boxes_of_tiles(
    matrix: &Tensor,
    device: &mut Device<'_>,
) -> Result<Argument, KernelError> {
    let columns = matrix.shape[1];
    if columns == 0 || !columns.is_multiple_of(8) {
        return Ok(Argument::TensorMap(TensorMap([0; 16])));
    }
    // No box is taken of a matrix without rows.
    let rows = matrix.shape[0].max(1);
    let map = device.tensor_map(&TensorMapSpec {
        base: matrix.pointer,
        element: TensorMapElement::Bf16,
        sizes: vec![columns as u64, rows as u64],
        strides_bytes: vec![2 * columns as u64],
        box_sizes: vec![TILE as u32, TILE as u32],
        swizzle: TensorMapSwizzle::None,
    })?;
    Ok(Argument::TensorMap(map))
}

/// What a quantization writes, as arguments.
pub(super) struct Copies {
    /// Row codes, row scales, column codes, column scales; null for what is not made.
    pub(super) places: [Argument; 4],
    /// The counters.
    pub(super) statistics: Argument,
}

/// The outputs of a quantization, the first of which is output `first` of the call.
pub(super) fn copies(call: &CallView<'_>, axis: Axis, first: usize) -> Copies {
    let none = Argument::Pointer(DevicePtr(0));
    let output = |index: usize| call.output(first + index).argument();
    let (places, count) = match axis {
        Axis::Row => ([output(0), output(1), none, none], 2),
        Axis::Column => ([none, none, output(0), output(1)], 2),
        Axis::Both => ([output(0), output(1), output(2), output(3)], 4),
    };
    Copies { places, statistics: output(count) }
}
