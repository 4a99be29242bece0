//! What the hazard tracker is told.

use super::cluster::ClusterState;
use super::warp::Warp;
use super::world::World;
use crate::decode::{Program, Scope, Semantics};
use crate::error::Fault;
use crate::hazard::{
    Direction, Group, Mark, Operation, Order, Patterns, Rules, Site, StrongAccess, Thread, Tracker,
    Unit, WarpId,
};
use crate::mbarrier::Arrival;
use crate::place::Place;

/// An asynchronous operation, or a warp's instruction that touches many bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tracked {
    /// The instruction.
    pub(crate) pc: u32,
    /// Who touches memory.
    pub(crate) who: Who,
}

/// Who touches memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Who {
    /// Threads.
    Thread(Thread),
    /// Something that threads issued.
    Operation(Operation),
    /// Nobody follows it.
    Nobody,
}

/// Where the lanes of a warp went, for the tracker; nothing is kept without one.
pub(crate) struct Places {
    on: bool,
    count: usize,
    all: [(u32, Place); 32],
}

impl Places {
    pub(crate) fn new(world: &World<'_>) -> Places {
        Places { on: world.tracker.is_some(), count: 0, all: [(0, Place::Global(0)); 32] }
    }

    #[inline]
    pub(crate) fn push(&mut self, lane: usize, place: Place) {
        if self.on {
            self.all[self.count] = (lane as u32, place);
            self.count += 1;
        }
    }

    fn all(&self) -> &[(u32, Place)] {
        &self.all[..self.count]
    }
}

/// The order that an instruction's words stand for.
pub(crate) fn order_of(semantics: Semantics) -> Order {
    match semantics {
        Semantics::Weak | Semantics::Volatile | Semantics::Mmio | Semantics::Relaxed => {
            Order::Relaxed
        }
        Semantics::Acquire => Order::Acquire,
        Semantics::Release => Order::Release,
        Semantics::AcquireRelease | Semantics::SequentiallyConsistent => Order::AcquireRelease,
    }
}

/// A tracker for a program. One that does without the fences of tensor memory throughout is told
/// so once.
pub(crate) fn tracker_of(program: &Program, rules: Rules) -> Tracker {
    let sites = (program.steps.iter())
        .map(|step| Site { ptx_line: step.ptx_line, source: step.source })
        .collect();
    match super::tensor_fences::left_out(program).filter(|_| rules.tensor_fences) {
        Some((mma, load)) => {
            let mut tracker = Tracker::new(sites, Rules { tensor_fences: false, ..rules });
            tracker.warn_of_tensor_fences(mma, load);
            tracker
        }
        None => Tracker::new(sites, rules),
    }
}

impl World<'_> {
    fn warp_id(&self, warp: &Warp, cluster: &ClusterState) -> Option<WarpId> {
        let tracker = self.tracker.as_ref()?;
        Some(tracker.warp(cluster.tracked, warp.rank, warp.index))
    }

    /// Lanes of a warp at its current instruction.
    pub(crate) fn thread(&self, warp: &Warp, cluster: &ClusterState, lanes: u32) -> Option<Thread> {
        let id = self.warp_id(warp, cluster)?;
        Some(self.tracker.as_ref()?.thread(id, lanes, warp.pc))
    }

    /// An access of many bytes by threads.
    pub(crate) fn by_threads(&self, warp: &Warp, cluster: &ClusterState, lanes: u32) -> Tracked {
        let who = self.thread(warp, cluster, lanes).map_or(Who::Nobody, Who::Thread);
        Tracked { pc: warp.pc, who }
    }

    /// An operation is issued.
    pub(crate) fn issued(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        lanes: u32,
        unit: Unit,
    ) -> Tracked {
        let who = match (self.thread(warp, cluster, lanes), &mut self.tracker) {
            (Some(thread), Some(tracker)) => Who::Operation(tracker.issue(thread, unit)),
            _ => Who::Nobody,
        };
        Tracked { pc: warp.pc, who }
    }

    /// What lanes have issued so far, for an arrival that comes when it is done.
    pub(crate) fn marked(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        lanes: u32,
        unit: Unit,
    ) -> Option<Box<Mark>> {
        let thread = self.thread(warp, cluster, lanes)?;
        Some(Box::new(self.tracker.as_mut()?.mark(thread, unit)))
    }

    /// The arrival of a mark came.
    pub(crate) fn mark_arrived(
        &mut self,
        mark: Option<&Mark>,
        (rank, offset): (u32, u32),
        arrival: Arrival,
    ) {
        if let (Some(tracker), Some(mark)) = (&mut self.tracker, mark) {
            tracker.arrive_mark(mark, rank, offset, arrival);
        }
    }

    /// Bytes of an operation arrived at the barrier that it ends by.
    pub(crate) fn bytes_arrived(
        &mut self,
        tracked: Tracked,
        (rank, offset): (u32, u32),
        arrival: Arrival,
    ) {
        if let (Some(tracker), Who::Operation(operation)) = (&mut self.tracker, tracked.who) {
            tracker.complete_tx(operation, rank, offset, arrival);
        }
    }

    /// An operation reads its tensor map. Those among the parameters do not change.
    pub(crate) fn map_read(&mut self, tracked: Tracked, address: u64) {
        let parameters = self.shape.parameters;
        let inside = parameters..parameters + u64::from(self.program.parameter_bytes);
        if !inside.contains(&address)
            && let (Some(tracker), Who::Operation(operation)) = (&mut self.tracker, tracked.who)
        {
            tracker.access_tensor_map(operation, address);
        }
    }

    /// An operation is a reduction.
    pub(crate) fn reduces(&mut self, tracked: Tracked) {
        if let (Some(tracker), Who::Operation(operation)) = (&mut self.tracker, tracked.who) {
            tracker.is_reduction(operation);
        }
    }

    /// The swizzles of an operation.
    pub(crate) fn permutes(&mut self, tracked: Tracked, patterns: Patterns) {
        if let (Some(tracker), Who::Operation(operation)) = (&mut self.tracker, tracked.who) {
            tracker.has_patterns(operation, patterns);
        }
    }

    /// An operation has told all that it touches.
    pub(crate) fn ran(&mut self, tracked: Tracked) {
        if let (Some(tracker), Who::Operation(operation)) = (&mut self.tracker, tracked.who) {
            tracker.ran(operation);
        }
    }

    /// Checks and counts what one lane does to shared memory.
    #[inline]
    pub(crate) fn shared_access(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        (rank, offset): (u32, u32),
        bytes: usize,
        write: bool,
    ) -> Result<(), Fault> {
        cluster.barriers.check_access(rank, offset, bytes as u32, write)?;
        let moved = &mut self.counts.bytes;
        let to = if write { &mut moved.shared_written } else { &mut moved.shared_read };
        *to += bytes as u64;
        if rank != warp.rank {
            moved.cluster += bytes as u64;
        }
        Ok(())
    }

    /// Tells what lanes loaded or stored.
    pub(crate) fn loaded_or_stored(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        places: &Places,
        bytes: usize,
        write: bool,
        (semantics, scope): (Semantics, Scope),
    ) {
        let access = if write { StrongAccess::Store } else { StrongAccess::Load };
        let strong = match semantics {
            Semantics::Weak => None,
            Semantics::Volatile | Semantics::Mmio => Some(Scope::System),
            _ => Some(scope),
        };
        self.tell(warp, cluster, places, bytes, write, strong, access, semantics);
    }

    /// Tells what lanes did by atomic operations.
    pub(crate) fn atomically(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        places: &Places,
        bytes: usize,
        returns: bool,
        (semantics, scope): (Semantics, Scope),
    ) {
        let access = if returns { StrongAccess::Atomic } else { StrongAccess::Reduction };
        self.tell(warp, cluster, places, bytes, true, Some(scope), access, semantics);
    }

    fn tell(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        places: &Places,
        bytes: usize,
        write: bool,
        strong: Option<Scope>,
        access: StrongAccess,
        semantics: Semantics,
    ) {
        let places = places.all();
        if places.is_empty() {
            return;
        }
        let lanes = places.iter().fold(0, |all, (lane, _)| all | 1 << lane);
        let Some(thread) = self.thread(warp, cluster, lanes) else { return };
        let Some(tracker) = &mut self.tracker else { return };
        let direction = if write { Direction::Write } else { Direction::Read };
        tracker.access(thread, direction, strong, bytes as u32, places);
        if let Some(scope) = strong {
            let mut at = 0;
            while at < places.len() {
                let (lane, place) = places[at];
                let mut same = 1u32 << lane;
                while at + 1 < places.len() && places[at + 1].1 == place {
                    at += 1;
                    same |= 1 << places[at].0;
                }
                at += 1;
                let thread = tracker.thread(thread.warp, same, thread.step);
                tracker.synchronize(thread, place, access, order_of(semantics), scope);
            }
        }
    }

    /// An operation touches memory.
    pub(crate) fn operation_access(
        &mut self,
        cluster: &ClusterState,
        tracked: Tracked,
        place: Place,
        bytes: usize,
        write: bool,
    ) -> Result<(), Fault> {
        if let Place::Shared { rank, offset } = place {
            cluster.barriers.check_access(rank, offset, bytes as u32, write)?;
        }
        let Some(tracker) = &mut self.tracker else { return Ok(()) };
        let direction = if write { Direction::Write } else { Direction::Read };
        match tracked.who {
            Who::Operation(operation) => match self.copying_lane {
                Some(lane) => {
                    tracker.access_operation_lane(operation, direction, lane, place, bytes as u32)
                }
                None => tracker.access_operation(operation, direction, place, bytes as u32),
            },
            Who::Thread(thread) => {
                let lane = thread.lanes.trailing_zeros();
                tracker.access(thread, direction, None, bytes as u32, &[(lane, place)]);
            }
            Who::Nobody => {}
        }
        Ok(())
    }

    /// Lanes of a warp met at `bar.warp.sync`.
    pub(crate) fn warp_synchronized(&mut self, warp: &Warp, cluster: &ClusterState, lanes: u32) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            tracker.warp_barrier(thread);
        }
    }

    /// Lanes arrive at a barrier of the CTA.
    pub(crate) fn barrier_arrives(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        lanes: u32,
        barrier: u32,
    ) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            tracker.barrier_arrive(thread, barrier);
        }
    }

    /// A barrier of a CTA is complete.
    pub(crate) fn barrier_completes(&mut self, cluster: &mut ClusterState, rank: u32, name: u32) {
        let waiters = cluster.ctas[rank as usize].barriers.take_waiters(name);
        if let Some(tracker) = &mut self.tracker {
            let waiters: Vec<(WarpId, u32)> = (waiters.iter())
                .map(|(warp, lanes)| (tracker.warp(cluster.tracked, rank, *warp), *lanes))
                .collect();
            if !waiters.is_empty() {
                tracker.barrier_complete(&waiters, name);
            }
        }
    }

    /// Lanes arrive at the cluster's barrier.
    pub(crate) fn cluster_arrives(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        lanes: u32,
        relaxed: bool,
    ) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            tracker.cluster_arrive(thread, !relaxed);
        }
    }

    /// All threads arrived at the cluster's barrier.
    pub(crate) fn cluster_passed(&mut self, cluster: &ClusterState) {
        if let Some(tracker) = &mut self.tracker {
            tracker.cluster_complete(cluster.tracked);
        }
    }

    /// Lanes go on behind the cluster's barrier.
    pub(crate) fn cluster_waited(&mut self, warp: &Warp, cluster: &ClusterState, lanes: u32) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            tracker.cluster_wait(thread);
        }
    }

    /// A lane makes an mbarrier.
    pub(crate) fn mbarrier_init(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        lanes: u32,
        (rank, offset): (u32, u32),
    ) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            tracker.mbarrier_init(thread, rank, offset);
        }
    }

    /// A lane ends an mbarrier.
    pub(crate) fn mbarrier_inval(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        lanes: u32,
        (rank, offset): (u32, u32),
    ) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            tracker.mbarrier_inval(thread, rank, offset);
        }
    }

    /// A lane counted on an mbarrier.
    pub(crate) fn mbarrier_arrived(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        lanes: u32,
        (rank, offset): (u32, u32),
        arrival: Arrival,
        (semantics, scope): (Semantics, Scope),
    ) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            let order = (order_of(semantics), scope);
            tracker.mbarrier_arrive(thread, rank, offset, order, arrival);
        }
    }

    /// Lanes saw a phase of an mbarrier complete.
    pub(crate) fn mbarrier_waited(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        lanes: u32,
        (rank, offset): (u32, u32),
        (semantics, scope): (Semantics, Scope),
    ) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            let acquire = order_of(semantics) != Order::Relaxed;
            tracker.mbarrier_wait(thread, rank, offset, (acquire, scope));
        }
    }

    /// Lanes commit a group.
    pub(crate) fn group_committed(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        lanes: u32,
        group: Group,
    ) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            tracker.commit_group(thread, group);
        }
    }

    /// Lanes waited for all but the last groups.
    pub(crate) fn group_waited(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        lanes: u32,
        group: Group,
        (pending, read): (u32, bool),
    ) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            tracker.wait_group(thread, group, pending, read);
        }
    }

    /// CTAs start.
    pub(crate) fn cluster_starts(&mut self, cluster: &mut ClusterState) {
        let warps = self.shape.warps();
        if let Some(tracker) = &mut self.tracker {
            cluster.tracked = tracker.add_cluster(cluster.ctas.len() as u32, warps);
        }
    }

    /// CTAs are gone.
    pub(crate) fn cluster_gone(&mut self, cluster: &ClusterState) {
        if let Some(tracker) = &mut self.tracker {
            tracker.remove_cluster(cluster.tracked);
        }
    }
}
