//! Ranks that are threads of one process.
//!
//! In a collective, a rank deposits a copy of its input and waits until all ranks of the group have
//! done so. Each rank then computes its own output from the copies, in the order of the group, so
//! results do not depend on the order of arrival. A send deposits its bytes and returns at once,
//! like a send on a separate stream.

mod world;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use deepwell_ir::ops::{CollectiveKind, Reduction};

use self::world::{GroupInputs, Message, World};
use super::parts::{assemble, part};
use super::want::Want;
use super::{Comm, CommError, Exchange, reduce};

/// One rank of a world of threads.
///
/// ```
/// use std::time::Duration;
///
/// use deepwell_ir::ops::{CollectiveKind, Reduction};
/// use deepwell_ir::{DType, ProcessGroup};
/// use deepwell_kernels::{Comm, Exchange, InProcess};
///
/// let all = Exchange {
///     kind: CollectiveKind::AllReduce { reduction: Reduction::Sum },
///     group: ProcessGroup { name: "data".to_string(), ranks: vec![0, 1] },
///     dtype: DType::I32,
/// };
/// let sums = std::thread::scope(|scope| {
///     let ranks = InProcess::world(2, Duration::from_secs(10));
///     let threads: Vec<_> = ranks
///         .into_iter()
///         .map(|mut comm| {
///             let all = &all;
///             scope.spawn(move || {
///                 let (own, mut sum) = (40 + 2 * comm.rank() as i32, [0; 4]);
///                 comm.exchange(all, &own.to_le_bytes(), &mut sum)?;
///                 Ok::<_, deepwell_kernels::CommError>(i32::from_le_bytes(sum))
///             })
///         })
///         .collect();
///     threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<Vec<_>, _>>()
/// });
/// assert_eq!(sums.unwrap(), [82, 82]);
/// ```
///
/// A clone is a second handle to the same rank, for the same thread: a rank ends when all its
/// clones are dropped.
#[derive(Clone, Debug)]
pub struct InProcess {
    seat: Arc<Seat>,
}

/// A rank's place in its world.
#[derive(Debug)]
struct Seat {
    world: Arc<World>,
    rank: u32,
    /// Time spent in [`Comm::exchange`] so far.
    waited_ns: AtomicU64,
}

/// A handle on a world without being a rank, for the code that started the ranks.
#[derive(Clone, Debug)]
pub struct Monitor {
    world: Arc<World>,
}

impl Monitor {
    /// Fails every rank's current and later collectives with a reason of `rank`, unless a rank has
    /// failed before.
    pub fn abort(&self, rank: u32, reason: &str) {
        self.world.abort(rank, reason);
    }

    /// The first failure: rank and error.
    pub fn failure(&self) -> Option<(u32, CommError)> {
        self.world.failure()
    }
}

impl InProcess {
    /// Creates the ranks of a new world, each for a thread. A rank waiting longer than
    /// `timeout` for another rank fails.
    pub fn world(size: u32, timeout: Duration) -> Vec<InProcess> {
        let world = Arc::new(World::new(size, timeout));
        let seat =
            |rank| Arc::new(Seat { world: Arc::clone(&world), rank, waited_ns: AtomicU64::new(0) });
        (0..size).map(|rank| InProcess { seat: seat(rank) }).collect()
    }

    /// A handle to watch this rank's world.
    pub fn monitor(&self) -> Monitor {
        Monitor { world: Arc::clone(&self.seat.world) }
    }
}

impl Comm for InProcess {
    fn rank(&self) -> u32 {
        self.seat.rank
    }

    fn world_size(&self) -> u32 {
        self.seat.world.size()
    }

    fn waited(&self) -> Option<Duration> {
        Some(Duration::from_nanos(self.seat.waited_ns.load(Ordering::Relaxed)))
    }

    fn exchange(
        &mut self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let begin = Instant::now();
        let exchanged = self.take_part(exchange, input, output);
        let spent_ns = begin.elapsed().as_nanos() as u64;
        self.seat.waited_ns.fetch_add(spent_ns, Ordering::Relaxed);
        exchanged
    }

    fn abort(&mut self, reason: &str) {
        self.seat.world.abort(self.seat.rank, reason);
    }
}

impl InProcess {
    fn take_part(
        &self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let (world, rank) = (&self.seat.world, self.seat.rank);
        let fail = |error: CommError| world.fail(rank, error);
        let want =
            Want::of(exchange, (rank, world.size()), input.len(), output.len()).map_err(fail)?;
        let member = |position: u32| exchange.group.ranks[position as usize];
        match exchange.kind {
            CollectiveKind::Send { to } => {
                world.send(rank, member(to), Message { want, bytes: input.into() })
            }
            CollectiveKind::Recv { from, .. } => {
                let bytes = world.receive(rank, member(from), &want)?;
                output.copy_from_slice(&bytes);
                Ok(())
            }
            _ => {
                let parts = world.meet(rank, &want, input)?;
                let position = exchange.group.position_of(rank).unwrap_or(0);
                let made = make_output(exchange, &parts, position, output);
                made.map_err(|reason| fail(CommError::Request { what: want.to_string(), reason }))
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.world.abort(self.rank, "its thread panicked");
        }
        self.world.leave(self.rank);
    }
}

/// Computes the output of the rank at `position` from the inputs of all ranks.
fn make_output(
    exchange: &Exchange,
    group_inputs: &GroupInputs,
    position: usize,
    output: &mut [u8],
) -> Result<(), String> {
    let inputs: Vec<&[u8]> = group_inputs.inputs.iter().map(|input| &**input).collect();
    let Exchange { kind, dtype, .. } = exchange;
    if let CollectiveKind::AllReduce { reduction } = *kind {
        // All ranks need the same result, so a single rank computes it.
        let made = |reduction: Reduction| {
            let mut reduced = vec![0; output.len()];
            reduce(reduction, *dtype, &inputs, &mut reduced).map(|()| reduced)
        };
        let reduced = group_inputs.reduced.get_or_init(|| made(reduction)).as_ref();
        output.copy_from_slice(reduced.map_err(String::clone)?);
        return Ok(());
    }
    let slices: Vec<&[u8]> = (inputs.iter().enumerate())
        .map(|(from, input)| part(kind, input, (from, position), inputs.len()))
        .collect();
    assemble(kind, *dtype, &slices, output)
}
