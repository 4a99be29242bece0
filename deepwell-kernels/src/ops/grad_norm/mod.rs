//! Global norm of all gradients.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels =
    OpKernels { cpu: &[CpuKernel::new("grad_norm", cpu::prepare)], cuda: &[cuda::SPECS] };
