//! The optimizer step: its coefficients, and the update of a bucket.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("adamw_coefficients", cpu::prepare_coefficients),
        CpuKernel::new("adamw", cpu::prepare),
    ],
    cuda: &[cuda::SPECS],
};
