//! `rms_norm_backward.cu`: gradients of the root-mean-square normalization.

use deepwell_ir::{KernelRequest, Op, Target};

use crate::KernelError;
use crate::cuda::launch::rows::{self, Backward};
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec};
use crate::epilogue::no_epilogue;
use crate::predict::roofline;

pub(crate) const KERNEL: Backward =
    Backward { file: "rms_norm_backward", vectors: 4, gradients: 1 };

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_rms_norm_backward",
    ops: &["rms_norm_backward"],
    epilogue: no_epilogue,
    architectures: &Architecture::ALL,
    library: None,
    reject,
    predict: roofline,
    workspace_bytes,
    select_tile: None,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let residual = matches!(request.op, Op::RmsNormBackward(op) if op.residual);
    let f32s: &[usize] = if residual { &[3, 6] } else { &[3, 5] };
    rows::reject(request, f32s)
}

fn workspace_bytes(request: &KernelRequest<'_>, target: &Target) -> usize {
    KERNEL.workspace_bytes(&request.operands[0].shape, target.workers)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::RmsNormBackward(op) = &call.call.op else {
        return Err(call.refuse("expected the backward of a normalization"));
    };
    KERNEL.prepare(call, device, rows::matrix_of(call)?, op.residual)
}
