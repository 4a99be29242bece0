//! Sums as the hardware forms them.
//!
//! Three code paths compute the same bits. The operand values select the path.
//!
//! - If all bits of the products and of the accumulator lie inside the kept window, no term loses a
//!   bit, and the sum of products is a dot product of 16-bit integers.
//! - Otherwise each product, exact in binary64, is truncated. Adding a term to a large number,
//!   whose last bit has the weight of the last kept bit, rounds the term to nearest. A little less
//!   than half a unit is subtracted first, which turns the rounding into a truncation. The large
//!   number is the running sum, so that the sum needs no extra operation.
//! - If there are infinities or NaNs among the terms, only these terms are added.

use std::cell::Cell;

use rayon::prelude::*;

use super::model::Model;
use super::operand::Operand;
use super::panel::{BLOCK, Block, Panel, Span};
use super::rounding::{Accumulated, Rounder};
use super::spec::{Accumulate, MmaSpec};

/// Multiply-adds below which threads cost more time than they save.
const WORK_MIN: usize = 1 << 21;
/// Elements up to which the bit patterns of a matrix are kept, to detect a repeated matrix.
const KEPT_MAX: usize = 512;
/// Subtracted from a term before rounding to nearest, in units of the last kept bit: 1/2 - 2^-26.
/// The largest term below an integer is 2^-24 less and must not round up to the integer; a term
/// that is an integer must not be a tie with the integer below.
const BELOW_HALF: f64 = 0.5 - 1.0 / 67_108_864.0;
/// A number whose last bit is one unit, with headroom for sums of either sign.
const LARGE: f64 = 6_755_399_441_055_744.0;
/// Below the exponents of all nonzero terms, and so that no value is subnormal in binary64.
const EXPONENT_MIN: i32 = -600;
/// Most bits of two narrow rows together, so that the sum of 32 products stays below 2^31.
const WIDTH_MAX: i32 = 24;

/// Adds A·Bᵀ to the accumulator, step by step.
pub(super) fn multiply(
    spec: &MmaSpec,
    model: &Model,
    (m, n, k): (usize, usize, usize),
    a: &Operand<'_>,
    b: &Operand<'_>,
    accumulator: &mut [u32],
    negate: bool,
) {
    let rounder = Rounder::new(model.mantissa_bits);
    let matrices = MATRICES.take().unwrap_or_default();
    let mut step = Step { fraction_bits: model.fraction_bits, rounder, matrices };
    for start in (0..k).step_by(model.step) {
        let span = Span { k, start, length: model.step.min(k - start) };
        let Matrices { a: a_panel, b: b_panel, blocks } = &mut *step.matrices;
        // Consecutive instructions of a warp often have the same A.
        let is_small = m * span.length <= KEPT_MAX && a.scales.is_none() && !negate;
        if !(is_small && a_panel.is_of(spec.a, &a.element_bits, m, span)) {
            a_panel.fill(spec.a, a, m, span, negate);
            a_panel.keep_element_bits(is_small.then_some((spec.a, &a.element_bits, span)));
        }
        b_panel.fill(spec.b, b, n, span, false);
        b_panel.fill_blocks(blocks);
        let step = &step;
        for_rows(
            accumulator,
            n,
            m * n * span.length,
            #[inline(always)]
            |row, chunk| {
                if spec.accumulate == Accumulate::F16 {
                    step.chunk::<true>(row, n, chunk);
                } else {
                    step.chunk::<false>(row, n, chunk);
                }
            },
        );
    }
    MATRICES.set(Some(step.matrices));
}

thread_local! {
    /// Buffers of this thread's previous MMA, reused because the MMAs of warps are small.
    static MATRICES: Cell<Option<Box<Matrices>>> = const { Cell::new(None) };
}

/// One decoded step of both matrices.
#[derive(Default)]
struct Matrices {
    a: Panel,
    b: Panel,
    blocks: Vec<Block>,
}

/// Calls `each` with chunks of accumulator rows and the first row of each chunk, on several threads
/// if there is enough work.
pub(super) fn for_rows(
    accumulator: &mut [u32],
    n: usize,
    work: usize,
    each: impl Fn(usize, &mut [u32]) + Sync,
) {
    let vectors = pulp::Arch::new();
    let each = |row, chunk: &mut [u32]| vectors.dispatch(OfRows { each: &each, row, chunk });
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

/// A chunk of rows, executed with the widest vectors of this processor. `each` and its hot callees
/// must be inlined for this. Results do not depend on the vector width.
struct OfRows<'a, F> {
    each: &'a F,
    row: usize,
    chunk: &'a mut [u32],
}

impl<F: Fn(usize, &mut [u32])> pulp::NullaryFnOnce for OfRows<'_, F> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        (self.each)(self.row, self.chunk);
    }
}

struct Step {
    fraction_bits: i32,
    rounder: Rounder,
    matrices: Box<Matrices>,
}

impl Step {
    #[inline(always)]
    fn chunk<const HALF: bool>(&self, row_first: usize, n: usize, chunk: &mut [u32]) {
        for (index, block) in self.matrices.blocks.iter().enumerate() {
            let column = index * BLOCK;
            let count = BLOCK.min(n - column);
            for (index, row) in chunk.chunks_exact_mut(n).enumerate() {
                let output = &mut row[column..column + count];
                if let Ok(bits) = <&mut [u32; BLOCK]>::try_from(&mut *output) {
                    self.block::<HALF>(row_first + index, column, block, bits);
                    continue;
                }
                let mut bits = [0; BLOCK];
                bits[..count].copy_from_slice(output);
                self.block::<HALF>(row_first + index, column, block, &mut bits);
                output.copy_from_slice(&bits[..count]);
            }
        }
    }

    /// Computes one row of A times one block of columns of B.
    #[inline(always)]
    fn block<const HALF: bool>(
        &self,
        row: usize,
        column: usize,
        b: &Block,
        bits: &mut [u32; BLOCK],
    ) {
        let a = &self.matrices.a.rows[row];
        let accumulated = Accumulated::new::<HALF>(bits);
        let finite = a.finite & b.row.finite & accumulated.finite;
        let leading = a.leading + b.row.leading;
        let last = a.last + b.row.last;
        let narrow = a.is_narrow() & b.row.is_narrow() & (a.width + b.row.width <= WIDTH_MAX);
        if finite & narrow & (last >= leading - self.fraction_bits) {
            let leading = leading.max(accumulated.exponent_max());
            let kept = leading - self.fraction_bits;
            if last >= kept && accumulated.last_min::<HALF>(bits) >= kept {
                return self.exact::<HALF>(row, column, b, &accumulated, bits);
            }
        }
        let before = *bits;
        self.cut::<HALF>(row, column, b, &accumulated, bits);
        if !finite {
            self.special::<HALF>(row, column, &before, bits);
        }
    }

    /// Computes outputs whose terms lose no bits.
    #[inline(always)]
    fn exact<const HALF: bool>(
        &self,
        row: usize,
        column: usize,
        b: &Block,
        accumulated: &Accumulated,
        bits: &mut [u32; BLOCK],
    ) {
        let a = self.matrices.a.integers_of(row);
        let unit = self.matrices.a.units[row];
        let columns = self.matrices.b.rows.len() - column;
        let mut products = [0; BLOCK];
        for (lane, product) in products.iter_mut().enumerate().take(columns) {
            *product = dot(a, self.matrices.b.integers_of(column + lane));
        }
        let mut sums = [0.0; BLOCK];
        for lane in 0..BLOCK {
            let product = f64::from(products[lane]) * (unit * b.units[lane]);
            sums[lane] = product + f64::from(accumulated.values[lane]);
        }
        self.rounder.round::<HALF>(&sums, bits);
    }

    /// Computes outputs with truncation of each term.
    #[inline(always)]
    fn cut<const HALF: bool>(
        &self,
        row: usize,
        column: usize,
        b: &Block,
        accumulated: &Accumulated,
        bits: &mut [u32; BLOCK],
    ) {
        let a_exponents = self.matrices.a.exponents_of(row);
        let columns = self.matrices.b.rows.len() - column;
        let mut exponents = [EXPONENT_MIN; BLOCK];
        for (lane, exponent) in exponents.iter_mut().enumerate().take(columns) {
            *exponent =
                exponent_max(a_exponents, self.matrices.b.exponents_of(column + lane)).into();
        }
        let mut large = [0.0; BLOCK];
        let mut below_half = [0.0; BLOCK];
        let mut sums = [0.0; BLOCK];
        for lane in 0..BLOCK {
            let exponent = exponents[lane].max(accumulated.exponents[lane]).max(EXPONENT_MIN);
            // Weight of the last kept bit.
            let unit = f64::from_bits(((exponent - self.fraction_bits + 1023) as u64) << 52);
            large[lane] = LARGE * unit;
            below_half[lane] = BELOW_HALF * unit;
            let accumulated = f64::from(accumulated.values[lane]);
            sums[lane] = large[lane] + (accumulated - below_half[lane].copysign(accumulated));
        }
        add_cut_products(self.matrices.a.values_of(row), &b.values, &below_half, &mut sums);
        for lane in 0..BLOCK {
            sums[lane] -= large[lane];
        }
        self.rounder.round::<HALF>(&sums, bits);
    }

    /// Recomputes the outputs with infinities or NaNs among their terms.
    #[cold]
    fn special<const HALF: bool>(
        &self,
        row: usize,
        column: usize,
        before: &[u32; BLOCK],
        bits: &mut [u32; BLOCK],
    ) {
        let accumulated = Accumulated::new::<HALF>(before).values;
        let mut sums = [0.0; BLOCK];
        let mut special = [false; BLOCK];
        for (lane, sum) in sums.iter_mut().enumerate().take(self.matrices.b.rows.len() - column) {
            let products =
                self.matrices.a.values_of(row).iter().zip(self.matrices.b.values_of(column + lane));
            let products = products.map(|(a, b)| a * b);
            for term in products.chain([f64::from(accumulated[lane])]) {
                if !term.is_finite() {
                    special[lane] = true;
                    *sum += term;
                }
            }
        }
        let mut rounded = [0; BLOCK];
        self.rounder.round::<HALF>(&sums, &mut rounded);
        for lane in 0..BLOCK {
            if special[lane] {
                bits[lane] = rounded[lane];
            }
        }
    }
}

/// Returns the largest exponent of the products; less than [`EXPONENT_MIN`] if all are zero.
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

/// Returns the sum of the products, which is below 2^31.
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

/// Adds each product, truncated to the last bit of the large number in `sums`.
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
