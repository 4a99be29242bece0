//! GELU, with the normal distribution and in the tanh form.

use std::f64::consts::{FRAC_2_SQRT_PI, PI, SQRT_2};

/// Coefficient of the cube in the tanh form.
const CUBIC: f64 = 0.044715;

/// The complementary error function, with a relative error of about 1e-13; zero beyond 27.3.
pub fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    if x < 2.0 {
        // erf x = 2 / sqrt(pi) e^(-x^2) sum of 2^n x^(2n+1) / (1 3 5 ... (2n+1)): all terms have
        // the same sign (Abramowitz and Stegun, 7.1.6).
        let (mut term, mut sum) = (x, x);
        for n in 1..100 {
            term *= 2.0 * x * x / f64::from(2 * n + 1);
            sum += term;
        }
        return 1.0 - FRAC_2_SQRT_PI * (-x * x).exp() * sum;
    }
    // sqrt(pi) e^(x^2) erfc x = 1 / (x + (1/2) / (x + 1 / (x + (3/2) / (x + ...)))), evaluated
    // from the inside (7.1.14).
    let mut tail = x;
    for n in (1..=100).rev() {
        tail = x + f64::from(n) / 2.0 / tail;
    }
    (-x * x).exp() / (PI.sqrt() * tail)
}

/// The distribution function of the standard normal.
fn normal_cdf(x: f64) -> f64 {
    erfc(-x / SQRT_2) / 2.0
}

/// The density of the standard normal.
fn normal_density(x: f64) -> f64 {
    (-x * x / 2.0).exp() / (2.0 * PI).sqrt()
}

fn tanh_argument(x: f64) -> f64 {
    (2.0 / PI).sqrt() * (x + CUBIC * x * x * x)
}

/// `(1 + tanh u) / 2`, accurate also for tanh close to -1.
fn half_tanh(u: f64) -> f64 {
    1.0 / (1.0 + (-2.0 * u).exp())
}

/// `x * cdf(x)`, element by element; with `tanh`,
/// `x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
pub fn forward(x: &[f64], tanh: bool) -> Vec<f64> {
    let value = |x: f64| if tanh { half_tanh(tanh_argument(x)) } else { normal_cdf(x) };
    x.iter().map(|&x| x * value(x)).collect()
}

/// The gradient of `x` for `dy`.
pub fn backward(dy: &[f64], x: &[f64], tanh: bool) -> Vec<f64> {
    let slope = |x: f64| {
        if tanh {
            let u = tanh_argument(x);
            let du = (2.0 / PI).sqrt() * (1.0 + 3.0 * CUBIC * x * x);
            // The derivative of s = (1 + tanh u) / 2 is 2 s (1 - s).
            half_tanh(u) * (1.0 + x * 2.0 * half_tanh(-u) * du)
        } else {
            normal_cdf(x) + x * normal_density(x)
        }
    };
    dy.iter().zip(x).map(|(dy, &x)| dy * slope(x)).collect()
}

#[cfg(test)]
mod tests {
    use approx::{assert_abs_diff_eq, assert_relative_eq};

    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn erfc_of_the_tables() {
        // Abramowitz and Stegun, tables 7.1 and 7.2, and the known digits of erfc.
        for (x, expected) in [
            (0.0, 1.0),
            (0.5, 0.479_500_122_186_953_5),
            (1.0, 0.157_299_207_050_285_13),
            (2.0, 4.677_734_981_047_266e-3),
            (3.0, 2.209_049_699_858_544e-5),
            (5.0, 1.537_459_794_428_035e-12),
            (10.0, 2.088_487_583_762_545e-45),
            (-1.0, 1.842_700_792_949_715),
        ] {
            let got = erfc(x);
            assert_relative_eq!(got, expected, epsilon = 0.0, max_relative = 2e-14);
        }
        // Both branches at their boundary.
        let (below, above) = (erfc(2.0 - 1e-12), erfc(2.0));
        assert_relative_eq!(below, above, epsilon = 0.0, max_relative = 1e-11);
    }

    #[test]
    fn backward_agrees_with_finite_differences() {
        let mut x = varied(20, 1);
        x.extend([-9.0, -2.9, -0.75, 0.0, 1.4, 6.0]);
        let dy = varied(x.len(), 2);
        for tanh in [false, true] {
            let dx = backward(&dy, &x, tanh);
            check("dx", &x, &dx, |x| dot(&forward(x, tanh), &dy));
        }
    }

    #[test]
    fn both_forms_by_hand_and_close_to_each_other() {
        // Φ(1) = 0.841344746068543.
        let exact = forward(&[1.0, -1.0], false);
        assert_abs_diff_eq!(exact[0], 0.841_344_746_068_543, epsilon = 1e-14);
        assert_abs_diff_eq!(exact[1], -0.158_655_253_931_457, epsilon = 1e-14);
        // The tanh form approximates the other form to 5e-4.
        let x: Vec<f64> = (-600..=600).map(|i| f64::from(i) / 100.0).collect();
        for ((x, exact), tanh) in x.iter().zip(forward(&x, false)).zip(forward(&x, true)) {
            assert!((exact - tanh).abs() < 5e-4, "{x}: {exact} {tanh}");
        }
    }
}
