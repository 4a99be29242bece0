//! The optimizer step of all parameters.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels =
    OpKernels { cpu: &[CpuKernel::new("adamw", cpu::prepare)], cuda: &[cuda::SPECS] };
