//! Exchanges with other ranks in device memory: an optional capability beside [`super::Driver`].
//!
//! A vendor's collective library implements [`DeviceComm`] on its own communicators;
//! [`HostComm`](super::HostComm) does so for drivers whose memory is the host's, through any
//! [`Comm`](crate::Comm).

use super::driver::{DevicePtr, DriverResult, Stream};
use crate::Exchange;

/// An exchange with its operands in device memory, one after the other and without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceExchange {
    /// What is exchanged, and among whom.
    pub exchange: Exchange,
    /// First byte of the input; anything where there is none.
    pub input: DevicePtr,
    /// Its length.
    pub input_bytes: usize,
    /// First byte of the output; anything where there is none.
    pub output: DevicePtr,
    /// Its length.
    pub output_bytes: usize,
}

/// An exchange whose communicator is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExchangePlan(pub usize);

/// What takes the rank of a device through the collectives of its program.
///
/// The rules of [`Comm`](crate::Comm) hold: one order within a group, an error on every rank where
/// one fails. Work is enqueued: an error may come with a later call.
pub trait DeviceComm: Send {
    /// The library and its version.
    fn version(&self) -> String;

    /// Which rank this is.
    fn rank(&self) -> u32;

    /// How many ranks there are.
    fn world_size(&self) -> u32;

    /// Readies an exchange. What a step must not do for the first time (connecting, allocating,
    /// registering) is done here.
    ///
    /// # Errors
    /// A group, type or size that the library does not take.
    fn plan(&mut self, exchange: &DeviceExchange) -> DriverResult<ExchangePlan>;

    /// Enqueues an exchange.
    ///
    /// # Errors
    /// Ranks that disagree or have failed, where that is known at once.
    fn run(&mut self, plan: ExchangePlan, stream: Stream) -> DriverResult<()>;

    /// Enqueues exchanges that go on at the same time: each waits for its other end, none for
    /// another of them. Sends stand before receives; of those with one rank the order counts.
    ///
    /// # Errors
    /// As [`DeviceComm::run`].
    fn run_together(&mut self, plans: &[ExchangePlan], stream: Stream) -> DriverResult<()>;

    /// Forgets all plans.
    fn forget_plans(&mut self);

    /// Lets the host wait for the device, which may wait for other ranks: no longer than there is a
    /// limit for. What the host reads afterwards is what the exchanges have made.
    ///
    /// # Errors
    /// Ranks that have failed or do not come, before an error of `wait` itself.
    fn wait(&mut self, wait: &mut dyn FnMut() -> DriverResult<()>) -> DriverResult<()> {
        wait()
    }
}
