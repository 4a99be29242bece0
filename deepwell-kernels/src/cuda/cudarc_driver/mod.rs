//! [`Driver`](super::Driver) on the CUDA driver library, through the raw bindings of cudarc.
//!
//! The bindings' safe layer has no clusters, no programmatic launches and no tensor maps, and
//! orders streams with its own events. This module calls the raw functions and leaves the ordering
//! to its user. Handles are indices into tables. Allocations are tracked, so that only valid
//! addresses are freed, and all memory is freed with the driver at the latest.

#![allow(unsafe_code)]

mod calls;
mod capture;
mod captures;
mod context;
mod cublaslt;
mod error;
mod group;
mod image;
mod launch;
mod nccl;
mod open;
mod pinned;

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::sys;

use self::capture::LaunchableGraph;
use self::context::{Context, no_such};
use self::launch::Kernel;
use crate::runtime::cuda::driver::{
    CapturedGraph, DeviceProperties, DevicePtr, DriverError, DriverResult, Event, Function, Module,
};
use crate::runtime::cuda::pinned::PinnedBuffer;

pub use self::cublaslt::CublasLt;
pub use self::group::{AllReduce, DeviceGroup, PeerCopy};
pub use self::nccl::{
    NCCL_VARIABLE, NcclDevice, NcclHost, NcclId, NcclLimits, NcclMonitor, NcclRank, nccl_version,
};

struct EventSlot {
    raw: sys::CUevent,
    has_timing: bool,
}

/// One CUDA device.
///
/// Made by [`CudarcDriver::open`]. The driver uses the device's primary context and makes this
/// context current in each call, so it may move between threads. Its streams do not synchronize
/// with the legacy stream. Captures are relaxed: during a capture, calls that cannot be captured
/// (an allocation, an upload) run at once. Calls that would invalidate captures of other threads
/// wait for the end of these captures:
/// [`Driver::synchronize_device`](super::Driver::synchronize_device), and dropping a driver or a
/// library.
pub struct CudarcDriver {
    properties: DeviceProperties,
    memory: HashMap<DevicePtr, usize>,
    /// Host memory that has addresses on the device.
    on_host: HashMap<DevicePtr, PinnedBuffer>,
    events: Vec<EventSlot>,
    modules: Vec<sys::CUmodule>,
    kernels: Vec<Kernel>,
    kernels_known: HashMap<(Module, String), Function>,
    graphs: Vec<Option<LaunchableGraph>>,
    context: Arc<Context>,
}

// SAFETY: the driver's handles belong to no thread; the context is made current in every call.
unsafe impl Send for CudarcDriver {}

impl CudarcDriver {
    /// Opens device `index`, as numbered under `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// No driver library; a driver older than CUDA 13.0; no device with this index; a device
    /// without compiled kernels; an error of the driver.
    pub fn open(index: usize) -> Result<CudarcDriver, DriverError> {
        open::start_driver()?;
        let (device, properties) = open::device(index)?;
        Ok(CudarcDriver {
            properties,
            memory: HashMap::new(),
            on_host: HashMap::new(),
            events: Vec::new(),
            modules: Vec::new(),
            kernels: Vec::new(),
            kernels_known: HashMap::new(),
            graphs: Vec::new(),
            context: Arc::new(Context::retain(device)?),
        })
    }

    /// The bytes of a range within memory of `allocate_on_host`; `None` for a range on
    /// the device. All streams must be empty.
    fn host_memory(&mut self, at: DevicePtr, bytes: usize) -> Option<&mut [u8]> {
        self.on_host.iter_mut().find_map(|(begin, buffer)| {
            let offset = usize::try_from(at.0.checked_sub(begin.0)?).ok()?;
            buffer.as_mut_slice().get_mut(offset..offset.checked_add(bytes)?)
        })
    }

    fn event_slot(&self, event: Event) -> DriverResult<&EventSlot> {
        self.events.get(event.0 as usize).ok_or_else(|| no_such("event", event.0))
    }

    fn graph(&self, graph: CapturedGraph) -> DriverResult<&LaunchableGraph> {
        let known = self.graphs.get(graph.0 as usize).and_then(Option::as_ref);
        known.ok_or_else(|| no_such("graph", graph.0))
    }
}

impl Drop for CudarcDriver {
    fn drop(&mut self) {
        // Errors are ignored here: a lost device has released everything.
        if self.context.enter().is_err() {
            return;
        }
        self.context.abandon_captures();
        let _ = self.context.synchronize();
        self.graphs.clear();
        for event in self.events.drain(..) {
            // SAFETY: an event of ours, destroyed once; no work is in flight.
            let _ = unsafe { sys::cuEventDestroy_v2(event.raw) };
        }
        // If this thread captures with another driver, modules stay loaded until the context ends.
        let _ = self.context.alone("cuModuleUnload", || {
            for module in self.modules.drain(..) {
                // SAFETY: a module of ours, unloaded once; none of its kernels runs.
                let _ = unsafe { sys::cuModuleUnload(module) };
            }
        });
        for (pointer, _) in self.memory.drain() {
            // SAFETY: memory of ours, freed once; no work uses it.
            let _ = unsafe { sys::cuMemFree_v2(pointer.0) };
        }
    }
}
