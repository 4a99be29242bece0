//! Bulk copies of bytes.

use super::reduction::{ReduceElement, ReduceOperation};
use crate::error::Fault;
use crate::place::{Memory, Place};

/// Alignment of addresses and sizes.
const ALIGNMENT: u32 = 16;

fn check(source: u64, target: u64, bytes: u32) -> Result<(), Fault> {
    for (name, value) in [("source", source), ("target", target)] {
        if !value.is_multiple_of(u64::from(ALIGNMENT)) {
            return Err(Fault::new(
                "bulk-copy-alignment",
                format!(
                    "the {name} of a bulk copy must be a multiple of {ALIGNMENT} bytes, got \
                     {value:#x}"
                ),
            ));
        }
    }
    if !bytes.is_multiple_of(ALIGNMENT) {
        return Err(Fault::new(
            "bulk-copy-size",
            format!("a bulk copy moves a multiple of {ALIGNMENT} bytes, got {bytes}"),
        ));
    }
    Ok(())
}

/// `cp.async.bulk` from global memory to the same offset in the shared memory of all `ranks`.
/// Returns the bytes counted by the mbarrier of each rank.
///
/// # Errors
/// `bulk-copy-alignment`, `bulk-copy-size`, and the errors of the memory.
pub fn copy_to_shared(
    source: u64,
    ranks: &[u32],
    offset: u32,
    bytes: u32,
    memory: &mut dyn Memory,
) -> Result<u32, Fault> {
    check(source, u64::from(offset), bytes)?;
    let mut data = vec![0; bytes as usize];
    memory.read(Place::Global(source), &mut data)?;
    for &rank in ranks {
        memory.write(Place::Shared { rank, offset }, &data)?;
    }
    Ok(bytes)
}

/// `cp.async.bulk` from shared to global memory. Bit `i` of `byte_mask` enables byte `i` of every
/// 16 bytes. Returns the number of bytes written.
///
/// # Errors
/// The errors of [`copy_to_shared`].
pub fn copy_to_global(
    (rank, offset): (u32, u32),
    target: u64,
    bytes: u32,
    byte_mask: Option<u16>,
    memory: &mut dyn Memory,
) -> Result<u64, Fault> {
    check(u64::from(offset), target, bytes)?;
    let mut data = vec![0; bytes as usize];
    memory.read(Place::Shared { rank, offset }, &mut data)?;
    let Some(mask) = byte_mask.filter(|&mask| mask != 0xffff) else {
        memory.write(Place::Global(target), &data)?;
        return Ok(u64::from(bytes));
    };
    let mut bytes_written = 0;
    for (index, &byte) in data.iter().enumerate() {
        if mask >> (index % 16) & 1 == 1 {
            memory.write(Place::Global(target + index as u64), &[byte])?;
            bytes_written += 1;
        }
    }
    Ok(bytes_written)
}

/// `cp.async.bulk` from the shared memory of one CTA to another CTA of the cluster. Locations are
/// pairs of a rank and an offset. Returns the bytes counted by the mbarrier.
///
/// # Errors
/// The errors of [`copy_to_shared`]; `bulk-copy-same-cta` if source and target are in one CTA.
pub fn copy_between_shared(
    source: (u32, u32),
    target: (u32, u32),
    bytes: u32,
    memory: &mut dyn Memory,
) -> Result<u32, Fault> {
    let data = read_for_other_cta(source, target, bytes, memory)?;
    memory.write(Place::Shared { rank: target.0, offset: target.1 }, &data)?;
    Ok(bytes)
}

/// `cp.reduce.async.bulk` from shared to global memory. Returns the number of bytes combined.
///
/// # Errors
/// The errors of [`copy_to_global`]; `bulk-reduce-type` for an illegal type of the operation.
pub fn reduce_to_global(
    (rank, offset): (u32, u32),
    target: u64,
    bytes: u32,
    operation: ReduceOperation,
    element: ReduceElement,
    memory: &mut dyn Memory,
) -> Result<u64, Fault> {
    check(u64::from(offset), target, bytes)?;
    element.check(operation, true)?;
    let mut data = vec![0; bytes as usize];
    memory.read(Place::Shared { rank, offset }, &mut data)?;
    combine(Place::Global(target), &data, operation, element, memory)?;
    Ok(u64::from(bytes))
}

/// `cp.reduce.async.bulk` from the shared memory of one CTA to another CTA. Returns the bytes
/// counted by the mbarrier.
///
/// # Errors
/// The errors of [`copy_between_shared`] and [`reduce_to_global`].
pub fn reduce_to_shared(
    source: (u32, u32),
    target: (u32, u32),
    bytes: u32,
    operation: ReduceOperation,
    element: ReduceElement,
    memory: &mut dyn Memory,
) -> Result<u32, Fault> {
    element.check(operation, false)?;
    let data = read_for_other_cta(source, target, bytes, memory)?;
    let place = Place::Shared { rank: target.0, offset: target.1 };
    combine(place, &data, operation, element, memory)?;
    Ok(bytes)
}

fn read_for_other_cta(
    source: (u32, u32),
    target: (u32, u32),
    bytes: u32,
    memory: &mut dyn Memory,
) -> Result<Vec<u8>, Fault> {
    check(u64::from(source.1), u64::from(target.1), bytes)?;
    if source.0 == target.0 {
        return Err(Fault::new(
            "bulk-copy-same-cta",
            format!(
                "a bulk copy from shared to shared memory needs another CTA of the cluster as \
                 its target, got its own CTA {}",
                source.0
            ),
        ));
    }
    let mut data = vec![0; bytes as usize];
    memory.read(Place::Shared { rank: source.0, offset: source.1 }, &mut data)?;
    Ok(data)
}

fn combine(
    place: Place,
    data: &[u8],
    operation: ReduceOperation,
    element: ReduceElement,
    memory: &mut dyn Memory,
) -> Result<(), Fault> {
    let mut old = vec![0; data.len()];
    memory.read(place, &mut old)?;
    element.combine(operation, &mut old, data);
    memory.write(place, &old)
}
