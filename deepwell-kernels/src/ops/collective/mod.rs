//! Collectives, run by a [`Comm`](crate::Comm) or a device's
//! [`DeviceComm`](crate::cuda::DeviceComm).

mod cpu;
mod cuda;
pub mod oracle;

use deepwell_ir::ops::Collective;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new(Collective::NAMES[0], cpu::prepare),
        CpuKernel::new(Collective::NAMES[1], cpu::prepare),
        CpuKernel::new(Collective::NAMES[2], cpu::prepare),
        CpuKernel::new(Collective::NAMES[3], cpu::prepare),
        CpuKernel::new(Collective::NAMES[4], cpu::prepare),
        CpuKernel::new(Collective::NAMES[5], cpu::prepare),
        CpuKernel::new(Collective::NAMES[6], cpu::prepare),
        CpuKernel::new(Collective::NAMES[7], cpu::prepare),
    ],
    cuda: &[cuda::SPECS],
};
