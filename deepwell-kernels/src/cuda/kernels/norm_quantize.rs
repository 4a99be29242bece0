//! What the normalizations that quantize their output share on the host:
//! `layout/norm_quantize.cuh`.

use deepwell_ir::ops::{QuantizedOutput, WithQuantize};
use deepwell_ir::{KernelRequest, Op};

use super::support::all_bf16;
use super::{fused, mx};
use crate::KernelError;
use crate::cuda::driver::{Argument, DevicePtr, Launch};
use crate::cuda::prepare::{CallView, Device, Step};

/// Blocks of a cluster at most: what every device of an architecture can place.
const CLUSTER_MAX: usize = 8;
/// Slices that a block keeps in shared memory at most, as in the source.
const HELD_MAX: usize = 2;
/// Elements of a piece, 16 bytes of BF16.
const PIECE: usize = 8;
/// Shared memory that the kernels have beside the dynamic part, and the driver's own.
const SHARED_BYTES_BESIDE: u32 = 4 << 10;
/// Shared memory that a block may ask for on the architecture that has the least.
const SHARED_BYTES_LEAST: u32 = 99 << 10;

/// How a row lies over a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Slices of 128 columns in a row.
    slices: usize,
    /// Slices of a block.
    slices_per_block: usize,
    /// Blocks of a cluster.
    cluster: usize,
}

impl Shape {
    /// Two slices a block, so that a block has enough to wait for at a time, or as many as eight
    /// blocks must take.
    fn new(columns: usize) -> Shape {
        let slices = columns.div_ceil(mx::TILE).max(1);
        let slices_per_block = slices.div_ceil(CLUSTER_MAX).max(2.min(slices));
        Shape { slices, slices_per_block, cluster: slices.div_ceil(slices_per_block) }
    }

    /// Dynamic shared memory where `held` slices stay in it: their tiles, a sum for each row of
    /// each slice, and two statistics of each row.
    fn shared_bytes(self, held: usize) -> usize {
        let numbers = (self.slices_per_block + 2) * mx::TILE;
        held * mx::BF16_TILE_BYTES as usize + numbers * size_of::<f32>()
    }

    /// How many slices of a block stay in shared memory where a block may ask for `room` bytes;
    /// none where not even one does.
    fn held(self, room: u32) -> Option<usize> {
        let room = room.saturating_sub(SHARED_BYTES_BESIDE) as usize;
        let most = self.slices_per_block.min(HELD_MAX);
        (1..=most).rev().find(|&held| self.shared_bytes(held) <= room)
    }

    /// Blocks of the launch: a cluster for each 128 rows.
    fn blocks(self, rows: usize) -> usize {
        rows.div_ceil(mx::TILE).max(1) * self.cluster
    }
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
    if Shape::new(shape[1]).held(SHARED_BYTES_LEAST).is_none() {
        return Some(format!("has no shared memory for the sums of {} columns", shape[1]));
    }
    let kept = (0..=norm.y()).filter_map(|output| op.position_of_output(output));
    let inputs = 0..norm.inputs();
    let floats: Vec<usize> =
        inputs.chain(kept.map(|position| request.input_count + position)).collect();
    all_bf16(request, &floats).or_else(|| mx::reject(&entry.quantize, shape))
}

/// Scratch for the counts of all blocks.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>) -> usize {
    let shape = &request.operands[0].shape;
    mx::counts_bytes(Shape::new(shape[1]).blocks(shape[0]))
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
    let shape = Shape::new(columns);
    let room = device.driver.properties().shared_bytes_per_block;
    let Some(held) = shape.held(room) else {
        return Err(call.refuse(format!("{columns} columns need more than {room} bytes of memory")));
    };
    let shared_bytes = shape.shared_bytes(held) as u32;
    let kernel = format!("{}_quantize_{}", norm.entry, entry.quantize.axis.name());
    let function = device.function(file, &kernel, shared_bytes)?;

    let none = Argument::Pointer(DevicePtr(0));
    let kept = |output| match op.position_of_output(output) {
        Some(position) => call.output(position).argument(),
        None => none,
    };
    let adds = usize::from(norm.adds);
    let delta = if norm.adds { call.input(1).argument() } else { none };
    let sum = if norm.adds { kept(0) } else { none };
    let mut arguments = vec![call.input(0).argument(), delta, call.input(1 + adds).argument()];
    if norm.layer {
        arguments.push(call.input(2 + adds).argument());
    }
    arguments.extend([sum, kept(norm.y())]);
    let statistics_of_rows = 1 + usize::from(norm.layer);
    arguments.extend((0..statistics_of_rows).map(|index| kept(norm.y() + 1 + index)));
    let first = op.positions_of_quantized(0).start;
    let mx::Copies { places, statistics } = mx::copies(call, entry.quantize.axis, first);
    arguments.extend(places);
    let extents = [rows, columns, shape.slices, shape.slices_per_block, held, shape.cluster];
    arguments.extend(extents.map(|extent| Argument::U32(extent as u32)));
    arguments.extend([
        Argument::F32(norm.eps as f32),
        Argument::U32(mx::flags(&entry.quantize.spec)),
        Argument::Pointer(call.workspace().0),
        Argument::Pointer(device.tickets(1)?),
        statistics,
    ]);
    Ok(vec![Step::Launch(Launch {
        function,
        grid: [shape.blocks(rows) as u32, 1, 1],
        block: [mx::BF16_TILE_THREADS, 1, 1],
        cluster: [shape.cluster as u32, 1, 1],
        shared_bytes,
        programmatic: false,
        arguments,
    })])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_length_lie_over_a_cluster() {
        let expected = [
            (8, (1, 1, 1)),
            (128, (1, 1, 1)),
            (136, (2, 2, 1)),
            (768, (6, 2, 3)),
            (2048, (16, 2, 8)),
            (2056, (17, 3, 6)),
            (4096, (32, 4, 8)),
            (5120, (40, 5, 8)),
            (16384, (128, 16, 8)),
        ];
        for (columns, (slices, slices_per_block, cluster)) in expected {
            let shape = Shape::new(columns);
            assert_eq!(shape, Shape { slices, slices_per_block, cluster }, "{columns}");
            assert!(slices_per_block * cluster >= slices);
            assert!(slices_per_block * (cluster - 1) < slices, "each block has a slice");
        }
    }

    #[test]
    fn three_blocks_fit_on_a_large_multiprocessor_and_one_on_a_small() {
        // 228 KiB, of which a block may ask for 227; and 100, of which 99.
        for columns in [128, 768, 2048, 4096, 8192] {
            let shape = Shape::new(columns);
            let held = shape.held(227 << 10).unwrap();
            assert_eq!(held, shape.slices_per_block.min(HELD_MAX));
            let bytes = shape.shared_bytes(held) as u32 + SHARED_BYTES_BESIDE;
            assert!(3 * bytes <= 228 << 10, "{columns}: {bytes}");
            let held = shape.held(SHARED_BYTES_LEAST).unwrap();
            assert!(shape.shared_bytes(held) as u32 + SHARED_BYTES_BESIDE <= 99 << 10);
        }
        assert_eq!(Shape::new(1 << 20).held(SHARED_BYTES_LEAST), None);
    }
}
