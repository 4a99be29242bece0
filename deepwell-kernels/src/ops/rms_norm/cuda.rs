//! `rms_norm.cu`: root-mean-square normalization, optionally of a sum.

use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::runtime::cuda::launch::rows;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_rms_norm", &["rms_norm", "add_rms_norm"], prepare).reject(reject)];

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
