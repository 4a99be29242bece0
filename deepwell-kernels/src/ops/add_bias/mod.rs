//! A bias added to each row. Its gradient is that of `bias_grad`.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels =
    OpKernels { cpu: &[CpuKernel::new("add_bias", cpu::prepare)], cuda: &[cuda::SPECS] };
