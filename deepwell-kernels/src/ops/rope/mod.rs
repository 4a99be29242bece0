//! Rotary position embedding, and the inverse rotation.

pub mod cpu;
mod cuda;
mod cuda_partial;
mod cuda_quantize;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("rope", cpu::prepare).scratch(cpu::workspace_bytes),
        CpuKernel::new("rope_backward", cpu::prepare).scratch(cpu::workspace_bytes),
        CpuKernel::new("rope_of_part", cpu::prepare).scratch(cpu::workspace_bytes),
        CpuKernel::new("rope_by_table", cpu::prepare_by_table),
    ],
    cuda: &[cuda::SPECS, cuda_partial::SPECS, cuda_quantize::SPECS],
};
