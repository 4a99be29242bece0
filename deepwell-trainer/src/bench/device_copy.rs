//! The bandwidth that floors are made with: a copy, read and written bytes.

use deepwell_ir::{DType, ops};
use deepwell_kernels::SingleCall;
use deepwell_probe::Hardware;

use super::timer::Timer;
use crate::{Device, TrainError};

/// Floats of the copy on a GPU: 1 GiB is read and 1 GiB written, many times what a cache holds.
const FLOATS: usize = 1 << 28;
const SAMPLES: usize = 20;

/// Measures a copy in the device's memory: 10⁹ bytes read and written a second.
///
/// # Errors
/// A device that is not there or fails.
pub fn measure_copy(device: Device, hardware: &Hardware) -> Result<f64, TrainError> {
    if device == Device::Cpu {
        return Ok(hardware.cpu.clone().measure_memory_bandwidth().gbps);
    }
    let mut open = device.open(hardware)?;
    let matrix = || (DType::F32, vec![FLOATS / 4096, 4096]);
    // To the type that is there already: a copy by the driver.
    let copy = SingleCall::new(ops::Cast { to: DType::F32 }, &[matrix()], &[matrix()]);
    let timing = Timer::new(&mut open, hardware, SAMPLES).time(&copy).map_err(|what| {
        TrainError::Setting {
            setting: "device",
            expected: "a copy in its memory".to_string(),
            got: what,
            hint: None,
        }
    })?;
    Ok(copy.bytes() as f64 / timing.time_s / 1e9)
}

/// `hardware` with another bandwidth of the device's memory.
pub(super) fn with_bandwidth(hardware: &Hardware, device: Device, gbps: f64) -> Hardware {
    let mut hardware = hardware.clone();
    match device {
        Device::Cpu => hardware.cpu.memory_gbps = Some(gbps),
        // Rooflines are made with the first one.
        Device::Cuda(_) => hardware.gpus.iter_mut().for_each(|gpu| gpu.hbw_gbps = gbps),
    }
    hardware
}
