//! [`Driver`](super::Driver) on the CUDA driver library, through the raw bindings of cudarc.
//!
//! The bindings' safe layer has no clusters, no programmatic launches, no tensor maps, and orders
//! streams by events of its own; this module calls the functions below it and leaves the ordering
//! to its user. Handles are indices into tables; memory is remembered, so that only what was
//! given is freed, and freed with the driver at the latest.

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
use super::driver::{
    CapturedGraph, DeviceProperties, DevicePtr, DriverError, DriverResult, Event, Function, Module,
};

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
/// Made by [`CudarcDriver::open`]. It uses the device's primary context, makes that context
/// current in each call, and so may move between threads. Its streams do not wait for the legacy
/// stream. Recordings are relaxed: while one is in progress, calls that cannot be recorded (an
/// allocation, an upload) run at once. Calls that would end the recordings of other threads wait
/// for those: [`Driver::synchronize_device`](super::Driver::synchronize_device), and the end of a
/// driver or of a library.
pub struct CudarcDriver {
    properties: DeviceProperties,
    memory: HashMap<DevicePtr, usize>,
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
    /// Opens device `index`, counted as `CUDA_VISIBLE_DEVICES` leaves them.
    ///
    /// # Errors
    /// No driver library; a driver that serves less than CUDA 13.0; no device of that index; a
    /// device that no kernel is built for; what the driver refuses.
    pub fn open(index: usize) -> Result<CudarcDriver, DriverError> {
        open::start_driver()?;
        let (device, properties) = open::device(index)?;
        Ok(CudarcDriver {
            properties,
            memory: HashMap::new(),
            events: Vec::new(),
            modules: Vec::new(),
            kernels: Vec::new(),
            kernels_known: HashMap::new(),
            graphs: Vec::new(),
            context: Arc::new(Context::retain(device)?),
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
        // Errors are dropped here: a lost device has taken everything with it.
        if self.context.enter().is_err() {
            return;
        }
        self.context.abandon_captures();
        let _ = self.context.synchronize();
        self.graphs.clear();
        for event in self.events.drain(..) {
            // SAFETY: an event of ours, destroyed once; no work is under way.
            let _ = unsafe { sys::cuEventDestroy_v2(event.raw) };
        }
        // Where this thread captures with another driver, they stay until the context ends.
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
