//! Learned positions: each token gets its position's row of a table added.

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ROWS_PER_CHUNK, chunk_elements};

/// Writes `out[t] = x[t] + table[(first + t) mod seq]`, each sum computed in `f32` and rounded to
/// `E`; `x` and `out` are `[tokens, hidden]`, starting at token `first`; `table` is
/// `[positions, hidden]`.
///
/// # Panics
///
/// If a size is zero, `table` has fewer than `seq` rows, or a slice's length does not fit.
pub fn add_positions_forward<E: Element>(
    x: &[E],
    table: &[E],
    first: usize,
    seq: usize,
    hidden: usize,
    out: &mut [E],
) {
    assert!(seq > 0 && hidden > 0, "`seq` or `hidden` is zero");
    assert!(table.len() >= seq * hidden, "`table` has fewer than `seq` rows");
    assert_eq!(x.len(), out.len(), "`x` and `out` differ in length");
    assert_eq!(x.len() % hidden, 0, "`x` is not [tokens, hidden]");
    let chunk = chunk_elements(hidden);
    out.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).enumerate().for_each(
        |(chunk_index, (out, x))| {
            let rows = out.chunks_exact_mut(hidden).zip(x.chunks_exact(hidden));
            for (row, (out, x)) in rows.enumerate() {
                let position = (first + chunk_index * ROWS_PER_CHUNK + row) % seq;
                let terms = x.iter().zip(&table[position * hidden..][..hidden]);
                for (out, (x, table)) in out.iter_mut().zip(terms) {
                    *out = E::from_f32(x.to_f32() + table.to_f32());
                }
            }
        },
    );
}

/// Writes `dtable[s] = sum of dout[t] over (first + t) mod seq = s`, added to the previous `dtable`
/// `[positions, hidden]` if `accumulate` is set; `dout` is `[tokens, hidden]`, starting at token
/// `first`. Rows from `seq` on get zero.
///
/// Each row is summed in `f32` in the order of the tokens, at any number of threads.
///
/// # Panics
///
/// If a size is zero, `dtable` has fewer than `seq` rows, or a slice's length does not fit.
pub fn add_positions_backward<E: Element>(
    dout: &[E],
    first: usize,
    seq: usize,
    hidden: usize,
    dtable: &mut [f32],
    accumulate: bool,
) {
    assert!(seq > 0 && hidden > 0, "`seq` or `hidden` is zero");
    assert!(dtable.len() >= seq * hidden, "`dtable` has fewer than `seq` rows");
    assert_eq!(dout.len() % hidden, 0, "`dout` is not [tokens, hidden]");
    let tokens = dout.len() / hidden;
    dtable.par_chunks_mut(hidden).enumerate().for_each(|(position, target)| {
        if !accumulate {
            target.fill(0.0);
        }
        if position >= seq {
            return;
        }
        // The first token at this position.
        let begin = (position + seq - first % seq) % seq;
        for token in (begin..tokens).step_by(seq) {
            for (sum, term) in target.iter_mut().zip(&dout[token * hidden..][..hidden]) {
                *sum += term.to_f32();
            }
        }
    });
}

/// The error message for sequences of `seq` tokens and a table of `positions` rows, with a hint.
pub(crate) fn too_few_positions(positions: usize, seq: usize) -> String {
    format!(
        "expected sequences of 1 to {positions} tokens, got {seq}\n\
         hint: the model has {positions} learned positions; take shorter sequences"
    )
}

/// Returns the sequence length and the width of the position table at operand `index`, which must
/// have at least one row per token of a sequence.
fn sizes(operands: &Operands<'_>, index: usize) -> Result<(usize, usize), KernelError> {
    let seq = operands.program.seq;
    match *operands.shape(index) {
        [positions, width] if positions >= seq && width > 0 && seq > 0 => Ok((seq, width)),
        [positions, _] => Err(KernelError::Run {
            call: operands.call.name.clone(),
            what: too_few_positions(positions, seq),
        }),
        _ => Err(operands.unexpected(index, "a matrix")),
    }
}

/// Returns the index of the first of a call's `tokens` rows.
fn first_token(op: &Op, tokens: usize) -> usize {
    match op {
        Op::AddPositionsOfPart(part) => part.place * tokens,
        Op::AddPositionsOfPartBackward(part) => part.place * tokens,
        _ => 0,
    }
}

pub(super) fn prepare_forward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let (seq, width) = sizes(operands, 1)?;
    let first = first_token(op, operands.shape(0)[0]);
    by_float!(operands, 0, E => {
        let (x, table) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let out = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            let (x, table) = (x.of(arena), table.of(arena));
            add_positions_forward(x, table, first, seq, width, out.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let (seq, width) = sizes(operands, 1)?;
    let first = first_token(op, operands.shape(0)[0]);
    let accumulate = operands.adds();
    let dtable = operands.target::<f32>(1)?;
    by_float!(operands, 0, E => {
        let dout = operands.input::<E>(0)?;
        Ok(Box::new(move |arena| {
            let (dout, dtable) = (dout.of(arena), dtable.of(arena));
            add_positions_backward(dout, first, seq, width, dtable, accumulate);
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::ops::embedding::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close, for_thread_counts, poisoned, to_f64,
    };
    use half::bf16;

    /// Checks the rows `range` of consecutive sequences of `seq` tokens.
    fn check<E: Element>(range: Range<usize>, seq: usize, positions: usize, hidden: usize) {
        let mut random = Random::new(11 + range.end as u64);
        let first = range.start;
        let tokens: Vec<i32> = range.map(|token| (token % seq) as i32).collect();
        let x: Vec<E> = random.normals(tokens.len() * hidden);
        let table: Vec<E> = random.normals(positions * hidden);
        let before: Vec<f32> = random.normals(positions * hidden);
        let rows = oracle::forward(&tokens, &to_f64(&table), hidden);
        let sums: Vec<f64> = to_f64(&x).iter().zip(rows).map(|(x, row)| x + row).collect();
        for_thread_counts(|| {
            let mut out = poisoned::<E>(x.len());
            add_positions_forward(&x, &table, first, seq, hidden, &mut out);
            // One sum, rounded to f32 and to E: half a unit of bf16 is 2^-9.
            assert_close("out", &out, &sums, 2f64.powi(-8), 1e-6);
            out
        });
        for accumulate in [false, true] {
            for_thread_counts(|| {
                let mut dtable = if accumulate { before.clone() } else { poisoned(before.len()) };
                add_positions_backward(&x, first, seq, hidden, &mut dtable, accumulate);
                let mut expected = oracle::backward(&tokens, &to_f64(&x), positions, hidden, None);
                if accumulate {
                    expected.iter_mut().zip(&before).for_each(|(e, &b)| *e += f64::from(b));
                }
                // At most four f32 additions of numbers below 8, each off by 2^-24 of the sum.
                assert_close("dtable", &dtable, &expected, 0.0, 4.0 * 32.0 * 2f64.powi(-24));
                dtable
            });
        }
    }

    #[test]
    fn matches_the_oracle() {
        for (range, seq, positions, hidden) in [
            (0..1, 1, 1, 1),
            (0..6, 3, 5, 7),
            (0..99, 33, 33, 64),
            (0..192, 96, 128, 16),
            // Parts that begin and end within a sequence, and a part shorter than a sequence.
            (3..6, 2, 5, 7),
            (50..150, 50, 50, 8),
            (75..150, 50, 64, 8),
            (24..48, 96, 96, 4),
            (0..0, 4, 4, 4),
        ] {
            check::<f32>(range.clone(), seq, positions, hidden);
            check::<bf16>(range, seq, positions, hidden);
        }
    }
}
