//! Arithmetic of F16 and BF16, scalar and packed.

use super::ieee;
use crate::decode::{ExtremumModifiers, FloatModifiers, FloatRounding};

/// The two half formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    F16,
    Bf16,
}

/// NaN result of operations in both formats.
pub(super) const NAN16: u16 = 0x7fff;

impl Half {
    /// Returns the value of a code.
    #[inline]
    pub(super) fn value(self, code: u16) -> f32 {
        match self {
            Half::Bf16 => f32::from_bits(u32::from(code) << 16),
            Half::F16 => {
                let magnitude = u32::from(code & 0x7fff);
                let scaled = if magnitude >= 0x7c00 {
                    f32::from_bits(0x7f80_0000 | (magnitude & 0x3ff) << 13)
                } else {
                    // Exponent biases differ by 112, also for subnormal numbers.
                    f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)
                };
                if code & 0x8000 == 0 { scaled } else { -scaled }
            }
        }
    }

    /// Rounds a value, exact or rounded to odd, to nearest even.
    #[inline]
    pub(super) fn code(self, value: f32) -> u16 {
        if value.is_nan() {
            return NAN16;
        }
        let bits = value.to_bits();
        match self {
            Half::Bf16 => {
                let rounded = bits + 0x7fff + (bits >> 16 & 1);
                (rounded >> 16) as u16
            }
            Half::F16 => {
                let sign = (bits >> 16 & 0x8000) as u16;
                let magnitude = bits & 0x7fff_ffff;
                if magnitude >= 0x4780_0000 {
                    // 65536 and above.
                    return sign | 0x7c00;
                }
                if magnitude < 0x3880_0000 {
                    // Below the normal numbers the step is 2^-24, which is the last bit of the sum.
                    let sum = f32::from_bits(magnitude) + 0.5;
                    return sign | (sum.to_bits() - 0x3f00_0000) as u16;
                }
                let rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
                sign | ((rounded >> 13) - (112 << 10)) as u16
            }
        }
    }

    /// Rounds a value toward zero.
    #[inline]
    pub(super) fn cut(self, bits: u32) -> u16 {
        let magnitude = bits & 0x7fff_ffff;
        if magnitude > 0x7f80_0000 {
            return NAN16;
        }
        let sign = (bits >> 16 & 0x8000) as u16;
        sign | match self {
            Half::Bf16 => (magnitude >> 16) as u16,
            // 65536 and above.
            Half::F16 if magnitude >= 0x4780_0000 => 0x7c00,
            // Below the normal numbers the step is 2^-24.
            Half::F16 if magnitude < 0x3880_0000 => {
                (f32::from_bits(magnitude) * 16_777_216.0) as u16
            }
            Half::F16 => ((magnitude >> 13) - (112 << 10)) as u16,
        }
    }

    /// Returns the code of infinity; all smaller codes are finite.
    #[inline]
    pub(super) fn infinity(self) -> u16 {
        match self {
            Half::F16 => 0x7c00,
            Half::Bf16 => 0x7f80,
        }
    }

    #[inline]
    fn is_nan(self, code: u16) -> bool {
        code & 0x7fff > self.infinity()
    }

    /// Flushes subnormal codes to zero.
    #[inline]
    fn flush(self, code: u16) -> u16 {
        let exponent = self.infinity();
        if code & exponent == 0 { code & 0x8000 } else { code }
    }

    #[inline]
    fn finish(self, code: u16, modifiers: FloatModifiers) -> u16 {
        let mut code = code;
        if modifiers.flush_subnormals {
            code = self.flush(code);
        }
        if modifiers.saturate {
            let one = if self == Half::F16 { 0x3c00 } else { 0x3f80 };
            code = if self.is_nan(code) || code & 0x8000 != 0 { 0 } else { code.min(one) };
        }
        if modifiers.relu && code & 0x8000 != 0 && !self.is_nan(code) {
            code = 0;
        }
        code
    }

    #[inline]
    fn operand(self, code: u16, modifiers: FloatModifiers) -> f32 {
        self.value(if modifiers.flush_subnormals { self.flush(code) } else { code })
    }

    /// `a + b`: 24 bits are enough for a correct second rounding to 11 or 8 bits.
    #[inline]
    pub(super) fn add(self, a: u16, b: u16, modifiers: FloatModifiers) -> u16 {
        let sum = self.operand(a, modifiers) + self.operand(b, modifiers);
        self.finish(self.code(sum), modifiers)
    }

    /// `a * b`.
    #[inline]
    pub(super) fn mul(self, a: u16, b: u16, modifiers: FloatModifiers) -> u16 {
        let (a, b) = (self.operand(a, modifiers), self.operand(b, modifiers));
        let product = match self {
            Half::F16 => a * b,
            Half::Bf16 => {
                // The product has 16 bits; only small products are inexact in binary32.
                let product = a * b;
                if product.abs() < 1e-30 {
                    odd_single(f64::from(a) * f64::from(b))
                } else {
                    product
                }
            }
        };
        self.finish(self.code(product), modifiers)
    }

    /// `a * b + c`.
    #[inline]
    pub(super) fn fma(self, a: u16, b: u16, c: u16, modifiers: FloatModifiers) -> u16 {
        let product = f64::from(self.operand(a, modifiers)) * f64::from(self.operand(b, modifiers));
        let c = f64::from(self.operand(c, modifiers));
        let (high, low) = ieee::two_sum(product, c);
        self.finish(self.code(odd_single(ieee::odd(high, low))), modifiers)
    }

    /// `min` or `max`.
    #[inline]
    pub(super) fn extremum(
        self,
        a: u16,
        b: u16,
        maximum: bool,
        modifiers: ExtremumModifiers,
    ) -> u16 {
        let (a, b) =
            if modifiers.flush_subnormals { (self.flush(a), self.flush(b)) } else { (a, b) };
        let sign = if modifiers.xor_sign { (a ^ b) & 0x8000 } else { 0 };
        let magnitudes = modifiers.xor_sign || modifiers.absolute;
        let keep = if magnitudes { 0x7fff } else { 0xffff };
        let (a, b) = (a & keep, b & keep);
        match (self.is_nan(a), self.is_nan(b)) {
            (false, false) => {
                let order = |code: u16| {
                    if code & 0x8000 == 0 { code | 0x8000 } else { !code }
                };
                let first = (order(a) > order(b)) == maximum;
                (if first { a } else { b }) | sign
            }
            (true, true) => NAN16,
            _ if modifiers.propagate_nan => NAN16,
            (true, false) => b | sign,
            (false, true) => a | sign,
        }
    }

    /// `abs` and `neg`.
    #[inline]
    pub(super) fn sign(self, code: u16, negate: bool, flush: bool) -> u16 {
        let code = if flush { self.flush(code) } else { code };
        match negate {
            _ if self.is_nan(code) => NAN16,
            true => code ^ 0x8000,
            false => code & 0x7fff,
        }
    }
}

/// Converts binary64 to binary32 with rounding to odd.
#[inline]
fn odd_single(value: f64) -> f32 {
    let nearest = value as f32;
    let back = f64::from(nearest);
    if back == value || !value.is_finite() {
        return nearest;
    }
    let bits = nearest.to_bits();
    let truncated = if back.abs() > value.abs() { bits - 1 } else { bits };
    f32::from_bits(truncated | 1)
}

/// Converts binary64 to binary32 with any rounding except stochastic.
pub(super) fn single_from_double(value: f64, rounding: FloatRounding) -> f32 {
    ieee::to_single(value, 0.0, rounding)
}

/// Applies a function to both halves.
#[inline]
pub(super) fn pair1(a: u32, f: impl Fn(u16) -> u16) -> u32 {
    u32::from(f(a as u16)) | u32::from(f((a >> 16) as u16)) << 16
}

/// Applies a function to both halves of two words.
#[inline]
pub(super) fn pair2(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

/// Applies a function to both halves of three words.
#[inline]
pub(super) fn pair3(a: u32, b: u32, c: u32, f: impl Fn(u16, u16, u16) -> u16) -> u32 {
    let low = f(a as u16, b as u16, c as u16);
    let high = f((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16);
    u32::from(low) | u32::from(high) << 16
}
