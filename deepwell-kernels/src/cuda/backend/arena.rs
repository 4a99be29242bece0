//! The memory of programs: an allocation on the device, and one on the host for offloaded values.

use deepwell_ir::ByteRange;

use super::CudaBackend;
use crate::KernelError;
use crate::runtime::cuda::driver::{DevicePtr, Driver, DriverError};
use crate::runtime::cuda::prepare::ArenaAddress;

/// An arena and its allocations.
#[derive(Clone, Copy)]
pub(super) struct Arena {
    address: ArenaAddress,
    bytes: usize,
    device: Option<(DevicePtr, usize)>,
    host: Option<DevicePtr>,
}

impl Arena {
    /// All memory of the device: offsets are addresses.
    pub(super) const OF_ADDRESSES: Arena =
        Arena { address: ArenaAddress::OF_ADDRESSES, bytes: usize::MAX, device: None, host: None };

    /// Allocates `bytes`, the first `host_bytes` of them on the host. The part on the host is
    /// zeroed.
    pub(super) fn allocate(
        driver: &mut dyn Driver,
        bytes: usize,
        host_bytes: usize,
    ) -> Result<Arena, KernelError> {
        let device_bytes = bytes.saturating_sub(host_bytes);
        let device =
            driver.allocate(device_bytes.max(1)).map_err(|error| match error.out_of_memory {
                true => KernelError::OutOfMemory { bytes: device_bytes },
                false => error.into(),
            })?;
        let host = match host_bytes {
            0 => None,
            _ => Some(driver.allocate_on_host(host_bytes)?),
        };
        let address = ArenaAddress::split(host.unwrap_or_default(), host_bytes, device);
        Ok(Arena { address, bytes, device: Some((device, device_bytes)), host })
    }

    /// Where the arena lies.
    pub(super) fn address(&self) -> ArenaAddress {
        self.address
    }

    /// The allocation on the device and its size.
    pub(super) fn on_device(&self) -> (DevicePtr, usize) {
        self.device.unwrap_or_default()
    }

    /// The address of a range, if the arena contains the range.
    pub(super) fn at(&self, range: ByteRange) -> Option<DevicePtr> {
        (range.end() <= self.bytes).then(|| self.address.at(range.offset))
    }

    /// Whether a range begins in host memory.
    fn is_on_host(&self, range: ByteRange) -> bool {
        range.offset < self.bytes - self.device.map_or(self.bytes, |(_, bytes)| bytes)
    }

    /// Frees the allocations.
    pub(super) fn free(self, driver: &mut dyn Driver) -> Result<(), DriverError> {
        let device = self.device.map(|(pointer, _)| pointer);
        device.into_iter().chain(self.host).try_for_each(|pointer| driver.free(pointer))
    }
}

/// Bytes of zeros that a copy writes at a time.
const ZEROS: usize = 64 << 20;

impl CudaBackend {
    /// Writes zeros into a range, once all earlier work has ended. The device fills its own memory;
    /// the driver writes memory of the host.
    pub(super) fn clear_range(&mut self, range: ByteRange) -> Result<(), KernelError> {
        let target = self.address(range)?;
        self.wait_for_all()?;
        if !self.arena.is_some_and(|arena| arena.is_on_host(range)) {
            self.driver.fill(target, 0, range.bytes, self.compute)?;
            return Ok(self.wait_for_all()?);
        }
        let zeros = vec![0; range.bytes.min(ZEROS)];
        for begin in (0..range.bytes).step_by(ZEROS) {
            let bytes = &zeros[..(range.bytes - begin).min(ZEROS)];
            self.driver.upload(target.offset(begin), bytes)?;
        }
        Ok(())
    }
}
