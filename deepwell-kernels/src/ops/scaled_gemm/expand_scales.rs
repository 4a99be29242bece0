//! `expand_scales.cu`: E8M0 scales of both operands of a GEMM, converted to cuBLASLt's FP32
//! layouts.

use deepwell_precision::{BlockShape, Granularity, QuantFormat};

use crate::KernelError;
use crate::runtime::cuda::blas::BlockScales;
use crate::runtime::cuda::driver::{Argument, DevicePtr, Launch};
use crate::runtime::cuda::launch::gemm::LIBRARY_ALIGNMENT_BYTES;
use crate::runtime::cuda::launch::support::grid_of;
use crate::runtime::cuda::prepare::{Device, Step};

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Rows of a square.
const SQUARE: usize = 128;
/// Groups of 128 elements to which rows of squares are padded.
const GROUPS: usize = 4;
/// Threads that convert a tile of scales by rows.
const WARP: usize = 32;

/// The scales of an operand `[rows, k]`, and their target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expansion {
    /// E8M0, in tiles.
    pub(crate) source: DevicePtr,
    /// A buffer of [`expanded_bytes`].
    pub(crate) target: DevicePtr,
    pub(crate) rows: usize,
    pub(crate) spec: QuantFormat,
}

impl Expansion {
    /// Describes the target to the library.
    pub(crate) fn scales(&self) -> BlockScales {
        match self.spec.block.shape() {
            BlockShape::Square => BlockScales::Square128(self.target),
            _ => BlockScales::Row128(self.target),
        }
    }
}

/// Rows of scales or of squares, and groups of 128 elements along each row.
fn extents(rows: usize, k: usize, spec: QuantFormat) -> (usize, usize) {
    let groups = k.div_ceil(Granularity::G128.elements());
    match spec.block.shape() {
        BlockShape::Square => (rows.div_ceil(SQUARE), groups.next_multiple_of(GROUPS)),
        _ => (rows, groups),
    }
}

/// Bytes of the FP32 scales of an operand, a multiple of the library's alignment.
pub(crate) fn expanded_bytes(rows: usize, k: usize, spec: QuantFormat) -> usize {
    let (rows, groups) = extents(rows, k, spec);
    (rows * groups * size_of::<f32>()).next_multiple_of(LIBRARY_ALIGNMENT_BYTES)
}

/// Converts the scales of both operands in one launch.
pub(crate) fn expand(
    device: &mut Device<'_>,
    [a, b]: [&Expansion; 2],
    k: usize,
) -> Result<Step, KernelError> {
    let function = device.function("expand_scales", "expand_scales", 0)?;
    let threads = [a, b].map(|operand| {
        let (rows, groups) = extents(operand.rows, k, operand.spec);
        match operand.spec.block.shape() {
            BlockShape::Square => rows * groups,
            _ => rows.div_ceil(SQUARE) * groups * WARP,
        }
    });
    let ctas = grid_of(threads[0].max(threads[1]), THREADS, device.sm_count());
    let square = |operand: &Expansion| u32::from(operand.spec.block.is_square());
    let arguments = vec![
        Argument::Pointer(a.source),
        Argument::Pointer(a.target),
        Argument::I32(a.rows as i32),
        Argument::Pointer(b.source),
        Argument::Pointer(b.target),
        Argument::I32(b.rows as i32),
        Argument::I32(k as i32),
        Argument::U32(square(a) | square(b) << 1),
    ];
    Ok(Step::Launch(Launch {
        function,
        grid: [ctas, 2, 1],
        block: [THREADS, 1, 1],
        cluster: [1, 1, 1],
        shared_bytes: 0,
        programmatic: false,
        arguments,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_for_the_layouts_of_the_library() {
        let rows = QuantFormat::MXFP8_128;
        let squares = rows.square();
        for (spec, row_count, k, expected) in [
            // One FP32 per row and 128 elements.
            (rows, 64, 128, 256),
            (rows, 128, 129, 1024),
            (rows, 4096, 2048, 4096 * 16 * 4),
            // One FP32 per square, with rows of squares padded to four.
            (squares, 128, 128, 256),
            (squares, 4096, 2048, 32 * 16 * 4),
            (squares, 4096, 704, 32 * 8 * 4),
            (squares, 4097, 704, 33 * 8 * 4 + 224),
        ] {
            assert_eq!(expanded_bytes(row_count, k, spec), expected, "{row_count} {k}");
        }
    }
}
