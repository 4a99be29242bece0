//! The calls of [`Driver`], each in the driver's context.

use std::ptr;

use cudarc::driver::sys;

use super::context::{is_capturing, no_such};
use super::error::{about, check};
use super::launch::{self, Kernel};
use super::{CudarcDriver, EventSlot, pinned};
use crate::runtime::cuda::driver::{
    CapturedGraph, DeviceProperties, DevicePtr, Driver, DriverError, DriverResult, Event, Function,
    Launch, Module, Priority, Stream, TensorMap, TensorMapSpec,
};
use crate::runtime::cuda::pinned::PinnedBuffer;

impl Driver for CudarcDriver {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&mut self) -> DriverResult<(u64, u64)> {
        self.context.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    fn allocate(&mut self, bytes: usize) -> DriverResult<DevicePtr> {
        self.context.enter()?;
        let mut pointer = 0;
        // SAFETY: writes one address; the driver refuses zero bytes.
        let code = unsafe { sys::cuMemAlloc_v2(&mut pointer, bytes.max(1)) };
        check("cuMemAlloc", code).map_err(about(|| format!("{bytes} bytes")))?;
        self.memory.insert(DevicePtr(pointer), bytes);
        Ok(DevicePtr(pointer))
    }

    fn allocate_on_host(&mut self, bytes: usize) -> DriverResult<DevicePtr> {
        self.context.enter()?;
        let buffer = pinned::allocate(&self.context, bytes)?;
        // With unified addressing, the address is the same for the device.
        let pointer = DevicePtr(buffer.as_ptr().addr() as u64);
        self.on_host.insert(pointer, buffer);
        Ok(pointer)
    }

    fn free(&mut self, pointer: DevicePtr) -> DriverResult<()> {
        self.context.enter()?;
        if let Some(buffer) = self.on_host.remove(&pointer) {
            return pinned::free(&self.context, buffer);
        }
        if self.memory.remove(&pointer).is_none() {
            let reason = format!("expected an address of this driver, got {:#x}", pointer.0);
            return Err(DriverError::new("cuMemFree", reason));
        }
        // SAFETY: given by `allocate` and not freed since.
        check("cuMemFree", unsafe { sys::cuMemFree_v2(pointer.0) })
    }

    fn allocate_pinned(&mut self, bytes: usize) -> DriverResult<PinnedBuffer> {
        self.context.enter()?;
        pinned::allocate(&self.context, bytes)
    }

    fn free_pinned(&mut self, buffer: PinnedBuffer) -> DriverResult<()> {
        self.context.enter()?;
        pinned::free(&self.context, buffer)
    }

    fn stream(&mut self, priority: Priority) -> DriverResult<Stream> {
        self.context.enter()?;
        self.context.add_stream(priority)
    }

    fn foreign_stream(&mut self, handle: u64) -> DriverResult<Stream> {
        Ok(self.context.add_foreign_stream(handle))
    }

    fn event(&mut self, timing: bool) -> DriverResult<Event> {
        use sys::CUevent_flags_enum as Flags;
        self.context.enter()?;
        let flags = if timing { Flags::CU_EVENT_DEFAULT } else { Flags::CU_EVENT_DISABLE_TIMING };
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags as u32) })?;
        self.events.push(EventSlot { raw, has_timing: timing });
        Ok(Event(self.events.len() as u64 - 1))
    }

    fn record(&mut self, event: Event, stream: Stream) -> DriverResult<()> {
        self.context.enter()?;
        let slot = self.event_slot(event)?;
        let stream = self.context.resolve(stream)?;
        if slot.has_timing && is_capturing(stream)? {
            let external = sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL as u32;
            // SAFETY: both handles are alive.
            let code = unsafe { sys::cuEventRecordWithFlags(slot.raw, stream, external) };
            return check("cuEventRecordWithFlags", code);
        }
        // SAFETY: both handles are alive.
        check("cuEventRecord", unsafe { sys::cuEventRecord(slot.raw, stream) })
    }

    fn wait(&mut self, stream: Stream, event: Event) -> DriverResult<()> {
        self.context.enter()?;
        let stream = self.context.resolve(stream)?;
        let raw = self.event_slot(event)?.raw;
        // SAFETY: both handles are alive; zero is the default behaviour.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, raw, 0) })
    }

    fn is_done(&mut self, event: Event) -> DriverResult<bool> {
        self.context.enter()?;
        // SAFETY: the handle is alive.
        match unsafe { sys::cuEventQuery(self.event_slot(event)?.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    fn synchronize_event(&mut self, event: Event) -> DriverResult<()> {
        self.context.enter()?;
        let raw = self.event_slot(event)?.raw;
        // SAFETY: the handle is alive.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(raw) })
    }

    fn synchronize(&mut self) -> DriverResult<()> {
        self.context.enter()?;
        self.context.synchronize()
    }

    fn synchronize_device(&mut self) -> DriverResult<()> {
        self.context.enter()?;
        // SAFETY: takes nothing; the context is current.
        let code = self.context.alone("cuCtxSynchronize", || unsafe { sys::cuCtxSynchronize() })?;
        check("cuCtxSynchronize", code)
    }

    fn elapsed_ms(&mut self, from: Event, to: Event) -> DriverResult<f32> {
        self.context.enter()?;
        let from = self.event_slot(from)?.raw;
        let to = self.event_slot(to)?.raw;
        let mut elapsed_ms = 0.0;
        // SAFETY: both handles are alive; writes one number.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime_v2(&mut elapsed_ms, from, to)
        })?;
        Ok(elapsed_ms)
    }

    fn upload(&mut self, target: DevicePtr, bytes: &[u8]) -> DriverResult<()> {
        self.context.enter()?;
        self.context.synchronize()?;
        if bytes.is_empty() {
            return Ok(());
        }
        if let Some(host) = self.host_memory(target, bytes.len()) {
            pinned::copy(host, bytes);
            return Ok(());
        }
        let stream = self.context.transfers();
        // SAFETY: the source lives until the stream is waited for, which is before the return.
        check("cuMemcpyAsync", unsafe {
            sys::cuMemcpyAsync(target.0, bytes.as_ptr().addr() as u64, bytes.len(), stream)
        })?;
        // SAFETY: the stream lives as long as the context.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
    }

    fn download(&mut self, bytes: &mut [u8], source: DevicePtr) -> DriverResult<()> {
        self.context.enter()?;
        self.context.synchronize()?;
        if bytes.is_empty() {
            return Ok(());
        }
        if let Some(host) = self.host_memory(source, bytes.len()) {
            pinned::copy(bytes, host);
            return Ok(());
        }
        let stream = self.context.transfers();
        // SAFETY: the target is borrowed until the stream is waited for, which is before the
        // return.
        check("cuMemcpyAsync", unsafe {
            sys::cuMemcpyAsync(bytes.as_mut_ptr().addr() as u64, source.0, bytes.len(), stream)
        })?;
        // SAFETY: the stream lives as long as the context.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
    }

    unsafe fn copy_from_pinned(
        &mut self,
        target: DevicePtr,
        source: &PinnedBuffer,
        source_offset: usize,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        self.context.enter()?;
        let source = pinned::range(source, source_offset, bytes)?;
        let stream = self.context.resolve(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: within the buffer, which the caller keeps, untouched, while the copy runs.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(target.0, source.cast(), bytes, stream)
        })
    }

    unsafe fn copy_to_pinned(
        &mut self,
        target: &PinnedBuffer,
        target_offset: usize,
        source: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        self.context.enter()?;
        let target = pinned::range(target, target_offset, bytes)?;
        let stream = self.context.resolve(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: within the buffer, which the caller keeps, untouched, while the copy runs.
        check("cuMemcpyAsync", unsafe {
            sys::cuMemcpyAsync(target.addr() as u64, source.0, bytes, stream)
        })
    }

    fn copy(
        &mut self,
        target: DevicePtr,
        source: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        self.context.enter()?;
        let stream = self.context.resolve(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: device addresses are the device's to check.
        check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(target.0, source.0, bytes, stream) })
    }

    fn fill(
        &mut self,
        target: DevicePtr,
        byte: u8,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        self.context.enter()?;
        let stream = self.context.resolve(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: device addresses are the device's to check.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(target.0, byte, bytes, stream) })
    }

    fn load_module(&mut self, image: &[u8]) -> DriverResult<Module> {
        self.context.enter()?;
        self.modules.push(launch::load_module(image)?);
        Ok(Module(self.modules.len() as u64 - 1))
    }

    fn function(
        &mut self,
        module: Module,
        name: &str,
        shared_bytes: u32,
    ) -> DriverResult<Function> {
        self.context.enter()?;
        let key = (module, name.to_string());
        let function = match self.kernels_known.get(&key) {
            Some(&function) => function,
            None => {
                let module = self.modules.get(module.0 as usize);
                let module = *module.ok_or_else(|| no_such("module", key.0.0))?;
                self.kernels.push(Kernel::find(module, name)?);
                let function = Function(self.kernels.len() as u64 - 1);
                self.kernels_known.insert(key, function);
                function
            }
        };
        self.kernels[function.0 as usize].allow_shared(shared_bytes)?;
        Ok(function)
    }

    fn ctas_per_sm(
        &mut self,
        function: Function,
        threads: u32,
        shared_bytes: u32,
    ) -> DriverResult<u32> {
        self.context.enter()?;
        let kernel = self.kernels.get(function.0 as usize);
        kernel.ok_or_else(|| no_such("function", function.0))?.occupancy(threads, shared_bytes)
    }

    fn tensor_map(&mut self, spec: &TensorMapSpec) -> DriverResult<TensorMap> {
        self.context.enter()?;
        launch::tensor_map(spec)
    }

    fn launch(&mut self, launch: &Launch, stream: Stream) -> DriverResult<()> {
        self.context.enter()?;
        let stream = self.context.resolve(stream)?;
        let kernel = self.kernels.get_mut(launch.function.0 as usize);
        kernel.ok_or_else(|| no_such("function", launch.function.0))?.launch(launch, stream)
    }

    fn begin_capture(&mut self, stream: Stream) -> DriverResult<()> {
        self.context.enter()?;
        self.context.begin_capture(stream)
    }

    fn begin_group(&mut self, stream: Stream) -> DriverResult<()> {
        self.context.enter()?;
        self.context.begin_group(stream)
    }

    fn end_group(&mut self, stream: Stream) -> DriverResult<()> {
        self.context.enter()?;
        self.context.end_group(stream)
    }

    fn end_capture(&mut self, stream: Stream) -> DriverResult<CapturedGraph> {
        self.context.enter()?;
        self.graphs.push(Some(self.context.end_capture(stream)?));
        Ok(CapturedGraph(self.graphs.len() as u64 - 1))
    }

    fn graph_nodes(&mut self, graph: CapturedGraph) -> DriverResult<usize> {
        self.context.enter()?;
        self.graph(graph)?.node_count()
    }

    fn launch_graph(&mut self, graph: CapturedGraph, stream: Stream) -> DriverResult<()> {
        self.context.enter()?;
        let stream = self.context.resolve(stream)?;
        self.graph(graph)?.launch(stream)
    }

    fn free_graph(&mut self, graph: CapturedGraph) -> DriverResult<()> {
        self.context.enter()?;
        let slot = self.graphs.get_mut(graph.0 as usize).and_then(Option::take);
        slot.map(drop).ok_or_else(|| no_such("graph", graph.0))
    }
}
