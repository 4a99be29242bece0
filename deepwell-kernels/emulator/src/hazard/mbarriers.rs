//! Synchronization by mbarriers.

use super::clock::{ALL_LANES, Agent, Kind};
use super::knowledge::Bundle;
use super::operations::Snapshot;
use super::{Arrival, HazardKind, Order, Place, Scope, Thread, Tracker, Unit, WarpId};

/// A live mbarrier.
#[derive(Debug)]
pub(super) struct TrackedBarrier {
    /// Agents of the completed phases; the number is 1 + the phase. Indexed by [`distance`],
    /// because only waits of cluster scope acquire from other CTAs.
    pub(super) agents: [Agent; 2],
    /// Warp, lanes and step of the initialization.
    init: (WarpId, u32, u32),
    init_number: u32,
    /// Releases of arrivals in the current phase, by [`distance`].
    pub(super) current: [Bundle; 2],
    /// Releases of completed phases, by [`distance`].
    completed: [Bundle; 2],
    /// Number of phases that some thread saw complete.
    pub(super) observed: u64,
    phases: u64,
    /// Last access counted in the current phase, for reports.
    last: Option<Thread>,
    /// Arrivals of other CTAs that no thread of this CTA has observed.
    pub(super) foreign: Vec<Foreign>,
    /// Last uses by threads, with ticks.
    users: Vec<(Thread, u32)>,
}

/// Most uses remembered, of different lanes or warps.
const USERS_MAX: usize = 128;

/// An arrival by a thread of another CTA, or by an operation of such a thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Foreign {
    phase: u64,
    pub(super) thread: Thread,
    pub(super) kind: Kind,
    pub(super) value: u32,
}

/// Most arrivals of other CTAs remembered.
const FOREIGN_MAX: usize = 64;

/// Returns 0 for accesses by the mbarrier's own CTA, 1 for other CTAs of the cluster.
pub(super) fn distance(of: u32, barrier: u32) -> usize {
    usize::from(of != barrier)
}

impl TrackedBarrier {
    /// Records a use by a thread.
    fn used(&mut self, thread: Thread, tick: u32) {
        let same =
            |user: &&mut (Thread, u32)| (user.0.warp, user.0.lanes) == (thread.warp, thread.lanes);
        if let Some(user) = self.users.iter_mut().find(same) {
            *user = (thread, tick);
        } else if self.users.len() < USERS_MAX {
            self.users.push((thread, tick));
        }
    }

    /// Called after an arrival or completion was counted.
    pub(super) fn phase_ends(&mut self, arrival: Arrival) {
        if !arrival.completed {
            return;
        }
        self.phases = arrival.phase + 1;
        for (at, completed) in self.completed.iter_mut().enumerate() {
            completed.join(&std::mem::take(&mut self.current[at]));
            completed.generic.raise(self.agents[at], ALL_LANES, self.phases as u32);
        }
    }
}

impl Tracker {
    /// `mbarrier.init` of an object of the warp's cluster, by one lane.
    pub fn mbarrier_init(&mut self, thread: Thread, rank: u32, offset: u32) {
        let (cluster, _) = self.cta(thread.warp);
        let warp = self.warp_mut(thread.warp);
        warp.streams.inits += 1;
        let number = warp.streams.inits;
        let kind = Kind::BarrierInit as usize;
        warp.update(thread.lanes, |_, state| state.own.done[kind] = number);
        let of = &mut self.clusters[cluster as usize];
        let agents = [0, 1].map(|at| Agent::new(cluster, of.agents + at));
        of.agents += 2;
        let barrier = TrackedBarrier {
            agents,
            init: (thread.warp, thread.lanes, thread.step),
            init_number: number,
            current: Default::default(),
            completed: Default::default(),
            observed: 0,
            phases: 0,
            last: None,
            foreign: Vec::new(),
            users: Vec::new(),
        };
        of.barriers.insert((rank, offset), barrier);
    }

    /// `mbarrier.inval`.
    pub fn mbarrier_inval(&mut self, thread: Thread, rank: u32, offset: u32) {
        self.check_mbarrier_init(thread, None, false, rank, offset);
        let (cluster, _) = self.cta(thread.warp);
        let barrier = self.clusters[cluster as usize].barriers.remove(&(rank, offset));
        for (user, tick) in barrier.into_iter().flat_map(|barrier| barrier.users) {
            let itself = user.warp == thread.warp && user.lanes & !thread.lanes == 0;
            let agent = self.agent(user.warp, Kind::Generic);
            let state = self.warps[thread.warp.0 as usize].state(thread.lanes.trailing_zeros());
            if itself
                || state.known.generic.knows(agent, user.lanes & !self.own(thread, user), tick)
            {
                continue;
            }
            let kind = HazardKind::MissingSynchronization;
            let access = |of: Thread| ((of.warp, of.lanes, of.step, Unit::Thread), true);
            let place = Place::Shared { rank, offset };
            self.report_pair(kind, access(user), access(thread), place, || {
                "a barrier of all who use the mbarrier, before `mbarrier.inval`".to_owned()
            });
        }
    }

    /// Returns the lanes of `thread` if `other` belongs to the same warp, otherwise 0.
    fn own(&self, thread: Thread, other: Thread) -> u32 {
        if other.warp == thread.warp { thread.lanes } else { 0 }
    }

    /// An `mbarrier` instruction that counts: `arrive`, `arrive_drop`, `expect_tx`, `complete_tx`.
    /// `order` is [`Order::Release`] for an arrival without `.relaxed`, otherwise
    /// [`Order::Relaxed`]. With CTA scope, nothing is released to other CTAs. `arrival` is the
    /// table's result for the last lane. Lanes whose arrivals counted in different phases need
    /// separate calls.
    pub fn mbarrier_arrive(
        &mut self,
        thread: Thread,
        rank: u32,
        offset: u32,
        (order, scope): (Order, Scope),
        arrival: Arrival,
    ) {
        let (cluster, own_rank) = self.cta(thread.warp);
        self.check_mbarrier_init(thread, None, false, rank, offset);
        self.check_observed(thread, rank, offset, arrival);
        self.check_phase_known(thread, rank, offset, arrival);
        self.note_foreign(thread, None, rank, offset, arrival);
        let Tracker { warps, clusters, rules, .. } = self;
        let Some(barrier) = clusters[cluster as usize].barriers.get_mut(&(rank, offset)) else {
            return;
        };
        let warp = &mut warps[thread.warp.0 as usize];
        barrier.used(thread, warp.tick);
        let distance = distance(own_rank, rank);
        let bundle = &mut barrier.current[distance];
        if rules.mbarrier_scopes && distance == 1 && scope == Scope::Cta {
            bundle.started |= 1 << (own_rank & 15);
            warp.tick += 1;
        } else if order.releases() {
            warp.release(thread.lanes, bundle);
        } else {
            warp.release_relaxed(thread.lanes, bundle);
        }
        barrier.phase_ends(arrival);
    }

    /// `mbarrier.test_wait` or `.try_wait` returned true to these lanes; `acquire` is false for
    /// `.relaxed`. With CTA scope, nothing is acquired from other CTAs.
    pub fn mbarrier_wait(
        &mut self,
        thread: Thread,
        rank: u32,
        offset: u32,
        (acquire, scope): (bool, Scope),
    ) {
        self.check_mbarrier_init(thread, None, false, rank, offset);
        let (cluster, _) = self.cta(thread.warp);
        let Tracker { warps, clusters, rules, .. } = self;
        let Some(barrier) = clusters[cluster as usize].barriers.get_mut(&(rank, offset)) else {
            return;
        };
        let is_narrow = rules.mbarrier_scopes && scope == Scope::Cta;
        barrier.used(thread, warps[thread.warp.0 as usize].tick);
        barrier.observed = barrier.phases;
        let observed = barrier.observed;
        barrier.foreign.retain(|arrival| arrival.phase >= observed);
        warps[thread.warp.0 as usize].update(thread.lanes, |_, state| {
            for (distance, completed) in barrier.completed.iter().enumerate() {
                if is_narrow && distance == 1 {
                    state.known.started |= completed.started;
                } else if acquire {
                    state.acquire(completed);
                } else {
                    state.acquire_relaxed(completed, distance);
                }
            }
        });
    }

    /// Remembers an arrival of another CTA's thread, or of its operation.
    pub(super) fn note_foreign(
        &mut self,
        thread: Thread,
        operation: Option<(Kind, u32)>,
        rank: u32,
        offset: u32,
        arrival: Arrival,
    ) {
        let (cluster, own_rank) = self.cta(thread.warp);
        if own_rank == rank {
            return;
        }
        let tick = self.warps[thread.warp.0 as usize].tick;
        let (kind, value) = operation.unwrap_or((Kind::Generic, tick));
        let barrier = self.clusters[cluster as usize].barriers.get_mut(&(rank, offset));
        let Some(barrier) = barrier else { return };
        if barrier.foreign.len() < FOREIGN_MAX {
            barrier.foreign.push(Foreign { phase: arrival.phase, thread, kind, value });
        }
    }

    /// Reports a use of an mbarrier that is not ordered after its initialization. A use by a
    /// hardware unit (`by_unit`) also needs a fence after the initialization.
    pub(super) fn check_mbarrier_init(
        &mut self,
        user: Thread,
        view: Option<&Snapshot>,
        by_unit: bool,
        rank: u32,
        offset: u32,
    ) {
        let (cluster, _) = self.cta(user.warp);
        let Some(barrier) = self.clusters[cluster as usize].barriers.get(&(rank, offset)) else {
            return;
        };
        let (by, by_lanes, step) = barrier.init;
        let (agent, number) = (self.agent(by, Kind::BarrierInit), barrier.init_number);
        let kind = Kind::BarrierInit as usize;
        let warp = &self.warps[user.warp.0 as usize];
        let state = warp.state(user.lanes.trailing_zeros());
        let (known, own) = view.map_or((&state.known, &state.own), |view| (&view.known, &view.own));
        let itself = by == user.warp && by_lanes & !user.lanes == 0;
        let ordered =
            itself && own.done[kind] >= number || known.generic.knows(agent, by_lanes, number);
        let fenced = itself && own.shared[kind] >= number
            || known.async_shared.knows(agent, by_lanes, number);
        let found = if !ordered {
            HazardKind::MissingMbarrierInitSync
        } else if by_unit && !fenced && self.warns() {
            HazardKind::MissingMbarrierInitFence
        } else {
            return;
        };
        let init = ((by, by_lanes, step, Unit::Thread), true);
        let later = ((user.warp, user.lanes, user.step, Unit::Thread), true);
        let place = Place::Shared { rank, offset };
        self.report_pair(found, init, later, place, || {
            match found {
                HazardKind::MissingMbarrierInitSync => {
                    "after `mbarrier.init`: `fence.mbarrier_init.release.cluster` if the barrier \
                     that follows is relaxed, and a barrier of the CTA or cluster before use"
                }
                _ => {
                    "`fence.mbarrier_init.release.cluster` (or `fence.proxy.async`) after \
                     `mbarrier.init`, for the units that use the mbarrier"
                }
            }
            .to_owned()
        });
    }

    /// Reports an arrival in a phase whose predecessor the thread does not know to be complete: in
    /// another order of the same events, the arrival counts in the earlier phase.
    pub(super) fn check_phase_known(
        &mut self,
        thread: Thread,
        rank: u32,
        offset: u32,
        arrival: Arrival,
    ) {
        let (cluster, _) = self.cta(thread.warp);
        let barrier = self.clusters[cluster as usize].barriers.get(&(rank, offset));
        let Some(barrier) = barrier else { return };
        let state = self.warps[thread.warp.0 as usize].state(thread.lanes.trailing_zeros());
        let phases = arrival.phase as u32;
        if !self.rules.arrival_phases || phases == 0 || state.knows_phase(barrier.agents, phases) {
            return;
        }
        let access = ((thread.warp, thread.lanes, thread.step, Unit::Thread), true);
        let place = Place::Shared { rank, offset };
        self.report_pair(HazardKind::PhaseUnknown, access, access, place, || {
            format!(
                "before the arrival in phase {phases}, a wait that tells the thread that phase \
                 {} of the mbarrier is complete: for a full barrier, the wait for the empty stage",
                phases - 1
            )
        });
    }

    /// Reports an arrival in a phase whose predecessor no thread has observed (9.7.13.15.4).
    pub(super) fn check_observed(
        &mut self,
        thread: Thread,
        rank: u32,
        offset: u32,
        arrival: Arrival,
    ) {
        if !self.rules.warnings {
            return;
        }
        let (cluster, _) = self.cta(thread.warp);
        let barrier = self.clusters[cluster as usize].barriers.get_mut(&(rank, offset));
        let Some(barrier) = barrier else { return };
        let last = barrier.last.replace(thread);
        if barrier.observed >= arrival.phase {
            return;
        }
        let earlier = last.unwrap_or(thread);
        let access = |of: Thread| ((of.warp, of.lanes, of.step, Unit::Thread), true);
        let place = Place::Shared { rank, offset };
        let phase = arrival.phase;
        self.report_pair(
            HazardKind::PhaseUnobserved,
            access(earlier),
            access(thread),
            place,
            || {
                format!(
                    "a `test_wait` or `try_wait` that sees phase {} of the mbarrier complete, \
                     before anyone arrives in phase {phase}",
                    phase - 1
                )
            },
        );
    }
}
