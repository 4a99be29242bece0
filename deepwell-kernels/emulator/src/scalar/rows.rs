//! Application of a function of one lane to 32 lanes.

use super::registers::{LANES, Registers};
use crate::decode::{Register, Source};

/// 32-bit result of one 32-bit operand.
#[inline]
pub(super) fn words1(
    registers: &mut Registers,
    mask: u32,
    destination: Register,
    a: Source,
    f: impl Fn(u32) -> u32,
) {
    let a = registers.row32(a);
    let out: [u32; LANES] = std::array::from_fn(|lane| f(a[lane]));
    registers.set_row32(destination, &out, mask);
}

/// 32-bit result of two 32-bit operands.
#[inline]
pub(super) fn words2(
    registers: &mut Registers,
    mask: u32,
    destination: Register,
    [a, b]: [Source; 2],
    f: impl Fn(u32, u32) -> u32,
) {
    let (a, b) = (registers.row32(a), registers.row32(b));
    let out: [u32; LANES] = std::array::from_fn(|lane| f(a[lane], b[lane]));
    registers.set_row32(destination, &out, mask);
}

/// 32-bit result of three 32-bit operands.
#[inline]
pub(super) fn words3(
    registers: &mut Registers,
    mask: u32,
    destination: Register,
    [a, b, c]: [Source; 3],
    f: impl Fn(u32, u32, u32) -> u32,
) {
    let (a, b, c) = (registers.row32(a), registers.row32(b), registers.row32(c));
    let out: [u32; LANES] = std::array::from_fn(|lane| f(a[lane], b[lane], c[lane]));
    registers.set_row32(destination, &out, mask);
}

/// 64-bit result of one 64-bit operand.
#[inline]
pub(super) fn longs1(
    registers: &mut Registers,
    mask: u32,
    destination: Register,
    a: Source,
    f: impl Fn(u64) -> u64,
) {
    let a = registers.row64(a);
    let out: [u64; LANES] = std::array::from_fn(|lane| f(a[lane]));
    registers.set_row64(destination, &out, mask);
}

/// 64-bit result of two 64-bit operands.
#[inline]
pub(super) fn longs2(
    registers: &mut Registers,
    mask: u32,
    destination: Register,
    [a, b]: [Source; 2],
    f: impl Fn(u64, u64) -> u64,
) {
    let (a, b) = (registers.row64(a), registers.row64(b));
    let out: [u64; LANES] = std::array::from_fn(|lane| f(a[lane], b[lane]));
    registers.set_row64(destination, &out, mask);
}

/// 64-bit result of three 64-bit operands.
#[inline]
pub(super) fn longs3(
    registers: &mut Registers,
    mask: u32,
    destination: Register,
    [a, b, c]: [Source; 3],
    f: impl Fn(u64, u64, u64) -> u64,
) {
    let (a, b, c) = (registers.row64(a), registers.row64(b), registers.row64(c));
    let out: [u64; LANES] = std::array::from_fn(|lane| f(a[lane], b[lane], c[lane]));
    registers.set_row64(destination, &out, mask);
}

/// Mask of the lanes in which a predicate of two 32-bit operands holds.
#[inline]
pub(super) fn test_words(
    registers: &Registers,
    [a, b]: [Source; 2],
    f: impl Fn(u32, u32) -> bool,
) -> u32 {
    let (a, b) = (registers.row32(a), registers.row32(b));
    let bits: [u32; LANES] = std::array::from_fn(|lane| u32::from(f(a[lane], b[lane])) << lane);
    bits.iter().fold(0, |all, bit| all | bit)
}

/// Mask of the lanes in which a predicate of two 64-bit operands holds.
#[inline]
pub(super) fn test_longs(
    registers: &Registers,
    [a, b]: [Source; 2],
    f: impl Fn(u64, u64) -> bool,
) -> u32 {
    let (a, b) = (registers.row64(a), registers.row64(b));
    let bits: [u32; LANES] = std::array::from_fn(|lane| u32::from(f(a[lane], b[lane])) << lane);
    bits.iter().fold(0, |all, bit| all | bit)
}
