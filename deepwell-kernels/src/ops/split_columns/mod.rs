//! Splits a matrix into two side by side, and joins the two.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("split_columns", cpu::prepare_split),
        CpuKernel::new("join_columns", cpu::prepare_join),
    ],
    cuda: &[cuda::SPECS],
};
