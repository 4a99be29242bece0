//! Shared by launchers of kernels that quantize: `layout/mx_tile.cuh` and
//! `layout/mx_statistics.cuh`.

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_precision::{ElementFormat, QuantFormat, ScaleFormat, ScaleRule};

use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::prepare::{CallView, Device};

/// Rows and columns of a tile.
pub(crate) const TILE: usize = 128;
/// Bytes of a BF16 tile in shared memory.
pub(crate) const BF16_TILE_BYTES: u32 = (TILE * TILE * 2) as u32;
/// Bytes of the shared-memory stage for columnwise data of a tile.
pub(crate) const STAGE_BYTES: u32 = (TILE * TILE) as u32;
/// Threads per BF16 tile.
pub(crate) const BF16_TILE_THREADS: u32 = 256;

/// Words of `MxTotals`.
const TOTALS_WORDS: usize = 12;

/// Device memory for the totals that the CTAs of a call accumulate, for each of `outputs`
/// quantizations; zero before and after the call.
pub(crate) fn totals(device: &mut Device<'_>, outputs: usize) -> Result<Argument, KernelError> {
    Ok(Argument::Pointer(totals_at(device, outputs)?))
}

/// [`totals`], for tables of addresses.
pub(crate) fn totals_at(device: &mut Device<'_>, outputs: usize) -> Result<DevicePtr, KernelError> {
    // An extra word allows alignment to eight bytes.
    let words = device.arrival_counters(outputs * TOTALS_WORDS + 1)?;
    Ok(words.offset((words.0 % 8) as usize))
}

/// Number of CTAs for a matrix: one per tile, at least 1.
pub(crate) fn ctas(rows: usize, columns: usize) -> u32 {
    (rows.div_ceil(TILE) * columns.div_ceil(TILE)).max(1) as u32
}

/// The [`flags`] of square blocks of 128 x 128 elements with scales by the RCEIL rule.
pub(crate) const SQUARE_OF_128: u32 = 2 | 4;

/// Scale rule and block shape, in the encoding of the kernels.
pub(crate) fn flags(spec: &QuantFormat) -> u32 {
    u32::from(spec.scale == ScaleFormat::E8m0(ScaleRule::OcpFloor))
        | u32::from(spec.block.k == 128) << 1
        | u32::from(spec.block.is_square()) << 2
}

/// Whether the tiles of a BF16 matrix are held in registers, as in `mx_is_plain`.
pub(crate) fn is_plain(rows: usize, columns: usize, flags: u32) -> bool {
    const FLOOR_OR_SQUARE: u32 = 1 | 4;
    let whole = rows >= TILE && rows.is_multiple_of(TILE) && columns.is_multiple_of(TILE);
    whole && flags & FLOOR_OR_SQUARE == 0
}

/// Dynamic shared memory of a CTA that quantizes a BF16 tile: a stage for matrices whose tiles are
/// in registers, a whole tile for other matrices.
pub(crate) fn shared_bytes(rows: usize, columns: usize, flags: u32) -> u32 {
    if is_plain(rows, columns, flags) { STAGE_BYTES } else { BF16_TILE_BYTES }
}

/// Why the kernels cannot quantize a matrix of this shape and format.
pub(crate) fn reject(quantize: &Quantize, shape: &[usize]) -> Option<String> {
    if quantize.format.element != ElementFormat::E4M3 {
        return Some(format!("quantizes to e4m3, not {}", quantize.format.element));
    }
    let limit = u32::MAX as usize - TILE;
    let &[rows, columns] = shape else {
        return Some(format!("quantizes matrices, not {} dimensions", shape.len()));
    };
    (rows.max(columns) > limit)
        .then(|| format!("takes at most {limit} rows and columns, not {rows} x {columns}"))
}

/// Output arguments of a quantization.
pub(crate) struct Outputs {
    /// Rowwise data and scales, columnwise data and scales; null = skip.
    pub(crate) places: [Argument; 4],
    /// The counters of the statistics.
    pub(crate) statistics: Argument,
}

/// The output arguments of a quantization whose first output is output `first` of the call.
pub(crate) fn outputs(call: &CallView<'_>, axis: Axis, first: usize) -> Outputs {
    let none = Argument::Pointer(DevicePtr(0));
    let output = |index: usize| call.output(first + index).argument();
    let (places, count) = match axis {
        Axis::Row => ([output(0), output(1), none, none], 2),
        Axis::Column => ([none, none, output(0), output(1)], 2),
        Axis::Both => ([output(0), output(1), output(2), output(3)], 4),
    };
    Outputs { places, statistics: output(count) }
}
