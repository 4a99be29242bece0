//! Root-mean-square normalization, optionally of a sum with a residual, and its backward.

pub mod cpu;
mod cuda;
pub(super) mod cuda_backward;
mod cuda_quantize;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("rms_norm", cpu::prepare_forward),
        CpuKernel::new("add_rms_norm", cpu::prepare_add),
        CpuKernel::new("rms_norm_backward", cpu::prepare_backward)
            .scratch(cpu::backward_workspace_bytes),
    ],
    cuda: &[cuda::SPECS, cuda_backward::SPECS, cuda_quantize::SPECS],
};
