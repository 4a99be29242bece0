//! Shared by the kernels that compute a softmax.

use super::parallel::LANES;
use super::vector_math::exp;

/// [`exp_or_zero`] is zero below this: e^-87 is 1.6e-38, just above `f32`'s least normal number.
const EXPONENT_MIN: f32 = -87.0;

/// e to the power `x`, within 2 units in the last place, but zero if `x < -87`.
///
/// Such small softmax weights are negligible, because the greatest weight is one. Their exact
/// values are subnormal, and each vector with a subnormal result costs x86 CPUs over a hundred
/// cycles of microcode. NaN stays NaN.
#[inline(always)]
pub(crate) fn exp_or_zero(x: f32) -> f32 {
    let is_zero = x < EXPONENT_MIN;
    let value = exp(if is_zero { 0.0 } else { x });
    if is_zero { 0.0 } else { value }
}

/// The greater of two numbers; `a` if `b` is NaN.
#[inline(always)]
pub(crate) fn greater(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The greatest number of a row, ignoring NaN; negative infinity for a row of NaN only.
#[inline(always)]
pub(crate) fn greatest(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] = greater(lanes[lane], block[lane]);
        }
    }
    rest.iter().fold(greatest_lane(lanes), |a, &b| greater(a, b))
}

/// Returns the greatest of the lanes, halving their number each time.
#[inline(always)]
pub(crate) fn greatest_lane(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = greater(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_or_zero_is_exp_or_zero() {
        for x in [0.0, 1.0, -1.0, -86.999, -87.0, 88.0, f32::INFINITY] {
            assert_eq!(exp_or_zero(x), exp(x), "{x}");
        }
        for x in [-87.001, -100.0, -1e30, f32::NEG_INFINITY] {
            assert_eq!(exp_or_zero(x), 0.0, "{x}");
        }
        assert!(exp_or_zero(f32::NAN).is_nan());
        assert!(exp(EXPONENT_MIN) >= f32::MIN_POSITIVE);
    }

    #[test]
    fn greatest_of_rows() {
        for length in [1, 5, 31, 32, 33, 64, 100] {
            for place in [0, length / 2, length - 1] {
                let mut row: Vec<f32> = (0..length).map(|index| -(index as f32) - 2.0).collect();
                row[place] = -1.0;
                assert_eq!(greatest(&row), -1.0, "{length} {place}");
                row[(place + 1) % length] = f32::NAN;
                let expected = if length == 1 { f32::NEG_INFINITY } else { -1.0 };
                assert_eq!(greatest(&row), expected, "{length} {place} with NaN");
            }
        }
        assert_eq!(greatest(&[]), f32::NEG_INFINITY);
    }
}
