//! Knowledge of threads, and its transfer by synchronization.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Scope;
use super::clock::{ALL_KINDS, ALL_LANES, Agent, Clock, KINDS, Kind};

/// Known events, split by the fences that made them visible; transferred between threads.
#[derive(Clone, Debug, Default)]
pub(super) struct Bundle {
    /// Events that happened before, for the generic proxy and for threads.
    pub(super) generic: Clock,
    /// Events before a `fence.proxy.async` for shared memory.
    pub(super) async_shared: Clock,
    /// Events before a `fence.proxy.async` for global memory.
    pub(super) async_global: Clock,
    /// Events before a release of tensor maps.
    pub(super) maps_released: Clock,
    /// Acquired part of `maps_released`, by the address of the map.
    pub(super) maps_acquired: Option<Arc<BTreeMap<u64, Clock>>>,
    /// Events that precede later tcgen05 operations. In a transferred bundle: events before
    /// `tcgen05.fence::before_thread_sync`.
    pub(super) tensor: Clock,
    /// CTAs of the cluster known to have started, one bit each.
    pub(super) started: u16,
    /// Events that happened before in execution, although no memory order follows: the issue of an
    /// operation whose completion was observed, and relaxed arrivals. Only for phases of mbarriers.
    pub(super) executed: Clock,
    /// Releases by fences of other threads, by scope. A relaxed access after a barrier publishes
    /// them: `st`, `__threadfence()`, `__syncthreads()`, then an atomic of one thread.
    fenced: [Option<Arc<Bundle>>; 3],
    /// Unacquired knowledge from relaxed reads of other threads, by origin. A fence after a barrier
    /// acquires it: an atomic of one thread, `__syncthreads()`, then `__threadfence()` of all
    /// threads. Only barriers transfer it.
    read: Waiting,
}

/// Knowledge from relaxed reads that no fence has acquired, by origin: the same CTA, the same
/// cluster, other clusters.
type Waiting = [Option<Arc<Bundle>>; 3];

fn join_waiting(mine: &mut Waiting, theirs: &Waiting) {
    for (mine, theirs) in mine.iter_mut().zip(theirs) {
        match (&mut *mine, theirs) {
            (_, None) => {}
            (None, Some(theirs)) => *mine = Some(theirs.clone()),
            (Some(mine), Some(theirs)) if Arc::ptr_eq(mine, theirs) => {}
            (Some(mine), Some(theirs)) => Arc::make_mut(mine).join_memory(theirs),
        }
    }
}

impl Bundle {
    /// Joins everything except the tensor part and the unacquired reads.
    pub(super) fn join_memory(&mut self, other: &Bundle) {
        self.started |= other.started;
        self.executed.join(&other.executed);
        self.generic.join(&other.generic);
        self.async_shared.join(&other.async_shared);
        self.async_global.join(&other.async_global);
        self.maps_released.join(&other.maps_released);
        self.join_maps(&other.maps_acquired);
        for (level, fenced) in other.fenced.iter().enumerate() {
            if let Some(fenced) = fenced {
                self.join_fenced(level, fenced);
            }
        }
    }

    fn join_fenced(&mut self, level: usize, fenced: &Arc<Bundle>) {
        match &mut self.fenced[level] {
            None => self.fenced[level] = Some(fenced.clone()),
            Some(mine) if Arc::ptr_eq(mine, fenced) => {}
            Some(mine) => Arc::make_mut(mine).join_memory(fenced),
        }
    }

    pub(super) fn join(&mut self, other: &Bundle) {
        self.join_memory(other);
        self.tensor.join(&other.tensor);
    }

    fn join_maps(&mut self, other: &Option<Arc<BTreeMap<u64, Clock>>>) {
        let Some(other) = other else { return };
        match &mut self.maps_acquired {
            None => self.maps_acquired = Some(other.clone()),
            Some(mine) if Arc::ptr_eq(mine, other) => {}
            Some(mine) => {
                let mine = Arc::make_mut(mine);
                for (address, clock) in other.iter() {
                    mine.entry(*address).or_default().join(clock);
                }
            }
        }
    }

    /// `fence.proxy.tensormap::generic.acquire [address]`.
    pub(super) fn acquire_map(&mut self, address: u64) {
        let maps = Arc::make_mut(self.maps_acquired.get_or_insert_with(Arc::default));
        maps.entry(address).or_default().join(&self.maps_released);
    }
}

/// A lane's knowledge of its own operations. A release adds it to a clock with the mask of the
/// releasing lanes, because lanes do not know each other's operations.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Own {
    /// Completed own operations; loads and stores are known by program order.
    pub(super) done: [u32; KINDS],
    /// Part of `done` before a `fence.proxy.async` for shared memory.
    pub(super) shared: [u32; KINDS],
    /// Part of `done` before a `fence.proxy.async` for global memory.
    pub(super) global: [u32; KINDS],
    /// Ticks before the last release of tensor maps.
    pub(super) maps: u32,
    /// `mbarrier.init`s before the last `fence.mbarrier_init`.
    pub(super) inits_fenced: u32,
    /// Own `tcgen05.ld`s and `.st`s that completed before `tcgen05.fence::before_thread_sync`.
    pub(super) moves_fenced: [u32; 2],
}

/// Kinds of [`Own::moves_fenced`].
pub(super) const MOVES: [Kind; 2] = [Kind::TensorLoadLanes, Kind::TensorStoreLanes];

impl Own {
    /// Returns the common knowledge of two sets of lanes.
    fn common(&self, other: &Own) -> Own {
        let least = |a: &[u32; KINDS], b: &[u32; KINDS]| {
            let mut least = *a;
            least.iter_mut().zip(b).for_each(|(a, b)| *a = (*a).min(*b));
            least
        };
        Own {
            done: least(&self.done, &other.done),
            shared: least(&self.shared, &other.shared),
            global: least(&self.global, &other.global),
            maps: self.maps.min(other.maps),
            inits_fenced: self.inits_fenced.min(other.inits_fenced),
            moves_fenced: [0, 1].map(|at| self.moves_fenced[at].min(other.moves_fenced[at])),
        }
    }
}

/// State released by a fence, for later relaxed accesses to publish.
#[derive(Clone, Debug)]
pub(super) struct Released {
    known: Bundle,
    own: Own,
    tick: u32,
}

impl Released {
    fn publish(&self, party: Party, bundle: &mut Bundle) {
        bundle.join_memory(&self.known);
        Party { tick: self.tick, ..party }.fold(&self.own, bundle);
    }
}

/// State of lanes with equal knowledge.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub(super) known: Bundle,
    pub(super) own: Own,
    /// Acquired tcgen05 events for which `fence::after_thread_sync` is still missing.
    pub(super) tensor_pending: Clock,
    /// Events before `fence::before_thread_sync`.
    pub(super) tensor_before: Clock,
    /// Releases by fences, by scope: CTA, cluster, device.
    released: [Option<Arc<Released>>; 3],
    /// Unacquired knowledge from relaxed reads.
    acquired: Waiting,
}

/// Returns the index of a scope.
pub(super) fn level(scope: Scope) -> usize {
    match scope {
        Scope::Cta => 0,
        Scope::Cluster => 1,
        Scope::Device | Scope::System => 2,
    }
}

/// Lanes of a warp that release or acquire.
#[derive(Clone, Copy, Debug)]
pub(super) struct Party {
    /// The first agent of the warp.
    pub(super) agents: Agent,
    pub(super) lanes: u32,
    pub(super) tick: u32,
    /// The CTA, as a bit.
    pub(super) cta: u16,
}

impl Party {
    fn agent(self, kind: Kind) -> Agent {
        Agent(self.agents.0 + kind as u32)
    }

    /// Adds these lanes' own knowledge to a bundle.
    fn fold(self, own: &Own, bundle: &mut Bundle) {
        bundle.started |= self.cta;
        bundle.generic.raise(self.agent(Kind::Generic), self.lanes, self.tick);
        for kind in ALL_KINDS {
            let (agent, at) = (self.agent(kind), kind as usize);
            bundle.generic.raise(agent, self.lanes, own.done[at]);
            bundle.async_shared.raise(agent, self.lanes, own.shared[at]);
            bundle.async_global.raise(agent, self.lanes, own.global[at]);
        }
        bundle.maps_released.raise(self.agent(Kind::Generic), self.lanes, own.maps);
    }
}

impl State {
    /// Release: adds all knowledge to `bundle`.
    pub(super) fn release(&self, party: Party, bundle: &mut Bundle) {
        bundle.join_memory(&self.known);
        party.fold(&self.own, bundle);
        for (level, released) in self.released.iter().enumerate() {
            if let Some(released) = released {
                let fenced = bundle.fenced[level].get_or_insert_with(Arc::default);
                released.publish(party, Arc::make_mut(fenced));
            }
        }
        self.release_tensor(party, bundle);
    }

    /// Release of an operation that orders execution only: adds events prepared by tcgen05 fences
    /// and `fence.mbarrier_init`, and events released by earlier fences.
    pub(super) fn release_relaxed(&self, party: Party, scope: Scope, bundle: &mut Bundle) {
        self.for_each_fenced(party, scope, |_, fenced| bundle.join_memory(fenced));
        bundle.started |= self.known.started | party.cta;
        bundle.executed.join(&self.known.generic);
        bundle.executed.join(&self.known.executed);
        let (agent, fenced) = (party.agent(Kind::BarrierInit), self.own.inits_fenced);
        bundle.generic.raise(agent, party.lanes, fenced);
        bundle.async_shared.raise(agent, party.lanes, fenced);
        self.release_tensor(party, bundle);
    }

    /// Calls `publish` with the releases of earlier fences, as a relaxed access of `scope` does.
    /// The first argument is the level of the narrower scope.
    pub(super) fn for_each_fenced(
        &self,
        party: Party,
        scope: Scope,
        mut publish: impl FnMut(usize, &Bundle),
    ) {
        let limit = level(scope);
        for (of, fenced) in self.known.fenced.iter().enumerate() {
            if let Some(fenced) = fenced {
                publish(of.min(limit), fenced);
            }
        }
        for (of, released) in self.released.iter().enumerate() {
            if let Some(released) = released {
                let mut bundle = Bundle::default();
                released.publish(party, &mut bundle);
                publish(of.min(limit), &bundle);
            }
        }
    }

    /// Adds unacquired reads to a barrier's bundle; a later fence of a waiting thread acquires
    /// them.
    pub(super) fn hand_on_reads(&self, bundle: &mut Bundle) {
        join_waiting(&mut bundle.read, &self.acquired);
    }

    pub(super) fn has_tensor_to_release(&self) -> bool {
        !self.tensor_before.is_empty() || !self.tensor_pending.is_empty()
    }

    pub(super) fn release_tensor(&self, party: Party, bundle: &mut Bundle) {
        for (kind, value) in MOVES.into_iter().zip(self.own.moves_fenced) {
            bundle.tensor.raise(party.agent(kind), party.lanes, value);
        }
        bundle.tensor.join(&self.tensor_before);
        bundle.tensor.join(&self.tensor_pending);
    }

    /// Drops the releases of fences, which the bundle of the passed barrier already contains.
    pub(super) fn forget_released(&mut self) {
        self.released = Default::default();
    }

    /// Whether a phase of an mbarrier is known to be complete, also from relaxed waits.
    pub(super) fn knows_phase(&self, agents: [Agent; 2], phases: u32) -> bool {
        let told = |bundle: &Bundle| {
            let tells = |clock: &Clock, agent| clock.knows(agent, ALL_LANES, phases);
            agents
                .iter()
                .any(|&agent| tells(&bundle.generic, agent) || tells(&bundle.executed, agent))
        };
        told(&self.known) || self.acquired.iter().flatten().any(|bundle| told(bundle))
    }

    pub(super) fn acquire(&mut self, bundle: &Bundle) {
        self.known.join_memory(bundle);
        self.tensor_pending.join(&bundle.tensor);
        join_waiting(&mut self.acquired, &bundle.read);
    }

    /// Relaxed read: a later fence may acquire the bundle.
    pub(super) fn acquire_relaxed(&mut self, bundle: &Bundle, distance: usize) {
        let waiting = self.acquired[distance].get_or_insert_with(Arc::default);
        Arc::make_mut(waiting).join_memory(bundle);
        self.known.started |= bundle.started;
        self.tensor_pending.join(&bundle.tensor);
    }

    /// A `fence` of a scope.
    pub(super) fn fence(&mut self, acquire: bool, release: bool, scope: Scope, tick: u32) {
        let level = level(scope);
        if acquire {
            for at in 0..=level {
                if let Some(waiting) = self.acquired[at].take() {
                    self.known.join_memory(&waiting);
                }
            }
        }
        if release {
            let known = Bundle {
                tensor: Clock::default(),
                fenced: Default::default(),
                ..self.known.clone()
            };
            self.released[level] = Some(Arc::new(Released { known, own: self.own, tick }));
        }
    }

    /// `fence.proxy.async`.
    pub(super) fn fence_proxy_async(&mut self, shared: bool, global: bool, tick: u32) {
        let mut own = self.own.done;
        own[Kind::Generic as usize] = tick;
        if shared {
            self.known.async_shared.join(&self.known.generic);
            self.own.shared = own;
        }
        if global {
            self.known.async_global.join(&self.known.generic);
            self.own.global = own;
        }
    }

    /// Merges the states of lanes that have met. The bundle of the meeting holds their releases.
    pub(super) fn merge(&mut self, other: &State) {
        self.own = self.own.common(&other.own);
        self.known.tensor.join(&other.known.tensor);
        self.tensor_before.join(&other.tensor_before);
        join_waiting(&mut self.acquired, &other.acquired);
    }
}

/// A location of strong accesses, with the knowledge released there.
#[derive(Clone, Debug, Default)]
pub(super) struct Exchange {
    entries: Vec<Published>,
}

#[derive(Clone, Debug)]
struct Published {
    level: usize,
    cluster: u32,
    rank: u32,
    bundle: Bundle,
}

impl Exchange {
    /// Drops all releases; called for a store.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }

    /// Returns the bundle of a CTA at a scope level.
    pub(super) fn bundle(&mut self, level: usize, cluster: u32, rank: u32) -> &mut Bundle {
        let same =
            |entry: &Published| (entry.level, entry.cluster, entry.rank) == (level, cluster, rank);
        let at = self.entries.iter().position(same).unwrap_or_else(|| {
            self.entries.push(Published { level, cluster, rank, bundle: Bundle::default() });
            self.entries.len() - 1
        });
        &mut self.entries[at].bundle
    }

    /// Returns the bundles visible to a reader of a CTA at a scope level, with their distances.
    pub(super) fn visible(
        &self,
        reads: usize,
        (cluster, rank): (u32, u32),
    ) -> impl Iterator<Item = (usize, &Bundle)> {
        self.entries.iter().filter_map(move |entry| {
            let distance =
                if entry.cluster != cluster { 2 } else { usize::from(entry.rank != rank) };
            (entry.level >= distance && reads >= distance).then_some((distance, &entry.bundle))
        })
    }
}
