//! What a thread knows, and what synchronization hands on.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Scope;
use super::clock::{ALL_KINDS, Agent, Clock, KINDS, Kind};

/// What is known, in the parts that different fences make. Handed from thread to thread.
#[derive(Clone, Debug, Default)]
pub(super) struct Bundle {
    /// What happened before, for the generic proxy and for threads.
    pub(super) generic: Clock,
    /// What happened before `fence.proxy.async` for shared memory.
    pub(super) async_shared: Clock,
    /// The same for global memory.
    pub(super) async_global: Clock,
    /// What happened before a release of tensor maps.
    pub(super) maps_released: Clock,
    /// What of that has been acquired, by the address of the map.
    pub(super) maps_acquired: Option<Arc<BTreeMap<u64, Clock>>>,
    /// What tcgen05 operations that follow are ordered after. In a bundle that is handed on: what
    /// came before `tcgen05.fence::before_thread_sync`.
    pub(super) tensor: Clock,
    /// CTAs of the cluster that are known to run, one bit each.
    pub(super) started: u16,
    /// What other threads released by fences, by scope. A relaxed access after a barrier hands it
    /// on: `st`, `__threadfence()`, `__syncthreads()`, then an atomic of one thread.
    fenced: [Option<Arc<Bundle>>; 3],
    /// What relaxed reads of other threads brought, by where it came from. A fence after a barrier
    /// acquires it: an atomic of one thread, `__syncthreads()`, then `__threadfence()` of all.
    /// Only barriers hand it on.
    read: Waiting,
}

/// What relaxed reads brought and no fence has acquired, by where it came from: the same CTA,
/// the same cluster, elsewhere.
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
    /// All but the tensor part, and what waits for a fence.
    pub(super) fn join_memory(&mut self, other: &Bundle) {
        self.started |= other.started;
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

/// What each of some lanes knows of itself. It becomes part of a clock when it is handed on, with
/// the mask of the lanes that do so: lanes do not know of each other.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Own {
    /// Own operations that are complete; ticks of loads and stores are known by program order.
    pub(super) done: [u32; KINDS],
    /// What of it `fence.proxy.async` came after, for shared memory.
    pub(super) shared: [u32; KINDS],
    /// The same for global memory.
    pub(super) global: [u32; KINDS],
    /// Ticks before the last release of tensor maps.
    pub(super) maps: u32,
    /// `mbarrier.init`s before the last `fence.mbarrier_init`.
    pub(super) inits_fenced: u32,
    /// Own `tcgen05.ld`s and `.st`s that were over before `tcgen05.fence::before_thread_sync`.
    pub(super) moves_fenced: [u32; 2],
}

/// The kinds of [`Own::moves_fenced`].
pub(super) const MOVES: [Kind; 2] = [Kind::TensorLoadLanes, Kind::TensorStoreLanes];

impl Own {
    /// What holds for two sets of lanes.
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

/// What a fence with release made ready for relaxed accesses to hand on.
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

/// State of lanes that know the same.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub(super) known: Bundle,
    pub(super) own: Own,
    /// What synchronization brought for tcgen05, not yet behind `fence::after_thread_sync`.
    pub(super) tensor_pending: Clock,
    /// What came before `fence::before_thread_sync`.
    pub(super) tensor_before: Clock,
    /// By the scope of the fence: CTA, cluster, device.
    released: [Option<Arc<Released>>; 3],
    /// What relaxed reads brought and no fence has acquired.
    acquired: Waiting,
}

/// A scope as an index.
pub(super) fn level(scope: Scope) -> usize {
    match scope {
        Scope::Cta => 0,
        Scope::Cluster => 1,
        Scope::Device | Scope::System => 2,
    }
}

/// Lanes of a warp that hand something on, or get it.
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

    /// Adds to a bundle what these lanes know of themselves.
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
    /// A release: all that is known goes into `bundle`.
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

    /// An operation that orders execution only: what tcgen05 fences and `fence.mbarrier_init`
    /// made ready, and what an earlier fence of at least this scope released.
    pub(super) fn release_relaxed(&self, party: Party, scope: Scope, bundle: &mut Bundle) {
        self.for_each_fenced(party, scope, |_, fenced| bundle.join_memory(fenced));
        bundle.started |= self.known.started | party.cta;
        let (agent, fenced) = (party.agent(Kind::BarrierInit), self.own.inits_fenced);
        bundle.generic.raise(agent, party.lanes, fenced);
        bundle.async_shared.raise(agent, party.lanes, fenced);
        self.release_tensor(party, bundle);
    }

    /// What a relaxed access of `scope` hands on, with the level of scope that results.
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

    /// What a barrier hands on beside a release: reads that a fence of whoever goes on acquires.
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

    /// After a release of all lanes that is known to them again: what fences released is in the
    /// bundle, and need not be handed on twice.
    pub(super) fn forget_released(&mut self) {
        self.released = Default::default();
    }

    pub(super) fn acquire(&mut self, bundle: &Bundle) {
        self.known.join_memory(bundle);
        self.tensor_pending.join(&bundle.tensor);
        join_waiting(&mut self.acquired, &bundle.read);
    }

    /// A relaxed read: a fence may acquire it later.
    pub(super) fn acquire_relaxed(&mut self, bundle: &Bundle, distance: usize) {
        let waiting = self.acquired[distance].get_or_insert_with(Arc::default);
        Arc::make_mut(waiting).join_memory(bundle);
        self.known.started |= bundle.started;
        self.tensor_pending.join(&bundle.tensor);
    }

    /// `fence` of a scope.
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

    /// What lanes know that have just met, the bundle holding what each of them released.
    pub(super) fn merge(&mut self, other: &State) {
        self.own = self.own.common(&other.own);
        self.known.tensor.join(&other.known.tensor);
        self.tensor_before.join(&other.tensor_before);
        join_waiting(&mut self.acquired, &other.acquired);
    }
}

/// A location of strong accesses, with what was released there.
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
    /// A plain store ends what came before.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }

    /// What a CTA released at a level.
    pub(super) fn bundle(&mut self, level: usize, cluster: u32, rank: u32) -> &mut Bundle {
        let same =
            |entry: &Published| (entry.level, entry.cluster, entry.rank) == (level, cluster, rank);
        let at = self.entries.iter().position(same).unwrap_or_else(|| {
            self.entries.push(Published { level, cluster, rank, bundle: Bundle::default() });
            self.entries.len() - 1
        });
        &mut self.entries[at].bundle
    }

    /// What a reader of a place and scope gets, with the distance that it came.
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
