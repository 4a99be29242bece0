//! Integer and bit operations with one and two operands.

use super::registers::Registers;
use super::rows::{longs1, longs2, words1, words2};
use crate::decode::{BinaryOperation, MultiplyPart, Register, Source, Type, UnaryOperation};

/// Sign-extends the low 16 bits of a word to 32 bits.
#[inline]
fn extend16(value: u32) -> u32 {
    value as u16 as i16 as i32 as u32
}

/// Extends a 16-bit value according to its signedness.
#[inline]
pub(super) fn widen16(value: u32, signed: bool) -> u32 {
    if signed { extend16(value) } else { value & 0xffff }
}

/// Executes an operation of one operand.
pub(super) fn unary(
    registers: &mut Registers,
    mask: u32,
    operation: UnaryOperation,
    value_type: Type,
    d: Register,
    a: Source,
) {
    use UnaryOperation as U;
    if value_type.bits() == 64 {
        let signed = value_type.is_signed();
        match operation {
            U::Not => longs1(registers, mask, d, a, |a| !a),
            U::LogicalNot => longs1(registers, mask, d, a, |a| u64::from(a == 0)),
            U::Negate => longs1(registers, mask, d, a, u64::wrapping_neg),
            U::Absolute => longs1(registers, mask, d, a, |a| (a as i64).wrapping_abs() as u64),
            U::PopulationCount => longs1(registers, mask, d, a, |a| u64::from(a.count_ones())),
            U::LeadingZeros => longs1(registers, mask, d, a, |a| u64::from(a.leading_zeros())),
            U::FindBit { shift_amount } => longs1(registers, mask, d, a, |a| {
                let a = if signed && (a as i64) < 0 { !a } else { a };
                find_bit(a, 64, shift_amount)
            }),
            U::ReverseBits => longs1(registers, mask, d, a, u64::reverse_bits),
            _ => {}
        }
        return;
    }
    let half = value_type.bits() == 16;
    match operation {
        U::Not => words1(registers, mask, d, a, |a| !a),
        U::LogicalNot if half => words1(registers, mask, d, a, |a| u32::from(a & 0xffff == 0)),
        U::LogicalNot => words1(registers, mask, d, a, |a| u32::from(a == 0)),
        U::Negate => words1(registers, mask, d, a, u32::wrapping_neg),
        U::Absolute if half => {
            words1(registers, mask, d, a, |a| (extend16(a) as i32).wrapping_abs() as u32);
        }
        U::Absolute => words1(registers, mask, d, a, |a| (a as i32).wrapping_abs() as u32),
        U::PopulationCount => words1(registers, mask, d, a, u32::count_ones),
        U::LeadingZeros => words1(registers, mask, d, a, u32::leading_zeros),
        U::FindBit { shift_amount } => {
            let signed = value_type.is_signed();
            words1(registers, mask, d, a, |a| {
                let a = if signed && (a as i32) < 0 { !a } else { a };
                find_bit(u64::from(a), 32, shift_amount) as u32
            });
        }
        U::ReverseBits => words1(registers, mask, d, a, u32::reverse_bits),
        _ => {}
    }
}

fn find_bit(value: u64, bits: u32, shift_amount: bool) -> u64 {
    if value == 0 {
        return 0xffff_ffff;
    }
    let position = 63 - value.leading_zeros();
    u64::from(if shift_amount { bits - 1 - position } else { position })
}

/// Executes an operation of two operands.
pub(super) fn binary(
    registers: &mut Registers,
    mask: u32,
    operation: BinaryOperation,
    value_type: Type,
    d: Register,
    sources: [Source; 2],
) {
    use BinaryOperation as B;
    match operation {
        B::Add { carry_in, carry_out, .. } if carry_in || carry_out => {
            return carry_chain(
                registers, mask, value_type, d, sources, false, carry_in, carry_out,
            );
        }
        B::Subtract { carry_in, carry_out, .. } if carry_in || carry_out => {
            return carry_chain(registers, mask, value_type, d, sources, true, carry_in, carry_out);
        }
        _ => {}
    }
    match value_type {
        Type::U16x2 | Type::S16x2 => packed(registers, mask, operation, value_type, d, sources),
        _ => match value_type.bits() {
            16 => halves(registers, mask, operation, value_type, d, sources),
            32 => words(registers, mask, operation, value_type, d, sources),
            _ => longs(registers, mask, operation, value_type, d, sources),
        },
    }
}

fn words(
    r: &mut Registers,
    mask: u32,
    operation: BinaryOperation,
    value_type: Type,
    d: Register,
    s: [Source; 2],
) {
    use BinaryOperation as B;
    let signed = value_type.is_signed();
    match operation {
        B::Add { saturate: false, .. } => words2(r, mask, d, s, u32::wrapping_add),
        B::Subtract { saturate: false, .. } => words2(r, mask, d, s, u32::wrapping_sub),
        B::Add { .. } => {
            words2(r, mask, d, s, |a, b| (a as i32).saturating_add(b as i32) as u32);
        }
        B::Subtract { .. } => {
            words2(r, mask, d, s, |a, b| (a as i32).saturating_sub(b as i32) as u32);
        }
        B::Multiply(MultiplyPart::Low) => words2(r, mask, d, s, u32::wrapping_mul),
        B::Multiply(MultiplyPart::High) if signed => {
            words2(r, mask, d, s, |a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32)
        }
        B::Multiply(MultiplyPart::High) => {
            words2(r, mask, d, s, |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32);
        }
        B::Multiply(MultiplyPart::Wide) if signed => longs2(r, mask, d, s, |a, b| {
            i64::from(a as u32 as i32).wrapping_mul(i64::from(b as u32 as i32)) as u64
        }),
        B::Multiply(MultiplyPart::Wide) => {
            longs2(r, mask, d, s, |a, b| u64::from(a as u32) * u64::from(b as u32));
        }
        B::Multiply24 { high } => words2(r, mask, d, s, |a, b| product24(a, b, signed, high)),
        B::Divide if signed => words2(r, mask, d, s, |a, b| divide32(a, b).0),
        B::Divide => words2(r, mask, d, s, |a, b| a.checked_div(b).unwrap_or(u32::MAX)),
        B::Remainder if signed => words2(r, mask, d, s, |a, b| divide32(a, b).1),
        B::Remainder => words2(r, mask, d, s, |a, b| a.checked_rem(b).unwrap_or(u32::MAX)),
        B::Minimum { relu } if signed => {
            let least = if relu { 0 } else { i32::MIN };
            words2(r, mask, d, s, |a, b| (a as i32).min(b as i32).max(least) as u32);
        }
        B::Minimum { .. } => words2(r, mask, d, s, u32::min),
        B::Maximum { relu } if signed => {
            let least = if relu { 0 } else { i32::MIN };
            words2(r, mask, d, s, |a, b| (a as i32).max(b as i32).max(least) as u32);
        }
        B::Maximum { .. } => words2(r, mask, d, s, u32::max),
        B::And => words2(r, mask, d, s, |a, b| a & b),
        B::Or => words2(r, mask, d, s, |a, b| a | b),
        B::Xor => words2(r, mask, d, s, |a, b| a ^ b),
        B::ShiftLeft => words2(r, mask, d, s, |a, b| if b < 32 { a << b } else { 0 }),
        B::ShiftRight if signed => {
            words2(r, mask, d, s, |a, b| ((a as i32) >> b.min(31)) as u32);
        }
        B::ShiftRight => words2(r, mask, d, s, |a, b| if b < 32 { a >> b } else { 0 }),
        B::BitMask { wrap } => words2(r, mask, d, s, |a, b| bit_mask(a, b, wrap)),
        B::ExtendSign { wrap } => {
            words2(r, mask, d, s, |a, b| extend_sign(a, b, wrap, signed));
        }
        _ => {}
    }
}

fn longs(
    r: &mut Registers,
    mask: u32,
    operation: BinaryOperation,
    value_type: Type,
    d: Register,
    s: [Source; 2],
) {
    use BinaryOperation as B;
    let signed = value_type.is_signed();
    match operation {
        B::Add { .. } => longs2(r, mask, d, s, u64::wrapping_add),
        B::Subtract { .. } => longs2(r, mask, d, s, u64::wrapping_sub),
        B::Multiply(MultiplyPart::High) if signed => longs2(r, mask, d, s, |a, b| {
            ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64
        }),
        B::Multiply(MultiplyPart::High) => {
            longs2(r, mask, d, s, |a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64);
        }
        B::Multiply(_) => longs2(r, mask, d, s, u64::wrapping_mul),
        B::Divide if signed => longs2(r, mask, d, s, |a, b| divide64(a, b).0),
        B::Divide => longs2(r, mask, d, s, |a, b| a.checked_div(b).unwrap_or(u64::MAX)),
        B::Remainder if signed => longs2(r, mask, d, s, |a, b| divide64(a, b).1),
        B::Remainder => longs2(r, mask, d, s, |a, b| a.checked_rem(b).unwrap_or(u64::MAX)),
        B::Minimum { .. } if signed => {
            longs2(r, mask, d, s, |a, b| (a as i64).min(b as i64) as u64);
        }
        B::Minimum { .. } => longs2(r, mask, d, s, u64::min),
        B::Maximum { .. } if signed => {
            longs2(r, mask, d, s, |a, b| (a as i64).max(b as i64) as u64);
        }
        B::Maximum { .. } => longs2(r, mask, d, s, u64::max),
        B::And => longs2(r, mask, d, s, |a, b| a & b),
        B::Or => longs2(r, mask, d, s, |a, b| a | b),
        B::Xor => longs2(r, mask, d, s, |a, b| a ^ b),
        // Shift amounts have 32 bits.
        B::ShiftLeft => longs2(r, mask, d, s, |a, b| {
            let b = b as u32;
            if b < 64 { a << b } else { 0 }
        }),
        B::ShiftRight if signed => {
            longs2(r, mask, d, s, |a, b| ((a as i64) >> (b as u32).min(63)) as u64);
        }
        B::ShiftRight => longs2(r, mask, d, s, |a, b| {
            let b = b as u32;
            if b < 64 { a >> b } else { 0 }
        }),
        _ => {}
    }
}

fn halves(
    r: &mut Registers,
    mask: u32,
    operation: BinaryOperation,
    value_type: Type,
    d: Register,
    s: [Source; 2],
) {
    use BinaryOperation as B;
    let signed = value_type.is_signed();
    let wide = move |value: u32| widen16(value, signed);
    match operation {
        B::Add { .. } => words2(r, mask, d, s, u32::wrapping_add),
        B::Subtract { .. } => words2(r, mask, d, s, u32::wrapping_sub),
        B::Multiply(MultiplyPart::High) => {
            words2(r, mask, d, s, |a, b| wide(a).wrapping_mul(wide(b)) >> 16);
        }
        B::Multiply(_) => words2(r, mask, d, s, |a, b| wide(a).wrapping_mul(wide(b))),
        B::Divide if signed => words2(r, mask, d, s, |a, b| divide32(wide(a), wide(b)).0),
        B::Divide => {
            words2(r, mask, d, s, |a, b| wide(a).checked_div(wide(b)).unwrap_or(u32::MAX));
        }
        B::Remainder if signed => words2(r, mask, d, s, |a, b| divide32(wide(a), wide(b)).1),
        B::Remainder => {
            words2(r, mask, d, s, |a, b| wide(a).checked_rem(wide(b)).unwrap_or(u32::MAX));
        }
        B::Minimum { .. } => {
            words2(r, mask, d, s, |a, b| (wide(a) as i32).min(wide(b) as i32) as u32)
        }
        B::Maximum { .. } => {
            words2(r, mask, d, s, |a, b| (wide(a) as i32).max(wide(b) as i32) as u32)
        }
        B::And => words2(r, mask, d, s, |a, b| a & b),
        B::Or => words2(r, mask, d, s, |a, b| a | b),
        B::Xor => words2(r, mask, d, s, |a, b| a ^ b),
        B::ShiftLeft => words2(r, mask, d, s, |a, b| if b < 16 { a << b } else { 0 }),
        B::ShiftRight => {
            words2(r, mask, d, s, |a, b| ((wide(a) as i32) >> b.min(31)) as u32);
        }
        _ => {}
    }
}

fn packed(
    r: &mut Registers,
    mask: u32,
    operation: BinaryOperation,
    value_type: Type,
    d: Register,
    s: [Source; 2],
) {
    use BinaryOperation as B;
    let signed = value_type.is_signed();
    let wide = move |value: u32| widen16(value, signed) as i32;
    let each = |f: &dyn Fn(i32, i32) -> i32, a: u32, b: u32| {
        let low = f(wide(a), wide(b)) as u32 & 0xffff;
        low | (f(wide(a >> 16), wide(b >> 16)) as u32) << 16
    };
    match operation {
        B::Add { .. } => words2(r, mask, d, s, |a, b| each(&|a, b| a + b, a, b)),
        B::Subtract { .. } => words2(r, mask, d, s, |a, b| each(&|a, b| a - b, a, b)),
        B::Minimum { relu } => {
            let least = if relu { 0 } else { i32::MIN };
            words2(r, mask, d, s, |a, b| each(&|a, b| a.min(b).max(least), a, b));
        }
        B::Maximum { relu } => {
            let least = if relu { 0 } else { i32::MIN };
            words2(r, mask, d, s, |a, b| each(&|a, b| a.max(b).max(least), a, b));
        }
        _ => {}
    }
}

/// `add.cc`, `addc`, `sub.cc`, `subc`. The flag of a subtraction is a borrow.
#[expect(clippy::too_many_arguments, reason = "one instruction with its operands and modifiers")]
fn carry_chain(
    r: &mut Registers,
    mask: u32,
    value_type: Type,
    d: Register,
    [a, b]: [Source; 2],
    subtract: bool,
    carry_in: bool,
    carry_out: bool,
) {
    let limit = if value_type.bits() == 64 { u64::MAX } else { 0xffff_ffff };
    let (a, b) = (r.row64(a), r.row64(b));
    let carry = if carry_in { r.carry } else { 0 };
    let mut flags = 0;
    let out = std::array::from_fn(|lane| {
        let (a, b) = (u128::from(a[lane] & limit), u128::from(b[lane] & limit));
        let b = b + u128::from(carry >> lane & 1);
        let (value, flag) =
            if subtract { (a.wrapping_sub(b), a < b) } else { (a + b, a + b > u128::from(limit)) };
        flags |= u32::from(flag) << lane;
        value as u64 & limit
    });
    r.set_row64(d, &out, mask);
    if carry_out {
        r.carry = (r.carry & !mask) | (flags & mask);
    }
}

/// Quotient and remainder; all ones for division by zero.
fn divide32(a: u32, b: u32) -> (u32, u32) {
    if b == 0 {
        return (u32::MAX, u32::MAX);
    }
    let (a, b) = (a as i32, b as i32);
    (a.wrapping_div(b) as u32, a.wrapping_rem(b) as u32)
}

/// Quotient and remainder; all ones for division by zero.
fn divide64(a: u64, b: u64) -> (u64, u64) {
    if b == 0 {
        return (u64::MAX, u64::MAX);
    }
    let (a, b) = (a as i64, b as i64);
    (a.wrapping_div(b) as u64, a.wrapping_rem(b) as u64)
}

pub(super) fn product24(a: u32, b: u32, signed: bool, high: bool) -> u32 {
    let cut = |value: u32| {
        if signed { i64::from((value << 8) as i32 >> 8) } else { i64::from(value & 0xff_ffff) }
    };
    let product = cut(a) * cut(b);
    (if high { product >> 16 } else { product }) as u32
}

fn bit_mask(start: u32, count: u32, wrap: bool) -> u32 {
    let limit = |value: u32| if wrap { value & 31 } else { value.min(32) };
    let (start, count) = (limit(start), limit(count));
    let below = |bits: u32| if bits >= 32 { u64::from(u32::MAX) } else { (1u64 << bits) - 1 };
    (below(start + count) & !below(start)) as u32
}

fn extend_sign(value: u32, bits: u32, wrap: bool, signed: bool) -> u32 {
    let bits = if wrap { bits & 31 } else { bits.min(32) };
    match bits {
        0 => 0,
        _ if signed => ((value << (32 - bits)) as i32 >> (32 - bits)) as u32,
        _ => value << (32 - bits) >> (32 - bits),
    }
}
