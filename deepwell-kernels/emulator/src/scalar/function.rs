//! Functions of one float.
//!
//! The ISA bounds the error of the approximate ones and leaves their bits open: they are computed
//! in binary64 and rounded here.

use super::half::{Half, pair1};
use super::ieee::{self, bits32, flush};
use super::registers::Registers;
use super::rows::{longs1, words1};
use crate::decode::{FloatFunction, FloatModifiers, Register, Source, Type};

/// One function on 32 lanes.
pub(super) fn unary(
    r: &mut Registers,
    mask: u32,
    function: FloatFunction,
    modifiers: FloatModifiers,
    value_type: Type,
    d: Register,
    a: Source,
) {
    match value_type {
        Type::F32 if function == FloatFunction::Exponential2 => {
            let flushes = modifiers.flush_subnormals;
            words1(r, mask, d, a, |a| {
                let value = f32::from_bits(a);
                let result = exponential2(f64::from(value)) as f32;
                let result = if flushes { flush(result) } else { result };
                if value.is_nan() { ieee::NAN32 } else { result.to_bits() }
            });
        }
        Type::F32 => words1(r, mask, d, a, |a| single(function, a, modifiers)),
        Type::F64 => longs1(r, mask, d, a, |a| double(function, a, modifiers)),
        _ => {
            let half = match value_type {
                Type::F16 | Type::F16x2 => Half::F16,
                _ => Half::Bf16,
            };
            let one = move |code: u16| {
                half.function(code, modifiers.flush_subnormals, |value| {
                    approximate(function, value)
                })
            };
            if matches!(value_type, Type::F16x2 | Type::Bf16x2) {
                words1(r, mask, d, a, |a| pair1(a, one));
            } else {
                words1(r, mask, d, a, |a| u32::from(one(a as u16)));
            }
        }
    }
}

/// 2 to the power of `value`, off by less than 2^-45 of itself: the Taylor series about the nearest
/// integer, whose next term is below 0.35^12 / 12! of the first.
#[inline]
fn exponential2(value: f64) -> f64 {
    // Sums with 1.5 * 2^52 are rounded to integers, which are then the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let value = value.clamp(-300.0, 300.0);
    let shifted = value + ROUND;
    let whole = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    let x = (value - (shifted - ROUND)) * std::f64::consts::LN_2;
    let mut sum = 1.0 / 39_916_800.0;
    for factorial in
        [3_628_800.0, 362_880.0, 40_320.0, 5_040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0]
    {
        sum = sum * x + 1.0 / factorial;
    }
    sum * f64::from_bits(whole.wrapping_add(1023) << 52)
}

fn approximate(function: FloatFunction, value: f64) -> f64 {
    match function {
        FloatFunction::ReciprocalApproximate => 1.0 / value,
        FloatFunction::InverseRootApproximate => 1.0 / value.sqrt(),
        FloatFunction::RootApproximate => value.sqrt(),
        FloatFunction::Sine => value.sin(),
        FloatFunction::Cosine => value.cos(),
        FloatFunction::Logarithm2 => value.log2(),
        FloatFunction::Exponential2 => value.exp2(),
        FloatFunction::HyperbolicTangent => value.tanh(),
        _ => value,
    }
}

#[inline]
fn single(function: FloatFunction, bits: u32, modifiers: FloatModifiers) -> u32 {
    let value = f32::from_bits(bits);
    let value = if modifiers.flush_subnormals { flush(value) } else { value };
    let result = match function {
        FloatFunction::Reciprocal => ieee::div32(1.0, value, modifiers.rounding),
        FloatFunction::Root => ieee::sqrt32(value, modifiers.rounding),
        _ => approximate(function, f64::from(value)) as f32,
    };
    bits32(if modifiers.flush_subnormals { flush(result) } else { result })
}

fn double(function: FloatFunction, bits: u64, modifiers: FloatModifiers) -> u64 {
    let value = f64::from_bits(bits);
    match function {
        FloatFunction::Reciprocal => ieee::div64(1.0, value, modifiers.rounding).to_bits(),
        FloatFunction::Root => ieee::sqrt64(value, modifiers.rounding).to_bits(),
        FloatFunction::InverseRootApproximate => (1.0 / value.sqrt()).to_bits(),
        FloatFunction::ReciprocalHigh | FloatFunction::InverseRootHigh => {
            // Only the upper words count; subnormal numbers are zeros.
            let value = flush_double(f64::from_bits(bits & 0xffff_ffff_0000_0000));
            let result = if function == FloatFunction::ReciprocalHigh {
                1.0 / value
            } else {
                1.0 / value.sqrt()
            };
            if result.is_nan() {
                return 0x7fff_ffff_0000_0000;
            }
            flush_double(result).to_bits() & 0xffff_ffff_0000_0000
        }
        _ => approximate(function, value).to_bits(),
    }
}

fn flush_double(value: f64) -> f64 {
    if value.is_subnormal() { 0.0f64.copysign(value) } else { value }
}
