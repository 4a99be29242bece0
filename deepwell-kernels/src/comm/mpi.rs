//! Ranks in separate processes, connected by an MPI library.
//!
//! A single thread makes all MPI calls: the carrier of the rank (see `mailbox`). The library
//! therefore needs no more than `MPI_THREAD_FUNNELED`, sends progress while the rank computes, and
//! a rank times out even where the library blocks for ever. Frames are sent with non-blocking
//! point-to-point calls. MPI's own reductions are not used: their order of additions is
//! unspecified.

mod transport;

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use mpi::environment::Universe;
use mpi::topology::Communicator;
use mpi::{Threading, initialize_with_threading};

use self::transport::MpiTransport;
use super::CommError;
use super::mailbox::{Shared, carry};
use super::process::{ProcessComm, ProcessLimits};

/// Time between two checks whether another rank has failed.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Name and version of the MPI library in use, in its own words: `Open MPI v4.1.4`.
pub fn mpi_version() -> String {
    let all = mpi::environment::library_version().unwrap_or_default();
    all.split([',', '\n', '\0']).next().unwrap_or_default().trim().to_string()
}

/// Initializes MPI and connects with the other ranks; this rank is `rank` of `world_size`. MPI
/// allows this once per process. `failure` returns the first failure of another rank, if any.
///
/// # Errors
/// A library that was initialized before or reports another rank or world size than the launcher;
/// ranks that have failed or do not arrive in time.
pub fn connect_mpi(
    (rank, world_size): (u32, u32),
    limits: ProcessLimits,
    failure: &dyn Fn() -> Option<(u32, String)>,
) -> Result<ProcessComm, CommError> {
    let shared = Shared::new(rank, world_size, limits.exchange);
    let (ready, is_ready) = mpsc::channel();
    let run = {
        let shared = Arc::clone(&shared);
        move || {
            let connected = initialize((rank, world_size));
            let result = connected.as_ref().map(drop).map_err(String::clone);
            // The receiver is gone if another rank has failed meanwhile.
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
                return Ok(ProcessComm::new(shared));
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

/// Initializes the library and checks its rank and world size against the launcher's.
fn initialize((rank, world_size): (u32, u32)) -> Result<Universe, String> {
    let (universe, level) = initialize_with_threading(Threading::Funneled)
        .ok_or("it has been initialized before in this process, and can be once")?;
    let world = universe.world();
    let backend_ranks = (world.rank() as u32, world.size() as u32);
    let problem = if backend_ranks != (rank, world_size) {
        let (rank_there, size_there) = backend_ranks;
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
    // Finalizing would wait for ranks that may never arrive.
    std::mem::forget(universe);
    Err(problem)
}

/// Carries a rank's frames, and finalizes MPI if all ranks ended in order.
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
