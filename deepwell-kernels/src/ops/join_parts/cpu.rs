//! Contiguous parts of a matrix, placed side by side: copies of bytes.

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::operands::{Operands, Run};
use crate::runtime::cpu::parallel::ROWS_PER_CHUNK;

/// Copies the rows of `x`, `parts` contiguous matrices of `rows` rows each, to `joined`: row `r` of
/// `joined` is row `r` of every part, in order.
///
/// # Panics
///
/// If there is no part, the lengths differ, or the length is not a multiple of `parts * rows`.
pub fn join_parts(x: &[u8], parts: usize, rows: usize, joined: &mut [u8]) {
    assert_eq!(x.len(), joined.len(), "`x` and `joined` differ in length");
    if x.is_empty() {
        return;
    }
    assert!(x.len().is_multiple_of(parts * rows), "{} bytes, {parts} x {rows} rows", x.len());
    let bytes = x.len() / (parts * rows);
    joined.par_chunks_mut(ROWS_PER_CHUNK * parts * bytes).enumerate().for_each(
        |(chunk, joined)| {
            for (at, row) in joined.chunks_exact_mut(parts * bytes).enumerate() {
                for (part, target) in row.chunks_exact_mut(bytes).enumerate() {
                    let from = part * rows + chunk * ROWS_PER_CHUNK + at;
                    target.copy_from_slice(&x[from * bytes..][..bytes]);
                }
            }
        },
    );
}

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::JoinParts(op) = op else { return Err(operands.unknown_kernel()) };
    let (parts, rows) = (op.parts, operands.shape(1)[0]);
    let (x, joined) = (operands.input_bytes(0)?, operands.target_bytes(1)?);
    Ok(Box::new(move |arena| {
        join_parts(x.of(arena), parts, rows, joined.of(arena));
        Ok(())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::join_parts::oracle;
    use crate::runtime::cpu::test_support::for_thread_counts;

    #[test]
    fn matches_the_oracle() {
        for parts in [1, 2, 3, 8] {
            for (rows, columns) in [(0, 4), (1, 1), (1, 128), (63, 5), (64, 16), (65, 3)] {
                let byte = |at: usize| (at * at + at / 251) as u8;
                let x: Vec<u8> = (0..parts * rows * columns).map(byte).collect();
                for_thread_counts(|| {
                    let mut joined = vec![0xA5; x.len()];
                    join_parts(&x, parts, rows, &mut joined);
                    assert_eq!(joined, oracle::join(&x, parts, rows, columns));
                    joined
                });
            }
        }
    }
}
