//! The error of a quantized GEMM on one tile of its output: samples of the unquantized operands,
//! and the product of the quantized operands beside the product of the samples.

mod cpu;
mod cuda;
pub mod oracle;
mod window;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("sample_operand", cpu::prepare_sample),
        CpuKernel::new("product_error", cpu::prepare_error).scratch(cpu::workspace_bytes),
    ],
    cuda: &[cuda::SPECS],
};
