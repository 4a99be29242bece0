//! What a driver answers, as plain data: the seam between asking and understanding.

use crate::{Absence, NvLinkDomain, PcieMeet};

/// Somebody who can say which GPUs are here.
///
/// The management library is one; a recording is another.
pub(crate) trait GpuSource {
    /// Everything that was asked with its answers.
    ///
    /// # Errors
    ///
    /// Why nobody could be asked at all.
    fn record(&self) -> Result<GpuRecord, NoAnswers>;
}

/// Why nobody could be asked.
#[derive(Clone, Debug)]
pub(crate) struct NoAnswers {
    /// The reason, for people.
    pub(crate) absence: Absence,
    /// Whether the management library is there and does not start, or is not there at all.
    pub(crate) library_loaded: bool,
}

/// Why a question has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The device has no such thing. That is an answer for MIG and ECC.
    NotSupported,
    /// Anything else, as the driver says it.
    Failed(String),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::NotSupported => formatter.write_str("not supported by this device"),
            Refusal::Failed(reason) => formatter.write_str(reason),
        }
    }
}

/// One answer.
pub(crate) type Answer<T> = Result<T, Refusal>;

/// All the answers.
#[derive(Clone, Debug)]
pub(crate) struct GpuRecord {
    /// `580.159.04`.
    pub(crate) driver_version: Answer<String>,
    /// The devices in the order of their index.
    pub(crate) devices: Vec<DeviceRecord>,
    /// Each pair once.
    pub(crate) pairs: Vec<PairRecord>,
    /// What the CUDA driver adds; devices that it hides are not there.
    pub(crate) cuda_devices: Vec<CudaDevice>,
}

/// A PCI address without the function, which GPUs do not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PciAddress {
    pub(crate) domain: u32,
    pub(crate) bus: u32,
    pub(crate) device: u32,
}

impl PciAddress {
    /// What stands in for the address of a device that a virtual machine cannot see, which the
    /// driver prints as `FFFFFFFF:FF:FF.0`.
    #[cfg(test)]
    pub(crate) const HIDDEN: PciAddress =
        PciAddress { domain: 0xffff_ffff, bus: 0xff, device: 0xff };

    /// Whether this is no address at all but a placeholder for one.
    pub(crate) fn is_hidden(self) -> bool {
        self.domain >= 0xffff_0000 || self.bus > 0xfe || self.device > 0x1f
    }

    /// Reads `0000:04:00.0`, with a domain of any length.
    pub(crate) fn parse(text: &str) -> Option<PciAddress> {
        let mut parts = text.trim().split([':', '.']);
        let mut number = || u32::from_str_radix(parts.next()?, 16).ok();
        Some(PciAddress { domain: number()?, bus: number()?, device: number()? })
    }

    /// The name of the folder under `/sys/bus/pci/devices`.
    pub(crate) fn sysfs_name(self) -> String {
        format!("{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

impl std::fmt::Display for PciAddress {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:08X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }
}

/// The answers of one device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceRecord {
    pub(crate) index: u32,
    pub(crate) name: Answer<String>,
    pub(crate) uuid: Answer<String>,
    pub(crate) address: Answer<PciAddress>,
    pub(crate) compute_capability: Answer<(u32, u32)>,
    /// CUDA cores, from which SMs follow where the CUDA driver is silent.
    pub(crate) cores: Answer<u32>,
    /// Total and free bytes.
    pub(crate) memory_bytes: Answer<(u64, u64)>,
    pub(crate) memory_bus_bits: Answer<u32>,
    pub(crate) memory_mhz_max: Answer<u32>,
    pub(crate) sm_mhz_max: Answer<u32>,
    pub(crate) power_cap_mw: Answer<u32>,
    pub(crate) power_cap_default_mw: Answer<u32>,
    pub(crate) mig: Answer<bool>,
    pub(crate) ecc: Answer<bool>,
    /// Highest generation and width of the device and its slot, then the width now.
    pub(crate) pcie_generation_max: Answer<u32>,
    pub(crate) pcie_width_max: Answer<u32>,
    pub(crate) pcie_width_now: Answer<u32>,
    /// Rows of HBM that wait for a replacement.
    pub(crate) row_repairs: Answer<RowRepairs>,
    /// Whether pages wait to be taken out of use, on devices without spare rows.
    pub(crate) pages_pending: Answer<bool>,
    /// Memory errors since the driver was loaded that could not be corrected.
    pub(crate) errors_uncorrected: Answer<u64>,
    pub(crate) nvlinks: Vec<NvLinkRecord>,
    /// Links that the device has and that the driver calls inactive.
    pub(crate) nvlinks_down: u32,
    pub(crate) nvlink_domain: Answer<Option<NvLinkDomain>>,
}

/// Replacements of broken rows of the device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowRepairs {
    /// Some wait for the next reset.
    pub(crate) pending: bool,
    /// Some could not be replaced.
    pub(crate) failed: bool,
}

/// One NVLink of a device that is up.
#[derive(Clone, Debug)]
pub(crate) struct NvLinkRecord {
    /// `nvmlDeviceGetNvLinkVersion`: a code, not the version that the documents print.
    pub(crate) version: Answer<u32>,
    /// Megabytes per second in each direction.
    pub(crate) speed_mbps: Answer<u32>,
    pub(crate) remote_address: Answer<PciAddress>,
    pub(crate) remote_kind: Answer<RemoteKind>,
}

/// What the other end of an NVLink is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemoteKind {
    Gpu,
    Switch,
    Other,
}

/// The answers about two devices.
#[derive(Clone, Debug)]
pub(crate) struct PairRecord {
    /// Indices of the devices.
    pub(crate) devices: (u32, u32),
    /// Whether NVLink joins the two.
    pub(crate) nvlink_reaches: Answer<bool>,
    /// Where their PCIe connections meet.
    pub(crate) meet: Answer<PcieMeet>,
}

/// What only the CUDA driver knows of a device.
#[derive(Clone, Debug)]
pub(crate) struct CudaDevice {
    pub(crate) address: PciAddress,
    pub(crate) sm_count: Option<u32>,
    pub(crate) l2_bytes: Option<u64>,
    pub(crate) memory_bus_bits: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_in_every_spelling() {
        let rows = [
            ("0000:04:00.0", Some((0, 4, 0))),
            ("00000000:9B:00.0", Some((0, 0x9b, 0))),
            ("0001:0a:1f.0", Some((1, 10, 31))),
            ("", None),
            ("0000:04", None),
        ];
        for (text, expected) in rows {
            let got = PciAddress::parse(text).map(|a| (a.domain, a.bus, a.device));
            assert_eq!(got, expected, "{text}");
        }
        assert_eq!(PciAddress::parse("FFFFFFFF:FF:FF.0"), Some(PciAddress::HIDDEN));
        assert!(PciAddress::HIDDEN.is_hidden());
        assert!(!PciAddress { domain: 0, bus: 4, device: 0 }.is_hidden());
        assert_eq!(PciAddress { domain: 0, bus: 0x9b, device: 1 }.sysfs_name(), "0000:9b:01.0");
    }
}
