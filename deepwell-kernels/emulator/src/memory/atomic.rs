//! Arithmetic of atomic operations and reductions.

use crate::decode::{AtomicOperation, Type};

/// Computes the new value of an element of type `element` that holds `old`. `compare` is the
/// expected value of [`AtomicOperation::CompareAndSwap`]. Float additions round to nearest; packed
/// halves are handled separately. Only the low bits of the element count.
pub fn apply_atomic(
    operation: AtomicOperation,
    element: Type,
    old: u64,
    operand: u64,
    compare: u64,
) -> u64 {
    let bits = element.bits();
    let cut = |value: u64| if bits == 64 { value } else { value & ((1 << bits) - 1) };
    let (old, operand, compare) = (cut(old), cut(operand), cut(compare));
    let signed = |value: u64| (value << (64 - bits)) as i64 >> (64 - bits);
    let result = match element {
        Type::F16x2 | Type::Bf16x2 => {
            let part = if element == Type::F16x2 { Type::F16 } else { Type::Bf16 };
            let of = |shift: u32| apply_atomic(operation, part, old >> shift, operand >> shift, 0);
            of(0) | of(16) << 16
        }
        Type::F32 | Type::F64 | Type::F16 | Type::Bf16 => match operation {
            AtomicOperation::Add => float_add(element, old, operand),
            AtomicOperation::Min | AtomicOperation::Max => {
                let (a, b) = (to_f64(element, old), to_f64(element, operand));
                let first = if operation == AtomicOperation::Min { a <= b } else { a >= b };
                if b.is_nan() || first { old } else { operand }
            }
            _ => operand,
        },
        _ => match operation {
            AtomicOperation::Add => old.wrapping_add(operand),
            AtomicOperation::Min if element.is_signed() => signed(old).min(signed(operand)) as u64,
            AtomicOperation::Max if element.is_signed() => signed(old).max(signed(operand)) as u64,
            AtomicOperation::Min => old.min(operand),
            AtomicOperation::Max => old.max(operand),
            AtomicOperation::And => old & operand,
            AtomicOperation::Or => old | operand,
            AtomicOperation::Xor => old ^ operand,
            AtomicOperation::Increment => {
                if old >= operand {
                    0
                } else {
                    old + 1
                }
            }
            AtomicOperation::Decrement => {
                if old == 0 || old > operand {
                    operand
                } else {
                    old - 1
                }
            }
            AtomicOperation::Exchange => operand,
            AtomicOperation::CompareAndSwap => {
                if old == compare {
                    operand
                } else {
                    old
                }
            }
        },
    };
    cut(result)
}

fn to_f64(element: Type, bits: u64) -> f64 {
    match element {
        Type::F64 => f64::from_bits(bits),
        Type::F32 => f64::from(f32::from_bits(bits as u32)),
        Type::Bf16 => f64::from(f32::from_bits((bits as u32) << 16)),
        _ => {
            let (sign, exponent, fraction) = (bits >> 15 & 1, bits >> 10 & 31, bits & 0x3FF);
            let magnitude = match exponent {
                31 if fraction != 0 => f64::NAN,
                31 => f64::INFINITY,
                0 => fraction as f64 * 2f64.powi(-24),
                _ => (1024 + fraction) as f64 * 2f64.powi(exponent as i32 - 25),
            };
            if sign == 1 { -magnitude } else { magnitude }
        }
    }
}

/// Adds two floats. The sum of two F16 is exact in double precision (10 fraction bits over a range
/// of 2^40). For BF16, the error of the double is too small to change a rounding to 8 bits.
fn float_add(element: Type, old: u64, operand: u64) -> u64 {
    match element {
        Type::F64 => (f64::from_bits(old) + f64::from_bits(operand)).to_bits(),
        Type::F32 => {
            u64::from((f32::from_bits(old as u32) + f32::from_bits(operand as u32)).to_bits())
        }
        Type::Bf16 => u64::from(round_half(to_f64(element, old) + to_f64(element, operand), 8, 7)),
        _ => u64::from(round_half(to_f64(element, old) + to_f64(element, operand), 5, 10)),
    }
}

/// Rounds to nearest, ties to even, into a sign, `exponent_bits` and `fraction_bits`.
fn round_half(value: f64, exponent_bits: u32, fraction_bits: u32) -> u16 {
    let sign = if value.is_sign_negative() { 1u16 << 15 } else { 0 };
    if value.is_nan() {
        return 0x7FFF;
    }
    let bias = (1i32 << (exponent_bits - 1)) - 1;
    let top = ((1u16 << exponent_bits) - 1) << fraction_bits;
    let magnitude = value.abs();
    if magnitude == 0.0 {
        return sign;
    }
    if magnitude.is_infinite() {
        return sign | top;
    }
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(1 - bias);
    let scaled = magnitude * 2f64.powi(fraction_bits as i32 - exponent);
    let rounded = scaled.round_ties_even() as u32;
    // A carry out of the fraction increments the exponent.
    let code = ((exponent + bias - 1) as u32) * (1 << fraction_bits) + rounded;
    sign | (code.min(u32::from(top)) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use AtomicOperation as Op;

    #[test]
    fn integers_and_floats() {
        for (operation, element, old, operand, compare, expected) in [
            (Op::Add, Type::U32, 0xFFFF_FFFF, 2, 0, 1),
            (Op::Add, Type::U64, u64::MAX, 2, 0, 1),
            (Op::Min, Type::S32, 0xFFFF_FFFF, 5, 0, 0xFFFF_FFFF),
            (Op::Min, Type::U32, 0xFFFF_FFFF, 5, 0, 5),
            (Op::Max, Type::S64, 3, u64::MAX, 0, 3),
            (Op::Increment, Type::U32, 7, 7, 0, 0),
            (Op::Increment, Type::U32, 6, 7, 0, 7),
            (Op::Decrement, Type::U32, 0, 7, 0, 7),
            (Op::Decrement, Type::U32, 8, 7, 0, 7),
            (Op::CompareAndSwap, Type::B16, 4, 9, 4, 9),
            (Op::CompareAndSwap, Type::B32, 4, 9, 5, 4),
            (Op::Exchange, Type::B64, 4, 9, 0, 9),
            (Op::Add, Type::F32, 0x3F80_0000, 0x4000_0000, 0, 0x4040_0000),
            // 1 + 2^-11 is a tie in F16 and rounds to the even 1; 1 + 3 * 2^-11 rounds up.
            (Op::Add, Type::F16, 0x3C00, 0x1000, 0, 0x3C00),
            (Op::Add, Type::F16, 0x3C01, 0x1000, 0, 0x3C02),
            // The largest F16 and half a unit more overflow.
            (Op::Add, Type::F16, 0x7BFF, 0x4C00, 0, 0x7C00),
            // Subnormals: 2^-24 + 2^-24.
            (Op::Add, Type::F16, 1, 1, 0, 2),
            (Op::Add, Type::Bf16x2, 0x3F80_4000, 0x3F80_3F80, 0, 0x4000_4040),
            (Op::Min, Type::F32, 0x7FC0_0000, 0x3F80_0000, 0, 0x3F80_0000),
            (Op::Max, Type::F32, 0xBF80_0000, 0x3F80_0000, 0, 0x3F80_0000),
        ] {
            let found = apply_atomic(operation, element, old, operand, compare);
            assert_eq!(found, expected, "{operation:?} {element} {old:#x} {operand:#x}");
        }
    }
}
