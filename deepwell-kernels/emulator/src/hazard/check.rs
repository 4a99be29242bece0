//! Order of two accesses, and missing synchronization.

use super::cell::Record;
use super::clock::{ALL_LANES, Agent, Clock, Kind};
use super::knowledge::{Bundle, Own};
use super::operations::{OperationInfo, PREVIOUS_GRID};
use super::threads::{Warp, lane_by_lane};
use super::{HazardKind, Rules, Unit, WarpId};
use crate::bulk::TENSOR_MAP_BYTES;

/// Memory spaces with different rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    Shared,
    /// Global memory at or after this address.
    Global(u64),
    Tensor,
    /// Global memory that is read as a tensor map at this address.
    Map(u64),
}

/// The new access, and the knowledge of its thread or operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) warp: WarpId,
    pub(super) lanes: u32,
    /// Accesses of the same lanes up to this tick precede by program order.
    pub(super) tick: u32,
    pub(super) known: &'a Bundle,
    pub(super) own: &'a Own,
    pub(super) tensor_pending: &'a Clock,
    /// The operation, if the access belongs to one.
    pub(super) operation: Option<u32>,
    pub(super) unit: Unit,
    pub(super) memory: Memory,
    /// 1 + the scope level of a strong access; 0 for a weak one.
    pub(super) strong: u8,
}

/// Clock that must contain the earlier access.
#[derive(Clone, Copy)]
enum Part {
    Generic,
    /// The async proxy's clock for the memory of the access.
    Async,
}

/// State of the tracker for checks.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) rules: Rules,
    pub(super) warps: &'a [Warp],
    pub(super) operations: &'a [OperationInfo],
}

/// Missing synchronization between two accesses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Missing {
    pub(super) kind: HazardKind,
    /// Whether the access that came second in this run is the earlier one.
    pub(super) swapped: bool,
}

impl View<'_> {
    fn part(&self, part: Part) -> &Clock {
        match (part, self.memory) {
            (Part::Generic, _) => &self.known.generic,
            (Part::Async, Memory::Shared | Memory::Tensor) => &self.known.async_shared,
            (Part::Async, Memory::Global(_) | Memory::Map(_)) => &self.known.async_global,
        }
    }

    /// Returns the number of events that the lanes themselves know without a clock.
    fn own_value(&self, part: Part, kind: Kind) -> u32 {
        match (part, self.memory) {
            (Part::Generic, _) if kind == Kind::Generic => self.tick,
            (Part::Generic, _) => self.own.done[kind as usize],
            (Part::Async, Memory::Shared | Memory::Tensor) => self.own.shared[kind as usize],
            (Part::Async, Memory::Global(_) | Memory::Map(_)) => self.own.global[kind as usize],
        }
    }
}

impl Context<'_> {
    fn agent(&self, warp: WarpId, kind: Kind) -> Agent {
        self.warps[warp.0 as usize].agent(kind)
    }

    /// Whether the view knows an event of some lanes of a warp.
    fn covers(
        &self,
        view: &View<'_>,
        part: Part,
        (warp, kind): (WarpId, Kind),
        lanes: u32,
        value: u32,
    ) -> bool {
        let clock = view.part(part);
        let agent = self.agent(warp, kind);
        let mut lanes = lanes;
        if warp == view.warp && value <= view.own_value(part, kind) {
            lanes &= !view.lanes;
        }
        lanes == 0 || clock.knows(agent, lanes, value)
    }

    /// Returns the missing synchronization between `record` and the access of `view`, if any. Both
    /// touch `overlap`; at least one of them writes.
    pub(super) fn missing(
        &self,
        view: &View<'_>,
        record: &Record,
        overlap: u16,
        written: bool,
    ) -> Option<Missing> {
        let kind = match record.operation() {
            Some(operation) if view.operation == Some(operation) => None,
            Some(operation) => {
                let info = &self.operations[operation as usize];
                self.missing_after_operation(view, record, info, overlap, written)
            }
            None => {
                let warp = WarpId(record.warp()?);
                self.missing_after_thread(view, record, warp, overlap, written)
            }
        }?;
        let late = is_completion(kind) && self.was_issued_before(view, record, overlap);
        Some(match late {
            true => Missing { kind: completion_of(view.unit), swapped: true },
            false => Missing { kind, swapped: false },
        })
    }

    /// Whether the view belongs to an operation that runs late: issued before the access of
    /// `record`, and therefore the earlier access, whatever the order in this run.
    fn was_issued_before(&self, view: &View<'_>, record: &Record, overlap: u16) -> bool {
        let Some(operation) = view.operation else { return false };
        if let Some(other) = record.operation() {
            return other > operation;
        }
        let Some(warp) = record.warp() else { return false };
        if warp == view.warp.0 {
            return record.tick > view.tick;
        }
        let lanes = record.lanes_of(overlap);
        let state = self.warps[warp as usize].state(lanes.trailing_zeros());
        let issuer = self.agent(view.warp, Kind::Generic);
        state.known.generic.knows(issuer, view.lanes, view.tick)
    }

    fn missing_after_thread(
        &self,
        view: &View<'_>,
        record: &Record,
        warp: WarpId,
        overlap: u16,
        written: bool,
    ) -> Option<HazardKind> {
        let lanes = record.lanes_of(overlap);
        let of = (warp, Kind::Generic);
        if !self.covers(view, Part::Generic, of, lanes, record.tick) {
            let strong = self.agent(warp, Kind::Strong);
            let read_from = record.scope() > 0
                && view.unit == Unit::Thread
                && view.known.generic.knows(strong, lanes, record.tick);
            if read_from {
                return None;
            }
            if record.scope() > 0 && view.strong > 0 {
                return self.scope_missing(view, record, warp);
            }
            let same_warp = warp == view.warp && view.unit == Unit::Thread;
            return Some(match same_warp {
                true => HazardKind::MissingWarpSync,
                false => HazardKind::MissingSynchronization,
            });
        }
        if let (Memory::Map(address), true) = (view.memory, written) {
            return self.missing_map_fence(view, of, lanes, record.tick, address);
        }
        // A completed read cannot observe an async write, so no fence is needed. Exception, from an
        // example in the ISA: before a response of launch control is overwritten.
        let proxy = view.unit.is_async_proxy()
            && view.memory != Memory::Tensor
            && (written || view.unit == Unit::LaunchControl);
        let fenced = !proxy || self.covers(view, Part::Async, of, lanes, record.tick);
        (!fenced).then_some(HazardKind::MissingProxyFence)
    }

    /// Strong accesses do not race if the scope of each includes the other's thread.
    fn scope_missing(&self, view: &View<'_>, record: &Record, by: WarpId) -> Option<HazardKind> {
        let (mine, theirs) = (&self.warps[view.warp.0 as usize], &self.warps[by.0 as usize]);
        let distance = match (mine.cluster == theirs.cluster, mine.rank == theirs.rank) {
            (true, true) => 1,
            (true, false) => 2,
            (false, _) => 3,
        };
        let enough = record.scope().min(view.strong) >= distance;
        (!enough).then_some(HazardKind::ScopeTooNarrow)
    }

    fn missing_map_fence(
        &self,
        view: &View<'_>,
        (warp, kind): (WarpId, Kind),
        lanes: u32,
        tick: u32,
        address: u64,
    ) -> Option<HazardKind> {
        let agent = self.agent(warp, kind);
        let acquired = view.known.maps_acquired.as_ref();
        let known = acquired
            .and_then(|maps| maps.get(&(address & !127)).or_else(|| maps.get(&address)))
            .is_some_and(|clock| clock.knows(agent, lanes, tick));
        (!known).then_some(HazardKind::MissingTensorMapFence)
    }

    fn missing_after_operation(
        &self,
        view: &View<'_>,
        record: &Record,
        info: &OperationInfo,
        overlap: u16,
        written: bool,
    ) -> Option<HazardKind> {
        if view.memory == Memory::Tensor {
            return self.missing_in_tensor_memory(view, info);
        }
        if info.strong && view.strong > 0 && written {
            return None;
        }
        let lanes = record.lanes_of(overlap);
        let waited = |kind| self.warps[info.warp.0 as usize].has_waited(kind, lanes, info.value);
        match info.unit {
            Unit::BulkLoad | Unit::StoreAsync | Unit::LaunchControl => {
                let value = info.value;
                let known = |clock: &Clock| value > 0 && clock.knows(info.agent, ALL_LANES, value);
                if !known(&view.known.generic) && !self.has_read_map(view, info, lanes) {
                    return Some(HazardKind::MissingMbarrierWait);
                }
                let proxy = info.unit == Unit::StoreAsync && written && view.unit.is_async_proxy();
                (proxy && !known(view.part(Part::Async))).then_some(HazardKind::MissingProxyFence)
            }
            Unit::BulkStore | Unit::CopyAsync => {
                let kind = match (info.unit, written) {
                    (Unit::CopyAsync, _) => Kind::CopyAsync,
                    (_, true) => Kind::BulkWrite,
                    (_, false) => Kind::BulkRead,
                };
                let of = (info.warp, kind);
                if !self.covers(view, Part::Generic, of, lanes, info.value) {
                    return Some(match waited(kind) {
                        true if info.warp == view.warp => HazardKind::MissingWarpSync,
                        true => HazardKind::MissingSynchronization,
                        false => HazardKind::MissingGroupWait,
                    });
                }
                let proxy = info.unit == Unit::CopyAsync && written && view.unit.is_async_proxy();
                let fenced = !proxy || self.covers(view, Part::Async, of, lanes, info.value);
                (!fenced).then_some(HazardKind::MissingProxyFence)
            }
            Unit::WarpGroupMma => {
                let known = |clock: &Clock| clock.knows(info.agent, ALL_LANES, info.value);
                if known(&view.known.generic) {
                    return None;
                }
                let owner = self.warps[info.warp.0 as usize].state(lanes.trailing_zeros());
                Some(match known(&owner.known.generic) {
                    true => HazardKind::MissingSynchronization,
                    false => HazardKind::MissingGroupWait,
                })
            }
            Unit::TensorMma | Unit::TensorCopy => {
                // Reads of shared memory; order in the async proxy suffices.
                let agent = self.agent(info.warp, Kind::Tensor);
                let known = view.known.generic.knows(agent, info.lanes, info.value);
                (!known).then_some(HazardKind::MissingTensorCommitWait)
            }
            Unit::PreviousGrid => {
                let known = view.known.generic.knows(PREVIOUS_GRID, ALL_LANES, 1);
                (!known).then_some(HazardKind::MissingGridDependencyWait)
            }
            Unit::Thread | Unit::TensorLoad | Unit::TensorStore => None,
        }
    }

    /// Whether the view changes a tensor map whose load is known to have read it. Waiting for the
    /// load's bulk group implies this, although the loaded bytes are counted on an mbarrier.
    fn has_read_map(&self, view: &View<'_>, info: &OperationInfo, lanes: u32) -> bool {
        let Memory::Global(at) = view.memory else { return false };
        let of = (info.warp, Kind::BulkRead);
        info.map.is_some_and(|(map, value)| {
            (map..map + TENSOR_MAP_BYTES as u64).contains(&at)
                && self.covers(view, Part::Generic, of, lanes, value)
        })
    }

    /// Whether operations of a tensor core run in the order of their issue.
    fn in_order_of_issue(&self, view: &View<'_>, earlier: &OperationInfo) -> bool {
        let later = view.operation.map(|at| &self.operations[at as usize]);
        !self.rules.strict_mma_order || later.is_some_and(|later| later.is_pipelined_after(earlier))
    }

    /// Order in tensor memory: pipelines (9.7.16.6.2), otherwise completion and fences.
    fn missing_in_tensor_memory(
        &self,
        view: &View<'_>,
        info: &OperationInfo,
    ) -> Option<HazardKind> {
        let in_order = |unit| matches!(unit, Unit::TensorMma | Unit::TensorCopy);
        let kind = match info.unit {
            Unit::TensorLoad => Kind::TensorLoad,
            Unit::TensorStore => Kind::TensorStore,
            _ if in_order(view.unit) && self.in_order_of_issue(view, info) => Kind::TensorIssue,
            _ => Kind::Tensor,
        };
        let same_thread = info.warp == view.warp && info.lanes == view.lanes;
        if kind == Kind::TensorIssue && same_thread {
            return None;
        }
        let agent = self.agent(info.warp, kind);
        let lanes = match kind {
            Kind::TensorLoad | Kind::TensorStore => ALL_LANES,
            _ => info.lanes,
        };
        let knows = |clock: &Clock| clock.knows(agent, lanes, info.value);
        let known = match self.rules.tensor_fences && view.unit != Unit::Thread {
            true => &view.known.tensor,
            false => &view.known.generic,
        };
        if knows(known) {
            return match info.unit {
                Unit::TensorLoad | Unit::TensorStore => self.missing_lanes(view, info, kind),
                _ => None,
            };
        }
        let owner = self.warps[info.warp.0 as usize].state(info.lanes.trailing_zeros());
        Some(if knows(view.tensor_pending) {
            HazardKind::MissingTensorFenceAfter
        } else if knows(&view.known.generic) {
            HazardKind::MissingTensorFenceBefore
        } else {
            match info.unit {
                Unit::TensorLoad if !knows(&owner.known.generic) => {
                    HazardKind::MissingTensorWaitLoad
                }
                Unit::TensorStore if !knows(&owner.known.generic) => {
                    HazardKind::MissingTensorWaitStore
                }
                Unit::TensorLoad | Unit::TensorStore => HazardKind::MissingSynchronization,
                _ => HazardKind::MissingTensorCommitWait,
            }
        })
    }
}

impl Context<'_> {
    /// `tcgen05.wait` completes each thread's own load or store. Arrival of all threads of the warp
    /// does not imply that the other lanes' waits are known. For operations of another warp, fences
    /// must have transferred this knowledge.
    fn missing_lanes(
        &self,
        view: &View<'_>,
        info: &OperationInfo,
        kind: Kind,
    ) -> Option<HazardKind> {
        let kind = lane_by_lane(kind);
        let own = info.warp == view.warp && info.value <= view.own.done[kind as usize];
        let lanes = if own { info.lanes & !view.lanes } else { info.lanes };
        let agent = self.agent(info.warp, kind);
        let fences =
            self.rules.tensor_fences && view.unit != Unit::Thread && info.warp != view.warp;
        let known = lanes == 0
            || view.known.tensor.knows(agent, lanes, info.value)
            || !fences && view.known.generic.knows(agent, lanes, info.value);
        (!known).then_some(HazardKind::TensorWaitOfOneLane)
    }
}

/// Whether the missing part is knowledge of the earlier access's completion.
fn is_completion(kind: HazardKind) -> bool {
    matches!(
        kind,
        HazardKind::MissingSynchronization
            | HazardKind::MissingWarpSync
            | HazardKind::MissingMbarrierWait
            | HazardKind::MissingGroupWait
            | HazardKind::MissingTensorCommitWait
            | HazardKind::MissingTensorWaitLoad
            | HazardKind::MissingTensorWaitStore
    )
}

/// Returns the hazard of an operation whose completion is not known.
fn completion_of(unit: Unit) -> HazardKind {
    match unit {
        Unit::BulkLoad | Unit::StoreAsync | Unit::LaunchControl => HazardKind::MissingMbarrierWait,
        Unit::BulkStore | Unit::CopyAsync | Unit::WarpGroupMma => HazardKind::MissingGroupWait,
        Unit::TensorMma | Unit::TensorCopy => HazardKind::MissingTensorCommitWait,
        Unit::TensorLoad => HazardKind::MissingTensorWaitLoad,
        Unit::TensorStore => HazardKind::MissingTensorWaitStore,
        Unit::Thread | Unit::PreviousGrid => HazardKind::MissingSynchronization,
    }
}

/// Returns the synchronization that would order the two accesses.
pub(super) fn remedy(kind: HazardKind, earlier: Unit) -> String {
    match kind {
        HazardKind::MissingSynchronization => {
            "a barrier, an mbarrier arrive and wait, or a release and an acquire between the \
             two threads"
        }
        HazardKind::MissingWarpSync => "`bar.warp.sync` between the lanes",
        HazardKind::MissingMbarrierWait => {
            "a wait for the mbarrier phase in which the bytes are counted, handed on to the later \
             access"
        }
        HazardKind::MissingTensorCommitWait => {
            "`tcgen05.commit` after the operation and a wait for its mbarrier, handed on to the \
             later access"
        }
        HazardKind::MissingGroupWait => match earlier {
            Unit::CopyAsync => {
                "`cp.async.commit_group` and `cp.async.wait_group` (or \
                 `cp.async.mbarrier.arrive`) by the thread that copied, then a barrier"
            }
            Unit::WarpGroupMma => {
                "`wgmma.commit_group` and `wgmma.wait_group` that covers the MMA, then an \
                 arrival or barrier"
            }
            _ => {
                "`cp.async.bulk.commit_group` and `wait_group` (`.read` is enough for the source) \
                 by the thread that copied, then a barrier"
            }
        },
        HazardKind::MissingProxyFence => {
            "`fence.proxy.async` after the generic access, on the way to the asynchronous one"
        }
        HazardKind::MissingTensorMapFence => {
            "`fence.proxy.tensormap::generic.release` after the change and \
             `fence.proxy.tensormap::generic.acquire` of the map before its use"
        }
        HazardKind::MissingTensorWaitLoad => "`tcgen05.wait::ld` by the warp that loaded",
        HazardKind::MissingTensorWaitStore => "`tcgen05.wait::st` by the warp that stored",
        HazardKind::MissingTensorFenceBefore => {
            "`tcgen05.fence::before_thread_sync` between the earlier operation and the arrival or \
             barrier"
        }
        HazardKind::MissingTensorFenceAfter => {
            "`tcgen05.fence::after_thread_sync` between the wait or barrier and the later \
             operation"
        }
        HazardKind::ScopeTooNarrow => "a scope that has both threads, on both accesses",
        HazardKind::MissingGridDependencyWait => "`griddepcontrol.wait` before the access",
        HazardKind::PeerNotStarted => {
            "`barrier.cluster.arrive` and `.wait` of all CTAs before the first access to memory \
             of another"
        }
        HazardKind::SwizzleMismatch | HazardKind::SwizzleMissing => {
            "the same swizzle in the tensor map and in the matrix descriptor"
        }
        HazardKind::TensorWaitOfOneLane => {
            "`bar.warp.sync` after `tcgen05.wait`, before one lane arrives for the warp"
        }
        HazardKind::TensorMemoryFreedInUse => {
            "completion of all operations on the columns and a barrier before `tcgen05.dealloc`"
        }
        _ => "order between the two accesses",
    }
    .to_owned()
}
