//! `swiglu.cu`: the gated activation and its backward.

use deepwell_ir::KernelRequest;

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::{all_bf16, grid_of};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Elements that a thread processes at a time.
const WIDTH: usize = 8;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_swiglu", &["swiglu"], |call, device| {
        prepare(call, device, "swiglu_bf16")
    })
    .reject(|request| all_bf16(request, &[0, 1, 2])),
    CudaKernelSpec::new("cuda_swiglu_backward", &["swiglu_backward"], |call, device| {
        prepare(call, device, "swiglu_backward_bf16")
    })
    .reject(reject_backward),
];

fn reject_backward(request: &KernelRequest<'_>) -> Option<String> {
    all_bf16(request, &[0, 1, 2, 3, 4])
}

/// Arguments are the operands in the op's order, then the number of elements.
fn prepare(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    entry: &str,
) -> Result<Vec<Step>, KernelError> {
    let elements = call.input(0).elements();
    let function = device.function("swiglu", entry, 0)?;
    let ctas = grid_of(elements.div_ceil(WIDTH), THREADS, device.sm_count());
    let operands = 0..call.call.operands.len();
    let mut arguments: Vec<_> = operands.map(|index| call.operand(index).argument()).collect();
    arguments.push(Argument::U64(elements as u64));
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
