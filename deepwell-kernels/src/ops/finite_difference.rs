//! Central finite differences, the check of every backward oracle.

use deepwell_precision::random::XorShift64;

/// Returns the gradient of `loss` at `x`, by one central difference per element.
///
/// The step is 6e-6 of each element's size (at least of 1): the cube root of `f64`'s rounding unit,
/// where rounding and truncation errors are equal, about 1e-10 for functions of moderate curvature.
pub fn gradient(x: &[f64], mut loss: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
    let mut moved = x.to_vec();
    (0..x.len())
        .map(|index| {
            let step = 6e-6 * x[index].abs().max(1.0);
            moved[index] = x[index] + step;
            let above = loss(&moved);
            moved[index] = x[index] - step;
            let below = loss(&moved);
            moved[index] = x[index];
            (above - below) / (2.0 * step)
        })
        .collect()
}

/// Compares an analytic gradient with [`gradient`].
///
/// # Panics
///
/// If an element differs by more than `tolerance` times the largest element (at least 1); the
/// message names the element.
#[track_caller]
pub fn check(name: &str, x: &[f64], analytic: &[f64], loss: impl FnMut(&[f64]) -> f64) {
    // Truncation and rounding errors are about 1e-10. 1e-7 leaves room for sums of many terms and
    // is far below the effect of a wrong term in a formula.
    const TOLERANCE: f64 = 1e-7;
    let numeric = gradient(x, loss);
    assert_eq!(analytic.len(), numeric.len(), "`{name}` has the wrong length");
    let size = numeric.iter().fold(1.0, |size: f64, g| size.max(g.abs()));
    for (index, (&analytic, &numeric)) in analytic.iter().zip(&numeric).enumerate() {
        assert!(
            (analytic - numeric).abs() <= TOLERANCE * size,
            "`{name}`[{index}]: formula {analytic:e}, finite difference {numeric:e}"
        );
    }
}

/// The sum of `a * b`: turns a tensor into a scalar loss with gradient `b`.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Returns `len` numbers in `-1..1` without a pattern that a test could match by accident.
pub fn varied(len: usize, seed: u64) -> Vec<f64> {
    let mut random = XorShift64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d);
    (0..len).map(|_| (random.draw() >> 11) as f64 / (1u64 << 52) as f64 - 1.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_gradient_of_a_cubic() {
        let x = [0.5, -2.0, 100.0];
        let analytic: Vec<f64> = x.iter().map(|x| 3.0 * x * x).collect();
        check("cubic", &x, &analytic, |x| x.iter().map(|x| x * x * x).sum());
    }

    #[test]
    #[should_panic(expected = "`cubic`[1]")]
    fn notices_a_wrong_gradient() {
        check("cubic", &[1.0, 1.0], &[3.0, 3.001], |x| x.iter().map(|x| x * x * x).sum());
    }
}
