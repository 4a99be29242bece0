//! Loads, stores, atomics and address conversions.

use super::cluster::ClusterState;
use super::execute::Next;
use super::track::Places;
use super::warp::{Warp, lanes};
use super::world::World;
use crate::decode::{
    Address, Atomic, Instruction, Load, Register, Semantics, Source, Space, Store, Type,
};
use crate::error::Fault;
use crate::memory::{
    LOCAL_WINDOW, SHARED_BASE, SHARED_WINDOW, Window, apply_atomic, shared_address, split_shared,
};
use crate::place::Place;

/// Memory location of one lane's access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Where {
    Global(u64),
    Shared { rank: u32, offset: u32 },
    Local(u32),
}

/// Returns the address of one lane. An address without a register is a symbol: an offset in its
/// space. Shared symbols are in the executing CTA, after the bytes reserved for the system.
#[inline]
pub(crate) fn address_of(warp: &Warp, space: Space, address: &Address, lane: usize) -> u64 {
    let sum = warp.registers.lane(address.base, lane).wrapping_add_signed(address.offset);
    let is_shared = matches!(space, Space::Shared | Space::SharedCluster);
    if is_shared && matches!(address.base, Source::Immediate(_)) {
        return sum + u64::from(shared_address(warp.rank, SHARED_BASE));
    }
    sum
}

/// Splits a shared address in the executing CTA's window.
#[inline]
pub(crate) fn own_shared(warp: &Warp, address: u64) -> Result<(u32, u32), Fault> {
    let (rank, offset) = split_shared(address as u32);
    if rank == warp.rank || rank == 0 {
        return Ok((warp.rank, offset));
    }
    Err(Fault::new(
        "shared-address-of-another-cta",
        format!(
            "shared address {:#x} is of CTA {rank} of the cluster, used as one of the own CTA \
             {}: use `.shared::cluster`",
            address as u32, warp.rank
        ),
    ))
}

/// Returns the memory location of an address of `space`.
#[inline]
pub(crate) fn locate(
    warp: &Warp,
    world: &World<'_>,
    space: Space,
    address: u64,
) -> Result<Where, Fault> {
    Ok(match space {
        Space::Global => Where::Global(address),
        // A symbol's address is an offset, unless it was converted to a generic address.
        Space::Constant if address < 1 << 16 => Where::Global(world.shape.constants + address),
        Space::Constant => Where::Global(address),
        Space::Shared => {
            let (rank, offset) = own_shared(warp, address)?;
            Where::Shared { rank, offset }
        }
        Space::SharedCluster => {
            let (rank, offset) = split_shared(address as u32);
            Where::Shared { rank, offset }
        }
        Space::Local => Where::Local(address as u32),
        Space::Parameter => {
            if address < 1 << 16 {
                Where::Global(world.shape.parameters + address)
            } else {
                Where::Global(address)
            }
        }
        Space::Generic => match Window::of(address) {
            Window::Global(address) => Where::Global(address),
            Window::Shared(address) => {
                let (rank, offset) = split_shared(address);
                Where::Shared { rank, offset }
            }
            Window::Local(offset) => Where::Local(offset),
        },
    })
}

/// Returns rank and offset of an address in shared memory.
pub(crate) fn shared_place(
    warp: &Warp,
    world: &World<'_>,
    space: Space,
    address: u64,
) -> Result<(u32, u32), Fault> {
    match locate(warp, world, space, address)? {
        Where::Shared { rank, offset } => Ok((rank, offset)),
        other => Err(Fault::new(
            "address-not-shared",
            format!("{address:#x} is expected to be in shared memory, it is {other:?}"),
        )),
    }
}

/// Returns the global address of a `.global` or generic address.
pub(crate) fn global_place(
    warp: &Warp,
    world: &World<'_>,
    space: Space,
    address: u64,
) -> Result<u64, Fault> {
    match locate(warp, world, space, address)? {
        Where::Global(address) => Ok(address),
        other => Err(Fault::new(
            "address-not-global",
            format!("{address:#x} is expected to be in global memory, it is {other:?}"),
        )),
    }
}

/// Checks that a CTA of the cluster has live threads, and returns its index.
#[inline]
pub(crate) fn live_rank(cluster: &ClusterState, own: u32, rank: u32) -> Result<usize, Fault> {
    match cluster.ctas.get(rank as usize) {
        Some(_) if rank == own => Ok(rank as usize),
        Some(cta) if cta.live_threads > 0 => Ok(rank as usize),
        Some(_) => Err(Fault::new(
            "shared-of-exited-cta",
            format!("shared memory of CTA {rank} of the cluster, which has exited"),
        )),
        None => Err(Fault::new(
            "shared-rank-out-of-range",
            format!(
                "shared memory of CTA {rank} of the cluster, which has {} CTAs",
                cluster.ctas.len()
            ),
        )),
    }
}

#[inline]
fn aligned(address: u64, bytes: u32) -> Result<(), Fault> {
    if address & u64::from(bytes - 1) == 0 {
        return Ok(());
    }
    Err(Fault::new(
        "misaligned-address",
        format!("{address:#x} is no multiple of the access's {bytes} bytes"),
    ))
}

#[inline]
fn from_bytes(bytes: &[u8], element: Type) -> u64 {
    let mut value = [0u8; 8];
    value[..bytes.len()].copy_from_slice(bytes);
    let value = u64::from_le_bytes(value);
    if element.is_signed() {
        let shift = 64 - 8 * bytes.len() as u32;
        ((value << shift) as i64 >> shift) as u64
    } else {
        value
    }
}

/// `ld`.
pub(crate) fn load(
    load: &Load,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    let size = load.element.bytes() as usize;
    let bytes = size * load.destinations.len();
    let local_bytes = world.program.local_bytes as usize;
    let order = (load.semantics, load.scope);
    let mut places = Places::new(world);
    let mut buffer = [0u8; 64];
    for lane in lanes(mask) {
        world.lane = Some(lane);
        let address = address_of(warp, load.space, &load.address, lane);
        let place = locate(warp, world, load.space, address)?;
        let found: &[u8] = match place {
            Where::Global(address) => {
                aligned(address, bytes as u32)?;
                if load.space == Space::Parameter {
                    world.counts.bytes.parameter_read += bytes as u64;
                } else {
                    world.counts.bytes.global_read += bytes as u64;
                    places.push(lane, Place::Global(address));
                }
                world.global.slice(address, bytes)?
            }
            Where::Shared { rank, offset } => {
                aligned(u64::from(offset), bytes as u32)?;
                let cta = live_rank(cluster, warp.rank, rank)?;
                places.push(lane, Place::Shared { rank, offset });
                world.shared_access(warp, cluster, (rank, offset), bytes, false)?;
                let (found, written) = cluster.ctas[cta].shared.read(offset, bytes)?;
                if !written {
                    world.note_unwritten(warp.pc, || {
                        format!("{bytes} bytes at shared offset {offset:#x} of CTA {rank}")
                    });
                }
                found
            }
            Where::Local(offset) => {
                aligned(u64::from(offset), bytes as u32)?;
                world.counts.bytes.local_read += bytes as u64;
                local(warp, local_bytes, lane, offset, bytes)?
            }
        };
        buffer[..bytes].copy_from_slice(found);
        for (index, destination) in load.destinations.iter().enumerate() {
            if let Some(destination) = destination {
                let value = from_bytes(&buffer[index * size..(index + 1) * size], load.element);
                warp.registers.set_lane(*destination, lane, value);
            }
        }
    }
    world.lane = None;
    world.loaded_or_stored(warp, cluster, &places, bytes, false, order);
    if matches!(load.semantics, Semantics::Weak) {
        return Ok(Next::Advance);
    }
    // A load that may be polling yields to other warps.
    Ok(Next::Yield)
}

fn local(
    warp: &Warp,
    local_bytes: usize,
    lane: usize,
    offset: u32,
    bytes: usize,
) -> Result<&[u8], Fault> {
    if offset as usize + bytes > local_bytes {
        return Err(local_out_of_range(offset, bytes, local_bytes));
    }
    let start = lane * local_bytes + offset as usize;
    Ok(&warp.local[start..start + bytes])
}

#[cold]
fn local_out_of_range(offset: u32, bytes: usize, limit: usize) -> Fault {
    Fault::new(
        "local-out-of-range",
        format!("{bytes} bytes at local offset {offset:#x}: a thread has {limit} bytes"),
    )
}

/// `st`.
pub(crate) fn store(
    store: &Store,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    let size = store.element.bytes() as usize;
    let bytes = size * store.sources.len();
    let local_bytes = world.program.local_bytes as usize;
    let mut places = Places::new(world);
    let mut buffer = [0u8; 64];
    let order = (store.semantics, store.scope);
    for lane in lanes(mask) {
        world.lane = Some(lane);
        for (index, source) in store.sources.iter().enumerate() {
            let value = warp.registers.lane(*source, lane).to_le_bytes();
            buffer[index * size..(index + 1) * size].copy_from_slice(&value[..size]);
        }
        let address = address_of(warp, store.space, &store.address, lane);
        match locate(warp, world, store.space, address)? {
            Where::Global(address) => {
                aligned(address, bytes as u32)?;
                world.counts.bytes.global_written += bytes as u64;
                places.push(lane, Place::Global(address));
                world.global.slice_mut(address, bytes)?.copy_from_slice(&buffer[..bytes]);
            }
            Where::Shared { rank, offset } => {
                aligned(u64::from(offset), bytes as u32)?;
                let cta = live_rank(cluster, warp.rank, rank)?;
                places.push(lane, Place::Shared { rank, offset });
                world.shared_access(warp, cluster, (rank, offset), bytes, true)?;
                let target = cluster.ctas[cta].shared.write(offset, bytes)?;
                target.copy_from_slice(&buffer[..bytes]);
            }
            Where::Local(offset) => {
                aligned(u64::from(offset), bytes as u32)?;
                world.counts.bytes.local_written += bytes as u64;
                if offset as usize + bytes > local_bytes {
                    return Err(local_out_of_range(offset, bytes, local_bytes));
                }
                let start = lane * local_bytes + offset as usize;
                warp.local[start..start + bytes].copy_from_slice(&buffer[..bytes]);
            }
        }
    }
    world.lane = None;
    world.loaded_or_stored(warp, cluster, &places, bytes, true, order);
    world.changes += 1;
    Ok(Next::Advance)
}

/// `atom` and `red`.
pub(crate) fn atomic(
    atomic: &Atomic,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    let size = atomic.element.bytes() as usize;
    // A 128-bit value is two 64-bit words.
    let words = if atomic.element == Type::B128 { 2 } else { 1 };
    let elements = atomic.values.len() / words;
    let bytes = size * elements;
    let mut places = Places::new(world);
    let mut buffer = [0u8; 64];
    let order = (atomic.semantics, atomic.scope);
    let returns = !atomic.destinations.is_empty();
    world.counts.atomics += u64::from(mask.count_ones());
    for lane in lanes(mask) {
        world.lane = Some(lane);
        let address = address_of(warp, atomic.space, &atomic.address, lane);
        let place = locate(warp, world, atomic.space, address)?;
        let memory: &mut [u8] = match place {
            Where::Global(address) => {
                aligned(address, bytes as u32)?;
                world.counts.bytes.global_read += bytes as u64;
                world.counts.bytes.global_written += bytes as u64;
                places.push(lane, Place::Global(address));
                world.global.slice_mut(address, bytes)?
            }
            Where::Shared { rank, offset } => {
                aligned(u64::from(offset), bytes as u32)?;
                let cta = live_rank(cluster, warp.rank, rank)?;
                places.push(lane, Place::Shared { rank, offset });
                world.shared_access(warp, cluster, (rank, offset), bytes, true)?;
                world.counts.bytes.shared_read += bytes as u64;
                let shared = &mut cluster.ctas[cta].shared;
                if !shared.read(offset, bytes)?.1 {
                    world.note_unwritten(warp.pc, || {
                        format!("{bytes} bytes at shared offset {offset:#x} of CTA {rank}")
                    });
                }
                shared.write(offset, bytes)?
            }
            Where::Local(_) => {
                return Err(Fault::new("atomic-of-local", "an atomic operation on local memory"));
            }
        };
        buffer[..bytes].copy_from_slice(memory);
        let registers = &warp.registers;
        if words == 2 {
            let operand = |half: usize| registers.lane(atomic.values[half], lane);
            let exchange = atomic.compare.is_empty()
                || (0..2).all(|half| {
                    buffer[half * 8..half * 8 + 8]
                        == registers.lane(atomic.compare[half], lane).to_le_bytes()
                });
            if exchange {
                memory[..8].copy_from_slice(&operand(0).to_le_bytes());
                memory[8..16].copy_from_slice(&operand(1).to_le_bytes());
            }
        } else {
            for index in 0..elements {
                let at = index * size..(index + 1) * size;
                let mut old = [0u8; 8];
                old[..size].copy_from_slice(&buffer[at.clone()]);
                let new = apply_atomic(
                    atomic.operation,
                    atomic.element,
                    u64::from_le_bytes(old),
                    registers.lane(atomic.values[index], lane),
                    atomic.compare.get(index).map_or(0, |source| registers.lane(*source, lane)),
                );
                memory[at].copy_from_slice(&new.to_le_bytes()[..size]);
            }
        }
        if memory[..] != buffer[..bytes] {
            world.changes += 1;
        }
        let step = if words == 2 { 8 } else { size };
        let element = if words == 2 { Type::B64 } else { atomic.element };
        for (index, destination) in atomic.destinations.iter().enumerate() {
            if let Some(destination) = destination {
                let value = from_bytes(&buffer[index * step..(index + 1) * step], element);
                warp.registers.set_lane(*destination, lane, value);
            }
        }
    }
    world.lane = None;
    world.atomically(warp, cluster, &places, bytes, returns, order);
    Ok(if !returns { Next::Advance } else { Next::Yield })
}

/// Executes instructions that only compute addresses.
pub(crate) fn address(
    instruction: &Instruction,
    warp: &mut Warp,
    cluster: &ClusterState,
    world: &World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    let map = |warp: &mut Warp, destination: Register, source: Source, f: &dyn Fn(u64) -> u64| {
        let values = warp.registers.row64(source).map(f);
        warp.registers.set_row64(destination, &values, mask);
    };
    match *instruction {
        Instruction::ConvertAddress { destination, source, space, to_window } => {
            let immediate = matches!(source, Source::Immediate(_));
            let own = if immediate { u64::from(shared_address(warp.rank, SHARED_BASE)) } else { 0 };
            let (parameters, constants) = (world.shape.parameters, world.shape.constants);
            map(warp, destination, source, &|value| match (space, to_window) {
                (Space::Shared | Space::SharedCluster, true) => (value + own) & 0xFFFF_FFFF,
                (Space::Shared | Space::SharedCluster, false) => {
                    SHARED_WINDOW | (value + own) & 0xFFFF_FFFF
                }
                (Space::Constant, false) if value < 1 << 16 => constants + value,
                (Space::Local, true) => value & 0xFFFF_FFFF,
                (Space::Local, false) => LOCAL_WINDOW | value & 0xFFFF_FFFF,
                (Space::Parameter, false) if value < 1 << 16 => parameters + value,
                _ => value,
            });
        }
        Instruction::IsSpace { destination, source, space } => {
            let mut inside = 0;
            for lane in lanes(mask) {
                let window = Window::of(warp.registers.lane(source, lane));
                let matches = match (space, window) {
                    (Space::Shared, Window::Shared(address)) => {
                        split_shared(address).0 == warp.rank
                    }
                    (Space::SharedCluster, Window::Shared(_)) => true,
                    (Space::Local, Window::Local(_)) => true,
                    (Space::Global, Window::Global(_)) => true,
                    _ => false,
                };
                inside |= u32::from(matches) << lane;
            }
            warp.registers.set_predicate(destination, inside, mask);
        }
        Instruction::MapAddress { destination, source, rank, space } => {
            for lane in lanes(mask) {
                let value = warp.registers.lane(source, lane);
                let to = warp.registers.lane(rank, lane) as u32;
                if to as usize >= cluster.ctas.len() {
                    return Err(Fault::new(
                        "shared-rank-out-of-range",
                        format!("`mapa` to CTA {to} of {}", cluster.ctas.len()),
                    ));
                }
                let (_, offset) = split_shared(value as u32);
                let mapped = u64::from(shared_address(to, offset));
                let window = if space == Space::Generic { SHARED_WINDOW } else { 0 };
                warp.registers.set_lane(destination, lane, window | mapped);
            }
        }
        Instruction::CtaRank { destination, source, .. } => {
            map(warp, destination, source, &|value| u64::from(split_shared(value as u32).0));
        }
        Instruction::CreatePolicy { destination } => {
            warp.registers.set_row64(destination, &[0; 32], mask);
        }
        _ => {}
    }
    Ok(Next::Advance)
}
