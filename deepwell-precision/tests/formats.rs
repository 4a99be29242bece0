//! The element formats against definitions written a second way, over all codes and all bf16
//! inputs.

use deepwell_precision::{
    ElementFormat, Overflow, Rounding, ScaleRule, e2m1, e2m3, e3m2, e4m3, e5m2, e8m0, ue4m3,
};

/// A format as its table of magnitudes: `values[code]`, with one more value where the next finite
/// one would be, so that rounding needs no special case at the end.
struct Table {
    values: Vec<f64>,
    has_infinity: bool,
    sign_bit: u32,
    /// Code of NaN, where there is one.
    nan: Option<u8>,
    encode: fn(f32, Rounding, Overflow) -> u8,
    decode: fn(u8) -> f32,
}

/// Magnitudes straight from the definition, in f64.
fn table(mantissa_bits: u32, bias: i32, code_max: u32) -> Vec<f64> {
    (0..=code_max + 1)
        .map(|code| {
            let (exponent, fraction) = (code >> mantissa_bits, code % (1 << mantissa_bits));
            let fraction = f64::from(fraction) / f64::from(1 << mantissa_bits);
            if exponent == 0 {
                fraction * 2.0_f64.powi(1 - bias)
            } else {
                (1.0 + fraction) * 2.0_f64.powi(exponent as i32 - bias)
            }
        })
        .collect()
}

fn tables() -> [Table; 5] {
    [
        Table {
            values: table(3, 7, 0x7E),
            has_infinity: false,
            sign_bit: 7,
            nan: Some(0x7F),
            encode: e4m3::encode,
            decode: e4m3::decode,
        },
        Table {
            values: table(2, 15, 0x7B),
            has_infinity: true,
            sign_bit: 7,
            nan: Some(0x7F),
            encode: e5m2::encode,
            decode: e5m2::decode,
        },
        finite(table(2, 3, 0x1F), 5, e3m2::encode, e3m2::decode),
        finite(table(3, 1, 0x1F), 5, e2m3::encode, e2m3::decode),
        finite(table(1, 1, 0x07), 3, e2m1::encode, e2m1::decode),
    ]
}

/// A format without infinity and NaN.
fn finite(
    values: Vec<f64>,
    sign_bit: u32,
    encode: fn(f32, Rounding, Overflow) -> u8,
    decode: fn(u8) -> f32,
) -> Table {
    Table { values, has_infinity: false, sign_bit, nan: None, encode, decode }
}

impl Table {
    /// The code of `x`, by searching the table.
    fn slow_encode(&self, x: f32, rounding: Rounding, overflow: Overflow) -> u8 {
        if x.is_nan() {
            return self.nan.unwrap_or(self.values.len() as u8 - 2);
        }
        let sign = if x.is_sign_negative() { 1 << self.sign_bit } else { 0 };
        let beyond = self.values.len() - 1;
        let magnitude = f64::from(x).abs();
        let above = self.values.partition_point(|&value| value < magnitude);
        let code = if magnitude.is_infinite() {
            beyond
        } else if above < self.values.len() && self.values[above] == magnitude {
            above
        } else {
            let below = above - 1;
            // Past the end of the table everything is beyond; rounding down still is not.
            let gap = self.values.get(above).map(|&value| value - magnitude);
            let down = magnitude - self.values[below];
            let up = match rounding {
                Rounding::NearestEven => {
                    gap.is_none_or(|gap| gap < down || (gap == down && above % 2 == 0))
                }
                Rounding::TowardZero => false,
                _ => sign == 0,
            };
            if up { above } else { below.min(beyond) }
        };
        let finite_direction = match rounding {
            Rounding::NearestEven => false,
            Rounding::TowardZero => true,
            _ => sign != 0,
        };
        if code < beyond {
            sign | code as u8
        } else if overflow == Overflow::Saturate
            || self.nan.is_none()
            || (finite_direction && x.is_finite())
        {
            sign | (beyond - 1) as u8
        } else if self.has_infinity {
            sign | 0x7C
        } else {
            0x7F
        }
    }
}

#[test]
fn all_codes_decode_to_their_definition() {
    for table in tables() {
        for code in 0..=u8::MAX {
            let got = (table.decode)(code);
            let magnitude = usize::from(code) % (1 << table.sign_bit);
            let expected = match table.values[..table.values.len() - 1].get(magnitude) {
                Some(&value) => value as f32,
                None if table.has_infinity && magnitude == 0x7C => f32::INFINITY,
                None => f32::NAN,
            };
            let expected = if code & 1 << table.sign_bit == 0 { expected } else { -expected };
            assert_eq!(got.is_nan(), expected.is_nan(), "{code:#04x}");
            if !got.is_nan() {
                assert_eq!(got.to_bits(), expected.to_bits(), "{code:#04x}");
            }
        }
    }
}

#[test]
fn all_codes_survive_a_round_trip() {
    for table in tables() {
        for code in 0..=u8::MAX {
            let value = (table.decode)(code);
            for rounding in [Rounding::NearestEven, Rounding::TowardZero, Rounding::TowardPositive]
            {
                let got = (table.encode)(value, rounding, Overflow::NonFinite);
                let bits = ((2_u16 << table.sign_bit) - 1) as u8;
                let expected = if value.is_nan() { 0x7F } else { code & bits };
                assert_eq!(got, expected, "{code:#04x} {rounding:?}");
            }
        }
    }
}

#[test]
fn encoding_follows_a_search_of_the_table() {
    let mut inputs: Vec<u32> = (0..=u16::MAX).map(|bits| u32::from(bits) << 16).collect();
    // Every value of the formats and every tie between two, with the neighbours on both sides.
    for table in tables() {
        for pair in table.values.windows(2) {
            for value in [pair[0], (pair[0] + pair[1]) / 2.0] {
                let bits = (value as f32).to_bits();
                inputs.extend([bits.saturating_sub(1), bits, bits + 1]);
                inputs.extend([bits | 1 << 31, (bits + 1) | 1 << 31]);
            }
        }
    }
    let mut state = 1_u32;
    for _ in 0..200_000 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        inputs.push(state ^ state >> 15);
    }
    for table in tables() {
        for &bits in &inputs {
            let x = f32::from_bits(bits);
            for rounding in [Rounding::NearestEven, Rounding::TowardZero, Rounding::TowardPositive]
            {
                for overflow in [Overflow::Saturate, Overflow::NonFinite] {
                    let got = (table.encode)(x, rounding, overflow);
                    let expected = table.slow_encode(x, rounding, overflow);
                    assert_eq!(got, expected, "{x:e} {rounding:?} {overflow:?}");
                }
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
        (f32::MAX, 247, 246),
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
        let exponent = 10 + (state >> 23) % 245;
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
        (f32::MAX, E2M1, 253, 252),
        (f32::MAX, E2M3, 253, 252),
        (f32::MAX, E3M2, 251, 250),
        (0.0, E2M1, 0, 0),
        (f32::INFINITY, E2M1, 0xFE, 0xFE),
        (f32::NAN, E2M1, 0xFF, 0xFF),
    ] {
        let code = |rule| e8m0::from_amax_for(amax, element, rule);
        assert_eq!(code(ScaleRule::Rceil), rceil, "rceil, {element} {amax:e}");
        assert_eq!(code(ScaleRule::OcpFloor), floor, "floor, {element} {amax:e}");
    }
}
