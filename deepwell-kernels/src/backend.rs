//! The seam between programs and devices.

use deepwell_ir::{ByteRange, Call, Program, StreamId};

use crate::KernelError;

/// A call that a [`Backend`] has prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PreparedCall(pub usize);

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

    /// Resolves a call of a verified program: kernel, operand addresses, constants. All that can
    /// be done before the first step is done here.
    ///
    /// # Errors
    /// A kernel that the backend does not have, or an operand type that it does not take.
    fn prepare(&mut self, program: &Program, call: &Call) -> Result<PreparedCall, KernelError>;

    /// Forgets every prepared call.
    fn forget_prepared(&mut self);

    /// Puts a prepared call into a stream. Calls of one stream run in order.
    ///
    /// # Errors
    /// [`KernelError::Run`] when the call refuses its data; a backend that runs later may report
    /// it at [`Backend::synchronize`].
    fn enqueue(&mut self, call: PreparedCall, stream: StreamId) -> Result<(), KernelError>;

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

    /// The bytes of a range where they lie, on a device whose memory the host can read: a
    /// checkpoint is then written without a copy. `None` on others.
    fn host_view(&self, range: ByteRange) -> Option<&[u8]>;
}
