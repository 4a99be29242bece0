//! Memcpy bandwidth, for rooflines: bytes read plus bytes written.

use deepwell_ir::{DType, ops};
use deepwell_kernels::SingleCall;
use deepwell_probe::Hardware;

use super::timer::{Timer, percentile};
use deepwell_trainer::{Device, OpenDevice, TrainError};

/// Floats of the copy on a GPU: 1 GiB is read and 1 GiB written, many times the size of a cache.
pub(super) const FLOATS: usize = 1 << 28;
const SAMPLES: usize = 20;

/// Measures the memcpy bandwidth of the device: 10⁹ bytes read and written per second, the median
/// of copies between two buffers of 1 GiB on a GPU.
///
/// The copies are enqueued on a stream rather than captured in a graph, unlike all other timed
/// work. A memcpy node of a graph is slower: on an H200 with driver 580.159.04 a node reached 2714
/// GB/s, the same copy on a stream 4228 GB/s and a copy kernel in a graph 4241 GB/s.
///
/// # Errors
/// The device is missing or fails.
pub fn measure_copy(device: Device, hardware: &Hardware) -> Result<f64, TrainError> {
    if device == Device::Cpu {
        return Ok(hardware.cpu.clone().measure_memory_bandwidth().gbps);
    }
    copied_gbps(&mut device.open(hardware)?, hardware, FLOATS).map_err(|what| TrainError::Setting {
        setting: "device",
        expected: "a copy in its memory".to_string(),
        got: what,
        hint: None,
    })
}

/// [`measure_copy`] with the given number of floats on an open GPU; errors as text.
pub(super) fn copied_gbps(
    open: &mut OpenDevice,
    hardware: &Hardware,
    floats: usize,
) -> Result<f64, String> {
    let matrix = || (DType::F32, vec![floats / 4096, 4096]);
    // A cast to the same type is a memcpy by the driver.
    let copy = SingleCall::new(ops::Cast { to: DType::F32 }, &[matrix()], &[matrix()]);
    let times = Timer::new(open, hardware, SAMPLES).time_plainly(&copy)?;
    Ok(copy.bytes() as f64 / percentile(&times, 0.5) / 1e9)
}

/// `hardware` with another bandwidth of the device's memory.
pub(super) fn with_bandwidth(hardware: &Hardware, device: Device, gbps: f64) -> Hardware {
    let mut hardware = hardware.clone();
    match device {
        Device::Cpu => hardware.cpu.memory_gbps = Some(gbps),
        // Rooflines use the bandwidth of the first GPU.
        Device::Cuda(_) | Device::Emulated(_) => {
            hardware.gpus.iter_mut().for_each(|gpu| gpu.hbw_gbps = gbps)
        }
    }
    hardware
}

#[cfg(test)]
mod tests {
    use deepwell_kernels::cuda::{Blas, CudaBackend, FakeDriver, KernelImages};

    use super::*;

    /// The driver's clock counts the enqueued work: copies are timed one by one, outside of a
    /// graph, and both read and written bytes count.
    #[test]
    fn a_copy_is_timed_on_the_stream() {
        let hardware = Hardware::preset("h200-x2").unwrap();
        let driver = FakeDriver::h200();
        let counts = driver.counts();
        let blas: Box<dyn Blas> = Box::new(driver.blas());
        let backend =
            CudaBackend::new(Box::new(driver), Some(blas), KernelImages::empty()).unwrap();
        let device = Device::Cuda(0);
        let target = device.target(&hardware).unwrap();
        let mut open = OpenDevice { backend: Box::new(backend), catalog: device.catalog(), target };
        let floats = 1 << 14;
        let gbps = copied_gbps(&mut open, &hardware, floats).unwrap();
        let counts = counts.read();
        assert_eq!((counts.graph_launches, counts.copies), (1, 5 + SAMPLES));
        // A copy and an event take one tick of 1 ms each.
        assert!((gbps - (8 * floats) as f64 / 2e-3 / 1e9).abs() < 1e-12, "{gbps}");
    }
}
