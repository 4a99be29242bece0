//! The largest magnitude of a tensor: see `deepwell_ir::ops::Amax`.

mod cpu;
pub(crate) mod cuda;
pub(crate) mod cuda_groups;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels =
    OpKernels { cpu: &[CpuKernel::new("amax", cpu::prepare)], cuda: &[cuda::SPECS] };
