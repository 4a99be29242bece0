//! The seam between the CUDA backend and what executes for it: a real driver, an emulator, or a
//! test that counts.
//!
//! [`Driver`] is object-safe and names no type of any binding. Handles are numbers that only the
//! driver which gave them understands; they are freed when the driver is dropped, except memory,
//! which has its own calls.

use std::fmt;

use thiserror::Error;

use super::pinned::PinnedBuffer;
use super::prepare::DeviceTensor;

/// An address in device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` further on.
    pub fn offset(self, bytes: usize) -> DevicePtr {
        DevicePtr(self.0 + bytes as u64)
    }
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);)*
    };
}

handles! {
    /// A queue of work on the device.
    Stream,
    /// A point in a stream.
    Event,
    /// A loaded binary with kernels.
    Module,
    /// A kernel of a module.
    Function,
    /// A recorded sequence of work that is launched as one.
    CapturedGraph,
}

/// Which streams are served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// What fills the gaps of others.
    Low,
    /// What the next step waits for.
    Middle,
    /// What takes few SMs, or none, and others wait for: exchanges and copies.
    High,
}

/// What a device says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Name as the vendor writes it.
    pub name: String,
    /// Compute capability, `(9, 0)` for Hopper.
    pub capability: (u32, u32),
    /// SMs.
    pub sm_count: u32,
    /// Memory of the device.
    pub memory_bytes: u64,
    /// Second-level cache.
    pub l2_bytes: u64,
    /// Shared memory that one CTA may ask for.
    pub shared_bytes_per_cta: u32,
    /// Newest CUDA version that the driver serves, `13000` for 13.0.
    pub cuda_version: u32,
}

/// One argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// An address.
    Pointer(DevicePtr),
    /// A C `int`.
    I32(i32),
    /// A C `unsigned`.
    U32(u32),
    /// A C `long long`.
    I64(i64),
    /// A C `unsigned long long`.
    U64(u64),
    /// A C `float`.
    F32(f32),
    /// A tensor map as [`Driver::tensor_map`] made it, passed as `__grid_constant__`.
    TensorMap(TensorMap),
}

/// A tensor map in the driver's own encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct TensorMap(pub [u64; 16]);

/// Element type of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorMapElement {
    /// One byte.
    U8,
    /// Two bytes.
    Bf16,
    /// Four bytes.
    F32,
}

/// Rotation of 16-byte units in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorMapSwizzle {
    /// None.
    None,
    /// Within 32 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

/// A tensor in device memory and the box that one bulk copy takes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMapSpec {
    /// First byte, 16-byte aligned.
    pub base: DevicePtr,
    /// Element type.
    pub element: TensorMapElement,
    /// Sizes, innermost first, at most five.
    pub sizes: Vec<u64>,
    /// Bytes from one index to the next of each dimension but the innermost.
    pub strides_bytes: Vec<u64>,
    /// Box, innermost first.
    pub box_sizes: Vec<u32>,
    /// Swizzle of the box in shared memory.
    pub swizzle: TensorMapSwizzle,
}

/// How a kernel is launched.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The kernel.
    pub function: Function,
    /// CTAs.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub block: [u32; 3],
    /// CTAs of a cluster; `[1, 1, 1]` for none.
    pub cluster: [u32; 3],
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    /// Whether it may start before its predecessor ends and waits for it on the device.
    pub programmatic: bool,
    /// In the order of the kernel's parameters.
    pub arguments: Vec<Argument>,
}

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("cuda: {call}: {reason}")]
pub struct DriverError {
    /// The call, `cuLaunchKernelEx` for example.
    pub call: String,
    /// Name and meaning of the error code, and a hint where there is one.
    pub reason: String,
    /// Whether memory ran out.
    pub out_of_memory: bool,
}

impl DriverError {
    /// An error that is not about memory.
    pub fn new(call: impl Into<String>, reason: impl fmt::Display) -> DriverError {
        DriverError { call: call.into(), reason: reason.to_string(), out_of_memory: false }
    }
}

/// Result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// Everything that the CUDA backend asks of what runs its kernels.
///
/// Calls on one stream run in order; nothing orders two streams but events. While a stream is
/// captured, launches, copies, fills, records and waits on it are recorded instead of run; pinned
/// buffers that they name live as long as the graph does.
pub trait Driver: Send {
    /// The device.
    fn properties(&self) -> &DeviceProperties;

    /// Free and total bytes of the device, as the driver counts them.
    ///
    /// # Errors
    /// A lost device.
    fn memory(&mut self) -> DriverResult<(u64, u64)>;

    /// Device memory, aligned to 256 bytes at least; its contents are anything.
    ///
    /// # Errors
    /// Out of memory.
    fn allocate(&mut self, bytes: usize) -> DriverResult<DevicePtr>;

    /// Gives memory back. Work that uses it has ended.
    ///
    /// # Errors
    /// An address that was not given.
    fn free(&mut self, pointer: DevicePtr) -> DriverResult<()>;

    /// Zeroed pinned host memory.
    ///
    /// # Errors
    /// Out of memory.
    fn allocate_pinned(&mut self, bytes: usize) -> DriverResult<PinnedBuffer>;

    /// Gives pinned memory back. Copies that use it have ended.
    ///
    /// # Errors
    /// A buffer of another driver.
    fn free_pinned(&mut self, buffer: PinnedBuffer) -> DriverResult<()>;

    /// A new stream.
    ///
    /// # Errors
    /// A lost device.
    fn stream(&mut self, priority: Priority) -> DriverResult<Stream>;

    /// A new event; with `timing`, [`Driver::elapsed_ms`] reads it.
    ///
    /// # Errors
    /// A lost device.
    fn event(&mut self, timing: bool) -> DriverResult<Event>;

    /// Puts `event` behind all work in `stream`. Within a capture, an event with timing becomes a
    /// node that each launch of the graph records anew; one without is only what another stream
    /// waits for to join the capture.
    ///
    /// # Errors
    /// A lost device.
    fn record(&mut self, event: Event, stream: Stream) -> DriverResult<()>;

    /// Lets later work in `stream` wait for `event`.
    ///
    /// # Errors
    /// A lost device.
    fn wait(&mut self, stream: Stream, event: Event) -> DriverResult<()>;

    /// Whether all work before `event` has ended.
    ///
    /// # Errors
    /// What that work failed with.
    fn is_done(&mut self, event: Event) -> DriverResult<bool>;

    /// Waits on the host until `event` is done.
    ///
    /// # Errors
    /// What the work before it failed with.
    fn synchronize_event(&mut self, event: Event) -> DriverResult<()>;

    /// Waits on the host until all streams are empty.
    ///
    /// # Errors
    /// What the work failed with.
    fn synchronize(&mut self) -> DriverResult<()>;

    /// Waits on the host until all work of the device's context has ended, that of streams which
    /// others have made too.
    ///
    /// # Errors
    /// What the work failed with.
    fn synchronize_device(&mut self) -> DriverResult<()> {
        self.synchronize()
    }

    /// Milliseconds between two events that are done.
    ///
    /// # Errors
    /// Events without timing, or not done.
    fn elapsed_ms(&mut self, from: Event, to: Event) -> DriverResult<f32>;

    /// Waits until all streams are empty, copies to the device, and waits until the bytes are
    /// there.
    ///
    /// # Errors
    /// A lost device.
    fn upload(&mut self, target: DevicePtr, bytes: &[u8]) -> DriverResult<()>;

    /// Waits until all streams are empty, copies from the device, and waits for the bytes.
    ///
    /// # Errors
    /// What earlier work failed with.
    fn download(&mut self, bytes: &mut [u8], source: DevicePtr) -> DriverResult<()>;

    /// Enqueues a copy of `bytes` bytes from `source_offset` of a pinned buffer.
    ///
    /// # Safety
    /// Until the copy has ended, and while a graph that it is recorded in may run, nobody writes
    /// to the buffer or drops it.
    ///
    /// # Errors
    /// A range outside of the buffer.
    #[allow(unsafe_code)]
    unsafe fn copy_from_pinned(
        &mut self,
        target: DevicePtr,
        source: &PinnedBuffer,
        source_offset: usize,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()>;

    /// Enqueues a copy of `bytes` bytes to `target_offset` of a pinned buffer.
    ///
    /// # Safety
    /// Until the copy has ended, and while a graph that it is recorded in may run, nobody reads or
    /// writes the buffer or drops it.
    ///
    /// # Errors
    /// A range outside of the buffer.
    #[allow(unsafe_code)]
    unsafe fn copy_to_pinned(
        &mut self,
        target: &PinnedBuffer,
        target_offset: usize,
        source: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()>;

    /// Enqueues a copy within the device.
    ///
    /// # Errors
    /// A lost device.
    fn copy(
        &mut self,
        target: DevicePtr,
        source: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()>;

    /// Enqueues a fill with one byte.
    ///
    /// # Errors
    /// A lost device.
    fn fill(
        &mut self,
        target: DevicePtr,
        byte: u8,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()>;

    /// Loads a cubin, or PTX text with a final zero byte.
    ///
    /// # Errors
    /// A binary for another architecture, or for a newer driver.
    fn load_module(&mut self, image: &[u8]) -> DriverResult<Module>;

    /// A kernel of a module, allowed `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// No kernel of that name, or more shared memory than a CTA may have.
    fn function(&mut self, module: Module, name: &str, shared_bytes: u32)
    -> DriverResult<Function>;

    /// CTAs of `threads` threads that one SM holds at a time.
    ///
    /// # Errors
    /// A function of another driver.
    fn ctas_per_sm(
        &mut self,
        function: Function,
        threads: u32,
        shared_bytes: u32,
    ) -> DriverResult<u32>;

    /// Encodes a tensor map.
    ///
    /// # Errors
    /// Sizes, strides or boxes that the hardware does not take.
    fn tensor_map(&mut self, spec: &TensorMapSpec) -> DriverResult<TensorMap>;

    /// Tells what the kernels write that are launched next. Only drivers that record launches
    /// listen.
    fn expect_outputs(&mut self, outputs: &[DeviceTensor]) {
        let _ = outputs;
    }

    /// Enqueues a kernel.
    ///
    /// # Errors
    /// A launch that the device refuses.
    fn launch(&mut self, launch: &Launch, stream: Stream) -> DriverResult<()>;

    /// Begins to record what is put into `stream`.
    ///
    /// # Errors
    /// A stream that is recorded already.
    fn begin_capture(&mut self, stream: Stream) -> DriverResult<()>;

    /// Begins a group within a capture: what follows, up to [`Driver::end_group`], becomes one
    /// node of the graph.
    ///
    /// # Errors
    /// A stream that is not recorded.
    fn begin_group(&mut self, stream: Stream) -> DriverResult<()>;

    /// Ends the group.
    ///
    /// # Errors
    /// No group was begun.
    fn end_group(&mut self, stream: Stream) -> DriverResult<()>;

    /// Ends the recording and makes it launchable.
    ///
    /// # Errors
    /// Work that cannot be recorded.
    fn end_capture(&mut self, stream: Stream) -> DriverResult<CapturedGraph>;

    /// Nodes of a graph; a group counts as one.
    ///
    /// # Errors
    /// A graph of another driver.
    fn graph_nodes(&mut self, graph: CapturedGraph) -> DriverResult<usize>;

    /// Enqueues a recorded graph.
    ///
    /// # Errors
    /// A lost device.
    fn launch_graph(&mut self, graph: CapturedGraph, stream: Stream) -> DriverResult<()>;

    /// Forgets a graph. Its launches have ended.
    ///
    /// # Errors
    /// A graph of another driver.
    fn free_graph(&mut self, graph: CapturedGraph) -> DriverResult<()>;
}
