//! Reports of the engine to the hazard tracker.

use super::cluster::ClusterState;
use super::warp::Warp;
use super::world::World;
use crate::decode::{Program, Scope, Semantics};
use crate::error::Fault;
use crate::hazard::{
    Accumulator, Direction, Group, Mark, Operation, Order, Patterns, Rules, Site, StrongAccess,
    Thread, Tracker, Unit, WarpId,
};
use crate::mbarrier::Arrival;
use crate::observe::{Event, Phase};
use crate::place::Place;

/// Identity of an asynchronous operation, or of a warp instruction that accesses many bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tracked {
    /// Position of the instruction.
    pub(crate) pc: u32,
    /// Originator of the accesses.
    pub(crate) who: Who,
}

/// Originators of accesses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Who {
    /// Threads of a warp.
    Thread(Thread),
    /// An operation issued by threads.
    Operation(Operation),
    /// Not tracked.
    Nobody,
}

/// Places accessed by the lanes of a warp; empty without a tracker.
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

/// Returns the tracker's order for a memory order.
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

/// Creates the tracker of a program. For a program that never uses tensor-memory fences after
/// waits, turns off the rule and adds one warning.
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

    /// Returns lanes of a warp at its current instruction, or `None` without a tracker.
    pub(crate) fn thread(&self, warp: &Warp, cluster: &ClusterState, lanes: u32) -> Option<Thread> {
        let id = self.warp_id(warp, cluster)?;
        Some(self.tracker.as_ref()?.thread(id, lanes, warp.pc))
    }

    /// Returns the identity of an access of many bytes by threads.
    pub(crate) fn by_threads(&self, warp: &Warp, cluster: &ClusterState, lanes: u32) -> Tracked {
        let who = self.thread(warp, cluster, lanes).map_or(Who::Nobody, Who::Thread);
        Tracked { pc: warp.pc, who }
    }

    /// Reports the issue of an operation.
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

    /// Marks the operations that lanes have issued so far, for an arrival at their completion.
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

    /// Reports the arrival of a mark.
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

    /// Reports bytes that an operation completed on an mbarrier.
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

    /// Reports the read of an operation's tensor map. Maps in the parameters are immutable.
    pub(crate) fn map_read(&mut self, tracked: Tracked, address: u64) {
        let parameters = self.shape.parameters;
        let inside = parameters..parameters + u64::from(self.program.parameter_bytes);
        if !inside.contains(&address)
            && let (Some(tracker), Who::Operation(operation)) = (&mut self.tracker, tracked.who)
        {
            tracker.access_tensor_map(operation, address);
        }
    }

    /// Reports that an operation is a reduction.
    pub(crate) fn reduces(&mut self, tracked: Tracked) {
        if let (Some(tracker), Who::Operation(operation)) = (&mut self.tracker, tracked.who) {
            tracker.is_reduction(operation);
        }
    }

    /// Reports the swizzles of an operation.
    pub(crate) fn permutes(&mut self, tracked: Tracked, patterns: Patterns) {
        if let (Some(tracker), Who::Operation(operation)) = (&mut self.tracker, tracked.who) {
            tracker.has_patterns(operation, patterns);
        }
    }

    /// Reports the accumulator of an MMA.
    pub(crate) fn accumulates(&mut self, tracked: Tracked, accumulator: Accumulator) {
        if let (Some(tracker), Who::Operation(operation)) = (&mut self.tracker, tracked.who) {
            tracker.has_accumulator(operation, accumulator);
        }
    }

    /// Reports that all accesses of an operation have been reported.
    pub(crate) fn ran(&mut self, tracked: Tracked) {
        if let (Some(tracker), Who::Operation(operation)) = (&mut self.tracker, tracked.who) {
            tracker.ran(operation);
        }
    }

    /// Checks and counts an access of one lane to shared memory.
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

    /// Reports loads or stores of lanes.
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

    /// Reports atomic operations of lanes.
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

    #[expect(
        clippy::too_many_arguments,
        reason = "one instruction with its operands and modifiers"
    )]
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

    /// Checks and reports an access of an operation.
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

    /// Reports a `bar.warp.sync` of lanes.
    pub(crate) fn warp_synchronized(&mut self, warp: &Warp, cluster: &ClusterState, lanes: u32) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            tracker.warp_barrier(thread);
        }
    }

    /// Reports arrivals at a CTA barrier.
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

    /// Reports the completion of a CTA barrier.
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

    /// Reports arrivals at the cluster barrier.
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

    /// Reports that all threads have arrived at the cluster barrier.
    pub(crate) fn cluster_passed(&mut self, cluster: &ClusterState) {
        if let Some(tracker) = &mut self.tracker {
            tracker.cluster_complete(cluster.tracked);
        }
    }

    /// Reports lanes that passed the cluster barrier.
    pub(crate) fn cluster_waited(&mut self, warp: &Warp, cluster: &ClusterState, lanes: u32) {
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            tracker.cluster_wait(thread);
        }
    }

    /// Reports the initialization of an mbarrier.
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

    /// Reports the invalidation of an mbarrier.
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

    /// Reports an arrival, or another counted operation, on an mbarrier.
    pub(crate) fn mbarrier_arrived(
        &mut self,
        warp: &Warp,
        cluster: &ClusterState,
        lanes: u32,
        (rank, offset): (u32, u32),
        arrival: Arrival,
        (semantics, scope): (Semantics, Scope),
    ) {
        let phase = Phase { rank, offset, phase: arrival.phase };
        self.observe(warp, cluster, Event::Arrival(phase));
        if let Some(thread) = self.thread(warp, cluster, lanes)
            && let Some(tracker) = &mut self.tracker
        {
            let order = (order_of(semantics), scope);
            tracker.mbarrier_arrive(thread, rank, offset, order, arrival);
        }
    }

    /// Reports lanes that observed the completion of an mbarrier phase.
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

    /// Reports the commit of a group.
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

    /// Reports a wait for groups.
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

    /// Reports the start of a cluster.
    pub(crate) fn cluster_starts(&mut self, cluster: &mut ClusterState) {
        let warps = self.shape.warps();
        if let Some(tracker) = &mut self.tracker {
            cluster.tracked = tracker.add_cluster(cluster.ctas.len() as u32, warps);
        }
    }

    /// Reports the end of a cluster.
    pub(crate) fn cluster_gone(&mut self, cluster: &ClusterState) {
        if let Some(tracker) = &mut self.tracker {
            tracker.remove_cluster(cluster.tracked);
        }
    }
}
