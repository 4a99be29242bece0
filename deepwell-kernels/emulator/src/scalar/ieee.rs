//! Correctly rounded arithmetic of binary32 and binary64.
//!
//! Directed roundings start from the nearest value and the sign of its error. Error-free
//! transformations compute the error exactly; in binary64, only if the error is not subnormal.

use crate::decode::FloatRounding;

/// NaN result of single-precision operations.
pub(super) const NAN32: u32 = 0x7fff_ffff;

/// Flushes subnormal numbers to zero, keeping the sign.
#[inline]
pub(super) fn flush(value: f32) -> f32 {
    let bits = value.to_bits();
    if bits & 0x7f80_0000 == 0 { f32::from_bits(bits & 0x8000_0000) } else { value }
}

/// Returns the bits of a result, with the canonical NaN.
#[inline]
pub(super) fn bits32(value: f32) -> u32 {
    if value.is_nan() { NAN32 } else { value.to_bits() }
}

/// Clamps to 0 .. 1; NaN and -0 become 0.
#[inline]
pub(super) fn saturate(value: f32) -> f32 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// Adjusts the nearest value for a directed rounding. `off` has the sign of (exact - nearest).
#[inline]
fn direct32(nearest: f32, off: f64, rounding: FloatRounding) -> f32 {
    match rounding {
        FloatRounding::TowardZero if nearest > 0.0 && off < 0.0 => nearest.next_down(),
        FloatRounding::TowardZero if nearest < 0.0 && off > 0.0 => nearest.next_up(),
        FloatRounding::Down if off < 0.0 => nearest.next_down(),
        FloatRounding::Up if off > 0.0 => nearest.next_up(),
        _ => nearest,
    }
}

#[inline]
fn direct64(nearest: f64, off: f64, rounding: FloatRounding) -> f64 {
    match rounding {
        FloatRounding::TowardZero if nearest > 0.0 && off < 0.0 => nearest.next_down(),
        FloatRounding::TowardZero if nearest < 0.0 && off > 0.0 => nearest.next_up(),
        FloatRounding::Down if off < 0.0 => nearest.next_down(),
        FloatRounding::Up if off > 0.0 => nearest.next_up(),
        _ => nearest,
    }
}

/// Returns the sum and its rounding error.
#[inline]
pub(super) fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

/// Rounds `high + low`, where `high` is the sum rounded to nearest, to binary32. Underflow is
/// exact, because binary64 holds every value that is rounded to binary32.
#[inline]
pub(super) fn to_single(high: f64, low: f64, rounding: FloatRounding) -> f32 {
    if rounding == FloatRounding::NearestEven {
        return odd(high, low) as f32;
    }
    if !high.is_finite() {
        return high as f32;
    }
    let nearest = odd(high, low) as f32;
    // The error of `nearest`; if zero, `low` decides.
    let off = high - f64::from(nearest);
    let off = if nearest.is_infinite() {
        -f64::from(nearest)
    } else if off == 0.0 {
        low
    } else {
        off
    };
    direct32(nearest, off, rounding)
}

/// Rounds `high + low` to odd, so that a later rounding to fewer bits is correct.
#[inline]
pub(super) fn odd(high: f64, low: f64) -> f64 {
    let bits = high.to_bits();
    if low == 0.0 || bits & 1 == 1 || !high.is_finite() || low.is_nan() {
        return high;
    }
    let toward_zero = (low < 0.0) != (high < 0.0);
    // Adding one to an even significand never leaves the binade.
    f64::from_bits(if toward_zero { bits - 1 } else { bits + 1 })
}

/// Sign of an exact zero sum whose terms are not both zeros of one sign.
#[inline]
fn zero_sum(a_negative: bool, b_negative: bool, rounding: FloatRounding) -> bool {
    if a_negative == b_negative { a_negative } else { rounding == FloatRounding::Down }
}

/// `a + b`.
#[inline]
pub(super) fn add32(a: f32, b: f32, rounding: FloatRounding) -> f32 {
    if rounding == FloatRounding::NearestEven {
        return a + b;
    }
    let (high, low) = two_sum(f64::from(a), f64::from(b));
    if high == 0.0 && low == 0.0 {
        return if zero_sum(a.is_sign_negative(), b.is_sign_negative(), rounding) {
            -0.0
        } else {
            0.0
        };
    }
    to_single(high, low, rounding)
}

/// `a * b`.
#[inline]
pub(super) fn mul32(a: f32, b: f32, rounding: FloatRounding) -> f32 {
    if rounding == FloatRounding::NearestEven {
        return a * b;
    }
    to_single(f64::from(a) * f64::from(b), 0.0, rounding)
}

/// `a * b + c`.
#[inline]
pub(super) fn fma32(a: f32, b: f32, c: f32, rounding: FloatRounding) -> f32 {
    if rounding == FloatRounding::NearestEven {
        return fma_nearest(a, b, c);
    }
    let product = f64::from(a) * f64::from(b);
    let (high, low) = two_sum(product, f64::from(c));
    if high == 0.0 && low == 0.0 {
        let negative = zero_sum(product.is_sign_negative(), c.is_sign_negative(), rounding);
        return if negative { -0.0 } else { 0.0 };
    }
    to_single(high, low, rounding)
}

/// The product is exact in binary64, so that only the sum is rounded. A second rounding is needed
/// only if the first result is halfway between two binary32 numbers.
#[inline]
pub(super) fn fma_nearest(a: f32, b: f32, c: f32) -> f32 {
    let product = f64::from(a) * f64::from(b);
    let sum = product + f64::from(c);
    if fma_is_doubtful(sum) {
        let (high, low) = two_sum(product, f64::from(c));
        return odd(high, low) as f32;
    }
    sum as f32
}

/// Whether rounding `sum` again may be wrong: halfway between two numbers, or near the subnormals.
#[inline]
pub(super) fn fma_is_doubtful(sum: f64) -> bool {
    let bits = sum.to_bits();
    (bits & 0x1fff_ffff == 0x1000_0000) | ((bits >> 52 & 0x7ff) < 1023 - 125)
}

/// `a / b`.
#[inline]
pub(super) fn div32(a: f32, b: f32, rounding: FloatRounding) -> f32 {
    let nearest = a / b;
    if rounding == FloatRounding::NearestEven
        || !a.is_finite()
        || !b.is_finite()
        || a == 0.0
        || b == 0.0
    {
        return nearest;
    }
    if nearest.is_infinite() {
        return overflow32(nearest, rounding);
    }
    let rest = f64::from(a) - f64::from(nearest) * f64::from(b);
    direct32(nearest, if b < 0.0 { -rest } else { rest }, rounding)
}

/// Returns the result of an overflow.
#[inline]
fn overflow32(infinity: f32, rounding: FloatRounding) -> f32 {
    let stays = match rounding {
        FloatRounding::TowardZero => false,
        FloatRounding::Down => infinity < 0.0,
        FloatRounding::Up => infinity > 0.0,
        _ => true,
    };
    if stays { infinity } else { f32::MAX.copysign(infinity) }
}

/// Square root.
#[inline]
pub(super) fn sqrt32(a: f32, rounding: FloatRounding) -> f32 {
    let nearest = a.sqrt();
    if rounding == FloatRounding::NearestEven || !nearest.is_finite() || nearest == 0.0 {
        return nearest;
    }
    direct32(nearest, f64::from(a) - f64::from(nearest) * f64::from(nearest), rounding)
}

/// `a + b`.
#[inline]
pub(super) fn add64(a: f64, b: f64, rounding: FloatRounding) -> f64 {
    let sum = a + b;
    if rounding == FloatRounding::NearestEven || !a.is_finite() || !b.is_finite() {
        return sum;
    }
    if sum.is_infinite() {
        return overflow64(sum, rounding);
    }
    let (high, low) = two_sum(a, b);
    if high == 0.0 && low == 0.0 {
        return if zero_sum(a.is_sign_negative(), b.is_sign_negative(), rounding) {
            -0.0
        } else {
            0.0
        };
    }
    direct64(high, low, rounding)
}

#[inline]
fn overflow64(infinity: f64, rounding: FloatRounding) -> f64 {
    let stays = match rounding {
        FloatRounding::TowardZero => false,
        FloatRounding::Down => infinity < 0.0,
        FloatRounding::Up => infinity > 0.0,
        _ => true,
    };
    if stays { infinity } else { f64::MAX.copysign(infinity) }
}

/// `a * b`.
#[inline]
pub(super) fn mul64(a: f64, b: f64, rounding: FloatRounding) -> f64 {
    let product = a * b;
    if rounding == FloatRounding::NearestEven || !a.is_finite() || !b.is_finite() {
        return product;
    }
    if product.is_infinite() {
        return overflow64(product, rounding);
    }
    direct64(product, a.mul_add(b, -product), rounding)
}

/// `a * b + c`.
pub(super) fn fma64(a: f64, b: f64, c: f64, rounding: FloatRounding) -> f64 {
    let nearest = a.mul_add(b, c);
    if rounding == FloatRounding::NearestEven || !(a.is_finite() && b.is_finite() && c.is_finite())
    {
        return nearest;
    }
    if nearest.is_infinite() {
        return overflow64(nearest, rounding);
    }
    let high = a * b;
    let low = a.mul_add(b, -high);
    let off = exact_sign([high, low, c, -nearest]);
    if nearest == 0.0 && off == 0.0 {
        let negative = zero_sum(high.is_sign_negative(), c.is_sign_negative(), rounding);
        return if negative { -0.0 } else { 0.0 };
    }
    direct64(nearest, off, rounding)
}

/// Returns a value with the sign of an exact sum: the largest component of its expansion.
fn exact_sign(terms: [f64; 4]) -> f64 {
    let mut expansion = [0.0; 4];
    for (count, term) in terms.into_iter().enumerate() {
        let mut carried = term;
        for part in expansion.iter_mut().take(count) {
            let (high, low) = two_sum(carried, *part);
            *part = low;
            carried = high;
        }
        expansion[count] = carried;
    }
    expansion.into_iter().rev().find(|part| *part != 0.0).unwrap_or(0.0)
}

/// `a / b`.
#[inline]
pub(super) fn div64(a: f64, b: f64, rounding: FloatRounding) -> f64 {
    let nearest = a / b;
    if rounding == FloatRounding::NearestEven
        || !a.is_finite()
        || !b.is_finite()
        || a == 0.0
        || b == 0.0
    {
        return nearest;
    }
    if nearest.is_infinite() {
        return overflow64(nearest, rounding);
    }
    let rest = (-nearest).mul_add(b, a);
    direct64(nearest, if b < 0.0 { -rest } else { rest }, rounding)
}

/// Square root.
#[inline]
pub(super) fn sqrt64(a: f64, rounding: FloatRounding) -> f64 {
    let nearest = a.sqrt();
    if rounding == FloatRounding::NearestEven || !nearest.is_finite() || nearest == 0.0 {
        return nearest;
    }
    direct64(nearest, (-nearest).mul_add(nearest, a), rounding)
}
