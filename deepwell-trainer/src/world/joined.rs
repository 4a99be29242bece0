//! A rank of a multi-process run, connected to the other ranks on its device.

use deepwell_plan::usable_bytes;
use deepwell_probe::Hardware;

use super::Member;
use crate::device::OpenDevice;
use crate::peers::Peers;
use crate::{CompileOptions, Device, TrainError};

/// Inputs of a rank for planning and loading its program.
pub(super) struct Joined {
    pub(super) rank: usize,
    /// Exchanges tensors with the devices of other ranks.
    pub(super) device: OpenDevice,
    pub(super) peers: Peers,
    /// Free bytes of the device's memory.
    pub(super) free_bytes: u64,
}

#[cfg(feature = "cuda")]
impl Joined {
    /// Connects a rank on a GPU, by NCCL.
    ///
    /// # Errors
    /// No such GPU; ranks are missing or have failed; two ranks use one GPU.
    pub(super) fn gpu(
        member: &Member,
        hardware: &Hardware,
        options: &CompileOptions,
    ) -> Result<Joined, TrainError> {
        use deepwell_kernels::KernelError;
        use deepwell_kernels::cuda::DeviceComm;

        let driver = options.device.open_driver()?;
        let nccl = member.connect(&driver)?;
        let ranks = options.parallel.ranks(nccl.rank() as usize);
        nccl.join(&ranks.groups).map_err(KernelError::from)?;
        let peers = Peers::of(Box::new(nccl.host().map_err(KernelError::from)?));
        let peers = peers.counting_in(member.begun());
        // The free memory before this process: a prediction includes the context and NCCL.
        let target = options.device.target(hardware)?;
        let gpu = target.gpu.and_then(|index| hardware.gpus.get(index));
        let free_bytes = gpu.map_or(0, |gpu| gpu.memory_free_bytes);
        let is_single = options.parallel.is_single();
        let comm = (!is_single).then(|| Box::new(nccl.device()) as Box<dyn DeviceComm>);
        let device = options.device.with_driver(hardware, driver, comm)?;
        Ok(Joined { rank: nccl.rank() as usize, device, peers, free_bytes })
    }
}

#[cfg(not(feature = "cuda"))]
impl Joined {
    /// Without CUDA, GPUs cannot be connected.
    pub(super) fn gpu(
        _member: &Member,
        hardware: &Hardware,
        options: &CompileOptions,
    ) -> Result<Joined, TrainError> {
        Err(options.device.open(hardware).err().unwrap_or_else(|| TrainError::Setting {
            setting: "launched",
            expected: "a build with the feature `cuda`".to_string(),
            got: format!("`{}`", options.device),
            hint: None,
        }))
    }
}

impl Joined {
    /// Connects a rank on a CPU, by TCP or by MPI.
    ///
    /// # Errors
    /// Ranks are missing or have failed.
    pub(super) fn processor(
        member: &Member,
        hardware: &Hardware,
        options: &CompileOptions,
    ) -> Result<Joined, TrainError> {
        use deepwell_kernels::Comm;

        let comm = member.connect_processes()?;
        let rank = comm.rank() as usize;
        let peers = Peers::of(Box::new(comm.clone())).counting_in(member.begun());
        let device = options.device.open_rank(hardware, Box::new(comm))?;
        Ok(Joined { rank, device, peers, free_bytes: hardware.cpu.memory_available_bytes })
    }
}

/// Bytes that every rank may use, of the free bytes and the local rank of each rank: first and last
/// of the words. A GPU has one rank; the ranks of a machine share the memory of its CPU.
pub(super) fn limit_bytes(device: Device, all: &[Vec<u64>]) -> u64 {
    let least_bytes = all.iter().filter_map(|words| words.first()).min().copied();
    let ranks_of_machine = match device {
        Device::Cuda(_) => 1,
        Device::Cpu | Device::Emulated(_) => {
            1 + all.iter().filter_map(|words| words.last()).max().copied().unwrap_or(0)
        }
    };
    usable_bytes(least_bytes.unwrap_or(0)) / ranks_of_machine
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every process planned for the whole memory of its machine.
    #[test]
    fn ranks_of_a_machine_share_its_memory() {
        let check = |device: &str, ranks: &[[u64; 2]], expected: u64| {
            let all: Vec<Vec<u64>> = ranks.iter().map(|&[free, at]| vec![free, 0, at]).collect();
            assert_eq!(limit_bytes(device.parse().unwrap(), &all), expected, "{device} {ranks:?}");
        };
        check("cpu", &[[1000, 0]], 980);
        check("cpu", &[[1000, 0], [1000, 1]], 490);
        // Two machines with two ranks each.
        check("cpu", &[[1000, 0], [900, 1], [800, 0], [850, 1]], 392);
        check("emulated:sm90", &[[1000, 0], [1000, 1]], 490);
        check("cuda:0", &[[1000, 0], [500, 1]], 490);
        check("cpu", &[], 0);
    }
}
