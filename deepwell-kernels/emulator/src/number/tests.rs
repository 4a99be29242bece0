//! Every code, and the values around it.

use super::{Format, Rounding, Specials, decode, encode, encode_f64};

/// The formats with at most 16 bits that have a zero and a sign.
const SMALL: [Format; 7] = [
    Format::F16,
    Format::BF16,
    Format::E4M3,
    Format::E5M2,
    Format::E3M2,
    Format::E2M3,
    Format::E2M1,
];

/// Finite magnitudes in ascending order, so that the index is the code.
fn magnitudes(format: Format) -> Vec<f64> {
    (0..=format.max_finite()).map(|code| f64::from(decode(format, code))).collect()
}

fn to(format: Format, value: f64, rounding: Rounding) -> u32 {
    encode_f64(format, value, rounding, true, false)
}

#[test]
fn values_of_codes() {
    for (format, code, expected) in [
        (Format::F16, 0x3c00, 1.0),
        (Format::F16, 0x0001, 2f32.powi(-24)),
        (Format::F16, 0xfbff, -65504.0),
        (Format::F16, 0x7c00, f32::INFINITY),
        (Format::BF16, 0xc040, -3.0),
        (Format::BF16, 0x0001, 2f32.powi(-133)),
        (Format::TF32, 0x3f80_3fff, 1.0 + 2f32.powi(-10)),
        (Format::E4M3, 0x7e, 448.0),
        (Format::E4M3, 0x01, 2f32.powi(-9)),
        (Format::E4M3, 0x88, -(2f32.powi(-6))),
        (Format::E5M2, 0x7b, 57344.0),
        (Format::E5M2, 0xfc, f32::NEG_INFINITY),
        (Format::E5M2, 0x01, 2f32.powi(-16)),
        (Format::E3M2, 0x1f, 28.0),
        (Format::E3M2, 0x21, -0.0625),
        (Format::E2M3, 0x1f, 7.5),
        (Format::E2M3, 0x01, 0.125),
        (Format::E2M1, 0x7, 6.0),
        (Format::E2M1, 0x9, -0.5),
        (Format::UE8M0, 0, 2f32.powi(-127)),
        (Format::UE8M0, 127, 1.0),
        (Format::UE8M0, 254, 2f32.powi(127)),
        (Format::UE4M3, 0xfe, 448.0),
        (Format::S8, 0x80, -128.0),
        (Format::U8, 0xff, 255.0),
    ] {
        assert_eq!(decode(format, code), expected, "{format} {code:#x}");
    }
    for (format, code) in [
        (Format::F16, 0x7c01),
        (Format::E4M3, 0xff),
        (Format::E5M2, 0x7d),
        (Format::UE8M0, 0xff),
        (Format::UE4M3, 0x7f),
    ] {
        assert!(decode(format, code).is_nan(), "{format} {code:#x}");
    }
}

#[test]
fn codes_come_back() {
    for format in Format::ALL.into_iter().filter(|format| format.bits() <= 16) {
        for code in 0..1u32 << format.bits() {
            let value = decode(format, code);
            if value.is_nan() {
                assert_eq!(encode(format, value, Rounding::NearestEven, true, false), format.nan());
                continue;
            }
            let expected = match format {
                Format::UE4M3 => code & 0x7f,
                _ => code,
            };
            for rounding in [
                Rounding::NearestEven,
                Rounding::TowardZero,
                Rounding::Up,
                Rounding::Down,
                Rounding::Away,
                Rounding::Stochastic(u32::MAX),
            ] {
                assert_eq!(encode(format, value, rounding, false, false), expected, "{format}");
            }
        }
    }
}

/// Values a hair below, at, and a hair above each midpoint, and in between: the neighbours are
/// known from the list of all values, which the code under test has no part in.
#[test]
fn neighbours_are_chosen_by_the_rounding() {
    for format in SMALL {
        let values = magnitudes(format);
        for low in 0..values.len() - 1 {
            let (below, above) = (values[low], values[low + 1]);
            let step = above - below;
            let low = low as u32;
            let sign = 1 << (format.bits() - 1);
            for (part, nearest, away) in [
                (0.25, 0, 0),
                (0.5 - 1e-6, 0, 0),
                (0.5, low & 1, 1),
                (0.5 + 1e-6, 1, 1),
                (0.75, 1, 1),
            ] {
                let value = below + part * step;
                for (rounding, positive, negative) in [
                    (Rounding::NearestEven, nearest, nearest),
                    (Rounding::Away, away, away),
                    (Rounding::TowardZero, 0, 0),
                    (Rounding::Up, 1, 0),
                    (Rounding::Down, 0, 1),
                ] {
                    let context = format!("{format} {value:e} {rounding:?}");
                    assert_eq!(to(format, value, rounding), low + positive, "{context}");
                    assert_eq!(to(format, -value, rounding), (low + negative) | sign, "-{context}");
                }
            }
        }
    }
}

/// Of all random numbers, as many round up as the value is on its way to the upper neighbour.
#[test]
fn stochastic_rounding_is_in_proportion() {
    for format in SMALL.into_iter().filter(|&format| format != Format::BF16) {
        let values = magnitudes(format);
        for low in [0, 1, 2, values.len() / 2, values.len() - 2] {
            let step = values[low + 1] - values[low];
            for eighths in 0..8u32 {
                let value = values[low] + step * f64::from(eighths) / 8.0;
                let count = 1u32 << format.random_bits();
                let ups = (0..count)
                    .filter(|&random| {
                        // What is above the format's random bits must not matter.
                        let random = Rounding::Stochastic(random | 0xffff_0000);
                        to(format, value, random) == low as u32 + 1
                    })
                    .count();
                assert_eq!(ups as u32, count / 8 * eighths, "{format} {value}");
            }
        }
    }
}

#[test]
fn beyond_the_range() {
    let infinite = |format: Format| format.max_finite() + 1;
    for format in SMALL {
        let max = f64::from(decode(format, format.max_finite()));
        let beyond = match format.specials() {
            Specials::InfinityAndNan => infinite(format),
            Specials::Nan => format.nan(),
            Specials::None => format.max_finite(),
        };
        for (value, rounding, saturated, expected) in [
            (max * 2.0, Rounding::NearestEven, true, format.max_finite()),
            (f64::INFINITY, Rounding::NearestEven, true, format.max_finite()),
            (f64::INFINITY, Rounding::TowardZero, false, beyond),
            (max * 1e10, Rounding::NearestEven, false, beyond),
        ] {
            let got = encode_f64(format, value, rounding, saturated, false);
            assert_eq!(got, expected, "{format} {value:e} {rounding:?}");
            let sign = 1 << (format.bits() - 1);
            let got = encode_f64(format, -value, rounding, saturated, false);
            assert_eq!(got, expected | sign, "{format} -{value:e} {rounding:?}");
        }
    }
    let half = |value, rounding| encode_f64(Format::F16, value, rounding, false, false);
    assert_eq!(half(65519.9, Rounding::NearestEven), 0x7bff);
    assert_eq!(half(65520.0, Rounding::NearestEven), 0x7c00);
    assert_eq!(half(1e6, Rounding::TowardZero), 0x7bff);
    assert_eq!(half(1e6, Rounding::Down), 0x7bff);
    assert_eq!(half(1e6, Rounding::Up), 0x7c00);
    assert_eq!(half(-1e6, Rounding::Up), 0xfbff);
    assert_eq!(half(-1e6, Rounding::Down), 0xfc00);
}

#[test]
fn special_inputs() {
    for format in Format::ALL {
        let nan = encode(format, f32::NAN, Rounding::NearestEven, true, true);
        assert_eq!(nan, format.nan(), "{format}");
    }
    for format in SMALL {
        for value in [-0.0, -1.0, -1e9, f32::NEG_INFINITY] {
            assert_eq!(encode(format, value, Rounding::Down, true, true), 0, "{format} {value}");
        }
        let sign = 1 << (format.bits() - 1);
        assert_eq!(encode(format, -0.0, Rounding::NearestEven, true, false), sign, "{format}");
    }
}

#[test]
fn scales() {
    let up = |value| encode(Format::UE8M0, value, Rounding::Up, true, false);
    let down = |value| encode(Format::UE8M0, value, Rounding::TowardZero, true, false);
    for (value, rounded_up, rounded_down) in [
        (1.0, 127, 127),
        (1.0 + f32::EPSILON, 128, 127),
        (-3.0, 129, 128),
        (2f32.powi(-127), 0, 0),
        (2f32.powi(-127) * 1.5, 1, 0),
        (2f32.powi(-130), 0, 0),
        (0.0, 0, 0),
        (2f32.powi(127), 254, 254),
        (f32::MAX, 254, 254),
        (f32::INFINITY, 254, 254),
    ] {
        assert_eq!(up(value), rounded_up, "{value:e}");
        assert_eq!(down(value), rounded_down, "{value:e}");
    }
    assert_eq!(encode(Format::UE8M0, f32::MAX, Rounding::Up, false, false), 255);
    for (value, expected) in [(1.4999, 127), (1.5, 128), (2.9, 128), (3.0, 128), (3.1, 129)] {
        let got = encode(Format::UE8M0, value, Rounding::NearestEven, true, false);
        assert_eq!(got, expected, "{value}");
    }
}

/// Binary32 from binary64, against the language's own conversion.
#[test]
fn binary32_as_the_language_rounds_it() {
    let mut state = 1u64;
    for _ in 0..200_000 {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Exponents from below binary32's subnormal numbers to above its largest.
        let exponent = 1023 - 160 + (state >> 32) % 300;
        let value = f64::from_bits((state << 31 >> 12) | exponent << 52 | (state & 1) << 63);
        let got = encode_f64(Format::F32, value, Rounding::NearestEven, false, false);
        assert_eq!(got, (value as f32).to_bits(), "{value:e}");
    }
    for (value, rounding, expected) in [
        (1.0 + 2f32.powi(-11), Rounding::Away, 1.0 + 2f32.powi(-10)),
        (1.0 + 2f32.powi(-11), Rounding::NearestEven, 1.0),
        (-1.0 - 2f32.powi(-11), Rounding::TowardZero, -1.0),
    ] {
        let got = encode(Format::TF32, value, rounding, true, false);
        assert_eq!(f32::from_bits(got), expected, "{value} {rounding:?}");
        assert_eq!(got & 0x1fff, 0);
    }
}

#[test]
fn integers() {
    for (format, value, rounding, expected) in [
        (Format::S8, 2.5, Rounding::NearestEven, 2),
        (Format::S8, -2.5, Rounding::Away, 0xfd),
        (Format::S8, 1e9, Rounding::NearestEven, 127),
        (Format::S8, -1e9, Rounding::NearestEven, 0x80),
        (Format::U8, -3.0, Rounding::NearestEven, 0),
        (Format::U8, 300.0, Rounding::NearestEven, 255),
    ] {
        assert_eq!(encode(format, value, rounding, false, false), expected, "{format} {value}");
    }
}
