//! `stochastic_round_nvfp4.cu`: stochastic rounding of an NVFP4 operand's elements, after a pass
//! over the source for its largest magnitude, unless the call has this.

use deepwell_ir::Op;
use deepwell_ir::ops::{Axis, StochasticRound};
use deepwell_precision::QuantFormat;

use super::cpu::words_of_part;
use crate::KernelError;
use crate::ops::amax::cuda as amax;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::nvfp4;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_stochastic_round_nvfp4", &["stochastic_round"], prepare)
        .family(QuantFormat::NVFP4)
        .reject(|request| {
            let Op::StochasticRound(op) = request.op else { return None };
            let after = op.key_input() + 1;
            let after = request.operands[..request.input_count].get(after);
            nvfp4::reject(&request.operands[0], after, &op.format, op.axis)
        })
        .predict(nvfp4::predicted_s)
        .workspace_bytes(|_, _| amax::BYTES)];

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::StochasticRound(op) = &call.call.op else {
        return Err(call.refuse("expected a rounding at random"));
    };
    let x = call.input(0);
    let &[rows, columns] = x.shape.as_slice() else {
        return Err(call.refuse("expected a matrix"));
    };
    let mut steps = Vec::with_capacity(3);
    let after_key = op.key_input() + 1;
    let largest = match call.call.input_count > after_key {
        true => call.input(after_key).pointer,
        false => {
            let largest = call.workspace().0;
            steps.extend(amax::steps(device, &x, &op.format, op.axis, largest)?);
            largest
        }
    };
    let k = if op.axis == Axis::Column { rows } else { columns };
    let whole = (0, k as u64);
    let (first, stride) =
        op.columns.map_or(whole, |part| words_of_part(part, [rows, columns], op.axis));
    let entry = format!("stochastic_round_nvfp4_{}_{}", nvfp4::element(x.dtype), op.axis.name());
    let shared_bytes = nvfp4::shared_bytes(x.dtype);
    let function = device.function("stochastic_round_nvfp4", &entry, shared_bytes)?;
    let arguments = vec![
        x.argument(),
        Argument::Pointer(largest),
        call.input(op.key_input()).argument(),
        call.output(0).argument(),
        Argument::U32(rows as u32),
        Argument::U32(columns as u32),
        Argument::U32(nvfp4::flags(&op.format)),
        Argument::U64(StochasticRound::stream(&call.call.name)),
        Argument::U64(first),
        Argument::U64(stride),
    ];
    let ctas = nvfp4::ctas(rows, columns);
    steps.push(Device::launch(function, ctas, nvfp4::THREADS, shared_bytes, arguments));
    Ok(steps)
}
