//! A driver whose streams run on the host.

mod counts;
mod exchange;
mod host_blas;
mod machine;
mod pinned;
mod state;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::pinned::HostPinned;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{
    CapturedGraph, DeviceProperties, DevicePtr, Driver, DriverError, DriverResult, Event, Function,
    Launch, Module, Priority, Stream, TensorMap, TensorMapSpec,
};
use crate::runtime::cuda::pinned::PinnedBuffer;

pub use self::counts::{Counts, FakeCounts, FakeNode};
pub use self::exchange::HostComm;
pub use self::host_blas::HostBlas;
pub use self::machine::Machine;
pub(super) use self::state::{State, Work, no_such};

/// Numbers drivers, so that a buffer of another driver is detected.
static DRIVERS: AtomicUsize = AtomicUsize::new(0);

pub(super) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A driver with streams, events, captures and pinned memory on the host, for a [`Machine`] that
/// provides the device memory and executes launches.
///
/// Work runs when it is enqueued, or when its graph is launched; an error of a launch is the error
/// of the call that enqueued it. The clock is simulated: every operation takes a millisecond.
pub struct HostDriver<M> {
    properties: DeviceProperties,
    number: usize,
    shared: Arc<Mutex<State<M>>>,
}

impl<M: Machine> HostDriver<M> {
    /// Creates a driver for a machine that reports `properties`.
    pub(super) fn with_machine(properties: DeviceProperties, machine: M) -> HostDriver<M> {
        let number = DRIVERS.fetch_add(1, Ordering::Relaxed);
        HostDriver { properties, number, shared: Arc::new(Mutex::new(State::new(machine))) }
    }

    /// A handle to the counts of this driver's calls.
    pub fn counts(&self) -> FakeCounts {
        self.state().counts.clone()
    }

    /// Creates collectives through `comm`, in this driver's streams.
    pub fn comm(&self, comm: Box<dyn crate::Comm>) -> HostComm<M> {
        HostComm::new(Arc::clone(&self.shared), comm)
    }

    /// The shared state, for libraries that enqueue work.
    pub(super) fn shared(&self) -> &Arc<Mutex<State<M>>> {
        &self.shared
    }

    fn state(&self) -> MutexGuard<'_, State<M>> {
        lock(&self.shared)
    }
}

impl<M: Machine> Driver for HostDriver<M> {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&mut self) -> DriverResult<(u64, u64)> {
        Ok(self.state().machine.memory())
    }

    fn allocate(&mut self, bytes: usize) -> DriverResult<DevicePtr> {
        let mut state = self.state();
        state.counts.change(|counts| counts.allocations += 1);
        state.machine.allocate(bytes)
    }

    /// Memory of the machine: host and device are one.
    fn allocate_on_host(&mut self, bytes: usize) -> DriverResult<DevicePtr> {
        let pointer = self.allocate(bytes)?;
        self.state().machine.fill(pointer, 0, bytes)?;
        Ok(pointer)
    }

    fn free(&mut self, pointer: DevicePtr) -> DriverResult<()> {
        let mut state = self.state();
        state.counts.change(|counts| counts.frees += 1);
        state.machine.free(pointer)
    }

    fn allocate_pinned(&mut self, bytes: usize) -> DriverResult<PinnedBuffer> {
        self.state().counts.change(|counts| counts.pinned_allocations += 1);
        Ok(HostPinned::allocate(bytes, self.number))
    }

    fn free_pinned(&mut self, buffer: PinnedBuffer) -> DriverResult<()> {
        HostPinned::of(&buffer, self.number).map(|_| ())
    }

    fn stream(&mut self, _priority: Priority) -> DriverResult<Stream> {
        let mut state = self.state();
        state.streams.push(state::StreamState::default());
        Ok(Stream(state.streams.len() as u64 - 1))
    }

    fn foreign_stream(&mut self, _handle: u64) -> DriverResult<Stream> {
        self.stream(Priority::Middle)
    }

    fn event(&mut self, timing: bool) -> DriverResult<Event> {
        Ok(Event(self.state().add_event(timing) as u64))
    }

    fn record(&mut self, event: Event, stream: Stream) -> DriverResult<()> {
        self.state().record(event.0 as usize, stream)
    }

    fn wait(&mut self, stream: Stream, event: Event) -> DriverResult<()> {
        self.state().wait(stream, event.0 as usize)
    }

    fn is_done(&mut self, event: Event) -> DriverResult<bool> {
        self.state().is_done(event.0 as usize)
    }

    fn synchronize_event(&mut self, event: Event) -> DriverResult<()> {
        let mut state = self.state();
        state.counts.change(|counts| counts.event_synchronizations += 1);
        state.is_done(event.0 as usize).map(|_| ())
    }

    fn synchronize(&mut self) -> DriverResult<()> {
        self.state().counts.change(|counts| counts.synchronizations += 1);
        Ok(())
    }

    fn elapsed_ms(&mut self, from: Event, to: Event) -> DriverResult<f32> {
        self.state().elapsed_ms(from.0 as usize, to.0 as usize)
    }

    fn upload(&mut self, target: DevicePtr, bytes: &[u8]) -> DriverResult<()> {
        let mut state = self.state();
        state.counts.change(|counts| counts.uploads += 1);
        state.machine.write(target, bytes)
    }

    fn download(&mut self, bytes: &mut [u8], source: DevicePtr) -> DriverResult<()> {
        let mut state = self.state();
        state.counts.change(|counts| counts.downloads += 1);
        state.machine.read(bytes, source)
    }

    #[allow(unsafe_code)]
    unsafe fn copy_from_pinned(
        &mut self,
        target: DevicePtr,
        source: &PinnedBuffer,
        source_offset: usize,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        let source = Arc::clone(HostPinned::of(source, self.number)?);
        source.check(source_offset, bytes)?;
        let mut state = self.state();
        state.machine.check(target, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        state.put(stream, Work::FromPinned { target, source, offset: source_offset, bytes })
    }

    #[allow(unsafe_code)]
    unsafe fn copy_to_pinned(
        &mut self,
        target: &PinnedBuffer,
        target_offset: usize,
        source: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        let target = Arc::clone(HostPinned::of(target, self.number)?);
        target.check(target_offset, bytes)?;
        let mut state = self.state();
        state.machine.check(source, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        state.put(stream, Work::ToPinned { target, offset: target_offset, source, bytes })
    }

    fn copy(
        &mut self,
        target: DevicePtr,
        source: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        let mut state = self.state();
        state.machine.check(target, bytes)?;
        state.machine.check(source, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        state.put(stream, Work::Copy { target, source, bytes })
    }

    fn fill(
        &mut self,
        target: DevicePtr,
        byte: u8,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        let mut state = self.state();
        state.machine.check(target, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        state.put(stream, Work::Fill { target, byte, bytes })
    }

    fn load_module(&mut self, image: &[u8]) -> DriverResult<Module> {
        let mut state = self.state();
        state.counts.change(|counts| counts.modules += 1);
        state.machine.load_module(image)
    }

    fn function(
        &mut self,
        module: Module,
        name: &str,
        shared_bytes: u32,
    ) -> DriverResult<Function> {
        let most = self.properties.shared_bytes_per_cta;
        let function = self.state().machine.function(module, name)?;
        if shared_bytes > most {
            return Err(DriverError::new(
                "function",
                format!(
                    "kernel `{name}`: expected at most {most} bytes of shared memory, got \
                     {shared_bytes}",
                ),
            ));
        }
        Ok(function)
    }

    fn ctas_per_sm(
        &mut self,
        function: Function,
        threads: u32,
        shared_bytes: u32,
    ) -> DriverResult<u32> {
        self.state().machine.ctas_per_sm(function, threads, shared_bytes)
    }

    fn tensor_map(&mut self, spec: &TensorMapSpec) -> DriverResult<TensorMap> {
        self.state().machine.tensor_map(spec)
    }

    fn expect_outputs(&mut self, outputs: &[DeviceTensor]) {
        self.state().machine.expect_outputs(outputs);
    }

    fn launch(&mut self, launch: &Launch, stream: Stream) -> DriverResult<()> {
        let mut state = self.state();
        let kernel = state.machine.kernel_name(launch.function)?.to_string();
        if launch.grid.contains(&0) || launch.block.contains(&0) {
            return Err(DriverError::new(
                "launch",
                format!(
                    "kernel `{kernel}`: expected at least one block and thread, got grid {:?} and \
                     block {:?}",
                    launch.grid, launch.block
                ),
            ));
        }
        state.put(stream, Work::Launch { kernel, launch: Arc::new(launch.clone()) })
    }

    fn begin_capture(&mut self, stream: Stream) -> DriverResult<()> {
        self.state().begin_capture(stream)
    }

    fn begin_group(&mut self, stream: Stream) -> DriverResult<()> {
        self.state().begin_group(stream)
    }

    fn end_group(&mut self, stream: Stream) -> DriverResult<()> {
        self.state().end_group(stream)
    }

    fn end_capture(&mut self, stream: Stream) -> DriverResult<CapturedGraph> {
        Ok(CapturedGraph(self.state().end_capture(stream)? as u64))
    }

    fn graph_nodes(&mut self, graph: CapturedGraph) -> DriverResult<usize> {
        let state = self.state();
        let work = state.graphs.get(graph.0 as usize).and_then(Option::as_ref);
        work.map(Vec::len).ok_or_else(|| no_such("graph", graph.0))
    }

    fn launch_graph(&mut self, graph: CapturedGraph, stream: Stream) -> DriverResult<()> {
        self.graph_nodes(graph)?;
        // Announced outputs belong to launches outside of captures.
        self.state().machine.expect_outputs(&[]);
        self.state().put(stream, Work::Graph { graph: graph.0 as usize })
    }

    fn free_graph(&mut self, graph: CapturedGraph) -> DriverResult<()> {
        let mut state = self.state();
        let slot = state.graphs.get_mut(graph.0 as usize).and_then(Option::take);
        slot.map(drop).ok_or_else(|| no_such("graph", graph.0))
    }
}
