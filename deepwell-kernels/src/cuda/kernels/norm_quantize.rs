//! What the normalizations that quantize their output share on the host:
//! `layout/norm_quantize.cuh`.

use deepwell_ir::ops::{QuantizedOutput, WithQuantize};
use deepwell_ir::{KernelRequest, Op, Target};

use super::support::all_bf16;
use super::{fused, mx};
use crate::KernelError;
use crate::cuda::driver::{Argument, DevicePtr};
use crate::cuda::prepare::{CallView, Device, Step};

/// Elements of a piece, 16 bytes of BF16.
const PIECE: usize = 8;
/// Strips that a block has in shared memory at a time, as in the source.
const STRIPS: u32 = 2;
/// Dynamic shared memory of a block.
const SHARED_BYTES: u32 = STRIPS * mx::BF16_TILE_BYTES + mx::STAGE_BYTES;
/// Blocks that a multiprocessor holds at most, by the memory of the largest.
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;
/// Sums of rows that a group keeps: for the mean and for rstd, of four strips each.
const SUMS: usize = 2 * 4;
/// Counters of a group: for each kind of sums, of two strips each.
const COUNTERS: usize = 2 * 2;
/// Slices of a row at most: blocks that every device holds at a time.
const SLICES_MAX: usize = 128;

/// Slices of 128 columns, a block of a group for each.
fn slices(columns: usize) -> usize {
    columns.div_ceil(mx::TILE).max(1)
}

/// Groups that take strips of 128 rows in turn where the device holds `resident` blocks at a time.
fn groups(rows: usize, columns: usize, resident: usize) -> usize {
    rows.div_ceil(mx::TILE).min(resident / slices(columns)).max(1)
}

/// Scratch for so many groups: the sums, then the counts of all blocks.
fn scratch_bytes(groups: usize, columns: usize) -> (usize, usize) {
    let blocks = groups * slices(columns);
    (blocks * SUMS * mx::TILE * size_of::<f32>(), mx::counts_bytes(blocks))
}

/// A normalization that is a producer.
struct Norm {
    /// Name of the op.
    entry: &'static str,
    eps: f64,
    /// Whether there is a sum before it.
    adds: bool,
    /// Whether it has a bias and a mean.
    layer: bool,
}

impl Norm {
    fn of(producer: &Op) -> Option<Norm> {
        let norm = |entry, eps, adds, layer| Some(Norm { entry, eps, adds, layer });
        match producer {
            Op::RmsNorm(op) => norm("rms_norm", op.eps, false, false),
            Op::AddRmsNorm(op) => norm("add_rms_norm", op.eps, true, false),
            Op::LayerNorm(op) => norm("layer_norm", op.eps, false, true),
            Op::AddLayerNorm(op) => norm("add_layer_norm", op.eps, true, true),
            _ => None,
        }
    }

    /// Which of the producer's outputs is the normalized one.
    fn y(&self) -> usize {
        usize::from(self.adds)
    }

    /// Inputs of the producer.
    fn inputs(&self) -> usize {
        2 + usize::from(self.adds) + usize::from(self.layer)
    }
}

/// The fused op, its producer, and the one quantization that the kernels make.
fn parts(op: &Op) -> Option<(&WithQuantize, Norm, &QuantizedOutput)> {
    let Op::WithQuantize(op) = op else { return None };
    match op.quantized.as_slice() {
        [entry] => Some((op, Norm::of(&op.producer)?, entry)),
        _ => None,
    }
}

/// Why a request cannot be served.
pub(super) fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Some((op, norm, entry)) = parts(request.op) else {
        return Some("makes one quantization, of the normalized rows".to_string());
    };
    if let Some(reason) = fused::reject(op) {
        return Some(reason);
    }
    let shape = &request.operands[0].shape;
    if let &[_, columns] = shape.as_slice()
        && (columns == 0 || !columns.is_multiple_of(PIECE))
    {
        return Some(format!("takes rows of whole pieces of {PIECE} elements, not {columns}"));
    }
    if slices(shape[1]) > SLICES_MAX {
        let most = SLICES_MAX * mx::TILE;
        return Some(format!("takes rows of at most {most} columns, not {}", shape[1]));
    }
    let kept = (0..=norm.y()).filter_map(|output| op.position_of_output(output));
    let inputs = 0..norm.inputs();
    let floats: Vec<usize> =
        inputs.chain(kept.map(|position| request.input_count + position)).collect();
    all_bf16(request, &floats).or_else(|| mx::reject(&entry.quantize, shape))
}

/// Scratch for the sums of rows and the counts of all blocks.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>, target: &Target) -> usize {
    let shape = &request.operands[0].shape;
    let resident = BLOCKS_PER_MULTIPROCESSOR * target.workers.max(1);
    let (sums, counts) = scratch_bytes(groups(shape[0], shape[1], resident), shape[1]);
    sums + counts
}

/// Prepares a call for a kernel of `<file>.cu`.
pub(super) fn prepare(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    file: &'static str,
) -> Result<Vec<Step>, KernelError> {
    let Some((op, norm, entry)) = parts(&call.call.op) else {
        return Err(call.refuse("expected a normalization and one quantization of its output"));
    };
    let &[rows, columns] = call.input(0).shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let kernel = format!("{}_quantize_{}", norm.entry, entry.quantize.axis.name());
    let function = device.function(file, &kernel, SHARED_BYTES)?;
    let resident = device.resident_blocks(function, mx::BF16_TILE_THREADS, SHARED_BYTES)? as usize;
    // Blocks wait for each other, so that all of a group must be there.
    if resident < slices(columns) {
        return Err(call.refuse(format!("{columns} columns need more than {resident} blocks")));
    }
    let most = resident.min(BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors() as usize);
    let groups = groups(rows, columns, most);
    let (workspace, workspace_bytes) = call.workspace();
    let (sums_bytes, counts_bytes) = scratch_bytes(groups, columns);
    if sums_bytes + counts_bytes > workspace_bytes {
        return Err(call.refuse(format!(
            "expected {} bytes of workspace, got {workspace_bytes}",
            sums_bytes + counts_bytes
        )));
    }
    let source = mx::boxes_of_tiles(&call.input(0), device)?;

    let none = Argument::Pointer(DevicePtr(0));
    let kept = |output| match op.position_of_output(output) {
        Some(position) => call.output(position).argument(),
        None => none,
    };
    let adds = usize::from(norm.adds);
    let delta = if norm.adds { call.input(1).argument() } else { none };
    let sum = if norm.adds { kept(0) } else { none };
    let mut arguments =
        vec![source, call.input(0).argument(), delta, call.input(1 + adds).argument()];
    if norm.layer {
        arguments.push(call.input(2 + adds).argument());
    }
    arguments.extend([sum, kept(norm.y())]);
    let statistics_of_rows = 1 + usize::from(norm.layer);
    arguments.extend((0..statistics_of_rows).map(|index| kept(norm.y() + 1 + index)));
    let first = op.positions_of_quantized(0).start;
    let mx::Copies { places, statistics } = mx::copies(call, entry.quantize.axis, first);
    arguments.extend(places);
    arguments.extend([
        Argument::U32(rows as u32),
        Argument::U32(columns as u32),
        Argument::F32(norm.eps as f32),
        Argument::U32(mx::flags(&entry.quantize.spec)),
        Argument::Pointer(workspace),
        Argument::Pointer(device.tickets(groups * COUNTERS)?),
        Argument::Pointer(workspace.offset(sums_bytes)),
        Argument::Pointer(device.tickets(1)?),
        statistics,
    ]);
    let blocks = (groups * slices(columns)) as u32;
    Ok(vec![Device::launch(function, blocks, mx::BF16_TILE_THREADS, SHARED_BYTES, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_lie_over_a_device() {
        // Two blocks on each of 132 multiprocessors.
        let expected = [
            ((0, 256), (2, 1)),
            ((1, 8), (1, 1)),
            ((16384, 768), (6, 44)),
            ((16384, 2048), (16, 16)),
            ((512, 2048), (16, 4)),
            ((16384, 2056), (17, 15)),
            ((16384, 4096), (32, 8)),
            ((16384, 16384), (128, 2)),
        ];
        for ((rows, columns), (of_row, of_device)) in expected {
            assert_eq!(slices(columns), of_row, "{columns}");
            assert_eq!(groups(rows, columns, 264), of_device, "{rows} x {columns}");
        }
    }

    #[test]
    fn scratch_has_room_for_all_groups() {
        assert_eq!(scratch_bytes(16, 2048), (16 * 8 * 2048 * 4, 256 * 40));
        assert_eq!(scratch_bytes(1, 8), (8 * 128 * 4, 40));
    }

    #[test]
    fn one_block_fits_on_a_small_multiprocessor() {
        // Of 99 KiB that a block may have, some are the kernel's own.
        const { assert!(SHARED_BYTES + (12 << 10) <= 99 << 10) };
    }
}
