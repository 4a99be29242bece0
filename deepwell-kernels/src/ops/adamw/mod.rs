//! The optimizer step: AdamW coefficients, and the update of a bucket including copies of its
//! weights.

pub mod bf16;
pub mod cpu;
mod cuda;
pub mod fp8;
pub mod oracle;
mod single;
mod squares;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("adamw_coefficients", cpu::prepare_coefficients),
        CpuKernel::new("adamw", cpu::prepare),
    ],
    cuda: &[cuda::SPECS],
};
