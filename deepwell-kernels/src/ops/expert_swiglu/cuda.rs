//! `expert_swiglu.cu`: the gated activation of experts times the router's gates, and its backward.

use deepwell_ir::ops::ExpertActivation;
use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::row_lanes::{RowLanes, THREADS};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_expert_swiglu", &["expert_swiglu"], prepare_forward)
        .reject(|request| all_bf16(request, &[0, 1, 5])),
    CudaKernelSpec::new(
        "cuda_expert_swiglu_backward",
        &["expert_swiglu_backward"],
        prepare_backward,
    )
    .reject(reject_backward),
];

fn reject_backward(request: &KernelRequest<'_>) -> Option<String> {
    all_bf16(request, &[0, 1, 2, 6, 7])
}

/// Returns an activation's infix in kernel names, and its two parameters.
pub(super) fn activation(activation: ExpertActivation) -> (&'static str, [Argument; 2]) {
    let (name, [alpha, limit]) = match activation {
        ExpertActivation::SwiGlu => ("", [0.0, 0.0]),
        ExpertActivation::ClampedSwiGlu { alpha, limit } => ("_clamped", [alpha, limit]),
    };
    (name, [Argument::F32(alpha as f32), Argument::F32(limit as f32)])
}

fn prepare_forward(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::ExpertSwiGlu(op) = &call.call.op else {
        return Err(call.refuse("expected `expert_swiglu`"));
    };
    let (name, numbers) = activation(op.activation);
    let gate = call.input(0);
    let (rows, columns) = (gate.shape[0], gate.shape[1]);
    let RowLanes { ctas, lanes, suffix } = RowLanes::new(rows, columns, device.sm_count());
    let entry = format!("expert_swiglu{name}{suffix}");
    let function = device.function("expert_swiglu", &entry, 0)?;
    // All operands except the pairs' rows.
    let mut arguments: Vec<_> =
        [0, 1, 2, 4, 5].map(|index| call.operand(index).argument()).to_vec();
    arguments.extend([rows as u32, columns as u32, lanes].map(Argument::U32));
    arguments.extend(numbers);
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}

fn prepare_backward(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let Op::ExpertSwiGluBackward(op) = &call.call.op else {
        return Err(call.refuse("expected `expert_swiglu_backward`"));
    };
    let (name, numbers) = activation(op.activation);
    let (dout, gates) = (call.input(0), call.input(3));
    let (rows, columns) = (dout.shape[0], dout.shape[1]);
    let RowLanes { ctas, lanes, suffix } = RowLanes::new(rows, columns, device.sm_count());
    let entry = format!("expert_swiglu{name}_backward{suffix}");
    let function = device.function("expert_swiglu", &entry, 0)?;
    let mut arguments: Vec<_> = (0..9).map(|index| call.operand(index).argument()).collect();
    let sizes = [rows as u32, columns as u32, gates.elements() as u32, lanes];
    arguments.extend(sizes.map(Argument::U32));
    arguments.extend(numbers);
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
