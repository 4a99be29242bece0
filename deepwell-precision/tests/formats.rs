//! The element formats against definitions written a second way, over all codes and all bf16
//! inputs.

use deepwell_precision::{Overflow, Rounding, e2m1, e2m3, e3m2, e4m3, e5m2};

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
