//! Faults that prevent training, with fixes.

use serde::{Deserialize, Serialize};

use crate::software::DRIVER;
use crate::{Gpu, Hardware, Library};

/// A fault that must be fixed before the machine, or a GPU, is usable.
///
/// A problem that only slows the machine down, or leaves a figure unknown, is a note instead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Description of the fault.
    pub reason: String,
    /// How to fix it.
    pub fix: String,
}

impl Fault {
    pub(crate) fn new(reason: impl Into<String>, fix: impl Into<String>) -> Fault {
        Fault { reason: reason.into(), fix: fix.into() }
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}; fix: {}", self.reason, self.fix)
    }
}

impl Hardware {
    /// Reasons why training on the GPUs of this machine is refused; empty without GPUs.
    ///
    /// A driver that is too old or does not answer, GPUs in MIG mode, NVLinks that are down or
    /// reach no GPU, and memory errors that await a repair.
    ///
    /// ```
    /// use deepwell_probe::Hardware;
    ///
    /// let mut hardware = Hardware::preset("h200-x2")?;
    /// assert!(hardware.refusals().is_empty());
    /// hardware.gpus[1].mig = Some(true);
    /// assert!(hardware.refusals()[0].fix.contains("-mig 0"));
    /// # Ok::<(), deepwell_probe::ProbeError>(())
    /// ```
    pub fn refusals(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        if self.gpus.is_empty() {
            return faults;
        }
        if let Library::TooOld { hint, .. } | Library::Unusable { hint, .. } = &self.software.driver
        {
            let reason = format!("{}: {}", DRIVER.name, self.software.driver);
            faults.push(Fault::new(reason, hint.clone()));
        }
        for gpu in &self.gpus {
            let of_gpu = |fault: Fault| Fault {
                reason: format!("gpu{}: {}", gpu.index, fault.reason),
                fix: fault.fix,
            };
            faults.extend(mig_fault(gpu).map(of_gpu));
            faults.extend(gpu.faults.iter().cloned().map(of_gpu));
        }
        faults
    }
}

fn mig_fault(gpu: &Gpu) -> Option<Fault> {
    let fix =
        format!("stop what runs on it and turn MIG off: `sudo nvidia-smi -i {} -mig 0`", gpu.index);
    (gpu.mig == Some(true)).then(|| Fault::new("divided into MIG instances", fix))
}
