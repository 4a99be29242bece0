//! Stochastic rounding of a quantized operand's elements.

pub mod cpu;
mod cuda;
mod cuda_nvfp4;
mod cuda_nvfp4_groups;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[CpuKernel::new("stochastic_round", cpu::prepare).scratch(cpu::workspace_bytes)],
    cuda: &[cuda::SPECS, cuda_nvfp4::SPECS, cuda_nvfp4_groups::SPECS],
};
