//! Splits inputs of collectives into the parts for each rank, and assembles outputs from parts.

use deepwell_ir::DType;
use deepwell_ir::ops::CollectiveKind;

use super::reduce;

/// The part of `input` that the rank at place `from` gives to the rank at place `to`.
pub(super) fn part<'a>(
    kind: &CollectiveKind,
    input: &'a [u8],
    (from, to): (usize, usize),
    ranks: usize,
) -> &'a [u8] {
    match kind {
        CollectiveKind::ReduceScatter { .. } | CollectiveKind::AllToAll => {
            let bytes = input.len() / ranks;
            &input[to * bytes..(to + 1) * bytes]
        }
        CollectiveKind::Broadcast { root } if *root as usize != from => &[],
        CollectiveKind::Shift { by } if (from + *by as usize) % ranks != to => &[],
        _ => input,
    }
}

/// Assembles the output of a place from the parts of all places, in group order.
///
/// # Errors
/// A type that cannot be reduced.
pub(super) fn assemble(
    kind: &CollectiveKind,
    dtype: DType,
    parts: &[&[u8]],
    output: &mut [u8],
) -> Result<(), String> {
    match kind {
        CollectiveKind::AllReduce { reduction } | CollectiveKind::ReduceScatter { reduction } => {
            reduce(*reduction, dtype, parts, output)?;
        }
        // All parts of a shift but one are empty.
        CollectiveKind::AllGather | CollectiveKind::AllToAll | CollectiveKind::Shift { .. } => {
            let mut rest = output;
            for part in parts {
                let (target, behind) = rest.split_at_mut(part.len());
                target.copy_from_slice(part);
                rest = behind;
            }
        }
        CollectiveKind::Broadcast { root } => output.copy_from_slice(parts[*root as usize]),
        CollectiveKind::Send { .. } | CollectiveKind::Recv { .. } => {}
    }
    Ok(())
}
