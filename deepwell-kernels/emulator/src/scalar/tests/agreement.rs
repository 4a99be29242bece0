//! Instructions against the encoder of number formats and the library, on random bits.

use super::*;

/// A generator of bits with many special cases.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// A float whose exponent is near 1, so that exact results fit binary64.
    fn near(&mut self) -> f32 {
        let bits = self.next();
        let exponent = 127 - 6 + bits % 13;
        f32::from_bits((bits & 0x8000_0000) | exponent << 23 | (self.next() >> 9) & self.few())
    }

    /// Few or many bits of a significand.
    fn few(&mut self) -> u32 {
        (!0u32) << (self.next() % 24)
    }
}

const ROUNDINGS: [(FloatRounding, Rounding); 4] = [
    (FloatRounding::NearestEven, Rounding::NearestEven),
    (FloatRounding::TowardZero, Rounding::TowardZero),
    (FloatRounding::Down, Rounding::Down),
    (FloatRounding::Up, Rounding::Up),
];

#[test]
fn roundings_agree_with_the_encoder() {
    let mut bits = Bits(1);
    for _ in 0..200_000 {
        let (a, b) = (bits.near(), bits.near());
        for (mine, other) in ROUNDINGS {
            let expect = |exact: f64| encode_f64(Format::F32, exact, other, false, false);
            let (x, y) = (f64::from(a), f64::from(b));
            let found = crate::scalar::ieee::mul32(a, b, mine).to_bits();
            assert_eq!(found, expect(x * y), "{a:e} * {b:e} {mine:?}");
            if x + y != 0.0 {
                let found = crate::scalar::ieee::add32(a, b, mine).to_bits();
                assert_eq!(found, expect(x + y), "{a:e} + {b:e} {mine:?}");
            }
        }
    }
}

#[test]
fn fused_products_agree_with_the_library() {
    let mut bits = Bits(2);
    for round in 0..400_000 {
        let (a, b, c) = if round % 2 == 0 {
            let of = f32::from_bits;
            (of(bits.next()), of(bits.next()), of(bits.next()))
        } else {
            (bits.near(), bits.near(), bits.near())
        };
        let found = crate::scalar::ieee::bits32(crate::scalar::ieee::fma_nearest(a, b, c));
        let expected = crate::scalar::ieee::bits32(a.mul_add(b, c));
        assert_eq!(found, expected, "{a:e} * {b:e} + {c:e}");
    }
}

#[test]
fn halves_agree_with_the_encoder() {
    use crate::scalar::half::Half;
    let modifiers = crate::decode::FloatModifiers::default();
    let mut bits = Bits(3);
    for (half, format) in [(Half::F16, Format::F16), (Half::Bf16, Format::BF16)] {
        for code in 0..=u16::MAX {
            let value = half.value(code);
            let back = crate::number::decode(format, u32::from(code));
            assert!(value == back || (value.is_nan() && back.is_nan()), "{half:?} {code:#x}");
            if !value.is_nan() {
                assert_eq!(half.code(value), code, "{half:?} {code:#x}");
            }
        }
        for _ in 0..300_000 {
            let value = f32::from_bits(bits.next());
            let value =
                if bits.next().is_multiple_of(2) { value } else { bits.near() * 2f32.powi(-20) };
            let expected =
                encode_f64(format, f64::from(value), Rounding::NearestEven, false, false);
            assert_eq!(u32::from(half.code(value)), expected, "{half:?} {value:e}");
            // Exponents near each other: exact in binary64.
            let exponent = if half == Half::F16 { 0x3800 } else { 0x3f00 };
            let keep = if half == Half::F16 { 0x8fff } else { 0x80ff };
            let random = [bits.next(), bits.next(), bits.next()];
            let [a, b, c] = random.map(|code| (code as u16 & keep) | exponent);
            let of = |code: u16| f64::from(half.value(code));
            let expect =
                |exact: f64| encode_f64(format, exact, Rounding::NearestEven, false, false) as u16;
            assert_eq!(half.mul(a, b, modifiers), expect(of(a) * of(b)));
            assert_eq!(half.add(a, b, modifiers), expect(of(a) + of(b)));
            let fused = of(a) * of(b) + of(c);
            assert_eq!(half.fma(a, b, c, modifiers), expect(fused), "{a:x} {b:x} {c:x}");
        }
    }
}

#[test]
fn small_pairs_agree_with_the_encoder() {
    use crate::decode::{Conversion, Type};
    use crate::scalar::small::Kernel;
    let formats = [
        (Type::E4m3x2, Format::E4M3, 8),
        (Type::E5m2x2, Format::E5M2, 8),
        (Type::E3m2x2, Format::E3M2, 8),
        (Type::E2m3x2, Format::E2M3, 8),
        (Type::E2m1x2, Format::E2M1, 4),
    ];
    let mut bits = Bits(4);
    for (to, format, part_bits) in formats {
        for relu in [false, true] {
            let conversion = Conversion {
                to,
                from: Type::F32,
                integer_rounding: None,
                float_rounding: Some(FloatRounding::NearestEven),
                flush_subnormals: false,
                saturate: false,
                saturate_finite: true,
                relu,
            };
            let kernel = Kernel::of(&conversion).expect("one of these");
            let check = |a: [u32; LANES]| {
                let b = a.map(|bits| bits ^ 1 << 31);
                let found = kernel.row(&a, &b);
                for lane in 0..LANES {
                    let code = |bits: u32| {
                        let value = f64::from(f32::from_bits(bits));
                        encode_f64(format, value, Rounding::NearestEven, true, relu)
                    };
                    let expected = code(a[lane]) << part_bits | code(b[lane]);
                    assert_eq!(found[lane], expected, "{format:?} {:e}", f32::from_bits(a[lane]));
                }
            };
            for _ in 0..4_000 {
                check(std::array::from_fn(|_| bits.next()));
                // Values between the bit patterns and on them.
                check(std::array::from_fn(|_| {
                    let code = bits.next();
                    let value = crate::number::decode(format, code);
                    let step = [0.0, 0.5, 0.25, -0.5][code as usize >> 8 & 3];
                    (value + step * value * 2f32.powi(-(code as i32 >> 10 & 3))).to_bits()
                }));
            }
        }
    }
}
