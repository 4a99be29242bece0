//! What the kernels that quantize share on the host: `layout/mx_tile.cuh` and
//! `layout/mx_statistics.cuh`.

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_precision::{ElementFormat, QuantFormat, ScaleFormat, ScaleRule};

use crate::KernelError;
use crate::cuda::driver::{Argument, DevicePtr};
use crate::cuda::prepare::{CallView, Device};

/// Rows and columns of a tile.
pub(crate) const TILE: usize = 128;
/// Bytes of a tile of BF16 in shared memory.
pub(crate) const BF16_TILE_BYTES: u32 = (TILE * TILE * 2) as u32;
/// Bytes of the stage that the data of a tile's columns go through.
pub(crate) const STAGE_BYTES: u32 = (TILE * TILE) as u32;
/// Threads over a tile of BF16.
pub(crate) const BF16_TILE_THREADS: u32 = 256;

/// Words of `MxTotals`.
const TOTALS_WORDS: usize = 12;

/// Room for what the CTAs of a call add up, for each of `outputs` quantizations: zero before and
/// after.
pub(crate) fn totals(device: &mut Device<'_>, outputs: usize) -> Result<Argument, KernelError> {
    Ok(Argument::Pointer(totals_at(device, outputs)?))
}

/// [`totals`], for tables of addresses.
pub(crate) fn totals_at(device: &mut Device<'_>, outputs: usize) -> Result<DevicePtr, KernelError> {
    // One word more, to begin at a multiple of eight bytes.
    let words = device.arrival_counters(outputs * TOTALS_WORDS + 1)?;
    Ok(words.offset((words.0 % 8) as usize))
}

/// CTAs for a matrix of so many rows and columns, one for each tile and one at least.
pub(crate) fn ctas(rows: usize, columns: usize) -> u32 {
    (rows.div_ceil(TILE) * columns.div_ceil(TILE)).max(1) as u32
}

/// The [`flags`] of squares of 128 x 128 elements with scales by the RCEIL rule.
pub(crate) const SQUARE_OF_128: u32 = 2 | 4;

/// How elements share exponents, as the kernels read it.
pub(crate) fn flags(spec: &QuantFormat) -> u32 {
    u32::from(spec.scale == ScaleFormat::E8m0(ScaleRule::OcpFloor))
        | u32::from(spec.block.k == 128) << 1
        | u32::from(spec.block.is_square()) << 2
}

/// Whether the tiles of a matrix of BF16 are in registers, as `mx_is_plain` has it.
pub(crate) fn is_plain(rows: usize, columns: usize, flags: u32) -> bool {
    const FLOOR_OR_SQUARE: u32 = 1 | 4;
    let whole = rows >= TILE && rows.is_multiple_of(TILE) && columns.is_multiple_of(TILE);
    whole && flags & FLOOR_OR_SQUARE == 0
}

/// Dynamic shared memory of a CTA that quantizes a tile of BF16: a stage for the matrices whose
/// tiles are in registers, and a tile for all others.
pub(crate) fn shared_bytes(rows: usize, columns: usize, flags: u32) -> u32 {
    if is_plain(rows, columns, flags) { STAGE_BYTES } else { BF16_TILE_BYTES }
}

/// Why the kernels cannot quantize a matrix of this shape in this way.
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

/// What a quantization writes, as arguments.
pub(crate) struct Outputs {
    /// Rowwise data and scales, columnwise data and scales; null = skip.
    pub(crate) places: [Argument; 4],
    /// The counters.
    pub(crate) statistics: Argument,
}

/// The outputs of a quantization, the first of which is output `first` of the call.
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
