//! Asynchronous operations: the cluster's queue, and `cp.async` of single lanes.

use std::collections::VecDeque;

use super::access::{Where, address_of, global_place, live_rank, locate, own_shared, shared_place};
use super::cluster::ClusterState;
use super::copy::{self, Copy};
use super::execute::Next;
use super::landing;
use super::matrix::complete_first_wgmma;
use super::reach::Reach;
use super::tensor::TensorWork;
use super::warp::{LaneCopy, LaneCopyKind, Warp, lanes};
use super::world::World;
use crate::decode::{Instruction, Space};
use crate::error::Fault;
use crate::hazard::{Group, Unit};
use crate::launch::Completion;
use crate::place::{Memory, Place};

/// A bulk operation that has not run yet.
#[derive(Debug)]
pub(crate) struct Pending {
    /// Rank and warp of the issuing thread.
    pub(crate) warp: (u32, u32),
    pub(crate) lane: usize,
    /// Position in the program.
    pub(crate) pc: u32,
    /// Bulk group, if the operation completes by groups.
    pub(crate) group: Option<u32>,
    /// The mbarrier on which the operation completes, if any.
    pub(crate) barrier: Option<(u32, u32)>,
    pub(crate) copy: Copy,
    /// Identity for the tracker.
    pub(crate) tracked: super::track::Tracked,
}

/// Pending operations of a cluster.
#[derive(Debug)]
pub(crate) struct Queue {
    /// Bulk operations, unordered.
    pub(crate) bulk: Vec<Pending>,
    /// Operations of each CTA's tensor core, in order.
    pub(crate) tensor: Vec<VecDeque<TensorWork>>,
}

impl Queue {
    pub(crate) fn new(ctas: u32) -> Queue {
        Queue { bulk: Vec::new(), tensor: (0..ctas).map(|_| VecDeque::new()).collect() }
    }
}

/// Executes an instruction of this module or of [`copy`].
pub(crate) fn run(
    instruction: &Instruction,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    match instruction {
        Instruction::CopyAsync { target, source, bytes, source_bytes, ignore_source } => {
            let ignored = ignore_source.map_or(0, |source| warp.registers.predicate(source));
            let tracked = world.issued(warp, cluster, mask, Unit::CopyAsync);
            for lane in lanes(mask) {
                world.lane = Some(lane);
                let (rank, offset) =
                    own_shared(warp, address_of(warp, Space::Shared, target, lane))?;
                let from = address_of(warp, Space::Global, source, lane);
                let from = global_place(warp, world, Space::Global, from)?;
                let given = source_bytes.map_or(*bytes, |of| warp.registers.lane(of, lane) as u32);
                let given = if ignored >> lane & 1 == 1 { 0 } else { given };
                if given > *bytes {
                    return Err(Fault::new(
                        "copy-async-source-size",
                        format!("`cp.async` of {bytes} bytes with a source of {given}"),
                    ));
                }
                if offset % bytes != 0 || from % u64::from(*bytes) != 0 {
                    return Err(Fault::new(
                        "misaligned-address",
                        format!(
                            "`cp.async` of {bytes} bytes from {from:#x} to shared {offset:#x}: \
                             both must be multiples of it"
                        ),
                    ));
                }
                let copy = LaneCopy {
                    lane: lane as u32,
                    group: warp.copy_groups[lane],
                    pc: warp.pc,
                    tracked,
                    what: LaneCopyKind::Bytes {
                        rank,
                        offset,
                        source: from,
                        bytes: *bytes,
                        source_bytes: given,
                    },
                };
                if world.settings.completion == Completion::Eager {
                    complete_lane_copy((warp.rank, warp.index), &copy, cluster, world)?;
                } else {
                    cluster.ctas[rank as usize].shared.poison(offset, *bytes as usize)?;
                    warp.copies.push(copy);
                }
            }
            world.lane = None;
            world.changes += 1;
            Ok(Next::Advance)
        }
        Instruction::CopyAsyncCommit => {
            for lane in lanes(mask) {
                warp.copy_groups[lane] += 1;
            }
            world.group_committed(warp, cluster, mask, Group::CopyAsync);
            Ok(Next::Advance)
        }
        Instruction::CopyAsyncWait { pending } => {
            let mut left = Vec::new();
            for copy in std::mem::take(&mut warp.copies) {
                let lane = copy.lane as usize;
                let is_bytes = matches!(copy.what, LaneCopyKind::Bytes { .. });
                let due = mask >> lane & 1 == 1
                    && match pending {
                        None => true,
                        Some(pending) => copy.group + pending < warp.copy_groups[lane],
                    };
                // An arrival runs only after all earlier copies of its lane.
                let stuck = |other: &LaneCopy| other.lane == copy.lane;
                if due && (is_bytes || !left.iter().any(stuck)) {
                    complete_lane_copy((warp.rank, warp.index), &copy, cluster, world)?;
                } else {
                    left.push(copy);
                }
            }
            warp.copies = left;
            if pending.is_none() {
                world.group_committed(warp, cluster, mask, Group::CopyAsync);
            }
            let left = (pending.unwrap_or(0), false);
            world.group_waited(warp, cluster, mask, Group::CopyAsync, left);
            Ok(Next::Advance)
        }
        Instruction::CopyAsyncArrive { barrier, no_increment } => {
            for lane in lanes(mask) {
                world.lane = Some(lane);
                let address = address_of(warp, barrier.space, &barrier.address, lane);
                let (rank, offset) = shared_place(warp, world, barrier.space, address)?;
                if !no_increment {
                    cluster.barriers.add_pending(rank, offset, 1)?;
                }
                let copy = LaneCopy {
                    lane: lane as u32,
                    group: warp.copy_groups[lane],
                    pc: warp.pc,
                    tracked: world.by_threads(warp, cluster, 1 << lane),
                    what: LaneCopyKind::Arrive {
                        rank,
                        offset,
                        mark: world.marked(warp, cluster, 1 << lane, Unit::CopyAsync),
                    },
                };
                if warp.copies.iter().any(|other| other.lane == copy.lane) {
                    warp.copies.push(copy);
                } else {
                    complete_lane_copy((warp.rank, warp.index), &copy, cluster, world)?;
                }
            }
            world.lane = None;
            world.changes += 1;
            Ok(Next::Advance)
        }
        _ => copy::run(instruction, warp, cluster, world, mask),
    }
}

/// Runs a `cp.async`, or the arrival that follows such copies.
fn complete_lane_copy(
    warp: (u32, u32),
    copy: &LaneCopy,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
) -> Result<(), Fault> {
    world.changes += 1;
    match copy.what {
        LaneCopyKind::Bytes { rank, offset, source, bytes, source_bytes } => {
            let mut buffer = [0u8; 16];
            world.copying_lane = Some(copy.lane);
            let mut reach = Reach::operation(cluster, world, warp.0, copy.tracked);
            let read = reach.read(Place::Global(source), &mut buffer[..source_bytes as usize]);
            let done = read.and_then(|()| {
                reach.write(Place::Shared { rank, offset }, &buffer[..bytes as usize])
            });
            world.copying_lane = None;
            done?;
            world.counts.bytes.copied_to_shared += u64::from(bytes);
        }
        LaneCopyKind::Arrive { rank, offset, ref mark } => {
            live_rank(cluster, warp.0, rank)?;
            let arrival = cluster.barriers.arrive(rank, offset, 1, false)?;
            world.mark_arrived(mark.as_deref(), (rank, offset), arrival);
        }
    }
    Ok(())
}

/// Queues a bulk operation, or runs it immediately.
pub(crate) fn submit(
    pending: Pending,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
) -> Result<(), Fault> {
    world.changes += 1;
    let now = match world.settings.completion {
        Completion::Eager => true,
        Completion::Lazy { .. } => world.random.below(8) == 0,
        Completion::Demand | Completion::LateCopies => false,
    };
    if now {
        let issuing = world.operation.replace(pending.pc);
        landing::complete(&pending, cluster, world)?;
        world.operation = issuing;
        return Ok(());
    }
    landing::poison_targets(&pending, cluster)?;
    cluster.queue.bulk.push(pending);
    Ok(())
}

fn complete_bulk(
    at: usize,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
) -> Result<(), Fault> {
    let pending = cluster.queue.bulk.remove(at);
    world.changes += 1;
    world.operation = Some(pending.pc);
    landing::complete(&pending, cluster, world)?;
    world.operation = None;
    Ok(())
}

/// Runs the bulk groups of the lanes in `mask`, except the last `pending` groups of each lane.
pub(crate) fn wait_bulk_groups(
    warp: &Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
    pending: u32,
) -> Result<(), Fault> {
    let mut at = 0;
    while at < cluster.queue.bulk.len() {
        let operation = &cluster.queue.bulk[at];
        let due = operation.warp == (warp.rank, warp.index)
            && mask >> operation.lane & 1 == 1
            && operation
                .group
                .is_some_and(|group| group + pending < warp.bulk_groups[operation.lane]);
        if due {
            complete_bulk(at, cluster, world)?;
        } else {
            at += 1;
        }
    }
    Ok(())
}

/// Runs the next operation of a CTA's tensor core. Returns false if the queue is empty.
pub(crate) fn complete_tensor(
    cta: usize,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
) -> Result<bool, Fault> {
    let Some(work) = cluster.queue.tensor[cta].pop_front() else { return Ok(false) };
    world.changes += 1;
    world.operation = Some(work.pc);
    super::tensor::complete(&work, cluster, world)?;
    world.operation = None;
    Ok(true)
}

/// Runs a randomly chosen pending operation. Returns false if the chosen queue is empty.
pub(crate) fn complete_random(
    cluster: &mut ClusterState,
    warps: &mut [Warp],
    world: &mut World<'_>,
) -> Result<bool, Fault> {
    let bulk = cluster.queue.bulk.len();
    let ctas = cluster.queue.tensor.len();
    let choice = world.random.below(bulk + ctas + warps.len());
    if choice < bulk {
        complete_bulk(choice, cluster, world)?;
        return Ok(true);
    }
    if choice < bulk + ctas {
        return complete_tensor(choice - bulk, cluster, world);
    }
    let warp = &mut warps[choice - bulk - ctas];
    Ok(complete_first_copy(warp, cluster, world)? || complete_wgmma(warp, cluster, world)?)
}

fn complete_wgmma(
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
) -> Result<bool, Fault> {
    world.operation = warp.wgmmas.first().map(|wgmma| wgmma.pc);
    let done = complete_first_wgmma(warp, cluster, world)?;
    world.operation = None;
    Ok(done)
}

fn complete_first_copy(
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
) -> Result<bool, Fault> {
    if warp.copies.is_empty() {
        return Ok(false);
    }
    let copy = warp.copies.remove(0);
    world.operation = Some(copy.pc);
    complete_lane_copy((warp.rank, warp.index), &copy, cluster, world)?;
    world.operation = None;
    Ok(true)
}

/// Runs a pending operation because no warp can continue: preferably one that completes on an
/// mbarrier in `waited`. Returns false if none is pending.
pub(crate) fn complete_for(
    cluster: &mut ClusterState,
    warps: &mut [Warp],
    world: &mut World<'_>,
    waited: &[(u32, u32)],
) -> Result<bool, Fault> {
    let wanted = cluster
        .queue
        .bulk
        .iter()
        .position(|pending| pending.barrier.is_some_and(|barrier| waited.contains(&barrier)));
    if let Some(at) = wanted {
        complete_bulk(at, cluster, world)?;
        return Ok(true);
    }
    for cta in 0..cluster.queue.tensor.len() {
        if complete_tensor(cta, cluster, world)? {
            return Ok(true);
        }
    }
    for warp in warps {
        if complete_first_copy(warp, cluster, world)? || complete_wgmma(warp, cluster, world)? {
            return Ok(true);
        }
    }
    if !cluster.queue.bulk.is_empty() {
        complete_bulk(0, cluster, world)?;
        return Ok(true);
    }
    Ok(false)
}

/// Runs all pending operations, after the cluster's threads have exited.
pub(crate) fn complete_all(
    cluster: &mut ClusterState,
    warps: &mut [Warp],
    world: &mut World<'_>,
) -> Result<(), Fault> {
    while complete_for(cluster, warps, world, &[])? {}
    Ok(())
}

/// Called when lanes of a warp exit. If the CTA has ended, runs its pending operations while its
/// shared memory still exists.
pub(crate) fn lanes_exited(
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
) -> Result<(), Fault> {
    if cluster.ctas[warp.rank as usize].live_threads > 0 {
        return Ok(());
    }
    let mut at = 0;
    while at < cluster.queue.bulk.len() {
        if cluster.queue.bulk[at].warp.0 == warp.rank {
            complete_bulk(at, cluster, world)?;
        } else {
            at += 1;
        }
    }
    while complete_tensor(warp.rank as usize, cluster, world)? {}
    while complete_first_copy(warp, cluster, world)? {}
    cluster.ctas[warp.rank as usize].warp_groups.check_exit()?;
    cluster.ctas[warp.rank as usize].registers.check_exit()?;
    cluster.ctas[warp.rank as usize].allocator.check_exit()
}

/// Returns the place of a generic or window address.
pub(crate) fn place_of(
    warp: &Warp,
    world: &World<'_>,
    space: Space,
    address: u64,
) -> Result<Place, Fault> {
    match locate(warp, world, space, address)? {
        Where::Global(address) => Ok(Place::Global(address)),
        Where::Shared { rank, offset } => Ok(Place::Shared { rank, offset }),
        Where::Local(_) => {
            Err(Fault::new("address-in-local-memory", "an asynchronous access to local memory"))
        }
    }
}
