//! One rank of several processes, from its start to its end.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use deepwell_probe::Hardware;

use super::Launched;
use super::lifeline::{Lifeline, Limits};
use crate::{Device, Settings, TrainError};

/// How long the ranks of a run may take to start.
const START: Duration = Duration::from_secs(300);
/// How long rank 0 may read the data of a run, while it gives signs of life.
const READY: Duration = Duration::from_secs(24 * 3600);

/// One rank of several processes, which a launcher has started.
///
/// Rank 0 is ready when it gives the others the id by which their library connects: it has claimed
/// the folder and read the data then. The others wait for that, so that nothing is made twice.
pub(crate) struct Member {
    launched: Launched,
    lifeline: Lifeline,
    /// How long a rank waits for another.
    #[cfg_attr(not(any(feature = "cuda", feature = "mpi")), allow(dead_code))]
    exchange: Duration,
    /// By which the library connects, on every rank but the first.
    id: OnceLock<Vec<u8>>,
    /// Of ranks that MPI has connected.
    #[cfg(feature = "mpi")]
    mpi: OnceLock<deepwell_kernels::MpiMonitor>,
}

impl Member {
    /// Finds the other ranks, which wait so long for each other in an exchange.
    ///
    /// # Errors
    /// No library that connects such devices; a rank 0 that cannot be reached.
    pub(crate) fn find(
        launched: Launched,
        device: Device,
        exchange: Duration,
    ) -> Result<Member, TrainError> {
        let found = library_version(device);
        let library = found.as_deref().unwrap_or("no library that connects ranks");
        let versions = format!("deepwell {}, {library}", env!("CARGO_PKG_VERSION"));
        let lifeline = Lifeline::open(&launched, START, Limits::of(exchange), &versions)?;
        let member = Member {
            launched,
            lifeline,
            exchange,
            id: OnceLock::new(),
            #[cfg(feature = "mpi")]
            mpi: OnceLock::new(),
        };
        // The others hear of a library that is missing here.
        member.told(found.map(drop))?;
        Ok(member)
    }

    /// Counts what this rank has begun of what all ranks do.
    #[cfg_attr(not(any(feature = "cuda", feature = "mpi")), allow(dead_code))]
    pub(crate) fn begun(&self) -> Arc<AtomicU64> {
        self.lifeline.begun()
    }

    /// Whether this is the rank that speaks for all.
    pub(crate) fn is_first(&self) -> bool {
        self.launched.is_first()
    }

    pub(crate) fn world_size(&self) -> usize {
        self.launched.world_size as usize
    }

    /// Gives this rank a GPU of its own: as far behind that of the settings as it is behind the
    /// first rank of its machine. A launcher that shows each process one GPU has chosen already.
    /// Processors are shared.
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
    /// A rank that has failed, or a rank 0 that is not ready in time.
    pub(crate) fn wait_for_first(&self) -> Result<(), TrainError> {
        if !self.is_first() && self.id.get().is_none() {
            let id = self.lifeline.id(READY)?;
            self.id.get_or_init(|| id);
        }
        Ok(())
    }

    /// Says goodbye to the others.
    ///
    /// # Errors
    /// Of ranks that MPI has connected, one that has failed or does not come to the end.
    pub(crate) fn finish(&self) -> Result<(), TrainError> {
        #[cfg(feature = "mpi")]
        if let Some(monitor) = self.mpi.get() {
            self.told(monitor.finish(self.exchange).map_err(TrainError::from))?;
        }
        self.lifeline.finish();
        Ok(())
    }

    /// Tells the others of an error. The error that counts is that of the rank which failed first.
    pub(crate) fn told<T>(&self, result: Result<T, TrainError>) -> Result<T, TrainError> {
        let error = match result {
            Ok(done) => return Ok(done),
            Err(told @ TrainError::Rank { .. }) => return Err(told),
            Err(error) => error,
        };
        let Launched { rank: own, world_size, .. } = self.launched;
        self.lifeline.fail(&error.to_string());
        match self.lifeline.failure() {
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

    /// Whether another process says to people why the ranks have failed.
    pub(crate) fn is_said_by_first(&self) -> bool {
        !self.is_first() && self.lifeline.is_told()
    }
}

/// The library that connects such devices. Without it nothing could follow, so it is looked for
/// before anything that takes long.
pub(crate) fn library_version(device: Device) -> Result<String, TrainError> {
    match device {
        Device::Cuda(_) => nccl_version(),
        Device::Cpu | Device::Emulated(_) => mpi_version(device),
    }
}

#[cfg(feature = "cuda")]
fn nccl_version() -> Result<String, TrainError> {
    let version = deepwell_kernels::cuda::nccl_version();
    Ok(format!("NCCL {}", version.map_err(deepwell_kernels::KernelError::from)?))
}

/// Without CUDA there is nothing to look for.
#[cfg(not(feature = "cuda"))]
fn nccl_version() -> Result<String, TrainError> {
    Ok("no CUDA".to_string())
}

/// This program has been linked with it.
#[cfg(feature = "mpi")]
fn mpi_version(_device: Device) -> Result<String, TrainError> {
    Ok(deepwell_kernels::mpi_version())
}

#[cfg(not(feature = "mpi"))]
fn mpi_version(device: Device) -> Result<String, TrainError> {
    Err(TrainError::Setting {
        setting: "launched",
        expected: "a GPU for each rank, `--device cuda`, or a build with the feature `mpi`"
            .to_string(),
        got: format!("`{device}`"),
        hint: Some(
            "without it ranks of a processor are threads of one process: `--devices cpu:4`"
                .to_string(),
        ),
    })
}

/// How many of a machine's GPUs a process sees.
fn shown_gpus(variable: Option<&str>, there: usize) -> usize {
    let listed = |list: &str| list.split(',').filter(|name| !name.trim().is_empty()).count();
    variable.map_or(there, listed)
}

#[cfg(feature = "cuda")]
impl Member {
    /// Connects the GPUs of all ranks.
    ///
    /// # Errors
    /// No library, ranks that do not come or have failed, two ranks on one GPU.
    pub(crate) fn connect(
        &self,
        driver: &deepwell_kernels::cuda::CudarcDriver,
    ) -> Result<deepwell_kernels::cuda::NcclRank, TrainError> {
        use deepwell_kernels::KernelError;
        use deepwell_kernels::cuda::{NcclId, NcclLimits, NcclRank};

        let id = if self.is_first() {
            let id = NcclId::new().map_err(KernelError::from)?;
            self.lifeline.publish(&id.to_bytes(), START)?;
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
        let place = (self.launched.rank, self.launched.world_size);
        let limits = NcclLimits { connect: START, exchange: self.exchange };
        let failure = || self.lifeline.failure();
        let rank =
            NcclRank::connect(driver, id, place, limits, &failure).map_err(KernelError::from)?;
        let monitor = rank.monitor();
        self.lifeline.on_failure(move |rank, reason| monitor.abort(rank, reason));
        Ok(rank)
    }
}

#[cfg(feature = "mpi")]
impl Member {
    /// Connects the processes of all ranks.
    ///
    /// # Errors
    /// Ranks that do not come or have failed, a launcher that MPI knows nothing of.
    pub(crate) fn connect_processes(&self) -> Result<deepwell_kernels::MpiComm, TrainError> {
        use deepwell_kernels::{MpiComm, MpiLimits};

        // They connect by themselves; what the others wait for is that rank 0 is ready.
        if self.is_first() {
            self.lifeline.publish(b"MPI", START)?;
        } else {
            self.wait_for_first()?;
        }
        let place = (self.launched.rank, self.launched.world_size);
        let limits = MpiLimits { connect: START, exchange: self.exchange };
        let comm = MpiComm::connect(place, limits, &|| self.lifeline.failure())?;
        let monitor = comm.monitor();
        self.mpi.get_or_init(|| monitor.clone());
        self.lifeline.on_failure(move |rank, reason| monitor.abort(rank, reason));
        Ok(comm)
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
