//! Collectives in device memory: an optional capability, next to [`Driver`](super::driver::Driver).
//!
//! A vendor's collective library implements [`DeviceComm`] with its own communicators. For drivers
//! whose device memory is host memory, [`HostComm`](crate::cuda::HostComm) implements
//! [`DeviceComm`] with any [`Comm`](crate::Comm).

use super::driver::{DevicePtr, DriverResult, Stream};
use crate::Exchange;

/// An exchange with operands in device memory, back to back without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceExchange {
    /// The kind of exchange, and the group.
    pub exchange: Exchange,
    /// First byte of the input; any address if there is no input.
    pub input: DevicePtr,
    /// Length of the input.
    pub input_bytes: usize,
    /// First byte of the output; any address if there is no output.
    pub output: DevicePtr,
    /// Length of the output.
    pub output_bytes: usize,
}

/// An exchange with a connected communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExchangePlan(pub usize);

/// Executes the collectives of a rank's program on its device.
///
/// The rules of [`Comm`](crate::Comm) hold: the same order on all ranks of a group, and an error on
/// every rank if any rank fails. Work is asynchronous, so a later call may report the error.
pub trait DeviceComm: Send {
    /// Name and version of the library.
    fn version(&self) -> String;

    /// The index of this rank.
    fn rank(&self) -> u32;

    /// The number of ranks.
    fn world_size(&self) -> u32;

    /// Prepares an exchange. One-time work (connecting, allocating, registering) happens here
    /// rather than in the first step.
    ///
    /// # Errors
    /// A group, type or size that the library does not support.
    fn plan(&mut self, exchange: &DeviceExchange) -> DriverResult<ExchangePlan>;

    /// Enqueues an exchange.
    ///
    /// # Errors
    /// Ranks that disagree or have failed, if already known.
    fn run(&mut self, plan: ExchangePlan, stream: Stream) -> DriverResult<()>;

    /// Enqueues concurrent exchanges: each may wait for its peer, but none for another exchange.
    /// Sends come before receives; the order counts among exchanges with the same peer.
    ///
    /// # Errors
    /// As [`DeviceComm::run`].
    fn run_together(&mut self, plans: &[ExchangePlan], stream: Stream) -> DriverResult<()>;

    /// Forgets all plans.
    fn forget_plans(&mut self);

    /// Makes the host wait for the device, which may wait for other ranks, up to the timeout. On
    /// success, the collectives have written the memory that the host reads next.
    ///
    /// # Errors
    /// Ranks that have failed or do not arrive in time; otherwise an error of `wait`.
    fn wait(&mut self, wait: &mut dyn FnMut() -> DriverResult<()>) -> DriverResult<()> {
        wait()
    }
}
