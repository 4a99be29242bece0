//! Ranks that train one model together, as threads of this process.
//!
//! Every rank has an [`Engine`] with the program of its own. Tensors are exchanged by calls of that
//! program; what the ranks decide on the host (to stop, to fall back) they agree on through their
//! [`Peers`]. Both go through one communicator, in an order that is the same on every rank, so that
//! a rank that fails, or goes another way, ends all others with one error that names it.

mod peers;

use std::panic::resume_unwind;
use std::thread;
use std::time::Duration;

use deepwell_ir::Graph;
use deepwell_kernels::{Comm, CommError, InProcess, Monitor};
use deepwell_plan::{Planned, lower_evaluation};
use deepwell_probe::Hardware;

pub use self::peers::Peers;
use crate::engine::{Compiled, load, planned};
use crate::{CompileOptions, Engine, TrainError};

/// How long a rank waits for another: a whole step of the largest model that trains on a processor,
/// with room to spare.
const PATIENCE: Duration = Duration::from_secs(1800);

/// The ranks of a run.
pub struct World {
    engines: Vec<Engine>,
    monitor: Option<Monitor>,
}

impl World {
    /// Plans and lowers a model once, and loads it for each rank that `options` asks for. Weights
    /// are zero until they are initialized or loaded, on each rank.
    ///
    /// # Errors
    /// As [`crate::compile`], and a batch that the ranks cannot split evenly.
    pub fn compile(
        graph: Graph,
        hardware: Hardware,
        options: &CompileOptions,
    ) -> Result<World, TrainError> {
        let ranks = options.parallel.world_size();
        if ranks < 2 {
            let engine = crate::compile(graph, hardware, options)?;
            return Ok(World { engines: vec![engine], monitor: None });
        }
        let comms = InProcess::world(ranks as u32, PATIENCE);
        World::compile_on(comms, &|comm| Box::new(comm), graph, hardware, options)
    }

    /// [`World::compile`] for the ranks of these communicators, whose programs exchange tensors
    /// through what `wrap` makes of each.
    ///
    /// # Errors
    /// As [`World::compile`].
    pub fn compile_on(
        comms: Vec<InProcess>,
        wrap: &dyn Fn(InProcess) -> Box<dyn Comm>,
        graph: Graph,
        hardware: Hardware,
        options: &CompileOptions,
    ) -> Result<World, TrainError> {
        let parallel = options.parallel;
        options.device.check_ranks()?;
        let target = options.device.target_of_rank(&hardware)?;
        let catalog = options.device.catalog();
        let planned = planned(&graph, &hardware, options, catalog.as_ref(), &target)?;
        let of_world = target.as_rank(parallel.ranks(0));
        let evaluation = {
            let Planned { plan, program, .. } = &planned;
            lower_evaluation(&graph, plan, program, catalog.as_ref(), &of_world)?
        };
        let monitor = comms.first().map(InProcess::monitor);
        let mut engines = Vec::with_capacity(comms.len());
        for (rank, comm) in comms.into_iter().enumerate() {
            let device = options.device.open_rank(&hardware, wrap(comm.clone()))?;
            let ranks = parallel.ranks(rank);
            let compiled = Compiled {
                graph: graph.clone(),
                hardware: hardware.clone(),
                evaluation: evaluation.for_rank(ranks.clone()),
                planned: Planned { program: planned.program.for_rank(ranks), ..planned.clone() },
                peers: Peers::of(Box::new(comm)),
            };
            engines.push(load(device, compiled, options)?);
        }
        Ok(World { engines, monitor })
    }

    /// Rank 0.
    pub fn first(&self) -> &Engine {
        &self.engines[0]
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.engines.len()
    }

    /// The engines, in the order of the ranks, for work that exchanges nothing.
    pub fn engines_mut(&mut self) -> &mut [Engine] {
        &mut self.engines
    }

    /// Does the same on every rank, each in a thread of its own, and gives what each gave.
    ///
    /// # Errors
    /// That of the rank which failed first, with the rank named; all others have ended then.
    pub fn on_all<T: Send>(
        &mut self,
        work: impl Fn(&mut Engine) -> Result<T, TrainError> + Sync,
    ) -> Result<Vec<T>, TrainError> {
        self.with_first(&work, &work)
    }

    /// [`World::on_all`], with rank 0 doing something of its own in this thread.
    ///
    /// # Errors
    /// As [`World::on_all`].
    pub fn with_first<T: Send>(
        &mut self,
        first: impl FnOnce(&mut Engine) -> Result<T, TrainError>,
        other: impl Fn(&mut Engine) -> Result<T, TrainError> + Sync,
    ) -> Result<Vec<T>, TrainError> {
        let Some(monitor) = &self.monitor else {
            return Ok(vec![first(&mut self.engines[0])?]);
        };
        let [own, others @ ..] = &mut self.engines[..] else { return Ok(Vec::new()) };
        // Whoever fails tells the others, who would wait for it, before anything else.
        let tell = |rank: usize, result: Result<T, TrainError>| {
            result.inspect_err(|error| monitor.abort(rank as u32, &error.to_string()))
        };
        let joined: Vec<thread::Result<Result<T, TrainError>>> = thread::scope(|scope| {
            let (other, tell) = (&other, &tell);
            let threads: Vec<_> = others
                .iter_mut()
                .zip(1usize..)
                .map(|(engine, rank)| {
                    let guard = Ending { monitor, rank: rank as u32 };
                    scope.spawn(move || {
                        let result = tell(rank, other(engine));
                        drop(guard);
                        result
                    })
                })
                .collect();
            let guard = Ending { monitor, rank: 0 };
            let own = tell(0, first(own));
            drop(guard);
            let others = threads.into_iter().map(|thread| thread.join());
            std::iter::once(Ok(own)).chain(others).collect()
        });
        let joined: thread::Result<Vec<Result<T, TrainError>>> = joined.into_iter().collect();
        let results = joined.unwrap_or_else(|panic| resume_unwind(panic));
        if results.iter().all(Result::is_ok) {
            return results.into_iter().collect();
        }
        let culprit = monitor.failure().map_or(0, |(rank, error)| match error {
            CommError::Ended { rank, .. } => rank,
            CommError::Timeout { missing, .. } => missing.first().copied().unwrap_or(rank),
            _ => rank,
        });
        let world_size = results.len();
        let mut errors: Vec<(usize, TrainError)> = results
            .into_iter()
            .enumerate()
            .filter_map(|(rank, result)| Some((rank, result.err()?)))
            .collect();
        let at = errors.iter().position(|(rank, _)| *rank == culprit as usize).unwrap_or(0);
        let (rank, source) = errors.swap_remove(at);
        Err(TrainError::Rank { rank, world_size, source: Box::new(source) })
    }
}

/// Tells the other ranks of one whose work panics.
struct Ending<'a> {
    monitor: &'a Monitor,
    rank: u32,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.monitor.abort(self.rank, "its thread panicked");
        }
    }
}
