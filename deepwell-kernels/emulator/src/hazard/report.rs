//! Hazards: kinds, severities and texts.

use std::collections::HashMap;
use std::fmt;

use crate::place::Place;

/// Location of a step in the program, passed to [`super::Tracker::new`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Site {
    /// Line of the PTX text, from 1.
    pub ptx_line: u32,
    /// File index and line of the source, from `.loc`.
    pub source: Option<(u32, u32)>,
}

/// Unit of the machine that accesses memory.
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
    /// The grid on which this grid depends.
    PreviousGrid,
}

impl Unit {
    /// Whether the unit accesses shared and global memory through the async proxy.
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

/// Originator of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Actor {
    /// Number of the cluster, returned by [`super::Tracker::add_cluster`].
    pub cluster: u32,
    /// Rank of the CTA in the cluster.
    pub rank: u32,
    /// Warp of the CTA.
    pub warp: u32,
    /// Lanes of the warp.
    pub lanes: u32,
    /// Unit that accessed memory on behalf of the warp.
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

/// Either of two conflicting accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The instruction.
    pub site: Site,
    /// Originator.
    pub actor: Actor,
    /// Whether the access is a write.
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

/// Kinds of hazards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HazardKind {
    /// Accesses of threads in different warps without synchronization.
    MissingSynchronization,
    /// Accesses of lanes in one warp without `bar.warp.sync`.
    MissingWarpSync,
    /// No wait observed the mbarrier phase of a copy's completion.
    MissingMbarrierWait,
    /// No wait observed the mbarrier of a `tcgen05.commit`.
    MissingTensorCommitWait,
    /// No `wait_group` covers the copy or MMA.
    MissingGroupWait,
    /// No `fence.proxy.async` between accesses through different proxies.
    MissingProxyFence,
    /// No `fence.proxy.tensormap` after a change of a tensor map.
    MissingTensorMapFence,
    /// No `tcgen05.wait::ld` after a load.
    MissingTensorWaitLoad,
    /// No `tcgen05.wait::st` after a store.
    MissingTensorWaitStore,
    /// No `tcgen05.fence::before_thread_sync` before the arrival.
    MissingTensorFenceBefore,
    /// No `tcgen05.fence::after_thread_sync` after the wait.
    MissingTensorFenceAfter,
    /// A use of an mbarrier that is not ordered after its `mbarrier.init`.
    MissingMbarrierInitSync,
    /// No `fence.mbarrier_init` after the initialization of an mbarrier for copies or commits.
    MissingMbarrierInitFence,
    /// The scope of a fence or an atomic does not include the other thread.
    ScopeTooNarrow,
    /// An access to memory of the previous grid before `griddepcontrol.wait`.
    MissingGridDependencyWait,
    /// An access to a register of an operation that may still be in flight.
    RegisterInFlight,
    /// A kernel without any `tcgen05.fence::after_thread_sync`, which relies on the acquire of its
    /// waits.
    TensorFencesLeftOut,
    /// A read of a `tcgen05.ld` result without `tcgen05.wait::ld`. The ISA orders this dependency,
    /// but the completion of the load is not observed.
    TensorLoadUnwaited,
    /// No `wgmma.fence` between an access to a register and the `wgmma` that uses it.
    MissingWarpGroupFence,
    /// Deallocation of tensor memory that may be in use.
    TensorMemoryFreedInUse,
    /// The end of a CTA whose shared memory an operation or another CTA still uses.
    UnfinishedAtExit,
    /// An access to shared memory of a CTA that may not have started.
    PeerNotStarted,
    /// A matrix is read with another swizzle than the copy that wrote it.
    SwizzleMismatch,
    /// A matrix is read with a swizzle, but was copied without one.
    SwizzleMissing,
    /// An arrival in a phase whose predecessor no thread saw complete.
    PhaseUnobserved,
    /// An arrival in a phase whose predecessor the arriving thread does not know to be complete.
    PhaseUnknown,
    /// A lane arrives for the warp without `bar.warp.sync` after the `tcgen05.wait` of other lanes.
    TensorWaitOfOneLane,
}

/// Severity of a hazard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// The ISA leaves the result undefined.
    Error,
    /// Required by the ISA or its guides, but some known kernels run without it.
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
            HazardKind::PhaseUnknown => "phase-unknown",
            HazardKind::TensorWaitOfOneLane => "tensor-wait-of-one-lane",
        }
    }

    /// Returns the severity.
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

/// Two unordered accesses, or synchronization with a missing part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hazard {
    /// Kind of the hazard.
    pub kind: HazardKind,
    /// Synchronization that would order the accesses.
    pub missing: String,
    /// The earlier access: first in this run, or of an operation issued first.
    pub earlier: Access,
    /// The access that is not ordered after `earlier`.
    pub later: Access,
    /// First location of the conflict; `None` for registers and unfinished operations.
    pub place: Option<Place>,
    /// Number of conflicts of this pair of instructions.
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

/// Hazards, one per kind and pair of instructions.
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
