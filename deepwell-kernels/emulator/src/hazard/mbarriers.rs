//! What mbarriers hand on.

use super::clock::{ALL_LANES, Agent, Kind};
use super::knowledge::Bundle;
use super::operations::Snapshot;
use super::{Arrival, HazardKind, Order, Place, Scope, Thread, Tracker, Unit, WarpId};

/// One live mbarrier.
#[derive(Debug)]
pub(super) struct TrackedBarrier {
    /// Its phases are numbered as those of an agent: 1 + the phase that is known complete. By
    /// [`distance`]: what other CTAs did is known to those only who wait at cluster scope.
    pub(super) agents: [Agent; 2],
    /// Who initialized it, where, and as which of the warp's `mbarrier.init`s.
    init: (WarpId, u32, u32),
    init_number: u32,
    /// What arrivals of the current phase released, by [`distance`].
    pub(super) current: [Bundle; 2],
    /// What completed phases released.
    completed: [Bundle; 2],
    /// Phases that somebody saw complete.
    pub(super) observed: u64,
    phases: u64,
    /// The last access that counted in the current phase, for reports.
    last: Option<Thread>,
    /// Arrivals of other CTAs that nobody of this CTA has seen.
    pub(super) foreign: Vec<Foreign>,
    /// The last uses by threads, with the tick of each.
    users: Vec<(Thread, u32)>,
}

/// Uses of an mbarrier that are remembered, of different lanes or warps.
const USERS_MAX: usize = 128;

/// An arrival of another CTA's thread, or of an operation that it issued.
#[derive(Clone, Copy, Debug)]
pub(super) struct Foreign {
    phase: u64,
    pub(super) thread: Thread,
    pub(super) kind: Kind,
    pub(super) value: u32,
}

/// Arrivals of other CTAs that are remembered.
const FOREIGN_MAX: usize = 64;

/// 0 for what the CTA of the mbarrier does to it, 1 for other CTAs of the cluster.
pub(super) fn distance(of: u32, barrier: u32) -> usize {
    usize::from(of != barrier)
}

impl TrackedBarrier {
    /// A thread uses the mbarrier.
    fn used(&mut self, thread: Thread, tick: u32) {
        let same =
            |user: &&mut (Thread, u32)| (user.0.warp, user.0.lanes) == (thread.warp, thread.lanes);
        if let Some(user) = self.users.iter_mut().find(same) {
            *user = (thread, tick);
        } else if self.users.len() < USERS_MAX {
            self.users.push((thread, tick));
        }
    }

    /// An arrival or completion was counted.
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

    /// Lanes of `thread`, if the other is of the same warp.
    fn own(&self, thread: Thread, other: Thread) -> u32 {
        if other.warp == thread.warp { thread.lanes } else { 0 }
    }

    /// Any `mbarrier` instruction that counts: `arrive`, `arrive_drop`, `expect_tx`,
    /// `complete_tx`. `order` is [`Order::Release`] for an arrival without `.relaxed`, else
    /// [`Order::Relaxed`]; with the scope of the CTA it tells other CTAs nothing. `arrival` is
    /// what the table returned for the last of the lanes; lanes
    /// whose arrivals counted in different phases are told one after the other.
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

    /// `mbarrier.test_wait` or `.try_wait` returned true to these lanes; `acquire` unless it is
    /// `.relaxed`. With the scope of the CTA it learns nothing of what other CTAs did.
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

    /// Remembers what other CTAs do to an mbarrier: a thread's arrival, or an operation's.
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

    /// Reports a use of an mbarrier that is not ordered after its initialization. For a use by a
    /// unit of the machine (`by_unit`) a fence on the way is asked for as well.
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

    /// Reports an arrival in a phase whose predecessor nobody waited for (9.7.13.15.4).
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
