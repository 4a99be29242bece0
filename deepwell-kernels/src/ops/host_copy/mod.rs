//! Copies of offloaded state between a device and its host.

mod cpu;
mod cuda;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels =
    OpKernels { cpu: &[CpuKernel::new("host_copy", cpu::prepare)], cuda: &[cuda::SPECS] };
