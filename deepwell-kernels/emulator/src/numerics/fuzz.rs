//! Alternative sums that the instruction set also allows.
//!
//! For each step, each block of outputs draws where along K the sum starts, the stride, how many
//! products are added before the accumulator, and whether partial sums are rounded to nearest or
//! truncated. A kernel that relies on the hardware's own order and rounding gets different results
//! here.

use super::doubles::{Columns, Rows};
use super::exact::{accumulator_format, round};
use super::hardware::for_rows;
use super::model::Model;
use super::operand::Operand;
use super::panel::{BLOCK, Span};
use super::rounding::round_toward_zero;
use super::spec::MmaSpec;
use crate::number::{Format, decode};

/// Adds A·Bᵀ to the accumulator, step by step.
#[expect(clippy::too_many_arguments, reason = "one instruction with its operands and modifiers")]
pub(super) fn multiply(
    spec: &MmaSpec,
    model: &Model,
    seed: u64,
    (m, n, k): (usize, usize, usize),
    a: &Operand<'_>,
    b: &Operand<'_>,
    accumulator: &mut [u32],
    negate: bool,
) {
    let format = accumulator_format(spec);
    for start in (0..k).step_by(model.step) {
        let span = Span { k, start, length: model.step.min(k - start) };
        let rows = Rows::new(spec.a, a, m, span, negate);
        let columns = Columns::new(spec.b, b, n, span);
        for_rows(accumulator, n, m * n * span.length, |row_first, chunk| {
            for block in 0..n.div_ceil(BLOCK) {
                let column = block * BLOCK;
                let count = BLOCK.min(n - column);
                for (index, output) in chunk.chunks_exact_mut(n).enumerate() {
                    let output = &mut output[column..column + count];
                    let row = row_first + index;
                    let a = &rows.values[row * span.length..][..span.length];
                    let b = &columns.values[block * span.length..][..span.length];
                    let place = (start as u64) << 42 ^ (row as u64) << 21 ^ block as u64;
                    let order = Order::new(mix(seed ^ mix(place)), span.length, model);
                    order.add_cta(format, a, b, output);
                }
            }
        });
    }
}

/// Order and rounding of a sum.
#[derive(Clone, Copy, Debug)]
struct Order {
    first: usize,
    stride: usize,
    group: usize,
    nearest: bool,
    mantissa_bits: u32,
}

impl Order {
    fn new(random: u64, length: usize, model: &Model) -> Order {
        let pick = |bits: u32, count: usize| (random >> bits & 0xff) as usize % count;
        let stride = 2 * pick(0, 16) + 1;
        Order {
            first: pick(8, length),
            stride: if common_divisor(stride, length) == 1 { stride } else { 1 },
            group: [2, 4, 8, length][pick(16, 4)],
            nearest: pick(24, 2) == 1,
            // Hardware that keeps fewer mantissa bits may do so here; other hardware does not.
            mantissa_bits: if pick(32, 2) == 1 { 23 } else { model.mantissa_bits },
        }
    }

    fn add_cta(&self, format: Format, a: &[f64], b: &[[f64; BLOCK]], output: &mut [u32]) {
        let mut totals = [0.0; BLOCK];
        for (total, &bits) in totals.iter_mut().zip(output.iter()) {
            *total = f64::from(decode(format, bits));
        }
        let length = a.len();
        let mut index = self.first;
        let mut left = length;
        while left > 0 {
            let count = self.group.min(left);
            let mut sums = [0.0; BLOCK];
            for _ in 0..count {
                for lane in 0..BLOCK {
                    sums[lane] += a[index] * b[index][lane];
                }
                index = (index + self.stride) % length;
            }
            left -= count;
            for lane in 0..BLOCK {
                totals[lane] = self.partial(totals[lane] + sums[lane]);
            }
        }
        for (bits, &total) in output.iter_mut().zip(&totals) {
            *bits = round(format, total);
        }
    }

    /// Rounds a partial sum to binary32.
    #[inline(always)]
    fn partial(&self, sum: f64) -> f64 {
        if self.nearest && self.mantissa_bits == 23 {
            f64::from(sum as f32)
        } else {
            f64::from(f32::from_bits(round_toward_zero(sum, self.mantissa_bits)))
        }
    }
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Hashes a number (the finalizer of splitmix64).
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}
