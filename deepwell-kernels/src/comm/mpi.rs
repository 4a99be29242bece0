//! Ranks that are processes, by an MPI library.
//!
//! All calls of MPI are made by one thread, which carries the frames of the rank (`mailbox`): the
//! library is asked for no more than `MPI_THREAD_FUNNELED`, what a rank has sent goes while it
//! computes, and where the library itself waits for ever the rank does not. Frames go from process
//! to process with calls that do not wait. No reduction is MPI's: its order of additions is not
//! told.

mod transport;

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use mpi::environment::Universe;
use mpi::topology::Communicator;
use mpi::{Threading, initialize_with_threading};

use self::transport::MpiTransport;
use super::mailbox::{Mailbox, Shared, carry};
use super::{Comm, CommError, Exchange};

/// Between two looks at whether another rank has failed.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long what may take.
#[derive(Clone, Copy, Debug)]
pub struct MpiLimits {
    /// Until all ranks are connected.
    pub connect: Duration,
    /// How long a rank waits for another in an exchange.
    pub exchange: Duration,
}

/// One rank of the processes that `mpirun` or `srun` has started.
///
/// A clone is the same rank once more, for the same thread: a rank has ended when all its clones
/// are dropped. Ranks that wait for each other in a circle fail after the limit of an exchange.
#[derive(Clone)]
pub struct MpiComm {
    mailbox: Mailbox,
}

/// Looks at a rank from outside: for whoever hears of failures, and ends the run.
#[derive(Clone)]
pub struct MpiMonitor {
    shared: Arc<Shared>,
}

/// Name and version of the MPI library that this program has been started with, as it tells them:
/// `Open MPI v4.1.4`.
pub fn mpi_version() -> String {
    let all = mpi::environment::library_version().unwrap_or_default();
    all.split([',', '\n', '\0']).next().unwrap_or_default().trim().to_string()
}

impl MpiComm {
    /// Initializes MPI and connects with the other ranks, of which this is `rank` of `world_size`.
    /// Once a process, as MPI has it. `failure` says whether one has failed meanwhile, and how.
    ///
    /// # Errors
    /// A library that has been initialized before or counts other ranks than the launcher told,
    /// ranks that do not come in time or have failed.
    pub fn connect(
        (rank, world_size): (u32, u32),
        limits: MpiLimits,
        failure: &dyn Fn() -> Option<(u32, String)>,
    ) -> Result<MpiComm, CommError> {
        let shared = Shared::new(rank, world_size, limits.exchange);
        let (ready, is_ready) = mpsc::channel();
        let run = {
            let shared = Arc::clone(&shared);
            move || {
                let connected = initialize((rank, world_size));
                let result = connected.as_ref().map(drop).map_err(String::clone);
                // Nobody listens where another rank has failed meanwhile.
                let _ = ready.send(result);
                if let Ok(universe) = connected {
                    carry_until_the_end(&shared, universe);
                }
                shared.is_over();
            }
        };
        let begin = Instant::now();
        let error = |reason: String| CommError::Request { what: "MPI".to_string(), reason };
        let thread = thread::Builder::new().name("mpi".to_string()).spawn(run);
        thread.map_err(|reason| error(format!("the system gives it no thread: {reason}")))?;
        loop {
            match is_ready.recv_timeout(LOOK_EVERY) {
                Ok(ready) => {
                    ready.map_err(error)?;
                    return Ok(MpiComm { mailbox: Mailbox::new(shared) });
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(error("its thread panicked".to_string()));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some((rank, reason)) = failure() {
                return Err(CommError::Failed { rank, reason });
            }
            if begin.elapsed() > limits.connect {
                let what = "MPI_Init_thread".to_string();
                return Err(CommError::Timeout { what, waited: limits.connect, missing: vec![] });
            }
        }
    }

    /// What watches this rank, and is no rank.
    pub fn monitor(&self) -> MpiMonitor {
        MpiMonitor { shared: Arc::clone(self.mailbox.shared()) }
    }
}

impl MpiMonitor {
    /// Lets this rank's present and later exchanges fail with a reason of `rank`, unless something
    /// has failed before. The others are not told.
    pub fn abort(&self, rank: u32, reason: &str) {
        self.shared.abort(rank, reason);
    }

    /// Says goodbye, waits until all others have, and finalizes MPI, which would wait for them for
    /// ever. A process that ends after a failure does so without.
    ///
    /// # Errors
    /// A rank that has failed, and one that does not come within `limit`.
    pub fn finish(&self, limit: Duration) -> Result<(), CommError> {
        self.shared.finish(limit)
    }
}

impl Comm for MpiComm {
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

/// Initializes the library, which counts the ranks as the launcher does.
fn initialize((rank, world_size): (u32, u32)) -> Result<Universe, String> {
    let (universe, level) = initialize_with_threading(Threading::Funneled)
        .ok_or("it has been initialized before in this process, and can be once")?;
    let world = universe.world();
    let place = (world.rank() as u32, world.size() as u32);
    let problem = if place != (rank, world_size) {
        let (rank_there, size_there) = place;
        format!(
            "expected rank {rank} of {world_size}, as the launcher says, got rank {rank_there} of \
             {size_there}\n\
             hint: start the ranks with the `mpirun` of {}, or with `srun --mpi=pmix`",
            mpi_version()
        )
    } else if level < Threading::Funneled {
        format!("{} has no MPI_THREAD_FUNNELED", mpi_version())
    } else {
        return Ok(universe);
    };
    // Finalizing would wait for ranks that may not come.
    std::mem::forget(universe);
    Err(problem)
}

/// Carries a rank's frames, and finalizes where all ranks do.
fn carry_until_the_end(shared: &Shared, universe: Universe) {
    let is_in_order = match MpiTransport::new(&universe.world()) {
        Ok(mut transport) => carry(shared, &mut transport),
        Err(reason) => {
            shared.abort(universe.world().rank() as u32, &reason);
            false
        }
    };
    if is_in_order {
        drop(universe);
    } else {
        std::mem::forget(universe);
    }
}
