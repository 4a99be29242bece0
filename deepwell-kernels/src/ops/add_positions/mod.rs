//! Learned positions added to each token, and the gradient of their table.

pub mod cpu;
pub(crate) mod cuda;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("add_positions", cpu::prepare_forward),
        CpuKernel::new("add_positions_backward", cpu::prepare_backward),
        CpuKernel::new("add_positions_of_part", cpu::prepare_forward),
        CpuKernel::new("add_positions_of_part_backward", cpu::prepare_backward),
    ],
    cuda: &[cuda::SPECS],
};
