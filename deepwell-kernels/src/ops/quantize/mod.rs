//! Block quantization along one or both axes.

pub mod cpu;
mod cuda;
mod cuda_nvfp4;
mod cuda_nvfp4_groups;
mod cuda_nvfp4_operands;
pub(crate) mod nvfp4;
pub(crate) mod packed;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[CpuKernel::new("quantize", cpu::prepare)],
    cuda: &[cuda::SPECS, cuda_nvfp4::SPECS, cuda_nvfp4_groups::SPECS, cuda_nvfp4_operands::SPECS],
};
