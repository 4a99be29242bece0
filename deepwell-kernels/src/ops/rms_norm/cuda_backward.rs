//! `rms_norm_backward.cu`: gradients of the root-mean-square normalization.

use deepwell_ir::{KernelRequest, Op, Target};

use crate::KernelError;
use crate::runtime::cuda::launch::rows::{self, Backward};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const KERNEL: Backward =
    Backward { file: "rms_norm_backward", vectors: 4, gradients: 1 };

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_rms_norm_backward", &["rms_norm_backward"], prepare)
        .reject(reject)
        .workspace_bytes(workspace_bytes)];

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
