//! Rounding to BF16 by definition, for tests of kernels with rounded inputs.

/// Returns the BF16 number nearest to `x`, ties to even, as `f64`: 8 significant bits, exponents
/// from -126 to 127, subnormals in steps of 2^-133.
///
/// The gradient passes unchanged.
pub fn round_to_bf16(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exponent = (x.abs().log2().floor() as i32).clamp(-126, 127);
    // `log2` may err by one at a power of two; the quotient then is out of range.
    let exponent = match x.abs() / 2f64.powi(exponent) {
        q if q >= 2.0 => (exponent + 1).min(127),
        q if q < 1.0 => (exponent - 1).max(-126),
        _ => exponent,
    };
    let step = 2f64.powi(exponent - 7);
    let rounded = (x / step).round_ties_even() * step;
    // Values from half a step beyond the largest number, 255 * 2^120, round to infinity.
    if rounded.abs() > 255.0 * 2f64.powi(120) { f64::INFINITY.copysign(x) } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn keeps_every_code_and_rounds_between_them() {
        for bits in 0..0x7f7f {
            let low = f64::from(bf16::from_bits(bits));
            let high = f64::from(bf16::from_bits(bits + 1));
            let even = if bits % 2 == 0 { low } else { high };
            for (x, expected) in [
                (low, low),
                (0.75 * low + 0.25 * high, low),
                (0.5 * low + 0.5 * high, even),
                (0.25 * low + 0.75 * high, high),
            ] {
                assert_eq!(round_to_bf16(x), expected, "{x:e}");
                assert_eq!(round_to_bf16(-x), -expected, "{x:e}");
            }
        }
        let largest = f64::from(bf16::MAX);
        assert_eq!(round_to_bf16(largest), largest);
        assert_eq!(round_to_bf16(largest * 1.003), f64::INFINITY);
        assert_eq!(round_to_bf16(-1e300), f64::NEG_INFINITY);
        assert!(round_to_bf16(f64::NAN).is_nan());
    }
}
