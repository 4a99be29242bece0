//! The hardware's sums.
//!
//! Three ways lead to the same bits; what the values are decides which is taken.
//!
//! - Where no term can lose a bit, because the bits of all products and of the accumulator lie in
//!   the window that is kept, the products are a sum of 16-bit integers.
//! - Else each product, exact in binary64, is cut. Adding a number to a large one, whose last bit
//!   has the weight of the last bit that is kept, rounds it there; to the nearest, so a little
//!   less than half of that is taken off first. The large number stays and takes the next product:
//!   the sum needs no step of its own.
//! - With infinities and NaNs among the terms, these are added alone.

use rayon::prelude::*;

use super::element::{LEAST_EXPONENT, power_of_two};
use super::model::Model;
use super::operand::Operand;
use super::panel::{BLOCK, Panel, Span};
use super::rounding::{self, Accumulated};
use super::spec::{Accumulate, ProductSpec};

/// Multiplications below which more threads cost more than they bring.
const WORK_MIN: usize = 1 << 18;
/// What is taken off a term before it is rounded to the nearest, in units of the last bit kept:
/// half less 2^-26, so that the largest term below the next unit, which is 2^-24 less, does not
/// round up to it, and a term that is a number of units is not half way to the one before.
const BELOW_HALF: f64 = 0.5 - 1.0 / 67_108_864.0;
/// A number whose last bit is one unit, with room for sums of either sign.
const LARGE: f64 = 6_755_399_441_055_744.0;
/// Below the exponents of all terms, and such that nothing here is subnormal in binary64.
const EXPONENT_MIN: i32 = -600;
/// Bits that two narrow rows may have together, so that 32 products stay below 2^31.
const WIDTH_MAX: i32 = 24;

/// Adds the product to the accumulator, step by step.
pub(super) fn multiply(
    spec: &ProductSpec,
    model: &Model,
    (m, n, k): (usize, usize, usize),
    a: &Operand<'_>,
    b: &Operand<'_>,
    accumulator: &mut [u32],
    negate: bool,
) {
    for start in (0..k).step_by(model.step) {
        let span = Span { k, start, length: model.step.min(k - start) };
        let a = Panel::new(spec.a, a, m, span, negate);
        let b = Panel::new(spec.b, b, n, span, false);
        let step = Step { model, length: span.length, b_transposed: b.transposed(), a, b };
        for_rows(accumulator, n, m * n * span.length, |row, chunk| {
            if spec.accumulate == Accumulate::F16 {
                step.chunk::<true>(row, n, chunk);
            } else {
                step.chunk::<false>(row, n, chunk);
            }
        });
    }
}

/// Calls `each` with chunks of rows of the accumulator and the first row of each, on several
/// threads if there is enough to do.
pub(super) fn for_rows(
    accumulator: &mut [u32],
    n: usize,
    work: usize,
    each: impl Fn(usize, &mut [u32]) + Sync,
) {
    let threads = rayon::current_num_threads();
    if work < WORK_MIN || threads == 1 {
        return each(0, accumulator);
    }
    let rows = (accumulator.len() / n).div_ceil(2 * threads).max(1);
    accumulator
        .par_chunks_mut(rows * n)
        .enumerate()
        .for_each(|(index, chunk)| each(index * rows, chunk));
}

/// What is known of the terms of one output before its products are formed.
#[derive(Clone, Copy, Debug, Default)]
struct Output {
    accumulated: Accumulated,
    /// Exponent of both scales.
    scale: i32,
    /// Exponent of the last bit of the products' sum, without scale.
    last: i32,
}

struct Step<'a> {
    model: &'a Model,
    length: usize,
    a: Panel,
    b: Panel,
    b_transposed: Vec<[f64; BLOCK]>,
}

impl Step<'_> {
    fn chunk<const HALF: bool>(&self, row_first: usize, n: usize, chunk: &mut [u32]) {
        for column in (0..n).step_by(BLOCK) {
            let count = BLOCK.min(n - column);
            for (index, row) in chunk.chunks_exact_mut(n).enumerate() {
                let bits = &mut row[column..column + count];
                self.block::<HALF>(row_first + index, column, bits);
            }
        }
    }

    /// One row of A with at most [`BLOCK`] columns of B.
    fn block<const HALF: bool>(&self, row: usize, column: usize, bits: &mut [u32]) {
        let a = &self.a.rows[row];
        let mut outputs = [Output::default(); BLOCK];
        let (mut finite, mut exact) = (a.finite, a.is_narrow());
        for ((output, &bits), b) in outputs.iter_mut().zip(&*bits).zip(&self.b.rows[column..]) {
            let accumulated = Accumulated::new::<HALF>(bits);
            let scale = a.scale + b.scale;
            let last = a.last + b.last;
            // No less than the largest exponent among the terms.
            let bound = (a.leading + b.leading + scale).max(accumulated.exponent);
            let kept = bound - self.model.fraction_bits;
            finite &= b.finite & accumulated.finite;
            exact &= b.is_narrow()
                & (a.leading - a.last + b.leading - b.last <= WIDTH_MAX)
                & (last + scale >= kept)
                & (accumulated.last >= kept);
            *output = Output { accumulated, scale, last };
        }
        if finite && exact {
            return self.exact::<HALF>(row, column, &outputs, bits);
        }
        let mut before = [0; BLOCK];
        before[..bits.len()].copy_from_slice(bits);
        self.cut::<HALF>(row, column, &outputs, bits);
        if !finite {
            self.special::<HALF>(row, column, &before, bits);
        }
    }

    /// Outputs of which no term loses bits.
    fn exact<const HALF: bool>(
        &self,
        row: usize,
        column: usize,
        outputs: &[Output; BLOCK],
        bits: &mut [u32],
    ) {
        let a = self.a.integers_of(row);
        for (lane, (bits, output)) in bits.iter_mut().zip(outputs).enumerate() {
            let products = dot(a, self.b.integers_of(column + lane));
            let unit = power_of_two(output.last + output.scale);
            let sum = f64::from(products) * unit + f64::from(output.accumulated.value);
            *bits = rounding::round::<HALF>(sum, self.model.mantissa_bits);
        }
    }

    /// Outputs of which each term is cut.
    fn cut<const HALF: bool>(
        &self,
        row: usize,
        column: usize,
        outputs: &[Output; BLOCK],
        bits: &mut [u32],
    ) {
        let a_exponents = self.a.exponents_of(row);
        let mut large = [0.0; BLOCK];
        let mut below_half = [0.0; BLOCK];
        let mut sums = [0.0; BLOCK];
        let count = bits.len();
        for (lane, output) in outputs[..count].iter().enumerate() {
            let largest = exponent_max(a_exponents, self.b.exponents_of(column + lane));
            let mut exponent = (output.accumulated.exponent - output.scale).max(EXPONENT_MIN);
            if largest > LEAST_EXPONENT {
                exponent = exponent.max(largest.into());
            }
            // Of the last bit that is kept, without scale.
            let unit = power_of_two(exponent - self.model.fraction_bits);
            large[lane] = LARGE * unit;
            below_half[lane] = BELOW_HALF * unit;
            let accumulated = f64::from(output.accumulated.value) * power_of_two(-output.scale);
            sums[lane] = large[lane] + (accumulated - below_half[lane].copysign(accumulated));
        }
        let block = &self.b_transposed[column / BLOCK * self.length..][..self.length];
        add_cut_products(self.a.values_of(row), block, &below_half, &mut sums);
        for (lane, bits) in bits.iter_mut().enumerate() {
            let sum = (sums[lane] - large[lane]) * power_of_two(outputs[lane].scale);
            *bits = rounding::round::<HALF>(sum, self.model.mantissa_bits);
        }
    }

    /// Replaces the outputs that have infinities or NaNs among their terms.
    #[cold]
    fn special<const HALF: bool>(
        &self,
        row: usize,
        column: usize,
        before: &[u32; BLOCK],
        bits: &mut [u32],
    ) {
        let a_row = &self.a.rows[row];
        for (lane, bits) in bits.iter_mut().enumerate() {
            let b_row = &self.b.rows[column + lane];
            let accumulated = Accumulated::new::<HALF>(before[lane]);
            if a_row.finite && b_row.finite && accumulated.finite {
                continue;
            }
            let mut sum = if accumulated.finite { 0.0 } else { f64::from(accumulated.value) };
            for (&a, &b) in self.a.values_of(row).iter().zip(self.b.values_of(column + lane)) {
                let product = a * b;
                if !product.is_finite() {
                    sum += product;
                }
            }
            if a_row.scale_nan || b_row.scale_nan {
                sum = f64::NAN;
            }
            *bits = rounding::round::<HALF>(sum, self.model.mantissa_bits);
        }
    }
}

/// The largest exponent among the products, [`LEAST_EXPONENT`] or less if all are zero.
#[inline(always)]
fn exponent_max(a: &[i16], b: &[i16]) -> i16 {
    #[inline(always)]
    fn of(a: &[i16], b: &[i16]) -> i16 {
        a.iter().zip(b).fold(i16::MIN, |largest, (&a, &b)| largest.max(a.wrapping_add(b)))
    }
    // Loops of a known length are unrolled.
    match (<&[i16; 32]>::try_from(a), <&[i16; 32]>::try_from(b)) {
        (Ok(a), Ok(b)) => of(a, b),
        _ => match (<&[i16; 16]>::try_from(a), <&[i16; 16]>::try_from(b)) {
            (Ok(a), Ok(b)) => of(a, b),
            _ => of(a, b),
        },
    }
}

/// The sum of the products, which is below 2^31.
#[inline(always)]
pub(super) fn dot(a: &[i16], b: &[i16]) -> i32 {
    #[inline(always)]
    fn of(a: &[i16], b: &[i16]) -> i32 {
        a.iter().zip(b).fold(0i32, |sum, (&a, &b)| sum.wrapping_add(i32::from(a) * i32::from(b)))
    }
    match (<&[i16; 32]>::try_from(a), <&[i16; 32]>::try_from(b)) {
        (Ok(a), Ok(b)) => of(a, b),
        _ => match (<&[i16; 16]>::try_from(a), <&[i16; 16]>::try_from(b)) {
            (Ok(a), Ok(b)) => of(a, b),
            _ => of(a, b),
        },
    }
}

/// Adds each product, cut toward zero to the last bit of the large number in `sums`.
#[inline(always)]
fn add_cut_products(
    a: &[f64],
    b: &[[f64; BLOCK]],
    below_half: &[f64; BLOCK],
    sums: &mut [f64; BLOCK],
) {
    let below_half = *below_half;
    let mut totals = *sums;
    for (&a, b) in a.iter().zip(b) {
        for lane in 0..BLOCK {
            let product = a * b[lane];
            totals[lane] += product - below_half[lane].copysign(product);
        }
    }
    *sums = totals;
}
