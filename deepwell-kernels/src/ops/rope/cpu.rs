//! Rotary position embedding as Hugging Face's Llama code applies it.
//!
//! Source: Su et al., "RoFormer", arXiv 2104.09864, eq. 34, in the arrangement where a head's
//! element `i` is paired with element `i + head_dim / 2` (the paper and DeepSeek-V3 pair
//! neighbours). Weights for one arrangement give wrong attention under the other.
//!
//! A pair `(a, b)` at an angle `t` becomes `(a cos t - b sin t, b cos t + a sin t)`; the backward
//! is the rotation by `-t`.

use deepwell_ir::ops::Zigzag;
use deepwell_ir::{KernelRequest, Op};
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::Tier;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ROWS_PER_CHUNK, chunk_elements, vectorized};

/// Sizes of a `[tokens, heads * head_dim]` tensor whose token `t` has the position `t % seq`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RopeShape {
    /// Heads per row.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Unrotated elements at the beginning of a head; an even number of rotated elements follows.
    pub plain_dim: usize,
    /// Whether a pair is two neighbours, instead of one element of each half of the rotated part.
    pub interleaved: bool,
    /// Tokens per sequence; the rows are contiguous whole sequences.
    pub seq: usize,
}

impl RopeShape {
    /// Pairs of a head.
    fn pairs(&self) -> usize {
        (self.head_dim - self.plain_dim) / 2
    }
}

/// Fills `cos` and `sin`, both `[seq, head_dim / 2]`, for the angles `position * inv_freq[i]`.
///
/// `inv_freq` `[head_dim / 2]` holds `base^(-2 i / head_dim)`, scaled by the model's
/// `rope_scaling`, if any. The angle is rounded to `f32`, as in the training of published models;
/// its cosine and sine are exact except for about the last bit.
///
/// # Panics
///
/// If the tables do not hold `seq * inv_freq.len()` numbers.
pub fn rope_tables(inv_freq: &[f32], seq: usize, cos: &mut [f32], sin: &mut [f32]) {
    rope_tables_at(inv_freq, (seq, &|token| token), cos, sin);
}

/// [`rope_tables`] for tokens at arbitrary positions of a sequence.
pub(super) fn rope_tables_at(
    inv_freq: &[f32],
    (seq, position_of): (usize, &dyn Fn(usize) -> usize),
    cos: &mut [f32],
    sin: &mut [f32],
) {
    let half = inv_freq.len();
    assert_eq!(cos.len(), seq * half, "`cos` is not [seq, head_dim / 2]");
    assert_eq!(sin.len(), seq * half, "`sin` is not [seq, head_dim / 2]");
    if half == 0 {
        return;
    }
    let rows = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
    for (token, (cos, sin)) in rows.enumerate() {
        let position = position_of(token);
        for ((cos, sin), &inv_freq) in cos.iter_mut().zip(sin).zip(inv_freq) {
            let angle = f64::from(position as f32 * inv_freq);
            *cos = angle.cos() as f32;
            *sin = angle.sin() as f32;
        }
    }
}

/// Rotates `x` into `y`, both `[tokens, heads * head_dim]`, with the tables of [`rope_tables`].
///
/// # Panics
///
/// If the number of rotated elements is odd, a size is zero, or a slice's length does not fit the
/// shape.
pub fn rope_forward<E: Element>(x: &[E], shape: RopeShape, cos: &[f32], sin: &[f32], y: &mut [E]) {
    rotate::<E, false>(x, shape, cos, sin, y);
}

/// [`rope_forward`] in place.
///
/// # Panics
///
/// As [`rope_forward`].
pub fn rope_forward_in_place<E: Element>(x: &mut [E], shape: RopeShape, cos: &[f32], sin: &[f32]) {
    rotate_in_place::<E, false>(x, shape, cos, sin);
}

/// Computes the gradient of [`rope_forward`]: rotates `dy` back into `dx`.
///
/// # Panics
///
/// As [`rope_forward`].
pub fn rope_backward<E: Element>(
    dy: &[E],
    shape: RopeShape,
    cos: &[f32],
    sin: &[f32],
    dx: &mut [E],
) {
    rotate::<E, true>(dy, shape, cos, sin, dx);
}

/// [`rope_backward`] in place.
///
/// # Panics
///
/// As [`rope_forward`].
pub fn rope_backward_in_place<E: Element>(
    dy: &mut [E],
    shape: RopeShape,
    cos: &[f32],
    sin: &[f32],
) {
    rotate_in_place::<E, true>(dy, shape, cos, sin);
}

/// Checks the shape against the slices and returns the elements of a row.
fn row_elements(len: usize, shape: RopeShape, cos: &[f32], sin: &[f32]) -> usize {
    let RopeShape { heads, head_dim, plain_dim, seq, .. } = shape;
    assert!(heads > 0 && head_dim > 0 && seq > 0, "a size of the shape is zero: {shape:?}");
    assert!(plain_dim <= head_dim, "more than a head does not turn: {shape:?}");
    assert_eq!((head_dim - plain_dim) % 2, 0, "an odd number of elements turns: {shape:?}");
    assert_eq!(cos.len(), seq * shape.pairs(), "`cos` is not [seq, pairs of a head]");
    assert_eq!(sin.len(), cos.len(), "`sin` is not [seq, pairs of a head]");
    assert_eq!(len % (heads * head_dim), 0, "the tensor is not [tokens, heads * head_dim]");
    heads * head_dim
}

/// Rotates a pair by its angle, or back.
#[inline(always)]
fn rotate_pair<const BACK: bool>(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    let sin = if BACK { -sin } else { sin };
    (a * cos - b * sin, b * cos + a * sin)
}

/// Rotates pairs of neighbours in place.
#[inline(always)]
fn rotate_neighbours<E: Element, const BACK: bool>(x: &mut [E], cos: &[f32], sin: &[f32]) {
    for ([a, b], (&cos, &sin)) in x.as_chunks_mut::<2>().0.iter_mut().zip(cos.iter().zip(sin)) {
        let (turned_a, turned_b) = rotate_pair::<BACK>(a.to_f32(), b.to_f32(), cos, sin);
        (*a, *b) = (E::from_f32(turned_a), E::from_f32(turned_b));
    }
}

fn rotate<E: Element, const BACK: bool>(
    x: &[E],
    shape: RopeShape,
    cos: &[f32],
    sin: &[f32],
    y: &mut [E],
) {
    assert_eq!(x.len(), y.len(), "input and output differ in length");
    let row = row_elements(x.len(), shape, cos, sin);
    let head_dim = shape.head_dim;
    let plain_dim = shape.plain_dim;
    let half = shape.pairs();
    let chunk = chunk_elements(row);
    y.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).enumerate().for_each(|(index, (y, x))| {
        vectorized(
            #[inline(always)]
            || {
                let first = index * ROWS_PER_CHUNK;
                let rows = y.chunks_exact_mut(row).zip(x.chunks_exact(row)).enumerate();
                for (token, (y, x)) in rows {
                    let position = (first + token) % shape.seq;
                    let cos = &cos[position * half..][..half];
                    let sin = &sin[position * half..][..half];
                    let heads = y.chunks_exact_mut(head_dim).zip(x.chunks_exact(head_dim));
                    for (y, x) in heads {
                        let (y_plain, y) = y.split_at_mut(plain_dim);
                        let (x_plain, x) = x.split_at(plain_dim);
                        y_plain.copy_from_slice(x_plain);
                        if shape.interleaved {
                            y.copy_from_slice(x);
                            rotate_neighbours::<E, BACK>(y, cos, sin);
                            continue;
                        }
                        let (y_a, y_b) = y.split_at_mut(half);
                        let (x_a, x_b) = x.split_at(half);
                        let pairs = y_a.iter_mut().zip(y_b).zip(x_a.iter().zip(x_b));
                        for (((y_a, y_b), (&x_a, &x_b)), (&cos, &sin)) in
                            pairs.zip(cos.iter().zip(sin))
                        {
                            let (a, b) = rotate_pair::<BACK>(x_a.to_f32(), x_b.to_f32(), cos, sin);
                            *y_a = E::from_f32(a);
                            *y_b = E::from_f32(b);
                        }
                    }
                }
            },
        );
    });
}

fn rotate_in_place<E: Element, const BACK: bool>(
    x: &mut [E],
    shape: RopeShape,
    cos: &[f32],
    sin: &[f32],
) {
    let row = row_elements(x.len(), shape, cos, sin);
    let half = shape.pairs();
    x.par_chunks_mut(chunk_elements(row)).enumerate().for_each(|(index, x)| {
        vectorized(
            #[inline(always)]
            || {
                let first = index * ROWS_PER_CHUNK;
                for (token, x) in x.chunks_exact_mut(row).enumerate() {
                    let position = (first + token) % shape.seq;
                    let cos = &cos[position * half..][..half];
                    let sin = &sin[position * half..][..half];
                    for head in x.chunks_exact_mut(shape.head_dim) {
                        let head = &mut head[shape.plain_dim..];
                        if shape.interleaved {
                            rotate_neighbours::<E, BACK>(head, cos, sin);
                            continue;
                        }
                        let (x_a, x_b) = head.split_at_mut(half);
                        let pairs = x_a.iter_mut().zip(x_b).zip(cos.iter().zip(sin));
                        for ((x_a, x_b), (&cos, &sin)) in pairs {
                            let (a, b) = rotate_pair::<BACK>(x_a.to_f32(), x_b.to_f32(), cos, sin);
                            *x_a = E::from_f32(a);
                            *x_b = E::from_f32(b);
                        }
                    }
                }
            },
        );
    });
}

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let (op, backward, part) = match op {
        Op::Rope(op) => (op, false, None),
        Op::RopeBackward(op) => (&op.forward, true, None),
        Op::RopeOfPart(op) => (&op.rope, op.back, Some(op.part)),
        _ => return Err(operands.unknown_kernel()),
    };
    let seq = operands.program.seq;
    let (heads, head_dim) = (op.heads, op.head_dim);
    let (plain_dim, interleaved) = (op.plain_dim, op.interleaved);
    let shape = RopeShape { heads, head_dim, plain_dim, interleaved, seq };
    let factor = op.attention_factor;
    let frequencies = op.inverse_frequencies.clone();
    let tables = operands.workspace::<f32>()?;
    by_float!(operands, 0, E => {
        let (x, y) = (operands.input::<E>(0)?, operands.target::<E>(1)?);
        Ok(Box::new(move |arena| {
            // Computing a few thousand sines is less work than a pass over one head's queries. The
            // workspace has room for the tokens of a micro-batch; the tables need those of one
            // sequence.
            let numbers = seq * frequencies.len();
            let (cos, sin) = tables.of(arena)[..2 * numbers].split_at_mut(numbers);
            let position =
                |token| part.map_or(token, |part: Zigzag| part.position(token, seq));
            rope_tables_at(&frequencies, (seq, &position), cos, sin);
            if factor != 1.0 {
                cos.iter_mut().chain(sin.iter_mut()).for_each(|value| *value *= factor);
            }
            if backward {
                rope_backward(x.of(arena), shape, cos, sin, y.of(arena));
            } else {
                rope_forward(x.of(arena), shape, cos, sin, y.of(arena));
            }
            Ok(())
        }))
    })
}

pub(super) fn prepare_by_table(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::RopeByTable(op) = op else { return Err(operands.unknown_kernel()) };
    let (half, back) = (op.head_dim / 2, op.back);
    let table = operands.input::<f32>(1)?;
    let (heads, head_dim) = (op.heads, op.head_dim);
    by_float!(operands, 0, E => {
        let (x, y) = (operands.input::<E>(0)?, operands.target::<E>(2)?);
        Ok(Box::new(move |arena| {
            let (x, table) = (x.of(arena), table.of(arena));
            let rows = || table.chunks_exact(2 * half.max(1));
            let cos: Vec<f32> = rows().flat_map(|row| &row[..half]).copied().collect();
            let sin: Vec<f32> = rows().flat_map(|row| &row[half..]).copied().collect();
            let shape = RopeShape { heads, head_dim, seq: rows().len(), ..RopeShape::default() };
            if back {
                rope_backward(x, shape, &cos, &sin, y.of(arena));
            } else {
                rope_forward(x, shape, &cos, &sin, y.of(arena));
            }
            Ok(())
        }))
    })
}

/// Bytes of the cosines and sines of every position: at most as many positions as tokens of a
/// micro-batch.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let rope = match request.op {
        Op::Rope(rope) => rope,
        Op::RopeBackward(backward) => &backward.forward,
        Op::RopeOfPart(part) => &part.rope,
        _ => return 0,
    };
    2 * request.operands[0].shape[0] * rope.inverse_frequencies.len() * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::rope::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close, for_thread_counts, poisoned, to_f64,
    };
    use half::bf16;

    fn inv_freq(head_dim: usize, base: f64) -> Vec<f32> {
        (0..head_dim / 2).map(|i| base.powf(-2.0 * i as f64 / head_dim as f64) as f32).collect()
    }

    fn check<E: Element>(tokens: usize, shape: RopeShape) {
        let RopeShape { heads, head_dim, seq, .. } = shape;
        let inv_freq = inv_freq(2 * shape.pairs(), 10_000.0);
        let mut cos = poisoned::<f32>(seq * shape.pairs());
        let mut sin = poisoned::<f32>(seq * shape.pairs());
        let of = oracle::Shape {
            heads,
            head_dim,
            plain_dim: shape.plain_dim,
            interleaved: shape.interleaved,
            seq,
        };
        rope_tables(&inv_freq, seq, &mut cos, &mut sin);
        let mut random = Random::new(tokens as u64);
        let x: Vec<E> = random.normals(tokens * heads * head_dim);

        // The tables round to f32, as do their angles, by 2^-24 of at most `seq` radians; two
        // products of numbers below 5 and one sum round in f32.
        let absolute = (seq as f64 + 4.0) * 2f64.powi(-24) * 10.0;
        let relative = f64::from(E::UNIT_ROUNDOFF);
        for back in [false, true] {
            for_thread_counts(|| {
                let mut y = poisoned::<E>(x.len());
                let mut in_place = x.clone();
                let expected = if back {
                    rope_backward(&x, shape, &cos, &sin, &mut y);
                    rope_backward_in_place(&mut in_place, shape, &cos, &sin);
                    oracle::backward(&to_f64(&x), &of, &to_f64(&inv_freq))
                } else {
                    rope_forward(&x, shape, &cos, &sin, &mut y);
                    rope_forward_in_place(&mut in_place, shape, &cos, &sin);
                    oracle::forward(&to_f64(&x), &of, &to_f64(&inv_freq))
                };
                assert_close("rotated", &y, &expected, relative, absolute);
                assert_eq!(y, in_place);
                y
            });
        }
    }

    #[test]
    fn matches_the_oracle() {
        for (tokens, heads, head_dim, seq) in [
            (0, 2, 4, 3),
            (1, 1, 2, 1),
            (6, 3, 6, 3),
            (63, 1, 64, 63),
            (65, 2, 32, 65),
            (128, 5, 34, 64),
            (256, 4, 64, 128),
        ] {
            let shape = RopeShape { heads, head_dim, seq, ..RopeShape::default() };
            check::<bf16>(tokens, shape);
            check::<f32>(tokens, shape);
            for (plain_dim, interleaved) in [(0, true), (head_dim, false), (2, false), (2, true)] {
                let shape = RopeShape { plain_dim, interleaved, ..shape };
                check::<bf16>(tokens, shape);
                check::<f32>(tokens, shape);
            }
        }
        let odd = RopeShape { heads: 2, head_dim: 9, plain_dim: 5, interleaved: true, seq: 10 };
        check::<f32>(20, odd);
    }

    /// Rows of a part of the sequence are rotated as in the whole sequence.
    #[test]
    fn parts_turn_as_in_the_whole() {
        let seq = 24;
        let ranks = 3;
        let shape = RopeShape { heads: 2, head_dim: 6, ..Default::default() };
        let inv_freq = inv_freq(6, 10.0);
        let x: Vec<f32> = Random::new(9).normals(2 * seq * 12);
        let turned = |x: &[f32], seq: usize, position: &dyn Fn(usize) -> usize| {
            let (mut cos, mut sin) = (vec![0.0; seq * 3], vec![0.0; seq * 3]);
            rope_tables_at(&inv_freq, (seq, position), &mut cos, &mut sin);
            let mut y = poisoned::<f32>(x.len());
            rope_forward(x, RopeShape { seq, ..shape }, &cos, &sin, &mut y);
            y
        };
        let whole = turned(&x, seq, &|token| token);
        for place in 0..ranks {
            let part = Zigzag { place, ranks };
            let rows: Vec<usize> = (0..2 * seq).collect();
            let rows = part.part_of(&rows, seq);
            let of = |whole: &[f32]| -> Vec<f32> {
                rows.iter().flat_map(|row| whole[row * 12..][..12].to_vec()).collect()
            };
            let own = seq / ranks;
            assert_eq!(turned(&of(&x), own, &|token| part.position(token, own)), of(&whole));
        }
    }

    #[test]
    fn pairs_elements_half_a_head_apart() {
        // By hand: head_dim 4, the frequencies 1 and 0.01, position 1.
        let (mut cos, mut sin) = ([0.0; 4], [0.0; 4]);
        rope_tables(&[1.0, 0.01], 2, &mut cos, &mut sin);
        let mut y = [0.0f32; 8];
        let x = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2.0];
        rope_forward(
            &x,
            RopeShape { heads: 1, head_dim: 4, seq: 2, ..RopeShape::default() },
            &cos,
            &sin,
            &mut y,
        );
        assert_eq!(y[..4], [1.0, 0.0, 0.0, 0.0]);
        let expected = [1f32.cos(), -2.0 * 0.01f32.sin(), 1f32.sin(), 2.0 * 0.01f32.cos()];
        for (y, expected) in y[4..].iter().zip(expected) {
            assert!((y - expected).abs() < 1e-6, "{y} is not {expected}");
        }
    }
}
