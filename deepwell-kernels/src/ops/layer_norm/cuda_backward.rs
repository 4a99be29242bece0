//! `layer_norm_backward.cu`: gradients of the layer normalization.

use deepwell_ir::{KernelRequest, Op, Target};

use crate::KernelError;
use crate::cuda::launch::rows::{self, Backward};
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec};
use crate::epilogue::no_epilogue;
use crate::predict::roofline;

const KERNEL: Backward = Backward { file: "layer_norm_backward", vectors: 2, gradients: 2 };

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_layer_norm_backward",
    ops: &["layer_norm_backward"],
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
