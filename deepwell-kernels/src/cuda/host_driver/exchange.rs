//! Collectives between ranks whose device memory is host memory.

use std::sync::{Arc, Mutex, PoisonError};

use super::machine::Machine;
use super::state::{State, Work, no_such};
use crate::Comm;
use crate::runtime::cuda::comm::{DeviceComm, DeviceExchange, ExchangePlan};
use crate::runtime::cuda::driver::{DriverError, DriverResult, Stream};

/// The communicator of a rank, shared by the work in its streams.
pub(super) type SharedComm = Arc<Mutex<Box<dyn Comm>>>;

/// [`DeviceComm`] by a [`Comm`], in the streams of a [`HostDriver`](super::HostDriver): a
/// collective blocks the stream until this rank's part is done.
pub struct HostComm<M> {
    comm: SharedComm,
    plans: Vec<Arc<DeviceExchange>>,
    shared: Arc<Mutex<State<M>>>,
}

impl<M: Machine> HostComm<M> {
    /// Creates collectives for the streams of the driver with this state.
    pub(in crate::cuda) fn new(shared: Arc<Mutex<State<M>>>, comm: Box<dyn Comm>) -> HostComm<M> {
        HostComm { comm: Arc::new(Mutex::new(comm)), plans: Vec::new(), shared }
    }
}

impl<M: Machine> DeviceComm for HostComm<M> {
    fn version(&self) -> String {
        "exchanges by the host".to_string()
    }

    fn rank(&self) -> u32 {
        super::lock(&self.comm).rank()
    }

    fn world_size(&self) -> u32 {
        super::lock(&self.comm).world_size()
    }

    fn plan(&mut self, exchange: &DeviceExchange) -> DriverResult<ExchangePlan> {
        self.plans.push(Arc::new(exchange.clone()));
        Ok(ExchangePlan(self.plans.len() - 1))
    }

    fn run(&mut self, plan: ExchangePlan, stream: Stream) -> DriverResult<()> {
        let exchange = self.plans.get(plan.0).map(Arc::clone);
        let exchange = exchange.ok_or_else(|| no_such("exchange plan", plan.0 as u64))?;
        let work = Work::Exchange { exchange, comm: Arc::clone(&self.comm) };
        super::lock(&self.shared).put(stream, work)
    }

    /// Runs the exchanges in sequence: a send deposits its bytes and does not block.
    fn run_together(&mut self, plans: &[ExchangePlan], stream: Stream) -> DriverResult<()> {
        plans.iter().try_for_each(|&plan| self.run(plan, stream))
    }

    fn forget_plans(&mut self) {
        self.plans.clear();
    }
}

/// Runs a collective on the memory of a machine.
pub(super) fn exchange(
    machine: &mut impl Machine,
    exchange: &DeviceExchange,
    comm: &SharedComm,
) -> DriverResult<()> {
    let mut input = vec![0; exchange.input_bytes];
    let mut output = vec![0; exchange.output_bytes];
    machine.read(&mut input, exchange.input)?;
    comm.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .exchange(&exchange.exchange, &input, &mut output)
        .map_err(|error| DriverError::new("exchange", error))?;
    machine.write(exchange.output, &output)
}
