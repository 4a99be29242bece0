//! What mbarriers hand on.

use super::clock::{ALL_LANES, Agent, Kind};
use super::knowledge::Bundle;
use super::operations::Snapshot;
use super::{Arrival, HazardKind, Order, Place, Thread, Tracker, Unit, WarpId};

/// One live mbarrier.
#[derive(Debug)]
pub(super) struct TrackedBarrier {
    /// Its phases are numbered as those of an agent: 1 + the phase that is known complete.
    pub(super) agent: Agent,
    /// Who initialized it, where, and as which of the warp's `mbarrier.init`s.
    init: (WarpId, u32, u32),
    init_number: u32,
    /// What arrivals of the current phase released.
    pub(super) current: Bundle,
    /// What completed phases released.
    completed: Bundle,
    /// Phases that somebody saw complete.
    pub(super) observed: u64,
    phases: u64,
    /// The last access that counted in the current phase, for reports.
    last: Option<Thread>,
    /// Arrivals of other blocks that nobody of this block has seen.
    pub(super) foreign: Vec<Foreign>,
    /// The last uses by threads, with the tick of each.
    users: Vec<(Thread, u32)>,
}

/// Uses of an mbarrier that are remembered, of different lanes or warps.
const USERS_MAX: usize = 128;

/// An arrival of another block's thread, or of an operation that it issued.
#[derive(Clone, Copy, Debug)]
pub(super) struct Foreign {
    phase: u64,
    pub(super) thread: Thread,
    pub(super) kind: Kind,
    pub(super) value: u32,
}

/// Arrivals of other blocks that are remembered.
const FOREIGN_MAX: usize = 64;

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
        let current = std::mem::take(&mut self.current);
        self.completed.join(&current);
        self.phases = arrival.phase + 1;
        self.completed.generic.raise(self.agent, ALL_LANES, self.phases as u32);
    }
}

impl Tracker {
    /// `mbarrier.init` of an object of the warp's cluster, by one lane.
    pub fn mbarrier_init(&mut self, thread: Thread, rank: u32, offset: u32) {
        let (cluster, _) = self.block(thread.warp);
        let warp = self.warp_mut(thread.warp);
        warp.streams.inits += 1;
        let number = warp.streams.inits;
        let kind = Kind::BarrierInit as usize;
        warp.update(thread.lanes, |_, state| state.own.done[kind] = number);
        let of = &mut self.clusters[cluster as usize];
        let agent = Agent::new(cluster, of.agents);
        of.agents += 1;
        let barrier = TrackedBarrier {
            agent,
            init: (thread.warp, thread.lanes, thread.step),
            init_number: number,
            current: Bundle::default(),
            completed: Bundle::default(),
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
        let (cluster, _) = self.block(thread.warp);
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
    /// [`Order::Relaxed`]. `arrival` is what the table returned for the last of the lanes; lanes
    /// whose arrivals counted in different phases are told one after the other.
    pub fn mbarrier_arrive(
        &mut self,
        thread: Thread,
        rank: u32,
        offset: u32,
        order: Order,
        arrival: Arrival,
    ) {
        let (cluster, _) = self.block(thread.warp);
        self.check_mbarrier_init(thread, None, false, rank, offset);
        self.check_observed(thread, rank, offset, arrival);
        self.note_foreign(thread, None, rank, offset, arrival);
        let Tracker { warps, clusters, .. } = self;
        let Some(barrier) = clusters[cluster as usize].barriers.get_mut(&(rank, offset)) else {
            return;
        };
        let warp = &mut warps[thread.warp.0 as usize];
        barrier.used(thread, warp.tick);
        if order.releases() {
            warp.release(thread.lanes, &mut barrier.current);
        } else {
            warp.release_relaxed(thread.lanes, &mut barrier.current);
        }
        barrier.phase_ends(arrival);
    }

    /// `mbarrier.test_wait` or `.try_wait` returned true to these lanes; `acquire` unless it is
    /// `.relaxed`.
    pub fn mbarrier_wait(&mut self, thread: Thread, rank: u32, offset: u32, acquire: bool) {
        self.check_mbarrier_init(thread, None, false, rank, offset);
        let (cluster, _) = self.block(thread.warp);
        let Tracker { warps, clusters, .. } = self;
        let Some(barrier) = clusters[cluster as usize].barriers.get_mut(&(rank, offset)) else {
            return;
        };
        barrier.used(thread, warps[thread.warp.0 as usize].tick);
        barrier.observed = barrier.phases;
        let observed = barrier.observed;
        barrier.foreign.retain(|arrival| arrival.phase >= observed);
        warps[thread.warp.0 as usize].update(thread.lanes, |_, state| {
            if acquire {
                state.acquire(&barrier.completed);
            } else {
                // Arrivals may have come from anywhere in the cluster.
                state.acquire_relaxed(&barrier.completed, 1);
            }
        });
    }

    /// Remembers what other blocks do to an mbarrier: a thread's arrival, or an operation's.
    pub(super) fn note_foreign(
        &mut self,
        thread: Thread,
        operation: Option<(Kind, u32)>,
        rank: u32,
        offset: u32,
        arrival: Arrival,
    ) {
        let (cluster, own_rank) = self.block(thread.warp);
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
        let (cluster, _) = self.block(user.warp);
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
        } else if by_unit && !fenced && self.advise() {
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
                     that follows is relaxed, and a barrier of the block or cluster before use"
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
        if !self.rules.advice {
            return;
        }
        let (cluster, _) = self.block(thread.warp);
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
