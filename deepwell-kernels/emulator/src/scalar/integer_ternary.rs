//! Integer and bit operations with three operands, and bit fields.

use super::integer::{product24, widen16};
use super::registers::Registers;
use super::rows::{longs3, words3};
use crate::decode::{MultiplyPart, PermuteMode, Register, Source, TernaryOperation, Type};

/// Executes an operation of three operands.
pub(super) fn ternary(
    r: &mut Registers,
    mask: u32,
    operation: TernaryOperation,
    value_type: Type,
    d: Register,
    s: [Source; 3],
) {
    use TernaryOperation as T;
    let signed = value_type.is_signed();
    let bits = value_type.bits();
    match operation {
        T::MultiplyAdd { part, saturate, carry_in, carry_out } => {
            if carry_in || carry_out {
                return product_chain(r, mask, value_type, part, d, s, carry_in, carry_out);
            }
            multiply_add(r, mask, value_type, part, saturate, d, s);
        }
        T::MultiplyAdd24 { high, saturate } => words3(r, mask, d, s, |a, b, c| {
            let product = product24(a, b, signed, high);
            if saturate {
                (product as i32).saturating_add(c as i32) as u32
            } else {
                product.wrapping_add(c)
            }
        }),
        T::SumOfAbsoluteDifferences => longs3(r, mask, d, s, |a, b, c| {
            let wide = |value: u64| widen(value, bits, signed);
            (wide(a) - wide(b)).unsigned_abs().wrapping_add(u128::from(c)) as u64
        }),
        T::Logic3(table) => words3(r, mask, d, s, |a, b, c| logic3(a, b, c, table)),
        T::Permute(mode) => words3(r, mask, d, s, |a, b, c| permute(a, b, c, mode)),
        T::FunnelLeft { wrap } => words3(r, mask, d, s, |a, b, c| {
            let count = if wrap { c & 31 } else { c.min(32) };
            (((u64::from(b) << 32 | u64::from(a)) << count) >> 32) as u32
        }),
        T::FunnelRight { wrap } => words3(r, mask, d, s, |a, b, c| {
            let count = if wrap { c & 31 } else { c.min(32) };
            ((u64::from(b) << 32 | u64::from(a)) >> count) as u32
        }),
        T::ExtractBits if bits == 64 => {
            longs3(r, mask, d, s, |a, b, c| extract(a, b as u32, c as u32, 64, signed));
        }
        T::ExtractBits => {
            words3(r, mask, d, s, |a, b, c| extract(u64::from(a), b, c, 32, signed) as u32)
        }
        T::FindNthSet => words3(r, mask, d, s, find_nth_set),
        T::Dot4 { signed } => words3(r, mask, d, s, |a, b, c| dot4(a, b, c, signed)),
        T::Dot2 { signed, high } => {
            words3(r, mask, d, s, |a, b, c| dot2(a, b, c, signed, high));
        }
        _ => {}
    }
}

fn multiply_add(
    r: &mut Registers,
    mask: u32,
    value_type: Type,
    part: MultiplyPart,
    saturate: bool,
    d: Register,
    s: [Source; 3],
) {
    let signed = value_type.is_signed();
    match (value_type.bits(), part) {
        (32, MultiplyPart::Low) => {
            words3(r, mask, d, s, |a, b, c| a.wrapping_mul(b).wrapping_add(c));
        }
        (32, MultiplyPart::High) => words3(r, mask, d, s, |a, b, c| {
            let high = if signed {
                ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32
            } else {
                ((u64::from(a) * u64::from(b)) >> 32) as u32
            };
            if saturate {
                (high as i32).saturating_add(c as i32) as u32
            } else {
                high.wrapping_add(c)
            }
        }),
        (32, MultiplyPart::Wide) => longs3(r, mask, d, s, |a, b, c| {
            let product = if signed {
                i64::from(a as u32 as i32).wrapping_mul(i64::from(b as u32 as i32)) as u64
            } else {
                u64::from(a as u32) * u64::from(b as u32)
            };
            product.wrapping_add(c)
        }),
        (64, MultiplyPart::High) => longs3(r, mask, d, s, |a, b, c| {
            let high = if signed {
                ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64
            } else {
                ((u128::from(a) * u128::from(b)) >> 64) as u64
            };
            high.wrapping_add(c)
        }),
        (64, _) => longs3(r, mask, d, s, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        (_, MultiplyPart::High) => words3(r, mask, d, s, |a, b, c| {
            (widen16(a, signed).wrapping_mul(widen16(b, signed)) >> 16).wrapping_add(c)
        }),
        _ => words3(r, mask, d, s, |a, b, c| {
            widen16(a, signed).wrapping_mul(widen16(b, signed)).wrapping_add(c)
        }),
    }
}

/// `mad.cc`, `madc`.
#[expect(clippy::too_many_arguments, reason = "one instruction with its operands and modifiers")]
fn product_chain(
    r: &mut Registers,
    mask: u32,
    value_type: Type,
    part: MultiplyPart,
    d: Register,
    [a, b, c]: [Source; 3],
    carry_in: bool,
    carry_out: bool,
) {
    let bits = value_type.bits();
    let signed = value_type.is_signed();
    let limit = if bits == 64 { u64::MAX } else { 0xffff_ffff };
    let (a, b, c) = (r.row64(a), r.row64(b), r.row64(c));
    let carry = if carry_in { r.carry } else { 0 };
    let mut flags = 0;
    let out = std::array::from_fn(|lane| {
        let product = widen(a[lane], bits, signed).wrapping_mul(widen(b[lane], bits, signed));
        let product = if part == MultiplyPart::High { product >> bits } else { product };
        let sum = u128::from(product as u64 & limit)
            + u128::from(c[lane] & limit)
            + u128::from(carry >> lane & 1);
        flags |= u32::from(sum > u128::from(limit)) << lane;
        sum as u64 & limit
    });
    r.set_row64(d, &out, mask);
    if carry_out {
        r.carry = (r.carry & !mask) | (flags & mask);
    }
}

/// Extends a value of `bits` bits according to its signedness.
fn widen(value: u64, bits: u32, signed: bool) -> i128 {
    let shift = 64 - bits.min(64);
    if signed {
        i128::from((value << shift) as i64 >> shift)
    } else {
        i128::from(value << shift >> shift)
    }
}

fn logic3(a: u32, b: u32, c: u32, table: u8) -> u32 {
    let mut result = 0;
    for row in 0..8u32 {
        if table >> row & 1 == 1 {
            let a = if row & 4 == 0 { !a } else { a };
            let b = if row & 2 == 0 { !b } else { b };
            let c = if row & 1 == 0 { !c } else { c };
            result |= a & b & c;
        }
    }
    result
}

#[inline]
fn permute(a: u32, b: u32, control: u32, mode: PermuteMode) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    let pick = |selector: u32| (bytes >> (8 * (selector & 7))) as u32 & 0xff;
    if mode == PermuteMode::Index {
        let mut result = 0;
        for place in 0..4 {
            let selector = control >> (4 * place) & 15;
            let byte = pick(selector);
            // The top bit of a selector replicates the byte's sign.
            let byte = if selector & 8 == 0 { byte } else { (byte >> 7) * 0xff };
            result |= byte << (8 * place);
        }
        return result;
    }
    let position = control & 3;
    let selectors: [u32; 4] = std::array::from_fn(|place| {
        let place = place as u32;
        match mode {
            PermuteMode::Forward4 => position + place,
            PermuteMode::Backward4 => (position + 8 - place) & 7,
            PermuteMode::Replicate8 => position,
            PermuteMode::EdgeClampLeft => place.max(position),
            PermuteMode::EdgeClampRight => place.min(position),
            _ => (position & 1) * 2 + (place & 1),
        }
    });
    selectors.iter().rev().fold(0, |result, selector| result << 8 | pick(*selector))
}

fn extract(value: u64, position: u32, length: u32, bits: u32, signed: bool) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if length == 0 {
        return 0;
    }
    let top = (position + length - 1).min(bits - 1);
    let sign = signed && value >> top & 1 == 1;
    let shifted = if position < 64 { value >> position } else { 0 };
    let available = (bits.saturating_sub(position)).min(length);
    let low = if available >= 64 { u64::MAX } else { (1 << available) - 1 };
    let filled = if sign { !low } else { 0 };
    (shifted & low) | filled
}

/// `bfi`.
pub(super) fn insert(a: u64, b: u64, position: u32, length: u32, bits: u32) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if length == 0 || position >= bits {
        return b;
    }
    let length = length.min(bits - position);
    let low = if length >= 64 { u64::MAX } else { (1 << length) - 1 };
    (b & !(low << position)) | (a & low) << position
}

fn find_nth_set(mask: u32, base: u32, offset: u32) -> u32 {
    let offset = offset as i32;
    let at = |position: i64| (0..32).contains(&position) && mask >> position & 1 == 1;
    let mut position = i64::from(base);
    if offset == 0 {
        return if at(position) { base } else { u32::MAX };
    }
    let mut left = offset.unsigned_abs() - 1;
    let step = if offset > 0 { 1 } else { -1 };
    while (0..32).contains(&position) {
        if at(position) {
            if left == 0 {
                return position as u32;
            }
            left -= 1;
        }
        position += step;
    }
    u32::MAX
}

fn byte(value: u32, place: u32, signed: bool) -> i32 {
    let byte = (value >> (8 * place)) as u8;
    if signed { i32::from(byte as i8) } else { i32::from(byte) }
}

fn dot4(a: u32, b: u32, c: u32, signed: [bool; 2]) -> u32 {
    (0..4).fold(c, |sum, place| {
        let product = byte(a, place, signed[0]) * byte(b, place, signed[1]);
        sum.wrapping_add(product as u32)
    })
}

fn dot2(a: u32, b: u32, c: u32, signed: [bool; 2], high: bool) -> u32 {
    (0..2).fold(c, |sum, place| {
        let half = widen16(a >> (16 * place), signed[0]) as i32;
        let product = half * byte(b, place + if high { 2 } else { 0 }, signed[1]);
        sum.wrapping_add(product as u32)
    })
}
