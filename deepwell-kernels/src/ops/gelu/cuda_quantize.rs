//! `gelu_quantize.cu`: the Gaussian error linear unit or its backward, in both forms, and the block
//! quantization of the result.

use deepwell_ir::Op;

use crate::KernelError;
use crate::cuda::launch::elementwise_quantize;
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_gelu_quantize",
    ops: &["gelu_quantize", "gelu_backward_quantize"],
    architectures: &Architecture::ALL,
    library: None,
    reject: elementwise_quantize::reject,
    workspace_bytes: no_workspace,
    select_tile: None,
    prepare,
}];

fn producer(op: &Op) -> Option<&Op> {
    match op {
        Op::WithQuantize(op) => Some(&op.producer),
        _ => None,
    }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let entry = match producer(&call.call.op) {
        Some(Op::Gelu(op)) if op.tanh => "gelu_tanh",
        Some(Op::Gelu(_)) => "gelu",
        Some(Op::GeluBackward(op)) if op.tanh => "gelu_tanh_backward",
        Some(Op::GeluBackward(_)) => "gelu_backward",
        _ => return Err(call.refuse("expected a gelu and its quantization")),
    };
    elementwise_quantize::prepare(call, device, "gelu_quantize", entry)
}
