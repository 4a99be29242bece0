//! Conversion of bulk copies, tensor copies, `st.async` and cluster launch control to operations.

use super::access::{address_of, live_rank, own_shared, shared_place};
use super::asynchronous::{Pending, place_of, submit, wait_bulk_groups};
use super::cluster::ClusterState;
use super::execute::{Gathered, Next, gather_lanes};
use super::launch_control::{CANCELED, try_cancel};
use super::reach::Reach;
use super::track::Tracked;
use super::warp::{Warp, lanes};
use super::world::World;
use crate::bulk::{self, MapField, ReduceElement, ReduceOperation, TENSOR_MAP_BYTES, TensorMap};
use crate::decode::{
    Address, AtomicOperation, BulkCompletion, BulkCopy, BulkDirection, Instruction, Source, Space,
    StoreAsync, TensorCopy, TensorMapField, TensorMode, Type,
};
use crate::error::Fault;
use crate::hazard::{Group, Unit};
use crate::place::{Memory, Place};

/// An operation of the queue. Pairs are rank and offset in shared memory.
#[derive(Clone, Debug)]
pub(crate) enum Copy {
    /// Copies bytes from device memory.
    ToShared { source: u64, target: (u32, u32), bytes: u32 },
    /// Copies bytes to device memory.
    ToGlobal { source: (u32, u32), target: u64, bytes: u32, byte_mask: Option<u16> },
    /// Copies bytes to another CTA.
    Between { source: (u32, u32), target: (u32, u32), bytes: u32 },
    /// Reduces values into device memory.
    ReduceGlobal {
        source: (u32, u32),
        target: u64,
        bytes: u32,
        operation: ReduceOperation,
        element: ReduceElement,
    },
    /// Reduces values into another CTA's shared memory.
    ReduceShared {
        source: (u32, u32),
        target: (u32, u32),
        bytes: u32,
        operation: ReduceOperation,
        element: ReduceElement,
    },
    /// Loads a box of a tensor.
    Load { map: Box<TensorMap>, coordinates: Vec<i32>, gather: bool, target: (u32, u32) },
    /// Stores a box of a tensor.
    Store {
        map: Box<TensorMap>,
        coordinates: Vec<i32>,
        scatter: bool,
        source: (u32, u32),
        reduction: Option<ReduceOperation>,
    },
    /// Stores elements of one thread (`st.async`, `red.async`).
    Elements {
        target: (u32, u32),
        element: Type,
        values: Vec<u64>,
        reduction: Option<AtomicOperation>,
    },
    /// Writes the response of cluster launch control.
    Answer { target: (u32, u32), bytes: [u8; 16] },
}

/// Executes a copy or launch-control instruction.
pub(crate) fn run(
    instruction: &Instruction,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    match instruction {
        Instruction::BulkCopy(copy) => {
            each(warp, world, mask, |warp, world, lane| bulk_copy(copy, warp, cluster, world, lane))
        }
        Instruction::TensorCopy(copy) => {
            let mut left = mask;
            each(warp, world, mask, |warp, world, lane| {
                let together = same_store(copy, warp, left, lane);
                left &= !together;
                if together == 0 {
                    Ok(())
                } else {
                    tensor_copy(copy, warp, cluster, world, together)
                }
            })
        }
        Instruction::StoreAsync(store) => each(warp, world, mask, |warp, world, lane| {
            store_async(store, warp, cluster, world, lane)
        }),
        Instruction::BulkCommit => {
            for lane in lanes(mask) {
                warp.bulk_groups[lane] += 1;
            }
            world.group_committed(warp, cluster, mask, Group::Bulk);
            Ok(Next::Advance)
        }
        Instruction::BulkWait { pending, read } => {
            wait_bulk_groups(warp, cluster, world, mask, *pending)?;
            world.group_waited(warp, cluster, mask, Group::Bulk, (*pending, *read));
            Ok(Next::Advance)
        }
        Instruction::TensorMapReplace(replace) => each(warp, world, mask, |warp, world, lane| {
            let address = address_of(warp, replace.space, &replace.map, lane);
            let place = place_of(warp, world, replace.space, address)?;
            let field = map_field(replace.field, replace.ordinal);
            let value = warp.registers.lane(replace.value, lane);
            let tracked = world.by_threads(warp, cluster, 1 << lane);
            let mut reach = Reach::operation(cluster, world, warp.rank, tracked);
            let mut bytes = [0; TENSOR_MAP_BYTES];
            reach.read(place, &mut bytes)?;
            bulk::replace_field(&mut bytes, field, value)?;
            reach.write(place, &bytes)
        }),
        Instruction::TensorMapCopyFence { target, source, scope } => {
            if gather_lanes(warp, world, mask, warp.alive) == Gathered::Parked {
                return Ok(Next::Select);
            }
            let lane = mask.trailing_zeros() as usize;
            let target = place_of(
                warp,
                world,
                Space::Global,
                address_of(warp, Space::Global, target, lane),
            )?;
            let source = own_shared(warp, address_of(warp, Space::Shared, source, lane))?;
            // The lanes copy together, so each lane must see the writes of the others.
            let tracked = world.by_threads(warp, cluster, mask);
            let mut reach = Reach::operation(cluster, world, warp.rank, tracked);
            reach.by_rows = true;
            let mut bytes = [0; TENSOR_MAP_BYTES];
            for (at, word) in (0..).zip(bytes.chunks_exact_mut(4)) {
                reach.read(Place::Shared { rank: source.0, offset: source.1 + 4 * at }, word)?;
            }
            let tracked = world.by_threads(warp, cluster, 1 << lane);
            Reach::operation(cluster, world, warp.rank, tracked).write(target, &bytes)?;
            if let Some(thread) = world.thread(warp, cluster, mask)
                && let Some(tracker) = &mut world.tracker
            {
                tracker.fence_tensor_map_release(thread, *scope);
                // All lanes of the warp continue only after the copy.
                tracker.warp_barrier(thread);
            }
            world.changes += 1;
            Ok(Next::Advance)
        }
        Instruction::TryCancel { response, space, barrier, multicast } => {
            each(warp, world, mask, |warp, world, lane| {
                let target =
                    shared_place(warp, world, *space, address_of(warp, *space, response, lane))?;
                let barrier =
                    shared_place(warp, world, *space, address_of(warp, *space, barrier, lane))?;
                try_cancel(warp, cluster, world, lane, (target, barrier, *multicast))
            })
        }
        Instruction::QueryCanceled { destination, response } => {
            let mut canceled = 0;
            for lane in lanes(mask) {
                let high = warp.registers.lane(response[1], lane);
                canceled |= u32::from(high >> 32 == CANCELED) << lane;
            }
            // Lanes that have seen the failure must not ask again.
            cluster.ctas[warp.rank as usize].launch_control_failed |= canceled & mask != mask;
            warp.registers.set_predicate(*destination, canceled, mask);
            Ok(Next::Advance)
        }
        Instruction::QueryFirstCta { destinations, response } => {
            for lane in lanes(mask) {
                let [low, high] = response.map(|source| warp.registers.lane(source, lane));
                if high >> 32 != CANCELED {
                    return Err(Fault::new(
                        "query-of-a-launch-that-was-not-canceled",
                        "`clusterlaunchcontrol.query_cancel.get_first_ctaid` of an answer without \
                         a canceled cluster",
                    ));
                }
                let axes = [low as u32, (low >> 32) as u32, high as u32, 0];
                for (destination, value) in destinations.iter().zip(axes) {
                    if let Some(destination) = destination {
                        warp.registers.set_lane(*destination, lane, u64::from(value));
                    }
                }
            }
            Ok(Next::Advance)
        }
        _ => Ok(Next::Advance),
    }
}

fn each(
    warp: &mut Warp,
    world: &mut World<'_>,
    mask: u32,
    mut run: impl FnMut(&mut Warp, &mut World<'_>, usize) -> Result<(), Fault>,
) -> Result<Next, Fault> {
    for lane in lanes(mask) {
        world.lane = Some(lane);
        run(warp, world, lane)?;
    }
    world.lane = None;
    Ok(Next::Advance)
}

fn map_field(field: TensorMapField, ordinal: u32) -> MapField {
    match field {
        TensorMapField::GlobalAddress => MapField::GlobalAddress,
        TensorMapField::Rank => MapField::Rank,
        TensorMapField::BoxDimension => MapField::BoxDimension(ordinal),
        TensorMapField::GlobalDimension => MapField::GlobalDimension(ordinal),
        TensorMapField::GlobalStride => MapField::GlobalStride(ordinal),
        TensorMapField::ElementStride => MapField::ElementStride(ordinal),
        TensorMapField::ElementType => MapField::ElementType,
        TensorMapField::InterleaveLayout => MapField::InterleaveLayout,
        TensorMapField::SwizzleMode => MapField::SwizzleMode,
        TensorMapField::FillMode => MapField::FillMode,
        TensorMapField::SwizzleAtomicity => MapField::SwizzleAtomicity,
    }
}

fn reduce_operation(operation: AtomicOperation) -> Result<ReduceOperation, Fault> {
    Ok(match operation {
        AtomicOperation::Add => ReduceOperation::Add,
        AtomicOperation::Min => ReduceOperation::Min,
        AtomicOperation::Max => ReduceOperation::Max,
        AtomicOperation::And => ReduceOperation::And,
        AtomicOperation::Or => ReduceOperation::Or,
        AtomicOperation::Xor => ReduceOperation::Xor,
        AtomicOperation::Increment => ReduceOperation::Increment,
        AtomicOperation::Decrement => ReduceOperation::Decrement,
        AtomicOperation::Exchange | AtomicOperation::CompareAndSwap => {
            return Err(Fault::new("bulk-reduce-type", format!("no reduction `{operation:?}`")));
        }
    })
}

fn reduce_element(element: Type) -> Result<ReduceElement, Fault> {
    Ok(match element {
        Type::B32 => ReduceElement::B32,
        Type::B64 => ReduceElement::B64,
        Type::U32 => ReduceElement::U32,
        Type::U64 => ReduceElement::U64,
        Type::S32 => ReduceElement::S32,
        Type::S64 => ReduceElement::S64,
        Type::F16 => ReduceElement::F16,
        Type::Bf16 => ReduceElement::Bf16,
        Type::F32 => ReduceElement::F32,
        Type::F64 => ReduceElement::F64,
        other => {
            return Err(Fault::new("bulk-reduce-type", format!("no reduction of `{other}`")));
        }
    })
}

/// Returns the CTA ranks of a multicast.
fn multicast_ranks(
    warp: &Warp,
    cluster: &ClusterState,
    multicast: Option<Source>,
    lane: usize,
) -> Result<Option<Vec<u32>>, Fault> {
    let Some(source) = multicast else { return Ok(None) };
    let mask = warp.registers.lane(source, lane) as u32 & 0xFFFF;
    let ranks: Vec<u32> = (0..16).filter(|rank| mask >> rank & 1 == 1).collect();
    let count = cluster.ctas.len() as u32;
    if ranks.is_empty() || ranks.iter().any(|rank| *rank >= count) {
        return Err(Fault::new(
            "multicast-mask",
            format!("multicast to {mask:#06x} in a cluster of {count} CTAs"),
        ));
    }
    Ok(Some(ranks))
}

/// Rank and offset of a copy's target, and of its mbarrier.
type TargetAndBarrier = ((u32, u32), (u32, u32));

/// Returns the targets of a copy to shared memory, each with its mbarrier.
fn targets(
    warp: &Warp,
    cluster: &ClusterState,
    target: (u32, u32),
    barrier: (u32, u32),
    ranks: Option<Vec<u32>>,
    pair: bool,
) -> Result<Vec<TargetAndBarrier>, Fault> {
    let Some(ranks) = ranks else {
        let same = if pair { barrier.0 | 1 == target.0 | 1 } else { barrier.0 == target.0 };
        if !same {
            return Err(Fault::new(
                "bulk-copy-barrier-of-another-cta",
                format!(
                    "a copy to CTA {} that counts on a barrier of CTA {}: expected one of the \
                     same {}",
                    target.0,
                    barrier.0,
                    if pair { "CTA pair" } else { "CTA" }
                ),
            ));
        }
        live_rank(cluster, warp.rank, target.0)?;
        return Ok(vec![(target, barrier)]);
    };
    ranks
        .into_iter()
        .map(|rank| {
            live_rank(cluster, warp.rank, rank)?;
            let of = if pair { (rank & !1) | (barrier.0 & 1) } else { rank };
            Ok(((rank, target.1), (of, barrier.1)))
        })
        .collect()
}

fn target_place(
    warp: &Warp,
    world: &World<'_>,
    address: &Address,
    own: bool,
    lane: usize,
) -> Result<(u32, u32), Fault> {
    let space = if own { Space::Shared } else { Space::SharedCluster };
    shared_place(warp, world, space, address_of(warp, space, address, lane))
}

fn completion_barrier(
    warp: &Warp,
    world: &World<'_>,
    completion: &BulkCompletion,
    own: bool,
    lane: usize,
) -> Result<Option<(u32, u32)>, Fault> {
    match completion {
        BulkCompletion::Mbarrier(address) => {
            target_place(warp, world, address, own, lane).map(Some)
        }
        BulkCompletion::Group | BulkCompletion::None => Ok(None),
    }
}

pub(super) fn pending(
    warp: &Warp,
    lane: usize,
    barrier: Option<(u32, u32)>,
    copy: Copy,
    tracked: Tracked,
) -> Pending {
    Pending {
        warp: (warp.rank, warp.index),
        lane,
        pc: warp.pc,
        group: barrier.is_none().then(|| warp.bulk_groups[lane]),
        barrier,
        copy,
        tracked,
    }
}

fn bulk_copy(
    copy: &BulkCopy,
    warp: &Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    lane: usize,
) -> Result<(), Fault> {
    let bytes = warp.registers.lane(copy.bytes, lane) as u32;
    let ranks = multicast_ranks(warp, cluster, copy.multicast, lane)?;
    let reduction = match copy.reduction {
        Some((operation, element)) => {
            Some((reduce_operation(operation)?, reduce_element(element)?))
        }
        None => None,
    };
    world.counts.bulk_copies += 1;
    let issue = |world: &mut World<'_>, cluster: &ClusterState, unit| {
        let tracked = world.issued(warp, cluster, 1 << lane, unit);
        if reduction.is_some() {
            world.reduces(tracked);
        }
        tracked
    };
    let own = copy.target_is_own_cta;
    match copy.direction {
        BulkDirection::GlobalToShared => {
            let source = address_of(warp, Space::Global, &copy.source, lane);
            let Place::Global(source) = place_of(warp, world, Space::Global, source)? else {
                return Ok(());
            };
            let target = target_place(warp, world, &copy.target, own, lane)?;
            let barrier = completion_barrier(warp, world, &copy.completion, own, lane)?;
            let barrier = barrier.ok_or_else(no_barrier)?;
            for (target, barrier) in targets(warp, cluster, target, barrier, ranks, false)? {
                let tracked = issue(world, cluster, Unit::BulkLoad);
                let copy = Copy::ToShared { source, target, bytes };
                submit(pending(warp, lane, Some(barrier), copy, tracked), cluster, world)?;
            }
        }
        BulkDirection::SharedToShared => {
            let source = own_shared(warp, address_of(warp, Space::Shared, &copy.source, lane))?;
            let target = target_place(warp, world, &copy.target, own, lane)?;
            let barrier = completion_barrier(warp, world, &copy.completion, own, lane)?;
            let barrier = barrier.ok_or_else(no_barrier)?;
            targets(warp, cluster, target, barrier, None, false)?;
            let tracked = issue(world, cluster, Unit::BulkLoad);
            let copy = match reduction {
                Some((operation, element)) => {
                    Copy::ReduceShared { source, target, bytes, operation, element }
                }
                None => Copy::Between { source, target, bytes },
            };
            submit(pending(warp, lane, Some(barrier), copy, tracked), cluster, world)?;
        }
        BulkDirection::SharedToGlobal => {
            let source = own_shared(warp, address_of(warp, Space::Shared, &copy.source, lane))?;
            let target = address_of(warp, Space::Global, &copy.target, lane);
            let Place::Global(target) = place_of(warp, world, Space::Global, target)? else {
                return Ok(());
            };
            let byte_mask = copy.byte_mask.map(|mask| warp.registers.lane(mask, lane) as u16);
            let tracked = issue(world, cluster, Unit::BulkStore);
            let copy = match reduction {
                Some((operation, element)) => {
                    Copy::ReduceGlobal { source, target, bytes, operation, element }
                }
                None => Copy::ToGlobal { source, target, bytes, byte_mask },
            };
            submit(pending(warp, lane, None, copy, tracked), cluster, world)?;
        }
        BulkDirection::Prefetch => {}
    }
    Ok(())
}

fn no_barrier() -> Fault {
    Fault::new("bulk-copy-completion", "a copy to shared memory that ends by no mbarrier")
}

/// Reads the tensor map of a tensor copy.
fn read_map(
    warp: &Warp,
    world: &World<'_>,
    address: &Address,
    lane: usize,
) -> Result<(Box<TensorMap>, u64), Fault> {
    let generic = address_of(warp, Space::Generic, address, lane);
    let Place::Global(at) = place_of(warp, world, Space::Generic, generic)? else {
        return Err(Fault::new(
            "tensor-map-in-shared-memory",
            format!("the tensor map at {generic:#x} is in no global, constant or parameter space"),
        ));
    };
    if at % 64 != 0 {
        return Err(Fault::new(
            "tensor-map-misaligned",
            format!("a tensor map is 64-byte aligned, got {at:#x}"),
        ));
    }
    let mut bytes = [0; TENSOR_MAP_BYTES];
    bytes.copy_from_slice(world.global.slice(at, TENSOR_MAP_BYTES)?);
    Ok((Box::new(TensorMap::decode(&bytes)?), at))
}

/// Returns the lanes in `left` that store the same box as `lane`; empty if `lane` is not in `left`.
/// Hardware stores a box that several lanes of a warp name only once (epilogues of CUTLASS rely on
/// this). Reductions and loads are executed by each lane, as in the ISA.
fn same_store(copy: &TensorCopy, warp: &Warp, left: u32, lane: usize) -> u32 {
    if copy.direction != BulkDirection::SharedToGlobal || copy.reduction.is_some() {
        return 1 << lane;
    }
    let named = |lane: usize| {
        let map = address_of(warp, Space::Generic, &copy.map, lane);
        let shared = address_of(warp, Space::Shared, &copy.shared, lane);
        let coordinates = copy.coordinates.iter().map(move |at| warp.registers.lane(*at, lane));
        (map, shared, coordinates.collect::<Vec<_>>())
    };
    if left >> lane & 1 == 0 {
        return 0;
    }
    let own = named(lane);
    lanes(left).filter(|other| named(*other) == own).fold(0, |mask, other| mask | 1 << other)
}

/// Executes a copy for the first of several lanes that name the same copy.
fn tensor_copy(
    copy: &TensorCopy,
    warp: &Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    together: u32,
) -> Result<(), Fault> {
    let lane = together.trailing_zeros() as usize;
    let coordinates: Vec<i32> =
        (copy.coordinates.iter()).map(|source| warp.registers.lane(*source, lane) as i32).collect();
    let (map, map_address) = read_map(warp, world, &copy.map, lane)?;
    if copy.direction == BulkDirection::Prefetch {
        return Ok(());
    }
    if matches!(copy.mode, TensorMode::Im2col | TensorMode::Im2colW | TensorMode::Im2colW128) {
        return Err(Fault::new("tensor-copy-im2col", "im2col copies are not emulated"));
    }
    world.counts.bulk_copies += 1;
    let own = copy.shared_is_own_cta;
    let shared = target_place(warp, world, &copy.shared, own, lane)?;
    let swizzle = map.spec().swizzle;
    let issue = |world: &mut World<'_>, cluster: &ClusterState, unit| {
        let tracked = world.issued(warp, cluster, together, unit);
        world.map_read(tracked, map_address);
        world.permutes(tracked, super::pattern::of_map(swizzle));
        if copy.reduction.is_some() {
            world.reduces(tracked);
        }
        tracked
    };
    if copy.direction == BulkDirection::GlobalToShared {
        let ranks = multicast_ranks(warp, cluster, copy.multicast, lane)?;
        let barrier = completion_barrier(warp, world, &copy.completion, own, lane)?;
        let barrier = barrier.ok_or_else(no_barrier)?;
        let pair = copy.cta_group == Some(2);
        if pair && cluster.ctas.len() % 2 == 1 {
            return Err(super::tensor::no_pair());
        }
        let gather = copy.mode == TensorMode::Gather4;
        for (target, barrier) in targets(warp, cluster, shared, barrier, ranks, pair)? {
            let tracked = issue(world, cluster, Unit::BulkLoad);
            let coordinates = coordinates.clone();
            let copy = Copy::Load { map: map.clone(), coordinates, gather, target };
            submit(pending(warp, lane, Some(barrier), copy, tracked), cluster, world)?;
        }
        return Ok(());
    }
    let tracked = issue(world, cluster, Unit::BulkStore);
    let reduction = copy.reduction.map(reduce_operation).transpose()?;
    let scatter = copy.mode == TensorMode::Scatter4;
    let copy = Copy::Store { map, coordinates, scatter, source: shared, reduction };
    submit(pending(warp, lane, None, copy, tracked), cluster, world)
}

fn store_async(
    store: &StoreAsync,
    warp: &Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    lane: usize,
) -> Result<(), Fault> {
    let target = target_place(warp, world, &store.target, false, lane)?;
    let barrier = target_place(warp, world, &store.barrier, false, lane)?;
    targets(warp, cluster, target, barrier, None, false)?;
    let tracked = world.issued(warp, cluster, 1 << lane, Unit::StoreAsync);
    if store.reduction.is_some() {
        world.reduces(tracked);
    }
    let copy = Copy::Elements {
        target,
        element: store.element,
        values: store.sources.iter().map(|source| warp.registers.lane(*source, lane)).collect(),
        reduction: store.reduction,
    };
    submit(pending(warp, lane, Some(barrier), copy, tracked), cluster, world)
}
