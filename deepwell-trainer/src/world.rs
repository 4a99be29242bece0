//! Ranks that train one model together: threads of this process, or processes of their own.
//!
//! Every rank has an [`Engine`] with the program of its own. Tensors are exchanged by calls of that
//! program; what the ranks decide on the host (to stop, to fall back) they agree on through their
//! [`Peers`]. Both go through one communicator, in an order that is the same on every rank, so that
//! a rank that fails, or goes another way, ends all others with one error that names it.
//!
//! Of a run over several processes each has a world of its own rank alone, as a [`Member`].

mod joined;
mod launched;
mod lifeline;
mod member;
mod peers;
mod supervise;

use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use deepwell_ir::{Graph, Program, Target};
use deepwell_kernels::{Comm, CommError, InProcess, Monitor};
use deepwell_plan::{Planned, lower_evaluation, usable_bytes};
use deepwell_probe::Hardware;

use self::joined::Joined;
pub use self::launched::Launched;
pub(crate) use self::member::{Member, library_version};
pub use self::peers::Peers;
pub(crate) use self::supervise::supervise;
use crate::engine::{Compiled, load, planned};
use crate::{Catalog, CompileOptions, Device, Engine, TrainError};

/// How long a rank that has ended its work, or failed, waits for one that does not end its own.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Of a process whose rank is stuck: as of one that cannot use its inputs.
const EXIT_CODE_STUCK: i32 = 2;

/// Of the thread of a rank: as much as the first thread of a process has. Kernels that are compiled
/// without optimization keep their tiles there.
const RANK_STACK_BYTES: usize = 8 << 20;

/// The ranks of a run, or the one of them that this process is.
pub struct World {
    engines: Vec<Engine>,
    ties: Ties,
    /// What to do about ranks that do not end.
    when_stuck: Option<WhenStuck>,
}

/// Told of a rank that has not ended within a limit after another one has failed.
struct WhenStuck {
    limit: Duration,
    tell: Box<dyn Fn(&TrainError) + Send + Sync>,
}

/// What joins a rank to those whose engines it does not have.
enum Ties {
    /// There are no others.
    Alone,
    /// They are threads of this process.
    Threads(Monitor),
    /// They are other processes.
    Processes(Arc<Member>),
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
            return Ok(World { engines: vec![engine], ties: Ties::Alone, when_stuck: None });
        }
        let comms = InProcess::world(ranks as u32, options.rank_timeout);
        World::compile_on(comms, &|comm| Box::new(comm), graph, hardware, options)
    }

    /// What a step of the ranks that `options` asks for would be, without a device.
    ///
    /// # Errors
    /// As [`World::compile`], but for those of devices.
    pub(crate) fn predict(
        graph: Graph,
        hardware: Hardware,
        options: &CompileOptions,
    ) -> Result<Predicted, TrainError> {
        let planned = Lowered::of(graph, hardware, options)?.planned;
        Ok(Predicted { step_s: planned.prediction.time_s, rows: planned.plan.micro_batch })
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
        options.device.check_ranks()?;
        let mut lowered = Lowered::of(graph, hardware, options)?;
        let ties = comms.first().map_or(Ties::Alone, |comm| Ties::Threads(comm.monitor()));
        let mut engines = Vec::with_capacity(comms.len());
        for (rank, comm) in comms.into_iter().enumerate() {
            let device = options.device.open_rank(&lowered.hardware, wrap(comm.clone()))?;
            let compiled = lowered.for_rank(rank, Peers::of(Box::new(comm)))?;
            engines.push(load(device, compiled, options)?);
        }
        Ok(World { engines, ties, when_stuck: None })
    }

    /// [`World::compile`] for the one rank that this process is. All ranks plan with the memory of
    /// the one that has the least, and with the micro-batch that rank 0 was given.
    ///
    /// # Errors
    /// As [`World::compile`]; ranks that do not come or have failed; two ranks on one GPU.
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
        let all = peers.gather(&[free_bytes, given])?;
        let least_bytes = usable_bytes(all.iter().map(|words| words[0]).min().unwrap_or(0));
        let micro_batch = Some(all[0][1] as usize).filter(|&rows| rows > 0);
        let options = CompileOptions {
            memory_limit_bytes: options.memory_limit_bytes.or(Some(least_bytes)),
            micro_batch,
            ..options.clone()
        };
        let compiled = Lowered::of(graph, hardware, &options)?.for_rank(rank, peers)?;
        let engine = load(device, compiled, &options)?;
        let ties = Ties::Processes(Arc::clone(member));
        Ok(World { engines: vec![engine], ties, when_stuck: None })
    }

    /// The first rank of this process: rank 0, unless others are processes.
    pub fn first(&self) -> &Engine {
        &self.engines[0]
    }

    /// The engines, in the order of the ranks.
    pub fn engines(&self) -> &[Engine] {
        &self.engines
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        match &self.ties {
            Ties::Processes(member) => member.world_size(),
            _ => self.engines.len(),
        }
    }

    /// How many of them are in this process, and share its memory.
    pub fn local_size(&self) -> usize {
        self.engines.len()
    }

    /// The engines of this process, in the order of the ranks, for work that exchanges nothing.
    pub fn engines_mut(&mut self) -> &mut [Engine] {
        &mut self.engines
    }

    /// Ranks that are threads cannot be ended from outside. Where one fails and another has not
    /// ended its work after `limit`, `tell` is told of that rank, and may end the process; without
    /// this the others wait for it.
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

    /// Does the same on every rank, each in a thread of its own, and gives what each of this
    /// process gave.
    ///
    /// # Errors
    /// That of the rank which failed first, with the rank named; all others have ended then.
    pub fn on_all<T: Send>(
        &mut self,
        work: impl Fn(&mut Engine) -> Result<T, TrainError> + Sync,
    ) -> Result<Vec<T>, TrainError> {
        self.with_first(&work, &work)
    }

    /// [`World::on_all`], with rank 0 doing something of its own, in this thread where it is in
    /// this process.
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
        let [own, others @ ..] = &mut self.engines[..] else { return Ok(Vec::new()) };
        let running = Running::of(others.len() + 1);
        let when_stuck = self.when_stuck.as_ref();
        // Whoever fails tells the others, who would wait for it, before anything else.
        let tell = |rank: usize, result: Result<T, TrainError>| {
            result.inspect_err(|error| monitor.abort(rank as u32, &error.to_string()))
        };
        let joined: Vec<thread::Result<Result<T, TrainError>>> = thread::scope(|scope| {
            let (other, tell, running) = (&other, &tell, &running);
            if let Some(when_stuck) = when_stuck {
                // Without it a stuck rank is waited for, as it is where nobody asked for more.
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
            let own = tell(0, first(own));
            drop(guard);
            let others = threads.into_iter().map(|thread| match thread {
                Ok(thread) => thread.join(),
                Err(not_started) => Ok(not_started),
            });
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

/// What a plan says before anything is compiled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Predicted {
    /// Least time of a step, in seconds.
    pub(crate) step_s: f64,
    /// Sequences of a micro-batch, and of an evaluation.
    pub(crate) rows: usize,
}

/// A plan for the ranks of a world, and the programs of those classes that were asked for.
struct Lowered {
    graph: Graph,
    hardware: Hardware,
    catalog: Catalog,
    target: Target,
    planned: Planned,
    /// What the first rank of each class runs, in training and in evaluation.
    classes: Vec<(Planned, Program)>,
}

impl Lowered {
    fn of(
        graph: Graph,
        hardware: Hardware,
        options: &CompileOptions,
    ) -> Result<Lowered, TrainError> {
        let mut target = options.device.target(&hardware)?;
        if !options.parallel.is_single() {
            target = options.device.among_ranks(target);
        }
        let catalog = options.device.catalog();
        let planned = planned(&graph, &hardware, options, catalog.as_ref(), &target)?;
        Ok(Lowered { graph, hardware, catalog, target, planned, classes: Vec::new() })
    }

    /// What is loaded for a rank.
    fn for_rank(&mut self, rank: usize, peers: Peers) -> Result<Compiled, TrainError> {
        let Lowered { graph, hardware, catalog, target, planned, classes } = self;
        let (catalog, parallel) = (&**catalog, planned.plan.parallel);
        let ranks = parallel.ranks(rank);
        let is_alike = |(first, _): &&(Planned, Program)| {
            parallel.class(first.program.rank as usize) == parallel.class(rank)
        };
        let known = classes.iter().find(is_alike).cloned();
        let (of_class, evaluation) = match known {
            Some(known) => known,
            None => {
                let planned = planned.of_rank(rank, graph, catalog, target)?;
                let Planned { plan, program, .. } = &planned;
                let target = target.clone().as_rank(ranks.clone());
                let evaluation = lower_evaluation(graph, plan, program, catalog, &target)?;
                classes.push((planned.clone(), evaluation.clone()));
                (planned, evaluation)
            }
        };
        Ok(Compiled {
            graph: graph.clone(),
            hardware: hardware.clone(),
            evaluation: evaluation.for_rank(ranks),
            planned: of_class.of_rank(rank, graph, catalog, target)?,
            peers,
        })
    }
}

/// Tells the other ranks of one whose work panics, and the watcher of one that has ended.
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

/// Which ranks work.
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

    /// Waits until all ranks have ended; tells of the first that has not for too long, once one has
    /// failed.
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
