//! Transcendental functions in `f32` that the compiler can vectorize within a loop.
//!
//! The functions use no branch, no table and no fused multiply-add, so a call in a loop is the same
//! arithmetic in every lane, and every SIMD level returns the same bits. The functions are
//! `#[inline(always)]`: call them from code that runs under `pulp::Arch::dispatch`.

/// `1.5 * 2^23`: adding this constant to a number below 2^22 rounds the number to an integer, which
/// is then in the low bits of the sum.
const ROUND_TO_INTEGER: f32 = 12_582_912.0;

/// The upper part of ln 2, short enough (9 bits) for an exact product with an integer up to 2^15.
const LN_2_UPPER: f32 = 355.0 / 512.0;
/// ln 2 minus [`LN_2_UPPER`].
const LN_2_LOWER: f32 = -2.121_944_4e-4;

/// `(e^r - 1 - r) / r^2` as a polynomial in `r`, lowest power first: fitted over `|r| <= ln(2) / 2`
/// for the least maximum relative error of `e^r`, 3.6e-9 after rounding to `f32`. (A Taylor
/// polynomial of the same degree has 1e-7.)
const TAIL: [f32; 5] = [0.499_999_94, 0.166_665_21, 0.041_668_39, 0.008_368_745, 0.001_381_453_9];

/// `2^exponent` for an exponent in `-126..=127`.
#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits((exponent.wrapping_add(127) as u32) << 23)
}

/// e to the power `x`.
///
/// Method: `x = n ln 2 + r` with an integer `n` and `|r| <= ln(2) / 2`, where `n ln 2` is
/// subtracted in two parts (Cody and Waite) so that `r` stays exact to its last bits; then a
/// polynomial of degree 6 in `r`; then `2^n` as the product of two powers, so that subnormal and
/// overflowing results are correct.
///
/// The error is at most 2 units in the last place of the exact result (the tests find 0.93 over
/// normal results); results below 2^-126 are rounded to the subnormal grid. `x > 88.73` gives
/// infinity, `x < -103.98` zero, NaN stays NaN.
///
/// ```
/// use deepwell_kernels::cpu::vector_math::exp;
///
/// assert_eq!(exp(0.0), 1.0);
/// assert_eq!(exp(f32::NEG_INFINITY), 0.0);
/// assert_eq!(exp(f32::INFINITY), f32::INFINITY);
/// ```
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Beyond these bounds the result is zero or infinite, and `n` must stay a small integer.
    // Comparisons in this direction keep NaN.
    let x = if x < -105.0 { -105.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };

    let shifted = x * std::f32::consts::LOG2_E + ROUND_TO_INTEGER;
    let n_float = shifted - ROUND_TO_INTEGER;
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND_TO_INTEGER.to_bits() as i32);
    let r = (x - n_float * LN_2_UPPER) - n_float * LN_2_LOWER;

    let mut tail = TAIL[4];
    tail = tail * r + TAIL[3];
    tail = tail * r + TAIL[2];
    tail = tail * r + TAIL[1];
    tail = tail * r + TAIL[0];
    // The large terms are added last: 1 + (r + r^2 tail) rounds once at the size of the result.
    let value = 1.0 + (r + (r * r) * tail);

    let half = n >> 1;
    value * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// The logistic function `1 / (1 + e^-x)`.
///
/// The error is at most 4 units in the last place of the exact result down to `x = -87`. Below
/// `-88.73`, where the exact result is under 2^-127, the function returns zero. NaN stays NaN.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `Φ(-a) / (e^(-a²/2) t)` with `t = 1 / (1 + a / 4)` as a polynomial in `t`, lowest power first:
/// fitted over `0 <= a <= 14.6` for the least maximum relative error, 8.7e-9 before rounding to
/// `f32`. The quotient lies between 0.0997 and 0.5.
const NORMAL_TAIL: [f32; 10] = [
    0.099_746_04,
    0.099_526_73,
    0.095_246_01,
    0.073_199_98,
    0.083_330_42,
    0.018_671_175,
    0.021_520_715,
    0.056_673_307,
    -0.064_865_86,
    0.016_951_472,
];

/// The distribution function of the standard normal, `Φ(x)`, and `e^(-x²/2)`.
///
/// Method: `Φ(-|x|)` is a polynomial times the exponential, so that small results keep their bits;
/// a positive `x` gives one minus this.
///
/// The relative error of both is at most `(12 + x²) 2^-24` while the results are normal numbers:
/// down to `x = -12.9` and for `|x| <= 13.2`. Farther out the exponential and the tail of `Φ` go to
/// zero.
#[inline(always)]
pub fn normal_cdf(x: f32) -> (f32, f32) {
    let a = x.abs();
    let e = exp(-0.5 * (a * a));
    let t = 1.0 / (1.0 + 0.25 * a);
    let mut quotient = NORMAL_TAIL[9];
    quotient = quotient * t + NORMAL_TAIL[8];
    quotient = quotient * t + NORMAL_TAIL[7];
    quotient = quotient * t + NORMAL_TAIL[6];
    quotient = quotient * t + NORMAL_TAIL[5];
    quotient = quotient * t + NORMAL_TAIL[4];
    quotient = quotient * t + NORMAL_TAIL[3];
    quotient = quotient * t + NORMAL_TAIL[2];
    quotient = quotient * t + NORMAL_TAIL[1];
    quotient = quotient * t + NORMAL_TAIL[0];
    let tail = e * (t * quotient);
    (if x < 0.0 { tail } else { 1.0 - tail }, e)
}

/// The logistic function of `x` and of `-x`, each to full precision; `1 - sigmoid(x)` would lose
/// bits.
///
/// The error is at most 4 units in the last place of the exact results as long as these are normal
/// numbers; NaN stays NaN.
#[inline(always)]
pub fn sigmoid_pair(x: f32) -> (f32, f32) {
    let e = exp(-x.abs());
    let large = 1.0 / (1.0 + e);
    let small = e * large;
    if x < 0.0 { (small, large) } else { (large, small) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance to `exact` in units in the last place of the `f32` nearest to it.
    fn error_ulp(got: f32, exact: f64) -> f64 {
        let nearest = (exact.abs() as f32).max(f32::MIN_POSITIVE);
        let ulp = f64::from(f32::from_bits(nearest.to_bits() + 1)) - f64::from(nearest);
        (f64::from(got) - exact).abs() / ulp
    }

    /// Every 1009th number of both signs (about 4.2 million) in a range.
    fn sampled(range: std::ops::RangeInclusive<f32>) -> impl Iterator<Item = f32> {
        (0..=u32::MAX).step_by(1009).map(f32::from_bits).filter(move |x| range.contains(x))
    }

    #[test]
    fn exp_is_within_two_ulp() {
        let mut worst = (0.0, 0.0);
        for x in sampled(-87.3..=88.7) {
            let error = error_ulp(exp(x), f64::from(x).exp());
            if error > worst.0 {
                worst = (error, x);
            }
        }
        eprintln!("exp: at most {} ulp, at {}", worst.0, worst.1);
        assert!(worst.0 <= 2.0, "{} ulp at {}", worst.0, worst.1);
    }

    #[test]
    fn exp_rounds_small_results_to_the_subnormal_grid() {
        for x in sampled(-104.0..=-87.3) {
            let exact = f64::from(x).exp();
            let distance = (f64::from(exp(x)) - exact).abs();
            // Two ulp from the normal arithmetic, then one rounding to a multiple of 2^-149.
            let allowed = exact * 2f64.powi(-22) + 2f64.powi(-150) * 1.0001;
            assert!(distance <= allowed, "exp({x}) is off by {distance}");
        }
    }

    #[test]
    fn exp_at_the_edges() {
        for (x, expected) in [
            (0.0, 1.0),
            (-0.0, 1.0),
            (f32::MIN_POSITIVE, 1.0),
            (-f32::MIN_POSITIVE, 1.0),
            (f32::from_bits(1), 1.0),
            (88.73, f32::INFINITY),
            (1e30, f32::INFINITY),
            (f32::INFINITY, f32::INFINITY),
            (-104.1, 0.0),
            (-1e30, 0.0),
            (f32::NEG_INFINITY, 0.0),
        ] {
            assert_eq!(exp(x), expected, "exp({x})");
        }
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-f32::NAN).is_nan());
        assert!(exp(88.72).is_finite());
    }

    #[test]
    fn exp_does_not_decrease() {
        let mut before = 0.0;
        for step in 0..=400_000 {
            let value = exp(-110.0 + step as f32 * 5e-4);
            // Two neighbours may each be wrong by 2 ulp in opposite directions, but not by more.
            assert!(f64::from(value) >= f64::from(before) * (1.0 - 5e-7), "at step {step}");
            before = value;
        }
    }

    #[test]
    fn sigmoid_is_within_four_ulp() {
        let mut worst = (0.0, 0.0);
        for x in sampled(-87.0..=120.0) {
            let exact = 1.0 / (1.0 + (-f64::from(x)).exp());
            let error = error_ulp(sigmoid(x), exact);
            if error > worst.0 {
                worst = (error, x);
            }
        }
        eprintln!("sigmoid: at most {} ulp, at {}", worst.0, worst.1);
        assert!(worst.0 <= 4.0, "{} ulp at {}", worst.0, worst.1);
        assert_eq!(sigmoid(f32::INFINITY), 1.0);
        assert_eq!(sigmoid(f32::NEG_INFINITY), 0.0);
        assert_eq!(sigmoid(0.0), 0.5);
        assert!(sigmoid(f32::NAN).is_nan());
    }

    #[test]
    fn normal_cdf_is_as_close_as_it_says() {
        let bound = |x: f32| (12.0 + f64::from(x).powi(2)) * 2f64.powi(-24);
        let mut worst = (0.0, 0.0);
        for x in sampled(-12.9..=13.2) {
            let (cdf, e) = normal_cdf(x);
            let exact =
                crate::ops::gelu::oracle::erfc(-f64::from(x) / std::f64::consts::SQRT_2) / 2.0;
            let error = (f64::from(cdf) / exact - 1.0).abs() / bound(x);
            if error > worst.0 {
                worst = (error, x);
            }
            let exact = (-f64::from(x).powi(2) / 2.0).exp();
            assert!((f64::from(e) / exact - 1.0).abs() <= bound(x), "e^(-x²/2) at {x}");
        }
        eprintln!("normal_cdf: at most {} of the bound, at {}", worst.0, worst.1);
        assert!(worst.0 <= 1.0, "{} of the bound at {}", worst.0, worst.1);
        for (x, expected) in [
            (f32::INFINITY, (1.0, 0.0)),
            (f32::NEG_INFINITY, (0.0, 0.0)),
            (1e30, (1.0, 0.0)),
            (-15.0, (0.0, 0.0)),
        ] {
            assert_eq!(normal_cdf(x), expected, "{x}");
        }
        assert!(normal_cdf(f32::NAN).0.is_nan());
    }

    #[test]
    fn sigmoid_pairs_are_within_four_ulp() {
        for x in sampled(-87.0..=87.0) {
            let (of_x, of_minus_x) = sigmoid_pair(x);
            for (got, x) in [(of_x, x), (of_minus_x, -x)] {
                let error = error_ulp(got, 1.0 / (1.0 + (-f64::from(x)).exp()));
                assert!(error <= 4.0, "{error} ulp at {x}");
            }
        }
        assert_eq!(sigmoid_pair(f32::INFINITY), (1.0, 0.0));
        assert_eq!(sigmoid_pair(f32::NEG_INFINITY), (0.0, 1.0));
        assert!(sigmoid_pair(f32::NAN).0.is_nan());
    }
}
