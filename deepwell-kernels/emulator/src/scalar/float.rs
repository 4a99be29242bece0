//! Float arithmetic of all types, 32 lanes at a time.

use super::approximate::{full_quotient, quotient};
use super::half::{Half, pair1, pair2, pair3};
use super::ieee::{self, bits32, flush, saturate};
use super::registers::{LANES, Registers};
use super::rows::{longs1, longs2, longs3, words1, words2, words3};
use crate::decode::{
    BinaryOperation, ExtremumModifiers, FloatModifiers, FloatRounding, Register, Source,
    TernaryOperation, Type, UnaryOperation,
};

/// Arithmetic operations of two operands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Add,
    Subtract,
    Multiply,
    Divide,
}

/// Returns the half format of a type, and whether a word packs two values.
fn half_of(value_type: Type) -> Option<(Half, bool)> {
    Some(match value_type {
        Type::F16 => (Half::F16, false),
        Type::F16x2 => (Half::F16, true),
        Type::Bf16 => (Half::Bf16, false),
        Type::Bf16x2 => (Half::Bf16, true),
        _ => return None,
    })
}

#[inline]
fn operand(bits: u32, modifiers: FloatModifiers) -> f32 {
    let value = f32::from_bits(bits);
    if modifiers.flush_subnormals { flush(value) } else { value }
}

#[inline]
fn finish(value: f32, modifiers: FloatModifiers) -> u32 {
    let value = if modifiers.flush_subnormals { flush(value) } else { value };
    let value = if modifiers.saturate { saturate(value) } else { value };
    bits32(value)
}

#[inline]
fn single(kind: Kind, a: u32, b: u32, modifiers: FloatModifiers) -> u32 {
    let (a, b) = (operand(a, modifiers), operand(b, modifiers));
    let rounding = modifiers.rounding;
    let value = match kind {
        Kind::Add => ieee::add32(a, b, rounding),
        Kind::Subtract => ieee::add32(a, -b, rounding),
        Kind::Multiply => ieee::mul32(a, b, rounding),
        Kind::Divide => ieee::div32(a, b, rounding),
    };
    finish(value, modifiers)
}

#[inline]
fn double(kind: Kind, a: u64, b: u64, rounding: FloatRounding) -> u64 {
    let (a, b) = (f64::from_bits(a), f64::from_bits(b));
    let value = match kind {
        Kind::Add => ieee::add64(a, b, rounding),
        Kind::Subtract if b.is_nan() => a + b,
        Kind::Subtract => ieee::add64(a, -b, rounding),
        Kind::Multiply => ieee::mul64(a, b, rounding),
        Kind::Divide => ieee::div64(a, b, rounding),
    };
    value.to_bits()
}

fn simple(
    r: &mut Registers,
    mask: u32,
    kind: Kind,
    modifiers: FloatModifiers,
    value_type: Type,
    d: Register,
    s: [Source; 2],
) {
    let plain = modifiers == FloatModifiers::default();
    match value_type {
        Type::F32 if plain => match kind {
            Kind::Add => {
                words2(r, mask, d, s, |a, b| bits32(f32::from_bits(a) + f32::from_bits(b)))
            }
            Kind::Subtract => {
                words2(r, mask, d, s, |a, b| bits32(f32::from_bits(a) - f32::from_bits(b)))
            }
            Kind::Multiply => {
                words2(r, mask, d, s, |a, b| bits32(f32::from_bits(a) * f32::from_bits(b)))
            }
            Kind::Divide => {
                words2(r, mask, d, s, |a, b| bits32(f32::from_bits(a) / f32::from_bits(b)))
            }
        },
        Type::F32 => words2(r, mask, d, s, |a, b| single(kind, a, b, modifiers)),
        Type::F32x2 => longs2(r, mask, d, s, |a, b| {
            let low = single(kind, a as u32, b as u32, modifiers);
            let high = single(kind, (a >> 32) as u32, (b >> 32) as u32, modifiers);
            u64::from(low) | u64::from(high) << 32
        }),
        Type::F64 => longs2(r, mask, d, s, |a, b| double(kind, a, b, modifiers.rounding)),
        _ => {
            let Some((half, packed)) = half_of(value_type) else { return };
            let one = move |a: u16, b: u16| match kind {
                Kind::Add => half.add(a, b, modifiers),
                Kind::Subtract => half.add(a, b ^ 0x8000, modifiers),
                _ => half.mul(a, b, modifiers),
            };
            if packed && half == Half::Bf16 && plain && kind == Kind::Multiply {
                let one = |a, b| Half::Bf16.mul(a, b, FloatModifiers::default());
                words2(r, mask, d, s, |a, b| pair2(a, b, one));
            } else if packed {
                words2(r, mask, d, s, |a, b| pair2(a, b, one));
            } else {
                words2(r, mask, d, s, |a, b| u32::from(one(a as u16, b as u16)));
            }
        }
    }
}

/// `min` and `max` in single precision.
#[inline(always)]
fn extremum32(a: u32, b: u32, maximum: bool, modifiers: ExtremumModifiers) -> u32 {
    let clean = |bits: u32| {
        let bits = if modifiers.flush_subnormals && bits & 0x7f80_0000 == 0 {
            bits & 0x8000_0000
        } else {
            bits
        };
        if modifiers.xor_sign || modifiers.absolute { bits & 0x7fff_ffff } else { bits }
    };
    let sign = if modifiers.xor_sign { (a ^ b) & 0x8000_0000 } else { 0 };
    let (a, b) = (clean(a), clean(b));
    let is_nan = |bits: u32| bits & 0x7fff_ffff > 0x7f80_0000;
    // Orders bit patterns, with -0 below +0.
    let order = |bits: u32| if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits };
    let first = (order(a) > order(b)) == maximum;
    let value = (if first { a } else { b }) | sign;
    let value = if is_nan(a) { b | sign } else { value };
    let value = if is_nan(b) { a | sign } else { value };
    let nan = (is_nan(a) && is_nan(b)) || (modifiers.propagate_nan && (is_nan(a) || is_nan(b)));
    if nan { ieee::NAN32 } else { value }
}

fn extremum64(a: u64, b: u64, maximum: bool) -> u64 {
    let is_nan = |bits: u64| f64::from_bits(bits).is_nan();
    let order = |bits: u64| if bits >> 63 == 0 { bits | 1 << 63 } else { !bits };
    match (is_nan(a), is_nan(b)) {
        (false, false) if (order(a) > order(b)) == maximum => a,
        (false, false) | (true, false) => b,
        (false, true) => a,
        (true, true) => a | 1 << 51,
    }
}

fn extremum(
    r: &mut Registers,
    mask: u32,
    maximum: bool,
    modifiers: ExtremumModifiers,
    value_type: Type,
    d: Register,
    s: [Source; 2],
) {
    match value_type {
        Type::F32 if modifiers == ExtremumModifiers::default() => {
            if maximum {
                words2(r, mask, d, s, |a, b| extremum32(a, b, true, ExtremumModifiers::default()));
            } else {
                words2(r, mask, d, s, |a, b| extremum32(a, b, false, ExtremumModifiers::default()));
            }
        }
        Type::F32 => words2(r, mask, d, s, |a, b| extremum32(a, b, maximum, modifiers)),
        Type::F64 => longs2(r, mask, d, s, |a, b| extremum64(a, b, maximum)),
        _ => {
            let Some((half, packed)) = half_of(value_type) else { return };
            let one = move |a: u16, b: u16| half.extremum(a, b, maximum, modifiers);
            if packed {
                words2(r, mask, d, s, |a, b| pair2(a, b, one));
            } else {
                words2(r, mask, d, s, |a, b| u32::from(one(a as u16, b as u16)));
            }
        }
    }
}

/// Executes an operation of two operands. Returns whether it was a float operation.
pub(super) fn binary(
    r: &mut Registers,
    mask: u32,
    operation: BinaryOperation,
    value_type: Type,
    d: Register,
    s: [Source; 2],
) -> bool {
    use BinaryOperation as B;
    match operation {
        B::FloatAdd(modifiers) => simple(r, mask, Kind::Add, modifiers, value_type, d, s),
        B::FloatSubtract(modifiers) => {
            simple(r, mask, Kind::Subtract, modifiers, value_type, d, s);
        }
        B::FloatMultiply(modifiers) => {
            simple(r, mask, Kind::Multiply, modifiers, value_type, d, s);
        }
        B::FloatDivide(modifiers) => simple(r, mask, Kind::Divide, modifiers, value_type, d, s),
        B::FloatDivideFull(modifiers) => {
            let flushes = modifiers.flush_subnormals;
            words2(r, mask, d, s, |a, b| finish(full_quotient(a, b, flushes), modifiers));
        }
        B::FloatDivideApproximate(modifiers) => {
            let flushes = modifiers.flush_subnormals;
            words2(r, mask, d, s, |a, b| finish(quotient(a, b, flushes), modifiers));
        }
        B::FloatMinimum(modifiers) => extremum(r, mask, false, modifiers, value_type, d, s),
        B::FloatMaximum(modifiers) => extremum(r, mask, true, modifiers, value_type, d, s),
        B::CopySign if value_type == Type::F64 => {
            longs2(r, mask, d, s, |a, b| (a & 1 << 63) | (b & !(1 << 63)))
        }
        B::CopySign => words2(r, mask, d, s, |a, b| (a & 1 << 31) | (b & !(1 << 31))),
        _ => return false,
    }
    true
}

#[inline]
fn fma_single(a: u32, b: u32, c: u32, modifiers: FloatModifiers) -> u32 {
    let (a, b, c) = (operand(a, modifiers), operand(b, modifiers), operand(c, modifiers));
    finish(ieee::fma32(a, b, c, modifiers.rounding), modifiers)
}

/// Executes a plain `fma.rn.f32`. Rows with a possible double-rounding error are recomputed.
fn fma_row(r: &mut Registers, mask: u32, d: Register, [a, b, c]: [Source; 3]) {
    let (a, b, c) = (r.row32(a), r.row32(b), r.row32(c));
    let mut out = [0u32; LANES];
    let mut doubtful = false;
    for lane in 0..LANES {
        let product = f64::from(f32::from_bits(a[lane])) * f64::from(f32::from_bits(b[lane]));
        let sum = product + f64::from(f32::from_bits(c[lane]));
        doubtful |= ieee::fma_is_doubtful(sum);
        out[lane] = bits32(sum as f32);
    }
    if doubtful {
        for lane in 0..LANES {
            let of = |row: &[u32; LANES]| f32::from_bits(row[lane]);
            out[lane] = bits32(ieee::fma_nearest(of(&a), of(&b), of(&c)));
        }
    }
    r.set_row32(d, &out, mask);
}

/// Executes an operation of three operands. Returns whether it was a float operation.
pub(super) fn ternary(
    r: &mut Registers,
    mask: u32,
    operation: TernaryOperation,
    value_type: Type,
    d: Register,
    s: [Source; 3],
) -> bool {
    use TernaryOperation as T;
    match operation {
        T::FloatMultiplySubtract { modifiers, negate_product } => {
            multiply_subtract(r, mask, modifiers, negate_product, value_type, d, s);
        }
        T::FloatMultiplyAdd(modifiers) => match value_type {
            Type::F32 if modifiers == FloatModifiers::default() => fma_row(r, mask, d, s),
            Type::F32 => words3(r, mask, d, s, |a, b, c| fma_single(a, b, c, modifiers)),
            Type::F32x2 => longs3(r, mask, d, s, |a, b, c| {
                let low = fma_single(a as u32, b as u32, c as u32, modifiers);
                let high = |value: u64| (value >> 32) as u32;
                let high = fma_single(high(a), high(b), high(c), modifiers);
                u64::from(low) | u64::from(high) << 32
            }),
            Type::F64 => longs3(r, mask, d, s, |a, b, c| {
                let of = f64::from_bits;
                ieee::fma64(of(a), of(b), of(c), modifiers.rounding).to_bits()
            }),
            _ => half_fma(r, mask, modifiers, value_type, d, s, false),
        },
        T::FloatMultiplyAddOutOfBounds { relu } => {
            let modifiers = FloatModifiers { relu, ..FloatModifiers::default() };
            half_fma(r, mask, modifiers, value_type, d, s, true);
        }
        T::FloatMinimum3(modifiers) | T::FloatMaximum3(modifiers) => {
            let maximum = matches!(operation, T::FloatMaximum3(_));
            words3(r, mask, d, s, |a, b, c| {
                let two = extremum32(a, b, maximum, modifiers);
                extremum32(two, c, maximum, modifiers)
            });
        }
        T::SelectBySign { condition, flush_subnormals } if value_type.bits() <= 32 => {
            let float = condition == Type::F32;
            words3(r, mask, d, s, |a, b, c| {
                let first = chooses_first(c, float, flush_subnormals);
                if first { a } else { b }
            });
        }
        T::SelectBySign { condition, flush_subnormals } => {
            let float = condition == Type::F32;
            longs3(r, mask, d, s, |a, b, c| {
                let first = chooses_first(c as u32, float, flush_subnormals);
                if first { a } else { b }
            });
        }
        _ => return false,
    }
    true
}

/// Executes a fused difference as a sum with flipped signs.
fn multiply_subtract(
    r: &mut Registers,
    mask: u32,
    modifiers: FloatModifiers,
    negate_product: bool,
    value_type: Type,
    d: Register,
    s: [Source; 3],
) {
    let sign: u64 = match value_type {
        Type::F64 => 1 << 63,
        Type::F32 => 1 << 31,
        Type::F16 | Type::Bf16 => 0x8000,
        _ => 0x8000_8000,
    };
    let (of_product, of_sum) = if negate_product { (sign, 0) } else { (0, sign) };
    let (x, z) = (of_product as u32, of_sum as u32);
    match value_type {
        Type::F32 => words3(r, mask, d, s, |a, b, c| fma_single(a ^ x, b, c ^ z, modifiers)),
        Type::F64 => longs3(r, mask, d, s, |a, b, c| {
            let of = f64::from_bits;
            ieee::fma64(of(a ^ of_product), of(b), of(c ^ of_sum), modifiers.rounding).to_bits()
        }),
        _ => {
            let Some((half, _)) = half_of(value_type) else { return };
            words3(r, mask, d, s, |a, b, c| {
                pair3(a ^ x, b, c ^ z, |a, b, c| half.fma(a, b, c, modifiers))
            });
        }
    }
}

/// Condition of `slct`: `condition >= 0`. True for -0, false for NaN.
fn chooses_first(condition: u32, float: bool, flush_subnormals: bool) -> bool {
    if float {
        let value = f32::from_bits(condition);
        let value = if flush_subnormals { flush(value) } else { value };
        value >= 0.0
    } else {
        condition as i32 >= 0
    }
}

/// The NaN with which a tensor copy fills out-of-bounds elements; `fma.oob` treats it as zero.
const OUT_OF_BOUNDS: u16 = 0x7fff;

fn half_fma(
    r: &mut Registers,
    mask: u32,
    modifiers: FloatModifiers,
    value_type: Type,
    d: Register,
    s: [Source; 3],
    out_of_bounds: bool,
) {
    let Some((half, packed)) = half_of(value_type) else { return };
    let one = move |a: u16, b: u16, c: u16| {
        if out_of_bounds && (a == OUT_OF_BOUNDS || b == OUT_OF_BOUNDS) {
            return half.fma(0, 0, c, modifiers);
        }
        half.fma(a, b, c, modifiers)
    };
    if packed {
        words3(r, mask, d, s, |a, b, c| pair3(a, b, c, one));
    } else {
        words3(r, mask, d, s, |a, b, c| u32::from(one(a as u16, b as u16, c as u16)));
    }
}

/// Executes an operation of one operand. Returns whether it was a float operation.
pub(super) fn unary(
    r: &mut Registers,
    mask: u32,
    operation: UnaryOperation,
    value_type: Type,
    d: Register,
    a: Source,
) -> bool {
    let (negate, flush_subnormals) = match operation {
        UnaryOperation::FloatNegate { flush_subnormals } => (true, flush_subnormals),
        UnaryOperation::FloatAbsolute { flush_subnormals } => (false, flush_subnormals),
        UnaryOperation::Function(function, modifiers) => {
            super::function::unary(r, mask, function, modifiers, value_type, d, a);
            return true;
        }
        _ => return false,
    };
    match value_type {
        Type::F32 => words1(r, mask, d, a, |a| {
            let a = if flush_subnormals { flush(f32::from_bits(a)).to_bits() } else { a };
            match negate {
                _ if f32::from_bits(a).is_nan() => ieee::NAN32,
                true => a ^ 1 << 31,
                false => a & !(1 << 31),
            }
        }),
        Type::F64 => {
            longs1(r, mask, d, a, |a| if negate { a ^ 1 << 63 } else { a & !(1 << 63) });
        }
        _ => {
            let Some((half, packed)) = half_of(value_type) else { return true };
            let one = move |a: u16| half.sign(a, negate, flush_subnormals);
            if packed {
                words1(r, mask, d, a, |a| pair1(a, one));
            } else {
                words1(r, mask, d, a, |a| u32::from(one(a as u16)));
            }
        }
    }
    true
}

/// `add.f32.f16` and related mixed-precision instructions.
#[expect(clippy::too_many_arguments, reason = "one instruction with its operands and modifiers")]
pub(super) fn mixed(
    r: &mut Registers,
    mask: u32,
    d: Register,
    [a, b, c]: [Source; 3],
    multiply: bool,
    subtract: bool,
    narrow: Type,
    modifiers: FloatModifiers,
) {
    let half = if narrow == Type::F16 { Half::F16 } else { Half::Bf16 };
    words3(r, mask, d, [a, b, c], |a, b, c| {
        let (a, b, c) = (half.value(a as u16), half.value(b as u16), f32::from_bits(c));
        let value = if multiply {
            ieee::fma32(a, b, c, modifiers.rounding)
        } else {
            ieee::add32(a, if subtract { -c } else { c }, modifiers.rounding)
        };
        finish(value, modifiers)
    });
}
