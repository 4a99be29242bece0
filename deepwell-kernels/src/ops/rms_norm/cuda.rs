//! `rms_norm.cu`: root-mean-square normalization, optionally of a sum.

use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::cuda::launch::rows;
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::epilogue::no_epilogue;
use crate::predict::roofline;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_rms_norm",
    ops: &["rms_norm", "add_rms_norm"],
    epilogue: no_epilogue,
    architectures: &Architecture::ALL,
    library: None,
    reject,
    predict: roofline,
    workspace_bytes: no_workspace,
    select_tile: None,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let statistics: &[usize] = match request.op {
        Op::AddRmsNorm(_) => &[5],
        _ => &[3],
    };
    rows::reject(request, statistics)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (entry, eps) = match &call.call.op {
        Op::RmsNorm(op) => ("rms_norm", op.eps),
        Op::AddRmsNorm(op) => ("add_rms_norm", op.eps),
        _ => return Err(call.refuse("expected a normalization")),
    };
    rows::prepare_forward(call, device, rows::matrix_of(call)?, "rms_norm", entry, eps)
}
