//! Ranks that train one model together: threads of this process, or separate processes.
//!
//! Every rank has an [`Engine`] with its own program. The calls of the program exchange tensors;
//! decisions on the host (to stop, to fall back) are agreed on through [`Peers`]. Both use one
//! communicator, in the same order on every rank. If a rank fails or issues different calls, every
//! rank ends with an error that names the failing rank.
//!
//! In a run over several processes, each process has a world with only its own rank, as a
//! [`Member`].

mod heartbeat;
mod joined;
mod launched;
mod lowered;
mod member;
mod supervise;

use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use deepwell_ir::Graph;
use deepwell_kernels::{Comm, CommError, InProcess, Monitor};
use deepwell_probe::Hardware;

use self::joined::Joined;
pub use self::launched::Launched;
pub(crate) use self::lowered::Lowered;
pub use self::member::{Member, library_version};
pub use self::supervise::supervise;
use crate::engine::load;
use crate::peers::Peers;
use crate::{CompileOptions, Device, Engine, TrainError};

/// How long a completed or failed rank waits for another rank to end.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Exit code of a process with a stuck rank: the same as for unusable inputs.
const EXIT_CODE_STUCK: i32 = 2;

/// Stack size of a rank's thread, equal to that of a process's main thread. Kernels compiled
/// without optimization keep their tiles on the stack.
const RANK_STACK_BYTES: usize = 8 << 20;

/// The ranks of a run, or the single rank of this process.
pub struct World {
    engines: Vec<Engine>,
    ties: Ties,
    /// Action for ranks that do not end.
    when_stuck: Option<WhenStuck>,
}

/// Called if a rank has not ended within a limit after another rank has failed.
struct WhenStuck {
    limit: Duration,
    tell: Box<dyn Fn(&TrainError) + Send + Sync>,
}

/// Connection of a rank to ranks whose engines are elsewhere.
enum Ties {
    /// A single rank.
    Alone,
    /// The ranks are threads of this process.
    Threads(Monitor),
    /// The other ranks are other processes.
    Processes(Arc<Member>),
}

impl World {
    /// Plans and lowers a model once, and loads it for each rank of `options`. Weights are zero on
    /// each rank until initialized or loaded.
    ///
    /// # Errors
    /// As [`crate::compile`], and the ranks cannot split the batch evenly.
    pub fn compile(
        graph: Graph,
        hardware: Hardware,
        options: &CompileOptions,
    ) -> Result<World, TrainError> {
        World::of_lowered(Lowered::of(graph, hardware, options)?, options)
    }

    /// [`World::compile`] of a model that is planned and lowered with the same `options`.
    ///
    /// # Errors
    /// A device is missing, or cannot load a program.
    pub(crate) fn of_lowered(
        mut lowered: Lowered,
        options: &CompileOptions,
    ) -> Result<World, TrainError> {
        let ranks = options.parallel.world_size();
        if ranks > 1 {
            let comms = InProcess::world(ranks as u32, options.rank_timeout);
            return World::of_ranks(comms, &|comm| Box::new(comm), lowered, options);
        }
        let device = options.device.open(lowered.hardware())?;
        let engine = load(device, lowered.for_rank(0, Peers::none())?, options)?;
        Ok(World { engines: vec![engine], ties: Ties::Alone, when_stuck: None })
    }

    /// [`World::compile`] for the ranks of these communicators; the programs communicate through
    /// `wrap` of each communicator.
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
        World::of_ranks(comms, wrap, Lowered::of(graph, hardware, options)?, options)
    }

    fn of_ranks(
        comms: Vec<InProcess>,
        wrap: &dyn Fn(InProcess) -> Box<dyn Comm>,
        mut lowered: Lowered,
        options: &CompileOptions,
    ) -> Result<World, TrainError> {
        options.device.check_ranks()?;
        let ties = comms.first().map_or(Ties::Alone, |comm| Ties::Threads(comm.monitor()));
        let mut engines = Vec::with_capacity(comms.len());
        for (rank, comm) in comms.into_iter().enumerate() {
            let device = options.device.open_rank(lowered.hardware(), wrap(comm.clone()))?;
            let compiled = lowered.for_rank(rank, Peers::of(Box::new(comm)))?;
            engines.push(load(device, compiled, options)?);
        }
        Ok(World { engines, ties, when_stuck: None })
    }

    /// [`World::compile`] for the single rank of this process. All ranks plan with the smallest
    /// memory of any rank, and with the micro-batch of rank 0.
    ///
    /// # Errors
    /// As [`World::compile`]; ranks are missing or have failed; two ranks use one GPU.
    pub(crate) fn join(
        member: &Arc<Member>,
        graph: Graph,
        hardware: Hardware,
        options: &CompileOptions,
    ) -> Result<World, TrainError> {
        let joined = match options.device {
            Device::Cuda(_) => Joined::gpu(member, &hardware, options)?,
            Device::Cpu | Device::Emulated(_) => Joined::processor(member, &hardware, options)?,
        };
        let Joined { rank, device, mut peers, free_bytes } = joined;
        let given = options.micro_batch.map_or(0, |rows| rows as u64);
        let local_rank = member.local_rank() as u64;
        let all = peers.gather(&[free_bytes, given, local_rank])?;
        let limit_bytes = joined::limit_bytes(options.device, &all);
        let micro_batch = Some(all[0][1] as usize).filter(|&rows| rows > 0);
        let options = CompileOptions {
            memory_limit_bytes: options.memory_limit_bytes.or(Some(limit_bytes)),
            micro_batch,
            ..options.clone()
        };
        let compiled = Lowered::of(graph, hardware, &options)?.for_rank(rank, peers)?;
        let engine = load(device, compiled, &options)?;
        let ties = Ties::Processes(Arc::clone(member));
        Ok(World { engines: vec![engine], ties, when_stuck: None })
    }

    /// The first rank of this process: rank 0, unless ranks are processes.
    pub fn first(&self) -> &Engine {
        &self.engines[0]
    }

    /// The engines, in the order of the ranks.
    pub fn engines(&self) -> &[Engine] {
        &self.engines
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        match &self.ties {
            Ties::Processes(member) => member.world_size(),
            _ => self.engines.len(),
        }
    }

    /// Number of ranks in this process, which share its memory.
    pub fn local_size(&self) -> usize {
        self.engines.len()
    }

    /// The engines of this process, in the order of the ranks, for work without communication.
    pub fn engines_mut(&mut self) -> &mut [Engine] {
        &mut self.engines
    }

    /// Sets the action for stuck ranks, because threads cannot be stopped from outside. If a rank
    /// fails and another has not ended after `limit`, `tell` receives an error about that rank, and
    /// may exit the process; without this action the other ranks wait for it.
    pub fn when_stuck(
        &mut self,
        limit: Duration,
        tell: impl Fn(&TrainError) + Send + Sync + 'static,
    ) {
        self.when_stuck = Some(WhenStuck { limit, tell: Box::new(tell) });
    }

    /// [`World::when_stuck`]: writes the error to standard error and ends the process.
    pub(crate) fn end_process_when_stuck(&mut self) {
        self.when_stuck(END_LIMIT, |error| {
            eprintln!("error: {error}");
            std::process::exit(EXIT_CODE_STUCK);
        });
    }

    /// Runs `work` on every rank, each in its own thread, and returns the results of this process's
    /// ranks.
    ///
    /// # Errors
    /// The error of the rank that failed first, with its rank; all other ranks have ended.
    pub fn on_all<T: Send>(
        &mut self,
        work: impl Fn(&mut Engine) -> Result<T, TrainError> + Sync,
    ) -> Result<Vec<T>, TrainError> {
        self.with_first(&work, &work)
    }

    /// [`World::on_all`], but rank 0 runs `first`, in this thread if rank 0 is in this process.
    ///
    /// # Errors
    /// As [`World::on_all`].
    pub fn with_first<T: Send>(
        &mut self,
        first: impl FnOnce(&mut Engine) -> Result<T, TrainError>,
        other: impl Fn(&mut Engine) -> Result<T, TrainError> + Sync,
    ) -> Result<Vec<T>, TrainError> {
        let monitor = match &self.ties {
            Ties::Alone => return Ok(vec![first(&mut self.engines[0])?]),
            Ties::Processes(member) => {
                let engine = &mut self.engines[0];
                let done = if member.is_first() { first(engine) } else { other(engine) };
                return Ok(vec![member.told(done)?]);
            }
            Ties::Threads(monitor) => monitor,
        };
        let [leader, others @ ..] = &mut self.engines[..] else { return Ok(Vec::new()) };
        let running = Running::of(others.len() + 1);
        let when_stuck = self.when_stuck.as_ref();
        // A failing rank informs the other ranks first, because they may wait for this rank.
        let tell = |rank: usize, result: Result<T, TrainError>| {
            result.inspect_err(|error| monitor.abort(rank as u32, &error.to_string()))
        };
        let joined: Vec<thread::Result<Result<T, TrainError>>> = thread::scope(|scope| {
            let (other, tell, running) = (&other, &tell, &running);
            if let Some(when_stuck) = when_stuck {
                // Without a watcher, as without `when_stuck`, a stuck rank is waited for.
                let watch = move || running.watch(monitor, when_stuck);
                let watcher = thread::Builder::new().name("ranks".to_string());
                let _ = watcher.spawn_scoped(scope, watch);
            }
            let threads: Vec<_> = others
                .iter_mut()
                .zip(1usize..)
                .map(|(engine, rank)| {
                    let guard = Ending { monitor, running, rank: rank as u32 };
                    let work = move || {
                        let result = tell(rank, other(engine));
                        drop(guard);
                        result
                    };
                    let thread = thread::Builder::new().name(format!("rank {rank}"));
                    let started = thread.stack_size(RANK_STACK_BYTES).spawn_scoped(scope, work);
                    started.map_err(|error| {
                        let reason = format!("the system gives it no thread: {error}");
                        tell(rank, Err(TrainError::Elsewhere(reason)))
                    })
                })
                .collect();
            let guard = Ending { monitor, running, rank: 0 };
            let leader = tell(0, first(leader));
            drop(guard);
            let others = threads.into_iter().map(|thread| match thread {
                Ok(thread) => thread.join(),
                Err(not_started) => Ok(not_started),
            });
            std::iter::once(Ok(leader)).chain(others).collect()
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

/// Informs the other ranks of a panic, and the watcher of the end of a rank's work.
struct Ending<'a> {
    monitor: &'a Monitor,
    running: &'a Running,
    rank: u32,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.monitor.abort(self.rank, "its thread panicked");
        }
        self.running.end(self.rank as usize);
    }
}

/// The ranks still working.
struct Running {
    ranks: Mutex<Vec<bool>>,
    changed: Condvar,
}

impl Running {
    fn of(ranks: usize) -> Running {
        Running { ranks: Mutex::new(vec![true; ranks]), changed: Condvar::new() }
    }

    fn end(&self, rank: usize) {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)[rank] = false;
        self.changed.notify_all();
    }

    /// Waits until all ranks have ended. After a failure, reports the first rank that takes too
    /// long to end.
    fn watch(&self, monitor: &Monitor, when_stuck: &WhenStuck) {
        let mut failed_at: Option<Instant> = None;
        let mut is_told = false;
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(rank) = ranks.iter().position(|runs| *runs) {
            let failure = monitor.failure();
            if failure.is_some() && failed_at.is_none() {
                failed_at = Some(Instant::now());
            }
            if failed_at.is_some_and(|at| at.elapsed() > when_stuck.limit) && !is_told {
                is_told = true;
                let world_size = ranks.len() as u32;
                let first = failure.map_or_else(String::new, |(rank, error)| {
                    format!("rank {rank} had failed: {error}")
                });
                let reason = format!("it has not ended for {:?}, when {first}", when_stuck.limit);
                drop(ranks);
                (when_stuck.tell)(&TrainError::of_rank(rank as u32, world_size, reason));
                ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let look_every = (when_stuck.limit / 8).min(Duration::from_millis(500));
            let woken = self.changed.wait_timeout(ranks, look_every);
            ranks = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
