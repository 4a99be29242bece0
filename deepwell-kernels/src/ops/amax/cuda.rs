//! `amax.cu`: the largest magnitude of a matrix.

use deepwell_ir::Op;
use deepwell_ir::ops::Axis;
use deepwell_precision::QuantFormat;
use deepwell_precision::hadamard::POINTS;

use crate::KernelError;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::nvfp4;
use crate::runtime::cuda::launch::support::grid_of;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Bytes that a thread reads at a time.
const VECTOR_BYTES: usize = 16;
/// Bytes of the result.
pub(crate) const BYTES: usize = size_of::<f32>();

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new("cuda_amax", &["amax"], prepare)
    .family(QuantFormat::NVFP4)
    .reject(|request| match request.op {
        Op::Amax(op) => nvfp4::reject(&request.operands[0], None, &op.format, op.axis),
        _ => None,
    })];

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Amax(op) = &call.call.op else {
        return Err(call.refuse(format!("expected amax, got {}", call.call.op.name())));
    };
    let steps = steps(device, &call.input(0), &op.format, op.axis, call.output(0).pointer)?;
    Ok(steps.to_vec())
}

/// Writes the amax of a matrix that is quantized along an axis.
///
/// # Errors
/// A kernel that was not compiled.
pub(crate) fn steps(
    device: &mut Device<'_>,
    x: &DeviceTensor,
    format: &QuantFormat,
    axis: Axis,
    amax: DevicePtr,
) -> Result<[Step; 2], KernelError> {
    let (element, elements) = (nvfp4::element(x.dtype), x.elements());
    let (entry, items, sizes) = match format.hadamard {
        None => {
            let entry = format!("amax_{element}");
            (entry, x.bytes().div_ceil(VECTOR_BYTES), vec![Argument::U64(elements as u64)])
        }
        Some(_) => {
            // A group lies in one row, and 16 elements are a matrix of one column.
            let columns = if axis == Axis::Column { x.shape[1].max(1) } else { 1 };
            let groups = elements / POINTS / columns;
            let sizes = [groups as u32, columns as u32, nvfp4::flags(format)];
            let entry = format!("amax_transformed_{element}");
            (entry, elements.div_ceil(POINTS), sizes.map(Argument::U32).to_vec())
        }
    };
    let function = device.function("amax", &entry, 0)?;
    let mut arguments = vec![x.argument()];
    arguments.extend(sizes);
    arguments.push(Argument::Pointer(amax));
    let ctas = grid_of(items, THREADS, device.sm_count());
    let zero = Step::Fill { target: amax, byte: 0, bytes: BYTES };
    Ok([zero, Device::launch(function, ctas, THREADS, 0, arguments)])
}

/// Writes the amax of a BF16 matrix of `groups` times 16 rows and an even number of columns to
/// `amaxes[0]`, and the amax after the transform of `format` along columns to `amaxes[1]`. Reads
/// the matrix once.
///
/// # Errors
/// A kernel that was not compiled.
pub(crate) fn steps_of_both(
    device: &mut Device<'_>,
    x: &DeviceTensor,
    groups: usize,
    format: &QuantFormat,
    amaxes: DevicePtr,
) -> Result<[Step; 2], KernelError> {
    let columns = x.shape[1];
    let function = device.function("amax", "amaxes_bf16", 0)?;
    let mut arguments = vec![x.argument()];
    arguments.extend([groups as u32, columns as u32, nvfp4::flags(format)].map(Argument::U32));
    arguments.extend([amaxes, amaxes.offset(BYTES)].map(Argument::Pointer));
    let ctas = grid_of(groups * columns / 2, THREADS, device.sm_count());
    let zero = Step::Fill { target: amaxes, byte: 0, bytes: 2 * BYTES };
    Ok([zero, Device::launch(function, ctas, THREADS, 0, arguments)])
}
