//! Where to run: `--device`.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail};

/// A device as it is named on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// The processor.
    Cpu,
    /// A GPU by its index.
    Cuda(u32),
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

impl Device {
    /// Refuses a device that this build has no backend for.
    ///
    /// # Errors
    /// Any GPU; the hint says whether there is one, and what keeps its driver from answering.
    pub(crate) fn check(self) -> Result<()> {
        let Device::Cuda(_) = self else { return Ok(()) };
        let hardware = deepwell_probe::probe();
        let found = match (&hardware.gpus_absent, hardware.gpus.first()) {
            (Some(absence), _) => {
                format!("and no GPU was found: {}\nhint: {}", absence.reason, absence.hint)
            }
            (None, Some(gpu)) => {
                format!("although this machine has {} x {}", hardware.gpus.len(), gpu.name)
            }
            (None, None) => "and no GPU was found".to_string(),
        };
        bail!(
            "device `{self}`: this build of Deepwell has no CUDA backend yet, {found}\n\
             hint: use `--device cpu`"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::Device;

    #[test]
    fn devices() {
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
}
