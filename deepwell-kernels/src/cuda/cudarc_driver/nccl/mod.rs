//! Exchanges between ranks by NVIDIA's collective library, NCCL.
//!
//! A rank is a process with one GPU, an [`NcclRank`]: threads that launch graphs with collectives
//! may block each other in the driver (NCCL's manual, "Using NCCL with CUDA Graphs"). It has one
//! communicator for what the hosts tell each other ([`NcclHost`]) and one for each of its process
//! groups ([`NcclDevice`]). Kernels of several communicators that run at the same time must all
//! find room on the device, or ranks wait for each other: the host's takes one CTA, is waited for
//! before anything else is issued, and those of the groups are ordered by their stream.
//!
//! States: connected; failed, once [`NcclMonitor::abort`] has kept a reason. The reason is kept
//! first and the communicators are aborted then, so that whoever waited for the device learns of it
//! before looking at numbers that no exchange has made. An abort ends only when the graphs that
//! have collectives are freed, so a thread of its own waits for that.

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
use crate::cuda::comm::{DeviceComm, DeviceExchange, ExchangePlan};
use crate::cuda::driver::{DriverError, DriverResult, Stream};

pub use self::host::NcclHost;
pub use self::library::NCCL_VARIABLE;
pub(super) use self::measure::Communicators;

/// How often waits and communicators are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long an error of the library waits for news of another rank, whose end may have caused it.
const NEWS_WITHIN: Duration = Duration::from_secs(2);
/// How long an abort waits for a call of the library to return, and a goodbye for the other ranks.
const GRACE: Duration = Duration::from_secs(10);

/// The version of the library that is here.
///
/// # Errors
/// No library, or one that is too old: where it was looked for, and what to install.
pub fn nccl_version() -> DriverResult<String> {
    Ok(library::Library::get()?.version())
}

/// What joins the ranks of one world: one of them makes it, all of them connect by it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NcclId([u8; NcclId::BYTES]);

impl NcclId {
    /// Length of [`NcclId::to_bytes`].
    pub const BYTES: usize = 128;

    /// A new one. The process that makes it answers the others while they connect.
    ///
    /// # Errors
    /// No library, or no network interface that it can use.
    pub fn new() -> DriverResult<NcclId> {
        let library = Library::get()?;
        let mut id = UniqueId([0; NcclId::BYTES]);
        // SAFETY: writes one id.
        library.check("ncclGetUniqueId", unsafe { (library.get_unique_id)(&mut id) })?;
        Ok(NcclId(id.0))
    }

    /// As it is sent.
    pub fn to_bytes(self) -> [u8; NcclId::BYTES] {
        self.0
    }

    /// As it was sent.
    pub fn from_bytes(bytes: [u8; NcclId::BYTES]) -> NcclId {
        NcclId(bytes)
    }
}

/// How long a rank waits for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclLimits {
    /// Until all have connected.
    pub connect: Duration,
    /// For the device, which waits for the others' parts of exchanges.
    pub exchange: Duration,
}

/// A rank that is a process with a GPU of its own.
#[derive(Clone)]
pub struct NcclRank {
    shared: Arc<Shared>,
}

/// A communicator of the library. Its owner sees to it that one thread at a time uses it.
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
    /// Held while the library is called with a communicator.
    calls: Mutex<()>,
    failure: Mutex<Option<(u32, String)>>,
    /// Since when the host waits for the device.
    waits_since: Mutex<Option<Instant>>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NcclRank {
    /// Connects this rank with the `world_size - 1` others, each of which does the same at the
    /// same time. `failure` is asked meanwhile whether one of them is known to have failed.
    ///
    /// # Errors
    /// No library; ranks that do not come in time or have failed; two ranks on one GPU.
    pub fn connect(
        driver: &CudarcDriver,
        id: NcclId,
        (rank, world_size): (u32, u32),
        limits: NcclLimits,
        failure: &dyn Fn() -> Option<(u32, String)>,
    ) -> DriverResult<NcclRank> {
        let library = Library::get()?;
        let context = Arc::clone(&driver.context);
        let place = (rank, world_size);
        // What hosts tell each other is short.
        let ctas = Some(1);
        let world = init(library, &context, id, place, ctas, limits.connect, failure)?;
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

    /// What takes the device through its program's collectives.
    pub fn device(&self) -> NcclDevice {
        NcclDevice { shared: Arc::clone(&self.shared), plans: Vec::new() }
    }

    /// Which rank this is.
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// What looks at this rank from outside.
    pub fn monitor(&self) -> NcclMonitor {
        NcclMonitor { shared: Arc::downgrade(&self.shared) }
    }

    /// The library and its version.
    pub fn version(&self) -> String {
        self.shared.version()
    }
}

/// The group of what the hosts of a world tell each other.
fn host_group(world_size: u32) -> ProcessGroup {
    ProcessGroup { name: ProcessGroup::HOST.to_string(), ranks: (0..world_size).collect() }
}

/// Looks at a rank from outside, from any thread.
#[derive(Clone)]
pub struct NcclMonitor {
    shared: Weak<Shared>,
}

impl NcclMonitor {
    /// Ends this rank's present exchanges and lets its later ones fail, with a reason of `rank`,
    /// unless a rank has failed before.
    pub fn abort(&self, rank: u32, reason: &str) {
        if let Some(shared) = self.shared.upgrade() {
            shared.fail(rank, reason);
        }
    }

    /// Who failed first, and how, as far as this rank knows.
    pub fn failure(&self) -> Option<(u32, String)> {
        self.shared.upgrade().and_then(|shared| shared.failed())
    }
}

/// A communicator among as many ranks as come by the same id.
fn init(
    library: &'static Library,
    context: &Arc<Context>,
    id: NcclId,
    (place, ranks): (u32, u32),
    ctas: Option<c_int>,
    limit: Duration,
    failure: &dyn Fn() -> Option<(u32, String)>,
) -> DriverResult<Handle> {
    let context = Arc::clone(context);
    let (done, result) = mpsc::channel();
    let connect = move || {
        context.enter()?;
        let (mut raw, mut config) = (ptr::null_mut(), Config::with_ctas(ctas));
        // SAFETY: writes one handle; the configuration lives through the call; a context is
        // current, whose device the communicator gets.
        let code = unsafe {
            (library.init_rank)(
                &mut raw,
                ranks as c_int,
                UniqueId(id.0),
                place as c_int,
                &mut config,
            )
        };
        library.check("ncclCommInitRankConfig", code).map(|()| Handle(raw))
    };
    // The library waits for the others without limit: on a thread that can be left behind.
    thread::Builder::new()
        .name("nccl-connect".to_string())
        .spawn(move || {
            // Nobody listens any more where the limit is over.
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

    /// Keeps the first reason and aborts all communicators.
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
            // A call that waits for other ranks returns by the abort alone.
            let end = Instant::now() + GRACE;
            while shared.calls.try_lock().is_err() && Instant::now() < end {
                thread::sleep(LOOK_EVERY);
            }
            if shared.context.enter().is_err() {
                return;
            }
            let library = shared.library;
            // One by one, each would wait for the ranks that wait for another.
            // SAFETY: the communicators were taken out of the list, so each is given back once, and
            // no call begins with one any more; the library lets an abort interrupt a call.
            unsafe {
                let _ = (library.group_start)();
                for handle in &handles {
                    let _ = (library.abort)(handle.0);
                }
                let _ = (library.group_end)();
            }
        };
        // Without a thread there is nothing that could be done.
        let _ = thread::Builder::new().name("nccl-abort".to_string()).spawn(abort);
    }

    /// Who failed first, and how.
    fn failed(&self) -> Option<(u32, String)> {
        lock(&self.failure).clone()
    }

    /// The error of a rank that has failed.
    fn check(&self) -> DriverResult<()> {
        match self.failed() {
            None => Ok(()),
            Some((rank, reason)) => {
                Err(DriverError::new("NCCL", CommError::Failed { rank, reason }))
            }
        }
    }

    /// Waits on the host, no longer than the limit: who waits longer fails, and is woken by that.
    fn wait(&self, wait: impl FnOnce() -> DriverResult<()>) -> DriverResult<()> {
        *lock(&self.waits_since) = Some(Instant::now());
        let waited = wait();
        *lock(&self.waits_since) = None;
        self.check().and(waited)
    }

    /// What a communicator reports that failed while nobody called it.
    fn reported(&self) -> DriverResult<()> {
        let Ok(_call) = self.calls.try_lock() else { return Ok(()) };
        for (group, handle) in lock(&self.communicators).iter() {
            let mut code = 0;
            // SAFETY: the handle is alive: it is in the list, and writes one integer.
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
                    // SAFETY: made once and destroyed once; graphs with its work are freed.
                    let _ = unsafe { (library.destroy)(handle.0) };
                }
            }
            let _ = done.send(());
        };
        // It may wait for the others, who may be gone.
        if thread::Builder::new().name("nccl-destroy".to_string()).spawn(destroy).is_ok() {
            let _ = ended.recv_timeout(GRACE);
        }
    }
}

/// Looks at a rank until it is gone: that it does not wait for ever, and what the library reports.
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

/// [`DeviceComm`] by NCCL, among the groups that [`NcclRank::join`] was given.
///
/// Sums of floats are NCCL's: those of BF16 are rounded at each hop, and the order is the
/// library's, the same in each run where it chooses the same algorithm. NVLink's switches add in
/// any order: `NCCL_ALGO=^NVLS` leaves them out. A maximum of floats is refused, as the library's
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
