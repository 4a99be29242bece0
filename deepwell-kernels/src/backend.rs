//! The interface between programs and devices.

use std::time::Instant;

use deepwell_ir::{ByteRange, Call, EventId, Instance, Program, StreamId};

use crate::KernelError;
use crate::cuda::PinnedBuffer;

/// A call that a [`Backend`] has prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PreparedCall(pub usize);

/// A prepared call with its place among the streams of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issue {
    /// The call; `None` if only the events matter here.
    pub call: Option<PreparedCall>,
    /// Stream of the call; 0 is the main stream.
    pub stream: StreamId,
    /// Events of the recording to wait for first.
    pub waits: Vec<EventId>,
    /// Event to record after the call.
    pub records: Option<EventId>,
}

impl From<PreparedCall> for Issue {
    /// On stream 0, after the calls issued before.
    fn from(call: PreparedCall) -> Issue {
        Issue { call: Some(call), stream: 0, waits: Vec::new(), records: None }
    }
}

/// A recorded sequence of calls, replayed as a unit: on GPUs a CUDA graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Recording(pub usize);

/// Readbacks that a backend keeps for [`Backend::fetch`].
///
/// A training step makes one readback for each body that quantizes and a last one: up to four with
/// a single micro-batch. With twice as many slots, a whole step waits in the device's queue while
/// the host reads the results of the previous step.
pub const READBACKS: usize = 8;

/// A copy out of the arena that is in flight or has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Readback(pub usize);

/// Begin and end of a call, in seconds since the first call of the same profile began.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CallTime {
    /// Begin.
    pub begin_s: f64,
    /// End.
    pub end_s: f64,
    /// CTAs of the call's largest launch divided by the SMs of the device, at most 1. The number
    /// comes from the grid alone: no counter is read, and a persistent kernel, which launches one
    /// CTA per SM, has 1 whatever its CTAs do. `None` where no grid is known: on a CPU, for a
    /// library's GEMM, for a copy or a collective.
    pub grid_fill: Option<f64>,
}

/// Device time of the work before a readback, by the device's own clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadbackTime {
    /// Seconds since the first inputs staged after the previous readback arrived on the device;
    /// `None` if no inputs were staged.
    pub since_staged_s: Option<f64>,
    /// Seconds since the previous readback; `None` for the first.
    pub since_readback_s: Option<f64>,
}

/// Host memory that a backend copies to at full speed.
#[derive(Debug)]
pub enum HostBuffer {
    /// Ordinary memory.
    Plain(Vec<u8>),
    /// Pinned memory that the device writes directly; given back with
    /// [`Backend::free_host_buffer`].
    Pinned(PinnedBuffer),
}

impl HostBuffer {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            HostBuffer::Plain(bytes) => bytes,
            HostBuffer::Pinned(buffer) => buffer.as_slice(),
        }
    }
}

/// A device that runs calls over an arena.
///
/// Object-safe and free of device types: a trainer holds a `Box<dyn Backend>`.
pub trait Backend: Send {
    /// Name of the backend: `cpu` or `cuda`.
    fn name(&self) -> &'static str;

    /// Allocates the arena: `bytes` long, zeroed, replacing any earlier arena.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn allocate(&mut self, bytes: usize) -> Result<(), KernelError>;

    /// [`Backend::allocate`] with the first `host_bytes` bytes of the arena in host memory, for
    /// [offloaded](deepwell_ir::MemoryKind::Offloaded) values. On a CPU all memory is the host's.
    ///
    /// # Errors
    /// As [`Backend::allocate`].
    fn allocate_with_host(&mut self, bytes: usize, host_bytes: usize) -> Result<(), KernelError> {
        let _ = host_bytes;
        self.allocate(bytes)
    }

    /// Resolves one instance of a call of a program: kernel, operand addresses, constants. All work
    /// that can be done before the first step is done here. A program that breaks a rule may give
    /// an error, wrong numbers or a panic, but the host never accesses memory outside the arena.
    /// Callers with programs from elsewhere verify them first, as
    /// [`Executor::load`](crate::Executor::load) does.
    ///
    /// # Errors
    /// A kernel that the backend does not have, an unsupported operand type, or operands that
    /// overlap.
    fn prepare(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
    ) -> Result<PreparedCall, KernelError>;

    /// Forgets every prepared call and every recording.
    ///
    /// # Errors
    /// An error of work in flight.
    fn forget_prepared(&mut self) -> Result<(), KernelError>;

    /// Enqueues a prepared call after all earlier work.
    ///
    /// # Errors
    /// [`KernelError::Run`] when the call rejects its data; an asynchronous backend may report the
    /// error at [`Backend::synchronize`].
    fn enqueue(&mut self, call: PreparedCall) -> Result<(), KernelError>;

    /// Records prepared calls as one unit. Calls of one stream run in the given order; events order
    /// calls of different streams. All streams start after the earlier work and are joined at the
    /// end.
    ///
    /// # Errors
    /// Calls that cannot be recorded, or a wait for an event that no earlier call records.
    fn record(&mut self, calls: &[Issue]) -> Result<Recording, KernelError>;

    /// Records concurrent sends and receives, followed by copies between ranges of equal length.
    /// All sends and receives progress together, so none blocks another; the order counts among
    /// calls with the same peer. Sends come before receives.
    ///
    /// # Errors
    /// Calls that do more than communicate, or a range outside the arena.
    fn record_exchanges(
        &mut self,
        calls: &[PreparedCall],
        copies: &[(ByteRange, ByteRange)],
    ) -> Result<Recording, KernelError>;

    /// Enqueues a recording after all earlier work, without waiting for the end.
    ///
    /// # Errors
    /// As [`Backend::enqueue`].
    fn replay(&mut self, recording: Recording) -> Result<(), KernelError>;

    /// Replays a recording `times` times in sequence and waits for the last. Returns the seconds
    /// from the begin of the first replay to the end of the last, by the device's own clock if the
    /// device has one.
    ///
    /// # Errors
    /// As [`Backend::enqueue`].
    fn time_replays(&mut self, recording: Recording, times: usize) -> Result<f64, KernelError> {
        self.synchronize()?;
        let begin = Instant::now();
        for _ in 0..times {
            self.replay(recording)?;
        }
        self.synchronize()?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Runs calls in order and returns the times of each, by the device's own clock if the device
    /// has one. The recordings `before` run first, so that the device's queue is full and the
    /// device never waits for the host.
    ///
    /// # Errors
    /// As [`Backend::enqueue`].
    fn profile(
        &mut self,
        before: &[Recording],
        calls: &[PreparedCall],
    ) -> Result<Vec<CallTime>, KernelError>;

    /// Waits until every stream is empty.
    ///
    /// # Errors
    /// An error of a call since the last synchronization.
    fn synchronize(&mut self) -> Result<(), KernelError>;

    /// Copies bytes into the arena.
    ///
    /// # Errors
    /// A range outside the arena.
    fn write(&mut self, range: ByteRange, bytes: &[u8]) -> Result<(), KernelError>;

    /// Writes zeros into the arena.
    ///
    /// # Errors
    /// A range outside the arena.
    fn clear(&mut self, range: ByteRange) -> Result<(), KernelError>;

    /// Copies bytes out of the arena.
    ///
    /// # Errors
    /// A range outside the arena.
    fn read(&mut self, range: ByteRange, bytes: &mut [u8]) -> Result<(), KernelError>;

    /// Allocates host memory for [`Backend::stage`] and [`Backend::read_later`] of at most so many
    /// bytes; every copy is rounded up to 64 bytes.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn reserve_host_copies(
        &mut self,
        input_bytes: usize,
        readback_bytes: usize,
    ) -> Result<(), KernelError>;

    /// Enqueues a copy into the arena after all earlier work, without waiting.
    ///
    /// # Errors
    /// A range outside the arena.
    fn stage(&mut self, copies: &[(ByteRange, &[u8])]) -> Result<(), KernelError>;

    /// Enqueues a copy of ranges out of the arena after all earlier work, without waiting; the
    /// latest [`READBACKS`] are kept for [`Backend::fetch`].
    ///
    /// # Errors
    /// A range outside the arena.
    fn read_later(&mut self, ranges: &[ByteRange]) -> Result<Readback, KernelError>;

    /// Waits for a readback and returns its ranges in the order of the request.
    ///
    /// # Errors
    /// A readback older than the latest [`READBACKS`], or an error of earlier work.
    fn fetch(&mut self, readback: Readback, parts: &mut [&mut [u8]]) -> Result<(), KernelError>;

    /// Returns the device time of the work before a fetched readback. The host cannot measure this
    /// time: its own calls block while the device's queue is full. `None` for a synchronous device.
    ///
    /// # Errors
    /// As [`Backend::fetch`].
    fn time_of(&mut self, _readback: Readback) -> Result<Option<ReadbackTime>, KernelError> {
        Ok(None)
    }

    /// Allocates host memory for [`Backend::read_all`].
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn host_buffer(&mut self, bytes: usize) -> Result<HostBuffer, KernelError>;

    /// Gives a buffer back.
    ///
    /// # Errors
    /// A buffer of another backend.
    fn free_host_buffer(&mut self, buffer: HostBuffer) -> Result<(), KernelError>;

    /// Waits for all earlier work and copies ranges, back to back, into `buffer`.
    ///
    /// # Errors
    /// Ranges outside the arena, or more bytes than the buffer has.
    fn read_all(
        &mut self,
        ranges: &[ByteRange],
        buffer: &mut HostBuffer,
    ) -> Result<(), KernelError>;

    /// The bytes of a range in place, on a device whose memory the host can read: a checkpoint is
    /// then written without a copy. `None` on other devices.
    fn host_view(&self, range: ByteRange) -> Option<&[u8]>;
}
