//! Shared by launchers of kernels that quantize to NVFP4: `layout/nvfp4_block.cuh`,
//! `layout/nvfp4_tile.cuh` and `layout/nvfp4_groups.cuh`.

use deepwell_ir::ops::Axis;
use deepwell_ir::{DType, KernelRequest, OperandType, Target};
use deepwell_precision::hadamard::POINTS;
use deepwell_precision::nvfp4::{ScaleBound, ScaleOrder};
use deepwell_precision::{QuantFormat, ScaleFormat};

use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::predict::{Rates, roofline};

/// Threads of a CTA.
pub(crate) const THREADS: u32 = 256;
/// Rows and columns of the tile of a CTA.
const TILE: usize = 128;
/// Words of a row of a tile in shared memory: one more than the elements take.
const BF16_ROW_WORDS: usize = TILE / 2 + 1;
const F32_ROW_WORDS: usize = TILE + 1;

/// A format in the encoding of the kernels.
pub(crate) fn flags(format: &QuantFormat) -> u32 {
    let is_256 = format.scale == ScaleFormat::Ue4m3(ScaleBound::Max256);
    let signs = format.hadamard.map_or(0, |transform| u32::from(transform.negative) << 16);
    u32::from(format.block.is_square())
        | u32::from(is_256) << 1
        | u32::from(format.order == ScaleOrder::Te) << 2
        | u32::from(format.four_six) << 3
        | u32::from(format.hadamard.is_some()) << 4
        | signs
}

/// Why the kernels cannot quantize `x` along `axis`; `after` is the operand that says which numbers
/// share a tensor scale, if the request has one.
pub(crate) fn reject(
    x: &OperandType,
    after: Option<&OperandType>,
    format: &QuantFormat,
    axis: Axis,
) -> Option<String> {
    let &[rows, columns] = x.shape.as_slice() else {
        return Some(format!("takes a matrix, not {} dimensions", x.shape.len()));
    };
    if after.is_some_and(|operand| operand.dtype == DType::I32) {
        return Some("takes one tensor scale for all rows, not one per group of rows".to_string());
    }
    reject_matrix(x.dtype, [rows, columns], format, axis)
}

/// Why the kernels of parts with a tensor scale each cannot quantize `x` along `axis`. `after` are
/// the offsets of groups of rows; without them `x` is a stack of matrices.
pub(crate) fn reject_parts(
    x: &OperandType,
    after: Option<&OperandType>,
    format: &QuantFormat,
    axis: Axis,
) -> Option<String> {
    let (rows, columns) = match (x.shape.as_slice(), after) {
        (&[rows, columns], Some(offsets)) if offsets.dtype == DType::I32 => (rows, columns),
        (&[_, rows, columns], None) => (rows, columns),
        _ => return Some("takes groups of rows or a stack of matrices".to_string()),
    };
    reject_matrix(x.dtype, [rows, columns], format, axis)
}

fn reject_matrix(
    dtype: DType,
    [rows, columns]: [usize; 2],
    format: &QuantFormat,
    axis: Axis,
) -> Option<String> {
    if !matches!(dtype, DType::Bf16 | DType::F32) {
        return Some(format!("takes bf16 or f32, not {dtype}"));
    }
    let limit = u32::MAX as usize - TILE;
    if rows.max(columns) > limit {
        return Some(format!("takes at most {limit} rows and columns, not {rows} x {columns}"));
    }
    if let Err(error) = format.check_settings() {
        return Some(error.to_string());
    }
    let k = match (format.hadamard, axis) {
        (None, _) => return None,
        (_, Axis::Both) => return Some("transforms along one axis, not both".to_string()),
        (_, Axis::Row) => columns,
        (_, Axis::Column) => rows,
    };
    (!k.is_multiple_of(POINTS))
        .then(|| format!("transforms a contraction in multiples of {POINTS}, not {k}"))
}

/// Number of CTAs for a matrix: one per tile, at least 1.
pub(crate) fn ctas(rows: usize, columns: usize) -> u32 {
    (rows.div_ceil(TILE) * columns.div_ceil(TILE)).max(1) as u32
}

/// Dynamic shared memory of a CTA: the tile.
pub(crate) fn shared_bytes(source: DType) -> u32 {
    let row_words = if source == DType::Bf16 { BF16_ROW_WORDS } else { F32_ROW_WORDS };
    (TILE * row_words * size_of::<u32>()) as u32
}

/// Name of the source's type in kernels' names.
pub(crate) fn element(source: DType) -> &'static str {
    if source == DType::Bf16 { "bf16" } else { "f32" }
}

/// Predicted seconds: the roofline time, and a pass before it that reads the first operand.
pub(crate) fn predicted_s(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let rates = Rates::of(target);
    let bytes = request.operands[0].storage_bytes().unwrap_or(0);
    roofline(request, target) + rates.bytes_s(bytes as f64) + rates.launch_s()
}

/// Parts of a tensor with a tensor scale each: matrices of a stack, or groups of the rows of one
/// matrix, which begin at multiples of 128.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    /// Offsets of the groups; null for a stack.
    offsets: DevicePtr,
    /// Number of parts.
    pub(crate) count: usize,
    /// Rows and columns of a matrix.
    pub(crate) matrix: [usize; 2],
}

impl Parts {
    /// The parts of `x`; `None` for another number of dimensions than [`reject_parts`] has seen.
    pub(crate) fn of(x: &DeviceTensor, offsets: Option<&DeviceTensor>) -> Option<Parts> {
        match (x.shape.as_slice(), offsets) {
            (&[rows, columns], Some(offsets)) => {
                let count = offsets.shape.first()?.checked_sub(1)?;
                Some(Parts { offsets: offsets.pointer, count, matrix: [rows, columns] })
            }
            (&[count, rows, columns], None) => {
                Some(Parts { offsets: DevicePtr(0), count, matrix: [rows, columns] })
            }
            _ => None,
        }
    }

    /// Number of CTAs: one per tile, at least 1.
    pub(crate) fn ctas(&self) -> u32 {
        let [rows, columns] = self.matrix;
        let matrices = if self.offsets == DevicePtr(0) { self.count } else { 1 };
        let tiles = rows.div_ceil(TILE) * columns.div_ceil(TILE);
        (matrices * tiles).max(1) as u32
    }

    /// Offsets and number of parts, as arguments of the kernels.
    pub(crate) fn arguments(&self) -> [Argument; 2] {
        [Argument::Pointer(self.offsets), Argument::U32(self.count as u32)]
    }

    /// Rows, columns and flags of a format, as arguments of the kernels.
    pub(crate) fn sizes(&self, format: &QuantFormat) -> [Argument; 3] {
        let [rows, columns] = self.matrix;
        [rows as u32, columns as u32, flags(format)].map(Argument::U32)
    }
}
