//! `layer_norm_backward.cu`: gradients of the layer normalization.

use deepwell_ir::{KernelRequest, Op, Target};

use crate::KernelError;
use crate::runtime::cuda::launch::rows::{self, Backward};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

const KERNEL: Backward = Backward { file: "layer_norm_backward", vectors: 2, gradients: 2 };

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_layer_norm_backward", &["layer_norm_backward"], prepare)
        .reject(reject)
        .workspace_bytes(workspace_bytes)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let residual = matches!(request.op, Op::LayerNormBackward(op) if op.residual);
    let f32s: &[usize] = if residual { &[3, 4, 7, 8] } else { &[3, 4, 6, 7] };
    rows::reject(request, f32s)
}

fn workspace_bytes(request: &KernelRequest<'_>, target: &Target) -> usize {
    KERNEL.workspace_bytes(&request.operands[0].shape, target.workers)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::LayerNormBackward(op) = &call.call.op else {
        return Err(call.refuse("expected the backward of a normalization"));
    };
    KERNEL.prepare(call, device, rows::matrix_of(call)?, op.residual)
}
