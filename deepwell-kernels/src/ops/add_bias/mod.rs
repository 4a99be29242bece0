//! A bias added to each row. The op `bias_grad` computes its gradient.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels =
    OpKernels { cpu: &[CpuKernel::new("add_bias", cpu::prepare)], cuda: &[cuda::SPECS] };
