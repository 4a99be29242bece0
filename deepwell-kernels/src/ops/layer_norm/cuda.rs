//! `layer_norm.cu`: layer normalization, optionally of a sum.

use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::runtime::cuda::launch::rows;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_layer_norm", &["layer_norm", "add_layer_norm"], prepare)
        .reject(reject)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let statistics: &[usize] = match request.op {
        Op::AddLayerNorm(_) => &[6, 7],
        _ => &[4, 5],
    };
    rows::reject(request, statistics)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (entry, eps) = match &call.call.op {
        Op::LayerNorm(op) => ("layer_norm", op.eps),
        Op::AddLayerNorm(op) => ("add_layer_norm", op.eps),
        _ => return Err(call.refuse("expected a normalization")),
    };
    rows::prepare_forward(call, device, rows::matrix_of(call)?, "layer_norm", entry, eps)
}
