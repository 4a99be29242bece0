//! Who may see which bytes.
//!
//! # Brief overview
//!
//! The [`Tracker`] is told every access, every synchronizing instruction and every completion of
//! an asynchronous operation, in the order in which the engine runs them. From that it derives
//! *happens-before* by vector clocks, and reports each pair of conflicting accesses that nothing
//! orders as a [`Hazard`], with what would have ordered them. Values do not matter, and it does
//! not matter whether an operation was completed early or late: a wait that is missing is
//! reported even when the bytes were there.
//!
//! The model is PTX ISA 8 (causality order, proxies), 9.7.13 (barriers, fences, mbarriers),
//! 9.7.15.7 (wgmma) and 9.7.16.6 (tcgen05):
//!
//! * threads are lanes of warps, and lanes of one warp are ordered only by synchronization too;
//! * asynchronous operations start with what their thread knows at issue, and are complete for
//!   those only who know of the mbarrier phase, the group or the `tcgen05.wait` that tells so;
//! * writes through the generic proxy are visible to the async proxy (and to tensor maps) only if
//!   a proxy fence lies on the path;
//! * tcgen05 operations are ordered across threads only between
//!   `tcgen05.fence::before_thread_sync` and `::after_thread_sync`.
//!
//! ```
//! use deepwell_emulator::hazard::{Direction, HazardKind, Rules, Site, Thread, Tracker};
//! use deepwell_emulator::place::Place;
//!
//! let site = |ptx_line| Site { ptx_line, source: None };
//! let mut tracker = Tracker::new(vec![site(10), site(12)], Rules::default());
//! let cluster = tracker.add_cluster(1, 2);
//! let place = [(0, Place::Shared { rank: 0, offset: 0 })];
//! let store = Thread { warp: tracker.warp(cluster, 0, 0), lanes: 1, step: 0 };
//! tracker.access(store, Direction::Write, None, 4, &place);
//! let load = Thread { warp: tracker.warp(cluster, 0, 1), lanes: 1, step: 1 };
//! tracker.access(load, Direction::Read, None, 4, &place);
//! assert_eq!(tracker.hazards()[0].kind, HazardKind::MissingSynchronization);
//! ```
//!
//! # What the engine calls
//!
//! Set up: [`Tracker::new`] with the [`Site`] of each step; [`Tracker::add_cluster`] when CTAs
//! start, [`Tracker::remove_cluster`] when they are gone; [`Tracker::previous_grid`] for memory
//! that a programmatic launch must wait for.
//!
//! A warp's instruction is a [`Thread`]: warp, lanes that execute it, step. [`Tracker::thread`]
//! makes it. Then
//!
//! | PTX | call |
//! |---|---|
//! | `ld`, `st`, `ldmatrix`, `stmatrix`, `tensormap.replace`, `tcgen05.alloc`'s store | [`Tracker::access`] |
//! | `ld.relaxed/acquire/volatile`, `st.relaxed/release/volatile`, `atom`, `red` | [`Tracker::access`] with `strong`, then [`Tracker::synchronize`] |
//! | `membar`, `fence.{sc,acq_rel,acquire,release}`, `.sync_restrict` | [`Tracker::fence`] |
//! | `fence.proxy.async{.space}`, `fence.proxy.async::generic...` | [`Tracker::fence_proxy_async`] |
//! | `fence.mbarrier_init` | [`Tracker::fence_mbarrier_init`] |
//! | `fence.proxy.tensormap...release`, `tensormap.cp_fenceproxy` (after its write) | [`Tracker::fence_tensor_map_release`] |
//! | `fence.proxy.tensormap...acquire [a]` | [`Tracker::fence_tensor_map_acquire`] |
//! | `bar.warp.sync` | [`Tracker::warp_barrier`], once with all lanes that met |
//! | `bar.sync`, `bar.red`, `bar.arrive` | [`Tracker::barrier_arrive`] by each warp when it arrives; [`Tracker::barrier_complete`] once when the barrier completes, with the waiters |
//! | `barrier.cluster.arrive`, `.wait` | [`Tracker::cluster_arrive`]; [`Tracker::cluster_complete`] once all are there; [`Tracker::cluster_wait`] when a warp passes |
//! | `mbarrier.init`, `.inval` | [`Tracker::mbarrier_init`], [`Tracker::mbarrier_inval`] |
//! | `mbarrier.arrive` (all forms), `.expect_tx`, `.complete_tx` | [`Tracker::mbarrier_arrive`], once per object with all lanes |
//! | `mbarrier.test_wait`, `.try_wait` that returned true | [`Tracker::mbarrier_wait`] |
//! | `tcgen05.fence::before/after_thread_sync` | [`Tracker::tensor_fence_before`], [`Tracker::tensor_fence_after`] |
//! | `tcgen05.wait::ld`, `::st` | [`Tracker::tensor_wait_load`], [`Tracker::tensor_wait_store`] |
//! | `tcgen05.dealloc` | [`Tracker::tensor_free`] |
//! | `cp.async.commit_group`, `bulk.commit_group`, `wgmma.commit_group` | [`Tracker::commit_group`] |
//! | `...wait_group N`, `wait_all` | [`Tracker::wait_group`] |
//! | `griddepcontrol.wait` | [`Tracker::grid_dependency_wait`] |
//! | `shfl`, `vote`, `elect`, `setmaxnreg`, `griddepcontrol.launch_dependents` | nothing |
//!
//! Asynchronous operations have two moments. At *issue* (when the instruction executes), call
//! [`Tracker::issue`]; it returns an [`Operation`]. When the operation *runs*, now or later, call
//! [`Tracker::access_operation`] for all it touches, or [`Tracker::access_tensor`] for
//! rectangles of tensor memory, then [`Tracker::ran`]. Its end is told:
//!
//! | operation | [`Unit`] | end |
//! |---|---|---|
//! | TMA load, bulk copy to shared memory, `st.async`, `red.async`, `try_cancel` | `BulkLoad`, `StoreAsync`, `LaunchControl` | [`Tracker::complete_tx`] with the [`Arrival`] of the table; with multicast, one operation for each destination CTA |
//! | TMA store and reduce, bulk copy to global memory | `BulkStore` | nothing (`commit_group`/`wait_group` with [`Group::Bulk`]) |
//! | `cp.async` | `CopyAsync` | nothing, or [`Tracker::mark`] at `cp.async.mbarrier.arrive`, then [`Tracker::arrive_mark`] when it arrives |
//! | `tcgen05.mma`, `.cp`, `.shift` | `TensorMma`, `TensorCopy` | [`Tracker::mark`] at `tcgen05.commit`, then [`Tracker::arrive_mark`] for each mbarrier |
//! | `tcgen05.ld`, `.st` | `TensorLoad`, `TensorStore` | nothing (`tensor_wait_...`) |
//! | `wgmma.mma_async` | `WarpGroupMma` | nothing (`wait_group` with [`Group::WarpGroup`]); issue it by each of the four warps; the accesses may all be told for one of them |
//!
//! Tensor copies and matrix instructions tell their swizzles by [`Tracker::has_patterns`].
//!
//! `Place::Shared` and `Place::Tensor` are of the cluster of the warp that acts. Registers in
//! flight are a matter of one warp and have their own small [`RegisterWatch`].
//!
//! # How it is stored
//!
//! Each 16 bytes of memory (each column of 32 lanes of tensor memory) are a cell with its last
//! writer and its readers since, each with a byte mask, so that neighbors in a cell do not
//! disturb each other. A writer is an agent and a number, as in FastTrack, not a whole clock.

use crate::mbarrier::Arrival;
use crate::place::Place;

mod accesses;
mod cell;
mod check;
mod clock;
mod exit;
mod knowledge;
mod mbarriers;
mod operations;
mod pattern;
mod registers;
mod report;
mod shadow;
mod tensor;
#[cfg(test)]
mod tests;
mod threads;

use std::collections::HashMap;

pub use crate::decode::Scope;
use clock::{Agent, KINDS, Kind};
use knowledge::{Bundle, Exchange};
use mbarriers::TrackedBarrier;
use operations::OperationInfo;
pub use operations::{Group, Mark, Operation};
pub use pattern::Patterns;
pub use registers::{RegisterHazard, RegisterWatch};
use report::Hazards;
pub use report::{Access, Actor, Hazard, HazardKind, Severity, Site, Unit};
use shadow::{GlobalShadow, SharedShadow, TensorShadow};
use tensor::TensorRows;
use threads::Warp;

/// Whether lanes of a warp are threads of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Lanes {
    /// They are, as the ISA has it: `bar.warp.sync` and the like order what they do, and one lane
    /// hands on only what it did or was told itself.
    #[default]
    Followed,
    /// A warp is one thread: what one lane does comes before what any lane of it does next. Older
    /// kernels count on that where their warps do not diverge. Nothing between lanes of one warp
    /// is reported then, and lanes that make the same mbarrier with one instruction make it once.
    AsOneThread,
}

/// Which rules hold. [`Rules::default`] is the ISA's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Whether lanes of a warp are threads of their own.
    pub lanes: Lanes,
    /// Tensor memory needs `tcgen05.fence::before_thread_sync` and `::after_thread_sync` between
    /// threads. The ISA says so; kernels of CUTLASS run without them.
    pub tensor_fences: bool,
    /// `barrier.cluster.arrive.relaxed` hands on nothing of what was done before it. The ISA says
    /// so; kernels of DeepGEMM count on the contrary.
    pub relaxed_cluster_arrivals: bool,
    /// CTAs learn of each other by an mbarrier only if it is used with `.cluster` scope on either
    /// side; the default is `.cta`. The ISA says so; kernels of CUTLASS leave the scope out.
    pub mbarrier_scopes: bool,
    /// Report what is [`Severity::Warning`].
    pub warnings: bool,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            lanes: Lanes::default(),
            tensor_fences: true,
            relaxed_cluster_arrivals: true,
            mbarrier_scopes: true,
            warnings: true,
        }
    }
}

/// A warp, as [`Tracker::warp`] numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WarpId(u32);

/// Lanes of a warp that execute a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    /// The warp.
    pub warp: WarpId,
    /// The lanes, one bit each; not zero.
    pub lanes: u32,
    /// Index into the sites of [`Tracker::new`].
    pub step: u32,
}

/// Read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Read.
    Read,
    /// Written; also an atomic operation, which does both.
    Write,
}

/// Memory order of a strong access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// No order of other accesses, except by fences around.
    Relaxed,
    /// Acquire.
    Acquire,
    /// Release.
    Release,
    /// Both.
    AcquireRelease,
}

impl Order {
    fn acquires(self) -> bool {
        matches!(self, Order::Acquire | Order::AcquireRelease)
    }

    fn releases(self) -> bool {
        matches!(self, Order::Release | Order::AcquireRelease)
    }
}

/// What a strong access does with its location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StrongAccess {
    /// `ld`.
    Load,
    /// `st`.
    Store,
    /// `atom`.
    Atomic,
    /// `red`: forms no acquire pattern (PTX ISA 8.11.1).
    Reduction,
}

/// The visibility tracker of one launch. See the [module's documentation](self).
#[derive(Debug)]
pub struct Tracker {
    rules: Rules,
    sites: Vec<Site>,
    clusters: Vec<Cluster>,
    /// CTAs to a cluster and warps to a CTA, the same for all.
    ctas: u32,
    warps_per_cta: u32,
    warps: Vec<Warp>,
    operations: Vec<OperationInfo>,
    global: GlobalShadow,
    /// Locations of strong accesses.
    locations: HashMap<(u32, Place), Exchange>,
    hazards: Hazards,
    /// Rows of tensor memory that the operation that runs has touched and that are not checked
    /// yet.
    tensor_rows: Vec<TensorRows>,
}

/// State of one cluster that runs.
#[derive(Debug, Default)]
struct Cluster {
    first_warp: u32,
    /// Operations before this one are of earlier clusters.
    first_operation: usize,
    shared: Vec<SharedShadow>,
    tensor: Vec<TensorShadow>,
    barriers: HashMap<(u32, u32), TrackedBarrier>,
    /// Agents handed out, those of warps first.
    agents: u32,
    /// By CTA and barrier: what arrivals released.
    named: HashMap<(u32, u32), Bundle>,
    /// What arrivals released, for the barrier that gathers and the last that completed.
    cluster_barrier: (Bundle, Bundle),
}

impl Tracker {
    /// A tracker for a program whose step `i` is at `sites[i]`.
    pub fn new(sites: Vec<Site>, rules: Rules) -> Tracker {
        Tracker {
            rules,
            sites,
            clusters: Vec::new(),
            ctas: 0,
            warps_per_cta: 0,
            warps: Vec::new(),
            operations: Vec::new(),
            global: GlobalShadow::default(),
            locations: HashMap::new(),
            hazards: Hazards::default(),
            tensor_rows: Vec::new(),
        }
    }

    /// CTAs that start: `ctas` of them (1 without clusters), of `warps_per_cta` warps.
    /// Returns the cluster's number. All clusters of a launch have the same size.
    pub fn add_cluster(&mut self, ctas: u32, warps_per_cta: u32) -> u32 {
        (self.ctas, self.warps_per_cta) = (ctas, warps_per_cta);
        let number = self.clusters.len() as u32;
        let first_warp = self.warps.len() as u32;
        let warps = ctas * warps_per_cta;
        self.warps.extend((0..warps).map(|at| Warp::new(number, at / warps_per_cta, at)));
        self.clusters.push(Cluster {
            first_warp,
            first_operation: self.operations.len(),
            shared: (0..ctas).map(|_| SharedShadow::default()).collect(),
            tensor: (0..ctas).map(|_| TensorShadow::default()).collect(),
            agents: warps * KINDS as u32,
            ..Cluster::default()
        });
        number
    }

    /// All CTAs of a cluster have ended. Reports operations that still read or write their
    /// shared memory, then forgets it.
    pub fn remove_cluster(&mut self, cluster: u32) {
        self.check_unfinished(cluster);
        let of = &mut self.clusters[cluster as usize];
        let (first, operations) = (of.first_warp, of.first_operation);
        *of = Cluster { first_warp: first, agents: of.agents, ..Cluster::default() };
        let warps = first..first + self.ctas * self.warps_per_cta;
        self.warps[warps.start as usize..warps.end as usize].iter_mut().for_each(Warp::forget);
        for operation in &mut self.operations[operations..] {
            if warps.contains(&operation.warp.0) {
                operation.view = None;
            }
        }
        self.locations
            .retain(|(owner, place), _| *owner != cluster || matches!(place, Place::Global(_)));
    }

    /// The number of a warp of a CTA.
    pub fn warp(&self, cluster: u32, rank: u32, warp: u32) -> WarpId {
        WarpId(self.clusters[cluster as usize].first_warp + rank * self.warps_per_cta + warp)
    }

    /// What was found so far, in the order found.
    pub fn hazards(&self) -> &[Hazard] {
        self.hazards.all()
    }

    /// Which rules hold.
    pub fn rules(&self) -> Rules {
        self.rules
    }

    /// The lanes that take part in what some lanes of a warp do.
    fn lanes(&self, lanes: u32) -> u32 {
        match self.rules.lanes {
            Lanes::Followed => lanes,
            Lanes::AsOneThread => clock::ALL_LANES,
        }
    }

    /// A step of a warp, as the rules have it.
    pub fn thread(&self, warp: WarpId, lanes: u32, step: u32) -> Thread {
        Thread { warp, lanes: self.lanes(lanes), step }
    }

    /// The agent of a warp's events of a kind.
    fn agent(&self, warp: WarpId, kind: Kind) -> Agent {
        self.warps[warp.0 as usize].agent(kind)
    }

    fn site(&self, step: u32) -> Site {
        self.sites.get(step as usize).copied().unwrap_or_default()
    }

    fn actor(&self, warp: WarpId, lanes: u32, unit: Unit) -> Actor {
        let of = &self.warps[warp.0 as usize];
        let rank = of.rank;
        Actor { cluster: of.cluster, rank, warp: of.index - rank * self.warps_per_cta, lanes, unit }
    }
}

/// The key of a location: global ones are one for all clusters.
fn location_key(cluster: u32, place: Place) -> (u32, Place) {
    match place {
        Place::Global(_) => (u32::MAX, place),
        _ => (cluster, place),
    }
}
