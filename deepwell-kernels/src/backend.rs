//! The seam between programs and devices.

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
    /// The call; none where events alone pass through its place.
    pub call: Option<PreparedCall>,
    /// Queue that it is put into; 0 is the one that computes.
    pub stream: StreamId,
    /// Events of the recording that it waits for.
    pub waits: Vec<EventId>,
    /// Event that it records afterwards.
    pub records: Option<EventId>,
}

impl From<PreparedCall> for Issue {
    /// On stream 0, behind what is there.
    fn from(call: PreparedCall) -> Issue {
        Issue { call: Some(call), stream: 0, waits: Vec::new(), records: None }
    }
}

/// Calls that a [`Backend`] runs again as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Recording(pub usize);

/// Readbacks that a backend keeps for [`Backend::fetch`].
///
/// A training step has one for each body that quantizes and a last one: up to four where it has a
/// single micro-batch. With twice as many, a whole step waits in the device's queue while the host
/// looks at the one before.
pub const READBACKS: usize = 8;

/// Bytes on their way out of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Readback(pub usize);

/// When a call ran, in seconds since the first call of the same profile began.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CallTime {
    /// When it began.
    pub begin_s: f64,
    /// When it ended.
    pub end_s: f64,
    /// CTAs of its largest launch over the SMs of the device, at most 1. It follows from the grid
    /// alone: no counter is read, and a persistent kernel, which launches a CTA for each SM, has 1
    /// whatever its CTAs do. `None` where no grid is known: on a CPU, of a library's GEMM, of a
    /// copy or an exchange.
    pub grid_fill: Option<f64>,
}

/// How long a device took for what lies before a readback, by its own clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadbackTime {
    /// From where the first inputs that were staged since the readback before were on the device,
    /// in seconds; `None` where none were.
    pub since_staged_s: Option<f64>,
    /// From the readback before, in seconds; `None` for the first.
    pub since_readback_s: Option<f64>,
}

/// Host memory that a backend copies to at full speed.
#[derive(Debug)]
pub enum HostBuffer {
    /// Ordinary memory.
    Plain(Vec<u8>),
    /// Memory that a device writes by itself; it goes back to its backend by
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

/// A device that runs calls over one arena.
///
/// Object-safe, and free of any device's types: a trainer holds a `Box<dyn Backend>`.
pub trait Backend: Send {
    /// `cpu`, or the device as people write it.
    fn name(&self) -> &'static str;

    /// Gives the arena: `bytes` long, zeroed, in place of an earlier one.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn allocate(&mut self, bytes: usize) -> Result<(), KernelError>;

    /// Resolves one instance of a call of a program: kernel, operand addresses, constants. All that
    /// can be done before the first step is done here. A program that breaks a rule gives an error
    /// here, wrong numbers or a panic, never access to memory outside of the arena by the host:
    /// whoever runs programs of others verifies them first, as
    /// [`Executor::load`](crate::Executor::load) does.
    ///
    /// # Errors
    /// A kernel that the backend does not have, an operand type that it does not take, or operands
    /// that overlap.
    fn prepare(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
    ) -> Result<PreparedCall, KernelError>;

    /// Forgets every prepared call and every recording.
    ///
    /// # Errors
    /// What work that was still under way failed with.
    fn forget_prepared(&mut self) -> Result<(), KernelError>;

    /// Runs a prepared call behind all work so far.
    ///
    /// # Errors
    /// [`KernelError::Run`] when the call refuses its data; a backend that runs later may report
    /// it at [`Backend::synchronize`].
    fn enqueue(&mut self, call: PreparedCall) -> Result<(), KernelError>;

    /// Records prepared calls, to be run as one: those of a stream in this order, across streams as
    /// events say. All streams begin behind the work before and have joined at the end.
    ///
    /// # Errors
    /// Calls that cannot be recorded, or an event that is waited for before it is recorded.
    fn record(&mut self, calls: &[Issue]) -> Result<Recording, KernelError>;

    /// Records what ranks exchange at the same time, and copies behind that, of ranges to others of
    /// the same length. Exchanges that wait for each other's ends all go on; of those with one rank
    /// the order counts. Sends stand before receives.
    ///
    /// # Errors
    /// Calls that do not only exchange, or a range outside the arena.
    fn record_exchanges(
        &mut self,
        calls: &[PreparedCall],
        copies: &[(ByteRange, ByteRange)],
    ) -> Result<Recording, KernelError>;

    /// Puts recorded calls behind all work so far, without waiting for them.
    ///
    /// # Errors
    /// As [`Backend::enqueue`].
    fn replay(&mut self, recording: Recording) -> Result<(), KernelError>;

    /// Runs a recording `times` times, one behind the other, waits for the last, and gives the
    /// seconds from where the first began to where the last ended, by the device's own clock where
    /// it has one.
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

    /// Runs calls in order and says when each ran, by the device's own clock where it has one.
    /// The recordings `before` run first, so that a device which is fed by the host never waits for
    /// it.
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
    /// What calls refused since the last time.
    fn synchronize(&mut self) -> Result<(), KernelError>;

    /// Copies bytes into the arena.
    ///
    /// # Errors
    /// A range outside the arena.
    fn write(&mut self, range: ByteRange, bytes: &[u8]) -> Result<(), KernelError>;

    /// Copies bytes out of the arena.
    ///
    /// # Errors
    /// A range outside the arena.
    fn read(&mut self, range: ByteRange, bytes: &mut [u8]) -> Result<(), KernelError>;

    /// Makes room for [`Backend::stage`] and [`Backend::read_later`] of at most these many bytes,
    /// each copy counted in whole 64 bytes.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn reserve_host_copies(
        &mut self,
        input_bytes: usize,
        readback_bytes: usize,
    ) -> Result<(), KernelError>;

    /// Copies bytes into the arena behind all work so far, without waiting for that work.
    ///
    /// # Errors
    /// A range outside the arena.
    fn stage(&mut self, copies: &[(ByteRange, &[u8])]) -> Result<(), KernelError>;

    /// Copies ranges out of the arena behind all work so far, without waiting; the latest
    /// [`READBACKS`] are kept for [`Backend::fetch`].
    ///
    /// # Errors
    /// A range outside the arena.
    fn read_later(&mut self, ranges: &[ByteRange]) -> Result<Readback, KernelError>;

    /// Waits for a readback and gives its ranges, in the order they were asked for.
    ///
    /// # Errors
    /// A readback that is not one of the latest [`READBACKS`], or what the work before it failed
    /// with.
    fn fetch(&mut self, readback: Readback, parts: &mut [&mut [u8]]) -> Result<(), KernelError>;

    /// How long the device took for what a fetched readback waited for. The host cannot tell: its
    /// own calls block while the device's queue is full. `None` on a device that runs nothing by
    /// itself.
    ///
    /// # Errors
    /// As [`Backend::fetch`].
    fn time_of(&mut self, _readback: Readback) -> Result<Option<ReadbackTime>, KernelError> {
        Ok(None)
    }

    /// Host memory for [`Backend::read_all`].
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn host_buffer(&mut self, bytes: usize) -> Result<HostBuffer, KernelError>;

    /// Gives a buffer back.
    ///
    /// # Errors
    /// A buffer of another backend.
    fn free_host_buffer(&mut self, buffer: HostBuffer) -> Result<(), KernelError>;

    /// Waits for all work so far and copies ranges, one behind the other, into `buffer`.
    ///
    /// # Errors
    /// Ranges outside the arena, or more bytes than the buffer has.
    fn read_all(
        &mut self,
        ranges: &[ByteRange],
        buffer: &mut HostBuffer,
    ) -> Result<(), KernelError>;

    /// The bytes of a range where they lie, on a device whose memory the host can read: a
    /// checkpoint is then written without a copy. `None` on others.
    fn host_view(&self, range: ByteRange) -> Option<&[u8]>;
}
