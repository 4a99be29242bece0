//! The interface between the CUDA backend and the layer that executes: a real driver, an emulator,
//! or a fake that counts calls.
//!
//! [`Driver`] is object-safe and names no type of any binding. Handles are numbers, valid only for
//! the driver that returned them. Handles are freed when the driver is dropped, except memory,
//! which has its own calls.

use std::fmt;

use thiserror::Error;

use super::device_tensor::DeviceTensor;
use super::pinned::PinnedBuffer;

/// An address in device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` later.
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
    /// A loaded module with kernels.
    Module,
    /// A kernel of a module.
    Function,
    /// A captured CUDA graph, launched as one unit.
    CapturedGraph,
}

/// Scheduling priority of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Fills gaps of other streams.
    Low,
    /// On the critical path of the step.
    Middle,
    /// For work that takes few SMs or none and that others wait for: collectives and copies.
    High,
}

/// Properties reported by a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Name as the vendor writes it.
    pub name: String,
    /// Compute capability, `(9, 0)` for Hopper.
    pub capability: (u32, u32),
    /// SMs.
    pub sm_count: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Second-level cache.
    pub l2_bytes: u64,
    /// Maximum shared memory of a CTA.
    pub shared_bytes_per_cta: u32,
    /// Newest CUDA version that the driver supports, `13000` for 13.0.
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
    /// A tensor map from [`Driver::tensor_map`], passed as `__grid_constant__`.
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

/// Swizzle of 16-byte units in shared memory.
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

/// A tensor in device memory and the box that one tensor copy transfers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMapSpec {
    /// First byte, 16-byte aligned.
    pub base: DevicePtr,
    /// Element type.
    pub element: TensorMapElement,
    /// Sizes, innermost first, at most five.
    pub sizes: Vec<u64>,
    /// Stride in bytes of each dimension but the innermost.
    pub strides_bytes: Vec<u64>,
    /// Box, innermost first.
    pub box_sizes: Vec<u32>,
    /// Swizzle of the box in shared memory.
    pub swizzle: TensorMapSwizzle,
}

/// A kernel launch.
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
    /// Whether the kernel may start before its predecessor ends and synchronizes on the device
    /// (programmatic dependent launch).
    pub programmatic: bool,
    /// The kernel's parameters, in order.
    pub arguments: Vec<Argument>,
}

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("cuda: {call}: {reason}")]
pub struct DriverError {
    /// The call, `cuLaunchKernelEx` for example.
    pub call: String,
    /// Name and meaning of the error code, and a hint if there is one.
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

/// All operations that the CUDA backend needs to run its kernels.
///
/// Calls on a stream run in order; only events order different streams. While a stream is captured,
/// launches, copies, fills, records and waits on it become graph nodes instead of running. Pinned
/// buffers named by a capture live as long as the graph.
pub trait Driver: Send {
    /// The device.
    fn properties(&self) -> &DeviceProperties;

    /// Free and total bytes of the device, as the driver counts them.
    ///
    /// # Errors
    /// A lost device.
    fn memory(&mut self) -> DriverResult<(u64, u64)>;

    /// Allocates uninitialized device memory, aligned to at least 256 bytes.
    ///
    /// # Errors
    /// Out of memory.
    fn allocate(&mut self, bytes: usize) -> DriverResult<DevicePtr>;

    /// Allocates zeroed host memory that copies and kernels address like device memory.
    ///
    /// # Errors
    /// Out of memory.
    fn allocate_on_host(&mut self, bytes: usize) -> DriverResult<DevicePtr>;

    /// Frees memory of the device or of the host. All work that uses the memory must have ended.
    ///
    /// # Errors
    /// An address that this driver did not allocate.
    fn free(&mut self, pointer: DevicePtr) -> DriverResult<()>;

    /// Allocates zeroed pinned host memory.
    ///
    /// # Errors
    /// Out of memory.
    fn allocate_pinned(&mut self, bytes: usize) -> DriverResult<PinnedBuffer>;

    /// Frees pinned memory. All copies that use the buffer must have ended.
    ///
    /// # Errors
    /// A buffer of another driver.
    fn free_pinned(&mut self, buffer: PinnedBuffer) -> DriverResult<()>;

    /// Creates a stream.
    ///
    /// # Errors
    /// A lost device.
    fn stream(&mut self, priority: Priority) -> DriverResult<Stream>;

    /// Returns a handle to a stream of another library in the same context, by the driver API's own
    /// handle. The owner of the stream keeps it alive, and synchronizes it.
    ///
    /// # Errors
    /// A driver that has no streams of other libraries.
    fn foreign_stream(&mut self, handle: u64) -> DriverResult<Stream>;

    /// Creates an event; with `timing`, [`Driver::elapsed_ms`] can read it.
    ///
    /// # Errors
    /// A lost device.
    fn event(&mut self, timing: bool) -> DriverResult<Event>;

    /// Records `event` after all work in `stream`. Within a capture, an event with timing becomes a
    /// node, recorded by each launch of the graph; an event without timing only lets another stream
    /// join the capture.
    ///
    /// # Errors
    /// A lost device.
    fn record(&mut self, event: Event, stream: Stream) -> DriverResult<()>;

    /// Makes later work in `stream` wait for `event`.
    ///
    /// # Errors
    /// A lost device.
    fn wait(&mut self, stream: Stream, event: Event) -> DriverResult<()>;

    /// Whether all work before `event` has ended.
    ///
    /// # Errors
    /// An error of that work.
    fn is_done(&mut self, event: Event) -> DriverResult<bool>;

    /// Waits on the host until `event` is done.
    ///
    /// # Errors
    /// An error of the work before the event.
    fn synchronize_event(&mut self, event: Event) -> DriverResult<()>;

    /// Waits on the host until all streams are empty.
    ///
    /// # Errors
    /// An error of the work.
    fn synchronize(&mut self) -> DriverResult<()>;

    /// Blocks the host until all work of the device's context has ended, including streams that
    /// other libraries created.
    ///
    /// # Errors
    /// An error of the work.
    fn synchronize_device(&mut self) -> DriverResult<()> {
        self.synchronize()
    }

    /// Milliseconds between two completed events.
    ///
    /// # Errors
    /// Events without timing, or not completed.
    fn elapsed_ms(&mut self, from: Event, to: Event) -> DriverResult<f32>;

    /// Waits until all streams are empty, copies to the device, and waits for the copy.
    ///
    /// # Errors
    /// A lost device.
    fn upload(&mut self, target: DevicePtr, bytes: &[u8]) -> DriverResult<()>;

    /// Waits until all streams are empty, copies from the device, and waits for the copy.
    ///
    /// # Errors
    /// An error of earlier work.
    fn download(&mut self, bytes: &mut [u8], source: DevicePtr) -> DriverResult<()>;

    /// Enqueues a copy of `bytes` bytes from `source_offset` of a pinned buffer.
    ///
    /// # Safety
    /// Until the copy has ended, and as long as a graph with this copy may run, nobody may write to
    /// the buffer or drop it.
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
    /// Until the copy has ended, and as long as a graph with this copy may run, nobody may read or
    /// write the buffer or drop it.
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

    /// Enqueues a copy within the device, or from or to memory of
    /// [`Driver::allocate_on_host`].
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

    /// Returns a kernel of a module, with `shared_bytes` of dynamic shared memory allowed.
    ///
    /// # Errors
    /// No kernel of that name, or more shared memory than a CTA may have.
    fn function(&mut self, module: Module, name: &str, shared_bytes: u32)
    -> DriverResult<Function>;

    /// Number of CTAs of `threads` threads that an SM can hold at a time.
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
    /// Sizes, strides or boxes that the hardware does not support.
    fn tensor_map(&mut self, spec: &TensorMapSpec) -> DriverResult<TensorMap>;

    /// Announces the outputs of the next launches. Only drivers that record launches use this.
    fn expect_outputs(&mut self, outputs: &[DeviceTensor]) {
        let _ = outputs;
    }

    /// Enqueues a kernel.
    ///
    /// # Errors
    /// A launch that the device rejects.
    fn launch(&mut self, launch: &Launch, stream: Stream) -> DriverResult<()>;

    /// Begins to capture `stream`.
    ///
    /// # Errors
    /// A stream that is captured already.
    fn begin_capture(&mut self, stream: Stream) -> DriverResult<()>;

    /// Begins a group within a capture: all work up to [`Driver::end_group`] becomes a single node
    /// of the graph.
    ///
    /// # Errors
    /// A stream that is not captured.
    fn begin_group(&mut self, stream: Stream) -> DriverResult<()>;

    /// Ends the group.
    ///
    /// # Errors
    /// No open group.
    fn end_group(&mut self, stream: Stream) -> DriverResult<()>;

    /// Ends the capture and instantiates the graph.
    ///
    /// # Errors
    /// Work that cannot be captured.
    fn end_capture(&mut self, stream: Stream) -> DriverResult<CapturedGraph>;

    /// Number of nodes of a graph; a group counts as one node.
    ///
    /// # Errors
    /// A graph of another driver.
    fn graph_nodes(&mut self, graph: CapturedGraph) -> DriverResult<usize>;

    /// Enqueues a graph launch.
    ///
    /// # Errors
    /// A lost device.
    fn launch_graph(&mut self, graph: CapturedGraph, stream: Stream) -> DriverResult<()>;

    /// Frees a graph. All its launches must have ended.
    ///
    /// # Errors
    /// A graph of another driver.
    fn free_graph(&mut self, graph: CapturedGraph) -> DriverResult<()>;
}
