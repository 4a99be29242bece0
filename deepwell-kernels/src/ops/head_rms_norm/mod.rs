//! Root-mean-square normalization of each head, and its backward.

mod cpu;
mod cuda;

use super::OpKernels;
use super::rms_norm::cpu as rms_norm;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("head_rms_norm", rms_norm::prepare_forward),
        CpuKernel::new("head_rms_norm_backward", rms_norm::prepare_backward)
            .scratch(cpu::backward_workspace_bytes),
    ],
    cuda: &[cuda::SPECS],
};
