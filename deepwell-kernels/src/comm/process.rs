//! A rank among separate processes, connected by MPI or by TCP.

use std::sync::Arc;
use std::time::Duration;

use super::mailbox::{Mailbox, Shared};
use super::{Comm, CommError, Exchange};

/// Timeouts.
#[derive(Clone, Copy, Debug)]
pub struct ProcessLimits {
    /// For connecting all ranks.
    pub connect: Duration,
    /// For waiting in a collective for another rank.
    pub exchange: Duration,
}

/// A rank among processes that a launcher has started.
///
/// A clone is a second handle to the same rank, for the same thread: a rank ends when all its
/// clones are dropped. Deadlocked ranks fail after the timeout of a collective.
#[derive(Clone)]
pub struct ProcessComm {
    mailbox: Mailbox,
}

/// A handle on a rank from outside, for code that learns of failures and ends the run.
#[derive(Clone)]
pub struct ProcessMonitor {
    shared: Arc<Shared>,
}

impl ProcessComm {
    pub(super) fn new(shared: Arc<Shared>) -> ProcessComm {
        ProcessComm { mailbox: Mailbox::new(shared) }
    }

    /// A handle to watch this rank.
    pub fn monitor(&self) -> ProcessMonitor {
        ProcessMonitor { shared: Arc::clone(self.mailbox.shared()) }
    }
}

impl ProcessMonitor {
    /// Fails this rank's current and later collectives with a reason of `rank`, unless a failure
    /// came before. Other ranks are not notified.
    pub fn abort(&self, rank: u32, reason: &str) {
        self.shared.abort(rank, reason);
    }

    /// Sends a goodbye, waits for the goodbyes of all other ranks, and ends the connections. A
    /// process that ends after a failure does not wait: other ranks may never come.
    ///
    /// # Errors
    /// A failed rank, or a rank missing after `limit`.
    pub fn finish(&self, limit: Duration) -> Result<(), CommError> {
        self.shared.finish(limit)
    }
}

impl Comm for ProcessComm {
    fn rank(&self) -> u32 {
        self.mailbox.rank()
    }

    fn world_size(&self) -> u32 {
        self.mailbox.world_size()
    }

    fn exchange(
        &mut self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        self.mailbox.exchange(exchange, input, output)
    }

    fn waited(&self) -> Option<Duration> {
        self.mailbox.waited()
    }

    fn abort(&mut self, reason: &str) {
        self.mailbox.abort(reason);
    }
}
