//! Where a model runs: `cpu` or `cuda[:N]`.

use std::fmt;
use std::str::FromStr;

use deepwell_ir::{KernelCatalog, Target};
use deepwell_kernels::cuda::{Architecture, CUBLASLT, CudaCatalog, cuda_target};
use deepwell_kernels::{Backend, CpuBackend, CpuCatalog, cpu_target};
use deepwell_probe::{Gpu, Hardware};
use serde::{Deserialize, Serialize};

use crate::TrainError;

/// A device as people name it.
///
/// ```
/// use deepwell_trainer::Device;
/// assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
/// assert_eq!("cuda:3".parse(), Ok(Device::Cuda(3)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// This machine's processor.
    #[default]
    Cpu,
    /// A GPU by the index that the CUDA driver gives it.
    Cuda(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Device, String> {
        match text {
            "cpu" => Some(Device::Cpu),
            "cuda" => Some(Device::Cuda(0)),
            _ => text.strip_prefix("cuda:").and_then(|i| i.parse().ok()).map(Device::Cuda),
        }
        .ok_or_else(|| format!("expected `cpu`, `cuda` or `cuda:N`, got `{text}`"))
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

/// A catalog that threads may share.
pub type Catalog = Box<dyn KernelCatalog + Send + Sync>;

/// A device that is ready to run programs.
pub struct OpenDevice {
    /// Runs calls.
    pub backend: Box<dyn Backend>,
    /// Which kernels there are.
    pub catalog: Catalog,
    /// What programs are lowered for.
    pub target: Target,
}

impl Device {
    /// The kernels of this kind of device.
    pub fn catalog(self) -> Catalog {
        match self {
            Device::Cpu => Box::new(CpuCatalog),
            Device::Cuda(_) => Box::new(CudaCatalog),
        }
    }

    /// What programs for this device of `hardware` are lowered for; nothing is opened.
    ///
    /// # Errors
    /// [`TrainError::Setting`] when `hardware` has no such GPU, or no kernel runs on it.
    pub fn target(self, hardware: &Hardware) -> Result<Target, TrainError> {
        let Device::Cuda(index) = self else {
            return Ok(cpu_target(rayon::current_num_threads()));
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
        let multiprocessors = gpu.multiprocessors.unwrap_or(0) as usize;
        Ok(cuda_target(architecture, multiprocessors, &[CUBLASLT]))
    }

    /// The error for a GPU that is not there: what was found instead, and what to do.
    fn absent(self, hardware: &Hardware) -> TrainError {
        let (got, hint) = match &hardware.gpus_absent {
            Some(absence) => (absence.reason.clone(), absence.hint.clone()),
            None => {
                let last = hardware.gpus.len().saturating_sub(1);
                (format!("{} GPUs", hardware.gpus.len()), format!("use `cuda:0` to `cuda:{last}`"))
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
    /// No such GPU, no driver, a driver that is too old, or a build without CUDA.
    pub fn open(self, hardware: &Hardware) -> Result<OpenDevice, TrainError> {
        let target = self.target(hardware)?;
        let backend: Box<dyn Backend> = match self {
            Device::Cpu => Box::new(CpuBackend::new()),
            Device::Cuda(index) => open_cuda(index)?,
        };
        Ok(OpenDevice { backend, catalog: self.catalog(), target })
    }
}

fn architecture_of(gpu: &Gpu) -> Option<Architecture> {
    Architecture::of_capability(gpu.compute_capability)
}

#[cfg(feature = "cuda")]
fn open_cuda(index: usize) -> Result<Box<dyn Backend>, TrainError> {
    use deepwell_kernels::KernelError;
    use deepwell_kernels::cuda::{CublasLt, CudaBackend, CudarcDriver, KernelImages};

    let driver = CudarcDriver::open(index).map_err(KernelError::from)?;
    let blas = CublasLt::open(&driver).map_err(KernelError::from)?;
    let images = KernelImages::discover();
    Ok(Box::new(CudaBackend::new(Box::new(driver), Some(Box::new(blas)), images)?))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(index: usize) -> Result<Box<dyn Backend>, TrainError> {
    Err(TrainError::Setting {
        setting: "device",
        expected: "`cpu`: this build has no CUDA".to_string(),
        got: format!("`cuda:{index}`"),
        hint: Some("build with the feature `cuda`, which is on by default".to_string()),
    })
}

#[cfg(test)]
mod tests {
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
        for refused in ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "CUDA"] {
            check(refused, None);
        }
    }

    #[test]
    fn targets() {
        let h200 = Hardware::preset("h200-x2").unwrap();
        let target = Device::Cuda(1).target(&h200).unwrap();
        assert_eq!((target.arch.as_str(), target.workers), ("hopper-sm90", 132));
        let check = |device: Device, hardware: &Hardware, expected: &str| {
            let error = device.target(hardware).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(Device::Cuda(2), &h200, "use `cuda:0` to `cuda:1`");
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
