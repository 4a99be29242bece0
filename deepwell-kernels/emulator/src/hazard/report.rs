//! What was found.

use std::collections::HashMap;
use std::fmt;

use crate::place::Place;

/// Where in the program: one for each step, given to [`super::Tracker::new`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Site {
    /// Line of the PTX text, from 1.
    pub ptx_line: u32,
    /// File index and line of the source, from `.loc`.
    pub source: Option<(u32, u32)>,
}

/// Which part of the machine touched memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// A thread, with its loads and stores.
    Thread,
    /// `cp.async` (not bulk): generic proxy.
    CopyAsync,
    /// Bulk and tensor copies that complete on an mbarrier: async proxy.
    BulkLoad,
    /// Bulk and tensor copies and reductions that complete by bulk groups: async proxy.
    BulkStore,
    /// `st.async` and `red.async`: generic proxy, complete on an mbarrier.
    StoreAsync,
    /// `wgmma.mma_async`: async proxy.
    WarpGroupMma,
    /// `tcgen05.mma`: async proxy in shared memory.
    TensorMma,
    /// `tcgen05.cp` and `tcgen05.shift`: async proxy in shared memory.
    TensorCopy,
    /// `tcgen05.ld`.
    TensorLoad,
    /// `tcgen05.st`.
    TensorStore,
    /// `clusterlaunchcontrol.try_cancel`: async proxy, completes on an mbarrier.
    LaunchControl,
    /// The grid that this one depends on.
    PreviousGrid,
}

impl Unit {
    /// Whether it reaches shared and global memory through the async proxy.
    pub fn is_async_proxy(self) -> bool {
        matches!(
            self,
            Unit::BulkLoad
                | Unit::BulkStore
                | Unit::WarpGroupMma
                | Unit::TensorMma
                | Unit::TensorCopy
                | Unit::LaunchControl
        )
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unit::Thread => "thread",
            Unit::CopyAsync => "cp.async",
            Unit::BulkLoad => "bulk copy to shared memory",
            Unit::BulkStore => "bulk copy from shared memory",
            Unit::StoreAsync => "st.async",
            Unit::WarpGroupMma => "wgmma",
            Unit::TensorMma => "tcgen05.mma",
            Unit::TensorCopy => "tcgen05.cp",
            Unit::TensorLoad => "tcgen05.ld",
            Unit::TensorStore => "tcgen05.st",
            Unit::LaunchControl => "clusterlaunchcontrol.try_cancel",
            Unit::PreviousGrid => "previous grid",
        })
    }
}

/// Who did something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Actor {
    /// Number of the cluster, as [`super::Tracker::add_cluster`] gave it.
    pub cluster: u32,
    /// Rank of the CTA in the cluster.
    pub rank: u32,
    /// Warp of the CTA.
    pub warp: u32,
    /// Lanes of the warp.
    pub lanes: u32,
    /// What touched memory on behalf of the warp.
    pub unit: Unit,
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.unit == Unit::PreviousGrid {
            return f.write_str("the previous grid");
        }
        let Actor { cluster, rank, warp, lanes, unit } = self;
        write!(f, "{unit} of cluster {cluster} CTA {rank} warp {warp}")?;
        if lanes.count_ones() == 1 { write!(f, " lane {}", lanes.trailing_zeros()) } else { Ok(()) }
    }
}

/// One of two accesses in conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The instruction.
    pub site: Site,
    /// Who.
    pub actor: Actor,
    /// Written or read.
    pub write: bool,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.write { "write" } else { "read" };
        write!(f, "{verb} by {} at PTX line {}", self.actor, self.site.ptx_line)?;
        if let Some((file, line)) = self.site.source {
            write!(f, " (file {file} line {line})")?;
        }
        Ok(())
    }
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HazardKind {
    /// Threads of different warps, and nothing between their accesses.
    MissingSynchronization,
    /// Lanes of one warp, and no `bar.warp.sync` between their accesses.
    MissingWarpSync,
    /// Nobody saw the mbarrier phase that tells of a copy's end.
    MissingMbarrierWait,
    /// Nobody saw the mbarrier that `tcgen05.commit` arrives at.
    MissingTensorCommitWait,
    /// No `wait_group` covers the copy or MMA.
    MissingGroupWait,
    /// Order without `fence.proxy.async` where the proxy changes.
    MissingProxyFence,
    /// A tensor map was changed, and `fence.proxy.tensormap` is missing.
    MissingTensorMapFence,
    /// No `tcgen05.wait::ld`.
    MissingTensorWaitLoad,
    /// No `tcgen05.wait::st`.
    MissingTensorWaitStore,
    /// No `tcgen05.fence::before_thread_sync` before the arrival.
    MissingTensorFenceBefore,
    /// No `tcgen05.fence::after_thread_sync` after the wait.
    MissingTensorFenceAfter,
    /// An mbarrier is used without order after its `mbarrier.init`.
    MissingMbarrierInitSync,
    /// An mbarrier that copies or commits use was initialized without `fence.mbarrier_init`.
    MissingMbarrierInitFence,
    /// Order by a fence or an atomic whose scope leaves the other thread out.
    ScopeTooNarrow,
    /// Memory of the previous grid before `griddepcontrol.wait`.
    MissingGridDependencyWait,
    /// A register of an operation that is not known to be complete.
    RegisterInFlight,
    /// No `tcgen05.fence::after_thread_sync` behind any wait of the kernel, which counts on the
    /// acquire of its waits.
    TensorFencesLeftOut,
    /// A register of `tcgen05.ld` is read, and no `tcgen05.wait::ld`. The ISA keeps the order of
    /// such a dependency; it tells nobody that the load is complete.
    TensorLoadUnwaited,
    /// A register was touched, and no `wgmma.fence` before the `wgmma` that uses it.
    MissingWarpGroupFence,
    /// Tensor memory is given back while it may be in use.
    TensorMemoryFreedInUse,
    /// A CTA ends while an operation, or another CTA, uses its shared memory.
    UnfinishedAtExit,
    /// Shared memory of a CTA of the cluster that may not run yet.
    PeerNotStarted,
    /// A matrix is read by another swizzle than the copy that brought it wrote by.
    SwizzleMismatch,
    /// A matrix is read by a swizzle, and a copy brought it without one.
    SwizzleMissing,
    /// An arrival in a phase whose predecessor nobody has seen complete.
    PhaseUnobserved,
    /// One lane hands on what `tcgen05.wait` told the other lanes of its warp.
    TensorWaitOfOneLane,
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// The ISA leaves the result open.
    Error,
    /// The ISA or its guides ask for it, and kernels are known that run without.
    Warning,
}

impl HazardKind {
    /// Short name, such as `missing-proxy-fence`.
    pub fn name(self) -> &'static str {
        match self {
            HazardKind::MissingSynchronization => "missing-synchronization",
            HazardKind::MissingWarpSync => "missing-warp-sync",
            HazardKind::MissingMbarrierWait => "missing-mbarrier-wait",
            HazardKind::MissingTensorCommitWait => "missing-tensor-commit-wait",
            HazardKind::MissingGroupWait => "missing-group-wait",
            HazardKind::MissingProxyFence => "missing-proxy-fence",
            HazardKind::MissingTensorMapFence => "missing-tensor-map-fence",
            HazardKind::MissingTensorWaitLoad => "missing-tensor-wait-load",
            HazardKind::MissingTensorWaitStore => "missing-tensor-wait-store",
            HazardKind::MissingTensorFenceBefore => "missing-tensor-fence-before",
            HazardKind::MissingTensorFenceAfter => "missing-tensor-fence-after",
            HazardKind::MissingMbarrierInitSync => "missing-mbarrier-init-sync",
            HazardKind::MissingMbarrierInitFence => "missing-mbarrier-init-fence",
            HazardKind::ScopeTooNarrow => "scope-too-narrow",
            HazardKind::MissingGridDependencyWait => "missing-grid-dependency-wait",
            HazardKind::RegisterInFlight => "register-in-flight",
            HazardKind::TensorFencesLeftOut => "tensor-fences-left-out",
            HazardKind::TensorLoadUnwaited => "tensor-load-unwaited",
            HazardKind::MissingWarpGroupFence => "missing-warp-group-fence",
            HazardKind::TensorMemoryFreedInUse => "tensor-memory-freed-in-use",
            HazardKind::UnfinishedAtExit => "unfinished-at-exit",
            HazardKind::PeerNotStarted => "peer-not-started",
            HazardKind::SwizzleMismatch => "swizzle-mismatch",
            HazardKind::SwizzleMissing => "swizzle-missing",
            HazardKind::PhaseUnobserved => "phase-unobserved",
            HazardKind::TensorWaitOfOneLane => "tensor-wait-of-one-lane",
        }
    }

    /// How bad it is.
    pub fn severity(self) -> Severity {
        match self {
            HazardKind::MissingMbarrierInitFence
            | HazardKind::UnfinishedAtExit
            | HazardKind::PhaseUnobserved
            | HazardKind::TensorFencesLeftOut
            | HazardKind::TensorLoadUnwaited
            | HazardKind::SwizzleMissing
            | HazardKind::TensorWaitOfOneLane => Severity::Warning,
            _ => Severity::Error,
        }
    }
}

/// Two accesses that nothing orders, or an order that lacks a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hazard {
    /// What is wrong.
    pub kind: HazardKind,
    /// What would have ordered the accesses.
    pub missing: String,
    /// The access that came first in this run.
    pub earlier: Access,
    /// The one that is not ordered after it.
    pub later: Access,
    /// First place in conflict; `None` for registers and what a CTA left behind.
    pub place: Option<Place>,
    /// How often this pair of instructions was in conflict.
    pub count: u64,
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Hazard { kind, missing, earlier, later, place, count } = self;
        write!(f, "{}: {later} is not ordered after {earlier}", kind.name())?;
        if let Some(place) = place {
            write!(f, ", both at {place}")?;
        }
        if *count > 1 {
            write!(f, " and {} more times", count - 1)?;
        }
        write!(f, "\nhint: {missing}")
    }
}

type HazardKey = (HazardKind, Site, Unit, bool, Site, Unit, bool);

/// Hazards, one for each pair of instructions and kind.
#[derive(Clone, Debug, Default)]
pub(super) struct Hazards {
    found: Vec<Hazard>,
    index: HashMap<HazardKey, usize>,
}

impl Hazards {
    pub(super) fn add(
        &mut self,
        kind: HazardKind,
        earlier: Access,
        later: Access,
        place: Option<Place>,
        missing: impl FnOnce() -> String,
    ) {
        let key = (
            kind,
            earlier.site,
            earlier.actor.unit,
            earlier.write,
            later.site,
            later.actor.unit,
            later.write,
        );
        if let Some(at) = self.index.get(&key) {
            self.found[*at].count += 1;
            return;
        }
        self.index.insert(key, self.found.len());
        self.found.push(Hazard { kind, missing: missing(), earlier, later, place, count: 1 });
    }

    pub(super) fn all(&self) -> &[Hazard] {
        &self.found
    }
}
