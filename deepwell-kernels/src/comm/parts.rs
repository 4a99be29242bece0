//! Which part of its input each rank of a group gives to which, and what is made of them.

use deepwell_ir::DType;
use deepwell_ir::ops::CollectiveKind;

use super::reduce;

/// What the rank at place `from` gives the one at place `to`, among so many.
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

/// Makes the output of one place from the parts that all have given it, in their order.
///
/// # Errors
/// A type whose numbers cannot be reduced.
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
        // Of a shift all parts but one are empty.
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
