//! Asynchronous operations: issue, groups, completion.

use std::sync::Arc;

use super::clock::{ALL_LANES, Agent, Clock, Kind};
use super::knowledge::{Bundle, Own, State};
use super::mbarriers::distance;
use super::pattern::Patterns;
use super::threads::Warp;
use super::{Arrival, Direction, Thread, Tracker, Unit, WarpId};

/// Agent of the previous grid.
pub(super) const PREVIOUS_GRID: Agent = Agent(u32::MAX);

/// Handle of an issued operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operation(pub(super) u32);

/// Kinds of groups for commit and wait instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// `cp.async`.
    CopyAsync,
    /// `cp.async.bulk` with `.bulk_group`.
    Bulk,
    /// `wgmma`.
    WarpGroup,
}

/// Knowledge of a thread when it issued an operation.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) known: Bundle,
    pub(super) own: Own,
    pub(super) tensor_pending: Clock,
    pub(super) tick: u32,
}

impl Snapshot {
    fn new(state: &State, tick: u32) -> Snapshot {
        Snapshot {
            known: state.known.clone(),
            own: state.own,
            tensor_pending: state.tensor_pending.clone(),
            tick,
        }
    }
}

/// An issued operation.
#[derive(Clone, Debug)]
pub(super) struct OperationInfo {
    pub(super) warp: WarpId,
    pub(super) lanes: u32,
    pub(super) step: u32,
    pub(super) unit: Unit,
    /// Number in the stream of its kind. For completion on an mbarrier: 1 + the phase, 0 before.
    pub(super) value: u32,
    /// Agent of [`Self::value`], for operations that complete on an mbarrier or as a warp group.
    pub(super) agent: Agent,
    /// Whether the operation is a reduction, which is strong at device scope.
    pub(super) strong: bool,
    /// Tensor map of the operation, and the map read's number among bulk-group operations. A wait
    /// for the bulk group completes the map read, for loads too.
    pub(super) map: Option<(u64, u32)>,
    /// Accumulator of a `tcgen05.mma`.
    pub(super) accumulator: Option<Accumulator>,
    /// Swizzles in shared memory.
    pub(super) patterns: Patterns,
    /// Knowledge at issue; `None` after the operation has run.
    pub(super) view: Option<Arc<Snapshot>>,
}

/// Accumulator of a `tcgen05.mma`: MMAs of a thread with equal values run in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulator {
    /// Tensor-memory address of D.
    pub address: u32,
    /// M and N.
    pub shape: [u32; 2],
    /// `.cta_group`: 1 or 2.
    pub group: u32,
}

impl OperationInfo {
    /// Whether the ISA orders an earlier operation of a tensor core before this one.
    pub(super) fn is_pipelined_after(&self, earlier: &OperationInfo) -> bool {
        match (earlier.unit, self.unit) {
            (Unit::TensorCopy, Unit::TensorMma) => true,
            (Unit::TensorMma, Unit::TensorMma) => {
                self.accumulator.is_some() && self.accumulator == earlier.accumulator
            }
            _ => false,
        }
    }
}

/// Operations up to a `tcgen05.commit` or `cp.async.mbarrier.arrive`.
#[derive(Clone, Debug)]
pub struct Mark {
    warp: WarpId,
    lanes: u32,
    kind: Kind,
    value: u32,
    step: u32,
    view: Option<Arc<Snapshot>>,
}

/// Operation counts and groups of a warp.
#[derive(Debug, Default)]
pub(super) struct Streams {
    copy_async: u32,
    bulk: u32,
    tensor: u32,
    tensor_load: u32,
    tensor_store: u32,
    warp_group: u32,
    pub(super) inits: u32,
    /// Committing lanes, and the number of operations issued by then.
    groups: [Vec<(u32, u32)>; 3],
    /// Knowledge at the last tcgen05 operations, by issuing lanes.
    last_tensor: Vec<(u32, Arc<Snapshot>)>,
}

impl Streams {
    pub(super) fn issued(&self, kind: Kind) -> u32 {
        match kind {
            Kind::CopyAsync => self.copy_async,
            Kind::BulkRead | Kind::BulkWrite => self.bulk,
            Kind::Tensor | Kind::TensorIssue => self.tensor,
            Kind::TensorLoad | Kind::TensorLoadLanes => self.tensor_load,
            Kind::TensorStore | Kind::TensorStoreLanes => self.tensor_store,
            Kind::WarpGroup => self.warp_group,
            Kind::BarrierInit => self.inits,
            Kind::Generic | Kind::Strong => 0,
        }
    }

    fn next(&mut self, unit: Unit) -> u32 {
        let count = match unit {
            Unit::CopyAsync => &mut self.copy_async,
            Unit::BulkStore => &mut self.bulk,
            Unit::TensorMma | Unit::TensorCopy => &mut self.tensor,
            Unit::TensorLoad => &mut self.tensor_load,
            Unit::TensorStore => &mut self.tensor_store,
            Unit::WarpGroupMma => &mut self.warp_group,
            _ => return 0,
        };
        *count += 1;
        *count
    }

    pub(super) fn number_of_map_read(&mut self) -> u32 {
        self.bulk += 1;
        self.bulk
    }

    fn commit(&mut self, group: Group, lanes: u32) {
        let kind = match group {
            Group::CopyAsync => Kind::CopyAsync,
            Group::Bulk => Kind::BulkRead,
            Group::WarpGroup => Kind::WarpGroup,
        };
        let issued = self.issued(kind);
        let groups = &mut self.groups[group as usize];
        if groups.len() >= GROUPS_MAX {
            groups.drain(..GROUPS_MAX / 2);
        }
        groups.push((lanes, issued));
    }

    /// Returns the operations that are complete for a lane when at most `pending` groups are left.
    fn complete(&self, group: Group, lane: u32, pending: u32) -> u32 {
        let of_lane = self.groups[group as usize].iter().rev();
        let mut of_lane = of_lane.filter(|(lanes, _)| lanes >> lane & 1 == 1);
        of_lane.nth(pending as usize).map_or(0, |(_, issued)| *issued)
    }
}

/// Most groups remembered, far more than any kernel leaves pending.
const GROUPS_MAX: usize = 1024;

impl Tracker {
    /// An asynchronous instruction executes. `thread` has one lane for operations of single
    /// threads, all executing lanes for `cp.async`, and all lanes for operations of a warp.
    pub fn issue(&mut self, thread: Thread, unit: Unit) -> Operation {
        let warps_per_cta = self.warps_per_cta;
        let warp = self.warp_mut(thread.warp);
        let value = warp.streams.next(unit);
        let view = Arc::new(warp.snapshot(thread.lanes));
        let agent = match unit {
            Unit::WarpGroupMma => warp.warp_group_agent(warps_per_cta),
            _ => PREVIOUS_GRID,
        };
        if matches!(unit, Unit::TensorMma | Unit::TensorCopy) {
            let issue = Kind::TensorIssue as usize;
            warp.update(thread.lanes, |_, state| state.own.done[issue] = value);
            let last = &mut warp.streams.last_tensor;
            last.retain(|(lanes, _)| lanes & !thread.lanes != 0);
            last.push((thread.lanes, view.clone()));
        }
        self.operations.push(OperationInfo {
            warp: thread.warp,
            lanes: thread.lanes,
            step: thread.step,
            unit,
            value,
            agent,
            strong: false,
            map: None,
            accumulator: None,
            patterns: Patterns::default(),
            view: Some(view),
        });
        Operation(self.operations.len() as u32 - 1)
    }

    /// Sets the accumulator of an MMA.
    pub fn has_accumulator(&mut self, operation: Operation, accumulator: Accumulator) {
        self.operations[operation.0 as usize].accumulator = Some(accumulator);
    }

    /// Marks an operation as a reduction (`cp.reduce.async.bulk`, `red.async`): its writes do not
    /// conflict with other atomic writes.
    pub fn is_reduction(&mut self, operation: Operation) {
        self.operations[operation.0 as usize].strong = true;
    }

    /// Ends the accesses of an operation: checks gathered rows and frees the knowledge at issue.
    /// Must be called before any other event.
    pub fn ran(&mut self, operation: Operation) {
        self.tell_tensor_rows();
        self.operations[operation.0 as usize].view = None;
    }

    /// Adds memory that the previous grid reads or writes. A programmatic launch must not touch it
    /// before `griddepcontrol.wait`.
    pub fn previous_grid(&mut self, addresses: std::ops::Range<u64>, direction: Direction) {
        self.operations.push(OperationInfo {
            warp: WarpId(0),
            lanes: ALL_LANES,
            step: u32::MAX,
            unit: Unit::PreviousGrid,
            value: 1,
            agent: PREVIOUS_GRID,
            strong: false,
            map: None,
            accumulator: None,
            patterns: Patterns::default(),
            view: None,
        });
        let operation = self.operations.len() as u32 - 1;
        self.record_previous_grid(operation, addresses, direction);
    }

    /// `cp.async.commit_group`, `cp.async.bulk.commit_group`, `wgmma.commit_group`.
    pub fn commit_group(&mut self, thread: Thread, group: Group) {
        self.warp_mut(thread.warp).streams.commit(group, thread.lanes);
    }

    /// `...wait_group pending`; `read` is true for `.read`. For `cp.async.wait_all`, commit a group
    /// and wait for 0 pending groups.
    pub fn wait_group(&mut self, thread: Thread, group: Group, pending: u32, read: bool) {
        let warps_per_cta = self.warps_per_cta;
        let warp = self.warp_mut(thread.warp);
        let wgmmas = warp.warp_group_agent(warps_per_cta);
        let mut left = thread.lanes;
        while left != 0 {
            let value = warp.streams.complete(group, left.trailing_zeros(), pending);
            let same = (0..32)
                .filter(|lane| left >> lane & 1 == 1)
                .filter(|lane| warp.streams.complete(group, *lane, pending) == value)
                .fold(0, |mask, lane| mask | 1u32 << lane);
            left &= !same;
            warp.update(same, |_, state| {
                let mut done = |kind: Kind| {
                    let done = &mut state.own.done[kind as usize];
                    *done = (*done).max(value);
                };
                match group {
                    Group::CopyAsync => done(Kind::CopyAsync),
                    Group::Bulk => {
                        done(Kind::BulkRead);
                        if !read {
                            done(Kind::BulkWrite);
                        }
                    }
                    Group::WarpGroup => state.known.generic.raise(wgmmas, ALL_LANES, value),
                }
            });
        }
    }

    /// An operation completes on an mbarrier. `arrival` is the result of
    /// [`crate::mbarrier::MbarrierTable::complete_tx`].
    pub fn complete_tx(&mut self, operation: Operation, rank: u32, offset: u32, arrival: Arrival) {
        let at = operation.0 as usize;
        let (warp, lanes, step) =
            (self.operations[at].warp, self.operations[at].lanes, self.operations[at].step);
        let view = self.operations[at].view.clone();
        let user = Thread { warp, lanes, step };
        self.check_mbarrier_init(user, view.as_deref(), true, rank, offset);
        let (cluster, own_rank) = self.cta(warp);
        let barrier = self.clusters[cluster as usize].barriers.get_mut(&(rank, offset));
        let Some(barrier) = barrier else { return };
        let distance = distance(own_rank, rank);
        barrier.current[distance].started |= 1 << (own_rank & 15);
        if let Some(view) = &view {
            let executed = &mut barrier.current[distance].executed;
            executed.join(&view.known.generic);
            executed.join(&view.known.executed);
        }
        let info = &mut self.operations[at];
        (info.agent, info.value) = (barrier.agents[distance], arrival.phase as u32 + 1);
        barrier.phase_ends(arrival);
    }

    /// Records the operations that the lanes have issued so far, at `tcgen05.commit`
    /// ([`Unit::TensorMma`]) or `cp.async.mbarrier.arrive` ([`Unit::CopyAsync`]).
    pub fn mark(&mut self, thread: Thread, unit: Unit) -> Mark {
        let kind = if unit == Unit::CopyAsync { Kind::CopyAsync } else { Kind::Tensor };
        let warp = &self.warps[thread.warp.0 as usize];
        let last = warp.streams.last_tensor.iter().rev();
        let view = match kind {
            Kind::Tensor => {
                last.clone().find(|(lanes, _)| lanes & thread.lanes != 0).map(|(_, of)| of.clone())
            }
            _ => None,
        };
        let (lanes, value) = (thread.lanes, warp.streams.issued(kind));
        Mark { warp: thread.warp, lanes, kind, value, step: thread.step, view }
    }

    /// The arrival of a mark at an mbarrier; called for each mbarrier.
    pub fn arrive_mark(&mut self, mark: &Mark, rank: u32, offset: u32, arrival: Arrival) {
        let user = Thread { warp: mark.warp, lanes: mark.lanes, step: mark.step };
        if mark.kind == Kind::Tensor {
            self.check_mbarrier_init(user, mark.view.as_deref(), true, rank, offset);
        }
        self.check_observed(user, rank, offset, arrival);
        self.note_foreign(user, Some((mark.kind, mark.value)), rank, offset, arrival);
        let agent = self.agent(mark.warp, mark.kind);
        let issue = self.agent(mark.warp, Kind::TensorIssue);
        let (cluster, own_rank) = self.cta(mark.warp);
        let barrier = self.clusters[cluster as usize].barriers.get_mut(&(rank, offset));
        let Some(barrier) = barrier else { return };
        let bundle = &mut barrier.current[distance(own_rank, rank)];
        bundle.started |= 1 << (own_rank & 15);
        bundle.generic.raise(agent, mark.lanes, mark.value);
        if mark.kind == Kind::Tensor {
            bundle.generic.raise(issue, mark.lanes, mark.value);
            bundle.tensor.raise(agent, mark.lanes, mark.value);
            bundle.tensor.raise(issue, mark.lanes, mark.value);
            if let Some(view) = &mark.view {
                // Events before the operations also precede their completion.
                bundle.join(&view.known);
            }
        }
        barrier.phase_ends(arrival);
    }
}

impl Warp {
    /// Whether the lanes know that their operations up to `value` are complete.
    pub(super) fn has_waited(&self, kind: Kind, lanes: u32, value: u32) -> bool {
        let state = self.state(lanes.trailing_zeros());
        state.own.done[kind as usize] >= value
            || state.known.generic.knows(self.agent(kind), lanes, value)
    }

    /// Returns the current knowledge of the lanes and starts a new tick. For lanes of several
    /// groups, the snapshot is the union of the groups' knowledge.
    fn snapshot(&mut self, lanes: u32) -> Snapshot {
        let tick = self.tick;
        self.tick += 1;
        let mut groups = self.groups.iter().filter(|(mask, _)| mask & lanes != 0);
        let mut snapshot = match groups.next() {
            Some((_, state)) => Snapshot::new(state, tick),
            None => Snapshot::new(&State::default(), tick),
        };
        for (_, state) in groups {
            snapshot.known.join(&state.known);
            snapshot.tensor_pending.join(&state.tensor_pending);
            let (own, other) = (&mut snapshot.own, &state.own);
            for (mine, theirs) in [
                (&mut own.done, &other.done),
                (&mut own.shared, &other.shared),
                (&mut own.global, &other.global),
            ] {
                mine.iter_mut().zip(theirs).for_each(|(a, b)| *a = (*a).max(*b));
            }
        }
        snapshot
    }
}
