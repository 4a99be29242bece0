//! `route.cu`: the choice of experts, and the gradient through their gates.

use deepwell_ir::ops::{Route, RouteBackward, RouteScore};
use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::support::grid_of;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source: one warp per token.
const THREADS: u32 = 128;
const WARPS: u32 = THREADS / 32;
/// A lane has one bit per expert.
const EXPERTS_MAX: usize = 32 * 32;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_route", &["route"], prepare_forward).reject(reject),
    CudaKernelSpec::new("cuda_route_backward", &["route_backward"], prepare_backward)
        .reject(reject),
];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let (Op::Route(Route { experts, .. })
    | Op::RouteBackward(RouteBackward { forward: Route { experts, .. } })) = request.op
    else {
        return None;
    };
    (*experts > EXPERTS_MAX).then(|| format!("takes at most {EXPERTS_MAX} experts, not {experts}"))
}

/// Arguments of both kernels after their operands; the FP64 scaling is passed as bits.
fn settings(op: &Route, tokens: usize) -> Vec<Argument> {
    let numbers = [
        tokens,
        op.experts,
        op.top_k,
        (op.score == RouteScore::Sigmoid).into(),
        op.normalize.into(),
    ];
    let mut arguments: Vec<_> = numbers.map(|number| Argument::U32(number as u32)).to_vec();
    arguments.push(Argument::U64(op.scaling.to_bits()));
    arguments
}

/// Dynamic shared memory: FP64 numbers per warp.
fn shared_bytes(numbers: usize) -> u32 {
    WARPS * (numbers * size_of::<f64>()) as u32
}

fn prepare_forward(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Route(op) = &call.call.op else { return Err(call.refuse("expected `route`")) };
    let tokens = call.input(0).shape[0];
    let [groups, groups_chosen] = op.groups.map_or([0, 0], |groups| [groups.count, groups.chosen]);
    let bias = if op.selection_bias { call.input(1).pointer } else { DevicePtr(0) };
    let shared_bytes = shared_bytes(op.experts + groups);
    let function = device.function("route", "route", shared_bytes)?;
    let mut arguments = vec![call.input(0).argument(), Argument::Pointer(bias)];
    arguments.extend([call.output(0).argument(), call.output(1).argument()]);
    arguments.extend(settings(op, tokens));
    arguments.extend([groups, groups_chosen].map(|number| Argument::U32(number as u32)));
    let ctas = grid_of(tokens * 32, THREADS, device.sm_count());
    Ok(vec![Device::launch(function, ctas, THREADS, shared_bytes, arguments)])
}

fn prepare_backward(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let Op::RouteBackward(RouteBackward { forward: op }) = &call.call.op else {
        return Err(call.refuse("expected `route_backward`"));
    };
    let tokens = call.input(1).shape[0];
    let shared_bytes = shared_bytes(op.experts);
    let function = device.function("route", "route_backward", shared_bytes)?;
    let mut arguments: Vec<_> = (0..4).map(|index| call.operand(index).argument()).collect();
    arguments.extend(settings(op, tokens));
    let ctas = grid_of(tokens * 32, THREADS, device.sm_count());
    Ok(vec![Device::launch(function, ctas, THREADS, shared_bytes, arguments)])
}
