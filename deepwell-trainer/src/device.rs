//! Device of a model: `cpu`, `cuda[:N]` or `emulated:ARCH`, on one rank or several.

use std::fmt;
use std::str::FromStr;

use deepwell_ir::{KernelCatalog, Target};
use deepwell_kernels::cuda::{Architecture, COLLECTIVES, CUBLASLT, CudaCatalog, cuda_target};
use deepwell_kernels::{Backend, Comm, CpuBackend, CpuCatalog, cpu_target};
use deepwell_probe::{Gpu, Hardware};
use serde::{Deserialize, Serialize};

use crate::TrainError;

/// A device, as named on the command line.
///
/// ```
/// use deepwell_trainer::Device;
/// assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
/// assert_eq!("cuda:3".parse(), Ok(Device::Cuda(3)));
/// assert!("emulated:sm90".parse::<Device>().is_ok());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// This machine's CPU.
    #[default]
    Cpu,
    /// A GPU by its index in the CUDA driver.
    Cuda(usize),
    /// A GPU of an architecture, emulated on this machine's CPU: for models of a few thousand
    /// parameters. A missing synchronization in a kernel is an error of the step. The
    /// `DEEPWELL_EMULATOR_` variables of [`deepwell_kernels::cuda`] control how kernels run.
    Emulated(Architecture),
}

/// SMs of an emulated GPU: few, because each holds CTAs that run in turns.
const EMULATED_SM_COUNT: u32 = 4;

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
            Device::Emulated(architecture) => write!(f, "emulated:{}", architecture.short_name()),
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Device, String> {
        match text {
            "cpu" => Some(Device::Cpu),
            "cuda" => Some(Device::Cuda(0)),
            _ => match text.split_once(':') {
                Some(("cuda", index)) => index.parse().ok().map(Device::Cuda),
                Some(("emulated", name)) => Architecture::of_short_name(name).map(Device::Emulated),
                _ => None,
            },
        }
        .ok_or_else(|| {
            let known = Architecture::ALL.map(|known| Device::Emulated(known).to_string());
            format!("expected `cpu`, `cuda`, `cuda:N` or one of {}, got `{text}`", known.join(", "))
        })
    }
}

impl TryFrom<String> for Device {
    type Error = String;

    fn try_from(text: String) -> Result<Device, String> {
        text.parse()
    }
}

impl From<Device> for String {
    fn from(device: Device) -> String {
        device.to_string()
    }
}

/// A catalog shared between threads.
pub type Catalog = Box<dyn KernelCatalog + Send + Sync>;

/// A device ready to run programs.
pub struct OpenDevice {
    /// Runs calls.
    pub backend: Box<dyn Backend>,
    /// The available kernels.
    pub catalog: Catalog,
    /// Target of lowered programs.
    pub target: Target,
}

impl Device {
    /// Returns the kernels for this kind of device; for a GPU, tables of measured times select
    /// among them.
    pub fn catalog(self) -> Catalog {
        match self {
            Device::Cpu => Box::new(CpuCatalog),
            Device::Cuda(_) => Box::new(crate::tuned::tuned_catalog()),
            Device::Emulated(_) => Box::new(CudaCatalog),
        }
    }

    /// Returns the lowering target for this device of `hardware`, without opening the device.
    ///
    /// # Errors
    /// [`TrainError::Setting`] if `hardware` has no such GPU, or no kernel supports the GPU.
    pub fn target(self, hardware: &Hardware) -> Result<Target, TrainError> {
        let index = match self {
            Device::Cpu => return Ok(cpu_target(rayon::current_num_threads())),
            Device::Cuda(index) => index,
            Device::Emulated(architecture) => {
                let target = cuda_target(architecture, EMULATED_SM_COUNT as usize, &[]);
                return Ok(Target { gpu: None, ..target });
            }
        };
        let Some(gpu) = hardware.gpus.get(index) else { return Err(self.absent(hardware)) };
        let architecture = architecture_of(gpu).ok_or_else(|| TrainError::Setting {
            setting: "device",
            expected: format!(
                "a GPU of {}",
                Architecture::ALL.map(Architecture::target_name).join(", ")
            ),
            got: format!("`{self}`, {} of {}", gpu.name, gpu.arch),
            hint: Some("use `--device cpu`".to_string()),
        })?;
        let sm_count = gpu.sm_count.unwrap_or(0) as usize;
        let target = cuda_target(architecture, sm_count, &[CUBLASLT]);
        Ok(Target { gpu: Some(index), gpu_name: Some(gpu.name.clone()), ..target })
    }

    /// The error for a missing GPU: the devices found, and a remedy.
    fn absent(self, hardware: &Hardware) -> TrainError {
        let (got, hint) = match &hardware.gpus_absent {
            Some(absence) => (absence.reason.clone(), absence.hint.clone()),
            None => {
                let there: Vec<String> = (hardware.gpus.iter().enumerate())
                    .map(|(index, gpu)| format!("`cuda:{index}` ({})", gpu.name))
                    .collect();
                (format!("{} GPUs", there.len()), format!("use {}", there.join(" or ")))
            }
        };
        TrainError::Setting {
            setting: "device",
            expected: format!("a GPU for `{self}`"),
            got,
            hint: Some(format!("{hint}; `--device cpu` needs none")),
        }
    }

    /// Opens the device.
    ///
    /// # Errors
    /// No such GPU, no driver, an outdated driver, or a build without CUDA or without the emulator.
    pub fn open(self, hardware: &Hardware) -> Result<OpenDevice, TrainError> {
        let target = self.target(hardware)?;
        let backend: Box<dyn Backend> = match self {
            Device::Cpu => Box::new(CpuBackend::new()),
            Device::Cuda(_) => return open_cuda(self, hardware),
            Device::Emulated(architecture) => open_emulated(architecture, None)?,
        };
        Ok(OpenDevice { backend, catalog: self.catalog(), target })
    }
}

impl Device {
    /// Returns the lowering target for one rank of several.
    ///
    /// # Errors
    /// As [`Device::target`].
    pub(crate) fn target_of_rank(self, hardware: &Hardware) -> Result<Target, TrainError> {
        Ok(self.among_ranks(self.target(hardware)?))
    }

    /// Adds the collectives library of this kind of device to a target.
    pub fn among_ranks(self, mut target: Target) -> Target {
        if self != Device::Cpu {
            target.libraries.push(COLLECTIVES.to_string());
        }
        target
    }

    /// Checks that ranks on this kind of device can be threads of one process.
    ///
    /// # Errors
    /// [`TrainError::Setting`] for GPUs.
    pub(crate) fn check_ranks(self) -> Result<(), TrainError> {
        match self {
            Device::Cpu | Device::Emulated(_) => Ok(()),
            Device::Cuda(_) => Err(needs_processes(self)),
        }
    }

    /// Opens the device for one of several ranks in this process.
    ///
    /// # Errors
    /// As [`Device::open`] and [`Device::check_ranks`].
    pub(crate) fn open_rank(
        self,
        hardware: &Hardware,
        comm: Box<dyn Comm>,
    ) -> Result<OpenDevice, TrainError> {
        self.check_ranks()?;
        let target = self.target_of_rank(hardware)?;
        let backend: Box<dyn Backend> = match self {
            Device::Cpu => Box::new(CpuBackend::new().with_comm(comm)),
            Device::Emulated(architecture) => open_emulated(architecture, Some(comm))?,
            Device::Cuda(_) => return Err(needs_processes(self)),
        };
        Ok(OpenDevice { backend, catalog: self.catalog(), target })
    }
}

fn needs_processes(got: Device) -> TrainError {
    TrainError::Setting {
        setting: "devices",
        expected: "`cpu:N` or `emulated:ARCH:N`, whose ranks are threads of one process"
            .to_string(),
        got: format!("`{got}`"),
        hint: Some(
            "a GPU is a process's own: `deepwell train --devices cuda:0,cuda:1` starts one for \
             each, `--launched` is one that torchrun, mpirun or srun has started"
                .to_string(),
        ),
    }
}

#[cfg(feature = "cuda")]
impl Device {
    /// The driver of a GPU.
    ///
    /// # Errors
    /// As [`Device::open`]; the device is not a GPU.
    pub(crate) fn open_driver(self) -> Result<deepwell_kernels::cuda::CudarcDriver, TrainError> {
        match self {
            Device::Cuda(index) => Ok(deepwell_kernels::cuda::CudarcDriver::open(index)
                .map_err(deepwell_kernels::KernelError::from)?),
            _ => Err(TrainError::Setting {
                setting: "device",
                expected: "a GPU".to_string(),
                got: format!("`{self}`"),
                hint: None,
            }),
        }
    }

    /// Opens a GPU with an open driver; with `comm`, as one of several ranks.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub(crate) fn with_driver(
        self,
        hardware: &Hardware,
        driver: deepwell_kernels::cuda::CudarcDriver,
        comm: Option<Box<dyn deepwell_kernels::cuda::DeviceComm>>,
    ) -> Result<OpenDevice, TrainError> {
        use deepwell_kernels::KernelError;
        use deepwell_kernels::cuda::{CublasLt, CudaBackend, KernelImages};

        let blas = CublasLt::open(&driver).map_err(KernelError::from)?;
        let images = KernelImages::discover();
        let backend = CudaBackend::new(Box::new(driver), Some(Box::new(blas)), images)?;
        let (backend, target) = match comm {
            None => (backend, self.target(hardware)?),
            Some(comm) => (backend.with_comm(comm), self.target_of_rank(hardware)?),
        };
        Ok(OpenDevice { backend: Box::new(backend), catalog: self.catalog(), target })
    }
}

/// Devices of a run's ranks, as named on the command line.
///
/// ```
/// use deepwell_trainer::{Device, Devices};
/// assert_eq!("cpu:4".parse(), Ok(Devices { device: Device::Cpu, ranks: 4 }));
/// assert_eq!("cuda:1".parse(), Ok(Devices { device: Device::Cuda(1), ranks: 1 }));
/// assert_eq!("cuda:0,cuda:1".parse(), Ok(Devices { device: Device::Cuda(0), ranks: 2 }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Devices {
    /// Device of each rank; for GPUs the first of consecutive GPUs.
    pub device: Device,
    /// Number of ranks.
    pub ranks: usize,
}

impl FromStr for Devices {
    type Err = String;

    fn from_str(text: &str) -> Result<Devices, String> {
        if let Some((first, others)) = text.split_once(',') {
            let gpu = |text: &str| match text.trim().parse() {
                Ok(Device::Cuda(index)) => Some(index),
                _ => None,
            };
            let all: Option<Vec<usize>> =
                [first].into_iter().chain(others.split(',')).map(gpu).collect();
            return match all {
                Some(all) if all.windows(2).all(|pair| pair[0] + 1 == pair[1]) => {
                    Ok(Devices { device: Device::Cuda(all[0]), ranks: all.len() })
                }
                _ => Err(format!("expected GPUs in a row, `cuda:0,cuda:1`, got `{text}`")),
            };
        }
        let several = text.rsplit_once(':').and_then(|(device, ranks)| {
            let device: Device = device.parse().ok()?;
            let ranks = ranks.parse().ok()?;
            (!matches!(device, Device::Cuda(_))).then_some(Devices { device, ranks })
        });
        match several {
            Some(Devices { ranks: 0, .. }) => {
                return Err("expected at least 1 rank, got 0".to_string());
            }
            Some(devices) => return Ok(devices),
            None => {}
        }
        let device = text.parse().map_err(|error| format!("{error}; or `cpu:N` for N ranks"))?;
        Ok(Devices { device, ranks: 1 })
    }
}

fn architecture_of(gpu: &Gpu) -> Option<Architecture> {
    Architecture::of_capability(gpu.compute_capability)
}

#[cfg(feature = "cuda")]
fn open_cuda(device: Device, hardware: &Hardware) -> Result<OpenDevice, TrainError> {
    device.with_driver(hardware, device.open_driver()?, None)
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(device: Device, _hardware: &Hardware) -> Result<OpenDevice, TrainError> {
    Err(TrainError::Setting {
        setting: "device",
        expected: "`cpu`: this build has no CUDA".to_string(),
        got: format!("`{device}`"),
        hint: Some("build with the feature `cuda`, which is on by default".to_string()),
    })
}

#[cfg(feature = "emulated")]
fn open_emulated(
    architecture: Architecture,
    comm: Option<Box<dyn Comm>>,
) -> Result<Box<dyn Backend>, TrainError> {
    use deepwell_kernels::KernelError;
    use deepwell_kernels::cuda::emulator::launch::Settings;
    use deepwell_kernels::cuda::{CudaBackend, EmulatedDriver, KernelImages};

    let settings = Settings { sm_count: EMULATED_SM_COUNT, ..Settings::default() };
    let driver =
        EmulatedDriver::from_environment(architecture, settings).map_err(KernelError::from)?;
    let images = KernelImages::discover().into_ptx();
    let comm = comm.map(|comm| driver.comm(comm));
    let backend = CudaBackend::new(Box::new(driver), None, images)?;
    Ok(match comm {
        None => Box::new(backend),
        Some(comm) => Box::new(backend.with_comm(Box::new(comm))),
    })
}

#[cfg(not(feature = "emulated"))]
fn open_emulated(
    architecture: Architecture,
    _comm: Option<Box<dyn Comm>>,
) -> Result<Box<dyn Backend>, TrainError> {
    Err(TrainError::Setting {
        setting: "device",
        expected: "`cpu` or `cuda`: this build has no emulator".to_string(),
        got: format!("`{}`", Device::Emulated(architecture)),
        hint: Some("build with the feature `emulated`, which is on by default".to_string()),
    })
}

#[cfg(test)]
mod tests {
    use deepwell_kernels::cuda::Architecture;
    use deepwell_probe::Hardware;

    use super::Device;

    #[test]
    fn names() {
        let check = |text: &str, expected: Option<Device>| {
            assert_eq!(text.parse::<Device>().ok(), expected);
        };
        check("cpu", Some(Device::Cpu));
        check("cuda", Some(Device::Cuda(0)));
        check("cuda:7", Some(Device::Cuda(7)));
        for architecture in Architecture::ALL {
            let device = Device::Emulated(architecture);
            check(&device.to_string(), Some(device));
        }
        check("emulated:sm100", Some(Device::Emulated(Architecture::Sm100a)));
        for refused in ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "CUDA", "emulated:"] {
            check(refused, None);
        }
        check("emulated", None);
        check("emulated:sm_100a", None);
    }

    #[test]
    fn targets() {
        let h200 = Hardware::preset("h200-x2").unwrap();
        let target = Device::Cuda(1).target(&h200).unwrap();
        assert_eq!((target.arch.as_str(), target.workers), ("hopper-sm90", 132));
        assert_eq!(target.gpu, Some(1));
        let emulated = Device::Emulated(Architecture::Sm100a).target(&h200).unwrap();
        assert_eq!((emulated.arch.as_str(), emulated.workers), ("blackwell-sm100", 4));
        assert!(emulated.libraries.is_empty() && emulated.gpu.is_none());
        let check = |device: Device, hardware: &Hardware, expected: &str| {
            let error = device.target(hardware).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(
            Device::Cuda(2),
            &h200,
            "got 2 GPUs\nhint: use `cuda:0` (NVIDIA H200) or `cuda:1` (NVIDIA H200); `--device",
        );
        let mut none = h200.clone();
        none.gpus.clear();
        none.gpus_absent = Some(deepwell_probe::Absence {
            reason: "libcuda.so.1 was not found".to_string(),
            hint: "install the driver".to_string(),
        });
        check(Device::Cuda(0), &none, "libcuda.so.1 was not found");
        let mut old = h200;
        old.gpus[0].compute_capability = (8, 0);
        check(Device::Cuda(0), &old, "expected a GPU of hopper-sm90");
    }
}
