//! A driver without a GPU.

mod counts;
mod memory;
mod pinned;
mod state;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::pinned::FakePinned;
use self::state::{State, Work, no_such};
use super::blas::{Blas, Matmul, MatmulPlan};
use super::driver::{
    DeviceProperties, DevicePtr, Driver, DriverError, DriverResult, Event, Function, Graph, Launch,
    Module, Stream, TensorMap, TensorMapSpec,
};
use super::pinned::PinnedBuffer;

pub use self::counts::{Counts, FakeCounts, FakeNode};

/// Threads that a multiprocessor holds.
const THREADS_PER_MULTIPROCESSOR: u32 = 2048;
/// Numbers drivers, so that a buffer is known as its driver's.
static DRIVERS: AtomicUsize = AtomicUsize::new(0);

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A driver without a GPU, for tests and for planning: memory is the host's, copies and fills
/// work, kernels and products are counted and compute nothing.
///
/// Memory takes room on the host only where it was written to; what was not holds `0xFF`. All work
/// is done when it is enqueued, or when the graph is launched that it was recorded into. Modules
/// may hold anything and have kernels of every name. Its clock is made up: everything that runs
/// takes a millisecond.
///
/// ```
/// use deepwell_kernels::cuda::{Driver, FakeDriver};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut driver = FakeDriver::h200();
/// let counts = driver.counts();
/// let pointer = driver.allocate(4)?;
/// driver.upload(pointer, &[1, 2, 3, 4])?;
/// let mut bytes = [0; 2];
/// driver.download(&mut bytes, pointer.offset(1))?;
/// assert_eq!(bytes, [2, 3]);
/// assert_eq!((counts.read().allocations, counts.read().uploads), (1, 1));
/// # Ok(())
/// # }
/// ```
pub struct FakeDriver {
    properties: DeviceProperties,
    number: usize,
    modules: u64,
    kernels: Vec<String>,
    shared: Arc<Mutex<State>>,
}

impl FakeDriver {
    /// A driver for a device with these properties.
    pub fn new(properties: DeviceProperties) -> FakeDriver {
        let shared = Arc::new(Mutex::new(State::new(properties.memory_bytes)));
        let number = DRIVERS.fetch_add(1, Ordering::Relaxed);
        FakeDriver { properties, number, modules: 0, kernels: Vec::new(), shared }
    }

    /// A driver for an H200, with what its driver says of it.
    pub fn h200() -> FakeDriver {
        FakeDriver::new(DeviceProperties {
            name: "NVIDIA H200 (fake)".to_string(),
            capability: (9, 0),
            multiprocessors: 132,
            memory_bytes: 143_771 << 20,
            l2_bytes: 60 << 20,
            shared_bytes_per_block: 227 << 10,
            cuda_version: 13_000,
        })
    }

    /// A handle to the counts of this driver and of its [`FakeBlas`].
    pub fn counts(&self) -> FakeCounts {
        FakeCounts::of(&self.shared)
    }

    /// Matrix products that go into this driver's streams.
    pub fn blas(&self) -> FakeBlas {
        FakeBlas { plans: Vec::new(), shared: Arc::clone(&self.shared) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared)
    }
}

impl Driver for FakeDriver {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&mut self) -> DriverResult<(u64, u64)> {
        Ok(self.state().memory.free_and_total())
    }

    fn allocate(&mut self, bytes: usize) -> DriverResult<DevicePtr> {
        let mut state = self.state();
        state.counts.allocations += 1;
        state.memory.allocate(bytes)
    }

    fn free(&mut self, pointer: DevicePtr) -> DriverResult<()> {
        let mut state = self.state();
        state.counts.frees += 1;
        state.memory.free(pointer)
    }

    fn allocate_pinned(&mut self, bytes: usize) -> DriverResult<PinnedBuffer> {
        self.state().counts.pinned_allocations += 1;
        Ok(FakePinned::allocate(bytes, self.number))
    }

    fn free_pinned(&mut self, buffer: PinnedBuffer) -> DriverResult<()> {
        FakePinned::of(&buffer, self.number).map(|_| ())
    }

    fn stream(&mut self, _high_priority: bool) -> DriverResult<Stream> {
        let mut state = self.state();
        state.streams.push(state::StreamState::default());
        Ok(Stream(state.streams.len() as u64 - 1))
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
        state.counts.event_synchronizations += 1;
        state.is_done(event.0 as usize).map(|_| ())
    }

    fn synchronize(&mut self) -> DriverResult<()> {
        self.state().counts.synchronizations += 1;
        Ok(())
    }

    fn elapsed_ms(&mut self, from: Event, to: Event) -> DriverResult<f32> {
        self.state().elapsed_ms(from.0 as usize, to.0 as usize)
    }

    fn upload(&mut self, target: DevicePtr, bytes: &[u8]) -> DriverResult<()> {
        let mut state = self.state();
        state.counts.uploads += 1;
        state.memory.write(target, bytes)
    }

    fn download(&mut self, bytes: &mut [u8], source: DevicePtr) -> DriverResult<()> {
        let mut state = self.state();
        state.counts.downloads += 1;
        state.memory.read(bytes, source)
    }

    fn copy_from_pinned(
        &mut self,
        target: DevicePtr,
        source: &PinnedBuffer,
        source_offset: usize,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        let source = Arc::clone(FakePinned::of(source, self.number)?);
        source.check(source_offset, bytes)?;
        let mut state = self.state();
        state.memory.check(target, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        state.put(stream, Work::FromPinned { target, source, offset: source_offset, bytes })
    }

    fn copy_to_pinned(
        &mut self,
        target: &PinnedBuffer,
        target_offset: usize,
        source: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        let target = Arc::clone(FakePinned::of(target, self.number)?);
        target.check(target_offset, bytes)?;
        let mut state = self.state();
        state.memory.check(source, bytes)?;
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
        state.memory.check(target, bytes)?;
        state.memory.check(source, bytes)?;
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
        state.memory.check(target, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        state.put(stream, Work::Fill { target, byte, bytes })
    }

    fn load_module(&mut self, _image: &[u8]) -> DriverResult<Module> {
        self.state().counts.modules += 1;
        self.modules += 1;
        Ok(Module(self.modules - 1))
    }

    fn function(
        &mut self,
        module: Module,
        name: &str,
        shared_bytes: u32,
    ) -> DriverResult<Function> {
        if module.0 >= self.modules {
            return Err(no_such("module", module.0));
        }
        if shared_bytes > self.properties.shared_bytes_per_block {
            return Err(DriverError::new(
                "function",
                format!(
                    "kernel `{name}`: expected at most {} bytes of shared memory, got \
                     {shared_bytes}",
                    self.properties.shared_bytes_per_block
                ),
            ));
        }
        self.kernels.push(name.to_string());
        Ok(Function(self.kernels.len() as u64 - 1))
    }

    fn blocks_per_multiprocessor(
        &mut self,
        _function: Function,
        threads: u32,
        _shared_bytes: u32,
    ) -> DriverResult<u32> {
        Ok(THREADS_PER_MULTIPROCESSOR / threads.max(1))
    }

    fn tensor_map(&mut self, spec: &TensorMapSpec) -> DriverResult<TensorMap> {
        let mut map = TensorMap([0; 16]);
        map.0[0] = spec.base.0;
        Ok(map)
    }

    fn launch(&mut self, launch: &Launch, stream: Stream) -> DriverResult<()> {
        let kernel = self.kernels.get(launch.function.0 as usize);
        let kernel = kernel.ok_or_else(|| no_such("function", launch.function.0))?.clone();
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
        self.state().put(stream, Work::Launch { kernel })
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

    fn end_capture(&mut self, stream: Stream) -> DriverResult<Graph> {
        Ok(Graph(self.state().end_capture(stream)? as u64))
    }

    fn graph_nodes(&mut self, graph: Graph) -> DriverResult<usize> {
        let state = self.state();
        let work = state.graphs.get(graph.0 as usize).and_then(Option::as_ref);
        work.map(Vec::len).ok_or_else(|| no_such("graph", graph.0))
    }

    fn launch_graph(&mut self, graph: Graph, stream: Stream) -> DriverResult<()> {
        self.graph_nodes(graph)?;
        self.state().put(stream, Work::Graph { graph: graph.0 as usize })
    }

    fn free_graph(&mut self, graph: Graph) -> DriverResult<()> {
        let mut state = self.state();
        let slot = state.graphs.get_mut(graph.0 as usize).and_then(Option::take);
        slot.map(drop).ok_or_else(|| no_such("graph", graph.0))
    }
}

/// Matrix products that are checked and counted and compute nothing; made by [`FakeDriver::blas`].
pub struct FakeBlas {
    plans: Vec<Matmul>,
    shared: Arc<Mutex<State>>,
}

impl Blas for FakeBlas {
    fn version(&self) -> String {
        "no library".to_string()
    }

    fn plan(&mut self, matmul: &Matmul) -> DriverResult<MatmulPlan> {
        matmul.check()?;
        self.plans.push(*matmul);
        Ok(MatmulPlan(self.plans.len() - 1))
    }

    fn run(&mut self, plan: MatmulPlan, stream: Stream) -> DriverResult<()> {
        if plan.0 >= self.plans.len() {
            return Err(no_such("matmul plan", plan.0 as u64));
        }
        lock(&self.shared).put(stream, Work::Matmul)
    }

    fn forget_plans(&mut self) {
        self.plans.clear();
    }
}
