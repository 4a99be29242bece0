//! `dequantize_operands.cu` and `add_unheld.cu`: the operands of an MXFP8 GEMM as BF16 matrices in
//! the call's workspace, and the products that a GEMM of these matrices lacks.

use deepwell_ir::{DType, GemmKind, KernelRequest, Target};

use crate::KernelError;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::gemm::LIBRARY_ALIGNMENT_BYTES;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::predict::Rates;

/// Threads of a CTA, as in both sources.
const THREADS: u32 = 256;
/// Resident CTAs per SM.
const CTAS_PER_SM: usize = 8;
/// Rows and columns of a scale tile.
const TILE: usize = 128;
/// Rows of BF16 are multiples of this many elements.
const WIDTH: usize = 8;
/// Dequantization's share of the datasheet's bandwidth: assumed, 85 % of memcpy bandwidth, which is
/// 89 % of the datasheet's on an H200.
const SHARE: f64 = 0.75;

/// Elements of a row of BF16.
pub(crate) fn width(k: usize) -> usize {
    k.next_multiple_of(WIDTH)
}

/// Scale tiles of a stack of matrices.
fn tiles(matrices: usize, rows: usize, k: usize) -> usize {
    matrices * rows.div_ceil(TILE) * k.div_ceil(TILE)
}

/// Sizes of an operand: matrices `[rows, k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OperandSizes {
    pub(crate) matrices: usize,
    pub(crate) rows: usize,
    pub(crate) k: usize,
}

impl OperandSizes {
    /// The sizes of a matrix or a stack with this shape.
    pub(crate) fn of(shape: &[usize]) -> OperandSizes {
        let (k, rows) = (shape[shape.len() - 1], shape[shape.len() - 2]);
        OperandSizes { matrices: shape[..shape.len() - 2].iter().product(), rows, k }
    }

    /// Tiles of 128 by 128 elements.
    pub(super) fn tiles(self) -> usize {
        tiles(self.matrices, self.rows, self.k)
    }

    /// Bytes of the BF16 matrices, padded to the alignment.
    pub(super) fn matrix_bytes(self) -> usize {
        let bytes = self.matrices * self.rows * width(self.k) * 2;
        bytes.next_multiple_of(LIBRARY_ALIGNMENT_BYTES)
    }

    /// Bytes of the BF16 matrices and of the words per scale tile, each padded to the alignment.
    fn bytes(self) -> [usize; 2] {
        let words = self.tiles() * size_of::<u32>();
        [self.matrix_bytes(), words.next_multiple_of(LIBRARY_ALIGNMENT_BYTES)]
    }

    /// The BF16 matrices at this address, stacked along the rows.
    pub(super) fn matrix(self, pointer: DevicePtr) -> DeviceTensor {
        let shape = vec![self.matrices * self.rows, width(self.k)];
        DeviceTensor { pointer, dtype: DType::Bf16, shape }
    }
}

/// Workspace bytes of both operands.
pub(crate) fn bytes(operands: [OperandSizes; 2]) -> usize {
    operands.iter().flat_map(|operand| operand.bytes()).sum()
}

/// Predicted seconds of the steps before and after the GEMM.
pub(crate) fn predicted_s(operands: [OperandSizes; 2], target: &Target) -> f64 {
    let rates = Rates::of(target);
    let elements: usize =
        operands.iter().map(|operand| operand.matrices * operand.rows * operand.k).sum();
    // Each element is read with 1/32 of a scale, and written as two bytes.
    let bytes = elements as f64 * (1.0 + 1.0 / 32.0 + 2.0);
    rates.bytes_s(bytes) / SHARE + 2.0 * rates.launch_s()
}

/// The sizes of both operands of a request.
pub(crate) fn sizes_of(request: &KernelRequest<'_>) -> [OperandSizes; 2] {
    [0, 2].map(|index| OperandSizes::of(&request.operands[index].shape))
}

/// An operand and its dequantized target.
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    data: DevicePtr,
    scales: DevicePtr,
    sizes: OperandSizes,
    target: DevicePtr,
    /// One word per scale tile: whether BF16 cannot represent some element.
    unheld: DevicePtr,
}

impl Operand {
    /// The BF16 matrix; the matrices of a stack are stacked along the rows.
    pub(crate) fn matrix(&self) -> DeviceTensor {
        self.sizes.matrix(self.target)
    }
}

/// Lays out both operands of a call from an aligned address on; also returns the next free address.
pub(crate) fn operands(call: &CallView<'_>, from: DevicePtr) -> ([Operand; 2], DevicePtr) {
    let mut free = from;
    let operands = [0, 2].map(|index| {
        let (data, scales) = (call.input(index), call.input(index + 1));
        let sizes = OperandSizes::of(&data.shape);
        let [target_bytes, unheld_bytes] = sizes.bytes();
        let (target, unheld) = (free, free.offset(target_bytes));
        free = unheld.offset(unheld_bytes);
        Operand { data: data.pointer, scales: scales.pointer, sizes, target, unheld }
    });
    (operands, free)
}

/// Dequantizes both operands in one launch.
pub(crate) fn dequantize(
    device: &mut Device<'_>,
    [a, b]: &[Operand; 2],
) -> Result<Step, KernelError> {
    let function = device.function("dequantize_operands", "dequantize_operands", 0)?;
    let of = |operand: &Operand| {
        [operand.data, operand.scales, operand.target, operand.unheld].map(Argument::Pointer)
    };
    let number = |number: usize| Argument::U32(number as u32);
    let mut arguments = of(a).to_vec();
    arguments.extend([number(a.sizes.rows), number(a.sizes.tiles())]);
    arguments.extend(of(b));
    arguments.extend([number(b.sizes.rows), number(a.sizes.k)]);
    let ctas = a.sizes.tiles() + b.sizes.tiles();
    Ok(Device::launch(function, ctas as u32, THREADS, 0, arguments))
}

/// Adds the products that a GEMM of both operands, `[rows of a, rows of b]`, lacks.
pub(crate) fn add_unheld(
    device: &mut Device<'_>,
    operands: &[Operand; 2],
    out: &DeviceTensor,
) -> Result<Step, KernelError> {
    let name = if out.dtype == DType::Bf16 { "add_unheld_bf16" } else { "add_unheld_f32" };
    let tiles = tiles_of_result(operands, 1);
    add_by(device, name, operands, out, (tiles, Vec::new()))
}

/// The groups of a grouped GEMM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Groups {
    pub(crate) kind: GemmKind,
    pub(crate) count: usize,
    /// `[count + 1]`.
    pub(crate) offsets: DevicePtr,
}

/// [`add_unheld`] for a grouped GEMM: each group's rows times the group's matrix or, for wgrad, one
/// result per group over the group's part of K.
pub(crate) fn add_unheld_of_groups(
    device: &mut Device<'_>,
    operands: &[Operand; 2],
    out: &DeviceTensor,
    groups: Groups,
) -> Result<Step, KernelError> {
    let (name, results) = match groups.kind {
        GemmKind::Wgrad => ("add_unheld_of_groups_f32", groups.count),
        _ => ("add_unheld_of_rows_bf16", 1),
    };
    let tiles = tiles_of_result(operands, results);
    let more = vec![Argument::Pointer(groups.offsets), Argument::U32(groups.count as u32)];
    add_by(device, name, operands, out, (tiles, more))
}

/// Tiles of `results` results `[rows of a, rows of b]`.
fn tiles_of_result([a, b]: &[Operand; 2], results: usize) -> usize {
    results * a.sizes.rows.div_ceil(TILE) * b.sizes.rows.div_ceil(TILE)
}

/// Launches one warp per tile, spread over CTAs first; `more` arguments follow the common
/// arguments.
fn add_by(
    device: &mut Device<'_>,
    name: &str,
    [a, b]: &[Operand; 2],
    out: &DeviceTensor,
    (tiles, more): (usize, Vec<Argument>),
) -> Result<Step, KernelError> {
    let function = device.function("add_unheld", name, 0)?;
    let mut arguments = Vec::with_capacity(12);
    for operand in [a, b] {
        arguments.extend([operand.data, operand.scales, operand.unheld].map(Argument::Pointer));
        arguments.push(Argument::U32(operand.sizes.rows as u32));
    }
    arguments.extend([out.argument(), Argument::U32(a.sizes.k as u32)]);
    arguments.extend(more);
    let ctas = tiles.min(CTAS_PER_SM * device.sm_count() as usize);
    Ok(Device::launch(function, ctas as u32, THREADS, 0, arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_for_matrices_and_words() {
        for (shape, matrices, tiles, expected) in [
            // 64 rows of 40 elements; one scale tile.
            (&[64usize, 37][..], 1, 1, [64 * 40 * 2, 256]),
            (&[129, 256], 1, 4, [129 * 256 * 2, 256]),
            (&[1, 8], 1, 1, [256, 256]),
            (&[3, 130, 128], 3, 6, [3 * 130 * 128 * 2, 256]),
            (&[16384, 16384], 1, 128 * 128, [16384 * 16384 * 2, 128 * 128 * 4]),
        ] {
            let sizes = OperandSizes::of(shape);
            assert_eq!((sizes.matrices, sizes.tiles()), (matrices, tiles), "{shape:?}");
            assert_eq!(sizes.bytes().map(|bytes| bytes % 256), [0, 0]);
            let rounded = expected.map(|bytes: usize| bytes.next_multiple_of(256));
            assert_eq!(sizes.bytes(), rounded, "{shape:?}");
        }
    }
}
