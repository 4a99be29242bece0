//! The formats of scales, and how scales follow from magnitudes: all codes, all bf16 inputs.

use deepwell_precision::{ElementFormat, Overflow, Rounding, ScaleRule, e4m3, e8m0, ue4m3};

const ROUNDINGS: [Rounding; 3] =
    [Rounding::NearestEven, Rounding::TowardZero, Rounding::TowardPositive];

/// All values of bf16: both signs, subnormals, infinities, NaNs.
fn all_bf16() -> impl Iterator<Item = f32> {
    (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16))
}

/// 2^(code - 127) in f64, where 2^128 is a number too.
fn power(code: i32) -> f64 {
    2.0_f64.powi(code - 127)
}

/// Every bf16 through E8M0, by a search of the powers of two.
#[test]
fn all_bf16_as_e8m0() {
    for x in all_bf16() {
        for rounding in ROUNDINGS {
            for overflow in [Overflow::Saturate, Overflow::NonFinite] {
                let beyond = match overflow {
                    Overflow::Saturate => 0xFE,
                    _ => 0xFF,
                };
                let wide = f64::from(x);
                let expected = if x.is_nan() || x < 0.0 {
                    0xFF
                } else if x.is_infinite() {
                    beyond
                } else {
                    // The first power that is not below, and the one before it.
                    let above = (0..=255).find(|&code| power(code) >= wide).unwrap();
                    let below = (above - 1).max(0);
                    let (down, up) = (wide - power(below), power(above) - wide);
                    let code = match rounding {
                        _ if above == 0 || up == 0.0 => above,
                        Rounding::TowardZero => below,
                        Rounding::TowardPositive => above,
                        _ if down == up => above - above % 2,
                        _ if down < up => below,
                        _ => above,
                    };
                    if code <= 0xFE { code as u8 } else { beyond }
                };
                let got = e8m0::encode(x, rounding, overflow);
                assert_eq!(got, expected, "{x:e} {rounding:?} {overflow:?}");
            }
        }
    }
}

/// Every bf16 as the largest magnitude of a block, for every element and rule, by their words.
#[test]
fn all_bf16_as_amax() {
    for &element in ElementFormat::ALL {
        let element_exponent = element.max().log2().floor() as i32;
        let fraction_bits = match element {
            ElementFormat::E4M3 | ElementFormat::E2M3 => 3,
            ElementFormat::E5M2 | ElementFormat::E3M2 => 2,
            _ => 1,
        };
        // The largest number with the fraction of an element that f32 holds.
        let largest = (2.0 - 0.5_f64.powi(fraction_bits)) * 2.0_f64.powi(127);
        for amax in all_bf16() {
            let magnitude = amax.abs();
            let (rceil, floor) = if amax.is_nan() {
                (0xFF, 0xFF)
            } else if magnitude.is_infinite() {
                (0xFE, 0xFE)
            } else {
                let quotient = f64::from(magnitude / element.max());
                let rceil = (0..=0xFE).find(|&code| power(code) >= quotient).unwrap();
                // The largest exponent with 2^exponent <= amax.
                let exponent = (-149..=127).rev().find(|&e| 2.0_f64.powi(e) <= magnitude.into());
                let floor = exponent.map_or(0, |e| (e - element_exponent + 127).clamp(0, 0xFE));
                let rceil = if f64::from(magnitude) > largest { floor } else { rceil };
                (rceil as u8, floor as u8)
            };
            for (rule, expected) in [(ScaleRule::Rceil, rceil), (ScaleRule::OcpFloor, floor)] {
                let got = e8m0::from_amax_for(amax, element, rule);
                assert_eq!(got, expected, "{element} {rule} {amax:e}");
            }
        }
    }
}

#[test]
fn all_scale_codes() {
    for code in 0..=u8::MAX {
        let value = e8m0::decode(code);
        if code == e8m0::CODE_NAN {
            assert!(value.is_nan() && e8m0::reciprocal(code).is_nan());
            continue;
        }
        assert_eq!(f64::from(value), 2.0_f64.powi(i32::from(code) - 127), "{code}");
        assert_eq!(
            f64::from(e8m0::reciprocal(code)),
            2.0_f64.powi(127 - i32::from(code)),
            "{code}"
        );
        for rounding in [Rounding::NearestEven, Rounding::TowardZero, Rounding::TowardPositive] {
            assert_eq!(e8m0::encode(value, rounding, Overflow::NonFinite), code);
        }
    }
}

#[test]
fn scale_encoding() {
    use Overflow::{NonFinite, Saturate};
    use Rounding::{NearestEven, TowardPositive, TowardZero};
    let subnormal_tie = 1.5 * e8m0::decode(0);
    for (x, rounding, overflow, expected) in [
        (0.0, NearestEven, Saturate, 0),
        (-0.0, NearestEven, Saturate, 0),
        (f32::from_bits(1), TowardPositive, Saturate, 0),
        (-1.0, NearestEven, Saturate, 0xFF),
        (f32::NAN, NearestEven, Saturate, 0xFF),
        (1.49, NearestEven, Saturate, 127),
        (1.5, NearestEven, Saturate, 128),
        (3.0, NearestEven, Saturate, 128),
        (3.01, NearestEven, Saturate, 129),
        (1.99, TowardZero, Saturate, 127),
        (1.01, TowardPositive, Saturate, 128),
        (subnormal_tie, NearestEven, Saturate, 0),
        (f32::from_bits(subnormal_tie.to_bits() + 1), NearestEven, Saturate, 1),
        (subnormal_tie, TowardZero, Saturate, 0),
        (subnormal_tie, TowardPositive, Saturate, 1),
        (f32::MAX, NearestEven, Saturate, 0xFE),
        (f32::MAX, NearestEven, NonFinite, 0xFF),
        (f32::MAX, TowardPositive, NonFinite, 0xFF),
        (f32::MAX, TowardZero, NonFinite, 0xFE),
        (f32::INFINITY, TowardZero, Saturate, 0xFE),
        (f32::INFINITY, TowardZero, NonFinite, 0xFF),
    ] {
        assert_eq!(e8m0::encode(x, rounding, overflow), expected, "{x:e} {rounding:?}");
    }
}

#[test]
fn scales_of_amax() {
    let above = |x: f32| f32::from_bits(x.to_bits() + 1);
    let below = |x: f32| f32::from_bits(x.to_bits() - 1);
    let power = |exponent: i32| 2.0_f64.powi(exponent) as f32;
    // amax, code by RCEIL, code by OCP floor; E4M3.
    for (amax, rceil, floor) in [
        (448.0, 127, 127),
        (below(448.0), 127, 127),
        (above(448.0), 128, 127),
        (480.0, 128, 127),
        (511.0, 128, 127),
        (512.0, 128, 128),
        (256.0, 127, 127),
        (224.0, 126, 126),
        (above(224.0), 127, 126),
        (150.0, 126, 126),
        (1.0, 119, 119),
        (-1.0, 119, 119),
        (0.0, 0, 0),
        (-0.0, 0, 0),
        (f32::MAX, 246, 246),
        (above(1.875 * power(127)), 246, 246),
        (1.875 * power(127), 247, 246),
        (above(1.75 * power(127)), 247, 246),
        (f32::INFINITY, 0xFE, 0xFE),
        (f32::NEG_INFINITY, 0xFE, 0xFE),
        (f32::NAN, 0xFF, 0xFF),
        // Subnormal amax, and amax / 448 around 2^-126 and 2^-127.
        (f32::from_bits(1), 0, 0),
        (f32::from_bits(0x007F_FFFF), 0, 0),
        (448.0 * power(-126), 1, 1),
        (above(448.0 * power(-126)), 2, 1),
        (448.0 * power(-127), 0, 0),
        (above(448.0 * power(-127)), 0, 0), // the quotient, subnormal, rounds to 2^-127
        (449.0 * power(-127), 1, 0),
        (512.0 * power(-127), 1, 1),
        (power(-118), 1, 1),
        (power(-119), 0, 0),
    ] {
        assert_eq!(e8m0::from_amax(amax, ScaleRule::Rceil), rceil, "rceil {amax:e}");
        assert_eq!(e8m0::from_amax(amax, ScaleRule::OcpFloor), floor, "floor {amax:e}");
        // E5M2 is the same with 128 times the range.
        if (1e-30..1e30).contains(&amax) {
            let wide = |rule| e8m0::from_amax_for(amax * 128.0, ElementFormat::E5M2, rule);
            assert_eq!(wide(ScaleRule::Rceil), rceil, "rceil, e5m2 {amax:e}");
            assert_eq!(wide(ScaleRule::OcpFloor), floor, "floor, e5m2 {amax:e}");
        }
    }
}

/// RCEIL leaves the scaled amax in (224, 448]: it neither saturates nor wastes a bit.
#[test]
fn rceil_uses_the_whole_range_and_no_more() {
    let mut state = 1_u32;
    for i in 0..2_000_000_u32 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Half of them next to 448 * 2^k, where the rule turns over.
        let near = 448.0_f32.to_bits().wrapping_add(i % 9).wrapping_sub(4) & 0x007F_FFFF;
        let fraction = if i % 2 == 0 { near } else { state & 0x007F_FFFF };
        // In the last binade blocks saturate.
        let exponent = 10 + (state >> 23) % 244;
        let amax = f32::from_bits(exponent << 23 | fraction);
        let scale = e8m0::from_amax(amax, ScaleRule::Rceil);
        let scaled = f64::from(amax) / f64::from(e8m0::decode(scale));
        assert!(scaled > 224.0 && scaled <= 448.0, "{amax:e} scaled to {scaled}");
    }
}

/// Dividing and multiplying by the reciprocal differ in the quotient, not in the scale. One binade
/// stands for all normal ones: both operations scale with powers of two.
#[test]
fn rceil_by_reciprocal_is_the_same_for_all_fractions() {
    let reciprocal = 1.0_f32 / 448.0;
    let mut quotients_that_differ = 0;
    for fraction in 0..1_u32 << 23 {
        let amax = f32::from_bits(127 << 23 | fraction);
        let product = amax * reciprocal;
        quotients_that_differ += u32::from(product != amax / 448.0);
        let ceil = e8m0::encode(product, Rounding::TowardPositive, Overflow::Saturate);
        assert_eq!(e8m0::from_amax(amax, ScaleRule::Rceil), ceil, "{amax:e}");
    }
    assert!(quotients_that_differ > 0, "otherwise this shows nothing");
}

#[test]
fn all_unsigned_scale_codes() {
    for code in 0..=u8::MAX {
        let value = ue4m3::decode(code);
        if code >= ue4m3::CODE_NAN {
            assert!(value.is_nan(), "{code:#04x}");
            continue;
        }
        assert_eq!(value, e4m3::decode(code));
        for rounding in [Rounding::NearestEven, Rounding::TowardZero, Rounding::TowardPositive] {
            assert_eq!(ue4m3::encode(value, rounding, Overflow::NonFinite), code);
        }
    }
    // All bf16 inputs: what is not negative as in E4M3, which is tested against its table.
    for bits in 0..=u16::MAX {
        let x = f32::from_bits(u32::from(bits) << 16);
        for overflow in [Overflow::Saturate, Overflow::NonFinite] {
            let got = ue4m3::encode(x, Rounding::NearestEven, overflow);
            let expected = if x == 0.0 {
                0
            } else if x < 0.0 || x.is_nan() {
                0x7F
            } else {
                e4m3::encode(x, Rounding::NearestEven, overflow)
            };
            assert_eq!(got, expected, "{x:e} {overflow:?}");
        }
    }
}

/// Both rules for the narrow formats: amax, element, code by RCEIL, code by OCP floor.
#[test]
fn scales_of_amax_for_narrow_elements() {
    use ElementFormat::{E2M1, E2M3, E3M2};
    let above = |x: f32| f32::from_bits(x.to_bits() + 1);
    for (amax, element, rceil, floor) in [
        (6.0, E2M1, 127, 127),
        (above(6.0), E2M1, 128, 127),
        (7.99, E2M1, 128, 127),
        (8.0, E2M1, 128, 128),
        (4.0, E2M1, 127, 127),
        (3.0, E2M1, 126, 126),
        (7.5, E2M3, 127, 127),
        (above(7.5), E2M3, 128, 127),
        (28.0, E3M2, 127, 127),
        (above(28.0), E3M2, 128, 127),
        (31.0, E3M2, 128, 127),
        (f32::MAX, E2M1, 252, 252),
        (f32::MAX, E2M3, 252, 252),
        (f32::MAX, E3M2, 250, 250),
        (0.0, E2M1, 0, 0),
        (f32::INFINITY, E2M1, 0xFE, 0xFE),
        (f32::NAN, E2M1, 0xFF, 0xFF),
    ] {
        let code = |rule| e8m0::from_amax_for(amax, element, rule);
        assert_eq!(code(ScaleRule::Rceil), rceil, "rceil, {element} {amax:e}");
        assert_eq!(code(ScaleRule::OcpFloor), floor, "floor, {element} {amax:e}");
    }
}
