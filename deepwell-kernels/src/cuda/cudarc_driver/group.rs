//! Several devices of a host, to measure their interconnect: peer copies, and all-reduces by NCCL.

use cudarc::driver::sys::{self, CUresult};

use super::CudarcDriver;
use super::error::check;
use super::nccl::Communicators;
use crate::runtime::cuda::driver::{DevicePtr, Driver, DriverResult, Event, Priority, Stream};

/// Untimed runs before the measurement, which establish connections.
const WARM_UPS: usize = 3;
/// Number of timed runs.
const RUNS: usize = 10;

/// A measured copy from a device to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerCopy {
    /// Bytes per second, with no traffic in the other direction.
    pub bytes_per_s: f64,
    /// Whether the devices access each other's memory; otherwise the copy was staged through the
    /// host.
    pub is_direct: bool,
}

/// A measured all-reduce over all devices.
#[derive(Clone, Debug, PartialEq)]
pub struct AllReduce {
    /// Number of devices.
    pub devices: usize,
    /// Bytes of the buffer on each device.
    pub bytes: usize,
    /// Seconds, mean of several runs.
    pub time_s: f64,
    /// Version of the library, `2.27.3`.
    pub version: String,
}

impl AllReduce {
    /// Minimum bytes per second that a device sends over its links, with any algorithm:
    /// `2 (n - 1) / n` of the buffer ("bus bandwidth" of NVIDIA's nccl-tests).
    pub fn bus_bytes_per_s(&self) -> f64 {
        let devices = self.devices as f64;
        2.0 * (devices - 1.0) / devices * self.bytes as f64 / self.time_s
    }
}

/// Devices of a host with two buffers each.
pub struct DeviceGroup {
    members: Vec<Member>,
    bytes: usize,
}

struct Member {
    driver: CudarcDriver,
    index: usize,
    stream: Stream,
    begin: Event,
    end: Event,
    source: DevicePtr,
    target: DevicePtr,
}

impl DeviceGroup {
    /// Opens devices and allocates two buffers of `bytes` on each.
    ///
    /// # Errors
    /// As [`CudarcDriver::open`], or not enough memory.
    pub fn open(indices: &[usize], bytes: usize) -> DriverResult<DeviceGroup> {
        let open = |&index: &usize| {
            let mut driver = CudarcDriver::open(index)?;
            let stream = driver.stream(Priority::Middle)?;
            let (begin, end) = (driver.event(true)?, driver.event(true)?);
            let source = driver.allocate(bytes)?;
            let target = driver.allocate(bytes)?;
            // Zeros, so that sums stay finite.
            driver.fill(source, 0, bytes, stream)?;
            driver.synchronize()?;
            Ok(Member { driver, index, stream, begin, end, source, target })
        };
        let members = indices.iter().map(open).collect::<DriverResult<Vec<Member>>>()?;
        Ok(DeviceGroup { members, bytes })
    }

    /// Number of devices.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// Times copies of a buffer from member `from` to member `to`, with no other copies in flight.
    ///
    /// # Errors
    /// An error of the driver.
    ///
    /// # Panics
    /// An index of no member.
    pub fn copy(&mut self, from: usize, to: usize) -> DriverResult<PeerCopy> {
        let is_direct = self.reaches(from, to)? && self.reaches(to, from)?;
        let (target, target_context) = {
            let member = &self.members[to];
            (member.target, member.driver.context.raw())
        };
        let bytes = self.bytes;
        let member = &mut self.members[from];
        let time_s = member.time(|driver, stream, source| {
            let stream = driver.context.resolve(stream)?;
            // SAFETY: both contexts are retained, both buffers are `bytes` long and live until the
            // group is dropped, and no other work uses the buffers meanwhile.
            check("cuMemcpyPeerAsync", unsafe {
                sys::cuMemcpyPeerAsync(
                    target.0,
                    target_context,
                    source.0,
                    driver.context.raw(),
                    bytes,
                    stream,
                )
            })
        })?;
        Ok(PeerCopy { bytes_per_s: bytes as f64 / time_s, is_direct })
    }

    /// Enables access of a member to the memory of another, and returns whether access is possible.
    fn reaches(&self, from: usize, to: usize) -> DriverResult<bool> {
        let (from, to) = (&self.members[from].driver.context, &self.members[to].driver.context);
        let mut can = 0;
        // SAFETY: writes one integer; both devices came from the driver.
        check("cuDeviceCanAccessPeer", unsafe {
            sys::cuDeviceCanAccessPeer(&mut can, from.device(), to.device())
        })?;
        if can == 0 {
            return Ok(false);
        }
        from.enter()?;
        // SAFETY: a context is current, the other is retained; the flags must be zero.
        match unsafe { sys::cuCtxEnablePeerAccess(to.raw(), 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(true),
            code => check("cuCtxEnablePeerAccess", code).map(|()| true),
        }
    }

    /// Times FP32 all-reduces over all members by NCCL.
    ///
    /// # Errors
    /// No library found, or an error of the library.
    pub fn all_reduce(&mut self) -> DriverResult<AllReduce> {
        let indices: Vec<usize> = self.members.iter().map(|member| member.index).collect();
        let communicators = Communicators::open(&indices)?;
        let elements = self.bytes / size_of::<f32>();
        let ends: Vec<(DevicePtr, DevicePtr, sys::CUstream)> = self
            .members
            .iter()
            .map(|member| {
                let stream = member.driver.context.resolve(member.stream)?;
                Ok((member.source, member.target, stream))
            })
            .collect::<DriverResult<_>>()?;
        for _ in 0..WARM_UPS {
            communicators.all_reduce(&ends, elements)?;
        }
        self.synchronize()?;
        let Some(first) = self.members.first_mut() else {
            return Ok(AllReduce { devices: 0, bytes: 0, time_s: 0.0, version: String::new() });
        };
        first.driver.record(first.begin, first.stream)?;
        for _ in 0..RUNS {
            communicators.all_reduce(&ends, elements)?;
        }
        first.driver.record(first.end, first.stream)?;
        first.driver.synchronize_event(first.end)?;
        let milliseconds = first.driver.elapsed_ms(first.begin, first.end)?;
        self.synchronize()?;
        Ok(AllReduce {
            devices: self.members.len(),
            bytes: elements * size_of::<f32>(),
            time_s: f64::from(milliseconds) / 1e3 / RUNS as f64,
            version: communicators.version(),
        })
    }

    fn synchronize(&mut self) -> DriverResult<()> {
        self.members.iter_mut().try_for_each(|member| member.driver.synchronize())
    }
}

impl Member {
    /// Mean seconds of a run, by the device's clock.
    fn time(
        &mut self,
        run: impl Fn(&CudarcDriver, Stream, DevicePtr) -> DriverResult<()>,
    ) -> DriverResult<f64> {
        self.driver.context.enter()?;
        for _ in 0..WARM_UPS {
            run(&self.driver, self.stream, self.source)?;
        }
        self.driver.record(self.begin, self.stream)?;
        for _ in 0..RUNS {
            run(&self.driver, self.stream, self.source)?;
        }
        self.driver.record(self.end, self.stream)?;
        self.driver.synchronize_event(self.end)?;
        let milliseconds = self.driver.elapsed_ms(self.begin, self.end)?;
        Ok(f64::from(milliseconds) / 1e3 / RUNS as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::AllReduce;

    #[test]
    fn bus_bandwidth_is_what_a_device_sends_at_least() {
        let check = |devices: usize, expected: f64| {
            let version = String::new();
            let sum = AllReduce { devices, bytes: 1 << 30, time_s: 0.5, version };
            assert_eq!(sum.bus_bytes_per_s(), expected * f64::from(1 << 30) / 0.5);
        };
        check(1, 0.0);
        check(2, 1.0);
        check(8, 1.75);
    }
}
