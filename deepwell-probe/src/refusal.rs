//! What keeps a machine from training, with what to do about it.

use serde::{Deserialize, Serialize};

use crate::software::DRIVER;
use crate::{Gpu, Hardware, Library};

/// Something that must be put right before the machine, or one of its GPUs, is of use.
///
/// What only makes it slower, or leaves a figure unknown, is a note and no fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// What is wrong.
    pub reason: String,
    /// What to do about it.
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
    /// Why training on the GPUs of this machine would be refused; empty without GPUs.
    ///
    /// A driver that is too old or does not answer, GPUs in MIG mode, NVLinks that are down or
    /// reach nobody, and memory errors that wait for a repair.
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
