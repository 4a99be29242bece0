//! Embedding with a slice of the table: tokens of other ranks give zeros. In the sum over ranks
//! only one term of a token is nonzero, so the sum equals the embedding to the bit.

use deepwell_ir::Op;
use deepwell_ir::ops::VocabSlice;
use rayon::prelude::*;

use crate::KernelError;
use crate::ops::embedding::cpu::{TokenOutOfRange, check_tokens};
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ROWS_PER_CHUNK, chunk_elements};

/// Writes `out[t] = table[tokens[t] - first]`, and zeros for tokens of other ranks; `table` is
/// `[slice.rows, hidden]`, `out` `[tokens.len(), hidden]`.
///
/// # Errors
///
/// [`TokenOutOfRange`] for a token outside the whole vocabulary; `out` is then unchanged.
///
/// # Panics
///
/// If a slice's length does not fit the shapes.
pub fn embedding_forward<E: Element>(
    tokens: &[i32],
    table: &[E],
    slice: &VocabSlice,
    hidden: usize,
    out: &mut [E],
) -> Result<(), TokenOutOfRange> {
    assert_eq!(table.len(), slice.rows * hidden, "`table` is not [rows, hidden]");
    assert_eq!(out.len(), tokens.len() * hidden, "`out` is not [tokens, hidden]");
    check_tokens(tokens, slice.vocab)?;
    if out.is_empty() {
        return Ok(());
    }
    out.par_chunks_mut(chunk_elements(hidden)).zip(tokens.par_chunks(ROWS_PER_CHUNK)).for_each(
        |(out, tokens)| {
            for (out, &token) in out.chunks_exact_mut(hidden).zip(tokens) {
                match slice.row_of(token) {
                    Some(row) => out.copy_from_slice(&table[row * hidden..][..hidden]),
                    None => out.fill(E::from_f32(0.0)),
                }
            }
        },
    );
    Ok(())
}

/// Writes `dtable[v] = sum of dout[t] over tokens[t] = first + v`, added to the previous `dtable`
/// `[slice.rows, hidden]` if `accumulate` is set; `dout` is `[tokens.len(), hidden]`. Token
/// `padding` adds nothing.
///
/// Each row is summed in `f32` in the order of the tokens, as without vocabulary parallelism.
///
/// # Errors
///
/// [`TokenOutOfRange`] for a token outside the whole vocabulary; `dtable` is then unchanged.
///
/// # Panics
///
/// If a slice's length does not fit the shapes.
pub fn embedding_backward<E: Element>(
    tokens: &[i32],
    dout: &[E],
    slice: &VocabSlice,
    hidden: usize,
    padding: Option<usize>,
    dtable: &mut [f32],
    accumulate: bool,
) -> Result<(), TokenOutOfRange> {
    assert_eq!(dout.len(), tokens.len() * hidden, "`dout` is not [tokens, hidden]");
    assert_eq!(dtable.len(), slice.rows * hidden, "`dtable` is not [rows, hidden]");
    check_tokens(tokens, slice.vocab)?;
    if !accumulate {
        dtable.fill(0.0);
    }
    let mut tokens_of_row: Vec<Vec<usize>> = vec![Vec::new(); slice.rows];
    for (index, &token) in tokens.iter().enumerate() {
        if let Some(row) = slice.row_of(token).filter(|_| Some(token as usize) != padding) {
            tokens_of_row[row].push(index);
        }
    }
    dtable.par_chunks_mut(hidden.max(1)).zip(&tokens_of_row).for_each(|(sums, tokens)| {
        for &token in tokens {
            for (sum, &term) in sums.iter_mut().zip(&dout[token * hidden..][..hidden]) {
                *sum += term.to_f32();
            }
        }
    });
    Ok(())
}

fn slice_of(operands: &Operands<'_>, op: &Op) -> Result<VocabSlice, KernelError> {
    match op {
        Op::VocabParallelEmbedding(op) => Ok(op.slice),
        Op::VocabParallelEmbeddingBackward(op) => Ok(op.slice),
        _ => Err(operands.unknown_kernel()),
    }
}

pub(super) fn prepare_embedding(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let &[_, width] = operands.shape(1) else { return Err(operands.unexpected(1, "a matrix")) };
    let slice = slice_of(operands, op)?;
    let tokens = operands.input::<i32>(0)?;
    by_float!(operands, 1, E => {
        let table = operands.input::<E>(1)?;
        let out = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            embedding_forward(tokens.of(arena), table.of(arena), &slice, width, out.of(arena))
                .map_err(|error| error.to_string())
        }))
    })
}

pub(super) fn prepare_embedding_backward(
    operands: &Operands<'_>,
    op: &Op,
) -> Result<Run, KernelError> {
    let &[_, width] = operands.shape(2) else { return Err(operands.unexpected(2, "a matrix")) };
    let Op::VocabParallelEmbeddingBackward(op) = op else { return Err(operands.unknown_kernel()) };
    let (slice, padding) = (op.slice, op.padding);
    let accumulate = operands.adds();
    let tokens = operands.input::<i32>(0)?;
    let dtable = operands.target::<f32>(2)?;
    by_float!(operands, 1, E => {
        let dout = operands.input::<E>(1)?;
        Ok(Box::new(move |arena| {
            let tokens = tokens.of(arena);
            let dout = dout.of(arena);
            let dtable = dtable.of(arena);
            embedding_backward(tokens, dout, &slice, width, padding, dtable, accumulate)
                .map_err(|error| error.to_string())
        }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::embedding::cpu as whole;
    use crate::runtime::cpu::test_support::{Random, for_thread_counts, poisoned};
    use half::bf16;

    /// The combined results of all ranks equal those of a single rank to the bit.
    fn check<E: Element>(token_count: usize, vocab: usize, hidden: usize, parts: usize) {
        let mut random = Random::new(7 + token_count as u64);
        let tokens: Vec<i32> = (0..token_count).map(|_| random.below(vocab) as i32).collect();
        let table: Vec<E> = random.normals(vocab * hidden);
        let dout: Vec<E> = random.normals(token_count * hidden);
        let before: Vec<f32> = random.normals(vocab * hidden);
        let mut expected = poisoned::<E>(dout.len());
        whole::embedding_forward(&tokens, &table, vocab, hidden, &mut expected).unwrap();
        let last = Some(vocab - 1);
        for (accumulate, padding) in [(false, None), (true, None), (false, last), (true, last)] {
            let start = |len| if accumulate { before.clone() } else { poisoned(len) };
            let mut dtable = start(before.len());
            let target = &mut dtable;
            whole::embedding_backward(&tokens, &dout, vocab, hidden, padding, target, accumulate)
                .unwrap();
            let mut sum = vec![0f32; dout.len()];
            for place in 0..parts {
                let slice = VocabSlice::of(vocab, place, parts).unwrap();
                let own = slice.first * hidden..(slice.first + slice.rows) * hidden;
                let table = &table[own.clone()];
                let mut part = poisoned::<E>(dout.len());
                embedding_forward(&tokens, table, &slice, hidden, &mut part).unwrap();
                sum.iter_mut().zip(&part).for_each(|(sum, part)| *sum += part.to_f32());
                for_thread_counts(|| {
                    let mut got = start(before.len())[own.clone()].to_vec();
                    let target = &mut got;
                    embedding_backward(&tokens, &dout, &slice, hidden, padding, target, accumulate)
                        .unwrap();
                    assert_eq!(got, dtable[own.clone()], "{place} of {parts}");
                    got
                });
            }
            assert!(sum.iter().zip(&expected).all(|(sum, expected)| *sum == expected.to_f32()));
        }
    }

    #[test]
    fn ranks_together_give_what_one_rank_gives() {
        for (tokens, vocab, hidden, parts) in
            [(0, 4, 8, 2), (3, 6, 5, 3), (65, 256, 33, 2), (1024, 256, 16, 4)]
        {
            check::<bf16>(tokens, vocab, hidden, parts);
            check::<f32>(tokens, vocab, hidden, parts);
        }
    }

    #[test]
    fn names_the_token_that_no_rank_has() {
        let slice = VocabSlice { first: 2, rows: 2, vocab: 6 };
        let mut out = [7.0f32; 4];
        for (tokens, index, token) in [([0, 6], 1, 6), ([-1, 9], 0, -1)] {
            let expected = Err(TokenOutOfRange { index, token, vocabulary: 6 });
            assert_eq!(embedding_forward(&tokens, &[0.5; 4], &slice, 2, &mut out), expected);
            let got = embedding_backward(&tokens, &[0.5f32; 4], &slice, 2, None, &mut out, false);
            assert_eq!((got, out), (expected, [7.0; 4]));
        }
    }
}
