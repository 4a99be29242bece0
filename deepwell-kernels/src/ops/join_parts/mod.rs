//! Contiguous parts of a matrix, placed side by side.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels =
    OpKernels { cpu: &[CpuKernel::new("join_parts", cpu::prepare)], cuda: &[cuda::SPECS] };
