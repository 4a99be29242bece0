//! `amax_groups.cu`: the largest magnitude of each part of a tensor.

use deepwell_ir::ops::Axis;
use deepwell_precision::QuantFormat;

use crate::KernelError;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::nvfp4::{self, Parts};
use crate::runtime::cuda::prepare::{Device, Step};

/// Writes the amax of each part of a tensor that is quantized along an axis, FP32.
///
/// # Errors
/// A kernel that was not compiled.
pub(crate) fn steps(
    device: &mut Device<'_>,
    x: &DeviceTensor,
    parts: &Parts,
    (format, axis): (&QuantFormat, Axis),
    amaxes: DevicePtr,
) -> Result<[Step; 2], KernelError> {
    let along = if axis == Axis::Column { "column" } else { "row" };
    let entry = format!("amax_groups_{}_{along}", nvfp4::element(x.dtype));
    let shared_bytes = nvfp4::shared_bytes(x.dtype);
    let function = device.function("amax_groups", &entry, shared_bytes)?;
    let mut arguments = vec![x.argument()];
    arguments.extend(parts.arguments());
    arguments.extend(parts.sizes(format));
    arguments.push(Argument::Pointer(amaxes));
    let bytes = parts.count * super::cuda::BYTES;
    let zero = Step::Fill { target: amaxes, byte: 0, bytes };
    let launch = Device::launch(function, parts.ctas(), nvfp4::THREADS, shared_bytes, arguments);
    Ok([zero, launch])
}
