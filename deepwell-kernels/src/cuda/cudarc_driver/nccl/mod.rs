//! Collectives between ranks by NVIDIA's library, NCCL.
//!
//! A rank is a process with one GPU, an [`NcclRank`]: threads that launch graphs with collectives
//! may block each other in the driver (NCCL's manual, "Using NCCL with CUDA Graphs"). A rank has a
//! communicator for host messages ([`NcclHost`]), and a communicator for each of its process groups
//! ([`NcclDevice`]). Concurrent kernels of several communicators must all fit on the device at the
//! same time, otherwise ranks deadlock. Host collectives take a single CTA and complete before
//! other work is issued; collectives of the groups are ordered by their stream.
//!
//! States: connected; failed, once [`NcclMonitor::abort`] has stored a reason. The reason is stored
//! before the communicators are aborted, so that a thread that waited for the device sees the
//! failure before it reads incomplete results. An abort returns only once the graphs with
//! collectives are freed, so a separate thread runs the abort.

mod enqueue;
mod groups;
mod host;
mod library;
mod measure;

use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use deepwell_ir::ProcessGroup;

use self::library::{Communicator, Config, Library, UniqueId};
use super::CudarcDriver;
use super::context::{Context, no_such};
use crate::CommError;
use crate::runtime::cuda::comm::{DeviceComm, DeviceExchange, ExchangePlan};
use crate::runtime::cuda::driver::{DriverError, DriverResult, Stream};

pub use self::host::NcclHost;
pub use self::library::NCCL_VARIABLE;
pub(super) use self::measure::Communicators;

/// Polling interval of waits and communicators.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long an error of the library waits for news of another rank's failure, a possible cause.
const NEWS_WITHIN: Duration = Duration::from_secs(2);
/// How long an abort waits for a library call to return, and how long the drop of a rank waits for
/// other ranks.
const GRACE: Duration = Duration::from_secs(10);

/// The version of the installed library.
///
/// # Errors
/// No library, or a version that is too old: the searched places, and what to install.
pub fn nccl_version() -> DriverResult<String> {
    Ok(library::Library::get()?.version())
}

/// The id by which the ranks of a world connect; created on a single rank.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NcclId([u8; NcclId::BYTES]);

impl NcclId {
    /// Length of [`NcclId::to_bytes`].
    pub const BYTES: usize = 128;

    /// Creates an id. The creating process answers all ranks during connection.
    ///
    /// # Errors
    /// No library, or no usable network interface.
    pub fn new() -> DriverResult<NcclId> {
        let library = Library::get()?;
        let mut id = UniqueId([0; NcclId::BYTES]);
        // SAFETY: writes one id.
        library.check("ncclGetUniqueId", unsafe { (library.get_unique_id)(&mut id) })?;
        Ok(NcclId(id.0))
    }

    /// The bytes to send to the other ranks.
    pub fn to_bytes(self) -> [u8; NcclId::BYTES] {
        self.0
    }

    /// The id from received bytes.
    pub fn from_bytes(bytes: [u8; NcclId::BYTES]) -> NcclId {
        NcclId(bytes)
    }
}

/// Timeouts of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclLimits {
    /// For connecting all ranks.
    pub connect: Duration,
    /// For the device, while collectives wait for peers.
    pub exchange: Duration,
}

/// A rank: a process with a GPU.
#[derive(Clone)]
pub struct NcclRank {
    shared: Arc<Shared>,
}

/// A communicator of the library. The owner ensures that a single thread at a time uses the
/// communicator.
#[derive(Clone, Copy)]
struct Handle(Communicator);

// SAFETY: the library's communicators belong to no thread.
unsafe impl Send for Handle {}

struct Shared {
    library: &'static Library,
    context: Arc<Context>,
    rank: u32,
    world_size: u32,
    limits: NcclLimits,
    /// Empty once the rank has failed.
    communicators: Mutex<Vec<(ProcessGroup, Handle)>>,
    /// Held during library calls with a communicator.
    calls: Mutex<()>,
    failure: Mutex<Option<(u32, String)>>,
    /// Begin of the host's current wait for the device.
    waits_since: Mutex<Option<Instant>>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NcclRank {
    /// Connects this rank with the `world_size - 1` other ranks, which call this function at the
    /// same time. `failure` is polled meanwhile for a failure of another rank.
    ///
    /// # Errors
    /// No library; ranks that have failed or do not arrive in time; two ranks on the same GPU.
    pub fn connect(
        driver: &CudarcDriver,
        id: NcclId,
        (rank, world_size): (u32, u32),
        limits: NcclLimits,
        failure: &dyn Fn() -> Option<(u32, String)>,
    ) -> DriverResult<NcclRank> {
        let library = Library::get()?;
        let context = Arc::clone(&driver.context);
        let rank_and_size = (rank, world_size);
        // Host messages are short.
        let ctas = Some(1);
        let world = init(library, &context, id, rank_and_size, ctas, limits.connect, failure)?;
        let group = host_group(world_size);
        let shared = Arc::new(Shared {
            library,
            context,
            rank,
            world_size,
            limits,
            communicators: Mutex::new(vec![(group, world)]),
            calls: Mutex::new(()),
            failure: Mutex::new(None),
            waits_since: Mutex::new(None),
        });
        let watched = Arc::downgrade(&shared);
        thread::Builder::new()
            .name("nccl-watch".to_string())
            .spawn(move || watch(&watched))
            .map_err(|error| DriverError::new("NCCL", error))?;
        Ok(NcclRank { shared })
    }

    /// The collectives of the device's program.
    pub fn device(&self) -> NcclDevice {
        NcclDevice { shared: Arc::clone(&self.shared), plans: Vec::new() }
    }

    /// The index of this rank.
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// A handle to watch this rank.
    pub fn monitor(&self) -> NcclMonitor {
        NcclMonitor { shared: Arc::downgrade(&self.shared) }
    }

    /// Name and version of the library.
    pub fn version(&self) -> String {
        self.shared.version()
    }
}

/// The group of host messages.
fn host_group(world_size: u32) -> ProcessGroup {
    ProcessGroup { name: ProcessGroup::HOST.to_string(), ranks: (0..world_size).collect() }
}

/// A handle on a rank from outside, for any thread.
#[derive(Clone)]
pub struct NcclMonitor {
    shared: Weak<Shared>,
}

impl NcclMonitor {
    /// Aborts this rank's current collectives and fails its later collectives, with a reason of
    /// `rank`, unless a rank has failed before.
    pub fn abort(&self, rank: u32, reason: &str) {
        if let Some(shared) = self.shared.upgrade() {
            shared.fail(rank, reason);
        }
    }

    /// The first failure known to this rank: rank and reason.
    pub fn failure(&self) -> Option<(u32, String)> {
        self.shared.upgrade().and_then(|shared| shared.failed())
    }
}

/// Creates a communicator of `ranks` ranks with the same id.
fn init(
    library: &'static Library,
    context: &Arc<Context>,
    id: NcclId,
    (rank_in_group, ranks): (u32, u32),
    ctas: Option<c_int>,
    limit: Duration,
    failure: &dyn Fn() -> Option<(u32, String)>,
) -> DriverResult<Handle> {
    let context = Arc::clone(context);
    let (done, result) = mpsc::channel();
    let connect = move || {
        context.enter()?;
        let mut raw = ptr::null_mut();
        let mut config = Config::with_ctas(ctas);
        // SAFETY: writes one handle; the configuration lives through the call; a context is
        // current, and the communicator is for the context's device.
        let code = unsafe {
            (library.init_rank)(
                &mut raw,
                ranks as c_int,
                UniqueId(id.0),
                rank_in_group as c_int,
                &mut config,
            )
        };
        library.check("ncclCommInitRankConfig", code).map(|()| Handle(raw))
    };
    // The library waits for other ranks without a timeout, so a thread makes the call and can be
    // abandoned.
    thread::Builder::new()
        .name("nccl-connect".to_string())
        .spawn(move || {
            // The receiver is gone after the timeout.
            let _ = done.send(connect());
        })
        .map_err(|error| DriverError::new("NCCL", error))?;
    let end = Instant::now() + limit;
    loop {
        match result.recv_timeout(LOOK_EVERY) {
            Ok(connected) => return connected,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(DriverError::new("NCCL", "the thread that connected has panicked"));
            }
        }
        if let Some((rank, reason)) = failure() {
            return Err(DriverError::new("NCCL", CommError::Failed { rank, reason }));
        }
        if Instant::now() > end {
            return Err(DriverError::new(
                "NCCL",
                format!(
                    "not all of the {ranks} ranks connected within {limit:?}\n\
                     hint: `NCCL_DEBUG=INFO` tells by what they look for each other; \
                     `NCCL_SOCKET_IFNAME` names the network interface"
                ),
            ));
        }
    }
}

impl Shared {
    fn version(&self) -> String {
        format!("NCCL {}", self.library.version())
    }

    /// Stores the first reason and aborts all communicators.
    fn fail(self: &Arc<Shared>, rank: u32, reason: &str) {
        {
            let mut failure = lock(&self.failure);
            if failure.is_some() {
                return;
            }
            *failure = Some((rank, reason.to_string()));
        }
        let handles: Vec<Handle> =
            lock(&self.communicators).drain(..).map(|(_, handle)| handle).collect();
        let shared = Arc::clone(self);
        let abort = move || {
            // A call that waits for other ranks returns only because of the abort.
            let end = Instant::now() + GRACE;
            while shared.calls.try_lock().is_err() && Instant::now() < end {
                thread::sleep(LOOK_EVERY);
            }
            if shared.context.enter().is_err() {
                return;
            }
            let library = shared.library;
            // A group, because separate aborts would each wait for ranks that wait for another
            // communicator.
            // SAFETY: the communicators were taken out of the list, so each is freed once, and no
            // call begins with a communicator any more; the library lets an abort interrupt a call.
            unsafe {
                let _ = (library.group_start)();
                for handle in &handles {
                    let _ = (library.abort)(handle.0);
                }
                let _ = (library.group_end)();
            }
        };
        // If no thread can be created, nothing can be done.
        let _ = thread::Builder::new().name("nccl-abort".to_string()).spawn(abort);
    }

    /// The first failure: rank and reason.
    fn failed(&self) -> Option<(u32, String)> {
        lock(&self.failure).clone()
    }

    /// Returns an error if the rank has failed.
    fn check(&self) -> DriverResult<()> {
        match self.failed() {
            None => Ok(()),
            Some((rank, reason)) => {
                Err(DriverError::new("NCCL", CommError::Failed { rank, reason }))
            }
        }
    }

    /// Waits on the host up to the timeout: after the timeout the rank fails, and the failure ends
    /// the wait.
    fn wait(&self, wait: impl FnOnce() -> DriverResult<()>) -> DriverResult<()> {
        *lock(&self.waits_since) = Some(Instant::now());
        let waited = wait();
        *lock(&self.waits_since) = None;
        self.check().and(waited)
    }

    /// Errors that a communicator reports asynchronously.
    fn reported(&self) -> DriverResult<()> {
        let Ok(_call) = self.calls.try_lock() else { return Ok(()) };
        for (group, handle) in lock(&self.communicators).iter() {
            let mut code = 0;
            // SAFETY: a handle in the list is alive; the call writes one integer.
            let asked = unsafe { (self.library.get_async_error)(handle.0, &mut code) };
            self.library.check("ncclCommGetAsyncError", asked)?;
            self.library.check(&format!("NCCL, group `{}`", group.name), code)?;
        }
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let communicators = self.communicators.get_mut().unwrap_or_else(PoisonError::into_inner);
        let handles: Vec<Handle> = communicators.drain(..).map(|(_, handle)| handle).collect();
        if handles.is_empty() {
            return;
        }
        let (library, context) = (self.library, Arc::clone(&self.context));
        let (done, ended) = mpsc::channel();
        let destroy = move || {
            if context.enter().is_ok() {
                for handle in handles {
                    // SAFETY: created once and destroyed once; graphs with its work are freed.
                    let _ = unsafe { (library.destroy)(handle.0) };
                }
            }
            let _ = done.send(());
        };
        // Destroying may wait for ranks that are gone.
        if thread::Builder::new().name("nccl-destroy".to_string()).spawn(destroy).is_ok() {
            let _ = ended.recv_timeout(GRACE);
        }
    }
}

/// Watches a rank until it is dropped: for timeouts, and for asynchronous errors of the library.
fn watch(shared: &Weak<Shared>) {
    let mut reported_at = None;
    loop {
        thread::sleep(LOOK_EVERY);
        let Some(shared) = shared.upgrade() else { return };
        let limit = shared.limits.exchange;
        let waits_since = *lock(&shared.waits_since);
        if waits_since.is_some_and(|since| since.elapsed() > limit) {
            let reason = format!("waited {limit:?} for the other ranks in an exchange");
            shared.fail(shared.rank, &reason);
        }
        let Err(error) = shared.reported() else { continue };
        if reported_at.get_or_insert_with(Instant::now).elapsed() > NEWS_WITHIN {
            shared.fail(shared.rank, &error.to_string());
        }
    }
}

/// [`DeviceComm`] by NCCL, among the groups passed to [`NcclRank::join`].
///
/// Float reductions are NCCL's: BF16 sums are rounded at each hop. The order of additions is the
/// library's, equal in all runs with the same algorithm. NVLink switches add in any order:
/// `NCCL_ALGO=^NVLS` excludes them. A maximum of floats is rejected, because the library's maximum
/// loses NaN.
pub struct NcclDevice {
    shared: Arc<Shared>,
    plans: Vec<DeviceExchange>,
}

impl NcclDevice {
    fn planned(&self, plan: ExchangePlan) -> DriverResult<&DeviceExchange> {
        self.plans.get(plan.0).ok_or_else(|| no_such("exchange plan", plan.0 as u64))
    }
}

impl DeviceComm for NcclDevice {
    fn version(&self) -> String {
        self.shared.version()
    }

    fn rank(&self) -> u32 {
        self.shared.rank
    }

    fn world_size(&self) -> u32 {
        self.shared.world_size
    }

    fn plan(&mut self, exchange: &DeviceExchange) -> DriverResult<ExchangePlan> {
        self.shared.accept(exchange)?;
        self.plans.push(exchange.clone());
        Ok(ExchangePlan(self.plans.len() - 1))
    }

    fn run(&mut self, plan: ExchangePlan, stream: Stream) -> DriverResult<()> {
        let exchange = self.planned(plan)?;
        self.shared.context.enter()?;
        let stream = self.shared.context.resolve(stream)?;
        self.shared.enqueue(exchange, stream)
    }

    fn run_together(&mut self, plans: &[ExchangePlan], stream: Stream) -> DriverResult<()> {
        let exchanges: Vec<&DeviceExchange> =
            plans.iter().map(|&plan| self.planned(plan)).collect::<Result<_, _>>()?;
        self.shared.context.enter()?;
        let stream = self.shared.context.resolve(stream)?;
        self.shared.enqueue_together(&exchanges, stream)
    }

    fn forget_plans(&mut self) {
        self.plans.clear();
    }

    fn wait(&mut self, wait: &mut dyn FnMut() -> DriverResult<()>) -> DriverResult<()> {
        self.shared.wait(wait)
    }
}
