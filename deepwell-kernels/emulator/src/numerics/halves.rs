//! `mma.sync` with 8-bit floats on machines whose tensor cores lack this form (sm_90, sm_100).
//!
//! SASS converts to F16 and executes two MMAs. Each register of a thread holds four elements along
//! K: the lower two go to the first MMA, the upper two to the second. The accumulator of the
//! instruction is added at the end, with rounding to nearest.

use super::hardware;
use super::model::Model;
use super::operand::{ElementBits, Operand};
use super::rounding::{NAN, NAN_HALF};
use super::spec::{Accumulate, Kind, MmaSpec};
use crate::number::{Format, Rounding, decode, encode};

/// Adds A·Bᵀ to the accumulator, 32 elements along K at a time, or 16 at the end.
pub(super) fn multiply(
    spec: &MmaSpec,
    model: &Model,
    (m, n, k): (usize, usize, usize),
    a: &Operand<'_>,
    b: &Operand<'_>,
    accumulator: &mut [u32],
    negate: bool,
) {
    let converted = MmaSpec { kind: Kind::F16, a: Format::F16, b: Format::F16, ..*spec };
    let mut sums = vec![0; m * n];
    for start in (0..k).step_by(32) {
        let length = (k - start).min(32);
        sums.fill(0);
        for upper in [false, true] {
            let a = half(spec.a, &a.element_bits, (m, k), start, length, upper);
            let b = half(spec.b, &b.element_bits, (n, k), start, length, upper);
            hardware::multiply(
                &converted,
                model,
                (m, n, a.len() / m),
                &Operand::new(ElementBits::U16(&a)),
                &Operand::new(ElementBits::U16(&b)),
                &mut sums,
                negate,
            );
        }
        for (accumulated, &sum) in accumulator.iter_mut().zip(&sums) {
            *accumulated = match spec.accumulate {
                Accumulate::F16 => add_half(*accumulated, sum),
                _ => add(*accumulated, sum),
            };
        }
    }
}

/// Returns the elements of a step with index 0 or 1 modulo 4 (`upper`: 2 or 3), as F16.
fn half(
    format: Format,
    element_bits: &ElementBits<'_>,
    (rows, k): (usize, usize),
    start: usize,
    length: usize,
    upper: bool,
) -> Vec<u16> {
    let mut halves = Vec::with_capacity(rows * length.div_ceil(2));
    for row in 0..rows {
        let first = row * k + start;
        element_bits.for_each(first, first + length, |index, code| {
            if (index & 2 != 0) == upper {
                let value = decode(format, code);
                let code = encode(Format::F16, value, Rounding::NearestEven, false, false);
                halves.push(code as u16);
            }
        });
    }
    halves
}

fn add(a: u32, b: u32) -> u32 {
    let sum = f32::from_bits(a) + f32::from_bits(b);
    if sum.is_nan() { NAN } else { sum.to_bits() }
}

fn add_half(a: u32, b: u32) -> u32 {
    let sum = decode(Format::F16, a) + decode(Format::F16, b);
    if sum.is_nan() {
        return NAN_HALF;
    }
    encode(Format::F16, sum, Rounding::NearestEven, false, false)
}
