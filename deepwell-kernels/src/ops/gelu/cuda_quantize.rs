//! `gelu_quantize.cu`: the Gaussian error linear unit or its backward, in both forms, with block
//! quantization of the result.

use deepwell_ir::Op;

use crate::KernelError;
use crate::runtime::cuda::launch::row_quantize;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_gelu_quantize", &["gelu", "gelu_backward"], prepare)
        .epilogue(row_quantize::epilogue)
        .reject(row_quantize::reject)];

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
