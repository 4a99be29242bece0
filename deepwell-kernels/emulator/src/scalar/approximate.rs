//! Approximate binary32 instructions, as the sequences that ptxas emits for Hopper: one
//! interpolator instruction, with scaling to support subnormal numbers.

use super::ieee::{bits32, flush};
use super::interpolator;
use crate::decode::FloatFunction;

/// 2^24, the scale of subnormal arguments.
const SCALE: f32 = 16_777_216.0;
/// 2^126; the reciprocals of larger numbers are subnormal.
const LARGE: f32 = 8.507_059e37;
/// 1 / (2 pi), which converts radians to revolutions.
const REVOLUTIONS: f32 = 0.159_154_94;

/// Product with the hardware's NaN.
#[inline]
fn product(a: f32, b: f32) -> f32 {
    f32::from_bits(bits32(a * b))
}

/// Applies an interpolator function to a float.
#[inline]
fn of(function: fn(u32) -> u32, value: f32) -> f32 {
    f32::from_bits(function(value.to_bits()))
}

/// Evaluates a binary32 function, with or without flushing subnormal numbers. Functions without an
/// approximation return the argument.
#[inline]
pub(super) fn function(function: FloatFunction, bits: u32, flushes: bool) -> u32 {
    let value = f32::from_bits(bits);
    let is_small = value.abs() < f32::MIN_POSITIVE;
    match function {
        FloatFunction::ReciprocalApproximate if flushes => interpolator::reciprocal(bits),
        FloatFunction::ReciprocalApproximate => {
            let scale = match value.abs() {
                x if x > LARGE => 0.25,
                _ if is_small => SCALE,
                _ => 1.0,
            };
            bits32(scale * of(interpolator::reciprocal, product(value, scale)))
        }
        FloatFunction::InverseRootApproximate if is_small && !flushes => {
            bits32(4096.0 * of(interpolator::inverse_root, value * SCALE))
        }
        FloatFunction::InverseRootApproximate => interpolator::inverse_root(bits),
        FloatFunction::RootApproximate if is_small && !flushes => {
            bits32(of(interpolator::root, value * SCALE) / 4096.0)
        }
        FloatFunction::RootApproximate => interpolator::root(bits),
        FloatFunction::Logarithm2 if is_small && !flushes => {
            bits32(of(interpolator::logarithm2, value * SCALE) - 24.0)
        }
        FloatFunction::Logarithm2 => interpolator::logarithm2(bits),
        FloatFunction::Exponential2 => exponential2(bits, flushes),
        FloatFunction::Sine => interpolator::sine(revolutions(value)),
        FloatFunction::Cosine => interpolator::cosine(revolutions(value)),
        FloatFunction::HyperbolicTangent => interpolator::hyperbolic_tangent(bits),
        _ => bits,
    }
}

/// `ex2.approx`.
#[inline]
pub(super) fn exponential2(bits: u32, flushes: bool) -> u32 {
    let value = f32::from_bits(bits);
    if flushes || value >= -126.0 || value.is_nan() {
        return interpolator::exponential2(bits);
    }
    let root = of(interpolator::exponential2, value * 0.5);
    (root * root).to_bits()
}

/// Converts radians to revolutions, rounding toward zero.
#[inline]
fn revolutions(value: f32) -> u32 {
    let exact = f64::from(value) * f64::from(REVOLUTIONS);
    let nearest = exact as f32;
    let is_above = f64::from(nearest).abs() > exact.abs();
    nearest.to_bits() - u32::from(is_above)
}

/// `div.approx`.
#[inline]
pub(super) fn quotient(a: u32, b: u32, flushes: bool) -> f32 {
    let (a, b) = (f32::from_bits(a), f32::from_bits(b));
    if flushes {
        return flush(flush(a) * of(interpolator::reciprocal, b));
    }
    let scale = if b.abs() < f32::MIN_POSITIVE { SCALE } else { 1.0 };
    of(interpolator::reciprocal, b * scale) * (a * scale)
}

/// `div.full`.
#[inline]
pub(super) fn full_quotient(a: u32, b: u32, flushes: bool) -> f32 {
    let (a, b) = (f32::from_bits(a), f32::from_bits(b));
    if b.abs() > LARGE {
        let scaled = |x: f32| if flushes { flush(flush(x) * 0.25) } else { x * 0.25 };
        let value = of(interpolator::reciprocal, scaled(b)) * scaled(a);
        return if flushes { flush(value) } else { value };
    }
    quotient(a.to_bits(), b.to_bits(), flushes)
}
