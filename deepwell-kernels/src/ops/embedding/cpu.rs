//! Embedding: each token selects its row of a table; the backward sums the gradients per row.

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ROWS_PER_CHUNK, chunk_elements, vectorized};

/// A token outside the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "token {token} at index {index} is outside the vocabulary of {vocabulary}\n\
     hint: the data was made with another tokenizer than the model's"
)]
pub struct TokenOutOfRange {
    /// Position in the list of tokens.
    pub index: usize,
    /// The token at this position.
    pub token: i32,
    /// Rows of the table.
    pub vocabulary: usize,
}

/// Checks that all tokens are in `0..vocabulary`.
///
/// # Errors
///
/// [`TokenOutOfRange`] with the position and value of the first token outside the table.
pub fn check_tokens(tokens: &[i32], vocabulary: usize) -> Result<(), TokenOutOfRange> {
    let outside = |&token: &i32| usize::try_from(token).map_or(true, |row| row >= vocabulary);
    match tokens.iter().position(outside) {
        Some(index) => Err(TokenOutOfRange { index, token: tokens[index], vocabulary }),
        None => Ok(()),
    }
}

/// Writes `out[t] = table[tokens[t]]`, with `table` `[vocabulary, hidden]` and `out`
/// `[tokens.len(), hidden]`, both row-major.
///
/// # Errors
///
/// [`TokenOutOfRange`] for a token outside the table; `out` is then unchanged.
///
/// # Panics
///
/// If a slice's length does not fit the shapes.
pub fn embedding_forward<E: Element>(
    tokens: &[i32],
    table: &[E],
    vocabulary: usize,
    hidden: usize,
    out: &mut [E],
) -> Result<(), TokenOutOfRange> {
    assert_eq!(table.len(), vocabulary * hidden, "`table` is not [vocabulary, hidden]");
    assert_eq!(out.len(), tokens.len() * hidden, "`out` is not [tokens, hidden]");
    check_tokens(tokens, vocabulary)?;
    if out.is_empty() {
        return Ok(());
    }
    out.par_chunks_mut(chunk_elements(hidden)).zip(tokens.par_chunks(ROWS_PER_CHUNK)).for_each(
        |(out, tokens)| {
            for (row, &token) in out.chunks_exact_mut(hidden).zip(tokens) {
                let first = token as usize * hidden;
                row.copy_from_slice(&table[first..first + hidden]);
            }
        },
    );
    Ok(())
}

/// Writes `dtable[v] = sum of dout[t] over the tokens t equal to v`, added to the previous `dtable`
/// `[vocabulary, hidden]` if `accumulate` is set; `dout` is `[tokens.len(), hidden]`. Row `padding`
/// gets no gradient.
///
/// Each row is summed in `f32` in the order of the tokens, at any number of threads: threads share
/// the rows of the table, and each thread scans all tokens for its rows.
///
/// # Errors
///
/// [`TokenOutOfRange`] for a token outside the table; `dtable` is then unchanged.
///
/// # Panics
///
/// If a slice's length does not fit the shapes.
pub fn embedding_backward<E: Element>(
    tokens: &[i32],
    dout: &[E],
    vocabulary: usize,
    hidden: usize,
    padding: Option<usize>,
    dtable: &mut [f32],
    accumulate: bool,
) -> Result<(), TokenOutOfRange> {
    // Small chunks balance the skewed token frequencies of a text; few chunks keep the scans cheap.
    const CHUNKS: usize = 64;
    const ROWS_PER_CHUNK_MIN: usize = 4;

    assert_eq!(dout.len(), tokens.len() * hidden, "`dout` is not [tokens, hidden]");
    assert_eq!(dtable.len(), vocabulary * hidden, "`dtable` is not [vocabulary, hidden]");
    check_tokens(tokens, vocabulary)?;
    if dtable.is_empty() {
        return Ok(());
    }
    let rows_per_chunk = vocabulary.div_ceil(CHUNKS).max(ROWS_PER_CHUNK_MIN);
    dtable.par_chunks_mut(rows_per_chunk * hidden).enumerate().for_each(|(chunk, dtable)| {
        let first = chunk * rows_per_chunk;
        let rows = first..first + dtable.len() / hidden;
        vectorized(
            #[inline(always)]
            || {
                if !accumulate {
                    dtable.fill(0.0);
                }
                for (&token, dout) in tokens.iter().zip(dout.chunks_exact(hidden)) {
                    let row = token as usize;
                    if rows.contains(&row) && Some(row) != padding {
                        let target = &mut dtable[(row - first) * hidden..][..hidden];
                        for (sum, &term) in target.iter_mut().zip(dout) {
                            *sum += term.to_f32();
                        }
                    }
                }
            },
        );
    });
    Ok(())
}

pub(super) fn prepare_forward(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    let &[vocab, width] = operands.shape(1) else { return Err(operands.unexpected(1, "a matrix")) };
    let tokens = operands.input::<i32>(0)?;
    by_float!(operands, 1, E => {
        let table = operands.input::<E>(1)?;
        let out = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            embedding_forward(tokens.of(arena), table.of(arena), vocab, width, out.of(arena))
                .map_err(|error| error.to_string())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::EmbeddingBackward(op) = op else { return Err(operands.unknown_kernel()) };
    let padding = op.padding;
    let &[vocab, width] = operands.shape(2) else { return Err(operands.unexpected(2, "a matrix")) };
    let accumulate = operands.adds();
    let tokens = operands.input::<i32>(0)?;
    let dtable = operands.target::<f32>(2)?;
    by_float!(operands, 1, E => {
        let dout = operands.input::<E>(1)?;
        Ok(Box::new(move |arena| {
            embedding_backward(
                tokens.of(arena),
                dout.of(arena),
                vocab,
                width,
                padding,
                dtable.of(arena),
                accumulate,
            )
            .map_err(|error| error.to_string())
        }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::embedding::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close, for_thread_counts, poisoned, to_f64,
    };
    use half::bf16;

    fn check<E: Element>(token_count: usize, vocabulary: usize, hidden: usize) {
        let mut random = Random::new(7 + token_count as u64);
        let tokens: Vec<i32> =
            (0..token_count).map(|_| random.below(vocabulary.max(1)) as i32).collect();
        let table: Vec<E> = random.normals(vocabulary * hidden);
        let dout: Vec<E> = random.normals(token_count * hidden);
        let before: Vec<f32> = random.normals(vocabulary * hidden);

        for_thread_counts(|| {
            let mut out = poisoned::<E>(token_count * hidden);
            embedding_forward(&tokens, &table, vocabulary, hidden, &mut out).unwrap();
            let expected = oracle::forward(&tokens, &to_f64(&table), hidden);
            // A copy, so no tolerance.
            assert_close("out", &out, &expected, 0.0, 0.0);
            out
        });
        let last = vocabulary.checked_sub(1);
        for (accumulate, padding) in [(false, None), (true, None), (false, last), (true, last)] {
            for_thread_counts(|| {
                let mut dtable =
                    if accumulate { before.clone() } else { poisoned(vocabulary * hidden) };
                let target = &mut dtable;
                embedding_backward(&tokens, &dout, vocabulary, hidden, padding, target, accumulate)
                    .unwrap();
                let dout = to_f64(&dout);
                let mut expected = oracle::backward(&tokens, &dout, vocabulary, hidden, padding);
                if accumulate {
                    expected.iter_mut().zip(&before).for_each(|(e, &b)| *e += f64::from(b));
                }
                // One f32 addition per token, each with an error of 2^-24 of a partial sum; the
                // sums of `token_count` normal numbers stay below 4 sqrt(token_count) + 4.
                let n = token_count as f64 + 1.0;
                let absolute = n * 2f64.powi(-24) * (4.0 * n.sqrt() + 4.0);
                assert_close("dtable", &dtable, &expected, 0.0, absolute);
                dtable
            });
        }
    }

    #[test]
    fn matches_the_oracle() {
        for (token_count, vocabulary, hidden) in [
            (0, 5, 8),
            (1, 1, 1),
            (3, 7, 5),
            (63, 256, 33),
            (64, 3, 64),
            (65, 1000, 31),
            (1024, 256, 64),
        ] {
            check::<bf16>(token_count, vocabulary, hidden);
            check::<f32>(token_count, vocabulary, hidden);
        }
    }

    #[test]
    fn names_the_token_that_has_no_row() {
        let table = [0.5f32; 6];
        let dout = [1.0f32; 6];
        for (tokens, index, token) in
            [([0, 3, 9], 1, 3), ([2, 1, -1], 2, -1), ([i32::MAX; 3], 0, i32::MAX)]
        {
            let expected = TokenOutOfRange { index, token, vocabulary: 3 };
            let mut out = [7.0; 6];
            assert_eq!(embedding_forward(&tokens, &table, 3, 2, &mut out), Err(expected));
            assert_eq!(out, [7.0; 6]);
            let got = embedding_backward(&tokens, &dout, 3, 2, None, &mut out, false);
            assert_eq!(got, Err(expected));
            assert_eq!(out, [7.0; 6]);
        }
        let message = check_tokens(&[0, 3], 3).unwrap_err().to_string();
        assert!(message.starts_with("token 3 at index 1 is outside the vocabulary of 3"));
        assert_eq!(check_tokens(&[], 0), Ok(()));
    }
}
