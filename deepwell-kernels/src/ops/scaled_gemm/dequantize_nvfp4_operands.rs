//! `dequantize_nvfp4_operands.cu`: the operands of an NVFP4 GEMM, elements times block scales, as
//! BF16 matrices in the call's workspace.

use deepwell_ir::{KernelRequest, Target};

use super::dequantize_operands::{OperandSizes, width};
use crate::KernelError;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::predict::Rates;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Dequantization's share of the datasheet's bandwidth: assumed, as of MXFP8.
const SHARE: f64 = 0.75;

/// Workspace bytes of both operands.
pub(crate) fn bytes(operands: [OperandSizes; 2]) -> usize {
    operands.into_iter().map(OperandSizes::matrix_bytes).sum()
}

/// Predicted seconds of the launch before the GEMM.
pub(crate) fn predicted_s(operands: [OperandSizes; 2], target: &Target) -> f64 {
    let rates = Rates::of(target);
    let elements: usize =
        operands.iter().map(|sizes| sizes.matrices * sizes.rows * width(sizes.k)).sum();
    // Each element is read as half a byte with 1/16 of a scale, and written as two bytes.
    let bytes = elements as f64 * (0.5 + 1.0 / 16.0 + 2.0);
    rates.bytes_s(bytes) / SHARE + rates.launch_s()
}

/// The sizes of both operands of a request, whose data are these inputs.
pub(crate) fn sizes_of(request: &KernelRequest<'_>, data: [usize; 2]) -> [OperandSizes; 2] {
    data.map(|index| OperandSizes::of(&request.operands[index].shape))
}

/// An operand and its dequantized target.
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    data: DevicePtr,
    scales: DevicePtr,
    sizes: OperandSizes,
    target: DevicePtr,
}

impl Operand {
    /// The BF16 matrix; the matrices of a stack are stacked along the rows.
    pub(crate) fn matrix(&self) -> DeviceTensor {
        self.sizes.matrix(self.target)
    }
}

/// Lays out both operands of a call, whose data are these inputs, from an aligned address on; also
/// returns the next free address.
pub(crate) fn operands(
    call: &CallView<'_>,
    data: [usize; 2],
    from: DevicePtr,
) -> ([Operand; 2], DevicePtr) {
    let mut free = from;
    let operands = data.map(|index| {
        let (data, scales) = (call.input(index), call.input(index + 1));
        let sizes = OperandSizes::of(&data.shape);
        let target = free;
        free = target.offset(sizes.matrix_bytes());
        Operand { data: data.pointer, scales: scales.pointer, sizes, target }
    });
    (operands, free)
}

/// Dequantizes both operands in one launch.
pub(crate) fn dequantize(
    device: &mut Device<'_>,
    [a, b]: &[Operand; 2],
) -> Result<Step, KernelError> {
    let function = device.function("dequantize_nvfp4_operands", "dequantize_nvfp4_operands", 0)?;
    let of =
        |operand: &Operand| [operand.data, operand.scales, operand.target].map(Argument::Pointer);
    let number = |number: usize| Argument::U32(number as u32);
    let mut arguments = of(a).to_vec();
    arguments.extend([number(a.sizes.rows), number(a.sizes.tiles())]);
    arguments.extend(of(b));
    arguments.extend([number(b.sizes.rows), number(a.sizes.k)]);
    let ctas = a.sizes.tiles() + b.sizes.tiles();
    Ok(Device::launch(function, ctas as u32, THREADS, 0, arguments))
}
