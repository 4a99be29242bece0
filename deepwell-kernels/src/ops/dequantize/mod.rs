//! Quantized data and scales back to high precision.

pub mod cpu;
mod cuda;
mod cuda_nvfp4;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[CpuKernel::new("dequantize", cpu::prepare)],
    cuda: &[cuda::SPECS, cuda_nvfp4::SPECS],
};
