//! Scheduler of warps, and progress when no warp can run.

use super::asynchronous;
use super::barrier::{ClusterBarrier, CtaBarriers};
use super::cluster::{Cluster, ClusterState, Cta};
use super::execute::{self, Turn};
use super::register_pool::RegisterPool;
use super::synchronize;
use super::warp::{Wait, Warp, lanes};
use super::world::World;
use crate::error::{EmulatorError, Fault, FaultReport, Waiter};
use crate::launch::Completion;
use crate::mbarrier::MbarrierTable;
use crate::memory::{SharedMemory, TensorMemory};
use crate::tcgen05::Allocator;

/// Instructions per turn of a warp.
const TURN: u32 = 1024;
/// Turns without a change of memory or barriers, after which pending operations complete for
/// polling warps.
const POLLS: u32 = 64;
/// Instructions without any change after which a launch counts as hung.
const HANG: u64 = 200_000_000;
/// Most consecutive rounds of [`POLLS`] turns in which all warps only polled.
const POLLS_HANG: u32 = 2_000;
/// How often `try_wait`s time out before the launch counts as deadlocked.
const EXPIRIES: u32 = 3;

/// Runs all clusters of the launch.
pub(crate) fn run(world: &mut World<'_>) -> Result<(), EmulatorError> {
    let places = world.shape.clusters_resident(world.settings);
    let mut resident: Vec<Cluster> = Vec::new();
    let mut pool: Vec<Warp> = Vec::new();
    let mut free: Vec<u32> = (0..places).rev().collect();
    let mut homes: Vec<u32> = Vec::new();
    let mut idle = 0u32;
    let mut expiries = 0;
    let mut polls = 0;
    let mut last_changes = world.changes;
    let mut last_change_at = 0;
    loop {
        while world.next_cluster < world.cluster_count
            && let Some(place) = free.pop()
        {
            let index = world.next_cluster;
            world.next_cluster += 1;
            resident.push(start(world, index, place, &mut pool));
            homes.push(place);
        }
        if resident.is_empty() {
            return Ok(());
        }
        let (mut ran, mut worked) = (false, false);
        for cluster in &mut resident {
            let turns = turn_of_cluster(cluster, world)?;
            ran |= turns.ran;
            worked |= turns.worked;
        }
        if world.settings.stop_at_hazard
            && world.tracker.as_ref().is_some_and(|tracker| !tracker.hazards().is_empty())
        {
            return Ok(());
        }
        let mut at = 0;
        while at < resident.len() {
            if !resident[at].done() {
                at += 1;
                continue;
            }
            let mut cluster = resident.swap_remove(at);
            free.push(homes.swap_remove(at));
            asynchronous::complete_all(&mut cluster.state, &mut cluster.warps, world)
                .map_err(|fault| located(fault, None, &cluster, world))?;
            world.cluster_gone(&cluster.state);
            pool.append(&mut cluster.warps);
            ran = true;
            world.changes += 1;
        }
        if world.instructions > world.settings.step_limit {
            return Err(EmulatorError::StepLimit {
                limit: world.settings.step_limit,
                waiters: waiters(&resident, world),
            });
        }
        let changed = world.changes != last_changes;
        if changed {
            (last_changes, last_change_at, idle, expiries) =
                (world.changes, world.instructions, 0, 0);
            polls = 0;
            continue;
        }
        idle += 1;
        if ran && idle < POLLS {
            continue;
        }
        // No warp can run, or the running warps only poll.
        idle = 0;
        let mut completed = false;
        for cluster in &mut resident {
            let waited = waited_for(cluster);
            completed |=
                asynchronous::complete_for(&mut cluster.state, &mut cluster.warps, world, &waited)
                    .map_err(|fault| located(fault, None, cluster, world))?;
        }
        if completed {
            continue;
        }
        if ran {
            polls = if worked { 0 } else { polls + 1 };
            if world.instructions - last_change_at > HANG || polls > POLLS_HANG {
                return Err(EmulatorError::Hang {
                    instructions: world.instructions - last_change_at,
                    waiters: waiters(&resident, world),
                });
            }
            continue;
        }
        let polls = expire(&mut resident);
        expiries += 1;
        if !polls || expiries > EXPIRIES {
            return Err(EmulatorError::Deadlock { waiters: waiters(&resident, world) });
        }
    }
}

fn start(world: &mut World<'_>, index: u64, place: u32, pool: &mut Vec<Warp>) -> Cluster {
    let shape = world.shape.clone();
    let position = shape.cluster_position(index);
    let count = shape.cluster_ctas();
    let mut warps = Vec::with_capacity((count * shape.warps()) as usize);
    let mut ctas = Vec::with_capacity(count as usize);
    for rank in 0..count {
        for warp in 0..shape.warps() {
            warps.push(match pool.pop() {
                Some(mut old) => {
                    old.restart(rank, warp, shape.block);
                    old
                }
                None => Warp::new(world.program, rank, warp, shape.block),
            });
        }
        ctas.push(Cta {
            position: shape.cta_position(position, rank),
            sm_id: (place * count + rank) % world.settings.sm_count,
            shared: SharedMemory::new(shape.shared_bytes),
            tensor: TensorMemory::new(),
            barriers: CtaBarriers::default(),
            live_threads: shape.threads(),
            allocator: Allocator::new(),
            tensor_frees: 0,
            tensor_asked: None,
            tensor_granted: None,
            warp_groups: Default::default(),
            launch_control_failed: false,
            registers: RegisterPool::new(shape.launch_registers, shape.warps()),
        });
    }
    let mut state = ClusterState {
        position,
        ctas,
        number: index,
        place,
        barriers: MbarrierTable::new(count),
        barrier: ClusterBarrier::default(),
        queue: asynchronous::Queue::new(count),
        tracked: 0,
    };
    world.cluster_starts(&mut state);
    world.counts.ctas += u64::from(count);
    Cluster { warps, state }
}

/// Activity of a cluster's warps in one round.
struct Turns {
    /// Some warp ran.
    ran: bool,
    /// Some warp did more than poll.
    worked: bool,
}

/// Gives each warp of a cluster a turn.
fn turn_of_cluster(cluster: &mut Cluster, world: &mut World<'_>) -> Result<Turns, EmulatorError> {
    let count = cluster.warps.len();
    let lazy = matches!(world.settings.completion, Completion::Lazy { .. });
    let first = if lazy { world.random.below(count) } else { 0 };
    let mut turns = Turns { ran: false, worked: false };
    for step in 0..count {
        let at = (first + step) % count;
        let Cluster { warps, state } = &mut *cluster;
        let warp = &mut warps[at];
        if warp.done() || !synchronize::wake(warp, state, world) {
            continue;
        }
        let budget = if lazy { 1 + world.random.below(TURN as usize) as u32 } else { TURN };
        let before = world.instructions;
        let result = execute::run(warp, state, world, budget);
        warp.expire = false;
        let turn = match result {
            Ok(turn) => turn,
            Err(fault) => return Err(located(fault, Some(at), cluster, world)),
        };
        turns.ran |= turn != Turn::Blocked || world.instructions > before + 1;
        turns.worked |= turn == Turn::Over;
        if lazy && world.random.below(4) == 0 {
            let Cluster { warps, state } = &mut *cluster;
            asynchronous::complete_random(state, warps, world)
                .map_err(|fault| located(fault, None, cluster, world))?;
        }
    }
    Ok(turns)
}

/// Returns the mbarriers for which lanes of a cluster wait.
fn waited_for(cluster: &Cluster) -> Vec<(u32, u32)> {
    let mut found = Vec::new();
    for warp in &cluster.warps {
        for parked in &warp.parked {
            if let Wait::Mbarrier { rank, offset, .. } = parked.wait {
                found.push((rank, offset));
            }
        }
    }
    found
}

/// Makes every pending `try_wait` time out. Returns false if no `try_wait` is pending.
fn expire(resident: &mut [Cluster]) -> bool {
    let mut any = false;
    for cluster in resident {
        for warp in &mut cluster.warps {
            let polls = |parked: &super::warp::Parked| matches!(parked.wait, Wait::Mbarrier { .. });
            warp.expire = warp.parked.iter().any(polls);
            any |= warp.expire;
        }
    }
    any
}

/// Returns all waiting lanes and the reasons.
fn waiters(resident: &[Cluster], world: &World<'_>) -> Vec<Waiter> {
    let mut all = Vec::new();
    for cluster in resident {
        for warp in &cluster.warps {
            let mut add = |lanes_waiting: u32, pc: u32, what: String| {
                let step = world.program.steps.get(pc as usize);
                all.push(Waiter {
                    cta: cluster.state.ctas[warp.rank as usize].position,
                    warp: warp.index,
                    lanes: lanes_waiting,
                    ptx_line: step.map_or(0, |step| step.ptx_line),
                    source: step.and_then(|step| step.source),
                    what,
                });
            };
            for parked in &warp.parked {
                let what = synchronize::describe(&parked.wait, warp, &cluster.state);
                add(parked.lanes, parked.pc, what);
            }
            let running = warp.alive & !warp.blocked;
            if let Some(lane) = lanes(running).next() {
                let pc = if warp.active >> lane & 1 == 1 { warp.pc } else { warp.pcs[lane] };
                add(running, pc, "nothing: it runs".to_owned());
            }
        }
    }
    all
}

/// Adds the location to a fault.
fn located(
    fault: Fault,
    warp: Option<usize>,
    cluster: &Cluster,
    world: &World<'_>,
) -> EmulatorError {
    let warp = warp.map(|at| &cluster.warps[at]);
    let step = warp.and_then(|warp| world.program.steps.get(warp.pc as usize));
    let (ptx_line, source) = match world.operation {
        Some(pc) if warp.is_none() => {
            let step = world.program.steps.get(pc as usize);
            (step.map_or(0, |step| step.ptx_line), step.and_then(|step| step.source))
        }
        _ => (step.map_or(0, |step| step.ptx_line), step.and_then(|step| step.source)),
    };
    let lane = world.lane.or_else(|| warp.map(|warp| warp.active.trailing_zeros() as usize % 32));
    let rank = warp.map_or(0, |warp| warp.rank as usize);
    EmulatorError::Fault(Box::new(FaultReport {
        fault,
        kernel: world.program.name.clone(),
        ptx_line,
        source,
        cta: cluster.state.ctas[rank].position,
        thread: warp.zip(lane).map(|(warp, lane)| warp.threads[lane].map(u32::from)),
    }))
}
