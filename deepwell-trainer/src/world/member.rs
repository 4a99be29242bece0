//! One rank of several processes, from start to end.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use deepwell_kernels::{ProcessComm, ProcessLimits, ProcessMonitor, TcpDoor, TcpPeer, connect_tcp};
use deepwell_probe::Hardware;

use super::Launched;
use super::heartbeat::{Heartbeat, Limits};
use crate::{Device, Settings, TrainError};

/// Time limit for the ranks of a run to start.
const START: Duration = Duration::from_secs(300);
/// Time limit for rank 0 to read the data of a run, while it sends heartbeats.
const READY: Duration = Duration::from_secs(24 * 3600);

/// One rank of several processes, started by a launcher.
///
/// Rank 0 sends the id for connecting the library once the folder is claimed and the data are read.
/// The other ranks wait for the id, so that no work is done twice.
pub struct Member {
    launched: Launched,
    heartbeat: Heartbeat,
    /// Timeout for waiting on another rank.
    exchange: Duration,
    /// Id with which the library connects, on every rank except the first.
    id: OnceLock<Vec<u8>>,
    /// Monitor of ranks that are processes on processors.
    processes: OnceLock<ProcessMonitor>,
}

impl Member {
    /// Finds the other ranks; `exchange` is the longest wait in a collective.
    ///
    /// # Errors
    /// No library connects such devices; or rank 0 cannot be reached.
    pub fn find(
        launched: Launched,
        device: Device,
        exchange: Duration,
    ) -> Result<Member, TrainError> {
        let found = library_version(device);
        let library = found.as_deref().unwrap_or("no library that connects ranks");
        let versions = format!("deepwell {}, {library}", env!("CARGO_PKG_VERSION"));
        let heartbeat = Heartbeat::open(&launched, START, Limits::of(exchange), &versions)?;
        let member = Member {
            launched,
            heartbeat,
            exchange,
            id: OnceLock::new(),
            processes: OnceLock::new(),
        };
        // Inform the other ranks of a missing library.
        member.told(found.map(drop))?;
        Ok(member)
    }

    /// Counter of the collective operations that this rank has begun.
    pub(crate) fn begun(&self) -> Arc<AtomicU64> {
        self.heartbeat.begun()
    }

    /// Whether this is the rank that prints for all.
    pub fn is_first(&self) -> bool {
        self.launched.is_first()
    }

    pub(crate) fn world_size(&self) -> usize {
        self.launched.world_size as usize
    }

    /// Index among the ranks of the same machine.
    pub(crate) fn local_rank(&self) -> usize {
        self.launched.local_rank
    }

    /// Selects this rank's GPU: the GPU of the settings plus the local rank. If the launcher shows
    /// each process a single GPU, the launcher has selected it. CPUs are shared.
    pub(crate) fn take_device(&self, settings: &mut Settings, hardware: &Hardware) {
        let Device::Cuda(first) = settings.device else { return };
        let shown = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let shown = shown_gpus(shown.as_deref(), hardware.gpus.len());
        let behind = if shown == 1 { 0 } else { self.launched.local_rank };
        settings.device = Device::Cuda(first + behind);
    }

    /// Waits until rank 0 is ready.
    ///
    /// # Errors
    /// A rank has failed, or rank 0 is not ready in time.
    pub(crate) fn wait_for_first(&self) -> Result<(), TrainError> {
        if !self.is_first() && self.id.get().is_none() {
            let id = self.heartbeat.id(READY)?;
            self.id.get_or_init(|| id);
        }
        Ok(())
    }

    /// Says goodbye to the other ranks.
    ///
    /// # Errors
    /// On processors, a rank has failed or does not end.
    pub fn finish(&self) -> Result<(), TrainError> {
        if let Some(monitor) = self.processes.get() {
            self.told(monitor.finish(self.exchange).map_err(TrainError::from))?;
        }
        self.heartbeat.finish();
        Ok(())
    }

    /// Informs the other ranks of an error. The error of the rank that failed first counts.
    pub fn told<T>(&self, result: Result<T, TrainError>) -> Result<T, TrainError> {
        let error = match result {
            Ok(done) => return Ok(done),
            Err(told @ TrainError::Rank { .. }) => return Err(told),
            Err(error) => error,
        };
        let Launched { rank: own, world_size, .. } = self.launched;
        self.heartbeat.fail(&error.to_string());
        match self.heartbeat.failure() {
            Some((rank, reason)) if rank != own => {
                Err(TrainError::of_rank(rank, world_size, reason))
            }
            _ => Err(TrainError::Rank {
                rank: own as usize,
                world_size: world_size as usize,
                source: Box::new(error),
            }),
        }
    }

    /// Whether another process prints why the ranks have failed.
    pub fn is_reported_by_first(&self) -> bool {
        !self.is_first() && self.heartbeat.is_told()
    }
}

/// Version of the library that connects such devices. Checked before any long work, because nothing
/// works without it.
pub fn library_version(device: Device) -> Result<String, TrainError> {
    match device {
        Device::Cuda(_) => nccl_version(),
        Device::Cpu | Device::Emulated(_) => Ok(processes_version()),
    }
}

#[cfg(feature = "cuda")]
fn nccl_version() -> Result<String, TrainError> {
    let version = deepwell_kernels::cuda::nccl_version();
    Ok(format!("NCCL {}", version.map_err(deepwell_kernels::KernelError::from)?))
}

/// Without CUDA nothing is checked.
#[cfg(not(feature = "cuda"))]
fn nccl_version() -> Result<String, TrainError> {
    Ok("no CUDA".to_string())
}

/// The program may be linked with MPI.
#[cfg(feature = "mpi")]
fn processes_version() -> String {
    format!("sockets or {}", deepwell_kernels::mpi_version())
}

#[cfg(not(feature = "mpi"))]
fn processes_version() -> String {
    "sockets".to_string()
}

/// Number of a machine's GPUs that are visible to a process.
fn shown_gpus(variable: Option<&str>, there: usize) -> usize {
    let listed = |list: &str| list.split(',').filter(|name| !name.trim().is_empty()).count();
    variable.map_or(there, listed)
}

#[cfg(feature = "cuda")]
impl Member {
    /// Connects the GPUs of all ranks.
    ///
    /// # Errors
    /// The library is missing, ranks are missing or have failed, or two ranks use one GPU.
    pub(crate) fn connect(
        &self,
        driver: &deepwell_kernels::cuda::CudarcDriver,
    ) -> Result<deepwell_kernels::cuda::NcclRank, TrainError> {
        use deepwell_kernels::KernelError;
        use deepwell_kernels::cuda::{NcclId, NcclLimits, NcclRank};

        let id = if self.is_first() {
            let id = NcclId::new().map_err(KernelError::from)?;
            self.heartbeat.publish(&id.to_bytes(), START)?;
            id
        } else {
            self.wait_for_first()?;
            let bytes = self.id.get().and_then(|id| id.as_slice().try_into().ok());
            NcclId::from_bytes(bytes.ok_or_else(|| TrainError::Setting {
                setting: "rank 0",
                expected: format!("an id of {} bytes", NcclId::BYTES),
                got: "another length".to_string(),
                hint: Some("start every rank with the same version".to_string()),
            })?)
        };
        let rank_and_size = (self.launched.rank, self.launched.world_size);
        let limits = NcclLimits { connect: START, exchange: self.exchange };
        let failure = || self.heartbeat.failure();
        let rank = NcclRank::connect(driver, id, rank_and_size, limits, &failure)
            .map_err(KernelError::from)?;
        let monitor = rank.monitor();
        self.heartbeat.on_failure(move |rank, reason| monitor.abort(rank, reason));
        Ok(rank)
    }
}

impl Member {
    /// Connects the processes of all ranks: by MPI if the program is linked with MPI and mpirun or
    /// srun has started the ranks, otherwise by TCP.
    ///
    /// # Errors
    /// Ranks are missing or have failed, or MPI does not know the launcher.
    pub(crate) fn connect_processes(&self) -> Result<ProcessComm, TrainError> {
        let limits = ProcessLimits { connect: START, exchange: self.exchange };
        let comm = match cfg!(feature = "mpi") && !self.launched.is_by_torchrun() {
            true => self.connect_by_mpi(limits)?,
            false => self.connect_by_tcp(limits)?,
        };
        let monitor = comm.monitor();
        self.processes.get_or_init(|| monitor.clone());
        self.heartbeat.on_failure(move |rank, reason| monitor.abort(rank, reason));
        Ok(comm)
    }

    fn connect_by_tcp(&self, limits: ProcessLimits) -> Result<ProcessComm, TrainError> {
        let peer = if self.is_first() {
            let door = TcpDoor::open()?;
            self.heartbeat.publish(&door.id(), START)?;
            TcpPeer::First(door)
        } else {
            self.wait_for_first()?;
            let id = self.id.get().map(Vec::as_slice).unwrap_or_default();
            TcpPeer::Other { address: &self.launched.address, id }
        };
        let rank_and_size = (self.launched.rank, self.launched.world_size);
        Ok(connect_tcp(peer, rank_and_size, limits, &|| self.heartbeat.failure())?)
    }

    #[cfg(feature = "mpi")]
    fn connect_by_mpi(&self, limits: ProcessLimits) -> Result<ProcessComm, TrainError> {
        // MPI connects by itself; the other ranks only wait until rank 0 is ready.
        if self.is_first() {
            self.heartbeat.publish(b"MPI", START)?;
        } else {
            self.wait_for_first()?;
        }
        let rank_and_size = (self.launched.rank, self.launched.world_size);
        let failure = || self.heartbeat.failure();
        Ok(deepwell_kernels::connect_mpi(rank_and_size, limits, &failure)?)
    }

    /// Without MPI, processes are connected by TCP.
    #[cfg(not(feature = "mpi"))]
    fn connect_by_mpi(&self, limits: ProcessLimits) -> Result<ProcessComm, TrainError> {
        self.connect_by_tcp(limits)
    }
}

#[cfg(test)]
mod tests {
    use super::shown_gpus;

    #[test]
    fn gpus_that_a_process_sees() {
        for (variable, expected) in [
            (None, 4),
            (Some("3"), 1),
            (Some("0,1"), 2),
            (Some("GPU-ab, GPU-cd"), 2),
            (Some(""), 0),
        ] {
            assert_eq!(shown_gpus(variable, 4), expected, "{variable:?}");
        }
    }
}
