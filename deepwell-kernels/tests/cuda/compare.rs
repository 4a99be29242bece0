//! Outputs of kernels beside references in f64.
//!
//! Each element has to be within its bound. A scale error hides below such bounds where they are
//! wide: 1 % of attention's dq is within the rounding of probabilities. So the output as a whole
//! must have the size of the reference. With the reference `r`, the output `o` and the bounds `b`
//! as weights `w = 1/b²`, that is the projection
//!
//! ```text
//! α = Σ w o r / Σ w r²,   α − 1 = Σ w r d / Σ w r²   with   d = o − r
//! ```
//!
//! the estimate of a common factor that has the least variance where errors are independent and as
//! large as their bounds. Errors of rounding to nearest have no sign of their own and |d| ≤ b:
//! by Hoeffding's inequality |α − 1| is above `Z / S`, `S² = Σ (r/b)²`, with a probability of at
//! most 2 exp(−Z²/2). For n numbers that are rounded to BF16 and nothing else, b = 2^-8 |r| and
//! `S = 2^8 √n`: with [`Z`] a hundred numbers tell 0.24 %, ten thousand 0.024 %, to which
//! [`SYSTEMATIC`] comes.
//!
//! Errors of elements are not independent where one rounding goes into several of them: a row's
//! statistics, a probability. But a bound adds the worst cases of all the roundings that an element
//! takes, and random ones come to the root of that sum.
//!
//! The errors that are left, `d / b`, are uniform at most: their squares have a mean of at most a
//! third, and by the same inequality their sum is below `n/3 + 3 √n` but for a probability of
//! exp(−18).
//!
//! Each comparison is made again with the output times 1.01 and has to fail; [`Compared`] knows
//! whether it did, and [`summary`] how many could not tell: outputs of few elements, or ones that
//! are not known better than that.

use std::sync::atomic::{AtomicUsize, Ordering};

use deepwell_trials::note;

/// Standard deviations, or more, that the projection may be off: for a million comparisons the
/// chance that a right one fails is below 4 %.
const Z: f64 = 6.0;
/// What errors that are not independent may come to: exponentials, roots and reciprocals of the
/// hardware (2^-20 each), sums in FP32 that tensor cores cut (2^-23 of the magnitudes a step), and
/// most of all roundings to BF16 of few different numbers. GELU's 401,000 outputs are those of some
/// 400 inputs for the most part, which have 2^-8 / √(3 · 400) = 2^-13.1 in common (2^-13.7 was
/// seen); six times that is below 2^-10.
const SYSTEMATIC: f64 = 1.0 / 1024.0;
/// The scale error that a comparison is tried with.
const PLANTED: f64 = 1.01;
/// Elements that are not zero from which on [`Compared::must_tell`] insists.
const ENOUGH: usize = 256;

static TOLD: AtomicUsize = AtomicUsize::new(0);
static UNTOLD: AtomicUsize = AtomicUsize::new(0);

/// Largest allowed distance from the reference: `absolute + relative · |expected|`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    pub(crate) absolute: f64,
    pub(crate) relative: f64,
}

/// For sums of integers.
pub(crate) const EXACT: Tolerance = Tolerance { absolute: 0.0, relative: 0.0 };

impl Tolerance {
    /// One rounding to BF16 (2^-9 of the value), and `absolute` for what cancels.
    pub(crate) fn bf16(absolute: f64) -> Tolerance {
        Tolerance { absolute, relative: 1.0 / 256.0 }
    }

    fn bound(self, expected: f64) -> f64 {
        self.absolute + self.relative * expected.abs()
    }
}

/// An output that was accepted.
#[derive(Debug)]
pub(crate) struct Compared {
    what: String,
    /// Whether 1.01 times the output would have been refused.
    tells: bool,
    /// Elements of the reference that are neither zero nor infinite nor NaN.
    elements: usize,
}

impl Compared {
    /// Fails where a scale error of 1 % could not have been told, unless the output is small.
    pub(crate) fn must_tell(self) {
        let Compared { what, tells, elements } = self;
        assert!(
            tells || elements < ENOUGH,
            "{what}: 1.01 times these {elements} elements would pass as well; tighten the bounds"
        );
    }
}

/// How many comparisons could tell a planted scale error.
pub(crate) fn summary() -> String {
    let (told, untold) = (TOLD.load(Ordering::Relaxed), UNTOLD.load(Ordering::Relaxed));
    format!("1.01 times the output is refused by {told} comparisons, {untold} cannot tell")
}

/// Compares with a reference; equal NaNs and infinities are equal.
pub(crate) fn assert_close(
    what: &str,
    got: &[f64],
    expected: &[f64],
    tolerance: Tolerance,
) -> Compared {
    assert_biased(what, got, expected, tolerance, 0.0)
}

/// [`assert_close`] for a kernel whose errors have something in common: they make the output as a
/// whole larger or smaller by `bias` at most.
pub(crate) fn assert_biased(
    what: &str,
    got: &[f64],
    expected: &[f64],
    tolerance: Tolerance,
    bias: f64,
) -> Compared {
    let bounds: Vec<f64> = expected.iter().map(|&expected| tolerance.bound(expected)).collect();
    assert_biased_within(what, got, expected, &bounds, bias)
}

/// [`assert_close`] with a bound for each element.
pub(crate) fn assert_within(what: &str, got: &[f64], expected: &[f64], bounds: &[f64]) -> Compared {
    assert_biased_within(what, got, expected, bounds, 0.0)
}

/// [`assert_biased`] with a bound for each element.
pub(crate) fn assert_biased_within(
    what: &str,
    got: &[f64],
    expected: &[f64],
    bounds: &[f64],
    bias: f64,
) -> Compared {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    assert_eq!(bounds.len(), expected.len(), "{what}: bounds");
    let bias = bias + SYSTEMATIC;
    if let Some(fault) = fault(got.iter().copied(), expected, bounds, bias) {
        panic!("{what}: {fault}");
    }
    let tells = fault(got.iter().map(|x| PLANTED * x), expected, bounds, bias).is_some();
    let elements = expected.iter().filter(|x| x.is_finite() && **x != 0.0).count();
    if elements > 0 {
        if tells { &TOLD } else { &UNTOLD }.fetch_add(1, Ordering::Relaxed);
    }
    if elements > 0 && !tells {
        note(|| format!("{what}: 1.01 times these {elements} elements would pass as well"));
    }
    Compared { what: what.to_string(), tells, elements }
}

/// What is wrong with an output.
fn fault(
    got: impl Iterator<Item = f64>,
    expected: &[f64],
    bounds: &[f64],
    bias: f64,
) -> Option<String> {
    let mut worst: Option<(usize, f64, f64)> = None;
    // Over elements with errors: how many, Σ (r/b)², Σ r d / b², Σ (d/b)².
    let (mut count, mut weight, mut product, mut squares) = (0.0, 0.0, 0.0, 0.0);
    for (index, ((got, &r), &bound)) in got.zip(expected).zip(bounds).enumerate() {
        if got == r && bound == 0.0 || got.is_nan() && r.is_nan() || got == r && r.is_infinite() {
            continue;
        }
        let d = got - r;
        let excess = d.abs() - bound;
        let excess = if excess.is_nan() { f64::INFINITY } else { excess };
        if excess > 0.0 {
            if worst.is_none_or(|(_, _, known)| excess > known) {
                worst = Some((index, got, excess));
            }
            continue;
        }
        let (r, d) = (r / bound, d / bound);
        count += 1.0;
        weight += r * r;
        product += r * d;
        squares += d * d;
    }
    if let Some((index, got, _)) = worst {
        let (count, expected, bound) = (expected.len(), expected[index], bounds[index]);
        return Some(format!("element {index} of {count} is {got}, expected {expected} ± {bound}"));
    }
    let (off, allowed) = (product / weight, bias + Z / weight.sqrt());
    if weight > 0.0 && off.abs() > allowed {
        let factor = 1.0 + off;
        return Some(format!(
            "the output is {factor:.6} times the reference as a whole, expected 1 ± {allowed:.2e} \
             for {count} elements with errors of random sign"
        ));
    }
    let most = count / 3.0 + 3.0 * f64::sqrt(count);
    (squares > most).then(|| {
        let (got, expected) = ((squares / count).sqrt(), (most / count).sqrt());
        format!("errors are {got:.3} of their bounds in the mean, expected {expected:.3} at most")
    })
}

trial!(a_scale_error_is_found_where_elements_do_not_show_it);
fn a_scale_error_is_found_where_elements_do_not_show_it() {
    use crate::harness::uniform;
    let wide = |values: Vec<f32>| -> Vec<f64> { values.into_iter().map(f64::from).collect() };
    let expected = wide(uniform(20_000, 1, 1.0));
    let noise = wide(uniform(20_000, 2, 1.0));
    let bounds = vec![0.05; 20_000];
    // The scale, the share of the bounds that errors take, and what is found.
    for (scale, share, words) in [
        (1.0, 0.9, None),
        (1.01, 0.5, Some("times the reference as a whole")),
        (0.99, 0.5, Some("times the reference as a whole")),
        (1.0, 1.0, None),
        (1.0, 1.1, Some("element")),
    ] {
        let got = expected.iter().zip(&noise).map(|(x, noise)| scale * x + share * 0.05 * noise);
        let found = fault(got, &expected, &bounds, 0.0);
        let fits = match (&found, words) {
            (None, None) => true,
            (Some(found), Some(words)) => found.contains(words),
            _ => false,
        };
        assert!(fits, "{scale} {share}: {found:?}, expected {words:?}");
    }
    // Errors of either sign that are all as large as allowed.
    let got = expected.iter().enumerate().map(|(i, x)| x + if i % 2 == 0 { 0.05 } else { -0.05 });
    let found = fault(got, &expected, &[0.050001; 20_000], 0.0).unwrap_or_default();
    assert!(found.contains("of their bounds in the mean"), "{found}");
    // A single number tells no more than its bound.
    let compared = assert_within("one", &[1.001], &[1.0], &[0.004]);
    assert!(compared.tells && compared.elements == 1);
    assert!(!assert_within("one", &[1.001], &[1.0], &[0.02]).tells);
    // What is not finite must be the same, and says nothing of the rest.
    let odd = [f64::NAN, f64::INFINITY, 0.0];
    assert_eq!(assert_within("odd", &odd, &odd, &[0.0; 3]).elements, 0);
    assert!(fault([1.0].into_iter(), &[f64::NAN], &[1.0], 0.0).is_some());
    assert!(fault([f64::NAN].into_iter(), &[1.0], &[1.0], 0.0).is_some());
    assert!(fault([f64::INFINITY].into_iter(), &[-f64::INFINITY], &[1.0], 0.0).is_some());
}
