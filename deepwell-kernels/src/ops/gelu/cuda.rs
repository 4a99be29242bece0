//! `gelu.cu`: the Gaussian error linear unit and its backward, in both forms.

use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::{all_bf16, grid_of};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Elements that a thread processes at a time.
const WIDTH: usize = 8;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_gelu", &["gelu", "gelu_backward"], prepare).reject(reject)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let operands: Vec<usize> = (0..request.operands.len()).collect();
    all_bf16(request, &operands)
}

/// Arguments are the operands in the op's order, then the number of elements.
fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let entry = match &call.call.op {
        Op::Gelu(op) if op.tanh => "gelu_tanh_bf16",
        Op::Gelu(_) => "gelu_bf16",
        Op::GeluBackward(op) if op.tanh => "gelu_tanh_backward_bf16",
        Op::GeluBackward(_) => "gelu_backward_bf16",
        _ => return Err(call.refuse("expected a gelu")),
    };
    let elements = call.input(0).elements();
    let function = device.function("gelu", entry, 0)?;
    let ctas = grid_of(elements.div_ceil(WIDTH), THREADS, device.sm_count());
    let operands = 0..call.call.operands.len();
    let mut arguments: Vec<_> = operands.map(|index| call.operand(index).argument()).collect();
    arguments.push(Argument::U64(elements as u64));
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
