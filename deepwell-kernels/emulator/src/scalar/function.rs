//! Functions of one float.
//!
//! The ISA bounds the error of approximate functions but does not define their bits. The emulator
//! returns the bits of an H200, except for `rsqrt.approx.f64`, which is computed in binary64.

use super::approximate;
use super::half::{Half, pair1};
use super::ieee::{self, bits32, flush};
use super::interpolator;
use super::registers::Registers;
use super::rows::{longs1, words1};
use crate::decode::{FloatFunction, FloatModifiers, Register, Source, Type};

/// Evaluates one function on 32 lanes.
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
            words1(r, mask, d, a, |a| approximate::exponential2(a, flushes));
        }
        Type::F32 => words1(r, mask, d, a, |a| single(function, a, modifiers)),
        Type::F64 => longs1(r, mask, d, a, |a| double(function, a, modifiers)),
        _ => {
            let half = match value_type {
                Type::F16 | Type::F16x2 => Half::F16,
                _ => Half::Bf16,
            };
            let one = move |code: u16| {
                half.cut(approximate::function(function, half.value(code).to_bits(), true))
            };
            if matches!(value_type, Type::F16x2 | Type::Bf16x2) {
                words1(r, mask, d, a, |a| pair1(a, one));
            } else {
                words1(r, mask, d, a, |a| u32::from(one(a as u16)));
            }
        }
    }
}

#[inline]
fn single(function: FloatFunction, bits: u32, modifiers: FloatModifiers) -> u32 {
    let flushes = modifiers.flush_subnormals;
    let flushed = |value| if flushes { flush(value) } else { value };
    let value = flushed(f32::from_bits(bits));
    let result = match function {
        FloatFunction::Reciprocal => ieee::div32(1.0, value, modifiers.rounding),
        FloatFunction::Root => ieee::sqrt32(value, modifiers.rounding),
        _ => return approximate::function(function, bits, flushes),
    };
    bits32(flushed(result))
}

fn double(function: FloatFunction, bits: u64, modifiers: FloatModifiers) -> u64 {
    let value = f64::from_bits(bits);
    let high = (bits >> 32) as u32;
    match function {
        FloatFunction::Reciprocal => ieee::div64(1.0, value, modifiers.rounding).to_bits(),
        FloatFunction::Root => ieee::sqrt64(value, modifiers.rounding).to_bits(),
        FloatFunction::InverseRootApproximate => (1.0 / value.sqrt()).to_bits(),
        FloatFunction::ReciprocalHigh => u64::from(interpolator::reciprocal_high(high)) << 32,
        FloatFunction::InverseRootHigh => u64::from(interpolator::inverse_root_high(high)) << 32,
        _ => bits,
    }
}
