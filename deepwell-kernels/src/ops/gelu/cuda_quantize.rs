//! `gelu_quantize.cu`: the Gaussian error linear unit or its backward, in both forms, with block
//! quantization of the result.

use deepwell_ir::Op;

use crate::KernelError;
use crate::cuda::launch::row_quantize;
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::predict::roofline;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_gelu_quantize",
    ops: &["gelu", "gelu_backward"],
    epilogue: row_quantize::epilogue,
    architectures: &Architecture::ALL,
    library: None,
    reject: row_quantize::reject,
    predict: roofline,
    workspace_bytes: no_workspace,
    select_tile: None,
    prepare,
}];

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let entry = match call.call.op.leading() {
        Op::Gelu(op) if op.tanh => "gelu_tanh",
        Op::Gelu(_) => "gelu",
        Op::GeluBackward(op) if op.tanh => "gelu_tanh_backward",
        Op::GeluBackward(_) => "gelu_backward",
        _ => return Err(call.refuse("expected a gelu and its quantization")),
    };
    row_quantize::prepare(call, device, "gelu_quantize", entry, None)
}
