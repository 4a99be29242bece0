//! Functions of one lane, applied to 32.

use super::registers::{LANES, Registers};
use crate::decode::{Register, Source};

/// 32 bits from 32 bits.
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

/// 32 bits from two of 32 bits.
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

/// 32 bits from three of 32 bits.
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

/// 64 bits from 64 bits.
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

/// 64 bits from two of 64 bits.
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

/// 64 bits from three of 64 bits.
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

/// A mask from two of 32 bits.
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

/// A mask from two of 64 bits.
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
