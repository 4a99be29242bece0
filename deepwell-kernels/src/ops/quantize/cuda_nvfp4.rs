//! `quantize_nvfp4.cu`: block quantization to NVFP4, after a pass over the source for its largest
//! magnitude, unless the call has this.

use deepwell_ir::Op;
use deepwell_ir::ops::Axis;
use deepwell_precision::QuantFormat;

use crate::KernelError;
use crate::ops::amax::cuda as amax;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::{mx, nvfp4};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_quantize_nvfp4", &["quantize"], prepare)
        .family(QuantFormat::NVFP4)
        .reject(|request| {
            let Op::Quantize(op) = request.op else { return None };
            let (x, after) = (&request.operands[0], request.operands.get(1));
            let after = after.filter(|_| request.input_count > 1);
            nvfp4::reject(x, after, &op.format, op.axis)
        })
        .predict(nvfp4::predicted_s)
        .workspace_bytes(|_, _| amax::BYTES)];

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Quantize(op) = &call.call.op else {
        return Err(call.refuse("expected a quantization"));
    };
    let x = call.input(0);
    let &[rows, columns] = x.shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let mut steps = Vec::with_capacity(3);
    let largest = match call.call.input_count {
        1 => {
            let largest = call.workspace().0;
            steps.extend(amax::steps(device, &x, &op.format, op.axis, largest)?);
            largest
        }
        _ => call.input(1).pointer,
    };
    let none = [Argument::Pointer(DevicePtr(0)); 3];
    let planes = |first: usize| [0, 1, 2].map(|plane| call.output(first + plane).argument());
    let (by_row, by_column) = match op.axis {
        Axis::Row => (planes(0), none),
        Axis::Column => (none, planes(0)),
        Axis::Both => (planes(0), planes(3)),
    };
    let entry = format!("quantize_nvfp4_{}_{}", nvfp4::element(x.dtype), op.axis.name());
    let shared_bytes = nvfp4::shared_bytes(x.dtype);
    let function = device.function("quantize_nvfp4", &entry, shared_bytes)?;
    let mut arguments = vec![x.argument(), Argument::Pointer(largest)];
    arguments.extend(by_row.into_iter().chain(by_column));
    let sizes = [rows as u32, columns as u32, nvfp4::flags(&op.format)];
    arguments.extend(sizes.map(Argument::U32));
    arguments.extend([mx::totals(device, 1)?, call.output(call.output_count() - 1).argument()]);
    let ctas = nvfp4::ctas(rows, columns);
    steps.push(Device::launch(function, ctas, nvfp4::THREADS, shared_bytes, arguments));
    Ok(steps)
}
