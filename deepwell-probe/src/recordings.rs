//! Recorded driver answers of other machines: two H200s, as seen by a virtual machine with such a
//! pair, and an invented B200 with missing answers.

use crate::record::{
    Answer, CudaDevice, DeviceRecord, GpuRecord, GpuSource, NoAnswers, NvLinkRecord, PairRecord,
    PciAddress, Refusal, RemoteKind, RowRepairs,
};
use crate::software::DRIVER;
use crate::{Absence, PcieMeet};

/// A machine without a working driver.
pub(crate) struct NoDriver {
    pub(crate) library_loaded: bool,
}

impl GpuSource for NoDriver {
    fn record(&self) -> Result<GpuRecord, NoAnswers> {
        let reason = match self.library_loaded {
            true => "the NVIDIA driver is installed but its kernel module is not loaded",
            false => "no NVIDIA driver: `libnvidia-ml.so.1` cannot be loaded",
        };
        let absence = Absence { reason: reason.to_owned(), hint: DRIVER.hint.to_owned() };
        Err(NoAnswers { absence, library_loaded: self.library_loaded })
    }
}

impl GpuSource for GpuRecord {
    fn record(&self) -> Result<GpuRecord, NoAnswers> {
        Ok(self.clone())
    }
}

pub(crate) fn failed<T>(reason: &str) -> Answer<T> {
    Err(Refusal::Failed(reason.to_owned()))
}

fn address(bus: u32) -> PciAddress {
    PciAddress { domain: 0, bus, device: 0 }
}

/// A link to a switch that the virtual machine cannot see.
pub(crate) fn hidden_link(version: u32, speed_mbps: Answer<u32>) -> NvLinkRecord {
    NvLinkRecord {
        version: Ok(version),
        speed_mbps,
        remote_address: Ok(PciAddress::HIDDEN),
        remote_kind: failed("an unknown internal error occurred"),
    }
}

/// A link to another GPU.
pub(crate) fn direct_link(version: u32, bus: u32) -> NvLinkRecord {
    NvLinkRecord {
        version: Ok(version),
        speed_mbps: Ok(25_000),
        remote_address: Ok(address(bus)),
        remote_kind: Ok(RemoteKind::Gpu),
    }
}

fn h200(index: u32, bus: u32) -> DeviceRecord {
    DeviceRecord {
        index,
        name: Ok("NVIDIA H200".to_owned()),
        uuid: Ok(format!("GPU-00000000-0000-0000-0000-00000000000{index}")),
        address: Ok(address(bus)),
        compute_capability: Ok((9, 0)),
        cores: Ok(16_896),
        memory_bytes: Ok((143_771 << 20, 143_167 << 20)),
        memory_bus_bits: Ok(6144),
        memory_mhz_max: Ok(3201),
        sm_mhz_max: Ok(1980),
        power_cap_mw: Ok(700_000),
        power_cap_default_mw: Ok(700_000),
        mig: Ok(false),
        ecc: Ok(true),
        pcie_generation_max: Ok(5),
        pcie_width_max: Ok(16),
        pcie_width_now: Ok(16),
        row_repairs: Ok(RowRepairs { pending: false, failed: false }),
        pages_pending: Err(Refusal::NotSupported),
        errors_uncorrected: Ok(0),
        nvlinks: (0..18).map(|_| hidden_link(6, Ok(26_562))).collect(),
        nvlinks_down: 0,
        nvlink_domain: Ok(None),
    }
}

/// Two H200s of a virtual machine, connected to an NVSwitch that the machine cannot see.
pub(crate) fn two_h200() -> GpuRecord {
    let cuda = |bus| CudaDevice {
        address: address(bus),
        sm_count: Some(132),
        l2_bytes: Some(60 << 20),
        memory_bus_bits: Some(6144),
    };
    GpuRecord {
        driver_version: Ok("580.159.04".to_owned()),
        devices: vec![h200(0, 4), h200(1, 5)],
        pairs: vec![PairRecord {
            devices: (0, 1),
            nvlink_reaches: Ok(true),
            meet: Ok(PcieMeet::HostBridge),
        }],
        cuda_devices: vec![cuda(4), cuda(5)],
    }
}

/// A B200 whose CUDA driver does not start and whose memory bus width is unknown.
pub(crate) fn one_b200() -> GpuRecord {
    let device = DeviceRecord {
        name: Ok("NVIDIA B200".to_owned()),
        compute_capability: Ok((10, 0)),
        cores: Ok(148 * 128),
        memory_bytes: Ok((183_359 << 20, 182_000 << 20)),
        memory_bus_bits: Err(Refusal::NotSupported),
        memory_mhz_max: Ok(3996),
        sm_mhz_max: Ok(1965),
        power_cap_mw: Ok(800_000),
        power_cap_default_mw: Ok(1_000_000),
        pcie_width_now: Ok(8),
        nvlinks: (0..18).map(|_| hidden_link(7, Err(Refusal::NotSupported))).collect(),
        nvlink_domain: Ok(Some(crate::NvLinkDomain {
            cluster_uuid: "5e3b0f0a9d5b4f6c8a7e1d2c3b4a5968".to_owned(),
            clique: 1,
        })),
        ..h200(0, 0x1b)
    };
    GpuRecord {
        driver_version: Ok("575.57.08".to_owned()),
        devices: vec![device],
        pairs: Vec::new(),
        cuda_devices: Vec::new(),
    }
}
