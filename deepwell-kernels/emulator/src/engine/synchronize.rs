//! Barriers of CTAs and clusters, mbarriers and fences.

use super::access::{address_of, shared_place};
use super::cluster::ClusterState;
use super::execute::{Gathered, Next, gather_lanes};
use super::track::order_of;
use super::warp::{Wait, Warp, lanes};
use super::world::World;
use crate::decode::{
    Barrier64, BarrierAction, CtaBarrier, Fence, Instruction, Mbarrier, MbarrierPhase, Scope,
    Semantics, Space,
};
use crate::error::Fault;
use crate::hazard::Lanes;
use crate::mbarrier::{MbarrierTable, PhaseTest};
use crate::observe::{Event, Phase};

/// Executes a synchronizing instruction.
pub(crate) fn run(
    instruction: &Instruction,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    match instruction {
        Instruction::Barrier(barrier) => cta_barrier(barrier, warp, cluster, world, mask),
        Instruction::ClusterArrive { relaxed, aligned } => {
            if *aligned && gather_lanes(warp, world, mask, warp.alive) == Gathered::Parked {
                return Ok(Next::Select);
            }
            if warp.cluster_arrived & mask != 0 {
                return Err(Fault::new(
                    "cluster-barrier-arrived-twice",
                    "`barrier.cluster.arrive` after an arrival without `barrier.cluster.wait`",
                ));
            }
            let use_of = cluster.barrier.generation;
            world.observe(warp, cluster, Event::ClusterArrival(use_of));
            world.cluster_arrives(warp, cluster, mask, *relaxed);
            let live = cluster.live_threads();
            let generation = cluster.barrier.arrive(mask.count_ones(), live);
            if cluster.barrier.generation > generation {
                world.cluster_passed(cluster);
            }
            for lane in lanes(mask) {
                warp.cluster_arrival[lane] = generation;
            }
            warp.cluster_arrived |= mask;
            world.changes += 1;
            Ok(Next::Advance)
        }
        Instruction::ClusterWait { aligned, .. } => {
            if *aligned && gather_lanes(warp, world, mask, warp.alive) == Gathered::Parked {
                return Ok(Next::Select);
            }
            if warp.cluster_arrived & mask != mask {
                return Err(Fault::new(
                    "cluster-barrier-wait-without-arrival",
                    "`barrier.cluster.wait` without `barrier.cluster.arrive` before",
                ));
            }
            let generation =
                lanes(mask).map(|lane| warp.cluster_arrival[lane]).max().unwrap_or_default();
            if cluster.barrier.generation > generation {
                warp.cluster_arrived &= !mask;
                world.observe(warp, cluster, Event::ClusterWait(generation));
                world.cluster_waited(warp, cluster, mask);
                return Ok(Next::Advance);
            }
            warp.spread();
            super::control::leave(warp, mask);
            let pc = warp.pc;
            warp.park(mask, pc, Wait::Cluster { generation }, world.instructions);
            Ok(Next::Select)
        }
        Instruction::Mbarrier(operation) => mbarrier(operation, warp, cluster, world, mask),
        _ => Ok(Next::Advance),
    }
}

fn cta_barrier(
    barrier: &CtaBarrier,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    if barrier.aligned && gather_lanes(warp, world, mask, warp.alive) == Gathered::Parked {
        return Ok(Next::Select);
    }
    let first = mask.trailing_zeros() as usize;
    let name = warp.registers.lane(barrier.barrier, first) as u32;
    let count = barrier.threads.map(|threads| warp.registers.lane(threads, first) as u32);
    let same =
        |source, value| lanes(mask).all(|lane| warp.registers.lane(source, lane) as u32 == value);
    if !same(barrier.barrier, name) || !barrier.threads.is_none_or(|t| same(t, count.unwrap_or(0)))
    {
        return Err(Fault::new(
            "barrier-operands-differ",
            "lanes of a warp come to one `barrier` with different names or counts",
        ));
    }
    let predicates = match barrier.action {
        BarrierAction::CountPredicates { predicate, .. }
        | BarrierAction::CombinePredicates { predicate, .. } => {
            let truths = (warp.registers.predicate(predicate) & mask).count_ones();
            (truths, mask.count_ones() - truths)
        }
        BarrierAction::Sync | BarrierAction::Arrive => (0, 0),
    };
    // With an explicit thread count, a warp counts as 32 threads even if lanes have exited.
    let arriving = if count.is_some() && barrier.aligned { 32 } else { mask.count_ones() };
    let waits = barrier.action != BarrierAction::Arrive;
    world.barrier_arrives(warp, cluster, mask, name);
    let cta = &mut cluster.ctas[warp.rank as usize];
    if waits {
        cta.barriers.waits(name, warp.index, mask);
    }
    let live = cta.live_threads;
    let (generation, over) = cta.barriers.arrive(name, arriving, count, predicates, live)?;
    world.observe(warp, cluster, Event::BarrierArrival { name, generation, waits });
    world.changes += 1;
    if over {
        world.barrier_completes(cluster, warp.rank, name);
    }
    if !waits {
        return Ok(Next::Advance);
    }
    if over {
        finish_barrier(warp, cluster, name, generation, barrier.action, mask);
        return Ok(Next::Advance);
    }
    warp.spread();
    super::control::leave(warp, mask);
    let wait = Wait::CtaBarrier { barrier: name, generation, action: barrier.action };
    let next = warp.pc + 1;
    warp.park(mask, next, wait, world.instructions);
    Ok(Next::Select)
}

/// Writes the result of a CTA barrier to the waiting lanes.
fn finish_barrier(
    warp: &mut Warp,
    cluster: &ClusterState,
    name: u32,
    generation: u64,
    action: BarrierAction,
    mask: u32,
) {
    let cta = &cluster.ctas[warp.rank as usize];
    let (truths, lies) = cta.barriers.predicates(name, generation);
    match action {
        BarrierAction::CountPredicates { destination, .. } => {
            warp.registers.set_row32(destination, &[truths; 32], mask);
        }
        BarrierAction::CombinePredicates { all, destination, .. } => {
            let value = if all { lies == 0 } else { truths > 0 };
            warp.registers.set_predicate(destination, if value { u32::MAX } else { 0 }, mask);
        }
        BarrierAction::Sync | BarrierAction::Arrive => {}
    }
}

/// Wakes the lanes of a warp whose wait is over. Returns whether any lane can run.
pub(crate) fn wake(warp: &mut Warp, cluster: &ClusterState, world: &mut World<'_>) -> bool {
    if warp.parked.is_empty() {
        return !warp.done();
    }
    let mut index = 0;
    let mut woken = false;
    while index < warp.parked.len() {
        let parked = &warp.parked[index];
        let over = match &parked.wait {
            Wait::Lanes { .. } | Wait::WarpBarrier { .. } => false,
            Wait::CtaBarrier { barrier, generation, .. } => {
                cluster.ctas[warp.rank as usize].barriers.is_over(*barrier, *generation)
            }
            Wait::Cluster { generation } => cluster.barrier.generation > *generation,
            Wait::Mbarrier { rank, offset, phase, .. } => {
                warp.expire
                    || cluster.barriers.get(*rank, *offset).is_none_or(|b| b.phase() != *phase)
            }
            Wait::Wgmmas { wgmmas } => {
                let groups = &cluster.ctas[warp.rank as usize].warp_groups;
                groups.are_complete(warp.index, *wgmmas)
            }
            Wait::Registers { count } => {
                cluster.ctas[warp.rank as usize].registers.has(warp.index, *count)
            }
            Wait::TensorColumns { frees } => cluster.tensor_frees(warp.rank) != *frees,
        };
        if !over {
            index += 1;
            continue;
        }
        let parked = warp.parked.swap_remove(index);
        world.waited(warp.index, parked.pc, parked.since);
        if let Wait::CtaBarrier { barrier, generation, action } = parked.wait {
            finish_barrier(warp, cluster, barrier, generation, action, parked.lanes);
        }
        warp.blocked &= !parked.lanes;
        woken = true;
    }
    if woken {
        // Select again, because woken lanes may be further behind.
        warp.spread();
        warp.active = 0;
    }
    warp.alive & !warp.blocked != 0
}

/// Returns rank and offset of a lane's mbarrier.
fn barrier_place(
    warp: &Warp,
    world: &World<'_>,
    barrier: &Barrier64,
    lane: usize,
) -> Result<(u32, u32), Fault> {
    let address = address_of(warp, barrier.space, &barrier.address, lane);
    shared_place(warp, world, barrier.space, address)
}

/// `expect_tx` and `complete_tx` are relaxed: neither orders other accesses.
const RELAXED: (Semantics, Scope) = (Semantics::Relaxed, Scope::Cluster);

fn mbarrier(
    operation: &Mbarrier,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    match operation {
        Mbarrier::Wait { barrier, destination, phase, may_block, semantics, scope } => {
            let mut done = 0;
            let mut missed = None;
            for lane in lanes(mask) {
                world.lane = Some(lane);
                let (rank, offset) = barrier_place(warp, world, barrier, lane)?;
                if rank != warp.rank {
                    return Err(Fault::new(
                        "mbarrier-wait-for-another-cta",
                        format!("a wait for an mbarrier of CTA {rank}: only its own threads may"),
                    ));
                }
                let test = match phase {
                    MbarrierPhase::State(state) => {
                        PhaseTest::State(warp.registers.lane(*state, lane))
                    }
                    MbarrierPhase::Parity(parity) => {
                        PhaseTest::Parity(warp.registers.lane(*parity, lane) as u32)
                    }
                };
                if cluster.barriers.test(rank, offset, test)? {
                    done |= 1 << lane;
                    if let PhaseTest::Parity(parity) = test {
                        world.counts.parities[warp.pc as usize] |= 1 << parity;
                    }
                    let phases = cluster.barriers.get(rank, offset).map_or(0, |of| of.phase());
                    let phase = phases.checked_sub(1);
                    let seen = phase.map(|phase| Phase { rank, offset, phase });
                    world.observe(warp, cluster, Event::Wait(seen));
                    let order = (*semantics, *scope);
                    world.mbarrier_waited(warp, cluster, 1 << lane, (rank, offset), order);
                } else if missed.is_none() {
                    let of = cluster.barriers.get(rank, offset);
                    let current = of.map_or(0, |of| of.phase());
                    let parity = match test {
                        PhaseTest::Parity(parity) => parity,
                        PhaseTest::State(_) => (current & 1) as u32,
                    };
                    missed = Some(Wait::Mbarrier { rank, offset, phase: current, parity });
                }
            }
            world.lane = None;
            world.counts.mbarrier_tests += 1;
            if let Some(wait) = missed
                && *may_block
                && done == 0
                && !warp.expire
            {
                warp.spread();
                super::control::leave(warp, mask);
                let pc = warp.pc;
                warp.park(mask, pc, wait, world.instructions);
                return Ok(Next::Select);
            }
            warp.registers.set_predicate(*destination, done, mask);
            return Ok(if done == mask { Next::Advance } else { Next::Yield });
        }
        Mbarrier::PendingCount { destination, state } => {
            for lane in lanes(mask) {
                let count = MbarrierTable::pending_count(warp.registers.lane(*state, lane))?;
                warp.registers.set_lane(*destination, lane, u64::from(count));
            }
            return Ok(Next::Advance);
        }
        _ => {}
    }
    world.changes += 1;
    let as_one_thread = world.settings.rules.lanes == Lanes::AsOneThread;
    let mut made = Vec::new();
    for lane in lanes(mask) {
        world.lane = Some(lane);
        let value = |source| warp.registers.lane(source, lane) as u32;
        match operation {
            Mbarrier::Init { barrier, count } => {
                let (rank, offset) = barrier_place(warp, world, barrier, lane)?;
                let count = value(*count);
                // Lanes that count as one thread initialize an mbarrier once.
                if as_one_thread && made.contains(&(rank, offset, count)) {
                    continue;
                }
                made.push((rank, offset, count));
                super::access::live_rank(cluster, warp.rank, rank)?;
                cluster.ctas[rank as usize].shared.write(offset, 8)?;
                world.mbarrier_init(warp, cluster, 1 << lane, (rank, offset));
                cluster.barriers.init(rank, offset, count)?;
            }
            Mbarrier::Invalidate { barrier } => {
                let (rank, offset) = barrier_place(warp, world, barrier, lane)?;
                world.mbarrier_inval(warp, cluster, 1 << lane, (rank, offset));
                cluster.barriers.inval(rank, offset)?;
                cluster.ctas[rank as usize].shared.poison(offset, 8)?;
            }
            Mbarrier::ExpectTransaction { barrier, bytes } => {
                let (rank, offset) = barrier_place(warp, world, barrier, lane)?;
                super::access::live_rank(cluster, warp.rank, rank)?;
                let arrival = cluster.barriers.expect_tx(rank, offset, value(*bytes))?;
                world.mbarrier_arrived(warp, cluster, 1 << lane, (rank, offset), arrival, RELAXED);
            }
            Mbarrier::CompleteTransaction { barrier, bytes } => {
                let (rank, offset) = barrier_place(warp, world, barrier, lane)?;
                super::access::live_rank(cluster, warp.rank, rank)?;
                let arrival = cluster.barriers.complete_tx(rank, offset, value(*bytes))?;
                world.mbarrier_arrived(warp, cluster, 1 << lane, (rank, offset), arrival, RELAXED);
            }
            Mbarrier::Arrive {
                barrier,
                state,
                count,
                expect_bytes,
                drop,
                no_complete,
                semantics,
                scope,
            } => {
                let (rank, offset) = barrier_place(warp, world, barrier, lane)?;
                super::access::live_rank(cluster, warp.rank, rank)?;
                let count = count.map_or(1, value);
                let bytes = expect_bytes.map(value);
                let table = &mut cluster.barriers;
                let arrival = match (drop, bytes) {
                    (true, bytes) => {
                        table.arrive_drop(rank, offset, count, bytes.unwrap_or(0), *no_complete)?
                    }
                    (false, Some(bytes)) => table.arrive_expect_tx(rank, offset, bytes)?,
                    (false, None) => table.arrive(rank, offset, count, *no_complete)?,
                };
                world.mbarrier_arrived(
                    warp,
                    cluster,
                    1 << lane,
                    (rank, offset),
                    arrival,
                    (*semantics, *scope),
                );
                if let Some(state) = state {
                    warp.registers.set_lane(*state, lane, arrival.state);
                }
            }
            Mbarrier::Wait { .. } | Mbarrier::PendingCount { .. } => {}
        }
    }
    world.lane = None;
    Ok(Next::Advance)
}

/// Describes a wait for reports.
pub(crate) fn describe(wait: &Wait, warp: &Warp, cluster: &ClusterState) -> String {
    match wait {
        Wait::Lanes { needed } => {
            format!("lanes {needed:#010x} of its warp, which must run this instruction together")
        }
        Wait::WarpBarrier { needed } => {
            format!("lanes {needed:#010x} of its warp, at `bar.warp.sync`")
        }
        Wait::CtaBarrier { barrier, .. } => {
            let cta = &cluster.ctas[warp.rank as usize];
            let lacks = cta.barriers.lacks(*barrier);
            let of = lacks.expected.unwrap_or(cta.live_threads);
            format!("barrier {barrier} of the CTA: {} of {of} threads are there", lacks.arrived)
        }
        Wait::Cluster { .. } => format!(
            "the cluster's barrier: {} of {} threads are there",
            cluster.barrier.arrived(),
            cluster.live_threads()
        ),
        Wait::Mbarrier { rank, offset, parity, .. } => {
            cluster.barriers.describe_wait(*rank, *offset, *parity)
        }
        Wait::Wgmmas { .. } => "`wgmma`s of other warps of its warp group".to_owned(),
        Wait::Registers { count } => {
            cluster.ctas[warp.rank as usize].registers.describe(warp.index, *count)
        }
        Wait::TensorColumns { .. } => "columns of tensor memory that nobody frees".to_owned(),
    }
}

/// Executes fences. Memory is sequentially consistent, so that fences only affect the tracker.
pub(crate) fn fence(
    fence: &Fence,
    warp: &mut Warp,
    cluster: &ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    if let Fence::TensorMapAcquire { address, .. } = fence {
        for lane in lanes(mask) {
            let at = address_of(warp, Space::Generic, address, lane);
            if !at.is_multiple_of(128) {
                return Err(Fault::new(
                    "tensor-map-misaligned",
                    format!("a tensor map is 128-byte aligned, got {at:#x}"),
                ));
            }
        }
    }
    let Some(thread) = world.thread(warp, cluster, mask) else { return Ok(Next::Advance) };
    let Some(tracker) = &mut world.tracker else { return Ok(Next::Advance) };
    match fence {
        Fence::Thread { semantics, scope } => tracker.fence(thread, order_of(*semantics), *scope),
        Fence::SyncRestrict { semantics, scope, async_generic } => {
            tracker.fence(thread, order_of(*semantics), *scope);
            if *async_generic {
                tracker.fence_proxy_async(thread, true, false);
            }
        }
        Fence::MbarrierInit => tracker.fence_mbarrier_init(thread),
        Fence::ProxyAlias => {}
        Fence::ProxyAsync { space } => {
            let shared = !matches!(space, Some(Space::Global));
            let global = matches!(space, None | Some(Space::Global | Space::Generic));
            tracker.fence_proxy_async(thread, shared, global);
        }
        Fence::TensorMapRelease { scope } => tracker.fence_tensor_map_release(thread, *scope),
        Fence::TensorMapAcquire { scope, address, .. } => {
            for lane in lanes(mask) {
                let thread = tracker.thread(thread.warp, 1 << lane, thread.step);
                let at = address_of(warp, Space::Generic, address, lane);
                tracker.fence_tensor_map_acquire(thread, at, *scope);
            }
        }
    }
    Ok(Next::Advance)
}
