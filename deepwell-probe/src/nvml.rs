//! Queries NVIDIA's management library (NVML).

use std::sync::OnceLock;

use nvml_wrapper::enum_wrappers::device::{
    Clock, EccCounter, MemoryError, P2pCapabilitiesIndex, P2pStatus, TopologyLevel,
};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id;
use nvml_wrapper::{Device, Nvml};

use crate::dynamic;
use crate::record::{
    Answer, CudaDevice, DeviceRecord, GpuRecord, GpuSource, NoAnswers, NvLinkRecord, PairRecord,
    PciAddress, Refusal,
};
use crate::software::DRIVER;
use crate::{Absence, PcieMeet};

/// The management library of this machine.
pub(crate) struct ManagementLibrary;

/// Maximum number of links of a device, for all generations so far.
const NVLINKS_MAX: u32 = 18;

/// The speed field of each link; later links have no individual field and use the common one.
const SPEED_FIELDS: [u32; 12] = [
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L0,
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L1,
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L2,
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L3,
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L4,
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L5,
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L6,
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L7,
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L8,
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L9,
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L10,
    field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_L11,
];

pub(crate) fn refusal(error: NvmlError) -> Refusal {
    match error {
        NvmlError::NotSupported => Refusal::NotSupported,
        other => Refusal::Failed(other.to_string()),
    }
}

fn answer<T>(result: Result<T, NvmlError>) -> Answer<T> {
    result.map_err(refusal)
}

fn no_answers(error: NvmlError) -> NoAnswers {
    let reason = match &error {
        NvmlError::LibloadingError(_) => {
            "no NVIDIA driver: `libnvidia-ml.so.1` cannot be loaded".to_owned()
        }
        NvmlError::DriverNotLoaded => {
            "the NVIDIA driver is installed but its kernel module is not loaded".to_owned()
        }
        other => format!("the NVIDIA management library does not start: {other}"),
    };
    let absence = Absence { reason, hint: DRIVER.hint.to_owned() };
    NoAnswers { absence, library_loaded: !matches!(error, NvmlError::LibloadingError(_)) }
}

/// Bytes of a GPU in use by all processes; see [`crate::gpu_memory_used_bytes`].
pub(crate) fn memory_used_bytes(ordinal: usize) -> Option<u64> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    static CUDA_ORDER: OnceLock<Vec<PciAddress>> = OnceLock::new();
    let nvml = NVML.get_or_init(|| Nvml::init().ok()).as_ref()?;
    let order = CUDA_ORDER
        .get_or_init(|| dynamic::cuda_devices().into_iter().map(|device| device.address).collect());
    let device = match order.get(ordinal) {
        Some(address) if !address.is_hidden() => nvml.device_by_pci_bus_id(address.to_string()),
        // CUDA does not show this device.
        None if !order.is_empty() => return None,
        _ => nvml.device_by_index(u32::try_from(ordinal).ok()?),
    };
    Some(device.ok()?.memory_info().ok()?.used)
}

impl GpuSource for ManagementLibrary {
    fn record(&self) -> Result<GpuRecord, NoAnswers> {
        let nvml = Nvml::init().map_err(no_answers)?;
        let count = nvml.device_count().map_err(no_answers)?;
        let mut devices = Vec::new();
        let mut handles = Vec::new();
        for index in 0..count {
            // A device that fell off the bus has no handle; other devices are still described.
            let handle = nvml.device_by_index(index);
            if let Ok(device) = &handle {
                devices.push(device_record(index, device));
            } else if let Err(error) = &handle {
                let reason = Refusal::Failed(error.to_string());
                devices.push(lost_device(index, reason));
            }
            handles.extend(handle.ok().map(|device| (index, device)));
        }
        let cuda_devices: Vec<CudaDevice> =
            if devices.is_empty() { Vec::new() } else { dynamic::cuda_devices() };
        Ok(GpuRecord {
            driver_version: answer(nvml.sys_driver_version()),
            pairs: pair_records(&nvml, &handles),
            devices,
            cuda_devices,
        })
    }
}

fn device_record(index: u32, device: &Device<'_>) -> DeviceRecord {
    let address = |info: nvml_wrapper::struct_wrappers::device::PciInfo| PciAddress {
        domain: info.domain,
        bus: info.bus,
        device: info.device,
    };
    let generation_max = answer(device.max_pcie_link_gen());
    DeviceRecord {
        index,
        name: answer(device.name()),
        uuid: answer(device.uuid()),
        address: answer(device.pci_info()).map(address),
        compute_capability: answer(device.cuda_compute_capability())
            .map(|capability| (capability.major.max(0) as u32, capability.minor.max(0) as u32)),
        cores: answer(device.num_cores()),
        memory_bytes: answer(device.memory_info()).map(|memory| (memory.total, memory.free)),
        memory_bus_bits: answer(device.memory_bus_width()),
        memory_mhz_max: answer(device.max_clock_info(Clock::Memory)),
        sm_mhz_max: answer(device.max_clock_info(Clock::SM)),
        power_cap_mw: answer(device.enforced_power_limit()),
        power_cap_default_mw: answer(device.power_management_limit_default()),
        mig: answer(device.mig_mode()).map(|mode| mode.current != 0),
        ecc: answer(device.is_ecc_enabled()).map(|mode| mode.currently_enabled),
        pcie_generation_max: generation_max,
        pcie_width_max: answer(device.max_pcie_link_width()),
        pcie_width_now: answer(device.current_pcie_link_width()),
        row_repairs: dynamic::row_repairs(device),
        pages_pending: answer(device.are_pages_pending_retired()),
        errors_uncorrected: answer(
            device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile),
        ),
        nvlinks_down: (0..NVLINKS_MAX)
            .filter(|number| matches!(device.link_wrapper_for(*number).is_active(), Ok(false)))
            .count() as u32,
        nvlinks: nvlink_records(device),
        nvlink_domain: dynamic::nvlink_domain(device),
    }
}

/// A device that the library counts but cannot open.
fn lost_device(index: u32, reason: Refusal) -> DeviceRecord {
    fn lost<T>(reason: &Refusal) -> Answer<T> {
        Err(reason.clone())
    }
    DeviceRecord {
        index,
        name: lost(&reason),
        uuid: lost(&reason),
        address: lost(&reason),
        compute_capability: lost(&reason),
        cores: lost(&reason),
        memory_bytes: lost(&reason),
        memory_bus_bits: lost(&reason),
        memory_mhz_max: lost(&reason),
        sm_mhz_max: lost(&reason),
        power_cap_mw: lost(&reason),
        power_cap_default_mw: lost(&reason),
        mig: lost(&reason),
        ecc: lost(&reason),
        pcie_generation_max: lost(&reason),
        pcie_width_max: lost(&reason),
        pcie_width_now: lost(&reason),
        row_repairs: lost(&reason),
        pages_pending: lost(&reason),
        errors_uncorrected: lost(&reason),
        nvlinks: Vec::new(),
        nvlinks_down: 0,
        nvlink_domain: lost(&reason),
    }
}

/// The active links of a device.
fn nvlink_records(device: &Device<'_>) -> Vec<NvLinkRecord> {
    let mut records = Vec::new();
    for number in 0..NVLINKS_MAX {
        let link = device.link_wrapper_for(number);
        // Devices return an error for nonexistent links.
        if !link.is_active().unwrap_or(false) {
            continue;
        }
        records.push(NvLinkRecord {
            version: answer(link.version()),
            speed_mbps: link_speed(device, number),
            remote_address: answer(link.remote_pci_info()).map(|info| PciAddress {
                domain: info.domain,
                bus: info.bus,
                device: info.device,
            }),
            remote_kind: dynamic::nvlink_remote_kind(device, number),
        });
    }
    records
}

/// Speed of one link in MB/s: its individual field, or the common field.
fn link_speed(device: &Device<'_>, number: u32) -> Answer<u32> {
    let common = field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON;
    let own = SPEED_FIELDS.get(number as usize).copied().unwrap_or(common);
    let mut last = Refusal::NotSupported;
    for field in [own, common] {
        let mut values = match device.field_values_for(&[FieldId(field)]) {
            Ok(values) => values,
            Err(error) => {
                last = refusal(error);
                continue;
            }
        };
        match values.pop().map(|sample| sample.and_then(|sample| sample.value)) {
            Some(Ok(SampleValue::U32(mbps))) if mbps > 0 => return Ok(mbps),
            Some(Ok(SampleValue::U64(mbps))) if mbps > 0 => {
                return u32::try_from(mbps).map_err(|_| Refusal::Failed("overflow".to_owned()));
            }
            Some(Err(error)) => last = refusal(error),
            _ => {}
        }
    }
    Err(last)
}

fn pair_records(nvml: &Nvml, handles: &[(u32, Device<'_>)]) -> Vec<PairRecord> {
    let mut pairs = Vec::new();
    for (place, (a, device_a)) in handles.iter().enumerate() {
        for (b, device_b) in &handles[place + 1..] {
            let reaches = device_a.p2p_status(device_b, P2pCapabilitiesIndex::NvLink);
            pairs.push(PairRecord {
                devices: (*a, *b),
                nvlink_reaches: answer(reaches).and_then(|status| match status {
                    P2pStatus::Ok => Ok(true),
                    P2pStatus::Unknown => Err(Refusal::Failed("status unknown".to_owned())),
                    _ => Ok(false),
                }),
                meet: meet(nvml, *a, *b),
            });
        }
    }
    pairs
}

/// Meeting point of the PCIe connections of two devices.
#[cfg(target_os = "linux")]
fn meet(nvml: &Nvml, a: u32, b: u32) -> Answer<PcieMeet> {
    // The library's wrapper takes the second device by value, so the device is opened once more.
    let level = answer(nvml.device_by_index(a)).and_then(|device_a| {
        let device_b = answer(nvml.device_by_index(b))?;
        answer(device_a.topology_common_ancestor(device_b))
    })?;
    Ok(match level {
        TopologyLevel::Internal => PcieMeet::Board,
        TopologyLevel::Single => PcieMeet::Switch,
        TopologyLevel::Multiple => PcieMeet::Switches,
        TopologyLevel::HostBridge => PcieMeet::HostBridge,
        TopologyLevel::Node => PcieMeet::Node,
        TopologyLevel::System => PcieMeet::System,
    })
}

/// Meeting point of the PCIe connections of two devices: reported on Linux only.
#[cfg(not(target_os = "linux"))]
fn meet(_nvml: &Nvml, _a: u32, _b: u32) -> Answer<PcieMeet> {
    Err(Refusal::NotSupported)
}
