//! A driver's answers as plain data, the interface between queries and their interpretation.

use crate::{Absence, NvLinkDomain, PcieMeet};

/// Source of information about GPUs: the management library, or a recording.
pub(crate) trait GpuSource {
    /// Returns all answers.
    ///
    /// # Errors
    ///
    /// The reason why nothing could be queried.
    fn record(&self) -> Result<GpuRecord, NoAnswers>;
}

/// Why nothing could be queried.
#[derive(Clone, Debug)]
pub(crate) struct NoAnswers {
    /// The reason, for users.
    pub(crate) absence: Absence,
    /// True if the management library exists but does not start, false if it does not exist.
    pub(crate) library_loaded: bool,
}

/// Why a query has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The device does not support the feature; for MIG and ECC a valid answer.
    NotSupported,
    /// Any other error, in the driver's words.
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

/// An answer to one query.
pub(crate) type Answer<T> = Result<T, Refusal>;

/// All answers.
#[derive(Clone, Debug)]
pub(crate) struct GpuRecord {
    /// For example `580.159.04`.
    pub(crate) driver_version: Answer<String>,
    /// The devices in index order.
    pub(crate) devices: Vec<DeviceRecord>,
    /// Each pair once.
    pub(crate) pairs: Vec<PairRecord>,
    /// Data from the CUDA driver; devices that it hides are missing.
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
    /// Placeholder for the address of a device that a virtual machine cannot see; the driver prints
    /// it as `FFFFFFFF:FF:FF.0`.
    #[cfg(test)]
    pub(crate) const HIDDEN: PciAddress =
        PciAddress { domain: 0xffff_ffff, bus: 0xff, device: 0xff };

    /// Whether this is a placeholder instead of an address.
    pub(crate) fn is_hidden(self) -> bool {
        self.domain >= 0xffff_0000 || self.bus > 0xfe || self.device > 0x1f
    }

    /// Parses `0000:04:00.0`, with a domain of any length.
    pub(crate) fn parse(text: &str) -> Option<PciAddress> {
        let mut parts = text.trim().split([':', '.']);
        let mut number = || u32::from_str_radix(parts.next()?, 16).ok();
        Some(PciAddress { domain: number()?, bus: number()?, device: number()? })
    }

    /// Name of the folder under `/sys/bus/pci/devices`.
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
    /// CUDA cores, used to compute SMs if the CUDA driver does not report them.
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
    /// Highest generation and width of device and slot; then the current width.
    pub(crate) pcie_generation_max: Answer<u32>,
    pub(crate) pcie_width_max: Answer<u32>,
    pub(crate) pcie_width_now: Answer<u32>,
    /// Pending and failed row replacements of HBM.
    pub(crate) row_repairs: Answer<RowRepairs>,
    /// Whether pages are pending retirement, on devices without spare rows.
    pub(crate) pages_pending: Answer<bool>,
    /// Uncorrectable memory errors since the driver was loaded.
    pub(crate) errors_uncorrected: Answer<u64>,
    pub(crate) nvlinks: Vec<NvLinkRecord>,
    /// Links of the device that the driver reports as inactive.
    pub(crate) nvlinks_down: u32,
    pub(crate) nvlink_domain: Answer<Option<NvLinkDomain>>,
}

/// Replacements of broken rows of the device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowRepairs {
    /// Some are pending until the next reset.
    pub(crate) pending: bool,
    /// Some have failed.
    pub(crate) failed: bool,
}

/// An active NVLink of a device.
#[derive(Clone, Debug)]
pub(crate) struct NvLinkRecord {
    /// `nvmlDeviceGetNvLinkVersion`: a code, not the version number of the documentation.
    pub(crate) version: Answer<u32>,
    /// Megabytes per second in each direction.
    pub(crate) speed_mbps: Answer<u32>,
    pub(crate) remote_address: Answer<PciAddress>,
    pub(crate) remote_kind: Answer<RemoteKind>,
}

/// Kind of the other end of an NVLink.
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
    /// Whether NVLink joins the devices.
    pub(crate) nvlink_reaches: Answer<bool>,
    /// Meeting point of the PCIe connections.
    pub(crate) meet: Answer<PcieMeet>,
}

/// Data about a device that only the CUDA driver has.
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
