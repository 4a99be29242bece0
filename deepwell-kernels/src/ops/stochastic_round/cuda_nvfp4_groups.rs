//! `stochastic_round_nvfp4_groups.cu`: stochastic rounding of an NVFP4 operand's elements with a
//! tensor scale for each group of rows, after a pass over the source for their largest magnitudes.

use deepwell_ir::ops::StochasticRound;
use deepwell_ir::{KernelRequest, Op};
use deepwell_precision::QuantFormat;

use crate::KernelError;
use crate::ops::amax::cuda as amax;
use crate::ops::amax::cuda_groups;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::nvfp4::{self, Parts};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_stochastic_round_nvfp4_groups", &["stochastic_round"], prepare)
        .family(QuantFormat::NVFP4)
        .reject(reject)
        .predict(nvfp4::predicted_s)
        .workspace_bytes(workspace_bytes)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::StochasticRound(op) = request.op else { return None };
    if op.columns.is_some() {
        return Some("takes whole tensors, not a part of the columns".to_string());
    }
    let Some(after) = request.operands[..request.input_count].get(op.key_input() + 1) else {
        return Some("takes groups of rows, not a whole matrix".to_string());
    };
    nvfp4::reject_parts(&request.operands[0], Some(after), &op.format, op.axis)
}

fn workspace_bytes(request: &KernelRequest<'_>, _: &deepwell_ir::Target) -> usize {
    let Op::StochasticRound(op) = request.op else { return 0 };
    let offsets = &request.operands[op.key_input() + 1];
    amax::BYTES * offsets.shape[0].saturating_sub(1)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::StochasticRound(op) = &call.call.op else {
        return Err(call.refuse("expected a rounding at random"));
    };
    let (x, offsets) = (call.input(0), call.input(op.key_input() + 1));
    let Some(parts) = Parts::of(&x, Some(&offsets)).filter(|parts| parts.count > 0) else {
        return Err(call.refuse("expected at least one group of rows of a matrix"));
    };
    let amaxes = call.workspace().0;
    let mut steps = cuda_groups::steps(device, &x, &parts, (&op.format, op.axis), amaxes)?.to_vec();
    let element = nvfp4::element(x.dtype);
    let entry = format!("stochastic_round_nvfp4_groups_{element}_{}", op.axis.name());
    let shared_bytes = nvfp4::shared_bytes(x.dtype);
    let function = device.function("stochastic_round_nvfp4_groups", &entry, shared_bytes)?;
    let mut arguments = vec![x.argument(), Argument::Pointer(amaxes)];
    arguments.extend(parts.arguments());
    arguments.extend([call.input(op.key_input()).argument(), call.output(0).argument()]);
    arguments.extend(parts.sizes(&op.format));
    arguments.push(Argument::U64(StochasticRound::stream(&call.call.name)));
    steps.push(Device::launch(function, parts.ctas(), nvfp4::THREADS, shared_bytes, arguments));
    Ok(steps)
}
