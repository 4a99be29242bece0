//! Completion of copies, immediately or according to the completion mode, and poisoning of their
//! targets until then.

use super::access::live_rank;
use super::asynchronous::Pending;
use super::cluster::ClusterState;
use super::copy::Copy;
use super::reach::Reach;
use super::world::World;
use crate::bulk;
use crate::error::Fault;
use crate::memory::apply_atomic;
use crate::observe::{Direction, Event, Phase};
use crate::place::{Memory, Place};

/// Runs an operation and updates its mbarrier.
pub(crate) fn complete(
    pending: &Pending,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
) -> Result<(), Fault> {
    let mut reach = Reach::operation(cluster, world, pending.warp.0, pending.tracked);
    let memory: &mut dyn Memory = &mut reach;
    let mut from_shared = 0;
    let to_shared = match &pending.copy {
        Copy::ToShared { source, target, bytes } => {
            bulk::copy_to_shared(*source, &[target.0], target.1, *bytes, memory)?
        }
        Copy::ToGlobal { source, target, bytes, byte_mask } => {
            let moved = bulk::copy_to_global(*source, *target, *bytes, *byte_mask, memory)?;
            world.counts.bytes.copied_from_shared += moved;
            from_shared = moved;
            0
        }
        Copy::Between { source, target, bytes } => {
            bulk::copy_between_shared(*source, *target, *bytes, memory)?
        }
        Copy::ReduceGlobal { source, target, bytes, operation, element } => {
            let moved =
                bulk::reduce_to_global(*source, *target, *bytes, *operation, *element, memory)?;
            world.counts.bytes.copied_from_shared += moved;
            from_shared = moved;
            0
        }
        Copy::ReduceShared { source, target, bytes, operation, element } => {
            bulk::reduce_to_shared(*source, *target, *bytes, *operation, *element, memory)?
        }
        Copy::Load { map, coordinates, gather, target } => {
            if *gather {
                map.gather4(coordinates, &[target.0], target.1, memory)?
            } else {
                map.load(coordinates, &[target.0], target.1, memory)?
            }
        }
        Copy::Store { map, coordinates, scatter, source, reduction } => {
            let moved = match (scatter, reduction) {
                (true, _) => map.scatter4(coordinates, source.0, source.1, memory)?,
                (false, None) => map.store(coordinates, source.0, source.1, memory)?,
                (false, Some(operation)) => {
                    map.reduce(coordinates, source.0, source.1, *operation, memory)?
                }
            };
            world.counts.bytes.copied_from_shared += moved;
            from_shared = moved;
            0
        }
        Copy::Elements { target, element, values, reduction } => {
            let size = element.bytes() as usize;
            for (index, value) in values.iter().enumerate() {
                let (rank, offset) = *target;
                let place = Place::Shared { rank, offset: offset + (index * size) as u32 };
                let mut bytes = value.to_le_bytes();
                if let Some(operation) = reduction {
                    let mut old = [0u8; 8];
                    memory.read(place, &mut old[..size])?;
                    let old = u64::from_le_bytes(old);
                    bytes = apply_atomic(*operation, *element, old, *value, 0).to_le_bytes();
                }
                memory.write(place, &bytes[..size])?;
            }
            (values.len() * size) as u32
        }
        Copy::Answer { target, bytes } => {
            memory.write(Place::Shared { rank: target.0, offset: target.1 }, bytes)?;
            16
        }
    };
    let direction = match &pending.copy {
        Copy::Between { target, .. }
        | Copy::ReduceShared { target, .. }
        | Copy::Elements { target, .. } => Direction::Between(target.0),
        Copy::ToShared { target, .. } | Copy::Load { target, .. } | Copy::Answer { target, .. } => {
            Direction::ToShared(target.0)
        }
        Copy::ToGlobal { .. } | Copy::ReduceGlobal { .. } | Copy::Store { .. } => {
            Direction::FromShared
        }
    };
    let mut counted = None;
    world.counts.bytes.copied_to_shared += u64::from(to_shared);
    if let Some((rank, offset)) = pending.barrier {
        live_rank(cluster, pending.warp.0, rank)?;
        let arrival = cluster.barriers.complete_tx(rank, offset, to_shared)?;
        world.bytes_arrived(pending.tracked, (rank, offset), arrival);
        counted = Some(Phase { rank, offset, phase: arrival.phase });
    }
    let (bytes, arrival) = (to_shared + from_shared as u32, counted);
    let origin = (pending.warp.0, pending.warp.1, pending.pc);
    world.observe_of(origin, cluster, Event::Copy { direction, bytes, arrival });
    world.ran(pending.tracked);
    Ok(())
}

/// Poisons the target of a pending operation, so that early reads are detected.
pub(crate) fn poison_targets(pending: &Pending, cluster: &mut ClusterState) -> Result<(), Fault> {
    let (target, bytes) = match &pending.copy {
        Copy::ToShared { target, bytes, .. } | Copy::Between { target, bytes, .. } => {
            (*target, *bytes)
        }
        Copy::Load { map, target, gather, .. } => {
            (*target, map.shared_bytes() * if *gather { 4 } else { 1 })
        }
        Copy::Elements { target, element, values, reduction: None } => {
            (*target, element.bytes() * values.len() as u32)
        }
        Copy::Answer { target, .. } => (*target, 16),
        _ => return Ok(()),
    };
    cluster.ctas[target.0 as usize].shared.poison(target.1, bytes as usize)
}
