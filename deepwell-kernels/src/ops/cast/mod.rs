//! Change of storage type.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels =
    OpKernels { cpu: &[CpuKernel::new("cast", cpu::prepare)], cuda: &[cuda::SPECS] };
