//! Warps, and the synchronizing instructions of threads.

use super::clock::{ALL_LANES, Agent, KINDS, Kind};
use super::knowledge::{Bundle, MOVES, Party, State};
use super::operations::Streams;
use super::{
    HazardKind, Order, Place, Scope, Severity, StrongAccess, Thread, Tracker, Unit, WarpId,
    location_key,
};
use crate::place::TENSOR_LANES;

/// A warp, as groups of lanes with equal knowledge.
#[derive(Debug)]
pub(super) struct Warp {
    pub(super) cluster: u32,
    pub(super) rank: u32,
    /// Index in the cluster.
    pub(super) index: u32,
    /// Incremented at every release, to separate later events from released events.
    pub(super) tick: u32,
    pub(super) groups: Vec<(u32, State)>,
    pub(super) streams: Streams,
}

impl Warp {
    pub(super) fn new(cluster: u32, rank: u32, index: u32) -> Warp {
        let groups = vec![(ALL_LANES, State::default())];
        Warp { cluster, rank, index, tick: 1, groups, streams: Streams::default() }
    }

    pub(super) fn forget(&mut self) {
        self.groups = vec![(ALL_LANES, State::default())];
        self.streams = Streams::default();
    }

    pub(super) fn agent(&self, kind: Kind) -> Agent {
        Agent::new(self.cluster, self.index * KINDS as u32 + kind as u32)
    }

    pub(super) fn party(&self, lanes: u32) -> Party {
        let cta = 1 << (self.rank & 15);
        Party { agents: self.agent(Kind::Generic), lanes, tick: self.tick, cta }
    }

    /// Returns the agent of the MMAs of this warp's warp group.
    pub(super) fn warp_group_agent(&self, warps_per_cta: u32) -> Agent {
        let in_cta = self.index - self.rank * warps_per_cta;
        let first = self.index - in_cta % 4;
        Agent::new(self.cluster, first * KINDS as u32 + Kind::WarpGroup as u32)
    }

    /// Changes the state of `lanes`. Groups that take part only in part are split.
    pub(super) fn update(&mut self, lanes: u32, mut change: impl FnMut(u32, &mut State)) {
        for at in 0..self.groups.len() {
            let mask = self.groups[at].0;
            let taking = mask & lanes;
            if taking == 0 {
                continue;
            }
            if taking != mask {
                let rest = self.groups[at].1.clone();
                self.groups.push((mask & !lanes, rest));
                self.groups[at].0 = taking;
            }
            change(taking, &mut self.groups[at].1);
        }
    }

    /// Returns the state of a lane.
    pub(super) fn state(&self, lane: u32) -> &State {
        let group = self.groups.iter().find(|(mask, _)| mask >> lane & 1 == 1);
        &group.or(self.groups.first()).expect("a warp that runs has groups").1
    }

    /// Release by `lanes` to a bundle. Later events get a new tick.
    pub(super) fn release(&mut self, lanes: u32, bundle: &mut Bundle) {
        for (mask, state) in &self.groups {
            if mask & lanes != 0 {
                state.release(self.party(mask & lanes), bundle);
            }
        }
        self.tick += 1;
    }

    /// Release by an arrival at a barrier of the warp, the CTA or the cluster.
    fn release_to_barrier(&mut self, lanes: u32, bundle: &mut Bundle) {
        self.release(lanes, bundle);
        for (_, state) in self.groups.iter().filter(|(mask, _)| mask & lanes != 0) {
            state.hand_on_reads(bundle);
        }
    }

    pub(super) fn release_relaxed(&mut self, lanes: u32, bundle: &mut Bundle) {
        for (mask, state) in &self.groups {
            if mask & lanes != 0 {
                state.release_relaxed(self.party(mask & lanes), Scope::System, bundle);
            }
        }
    }

    fn acquire(&mut self, lanes: u32, bundle: &Bundle) {
        self.update(lanes, |_, state| state.acquire(bundle));
    }

    /// Merges lanes that have all released to `bundle` into one group, which acquires the bundle.
    fn meet(&mut self, lanes: u32, bundle: &Bundle) {
        let mut met: Option<State> = None;
        self.update(lanes, |_, state| match &mut met {
            None => met = Some(std::mem::take(state)),
            Some(met) => {
                met.merge(state);
            }
        });
        let Some(mut met) = met else { return };
        met.forget_released();
        met.acquire(bundle);
        self.groups.retain(|(mask, _)| mask & !lanes != 0);
        self.groups.push((lanes, met));
    }
}

/// Returns the kind for per-lane completion of `tcgen05.ld` or `.st`.
pub(super) fn lane_by_lane(kind: Kind) -> Kind {
    if kind == Kind::TensorLoad { Kind::TensorLoadLanes } else { Kind::TensorStoreLanes }
}

impl Tracker {
    pub(super) fn warp_mut(&mut self, warp: WarpId) -> &mut Warp {
        &mut self.warps[warp.0 as usize]
    }

    /// `bar.warp.sync`, called after all `lanes` have arrived.
    pub fn warp_barrier(&mut self, thread: Thread) {
        let warp = self.warp_mut(thread.warp);
        let mut bundle = Bundle::default();
        warp.release_to_barrier(thread.lanes, &mut bundle);
        warp.meet(thread.lanes, &bundle);
    }

    /// `bar.sync`, `bar.red` or `bar.arrive`: a warp arrives at barrier `barrier` of its CTA.
    pub fn barrier_arrive(&mut self, thread: Thread, barrier: u32) {
        let Tracker { warps, clusters, .. } = self;
        let warp = &mut warps[thread.warp.0 as usize];
        let named = &mut clusters[warp.cluster as usize].named;
        warp.release_to_barrier(thread.lanes, named.entry((warp.rank, barrier)).or_default());
    }

    /// Barrier `barrier` of a CTA completes. `waiters` are all arrived warps except those of
    /// `bar.arrive`.
    pub fn barrier_complete(&mut self, waiters: &[(WarpId, u32)], barrier: u32) {
        let Some((first, _)) = waiters.first() else { return };
        let (cluster, rank) = self.cta(*first);
        let named = &mut self.clusters[cluster as usize].named;
        let bundle = std::mem::take(named.entry((rank, barrier)).or_default());
        for (warp, lanes) in waiters {
            let lanes = self.lanes(*lanes);
            self.warp_mut(*warp).meet(lanes, &bundle);
        }
    }

    /// `barrier.cluster.arrive`; `release` is false for `.relaxed`.
    pub fn cluster_arrive(&mut self, thread: Thread, release: bool) {
        let Tracker { warps, clusters, rules, .. } = self;
        let warp = &mut warps[thread.warp.0 as usize];
        let bundle = &mut clusters[warp.cluster as usize].cluster_barrier.0;
        if release || !rules.relaxed_cluster_arrivals {
            warp.release_to_barrier(thread.lanes, bundle);
        } else {
            warp.release_relaxed(thread.lanes, bundle);
        }
    }

    /// Called when all threads of the cluster have arrived.
    pub fn cluster_complete(&mut self, cluster: u32) {
        let barrier = &mut self.clusters[cluster as usize].cluster_barrier;
        barrier.1 = std::mem::take(&mut barrier.0);
    }

    /// Called when `barrier.cluster.wait` returns.
    pub fn cluster_wait(&mut self, thread: Thread) {
        let Tracker { warps, clusters, .. } = self;
        let warp = &mut warps[thread.warp.0 as usize];
        warp.acquire(thread.lanes, &clusters[warp.cluster as usize].cluster_barrier.1);
    }

    /// `fence` and `membar`. `fence.sc` is treated as acquire and release: its total order only
    /// affects programs that communicate without atomics or barriers.
    pub fn fence(&mut self, thread: Thread, order: Order, scope: Scope) {
        let warp = self.warp_mut(thread.warp);
        let tick = warp.tick;
        warp.tick += 1;
        warp.update(thread.lanes, |_, state| {
            state.fence(order.acquires(), order.releases(), scope, tick);
        });
    }

    /// `fence.proxy.async` for shared memory, global memory or both.
    pub fn fence_proxy_async(&mut self, thread: Thread, shared: bool, global: bool) {
        let warp = self.warp_mut(thread.warp);
        let tick = warp.tick;
        warp.tick += 1;
        warp.update(thread.lanes, |_, state| {
            state.fence_proxy_async(shared, global, tick);
            state.own.inits_fenced = state.own.done[Kind::BarrierInit as usize];
        });
    }

    /// `fence.mbarrier_init.release.cluster`.
    pub fn fence_mbarrier_init(&mut self, thread: Thread) {
        self.warp_mut(thread.warp).update(thread.lanes, |_, state| {
            let inits = state.own.done[Kind::BarrierInit as usize];
            state.own.inits_fenced = inits;
            state.own.shared[Kind::BarrierInit as usize] = inits;
        });
    }

    /// `fence.proxy.tensormap::generic.release`, and the release of `tensormap.cp_fenceproxy` after
    /// its write. It is also a release fence.
    pub fn fence_tensor_map_release(&mut self, thread: Thread, scope: Scope) {
        let warp = self.warp_mut(thread.warp);
        let tick = warp.tick;
        warp.tick += 1;
        warp.update(thread.lanes, |_, state| {
            let Bundle { generic, maps_released, .. } = &mut state.known;
            maps_released.join(generic);
            state.own.maps = tick;
            state.fence(false, true, scope, tick);
        });
    }

    /// `fence.proxy.tensormap::generic.acquire [address], 128`.
    pub fn fence_tensor_map_acquire(&mut self, thread: Thread, address: u64, scope: Scope) {
        let warp = self.warp_mut(thread.warp);
        let agent = warp.agent(Kind::Generic);
        warp.update(thread.lanes, |lanes, state| {
            state.fence(true, false, scope, 0);
            // The lanes' own releases count as well.
            let mut known = state.known.maps_released.clone();
            known.raise(agent, lanes, state.own.maps);
            std::mem::swap(&mut state.known.maps_released, &mut known);
            state.known.acquire_map(address);
            state.known.maps_released = known;
        });
    }

    /// Synchronization by a strong access: `ld`/`st` with `.relaxed` (also `.volatile`), `.acquire`
    /// or `.release`, `atom`, `red`. Must be called for each lane, or for lanes with the same
    /// place.
    pub fn synchronize(
        &mut self,
        thread: Thread,
        place: Place,
        access: StrongAccess,
        order: Order,
        scope: Scope,
    ) {
        let Tracker { warps, locations, .. } = self;
        let warp = &mut warps[thread.warp.0 as usize];
        let cta = (warp.cluster, warp.rank);
        let key = location_key(warp.cluster, place);
        let reads = matches!(access, StrongAccess::Load | StrongAccess::Atomic);
        if let (true, Some(location)) = (reads, locations.get(&key)) {
            let scope_level = super::knowledge::level(scope);
            warp.update(thread.lanes, |_, state| {
                for (distance, bundle) in location.visible(scope_level, cta) {
                    if order.acquires() {
                        state.acquire(bundle);
                    } else {
                        state.acquire_relaxed(bundle, distance);
                    }
                }
            });
        }
        if access == StrongAccess::Load {
            return;
        }
        if access == StrongAccess::Store
            && let Some(location) = locations.get_mut(&key)
        {
            location.clear();
        }
        let scope_level = super::knowledge::level(scope);
        // A thread that reads from this access and acquires is ordered after the access itself,
        // even without a fence before the access: the last arriver at a counter may reset it.
        let strong = warp.agent(Kind::Strong);
        let location = locations.entry(key).or_default();
        let bundle = location.bundle(scope_level, cta.0, cta.1);
        bundle.generic.raise(strong, thread.lanes, warp.tick);
        for (mask, state) in &warp.groups {
            let lanes = mask & thread.lanes;
            if lanes == 0 {
                continue;
            }
            let party = warp.party(lanes);
            if order.releases() {
                let location = locations.entry(key).or_default();
                state.release(party, location.bundle(scope_level, cta.0, cta.1));
                continue;
            }
            state.for_each_fenced(party, scope, |level, fenced| {
                let location = locations.entry(key).or_default();
                location.bundle(level, cta.0, cta.1).join_memory(fenced);
            });
            if state.has_tensor_to_release() {
                let location = locations.entry(key).or_default();
                state.release_tensor(party, location.bundle(scope_level, cta.0, cta.1));
            }
        }
        warp.tick += 1;
    }

    /// `tcgen05.fence::before_thread_sync`.
    pub fn tensor_fence_before(&mut self, thread: Thread) {
        let warp = self.warp_mut(thread.warp);
        let issue = warp.agent(Kind::TensorIssue);
        let moves = MOVES.map(|kind| (warp.agent(kind), kind as usize));
        warp.update(thread.lanes, |lanes, state| {
            state.tensor_before.join(&state.known.tensor);
            state.tensor_before.raise(issue, lanes, state.own.done[Kind::TensorIssue as usize]);
            state.own.moves_fenced = MOVES.map(|kind| state.own.done[kind as usize]);
            // An earlier `bar.warp.sync` may have transferred the waits of all lanes.
            for (agent, kind) in moves {
                let done = state.own.done[kind];
                if state.known.generic.knows(agent, ALL_LANES, done) {
                    state.tensor_before.raise(agent, ALL_LANES, done);
                }
            }
        });
    }

    /// `tcgen05.fence::after_thread_sync`.
    pub fn tensor_fence_after(&mut self, thread: Thread) {
        self.warp_mut(thread.warp).update(thread.lanes, |_, state| {
            state.known.tensor.join(&state.tensor_pending);
        });
    }

    /// `tcgen05.wait::ld`.
    pub fn tensor_wait_load(&mut self, thread: Thread) {
        self.tensor_wait(thread, Kind::TensorLoad);
    }

    /// `tcgen05.wait::st`.
    pub fn tensor_wait_store(&mut self, thread: Thread) {
        self.tensor_wait(thread, Kind::TensorStore);
    }

    fn tensor_wait(&mut self, thread: Thread, kind: Kind) {
        let warp = self.warp_mut(thread.warp);
        let (agent, issued) = (warp.agent(kind), warp.streams.issued(kind));
        let lanes_kind = lane_by_lane(kind);
        warp.update(thread.lanes, |_, state| {
            state.known.tensor.raise(agent, ALL_LANES, issued);
            state.known.generic.raise(agent, ALL_LANES, issued);
            state.own.done[lanes_kind as usize] = issued;
        });
    }

    /// `tcgen05.dealloc` of columns of the warp's CTA. All uses of the columns must be known to be
    /// complete.
    pub fn tensor_free(&mut self, thread: Thread, columns: std::ops::Range<u32>) {
        let (_, rank) = self.cta(thread.warp);
        self.check_tensor_free(thread, rank, 0..TENSOR_LANES, columns);
    }

    /// Called when `griddepcontrol.wait` returns.
    pub fn grid_dependency_wait(&mut self, thread: Thread) {
        let agent = super::operations::PREVIOUS_GRID;
        self.warp_mut(thread.warp).update(thread.lanes, |_, state| {
            let known = &mut state.known;
            for clock in [
                &mut known.generic,
                &mut known.async_shared,
                &mut known.async_global,
                &mut known.maps_released,
            ] {
                clock.raise(agent, ALL_LANES, 1);
            }
        });
    }

    /// Returns cluster and rank of a warp's CTA.
    pub(super) fn cta(&self, warp: WarpId) -> (u32, u32) {
        let warp = &self.warps[warp.0 as usize];
        (warp.cluster, warp.rank)
    }

    pub(super) fn warns(&self) -> bool {
        self.rules.warnings
    }

    pub(super) fn report_pair(
        &mut self,
        kind: HazardKind,
        (earlier, earlier_write): ((WarpId, u32, u32, Unit), bool),
        (later, later_write): ((WarpId, u32, u32, Unit), bool),
        place: impl Into<Option<Place>>,
        missing: impl FnOnce() -> String,
    ) {
        if kind.severity() == Severity::Warning && !self.rules.warnings {
            return;
        }
        let access = |(warp, lanes, step, unit), write| super::Access {
            site: self.site(step),
            actor: self.actor(warp, lanes, unit),
            write,
        };
        let (earlier, later) = (access(earlier, earlier_write), access(later, later_write));
        self.hazards.add(kind, earlier, later, place.into(), missing);
    }
}
