//! The element formats against the crates `microfloat` and `float8`: all codes, all bf16 inputs,
//! and f32 bit patterns. Where a crate differs, the difference is stated as a rule, and the test
//! holds it to that rule, so that it fails when either side changes.
//!
//! - NaN: here it becomes 0x7F of either sign, or the largest value where a format has no NaN, as
//!   PTX has it. Both crates keep its sign and may choose another NaN; `microfloat` gives negative
//!   zero where there is none.
//! - `microfloat` 0.1 does not saturate E4M3 and E5M2: it is compared with `Overflow::NonFinite`.
//!   Of E4M3 it makes NaN of 464 exactly, the tie between 448 and what would come next, of which
//!   448 has the even code; PyPI's ml_dtypes gives 448.
//! - `microfloat` 0.1 rounds the ties of E8M0, 1.5 * 2^k, up, and so does ml_dtypes; here they go
//!   to the even code. Both give NaN for zero, which here is 2^-127. The scale rules round up or
//!   down and never to nearest. Finite numbers saturate in `microfloat`, infinity becomes NaN.
//! - `float8` 0.7 saturates, and is compared with `Overflow::Saturate`.

use deepwell_precision::{ElementFormat, Overflow, Rounding, e8m0};
use float8::{F8E4M3, F8E5M2};
use microfloat::{f4e2m1fn, f6e2m3fn, f6e3m2fn, f8e4m3fn, f8e5m2, f8e8m0fnu};

/// All bf16 values, and a million f32 patterns around the ranges of the formats and anywhere.
fn inputs() -> impl Iterator<Item = f32> {
    let narrow = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let wide = (0..1_000_000).map(move |i| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let bits = (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32;
        if i % 4 == 0 {
            f32::from_bits(bits)
        } else {
            // Exponents from 2^-22 to 2^17, and fractions that are ties in every third.
            let fraction = if i % 4 == 1 { bits & 0x0078_0000 } else { bits & 0x007F_FFFF };
            f32::from_bits((bits & 0x8000_0000) | ((bits >> 8) % 40 + 105) << 23 | fraction)
        }
    });
    narrow.chain(wide)
}

fn same_values(name: &str, ours: impl Fn(u8) -> f32, theirs: impl Fn(u8) -> f32, codes: u8) {
    for code in 0..=codes {
        let (ours, theirs) = (ours(code), theirs(code));
        assert_eq!(ours.is_nan(), theirs.is_nan(), "{name} {code:#04x}");
        let same = ours.is_nan() || ours.to_bits() == theirs.to_bits();
        assert!(same, "{name} {code:#04x}: {ours:e}, theirs {theirs:e}");
    }
}

#[test]
fn microfloat_agrees() {
    type Theirs = (fn(u8) -> f32, fn(f32) -> u8);
    let formats: [(ElementFormat, Theirs); 5] = [
        (
            ElementFormat::E4M3,
            (|code| f8e4m3fn::from_bits(code).to_f32(), |x| f8e4m3fn::from_f32(x).to_bits()),
        ),
        (
            ElementFormat::E5M2,
            (|code| f8e5m2::from_bits(code).to_f32(), |x| f8e5m2::from_f32(x).to_bits()),
        ),
        (
            ElementFormat::E3M2,
            (|code| f6e3m2fn::from_bits(code).to_f32(), |x| f6e3m2fn::from_f32(x).to_bits()),
        ),
        (
            ElementFormat::E2M3,
            (|code| f6e2m3fn::from_bits(code).to_f32(), |x| f6e2m3fn::from_f32(x).to_bits()),
        ),
        (
            ElementFormat::E2M1,
            (|code| f4e2m1fn::from_bits(code).to_f32(), |x| f4e2m1fn::from_f32(x).to_bits()),
        ),
    ];
    let (nearest, saturate) = (Rounding::NearestEven, Overflow::Saturate);
    for (element, (decode, encode)) in formats {
        let codes = ((1_u16 << element.bits()) - 1) as u8;
        same_values(element.name(), |code| element.decode(code), decode, codes);
        for x in inputs() {
            let ours = element.encode(x, nearest, Overflow::NonFinite);
            let theirs = encode(x);
            if x.is_nan() && element.bits() < 8 {
                assert_eq!(ours, element.encode(f32::INFINITY, nearest, saturate), "{element}");
                assert_eq!(decode(theirs).to_bits(), (-0.0_f32).to_bits(), "{element}");
            } else if element.decode(ours).is_nan() {
                assert!(decode(theirs).is_nan(), "{element} {x:e}");
            } else if element == ElementFormat::E4M3 && x.abs() == 464.0 {
                assert_eq!(element.decode(ours).abs(), 448.0);
                assert!(decode(theirs).is_nan(), "{element} {x:e}");
            } else {
                assert_eq!(ours, theirs, "{element} {x:e}");
            }
        }
    }
}

#[test]
fn microfloat_agrees_on_scales() {
    same_values("e8m0", e8m0::decode, |code| f8e8m0fnu::from_bits(code).to_f32(), 0xFF);
    for x in inputs() {
        let overflow = if x.is_finite() { Overflow::Saturate } else { Overflow::NonFinite };
        let ours = e8m0::encode(x, Rounding::NearestEven, overflow);
        let theirs = f8e8m0fnu::from_f32(x).to_bits();
        let is_tie =
            x > 0.0 && x.is_finite() && f64::from(x) == 1.5 * f64::from(e8m0::decode(ours));
        if x == 0.0 {
            assert_eq!((ours, theirs), (0, e8m0::CODE_NAN));
        } else if is_tie {
            let up = (ours + 1).min(e8m0::CODE_MAX);
            assert_eq!((ours % 2, theirs), (0, up), "{x:e}");
        } else {
            assert_eq!(ours, theirs, "{x:e}");
        }
    }
}

#[test]
fn float8_agrees() {
    for (element, decode, encode) in [
        (
            ElementFormat::E4M3,
            (|code| F8E4M3::from_bits(code).to_f32()) as fn(u8) -> f32,
            (|x| F8E4M3::from_f32(x).to_bits()) as fn(f32) -> u8,
        ),
        (
            ElementFormat::E5M2,
            |code| F8E5M2::from_bits(code).to_f32(),
            |x| F8E5M2::from_f32(x).to_bits(),
        ),
    ] {
        same_values(element.name(), |code| element.decode(code), decode, 0xFF);
        for x in inputs() {
            let ours = element.encode(x, Rounding::NearestEven, Overflow::Saturate);
            let theirs = encode(x);
            if x.is_nan() {
                assert!(ours == 0x7F && decode(theirs).is_nan(), "{element} {theirs:#04x}");
            } else {
                assert_eq!(ours, theirs, "{element} {x:e}");
            }
        }
    }
}
