//! Hazard tracker: finds memory accesses that no synchronization orders.
//!
//! # Brief overview
//!
//! The engine reports every access, every synchronizing instruction and every completion of an
//! asynchronous operation to the [`Tracker`], in execution order. The tracker derives
//! *happens-before* from vector clocks. Each pair of conflicting, unordered accesses is a
//! [`Hazard`], with a suggestion for the missing synchronization. Values and the time of completion
//! do not matter: a missing wait is reported even if the bytes had already arrived.
//!
//! The model is PTX ISA 8 (causality order, proxies), 9.7.13 (barriers, fences, mbarriers),
//! 9.7.15.7 (wgmma) and 9.7.16.6 (tcgen05):
//!
//! * Threads are lanes of warps. Lanes of one warp are also ordered only by synchronization.
//! * An asynchronous operation inherits the order of its thread at issue. It is complete only for
//!   threads that observed the corresponding mbarrier phase, group or `tcgen05.wait`.
//! * Writes through the generic proxy are visible to the async proxy (and to tensor maps) only
//!   after a proxy fence.
//! * `tcgen05` operations of different threads are ordered only between
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
//! Setup: [`Tracker::new`] with the [`Site`] of each step; [`Tracker::add_cluster`] when CTAs
//! start; [`Tracker::remove_cluster`] after their end; [`Tracker::previous_grid`] for memory that a
//! programmatic launch must not touch before its wait.
//!
//! A [`Thread`] is an instruction of a warp: warp, active lanes, step. [`Tracker::thread`] creates
//! it. Calls per instruction:
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
//! | `bar.warp.sync` | [`Tracker::warp_barrier`], once for all lanes, when the last lane arrives |
//! | `bar.sync`, `bar.red`, `bar.arrive` | [`Tracker::barrier_arrive`] for each arriving warp; [`Tracker::barrier_complete`] once at completion, with the waiters |
//! | `barrier.cluster.arrive`, `.wait` | [`Tracker::cluster_arrive`]; [`Tracker::cluster_complete`] after the last arrival; [`Tracker::cluster_wait`] when a warp's wait returns |
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
//! An asynchronous operation has two events. At *issue* (when the instruction executes), call
//! [`Tracker::issue`], which returns an [`Operation`]. When the operation *runs*, now or later,
//! call [`Tracker::access_operation`] for all its accesses, or [`Tracker::access_tensor`] for
//! rectangles of tensor memory, then [`Tracker::complete_tx`], if it completes on an mbarrier, and
//! [`Tracker::ran`]. Completion is reported as follows:
//!
//! | operation | [`Unit`] | end |
//! |---|---|---|
//! | TMA load, bulk copy to shared memory, `st.async`, `red.async`, `try_cancel` | `BulkLoad`, `StoreAsync`, `LaunchControl` | [`Tracker::complete_tx`] with the [`Arrival`] of the mbarrier table; for multicast, one operation per destination CTA |
//! | TMA store and reduce, bulk copy to global memory | `BulkStore` | nothing (`commit_group`/`wait_group` with [`Group::Bulk`]) |
//! | `cp.async` | `CopyAsync` | nothing, or [`Tracker::mark`] at `cp.async.mbarrier.arrive`, then [`Tracker::arrive_mark`] at the arrival |
//! | `tcgen05.mma`, `.cp`, `.shift` | `TensorMma`, `TensorCopy` | [`Tracker::mark`] at `tcgen05.commit`, then [`Tracker::arrive_mark`] for each mbarrier |
//! | `tcgen05.ld`, `.st` | `TensorLoad`, `TensorStore` | nothing (`tensor_wait_...`) |
//! | `wgmma.mma_async` | `WarpGroupMma` | nothing (`wait_group` with [`Group::WarpGroup`]); issued by each of the four warps; all accesses may be reported for one warp |
//!
//! [`Tracker::has_patterns`] reports the swizzles of tensor copies and matrix instructions.
//!
//! `Place::Shared` and `Place::Tensor` refer to the cluster of the executing warp. Registers in
//! flight are tracked per warp, by a [`RegisterWatch`].
//!
//! # Data structures
//!
//! Each 16 bytes of memory (each column of 32 lanes of tensor memory) have a cell with the last
//! writer and the readers since. Each record has a byte mask, so that accesses to different bytes
//! of a cell do not interfere. A writer is an agent and a number, as in FastTrack, not a whole
//! clock.

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
pub use operations::{Accumulator, Group, Mark, Operation};
pub use pattern::Patterns;
pub use registers::{RegisterHazard, RegisterWatch};
use report::Hazards;
pub use report::{Access, Actor, Hazard, HazardKind, Severity, Site, Unit};
use shadow::{GlobalShadow, SharedShadow, TensorShadow};
use tensor::TensorRows;
use threads::Warp;

/// Whether lanes of a warp are separate threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Lanes {
    /// Lanes are separate threads, as in the ISA. `bar.warp.sync` and similar instructions order
    /// them, and a lane releases only its own accesses and acquired knowledge.
    #[default]
    Followed,
    /// A warp is one thread: an access of one lane precedes all later accesses of all lanes. Older
    /// kernels rely on this in code without divergence. Hazards between lanes of one warp are then
    /// not reported, and lanes that initialize the same mbarrier with one instruction do so once.
    AsOneThread,
}

/// Rules of the tracker. [`Rules::default`] is the text of the ISA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Whether lanes of a warp are separate threads.
    pub lanes: Lanes,
    /// Tensor memory needs `tcgen05.fence::before_thread_sync` and `::after_thread_sync` between
    /// threads. This is an ISA rule; kernels of CUTLASS run without these fences.
    pub tensor_fences: bool,
    /// `barrier.cluster.arrive.relaxed` does not release earlier accesses. This is an ISA rule;
    /// kernels of DeepGEMM rely on the opposite.
    pub relaxed_cluster_arrivals: bool,
    /// An mbarrier synchronizes different CTAs only if both sides use `.cluster` scope; the default
    /// is `.cta`. This is an ISA rule; kernels of CUTLASS omit the scope.
    pub mbarrier_scopes: bool,
    /// A thread may arrive at an mbarrier only if it knows that the previous phase is complete.
    pub arrival_phases: bool,
    /// MMAs of one thread are ordered only if they have the same accumulator and shape, and a
    /// `tcgen05.cp` only before later MMAs (9.7.16.6.2). Otherwise, in order of issue, as current
    /// hardware runs them: kernels of CUTLASS, cuDNN and FlashAttention rely on it.
    pub strict_mma_order: bool,
    /// Report hazards of [`Severity::Warning`].
    pub warnings: bool,
    /// Warnings fail a launch like errors.
    pub warnings_fail: bool,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            lanes: Lanes::default(),
            tensor_fences: true,
            relaxed_cluster_arrivals: true,
            mbarrier_scopes: true,
            arrival_phases: true,
            strict_mma_order: false,
            warnings: true,
            warnings_fail: false,
        }
    }
}

/// Number of a warp, returned by [`Tracker::warp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WarpId(u32);

/// Lanes of a warp that execute a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Number of the warp.
    pub warp: WarpId,
    /// Active lanes, one bit each; not zero.
    pub lanes: u32,
    /// Index into the sites of [`Tracker::new`].
    pub step: u32,
}

/// Direction of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// A read.
    Read,
    /// A write, or an atomic operation, which both reads and writes.
    Write,
}

/// Memory order of a strong access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Orders other accesses only in combination with fences.
    Relaxed,
    /// Acquire.
    Acquire,
    /// Release.
    Release,
    /// Acquire and release.
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

/// Kinds of strong accesses.
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

/// The hazard tracker of one launch. See the [module's documentation](self).
#[derive(Debug)]
pub struct Tracker {
    rules: Rules,
    sites: Vec<Site>,
    clusters: Vec<Cluster>,
    /// CTAs per cluster and warps per CTA, equal for all clusters.
    ctas: u32,
    warps_per_cta: u32,
    warps: Vec<Warp>,
    operations: Vec<OperationInfo>,
    global: GlobalShadow,
    /// Released knowledge by location of strong accesses.
    locations: HashMap<(u32, Place), Exchange>,
    hazards: Hazards,
    /// Rows of tensor memory touched by the running operation, not checked yet.
    tensor_rows: Vec<TensorRows>,
}

/// State of a running cluster.
#[derive(Debug, Default)]
struct Cluster {
    first_warp: u32,
    /// Index of the cluster's first operation.
    first_operation: usize,
    shared: Vec<SharedShadow>,
    tensor: Vec<TensorShadow>,
    barriers: HashMap<(u32, u32), TrackedBarrier>,
    /// Number of agents in use, including those of warps.
    agents: u32,
    /// Releases of arrivals, by CTA rank and barrier number.
    named: HashMap<(u32, u32), Bundle>,
    /// Releases of arrivals at the current cluster barrier, and at the last completed one.
    cluster_barrier: (Bundle, Bundle),
}

impl Tracker {
    /// Creates a tracker for a program with step `i` at `sites[i]`.
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

    /// Adds a cluster of `ctas` CTAs (1 without clusters) with `warps_per_cta` warps each. Returns
    /// the cluster's number. All clusters of a launch have the same size.
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

    /// Removes a cluster whose CTAs have ended. Reports operations that still use the shared
    /// memory.
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

    /// Returns the number of a warp of a CTA.
    pub fn warp(&self, cluster: u32, rank: u32, warp: u32) -> WarpId {
        WarpId(self.clusters[cluster as usize].first_warp + rank * self.warps_per_cta + warp)
    }

    /// Returns the hazards so far, in the order of detection.
    pub fn hazards(&self) -> &[Hazard] {
        self.hazards.all()
    }

    /// Returns the rules.
    pub fn rules(&self) -> Rules {
        self.rules
    }

    /// Returns the lanes that the rules count as active together with `lanes`.
    fn lanes(&self, lanes: u32) -> u32 {
        match self.rules.lanes {
            Lanes::Followed => lanes,
            Lanes::AsOneThread => clock::ALL_LANES,
        }
    }

    /// Creates the [`Thread`] of a step, according to the rules.
    pub fn thread(&self, warp: WarpId, lanes: u32, step: u32) -> Thread {
        Thread { warp, lanes: self.lanes(lanes), step }
    }

    /// Returns the agent of one kind of events of a warp.
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

/// Returns the key of a location; global locations are shared by all clusters.
fn location_key(cluster: u32, place: Place) -> (u32, Place) {
    match place {
        Place::Global(_) => (u32::MAX, place),
        _ => (cluster, place),
    }
}
