//! `quantize_nvfp4_groups.cu`: block quantization to NVFP4 of stacks of matrices and of groups of
//! rows, after a pass over the source for the largest magnitude of each.

use deepwell_ir::ops::Axis;
use deepwell_ir::{KernelRequest, Op};
use deepwell_precision::QuantFormat;

use crate::KernelError;
use crate::ops::amax::cuda as amax;
use crate::ops::amax::cuda_groups;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::mx;
use crate::runtime::cuda::launch::nvfp4::{self, Parts};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_quantize_nvfp4_groups", &["quantize"], prepare)
        .family(QuantFormat::NVFP4)
        .reject(|request| {
            let Op::Quantize(op) = request.op else { return None };
            let after = request.operands[..request.input_count].get(1);
            nvfp4::reject_parts(&request.operands[0], after, &op.format, op.axis)
        })
        .predict(nvfp4::predicted_s)
        .workspace_bytes(|request, _| amax::BYTES * parts_of(request))];

/// Number of parts with a tensor scale.
fn parts_of(request: &KernelRequest<'_>) -> usize {
    match request.operands[..request.input_count].get(1) {
        Some(offsets) => offsets.shape[0].saturating_sub(1),
        None => request.operands[0].shape[0],
    }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Quantize(op) = &call.call.op else {
        return Err(call.refuse("expected a quantization"));
    };
    let x = call.input(0);
    let offsets = (call.call.input_count > 1).then(|| call.input(1));
    let Some(parts) = Parts::of(&x, offsets.as_ref()) else {
        return Err(call.refuse("expected groups of rows or a stack of matrices"));
    };
    if parts.count == 0 {
        return Err(call.refuse("expected at least one group or matrix"));
    }
    let amaxes = call.workspace().0;
    let mut steps = cuda_groups::steps(device, &x, &parts, (&op.format, op.axis), amaxes)?.to_vec();
    let none = [Argument::Pointer(DevicePtr(0)); 3];
    let planes = |first: usize| [0, 1, 2].map(|plane| call.output(first + plane).argument());
    let (by_row, by_column) = match op.axis {
        Axis::Row => (planes(0), none),
        Axis::Column => (none, planes(0)),
        Axis::Both => (planes(0), planes(3)),
    };
    let entry = format!("quantize_nvfp4_groups_{}_{}", nvfp4::element(x.dtype), op.axis.name());
    let shared_bytes = nvfp4::shared_bytes(x.dtype);
    let function = device.function("quantize_nvfp4_groups", &entry, shared_bytes)?;
    let mut arguments = vec![x.argument(), Argument::Pointer(amaxes)];
    arguments.extend(parts.arguments());
    arguments.extend(by_row.into_iter().chain(by_column));
    arguments.extend(parts.sizes(&op.format));
    arguments.extend([mx::totals(device, 1)?, call.output(call.output_count() - 1).argument()]);
    steps.push(Device::launch(function, parts.ctas(), nvfp4::THREADS, shared_bytes, arguments));
    Ok(steps)
}
